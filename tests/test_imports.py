"""The rules between modules: who may import whom, which modules do no input or output, and how long a file may be."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "protocol": {"protocol"},
    "dht": {"protocol", "dht"},
    "optim": {"protocol", "optim"},
    "peer": {"protocol", "dht", "optim", "peer"},
}
# The modules of protocol and dht that meet the world. All others are sans-IO: bytes, messages, times and random
# numbers come in as arguments, and bytes, messages and decisions go out.
SHELLS = {
    "protocol/agreement.py",
    "protocol/attempt.py",
    "protocol/attempts.py",
    "protocol/awake.py",
    "protocol/background.py",
    "protocol/blocking.py",
    "protocol/channel.py",
    "protocol/channels.py",
    "protocol/connection.py",
    "protocol/contribution.py",
    "protocol/courtesy.py",
    "protocol/dialer.py",
    "protocol/endpoint.py",
    "protocol/forks.py",
    "protocol/gather_transfer.py",
    "protocol/identity.py",
    "protocol/introduction.py",
    "protocol/lane.py",
    "protocol/lanes.py",
    "protocol/leadership.py",
    "protocol/links.py",
    "protocol/member.py",
    "protocol/memory.py",
    "protocol/mesh.py",
    "protocol/metering.py",
    "protocol/news.py",
    "protocol/operation.py",
    "protocol/operations.py",
    "protocol/portmap.py",
    "protocol/punch.py",
    "protocol/reachability.py",
    "protocol/relay.py",
    "protocol/results.py",
    "protocol/rivals.py",
    "protocol/rounds.py",
    "protocol/sessions.py",
    "protocol/signatures.py",
    "protocol/standalone.py",
    "protocol/stream.py",
    "protocol/swap.py",
    "protocol/tcp.py",
    "protocol/transfer.py",
    "protocol/upnp.py",
    "protocol/watch.py",
    "dht/neighbours.py",
    "dht/node.py",
    "dht/service.py",
}
WORLD = {"trio", "socket", "time", "datetime", "random", "secrets", "os", "io", "pathlib", "threading", "subprocess"}
MOST_LINES = 600


def modules(*folders: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[str]:
    """The full names of the modules that a syntax tree imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module


def only_names_the_generator(tree: ast.AST) -> bool:
    """Whether `random` is used for the type of a generator that is passed in, and for nothing else."""
    uses = [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "random"]
    return set(uses) == {"Random"}


@pytest.mark.parametrize("module", modules(*MAY_IMPORT))
def test_imports_go_one_way(module):
    allowed = MAY_IMPORT[module.partition("/")[0]]
    tops = {name.partition(".")[0] for name in imported(ast.parse((ROOT / module).read_text()))}
    assert tops & set(MAY_IMPORT) <= allowed


@pytest.mark.parametrize("module", sorted({*modules("protocol", "dht")} - SHELLS))
def test_core_does_no_input_or_output(module):
    tree = ast.parse((ROOT / module).read_text())
    used = {name.partition(".")[0] for name in imported(tree)} & WORLD
    if used == {"random"}:
        assert only_names_the_generator(tree)
    else:
        assert not used


@pytest.mark.parametrize("module", modules("optim"))
def test_optimizers_know_no_network(module):
    tops = {name.partition(".")[0] for name in imported(ast.parse((ROOT / module).read_text()))}
    assert not tops & {"trio", "socket", "asyncio"}


@pytest.mark.parametrize("module", modules(*MAY_IMPORT, "scripts", "tests"))
def test_file_has_one_topic(module):
    assert len((ROOT / module).read_text().splitlines()) <= MOST_LINES

"""Whatever a user gets wrong ends in one clear line, a hint, the right exit code, and nothing lost."""

import attrs
import pytest
import trio

from peer import open_swarm
from peer.home import Home
from peer.manifest import Manifest
from peer.settings import RunSettings, Settings
from peer.text import from_base32, to_base32
from peer.ticket import PREFIX, Ticket, _checksum
from protocol.errors import RequestRefused
from protocol.identity import Identity, PeerId
from protocol.tcp import TcpTransport
from protocol.transport import Address

pytestmark = pytest.mark.processes

ANYWHERE = ("--listen", "127.0.0.1:0")


@pytest.fixture
async def taken():
    """An address that somebody listens on, who never answers."""
    listener = await TcpTransport().listen(Address("127.0.0.1", 0))
    yield listener.address
    await listener.aclose()


@pytest.fixture
async def vacant(taken):
    """An address that nobody listens on."""
    listener = await TcpTransport().listen(Address("127.0.0.1", 0))
    await listener.aclose()
    await trio.lowlevel.checkpoint()
    return listener.address


@pytest.fixture
def ticket(vacant):
    return Ticket(bytes(32), ((PeerId(b"p" * 32), vacant),))


def of_another_version(ticket):
    data = bytearray(from_base32(ticket.encode().removeprefix(PREFIX))[4:])
    data[0] += 1
    return PREFIX + to_base32(_checksum(bytes(data)) + bytes(data))


def contents(directory):
    """All files below a directory, but for those of a daemon's work."""
    skipped = ("lock", "status.json")
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name not in skipped}


def mistyped(text):
    return text[:20] + ("a" if text[20] != "a" else "b") + text[21:]


@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        (lambda ticket: "shoal", 2, "not a ticket"),
        (lambda ticket: mistyped(ticket.encode()), 2, "checksum"),
        (lambda ticket: ticket.encode()[:-3], 2, ""),
        (lambda ticket: attrs.evolve(ticket, expires=1e9).encode(), 4, "expired"),
        (of_another_version, 2, "format 2"),
        (Ticket.encode, 3, "reached"),
    ],
    ids=["wrong", "mistyped", "truncated", "expired", "other version", "nobody there"],
)
async def test_tickets(shoal, ticket, spoil, code, words):
    outcome = shoal("join", spoil(ticket), *ANYWHERE)
    assert (outcome.code, outcome.out) == (code, "")
    assert words in outcome.error


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[model]\nlayer = 2\n", "unknown key model.layer"),
        ("[modle]\nlayers = 2\n", "unknown table modle"),
        ("[model]\nlayers = 0\n", "model.layers = 0"),
        ('[model]\nwidth = "wide"\n', "model.width"),
        ("[model]\nwidth = 30\nheads = 4\n", "multiple"),
        ("[model\n", "not TOML"),
    ],
)
def test_manifests(shoal, tmp_path, text, words):
    file = tmp_path / "run.toml"
    file.write_text(text)
    outcome = shoal("start", file, *ANYWHERE)
    assert (outcome.code, outcome.out) == (2, "")
    assert words in outcome.error
    assert file.read_text() == text


async def test_data(swarm, shoal, tmp_path):
    manifest = swarm.manifest()
    empty, small, binary = (tmp_path / name for name in ("empty", "small", "binary"))
    empty.touch()
    small.write_text("too little")
    binary.write_bytes(bytes(10_000))
    cases = {
        tmp_path / "missing": "no file or folder",
        empty: "no readable text",
        binary: "no readable text",
        small: "too small",
        "stdlib": "text that each peer brings",
    }
    for path, words in cases.items():
        outcome = shoal("start", manifest, "--data", path, *ANYWHERE)
        assert (outcome.code, outcome.out) == (2, ""), path
        assert words in outcome.error


async def test_a_newcomer_without_text_of_its_own(swarm, shoal, tmp_path):
    founder = await swarm.found()
    outcome = shoal("join", founder.ticket, *ANYWHERE)
    assert (outcome.code, outcome.out) == (2, "")
    assert "text that each peer brings" in outcome.error
    (tmp_path / "small").write_text("too little")
    outcome = shoal("join", founder.ticket, "--data", tmp_path / "small", *ANYWHERE)
    assert (outcome.code, outcome.out) == (2, "")
    assert "too small" in outcome.error
    await swarm.stop(founder)


async def test_a_port_that_is_taken(swarm, shoal, taken):
    outcome = shoal("start", swarm.manifest(), "--data", swarm.text, "--listen", taken)
    assert (outcome.code, outcome.out) == (2, "")
    assert str(taken) in outcome.error


async def test_homes(swarm, shoal, tmp_path):
    founder = await swarm.found()
    ticket = founder.ticket
    before = contents(founder.home)

    outcome = shoal("join", ticket, "--data", swarm.text, *ANYWHERE, home=founder.home)
    assert (outcome.code, outcome.out) == (2, "")
    assert f"in use by the daemon with process id {founder.process.pid}" in outcome.error
    for name in ("identity.key", "manifest.toml", "ticket"):
        assert (founder.home / name).read_bytes() == before[founder.home / name]

    other = Home(tmp_path / "other")
    manifest = Manifest.create(Settings(run=RunSettings(name="another")), Identity.generate())
    other.manifest.write_text(manifest.dump())
    identity = other.identity
    before = contents(other.path)
    outcome = shoal("join", ticket, "--data", swarm.text, *ANYWHERE, home=other.path)
    assert (outcome.code, outcome.out) == (2, "")
    assert "another run" in outcome.error
    outcome = shoal("start", *ANYWHERE, home=other.path)
    assert (outcome.code, outcome.out) == (2, "")
    assert "another peer founded" in outcome.error
    assert contents(other.path) == before
    assert Home(other.path).identity.peer_id == identity.peer_id
    await swarm.stop(founder)

    outcome = shoal("start", tmp_path / "run.toml", "--data", swarm.text, *ANYWHERE, home=other.path)
    assert (outcome.code, outcome.out) == (2, "")
    assert "another run" in outcome.error
    assert contents(other.path) == before


@pytest.mark.parametrize(("contents", "mode"), [(b"rubbish", 0o600), (b"", 0o600), (None, 0o644)])
async def test_identities(shoal, tmp_path, ticket, contents, mode):
    home = Home(tmp_path / "home")
    home.identity  # noqa: B018 - makes it
    file = home.path / "identity.key"
    if contents is not None:
        file.write_bytes(contents)
    file.chmod(mode)
    before = file.read_bytes()
    outcome = shoal("join", ticket.encode(), *ANYWHERE, home=home.path)
    assert (outcome.code, outcome.out) == (2, "")
    assert str(file) in outcome.error
    assert file.read_bytes() == before


async def test_programs_and_daemons_do_not_take_part_in_the_same_run(swarm):
    founder = await swarm.found(run={"rounds": 0})
    with pytest.raises(RequestRefused, match="that daemons train"):
        async with open_swarm(founder.ticket, listen="127.0.0.1:0", map_port=False):
            pass
    async with open_swarm(listen="127.0.0.1:0", map_port=False) as programs:
        lost = swarm.daemon("lost")
        swarm.join(lost, programs.ticket)
        assert await swarm.ended(lost) == 4
        assert "a swarm of programs" in lost.log.read_text()
    await swarm.stop(founder)

"""The command line, `shoal`: exit codes, one-line errors with a hint, and the commands.

    0 done   1 failed   2 usage   3 cannot reach anyone   4 refused   130 interrupted

Modules that take long to import (torch, trio) are imported inside the commands that need them, so that `shoal --help`
answers at once.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import attrs
import typer

from peer import key_commands, network_commands
from peer.options import HomeOptions, NodeOptions, SettingsOptions, spread
from peer.text import printable
from protocol.errors import (
    AddressError,
    DataError,
    HandshakeError,
    IdentityError,
    IdentityInUse,
    PeerUnreachable,
    RequestRefused,
    SettingsError,
    ShoalError,
)

if TYPE_CHECKING:
    from peer.home import Home
    from peer.manifest import Manifest
    from peer.ticket import Ticket

FAILED: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3
REFUSED: Final = 4
INTERRUPTED: Final = 130

app = typer.Typer(
    help="Train one model together, on machines that belong to different people.",
    epilog="Take part:  shoal join TICKET      Found one:  shoal start",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class UsageError(ShoalError):
    """The command cannot be meant like that."""


def main() -> None:
    """Runs the command line and exits.

    At once: with PyTorch loaded, the interpreter's own way out takes seconds on a busy machine, and nothing is left to
    be done. Whoever pressed Ctrl-C is waiting.
    """
    # OpenMP's threads otherwise spin while they wait for each other: on a busy machine, for most of the time. It has to
    # be said before PyTorch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except SystemExit as left:
        with contextlib.suppress(OSError):  # nobody reads any more
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(left.code if isinstance(left.code, int) else FAILED if left.code else 0)


def exit_code(error: ShoalError) -> int:
    """The exit code for an error that ended a command."""
    from peer.events import EventsError
    from peer.home import CheckpointError, CheckpointNotSaved, HomeError
    from peer.manifest import ManifestError
    from peer.ticket import TicketError, TicketExpired

    match error:
        case TicketExpired() | RequestRefused() | HandshakeError():
            return REFUSED
        case PeerUnreachable():
            return UNREACHABLE
        case CheckpointNotSaved():
            return FAILED
        case UsageError() | TicketError() | ManifestError() | EventsError() | HomeError() | CheckpointError():
            return USAGE
        case DataError() | SettingsError() | AddressError() | IdentityError() | IdentityInUse():
            return USAGE
    return FAILED


def command(example: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a function as a command whose errors become one line, a hint, and an exit code."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        spreaded = spread(function)

        @functools.wraps(spreaded)
        def guarded(**values: Any) -> None:  # noqa: ANN401 - whatever the command takes
            try:
                spreaded(**values)
            except ShoalError as error:
                complain(str(error), error.hint)
                raise typer.Exit(exit_code(error)) from error
            except (KeyboardInterrupt, typer.Abort) as error:
                raise typer.Exit(INTERRUPTED) from error
            except (typer.Exit, typer.BadParameter, BrokenPipeError):
                raise  # typer's own ways out
            except Exception as error:  # the end of the line: nobody above could do better than this
                _crashed(error, HomeOptions(home=values.get("home"), debug=values.get("debug", False)))
                raise typer.Exit(FAILED) from error

        app.command(epilog=f"Example: {example}")(guarded)
        return function

    return register


def complain(message: str, hint: str | None = None) -> None:
    """An error for people, on standard error. Some of it may be a stranger's words."""
    print(f"error: {printable(message, 1000)}", file=sys.stderr)
    if hint:
        print(f"hint: {printable(hint, 1000)}", file=sys.stderr)


def _crashed(error: Exception, options: HomeOptions) -> None:
    """A bug: one line for the user, the traceback where it can be found."""
    trace = "".join(traceback.format_exception(error))
    hint = "this is a bug in Shoal; --debug shows where"
    if options.debug:
        print(trace, file=sys.stderr)
    elif options.path.is_dir():
        crash_log = options.path / "crash.log"
        try:
            with crash_log.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} shoal {' '.join(sys.argv[1:2])}\n{trace}\n")
            hint = f"this is a bug in Shoal; {crash_log} says where"
        except OSError:
            pass  # the hint names the other way
    complain(f"unexpected {type(error).__name__}: {error}", hint)


@command("shoal init --layers 6 --width 256 --rounds 200 --yes my-run.toml")
def init(
    settings: SettingsOptions,
    file: Annotated[Path, typer.Argument(help="The manifest.")] = Path("shoal.toml"),
    check: Annotated[bool, typer.Option("--check", help="Validate FILE instead of writing it.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; use the defaults.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Write a run's manifest, from questions or options; or check one."""
    from peer.manifest import dump_settings, parse_settings, settings_from, warnings

    if check:
        parsed = parse_settings(_read_manifest(file))
    else:
        if file.exists():
            raise ShoalError(f"{file} exists, and nothing is overwritten", hint="name another file, or use --check")
        tables = settings.tables()
        if not (tables or yes or as_json) and _is_terminal():
            tables = _ask()
        parsed = settings_from(tables)
        _write_new(file, "# A run of Shoal. Found it with: shoal start FILE\n\n" + dump_settings(parsed))
    if as_json:
        print(json.dumps({"file": str(file), "valid": True, "warnings": warnings(parsed)}))
        return
    for warning in warnings(parsed):
        print(f"warning: {warning}", file=sys.stderr)
    print(f"{file} is a valid manifest" if check else f"wrote {file}; found the run with: shoal start {file}")


@command("shoal start my-run.toml --ticket-file ticket.txt")
def start(
    settings: SettingsOptions,
    node: NodeOptions,
    manifest: Annotated[
        Path | None,
        typer.Argument(help="From `shoal init`. Default: this home's run, or a new one."),
    ] = None,
    wait_for: Annotated[int, typer.Option(min=1, help="Peers, this one included, to begin training with.")] = 1,
    origin: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Of swarm: begin with this checkpoint, of any number of stages."),
    ] = None,
) -> None:
    """Found a run, print its ticket, and train. In the same home, go on with it.

    The first line on standard output is the ticket. Options that are settings of the run need a run without MANIFEST.
    """
    from peer.home import Home

    home = Home(node.path)
    founded = _founded(manifest, settings.tables(), node, home)
    algorithm, most = founded.settings.algorithm.name, founded.settings.limits.peers
    if algorithm != "swarm" and (origin is not None or not node.serve):
        option = "--from" if origin is not None else "--no-serve"
        raise UsageError(f"{option} is for runs of stages, with --algorithm swarm; this one's is {algorithm}")
    if origin is not None and not node.serve:
        raise UsageError("--from and --no-serve exclude each other: who begins with a checkpoint serves a stage of it")
    if wait_for > most:
        raise UsageError(f"--wait-for {wait_for} is more than the run may have: limits.peers = {most}")
    _run_node(
        node,
        home,
        manifest=founded,
        wait_for=wait_for,
        origin=origin,
        on_ticket=lambda ticket: print(ticket.encode(), flush=True),
    )


@command("shoal join shoal:mfrggzdf… --max-upload 2M")
def join(
    ticket: Annotated[str, typer.Argument(help="From whoever is in the run; - reads it from a pipe.")],
    node: NodeOptions,
) -> None:
    """Take part in a run. Ctrl-C leaves it at any time."""
    from peer.home import Home
    from peer.manifest import ManifestError
    from peer.ticket import MAX_TICKET, Ticket

    text = sys.stdin.read(2 * MAX_TICKET + 1) if ticket == "-" else ticket
    parsed = Ticket.parse(text, time.time())
    try:
        _run_node(node, Home(node.path), ticket=parsed)
    except ManifestError as error:  # it came from the network: nothing that this user could correct
        raise RequestRefused(f"the run cannot be joined: {error}", code="manifest", hint=error.hint) from error


@command("shoal status --json")
def status(
    options: HomeOptions, as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False
) -> None:
    """Show what the local daemon does now. Exit code 1 if none runs."""
    from peer.console import stages_line, summary
    from peer.home import Home
    from peer.status import read_status

    home = Home(options.path, create=False)
    current = read_status(home.status)
    running = home.is_locked()
    if as_json:
        print(json.dumps({"running": running, **attrs.asdict(current)}))
    else:
        age = max(0.0, time.time() - current.updated)
        lines = {
            "daemon": f"running, process {current.pid}" if running else "not running; this was its last word",
            "peer": current.peer,
            "address": current.address,
            "mapped": current.mapped,
            "run": current.run,
            "now": summary(current),
            "servers": stages_line(current),
            "validation": None if current.validation is None else f"{current.validation:.4f} nats per byte",
            "last event": f"{age:.0f} s ago",
            "stopped": "as asked" if current.reason == "cancelled" else current.reason,
        }
        print(
            "\n".join(f"{name + ':':12} {printable(str(value))}" for name, value in lines.items() if value is not None)
        )
    if not running:
        raise typer.Exit(FAILED)


@command("shoal ticket --show shoal:mfrggzdf…")
def ticket(
    options: HomeOptions,
    show: Annotated[str | None, typer.Option(metavar="TICKET", help="Say what is in this ticket.")] = None,
    hours: Annotated[
        float | None, typer.Option(min=0.01, max=1e6, help="Let the printed ticket expire, give or take a minute.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Print a ticket for the run of the local peer, to invite others; or show what is in one."""
    from peer.home import Home
    from peer.ticket import Ticket

    if show is not None:
        _show_ticket(Ticket.parse(show, now=0.0), as_json=as_json)
        return
    path = Home(options.path, create=False).ticket
    try:
        own = Ticket.parse(path.read_text("ascii"), now=0.0)
    except (OSError, UnicodeDecodeError) as error:
        raise ShoalError(
            f"there is no ticket in {path.parent}", hint="`shoal start` and `shoal join` leave one"
        ) from error
    own = attrs.evolve(own, expires=own.expires if hours is None else time.time() + hours * 3600)
    print(json.dumps({"ticket": own.encode()}) if as_json else own.encode())


@command("shoal export other-home another-home --home mine")
def export(
    options: HomeOptions,
    homes: Annotated[
        list[Path] | None, typer.Argument(metavar="HOME...", help="Homes of peers of other stages.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Put a model together whose stages are at different peers, as a checkpoint in this home."""
    from peer.home import Home

    home = Home(options.path, create=False)
    from peer.pipeline.files import export_model

    path = export_model(home, [Home(each, create=False) for each in homes or ()])
    print(json.dumps({"checkpoint": str(path)}) if as_json else f"wrote {path}")


@command('shoal sample --prompt "def main" --length 300')
def sample(
    options: HomeOptions,
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = "",
    length: Annotated[int, typer.Option(min=1, max=1_000_000, help="Bytes to write.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, max=10.0, help="0: always the likeliest byte.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Another seed, another text.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Let the current model write text, from the latest checkpoint of this home."""
    from peer.home import Home

    home = Home(options.path, create=False)
    from peer.checkpoint import load_latest  # imports torch

    checkpoint = load_latest(home.checkpoints)
    if checkpoint is None:
        stages = any(home.checkpoints.glob("stage-*.safetensors"))
        raise ShoalError(
            f"there is no checkpoint of a whole model in {home.checkpoints}",
            hint="`shoal export` makes one of the stages" if stages else "a daemon leaves one after its first round",
        )
    from peer.trainer import sample_text

    text = sample_text(
        checkpoint.settings, checkpoint.state.outer, prompt.encode(), length, temperature=temperature, seed=seed
    ).decode("utf-8", "replace")
    if as_json:
        print(json.dumps({"prompt": prompt, "text": text}))
    else:
        # A model may write anything, escape sequences included.
        print("".join(c if c.isprintable() or c in "\n\t" else "�" for c in prompt + text))


@command("shoal demo --peers 4 --keep demo-files")
def demo(
    peers: Annotated[int, typer.Option(min=2, max=64, help="Peers to start with.")] = 4,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of the run. Default: 8; of swarm, 60.")] = None,
    inner_steps: Annotated[
        int | None, typer.Option(min=1, help="Local steps between two rounds. Default: 100; not of swarm.")
    ] = None,
    algorithm: Annotated[str, typer.Option(help="How work is combined: diloco, noloco, swarm, …")] = "diloco",
    stages: Annotated[int, typer.Option(min=2, max=6, help="Of swarm: parts of the model.")] = 3,
    data: Annotated[str, typer.Option(metavar="PATH", help="What to train on, or stdlib.")] = "stdlib",
    keep: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep all files in this directory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with the verdict as one line of JSON.")] = False,
) -> None:
    """Watch a swarm of local processes train, lose a peer and gain one; ends with a verdict."""
    if algorithm == "swarm":
        if inner_steps is not None:
            raise UsageError("--inner-steps is not for swarm, whose stages make each step together")
        from peer.pipeline.demo import PipelineDemoOptions, run_pipeline_demo

        swarm = PipelineDemoOptions(peers=peers, stages=stages, steps=rounds or 60, data=data, keep=keep, json=as_json)
        raise typer.Exit(run_pipeline_demo(swarm))
    from peer.demo import DemoOptions, run_demo

    options = DemoOptions(
        peers=peers,
        rounds=rounds or 8,
        inner_steps=inner_steps or 100,
        algorithm=algorithm,
        data=data,
        keep=keep,
        json=as_json,
    )
    raise typer.Exit(run_demo(options))


command("shoal serve --listen 0.0.0.0:4711 --announce helper.example.org:4711")(network_commands.serve)
command("shoal doctor shoal:mfrggzdf…")(network_commands.doctor)
command("shoal peers --json")(network_commands.peers)
command("shoal top")(network_commands.top)
command("shoal rotate-key --except gbyxiezcy7rirj4qu764tx3ditnjxynqzbxd37fzcr7qob22jhxq")(key_commands.rotate_key)


def _founded(file: Path | None, tables: dict[str, dict[str, object]], node: NodeOptions, home: Home) -> Manifest:
    """The manifest of the run to found, or to go on with."""
    from peer.manifest import Manifest, kept_manifest, settings_from, warnings

    if file is not None:
        if tables:
            raise UsageError("a manifest and settings as options exclude each other", hint=f"edit {file} instead")
        manifest = Manifest.found(_read_manifest(file), home.identity)
    elif not tables and (kept := kept_manifest(home)) is not None:
        manifest = kept
        if manifest.founder != home.identity.public_key:
            raise UsageError(f"{home.path} takes part in a run that another peer founded", hint="use another --home")
    else:
        tables.setdefault("data", {})["source"] = "stdlib" if node.data == "stdlib" else "text"
        manifest = Manifest.create(settings_from(tables), home.identity)
    if manifest.settings.data.source == "text" and node.data == "stdlib":
        raise UsageError("the run trains on text that each peer brings", hint="say where yours is: --data PATH")
    for warning in () if node.quiet else warnings(manifest.settings):
        print(f"warning: {warning}", file=sys.stderr)
    return manifest


def _run_node(
    node: NodeOptions,
    home: Home,
    *,
    manifest: Manifest | None = None,
    ticket: Ticket | None = None,
    wait_for: int = 1,
    origin: Path | None = None,
    on_ticket: Callable[[Ticket], None] | None = None,
) -> None:
    """Runs a daemon until it ends; exits with its code unless it is done."""
    from peer.console import Console
    from peer.events import EventLog
    from peer.farewell import Farewell
    from peer.foreground import ended_by_sigterm, run_in_foreground
    from peer.home import write_atomically
    from peer.manifest import kept_manifest
    from peer.status import StatusFile

    run = manifest.run_id if manifest is not None else ticket.run_id if ticket is not None else None

    def keep_ticket(current: Ticket) -> None:
        for path in filter(None, (home.ticket, node.ticket_file)):
            try:
                write_atomically(path, f"{current.encode()}\n".encode())
            except OSError as error:  # a full disk is no reason to stop
                events.emit("ticket_failed", reason=f"{path}: {error.strerror}")

    if node.ticket_file is not None:
        _check_writable(node.ticket_file, "--ticket-file")
    with ended_by_sigterm(), home.lock(), EventLog(node.events, home.identity.peer_id) as events:
        kept_manifest(home, run)
        # Only now, when all that a user may have got wrong is checked: this imports torch.
        from peer.daemon import DaemonConfig, run_daemon

        farewell = Farewell()
        config = DaemonConfig(
            home=home,
            listen=node.listen,
            announce=node.announce,
            map_port=not node.no_map,
            bootstrap=node.contacts,
            on_ticket=keep_ticket,
            relay=node.relay,
            data=node.data,
            events=events,
            device=_device(node.device),
            threads=node.threads,
            max_upload=node.max_upload,
            max_download=node.max_download,
            max_memory=node.max_memory,
            manifest=manifest,
            ticket=ticket,
            wait_for=wait_for,
            origin=origin,
            linger=node.linger,
            serve=node.serve,
            farewell=farewell,
        )
        status_file = StatusFile(home.status, events, str(home.identity.peer_id))
        console = Console(lambda: status_file.status, live=sys.stderr.isatty(), quiet=node.quiet)
        events.subscribe(console.show)

        def on_ready(ready: Ticket) -> None:
            keep_ticket(ready)
            if on_ticket is not None:
                on_ticket(ready)
            console.go_live()

        with console:
            code = run_in_foreground(functools.partial(run_daemon, config), status_file, on_ready, farewell)
    if code:
        raise typer.Exit(code)


def _check_writable(file: Path, option: str) -> None:
    """Refuses a file that can be seen to be none, before anything else is done."""
    if file.is_dir():
        raise UsageError(f"{option} {file} is a directory", hint="name a file in it")
    if not file.parent.is_dir():
        raise UsageError(
            f"{option} {file} cannot be written: there is no directory {file.parent}", hint="make it first"
        )
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {file} cannot be written: permission denied", hint="name a file somewhere else")


def _device(name: str) -> str:
    """A device of this machine, as PyTorch names it."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, ValueError) as error:  # AssertionError: PyTorch was built without CUDA
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"--device {name} cannot be used: {reason}", hint="--device auto takes what is there"
        ) from error
    return name


def _read_manifest(file: Path) -> str:
    from peer.manifest import MAX_MANIFEST

    try:
        with file.open("rb") as stream:
            return stream.read(MAX_MANIFEST + 1).decode("utf-8")  # one more, so that an overlong file is noticed
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read: {error.strerror}", hint="`shoal init FILE` writes a manifest"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not text in UTF-8, so it is no manifest") from error


def _write_new(file: Path, text: str) -> None:
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise ShoalError(f"{file} cannot be written: {error.strerror}") from error


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _ask() -> dict[str, dict[str, object]]:
    """The questions that `init` asks on a terminal: what differs from run to run."""
    from peer.settings import Settings

    default = Settings()
    source = typer.prompt(
        "Train on stdlib (Python's own source) or text (each peer passes --data)", default.data.source
    )
    private = typer.confirm("Only for holders of a ticket?", default=False)
    return {
        "run": {
            "name": typer.prompt("Name of the run", default.run.name),
            "rounds": typer.prompt("Rounds (0: until everybody leaves)", default.run.rounds, type=int),
        },
        "data": {"source": source},
        "membership": {"policy": "private" if private else "open"},
        "model": {
            "layers": typer.prompt("Layers of the model", default.model.layers, type=int),
            "width": typer.prompt("Width of the model", default.model.width, type=int),
        },
        "algorithm": {
            "inner_steps": typer.prompt("Local steps between two rounds", default.algorithm["inner_steps"], type=int)
        },
    }


def _show_ticket(ticket: Ticket, *, as_json: bool) -> None:
    """What is in a ticket, without its secret."""
    peers = [(str(peer), str(address)) for peer, address in ticket.bootstrap]
    run = ticket.run_id.hex()
    if as_json:
        bootstrap = [{"peer": peer, "address": address} for peer, address in peers]
        key = {"private": ticket.swarm_key is not None, "key_number": ticket.key_number}
        print(json.dumps({"run": run, "bootstrap": bootstrap, **key, "expires": ticket.expires}))
        return
    print(f"{'run:':12} {run}")
    for peer, address in peers:
        print(f"{'ask:':12} {address}  {peer}")
    secret = f"yes, it holds swarm key {ticket.key_number}: keep it secret"
    print(f"{'private:':12} {secret if ticket.swarm_key else 'no'}")
    if ticket.expires is None:
        print(f"{'expires:':12} never")
    else:
        moment = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(ticket.expires))
        print(f"{'expires:':12} {moment}{' (over)' if ticket.is_over(time.time()) else ''}")

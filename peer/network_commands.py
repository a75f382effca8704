"""The commands about the network: `shoal serve`, `doctor`, `peers` and `top`. `peer.cli` registers them."""

from __future__ import annotations

import functools
import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from peer.options import ANY_PORT, HomeOptions, PeerOptions, parse_address
from peer.text import printable
from protocol.errors import ShoalError
from protocol.transport import Address

if TYPE_CHECKING:
    from peer.status import Status


def serve(
    options: PeerOptions,
    ticket: Annotated[
        str | None, typer.Argument(help="Of a private run, which only holders of its key can help; - reads a pipe.")
    ] = None,
) -> None:
    """Be a helper: a public place where others find each other. Trains nothing, and serves any number of runs.

    The first line on standard output is PEERID@HOST:PORT, for the --bootstrap of others.
    """
    from peer.console import Console
    from peer.events import EventLog
    from peer.foreground import ended_by_sigterm, run_in_foreground
    from peer.helper import HelperConfig, run_helper
    from peer.home import Home
    from peer.status import StatusFile
    from peer.ticket import Ticket

    parsed = None if ticket is None else Ticket.parse(_given(ticket), time.time())
    home = Home(options.path)
    with ended_by_sigterm(), home.lock(), EventLog(options.events, home.identity.peer_id) as events:
        status_file = StatusFile(home.status, events, str(home.identity.peer_id))
        console = Console(lambda: status_file.status, live=sys.stderr.isatty(), quiet=options.quiet)
        events.subscribe(console.show)

        def on_address(address: str) -> None:
            console.say(f"others begin here with:  --bootstrap {address}")

        def on_ready(address: str) -> None:
            print(address, flush=True)
            console.say("helping; found a run through here, or join one, with")
            console.say(f"  shoal start --bootstrap {address}")
            console.say(f"  shoal join TICKET --bootstrap {address}")
            console.go_live()

        config = HelperConfig(
            home=home,
            listen=options.listen,
            events=events,
            announce=options.announce,
            relay=options.relay,
            map_port=not options.no_map,
            bootstrap=options.contacts,
            ticket=parsed,
            max_upload=options.max_upload,
            max_download=options.max_download,
            on_address=on_address,
        )
        with console:
            code = run_in_foreground(functools.partial(run_helper, config), status_file, on_ready)
    if code:
        raise typer.Exit(code)


def doctor(
    options: HomeOptions,
    target: Annotated[
        str | None,
        typer.Argument(metavar="[TICKET | PEERID@HOST:PORT]", help="Whom to reach: a run, or a peer. - reads a pipe."),
    ] = None,
    listen: Annotated[
        Address, typer.Option(parser=parse_address, metavar="HOST:PORT", help="Where the peer is to listen.")
    ] = ANY_PORT,
    no_map: Annotated[bool, typer.Option("--no-map", help="Do not ask the router to map a port.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Check whether this machine can take part, step by step, and say what to do where it cannot.

    Exit codes: 0 it can, 1 it cannot, 3 nobody of the ticket answers.
    """
    import trio

    from peer.doctor import Patient, Report, examine

    text = None if target is None else _given(target)
    patient = Patient.of(options.path, listen, text, map_port=not no_map, now=time.time())
    report = Report(as_json=as_json)
    trio.run(examine, patient, report.add)
    code = report.finish()
    if code:
        raise typer.Exit(code)


def peers(
    options: HomeOptions, as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False
) -> None:
    """Show whom the local daemon is connected to. Exit code 1 if none runs."""
    from peer.console import member_lines
    from peer.home import Home
    from peer.status import read_status

    home = Home(options.path, create=False)
    current = read_status(home.status)
    if not home.is_locked():
        raise ShoalError(f"no daemon runs in {home.path}", hint="start one with `shoal join` or `shoal start`")
    if as_json:
        print(json.dumps({"peer": current.peer, "peers": [attrs.asdict(member) for member in current.members]}))
        return
    for line in member_lines(current):
        print(printable(line))
    if not current.members:
        print("nobody else is here", file=sys.stderr)


def top(options: HomeOptions) -> None:
    """Show what the local daemon does and whom it is connected to, once a second. q or Ctrl-C ends it."""
    from peer.home import Home
    from peer.status import read_status
    from peer.top import watch

    home = Home(options.path, create=False)

    def look() -> tuple[Status, bool]:
        return read_status(home.status), home.is_locked()

    look()
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ShoalError("`shoal top` needs a terminal", hint="`shoal peers` and `shoal status` do not")
    watch(look)


def _given(text: str) -> str:
    """What stands on the command line, or comes in by a pipe."""
    from peer.ticket import MAX_TICKET

    return sys.stdin.read(2 * MAX_TICKET + 1) if text == "-" else text

"""What a person sees while a peer runs: a line for what happens and, on a terminal, a live line below them.

Everything goes to standard error; standard output belongs to programs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from peer.text import printable

if TYPE_CHECKING:
    from rich.live import Live

    from peer.events import Event
    from peer.status import MemberStatus, Status

MEET: Final = (
    "Two machines behind routers meet only through a peer with a public address: "
    "start `shoal serve` on one, and all peers with --bootstrap and the address that it prints"
)
"""What to do for machines that do not find a way to each other."""

_REFRESH: Final = 4.0  # times a second
_SHORT: Final = 8  # characters of a peer id


class Console:
    """Shows events as they come; use it as a context manager.

    Args:
        status: Gives the current status, for the live line.
        live: Whether to keep a live line: standard error is a terminal.
        quiet: Whether to show nothing at all.
    """

    def __init__(self, status: Callable[[], Status], *, live: bool, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live: Live | None = _live_line(lambda: summary(status())) if live and not quiet else None

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live is not None:
            self._live.stop()

    def go_live(self) -> None:
        """Starts the live line; nothing else may write to the terminal from now on."""
        if self._live is not None:
            self._live.start()

    def show(self, event: Event) -> None:
        """Subscribe this to an event log."""
        line = describe(event)
        if line is not None:
            self.say(line)

    def say(self, line: str) -> None:
        """One line for people."""
        if self._quiet:
            return
        if self._live is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self._live.console.print(line, markup=False, highlight=False)


def describe(event: Event) -> str | None:
    """An event in words; None for those that only the live line shows."""
    peer = str(event["peer"])[:_SHORT]
    reason = printable(str(event.get("reason", "")))
    match event["event"]:
        case "started":
            return f"peer {peer} listens on {event.get('address')}"
        case "identity_shared":
            return f"two daemons use this identity, stop one of them: {reason}"
        case "waiting" if event["wanted"] is None:
            return "the founder waits for more peers, and this one waits with it"
        case "waiting":
            return f"waiting for {event['wanted']} peers, {event['here']} are here so far"
        case "bootstrap_failed":
            return f"nobody to begin with can be reached, and will be tried again: {reason}"
        case "mapped":
            inside = "; but the router is behind another one" if event.get("behind_nat") else ""
            return f"the router maps {event.get('address')} to this peer ({event.get('method')}){inside}"
        case "unmapped":
            return f"the router no longer maps {event.get('address')} to this peer"
        case "reachability" if event["verdict"] == "public":
            return "others can connect to this peer"
        case "reachability" if event["verdict"] == "private":
            return "others cannot connect to this peer: it connects to them, or through others"
        case "isolated":
            return f"note: {reason}. {MEET}"
        case "peer_seen":
            return f"peer {peer} is here"
        case "peer_lost":
            return f"peer {peer} is gone: {reason}"
        case "key_rotated":
            return f"the swarm key was rotated: this is key {event.get('number')}"
        case "key_taken":
            return f"peer {peer} has swarm key {event.get('number')}"
        case "key_retired":
            return f"swarm key {event.get('number')} is no longer good"
        case "key_problem":
            return f"the swarm key was NOT SAVED: {reason}"
        case "rejected":
            return f"peer {peer} does not let this one in: {reason}. {printable(str(event.get('hint') or ''))}".rstrip()
        case "synced":
            return f"round {event['round']}: fetched the state ({size(event.get('bytes', 0))})"
        case "branch_left":
            begun = f"from round {event['common'] + 1} " if event.get("common") is not None else ""
            return f"what was made {begun}to round {event['round']} is given up: the others had done more meanwhile"
        case "round_committed":
            count = len(event.get("contributors", ()))
            peers = f"{count} peer{'' if count == 1 else 's'}"
            if event.get("fetched"):
                return f"round {event['round']}: fetched the work of {peers}"
            return f"round {event['round']}: work of {peers} averaged in {event.get('seconds', 0.0):.1f} s"
        case "round_failed":
            return f"round {event['round']}: attempt {event.get('attempt')} failed: {reason}"
        case "stage_synced":
            stage, step, furthest = event["stage"], event["step"], event.get("furthest", event["step"])
            later = f"; others are at step {furthest}" if step < furthest else ""
            if event.get("bytes"):
                return f"stage {stage}: has the state of step {step} ({size(event['bytes'])} fetched){later}"
            return f"stage {stage}: begins {'anew' if not step else f'with what is here, of step {step}'}{later}"
        case "stage_empty":
            return (
                f"stage {event['stage']} has no server, and training waits for one: others can `shoal join` with the "
                "ticket; if enough are here already, one goes there"
            )
        case "stage_filled":
            return f"stage {event['stage']} has a server again"
        case "stage_lost":
            return f"stage {event['stage']}: the others are at step {event['step']}; what was lost is not done again"
        case "distrusted":
            return (
                f"peer {peer} is asked for nothing more, as what it sends of stage {event['stage']} is wrong: {reason}"
            )
        case "unfit":
            return (
                f"stage {event['stage']}: WARNING: what this node computes is not finite, or makes no sense to the "
                "others: it serves no stage any more. Look at its memory and graphics card"
            )
        case "moved":
            return f"moved from stage {event['source']} to stage {event['target']}, where it is needed more"
        case "validation" if event.get("loss") is not None:
            return f"round {event['round']}: validation loss {event['loss']:.4f} nats per byte"
        case "diverging":
            loss = "not a number" if event.get("loss") is None else f"{event['loss']:.4f}"
            return (
                f"round {event['round']}: WARNING: the run diverges: validation loss {loss}, best {event['best']:.4f}"
            )
        case "checkpoint_failed":
            return f"round {event['round']}: NOT SAVED: {reason}"
        case "ticket_failed":
            return f"the ticket was NOT SAVED: {reason}"
        case "banned":
            return f"peer {peer} is banned: {reason}"
        case "stopped" if reason == "cancelled":  # by a signal
            return "stopped, as asked; the peers that were connected have been told"
        case "stopped" if reason == "finished":  # else the error follows, and says the same
            return "stopped: finished"
    return None


def summary(status: Status) -> str:
    """The status on one line."""
    peers = len(status.neighbours)
    others = f"{peers} other peer{'' if peers == 1 else 's'}"
    if status.activity == "serving":
        return f"serving · {others}"
    missing = status.empty_stages
    activity = f"waiting for a server of stage {missing[0]}" if missing else status.activity
    parts = [activity, f"round {status.revision}", others]
    if status.servers:
        stage = "no stage" if status.stage is None else f"stage {status.stage}"
        parts.insert(1, f"{stage} of {len(status.servers)}")
    if status.loss is not None:
        parts.append(f"loss {status.loss:.3f}")
    if status.tokens_per_second and not missing:
        parts.append(f"{status.tokens_per_second:,.0f} tokens/s")
    parts.append(f"sent {size(status.bytes_sent)}, received {size(status.bytes_received)}")
    return " · ".join(parts)


def stages_line(status: Status) -> str | None:
    """How many servers each stage has; None if the run has no stages."""
    return ", ".join(f"stage {stage}: {count}" for stage, count in enumerate(status.servers)) or None


def member_lines(status: Status) -> list[str]:
    """The members as a table, with a heading; empty if there are none."""
    if not status.members:
        return []
    rows = member_table(status)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def member_table(status: Status) -> list[tuple[str, ...]]:
    """A heading, and a row for each member; the stages of members if the run has stages."""
    heading, rows = ("peer", "address", "path", "rtt", "round"), [_member_row(member) for member in status.members]
    if not status.servers:
        return [heading, *rows]
    stages = ["-" if member.stage is None else str(member.stage) for member in status.members]
    return [(*heading, "stage"), *((*row, stage) for row, stage in zip(rows, stages, strict=True))]


def _member_row(member: MemberStatus) -> tuple[str, ...]:
    rtt = "-" if member.rtt is None else f"{member.rtt * 1000:.1f} ms"
    revision = "-" if member.revision is None else str(member.revision)
    return member.peer[:_SHORT], member.address or "-", member.path, rtt, revision


def size(count: float) -> str:
    """A number of bytes for people: 12.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _live_line(text: Callable[[], str]) -> Live:
    # rich costs start-up time that commands without a live line should not pay.
    from rich.console import Console as RichConsole
    from rich.live import Live
    from rich.text import Text

    return Live(
        console=RichConsole(stderr=True),
        get_renderable=lambda: Text(text(), no_wrap=True, overflow="ellipsis", style="dim"),
        refresh_per_second=_REFRESH,
        transient=True,
        redirect_stdout=False,
    )

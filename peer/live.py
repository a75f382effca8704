"""What the demo shows while it runs: a live table on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from peer.child import Child
from peer.console import size
from peer.recording import Recording

COLUMNS = ("daemon", "peer", "state", "round", "loss", "tokens/s", "sent")
STATES = {
    "started": "starting",
    "synced": "has the state",
    "inner": "training",
    "round_started": "reducing",
    "round_committed": "committed",
    "round_failed": "trying again",
    "validation": "validated",
    "stopped": "stopped",
}


class Display:
    """Progress for people. With `json` it goes to standard error, so that standard output has the verdict only."""

    def __init__(self, *, json: bool = False) -> None:
        self._console = Console(file=sys.stderr if json else sys.stdout, highlight=False, markup=False, soft_wrap=True)
        table = self._console.is_terminal and not json
        self._live = Live(console=self._console, auto_refresh=False, transient=False) if table else None

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Prints lines that stay (above the table)."""
        self._console.print(text)

    def refresh(self, children: Sequence[Child]) -> None:
        """Redraws the table, if there is one."""
        if self._live is not None:
            self._live.update(status_table(children), refresh=True)


def status_table(children: Sequence[Child]) -> Table:
    """One row per daemon: who it is, what it does, how fast it trains, what it sent."""
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[:3] else "right")
    for child in children:
        state = "killed" if child.killed else _state(child)
        style = {"killed": "red", "reducing": "yellow", "stopped": "dim"}.get(state, "")
        table.add_row(*(Text(cell) for cell in (child.name, *_cells(child.recording, state))), style=style)
    return table


def _state(child: Child) -> str:
    told = [STATES[event.kind] for event in child.recording.events[-8:] if event.kind in STATES]
    return told[-1] if told else "starting"


def _cells(recording: Recording, state: str) -> tuple[str, ...]:
    inner = recording.last("inner")
    return (
        (recording.peer or "")[:8],
        state,
        "" if recording.revision is None else str(recording.revision),
        "" if inner is None else f"{inner.number('loss'):.3f}",
        "" if inner is None else f"{inner.number('tokens_per_second'):,.0f}",
        size(recording.bytes_sent),
    )

"""`shoal top`: the status of a daemon and its peers on a terminal, live."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import Final

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from peer.console import member_table, stages_line, summary
from peer.status import Status
from peer.text import duration, printable

PERIOD: Final = 1.0  # seconds between two looks
_END: Final = ("q", "Q", "\x03", "")  # "": the terminal is gone


def watch(look: Callable[[], tuple[Status, bool]]) -> None:
    """Shows the status until q is pressed.

    Args:
        look: Gives the status, and whether the daemon runs.

    Raises:
        StatusError: The status could be read no longer.
        KeyboardInterrupt: Ctrl-C.
    """
    with Live(screen(*look()), screen=True, auto_refresh=False, redirect_stdout=False) as live, _single_keys() as key:
        while key(PERIOD) not in _END:
            live.update(screen(*look()), refresh=True)


def screen(status: Status, running: bool) -> Group:
    """What is on the terminal at one moment."""
    now = time.time()
    head = f"peer {status.peer[:8]}  {printable(status.address or '')}"
    if status.mapped:
        head += f"  mapped to {printable(status.mapped)}"
    state = f"process {status.pid}, for {duration(now - status.since)}" if running else "not running"
    rounds = ""
    if (stages := stages_line(status)) is not None:
        rounds = f"servers of {stages}"
    elif status.run is not None:
        loss = "" if status.validation is None else f", validation {status.validation:.4f} nats per byte"
        rounds = f"{status.contributors} in the last round, {status.failures} attempts failed{loss}"
    heading, *rows = member_table(status)
    table = Table(*heading, box=None, header_style="bold", padding=(0, 3, 0, 0))
    for row in rows:
        table.add_row(*row)
    lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in (head, state, summary(status), rounds) if line]
    return Group(*lines, Text(), table, Text(), Text("q ends this", style="dim"))


@contextlib.contextmanager
def _single_keys() -> Iterator[Callable[[float], str | None]]:
    """Gives a function that waits some seconds for a key; None if there was none. Ctrl-C still interrupts."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def key(seconds: float) -> str | None:
        if not select.select([descriptor], [], [], seconds)[0]:
            return None
        return os.read(descriptor, 1).decode("latin-1")

    try:
        tty.setcbreak(descriptor)
        yield key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

"""Runs a daemon in the foreground of a terminal or of a service manager, until it is done or asked to leave.

The first SIGINT (Ctrl-C) or SIGTERM cancels the daemon, which says goodbye to its peers; one that others need may go
on for some seconds before. Should it then take longer than two seconds, or should a second signal come, the process
ends at once; a home survives that at any moment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import attrs
import trio

from peer.failure import first_cause
from peer.farewell import Farewell

if TYPE_CHECKING:
    from peer.status import StatusFile

_T = TypeVar("_T")
_Ready = TypeVar("_Ready", covariant=True)

LEAVE_WITHIN: Final = 1.8  # seconds; with the end of the interpreter, two
EXIT_CODES: Final = {signal.SIGINT: 130, signal.SIGTERM: 0}  # 0: a service manager's stop is no failure


class Daemon(Protocol[_Ready]):
    """`run_daemon` or `run_helper` with its configuration bound: reports how to find it once that is possible."""

    async def __call__(self, *, task_status: trio.TaskStatus[_Ready] = trio.TASK_STATUS_IGNORED) -> None: ...


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """For the time before `run_in_foreground`: SIGTERM ends the process at once, with the code that it has later.

    As process 1 of a container it would not even be ended: the system drops signals that nobody there handles.
    """
    previous = signal.signal(signal.SIGTERM, lambda number, frame: os._exit(EXIT_CODES[signal.SIGTERM]))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def run_in_foreground(
    daemon: Daemon[_T], status: StatusFile, on_ready: Callable[[_T], None], farewell: Farewell | None = None
) -> int:
    """Runs `daemon` to its end and keeps its status file.

    Args:
        daemon: What to run.
        status: The status file, written while the daemon runs and once after it.
        on_ready: Called with what the daemon reports: its ticket when it can be joined.
        farewell: How it is asked to leave before it is cancelled.

    Returns:
        The exit code: 0 when the run is over or after SIGTERM, 130 after SIGINT.

    Raises:
        ShoalError: What ended the daemon.
    """
    try:
        return trio.run(_attend, daemon, status, on_ready, farewell or Farewell())
    except BaseExceptionGroup as group:
        # Nurseries wrap what their tasks raise; people want the one cause that was raised on purpose.
        raise first_cause(group) from group


async def _attend(daemon: Daemon[_T], status: StatusFile, on_ready: Callable[[_T], None], farewell: Farewell) -> int:
    departure = _Departure(farewell)
    try:
        async with trio.open_nursery() as helpers:
            helpers.start_soon(status.run)
            async with trio.open_nursery() as nursery:
                await helpers.start(departure.watch, nursery.cancel_scope)
                on_ready(await nursery.start(daemon))
            helpers.cancel_scope.cancel()
    finally:
        departure.arrived()
    return departure.exit_code


@attrs.define
class _Departure:
    """The way out after a signal."""

    farewell: Farewell
    exit_code: int = 0
    _deadline: threading.Timer | None = None

    async def watch(
        self, scope: trio.CancelScope, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Cancels `scope` after the first signal, and leaves the second one to the system, which kills."""
        with trio.open_signal_receiver(*EXIT_CODES) as signals:
            task_status.started()
            async for number in signals:
                self.exit_code = EXIT_CODES[signal.Signals(number)]
                for each in EXIT_CODES:
                    signal.signal(each, signal.SIG_DFL)
                # A thread, because the event loop may be what hangs.
                self._deadline = threading.Timer(self.farewell.patience + LEAVE_WITHIN, os._exit, [self.exit_code])
                self._deadline.daemon = True
                self._deadline.start()
                self.farewell.asked.set()
                await trio.sleep(self.farewell.patience)
                scope.cancel()

    def arrived(self) -> None:
        """The daemon has ended."""
        if self._deadline is not None:
            self._deadline.cancel()

"""Runs a daemon in the foreground of a terminal or of a service manager, until it is done or asked to leave.

The first SIGINT (Ctrl-C) or SIGTERM cancels the daemon, which says goodbye to its peers. Should that take longer than
two seconds, or should a second signal come, the process ends at once; a home survives that at any moment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs
import trio

from peer.ticket import Ticket
from protocol.errors import ShoalError

if TYPE_CHECKING:
    from peer.status import StatusFile

LEAVE_WITHIN: Final = 1.8  # seconds; with the end of the interpreter, two
EXIT_CODES: Final = {signal.SIGINT: 130, signal.SIGTERM: 0}  # 0: a service manager's stop is no failure


class Daemon(Protocol):
    """`peer.daemon.run_daemon` with its configuration bound: reports a ticket once it can be joined."""

    async def __call__(self, *, task_status: trio.TaskStatus[Ticket] = trio.TASK_STATUS_IGNORED) -> None: ...


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


def run_in_foreground(daemon: Daemon, status: StatusFile, on_ready: Callable[[Ticket], None]) -> int:
    """Runs `daemon` to its end and keeps its status file.

    Args:
        daemon: What to run.
        status: The status file, written while the daemon runs and once after it.
        on_ready: Called with the ticket when the daemon can be joined.

    Returns:
        The exit code: 0 when the run is over or after SIGTERM, 130 after SIGINT.

    Raises:
        ShoalError: What ended the daemon.
    """
    try:
        return trio.run(_attend, daemon, status, on_ready)
    except BaseExceptionGroup as group:
        # Nurseries wrap what their tasks raise; people want the one cause that was raised on purpose.
        raise _cause(group) from group


async def _attend(daemon: Daemon, status: StatusFile, on_ready: Callable[[Ticket], None]) -> int:
    departure = _Departure()
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

    exit_code: int = 0
    _deadline: threading.Timer | None = None

    async def watch(
        self, scope: trio.CancelScope, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Cancels `scope` at the first signal, and leaves the second one to the system, which kills."""
        with trio.open_signal_receiver(*EXIT_CODES) as signals:
            task_status.started()
            async for number in signals:
                self.exit_code = EXIT_CODES[signal.Signals(number)]
                for each in EXIT_CODES:
                    signal.signal(each, signal.SIG_DFL)
                # A thread, because the event loop may be what hangs.
                self._deadline = threading.Timer(LEAVE_WITHIN, os._exit, [self.exit_code])
                self._deadline.daemon = True
                self._deadline.start()
                scope.cancel()

    def arrived(self) -> None:
        """The daemon has ended."""
        if self._deadline is not None:
            self._deadline.cancel()


def _cause(group: BaseExceptionGroup[Any]) -> BaseException:
    """The first of Shoal's own errors in `group`, or else the first error."""
    leaves: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending[:0] = error.exceptions
        else:
            leaves.append(error)
    return next((leaf for leaf in leaves if isinstance(leaf, ShoalError)), leaves[0])

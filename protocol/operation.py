"""An operation that was started: a handle to wait for it, to see how far it is, and to give it up."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import attrs
import trio

from protocol.errors import RequestTimeout, RoundAborted, ShoalError

_T = TypeVar("_T")


def checked_timeout(timeout: float | None) -> float:
    """The seconds that something may take; infinite for None.

    Raises:
        ValueError: It is none: it is negative, or no number.
    """
    if timeout is None:
        return math.inf
    if not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise ValueError(f"a timeout is a number of seconds from 0 on, or None for no limit, not {timeout!r}")
    return timeout


@attrs.frozen
class Progress:
    """How far an operation is. An attempt that fails may begin anew."""

    received: int
    """Pieces of data that have come in."""
    total: int
    """Pieces that come in, in all; 0 while that is not known, or if there are none."""


class Operation(Generic[_T]):
    """A handle. Its task belongs to the collective that has started it.

    Args:
        work: What the operation does; it is given the handle.
        timeout: Seconds from the start after which it is given up; None for no limit.

    Raises:
        ValueError: The timeout is none.
    """

    def __init__(self, work: Callable[[Operation[_T]], Awaitable[_T]], timeout: float | None) -> None:
        self.done = trio.Event()
        """Set when there is a result, or an error."""
        self.measure: Callable[[], tuple[int, int]] | None = None
        """Says how far it is, once it is its turn: received and total."""
        self._callbacks: list[Callable[[], None]] = []
        self._work = work
        self._timeout = checked_timeout(timeout)
        self._scope = trio.CancelScope()
        self._cancelled = False
        self._results: list[_T] = []
        self._error: Exception | None = None

    @property
    def progress(self) -> Progress:
        """How far it is."""
        return Progress(*(self.measure() if self.measure is not None else (0, 0)))

    def cancel(self) -> None:
        """Gives it up, unless it is over; nothing is left of it, and the others go on without us."""
        self._cancelled = True
        self._scope.cancel()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Calls a function, in trio's thread, as soon as it is done."""
        if self.done.is_set():
            callback()
        else:
            self._callbacks.append(callback)

    async def wait(self) -> _T:
        """The result, when it is there. Whoever waits and is cancelled does not cancel the operation.

        Raises:
            RoundAborted: Nothing came of it, or it was cancelled.
            RequestTimeout: Its time was over.
            ShoalError: As the operation says.
            Exception: Whatever is wrong with what the caller gave, such as a ValueError.
        """
        await self.done.wait()
        return self.result()

    def result(self) -> _T:
        """As `wait`, once it is done."""
        if self._error is not None:
            raise self._error
        return self._results[0]

    async def run(self) -> None:
        """Carries it out. Never raises but when cancelled from outside."""
        self._scope.deadline = trio.current_time() + self._timeout
        try:
            with self._scope:
                self._results.append(await self._work(self))
        except Exception as error:  # PyTorch's about what the caller gave, for example: it is nobody else's
            self._error = error
        finally:
            if self._error is None and not self._results:
                self._error = self._unfinished()
            self.measure = None
            self.done.set()
            for callback in self._callbacks:
                callback()

    def _unfinished(self) -> ShoalError:
        if self._cancelled:
            return RoundAborted("the operation was cancelled")
        if trio.current_time() >= self._scope.deadline:
            return RequestTimeout(f"the operation was not finished within {self._timeout:g} s")
        return RoundAborted("the collective has ended")

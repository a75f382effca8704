"""What lives in trio, for programs without it: an async context manager that is entered in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import Generic, TypeVar

import trio

from protocol.errors import RoundAborted, ShoalError, first_error

_T = TypeVar("_T")


@contextmanager
def in_background(
    opening: Callable[[], AbstractAsyncContextManager[_T]],
) -> Iterator[tuple[_T, trio.lowlevel.TrioToken]]:
    """Enters what `opening` gives in a thread that runs trio, and leaves it with the block.

    Yields:
        What entering it gave, and the token with which other threads reach that one.

    Raises:
        ShoalError: As entering it says, or, when the block is left, why it has ended meanwhile.
    """
    thread = _Thread(opening)
    thread.start()
    ended: RoundAborted | None = None
    try:
        yield thread.opened.result()
    except RoundAborted as error:
        ended = error
    finally:
        thread.stop()
    if thread.failure is not None:
        raise thread.failure
    if ended is not None:
        raise ended


class _Thread(threading.Thread, Generic[_T]):
    """Trio's thread."""

    def __init__(self, opening: Callable[[], AbstractAsyncContextManager[_T]]) -> None:
        super().__init__(name="shoal", daemon=True)
        self._opening = opening
        self._scope = trio.CancelScope()
        self._token: trio.lowlevel.TrioToken | None = None
        self._stopped = False
        self.opened: Future[tuple[_T, trio.lowlevel.TrioToken]] = Future()
        """What was entered, or why that failed."""
        self.failure: ShoalError | None = None
        """Why it has ended afterwards, if nobody wanted that."""

    def run(self) -> None:
        """The thread."""
        error: Exception | None = None
        try:
            trio.run(self._live)
        except* ShoalError as group:
            error = first_error(group)
        except* Exception as group:
            error = group
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
        finally:
            if not self.opened.done():
                self.opened.set_exception(error or RoundAborted("the peer did not start"))
            elif isinstance(error, ShoalError):
                self.failure = error
            elif error is not None:
                self.failure = RoundAborted("the peer has ended because of a fault in this program")
                self.failure.__cause__ = error

    def stop(self) -> None:
        """Leaves it, and waits for the end. It may be on its way in still."""
        self._stopped = True
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._scope.cancel)
        self.join()

    async def _live(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with self._scope:
            if self._stopped:
                return
            async with self._opening() as opened:
                self.opened.set_result((opened, self._token))
                await trio.sleep_forever()

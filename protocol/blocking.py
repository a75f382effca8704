"""The collective operations for programs without trio: an `AsyncCollective` in one thread, used from others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Generic, TypeVar

import trio

from protocol.collective import Block, Broadcasted, Collective, Exchanged, Gathered, Outcome, Reduced, Tensors, Window
from protocol.errors import RequestTimeout, RoundAborted
from protocol.identity import PeerId
from protocol.operation import Operation, Progress, checked_timeout
from protocol.operations import AsyncCollective
from protocol.pairs import Pairing

_T = TypeVar("_T")
Group = Collection[PeerId] | None

LOOK = 1.0
"""Seconds between two looks at whether trio's thread is there still, of who waits for it."""


class Handle(Generic[_T]):
    """An operation that was started. Everything here may be called from any thread but trio's."""

    def __init__(self, start: Callable[[], Operation[_T]], token: trio.lowlevel.TrioToken) -> None:
        self._start, self._token = start, token
        self._done = threading.Event()
        self._operation: Operation[_T] | None = None
        self._error: Exception | None = None
        self._in_trio(self._begin)

    @property
    def done(self) -> bool:
        """There is a result, or an error."""
        return self._done.is_set()

    @property
    def progress(self) -> Progress:
        """How far it is."""
        return Progress(0, 0) if self._operation is None else self._operation.progress

    def cancel(self) -> None:
        """Gives it up, unless it is over; the others go on without us."""
        self._in_trio(lambda: None if self._operation is None else self._operation.cancel())

    def give_up(self) -> None:
        """Cancels it, and waits a moment until nothing is left of it: another one of its tag may begin right away."""
        if not self.done:
            self.cancel()
            self._done.wait(LOOK)

    def wait(self, timeout: float | None = None) -> _T:
        """The result, when it is there.

        Args:
            timeout: Seconds to wait; the operation goes on if they are over.

        Raises:
            RequestTimeout: It is not there yet.
            ShoalError, ValueError: As the operation says. ValueError also if the timeout is none.
        """
        ends = time.monotonic() + checked_timeout(timeout)
        while not self._done.wait(max(0.0, min(ends - time.monotonic(), LOOK))):
            if time.monotonic() >= ends:
                raise RequestTimeout(f"the operation is not finished after {timeout:g} s")
            self._in_trio(lambda: None)  # what was handed to a thread that was about to end, nobody has carried out
        if self._error is not None:
            raise self._error
        assert self._operation is not None
        return self._operation.result()

    def _begin(self) -> None:
        try:
            self._operation = self._start()
        except Exception as error:  # it belongs to the caller, and must not end what others do with the collective
            self._finish(error)
        else:
            self._operation.when_done(self._done.set)

    def _in_trio(self, function: Callable[[], None]) -> None:
        try:
            self._token.run_sync_soon(function)
        except trio.RunFinishedError:
            if not self.done:
                self._finish(RoundAborted("the collective has ended"))

    def _finish(self, error: Exception) -> None:
        self._error = error
        self._done.set()


class BlockingCollective(Collective):
    """A `Collective`; what is named `start_…` returns a handle in place of the result.

    Operations of one tag and group are carried out in the order in which they were started, so they should be started
    from one thread, or from threads that agree on an order.

    Args:
        collective: Runs in trio's thread.
        token: Of that thread.
    """

    def __init__(self, collective: AsyncCollective, token: trio.lowlevel.TrioToken) -> None:
        self._collective, self._token = collective, token

    def all_reduce(
        self,
        values: Tensors,
        weight: float = 1.0,
        *,
        group: Group = None,
        tag: str = "",
        timeout: float | None = None,
        window: Window | None = None,
    ) -> Reduced:
        """See `Collective.all_reduce`."""
        return _finished(self.start_all_reduce(values, weight, group=group, tag=tag, timeout=timeout, window=window))

    def exchange(
        self,
        values: Tensors,
        weight: float = 1.0,
        *,
        group: Group = None,
        tag: str = "",
        timeout: float | None = None,
        pairing: Pairing = "random",
    ) -> Exchanged:
        """See `Collective.exchange`."""
        return _finished(self.start_exchange(values, weight, group=group, tag=tag, timeout=timeout, pairing=pairing))

    def gather(
        self, block: Block | None, *, group: Group = None, tag: str = "", timeout: float | None = None
    ) -> Gathered:
        """See `Collective.gather`."""
        return _finished(self.start_gather(block, group=group, tag=tag, timeout=timeout))

    def broadcast(
        self, block: Block | None, *, group: Group = None, tag: str = "", timeout: float | None = None
    ) -> Broadcasted:
        """See `Collective.broadcast`."""
        return _finished(self.start_broadcast(block, group=group, tag=tag, timeout=timeout))

    def barrier(self, *, group: Group = None, tag: str = "", timeout: float | None = None) -> Outcome:
        """See `Collective.barrier`."""
        return _finished(self.start_barrier(group=group, tag=tag, timeout=timeout))

    def start_all_reduce(
        self,
        values: Tensors,
        weight: float = 1.0,
        *,
        group: Group = None,
        tag: str = "",
        timeout: float | None = None,
        window: Window | None = None,
    ) -> Handle[Reduced]:
        """Starts `all_reduce`."""
        start = self._collective.start_all_reduce
        return self._start(partial(start, values, weight, group=group, tag=tag, timeout=timeout, window=window))

    def start_exchange(
        self,
        values: Tensors,
        weight: float = 1.0,
        *,
        group: Group = None,
        tag: str = "",
        timeout: float | None = None,
        pairing: Pairing = "random",
    ) -> Handle[Exchanged]:
        """Starts `exchange`."""
        start = self._collective.start_exchange
        return self._start(partial(start, values, weight, group=group, tag=tag, timeout=timeout, pairing=pairing))

    def start_gather(
        self, block: Block | None, *, group: Group = None, tag: str = "", timeout: float | None = None
    ) -> Handle[Gathered]:
        """Starts `gather`."""
        return self._start(partial(self._collective.start_gather, block, group=group, tag=tag, timeout=timeout))

    def start_broadcast(
        self, block: Block | None, *, group: Group = None, tag: str = "", timeout: float | None = None
    ) -> Handle[Broadcasted]:
        """Starts `broadcast`."""
        return self._start(partial(self._collective.start_broadcast, block, group=group, tag=tag, timeout=timeout))

    def start_barrier(self, *, group: Group = None, tag: str = "", timeout: float | None = None) -> Handle[Outcome]:
        """Starts `barrier`."""
        return self._start(partial(self._collective.start_barrier, group=group, tag=tag, timeout=timeout))

    def _start(self, start: Callable[[], Operation[_T]]) -> Handle[_T]:
        return Handle(start, self._token)


def _finished(handle: Handle[_T]) -> _T:
    try:
        return handle.wait()
    finally:
        handle.give_up()  # in case that we were interrupted

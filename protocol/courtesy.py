"""Letting operations go first: data that can wait gets a small part of what is sent while an operation is going on.

Streams of one connection take turns, and connections share the upload cap as chance has it. So without this, a peer
that gives its state to newcomers would slow an operation down by as many times as there are of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

from protocol.frames import Buffer
from protocol.stream import Stream

SHARE = 1 / 16
"""What is sent of data that can wait, as a part of what else is sent meanwhile."""

QUIET = 1.0
"""Seconds after which an operation that sends nothing is waited for no more: it waits itself, for others."""

_SMALLEST, _LARGEST = 1 << 12, 1 << 18  # bytes of a piece
_QUICK, _SLOW = 0.02, 0.1  # seconds that a piece takes: as long as it takes, what comes after it has to wait
_LOOK = 0.1


class Courtesy:
    """What the operations of one endpoint have in common with whatever gives way to them.

    Args:
        sent: Bytes that the endpoint has sent so far.
    """

    def __init__(self, sent: Callable[[], int]) -> None:
        self._sent = sent
        self._going_on = 0
        self._over = trio.Event()
        self._base = 0  # bytes sent before the operations began
        self._others = 0  # bytes sent since, but for what could have waited
        self._moved_at = 0.0
        self._spent = 0

    @contextmanager
    def first(self) -> Iterator[None]:
        """Within the block an operation is going on, and goes first."""
        if not self._going_on:
            self._base, self._others, self._spent = self._sent(), 0, 0
            self._moved_at = trio.current_time()
        self._going_on += 1
        try:
            yield
        finally:
            self._going_on -= 1
            if not self._going_on:
                self._over.set()
                self._over = trio.Event()

    async def send(self, stream: Stream, data: Buffer) -> None:
        """Sends raw bytes that can wait, in pieces that hold nothing else up for long. As `Stream.send_bytes`."""
        view, position, size = memoryview(data).cast("B"), 0, _SMALLEST
        while position < len(view):
            piece = view[position : position + size]
            await self._turn(len(piece))
            began = trio.current_time()
            await stream.send_bytes(piece)
            position += len(piece)
            seconds = trio.current_time() - began
            size = min(2 * size, _LARGEST) if seconds < _QUICK else size if seconds < _SLOW else _SMALLEST

    async def _turn(self, count: int) -> None:
        while self._going_on and not self._affordable(trio.current_time()):
            with trio.move_on_after(_LOOK):
                await self._over.wait()
        self._spent += count

    def _affordable(self, now: float) -> bool:
        others = self._sent() - self._base - self._spent
        if others > self._others:
            self._others, self._moved_at = others, now
        return self._spent <= SHARE * self._others or now >= self._moved_at + QUIET

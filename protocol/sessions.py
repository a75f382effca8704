"""The conversation between a member of a round and its coordinator, over a stream or inside one process.

A peer that coordinates a round is usually a member of it, too. It talks to itself over a pair of channels, so that
there is one way of taking part and not two.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import trio

from protocol.errors import Overloaded, PeerGone, ProtocolError, RequestTimeout, ShoalError
from protocol.identity import PeerId
from protocol.round_messages import Ahead, Forked, Misfits, Queued, Redirect
from protocol.wire import Message

_T = TypeVar("_T")

MAX_QUEUED = 32
"""Messages for a member that its connection has not taken yet. A round needs two per attempt."""

SOON = 0.02
"""Seconds that messages wait which may turn out not to be needed: often all are ready at once, and planned for."""

FINAL = (Ahead, Forked, Misfits, Redirect)
"""What a coordinator says last."""


class Line(Protocol):
    """What members and coordinators need of a stream. `protocol.endpoint.Stream` is one."""

    @property
    def peer(self) -> PeerId:
        """The other side."""

    async def send(self, message: Message, *, last: bool = False) -> None: ...

    async def receive(self, *types: type[_T], timeout: float | None = None) -> _T: ...


class LocalLine:
    """One end of a conversation with oneself. Raises `PeerGone` once the other end is closed."""

    def __init__(
        self,
        peer: PeerId,
        outgoing: trio.MemorySendChannel[Message],
        incoming: trio.MemoryReceiveChannel[Message],
    ) -> None:
        self.peer = peer
        self._outgoing, self._incoming = outgoing, incoming

    async def send(self, message: Message, *, last: bool = False) -> None:
        try:
            await self._outgoing.send(message)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise PeerGone("the round ended") from None

    async def receive(self, *types: type[_T], timeout: float | None = None) -> _T:
        try:
            with trio.fail_after(math.inf if timeout is None else timeout):
                received = await self._incoming.receive()
        except trio.TooSlowError:
            raise RequestTimeout("no message from ourselves") from None
        except (trio.EndOfChannel, trio.ClosedResourceError):
            raise PeerGone("the round ended") from None
        if not isinstance(received, types):
            raise ProtocolError(f"unexpected {type(received).__name__}")
        return received

    def close(self) -> None:
        self._outgoing.close()
        self._incoming.close()


def local_lines(peer: PeerId) -> tuple[LocalLine, LocalLine]:
    """The two ends of a conversation of a peer with itself."""
    there, from_here = trio.open_memory_channel[Message](MAX_QUEUED)
    here, from_there = trio.open_memory_channel[Message](MAX_QUEUED)
    return LocalLine(peer, there, from_there), LocalLine(peer, here, from_here)


@asynccontextmanager
async def local_line(
    peer: PeerId, final: Message | None, serve: Callable[[Line], Awaitable[None]], spawn: Callable[..., None]
) -> AsyncIterator[LocalLine]:
    """The member's end of a conversation with oneself, for as long as the block runs.

    Args:
        peer: Who we are.
        final: All that the coordinator has to say; None to have it serve the member.
        serve: Coordinates for a member.
        spawn: Starts a task, which may outlive the block.
    """

    async def served() -> None:
        try:
            await serve(theirs)
        finally:
            theirs.close()

    ours, theirs = local_lines(peer)
    if final is not None:
        await theirs.send(final)
    else:
        spawn(served)
    try:
        yield ours
    finally:
        ours.close()


class Session:
    """The coordinator's side of one member's line: sends what is queued, and something at least every `pulse`.

    Args:
        line: The member's line.
        pulse: Seconds.
        load: What the member waits for, see `Queued`.
    """

    def __init__(self, line: Line, pulse: float, load: Callable[[], int]) -> None:
        self.line = line
        self._pulse, self._load = pulse, load
        self._queue, self._queued = trio.open_memory_channel[Message](MAX_QUEUED)
        self._scope = trio.CancelScope()
        self.error: ShoalError | None = None
        """Why the session ended, if not in good order."""

    def put(self, message: Message) -> None:
        """Queues a message; a member that takes none is given up."""
        try:
            self._queue.send_nowait(message)
        except trio.WouldBlock:
            self.end(Overloaded(f"{self.line.peer.short} takes no messages"))

    def end(self, error: ShoalError | None = None) -> None:
        """Ends the session; `run` returns."""
        self.error = self.error or error
        self._scope.cancel()

    async def run(self, reader: RoundReader) -> None:
        """Talks until a final message was sent, the reader is satisfied, the line breaks, or `end` is called."""
        with self._queue, self._queued, self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                try:
                    await reader(self)
                except ShoalError as error:
                    self.end(error)
                nursery.cancel_scope.cancel()

    async def _write(self) -> None:
        patience = min(SOON, self._pulse)
        try:
            while True:
                message: Message = Queued(self._load())
                with trio.move_on_after(patience):
                    message = await self._queued.receive()
                await self.line.send(message)
                if isinstance(message, FINAL):
                    self.end()
                patience = self._pulse
        except ShoalError as error:
            self.end(error)


class RoundReader(Protocol):
    """Receives a member's messages until its last one."""

    async def __call__(self, session: Session) -> None: ...

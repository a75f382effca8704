"""A stream as its user sees it: messages and raw bytes, in order, to and from one peer."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self, TypeVar

import trio

from protocol.errors import Overloaded, ProtocolError, RequestRefused, RequestTimeout, StreamEnded, StreamReset
from protocol.frames import U32, Buffer
from protocol.identity import PeerId
from protocol.liveness import Progress
from protocol.mux import Mux
from protocol.mux_stream import INITIAL_WINDOW, MuxStream, Reset
from protocol.transport import Path
from protocol.wire import MAX_MESSAGE, Message, decode, encode

_T = TypeVar("_T")

_SETTLE = 10.0  # seconds after which credit is given for what was read: on a slow link half a window takes minutes
_SEND_BUFFER = 1 << 16  # bytes of messages that a stream queues before its sender has to wait
STALL = 60.0
"""Seconds in which a peer that could has to take, or send, at least `INITIAL_WINDOW` bytes of what is waited for."""


class Carrier(Protocol):
    """What a stream needs of its connection."""

    mux: Mux
    peer: PeerId
    path: Path

    def check(self) -> None:
        """Raises `PeerGone` if the connection is over."""

    def fail(self, error: ProtocolError) -> None:
        """Ends the connection because the peer broke the rules."""

    def grant(self, raw: MuxStream, count: int) -> None:
        """Lets the peer send as many bytes again."""

    def kick(self) -> None:
        """There may be something to write."""

    def forget(self, stream: Stream) -> None:
        """The stream was closed."""


class Stream:
    """A conversation with one peer: messages and raw bytes in order, both ways, with an end each.

    Used as `async with stream:`. Leaving the block without having called `finish`, or by an exception, resets the
    stream: the other side's calls then raise `StreamReset`. Leaving it after `finish` delivers everything that was
    sent and drops what the other side still sends.

    One task may send and one may receive at a time. All calls raise `PeerGone` when the connection is lost,
    `RequestRefused` when the other side refused the request and `StreamReset` when it gave up the stream.
    """

    def __init__(self, connection: Carrier, raw: MuxStream) -> None:
        self.peer: PeerId = connection.peer
        self.path: Path = connection.path
        """How the connection goes that it is part of."""
        self._connection = connection
        self._mux = connection.mux
        self.raw = raw
        self._readable = trio.lowlevel.ParkingLot()
        self._writable = trio.lowlevel.ParkingLot()
        self._reset: Reset | None = None
        self._closed = False
        self._busy: set[str] = set()
        self._patient_until = 0  # the sender waits for no more than this to be pending
        self._sending = Progress(INITIAL_WINDOW, STALL)
        self._receiving = Progress(INITIAL_WINDOW, STALL)
        self._expected = 0  # raw bytes that the receiver waits for
        self._settled_at = -math.inf
        # A message being received: kept here so that a cancelled receive loses nothing.
        self._partial = bytearray()
        self._size: int | None = None  # once its length has arrived

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(abandon=kind is not None)

    async def send(self, message: Message, *, last: bool = False) -> None:
        """Sends a message. Returns once it is queued.

        If cancelled, either all of the message is sent or nothing.

        Args:
            message: What to send.
            last: Finishes the stream with the same frame.

        Raises:
            MessageTooLong: It is longer than `wire.MAX_MESSAGE`. Nothing was sent.
        """
        await self.send_encoded(encode(message), last=last)

    async def send_encoded(self, data: bytes, *, last: bool = False) -> None:
        """As `send`, for an encoded message."""
        with self._exclusive("send"):
            self._check_sendable()
            await self._until_pending(max(0, _SEND_BUFFER - len(data)))
            self._check_sendable()
            if not self._mux.keep(self.raw, U32.size + len(data)):
                raise self._no_memory()
            self._mux.write(self.raw, U32.pack(len(data)) + data)
            if last:
                self._mux.finish(self.raw)
            self._connection.kick()
        await trio.lowlevel.checkpoint()

    async def send_bytes(self, data: Buffer, *, last: bool = False) -> None:
        """Sends raw bytes, whose number the other side must know. Returns when the buffer may be changed again.

        If cancelled before that, the stream is reset.

        Args:
            data: Any contiguous buffer; it is not copied.
            last: Finishes the stream with the same frame.
        """
        view = memoryview(data)
        with self._exclusive("send"):
            self._check_sendable()
            if view.nbytes:
                self._mux.demote(self.raw)
                self._mux.write(self.raw, view.cast("B"))
            if last:
                self._mux.finish(self.raw)
            self._connection.kick()
            if not view.nbytes:
                await trio.lowlevel.checkpoint()
                return
            try:
                await self._until_pending(0)
                if self.raw.lost:
                    self._check_wanted()
            finally:
                if self.raw.pending:
                    self.reset()

    async def receive(self, *types: type[_T], timeout: float | None = None) -> _T:
        """The next message, which has to be of one of these types.

        If cancelled, nothing is lost: the next call goes on.

        Raises:
            StreamEnded: If the other side finished instead.
            RequestTimeout: If the message is not there in time.
            ProtocolError: If it is anything else. The connection ends.
        """
        return self.parse(await self.receive_encoded(timeout=timeout), types)

    async def receive_encoded(self, *, timeout: float | None = None) -> bytearray:
        """As `receive`, for a message that the caller will `parse`."""
        if timeout is None:
            with self._exclusive("receive"):
                return await self._receive_message()
        try:
            with trio.fail_after(timeout), self._exclusive("receive"):
                return await self._receive_message()
        except trio.TooSlowError:
            raise RequestTimeout(f"{self.peer.short} sent no message within {timeout:g} s") from None

    def parse(self, data: bytearray, types: tuple[type[_T], ...]) -> _T:
        """Decodes a message; a wrong one ends the connection."""
        try:
            return decode(data, types)
        except ProtocolError as error:
            self._connection.fail(error)
            raise

    async def receive_into(self, buffer: Buffer) -> None:
        """Receives raw bytes until the buffer is full. If cancelled in the middle, the stream is reset.

        Raises:
            StreamEnded: If the other side finished before the first of them.
            StreamReset: Also if it may send and hardly does, for `STALL` seconds.
            ProtocolError: If it finished in the middle. The connection ends.
        """
        view = memoryview(buffer)
        with self._exclusive("receive"):
            if self._size is not None or self._partial:
                raise RuntimeError("a message has been received in part: its receive has to be completed first")
            if not view.nbytes:
                await trio.lowlevel.checkpoint()
                return
            self.expect(view.nbytes)
            raw = self.raw
            raw.wanted = view.cast("B")
            self._expected = view.nbytes
            self._receiving.begin(trio.current_time(), 0)
            try:
                while raw.wanted:
                    await self._until_readable(lambda: len(raw.wanted or b"") < view.nbytes)
                    raw.wanted = raw.wanted[self._take(raw.wanted) :]
            finally:
                self._receiving.end()
                missing, raw.wanted = len(raw.wanted or b""), None
                if 0 < missing < view.nbytes:
                    self.reset()

    def expect(self, count: int) -> None:
        """Lets the other side send so many raw bytes, if memory allows, before `receive_into` is called for them.

        They come sooner by a round trip then: after a message that says how many there are, for example.
        """
        self._mux.widen(self.raw, count)
        self._connection.kick()

    @property
    def arrived(self) -> int:
        """Bytes that have come of those that the running `receive_into` waits for; 0 if there is none."""
        return 0 if self.raw.wanted is None else self._expected - len(self.raw.wanted)

    @property
    def retired(self) -> bool:
        """Whether the connection was replaced by another one, which new streams take."""
        return self._mux.retired

    @property
    def withheld(self) -> bool:
        """Whether the peer can send nothing, because we have not let it."""
        return self.raw.allowance <= 0

    async def receive_some(self, buffer: Buffer) -> int:
        """Receives one raw byte or more, as many as are there and fit in; 0 once the other side has finished.

        If cancelled, nothing is lost.
        """
        view = memoryview(buffer).cast("B")
        with self._exclusive("receive"):
            if self._size is not None or self._partial:
                raise RuntimeError("a message has been received in part: its receive has to be completed first")
            self.expect(INITIAL_WINDOW)
            try:
                await self._until_readable(lambda: False)
            except StreamEnded:
                return 0
            return self._take(view)

    async def finish(self) -> None:
        """No more from us. What was sent is delivered, and the other side may go on sending."""
        if not self.raw.finished:
            self._check_sendable()
            self._mux.finish(self.raw)
            self._connection.kick()
        await trio.lowlevel.checkpoint()

    def reset(self, code: str = "", text: str = "") -> None:
        """Gives up the stream. With a code, the other side gets `RequestRefused`, else `StreamReset`."""
        if self._reset is None:
            self._reset = Reset(self.raw, "", "it was given up on our side")
        self._mux.reset(self.raw, code, text)
        self.wake()
        self._connection.kick()

    def close(self, *, abandon: bool) -> None:
        """What leaving the `async with` block does."""
        if self._closed:
            return
        if abandon or not self.raw.finished:
            self.reset()
        elif not self.raw.at_end:
            self._mux.stop(self.raw)
        self._closed = True
        self._mux.memory.give(len(self._partial))
        self._partial = bytearray()
        self._connection.forget(self)

    def on_reset(self, event: Reset) -> None:
        """The other side reset the stream."""
        if self._reset is None:
            self._reset = event
        self.wake()

    def wake(self) -> None:
        """Something changed: let everybody look again."""
        for lot in (self._readable, self._writable):
            if lot:  # to unpark nobody takes longer than to look
                lot.unpark_all()

    def on_progress(self) -> None:
        """Some of what was written has been taken."""
        if self.raw.pending <= self._patient_until and self._writable:
            self._writable.unpark_all()

    def look(self, now: float, stopped: float) -> None:
        """Gives up the stream if it does not move and the peer is the one to move it. For the connection, now and then.

        Args:
            now: The time.
            stopped: Seconds since the last look in which this very process was stopped.
        """
        raw = self.raw
        if now >= self._settled_at + _SETTLE:
            self._settled_at = now
            self._mux.settle(raw)
            self._connection.kick()
        self._sending.excuse(stopped, now)
        self._receiving.excuse(stopped, now)
        if self._sending.running:
            if not raw.starved:
                self._sending.begin(now, -raw.pending)
            elif self._sending.stuck(now, -raw.pending):
                self._give_up("took")
        if self._receiving.running:
            received = self._expected - len(raw.wanted or b"")
            if self.withheld:
                self._receiving.begin(now, received)
            elif self._receiving.stuck(now, received):
                self._give_up("sent")

    def _give_up(self, what: str) -> None:
        if self._reset is None:
            reason = f"{self.peer.short} {what} hardly anything for {STALL:g} s"
            self._reset = Reset(self.raw, "", reason)
            self.reset("", "too slow")

    async def _receive_message(self) -> bytearray:
        while True:
            wanted = U32.size if self._size is None else self._size
            while len(self._partial) < wanted:
                await self._until_readable(lambda: self._size is not None or len(self._partial) > 0)
                # It grows by what has arrived: announcing a long message costs the other side nothing.
                piece = bytearray(min(wanted - len(self._partial), self.raw.available))
                self._hold(len(piece))
                self._take(memoryview(piece))
                self._partial += piece
            complete, self._partial = self._partial, bytearray()
            self._mux.memory.give(len(complete))
            if self._size is not None:
                self._size = None
                return complete
            (size,) = U32.unpack(complete)
            if not 0 < size <= MAX_MESSAGE:
                self._violation(f"a message of {size} bytes was announced")
            self._size = size

    def _hold(self, count: int) -> None:
        """Takes memory for a part of a message: what is read makes room for more, and messages are long."""
        if self._mux.is_ours(self.raw):
            self._mux.memory.overdraw(count)
        elif not self._mux.memory.take(count):
            raise self._no_memory()

    def _no_memory(self) -> Overloaded:
        self.reset("busy", "there is no memory for this")
        return Overloaded(f"too much is kept for {self.peer.short} and others already")

    def _take(self, view: memoryview) -> int:
        """Moves what is there to the view, and lets the peer send as much again."""
        count = self._mux.read_into(self.raw, view)
        self._connection.grant(self.raw, count)
        return count

    async def _until_readable(self, started: Callable[[], bool]) -> None:
        """Waits for at least one byte of what has been `started`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            if self._reset is not None:
                raise self._reset_error()
            if self.raw.available or (self.raw.wanted is not None and not self.raw.wanted):
                return
            if self.raw.at_end:
                if started():
                    self._violation("the stream ended too early")
                raise StreamEnded(f"{self.peer.short} finished the stream")
            self._connection.check()
            await self._readable.park()

    async def _until_pending(self, most: int) -> None:
        """Waits until at most so many bytes of ours are queued. Gives up on a peer that does not read."""
        self._patient_until = most
        self._sending.begin(trio.current_time(), -self.raw.pending)
        try:
            while self.raw.pending > most:
                self._check_wanted()
                await self._writable.park()
        finally:
            self._sending.end()

    def _check_wanted(self) -> None:
        if self._reset is not None:
            raise self._reset_error()
        self._connection.check()
        if self.raw.stopped:
            raise StreamReset(f"{self.peer.short} wants no more data on this stream")

    def _check_sendable(self) -> None:
        self._check_wanted()
        if self.raw.finished:
            raise RuntimeError("the stream was finished on our side")

    def _reset_error(self) -> StreamReset | RequestRefused:
        assert self._reset is not None
        if self._reset.code:
            return RequestRefused(f"{self.peer.short} refused: {self._reset.text}", code=self._reset.code)
        return StreamReset(f"the stream with {self.peer.short} was reset: {self._reset.text or 'no reason given'}")

    def _violation(self, problem: str) -> None:
        error = ProtocolError(f"{self.peer.short}: {problem}")
        self._connection.fail(error)
        raise error

    def _exclusive(self, what: str) -> _Exclusive:
        if self._closed:
            self._connection.check()  # if it has ended, the handler has, and closed what another task may still use
            raise RuntimeError("the stream was closed on our side")
        if what in self._busy:
            raise trio.BusyResourceError(f"another task does {what} on this stream already")
        return _Exclusive(self._busy, what)


class _Exclusive:
    """One task does something meanwhile. In the place of a generator, which takes several times as long."""

    __slots__ = ("_busy", "_what")

    def __init__(self, busy: set[str], what: str) -> None:
        self._busy, self._what = busy, what

    def __enter__(self) -> None:
        self._busy.add(self._what)

    def __exit__(self, *error: object) -> None:
        self._busy.discard(self._what)

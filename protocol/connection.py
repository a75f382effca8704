"""One connection to a peer, and the streams on it: the mux on a secure channel and trio's clock.

Every connection has one task that reads and one that writes; nobody else touches the channel. The reader never waits
for the writer or for whoever uses a stream: what a slow user leaves unread is bounded by the stream's credit. Users
never write: they queue whole frames, so a cancelled user leaves nothing half-written. The writer is shielded, because
a record that was begun has to be completed.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeVar

import attrs
import trio
from attrs.validators import ge, gt, optional

from protocol.channel import SecureChannel
from protocol.errors import (
    PeerGone,
    ProtocolError,
    RequestRefused,
    RequestTimeout,
    ShoalError,
    StreamEnded,
    StreamReset,
)
from protocol.frames import MAX_RECORD, U32, Buffer
from protocol.identity import PeerId
from protocol.mux import (
    INITIAL_WINDOW,
    Event,
    Goodbye,
    Mux,
    MuxLimits,
    MuxStream,
    Opened,
    Pong,
    Readable,
    Reset,
    Retired,
    Stopped,
)
from protocol.rate import TokenBucket
from protocol.wire import MAX_MESSAGE, Message, decode, encode

_T = TypeVar("_T")

_SEND_BUFFER = 1 << 16  # bytes of messages that a stream queues before its sender has to wait
_SMALLEST_WRITE = MAX_RECORD
_LARGEST_WRITE = 16 * MAX_RECORD
# One write should take about this long: urgent frames wait for it. Networking measurements: 256 KiB and more per write
# halve the cost per byte, which only matters on links that take them in no time.
_WRITE_SECONDS = (0.01, 0.05)
_WRITE_TIMEOUT = 30.0  # a peer that answers pings but takes no bytes for so long is of no use
_FAREWELL = 1.0  # seconds for saying goodbye
_STALL = 60.0  # seconds in which a peer that we send data to has to take at least an initial window of it
_WORK_PER_SECOND = 10_000.0  # frames: an honest peer sends far fewer, and 1 GB/s of bulk data is about half of this
_RETIRED_IDLE = 10.0  # seconds after which an unused retired connection ends even if the other side did not retire it


@attrs.frozen(kw_only=True)
class Limits:
    """What an endpoint allows itself and others."""

    max_connections: int = attrs.field(default=256, validator=ge(1))
    """Connections with others at a time."""
    max_pending_handshakes: int = attrs.field(default=64, validator=ge(1))
    """Incoming connections that have not yet proved who they are; a further one replaces the oldest."""
    max_streams: int = attrs.field(default=128, validator=ge(1))
    """Streams that a peer may have open on a connection; we open half as many, so that none is refused in passing."""
    window: int = attrs.field(default=1 << 20, validator=ge(1 << 16))
    """Bytes of one bulk stream that may be on their way or unread."""
    max_buffered: int = attrs.field(default=1 << 26, validator=ge(0))
    """Bytes that the windows of a connection's bulk streams add up to."""
    max_upload: float | None = attrs.field(default=None, validator=optional(gt(0)))
    """Bytes of bulk data per second that all connections send together."""
    max_download: float | None = attrs.field(default=None, validator=optional(gt(0)))
    """Bytes of bulk data per second that all connections take in together."""
    heartbeat: float = attrs.field(default=1.0, validator=gt(0))
    """Seconds between pings."""
    dead_after: float = attrs.field(default=4.0, validator=gt(0))
    """Seconds of silence after which a peer counts as gone."""


class Stream:
    """A conversation with one peer: messages and raw bytes in order, both ways, with an end each.

    Used as `async with stream:`. Leaving the block without having called `finish`, or by an exception, resets the
    stream: the other side's calls then raise `StreamReset`. Leaving it after `finish` delivers everything that was
    sent and drops what the other side still sends.

    One task may send and one may receive at a time. All calls raise `PeerGone` when the connection is lost,
    `RequestRefused` when the other side refused the request and `StreamReset` when it gave up the stream.
    """

    def __init__(self, connection: Connection, raw: MuxStream) -> None:
        self.peer: PeerId = connection.peer
        self._connection = connection
        self._mux = connection._mux
        self._raw = raw
        self._readable = trio.lowlevel.ParkingLot()
        self._writable = trio.lowlevel.ParkingLot()
        self._reset: Reset | None = None
        self._closed = False
        self._busy: set[str] = set()
        # A message being received: kept here so that a cancelled receive loses nothing.
        self._partial = bytearray()
        self._size: int | None = None  # once its length has arrived

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(abandon=kind is not None)

    async def send(self, message: Message) -> None:
        """Sends a message. Returns once it is queued.

        If cancelled, either all of the message is sent or nothing.
        """
        await self.send_encoded(encode(message))

    async def send_encoded(self, data: bytes, *, last: bool = False) -> None:
        """As `send`, for an encoded message; `last` finishes the stream with the same frame."""
        with self._exclusive("send"):
            self._check_sendable()
            await self._until_pending(max(0, _SEND_BUFFER - len(data)))
            self._mux.write(self._raw, U32.pack(len(data)) + data)
            if last:
                self._mux.finish(self._raw)
            self._connection.kick()
        await trio.lowlevel.checkpoint()

    async def send_bytes(self, data: Buffer) -> None:
        """Sends raw bytes, whose number the other side must know. Returns when the buffer may be changed again.

        If cancelled before that, the stream is reset.

        Args:
            data: Any contiguous buffer; it is not copied.
        """
        view = memoryview(data)
        with self._exclusive("send"):
            self._check_sendable()
            if not view.nbytes:
                await trio.lowlevel.checkpoint()
                return
            self._mux.write(self._raw, view.cast("B"))
            self._connection.kick()
            try:
                await self._until_pending(0)
                if self._raw.lost:
                    self._check_sendable()
            finally:
                if self._raw.pending:
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
        try:
            with trio.fail_after(math.inf if timeout is None else timeout), self._exclusive("receive"):
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
            ProtocolError: If it finished in the middle. The connection ends.
        """
        view = memoryview(buffer)
        with self._exclusive("receive"):
            if self._size is not None or self._partial:
                raise RuntimeError("a message has been received in part: its receive has to be completed first")
            if not view.nbytes:
                await trio.lowlevel.checkpoint()
                return
            view = view.cast("B")
            filled = 0
            self._mux.widen(self._raw)
            self._connection.kick()
            try:
                while filled < len(view):
                    await self._until_readable(started=filled > 0)
                    filled += self._take(view[filled:])
            finally:
                if 0 < filled < len(view):
                    self.reset()

    async def finish(self) -> None:
        """No more from us. What was sent is delivered, and the other side may go on sending."""
        if not self._raw.finished:
            self._check_sendable()
            self._mux.finish(self._raw)
            self._connection.kick()
        await trio.lowlevel.checkpoint()

    def reset(self, code: str = "", text: str = "") -> None:
        """Gives up the stream. With a code, the other side gets `RequestRefused`, else `StreamReset`."""
        if self._reset is None:
            self._reset = Reset(self._raw, "", "it was given up on our side")
        self._mux.reset(self._raw, code, text)
        self.wake()
        self._connection.kick()

    def close(self, *, abandon: bool) -> None:
        """What leaving the `async with` block does."""
        if self._closed:
            return
        if abandon or not self._raw.finished:
            self.reset()
        elif not self._raw.at_end:
            self._mux.stop(self._raw)
        self._closed = True
        self._connection.forget(self)

    def on_reset(self, event: Reset) -> None:
        """The other side reset the stream."""
        if self._reset is None:
            self._reset = event
        self.wake()

    def wake(self) -> None:
        """Something changed: let everybody look again."""
        self._readable.unpark_all()
        self._writable.unpark_all()

    async def _receive_message(self) -> bytearray:
        while True:
            wanted = U32.size if self._size is None else self._size
            while len(self._partial) < wanted:
                await self._until_readable(started=self._size is not None or len(self._partial) > 0)
                # It grows by what has arrived: announcing a long message costs the other side nothing.
                piece = bytearray(min(wanted - len(self._partial), self._raw.available))
                self._take(memoryview(piece))
                self._partial += piece
            complete, self._partial = self._partial, bytearray()
            if self._size is not None:
                self._size = None
                return complete
            (size,) = U32.unpack(complete)
            if not 0 < size <= MAX_MESSAGE:
                self._violation(f"a message of {size} bytes was announced")
            self._size = size

    def _take(self, view: memoryview) -> int:
        """Moves what is there to the view, and lets the peer send as much again."""
        count = self._mux.read_into(self._raw, view)
        self._connection.grant(self._raw, count)
        return count

    async def _until_readable(self, *, started: bool) -> None:
        """Waits for at least one byte of what has been `started`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            if self._reset is not None:
                raise self._reset_error()
            if self._raw.available:
                return
            if self._raw.at_end:
                if started:
                    self._violation("the stream ended too early")
                raise StreamEnded(f"{self.peer.short} finished the stream")
            self._connection.check()
            await self._readable.park()

    async def _until_pending(self, most: int) -> None:
        """Waits until at most so many bytes of ours are queued. Gives up on a peer that does not read."""
        while self._raw.pending > most:
            before = self._raw.pending
            with trio.move_on_after(_STALL) as patience:
                while self._raw.pending > most:
                    self._check_sendable()
                    await self._writable.park()
                self._check_sendable()
            if patience.cancelled_caught and self._raw.starved and before - self._raw.pending < INITIAL_WINDOW:
                self.reset("", "too slow")
                raise StreamReset(f"{self.peer.short} took hardly anything for {_STALL:g} s")

    def _check_sendable(self) -> None:
        if self._reset is not None:
            raise self._reset_error()
        self._connection.check()
        if self._raw.stopped:
            raise StreamReset(f"{self.peer.short} wants no more data on this stream")
        if self._raw.finished:
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

    @contextmanager
    def _exclusive(self, what: str) -> Iterator[None]:
        if self._closed:
            raise RuntimeError("the stream was closed on our side")
        if what in self._busy:
            raise trio.BusyResourceError(f"another task does {what} on this stream already")
        self._busy.add(what)
        try:
            yield
        finally:
            self._busy.discard(what)


class Connection:
    """A connection, from the handshake to its end. `run` must run for anything to move.

    Args:
        channel: What the handshake made. The connection closes it.
        initiator: This side dialled.
        limits: See `Limits`.
        serve: Called in a task of its own for each stream that the peer opens, which is closed when it returns.
        ended: Called when the connection can no longer be used, which is a little before `run` returns.
        upload: The bucket for bulk data sent, shared by all connections.
        download: The one for bulk data received.
    """

    def __init__(
        self,
        channel: SecureChannel,
        *,
        initiator: bool,
        limits: Limits,
        serve: Callable[[Connection, Stream], Awaitable[None]],
        ended: Callable[[Connection], None],
        upload: TokenBucket | None = None,
        download: TokenBucket | None = None,
    ) -> None:
        self.peer = channel.peer_id
        self.channel = channel
        self.initiator = initiator
        self.failure: ShoalError | None = None
        """Why the connection ended: `PeerGone`, or `ProtocolError` if the peer broke the rules."""
        self.rtt: float | None = None
        """Smoothed round-trip time in seconds, once it has been measured."""
        self._limits = limits
        self._serve = serve
        self._ended = ended
        self._upload = upload
        self._download = download
        self._withheld: dict[MuxStream, int] = {}
        self._granting = trio.lowlevel.ParkingLot()
        self._mux = Mux(
            initiator=initiator,
            limits=MuxLimits(limits.max_streams, limits.window, limits.max_buffered),
        )
        self._streams: dict[int, Stream] = {}
        self._serving = 0
        self._slots = trio.lowlevel.ParkingLot()
        self._wake = trio.lowlevel.ParkingLot()
        self._over = trio.Event()
        self._writing = trio.CancelScope(shield=True)
        self._nursery: trio.Nursery | None = None
        self._pings = 0
        self._pinged_at: float | None = None  # when the ping that is not answered yet was sent
        self._heard_at = 0.0
        self._retired_at = math.inf

    @property
    def usable(self) -> bool:
        """New streams can be opened from this side."""
        return self.failure is None and not self._mux.retired

    @property
    def streams(self) -> int:
        """Streams in use on our side."""
        return len(self._streams)

    async def run(self) -> None:
        """Moves data until the connection is over, then closes the channel. Cancelling it says goodbye first."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._write)
                nursery.start_soon(self._read)
                nursery.start_soon(self._beat)
                if self._download is not None:
                    nursery.start_soon(self._grant_withheld, self._download)
                try:
                    await self._over.wait()
                finally:
                    self.close("shutting down")
                    self._writing.deadline = trio.current_time() + _FAREWELL
                    nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self.channel.aclose()

    async def open(self, *, bulk: bool = False) -> Stream:
        """Opens a stream, when fewer than half of `Limits.max_streams` of ours are open.

        Raises:
            PeerGone: If the connection is over.
            ProtocolError: If the peer does not end its side of streams that we have ended. The connection ends.
        """
        ours = 1 if self.initiator else 0
        await trio.lowlevel.checkpoint_if_cancelled()
        self.check()
        while sum(1 for number in self._streams if number % 2 == ours) >= max(1, self._limits.max_streams // 2):
            await self._slots.park()
            self.check()
        if self._mux.opened > 2 * self._limits.max_streams:
            error = ProtocolError(f"{self.peer.short} does not end its side of streams")
            self.fail(error)
            raise error
        stream = Stream(self, self._mux.open(bulk=bulk))
        self._streams[stream._raw.id] = stream
        return stream

    def check(self) -> None:
        """Raises `PeerGone` if the connection is over."""
        if self.failure is not None:
            raise PeerGone(str(self.failure))

    def close(self, reason: str) -> None:
        """Ends the connection, telling the peer why."""
        self._end(PeerGone(f"the connection to {self.peer.short} was closed on our side: {reason}"), farewell=reason)

    def fail(self, error: ProtocolError) -> None:
        """Ends the connection because the peer broke the rules."""
        error.blamed = True
        self._end(error, farewell=f"protocol error: {error}")

    def retire(self) -> None:
        """Opens no more streams from this side. When both sides have, and no stream is left, the connection ends."""
        self._mux.retire()
        self._retired_at = trio.current_time()
        self.kick()
        self._slots.unpark_all()

    def grant(self, raw: MuxStream, count: int) -> None:
        """Lets the peer send as many bytes again, not before the download cap allows it."""
        if raw.bulk and self._download is not None:
            self._withheld[raw] = self._withheld.get(raw, 0) + count
            self._granting.unpark_all()
        else:
            self._mux.grant(raw, count)
            self.kick()

    def kick(self) -> None:
        """There may be something to write."""
        self._wake.unpark_all()

    def forget(self, stream: Stream) -> None:
        """A stream was closed."""
        self._streams.pop(stream._raw.id, None)
        self._slots.unpark_all()
        self.kick()

    def _end(self, failure: ShoalError, *, farewell: str | None = None) -> None:
        if self.failure is not None:
            return
        self.failure = failure
        if farewell is None:
            self._writing.cancel()
        else:
            self._mux.goodbye(farewell)
        self._over.set()
        self.kick()
        self._slots.unpark_all()
        for stream in self._streams.values():
            stream.wake()
        self._ended(self)

    async def _read(self) -> None:
        patience = TokenBucket(_WORK_PER_SECOND)
        try:
            while self.failure is None:
                record = await self.channel.receive()
                self._heard_at = now = trio.current_time()
                work = self._mux.work
                for event in self._mux.receive(record):
                    self._dispatch(event)
                self._end_if_done()
                if self._mux.urgent or self._mux.bulk_waiting:
                    self.kick()
                # Whoever floods us waits, so that others get their turn.
                patience.spend(self._mux.work - work, now)
                if delay := patience.delay(now):
                    await trio.sleep(delay)
        except PeerGone as error:
            self._end(error)
        except ProtocolError as error:
            self.fail(error)

    def _dispatch(self, event: Event) -> None:
        match event:
            case Readable(raw) | Stopped(raw):
                if (stream := self._streams.get(raw.id)) is not None:
                    stream.wake()
            case Opened(raw):
                self._accept(raw)
            case Reset(raw):
                if (stream := self._streams.get(raw.id)) is not None:
                    stream.on_reset(event)
            case Pong(token):
                if self._pinged_at is not None and token == self._token():
                    sample = trio.current_time() - self._pinged_at
                    self.rtt = sample if self.rtt is None else 0.8 * self.rtt + 0.2 * sample
                    self._pinged_at = None
            case Goodbye(reason):
                raise PeerGone(f"{self.peer.short} closed the connection: {reason}")
            case Retired():
                pass

    def _accept(self, raw: MuxStream) -> None:
        stream = Stream(self, raw)
        # Tasks outlive the streams that the peer resets, so they are counted for themselves.
        if self._serving >= 2 * self._limits.max_streams or self._nursery is None:
            stream.reset("busy", "too many requests at a time")
            return
        self._streams[raw.id] = stream
        self._serving += 1
        self._nursery.start_soon(self._serve_stream, stream)

    async def _serve_stream(self, stream: Stream) -> None:
        try:
            async with stream:
                await self._serve(self, stream)
        finally:
            self._serving -= 1

    async def _write(self) -> None:
        budget = _LARGEST_WRITE // 4
        try:
            with self._writing:
                while await self._until_writable():
                    started = trio.current_time()
                    allowance = budget if self._upload is None else self._upload.level(started)
                    batch = self._mux.take(budget, max(0, allowance))
                    if self._upload is not None:
                        self._upload.spend(batch.bulk, started)
                    for raw in batch.progressed:
                        if (stream := self._streams.get(raw.id)) is not None:
                            stream.wake()
                    if batch.records:
                        with trio.fail_after(_WRITE_TIMEOUT):
                            await self.channel.send(*batch.records)
                    budget = _adapted(budget, trio.current_time() - started)
                    self._end_if_done()
        except PeerGone as error:
            self._end(error)
        except trio.TooSlowError:
            self._end(PeerGone(f"{self.peer.short} took no data for {_WRITE_TIMEOUT:g} s"))

    async def _until_writable(self) -> bool:
        """Waits until there is something to write; False when there will be nothing any more."""
        while not self._mux.closed:
            if self._mux.urgent:
                return True
            if self._mux.bulk_waiting:
                delay = 0.0 if self._upload is None else self._upload.delay(trio.current_time())
                if not delay:
                    return True
                with trio.move_on_after(delay):
                    await self._wake.park()
            else:
                await self._wake.park()
        return False

    async def _beat(self) -> None:
        """Pings, and notices when the peer has gone silent."""
        limits = self._limits
        heard = self.channel.bytes_received
        self._heard_at = now = trio.current_time()
        while True:
            if self._pinged_at is None:
                self._pings += 1
                self._pinged_at = now
                self._mux.ping(self._token())
                self.kick()
            expected = min(now + limits.heartbeat, max(now, self._heard_at + limits.dead_after))
            await trio.sleep_until(expected)
            now = trio.current_time()
            # If this very process was stopped for a while, that is not the peer's silence.
            self._heard_at += max(0.0, now - expected - limits.heartbeat)
            if self.channel.bytes_received != heard:  # a long record may arrive slowly
                heard = self.channel.bytes_received
                self._heard_at = max(self._heard_at, expected - limits.heartbeat)
            if now >= self._heard_at + limits.dead_after:
                self._end(PeerGone(f"{self.peer.short} has been silent for {limits.dead_after:g} s"))
                return
            if now - self._retired_at > _RETIRED_IDLE and self._mux.idle and not self._streams:
                self.close("not needed")
                return

    async def _grant_withheld(self, download: TokenBucket) -> None:
        while True:
            while not self._withheld:
                await self._granting.park()
            await trio.sleep(download.delay(trio.current_time()))
            raw = next(iter(self._withheld))
            count = self._withheld.pop(raw)
            download.spend(count, trio.current_time())
            self._mux.grant(raw, count)
            self.kick()

    def _token(self) -> bytes:
        return self._pings.to_bytes(8, "big")

    def _end_if_done(self) -> None:
        if self._mux.retired and self._mux.peer_retired and self._mux.idle and not self._streams:
            self.close("replaced by another connection")


def _adapted(budget: int, seconds: float) -> int:
    """The size of the next write, after one that took so long."""
    quick, slow = _WRITE_SECONDS
    if seconds < quick:
        return min(2 * budget, _LARGEST_WRITE)
    if seconds > slow:
        return max(budget // 2 // MAX_RECORD * MAX_RECORD, _SMALLEST_WRITE)
    return budget

"""One connection to a peer, and the streams on it: the mux on a secure channel and trio's clock.

Every connection has one task that reads and one that writes; nobody else touches the channel. The reader never waits
for the writer or for whoever uses a stream: what a slow user leaves unread is bounded by the stream's credit. Users
never write: they queue whole frames, so a cancelled user leaves nothing half-written. The writer is shielded, because
a record that was begun has to be completed.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import attrs
import trio
from attrs.validators import ge, gt, le, optional

from protocol.budget import Account
from protocol.channel import SecureChannel
from protocol.errors import (
    PeerGone,
    ProtocolError,
    ShoalError,
)
from protocol.frames import RECORD
from protocol.lane_policy import MAX_LANES
from protocol.lanes import Dial, Lanes
from protocol.liveness import Progress, Pulse
from protocol.mux import FIRST_WINDOW, Mux
from protocol.mux_stream import (
    INITIAL_WINDOW,
    Acknowledged,
    Event,
    Goodbye,
    LanesWanted,
    MuxLimits,
    MuxStream,
    Opened,
    Placed,
    Pong,
    Readable,
    Reset,
    Retired,
    Stopped,
)
from protocol.pacing import Senders, next_size
from protocol.rate import TokenBucket
from protocol.stream import Stream
from protocol.transport import Path

_SMALLEST_WRITE = RECORD // 4
LARGEST_WRITE = 32 * RECORD
"""Bytes of plaintext in one write, at most: from 256 KiB on, a byte costs half, where a link takes them at once."""
# A peer that answers pings but takes less than so many bytes in so long is of no use.
_LEAST_TAKEN, _WRITE_TIMEOUT = RECORD, 30.0
_FAREWELL = 1.0  # seconds for saying goodbye
_WORK_PER_SECOND = 10_000.0  # frames: an honest peer sends far fewer, and 1 GB/s of bulk data is about half of this
_WORK_AT_ONCE = 256
_WORK_COUNTED = 16  # frames that are counted together
_TASK = 1 << 14  # bytes of objects that serving a request takes, about
_RETIRED_REST = (
    10.0  # seconds after its last stream that a retired connection ends: the other side may still be reading
)
_RETIRED_IDLE = 10.0  # seconds after which an unused retired connection ends even if the other side did not retire it


@attrs.frozen(kw_only=True)
class Limits:
    """What an endpoint allows itself and others."""

    max_connections: int = attrs.field(default=256, validator=ge(1))
    """Connections with others at a time."""
    max_pending_handshakes: int = attrs.field(default=256, validator=ge(1))
    """Incoming connections that have not yet proved who they are; a further one replaces the oldest. They cost little,
    and how many addresses it takes to have each replaced before it is done depends on this."""
    max_streams: int = attrs.field(default=128, validator=ge(1))
    """Streams that a peer may have open on a connection; we open half as many, so that none is refused in passing."""
    window: int = attrs.field(default=1 << 23, validator=ge(1 << 16))
    """Bytes of one bulk stream that may be on their way or unread, at most: what a gigabit takes 60 ms for."""
    max_buffered: int = attrs.field(default=1 << 28, validator=ge(0))
    """Bytes that all connections together keep: windows of streams, parts of messages, answers that are not taken."""
    max_upload: float | None = attrs.field(default=None, validator=optional(gt(0)))
    """Bytes of bulk data per second that all connections send together."""
    max_download: float | None = attrs.field(default=None, validator=optional(gt(0)))
    """Bytes of bulk data per second that all connections take in together."""
    max_lanes: int = attrs.field(default=MAX_LANES, validator=[ge(0), le(MAX_LANES)])
    """Connections beside the first one that bulk data between two peers may have, where that makes it faster."""
    heartbeat: float = attrs.field(default=1.0, validator=gt(0))
    """Seconds between pings."""
    dead_after: float = attrs.field(default=4.0, validator=gt(0))
    """Seconds of silence after which a peer counts as gone; more where round trips are long, see `liveness.Pulse`."""
    relay: bool = True
    """Whether bytes are passed on between two others that cannot reach each other. They are encrypted end to end."""
    max_circuits: int = attrs.field(default=64, validator=ge(0))
    """Pairs of others for whom bytes are passed on at a time."""
    max_circuits_of_peer: int = attrs.field(default=16, validator=ge(0))
    """Those of them that one peer asked for."""
    max_relayed: int = attrs.field(default=1 << 32, validator=ge(0))
    """Bytes that are passed on for one pair; then it has to ask again."""
    max_relay_rate: float = attrs.field(default=8e6, validator=gt(0))
    """Bytes per second that are passed on for all pairs together."""


class Connection:
    """A connection, from the handshake to its end. `run` must run for anything to move.

    Args:
        channel: What the handshake made. The connection closes it.
        initiator: This side dialled.
        limits: See `Limits`.
        serve: Called in a task of its own for each stream that the peer opens, which is closed when it returns.
        ended: Called when the connection can no longer be used, which is a little before `run` returns.
        memory: Its part of what all connections may keep.
        path: How it was made.
        upload: The bucket for bulk data sent, shared by all connections.
        download: The one for bulk data received.
        dial: How lanes are dialled; None if there can be none.
        senders: Of bulk data: all connections that may share a line.
    """

    def __init__(
        self,
        channel: SecureChannel,
        *,
        initiator: bool,
        limits: Limits,
        serve: Callable[[Connection, Stream], Awaitable[None]],
        ended: Callable[[Connection], None],
        memory: Account,
        path: Path = "direct",
        upload: TokenBucket | None = None,
        download: TokenBucket | None = None,
        dial: Dial | None = None,
        senders: Senders | None = None,
    ) -> None:
        self.peer = channel.peer_id
        self.channel = channel
        self.initiator = initiator
        self.path = path
        self.failure: ShoalError | None = None
        """Why the connection ended: `PeerGone`, or `ProtocolError` if the peer broke the rules."""
        self.evidence = b""
        """What the peer ended it with to show that our identity is in use. Nobody has verified it; see `rivals`."""
        self._limits = limits
        self._serve = serve
        self._ended = ended
        self.upload = upload
        self._download = download
        self._withheld: dict[MuxStream, int] = {}
        self._granting = trio.lowlevel.ParkingLot()
        self.mux = Mux(
            initiator=initiator,
            limits=MuxLimits(limits.max_streams, _window(limits)),
            memory=memory,
        )
        senders = senders or Senders()
        self.lanes = Lanes(self, dial, limit=limits.max_lanes, most_kept=2 * _window(limits), senders=senders)
        self._patience = TokenBucket(_WORK_PER_SECOND)
        self._worked = 0  # of the mux's work, what patience was spent for
        self._streams: dict[int, Stream] = {}
        self._serving = 0
        self._slots = trio.lowlevel.ParkingLot()
        self._wake = trio.lowlevel.ParkingLot()
        self._over = trio.Event()
        self._writing = trio.CancelScope(shield=True)
        self._nursery: trio.Nursery | None = None
        self._pulse = Pulse(
            heartbeat=limits.heartbeat, dead_after=limits.dead_after, rtt=channel.rtt, now=trio.current_time()
        )
        self._write_progress = Progress(_LEAST_TAKEN, _WRITE_TIMEOUT)
        self._taken = 0  # bytes, as of the last beat: asking costs as much as sending 10 KiB
        self._retired_at = math.inf
        self._used_at = -math.inf

    @property
    def usable(self) -> bool:
        """New streams can be opened from this side."""
        return self.failure is None and not self.mux.retired

    @property
    def fresh(self) -> bool:
        """The peer was heard a moment ago."""
        return self._pulse.fresh(trio.current_time())

    @property
    def rtt(self) -> float:
        """Smoothed round-trip time in seconds."""
        return self._pulse.rtt

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
                nursery.start_soon(self.lanes.run)
                if self._download is not None:
                    nursery.start_soon(self._grant_withheld, self._download)
                try:
                    await self._over.wait()
                finally:
                    self.close("shutting down")
                    self._writing.deadline = trio.current_time() + _FAREWELL
                    nursery.cancel_scope.cancel()
        finally:
            self.mux.memory.close()
            with trio.CancelScope(shield=True):
                await self.channel.aclose()

    async def open(self, *, bulk: bool = False, one_way: bool = False) -> Stream:
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
        if self.mux.opened > 2 * self._limits.max_streams:
            error = ProtocolError(f"{self.peer.short} does not end its side of streams")
            self.fail(error)
            raise error
        stream = Stream(self, self.mux.open(bulk=bulk, one_way=one_way))
        self._streams[stream.raw.id] = stream
        return stream

    def check(self) -> None:
        """Raises `PeerGone` if the connection is over."""
        if self.failure is not None:
            raise PeerGone(str(self.failure))

    def close(self, reason: str, *, evidence: bytes = b"") -> None:
        """Ends the connection, telling the peer why; with evidence if the reason is that its identity is in use."""
        failure = PeerGone(f"the connection to {self.peer.short} was closed on our side: {reason}")
        self._end(failure, farewell=reason, evidence=evidence)

    def fail(self, error: ProtocolError) -> None:
        """Ends the connection because the peer broke the rules."""
        error.blamed = True
        self._end(error, farewell=f"protocol error: {error}")

    def retire(self) -> None:
        """Opens no more streams from this side. When both sides have, and no stream is left, the connection ends."""
        self.mux.retire()
        self._retired_at = trio.current_time()
        self.kick()
        self._slots.unpark_all()

    def grant(self, raw: MuxStream, count: int) -> None:
        """Lets the peer send as many bytes again, not before the download cap allows it."""
        if raw.bulk and self._download is not None:
            self._withheld[raw] = self._withheld.get(raw, 0) + count
            self._granting.unpark_all()
        else:
            self.mux.grant(raw, count)
            self.kick()

    def kick(self) -> None:
        """There may be something to write."""
        if self._wake and (self.mux.urgent or self.mux.bulk_waiting):
            self._wake.unpark_all()
        if self.mux.pieces_waiting:
            self.lanes.kick()

    def progressed(self, raw: MuxStream) -> None:
        """Some of a stream's data was taken."""
        if (stream := self._streams.get(raw.id)) is not None:
            stream.on_progress()

    @property
    def bytes_sent(self) -> int:
        """Bytes on the wire so far, lanes included."""
        return self.channel.bytes_sent + self.lanes.bytes_sent

    @property
    def carried(self) -> float:
        """Bytes per second that the way has carried at most lately; 0 where nothing is known."""
        return self.lanes.pacer.carried

    @property
    def bytes_received(self) -> int:
        """Bytes from the wire so far, lanes included."""
        return self.channel.bytes_received + self.lanes.bytes_received

    def forget(self, stream: Stream) -> None:
        """A stream was closed."""
        self._streams.pop(stream.raw.id, None)
        self._used_at = trio.current_time()
        self._slots.unpark_all()
        self.kick()

    def _end(self, failure: ShoalError, *, farewell: str | None = None, evidence: bytes = b"") -> None:
        if self.failure is not None:
            return
        self.failure = failure
        if farewell is None:
            self._writing.cancel()
        else:
            self.mux.goodbye(farewell, evidence)
        self._over.set()
        self.kick()
        self._slots.unpark_all()
        for stream in self._streams.values():
            stream.wake()
        self._ended(self)

    async def _read(self) -> None:
        channel, mux = self.channel, self.mux
        try:
            while self.failure is None:
                await channel.fill()
                self._pulse.heard(trio.current_time())
                while self.failure is None:
                    room = mux.room()
                    if room and (count := channel.take_into(room)):
                        if events := mux.placed(room[:count]):
                            await self.hand_over(events)
                        if count == len(room) or self.failure is not None:
                            continue
                    record = channel.take()  # if there was room, it is not for this one
                    if record is None:
                        break
                    if events := mux.receive(record):
                        await self.hand_over(events)
                    if mux.work - self._worked >= _WORK_AT_ONCE:
                        await self.rest()
                await self.rest()
        except PeerGone as error:
            self._end(error)
        except ProtocolError as error:
            self.fail(error)

    async def rest(self) -> None:
        """After some records: whoever floods us waits, so that others get their turn."""
        self._end_if_done()
        self.kick()
        if self.mux.work - self._worked < _WORK_COUNTED:
            return
        now = trio.current_time()
        self._patience.spend(self.mux.work - self._worked, now)
        self._worked = self.mux.work
        if delay := self._patience.delay(now):
            await trio.sleep(delay)

    async def hand_over(self, events: list[Event]) -> None:
        """Tells those concerned what arrived. Lets whoever waits for raw bytes say where the next ones belong."""
        for event in events:
            self._dispatch(event)
        if events and isinstance(last := events[-1], Readable) and last.stream.wanted is not None:
            for _ in range(2):  # tasks run in any order, so the first time we may be before them
                await trio.lowlevel.checkpoint()

    def _dispatch(self, event: Event) -> None:
        match event:
            case Readable(raw) | Stopped(raw):
                if (stream := self._streams.get(raw.id)) is not None:
                    stream.wake()
            case Placed(raw, count):
                self.grant(raw, count)
            case Opened(raw):
                self._accept(raw)
            case Reset(raw):
                if (stream := self._streams.get(raw.id)) is not None:
                    stream.on_reset(event)
            case Pong(token):
                self._pulse.answered(token, trio.current_time())
            case Acknowledged():
                self.lanes.on_acknowledged(event)
            case LanesWanted(count):
                self.lanes.on_wanted(count)
            case Goodbye(reason, evidence):
                self.evidence = evidence
                said = "says that" if evidence else "closed the connection:"
                raise PeerGone(f"{self.peer.short} {said} {reason}")
            case Retired():
                pass

    def _accept(self, raw: MuxStream) -> None:
        stream = Stream(self, raw)
        # Tasks outlive the streams that the peer resets, so they are counted for themselves.
        full = self._serving >= 2 * self._limits.max_streams
        if self._nursery is None or full or not self.mux.memory.take(_TASK):
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
            self.mux.memory.give(_TASK)

    async def _write(self) -> None:
        budget = _SMALLEST_WRITE  # nothing is known about the line: what is urgent should not wait for seconds
        try:
            with self._writing:
                while await self._until_writable():
                    started = trio.current_time()
                    allowance = budget if self.upload is None else self.upload.level(started)
                    record = self.lanes.longest_record(min(budget, allowance))
                    batch = self.mux.take(budget, max(0, allowance), record)
                    if self.upload is not None:
                        self.upload.spend(batch.bulk, started, self)
                    self.lanes.on_bulk(batch.bulk)
                    for raw in batch.progressed:
                        self.progressed(raw)
                    if batch.records:
                        self._write_progress.begin(started, self._taken)
                        await self.channel.send(*batch.records)
                        self._write_progress.end()
                    written = sum(len(record) for record in batch.records)
                    budget = self._next_budget(budget, written, trio.current_time() - started)
                    self._end_if_done()
        except PeerGone as error:
            self._end(error)
        finally:
            if self.upload is not None:
                self.upload.leave(self)

    def _next_budget(self, budget: int, written: int, seconds: float) -> int:
        """The size of the next write, after one of so many bytes. From time to time, decides the rate too."""
        self.lanes.pace()
        if burst := self.lanes.pacer.burst:
            whole = burst // RECORD * RECORD
            return min(whole or burst, LARGEST_WRITE)
        return next_size(budget, written, seconds, smallest=_SMALLEST_WRITE, largest=LARGEST_WRITE)

    async def _until_writable(self) -> bool:
        """Waits until there is something to write; False when there will be nothing any more."""
        while not self.mux.closed:
            if self.mux.urgent:
                return True
            if self.mux.bulk_waiting:
                delay = 0.0 if self.upload is None else self.upload.delay(trio.current_time(), self)
                if not delay:
                    return True
                self.lanes.pacer.pause()
                with trio.move_on_after(delay):
                    await self._wake.park()
            else:
                if self.upload is not None and not self.mux.pieces_waiting:
                    self.upload.leave(self)  # what was to be sent was given up
                self.lanes.pause()
                await self._wake.park()
                await trio.lowlevel.checkpoint()  # what others are about to write goes in the same records
        return False

    async def _beat(self) -> None:
        """Pings, and notices when the peer has gone silent, or takes nothing."""
        pulse = self._pulse
        now = trio.current_time()
        pulse.heard(now)
        while True:
            self.mux.ping(pulse.ping(now))
            self.kick()
            await trio.sleep_until(pulse.next_beat(now))
            now = trio.current_time()
            stopped = pulse.beat(now)
            self._write_progress.excuse(stopped, now)
            if pulse.gone(now):
                self._end(PeerGone(f"{self.peer.short} has been silent for {pulse.patience:.3g} s"))
                return
            self._taken = self.channel.taken
            if self._write_progress.stuck(now, self._taken):
                self._end(PeerGone(f"{self.peer.short} took no data for {_WRITE_TIMEOUT:g} s"))
                return
            for stream in list(self._streams.values()):
                stream.look(now, stopped)
            if not self.mux.bulk_waiting:
                self.channel.release()
            self._end_if_done()
            if now - self._retired_at > _RETIRED_IDLE and self.mux.idle and not self._streams:
                self.close("not needed")
                return

    async def _grant_withheld(self, download: TokenBucket) -> None:
        while True:
            while not self._withheld:
                await self._granting.park()
            await trio.sleep(download.delay(trio.current_time()))
            raw = next(iter(self._withheld))
            owed = self._withheld.pop(raw)
            count = min(owed, INITIAL_WINDOW)  # in turns: a sender should not wait for minutes
            if owed > count:
                self._withheld[raw] = owed - count
            download.spend(count, trio.current_time())
            self.mux.grant(raw, count)
            self.kick()

    def _end_if_done(self) -> None:
        done = self.mux.retired and self.mux.peer_retired and self.mux.idle and not self._streams
        if done and trio.current_time() >= self._used_at + _RETIRED_REST:
            self.close("replaced by another connection")


def _window(limits: Limits) -> int:
    """The largest window. A cap on what arrives starts to work when that is used up, so it is a second's worth."""
    if limits.max_download is None:
        return limits.window
    return min(limits.window, max(FIRST_WINDOW, int(limits.max_download)))

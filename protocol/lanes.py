"""The lanes of one connection: as many as are of use, opened, watched and given up.

The side that dialled the connection dials its lanes, to the same address; the other side asks it to. What a lost lane
carried, the others carry again, or the connection itself when none is left.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from protocol.channel import LANE_OPENING, SecureChannel, receive_exactly
from protocol.errors import HandshakeError, PeerGone, PeerUnreachable
from protocol.frames import MAX_RECORD, RECORD, record_size
from protocol.lane import LARGEST_PIECE, Lane, LaneOwner, answer_call, call, read_call, token_of
from protocol.lane_policy import MAX_LANES, LanePolicy, Traffic
from protocol.mux_stream import Acknowledged
from protocol.pacing import LARGEST_BURST, SMALLEST_BURST, Pacer, Senders
from protocol.transport import Address, ByteStream, LineState

TICK = 0.25
"""Seconds between looks at what the lanes do, while they do something."""

CALL_TIMEOUT = 5.0
"""Seconds for opening a lane, once the stream is there."""

_FIRST_PAUSE, _LONGEST_PAUSE = 10.0, 900.0  # seconds until lanes are tried again after one failed
_FAREWELL = 1.0  # seconds of quiet after which a lane that is not needed is closed
_LAST_NUMBER = 2**32 - 1
_NOTHING = LineState(0.0, 0)

Dial = Callable[[Address], Awaitable[ByteStream]]
"""Connects to an address; see `Transport.dial`."""


class Main(LaneOwner, Protocol):
    """What the lanes need of their connection."""

    channel: SecureChannel
    initiator: bool

    @property
    def rtt(self) -> float:
        """Smoothed round-trip time in seconds."""
        ...

    @property
    def usable(self) -> bool:
        """New streams can be opened."""
        ...


class Lanes:
    """All lanes of one connection. `run` must run for anything to happen.

    Args:
        main: The connection.
        dial: How to dial; None if there can be no lanes.
        limit: The most lanes.
        most_kept: Bytes that may be on their way on all lanes.
        senders: All connections that may share a line.
    """

    def __init__(self, main: Main, dial: Dial | None, *, limit: int, most_kept: int, senders: Senders) -> None:
        self.token = token_of(main.channel.secret)
        """What the other side calls this connection by."""
        self._main = main
        self._dial, self._senders = dial, senders
        self._limit = min(limit, MAX_LANES)
        self._most_kept = most_kept
        self._policy = LanePolicy(self._limit)
        self._asked = 0  # what we asked the other side for
        self._wanted_there = 0  # what it asked us for
        self._lanes: dict[int, Lane] = {}
        self._last = 0  # the number of the last lane that was used
        self._coming = 0  # calls that are being answered
        self._dialling = False
        self._pause = _FIRST_PAUSE
        self._retry_at = 0.0
        self._moved = 0
        self._shortest = main.channel.rtt
        self.pacer = Pacer()
        """Decides the rate of the connection and its lanes together: they share the way."""
        # Within one machine there is no line, and what looks like a queue there is a processor that is busy.
        self._unpaced = main.channel.remote.is_loopback
        if self._unpaced:
            main.channel.pace(math.inf, LARGEST_BURST)
        self._meters: dict[SecureChannel, LineState] = {}
        self._past_acked = 0
        self._looked: dict[SecureChannel, LineState] = {}  # as of the last look
        self._past_sent = 0
        self._past_received = 0
        self._nursery: trio.Nursery | None = None
        self._bulk = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        return len(self._lanes)

    def longest_record(self, write: int) -> int:
        """Bytes that a raw record of the connection may have which is part of a write of so many.

        Where nothing is measured, writes may be large just because the system takes them, however slow the line is.
        """
        if self._unpaced:
            return MAX_RECORD
        return record_size(write) if self.pacer.burst else RECORD

    @property
    def bytes_sent(self) -> int:
        """Bytes sent on lanes so far."""
        return self._past_sent + sum(lane.channel.bytes_sent for lane in self._lanes.values())

    @property
    def bytes_received(self) -> int:
        """Bytes received on lanes so far."""
        return self._past_received + sum(lane.channel.bytes_received for lane in self._lanes.values())

    async def run(self) -> None:
        """Opens, watches and closes lanes until cancelled."""
        if self._dial is None:
            return
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            while True:
                while not (self._lanes or self._moved or self._policy.active or self._wanted_there):
                    await self._bulk.park()
                await trio.sleep(TICK)
                self._look(trio.current_time())

    def on_bulk(self, count: int) -> None:
        """So many bytes of bulk data were sent, on whichever connection."""
        self._moved += count
        if count and self._bulk:
            self._bulk.unpark_all()

    def kick(self) -> None:
        """There may be something to carry."""
        for lane in self._lanes.values():
            lane.kick()

    def on_wanted(self, count: int) -> None:
        """The other side would like so many lanes."""
        self._wanted_there = min(count, self._limit)
        self._bulk.unpark_all()

    def on_acknowledged(self, event: Acknowledged) -> None:
        """Pieces have arrived.

        Raises:
            ProtocolError: If they were never sent.
        """
        lane = self._lanes.get(event.lane)
        if lane is not None:  # else it was lost meanwhile
            pieces, size = len(lane.outbox), lane.outbox.size
            lane.acknowledge(event.pieces)
            self._main.mux.carried -= pieces - len(lane.outbox)
            self._main.mux.memory.give(size - lane.outbox.size)
            self.kick()

    def pace(self) -> None:
        """Decides the rate from time to time. Called after each write."""
        if self._unpaced:
            return
        main, pacer, now = self._main, self.pacer, trio.current_time()
        self.pause()
        if not pacer.due(now):
            return
        for channel in self._channels():
            self._measure(channel)
        channels = [lane.channel for lane in self._lanes.values() if not lane.resting] or [main.channel]
        states = [self._meters[channel] for channel in channels if channel in self._meters]
        if not states:
            return
        acked = self._past_acked + sum(state.acked for state in self._meters.values())
        rates = [state.rate for state in states if state.rate is not None]
        rtt = statistics.median_low([state.rtt for state in states])
        rate = sum(rates) if len(rates) == len(states) else None
        path = LineState(rtt, acked, rate=rate, limited=any(state.limited for state in states))
        pacer.update(now, path, alone=self._senders.alone(self, now))
        for channel in channels:
            channel.pace(pacer.limit / len(channels), max(pacer.unsent // len(channels), SMALLEST_BURST))

    def pause(self) -> None:
        """Tells the pacer if there is no bulk data to send, on no connection."""
        if not (self._main.mux.bulk_waiting or self._main.mux.pieces_waiting):
            self.pacer.pause()

    async def welcome(self, stream: ByteStream, number: int, nonce: bytes) -> None:
        """Somebody has dialled us who says that it is for a lane of this connection.

        Raises:
            HandshakeError: There will be none. The stream is left open.
            PeerGone: The stream broke.
        """
        if self._nursery is None or self._main.initiator or not self._main.usable:
            raise HandshakeError("this connection takes no lanes")
        if len(self._lanes) + self._coming >= self._limit or number <= self._last:
            raise HandshakeError("this connection has enough lanes, or has had this one")
        self._coming += 1
        try:
            with trio.fail_after(CALL_TIMEOUT):
                channel = await answer_call(stream, self._main.channel, number, nonce)
        except trio.TooSlowError:
            raise HandshakeError(f"{stream.remote} did not open its lane in time") from None
        finally:
            self._coming -= 1
        if number <= self._last or not self._main.usable:
            raise HandshakeError("this connection has had this lane, or ended")
        self._begin(number, channel)

    # What happens by and by.

    def _look(self, now: float) -> None:
        main = self._main
        wanted = self._policy.update(now, self._shortest, main.mux.lanes, self._traffic())
        needed = max(wanted, self._wanted_there)
        if main.initiator:
            may_dial = main.usable and not self._dialling and now >= self._retry_at
            if needed > len(self._lanes) and may_dial and self._nursery is not None:
                self._dialling = True
                self._nursery.start_soon(self._open)
        elif wanted != self._asked:
            self._asked = wanted
            main.mux.want_lanes(wanted)
            main.kick()
        for number, lane in enumerate(list(self._lanes.values())):
            superfluous = main.initiator and number >= needed
            lane.dismissed = superfluous and not lane.outbox and lane.quiet > _FAREWELL
            if lane.pass_time(TICK, len(self._lanes)) or lane.dismissed:
                lane.close()
        self._share_out()

    def _traffic(self) -> Traffic:
        """Since the last time."""
        main, moved = self._main, self._moved
        self._moved = 0
        self._shortest = min(self._shortest, main.rtt)
        sent: int | None = 0
        resent = 0
        for channel in self._channels():
            state = self._measure(channel)
            if state is None or state.sent is None:
                sent = None
                continue
            before = self._looked.get(channel)
            self._looked[channel] = state
            self._shortest = min(self._shortest, state.shortest or self._shortest)
            if before is not None and before.sent is not None and sent is not None:
                sent += state.sent - before.sent
                resent += 0 if state.sturdy else state.resent - before.resent
        waiting = main.mux.bulk_waiting or main.mux.pieces_waiting
        return Traffic(moved, waiting, self.pacer.rate, sent, resent)

    def _channels(self) -> list[SecureChannel]:
        return [self._main.channel, *(lane.channel for lane in self._lanes.values())]

    def _measure(self, channel: SecureChannel) -> LineState | None:
        state = channel.measure()
        if state is not None:
            self._meters[channel] = state
        return state

    async def _open(self) -> None:
        """Dials one lane."""
        assert self._dial is not None
        main = self._main
        number = self._last + 1
        stream: ByteStream | None = None
        try:
            if number > _LAST_NUMBER:
                raise HandshakeError("no more lanes can be opened on this connection")
            self._last = number
            stream = await self._dial(main.channel.remote)
            with trio.fail_after(CALL_TIMEOUT):
                channel = await call(stream, main.channel, number)
        except (HandshakeError, PeerGone, PeerUnreachable, trio.TooSlowError):
            self._failed()
        else:
            stream = None  # the lane closes it
            self._begin(number, channel)
        finally:
            self._dialling = False
            if stream is not None:
                with trio.CancelScope(shield=True):
                    await stream.aclose()

    def _begin(self, number: int, channel: SecureChannel) -> None:
        assert self._nursery is not None
        self._last = max(self._last, number)
        lane = self._lanes[number] = Lane(number, channel, self._main, self)
        self._share_out()
        self._nursery.start_soon(self._run, lane)
        self._bulk.unpark_all()

    async def _run(self, lane: Lane) -> None:
        try:
            await lane.run()
        finally:
            del self._lanes[lane.number]
            self._past_acked += self._meters.pop(lane.channel, _NOTHING).acked
            self._looked.pop(lane.channel, None)
            self._past_sent += lane.channel.bytes_sent
            self._past_received += lane.channel.bytes_received
            lost = lane.outbox.lose()
            self._main.mux.carried -= len(lost)
            self._main.mux.carry_again(lost)
            if lane.proven:
                self._pause = _FIRST_PAUSE
            if not lane.dismissed:
                self._failed()
            self._share_out()

    def _failed(self) -> None:
        self._retry_at = trio.current_time() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _share_out(self) -> None:
        """Lets the lanes work that we have a use for. The others are there for the other side."""
        for number, lane in enumerate(self._lanes.values()):
            lane.resting = number >= self._policy.wanted
        working = sum(1 for lane in self._lanes.values() if not lane.resting)
        if working != self._main.mux.lanes:
            self._main.mux.lanes = working
            self.pacer.restart()
            if working:
                self._main.channel.pace(math.inf, SMALLEST_BURST)
            self._main.kick()
            self.kick()

    def has_room(self) -> bool:
        """The lanes together may carry more before something has arrived."""
        kept = sum(lane.outbox.size for lane in self._lanes.values())
        return not kept or (kept < self._most_kept and self._main.mux.memory.room > LARGEST_PIECE)


async def greet(stream: ByteStream, find: Callable[[bytes], Lanes | None]) -> bytes | None:
    """What somebody who has dialled us begins a handshake with; None if it was a lane, which is taken care of.

    Args:
        stream: Closed if neither comes of it.
        find: The lanes of the connection that is called by a token.

    Raises:
        HandshakeError: Neither comes of it.
    """
    kept = False
    try:
        opening: bytes | None = await receive_exactly(stream, len(LANE_OPENING))
        if opening == LANE_OPENING:
            opening = None
            token, number, nonce = await read_call(stream)
            lanes = find(token)
            if lanes is None:
                raise HandshakeError(f"{stream.remote} wants a lane of a connection that there is not")
            await lanes.welcome(stream, number, nonce)
        kept = True
    except PeerGone as error:
        raise HandshakeError(f"{stream.remote} broke off the handshake: {error}") from error
    finally:
        if not kept:
            with trio.CancelScope(shield=True):
                await stream.aclose()
    return opening

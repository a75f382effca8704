"""A lane: one more connection between two peers that are connected already, for nothing but pieces of bulk data.

It costs no handshake: its keys follow from the main connection's secret. The bytes are described in docs/protocol.md.
What happens when a lane is lost is up to `lanes`.
"""

from __future__ import annotations

import hmac
import os
import struct
from typing import Protocol

import trio

from protocol.channel import LANE_OPENING, SecureChannel, receive_exactly
from protocol.errors import HandshakeError, PeerGone, ProtocolError
from protocol.frames import RECORD
from protocol.mux import Mux
from protocol.mux_stream import Event, Intake, MuxStream
from protocol.noise import CipherState, derive_ciphers
from protocol.pacing import Pacer, next_size
from protocol.pieces import MAX_UNACKNOWLEDGED, Outbox, Piece
from protocol.rate import TokenBucket
from protocol.transport import ByteStream

TOKEN_SIZE = 16
NONCE_SIZE = 16
STALL = 5.0
"""Seconds after which a lane is lost on which nothing that it carries has arrived."""

_CALL = struct.Struct(f">{TOKEN_SIZE}sI{NONCE_SIZE}s")
_SMALLEST = RECORD // 4
LARGEST_PIECE = 16 * RECORD
"""Bytes of a piece at most."""

_WORK_AT_ONCE = 256


def token_of(secret: bytes) -> bytes:
    """What a connection's lanes are called by, in clear."""
    return hmac.digest(secret, b"shoal-lane-token-v1", "sha256")[:TOKEN_SIZE]


async def call(stream: ByteStream, main: SecureChannel, number: int) -> SecureChannel:
    """Makes a lane of a stream that we have dialled. The stream is left open if that fails.

    Args:
        stream: The new one.
        main: The connection that it is to belong to, which we have dialled, too.
        number: The lane's, higher than that of all before.

    Raises:
        HandshakeError: The other side does not want it, or is somebody else.
        PeerGone: The stream broke.
    """
    ours = os.urandom(NONCE_SIZE)
    opening = LANE_OPENING + _CALL.pack(token_of(main.secret), number, ours)
    asked = trio.current_time()
    await stream.send(opening)
    answer = await receive_exactly(stream, len(LANE_OPENING) + NONCE_SIZE)
    if not answer.startswith(LANE_OPENING):
        raise HandshakeError(f"{stream.remote} did not answer as a lane does")
    sending, receiving = ciphers(main.secret, number, ours, answer[len(LANE_OPENING) :])
    rtt = trio.current_time() - asked
    channel = _channel(stream, (sending, receiving), main, sent=len(opening), received=len(answer), rtt=rtt)
    await _expect_proof(channel)
    await channel.send(b"")
    return channel


async def read_call(stream: ByteStream) -> tuple[bytes, int, bytes]:
    """What somebody says who wants to make a lane of a connection, after the opening: token, number and nonce.

    Raises:
        HandshakeError, PeerGone: As `receive_exactly`.
    """
    token, number, nonce = _CALL.unpack(await receive_exactly(stream, _CALL.size))
    return token, number, nonce


async def answer_call(stream: ByteStream, main: SecureChannel, number: int, theirs: bytes) -> SecureChannel:
    """The other side of `call`, after `read_call`.

    Raises:
        HandshakeError: It is not the other side of `main` who called.
        PeerGone: The stream broke.
    """
    ours = os.urandom(NONCE_SIZE)
    receiving, sending = ciphers(main.secret, number, theirs, ours)
    asked = trio.current_time()
    answer = LANE_OPENING + ours
    await stream.send(answer)
    received = len(LANE_OPENING) + _CALL.size
    channel = _channel(stream, (sending, receiving), main, sent=len(answer), received=received, rtt=0.0)
    await channel.send(b"")
    await _expect_proof(channel)
    channel.rtt = trio.current_time() - asked
    return channel


def _channel(
    stream: ByteStream,
    keys: tuple[CipherState, CipherState],
    main: SecureChannel,
    *,
    sent: int,
    received: int,
    rtt: float,
) -> SecureChannel:
    who, swarm_key = main.introduction, main.swarm_key
    return SecureChannel(stream, keys, b"", who, sent=sent, received=received, rtt=rtt, swarm_key=swarm_key)


async def _expect_proof(channel: SecureChannel) -> None:
    """The first record, which is empty: nobody without the secret can make it."""
    try:
        proof = await channel.receive()
    except ProtocolError as error:
        raise HandshakeError(f"{channel.remote} could not prove that it knows the main connection") from error
    if proof:
        raise HandshakeError(f"{channel.remote} did not begin a lane as it should")


def ciphers(secret: bytes, number: int, dialler: bytes, dialled: bytes) -> tuple[CipherState, CipherState]:
    """A lane's ciphers, those of the side that dialled first.

    Args:
        secret: The main connection's.
        number: The lane's.
        dialler: The nonce of the side that dialled.
        dialled: The other one's.
    """
    return derive_ciphers(secret, b"shoal-lane-v1" + number.to_bytes(4, "big") + dialler + dialled)


class LaneOwner(Protocol):
    """What a lane needs of the connection that it belongs to."""

    mux: Mux
    upload: TokenBucket | None

    async def hand_over(self, events: list[Event]) -> None:
        """Tells those concerned."""

    def progressed(self, raw: MuxStream) -> None:
        """Some of a stream's data was taken."""

    def fail(self, error: ProtocolError) -> None:
        """Ends the connection because the peer broke the rules."""

    def kick(self) -> None:
        """There may be something to write."""

    async def rest(self) -> None:
        """After some records: whoever floods us waits."""


class LaneGroup(Protocol):
    """What a lane needs of those beside it."""

    pacer: Pacer

    def has_room(self) -> bool:
        """More may be carried before something has arrived."""
        ...

    def on_bulk(self, count: int) -> None:
        """So many bytes of bulk data were handed over."""

    def pace(self) -> None:
        """Something was handed over: the time to decide the rate."""

    def pause(self) -> None:
        """There is nothing to hand over here."""


class Lane:
    """A lane in use. `run` must run for anything to move.

    Args:
        number: Which.
        channel: Its connection, which it closes.
        owner: Its main connection.
        group: All lanes of that.
    """

    def __init__(self, number: int, channel: SecureChannel, owner: LaneOwner, group: LaneGroup) -> None:
        self.number = number
        self.channel = channel
        self.outbox = Outbox()
        self.resting = False
        """It takes no pieces."""
        self.dismissed = False
        """It is closed because nobody needs it."""
        self.quiet = 0.0
        """Seconds since something arrived on it, in either direction."""
        self.proven = False
        """It has carried something."""
        self._owner = owner
        self._mux = owner.mux
        self._group = group
        self._intake = Intake()
        self._size = _SMALLEST
        self._arrived = 0  # bytes, as the kernel says
        self._wake = trio.lowlevel.ParkingLot()
        self._scope = trio.CancelScope()

    async def run(self) -> None:
        """Carries pieces until the lane is lost or closed."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    nursery.start_soon(self._read)
        finally:
            with trio.CancelScope(shield=True):
                await self.channel.aclose()

    def close(self) -> None:
        """Ends it."""
        self._scope.cancel()

    def kick(self) -> None:
        """There may be something to carry."""
        self._wake.unpark_all()

    def acknowledge(self, pieces: int) -> None:
        """See `Outbox.acknowledge`."""
        if self.outbox.acknowledge(pieces):
            self.quiet = 0.0
            self.proven = True
        self.kick()

    def pass_time(self, seconds: float, lanes: int) -> bool:
        """Time has passed while we were running, and so many lanes share the line; returns whether this one is lost."""
        path = self.channel.measure()
        if path is not None and path.acked != self._arrived:
            self._arrived = path.acked
            self.quiet = 0.0
        else:
            self.quiet += seconds
        patience = STALL if path is not None else (1 + lanes) * 2 * STALL  # whole pieces is all that shows
        return len(self.outbox) > 0 and self.quiet > patience

    async def _read(self) -> None:
        try:
            while True:
                before = self._intake.pieces
                await self._take_in()  # some may have come right behind the proof
                if self._intake.pieces != before:
                    self._mux.acknowledge(self.number, self._intake.pieces)
                    self._owner.kick()
                await self._owner.rest()
                await self.channel.fill()
                self.quiet = 0.0
        except (PeerGone, ProtocolError):  # whatever arrived may be anybody's doing
            self.close()

    async def _take_in(self) -> None:
        work = self._mux.work
        while True:
            room = self._mux.room(self._intake)
            count = self.channel.take_into(room) if room else 0
            record = None if count else self.channel.take()
            try:
                if room and count:
                    events = self._mux.placed(room[:count], self._intake)
                elif record is not None:
                    events = self._mux.receive_on(self._intake, record)
                else:
                    break
            except ProtocolError as error:  # this is the peer's
                self._owner.fail(error)
                raise
            await self._owner.hand_over(events)
            self.proven = True
            if self._mux.work - work >= _WORK_AT_ONCE:
                await self._owner.rest()
                work = self._mux.work

    async def _write(self) -> None:
        try:
            while True:
                taken = await self._next()
                self._mux.memory.overdraw(0 if taken.copied else len(taken.data))  # `has_room` has seen to it
                piece = self.outbox.add(taken)
                self._mux.carried += 1
                self._group.on_bulk(len(piece.data))
                began, written = trio.current_time(), len(piece.data)
                await self.channel.send(*piece.records())
                seconds = trio.current_time() - began
                self._size = next_size(self._size, written, seconds, smallest=_SMALLEST, largest=LARGEST_PIECE)
                self._group.pace()
        except PeerGone:
            self.close()

    async def _next(self) -> Piece:
        """The next piece, as soon as it may be carried."""
        upload = self._owner.upload
        while True:
            if self.resting or not self._mux.pieces_waiting:
                self._group.pause()
                self.channel.release()
                await self._wake.park()
            elif len(self.outbox) >= MAX_UNACKNOWLEDGED or not self._group.has_room():
                await self._wake.park()
            elif upload is not None and (delay := upload.delay(trio.current_time(), self._owner)):
                self._group.pacer.pause()
                with trio.move_on_after(delay):
                    await self._wake.park()
            elif (piece := self._take(upload)) is not None:
                return piece

    def _take(self, upload: TokenBucket | None) -> Piece | None:
        now = trio.current_time()
        piece = self._mux.take_piece(self._size if upload is None else min(self._size, upload.level(now)))
        if piece is not None:
            if upload is not None:
                upload.spend(len(piece.data), now, self._owner)
            self._owner.progressed(piece.stream)
        return piece

"""Streams over one connection, without IO: records in, records and events out.

Rules that everything here rests on:

1. A record is either a *frame record*, one or more whole frames, or *raw*: a piece of the body that the last frame of
   an earlier record announced. Nothing comes between an announcement and its body, so large data is never copied
   together with a header.
2. Data needs credit. Each direction of a stream starts with `INITIAL_WINDOW` bytes; the receiver grants more when its
   reader has taken bytes out, in steps of half a window. Bulk streams get a larger window, once somebody reads raw
   bytes from them; it grows for as long as the reader has to wait for data. Windows are taken out of the connection's
   account, a part of one budget for all connections, and so are messages of ours that the other side does not take.
   Nothing else needs credit, and everything else is bounded in number.
3. What is sent next: urgent frames in order (opening, credit, resets, pings), then control streams, then bulk streams,
   each kind in turns. Data of one stream stays in order and its end follows it.
4. Frames for a stream that is gone are ignored: they crossed our own reset. Frames for one that never was are an error.
5. The side that dialled opens odd streams, the other even ones, in increasing order, and no number is used twice.

The other side is not trusted: whatever it sends ends in events or in `ProtocolError`, and memory stays bounded.
"""

from __future__ import annotations

from collections import deque

from protocol.budget import Account
from protocol.errors import Overloaded, ProtocolError
from protocol.frames import (
    ACK,
    BULK,
    FIN,
    HEADER,
    IN_USE,
    ONE_WAY,
    PIECE,
    RECORD,
    U32,
    Buffer,
    Kind,
    Packer,
    pack,
    pack_reset,
    pack_text,
    unpack,
    unpack_goodbye,
    unpack_reset,
)
from protocol.inflow import discard, next_offset, note_end, read_into, room, take_in
from protocol.mux_stream import (
    INITIAL_WINDOW,
    Acknowledged,
    Batch,
    Event,
    Goodbye,
    Intake,
    LanesWanted,
    MuxLimits,
    MuxStream,
    Opened,
    Pong,
    Reset,
    Retired,
    Stopped,
)
from protocol.pieces import Piece

FIRST_WINDOW = 1 << 20
"""Bytes that a bulk stream's window has at least, once somebody reads raw bytes from it, if the budget allows."""

_INLINE = 1 << 14  # data below this travels inside a frame record: copying it costs less than a record of its own
_TURN = 4 * RECORD  # the most that a stream sends before it is another one's turn
_MAX_URGENT = 1 << 17  # bytes of replies for a peer that asks but does not read
_LAST_ID = 2**32 - 2
_LAST_OFFSET = 2**63


class Mux:
    """Both directions of one connection's streams.

    Args:
        initiator: This side dialled.
        limits: Bounds on the other side.
        memory: What buffers are taken from.
    """

    def __init__(self, *, initiator: bool, limits: MuxLimits, memory: Account) -> None:
        self._limits = limits
        self.memory = memory
        self._streams: dict[int, MuxStream] = {}
        self._next_id, self._last_peer_id = (1, 0) if initiator else (2, -1)  # theirs are the other parity
        self._urgent: deque[bytes] = deque()
        self._urgent_bytes = 0
        self._credits: dict[int, MuxStream] = {}
        self._pong: bytes | None = None
        self._control: deque[MuxStream] = deque()
        self._bulk: deque[MuxStream] = deque()
        self._pieced: deque[MuxStream] = deque()
        self._again: deque[Piece] = deque()  # those of lanes that were lost
        self._acks: dict[int, int] = {}
        self._lanes_wanted: int | None = None
        self._intake = Intake()
        self.lanes = 0  # that carry pieces; while there are some, this connection does not
        self.carried = 0  # pieces that lanes carry
        self._farewell: bytes | None = None
        self.work = 0  # frames and small records received: what they cost hardly depends on their length
        self.closed = False  # our goodbye is among the records taken
        self.retired = False  # we open no more streams
        self.peer_retired = False

    @property
    def idle(self) -> bool:
        """No stream is open, and all pieces have arrived."""
        return not self._streams and not self.carried and not self._again

    @property
    def opened(self) -> int:
        """Streams opened by this side of which not both directions have ended."""
        return self._count(self._next_id)

    @property
    def urgent(self) -> bool:
        """There is something to send that may not wait for a bulk allowance."""
        if self.closed:
            return False
        asked = self._urgent or self._credits or self._pong or self._control or self._farewell or self._acks
        return bool(asked) or self._lanes_wanted is not None

    @property
    def bulk_waiting(self) -> bool:
        """There is bulk data to send on this connection."""
        return not self.closed and bool(self._bulk or (self.pieces_waiting and not self.lanes))

    @property
    def pieces_waiting(self) -> bool:
        """There is data that lanes may carry."""
        return bool(self._pieced or self._again)

    # What this side does.

    def open(self, *, bulk: bool = False, one_way: bool = False) -> MuxStream:
        """A new stream, of which the other side learns with the next records. It sends nothing on a `one_way` one.

        Raises:
            Overloaded: If the connection has run out of stream numbers, or is retired.
        """
        if self._next_id > _LAST_ID or self.retired:
            raise Overloaded("no more streams can be opened on this connection")
        stream = self._streams[self._next_id] = MuxStream(self._next_id, bulk=bulk, theirs=not one_way)
        self.memory.overdraw(INITIAL_WINDOW)
        self._next_id += 2
        self._send_urgent(Kind.OPEN, BULK * bulk | ONE_WAY * one_way, stream.id)
        return stream

    def write(self, stream: MuxStream, data: Buffer) -> None:
        """Queues data, by reference: it must not change until `stream.pending` says that all of it has been taken."""
        view = memoryview(data).cast("B")
        if stream._fin:
            raise RuntimeError("write after finish")
        if len(view) and stream.id in self._streams and not stream.stopped:
            stream._out.append(view)
            stream.pending += len(view)
            self._schedule(stream)

    def keep(self, stream: MuxStream, size: int) -> bool:
        """Makes sure that there is memory for a message that is written next, which nobody but us keeps.

        Returns False if there is none: the other side opened the stream, and does not take what it asked for.
        """
        if self.is_ours(stream):
            self.memory.overdraw(size)
        elif not self.memory.take(size):
            return False
        stream._kept += size
        return True

    def withdraw(self, stream: MuxStream) -> None:
        """Forgets what was written and not taken. The stream's data then has a hole: all that can follow is a reset."""
        stream.lost = stream.lost or stream.pending > 0
        stream._out.clear()
        stream.pending = 0
        self._release_kept(stream, stream._kept)

    def finish(self, stream: MuxStream) -> None:
        """No more data from this side, once what is queued has been sent."""
        if not stream._fin:
            stream._fin = True
            self._schedule(stream)

    def reset(self, stream: MuxStream, code: str = "", text: str = "") -> None:
        """Gives up both directions of a stream, at once."""
        stream.abandoned = True
        if self._streams.get(stream.id) is stream:
            self._remove(stream)
            self._reset_id(stream.id, code, text)
        self.withdraw(stream)
        self._discard(stream)

    def stop(self, stream: MuxStream) -> None:
        """Gives up reading: what arrived is dropped, and the other side is told to send no more."""
        self._discard(stream)
        if not stream._peer_fin and stream.id in self._streams:
            self._send_urgent(Kind.STOP, 0, stream.id)

    def ping(self, token: bytes) -> None:
        """Asks for a `Pong` with the same 8 bytes."""
        self._send_urgent(Kind.PING, 0, 0, token)

    def retire(self) -> None:
        """Opens no more streams from this side."""
        if not self.retired:
            self.retired = True
            self._send_urgent(Kind.RETIRE, 0, 0)

    def want_lanes(self, count: int) -> None:
        """Asks the other side for so many lanes."""
        self._lanes_wanted = count

    def acknowledge(self, lane: int, pieces: int) -> None:
        """Tells the other side that so many pieces have arrived on a lane."""
        self._acks[lane] = pieces

    def goodbye(self, reason: str, evidence: bytes = b"") -> None:
        """Ends the connection: nothing but the urgent frames before it is sent any more.

        Args:
            reason: For people.
            evidence: `EVIDENCE` bytes if the other side's identity is in use; see `rivals`.
        """
        if self._farewell is None:
            flags = IN_USE if evidence else 0
            self._farewell = pack(Kind.GOODBYE, flags, 0, evidence + pack_text(reason))

    def read_into(self, stream: MuxStream, buffer: memoryview) -> int:
        """Moves what has arrived to `buffer`; returns the number of bytes. The caller owes a `grant` for them."""
        filled = read_into(stream, buffer)
        self._release_read(stream, filled)
        return filled

    def demote(self, stream: MuxStream) -> None:
        """Makes a stream a bulk stream: raw bytes come, and whoever opened it must not have them go first."""
        if not stream.bulk:
            stream.bulk = True
            if stream._scheduled:
                self._control.remove(stream)
                stream._scheduled = False
                self._schedule(stream)

    def widen(self, stream: MuxStream, count: int) -> None:
        """Gives a stream of which somebody reads so many raw bytes a larger window if need be, and the budget allows.

        Not before: whoever opens streams would have it, and fill it, whether or not anybody wants their data.
        """
        self.demote(stream)
        if stream._allowance < count and not stream._extra and not stream._peer_fin and stream.id in self._streams:
            self._widen_by(stream, FIRST_WINDOW - INITIAL_WINDOW)
            if stream._extra:
                self._credits[stream.id] = stream

    def grant(self, stream: MuxStream, count: int) -> None:
        """Lets the other side send `count` more bytes: as many as were read, now or later."""
        stream._owed += count
        if stream._owed * 2 >= stream.window and not stream._peer_fin and stream.id in self._streams:
            if stream._extra and not stream.available:  # the reader waits for the sender, perhaps the sender for us
                self._widen_by(stream, stream.window)
            self._credits[stream.id] = stream

    def take(self, budget: int, bulk: int, record: int = RECORD) -> Batch:
        """What to send next.

        Args:
            budget: Bytes of data after which to stop. Urgent frames are all taken.
            bulk: The most bytes of bulk data.
            record: Of raw data in one record.
        """
        if self.closed:
            return Batch([], 0, [])
        records = Packer(record)
        self._take_urgent(records)
        if self._farewell is not None:
            records.add(self._farewell)
            records.flush()
            self.closed = True
            return Batch(records.records, 0, [])
        progressed: dict[int, MuxStream] = {}
        self._take_data(self._control, records, budget, progressed)
        room = min(budget - records.size, bulk)
        taken = self._take_data(self._bulk, records, room, progressed)
        while not self.lanes and taken < room and (piece := self.take_piece(min(room - taken, _TURN))) is not None:
            records.add(piece.announcement)
            records.add_body(memoryview(piece.data), piece=True)
            self.memory.give(len(piece.data) if piece.copied else 0)
            progressed[piece.stream.id] = piece.stream
            taken += len(piece.data)
        records.flush()
        return Batch(records.records, taken, list(progressed.values()))

    def settle(self, stream: MuxStream) -> None:
        """Lets the other side send as many bytes as were read, however few these are."""
        if stream._owed and not stream._peer_fin and stream.id in self._streams:
            self._credits[stream.id] = stream

    def take_piece(self, size: int) -> Piece | None:
        """The next piece for a lane: one that another has lost, else one of `size` bytes or less.

        Its data is a view of the writer's own buffer, which must be copied or sealed before anything else runs.
        """
        while self._again:
            piece = self._again.popleft()
            if not piece.stream.abandoned:
                return piece
            self.memory.give(len(piece.data))
        while self._pieced:
            stream = self._pieced.popleft()
            stream._scheduled = False
            if stream._sendable and stream.id in self._streams:
                offset = stream._taken
                data, last = self._cut(stream, size)
                self._schedule(stream)
                return Piece(stream, offset, data, last)
        return None

    def carry_again(self, pieces: list[Piece]) -> None:
        """The pieces of a lane that was lost go first."""
        self._again.extendleft(reversed(pieces))

    # What the other side does.

    def room(self, intake: Intake | None = None) -> memoryview | None:
        """Where the bytes of the next records belong, if they are wanted, none is cut in two, and none is small.

        They are not given to `receive` or `receive_on` then, but `placed` must be called before anything else.
        """
        intake = intake or self._intake
        if not intake.left or intake.stream is None or intake.stream.id not in self._streams:
            return None
        return room(intake.stream, intake.offset, intake.left)

    def placed(self, data: memoryview, intake: Intake | None = None) -> list[Event]:
        """As `receive`, for the next records, which have been written where `room` said."""
        events: list[Event] = []
        self._receive_body(intake or self._intake, data, events, placed=True)
        return events

    def receive(self, record: bytes) -> list[Event]:
        """Takes in one record.

        Raises:
            ProtocolError: If it breaks the rules. The connection is then of no more use.
        """
        events: list[Event] = []
        if self._belongs_to_body(self._intake, record, events):
            return events
        view = memoryview(record)
        position = 0
        while position < len(view):
            if self._intake.left:
                raise ProtocolError("frames where a body was announced")
            kind, flags, stream_id, payload = unpack(view, position)
            position += HEADER.size + len(payload)
            self.work += 1
            self._receive_frame(kind, flags, stream_id, payload, events)
        return events

    def receive_on(self, intake: Intake, record: bytes) -> list[Event]:
        """As `receive`, for a record that came on a lane."""
        events: list[Event] = []
        if self._belongs_to_body(intake, record, events):
            return events
        view = memoryview(record)
        kind, flags, stream_id, payload = unpack(view, 0)
        if kind is not Kind.PIECE or len(view) != HEADER.size + len(payload):
            raise ProtocolError("something else than a piece on a lane")
        self.work += 1
        self._announce_piece(intake, self._known(stream_id), payload, bool(flags & FIN), events)
        return events

    def _receive_frame(self, kind: Kind, flags: int, stream_id: int, payload: memoryview, events: list[Event]) -> None:
        match kind:
            case Kind.OPEN:
                self._receive_open(stream_id, flags, events)
            case Kind.PING:
                self._pong = bytes(payload)
            case Kind.PONG:
                events.append(Pong(bytes(payload)))
            case Kind.RETIRE:
                self.peer_retired = True
                events.append(Retired())
            case Kind.GOODBYE:
                events.append(Goodbye(*unpack_goodbye(flags, payload)))
            case Kind.ACK:
                events.append(Acknowledged(*ACK.unpack(payload)))
            case Kind.LANES:
                events.append(LanesWanted(*U32.unpack(payload)))
            case _:
                self._receive_on_stream(kind, flags, self._known(stream_id), payload, events)

    def _receive_on_stream(
        self, kind: Kind, flags: int, stream: MuxStream | None, payload: memoryview, events: list[Event]
    ) -> None:
        if kind is Kind.BODY:
            (left,) = U32.unpack(payload)
            if not left:
                raise ProtocolError("empty body")
            self._intake = Intake(stream, next_offset(stream), left, bool(flags & FIN))
            return
        if kind is Kind.PIECE:
            self._announce_piece(self._intake, stream, payload, bool(flags & FIN), events)
            return
        if stream is None:
            return
        match kind:
            case Kind.DATA:
                data = Intake(stream, next_offset(stream), len(payload), bool(flags & FIN))
                self._receive_body(data, payload, events)
            case Kind.CREDIT:
                stream._credit += U32.unpack(payload)[0]
                if stream._credit > 2**40:
                    raise ProtocolError("credit beyond reason")
                stream._credited = True
                self._schedule(stream)
            case Kind.RESET:
                code, text = unpack_reset(payload)
                stream.abandoned = True
                self._remove(stream)
                self.withdraw(stream)
                self._discard(stream)
                events.append(Reset(stream, code, text))
            case Kind.STOP:
                stream.stopped = True
                self.withdraw(stream)
                self.finish(stream)
                self._schedule(stream)
                events.append(Stopped(stream))

    def _receive_open(self, stream_id: int, flags: int, events: list[Event]) -> None:
        if stream_id % 2 == self._next_id % 2 or stream_id <= self._last_peer_id or self.peer_retired:
            raise ProtocolError(f"stream {stream_id} may not be opened")
        if self._urgent_bytes > _MAX_URGENT:
            raise ProtocolError("the peer makes requests but does not read the answers")
        self._last_peer_id = stream_id
        if self._count(stream_id) >= self._limits.max_streams:
            self._reset_id(stream_id, "busy", f"more than {self._limits.max_streams} streams")
            return
        stream = MuxStream(stream_id, bulk=bool(flags & BULK), ours=not flags & ONE_WAY)
        if not self.memory.take(INITIAL_WINDOW):
            self._reset_id(stream_id, "busy", "there is no memory for so many streams")
            return
        self._streams[stream_id] = stream
        events.append(Opened(stream))

    def _announce_piece(
        self, intake: Intake, stream: MuxStream | None, payload: memoryview, fin: bool, events: list[Event]
    ) -> None:
        intake.stream, intake.fin, intake.piece = stream, fin, True
        intake.offset, intake.left = PIECE.unpack(payload)
        if intake.offset + intake.left > _LAST_OFFSET or not (intake.left or fin):
            raise ProtocolError("malformed piece")
        if not intake.left:
            self._receive_body(intake, b"", events)

    def _belongs_to_body(self, intake: Intake, record: bytes, events: list[Event]) -> bool:
        if not record:
            raise ProtocolError("empty record")
        if not intake.left:
            return False
        self.work += len(record) < _INLINE
        self._receive_body(intake, record, events)
        return True

    def _receive_body(
        self, intake: Intake, record: bytes | memoryview, events: list[Event], *, placed: bool = False
    ) -> None:
        if len(record) > intake.left:
            raise ProtocolError("more data than was announced")
        stream, offset = intake.stream, intake.offset
        intake.offset += len(record)
        intake.left -= len(record)
        last = not intake.left
        intake.pieces += last
        if stream is not None and stream.id in self._streams:  # else it was reset since
            note_end(stream, intake.offset, intake.fin and last)
            if take_in(stream, offset, record, events, placed=placed, piece=intake.piece, window=self._limits.window):
                self._remove_if_done(stream)

    def _known(self, stream_id: int) -> MuxStream | None:
        stream = self._streams.get(stream_id)
        ours = stream_id % 2 == self._next_id % 2
        if stream is None and stream_id > (self._next_id - 2 if ours else self._last_peer_id):
            raise ProtocolError(f"frame for stream {stream_id}, which was never opened")
        return stream

    # Bookkeeping.

    def is_ours(self, stream: MuxStream) -> bool:
        """This side opened the stream."""
        return stream.id % 2 == self._next_id % 2

    def _count(self, stream_id: int) -> int:
        """The streams that are open and were opened by the side that opened this one."""
        return sum(1 for other in self._streams if other % 2 == stream_id % 2)

    def _widen_by(self, stream: MuxStream, count: int) -> None:
        more = self.memory.borrow(max(0, min(count, self._limits.window - stream.window)))
        stream._extra += more
        stream._owed += more

    def _remove(self, stream: MuxStream) -> None:
        del self._streams[stream.id]
        self._credits.pop(stream.id, None)
        self.memory.repay(stream._extra)
        self.memory.give(INITIAL_WINDOW)
        self.memory.overdraw(stream.available)  # until it has been read

    def _discard(self, stream: MuxStream) -> None:
        self._release_read(stream, stream.available)
        discard(stream)
        if stream.abandoned:
            stream._ahead = None

    def _release_read(self, stream: MuxStream, count: int) -> None:
        if self._streams.get(stream.id) is not stream:  # else the window goes on
            self.memory.give(count)

    def _release_kept(self, stream: MuxStream, count: int) -> None:
        count = min(count, stream._kept)
        stream._kept -= count
        self.memory.give(count)

    def _remove_if_done(self, stream: MuxStream) -> None:
        if stream._fin_sent and stream._peer_fin and stream.id in self._streams:
            self._remove(stream)

    def _schedule(self, stream: MuxStream) -> None:
        if stream._sendable and not stream._scheduled and stream.id in self._streams:
            stream._scheduled = True
            # Not before the other side has given credit: until then it may not know the stream.
            if self.lanes and stream.bulk and stream._credited:
                stream.pieced = True  # and stays so: without places, its data would overtake itself
            queue = self._pieced if stream.pieced else self._bulk if stream.bulk else self._control
            queue.append(stream)

    def _send_urgent(self, kind: Kind, flags: int, stream_id: int, payload: bytes = b"") -> None:
        if self._farewell is not None:
            return
        frame = pack(kind, flags, stream_id, payload)
        self._urgent.append(frame)
        self._urgent_bytes += len(frame)

    def _reset_id(self, stream_id: int, code: str, text: str) -> None:
        self._send_urgent(Kind.RESET, 0, stream_id, pack_reset(code, text))

    def _take_urgent(self, records: Packer) -> None:
        while self._urgent:
            records.add(self._urgent.popleft())
        self._urgent_bytes = 0
        if self._pong is not None:
            records.add(pack(Kind.PONG, 0, 0, self._pong))
            self._pong = None
        for lane, pieces in self._acks.items():
            records.add(pack(Kind.ACK, 0, 0, ACK.pack(lane, pieces)))
        self._acks.clear()
        if self._lanes_wanted is not None:
            records.add(pack(Kind.LANES, 0, 0, U32.pack(self._lanes_wanted)))
            self._lanes_wanted = None
        for stream in self._credits.values():
            records.add(HEADER.pack(Kind.CREDIT, 0, 4, stream.id), U32.pack(stream._owed))
            stream._allowance += stream._owed
            stream._owed = 0
        self._credits.clear()

    def _take_data(
        self, queue: deque[MuxStream], records: Packer, budget: int, progressed: dict[int, MuxStream]
    ) -> int:
        taken = 0
        while queue and taken < budget:
            stream = queue.popleft()
            stream._scheduled = False
            if not stream._sendable or stream.id not in self._streams:
                continue
            room = budget - taken
            taken += self._take_turn(stream, records, min(room, _TURN) if queue else room)
            progressed[stream.id] = stream
            self._schedule(stream)
        return taken

    def _take_turn(self, stream: MuxStream, records: Packer, room: int) -> int:
        data, last = self._cut(stream, room)
        if len(data) < _INLINE:
            records.add(HEADER.pack(Kind.DATA, FIN * last, len(data), stream.id), data)
        else:
            records.add(HEADER.pack(Kind.BODY, FIN * last, 4, stream.id), U32.pack(len(data)))
            records.add_body(data)
        return len(data)

    def _cut(self, stream: MuxStream, room: int) -> tuple[memoryview, bool]:
        """The next bytes of a stream, and whether they are the last ones."""
        data = stream.cut(room)
        self._release_kept(stream, len(data))
        self._remove_if_done(stream)
        return data, stream._fin_sent

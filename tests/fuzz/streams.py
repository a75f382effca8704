"""Fuzz targets: the streams of a connection. `attack` has one face a stranger, `converse` joins two honest sides."""

from __future__ import annotations

from collections import deque

import attrs

from protocol import frames
from protocol.budget import Account, Budget
from protocol.errors import Overloaded, ProtocolError
from protocol.frames import MAX_RECORD, RECORD, U32, Kind
from protocol.mux import Mux
from protocol.mux_stream import Event, MuxLimits, MuxStream, Opened, Placed, Reset
from tests.fuzz.choices import Choices

LIMITS = MuxLimits(max_streams=4, window=200_000)
_SCARCE, _PLENTY = 300_000, 1 << 24  # bytes of memory
_GUARD = b"\xa5" * 32  # around every place that received bytes are written to
_SIZES = (1, 2, 50, 4095, 4096, 50_000, RECORD, 150_000, MAX_RECORD)
_LARGE = 1 << 30


@attrs.define
class Side:
    """A mux and a user of its streams that does what `Choices` say."""

    mux: Mux
    memory: Account
    streams: dict[int, MuxStream] = attrs.field(factory=dict)
    buffers: dict[int, bytearray] = attrs.field(factory=dict)
    """What the user reads into at present, between guards."""
    read: dict[int, bytes] = attrs.field(factory=dict)
    written: dict[int, bytes] = attrs.field(factory=dict)
    given_up: set[int] = attrs.field(factory=set)
    stopped: set[int] = attrs.field(factory=set)
    """The streams that the user reads no more."""
    _unread_at_end: dict[int, int] = attrs.field(factory=dict)

    @classmethod
    def make(cls, *, initiator: bool, memory: int) -> Side:
        account = Budget(memory, connections=1).account("host")
        return cls(Mux(initiator=initiator, limits=LIMITS, memory=account), account)

    def receive(self, record: bytes) -> None:
        """Takes a record in, as a channel hands it over. Raises `ProtocolError`."""
        room = self.mux.room()
        if room is None or not 0 < len(record) <= len(room):
            events = self.mux.receive(record)
        else:
            room[: len(record)] = record
            events = self.mux.placed(room[: len(record)])
        for event in events:
            assert isinstance(event, Event)
            match event:
                case Opened(stream):
                    self.streams[stream.id] = stream
                case Placed(stream, count):
                    self.mux.grant(stream, count)
                case Reset(stream):
                    self.forget(stream.id)

    def send(self, budget: int = _LARGE, bulk: int = _LARGE) -> list[bytes]:
        batch = self.mux.take(budget, bulk)
        assert batch.bulk <= bulk
        assert all(0 < len(record) <= MAX_RECORD for record in batch.records)
        return [bytes(record) for record in batch.records]

    def act(self, choices: Choices) -> None:
        """The user does one thing, and perhaps those who wait with a buffer get their turn."""
        if choices.one_in(2):
            self.collect()
        if not self.streams or choices.one_in(6):
            if len(self.streams) < LIMITS.max_streams // 2:
                self.open(bulk=choices.one_in(2), one_way=choices.one_in(3))
            return
        stream = choices.of(list(self.streams.values()))
        match choices.number(11):
            case 0 | 1 | 2:
                self.write(stream, choices.of(_SIZES), choices.number(255))
            case 3 | 4:
                self.consume(stream, choices.of(_SIZES))
            case 5 | 6:
                self.want(stream, choices.of(_SIZES))
            case 7:
                self.mux.widen(stream, choices.of(_SIZES))
            case 8:
                self.mux.demote(stream)
            case 9:
                self.mux.finish(stream)
            case 10 if choices.one_in(2) and stream.id not in self.buffers:
                self.mux.stop(stream)
                self.given_up.add(stream.id)
                self.stopped.add(stream.id)
            case 11 if choices.one_in(2):
                self.mux.reset(stream, "code" * choices.number(99), "text" * choices.number(999))
                self.given_up.add(stream.id)
                self.forget(stream.id)

    def open(self, *, bulk: bool, one_way: bool) -> None:
        try:
            stream = self.mux.open(bulk=bulk, one_way=one_way)
        except Overloaded:
            assert self.mux.retired
        else:
            self.streams[stream.id] = stream

    def write(self, stream: MuxStream, size: int, value: int) -> None:
        if not stream.finished and stream.pending < 2 * LIMITS.window:
            data = bytes([value]) * size
            self.mux.write(stream, data)
            self.written[stream.id] = self.written.get(stream.id, b"") + data

    def consume(self, stream: MuxStream, most: int = _LARGE) -> None:
        """Reads what is there, unless somebody else reads."""
        if stream.id not in self.buffers and stream.id not in self.stopped:
            self._pull(stream, memoryview(bytearray(min(most, stream.available))))

    def want(self, stream: MuxStream, size: int) -> None:
        """Begins to read into a buffer."""
        if stream.id not in self.buffers and stream.id not in self.stopped:
            self.mux.widen(stream, size)
            self.buffers[stream.id] = bytearray(_GUARD + bytes(size) + _GUARD)
            stream.wanted = memoryview(self.buffers[stream.id])[len(_GUARD) : -len(_GUARD)]
            self.collect()  # nobody waits for what is there

    def collect(self) -> None:
        """What whoever waits with a buffer does: moves on what was kept elsewhere, and ends when it is full."""
        for number, buffer in tuple(self.buffers.items()):
            stream = self.streams[number]
            wanted = stream.wanted
            assert wanted is not None
            count = self.mux.read_into(stream, wanted)
            self.mux.grant(stream, count)
            stream.wanted = wanted[count:]
            assert buffer.startswith(_GUARD)
            assert buffer.endswith(_GUARD)
            if not stream.wanted or stream.at_end:
                self._put_down(stream)

    def forget(self, number: int) -> None:
        """A stream is over."""
        stream = self.streams.pop(number, None)
        if stream is not None and number in self.buffers:
            self._put_down(stream)

    def _put_down(self, stream: MuxStream) -> None:
        buffer, missing = self.buffers.pop(stream.id), len(stream.wanted or b"")
        stream.wanted = None
        self._note(stream, bytes(buffer[len(_GUARD) : len(buffer) - len(_GUARD) - missing]))

    def _pull(self, stream: MuxStream, buffer: memoryview) -> None:
        count = self.mux.read_into(stream, buffer)
        assert count == len(buffer)
        self.mux.grant(stream, count)
        self._note(stream, bytes(buffer))

    def _note(self, stream: MuxStream, data: bytes) -> None:
        self.read[stream.id] = self.read.get(stream.id, b"") + data

    def check(self) -> None:
        """What holds whatever the other side does."""
        streams = list(self.mux._streams.values())
        assert all(0 <= stream.available <= stream.window <= LIMITS.window for stream in streams)
        assert sum(stream.window for stream in streams) <= self.memory.held
        assert all(0 <= stream._credit <= 2**40 and stream._allowance >= 0 for stream in streams)
        assert all(stream.pending >= 0 for stream in streams)
        ahead = {stream: sum(map(len, stream._ahead._records.values())) for stream in streams if stream._ahead}
        assert all(stream.available + count <= stream.window for stream, count in ahead.items())
        assert all(sum(map(len, stream._chunks)) == stream.available for stream in streams)
        for stream in streams:
            if stream._peer_fin:  # nothing comes after the end
                assert stream.available <= self._unread_at_end.get(stream.id, stream.available)
                self._unread_at_end[stream.id] = stream.available
        theirs = [stream for stream in streams if stream.id % 2 != self.mux._next_id % 2]
        assert len(theirs) <= LIMITS.max_streams


def attack(data: bytes) -> None:
    """Arbitrary frames, and bodies to them, for a user who opens, writes, reads and gives up.

    They end in events or a `ProtocolError`, what is kept for the peer stays within the windows, and bytes are written
    to the places that somebody reads into and nowhere else.
    """
    choices = Choices(data)
    side = Side.make(initiator=choices.one_in(2), memory=_SCARCE)
    while choices.left:
        if choices.one_in(3):
            side.act(choices)
        elif choices.one_in(4):
            side.send(choices.boundary() % _LARGE, choices.boundary() % _LARGE)
        else:
            try:
                side.receive(_record(choices, side))
            except ProtocolError as error:
                assert str(error).isprintable()
                side.send()
                return
        side.check()


def _record(choices: Choices, side: Side) -> bytes:
    left = side.mux._intake.left
    if left and not choices.one_in(32):
        return bytes([choices.number(255)]) * max(1, min(left, choices.of(_SIZES), MAX_RECORD))
    record = b"".join(_frame(choices, side) for _ in range(1 + choices.number(2)))
    return (choices.damaged(record) if choices.one_in(32) else record)[:MAX_RECORD]


def _frame(choices: Choices, side: Side) -> bytes:
    """Mostly one that is allowed: the next stream to open, or a stream that is open."""
    kind = choices.of(list(Kind))
    if kind in frames._OF_CONNECTION:
        stream = 0
    elif kind is Kind.OPEN or not side.streams:
        kind, stream = Kind.OPEN, (side.mux._last_peer_id + 2) % 2**32
    else:
        stream = choices.of(list(side.streams))
    if choices.one_in(32):
        stream = choices.boundary() % 2**32
    return frames.pack(kind, choices.number(3), stream, _payload(choices, kind))


def _payload(choices: Choices, kind: Kind) -> bytes:
    """A payload of the right length for a kind, mostly; numbers in it are interesting ones."""
    if kind is Kind.DATA:
        return bytes([choices.number(255)]) * min(choices.of(_SIZES), RECORD // 4)
    if kind is Kind.RESET:
        return frames.pack_reset("c" * choices.number(9), "text")
    if kind is Kind.PIECE and not choices.one_in(8):
        return frames.PIECE.pack(choices.of((0, *_SIZES)), choices.of((0, *_SIZES)))
    length = frames._SIZES.get(kind)
    if length is None or choices.one_in(32):
        return choices.blob()
    numbers = (choices.boundary() % 2**32 if choices.one_in(8) else choices.of(_SIZES) for _ in range(length // 4 + 1))
    return b"".join(map(U32.pack, numbers))[:length]


def converse(data: bytes) -> None:
    """Two honest sides with queues of records between them, which act and are scheduled in any order.

    On every stream that nobody gave up, everything arrives that was written: in order, whole and once.
    """
    choices = Choices(data)
    sides = [Side.make(initiator=initiator, memory=_PLENTY) for initiator in (True, False)]
    wires: list[deque[bytes]] = [deque(), deque()]
    while choices.left:
        number = choices.number(1)
        side, arriving = sides[number], wires[1 - number]
        match choices.number(3):
            case 0 | 1:
                side.act(choices)
            case 2:
                wires[number].extend(side.send(choices.boundary() % _LARGE, choices.boundary() % _LARGE))
            case 3:
                for _ in range(min(len(arriving), 1 + choices.number(7))):
                    side.receive(arriving.popleft())
        side.check()
    _settle(sides, wires)
    given_up = sides[0].given_up | sides[1].given_up
    for source, target in (sides, sides[::-1]):
        for stream in (source.written.keys() | target.read.keys()) - given_up:
            assert target.read.get(stream, b"") == source.written.get(stream, b"")
        for stream, content in target.read.items():
            assert source.written.get(stream, b"").startswith(content)


def _settle(sides: list[Side], wires: list[deque[bytes]]) -> None:
    """Everybody reads and sends until nothing is left to send."""
    for _ in range(1000):
        for number, side in enumerate(sides):
            side.collect()
            for stream in tuple(side.streams.values()):
                side.consume(stream)
                if stream.id in side.buffers:
                    side._put_down(stream)
            wires[number].extend(side.send())
        for number, side in enumerate(sides):
            while wires[1 - number]:
                side.receive(wires[1 - number].popleft())
        if not any(side.mux.urgent or side.mux.bulk_waiting or _unread(side) for side in sides):
            return
    raise AssertionError("two sides never come to an end")


def _unread(side: Side) -> bool:
    """Something has arrived that nobody has read."""
    return any(stream.available for stream in side.streams.values())

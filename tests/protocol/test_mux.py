from __future__ import annotations

import contextlib
import struct
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from protocol import frames, mux
from protocol.budget import Budget
from protocol.errors import Overloaded, ProtocolError
from protocol.frames import IN_USE, MAX_RECORD, RECORD, Kind, pack
from protocol.mux import FIRST_WINDOW, Mux
from protocol.mux_stream import (
    INITIAL_WINDOW,
    Goodbye,
    MuxLimits,
    Opened,
    Placed,
    Pong,
    Readable,
    Reset,
    Retired,
    Stopped,
)

LARGE = 1 << 30
LIMITS = MuxLimits(max_streams=4, window=200_000)
ENOUGH = 1 << 30


def pair(limits=LIMITS, memory=ENOUGH):
    accounts = [Budget(memory, connections=1).account("somewhere") for _ in range(2)]
    return tuple(Mux(initiator=not n, limits=limits, memory=account) for n, account in enumerate(accounts))


def transfer(source, target, budget=LARGE, bulk=LARGE):
    """Everything that one side has to send now, in the form of the events at the other."""
    events = []
    for record in source.take(budget, bulk).records:
        assert len(record) <= MAX_RECORD
        events += target.receive(bytes(record))
    return events


def read(side, stream, count=LARGE):
    buffer = bytearray(min(count, stream.available))
    assert side.read_into(stream, memoryview(buffer)) == len(buffer)
    side.grant(stream, len(buffer))
    return bytes(buffer)


def opened(a, b, *, bulk=False):
    """A stream that both sides know, and whose bulk data the other side wants."""
    ours = a.open(bulk=bulk)
    (event,) = transfer(a, b)
    assert isinstance(event, Opened)
    if bulk:
        b.widen(event.stream, FIRST_WINDOW)
    return ours, event.stream


def test_data_arrives_and_ends():
    a, b = pair()
    ours = a.open()
    a.write(ours, b"hello ")
    a.write(ours, b"world")
    a.finish(ours)
    events = transfer(a, b)
    theirs = events[0].stream
    assert events == [Opened(theirs), Readable(theirs), Readable(theirs)]
    assert not theirs.at_end
    assert read(b, theirs) == b"hello world"
    assert theirs.at_end
    assert not b.idle
    b.finish(theirs)
    assert transfer(b, a) == [Readable(ours)]
    assert ours.at_end
    assert a.idle
    assert b.idle


def test_a_request_is_one_record():
    a, _ = pair()
    ours = a.open()
    a.write(ours, b"x" * 1000)
    a.finish(ours)
    (record,) = a.take(LARGE, LARGE).records
    assert bytes(record) == (
        struct.pack(">BBHI", Kind.OPEN, 0, 0, 1) + struct.pack(">BBHI", Kind.DATA, frames.FIN, 1000, 1) + b"x" * 1000
    )


def test_large_data_is_not_copied():
    a, _ = pair()
    data = bytearray(50_000)
    ours = a.open()
    a.write(ours, data)
    header, body = a.take(LARGE, LARGE).records
    assert bytes(header).endswith(struct.pack(">BBHII", Kind.BODY, 0, 4, 1, 50_000))
    assert isinstance(body, memoryview)
    assert body.obj is data


def test_credit_limits_what_is_sent_and_returns_with_reading():
    a, b = pair()
    ours, theirs = opened(a, b)
    a.write(ours, bytes(100_000))
    transfer(a, b)
    assert theirs.available == INITIAL_WINDOW
    assert not a.urgent
    read(b, theirs, INITIAL_WINDOW // 2 - 1)
    assert not b.urgent
    read(b, theirs, 1)
    transfer(b, a)
    transfer(a, b)
    assert theirs.available == INITIAL_WINDOW
    assert ours.pending == 100_000 - INITIAL_WINDOW - INITIAL_WINDOW // 2


def test_bulk_streams_share_a_budget_of_larger_windows():
    a, b = pair(memory=6 * 300_000)  # a third of half of it is lent to one
    streams = [opened(a, b, bulk=True) for _ in range(3)]
    transfer(b, a)
    for ours, _ in streams:
        a.write(ours, bytes(1_000_000))
    transfer(a, b)
    extra = LIMITS.window - INITIAL_WINDOW
    assert [theirs.available - INITIAL_WINDOW for _, theirs in streams] == [extra, extra, 300_000 - 2 * extra]
    ours, theirs = streams[0]
    a.reset(ours)
    assert transfer(a, b) == [Reset(theirs, "", "")]
    ours, theirs = opened(a, b, bulk=True)
    transfer(b, a)
    a.write(ours, bytes(1_000_000))
    transfer(a, b)
    assert theirs.available == LIMITS.window


def test_bulk_that_nobody_reads_has_the_window_of_any_other_stream():
    a, b = pair()
    ours = a.open(bulk=True)
    (event,) = transfer(a, b)
    transfer(b, a)
    a.write(ours, bytes(1_000_000))
    transfer(a, b)
    assert event.stream.available == INITIAL_WINDOW
    b.widen(event.stream, FIRST_WINDOW)
    transfer(b, a)
    transfer(a, b)
    assert event.stream.available == LIMITS.window


def test_control_goes_before_bulk_and_bulk_in_turns():
    a, b = pair(MuxLimits(window=1 << 20))
    first, second = opened(a, b, bulk=True), opened(a, b, bulk=True)
    control = opened(a, b)
    transfer(b, a)
    for ours, _ in (first, second):
        a.write(ours, bytes(1 << 20))
    transfer(a, b, budget=RECORD)
    a.write(control[0], b"now")
    events = transfer(a, b, budget=RECORD)
    assert events[0] == Readable(control[1])
    transfer(a, b, budget=8 * RECORD)
    assert first[1].available == 5 * RECORD
    assert 4 * RECORD < second[1].available < 5 * RECORD


def test_raw_records_are_as_long_as_the_caller_says():
    a, b = pair()
    ours, _ = opened(a, b, bulk=True)
    a.receive(pack(Kind.CREDIT, 0, ours.id, (1 << 24).to_bytes(4, "big")))
    a.write(ours, bytes(2 * MAX_RECORD))
    sizes = [
        [len(record) for record in a.take(MAX_RECORD, LARGE, *record).records[1:]] for record in ((), (MAX_RECORD,))
    ]
    assert sizes == [[RECORD] * 8, [MAX_RECORD]]


def test_frames_come_in_short_records_only():
    _, b = pair()
    frames = pack(Kind.PING, 0, 0, b"12345678") * (RECORD // 16)
    b.receive(frames)
    with pytest.raises(ProtocolError, match="more frames"):
        b.receive(frames + pack(Kind.PING, 0, 0, b"12345678"))


def test_bulk_waits_for_its_allowance_alone():
    a, b = pair()
    bulk, control = opened(a, b, bulk=True), opened(a, b)
    a.write(bulk[0], bytes(50_000))
    a.write(control[0], bytes(50_000))
    batch = a.take(LARGE, 0)
    assert (batch.bulk, batch.progressed) == (0, [control[0]])
    assert (a.urgent, a.bulk_waiting) == (False, True)
    batch = a.take(LARGE, 7)
    assert (batch.bulk, bulk[0].pending) == (7, 49_993)


def test_resets_carry_their_reason_and_cross_data_harmlessly():
    a, b = pair()
    ours, theirs = opened(a, b)
    a.write(ours, bytes(10_000))
    b.write(theirs, bytes(10_000))
    b.reset(theirs, "busy", "come\nback later")
    from_a = [bytes(record) for record in a.take(LARGE, LARGE).records]
    assert transfer(b, a) == [Reset(ours, "busy", "come?back later")]
    assert [event for record in from_a for event in b.receive(record)] == []
    assert a.idle
    assert b.idle
    assert ours.pending == 0


def test_a_reset_in_the_middle_of_a_body():
    a, b = pair()
    ours, theirs = opened(a, b, bulk=True)
    transfer(b, a)
    a.write(ours, bytes(150_000))
    records = [bytes(record) for record in a.take(4 * RECORD, LARGE).records]
    assert len(records) == 4
    for record in records[:2]:
        b.receive(record)
    b.reset(theirs)
    assert b.receive(records[2]) == []
    assert b.receive(records[3]) == []
    ours, theirs = opened(a, b)
    a.write(ours, b"fine")
    transfer(a, b)
    assert read(b, theirs) == b"fine"


def test_stopping_ends_the_other_direction_only():
    a, b = pair()
    ours, theirs = opened(a, b)
    a.write(ours, bytes(200_000))
    transfer(a, b)
    b.write(theirs, b"enough")
    b.stop(theirs)
    assert transfer(b, a) == [Stopped(ours), Readable(ours)]
    assert (ours.stopped, ours.lost, ours.pending) == (True, True, 0)
    transfer(a, b)
    assert theirs.at_end
    assert read(a, ours) == b"enough"
    b.finish(theirs)
    transfer(b, a)
    assert ours.at_end
    assert a.idle
    assert b.idle


def test_pings_are_answered():
    a, b = pair()
    a.ping(b"12345678")
    assert transfer(a, b) == []
    assert transfer(b, a) == [Pong(b"12345678")]


def test_a_flood_of_pings_is_answered_once():
    _, b = pair()
    b.receive(pack(Kind.PING, 0, 0, bytes(8)) * 4000)
    (record,) = b.take(LARGE, LARGE).records
    assert len(record) == 16


def test_too_many_streams_are_refused_and_the_rest_lives():
    a, b = pair()
    streams = [a.open() for _ in range(5)]
    events = transfer(a, b)
    assert len(events) == 4
    (reset,) = transfer(b, a)
    assert (reset.stream, reset.code) == (streams[4], "busy")
    a.reset(streams[0])
    transfer(a, b)
    opened(a, b)


def test_who_asks_without_reading_is_cut_off():
    _, b = pair()
    with pytest.raises(ProtocolError, match="does not read"):
        for number in range(1, 2**20, 2):
            b.receive(pack(Kind.OPEN, 0, number))


def test_retiring():
    a, b = pair()
    ours, theirs = opened(a, b)
    a.retire()
    a.retire()
    assert transfer(a, b) == [Retired()]
    with pytest.raises(Overloaded):
        a.open()
    a.write(ours, b"still here")
    transfer(a, b)
    assert read(b, theirs) == b"still here"
    opened(b, a)
    with pytest.raises(ProtocolError, match="may not be opened"):
        b.receive(pack(Kind.OPEN, 0, 99))


def test_goodbye_is_the_last_word():
    a, b = pair()
    ours = a.open()
    a.write(ours, bytes(1000))
    a.goodbye("so long " + "x" * 1000)
    a.reset(ours)
    (_, goodbye) = transfer(a, b)
    assert isinstance(goodbye, Goodbye)
    assert goodbye.reason.startswith("so long xx")
    assert a.closed
    assert not a.urgent
    assert a.take(LARGE, LARGE).records == []


@pytest.mark.parametrize(
    "records",
    [
        [b""],
        [b"\x01"],
        [pack(Kind.DATA, 0, 1, b"abc")[:-1]],
        [struct.pack(">BBHI", 0, 0, 0, 1)],
        [struct.pack(">BBHI", 11, 0, 0, 0)],
        [pack(Kind.OPEN, 0, 1, b"x")],
        [pack(Kind.OPEN, 0, 0)],
        [pack(Kind.OPEN, 0, 2)],  # of our parity
        [pack(Kind.OPEN, 0, 3), pack(Kind.OPEN, 0, 1)],
        [pack(Kind.OPEN, 0, 3), pack(Kind.OPEN, 0, 3)],
        [pack(Kind.PING, 0, 0, b"short")],
        [pack(Kind.PING, 0, 1, bytes(8))],
        [pack(Kind.DATA, 0, 1, b"never opened")],
        [pack(Kind.DATA, 0, 2, b"never opened")],
        [pack(Kind.CREDIT, 0, 4, bytes(4))],
        [pack(Kind.OPEN, 0, 1), pack(Kind.RESET, 0, 1)],
        [pack(Kind.OPEN, 0, 1), pack(Kind.RESET, 0, 1, b"\x05abc")],
        [pack(Kind.GOODBYE, 0, 0, bytes(513))],
        [pack(Kind.GOODBYE, IN_USE, 0, bytes(71))],
        [pack(Kind.OPEN, 0, 1), pack(Kind.BODY, 0, 1, bytes(4))],  # nothing announced
        [pack(Kind.OPEN, 0, 1), pack(Kind.BODY, 0, 1, b"\0\0\0\x05"), b"123456"],
        [pack(Kind.OPEN, 0, 1), pack(Kind.BODY, 0, 1, b"\0\0\0\x05") + pack(Kind.RETIRE, 0, 0)],
        [pack(Kind.OPEN, 0, 1), pack(Kind.DATA, 1, 1, b"end"), pack(Kind.DATA, 0, 1, b"more")],
        [pack(Kind.OPEN, 0, 1), pack(Kind.DATA, 0, 1, bytes(60_000)), pack(Kind.DATA, 0, 1, bytes(5_537))],
        [pack(Kind.OPEN, 0, 1), *[pack(Kind.CREDIT, 0, 1, b"\xff" * 4)] * 257],
    ],
)
def test_violations_are_protocol_errors(records):
    _, b = pair()
    with pytest.raises(ProtocolError):
        for record in records:
            b.receive(record)


@given(st.lists(st.binary(max_size=60), max_size=5))
def test_garbage_is_an_event_or_a_protocol_error(records):
    _, b = pair()
    b.open()
    b.take(LARGE, LARGE)
    try:
        for record in records:
            for event in b.receive(record):
                assert isinstance(event, mux.Event)
    except ProtocolError:
        pass
    b.take(LARGE, LARGE)


@given(st.data())
def test_damaged_conversations_are_events_or_protocol_errors(data):
    a, b = pair()
    ours = a.open(bulk=True)
    a.write(ours, bytes(range(200)))
    a.ping(bytes(8))
    a.reset(a.open(), "code", "text")
    (record,) = a.take(LARGE, LARGE).records
    for _ in range(data.draw(st.integers(1, 4))):
        record[data.draw(st.integers(0, len(record) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        b.receive(bytes(record))
    b.take(LARGE, LARGE)


def test_small_pieces_are_kept_together():
    _, b = pair()
    b.receive(pack(Kind.OPEN, 0, 1))
    for _ in range(10_000):
        b.receive(pack(Kind.DATA, 0, 1, b"x") + pack(Kind.DATA, 0, 1, b"y"))
    assert len(b._streams[1]._chunks) == 1
    assert read(b, b._streams[1]) == b"xy" * 10_000


class Conversation(RuleBasedStateMachine):
    """Two sides with queues of records between them, compared with plain byte strings."""

    @initialize()
    def start(self):
        self.sides = pair()
        self.wires = (deque(), deque())  # what each side has sent and the other not yet received
        self.streams = [{}, {}]  # each side's open streams by id
        self.written = {}  # (side, id) -> all bytes written
        self.read = {}
        self.finished = set()
        self.cut = set()  # streams that were reset or stopped: nothing is promised of them
        self.value = 0

    def stream(self, data, side):
        return self.streams[side][data.draw(st.sampled_from(sorted(self.streams[side])))]

    @rule(side=st.integers(0, 1), bulk=st.booleans())
    def open(self, side, bulk):
        if sum(1 for number in self.streams[side] if number % 2 != side) < LIMITS.max_streams // 2:
            stream = self.sides[side].open(bulk=bulk)
            self.streams[side][stream.id] = stream

    def some(self, side):
        return bool(self.streams[side])

    @rule(data=st.data(), side=st.integers(0, 1), size=st.sampled_from([0, 1, 100, 16_383, 16_384, 70_000, 300_000]))
    def write(self, data, side, size):
        if not self.some(side):
            return
        stream = self.stream(data, side)
        if not stream.finished:
            self.value = (self.value + 1) % 251
            content = bytes([self.value]) * size
            self.sides[side].write(stream, content)
            self.written[side, stream.id] = self.written.get((side, stream.id), b"") + content

    @rule(data=st.data(), side=st.integers(0, 1))
    def finish(self, data, side):
        if self.some(side):
            stream = self.stream(data, side)
            self.sides[side].finish(stream)
            self.finished.add((side, stream.id))

    @rule(data=st.data(), side=st.integers(0, 1), what=st.sampled_from(["reset", "stop"]))
    def give_up(self, data, side, what):
        if self.some(side) and data.draw(st.integers(0, 3)) == 0:
            stream = self.stream(data, side)
            self.cut.add(stream.id)
            getattr(self.sides[side], what)(stream)
            if what == "reset":
                del self.streams[side][stream.id]

    @rule(side=st.integers(0, 1), budget=st.integers(1, 500_000), bulk=st.integers(0, 500_000))
    def send(self, side, budget, bulk):
        batch = self.sides[side].take(budget, bulk)
        assert all(0 < len(record) <= MAX_RECORD for record in batch.records)
        assert batch.bulk <= bulk
        self.wires[side].extend(bytes(record) for record in batch.records)

    @rule(side=st.integers(0, 1), count=st.integers(1, 10))
    def receive(self, side, count):
        wire = self.wires[1 - side]
        for _ in range(min(count, len(wire))):
            for event in self.sides[side].receive(wire.popleft()):
                match event:
                    case Opened(stream):
                        self.streams[side][stream.id] = stream
                    case Reset(stream):
                        assert stream.id in self.cut
                        self.streams[side].pop(stream.id, None)

    @rule(data=st.data(), side=st.integers(0, 1), size=st.sampled_from([1, 1000, 50_000, LARGE]))
    def take_out(self, data, side, size):
        if self.some(side):
            self.consume(side, self.stream(data, side), size)

    def consume(self, side, stream, size=LARGE):
        content = read(self.sides[side], stream, size)
        self.read[side, stream.id] = self.read.get((side, stream.id), b"") + content

    @invariant()
    def nothing_is_lost_or_reordered(self):
        for (side, number), content in getattr(self, "read", {}).items():
            assert self.written.get((1 - side, number), b"").startswith(content)

    @invariant()
    def no_more_than_the_window_is_buffered(self):
        for side in getattr(self, "sides", []):
            streams = side._streams.values()
            assert all(stream.available <= stream.window for stream in streams)
            gone = [stream for stream in self.streams[self.sides.index(side)].values() if stream not in streams]
            held = sum(stream.window for stream in streams) + sum(stream.available for stream in gone)
            assert side.memory.held == held

    def teardown(self):
        """When everybody sends and reads, everything arrives."""
        if not hasattr(self, "sides"):
            return
        for _ in range(200):
            for side in (0, 1):
                self.send(side, LARGE, LARGE)
                self.receive(side, LARGE)
                for stream in self.streams[side].values():
                    self.consume(side, stream)
        for side in (0, 1):
            assert not self.sides[side].urgent
            assert not self.wires[side]
            for number, stream in self.streams[side].items():
                if number not in self.cut:
                    assert stream.pending == 0
                    assert self.read.get((1 - side, number), b"") == self.written.get((side, number), b"")
                    assert stream.at_end == ((1 - side, number) in self.finished)
        open_ids = [set(side._streams) for side in self.sides]
        assert open_ids[0] == open_ids[1]
        for number in open_ids[0] - self.cut:
            assert not {(0, number), (1, number)} <= self.finished


Conversation.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestConversation = Conversation.TestCase


def opened_for_bytes(a, b, size):
    """A bulk stream, and the buffer that its reader waits with."""
    ours, theirs = opened(a, b, bulk=True)
    transfer(b, a)
    buffer = bytearray(size)
    theirs.wanted = memoryview(buffer)
    return ours, theirs, buffer


def place(source, target):
    """As `transfer`, writing records where the target wants them, as a channel does."""
    events, placed = [], 0
    for record in source.take(4 * RECORD, LARGE).records:
        room = target.room()
        if room is None or len(room) < len(record):
            events += target.receive(bytes(record))
        else:
            room[: len(record)] = record
            placed += 1
            events += target.placed(room[: len(record)])
    return events, placed


def test_raw_bytes_are_placed_where_they_are_wanted():
    a, b = pair()
    data = bytes(range(256)) * 600
    ours, theirs, buffer = opened_for_bytes(a, b, len(data))
    a.write(ours, data)
    events, placed = place(a, b)
    assert placed == 3
    assert buffer == data
    assert theirs.available == 0
    assert sum(event.count for event in events if isinstance(event, Placed)) == len(data)
    assert events[-1] == Readable(theirs)
    assert len(theirs.wanted) == 0


def test_what_does_not_fit_is_kept_and_nothing_passes_it():
    a, b = pair()
    data = bytes(range(256)) * 600
    ours, theirs, buffer = opened_for_bytes(a, b, RECORD + 100)
    a.write(ours, data)
    _, placed = place(a, b)
    assert placed == 1
    assert len(theirs.wanted) == 100
    assert theirs.available == len(data) - RECORD
    assert b.read_into(theirs, theirs.wanted) == 100
    assert buffer == data[: len(buffer)]
    assert read(b, theirs) == data[len(buffer) :]


def test_frames_and_bytes_for_a_stream_that_is_gone_are_not_placed():
    a, b = pair()
    ours, theirs, buffer = opened_for_bytes(a, b, 100_000)
    assert b.room() is None
    a.write(ours, bytes([1]) * 100_000)
    b.reset(theirs)
    events, placed = place(a, b)
    assert (events, placed) == ([], 0)
    assert not any(buffer)


def test_more_than_credit_was_given_for_is_an_error_when_placed_too():
    a, b = pair()
    ours, _, _ = opened_for_bytes(a, b, LIMITS.window * 2)
    ours._credit = LARGE
    a.write(ours, bytes(LIMITS.window + 1))
    with pytest.raises(ProtocolError, match="credit"):
        place(a, b)


def test_windows_grow_while_the_reader_waits_and_not_otherwise():
    limits = MuxLimits(max_streams=4, window=3 << 20)
    for waits, grown in ((True, 3 << 20), (False, 1 << 20)):
        a, b = pair(limits)
        ours, theirs = opened(a, b, bulk=True)
        transfer(b, a)
        for _ in range(8):
            a.write(ours, bytes(600_000))
            transfer(a, b)
            read(b, theirs, LARGE if waits else theirs.available - 1000)
            transfer(b, a)
        assert theirs.window == grown

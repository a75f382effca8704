from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.budget import Budget
from protocol.errors import ProtocolError
from protocol.frames import FIN, RECORD, Kind, pack
from protocol.mux import FIRST_WINDOW, Mux
from protocol.mux_stream import INITIAL_WINDOW, Acknowledged, Intake, LanesWanted, MuxLimits, MuxStream
from protocol.pieces import Ahead, Outbox, Piece

LARGE = 1 << 30
CONTENT = bytes(number * 7 % 251 for number in range(INITIAL_WINDOW))


def make_mux(*, initiator):
    memory = Budget(1 << 26, connections=1).account("host")
    return Mux(initiator=initiator, limits=MuxLimits(), memory=memory)


def pair():
    sender, receiver = make_mux(initiator=True), make_mux(initiator=False)
    stream = sender.open(bulk=True)
    for record in sender.take(LARGE, LARGE).records:
        (opened,) = receiver.receive(bytes(record))
    return sender, stream, receiver, opened.stream


def piece(offset, size, *, fin=False, stream=1):
    """The records of a piece of `CONTENT`."""
    return Piece(MuxStream(stream, bulk=True), offset, CONTENT[offset : offset + size], fin).records()


def arrive(mux, records, intake=None):
    intake = intake or Intake()
    return [event for record in records for event in mux.receive_on(intake, bytes(record))]


def read(mux, stream):
    buffer = bytearray(stream.available)
    mux.read_into(stream, memoryview(buffer))
    return bytes(buffer)


@given(
    cuts=st.lists(st.integers(0, 20_000), max_size=12),
    data=st.data(),
)
def test_pieces_that_arrive_in_any_order_and_repeatedly_make_up_the_stream(cuts, data):
    """The model: the bytes from the start up to the first one that has not arrived."""
    bounds = sorted({0, 20_000, *cuts})
    pieces = list(itertools.pairwise(bounds))
    order = data.draw(st.permutations(pieces * 2))
    _, _, mux, stream = pair()
    received, seen = b"", set()
    for start, end in order:
        arrive(mux, piece(start, end - start, fin=end == 20_000))
        seen.add((start, end))
        reach = 0
        for first, last in pieces:
            if (first, last) not in seen:
                break
            reach = last
        received += read(mux, stream)
        assert received == CONTENT[:reach]
        assert stream.at_end == (reach == 20_000)


@given(data=st.data(), lanes=st.integers(1, 4))
def test_pieces_of_several_lanes_come_record_by_record(data, lanes):
    _, _, mux, stream = pair()
    size = 5000
    queues = [[record for n in range(lane, 12, lanes) for record in piece(n * size, size)] for lane in range(lanes)]
    intakes = [Intake() for _ in queues]
    while any(queues):
        lane = data.draw(st.sampled_from([number for number, queue in enumerate(queues) if queue]))
        arrive(mux, [queues[lane].pop(0)], intakes[lane])
    assert read(mux, stream) == CONTENT[: 12 * size]
    assert sum(intake.pieces for intake in intakes) == 12


def test_the_next_bytes_go_where_the_reader_wants_them():
    _, _, mux, stream = pair()
    buffer = bytearray(10_000)
    stream.wanted = memoryview(buffer)
    intake = Intake()
    announcement, body = piece(5000, 5000)
    arrive(mux, [announcement], intake)
    assert not mux.room(intake)  # others come before
    arrive(mux, [body], intake)
    announcement, body = piece(0, 5000)
    arrive(mux, [announcement], intake)
    room = mux.room(intake)
    room[:] = body
    mux.placed(room, intake)
    assert buffer[:5000] == CONTENT[:5000]
    assert len(stream.wanted) == 5000
    assert read(mux, stream) == CONTENT[5000:10_000]  # what had arrived before


def test_there_is_no_room_for_what_has_arrived_before():
    _, _, mux, stream = pair()
    stream.wanted = memoryview(bytearray(10_000))
    intake = Intake()
    arrive(mux, piece(5000, 5000), intake)
    arrive(mux, [piece(0, 6000)[0]], intake)
    assert len(mux.room(intake)) == 5000
    with pytest.raises(ProtocolError, match="overlap"):
        mux.receive_on(intake, CONTENT[:6000])


@pytest.mark.parametrize(
    ("before", "then", "message"),
    [
        ([(0, 100)], (50, 100), "overlap"),
        ([(200, 100)], (150, 100), "overlap"),
        ([(200, 100)], (250, 100), "overlap"),
        ([(200, 100)], (200, 50), "overlap"),
        ([(200, 100)], (100, 300), "overlap"),
        ([(200, 100)], (0, 250), "overlap"),
        ([], (INITIAL_WINDOW - 10, 11), "credit"),
        ([], (1 << 62, 1), "credit"),
    ],
)
def test_pieces_that_do_not_fit(before, then, message):
    _, _, mux, _ = pair()
    for offset, size in before:
        arrive(mux, piece(offset, size))
    offset, size = then
    with pytest.raises(ProtocolError, match=message):
        arrive(mux, Piece(MuxStream(1, bulk=True), offset, bytes(size), False).records())


@pytest.mark.parametrize("then", [(100, 10, False), (50, 10, True), (0, 300, True), (300, 0, True)])
def test_pieces_that_contradict_the_end(then):
    _, _, mux, _ = pair()
    arrive(mux, piece(60, 40, fin=True))
    offset, size, fin = then
    with pytest.raises(ProtocolError, match=r"end of a stream|overlap"):
        arrive(mux, Piece(MuxStream(1, bulk=True), offset, bytes(size), fin).records())


@pytest.mark.parametrize(
    "records",
    [
        [b""],
        [b"?"],
        [pack(Kind.DATA, 0, 1, b"data")],
        [pack(Kind.PING, 0, 0, bytes(8))],
        [pack(Kind.PIECE, 0, 1, bytes(12))],  # empty, and not the last
        [pack(Kind.PIECE, 0, 1, bytes(11))],
        [pack(Kind.PIECE, 0, 1, b"\xff" * 12)],
        [pack(Kind.PIECE, 0, 3, bytes(11) + b"\1")],  # no such stream
        [pack(Kind.PIECE, 0, 2, bytes(11) + b"\1")],
        [pack(Kind.PIECE, 0, 1, bytes(11) + b"\1") * 2],
        [pack(Kind.PIECE, 0, 1, bytes(11) + b"\1"), b""],
        [pack(Kind.PIECE, 0, 1, bytes(11) + b"\1"), b"too much"],
    ],
)
def test_what_may_not_come_on_a_lane(records):
    _, _, mux, _ = pair()
    with pytest.raises(ProtocolError):
        arrive(mux, records)


def test_data_without_a_place_ends_where_pieces_begin():
    _, _, mux, stream = pair()
    arrive(mux, piece(100, 50))
    mux.receive(pack(Kind.DATA, 0, 1, CONTENT[:60]))  # on its way when the stream went over to pieces
    mux.receive(pack(Kind.DATA, 0, 1, CONTENT[60:100]))
    assert read(mux, stream) == CONTENT[:150]
    with pytest.raises(ProtocolError, match="without a place"):
        mux.receive(pack(Kind.DATA, 0, 1, b"more"))
    with pytest.raises(ProtocolError, match="without a place"):
        mux.receive(pack(Kind.BODY, 0, 1, b"\0\0\0\4"))


def test_the_last_piece_may_be_quicker_than_data_without_a_place():
    _, _, mux, stream = pair()
    arrive(mux, piece(100, 50, fin=True))
    mux.receive(pack(Kind.DATA, 0, 1, CONTENT[:100]))
    assert read(mux, stream) == CONTENT[:150]
    assert stream.at_end
    with pytest.raises(ProtocolError, match="after the end"):
        mux.receive(pack(Kind.DATA, 0, 1, b"more"))


def test_data_without_a_place_that_meets_a_piece():
    _, _, mux, _ = pair()
    arrive(mux, piece(100, 50))
    with pytest.raises(ProtocolError, match="overlap"):
        mux.receive(pack(Kind.DATA, 0, 1, CONTENT[:101]))


def test_gaps_are_bounded():
    ahead = Ahead(window=0)
    with pytest.raises(ProtocolError, match="too many"):
        for number in range(2000):
            ahead.put(2 * number + 1, b"x")
    assert len(ahead) == 1024


def test_a_stream_goes_over_to_pieces_once_the_other_side_has_given_credit():
    sender, ours, receiver, theirs = pair()
    sender.lanes = 1
    sender.write(ours, CONTENT)
    assert sender.take_piece(LARGE) is None
    for record in sender.take(LARGE, LARGE).records:
        receiver.receive(bytes(record))
    receiver.widen(theirs, FIRST_WINDOW)
    for record in receiver.take(LARGE, LARGE).records:
        sender.receive(bytes(record))
    sender.write(ours, b"bytes")
    sender.finish(ours)
    assert not sender.bulk_waiting
    assert not sender.take(LARGE, LARGE).records
    last = sender.take_piece(LARGE)
    assert (last.offset, bytes(last.data), last.fin) == (len(CONTENT), b"bytes", True)
    arrive(receiver, last.records())
    assert read(receiver, theirs) == CONTENT + b"bytes"
    assert theirs.at_end


def test_pieces_go_over_the_main_connection_when_there_are_no_lanes_left():
    sender, ours, receiver, theirs = pair()
    receiver.widen(theirs, FIRST_WINDOW)
    for record in receiver.take(LARGE, LARGE).records:
        sender.receive(bytes(record))
    sender.lanes = 1
    data = CONTENT * 3
    sender.write(ours, data)
    sender.finish(ours)
    first, second = sender.take_piece(RECORD), sender.take_piece(RECORD)
    arrive(receiver, second.records())
    assert not sender.idle
    sender.lanes = 0
    sender.carry_again([first, second])
    assert sender.bulk_waiting
    for record in sender.take(LARGE, LARGE).records:
        receiver.receive(bytes(record))
    assert read(receiver, theirs) == data
    assert theirs.at_end


def test_what_a_reset_stream_had_on_a_lost_lane_is_not_carried_again():
    sender, ours, receiver, theirs = pair()
    receiver.widen(theirs, FIRST_WINDOW)
    for record in receiver.take(LARGE, LARGE).records:
        sender.receive(bytes(record))
    sender.lanes = 1
    sender.write(ours, CONTENT)
    lost = sender.take_piece(1000)
    sender.reset(ours)
    sender.carry_again([lost])
    assert sender.take_piece(LARGE) is None
    assert sender.idle


def test_acknowledgements():
    _, _, mux, _ = pair()
    mux.acknowledge(3, 1)
    mux.acknowledge(3, 2)
    mux.want_lanes(4)
    (record,) = mux.take(LARGE, LARGE).records
    other = make_mux(initiator=True)
    assert other.receive(bytes(record)) == [Acknowledged(3, 2), LanesWanted(4)]
    assert not mux.urgent


class TwoWays:
    """Two muxes with a main connection and lanes between them, over which records go as far as a test lets them."""

    def __init__(self):
        self.sender, self.ours, self.receiver, self.theirs = pair()
        self.receiver.widen(self.theirs, FIRST_WINDOW)
        self.main, self.back = [], []
        self.lanes = {}
        self.opened = 0
        self.received = bytearray()

    def open_lane(self):
        self.opened += 1
        self.lanes[self.opened] = ([], Intake(), Outbox())
        self.sender.lanes = len(self.lanes)

    def load_lane(self, number, size):
        records, _, outbox = self.lanes[number]
        piece = self.sender.take_piece(size)
        if piece is not None:
            self.sender.carried += 1
            self.sender.memory.overdraw(0 if piece.copied else len(piece.data))
            records += [bytes(record) for record in outbox.add(piece).records()]

    def advance_lane(self, number, count):
        records, intake, _ = self.lanes[number]
        for record in [records.pop(0) for _ in range(min(count, len(records)))]:
            self.receiver.receive_on(intake, record)
            self.receiver.acknowledge(number, intake.pieces)
        self.read()

    def lose_lane(self, number):
        _, _, outbox = self.lanes.pop(number)
        self.sender.carry_again(outbox.lose())
        self.sender.carried = sum(len(outbox) for _, _, outbox in self.lanes.values())
        self.sender.lanes = len(self.lanes)

    def main_both_ways(self, budget):
        for record in self.sender.take(budget, budget).records:
            self.receiver.receive(bytes(record))
        self.read()
        for record in self.receiver.take(LARGE, LARGE).records:
            for event in self.sender.receive(bytes(record)):
                if isinstance(event, Acknowledged) and event.lane in self.lanes:
                    outbox = self.lanes[event.lane][2]
                    size = outbox.size
                    outbox.acknowledge(event.pieces)
                    self.sender.memory.give(size - outbox.size)
        self.sender.carried = sum(len(outbox) for _, _, outbox in self.lanes.values())

    def read(self):
        data = read(self.receiver, self.theirs)
        self.receiver.grant(self.theirs, len(data))
        self.received += data


@settings(max_examples=200)
@given(data=st.data(), total=st.integers(0, 400_000), main_first=st.booleans())
def test_whatever_happens_to_lanes_all_data_arrives_once_and_in_order(data, total, main_first):
    content = bytes(CONTENT * (total // len(CONTENT) + 1))[:total]
    net = TwoWays()
    net.main_both_ways(LARGE)
    if not main_first:
        net.open_lane()
    net.sender.write(net.ours, content)
    net.sender.finish(net.ours)
    for _ in range(data.draw(st.integers(0, 40))):
        what = data.draw(st.sampled_from(["open", "load", "load", "advance", "advance", "lose", "main"]))
        number = data.draw(st.sampled_from(sorted(net.lanes))) if net.lanes else 0
        size = data.draw(st.integers(1, 100_000))
        if what == "open" and len(net.lanes) < 4:
            net.open_lane()
        elif what == "main":
            net.main_both_ways(size)
        elif what == "load" and number:
            net.load_lane(number, size)
        elif what == "advance" and number:
            net.advance_lane(number, 1 + size // 20_000)
        elif what == "lose" and number:
            net.lose_lane(number)
    for number in list(net.lanes):
        net.lose_lane(number)
    while not net.theirs.at_end:
        net.main_both_ways(LARGE)
    assert bytes(net.received) == content
    net.receiver.finish(net.theirs)
    net.main_both_ways(LARGE)
    assert net.sender.idle
    assert net.receiver.idle
    assert net.sender.memory.held == net.receiver.memory.held == 0


def test_an_outbox_keeps_what_has_not_arrived():
    outbox, stream, data = Outbox(), MuxStream(1, bulk=True), bytearray(b"one")
    outbox.add(Piece(stream, 0, data, False))
    data[:] = b"two"  # whoever wrote it has it back
    outbox.add(Piece(stream, 3, data, True))
    assert outbox.size == 6
    assert outbox.acknowledge(1)
    assert not outbox.acknowledge(1)
    for wrong in (0, 3):
        with pytest.raises(ProtocolError, match="acknowledged"):
            outbox.acknowledge(wrong)
    (left,) = outbox.lose()
    assert (left.offset, left.data, left.fin) == (3, b"two", True)
    assert outbox.size == len(outbox) == 0


def test_a_piece_is_cut_into_records():
    records = Piece(MuxStream(5, bulk=True), 1 << 33, bytes(RECORD + 1), True).records()
    assert records[0] == pack(Kind.PIECE, FIN, 5, (1 << 33).to_bytes(8, "big") + (RECORD + 1).to_bytes(4, "big"))
    assert [len(record) for record in records[1:]] == [RECORD, 1]

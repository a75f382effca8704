"""What is taken over from attempts that failed."""

import attrs
import pytest
import torch

from protocol.direct import Direct
from protocol.identity import PeerId
from protocol.plan import MAX_SALVAGED, NO_BALLOT, Plan, Salvaged, Source
from protocol.ring import Ring
from protocol.round_messages import Halted, Propose
from protocol.salvage import MAX_HOLDINGS, MAX_SPANS, Holding, Span, merged, salvage
from protocol.weights import SIZE
from protocol.wire import encode

A, B, C = (PeerId(bytes([number]) * 32) for number in (1, 2, 3))
ONE = Source(b"1" * 32, (A, B, C), (1.0, 2.0, 3.0))
TWO = Source(b"2" * 32, (A, B), (1.0, 2.0))


def holding(source, *spans):
    return Holding(source, tuple(Span(*span) for span in spans))


def test_spans_are_merged():
    assert merged([(4, 6), (0, 2), (2, 3), (5, 9)]) == (Span(0, 3), Span(4, 9))
    assert merged([]) == ()


def test_of_too_many_spans_the_longest_are_told():
    spans = merged((3 * n, 3 * n + 1 + n % 2) for n in range(2 * MAX_SPANS))
    assert len(spans) == MAX_SPANS
    assert {span.stop - span.start for span in spans} == {2}
    assert list(spans) == sorted(spans, key=lambda span: span.start)


def test_nothing_is_taken_over_if_nobody_holds_anything():
    assert salvage([A, B], {A: (), B: ()}, 10) == ((), ())
    assert salvage([A, B], {A: [holding(ONE, (0, 1))]}, 0) == ((), ())


def test_each_part_has_all_its_holders():
    sources, parts = salvage([B, A], {A: [holding(ONE, (0, 6))], B: [holding(ONE, (4, 8))]}, 10)
    assert sources == (ONE,)
    assert parts == (Salvaged(0, 4, 0, (1,)), Salvaged(4, 6, 0, (0, 1)), Salvaged(6, 8, 0, (0,)))


def test_of_two_sources_the_one_that_more_hold_is_taken():
    held = {A: [holding(ONE, (0, 4))], B: [holding(TWO, (2, 6))], C: [holding(TWO, (2, 6))]}
    sources, parts = salvage([A, B, C], held, 10)
    assert parts == (
        Salvaged(0, 2, sources.index(ONE), (0,)),
        Salvaged(2, 6, sources.index(TWO), (1, 2)),
    )


@pytest.mark.parametrize(
    "lie",
    [
        holding(attrs.evolve(ONE, weights=(9.0, 2.0, 3.0)), (4, 8)),  # another story about the same plan
        holding(attrs.evolve(TWO, weights=(1.0, 1e9)), (4, 8)),  # beyond the limit of the run
        holding(ONE, (8, 12)),  # beyond the end
        holding(ONE, (5, 5)),
    ],
)
def test_lies_are_left_out(lie):
    sources, parts = salvage([A, B], {A: [holding(ONE, (0, 2))], B: [lie]}, 10, max_weight=100.0)
    assert sources == (ONE,)
    assert parts == (Salvaged(0, 2, 0, (0,)),)


def test_who_counts_itself_twice_counts_once():
    held = {
        A: [holding(ONE, (0, 4), (2, 6)), holding(ONE, (0, 4))],
        B: [holding(TWO, (0, 6))],
        C: [holding(TWO, (0, 6))],
    }
    sources, parts = salvage([A, B, C], held, 6)
    assert parts == (Salvaged(0, 5, 0, (1, 2)),)
    assert sources == (TWO,)


def test_of_too_many_parts_the_largest_are_taken():
    spans = [(3 * n, 3 * n + 1 + n % 2) for n in range(2 * MAX_SALVAGED)]
    held = {A: [holding(ONE, *spans[:MAX_SALVAGED])], B: [holding(ONE, *spans[MAX_SALVAGED:])]}
    _, parts = salvage([A, B], held, 6 * MAX_SALVAGED)
    assert len(parts) == MAX_SALVAGED
    assert {part.stop - part.start for part in parts} == {2}


@pytest.mark.parametrize("cut", [3, 9])
def test_several_members_always_reduce_something(cut):
    """Else one of them could complete a plan that others have not accepted, and have completed an earlier one."""
    held = {A: [holding(ONE, (0, 10))], B: [holding(ONE, (0, cut)), holding(TWO, (cut, 10))]}
    _, parts = salvage([A, B], held, 10)
    assert [(part.start, part.stop) for part in parts][-1][1] == 9
    assert sum(part.stop - part.start for part in parts) == 9
    _, parts = salvage([A, B], {A: [holding(ONE, (0, 9))], B: [holding(TWO, (9, 10))]}, 10)
    assert [(part.start, part.stop) for part in parts] == [(0, 9)]
    _, parts = salvage([A], held, 10)  # who is alone may keep all
    assert parts == (Salvaged(0, 10, 0, (0,)),)


def liar(number, *, spans=MAX_SPANS, contributors=(A,)):
    """As much as a member can say, about attempts that nobody else knows."""
    return [
        Holding(
            Source(bytes([number, other]) * 16, contributors, (1.0,) * len(contributors)),
            tuple(Span(start, start + 2**30) for start in range(64 * other + number, 2**20, 2**20 // spans)),
        )
        for other in range(MAX_HOLDINGS)
    ]


def test_a_plan_can_be_sent_whatever_members_say_they_hold():
    crowd = tuple(PeerId(number.to_bytes(32, "big")) for number in range(1, 4097))
    members = crowd[:8]
    held = {peer: liar(place, spans=4, contributors=crowd[:1024]) for place, peer in enumerate(members)}
    for peer in members:
        encode(Halted(NO_BALLOT, tuple(held[peer])))
    sources, salvaged = salvage(members, held, 2**40)
    plan = Plan(
        run=bytes(32),
        revision=1,
        attempt=2,
        rank=0,
        coordinator=A,
        members=crowd,
        weights=(1.5,) * len(crowd),
        length=2**40,
        sources=sources,
        salvaged=salvaged,
        signatures=(bytes(SIZE),) * len(crowd),
    )
    assert salvaged
    encode(Propose(plan))


def test_what_members_say_is_looked_at_in_little_time():
    """No more work for each thing that is said if there are many of them: counted in comparisons of sources."""
    looked = []

    class Counted(bytes):
        __slots__ = ()
        __hash__ = bytes.__hash__

        def __lt__(self, other):
            looked.append(1)
            return bytes.__lt__(self, other)

        def __eq__(self, other):
            looked.append(1)
            return bytes.__eq__(self, other)

    def work(count):
        looked.clear()
        members = [PeerId(bytes([number + 1]) * 32) for number in range(count)]
        held = {
            peer: [attrs.evolve(h, source=attrs.evolve(h.source, plan=Counted(h.source.plan))) for h in liar(place)]
            for place, peer in enumerate(members)
        }
        salvage(members, held, 2**40)
        return len(looked)

    assert work(4) < 8 * work(1)


class Counted(tuple):
    """Counts how many of its elements are looked at."""

    looks = 0

    def __getitem__(self, index):
        Counted.looks += 1
        return super().__getitem__(index)

    def __iter__(self):
        Counted.looks += len(self)
        return super().__iter__()

    def __contains__(self, element):
        Counted.looks += len(self)
        return super().__contains__(element)


@pytest.mark.parametrize("schedule", ["ring", "direct"])
def test_a_plan_with_many_parts_and_holders_takes_no_longer_than_to_read_it(schedule):
    size, parts = 300, 200
    members = tuple(PeerId(number.to_bytes(32, "big")) for number in range(size))
    holders = Counted(range(1, size, 2))
    plan = Plan(
        run=bytes(32),
        revision=1,
        attempt=2,
        rank=0,
        coordinator=members[0],
        members=members,
        weights=(1.0,) * size,
        length=2 * parts,
        sources=(Source(bytes(32), members, (1.0,) * size),),
        salvaged=tuple(Salvaged(2 * part, 2 * part + 1, 0, holders) for part in range(parts)),
        schedule=schedule,
    )
    Counted.looks = 0
    ring = Ring(plan, 0, torch.zeros(plan.length)) if schedule == "ring" else Direct(plan, 0, bytes(4 * plan.length))
    assert Counted.looks < 5 * parts * len(holders)
    assert sum(ring.incoming(source) for source in ring.sources) > parts

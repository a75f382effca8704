"""What is taken over from attempts that failed."""

import attrs
import pytest

from protocol.identity import PeerId
from protocol.plan import MAX_SALVAGED, Salvaged, Source
from protocol.salvage import Holding, Span, merged, salvage

A, B, C = (PeerId(bytes([number]) * 32) for number in (1, 2, 3))
ONE = Source(b"1" * 32, (A, B, C), (1.0, 2.0, 3.0))
TWO = Source(b"2" * 32, (A, B), (1.0, 2.0))


def holding(source, *spans):
    return Holding(source, tuple(Span(*span) for span in spans))


def test_spans_are_merged():
    assert merged([(4, 6), (0, 2), (2, 3), (5, 9)]) == (Span(0, 3), Span(4, 9))
    assert merged([]) == ()


def test_nothing_is_taken_over_if_nobody_holds_anything():
    assert salvage([A, B], {A: (), B: ()}, 10) == ((), ())


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
    assert parts == (Salvaged(0, 6, 0, (1, 2)),)
    assert sources == (TWO,)


def test_of_too_many_parts_the_largest_are_taken():
    spans = [(3 * n, 3 * n + 1 + n % 2) for n in range(2 * MAX_SALVAGED)]
    held = {A: [holding(ONE, *spans[:MAX_SALVAGED])], B: [holding(ONE, *spans[MAX_SALVAGED:])]}
    _, parts = salvage([A, B], held, 6 * MAX_SALVAGED)
    assert len(parts) == MAX_SALVAGED
    assert {part.stop - part.start for part in parts} == {2}

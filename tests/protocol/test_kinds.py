"""Who is right if members bring different things to one operation."""

from __future__ import annotations

import pytest

from protocol.collective import Window
from protocol.identity import PeerId
from protocol.kinds import Brought, Kind, Terms, agreed, differences, left_out

A, B, C, D, E = (PeerId(bytes([number]) * 32) for number in range(5))
TEN, TWELVE, LONG = Kind("reduce", 10), Kind("reduce", 12), Kind("reduce", 99)


def brought(*kinds, late=()):
    return [Brought(peer, kind, peer in late) for peer, kind in zip((A, B, C, D, E), kinds, strict=False)]


@pytest.mark.parametrize(
    ("kinds", "late", "ours", "right"),
    [
        ((TEN,), (), TEN, TEN),
        ((TEN,), (), None, TEN),
        ((TEN, TEN, TWELVE), (), TWELVE, TEN),
        ((TEN, TWELVE), (), TEN, None),
        ((TEN, TWELVE, LONG), (), TEN, None),
        ((TEN, TWELVE), (B,), TWELVE, TEN),  # who has not missed anything is right
        ((TEN, TWELVE, TWELVE), (B, C), TEN, TWELVE),  # but not against more
        ((TEN, TWELVE, LONG), (C,), TEN, None),
        ((TEN, TWELVE), (A, B), TEN, None),
        ((TEN, TEN, TWELVE, TWELVE), (), TWELVE, TWELVE),
        ((TEN, TEN, TWELVE, TWELVE), (), None, TEN),
        ((TEN, TEN, TWELVE, TWELVE, LONG), (), LONG, TEN),
    ],
)
def test_the_kind_of_an_operation(kinds, late, ours, right):
    assert agreed(brought(*kinds, late=late), ours) == right
    assert agreed(brought(*kinds, late=late)[::-1], ours) == right


@pytest.mark.parametrize(
    ("others", "undecided", "verdict"),
    [
        ((), 0, False),
        ((TEN,), 0, False),
        ((TWELVE,), 0, True),
        ((TWELVE,), 1, None),
        ((TWELVE, TEN), 0, False),
        ((TWELVE, TEN), 5, False),
        ((TWELVE, TWELVE), 1, True),
        ((TWELVE, LONG), 1, None),
        ((TWELVE, LONG), 0, True),
        ((TWELVE, TWELVE, TEN), 0, True),
    ],
)
def test_whether_others_are_right_to_leave_us_out(others, undecided, verdict):
    ours, *theirs = brought(TEN, *others)
    assert left_out(ours, theirs, undecided) is verdict


def test_who_has_missed_something_is_left_out_by_one_who_has_not():
    ours, theirs = brought(TEN, TWELVE, late=(A,))
    assert left_out(ours, [theirs], 0)
    assert left_out(theirs, [ours], 0) is False


def test_what_is_different_is_said_in_words():
    window, int8 = Terms.of("all_reduce", Window(quorum=2, grace=0.5, keep=3)), "int8"
    ours = Kind("reduce", 10, "fp32", Terms.of("all_reduce"))
    assert differences(ours, ours) == ""
    assert differences(ours, Kind("reduce", 12, "fp32", Terms.of("all_reduce"))) == "length: 10 here, 12 there"
    theirs = Kind("reduce", 10, int8, window)
    assert differences(ours, theirs) == (
        "codec: fp32 here, int8 there, window: none here, quorum 2 grace 0.5 s keep 3 there"
    )
    exchanging = Kind("exchange", 10, int8, Terms.of("exchange", pairing="exponential"))
    assert differences(ours, exchanging) == ("operation: all_reduce here, exchange there, codec: fp32 here, int8 there")
    blocks = [Kind.of("gather", size, "fp32", Terms.of("gather")) for size in (3, 5)]
    assert differences(*blocks) == ""
    assert differences(blocks[0], Kind.of("gather", 3, "fp32", Terms.of("barrier"))) == (
        "operation: gather here, barrier there"
    )

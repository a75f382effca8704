"""How fast a peer is, beside the others."""

import math

import pytest

from peer.pace import FASTEST, SLOWEST, Speed, pace


def test_speed_is_of_the_last_measurements():
    speed = Speed()
    assert speed.rate == 0
    speed.add(0, 5.0)  # nothing was done, which is no speed
    assert speed.rate == 0
    speed.add(10, 1.0)
    assert speed.rate == 10
    for _ in range(10):
        speed.add(10, 2.0)
    assert speed.rate == pytest.approx(5, rel=0.01)


def test_pace_is_the_share_of_the_fastest_ones_speed():
    assert pace(2.0, [8.0, 4.0]) == 0.25
    assert pace(9.0, [8.0]) == 1.0
    assert pace(2.0, []) == pace(0.0, [8.0]) == pace(2.0, [0.0]) == 1.0


def test_a_liar_cannot_make_others_take_hardly_any_steps():
    assert pace(2.0, [FASTEST]) == SLOWEST
    assert pace(2.0, [math.inf, 4.0]) == 0.5

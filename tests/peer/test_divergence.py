import math

import pytest

from peer.divergence import EVALUATIONS, DivergenceGuard


def said(losses):
    guard = DivergenceGuard()
    return [number for number, loss in enumerate(losses) if guard.sees(loss)]


@pytest.mark.parametrize("bad", [4.1, math.inf, math.nan])
def test_a_run_that_stays_worse_is_told_once(bad):
    assert said([5.0, 3.0, *[bad] * (EVALUATIONS + 4)]) == [1 + EVALUATIONS]


def test_it_is_told_again_after_a_recovery():
    bad = [4.5] * EVALUATIONS
    assert said([3.0, *bad, 3.5, *bad]) == [EVALUATIONS, 2 * EVALUATIONS + 1]


@pytest.mark.parametrize("losses", [[5.0, 4.0, 3.0], [3.0, 4.0] * 5, [3.0, 9.0, 9.0, 3.9] * 3, []])
def test_noise_is_no_divergence(losses):
    assert said(losses) == []

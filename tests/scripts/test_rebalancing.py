"""The replay of comings and goings."""

import math
from random import Random

import attrs
import pytest

from scripts.experiments.rebalancing import Setting, log, one_move, replay


def test_machines_go_only_if_they_have_come_and_are_never_more_than_are_to_be_had():
    setting = Setting(hours=10, unrest=30)
    alive = set()
    for event in log(setting, Random(1)):
        if event.comes:
            assert event.peer not in alive
            alive.add(event.peer)
        else:
            alive.remove(event.peer)
        assert len(alive) <= setting.machines


def test_nothing_is_lost_where_nobody_comes_or_goes():
    setting = Setting(hours=2, unrest=0, lifetime=math.inf)
    assert replay(setting, 0, 300) == (1.0, 0)


@pytest.mark.parametrize("seed", range(3))
def test_moves_keep_most_of_the_optimum(seed):
    setting = Setting(hours=12)
    (without, no_moves), (with_it, some_moves) = (replay(setting, seed, period) for period in (None, 300.0))
    assert no_moves == 0 < some_moves
    assert without < 0.93
    assert with_it >= 0.95
    assert replay(setting, seed, 300.0, one_move)[0] < with_it


@pytest.mark.parametrize(
    "changed",
    [{"unrest": 5.0}, {"unrest": 20.0}, {"lifetime": 8 * 3600.0}, {"stages": 16}, {"noise": 0.05}, {"choosing": False}],
)
def test_so_they_do_with_logs_of_other_kinds(changed):
    setting = attrs.evolve(Setting(hours=8), **changed)
    without, with_it = (replay(setting, 1, period)[0] for period in (None, 300.0))
    assert with_it >= 0.95 > without

"""The replay of comings and goings."""

import math
from random import Random

from optim.swarm.balance import Policy
from scripts.experiments.rebalancing import Setting, log, replay


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
    assert replay(setting, 0, 300, Policy()) == (1.0, 0)


def test_rebalancing_keeps_most_of_the_optimum():
    setting = Setting(hours=12)
    (without, no_moves), (with_it, some_moves) = (replay(setting, 1, period, Policy()) for period in (None, 300.0))
    assert no_moves == 0 < some_moves
    assert without < 0.9
    assert with_it >= 0.95

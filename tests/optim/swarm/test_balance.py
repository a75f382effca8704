"""Peers move to where they are needed."""

import math
from random import Random

import attrs
import pytest

from optim.swarm.balance import Member, Move, Policy, eta, moves, newcomers_stage, throughputs
from tests.optim.swarm.toys import peer_id

ONE = Policy(most=1)


def members(*stages, **options):
    """Members of each stage, given by their rates."""
    return [
        Member(peer=peer_id((stage, index)), stage=stage, rate=rate, **options)
        for stage, rates in enumerate(stages)
        for index, rate in enumerate(rates)
    ]


def carried_out(there, some):
    targets = {move.peer: move.target for move in some}
    return [attrs.evolve(each, stage=targets.get(each.peer, each.stage)) for each in there]


def test_a_peer_moves_from_the_fastest_stage_to_the_slowest():
    there = members([1, 1, 1], [1], [1, 1])
    (move,) = moves(there, 3, ONE)
    assert (move.source, move.target) == (0, 1)


def test_among_equal_ones_the_lowest_id_moves_so_that_all_choose_the_same():
    there = members([1, 1, 1], [1])
    expected = Move(min(each.peer for each in there[:3]), 0, 1)
    for seed in range(5):
        assert moves(Random(seed).sample(there, len(there)), 2, ONE) == [expected]


def test_of_peers_of_different_speed_the_one_moves_that_makes_stages_most_equal():
    there = members([1, 4, 2, 6], [1])
    (move,) = moves(there, 2, ONE)
    assert move.peer == peer_id((0, 3))
    assert throughputs(carried_out(there, [move]), 2) == [7, 7]


@pytest.mark.parametrize("stages", [([1, 1], [1]), ([1], [1]), ([1.04, 1.04], [2.0])])
def test_nobody_moves_without_a_gain(stages):
    assert moves(members(*stages), 2, ONE) == []


def test_small_differences_of_measured_rates_move_nobody():
    there = members([1.0, 1.0, 1.0, 1.0], [3.1 / 3] * 3)
    assert moves(there, 2, attrs.evolve(ONE, gain=0.0)) == []
    assert moves(members([2.0, 0.05], [1.9]), 2, ONE) == []
    assert moves(members([2.0, 0.05], [1.9]), 2, attrs.evolve(ONE, gain=0.01)) != []


def test_who_has_moved_lately_stays():
    assert moves(members([1, 1, 1], [1], settled_for=299.0), 2, ONE) == []
    assert len(moves(members([1, 1, 1], [1], settled_for=300.0), 2, ONE)) == 1


def test_a_stage_without_servers_is_helped_at_once_by_somebody_who_has_just_come():
    there = members([1, 1], [], [1, 1], settled_for=0.0)
    (move,) = moves(there, 3, ONE)
    assert move.target == 1


def test_several_stages_without_servers_are_all_helped_whatever_the_limit():
    there = members([1, 1, 1, 1], [], [], [])
    assert sorted(move.target for move in moves(there, 4, ONE)) == [1, 2, 3]


def test_a_stage_whose_last_server_will_leave_is_helped_before_it_is_gone():
    there = members([1, 1, 1], [1], [1], settled_for=0.0)
    assert moves(there, 3, ONE) == []
    there[3] = attrs.evolve(there[3], leaving=True)
    (move,) = moves(there, 3, ONE)
    assert (move.source, move.target) == (0, 1)


def test_who_leaves_is_sent_nowhere():
    there = [attrs.evolve(each, leaving=each.stage == 0) for each in members([1, 1, 1], [1], [1])]
    assert moves(there, 3, ONE) == []


def test_no_stage_gives_its_last_server_away():
    assert moves(members([5], []), 2, ONE) == []


def test_newcomers_go_to_the_slowest_stage():
    assert newcomers_stage(members([1, 1], [1.5], [3]), 3) == 1
    assert newcomers_stage([], 3) == 0


def test_the_time_a_stage_needs_follows_from_its_throughput():
    assert eta(members([1, 1], [4], []), 3, [10, 10, 0]) == [5, 2.5, 0]
    assert eta(members([1], []), 2, [1, 1])[1] == math.inf


@pytest.mark.parametrize("seed", range(20))
def test_moves_come_to_an_end_with_stages_that_differ_by_less_than_a_peer(seed):
    random = Random(seed)
    there = [
        Member(peer=peer_id(index), stage=random.randrange(6), rate=random.uniform(0.5, 2.0)) for index in range(40)
    ]
    policy = Policy(gain=0.01, rest=0.0)
    before = min(throughputs(there, 6))
    for _ in range(40):
        some = moves(there, 6, policy)
        if not some:
            break
        there = carried_out(there, some)
        assert min(throughputs(there, 6)) >= before
        before = min(throughputs(there, 6))
    assert not some
    rates = throughputs(there, 6)
    assert max(rates) - min(rates) <= 2.0

"""Peers move to where they are needed."""

from random import Random

import attrs
import pytest

from optim.swarm.balance import Member, Move, Policy, moves, newcomers_stage, throughputs
from tests.optim.swarm.toys import peer_id

POLICY = Policy(gain=0.05, rest=20)


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
    (move,) = moves(there, 3, POLICY)
    assert (move.source, move.target) == (0, 1)


def test_as_many_move_as_it_takes_and_then_nobody():
    there = members([1] * 9, [1] * 4, [1] * 2)
    some = moves(there, 3, POLICY)
    assert len(some) == len({move.peer for move in some}) == 4
    there = carried_out(there, some)
    assert throughputs(there, 3) == [5, 5, 5]
    assert moves(there, 3, POLICY) == []


@pytest.mark.parametrize("seed", range(20))
def test_rates_that_are_measured_a_little_differently_make_the_same_moves(seed):
    random, there = Random(seed), members([1] * 9, [1] * 3)
    measured = [attrs.evolve(each, rate=random.uniform(0.995, 1.005)) for each in there]
    assert moves(measured, 2, POLICY) == moves(there, 2, POLICY) != []


def test_among_equal_ones_the_lowest_id_moves_so_that_all_choose_the_same():
    there = members([1, 1, 1], [1])
    expected = Move(min(each.peer for each in there[:3]), 0, 1)
    for seed in range(5):
        assert moves(Random(seed).sample(there, len(there)), 2, POLICY) == [expected]


def test_of_peers_of_different_speed_the_one_moves_that_makes_stages_most_equal():
    there = members([1, 4, 2, 6], [1])
    (move,) = moves(there, 2, POLICY)
    assert move.peer == peer_id((0, 3))
    assert throughputs(carried_out(there, [move]), 2) == [7, 7]


@pytest.mark.parametrize("stages", [([1, 1], [1]), ([1], [1]), ([1.04, 1.04], [2.0])])
def test_nobody_moves_without_a_gain(stages):
    assert moves(members(*stages), 2, POLICY) == []


def test_small_differences_of_measured_rates_move_nobody():
    there = members([1.0, 1.0, 1.0, 1.0], [3.1 / 3] * 3)
    assert moves(there, 2, attrs.evolve(POLICY, gain=0.0)) == []
    assert moves(members([2.0, 0.05], [1.9]), 2, POLICY) == []
    assert moves(members([2.0, 0.05], [1.9]), 2, attrs.evolve(POLICY, gain=0.01)) != []


def test_who_has_moved_lately_stays():
    assert moves(members([1, 1, 1], [1], settled_for=19.0), 2, POLICY) == []
    assert len(moves(members([1, 1, 1], [1], settled_for=20.0), 2, POLICY)) == 1


def test_a_stage_without_servers_is_helped_at_once_by_somebody_who_has_just_come():
    there = members([1, 1], [], [1, 1], settled_for=0.0)
    (move,) = moves(there, 3, POLICY)
    assert move.target == 1


def test_several_stages_without_servers_are_all_helped():
    there = members([1, 1, 1, 1], [], [], [])
    assert sorted(move.target for move in moves(there, 4, POLICY)) == [1, 2, 3]


def test_a_stage_whose_last_server_will_leave_is_helped_before_it_is_gone():
    there = members([1, 1, 1], [1], [1], settled_for=0.0)
    assert moves(there, 3, POLICY) == []
    there[3] = attrs.evolve(there[3], leaving=True)
    (move,) = moves(there, 3, POLICY)
    assert (move.source, move.target) == (0, 1)


def test_who_leaves_is_sent_nowhere():
    there = [attrs.evolve(each, leaving=each.stage == 0) for each in members([1, 1, 1], [1], [1])]
    assert moves(there, 3, POLICY) == []


def test_no_stage_gives_its_last_server_away():
    assert moves(members([5], []), 2, POLICY) == []


def test_newcomers_go_to_the_slowest_stage():
    assert newcomers_stage(members([1, 1], [0.5, 1], [1, 2]), 3) == 1
    assert newcomers_stage([], 3) == 0


def test_newcomers_go_first_where_there_are_fewer_than_two():
    assert newcomers_stage(members([1, 1], [5], [3, 1]), 3) == 1


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

"""Pairs that all members of a plan make the same."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.identity import PeerId
from protocol.pairs import pairs, partner, swap_id
from protocol.plan import Plan


def plan_of(count: int, attempt: int = 1) -> Plan:
    return Plan(
        run=bytes(32),
        revision=1,
        attempt=attempt,
        rank=0,
        coordinator=PeerId(bytes(32)),
        members=tuple(PeerId(bytes([number]) * 32) for number in range(count)),
        weights=(1.0,) * count,
        length=3,
        operation="exchange",
    )


@given(count=st.integers(1, 30), attempt=st.integers(1, 100))
def test_everybody_is_in_one_pair(count, attempt):
    plan = plan_of(count, attempt)
    made = pairs(plan)
    assert sorted(peer for pair in made for peer in pair) == sorted(plan.members)
    assert [len(pair) for pair in made] == [2] * (count // 2) + [1] * (count % 2)
    for peer in plan.members:
        other = partner(plan, peer)
        assert other is None or (other != peer and partner(plan, other) == peer)
    assert sum(partner(plan, peer) is None for peer in plan.members) == count % 2


@given(
    count=st.integers(1, 30),
    revision=st.integers(1, 100),
    pairing=st.sampled_from(["exponential", "exponential-ring"]),
)
def test_everybody_is_in_one_pair_of_a_graph_which_no_attempt_changes(count, revision, pairing):
    plan = attrs.evolve(plan_of(count), revision=revision)
    made = pairs(plan, pairing)
    assert sorted(peer for pair in made for peer in pair) == sorted(plan.members)
    assert sum(len(pair) == 1 for pair in made) == count % 2
    other = attrs.evolve(plan, attempt=7, members=plan.members[::-1], coordinator=plan.members[-1])
    assert pairs(other, pairing) == made


def numbers(count, revision, pairing):
    return [tuple(peer[0] for peer in pair) for pair in pairs(attrs.evolve(plan_of(count), revision=revision), pairing)]


def test_distances_double_on_the_exponential_graph():
    assert numbers(8, 1, "exponential") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert numbers(8, 2, "exponential") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert numbers(8, 3, "exponential") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert numbers(8, 4, "exponential") == numbers(8, 1, "exponential")
    assert numbers(6, 3, "exponential") == [(0, 4), (1, 5), (2, 3)]


def test_the_ring_takes_turns_with_the_exponential_graph():
    assert [numbers(4, revision, "exponential-ring") for revision in range(1, 6)] == [
        [(0, 1), (2, 3)],
        [(0, 1), (2, 3)],
        [(0, 2), (1, 3)],
        [(1, 2), (3, 0)],
        [(0, 1), (2, 3)],
    ]


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_a_value_reaches_everybody_in_as_many_operations_as_it_takes_to_double(count):
    values = [float(number == 0) for number in range(count)]
    for revision in range(1, count.bit_length()):
        for one, other in numbers(count, revision, "exponential"):
            values[one] = values[other] = (values[one] + values[other]) / 2
    assert values == [1 / count] * count


def test_who_is_no_member_has_no_partner():
    assert partner(plan_of(4), PeerId(bytes([9]) * 32)) is None


@pytest.mark.parametrize("count", [3, 4])
def test_each_attempt_draws_anew(count):
    drawn = [partner(plan_of(count, attempt), PeerId(bytes(32))) for attempt in range(1, 61)]
    assert set(drawn) >= set(plan_of(count).members[1:])


def test_streams_of_pairs_are_not_those_of_the_ring():
    plan = plan_of(2)
    assert swap_id(plan) != plan.id
    assert swap_id(plan) != swap_id(attrs.evolve(plan, attempt=2))

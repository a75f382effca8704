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

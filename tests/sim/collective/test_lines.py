"""Members with unequal lines: they are measured by what is moved anyway, and plans take them into account."""

import pytest
import torch
import trio

from protocol.endpoint import Limits
from protocol.planner import estimate
from protocol.rates import Rates
from protocol.vectors import vector_bytes

SLOW, FAST = 80_000, 400_000  # bytes per second
LENGTH = 400_000
BOUND = 4 * LENGTH / SLOW  # what is slow has to send its values, and to get the result


def values(peer):
    return torch.full((LENGTH,), float(peer.number))


def one_is_slow(number: int) -> Limits:
    rate = FAST if number else SLOW
    return Limits(max_upload=rate, max_download=rate)


async def reduce(swarm):
    """One operation: its result, the same at all."""
    outcomes = await swarm.together(lambda peer: peer.collective.all_reduce(values(peer), peer.number + 1.0))
    assert len({bytes(vector_bytes(one.mean)) for one in outcomes.values()}) == 1
    assert len({one.plan for one in outcomes.values()}) == 1
    return max(outcomes.values(), key=lambda one: one.seconds)


def check(swarm, reduced):
    """The result is the mean of the contributors, part by part."""
    numbers = {peer.id: float(peer.number) for peer in swarm.peers}
    for part in reduced.plan.parts:
        total = sum(weight * numbers[peer] for peer, weight in zip(part.members, part.weights, strict=True))
        expected = torch.full((part.stop - part.start,), total / sum(part.weights))
        torch.testing.assert_close(reduced.mean[part.start : part.stop], expected)


async def test_after_one_operation_who_is_slow_owns_little_and_the_time_is_near_the_bound(autojump_clock, swarm_of):
    async with swarm_of(4, limits=one_is_slow) as swarm:
        slow = swarm.peers[0].id
        lines = {peer.id: Rates(rate, rate) for peer in swarm.peers for rate in (FAST if peer.number else SLOW,)}
        first = await reduce(swarm)
        assert first.plan.blocks == ()  # nobody knew anything
        for _ in range(2):
            later = await reduce(swarm)
            assert later.plan.schedule == "direct"
            assert dict(zip(later.plan.members, later.plan.blocks, strict=True))[slow] < LENGTH / 20
            assert later.seconds < 1.15 * BOUND < 1.3 * BOUND < first.seconds
            assert later.seconds < 1.15 * estimate(later.plan, lines)
            check(swarm, later)
        await swarm.rest()


@pytest.mark.parametrize(("victim", "wait"), [(0, 8.0), (1, 2.0), (1, 12.0), (3, 19.0)])
async def test_a_death_while_blocks_are_unequal(autojump_clock, swarm_of, victim, wait):
    """What is reduced stays; the rest is done by those who are left. All hold the same."""
    async with swarm_of(4, limits=one_is_slow) as swarm:
        assert (await reduce(swarm)).plan.attempt == 1

        async def kill():
            await trio.sleep(wait)
            swarm.kill(swarm.peers[victim])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            outcomes = await swarm.together(lambda peer: peer.collective.all_reduce(values(peer), peer.number + 1.0))
        left = [outcomes[peer] for peer in swarm.alive]
        assert len({bytes(vector_bytes(one.mean)) for one in left}) == 1
        assert {one.plan.attempt for one in left} == {2}
        assert swarm.peers[victim].id not in left[0].plan.members
        if victim and wait > 5:
            assert left[0].plan.salvaged
        check(swarm, left[0])
        await swarm.rest()


async def test_with_equal_lines_all_own_the_same(autojump_clock, swarm_of):
    async with swarm_of(4, limits=lambda number: Limits(max_upload=FAST, max_download=FAST)) as swarm:
        for known in (False, True):
            reduced = await reduce(swarm)
            assert reduced.plan.blocks == ()
            assert not known or reduced.plan.schedule == "ring"
        await swarm.rest()


async def test_short_vectors_take_the_short_way(autojump_clock, swarm_of):
    async with swarm_of(4) as swarm:
        outcomes = await swarm.together(lambda peer: peer.collective.all_reduce(torch.ones(1024), peer.number + 1.0))
        assert {one.plan.schedule for one in outcomes.values()} == {"direct"}
        assert len({bytes(vector_bytes(one.mean)) for one in outcomes.values()}) == 1
        await swarm.rest()

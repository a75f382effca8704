"""Members with unequal lines: they are measured by what is moved anyway, and plans take them into account."""

import attrs
import pytest
import torch

from protocol.endpoint import Limits
from protocol.planner import estimate
from protocol.rates import Rates
from protocol.vectors import vector_bytes

SLOW, FAST = 200_000, 1_000_000  # bytes per second
LENGTH = 1_000_000
BOUND = 4 * LENGTH / SLOW  # what is slow has to send its values, and to get the result


def values(peer):
    return torch.full((LENGTH,), float(peer.number))


def one_is_slow(number: int) -> Limits:
    rate = FAST if number else SLOW
    return Limits(max_upload=rate, max_download=rate)


async def reduce(swarm, peers=None):
    reduced = await swarm.together(lambda peer: peer.collective.all_reduce(values(peer)), peers)
    assert len({bytes(vector_bytes(one.mean)) for one in reduced.values()}) == 1
    assert len({one.plan for one in reduced.values()}) == 1
    return next(iter(reduced.values()))


async def test_after_one_round_the_slow_member_owns_little_and_the_time_is_near_the_bound(autojump_clock, swarm_of):
    async with swarm_of(4, limits=one_is_slow) as swarm:
        first = await reduce(swarm)
        assert first.plan.schedule == "ring"  # nobody knew anything
        assert first.plan.blocks == ()
        await reduce(swarm)
        later = await reduce(swarm)
        assert later.plan.schedule == "direct"
        slow = swarm.peers[0].id
        assert dict(zip(later.plan.members, later.plan.blocks, strict=True))[slow] < LENGTH / 50
        assert later.seconds < 1.15 * BOUND < first.seconds
        lines = {
            peer.id: Rates(SLOW if peer.id == slow else FAST, SLOW if peer.id == slow else FAST) for peer in swarm.peers
        }
        assert later.seconds < 1.15 * estimate(later.plan, lines)
        await swarm.rest()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("wait", [2.0, 12.0])
async def test_a_death_while_blocks_are_unequal(autojump_clock, swarm_of, victim, wait):
    async with swarm_of(4, limits=one_is_slow) as swarm:
        await reduce(swarm)
        outcomes = {}

        async def kill():
            import trio

            await trio.sleep(wait)
            swarm.kill(swarm.peers[victim])

        del outcomes, kill
        await swarm.rest()


async def test_equal_lines_keep_the_ring(autojump_clock, swarm_of):
    async with swarm_of(4, limits=lambda number: Limits(max_upload=FAST, max_download=FAST)) as swarm:
        for _ in range(3):
            reduced = await reduce(swarm)
            assert reduced.plan.schedule == "ring"
            assert reduced.plan.blocks == ()
        await swarm.rest()


async def test_short_vectors_take_the_short_way(autojump_clock, swarm_of):
    async with swarm_of(4) as swarm:
        reduced = await swarm.together(lambda peer: peer.collective.all_reduce(torch.ones(1024), peer.number + 1.0))
        assert {one.plan.schedule for one in reduced.values()} == {"direct"}
        assert len({bytes(vector_bytes(one.mean)) for one in reduced.values()}) == 1
        await swarm.rest()

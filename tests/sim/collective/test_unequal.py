"""Peers that take different times from one operation to the next, as machines do between exchanges."""

from __future__ import annotations

import itertools

import pytest
import torch
import trio

from protocol.channels import ChannelSettings
from protocol.coordinator import RoundTimes
from protocol.errors import RequestTimeout

TIMES = ChannelSettings().times
PAUSE = 10 * TIMES.grace  # far longer than anybody is waited for otherwise


async def reduces(peer, pauses):
    """Who took part in its operations, each after so many seconds, and when it was over."""
    found = []
    for pause in pauses:
        await trio.sleep(pause)
        reduced = await peer.collective.all_reduce(torch.ones(3))
        found.append((reduced.number, len(reduced.contributors), round(trio.current_time(), 1)))
    return found


@pytest.mark.parametrize("factor", [1.05, 2.0, 2.9])
@pytest.mark.parametrize("seed", range(3))
async def test_the_slower_are_waited_for(autojump_clock, swarm_of, factor, seed):
    async with swarm_of(3, times=TIMES, seed=seed) as swarm:
        paces = dict(zip(swarm.peers, (1.0, 1.02, factor), strict=True))
        found = await swarm.together(lambda peer: reduces(peer, [0.0] + 4 * [PAUSE * paces[peer]]))
        for peer in swarm.peers:
            assert [(number, members) for number, members, _ in found[peer]] == [(n, 3) for n in range(1, 6)]
        await swarm.rest()


async def test_who_does_not_come_any_more_is_waited_for_once(autojump_clock, swarm_of):
    """It is connected, but its program does something else."""
    async with swarm_of(3, times=TIMES) as swarm:
        *going_on, _ = swarm.peers
        found = await swarm.together(lambda peer: reduces(peer, [0.0] + (3 * [PAUSE] if peer in going_on else [])))
        assert [members for _, members, _ in found[going_on[0]]] == [3, 2, 2, 2]
        assert [members for _, members, _ in found[going_on[1]]] == [3, 2, 2, 2]
        ends = [at for _, _, at in found[going_on[0]]]
        assert [later - earlier for earlier, later in itertools.pairwise(ends)] == pytest.approx(
            [PAUSE + 3 * PAUSE, PAUSE + TIMES.window, PAUSE + TIMES.window], abs=4
        )
        await swarm.rest()


async def test_who_was_too_slow_is_told_how_many_it_has_missed(autojump_clock, swarm_of):
    async with swarm_of(3, times=TIMES) as swarm:
        *quick, slow = swarm.peers
        pauses = dict.fromkeys(quick, [0.0] + 12 * [PAUSE]) | {slow: [0.0, 8 * PAUSE, PAUSE]}
        skipped = {peer: [] for peer in swarm.peers}

        async def reduces(peer):
            for pause in pauses[peer]:
                await trio.sleep(pause)
                reduced = await peer.collective.all_reduce(torch.ones(3))
                skipped[peer].append((reduced.number, reduced.skipped))

        await swarm.together(reduces)
        for peer in quick:
            assert skipped[peer] == [(number, 0) for number in range(1, 14)]
        (first, _), (second, missed), (third, none) = skipped[slow]
        assert (missed, none) == (second - first - 1, 0)
        assert missed > 0
        assert third == second + 1
        await swarm.rest()


@pytest.mark.parametrize("way", ["kill", "stall"])
async def test_the_dead_are_not_waited_for(autojump_clock, swarm_of, way):
    async with swarm_of(3, times=TIMES) as swarm:
        *going_on, other = swarm.peers
        await swarm.together(lambda peer: reduces(peer, [0.0, PAUSE]))
        getattr(swarm, way)(other)
        begun = trio.current_time()
        found = await swarm.together(lambda peer: reduces(peer, [PAUSE]), going_on)
        assert [members for _, members, _ in found[going_on[0]]] == [2]
        assert trio.current_time() - begun < PAUSE + 2 * TIMES.stall
        await swarm.rest()


async def test_a_time_limit_still_counts(autojump_clock, swarm_of):
    async with swarm_of(2, times=TIMES) as swarm:
        quick, _ = swarm.peers
        await swarm.together(lambda peer: reduces(peer, [0.0, PAUSE]))
        await trio.sleep(PAUSE)
        with pytest.raises(RequestTimeout):
            await quick.collective.all_reduce(torch.ones(3), timeout=PAUSE)


async def test_without_steadiness_the_grace_time_is_all(autojump_clock, swarm_of):
    async with swarm_of(2, times=RoundTimes()) as swarm:
        quick, slow = swarm.peers
        pauses = {quick: [0.0, PAUSE], slow: [0.0, 2 * PAUSE]}
        found = await swarm.together(lambda peer: reduces(peer, pauses[peer]))
        assert [members for _, members, _ in found[quick]] == [2, 1]

"""Rounds in simulated swarms: what must hold whoever dies, stalls or is cut off, and when.

Latency is 50 ms, so a round of four peers is spread over about a second of simulated time: the training ends around
1.0 s, then Ready, the plan, its acceptance and the six hops of the ring follow. Killing at times 25 ms apart hits every
phase of it.
"""

from __future__ import annotations

import pytest
import trio

from protocol.plan import coordinators

RUN_ORDER = ["coordinator", "stand-in", "member", "last"]


def ranked(swarm, revision: int):
    """The peers in the order in which they coordinate a round."""
    run = swarm.run_id
    return [swarm.by_id(peer) for peer in coordinators(run, revision, [peer.id for peer in swarm.alive])]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
async def test_all_take_part_and_agree(autojump_clock, swarm_of, count):
    async with swarm_of(count) as swarm:
        await swarm.progress(3, within=60)
        for revision in (1, 2, 3):
            plans = {peer.results[revision].plan.id for peer in swarm.peers}
            assert len(plans) == 1
            assert len(swarm.peers[0].results[revision].contributors) == count
            assert swarm.peers[0].results[revision].attempts == 1
        assert len({peer.chain[3] for peer in swarm.peers}) == 1
        swarm.check()


@pytest.mark.parametrize("phase", range(24))
@pytest.mark.parametrize("victim", RUN_ORDER)
async def test_one_is_killed(autojump_clock, swarm_of, victim, phase):
    async with swarm_of(4) as swarm:
        await trio.sleep(1.0 + 0.025 * phase)
        swarm.kill(ranked(swarm, 1)[RUN_ORDER.index(victim)])
        await swarm.progress(1, within=15)
        survivors = swarm.alive
        assert len({peer.chain[1] for peer in survivors}) == 1
        await swarm.progress(4, within=60)
        assert len({peer.chain[4] for peer in survivors}) == 1
        assert not any(peer.adoptions for peer in survivors)
        assert len(survivors[0].results[4].contributors) == 3
        swarm.check()


@pytest.mark.parametrize("phase", range(0, 24, 2))
@pytest.mark.parametrize("victims", [(0, 1), (0, 3), (1, 2), (0, 1, 2)])
async def test_several_are_killed(autojump_clock, swarm_of, victims, phase):
    async with swarm_of(5) as swarm:
        order = ranked(swarm, 1)
        await trio.sleep(1.0 + 0.03 * phase)
        for number in victims:
            swarm.kill(order[number])
            await trio.sleep(0.04)
        await swarm.progress(1, within=20)
        await swarm.progress(4, within=60)
        survivors = swarm.alive
        assert len({peer.chain[4] for peer in survivors}) == 1
        assert len(survivors[0].results[4].contributors) == 5 - len(victims)
        swarm.check()

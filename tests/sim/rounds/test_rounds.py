"""Rounds in simulated swarms: what must hold whoever dies, stalls or is cut off, and when.

Latency is 50 ms, so a round of four peers is spread over about a second of simulated time: the training ends around
1.0 s, then Ready, the plan, its acceptance and the six hops of the ring follow. Killing at times 50 ms apart hits every
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


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(("codec", "most"), [("bf16", 0.51), ("int8", 0.27), ("int4", 0.14), ("e3m0", 0.14)])
async def test_lossy_codecs_send_less_and_all_agree(autojump_clock, swarm_of, count, codec, most):
    async with swarm_of(count, length=20_000, codec=codec) as swarm:
        await swarm.progress(3, within=60)
        for revision in (1, 2, 3):
            results = [peer.results[revision] for peer in swarm.peers]
            assert {result.plan.codec for result in results} == {codec}
            assert {result.attempts for result in results} == {1}
            assert all(result.bytes_sent <= most * 4 * 20_000 * 2 * (count - 1) / count for result in results)
        assert len({peer.chain[3] for peer in swarm.peers}) == 1
        swarm.check()


@pytest.mark.parametrize("phase", range(0, 24, 2))
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


@pytest.mark.parametrize(("wait", "kept"), [(0.2, 0.0), (0.8, 0.75), (1.1, 1.0)])
@pytest.mark.parametrize("victim", ["coordinator", "member"])
async def test_what_was_reduced_before_a_death_is_not_reduced_again(autojump_clock, swarm_of, victim, wait, kept):
    """The ring takes 1.7 s, of which the second half passes on what is reduced."""
    async with swarm_of(4, length=8000, bandwidth=40_000, schedule="ring") as swarm:
        await swarm.progress(1, within=30)
        dead = ranked(swarm, 2)[RUN_ORDER.index(victim)]
        for peer in swarm.peers:
            await peer.enter(2)
        await trio.sleep(wait)
        swarm.kill(dead)
        killed = trio.current_time()
        await swarm.progress(2, within=60)
        took = trio.current_time() - killed
        plans = {peer.results[2].plan.id: peer.results[2].plan for peer in swarm.alive}
        (plan,) = plans.values()
        assert plan.attempt == 2
        assert dead.id not in plan.members
        salvaged = [part for part in plan.parts if dead.id in part.members]
        least = 1  # element that is always reduced
        assert sum(part.stop - part.start for part in salvaged) == min(kept * 8000, 8000 - least)
        assert (took < 1.4) == (kept > 0)
        swarm.check()


@pytest.mark.parametrize("phase", range(0, 24, 3))
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


@pytest.mark.parametrize("phase", range(0, 24, 4))
@pytest.mark.parametrize("victim", RUN_ORDER)
async def test_one_is_frozen_and_thaws(autojump_clock, swarm_of, victim, phase):
    async with swarm_of(4) as swarm:
        await trio.sleep(1.0 + 0.025 * phase)
        frozen = ranked(swarm, 1)[RUN_ORDER.index(victim)]
        swarm.network.stall(frozen.host)
        frozen.alive = False
        await swarm.progress(1, within=15)
        await swarm.progress(3, within=60)
        frozen.alive = True
        swarm.network.resume(frozen.host)
        # It made a branch of its own meanwhile, for which the others doubt it for some rounds.
        last = max(peer.revision for peer in swarm.peers) + 8
        await swarm.progress(last, within=190)
        assert len({peer.chain[last] for peer in swarm.peers}) == 1
        assert len(swarm.peers[0].results[last].contributors) == 4
        swarm.check()


@pytest.mark.parametrize("segments", [0, 1])
@pytest.mark.parametrize("victim", RUN_ORDER)
async def test_one_sends_nothing_to_the_owners_though_it_is_alive(autojump_clock, swarm_of, victim, segments):
    """Every owner waits for its values, and all wait for the owners: those who know whose values lack are believed."""
    async with swarm_of(4, length=40, schedule="direct") as swarm:
        culprit = ranked(swarm, 2)[RUN_ORDER.index(victim)]
        await swarm.progress(1, within=15)
        healthy = culprit.jam_ring(after=segments)
        await swarm.progress(2, within=40)
        result = swarm.peers[0].results[2]
        if segments:  # the culprit has all then, and gives it to the others
            assert result.plan.attempt == 1
            assert len(result.contributors) == 4
        else:
            assert set(result.contributors) == {peer.id for peer in swarm.peers} - {culprit.id}
            assert result.plan.attempt == (3 if victim == "coordinator" else 2)
        healthy()
        last = max(peer.revision for peer in swarm.peers) + 8
        await swarm.progress(last, within=190)
        swarm.check()


@pytest.mark.parametrize("segments", [0, 1, 2, 4])
@pytest.mark.parametrize("victim", RUN_ORDER)
async def test_one_sends_nothing_though_it_is_alive(autojump_clock, swarm_of, victim, segments):
    """The culprit is found although in the end everybody waits for a neighbour, the culprit included."""
    async with swarm_of(4, schedule="ring") as swarm:
        culprit = ranked(swarm, 2)[RUN_ORDER.index(victim)]
        await swarm.progress(1, within=15)
        healthy = culprit.jam_ring(after=segments)
        await swarm.progress(2, within=40)
        result = swarm.peers[0].results[2]
        if victim == "coordinator" and segments == 2:
            # It blames its accuser first. In the smaller ring, two segments are enough for it to complete.
            assert len(result.contributors) == 3
        elif segments < 4:
            assert set(result.contributors) == {peer.id for peer in swarm.peers} - {culprit.id}
            # A coordinator takes itself for healthy at first.
            assert result.plan.attempt == (3 if victim == "coordinator" else 2)
        else:  # somebody has everything by then, and gives it to the others
            assert len(result.contributors) == 4
            assert result.plan.attempt == 1
        healthy()
        # It made a branch of its own meanwhile, for which the others doubt it for some rounds.
        last = max(peer.revision for peer in swarm.peers) + 8
        await swarm.progress(last, within=190)
        assert len({peer.chain[last] for peer in swarm.peers}) == 1
        assert len(swarm.peers[0].results[last].contributors) == 4
        swarm.check()


@pytest.mark.parametrize("victim", RUN_ORDER[1:])
async def test_one_accepts_and_then_does_nothing(autojump_clock, swarm_of, victim):
    async with swarm_of(4) as swarm:
        culprit = ranked(swarm, 2)[RUN_ORDER.index(victim)]
        await swarm.progress(1, within=15)
        healthy = culprit.sleep_in_ring()
        await swarm.progress(2, within=40)
        result = next(peer for peer in swarm.peers if peer is not culprit).results[2]
        assert set(result.contributors) == {peer.id for peer in swarm.peers} - {culprit.id}
        healthy()
        await swarm.progress(5, within=90)
        assert len({peer.chain[5] for peer in swarm.peers}) == 1
        swarm.check()


@pytest.mark.parametrize("pair", [(0, 1), (0, 3), (1, 2), (2, 3)])
@pytest.mark.parametrize("count", [3, 4])
async def test_two_cannot_reach_each_other(autojump_clock, swarm_of, count, pair):
    """One of them goes without contributing, but nobody is lost and rounds go on."""
    async with swarm_of(count) as swarm:
        await swarm.progress(1, within=15)
        one, other = (swarm.peers[number % count].host for number in pair)
        swarm.network.partition([one], [other])
        await swarm.progress(6, within=200)
        swarm.check()
        swarm.network.heal()
        await swarm.progress(10, within=200)
        assert len({peer.chain[10] for peer in swarm.peers}) == 1
        assert len(swarm.peers[0].results[10].contributors) == count
        swarm.check()


@pytest.mark.parametrize("phase", range(0, 24, 3))
@pytest.mark.parametrize("cut", [1, 2])
async def test_partition(autojump_clock, swarm_of, cut, phase):
    """Both sides go on, and come together again."""
    async with swarm_of(5) as swarm:
        await trio.sleep(1.0 + 0.03 * phase)
        hosts = [peer.host for peer in swarm.peers]
        swarm.network.partition(hosts[:cut], hosts[cut:])
        await swarm.progress(3, within=120)
        swarm.check()
        swarm.network.heal()
        last = max(peer.revision for peer in swarm.peers)
        await swarm.progress(last + 4, within=200)
        assert len({peer.chain[last + 4] for peer in swarm.peers}) == 1
        assert len(swarm.peers[0].results[last + 4].contributors) == 5
        swarm.check()

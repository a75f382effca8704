"""No peer of a pipeline waits for ever for what cannot come, nor is led astray by what cannot be."""

import pytest
import trio

from optim.swarm.ledger import audit
from peer.pipeline.audit import records
from protocol.errors import PeerUnreachable, RequestRefused
from tests.sim.pipelines import MICROBATCHES, pipeline


def check(swarm, stages, steps):
    events = [event for peer in swarm.peers for event in peer.events]
    samples = dict.fromkeys(range(MICROBATCHES), 2)
    assert audit(records(events), stages=stages, steps=range(steps), samples=samples) == []


def cut_off(swarm, peer):
    swarm.network.partition([peer.host], [other.host for other in swarm.peers if other is not peer])


def made(peer):
    return max((event["step"] + 1 for event in peer.of("stage_step")), default=0)


def over(steps, *peers):
    return all(peer.saved is not None and peer.saved[1].step == steps for peer in peers)


async def test_who_is_back_after_the_others_have_finished_has_the_end_of_it(autojump_clock, swarm_of):
    async with swarm_of(pipeline(2, 6), [0, 1, 0]) as swarm:
        one, other, late = swarm.peers
        await swarm.until(lambda: made(late) >= 1)
        cut_off(swarm, late)
        await swarm.until(lambda: over(6, one, other))
        swarm.network.heal()
        await swarm.until(lambda: over(6, late))


async def test_who_is_left_alone_gives_up(autojump_clock, swarm_of):
    async with swarm_of(pipeline(2, 6), [0, 1, 0]) as swarm:
        one, other, late = swarm.peers
        await swarm.until(lambda: made(late) >= 1)
        cut_off(swarm, late)
        await swarm.until(lambda: over(6, one, other) and late.problem is not None)
        assert isinstance(late.problem, PeerUnreachable)


async def test_a_founder_waits_for_others(autojump_clock, swarm_of):
    async with swarm_of(pipeline(2, 6), []) as swarm:
        founder = swarm.add(founds=True)
        swarm.founders = 1
        swarm.start(founder)
        await trio.sleep(900)
        assert founder.problem is None
        swarm.start(swarm.add())
        await swarm.until(lambda: over(6, *swarm.peers))


@pytest.mark.parametrize("refused", [True, False])
async def test_a_newcomer_that_nobody_takes_in_gives_up(autojump_clock, swarm_of, refused):
    reason = RequestRefused("this run is full", code="full") if refused else None
    async with swarm_of(pipeline(2, 6), []) as swarm:
        newcomer = swarm.add(refusal=lambda: reason)
        swarm.founders = 1
        swarm.start(newcomer)
        await swarm.until(lambda: newcomer.problem is not None)
        assert newcomer.problem is reason if refused else isinstance(newcomer.problem, PeerUnreachable)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("servers", [1, 2])
async def test_what_stages_share_is_lost_after_others_have_made_the_step(autojump_clock, swarm_of, seed, servers):
    """The servers of stage 2 have not heard stage 0's part of a tied gradient when that dies."""
    async with swarm_of(pipeline(3, 8), [1, 0, 1] + [2] * servers, seed=seed) as swarm:
        middle, first, spare, *last = swarm.peers
        await swarm.until(lambda: made(middle) >= 2 and any(0 in peer.node.crew.own.copies for peer in last))
        for peer in last:
            swarm.network.set_link(first.host, peer.host, latency=1.0)
        await swarm.until(lambda: min(made(middle), made(spare)) > max(made(peer) for peer in [first, *last]))
        swarm.kill(first)
        await swarm.until(lambda: over(8, *swarm.alive))
        check(swarm, 3, 8)
        assert any(peer.of("stage_lost") for peer in last)


@pytest.mark.parametrize("was_honest", [False, True])
async def test_one_that_says_it_is_far_ahead_is_not_followed(autojump_clock, swarm_of, was_honest):
    async with swarm_of(pipeline(2, 0), [0, 0, 1], seed=1) as swarm:
        honest = list(swarm.peers)
        liar = swarm.add(serves=False, trains=False)
        swarm.start(liar)
        await swarm.until(lambda: len(liar.node.crew.standings) == 4)
        if was_honest:
            liar.node.crew.announce(stage=1, ready=True, step=liar.node.crew.furthest)
            await trio.sleep(1)
        liar.node.crew.announce(stage=1, ready=True, step=10**9, settled=True)
        before = max(made(peer) for peer in honest)
        await swarm.until(lambda: min(made(peer) for peer in honest) >= before + 5)
        check(swarm, 2, before + 5)
        assert all(peer.node.crew.furthest < 10**9 for peer in honest)
        assert not any(peer.of("stage_lost") for peer in honest)

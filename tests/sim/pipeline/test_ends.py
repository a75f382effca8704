"""No peer of a pipeline waits for ever for what cannot come, nor is led astray by what cannot be."""

import math

import pytest
import trio

from optim.swarm.ledger import audit
from peer.pipeline.audit import records
from peer.pipeline.claims import is_credible
from peer.pipeline.messages import Ask, FetchState, Reply, Shape, Standing, stage_run
from peer.pipeline.transfer import fetch_tensors
from protocol.errors import PeerUnreachable, ProtocolError, RequestRefused, ShoalError
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


async def test_who_is_back_when_nobody_has_the_end_of_its_stage_any_more_ends_as_well(autojump_clock, swarm_of):
    async with swarm_of(pipeline(2, 6), [0, 1, 1]) as swarm:
        one, other, late = swarm.peers
        await swarm.until(lambda: made(late) >= 1)
        cut_off(swarm, late)
        await swarm.until(lambda: over(6, one, other))
        swarm.kill(other)
        swarm.network.heal()
        await swarm.until(lambda: not late.running)
        assert late.problem is None


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
        # Whether the step is lost depends on what was on its way. In either case all go on together.
        await swarm.until(lambda: over(8, *swarm.alive))
        check(swarm, 3, 8)


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


async def test_the_last_server_of_a_stage_leaves_when_another_one_has_come(autojump_clock, swarm_of):
    async with swarm_of(pipeline(2, 0), [0, 0, 0, 1]) as swarm:
        *others, last = swarm.peers
        await swarm.until(lambda: made(last) >= 2)
        last.node.asked.set()
        await swarm.until(lambda: not last.running)
        assert any(peer.node.crew.own.stage == 1 and peer.node.crew.own.ready for peer in others)
        before = max(made(peer) for peer in others)
        await swarm.until(lambda: min(made(peer) for peer in others) >= before + 2)
        check(swarm, 2, before + 2)
        assert not any(peer.of("stage_lost") for peer in others)


@pytest.mark.parametrize("assignment", [[0, 1], [0, 1, 1], [0]])
async def test_a_server_that_is_not_needed_or_cannot_be_replaced_leaves_at_once(autojump_clock, swarm_of, assignment):
    async with swarm_of(pipeline(2, 0), assignment) as swarm:
        leaver = swarm.peers[-1]
        await swarm.until(lambda: leaver.node.crew.own.ready)
        leaver.node.asked.set()
        with trio.fail_after(3):
            await swarm.until(lambda: not leaver.running)


async def test_newcomers_that_come_together_are_sent_the_same_bytes(autojump_clock, swarm_of):
    async with swarm_of(pipeline(1, 0), [0]) as swarm:
        (first,), dumps = swarm.peers, []
        await swarm.until(lambda: made(first) >= 1)
        first.on_compute = lambda function: dumps.append(getattr(getattr(function, "func", None), "__name__", ""))
        run = stage_run(swarm.pipeline.run_id, 0)
        newcomers = [swarm.add(serves=False, trains=False) for _ in range(3)]
        for peer in newcomers:
            swarm.start(peer)
        await swarm.until(lambda: all(len(peer.node.crew.standings) > 1 for peer in newcomers))
        dumps.clear()
        found = []

        async def fetch(peer):
            found.append(await fetch_tensors(peer.endpoint, first.id, FetchState(run), most=1 << 20))

        async with trio.open_nursery() as nursery:
            for peer in newcomers:
                nursery.start_soon(fetch, peer)
        assert dumps.count("dump") < 3
        with pytest.raises(ProtocolError, match="at most"):
            await fetch_tensors(newcomers[0].endpoint, first.id, FetchState(run), most=1000)


@pytest.mark.parametrize("shape", [(3, 12, 16), (2, 13, 16), (2, 12, 17), (1, 2 * 12 * 16)])
async def test_tensors_larger_than_a_microbatch_are_refused_before_they_come(autojump_clock, swarm_of, shape):
    async with swarm_of(pipeline(2, 0), [0, 1]) as swarm:
        first, other = swarm.peers
        await swarm.until(lambda: made(first) >= 1)
        ask = Ask(
            run=stage_run(swarm.pipeline.run_id, 1),
            kind="forward",
            step=first.node.crew.furthest,
            number=0,
            count=False,
            patience=10.0,
            inputs=Shape("fp32", shape, 4 * math.prod(shape)),
            targets=None,
            gradient=None,
        )
        with pytest.raises(ShoalError):
            async with first.endpoint.open(other.id, ask, bulk=True) as stream:
                with trio.fail_after(5):  # it does not wait for the bytes
                    await stream.receive(Reply)


def test_what_others_say_of_steps_is_believed_if_it_can_be():
    def serving(*steps):
        return [Standing(stage=0, ready=True, step=step) for step in steps]

    def fetching(*steps):
        return [Standing(stage=0, step=step) for step in steps]

    assert is_credible(8, serving(5, 7))
    assert not is_credible(9, serving(5, 7))
    assert is_credible(500, serving(5))  # we may have been away
    assert is_credible(1000, fetching(990, 980))
    assert not is_credible(10**9, fetching(990, 980))
    assert is_credible(10**6, fetching(0, 0, 10))


async def test_a_stage_without_servers_is_told_until_it_has_one(autojump_clock, swarm_of):
    async with swarm_of(pipeline(2, 0), [0, 1]) as swarm:
        first, second = swarm.peers
        await swarm.until(lambda: first.node.crew.own.step >= 2)
        assert not first.of("stage_empty")
        swarm.kill(second)
        await swarm.until(lambda: first.of("stage_empty"))
        assert [event["stage"] for event in first.of("stage_empty")] == [1]
        assert not first.of("stage_filled")
        swarm.start(swarm.add(1))
        await swarm.until(lambda: first.of("stage_filled"))
        assert [event["stage"] for event in first.of("stage_filled")] == [1]


async def test_at_the_end_of_a_run_nobody_waits_for_servers(autojump_clock, swarm_of):
    async with swarm_of(pipeline(2, 3), [0, 1, 1]) as swarm:
        await swarm.until(lambda: not any(peer.running for peer in swarm.peers))
        assert not any(peer.of("stage_empty") for peer in swarm.peers)

"""Pipelines of real nodes: exact without faults, and every sample once with them."""

import attrs
import pytest
import torch
import trio

from optim.swarm.balance import Policy
from optim.swarm.ledger import audit
from optim.swarm.stages import cut
from optim.swarm.state import StageState, whole_state
from peer.pipeline.audit import records
from peer.pipeline.messages import Hello, Welcome
from protocol.errors import RequestRefused
from tests.optim.swarm.toys import transformer_chain
from tests.sim.pipelines import MICROBATCHES, pipeline, single_process


def check(swarm, stages, steps):
    samples = dict.fromkeys(range(MICROBATCHES), 2)
    assert (
        audit(
            records(event for peer in swarm.peers for event in peer.events),
            stages=stages,
            steps=range(steps),
            samples=samples,
        )
        == []
    )


async def finished(swarm, steps):
    """The states of the stages when all peers have made the last step; they have to be the same at all servers."""

    def servers():
        return [peer for peer in swarm.alive if peer.node.serves]

    await swarm.until(lambda: all(peer.saved is not None and peer.saved[1].step == steps for peer in servers()))
    states = {}
    for peer in servers():
        number, state = peer.saved
        other = states.setdefault(number, state)
        assert all(torch.equal(other.model[name], state.model[name]) for name in state.model)
    return whole_state(states.values())


@pytest.mark.parametrize("assignment", [[0, 1], [0, 0, 1, 1, 2, 2]])
async def test_without_faults_it_is_what_one_process_makes(autojump_clock, swarm_of, assignment):
    stages, steps = max(assignment) + 1, 3
    async with swarm_of(pipeline(stages, steps), assignment) as swarm:
        state = await finished(swarm, steps)
    check(swarm, stages, steps)
    whole = single_process(steps)
    assert state.model.keys() == whole.model.keys()
    for name, values in whole.model.items():
        torch.testing.assert_close(state.model[name], values, rtol=1e-4, atol=1e-4)  # sums in another order, and Adam


async def same(swarm, stages, steps):
    """All went well: counted once, and close to what one process makes."""
    state = await finished(swarm, steps)
    check(swarm, stages, steps)
    whole = single_process(steps)
    for name, values in whole.model.items():
        torch.testing.assert_close(state.model[name], values, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("after", [1, 2, 7])
async def test_a_server_dies_in_a_computation(autojump_clock, swarm_of, seed, after):
    async with swarm_of(pipeline(3, 4), [0, 0, 1, 1, 2, 2, 0], seed=seed) as swarm:
        victim = swarm.peers[1 + seed % 5]
        left = [after]

        def die(function):
            if getattr(function, "__name__", "") in ("compute", "contribution", "advance"):
                left[0] -= 1
                if left[0] == 0:
                    swarm.kill(victim)

        victim.on_compute = die
        await same(swarm, 3, 4)
        assert not victim.alive


@pytest.mark.parametrize("seed", range(4))
async def test_who_dies_with_what_its_stage_has_settled_is_not_the_only_one_that_has_it(autojump_clock, swarm_of, seed):
    async with swarm_of(pipeline(2, 4), [0, 1, 1], seed=seed) as swarm:
        first, *stage = swarm.peers
        swarm.network.set_link(*(peer.host for peer in stage), latency=0.5)  # one has a result well before the other

        def die(function):
            if getattr(function, "__name__", "") == "advance" and len(first.of("stage_step")) == 1:
                having = [peer for peer in stage if any(each["step"] == 1 for each in peer.of("stage_settled"))]
                swarm.kill(having[0])

        first.on_compute = die
        await same(swarm, 2, 4)
        assert len(swarm.alive) == 2
        assert not any(peer.of("stage_lost") for peer in swarm.alive)


@pytest.mark.parametrize("seed", range(3))
async def test_trainers_without_stages_and_servers_that_do_not_train(autojump_clock, swarm_of, seed):
    async with swarm_of(pipeline(2, 4), [0, 1, 1], seed=seed) as swarm:
        for peer in swarm.peers[1:]:
            peer.node = attrs.evolve(peer.node, trains=False)
        helper = swarm.add(serves=False)
        swarm.start(helper)
        await swarm.until(lambda: helper.node.crew.own.trains_from is not None)
        await same(swarm, 2, 4)
        assert any(helper.of("inner"))


@pytest.mark.parametrize("seed", range(4))
async def test_a_trainer_dies_and_others_take_over(autojump_clock, swarm_of, seed):
    async with swarm_of(pipeline(2, 4), [0, 0, 1, 1], seed=seed) as swarm:
        await swarm.until(lambda: any(peer.of("stage_step") for peer in swarm.peers))
        swarm.kill(swarm.peers[2])
        await same(swarm, 2, 4)


@pytest.mark.parametrize("seed", range(4))
async def test_newcomers_go_where_they_are_needed_and_have_the_state(autojump_clock, swarm_of, seed):
    async with swarm_of(pipeline(2, 8), [0, 0, 1], seed=seed) as swarm:
        await swarm.until(lambda: any(peer.of("stage_step") for peer in swarm.peers))
        newcomer = swarm.add()
        swarm.start(newcomer)
        await same(swarm, 2, 8)
        assert newcomer.saved is not None
        assert newcomer.saved[0] == 1


@pytest.mark.parametrize("seed", range(4))
async def test_a_stage_that_loses_all_its_servers_is_filled_again(autojump_clock, swarm_of, seed):
    async with swarm_of(pipeline(2, 8), [0, 0, 0, 1], seed=seed) as swarm:
        await swarm.until(lambda: any(1 in peer.node.crew.own.copies for peer in swarm.peers))
        swarm.kill(swarm.peers[3])
        await finished(swarm, 8)
        check(swarm, 2, 8)
        assert sum(bool(peer.of("moved")) for peer in swarm.peers) == 1


@pytest.mark.parametrize("seed", range(3))
async def test_peers_move_to_the_stage_that_is_slower(autojump_clock, swarm_of, seed):
    balanced = pipeline(2, 10, balance=Policy(gain=0.2, rest=2))
    async with swarm_of(balanced, [0, 0, 0, 1], seed=seed) as swarm:
        await same(swarm, 2, 10)
        assert 1 <= sum(len(peer.of("moved")) for peer in swarm.peers) <= 2


@pytest.mark.parametrize("seed", range(3))
async def test_a_connection_that_breaks_for_a_moment_loses_no_standing(autojump_clock, swarm_of, seed):
    """Of the only servers of two stages, again and again: each waits for what the other says."""
    steps = 6
    async with swarm_of(pipeline(2, steps), [0, 1], seed=seed) as swarm:
        one, other = swarm.peers
        while not all(peer.saved is not None and peer.saved[1].step == steps for peer in swarm.peers):
            await trio.sleep(swarm.random.uniform(0.2, 1.0))
            one.endpoint.disconnect(other.id, "a test")
            if trio.current_time() > 300:
                break
        await same(swarm, 2, steps)


@pytest.mark.parametrize("seed", range(3))
async def test_a_run_begins_with_what_one_peer_has_on_its_disk(autojump_clock, swarm_of, seed):
    """The others have nothing; one of them serves the same stage, two serve others."""
    begun, steps = single_process(2), 6
    stages = cut(transformer_chain(), 3)

    def saved(stage):
        names = [name for name, _ in stages[stage].model.named_parameters()]
        inner = {kind: {name: named[name] for name in names} for kind, named in begun.inner.items()}
        return StageState(begun.step, {name: begun.model[name] for name in names}, inner)

    async with swarm_of(pipeline(3, steps, save_every=2), [], seed=seed) as swarm:
        swarm.founders = 4
        options = {"saved": saved, "begun": begun.step, "offered": range(3)}
        for number in range(4):
            swarm.start(swarm.add(0 if number == 0 else None, **(options if number == 0 else {})))
        state = await finished(swarm, steps)
        assert set(swarm.peers[0].node.crew.own.copies) <= {1}  # what it began with is of no use any more
        audited = records(event for peer in swarm.peers for event in peer.events)
        samples = dict.fromkeys(range(MICROBATCHES), 2)
        assert audit(audited, stages=3, steps=range(begun.step, steps), samples=samples) == []
    whole = single_process(steps)
    for name, values in whole.model.items():
        torch.testing.assert_close(state.model[name], values, rtol=1e-3, atol=1e-4)


async def test_a_stage_or_a_step_that_does_not_exist_harms_nobody(autojump_clock, swarm_of):
    async with swarm_of(pipeline(2, 4), [0, 0, 1], seed=1) as swarm:
        await swarm.until(lambda: any(peer.of("stage_step") for peer in swarm.peers))
        liar = swarm.peers[1]
        for claim in ({"stage": 900}, {"step": 10**9}):
            hello = Hello(swarm.pipeline.run_id, attrs.evolve(liar.node.crew.own, number=10**6, **claim))
            with pytest.raises(RequestRefused, match="no such"):
                await liar.endpoint.request(swarm.peers[0].id, hello, Welcome)
        await same(swarm, 2, 4)


@pytest.mark.parametrize("seed", range(3))
async def test_nobody_begins_before_the_founder_who_waits_for_more_with_a_checkpoint(autojump_clock, swarm_of, seed):
    """All stages could be served without it, from the first values."""
    begun, steps = single_process(2), 5
    stages = cut(transformer_chain(), 2)

    def saved(stage):
        names = [name for name, _ in stages[stage].model.named_parameters()]
        inner = {kind: {name: named[name] for name in names} for kind, named in begun.inner.items()}
        return StageState(begun.step, {name: begun.model[name] for name in names}, inner)

    async with swarm_of(pipeline(2, steps), [], seed=seed) as swarm:
        swarm.founders = 4
        founder = swarm.add(saved=saved, begun=begun.step, offered=range(2))
        founder.begins = trio.Event()
        for peer in (founder, *(swarm.add() for _ in range(3))):
            swarm.start(peer)
        await trio.sleep(120)
        assert not any(peer.of("stage_synced") for peer in swarm.peers)
        assert [len(peer.of("waiting")) for peer in swarm.peers] == [0, 1, 1, 1]
        founder.begins.set()
        await finished(swarm, steps)
        assert {event["step"] for peer in swarm.peers for event in peer.of("stage_synced")} == {begun.step}

"""Pipelines whose steps are rounds of local steps."""

from functools import partial

import pytest
import torch

from optim.outers import Nesterov
from optim.swarm.ledger import audit
from optim.swarm.local import LocalSteps
from optim.swarm.state import whole_state
from peer.pipeline.audit import records
from peer.pipeline.messages import Sizes
from tests.optim.swarm.toys import perceptron_batch, perceptron_chain, sample, train_alone
from tests.sim.pipelines import MICROBATCHES, pipeline, single_process

COUNT = 3


def rounds_of(stages, rounds, *, lr=1.0, momentum=0.0, **options):
    local = LocalSteps(count=COUNT, outer=Nesterov(lr=lr, momentum=momentum), rate=lambda done: 0.01)
    return pipeline(stages, rounds, local_steps=local, **options)


async def finished(swarm, stages, rounds):
    """The model when all have made the last round: the same at all servers of each stage, every sample counted once."""

    def servers():
        return [peer for peer in swarm.alive if peer.node.serves]

    await swarm.until(lambda: all(peer.saved is not None and peer.saved[1].step == rounds for peer in servers()))
    states = {}
    for peer in servers():
        number, state = peer.saved
        other = states.setdefault(number, state)
        assert all(torch.equal(other.model[name], state.model[name]) for name in state.model)
        assert all(torch.equal(other.outer["momentum"][name], each) for name, each in state.outer["momentum"].items())
    events = (event for peer in swarm.peers for event in peer.events)
    samples = dict.fromkeys(range(COUNT * MICROBATCHES), 2)
    assert audit(records(events), stages=stages, steps=range(rounds), samples=samples) == []
    return whole_state(states.values())


async def test_one_server_per_stage_makes_what_single_steps_make(autojump_clock, swarm_of):
    """Of a model in which nothing is tied: the copies of what is take their local steps apart."""
    options = {
        "chain": perceptron_chain,
        "sample": lambda step, number: sample(perceptron_batch(step, number, 2)),
        "sizes": Sizes(samples=2, tokens=4, width=8, exact=False),
    }
    async with swarm_of(rounds_of(2, 2, **options), [0, 1]) as swarm:
        state = await finished(swarm, 2, 2)
    batch = partial(perceptron_batch, samples=2)
    _, whole = train_alone(perceptron_chain(), batch, steps=2 * COUNT, microbatches=MICROBATCHES)
    torch.testing.assert_close(dict(state.model), dict(whole), rtol=1e-4, atol=1e-5)  # batches add up in another order


async def test_one_stage_of_one_server_makes_what_single_steps_make(autojump_clock, swarm_of):
    async with swarm_of(rounds_of(1, 2), [0]) as swarm:
        state = await finished(swarm, 1, 2)
    whole = single_process(2 * COUNT)
    for name, values in whole.model.items():
        torch.testing.assert_close(state.model[name], values, rtol=1e-4, atol=1e-4)  # batches add up in another order


def mean_loss(swarm, step):
    told = [event for peer in swarm.peers for event in peer.of("inner") if event["step"] == step]
    return sum(event["loss"] * event["samples"] for event in told) / sum(event["samples"] for event in told)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("after", [2, 9])
async def test_a_server_dies_in_a_round_and_costs_what_it_had_done_in_it(autojump_clock, swarm_of, seed, after):
    async with swarm_of(rounds_of(3, 4, lr=0.7, momentum=0.5), [0, 0, 1, 1, 2, 2, 0], seed=seed) as swarm:
        victim = swarm.peers[1 + seed % 5]
        left = [after]

        def die(function):
            if getattr(function, "__name__", "") == "compute":
                left[0] -= 1
                if left[0] == 0:
                    swarm.kill(victim)

        victim.on_compute = die
        await finished(swarm, 3, 4)
        assert not victim.alive
        assert mean_loss(swarm, 3) < mean_loss(swarm, 0)


@pytest.mark.parametrize("seed", range(2))
async def test_newcomers_take_part_in_the_round_that_is_under_way(autojump_clock, swarm_of, seed):
    async with swarm_of(rounds_of(2, 6, lr=0.7, momentum=0.5), [0, 0, 1], seed=seed) as swarm:
        await swarm.until(lambda: any(peer.of("stage_step") for peer in swarm.peers))
        newcomer = swarm.add()
        swarm.start(newcomer)
        await finished(swarm, 2, 6)
        assert newcomer.saved is not None
        assert newcomer.saved[0] == 1


@pytest.mark.parametrize("seed", range(2))
async def test_a_stage_that_loses_all_its_servers_goes_on_from_its_copy(autojump_clock, swarm_of, seed):
    async with swarm_of(rounds_of(2, 8, lr=0.7, momentum=0.5), [0, 0, 0, 1], seed=seed) as swarm:
        await swarm.until(lambda: any(1 in peer.node.crew.own.copies for peer in swarm.peers))
        swarm.kill(swarm.peers[3])
        await finished(swarm, 2, 8)
        assert sum(bool(peer.of("moved")) for peer in swarm.peers) == 1


@pytest.mark.parametrize("seed", range(2))
async def test_a_trainer_dies_and_others_lead_what_it_has_left(autojump_clock, swarm_of, seed):
    async with swarm_of(rounds_of(2, 4), [0, 0, 1, 1], seed=seed) as swarm:
        await swarm.until(lambda: any(peer.of("stage_step") for peer in swarm.peers))
        swarm.kill(swarm.peers[2])
        await finished(swarm, 2, 4)

"""Pipelines measure the loss on held-out text, and all peers know it."""

import math

import attrs
import pytest
import torch

from optim.swarm.stages import cut
from peer.pipeline.messages import Measured
from tests.optim.swarm.toys import sample, text_batch, transformer_chain
from tests.sim.pipelines import pipeline, single_process

HELD_OUT = [text_batch(999, number) for number in range(5)]


def validated(stages, steps, **options):
    return pipeline(stages, steps, held_out=lambda: [sample(batch) for batch in HELD_OUT], validate_every=2, **options)


def measured(peer):
    return {event["round"]: event["loss"] for event in peer.of("validation")}


async def done(swarm, steps):
    """All peers know the loss after the last step."""
    await swarm.until(lambda: all(steps in measured(peer) for peer in swarm.alive))
    told = [measured(peer) for peer in swarm.alive]
    return {round_: loss for each in told for round_, loss in each.items()}


def alone(steps):
    """What one process has on the same text after so many steps."""
    (stage,) = cut(transformer_chain(), 1)
    stage.load(single_process(steps).model)
    with torch.no_grad():
        return torch.cat([stage(tokens, targets) for tokens, targets in HELD_OUT]).mean().item()


async def test_every_peer_knows_the_loss_before_the_first_and_after_the_last_step(autojump_clock, swarm_of):
    steps = 5
    async with swarm_of(validated(3, steps), [0, 0, 1, 1, 2]) as swarm:
        losses = await done(swarm, steps)
        assert all(measured(peer) == losses for peer in swarm.peers)
    assert min(losses) == 0
    assert losses[0] == pytest.approx(alone(0), rel=0.05)  # a step may be made meanwhile
    assert losses[steps] == pytest.approx(alone(steps), rel=1e-3)
    assert losses[steps] < losses[0]


async def test_a_peer_without_a_stage_measures_as_well(autojump_clock, swarm_of):
    async with swarm_of(validated(2, 3), [0, 1]) as swarm:
        for peer in swarm.peers:
            peer.node = attrs.evolve(peer.node, trains=False)
        helper = swarm.add(serves=False)
        swarm.start(helper)
        losses = await done(swarm, 3)
    assert losses[3] == pytest.approx(alone(3), rel=1e-3)


@pytest.mark.parametrize("seed", range(3))
async def test_if_the_peer_dies_that_measures_another_one_does(autojump_clock, swarm_of, seed):
    async with swarm_of(validated(2, 6), [0, 0, 1, 1], seed=seed) as swarm:
        first = min(swarm.peers, key=lambda peer: peer.id)
        await swarm.until(lambda: first.node.crew.own.measured is not None)
        swarm.kill(first)
        losses = await done(swarm, 6)
        assert losses[6] == pytest.approx(alone(6), rel=1e-2)


async def test_a_measurement_of_a_step_that_nobody_is_at_is_passed_over(autojump_clock, swarm_of):
    async with swarm_of(validated(2, 4), [0, 1, 1], seed=1) as swarm:
        liar = max(swarm.peers, key=lambda peer: peer.id)
        await swarm.until(lambda: liar.of("stage_synced"))
        liar.node.crew.announce(measured=Measured(10**6, 0.0))
        losses = await done(swarm, 4)
    assert 10**6 not in losses
    assert all(math.isfinite(loss) and loss > 0 for loss in losses.values())

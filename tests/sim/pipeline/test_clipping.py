"""Pipelines clip gradients by their norm over all stages, whoever dies."""

import attrs
import pytest
import torch

from tests.optim.swarm.toys import sgd
from tests.sim.pipelines import pipeline, single_process

CLIP = 0.05


def clipped(steps):
    return pipeline(3, steps, clip=CLIP, optimizer=sgd, rate=lambda step: 0.5)


async def finished(swarm, steps):
    """All servers have made the last step, those of a stage with the same result."""
    await swarm.until(lambda: all(peer.saved is not None and peer.saved[1].step == steps for peer in swarm.alive))
    model = {}
    for peer in swarm.alive:
        for name, values in peer.saved[1].model.items():
            assert torch.equal(model.setdefault(name, values), values)
    return model


def assert_clipped(model, steps):
    expected = single_process(steps, optimizer=sgd, clip=CLIP).model
    torch.testing.assert_close(model, dict(expected), rtol=1e-4, atol=1e-5)
    plain = single_process(steps, optimizer=sgd).model
    assert any(not torch.allclose(plain[name], expected[name], rtol=1e-2, atol=1e-3) for name in plain)


@pytest.mark.parametrize("assignment", [[0, 1, 2], [0, 0, 1, 1, 2, 2]])
async def test_all_stages_clip_by_the_same_norm(autojump_clock, swarm_of, assignment):
    async with swarm_of(clipped(4), assignment) as swarm:
        model = await finished(swarm, 4)
    assert_clipped(model, 4)


@pytest.mark.parametrize("seed", range(6))
async def test_a_server_dies_as_it_steps(autojump_clock, swarm_of, seed):
    async with swarm_of(clipped(4), [0, 0, 1, 1, 2, 2], seed=seed) as swarm:
        victim = swarm.peers[seed]

        def die(function):
            if getattr(function, "__name__", "") == ("squares", "advance")[seed % 2] and victim.node.crew.own.step == 1:
                swarm.kill(victim)

        victim.on_compute = die
        model = await finished(swarm, 4)
        assert not victim.alive
    assert_clipped(model, 4)


@pytest.mark.parametrize("seed", range(2))
async def test_who_does_not_hear_of_a_norm_does_not_wait_for_ever(autojump_clock, swarm_of, seed):
    """As when a stage has lost all who had made the step, and others there go on after it."""
    lost, steps = 2, 4
    async with swarm_of(clipped(steps), [0, 1, 1, 2], seed=seed) as swarm:
        for peer in (swarm.peers[0], swarm.peers[3]):
            hear = peer.node.crew._hear

            def deaf(sender, standing, hear=hear):
                if standing.stage == 1 and standing.step == lost:
                    standing = attrs.evolve(standing, squares=None)
                if standing.last_squares is not None and standing.last_squares.step == lost:
                    standing = attrs.evolve(standing, last_squares=None)
                hear(sender, standing)

            peer.node.crew._hear = deaf
        await finished(swarm, steps)  # what the first and the last stage share is the same

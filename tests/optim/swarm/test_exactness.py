"""Training in stages gives what one process gives, and counts every sample once, whatever fails."""

from statistics import mean

import pytest
import torch

from optim.swarm.arrivals import Bounds
from optim.swarm.ledger import audit
from tests.optim.swarm.toys import (
    perceptron_batch,
    perceptron_chain,
    sgd,
    text_batch,
    train_alone,
    transformer_chain,
)
from tests.optim.swarm.world import Faults, World


def losses_of(world):
    return torch.tensor([loss for key in sorted(world.losses) for loss in world.losses[key]])


def faults_in(world, batch):
    samples = {number: len(batch(0, number)[0]) for number in range(world.microbatches)}
    return audit(world.records, stages=world.stages, steps=range(world.steps), samples=samples)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_one_path_gives_the_bits_of_one_process(stages):
    losses, state = train_alone(perceptron_chain(), perceptron_batch, steps=5, microbatches=4)
    world = World(perceptron_chain, perceptron_batch, servers=[1] * stages, steps=5, microbatches=4, in_flight=1).run()
    assert torch.equal(losses_of(world), losses)
    assert all(torch.equal(values, state[name]) for name, values in world.state().model.items())


def test_many_paths_give_the_same_up_to_rounding():
    losses, state = train_alone(perceptron_chain(), perceptron_batch, steps=5, microbatches=8)
    world = World(
        perceptron_chain,
        perceptron_batch,
        servers=[3, 2, 2],
        trainers=2,
        steps=5,
        in_flight=8,
        bounds=Bounds(batch=12),
    ).run()
    torch.testing.assert_close(losses_of(world), losses, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(dict(world.state().model), dict(state), rtol=1e-4, atol=1e-5)
    assert faults_in(world, perceptron_batch) == []


def test_a_tied_matrix_is_trained_as_in_one_process():
    losses, state = train_alone(transformer_chain(), text_batch, steps=4, microbatches=4)
    world = World(transformer_chain, text_batch, servers=[1, 2, 2], steps=4, microbatches=4).run()
    torch.testing.assert_close(losses_of(world), losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dict(world.state().model), dict(state), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_gradients_are_clipped_by_their_norm_over_the_whole_model(stages):
    clip, (chain, batch) = 0.05, (transformer_chain, text_batch)
    options = {"steps": 4, "microbatches": 4, "optimizer": sgd}
    _, plain = train_alone(chain(), batch, **options)
    _, state = train_alone(chain(), batch, **options, clip=clip)
    world = World(chain, batch, servers=[1] * stages, **options, clip=clip).run()
    torch.testing.assert_close(dict(world.state().model), dict(state), rtol=1e-4, atol=1e-5)
    assert any(not torch.allclose(plain[name], state[name], rtol=1e-2, atol=1e-3) for name in state)


def test_the_norm_does_not_depend_on_the_number_of_stages():
    options = {"steps": 4, "in_flight": 1, "optimizer": sgd, "clip": 0.05}
    one, three = (
        World(perceptron_chain, perceptron_batch, servers=[1] * stages, **options).run().state() for stages in (1, 3)
    )
    assert all(torch.equal(values, three.model[name]) for name, values in one.model.items())


FAULTS = Faults(
    death_in_forward=0.02,
    death_in_backward=0.04,
    death_in_settlement=0.2,
    lost_answer=0.03,
    stall=0.05,
    cut_off=0.5,
    trainer_death=0.2,
)


@pytest.mark.parametrize("seed", range(40))
def test_every_sample_counts_once_whatever_fails(seed):
    _, state = train_alone(perceptron_chain(), perceptron_batch, steps=3, microbatches=12)
    world = World(
        perceptron_chain,
        perceptron_batch,
        servers=[3, 4, 3],
        trainers=3,
        steps=3,
        microbatches=12,
        seed=seed,
        faults=FAULTS,
        bounds=Bounds(batch=8),
    ).run()
    assert faults_in(world, perceptron_batch) == []
    torch.testing.assert_close(dict(world.state().model), dict(state), rtol=1e-3, atol=1e-5)


def test_a_stage_with_one_server_left_is_refilled_and_nothing_is_lost():
    _, state = train_alone(perceptron_chain(), perceptron_batch, steps=3, microbatches=8)
    world = World(perceptron_chain, perceptron_batch, servers=[2, 3, 2], steps=3, faults=Faults(newcomer=0))

    def kill_and_refill():
        for server in world.members(1)[:2]:
            world.kill(server)
        assert len(world.members(1)) == 1
        world.join(1)
        world.join(1)

    world.after(3.0, kill_and_refill)
    world.run()
    assert len(world.members(1)) == 3
    assert sum(trainer.core.repeated for trainer in world.trainers) > 0
    assert faults_in(world, perceptron_batch) == []
    torch.testing.assert_close(dict(world.state().model), dict(state), rtol=1e-3, atol=1e-5)


def test_training_goes_on_with_another_number_of_stages():
    _, expected = train_alone(transformer_chain(), text_batch, steps=4, microbatches=4)
    first = World(transformer_chain, text_batch, servers=[1, 1, 1], steps=2, microbatches=4).run()
    second = World(transformer_chain, text_batch, servers=[2, 1], steps=4, microbatches=4)
    second.go_on(first.state())
    second.run()
    torch.testing.assert_close(dict(second.state().model), dict(expected), rtol=1e-3, atol=1e-4)


def test_compressed_activations_train_as_well():
    def final(world):
        last = [mean(world.losses[key]) for key in sorted(world.losses) if key[0] >= world.steps - 10]
        return mean(last)

    plain, half, quarter = (
        World(transformer_chain, text_batch, servers=[1, 1, 1], steps=60, microbatches=8, encoding=encoding).run()
        for encoding in ("fp32", "bf16", "int8")
    )
    first = mean(plain.losses[0, 0])
    assert final(plain) < 0.5 * first
    assert abs(final(half) / final(plain) - 1) < 0.01
    assert abs(final(quarter) / final(plain) - 1) < 0.01
    assert half.bytes <= 0.5 * plain.bytes
    assert quarter.bytes <= 0.27 * plain.bytes

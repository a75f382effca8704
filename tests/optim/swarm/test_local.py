"""Rounds of local steps in the stages: what the equations say, and every sample counted once, whatever fails."""

from statistics import mean

import attrs
import pytest
import torch

from optim.outers import Nesterov
from optim.swarm import cut
from optim.swarm.arrivals import Bounds
from optim.swarm.ledger import audit
from optim.swarm.local import LocalSteps, open_numbers
from optim.swarm.messages import Request
from protocol.errors import SettingsError
from tests.optim.swarm.toys import (
    adamw,
    perceptron_batch,
    perceptron_chain,
    sample,
    serve,
    text_batch,
    train_alone,
    transformer_chain,
)
from tests.optim.swarm.world import Faults, World

STEPS, SIZE = 3, 4  # local steps of a round, and microbatches of each


def plan(lr=1.0, momentum=0.0):
    return LocalSteps(count=STEPS, outer=Nesterov(lr=lr, momentum=momentum), rate=lambda done: 0.01)


def faults_in(world, batch):
    samples = {number: len(batch(0, number)[0]) for number in range(world.microbatches)}
    return audit(world.records, stages=world.stages, steps=range(world.steps), samples=samples)


def by_the_equations(make_chain, batch, world, *, lr, momentum):
    """The model's final parameters, from who has counted what in each round of a run without faults.

    Of each server its own parameters, gradients over what it has counted of each local step, and an optimizer; outside
    of them the parameters Θ and the momentum u of the whole model.
    """
    theta = {name: values.detach().clone() for name, values in make_chain().model.named_parameters()}
    first = {name: name for name in theta}
    speed = {name: torch.zeros_like(values) for name, values in theta.items()}
    servers = {}
    for record in sorted(world.records, key=lambda record: (record.step, record.stage)):
        for peer in record.ledgers:
            if (record.stage, peer) not in servers:
                stage = cut(make_chain(), world.stages)[record.stage]
                servers[record.stage, peer] = stage, adamw(stage)
                first |= stage.tied
    for round_ in range(world.steps):
        ledgers = {record.stage: record.ledgers for record in world.records if record.step == round_}
        for stage, _ in servers.values():
            with torch.no_grad():
                for name, parameter in stage.model.named_parameters():
                    parameter.copy_(theta[first[name]])
        for local in range(STEPS):
            counted = dict.fromkeys(servers, 0)
            for number in range(local * SIZE, (local + 1) * SIZE):
                tokens, targets = batch(round_ * STEPS + local, number - local * SIZE)
                x = tokens
                for index, each in sorted(ledgers.items()):
                    (peer,) = (peer for peer, ledger in each.items() if number in ledger)
                    counted[index, peer] += len(tokens)
                    x = servers[index, peer][0](x, targets if index == world.stages - 1 else None)
                x.sum().backward()
            for place, (stage, optimizer) in servers.items():
                if counted[place]:
                    for parameter in stage.parameters():
                        parameter.grad.div_(counted[place])
                    optimizer.step()
                    optimizer.zero_grad()
        change = {}
        for index, each in sorted(ledgers.items()):
            weights = {peer: sum(ledger.values()) for peer, ledger in each.items()}
            for name in dict(servers[index, next(iter(each))][0].model.named_parameters()):
                mean = 0
                for peer, weight in weights.items():
                    own = dict(servers[index, peer][0].model.named_parameters())[name].detach()
                    mean = mean + (theta[first[name]] - own) * (weight / sum(weights.values()))
                change[first[name]] = change[first[name]] + mean if first[name] in change else mean
        for name, each in change.items():
            speed[name] = momentum * speed[name] + each
            theta[name] = theta[name] - lr * (momentum * speed[name] + each)
    return theta


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_one_path_gives_what_a_pipeline_without_local_steps_gives(stages):
    """But for one rounding in each round: Θ − (Θ − θ) need not be θ."""
    world = World(
        perceptron_chain, perceptron_batch, servers=[1] * stages, microbatches=SIZE, in_flight=1, local_steps=plan()
    ).run()
    _, plain = train_alone(perceptron_chain(), perceptron_batch, steps=world.steps * STEPS, microbatches=SIZE)
    torch.testing.assert_close(dict(world.state().model), dict(plain), rtol=1e-6, atol=1e-7)
    exact = by_the_equations(perceptron_chain, perceptron_batch, world, lr=1.0, momentum=0.0)
    assert all(torch.equal(values, exact[name]) for name, values in world.state().model.items())


def test_with_momentum_one_path_gives_the_bits_of_the_equations():
    world = World(
        perceptron_chain,
        perceptron_batch,
        servers=[1, 1],
        steps=4,
        microbatches=SIZE,
        in_flight=1,
        local_steps=plan(0.7, 0.9),
    ).run()
    exact = by_the_equations(perceptron_chain, perceptron_batch, world, lr=0.7, momentum=0.9)
    assert all(torch.equal(values, exact[name]) for name, values in world.state().model.items())


@pytest.mark.parametrize("seed", range(3))
def test_many_paths_give_what_the_equations_give_up_to_rounding(seed):
    world = World(
        perceptron_chain,
        perceptron_batch,
        servers=[3, 2, 2],
        trainers=2,
        steps=4,
        microbatches=SIZE,
        in_flight=8,
        seed=seed,
        bounds=Bounds(batch=12),
        local_steps=plan(0.7, 0.9),
    ).run()
    assert faults_in(world, perceptron_batch) == []
    assert max(len(record.ledgers) for record in world.records) > 1
    expected = by_the_equations(perceptron_chain, perceptron_batch, world, lr=0.7, momentum=0.9)
    torch.testing.assert_close(dict(world.state().model), expected, rtol=1e-4, atol=1e-5)


def test_a_tied_matrix_moves_by_what_both_stages_have_done():
    world = World(
        transformer_chain, text_batch, servers=[1, 2, 2], steps=2, microbatches=SIZE, local_steps=plan(0.7, 0.9)
    ).run()
    expected = by_the_equations(transformer_chain, text_batch, world, lr=0.7, momentum=0.9)
    state = {name: values for name, values in world.state().model.items() if name in expected}
    assert state.keys() == expected.keys()
    torch.testing.assert_close(state, expected, rtol=1e-3, atol=1e-4)


FAULTS = Faults(
    death_in_forward=0.01,
    death_in_backward=0.02,
    death_in_settlement=0.2,
    lost_answer=0.03,
    stall=0.03,
    cut_off=0.5,
    trainer_death=0.2,
)


@pytest.mark.parametrize("seed", range(12))
def test_every_sample_counts_once_whatever_fails(seed):
    world = World(
        perceptron_chain,
        perceptron_batch,
        servers=[3, 4, 3],
        trainers=3,
        steps=4,
        microbatches=SIZE,
        seed=seed,
        faults=FAULTS,
        bounds=Bounds(batch=8),
        local_steps=plan(0.7, 0.5),
    ).run(limit=100_000.0)
    assert faults_in(world, perceptron_batch) == []
    state = world.state()  # the same at all servers of each stage
    first, last = ([mean(losses) for (step, _), losses in world.losses.items() if step == at] for at in (0, 3))
    assert sum(last) / len(last) < sum(first) / len(first)
    assert state.outer.keys() == {"momentum"}


def test_another_number_of_stages_goes_on_with_the_outer_momentum():
    options = {"steps": 2, "microbatches": SIZE, "local_steps": plan(0.7, 0.9)}
    first = World(transformer_chain, text_batch, servers=[1, 1, 1], **options).run()
    second = World(transformer_chain, text_batch, servers=[1, 1], **options)
    second.go_on(first.state())
    for name, values in first.state().outer["momentum"].items():
        assert torch.equal(second.state().outer["momentum"][name], values)
        assert values.abs().max() > 0


@pytest.fixture
def server():
    (stage,) = cut(perceptron_chain(), 1)
    return serve(stage, STEPS * SIZE, local_steps=plan())


def count(server, *numbers):
    for number in numbers:
        step, each = server.step, sample(perceptron_batch(server.step, number))
        what = {"step": step, "number": number, "inputs": each.tokens, "targets": each.targets, "count": True}
        server.submit(number, Request(kind="backward", **what), 0.0)
        batch = server.take(0.0)
        server.finish(batch, server.compute(batch))


def parameters(server):
    return [each.detach().clone() for each in server.stage.parameters()]


def same(some, others):
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def test_a_local_step_is_made_when_the_next_one_begins(server):
    before = parameters(server)
    count(server, 0, 1)
    assert same(parameters(server), before)
    count(server, SIZE)
    after = parameters(server)
    assert not same(after, before)
    count(server, 2, SIZE + 1)  # one of the local step before: it comes late, and counts with these
    assert same(parameters(server), after)
    assert server.ledger == {0: 4, 1: 4, SIZE: 4, 2: 4, SIZE + 1: 4}


def test_newcomers_get_what_the_round_began_with(server):
    before, start = server.snapshot(), parameters(server)
    count(server, 0, SIZE, 2 * SIZE)
    local = parameters(server)
    (stage,) = cut(perceptron_chain(seed=1), 1)
    newcomer = serve(stage, STEPS * SIZE, local_steps=plan())
    newcomer.restore(server.snapshot())
    assert same(parameters(newcomer), start)
    assert same(parameters(server), local)
    assert all(torch.equal(values, before.model[name]) for name, values in server.snapshot().model.items())


def test_what_does_not_count_is_undone(server):
    start = parameters(server)
    count(server, 0, SIZE)
    server.freeze()
    assert server.contribution().values.abs().max() > 0
    server.thaw(attempt=1, keep=False)
    server.freeze()
    assert server.contribution().weight == 0
    assert same(parameters(server), start)
    server.thaw(attempt=2, keep=True)
    count(server, 0)
    server.freeze()
    assert server.contribution().weight == 4


def test_after_what_does_not_count_local_steps_are_made_anew(server):
    start = parameters(server)
    count(server, 0, SIZE)
    server.freeze()
    server.thaw(attempt=1, keep=False)
    count(server, 0)
    assert same(parameters(server), start)
    count(server, SIZE)
    assert not same(parameters(server), start)


def test_a_state_with_another_models_momentum_is_refused(server):
    state = server.snapshot()
    with pytest.raises(SettingsError, match="momentum"):
        server.restore(attrs.evolve(state, outer={"momentum": {"1.weight": torch.zeros(2)}}))


def test_trainers_go_on_to_a_local_step_when_all_stages_have_counted_those_before():
    assert open_numbers([0, 0], 4, 12) == 4
    assert open_numbers([12, 3], 4, 12) == 4
    assert open_numbers([4, 5], 4, 12) == 8
    assert open_numbers([12, 12], 4, 12) == 12

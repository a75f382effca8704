"""What scripts do with a model and its optimizers between making them and stepping, and what interrupts a step."""

import copy
import time

import pytest
import torch
from torch import nn

from optim import DiLoCo, GradientOptimizer, LocalSwarm, LowCommunicationOptimizer, gradient_recipe, recipe
from optim.buffers import Buffers
from optim.mtdao import MultiTimescaleOptimizer, QuasiHyperbolicAdam
from optim.spsa import SpsaOptimizer
from protocol.errors import RequestTimeout, SettingsError
from tests.optim.toys import adamw, batches, make_model, train, values_of

KINDS = ["diloco", "gradient", "momenta", "perturbation"]


def made(kind, model, inner, swarm):
    match kind:
        case "diloco":
            return DiLoCo(model, inner, swarm, sync_every=1)
        case "gradient":
            return GradientOptimizer(model, inner, swarm, gradient_recipe("data-parallel"))
        case "momenta":
            return MultiTimescaleOptimizer(model, QuasiHyperbolicAdam(inner.param_groups), swarm, sync_every=1)
    return SpsaOptimizer(model, inner, swarm, seed=1)


def stepped(optimizer):
    return optimizer.step(lambda: 1.0) if isinstance(optimizer, SpsaOptimizer) else optimizer.step()


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.inside = make_model()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, inputs):
        return self.inside(self.norm(inputs))


def moved(model):
    model.norm.to(torch.float64)


def loaded(model):
    model.norm.load_state_dict(copy.deepcopy(model.norm.state_dict()), assign=True)


def converted(model):
    model.norm = nn.SyncBatchNorm.convert_sync_batchnorm(model.norm)
    model.norm.running_mean = model.norm.running_mean.clone()


@pytest.mark.parametrize("change", [moved, loaded, converted])
def test_buffers_that_others_have_taken_the_place_of_are_averaged(change):
    swarm = LocalSwarm(2)

    def replica(peer):
        index, model = swarm.peers.index(peer), Normed()
        buffers = Buffers(model)
        change(model)
        model.seen = model.seen + index  # as the model's own step may do
        with torch.no_grad():
            model.norm.running_mean.fill_(float(index))
            model.norm.num_batches_tracked.fill_(10 * index)
        assert buffers.average(lambda block, tag: peer.gather(block, tag=tag).blocks, 1.0) is None
        assert model.norm.num_batches_tracked.item() == 10
        return model.norm.running_mean.tolist(), model.seen.tolist()

    assert swarm.run(replica) == [([0.5] * 4, [0.5] * 2)] * 2


def test_shared_buffers_are_averaged_also_when_moving_the_model_has_parted_them():
    swarm = LocalSwarm(2)

    def replica(peer):
        index, model = swarm.peers.index(peer), nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
        model[1].running_mean = model[0].running_mean
        buffers = Buffers(model)
        if index:
            model.double()
        for norm in model:
            with torch.no_grad():
                norm.running_mean.fill_(float(index))
        buffers.average(lambda block, tag: peer.gather(block, tag=tag).blocks, 1.0)
        return [norm.running_mean.tolist() for norm in model]

    assert swarm.run(replica) == [[[0.5, 0.5], [0.5, 0.5]]] * 2


def resized(model):
    model.seen = torch.zeros(3)


def with_another(model):
    model.register_buffer("other", torch.zeros(1))


def without_one(model):
    del model.seen


def of_another_kind(model):
    model.seen = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize("change", [resized, with_another, without_one, of_another_kind])
def test_other_buffers_than_at_the_beginning_are_refused(alone, change):
    model = Normed()
    optimizer = DiLoCo(model, adamw(model), alone, sync_every=1)
    change(model)
    with pytest.raises(SettingsError, match=r"buffer (seen|other) is not what it was"):
        train(model, optimizer, batches(0, 1))
    assert optimizer.rounds == 0


def test_constants_may_come_and_go(alone):
    model = Normed()
    optimizer = DiLoCo(model, adamw(model), alone, sync_every=1)
    model.register_buffer("cache", torch.zeros(7), persistent=False)
    train(model, optimizer, batches(0, 1))
    assert optimizer.rounds == 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_loaded_into_the_inner_optimizer_is_what_schedulers_see(alone, kind):
    model = make_model()
    optimizer = made(kind, model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9), alone)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    inner = optimizer.inner
    stepped(optimizer)
    saved = inner.state_dict()
    inner.load_state_dict(saved)
    rates.step()
    assert inner.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == optimizer.learning_rate == 0.5
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    optimizer.load_state_dict(optimizer.state_dict())
    rates.step()
    assert inner.param_groups[0]["lr"] == 0.25


def test_groups_and_state_that_are_put_in_place_reach_the_inner_optimizer(alone):
    """As those do who wrap optimizers, such as Accelerate."""
    model = make_model()
    inner = adamw(model)
    groups, state = inner.param_groups, inner.state
    optimizer = DiLoCo(model, inner, alone)
    assert inner.param_groups is groups
    assert inner.state is state
    optimizer.param_groups = others = [{**group, "lr": 0.25} for group in groups]
    optimizer.state = type(state)(dict)
    assert inner.param_groups is others
    assert inner.state is optimizer.state is not state
    assert optimizer.learning_rate == 0.25


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_unfrozen_later_is_refused_as_it_would_not_be_exchanged(alone, kind):
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = made(kind, model, torch.optim.SGD(model.parameters(), lr=0.1), alone)
    before = values_of(model)
    stepped(optimizer)
    model[0].requires_grad_(True)
    with pytest.raises(SettingsError, match="not exchanged") as caught:
        stepped(optimizer)
    assert "freeze it afterwards" in caught.value.hint
    assert torch.equal(values_of(model), before)
    model[0].requires_grad_(False)
    stepped(optimizer)


def test_what_is_added_to_the_inner_optimizer_is_refused_unless_it_is_exchanged(alone):
    model = make_model()
    optimizer = DiLoCo(model, torch.optim.SGD(model[0].parameters(), lr=0.1), alone, sync_every=1)
    optimizer.inner.add_param_group({"params": model[2].parameters()})
    train(model, optimizer, batches(0, 1))
    optimizer.inner.add_param_group({"params": nn.Linear(2, 2).parameters()})
    with pytest.raises(SettingsError, match="not exchanged"):
        optimizer.step()


def test_what_is_frozen_later_stays_as_it_is(alone):
    model = make_model()
    optimizer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), alone, sync_every=1)
    model[0].requires_grad_(False)
    before = values_of(model)
    train(model, optimizer, batches(0, 2))
    assert optimizer.rounds == 2
    assert torch.equal(values_of(model[0]), before[: 4 * 8 + 8])
    assert not torch.equal(values_of(model), before)


def test_parameters_that_others_have_taken_the_place_of_are_refused(alone):
    model = make_model()
    optimizer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), alone, sync_every=1)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with pytest.raises(SettingsError, match=r"parameter 0\.weight is not the model's any more"):
        train(model, optimizer, batches(0, 1))
    assert optimizer.rounds == 0


@pytest.mark.parametrize("last", [1, 2])
def test_a_measurement_that_is_interrupted_leaves_the_parameters_where_they_were(alone, last):
    model = make_model()
    optimizer = SpsaOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), alone, epsilon=0.5, seed=1)
    before, calls = values_of(model), []

    def closure():
        calls.append(values_of(model))
        if len(calls) == last:
            raise KeyboardInterrupt
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert not torch.equal(calls[-1], before)
    assert torch.equal(values_of(model), before)


def test_a_sharpness_aware_step_that_is_interrupted_leaves_the_parameters_where_they_were(alone):
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = LowCommunicationOptimizer(model, inner, alone, recipe("fedsam", inner_steps=1))
    inputs, targets = next(batches(0, 1))
    before, calls = values_of(model), []

    def closure():
        calls.append(values_of(model))
        if len(calls) == 2:
            raise MemoryError
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss.item()

    with pytest.raises(MemoryError):
        optimizer.step(closure)
    assert not torch.equal(calls[-1], before)
    assert torch.equal(values_of(model), before)


def test_a_newcomer_has_joined_when_it_has_the_runs_outer_state(monkeypatch):
    swarm, pauses = LocalSwarm(2), []
    monkeypatch.setattr(time, "sleep", pauses.append)

    def replica(peer):
        index, model = swarm.peers.index(peer), make_model()
        optimizer = DiLoCo(model, adamw(model), peer, sync_every=1)
        if index:
            optimizer.join(timeout=60)
            return optimizer.outer.parameters, optimizer.rounds
        assert optimizer.welcome() == 2  # nobody has anything yet
        optimizer._link._swarm = LocalSwarm(1).peers[0]
        train(model, optimizer, batches(0, 1))
        optimizer._link._swarm = peer
        optimizer.welcome()
        return optimizer.outer.parameters, optimizer.rounds

    one, other = swarm.run(replica)
    assert torch.equal(one[0], other[0])
    assert one[1] == other[1] == 1
    assert len(pauses) == 1
    assert not torch.equal(one[0], values_of(make_model()))


def test_who_finds_nobody_to_join_is_told_and_does_not_spin(alone, monkeypatch):
    model, now = make_model(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    optimizer, gathers = DiLoCo(model, adamw(model), alone), []
    gather = alone.gather
    monkeypatch.setattr(alone, "gather", lambda *given, **options: gathers.append(given) or gather(*given, **options))
    with pytest.raises(RequestTimeout, match="nobody who has exchanged") as caught:
        optimizer.join(timeout=10)
    assert "do not join" in caught.value.hint
    assert 1 < len(gathers) < 100

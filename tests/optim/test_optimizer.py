"""The optimizer for plain PyTorch loops, against references written out plainly."""

import pytest
import torch
from torch import nn

from optim import DiLoCo, LocalSwarm, LowCommunicationOptimizer
from optim.methods import recipe
from protocol.errors import PeerGone, ProtocolError, SettingsError
from tests.optim.replicas import Flaky
from tests.optim.toys import adamw, batches, make_model, put, train, values_of


def plain_diloco(streams, rounds, inner_steps, *, lr=0.7, momentum=0.9):
    """DiLoCo in one process, as the paper writes it: the outer parameters after each round."""
    models = [make_model() for _ in streams]
    inners = [adamw(model) for model in models]
    outer = values_of(models[0])
    buffer = torch.zeros_like(outer)
    history = []
    for _ in range(rounds):
        deltas = []
        for model, inner, stream in zip(models, inners, streams, strict=True):
            put(model, outer)
            train(model, inner, (next(stream) for _ in range(inner_steps)))
            deltas.append(outer - values_of(model))
        mean = sum(deltas) / len(deltas)
        buffer = momentum * buffer + mean
        outer = outer - lr * (mean + momentum * buffer)
        history.append(outer)
    return history


def test_a_swarm_of_one_is_local_diloco_bit_for_bit(alone):
    model = make_model()
    optimizer = DiLoCo(model, adamw(model), alone, sync_every=5)
    expected = plain_diloco([batches(1, 20)], 4, 5)
    stream = batches(1, 20)
    for outer in expected:
        train(model, optimizer, (next(stream) for _ in range(5)))
        assert torch.equal(values_of(model), outer)
        assert torch.equal(optimizer.outer.parameters, outer)


def test_replicas_are_a_single_process():
    count, rounds, inner_steps = 4, 4, 5
    expected = plain_diloco([batches(seed, 100) for seed in range(count)], rounds, inner_steps)[-1]
    swarm = LocalSwarm(count)

    def replica(peer):
        model = make_model()
        optimizer = DiLoCo(model, adamw(model), peer, sync_every=inner_steps)
        train(model, optimizer, batches(swarm.peers.index(peer), rounds * inner_steps))
        return values_of(model)

    results = swarm.run(replica)
    for values in results:
        assert torch.equal(values, results[0])
    torch.testing.assert_close(results[0], expected, rtol=1e-4, atol=1e-5)


def test_with_rate_one_and_no_momentum_a_lone_peer_is_its_inner_optimizer(alone):
    model, reference = make_model(), make_model()
    optimizer = DiLoCo(model, adamw(model), alone, sync_every=2, outer_lr=1.0, outer_momentum=0.0)
    train(model, optimizer, batches(1, 2))
    train(reference, adamw(reference), batches(1, 2))
    torch.testing.assert_close(values_of(model), values_of(reference), rtol=0, atol=1e-6)


def test_it_is_an_optimizer_for_schedulers(alone):
    model = make_model()
    inner = adamw(model)
    optimizer = DiLoCo(model, inner, alone, sync_every=3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    for batch in batches(1, 4):
        train(model, optimizer, [batch])
        scheduler.step()
    assert inner.param_groups[0]["lr"] == pytest.approx(0.0001)
    assert optimizer.param_groups is inner.param_groups


def test_it_is_an_optimizer_for_gradient_scaling(alone):
    model = make_model()
    optimizer = DiLoCo(model, adamw(model), alone, sync_every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for poison in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        inputs, targets = next(batches(1, 1))
        scaler.scale(nn.functional.mse_loss(model(inputs), targets) * poison).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    # The step that overflowed was skipped, so the exchange came after the third.
    assert optimizer.rounds == 1
    assert alone.weights == [2.0]


def test_zero_grad_clears_the_model(alone):
    model = make_model()
    optimizer = DiLoCo(model, adamw(model), alone)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_closure_is_evaluated_and_its_loss_returned(alone):
    model = make_model()
    optimizer = DiLoCo(model, torch.optim.LBFGS(model.parameters(), max_iter=2), alone, sync_every=1)
    inputs, targets = next(batches(1, 1))

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    before = closure().item()
    assert optimizer.step(closure).item() == before
    assert closure().item() < before
    assert optimizer.rounds == 1


def test_a_saved_state_continues_bit_for_bit(alone, tmp_path):
    stream = list(batches(1, 14))
    model = make_model()
    optimizer = DiLoCo(model, adamw(model), alone, sync_every=4)
    train(model, optimizer, stream[:6])  # in the middle of a round
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    train(model, optimizer, stream[6:])

    other = make_model()
    resumed = DiLoCo(other, adamw(other), alone, sync_every=4)
    scheduler = torch.optim.lr_scheduler.ConstantLR(resumed, factor=1.0)
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(other, resumed, stream[6:])

    assert torch.equal(values_of(other), values_of(model))
    assert torch.equal(resumed.outer.buffers["momentum"], optimizer.outer.buffers["momentum"])
    assert (resumed.rounds, resumed.local_steps) == (3, 2)
    # After loading, groups are still those of the inner optimizer, for schedulers made before.
    scheduler.optimizer.param_groups[0]["lr"] = 0.5
    assert resumed.inner.param_groups[0]["lr"] == 0.5


def test_a_state_without_the_outer_part_or_of_another_model_is_refused(alone):
    model = make_model()
    optimizer = DiLoCo(model, adamw(model), alone)
    with pytest.raises(SettingsError, match="no outer state"):
        optimizer.load_state_dict(optimizer.inner.state_dict())
    smaller = nn.Linear(2, 2)
    with pytest.raises(SettingsError, match="saved are 6 values, but the model has 49"):
        optimizer.load_state_dict(DiLoCo(smaller, adamw(smaller), alone).state_dict())
    saved = optimizer.state_dict()
    saved["outer"]["buffers"] = {}
    with pytest.raises(SettingsError, match="another recipe"):
        optimizer.load_state_dict(saved)


def test_values_are_copied_into_the_tensors_that_the_model_has(alone):
    model = make_model()
    memory = [parameter.data_ptr() for parameter in model.parameters()]
    train(model, DiLoCo(model, adamw(model), alone, sync_every=1), batches(1, 2))
    assert [parameter.data_ptr() for parameter in model.parameters()] == memory


def test_frozen_parameters_stay_out(alone):
    model = make_model()
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.clone()
    optimizer = DiLoCo(model, adamw(model), alone, sync_every=1)
    train(model, optimizer, batches(1, 3))
    assert optimizer.outer.parameters.shape == (8 + 8 + 1,)
    assert torch.equal(model[0].weight, frozen)


def test_tied_parameters_stay_tied_and_count_once(alone):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    optimizer = DiLoCo(model, adamw(model), alone, sync_every=1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert optimizer.outer.parameters.shape == (16,)
    assert model[2].weight is model[0].weight


def test_the_outer_state_of_a_bf16_model_is_fp32(alone):
    model = make_model(torch.bfloat16)
    optimizer = DiLoCo(model, adamw(model), alone, sync_every=1)
    train(model, optimizer, batches(1, 3, torch.bfloat16))
    outer = optimizer.outer.parameters
    assert outer.dtype == torch.float32
    assert not torch.equal(outer, outer.bfloat16().float())
    assert torch.equal(values_of(model), outer.bfloat16())


def test_rounding_to_bf16_is_not_sent_as_if_it_were_training(alone):
    model = make_model(torch.bfloat16)
    optimizer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.01), alone, sync_every=1, outer_momentum=0.0)
    train(model, optimizer, batches(1, 1, torch.bfloat16))
    before = optimizer.outer.parameters
    optimizer.zero_grad()
    optimizer.step()  # without gradients nothing moves
    assert torch.equal(optimizer.outer.parameters, before)


def test_a_failed_exchange_changes_nothing_and_stays_due(alone):
    model = make_model()
    optimizer = DiLoCo(model, adamw(model), Flaky(alone), sync_every=2)
    start = values_of(model)
    with pytest.raises(PeerGone):
        train(model, optimizer, batches(1, 2))
    assert torch.equal(optimizer.outer.parameters, start)
    assert not torch.equal(values_of(model), start)
    train(model, optimizer, batches(2, 1))
    assert optimizer.rounds == 1
    assert alone.weights == [3.0]


def test_values_that_are_not_finite_weigh_nothing_and_are_healed():
    swarm = LocalSwarm(2)

    def replica(peer):
        model, index = make_model(), swarm.peers.index(peer)
        optimizer = DiLoCo(model, adamw(model), peer, sync_every=2)
        train(model, optimizer, batches(index, 1))
        if index == 1:
            with torch.no_grad():
                model[0].weight.fill_(float("nan"))
        train(model, optimizer, batches(index, 1))
        assert optimizer.rounds == 1
        return values_of(model)

    one, other = swarm.run(replica)
    assert torch.isfinite(one).all()
    assert torch.equal(one, other)


def test_weights_count_tokens(alone):
    model = make_model()
    optimizer = DiLoCo(model, adamw(model), alone, sync_every=3, tokens_per_step=16)
    train(model, optimizer, batches(1, 3))
    assert alone.weights == [48.0]


def test_a_mean_of_another_length_is_refused(alone):
    class Wrong(type(alone)):
        def all_reduce(self, values, weight=1.0, **options):
            return super().all_reduce(values[:-1], weight, **options)

    model = make_model()
    optimizer = DiLoCo(model, adamw(model), Wrong(), sync_every=1)
    with pytest.raises(ProtocolError, match=r"shape \[48\], not \[49\]"):
        train(model, optimizer, batches(1, 1))


def test_impossible_settings_are_refused(alone):
    model = make_model()
    with pytest.raises(SettingsError, match="cannot work"):
        DiLoCo(model, adamw(model), alone, sync_every=0)
    with pytest.raises(SettingsError, match="tokens_per_step"):
        DiLoCo(model, adamw(model), alone, tokens_per_step=0)
    with pytest.raises(SettingsError, match="does not have"):
        DiLoCo(model, adamw(make_model()), alone)
    with pytest.raises(SettingsError, match="added later"):
        DiLoCo(model, adamw(model), alone).add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_any_recipe_will_do(alone):
    model = make_model()
    optimizer = LowCommunicationOptimizer(model, adamw(model), alone, recipe("diloco", inner_steps=1))
    train(model, optimizer, batches(1, 2))
    assert optimizer.rounds == 2

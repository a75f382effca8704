"""Local steps with several momenta that are averaged, against their equations."""

import pytest
import torch
from torch import nn

from optim import LocalSwarm
from optim.mtdao import MultiTimescaleOptimizer, QuasiHyperbolicAdam, half_life
from protocol.errors import PeerGone, SettingsError
from tests.optim.replicas import CLOSE, Flaky
from tests.optim.toys import adamw, batches, make_model, put, train, values_of

MOMENTA = ((0.5, 0.3), (0.9, 0.5))


def inner_of(model, momenta=MOMENTA, **options):
    return QuasiHyperbolicAdam(model.parameters(), lr=0.01, momenta=momenta, beta=0.99, **options)


def run(size, steps, **options):
    swarm = LocalSwarm(size)

    def replica(peer):
        model = make_model()
        optimizer = MultiTimescaleOptimizer(model, inner_of(model), peer, **options)
        train(model, optimizer, batches(swarm.peers.index(peer), steps))
        return values_of(model)

    return swarm.run(replica), swarm


def gradient_of(model, batch):
    model.zero_grad()
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])


def test_parameters_and_momenta_are_averaged_each_in_its_time():
    steps, every, periods, lr, beta2, eps = 13, 2, (2, 6, 4), 0.01, 0.99, 1e-8
    replicas = [
        {"model": make_model(), "data": batches(index, steps), "u": [torch.zeros(49)] * 2, "v": torch.zeros(49)}
        for index in range(3)
    ]
    for t in range(1, steps + 1):
        for one in replicas:
            g = gradient_of(one["model"], next(one["data"]))
            one["u"] = [beta * u + (1 - beta) * g for (beta, _), u in zip(MOMENTA, one["u"], strict=True)]
            one["v"] = beta2 * one["v"] + (1 - beta2) * g * g
            d = (1 - sum(w for _, w in MOMENTA)) * g
            for (beta, w), u in zip(MOMENTA, one["u"], strict=True):
                d = d + w * u / (1 - beta**t)
            put(one["model"], values_of(one["model"]) - lr * d / ((one["v"] / (1 - beta2**t)).sqrt() + eps))
        if t % every == 0:
            mean = sum(values_of(one["model"]) for one in replicas) / 3
            for one in replicas:
                put(one["model"], mean)
        for index, period in enumerate(periods[:2]):
            if t % period == 0:
                mean = sum(one["u"][index] for one in replicas) / 3
                for one in replicas:
                    one["u"][index] = mean
        if t % periods[2] == 0:
            mean = sum(one["v"] for one in replicas) / 3
            for one in replicas:
                one["v"] = mean
    results, swarm = run(3, steps, sync_every=every, periods=periods)
    for values, one in zip(results, replicas, strict=True):
        torch.testing.assert_close(values, values_of(one["model"]), **CLOSE)
    averages = sum(steps // period for period in (every, *periods))
    assert swarm.peers[0].bytes_sent == pytest.approx(averages * 49 * 4 * 4 / 3, abs=4 * averages)


def test_one_momentum_with_all_of_the_step_is_adamw(alone):
    model, plain = make_model(), make_model()
    inner = inner_of(model, momenta=((0.9, 1.0),), weight_decay=0.1)
    optimizer = MultiTimescaleOptimizer(model, inner, alone, sync_every=4)
    train(model, optimizer, batches(0, 10))
    train(plain, adamw(plain, betas=(0.9, 0.99), weight_decay=0.1), batches(0, 10))
    torch.testing.assert_close(values_of(model), values_of(plain), **CLOSE)


def test_without_momenta_it_is_local_steps_along_the_gradient():
    ours, _ = run(2, 6, sync_every=3)
    other, _ = run(2, 6, sync_every=3, periods=(3, 3, 3))
    assert torch.equal(ours[0], ours[1])
    assert not torch.equal(ours[0], other[0])  # by default the squares, which forget slowly, are averaged later


def test_slow_momenta_are_averaged_seldom(alone):
    assert [half_life(beta) for beta in (0.0, 0.9, 0.95, 0.999)] == [1, 7, 14, 693]
    model = make_model()
    inner = inner_of(model, momenta=((0.95, 0.3), (0.999, 0.6)))
    assert MultiTimescaleOptimizer(model, inner, alone, sync_every=32).periods == (32, 704, 96)


def test_a_saved_state_continues_bit_for_bit(alone):
    data = list(batches(0, 14))

    def result(interrupted):
        model = make_model()
        optimizer = MultiTimescaleOptimizer(model, inner_of(model), alone, sync_every=4)
        train(model, optimizer, data[:6])
        if interrupted:
            saved, weights = optimizer.state_dict(), model.state_dict()
            model = make_model()
            optimizer = MultiTimescaleOptimizer(model, inner_of(model), alone, sync_every=4)
            model.load_state_dict(weights)
            optimizer.load_state_dict(saved)
        train(model, optimizer, data[6:])
        optimizer.finish()
        return values_of(model)

    assert torch.equal(result(True), result(False))


def test_an_exchange_that_failed_stays_due(alone):
    model = make_model()
    optimizer = MultiTimescaleOptimizer(model, inner_of(model), Flaky(alone), sync_every=2)
    with pytest.raises(PeerGone):
        train(model, optimizer, batches(0, 2))
    train(model, optimizer, batches(1, 1))
    assert alone.weights == [3.0]


def test_values_that_are_not_finite_are_healed():
    swarm = LocalSwarm(2)

    def replica(peer):
        model, index = make_model(), swarm.peers.index(peer)
        optimizer = MultiTimescaleOptimizer(model, inner_of(model), peer, sync_every=2, periods=(2, 2, 2))
        train(model, optimizer, batches(index, 1))
        if index:
            put(model, torch.full((49,), float("nan")))
        train(model, optimizer, batches(index, 1))
        return values_of(model)

    one, other = swarm.run(replica)
    assert torch.isfinite(one).all()
    assert torch.equal(one, other)


@pytest.mark.parametrize("factor", [float("nan"), 1e25])
def test_a_gradient_that_is_not_finite_or_whose_square_is_not_is_left_out(factor):
    swarm = LocalSwarm(2)

    def replica(peer):
        model, index = make_model(), swarm.peers.index(peer)
        inner, noted = inner_of(model), Flaky(peer, failing=())
        optimizer = MultiTimescaleOptimizer(model, inner, noted, sync_every=2, periods=(4, 64, 64))
        for number, (inputs, targets) in enumerate(batches(index, 8)):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            before = values_of(model)
            (loss * factor if (index, number) == (1, 2) else loss).backward()
            optimizer.step()
            assert torch.isfinite(values_of(model)).all()
            assert torch.equal(values_of(model), before) == ((index, number) == (1, 2))
        for state in inner.state.values():
            assert all(torch.isfinite(values).all() for values in state.values())
        return values_of(model), [weight for _, weight in noted.brought]

    (one, full), (other, less) = swarm.run(replica)
    assert torch.equal(one, other)
    assert full == [2.0] * 4
    assert less == [2.0, 1.0, 2.0, 2.0]  # what was not done does not count


def test_who_is_spoiled_and_alone_does_not_begin_at_zero(alone):
    model = make_model()
    optimizer = MultiTimescaleOptimizer(model, inner_of(model), alone, sync_every=1)
    put(model, torch.full((49,), float("nan")))
    optimizer.step()
    assert torch.isnan(values_of(model)).all()


def test_impossible_settings_are_refused(alone):
    model = make_model()
    for momenta in (((1.0, 0.5),), ((0.9, 0.6), (0.99, 0.6)), ((0.9, -0.1),)):
        with pytest.raises(SettingsError, match="must"):
            inner_of(model, momenta=momenta)
    with pytest.raises(SettingsError, match="3 periods are needed, multiples of 4"):
        MultiTimescaleOptimizer(model, inner_of(model), alone, sync_every=4, periods=(4, 4))
    with pytest.raises(SettingsError, match="multiples of 4"):
        MultiTimescaleOptimizer(model, inner_of(model), alone, sync_every=4, periods=(4, 6, 4))
    with pytest.raises(SettingsError, match="sync_every"):
        MultiTimescaleOptimizer(model, inner_of(model), alone, sync_every=0)
    optimizer = MultiTimescaleOptimizer(model, inner_of(model), alone)
    with pytest.raises(SettingsError, match="not one of"):
        optimizer.load_state_dict(optimizer.inner.state_dict())

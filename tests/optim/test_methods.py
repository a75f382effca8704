"""Each method against what its equations say, written out plainly for all replicas in one place."""

import pytest
import torch
from torch import nn

from optim import GradientOptimizer, LocalSwarm, LowCommunicationOptimizer, MuonAdamW, gradient_recipe, recipe
from optim.methods.late import spectral_radius
from optim.slots import Mixed, Moment
from optim.spsa import SpsaOptimizer
from optim.state import OuterState
from protocol.errors import SettingsError
from tests.optim.replicas import CLOSE, Outer, Replica, run
from tests.optim.toys import adamw, batches, make_model, put, train, values_of


def test_local_sgd_averages_parameters():
    replicas = [Replica(index) for index in range(3)]
    for _ in range(3):
        mean = sum(replica.local_steps(4) for replica in replicas) / 3
        for replica in replicas:
            put(replica.model, mean)
    results, _ = run("fedavg", 3, 12, inner_steps=4)
    torch.testing.assert_close(results[0], mean, **CLOSE)


def test_a_lone_peer_of_local_sgd_is_its_inner_optimizer():
    results, _ = run("fedavg", 1, 12, inner_steps=4)
    torch.testing.assert_close(results[0], Replica(0).local_steps(12), **CLOSE)


def test_streaming_without_fragments_and_delay_is_diloco_bit_for_bit():
    constants = {"inner_steps": 4, "outer_lr": 0.7, "outer_momentum": 0.9}
    streamed, _ = run("streaming", 3, 12, fragments=1, delay=0, alpha=0.0, **constants)
    plain, _ = run("diloco", 3, 12, **constants)
    assert torch.equal(streamed[0], plain[0])


def test_streaming_is_what_the_paper_says():
    # The model's two blocks are its two fragments: weights and biases of layer 0, and those of layer 2.
    every, delay, alpha = 4, 1, 0.5
    replicas = [Replica(index) for index in range(3)]
    parts = [slice(0, 40), slice(40, 49)]
    outers = [Outer(values_of(replicas[0].model)[part], 0.4, 0.9) for part in parts]
    landing = None
    for step in range(1, 2 * every * 3 + 1):
        local = [replica.local_steps(1) for replica in replicas]
        if landing is not None and step == landing[0]:
            _, turn, mean = landing
            new = outers[turn].step(mean)
            for replica, values in zip(replicas, local, strict=True):
                values[parts[turn]] = alpha * values[parts[turn]] + (1 - alpha) * new
                put(replica.model, values)
            landing = None
        if step >= 2 * every and step % every == 0:
            turn = (step - 2 * every) // every % 2
            deltas = [outers[turn].values - values[parts[turn]] for values in local]
            landing = (step + delay, turn, sum(deltas) / 3)
    results, _ = run(
        "streaming", 3, 2 * every * 3, finish=False, inner_steps=2 * every, fragments=2, delay=delay, alpha=alpha
    )
    for replica, values in zip(replicas, results, strict=True):
        torch.testing.assert_close(values, values_of(replica.model), **CLOSE)


def test_eager_updates_of_one_peer_are_diloco_bit_for_bit():
    constants = {"inner_steps": 4, "outer_lr": 0.35, "outer_momentum": 0.5}
    eager, _ = run("eager", 1, 16, finish=False, **constants)
    plain, _ = run("diloco", 1, 16, **constants)
    assert torch.equal(eager[0], plain[0])


def test_eager_updates_take_their_own_part_fresh_and_the_others_a_round_late():
    lr, momentum, steps, size = 0.35, 0.5, 4, 3
    replicas = [Replica(index) for index in range(size)]
    outers = [Outer(values_of(replica.model), lr, momentum) for replica in replicas]
    previous = None
    for number in range(5):
        deltas = [outer.values - replica.local_steps(steps) for outer, replica in zip(outers, replicas, strict=True)]
        for index, (outer, replica) in enumerate(zip(outers, replicas, strict=True)):
            if number == 0:
                gradient = sum(deltas) / size  # there is nothing to be late with yet
            else:
                stale = torch.zeros_like(deltas[0]) if previous is None else (sum(previous) - previous[index]) / size
                gradient = stale + deltas[index] / size
            put(replica.model, outer.step(gradient))
        previous = None if number == 0 else deltas
    results, _ = run("eager", size, 5 * steps, finish=False, inner_steps=steps, outer_lr=lr, outer_momentum=momentum)
    for values, replica in zip(results, replicas, strict=True):
        torch.testing.assert_close(values, values_of(replica.model), **CLOSE)


def test_delayed_updates_come_a_round_late():
    lr, momentum, steps, size = 0.2, 0.5, 4, 3
    replicas = [Replica(index) for index in range(size)]
    outer = Outer(values_of(replicas[0].model), lr, momentum)
    previous = None
    for _ in range(4):
        deltas = [outer.values - replica.local_steps(steps) for replica in replicas]
        if previous is not None:
            outer.step(sum(previous) / size)
        for replica in replicas:
            put(replica.model, outer.values)
        previous = deltas
    results, _ = run("delayed", size, 4 * steps, finish=False, inner_steps=steps, outer_lr=lr, outer_momentum=momentum)
    torch.testing.assert_close(results[0], outer.values, **CLOSE)
    assert torch.equal(results[0], results[1])


def test_low_rank_of_full_rank_is_no_compression():
    constants = {"inner_steps": 4, "outer_lr": 0.2, "outer_momentum": 0.5}
    low, _ = run("dilocox", 2, 16, rank=8, adaptive=False, **constants)
    full, _ = run("delayed", 2, 16, **constants)
    torch.testing.assert_close(low[0], full[0], **CLOSE)


@pytest.mark.parametrize(
    ("lr", "momentum", "expected"),
    [
        (0.7, 0.9, (0.52, 1.28, 0.97, 1.14, 1.22)),
        (0.7, 0.5, (0.39, 1.09, 0.81, 0.96, 1.03)),
        (0.4, 0.9, (0.73, 1.08, 0.90, 0.99, 1.04)),
        (0.35, 0.5, (0.57, 0.85, 0.70, 0.77, 0.81)),
        (0.2, 0.9, (0.85, 0.98, 0.91, 0.94, 0.96)),
        (1.0, 0.0, (0.0, 1.0, 0.71, 0.87, 0.94)),
    ],
)
def test_the_outer_iteration_shrinks_errors_as_calculated(lr, momentum, expected):
    cases = [("blocking", 1), ("delayed", 1), ("eager", 2), ("eager", 4), ("eager", 8)]
    found = [spectral_radius(kind, lr, momentum, peers) for kind, peers in cases]
    assert found == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize(
    ("method", "constants"), [("eager", (0.7, 0.9)), ("delayed", (0.7, 0.5)), ("dilocox", (0.4, 0.9))]
)
def test_constants_that_diverge_are_refused_with_the_reason(method, constants):
    with pytest.raises(SettingsError, match="diverge: errors grow by a factor of 1"):
        recipe(method, outer_lr=constants[0], outer_momentum=constants[1])


@pytest.mark.parametrize("rule", ["adam", "yogi", "adagrad"])
def test_adaptive_outer_optimizers_follow_their_equations(rule):
    lr, beta1, beta2, tau = 0.1, 0.9, 0.99, 1e-3
    method = recipe("fedopt", rule=rule, outer_lr=lr, beta1=beta1, beta2=beta2, tau=tau)
    state = method.outer.init(torch.tensor([1.0, -2.0]))
    theta, m, v = state.parameters.double(), torch.zeros(2).double(), torch.full((2,), tau * tau).double()
    for gradient in ([0.5, -1.0], [0.25, 2.0], [-0.5, 0.125]):
        g = torch.tensor(gradient).double()
        m = beta1 * m + (1 - beta1) * -g
        square = g * g
        if rule == "adam":
            v = beta2 * v + (1 - beta2) * square
        elif rule == "yogi":
            v = v - (1 - beta2) * square * torch.sign(v - square)
        else:
            v = v + square
        theta = theta + lr * m / (v.sqrt() + tau)
        mixed = Mixed(mean=g.float(), own=g.float(), members=(), share=1.0)
        state = method.outer.step(state, mixed, Moment(round=1, lr=0.1), g.float())
    torch.testing.assert_close(state.parameters.double(), theta, rtol=1e-5, atol=1e-6)


def test_slow_momentum_is_in_units_of_the_learning_rate():
    method = recipe("slowmo", momentum=0.5, alpha=1.0)
    state = method.outer.init(torch.tensor([1.0]))
    for lr, expected in ((0.1, 1 - 0.2), (0.05, 0.8 - 0.05 * (0.5 * 2.0 + 0.2 / 0.05))):
        mean = torch.tensor([0.2])
        state = method.outer.step(
            state, Mixed(mean=mean, own=mean, members=(), share=1.0), Moment(round=1, lr=lr), mean
        )
        assert state.parameters.item() == pytest.approx(expected)


def test_a_stale_result_counts_less():
    method = recipe("co2", momentum=0.0, clip=100.0)
    state = OuterState(torch.tensor([1.0]), {"momentum": torch.zeros(1)})
    mean, moment = torch.tensor([0.2]), Moment(round=1, lr=0.1)
    mixed = Mixed(mean=mean, own=mean, members=(), share=1.0)
    assert method.outer.step(state, mixed, moment, mean).parameters.item() == pytest.approx(0.8)
    assert method.outer.step(state, mixed, moment, mean * 4).parameters.item() == pytest.approx(0.95)


# Methods that exchange in every step.


def run_steps(method, size, steps, inner, **constants):
    swarm = LocalSwarm(size)

    def replica(peer):
        model = make_model()
        optimizer = GradientOptimizer(model, inner(model), peer, gradient_recipe(method, **constants))
        train(model, optimizer, batches(swarm.peers.index(peer), steps))
        return values_of(model)

    return swarm.run(replica), swarm


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def gradients(models, streams):
    found = []
    for model, stream in zip(models, streams, strict=True):
        model.zero_grad()
        inputs, targets = next(stream)
        nn.functional.mse_loss(model(inputs), targets).backward()
        found.append(torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]))
    return found


def test_data_parallel_training_is_one_process_with_the_whole_batch():
    model = make_model()
    optimizer, streams = adamw(model), [batches(index, 10) for index in range(3)]
    for _ in range(10):
        optimizer.zero_grad()
        parts = [next(stream) for stream in streams]
        inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    results, swarm = run_steps("data-parallel", 3, 10, adamw)
    torch.testing.assert_close(results[0], values_of(model), **CLOSE)
    assert torch.equal(results[0], results[2])
    assert swarm.peers[0].bytes_sent == 10 * (2 * 2 * 49 * 4 // 3)


def test_distributed_lion_votes():
    beta1, beta2, lr, size = 0.9, 0.99, 0.01, 3
    models, streams = [make_model() for _ in range(size)], [batches(index, 6) for index in range(size)]
    momenta = [torch.zeros(49) for _ in range(size)]
    for _ in range(6):
        found = gradients(models, streams)
        votes = [torch.where(beta1 * m + (1 - beta1) * g < 0, -1.0, 1.0) for m, g in zip(momenta, found, strict=True)]
        momenta = [beta2 * m + (1 - beta2) * g for m, g in zip(momenta, found, strict=True)]
        after = values_of(models[0]) - lr * torch.sign(sum(votes))
        for model in models:
            put(model, after)
    results, swarm = run_steps("lion", size, 6, sgd)
    torch.testing.assert_close(results[0], after, **CLOSE)
    assert swarm.peers[0].bytes_sent == 6 * 2 * (8 + 7)  # a weight, and a bit for each of 49 parameters


def cosine_basis(size):
    place = torch.arange(size).double()
    basis = torch.cos(torch.pi / size * torch.outer(place, place + 0.5)) * (2 / size) ** 0.5
    basis[0] /= 2**0.5
    return basis


def test_demo_is_what_the_paper_says():
    decay, lr, size, k = 0.999, 0.01, 2, 3
    shapes = [(8, 4), (1, 8), (1, 8), (1, 1)]
    models, streams = [make_model() for _ in range(size)], [batches(index, 5) for index in range(size)]
    residuals = [torch.zeros(49).double() for _ in range(size)]
    for _ in range(5):
        found = gradients(models, streams)
        residuals = [decay * q + lr * g.double() for q, g in zip(residuals, found, strict=True)]
        update, at = torch.zeros(49).double(), 0
        for rows, columns in shapes:
            left, right = cosine_basis(rows), cosine_basis(columns)
            total, count = torch.zeros(rows, columns).double(), torch.zeros(rows, columns)
            for residual in residuals:
                part = residual[at : at + rows * columns].view(rows, columns)
                coefficients = left @ part @ right.T
                keep = coefficients.abs().flatten().topk(min(k, rows * columns)).indices
                kept = torch.zeros(rows * columns).double()
                kept[keep] = coefficients.flatten()[keep].float().bfloat16().double()
                residual[at : at + rows * columns] -= (left.T @ kept.view(rows, columns) @ right).flatten()
                total += kept.view(rows, columns)
                count.view(-1)[keep] += 1
            mean = torch.where(count > 0, total / count.clamp_min(1), 0.0)
            update[at : at + rows * columns] = (left.T @ mean @ right).flatten()
            at += rows * columns
        after = values_of(models[0]) - lr * torch.sign(update).float()
        for model in models:
            put(model, after)
    results, _ = run_steps("demo", size, 5, sgd, k=k)
    torch.testing.assert_close(results[0], after, **CLOSE)


def test_power_sgd_of_full_rank_is_data_parallel_training():
    full, _ = run_steps("powersgd", 3, 6, adamw, rank=8)
    plain, _ = run_steps("data-parallel", 3, 6, adamw)
    torch.testing.assert_close(full[0], plain[0], **CLOSE)


@pytest.mark.parametrize("method", ["powersgd", "demo", "lion", "terngrad", "data-parallel"])
def test_peers_take_the_same_steps(method):
    results, _ = run_steps(method, 3, 6, sgd)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], values_of(make_model()))


def test_gradients_that_are_not_finite_do_not_count():
    swarm = LocalSwarm(2)

    def replica(peer):
        model, index = make_model(), swarm.peers.index(peer)
        optimizer = GradientOptimizer(model, sgd(model), peer, gradient_recipe("data-parallel"))
        for inputs, targets in batches(0, 2):
            optimizer.zero_grad()
            factor = float("nan") if index else 1.0
            (nn.functional.mse_loss(model(inputs), targets) * factor).backward()
            optimizer.step()
        return values_of(model)

    one, other = swarm.run(replica)
    alone = make_model()
    train(alone, sgd(alone), batches(0, 2))
    torch.testing.assert_close(one, values_of(alone), **CLOSE)
    assert torch.equal(one, other)


def test_seeded_perturbation_learns_with_a_few_bytes_per_step():
    swarm = LocalSwarm(3)

    def replica(peer):
        model, index = make_model(), swarm.peers.index(peer)
        optimizer = SpsaOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.005), peer, seed=index)
        losses = []
        for inputs, targets in batches(index, 200):
            losses.append(optimizer.step(lambda x=inputs, y=targets: nn.functional.mse_loss(model(x), y)))
        return values_of(model), losses

    results = swarm.run(replica)
    assert torch.equal(results[0][0], results[1][0])
    losses = results[0][1]
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20])
    assert swarm.peers[0].bytes_sent == 200 * 2 * 9


def test_seeded_perturbation_needs_a_closure(alone):
    model = make_model()
    with pytest.raises(SettingsError, match="closure"):
        SpsaOptimizer(model, sgd(model), alone, seed=0).step()
    with pytest.raises(SettingsError, match="epsilon"):
        SpsaOptimizer(model, sgd(model), alone, seed=0, epsilon=0.0)


@pytest.mark.parametrize(
    ("method", "constants"),
    [
        ("streaming", {"inner_steps": 4, "fragments": 2, "delay": 2}),
        ("eager", {"inner_steps": 3}),
        ("dilocox", {"inner_steps": 3, "rank": 1}),
        ("dilocox", {"inner_steps": 4, "rank": 1, "window": 2}),
        ("sparseloco", {"inner_steps": 3, "k": 2}),
        ("noloco", {"inner_steps": 3}),
    ],
)
@pytest.mark.parametrize("saved_after", [4, 7, 9])
def test_a_saved_state_continues_bit_for_bit_also_while_an_exchange_is_under_way(method, constants, saved_after):
    def replicas(swarm, interrupted):
        def replica(peer):
            model, data = make_model(), list(batches(swarm.peers.index(peer), 14))
            optimizer = LowCommunicationOptimizer(model, adamw(model), peer, recipe(method, **constants))
            train(model, optimizer, data[:saved_after])
            if interrupted:
                saved, weights = optimizer.state_dict(), model.state_dict()
                optimizer.close()
                model = make_model()
                optimizer = LowCommunicationOptimizer(model, adamw(model), peer, recipe(method, **constants))
                model.load_state_dict(weights)
                optimizer.load_state_dict(saved)
            train(model, optimizer, data[saved_after:])
            optimizer.close()
            return values_of(model)

        return swarm.run(replica)

    for one, other in zip(replicas(LocalSwarm(2), True), replicas(LocalSwarm(2), False), strict=True):
        assert torch.equal(one, other)


# Local steps.


def test_proximal_steps_are_drawn_back_to_the_outer_parameters():
    mu, steps = 0.5, 4
    models, streams = [make_model() for _ in range(2)], [batches(index, 8) for index in range(2)]
    inners = [adamw(model) for model in models]
    for _ in range(2):
        anchor = values_of(models[0])
        for model, inner, stream in zip(models, inners, streams, strict=True):
            for inputs, targets in (next(stream) for _ in range(steps)):
                inner.zero_grad()
                drift = (nn.utils.parameters_to_vector(model.parameters()) - anchor).square().sum()
                (nn.functional.mse_loss(model(inputs), targets) + mu / 2 * drift).backward()
                inner.step()
        mean = sum(values_of(model) for model in models) / 2
        for model in models:
            put(model, mean)
    results, _ = run("fedprox", 2, 8, inner_steps=steps, mu=mu)
    torch.testing.assert_close(results[0], mean, **CLOSE)


def test_sharpness_aware_steps_take_the_gradient_from_uphill(alone):
    rho, (inputs, targets) = 0.1, next(batches(0, 1))
    expected = make_model()
    inner = sgd(expected)
    nn.functional.mse_loss(expected(inputs), targets).backward()
    start, slope = values_of(expected), torch.cat([p.grad.reshape(-1) for p in expected.parameters()])
    put(expected, start + rho * slope / slope.norm())
    inner.zero_grad()
    nn.functional.mse_loss(expected(inputs), targets).backward()
    put(expected, start)
    inner.step()

    model = make_model()
    optimizer = LowCommunicationOptimizer(model, sgd(model), alone, recipe("fedsam", inner_steps=50, rho=rho))

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(nn.functional.mse_loss(make_model()(inputs), targets).item())
    torch.testing.assert_close(values_of(model), values_of(expected), **CLOSE)
    with pytest.raises(SettingsError, match="closure"):
        optimizer.step()


def test_muon_trains_matrices_and_adamw_the_rest(alone, tmp_path):
    model = make_model()
    inner = MuonAdamW(model, lr=0.01, other_lr=0.01, others=[model[2].weight])
    optimizer = LowCommunicationOptimizer(model, inner, alone, recipe("diloco", inner_steps=4))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    data = list(batches(0, 12))
    first = nn.functional.mse_loss(model(data[0][0]), data[0][1]).item()
    train(model, optimizer, data[:6])
    scheduler.step()
    assert {group["lr"] for group in inner.param_groups} == {0.005}
    assert set(inner.state[model[0].weight]) == {"momentum_buffer"}
    assert "exp_avg" in inner.state[model[2].weight]
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    train(model, optimizer, data[6:])
    assert nn.functional.mse_loss(model(data[0][0]), data[0][1]).item() < first

    other = make_model()
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    resumed = LowCommunicationOptimizer(
        other,
        MuonAdamW(other, lr=0.01, other_lr=0.01, others=[other[2].weight]),
        alone,
        recipe("diloco", inner_steps=4),
    )
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(other, resumed, data[6:])
    assert torch.equal(values_of(other), values_of(model))


def test_muon_needs_a_matrix():
    with pytest.raises(SettingsError, match="no matrix"):
        MuonAdamW(nn.LayerNorm(4))

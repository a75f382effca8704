"""Methods that do not wait for the slowest, against their equations, on simulated time."""

import copy
import threading

import pytest
import torch

from optim import LocalSwarm, LowCommunicationOptimizer, recipe
from optim.flat import Slice
from optim.fragments import Packed
from optim.methods.asynchronous import DelayedNesterov, EachNesterov
from optim.outers import Nesterov
from optim.radial import RadialMean
from optim.sender import carry_out
from optim.slots import Mixed, Moment
from protocol.errors import SettingsError
from protocol.standalone import join_collective
from tests.optim.toys import adamw, batches, make_model, put, train, values_of

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
COSTS = (1.0, 1.1313, 4.0717)
"""Simulated seconds of one step; chosen so that no two peers are ready within a grace time of 0.01."""


def run(method, costs, until, **constants):
    """All replicas' parameters in the end, and each one's optimizer."""
    swarm = LocalSwarm(len(costs))
    optimizers = {}

    def replica(peer):
        index, model = swarm.peers.index(peer), make_model()
        pace = min(costs) / costs[index]
        optimizer = optimizers[index] = LowCommunicationOptimizer(
            model, adamw(model), peer, recipe(method, **constants), pace=lambda: pace
        )
        data = batches(index, 1000)
        while peer.time < until:
            peer.advance(costs[index])
            train(model, optimizer, [next(data)])
        optimizer.finish()
        return values_of(model)

    return swarm.run(replica), optimizers


def step(outer, state, gradient, members):
    mixed = Mixed(mean=gradient, own=gradient, members=tuple(range(members)), share=1.0)
    return outer.step(state, mixed, Moment(round=1, lr=0.1), gradient)


def after(outer, groups):
    """Where a unit pseudo-gradient leads from zero, in exchanges with so many peers each."""
    state, seen = outer.init(torch.zeros(1)), []
    for members in groups:
        state = step(outer, state, torch.ones(1), members)
        seen.append(state.parameters.item())
    return seen


@pytest.mark.parametrize(("spread", "expected"), [(0.0, (-1.33, -3.227)), (0.25, (-0.8575, -2.32925))])
@pytest.mark.parametrize("groups", [[1] * 8, [4, 4], [3, 1, 2, 2], [8], [3, 3, 2]])
def test_delayed_nesterov_follows_the_published_vector(spread, expected, groups):
    seen = after(DelayedNesterov(0.7, 0.9, 4, spread), groups)
    assert seen[-1] == pytest.approx(expected[1], rel=1e-5)
    if sum(groups[: len(groups) // 2]) == 4:
        assert seen[len(groups) // 2 - 1] == pytest.approx(expected[0], rel=1e-5)


def test_a_buffer_of_equal_pseudo_gradients_is_a_synchronous_step_bit_for_bit():
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    one, other = DelayedNesterov(0.7, 0.9, 4), Nesterov(0.7, 0.9)
    ours, theirs = one.init(torch.ones(1000)), other.init(torch.ones(1000))
    for _ in range(3):
        ours, theirs = step(one, ours, gradient, 4), step(other, theirs, gradient, 4)
        assert torch.equal(ours.parameters, theirs.parameters)
        assert torch.equal(ours.buffers["momentum"], theirs.buffers["momentum"])


def test_a_whole_step_for_each_arrival_goes_six_times_too_far():
    assert after(EachNesterov(0.7, 0.9), [1] * 4)[-1] == pytest.approx(-8.50087, rel=1e-5)
    assert after(EachNesterov(0.7, 0.9), [4])[-1] == pytest.approx(-8.50087, rel=1e-5)


@pytest.mark.parametrize("constants", [{"buffer": 0}, {"spread": 0.3}, {"spread": -0.1}, {"grace": 0.0}, {"keep": 0}])
def test_impossible_constants_are_refused(constants):
    with pytest.raises(SettingsError, match="cannot work"):
        recipe("asynchronous", **constants)


def server(costs, until, steps, apply, grace=0.01):
    """One server and its workers, as the paper has it: the parameters, and how many pseudo-gradients came of each."""
    workers = []
    for index, count in enumerate(steps):
        model = make_model()
        workers.append(
            {"model": model, "inner": adamw(model), "data": batches(index, 1000), "time": 0.0, "steps": count}
        )
    parameters = values_of(workers[0]["model"])
    for worker in workers:
        worker["start"] = parameters
    arrived = [0] * len(costs)

    def next_arrival(index):
        time = workers[index]["time"]
        for _ in range(workers[index]["steps"]):
            if time >= until:
                return float("inf")
            time += costs[index]
        return time

    while min(times := [next_arrival(index) for index in range(len(costs))]) < float("inf"):
        index = times.index(min(times))
        assert sorted(times)[1] > min(times) + grace
        worker = workers[index]
        put(worker["model"], worker["start"])
        train(worker["model"], worker["inner"], (next(worker["data"]) for _ in range(worker["steps"])))
        parameters = apply(parameters, worker["start"] - values_of(worker["model"]))
        worker["start"], worker["time"] = parameters, min(times) + grace
        arrived[index] += 1
    return parameters, arrived


class Delayed:
    """Delayed Nesterov as the paper writes it."""

    def __init__(self, lr, momentum, size, c):
        self.lr, self.beta, self.size, self.c = lr, momentum, size, c
        self.momentum = self.sum = torch.zeros(49)
        self.t = 0

    def __call__(self, theta, g):
        self.sum = self.sum + g
        if (self.t + 1) % self.size == 0:
            self.momentum = self.beta * self.momentum + self.sum / self.size
            share = 1 - self.c * self.size + self.c
            theta = theta - self.lr * (share * self.beta * self.momentum + g / self.size)
            self.sum = torch.zeros(49)
        else:
            theta = theta - self.lr * (self.c * self.beta * self.momentum + g / self.size)
        self.t += 1
        return theta


@pytest.mark.parametrize("c", [0.0, 0.2])
@pytest.mark.parametrize("paced", [False, True])
def test_asynchronous_training_is_what_the_paper_says(c, paced):
    every = [4, 3, 1] if paced else [4, 4, 4]
    expected, arrived = server(COSTS, 60.0, every, Delayed(0.7, 0.9, 3, c))
    results, optimizers = run("asynchronous", COSTS, 60.0, inner_steps=4, buffer=3, spread=c, paced=paced, grace=0.01)
    assert [optimizers[index].rounds for index in range(3)] == arrived
    torch.testing.assert_close(results[0], expected, **CLOSE)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_plain_asynchronous_training_takes_a_step_for_each_arrival():
    momentum = torch.zeros(49)

    def apply(theta, g):
        nonlocal momentum
        momentum = 0.5 * momentum + g
        return theta - 0.7 * (g + 0.5 * momentum)

    expected, _ = server(COSTS, 40.0, [4, 4, 4], apply)
    constants = {"inner_steps": 4, "outer_momentum": 0.5, "grace": 0.01}
    results, _ = run("asynchronous-plain", COSTS, 40.0, **constants)
    torch.testing.assert_close(results[0], expected, **CLOSE)


def test_where_nobody_is_late_asynchronous_training_is_diloco_bit_for_bit():
    constants = {"inner_steps": 4, "outer_lr": 0.7, "outer_momentum": 0.9}
    ours, _ = run("asynchronous", (1.0, 1.0, 1.0), 20.0, buffer=3, **constants)
    plain, _ = run("diloco", (1.0, 1.0, 1.0), 20.0, **constants)
    assert torch.equal(ours[0], plain[0])


def test_momentum_for_each_arrival_runs_away_where_delayed_momentum_does_not():
    def worst(method, **constants):
        results, _ = run(method, (1.0, 1.1, 1.2, 1.3), 120.0, inner_steps=4, grace=0.01, **constants)
        model = make_model()
        put(model, results[0])
        return max(torch.nn.functional.mse_loss(model(x), y).item() for x, y in batches(99, 20))

    assert worst("asynchronous-plain") > 2 * worst("asynchronous", buffer=4)


def test_a_state_in_the_middle_of_a_buffer_continues_bit_for_bit():
    def results(interrupted):
        swarm = LocalSwarm(2)

        def replica(peer):
            model, index = make_model(), swarm.peers.index(peer)
            method = recipe("asynchronous", inner_steps=2, buffer=3)
            optimizer = LowCommunicationOptimizer(model, adamw(model), peer, method)
            data = list(batches(index, 12))
            train(model, optimizer, data[:5])
            if interrupted:
                saved, weights = optimizer.state_dict(), model.state_dict()
                model = make_model()
                optimizer = LowCommunicationOptimizer(model, adamw(model), peer, method)
                model.load_state_dict(weights)
                optimizer.load_state_dict(saved)
            train(model, optimizer, data[5:])
            return values_of(model)

        return swarm.run(replica)

    assert torch.equal(results(True)[0], results(False)[0])


# Quorums.


def test_where_all_are_ready_a_quorum_is_diloco_on_the_weighted_mean():
    constants = {"inner_steps": 4, "outer_lr": 0.7, "outer_momentum": 0.9}
    ours, _ = run("decoupled", (1.0,) * 3, 20.0, fragments=1, delay=0, radial=False, **constants)
    plain, _ = run("diloco", (1.0,) * 3, 20.0, **constants)
    torch.testing.assert_close(ours[0], plain[0], **CLOSE)


def test_a_quorum_goes_on_without_who_is_late_and_hears_it_later():
    # Two peers of one speed are a quorum; the third is ready in the grace time of their fourth exchange.
    steps, lr, beta, rounds = 4, 0.7, 0.9, 8
    replicas = [(make_model(), batches(index, 1000)) for index in range(3)]
    inners = [adamw(model) for model, _ in replicas]
    outer = values_of(replicas[0][0])
    momentum, starts = torch.zeros(49), [outer] * 3
    for number in range(1, rounds + 1):
        ready = (0, 1, 2) if number % 4 == 0 else (0, 1)
        deltas = []
        for index in ready:
            model, data = replicas[index]
            put(model, starts[index])
            train(model, inners[index], (next(data) for _ in range(steps)))
            deltas.append(starts[index] - values_of(model))
        mean = sum(deltas) / len(deltas)
        momentum = beta * momentum + mean
        outer = outer - lr * (mean + beta * momentum)
        for index in ready:
            starts[index] = outer
    # The two wait for half a second in three of four exchanges, the third one in none.
    ours, optimizers = run(
        "decoupled",
        (1.0, 1.0, 4.4),
        rounds * steps + 3.0,
        inner_steps=steps,
        fragments=1,
        delay=0,
        radial=False,
        quorum=2,
        grace=0.5,
    )
    assert [optimizers[index].rounds for index in range(3)] == [rounds, rounds, rounds // 4]
    for values in ours:
        torch.testing.assert_close(values, outer, **CLOSE)
        assert torch.equal(values, ours[0])


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_fragments_of_peers_of_unequal_speed_end_with_the_same_bits(delay):
    results, optimizers = run(
        "decoupled", (1.0, 1.0, 3.1), 40.0, inner_steps=4, fragments=2, delay=delay, quorum=2, grace=0.2, keep=64
    )
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], values_of(make_model()))
    assert all(optimizer.rounds for optimizer in optimizers.values())


def test_local_steps_do_not_wait_for_an_exchange_that_is_under_way():
    class Slow:
        """A swarm that answers when it is told to."""

        def __init__(self, peer):
            self.peer, self.gate = peer, threading.Event()

        def all_reduce(self, *arguments, **options):
            self.gate.wait()
            return self.peer.all_reduce(*arguments, **options)

        def gather(self, block, **options):
            return self.peer.gather(block, **options)

    slow = Slow(LocalSwarm(1).peers[0])
    model = make_model()
    method = recipe("decoupled", inner_steps=4, fragments=2, delay=1, quorum=1, radial=False)
    optimizer = LowCommunicationOptimizer(model, adamw(model), slow, method)
    train(model, optimizer, batches(0, 9))  # exchanges are due after 4, 6 and 8 steps
    assert optimizer.rounds == 0
    slow.gate.set()
    optimizer.finish()
    assert optimizer.rounds == 1


def radial_mean(deltas, layout):
    swarm = LocalSwarm(len(deltas))

    def replica(peer):
        mixing = RadialMean().mix(deltas[swarm.peers.index(peer)], 1.0, layout, 1, {})
        return carry_out(peer, mixing).mean

    return swarm.run(replica)[0]


def test_the_radial_mean_keeps_the_length():
    layout = (
        Slice("embedding", torch.Size([3]), 0, 3),
        Slice("a", torch.Size([4]), 3, 7),
        Slice("b", torch.Size([2]), 7, 9),
    )
    deltas = [torch.randn(9, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    for delta, x in zip(deltas, (1.0, -2.0, 1.0), strict=True):
        delta[7:] = torch.tensor([0.0, x])  # directions 1, -1 and 1
    expected = torch.empty(9)
    expected[:3] = sum(delta[:3] for delta in deltas) / 3
    length = sum(delta[3:7].norm() for delta in deltas) / 3
    direction = sum(delta[3:7] / delta[3:7].norm() for delta in deltas)
    expected[3:7] = length * direction / direction.norm()
    expected[7:] = torch.tensor([0.0, 4 / 3])
    torch.testing.assert_close(radial_mean(deltas, layout), expected)


def test_directions_that_cancel_each_other_out_have_no_mean():
    layout = (Slice("a", torch.Size([2]), 0, 2),)
    assert radial_mean([torch.tensor([1.0, 2.0]), torch.tensor([-1.0, -2.0])], layout).tolist() == [0.0, 0.0]
    assert radial_mean([torch.zeros(2), torch.zeros(2)], layout).tolist() == [0.0, 0.0]


def test_fragments_are_packed_evenly():
    sizes = (10, 3, 7, 4, 6)
    starts = [sum(sizes[:index]) for index in range(5)]
    layout = [
        Slice(str(index), torch.Size([size]), start, start + size)
        for index, (size, start) in enumerate(zip(sizes, starts, strict=True))
    ]
    assert [Packed(3).fragment(layout, round) for round in (1, 2, 3, 4)] == [[0], [1, 2], [3, 4], [0]]
    assert [Packed(9).fragment(layout, round) for round in (1, 5, 6)] == [[0], [1], [0]]


def test_real_peers_of_unequal_speed_end_with_the_same_bits():
    with join_collective("unequal") as one, join_collective("unequal", peers=[one.address]) as other:
        results = {}

        def replica(peer, count):
            peer.wait_for(2, timeout=30)
            model = make_model()
            method = recipe("asynchronous", inner_steps=2, buffer=2, grace=0.01, keep=64)
            optimizer = LowCommunicationOptimizer(model, adamw(model), peer, method)
            train(model, optimizer, batches(count, count))
            optimizer.finish()
            results[count] = values_of(model), optimizer.outer.buffers["arrivals"]

        threads = [threading.Thread(target=replica, args=arguments) for arguments in ((one, 4), (other, 20))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert torch.equal(results[4][0], results[20][0])
    assert not torch.equal(results[4][0], values_of(make_model()))
    assert torch.equal(results[4][1], results[20][1])


def test_nobody_comes_later_where_exchanges_do_not_wait(alone):
    model = make_model()
    optimizer = LowCommunicationOptimizer(model, adamw(model), alone, recipe("asynchronous"))
    with pytest.raises(SettingsError, match="nobody can come"):
        optimizer.welcome()


def test_a_saved_exchange_has_what_was_missed_before_it():
    """Who stops with a result that is not applied yet goes on with it, and with those that it brought along."""
    swarm, steps = LocalSwarm(2), 5

    def replica(peer):
        index, model = swarm.peers.index(peer), make_model()
        method = recipe("decoupled", inner_steps=2, fragments=1, delay=1, quorum=1, grace=0.1, keep=64)
        optimizer = LowCommunicationOptimizer(model, adamw(model), peer, method)
        for batch in batches(index, steps if index else 3 * steps):
            peer.advance(3.1 if index else 1.0)
            train(model, optimizer, [batch])
            saved = copy.deepcopy(optimizer.state_dict())  # waits for what is under way
            if index and saved["outer"].get("flight", {}).get("mixed", {}).get("missed"):
                seen.append(len(saved["outer"]["flight"]["mixed"]["missed"]))
            optimizer.load_state_dict(saved)
        optimizer.finish()
        return values_of(model)

    seen = []
    one, other = swarm.run(replica)
    assert seen
    assert torch.equal(one, other)

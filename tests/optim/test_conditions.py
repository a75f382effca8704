"""Training as it is: peers that differ, models with all that models have, steps that go wrong."""

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest
import torch
from torch import nn

from optim import (
    DiLoCo,
    GradientOptimizer,
    LocalSwarm,
    LowCommunicationOptimizer,
    MissedExchange,
    gradient_recipe,
    recipe,
)
from optim.mtdao import MultiTimescaleOptimizer, QuasiHyperbolicAdam
from optim.spsa import SpsaOptimizer
from protocol.channels import ChannelSettings
from protocol.coordinator import RoundTimes
from protocol.errors import PeerGone, ProtocolError, RoundAborted
from protocol.standalone import join_collective
from tests.optim.replicas import Flaky
from tests.optim.toys import adamw, batches, make_model, put, train, values_of


def indexed(swarm, replica):
    """What `replica(peer, index)` returns at each peer."""
    return swarm.run(lambda peer: replica(peer, swarm.peers.index(peer)))


def local_run(start, seed, steps, optimizer_of=adamw):
    """The parameters after so many local steps."""
    model = make_model()
    put(model, start)
    train(model, optimizer_of(model), batches(seed, steps))
    return values_of(model)


def test_peers_count_by_their_tokens_and_take_steps_by_their_speed():
    tokens, pace, steps = (8, 24), (1.0, 0.5), (6, 3)

    def replica(peer, index):
        model = make_model()
        method = recipe("paced", inner_steps=6, outer_lr=1.0, outer_momentum=0.0)
        optimizer = LowCommunicationOptimizer(
            model, adamw(model), peer, method, tokens_per_step=tokens[index], pace=lambda: pace[index]
        )
        train(model, optimizer, batches(index, steps[index]))
        assert optimizer.rounds == 1
        return values_of(model)

    one, other = indexed(LocalSwarm(2), replica)
    ends = [local_run(values_of(make_model()), index, steps[index]) for index in range(2)]
    work = [count * size for count, size in zip(steps, tokens, strict=True)]
    expected = (ends[0] * work[0] + ends[1] * work[1]) / sum(work)
    assert torch.equal(one, other)
    torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-6)


def test_accumulated_gradients_are_those_of_one_large_batch(alone):
    models = [make_model() for _ in range(2)]
    optimizers = [DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), alone, sync_every=2) for model in models]
    for inputs, targets in batches(1, 4):
        for model, optimizer, parts in zip(models, optimizers, (1, 4), strict=True):
            optimizer.zero_grad()
            for part in range(parts):
                loss = nn.functional.mse_loss(model(inputs[part::parts]), targets[part::parts])
                (loss / parts).backward()
            optimizer.step()
    assert optimizers[0].rounds == optimizers[1].rounds == 2
    torch.testing.assert_close(values_of(models[0]), values_of(models[1]), rtol=1e-5, atol=1e-6)


def test_gradients_are_clipped_and_pseudo_gradients_are_not(alone):
    model, reference = make_model(), make_model()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = DiLoCo(model, inner, alone, sync_every=5, outer_lr=1.0, outer_momentum=0.0)
    plain = torch.optim.SGD(reference.parameters(), lr=1.0)
    for inputs, targets in batches(1, 5):
        for each, stepper in ((model, optimizer), (reference, plain)):
            stepper.zero_grad()
            nn.functional.mse_loss(each(inputs), targets).backward()
            nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            stepper.step()
    assert optimizer.rounds == 1
    assert (values_of(model) - values_of(make_model())).norm() > 0.1
    torch.testing.assert_close(values_of(model), values_of(reference), rtol=1e-5, atol=1e-6)


def test_mixed_precision_computes_in_bf16_and_keeps_fp32():
    def replica(peer, index):
        model = make_model()
        optimizer = DiLoCo(model, adamw(model), peer, sync_every=2)
        for inputs, targets in batches(index, 4):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                predicted = model(inputs)
                assert predicted.dtype == torch.bfloat16
                loss = nn.functional.mse_loss(predicted.float(), targets)
            loss.backward()
            optimizer.step()
        assert optimizer.outer.parameters.dtype == torch.float32
        return values_of(model)

    one, other = indexed(LocalSwarm(2), replica)
    assert torch.equal(one, other)
    assert not torch.equal(one, one.bfloat16().float())


def test_a_step_that_overflows_at_one_peer_is_skipped_there_and_counts_less():
    swarm = LocalSwarm(2)

    def replica(peer, index):
        model = make_model()
        optimizer = DiLoCo(model, adamw(model), peer, sync_every=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for number, (inputs, targets) in enumerate(batches(index, 5)):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.mse_loss(model(inputs).float(), targets)
            scale = float("inf") if (index, number) == (1, 0) else 1.0
            scaler.scale(loss * scale).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.rounds == 2
        assert optimizer.local_steps == 1 - index
        return optimizer.outer.parameters

    one, other = indexed(swarm, replica)
    assert torch.equal(one, other)
    assert torch.isfinite(one).all()


@pytest.mark.parametrize("delay", [0, 1])
def test_a_loss_that_is_not_finite_is_healed_with_all_that_it_has_spoiled(delay):
    def replica(peer, index):
        model = make_model()
        inner = adamw(model)
        method = recipe("streaming", inner_steps=2, fragments=1, delay=delay, alpha=0.0)
        optimizer = LowCommunicationOptimizer(model, inner, peer, method)
        for number, (inputs, targets) in enumerate(batches(index, 8)):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            (loss * float("nan") if (index, number) == (1, 1) else loss).backward()
            optimizer.step()
        optimizer.finish()
        moments = [state["exp_avg"] for state in inner.state.values()]
        assert all(torch.isfinite(moment).all() for moment in moments)
        assert len(moments) == 4
        return values_of(model)

    one, other = indexed(LocalSwarm(2), replica)
    assert torch.isfinite(one).all()
    assert torch.equal(one, other)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.inside = make_model()
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))

    def forward(self, inputs):
        return self.inside(self.norm(inputs * self.table))


@pytest.mark.parametrize("method", ["diloco", "streaming", "noloco"])
def test_statistics_are_averaged_and_counters_take_the_largest(method):
    swarm = LocalSwarm(2)

    def replica(peer, index):
        model = Normed()
        with torch.no_grad():
            model.table.fill_(float(index))  # derived, not state
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = LowCommunicationOptimizer(
            model, inner, peer, recipe(method, inner_steps=2), tokens_per_step=1 + 2 * index
        )
        with torch.no_grad():
            model.norm.running_mean.fill_(float(index))
            model.norm.num_batches_tracked.fill_(10 * index)
        for _ in range(2):
            optimizer.step()
        optimizer.finish()
        assert model.norm.num_batches_tracked.item() == 10
        assert model.table.tolist() == [index] * 4
        assert model.mask.all()
        return model.norm.running_mean

    one, other = indexed(swarm, replica)
    # In the end all count alike; before, by their tokens.
    assert one.tolist() == other.tolist() == [0.5 if method == "noloco" else 0.75] * 4


def test_statistics_that_are_not_finite_or_do_not_fit_do_not_count():
    def replica(peer, index):
        model = Normed()
        optimizer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.0), peer, sync_every=1)
        with torch.no_grad():
            model.norm.running_var.fill_((1.0, float("nan"), 3.0)[index])
        optimizer.step()
        return model.norm.running_var

    for variance in indexed(LocalSwarm(3), replica):
        assert variance.tolist() == [2.0] * 4


def step_through(optimizer, count):
    """The numbers of the steps that an exception has left."""
    failed = []
    for step in range(count):
        try:
            optimizer.step()
        except PeerGone:
            failed.append(step)
    return failed


@pytest.mark.parametrize("method", ["diloco", "delayed"])
def test_an_exchange_takes_place_without_the_buffers_if_these_fail(alone, method):
    def run(swarm):
        model = Normed()
        optimizer = LowCommunicationOptimizer(model, moving(model), swarm, recipe(method, inner_steps=2))
        failed = step_through(optimizer, 6)
        optimizer.finish()
        return values_of(model), failed

    values, failed = run(Flaky(alone, "gather"))
    assert failed == [1]
    expected, none = run(alone)
    assert none == []
    assert torch.equal(values, expected)
    assert alone.weights == [2.0] * 6


class Late:
    """A collective in which others have had two operations before its second one."""

    def __init__(self, swarm):
        self.swarm, self.calls = swarm, 0

    def __getattr__(self, name):
        def call(*arguments, **options):
            outcome = getattr(self.swarm, name)(*arguments, **options)
            self.calls += 1
            return attrs.evolve(outcome, skipped=2) if self.calls == 2 else outcome

        return call


@pytest.mark.parametrize("method", ["diloco", "delayed"])
def test_who_has_missed_exchanges_is_warned(alone, method):
    model = make_model()
    optimizer = LowCommunicationOptimizer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Late(alone), recipe(method, inner_steps=1)
    )
    optimizer.step()
    with pytest.warns(MissedExchange, match="2 exchanges have taken place without this peer"):
        optimizer.step()
        optimizer.close()
    optimizer.step()
    optimizer.close()


def test_a_run_ends_with_its_parameters_also_if_its_buffers_fail(alone):
    model = Normed()
    optimizer = LowCommunicationOptimizer(model, moving(model), Flaky(alone, "gather"), recipe("eager", inner_steps=2))
    step_through(optimizer, 5)
    with pytest.raises(PeerGone):
        optimizer.finish()
    assert torch.equal(values_of(model), optimizer.outer.parameters)
    optimizer.finish()


def test_buffers_are_averaged_once_for_an_exchange_that_is_tried_again(alone):
    model, gathers = Normed(), Flaky(alone, "gather", failing=())
    optimizer = DiLoCo(model, moving(model), Flaky(gathers, failing=(1, 2)), sync_every=2)
    assert step_through(optimizer, 8) == [1, 2]
    assert optimizer.rounds == 3
    assert len(gathers.brought) == 3


def moving(model):
    """An inner optimizer whose steps all change something."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", ["gradient", "momenta", "perturbation"])
def test_statistics_are_averaged_whatever_the_optimizer_is(kind):
    def replica(peer, index):
        model = Normed()
        inner = moving(model)
        if kind == "gradient":
            optimizer = GradientOptimizer(model, inner, Flaky(peer, "gather"), gradient_recipe("data-parallel"))
        elif kind == "momenta":
            adam = QuasiHyperbolicAdam(model.parameters())
            optimizer = MultiTimescaleOptimizer(model, adam, Flaky(peer, "gather"), sync_every=1)
        else:
            optimizer = SpsaOptimizer(model, inner, Flaky(peer, "gather", failing=(3,)), seed=index)
        with torch.no_grad():
            model.norm.running_mean.fill_(float(index))
            model.norm.num_batches_tracked.fill_(10 * index)
        for step in range(2):
            if kind == "perturbation":
                optimizer.step(lambda: 1.0)
                continue
            with pytest.raises(PeerGone) if step == 0 else contextlib.nullcontext():
                optimizer.step()
            assert model.norm.num_batches_tracked.item() == (10 if step else 10 * index)
        if kind == "perturbation":
            with pytest.raises(PeerGone):
                optimizer.finish()
            optimizer.finish()
        assert model.norm.running_mean.tolist() == [0.5] * 4
        return values_of(model)

    one, other = indexed(LocalSwarm(2), replica)
    assert torch.equal(one, other)


def test_frozen_parameters_and_groups_with_rates_of_their_own():
    def replica(peer, index):
        model = make_model()
        model[2].bias.requires_grad_(False)
        groups = [{"params": [model[0].weight], "lr": 0.1, "weight_decay": 0.1}, {"params": [model[0].bias]}]
        optimizer = DiLoCo(model, torch.optim.AdamW(groups, lr=0.0, weight_decay=0.0), peer, sync_every=2)
        with torch.no_grad():
            model[2].bias.fill_(float(index))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.5])
        for batch in batches(index, 4):
            train(model, optimizer, [batch])
            schedule.step()
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.0]
        assert model[2].bias.item() == index
        return model

    start = make_model()
    one, other = indexed(LocalSwarm(2), replica)
    assert torch.equal(one[0].weight, other[0].weight)
    assert not torch.equal(one[0].weight, start[0].weight)
    assert torch.equal(one[0].bias, start[0].bias)  # its rate is zero
    assert torch.equal(one[2].weight, start[2].weight)  # nobody trains it


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.block = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.block(self.embedding(tokens)).tanh())


def test_tied_weights_are_in_one_fragment_and_stay_tied():
    swarm = LocalSwarm(2)
    models = {}
    for peer in swarm.peers:
        torch.manual_seed(0)
        models[peer] = Tied()

    def replica(peer, index):
        model = models[peer]
        method = recipe("streaming", inner_steps=4, fragments=2, delay=1, alpha=0.0)
        optimizer = LowCommunicationOptimizer(model, adamw(model), peer, method)
        assert optimizer.outer.parameters.shape == (24 + 16 + 4,)
        generator = torch.Generator().manual_seed(index)
        for step in range(8):
            tokens = torch.randint(6, (8, 2), generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens[:, 0]), tokens[:, 1]).backward()
            optimizer.step()
            if step == 4:
                model.load_state_dict(model.state_dict())
        optimizer.finish()
        assert model.head.weight is model.embedding.weight
        return values_of(model)

    one, other = swarm.run(lambda peer: replica(peer, swarm.peers.index(peer)))
    assert torch.equal(one, other)


def test_a_compiled_model_sees_what_was_exchanged_and_meets_one_that_is_not():
    def replica(peer, index):
        model = make_model()
        compiled = torch.compile(model, backend="eager", fullgraph=True) if index == 0 else model
        method = recipe("streaming", inner_steps=4, fragments=2, delay=0, alpha=0.0)
        optimizer = LowCommunicationOptimizer(compiled, adamw(compiled), peer, method)
        train(compiled, optimizer, batches(index, 8))
        optimizer.finish()
        inputs, _ = next(batches(9, 1))
        assert torch.equal(compiled(inputs), model(inputs))
        return values_of(model)

    one, other = indexed(LocalSwarm(2), replica)
    assert torch.equal(one, other)


@pytest.mark.parametrize("method", ["delayed", "eager", "streaming"])
def test_a_state_saved_during_an_exchange_continues_bit_for_bit(method, tmp_path):
    constants = {"fragments": 1} if method == "streaming" else {}
    steps, at = 12, 7  # one step after the exchange at 6 has begun

    def made(peer):
        model = make_model()
        return model, LowCommunicationOptimizer(model, adamw(model), peer, recipe(method, inner_steps=3, **constants))

    def whole(peer, index):
        model, optimizer = made(peer)
        train(model, optimizer, batches(index, steps))
        optimizer.finish()
        return values_of(model)

    def resumed(peer, index):
        model, optimizer = made(peer)
        stream = list(batches(index, steps))
        train(model, optimizer, stream[: at - 1])
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / f"{index}.pt")
        assert "flight" in optimizer.state_dict()["outer"]
        optimizer.close()
        model, optimizer = made(peer)
        saved = torch.load(tmp_path / f"{index}.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train(model, optimizer, stream[at - 1 :])
        optimizer.finish()
        return values_of(model)

    for one, other in zip(indexed(LocalSwarm(2), whole), indexed(LocalSwarm(2), resumed), strict=True):
        assert torch.equal(one, other)


def test_in_a_notebook_whose_event_loop_runs():
    async def cell():
        def replica(peer, index):
            model = make_model()
            train(model, DiLoCo(model, adamw(model), peer, sync_every=2), batches(index, 4))
            return values_of(model)

        one, other = indexed(LocalSwarm(2), replica)
        with join_collective("a notebook") as swarm:
            model = make_model()
            optimizer = DiLoCo(model, adamw(model), swarm, sync_every=2)
            train(model, optimizer, batches(1, 4))
            assert optimizer.rounds == 2
        return torch.equal(one, other)

    assert asyncio.run(cell())


@pytest.mark.parametrize("method", ["delayed", "eager", "co2"])
def test_what_was_done_while_a_result_was_on_its_way_is_not_lost_when_others_are_welcomed(method):
    """Local steps went on from the outer parameters, and are what the next exchange brings, newcomers or not."""

    def replica(peer, index):
        model, swarm = make_model(), Flaky(peer, failing=())
        optimizer = LowCommunicationOptimizer(model, adamw(model), swarm, recipe(method, inner_steps=4))
        train(model, optimizer, batches(index, 10))
        before = values_of(model) - optimizer.outer.parameters
        optimizer.welcome()
        torch.testing.assert_close(values_of(model) - optimizer.outer.parameters, before)
        train(model, optimizer, batches(index + 2, 2))
        optimizer.close()
        brought, weight = swarm.brought[-1]
        assert weight == 4.0
        assert torch.allclose(brought, -before, atol=0.03)
        return optimizer.rounds

    assert indexed(LocalSwarm(2), replica) == [2, 2]


def test_work_that_waits_for_its_fragments_turn_comes_along_to_anothers_state():
    """A peer has missed an exchange: what it takes over is the state, with all that it has not exchanged yet."""
    swarm = LocalSwarm(2)

    def replica(peer, index):
        model, line = make_model(), Flaky(peer, failing=())
        method = recipe("streaming", inner_steps=4, fragments=2, delay=0, alpha=0.0)
        optimizer = LowCommunicationOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.01), line, method)
        train(model, optimizer, batches(index, 4))
        if index:  # as if another had not been there
            optimizer._replica.history = bytes(16)
            optimizer._replica.rounds = 0
        drift = values_of(model) - optimizer.outer.parameters
        assert drift.any()
        optimizer.welcome()
        torch.testing.assert_close(values_of(model) - optimizer.outer.parameters, drift)
        train(model, optimizer, batches(index, 2))
        return line.brought[-1][1]

    assert indexed(swarm, replica) == [6.0, 6.0]


def test_a_state_that_is_not_finite_is_not_taken():
    def replica(peer, index):
        model = make_model()
        optimizer = DiLoCo(model, adamw(model), peer, sync_every=2)
        if index == 0:
            train(model, optimizer, batches(index, 1))
            optimizer._replica.rounds = 1
            optimizer._replica.outer.parameters[0] = float("nan")
        with pytest.raises(ProtocolError, match="not finite"):
            optimizer.welcome()
        return optimizer.rounds

    assert indexed(LocalSwarm(2), replica) == [1, 0]


def test_newcomers_and_peers_that_missed_an_exchange_go_on_with_the_others():
    settings = ChannelSettings(times=RoundTimes(grace=2.0, slack=0.5))
    there = threading.Barrier(3, timeout=60)
    come, missed = threading.Event(), threading.Event()

    class Absent:
        """Misses one exchange: the others go on without it."""

        def __init__(self, swarm):
            self._swarm, self.misses = swarm, False

        def all_reduce(self, values, weight=1.0, **options):
            if self.misses:
                self.misses = False
                missed.wait(30)
                raise RoundAborted("the line was down")
            self.weight = weight
            return self._swarm.all_reduce(values, weight, **options)

        def __getattr__(self, name):
            return getattr(self._swarm, name)

    def member(swarm, seed):
        model, stream = make_model(), batches(seed, 1000)
        line = Absent(swarm)
        optimizer = DiLoCo(model, adamw(model), line, sync_every=2)
        members = 2
        while members < 3:  # until the newcomer is here
            train(model, optimizer, [next(stream), next(stream)])
            members = optimizer.welcome()
            come.set()
        there.wait()
        line.misses = seed == 1
        with contextlib.suppress(RoundAborted):
            train(model, optimizer, [next(stream), next(stream)])
        missed.set()
        rounds, drift = optimizer.rounds, values_of(model) - optimizer.outer.parameters
        assert optimizer.welcome() == 3
        assert optimizer.rounds == rounds + (seed == 1)
        assert drift.any() == (seed == 1)
        torch.testing.assert_close(values_of(model), optimizer.outer.parameters + drift, rtol=1e-5, atol=1e-6)
        train(model, optimizer, [next(stream), next(stream)] if seed != 1 else [next(stream)])
        assert seed != 1 or line.weight == 3.0  # what it had done before counts as well
        return values_of(model), optimizer.rounds

    def newcomer(first):
        come.wait(60)
        with join_collective("newcomers", peers=[first], settings=settings) as swarm:
            swarm.wait_for(3, timeout=30)
            model, stream = make_model(), batches(3, 1000)
            put(model, torch.zeros(49))
            optimizer = DiLoCo(model, adamw(model), swarm, sync_every=2)
            optimizer.join(timeout=60)
            there.wait()
            train(model, optimizer, [next(stream), next(stream)])
            assert optimizer.welcome() == 3
            train(model, optimizer, [next(stream), next(stream)])
            return values_of(model), optimizer.rounds

    with (
        join_collective("newcomers", settings=settings) as one,
        join_collective("newcomers", peers=[one.address], settings=settings) as other,
        ThreadPoolExecutor(3) as threads,
    ):
        one.wait_for(2, timeout=30)
        lives = [
            threads.submit(member, one, 1),
            threads.submit(member, other, 2),
            threads.submit(newcomer, one.address),
        ]
        (first, rounds), *others = [life.result() for life in lives]
    for values, number in others:
        assert torch.equal(values, first)
        assert number == rounds

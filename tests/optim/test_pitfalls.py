"""What has gone wrong in other implementations: see docs/pitfalls.md."""

import itertools
import math

import attrs
import pytest
import torch
from torch import nn

from optim import DiLoCo, LocalSwarm, LowCommunicationOptimizer, check_start, recipe
from optim.feedback import ErrorFeedback
from optim.flat import Slice
from optim.local import LocalPeer
from optim.merges import Blend
from optim.mixers import GatheredMean
from optim.policies import QuadraticSteps
from optim.sender import Sender, carry_out, tag_of
from optim.slots import Local, Mixed, Moment, Work
from optim.spsa import SpsaOptimizer
from optim.state import OuterState
from protocol.collective import Window
from protocol.errors import PeerGone, SettingsError
from tests.optim.replicas import Flaky
from tests.optim.toys import adamw, batches, make_model, put, train, values_of


def test_peers_with_different_values_find_out():
    swarm = LocalSwarm(3)

    def replica(peer):
        model, index = make_model(), swarm.peers.index(peer)
        if index == 2:
            put(model, values_of(model) + 1e-6)
        with pytest.raises(SettingsError, match="the values of") as caught:
            check_start(model, peer, recipe("diloco"))
        return str(caught.value)

    told = swarm.run(replica)
    assert swarm.peers[2].peer_id.short in told[0]
    assert all(swarm.peers[index].peer_id.short in told[2] for index in (0, 1))


def test_peers_with_different_recipes_or_tensors_find_out():
    swarm = LocalSwarm(2)

    def other_recipe(peer):
        momentum = 0.5 + 0.4 * swarm.peers.index(peer)
        check_start(make_model(), peer, recipe("diloco", outer_momentum=momentum))

    def other_order(peer):
        parts = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
        names = sorted(parts, reverse=bool(swarm.peers.index(peer)))
        check_start(nn.ModuleDict({name: parts[name] for name in names}), peer, recipe("diloco"))

    with pytest.raises(SettingsError, match="the recipes of"):
        swarm.run(other_recipe)
    with pytest.raises(SettingsError, match="the models of"):
        swarm.run(other_order)


def test_peers_that_begin_alike_go_on():
    LocalSwarm(2).run(lambda peer: check_start(make_model(), peer, recipe("streaming")))


@pytest.mark.parametrize("H", [1, 3, 4])
def test_a_round_has_as_many_steps_as_it_says_also_the_first(alone, H):
    model = make_model()
    optimizer = DiLoCo(model, adamw(model), alone, sync_every=H)
    rounds = []
    for batch in batches(0, 13):
        train(model, optimizer, [batch])
        rounds.append(optimizer.rounds)
    assert rounds == [step // H for step in range(1, 14)]
    assert alone.weights == [float(H)] * (13 // H)


def test_an_exchange_leaves_no_gradients_to_the_inner_optimizer(alone):
    model = make_model()
    optimizer = DiLoCo(model, adamw(model), alone, sync_every=1)
    inputs, targets = next(batches(0, 1))
    nn.functional.mse_loss(model(inputs), targets).backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.step()
    assert optimizer.rounds == 1
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_never_to_synchronise_is_refused():
    with pytest.raises(ValueError, match="must be"):
        Blend(1.0)


def test_peers_at_different_fragments_do_not_mix():
    layout = [Slice(str(index), torch.Size([3]), 3 * index, 3 * index + 3) for index in range(2)]
    swarm = LocalSwarm(2)

    def replica(peer):
        index = swarm.peers.index(peer)
        peer.advance(float(index))
        window = Window(quorum=1, grace=0.5)
        tag = tag_of(layout[index : index + 1], layout)
        reduced = peer.all_reduce(torch.full((3,), float(index)), tag=tag, window=window)
        return reduced.mean[0].item(), len(reduced.members)

    assert swarm.run(replica) == [(0.0, 1), (1.0, 1)]


def test_what_was_left_out_is_kept_if_an_exchange_fails_and_counts_once():
    def run(swarm, attempts):
        model = make_model()
        method = recipe("sparseloco", inner_steps=2, k=2, decay=1.0)
        optimizer = LowCommunicationOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.01), swarm, method)
        for batch in batches(0, 8):
            try:
                train(model, optimizer, [batch])
            except PeerGone:
                for _ in range(attempts):
                    optimizer.synchronize()
        return values_of(model)

    plain = run(LocalSwarm(1).peers[0], 0)
    flaky = run(Flaky(LocalSwarm(1).peers[0], "gather", failing=range(1, 100, 2)), 1)
    assert torch.equal(flaky, plain)


def test_who_goes_on_from_anothers_state_forgets_what_it_has_left_out():
    sender = Sender(recipe("sparseloco", k=1))
    layout = (Slice("a", torch.Size([4]), 0, 4),)
    state = OuterState(torch.zeros(4))
    local = Local(state=state, anchor=torch.zeros(4), inner=torch.tensor([-4.0, -3.0, -2.0, -1.0]), lr=0.1)
    (peer,) = LocalSwarm(1).peers
    message = sender.prepare(local, Work(1, 1), layout, 1)
    sender.sent(message, carry_out(peer, sender.mix(message)))
    assert not torch.equal(sender.prepare(local, Work(1, 1), layout, 2).values, message.values)
    sender.forget()
    assert torch.equal(sender.prepare(local, Work(1, 1), layout, 2).values, message.values)


def test_what_a_result_does_not_have_of_ours_is_sent_again():
    class Deaf(LocalPeer):
        """Its second all-reduce is made without it."""

        def all_reduce(self, values, weight=1.0, **options):
            seen.append((values.clone(), weight))
            if len(seen) != 2:
                return super().all_reduce(values, weight, **options)
            reduced = super().all_reduce(torch.full_like(values, 0.01), 1.0, **options)
            return attrs.evolve(reduced, counted=False)

    seen = []
    peer = Deaf(swarm := LocalSwarm(1), swarm.peers[0].peer_id, "fp32")
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = DiLoCo(model, inner, peer, sync_every=2, outer_lr=1.0, outer_momentum=0.0)
    data = list(batches(0, 6))
    train(model, optimizer, data[:4])
    unheard, weight = seen[1]
    assert weight == 2.0
    torch.testing.assert_close(optimizer.outer.parameters - values_of(model), unheard)
    train(model, optimizer, data[4:])
    assert seen[2][1] == 4.0
    assert seen[2][0].norm() > unheard.norm()


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        (recipe("streaming", inner_steps=3, fragments=1, delay=1), [3.0, 6.0]),
        (recipe("delayed", inner_steps=3), [3.0, 4.0]),
    ],
    ids=["streaming", "delayed"],
)
def test_what_a_failed_exchange_was_to_bring_counts_in_the_next_if_it_is_still_there(alone, method, weights):
    """With `delayed`, local steps went on from the outer parameters: what was sent is lost, and must not count."""
    swarm, model = Flaky(alone), make_model()
    optimizer = LowCommunicationOptimizer(model, adamw(model), swarm, method)
    start, failures = values_of(model), 0
    for batch in batches(0, 7 if method.policy.delay > 1 else 6):
        try:
            train(model, optimizer, [batch])
        except PeerGone:
            failures += 1
    done = start - values_of(model)  # where local steps go on
    optimizer.finish()
    assert failures == 1
    assert [weight for _, weight in swarm.brought] == weights
    if method.policy.delay == 1:
        torch.testing.assert_close(swarm.brought[1][0], done)


def test_an_outlier_counts_no_more_than_the_median():
    class Plain:
        """Values as they are."""

        def encode(self, values, layout, round):
            return values.numpy().tobytes()

        def is_sound(self, message, layout):
            return True

        def decode(self, message, layout, round):
            return torch.frombuffer(bytearray(message), dtype=torch.float32)

        def combine(self, messages, layout, round):
            return sum(self.decode(message, layout, round) * share for message, share in messages)

    layout = (Slice("a", torch.Size([2]), 0, 2),)
    values = [torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0]), torch.tensor([600.0, 800.0])]
    swarm = LocalSwarm(3)

    def replica(peer):
        mixer = GatheredMean(Plain(), capped=True)
        return carry_out(peer, mixer.mix(values[swarm.peers.index(peer)], 1.0, layout, 1, {})).mean

    results = swarm.run(replica)
    torch.testing.assert_close(results[0], (values[0] + values[1] + values[2] / 200) / 3)
    assert torch.equal(results[0], results[1])


def test_the_outer_step_takes_the_pseudo_gradient_however_large(alone):
    model = make_model()
    optimizer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=1.0), alone, sync_every=1, outer_momentum=0.0)
    before = values_of(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e6)
    optimizer.step()
    torch.testing.assert_close(values_of(model), before - 0.7e6)


def test_without_progress_a_delayed_step_is_one_of_momentum_only():
    method = recipe("delayed", outer_lr=0.2, outer_momentum=0.5)
    nothing = torch.zeros(3)
    mixed = Mixed(mean=nothing, own=nothing, members=(), share=1.0)
    still = method.outer.init(torch.ones(3))
    moved = method.outer.step(still, mixed, Moment(round=1, lr=0.1), nothing)
    assert torch.equal(moved.parameters, still.parameters)
    moving = OuterState(torch.ones(3), {"momentum": torch.full((3,), 0.4)})
    moved = method.outer.step(moving, mixed, Moment(round=1, lr=0.1), nothing)
    torch.testing.assert_close(moved.parameters, torch.full((3,), 1 - 0.2 * 0.5 * 0.5 * 0.4))


def test_what_was_sent_and_what_is_left_are_what_there_was():
    feedback, memory = ErrorFeedback(), {}
    inputs = [torch.randn(50, generator=torch.Generator().manual_seed(seed)) for seed in range(20)]
    total = torch.zeros(50)
    for values in inputs:
        intended = feedback.before(values, memory)
        sent = torch.where(intended.abs() > 0.8, intended.bfloat16().float(), 0.0)
        memory = feedback.after(intended, sent, memory)
        total += sent
    torch.testing.assert_close(total + memory["error"], sum(inputs), rtol=1e-5, atol=1e-5)


def test_exchanges_get_rarer_along_a_cosine():
    policy = QuadraticSteps(base=4, alpha=0.02)
    rates = [4e-3 * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / 400))) for step in range(400)]
    steps = [policy.steps(Moment(round=2, lr=rate)) for rate in rates]
    assert all(one <= other for one, other in itertools.pairwise(steps))
    assert steps[-1] > 100
    assert [policy.steps(Moment(round=2, lr=rates[-1], total=left)) for left in (50, 1, 0)] == [50, 1, 1]


def by_lambda(optimizer, model, steps):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1e-4) / steps))


def by_sequence(optimizer, model, steps):
    rising = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-5, total_iters=steps)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000, eta_min=0.009)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [rising, falling], milestones=[steps])


def by_cycle(optimizer, model, steps):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=100, pct_start=steps / 100)


class ByHand:
    def __init__(self, optimizer, model, steps):
        self.optimizer, self.taken, self.steps = optimizer, -1, steps
        self.step()

    def step(self):
        self.taken += 1
        self.optimizer.param_groups[0]["lr"] = 0.01 * min(1.0, (self.taken + 1e-4) / self.steps)


@pytest.mark.parametrize("schedule", [by_lambda, by_sequence, by_cycle, ByHand])
def test_exchanges_are_as_frequent_as_at_the_peak_while_the_rate_is_rising(alone, schedule):
    """From a rate next to zero there would follow a first round of millions of steps."""
    model = make_model()
    method = recipe("quadratic", base_steps=2, alpha=0.02)  # (0.02 / 0.01)² = 4
    optimizer = LowCommunicationOptimizer(model, adamw(model), alone, method)
    rates = schedule(optimizer, model, 10)
    saved = None
    for number, batch in enumerate(batches(0, 12), 1):
        train(model, optimizer, [batch])
        rates.step()
        assert optimizer.rounds == number // 4
        if number == 4:
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved)
    assert alone.weights == [4.0] * 3
    optimizer.param_groups[0]["lr"] = 0.002  # (0.02 / 0.002)² = 100
    train(model, optimizer, batches(1, 99))
    assert optimizer.rounds == 3
    train(model, optimizer, batches(1, 1))
    assert optimizer.rounds == 4


def test_a_newcomer_takes_a_rate_that_has_fallen_for_what_it_is():
    swarm = LocalSwarm(2)

    def replica(peer):
        model, index = make_model(), swarm.peers.index(peer)
        optimizer = LowCommunicationOptimizer(model, adamw(model), peer, recipe("quadratic", base_steps=1, alpha=0.02))
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        if index == 0:
            optimizer.step()
            optimizer._replica.rounds = 1
        optimizer.welcome()
        optimizer.param_groups[0]["lr"] = 0.005
        train(model, optimizer, batches(index, 15 + index))
        return optimizer.rounds

    assert swarm.run(replica) == [2, 2]


def test_a_log_of_scalars_makes_the_same_bits_again():
    class Log:
        """Passes on what others have said, or says it again."""

        def __init__(self, peer=None, said=()):
            self.peer, self.said = peer, list(said)

        def gather(self, block, **options):
            if self.peer is None:
                return self.said.pop(0)
            self.said.append(self.peer.gather(block, **options))
            return self.said[-1]

    def optimizer_of(model, swarm, seed):
        return SpsaOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.005), swarm, seed=seed)

    swarm = LocalSwarm(2)

    def replica(peer):
        log, model, index = Log(peer), make_model(), swarm.peers.index(peer)
        optimizer = optimizer_of(model, log, index)
        for x, y in batches(index, 30):
            optimizer.step(lambda x=x, y=y: nn.functional.mse_loss(model(x), y))
        return values_of(model), log.said

    (values, said), _ = swarm.run(replica)
    model = make_model()
    again = optimizer_of(model, Log(said=said), 7)
    for _ in range(30):
        again.step(lambda: 0.0)
    assert torch.equal(values_of(model), values)

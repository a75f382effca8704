"""A stage's server: what it computes, what it counts, and what it refuses."""

import attrs
import pytest
import torch
from torch import nn

from optim.swarm import cut, sequential
from optim.swarm.arrivals import Bounds
from optim.swarm.messages import Request, Withdraw
from protocol.errors import Overloaded, ProtocolError, RequestRefused, SettingsError
from tests.optim.swarm.toys import PACKER, perceptron_chain, sample, serve, squared, text_batch, transformer_chain

STAGES, MICROBATCHES = 3, 4


@pytest.fixture
def server():
    """Of the middle stage of a transformer."""
    return serve(cut(transformer_chain(), STAGES)[1], MICROBATCHES)


def activations(seed=0, samples=2):
    return torch.randn(samples, 12, 16, generator=torch.Generator().manual_seed(seed))


def forward(number=0, **options):
    return Request(kind="forward", step=0, number=number, inputs=PACKER.pack(activations(number), "fp32"), **options)


def backward(number=0, *, count=True, gradient=None, **options):
    gradient = activations(100 + number) if gradient is None else gradient
    inputs, packed = PACKER.pack(activations(number), "fp32"), PACKER.pack(gradient, "fp32")
    return Request(kind="backward", step=0, number=number, inputs=inputs, gradient=packed, count=count, **options)


def serve_all(server, *requests, now=0.0):
    """Everything that can be done of these, by the places of the requests."""
    for place, request in enumerate(requests):
        server.submit(place, request, now)
    answers = {}
    while (batch := server.take(now)) is not None:
        answers |= dict(server.finish(batch, server.compute(batch)))
    return answers


def sums(server):
    return server.contribution().values * server.contribution().weight


def test_forward_gives_the_stages_outputs_and_counts_nothing(server):
    answer = serve_all(server, forward())[0]
    assert torch.equal(PACKER.unpack(answer.values), server.stage(activations()).detach())
    assert not answer.counted
    assert not server.ledger


def test_backward_gives_the_gradient_of_the_inputs_and_counts(server):
    inputs = activations().requires_grad_()
    server.stage(inputs).backward(activations(100))
    expected = torch.cat([parameter.grad.flatten() for parameter in server.stage.parameters()])
    answer = serve_all(server, backward())[0]
    assert torch.equal(PACKER.unpack(answer.values), inputs.grad)
    assert answer.counted
    assert server.ledger == {0: 2}
    torch.testing.assert_close(sums(server), expected)


def test_a_repeated_request_is_answered_again_and_counted_once(server):
    first = serve_all(server, backward())[0]
    before = sums(server)
    again = serve_all(server, backward(), backward(count=False))
    assert [each.values.data for each in again.values()] == [first.values.data] * 2
    assert again[0].counted
    assert torch.equal(sums(server), before)
    assert server.ledger == {0: 2}


def test_the_same_request_twice_in_the_queue_is_counted_once(server):
    answers = serve_all(server, backward(), backward())
    assert [answer.counted for answer in answers.values()] == [True, True]
    assert torch.equal(sums(server), sums_of_fresh(backward()))


def sums_of_fresh(*requests):
    fresh = serve(cut(transformer_chain(), STAGES)[1], MICROBATCHES, bounds=Bounds(batch=1))
    serve_all(fresh, *requests)
    return sums(fresh)


def test_without_counting_nothing_is_added(server):
    answer = serve_all(server, backward(count=False))[0]
    assert answer.values is not None
    assert not answer.counted
    assert server.contribution().weight == 0
    assert not server.contribution().values.any()


def test_requests_of_a_kind_are_computed_together_up_to_the_bound(server):
    for number in range(3):
        server.submit(number, backward(number), 0.0)
    server.submit(3, forward(3), 0.0)
    batch = server.take(0.0)
    assert [each.ticket for each in batch.arrived] == [0, 1, 2]
    answers = server.compute(batch)
    server.finish(batch, answers)
    alone = serve(cut(transformer_chain(), STAGES)[1], MICROBATCHES, bounds=Bounds(batch=1))
    separately = serve_all(alone, *map(backward, range(3)))
    for number in range(3):
        values = PACKER.unpack(answers[number].values), PACKER.unpack(separately[number].values)
        torch.testing.assert_close(*values)
    torch.testing.assert_close(sums(server), sums(alone))


def test_a_batch_has_no_more_samples_of_its_kind_than_are_asked_for(server):
    for number in range(4):
        server.submit(number, forward(number), 0.0)  # two samples
    for most, tickets in (({"forward": 5.9, "backward": 1.0}, [0, 1]), ({"forward": 0.0}, [2]), ({}, [3])):
        batch = server.take(0.0, most)
        assert [each.ticket for each in batch.arrived] == tickets
        server.finish(batch, server.compute(batch))


def test_the_last_stage_answers_with_losses(server):
    last = serve(cut(transformer_chain(), STAGES)[2], MICROBATCHES)
    _, targets = text_batch(0, 0)
    packed = PACKER.pack(targets, "tokens")
    request = attrs.evolve(backward(), gradient=None, targets=packed)
    answers = serve_all(last, request, attrs.evolve(forward(1), targets=packed))
    expected = last.stage(activations(), targets).detach()
    torch.testing.assert_close(PACKER.unpack(answers[0].losses), expected)
    assert PACKER.unpack(answers[1].values).shape == (2,)


def test_the_first_stage_has_no_gradient_of_tokens():
    first = serve(cut(transformer_chain(), STAGES)[0], MICROBATCHES)
    tokens = sample(text_batch(0, 0)).tokens
    answer = serve_all(first, attrs.evolve(backward(), inputs=tokens))[0]
    assert answer.values is None
    assert answer.counted and answer.finite


def test_a_microbatch_that_is_not_finite_is_void_and_spoils_no_other(server):
    linear = serve(cut(sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), squared), 2)[0], MICROBATCHES)
    payloads = [PACKER.pack(torch.full((2, 4), value), "fp32") for value in (1.0, 1e30, 3.0)]
    answers = serve_all(
        linear,
        *(attrs.evolve(backward(place), inputs=each, gradient=each) for place, each in enumerate(payloads)),
    )
    assert [answers[place].finite for place in range(3)] == [True, False, True]
    assert linear.ledger == {0: 2, 1: 0, 2: 2}
    assert sums(linear).tolist() == [2.0 * (1 + 9)] * 16 + [2.0 * (1 + 3)] * 4


def test_what_is_said_to_be_void_is_counted_with_no_samples(server):
    answer = serve_all(server, Request(kind="void", step=0, number=3))[0]
    assert answer.counted
    assert server.ledger == {3: 0}
    assert server.contribution().weight == 0


@pytest.mark.parametrize(("step", "code"), [(0, "stale"), (2, "early")])
def test_other_steps_are_refused(server, step, code):
    server.step = 1
    with pytest.raises(RequestRefused) as refusal:
        server.submit(0, attrs.evolve(forward(), step=step), 0.0)
    assert refusal.value.code == code


@pytest.mark.parametrize(
    "changes",
    [
        {"number": MICROBATCHES},
        {"inputs": None},
        {"gradient": None},
        {"targets": PACKER.pack(torch.ones(2, 12), "tokens")},
    ],
)
def test_requests_without_sense_are_refused(server, changes):
    with pytest.raises(ProtocolError):
        server.submit(0, attrs.evolve(backward(), **changes), 0.0)


@pytest.mark.parametrize(
    "request_",
    [attrs.evolve(forward(), inputs=PACKER.pack(torch.ones(2, 12, 17), "fp32")), backward(gradient=torch.ones(2, 3))],
)
def test_what_does_not_fit_the_stage_is_an_error_and_changes_nothing(server, request_):
    server.submit(0, request_, 0.0)
    batch = server.take(0.0)
    ((_, answer),) = server.finish(batch, server.compute(batch))
    assert isinstance(answer, ProtocolError)
    assert not server.ledger
    assert not server.busy


@pytest.mark.parametrize("targets", [torch.full((2, 12), 300), torch.ones(2, 5), torch.ones(2)])
def test_what_does_not_fit_spoils_no_other_request(targets):
    last = serve(cut(transformer_chain(), 2)[1], MICROBATCHES)
    last.stage.load(last.stage.model.state_dict())
    good = torch.ones(2, 12)
    for number, each in enumerate([good, targets, good]):
        request = Request(
            kind="backward",
            step=0,
            number=number,
            inputs=PACKER.pack(activations(), "fp32"),
            targets=PACKER.pack(each, "tokens"),
            count=True,
        )
        last.submit(number, request, 0.0)
    answers = {}
    while (batch := last.take(0.0)) is not None:
        answers |= dict(last.finish(batch, last.compute(batch)))
    assert [isinstance(answers[number], ProtocolError) for number in range(3)] == [False, True, False]
    assert last.ledger == {0: 2, 2: 2}


def test_there_is_a_bound_on_what_waits(server):
    size = forward().size
    small = serve(server.stage, MICROBATCHES, bounds=Bounds(requests=3, size=2 * size))
    small.submit(0, forward(0), 0.0)
    small.submit(1, forward(1), 0.0)
    with pytest.raises(Overloaded):
        small.submit(2, forward(2), 0.0)
    small.finish(batch := small.take(0.0), small.compute(batch))
    small.submit(2, forward(2), 0.0)


def test_what_nobody_waits_for_is_not_begun(server):
    server.submit("gone", forward(0), 0.0)
    server.submit("late", forward(1, patience=1.0), 0.0)
    server.submit("there", forward(2, patience=5.0), 0.0)
    server.arrivals.forget(lambda ticket: ticket == "gone")
    assert [each.ticket for each in server.take(2.0).arrived] == ["there"]
    assert [each.ticket for each in server.arrivals.expired(2.0)] == ["late"]
    assert len(server.arrivals) == 0


def test_what_waits_can_be_withdrawn(server):
    server.submit(0, backward(), 0.0)
    assert not server.withdraw(Withdraw(step=0, number=0)).counted
    assert server.take(0.0) is None


def test_what_is_begun_or_done_cannot_be_withdrawn(server):
    server.submit(0, backward(), 0.0)
    batch = server.take(0.0)
    assert server.withdraw(Withdraw(step=0, number=0)).counted
    server.finish(batch, server.compute(batch))
    assert server.withdraw(Withdraw(step=0, number=0)).counted


def test_a_forward_pass_that_is_under_way_is_no_counting(server):
    server.submit(0, forward(), 0.0)
    server.take(0.0)
    assert not server.withdraw(Withdraw(step=0, number=0)).counted


def test_a_frozen_server_counts_nothing_more_and_still_computes(server):
    serve_all(server, backward(0))
    assert server.freeze() == {0: 2}
    answers = serve_all(server, backward(0), backward(1), forward(2))
    assert set(answers) == {0, 2}
    server.thaw(attempt=1, keep=True)
    assert set(serve_all(server)) == {1}
    assert server.ledger == {0: 2, 1: 2}
    assert server.attempt == 1


def test_a_sum_that_does_not_count_is_dropped(server):
    serve_all(server, backward(0))
    server.freeze()
    server.thaw(attempt=1, keep=False)
    assert not server.ledger
    serve_all(server, backward(1))
    assert torch.equal(sums(server), sums_of_fresh(backward(1)))


def test_once_settled_a_stage_has_counted_everything(server):
    serve_all(server, backward(0))
    server.freeze()
    server.settled(server.contribution().values)
    answer = serve_all(server, backward(1))[0]
    assert answer.counted and answer.values is not None
    assert server.withdraw(Withdraw(step=0, number=2)).counted
    assert not server.ledger


def test_the_optimizer_steps_with_the_mean_and_forgets_it(server):
    before = server.snapshot()
    serve_all(server, backward(0), backward(1))
    server.submit("old", forward(3), 0.0)
    server.freeze()
    mean = server.contribution().values
    server.settled(mean)
    (outdated,) = server.advance()
    assert outdated.ticket == "old"
    assert (server.step, server.phase, server.ledger) == (1, "open", {})

    other = serve(cut(transformer_chain(), STAGES)[1], MICROBATCHES)
    gradients = torch.split(mean, [parameter.numel() for parameter in other.stage.parameters()])
    for parameter, gradient in zip(other.stage.parameters(), gradients, strict=True):
        parameter.grad = gradient.view(parameter.shape)
    other.optimizer.step()
    after = server.snapshot().model
    assert all(torch.equal(values, after[name]) for name, values in other.stage.state().items())
    assert any(not torch.equal(values, after[name]) for name, values in before.model.items())


def test_a_newcomer_goes_on_like_the_member_whose_state_it_has(server):
    def step(some):
        serve_all(some, attrs.evolve(backward(1), step=some.step))
        some.freeze()
        some.settled(some.contribution().values)
        some.advance()

    step(server)
    other = serve(cut(transformer_chain(seed=9), STAGES)[1], MICROBATCHES)
    other.restore(server.snapshot())
    step(server)
    step(other)
    for theirs, ours in zip(other.snapshot().model.values(), server.snapshot().model.values(), strict=True):
        assert torch.equal(theirs, ours)


def test_a_newcomer_that_comes_between_settlement_and_step_steps_too(server):
    serve_all(server, backward(0))
    server.freeze()
    server.settled(server.contribution().values)
    other = serve(cut(transformer_chain(seed=9), STAGES)[1], MICROBATCHES)
    other.restore(server.snapshot())
    server.advance()
    other.advance()
    for theirs, ours in zip(other.snapshot().model.values(), server.snapshot().model.values(), strict=True):
        assert torch.equal(theirs, ours)


def test_the_state_of_another_model_is_refused(server):
    with pytest.raises(SettingsError):
        server.restore(serve(cut(perceptron_chain(), 1)[0], MICROBATCHES).snapshot())

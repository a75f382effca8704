"""The parts of recipes: equations, published vectors, and the same bits as NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.merges import Blend, Replace
from optim.outers import Nesterov
from optim.payloads import PseudoGradient
from optim.policies import FixedSteps, PacedSteps, QuadraticSteps
from optim.slots import Local, Mixed, Moment, Work
from optim.state import OuterState
from optim.weightings import ByTokens, ByTokensPerStep, Equal
from protocol.errors import SettingsError


def random_flat(seed, scale=1.0, length=4099):
    return torch.randn(length, generator=torch.Generator().manual_seed(seed)) * scale


def step(outer, state, mean):
    mixed = Mixed(mean=mean, own=mean, members=(), share=1.0)
    return outer.step(state, mixed, Moment(round=1, lr=0.1), mean)


def taken(payload, anchor, inner):
    values, memory = payload.take(Local(state=OuterState(anchor), anchor=anchor, inner=inner, lr=0.1), {})
    assert not memory
    return values


def numpy_nesterov(parameters, momentum, gradient, lr, mu):
    lr, mu = np.float32(lr), np.float32(mu)
    momentum = mu * momentum + gradient
    return parameters - lr * (gradient + mu * momentum), momentum


def test_nesterov_follows_the_published_vector():
    outer = Nesterov(lr=0.7, momentum=0.9)
    state = outer.init(torch.tensor([1.0]))
    seen = []
    for _ in range(3):
        state = step(outer, state, torch.tensor([0.5]))
        seen += [state.buffers["momentum"].item(), state.parameters.item()]
    assert seen == pytest.approx([0.5, 0.335, 0.95, -0.6135, 1.355, -1.81715])


def test_nesterov_is_the_one_of_torch():
    outer = Nesterov(lr=0.7, momentum=0.9)
    state = outer.init(random_flat(0))
    parameter = torch.nn.Parameter(state.parameters.clone())
    reference = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for round_ in range(5):
        parameter.grad = random_flat(round_ + 1, 0.1)
        state = step(outer, state, parameter.grad.clone())
        reference.step()
    torch.testing.assert_close(state.parameters, parameter.detach(), rtol=1e-5, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([1e-40, 1e-6, 1.0, 1e20]),
    lr=st.floats(1e-3, 2),
    mu=st.floats(0, 0.999),
)
def test_nesterov_gives_the_bits_of_numpy(seed, scale, lr, mu):
    outer = Nesterov(lr=lr, momentum=mu)
    state = outer.init(random_flat(seed))
    parameters, momentum = state.parameters.numpy(), np.zeros(4099, np.float32)
    for round_ in range(3):
        gradient = random_flat(seed + round_ + 1, scale)
        state = step(outer, state, gradient)
        parameters, momentum = numpy_nesterov(parameters, momentum, gradient.numpy(), lr, mu)
        assert state.parameters.numpy().tobytes() == parameters.tobytes()
        assert state.buffers["momentum"].numpy().tobytes() == momentum.tobytes()


def test_an_outer_step_leaves_its_inputs_alone():
    outer = Nesterov(lr=0.7, momentum=0.9)
    before = OuterState(random_flat(0), {"momentum": random_flat(1)})
    kept, mean = OuterState(before.parameters.clone(), {"momentum": before.buffers["momentum"].clone()}), random_flat(2)
    after = step(outer, before, mean)
    assert torch.equal(before.parameters, kept.parameters)
    assert torch.equal(before.buffers["momentum"], kept.buffers["momentum"])
    assert torch.equal(mean, random_flat(2))
    assert after.parameters.dtype == torch.float32


def test_without_momentum_and_with_rate_one_the_outer_step_averages():
    anchor, inner = random_flat(0), random_flat(1)
    outer = Nesterov(lr=1.0, momentum=0.0)
    after = step(outer, outer.init(anchor), taken(PseudoGradient(), anchor, inner))
    torch.testing.assert_close(after.parameters, inner, rtol=0, atol=1e-6)


def test_the_pseudo_gradient_is_old_minus_new():
    assert taken(PseudoGradient(), torch.tensor([3.0]), torch.tensor([1.0])).item() == 2.0


def test_what_comes_back_into_the_local_parameters():
    inner, old, new = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([4.0])
    assert Replace().apply(inner, old, new) is new
    assert Blend(0.25).apply(inner, old, new).item() == 3.25
    assert Blend(0.0).apply(inner, old, new) is new


def test_fragments_take_turns_after_a_first_round():
    policy = FixedSteps(100, fragments=2, delay=1)
    assert [policy.steps(Moment(round=number, lr=0.1)) for number in (1, 2, 3)] == [100, 50, 50]
    assert FixedSteps(7).steps(Moment(round=5, lr=0.1)) == 7


@pytest.mark.parametrize(
    "settings", [{"H": 0}, {"H": 10, "delay": 11}, {"H": 10, "fragments": 3}, {"H": 10, "delay": -1}]
)
def test_impossible_schedules_are_refused(settings):
    with pytest.raises((ValueError, SettingsError), match=r"must be|cannot take turns|is longer than"):
        FixedSteps(**settings)


@given(st.floats(1e-6, 1.0), st.floats(0.0, 1.0))
def test_exchanges_get_rarer_as_the_rate_decays(rate, share):
    policy = QuadraticSteps(base=4, alpha=0.02)
    often, seldom = (policy.steps(Moment(round=2, lr=lr)) for lr in (rate, rate * max(share, 1e-3)))
    assert 4 <= often <= seldom
    assert policy.steps(Moment(round=2, lr=rate, total=3)) == 3


def test_steps_in_proportion_to_speed():
    assert [PacedSteps(50).steps(Moment(round=1, lr=0.1, pace=pace)) for pace in (1.0, 0.25, 0.001)] == [50, 12, 1]


def test_what_work_weighs():
    assert ByTokens().weight(Work(steps=3, tokens=96)) == 96.0
    assert [Equal().weight(Work(steps=steps, tokens=96)) for steps in (3, 0)] == [1.0, 0.0]
    assert [ByTokensPerStep().weight(Work(steps=steps, tokens=96)) for steps in (3, 0)] == [96.0 * 32, 0.0]


@pytest.mark.parametrize(
    "constants", [{"lr": 0.0, "momentum": 0.5}, {"lr": 0.5, "momentum": 1.0}, {"lr": -1, "momentum": 0}]
)
def test_impossible_constants_are_refused(constants):
    with pytest.raises(ValueError, match="must be"):
        Nesterov(**constants)

"""The parts of recipes: equations, published vectors, and the same bits as NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.slots import ByTokens, FixedSteps, Identity, Nesterov, PseudoGradient, Replace, Work
from optim.state import OuterState


def random_flat(seed, scale=1.0, length=4099):
    return torch.randn(length, generator=torch.Generator().manual_seed(seed)) * scale


def numpy_nesterov(parameters, momentum, gradient, lr, mu):
    lr, mu = np.float32(lr), np.float32(mu)
    momentum = mu * momentum + gradient
    return parameters - lr * (gradient + mu * momentum), momentum


def test_nesterov_follows_the_published_vector():
    outer = Nesterov(lr=0.7, momentum=0.9)
    state = outer.init(torch.tensor([1.0]))
    seen = []
    for _ in range(3):
        state = outer.step(state, torch.tensor([0.5]))
        seen += [state.buffers["momentum"].item(), state.parameters.item()]
    assert seen == pytest.approx([0.5, 0.335, 0.95, -0.6135, 1.355, -1.81715])


def test_nesterov_is_the_one_of_torch():
    outer = Nesterov(lr=0.7, momentum=0.9)
    state = outer.init(random_flat(0))
    parameter = torch.nn.Parameter(state.parameters.clone())
    reference = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for round_ in range(5):
        parameter.grad = random_flat(round_ + 1, 0.1)
        state = outer.step(state, parameter.grad.clone())
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
        state = outer.step(state, gradient)
        parameters, momentum = numpy_nesterov(parameters, momentum, gradient.numpy(), lr, mu)
        assert state.parameters.numpy().tobytes() == parameters.tobytes()
        assert state.buffers["momentum"].numpy().tobytes() == momentum.tobytes()


def test_an_outer_step_leaves_its_inputs_alone():
    outer = Nesterov(lr=0.7, momentum=0.9)
    before = OuterState(random_flat(0), {"momentum": random_flat(1)})
    kept, mean = OuterState(before.parameters.clone(), {"momentum": before.buffers["momentum"].clone()}), random_flat(2)
    after = outer.step(before, mean)
    assert torch.equal(before.parameters, kept.parameters)
    assert torch.equal(before.buffers["momentum"], kept.buffers["momentum"])
    assert torch.equal(mean, random_flat(2))
    assert after.parameters.dtype == torch.float32


def test_without_momentum_and_with_rate_one_the_outer_step_averages():
    anchor, inner = random_flat(0), random_flat(1)
    outer = Nesterov(lr=1.0, momentum=0.0)
    after = outer.step(outer.init(anchor), PseudoGradient().take(anchor, inner))
    torch.testing.assert_close(after.parameters, inner, rtol=0, atol=1e-6)


def test_the_pseudo_gradient_is_old_minus_new():
    assert PseudoGradient().take(torch.tensor([3.0]), torch.tensor([1.0])).item() == 2.0


def test_identity_and_replace_pass_values_on():
    values = random_flat(0)
    assert Identity().decode(Identity().encode(values)) is values
    assert Replace().apply(random_flat(1), random_flat(2), values) is values


def test_an_exchange_is_due_after_so_many_steps_and_stays_due():
    assert [FixedSteps(3).due(steps) for steps in range(1, 6)] == [False, False, True, True, True]


def test_work_weighs_its_tokens():
    assert ByTokens().weight(Work(steps=3, tokens=96)) == 96.0


@pytest.mark.parametrize(
    "constants", [{"lr": 0.0, "momentum": 0.5}, {"lr": 0.5, "momentum": 1.0}, {"lr": -1, "momentum": 0}]
)
def test_impossible_constants_are_refused(constants):
    with pytest.raises(ValueError, match="must be"):
        Nesterov(**constants)

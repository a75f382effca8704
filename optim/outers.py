"""What every peer does with the result of an exchange.

Below, g is the mean pseudo-gradient (old minus new, so a step subtracts), Θ are the outer parameters, η is the outer
learning rate and μ the outer momentum. Multiplications and additions stay apart, never fused (alpha=, addcmul, lerp): a
fused operation rounds once where these round twice, and not every processor has it.
"""

from __future__ import annotations

from typing import Literal

import attrs
import torch
from attrs.validators import ge, gt, in_, lt

from optim.slots import Mixed, Moment
from optim.state import OuterState


@attrs.frozen
class Nesterov:
    """Gradient descent with Nesterov momentum, as `torch.optim.SGD(nesterov=True)` does it.

    u ← μ·u + g, then Θ ← Θ − η·(g + μ·u). With η = 1 and μ = 0 the outer parameters become the mean of the local ones.
    """

    lr: float = attrs.field(validator=gt(0))
    momentum: float = attrs.field(validator=[ge(0), lt(1)])
    ahead: bool = attrs.field(default=False, init=False)

    def init(self, parameters: torch.Tensor) -> OuterState:
        return OuterState(parameters, {"momentum": torch.zeros_like(parameters)})

    def step(self, state: OuterState, mixed: Mixed, moment: Moment, fresh: torch.Tensor) -> OuterState:
        return self.descend(state, mixed.mean)

    def descend(self, state: OuterState, gradient: torch.Tensor) -> OuterState:
        """The step along this gradient."""
        momentum = state.buffers["momentum"].mul(self.momentum).add_(gradient)
        descent = momentum.mul(self.momentum).add_(gradient).mul_(self.lr)
        return OuterState(torch.sub(state.parameters, descent), {"momentum": momentum})


@attrs.frozen
class Adaptive:
    """Adam, Yogi or Adagrad on the mean pseudo-gradient (Reddi et al., "Adaptive federated optimization", 2003.00295).

    m ← β₁·m + (1 − β₁)·g and Θ ← Θ − η·m / (√v + τ), with v from τ² on, and without bias correction:

    - adam: v ← β₂·v + (1 − β₂)·g²
    - yogi: v ← v − (1 − β₂)·g²·sign(v − g²)
    - adagrad: v ← v + g²
    """

    rule: Literal["adam", "yogi", "adagrad"] = attrs.field(validator=in_(("adam", "yogi", "adagrad")))
    lr: float = attrs.field(validator=gt(0))
    beta1: float = attrs.field(default=0.9, validator=[ge(0), lt(1)])
    beta2: float = attrs.field(default=0.99, validator=[ge(0), lt(1)])
    tau: float = attrs.field(default=1e-3, validator=gt(0))
    ahead: bool = attrs.field(default=False, init=False)

    def init(self, parameters: torch.Tensor) -> OuterState:
        first, second = torch.zeros_like(parameters), torch.full_like(parameters, self.tau * self.tau)
        return OuterState(parameters, {"first": first, "second": second})

    def step(self, state: OuterState, mixed: Mixed, moment: Moment, fresh: torch.Tensor) -> OuterState:
        first = state.buffers["first"].mul(self.beta1).add_(mixed.mean.mul(1 - self.beta1))
        square, second = mixed.mean.mul(mixed.mean), state.buffers["second"]
        match self.rule:
            case "adam":
                second = second.mul(self.beta2).add_(square.mul_(1 - self.beta2))
            case "yogi":
                sign = torch.sub(second, square).sign_()
                second = torch.sub(second, square.mul_(1 - self.beta2).mul_(sign))
            case "adagrad":
                second = torch.add(second, square)
        descent = first.mul(self.lr).div_(second.sqrt().add_(self.tau))
        return OuterState(torch.sub(state.parameters, descent), {"first": first, "second": second})


@attrs.frozen
class SlowMomentum:
    """Slow momentum in units of the inner learning rate γ, with a penalty for stale results.

    u ← β·u + g/(γ·Λ), each element of u clipped to ±φ, then Θ ← Θ − α·γ·u. With Λ = 1 and no clipping this is SlowMo
    (1910.00643). CO2 (2401.16265) applies a result a round late, and takes for Λ how much further the local parameters
    have moved than the exchanged ones had: Λ = max(1, ‖fresh‖ / ‖own‖), which is this peer's own; the peers' outer
    parameters then differ.
    """

    momentum: float = attrs.field(validator=[ge(0), lt(1)])
    alpha: float = attrs.field(default=1.0, validator=gt(0))
    penalty: bool = False
    clip: float = attrs.field(default=float("inf"), validator=gt(0))
    ahead: bool = attrs.field(default=False, init=False)

    def init(self, parameters: torch.Tensor) -> OuterState:
        return OuterState(parameters, {"momentum": torch.zeros_like(parameters)})

    def step(self, state: OuterState, mixed: Mixed, moment: Moment, fresh: torch.Tensor) -> OuterState:
        if moment.lr <= 0:
            return state
        gap = 1.0
        if self.penalty and mixed.share > 0:  # who brought nothing takes the others' mean as it is
            gap = max(1.0, float(fresh.norm()) / max(float(mixed.own.norm()), 1e-12))
        momentum = state.buffers["momentum"].mul(self.momentum).add_(mixed.mean.mul(1 / (moment.lr * gap)))
        momentum.clamp_(-self.clip, self.clip)
        return OuterState(torch.sub(state.parameters, momentum.mul(self.alpha * moment.lr)), {"momentum": momentum})


@attrs.frozen
class Follow:
    """For gossip, which exchanges parameters: the local ones move by as much as mixing has moved those sent."""

    ahead: bool = attrs.field(default=False, init=False)

    def init(self, parameters: torch.Tensor) -> OuterState:
        return OuterState(parameters)

    def step(self, state: OuterState, mixed: Mixed, moment: Moment, fresh: torch.Tensor) -> OuterState:
        return OuterState(torch.sub(mixed.mean, mixed.own).add_(fresh))

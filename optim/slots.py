"""The slots of a low-communication method, and the parts that fill them.

Local updates, an exchange, an outer step: methods differ only in what they put into each of a few slots. A `Recipe`
(`optim/recipe.py`) fills all of them, and whoever drives the training, the daemon or a plain PyTorch loop, goes
through the slots in the same order:

    policy.due(steps)                           is it time to exchange?
    payload.take(anchor, inner)                 what to exchange
    compressor.encode(values)                   in which form
    weighting.weight(work)                      and how much it counts
        … the collective forms the weighted mean of what the peers encoded …
    compressor.decode(mean)
    outer.step(state, mean)                     what all peers do with it
    merge.apply(inner, old, new)                and how it comes back into the local parameters

All tensors are one-dimensional, fp32 and on the CPU. Parts are immutable values; what they must remember between
rounds lives in the `OuterState`, because that is what a newcomer receives. Whatever runs on every peer after the
exchange (`decode`, `step`) must give the same bits on every processor: elementwise operations that round once each,
a multiplication, then an addition, and no reductions.
"""

from __future__ import annotations

from typing import Protocol

import attrs
import torch
from attrs.validators import ge, gt, lt

from optim.state import OuterState


@attrs.frozen
class Work:
    """What a peer has done since the last exchange."""

    steps: int
    """Inner steps."""

    tokens: int
    """Tokens (for other models: examples) that those steps trained on."""


class SyncPolicy(Protocol):
    """When to exchange."""

    def due(self, steps: int) -> bool:
        """Whether a peer that has completed `steps` inner steps since the last exchange should exchange now."""
        ...


class Payload(Protocol):
    """What is exchanged."""

    def take(self, anchor: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
        """The values to average.

        Args:
            anchor: The outer parameters, as the model's own number format holds them.
            inner: The local parameters after the inner steps, of the same length.
        """
        ...


class Compressor(Protocol):
    """In which form the payload travels.

    Encodings are averaged, so `decode` must be linear: the mean of encodings decodes to the mean of what they mean.
    """

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """The values to hand to the collective."""
        ...

    def decode(self, mean: torch.Tensor) -> torch.Tensor:
        """The mean payload, from the mean of the encodings."""
        ...


class Weighting(Protocol):
    """How much a peer's payload counts in the mean."""

    def weight(self, work: Work) -> float:
        """A number that is finite and not negative; zero keeps the payload out of the mean."""
        ...


class OuterOptimizer(Protocol):
    """What every peer does with the mean payload."""

    def init(self, parameters: torch.Tensor) -> OuterState:
        """The state before the first round."""
        ...

    def step(self, state: OuterState, mean: torch.Tensor) -> OuterState:
        """The state after a round. A pure function that gives the same bits on every processor."""
        ...


class Merge(Protocol):
    """How new outer parameters come back into the local ones."""

    def apply(self, inner: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """The local parameters to go on from, given the local, the old outer and the new outer ones."""
        ...


@attrs.frozen
class FixedSteps:
    """Exchange after every `steps` inner steps."""

    steps: int = attrs.field(validator=ge(1))

    def due(self, steps: int) -> bool:
        # At least, not exactly: an exchange that failed stays due.
        return steps >= self.steps


@attrs.frozen
class PseudoGradient:
    """Old outer parameters minus new local ones: a direction of ascent, as a gradient is (DiLoCo, arXiv 2311.08105)."""

    def take(self, anchor: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
        return torch.sub(anchor, inner)


@attrs.frozen
class Identity:
    """Send values as they are."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def decode(self, mean: torch.Tensor) -> torch.Tensor:
        return mean


@attrs.frozen
class ByTokens:
    """A peer counts as much as the number of tokens it has trained on."""

    def weight(self, work: Work) -> float:
        return float(work.tokens)


@attrs.frozen
class Nesterov:
    """Gradient descent with Nesterov momentum, as `torch.optim.SGD(nesterov=True)` does it.

    With g the mean pseudo-gradient: u ← μ·u + g, then Θ ← Θ − η·(g + μ·u). With η = 1 and μ = 0 the outer parameters
    become the mean of the local ones.
    """

    lr: float = attrs.field(validator=gt(0))
    momentum: float = attrs.field(validator=[ge(0), lt(1)])

    def init(self, parameters: torch.Tensor) -> OuterState:
        return OuterState(parameters, {"momentum": torch.zeros_like(parameters)})

    def step(self, state: OuterState, mean: torch.Tensor) -> OuterState:
        # Multiplications and additions apart, never fused (alpha=, addcmul, lerp): a fused operation rounds once where
        # these round twice, and not every processor has it. Peers compare the result bit for bit.
        momentum = state.buffers["momentum"].mul(self.momentum).add_(mean)
        descent = momentum.mul(self.momentum).add_(mean).mul_(self.lr)
        return OuterState(torch.sub(state.parameters, descent), {"momentum": momentum})


@attrs.frozen
class Replace:
    """Go on from the new outer parameters."""

    def apply(self, inner: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return new

"""Methods whose messages do not sum on their way: everybody gathers everybody's, and sums what they mean."""

from __future__ import annotations

import attrs
import torch
from attrs.validators import ge, gt, lt

from optim.compressors import Signs, Ternary, TopChunks
from optim.feedback import ErrorFeedback
from optim.lowrank import LowRankMean
from optim.mixers import GatheredMean
from optim.outers import Nesterov
from optim.policies import FixedSteps
from optim.recipe import GradientRecipe, Recipe
from optim.slots import Local, Memory
from optim.weightings import Equal


def sparseloco(
    *, inner_steps: int = 30, k: int = 64, bits: int = 2, decay: float = 0.95, outer_lr: float = 1.0
) -> Recipe:
    """SparseLoCo (arXiv 2508.15706): of each 64 × 64 values of a pseudo-gradient the k largest, in two bits each.

    What is left out is kept, and forgotten slowly. Nobody's message counts as longer than the median of all.
    """
    return Recipe(
        policy=FixedSteps(inner_steps),
        feedback=ErrorFeedback(decay),
        mixer=GatheredMean(TopChunks(k, bits=bits), capped=True),
        outer=Nesterov(lr=outer_lr, momentum=0.0),
    )


@attrs.frozen
class ScaledGradient:
    """η·∇: a residual of these values is in units of steps, whatever becomes of the learning rate."""

    settled: bool = attrs.field(default=False, init=False)

    def take(self, local: Local, memory: Memory) -> tuple[torch.Tensor, Memory]:
        assert local.gradient is not None
        return local.gradient.mul(local.lr), memory


def demo(*, k: int = 32, decay: float = 0.999, bits: int = 16) -> GradientRecipe:
    """DeMo (Peng et al., arXiv 2411.19870): decoupled momentum. The inner optimizer is plain SGD.

    q ← decay·q + η·∇; the k largest values of q's cosine transform are sent and taken out of q; θ ← θ − η·sign(mean).
    """
    return GradientRecipe(
        payload=ScaledGradient(),
        feedback=ErrorFeedback(decay),
        mixer=GatheredMean(TopChunks(k, dct=True, bits=bits)),
        weighting=Equal(),
        sign=True,
    )


@attrs.frozen
class LionUpdate:
    """β₁·m + (1 − β₁)·∇, after which m ← β₂·m + (1 − β₂)·∇."""

    beta1: float = attrs.field(validator=[ge(0), lt(1)])
    beta2: float = attrs.field(validator=[ge(0), lt(1)])
    settled: bool = attrs.field(default=False, init=False)

    def take(self, local: Local, memory: Memory) -> tuple[torch.Tensor, Memory]:
        gradient = local.gradient
        assert gradient is not None
        momentum = memory.get("momentum")
        if momentum is None:
            momentum = torch.zeros_like(gradient)
        update = momentum.mul(self.beta1).add_(gradient.mul(1 - self.beta1))
        after = momentum.mul(self.beta2).add_(gradient.mul(1 - self.beta2))
        return update, {**memory, "momentum": after}


def lion(*, beta1: float = 0.9, beta2: float = 0.99, vote: bool = True) -> GradientRecipe:
    """Distributed Lion (arXiv 2404.00438): one bit per parameter, by majority or as a mean of signs.

    The inner optimizer is plain SGD, whose weight decay λ gives −η·(D + λ·θ).
    """
    return GradientRecipe(payload=LionUpdate(beta1, beta2), mixer=GatheredMean(Signs(vote)), weighting=Equal())


def data_parallel() -> GradientRecipe:
    """Synchronous data parallel training: the mean gradient, in every step."""
    return GradientRecipe()


def powersgd(*, rank: int = 32) -> GradientRecipe:
    """PowerSGD (Vogels et al., arXiv 1905.13727): gradients of low rank, with error feedback."""
    return GradientRecipe(mixer=LowRankMean(rank), feedback=ErrorFeedback())


def terngrad(*, clip: float = 2.5) -> GradientRecipe:
    """TernGrad (Wen et al., arXiv 1705.07878): −s, 0 or s for each value of the gradient, right on average."""
    return GradientRecipe(payload=ClippedGradient(clip), mixer=GatheredMean(Ternary()))


@attrs.frozen
class ClippedGradient:
    """The gradient, clipped to so many standard deviations: the largest value decides how coarse all others become."""

    sigmas: float = attrs.field(validator=gt(0))
    settled: bool = attrs.field(default=False, init=False)

    def take(self, local: Local, memory: Memory) -> tuple[torch.Tensor, Memory]:
        gradient = local.gradient
        assert gradient is not None
        limit = self.sigmas * float(gradient.std(correction=0))
        return gradient.clamp(-limit, limit), memory

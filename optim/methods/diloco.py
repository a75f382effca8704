"""DiLoCo and its close relatives: local steps, the mean pseudo-gradient, an outer step."""

from __future__ import annotations

from typing import Literal

import attrs

from optim.fragments import Blocks
from optim.merges import Blend
from optim.outers import Adaptive, Nesterov, SlowMomentum
from optim.policies import FixedSteps, PacedSteps, QuadraticSteps
from optim.recipe import Recipe
from optim.regularizers import Proximal, SharpnessAware


def diloco(*, inner_steps: int = 500, outer_lr: float = 0.7, outer_momentum: float = 0.9) -> Recipe:
    """DiLoCo (Douillard et al., arXiv 2311.08105): local AdamW, then Nesterov on the mean pseudo-gradient.

    A run of few rounds wants less momentum: 0.9 remembers about ten rounds and ends up moving seven times the mean
    pseudo-gradient, which needs some fifty rounds to pay off; below that, 0.5 is a good choice.
    """
    return Recipe(policy=FixedSteps(inner_steps), outer=Nesterov(lr=outer_lr, momentum=outer_momentum))


def fedavg(*, inner_steps: int = 50) -> Recipe:
    """Local SGD, or federated averaging: the outer parameters become the mean of the local ones."""
    return Recipe(policy=FixedSteps(inner_steps), outer=Nesterov(lr=1.0, momentum=0.0))


def fedprox(*, inner_steps: int = 50, mu: float = 0.01) -> Recipe:
    """FedProx (arXiv 1812.06127): local SGD whose steps are drawn back to the outer parameters, for unlike data."""
    return attrs.evolve(fedavg(inner_steps=inner_steps), regularizer=Proximal(mu))


def fedsam(*, inner_steps: int = 50, rho: float = 0.05) -> Recipe:
    """Local SGD with sharpness-aware steps (arXiv 2010.01412, 2302.04083). `step` needs a closure."""
    return attrs.evolve(fedavg(inner_steps=inner_steps), regularizer=SharpnessAware(rho))


def fedopt(
    *,
    inner_steps: int = 50,
    rule: Literal["adam", "yogi", "adagrad"] = "adam",
    outer_lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
) -> Recipe:
    """Adaptive outer optimizers (Reddi et al., arXiv 2003.00295). For language models τ of 0.1 is steadier."""
    outer = Adaptive(rule=rule, lr=outer_lr, beta1=beta1, beta2=beta2, tau=tau)
    return Recipe(policy=FixedSteps(inner_steps), outer=outer)


def slowmo(*, inner_steps: int = 48, momentum: float = 0.6, alpha: float = 1.0) -> Recipe:
    """SlowMo (arXiv 1910.00643): outer momentum in units of the inner learning rate."""
    return Recipe(policy=FixedSteps(inner_steps), outer=SlowMomentum(momentum=momentum, alpha=alpha))


def quadratic(*, base_steps: int = 4, alpha: float = 0.0175) -> Recipe:
    """The quadratic synchronisation rule (QSR, arXiv 2310.14423): averaging, ever less often as the rate decays."""
    return Recipe(policy=QuadraticSteps(base=base_steps, alpha=alpha), outer=Nesterov(lr=1.0, momentum=0.0))


def paced(*, inner_steps: int = 50, outer_lr: float = 0.7, outer_momentum: float = 0.9) -> Recipe:
    """DiLoCo whose peers take as many local steps as their speed allows (DyLU of arXiv 2401.09135)."""
    return Recipe(policy=PacedSteps(inner_steps), outer=Nesterov(lr=outer_lr, momentum=outer_momentum))


def streaming(
    *,
    inner_steps: int = 100,
    fragments: int = 2,
    delay: int = 1,
    alpha: float = 0.5,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    strided: bool = True,
) -> Recipe:
    """Streaming DiLoCo (Douillard et al., arXiv 2501.18512): one fragment at a time, while local steps go on.

    Fragment p is taken every `inner_steps`, its result is applied `delay` steps later, blended with what the local
    parameters have become (`alpha` is their share). The paper sends 4-bit numbers: choose the `e3m0` codec for that.
    """
    return Recipe(
        policy=FixedSteps(inner_steps, fragments=fragments, delay=delay),
        fragmenter=Blocks(fragments, strided=strided),
        outer=Nesterov(lr=outer_lr, momentum=outer_momentum),
        merge=Blend(alpha),
    )

"""Methods that apply each round's result a whole round late, so that exchanges cost no time at all."""

from __future__ import annotations

import attrs
import torch

from optim.feedback import ErrorFeedback
from optim.finalizers import GlobalMean
from optim.lowrank import AdaptiveLowRankMean, LowRankMean
from optim.outers import Nesterov, SlowMomentum
from optim.policies import FixedSteps, HiddenSteps
from optim.recipe import Recipe
from optim.slots import Mixed, Moment
from optim.state import OuterState
from protocol.errors import SettingsError


@attrs.frozen
class EagerNesterov(Nesterov):
    """Nesterov on an estimate in which our own part is of today and only the others' is of a round ago.

    g = ḡ(t − H) + s·(δ(t) − δ(t − H)), s being our share of the mean. With one peer that is DiLoCo. (arXiv 2502.12996.)
    """

    ahead: bool = attrs.field(default=True, init=False)

    def step(self, state: OuterState, mixed: Mixed, moment: Moment, fresh: torch.Tensor) -> OuterState:
        others = torch.sub(mixed.mean, mixed.own.mul(mixed.share))
        return self.descend(state, others.add_(fresh.mul(mixed.share)))


def eager(*, inner_steps: int = 50, outer_lr: float = 0.35, outer_momentum: float = 0.5) -> Recipe:
    """Eager updates. Peers have outer parameters of their own, which the end of the run makes one.

    Raises:
        SettingsError: The outer iteration would diverge with many peers.
    """
    _check_stable("eager", outer_lr, outer_momentum)
    return Recipe(
        policy=FixedSteps(inner_steps, delay=inner_steps),
        outer=EagerNesterov(lr=outer_lr, momentum=outer_momentum),
        finalizer=GlobalMean(),
        shared=False,
    )


def delayed(*, inner_steps: int = 50, outer_lr: float = 0.2, outer_momentum: float = 0.5) -> Recipe:
    """The outer step with the mean of a round ago. It needs a small outer learning rate, or it diverges.

    Raises:
        SettingsError: The outer iteration would diverge.
    """
    _check_stable("delayed", outer_lr, outer_momentum)
    return Recipe(
        policy=FixedSteps(inner_steps, delay=inner_steps), outer=Nesterov(lr=outer_lr, momentum=outer_momentum)
    )


def dilocox(
    *,
    inner_steps: int = 50,
    outer_lr: float = 0.2,
    outer_momentum: float = 0.5,
    rank: int = 32,
    adaptive: bool = True,
    window: int = 5,
) -> Recipe:
    """DiLoCoX (arXiv 2506.21263): a round late, low rank, with error feedback. Its int4 is the `int4` codec.

    `adaptive` lets the rank follow what the last exchanges needed (`window` of them), and the number of local steps
    shrink with what is sent.

    Raises:
        SettingsError: The outer iteration would diverge.
    """
    fixed = delayed(inner_steps=inner_steps, outer_lr=outer_lr, outer_momentum=outer_momentum)
    return attrs.evolve(
        fixed,
        policy=HiddenSteps(inner_steps) if adaptive else fixed.policy,
        mixer=AdaptiveLowRankMean(rank, window) if adaptive else LowRankMean(rank),
        feedback=ErrorFeedback(),
    )


def co2(*, inner_steps: int = 48, momentum: float = 0.6, alpha: float = 1.0, clip: float = 1.0) -> Recipe:
    """CO2 (arXiv 2401.16265): slow momentum a round late, with a penalty for staleness and a clipped buffer."""
    return Recipe(
        policy=FixedSteps(inner_steps, delay=inner_steps),
        outer=SlowMomentum(momentum=momentum, alpha=alpha, penalty=True, clip=clip),
        finalizer=GlobalMean(),
        shared=False,
    )


def spectral_radius(kind: str, lr: float, momentum: float, peers: int) -> float:
    """By what factor the outer iteration's errors shrink (or grow) per round, where local steps converge fully.

    The worst case of the curvature: δ = x, for the blocking, delayed or eager form, with so many peers.
    """
    # State: Θ, u, and the parameters of a round ago.
    fresh = {"blocking": 1.0, "delayed": 0.0, "eager": 1.0 / peers}[kind]
    rows = []
    for theta, buffer, stale in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)):
        gradient = fresh * theta + (1 - fresh) * stale
        after = momentum * buffer + gradient
        rows.append([theta - lr * (gradient + momentum * after), after, theta])
    return float(torch.linalg.eigvals(torch.tensor(rows, dtype=torch.float64).T).abs().max())


def _check_stable(kind: str, lr: float, momentum: float) -> None:
    radius = spectral_radius(kind, lr, momentum, 8)
    if radius >= 1:
        raise SettingsError(
            f"{kind} updates with an outer learning rate of {lr:g} and a momentum of {momentum:g} diverge: errors grow "
            f"by a factor of {radius:.2f} with each round among 8 peers",
            hint="choose 0.35 and 0.5 at most for eager updates, 0.35 and 0.5, or 0.2 and 0.9, for delayed ones",
        )

"""Methods without any operation of all peers together: each meets one other, drawn anew each time."""

from __future__ import annotations

import attrs
import torch
from attrs.validators import ge, gt, le

from optim.finalizers import GlobalMean, VarianceCorrectedMean
from optim.mixers import Pairs
from optim.outers import Follow
from optim.payloads import Parameters
from optim.policies import FixedSteps
from optim.recipe import Recipe
from optim.slots import Local, Memory, Mixed, Moment
from optim.state import OuterState
from protocol.pairs import Pairing


@attrs.frozen
class DeltaAndOuter:
    """The pseudo-gradient, followed by the outer parameters."""

    settled: bool = attrs.field(default=False, init=False)

    def take(self, local: Local, memory: Memory) -> tuple[torch.Tensor, Memory]:
        return torch.cat([torch.sub(local.anchor, local.inner), local.state.parameters]), memory


@attrs.frozen
class PairMomentum:
    """NoLoCo's outer step (arXiv 2506.10911): heavy-ball momentum, and a pull towards the pair's mean.

    With δ̄ and Θ̄ the pair's means: m ← α·m + β·δ̄ + γ·(Θ − Θ̄), then Θ ← Θ − m. The paper writes this for new minus old,
    with the signs turned around. An unpaired peer takes its own δ and Θ for the means.
    """

    alpha: float = attrs.field(validator=[ge(0.0), le(0.6)])  # from 0.9 on it diverges with 8 peers and more
    beta: float = attrs.field(validator=gt(0))
    gamma: float = attrs.field(validator=[ge(0.0), le(1.2)])
    ahead: bool = attrs.field(default=False, init=False)

    def init(self, parameters: torch.Tensor) -> OuterState:
        return OuterState(parameters, {"momentum": torch.zeros_like(parameters)})

    def step(self, state: OuterState, mixed: Mixed, moment: Moment, fresh: torch.Tensor) -> OuterState:
        delta, outer = torch.split(mixed.mean, len(state.parameters))
        momentum = state.buffers["momentum"].mul(self.alpha).add_(delta.mul(self.beta))
        momentum.add_(torch.sub(state.parameters, outer).mul_(self.gamma))
        return OuterState(torch.sub(state.parameters, momentum), {"momentum": momentum})


def noloco(*, inner_steps: int = 50, alpha: float = 0.5, beta: float = 0.7, gamma: float = 0.7) -> Recipe:
    """NoLoCo (Kolehmainen et al., arXiv 2506.10911): random pairs in place of an all-reduce; one mean at the end.

    The paper's bound on γ is too loose for a large α: with α = 0.9 and 8 peers γ ≥ 0.5 diverges. α is at most 0.6 here.
    """
    return Recipe(
        policy=FixedSteps(inner_steps),
        payload=DeltaAndOuter(),
        mixer=Pairs(),
        outer=PairMomentum(alpha, beta, gamma),
        finalizer=GlobalMean(),
        shared=False,
    )


def gossip(*, inner_steps: int = 1, corrected: bool = False, pairing: Pairing = "random") -> Recipe:
    """Decentralized Adam with overlapped gossip on pairs (arXiv 2410.11998); the mean at the end.

    Pairs are random ones, or those of a one-peer graph: "exponential" or "exponential-ring". The pair's mean of the
    parameters after a step is on its way while the next is computed, whose update is then added.
    `corrected` keeps the variance of each matrix in the final mean (arXiv 2404.04616).
    """
    return Recipe(
        policy=FixedSteps(inner_steps, delay=1),
        payload=Parameters(),
        mixer=Pairs(pairing),
        outer=Follow(),
        finalizer=VarianceCorrectedMean() if corrected else GlobalMean(),
        shared=False,
    )

"""Methods whose peers do not wait for the slowest: an exchange begins with those who are ready in time."""

from __future__ import annotations

import attrs
import torch
from attrs.validators import ge, gt, lt

from optim.fragments import Packed, Whole
from optim.merges import Blend
from optim.mixers import RingMean
from optim.outers import Nesterov
from optim.policies import FixedSteps, PacedSteps
from optim.radial import RadialMean
from optim.recipe import Recipe
from optim.slots import Mixed, Moment
from optim.state import OuterState
from optim.weightings import ByTokensPerStep, Equal
from protocol.collective import Window


def _at_most_one_over(outer: DelayedNesterov, _attribute: attrs.Attribute[float], spread: float) -> None:
    if not 0 <= spread * outer.buffer <= 1:
        raise ValueError(f"'spread' must be between 0 and 1/{outer.buffer}")


@attrs.frozen
class DelayedNesterov:
    """Nesterov for pseudo-gradients that arrive one by one (Liu et al., arXiv 2401.09135).

    Each arrival moves the parameters by its own share at once, the momentum only every N arrivals. With c (`spread`),

        p ← p + g/N
        the N-th:   m ← β·m + p,  Θ ← Θ − η·((1 − c·N + c)·β·m + g/N),  p ← 0
        others:                   Θ ← Θ − η·(c·β·m + g/N)

    With c = 0 and N pseudo-gradients from the same Θ that is one step of Nesterov along their mean. An exchange in
    which k peers were ready is k arrivals of their mean.
    """

    lr: float = attrs.field(validator=gt(0))
    momentum: float = attrs.field(validator=[ge(0), lt(1)])
    buffer: int = attrs.field(validator=ge(1))
    spread: float = attrs.field(default=0.0, validator=_at_most_one_over)
    ahead: bool = attrs.field(default=False, init=False)

    def init(self, parameters: torch.Tensor) -> OuterState:
        zeros = torch.zeros_like(parameters)
        # A count is a tensor like the others: newcomers receive it, and fragments have one each.
        return OuterState(parameters, {"momentum": zeros, "pending": zeros, "arrivals": zeros})

    def step(self, state: OuterState, mixed: Mixed, moment: Moment, fresh: torch.Tensor) -> OuterState:
        left = len(mixed.members)
        while left:
            count = min(left, self.buffer - int(state.buffers["arrivals"][:1].sum()))
            state = self.arrive(state, mixed.mean, count)
            left -= count
        return state

    def arrive(self, state: OuterState, gradient: torch.Tensor, count: int) -> OuterState:
        """So many arrivals of the same pseudo-gradient, no more than the buffer has room for."""
        momentum, arrivals = state.buffers["momentum"], state.buffers["arrivals"]
        part = gradient.mul(count / self.buffer)
        pending = torch.add(state.buffers["pending"], part)
        full = int(arrivals[:1].sum()) + count == self.buffer
        descent = momentum.mul(self.momentum * self.spread * (count - 1 if full else count))
        if full:
            momentum = momentum.mul(self.momentum).add_(pending)
            descent.add_(momentum.mul(self.momentum * (1 - self.spread * self.buffer + self.spread)))
            pending, arrivals = torch.zeros_like(pending), torch.zeros_like(arrivals)
        else:
            arrivals = torch.add(arrivals, float(count))
        descent.add_(part).mul_(self.lr)
        buffers = {"momentum": momentum, "pending": pending, "arrivals": arrivals}
        return OuterState(torch.sub(state.parameters, descent), buffers)


@attrs.frozen
class EachNesterov(Nesterov):
    """A whole step of Nesterov for each arrival: with momentum, N of them go much further than one along their mean."""

    def step(self, state: OuterState, mixed: Mixed, moment: Moment, fresh: torch.Tensor) -> OuterState:
        for _ in mixed.members:
            state = self.descend(state, mixed.mean)
        return state


def asynchronous(
    *,
    inner_steps: int = 50,
    buffer: int = 4,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    spread: float = 0.0,
    paced: bool = True,
    grace: float = 1.0,
    keep: int = 16,
) -> Recipe:
    """Asynchronous local SGD with delayed Nesterov and dynamic local steps (arXiv 2401.09135).

    Whoever is ready begins an exchange, which waits `grace` seconds for others. A pseudo-gradient may be taken from
    outer parameters that are older than those it is applied to. `buffer` is best the number of peers; `paced` makes
    local steps fewer at slower peers (`pace=` says how slow we are); `keep` is how many exchanges a peer may miss.
    """
    return Recipe(
        policy=PacedSteps(inner_steps) if paced else FixedSteps(inner_steps),
        weighting=Equal(),
        mixer=RingMean(Window(quorum=1, grace=grace, keep=keep)),
        outer=DelayedNesterov(outer_lr, outer_momentum, buffer, spread),
        late=True,
    )


def asynchronous_plain(
    *, inner_steps: int = 50, outer_lr: float = 0.7, outer_momentum: float = 0.9, grace: float = 1.0, keep: int = 16
) -> Recipe:
    """As `asynchronous`, but with a whole outer step for each arrival. To compare with: it overshoots."""
    return Recipe(
        policy=FixedSteps(inner_steps),
        weighting=Equal(),
        mixer=RingMean(Window(quorum=1, grace=grace, keep=keep)),
        outer=EachNesterov(lr=outer_lr, momentum=outer_momentum),
        late=True,
    )


def decoupled(
    *,
    inner_steps: int = 24,
    fragments: int = 8,
    delay: int = 2,
    quorum: int = 2,
    grace: float = 1.0,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    alpha: float = 0.0,
    radial: bool = True,
    keep: int = 16,
) -> Recipe:
    """Decoupled DiLoCo (arXiv 2604.21428): for each fragment those who are ready, if they are enough.

    An exchange begins `grace` seconds after `quorum` peers are ready for it. Local steps do not wait for it, unless
    the delay is 0: its result is applied when it is there, `delay` steps later at the soonest. Who is late is part of
    the fragment's next exchange. `alpha` is the share of the local parameters that stays, as in `streaming`.
    """
    window = Window(quorum=quorum, grace=grace, keep=keep)
    return Recipe(
        policy=FixedSteps(inner_steps, fragments=fragments, delay=delay),
        fragmenter=Packed(fragments) if fragments > 1 else Whole(),
        weighting=ByTokensPerStep(),
        mixer=RadialMean(window) if radial else RingMean(window),
        outer=Nesterov(lr=outer_lr, momentum=outer_momentum),
        merge=Blend(alpha),
        late=True,
        waits=delay == 0,
    )

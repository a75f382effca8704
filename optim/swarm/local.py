"""Rounds of local steps: DiLoCo inside each stage.

A step of the pipeline is then a *round* of H times K microbatches. A server makes up to H local steps in it, each with
what it has counted itself, and exchanges nothing. What it brings to the settlement in place of a mean gradient is its
pseudo-gradient: the parameters at the beginning of the round minus its own. All else is as without local steps. So a
sum counts as a whole or not at all here, too: what a server has done in a round is done again if it dies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs
import torch
from attrs.validators import ge

from optim.flat import FlatParameters
from optim.outers import Nesterov
from optim.state import OuterState


@attrs.frozen(kw_only=True)
class LocalSteps:
    """How a round goes: the same at all servers of all stages."""

    count: int = attrs.field(validator=ge(1))
    """Local steps of a round, H."""
    outer: Nesterov
    """What makes the next parameters of the mean pseudo-gradient."""
    rate: Callable[[int], float]
    """The learning rate of each local step, counted over the whole run."""


class LocalParameters:
    """What a server has besides the parameters that its local steps move.

    Args:
        plan: How rounds go.
        flat: The stage's parameters, with values.
        optimizer: Makes the local steps. Its memory goes through all rounds, and is each server's own.
    """

    def __init__(self, plan: LocalSteps, flat: FlatParameters, optimizer: torch.optim.Optimizer) -> None:
        self.plan = plan
        self.outer: OuterState = plan.outer.init(flat.read())
        """The parameters at the beginning of the round, and the outer momentum: the same at all servers of a stage."""
        self.place = 0
        """Which local step of the round it is at."""
        self._flat, self._optimizer = flat, optimizer
        self._dropped = False

    def begin(self, state: OuterState) -> None:
        """Begins a round."""
        rounded = self._flat.rounded(state.parameters)  # what is told to newcomers has the model's number format
        self.outer, self.place = OuterState(rounded, state.buffers), 0
        self._flat.write(rounded)
        self._dropped = False

    def step(self, gradient: torch.Tensor, done: int) -> None:
        """One local step, after so many rounds."""
        self.return_if_dropped()
        for group in self._optimizer.param_groups:
            group["lr"] = self.plan.rate(done * self.plan.count + self.place)
        self._flat.write_gradient(gradient)
        self._optimizer.step()

    def drop(self) -> None:
        """The round's local steps so far do not count: the next one begins from where the round began."""
        self._dropped = True

    def return_if_dropped(self) -> None:
        """Has to come before the parameters are used. `drop` may be called while they are, in another thread."""
        if self._dropped:
            self._flat.write(self.outer.parameters)
            self.place, self._dropped = 0, False

    def pseudo_gradient(self) -> torch.Tensor:
        """Where the round began minus where it has led to."""
        self.return_if_dropped()
        return torch.sub(self.outer.parameters, self._flat.read())

    def end(self, mean: torch.Tensor) -> None:
        """The outer step along the mean pseudo-gradient, with which the next round begins."""
        self.begin(self.plan.outer.descend(self.outer, mean))


def open_numbers(counted: Iterable[int], size: int, total: int) -> int:
    """How many microbatches of a round may be on their way: those of a local step once the ones before are counted.

    Args:
        counted: How many each stage has counted.
        size: Microbatches of a local step.
        total: Of the round.
    """
    return min((min(counted) // size + 1) * size, total)

"""When a run does what: inner steps of each round, and their learning rate. The same at all peers."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Final

from optim.finalizers import Keep
from optim.lowrank import AdaptiveLowRankMean, LowRankMean
from optim.policies import HiddenSteps, PacedSteps, QuadraticSteps
from optim.recipe import Recipe
from optim.slots import Moment
from peer.settings import Settings

FINAL_LR: Final = 0.1
"""The cosine schedule of a run of known length ends at this fraction of the learning rate."""


class Schedule:
    """The schedule of a run.

    Args:
        settings: The run's settings.
        recipe: Its method.
    """

    def __init__(self, settings: Settings, recipe: Recipe) -> None:
        self._inner, self._rounds, self._policy = settings.inner, settings.run.rounds, recipe.policy
        self._first, self._every = (self._policy.steps(Moment(round=number, lr=self._inner.lr)) for number in (1, 2))
        self._starts = [0]  # inner steps before each round, where rounds differ
        self.finishes = recipe.finalizer != Keep()
        """Whether a last exchange follows the rounds, which makes one state of the peers' own ones."""
        self.operations = 2 if isinstance(recipe.mixer, (LowRankMean, AdaptiveLowRankMean)) else 1
        """Of a round. Each makes a revision; elsewhere in this class, a revision is what a round comes to."""

    @property
    def last(self) -> int:
        """The revision that ends the run; 0 if none does."""
        return self._rounds * self.operations + self.finishes if self._rounds else 0

    def is_last_exchange(self, revision: int) -> bool:
        """Whether this revision is made by that last exchange, without any inner steps."""
        return self.finishes and revision == self.last

    def steps(self, revision: int, *, pace: float = 1.0, load: float = 1.0) -> int:
        """Inner steps of the round that makes this revision, from the beginning of the exchange before.

        If they depend on how fast a peer is, or on how much is sent (see `Moment`), a round counts the same in the
        schedule whatever it takes.
        """
        if isinstance(self._policy, (PacedSteps, HiddenSteps)):
            return self._policy.steps(Moment(round=revision, lr=self._inner.lr, pace=pace, load=load))
        return 0 if self.is_last_exchange(revision) else self.before(revision + 1) - self.before(revision)

    def before(self, revision: int) -> int:
        """Inner steps of the whole run before that round."""
        if not isinstance(self._policy, QuadraticSteps):
            return 0 if revision <= 1 else self._first + (revision - 2) * self._every
        starts = self._starts
        while len(starts) < revision:
            left = self._total - starts[-1] if self._rounds else None
            starts.append(starts[-1] + self._quadratic(self.rate(self._after_warmup(starts[-1])), left))
        return starts[revision - 1]

    def rate(self, done: int) -> float:
        """The learning rate of the inner step after `done` others of the whole run.

        Linear warm-up; then constant or, in a run whose number of rounds is known, half a cosine down to a tenth.
        """
        return self._rate(done, self._total) if self._rounds else self._rate(done, 0)

    @cached_property
    def _total(self) -> int:
        """Inner steps of a run of known length."""
        if not isinstance(self._policy, QuadraticSteps):
            return self.before(self._rounds + 1)
        # The schedule depends on the number of steps, and that on the schedule: the most that the rounds suffice for.
        low, high = self._rounds, self._rounds * self._quadratic(self._inner.lr * FINAL_LR, None) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(middle) else (low, middle)
        return low

    def _fits(self, total: int) -> bool:
        """Whether a run of so many inner steps needs no more rounds than there are."""
        done = 0
        for _ in range(self._rounds):
            done += self._quadratic(self._rate(self._after_warmup(done), total), None)
            if done >= total:
                return True
        return False

    def _quadratic(self, lr: float, left: int | None) -> int:
        return self._policy.steps(Moment(round=1, lr=lr, total=left))

    def _after_warmup(self, done: int) -> int:
        """While the rate is low because it is still rising, exchanges are as frequent as at its peak."""
        return max(done, self._inner.warmup)

    def _rate(self, done: int, total: int) -> float:
        inner = self._inner
        if done < inner.warmup:
            return inner.lr * (done + 1) / inner.warmup
        if not total:
            return inner.lr
        progress = min(1.0, (done - inner.warmup) / max(1, total - inner.warmup))
        return inner.lr * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress)))

"""Notices when a run gets worse instead of better."""

from __future__ import annotations

import math

RISE = 1.0
"""Nats by which the validation loss is above the best so far when something is wrong."""

EVALUATIONS = 3
"""In a row, as single ones may be bad."""


class DivergenceGuard:
    """Looks at one validation loss after the other."""

    def __init__(self) -> None:
        self.best = math.inf
        """The lowest loss so far."""
        self._high = 0

    def sees(self, loss: float) -> bool:
        """Takes down a loss. True if the run has got worse just now: that is said once, until it gets better again."""
        if loss < self.best:
            self.best = loss
        if loss <= self.best + RISE:
            self._high = 0
        else:  # also if it is not a number
            self._high += 1
        return self._high == EVALUATIONS

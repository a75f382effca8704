"""Where a run is in its learning rate's schedule, for those who see only one rate after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs


@attrs.define
class Warmup:
    """Whether the learning rate is still rising, and to what.

    Args:
        first: The rate before the first step, which is the peak if nothing else is known.
    """

    first: float
    over: bool = False
    """Whether the rate has been at its peak, or was higher than it is."""
    highest: float = 0.0
    """That was seen."""

    def sees(self, group: Mapping[str, Any]) -> None:
        """A step takes place with the rate of this parameter group."""
        lr = float(group["lr"])
        self.over = self.over or lr < self.highest or lr >= self._peak(group) * (1 - 1e-9)
        self.highest = max(self.highest, lr)

    def after(self, group: Mapping[str, Any]) -> float:
        """The rate; while it is rising, that after the warm-up."""
        return float(group["lr"]) if self.over else self._peak(group)

    def _peak(self, group: Mapping[str, Any]) -> float:
        """PyTorch's schedulers keep it in the group: as what they multiply, or as the peak of a cycle."""
        return max(self.first, *(float(group.get(name, 0.0)) for name in ("lr", "initial_lr", "max_lr")))

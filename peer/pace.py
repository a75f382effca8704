"""How fast this peer trains beside the others, for methods in which slower peers take fewer steps."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

FASTEST = 1e9
"""Steps per second: nobody is believed to be faster."""

SLOWEST = 1 / 16
"""Share of the fastest peer's speed: still slower ones take as many steps, and come late. So a member that lies about
its own can make the others take a sixteenth of their steps, and no fewer."""

FORGETTING = 0.5
"""What earlier measurements count for, each time: a machine gets slower when its user comes back."""


@attrs.define
class Speed:
    """Measures how fast we are."""

    _steps: float = 0.0
    _seconds: float = 0.0

    def add(self, steps: int, seconds: float) -> None:
        """So many inner steps took so long."""
        if steps:
            self._steps = FORGETTING * self._steps + steps
            self._seconds = FORGETTING * self._seconds + seconds

    @property
    def rate(self) -> float:
        """Inner steps per second; 0 while nothing is known."""
        return min(self._steps / self._seconds, FASTEST) if self._seconds > 0 else 0.0


def pace(ours: float, others: Iterable[float]) -> float:
    """Our speed as a share of the fastest peer's; 1 while ours is not known."""
    fastest = max((speed for speed in others if speed <= FASTEST), default=0.0)
    return max(SLOWEST, min(1.0, ours / fastest)) if ours > 0 and fastest > 0 else 1.0

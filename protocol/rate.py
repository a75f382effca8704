"""Caps on bytes per second, without IO."""

from __future__ import annotations

_SMALLEST_BURST = 1 << 14
_BURST_SECONDS = 0.1


class TokenBucket:
    """A budget that fills at a steady rate up to a tenth of a second's worth, and may be overdrawn.

    Overdrawing keeps its user simple: it spends what it did, and waits while `delay` is positive.

    Args:
        rate: Bytes per second, above zero.
    """

    def __init__(self, rate: float) -> None:
        if not rate > 0:
            raise ValueError(f"a rate must be above zero, not {rate}")
        self._rate = rate
        self._burst = max(_SMALLEST_BURST, rate * _BURST_SECONDS)
        self._level = self._burst
        self._updated: float | None = None

    def level(self, now: float) -> int:
        """Bytes that may be spent now; negative while in debt."""
        if self._updated is not None:
            self._level = min(self._burst, self._level + (now - self._updated) * self._rate)
        self._updated = now
        return int(self._level)

    def spend(self, count: int, now: float) -> None:
        """Takes bytes out, whether they are there or not."""
        self.level(now)
        self._level -= count

    def delay(self, now: float) -> float:
        """Seconds until a useful number of bytes may be spent; 0 if that is now."""
        missing = _SMALLEST_BURST / 2 - self.level(now)
        return max(0.0, missing / self._rate)

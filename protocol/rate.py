"""Caps on bytes and requests per second, without IO. Time is the caller's, in seconds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

import attrs

_K = TypeVar("_K", bound=Hashable)
_SMALLEST_BURST = 1 << 14
_BURST_SECONDS = 0.1


class TokenBucket:
    """A budget that fills at a steady rate up to a tenth of a second's worth, and may be overdrawn.

    Overdrawing keeps its user simple: it spends what it did, and waits while `delay` is positive. Users that say who
    they are take turns: whoever has waited for longest goes first.

    Args:
        rate: Bytes per second, above zero.
    """

    def __init__(self, rate: float) -> None:
        if not rate > 0:
            raise ValueError(f"a rate must be above zero, not {rate}")
        self._rate = rate
        self._burst = int(max(_SMALLEST_BURST, rate * _BURST_SECONDS))
        self._level: float = self._burst
        self._updated: float | None = None
        self._waiting: list[object] = []  # in the order in which they came

    def level(self, now: float) -> int:
        """Bytes that may be spent now; negative while in debt."""
        if self._updated is not None:
            self._level = min(self._burst, self._level + (now - self._updated) * self._rate)
        self._updated = now
        return int(self._level)

    def spend(self, count: int, now: float, who: object = None) -> None:
        """Takes bytes out, whether they are there or not."""
        self.level(now)
        self._level -= count
        if count:
            self.leave(who)

    def delay(self, now: float, who: object = None) -> float:
        """Seconds until a useful number of bytes may be spent, also by those who wait already; 0 if that is now."""
        ahead = 0
        if who is not None:
            if who not in self._waiting:
                self._waiting.append(who)
            ahead = self._waiting.index(who)
        missing = min((1 + ahead) * _SMALLEST_BURST / 2, self._burst) - self.level(now)
        return max(0.0, missing / self._rate)

    def leave(self, who: object) -> None:
        """Somebody does not wait any more."""
        if who in self._waiting:
            self._waiting.remove(who)


@attrs.define
class _Allowance:
    tokens: float
    filled: float


class Quota(Generic[_K]):
    """Counts requests by whoever makes them, so that nobody can have more of our time than their share.

    Args:
        rate: Requests a second that one may make in the long run.
        burst: Requests that one may make at once after a pause.
        remembered: How many are remembered; those that were idle for longest are forgotten first.
    """

    def __init__(self, *, rate: float, burst: int, remembered: int = 1024) -> None:
        self._rate = rate
        self._burst = burst
        self._remembered = remembered
        self._allowances: OrderedDict[_K, _Allowance] = OrderedDict()

    def allow(self, who: _K, now: float) -> bool:
        """Whether they may make one more request now."""
        allowance = self._allowance(who, now)
        if allowance.tokens < 1:
            return False
        allowance.tokens -= 1
        return True

    def charge(self, who: _K, count: float, now: float) -> None:
        """Counts something as so many requests. That can bring them into debt, but by no more than one burst."""
        allowance = self._allowance(who, now)
        allowance.tokens = max(-float(self._burst), allowance.tokens - count)

    def _allowance(self, who: _K, now: float) -> _Allowance:
        allowance = self._allowances.setdefault(who, _Allowance(float(self._burst), now))
        self._allowances.move_to_end(who)
        if len(self._allowances) > self._remembered:
            self._allowances.popitem(last=False)
        allowance.tokens = min(float(self._burst), allowance.tokens + (now - allowance.filled) * self._rate)
        allowance.filled = now
        return allowance

"""How many lanes a connection should have, without IO. Time is the caller's, in seconds.

On a short way one connection does everything. On a long one, bulk data that lasts gets a lane of its own, so that a
lost packet does not hold up requests. More lanes help where packets are lost and congestion control takes that for
congestion; whether it does shows in the rate. So the number is doubled where there are losses, and halved again if less
than a tenth was gained.
"""

from __future__ import annotations

import attrs

MAX_LANES = 8
"""Lanes of one connection."""

LONG = 0.01
"""Seconds of round trip above which there are lanes at all."""

IDLE = 60.0
"""Seconds without bulk data after which lanes are given up."""

_WORTHWHILE = 1 << 15  # bytes since the last time, a quarter of a second: below, there is little to gain
_PERIOD = 1.0  # seconds over which a rate is measured, at least: also ten round trips
_ROUND_TRIPS = 10
_GAIN = 1.1  # that twice the lanes have to bring
_LOSSY = 0.002  # of the segments that have to be sent again for more lanes to be tried
_HELD_BACK = 0.7  # of the rate that is allowed: above, it is our own pacing that allows no more
_PAUSE = 60.0  # seconds until more lanes are tried again, after they brought nothing


@attrs.frozen
class Traffic:
    """What happened on all connections of a pair since the last time."""

    moved: int
    """Bytes of bulk data handed over."""
    waiting: bool
    """There is more."""
    allowed: float
    """Bytes per second that our own pacing allows now, which follows the queue on the way."""
    sent: int | None
    """Segments sent; None where the system does not tell."""
    resent: int
    """Those of them that were sent again."""


class LanePolicy:
    """Decides for one direction of one connection.

    Args:
        limit: The most lanes.

    Attributes:
        wanted: The number of lanes.
    """

    def __init__(self, limit: int = MAX_LANES) -> None:
        self.wanted = 0
        self._limit = limit
        self._busy_since: float | None = None
        self._busy_at = 0.0
        self._began: float | None = None  # the period over which the rate is measured
        self._settling = False  # it does not count: new lanes get up to speed
        self._moved = 0
        self._sent: int | None = 0
        self._resent = 0
        self._before: tuple[int, float] | None = None  # lanes and rate before more lanes were tried
        self._try_at = 0.0

    @property
    def active(self) -> bool:
        """Bulk data flows, or did lately: `update` has something to do."""
        return self._busy_since is not None or self.wanted > 0

    def update(self, now: float, rtt: float, lanes: int, traffic: Traffic) -> int:
        """Takes in what happened since the last time; returns `wanted`.

        Args:
            now: The time.
            rtt: The shortest round trip.
            lanes: How many there are.
            traffic: See `Traffic`.
        """
        if not (traffic.moved or traffic.waiting):
            self._busy_since = self._began = None
            if now - self._busy_at >= IDLE:
                self.wanted = 0
            return self.wanted
        self._busy_at = now
        if self._busy_since is None:
            self._busy_since = now
        if rtt < LONG or not self._limit:
            self.wanted = 0
        elif not self.wanted:
            self.wanted = int(traffic.waiting and traffic.moved >= _WORTHWHILE)
            self._before = self._began = None
            self._settling = True
        elif lanes != self.wanted:
            self._began = None
        else:
            self._measure(now, rtt, traffic)
        return self.wanted

    def _measure(self, now: float, rtt: float, traffic: Traffic) -> None:
        if self._began is None:
            self._restart(now)
            return
        self._moved += traffic.moved
        self._sent = None if self._sent is None or traffic.sent is None else self._sent + traffic.sent
        self._resent += traffic.resent
        seconds = now - self._began
        if seconds < max(_PERIOD, _ROUND_TRIPS * rtt):
            return
        rate = self._moved / seconds
        held_back = rate > _HELD_BACK * traffic.allowed
        lossy = not held_back and (self._sent is None or self._resent > _LOSSY * self._sent)
        self._restart(now)
        if self._settling:
            self._settling = False
        else:
            self._decide(now, rate, lossy)

    def _decide(self, now: float, rate: float, lossy: bool) -> None:
        if self._before is not None:
            fewer, slower = self._before
            self._before = None
            if rate < _GAIN * slower:
                self.wanted = fewer
                self._try_at = now + _PAUSE
                return
        if lossy and now >= self._try_at and self.wanted < self._limit:
            self._before = self.wanted, rate
            self.wanted = min(2 * self.wanted, self._limit)
            self._settling = True

    def _restart(self, now: float) -> None:
        self._began, self._moved, self._sent, self._resent = now, 0, 0, 0

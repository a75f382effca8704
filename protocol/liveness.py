"""Whether the peer at the other end of a connection is there, and whether what was begun moves. Without IO.

Time is the caller's, in seconds.
"""

from __future__ import annotations

import math
from collections import deque

LONGEST_SILENCE = 30.0
"""Seconds of silence after which a peer counts as gone however long its round trips are."""

_MAX_OPEN = 64  # pings whose answers are still of interest


class Pulse:
    """The heartbeat of one connection.

    A ping goes out with every beat, whether or not the ones before were answered: so the other side hears from us as
    often on a long way as on a short one, and a ping that waits in a queue hides nothing. The round trip and its
    variation are smoothed as RFC 6298 does it for TCP, but that trips which are shorter than expected hardly count as
    variation: they are not what silence is borne for, and come after each time that the peer's process was stopped.
    Silence is borne for as long as TCP may need to repeat what was lost: two of its timeouts, the second because what
    is repeated has to travel as well.

    Args:
        heartbeat: Seconds between pings.
        dead_after: Seconds of silence that are borne at least.
        rtt: A first round-trip time, which counts until a ping was answered, and after that as a bound for the first
            answer: it may have been measured while the peer's process was stopped.
        now: The time.
    """

    def __init__(self, *, heartbeat: float, dead_after: float, rtt: float, now: float) -> None:
        self.rtt = rtt
        """Smoothed round-trip time."""
        self._variation = rtt / 2
        self._heartbeat = heartbeat
        self._dead_after = dead_after
        self._heard_at = self._due = now
        self._answered = False
        self._count = 0
        self._open: deque[tuple[bytes, float]] = deque(maxlen=_MAX_OPEN)  # token, and when it was sent

    @property
    def patience(self) -> float:
        """Seconds of silence after which the peer counts as gone."""
        needed = self._heartbeat + 2 * (self.rtt + 4 * self._variation)
        return max(self._dead_after, min(needed, LONGEST_SILENCE))

    def heard(self, now: float) -> None:
        """Something has arrived."""
        self._heard_at = now

    def fresh(self, now: float) -> bool:
        """The peer was heard a moment ago."""
        return now - self._heard_at <= self.patience * 5 / 8

    def gone(self, now: float) -> bool:
        """The peer has been silent for too long."""
        return now >= self._heard_at + self.patience

    def ping(self, now: float) -> bytes:
        """The token of the next ping."""
        self._count += 1
        token = self._count.to_bytes(8, "big")
        self._open.append((token, now))
        return token

    def answered(self, token: bytes, now: float) -> None:
        """A ping was answered; those before it that were not no longer will be."""
        if self._late(now) > 0 or all(token != other for other, _ in self._open):
            return  # this process was stopped meanwhile, or nobody asked
        while (sent := self._open.popleft())[0] != token:
            pass
        sample = now - sent[1]
        if not self._answered and sample < self.rtt:
            self.rtt, self._variation = sample, sample / 2
        excess = sample - self.rtt
        self._variation += (max(excess, -excess / 8) - self._variation) / 4
        self.rtt += excess / 8
        self._answered = True

    def next_beat(self, now: float) -> float:
        """When to call `beat`."""
        self._due = min(now + self._heartbeat, max(now, self._heard_at + self.patience))
        return self._due

    def beat(self, now: float) -> float:
        """It is time. Returns for how long this very process was stopped: that is not the peer's silence."""
        late = self._late(now)
        if late > 0:
            self._heard_at = min(now, self._heard_at + late)
            self._open.clear()
        return late

    def _late(self, now: float) -> float:
        return max(0.0, now - self._due - self._heartbeat)


class Progress:
    """Whether something that takes time moves on: by at least `amount` in `seconds`."""

    def __init__(self, amount: int, seconds: float) -> None:
        self._amount = amount
        self._seconds = seconds
        self._since = math.inf
        self._count = 0

    @property
    def running(self) -> bool:
        """It has begun and is not over."""
        return self._since < math.inf

    def begin(self, now: float, count: int) -> None:
        """It begins, or begins anew, at a count."""
        self._since, self._count = now, count

    def end(self) -> None:
        """It is over."""
        self._since = math.inf

    def excuse(self, seconds: float, now: float) -> None:
        """Nothing could move for some time until now, which was nobody's fault."""
        if self.running:
            self._since = min(now, self._since + seconds)

    def stuck(self, now: float, count: int) -> bool:
        """Whether it has not moved on, now that it is at `count`."""
        if self.running and count - self._count >= self._amount:
            self.begin(now, count)
        return now >= self._since + self._seconds

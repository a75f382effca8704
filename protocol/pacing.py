"""How fast to send so that nothing queues up on the way, without IO. Time is the caller's, in seconds.

Loss-based congestion control fills the queue in front of the slowest link before it slows down: a fifth of a second and
more on many home lines, and whatever is sent on the same line waits behind it. Here the rate at which bytes arrive and
the round-trip time decide, in the manner of TCP Vegas (Brakmo and Peterson 1995) and BBR (Cardwell et al. 2016): when
the round trip takes longer than it needs to, what arrives is what the link can do; the rate goes below that until the
queue is gone, and then slowly up again. The kernel's own congestion control keeps working below that.

On a busy machine we are late again and again, and what arrives then says how much we sent, not what the link can do. So
where the system tells, the rate is the kernel's, of a time in which it never ran out of data. What arrives on average,
below that, tells that it did run out: more may wait unsent then, to last until we get our turn.
"""

from __future__ import annotations

import math
from collections import deque
from weakref import WeakKeyDictionary

import attrs

from protocol.transport import LineState

SMALLEST_BURST = 1 << 14
LARGEST_BURST = 1 << 22
SLOWEST = 1 << 16
"""Bytes per second below which nothing is paced: it holds up everything on the connection, pings as well, and those who
wait for the data give up."""

_QUICK, _SLOW = 0.01, 0.05  # seconds that one write should take
_BURST_SECONDS = 0.003  # what is handed over at a time lasts so long
_UNSENT_SECONDS = (0.003, 0.05)  # and what may wait unsent lasts so long
_KEPT_UP = 0.93  # of the rate has to arrive, else we were too slow to hand it over
_MORE, _LESS = 1.5, 0.95  # times what may wait unsent, when we were and when we were not
_LATELY = 1.0  # seconds
_TICK = 0.01  # seconds between looks, at least: also a round trip
_MEMORY = 10.0  # seconds for which the shortest round trip is remembered, at least; twice that at most
_QUEUE = 0.005  # seconds that a round trip may be longer than the shortest
_DRAINS = 2, 4  # in vain, after which a short queue counts as somebody else's, and a long one
_JITTERS = 1.5  # that a round trip may be longer besides
_AHEAD = 1.15  # of the link's rate: the most that the rate grows to at first
_GROWING = 1.25  # times what arrived before: while it grows so, the link is not full
_FULL, _DEEP = 2, 0.03  # round trips without such growth after which it is; or one, with so many seconds of queue
_PERIOD, _PERIODS = 0.5, 6  # seconds and round trips for which what arrived at most is remembered, at least
_FORGET = 0.75  # of how much faster the link was before, each time: below that, the rate grows faster
_UNKNOWN, _START = 2.5e6, 4.0  # bytes per second that are tried at once, and times what arrived until there was a queue
_DOUBT = 0.8  # of that is the link's rate, for each time that a queue is still there after it was drained
_HOLD = 0.95  # of the link's rate, after the queue was drained
_STEP = 0.012  # of the link's rate, by which the rate grows each round trip
_KNOWN = 1.08  # of the link's rate: above, the link has changed, and the rate grows faster
_FAR = 0.8  # of what the link could do a while ago: below, the rate grows faster as well
_LEAP = 0.02  # of the rate: by so much at first, and then by a quarter more each round trip
_FARTHEST = 0.5
_MOST_TRIPS = 16  # between two looks: on a slow line what is handed over at a time lasts longer than a round trip
_SHORT = 0.02  # seconds of queue that could be noise
_ODD = 0.12  # of what was asked for: by so much more or less arrives if our bytes queue
_SLOWEST = 0.3  # of the link's rate, while the queue is drained


class Senders:
    """Which of an endpoint's connections have sent bulk data lately. They may share a line with each other."""

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[object, float] = WeakKeyDictionary()  # one that has ended is not kept

    def alone(self, sender: object, now: float) -> bool:
        """Notes that one is sending, and returns whether no other one is."""
        self._seen[sender] = now
        for other, seen in list(self._seen.items()):
            if seen < now - _LATELY:
                del self._seen[other]
        return len(self._seen) == 1


class Pacer:
    """Decides the rate of one connection.

    Attributes:
        rate: Bytes per second to send at most; infinity until there was a queue.
        limit: What to keep to now: that, or a multiple of what arrived so far.
        burst: Bytes to hand over at a time; 0 while nothing is known.
        unsent: Bytes that may wait unsent in the kernel: none of it may be late while we are not scheduled.
        delivered: Bytes per second that arrive when there is data to send all the time.
        carried: The most bytes per second that have arrived lately, for a round trip or longer.
    """

    def __init__(self) -> None:
        self.rate = self.limit = math.inf
        self.burst = 0
        self.unsent = SMALLEST_BURST
        self.delivered = self.carried = 0.0
        self._due = -math.inf
        self._last: tuple[float, int] | None = None  # time and bytes arrived, at the last look
        self._steady = False  # there was bulk data to send all the time since
        self._most, self._could, self._carried = _Highest(), _Highest(), _Highest()
        self._asked = deque([0.0], maxlen=2)  # the rates of the last two round trips: what arrives now was sent then
        self._trips = _Trips()
        self._previous = 0.0  # the rate that was possible, as of the last look
        self._patience = 2 * _UNSENT_SECONDS[0]  # seconds that what waits unsent lasts
        self._leap = _LEAP
        self._best, self._rounds = 0.0, 0  # what arrived at most, and round trips since; see `_filled`
        self._link = 0.0  # the link's rate, when there was a queue
        self._draining = False
        self._drains = 0

    def due(self, now: float) -> bool:
        """Whether it is time for `update`."""
        return now >= self._due

    def pause(self) -> None:
        """There is no bulk data to send, or none may be sent: what arrives says nothing about the link."""
        self._steady = False

    def update(self, now: float, path: LineState, *, alone: bool = True) -> None:
        """Takes in what is known about the connection now.

        Args:
            now: The time.
            path: What is known.
            alone: No other one may share the line with it. Else nothing is decided: of several that see each other's
                queues, some would give way for good. Sharing a line is what the kernel's congestion control is for.
        """
        self._trips.update(now, path.rtt)
        self._due = now + max(_TICK, path.rtt)
        last, self._last = self._last, (now, path.acked)
        steady, self._steady = self._steady, True
        if last is None or now <= last[0]:
            return
        arrived = (path.acked - last[1]) / (now - last[0])
        delivered = arrived if path.rate is None else path.rate
        # Acknowledgements that were late make too much of what arrived; the rates of several connections do not add up.
        self._carried.update(now, _MEMORY, min(arrived, delivered))
        self.carried = self._carried.value
        if steady:
            change = _LESS if arrived >= _KEPT_UP * self._previous else _MORE
            low, high = _UNSENT_SECONDS
            self._patience = min(max(low, change * self._patience), high)
        if steady or path.rate is not None:
            self.delivered = delivered
            self._most.update(now, max(_PERIOD, _PERIODS * (path.rtt - self._trips.excess)), delivered)
            self._could.update(now, _MEMORY, delivered)
            if self._filled(path.limited) and alone:
                self._decide(path, round((now - last[0]) / max(_TICK, path.rtt)))
            self.rate = max(self.rate, SLOWEST)
            self._asked.append(self.rate)
            self._previous = min(self.rate, self.delivered)
        self.delivered = max(self.delivered, delivered)
        self.limit = self.rate if alone and self.rate < math.inf else max(_UNKNOWN, _START * self._most.value)
        possible = min(self.limit, self._most.value or self.delivered)
        self.burst = _bounded(_BURST_SECONDS * possible)
        self.unsent = _bounded(self._patience * possible)

    def restart(self) -> None:
        """Other connections than before carry the bulk data: what arrived so far says nothing about those."""
        self._steady = False
        self._most = _Highest()
        self._best, self._rounds = 0.0, 0

    def _filled(self, limited: bool) -> bool:
        """Whether the link is, as far as we know: while more arrives each round trip, we are not yet as fast as it is.

        Args:
            limited: See `LineState.limited`.
        """
        if self.rate < math.inf:
            return True
        deep = self._trips.queue > _DEEP
        if self.delivered > _GROWING * self._best:
            self._best, self._rounds = self.delivered, 0
        elif deep or not limited:
            self._rounds += 1
        return self._rounds >= (_FULL if limited or not deep else 1)

    def _decide(self, path: LineState, trips: int) -> None:
        if self._draining:  # what was done now shows in the next round trip
            self._draining = False
            self.rate = (self._rest(path) if self._trips.excess > _DEEP else _HOLD) * self._link
        elif self._trips.long:
            self._leap = _LEAP
            # If less arrives than was sent, or more, then it is our bytes that queue, and what arrives is what fits.
            asked = self._asked[0]
            odd = not path.limited and abs(self.delivered - asked) > _ODD * asked
            short = self._trips.excess <= _SHORT
            ours = odd and not short
            if self._drains >= _DRAINS[not short] and not ours:
                self._trips.accept()
                self._drains = 0
                return
            if not short or not self._drains:
                self._link = _DOUBT ** min(self._drains, 2) * self._most.value
                self._could.forget(self._link)
            self._drains += 1
            self._draining = True
            self.rate = self._rest(path) * self._link
        elif self.rate < math.inf:
            self._drains = 0
            for _ in range(min(max(trips, 1), _MOST_TRIPS)):
                self._grow()

    def _grow(self) -> None:
        """A round trip was as short as it can be."""
        if self.rate >= _KNOWN * self._link or self.rate < _FAR * self._could.value:
            grown = (1 + self._leap) * self.rate
            self._leap = min(1.25 * self._leap, _FARTHEST)
        else:
            grown = self.rate + _STEP * self._link
        self.rate = min(grown, max(_AHEAD, 1 + 2 * self._leap) * max(self._link, self._most.value))

    def _rest(self, path: LineState) -> float:
        """The part of the link's rate with which the queue is gone in a round trip."""
        return max(_SLOWEST, 1 - self._trips.excess / path.rtt)


def next_size(size: int, written: int, seconds: float, *, smallest: int, largest: int) -> int:
    """How many bytes to hand over at a time, after `written` of at most `size` took so many seconds.

    What is urgent waits meanwhile, so it should take `_QUICK` to `_SLOW`. A small write that was quick says nothing
    about larger ones.
    """
    if seconds > _SLOW:
        return max(size // 2, smallest)
    return min(2 * size, largest) if seconds < _QUICK and 2 * written >= size else size


def _bounded(size: float) -> int:
    return int(min(max(size, SMALLEST_BURST), LARGEST_BURST))


@attrs.define
class _Highest:
    """The highest rate at which data arrived lately: what a link can do, if there was a queue meanwhile.

    What arrives in a single round trip may be less for many reasons. A lower one alone proves nothing.
    """

    _now: float = 0.0  # of this period, and of the one before
    _before: float = 0.0
    _until: float = -math.inf

    @property
    def value(self) -> float:
        """Bytes per second; 0 if nothing was measured."""
        return max(self._now, self._before)

    def update(self, now: float, period: float, rate: float) -> None:
        """Takes in one, which counts for at least so long, and at most for twice that."""
        if now >= self._until:
            self._before, self._now, self._until = self._now, 0.0, now + period
        self._now = max(self._now, rate)

    def forget(self, rate: float) -> None:
        """Goes a part of the way to a lower one."""
        self._now, self._before = (one - _FORGET * max(0.0, one - rate) for one in (self._now, self._before))


@attrs.define
class _Trips:
    """Round-trip times, and what is normal for them."""

    _now: float = math.inf  # the shortest of this period, and of the one before
    _before: float = math.inf
    _until: float = -math.inf
    _normal: float = 0.0
    _jitter: float = 0.0
    _last: float = math.nan
    _recent: float = math.nan

    @property
    def long(self) -> bool:
        """There is a queue."""
        return self.queue > _QUEUE + _JITTERS * self._jitter

    @property
    def queue(self) -> float:
        """Seconds by which a round trip takes longer than is normal. A single long one does not count."""
        return self._recent - self._normal

    @property
    def excess(self) -> float:
        """As `queue`, of the last one alone."""
        return self._last - self._normal

    def update(self, now: float, rtt: float) -> None:
        """Takes in one."""
        if now >= self._until:
            self._before, self._now, self._until = self._now, math.inf, now + _MEMORY
        self._now = min(self._now, rtt)
        shortest = min(self._now, self._before)
        if math.isnan(self._last):
            self._last = self._normal = rtt
        self._jitter += (min(abs(rtt - self._last), _QUEUE) - self._jitter) / 8
        self._recent, self._last = min(rtt, self._last), rtt
        if self._recent < self._normal:
            self._normal += (self._recent - self._normal) / 2
        self._normal = max(self._normal, shortest)

    def accept(self) -> None:
        """There is a queue that is not ours to drain: round trips take as long as this now."""
        self._normal = self._recent

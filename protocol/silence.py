"""For how long those whose bytes we wait for may be silent, by what they have sent so far. Without input or output.

Bytes come in on some streams, each from a *source*. What a source has sent so far, or, before that, the pace of what
was carried out last, says how long `SAMPLE` more bytes should take; `FACTOR` times as much is borne, but no less than
`RoundTimes.quiet` and no more than `RoundTimes.stall`. It ends with a single byte. But bytes come to a stream a record
at a time, which takes a while on a slow line that is shared: as long as the line itself brings something, silence is
borne for as long as that may take.

A source may have nothing to send because somebody before it is slow. So one that is overdue is asked, and excused if it
is waiting itself: then it is the one to find out who is stuck. But it may be lying, so that is believed for a while.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs

from protocol.coordinator import RoundTimes

SAMPLE = 1 << 16
"""Bytes whose time is taken; a source has to have sent as many before it goes by what it has sent."""

FACTOR = 8.0
"""Times the expected time that silence is borne."""

LEAST = 1 << 12
"""Bytes that a line has to bring within `RoundTimes.quiet` to count as moving; what keeps a connection alive are
fewer."""

PERIOD = 0.25
"""Seconds between two looks."""


@attrs.define
class _Source:
    began: float
    heard: float
    came: float
    """When something came, or nothing could: an excuse of its own does not count."""
    line: int
    """Bytes that the line had brought at `since`."""
    since: float
    """When it moved last, or `quiet` seconds without that were over."""
    moved: float = -math.inf
    """When that was."""
    count: int = 0
    begun: bool = False
    """Its stream is there."""


class Silence:
    """Who has been silent for how long. Times are the caller's, in seconds.

    Args:
        times: The bounds.
        lines: Whose bytes are awaited, and how many their lines have brought by now. They may share one.
        pace: Bytes per second that came in when something was carried out last; 0 if that is not known.
        gap: Bytes that others may have to move before a source has something to send again.
        now: The time.
    """

    def __init__(self, times: RoundTimes, lines: Mapping[int, int], *, pace: float, gap: int = 0, now: float) -> None:
        self._times, self._pace = times, pace / max(1, len(lines))
        self._sources = {source: _Source(now, now, now, line, now) for source, line in lines.items()}
        self._heard = now
        self.longest = times.stall + SAMPLE * len(lines) / times.slowest
        """Seconds of silence that are borne at most."""
        self._believed = self.longest + gap / times.slowest
        self.due = now + PERIOD
        """When to look again."""

    def begun(self, source: int) -> None:
        """Its stream is there: it has all that it needs to send."""
        if source in self._sources:
            self._sources[source].begun = True

    def over(self, source: int) -> None:
        """All has come from there."""
        self._sources.pop(source, None)

    def limit(self, source: int, now: float) -> float:
        """Seconds of silence that are borne."""
        one, times = self._sources[source], self._times
        if now - one.moved < times.quiet:
            return self.longest
        if not one.begun:  # it may still be connecting, or wait for the plan: that is no question of pace
            return times.stall
        pace = one.count / max(one.heard - one.began, 1e-9) if one.count >= SAMPLE else self._pace
        expected = FACTOR * SAMPLE / pace if pace else times.stall
        return min(max(times.quiet, expected), times.stall)

    def silent(self, source: int, now: float) -> float:
        """Seconds since something came, or the source was excused."""
        return now - self._sources[source].heard

    def nothing(self, source: int, now: float) -> float:
        """Seconds since something came, or could have."""
        return now - self._sources[source].came

    def last(self, now: float) -> float:
        """Seconds since something came from anybody, or anybody was excused."""
        return now - self._heard

    def look(self, counts: Mapping[int, int], lines: Mapping[int, int], now: float) -> list[int]:
        """Takes in how many bytes have come from each source, and what its line has brought in all.

        Returns who is overdue, the longest silent first. To be called when it is `due`; if that was long ago, this
        process was stopped: that is nobody's silence.
        """
        stopped = max(0.0, now - self.due - PERIOD)
        self.due = now + PERIOD
        self._heard = min(now, self._heard + stopped)
        for source, one in self._sources.items():
            one.began += stopped
            one.heard, one.came = min(now, one.heard + stopped), min(now, one.came + stopped)
            one.moved += stopped
            one.since += stopped
            if lines[source] - one.line >= LEAST:
                one.moved = now
            another, over = lines[source] < one.line, now - one.since >= self._times.quiet
            if one.moved == now or another or over:  # what keeps a connection alive does not add up to that
                one.line, one.since = lines[source], now
            if counts[source] > one.count:
                one.count, one.heard, one.came, self._heard = counts[source], now, now, now
        overdue = [source for source in self._sources if self.overdue(source, now)]
        ends = (one.came + self._believed for one in self._sources.values())
        self.due = min([self.due, *(end for end in ends if end > now)])
        return sorted(overdue, key=lambda source: self._sources[source].heard)

    def overdue(self, source: int, now: float) -> bool:
        """Whether the source has been silent for too long. Not one from which all has come."""
        if source not in self._sources:
            return False
        # Those on whom a stuck one has an effect in turn should know it in turn, and not when they next ask.
        return self.silent(source, now) >= self.limit(source, now) or self.exhausted(source, now)

    def exhausted(self, source: int, now: float) -> bool:
        """Whether nothing has come for so long that the source is not believed any more that it waits itself."""
        return source in self._sources and self.nothing(source, now) >= self._believed

    def excuse(self, source: int, now: float) -> None:
        """Nothing can come from the source, because of us."""
        if source in self._sources:
            self._sources[source].came = now
            self._excuse(source, now)

    def believe(self, source: int, now: float) -> bool:
        """The source says that it has nothing to send: that excuses it, unless it has said so for too long."""
        if self.exhausted(source, now):
            return False
        self._excuse(source, now)
        return True

    def _excuse(self, source: int, now: float) -> None:
        if source in self._sources:
            self._sources[source].heard = self._heard = now

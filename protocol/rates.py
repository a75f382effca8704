"""What a peer knows about its lines, from the bytes that were moved anyway. Without input or output.

Nobody sends anything to find out. While data is on its way, the byte counts of all connections are looked at now and
then. Two looks with enough bytes between them bound a window, and the best that two windows in a row have in common is
what the line can do: one alone may be a buffer that was filled. A better figure counts at once, a worse one only
little by little: there may just have been nothing to send.

The rate towards a single peer is known only if nearly all bytes went there; else it was a share of the line's. But even
that may be less than the line could do: who waits for others sends no faster than they do. What the system has seen a
connection carry for a round trip is something that the lines at both ends can do in any case.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated

import attrs
from msgspec import Meta

from protocol.identity import PeerId

MAX_PARTNERS = 64
"""Peers about which a member says something."""

PERIOD = 0.1
"""Seconds between two looks."""

WINDOW = 1 << 16
"""Bytes of a window, at least: several times what is handed over at a time."""

SHORTEST_WINDOW = 1.0
"""Seconds that it lasts, at least. Less says more about buffers, and how quickly a connection dares to send, than about
the line: what takes no longer than two windows measures nothing."""

LONGEST_WINDOW = 2.0
"""Seconds after which it ends all the same."""

LEAST = 1 << 18
"""Bytes that have to be moved before they say anything about a line."""

_MOSTLY = 0.9
_FORGET = 1 / 4  # of the difference to a worse figure, each time
_REMEMBERED = 16  # measurements: what is known of one peer is tried again after so many of others

Rate = Annotated[int, Meta(ge=0, le=2**40)]
"""Bytes per second; 0 stands for "not known"."""


@attrs.frozen
class Partner:
    """What a member knows about the way to another one."""

    peer: PeerId
    sent: Rate
    received: Rate
    rtt: Annotated[int, Meta(ge=0, le=10**8)]
    """Microseconds."""
    relayed: bool
    carries: Rate = 0
    """What the way has carried at most lately, for a round trip or longer. It can do that, and perhaps more."""


@attrs.frozen
class Rates:
    """What a member knows about its lines. A hint: nobody relies on it for more than speed."""

    up: Rate = 0
    down: Rate = 0
    partners: Annotated[tuple[Partner, ...], Meta(max_length=MAX_PARTNERS)] = ()


UNKNOWN = Rates()


@attrs.frozen
class Count:
    """Bytes on one connection so far, and what else is known about it."""

    sent: int
    received: int
    rtt: float
    """Seconds."""
    relayed: bool
    carried: float = 0.0
    """Bytes per second that it has carried at most lately; 0 if nobody knows."""


@attrs.define
class _Best:
    """The best of one measurement."""

    rate: float = 0.0
    last: float = 0.0
    moved: int = 0

    def add(self, moved: int, seconds: float) -> None:
        rate = moved / seconds
        self.rate, self.last = max(self.rate, min(rate, self.last)), rate
        self.moved += moved


@attrs.define
class _Figure:
    rate: float
    age: int = 0


class RateMeter:
    """Turns byte counts into rates."""

    def __init__(self) -> None:
        self._opened: dict[bool, tuple[float, dict[PeerId, Count]]] = {}  # by direction: where its window begins
        self._best: dict[tuple[PeerId | None, bool], _Best] = {}  # by peer, None for all, and direction
        self._figures: dict[tuple[PeerId | None, bool], _Figure] = {}

    def look(self, now: float, counts: Mapping[PeerId, Count]) -> None:
        """Takes in what the connections have carried by now."""
        for sent in (True, False):
            began, known = self._opened.setdefault(sent, (now, dict(counts)))
            moved = {peer: _moved(known[peer], count, sent) for peer, count in counts.items() if peer in known}
            # What a relay passes on is counted on the connection to it.
            total = sum(count for peer, count in moved.items() if not counts[peer].relayed)
            if now >= began + (SHORTEST_WINDOW if total >= WINDOW else LONGEST_WINDOW):
                self._opened[sent] = now, dict(counts)
                self._close(sent, moved, total, now - began)

    def _close(self, sent: bool, moved: Mapping[PeerId, int], total: int, seconds: float) -> None:
        """A window is over, in which so much was moved."""
        self._best.setdefault((None, sent), _Best()).add(total, seconds)
        for peer, count in moved.items():
            if count and count >= _MOSTLY * total:
                self._best.setdefault((peer, sent), _Best()).add(count, seconds)
            elif (peer, sent) in self._best:
                self._best[peer, sent].last = 0.0

    def conclude(self, *, raise_only: bool = False) -> None:
        """The data that was on its way has arrived: what was measured counts from now on.

        Args:
            raise_only: Something else may have been what limited it, so it makes no figure worse.
        """
        measured = {key: best.rate for key, best in self._best.items() if best.moved >= LEAST and best.rate}
        for key, rate in measured.items():
            figure = self._figures.setdefault(key, _Figure(rate))
            figure.rate = max(rate, figure.rate + (0 if raise_only else _FORGET) * (rate - figure.rate))
            figure.age = 0
        if measured:
            for key, figure in list(self._figures.items()):
                figure.age += 1
                if figure.age > _REMEMBERED and key[0] is not None:
                    del self._figures[key]
        self._best.clear()
        self._opened.clear()

    def rates(self, counts: Mapping[PeerId, Count], peers: Collection[PeerId]) -> Rates:
        """What is known: of these peers, as far as they are connected, the first `MAX_PARTNERS`."""
        connected = [peer for peer in sorted(peers) if peer in counts][:MAX_PARTNERS]
        return Rates(
            self._rate(None, True),
            self._rate(None, False),
            tuple(
                Partner(
                    peer,
                    self._rate(peer, True),
                    self._rate(peer, False),
                    min(int(1e6 * counts[peer].rtt), 10**8),
                    counts[peer].relayed,
                    min(int(counts[peer].carried), 2**40),
                )
                for peer in connected
            ),
        )

    def _rate(self, peer: PeerId | None, sent: bool) -> int:
        figure = self._figures.get((peer, sent))
        return 0 if figure is None else min(int(figure.rate), 2**40)


def _moved(before: Count, after: Count, sent: bool) -> int:
    """Bytes since; none if it is another connection."""
    return max(0, after.sent - before.sent if sent else after.received - before.received)

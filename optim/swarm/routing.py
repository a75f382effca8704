"""Which server of a stage gets the next microbatch: interleaved weighted round robin.

Each server has a virtual time. The one with the least is chosen, and its time moves on by what the work should take at
its measured rate; so each gets work in proportion to its rate, and requests that are made at once go to different ones.
"""

from __future__ import annotations

from collections.abc import Collection
from random import Random

import attrs

from protocol.identity import PeerId

SMOOTHING = 0.2
"""How much the newest measurement counts in a rate."""

FIRST_PAUSE = 5.0
"""Seconds for which a server that has failed once gets nothing; twice as many for each failure in a row."""

LONGEST_PAUSE = 120.0


@attrs.define(eq=False)
class _Server:
    time: float
    """Virtual: seconds of work that it has been given."""
    rate: float | None
    """Samples of forward passes per second; None before the first measurement."""
    failures: int = 0
    paused_until: float = 0.0


class Router:
    """The servers of one stage, as one trainer sees them."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._servers: dict[PeerId, _Server] = {}

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._servers

    def __len__(self) -> int:
        return len(self._servers)

    def add(self, peer: PeerId, rate: float | None = None) -> None:
        """A server is there. It begins at the least virtual time of the others, so that it is tried at once.

        Args:
            peer: Who.
            rate: Samples per second, if it is known from elsewhere.
        """
        if peer not in self._servers:
            start = min((server.time for server in self._servers.values()), default=0.0)
            self._servers[peer] = _Server(start, rate)

    def remove(self, peer: PeerId) -> None:
        """A server is gone."""
        self._servers.pop(peer, None)

    def rate(self, peer: PeerId) -> float:
        """Its rate; that of the others on average as long as nothing is known."""
        own = self._servers[peer].rate
        known = [server.rate for server in self._servers.values() if server.rate is not None]
        return own if own is not None else sum(known) / len(known) if known else 1.0

    def choose(
        self, work: float, now: float, excluded: Collection[PeerId] = (), preferred: PeerId | None = None
    ) -> PeerId | None:
        """Who gets so much work, in samples of forward passes; None if nobody is there who is not excluded.

        Servers that have failed lately are chosen only if there is no other. If the preferred one can, it gets it.
        """
        servers = self._servers
        there = [peer for peer in servers if peer not in excluded]
        if not there:
            return None
        able = [peer for peer in there if servers[peer].paused_until <= now] or there
        if preferred in able:
            able = [preferred]
        chosen = min(able, key=lambda peer: (servers[peer].time, self._random.random()))
        servers[chosen].time += work / self.rate(chosen)
        return chosen

    def succeeded(self, peer: PeerId, work: float, seconds: float) -> None:
        """It has done the work in this time."""
        server = self._servers.get(peer)
        if server is None:
            return
        server.failures = 0
        measured = work / max(seconds, 1e-6)
        server.rate = measured if server.rate is None else server.rate + SMOOTHING * (measured - server.rate)

    def failed(self, peer: PeerId, now: float) -> None:
        """It has not done what it was asked for."""
        server = self._servers.get(peer)
        if server is not None:
            server.paused_until = now + min(FIRST_PAUSE * 2.0**server.failures, LONGEST_PAUSE)
            server.failures += 1

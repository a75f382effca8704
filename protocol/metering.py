"""Measures an endpoint's lines while operations and states are on their way; see `protocol.rates`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import trio

from protocol.endpoint import Endpoint
from protocol.identity import PeerId
from protocol.rates import PERIOD, Count, RateMeter, Rates


class Meter:
    """What one endpoint knows about its lines. `run` must run; it may do so several times over."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._meter = RateMeter()
        self._users = 0
        self._raise_only = True  # nothing else was moved since the figures were concluded
        self._due = 0.0
        self._begun, self._over = trio.Event(), trio.Event()

    async def run(self) -> None:
        """Looks at the counts now and then while there is something to see, until cancelled."""
        while True:
            await self._begun.wait()
            while self._users:
                if (now := trio.current_time()) >= self._due:
                    self._due = now + PERIOD / 2
                    self._meter.look(now, self._counts(self._endpoint.connected))
                with trio.move_on_after(PERIOD):
                    await self._over.wait()

    @contextmanager
    def during(self, *, raise_only: bool = False) -> Iterator[None]:
        """Within the block, bulk data is moved that tells something about the lines.

        Args:
            raise_only: It only tells what they can do at least, unless the data of others is moved as well.
        """
        self._users += 1
        self._raise_only &= raise_only
        if self._users == 1:
            self._begun.set()
            self._over = trio.Event()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._begun = trio.Event()
                self._over.set()
                self._meter.conclude(raise_only=self._raise_only)
                self._raise_only = True

    def rates(self, peers: Collection[PeerId]) -> Rates:
        """What is known by now, about these peers as far as they are connected."""
        return self._meter.rates(self._counts(peers), peers)

    def _counts(self, peers: Collection[PeerId]) -> dict[PeerId, Count]:
        counts = {}
        for peer in peers:
            known = self._endpoint.statistics(peer)
            if known is None:
                continue
            if known.remote.is_loopback:  # within this machine no line limits anything, and what delays it is load
                counts[peer] = Count(0, 0, 0.0, False)
            else:
                counts[peer] = Count(
                    known.bytes_sent, known.bytes_received, known.rtt, known.path == "relayed", known.carried
                )
        return counts

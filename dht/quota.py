"""A token bucket per peer, so that no peer can have more of our time than its share."""

from __future__ import annotations

from collections import OrderedDict

import attrs

from protocol.identity import PeerId


@attrs.define
class _Bucket:
    tokens: float
    filled: float


class Quota:
    """Counts requests per peer. Time is the caller's, in seconds.

    Args:
        rate: Requests a second that a peer may make in the long run.
        burst: Requests that a peer may make at once after a pause.
        peers: How many peers are remembered; those that were idle for longest are forgotten first.
    """

    def __init__(self, *, rate: float, burst: int, peers: int = 1024) -> None:
        self._rate = rate
        self._burst = burst
        self._peers = peers
        self._buckets: OrderedDict[PeerId, _Bucket] = OrderedDict()

    def allow(self, peer: PeerId, now: float) -> bool:
        """Whether a peer may make one more request now."""
        bucket = self._buckets.setdefault(peer, _Bucket(float(self._burst), now))
        self._buckets.move_to_end(peer)
        if len(self._buckets) > self._peers:
            self._buckets.popitem(last=False)
        bucket.tokens = min(float(self._burst), bucket.tokens + (now - bucket.filled) * self._rate)
        bucket.filled = now
        if bucket.tokens < 1:
            return False
        bucket.tokens -= 1
        return True

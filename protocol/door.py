"""Who may come in: bounds on what strangers cost an endpoint. Without IO.

Identities cost nothing, so all bounds are on what does: addresses. An IPv6 user has a /64, which counts as one address.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Collection

import attrs

from protocol.connection import Connection, Limits
from protocol.rate import Quota

GREETINGS_PER_SECOND = 10.0
"""Handshakes that one address may begin in the long run: each costs about a millisecond of computing."""

GREETINGS_AT_ONCE = 100
"""Handshakes that one address may begin after a pause: a whole swarm may sit behind one address."""

PROTOCOL_ERROR = 10
"""Handshakes that a protocol error costs an address: who is banned under one identity can come back under another."""


def origin(host: str) -> str:
    """What a host is counted under."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # networks in memory have hosts with names
        return host
    if address.version == 4:
        return host
    return str(ipaddress.ip_network((address.packed, 64), strict=False))


@attrs.frozen(eq=False)
class Greeting:
    """A handshake with somebody who dialled us, as long as it lasts."""

    origin: str
    give_up: Callable[[], None]


class Door:
    """Keeps count of those who are coming in.

    Args:
        limits: The endpoint's.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._greetings: dict[Greeting, None] = {}  # the oldest first
        self._quota: Quota[str] = Quota(rate=GREETINGS_PER_SECOND, burst=GREETINGS_AT_ONCE)

    def enter(self, host: str, now: float, give_up: Callable[[], None]) -> Greeting | None:
        """Somebody has connected. Returns None if they are to be turned away at once.

        When there is no room, the address with the most handshakes under way has to do with one less: the newcomer is
        turned away if it is from there, and otherwise takes the place of the oldest of them.

        Args:
            host: Where from.
            now: The time in seconds.
            give_up: Ends this handshake, when its place is needed for another.
        """
        greeting = Greeting(origin(host), give_up)
        if not self._quota.allow(greeting.origin, now):
            return None
        if len(self._greetings) >= self._limits.max_pending_handshakes:
            counts = Counter(other.origin for other in self._greetings)
            crowd = max(counts, key=counts.__getitem__)
            if counts[greeting.origin] >= counts[crowd]:
                return None
            oldest = next(other for other in self._greetings if other.origin == crowd)
            self.leave(oldest)
            oldest.give_up()
        self._greetings[greeting] = None
        return greeting

    def misbehaved(self, host: str, now: float) -> None:
        """Somebody from there broke the protocol: the address may begin fewer handshakes for a while."""
        self._quota.charge(origin(host), PROTOCOL_ERROR, now)

    def leave(self, greeting: Greeting) -> None:
        """The handshake is over, one way or the other."""
        self._greetings.pop(greeting, None)

    def refusal(self, new: Connection, connections: Collection[Connection]) -> str | None:
        """Why a new connection, one of `connections`, cannot stay; None if it can.

        A quarter of all connections is kept for those that we dial, and no address gets more than half.
        """
        limit = self._limits.max_connections
        if len(connections) > limit:
            return "too many connections"
        if new.initiator:
            return None
        incoming = [origin(other.channel.remote.host) for other in connections if not other.initiator]
        if len(incoming) > limit - limit // 4:
            return "too many connections"
        if incoming.count(origin(new.channel.remote.host)) > limit - limit // 2:
            return "too many connections from your address"
        return None

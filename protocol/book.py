"""What an endpoint remembers of peers between connections: addresses and misbehaviour. Bounded, without IO."""

from __future__ import annotations

from collections import OrderedDict

import attrs

from protocol.identity import PeerId
from protocol.transport import Address

MAX_PEERS = 4096
MAX_ADDRESSES = 8
"""Addresses that are kept of one peer."""

STRIKES = 3
"""Protocol errors within `FORGIVEN_AFTER` seconds after which a peer is banned."""

FORGIVEN_AFTER = 300.0
BAN_SECONDS = 60.0


class AddressBook:
    """Where peers were last said to be reachable. Forgets the peers that were not touched for longest."""

    def __init__(self) -> None:
        self._addresses: OrderedDict[PeerId, tuple[Address, ...]] = OrderedDict()

    def learn(self, peer: PeerId, addresses: tuple[Address, ...]) -> None:
        """Puts addresses before those that are known already."""
        known = self._addresses.pop(peer, ())
        merged = dict.fromkeys((*addresses, *known))
        self._addresses[peer] = tuple(merged)[:MAX_ADDRESSES]
        while len(self._addresses) > MAX_PEERS:
            self._addresses.popitem(last=False)

    def forget(self, peer: PeerId, address: Address) -> None:
        """An address has turned out to be somebody else's."""
        if peer in self._addresses:
            self._addresses[peer] = tuple(known for known in self._addresses[peer] if known != address)

    def addresses(self, peer: PeerId) -> tuple[Address, ...]:
        """The addresses of a peer, the one to try first in front."""
        return self._addresses.get(peer, ())


@attrs.define
class _Record:
    strikes: int = 0
    last: float = 0.0
    banned_until: float = 0.0


class Strikes:
    """Counts protocol errors by peer, and bans for a while whoever makes many."""

    def __init__(self) -> None:
        self._records: OrderedDict[PeerId, _Record] = OrderedDict()

    def strike(self, peer: PeerId, now: float) -> bool:
        """Counts one more; returns whether the peer is banned now."""
        record = self._records.pop(peer, None) or _Record()
        self._records[peer] = record
        while len(self._records) > MAX_PEERS:
            self._records.popitem(last=False)
        if now - record.last > FORGIVEN_AFTER:
            record.strikes = 0
        record.strikes += 1
        record.last = now
        if record.strikes >= STRIKES:
            record.banned_until = now + BAN_SECONDS
        return self.is_banned(peer, now)

    def is_banned(self, peer: PeerId, now: float) -> bool:
        record = self._records.get(peer)
        return record is not None and now < record.banned_until

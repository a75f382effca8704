"""What an endpoint remembers of peers between connections: addresses and misbehaviour. Bounded, without IO."""

from __future__ import annotations

from collections import OrderedDict

import attrs

from protocol.identity import PeerId
from protocol.transport import Address

MAX_PEERS = 4096
"""Peers that are remembered of each kind: met, heard of, at fault."""

MAX_ADDRESSES = 8
"""Addresses that are kept of one peer: half of them such as were proven, half of them from hearsay."""

STRIKES = 3
"""Protocol errors within `FORGIVEN_AFTER` seconds after which a peer is banned."""

FORGIVEN_AFTER = 300.0
BAN_SECONDS = 60.0


class AddressBook:
    """Where peers can be reached. Forgets the peers that were not touched for longest.

    What others say never displaces an address where the peer itself was met, nor a peer that was met: else anybody
    could hide a peer by naming wrong addresses for it, or many others.
    """

    def __init__(self) -> None:
        self._proven: OrderedDict[PeerId, tuple[Address, ...]] = OrderedDict()
        self._heard: OrderedDict[PeerId, tuple[Address, ...]] = OrderedDict()

    def learn(self, peer: PeerId, addresses: tuple[Address, ...], *, proven: bool = False) -> None:
        """Puts addresses before those of the same kind that are known already; `proven` ones before all others."""
        known = self._proven if proven else self._heard
        known[peer] = _merged(addresses, known.pop(peer, ()))
        if len(known) > MAX_PEERS:
            known.popitem(last=False)

    def forget(self, peer: PeerId, address: Address) -> None:
        """An address has turned out to be somebody else's."""
        for known in (self._proven, self._heard):
            if peer in known:
                known[peer] = tuple(other for other in known[peer] if other != address)

    def addresses(self, peer: PeerId) -> tuple[Address, ...]:
        """The addresses of a peer, the one to try first in front."""
        return tuple(dict.fromkeys((*self._proven.get(peer, ()), *self._heard.get(peer, ()))))


def _merged(new: tuple[Address, ...], known: tuple[Address, ...]) -> tuple[Address, ...]:
    return tuple(dict.fromkeys((*new, *known)))[: MAX_ADDRESSES // 2]


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

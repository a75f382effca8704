"""The records that a peer keeps for others.

Invariants: every record held has a valid signature; there is at most one per key and signer, and its sequence never
goes down while it is held; the bounds of `StoreLimits` hold at all times; nothing is served after its time.

Signers cost nothing, so what decides who gives way is where records come from. When there is no room, in all or under a
key, the origin that has most of it loses a record to one that would still have less afterwards. So whoever fills the
store from a few addresses displaces only records of those, or is refused.

Time is the caller's, in seconds from any origin, and never goes back.
"""

from __future__ import annotations

import enum
import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import TypeVar

import attrs

from dht.ids import distance
from dht.records import Record
from protocol.identity import PeerId

_K = TypeVar("_K")
_J = TypeVar("_J")

RECORD_OVERHEAD = 512  # bytes of Python objects around one record, guessed
_COMPARED = 16  # records of an origin of which the one goes that is furthest from us, where lookups seek it least


class Verdict(enum.Enum):
    """What became of a record that was offered."""

    STORED = "stored"
    REFRESHED = "refreshed"  # already held; its time was extended if the signer itself asked for it
    STALE = "stale"  # another record of the signer with the same or a higher sequence is held
    FULL = "full"
    FORGED = "forged"


ACCEPTED = frozenset({Verdict.STORED, Verdict.REFRESHED})


@attrs.frozen
class StoreLimits:
    """Bounds on what is kept."""

    per_key: int = 256
    per_signer: int = 16
    records: int = 16_384
    size: int = 64 << 20  # bytes, overhead included
    ttl: float = 7200.0  # seconds


@attrs.frozen
class Held:
    """A record and when it is to be forgotten."""

    record: Record
    expires: float
    origin: str  # of whoever sent it, or of the signer if it did

    def remaining(self, now: float) -> float:
        """Seconds that it may still live, here or wherever it is passed on to."""
        return self.expires - now


class RecordStore:
    """Verified records by key and signer, each until its time is over.

    Args:
        own: Our place in the key space.
        limits: See `StoreLimits`.
    """

    def __init__(self, own: PeerId, limits: StoreLimits | None = None) -> None:
        self._own = own
        self._limits = limits or StoreLimits()
        self._keys: dict[bytes, dict[PeerId, Held]] = {}
        self._per_signer: Counter[PeerId] = Counter()
        self._shares: Counter[str] = Counter()  # bytes by origin
        self._origins: dict[str, dict[tuple[bytes, PeerId], Held]] = {}  # the same records by origin, the oldest first
        self._records = 0
        self._size = 0
        # An entry per held record, whose time may be behind the record's: it is put back when it comes up early. So
        # refreshing costs nothing here, and nobody can make the heap grow by refreshing often. Entries of records that
        # had to give way, or were replaced by others with less time, stay until there are as many as others.
        self._timers: list[tuple[float, bytes, PeerId]] = []

    def __len__(self) -> int:
        return self._records

    @property
    def size(self) -> int:
        """Bytes in use, overhead included."""
        return self._size

    def put(self, record: Record, remaining: float, now: float, *, by_signer: bool, origin: str = "") -> Verdict:
        """Offer a record.

        Args:
            record: Decoded; the signature is checked here, after everything that is cheaper to check.
            remaining: Seconds that the sender lets it live. Capped by the record's own time to live and the limits.
            now: The time.
            by_signer: Whether the signer itself sent it. Others may spread a record but not prolong its life.
            origin: What the sender's address is counted under; empty if that is ourselves.
        """
        self.expire(now)
        expires = now + min(remaining, record.ttl, self._limits.ttl)
        held = self.get(record.key, record.signer, now)
        if held is not None and held.record == record:
            if by_signer:
                self._drop(held)
                self._hold(Held(record, max(expires, held.expires), origin))
            return Verdict.REFRESHED
        if held is not None and held.record.sequence >= record.sequence:
            return Verdict.STALE
        if expires <= now:
            return Verdict.STALE
        if self._signer_has_enough(record) or (not self._fits(record) and self._victim(record, origin) is None):
            return Verdict.FULL
        if not record.verify():
            return Verdict.FORGED
        dropped: list[Held] = []
        while not self._fits(record):
            victim = self._victim(record, origin)
            if victim is None:
                for other in dropped:
                    self._hold(other)
                return Verdict.FULL
            self._drop(victim)
            dropped.append(victim)
        self._insert(Held(record, expires, origin))
        return Verdict.STORED

    def get(self, key: bytes, signer: PeerId, now: float) -> Held | None:
        """The record of one signer under a key, if there is one whose time is not over."""
        held = self._keys.get(key, {}).get(signer)
        return held if held is not None and held.expires > now else None

    def page(self, key: bytes, now: float, *, after: bytes, records: int, size: int) -> tuple[list[Held], bool]:
        """A part of what is held under a key, tombstones included, in the order of the signers' ids.

        Args:
            key: The key.
            now: The time.
            after: Only signers with higher ids than this; empty to begin.
            records: At most so many records, at least 1.
            size: At most so many bytes of encoded records, but always one record if there is one.

        Returns:
            The records, and whether there are more after them.
        """
        self.expire(now)
        entries = self._keys.get(key, {})
        signers = sorted(entries)
        page: list[Held] = []
        for signer in signers[bisect_right(signers, after) :]:
            held = entries[signer]
            if held.expires <= now:
                continue
            size -= len(held.record.encoded)
            if len(page) == records or (page and size < 0):
                return page, True
            page.append(held)
        return page, False

    def expire(self, now: float) -> None:
        """Forget what is over. Costs a logarithm per forgotten record, and next to nothing if there is none."""
        while self._timers and self._timers[0][0] <= now:
            _, key, signer = self._timers[0]
            held = self._keys.get(key, {}).get(signer)
            if held is not None and held.expires > now:
                heapq.heapreplace(self._timers, (held.expires, key, signer))
                continue
            heapq.heappop(self._timers)
            if held is not None:
                self._drop(held)

    def __iter__(self) -> Iterator[Held]:
        for entries in self._keys.values():
            yield from entries.values()

    def _signer_has_enough(self, record: Record) -> bool:
        replaces = record.signer in self._keys.get(record.key, {})
        return not replaces and self._per_signer[record.signer] >= self._limits.per_signer

    def _fits(self, record: Record) -> bool:
        limits = self._limits
        entries = self._keys.get(record.key, {})
        replaced = entries.get(record.signer)
        freed = _cost(replaced.record) if replaced is not None else 0
        if self._size - freed + _cost(record) > limits.size:
            return False
        return replaced is not None or (self._records < limits.records and len(entries) < limits.per_key)

    def _victim(self, record: Record, origin: str) -> Held | None:
        """Which record has to give way for one that does not fit; None if it is the new one itself."""
        entries = self._keys.get(record.key, {})
        if len(entries) >= self._limits.per_key and record.signer not in entries:
            shares, cost = Counter(held.origin for held in entries.values()), 1
        else:
            shares, cost = self._shares, _cost(record)
        crowd = max(shares, key=shares.__getitem__, default=origin)
        if shares[origin] + cost >= shares[crowd]:
            return None
        if shares is self._shares:
            candidates: Iterator[Held] = islice(self._origins[crowd].values(), _COMPARED)
        else:
            candidates = (held for held in entries.values() if held.origin == crowd)
        others = (held for held in candidates if held is not entries.get(record.signer))
        return max(others, key=lambda held: distance(held.record.key, self._own), default=None)

    def _insert(self, held: Held) -> None:
        replaced = self._keys.get(held.record.key, {}).get(held.record.signer)
        if replaced is not None:
            self._drop(replaced)
        self._hold(held)
        if replaced is not None and replaced.expires <= held.expires:
            return  # its entry will do
        if len(self._timers) > 2 * self._records:
            self._timers = [(other.expires, other.record.key, other.record.signer) for other in self]
            heapq.heapify(self._timers)
        else:
            heapq.heappush(self._timers, (held.expires, held.record.key, held.record.signer))

    def _hold(self, held: Held) -> None:
        record = held.record
        self._keys.setdefault(record.key, {})[record.signer] = held
        self._origins.setdefault(held.origin, {})[record.key, record.signer] = held
        self._shares[held.origin] += _cost(record)
        self._per_signer[record.signer] += 1
        self._records += 1
        self._size += _cost(record)

    def _drop(self, held: Held) -> None:
        record = held.record
        _remove(self._keys, record.key, record.signer)
        _remove(self._origins, held.origin, (record.key, record.signer))
        _subtract(self._shares, held.origin, _cost(record))
        _subtract(self._per_signer, record.signer, 1)
        self._records -= 1
        self._size -= _cost(record)


def _remove(groups: dict[_K, dict[_J, Held]], group: _K, key: _J) -> None:
    del groups[group][key]
    if not groups[group]:
        del groups[group]


def _subtract(counter: Counter[_K], key: _K, count: int) -> None:
    counter[key] -= count
    if not counter[key]:
        del counter[key]


def _cost(record: Record) -> int:
    return len(record.encoded) + RECORD_OVERHEAD

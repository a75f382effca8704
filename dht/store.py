"""The records that a peer keeps for others.

Invariants: every record held has a valid signature; there is at most one per key and signer, and its sequence never
goes down while it is held; the bounds of `StoreLimits` hold at all times; nothing is served after its time.
Time is the caller's, in seconds from any origin, and never goes back.
"""

from __future__ import annotations

import enum
import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator

import attrs

from dht.records import Record
from protocol.identity import PeerId

RECORD_OVERHEAD = 512  # bytes of Python objects around one record, guessed


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
    """Bounds on what is kept. Where one is reached, records that are already held stay and new ones are refused."""

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

    def remaining(self, now: float) -> float:
        """Seconds that it may still live, here or wherever it is passed on to."""
        return self.expires - now


class RecordStore:
    """Verified records by key and signer, each until its time is over."""

    def __init__(self, limits: StoreLimits | None = None) -> None:
        self._limits = limits or StoreLimits()
        self._keys: dict[bytes, dict[PeerId, Held]] = {}
        self._per_signer: Counter[PeerId] = Counter()
        self._records = 0
        self._size = 0
        # Exactly one entry per held record, whose time may be behind the record's: it is put back when it comes up
        # early. So refreshing costs nothing here, and nobody can make the heap grow by refreshing often.
        self._timers: list[tuple[float, bytes, PeerId]] = []

    def __len__(self) -> int:
        return self._records

    @property
    def size(self) -> int:
        """Bytes in use, overhead included."""
        return self._size

    def put(self, record: Record, remaining: float, now: float, *, by_signer: bool) -> Verdict:
        """Offer a record.

        Args:
            record: Decoded; the signature is checked here, after everything that is cheaper to check.
            remaining: Seconds that the sender lets it live. Capped by the record's own time to live and the limits.
            now: The time.
            by_signer: Whether the signer itself sent it. Others may spread a record but not prolong its life.
        """
        self.expire(now)
        expires = now + min(remaining, record.ttl, self._limits.ttl)
        held = self.get(record.key, record.signer, now)
        if held is not None and held.record == record:
            if by_signer and expires > held.expires:
                self._keys[record.key][record.signer] = Held(record, expires)
            return Verdict.REFRESHED
        if held is not None and held.record.sequence >= record.sequence:
            return Verdict.STALE
        if expires <= now:
            return Verdict.STALE
        if not self._has_room(record):
            return Verdict.FULL
        if not record.verify():
            return Verdict.FORGED
        self._insert(record, expires)
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
            held = self._keys[key][signer]
            if held.expires > now:
                heapq.heapreplace(self._timers, (held.expires, key, signer))
            else:
                heapq.heappop(self._timers)
                self._remove(held.record)

    def __iter__(self) -> Iterator[Held]:
        for entries in self._keys.values():
            yield from entries.values()

    def _has_room(self, record: Record) -> bool:
        limits = self._limits
        entries = self._keys.get(record.key, {})
        replaced = entries.get(record.signer)
        freed = _cost(replaced.record) if replaced is not None else 0
        if self._size - freed + _cost(record) > limits.size:
            return False
        return replaced is not None or (
            self._records < limits.records
            and len(entries) < limits.per_key
            and self._per_signer[record.signer] < limits.per_signer
        )

    def _insert(self, record: Record, expires: float) -> None:
        entries = self._keys.setdefault(record.key, {})
        replaced = entries.get(record.signer)
        entries[record.signer] = Held(record, expires)
        self._size += _cost(record)
        if replaced is not None:
            self._size -= _cost(replaced.record)
        else:
            self._records += 1
            self._per_signer[record.signer] += 1
            heapq.heappush(self._timers, (expires, record.key, record.signer))

    def _remove(self, record: Record) -> None:
        entries = self._keys[record.key]
        del entries[record.signer]
        if not entries:
            del self._keys[record.key]
        self._records -= 1
        self._size -= _cost(record)
        self._per_signer[record.signer] -= 1
        if not self._per_signer[record.signer]:
            del self._per_signer[record.signer]


def _cost(record: Record) -> int:
    return len(record.encoded) + RECORD_OVERHEAD

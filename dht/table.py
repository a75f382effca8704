"""The routing table: which peers this one knows, kept so that every part of the key space can be found.

A bucket holds up to `k` contacts that share a given number of leading bits with our own id. The rules, which are those
of Kademlia with what later networks learned the hard way:

1. Only a peer that has answered a request of ours gets in (`heard`); only one whose last request was answered is told
   to others (`closest`).
2. A full bucket keeps whom it has: peers that have been there for long tend to stay. Newcomers wait in a small
   replacement cache, the latest `replacements` of them.
3. A contact is given up only when it has failed `evict_after` times in a row and somebody is there to take its place,
   or when it has been silent for `forget_after` seconds. Until then it is dormant: nobody is told of it, but it is
   tried now and then, so that two halves of a cut network find each other again.
4. Of one network (a /24 or /48, see `network_group`) only a few contacts are admitted to a bucket and to the table, so
   that one owner of many addresses cannot fill either. What counts is where a peer says that it listens, and where it
   is seen. In a replacement cache, the network that has most of it loses a place first.

Time is the caller's, in seconds, and never goes back.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

import attrs

from dht.ids import ID_BITS, Contact, common_prefix, distance, network_group
from protocol.identity import PeerId


@attrs.frozen
class TableSettings:
    """How large the table gets and how long it keeps contacts that fail."""

    k: int = 20
    replacements: int = 8
    per_bucket: int = 2  # contacts of one network in a bucket
    per_table: int = 10  # contacts of one network in all
    evict_after: int = 2  # failures in a row
    forget_after: float = 3600.0  # seconds


@attrs.frozen
class Entry:
    """What the table knows about a contact."""

    contact: Contact
    seen: float  # when it last answered
    tried: float  # when it last answered or failed to
    failures: int = 0  # in a row
    host: str | None = None  # where it is seen, if that is known

    @property
    def groups(self) -> frozenset[str]:
        """The networks that it counts for."""
        seen = None if self.host is None else network_group(self.host)
        return self.contact.groups if seen is None else self.contact.groups | {seen}

    @property
    def alive(self) -> bool:
        """Whether it answered the last request."""
        return self.failures == 0


@attrs.define
class _Bucket:
    entries: dict[PeerId, Entry] = attrs.field(factory=dict)  # least recently seen first
    waiting: dict[PeerId, Entry] = attrs.field(factory=dict)  # the replacement cache, oldest first
    looked_up: float = 0.0


class RoutingTable:
    """Contacts in buckets by the length of the prefix that they share with our own id."""

    def __init__(self, own: PeerId, settings: TableSettings | None = None) -> None:
        self._own = own
        self._settings = settings or TableSettings()
        self._buckets: dict[int, _Bucket] = {}
        self._groups: Counter[str] = Counter()  # of the contacts in all buckets

    def __len__(self) -> int:
        return sum(len(bucket.entries) for bucket in self._buckets.values())

    def __contains__(self, peer: PeerId) -> bool:
        return self.entry(peer) is not None

    def __iter__(self) -> Iterator[Entry]:
        for bucket in self._buckets.values():
            yield from bucket.entries.values()

    def entry(self, peer: PeerId) -> Entry | None:
        """What is known about a peer in a bucket (not in a replacement cache)."""
        bucket = self._buckets.get(common_prefix(self._own, peer))
        return bucket.entries.get(peer) if bucket is not None else None

    def wants(self, peer: PeerId) -> bool:
        """Whether it is of use to find out if a peer that contacted us answers, too."""
        if peer == self._own:
            return False
        bucket = self._bucket_of(peer)
        known = bucket.entries.get(peer)
        if known is not None:
            return not known.alive
        room = len(bucket.entries) < self._settings.k or not all(entry.alive for entry in bucket.entries.values())
        return peer not in bucket.waiting and (room or len(bucket.waiting) < self._settings.replacements)

    def heard(self, contact: Contact, now: float, *, host: str | None = None) -> bool:
        """A peer has answered a request of ours.

        Args:
            contact: The peer and where it says that it listens.
            now: The time.
            host: Where it is seen; None if that is not known, as when there is a relay in between.

        Returns:
            Whether it is in a bucket now; otherwise it waits in the replacement cache, or is ourselves.
        """
        if contact.peer == self._own or not contact.addresses:
            return False
        bucket = self._bucket_of(contact.peer)
        known = bucket.entries.get(contact.peer)
        if known is not None:
            self._take(bucket, contact.peer)
        entry = Entry(contact, seen=now, tried=now, host=host)
        bucket.waiting.pop(contact.peer, None)
        if self._make_room(bucket, entry):
            self._admit(bucket, entry)
            return True
        bucket.waiting[contact.peer] = entry
        if len(bucket.waiting) > self._settings.replacements:
            del bucket.waiting[_superfluous(bucket.waiting)]
        # A known contact that moved to a crowded network has left a place.
        self._promote(bucket)
        return False

    def failed(self, peer: PeerId, now: float) -> None:
        """A peer did not answer a request of ours, or could not be reached."""
        bucket = self._buckets.get(common_prefix(self._own, peer))
        if bucket is None:
            return
        bucket.waiting.pop(peer, None)
        entry = bucket.entries.get(peer)
        if entry is None:
            return
        entry = attrs.evolve(entry, tried=now, failures=entry.failures + 1)
        bucket.entries[peer] = entry
        if now - entry.seen > self._settings.forget_after:
            self._take(bucket, peer)
            self._promote(bucket)
        elif entry.failures >= self._settings.evict_after:
            substitute = self._substitute(bucket, entry)
            if substitute is not None:
                self._take(bucket, peer)
                self._admit(bucket, bucket.waiting.pop(substitute.contact.peer))

    def remove(self, peer: PeerId) -> None:
        """Drop a peer that broke the protocol."""
        bucket = self._bucket_of(peer)
        bucket.waiting.pop(peer, None)
        if peer in bucket.entries:
            self._take(bucket, peer)
            self._promote(bucket)

    def closest(self, target: bytes, count: int, *, but: PeerId | None = None, dormant: bool = False) -> list[Contact]:
        """The contacts closest to a point, closest first.

        Args:
            target: The point.
            count: At most so many.
            but: Leave out this one.
            dormant: Whether those are wanted, too, whose last request failed.
        """
        entries = (entry for entry in self if (entry.alive or dormant) and entry.contact.peer != but)
        nearest = heapq.nsmallest(count, entries, key=lambda entry: distance(entry.contact.peer, target))
        return [entry.contact for entry in nearest]

    def due(self, now: float, age: float, count: int) -> list[Contact]:
        """The contacts that were not tried for `age` seconds, the longest ago first, at most `count`."""
        entries = (entry for entry in self if now - entry.tried >= age)
        return [entry.contact for entry in heapq.nsmallest(count, entries, key=lambda entry: entry.tried)]

    def freshest(self, count: int) -> list[Contact]:
        """The contacts that answered last, to be saved for the next start."""
        return [entry.contact for entry in heapq.nlargest(count, self, key=lambda entry: (entry.alive, entry.seen))]

    def looked_up(self, target: bytes, now: float) -> None:
        """A lookup for a point is done, which fills the bucket that the point is in."""
        if target != self._own:
            self._bucket_of(target).looked_up = now

    def stale(self, now: float, age: float) -> list[int]:
        """Prefix lengths, up to the longest in use, for which there was no lookup for `age` seconds."""
        used = [prefix for prefix, bucket in self._buckets.items() if bucket.entries]
        nothing = _Bucket()
        return [
            prefix
            for prefix in range(max(used, default=-1) + 1)
            if now - self._buckets.get(prefix, nothing).looked_up >= age
        ]

    def _bucket_of(self, point: bytes) -> _Bucket:
        return self._buckets.setdefault(min(common_prefix(self._own, point), ID_BITS - 1), _Bucket())

    def _fits(self, bucket: _Bucket, coming: Entry, leaving: Entry | None = None) -> bool:
        """Whether a contact that is in no bucket would keep the bounds, once `leaving` has left this one."""
        settings = self._settings
        gone = leaving.groups if leaving is not None else frozenset()
        if len(bucket.entries) - (leaving is not None) >= settings.k:
            return False
        for group in coming.groups:
            here = sum(group in entry.groups for entry in bucket.entries.values())
            if here - (group in gone) >= settings.per_bucket:
                return False
            if self._groups[group] - (group in gone) >= settings.per_table:
                return False
        return True

    def _make_room(self, bucket: _Bucket, coming: Entry) -> bool:
        if self._fits(bucket, coming):
            return True
        for entry in bucket.entries.values():
            if entry.failures >= self._settings.evict_after and self._fits(bucket, coming, entry):
                self._take(bucket, entry.contact.peer)
                return True
        return False

    def _substitute(self, bucket: _Bucket, leaving: Entry | None) -> Entry | None:
        """The latest of the waiting ones that fits, once `leaving` has left."""
        for entry in reversed(bucket.waiting.values()):
            if self._fits(bucket, entry, leaving):
                return entry
        return None

    def _promote(self, bucket: _Bucket) -> None:
        substitute = self._substitute(bucket, None)
        if substitute is not None:
            self._admit(bucket, bucket.waiting.pop(substitute.contact.peer))

    def _admit(self, bucket: _Bucket, entry: Entry) -> None:
        bucket.entries[entry.contact.peer] = entry
        self._groups.update(entry.groups)

    def _take(self, bucket: _Bucket, peer: PeerId) -> None:
        entry = bucket.entries.pop(peer)
        self._groups.subtract(entry.groups)
        self._groups += Counter()  # drops the groups that nobody is in any more


def _superfluous(waiting: dict[PeerId, Entry]) -> PeerId:
    """The oldest of those whose network has most of a replacement cache."""
    crowds = Counter(group for entry in waiting.values() for group in entry.groups)
    return max(waiting, key=lambda peer: max((crowds[group] for group in waiting[peer].groups), default=1))

"""What one reader of a key is told by several holders, and who of them is behind. No network in here."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from dht.ids import Contact
from dht.messages import Fetch, Fetched
from dht.records import Record
from dht.store import RecordStore
from protocol.errors import ProtocolError
from protocol.identity import PeerId

MAX_PAGES = 32  # of one holder; a full key of the largest records takes 22
MIN_REMAINING = 1.0  # seconds; what lives shorter is not worth passing on


@attrs.define
class Pages:
    """The answers of one holder, page by page. Made by `Reading.of`."""

    _reading: Reading
    holder: Contact
    sequences: dict[PeerId, int] = attrs.field(factory=dict)
    complete: bool = False  # the holder has told all that it holds
    _after: bytes = b""
    _pages: int = 0

    def next_request(self) -> Fetch | None:
        """What to ask the holder now, or None if it has been read to the end."""
        if self.complete or self._pages == MAX_PAGES:
            return None
        return Fetch(self._reading.key, self._after)

    def receive(self, reply: Fetched) -> None:
        """Take the answer in.

        Raises:
            ProtocolError: It is not an honest one: a forged record, one of another key, or not in order. What came
                before the bad record is kept, since it is valid whoever sent it.
        """
        self._pages += 1
        for copy in reply.copies:
            record = self._reading.verified(copy.record)
            if record.signer <= self._after:
                raise ProtocolError("records that are not in the order of their signers")
            self._after = record.signer
            self.sequences[record.signer] = record.sequence
            self._reading.add(record, min(copy.remaining, record.ttl))
        if reply.more and not reply.copies:
            raise ProtocolError("a page without records that promises more")
        self.complete = not reply.more


class Reading:
    """Collects the newest record of each signer under a key.

    Args:
        key: The key.
        now: The time, for what our own store holds.
    """

    def __init__(self, key: bytes, now: float) -> None:
        self.key = key
        self._now = now
        self._records: dict[bytes, Record] = {}  # verified ones, by their encoding: most holders hold the same
        self._newest: dict[PeerId, tuple[Record, float]] = {}
        self._pages: list[Pages] = []

    def add_own(self, store: RecordStore) -> None:
        """Take in what we hold ourselves, which was verified when it was stored."""
        held_now, _ = store.page(self.key, self._now, after=b"", records=len(store) + 1, size=store.size)
        for held in held_now:
            self._records[held.record.encoded] = held.record
            self.add(held.record, held.remaining(self._now))

    def of(self, holder: Contact) -> Pages:
        """Begin to read from a holder."""
        pages = Pages(self, holder)
        self._pages.append(pages)
        return pages

    def verified(self, encoded: bytes) -> Record:
        """Decode a record and check that it belongs here.

        Raises:
            ProtocolError: It does not.
        """
        record = self._records.get(encoded)
        if record is None:
            record = Record.decode(encoded)
            if record.key != self.key:
                raise ProtocolError("a record of another key")
            if not record.verify():
                raise ProtocolError("a record with a forged signature")
            self._records[encoded] = record
        return record

    def add(self, record: Record, remaining: float) -> None:
        """Take in a verified record. Of equal ones the shortest life counts, so that passing on never prolongs it."""
        newest = self._newest.get(record.signer)
        if newest is None or record.rank > newest[0].rank:
            self._newest[record.signer] = (record, remaining)
        elif record == newest[0]:
            self._newest[record.signer] = (record, min(remaining, newest[1]))

    def result(self) -> dict[PeerId, Record]:
        """The newest record of each signer that has not withdrawn it."""
        return {signer: record for signer, (record, _) in self._newest.items() if not record.withdrawn}

    def corrections(self, most: int) -> Iterator[tuple[Contact, list[tuple[Record, float]]]]:
        """Which holders lack which newer records, with the seconds that those may still live; `most` per holder."""
        for pages in self._pages:
            if not pages.complete:
                continue
            missing = [
                (record, remaining)
                for signer, (record, remaining) in self._newest.items()
                if remaining >= MIN_REMAINING and pages.sequences.get(signer, -1) < record.sequence
            ]
            if missing:
                yield pages.holder, missing[:most]

"""What peers of the DHT ask each other. Each request has one reply; all of them are bounded in size."""

from __future__ import annotations

from typing import Annotated, Literal

import attrs
from msgspec import Meta

from dht.ids import ID_BYTES, Contact
from dht.records import MAX_RECORD, MAX_TTL
from protocol.wire import message

MAX_CONTACTS = 20  # in one answer
PAGE_RECORDS = 50  # in one answer
PAGE_SIZE = 48 << 10  # bytes of records in one answer

Key = Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_TTL)]


@attrs.frozen
class Copy:
    """An encoded record and the seconds that it may still live."""

    record: Annotated[bytes, Meta(max_length=MAX_RECORD)]
    remaining: Seconds


@message("dht.ping")
class Ping:
    """Are you there?"""


@message("dht.pong")
class Pong:
    """The answer to `Ping`."""


@message("dht.find")
class Find:
    """Which peers do you know closest to `target`?"""

    target: Key


@message("dht.found")
class Found:
    """The closest that answer the sender's requests, closest first."""

    contacts: Annotated[tuple[Contact, ...], Meta(max_length=MAX_CONTACTS)]


@message("dht.store")
class Store:
    """Keep this for as long as it lives."""

    copy: Copy


@message("dht.stored")
class Stored:
    """What became of it; if it is stale, the record that is kept in its place."""

    verdict: Literal["stored", "refreshed", "stale", "full"]
    newer: Copy | None


@message("dht.fetch")
class Fetch:
    """What do you keep under `key`, by signers whose ids are higher than `after`?"""

    key: Key
    after: Annotated[bytes, Meta(max_length=ID_BYTES)]


@message("dht.fetched")
class Fetched:
    """A page of records by ascending signer, and whether more follow."""

    copies: Annotated[tuple[Copy, ...], Meta(max_length=PAGE_RECORDS)]
    more: bool

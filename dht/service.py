"""What a peer of the DHT does for others: it answers from its table and its store.

Every answer is made without waiting for anybody and costs no more than one signature check.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio

from dht.messages import (
    MAX_CONTACTS,
    PAGE_RECORDS,
    PAGE_SIZE,
    Copy,
    Fetch,
    Fetched,
    Find,
    Found,
    Ping,
    Pong,
    Store,
    Stored,
)
from dht.records import Record
from dht.store import Held, RecordStore, Verdict
from dht.table import RoutingTable
from protocol.door import origin
from protocol.endpoint import Endpoint, Stream
from protocol.errors import ProtocolError, RequestRefused
from protocol.identity import PeerId
from protocol.rate import Quota


@attrs.define
class Service:
    """The handlers of the DHT's requests.

    Args:
        endpoint: Who hands us the requests.
        table: Where contacts come from.
        store: Where records are kept.
        quota: How much each peer may ask.
        origins: How much all peers of an address may ask: identities cost nothing.
        notice: Called with each peer that asks something proper: it is there, and may be worth knowing.
    """

    endpoint: Endpoint
    table: RoutingTable
    store: RecordStore
    quota: Quota[PeerId]
    origins: Quota[str]
    notice: Callable[[PeerId], None]

    def register(self) -> None:
        """Have the endpoint hand the DHT's requests to us."""
        self.endpoint.handle(Ping, self._ping)
        self.endpoint.handle(Find, self._find)
        self.endpoint.handle(Store, self._store)
        self.endpoint.handle(Fetch, self._fetch)

    async def _ping(self, request: Ping, stream: Stream) -> Pong:
        self._admit(stream.peer)
        self.notice(stream.peer)
        return Pong()

    async def _find(self, request: Find, stream: Stream) -> Found:
        self._admit(stream.peer)
        self.notice(stream.peer)
        return Found(tuple(self.table.closest(request.target, MAX_CONTACTS, but=stream.peer)))

    async def _store(self, request: Store, stream: Stream) -> Stored:
        now = self._admit(stream.peer)
        try:
            record = Record.decode(request.copy.record)
            by_signer = record.signer == stream.peer
            where = self._origin(stream.peer)
            verdict = self.store.put(record, request.copy.remaining, now, by_signer=by_signer, origin=where)
            if verdict is Verdict.FORGED:
                raise ProtocolError("a record with a forged signature")
        except ProtocolError:
            self.table.remove(stream.peer)
            raise
        self.notice(stream.peer)
        newer = self.store.get(record.key, record.signer, now) if verdict is Verdict.STALE else None
        return Stored(verdict.value, copy_of(newer, now) if newer is not None else None)

    async def _fetch(self, request: Fetch, stream: Stream) -> Fetched:
        now = self._admit(stream.peer)
        self.notice(stream.peer)
        page, more = self.store.page(request.key, now, after=request.after, records=PAGE_RECORDS, size=PAGE_SIZE)
        return Fetched(tuple(copy_of(held, now) for held in page), more)

    def _admit(self, peer: PeerId) -> float:
        """Count a request against its sender. Returns the time."""
        now = trio.current_time()
        if not self.origins.allow(self._origin(peer), now) or not self.quota.allow(peer, now):
            raise RequestRefused(f"{peer.short} asks too often", code="busy")
        return now

    def _origin(self, peer: PeerId) -> str:
        connection = self.endpoint.statistics(peer)
        return "gone" if connection is None else origin(connection.remote.host)


def copy_of(held: Held, now: float) -> Copy:
    """A held record as it is passed on."""
    return Copy(held.record.encoded, max(0.0, held.remaining(now)))

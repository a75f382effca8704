"""A node of the DHT: the driver that connects table, store and lookups to an endpoint and to trio's clock.

What it promises:

1. `put` sends a signed record to the `k` peers closest to its key, ourselves included if we are one of them, and says
   how many took it. A swarm of one peer is a swarm: it keeps and finds its own records.
2. `get` asks several holders and returns the newest record per signer whose signature is right, whatever else they
   said. Holders that had an older one, or none, are sent the newest for what is left of its life.
3. `publish` keeps a record alive until it is replaced or withdrawn, also across churn: it is placed anew, among
   whoever is closest by then, three times in its life.
4. No request waits longer than twice the `request_timeout`, no lookup longer than `lookup_limit`; peers that do not
   answer cost time, not results.
5. A peer that contacts us, or that we connect to, is asked whether it answers, and is in the table from then on.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from functools import partial

import attrs
import trio

from dht.ids import ID_BYTES, Contact, distance, random_id
from dht.lookup import Lookup
from dht.messages import Copy, Fetched, Find, Found, Store, Stored
from dht.neighbours import Neighbours
from dht.reading import Reading
from dht.records import MAX_TTL, MAX_VALUE, Record
from dht.service import Service
from dht.settings import DhtSettings
from dht.store import ACCEPTED, RecordStore, Verdict
from protocol.endpoint import Endpoint
from protocol.errors import ProtocolError
from protocol.identity import Identity, PeerId
from protocol.rate import Quota
from protocol.transport import Address

__all__ = ["DHT", "Contact", "DhtSettings", "Record"]

_PLACEMENTS = 3  # of one record, each with a higher sequence than holders know; more only if somebody else is us, too


@attrs.define(eq=False)
class _Publication:
    """Something that is kept alive."""

    record: Record
    due: float = -math.inf  # when it is to be placed again; infinity while it is being placed


@attrs.define
class _Placement:
    """What holders say to a record of ours."""

    record: Record
    holders: int = 0
    newer: Record | None = None  # what some of them keep instead

    def count(self, accepted: bool, newer: Record | None) -> None:
        self.holders += accepted
        if newer is not None and (self.newer is None or newer.rank > self.newer.rank):
            self.newer = newer


class DHT:
    """One peer's part in the DHT.

    Its request handlers are registered at once; everything that happens by itself happens inside `run`.

    Args:
        endpoint: How peers are reached. It must be running before anything here is awaited.
        identity: Who signs our records; the endpoint's.
        rng: Randomness, for jitter and for points to look up.
        settings: Constants.
    """

    def __init__(
        self, endpoint: Endpoint, identity: Identity, *, rng: random.Random, settings: DhtSettings | None = None
    ) -> None:
        self._settings = settings = settings or DhtSettings()
        self._identity = identity
        self._own = identity.peer_id
        self._rng = rng
        self._lookup_settings = attrs.evolve(settings.lookup, k=settings.k, alpha=settings.alpha)
        self._neighbours = Neighbours(endpoint, settings, rng)
        self._table = self._neighbours.table
        self._store = RecordStore(self._own, settings.store)
        self._signed: dict[bytes, Record] = {}  # the last record that we signed, by key
        self._publications: dict[bytes, _Publication] = {}
        self._published = trio.Event()  # there is something new to place
        quota: Quota[PeerId] = Quota(rate=settings.rate, burst=settings.burst)
        origins: Quota[str] = Quota(rate=settings.origin_rate, burst=settings.origin_burst)
        Service(endpoint, self._table, self._store, quota, origins, self._neighbours.notice).register()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the table fresh and what is published alive, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._neighbours.run)
            nursery.start_soon(self._keep_fresh)
            nursery.start_soon(self._expire)
            nursery.start_soon(self._republish)
            task_status.started()

    # Finding peers.

    async def bootstrap(self, contacts: Sequence[tuple[PeerId | None, Address]]) -> int:
        """Join through peers that are already there, and remember them for when all others are lost.

        Args:
            contacts: Where to find them, with the expected peer id where it is known. One peer may have several.

        Returns:
            How many of them answered; 0 if there is none but ourselves.

        Raises:
            PeerUnreachable: None answered. Its cause is the most telling of the errors.
        """
        answered = await self._neighbours.greet(contacts)
        if answered:
            await self.find(self._own)
        return answered

    def contacts(self) -> list[tuple[PeerId, Address]]:
        """The peers that answered last, to be given to `bootstrap` at the next start."""
        freshest = self._table.freshest(self._settings.saved)
        return [(contact.peer, address) for contact in freshest for address in contact.addresses]

    async def find(self, target: bytes) -> list[Contact]:
        """The peers closest to a point, closest first, at most `k`: all of them have answered just now.

        We ourselves are never among them. The list is short or empty if there are no more, or `lookup_limit` is over.
        """
        _check_key(target)
        k = self._settings.k
        seeds = self._table.closest(target, k) or self._table.closest(target, k, dormant=True)
        lookup = Lookup(target, self._own, seeds, self._lookup_settings)

        async def ask(contact: Contact) -> None:
            reply = await self._neighbours.ask(contact, Find(target), Found)
            if reply is None:
                lookup.failed(contact.peer)
            else:
                lookup.answered(contact.peer, reply.contacts)
            advance()

        async def mark_slow(contact: Contact) -> None:
            await trio.sleep(self._settings.slow_after)
            lookup.slow(contact.peer)
            advance()

        def advance() -> None:
            for contact in lookup.next_queries():
                nursery.start_soon(ask, contact)
                nursery.start_soon(mark_slow, contact)
            if lookup.done:
                nursery.cancel_scope.cancel()

        with trio.move_on_after(self._settings.lookup_limit):
            async with trio.open_nursery() as nursery:
                advance()
        self._table.looked_up(target, trio.current_time())
        return lookup.result

    # Records.

    async def get(self, key: bytes) -> dict[PeerId, Record]:
        """What is published under a key: the newest valid record of each signer, without those that were withdrawn.

        Several of the closest holders are asked, and our own store.
        """
        holders = iter(await self.find(key))
        reading = Reading(key, trio.current_time())
        reading.add_own(self._store)
        with trio.move_on_after(self._settings.lookup_limit):
            async with trio.open_nursery() as nursery:
                for _ in range(self._settings.readers):
                    nursery.start_soon(self._read_from_one, holders, reading)
        for contact, copies in reading.corrections(self._settings.corrections):
            self._neighbours.when_there_is_time(partial(self._correct, contact, copies))
        return reading.result()

    async def put(self, key: bytes, value: bytes, *, ttl: float = 120.0) -> int:
        """Sign a value and place it at the peers closest to a key, in place of what we put there before.

        Args:
            key: 32 bytes.
            value: At most 4 KiB. Empty, it withdraws what we put there before.
            ttl: Seconds until it is forgotten; holders allow up to two hours.

        Returns:
            How many peers keep it now, ourselves included if we are among the closest.

        Raises:
            ValueError: For a key, value or time to live that is out of bounds.
        """
        return (await self._place(self._sign(key, value, ttl))).holders

    def publish(self, key: bytes, value: bytes, *, ttl: float = 120.0) -> None:
        """As `put`, from within `run` and again and again, until replaced by the next `publish` or withdrawn."""
        if not value:
            raise ValueError("an empty value is a withdrawal: use withdraw()")
        self._publications[key] = _Publication(self._sign(key, value, ttl))
        self._published.set()

    async def withdraw(self, key: bytes) -> None:
        """Stop publishing under a key, and tell the holders to forget what we put there."""
        self._publications.pop(key, None)
        last = self._signed.get(key)
        if last is not None and not last.withdrawn:
            await self.put(key, b"", ttl=last.ttl)

    # Placing.

    def _sign(self, key: bytes, value: bytes, ttl: float, above: int = 0) -> Record:
        _check_key(key)
        if len(value) > MAX_VALUE:
            raise ValueError(f"a value of {len(value)} bytes; at most {MAX_VALUE} are allowed")
        if not 0 < ttl <= MAX_TTL:
            raise ValueError(f"a time to live of {ttl} seconds; it must be above 0 and at most {MAX_TTL}")
        last = self._signed.get(key)
        sequence = 1 + max(above, last.sequence if last is not None else 0)
        record = Record.sign(self._identity, key, value, sequence=sequence, ttl=math.ceil(ttl))
        self._signed[key] = record
        return record

    async def _place(self, record: Record) -> _Placement:
        """Place a record of ours; sign it again with a higher sequence if holders have one from an earlier life."""
        placement = await self._place_once(record)
        for _ in range(_PLACEMENTS - 1):
            newer = placement.newer
            if newer is None or self._signed[record.key] != record:
                break  # the second: we put something else meanwhile, which is to win
            record = self._sign(record.key, record.value, record.ttl, above=newer.sequence)
            placement = await self._place_once(record)
        return placement

    async def _place_once(self, record: Record) -> _Placement:
        placement = _Placement(record)
        contacts = await self.find(record.key)
        is_full = len(contacts) == self._settings.k
        if not is_full or distance(self._own, record.key) < distance(contacts[-1].peer, record.key):
            del contacts[self._settings.k - 1 :]  # we are one of the closest
            now = trio.current_time()
            verdict = self._store.put(record, record.ttl, now, by_signer=True)
            held = self._store.get(record.key, self._own, now) if verdict is Verdict.STALE else None
            placement.count(verdict in ACCEPTED, held.record if held is not None else None)

        async def place_at(contact: Contact) -> None:
            placement.count(*await self._store_at(contact, record, record.ttl))

        with trio.move_on_after(self._settings.lookup_limit):
            async with trio.open_nursery() as nursery:
                for contact in contacts:
                    nursery.start_soon(place_at, contact)
        return placement

    async def _store_at(self, contact: Contact, record: Record, remaining: float) -> tuple[bool, Record | None]:
        """Ask a peer to keep a record. Returns whether it does, and the record that it keeps instead."""
        reply = await self._neighbours.ask(contact, Store(Copy(record.encoded, remaining)), Stored)
        if reply is None:
            return False, None
        if reply.newer is None:
            return Verdict(reply.verdict) in ACCEPTED, None
        try:
            newer = Record.decode(reply.newer.record)
            is_same_place = (newer.key, newer.public_key) == (record.key, record.public_key)
            if not is_same_place or newer.sequence < record.sequence or not newer.verify():
                raise ProtocolError("a record that is no reason to refuse the one that was sent")
        except ProtocolError as error:
            self._neighbours.expel(contact.peer, error)
            return False, None
        return False, newer

    # Reading.

    async def _read_from_one(self, candidates: Iterator[Contact], reading: Reading) -> None:
        """Read all that one of the candidates holds: the first that answers."""
        for contact in candidates:
            pages = reading.of(contact)
            while (request := pages.next_request()) is not None:
                reply = await self._neighbours.ask(contact, request, Fetched)
                if reply is None:
                    break
                try:
                    pages.receive(reply)
                except ProtocolError as error:
                    self._neighbours.expel(contact.peer, error)
                    break
            else:
                return

    async def _correct(self, contact: Contact, copies: Sequence[tuple[Record, float]]) -> None:
        for record, remaining in copies:
            await self._store_at(contact, record, remaining)

    # What goes on by itself.

    async def _keep_fresh(self) -> None:
        """Look up ourselves and neglected parts of the space: often at first, then ever less."""
        settings = self._settings
        delay = settings.first_refresh
        while True:
            with trio.move_on_after(delay * self._rng.uniform(0.8, 1.2)):
                await self._neighbours.revived.wait()
                delay = settings.first_refresh
            self._neighbours.revived = trio.Event()
            await self._refresh()
            longest = settings.refresh_small if len(self._table) < settings.k else settings.refresh
            delay = min(2 * delay, longest)

    async def _refresh(self) -> None:
        await self._neighbours.greet_lost_anchors()
        closest = await self.find(self._own)
        if len(closest) < self._settings.k:
            return  # these are all that there are
        for prefix in self._table.stale(trio.current_time(), self._settings.bucket_age):
            await self.find(random_id(self._own, prefix, self._rng))

    async def _expire(self) -> None:
        while True:
            await trio.sleep(self._settings.liveness)
            self._store.expire(trio.current_time())

    async def _republish(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                self._published = trio.Event()
                now = trio.current_time()
                for publication in self._publications.values():
                    if publication.due <= now:
                        publication.due = math.inf
                        nursery.start_soon(self._place_publication, publication)
                next_due = min((publication.due for publication in self._publications.values()), default=math.inf)
                with trio.move_on_at(next_due):
                    await self._published.wait()

    async def _place_publication(self, publication: _Publication) -> None:
        publication.record = (await self._place(publication.record)).record
        # A third of its life: it survives that two placements in a row fail.
        publication.due = trio.current_time() + publication.record.ttl / 3 * self._rng.uniform(0.8, 1.0)
        self._published.set()


def _check_key(key: bytes) -> None:
    if len(key) != ID_BYTES:
        raise ValueError(f"a key of {len(key)} bytes; it must have {ID_BYTES}")

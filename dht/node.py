"""A node of the DHT: the driver that connects table, store and lookups to an endpoint and to trio's clock.

What it promises:

1. `put` sends a signed record to the `k` peers closest to its key, ourselves included if we are one of them, and says
   how many took it. A swarm of one peer is a swarm: it keeps and finds its own records.
2. `get` asks several holders and returns the newest record per signer whose signature is right, whatever else they
   said. Holders that had an older one, or none, are sent the newest for what is left of its life.
3. `publish` keeps a record alive until it is replaced or withdrawn, also across churn: it is placed anew, among
   whoever is closest by then, three times in its life.
4. No request waits longer than `request_timeout`, no lookup longer than `lookup_limit`; peers that do not answer cost
   time, not results.
5. A peer that contacts us, or that we connect to, is asked whether it answers, and is in the table from then on.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import attrs
import trio

from dht.ids import ID_BYTES, MAX_ADDRESSES, Contact, distance, random_id
from dht.lookup import Lookup, LookupSettings
from dht.messages import Copy, Fetched, Find, Found, Ping, Pong, Store, Stored
from dht.quota import Quota
from dht.reading import Reading
from dht.records import MAX_TTL, MAX_VALUE, Record
from dht.service import Service
from dht.store import ACCEPTED, RecordStore, StoreLimits, Verdict
from dht.table import RoutingTable, TableSettings
from protocol.endpoint import Endpoint, PeerConnected
from protocol.errors import HandshakeError, PeerUnreachable, ProtocolError, RequestRefused, ShoalError
from protocol.identity import Identity, PeerId
from protocol.transport import Address

_R = TypeVar("_R")


@attrs.frozen(kw_only=True)
class DhtSettings:
    """Constants of the DHT. Times are in seconds."""

    k: int = 20  # contacts in a bucket, holders of a record
    alpha: int = 3  # questions of a lookup that are under way at once
    table: TableSettings = attrs.field(factory=TableSettings)
    lookup: LookupSettings = attrs.field(factory=LookupSettings)
    store: StoreLimits = attrs.field(factory=StoreLimits)
    rate: float = 50.0  # requests a second that one peer may make
    burst: int = 200

    request_timeout: float = 3.0  # with connecting
    slow_after: float = 1.0  # a lookup asks somebody else meanwhile
    lookup_limit: float = 10.0
    readers: int = 5  # holders that a reader asks
    corrections: int = 16  # records that one reader sends to one holder

    first_refresh: float = 1.0  # doubles each time until one of the next two
    refresh_small: float = 30.0  # as long as the table has less than k contacts
    refresh: float = 300.0
    bucket_age: float = 900.0  # a bucket without a lookup for so long gets one
    liveness: float = 10.0  # a contact is not left alone for longer, as far as `alpha` pings at a time allow

    bootstrap_grace: float = 1.0  # once one bootstrap peer has answered, the others have so long
    connect_timeout: float = 5.0
    saved: int = 50  # contacts to be kept for the next start


@attrs.define(eq=False)
class _Publication:
    """Something that is kept alive."""

    record: Record
    due: float = -math.inf  # when it is to be placed again; infinity while it is being placed


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
        self._endpoint = endpoint
        self._identity = identity
        self._own = identity.peer_id
        self._rng = rng
        self._lookup_settings = attrs.evolve(settings.lookup, k=settings.k, alpha=settings.alpha)
        self._table = RoutingTable(self._own, attrs.evolve(settings.table, k=settings.k))
        self._store = RecordStore(settings.store)
        self._anchors: dict[PeerId, tuple[Address, ...]] = {}
        self._signed: dict[bytes, Record] = {}  # the last record that we signed, by key
        self._publications: dict[bytes, _Publication] = {}
        self._published = trio.Event()  # there is something new to place
        self._revived = trio.Event()  # a lost peer is back: the network may have healed
        # Small things to do when there is time. If there are too many of them, they are dropped: all come up again.
        self._chores, self._chores_to_do = trio.open_memory_channel[Callable[[], Awaitable[None]]](64)
        self._being_checked: set[PeerId] = set()
        quota = Quota(rate=settings.rate, burst=settings.burst)
        Service(self._table, self._store, quota, self._notice).register(endpoint)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the table fresh and what is published alive, until cancelled."""
        async with trio.open_nursery() as nursery:
            for _ in range(self._settings.alpha):
                nursery.start_soon(self._do_chores)
            nursery.start_soon(self._watch_connections)
            nursery.start_soon(self._keep_table_alive)
            nursery.start_soon(self._keep_table_fresh)
            nursery.start_soon(self._republish)
            task_status.started()

    # Finding the swarm.

    async def bootstrap(self, contacts: Sequence[tuple[PeerId | None, Address]]) -> int:
        """Join through peers that are already there, and remember them for when all others are lost.

        Args:
            contacts: Where to find them, with the expected peer id where it is known. One peer may have several.

        Returns:
            How many of them answered; 0 if there is none but ourselves.

        Raises:
            PeerUnreachable: None answered. Its cause is the most telling of the errors.
        """
        known: dict[PeerId, tuple[Address, ...]] = {}
        for peer, address in contacts:
            if peer is not None and peer != self._own:
                known[peer] = (*known.get(peer, ()), address)[-MAX_ADDRESSES:]
        unknown = [address for peer, address in contacts if peer is None and address != self._endpoint.address]
        targets = [*known.items(), *((None, (address,)) for address in dict.fromkeys(unknown))]
        if not targets:
            return 0
        answered, errors = await self._greet_all(targets)
        self._anchors.update(known)
        if not answered:
            errors.sort(key=lambda error: not isinstance(error, HandshakeError))
            raise PeerUnreachable(
                f"none of {len(targets)} known peers of the swarm could be reached",
                hint="Check the network connection, and that at least one of them is running.",
            ) from (errors[0] if errors else None)
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
        seeds = self._table.closest(target, self._settings.k) or self._table.closest(
            target, self._settings.k, dormant=True
        )
        lookup = Lookup(target, self._own, seeds, self._lookup_settings)

        async def ask(contact: Contact) -> None:
            reply = await self._ask(contact, Find(target), Found)
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
        holders = await self.find(key)
        reading = Reading(key, trio.current_time())
        reading.add_own(self._store)
        candidates = iter(holders)
        with trio.move_on_after(self._settings.lookup_limit):
            async with trio.open_nursery() as nursery:
                for _ in range(self._settings.readers):
                    nursery.start_soon(self._read_from_one, candidates, reading)
        for contact, copies in reading.corrections(self._settings.corrections):
            self._when_there_is_time(partial(self._correct, contact, copies))
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
        _, holders = await self._place(self._sign(key, value, ttl))
        return holders

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

    # Placing and reading.

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

    async def _place(self, record: Record) -> tuple[Record, int]:
        """Place a record of ours; sign it again with a higher sequence if holders have one from an earlier life.

        Returns:
            The record that was placed in the end, and how many hold it.
        """
        while True:
            holders, newer = await self._place_once(record)
            if newer is None or self._signed[record.key] != record or newer.sequence < record.sequence:
                return record, holders  # the second: we put something else meanwhile, which is to win
            record = self._sign(record.key, record.value, record.ttl, above=newer.sequence)

    async def _place_once(self, record: Record) -> tuple[int, Record | None]:
        contacts = await self.find(record.key)
        holders = 0
        newest: Record | None = None

        def count(verdict: Verdict, newer: Record | None) -> None:
            nonlocal holders, newest
            holders += verdict in ACCEPTED
            if newer is not None and newer != record and (newest is None or newer.rank > newest.rank):
                newest = newer

        async def place_at(contact: Contact) -> None:
            count(*await self._store_at(contact, record, record.ttl))

        if len(contacts) < self._settings.k or distance(self._own, record.key) < distance(
            contacts[-1].peer, record.key
        ):
            now = trio.current_time()
            verdict = self._store.put(record, record.ttl, now, by_signer=True)
            held = self._store.get(record.key, self._own, now)
            count(verdict, held.record if held is not None else None)
        with trio.move_on_after(self._settings.lookup_limit):
            async with trio.open_nursery() as nursery:
                for contact in contacts:
                    nursery.start_soon(place_at, contact)
        return holders, newest

    async def _store_at(self, contact: Contact, record: Record, remaining: float) -> tuple[Verdict, Record | None]:
        """Ask a peer to keep a record. Returns what it said, and the record that it keeps instead."""
        reply = await self._ask(contact, Store(Copy(record.encoded, remaining)), Stored)
        if reply is None:
            return Verdict.FULL, None
        newer = None
        if reply.newer is not None:
            try:
                newer = Record.decode(reply.newer.record)
                if newer.key != record.key or newer.public_key != record.public_key or not newer.verify():
                    raise ProtocolError("it keeps a record that does not belong there")
            except ProtocolError as error:
                self._expel(contact.peer, error)
                return Verdict.FULL, None
        return Verdict(reply.verdict), newer

    async def _read_from_one(self, candidates: Iterator[Contact], reading: Reading) -> None:
        """Read all that one of the candidates holds: the first that answers."""
        for contact in candidates:
            pages = reading.of(contact)
            while (request := pages.next_request()) is not None:
                reply = await self._ask(contact, request, Fetched)
                if reply is None:
                    break
                try:
                    pages.receive(reply)
                except ProtocolError as error:
                    self._expel(contact.peer, error)
                    break
            else:
                return

    async def _correct(self, contact: Contact, copies: Sequence[tuple[Record, float]]) -> None:
        for record, remaining in copies:
            await self._store_at(contact, record, remaining)

    # Requests.

    async def _ask(self, contact: Contact, request: object, reply: type[_R]) -> _R | None:
        """One request to one peer, within the time limit, and what the table learns from it. None: no answer."""
        peer = contact.peer
        answer: _R | None = None
        timeout = self._settings.request_timeout
        try:
            self._endpoint.learn(peer, *contact.addresses)
            with trio.move_on_after(timeout):
                answer = await self._endpoint.request(peer, request, reply, timeout=timeout)
        except RequestRefused:
            return None  # it is there, but busy
        except ProtocolError as error:
            self._expel(peer, error)
            return None
        except ShoalError:
            pass  # unreachable, gone, silent: all the same to us
        if answer is None:
            self._table.failed(peer, trio.current_time())
        else:
            self._heard(peer)
        return answer

    def _heard(self, peer: PeerId) -> None:
        known = self._table.entry(peer)
        addresses = self._endpoint.addresses(peer)[:MAX_ADDRESSES]
        self._table.heard(Contact(peer, tuple(addresses)), trio.current_time())
        if known is not None and not known.alive:
            self._revived.set()

    def _expel(self, peer: PeerId, error: ProtocolError) -> None:
        self._table.remove(peer)
        self._endpoint.disconnect(peer, str(error))

    # Bootstrapping.

    async def _greet_all(
        self, targets: Iterable[tuple[PeerId | None, tuple[Address, ...]]]
    ) -> tuple[int, list[ShoalError]]:
        """Contact all at once. Once one has answered, the others have the grace time. Returns how many answered."""
        answered: set[PeerId] = set()
        errors: list[ShoalError] = []

        async def greet(peer: PeerId | None, addresses: tuple[Address, ...]) -> None:
            try:
                found = await self._greet(peer, addresses)
            except ShoalError as error:
                errors.append(error)
                return
            answered.add(found)
            scope = nursery.cancel_scope
            scope.deadline = min(scope.deadline, trio.current_time() + self._settings.bootstrap_grace)

        with trio.move_on_after(self._settings.connect_timeout + self._settings.request_timeout):
            async with trio.open_nursery() as nursery:
                for peer, addresses in targets:
                    nursery.start_soon(greet, peer, addresses)
        return len(answered), errors

    async def _greet(self, peer: PeerId | None, addresses: tuple[Address, ...]) -> PeerId:
        if peer is not None:
            self._endpoint.learn(peer, *addresses)
        found = None
        with trio.move_on_after(self._settings.connect_timeout):
            found = await self._endpoint.connect(addresses[0] if peer is None else peer)
        if found is None or await self._ask(Contact(found, addresses), Ping(), Pong) is None:
            raise PeerUnreachable(f"no answer from {', '.join(map(str, addresses))}")
        return found

    # What goes on by itself.

    def _notice(self, peer: PeerId) -> None:
        """A peer has contacted us. If the table can use it, find out whether it answers."""
        if self._table.wants(peer):
            self._check(peer)

    def _check(self, peer: PeerId) -> None:
        if peer not in self._being_checked and self._when_there_is_time(partial(self._ping, peer)):
            self._being_checked.add(peer)

    async def _ping(self, peer: PeerId) -> None:
        try:
            await self._ask(Contact(peer, tuple(self._endpoint.addresses(peer)[:MAX_ADDRESSES])), Ping(), Pong)
        finally:
            self._being_checked.discard(peer)

    def _when_there_is_time(self, chore: Callable[[], Awaitable[None]]) -> bool:
        try:
            self._chores.send_nowait(chore)
        except trio.WouldBlock:
            return False
        return True

    async def _do_chores(self) -> None:
        async for chore in self._chores_to_do:
            await chore()

    async def _watch_connections(self) -> None:
        """Notice peers that connect, and those that are lost."""
        with self._endpoint.watch() as changes:
            for peer in self._endpoint.connected:
                self._notice(peer)
            async for change in changes:
                if isinstance(change, PeerConnected):
                    self._notice(change.peer)
                elif change.peer in self._table:
                    self._check(change.peer)

    async def _keep_table_alive(self) -> None:
        """Ping those that we have not heard of for longest. Dormant ones take their turn: they may be back."""
        while True:
            await trio.sleep(self._settings.liveness * self._rng.uniform(0.8, 1.2))
            for contact in self._table.due(trio.current_time(), self._settings.liveness, self._settings.alpha):
                self._check(contact.peer)

    async def _keep_table_fresh(self) -> None:
        """Look up ourselves and neglected parts of the space: often at first, then ever less."""
        settings = self._settings
        delay = settings.first_refresh
        while True:
            with trio.move_on_after(delay * self._rng.uniform(0.8, 1.2)):
                await self._revived.wait()
                delay = settings.first_refresh
            self._revived = trio.Event()
            await self._refresh()
            longest = settings.refresh_small if len(self._table) < settings.k else settings.refresh
            delay = min(2 * delay, longest)

    async def _refresh(self) -> None:
        lost = [
            (peer, addresses)
            for peer, addresses in self._anchors.items()
            if (entry := self._table.entry(peer)) is None or not entry.alive
        ]
        await self._greet_all(lost)
        neighbours = await self.find(self._own)
        if len(neighbours) < self._settings.k:
            return  # these are all that there are
        for prefix in self._table.stale(trio.current_time(), self._settings.bucket_age):
            await self.find(random_id(self._own, prefix, self._rng))

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
        publication.record, _ = await self._place(publication.record)
        # A third of its life: it survives that two placements in a row fail.
        publication.due = trio.current_time() + publication.record.ttl / 3 * self._rng.uniform(0.8, 1.0)
        self._published.set()


def _check_key(key: bytes) -> None:
    if len(key) != ID_BYTES:
        raise ValueError(f"a key of {len(key)} bytes; it must have {ID_BYTES}")

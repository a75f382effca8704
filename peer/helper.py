"""The helper peer: a place to begin for others. It takes part in the DHT and trains nothing.

It belongs to no run: it keeps the records of any, without knowing what they are about, and holds no manifest. The peers
of private runs shake hands only with those that have the run's key; a helper for them is given a ticket with the key.
When that key is rotated, it asks the peer that says so for the manifest, which names the founder that must have signed.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import attrs
import trio

from dht import DHT
from peer.contact import Contact, named
from peer.events import EventLog
from peer.failure import first_cause
from peer.finding import fetch_manifest
from peer.home import Home
from peer.keys import RunKeys
from peer.manifest import Manifest, ManifestError
from peer.probe import Prober
from peer.reach import (
    UNSPECIFIED,
    Reach,
    book_entries,
    outward_host,
    read_book,
    start_listening,
    tell_paths,
    write_book,
)
from peer.rotation import open_keyring
from peer.status import member_status
from peer.ticket import Ticket
from protocol.endpoint import Endpoint, Limits, PeerConnected, PeerLost
from protocol.errors import PeerUnreachable, RequestRefused
from protocol.identity import PeerId
from protocol.keyring import Keyring
from protocol.tcp import TcpTransport
from protocol.transport import Address, Transport

MAX_CONNECTIONS = 768
"""Peers at a time. Most systems allow a process 1024 open files."""

BOOK_PERIOD = 10.0
"""Seconds between two writes of the address book, at least."""

STATUS_PERIOD = 1.0


@attrs.frozen(kw_only=True)
class HelperConfig:
    """What a helper is told by its user."""

    home: Home
    listen: Address
    events: EventLog
    announce: Address | None = None
    relay: bool = True
    map_port: bool = False
    """Ask the home's gateway for a port, unless an address is announced."""
    bootstrap: tuple[Contact, ...] = ()
    """Other helpers, or peers of any run, to join the DHT through."""
    ticket: Ticket | None = None
    """Of a private run, whose key is needed; the helper then helps this run only."""
    max_upload: int | None = None
    max_download: int | None = None
    on_address: Callable[[str], None] = lambda address: None
    """Called with PEERID@HOST:PORT whenever the address has changed."""


async def run_helper(
    config: HelperConfig,
    *,
    transport: Transport | None = None,
    rng: random.Random | None = None,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Runs a helper until it is cancelled.

    Args:
        config: What to do.
        transport: How bytes travel; TCP if None.
        rng: Spreads load over time and peers; keys never come from it. A fresh one if None.
        task_status: Started with PEERID@HOST:PORT, as soon as others can begin here.

    Raises:
        AddressError: It cannot listen there.
        IdentityInUse: Another helper with the identity of this home is there, and nobody takes us for it.
        HomeError: A key that the home has stored is damaged.
    """
    rng = rng or random.Random()
    keyring = _keyring(config)
    endpoint = Endpoint(
        config.home.identity,
        transport or TcpTransport(),
        psk=keyring,
        limits=Limits(
            max_connections=MAX_CONNECTIONS,
            max_upload=config.max_upload,
            max_download=config.max_download,
            relay=config.relay,
        ),
        announce=config.announce,
        local_host=outward_host() if config.listen.host in UNSPECIFIED else None,
        rng=rng,
    )
    helper = _Helper(config, endpoint, DHT(endpoint, config.home.identity, rng=rng), keyring, rng)
    reason = "cancelled"
    try:
        async with trio.open_nursery() as nursery:
            await helper.run(nursery, task_status)
    except BaseException as error:
        cause = first_cause(error)
        if cause is error or isinstance(cause, trio.Cancelled):
            raise
        reason = str(cause)
        raise cause from error
    finally:
        sent, received = endpoint.bytes_sent, endpoint.bytes_received
        config.events.emit("stopped", reason=reason, bytes_sent=sent, bytes_received=received)


class _Helper:
    def __init__(
        self, config: HelperConfig, endpoint: Endpoint, dht: DHT, keyring: Keyring | None, rng: random.Random
    ) -> None:
        self._config = config
        self._rng = rng
        self._events = config.events
        self._endpoint = endpoint
        self._dht = dht
        self._keyring = keyring
        self._reach = Reach(endpoint, config.events, config.announce)
        Prober(endpoint)

    @property
    def _address(self) -> str:
        return named(self._endpoint.peer_id, self._reach.addresses[0])

    async def run(self, nursery: trio.Nursery, task_status: trio.TaskStatus[str]) -> None:
        config = self._config
        await nursery.start(tell_paths, self._endpoint, self._events, self._reach, self._rng)
        await start_listening(nursery, self._endpoint, config.home, config.listen)
        await nursery.start(self._dht.run)
        nursery.start_soon(self._watch)
        nursery.start_soon(self._bootstrap)
        nursery.start_soon(self._tell_members)
        nursery.start_soon(self._keep_book)
        if self._keyring is not None and config.ticket is not None:
            nursery.start_soon(self._keep_keys, self._keyring, config.ticket.run_id)
        self._events.emit("started", address=str(self._reach.addresses[0]), role="helper")
        task_status.started(self._address)
        if config.map_port:
            nursery.start_soon(self._reach.keep_mapped, lambda: config.on_address(self._address))

    async def _keep_keys(self, keyring: Keyring, run: bytes) -> None:
        """Follows rotations of the run's key. Members give the new one to each other, and to us."""

        async def founder(peer: PeerId) -> bytes:
            try:
                manifest = Manifest.parse(await fetch_manifest(self._endpoint, peer, run))
            except ManifestError as error:
                raise RequestRefused(f"whose word that is cannot be told: {error}", code="unverified") from error
            if manifest.run_id != run:
                raise RequestRefused("whose word that is cannot be told: another run's manifest", code="unverified")
            return manifest.founder

        async def nobody() -> tuple[PeerId, ...]:
            return ()

        await RunKeys(self._endpoint, keyring, self._config.home, run, founder=founder, events=self._events).run(nobody)

    async def _bootstrap(self) -> None:
        """Joins the others, if there are any. Whoever is not there now is tried again by the DHT."""
        ticket = self._config.ticket
        contacts = [*(ticket.bootstrap if ticket else ()), *self._config.bootstrap, *read_book(self._config.home)]
        try:
            await self._dht.bootstrap(contacts)
        except PeerUnreachable as error:
            if (in_use := self._endpoint.in_use) is not None:
                raise in_use from None
            if ticket is not None or self._config.bootstrap:
                self._events.emit("bootstrap_failed", reason=str(error.__cause__ or error))

    async def _watch(self) -> None:
        """Reports who comes and goes."""
        here: set[str] = set()
        while True:
            with self._endpoint.watch() as changes:
                for peer in {str(peer) for peer in self._endpoint.connected} ^ here:
                    self._note(here, peer, "unknown" if peer in here else None)
                async for change in changes:
                    if isinstance(change, (PeerConnected, PeerLost)):
                        self._note(here, str(change.peer), change.reason if isinstance(change, PeerLost) else None)
            # We could not keep up with the changes: look at who is connected, and go on from there.

    def _note(self, here: set[str], peer: str, lost: str | None) -> None:
        """A peer has come or, for a reason, gone."""
        if lost is None:
            here.add(peer)
            self._events.emit("peer_seen", peer=peer)
        else:
            here.discard(peer)
            self._events.emit("peer_lost", peer=peer, reason=lost)

    async def _tell_members(self) -> None:
        """Keeps the status up to date about those that are connected."""
        while True:
            self._events.tell(
                "members", members=[member_status(self._endpoint, peer) for peer in sorted(self._endpoint.connected)]
            )
            await trio.sleep(STATUS_PERIOD)

    async def _keep_book(self) -> None:
        """Writes down whom we know, so that a restart finds back."""
        written: list[list[str]] = []
        while True:
            await trio.sleep(BOOK_PERIOD)
            entries = book_entries(self._dht.contacts())
            if entries and entries != written:
                with contextlib.suppress(OSError):  # a full disk is no reason to stop, and the old book is still there
                    await trio.to_thread.run_sync(write_book, self._config.home, entries)
                    written = entries


def _keyring(config: HelperConfig) -> Keyring | None:
    ticket = config.ticket
    if ticket is None or ticket.swarm_key is None:
        return None
    return open_keyring(config.home, ticket.run_id, ticket.swarm_key, ticket.key_number)

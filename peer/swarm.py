"""A swarm for programs: what a script with a training loop of its own founds, or joins with a ticket.

    with Swarm.found("my run") as swarm:            with Swarm.join("shoal:…") as swarm:
        print(swarm.ticket)                             swarm.wait_for(2)
        ...                                             optimizer = DiLoCo(model, inner, swarm)

It is a peer like a daemon: the members find each other through the DHT, whoever is there; routers, relays and helpers
are used as daemons use them. What it trains is the program's matter, so there is no manifest, and no state that
newcomers fetch: see `welcome` of the optimizers for that.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from time import time
from typing import TypedDict, Unpack

import attrs
import trio

from dht import DHT, members_key
from peer.bootstrap import why_unreachable
from peer.contact import Contact, parse_contact
from peer.events import EventLog
from peer.failure import first_cause
from peer.finding import ManifestRequest, fetch_manifest
from peer.home import Home
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
from peer.ticket import MAX_BOOTSTRAP, Ticket, TicketError
from protocol.background import in_background
from protocol.blocking import BlockingCollective
from protocol.channels import ChannelSettings
from protocol.codecs import NAMES, CodecName
from protocol.courtesy import Courtesy
from protocol.endpoint import Endpoint, Limits
from protocol.errors import PeerUnreachable, RequestRefused, RoundAborted, SettingsError, ShoalError
from protocol.identity import PeerId
from protocol.mesh import Known, Mesh
from protocol.operations import AsyncCollective
from protocol.standalone import wait_for_members
from protocol.stream import Stream
from protocol.tcp import TcpTransport
from protocol.transport import Address
from protocol.wire import Message

SEARCH_PERIOD = 10.0
"""Seconds between two looks into the DHT for members that nobody has told us of, and into the address book."""

STRANGERS = 16
"""Peers from the DHT that are looked up in one search; anybody can publish a record."""

RECORD_TTL = 120.0
"""Seconds that a record in the DHT lives unless it is renewed."""


class SwarmOptions(TypedDict, total=False):
    """How a program's peer meets others. All have defaults."""

    home: Path | str | None
    """A directory for the identity, the port and the peers that were met, so that a restart is the same peer, and a
    founder's tickets stay good. None: a new peer each time."""
    listen: str
    """HOST:PORT; port 0, as in the default "0.0.0.0:0", picks one, or takes the home's last one."""
    announce: str | None
    """HOST:PORT to tell others instead, if it differs."""
    bootstrap: Sequence[str]
    """Helpers, PEERID@HOST:PORT as `shoal serve` prints it, or peers, to begin with."""
    map_port: bool
    """Whether to ask the router to map a port; by default it is asked."""
    events: Path | str | None
    """A file to append events to, as JSON Lines."""
    max_upload: int | None
    """Bytes per second; None, the default: no limit."""
    max_download: int | None
    codec: CodecName
    """How vectors look on the wire; the same at all members, "fp32" by default."""


@attrs.frozen(kw_only=True)
class _Run:
    """What all members have in common, and whom to begin with."""

    id: bytes
    key: bytes | None
    key_number: int = 0
    first: tuple[Contact, ...]
    founded: bool = False
    """By us, so that nobody else need be there."""

    @classmethod
    def found(cls, home: Home, name: str, private: bool, first: Sequence[Contact]) -> _Run:
        founder = home.identity.public_key
        run_id = hashlib.sha256(b"shoal-program-v1" + founder + name.encode()).digest()
        return cls(id=run_id, key=home.swarm_key() if private else None, first=tuple(first), founded=True)

    @classmethod
    def join(cls, text: str, first: Sequence[Contact]) -> _Run:
        ticket = Ticket.parse(text, time())
        contacts = (*ticket.bootstrap, *first)
        return cls(id=ticket.run_id, key=ticket.swarm_key, key_number=ticket.key_number, first=contacts)


class AsyncSwarm(AsyncCollective):
    """A peer that runs, for programs with trio: the operations, and who is there. Made by `open_swarm`."""

    def __init__(self, run: _Run, endpoint: Endpoint, dht: DHT, reach: Reach, settings: ChannelSettings) -> None:
        self.mesh = Mesh(endpoint, run.id)
        super().__init__(endpoint, run.id, roster=self.mesh, settings=settings)
        self._run, self._endpoint, self._dht, self._reach = run, endpoint, dht, reach

    @property
    def peer_id(self) -> PeerId:
        """Who we are."""
        return self._endpoint.peer_id

    @property
    def members(self) -> tuple[PeerId, ...]:
        """Who is there, ourselves included."""
        return self.mesh.members

    @property
    def ticket(self) -> str:
        """For others to join with: it names us first, and then whom we know, where they are now.

        That of a private swarm is a secret, as it holds the key.
        """
        own = [(self.peer_id, address) for address in self._reach.addresses]
        members = [(peer, places[0]) for peer in self.members[1:] if (places := self._endpoint.addresses(peer))]
        others = [contact for contact in (*members, *self._run.first, *self._dht.contacts()) if contact not in own]
        bootstrap = tuple(dict.fromkeys((*own, *others)))[:MAX_BOOTSTRAP]
        return Ticket(self._run.id, bootstrap, self._run.key, key_number=self._run.key_number).encode()

    async def wait_for(self, count: int) -> None:
        """Waits until there are so many members, ourselves included."""
        await self.mesh.wait_for(count)


class Swarm(BlockingCollective):
    """A peer that runs in a thread of its own: the operations of `protocol.collective.Collective`, and who is there.

    Optimizers take it as their collective. Made by `found` and `join`, for the length of a `with` block.
    """

    def __init__(self, swarm: AsyncSwarm, token: trio.lowlevel.TrioToken) -> None:
        super().__init__(swarm, token)
        self._swarm = swarm

    @classmethod
    @contextmanager
    def found(cls, name: str, *, private: bool = True, **options: Unpack[SwarmOptions]) -> Iterator[Swarm]:
        """Founds a swarm; see `open_swarm`. Others join it with `ticket`."""
        with in_background(partial(open_swarm, name=name, private=private, **options)) as (swarm, token):
            yield cls(swarm, token)

    @classmethod
    @contextmanager
    def join(cls, ticket: str, **options: Unpack[SwarmOptions]) -> Iterator[Swarm]:
        """Joins a swarm; see `open_swarm`."""
        if not isinstance(ticket, str):  # such as what an environment variable that is not set gives
            raise TicketError(f"a ticket is text, not {ticket!r}")
        with in_background(partial(open_swarm, ticket, **options)) as (swarm, token):
            yield cls(swarm, token)

    @property
    def peer_id(self) -> PeerId:
        """Who we are."""
        return self._swarm.peer_id

    @property
    def members(self) -> tuple[PeerId, ...]:
        """Who is there, ourselves included."""
        return self._swarm.members

    @property
    def ticket(self) -> str:
        """For others to join with; see `AsyncSwarm.ticket`.

        Raises:
            RoundAborted: The swarm has ended.
        """
        try:
            return trio.from_thread.run_sync(lambda: self._swarm.ticket, trio_token=self._token)
        except (trio.Cancelled, trio.RunFinishedError):
            raise RoundAborted("the swarm has ended") from None

    def wait_for(self, count: int, timeout: float | None = None) -> None:
        """Waits until there are so many members, ourselves included.

        Raises:
            RequestTimeout: There are not, in so many seconds.
            RoundAborted: The swarm has ended.
        """
        wait_for_members(self._swarm.mesh, count, timeout, self._token)


@asynccontextmanager
async def open_swarm(
    ticket: str | None = None, *, name: str = "swarm", private: bool = True, **options: Unpack[SwarmOptions]
) -> AsyncIterator[AsyncSwarm]:
    """A peer of a swarm of programs, for as long as the block runs.

    Args:
        ticket: What a member has given out. None: founds a swarm.
        name: Of the swarm that is founded. The same name in the same home is the same swarm.
        private: Whether only those with a ticket get in. Else whoever knows a member's address.
        options: See `SwarmOptions`.

    Raises:
        TicketError: The ticket cannot be used.
        PeerUnreachable: Nobody whom the ticket names, or the home remembers, answers.
        HandshakeError: Somebody answers, but does not take us in.
        RequestRefused: The ticket is that of a run that daemons train.
        AddressError, HomeError, EventsError: An option cannot be used.
        IdentityInUse: Another peer with the identity of this home is there.
        SettingsError, TypeError: There is no such codec, or no such option.
    """
    if unknown := options.keys() - SwarmOptions.__annotations__.keys():
        raise TypeError(f"there is no option {min(unknown)!r}; there are {', '.join(SwarmOptions.__annotations__)}")
    if options.get("codec", "fp32") not in NAMES:
        raise SettingsError(f"there is no codec {options['codec']!r}", hint=f"there are {', '.join(NAMES)}")
    first = [parse_contact(text) for text in options.get("bootstrap", ())]
    try:
        with _home(options.get("home")) as home:
            run = _Run.found(home, name, private, first) if ticket is None else _Run.join(ticket, first)
            with EventLog(options.get("events"), home.identity.peer_id) as events:
                async with _member(run, home, events, options) as swarm:
                    yield swarm
    except BaseExceptionGroup as group:
        raise first_cause(group) from group


@contextmanager
def _home(path: Path | str | None) -> Iterator[Home]:
    with contextlib.ExitStack() as stack:
        if path is None:
            path = stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-"))
        home = Home(path)
        stack.enter_context(home.lock())
        yield home


@asynccontextmanager
async def _member(run: _Run, home: Home, events: EventLog, options: SwarmOptions) -> AsyncIterator[AsyncSwarm]:
    rng = random.Random()
    listen = Address.parse(options.get("listen", "0.0.0.0:0"))
    given = options.get("announce")
    announce = None if given is None else Address.parse(given)
    endpoint = Endpoint(
        home.identity,
        TcpTransport(),
        psk=run.key,
        limits=Limits(max_upload=options.get("max_upload"), max_download=options.get("max_download")),
        announce=announce,
        local_host=outward_host() if listen.host in UNSPECIFIED else None,
        rng=rng,
    )
    dht, reach = DHT(endpoint, home.identity, rng=rng), Reach(endpoint, events, announce)
    courtesy = Courtesy(lambda: endpoint.bytes_sent)
    settings = ChannelSettings(codec=options.get("codec", "fp32"), report=events.report, courtesy=courtesy)
    swarm = AsyncSwarm(run, endpoint, dht, reach, settings)
    Prober(endpoint)
    endpoint.handle(ManifestRequest, _no_manifest)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(tell_paths, endpoint, events, reach, rng)
            await start_listening(nursery, endpoint, home, listen)
            await nursery.start(dht.run)
            await nursery.start(swarm.run)
            await nursery.start(swarm.mesh.run)
            await _meet(run, endpoint, dht, [*run.first, *read_book(home)], events)
            dht.publish(members_key(run.id), b"member", ttl=RECORD_TTL)
            nursery.start_soon(_search, run, dht, swarm.mesh, rng)
            nursery.start_soon(_keep_book, home, endpoint, dht, swarm.mesh)
            nursery.start_soon(_tell_members, swarm.mesh, events)
            if options.get("map_port", True):
                nursery.start_soon(reach.keep_mapped, lambda: None)
            events.emit("started", address=str(reach.addresses[0]), run=run.id)
            yield swarm
            nursery.cancel_scope.cancel()
    finally:
        sent, received = endpoint.bytes_sent, endpoint.bytes_received
        events.emit("stopped", reason="finished", bytes_sent=sent, bytes_received=received)


async def _meet(run: _Run, endpoint: Endpoint, dht: DHT, contacts: Sequence[Contact], events: EventLog) -> None:
    """Reaches the others, or some of them.

    Raises:
        ShoalError: As `open_swarm` says.
    """
    try:
        await dht.bootstrap(contacts)
    except PeerUnreachable as error:
        if endpoint.in_use is not None:
            raise endpoint.in_use from None
        if not run.founded:
            raise why_unreachable(contacts, error) from error
        if contacts:
            events.emit("bootstrap_failed", reason=str(error.__cause__ or error))
    daemons: list[PeerId] = []

    async def ask(peer: PeerId) -> None:
        with contextlib.suppress(ShoalError):
            await fetch_manifest(endpoint, peer, run.id)
            daemons.append(peer)

    async with trio.open_nursery() as nursery:
        for peer in endpoint.connected:
            nursery.start_soon(ask, peer)
    if daemons:  # they do not know the operations of programs
        raise RequestRefused(
            f"the ticket is that of a run that daemons train, {daemons[0].short} among them",
            code="daemons",
            hint="take part in it with `shoal join`, or found a swarm of programs with Swarm.found",
        )


async def _no_manifest(request: ManifestRequest, stream: Stream) -> Message | None:
    raise RequestRefused(
        "this is no run for daemons but a swarm of programs: take part with Swarm.join of the package peer",
        code="program",
    )


async def _search(run: _Run, dht: DHT, mesh: Mesh, rng: random.Random) -> None:
    """Looks for members that nobody has told us of."""
    while True:
        try:
            records = await dht.get(members_key(run.id))
        except ShoalError:
            records = {}
        strangers = sorted(records.keys() - set(mesh.members))
        for peer in rng.sample(strangers, min(len(strangers), STRANGERS)):
            found = [contact for contact in await dht.find(peer) if contact.peer == peer]
            mesh.meet([Known(contact.peer, tuple(contact.addresses[:8])) for contact in found])
        await trio.sleep(SEARCH_PERIOD * rng.uniform(0.8, 1.2))


async def _keep_book(home: Home, endpoint: Endpoint, dht: DHT, mesh: Mesh) -> None:
    """Writes down whom we know, so that a restart finds back."""
    written: list[list[str]] = []
    while True:
        known = [(peer, address) for peer in mesh.members[1:] for address in endpoint.addresses(peer)]
        entries = book_entries([*known, *dht.contacts()])
        if entries and entries != written:
            with contextlib.suppress(OSError):  # a full disk is no reason to stop, and the old book is still there
                await trio.to_thread.run_sync(write_book, home, entries)
                written = entries
        await trio.sleep(SEARCH_PERIOD)


async def _tell_members(mesh: Mesh, events: EventLog) -> None:
    """Reports which members come and go."""
    here: set[PeerId] = set()
    while True:
        members = set(mesh.members[1:])
        for peer in sorted(members - here):
            events.emit("peer_seen", peer=peer)
        for peer in sorted(here - members):
            events.emit("peer_lost", peer=peer, reason="the connection has ended")
        here = members
        await mesh.changes()

"""Where others reach this peer: what its user says, what the home's gateway maps, or what the system says."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import random
import socket
from collections.abc import Callable, Iterable

import attrs
import trio

from peer.contact import Contact
from peer.events import EventLog
from peer.home import Home, write_atomically
from protocol import natpmp
from protocol.endpoint import Endpoint, PeerLost
from protocol.errors import AddressError, ShoalError
from protocol.identity import PeerId
from protocol.portmap import Mapping, keep_mapped
from protocol.reachability import Reachability, Verdict
from protocol.transport import Address

MAX_BOOK = 200
"""Addresses in the book."""

ISOLATION_PERIOD = 20.0
"""Seconds between two looks at whether others find a way to us; a router takes ten to refuse a port."""

UNSPECIFIED = ("0.0.0.0", "::")
LOOPBACK = "127.0.0.1"


class Reach:
    """The addresses to give to others.

    Args:
        endpoint: Ours; it must listen.
        events: Where it is told that a port is mapped, and no longer is.
        announce: The address that our user says, instead of all others.
    """

    def __init__(self, endpoint: Endpoint, events: EventLog, announce: Address | None = None) -> None:
        self._endpoint = endpoint
        self._events = events
        self._announce = announce
        self._mapping: Mapping | None = None

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where others reach us, as far as we know; the best first."""
        if self._announce is not None:
            return (self._announce,)
        bound = self._endpoint.address
        assert bound is not None
        own = bound
        if bound.host in UNSPECIFIED:
            own = Address(outward_host() or LOOPBACK, bound.port)
        if self._mapping is None:
            return (self._endpoint.advertised() or own,) if bound.host in UNSPECIFIED else (own,)
        mapped = self._mapping.external
        return (own, mapped) if self._mapping.behind_nat else (mapped, own)

    async def keep_mapped(self, changed: Callable[[], None]) -> None:
        """Keeps our port mapped at the gateway until cancelled, where that is of any use.

        Args:
            changed: Called whenever `addresses` has changed.
        """
        bound = self._endpoint.address
        if self._announce is not None or bound is None or is_loopback(bound.host):
            return

        def take(mapping: Mapping | None) -> None:
            before, addresses = self._mapping, self.addresses
            self._mapping = mapping
            self._endpoint.mapped = None if mapping is None or mapping.behind_nat else mapping.external
            if mapping is not None:
                self._events.emit(
                    "mapped", address=str(mapping.external), method=mapping.method, behind_nat=mapping.behind_nat
                )
            elif before is not None:
                self._events.emit("unmapped", address=str(before.external))
            if self.addresses != addresses:
                changed()

        await keep_mapped(bound.port, on_change=take)


async def start_listening(nursery: trio.Nursery, endpoint: Endpoint, home: Home, listen: Address) -> None:
    """Starts an endpoint in a nursery. If it may choose the port, it takes the one that its home had last, if it can.

    The tickets that name it stay good then.

    Raises:
        AddressError: It cannot listen there.
    """
    last = 0 if listen.port else _last_port(home)
    try:
        await nursery.start(endpoint.run, attrs.evolve(listen, port=listen.port or last))
    except AddressError:
        if not last:
            raise
        await nursery.start(endpoint.run, listen)
    if endpoint.address is not None and endpoint.address.port != last:
        with contextlib.suppress(OSError):  # a full disk is no reason to stop
            write_atomically(home.port, f"{endpoint.address.port}\n".encode())


def _last_port(home: Home) -> int:
    """The port that a peer of this home had last; 0 if that is not known."""
    try:
        port = int(home.port.read_text("ascii"))
    except (OSError, ValueError):
        return 0
    return port if 0 < port < 65536 else 0


async def tell_paths(
    endpoint: Endpoint,
    events: EventLog,
    reach: Reach,
    rng: random.Random,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Finds out whether others can connect to us, and tells that and how we are connected to whom, until cancelled.

    Also tells, once, if some of them take another daemon with our identity for this peer. If all do, the endpoint ends.
    """
    shared = False
    reachability = Reachability(endpoint, rng=rng, report=lambda verdict: events.emit("reachability", verdict=verdict))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reachability.run)
        nursery.start_soon(_tell_isolation, endpoint, events, reach, reachability)
        while True:  # a watcher that cannot keep up is dropped
            with endpoint.watch() as changes:
                task_status.started()
                task_status = trio.TASK_STATUS_IGNORED
                async for change in changes:
                    known = endpoint.statistics(change.peer)
                    if not isinstance(change, PeerLost) and known is not None:
                        events.emit("connected", peer=change.peer, path=change.path, rtt=round(known.rtt, 6))
                    if not shared and endpoint.copied is not None and endpoint.in_use is None:
                        shared = True
                        events.emit("identity_shared", reason=str(endpoint.copied))


async def _tell_isolation(endpoint: Endpoint, events: EventLog, reach: Reach, reachability: Reachability) -> None:
    """Tells when it turns out that this peer and another one like it could not meet."""
    told: str | None = None
    while True:
        await trio.sleep(ISOLATION_PERIOD)
        reason = isolation(reachability.verdict, reach.addresses[0], relays=bool(endpoint.relays))
        if reason is not None and reason != told:
            events.emit("isolated", reason=reason)
        told = reason


def isolation(verdict: Verdict, address: Address, *, relays: bool) -> str | None:
    """Why a peer behind another router would not find a way to us; None if it would, as far as we know.

    Args:
        verdict: Whether others can connect to us.
        address: Where we tell them to.
        relays: Whether we are connected to a peer that passes on bytes for others.
    """
    if relays or verdict == "public":
        return None
    if verdict == "private":
        return "others cannot connect to this peer, and no peer in reach relays for it"
    if is_inside(address.host):
        return f"machines on its own network reach this peer at {address}; for others, no peer in reach relays"
    return None


def outward_host() -> str | None:
    """This machine's address on the interface that leads to the internet, if there is one."""
    for family, somewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((somewhere, 9))  # sends nothing: it only picks a route
            host: str = probe.getsockname()[0]
            return host
    return None


def is_loopback(host: str) -> bool:
    """Whether nobody outside of this machine can reach a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_inside(host: str) -> bool:
    """Whether a host is an address that means something on its own network only."""
    try:
        return natpmp.is_inside(host)
    except ValueError:
        return False


def read_book(home: Home) -> list[Contact]:
    """The peers that were known when this home was last in use. A damaged book is an empty one."""
    try:
        return [(PeerId.parse(peer), Address.parse(address)) for peer, address in json.loads(home.book.read_text())]
    except (OSError, ValueError, TypeError, ShoalError):
        return []


def book_entries(known: Iterable[Contact]) -> list[list[str]]:
    """The first of these contacts, as they are written down."""
    return sorted([str(peer), str(address)] for peer, address in list(dict.fromkeys(known))[:MAX_BOOK])


def write_book(home: Home, entries: list[list[str]]) -> None:
    """Replaces the book.

    Raises:
        OSError: It cannot be written.
    """
    write_atomically(home.book, json.dumps(entries).encode())

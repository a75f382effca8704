"""The doctor's steps about what lies between this machine and others: routers, firewalls, and peers that relay."""

from __future__ import annotations

import contextlib
import ipaddress
import random
from collections.abc import Sequence

import attrs
import trio

from peer.console import MEET
from peer.doctor import Finding, Findings
from peer.reach import is_inside, is_loopback
from protocol.channel import SecureChannel
from protocol.endpoint import Endpoint
from protocol.errors import ShoalError
from protocol.identity import Identity, PeerId
from protocol.tcp import TcpTransport
from protocol.transport import Address

OBSERVERS = 4
"""Peers that are asked where they see this machine; two are enough to tell whether all see the same."""

OBSERVE_SECONDS = 5.0
"""How long they are waited for."""

_FORWARD = "to be dialled as well, forward a port in the router, and --announce it"
_CARRIERS = ipaddress.ip_network("100.64.0.0/10")


@attrs.frozen(kw_only=True)
class Surroundings:
    """What was found out about the way from this machine to others.

    Attributes:
        own: Its own address, if there is one.
        port: The local port from which the observers were dialled.
        seen: Where each of them saw that port.
        mapped: The hosts outside whose ports a router maps to this machine, as the router says.
        dialled: Whether others could dial it; None if nobody could tell.
    """

    own: str | None
    port: int
    seen: Sequence[Address]
    mapped: Sequence[str] = ()
    dialled: bool | None = None

    @property
    def shared(self) -> bool:
        """One local port is the same port outside, whatever the destination; IPv4 and IPv6 are two outsides."""
        return len(set(self.seen)) == len({":" in address.host for address in self.seen})

    @property
    def inner(self) -> str | None:
        """The outer address of the nearest router, if there is another router beyond that."""
        hosts = {address.host for address in self.seen if ":" not in address.host}
        return next((host for host in self.mapped if is_inside(host) or (hosts and host not in hosts)), None)


def explain_nat(found: Surroundings) -> Finding:
    """What is in between, in plain words, with what follows from it and what can be done."""
    seen = sorted({address.host for address in found.seen})
    if not seen:
        return Finding(
            "nat", "warn", "not known: nobody could tell where this machine is seen", "try again in a minute"
        )
    if is_loopback(seen[0]):
        return Finding("nat", "ok", "not known: the peer is on this machine")
    if seen == [found.own]:
        return _without_router(found)
    message = f"behind {_routers(found)}: this machine is {found.own}, and peers see {' and '.join(seen)}"
    if found.dialled or (found.mapped and found.inner is None):
        way = "it maps a port" if found.mapped else "a port of it leads here"
        return Finding("nat", "ok", f"{message}; {way}")
    if not found.shared:
        return Finding(
            "nat", "warn", f"{message}, each at another port: only through a relay can others reach it", MEET
        )
    advice = _FORWARD
    if found.inner is not None or _is_carriers(found.own):
        advice = "forwarding a port in your own router does not help: only the outer router's owner could"
    if found.seen[0].port == found.port:
        return Finding("nat", "warn", f"{message}, at the same port: others can reach it by punching", advice)
    if len(found.seen) > 1:
        return Finding("nat", "warn", f"{message}, all at one port: others can reach it by punching", advice)
    unknown = "at another port; only one peer was asked, so whether punching works is not known"
    return Finding("nat", "warn", f"{message}, {unknown}", advice)


def _without_router(found: Surroundings) -> Finding:
    message = f"peers see this machine at its own address, {found.own}"
    if found.dialled is False:
        message += ", but something drops what comes in: others can reach it by punching"
        return Finding("nat", "warn", message, "to be dialled as well, let the port in through the firewall")
    if found.own is not None and is_inside(found.own):
        message += ", which only its own network knows; peers elsewhere may see another"
    return Finding("nat", "ok", message)


def _routers(found: Surroundings) -> str:
    if _is_carriers(found.inner) or _is_carriers(found.own):
        return "the provider's router, which many share,"
    return "a router" if found.inner is None else f"two routers, the nearer one being {found.inner},"


def _is_carriers(host: str | None) -> bool:
    """Whether a provider gave this address to one of many that share a public one (RFC 6598)."""
    return host is not None and ":" not in host and ipaddress.ip_address(host) in _CARRIERS


async def observe(endpoint: Endpoint, addresses: Sequence[Address], host: str) -> tuple[int, list[Address]]:
    """Dials some peers from one local port.

    Args:
        endpoint: Ours.
        addresses: Where they are; the first `OBSERVERS` of them are dialled.
        host: A host to listen at, which keeps the port ours. It is another port than that of the endpoint: TCP does
            not allow the same connection again soon, and a daemon may want it.

    Returns:
        The port, and where each of those who answered saw it.

    Raises:
        AddressError: There is no port.
    """
    listener = await TcpTransport().listen(Address(host, 0))
    port = listener.address.port
    channels: list[SecureChannel] = []
    seen: list[Address] = []

    async def ask(address: Address) -> None:
        with contextlib.suppress(ShoalError):
            channel, at = await endpoint.probe(address, port)
            channels.append(channel)
            if at is not None:
                seen.append(at)

    try:
        with trio.move_on_after(OBSERVE_SECONDS):
            async with trio.open_nursery() as nursery:
                for address in addresses[:OBSERVERS]:
                    nursery.start_soon(ask, address)
    finally:
        with trio.CancelScope(shield=True):
            for channel in channels:
                await channel.aclose()
            await listener.aclose()
    return port, seen


async def relay(endpoint: Endpoint, peers: Sequence[PeerId], psk: bytes | None, *, needed: bool) -> Findings:
    """Whether a peer passes on bytes between two others: the endpoint and a second one that is made for this.

    Args:
        endpoint: Ours, connected to some of the peers.
        peers: Those in reach.
        psk: The key of a private run.
        needed: Whether others cannot dial this machine, as far as is known.
    """
    other = Endpoint(Identity.generate(), TcpTransport(), psk=psk, rng=random.Random())
    for peer in peers:
        other.learn(peer, *endpoint.addresses(peer))

    async def meet(peer: PeerId) -> None:
        with contextlib.suppress(ShoalError):
            await endpoint.connect(peer)
            await other.connect(peer)

    async with trio.open_nursery() as running:
        await running.start(other.run, None)
        async with trio.open_nursery() as meeting:
            for peer in peers:
                meeting.start_soon(meet, peer)
        willing = other.relays
        try:
            await other.connect(endpoint.peer_id)
            found = other.statistics(endpoint.peer_id)
        except ShoalError:
            found = None
        passing = [peer for peer in willing if found is not None and other.host(peer) == found.remote.host]
        running.cancel_scope.cancel()
    if found is not None:
        way = f"from here to here again takes {found.rtt * 1000:.1f} ms"
        return [Finding("relay", "ok", f"peer {' or '.join(peer.short for peer in passing)} relays: {way} through it")]
    peers_in_reach = "the peer" if len(peers) == 1 else f"none of the {len(peers)} peers"
    if willing:
        refused = f"{', '.join(peer.short for peer in willing)} offered to relay, and did not: too busy, maybe"
        return [Finding("relay", "warn" if needed else "ok", refused, f"try again in a minute, or: {MEET}")]
    does = "does not relay" if len(peers) == 1 else "relays"
    message = f"{peers_in_reach} in reach {does}: two machines that nobody can dial will not meet"
    return [Finding("relay", "warn" if needed else "ok", message, MEET)]

"""The doctor's steps about the network: from the port that others connect to, to the way to the run and its speed."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import random
import socket
from functools import partial

import attrs
import trio

from dht import DHT
from peer import doctor_nat
from peer.console import MEET, size
from peer.doctor import Examination, Finding, Findings, Later, Patient, Verdict
from peer.finding import find_manifest
from peer.home import Home
from peer.probe import measure
from peer.reach import UNSPECIFIED, is_loopback, outward_host
from protocol import natpmp
from protocol.channel import VERSION, handshake
from protocol.endpoint import Endpoint
from protocol.errors import (
    AddressError,
    HandshakeError,
    MappingFailed,
    PeerUnreachable,
    RequestRefused,
    ShoalError,
    WrongPeer,
    WrongVersion,
)
from protocol.identity import Identity, PeerId
from protocol.portmap import Router, default_gateway, routers
from protocol.reachability import Reachability
from protocol.tcp import TcpTransport
from protocol.transport import Address, ByteStream

DIAL_LIMIT = 5.0
MAP_LIMIT = 9.0
MAPPED_FOR = 60
"""Seconds; the mapping is removed at once, unless we are killed."""

SLOW = 100_000
"""Bytes per second under which rounds of even small models take minutes."""

CLOCKS_AGREE = 120.0
"""Seconds by which clocks may differ without anybody noticing."""

_OFFLINE = "check the network connection"
_FIREWALL = "a firewall on this machine may drop connections to itself"


@attrs.define
class Network:
    """All steps about the network, and what they have found out for each other.

    Args:
        patient: What is examined.
        identity: The doctor's own.
        endpoint: Under that identity, not running yet.
        examination: Who runs the steps.
    """

    patient: Patient
    identity: Identity
    endpoint: Endpoint
    examination: Examination
    _bound: Address | None = attrs.field(default=None, init=False)
    _reached: list[PeerId] = attrs.field(factory=list, init=False)
    _observers: list[Address] = attrs.field(factory=list, init=False)
    _mapped: list[str] = attrs.field(factory=list, init=False)
    _port: int = attrs.field(default=0, init=False)
    _seen: list[Address] = attrs.field(factory=list, init=False)
    _dialled: bool | None = attrs.field(default=None, init=False)

    async def examine(self, nursery: trio.Nursery) -> None:
        """Takes all steps. The endpoint runs in the nursery, also after this."""
        step, contacts = self.examination.step, self.patient.contacts
        await step("port", 3.0, partial(self._listen, nursery), "use another --listen", late="fail")
        mapping = Later(self._map) if self._can_map() else None
        if mapping is not None:
            nursery.start_soon(mapping.run)  # a router that does not answer takes long, and nobody else has to wait
        if self._bound is not None:
            await step("loopback", 4.0, self._loopback, _FIREWALL, late="fail")
        if contacts:
            await step("dns", 4.0, self._names, "check the network's name server")
            await step("dial", 2 * DIAL_LIMIT, self._dial, _OFFLINE, late="fail")
        if self._reached:
            if self.patient.run is not None:
                await step("run", 8.0, partial(self._run, nursery), "ask for a fresh ticket", late="fail")
            await step("speed", 8.0, self._speed, "the way to that peer is very slow; ask for another ticket")
        await self._surroundings(nursery, mapping)

    async def _surroundings(self, nursery: trio.Nursery, mapping: Later | None) -> None:
        """The steps about what is in between. They wait for others, and so do all at once."""
        step, observing, relaying = self.examination.step, Later(self._observe), Later(self._relay)
        if self._reached:
            await step("connect", 4.0, self._connect, _OFFLINE)
            nursery.start_soon(observing.run)
            if self._bound is not None:
                await step("dial-back", 8.0, self._dial_back, "a firewall may drop what comes from outside")
            nursery.start_soon(relaying.run)
        if mapping is not None:
            await step("mapping", MAP_LIMIT, mapping.result, "forward a port in the router, and --announce it")
        if self._reached:
            await step("nat", doctor_nat.OBSERVE_SECONDS + 0.5, partial(self._nat, observing), _OFFLINE)
            await step("relay", 6.0, relaying.result, MEET)

    async def _listen(self, nursery: trio.Nursery) -> Findings:
        try:
            self._bound = await nursery.start(self.endpoint.run, self.patient.listen)
        except AddressError as error:
            await nursery.start(self.endpoint.run, None)
            advice = error.hint or "use another --listen"
            if "in use" in str(error):
                advice = "end the program that has it, maybe a daemon of yours, or use another --listen"
            return [Finding("port", "fail", str(error), advice)]
        return [Finding("port", "ok", f"others can be let in on {self._bound}")]

    async def _loopback(self) -> Findings:
        """A handshake with ourselves."""
        assert self._bound is not None
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._bound.host, self._bound.host)
        begun = trio.current_time()
        try:
            stream = await self._connect_to(Address(host, self._bound.port))
            await self._shake_hands(stream, self.endpoint.peer_id)
        except ShoalError as error:
            return [Finding("loopback", "fail", f"this machine cannot connect to itself: {error}", _FIREWALL)]
        return [Finding("loopback", "ok", f"connected to itself in {_ms(trio.current_time() - begun)}")]

    async def _names(self) -> Findings:
        """Each name among the addresses."""
        found: dict[str, Finding] = {}
        hosts = list(dict.fromkeys(address.host for _, address in self.patient.contacts if _is_name(address.host)))
        only = len({address.host for _, address in self.patient.contacts}) == len(hosts)

        async def look_up(host: str) -> None:
            try:
                infos = await trio.socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            except OSError as error:
                advice = "check the network's name server, and whether the name is right"
                message = f"{host} cannot be looked up: {error.strerror or error}"
                found[host] = Finding("dns", "fail" if only and len(hosts) == 1 else "warn", message, advice)
            else:
                addresses = ", ".join(dict.fromkeys(str(info[4][0]) for info in infos))
                found[host] = Finding("dns", "ok", f"{host} is {addresses}")

        async with trio.open_nursery() as nursery:
            for host in hosts:
                nursery.start_soon(look_up, host)
        return [found[host] for host in hosts]

    async def _dial(self) -> Findings:
        """Each address. That some do not answer is no failure as long as another one does."""
        found: dict[int, list[Finding]] = {}

        async def try_one(index: int, peer: PeerId, address: Address) -> None:
            findings = found[index] = []
            name = f"{address} ({peer.short})"
            try:
                begun = trio.current_time()
                stream = await self._connect_to(address)
                findings.append(Finding("dial", "ok", f"{name}: connected in {_ms(trio.current_time() - begun)}"))
                begun = trio.current_time()
                await self._shake_hands(stream, peer)
            except ShoalError as error:
                reason, advice = explain(error)
                step = "version" if isinstance(error, WrongVersion) else "handshake" if findings else "dial"
                findings.append(Finding(step, "fail", f"{name}: {reason}", advice))
                return
            took = _ms(trio.current_time() - begun)
            findings.append(Finding("handshake", "ok", f"{name}: has proved who it is, in {took}"))
            self.endpoint.learn(peer, address)
            self._observers.append(address)
            if peer not in self._reached:
                self._reached.append(peer)

        async with trio.open_nursery() as nursery:
            for index, (peer, address) in enumerate(self.patient.contacts):
                nursery.start_soon(try_one, index, peer, address)
        order = ("dial", "handshake", "version")
        findings = sorted((f for index in sorted(found) for f in found[index]), key=lambda f: order.index(f.step))
        if not self._reached:
            return findings
        spoken = Finding("version", "ok", f"all who are reached speak version {VERSION} of the protocol, as we do")
        return [attrs.evolve(f, verdict="warn") if f.verdict == "fail" else f for f in findings] + [spoken]

    async def _connect_to(self, address: Address) -> ByteStream:
        with trio.move_on_after(DIAL_LIMIT):
            return await TcpTransport().dial(address)
        raise PeerUnreachable(f"no answer within {DIAL_LIMIT:g} s")

    async def _shake_hands(self, stream: ByteStream, peer: PeerId) -> None:
        """Finds out who is there, as somebody who never comes in."""
        with trio.move_on_after(DIAL_LIMIT - 0.5):
            channel = await handshake(
                stream, Identity.generate(), initiator=True, psk=self.patient.swarm_key, expected=peer
            )
            await channel.aclose()
            return
        raise HandshakeError("it took the connection, and then said nothing")

    async def _run(self, nursery: trio.Nursery) -> Findings:
        """Whether the run of the ticket is to be found, as a newcomer would."""
        assert self.patient.run is not None
        dht = DHT(self.endpoint, self.identity, rng=random.Random())
        await nursery.start(dht.run)
        try:
            await dht.bootstrap([(peer, a) for peer in self._reached for a in self.endpoint.addresses(peer)])
            manifest, source = await find_manifest(self.endpoint, dht, self.patient.run)
        except ShoalError as error:
            advice = error.hint or "is the run over? ask for a fresh ticket"
            return [Finding("run", "fail", f"the run was not found: {error}", advice)]
        if source in self._reached:  # it is the best one to measure the way to
            self._reached.remove(source)
        self._reached.insert(0, source)
        settings = manifest.settings
        refused = self._not_listed(settings.membership.policy, settings.membership.allow, manifest.founder_id)
        if refused is not None:
            return [refused]
        return [Finding("run", "ok", f"{settings.run.name!r} is known to peer {source.short}")]

    def _not_listed(self, policy: str, allow: tuple[str, ...], founder: PeerId) -> Finding | None:
        key = Home(self.patient.home, create=False).path / "identity.key"
        if policy != "allow" or not key.exists():
            return None
        own = Identity.load(key).peer_id
        if own == founder or str(own) in allow:
            return None
        return Finding("run", "fail", f"the run admits only listed peers, and not {own}", "ask its founder to list it")

    async def _speed(self) -> Findings:
        """The way to the first peer that takes part in measuring it."""
        problem = ""
        for peer in self._reached[:3]:
            try:
                found = await measure(self.endpoint, peer, limit=6.0)
            except ShoalError as error:
                problem = f"{peer.short}: {error}"
                if isinstance(error, RequestRefused):
                    continue
                break
            slow = min(found.upload or 0.0, found.download or 0.0) < SLOW
            verdict: Verdict = "warn" if slow else "ok"
            way = f"{_rate(found.upload)} up, {_rate(found.download)} down, to peer {peer.short}"
            advice = "rounds will take long; is something else using the line?"
            findings = [
                Finding("rtt", "ok", f"{_ms(found.rtt)} to peer {peer.short} and back{self._others(peer)}"),
                Finding("speed", verdict, way, advice if slow else None),
            ]
            if abs(found.clock) > CLOCKS_AGREE:
                message = f"peer {peer.short}'s clock is {abs(found.clock):.0f} s "
                message += "ahead of ours" if found.clock > 0 else "behind ours"
                advice = "if ours is wrong, set it: tickets with an end may be refused. Training does not mind"
                findings.append(Finding("clock", "warn", message, advice))
            else:
                findings.append(Finding("clock", "ok", f"agrees with peer {peer.short}'s"))
            return findings
        return [Finding("speed", "warn", f"not measured: {problem}", "try again in a minute")]

    def _others(self, measured: PeerId) -> str:
        """The round trips to the rest of the swarm, as far as it is connected."""
        known = [self.endpoint.statistics(peer) for peer in self.endpoint.connected if peer != measured]
        trips = sorted(each.rtt for each in known if each is not None)
        if len(trips) < 2:
            return f"; {_ms(trips[0])} to another" if trips else ""
        return f"; {_ms(trips[0])} to {_ms(trips[-1])} to {len(trips)} others"

    async def _connect(self) -> Findings:
        """Connects to all who were reached, to be able to ask them. That one cannot be reached any more is no news."""

        async def connect(peer: PeerId) -> None:
            with contextlib.suppress(ShoalError):
                await self.endpoint.connect(peer)

        async with trio.open_nursery() as nursery:
            for peer in self._reached:
                nursery.start_soon(connect, peer)
        return []

    async def _dial_back(self) -> Findings:
        """Whether those who were reached can connect to us."""
        match await Reachability(self.endpoint, rng=random.Random()).check():
            case "public":
                self._dialled = True
                return [Finding("dial-back", "ok", "others can dial this machine")]
            case "private":
                self._dialled = False
                advice = "others reach it through a relay, or by punching; forward a port in the router to be dialled"
                return [Finding("dial-back", "warn", "others cannot dial this machine", advice)]
        return [Finding("dial-back", "ok", "whether others can dial this machine is not known: nobody could tell")]

    def _can_map(self) -> bool:
        return self.patient.map_port and self._bound is not None and not is_loopback(self._bound.host)

    async def _map(self) -> Findings:
        """All ways to have a port mapped, at once."""
        assert self._bound is not None
        gateway = await default_gateway()
        answers: list[str] = []
        refusals: list[str] = []

        async def ask(router: Router, port: int) -> None:
            try:
                grant = await router.map(port, Address("0.0.0.0", port), MAPPED_FOR)
                grant.check()
                inside = ", behind another router" if natpmp.is_inside(grant.external.host) else ""
                self._mapped.append(grant.external.host)
                answers.append(f"{grant.external} ({router.method}{inside})")
                await router.unmap(port)
            except MappingFailed as error:
                refusals.append(f"{router.method}: {str(error).removeprefix('UPnP: ')}")

        async with trio.open_nursery() as nursery:
            for router in routers(None if gateway is None else Address(gateway, natpmp.PORT)):
                nursery.start_soon(ask, router, self._bound.port)
        if answers:
            return [Finding("mapping", "ok", f"the router maps {', '.join(sorted(answers))}; removed again")]
        reason = "there is no router" if gateway is None else "; ".join(sorted(refusals))
        advice = "others may not be able to dial this machine: forward a port in the router, and --announce it"
        return [Finding("mapping", "warn", f"no port was mapped: {reason}", advice)]

    async def _observe(self) -> Findings:
        """Where several peers see one port of ours, for the step "nat"."""
        more = [a for peer in self.endpoint.connected for a in self.endpoint.addresses(peer)[:1]]
        places = {(address.host, address.port): address for address in [*self._observers, *more]}
        with contextlib.suppress(AddressError):  # the step "port" has told why
            self._port, self._seen = await doctor_nat.observe(
                self.endpoint, list(places.values()), self.patient.listen.host
            )
        return []

    async def _nat(self, observing: Later) -> Findings:
        """What is between this machine and others. All that this depends on has been found out, or given up."""
        await observing.result()
        own = outward_host() if self._bound is None or self._bound.host in UNSPECIFIED else self._bound.host
        seen = self._seen
        if not seen and self.endpoint.host_seen is not None:
            seen = [Address(self.endpoint.host_seen, 0)]
        found = doctor_nat.Surroundings(own=own, port=self._port, seen=seen, mapped=self._mapped, dialled=self._dialled)
        return [doctor_nat.explain_nat(found)]

    async def _relay(self) -> Findings:
        """Whether somebody in reach relays."""
        return await doctor_nat.relay(
            self.endpoint, self._reached[:3], self.patient.swarm_key, needed=self._dialled is not True
        )


def explain(error: ShoalError) -> tuple[str, str]:
    """Why a dial or a handshake failed, in short, and what to do."""
    if isinstance(error, WrongPeer):
        return f"another peer is there: {error}", "that peer has moved, or made a new identity: ask for a fresh ticket"
    if isinstance(error, WrongVersion):
        return str(error), error.hint or "update the older of the two"
    if isinstance(error, HandshakeError):
        return f"refused: {error}", error.hint or "is it a peer of Shoal, and of this version?"
    match _errno(error):
        case errno.ECONNREFUSED:
            return "refused: nobody listens there", "is that peer running, and is the port right?"
        case errno.ENETUNREACH | errno.EHOSTUNREACH | errno.EADDRNOTAVAIL:
            return "unreachable: no route leads there", _OFFLINE
        case errno.ETIMEDOUT:
            return "timeout: nobody answers", "that machine is off, or a firewall drops connections to it"
    if "no answer" in str(error) or "did not answer" in str(error):
        return f"timeout: {error}", "that machine is off, or a firewall drops connections to it"
    return str(error), error.hint or _OFFLINE


def _errno(error: BaseException | None) -> int | None:
    """The number of the system's first error among the causes."""
    while error is not None:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif isinstance(error, OSError) and error.errno is not None:
            return error.errno
        else:
            error = error.__cause__
    return None


def _is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def _rate(bytes_a_second: float | None) -> str:
    return "nothing" if bytes_a_second is None else f"{size(bytes_a_second)}/s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"

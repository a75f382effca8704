"""Keeping a port of the home's gateway mapped to ours, so that others can connect from outside.

Gateways differ in what they speak, so three methods are tried in turn: PCP, NAT-PMP, and UPnP. A mapping has a
lifetime and is renewed at half of it; each renewal also shows whether the external address has changed, or the gateway
has restarted and lost what it knew. Short lifetimes are asked for: a mapping that a crash leaves behind soon ends, and
changes are noticed within minutes.

What a gateway says is a hint. It may have another NAT above it, and anybody in the home can answer in its place. That a
mapping works is known when somebody outside has connected.
"""

from __future__ import annotations

import contextlib
import math
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Final, Literal, Protocol, TypeVar

import attrs
import trio

from protocol import natpmp
from protocol.errors import MappingFailed, ProtocolError
from protocol.natpmp import Epoch, Grant
from protocol.transport import Address
from protocol.upnp import Upnp

Method = Literal["pcp", "nat-pmp", "upnp"]
METHODS: tuple[Method, ...] = ("pcp", "nat-pmp", "upnp")

LIFETIME = 600
"""Seconds that are asked for. Gateways may grant more or less; more does not delay the renewal."""

_SHORTEST_RENEWAL = 1.0  # seconds, whatever lifetime is granted
_TRIES = 4  # 3.75 s for a gateway that is silent
_TRY_LIMIT = 20.0  # seconds for one method; UPnP has no limit of its own for slow HTTP servers
_RETRY, _SLOWEST_RETRY = 30.0, 900.0  # seconds; nobody who switches port mapping on should have to restart
_REMOVAL_LIMIT = 1.0
_DATAGRAM = 2048

_T = TypeVar("_T")


@attrs.frozen
class Mapping:
    """A port of the gateway that leads to ours."""

    external: Address
    """Where others connect to."""
    method: Method
    lifetime: float = attrs.field(eq=False)
    """Seconds, as granted last."""
    restarts: int = 0
    """How often the gateway was seen to have restarted. Connections through it did not survive that."""

    @property
    def behind_nat(self) -> bool:
        """Whether there is another NAT above the gateway: the mapping does not lead in from the internet."""
        return natpmp.is_inside(self.external.host)


class Router(Protocol):
    """A gateway, and one way to talk to it."""

    @property
    def method(self) -> Method: ...

    async def map(self, port: int, wanted: Address, lifetime: int) -> Grant:
        """Map a port, or renew the mapping.

        Args:
            port: Where this machine listens on TCP.
            wanted: What is wished for; the gateway may choose another. Host 0.0.0.0 is no wish.
            lifetime: In seconds.

        Raises:
            MappingFailed: the gateway refuses or does not answer.
        """
        ...

    async def unmap(self, port: int) -> None:
        """Remove the mapping. Does nothing if there is none.

        Raises:
            MappingFailed: the gateway refuses or does not answer.
        """


class Pcp:
    """Port Control Protocol, RFC 6887. Implements `Router`."""

    method: Final = "pcp"

    def __init__(self, gateway: Address) -> None:
        self._gateway = gateway
        self._nonce = secrets.token_bytes(natpmp.NONCE_SIZE)

    async def map(self, port: int, wanted: Address, lifetime: int) -> Grant:
        return await self._request(port, wanted, lifetime)

    async def unmap(self, port: int) -> None:
        await self._request(port, None, 0)

    async def _request(self, port: int, wanted: Address | None, lifetime: int) -> Grant:
        return await _exchange(
            self._gateway,
            lambda client: natpmp.pcp_map_request(client, self._nonce, port, wanted, lifetime),
            lambda data: natpmp.read_pcp_map(data, self._nonce, port),
        )


class NatPmp:
    """NAT Port Mapping Protocol, RFC 6886. Implements `Router`."""

    method: Final = "nat-pmp"

    def __init__(self, gateway: Address) -> None:
        self._gateway = gateway

    async def map(self, port: int, wanted: Address, lifetime: int) -> Grant:
        host, _ = await _exchange(self._gateway, lambda _: natpmp.natpmp_address_request(), natpmp.read_natpmp_address)
        return await self._request(port, wanted.port, lifetime, host)

    async def unmap(self, port: int) -> None:
        await self._request(port, 0, 0, "0.0.0.0")

    async def _request(self, port: int, external_port: int, lifetime: int, host: str) -> Grant:
        return await _exchange(
            self._gateway,
            lambda _: natpmp.natpmp_map_request(port, external_port, lifetime),
            lambda data: natpmp.read_natpmp_map(data, port, host),
        )


def routers(gateway: Address | None, methods: Sequence[Method] = METHODS) -> list[Router]:
    """The ways to talk to a gateway. UPnP searches for it; the others need its address."""
    made: list[Router] = []
    for method in methods:
        if method == "upnp":
            made.append(Upnp())
        elif gateway is not None:
            made.append(Pcp(gateway) if method == "pcp" else NatPmp(gateway))
    return made


async def keep_mapped(
    port: int,
    *,
    on_change: Callable[[Mapping | None], None],
    gateway: Address | None = None,
    methods: Sequence[Method] = METHODS,
) -> None:
    """Keep a TCP port mapped until cancelled; then remove the mapping, which takes a second at most.

    Failures are no errors: many homes have no gateway that does this. It is tried again, ever more rarely.

    Args:
        port: Where this machine listens; 1 to 65535.
        on_change: Called with the outcome of the first attempt, which may take 15 s, and then whenever it changes: the
            mapping, or None if there is none (any more).
        gateway: Whom to ask by PCP and NAT-PMP; by default the default route's gateway, looked up before each renewal.
        methods: What to try, in this order.
    """
    if not 1 <= port <= 65535:
        raise ValueError(f"not a port that can be mapped: {port}")
    keeper = _Keeper(port, on_change, gateway, methods)
    try:
        await keeper.run()
    finally:
        with trio.move_on_after(_REMOVAL_LIMIT, shield=True):
            await keeper.remove()


class _Keeper:
    def __init__(
        self,
        port: int,
        on_change: Callable[[Mapping | None], None],
        gateway: Address | None,
        methods: Sequence[Method],
    ) -> None:
        self._port = port
        self._on_change = on_change
        self._fixed_gateway = gateway
        self._methods = methods
        self._gateway = gateway
        self._routers = routers(gateway, methods)
        self._router: Router | None = None  # who made the mapping
        self._trying: Router | None = None  # who may just be making one
        self._epochs: dict[Method, Epoch] = {}
        self._mapping: Mapping | None = None
        self._expires = -math.inf
        self._restarts = 0
        self._has_reported = False

    async def run(self) -> None:
        failures = 0
        while True:
            await self._follow_gateway()
            if lifetime := await self._map():
                failures = 0
                wait = max(_SHORTEST_RENEWAL, min(lifetime, LIFETIME) / 2)
            else:
                wait = min(_RETRY * 2**failures, _SLOWEST_RETRY)
                failures = min(failures + 1, 10)
                left = self._expires - trio.current_time()
                if left <= 0:
                    self._report(None)
                else:
                    wait = min(wait, left)
            await trio.sleep(wait)

    async def remove(self) -> None:
        """Remove what was mapped, and what may just have been."""
        async with trio.open_nursery() as nursery:
            for router in {self._router, self._trying}:
                if router is not None:
                    nursery.start_soon(self._unmap, router)

    async def _unmap(self, router: Router) -> None:
        with contextlib.suppress(MappingFailed):  # then it ends with its lifetime
            await router.unmap(self._port)

    async def _follow_gateway(self) -> None:
        """Begin anew if this machine has moved to another network."""
        if self._fixed_gateway is not None:
            return
        host = await default_gateway()
        gateway = None if host is None else Address(host, natpmp.PORT)
        if gateway != self._gateway:
            self._gateway = gateway
            self._routers = routers(gateway, self._methods)
            self._router = None
            self._epochs.clear()
            self._expires = -math.inf

    async def _map(self) -> float | None:
        """Renew the mapping, or make one by the first method that can; its lifetime, or None if none can."""
        known = [] if self._router is None else [self._router]
        for router in known + [router for router in self._routers if router is not self._router]:
            wanted = self._mapping.external if self._mapping else Address("0.0.0.0", self._port)
            self._trying = router
            try:
                with trio.fail_after(_TRY_LIMIT):
                    grant = await router.map(self._port, wanted, LIFETIME)
                grant.check()
            except (MappingFailed, trio.TooSlowError):
                self._trying = None
            else:
                self._router, self._trying = router, None
                self._take(grant, router.method)
                return grant.lifetime
        return None

    def _take(self, grant: Grant, method: Method) -> None:
        now = trio.current_time()
        if grant.epoch is not None:
            epoch = Epoch(grant.epoch, now)
            if method in self._epochs and self._epochs[method].restarted(epoch):
                self._restarts += 1
            self._epochs[method] = epoch
        self._expires = now + grant.lifetime
        self._report(Mapping(grant.external, method, grant.lifetime, self._restarts))

    def _report(self, mapping: Mapping | None) -> None:
        changed = mapping != self._mapping or not self._has_reported
        self._mapping, self._has_reported = mapping, True
        if changed:
            self._on_change(mapping)


async def default_gateway() -> str | None:
    """The IPv4 address of the default route's gateway, as far as the system says."""
    try:
        return parse_proc_route(await trio.Path("/proc/net/route").read_text())
    except OSError:
        pass  # not Linux
    try:
        command = ["route", "-n", "get", "default"]
        result = await trio.run_process(command, capture_stdout=True, stderr=subprocess.DEVNULL, check=False)
    except OSError:
        return None
    return parse_route_get(result.stdout.decode(errors="replace"))


def parse_proc_route(text: str) -> str | None:
    """The gateway of the default route with the lowest metric in Linux's /proc/net/route."""
    best: tuple[int, str] | None = None
    for line in text.splitlines()[1:]:
        fields = line.split()
        # Interface, destination, gateway, flags, references, uses, metric, mask; addresses in the machine's byte order.
        if len(fields) < 8 or int(fields[1], 16) or int(fields[7], 16) or not int(fields[2], 16):
            continue
        host = socket.inet_ntoa(int(fields[2], 16).to_bytes(4, sys.byteorder))
        if best is None or int(fields[6]) < best[0]:
            best = int(fields[6]), host
    return best[1] if best else None


def parse_route_get(text: str) -> str | None:
    """The gateway in what `route -n get default` says on macOS and BSD."""
    found = re.search(r"^\s*gateway: ([0-9.]+)\s*$", text, re.MULTILINE)
    return found[1] if found else None


async def _exchange(gateway: Address, request: Callable[[str], bytes], read: Callable[[bytes], _T]) -> _T:
    """Send a request until there is an answer.

    Args:
        gateway: Whom to ask.
        request: Makes the request, given our own address on the way there.
        read: Reads an answer; `ProtocolError` if it is none.

    Raises:
        MappingFailed: there is no answer, or it says no.
    """
    try:
        with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            await sock.connect((gateway.host, gateway.port))  # so that only the gateway's datagrams come in
            data = request(sock.getsockname()[0])
            for wait in natpmp.retransmissions(_TRIES):
                await sock.send(data)
                with trio.move_on_after(wait):
                    while True:
                        with contextlib.suppress(ProtocolError):
                            return read(await sock.recv(_DATAGRAM))
    except OSError as error:
        raise MappingFailed(f"cannot ask the gateway {gateway.host}: {error.strerror or error}") from error
    raise MappingFailed(f"the gateway {gateway.host} did not answer")

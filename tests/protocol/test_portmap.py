import contextlib
import math
import socket
import struct
import sys
from functools import partial
from types import SimpleNamespace

import attrs
import pytest
import trio

from protocol import portmap
from protocol.errors import MappingFailed
from protocol.portmap import Mapping, keep_mapped
from protocol.transport import Address
from protocol.upnp import Upnp

PORT = 7070
LIMIT = 20.0  # seconds after which something hangs


@attrs.define
class Gateway:
    """Speaks NAT-PMP and PCP on loopback, as told."""

    sock: trio.socket.SocketType
    speaks_pcp: bool = True
    silent: bool = False
    result: int = 0
    host: str = "203.0.113.7"
    port: int = 8080
    lifetime: int = 600
    epoch: int = 3600
    stray: bytes = b""
    requests: list[bytes] = attrs.field(factory=list)
    arrived: trio.Event = attrs.field(factory=trio.Event)

    @property
    def address(self):
        return Address(*self.sock.getsockname())

    async def run(self):
        while True:
            request, client = await self.sock.recvfrom(2048)
            self.requests.append(request)
            self.arrived.set()
            self.arrived = trio.Event()
            if self.stray:
                await self.sock.sendto(self.stray, client)
            if not self.silent:
                await self.sock.sendto(self.answer(request), client)

    def answer(self, request):
        result = struct.pack(">HI", self.result, self.epoch)
        if request[0] == 2 and not self.speaks_pcp:
            return b"\x00\x80" + struct.pack(">HI", 1, self.epoch)
        if request[0] == 2:
            (wanted,) = struct.unpack(">I", request[4:8])
            host = b"\0" * 10 + b"\xff\xff" + socket.inet_aton(self.host)
            lifetime = self.lifetime if wanted else 0
            header = struct.pack(">BBBBII12x", 2, 0x81, 0, self.result, lifetime, self.epoch)
            return header + request[24:42] + struct.pack(">H", self.port) + host
        if request == b"\0\0":
            return b"\x00\x80" + result + socket.inet_aton(self.host)
        (wanted,) = struct.unpack(">I", request[8:12])
        granted = struct.pack(">HI", self.port, self.lifetime) if wanted else bytes(6)
        return b"\x00\x82" + result + request[4:6] + granted

    def mapped(self):
        """Whether the last request about a mapping did not remove it."""
        lifetimes = [request[4:8] if request[0] == 2 else request[8:12] for request in self.requests if request[1]]
        return lifetimes[-1] != bytes(4)


@pytest.fixture
async def gateway(nursery):
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        await sock.bind(("127.0.0.1", 0))
        gateway = Gateway(sock)
        nursery.start_soon(gateway.run)
        yield gateway
        nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def keeping(gateway, **options):
    """Keeps a port mapped; gives a channel of what is reported."""
    send, receive = trio.open_memory_channel(math.inf)
    run = partial(keep_mapped, PORT, on_change=send.send_nowait, gateway=gateway.address, **options)
    with trio.fail_after(LIMIT), receive:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            yield receive
            nursery.cancel_scope.cancel()


async def test_pcp_maps_and_unmaps(gateway):
    async with keeping(gateway) as reports:
        mapping = await reports.receive()
    assert mapping == Mapping(Address("203.0.113.7", 8080), "pcp", 600)
    assert mapping.lifetime == 600
    assert not mapping.behind_nat
    request, removal = gateway.requests
    assert not gateway.mapped()
    assert removal[24:36] == request[24:36]  # without the nonce it would not be ours to remove
    assert request[40:44] == struct.pack(">HH", PORT, PORT)


async def test_natpmp_where_pcp_is_unknown(gateway):
    gateway.speaks_pcp = False
    async with keeping(gateway) as reports:
        assert await reports.receive() == Mapping(Address("203.0.113.7", 8080), "nat-pmp", 600)
        assert gateway.mapped()
    assert not gateway.mapped()
    assert [request[0] for request in gateway.requests] == [2, 0, 0, 0]


@pytest.mark.parametrize("speaks_pcp", [True, False])
async def test_short_lifetimes_are_renewed_without_a_word(gateway, speaks_pcp):
    gateway.speaks_pcp, gateway.lifetime = speaks_pcp, 2
    async with keeping(gateway) as reports:
        await reports.receive()
        first = len(gateway.requests)
        await gateway.arrived.wait()
        while len(gateway.requests) < first + (1 if speaks_pcp else 2):
            await gateway.arrived.wait()
        with pytest.raises(trio.WouldBlock):
            reports.receive_nowait()
        renewal = gateway.requests[-1]
    wished = renewal[42:44] if speaks_pcp else renewal[6:8]
    assert wished == struct.pack(">H", 8080)  # the port that it has


async def test_restart_of_the_gateway_is_noticed(gateway):
    gateway.lifetime = 2
    async with keeping(gateway) as reports:
        before = await reports.receive()
        gateway.epoch = 1
        after = await reports.receive()
    assert (before.restarts, after.restarts) == (0, 1)
    assert after.external == before.external


async def test_other_external_address_is_noticed(gateway):
    gateway.lifetime = 2
    async with keeping(gateway) as reports:
        await reports.receive()
        gateway.host = "198.51.100.9"
        assert (await reports.receive()).external == Address("198.51.100.9", 8080)


async def test_vanished_gateway_ends_the_mapping(gateway):
    gateway.lifetime = 2
    async with keeping(gateway) as reports:
        assert await reports.receive() is not None
        gateway.result = 3
        assert await reports.receive() is None


async def test_silent_gateway_is_no_mapping(gateway):
    gateway.silent = True
    async with keeping(gateway, methods=["nat-pmp"]) as reports:
        assert await reports.receive() is None
    assert len(gateway.requests) > 1  # datagrams get lost


async def test_exit_does_not_wait_for_a_silent_gateway(gateway):
    async with keeping(gateway) as reports:
        await reports.receive()
        gateway.silent = True
    assert not gateway.mapped()


async def test_exit_removes_what_was_just_asked_for(gateway):
    gateway.silent = True
    async with keeping(gateway):
        await gateway.arrived.wait()
    assert not gateway.mapped()


@pytest.mark.parametrize("trouble", [{"result": 2}, {"port": 0}, {"lifetime": 0}, {"host": "0.0.0.0"}])
@pytest.mark.parametrize("method", ["pcp", "nat-pmp"])
async def test_what_is_no_mapping_is_not_reported(gateway, method, trouble):
    for name, value in trouble.items():
        setattr(gateway, name, value)
    async with keeping(gateway, methods=[method]) as reports:
        assert await reports.receive() is None


async def test_another_nat_is_reported(gateway):
    gateway.host = "100.64.3.4"
    async with keeping(gateway) as reports:
        assert (await reports.receive()).behind_nat


async def test_stray_datagrams_are_ignored(gateway):
    gateway.stray = b"\x02\x81stray"
    async with keeping(gateway) as reports:
        assert await reports.receive() is not None


async def test_nobody_there_is_no_mapping():
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        await sock.bind(("127.0.0.1", 0))
        nobody = SimpleNamespace(address=Address(*sock.getsockname()))
    async with keeping(nobody, methods=["pcp", "nat-pmp"]) as reports:
        assert await reports.receive() is None


async def test_port_must_be_one():
    with pytest.raises(ValueError, match="not a port"):
        await keep_mapped(0, on_change=lambda _: None)


class Device:
    """What miniupnpc offers of a gateway."""

    lanaddr = "192.168.1.5"

    def __init__(self, taken=(), refuses=None, permanent=False, host="203.0.113.7", there=True):
        self.entries = dict.fromkeys(taken, ("192.168.1.6", PORT))
        self.refuses, self.permanent, self.host, self.there = refuses, permanent, host, there
        self.leases = []

    def discover(self):
        if not self.there:
            raise Exception("Success")  # noqa: TRY002 - as the library does
        return 1

    def selectigd(self):
        return "http://192.168.1.1:5000/"

    def externalipaddress(self):
        return self.host

    def getspecificportmapping(self, port, protocol):
        entry = self.entries.get(port)
        return entry and (*entry, "description", True, 0)

    def addportmapping(self, external, protocol, host, port, description, remote, lease):
        self.leases.append(lease)
        if external == self.refuses:
            raise Exception("ConflictInMappingEntry")  # noqa: TRY002 - as the library does
        if self.permanent and lease:
            raise Exception("OnlyPermanentLeasesSupported")  # noqa: TRY002 - as the library does
        self.entries[external] = (host, port)
        return True

    def deleteportmapping(self, external, protocol):
        del self.entries[external]
        return True


@pytest.fixture
def upnp(monkeypatch):
    """A function that puts a gateway where the library finds it."""

    def install(device):
        monkeypatch.setitem(sys.modules, "miniupnpc", SimpleNamespace(UPnP=lambda: device))
        return device

    return install


async def upnp_map(router, wanted=PORT):
    return await router.map(PORT, Address("0.0.0.0", wanted), 600)


async def test_upnp_maps_and_unmaps(upnp, gateway):
    device = upnp(Device())
    gateway.result = 2
    async with keeping(gateway) as reports:
        assert await reports.receive() == Mapping(Address("203.0.113.7", PORT), "upnp", 600)
        assert device.entries == {PORT: ("192.168.1.5", PORT)}
    assert not device.entries


async def test_upnp_leaves_the_ports_of_others(upnp):
    device = upnp(Device(taken=[PORT], refuses=PORT + 1))
    grant = await upnp_map(Upnp())
    assert grant.external.port == PORT + 2
    assert device.entries[PORT] == ("192.168.1.6", PORT)


async def test_upnp_gives_up_when_all_ports_are_taken(upnp):
    upnp(Device(taken=range(PORT, PORT + 100)))
    with pytest.raises(MappingFailed, match="taken"):
        await upnp_map(Upnp())


async def test_upnp_renews_its_own_mapping(upnp):
    device = upnp(Device())
    router = Upnp()
    assert await upnp_map(router) == await upnp_map(router)
    assert len(device.entries) == 1


async def test_upnp_takes_permanent_leases_where_there_are_no_others(upnp):
    device = upnp(Device(permanent=True))
    assert (await upnp_map(Upnp())).lifetime == 600
    assert device.leases == [600, 0]


@pytest.mark.parametrize("host", [None, "", "nonsense"])
async def test_upnp_without_external_address_is_a_failure(upnp, host):
    upnp(Device(host=host))
    with pytest.raises(MappingFailed):
        await upnp_map(Upnp())


async def test_upnp_without_gateway_is_a_failure(upnp):
    upnp(Device(there=False))
    with pytest.raises(MappingFailed, match="no gateway was found"):
        await upnp_map(Upnp())


async def test_upnp_without_library_is_a_failure(monkeypatch):
    monkeypatch.setitem(sys.modules, "miniupnpc", None)
    router = Upnp()
    with pytest.raises(MappingFailed, match="not installed"):
        await upnp_map(router)
    await router.unmap(PORT)  # nothing to remove


def test_without_gateway_only_upnp_is_left():
    assert [router.method for router in portmap.routers(None)] == ["upnp"]


PROC_ROUTE = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
wlan0\t00000000\t{second}\t0003\t0\t0\t600\t00000000\t0\t0\t0
eth0\t00000000\t{first}\t0003\t0\t0\t100\t00000000\t0\t0\t0
tun0\t00000000\t00000000\t0001\t0\t0\t50\t00000000\t0\t0\t0
eth0\t{net}\t00000000\t0001\t0\t0\t100\t{mask}\t0\t0\t0
"""


def proc(host):
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}"


def test_default_gateway_is_that_of_the_lowest_metric():
    values = {"first": "192.168.1.1", "second": "10.0.0.1", "net": "192.168.1.0", "mask": "255.255.255.0"}
    text = PROC_ROUTE.format(**{name: proc(host) for name, host in values.items()})
    assert portmap.parse_proc_route(text) == "192.168.1.1"
    assert portmap.parse_proc_route(text.splitlines()[0]) is None


def test_default_gateway_of_other_systems():
    text = "   route to: default\ndestination: default\n    gateway: 192.168.1.1\n  interface: en0\n"
    assert portmap.parse_route_get(text) == "192.168.1.1"
    assert portmap.parse_route_get("route: writing to routing socket: not in table") is None

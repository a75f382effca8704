"""Small internets of network namespaces: a core that routes, and networks with a host or a home's router each.

    host - core - router - hosts of a home

Addresses count as public ones, as no documentation prefix does: network `n` has 11.n.0.0/16 and 2a00:n::/32. All homes
with a NAT use the same private addresses, as homes do. What is made here has names that begin with `PREFIX` and the
process id, and nothing outside of these namespaces is touched. Linux only, as root.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from peer.child import GUARD
from tests.net.emulator import enter

PREFIX = "shoal-net-"
EMULATOR = Path(__file__).with_name("emulator.py")
OTHER_PORTS = range(20_000, 30_000)
"""The external ports of a NAT that does not preserve ports; no system picks local ports from here by default."""

_numbers = itertools.count(1)


class Nat(enum.Enum):
    """What a home's router does to IPv4. All but NONE drop what comes in unasked, silently, also of IPv6."""

    NONE = "none"
    """It routes: hosts have public addresses."""
    FIREWALL = "firewall"
    """Hosts have public addresses, but connections are made from inside only."""
    PORT_PRESERVING = "port-preserving"
    """A local port has one external port for all destinations: the same number."""
    OTHER_PORT = "other-port"
    """A local port has one external port for all destinations: another number."""
    SYMMETRIC = "symmetric"
    """A local port has another external port for every destination."""

    @property
    def translates(self) -> bool:
        """Whether hosts have private addresses."""
        return self not in (Nat.NONE, Nat.FIREWALL)


@attrs.frozen(kw_only=True)
class Link:
    """An emulated access line; see `emulator.py`. Values are for the way to the network and the way from it."""

    rate: tuple[float, float] = (float("inf"), float("inf"))
    """Mbit/s."""
    delay: float = 0.0
    """ms, one way."""
    queue: float = 200.0
    """ms."""
    loss: tuple[float, float] = (0.0, 0.0)
    """Percent."""


@attrs.define
class Namespace:
    """A network namespace, and what runs in it."""

    name: str
    processes: list[subprocess.Popen[bytes]] = attrs.field(factory=list, init=False)

    @classmethod
    def make(cls, name: str, *, versions: Sequence[int]) -> Namespace:
        """Makes a namespace whose interfaces know no IPv6 unless 6 is among `versions`."""
        _run("ip", "netns", "add", name)
        made = cls(name)
        off = int(6 not in versions)
        made.ip("link set lo up")
        made.shell(
            f"sysctl -qw net.ipv6.conf.default.disable_ipv6={off}",
            "sysctl -qw net.ipv6.conf.all.accept_dad=0 net.ipv6.conf.default.accept_dad=0",  # addresses work at once
        )
        return made

    def command(self, *command: str | Path) -> list[str]:
        """The command line that runs a command in this namespace."""
        return ["ip", "netns", "exec", self.name, *map(str, command)]

    def run(self, *command: str | Path) -> str:
        """Runs a command to its end and returns its standard output."""
        return _run(*self.command(*command))

    def shell(self, *lines: str) -> str:
        """Runs lines of shell script until one fails."""
        return self.run("sh", "-ec", "\n".join(lines))

    def ip(self, *commands: str) -> None:
        """Runs commands of `ip`, such as "link set lo up"."""
        _run("ip", "-n", self.name, "-batch", "-", text="\n".join(commands))

    def start(self, *command: str | Path, log: Path) -> subprocess.Popen[bytes]:
        """Starts a command in this namespace. It ends with the topology at the latest. Call from the main thread."""
        return self.adopt(start(*self.command(*command), log=log))

    def adopt(self, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """Has a process end with the namespace."""
        self.processes.append(process)
        return process

    def socket(
        self, family: socket.AddressFamily = socket.AF_INET, kind: socket.SocketKind = socket.SOCK_STREAM
    ) -> socket.socket:
        """A socket in this namespace, for this process: it belongs where the thread was that made it."""

        def make() -> None:
            enter(self.name)
            made.append(socket.socket(family, kind))

        made: list[socket.socket] = []
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        return made[0]

    def remove(self) -> None:
        """Ends everything in the namespace, and removes it."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        remove_namespace(self.name)


@attrs.define
class Network:
    """A network that the core leads to."""

    number: int
    core: Namespace

    def cut(self) -> None:
        """From now on, packets from and to this network vanish on their way, and nobody is told."""
        self._filter("-I")

    def heal(self) -> None:
        """Undoes `cut`."""
        self._filter("-D")

    def _filter(self, action: str) -> None:
        self.core.shell(
            *(
                f"{tables} -w {action} FORWARD {way} net{self.number} -j DROP"
                for tables in ("iptables", "ip6tables")
                for way in ("-i", "-o")
            )
        )


@attrs.define
class Host:
    """A machine.

    Attributes:
        address: Its own address, IPv4 if it has one.
        public: The address under which the world sees it.
        network: Where it is.
    """

    name: str
    namespace: Namespace
    address: str
    public: str
    network: Network

    def socket(self, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """A socket of this host, for this process."""
        return self.namespace.socket(socket.AF_INET6 if ":" in self.address else socket.AF_INET, kind)


@attrs.define
class Home:
    """Hosts behind a router. On the router, `wan` is outside and `lan` inside."""

    router: Namespace
    hosts: list[Host]
    network: Network
    gateway: str
    """The router's address inside, IPv4 if it has one."""

    def offer_port_mapping(self, directory: Path) -> None:
        """Has the router answer UPnP-IGD, NAT-PMP and PCP from now on, as home routers do; see `missing_port_mapper`.

        Args:
            directory: For the daemon's files.
        """
        files = directory / f"{self.router.name}.miniupnpd"
        files.mkdir()
        (files / "tables").write_text(_PORT_MAPPING_TABLES)
        (files / "configuration").write_text(_PORT_MAPPING_DAEMON)
        self.router.run("nft", "-f", files / "tables")
        command = ("miniupnpd", "-d", "-f", files / "configuration", "-P", files / "pid")
        daemon = self.router.start(*command, log=files / "log")
        with self.hosts[0].socket(socket.SOCK_DGRAM) as asking:
            asking.settimeout(0.1)
            asking.connect((self.gateway, 5351))
            while daemon.poll() is None:
                with contextlib.suppress(ConnectionRefusedError, TimeoutError):
                    asking.send(b"\0\0")  # NAT-PMP: which is the external address?
                    asking.recv(100)
                    return
        raise RuntimeError(f"miniupnpd does not run here: {(files / 'log').read_text()}")


class Internet:
    """Makes networks, and removes them in the end. Also a context manager.

    Args:
        logs: A directory for what processes write.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._prefix = f"{PREFIX}{os.getpid()}-{next(_numbers)}-"
        self._namespaces: list[Namespace] = []
        self._networks = itertools.count(1)
        self.core = self._namespace("core", (4, 6), routes=True)

    def host(self, name: str, *, versions: Sequence[int] = (4,), link: Link | None = None) -> Host:
        """A host with a public address, on a network of its own, that anybody can connect to."""
        namespace = self._namespace(name, versions)
        network = self._network(namespace, "eth0", versions, link)
        address = f"11.{network.number}.0.1" if 4 in versions else f"2a00:{network.number}::1"
        return Host(name, namespace, address, address, network)

    def home(
        self,
        name: str,
        nat: Nat,
        *,
        hosts: int = 1,
        versions: Sequence[int] = (4,),
        link: Link | None = None,
    ) -> Home:
        """A router and hosts named NAME-1, NAME-2, … behind it. `link` is the line between the router and the core."""
        router = self._namespace(f"{name}-router", versions, routes=True)
        network = self._network(router, "wan", versions, link)
        number = network.number
        inside = "192.168.1" if nat.translates else f"11.{number}.1"
        router.ip("link add lan type bridge", "link set lan up", *_addresses("lan", number, inside, 254, versions))
        if 4 in versions and not nat.translates:
            self.core.ip(f"route add {inside}.0/24 via 11.{number}.0.1")
        if 6 in versions:
            self.core.ip(f"route add 2a00:{number}:1::/64 via 2a00:{number}::1")
        router.shell(*_rules(nat, versions))
        home = Home(router, [], network, f"{inside}.254" if 4 in versions else f"2a00:{number}:1::254")
        for index in range(1, hosts + 1):
            namespace = self._namespace(f"{name}-{index}", versions)
            _cable(router, f"lan{index}", namespace, "eth0")
            router.ip(f"link set lan{index} master lan", f"link set lan{index} up")
            namespace.ip("link set eth0 up", *_addresses("eth0", number, inside, index, versions))
            _default_routes(namespace, f"{inside}.254", f"2a00:{number}:1::254", versions)
            address = f"{inside}.{index}" if 4 in versions else f"2a00:{number}:1::{index}"
            public = f"11.{number}.0.1" if nat.translates and 4 in versions else address
            home.hosts.append(Host(f"{name}-{index}", namespace, address, public, network))
        return home

    def close(self) -> None:
        """Ends all processes and removes all namespaces."""
        while self._namespaces:
            self._namespaces.pop().remove()

    def __enter__(self) -> Internet:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _namespace(self, name: str, versions: Sequence[int], *, routes: bool = False) -> Namespace:
        namespace = Namespace.make(self._prefix + name, versions=versions)
        self._namespaces.append(namespace)
        if routes:
            namespace.run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
        return namespace

    def _network(self, namespace: Namespace, device: str, versions: Sequence[int], link: Link | None) -> Network:
        """Connects a namespace with the core."""
        network = Network(next(self._networks), self.core)
        number = network.number
        port = f"net{number}"
        if link is None:
            _cable(self.core, port, namespace, device)
        else:
            self._emulate(link, port, namespace, device)
        for end, name, host in ((self.core, port, 254), (namespace, device, 1)):
            end.ip(f"link set {name} up", *_addresses(name, number, f"11.{number}.0", host, versions, outside=True))
        _default_routes(namespace, f"11.{number}.0.254", f"2a00:{number}::254", versions)
        return network

    def _emulate(self, link: Link, port: str, namespace: Namespace, device: str) -> None:
        options: dict[str, tuple[float, ...]] = {
            "--rate": link.rate,
            "--delay": (link.delay,),
            "--queue": (link.queue,),
            "--loss": link.loss,
        }
        flags = [word for option, values in options.items() for word in (option, *map(str, values))]
        ends = [f"{self.core.name}:{port}", f"{namespace.name}:{device}"]
        log = self._logs / f"{namespace.name}.emulator.log"
        process = self.core.adopt(start(sys.executable, EMULATOR, *ends, *flags, log=log, stdout=subprocess.PIPE))
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the link emulator did not start: {log.read_text()}")
        for end, name in ((self.core, port), (namespace, device)):
            end.ip(f"link set {name} txqueuelen 10000")  # the queue is the emulator's, and it may be late


def start(*command: str | Path, log: Path, stdout: int | None = None) -> subprocess.Popen[bytes]:
    """Starts a process that the kernel ends with us; what it writes goes to `log`. Call from the main thread."""
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD, str(os.getpid()), *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=file if stdout is None else stdout,
            stderr=file,
        )


def sweep() -> None:
    """Removes what earlier processes left behind when they crashed."""
    for name in _namespaces():
        if name.startswith(PREFIX):
            owner = name.removeprefix(PREFIX).partition("-")[0]
            if not Path(f"/proc/{owner}").exists():
                remove_namespace(name)


def remove_namespace(name: str) -> None:
    """Kills what runs in a namespace, and removes it."""
    for pid in _run("ip", "netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _run("ip", "netns", "delete", name)


def missing() -> str | None:
    """Why there can be no topologies on this machine; None if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux, and root"
    absent = [tool for tool in ("ip", "iptables", "ip6tables", "sysctl") if shutil.which(tool) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: apt-get install iproute2 iptables procps)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun"
    name = f"{PREFIX}{os.getpid()}-try"
    try:
        namespace = Namespace.make(name, versions=(4, 6))
        namespace.shell(*_rules(Nat.SYMMETRIC, (4, 6)))
    except RuntimeError as error:
        return f"this system does not let us: {error}"
    finally:
        if name in _namespaces():
            remove_namespace(name)
    return None


def missing_port_mapper() -> str | None:
    """Why routers cannot offer port mapping on this machine; None if they can."""
    absent = [tool for tool in ("nft", "miniupnpd") if shutil.which(tool) is None]
    # There is another miniupnpd, for iptables; it would not find the tables that this one is told of.
    return (
        f"not installed: {', '.join(absent)} (Debian: apt-get install miniupnpd-nftables nftables)" if absent else None
    )


def _namespaces() -> list[str]:
    try:
        return os.listdir("/run/netns")
    except FileNotFoundError:  # there has never been one
        return []


def _run(*command: str | Path, text: str | None = None) -> str:
    result = subprocess.run(list(map(str, command)), input=text, text=True, capture_output=True)
    if result.returncode:
        said = " ".join((result.stderr or result.stdout).split())
        raise RuntimeError(f"{' '.join(map(str, command))} {text or ''} exited with {result.returncode}: {said}")
    return result.stdout


def _cable(near: Namespace, near_device: str, far: Namespace, far_device: str) -> None:
    near.ip(f"link add {near_device} type veth peer name {far_device} netns {far.name}")


def _addresses(
    device: str, network: int, prefix: str, host: int, versions: Sequence[int], *, outside: bool = False
) -> Iterator[str]:
    """The commands that give a device its addresses: on the network's link to the core, or inside of a home."""
    if 4 in versions:
        yield f"addr add {prefix}.{host}/24 dev {device}"
    if 6 in versions:
        yield f"addr add 2a00:{network}:{'' if outside else '1:'}:{host}/64 dev {device} nodad"


def _default_routes(namespace: Namespace, gateway4: str, gateway6: str, versions: Sequence[int]) -> None:
    gateways = {4: f"route add default via {gateway4}", 6: f"route add default via {gateway6}"}
    namespace.ip(*(gateways[version] for version in versions))


def _rules(nat: Nat, versions: Sequence[int]) -> Iterator[str]:
    """The commands that make a router what it is."""
    if nat is Nat.NONE:
        return
    for version in versions:
        filtering = f"{'iptables' if version == 4 else 'ip6tables'} -w -A"
        yield f"{filtering} FORWARD -i wan -m conntrack --ctstate ESTABLISHED,RELATED,DNAT -j ACCEPT"
        yield f"{filtering} FORWARD -i wan -j DROP"
        neighbours = "! -p icmp" if version == 4 else "! -p icmpv6"  # IPv6 finds its neighbours by ICMP
        yield f"{filtering} INPUT -i wan {neighbours} -m conntrack --ctstate NEW,INVALID -j DROP"
    if nat.translates and 4 in versions:
        for protocol in ("tcp", "udp"):
            yield f"iptables -w -t nat -A POSTROUTING -o wan -p {protocol} {_TARGETS[nat]}"
        yield "iptables -w -t nat -A POSTROUTING -o wan -j MASQUERADE"


# Linux gives a local port the external port that it already has, unless it is told to choose at random.
_TARGETS: dict[Nat, str] = {
    Nat.PORT_PRESERVING: "-j MASQUERADE",
    Nat.OTHER_PORT: f"-j MASQUERADE --to-ports {OTHER_PORTS.start}-{OTHER_PORTS.stop - 1}",
    Nat.SYMMETRIC: "-j MASQUERADE --random-fully",
}

_PORT_MAPPING_TABLES = """
table inet miniupnpd {
    chain forward { type filter hook forward priority -25; policy accept; }
    chain prerouting { type nat hook prerouting priority dstnat; policy accept; }
    chain postrouting { type nat hook postrouting priority srcnat; policy accept; }
}
"""
_PORT_MAPPING_DAEMON = """
ext_ifname=wan
listening_ip=lan
enable_upnp=yes
enable_natpmp=yes
secure_mode=yes
http_port=5000
uuid=5f0b1c1e-6f0e-4a53-9d0f-5b6a4f6f7a10
upnp_table_name=miniupnpd
upnp_nat_table_name=miniupnpd
upnp_forward_chain=forward
upnp_nat_chain=prerouting
upnp_nat_postrouting_chain=postrouting
allow 1024-65535 192.168.1.0/24 1024-65535
deny 0-65535 0.0.0.0/0 0-65535
"""

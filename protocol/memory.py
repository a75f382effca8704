"""A network inside one process, on trio's clock: for simulations and tests.

Hosts have names. Between each two of them is a link with a latency and a bandwidth that all their connections share.
Connections behave as TCP's do: bytes arrive in order, a limited number of them is under way, and what goes wrong looks
as it does on real machines. Nothing here needs a task of its own, and nothing is random.

A direction of a connection is a `_Pipe`: a queue of segments, each with the time at which it arrives. Whoever waits
for one sleeps until then. That a connection ended or broke is told by marks in the same queue.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Collection

import attrs
import trio

from protocol.errors import AddressError, PeerGone, PeerUnreachable
from protocol.transport import DIAL_TIMEOUT, Address, Buffer

CAPACITY = 2**20
"""Bytes of one direction of a connection that are under way or unread, at most."""

QUEUE = 0.5
"""Seconds that bytes wait in front of a link, about: the queue of a home line. All connections share it."""

_SEGMENT = 2**16
_SMALLEST_SEGMENT = 1400
_SEGMENT_SECONDS = 0.1  # on slow links segments are shorter: bytes of theirs arrive all the time, too
_BACKLOG = 128
_EPHEMERAL_PORTS = range(49_152, 65_536)
_WILDCARDS = ("0.0.0.0", "::")


class MemoryNetwork:
    """Hosts and the links between them.

    Args:
        latency: Seconds that a byte is under way, one way, between different hosts.
        bandwidth: Bytes per second in each direction of a link between different hosts, or None for no limit.
    """

    def __init__(self, *, latency: float = 0.0, bandwidth: float | None = None) -> None:
        self._latency = latency
        self._bandwidth = math.inf if bandwidth is None else bandwidth
        self._hosts: dict[str, _Host] = {}
        self._links: dict[tuple[str, str], _Link] = {}
        self._partitions: list[tuple[frozenset[str], frozenset[str]]] = []  # senders, and to whom nothing gets
        self._left: set[str] = set()  # names whose hosts have moved

    def transport(self, host: str) -> MemoryTransport:
        """The transport of a host. Its addresses are `Address(host, port)`.

        A host that was killed comes back by this, with nothing left of what it had.
        """
        name = _canonical(host)
        if name not in self._hosts or not self._hosts[name].alive:
            self._hosts[name] = _Host(name)
        return MemoryTransport(self, self._hosts[name])

    def kill(self, host: str) -> None:
        """Crash a host: what it does on the network fails from now on, and its connections break for the others."""
        victim = self._hosts[_canonical(host)]
        victim.alive = False
        for listener in list(victim.listeners.values()):
            listener.close()
        for stream in list(victim.streams):
            stream.crash()
        victim.wake()

    def stall(self, host: str) -> None:
        """Freeze a host, as SIGSTOP does: it sends and takes in nothing, but its connections stay."""
        self._hosts[_canonical(host)].stalled = True

    def resume(self, host: str) -> None:
        """Undo `stall`."""
        resumed = self._hosts[_canonical(host)]
        resumed.stalled = False
        resumed.wake()

    def move(self, host: str, to: str) -> None:
        """Give a host another address, as when a laptop is carried home. Its listeners go with it.

        Nobody is told: what belongs to the old address goes silent, on both sides, unless the host moves back.
        """
        for pipe in self._pipes():
            pipe.settle()
        old, new = _canonical(host), _canonical(to)
        moved = self._hosts.pop(old)
        moved.name = new
        self._hosts[new] = moved
        self._left.add(old)
        self._left.discard(new)
        moved.wake()

    def partition(self, group_a: Collection[str], group_b: Collection[str], *, one_way: bool = False) -> None:
        """Cut all links between two groups of hosts. Nobody is told: bytes and dials vanish. Partitions add up.

        Args:
            group_a: Some hosts.
            group_b: Some others.
            one_way: Only what the first group sends is lost. Dials fail both ways, as their answers are lost.
        """
        for pipe in self._pipes():
            pipe.settle()
        first, second = frozenset(map(_canonical, group_a)), frozenset(map(_canonical, group_b))
        self._partitions.append((first, second))
        if not one_way:
            self._partitions.append((second, first))

    def heal(self) -> None:
        """End all partitions. What was under way arrives after all, as TCP would send it again."""
        cut = [pipe for pipe in self._pipes() if pipe.cut]
        self._partitions.clear()
        for pipe in cut:
            pipe.resend()
        for host in self._hosts.values():
            host.wake()

    def set_link(self, a: str, b: str, *, latency: float | None = None, bandwidth: float | None = None) -> None:
        """Change both directions of the link between two hosts for what is sent from now on.

        Args:
            a: One host.
            b: The other.
            latency: Seconds one way; None leaves it.
            bandwidth: Bytes per second, `math.inf` for no limit; None leaves it.
        """
        for pair in ((a, b), (b, a)):
            link = self.link(*map(_canonical, pair))
            link.latency = link.latency if latency is None else latency
            link.bandwidth = link.bandwidth if bandwidth is None else bandwidth

    def link(self, source: str, target: str) -> _Link:
        if (source, target) not in self._links:
            here = source == target
            self._links[source, target] = _Link(0.0, math.inf) if here else _Link(self._latency, self._bandwidth)
        return self._links[source, target]

    def is_cut(self, source: str, target: str) -> bool:
        if source in self._left or target in self._left:
            return True
        return any(source in senders and target in receivers for senders, receivers in self._partitions)

    def connect(self, source: _Host, address: Address) -> MemoryStream:
        """What happens when a request to connect reaches `address`."""
        target = self._hosts.get(address.host)
        listener = target.listeners.get(address.port) if target else None
        if target is None or listener is None:
            raise PeerUnreachable(f"cannot connect to {address}: nobody listens there")
        if len(listener.backlog) >= _BACKLOG:
            raise PeerUnreachable(f"cannot connect to {address}: too many connections are waiting there")
        there = _Pipe(self, source.name, target.name)
        back = _Pipe(self, target.name, source.name)
        dialled = MemoryStream(source, address, outgoing=there, incoming=back)
        accepted = MemoryStream(target, Address(source.name, source.free_port()), outgoing=back, incoming=there)
        listener.backlog.append(accepted)
        target.changed.unpark_all()
        return dialled

    def _pipes(self) -> list[_Pipe]:
        return [stream.incoming for host in self._hosts.values() for stream in host.streams]


class MemoryTransport:
    """The network as one host sees it. Implements `transport.Transport`."""

    def __init__(self, network: MemoryNetwork, host: _Host) -> None:
        self._network = network
        self._host = host

    async def dial(self, address: Address, *, local_port: int | None = None) -> MemoryStream:
        """See `Transport.dial`. Takes one round trip. Ports to connect from cannot be chosen."""
        if local_port is not None:
            await trio.lowlevel.checkpoint()
            raise PeerUnreachable(f"cannot connect to {address} from a certain port: this network is in memory")
        try:
            with trio.fail_after(DIAL_TIMEOUT):
                await self._reach(address.host)
        except trio.TooSlowError:
            raise PeerUnreachable(f"{address} did not answer within {DIAL_TIMEOUT:.0f} s") from None
        if not self._host.alive:
            raise PeerUnreachable(f"cannot connect to {address}: {self._host.name} was killed")
        return self._network.connect(self._host, address)

    async def listen(self, address: Address) -> MemoryListener:
        """See `Transport.listen`. The host must be this one, "0.0.0.0" or "::"."""
        await trio.lowlevel.checkpoint()
        if not self._host.alive:
            raise AddressError(f"cannot listen on {address}: {self._host.name} was killed")
        if address.host not in (self._host.name, *_WILDCARDS):
            raise AddressError(f"cannot listen on {address}: this host is {self._host.name}")
        if address.port in self._host.listeners:
            raise AddressError(f"cannot listen on {address}: the port is in use")
        return MemoryListener(self._host, Address(self._host.name, address.port or self._host.free_port()))

    async def _reach(self, target: str) -> None:
        """Wait until a request and its answer have gone through, or this host has died."""
        network, host = self._network, self._host
        while host.alive:
            if not host.stalled and not self._cut_off(target):
                await trio.sleep(network.link(host.name, target).latency + network.link(target, host.name).latency)
                if not host.stalled and not self._cut_off(target):
                    return
            else:
                await host.changed.park()

    def _cut_off(self, target: str) -> bool:
        network, name = self._network, self._host.name
        return network.is_cut(name, target) or network.is_cut(target, name)


class MemoryListener:
    """Implements `transport.Listener`."""

    def __init__(self, host: _Host, address: Address) -> None:
        self._host = host
        self._port = address.port
        self.backlog: deque[MemoryStream] = deque()
        host.listeners[address.port] = self

    @property
    def address(self) -> Address:
        return Address(self._host.name, self._port)

    async def accept(self) -> MemoryStream:
        await trio.lowlevel.checkpoint()
        while self._host.listeners.get(self._port) is self:
            if self.backlog and not self._host.stalled:
                return self.backlog.popleft()
            await self._host.changed.park()
        raise AddressError(f"no longer listening on {self.address}")

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        if self._host.listeners.get(self._port) is self:
            del self._host.listeners[self._port]
            while self.backlog:
                self.backlog.popleft().crash()
            self._host.changed.unpark_all()


class MemoryStream:
    """One end of a connection. Implements `transport.ByteStream`."""

    def __init__(self, host: _Host, remote: Address, *, outgoing: _Pipe, incoming: _Pipe) -> None:
        self._host = host
        self._remote = remote
        self._outgoing = outgoing
        self.incoming = incoming
        self._closed = False
        self._changed = outgoing.writer = incoming.reader = trio.lowlevel.ParkingLot()
        host.streams[self] = None

    @property
    def remote(self) -> Address:
        return self._remote

    async def send(self, data: Buffer) -> None:
        await trio.lowlevel.checkpoint()
        rest = memoryview(data)
        while True:
            self._check()
            if self.incoming.ended:
                raise PeerGone(f"{self._remote} closed the connection")
            if not rest:
                return
            size = 0 if self._host.stalled else min(len(rest), self._outgoing.segment, self._outgoing.room)
            if size:
                self._outgoing.push(bytes(rest[:size]))
                rest = rest[size:]
            else:
                await self._wait(self._outgoing.opens_at)

    async def receive_into(self, buffer: memoryview) -> int:
        await trio.lowlevel.checkpoint()
        while True:
            self._check()
            if not self._host.stalled and (self.incoming.ready or self.incoming.ended):
                return self.incoming.take(buffer)
            await self._wait()

    async def aclose(self) -> None:
        if not self._closed:
            self._leave()
            self.incoming.discard()
            self._outgoing.push(_Mark.END)
        await trio.lowlevel.checkpoint()

    def crash(self) -> None:
        """End this end as the death of its host does."""
        if not self._closed:
            self._leave()
            self._outgoing.reset()

    def wake(self) -> None:
        self._changed.unpark_all()

    def _leave(self) -> None:
        self._closed = True
        self._host.streams.pop(self, None)
        self.wake()

    def _check(self) -> None:
        if self._closed:
            reason = "closed on our side" if self._host.alive else f"lost: {self._host.name} was killed"
            raise PeerGone(f"the connection to {self._remote} was {reason}")
        self.incoming.settle()
        if self.incoming.broken:
            raise PeerGone(f"the connection to {self._remote} broke: connection reset by peer")

    async def _wait(self, opens_at: float = -math.inf) -> None:
        """Until something may have changed for this end, or its link takes more, if it does not yet."""
        deadline = math.inf
        if not self._host.stalled:
            opens_at = opens_at if opens_at > trio.current_time() else math.inf  # else it waits for the reader
            deadline = min(opens_at, self.incoming.next_arrival)
        with trio.move_on_at(deadline):
            await self._changed.park()


class _Mark(enum.Enum):
    END = enum.auto()  # the other end was closed
    RESET = enum.auto()  # the other end is no more


@attrs.define
class _Link:
    """One direction between two hosts."""

    latency: float
    bandwidth: float
    _free_at: float = attrs.field(default=-math.inf, init=False)

    @property
    def opens_at(self) -> float:
        """When its queue takes more."""
        return self._free_at - QUEUE

    def arrival(self, size: int) -> float:
        """When `size` bytes that are sent now, after all that was sent before, will have arrived."""
        self._free_at = max(self._free_at, trio.current_time()) + size / self.bandwidth
        return self._free_at + self.latency


@attrs.define(eq=False)
class _Host:
    name: str
    alive: bool = True
    stalled: bool = False
    listeners: dict[int, MemoryListener] = attrs.field(factory=dict)
    streams: dict[MemoryStream, None] = attrs.field(factory=dict)  # a set in order of creation, so that runs repeat
    changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    _last_port: int = _EPHEMERAL_PORTS[-1]

    def wake(self) -> None:
        """Let everything that waits on this host look again."""
        self.changed.unpark_all()
        for stream in self.streams:
            stream.wake()

    def free_port(self) -> int:
        while True:
            following = self._last_port + 1
            self._last_port = following if following in _EPHEMERAL_PORTS else _EPHEMERAL_PORTS[0]
            if self._last_port not in self.listeners:
                return self._last_port


@attrs.define(eq=False)
class _Pipe:
    """One direction of a connection."""

    _network: MemoryNetwork
    _source: str
    _target: str
    ready: deque[memoryview] = attrs.field(factory=deque, init=False)  # arrived, unread
    ended: bool = attrs.field(default=False, init=False)
    broken: bool = attrs.field(default=False, init=False)
    writer: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    reader: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    _queue: deque[tuple[float, bytes | _Mark]] = attrs.field(factory=deque, init=False)  # arrival, content
    _held: int = attrs.field(default=0, init=False)
    _discarding: bool = attrs.field(default=False, init=False)

    @property
    def cut(self) -> bool:
        return self._network.is_cut(self._source, self._target)

    @property
    def room(self) -> int:
        """Bytes that may be put on their way now."""
        self.settle()
        return 0 if trio.current_time() < self.opens_at else CAPACITY - self._held

    @property
    def opens_at(self) -> float:
        """When the link takes more: it takes something of each connection, however many others fill its queue."""
        if not self._queue:
            return -math.inf
        opens_at = self._network.link(self._source, self._target).opens_at
        return opens_at if self.cut else min(opens_at, self._queue[-1][0])

    @property
    def segment(self) -> int:
        """Bytes that travel together, at most."""
        bandwidth = self._network.link(self._source, self._target).bandwidth
        return int(min(_SEGMENT, max(_SMALLEST_SEGMENT, _SEGMENT_SECONDS * bandwidth)))

    @property
    def next_arrival(self) -> float:
        return self._queue[0][0] if self._queue and not self.cut else math.inf

    def push(self, content: bytes | _Mark) -> None:
        """Put something on its way."""
        size = len(content) if isinstance(content, bytes) else 0
        if self._discarding and size:
            return
        self._held += size
        self._queue.append((self._network.link(self._source, self._target).arrival(size), content))
        self.reader.unpark_all()

    def reset(self) -> None:
        """Lose what is under way, and tell the reader so as fast as the link can."""
        self.settle()
        self._queue.clear()
        latency = self._network.link(self._source, self._target).latency
        self._queue.append((trio.current_time() + latency, _Mark.RESET))
        self.reader.unpark_all()

    def resend(self) -> None:
        """Put everything under way on its way again, from now."""
        contents = [content for _, content in self._queue]
        self._queue.clear()
        for content in contents:
            self._held -= len(content) if isinstance(content, bytes) else 0
            self.push(content)

    def settle(self) -> None:
        """Take note of what has arrived by now."""
        while self.next_arrival <= trio.current_time():
            content = self._queue.popleft()[1]
            if isinstance(content, bytes):
                self.ready.append(memoryview(content))
            elif content is _Mark.END:
                self.ended = True
            else:
                self.broken = True
                self.ready.clear()

    def take(self, buffer: memoryview) -> int:
        """Move what is ready into `buffer`; 0 if nothing is."""
        filled = 0
        while self.ready and filled < len(buffer):
            chunk = self.ready.popleft()
            count = min(len(chunk), len(buffer) - filled)
            buffer[filled : filled + count] = chunk[:count]
            filled += count
            if count < len(chunk):
                self.ready.appendleft(chunk[count:])
        self._held -= filled
        self.writer.unpark_all()
        return filled

    def discard(self) -> None:
        """Nobody will read: whatever is or will be sent vanishes."""
        self._discarding = True
        self._queue.clear()
        self.ready.clear()
        self._held = 0
        self.writer.unpark_all()


def _canonical(host: str) -> str:
    return Address(host, 0).host

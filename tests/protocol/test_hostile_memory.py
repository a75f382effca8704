"""Peers that make an endpoint keep as much as they can: all of it stays within the bound, and others are served."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import trio

from protocol import wire
from protocol.channel import handshake
from protocol.endpoint import Endpoint, Hello, Limits
from protocol.errors import PeerGone
from protocol.frames import FIN, U32, Kind, pack
from protocol.identity import Identity
from protocol.memory import MemoryNetwork
from protocol.mux_stream import INITIAL_WINDOW
from protocol.transport import Address
from protocol.wire import message

LIMITS = Limits(max_connections=32, max_buffered=16 << 20)
CROWD = 23  # LIMITS keeps a quarter of all connections for those that we dial


@message("test.take")
class Take:
    size: int


@message("test.wide")
class Wide:
    pass


@message("test.ignore")
class Ignore:
    pass


@message("test.talk")
class Talk:
    pass


@message("test.text")
class Text:
    text: str


async def take(request, stream):
    await stream.receive_into(bytearray(request.size))
    return Take(request.size)


async def wide(request, stream):
    await stream.receive_into(bytearray(1))  # asks for a larger window, and then loses interest
    await trio.sleep_forever()


async def ignore(request, stream):
    await trio.sleep_forever()


async def talk(request, stream):
    while True:
        await stream.receive(Text)


async def tell(request, stream):
    return Text("x" * 60_000)


@pytest.fixture
def network():
    return MemoryNetwork(latency=0.01)


@pytest.fixture
async def start(network, nursery):
    async def start(seed, limits=LIMITS):
        endpoint = Endpoint(
            Identity.from_seed(bytes([seed]) * 32),
            network.transport(f"host{seed}"),
            limits=limits,
            rng=random.Random(seed),
        )
        for message_type, handler in ((Take, take), (Wide, wide), (Ignore, ignore), (Talk, talk), (Text, tell)):
            endpoint.handle(message_type, handler)
        await nursery.start(endpoint.run, Address(f"host{seed}", 1))
        return endpoint

    yield start
    nursery.cancel_scope.cancel()


def framed(msg, *, flags=0, number):
    data = wire.encode(msg)
    return pack(Kind.DATA, flags, number, U32.pack(len(data)) + data)


class Attacker:
    """Sends as much as it is let on as many streams as it can open, and reads the credit that it gets for it."""

    def __init__(self, network, number, *, host, request, after=b"", most=1 << 30):
        self.identity = Identity.from_seed(number.to_bytes(32, "big"))
        self.transport = network.transport(host)
        self.request = request
        self.after = after
        self.most = most
        self.credit = Counter()
        self.refused = set()
        self.more = trio.Event()

    async def attack(self, address, *, streams=128):
        stream = await self.transport.dial(address)
        features = wire.encode(Hello(bytes(8), 1, 0))
        channel = await handshake(stream, self.identity, initiator=True, features=features)
        try:
            async with trio.open_nursery() as nursery:
                if self.most:
                    nursery.start_soon(self.listen, channel)
                for number in range(1, 2 * streams, 2):
                    request = framed(self.request, number=number, flags=0 if self.most else FIN)
                    await channel.send(pack(Kind.OPEN, 0, number) + request)
                    if self.after:
                        await channel.send(pack(Kind.DATA, 0, number, self.after))
                    await trio.sleep(0.02)
                    self.credit[number] = INITIAL_WINDOW - len(request) + 8 - len(self.after)
                left = Counter(dict.fromkeys(self.credit, self.most))
                while True:
                    self.more = trio.Event()
                    for number in set(self.credit) - self.refused:
                        while count := min(self.credit[number], 60_000, left[number]):
                            self.credit[number] -= count
                            left[number] -= count
                            await channel.send(pack(Kind.DATA, 0, number, bytes(count)))
                    with trio.move_on_after(1):
                        await self.more.wait()
                    await channel.send(pack(Kind.PING, 0, 0, bytes(8)))
        except* PeerGone:
            pass
        finally:
            with trio.CancelScope(shield=True):
                await channel.aclose()

    async def listen(self, channel):
        while True:
            record = memoryview(await channel.receive())
            while record:
                length, number = int.from_bytes(record[2:4], "big"), int.from_bytes(record[4:8], "big")
                if record[0] == Kind.CREDIT:
                    self.credit[number] += U32.unpack(record[8:12])[0]
                    self.more.set()
                if record[0] == Kind.RESET:
                    self.refused.add(number)
                record = record[8 + length :]


def kept(endpoint):
    """Bytes that the endpoint really keeps for others."""
    total = 0
    for connection in endpoint._connections:
        raws = {stream.raw for stream in connection._streams.values()} | set(connection.mux._streams.values())
        total += sum(raw.available + raw.pending for raw in raws)
        total += sum(len(stream._partial) for stream in connection._streams.values())
    return total


def requests_of_each_kind():
    announced = U32.pack(wire.MAX_MESSAGE)
    return [
        pytest.param(Ignore(), b"", 1 << 30, id="unread"),
        pytest.param(Wide(), b"", 1 << 30, id="windows"),
        pytest.param(Talk(), announced, wire.MAX_MESSAGE - 1, id="long messages"),
        pytest.param(Text(""), b"", 0, id="answers not taken"),
    ]


@pytest.mark.parametrize("hosts", [1, CROWD])
@pytest.mark.parametrize(("request_", "after", "most"), requests_of_each_kind())
async def test_colluding_peers_fill_no_more_than_the_budget(
    start, network, nursery, autojump_clock, request_, after, most, hosts
):
    node = await start(1)
    crowd = CROWD if hosts > 1 else LIMITS.max_connections // 2
    for number in range(crowd):
        attacker = Attacker(
            network, 100 + number, host=f"evil{number % hosts}", request=request_, after=after, most=most
        )
        nursery.start_soon(attacker.attack, node.address)
    peak = 0
    for _ in range(10):
        await trio.sleep(1)
        peak = max(peak, kept(node))
        assert peak <= LIMITS.max_buffered
    assert peak > LIMITS.max_buffered // 8  # the attack is one
    assert len(node.connected) == crowd
    honest = await start(2)
    await honest.connect(node.address)
    size = 3_000_000
    with trio.fail_after(60):
        async with honest.open(node.peer_id, Take(size), bulk=True) as stream:
            await stream.send_bytes(bytes(size))
            assert await stream.receive(Take) == Take(size)
            await stream.finish()
        async with node.open(honest.peer_id, Take(size), bulk=True) as stream:
            await stream.send_bytes(bytes(size))
            assert await stream.receive(Take) == Take(size)
            await stream.finish()
    assert max(peak, kept(node)) <= LIMITS.max_buffered
    assert node._memory.held <= LIMITS.max_buffered


async def test_all_memory_comes_back(start, network, nursery, autojump_clock):
    node = await start(1)
    with trio.move_on_after(5):
        async with trio.open_nursery() as attackers:
            for number in range(8):
                attacker = Attacker(network, 100 + number, host=f"evil{number}", request=Ignore())
                attackers.start_soon(attacker.attack, node.address)
    await trio.sleep(5)
    assert node.connected == ()
    assert node._memory.held == 0

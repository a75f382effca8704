"""Peers that break the rules, or use them to the full: they must harm nobody but themselves."""

from __future__ import annotations

import contextlib
import random
import tracemalloc

import attrs
import msgpack
import pytest
import trio

from protocol import wire
from protocol.channel import handshake
from protocol.endpoint import Endpoint, Hello, Limits
from protocol.errors import PeerGone, PeerUnreachable, ProtocolError, StreamReset
from protocol.frames import FIN, Kind, pack
from protocol.identity import Identity
from protocol.memory import MemoryNetwork
from protocol.transport import Address
from protocol.wire import message
from tests.protocol.messages import Echo, echo


@message("test.pull")
class Pull:
    size: int


@attrs.define
class Node:
    endpoint: Endpoint
    address: Address


@pytest.fixture
def network():
    return MemoryNetwork(latency=0.01)


@pytest.fixture
async def start(network, nursery):
    async def start(seed, *, host=None, limits=None, handlers=((Echo, echo),)):
        host = host or f"host{seed}"
        identity = Identity.from_seed(bytes([seed]) * 32)
        endpoint = Endpoint(identity, network.transport(host), limits=limits, rng=random.Random(seed))
        for message_type, handler in handlers:
            endpoint.handle(message_type, handler)
        return Node(endpoint, await nursery.start(endpoint.run, Address(host, 0)))

    async def watchdog():
        await trio.sleep(10_000)
        raise AssertionError("the test hangs")

    nursery.start_soon(watchdog)
    yield start
    nursery.cancel_scope.cancel()


class Stranger:
    """Somebody who speaks the protocol by hand."""

    def __init__(self, network, seed, *, host="stranger"):
        self.identity = Identity.from_seed(seed.to_bytes(32, "big"))
        self.transport = network.transport(host)

    async def dial(self, address, *, count=1, instance=bytes(8), features=None):
        stream = await self.transport.dial(address)
        features = features or wire.encode(Hello(instance, count, 0))
        return await handshake(stream, self.identity, initiator=True, features=features)


def framed(msg, *, stream, flags=0):
    data = wire.encode(msg)
    return pack(Kind.DATA, flags, stream, len(data).to_bytes(4, "big") + data)


async def ended(channel):
    """Waits until the other side has ended the connection."""
    try:
        while True:
            await channel.receive()
    except PeerGone:
        pass
    finally:
        await channel.aclose()


async def works(start, node):
    """Whether an honest newcomer is served."""
    honest = await start(99)
    reply = await honest.endpoint.request(await honest.endpoint.connect(node.address), Echo("hi"), Echo)
    return reply == Echo("hi!")


async def test_a_handler_with_tasks_does_not_end_the_endpoint_with_its_connection(start, network, autojump_clock):
    async def divide(request, stream):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.receive, Echo)  # raises when the connection is lost...
            nursery.start_soon(trio.sleep_forever)  # ...and this is cancelled

    node = await start(1, handlers=((Echo, echo), (Pull, divide)))
    channel = await Stranger(network, 7).dial(node.address)
    await channel.send(pack(Kind.OPEN, 0, 1) + framed(Pull(1), stream=1))
    await trio.sleep(1)
    network.kill("stranger")
    await trio.sleep(1)
    assert await works(start, node)


async def test_a_wrong_introduction_ends_only_the_connection(start, network, autojump_clock):
    node = await start(1)
    wrong = msgpack.packb(["shoal.hello", bytes(8), 1, 0, "$[999]", None, None, False, False])
    channel = await Stranger(network, 7).dial(node.address, features=wrong)
    await ended(channel)
    assert await works(start, node)


async def test_announced_lengths_cost_nothing(start, network, autojump_clock):
    node = await start(1)
    channel = await Stranger(network, 7).dial(node.address)
    announcement = (wire.MAX_MESSAGE).to_bytes(4, "big")
    tracemalloc.start()
    for number in range(1, 256, 2):
        await channel.send(pack(Kind.OPEN, 0, number) + pack(Kind.DATA, 0, number, announcement))
    await trio.sleep(1)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    await channel.aclose()
    assert used < 8 << 20


async def test_one_peer_has_few_connections(start, network, autojump_clock):
    async def never(request, stream):
        await trio.sleep_forever()

    node = await start(1, handlers=((Echo, echo), (Pull, never)))
    stranger = Stranger(network, 7)
    over = []

    async def occupy(count):
        channel = await stranger.dial(node.address, count=count)
        await channel.send(pack(Kind.OPEN, 0, 1) + framed(Pull(1), stream=1))
        nursery.start_soon(keep_alive, channel)
        await ended(channel)
        over.append(count)

    async def keep_alive(channel):
        try:
            while True:
                await channel.send(pack(Kind.PING, 0, 0, bytes(8)))
                await trio.sleep(1)
        except PeerGone:
            pass

    async with trio.open_nursery() as nursery:
        for count in range(1, 21):
            nursery.start_soon(occupy, count)
            await trio.sleep(0.2)
        await trio.sleep(30)
        assert len(over) >= 16
        assert await works(start, node)
        nursery.cancel_scope.cancel()


async def test_half_open_connections_keep_nobody_out(start, network, autojump_clock):
    node = await start(1)
    silent = [await network.transport("stranger").dial(node.address) for _ in range(100)]
    assert await works(start, node)
    for stream in silent:
        await stream.aclose()


async def test_a_flood_of_handshakes_from_one_address_is_cut_off(start, network, autojump_clock):
    node = await start(1)
    completed = 0
    for count in range(300):
        try:
            channel = await Stranger(network, 7 + count).dial(node.address)
        except Exception:
            break
        completed += 1
        await channel.aclose()
    assert completed < 300
    assert await works(start, node)


async def test_one_address_cannot_have_all_connections(start, network, autojump_clock):
    node = await start(1, limits=Limits(max_connections=8))
    async with trio.open_nursery() as nursery:

        async def stay(seed):
            channel = await Stranger(network, seed).dial(node.address)
            nursery.start_soon(ended, channel)
            while True:
                await channel.send(pack(Kind.PING, 0, 0, bytes(8)))
                await trio.sleep(1)

        async def try_to_stay(seed):
            with contextlib.suppress(PeerGone):
                await stay(seed)

        for seed in range(7, 27):
            nursery.start_soon(try_to_stay, seed)
        await trio.sleep(3)
        assert await works(start, node)
        nursery.cancel_scope.cancel()


async def test_who_dials_learns_that_there_is_no_room(start, autojump_clock):
    a = await start(1, limits=Limits(max_connections=1))
    b, c = await start(2), await start(3)
    await a.endpoint.connect(b.address)
    with pytest.raises(PeerUnreachable, match="too many"):
        await a.endpoint.connect(c.address)


async def test_a_flood_of_frames_slows_only_its_sender(start, network, autojump_clock):
    node = await start(1)
    channel = await Stranger(network, 7).dial(node.address)
    record = pack(Kind.PING, 0, 0, bytes(8)) * 4000
    finished = None

    async def flood():
        nonlocal finished
        began = trio.current_time()
        for _ in range(100):
            await channel.send(record)
        finished = trio.current_time() - began

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ended, channel)
        nursery.start_soon(flood)
        assert await works(start, node)
        assert finished is None
        await trio.sleep(100)
        assert finished is not None
        assert finished > 10
        nursery.cancel_scope.cancel()


async def test_streams_that_the_other_side_never_ends_do_not_pile_up(start, network, nursery, autojump_clock):
    node = await start(1, limits=Limits(max_streams=8))
    stranger = Stranger(network, 7)
    channel = await stranger.dial(node.address)
    peer = stranger.identity.peer_id

    async def answer_without_end():
        try:
            while True:
                record = memoryview(await channel.receive())
                while record:
                    length = int.from_bytes(record[2:4], "big")
                    number = int.from_bytes(record[4:8], "big")
                    if record[0] == Kind.OPEN:
                        await channel.send(framed(Echo("?"), stream=number))
                    if record[0] == Kind.PING:
                        await channel.send(pack(Kind.PONG, 0, 0, bytes(record[8:16])))
                    record = record[8 + length :]
        except PeerGone:
            await channel.aclose()

    nursery.start_soon(answer_without_end)
    await trio.sleep(0.1)
    with pytest.raises(ProtocolError, match="does not end"):
        for _ in range(100):
            await node.endpoint.request(peer, Echo("hi"), Echo)


async def test_who_does_not_read_is_given_up(start, network, nursery, autojump_clock):
    outcome = []

    async def push(request, stream):
        try:
            await stream.send_bytes(bytes(request.size))
        except StreamReset as error:
            outcome.append(str(error))
            raise

    node = await start(1, handlers=((Echo, echo), (Pull, push)))
    channel = await Stranger(network, 7).dial(node.address)
    nursery.start_soon(ended, channel)
    await channel.send(pack(Kind.OPEN, 0, 1) + framed(Pull(1 << 20), stream=1, flags=FIN))
    for _ in range(200):  # a byte a second
        await channel.send(pack(Kind.CREDIT, 0, 1, (1).to_bytes(4, "big")))
        await trio.sleep(1)
    assert outcome
    assert "took" in outcome[0]


async def test_who_asks_nonsense_and_reads_no_answers_ends_only_his_connection(start, network, nursery, autojump_clock):
    node = await start(1)
    channel = await Stranger(network, 7).dial(node.address)

    async def ask():
        with contextlib.suppress(PeerGone):
            for number in range(1, 60_000, 2):
                await channel.send(pack(Kind.OPEN, 0, number) + framed(Pull(1), stream=number, flags=FIN))

    nursery.start_soon(ask)
    await trio.sleep(20)
    assert await works(start, node)
    await trio.sleep(40)
    assert node.endpoint.statistics(channel.peer_id) is None
    await channel.aclose()


async def test_the_opener_of_a_stream_cannot_lift_the_upload_cap(start, network, nursery, autojump_clock):
    async def push(request, stream):
        await stream.send_bytes(bytes(request.size))

    node = await start(1, limits=Limits(max_upload=1e5), handlers=((Echo, echo), (Pull, push)))
    taker = await start(2)
    peer = await taker.endpoint.connect(node.address)
    began = trio.current_time()
    async with taker.endpoint.open(peer, Pull(1_000_000)) as stream:
        await stream.receive_into(bytearray(1_000_000))
        await stream.finish()
    assert trio.current_time() - began > 8

from __future__ import annotations

import gc
import os
import pathlib
import random
from functools import partial

import pytest
import trio

from protocol import wire
from protocol.channel import SecureChannel, handshake
from protocol.connection import Connection
from protocol.endpoint import Hello, Limits, PeerLost
from protocol.errors import (
    PeerGone,
    PeerUnreachable,
    ProtocolError,
    RequestRefused,
)
from protocol.frames import Kind, pack
from protocol.identity import Identity
from protocol.mux_stream import MuxStream
from protocol.stream import Stream
from protocol.tcp import TcpTransport
from protocol.transport import Address
from tests.protocol.messages import Blob, Count, Echo, Number, Unserved, echo

KEY = bytes(range(32))


@pytest.fixture
def start(start_endpoint):
    return partial(start_endpoint, handlers=((Echo, echo),))


async def test_protocol_errors_end_the_connection_and_then_ban(start, autojump_clock):
    async def picky(request, stream):
        raise ProtocolError("I do not like that")

    a, b = await start(1), await start(2, handlers=[(Echo, picky)])
    for _ in range(3):
        with pytest.raises(PeerGone, match="do not like"):
            await a.endpoint.request(b.peer, Echo(""), Echo)
        await trio.sleep(1)
    with pytest.raises(PeerGone, match="banned"):
        await a.endpoint.request(b.peer, Unserved(), Echo)
    with pytest.raises(PeerUnreachable, match="banned"):
        await b.endpoint.connect(a.peer)
    await trio.sleep(61)
    with pytest.raises(RequestRefused):
        await a.endpoint.request(b.peer, Unserved(), Echo)


async def test_wrong_answers_are_protocol_errors(start, autojump_clock):
    a, b = await start(1), await start(2)
    with pytest.raises(ProtocolError, match=r"unexpected message 'test\.echo'"):
        await a.endpoint.request(b.peer, Echo(""), Number)
    assert not a.endpoint.is_connected(b.peer)
    await trio.sleep(1)
    assert not b.endpoint.is_connected(a.peer)


async def test_what_a_third_peer_did_is_not_the_requesters_fault(start, autojump_clock):
    async def ask_c(request, stream):
        return await b.endpoint.request(c.peer, Echo(""), Number)

    a = await start(1)
    c = await start(3)
    b = await start(2, handlers=[(Count, ask_c)])
    with pytest.raises(RequestRefused, match="unexpected"):
        await a.endpoint.request(b.peer, Count(1), Number)
    assert a.endpoint.is_connected(b.peer)


async def intruder(network, address, features=None):
    """A secure channel of somebody who may then say whatever he likes."""
    stream = await network.transport("intruder").dial(address)
    hello = wire.encode(Hello(bytes(8), 1, 0)) if features is None else features
    return await handshake(stream, Identity.from_seed(bytes(32)), initiator=True, features=hello)


@pytest.mark.parametrize(
    "records",
    [
        [b"garbage"],
        [b""],
        [pack(Kind.OPEN, 0, 1) + pack(Kind.DATA, 0, 1, b"\xff\xff\xff\xff")],  # a message that is too long
        [pack(Kind.OPEN, 0, 1) + pack(Kind.DATA, 0, 1, b"\0\0\0\x03abc")],
        [pack(Kind.OPEN, 0, 1) + pack(Kind.DATA, 1, 1, b"\0\0\0\x03ab")],
        [pack(Kind.OPEN, 0, 1), *[pack(Kind.DATA, 0, 1, bytes(60_000))] * 2],
    ],
)
async def test_rule_breakers_are_shown_out(start, network, autojump_clock, records):
    a = await start(1)
    channel = await intruder(network, a.endpoint.address)
    await channel.send(*records)
    received = bytearray()
    with pytest.raises(PeerGone):
        while True:
            received += await channel.receive()
    assert b"protocol error" in received
    assert a.endpoint.connected == ()
    await channel.aclose()


async def test_wrong_introductions_get_nowhere(start, network, autojump_clock):
    a = await start(1)
    channel = await intruder(network, a.endpoint.address, features=b"\x90")
    with pytest.raises(PeerGone):
        await channel.receive()
    assert a.endpoint.connected == ()
    await channel.aclose()


async def test_stalled_handshakes_lock_nobody_out(start, network, autojump_clock):
    a, b = await start(1, limits=Limits(max_pending_handshakes=3)), await start(2)
    streams = [await network.transport("intruder").dial(a.endpoint.address) for _ in range(10)]
    await trio.sleep(1)
    assert await b.endpoint.request(a.peer, Echo(""), Echo) == Echo("!")
    for stream in streams:
        await stream.aclose()


async def test_who_stops_reading_is_dropped_though_he_answers_pings(start, network, autojump_clock):
    """He takes no data: after a while there is no room for it on the way."""
    asked = trio.Event()

    async def blob(request, stream):
        asked.set()
        await stream.send_bytes(bytes(request.size))

    a = await start(1, handlers=[(Blob, blob)])
    channel = await intruder(network, a.endpoint.address)
    request = wire.encode(Blob(50_000_000))
    message = len(request).to_bytes(4, "big") + request
    await channel.send(
        pack(Kind.OPEN, 1, 1) + pack(Kind.DATA, 1, 1, message) + pack(Kind.CREDIT, 0, 1, b"\x7f\0\0\0"),
    )
    await asked.wait()
    began = trio.current_time()
    with a.endpoint.watch() as events:
        while True:
            with trio.move_on_after(1):
                lost = await events.receive()
                break
            await channel.send(pack(Kind.PONG, 0, 0, bytes(8)))
    assert "took no data" in lost.reason
    assert trio.current_time() - began < 40
    await channel.aclose()


async def test_being_suspended_is_not_taken_for_the_others_silence(start, autojump_clock):
    a, b = await start(1), await start(2)
    await a.endpoint.request(b.peer, Echo(""), Echo)
    with a.endpoint.watch() as events_a, b.endpoint.watch() as events_b:
        for seconds in (5, 60, 4000):
            await trio.sleep(3.3)
            autojump_clock.jump(seconds)
        await trio.sleep(10)
        for events in (events_a, events_b):
            with pytest.raises(trio.WouldBlock):
                events.receive_nowait()


@pytest.mark.parametrize("seed", range(15))
async def test_dialling_each_other_at_any_time_loses_nothing(start, network, autojump_clock, seed):
    rng = random.Random(seed)
    nodes = [await start(number) for number in (1, 2, 3)]
    network.set_link("host1", "host2", latency=rng.random() * 0.2)
    kept = {frozenset((this.peer, other.peer)): 0 for this in nodes for other in nodes if this is not other}

    async def ask(this, other):
        await trio.sleep(rng.random() * 0.5)
        if rng.random() < 0.3:
            await this.endpoint.connect(other.endpoint.address)
        for _ in range(rng.randrange(5)):
            assert await this.endpoint.request(other.peer, Echo("x" * rng.randrange(100_000)), Echo)

    async with trio.open_nursery() as nursery:
        for _ in range(30):
            nursery.start_soon(ask, *rng.sample(nodes, 2))
    await trio.sleep(30)
    for node in nodes:
        assert len(node.endpoint.connected) == len(node.endpoint._connections) == 2
        for connection in node.endpoint._connections:
            assert not connection.mux.retired
            kept[frozenset((node.peer, connection.peer))] += 1
    assert set(kept.values()) == {2}


async def cycle(a, b, times):
    """Connects, talks and disconnects, in all ways that there are."""
    for count in range(times):
        this, other = (a, b) if count % 2 else (b, a)
        with this.endpoint.watch() as here, other.endpoint.watch() as there:
            assert await this.endpoint.request(other.peer, Echo("x" * count), Echo) == Echo("x" * count + "!")
            with trio.move_on_after(0.001):
                await other.endpoint.request(this.peer, Echo(""), Echo)
            (other if count % 3 else this).endpoint.disconnect(other.peer if count % 3 == 0 else this.peer, "enough")
            for events in (here, there):
                while not isinstance(await events.receive(), PeerLost):
                    pass
    await trio.sleep(1)
    assert not a.endpoint._connections
    assert not b.endpoint._connections


def living():
    """How many objects there are that go with connections."""
    gc.collect()
    kinds = (Connection, Stream, MuxStream, SecureChannel)
    return sum(1 for thing in gc.get_objects() if type(thing) in kinds)


async def test_nothing_is_left_behind(start, network, autojump_clock):
    a, b = await start(1), await start(2)
    before = living()
    tasks = trio.lowlevel.current_statistics().tasks_living
    await cycle(a, b, 200)
    assert trio.lowlevel.current_statistics().tasks_living == tasks
    assert living() == before
    assert not any(host.streams for host in network._hosts.values())
    for node in (a, b):
        assert not node.endpoint._dials
        assert not node.endpoint._links._watchers


@pytest.mark.skipif(not pathlib.Path("/proc/self/fd").exists(), reason="counts open files as Linux shows them")
async def test_no_socket_is_left_behind(start):
    local = Address("127.0.0.1", 0)
    a, b = [await start(seed, transport=TcpTransport(), listen=local) for seed in (1, 2)]
    await cycle(a, b, 3)
    files = len(os.listdir("/proc/self/fd"))
    await cycle(a, b, 60)
    assert len(os.listdir("/proc/self/fd")) == files

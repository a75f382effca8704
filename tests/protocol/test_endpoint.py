from __future__ import annotations

import gc
import os
import pathlib
import random
import tracemalloc
from functools import partial
from typing import Annotated

import attrs
import pytest
import trio
from msgspec import Meta

from protocol import wire
from protocol.channel import handshake
from protocol.endpoint import Endpoint, Hello, Limits, PeerConnected, PeerLost
from protocol.errors import (
    HandshakeError,
    PeerGone,
    PeerUnreachable,
    ProtocolError,
    RequestRefused,
    RequestTimeout,
    StreamEnded,
    StreamReset,
    WrongPeer,
)
from protocol.frames import Kind, pack
from protocol.identity import Identity
from protocol.memory import MemoryNetwork
from protocol.mux import INITIAL_WINDOW
from protocol.tcp import TcpTransport
from protocol.transport import Address
from protocol.wire import message

KEY = bytes(range(32))


@message("test.echo")
class Echo:
    text: str


@message("test.count")
class Count:
    to: Annotated[int, Meta(ge=0, le=1000)]


@message("test.number")
class Number:
    value: int


@message("test.blob")
class Blob:
    size: int


@message("test.unserved")
class Unserved:
    pass


async def echo(request, stream):
    return Echo(request.text + "!")


async def never(request, stream):
    await trio.sleep_forever()


@attrs.define
class Node:
    """A running endpoint and its scope."""

    endpoint: Endpoint
    scope: trio.CancelScope
    stopped: trio.Event

    @property
    def peer(self):
        return self.endpoint.peer_id

    async def stop(self):
        self.scope.cancel()
        await self.stopped.wait()


@pytest.fixture
def network():
    return MemoryNetwork(latency=0.01)


@pytest.fixture
async def start(network, nursery):
    """Starts endpoints: seed n lives on host n. Those started later know those before."""
    nodes = []

    async def start(seed, *, limits=None, psk=None, transport=None, listen=None, handlers=((Echo, echo),)):
        endpoint = Endpoint(
            Identity.from_seed(bytes([seed]) * 32),
            transport or network.transport(f"host{seed}"),
            psk=psk,
            limits=limits or Limits(),
            rng=random.Random(f"{seed} {len(nodes)}"),
        )
        for message_type, handler in handlers:
            endpoint.handle(message_type, handler)
        node = Node(endpoint, trio.CancelScope(), trio.Event())

        async def run(task_status):
            with node.scope:
                await endpoint.run(listen or Address(f"host{seed}", 1000), task_status=task_status)
            node.stopped.set()

        address = await nursery.start(run)
        for other in nodes:
            if other.endpoint.address is not None:
                endpoint.learn(other.peer, other.endpoint.address)
                other.endpoint.learn(endpoint.peer_id, address)
        nodes.append(node)
        return node

    async def watchdog():  # heartbeats never end, so simulated time would run on for ever
        await trio.sleep(10_000)
        raise AssertionError("the test hangs")

    nursery.start_soon(watchdog)
    yield start
    nursery.cancel_scope.cancel()


async def test_request_and_reply(start, autojump_clock):
    a, b = await start(1), await start(2)
    assert await a.endpoint.request(b.peer, Echo("hi"), Echo) == Echo("hi!")
    assert await b.endpoint.request(a.peer, Echo("ho"), (Number, Echo)) == Echo("ho!")
    assert a.endpoint.connected == (b.peer,)
    assert b.endpoint.connected == (a.peer,)
    assert a.endpoint.bytes_sent > 0
    assert a.endpoint.bytes_received > 0


async def test_addresses_are_learned_from_those_who_connect(start, autojump_clock):
    a, b = await start(1), await start(2)
    peer = await a.endpoint.connect(Address("host2", 1000))
    assert peer == b.peer
    assert a.endpoint.addresses(b.peer) == (Address("host2", 1000),)
    await b.endpoint.request(a.peer, Echo(""), Echo)
    assert b.endpoint.addresses(a.peer) == (Address("host1", 1000),)


async def test_conversation(start, autojump_clock):
    async def count(request, stream):
        for value in range(request.to):
            await stream.send(Number(value))
        assert await stream.receive(Echo) == Echo("enough")
        with pytest.raises(StreamEnded):
            await stream.receive(Echo)

    a, b = await start(1), await start(2, handlers=[(Count, count)])
    async with a.endpoint.open(b.peer, Count(3)) as stream:
        assert [await stream.receive(Number) for _ in range(3)] == [Number(0), Number(1), Number(2)]
        await stream.send(Echo("enough"))
        await stream.finish()
        with pytest.raises(StreamEnded):
            await stream.receive(Number)


async def test_raw_bytes_between_messages(start, autojump_clock):
    async def blob(request, stream):
        data = bytearray(request.size)
        await stream.receive_into(data)
        await stream.receive_into(bytearray())
        await stream.send(Number(request.size))
        await stream.send_bytes(data[::-1])
        await stream.send_bytes(b"")
        return Echo("done")

    a, b = await start(1), await start(2, handlers=[(Blob, blob)])
    data = random.Random(1).randbytes(3_000_001)
    async with a.endpoint.open(b.peer, Blob(len(data)), bulk=True) as stream:
        await stream.send_bytes(data)
        assert await stream.receive(Number) == Number(len(data))
        back = bytearray(len(data))
        await stream.receive_into(back)
        assert back == data[::-1]
        assert await stream.receive(Echo) == Echo("done")


async def test_refusals_reach_the_requester(start, autojump_clock):
    async def refuse(request, stream):
        raise RequestRefused("not today", code="busy")

    async def fail(request, stream):
        raise PeerUnreachable("somebody else")

    a, b = await start(1), await start(2, handlers=[(Echo, refuse), (Count, fail)])
    with pytest.raises(RequestRefused, match="not today") as caught:
        await a.endpoint.request(b.peer, Echo(""), Echo)
    assert caught.value.code == "busy"
    with pytest.raises(RequestRefused, match="somebody else") as caught:
        await a.endpoint.request(b.peer, Count(1), Echo)
    assert caught.value.code == "failed"
    with pytest.raises(RequestRefused, match=r"test\.unserved") as caught:
        await a.endpoint.request(b.peer, Unserved(), Echo)
    assert caught.value.code == "unknown_type"
    assert a.endpoint.is_connected(b.peer)


async def test_a_bug_in_a_handler_stays_there(start, autojump_clock, caplog):
    async def bug(request, stream):
        raise KeyError("oops")

    a, b = await start(1), await start(2, handlers=[(Echo, echo), (Count, bug)])
    with pytest.raises(RequestRefused, match="internal error"):
        await a.endpoint.request(b.peer, Count(1), Echo)
    assert "oops" in caplog.text
    assert await a.endpoint.request(b.peer, Echo(""), Echo) == Echo("!")


async def test_timeouts(start, autojump_clock):
    a, b = await start(1), await start(2, handlers=[(Echo, never)])
    with pytest.raises(RequestTimeout, match=r"test\.echo"):
        await a.endpoint.request(b.peer, Echo(""), Echo, timeout=3)
    async with a.endpoint.open(b.peer, Echo("")) as stream:
        with pytest.raises(RequestTimeout):
            await stream.receive(Echo, timeout=2)


async def test_leaving_early_resets_the_other_side(start, autojump_clock):
    seen = trio.Event()

    async def wait(request, stream):
        with pytest.raises(StreamReset):
            await stream.receive(Echo)
        seen.set()

    a, b = await start(1), await start(2, handlers=[(Echo, wait)])
    async with a.endpoint.open(b.peer, Echo("")):
        await trio.sleep(1)
    await seen.wait()


async def test_finished_data_arrives_though_nobody_waits_for_it(start, autojump_clock):
    received = trio.Event()

    async def blob(request, stream):
        await trio.sleep(3)
        await stream.receive_into(bytearray(request.size))
        received.set()
        for _ in range(100):
            with pytest.raises(StreamReset):
                while True:
                    await stream.send(Echo("x" * 10_000))

    a, b = await start(1), await start(2, handlers=[(Blob, blob)])
    async with a.endpoint.open(b.peer, Blob(60_000)) as stream:
        await stream.send_bytes(bytes(60_000))
        await stream.finish()
    await received.wait()


async def test_a_stream_that_nobody_reads_blocks_no_other(start, autojump_clock):
    released = trio.Event()

    async def ignore(request, stream):
        await released.wait()

    a, b = await start(1), await start(2, handlers=[(Echo, echo), (Blob, ignore)])

    async def push(endpoint, task_status):
        async with endpoint.open(b.peer, Blob(1), bulk=True) as stream:
            task_status.started()
            with pytest.raises(StreamReset):
                await stream.send_bytes(bytes(10_000_000))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            await nursery.start(push, a.endpoint)
        await trio.sleep(60)
        assert await a.endpoint.request(b.peer, Echo("through"), Echo) == Echo("through!")
        buffered = sum(
            stream._raw.available for connection in b.endpoint._connections for stream in connection._streams.values()
        )
        assert 5 * 50_000 < buffered <= 5 * INITIAL_WINDOW
        released.set()


async def test_concurrent_dials_are_one(start, network, autojump_clock):
    a, b = await start(1), await start(2)
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(a.endpoint.request, b.peer, Echo(""), Echo)
    assert len(a.endpoint._connections) == 1


@pytest.mark.parametrize("seeds", [(1, 2), (2, 1)])
async def test_simultaneous_dials_end_in_one_connection_and_lose_nothing(start, seeds, autojump_clock):
    a, b = [await start(seed) for seed in seeds]
    with a.endpoint.watch() as events_a, b.endpoint.watch() as events_b:
        async with trio.open_nursery() as nursery:
            for wait in range(100):
                for this, other in ((a, b), (b, a)):

                    async def ask(this=this, other=other, wait=wait):
                        await trio.sleep(wait * 0.001)
                        assert await this.endpoint.request(other.peer, Echo(""), Echo) == Echo("!")

                    nursery.start_soon(ask)
        await trio.sleep(30)
        for node, other, events in ((a, b, events_a), (b, a, events_b)):
            assert len(node.endpoint._connections) == 1
            assert events.receive_nowait() == PeerConnected(other.peer)
            with pytest.raises(trio.WouldBlock):
                events.receive_nowait()


async def test_a_killed_peer_is_lost_at_once(start, network, autojump_clock):
    a, b = await start(1), await start(2, handlers=[(Count, never)])
    await a.endpoint.connect(b.peer)
    with a.endpoint.watch() as events:
        async with trio.open_nursery() as nursery:

            async def ask():
                with pytest.raises(PeerGone):
                    await a.endpoint.request(b.peer, Count(1), Echo, timeout=1000)

            nursery.start_soon(ask)
            await trio.sleep(0.5)
            network.kill("host2")
        assert (await events.receive()).peer == b.peer
    assert a.endpoint.connected == ()
    with pytest.raises(PeerUnreachable):
        await a.endpoint.request(b.peer, Echo(""), Echo)


@pytest.mark.parametrize("how", ["stall", "partition"])
async def test_a_silent_peer_is_lost_within_seconds(start, network, autojump_clock, how):
    handlers = [(Echo, echo), (Blob, never)]
    a, b = await start(1), await start(2, handlers=handlers)
    await a.endpoint.connect(b.peer)
    await trio.sleep(10)
    assert a.endpoint.is_connected(b.peer)
    if how == "stall":
        network.stall("host2")
    else:
        network.partition(["host1"], ["host2"])
    began = trio.current_time()
    with a.endpoint.watch() as events:
        with pytest.raises(PeerGone, match="silent"):
            async with a.endpoint.open(b.peer, Blob(1), bulk=True) as stream:
                await stream.send_bytes(bytes(5_000_000))
        lost = await events.receive()
    assert isinstance(lost, PeerLost)
    assert "silent" in lost.reason
    assert trio.current_time() - began <= 5
    network.resume("host2")
    network.heal()
    await trio.sleep(5)
    assert await a.endpoint.request(b.peer, Echo(""), Echo) == Echo("!")


async def test_round_trips_are_measured(start, autojump_clock):
    a, b = await start(1), await start(2)
    await a.endpoint.connect(b.peer)
    await trio.sleep(5)
    assert a.endpoint.statistics(b.peer).rtt == pytest.approx(0.02)
    assert b.endpoint.statistics(a.peer).rtt == pytest.approx(0.02)
    assert a.endpoint.statistics(a.peer) is None


async def test_goodbye_names_the_reason(start, autojump_clock):
    a, b = await start(1), await start(2)
    await a.endpoint.request(b.peer, Echo(""), Echo)
    with a.endpoint.watch() as events_a, b.endpoint.watch() as events_b:
        b.endpoint.disconnect(a.peer, "too slow")
        assert "too slow" in (await events_a.receive()).reason
        assert "too slow" in (await events_b.receive()).reason
        await b.endpoint.connect(a.peer)
        assert isinstance(await events_a.receive(), PeerConnected)
        await b.stop()
        assert "shutting down" in (await events_a.receive()).reason


async def test_stopping_takes_a_second_at_most(start, network, autojump_clock):
    a, b, c = await start(1), await start(2), await start(3)
    await a.endpoint.connect(b.peer)
    await a.endpoint.connect(c.peer)
    network.stall("host2")
    await trio.sleep(0.5)
    began = trio.current_time()
    await a.stop()
    assert trio.current_time() - began <= 1
    assert a.endpoint.connected == ()


async def test_a_restarted_peer_replaces_itself(start, network, autojump_clock):
    a, b = await start(1), await start(2)
    await a.endpoint.request(b.peer, Echo(""), Echo)
    with a.endpoint.watch() as events:
        network.partition(["host1"], ["host2"])  # so that nothing is heard of the death
        await b.stop()
        network.heal()
        network.kill("host2")
        again = await start(2)
        await again.endpoint.connect(a.peer)
        assert isinstance(await events.receive(), PeerLost)
        assert await events.receive() == PeerConnected(b.peer)
    assert await a.endpoint.request(b.peer, Echo(""), Echo) == Echo("!")


async def test_wrong_swarm_key_and_wrong_peer(start, autojump_clock):
    a, b, c = await start(1, psk=KEY), await start(2, psk=KEY), await start(3)
    assert await a.endpoint.request(b.peer, Echo(""), Echo) == Echo("!")
    with pytest.raises(HandshakeError):
        await c.endpoint.connect(a.peer)
    d = await start(4)
    stranger = Identity.from_seed(bytes(32)).peer_id
    c.endpoint.learn(stranger, d.endpoint.address)
    with pytest.raises(WrongPeer):
        await c.endpoint.connect(stranger)
    with pytest.raises(PeerUnreachable, match="no address"):
        await c.endpoint.connect(stranger)


async def test_oneself_is_nobody(start, autojump_clock):
    a = await start(1)
    with pytest.raises(ValueError, match="itself"):
        await a.endpoint.request(a.peer, Echo(""), Echo)
    with pytest.raises(PeerUnreachable, match="this very peer"):
        await a.endpoint.connect(a.endpoint.address)


async def test_several_addresses_are_tried(start, network, autojump_clock):
    a, b = await start(1), await start(2)
    network.partition(["host1"], ["host9"])
    a.endpoint.learn(b.peer, Address("host9", 1), Address("host1", 7))
    began = trio.current_time()
    await a.endpoint.connect(b.peer)
    assert trio.current_time() - began < 1
    assert a.endpoint.addresses(b.peer)[0] == Address("host2", 1000)


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


async def test_connections_are_limited(start, autojump_clock):
    a = await start(1, limits=Limits(max_connections=2))
    others = [await start(seed) for seed in (2, 3, 4)]
    for other in others[:2]:
        await other.endpoint.request(a.peer, Echo(""), Echo)
    with pytest.raises(PeerGone, match="too many"):
        await others[2].endpoint.request(a.peer, Echo(""), Echo)
    assert len(a.endpoint.connected) == 2


async def test_more_requests_than_streams_wait_for_their_turn(start, autojump_clock):
    async def slow(request, stream):
        await trio.sleep(1)
        return request

    limits = Limits(max_streams=4)
    a, b = await start(1, limits=limits), await start(2, limits=limits, handlers=[(Echo, slow)])
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(partial(a.endpoint.request, b.peer, Echo(""), Echo, timeout=60))
    assert trio.current_time() >= 10


async def test_cancelled_users_do_no_harm(start, autojump_clock):
    rng = random.Random(5)

    async def blob(request, stream):
        data = bytearray(request.size)
        await stream.receive_into(data)
        await stream.send_bytes(data)
        return Number(len(data))

    a, b = await start(1), await start(2, handlers=[(Echo, echo), (Blob, blob)])

    async def one():
        size = rng.randrange(1, 3_000_000)
        with trio.move_on_after(rng.random() * 0.2):
            async with a.endpoint.open(b.peer, Blob(size), bulk=True) as stream:
                data = rng.randbytes(size)
                back = bytearray(size)
                async with trio.open_nursery() as inner:
                    inner.start_soon(stream.send_bytes, data)
                    await stream.receive_into(back)
                assert back == data

    async with trio.open_nursery() as nursery:
        for _ in range(40):
            nursery.start_soon(one)
            with trio.move_on_after(rng.random() * 0.02):
                await a.endpoint.request(b.peer, Echo("x" * 200_000), Echo)
    assert await a.endpoint.request(b.peer, Echo("fine"), Echo) == Echo("fine!")
    await trio.sleep(1)
    for node in (a, b):
        (connection,) = node.endpoint._connections
        assert connection._mux.idle
        assert connection.streams == 0


async def test_a_cancelled_receive_goes_on_where_it_was(start, autojump_clock):
    async def dribble(request, stream):
        await trio.sleep(2)
        await stream.send(Echo("x" * 500_000))
        return Number(1)

    a, b = await start(1), await start(2, handlers=[(Echo, dribble)])
    async with a.endpoint.open(b.peer, Echo("")) as stream:
        attempts = 0
        while True:
            attempts += 1
            with trio.move_on_after(0.021):
                received = await stream.receive(Echo)
                break
        assert received == Echo("x" * 500_000)
        assert attempts > 95
        assert await stream.receive(Number) == Number(1)


async def test_caps_hold_for_bulk_and_do_not_delay_control(start, autojump_clock):
    async def blob(request, stream):
        await stream.receive_into(bytearray(request.size))
        return Number(request.size)

    handlers = [(Echo, echo), (Blob, blob)]
    a = await start(1, limits=Limits(max_upload=1e6), handlers=handlers)
    b = await start(2, limits=Limits(max_download=5e5), handlers=handlers)
    c = await start(3, handlers=handlers)

    async def push(source, target):
        began = trio.current_time()
        async with source.endpoint.open(target.peer, Blob(10_000_000), bulk=True) as stream:
            await stream.send_bytes(bytes(10_000_000))
            await stream.receive(Number)
        return trio.current_time() - began

    assert 9 < await push(a, c) < 11
    assert await push(c, a) < 1
    assert 16 < await push(c, b) < 21
    async with trio.open_nursery() as nursery:
        nursery.start_soon(push, a, c)
        for _ in range(5):
            await trio.sleep(1)
            began = trio.current_time()
            await a.endpoint.request(c.peer, Echo(""), Echo)
            assert trio.current_time() - began < 0.05


async def test_control_overtakes_bulk_on_a_slow_link(start, network, autojump_clock):
    async def blob(request, stream):
        await stream.receive_into(bytearray(request.size))
        return Number(request.size)

    network.set_link("host1", "host2", latency=0.01, bandwidth=10e6)
    a, b = await start(1), await start(2, handlers=[(Echo, echo), (Blob, blob)])

    async def push():
        async with a.endpoint.open(b.peer, Blob(50_000_000), bulk=True) as stream:
            await stream.send_bytes(bytes(50_000_000))
            await stream.receive(Number)

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(push)
        nursery.start_soon(push)
        await trio.sleep(2)
        for _ in range(5):
            before = trio.current_time()
            await a.endpoint.request(b.peer, Echo(""), Echo)
            assert trio.current_time() - before < 0.35  # the network's own buffer takes 0.1 s to drain
            await trio.sleep(0.5)
    assert trio.current_time() - began < 11.5  # the link is kept busy


async def test_over_tcp(start):
    async def blob(request, stream):
        data = bytearray(request.size)
        await stream.receive_into(data)
        await stream.send_bytes(data)
        return Number(request.size)

    handlers = [(Echo, echo), (Blob, blob)]
    local = Address("127.0.0.1", 0)
    a = await start(1, transport=TcpTransport(), listen=local, handlers=handlers)
    b = await start(2, transport=TcpTransport(), listen=local, handlers=handlers)
    assert await a.endpoint.request(b.peer, Echo("hi"), Echo) == Echo("hi!")
    data = random.Random(1).randbytes(20_000_000)
    async with a.endpoint.open(b.peer, Blob(len(data)), bulk=True) as stream:
        back = bytearray(len(data))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_bytes, data)
            await stream.receive_into(back)
        assert back == data
        assert await stream.receive(Number) == Number(len(data))
    with pytest.raises(PeerUnreachable):
        await a.endpoint.connect(Address("127.0.0.1", 1))
    await b.stop()
    await a.stop()


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
            assert not connection._mux.retired
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


async def test_nothing_is_left_behind(start, network, autojump_clock):
    a, b = await start(1), await start(2)
    tracemalloc.start()
    try:
        await cycle(a, b, 30)
        tasks = trio.lowlevel.current_statistics().tasks_living
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        await cycle(a, b, 200)
        gc.collect()
        # A connection holds 320 000 bytes; trio keeps some cancelled deadlines around for a while.
        assert tracemalloc.get_traced_memory()[0] - before < 200_000
    finally:
        tracemalloc.stop()
    assert trio.lowlevel.current_statistics().tasks_living == tasks
    assert not any(host.streams for host in network._hosts.values())
    for node in (a, b):
        assert not node.endpoint._dials
        assert not node.endpoint._watchers


@pytest.mark.skipif(not pathlib.Path("/proc/self/fd").exists(), reason="counts open files as Linux shows them")
async def test_no_socket_is_left_behind(start):
    local = Address("127.0.0.1", 0)
    a, b = [await start(seed, transport=TcpTransport(), listen=local) for seed in (1, 2)]
    await cycle(a, b, 3)
    files = len(os.listdir("/proc/self/fd"))
    await cycle(a, b, 60)
    assert len(os.listdir("/proc/self/fd")) == files

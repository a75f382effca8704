from __future__ import annotations

import random
from functools import partial

import pytest
import trio

from protocol.endpoint import Limits, PeerConnected, PeerLost
from protocol.errors import (
    HandshakeError,
    PeerGone,
    PeerUnreachable,
    RequestRefused,
    RequestTimeout,
    WrongPeer,
)
from protocol.identity import Identity
from protocol.tcp import TcpTransport
from protocol.transport import Address
from tests.protocol.messages import Blob, Count, Echo, Number, Unserved, echo

KEY = bytes(range(32))


async def never(request, stream):
    await trio.sleep_forever()


@pytest.fixture
def start(start_endpoint):
    return partial(start_endpoint, handlers=((Echo, echo),))


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


async def test_connections_are_limited(start, autojump_clock):
    a = await start(1, limits=Limits(max_connections=2))
    others = [await start(seed) for seed in (2, 3, 4)]
    for other in others[:2]:
        await other.endpoint.request(a.peer, Echo(""), Echo)
    with pytest.raises(PeerGone, match="too many"):
        await others[2].endpoint.request(a.peer, Echo(""), Echo)
    assert len(a.endpoint.connected) == 2


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

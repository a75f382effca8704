"""Two peers that cannot reach each other, and one that passes their bytes on."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from protocol import wire
from protocol.channel import handshake
from protocol.endpoint import Hello, Limits, PathChanged, PeerConnected, PeerLost
from protocol.errors import PeerGone, PeerUnreachable, RequestRefused
from protocol.identity import Identity, PeerId
from protocol.relay import Connect, Incoming, Ready, RelayedStream
from protocol.stream import Stream
from protocol.transport import Address
from tests.protocol.messages import Blob, Echo, echo


async def take(request, stream):
    data = bytearray(request.size)
    await stream.receive_into(data)
    return Echo(f"{sum(data)}")


@pytest.fixture
def start(start_endpoint):
    return partial(start_endpoint, handlers=((Echo, echo), (Blob, take)))


@pytest.fixture
def apart(start, network):
    """Two peers that cannot reach each other, and a third that both are connected to."""

    async def make(*, limits=None, relay_limits=None):
        a, b = await start(1, limits=limits), await start(2, limits=limits)
        relay = await start(3, limits=relay_limits)
        network.partition(["host1"], ["host2"])
        await a.endpoint.connect(relay.peer)
        await b.endpoint.connect(relay.peer)
        await trio.sleep(0.1)  # the relay knows a little later
        return a, b, relay

    return make


async def test_a_relay_connects_those_who_cannot_reach_each_other(apart, autojump_clock):
    a, b, relay = await apart()
    with a.endpoint.watch() as events:
        began = trio.current_time()
        assert await a.endpoint.request(b.peer, Echo("hi"), Echo) == Echo("hi!")
        assert trio.current_time() - began < 2  # the direct dial would take ten seconds to fail
        assert events.receive_nowait() == PeerConnected(b.peer, "relayed")
    assert await b.endpoint.request(a.peer, Echo("ho"), Echo) == Echo("ho!")
    assert a.endpoint.path(b.peer) == b.endpoint.path(a.peer) == "relayed"
    assert a.endpoint.path(relay.peer) == "direct"
    assert a.endpoint.statistics(b.peer).path == "relayed"


async def test_data_go_through_a_relay(apart, autojump_clock):
    a, b, _ = await apart()
    data = bytes(range(256)) * 20_000
    async with a.endpoint.open(b.peer, Blob(len(data)), bulk=True) as stream:
        await stream.send_bytes(data)
        assert await stream.receive(Echo) == Echo(f"{sum(data)}")
    # Counted once, although they were sent inside another connection.
    assert len(data) < a.endpoint.bytes_sent < 1.1 * len(data)


async def test_a_direct_connection_replaces_a_relayed_one_and_loses_nothing(apart, network, autojump_clock):
    a, b, _ = await apart()
    data = bytes(2_000_000)
    with a.endpoint.watch() as events:
        async with a.endpoint.open(b.peer, Blob(len(data)), bulk=True) as stream:
            await stream.send_bytes(data[:1_000_000])
            network.heal()
            await b.endpoint._redial(a.peer)
            await trio.sleep(0.1)
            assert a.endpoint.path(b.peer) == b.endpoint.path(a.peer) == "direct"
            assert await a.endpoint.request(b.peer, Echo(""), Echo) == Echo("!")
            await stream.send_bytes(data[1_000_000:])
            assert await stream.receive(Echo) == Echo("0")
        await trio.sleep(15)  # a replaced connection stays as long as somebody may still be reading
        assert len(a.endpoint._connections) == len(b.endpoint._connections) == 2  # with that to the relay
        assert [events.receive_nowait() for _ in range(2)] == [
            PeerConnected(b.peer, "relayed"),
            PathChanged(b.peer, "direct"),
        ]
        with pytest.raises(trio.WouldBlock):
            events.receive_nowait()


async def test_relayed_peers_keep_trying_to_connect_directly(apart, network, autojump_clock):
    a, b, _ = await apart()
    await a.endpoint.connect(b.peer)
    await trio.sleep(100)
    assert a.endpoint.path(b.peer) == "relayed"
    network.heal()
    await trio.sleep(300)
    assert a.endpoint.path(b.peer) == b.endpoint.path(a.peer) == "direct"


async def test_a_direct_connection_is_not_replaced_by_a_relayed_one(apart, network, autojump_clock):
    a, b, relay = await apart()
    network.heal()
    await a.endpoint.connect(b.peer)
    stream = await a.endpoint._relay.dial(relay.peer, b.peer)
    b_links = len(b.endpoint._connections)
    await stream.aclose()
    assert a.endpoint.path(b.peer) == b.endpoint.path(a.peer) == "direct"
    assert len(b.endpoint._connections) == b_links


async def test_a_direct_connection_that_has_gone_silent_is_replaced_by_a_relayed_one(start, network, autojump_clock):
    a, b, relay = [await start(seed) for seed in (1, 2, 3)]
    await a.endpoint.connect(b.peer)
    for node in (a, b):
        await node.endpoint.connect(relay.peer)
    await trio.sleep(20)
    network.partition(["host1"], ["host2"])
    await trio.sleep(2)
    with b.endpoint.watch() as events:
        a.endpoint.disconnect(b.peer, "it is silent")  # one side notices earlier than the other
        assert await a.endpoint.request(b.peer, Echo(""), Echo) == Echo("!")
        await trio.sleep(30)
        assert a.endpoint.path(b.peer) == b.endpoint.path(a.peer) == "relayed"
        assert events.receive_nowait() == PathChanged(a.peer, "relayed")
        with pytest.raises(trio.WouldBlock):
            events.receive_nowait()


async def test_why_a_peer_cannot_be_reached(apart, network, autojump_clock):
    a, b, _ = await apart()
    await b.stop()
    network.heal()
    with pytest.raises(PeerUnreachable, match="nobody listens there; none of 1 connected peers relays to it"):
        await a.endpoint.connect(b.peer)


async def test_both_notice_when_the_relay_dies(apart, network, autojump_clock):
    a, b, relay = await apart()
    await a.endpoint.connect(b.peer)
    with a.endpoint.watch() as here, b.endpoint.watch() as there:
        with pytest.raises(PeerGone):
            async with a.endpoint.open(b.peer, Blob(10**9), bulk=True) as stream:
                await stream.send_bytes(bytes(1_000_000))
                network.kill("host3")
                await stream.send_bytes(bytes(10**7))
        for events, other in ((here, b), (there, a)):
            assert {(await events.receive()).peer for _ in range(2)} == {other.peer, relay.peer}
    assert a.endpoint.connected == b.endpoint.connected == ()
    with pytest.raises(PeerUnreachable):
        await a.endpoint.connect(b.peer)


async def test_the_end_of_a_relayed_connection_is_told(apart, autojump_clock):
    a, b, relay = await apart()
    await a.endpoint.connect(b.peer)
    with b.endpoint.watch() as events:
        a.endpoint.disconnect(b.peer, "enough")
        while not isinstance(lost := await events.receive(), PeerLost):
            pass
    assert "enough" in lost.reason
    await trio.sleep(6)
    assert relay.endpoint._relay.circuits == 0


async def test_data_that_the_relay_alters_end_the_connection(apart, monkeypatch, autojump_clock):
    a, b, relay = await apart()
    await a.endpoint.connect(b.peer)
    seen = bytearray()
    send = Stream.send_bytes

    async def alter(stream, data):
        changed = bytearray(data)
        seen.extend(changed)
        if armed and len(changed) > 100:
            changed[50] = (changed[50] + 1) % 256  # who has sent it and the relay do not undo each other's
        await send(stream, changed)

    armed = False
    monkeypatch.setattr("protocol.relay.Stream.send_bytes", alter)  # that of the ends as well
    assert await a.endpoint.request(b.peer, Echo("a secret" * 50), Echo, timeout=5)
    assert b"a secret" not in seen
    armed = True
    with b.endpoint.watch() as events:
        with pytest.raises(PeerGone):
            await a.endpoint.request(b.peer, Echo("a secret" * 50), Echo, timeout=5)
        assert (await events.receive()).peer == a.peer
    # Whose fault it was is unknown: nobody is banned.
    assert a.endpoint.is_connected(relay.peer)
    monkeypatch.undo()
    for _ in range(4):
        assert await a.endpoint.request(b.peer, Echo(""), Echo) == Echo("!")


async def refusal(node, relay, target):
    with pytest.raises(RequestRefused) as caught:
        await node.endpoint._relay.dial(relay.peer, target)
    return caught.value.code


async def test_relays_refuse(apart, start, network, autojump_clock):
    a, b, relay = await apart(relay_limits=Limits(max_circuits=4, max_circuits_of_peer=2))
    stranger = PeerId(bytes(32))
    assert await refusal(a, relay, stranger) == "unknown_peer"
    assert await refusal(a, relay, a.peer) == "unknown_peer"
    circuits = [await a.endpoint._relay.dial(relay.peer, b.peer) for _ in range(2)]
    assert await refusal(a, relay, b.peer) == "busy"
    for circuit in circuits:
        await circuit.aclose()
    await trio.sleep(11)
    relay.endpoint.relaying = False
    assert await refusal(a, relay, b.peer) == "no_relay"


async def test_nobody_gets_all_circuits(start, network, autojump_clock):
    relay = await start(9, limits=Limits(max_circuits=4, max_circuits_of_peer=2))
    target = await start(8)
    await target.endpoint.connect(relay.peer)
    crowd = [await start(seed, transport=network.transport("crowd"), listen=Address("crowd", seed)) for seed in (1, 2)]
    others = [await start(seed) for seed in (3, 4, 5)]
    for node in (*crowd, *others):
        await node.endpoint.connect(relay.peer)
    await trio.sleep(0.1)
    await crowd[0].endpoint._relay.dial(relay.peer, target.peer)
    await crowd[1].endpoint._relay.dial(relay.peer, target.peer)
    assert await refusal(crowd[1], relay, target.peer) == "busy"  # half of all for one address
    await others[0].endpoint._relay.dial(relay.peer, target.peer)
    await others[1].endpoint._relay.dial(relay.peer, target.peer)
    assert await refusal(others[2], relay, target.peer) == "busy"
    await trio.sleep(20)  # nobody shakes hands: the target ends them
    assert relay.endpoint._relay.circuits == 0


async def test_what_comes_through_a_relay_counts_for_its_address(start, network, autojump_clock):
    node = await start(9, limits=Limits(max_connections=16))
    crowd = [await start(seed, transport=network.transport("crowd"), listen=Address("crowd", seed)) for seed in (1, 2)]
    features = wire.encode(Hello(bytes(8), 1, 0))
    for number in range(20):  # two relays that have invented those who want to reach us
        identity = Identity.from_seed(bytes([100 + number]) * 32)
        liar = crowd[number % 2].endpoint
        await liar.connect(node.peer)
        stream = await liar._links.get(node.peer).connection.open(bulk=True)
        await stream.send(Incoming(identity.peer_id))
        await stream.receive(Ready)
        await handshake(RelayedStream(stream, "crowd"), identity, initiator=True, features=features)
    await trio.sleep(0.1)
    assert 4 < len(node.endpoint.connected) <= 8
    for seed in (3, 4):
        honest = await start(seed)
        assert await honest.endpoint.request(node.peer, Echo("hi"), Echo) == Echo("hi!")


async def test_circuits_without_a_byte_end(apart, autojump_clock):
    async def accept(stream, source):
        pass

    a, b, relay = await apart()
    b.endpoint._relay._accept = accept  # in league with the other side
    circuit = await a.endpoint._relay.dial(relay.peer, b.peer)
    await trio.sleep(20)
    assert relay.endpoint._relay.circuits == 1
    with pytest.raises(PeerGone, match="nothing was sent"):
        await circuit.receive_into(memoryview(bytearray(1)))
    await trio.sleep(1)
    assert relay.endpoint._relay.circuits == 0


async def test_who_does_not_relay_is_not_asked(apart, autojump_clock):
    a, b, relay = await apart(relay_limits=Limits(relay=False))
    relay.endpoint.relaying = True  # cannot be: the limits say no
    assert not a.endpoint._relay.relays(b.peer)
    with pytest.raises(PeerUnreachable):
        await a.endpoint.connect(b.peer)


async def test_nothing_is_relayed_over_a_relayed_connection(apart, start, network, autojump_clock):
    a, b, _ = await apart()
    await a.endpoint.connect(b.peer)
    c = await start(4)
    await c.endpoint.connect(b.peer)
    for request in (Connect(c.peer), Incoming(c.peer)):
        with pytest.raises(RequestRefused) as caught:
            await a.endpoint.request(b.peer, request, Ready)
        assert caught.value.code == "nested"


async def test_circuits_have_a_rate_and_an_end(apart, autojump_clock):
    a, b, _ = await apart(relay_limits=Limits(max_relay_rate=1e6, max_relayed=6_000_000))
    began = trio.current_time()
    data = bytes(4_000_000)
    async with a.endpoint.open(b.peer, Blob(len(data)), bulk=True) as stream:
        await stream.send_bytes(data)
        assert await stream.receive(Echo) == Echo("0")
    assert trio.current_time() - began > 3.5
    with pytest.raises(PeerGone):
        async with a.endpoint.open(b.peer, Blob(len(data)), bulk=True) as stream:
            await stream.send_bytes(data)
            await stream.receive(Echo)
    assert await a.endpoint.request(b.peer, Echo(""), Echo) == Echo("!")  # over a new circuit


async def test_nothing_is_left_behind_by_circuits(apart, network, autojump_clock):
    a, b, relay = await apart()
    await trio.sleep(1)
    tasks = trio.lowlevel.current_statistics().tasks_living
    for _ in range(20):
        assert await a.endpoint.request(b.peer, Echo(""), Echo) == Echo("!")
        a.endpoint.disconnect(b.peer, "enough")
        await trio.sleep(1)
    await trio.sleep(20)
    assert trio.lowlevel.current_statistics().tasks_living == tasks
    for node in (a, b, relay):
        assert not any(connection.streams for connection in node.endpoint._connections)
    assert relay.endpoint._relay.circuits == 0

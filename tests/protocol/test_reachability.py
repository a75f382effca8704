"""Whether others can connect to us, as they say."""

from __future__ import annotations

import random

import pytest
import trio

from protocol.endpoint import Limits
from protocol.errors import HandshakeError, PeerUnreachable, RequestRefused
from protocol.reachability import DialBack, DialBackResult, Reachability


@pytest.fixture
def start(start_endpoint):
    """Starts an endpoint, and what asks whether it can be reached."""

    async def make(seed, **options):
        node = await start_endpoint(seed, **options)
        verdicts = []
        return node, Reachability(node.endpoint, rng=random.Random(seed), report=verdicts.append), verdicts

    return make


async def meet(node, others):
    """Has a node dial others."""
    for other, *_ in others:
        await node.endpoint.connect(other.peer)


@pytest.fixture
def behind_a_wall(network):
    """Makes that new connections to a host fail. Those that there are go on."""

    def wall(host):
        connect = network.connect

        def refuse(source, address):
            if address.host == host:
                raise PeerUnreachable(f"there is a wall around {host}")
            return connect(source, address)

        network.connect = refuse

    return wall


async def test_who_is_reached_is_public(start, nursery, autojump_clock):
    a, asking, verdicts = await start(1)
    others = [await start(seed) for seed in (2, 3, 4)]
    nursery.start_soon(asking.run)
    await meet(a, others)
    await trio.sleep(10)
    assert verdicts == ["public"]
    assert asking.verdict == "public"
    assert a.endpoint.relaying
    assert len(a.endpoint.connected) == 3
    assert len(a.endpoint._connections) == 3  # calls are no connections


async def test_who_is_not_reached_is_private_and_does_not_relay(start, nursery, behind_a_wall, network, autojump_clock):
    a, asking, verdicts = await start(1)
    others = [await start(seed) for seed in (2, 3, 4)]
    await meet(a, others)
    behind_a_wall("host1")
    nursery.start_soon(asking.run)
    await trio.sleep(20)
    assert verdicts == ["private"]
    assert not a.endpoint.relaying
    del network.connect  # the wall is gone
    await trio.sleep(1000)
    assert verdicts == ["private", "public"]
    assert a.endpoint.relaying


async def test_liars_are_outvoted(start, start_endpoint, behind_a_wall, autojump_clock):
    async def say_no(request, stream):
        return DialBackResult(False)

    async def say_yes(request, stream):
        return DialBackResult(True)

    a, asking, _ = await start(1)
    honest = [await start(seed) for seed in (2, 3)]
    pessimist = await start_endpoint(4, handlers=[(DialBack, say_no)])
    await meet(a, [*honest, (pessimist,)])
    assert await asking.check() == "public"
    a.endpoint.disconnect(pessimist.peer, "enough")
    optimist = await start_endpoint(5, handlers=[(DialBack, say_yes)])
    await meet(a, [(optimist,)])
    behind_a_wall("host1")
    assert await asking.check() == "private"  # who has not called has no vote
    for other, *_ in honest:
        a.endpoint.disconnect(other.peer, "enough")
    assert await asking.check() == "unknown"


async def test_nobody_can_tell_who_is_alone(start, autojump_clock):
    _, asking, _ = await start(1)
    assert await asking.check() == "unknown"


async def test_dials_for_others_are_limited(start, autojump_clock):
    a, *_ = await start(1)
    b, *_ = await start(2)
    port = a.endpoint.address.port
    for _ in range(6):
        assert await a.endpoint.request(b.peer, DialBack(port, bytes(16)), DialBackResult) == DialBackResult(True)
    with pytest.raises(RequestRefused) as caught:
        await a.endpoint.request(b.peer, DialBack(port, bytes(16)), DialBackResult)
    assert caught.value.code == "busy"


async def test_only_the_asking_peer_counts_as_reached(start, autojump_clock):
    a, *_ = await start(1)
    b, *_ = await start(2)
    assert await a.endpoint.request(b.peer, DialBack(9, bytes(16)), DialBackResult) == DialBackResult(False)
    c, *_ = await start(3, limits=Limits(max_connections=1))
    await a.endpoint.connect(b.peer)
    with pytest.raises(PeerUnreachable):
        await b.endpoint.call(c.peer, c.endpoint.address.port, bytes(16))  # it is not connected
    with pytest.raises(HandshakeError):
        await _call_elsewhere(b, a, c)


async def _call_elsewhere(caller, peer, other):
    """Calls a peer where another one answers."""
    dial = caller.endpoint._transport.dial

    async def misled(address, *, local_port=None):
        return await dial(other.endpoint.address, local_port=local_port)

    caller.endpoint._transport.dial = misled
    await caller.endpoint.call(peer.peer, 1, bytes(16))

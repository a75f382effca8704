"""Two peers that cannot reach each other, and one that passes their bytes on."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from protocol.endpoint import PeerConnected
from protocol.transport import Address
from protocol.wire import message

HOST1, HOST2 = Address("host1", 1000), Address("host2", 1000)


@message("test.echo")
class Echo:
    text: str


@message("test.blob")
class Blob:
    size: int


async def echo(request, stream):
    return Echo(request.text + "!")


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

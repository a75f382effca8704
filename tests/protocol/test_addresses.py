"""What peers tell each other about where they are."""

from __future__ import annotations

import pytest
import trio

from protocol.errors import PeerUnreachable
from protocol.transport import Address

ANNOUNCED = Address("host9", 9)


async def test_an_announced_address_goes_out_to_everybody(start_endpoint, autojump_clock):
    a = await start_endpoint(1, announce=ANNOUNCED)
    b, c = await start_endpoint(2), await start_endpoint(3)
    await a.endpoint.connect(b.peer)
    await c.endpoint.connect(a.peer)
    assert a.endpoint.advertised() == ANNOUNCED
    assert ANNOUNCED in b.endpoint.addresses(a.peer)
    assert ANNOUNCED in c.endpoint.addresses(a.peer)
    assert c.endpoint.addresses(a.peer)[0] == Address("host1", 1000)  # where it was reached goes first


async def test_the_host_that_most_see_us_at_is_advertised(start_endpoint, autojump_clock):
    a, b, c = [await start_endpoint(seed) for seed in (1, 2, 3)]
    assert a.endpoint.advertised() is None
    await b.endpoint.connect(a.peer)
    assert a.endpoint.advertised() is None  # whom others dial they know at the address that they dialled
    assert b.endpoint.advertised() == Address("host2", 1000)
    await a.endpoint.connect(c.peer)
    assert a.endpoint.advertised() == Address("host1", 1000)


async def test_peers_behind_one_router_learn_their_local_addresses(start_endpoint, network, autojump_clock):
    a, b = [await start_endpoint(seed, local_host=f"lan{seed}") for seed in (1, 2)]
    c = await start_endpoint(3)
    for node in (a, b):
        await node.endpoint.connect(c.peer)
        node.endpoint._links.host_seen = lambda: "router"
    network.partition(["host1"], ["host2"])
    await a.endpoint.connect(b.peer)
    await trio.sleep(0.1)
    assert Address("lan2", 1000) in a.endpoint.addresses(b.peer)
    assert Address("lan1", 1000) in b.endpoint.addresses(a.peer)
    assert Address("lan1", 1000) not in c.endpoint.addresses(a.peer)


async def test_probes_are_no_connections(start_endpoint, autojump_clock):
    a, b = await start_endpoint(1), await start_endpoint(2)
    await a.endpoint.connect(b.peer)
    await trio.sleep(0.1)
    for _ in range(100):  # more than are held
        await b.endpoint.call(a.peer, 1000, b"word")
    assert len(a.endpoint._connections) == 1
    with pytest.raises(PeerUnreachable):  # ports cannot be chosen on this network
        await b.endpoint.probe(a.endpoint.address, 7)


async def test_who_was_dialled_at_the_port_that_its_router_maps_is_connected_through_it(start_endpoint, autojump_clock):
    a, b = await start_endpoint(1), await start_endpoint(2)
    a.endpoint.mapped = a.endpoint.address  # on this network, an address leads where it says
    await b.endpoint.connect(a.endpoint.mapped)
    await trio.sleep(0.1)
    assert a.endpoint.path(b.peer) == b.endpoint.path(a.peer) == "mapped"


async def test_who_was_dialled_elsewhere_or_has_dialled_is_connected_directly(start_endpoint, autojump_clock):
    a, b, c = [await start_endpoint(seed) for seed in (1, 2, 3)]
    a.endpoint.mapped = ANNOUNCED
    await b.endpoint.connect(a.endpoint.address)
    await a.endpoint.connect(c.peer)
    await trio.sleep(0.1)
    for node in (b, c):
        assert a.endpoint.path(node.peer) == node.endpoint.path(a.peer) == "direct"
        assert ANNOUNCED in node.endpoint.addresses(a.peer)

"""Peers whose address changes while they are connected."""

from __future__ import annotations

import random
from functools import partial

import pytest
import trio

from protocol.errors import PeerGone, PeerUnreachable, ShoalError
from protocol.transport import Address
from tests.protocol.messages import Echo, echo


@pytest.fixture
def start(start_endpoint):
    return partial(start_endpoint, handlers=((Echo, echo),))


async def test_hosts_of_the_network_move(network, autojump_clock):
    transport = network.transport("old")
    listener = await transport.listen(Address("old", 5))
    dialled = await network.transport("other").dial(listener.address)
    accepted = await listener.accept()
    await accepted.send(b"before")
    await trio.sleep(1)
    network.move("old", "new")
    assert listener.address == Address("new", 5)
    buffer = bytearray(10)
    assert await dialled.receive_into(memoryview(buffer)) == 6
    await dialled.send(b"into the void")
    with trio.move_on_after(1000) as patience:
        await accepted.receive_into(memoryview(buffer))
    assert patience.cancelled_caught
    with pytest.raises(PeerUnreachable):
        await network.transport("other").dial(Address("old", 5))
    again = await network.transport("other").dial(Address("new", 5))
    await again.send(b"after")
    assert await (await listener.accept()).receive_into(memoryview(buffer)) == 5
    network.move("new", "old")
    assert await accepted.receive_into(memoryview(buffer)) == 10  # it is heard again where it was


@pytest.mark.parametrize("who", ["mover", "other"])
@pytest.mark.parametrize("age", [1.0, 60.0])
@pytest.mark.parametrize("notices", [0.5, 3.0, 10.0])
@pytest.mark.parametrize("seeds", [(1, 2), (2, 1)])
async def test_a_peer_that_moves_comes_back_from_elsewhere(start, network, autojump_clock, who, age, notices, seeds):
    """Whoever dialled the connection, and whether or not its end was noticed when the peer dials from elsewhere."""
    mover, other = [await start(seed) for seed in seeds]
    dialler, dialled = (mover, other) if who == "mover" else (other, mover)
    await dialler.endpoint.connect(dialled.peer)
    await trio.sleep(age)
    host = mover.endpoint.address.host
    network.move(host, "elsewhere")
    await trio.sleep(notices)
    await mover.endpoint.connect(other.endpoint.address)
    began = trio.current_time()
    for this, that in ((mover, other), (other, mover)):
        await answers(this, that)
    assert trio.current_time() - began < 10
    await trio.sleep(60)
    assert len(mover.endpoint._connections) == len(other.endpoint._connections) == 1
    assert Address("elsewhere", 1000) in other.endpoint.addresses(mover.peer)


async def answers(this, that):
    """Asks until there is an answer, as those do who use an endpoint."""
    while True:
        try:
            return await this.endpoint.request(that.peer, Echo(""), Echo, timeout=2)
        except ShoalError:
            await trio.sleep(0.5)


@pytest.mark.parametrize("seed", range(5))
async def test_peers_that_all_move_about_find_each_other_through_one_that_stays(start, network, autojump_clock, seed):
    rng = random.Random(seed)
    stays, *movers = [await start(number) for number in (1, 2, 3)]
    places = {node.peer: node.endpoint.address.host for node in movers}
    for count in range(6):
        node = rng.choice(movers)
        network.move(places[node.peer], f"place{count}")
        places[node.peer] = f"place{count}"
        await trio.sleep(rng.random() * 8)
        for this in movers:
            await answers(this, stays)
            await answers(stays, this)


async def test_what_was_under_way_when_a_peer_moved_fails_soon(start, network, autojump_clock):
    async def never(request, stream):
        await trio.sleep_forever()

    a, b = await start(1), await start(2, handlers=[(Echo, never)])

    async def move():
        await trio.sleep(5)
        network.move("host2", "elsewhere")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(move)
        with pytest.raises(PeerGone, match="silent"):
            await a.endpoint.request(b.peer, Echo(""), Echo, timeout=60)
    assert trio.current_time() < 11

import random

import pytest
import trio

from dht import DHT
from peer.membership import PATIENCE, Membership
from protocol.identity import Identity

RUN = b"r" * 32


@pytest.fixture
async def members(mesh, nursery):
    """`await members(n)` makes n members on one network; they have not met yet."""

    async def make(count, **options):
        network = await mesh(count)
        found = []
        for number, endpoint in enumerate(network.endpoints):
            identity = Identity.from_seed(bytes([number + 1]) * 32)
            dht = DHT(endpoint, identity, rng=random.Random(number))
            membership = Membership(endpoint, dht, RUN, rng=random.Random(number), **options)
            await nursery.start(dht.run)
            await nursery.start(membership.run)
            found.append(membership)
        return network, found

    return make


def met(membership):
    return [member.peer for member in membership.others]


async def test_members_meet(members, autojump_clock):
    network, (one, two) = await members(2)
    one.meet([network.endpoints[1].peer_id])
    await one.settled()
    assert met(one) == [network.endpoints[1].peer_id]
    assert met(two) == [network.endpoints[0].peer_id]


async def test_nobody_waits_long_for_a_member_that_has_gone_silent(members, autojump_clock):
    network, (one, _, _) = await members(3)
    one.meet(endpoint.peer_id for endpoint in network.endpoints[1:])
    await one.settled()
    network.network.stall("h2")
    while len(met(one)) == 2:
        await one.changes()
    started = trio.current_time()
    await one.settled()
    assert trio.current_time() - started <= PATIENCE + 0.1
    started = trio.current_time()
    await one.settled()  # although it is still being dialled
    assert trio.current_time() == started
    assert met(one) == [network.endpoints[1].peer_id]
    network.network.resume("h2")


async def test_nobody_waits_for_the_second_dial_of_a_member_that_is_dead(members, autojump_clock):
    network, (one, _) = await members(2)
    one.meet([network.endpoints[1].peer_id])
    await one.settled()
    network.network.kill("h1")
    while met(one):
        await one.changes()
    started = trio.current_time()
    await one.settled()
    assert trio.current_time() - started < 1.0  # and dialled again later


async def test_a_run_with_a_list_refuses_others(members, autojump_clock):
    listed = Identity.from_seed(bytes([1]) * 32).peer_id
    network, (one, two) = await members(2, allowed=frozenset({listed}))
    two.meet([listed])
    await two.settled()
    assert two.refusal.code == "not_allowed"
    assert met(one) == met(two) == []


async def test_a_run_that_is_full_refuses_others(members, autojump_clock):
    network, (one, two, three) = await members(3, limit=1)
    first, second, third = (endpoint.peer_id for endpoint in network.endpoints)
    two.meet([first])
    await two.settled()
    three.meet([first])
    await three.settled()
    assert three.refusal.code == "full"
    assert (met(one), met(two), met(three)) == ([second], [first], [])

"""Whole swarms on simulated time."""

from __future__ import annotations

import hashlib
import random

import pytest
import trio

from dht.ids import distance
from dht.node import DhtSettings
from protocol.endpoint import Limits

KEY = hashlib.sha256(b"members of a run").digest()


@pytest.fixture
def swarm(swarm):
    swarm.limits = Limits(heartbeat=20.0, dead_after=60.0)  # many connections; what is tested is not the heartbeat
    return swarm


async def test_everybody_finds_what_everybody_put(autojump_clock, swarm):
    nodes = await swarm.grow(30)
    rng = random.Random(1)
    async with trio.open_nursery() as nursery:
        for node in nodes:
            nursery.start_soon(node.dht.put, KEY, node.host.encode())
    for node in rng.sample(nodes, 10):
        found = await node.dht.get(KEY)
        assert {signer: record.value for signer, record in found.items()} == {n.id: n.host.encode() for n in nodes}


async def test_records_are_kept_by_those_closest_to_them_and_found_from_anywhere(autojump_clock, swarm):
    swarm.settings = DhtSettings(k=4)  # tables hold a part of the swarm only
    nodes = await swarm.grow(60)
    assert max(len(node.dht._table) for node in nodes) < 40
    rng = random.Random(2)
    for _ in range(20):
        key = rng.randbytes(32)
        assert await rng.choice(nodes).dht.put(key, key[:8]) == 4
        (record,) = (await rng.choice(nodes).dht.get(key)).values()
        assert record.value == key[:8]
        holders = {node.id for node in nodes if record in [held.record for held in node.dht._store]}
        closest = sorted((node.id for node in nodes), key=lambda peer, key=key: distance(peer, key))
        assert closest[0] in holders
        assert holders <= set(closest[:6])


async def test_what_is_published_survives_the_death_of_half_the_swarm(autojump_clock, swarm):
    nodes = await swarm.grow(30)
    for node in nodes:
        node.dht.publish(KEY, node.host.encode(), ttl=60)
    await trio.sleep(10)
    rng = random.Random(3)
    dead = rng.sample(nodes, 15)
    swarm.kill(*dead)
    await trio.sleep(75)
    for node in rng.sample(swarm.nodes, 5):
        assert set(await node.dht.get(KEY)) == {n.id for n in swarm.nodes}
    newcomer = await swarm.add(swarm.nodes[0])
    assert set(await newcomer.dht.get(KEY)) == {n.id for n in swarm.nodes if n is not newcomer}


async def test_two_halves_of_a_cut_network_find_each_other_again(autojump_clock, swarm):
    swarm.limits = Limits()
    nodes = await swarm.grow(10)
    for node in nodes:
        node.dht.publish(KEY, node.host.encode(), ttl=60)
    await trio.sleep(5)
    left, right = nodes[:5], nodes[5:]
    swarm.network.partition([n.host for n in left], [n.host for n in right])
    await trio.sleep(150)
    for half in (left, right):
        for node in half:
            assert set(await node.dht.get(KEY)) == {n.id for n in half}
    swarm.network.heal()
    await trio.sleep(75)
    for node in nodes:
        assert set(await node.dht.get(KEY)) == {n.id for n in nodes}


async def test_two_swarms_that_grew_apart_merge_through_a_bootstrap_peer_that_comes_back(autojump_clock, swarm):
    first, second = await swarm.add(), await swarm.add()
    left = [first, await swarm.add(first)]
    right = [second, await swarm.add(second)]
    third = await swarm.add(first, second)
    for node in (*left, *right):
        node.dht.publish(KEY, b"here", ttl=60)
    await trio.sleep(60)
    assert set(await third.dht.get(KEY)) == {n.id for n in (*left, *right)}

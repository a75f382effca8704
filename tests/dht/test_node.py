from __future__ import annotations

import hashlib
import random

import attrs
import pytest
import trio
import trio.testing

from dht.ids import Contact
from dht.messages import Copy, Fetch, Fetched, Find, Found, Ping, Pong, Store, Stored
from dht.node import DHT, DhtSettings
from dht.records import MAX_VALUE, Record
from protocol.endpoint import Endpoint
from protocol.errors import PeerUnreachable, RequestRefused, ShoalError
from protocol.identity import Identity, PeerId
from protocol.tcp import TcpTransport
from protocol.transport import Address

KEY = hashlib.sha256(b"a key").digest()


def values(found: dict[PeerId, Record]) -> dict[PeerId, bytes]:
    return {signer: record.value for signer, record in found.items()}


# A swarm of one and of two.


async def test_one_peer_alone_keeps_and_finds_its_own_records(autojump_clock, swarm):
    node = await swarm.add()
    assert await node.dht.bootstrap([]) == 0
    assert await node.dht.find(KEY) == []
    assert await node.dht.put(KEY, b"mine") == 1
    assert values(await node.dht.get(KEY)) == {node.id: b"mine"}
    await trio.sleep(121)
    assert await node.dht.get(KEY) == {}


async def test_two_peers_hold_records_for_each_other(autojump_clock, swarm):
    first = await swarm.add()
    second = await swarm.add(first)
    assert await first.dht.put(KEY, b"one") == 2
    assert await second.dht.put(KEY, b"two") == 2
    for node in (first, second):
        assert values(await node.dht.get(KEY)) == {first.id: b"one", second.id: b"two"}
    swarm.kill(first)
    assert values(await second.dht.get(KEY)) == {first.id: b"one", second.id: b"two"}


async def test_it_works_over_tcp(nursery):
    nodes = []
    for seed in (b"1", b"2"):
        identity = Identity.from_seed(seed * 32)
        endpoint = Endpoint(identity, TcpTransport(), rng=random.Random(seed[0]))
        dht = DHT(endpoint, identity, rng=random.Random(seed[0]))
        address = await nursery.start(endpoint.run, Address("127.0.0.1", 0))
        await nursery.start(dht.run)
        nodes.append((identity.peer_id, address, dht))
    (first, address, dht), (second, _, other) = nodes
    with trio.fail_after(20):
        assert await other.bootstrap([(first, address)]) == 1
        assert await other.put(KEY, b"value") == 2
        assert values(await dht.get(KEY)) == {second: b"value"}


# Sequence, withdrawal, life.


async def test_the_last_value_wins_everywhere(autojump_clock, swarm):
    nodes = await swarm.grow(4)
    for value in (b"one", b"two", b"three"):
        await nodes[1].dht.put(KEY, value)
        for node in nodes:
            assert values(await node.dht.get(KEY)) == {nodes[1].id: value}


async def test_puts_at_the_same_time_end_in_the_later_one(autojump_clock, swarm):
    nodes = await swarm.grow(4)
    async with trio.open_nursery() as nursery:
        for value in (b"one", b"two", b"three"):
            nursery.start_soon(nodes[1].dht.put, KEY, value)
            await trio.testing.wait_all_tasks_blocked()
    assert values(await nodes[2].dht.get(KEY)) == {nodes[1].id: b"three"}


async def test_a_restarted_peer_goes_on_from_the_sequence_that_holders_remember(autojump_clock, swarm):
    nodes = await swarm.grow(3)
    mortal = await swarm.add(nodes[0], seed=77)
    for value in (b"one", b"two", b"three"):
        await mortal.dht.put(KEY, value)
    swarm.kill(mortal)
    reborn = await swarm.add(nodes[0], seed=77)
    assert await reborn.dht.put(KEY, b"four") == 4
    found = await nodes[1].dht.get(KEY)
    assert values(found) == {reborn.id: b"four"}
    assert found[reborn.id].sequence == 4


async def test_what_is_published_outlives_its_time_until_it_is_withdrawn(autojump_clock, swarm, eventually):
    nodes = await swarm.grow(4)
    nodes[1].dht.publish(KEY, b"here", ttl=30)
    await trio.sleep(200)
    assert values(await nodes[2].dht.get(KEY)) == {nodes[1].id: b"here"}
    nodes[1].dht.publish(KEY, b"moved", ttl=30)
    await trio.sleep(5)
    assert values(await nodes[2].dht.get(KEY)) == {nodes[1].id: b"moved"}
    await nodes[1].dht.withdraw(KEY)
    for node in nodes:
        assert await node.dht.get(KEY) == {}
    await trio.sleep(200)
    assert all(len(node.dht._store) == 0 for node in nodes)
    await nodes[1].dht.withdraw(KEY)  # once more does nothing
    assert await nodes[1].dht.get(KEY) == {}


async def test_newcomers_become_holders_of_what_is_published(autojump_clock, swarm):
    nodes = await swarm.grow(2)
    nodes[0].dht.publish(KEY, b"here", ttl=60)
    await trio.sleep(1)
    newcomer = await swarm.add(nodes[1])
    await trio.sleep(30)
    assert [held.record.value for held in newcomer.dht._store] == [b"here"]


async def test_a_reader_brings_holders_up_to_date(autojump_clock, swarm, eventually):
    nodes = await swarm.grow(3)
    signer = Identity.from_seed(b"s" * 32)
    old, new = (Record.sign(signer, KEY, value, sequence=n, ttl=100) for n, value in ((1, b"old"), (2, b"new")))
    now = trio.current_time()
    nodes[0].dht._store.put(old, 100, now, by_signer=True)
    nodes[1].dht._store.put(new, 50, now, by_signer=True)
    assert values(await nodes[2].dht.get(KEY)) == {signer.peer_id: b"new"}
    await eventually(lambda: nodes[0].dht._store.get(KEY, signer.peer_id, trio.current_time()).record == new, 5)
    held = nodes[0].dht._store.get(KEY, signer.peer_id, trio.current_time())
    assert held.expires <= now + 50 + 1  # it lives no longer for having been passed on


async def test_bounds_are_checked_where_values_come_in(autojump_clock, swarm):
    node = await swarm.add()
    with pytest.raises(ValueError, match="key"):
        await node.dht.put(b"short", b"value")
    with pytest.raises(ValueError, match="key"):
        await node.dht.get(b"short")
    with pytest.raises(ValueError, match="4096"):
        await node.dht.put(KEY, bytes(MAX_VALUE + 1))
    with pytest.raises(ValueError, match="time to live"):
        await node.dht.put(KEY, b"value", ttl=0)
    with pytest.raises(ValueError, match="withdraw"):
        node.dht.publish(KEY, b"")
    assert await node.dht.put(KEY, bytes(MAX_VALUE)) == 1


async def test_a_key_with_many_signers_is_read_whole(autojump_clock, swarm):
    nodes = await swarm.grow(2)
    store = nodes[0].dht._store
    for n in range(256):
        record = Record.sign(Identity.from_seed(n.to_bytes(32, "big")), KEY, bytes(1000), sequence=1, ttl=100)
        store.put(record, 100, trio.current_time(), by_signer=True)
    assert len(await nodes[1].dht.get(KEY)) == 256


# Joining.


async def test_everybody_knows_everybody_soon_after_joining_at_once(autojump_clock, swarm, eventually):
    founder = await swarm.add()
    async with trio.open_nursery() as nursery:
        for _ in range(7):
            nursery.start_soon(swarm.add, founder)
    await eventually(lambda: all(a.knows(b) for a in swarm.nodes for b in swarm.nodes if a is not b), 5)


async def test_bootstrap_counts_those_that_answer_and_does_not_wait_for_the_dead(autojump_clock, swarm):
    alive = await swarm.grow(2)
    node = await swarm.add()
    dead = [(None, Address("10.9.9.9", 1)), (PeerId(b"d" * 32), Address("10.9.9.8", 1))]
    swarm.network.transport("10.9.9.7")
    swarm.network.partition([node.host], ["10.9.9.7"])  # this one does not even refuse
    silent = (PeerId(b"s" * 32), Address("10.9.9.7", 1))
    began = trio.current_time()
    assert await node.dht.bootstrap([*dead, silent, alive[0].contact, (None, alive[1].contact[1])]) == 2
    assert trio.current_time() - began < 3
    assert node.knows(alive[0])
    assert node.knows(alive[1])


async def test_bootstrap_fails_if_nobody_answers(autojump_clock, swarm):
    node = await swarm.add()
    with pytest.raises(PeerUnreachable, match="none of 2 known peers"):
        await node.dht.bootstrap([(None, Address("10.9.9.9", 1)), (PeerId(b"d" * 32), Address("10.9.9.8", 1))])


async def test_bootstrap_leaves_ourselves_out(autojump_clock, swarm):
    node = await swarm.add()
    assert await node.dht.bootstrap([node.contact, (None, node.contact[1])]) == 0


async def test_saved_contacts_lead_back_into_the_swarm(autojump_clock, swarm):
    nodes = await swarm.grow(5)
    await trio.sleep(3)
    saved = nodes[4].dht.contacts()
    assert {peer for peer, _ in saved} == {node.id for node in nodes[:4]}
    swarm.kill(nodes[4], nodes[0])
    back = await swarm.add()
    assert await back.dht.bootstrap(saved) == 3


async def test_a_lost_peer_is_no_longer_told_and_its_return_is_noticed(autojump_clock, swarm, eventually):
    nodes = await swarm.grow(4)
    swarm.network.stall(nodes[3].host)
    await eventually(lambda: not nodes[0].knows(nodes[3]), 60)
    assert nodes[3].id not in [contact.peer for contact in await nodes[1].dht.find(nodes[3].id)]
    swarm.network.resume(nodes[3].host)
    await eventually(lambda: all(node.knows(nodes[3]) for node in nodes[:3]), 120)


# Peers that do not keep to the rules.


class Evil:
    """Answers as it likes. Whatever is asked, there is nobody it does not claim to know."""

    def __init__(self, **replies) -> None:
        self.found = Found(())
        self.fetched = Fetched((), False)
        self.stored = Stored("stored", None)
        self.asked = 0
        self.__dict__.update(replies)

    def setup(self, endpoint: Endpoint) -> None:
        def always(name: str):
            async def handler(request, stream):
                self.asked += 1
                return getattr(self, name) if name else Pong()

            return handler

        for request, name in ((Ping, ""), (Find, "found"), (Fetch, "fetched"), (Store, "stored")):
            endpoint.handle(request, always(name))


def copy(record: Record) -> Copy:
    return Copy(record.encoded, 100.0)


MALLORY = Identity.from_seed(b"m" * 32)
GENUINE = Record.sign(MALLORY, KEY, b"genuine", sequence=1, ttl=100)
FORGED = attrs.evolve(GENUINE, value=b"forged", sequence=9)


@pytest.mark.parametrize(
    "answer",
    [
        Fetched((copy(FORGED),), False),
        Fetched((Copy(b"garbage", 1.0),), False),
        Fetched((copy(Record.sign(MALLORY, bytes(32), b"other key", sequence=1, ttl=1)),), False),
        Fetched((copy(GENUINE), copy(GENUINE)), False),
        Fetched((copy(GENUINE),), True),  # again and again
        Fetched((), True),
        Pong(),
        Found(()),
    ],
)
async def test_what_a_liar_says_does_not_hide_what_others_hold(autojump_clock, swarm, answer):
    nodes = await swarm.grow(3)
    await nodes[0].dht.put(KEY, b"value")
    evil = await swarm.add(nodes[0], setup=Evil(fetched=answer).setup)
    await nodes[1].dht.bootstrap([evil.contact])
    assert nodes[1].knows(evil)
    found = values(await nodes[1].dht.get(KEY))
    found.pop(MALLORY.peer_id, None)  # what it signed itself is no lie
    assert found == {nodes[0].id: b"value"}
    assert not nodes[1].knows(evil)


async def test_a_liar_about_peers_costs_little(autojump_clock, swarm):
    nodes = await swarm.grow(6)
    nobody = tuple(
        Contact(PeerId(KEY[:31] + bytes([n])), (Address(f"10.8.8.{n}", 1),)) for n in range(20) if n != KEY[31]
    )
    evil = await swarm.add(nodes[0], setup=Evil(found=Found(nobody)).setup)
    await nodes[1].dht.bootstrap([evil.contact])
    began = trio.current_time()
    found = [contact.peer for contact in await nodes[1].dht.find(KEY)]
    assert set(found) >= {node.id for node in nodes if node is not nodes[1]}
    assert not set(found) & {contact.peer for contact in nobody}
    assert trio.current_time() - began < 10


async def test_a_liar_about_our_own_records_is_not_believed(autojump_clock, swarm):
    nodes = await swarm.grow(2)
    forged = attrs.evolve(Record.sign(nodes[0].identity, KEY, b"", sequence=99, ttl=100), value=b"forged")
    evil = await swarm.add(nodes[0], setup=Evil(stored=Stored("stale", copy(forged))).setup)
    await nodes[0].dht.bootstrap([evil.contact])
    assert await nodes[0].dht.put(KEY, b"value") == 2
    assert not nodes[0].knows(evil)
    assert (await nodes[1].dht.get(KEY))[nodes[0].id].sequence == 1


async def test_a_silent_peer_holds_nobody_up(autojump_clock, swarm):
    nodes = await swarm.grow(4)
    await nodes[0].dht.put(KEY, b"value")

    def setup(endpoint: Endpoint) -> None:
        async def silence(request, stream):
            await trio.sleep_forever()

        async def pong(request, stream):
            return Pong()

        endpoint.handle(Ping, pong)
        for request in (Find, Fetch, Store):
            endpoint.handle(request, silence)

    silent = await swarm.add(nodes[0], setup=setup)
    await nodes[1].dht.bootstrap([silent.contact])
    began = trio.current_time()
    assert values(await nodes[1].dht.get(KEY)) == {nodes[0].id: b"value"}
    assert trio.current_time() - began < 5


@pytest.mark.parametrize(
    "request_",
    [
        Store(copy(FORGED)),
        Store(Copy(b"garbage", 10.0)),
        Store(Copy(GENUINE.encoded + b"\x00", 10.0)),
    ],
)
async def test_what_is_not_a_genuine_record_is_not_stored_and_ends_the_connection(autojump_clock, swarm, request_):
    node = await swarm.add()
    evil = await swarm.add(node, setup=Evil().setup)
    await trio.sleep(1)
    with pytest.raises(ShoalError):
        await evil.endpoint.request(node.id, request_, Stored, timeout=5)
    assert len(node.dht._store) == 0
    await trio.sleep(1)
    assert not node.endpoint.is_connected(evil.id)


async def test_others_may_spread_a_record_but_not_prolong_it(autojump_clock, swarm):
    node = await swarm.add()
    other = await swarm.add(node, setup=Evil().setup)

    async def store(remaining: float) -> str:
        request = Store(Copy(GENUINE.encoded, remaining))
        return (await other.endpoint.request(node.id, request, Stored, timeout=5)).verdict

    assert await store(50.0) == "stored"
    await trio.sleep(40)
    assert await store(100.0) == "refreshed"
    await trio.sleep(11)
    assert await node.dht.get(KEY) == {}


async def test_an_older_record_is_answered_with_the_newer_one(autojump_clock, swarm):
    node = await swarm.add()
    other = await swarm.add(node, setup=Evil().setup)
    newer = Record.sign(MALLORY, KEY, b"newer", sequence=2, ttl=100)
    for record in (newer, GENUINE):
        reply = await other.endpoint.request(node.id, Store(copy(record)), Stored, timeout=5)
    assert reply.verdict == "stale"
    assert Record.decode(reply.newer.record) == newer


async def test_records_count_for_the_address_that_they_came_from(autojump_clock, swarm):
    node = await swarm.add()
    other = await swarm.add(node, setup=Evil().setup)
    await other.endpoint.request(node.id, Store(copy(GENUINE)), Stored, timeout=5)
    assert [held.origin for held in node.dht._store] == [other.host]


@pytest.mark.parametrize("bounds", [{"rate": 1.0, "burst": 10}, {"origin_rate": 1.0, "origin_burst": 10}])
async def test_who_asks_too_often_is_refused_for_a_while(autojump_clock, swarm, bounds):
    node = await swarm.add(settings=DhtSettings(**bounds))
    other = await swarm.add(node, setup=Evil().setup)

    async def ping() -> None:
        await other.endpoint.request(node.id, Ping(), Pong, timeout=5)

    with pytest.raises(RequestRefused) as refused:
        for _ in range(20):
            await ping()
    assert refused.value.code == "busy"
    await trio.sleep(5)
    await ping()


async def test_who_refuses_everything_is_not_told_to_others(autojump_clock, swarm, eventually):
    willing = True

    async def ping(request, stream):
        if not willing:
            raise RequestRefused("no", code="no")
        return Pong()

    node = await swarm.add()
    evil = await swarm.add(node, setup=lambda endpoint: endpoint.handle(Ping, ping))
    await eventually(lambda: node.knows(evil), 30)
    willing = False
    await eventually(lambda: not node.knows(evil), 60)
    willing = True
    await eventually(lambda: node.knows(evil), 60)

import json
import random

import pytest
import trio
import trio.testing

import peer.reach
from peer.console import describe
from peer.events import EventLog
from peer.home import Home
from peer.reach import (
    ISOLATION_PERIOD,
    MAX_BOOK,
    Reach,
    book_entries,
    is_loopback,
    isolation,
    read_book,
    start_listening,
    tell_paths,
    write_book,
)
from protocol.endpoint import Endpoint
from protocol.errors import AddressError
from protocol.identity import Identity, PeerId
from protocol.memory import MemoryNetwork
from protocol.portmap import Mapping
from protocol.tcp import TcpTransport
from protocol.transport import Address

OUTSIDE = Address("203.0.113.5", 40_000)
INSIDE = Address("100.64.0.9", 40_000)


@pytest.fixture
async def endpoint(nursery):
    """One that listens on 192.0.2.2:4000."""
    identity = Identity.from_seed(bytes(32))
    endpoint = Endpoint(identity, MemoryNetwork().transport("192.0.2.2"), rng=random.Random(0))
    await nursery.start(endpoint.run, Address("192.0.2.2", 4000))
    return endpoint


@pytest.fixture
def heard():
    return []


@pytest.fixture
def events(heard):
    log = EventLog(None, "me")
    log.subscribe(heard.append)
    return log


@pytest.fixture
def gateway(monkeypatch):
    """Stands in for the gateway: `gateway.report(mapping)`; it notes for which ports it was asked."""

    class Gateway:
        def __init__(self):
            self.ports = []
            self.report = None

        async def keep_mapped(self, port, *, on_change):
            self.ports.append(port)
            self.report = on_change
            await trio.sleep_forever()

    made = Gateway()
    monkeypatch.setattr(peer.reach, "keep_mapped", made.keep_mapped)
    return made


async def test_a_mapped_port_is_told_and_comes_first(endpoint, events, heard, gateway, nursery):
    reach, changes = Reach(endpoint, events), []
    own = Address("192.0.2.2", 4000)
    nursery.start_soon(reach.keep_mapped, lambda: changes.append(reach.addresses))
    await trio.testing.wait_all_tasks_blocked()
    assert gateway.ports == [4000]
    gateway.report(None)
    assert (changes, heard) == ([], [])
    gateway.report(Mapping(OUTSIDE, "pcp", 600.0))
    assert changes.pop() == (OUTSIDE, own)
    assert endpoint.advertised() == OUTSIDE
    gateway.report(Mapping(INSIDE, "upnp", 600.0))
    assert endpoint.advertised() is None
    assert changes.pop() == (own, INSIDE)  # it leads in from the network between two routers at best
    assert endpoint.advertised() is None
    gateway.report(None)
    assert changes.pop() == (own,)
    told = [{key: event.get(key) for key in ("event", "address", "method", "behind_nat")} for event in heard]
    assert told == [
        {"event": "mapped", "address": str(OUTSIDE), "method": "pcp", "behind_nat": False},
        {"event": "mapped", "address": str(INSIDE), "method": "upnp", "behind_nat": True},
        {"event": "unmapped", "address": str(INSIDE), "method": None, "behind_nat": None},
    ]


async def test_an_announced_address_stands_for_all(endpoint, events, gateway):
    announced = Address("peer.example.org", 7)
    reach = Reach(endpoint, events, announced)
    with trio.fail_after(1.0):
        await reach.keep_mapped(lambda: None)
    assert reach.addresses == (announced,)
    assert gateway.ports == []


async def test_nothing_is_mapped_to_loopback(events, gateway, nursery):
    network = MemoryNetwork()
    endpoint = Endpoint(Identity.from_seed(bytes(32)), network.transport("127.0.0.1"), rng=random.Random(0))
    await nursery.start(endpoint.run, Address("127.0.0.1", 4000))
    with trio.fail_after(1.0):
        await Reach(endpoint, events).keep_mapped(lambda: None)
    assert gateway.ports == []


async def test_paths_are_told(endpoint, events, heard, nursery):
    other = Endpoint(Identity.from_seed(bytes([1]) * 32), endpoint._transport, rng=random.Random(1))
    await nursery.start(other.run, None)
    await nursery.start(tell_paths, endpoint, events, Reach(endpoint, events), random.Random(2))
    await other.connect(Address("192.0.2.2", 4000))
    with trio.fail_after(10.0):
        while not heard:
            await trio.lowlevel.checkpoint()
    assert {**heard[0], "t": 0, "rtt": 0} == {
        "t": 0, "event": "connected", "peer": str(other.peer_id), "by": "me", "path": "direct", "rtt": 0
    }  # fmt: skip
    nursery.cancel_scope.cancel()


async def test_who_could_not_be_found_from_elsewhere_says_so(autojump_clock, events, heard, nursery):
    network, home = MemoryNetwork(), Address("192.168.1.2", 4000)
    endpoint = Endpoint(Identity.from_seed(bytes(32)), network.transport(home.host), rng=random.Random(0))
    await nursery.start(endpoint.run, home)
    await nursery.start(tell_paths, endpoint, events, Reach(endpoint, events), random.Random(2))

    def told():
        return [event["reason"] for event in heard if event["event"] == "isolated"]

    await trio.sleep(3 * ISOLATION_PERIOD)
    (reason,) = told()
    assert reason == f"machines on its own network reach this peer at {home}; for others, no peer in reach relays"
    assert "start `shoal serve`" in describe(heard[-1])
    helper = Endpoint(Identity.from_seed(bytes([1]) * 32), network.transport("203.0.113.5"), rng=random.Random(1))
    with trio.CancelScope() as there:
        async with trio.open_nursery() as inner:
            await inner.start(helper.run, Address("203.0.113.5", 4000))
            await endpoint.connect(Address("203.0.113.5", 4000))
            await trio.sleep(3 * ISOLATION_PERIOD)
            there.cancel()
    assert len(told()) == 1
    await trio.sleep(3 * ISOLATION_PERIOD)
    assert len(told()) == 2  # the helper is gone
    nursery.cancel_scope.cancel()


async def listens_at(home, listen):
    """The port of a peer of `home` that was told to listen there, for a moment."""
    async with trio.open_nursery() as nursery:
        endpoint = Endpoint(home.identity, TcpTransport(), rng=random.Random(0))
        await start_listening(nursery, endpoint, home, listen)
        port = endpoint.address.port
        nursery.cancel_scope.cancel()
    return port


async def test_a_peer_that_is_started_again_listens_where_it_did(tmp_path):
    home, anywhere = Home(tmp_path / "home"), Address("127.0.0.1", 0)
    first = await listens_at(home, anywhere)
    assert await listens_at(home, anywhere) == first
    holder = await TcpTransport().listen(Address("127.0.0.1", first))
    with pytest.raises(ExceptionGroup) as caught:
        await listens_at(home, Address("127.0.0.1", first))  # its user insists
    assert caught.group_contains(AddressError)
    second = await listens_at(home, anywhere)
    assert second != first
    await holder.aclose()
    assert await listens_at(home, Address("127.0.0.1", first)) == first
    for nonsense in ("", "70000", "-1", "many"):
        home.port.write_text(nonsense)
        assert await listens_at(home, anywhere) > 0


PRIVATE, PUBLIC = Address("10.0.0.7", 4000), Address("203.0.113.5", 4000)


@pytest.mark.parametrize(
    ("verdict", "address", "relays", "reason"),
    [
        ("private", PUBLIC, False, "others cannot connect"),
        ("private", PRIVATE, False, "others cannot connect"),
        ("private", PRIVATE, True, None),
        ("public", PRIVATE, False, None),
        ("unknown", PRIVATE, False, "machines on its own network"),
        ("unknown", PUBLIC, False, None),
        ("unknown", Address("peer.example.org", 7), False, None),
    ],
)
def test_isolation(verdict, address, relays, reason):
    said = isolation(verdict, address, relays=relays)
    assert said is None if reason is None else reason in said


@pytest.mark.parametrize(
    ("host", "answer"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("192.0.2.1", False), ("0.0.0.0", False), ("a", False)],
)
def test_loopback(host, answer):
    assert is_loopback(host) is answer


def test_the_book(tmp_path):
    home = Home(tmp_path / "home")
    assert read_book(home) == []
    contacts = [(PeerId(bytes([n]) * 32), Address("192.0.2.1", n + 1)) for n in range(250)]
    entries = book_entries([*contacts, *contacts])
    assert len(entries) == MAX_BOOK
    write_book(home, entries)
    assert set(read_book(home)) == set(contacts[:MAX_BOOK])
    for damage in ("", "{", json.dumps([["a", "b"]]), json.dumps([1]), json.dumps({"a": 1})):
        home.book.write_text(damage)
        assert read_book(home) == []

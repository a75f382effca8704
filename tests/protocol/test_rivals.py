"""Two daemons with one identity: the one that is there stays, and the other one learns why it cannot."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from protocol import wire
from protocol.channel import handshake
from protocol.endpoint import Limits, PathChanged, PeerConnected, PeerLost
from protocol.errors import IdentityInUse, PeerGone, PeerUnreachable, RequestRefused
from protocol.frames import IN_USE, Kind, pack
from protocol.hello import Hello
from protocol.identity import Identity
from protocol.rivals import PATIENCE, Vouch, Vouched
from protocol.transport import Address
from tests.protocol.messages import Echo, echo

COPY = Address("copy", 1000)
LIMITS = Limits()


@pytest.fixture
def start(start_endpoint):
    return partial(start_endpoint, handlers=((Echo, echo),))


@pytest.fixture
def start_copy(start, network):
    """Starts another daemon with the identity of the one on host 1."""
    return lambda: start(1, transport=network.transport("copy"), listen=COPY)


def drain(events):
    """What has happened so far."""
    found = []
    while True:
        try:
            found.append(events.receive_nowait())
        except trio.WouldBlock:
            return found


async def test_who_is_there_stays_and_the_copy_learns_why_it_cannot(start, start_copy, autojump_clock):
    a, b, c = await start(1), await start(2), await start(3)
    for other in (b, c):
        await a.endpoint.connect(other.peer)
    await trio.sleep(5)
    before = list(a.endpoint._connections)
    with b.endpoint.watch() as events_b, c.endpoint.watch() as events_c, a.endpoint.watch() as events_a:
        copy = await start_copy()
        with copy.endpoint.watch() as events:
            for other in (b, c):
                with pytest.raises(PeerGone, match="another daemon with this identity is connected, from host1"):
                    await copy.endpoint.request(other.peer, Echo(""), Echo)
            happened = drain(events)
        assert copy.endpoint.in_use is not None
        began = trio.current_time()
        while copy.error is None:  # it goes on trying, as daemons do
            await trio.sleep(0.5)
            with pytest.raises((PeerGone, PeerUnreachable)):
                await copy.endpoint.request(b.peer, Echo(""), Echo)
        assert trio.current_time() - began < PATIENCE + 1
        assert b.peer.short in str(copy.error) or c.peer.short in str(copy.error)
        assert "host1" in str(copy.error)
        assert "home of its own" in copy.error.hint
        assert [drain(watched) for watched in (events_a, events_b, events_c)] == [[], [], []]
    assert [type(event) for event in happened] == [PeerConnected, PeerLost] * 2
    assert "another daemon with this identity" in happened[-1].reason
    assert list(a.endpoint._connections) == before
    assert await b.endpoint.request(a.peer, Echo(""), Echo) == Echo("!")
    assert COPY not in b.endpoint.addresses(a.peer)[:1]


async def test_one_that_died_in_silence_is_replaced_within_two_heartbeats(start, start_copy, network, autojump_clock):
    a, b = await start(1), await start(2)
    await a.endpoint.connect(b.peer)
    await trio.sleep(5)
    with b.endpoint.watch() as events:
        network.stall("host1")
        began = trio.current_time()
        copy = await start_copy()
        assert await copy.endpoint.request(b.peer, Echo("hi"), Echo) == Echo("hi!")
        assert trio.current_time() - began < 2.5 * LIMITS.heartbeat
        assert [type(event) for event in drain(events)] == [PeerLost, PeerConnected]
        network.resume("host1")  # it was only asleep, and finds its place taken
        await trio.sleep(1)
        assert not a.endpoint.is_connected(b.peer)
        with pytest.raises(PeerGone, match="from copy"):
            await a.endpoint.request(b.peer, Echo(""), Echo)
        await a.stopped.wait()
        assert isinstance(a.error, IdentityInUse)
        assert drain(events) == []
    assert await copy.endpoint.request(b.peer, Echo("hi"), Echo) == Echo("hi!")


async def test_one_that_crashed_is_replaced_at_once(start, start_copy, network, autojump_clock):
    a, b = await start(1), await start(2)
    await a.endpoint.connect(b.peer)
    network.kill("host1")
    began = trio.current_time()
    again = await start_copy()
    assert await again.endpoint.request(b.peer, Echo("hi"), Echo) == Echo("hi!")
    assert trio.current_time() - began < 0.2
    assert again.endpoint.in_use is None


async def test_the_copy_of_one_that_ends_meanwhile_takes_its_place(start, start_copy, network, autojump_clock):
    a, b = await start(1), await start(2)
    await a.endpoint.connect(b.peer)
    network.stall("host1")
    copy = await start_copy()
    began = trio.current_time()
    async with trio.open_nursery() as nursery:

        async def ask():
            assert await copy.endpoint.request(b.peer, Echo("hi"), Echo) == Echo("hi!")

        nursery.start_soon(ask)
        await trio.sleep(0.5)
        network.kill("host1")
    assert trio.current_time() - began < 1


async def test_one_that_takes_the_copy_in_is_enough(start, start_copy, autojump_clock):
    a, b, c = await start(1), await start(2), await start(3)
    await a.endpoint.connect(b.peer)
    copy = await start_copy()
    await copy.endpoint.request(c.peer, Echo(""), Echo)
    for _ in range(10):
        with pytest.raises(PeerGone):
            await copy.endpoint.request(b.peer, Echo(""), Echo)
        await trio.sleep(3)
    assert copy.endpoint.in_use is None
    assert await copy.endpoint.request(c.peer, Echo(""), Echo) == Echo("!")
    await c.stop()  # now there is only the one that refuses
    with pytest.raises(PeerGone):
        await copy.endpoint.request(b.peer, Echo(""), Echo)
    await copy.stopped.wait()
    assert isinstance(copy.error, IdentityInUse)


async def test_a_copy_is_refused_over_a_relay_too(start, start_copy, network, autojump_clock):
    a, b, relay = await start(1), await start(2), await start(3)
    network.partition(["host1"], ["host2"])
    await a.endpoint.connect(relay.peer)
    await b.endpoint.connect(relay.peer)
    await trio.sleep(0.1)
    assert await b.endpoint.request(a.peer, Echo(""), Echo) == Echo("!")
    assert b.endpoint.path(a.peer) == "relayed"
    with b.endpoint.watch() as events:
        copy = await start_copy()
        with pytest.raises(PeerGone, match="through a relay"):
            await copy.endpoint.request(b.peer, Echo(""), Echo)
        await trio.sleep(30)
        assert drain(events) == []
    assert await b.endpoint.request(a.peer, Echo(""), Echo) == Echo("!")


async def test_simultaneous_dials_with_a_copy(start, start_copy, autojump_clock):
    a, b = await start(1), await start(2)
    await b.endpoint.connect(a.peer)
    copy = await start_copy()
    with b.endpoint.watch() as events_b, copy.endpoint.watch() as events_copy:
        async with trio.open_nursery() as nursery:

            async def dial(endpoint, address):
                try:
                    await endpoint.connect(address)
                except PeerUnreachable as error:
                    assert "another daemon with this identity" in str(error)

            nursery.start_soon(dial, b.endpoint, COPY)
            nursery.start_soon(dial, copy.endpoint, b.endpoint.address)
        await trio.sleep(1)
        assert drain(events_b) == []
        happened = [event for event in drain(events_copy) if not isinstance(event, PathChanged)]
    assert happened
    for number, event in enumerate(happened):
        assert isinstance(event, PeerLost if number % 2 else PeerConnected)
    assert not copy.endpoint.connected
    assert len(b.endpoint._connections) == 1


async def test_nobody_but_a_copy_can_say_that_there_is_one(start, network, autojump_clock):
    a, b = await start(1), await start(2)
    own = a.endpoint._instance
    with pytest.raises(RequestRefused, match="this very daemon"):
        await b.endpoint.request(a.peer, Vouch(own), Vouched)
    for_another = await b.endpoint.request(a.peer, Vouch(b"newcomer"), Vouched)
    await b.stop()
    liar = Identity.from_seed(bytes(32))
    by_the_liar = liar.sign("identity-vouch-v1", own, b"newcomer")
    for evidence in (
        bytes(72),
        b"newcomer" + for_another.signature,
        own + for_another.signature,
        b"newcomer" + by_the_liar,
    ):
        stream = await network.transport("liar").dial(a.endpoint.address)
        channel = await handshake(stream, liar, initiator=True, features=wire.encode(Hello(bytes(8), 1, 0)))
        await trio.sleep(1)
        async with a.endpoint.open(liar.peer_id, Echo("")) as opened:
            await channel.send(pack(Kind.GOODBYE, IN_USE, 0, evidence + b"there is another one"))
            with pytest.raises(PeerGone, match="there is another one") as caught:
                await opened.receive(Echo)
        assert caught.type is PeerGone
        await trio.sleep(2 * PATIENCE)
        await channel.aclose()
        assert a.endpoint.in_use is None
    assert a.error is None
    assert not a.stopped.is_set()

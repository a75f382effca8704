"""Direct connections in place of relayed ones. `tests/net` has the routers for which this is made."""

from __future__ import annotations

import attrs
import pytest
import trio
import trio.lowlevel

from protocol.endpoint import PathChanged, PeerConnected
from protocol.errors import AddressError, PeerUnreachable, RequestRefused
from protocol.punch import PROBE_SECONDS, Answer, Observer, Offer
from protocol.tcp import TcpTransport
from protocol.transport import Address
from tests.protocol.messages import Echo, echo

LOCAL = Address("127.0.0.1", 0)
ELSEWHERE = Address("192.0.2.1", 7)


class Walled(TcpTransport):
    """Ordinary dials to some addresses fail."""

    def __init__(self):
        super().__init__()
        self.walls = set()

    async def dial(self, address, *, local_port=None):
        if local_port is None and address in self.walls:
            await trio.lowlevel.checkpoint()
            raise PeerUnreachable(f"there is a wall before {address}")
        return await super().dial(address, local_port=local_port)


@pytest.fixture
async def pair(start_endpoint):
    """Two endpoints over TCP that cannot dial each other in the usual way, and a third that both have dialled."""
    transports = [Walled(), Walled()]
    handlers = [(Echo, echo)]
    relay = await start_endpoint(3, transport=TcpTransport(), listen=LOCAL, handlers=handlers)
    a, b = [
        await start_endpoint(seed, transport=transport, listen=LOCAL, handlers=handlers)
        for seed, transport in zip((1, 2), transports, strict=True)
    ]
    for transport in transports:
        transport.walls |= {a.endpoint.address, b.endpoint.address}
    for node in (a, b):
        await node.endpoint.connect(relay.peer)
        await node.endpoint.request(relay.peer, Echo(""), Echo)  # the relay has noticed as well
    return a, b, relay


async def test_relayed_connections_are_replaced_by_punched_ones(pair):
    a, b, _ = pair
    with a.endpoint.watch() as here, b.endpoint.watch() as there, trio.fail_after(20):
        assert await a.endpoint.request(b.peer, Echo("hi"), Echo) == Echo("hi!")
        for node, events in ((b, here), (a, there)):
            assert await events.receive() == PeerConnected(node.peer, "relayed")
            # Nothing filters on one machine, so one side's dial comes in at the other's listener: it is all the same.
            assert await events.receive() == PathChanged(node.peer, "punched")
    assert a.endpoint.path(b.peer) == b.endpoint.path(a.peer) == "punched"
    assert await b.endpoint.request(a.peer, Echo("ho"), Echo) == Echo("ho!")


async def test_listeners_share_their_port_with_our_own_dials_only():
    transport = TcpTransport()
    listener = await transport.listen(LOCAL)
    other = await transport.listen(LOCAL)
    with pytest.raises(AddressError):
        await transport.listen(listener.address)
    stream = await transport.dial(other.address, local_port=listener.address.port)
    accepted = await other.accept()
    assert accepted.remote == listener.address
    with pytest.raises(PeerUnreachable):  # there is such a connection already
        await transport.dial(other.address, local_port=listener.address.port)
    for thing in (stream, accepted, other, listener):
        await thing.aclose()


@attrs.define
class Channel:
    """What observers' connections look like to those who hold them."""

    remote: Address
    closed: bool = False

    async def receive(self):
        await trio.sleep_forever()

    async def aclose(self):
        self.closed = True
        await trio.lowlevel.checkpoint()


@attrs.define
class FakeLinks:
    """Connections to observers."""

    observers: list

    @attrs.define
    class Link:
        connection: object

    @attrs.define
    class Connection:
        initiator: bool
        channel: Channel

    def direct(self):
        return [self.Link(self.Connection(True, Channel(Address(name, 1)))) for name in self.observers]


@pytest.fixture
def observer(nursery):
    def make(seen):
        """An observer that is seen at `seen[name]` by each peer."""
        channels = []

        async def probe(address, port):
            await trio.sleep(0.1)
            channels.append(Channel(address))
            if seen[address.host] is None:
                raise PeerUnreachable("not there")
            return channels[-1], seen[address.host]

        return Observer(FakeLinks(list(seen)), probe), channels

    yield make
    nursery.cancel_scope.cancel()


async def test_those_who_were_dialled_tell_where_they_see_us(observer, nursery, autojump_clock):
    here, channels = observer({"one": ELSEWHERE, "two": ELSEWHERE})
    assert await here.locate(7070, nursery) == ELSEWHERE
    assert await here.locate(7070, nursery) == ELSEWHERE
    assert len(channels) == 2  # they were not asked again
    assert not any(channel.closed for channel in channels)  # routers forget who has no connection
    await trio.sleep(2 * PROBE_SECONDS)
    assert all(channel.closed for channel in channels)
    await here.locate(7070, nursery)
    assert len(channels) == 4


@pytest.mark.parametrize(
    "seen",
    [{}, {"one": None}, {"one": ELSEWHERE, "two": attrs.evolve(ELSEWHERE, port=8)}],
    ids=["nobody", "unreachable", "symmetric"],
)
async def test_it_may_be_unknown_where_we_are_seen(observer, nursery, autojump_clock, seen):
    here, _ = observer(seen)
    with pytest.raises(PeerUnreachable):
        await here.locate(7070, nursery)


async def test_one_observer_is_enough(observer, nursery, autojump_clock):
    here, _ = observer({"one": None, "two": ELSEWHERE})
    assert await here.locate(7070, nursery) == ELSEWHERE


async def test_offers_over_direct_connections_are_refused(start_endpoint, autojump_clock):
    a, b = await start_endpoint(1), await start_endpoint(2)
    with pytest.raises(RequestRefused) as caught:
        await a.endpoint.request(b.peer, Offer(ELSEWHERE), Answer)
    assert caught.value.code == "direct"

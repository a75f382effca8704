"""Addresses, and what every transport must do: the same tests over TCP on loopback and over the in-memory network."""

from contextlib import aclosing, asynccontextmanager

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import AddressError, PeerGone, PeerUnreachable
from protocol.memory import MemoryNetwork
from protocol.tcp import TcpTransport
from protocol.transport import Address, Transport


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("example.org:7070", "example.org", 7070),
        ("Example.ORG:1", "example.org", 1),
        ("my_container-1:80", "my_container-1", 80),
        ("192.0.2.7:65535", "192.0.2.7", 65535),
        ("[2001:DB8:0::7]:7070", "2001:db8::7", 7070),
        ("[::]:0", "::", 0),
        ("[fe80::1%eth0]:7", "fe80::1%eth0", 7),
        ("localhost:0", "localhost", 0),
    ],
)
def test_addresses_are_parsed(text, host, port):
    assert Address.parse(text) == Address(host, port)
    assert (Address.parse(text).host, Address.parse(text).port) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            ":",
            "host",
            "host:",
            ":7070",
            "host:x",
            "host:-1",
            "host:65536",
            "host:+1",
            "host:07",
            "host: 1",
            "host:١",
        ),
        *("2001:db8::7:7070", "[::1]", "[::1]7070", "[host]:1", "[192.0.2.7]:1", "[1:2]:3", "[]:1", "::1:7"),
        *(
            "192.0.2:1",
            "192.0.2.256:1",
            "1.2.3.4.5:1",
            "127.1:1",
            "0x7f.1:1",
            "a b:1",
            "a..b:1",
            ".a:1",
            "-a:1",
            "a-:1",
        ),
        *("ä.example:1", "a/b:1", "user@host:1", "a" * 64 + ":1", "a." * 127 + "a:1", "host:1\n", "host\n:1"),
    ],
)
def test_text_that_is_no_address(text):
    with pytest.raises(AddressError) as caught:
        Address.parse(text)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("port", [-1, 65536, True, "1", 1.0, None])
def test_ports_are_checked(port):
    with pytest.raises(AddressError, match="not a port"):
        Address("host", port)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *(("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True)),
        *(("192.0.2.7", False), ("10.0.0.1", False), ("::", False), ("example.org", False), ("fe80::1%lo", False)),
    ],
)
def test_which_addresses_lead_nowhere_else(host, expected):
    assert Address(host, 1).is_loopback is expected


def test_hosts_are_text():
    with pytest.raises(AddressError, match="host is text"):
        Address(b"host", 1)


@given(st.one_of(st.ip_addresses().map(str), st.from_regex(r"[a-z][a-z0-9]{0,10}(\.[a-z]{1,5}){0,3}", fullmatch=True)))
def test_text_form_round_trips(host):
    address = Address(host, 7070)
    assert Address.parse(str(address)) == address


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_an_address_error(text):
    try:
        address = Address.parse(text)
    except AddressError:
        return
    assert Address.parse(str(address)) == address


@attrs.frozen
class Place:
    """Two hosts that can reach each other."""

    here: Transport
    there: Transport
    host: str

    @asynccontextmanager
    async def listening(self):
        listener = await self.there.listen(Address(self.host, 0))
        async with aclosing(listener):
            yield listener

    @asynccontextmanager
    async def connected(self):
        """Both ends of a connection: the dialler's, and the listener's."""
        async with self.listening() as listener:
            ends = []

            async def accept():
                ends.append(await listener.accept())

            async with trio.open_nursery() as nursery:
                nursery.start_soon(accept)
                dialled = await self.here.dial(listener.address)
        async with aclosing(dialled), aclosing(ends[0]):
            yield dialled, ends[0]


@pytest.fixture(params=["tcp", "memory"])
def place(request):
    if request.param == "tcp":
        return Place(TcpTransport(), TcpTransport(), "127.0.0.1")
    network = MemoryNetwork()
    return Place(network.transport("here"), network.transport("there"), "there")


async def receive_all(stream, limit=None):
    """What arrives until the end of the stream, or `limit` bytes of it."""
    out = bytearray()
    buffer = memoryview(bytearray(100_000))
    while limit is None or len(out) < limit:
        count = await stream.receive_into(buffer if limit is None else buffer[: limit - len(out)])
        if count == 0:
            break
        out += buffer[:count]
    return bytes(out)


async def test_bytes_arrive_in_order_both_ways(place):
    there = bytes(range(256)) * 12_001  # about 3 MiB: more than all buffers together hold in memory
    back = there[::-1]
    received = {}

    async def receive(name, stream, size):
        received[name] = await receive_all(stream, size)

    async with place.connected() as (dialled, accepted), trio.open_nursery() as nursery:
        nursery.start_soon(receive, "there", accepted, len(there))
        nursery.start_soon(receive, "back", dialled, len(back))
        nursery.start_soon(dialled.send, there)
        nursery.start_soon(accepted.send, bytearray(back))
    assert received == {"there": there, "back": back}


async def test_addresses_of_both_ends(place):
    async with place.listening() as listener:
        assert listener.address.host == place.host
        assert listener.address.port > 0
    async with place.connected() as (dialled, accepted):
        assert dialled.remote.host == place.host
        assert accepted.remote.port > 0
        assert accepted.remote != dialled.remote


async def test_what_was_sent_before_closing_arrives(place):
    async with place.connected() as (dialled, accepted):
        await dialled.send(b"good")
        await dialled.send(memoryview(b"bye"))
        await dialled.aclose()
        assert await receive_all(accepted) == b"goodbye"
        assert await accepted.receive_into(memoryview(bytearray(1))) == 0


async def test_sending_nothing_is_allowed(place):
    async with place.connected() as (dialled, accepted):
        await dialled.send(b"")
        await dialled.send(b"x")
        assert await receive_all(accepted, 1) == b"x"


async def test_sending_to_a_closed_end_breaks(place):
    async with place.connected() as (dialled, accepted):
        await accepted.aclose()
        with pytest.raises(PeerGone):
            while True:
                await dialled.send(bytes(1000))


async def test_closing_ends_what_waits_on_our_side(place):
    async with place.connected() as (dialled, accepted):

        async def wait():
            with pytest.raises(PeerGone, match="closed on our side"):
                await dialled.receive_into(memoryview(bytearray(1)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            await dialled.aclose()
        await dialled.aclose()
        with pytest.raises(PeerGone, match="closed on our side"):
            await dialled.send(b"x")
        with pytest.raises(PeerGone, match="closed on our side"):
            await dialled.receive_into(memoryview(bytearray(1)))
        assert await receive_all(accepted) == b""


async def test_a_slow_reader_holds_the_sender_up(place):
    async with place.connected() as (dialled, _):
        with trio.move_on_after(0.1) as scope:
            await dialled.send(bytes(2**26))
        assert scope.cancelled_caught


async def test_a_cancelled_receive_loses_nothing(place):
    async with place.connected() as (dialled, accepted):
        with trio.CancelScope() as scope:
            scope.cancel()
            await accepted.receive_into(memoryview(bytearray(10)))
        await dialled.send(b"hello")
        with trio.CancelScope() as scope:
            scope.cancel()
            await accepted.receive_into(memoryview(bytearray(10)))
        assert await receive_all(accepted, 5) == b"hello"


async def test_nobody_listens(place):
    async with place.listening() as listener:
        address = listener.address
    with pytest.raises(PeerUnreachable, match=f"cannot connect to {address}"):
        await place.here.dial(address)


async def test_a_busy_port(place):
    async with place.listening() as listener:
        with pytest.raises(AddressError, match=f"cannot listen on {listener.address}.*in use"):
            await place.there.listen(listener.address)


async def test_a_port_can_be_used_again_at_once(place):
    async with place.connected() as (dialled, _):
        address = dialled.remote
        # A connection to that port is still open.
        async with aclosing(await place.there.listen(address)) as listener:
            assert listener.address == address


async def test_closing_a_listener_ends_its_accept(place):
    async with place.listening() as listener:

        async def accept():
            with pytest.raises(AddressError, match="no longer listening"):
                await listener.accept()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            await trio.testing.wait_all_tasks_blocked()
            await listener.aclose()
        with pytest.raises(AddressError, match="no longer listening"):
            await listener.accept()
        await listener.aclose()


async def test_connections_that_were_not_accepted_break_with_the_listener(place):
    async with place.listening() as listener:
        dialled = await place.here.dial(listener.address)
    async with aclosing(dialled):
        with pytest.raises(PeerGone):
            await receive_all(dialled)


async def test_many_connections_at_once(place):
    async with place.listening() as listener:

        async def answer():
            for _ in range(20):
                stream = await listener.accept()
                async with aclosing(stream):
                    await stream.send(await receive_all(stream, 3))

        async def ask(number):
            async with aclosing(await place.here.dial(listener.address)) as stream:
                await stream.send(b"%03d" % number)
                assert await receive_all(stream) == b"%03d" % number

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            for number in range(20):
                nursery.start_soon(ask, number)

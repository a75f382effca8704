"""The in-memory network in simulated time: delays, limits, and every way of going wrong."""

import math
from contextlib import aclosing, asynccontextmanager

import pytest
import trio
import trio.testing

from protocol.errors import AddressError, PeerGone, PeerUnreachable
from protocol.memory import CAPACITY, QUEUE, MemoryNetwork
from protocol.transport import Address

SERVER = Address("b", 7070)
LATENCY = 0.05


@pytest.fixture
def network():
    return MemoryNetwork(latency=LATENCY)


@asynccontextmanager
async def connected(network, dialler="a", address=SERVER):
    """The dialler's end and the listener's."""
    async with aclosing(await network.transport(address.host).listen(address)) as listener:
        dialled = await network.transport(dialler).dial(listener.address)
        accepted = await listener.accept()
    async with aclosing(dialled), aclosing(accepted):
        yield dialled, accepted


async def receive(stream, size):
    out = bytearray()
    while len(out) < size:
        buffer = bytearray(size - len(out))
        count = await stream.receive_into(memoryview(buffer))
        if count == 0:
            break
        out += buffer[:count]
    return bytes(out)


async def elapsed(function, *args):
    start = trio.current_time()
    await function(*args)
    return trio.current_time() - start


async def hangs(function, *args):
    """Whether a call is still waiting after an hour."""
    with trio.move_on_after(3600) as scope:
        await function(*args)
    return scope.cancelled_caught


async def test_a_dial_takes_a_round_trip(network, autojump_clock):
    async with aclosing(await network.transport("b").listen(SERVER)):
        assert await elapsed(network.transport("a").dial, SERVER) == pytest.approx(2 * LATENCY)


async def test_bytes_take_the_latency(network, autojump_clock):
    async with connected(network) as (a, b):
        assert await elapsed(a.send, b"hello") == 0
        assert await elapsed(receive, b, 5) == pytest.approx(LATENCY)


async def test_bandwidth_is_shared_by_all_connections_of_a_link(network, autojump_clock):
    network.set_link("a", "b", bandwidth=1e6)
    async with connected(network) as (a1, b1), connected(network) as (a2, b2):
        start = trio.current_time()
        for stream in (a1, a2):
            await stream.send(bytes(500_000))
        await receive(b1, 500_000)
        assert trio.current_time() - start == pytest.approx(0.5 + LATENCY)
        await receive(b2, 500_000)
        assert trio.current_time() - start == pytest.approx(1 + LATENCY)
        # The other direction is free, and so is the link to somebody else.
        await b1.send(b"x")
        assert await elapsed(receive, a1, 1) == pytest.approx(LATENCY + 1e-6)


async def test_what_is_small_waits_behind_no_more_than_the_queue_of_a_slow_link(network, autojump_clock):
    """Other connections of the link send all they can, and each of them has room for much more."""
    network.set_link("a", "b", bandwidth=30_000)
    async with connected(network) as (a1, b1), connected(network) as (a2, b2), connected(network) as (small, arrives):
        async with trio.open_nursery() as nursery:
            for sender, receiver in ((a1, b1), (a2, b2)):
                nursery.start_soon(sender.send, bytes(300_000))
                nursery.start_soon(receive, receiver, 300_000)
            for _ in range(10):
                await trio.sleep(1)
                await small.send(b"x")
                assert await elapsed(receive, arrives, 1) < 2 * QUEUE
        assert trio.current_time() == pytest.approx(20, rel=0.1)  # the link was never idle


async def test_default_bandwidth_and_links_without_limit(autojump_clock):
    network = MemoryNetwork(latency=1.0, bandwidth=1000)
    network.set_link("a", "c", latency=0.0, bandwidth=math.inf)
    async with connected(network) as (a, b), connected(network, address=Address("c", 1)) as (to_c, c):
        start = trio.current_time()
        await a.send(bytes(2000))
        await receive(b, 2000)
        assert trio.current_time() - start == pytest.approx(3)
        await to_c.send(bytes(2000))
        assert await elapsed(receive, c, 2000) == 0


async def test_a_host_reaches_itself_without_delay(network, autojump_clock):
    async with connected(network, dialler="b") as (a, b):
        await a.send(b"x")
        assert await elapsed(receive, b, 1) == 0


async def test_back_pressure_is_real(network, autojump_clock):
    async with connected(network) as (a, b):
        await a.send(bytes(CAPACITY))
        assert await hangs(a.send, b"x")
        await receive(b, 1)
        assert not await hangs(a.send, b"x")


async def test_bytes_may_arrive_while_more_are_sent(network, autojump_clock):
    data = bytes(range(256)) * 20_000
    async with connected(network) as (a, b), trio.open_nursery() as nursery:
        nursery.start_soon(a.send, data)
        assert await receive(b, len(data)) == data


async def test_ports(network, autojump_clock):
    b = network.transport("b")
    first = await b.listen(Address("b", 0))
    second = await b.listen(Address("0.0.0.0", 0))
    assert first.address.host == second.address.host == "b"
    assert first.address.port != second.address.port
    with pytest.raises(AddressError, match="this host is b"):
        await b.listen(Address("a", 0))
    with pytest.raises(AddressError, match="in use"):
        await b.listen(first.address)


async def test_host_names_are_as_in_addresses(network, autojump_clock):
    async with connected(network, dialler="Dialler", address=Address("SERVER", 1)) as (a, b):
        assert (a.remote.host, b.remote.host) == ("server", "dialler")
        network.stall("Server")
        network.resume("SERVER")


async def test_unknown_hosts_are_unreachable(network, autojump_clock):
    with pytest.raises(PeerUnreachable, match="nobody listens"):
        await network.transport("a").dial(Address("nowhere", 1))


async def test_a_listener_takes_only_so_many_unaccepted_connections(network, autojump_clock):
    async with aclosing(await network.transport("b").listen(SERVER)):
        with pytest.raises(PeerUnreachable, match="too many"):
            for _ in range(1000):
                await network.transport("a").dial(SERVER)


async def test_a_killed_host_breaks_its_connections(network, autojump_clock):
    async with connected(network) as (a, b):
        await b.send(b"lost on the way")
        network.kill("b")
        assert await elapsed(broken, a.receive_into) == pytest.approx(LATENCY)
        with pytest.raises(PeerGone, match="reset"):
            await a.send(b"x")
        for operation in (b.receive_into(memoryview(bytearray(1))), b.send(b"x")):
            with pytest.raises(PeerGone, match="b was killed"):
                await operation


async def broken(receive_into):
    with pytest.raises(PeerGone):
        await receive_into(memoryview(bytearray(1)))


async def test_killing_ends_what_waits_on_either_side(network, autojump_clock):
    async with connected(network) as (a, _), trio.open_nursery() as nursery:

        async def send_on():
            with pytest.raises(PeerGone):
                await a.send(bytes(2 * CAPACITY))

        nursery.start_soon(send_on)
        nursery.start_soon(broken, a.receive_into)
        async with aclosing(await network.transport("b").listen(Address("b", 1))) as listener:

            async def accept():
                with pytest.raises(AddressError, match="no longer listening"):
                    await listener.accept()

            nursery.start_soon(accept)
            await trio.testing.wait_all_tasks_blocked()
            network.kill("b")


async def test_a_killed_host_cannot_be_reached_nor_reach_others(network, autojump_clock):
    async with aclosing(await network.transport("b").listen(SERVER)), trio.open_nursery() as nursery:
        a, b = network.transport("a"), network.transport("b")

        async def dial():
            with pytest.raises(PeerUnreachable, match="b was killed"):
                await b.dial(Address("a", 1))

        nursery.start_soon(dial)
        await trio.testing.wait_all_tasks_blocked()
        network.kill("b")
        with pytest.raises(PeerUnreachable, match="nobody listens"):
            await a.dial(SERVER)
        with pytest.raises(AddressError, match="was killed"):
            await b.listen(SERVER)


async def test_a_killed_host_can_come_back(network, autojump_clock):
    async with connected(network) as (old, _):
        network.kill("b")
        async with connected(network) as (a, b):
            await a.send(b"again")
            assert await receive(b, 5) == b"again"
        await broken(old.receive_into)


async def test_a_stalled_host_takes_nothing_in(network, autojump_clock):
    async with connected(network) as (a, b):
        await a.send(b"hello")
        network.stall("b")
        assert await hangs(receive, b, 5)
        assert await hangs(a.send, bytes(CAPACITY))
        network.resume("b")
        assert await receive(b, 5) == b"hello"


async def test_a_stalled_host_sends_nothing(network, autojump_clock):
    async with connected(network) as (a, b):
        network.stall("b")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(b.send, b"hello")
            assert await hangs(receive, a, 5)
            network.resume("b")
            assert await receive(a, 5) == b"hello"


async def test_a_stalled_host_is_still_dialled_but_does_not_accept(network, autojump_clock):
    async with aclosing(await network.transport("b").listen(SERVER)) as listener:
        network.stall("b")
        async with aclosing(await network.transport("a").dial(SERVER)) as dialled:
            assert await hangs(listener.accept)
            network.resume("b")
            async with aclosing(await listener.accept()) as accepted:
                await accepted.send(b"x")
                assert await receive(dialled, 1) == b"x"


async def test_a_stalled_host_dials_when_it_is_resumed(network, autojump_clock):
    async with aclosing(await network.transport("b").listen(SERVER)), trio.open_nursery() as nursery:
        a = network.transport("a")
        network.stall("a")

        async def resume():
            await trio.sleep(5)
            network.resume("a")

        nursery.start_soon(resume)
        assert await elapsed(a.dial, SERVER) == pytest.approx(5 + 2 * LATENCY)


async def test_killing_a_stalled_host_ends_it(network, autojump_clock):
    async with connected(network) as (_, b), trio.open_nursery() as nursery:
        network.stall("b")
        nursery.start_soon(broken, b.receive_into)
        await trio.testing.wait_all_tasks_blocked()
        network.kill("b")


async def test_bytes_vanish_in_a_partition_and_come_after_it(network, autojump_clock):
    async with connected(network) as (a, b):
        await a.send(b"before ")
        await trio.sleep(2 * LATENCY)
        await a.send(b"under way ")
        network.partition({"a"}, {"b"})
        await a.send(b"during")
        # What had arrived can be read.
        assert await receive(b, 7) == b"before "
        assert await hangs(receive, b, 1)
        network.heal()
        assert await elapsed(receive, b, 16) == pytest.approx(LATENCY)


async def test_a_partition_starts_while_somebody_waits(network, autojump_clock):
    async with connected(network) as (a, b), trio.open_nursery() as nursery:
        await a.send(b"x")

        async def cut():
            await trio.sleep(LATENCY / 2)
            network.partition({"b"}, {"a"})
            await trio.sleep(60)
            network.heal()

        nursery.start_soon(cut)
        assert await elapsed(receive, b, 1) == pytest.approx(60 + 1.5 * LATENCY)


async def test_a_partition_cuts_only_between_its_groups(network, autojump_clock):
    async with connected(network) as (a, b), connected(network, dialler="c", address=Address("b", 1)) as (c, b_to_c):
        network.partition({"a"}, {"b", "elsewhere"})
        network.partition({"a"}, {"c"})
        await c.send(b"x")
        assert await elapsed(receive, b_to_c, 1) == pytest.approx(LATENCY)
        await b.send(b"x")
        assert await hangs(receive, a, 1)


async def test_a_partition_can_be_one_way(network, autojump_clock):
    async with connected(network) as (a, b):
        network.partition({"a"}, {"b"}, one_way=True)
        await b.send(b"x")
        assert await elapsed(receive, a, 1) == pytest.approx(LATENCY)
        await a.send(b"y")
        assert await hangs(receive, b, 1)
        for dialler, address in (("a", Address("b", 1)), ("b", Address("a", 1))):
            async with aclosing(await network.transport(address.host).listen(address)):
                with pytest.raises(PeerUnreachable, match="did not answer"):
                    await network.transport(dialler).dial(address)
        network.heal()
        assert await receive(b, 1) == b"y"


async def test_dials_into_a_partition_time_out(network, autojump_clock):
    async with aclosing(await network.transport("b").listen(SERVER)):
        network.partition({"a"}, {"b"})
        with pytest.raises(PeerUnreachable, match="did not answer within 10 s"):
            await network.transport("a").dial(SERVER)


async def test_dials_get_through_when_the_partition_ends(network, autojump_clock):
    async with aclosing(await network.transport("b").listen(SERVER)), trio.open_nursery() as nursery:
        network.partition({"a"}, {"b"})

        async def heal():
            await trio.sleep(5)
            network.heal()

        nursery.start_soon(heal)
        await network.transport("a").dial(SERVER)


async def test_a_death_behind_a_partition_shows_after_it(network, autojump_clock):
    async with connected(network) as (a, _):
        network.partition({"a"}, {"b"})
        network.kill("b")
        assert await hangs(broken, a.receive_into)
        await a.send(b"x")
        network.heal()
        assert await elapsed(broken, a.receive_into) == pytest.approx(LATENCY)


async def test_an_end_behind_a_partition_shows_after_it(network, autojump_clock):
    async with connected(network) as (a, b):
        network.partition({"a"}, {"b"})
        await b.send(b"bye")
        await b.aclose()
        assert await hangs(receive, a, 1)
        network.heal()
        assert await receive(a, 10) == b"bye"


async def test_sending_to_an_end_that_closed_vanishes_until_it_is_known(network, autojump_clock):
    async with connected(network) as (a, b):
        async with trio.open_nursery() as nursery:

            async def send_on():
                with pytest.raises(PeerGone, match="closed the connection"):
                    while True:
                        await a.send(bytes(CAPACITY))
                        await trio.sleep(0.01)

            nursery.start_soon(send_on)
            await trio.testing.wait_all_tasks_blocked()
            await b.aclose()
        assert await receive(a, 1) == b""

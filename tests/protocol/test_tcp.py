"""What only TCP has: IPv6, names, socket options, and a system that runs short."""

import errno
import os
import socket
import struct
import sys
from contextlib import aclosing

import attrs
import pytest
import trio
import trio.testing

from protocol.errors import AddressError, PeerGone, PeerUnreachable
from protocol.tcp import TcpListener, TcpStream, TcpTransport
from protocol.transport import Address


def ipv6_loopback():
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not ipv6_loopback(), reason="no IPv6 on the loopback interface")


async def meet(listen, dial):
    """Connect to a listener by another of its host's names, and return the address that it sees."""
    transport = TcpTransport()
    async with aclosing(await transport.listen(Address(listen, 0))) as listener:
        dialled = await transport.dial(Address(dial, listener.address.port))
        async with aclosing(dialled), aclosing(await listener.accept()) as accepted:
            await dialled.send(b"x")
            assert await accepted.receive_into(memoryview(bytearray(1))) == 1
            return accepted.remote.host


async def test_a_connection_that_is_reset_as_soon_as_it_is_there(monkeypatch):
    connect = trio.open_tcp_stream

    async def connect_and_be_reset(host, port):
        stream = await connect(host, port)
        accepted, _ = await server.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        return stream

    monkeypatch.setattr(trio, "open_tcp_stream", connect_and_be_reset)
    with trio.socket.socket() as server:
        await server.bind(("127.0.0.1", 0))
        server.listen()
        with pytest.raises(PeerUnreachable, match="not connected"):
            await TcpTransport().dial(Address("localhost", server.getsockname()[1]))


@needs_ipv6
async def test_ipv6():
    assert await meet("::1", "::1") == "::1"


@needs_ipv6
async def test_ipv6_wildcard_takes_both():
    assert await meet("::", "::1") == "::1"
    assert await meet("::", "127.0.0.1") == "127.0.0.1"


async def test_ipv4_wildcard():
    assert await meet("0.0.0.0", "127.0.0.1") == "127.0.0.1"


async def test_names():
    assert await meet("127.0.0.1", "localhost") == "127.0.0.1"


@pytest.mark.parametrize("host", ["203.0.113.7", "nowhere.invalid"])
async def test_addresses_that_are_not_ours_cannot_be_listened_on(host):
    with pytest.raises(AddressError, match=f"cannot listen on {host}:0: "):
        await TcpTransport().listen(Address(host, 0))


async def test_the_address_of_another_machine_comes_with_a_hint():
    with pytest.raises(AddressError) as caught:
        await TcpTransport().listen(Address("203.0.113.7", 0))
    assert "listen on 0.0.0.0" in caught.value.hint


async def test_a_busy_port_comes_with_a_hint():
    async with aclosing(await TcpTransport().listen(Address("127.0.0.1", 0))) as listener:
        with pytest.raises(AddressError) as caught:
            await TcpTransport().listen(listener.address)
    assert "another port" in caught.value.hint


@pytest.mark.parametrize("address", [Address("nowhere.invalid", 1), Address("127.0.0.1", 0)], ids=str)
async def test_unreachable_addresses(address):
    with pytest.raises(PeerUnreachable, match=f"cannot connect to {address}: .*[a-z]"):
        await TcpTransport().dial(address)


async def test_a_dial_that_nobody_answers_ends(autojump_clock, monkeypatch):
    async def silence(*_):
        await trio.sleep_forever()

    monkeypatch.setattr(trio, "open_tcp_stream", silence)
    with pytest.raises(PeerUnreachable, match="did not answer within 10 s"):
        await TcpTransport().dial(Address("192.0.2.7", 1))


async def test_options_are_set_on_both_ends():
    transport = TcpTransport()
    async with aclosing(await transport.listen(Address("127.0.0.1", 0))) as listener:
        dialled = await transport.dial(listener.address)
        async with aclosing(dialled), aclosing(await listener.accept()) as accepted:
            for stream in (dialled, accepted):
                assert stream._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert stream._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                if hasattr(socket, "TCP_USER_TIMEOUT"):
                    assert stream._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 40_000


async def test_a_reset_connection():
    transport = TcpTransport()
    async with aclosing(await transport.listen(Address("127.0.0.1", 0))) as listener:
        dialled = await transport.dial(listener.address)
        async with aclosing(dialled), aclosing(await listener.accept()) as accepted:
            # Closing with no time to linger sends a reset.
            linger = b"\1\0\0\0\0\0\0\0"
            dialled._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            await dialled.aclose()
            with pytest.raises(PeerGone, match=f"the connection to {accepted.remote} broke: .*reset"):
                await accepted.receive_into(memoryview(bytearray(1)))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc/self/fd")
async def test_running_out_of_file_descriptors_neither_ends_nor_spins_the_listener(monkeypatch):
    import resource

    listener = await TcpTransport().listen(Address("127.0.0.1", 0))
    client = await TcpTransport().dial(listener.address)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    calls = 0

    async def accept(accept=listener._socket.accept):
        nonlocal calls
        calls += 1
        return await accept()

    monkeypatch.setattr(listener._socket, "accept", accept)
    async with aclosing(listener), aclosing(client):
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(highest)]  # leaves no gap below the limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(spare) + 1, hard))
        try:
            began = trio.current_time()
            with trio.move_on_after(0.5) as waiting:
                await listener.accept()
            assert waiting.cancelled_caught
            assert 1 < calls <= 2 + (trio.current_time() - began) / 0.1
            with pytest.raises(PeerUnreachable, match="open files"):
                await TcpTransport().dial(listener.address)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for number in spare:
                os.close(number)
        async with aclosing(await listener.accept()) as accepted:
            await client.send(b"still here")
            buffer = bytearray(100)
            assert buffer[: await accepted.receive_into(memoryview(buffer))] == b"still here"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ECONNABORTED])
async def test_a_failed_accept_does_not_end_the_listener(autojump_clock, number):
    ours, theirs = socket.socketpair()

    class Socket:
        """Fails twice, then has a connection."""

        failures = 2

        def getsockname(self):
            return "127.0.0.1", 7070

        def fileno(self):
            return 7

        def detach(self):
            return ours.detach()

        def setsockopt(self, *_):
            raise OSError(errno.EINVAL, "Invalid argument")

        async def accept(self):
            await trio.lowlevel.checkpoint()
            if self.failures:
                self.failures -= 1
                raise OSError(number, "no")
            return self, ("192.0.2.7", 4711)

    with theirs:
        async with aclosing(await TcpListener(Socket()).accept()) as accepted:
            assert accepted.remote == Address("192.0.2.7", 4711)


async def test_whoever_always_has_something_to_do_lets_others_run():
    transport = TcpTransport()
    turns = 0

    async def others():
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with aclosing(await transport.listen(Address("127.0.0.1", 0))) as listener:
        dialled = await transport.dial(listener.address)
        async with aclosing(dialled), aclosing(await listener.accept()) as accepted, trio.open_nursery() as nursery:
            nursery.start_soon(others)
            buffer = memoryview(bytearray(1))
            for _ in range(1000):
                await dialled.send(b"x")
                assert await accepted.receive_into(buffer) == 1
            nursery.cancel_scope.cancel()
    assert turns > 10


async def test_closing_wakes_whoever_waits():
    transport = TcpTransport()
    async with aclosing(await transport.listen(Address("127.0.0.1", 0))) as listener:
        dialled = await transport.dial(listener.address)
        async with aclosing(dialled), aclosing(await listener.accept()), trio.open_nursery() as nursery:

            async def receive():
                with pytest.raises(PeerGone, match="closed on our side"):
                    await dialled.receive_into(memoryview(bytearray(1)))

            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            await dialled.aclose()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no BBR")
@pytest.mark.parametrize("dialled_as", ["127.0.0.1", "localhost"])
async def test_congestion_control_within_one_machine(dialled_as):
    async with aclosing(await TcpTransport().listen(Address("127.0.0.1", 0))) as listener:
        dialled = await TcpTransport().dial(attrs.evolve(listener.address, host=dialled_as))
        async with aclosing(dialled), aclosing(await listener.accept()) as accepted:
            for stream in (dialled, accepted):
                name = stream._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                assert not name.startswith(b"bbr")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no BBR")
@pytest.mark.parametrize("congestion", ["reno", "bbr"])
async def test_whether_losses_slow_it_down(congestion):
    near = trio.socket.socket()
    try:
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    except OSError as error:
        near.close()
        pytest.skip(f"this system has no {congestion}: {error}")
    async with aclosing(TcpStream(near, Address("127.0.0.1", 1))) as stream:
        assert stream.measure().sturdy == (congestion == "bbr")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
async def test_what_is_known_about_the_way():
    transport = TcpTransport()
    listener = await transport.listen(Address("127.0.0.1", 0))
    stream = await transport.dial(listener.address)
    other = await listener.accept()
    await stream.send(bytes(100_000))
    buffer, missing = memoryview(bytearray(100_000)), 100_000
    while missing:
        missing -= await other.receive_into(buffer)
    await other.send(b"got it")
    await stream.receive_into(buffer)
    state = stream.measure()
    assert 0 < state.shortest <= state.rtt < 10
    assert state.acked >= 100_000
    assert 0 <= state.resent <= state.sent
    assert state.sent >= 1
    for one in (stream, other, listener):
        await one.aclose()


async def test_children_that_were_forked_keep_neither_connections_nor_ports(forked):
    transport = TcpTransport()
    listener = await transport.listen(Address("127.0.0.1", 0))
    stream, other = await transport.dial(listener.address), await listener.accept()
    forked()
    await stream.send(b"x")
    for one in (stream, listener):
        await one.aclose()
    buffer = memoryview(bytearray(2))
    with trio.fail_after(60):
        assert [await other.receive_into(buffer) for _ in range(2)] == [1, 0]
    await other.aclose()
    with pytest.raises(PeerUnreachable, match="refused"):
        await transport.dial(listener.address)

from __future__ import annotations

import random
from functools import partial

import pytest
import trio

from protocol import inflow
from protocol.connection import Limits
from protocol.errors import (
    MessageTooLong,
    PeerGone,
    RequestRefused,
    StreamEnded,
    StreamReset,
)
from protocol.mux_stream import INITIAL_WINDOW
from protocol.stream import Stream
from protocol.wire import MAX_MESSAGE
from tests.protocol.messages import Blob, Count, Echo, Number, echo

KEY = bytes(range(32))


@pytest.fixture
def start(start_endpoint):
    return partial(start_endpoint, handlers=((Echo, echo),))


async def test_conversation(start, autojump_clock):
    async def count(request, stream):
        for value in range(request.to):
            await stream.send(Number(value))
        assert await stream.receive(Echo) == Echo("enough")
        with pytest.raises(StreamEnded):
            await stream.receive(Echo)

    a, b = await start(1), await start(2, handlers=[(Count, count)])
    async with a.endpoint.open(b.peer, Count(3)) as stream:
        assert [await stream.receive(Number) for _ in range(3)] == [Number(0), Number(1), Number(2)]
        await stream.send(Echo("enough"))
        await stream.finish()
        with pytest.raises(StreamEnded):
            await stream.receive(Number)


async def test_a_handlers_stream_that_another_task_uses_when_the_connection_ends(start, autojump_clock):
    """The handler goes with the connection, and closes the stream: to who still uses it, the peer is gone."""
    taken: list[Stream] = []
    over = trio.Event()

    async def lend(request, stream):
        taken.append(stream)
        await stream.send(Number(1))
        try:
            await trio.sleep_forever()
        finally:
            over.set()

    a, b = await start(1), await start(2, handlers=[(Count, lend)])
    with pytest.raises(PeerGone):
        async with a.endpoint.open(b.peer, Count(0)) as stream:
            assert await stream.receive(Number) == Number(1)
            await a.stop()
            await stream.receive(Number)
    await over.wait()
    await trio.sleep(1)  # until the stream is closed as well
    with pytest.raises(PeerGone):
        await taken[0].receive(Number)


async def test_a_message_that_is_too_long_is_not_sent_and_does_no_harm(start, autojump_clock):
    async def talk(request, stream):
        with pytest.raises(MessageTooLong):
            await stream.send(Echo("x" * MAX_MESSAGE))
        await stream.send(Echo("short"))
        await stream.receive(Number)
        return Echo("x" * MAX_MESSAGE)

    a, b = await start(1), await start(2, handlers=[(Count, talk)])
    with pytest.raises(MessageTooLong):
        await a.endpoint.request(b.peer, Echo("x" * MAX_MESSAGE), Echo)
    async with a.endpoint.open(b.peer, Count(0)) as stream:
        assert await stream.receive(Echo) == Echo("short")
        await stream.send(Number(1))
        with pytest.raises(RequestRefused, match="cannot encode"):
            await stream.receive(Echo)
    assert a.endpoint.is_connected(b.peer)


async def test_raw_bytes_between_messages(start, autojump_clock):
    async def blob(request, stream):
        data = bytearray(request.size)
        await stream.receive_into(data)
        await stream.receive_into(bytearray())
        await stream.send(Number(request.size))
        await stream.send_bytes(data[::-1])
        await stream.send_bytes(b"")
        return Echo("done")

    a, b = await start(1), await start(2, handlers=[(Blob, blob)])
    data = random.Random(1).randbytes(3_000_001)
    async with a.endpoint.open(b.peer, Blob(len(data)), bulk=True) as stream:
        await stream.send_bytes(data)
        assert await stream.receive(Number) == Number(len(data))
        back = bytearray(len(data))
        await stream.receive_into(back)
        assert back == data[::-1]
        assert await stream.receive(Echo) == Echo("done")


async def test_raw_bytes_are_not_kept_while_somebody_waits_for_them(start, autojump_clock, monkeypatch):
    size, count = 300_100, 20  # the last record of each part is a short one
    kept = 0

    def store(stream, data, store=inflow._store):
        nonlocal kept
        kept += len(data) if stream.bulk else 0
        store(stream, data)

    async def give(request, stream):
        for number in range(count):
            await stream.send_bytes(bytes([number]) * size)

    monkeypatch.setattr(inflow, "_store", store)
    a, b = await start(1), await start(2, handlers=[(Blob, give)])
    async with a.endpoint.open(b.peer, Blob(0)) as stream:
        buffer = bytearray(size)
        for number in range(count):
            await stream.receive_into(buffer)
            assert buffer == bytes([number]) * size
    assert kept < 2 * INITIAL_WINDOW + size


async def test_leaving_early_resets_the_other_side(start, autojump_clock):
    seen = trio.Event()

    async def wait(request, stream):
        with pytest.raises(StreamReset):
            await stream.receive(Echo)
        seen.set()

    a, b = await start(1), await start(2, handlers=[(Echo, wait)])
    async with a.endpoint.open(b.peer, Echo("")):
        await trio.sleep(1)
    await seen.wait()


async def test_finished_data_arrives_though_nobody_waits_for_it(start, autojump_clock):
    received = trio.Event()

    async def blob(request, stream):
        await trio.sleep(3)
        await stream.receive_into(bytearray(request.size))
        received.set()
        for _ in range(100):
            with pytest.raises(StreamReset):
                while True:
                    await stream.send(Echo("x" * 10_000))

    a, b = await start(1), await start(2, handlers=[(Blob, blob)])
    async with a.endpoint.open(b.peer, Blob(60_000)) as stream:
        await stream.send_bytes(bytes(60_000))
        await stream.finish()
    await received.wait()


async def test_a_stream_that_nobody_reads_blocks_no_other(start, autojump_clock):
    released = trio.Event()

    async def ignore(request, stream):
        await released.wait()

    a, b = await start(1), await start(2, handlers=[(Echo, echo), (Blob, ignore)])

    async def push(endpoint, task_status):
        async with endpoint.open(b.peer, Blob(1), bulk=True) as stream:
            task_status.started()
            with pytest.raises(StreamReset):
                await stream.send_bytes(bytes(10_000_000))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            await nursery.start(push, a.endpoint)
        await trio.sleep(50)
        assert await a.endpoint.request(b.peer, Echo("through"), Echo) == Echo("through!")
        buffered = sum(
            stream.raw.available for connection in b.endpoint._connections for stream in connection._streams.values()
        )
        assert 5 * 50_000 < buffered <= 5 * INITIAL_WINDOW
        released.set()


async def test_more_requests_than_streams_wait_for_their_turn(start, autojump_clock):
    async def slow(request, stream):
        await trio.sleep(1)
        return request

    limits = Limits(max_streams=4)
    a, b = await start(1, limits=limits), await start(2, limits=limits, handlers=[(Echo, slow)])
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(partial(a.endpoint.request, b.peer, Echo(""), Echo, timeout=60))
    assert trio.current_time() >= 10


async def test_cancelled_users_do_no_harm(start, autojump_clock):
    rng = random.Random(5)

    async def blob(request, stream):
        data = bytearray(request.size)
        await stream.receive_into(data)
        await stream.send_bytes(data)
        return Number(len(data))

    a, b = await start(1), await start(2, handlers=[(Echo, echo), (Blob, blob)])

    async def one():
        size = rng.randrange(1, 3_000_000)
        with trio.move_on_after(rng.random() * 0.2):
            async with a.endpoint.open(b.peer, Blob(size), bulk=True) as stream:
                data = rng.randbytes(size)
                back = bytearray(size)
                async with trio.open_nursery() as inner:
                    inner.start_soon(stream.send_bytes, data)
                    await stream.receive_into(back)
                assert back == data

    async with trio.open_nursery() as nursery:
        for _ in range(40):
            nursery.start_soon(one)
            with trio.move_on_after(rng.random() * 0.02):
                await a.endpoint.request(b.peer, Echo("x" * 200_000), Echo)
    assert await a.endpoint.request(b.peer, Echo("fine"), Echo) == Echo("fine!")
    await trio.sleep(1)
    for node in (a, b):
        (connection,) = node.endpoint._connections
        assert connection.mux.idle
        assert connection.streams == 0


async def test_a_cancelled_receive_goes_on_where_it_was(start, autojump_clock):
    async def dribble(request, stream):
        await trio.sleep(2)
        await stream.send(Echo("x" * 500_000))
        return Number(1)

    a, b = await start(1), await start(2, handlers=[(Echo, dribble)])
    async with a.endpoint.open(b.peer, Echo("")) as stream:
        attempts = 0
        while True:
            attempts += 1
            with trio.move_on_after(0.021):
                received = await stream.receive(Echo)
                break
        assert received == Echo("x" * 500_000)
        assert attempts > 95
        assert await stream.receive(Number) == Number(1)


async def test_caps_hold_for_bulk_and_do_not_delay_control(start, autojump_clock):
    async def blob(request, stream):
        await stream.receive_into(bytearray(request.size))
        return Number(request.size)

    handlers = [(Echo, echo), (Blob, blob)]
    a = await start(1, limits=Limits(max_upload=1e6), handlers=handlers)
    b = await start(2, limits=Limits(max_download=5e5), handlers=handlers)
    c = await start(3, handlers=handlers)

    async def push(source, target):
        began = trio.current_time()
        async with source.endpoint.open(target.peer, Blob(10_000_000), bulk=True) as stream:
            await stream.send_bytes(bytes(10_000_000))
            await stream.receive(Number)
        return trio.current_time() - began

    assert 9 < await push(a, c) < 11
    assert await push(c, a) < 1
    assert 16 < await push(c, b) < 21
    async with trio.open_nursery() as nursery:
        nursery.start_soon(push, a, c)
        for _ in range(5):
            await trio.sleep(1)
            began = trio.current_time()
            await a.endpoint.request(c.peer, Echo(""), Echo)
            assert trio.current_time() - began < 0.05


async def test_control_overtakes_bulk_on_a_slow_link(start, network, autojump_clock):
    async def blob(request, stream):
        await stream.receive_into(bytearray(request.size))
        return Number(request.size)

    network.set_link("host1", "host2", latency=0.01, bandwidth=10e6)
    a, b = await start(1), await start(2, handlers=[(Echo, echo), (Blob, blob)])

    async def push():
        async with a.endpoint.open(b.peer, Blob(50_000_000), bulk=True) as stream:
            await stream.send_bytes(bytes(50_000_000))
            await stream.receive(Number)

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(push)
        nursery.start_soon(push)
        await trio.sleep(2)
        for _ in range(5):
            before = trio.current_time()
            await a.endpoint.request(b.peer, Echo(""), Echo)
            assert trio.current_time() - before < 0.35  # the network's own buffer takes 0.1 s to drain
            await trio.sleep(0.5)
    assert trio.current_time() - began < 11.5  # the link is kept busy

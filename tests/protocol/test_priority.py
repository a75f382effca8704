"""Requests while bulk data fills a slow line: they go first, whatever carries the data."""

from __future__ import annotations

from typing import Annotated

import pytest
import trio
from msgspec import Meta

from protocol.connection import Limits
from protocol.memory import QUEUE
from protocol.wire import message
from tests.protocol.messages import Echo, echo

RATE = 30_000.0


@message("test.load")
class Load:
    size: Annotated[int, Meta(ge=0, le=2**40)]


async def take(request, stream):
    buffer = bytearray(request.size)
    await stream.receive_into(buffer)


@pytest.mark.parametrize("lanes", [0, 1, 8])
async def test_a_request_does_not_wait_for_data_on_a_slow_line(start_endpoint, network, autojump_clock, nursery, lanes):
    """Neither for what is sent before anything is known about the line, nor for what lanes carry later."""
    a, b = [
        await start_endpoint(seed, handlers=[(Load, take), (Echo, echo)], limits=Limits(max_lanes=lanes))
        for seed in (1, 2)
    ]
    network.set_link("host1", "host2", latency=0.05, bandwidth=RATE)
    await a.endpoint.connect(b.peer)

    async def send(size):
        async with a.endpoint.open(b.peer, Load(size), bulk=True) as stream:
            await stream.send_bytes(bytes(size))

    for _ in range(3):
        nursery.start_soon(send, 2_000_000)
    longest = 0.0
    for _ in range(60):
        began = trio.current_time()
        await a.endpoint.request(b.peer, Echo("x"), Echo, timeout=600)
        longest = max(longest, trio.current_time() - began)
        await trio.sleep(0.5)
    # The queue of the line, and what is being handed over just now: a first write alone once was twice as much, and
    # queues without bound held a minute of it.
    assert longest < 4 * QUEUE + (1 << 17) / RATE

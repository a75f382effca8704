"""Streams on which only the side that opened them sends, and their windows."""

from __future__ import annotations

import pytest
import trio

from protocol.budget import Budget
from protocol.errors import ProtocolError
from protocol.frames import PIECE, Kind, pack
from protocol.mux import FIRST_WINDOW, Mux
from protocol.mux_stream import INITIAL_WINDOW, MuxLimits, Readable, Reset
from protocol.wire import message

LARGE = 1 << 30


@message("test.blob")
class Blob:
    """Begins a stream of bytes."""

    size: int


def pair():
    accounts = [Budget(LARGE, connections=1).account("somewhere") for _ in range(2)]
    return tuple(Mux(initiator=not n, limits=MuxLimits(), memory=account) for n, account in enumerate(accounts))


def transfer(source, target):
    events = []
    for record in source.take(LARGE, LARGE).records:
        events += target.receive(bytes(record))
    return events


def test_one_way_streams_end_with_what_their_opener_sends():
    a, b = pair()
    ours = a.open(one_way=True)
    a.write(ours, b"no answer")
    a.finish(ours)
    opened, readable = transfer(a, b)
    theirs = opened.stream
    assert readable == Readable(theirs)
    assert (theirs.stopped, theirs.finished) == (True, True)
    buffer = bytearray(theirs.available)
    b.read_into(theirs, memoryview(buffer))
    assert buffer == b"no answer"
    assert theirs.at_end
    assert ours.at_end
    assert a.idle
    assert b.idle
    assert not b.urgent


def test_one_way_streams_can_be_declined():
    a, b = pair()
    ours = a.open(one_way=True)
    (opened,) = transfer(a, b)
    b.reset(opened.stream, "busy", "not now")
    assert transfer(b, a) == [Reset(ours, "busy", "not now")]
    assert a.idle
    assert b.idle


@pytest.mark.parametrize("frame", [pack(Kind.DATA, 0, 1, b"x"), pack(Kind.PIECE, 0, 1, PIECE.pack(0, 1))])
def test_nothing_comes_back_on_one_way_streams(frame):
    a, b = pair()
    a.open(one_way=True)
    transfer(a, b)
    with pytest.raises(ProtocolError):
        for record in (frame, b"x"):
            a.receive(record)


def test_windows_grow_for_those_who_need_more():
    a, b = pair()
    a.open(bulk=True, one_way=True)
    (opened,) = transfer(a, b)
    b.widen(opened.stream, INITIAL_WINDOW)
    assert opened.stream.window == INITIAL_WINDOW
    b.widen(opened.stream, INITIAL_WINDOW + 1)
    assert opened.stream.window == FIRST_WINDOW


async def test_a_connection_that_is_replaced_stays_until_the_other_side_has_read(start_endpoint, autojump_clock):
    """Whoever sends on a one-way stream does not hear of its end."""
    got = []

    async def read(request, stream):
        await trio.sleep(0.5)
        data = bytearray(request.size)
        await stream.receive_into(data)
        got.append(bytes(data))

    a, b = await start_endpoint(1), await start_endpoint(2, handlers=[(Blob, read)])
    await a.endpoint.connect(b.peer)
    await trio.sleep(1)
    connections = [next(iter(node.endpoint._connections)) for node in (a, b)]
    async with a.endpoint.open(b.peer, Blob(1000), bulk=True, one_way=True) as stream:
        await stream.send_bytes(b"x" * 1000, last=True)
    for connection in connections:
        connection.retire()
    await trio.sleep(30)
    assert got == [b"x" * 1000]
    assert all(connection.failure is not None for connection in connections)

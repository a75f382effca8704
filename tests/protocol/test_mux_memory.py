"""What streams take from their connection's account, and when they give it back."""

from __future__ import annotations

from protocol.budget import Budget
from protocol.mux import Mux
from protocol.mux_stream import INITIAL_WINDOW, MuxLimits, Opened, Reset

LARGE = 1 << 30


def pair(memory=LARGE):
    """Two sides, the second of which has only so much memory."""
    accounts = [Budget(size, connections=1).account("somewhere") for size in (LARGE, memory)]
    return tuple(Mux(initiator=not n, limits=MuxLimits(), memory=account) for n, account in enumerate(accounts))


def transfer(source, target):
    return [event for record in source.take(LARGE, LARGE).records for event in target.receive(bytes(record))]


def opened(a, b):
    """A stream as both sides know it."""
    ours = a.open()
    (event,) = transfer(a, b)
    return ours, event.stream


def test_streams_for_which_there_is_no_memory_are_refused():
    a, b = pair(4 * INITIAL_WINDOW)
    streams = [a.open() for _ in range(4)]
    for ours in streams:
        a.write(ours, bytes(1_000_000))
    transfer(a, b)
    assert b.memory.held == 3 * INITIAL_WINDOW
    (refused,) = transfer(b, a)
    assert (refused.stream, refused.code) == (streams[3], "busy")
    a.reset(streams[0])
    a.open()
    assert [type(event) for event in transfer(a, b)] == [Reset, Opened]


def test_what_was_received_is_kept_in_mind_until_it_is_read():
    a, b = pair()
    ours, theirs = opened(a, b)
    other, third = opened(a, b)
    for stream in (ours, other):
        a.write(stream, bytes(5000))
        a.finish(stream)
    transfer(a, b)
    b.finish(theirs)
    b.finish(third)
    transfer(b, a)
    assert a.idle
    assert b.idle
    assert b.memory.held == 10_000
    b.read_into(theirs, memoryview(bytearray(1000)))
    assert b.memory.held == 9000
    b.stop(third)
    b.read_into(theirs, memoryview(bytearray(4000)))
    assert a.memory.held == b.memory.held == 0


def test_messages_that_are_not_taken_are_kept_in_mind():
    a, b = pair(4 * INITIAL_WINDOW)
    _, theirs = opened(a, b)
    assert b.keep(theirs, 50_000)
    b.write(theirs, bytes(50_000))
    assert b.memory.held == INITIAL_WINDOW + 50_000
    assert not b.keep(theirs, 100_000)
    b.take(20_000, 0)
    assert b.memory.held == INITIAL_WINDOW + 30_000
    b.reset(theirs)
    assert b.memory.held == 0

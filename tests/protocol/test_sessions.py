"""The coordinator's side of a conversation with a member."""

from __future__ import annotations

import pytest
import trio

from protocol.errors import MessageTooLong, RequestTimeout
from protocol.identity import PeerId
from protocol.plan import NO_BALLOT
from protocol.round_messages import Ahead, CallOff, Queued
from protocol.sessions import SOON, Session, local_lines
from protocol.wire import MAX_MESSAGE
from tests.protocol.messages import Echo, echo


async def test_a_message_that_is_too_long_ends_the_conversation_and_nothing_else(start_endpoint, autojump_clock):
    ended = trio.Event()
    sessions = []

    async def attend(session):
        await trio.sleep_forever()

    async def coordinate(request, stream):
        session = Session(stream, 1.0, lambda: 7)
        sessions.append(session)
        session.put(Echo("x" * MAX_MESSAGE))
        await session.run(attend)
        ended.set()

    a, b = await start_endpoint(1), await start_endpoint(2, handlers=[(Queued, coordinate), (Echo, echo)])
    async with a.endpoint.open(b.peer, Queued(0)):
        await ended.wait()
        assert isinstance(sessions[0].error, MessageTooLong)
    assert await a.endpoint.request(b.peer, Echo(""), Echo) == Echo("!")


async def test_who_hears_of_a_plan_at_once_is_not_told_that_it_has_to_wait(autojump_clock, nursery):
    ours, theirs = local_lines(PeerId(bytes(32)))

    async def attend(session):
        await trio.sleep_forever()

    session = Session(theirs, 1.0, lambda: 7)
    nursery.start_soon(session.run, attend)
    session.put(CallOff(NO_BALLOT, None))
    assert await ours.receive(CallOff, timeout=0.01)
    began = trio.current_time()
    for count in range(1, 4):
        assert await ours.receive(Queued) == Queued(7)
        assert trio.current_time() - began == pytest.approx(count)
    session.end()


async def test_who_has_to_wait_is_told_soon(autojump_clock, nursery):
    ours, theirs = local_lines(PeerId(bytes(32)))

    async def attend(session):
        await trio.sleep_forever()

    session = Session(theirs, 1.0, lambda: 7)
    nursery.start_soon(session.run, attend)
    assert await ours.receive(Queued, timeout=2 * SOON) == Queued(7)
    session.put(Ahead(1, PeerId(bytes(32))))
    assert await ours.receive(Ahead, timeout=0.01)
    with pytest.raises(RequestTimeout):
        await ours.receive(Queued, timeout=5)

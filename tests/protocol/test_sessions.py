"""The coordinator's side of a conversation with a member."""

from __future__ import annotations

import trio

from protocol.errors import MessageTooLong
from protocol.round_messages import Queued
from protocol.sessions import Session
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
    async with a.endpoint.open(b.peer, Queued(0)) as stream:
        assert await stream.receive(Queued) == Queued(7)
        await ended.wait()
        assert isinstance(sessions[0].error, MessageTooLong)
    assert await a.endpoint.request(b.peer, Echo(""), Echo) == Echo("!")

"""Requests that belong to a run and a tag go to those who serve that."""

from __future__ import annotations

import pytest

from protocol.errors import RequestRefused
from protocol.wire import message

RUN, OTHER = b"r" * 32, b"o" * 32


@message("test.question")
class Question:
    run: bytes
    tag: str


@message("test.answer")
class Answer:
    by: str


def answers(by: str):
    async def handler(request, stream):
        return Answer(by)

    return handler


async def test_each_tag_has_handlers_of_its_own(start_endpoint, autojump_clock):
    a, b = await start_endpoint(1), await start_endpoint(2)

    async def ask(run: bytes, tag: str) -> str:
        try:
            return (await a.endpoint.request(b.peer, Question(run, tag), Answer)).by
        except RequestRefused as error:
            return error.code

    with b.endpoint.serving(RUN, "x", {Question: answers("x")}):
        with b.endpoint.serving(RUN, "y", {Question: answers("y")}):
            assert [await ask(RUN, tag) for tag in "xyz"] == ["x", "y", "unknown_run"]
            with b.endpoint.serving(RUN, None, {Question: answers("others")}):
                assert [await ask(RUN, tag) for tag in "xyz"] == ["x", "y", "others"]
                assert await ask(OTHER, "x") == "unknown_run"
        assert await ask(RUN, "y") == "unknown_run"
        with pytest.raises(ValueError, match="already"), b.endpoint.serving(RUN, "x", {}):
            pass
    b.endpoint.handle(Question, answers("anybody"))
    assert await ask(RUN, "x") == "anybody"

"""What endpoints say to each other in tests."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from protocol.wire import message


@message("test.echo")
class Echo:
    text: str


@message("test.count")
class Count:
    to: Annotated[int, Meta(ge=0, le=1000)]


@message("test.number")
class Number:
    value: int


@message("test.blob")
class Blob:
    size: int


@message("test.unserved")
class Unserved:
    pass


async def echo(request, stream):
    """A handler."""
    return Echo(request.text + "!")

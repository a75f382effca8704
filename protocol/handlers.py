"""Serving requests: which handler a stream's first message is for, and what becomes of its errors."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from protocol import wire
from protocol.connection import Connection
from protocol.errors import ProtocolError, RequestRefused, ShoalError, first_error
from protocol.stream import Stream
from protocol.wire import Message

_REQUEST_TIMEOUT = 10.0  # seconds from the opening of a stream to the end of the request on it

_logger = logging.getLogger(__name__)
Handler: TypeAlias = Callable[[Any, Stream], Awaitable[Message | None]]


class Handlers:
    """The request types that an endpoint serves."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._runs: dict[tuple[bytes, str | None], dict[str, Handler]] = {}  # by run and tag
        self._types: dict[str, type] = {}

    def add(self, message_type: type, handler: Handler) -> None:
        """Serves requests of a type, see `Endpoint.handle`."""
        name = wire.name_of(message_type)
        if name in self._handlers:
            raise ValueError(f"there is a handler for {name} already")
        self._handlers[name] = handler
        self._types[name] = message_type

    @contextmanager
    def serving(self, run: bytes, tag: str | None, handlers: Mapping[type, Handler]) -> Iterator[None]:
        """Within the block, serves requests whose `run` and `tag` are these, as `Endpoint.handle` does.

        A tag of None is for those with a tag that nothing else is served for. Requests of other runs are refused.

        Raises:
            ValueError: If this run and tag are served already.
        """
        if (run, tag) in self._runs:
            raise ValueError(f"this run is served already, with tag {tag!r}")
        self._runs[run, tag] = {wire.name_of(kind): handler for kind, handler in handlers.items()}
        self._types.update({wire.name_of(kind): kind for kind in handlers})
        try:
            yield
        finally:
            del self._runs[run, tag]

    async def serve(self, connection: Connection, stream: Stream) -> None:
        """Reads the request of a stream that the peer opened, and has it handled."""
        try:
            data = await stream.receive_encoded(timeout=_REQUEST_TIMEOUT)
            handler, request = self._decode(data)
            answer = await handler(request, stream)
            if answer is not None:
                await stream.send_encoded(wire.encode(answer), last=True)
            else:
                await stream.finish()
        # A handler with tasks of its own may raise groups, with our cancellation in them; that goes on its way.
        except* ShoalError as group:
            _answer_with_errors(connection, stream, group)
        except* Exception:  # a bug in one handler must not end everybody's connections
            _logger.exception("a handler failed on a request of %s", connection.peer.short)
            stream.reset("failed", "internal error")

    def _decode(self, data: bytearray) -> tuple[Handler, Any]:
        try:
            request: Message = wire.decode(data, self._types)
        except wire.UnknownMessage as error:
            raise RequestRefused(str(error), code="unknown_type") from None
        name = wire.name_of(type(request))
        run, tag = getattr(request, "run", b""), getattr(request, "tag", "")
        for handlers in (self._runs.get((run, tag), {}), self._runs.get((run, None), {}), self._handlers):
            if name in handlers:
                return handlers[name], request
        raise RequestRefused("this peer does not take part in that run", code="unknown_run")


def _answer_with_errors(connection: Connection, stream: Stream, group: BaseExceptionGroup[ShoalError]) -> None:
    error = first_error(group)
    if isinstance(error, ProtocolError) and not error.blamed:
        connection.fail(error)
    else:  # also if it was the fault of somebody else, whom the handler asked
        stream.reset(error.code if isinstance(error, RequestRefused) else "failed", str(error))

"""What a trainer asks servers for, on streams that are kept and used again.

A stream's window is small at first, and grows once somebody reads: so what is larger than that takes a round trip or
more beyond those that it needs. A stream that was used before has a window that such a request and its answer fit into.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress

import attrs
import trio

from optim.swarm.messages import Answer, Request
from peer.pipeline.messages import Ask, Sizes, ask_of, receive_answer, send_payloads
from peer.pipeline.transfer import LARGE
from protocol.endpoint import Endpoint
from protocol.errors import PeerGone, RequestTimeout, StreamReset
from protocol.identity import PeerId
from protocol.stream import Stream

IDLE = 10.0
"""Seconds after which a stream that nobody has used is closed."""


@attrs.frozen(eq=False)
class _Kept:
    """A stream between two requests."""

    stream: Stream
    closing: AsyncExitStack
    since: float


class Calls:
    """Asks servers. `aclose` closes what is kept.

    Args:
        endpoint: Carries everything.
        sizes: What an answer has at most.
    """

    def __init__(self, endpoint: Endpoint, sizes: Sizes) -> None:
        self._endpoint, self._sizes = endpoint, sizes
        self._kept: dict[tuple[PeerId, bytes], list[_Kept]] = {}

    async def ask(self, peer: PeerId, run: bytes, request: Request) -> Answer:
        """Has a server of a stage do something, on a stream that nobody else uses meanwhile.

        Args:
            peer: Who.
            run: The stage's, see `stage_run`.
            request: What.

        Raises:
            ShoalError: Nothing came of it, or the answer got lost.
        """
        await self._close(trio.current_time() - IDLE)
        key, ask = (peer, run), ask_of(run, request)
        deadline = trio.current_time() + request.patience
        while (kept := self._kept.get(key)) and trio.current_time() < deadline:
            used = kept.pop()
            with suppress(PeerGone, StreamReset):  # it was over, unless the server is: that shows on the next one
                return await self._converse(key, used.stream, used.closing, request, ask)
        if trio.current_time() >= deadline:  # the trainer has withdrawn it: it must not be counted after that
            raise RequestTimeout(f"{peer.short} has not answered within {request.patience:g} s")
        closing = AsyncExitStack()
        stream = await closing.enter_async_context(self._endpoint.open(peer, ask, bulk=True))
        stream.expect(LARGE)
        return await self._converse(key, stream, closing, request)

    async def aclose(self) -> None:
        """Closes all streams that are kept."""
        await self._close(trio.current_time())

    async def _converse(
        self,
        key: tuple[PeerId, bytes],
        stream: Stream,
        closing: AsyncExitStack,
        request: Request,
        ask: Ask | None = None,
    ) -> Answer:
        """Sends a request, of which the first message may have been sent, and keeps the stream if all goes well."""
        async with closing:
            if ask is not None:
                await stream.send(ask)
            await send_payloads(stream, request.inputs, request.targets, request.gradient)
            answer = await receive_answer(stream, self._sizes)
            self._kept.setdefault(key, []).append(_Kept(stream, closing.pop_all(), trio.current_time()))
            return answer

    async def _close(self, latest: float) -> None:
        """Closes streams that were last used by then, and those of connections that others have replaced."""
        for key, kept in list(self._kept.items()):
            old = [each for each in kept if each.since <= latest or each.stream.retired]
            self._kept[key] = [each for each in kept if each not in old]
            if not self._kept[key]:
                del self._kept[key]
            for each in old:
                await each.closing.aclose()  # which does not wait

"""Fetching the states of stages."""

from __future__ import annotations

import trio

from peer.pipeline.messages import FetchState, FetchTied, TensorsReply
from protocol.endpoint import Endpoint
from protocol.errors import ProtocolError, RequestTimeout
from protocol.identity import PeerId

PATIENCE = 10.0
"""Seconds until an answer begins."""

LEAST_RATE = 1 << 14
"""Bytes per second: who sends less is given up, after `PATIENCE` more."""

LARGE = 1 << 20
"""Bytes that there may well be: they come at once."""


async def fetch_tensors(
    endpoint: Endpoint, peer: PeerId, request: FetchState | FetchTied, *, most: int
) -> tuple[int, bytes]:
    """Tensors as bytes, and the step that they belong to.

    Raises:
        ProtocolError: There are more bytes than `most`.
        ShoalError: The peer does not have them, or does not send them.
    """
    async with endpoint.open(peer, request, bulk=True) as stream:
        stream.expect(LARGE)
        await stream.finish()
        reply = await stream.receive(TensorsReply, timeout=PATIENCE)
        if reply.size > most:
            raise ProtocolError(f"{peer.short} offers {reply.size} bytes where {most} are expected at most")
        data = bytearray(reply.size)
        limit = PATIENCE + reply.size / LEAST_RATE
        with trio.move_on_after(limit) as scope:
            await stream.receive_into(data)
        if scope.cancelled_caught:
            raise RequestTimeout(f"{peer.short} did not send {reply.size} bytes within {limit:.0f} s")
        return reply.step, bytes(data)

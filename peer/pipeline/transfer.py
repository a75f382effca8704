"""Fetching the states of stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import attrs
import torch
import trio

from optim.swarm.state import Form, StageState
from peer.node import Compute
from peer.pipeline.messages import FetchState, FetchTied, TensorsReply, stage_run
from peer.pipeline.tensors import load, load_tensors
from peer.pipeline.trust import Trust
from protocol.endpoint import Endpoint
from protocol.errors import ProtocolError, RequestRefused, RequestTimeout
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


_T = TypeVar("_T")


@attrs.define(kw_only=True)
class Fetcher:
    """Fetches tensors of stages from others, checks them, and doubts those whose tensors make no sense."""

    endpoint: Endpoint
    run_id: bytes
    last: int
    """The step that ends the run; 0 if none does."""
    trust: Trust
    compute: Compute
    fetched: int = attrs.field(default=0, init=False)
    """Bytes of states and gradients so far."""

    async def state(self, peer: PeerId, stage: int, form: Form, kinds: Mapping[str, bool]) -> tuple[StageState, bytes]:
        """The state of a stage, and the same as bytes.

        Args:
            peer: Who has it.
            stage: Its number.
            form: What it looks like.
            kinds: What optimizers remember, see `inner_kinds`.

        Raises:
            ProtocolError: It is not one of this stage.
            ShoalError: The peer does not have it, or does not send it.
        """

        def read(step: int, data: bytes) -> tuple[StageState, bytes]:
            if 0 < self.last < step:
                raise ProtocolError(f"a stage's state of step {step} of {self.last}")
            state = load(data, step)
            form.check(state, kinds)
            return state, data

        return await self._fetch(peer, stage, FetchState(stage_run(self.run_id, stage)), form, read)

    async def tied(self, peer: PeerId, stage: int, step: int, form: Form) -> dict[str, torch.Tensor]:
        """A stage's part of the gradients of what it shares with others, at a step that it has settled.

        Raises:
            ProtocolError: They are not those.
            ShoalError: The peer does not have them, or does not send them.
        """

        def read(_: int, data: bytes) -> dict[str, torch.Tensor]:
            tied = load_tensors(data)
            form.check_tied(tied)
            return tied

        return await self._fetch(peer, stage, FetchTied(stage_run(self.run_id, stage), step), form, read)

    async def _fetch(
        self,
        peer: PeerId,
        stage: int,
        request: FetchState | FetchTied,
        form: Form,
        read: Callable[[int, bytes], _T],
    ) -> _T:
        if peer not in self.trust:
            raise RequestRefused(f"what {peer.short} has sent made no sense", code="distrusted")
        try:
            step, data = await fetch_tensors(self.endpoint, peer, request, most=form.most)
            self.fetched += len(data)
            return await self.compute(read, step, data)
        except ProtocolError as error:
            self.trust.doubt(peer, stage, str(error))
            raise

"""The exchange of one pair: both send their vector and take the other's, on one stream, both ways at a time.

Vectors are sent as the run's codec writes them. Both sides, the sender too, take for a vector what its bytes mean, so
they can compute the same of both vectors. What a sender's bytes leave out is part of its next exchange, if this one was
complete as far as it can know: whether the partner has got all of it, no message could tell for certain.
"""

from __future__ import annotations

import contextlib

import torch
import trio

from protocol.codecs import make_codec
from protocol.coordinator import RoundTimes
from protocol.endpoint import Endpoint, Stream
from protocol.errors import RequestRefused, RequestTimeout, ShoalError, StreamReset, first_error
from protocol.identity import PeerId
from protocol.pairs import Pairing, partner, swap_id
from protocol.plan import Plan
from protocol.reduction import pieces
from protocol.round_messages import RingData
from protocol.transfer import READ, RingInbox
from protocol.vectors import vector_bytes

_AT_ONCE = 1 << 20
"""Elements that are decoded without a break: a millisecond."""


class Swap:
    """Our side of a pair. What becomes of the other pairs does not matter, nor do they notice what becomes of ours.

    Args:
        plan: What all members have agreed on; we are among them.
        values: Our vector; only read.
        encoded: The same as the plan's codec writes it; not looked at for fp32. None: it is not finite.
        pairing: Who belongs to whom; the same at all members.
    """

    def __init__(
        self,
        plan: Plan,
        values: torch.Tensor,
        encoded: memoryview | None,
        pairing: Pairing,
        *,
        endpoint: Endpoint,
        inbox: RingInbox,
        times: RoundTimes,
    ) -> None:
        self.plan = plan
        self.partner = partner(plan, endpoint.peer_id, pairing)
        """Whom we were matched with; None for the odd one out."""
        self.theirs: torch.Tensor | None = None
        """What the partner's bytes mean, complete; None if they did not come."""
        self.ours: torch.Tensor | None = None
        """What our bytes mean, which the partner takes for our vector; None if `theirs` is, or ours is not finite."""
        self.problem = ""
        """Why it did not."""
        self.bytes_sent = 0
        self.bytes_received = 0
        self._values, self._endpoint, self._inbox, self._times = values, endpoint, inbox, times
        self._codec, self.finite = make_codec(plan.codec), encoded is not None
        if encoded is None:
            self._data = memoryview(b"\xff" * self._codec.encoded_size(plan.length))  # no number in any codec
        else:
            self._data = vector_bytes(values) if plan.codec == "fp32" else encoded

    async def run(self) -> None:
        """Swaps, and returns when both directions are done, or cannot be. Never raises but when cancelled."""
        if self.partner is None:
            await trio.lowlevel.checkpoint()
            return
        # The other one may know the plan later: it has to find out that a third one was lost, and fetch the result.
        patience = 2 * self._times.stall + self._times.settle
        limit = patience + self._times.transfer(self.plan.length)
        problem = f"{self.partner.short} was too slow"
        with trio.move_on_after(limit):
            try:
                await self._swap(patience)
                problem = ""
            except* trio.TooSlowError:
                problem = f"nothing came from {self.partner.short} in time"
            except* ShoalError as group:
                problem = str(first_error(group))
        if self.theirs is None:
            self.problem = problem

    async def _swap(self, patience: float) -> None:
        assert self.partner is not None
        plan, key = self.plan, swap_id(self.plan)
        if plan.members.index(self._endpoint.peer_id) < plan.members.index(self.partner):
            await self._open(self.partner, RingData(plan.run, plan.tag, key), patience)
            return
        with trio.fail_after(patience):
            arrival = await self._inbox.take(key, self.partner)
        try:
            await self._both_ways(arrival.stream, self._times.stall)
        finally:
            arrival.over.set()

    async def _open(self, peer: PeerId, request: RingData, patience: float) -> None:
        deadline = trio.current_time() + patience
        while True:
            try:
                async with self._endpoint.open(peer, request, bulk=True) as stream:
                    await self._both_ways(stream, patience)
                return
            except* RequestRefused as group:
                error = first_error(group)
                if getattr(error, "code", "") != "unknown_plan" or trio.current_time() >= deadline:
                    raise

    async def _both_ways(self, stream: Stream, patience: float) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send, stream)
            theirs, lossy = torch.empty(self.plan.length, dtype=torch.float32), self.plan.codec != "fp32"
            size = self._codec.encoded_size(self.plan.length)
            data = memoryview(bytearray(size)) if lossy else vector_bytes(theirs)
            for start in range(0, data.nbytes, READ):
                piece = data[start : start + READ]
                with trio.fail_after(patience if not start else self._times.stall):
                    await stream.receive_into(piece)
                self.bytes_received += piece.nbytes
            await self._decode(data, theirs)
            ours = torch.empty_like(theirs) if lossy else self._values
            if lossy and self.finite:
                await self._decode(self._data, ours)
            self.theirs, self.ours = theirs, ours if self.finite else None
        # Who closes the stream before the other one has finished takes the rest of its own vector back.
        with contextlib.suppress(StreamReset, RequestTimeout):
            await stream.receive(RingData, timeout=self._times.stall)

    async def _send(self, stream: Stream) -> None:
        data = self._data
        for start in range(0, data.nbytes, READ):
            piece = data[start : start + READ]
            await stream.send_bytes(piece)
            self.bytes_sent += piece.nbytes
        await stream.finish()

    async def _decode(self, data: memoryview, into: torch.Tensor) -> None:
        """What the bytes of a whole vector mean; fp32 bytes are those of `into`, and only looked at."""
        for start, stop in pieces([(0, len(into))], _AT_ONCE):
            part = data[self._codec.encoded_size(start) : self._codec.encoded_size(stop)]
            if self._codec.name == "fp32":
                self._codec.check(part, stop - start)
            else:
                self._codec.decode(part, into[start:stop])
            await trio.lowlevel.checkpoint()

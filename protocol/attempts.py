"""Carrying out attempts: making the one that a plan asks for, and running it in the right company."""

from __future__ import annotations

from functools import partial

import torch
import trio

from protocol.attempt import Attempt
from protocol.coordinator import RoundTimes
from protocol.courtesy import Courtesy
from protocol.endpoint import Endpoint, Stream
from protocol.errors import RequestRefused, RequestTimeout, ShoalError
from protocol.gather_transfer import GatherTransfer
from protocol.identity import PeerId
from protocol.member import Work
from protocol.metering import Meter
from protocol.pairs import Pairing
from protocol.plan import Plan
from protocol.round_messages import Waiting, Waits
from protocol.swap import Swap
from protocol.transfer import RingInbox, Transfer
from protocol.vectors import VectorPool


class Attempts:
    """The attempts of one peer at the rounds of one tag.

    Args:
        endpoint: Carries everything.
        inbox: Where others' streams of data arrive.
        times: How long to wait for what.
        courtesy: Told when an attempt is going on.
        meter: Measures the lines meanwhile.
    """

    def __init__(
        self, endpoint: Endpoint, inbox: RingInbox, times: RoundTimes, courtesy: Courtesy, meter: Meter
    ) -> None:
        self._endpoint, self._inbox, self._times = endpoint, inbox, times
        self._courtesy, self._meter = courtesy, meter
        self.vectors = VectorPool()
        self.going_on = 0
        """Attempts and swaps whose data is being moved."""
        self.reducing = 0.0
        """Seconds that the last complete one took."""
        self._pace = 0.0  # bytes per second that came in meanwhile
        self._current: dict[bytes, Attempt] = {}

    def make(self, plan: Plan, work: Work) -> Attempt:
        """An attempt at a plan that we have accepted, with what we bring to the round. It has to be `run`."""
        endpoint, inbox, times = self._endpoint, self._inbox, self._times
        if plan.operation != "reduce":
            block = work.values if plan.operation == "gather" else torch.empty(0, dtype=torch.uint8)
            return GatherTransfer(
                plan, block, endpoint=endpoint, inbox=inbox, times=times, pace=self._pace, ask=partial(self._ask, plan)
            )
        assert work.last is None or isinstance(work.last, Transfer)
        return Transfer(
            plan,
            work.values,
            endpoint=endpoint,
            inbox=inbox,
            times=times,
            encoded=work.encoded,
            memory=self.vectors,
            pace=self._pace,
            ask=partial(self._ask, plan),
            previous=work.last,
        )

    async def run(self, attempt: Attempt) -> None:
        """Until it is over, well or not."""
        started, plan_id = trio.current_time(), attempt.plan.id
        self._current[plan_id] = attempt
        try:
            await self._accompanied(attempt)
        finally:
            del self._current[plan_id]
        if attempt.complete:
            self.reducing = trio.current_time() - started
            self._pace = attempt.bytes_received / max(self.reducing, 1e-9)

    async def swap(self, plan: Plan, values: torch.Tensor, encoded: memoryview | None, pairing: Pairing) -> Swap:
        """Our side of a pair, when it is over, well or not."""
        endpoint, inbox, times = self._endpoint, self._inbox, self._times
        swap = Swap(plan, values, encoded, pairing, endpoint=endpoint, inbox=inbox, times=times)
        await self._accompanied(swap)
        return swap

    async def _accompanied(self, one: Attempt | Swap) -> None:
        self.going_on += 1
        try:
            with self._courtesy.first(), self._meter.during():
                await one.run()
        finally:
            self.going_on -= 1

    async def answer(self, question: Waiting, stream: Stream) -> Waits:
        """Whether we are waiting ourselves, for a member that gets nothing from us."""
        attempt = self._current.get(question.plan_id)
        if attempt is None or stream.peer not in attempt.plan.members:
            raise RequestRefused("no such plan here", code="unknown_plan")
        await trio.lowlevel.checkpoint()
        return Waits(attempt.waiting(stream.peer))

    async def _ask(self, plan: Plan, peer: PeerId) -> float | None:
        try:
            question = Waiting(plan.run, plan.tag, plan.id)
            return (await self._endpoint.request(peer, question, (Waits,), timeout=self._times.quiet)).silent
        except RequestTimeout:
            raise
        except ShoalError:
            return None

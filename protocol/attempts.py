"""Carrying out attempts: making the one that a plan asks for, and running it in the right company."""

from __future__ import annotations

import torch
import trio

from protocol.attempt import Attempt
from protocol.coordinator import RoundTimes
from protocol.courtesy import Courtesy
from protocol.endpoint import Endpoint
from protocol.gather_transfer import GatherTransfer
from protocol.member import Work
from protocol.metering import Meter
from protocol.plan import Plan
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

    def make(self, plan: Plan, work: Work) -> Attempt:
        """An attempt at a plan that we have accepted, with what we bring to the round. It has to be `run`."""
        endpoint, inbox, times = self._endpoint, self._inbox, self._times
        if plan.operation != "reduce":
            block = work.values if plan.operation == "gather" else torch.empty(0, dtype=torch.uint8)
            return GatherTransfer(plan, block, endpoint=endpoint, inbox=inbox, times=times)
        assert work.last is None or isinstance(work.last, Transfer)
        return Transfer(
            plan,
            work.values,
            endpoint=endpoint,
            inbox=inbox,
            times=times,
            encoded=work.encoded,
            memory=self.vectors,
            previous=work.last,
        )

    async def run(self, attempt: Attempt | Swap) -> None:
        """Until it is over, well or not."""
        self.going_on += 1
        started = trio.current_time()
        try:
            with self._courtesy.first(), self._meter.during():
                await attempt.run()
            if not isinstance(attempt, Swap) and attempt.complete:
                self.reducing = trio.current_time() - started
        finally:
            self.going_on -= 1

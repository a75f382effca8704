"""The loss on held-out text: one trainer leads it through the stages now and then, and tells all others."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from random import Random

import attrs
import trio

from optim.swarm.messages import Answer, Request
from optim.swarm.payloads import Packer, Payload
from optim.swarm.trainer import Sample
from peer.pipeline.crew import Crew
from peer.pipeline.messages import MOST_LOSS, Measured
from peer.pipeline.trust import Trust
from protocol.errors import ShoalError
from protocol.identity import PeerId

RETRY = 0.5
"""Seconds until a sample that was not led through all stages is tried again, unless the standings change earlier."""

LONGEST = 30.0
"""Seconds for which a measurement after the last step is waited for."""

AT_A_TIME = 4
"""Samples on their way at once: training goes on meanwhile."""


@attrs.frozen(kw_only=True)
class Plan:
    """What is measured, and when."""

    held_out: Callable[[], Sequence[Sample]]
    """What to measure with: the same at all trainers."""
    stages: int
    microbatches: int
    """Numbers that requests may have."""
    every: int
    """Steps between two measurements."""
    last: int
    """The step that ends the run, after which there is one more; 0 if none does."""


class Validation:
    """One peer's part in it: `follow` must run, and `measure` if it is a trainer.

    Args:
        plan: What all agree on.
        crew: Who does what.
        ask: Has a server of a stage do something; raises ShoalError.
        rng: Spreads load.
        trust: Who may be asked.
        on_loss: Told the step and the loss whenever a measurement is known, ours or another's; not a number if it was
            not finite.
    """

    def __init__(
        self,
        plan: Plan,
        crew: Crew,
        ask: Callable[[int, PeerId, Request], Awaitable[Answer]],
        *,
        rng: Random,
        trust: Trust,
        on_loss: Callable[[int, float], None],
    ) -> None:
        self._plan, self._crew, self._ask, self._rng, self._on_loss = plan, crew, ask, rng, on_loss
        self._trust = trust
        self._newest = -1

    def newest(self) -> int:
        """The step of the last measurement that is known, -1 at first."""
        found = [each.measured for each in self._crew.standings.values() if each.measured is not None]
        for measured in sorted(found, key=lambda each: each.step):
            if self._newest < measured.step <= self._crew.furthest:
                self._newest = measured.step
                self._on_loss(measured.step, math.nan if measured.loss is None else measured.loss)
        return self._newest

    async def follow(self) -> None:
        """Hears of measurements, until cancelled."""
        while True:
            changed = self._crew.changed
            self.newest()
            await changed.wait()

    async def until_told(self, step: int) -> None:
        """Returns when all know of a measurement of the last step, or nobody makes one for a while."""
        crew = self._crew
        with trio.move_on_after(LONGEST):
            await crew.until(lambda: self.newest() >= step or not crew.trainers(step))
            if crew.own.measured is not None and crew.own.measured.step >= step:
                await crew.until(lambda: crew.is_known(crew.own.number))

    async def measure(self) -> None:
        """Makes those that are for us to make, until cancelled."""
        samples: Sequence[Sample] = ()
        while True:
            await self._crew.until(self._is_due)
            step, samples = self._step(), samples or self._plan.held_out()
            losses: list[float] = []
            waiting = enumerate(samples)
            async with trio.open_nursery() as nursery:
                for _ in range(AT_A_TIME):
                    nursery.start_soon(self._lead_all, waiting, losses)
            mean = sum(losses) / len(losses)
            self._crew.announce(measured=Measured(step, mean if 0 <= mean <= MOST_LOSS else None))

    async def _lead_all(self, waiting: Iterator[tuple[int, Sample]], losses: list[float]) -> None:
        """Leads those that wait, one after the other, each through all stages at the same step."""
        for number, sample in waiting:
            while (found := await self._lead(number % self._plan.microbatches, sample)) is None:
                with trio.move_on_after(RETRY):
                    await self._crew.changed.wait()
            losses += found

    async def _lead(self, number: int, sample: Sample) -> list[float] | None:
        """The losses of a sample; None if that has come to nothing, as when a step is made meanwhile."""
        step, last = self._step(), self._plan.stages - 1
        values: Payload | None = sample.tokens
        for stage in range(self._plan.stages):
            servers = self._crew.servers(stage)
            able = [peer for peer, each in servers.items() if each.step == step and peer in self._trust]
            if not able:
                return None
            targets = sample.targets if stage == last else None
            request = Request(kind="forward", step=step, number=number, inputs=values, targets=targets)
            try:
                values = (await self._ask(stage, self._rng.choice(able), request)).values
                if values is None:
                    return [math.nan] * sample.tokens.samples
                if stage == last:
                    losses: list[float] = Packer().unpack(values).flatten().tolist()
                    return losses
            except ShoalError:
                return None
        return None

    def _step(self) -> int:
        """The one that all stages are at, or the least; -1 if one has nobody."""
        stages = [self._crew.servers(stage).values() for stage in range(self._plan.stages)]
        return min(max((standing.step for standing in servers), default=-1) for servers in stages)

    def _is_due(self) -> bool:
        step, plan = self._step(), self._plan
        due = step if plan.last and step >= plan.last else step - step % plan.every
        trainers = self._crew.trainers(step)
        return step >= 0 and self.newest() < due and trainers[:1] == [self._crew.peer]

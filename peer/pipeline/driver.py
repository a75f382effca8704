"""A trainer on the network: leads its microbatches through the stages, step after step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from contextlib import aclosing
from random import Random

import trio

from optim.swarm.local import open_numbers
from optim.swarm.messages import Answer, Request, Withdraw, Withdrawn
from optim.swarm.trainer import PipelineTrainer, Sample, Send, Settings
from peer.node import Compute
from peer.pipeline.calls import Calls
from peer.pipeline.crew import Crew
from peer.pipeline.messages import (
    Sizes,
    WithdrawReply,
    WithdrawRequest,
    stage_run,
    withdrawn_of,
)
from peer.pipeline.service import StageService
from peer.pipeline.trust import Checks, Trust
from protocol.endpoint import Endpoint
from protocol.errors import PeerUnreachable, ProtocolError, RequestRefused, RequestTimeout, ShoalError
from protocol.identity import PeerId

GRACE = 10.0
"""Seconds beyond a request's patience after which nobody waits for its answer any more."""


class Driver:
    """One peer's part of the microbatches of all steps. `run` must run.

    Args:
        endpoint: Carries everything.
        run_id: 32 bytes.
        crew: Who does what.
        stages: How many the model has.
        microbatches: Of a step.
        at_a_time: How many of them are led before those that follow: all, or those of a local step.
        sample: The contents of microbatch (step, number): the same at all trainers.
        local: Our own server of a stage, if we have it.
        rng: Decides between servers that are equal.
        sizes: What a microbatch has at most.
        trust: Who may be asked.
        compute: Runs what takes long.
        settings: How to go about it.
        last: The step that ends the run, of which there are no microbatches; 0 if none does.
        on_losses: Told, at the end of each step, the losses of our samples in it, if there are any.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        run_id: bytes,
        crew: Crew,
        *,
        stages: int,
        microbatches: int,
        at_a_time: int,
        sample: Callable[[int, int], Sample],
        local: Callable[[int], StageService | None],
        rng: Random,
        sizes: Sizes,
        trust: Trust,
        compute: Compute,
        settings: Settings | None = None,
        last: int = 0,
        on_losses: Callable[[int, list[float]], None] = lambda step, losses: None,
    ) -> None:
        self.trainer = PipelineTrainer(stages, rng, settings)
        self._endpoint, self._crew, self._sample, self._on_losses = endpoint, crew, sample, on_losses
        self._runs = [stage_run(run_id, stage) for stage in range(stages)]
        self._calls, self._trust = Calls(endpoint, sizes), trust
        self._checks = Checks(sizes=sizes, stages=stages, compute=compute)
        self._microbatches, self._at_a_time, self._last = microbatches, at_a_time, last
        self._local = local
        self._told: dict[tuple[int, PeerId], int] = {}  # failed settlements of the step, by stage and who tells
        self._bereft: set[int] = set()  # stages that have lost a server in this step
        self._here: set[tuple[PeerId, int, int]] = set()  # servers, their stages and lives
        self._kicked = trio.Event()

    async def run(self) -> None:
        """Leads microbatches until cancelled."""
        async with aclosing(self._calls), trio.open_nursery() as nursery:
            nursery.start_soon(self._follow)
            while True:
                kicked = self._kicked
                self._look()
                for send in self.trainer.poll(trio.current_time()):
                    nursery.start_soon(self._call, send)
                wake = self.trainer.wake
                with trio.move_on_at(math.inf if wake is None else wake):
                    await kicked.wait()

    async def _follow(self) -> None:
        while True:
            changed = self._crew.changed
            self._kick()
            await changed.wait()

    def _kick(self) -> None:
        self._kicked.set()
        self._kicked = trio.Event()

    def _look(self) -> None:
        """Takes note of what the members have told since the last time."""
        crew, trainer = self._crew, self.trainer
        servers = [crew.servers(stage) for stage in range(len(self._runs))]
        here = {(peer, stage, each.life) for stage, there in enumerate(servers) for peer, each in there.items()}
        for peer, stage, _ in self._here - here:
            trainer.lost(peer)
            self._bereft.add(stage)
            self._doubt(stage)
        self._here = here
        for router, each in zip(trainer.routers, servers, strict=True):
            for peer in each:
                if peer in self._trust:
                    router.add(peer)
                else:
                    router.remove(peer)
        steps = [max((standing.step for standing in each.values()), default=-1) for each in servers]
        step = min(steps)
        if step < 0:
            return
        if step > trainer.step:
            self._tell_losses()
            mine = self._owned(step, range(self._at_a_time))
            trainer.begin(step, {number: self._sample(step, number) for number in mine})
            self._told.clear()
            self._bereft.clear()
        orphans: set[int] = set()
        step, open_stages = trainer.step, []  # a stage that has lost its servers may be at an earlier one for a while
        counted = []
        for stage, each in enumerate(servers):
            there = {peer: standing for peer, standing in each.items() if standing.step == step}
            if steps[stage] > step or any(standing.settled for standing in there.values()):
                trainer.settled(stage)
                counted.append(self._microbatches)
                continue
            counted.append(sum(standing.counted for standing in there.values()))
            if stage in trainer.stages_settled and there:
                trainer.reopened(stage)
            open_stages.append(stage)
            for peer, standing in there.items():
                if standing.attempt > self._told.get((stage, peer), 0):
                    self._told[stage, peer] = standing.attempt
                    if stage in self._bereft:
                        self._doubt(stage)
                    orphans |= trainer.missing(stage, standing.attempt - 1, standing.missing)
        # Those of the next local step, and what a trainer that is gone has left undone, in whatever stage. What it has
        # done is done twice, and settled once.
        numbers = orphans.union(range(open_numbers(counted, self._at_a_time, self._microbatches)))
        for number in set(self._owned(step, numbers)) - trainer.numbers if open_stages else ():
            trainer.add(number, self._sample(step, number), open_stages)

    def _doubt(self, stage: int) -> None:
        """A server of a stage is gone, so what was counted before a settlement that failed may be lost.

        A sum that did not count was dropped then, as others had the same microbatches: maybe the one that is gone.
        """
        failed = max((count for (each, _), count in self._told.items() if each == stage), default=0)
        self.trainer.missing(stage, failed - 1, range(self._microbatches))

    def _owned(self, step: int, numbers: Iterable[int]) -> list[int]:
        """Those of a step's microbatches that are ours, as things are."""
        trainers, us = self._crew.trainers(step), self._crew.peer
        if us not in trainers or 0 < self._last <= step:
            return []
        return [number for number in sorted(numbers) if us == _owner(trainers, step, number)]

    def _tell_losses(self) -> None:
        losses = [value for each in self.trainer.losses.values() for value in each]
        if losses:
            self._on_losses(self.trainer.step, losses)

    async def _call(self, send: Send) -> None:
        try:
            if isinstance(send.message, Withdraw):
                answer: Answer | Withdrawn = await self._withdraw(send.stage, send.peer, send.message)
            else:
                answer = await self.ask(send.stage, send.peer, send.message)
        except ShoalError as error:
            misfit = isinstance(error, RequestRefused) and error.code == "misfit"
            self.trainer.failed(send.call, trio.current_time(), misfit=misfit)
        else:
            self.trainer.answered(send.call, answer, trio.current_time())
        self._kick()

    async def _withdraw(self, stage: int, peer: PeerId, message: Withdraw) -> Withdrawn:
        if (own := self._own(stage, peer)) is not None:
            return own.server.withdraw(message)
        request = WithdrawRequest(self._runs[stage], message.step, message.number)
        return withdrawn_of(await self._endpoint.request(peer, request, WithdrawReply))

    async def ask(self, stage: int, peer: PeerId, request: Request) -> Answer:
        """Has a server of a stage do something.

        Raises:
            ShoalError: Nothing comes of it.
        """
        if (own := self._own(stage, peer)) is not None:
            return await own.ask(request)
        with trio.move_on_after(request.patience + GRACE):
            return await self._ask_another(stage, peer, request)
        raise RequestTimeout(f"{peer.short} has not answered within {request.patience + GRACE:g} s")

    async def _ask_another(self, stage: int, peer: PeerId, request: Request) -> Answer:
        """Has somebody else do something, and doubts it if what it says makes no sense."""
        try:
            answer = await self._calls.ask(peer, self._runs[stage], request)
            await self._checks.check(stage, request, answer)
        except ProtocolError as error:
            self._trust.doubt(peer, stage, str(error))
            raise
        except RequestRefused as error:
            if error.code == "misfit" and self._checks.vouches_for(request):
                self._trust.doubt(peer, stage, f"it refuses what makes sense: {error}")
            raise
        return answer

    def _own(self, stage: int, peer: PeerId) -> StageService | None:
        if peer != self._crew.peer:
            return None
        if (own := self._local(stage)) is None:
            raise PeerUnreachable("we have just left this stage")
        return own


def _owner(trainers: Iterable[PeerId], step: int, number: int) -> PeerId:
    """Whose microbatch it is, by hashes: a trainer that comes or goes changes little."""
    place = step.to_bytes(8, "big") + number.to_bytes(8, "big")
    return min(trainers, key=lambda peer: hashlib.blake2b(peer + place, digest_size=16).digest())

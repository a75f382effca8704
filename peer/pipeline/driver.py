"""A trainer on the network: leads its microbatches through the stages, step after step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from random import Random

import trio

from optim.swarm.messages import Answer, Withdraw, Withdrawn
from optim.swarm.payloads import Packer
from optim.swarm.trainer import PipelineTrainer, Sample, Send, Settings
from peer.pipeline.crew import Crew
from peer.pipeline.messages import (
    WithdrawReply,
    WithdrawRequest,
    ask_of,
    receive_answer,
    send_payloads,
    stage_run,
    withdrawn_of,
)
from peer.pipeline.service import StageService
from protocol.endpoint import Endpoint
from protocol.errors import PeerUnreachable, RequestTimeout, ShoalError
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
        sample: The contents of microbatch (step, number): the same at all trainers.
        local: Our own server of a stage, if we have it.
        rng: Decides between servers that are equal.
        settings: How to go about it.
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
        sample: Callable[[int, int], Sample],
        local: Callable[[int], StageService | None],
        rng: Random,
        settings: Settings | None = None,
        on_losses: Callable[[int, list[float]], None] = lambda step, losses: None,
    ) -> None:
        self.trainer = PipelineTrainer(stages, rng, settings)
        self._endpoint, self._crew, self._sample, self._on_losses = endpoint, crew, sample, on_losses
        self._runs = [stage_run(run_id, stage) for stage in range(stages)]
        self._microbatches, self._local = microbatches, local
        self._told: dict[tuple[int, PeerId], int] = {}  # failed settlements of the step, by stage and who tells
        self._bereft: set[int] = set()  # stages that have lost a server in this step
        self._here: set[tuple[PeerId, int, int]] = set()  # servers, their stages and lives
        self._kicked = trio.Event()

    async def run(self) -> None:
        """Leads microbatches until cancelled."""
        async with trio.open_nursery() as nursery:
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
                router.add(peer)
        steps = [max((standing.step for standing in each.values()), default=-1) for each in servers]
        step = min(steps)
        if step < 0:
            return
        if step > trainer.step:
            self._tell_losses()
            mine = self._owned(step, range(self._microbatches))
            trainer.begin(step, {number: self._sample(step, number) for number in mine})
            self._told.clear()
            self._bereft.clear()
        step, open_stages = trainer.step, []  # a stage that has lost its servers may be at an earlier one for a while
        for stage, each in enumerate(servers):
            there = {peer: standing for peer, standing in each.items() if standing.step == step}
            if steps[stage] > step or any(standing.settled for standing in there.values()):
                trainer.settled(stage)
                continue
            if stage in trainer.stages_settled and there:
                trainer.reopened(stage)
            open_stages.append(stage)
            for peer, standing in there.items():
                if standing.attempt > self._told.get((stage, peer), 0):
                    self._told[stage, peer] = standing.attempt
                    if stage in self._bereft:
                        self._doubt(stage)
                    orphans = trainer.missing(stage, standing.attempt - 1, standing.missing)
                    for number in self._owned(step, orphans):
                        trainer.add(number, self._sample(step, number), [stage])
        # What a trainer that is gone has left undone. What it has done is done twice, and settled once.
        for number in set(self._owned(step, range(self._microbatches))) - trainer.numbers if open_stages else ():
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
        if us not in trainers:
            return []
        return [number for number in sorted(numbers) if us == _owner(trainers, step, number)]

    def _tell_losses(self) -> None:
        packer = Packer()
        losses = [value for each in self.trainer.losses.values() for value in packer.unpack(each).tolist()]
        if losses:
            self._on_losses(self.trainer.step, losses)

    async def _call(self, send: Send) -> None:
        try:
            answer = await self._ask(send)
        except ShoalError:
            self.trainer.failed(send.call, trio.current_time())
        else:
            self.trainer.answered(send.call, answer, trio.current_time())
        self._kick()

    async def _ask(self, send: Send) -> Answer | Withdrawn:
        run, message = self._runs[send.stage], send.message
        own = self._local(send.stage) if send.peer == self._crew.peer else None
        if own is None and send.peer == self._crew.peer:
            raise PeerUnreachable("we have just left this stage")
        if isinstance(message, Withdraw):
            if own is not None:
                return own.server.withdraw(message)
            request = WithdrawRequest(run, message.step, message.number)
            return withdrawn_of(await self._endpoint.request(send.peer, request, WithdrawReply))
        if own is not None:
            return await own.ask(message)
        with trio.move_on_after(message.patience + GRACE):
            async with self._endpoint.open(send.peer, ask_of(run, message), bulk=True) as stream:
                await send_payloads(stream, message.inputs, message.targets, message.gradient)
                await stream.finish()
                return await receive_answer(stream)
        raise RequestTimeout(f"{send.peer.short} has not answered within {message.patience + GRACE:g} s")


def _owner(trainers: Iterable[PeerId], step: int, number: int) -> PeerId:
    """Whose microbatch it is, by hashes: a trainer that comes or goes changes little."""
    place = step.to_bytes(8, "big") + number.to_bytes(8, "big")
    return min(trainers, key=lambda peer: hashlib.blake2b(peer + place, digest_size=16).digest())

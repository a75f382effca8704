"""One peer of a pipeline: which stage it serves, where it has the state from, and when it moves to another stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from random import Random

import attrs
import torch
import trio

from optim.swarm.arrivals import Bounds
from optim.swarm.balance import Move, Policy, newcomers_stage
from optim.swarm.ledger import Ledger
from optim.swarm.payloads import Encoding
from optim.swarm.server import StageServer
from optim.swarm.stages import Chain, Stage
from optim.swarm.state import StageState
from optim.swarm.trainer import Sample
from optim.swarm.trainer import Settings as TrainerSettings
from peer.checkpoint import CheckpointError
from peer.events import EventLog
from peer.node import Compute
from peer.pipeline.audit import ledgers_told
from peer.pipeline.copies import Copies
from peer.pipeline.crew import Crew, Members, StageRoster
from peer.pipeline.driver import Driver
from peer.pipeline.messages import Standing, stage_run
from peer.pipeline.moving import Balance
from peer.pipeline.service import StageService
from peer.pipeline.settling import Behind, Plan, StageSteps
from peer.pipeline.states import States
from protocol.channels import ChannelSettings
from protocol.coordinator import RoundTimes
from protocol.courtesy import Courtesy
from protocol.endpoint import Endpoint
from protocol.identity import PeerId
from protocol.operations import AsyncCollective

ACQUAINTED = 5.0
"""Seconds for which a newcomer waits until all who are there have told it what they do."""

CHOICES = 10
"""How often a newcomer chooses anew, as others come at the same time, before it stays with what it has."""

RETRY = 0.5
"""Seconds between two of these choices, unless the standings change earlier."""

EMPTY = 3.0
"""Seconds for which a stage must have been without any server before somebody leaves its own stage for it at once."""

LOST = 5.0
"""Seconds for which another stage must have been ahead before a stage that nobody knows more about follows it."""


@attrs.frozen(kw_only=True)
class Pipeline:
    """What a pipeline trains: the same at all peers.

    Args:
        run_id: 32 bytes.
        chain: Makes the model, always the same.
        initial: Its first values, by name; None: those that `chain` gives it.
        stages: Into how many stages it is cut.
        microbatches: Of a step.
        sample: The contents of microbatch (step, number).
        optimizer: Makes the optimizer of a stage.
        rate: The learning rate of a step.
        tokens: Of a sample.
        steps: After which it ends; 0: never.
        encoding: How activations and their gradients look on the wire.
        balance: When peers move between stages.
        save_every: Steps between two copies of a stage's state, on its servers' disks and at a peer of another stage.
        times: Of the operations among a stage's servers.
    """

    run_id: bytes
    chain: Callable[[], Chain]
    initial: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None = None
    stages: int
    microbatches: int
    sample: Callable[[int, int], Sample]
    optimizer: Callable[[Stage], torch.optim.Optimizer]
    rate: Callable[[int], float]
    tokens: int = 1
    steps: int = 0
    encoding: Encoding = "fp32"
    balance: Policy = attrs.field(factory=Policy)
    save_every: int = 10
    times: RoundTimes = attrs.field(factory=lambda: RoundTimes(grace=2.0))


@attrs.define(kw_only=True, eq=False)
class PipelineNode:
    """Takes part in a pipeline until its steps are over.

    Args:
        pipeline: What is trained.
        endpoint: Carries everything.
        mesh: Who is there.
        events: Where it is told what happens.
        compute: Runs what takes long.
        rng: Spreads load, and decides between equals.
        stage: Which stage to serve first; None: where we are needed most.
        serves: Whether it serves a stage.
        trains: Whether it leads microbatches.
        bounds: What its server keeps and does at a time.
        trainer: How its trainer goes about it.
        save: Keeps a stage's state, now and then and at the end; called by way of `compute`.
        saved: What it has kept last of a stage, in an earlier life; called in the same way.
        begun: At which step that is.
        offered: Stages of which it has kept what others may need.
        device: Where the stage is.
    """

    pipeline: Pipeline
    endpoint: Endpoint
    mesh: Members
    events: EventLog
    compute: Compute
    rng: Random
    stage: int | None = None
    serves: bool = True
    trains: bool = True
    bounds: Bounds = attrs.field(factory=Bounds)
    trainer: TrainerSettings = attrs.field(factory=TrainerSettings)
    save: Callable[[int, StageState], None] = lambda stage, state: None
    saved: Callable[[int], StageState | None] = lambda stage: None
    begun: int = 0
    offered: Collection[int] = ()
    device: str = "cpu"
    crew: Crew = attrs.field(init=False)
    _balance: Balance = attrs.field(init=False)
    _courtesy: Courtesy = attrs.field(init=False)
    _copies: Copies = attrs.field(init=False)
    _states: States = attrs.field(init=False)
    _told_at: float = attrs.field(default=0.0, init=False)
    _serving: dict[int, StageService] = attrs.field(factory=dict, init=False)

    @crew.default
    def _make_crew(self) -> Crew:
        return Crew(
            self.endpoint,
            self.pipeline.run_id,
            self.mesh,
            Standing(step=self.begun),
            stages=self.pipeline.stages,
            last=self.pipeline.steps,
        )

    @_balance.default
    def _make_balance(self) -> Balance:
        return Balance(self.crew, self.pipeline.stages, self.pipeline.balance)

    @_courtesy.default
    def _make_courtesy(self) -> Courtesy:
        return Courtesy(lambda: self.endpoint.bytes_sent)

    @_copies.default
    def _make_copies(self) -> Copies:
        return Copies(
            self.endpoint,
            self.pipeline.run_id,
            self.pipeline.stages,
            self.crew,
            self._courtesy,
            saved=self._read,
            offered=self.offered,
        )

    async def _read(self, stage: int) -> StageState | None:
        return await self.compute(self.saved, stage)

    @_states.default
    def _make_states(self) -> States:
        return States(
            self.endpoint,
            self.pipeline.run_id,
            crew=self.crew,
            copies=self._copies,
            chain=self.pipeline.chain,
            initial=self.pipeline.initial,
            device=self.device,
            stages=self.pipeline.stages,
            compute=self.compute,
            rng=self.rng,
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves and trains until the last step is made, or until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.crew.run)
            nursery.start_soon(self._copies.run)
            task_status.started()
            if self.trains:
                nursery.start_soon(self._train)
            if self.serves:
                await self._serve()
            else:
                await self.crew.until(self._is_over)
            nursery.cancel_scope.cancel()

    # As a trainer.

    async def _train(self) -> None:
        pipeline = self.pipeline
        driver = Driver(
            self.endpoint,
            pipeline.run_id,
            self.crew,
            stages=pipeline.stages,
            microbatches=pipeline.microbatches,
            sample=pipeline.sample,
            local=self._serving.get,
            rng=self.rng,
            settings=self.trainer,
            on_losses=self._tell_losses,
        )
        step, self._told_at = self.crew.furthest, trio.current_time()
        self.crew.announce(trains_from=step + 1 if step else 0)
        await driver.run()

    def _tell_losses(self, step: int, losses: list[float]) -> None:
        now, tokens = trio.current_time(), len(losses) * self.pipeline.tokens
        speed = tokens / (now - self._told_at) if now > self._told_at else None
        self._told_at = now
        loss = sum(losses) / len(losses)
        self.events.emit("inner", step=step, loss=loss, samples=len(losses), tokens=tokens, tokens_per_second=speed)

    def _ready(self) -> dict[PeerId, Standing]:
        return {peer: each for peer, each in self.crew.standings.items() if each.ready and peer != self.crew.peer}

    def _is_over(self) -> bool:
        return 0 < self.pipeline.steps <= self.crew.furthest

    # As a server.

    async def _serve(self) -> None:
        stage = self.stage
        if stage is None:
            stage = await self._choose_stage()
        while True:
            move = await self._serve_stage(stage)
            if move is None:
                return
            self.crew.announce(ready=False)
            self.events.emit("moved", source=move.source, target=move.target)
            stage = move.target

    async def _choose_stage(self) -> int:
        """Where a newcomer is needed most. Of several that come at once, those that come first by name choose first."""
        crew = self.crew
        with trio.move_on_after(ACQUAINTED):
            await crew.until(lambda: len(crew.standings) == len(self.mesh.members))
        everybody = frozenset(crew.standings)
        for _ in range(CHOICES):
            stage = self._neediest(everybody)
            crew.announce(stage=stage)
            with trio.move_on_after(EMPTY):
                await crew.until(partial(crew.is_known, crew.own.number))
            everybody = frozenset(crew.standings)
            first = {peer for peer, each in crew.standings.items() if each.ready or peer < crew.peer}
            if self._neediest(first) == stage:
                break
            changed = crew.changed
            with trio.move_on_after(RETRY):
                await changed.wait()
        return stage

    def _neediest(self, peers: Collection[PeerId]) -> int:
        """The stage that needs a newcomer most, as far as these peers serve stages."""
        members = [each for each in self._balance.members() if each.peer in peers and each.peer != self.crew.peer]
        return newcomers_stage(members, self.pipeline.stages)

    async def _serve_stage(self, number: int) -> Move | None:
        """Serves a stage until the run is over (None), or until we are needed elsewhere more."""
        pipeline, crew, run = self.pipeline, self.crew, stage_run(self.pipeline.run_id, number)
        old = await self._read(number)
        step = 0 if old is None else old.step
        # All that it said of the stage before is over; what counts anew, and what it has of others, goes on.
        own = crew.own
        blank = Standing(
            trains_from=own.trains_from, stage=number, life=own.life, leaving=own.leaving, copies=own.copies
        )
        crew.announce(**attrs.asdict(attrs.evolve(blank, number=own.number, step=step), recurse=False))
        stage = await self._states.make(number)
        server = StageServer(
            stage,
            pipeline.optimizer(stage),
            microbatches=pipeline.microbatches,
            encoding=pipeline.encoding,
            bounds=self.bounds,
        )
        state = await self._find_state(stage, number, old)
        if state is None:
            return None
        service = StageService(
            self.endpoint,
            run,
            server,
            admits=self.mesh.knows,
            compute=self.compute,
            courtesy=self._courtesy,
            changed=lambda: steps.tell(),
            began=partial(self._tell_pass, number),
        )
        roster = StageRoster(crew, self.mesh, number)
        settings = ChannelSettings(times=pipeline.times, report=self.events.report, courtesy=self._courtesy, fixed=True)
        collective = AsyncCollective(self.endpoint, run, roster=roster, settings=settings)
        steps = StageSteps(
            service,
            number,
            Plan(run_id=pipeline.run_id, stages=pipeline.stages, microbatches=pipeline.microbatches),
            crew=crew,
            collective=collective,
            endpoint=self.endpoint,
            compute=self.compute,
            rate=pipeline.rate,
            tell_event=partial(self._tell_settled, number),
        )
        self._copies.forget(number)
        try:
            await service.restore(state)
            self._live_anew()
            async with trio.open_nursery() as nursery:
                await nursery.start(service.run)
                await nursery.start(collective.run)
                self._serving[number] = service
                steps.tell()
                move = await self._steps(number, service, steps)
                nursery.cancel_scope.cancel()
        finally:
            self._serving.pop(number, None)
        return move

    def _live_anew(self) -> None:
        self.crew.announce(life=self.crew.own.life + 1)

    def _tell_pass(self, stage: int, kind: str, step: int) -> None:
        self.events.emit("stage_pass", stage=stage, kind=kind, step=step)

    def _tell_settled(self, stage: int, event: str, step: int, ledgers: Mapping[PeerId, Ledger]) -> None:
        self.events.emit(event, stage=stage, step=step, ledgers=ledgers_told(ledgers))

    async def _steps(self, number: int, service: StageService, steps: StageSteps) -> Move | None:
        """Makes steps until there is a reason not to."""
        server, urgent = service.server, list[Move]()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_for_emptiness, urgent, nursery.cancel_scope)
            while not self.pipeline.steps or server.step < self.pipeline.steps:
                if not await self._one_step(number, server, steps):
                    self.crew.announce(ready=False)
                    state = await self._find_state(server.stage, number, await service.snapshot())
                    if state is None:
                        return None
                    await service.restore(state)
                    self._live_anew()
                steps.tell()
                move = await self._own_move(server.step)
                if move is not None:
                    nursery.cancel_scope.cancel()
                    return move
                if server.step % self.pipeline.save_every == 0:
                    self._copies.renew(number)
                    await self._save(number, service)
            if server.step % self.pipeline.save_every:
                await self._save(number, service)
            await self._see_off(server.step)
            nursery.cancel_scope.cancel()
        return urgent[0] if urgent else None

    async def _one_step(self, number: int, server: StageServer, steps: StageSteps) -> bool:
        """Makes a step. False if it is made already, by others of our stage, or is lost with them."""
        lost: list[int] = []
        behind = False
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_for_loss, number, server, lost, nursery.cancel_scope)
                await steps.step()
                nursery.cancel_scope.cancel()
        except* Behind:
            behind = True
        if lost:
            self.events.emit("stage_lost", stage=number, step=lost[0])
        return not (lost or behind)

    async def _save(self, number: int, service: StageService) -> None:
        try:
            await self.compute(self.save, number, await service.snapshot())
        except CheckpointError as error:  # a full disk: training can go on
            self.events.emit("checkpoint_failed", round=service.server.step, reason=str(error))

    async def _own_move(self, step: int) -> Move | None:
        """Where we are needed more, now that a step is made."""
        move = self._balance.wanted()
        if move is None or step == self.pipeline.steps:
            return None
        return move if await self._balance.claim(move) else None

    async def _watch_for_emptiness(self, urgent: list[Move], scope: trio.CancelScope) -> None:
        """Ends the block if a stage has lost all its servers, and it is for us to go there."""
        while True:
            await self.crew.until(lambda: self._balance.rescue() is not None)
            await trio.sleep(EMPTY)
            if (move := self._balance.rescue()) is not None and await self._balance.claim(move, urgent=True):
                urgent.append(move)
                scope.cancel()
                return

    async def _watch_for_loss(
        self, number: int, server: StageServer, found: list[int], scope: trio.CancelScope
    ) -> None:
        """Ends the block if other stages are ahead of ours and nobody of ours knows how: the step is lost for us."""

        def lost() -> int | None:
            ours = self.crew.servers(number).values()
            if server.phase == "settled" or any(each.settled or each.step > server.step for each in ours):
                return None
            ahead = max((each.step for each in self._ready().values()), default=0)
            return ahead if ahead > server.step else None

        while True:
            await self.crew.until(lambda: lost() is not None)
            await trio.sleep(LOST)
            if (step := lost()) is not None:
                found.append(step)
                scope.cancel()
                return

    async def _see_off(self, step: int) -> None:
        """Stays until the other stages have made the last step, too: they need to know that ours has settled."""
        with trio.move_on_after(30.0):
            await self.crew.until(
                lambda: all(each.step >= step for each in self.crew.standings.values() if each.stage is not None)
            )

    async def _find_state(self, stage: Stage, number: int, old: StageState | None = None) -> StageState | None:
        """The state of a stage that we are to serve; None if the run is over meanwhile."""
        began, received = trio.current_time(), self.endpoint.bytes_received
        state = await self._states.find(stage, number, over=self._is_over, old=old)
        if state is not None:
            self.events.emit(
                "stage_synced",
                stage=number,
                step=state.step,
                seconds=trio.current_time() - began,
                bytes=self.endpoint.bytes_received - received,
            )
        return state

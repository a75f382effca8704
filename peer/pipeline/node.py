"""One peer of a pipeline: which stage it serves, where it has the state from, and when it moves to another stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from random import Random

import attrs
import trio

from optim.swarm.arrivals import Bounds
from optim.swarm.balance import Move, newcomers_stage
from optim.swarm.ledger import Ledger
from optim.swarm.server import StageServer
from optim.swarm.state import Form, StageState
from optim.swarm.trainer import Settings as TrainerSettings
from peer.divergence import DivergenceGuard
from peer.events import EventLog
from peer.home import CheckpointError
from peer.node import Compute
from peer.pipeline.audit import ledgers_told
from peer.pipeline.copies import Copies
from peer.pipeline.crew import Crew, Members, StageRoster
from peer.pipeline.driver import Driver
from peer.pipeline.ending import forlorn, hand_over, linger
from peer.pipeline.messages import MOST_DISTRUSTED, Standing, stage_run
from peer.pipeline.moving import Balance
from peer.pipeline.overview import EMPTY, Overview
from peer.pipeline.service import StageService
from peer.pipeline.settings import Pipeline
from peer.pipeline.settling import LOST, Behind, Lost, Plan, StageSteps, Unfit
from peer.pipeline.states import States
from peer.pipeline.transfer import Fetcher
from peer.pipeline.trust import Trust
from peer.pipeline.validation import Plan as Measurements
from peer.pipeline.validation import Validation
from protocol.channels import ChannelSettings
from protocol.courtesy import Courtesy
from protocol.endpoint import Endpoint
from protocol.errors import ShoalError
from protocol.identity import PeerId
from protocol.operations import AsyncCollective

ACQUAINTED = 5.0
"""Seconds for which a newcomer waits until all who are there have told it what they do."""

CHOICES = 10
"""How often a newcomer chooses anew, as others come at the same time, before it stays with what it has."""

RETRY = 0.5
"""Seconds between two of these choices, unless the standings change earlier."""


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
        serves: Whether it serves a stage, as long as what it computes makes sense.
        trains: Whether it leads microbatches.
        bounds: What its server keeps and does at a time.
        trainer: How its trainer goes about it.
        save: Keeps a stage's state, now and then and at the end; called by way of `compute`.
        saved: What it has kept last of a stage, in an earlier life; called in the same way.
        begun: At which step that is.
        offered: Stages of which it has kept what others may need.
        device: Where the stage is.
        founds: Whether others come to us, so that we wait for them for ever.
        asked: Set when we are to leave.
        refusal: Why a peer has not taken us for a member, if one has said so.
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
    founds: bool = False
    asked: trio.Event = attrs.field(factory=trio.Event)
    refusal: Callable[[], ShoalError | None] = lambda: None
    crew: Crew = attrs.field(init=False)
    _balance: Balance = attrs.field(init=False)
    _courtesy: Courtesy = attrs.field(init=False)
    _fetcher: Fetcher = attrs.field(init=False)
    _copies: Copies = attrs.field(init=False)
    _states: States = attrs.field(init=False)
    _told_at: float = attrs.field(default=0.0, init=False)
    _serving: dict[int, StageService] = attrs.field(factory=dict, init=False)
    _driver: Driver = attrs.field(init=False)
    _validation: Validation | None = attrs.field(init=False)
    _overview: Overview = attrs.field(init=False)
    _guard: DivergenceGuard = attrs.field(factory=DivergenceGuard, init=False)

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

    @_fetcher.default
    def _make_fetcher(self) -> Fetcher:
        return Fetcher(
            endpoint=self.endpoint,
            run_id=self.pipeline.run_id,
            last=self.pipeline.steps,
            trust=Trust(self._tell_distrust),
            compute=self.compute,
        )

    @_copies.default
    def _make_copies(self) -> Copies:
        return Copies(
            self.endpoint,
            self.pipeline.run_id,
            self.pipeline.stages,
            self.crew,
            self._courtesy,
            self.form,
            compute=self.compute,
            fetcher=self._fetcher,
            saved=self._read,
            offered=self.offered,
        )

    async def _read(self, stage: int) -> StageState | None:
        return await self.compute(self.saved, stage)

    @_states.default
    def _make_states(self) -> States:
        return States(
            self._fetcher,
            crew=self.crew,
            copies=self._copies,
            chain=self.pipeline.chain,
            initial=self.pipeline.initial,
            device=self.device,
            stages=self.pipeline.stages,
            compute=self.compute,
            rng=self.rng,
        )

    @_driver.default
    def _make_driver(self) -> Driver:
        pipeline = self.pipeline
        return Driver(
            self.endpoint,
            pipeline.run_id,
            self.crew,
            stages=pipeline.stages,
            microbatches=pipeline.total,
            at_a_time=pipeline.microbatches,
            sample=pipeline.contents,
            local=self._serving.get,
            sizes=pipeline.sizes,
            trust=self._fetcher.trust,
            compute=self.compute,
            rng=self.rng,
            settings=attrs.evolve(self.trainer, same_path=pipeline.local_steps is not None),
            last=pipeline.steps,
            on_losses=self._tell_losses,
        )

    @_validation.default
    def _make_validation(self) -> Validation | None:
        pipeline = self.pipeline
        if pipeline.held_out is None:
            return None
        plan = Measurements(
            held_out=pipeline.held_out,
            stages=pipeline.stages,
            microbatches=pipeline.microbatches,
            every=pipeline.validate_every,
            last=pipeline.steps,
        )
        return Validation(
            plan,
            self.crew,
            self._driver.ask,
            rng=self.rng,
            trust=self._fetcher.trust,
            on_loss=self._tell_validation,
        )

    @_overview.default
    def _make_overview(self) -> Overview:
        pipeline = self.pipeline
        return Overview(
            crew=self.crew, stages=pipeline.stages, steps=pipeline.steps, endpoint=self.endpoint, events=self.events
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves and trains until the last step is made, until it is `asked` to leave, or until cancelled.

        Raises:
            RequestRefused: No member takes us in.
            PeerUnreachable: Nobody else has been there for a while, and we cannot go on without.
        """
        reasons: list[ShoalError] = []
        async with trio.open_nursery() as nursery:
            await nursery.start(self.crew.run)
            nursery.start_soon(self._copies.run)
            nursery.start_soon(self._overview.run)
            task_status.started()
            nursery.start_soon(self._leave_when_asked, nursery.cancel_scope)
            if not self.founds:
                nursery.start_soon(self._watch_for_solitude, reasons, nursery.cancel_scope)
            if self._validation is not None:
                nursery.start_soon(self._validation.follow)
            if self.trains:
                nursery.start_soon(self._train, nursery)
            if self.serves:
                await self._serve()
            if not self.serves:  # or not any more
                await self.crew.until(self._is_over)
                await self._until_validated(self.pipeline.steps)
            nursery.cancel_scope.cancel()
        if reasons:
            raise reasons[0]

    async def _leave_when_asked(self, scope: trio.CancelScope) -> None:
        await self.asked.wait()
        await hand_over(self.crew, self._is_needed)
        scope.cancel()

    def _is_needed(self) -> bool:
        """Whether our stage would have no server without us, and somebody can take our place."""
        own, there = self.crew.own, self.crew.standings
        others = [each for peer, each in there.items() if peer != self.crew.peer and not each.leaving]
        with_us = [each for each in others if each.stage == own.stage]
        if not own.ready or any(each.ready for each in with_us):
            return False
        return bool(with_us) or any(move.target == own.stage for move in self._balance.moves())

    async def _watch_for_solitude(self, reasons: list[ShoalError], scope: trio.CancelScope) -> None:
        reasons.append(await forlorn(self.crew, self.refusal))
        scope.cancel()

    def form(self, stage: int) -> Form:
        """What the state of a stage looks like; known once we have made one."""
        return self._states.forms[stage]

    # As a trainer.

    async def _train(self, nursery: trio.Nursery) -> None:
        step, self._told_at = self.crew.furthest, trio.current_time()
        self.crew.announce(trains_from=step + 1 if step else 0)
        if self._validation is not None:
            nursery.start_soon(self._validation.measure)
        await self._driver.run()

    def _tell_losses(self, step: int, losses: list[float]) -> None:
        now, tokens = trio.current_time(), len(losses) * self.pipeline.sizes.tokens
        speed = tokens / (now - self._told_at) if now > self._told_at else None
        self._told_at = now
        loss = sum(losses) / len(losses)
        self.events.emit("inner", step=step, loss=loss, samples=len(losses), tokens=tokens, tokens_per_second=speed)

    def _tell_distrust(self, peer: PeerId, stage: int, reason: str) -> None:
        self.events.emit("distrusted", peer=peer, stage=stage, reason=reason)
        self.crew.announce(distrusts=self._fetcher.trust.distrusted[:MOST_DISTRUSTED])

    def _tell_validation(self, step: int, loss: float) -> None:
        self.events.emit("validation", round=step, loss=loss)
        if self._guard.sees(loss):
            self.events.emit("diverging", round=step, loss=loss, best=self._guard.best)

    async def _until_validated(self, step: int) -> None:
        if self._validation is not None:
            await self._validation.until_told(step)

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
            await crew.until(lambda: crew.is_acquainted)
        if not crew.is_acquainted and not crew.furthest:  # nobody begins before whoever founded the run does
            self.events.emit("waiting", here=len(self.mesh.members), wanted=None)
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
            trains_from=own.trains_from,
            stage=number,
            life=own.life,
            leaving=own.leaving,
            copies=own.copies,
            measured=own.measured,
            last_squares=own.last_squares,
            distrusts=own.distrusts,
        )
        crew.announce(**attrs.asdict(attrs.evolve(blank, number=own.number, step=step), recurse=False))
        stage = await self._states.make(number)
        server = StageServer(
            stage,
            pipeline.optimizer(stage),
            microbatches=pipeline.total,
            encoding=pipeline.encoding,
            bounds=self.bounds,
            local_steps=pipeline.local_steps,
        )
        state = await self._find_state(server, number, old)
        if state is None:
            return None
        service = StageService(
            self.endpoint,
            run,
            server,
            sizes=pipeline.sizes,
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
            Plan(
                microbatches=pipeline.total,
                forms=self._states.forms,
                clip=pipeline.clip,
            ),
            crew=crew,
            collective=collective,
            fetcher=self._fetcher,
            compute=self.compute,
            rate=pipeline.rate,
            tell_event=partial(self._tell_settled, number),
        )
        self._copies.forget(number)
        try:
            await service.restore(state)
            async with trio.open_nursery() as nursery:
                await nursery.start(service.run)
                await nursery.start(collective.run)
                self._serving[number] = service
                steps.begin()
                move = await self._steps(number, service, steps)
                nursery.cancel_scope.cancel()
        finally:
            self._serving.pop(number, None)
        return move

    def _tell_pass(self, stage: int, kind: str, step: int) -> None:
        self.events.emit("stage_pass", stage=stage, kind=kind, step=step)

    def _tell_settled(self, stage: int, event: str, step: int, ledgers: Mapping[PeerId, Ledger]) -> None:
        self.events.emit(event, stage=stage, step=step, ledgers=ledgers_told(ledgers))

    async def _steps(self, number: int, service: StageService, steps: StageSteps) -> Move | None:
        """Makes steps until there is a reason not to."""
        crew, server, urgent = self.crew, service.server, list[Move]()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_for_emptiness, urgent, nursery.cancel_scope)
            while not self.pipeline.steps or server.step < self.pipeline.steps:
                problem = await self._one_step(number, server, steps)
                if isinstance(problem, Unfit):
                    self.serves = False
                    crew.announce(ready=False, stage=None)
                    self.events.emit("unfit", stage=number)
                    nursery.cancel_scope.cancel()
                    return None
                if problem is not None:
                    crew.announce(ready=False)
                    old, lost = await service.snapshot(), isinstance(problem, Lost)
                    state = await self._find_state(server, number, old, lost=lost)
                    if state is None:
                        nursery.cancel_scope.cancel()
                        return None
                    await service.restore(state)
                    steps.begin()
                move = await self._own_move(server.step)
                if move is not None:
                    nursery.cancel_scope.cancel()
                    return move
                due = server.step % self.pipeline.save_every == 0
                self._copies.renew(number, server.kinds, due=due)
                if due:
                    await self._save(number, service)
            if server.step % self.pipeline.save_every:
                await self._save(number, service)
            await linger(crew, server.step, lambda: service.served)
            await self._until_validated(server.step)
            nursery.cancel_scope.cancel()
        return urgent[0] if urgent else None

    async def _one_step(self, number: int, server: StageServer, steps: StageSteps) -> Behind | Lost | Unfit | None:
        """Makes a step. Or says why not: others of our stage have made it, or it is lost with them; or it is we."""
        problems: list[Behind | Lost | Unfit] = []
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_for_loss, number, server, problems, nursery.cancel_scope)
                nursery.start_soon(self._watch_for_distrust, problems, nursery.cancel_scope)
                await steps.step()
                nursery.cancel_scope.cancel()
        except* (Behind, Lost, Unfit) as group:
            problems += [each for each in group.exceptions if isinstance(each, (Behind, Lost, Unfit))]
        unfit = [each for each in problems if isinstance(each, Unfit)]
        lost = [each for each in problems if isinstance(each, Lost)]
        if lost and not unfit:
            self.events.emit("stage_lost", stage=number, step=self.crew.furthest)
        return next(iter([*unfit, *lost, *problems]), None)

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

    async def _watch_for_distrust(self, problems: list[Behind | Lost | Unfit], scope: trio.CancelScope) -> None:
        """Ends the block if others do not heed us any more."""
        await self.crew.until(lambda: self.crew.is_shunned(self.crew.peer))
        problems.append(Unfit())
        scope.cancel()

    async def _watch_for_loss(
        self, number: int, server: StageServer, problems: list[Behind | Lost | Unfit], scope: trio.CancelScope
    ) -> None:
        """Ends the block if other stages are ahead of ours and nobody of ours knows how: the step is lost for us.

        So it is if we have gone on among ourselves, and are where nobody is of all whom we have met again.
        """
        crew = self.crew

        def is_lost() -> bool:
            if not crew.is_credible(crew.peer, server.step):
                return True
            ours = crew.servers(number).values()
            if server.phase == "settled" or any(each.settled or each.step > server.step for each in ours):
                return False
            return any(each.step > server.step for each in self._ready().values())

        while True:
            await crew.until(is_lost)
            await trio.sleep(LOST)
            if is_lost():
                problems.append(Lost())
                scope.cancel()
                return

    async def _find_state(
        self, server: StageServer, number: int, old: StageState | None = None, *, lost: bool = False
    ) -> StageState | None:
        """The state of a stage that we are to serve; None if the run is over meanwhile."""
        began, fetched = trio.current_time(), self._fetcher.fetched
        state = await self._states.find(server, number, over=self._is_over, old=old, lost=lost)
        if state is not None:
            if old is not None and state.step < old.step:
                self.crew.fall_back(state.step)
            self.events.emit(
                "stage_synced",
                stage=number,
                step=state.step,
                furthest=self.crew.furthest,
                seconds=trio.current_time() - began,
                bytes=self._fetcher.fetched - fetched,
            )
        return state

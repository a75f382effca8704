"""The steps of a stage: its servers settle what they have counted, reduce it, and step when all stages have settled.

A server whose stage is ahead of it fetches the stage's state, and goes on from that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import attrs
import msgpack  # type: ignore[import-untyped]
import torch
import trio

from optim.swarm.ledger import Ledger, Settlement, settle
from optim.swarm.server import MOST_SQUARES, Contribution, clipping
from optim.swarm.state import Form
from peer.node import Compute
from peer.pipeline.crew import Crew
from peer.pipeline.messages import MOST_MICROBATCHES, Squares
from peer.pipeline.service import StageService
from peer.pipeline.transfer import Fetcher
from peer.pipeline.trust import OFFENCES
from protocol.collective import Reduced
from protocol.errors import Misfit, RoundAborted, ShoalError
from protocol.identity import PeerId
from protocol.operations import AsyncCollective
from protocol.plan import MAX_JUMP

MOST = 1 << 48
"""What a server may say of steps, settlements and samples stays below it."""

RETRY = 0.5
"""Seconds until something that failed is tried again, unless the standings change earlier."""


@attrs.frozen(kw_only=True)
class Plan:
    """What all peers of a pipeline agree on."""

    microbatches: int
    """Of a step, or of a round of local steps."""
    forms: Sequence[Form]
    """What the states of the stages look like."""
    clip: float | None = None
    """The largest norm of the whole model's mean gradient."""

    @property
    def stages(self) -> int:
        """How many the model has."""
        return len(self.forms)


@attrs.frozen(eq=False)
class _Word:
    """What a server brings to a settlement."""

    step: int
    attempt: int
    ledger: Ledger


SPREAD = 2.0
"""Seconds for which a step waits until not only some server of each stage has what the stage has settled, but all."""

LOST = 5.0
"""Seconds for which nobody must have had what we need of a step that others have made, before it is lost for us."""


class Behind(Exception):
    """Our stage has gone on without us."""


class Lost(Exception):
    """Others have made a step that we cannot make any more: what it takes is gone with those who had it."""


class Unfit(Exception):
    """The gradients that we compute are not finite, again and again, and those of others are."""


class StageSteps:
    """One server's part in the steps of its stage.

    Args:
        service: The server.
        stage: Its number.
        plan: What all agree on.
        crew: Who does what.
        collective: The operations of the stage's servers.
        fetcher: Fetches tensors of others.
        compute: Runs what takes long.
        rate: The learning rate of a step.
        tell_event: Told, as "stage_settled" and then as "stage_step", which ledgers are in the mean of a step, if we
            took part in that: before anybody else knows, and once the step is made.
    """

    def __init__(
        self,
        service: StageService,
        stage: int,
        plan: Plan,
        *,
        crew: Crew,
        collective: AsyncCollective,
        fetcher: Fetcher,
        compute: Compute,
        rate: Callable[[int], float],
        tell_event: Callable[[str, int, Mapping[PeerId, Ledger]], None],
    ) -> None:
        self._service, self._server, self._stage, self._plan = service, service.server, stage, plan
        self._crew, self._collective, self._fetcher = crew, collective, fetcher
        self._compute, self._rate, self._tell_event = compute, rate, tell_event
        self._settlement: Settlement | None = None
        self._squares: Squares | None = None  # of our stage's gradient in a step
        self._failed: Counter[PeerId] = Counter()
        """How often in a row what a server was to bring to the mean has not come."""

    def begin(self) -> None:
        """Tells the others that we serve the stage, from a state that was just taken in."""
        self._announce(ready=True, life=self._crew.own.life + 1)

    def tell(self) -> None:
        """Tells the others how far we are in the step, unless we have lost our place and are looking for a state."""
        if self._crew.own.ready:
            self._announce()

    def _announce(self, **changes: int) -> None:
        server, squares = self._server, self._squares
        is_settled = server.phase == "settled"
        self._crew.announce(
            **changes,
            step=server.step,
            attempt=server.attempt,
            counted=len(server.ledger),
            settled=is_settled,
            squares=squares.sum if squares is not None and is_settled and squares.step == server.step else None,
            rate=self._service.rate,
        )

    async def step(self) -> None:
        """Makes one step.

        Raises:
            Behind: Our stage has made it without us.
            Lost: Other stages have made it, and we cannot.
            Unfit: We only hold the others up.
        """
        while self._server.phase != "settled":
            await self._crew.until(self._is_complete)
            await self._settle()
        if not self._adds_tied():
            await self._measure({})
        self.tell()
        await self._crew.until(self._all_settled)
        with trio.move_on_after(SPREAD):
            await self._crew.until(self._all_have_it)
        tied = await self._tied()
        if self._adds_tied():
            await self._measure(tied)
            self.tell()
        scale = await self._agree_on_scale()
        for group in self._server.optimizer.param_groups:
            group["lr"] = self._rate(self._server.step)
        await self._service.advance(tied, scale)
        if self._settlement is not None:
            self._tell_event("stage_step", self._server.step - 1, self._settlement.ledgers)
            self._settlement = None
        self._crew.announce(missing=(), rested=self._crew.own.rested + 1)
        self.tell()

    def _adds_tied(self) -> bool:
        """Whether what several stages use counts in the norm of our stage's gradient."""
        return self._stage == 0 and bool(self._server.stage.tied)

    async def _measure(self, tied: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        if self._plan.clip is not None:
            self._squares = Squares(self._server.step, await self._compute(self._server.squares, tied))

    async def _agree_on_scale(self) -> float:
        """What all stages multiply their gradients by.

        Raises:
            Behind: Our stage has made the step, and more, without us.
            Lost: A stage goes on after the step, and nobody is left who has made it and knows.
        """
        if self._plan.clip is None:
            return 1.0
        step = self._server.step

        def ahead(stage: int) -> bool:
            return any(each.step > step for each in self._crew.servers(stage).values())

        def known() -> bool:
            return self._squares_of_model() is not None

        await self._crew.until(lambda: known() or any(map(ahead, range(self._plan.stages))))
        with trio.move_on_after(LOST):
            await self._crew.until(lambda: known() or ahead(self._stage))
        squares = self._squares_of_model()
        if squares is None:
            raise Behind if ahead(self._stage) else Lost
        self._crew.announce(last_squares=Squares(step, min(squares, MOST_SQUARES)))
        return clipping([squares], self._plan.clip)

    def _squares_of_model(self) -> float | None:
        """The sum of the squares of the gradients of all stages, if it is known. Who has made the step tells it."""
        step, stages = self._server.step, self._squares_of_stages()
        ahead = [each for each in self._crew.standings.values() if each.stage is not None and each.step > step]
        last = [(each.stage, each.last_squares) for each in ahead if each.last_squares is not None]
        told = {stage: squares.sum for stage, squares in last if squares.step == step}
        if self._stage in told:
            return told[self._stage]
        known = [squares for squares in stages if squares is not None]
        return math.fsum(known) if len(known) == len(stages) else next(iter(told.values()), None)

    def _squares_of_stages(self) -> list[float | None]:
        """What is known of each stage in this step."""
        found: list[float | None] = []
        for stage in range(self._plan.stages):
            there = [each for each in self._crew.servers(stage).values() if each.step == self._server.step]
            found.append(next((each.squares for each in there if each.squares is not None), None))
        return found

    def _is_complete(self) -> bool:
        """Whether the stage's ledgers may have all microbatches."""
        server, counted = self._server, 0
        for peer, standing in self._crew.servers(self._stage).items():
            if peer == self._crew.peer:
                counted += len(server.ledger)
                continue
            if standing.step > server.step or (standing.step == server.step and standing.settled):
                raise Behind
            counted += standing.counted if standing.step == server.step else 0
        return counted >= self._plan.microbatches

    async def _settle(self) -> None:
        """Once: whoever's sums count are reduced, or it turns out what is missing."""
        async with self._service.paused() as server:
            ledger = server.freeze()
        attempt, kept = server.attempt, True
        missing: frozenset[int] = frozenset()
        try:
            settlement, attempt, group = await self._agree(_Word(server.step, server.attempt, ledger))
            kept, missing = self._crew.peer in settlement.ledgers, settlement.missing
            if not missing:
                async with self._service.paused():  # with local steps, it makes the last one
                    contribution = await self._compute(server.contribution)
                reduced = await self._reduce(contribution if kept else None, contribution, group)
                self._judge(reduced, settlement)
                if _is_exact(reduced, settlement):
                    server.settled(reduced.mean)
                    if server.stage.tied:
                        self._service.keep_tied({server.step: server.tied_gradients()})
                    self._settlement = settlement
                    self._tell_event("stage_settled", server.step, settlement.ledgers)
                    return
                missing = settlement.among(reduced.contributors).missing
                kept = kept and self._crew.peer in reduced.contributors
        except (RoundAborted, Misfit):
            attempt = server.attempt  # the others may have settled; else it begins again
            await trio.sleep(RETRY)
        finally:
            if server.phase == "frozen":
                server.thaw(attempt=attempt, keep=kept)
                self._service.wake()
        self._crew.announce(missing=tuple(sorted(missing)))
        self.tell()

    def _judge(self, reduced: Reduced, settlement: Settlement) -> None:
        """Takes note of whose sums were to be in a mean, and are not: they were not finite, or did not come.

        Raises:
            Unfit: Ours were not, and have not been for some time.
        """
        for peer, ledger in settlement.ledgers.items():
            if peer in reduced.contributors or not sum(ledger.values()):
                self._failed[peer] = 0
            elif peer in self._crew.standings:
                self._failed[peer] += 1
            if self._failed[peer] < OFFENCES:
                continue
            if peer != self._crew.peer:
                self._fetcher.trust.distrust(peer, self._stage, "its gradients do not come, or are not finite")
            elif any(other != peer for other in reduced.contributors):
                raise Unfit

    async def _agree(self, word: _Word) -> tuple[Settlement, int, frozenset[PeerId] | None]:
        """Whose sums count, how many settlements of the step will have failed if this one does, and who reduces.

        All have the same words. If somebody's makes no sense, the others reduce among themselves (else None): its sum
        could not be kept out otherwise.

        Raises:
            Behind: Somebody of our stage is at a later step.
            RoundAborted: Nothing came of it.
        """
        gathered = await self._collective.gather(_pack(word), tag="ledger")
        total = self._plan.microbatches
        words = {peer: heard for peer, block in gathered.blocks.items() if (heard := _unpack(block, total)) is not None}
        if any(heard.step > word.step and self._crew.is_credible(peer, heard.step) for peer, heard in words.items()):
            raise Behind
        here = {peer: heard for peer, heard in words.items() if heard.step == word.step}
        # Who says that much more have failed than we know lies, and must not use up the numbers.
        attempt = min(max(word.attempt, *(heard.attempt for heard in here.values())), word.attempt + MAX_JUMP) + 1
        if self._crew.peer not in here:
            raise RoundAborted("what we have counted makes no sense")
        ledgers = {peer: heard.ledger for peer, heard in here.items()}
        group = None if words.keys() == gathered.blocks.keys() else frozenset(here)
        return settle(ledgers, total), attempt, group

    async def _reduce(self, ours: Contribution | None, like: Contribution, group: frozenset[PeerId] | None) -> Reduced:
        values = torch.zeros_like(like.values) if ours is None else ours.values
        weight = 0.0 if ours is None else ours.weight
        return await self._collective.all_reduce(values, weight, tag="gradient", group=group)

    def _all_settled(self) -> bool:
        if self._crew.furthest > self._server.step:  # else nobody could be there
            return True
        return all(self._has_settled(stage) for stage in range(self._plan.stages))

    def _all_have_it(self) -> bool:
        """Whether nobody is left that has not settled the step.

        If a step is made, and all die that had settled it, it is lost for their stage.
        """
        step, standings = self._server.step, self._crew.heeded.values()
        late = any(each.ready and each.step == step and not each.settled for each in standings)
        return not late or self._crew.furthest > step

    def _has_settled(self, stage: int) -> bool:
        step = self._server.step
        return stage == self._stage or any(
            standing.step > step or (standing.step == step and standing.settled)
            for standing in self._crew.servers(stage).values()
        )

    async def _tied(self) -> dict[int, dict[str, torch.Tensor]]:
        """The gradients of what several stages use, by stage."""
        if not self._server.stage.tied:
            return {}
        tied = {self._stage: self._server.tied_gradients()}
        for stage in self._sharing():
            tied[stage] = await self._fetch_tied(stage)
        return tied

    def _sharing(self) -> list[int]:
        """The other stages that use a parameter of ours."""
        ours = set(self._server.stage.tied.values())
        forms = enumerate(self._plan.forms)
        return [stage for stage, form in forms if stage != self._stage and ours & set(form.tied.values())]

    async def _fetch_tied(self, stage: int) -> dict[str, torch.Tensor]:
        """Another stage's part of the gradients of what we share, from one of its servers.

        If all that had it are gone, the stage does the step again, unless some stage has made it: then it cannot.
        """
        hopeless = math.inf
        while True:
            changed = self._crew.changed
            for peer in self._crew.servers(stage):
                try:
                    return await self._fetcher.tied(peer, stage, self._server.step, self._plan.forms[stage])
                except ShoalError:
                    continue
            if any(each.step > self._server.step for each in self._crew.servers(self._stage).values()):
                raise Behind
            if self._crew.furthest <= self._server.step:
                hopeless = math.inf
            elif trio.current_time() >= hopeless:
                raise Lost
            else:
                hopeless = min(hopeless, trio.current_time() + LOST)
            with trio.move_on_after(RETRY):
                await changed.wait()


def _is_exact(reduced: Reduced, settlement: Settlement) -> bool:
    """Whether every part of the mean is over all that was agreed on."""
    wanted = {peer for peer, ledger in settlement.ledgers.items() if sum(ledger.values())}
    return all(
        {peer for peer, weight in zip(part.members, part.weights, strict=True) if weight > 0} == wanted
        for part in reduced.plan.parts
    )


def _pack(word: _Word) -> bytes:
    packed: bytes = msgpack.packb([word.step, word.attempt, sorted(word.ledger.items())])
    return packed


def _unpack(block: memoryview, total: int) -> _Word | None:
    """What a server of our stage says; None if it is nonsense, as of microbatches beyond the total."""
    try:
        step, attempt, entries = msgpack.unpackb(block, max_array_len=MOST_MICROBATCHES, strict_map_key=True)
        ledger = dict(entries)
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    numbers = [step, attempt, *ledger, *ledger.values()]
    sound = all(type(each) is int and 0 <= each < MOST for each in numbers) and max(ledger, default=0) < total
    return _Word(step, attempt, ledger) if sound else None

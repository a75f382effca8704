"""One peer of a run: from finding the state to the last round.

The node owns the training loop. The network lives in trio's thread; whatever computes for longer than a moment (inner
steps, the outer step, hashing, evaluation, checkpoints) runs in a worker thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar, TypeVarTuple

import attrs
import torch
import trio

from optim import OuterState
from peer import checkpoint
from peer.chain import Tip
from peer.checkpoint import Checkpoint
from peer.divergence import DivergenceGuard
from peer.events import EventLog
from peer.exchange import perform
from peer.history import History, Rules
from peer.home import CheckpointError
from peer.membership import Member, Membership
from peer.pace import Speed, pace
from peer.partial import Partial
from peer.settings import Settings
from peer.state import CommittedState, byte_length
from peer.sync import HISTORY_RATE, Donor, SyncFailed, fetch_history, fetch_state
from peer.trainer import Contribution, StepInfo, Trainer
from protocol.collective import Outcome, Reduced
from protocol.endpoint import Endpoint
from protocol.errors import Behind, Fork, PeerUnreachable, RoundAborted, ShoalError
from protocol.identity import PeerId
from protocol.rounds import Rounds

LINGER = 20.0
"""Seconds that a peer stays after the last round for those that still lack it, or since they last asked for it."""

LONGEST_LINGER = 600.0
"""Seconds that it stays at most."""

FORLORN = 60.0
"""Seconds for which a newcomer without a state waits for somebody that takes it in."""

RETRY = 1.0
"""Seconds before something that failed is tried again, unless the members change earlier."""

INNER_EVENT_PERIOD = 1.0
"""Seconds between two `inner` events."""

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class Compute(Protocol):
    """How the node runs what takes long: in a worker thread, or in the simulator's way."""

    def __call__(self, function: Callable[[*_Ts], _T], *arguments: *_Ts) -> Awaitable[_T]:
        """Calls `function(*arguments)` and returns its result. It is not abandoned when cancelled."""
        ...


async def in_worker_thread(function: Callable[[*_Ts], _T], *arguments: *_Ts) -> _T:
    """The way of real nodes: PyTorch lets go of the interpreter's lock in its kernels."""
    result = await trio.to_thread.run_sync(function, *arguments)
    # The thread was waited for, and meanwhile all that the node stands on may have ended.
    await trio.lowlevel.checkpoint_if_cancelled()
    return result


@attrs.frozen(kw_only=True)
class Node:
    """Takes part in a run until its rounds are over."""

    run_id: bytes
    settings: Settings
    rules: Rules
    endpoint: Endpoint
    membership: Membership
    rounds: Rounds
    donor: Donor
    trainer: Trainer
    founder: PeerId
    checkpoints: Path
    partial: Partial
    """What there is of a state that we have begun to fetch."""
    events: EventLog
    compute: Compute = in_worker_thread
    linger: float = 0.0
    """Seconds to stay after the last round at least, for newcomers."""
    _guard: DivergenceGuard = attrs.field(factory=DivergenceGuard, init=False)
    _speed: Speed = attrs.field(factory=Speed, init=False)
    _outwaited: set[PeerId] = attrs.field(factory=set, init=False)
    """Members that have fetched for too long for us to wait for them again, before they take part."""

    async def run(self, local: Checkpoint | None, *, founding: int | None) -> None:
        """Finds the state and trains to the last round, or until cancelled.

        Args:
            local: Our own checkpoint of this run, if there is one.
            founding: We make the first state if no member has one, and begin when so many peers have it, we included.
                None: that is not for us to do.

        Raises:
            RequestRefused: We have no state, and no member takes us in.
            PeerUnreachable: We have no state, and there is no member.
            CheckpointError: The run is over, but its result could not be saved.
        """
        state = await self._first_state(local, founds=founding is not None)
        if local is not None:
            await self.compute(self.trainer.restore_inner, local.inner)
            if state is local.state:
                await self.compute(self.trainer.resume, state.outer, state.header.revision, local.own)
        await self._validate(state)
        await self._wait_to_begin(state, founding)
        last, saved, validated = self.trainer.schedule.last, local and local.state, state
        while not last or state.header.revision < last:
            before = state
            state, took_part = await self._round(before)
            # Who is behind skips this: it would otherwise take as long for each round as the others, and stay behind.
            if took_part and not self.trainer.is_halfway(state.header.revision):
                saved = state if await self._save(state) is None else None
                await self._validate(state)
                validated = state
        problem = None if state is saved else await self._save(state)
        if state is not validated:
            await self._validate(state)
        await self._linger(state)
        if problem is not None:
            raise problem

    async def _first_state(self, local: Checkpoint | None, *, founds: bool) -> CommittedState:
        """The state to start from: the members' if they have a better one than our checkpoint, else ours."""
        state = None if local is None else local.state
        await self._stand_at(state, active=False)
        await self.membership.settled()
        hopeless = trio.current_time() + FORLORN
        while True:
            newer = await self._fetch_better(state)
            if newer is not None:
                return newer
            if self.membership.refusal is not None and not self.membership.others:
                raise self.membership.refusal
            if state is not None:
                return state
            if founds:
                outer = await self.compute(self.trainer.initial_state)
                return await self.compute(CommittedState.genesis, self.run_id, outer)
            if self.membership.others:
                hopeless = trio.current_time() + FORLORN
            elif trio.current_time() >= hopeless:
                raise self.membership.refusal or PeerUnreachable(
                    "nobody of this run is there who has its state", hint="ask whoever founded it to start it again"
                )
            await self._pause()

    async def _wait_to_begin(self, state: CommittedState, founding: int | None) -> None:
        """Nobody takes the first step before the founder does, which waits until enough peers have the first state.

        With short rounds, it would otherwise be far ahead before the others have fetched that.
        """
        if state.header.revision > 0:
            return
        await self._stand_at(state, active=False)
        told = 0
        while not self._has_begun(founding):
            if (here := self._prepared) != told:
                self.events.emit("waiting", here=here, wanted=founding)
                told = here
            await self.membership.changes()

    @property
    def _prepared(self) -> int:
        """How many peers have a state, we included."""
        return 1 + sum(member.tip is not None for member in self.membership.others)

    def _has_begun(self, founding: int | None) -> bool:
        others = self.membership.others
        if any(member.active for member in others):
            return True
        if founding is not None:
            return self._prepared >= founding
        return all(member.peer != self.founder for member in others)

    async def _round(self, state: CommittedState) -> tuple[CommittedState, bool]:
        """One outer round: inner steps, the collective, the commit.

        Returns:
            The state to go on from: the next one, one that others have, or the same if nothing came of the round; and
            whether we took part in making it.
        """
        revision, behind = state.header.revision + 1, self._late and self.membership.ahead() is not None
        await self._stand_at(state, active=not behind)
        await self.compute(self.trainer.start_round, state.outer, revision, self.membership.partners())
        if behind and not self.trainer.is_ready(self.trainer.steps(revision, self._pace())):
            await self._stand_at(state, active=True)  # not only the results of others are to come
        await self._inner_steps(revision)
        if self._late and (ahead := self.membership.ahead()) is not None:
            return await self._catch_up(state, ahead.peer), False  # first what others have made; then our part
        contribution = await self.compute(self.trainer.contribution)
        if not contribution.finite:
            reason = "our own update was not finite, so it does not count"
            self.events.emit("round_failed", round=revision, attempt=0, reason=reason)
        while True:
            if self._late:
                await self._until_accompanied(state)
            await self.membership.settled()
            better = await self._fetch_better(state)
            if better is not None:
                return better, False
            if not self.membership.active:  # there seemed to be a better state
                await self._stand_at(state, active=True)
            claimants = self._claimants(revision)
            try:
                outcome = await self._exchange(state, contribution)
            except Behind as behind:
                return await self._catch_up(state, behind.peer), False
            except (Fork, RoundAborted) as error:
                self.events.emit("round_failed", round=revision, attempt=0, reason=str(error))
                if isinstance(error, Fork):
                    better = await self._fetch_better(state, branched=error.peer)
                    if better is not None:
                        return better, False
                    self.membership.doubt(error.peer)
                await self._pause()
            else:
                break
        took_part = self.endpoint.peer_id in outcome.members
        committed = await self._commit(state, outcome)
        for peer in sorted(claimants) if took_part else ():
            # It has made this round on another branch, which may be the better one; or it lies.
            better = await self._fetch_better(committed, branched=peer)
            if better is not None:
                return better, False
            self.membership.doubt(peer)
        return committed, took_part

    @property
    def _late(self) -> bool:
        """Whether rounds go on without those who are late, so that nobody hurries, or gives up what is not done yet."""
        return self.trainer.recipe.late

    async def _until_accompanied(self, state: CommittedState) -> None:
        """Alone, waits for members that fetch something; for each a grace time, and what a slow line takes, at most.

        Rounds that do not wait for those who are late may be quicker than a line can carry their results: whoever came
        to a peer that goes on alone would never get in.
        """
        with trio.move_on_after(self.settings.round.grace + byte_length(state.outer) / HISTORY_RATE):
            while fetching := self._fetching():
                await self.membership.changes()
            return
        self._outwaited.update(fetching)

    def _fetching(self) -> set[PeerId]:
        """Who fetches something, if nobody takes part but us."""
        others = self.membership.others
        active = {member.peer for member in others if member.active}
        self._outwaited.difference_update(active)
        return set() if active else {member.peer for member in others} - self._outwaited

    def _claimants(self, revision: int) -> set[PeerId]:
        """The members that say that this round is over already, although we have not taken part in it."""
        heard, ahead = self.rounds.heard, self.membership.ahead()
        said = {heard[1]} if heard is not None and heard[0] >= revision else set()
        return said if ahead is None else said | {ahead.peer}

    async def _pause(self) -> None:
        """Waits a little, or until more is known about the others."""
        with trio.move_on_after(RETRY):
            await self.membership.changes()

    async def _inner_steps(self, revision: int) -> None:
        """Trains until the round's steps are done, the others' patience ends, or there is a better state to fetch."""

        async def watch(stop: trio.Event) -> None:
            try:
                async with trio.open_nursery() as first:
                    if not self._late:
                        first.start_soon(self._until_deadline, revision, first.cancel_scope)
                    first.start_soon(self._until_left_behind, first.cancel_scope)
            finally:
                stop.set()  # also when we are cancelled

        stop = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, stop)
            await self._train(self.trainer.steps(revision, self._pace()), stop)
            nursery.cancel_scope.cancel()

    async def _train(self, steps: int, stop: trio.Event) -> None:
        """Trains until so many steps are done; the worker thread ends after the step at which it is told to stop."""
        meter = _Meter(self.events, trio.lowlevel.current_clock())
        run = partial(self.trainer.run, steps, should_stop=stop.is_set, on_step=meter.step)
        begun = trio.current_time()
        await self.compute(run)
        self._speed.add(meter.steps, trio.current_time() - begun)
        meter.flush()

    def _pace(self) -> float:
        """Our speed as a share of the fastest peer's, as far as both are known."""
        others = [member.speed for member in self.membership.others if member.active]
        return pace(self._speed.rate, others)

    async def _exchange(self, state: CommittedState, contribution: Contribution) -> Outcome:
        """The collective's part of a round; inner steps go on meanwhile, as many as the method allows.

        Raises: As `Rounds.all_reduce`.
        """
        revision, digest = state.header.revision + 1, state.header.digest
        ask = partial(perform, self.rounds, contribution.operation, revision, digest=digest, part=contribution.part)
        if contribution.meanwhile == 0:
            return await ask()
        stop = trio.Event()
        result: Outcome | ShoalError
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._train, contribution.meanwhile, stop)
            try:
                result = await ask()
            except ShoalError as error:  # not through the nursery, which would make a group of it
                result = error
            finally:
                stop.set()
        if isinstance(result, ShoalError):
            raise result
        return result

    async def _until_deadline(self, revision: int, scope: trio.CancelScope) -> None:
        """Cancels `scope` when the others, being ready for the round, will wait no longer."""
        await self.rounds.due(revision)
        scope.cancel()

    async def _until_left_behind(self, scope: trio.CancelScope) -> None:
        """Cancels `scope` when others have gone on without us, or there is a state that we should rather work on."""
        while not self._is_left_behind():
            await self.membership.changes()
        scope.cancel()

    def _is_left_behind(self) -> bool:
        ahead = self.membership.ahead()
        if ahead is None or ahead.tip is None or not self._late:
            return ahead is not None
        return self.membership.better() is not None or 0 < self.trainer.schedule.last <= ahead.tip.revision

    async def _commit(self, state: CommittedState, outcome: Outcome, *, fetched: bool = False) -> CommittedState:
        """Takes the outer step that a round's result asks for. `fetched`: others have made the result."""
        revision, plan = state.header.revision + 1, outcome.plan
        if fetched:
            assert isinstance(outcome, Reduced)
            outer = await self.compute(self.trainer.commit_missed, state.outer, outcome, revision)
        else:
            outer = await self.compute(self.trainer.commit, state.outer, outcome, revision)
        committed = await self.compute(_committed, state, outer, outcome, self.trainer.is_own(revision))
        await self._stand_at(committed, active=not (fetched and self._late))
        self.partial.clear()  # nearly all of it has changed meanwhile
        self.events.emit(
            "round_committed",
            round=revision,
            attempt=plan.attempt,
            members=plan.members,
            contributors=plan.contributors,
            digest=committed.header.digest,
            seconds=outcome.seconds,
            bytes_sent=outcome.bytes_sent,
            bytes_received=outcome.bytes_received,
            weight=plan.weight,
            fetched=fetched,
        )
        return committed

    async def _catch_up(self, state: CommittedState, holder: PeerId) -> CommittedState:
        """Others have gone on without us: takes the round's result from one of them, or else their state."""
        await self._stand_at(state, active=False)
        try:
            revision = state.header.revision + 1
            length = await self.compute(self.trainer.length, revision) if self._late else None
            reduced = await self.rounds.fetch_result(holder, revision, length=length)
        except ShoalError:
            reduced = None
        if reduced is not None and reduced.plan.base == state.header.digest:
            return await self._commit(state, reduced, fetched=True)
        self.rounds.adopted(state.header.revision, state.header.digest)  # what was fetched leads from another state
        await self.membership.settled()
        better = await self._fetch_better(state, branched=holder)
        if better is None:
            self.membership.doubt(holder)
            await self._pause()
        return better or state

    async def _fetch_better(
        self, state: CommittedState | None, *, branched: PeerId | None = None
    ) -> CommittedState | None:
        """Fetches the state of the best branch that the members know, or returns None if ours is that one.

        `branched` is a member that is known to be on another branch than ours.
        """
        while True:
            started = trio.current_time()
            best = self.membership.better(branched=branched)
            if best is None or best.tip is None:
                return None
            await self._stand_at(state, active=False)
            holders = self.membership.holders(best.tip)
            own = self.trainer.is_own(best.tip.revision)
            if own:  # each has another state: one is as good as the other
                holders = holders[:1]
            history = await self._prove(state, best.tip, holders)
            if history is None:
                continue  # with the next best
            received = 0

            def count(length: int) -> None:
                nonlocal received
                received += length

            try:
                with self.rounds.measuring():
                    found = await fetch_state(
                        self.endpoint,
                        self.run_id,
                        history,
                        holders,
                        elements=self.trainer.flat.length,
                        buffers=self.trainer.buffers,
                        progress=count,
                        earlier=self.partial,
                        own=own,
                    )
            except SyncFailed as error:
                self.events.emit("round_failed", round=best.tip.revision, attempt=0, reason=str(error))
                for peer in holders:
                    self.membership.doubt(peer, 0.0 if peer in error.gone else trio.current_time() - started)
                continue  # with the next best; the members may have moved on, too
            for peer in holders:
                self.membership.trust(peer)
            seconds = trio.current_time() - started
            tip = found.header.tip
            self.rounds.adopted(tip.revision, tip.digest)
            self.events.emit("synced", round=tip.revision, digest=tip.digest, seconds=seconds, bytes=received)
            if state is not None and history.find((state.header.digest,)) is None:
                await self._leave_branch(state, history)
            return found

    async def _prove(self, state: CommittedState | None, tip: Tip, holders: Sequence[PeerId]) -> History | None:
        """The history of a better tip than ours, from the first member that can show what weight is behind it.

        Those that cannot are doubted; None if there is nobody else.
        """
        for peer in holders:
            started = trio.current_time()
            try:
                return await fetch_history(
                    self.endpoint,
                    self.run_id,
                    tip,
                    peer,
                    ours=None if state is None else state.history,
                    rules=self.rules,
                    compute=self.compute,
                )
            except ShoalError as error:
                reason = f"{peer.short} cannot show how its revision {tip.revision} came about: {error}"
                self.events.emit("round_failed", round=tip.revision, attempt=0, reason=reason)
                self.membership.doubt(peer, trio.current_time() - started)
        return None

    async def _leave_branch(self, state: CommittedState, history: History) -> None:
        """We go on from a state that ours has not led to. What we have trained since the last round comes along."""
        common = history.common(state.history)
        self.events.emit(
            "branch_left",
            round=state.header.revision,
            digest=state.header.digest,
            weight=state.header.weight - (common.weight if common is not None else 0.0),
            common=None if common is None else common.revision,
        )
        await self.compute(self.trainer.carry_over)

    async def _stand_at(self, state: CommittedState | None, *, active: bool) -> None:
        """Offers our state to others and tells them where we are and whether we take part in rounds."""
        if state is not None:
            self.donor.offer(state)
            self.rounds.committed(state.header.revision, state.header.digest)
        await self.membership.announce(None if state is None else state.tip, active=active, speed=self._speed.rate)

    async def _validate(self, state: CommittedState) -> None:
        loss = await self.compute(self.trainer.evaluate, state.outer)
        self.events.emit("validation", round=state.header.revision, loss=loss)
        if self._guard.sees(loss):
            self.events.emit("diverging", round=state.header.revision, loss=loss, best=self._guard.best)

    async def _save(self, state: CommittedState) -> CheckpointError | None:
        """Saves a checkpoint. If that fails (a full disk), says so; training can go on with the earlier ones."""
        inner, own = await self.compute(_remembered, self.trainer)
        saved = Checkpoint(self.settings, state, inner, own)
        try:
            await self.compute(checkpoint.save, self.checkpoints, saved, self.trainer.flat)
        except CheckpointError as error:
            self.events.emit("checkpoint_failed", round=state.header.revision, reason=str(error))
            return error
        return None

    async def _linger(self, state: CommittedState) -> None:
        """Stays for those who lack the last round, as long as they are there and for a limited time."""
        await trio.sleep(self.linger)
        deadline = trio.current_time() + LINGER
        limit = trio.current_time() + LONGEST_LINGER
        while any(_lags(member, state) for member in self.membership.others) and trio.current_time() < deadline:
            with trio.move_on_at(deadline):
                await self.membership.changes()
            deadline = min(limit, max(deadline, self.donor.served + LINGER))


def _lags(member: Member, state: CommittedState) -> bool:
    return member.tip is None or member.tip.revision < state.header.revision


def _committed(state: CommittedState, outer: OuterState, outcome: Outcome, own: bool) -> CommittedState:
    return state.commit(outer, plan=outcome.plan.id, contributions=outcome.plan.contributions, own=own)


def _remembered(trainer: Trainer) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return trainer.inner_state(), trainer.own_state()


class _Meter:
    """Turns inner steps into events, at most one in each period. Called from the worker thread."""

    def __init__(self, events: EventLog, clock: trio.abc.Clock) -> None:
        self._events = events
        self._clock = clock
        self._begun = clock.current_time()
        self._tokens = 0
        self._last: StepInfo | None = None
        self.steps = 0

    def step(self, info: StepInfo) -> None:
        self.steps += 1
        self._tokens += info.tokens
        self._last = info
        if self._clock.current_time() - self._begun >= INNER_EVENT_PERIOD:
            self.flush()

    def flush(self) -> None:
        """Reports what has not been reported yet."""
        if self._last is None:
            return
        now = self._clock.current_time()
        self._events.emit(
            "inner",
            step=self._last.step,
            loss=self._last.loss,
            tokens=self._tokens,
            tokens_per_second=self._tokens / max(now - self._begun, 1e-9),
        )
        self._begun, self._tokens, self._last = now, 0, None

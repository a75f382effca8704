"""A trainer: leads microbatches through the stages, many at a time, and again where they were lost.

Each microbatch is a generator that asks one stage after the other. Who answers, and what happens if nobody does, is
decided around it: a failed or stalled server is replaced by another one of its stage, and the generator never knows.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping
from random import Random

import attrs

from optim.swarm.messages import Answer, Kind, Request, Withdraw, Withdrawn
from optim.swarm.payloads import Packer, Payload
from optim.swarm.routing import Router
from protocol.errors import ProtocolError
from protocol.identity import PeerId

WORK: Mapping[Kind, float] = {"forward": 1.0, "backward": 3.0, "void": 0.0}
"""In forward passes: backward repeats the forward pass, and takes twice as long itself."""


@attrs.frozen(eq=False)
class Sample:
    """What a microbatch is made of."""

    tokens: Payload
    targets: Payload


@attrs.frozen(eq=False)
class Send:
    """A message to a server. Its answer, or its failure, comes back with the number of the call."""

    call: int
    stage: int
    peer: PeerId
    message: Request | Withdraw


@attrs.frozen
class Settings:
    """How a trainer goes about it."""

    in_flight: int = 8
    """Microbatches on their way at the same time. Each keeps its activations at all stage boundaries."""
    patience: float = 30.0
    """Seconds until a server that has not answered is taken for stalled."""
    grace: float = 3.0
    """Seconds that it then has to say whether it has counted."""
    retry: float = 1.0
    """Seconds until a stage without servers is tried again."""
    same_path: bool = False
    """Whether a microbatch goes back through the servers that it has come by, if they are there: for local steps, with
    which the servers of a stage have different parameters."""


@attrs.frozen
class _Holder:
    """Who has counted a microbatch."""

    peer: PeerId
    attempt: int


@attrs.frozen(eq=False)
class _Ask:
    """What a microbatch needs of a stage next."""

    stage: int
    kind: Kind
    inputs: Payload | None = None
    targets: Payload | None = None
    gradient: Payload | None = None


@attrs.define(eq=False)
class _Job:
    number: int
    sample: Sample
    lacking: set[int] = attrs.field(factory=set)
    """Stages that are to count it, and have not, as far as we know."""
    holders: dict[int, _Holder] = attrs.field(factory=dict)
    walk: Generator[_Ask, Answer, None] | None = None
    """Its way through the pipeline, while it is on it."""
    ask: _Ask | None = None
    call: int | None = None
    """Under which number somebody has been asked that."""
    tried: set[PeerId] = attrs.field(factory=set)
    """Who has not done it."""
    not_before: float = 0.0
    walks: int = 0
    path: dict[int, PeerId] = attrs.field(factory=dict)
    """By which servers it has come on this way: who has made its activations."""
    path_back: dict[int, PeerId] = attrs.field(factory=dict)
    """Who has made their gradients."""


@attrs.define(eq=False)
class _Call:
    job: _Job
    ask: _Ask
    peer: PeerId
    since: float
    due: float
    counts: bool
    twin: int | None = None
    """The call that asks to withdraw this one, or the one that is to be withdrawn: what ends one ends both."""


class PipelineTrainer:
    """One trainer's microbatches of the present step.

    The shell sends what `poll` returns, tells what comes back, and calls `poll` again after each of these, and at
    `wake`.

    Args:
        stages: How many the model has.
        random: Decides between servers that are equal.
        settings: How to go about it.
    """

    def __init__(self, stages: int, random: Random, settings: Settings | None = None) -> None:
        self.routers = tuple(Router(random) for _ in range(stages))
        """Who serves each stage. Servers are added here, and removed by `lost`."""
        self.step = -1
        self.losses: dict[int, list[float]] = {}
        """Each sample's loss, by the number of the microbatch, of those that were finite."""
        self.repeated = 0
        """How often a microbatch was led through the pipeline once more."""
        self._settings, self._packer = settings or Settings(), Packer()
        self._jobs: dict[int, _Job] = {}
        self._calls: dict[int, _Call] = {}
        self._next_call = 0
        self._settled: set[int] = set()
        self._failed: dict[int, int] = {}  # settlements of the step, by stage, as far as we know

    def begin(self, step: int, samples: Mapping[int, Sample]) -> None:
        """Goes on with another step, with our share of its microbatches. What is left of the one before is given up."""
        self.step = step
        self.losses, self._jobs, self._calls, self._settled, self._failed = {}, {}, {}, set(), {}
        for number, sample in samples.items():
            self.add(number, sample, range(len(self.routers)))

    def add(self, number: int, sample: Sample, stages: Iterable[int]) -> None:
        """Takes over a microbatch that these stages lack, such as one of a trainer that is gone."""
        job = self._jobs.setdefault(number, _Job(number, sample))
        job.lacking.update(stage for stage in stages if stage not in job.holders and stage not in self._settled)

    def missing(self, stage: int, attempt: int, numbers: Iterable[int]) -> frozenset[int]:
        """A settlement has failed, the `attempt`th of the step from 0, because these were not in it.

        Returns:
            Those of them that are not ours: somebody has to `add` them if their trainer is gone.
        """
        numbers = frozenset(numbers)
        self._failed[stage] = max(self._failed.get(stage, 0), attempt + 1)
        for number in numbers & self._jobs.keys():
            job = self._jobs[number]
            holder = job.holders.get(stage)
            if holder is None or holder.attempt <= attempt:
                self._lose(job, stage)
        return numbers - self._jobs.keys()

    def settled(self, stage: int) -> None:
        """A stage has settled: whatever we know, it has everything."""
        self._settled.add(stage)
        for job in self._jobs.values():
            job.lacking.discard(stage)

    def reopened(self, stage: int) -> None:
        """A stage that had settled has lost that with all its servers, and has nothing."""
        self._settled.discard(stage)
        for job in self._jobs.values():
            self._lose(job, stage)

    def lost(self, peer: PeerId) -> None:
        """A server is gone with all that it has counted. What it was asked for goes to others."""
        for stage, router in enumerate(self.routers):
            router.remove(peer)
            for job in self._jobs.values():
                holder = job.holders.get(stage)
                if holder is not None and holder.peer == peer:
                    self._lose(job, stage)
        for number in [number for number, call in self._calls.items() if call.peer == peer]:
            self._give_up(number)

    @property
    def numbers(self) -> frozenset[int]:
        """Our microbatches of this step, those that were taken over included."""
        return frozenset(self._jobs)

    @property
    def stages_settled(self) -> frozenset[int]:
        """Stages that have settled the step, as far as we know."""
        return frozenset(self._settled)

    @property
    def idle(self) -> bool:
        """Whether all our microbatches are counted in all stages, as far as we know."""
        return not any(job.walk is not None or job.lacking for job in self._jobs.values())

    @property
    def wake(self) -> float | None:
        """When `poll` has something to do without any answer; None if not."""
        times = [call.due for call in self._calls.values()]
        times += [job.not_before for job in self._jobs.values() if job.ask is not None and job.call is None]
        return min(times, default=None)

    def poll(self, now: float) -> list[Send]:
        """What is to be sent."""
        sends = self._overdue(now)
        flying = sum(job.walk is not None for job in self._jobs.values())
        for job in self._jobs.values():
            if job.walk is None and job.lacking and flying < self._settings.in_flight:
                flying += 1
                self.repeated += job.walks > 0
                job.walks += 1
                job.path, job.path_back = {}, {}
                job.walk = self._led(job)
                job.ask = next(job.walk)
            if job.ask is not None and job.call is None and job.not_before <= now:
                sends += self._dispatch(job, now)
        return sends

    def answered(self, number: int, answer: Answer | Withdrawn, now: float) -> None:
        """The answer to a call. One to a call that was given up is passed over."""
        call = self._calls.get(number)
        if call is None:
            return
        job, stage = call.job, call.ask.stage
        losses = self._losses_in(answer)
        if not self._fits(call, answer, losses):
            self.failed(number, now)
            return
        if answer.counted and call.counts:
            attempt = min(answer.attempt, self._failed.get(stage, 0) + 1)  # it cannot be far ahead of us
            job.holders[stage] = _Holder(call.peer, attempt)
            job.lacking.discard(stage)
        if isinstance(answer, Withdrawn):
            self.routers[stage].failed(call.peer, now)
            self._give_up(number)
            return
        self.routers[stage].succeeded(call.peer, WORK[call.ask.kind] * job.sample.tokens.samples, now - call.since)
        self._end(number)
        (job.path if call.ask.kind == "forward" else job.path_back)[stage] = call.peer
        if losses is not None:
            self.losses[job.number] = losses
        self._resume(job, answer)

    def failed(self, number: int, now: float, *, misfit: bool = False) -> None:
        """A call came to nothing: it was refused, or its stream is broken.

        Args:
            number: Of the call.
            now: Seconds.
            misfit: Whether it was refused because what was sent makes no sense. Either the server is wrong, or those
                from whom that came: so the microbatch takes another way from its beginning.
        """
        call = self._calls.get(number)
        if call is None:
            return
        job, stage = call.job, call.ask.stage
        self.routers[stage].failed(call.peer, now)
        self._give_up(number)
        if misfit:
            for source, way in ((stage - 1, job.path), (stage + 1, job.path_back)):
                if source in way:
                    self.routers[source].failed(way[source], now)
            job.walk = job.ask = None
            job.not_before = now + self._settings.retry

    def _led(self, job: _Job) -> Generator[_Ask, Answer, None]:
        """One microbatch's way through the pipeline."""
        last = len(self.routers) - 1
        inputs: list[Payload] = [job.sample.tokens]
        for stage in range(last):
            outputs = (yield _Ask(stage, "forward", inputs[stage])).values
            if outputs is None:
                yield from self._void(job, last)
                return
            inputs.append(outputs)
        gradient = None
        for stage in range(last, -1, -1):
            if not any(each <= stage for each in job.lacking):
                return
            targets = job.sample.targets if stage == last else None
            answer = yield _Ask(stage, "backward", inputs.pop(), targets, gradient)
            if not answer.finite:
                yield from self._void(job, stage - 1)
                return
            gradient = answer.values

    def _void(self, job: _Job, top: int) -> Generator[_Ask, Answer, None]:
        for stage in range(top, -1, -1):
            if stage in job.lacking:
                yield _Ask(stage, "void")

    def _dispatch(self, job: _Job, now: float) -> list[Send]:
        """Asks somebody for what a microbatch needs next."""
        while (ask := job.ask) is not None and ask.kind == "backward" and not self._needed(job, ask):
            self._resume(
                job, Answer(step=self.step, number=job.number)
            )  # somebody has counted it, whose answer is lost
        if ask is None:
            return []
        router, work = self.routers[ask.stage], WORK[ask.kind] * job.sample.tokens.samples
        came_by = job.path.get(ask.stage) if self._settings.same_path and ask.kind == "backward" else None
        peer = router.choose(work, now, job.tried, came_by)
        if peer is None:
            job.tried.clear()
            job.not_before = now + self._settings.retry
            return []
        counts = ask.kind == "backward" and ask.stage in job.lacking
        request = Request(
            kind=ask.kind,
            step=self.step,
            number=job.number,
            inputs=ask.inputs,
            targets=ask.targets,
            gradient=ask.gradient,
            count=counts,
            patience=self._settings.patience,
        )
        call = _Call(job, ask, peer, now, now + self._settings.patience, counts or ask.kind == "void")
        job.call = self._register(call)
        return [Send(job.call, ask.stage, peer, request)]

    def _losses_in(self, answer: Answer | Withdrawn) -> list[float] | None:
        """The losses that an answer tells; None if there are none, empty if they make no sense."""
        if isinstance(answer, Withdrawn) or answer.losses is None:
            return None
        try:
            values: list[float] = self._packer.unpack(answer.losses).flatten().tolist()
        except ProtocolError:
            return []
        return values if all(map(math.isfinite, values)) else []

    def _fits(self, call: _Call, answer: Answer | Withdrawn, losses: list[float] | None) -> bool:
        """Whether an answer can be one to this call."""
        ask, samples = call.ask, call.job.sample.tokens.samples
        if (answer.step, answer.number) != (self.step, call.job.number):
            return False
        if isinstance(answer, Withdrawn) or not answer.finite or ask.kind == "void":
            return True
        backward, last = ask.kind == "backward", ask.stage == len(self.routers) - 1
        if (losses is not None) != (backward and last) or (losses is not None and len(losses) != samples):
            return False
        if backward and ask.stage == 0:  # there is no gradient of tokens
            values_fit = answer.values is None
        elif answer.values is None or answer.values.samples != samples:
            values_fit = False
        else:
            values_fit = not backward or (ask.inputs is not None and answer.values.shape == ask.inputs.shape)
        return values_fit and (answer.counted or not call.counts)

    def _needed(self, job: _Job, ask: _Ask) -> bool:
        return any(stage <= ask.stage for stage in job.lacking)

    def _overdue(self, now: float) -> list[Send]:
        """Gives up calls that take too long; whether they were counted is asked first."""
        sends = []
        for number, call in list(self._calls.items()):
            if call.due > now or number not in self._calls:
                continue
            if not call.counts or call.twin is not None:
                self.failed(number, now)
                continue
            call.due = now + self._settings.grace
            twin = _Call(call.job, call.ask, call.peer, now, call.due, True, twin=number)
            call.twin = self._register(twin)
            sends.append(Send(call.twin, call.ask.stage, call.peer, Withdraw(step=self.step, number=call.job.number)))
        return sends

    def _register(self, call: _Call) -> int:
        self._next_call += 1
        self._calls[self._next_call] = call
        return self._next_call

    def _resume(self, job: _Job, answer: Answer) -> None:
        assert job.walk is not None
        job.tried.clear()
        try:
            job.ask = job.walk.send(answer)
        except StopIteration:
            job.walk = job.ask = None

    def _end(self, number: int) -> None:
        call = self._calls.pop(number)
        if call.twin is not None:
            self._calls.pop(call.twin, None)
        call.job.call = None

    def _give_up(self, number: int) -> None:
        if number in self._calls:
            call = self._calls[number]
            call.job.tried.add(call.peer)
            self._end(number)

    def _lose(self, job: _Job, stage: int) -> None:
        job.holders.pop(stage, None)
        if stage not in self._settled:
            job.lacking.add(stage)

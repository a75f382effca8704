"""A server of a stage: computes what trainers ask for, counts, and takes part in the stage's steps.

The shell around it has the network, the clock, and a thread for `compute`. A step goes

    submit(ticket, request, now)    as requests arrive
    take(now), compute, finish      batch by batch: the middle one in the thread
    freeze()                        for a settlement; what is to be counted waits from now on
    thaw(…)                         nothing came of it, or
    settled(mean)                   the stage's mean is there; nothing more is counted in this step
    advance(…)                      once all stages have settled: the optimizer's step
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

import attrs
import torch

from optim.exact import tree_sum
from optim.flat import FlatParameters
from optim.state import OuterState
from optim.swarm.arrivals import Arrivals, Arrived, Bounds, Ticket
from optim.swarm.ledger import Ledger
from optim.swarm.local import LocalParameters, LocalSteps
from optim.swarm.messages import Answer, Kind, Request, Withdraw, Withdrawn
from optim.swarm.payloads import Encoding, Packer, Payload
from optim.swarm.stages import Stage
from optim.swarm.state import Form, StageState, inner_kinds, inner_state, restore_inner
from protocol.codecs import NotFinite
from protocol.errors import ProtocolError, RequestRefused, SettingsError
from protocol.vectors import all_finite

Phase = Literal["open", "frozen", "settled"]

MOST_SQUARES = 1e300
"""What sums of squares are at most, also if they are not finite."""

TiedGradients: TypeAlias = Mapping[int, Mapping[str, torch.Tensor]]
"""Of what several stages use: by the place of a stage in the model, and by the first name in it."""


def clipping(squares: Iterable[float], limit: float) -> float:
    """What the gradients of all stages are multiplied by, so that the norm of all together is no larger than the limit.

    Args:
        squares: What `StageServer.squares` is at each stage.
        limit: The largest norm.
    """
    norm = math.sqrt(math.fsum(squares))
    return limit / norm if norm > limit else 1.0


@attrs.frozen(eq=False)
class Contribution:
    """What a server brings to its stage's all-reduce."""

    ledger: Ledger
    values: torch.Tensor
    """The mean gradient over the samples of the ledger, or the pseudo-gradient of local steps with them. Flat, fp32, on
    the CPU; zeros without samples."""
    weight: int
    """Samples."""


@attrs.frozen(eq=False)
class Batch:
    """Requests that are computed together, of the same kind."""

    arrived: tuple[Arrived, ...]
    counts: bool
    """Whether they are added to the sum."""

    @property
    def requests(self) -> tuple[Request, ...]:
        """What was asked."""
        return tuple(each.request for each in self.arrived)


class StageServer:
    """One peer's stage, with the optimizer of its parameters.

    Args:
        stage: The stage, with values.
        optimizer: An optimizer over its parameters.
        step: At which step it is.
        microbatches: How many a step has.
        encoding: How activations and their gradients look on the wire.
        bounds: What is kept and done at a time.
        local_steps: If a step is a round of local steps, how that goes.

    Raises:
        SettingsError: The stage has nothing to train.
    """

    def __init__(
        self,
        stage: Stage,
        optimizer: torch.optim.Optimizer,
        *,
        step: int = 0,
        microbatches: int,
        encoding: Encoding = "fp32",
        bounds: Bounds | None = None,
        local_steps: LocalSteps | None = None,
    ) -> None:
        self.stage, self.optimizer = stage, optimizer
        self.step = step
        """The step whose parameters it has."""
        self.attempt = 0
        """How many settlements of this step have failed."""
        self.phase: Phase = "open"
        self.arrivals = Arrivals(bounds or Bounds())
        self._microbatches, self._encoding = microbatches, encoding
        self._flat, self._packer = FlatParameters(stage.model), Packer()
        self._parameters = [parameter for _, parameter in self._flat.parameters()]
        self._sum = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in self._parameters]
        self.form, self.kinds = Form.of(stage), inner_kinds(optimizer, self._parameters)
        """What a state looks like, see `Form`."""
        self._ledger: dict[int, int] = {}
        self._working: Batch | None = None
        self._mean: torch.Tensor | None = None
        self._local = None if local_steps is None else LocalParameters(local_steps, self._flat, optimizer)
        self._summed = 0  # samples in the sum; with local steps these are not all of the ledger's

    @property
    def ledger(self) -> Ledger:
        """What it has counted in this step."""
        return dict(self._ledger)

    @property
    def busy(self) -> bool:
        """Whether a batch is being computed."""
        return self._working is not None

    def submit(self, ticket: Ticket, request: Request, now: float) -> None:
        """Takes in a request of a trainer.

        Args:
            ticket: Comes back with the answer.
            request: What to do.
            now: Seconds.

        Raises:
            RequestRefused: It is about an earlier step ("stale"), or about a later one than we know of ("early").
            ProtocolError: It makes no sense for this stage.
            Overloaded: There is no room.
        """
        if request.step != self.step:
            word = "stale" if request.step < self.step else "early"
            raise RequestRefused(f"the stage is at step {self.step}, not {request.step}", code=word)
        self._check(request)
        self.arrivals.put(ticket, request, now)

    def withdraw(self, message: Withdraw) -> Withdrawn:
        """Gives up what waits about a microbatch, so that it will not be counted, unless it has been already."""
        self.arrivals.withdraw(message.step, message.number)
        counted = message.step < self.step or (message.step == self.step and self._has(message.number))
        return Withdrawn(step=message.step, number=message.number, counted=counted, attempt=self.attempt)

    def take(self, now: float, most: Mapping[Kind, float] | None = None) -> Batch | None:
        """The next batch to compute, if there is one. It has to be finished before there is another.

        Args:
            now: Seconds.
            most: Samples that are computed at once, by kind, where that is less than the bounds say.
        """
        if self._working is not None:
            raise RuntimeError("a batch is being computed")
        arrived = self.arrivals.take(now, self._form, most)
        if not arrived:
            return None
        self._working = Batch(tuple(arrived), self._is_new(arrived[0].request))
        return self._working

    def compute(self, batch: Batch) -> list[Answer | ProtocolError]:
        """The answers to a batch, in its order, or why there is none: what was sent does not fit the stage.

        May be called in another thread.
        """
        requests = batch.requests
        self._reach(requests[0])
        if requests[0].kind == "void":
            return [self._answer(request, finite=False) for request in requests]
        problem: ProtocolError | None = None
        try:
            answers = self._pass(requests, batch.counts)
        except ProtocolError as error:
            problem, answers = error, None
        if answers is not None:
            return [*answers]
        if len(requests) > 1:  # one of them has spoiled it for all
            return [self.compute(Batch((each,), batch.counts))[0] for each in batch.arrived]
        return [problem or self._answer(requests[0], finite=False)]

    def finish(
        self, batch: Batch, answers: list[Answer | ProtocolError] | None
    ) -> list[tuple[Ticket, Answer | ProtocolError]]:
        """Enters a batch into the ledger.

        Args:
            batch: What was computed.
            answers: What `compute` returned; None if it raised an exception, and nothing was added.

        Returns:
            Who gets which answer.
        """
        self._working = None
        if answers is None:
            return []
        if batch.counts:
            for request, answer in zip(batch.requests, answers, strict=True):
                if isinstance(answer, Answer):
                    self._ledger[request.number] = samples = request.samples if answer.finite else 0
                    self._summed += samples
        return [(each.ticket, answer) for each, answer in zip(batch.arrived, answers, strict=True)]

    def freeze(self) -> Ledger:
        """Begins a settlement: the ledger stays as it is until `thaw` or `settled`."""
        if self.busy or self.phase != "open":
            raise RuntimeError(f"cannot freeze: the stage is {self.phase}" + ", and busy" * self.busy)
        self.phase = "frozen"
        return self.ledger

    def contribution(self) -> Contribution:
        """What we bring to the all-reduce, if the settlement says that our sum counts."""
        samples = sum(self._ledger.values())
        if self._local is None:
            return Contribution(self.ledger, self._mean_gradient(), samples)
        self._step_locally()
        values = self._local.pseudo_gradient()
        return Contribution(self.ledger, values if samples else values.zero_(), samples)

    def thaw(self, *, attempt: int, keep: bool) -> None:
        """The settlement has failed.

        Args:
            attempt: How many have failed by now, as all members know.
            keep: Whether our sum counts. If not, it is dropped.
        """
        self.attempt, self.phase = attempt, "open"
        if not keep:
            self._drop()

    def settled(self, mean: torch.Tensor) -> None:
        """The stage's mean gradient is there, which every sample of the step is in. Also for who has missed it."""
        self._mean, self.phase = mean, "settled"
        self._clear()

    def tied_gradients(self) -> dict[str, torch.Tensor]:
        """Our part of the gradients of what other stages use as well, by the first name in the model; once settled."""
        assert self._mean is not None
        named = self._flat.scatter(self._mean)
        return {first: named[name] for name, first in self.stage.tied.items() if name in named}

    def squares(self, tied: TiedGradients | None = None) -> float:
        """The sum of the squares of the mean gradient, but for what other stages use as well; once settled.

        Args:
            tied: With this, as for `advance`, also of that: for one of the stages that use it.
        """
        assert self._mean is not None
        named = self._flat.scatter(self._mean)
        own = [values for name, values in named.items() if name not in self.stage.tied]
        parts = [*own, *(self._tied_sums(tied).values() if tied else ())]
        total = math.fsum(float(tree_sum(each.flatten().double().square())) for each in parts)
        return total if total <= MOST_SQUARES else MOST_SQUARES

    def advance(self, tied: TiedGradients | None = None, scale: float = 1.0) -> list[Arrived]:
        """The optimizer's step, once all stages have settled.

        Args:
            tied: What `tied_gradients` is at all stages that have any, ours included, by their places in the model.
            scale: What the mean gradient is multiplied by, see `clipping`.

        Returns:
            Requests that are outdated by it, and were given up.
        """
        assert self.phase == "settled"
        assert self._mean is not None
        mean = self._mean.clone()
        named = self._flat.scatter(mean)
        for name, values in self._tied_sums(tied or {}).items():
            named[name].copy_(values)
        if scale != 1.0:
            mean.mul_(scale)
        if self._local is None:
            self._flat.write_gradient(mean)
            self.optimizer.step()
        else:
            self._local.end(mean)
        self._mean, self.phase, self.attempt = None, "open", 0
        self.step += 1
        return self.arrivals.outdated(self.step)

    def snapshot(self) -> StageState:
        """A copy of what all servers of the stage have in common."""
        mean = None if self._mean is None else self._mean.clone()
        inner, local = inner_state(self.stage.model, self.optimizer), self._local
        if local is None:
            return StageState(self.step, self.stage.state(), inner, mean)
        own = self._flat.read()
        self._flat.write(local.outer.parameters)
        model = self.stage.state()
        self._flat.write(own)
        outer = {name: self._flat.scatter(values.clone()) for name, values in local.outer.buffers.items()}
        return StageState(self.step, model, inner, mean, outer=outer)

    def restore(self, state: StageState) -> list[Arrived]:
        """Goes on from the state of the same stage, or of the whole model. What was counted is dropped.

        Returns:
            Requests that are outdated by it, and were given up.

        Raises:
            SettingsError: It belongs to another model.
        """
        outer = None if self._local is None else self._outer_buffers(self._local, state)
        self.stage.load(state.model)
        restore_inner(self.stage.model, self.optimizer, state.inner)
        if self._local is not None and outer is not None:
            self._local.begin(OuterState(self._flat.read(), outer))
        self.step, self.attempt, self.phase, self._mean = state.step, 0, "open", None
        self._clear()
        if state.mean is not None:
            self.settled(state.mean.clone())
        return self.arrivals.outdated(self.step)

    def _check(self, request: Request) -> None:
        if not 0 <= request.number < self._microbatches:
            raise ProtocolError(f"microbatch {request.number} of {self._microbatches}")
        if request.kind == "void":
            return
        is_last, backward = self.stage.is_last, request.kind == "backward"
        if request.inputs is None or (request.gradient is not None) != (backward and not is_last):
            raise ProtocolError("a request without inputs, or with a gradient that does not belong to it")
        if (request.targets is not None) != is_last:
            raise ProtocolError("targets are for the last stage, which cannot do without")
        for other in (request.targets, request.gradient):
            if other is not None and other.samples != request.samples:
                raise ProtocolError("a request whose payloads have different numbers of samples")

    def _is_new(self, request: Request) -> bool:
        """Whether it is to be counted, and is not yet."""
        counts = request.kind == "void" or request.count
        return counts and self.phase != "settled" and request.number not in self._ledger

    def _form(self, request: Request) -> tuple[object, ...] | None:
        is_new = self._is_new(request)
        if is_new and self.phase == "frozen":
            return None
        payloads = (request.inputs, request.targets, request.gradient)
        shapes = (None if each is None else (each.shape[1:], each.encoding == "tokens") for each in payloads)
        return (request.kind, is_new, self._place(request), *shapes)

    def _has(self, number: int) -> bool:
        working = self._working
        doing = working is not None and working.counts and any(each.number == number for each in working.requests)
        return doing or number in self._ledger or self.phase == "settled"

    def _clear(self) -> None:
        self._ledger.clear()
        self._clear_sum()

    def _clear_sum(self) -> None:
        self._summed = 0
        for each in self._sum:
            each.zero_()

    def _drop(self) -> None:
        """What was counted in this step does not count."""
        self._clear()
        if self._local is not None:
            self._local.drop()

    def _tied_sums(self, tied: TiedGradients) -> dict[str, torch.Tensor]:
        """The gradients of what other stages use as well, over all of them."""
        sums = {}
        for name, first in self.stage.tied.items():
            if any(name == place.name for place in self._flat.slices):
                parts = [gradients[first] for _, gradients in sorted(tied.items()) if first in gradients]
                sums[name] = sum(parts[1:], parts[0])
        return sums

    def _mean_gradient(self) -> torch.Tensor:
        named = {place.name: each for place, each in zip(self._flat.slices, self._sum, strict=True)}
        values = self._flat.gather(named)
        return values.div_(self._summed) if self._summed else values.zero_()

    def _reach(self, request: Request) -> None:
        """Makes the local step that comes before a request, if one does: trainers are through with those before."""
        if (local := self._local) is None:
            return
        local.return_if_dropped()
        place = self._place(request)
        if self.phase == "open" and place > local.place:
            self._step_locally()
            local.place = place

    def _place(self, request: Request) -> int:
        """To which local step of the round a request belongs."""
        return 0 if self._local is None else request.number * self._local.plan.count // self._microbatches

    def _step_locally(self) -> None:
        if self._local is not None and self._summed:
            self._local.step(self._mean_gradient(), self.step)
            self._clear_sum()

    def _outer_buffers(self, local: LocalParameters, state: StageState) -> dict[str, torch.Tensor]:
        """The outer optimizer's memory in a state; zeros if it has none, as in the first one."""
        buffers = {}
        for kind, zeros in local.plan.outer.init(torch.zeros(self._flat.length)).buffers.items():
            own = self._flat.scatter(zeros)
            named = state.outer.get(kind, own)
            if any(name not in named or named[name].shape != values.shape for name, values in own.items()):
                raise SettingsError(f"the state has another model's outer {kind}")
            buffers[kind] = self._flat.gather(named)
        return buffers

    def _pass(self, requests: tuple[Request, ...], counts: bool) -> list[Answer] | None:
        """Computes requests together; None if something is not finite, and nothing was added then."""
        backward = requests[0].kind == "backward"
        inputs, targets, gradient = (
            self._join([getattr(request, name) for request in requests]) for name in ("inputs", "targets", "gradient")
        )
        assert inputs is not None
        wants_inputs = backward and inputs.is_floating_point()
        try:
            with torch.set_grad_enabled(backward):
                outputs = self.stage(inputs.requires_grad_(wants_inputs), targets)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:  # PyTorch's, for shapes and tokens
            raise ProtocolError(f"what was sent does not fit the stage: {error}") from error
        if gradient is not None and gradient.shape != outputs.shape:
            raise ProtocolError(f"a gradient of shape {list(gradient.shape)} for outputs of {list(outputs.shape)}")
        if not all_finite(outputs):
            return None
        values, losses = (None, outputs) if backward and self.stage.is_last else (outputs, None)
        gradients: list[torch.Tensor | None] = []
        if backward:
            wanted = [inputs] * wants_inputs + self._parameters * counts
            weights = torch.ones_like(outputs) if gradient is None else gradient.to(outputs)
            found = torch.autograd.grad(outputs, wanted, weights, allow_unused=True) if wanted else ()
            if not all(each is None or all_finite(each) for each in found):
                return None
            values, gradients = (found[0] if wants_inputs else None), list(found[wants_inputs:])
        try:
            parts, part_losses = self._split(values, requests), self._split(losses, requests)
        except NotFinite:
            return None
        for total, each in zip(self._sum, gradients, strict=False):
            if each is not None:
                total.add_(each)
        return [
            self._answer(request, values=part, losses=loss)
            for request, part, loss in zip(requests, parts, part_losses, strict=True)
        ]

    def _join(self, payloads: list[Payload | None]) -> torch.Tensor | None:
        """What several requests bring, as one tensor in the stage's number format, on its device."""
        tensors = [self._packer.unpack(each) for each in payloads if each is not None]
        if not tensors:
            return None
        joined, like = torch.cat(tensors) if len(tensors) > 1 else tensors[0], self._parameters[0]
        most = self.stage.vocabulary
        if most is not None and not joined.is_floating_point() and not bool(((joined >= 0) & (joined < most)).all()):
            raise ProtocolError(f"tokens that are not among the {most} of the model")  # a CUDA device would not survive
        return joined.to(like if joined.is_floating_point() else like.device)

    def _split(self, values: torch.Tensor | None, requests: tuple[Request, ...]) -> list[Payload | None]:
        if values is None:
            return [None] * len(requests)
        parts = torch.split(values, [request.samples for request in requests])
        is_loss = self.stage.is_last and values.ndim == 1
        return [self._packer.pack(part, "fp32" if is_loss else self._encoding) for part in parts]

    def _answer(
        self, request: Request, *, values: Payload | None = None, losses: Payload | None = None, finite: bool = True
    ) -> Answer:
        counted = request.count or request.kind == "void"
        return Answer(
            step=request.step,
            number=request.number,
            values=values,
            losses=losses,
            counted=counted,
            attempt=self.attempt,
            finite=finite,
        )

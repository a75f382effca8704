"""The local part of training: model, inner optimizer and data, without any network.

Synchronous, and used by one thread at a time. A round goes

    start_round(state, revision, members)   goes on from this state, with data of this peer's shards
    run(steps, …)                           inner steps, as often as needed
    contribution()                          what to ask of the collective
    commit(state, outcome, revision)        the next outer state, from what came of that

What lies between, the slots of the run's method, is in `optim.replica`.

The inner optimizer's moments belong to the peer: they go through all rounds, are never averaged and never reset, and
start at zero where a peer joins.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from optim.flat import FlatParameters
from optim.memory import checked
from optim.mixers import GatheredMean
from optim.recipe import Recipe
from optim.regularizers import Free
from optim.replica import Replica
from optim.sender import Message, tag_of
from optim.slots import AllReduce, Mixed, Moment, Operation
from optim.state import OuterState
from peer.data import Corpus, Dataset
from peer.halves import Halves
from peer.model import Transformer
from peer.schedule import Schedule
from peer.settings import InnerSettings, ModelSettings, Settings
from protocol.collective import Outcome, Reduced
from protocol.errors import SettingsError
from protocol.identity import PeerId
from protocol.operations import gathered_of

_T = TypeVar("_T")

VALIDATION_WINDOWS = 64
VALIDATION_BATCH = 16
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's tensors, by PyTorch's names."""

ENDLESS = 1 << 62
"""Inner steps: as many as there is time for."""

SMALL_MODEL = 2_000_000
"""Parameters. Up to here a step is short: more threads mostly wait for each other, above all on a busy machine."""


@attrs.frozen
class StepInfo:
    """One inner step."""

    step: int
    """How many inner steps of the run are done, this one included; a joiner counts the rounds before it as well, and
    where peers or rounds differ in number, they count as the run's schedule has it."""

    loss: float
    """Mean loss of the batch, in nats per byte."""

    tokens: int
    """Tokens in the batch."""

    lr: float
    """The learning rate that the step used."""


@attrs.frozen(eq=False)
class Contribution:
    """What a peer brings to a round."""

    operation: Operation
    """What is asked of the collective."""

    weight: float
    """How much it counts, as a rule the tokens trained on. Zero: nothing was done, or the result is unusable."""

    steps: int
    """Inner steps done in this round."""

    finite: bool
    """False if a loss, a gradient or a value was infinite or not a number. Values and weight are zero then."""

    part: str
    """Names the part of the model that it is about; "" for all of it."""

    meanwhile: int
    """Inner steps that may be taken before the result is here, since the exchange began."""


class Trainer:
    """Trains one peer's copy of the model.

    Args:
        settings: The run's settings.
        corpus: The text on this machine.
        peer_id: Whose shards to train on.
        device: Where the model lives, as PyTorch names devices.

    Raises:
        SettingsError: The settings do not make a model or a recipe.
        DataError: The text is too small.
    """

    def __init__(self, settings: Settings, corpus: Corpus, peer_id: PeerId, *, device: str = "cpu") -> None:
        self.recipe = _bounded(settings.algorithm.recipe(), settings.limits.weight)
        self.schedule = Schedule(settings, self.recipe)
        self.model = Transformer(settings.model, seed=settings.run.seed).to(device)
        self.flat = FlatParameters(self.model)
        self._settings = settings
        self._peer_id = peer_id
        self._device = torch.device(device)
        self._data = Dataset(corpus, settings.data, seed=settings.run.seed, context=settings.model.context)
        self._optimizer = adamw(self.model, settings.inner)
        # A second copy of the model, so that evaluating the outer parameters leaves the local ones alone.
        self._outer_model = Transformer(settings.model).to(device)
        self._outer_flat = FlatParameters(self._outer_model)
        tokens = settings.inner.batch * settings.model.context
        self._replica = Replica(self.recipe, self.flat, tokens_per_step=tokens)
        self._halves = Halves.of(self.recipe.mixer, self.flat.slices)
        self.buffers = tuple(sorted(self.initial_state().buffers))
        """The names of the outer state's buffers."""
        self._batches: Iterator[torch.Tensor] | None = None
        self._state: OuterState | None = None  # what the replica goes on from, by way of `commit`
        self._message: Message | None = None
        self._asking: Generator[Operation, Outcome, Any] | None = None
        self._waits = True  # whether the exchange that is under way does not go on beside inner steps
        self._finite = True
        self._carries = False
        self._second = self._heard = False  # in a round of two: it is the second operation; ours was in the first one
        self._steps, self._stretch = 1, 1.0  # inner steps of this round, and what each counts for in the schedule

    def initial_state(self) -> OuterState:
        """The outer state before the first round, from the run's seed. Only the founder uses its own."""
        fresh = Transformer(self._settings.model, seed=self._settings.run.seed)
        state = self.recipe.outer.init(FlatParameters(fresh).read())
        return state if self._halves is None else self._halves.founded(state)

    def is_halfway(self, revision: int) -> bool:
        """Whether a revision is in the midst of a round: its parameters are those of the one before."""
        return revision % self.schedule.operations > 0

    def steps(self, revision: int, pace: float) -> int:
        """Inner steps of the round that makes `revision`, once it was started, from the beginning of the exchange
        before. `pace`: our speed as a share of the fastest peer's."""
        exchange, second = self._position(revision)
        if second:
            return 0
        load = 1.0 if self._halves is None or self._state is None else self._halves.load(self._state)
        self._steps = self.schedule.steps(exchange, pace=pace, load=load)
        self._stretch = self.schedule.steps(exchange) / max(1, self._steps)
        return self._steps

    def is_ready(self, steps: int) -> bool:
        """Whether so many inner steps are done since the last exchange began."""
        return self._replica.local_steps >= steps

    def _position(self, revision: int) -> tuple[int, bool]:
        """Which exchange a revision comes of, counted from 1, and whether of its second operation."""
        exchange, second = divmod(revision - 1, self.schedule.operations)
        return exchange + 1, second > 0

    def is_own(self, revision: int) -> bool:
        """Whether each peer has an outer state of its own at this revision."""
        return not (self.recipe.shared or revision == 0 or self.schedule.is_last_exchange(revision))

    def start_round(self, state: OuterState, revision: int, members: Sequence[PeerId]) -> None:
        """Begins, or goes on with, the inner steps that lead to `revision`, counted from 1, from the state before it.

        If that is not what `commit` has returned, the local parameters become its outer parameters, and what was
        remembered of earlier exchanges is forgotten. `members` are the peers among whom the data is shared out; this
        one is added if missing.
        """
        replica, (exchange, self._second) = self._replica, self._position(revision)
        goes_on = self._second and state is self._state and self._finite  # what the first operation was about
        if replica.flying and not replica.has_arrived and not goes_on:
            replica.recall()
        if state is not self._state or replica.begun != exchange - (not goes_on):
            replica.restart(state, exchange - 1, replica.drift if self._carries else None)
            replica.sender.forget()
        elif not self._finite:
            replica.start_over(self._moment(exchange))
        self._state, self._carries, self._finite = state, False, True
        self._batches = self._data.training_batches(self._peer_id, members, revision, self._settings.inner.batch)

    def carry_over(self) -> None:
        """The round's inner steps so far are not to be lost, although the state that they began from is given up.

        The next round begins with them: with the same change of the parameters, but from its own state.
        """
        replica = self._replica
        if replica.flying and not replica.has_arrived:
            replica.recall()
        self._carries = self._finite and replica.local_steps > 0

    def run(self, steps: int, *, should_stop: Callable[[], bool], on_step: Callable[[StepInfo], None]) -> None:
        """Goes on with inner steps until `steps` of them are done since the last exchange began, or `should_stop()`.

        Also ends when a loss or a gradient is not finite. That step is not taken, so the optimizer's moments stay
        sound, and the round's contribution will say so.
        """
        if self._batches is None:
            raise RuntimeError("start_round comes before run")
        replica, delay = self._replica, self.recipe.policy.delay
        while True:
            if replica.has_arrived and replica.local_steps >= delay and steps > delay:
                replica.land(self._moment(replica.begun))
            if replica.local_steps >= steps or not self._finite or should_stop():
                return
            self._step(next(self._batches), on_step)

    def contribution(self) -> Contribution:
        """What the round's inner steps so far amount to. May be called again, after some more of them."""
        replica = self._replica
        if replica.flying and not replica.has_arrived:
            if self._second and self._message is not None:
                return self._asks(self._message, replica.local_steps, finite=True)
            replica.recall()
        steps, moment = replica.local_steps, self._moment(replica.begun + 1)
        if self.schedule.is_last_exchange(replica.begun + 1):
            return self._last_contribution(moment)
        if replica.has_arrived and self.schedule.steps(replica.begun + 1) > self.recipe.policy.delay:
            replica.land(moment)  # as we have stopped early
        self._waits = replica.waits
        message = replica.begin(moment)
        finite = self._finite and (message.weight > 0 or steps == 0)
        weight = min(message.weight, self._settings.limits.weight) if finite else 0.0
        if not finite:
            message = attrs.evolve(
                message, taken=torch.zeros_like(message.taken), values=torch.zeros_like(message.values)
            )
        self._message = attrs.evolve(message, weight=weight)
        if not self._waits:
            replica.send(self._message)
        self._heard = False
        return self._asks(self._message, steps, finite=finite)

    def _asks(self, message: Message, steps: int, *, finite: bool) -> Contribution:
        operation: Operation
        if self._halves is not None:
            assert self._state is not None
            operation = self._halves.ask(self._state, message, second=self._second)
        else:
            self._asking = self._replica.sender.mix(message)
            operation = next(self._asking)
        return Contribution(
            operation=operation,
            weight=message.weight,
            steps=steps,
            finite=finite,
            part="second" if self._second else tag_of(message.layout, self.flat.slices),
            meanwhile=self._meanwhile(),
        )

    def _meanwhile(self) -> int:
        if self._waits:
            return 0
        return min(self.recipe.policy.delay, self._steps) if self.recipe.waits else ENDLESS

    def length(self, revision: int) -> int:
        """Values that the one all-reduce of the round is about that makes `revision`."""
        asking = self._replica.sender.mix(self._replica.nothing(revision, self._moment(revision).lr))
        operation = next(asking)
        assert isinstance(operation, AllReduce)
        return len(operation.values)

    def _last_contribution(self, moment: Moment) -> Contribution:
        if self._replica.has_arrived:
            self._replica.land(moment)
        self._asking = self.recipe.finalizer.finish(self._replica.outer.parameters, self.flat.slices)
        operation = next(self._asking)
        return Contribution(operation=operation, weight=1.0, steps=0, finite=True, part="finish", meanwhile=0)

    def commit(self, state: OuterState, outcome: Outcome, revision: int) -> OuterState:
        """The outer state after the round that makes `revision`, in which the last contribution has taken part.

        Where all peers share one state, it depends on nothing else than `state` and what is the same for all: it has
        the same bits everywhere.
        """
        if self._halves is not None:
            assert isinstance(outcome, Reduced)
            return self._commit_half(self._halves, state, outcome, revision, heard=outcome.counted)
        assert self._asking is not None
        return self._committed(state, _answered(self._asking, outcome), revision)

    def commit_missed(self, state: OuterState, reduced: Reduced, revision: int) -> OuterState:
        """The same of a round whose result we have only heard of, after our contribution to it.

        As a rule others have made it without us. But if our line broke when they had all of what we brought, that is
        part of the result, and must not come once more with the next one.
        """
        replica, message = self._replica, self._message
        if self.schedule.is_last_exchange(revision):
            return self.commit(state, reduced, revision)
        heard = self._asking is not None and reduced.plan.includes(self._peer_id)
        if self.recipe.late and not heard:
            replica.overheard(lambda nothing: self._mixed(nothing, reduced), self._moment(revision))
            self._message, self._asking, self._state = None, None, replica.outer
            return self._state
        if self._halves is not None:
            return self._commit_half(self._halves, state, reduced, revision, heard=reduced.plan.includes(self._peer_id))
        assert message is not None
        if reduced.plan.operation == "exchange":
            replica.skip()
            self._state = replica.outer
            return self._state
        if reduced.plan.includes(self._peer_id):
            return self.commit(state, attrs.evolve(_outcome_of(reduced), counted=True), revision)
        return self._committed(state, self._mixed(message, reduced), revision)

    def _mixed(self, message: Message, reduced: Reduced) -> Mixed:
        """What a result amounts to that was made without us."""
        mixing = self._replica.sender.mix(attrs.evolve(message, weight=0.0))
        next(mixing)
        return _answered(mixing, _outcome_of(reduced))

    def _commit_half(
        self, halves: Halves, state: OuterState, reduced: Reduced, revision: int, *, heard: bool
    ) -> OuterState:
        exchange, second = self._position(revision)
        if not second:
            self._heard = heard
            self._state = halves.between(state, reduced)
            return self._state
        replica, message = self._replica, self._message
        assert message is not None
        mixed = halves.mixed(state, message, reduced, heard=(self._heard, heard))
        stepped = replica.step_of(halves.plain(state), mixed, self._moment(exchange), mixed.mean)
        replica.arrived(mixed, halves.after(state, stepped, reduced))
        self._message, self._state = None, replica.latest
        return self._state

    def _committed(self, state: OuterState, result: Mixed | torch.Tensor, revision: int) -> OuterState:
        replica, moment = self._replica, self._moment(revision)
        if isinstance(result, torch.Tensor):  # the last exchange
            self._state = self.recipe.outer.init(result)
            replica.restart(self._state, revision)
            return self._state
        shared = self.recipe.shared
        assert self._message is not None
        if self._waits:
            replica.send(self._message)
        replica.arrived(result, replica.step_of(state, result, moment, result.mean) if shared else None)
        if self._waits:
            replica.land(moment, self._message.taken)
        self._message, self._asking = None, None
        self._state = replica.latest
        return self._state

    def _moment(self, revision: int) -> Moment:
        """When the exchange that makes a revision takes place."""
        return Moment(round=revision, lr=self.schedule.rate(self.schedule.before(revision + 1)))

    @torch.no_grad()
    def evaluate(self, state: OuterState) -> float:
        """Loss of the outer parameters on held-out text, in nats per byte: always on the same windows."""
        self._outer_flat.write(state.parameters)
        windows = self._data.validation_windows(VALIDATION_WINDOWS)
        total = 0.0
        for start in range(0, len(windows), VALIDATION_BATCH):
            batch = windows[start : start + VALIDATION_BATCH]
            total += _loss(self._outer_model, batch.to(self._device)).item() * len(batch)
        return total / len(windows)

    def sample(
        self, state: OuterState, prompt: bytes, length: int, *, temperature: float = 0.8, seed: int = 0
    ) -> bytes:
        """`length` bytes that follow `prompt`, in the opinion of the outer parameters; see `sample_text`."""
        self._outer_flat.write(state.parameters)
        return _continue(self._outer_model, prompt, length, temperature, seed)

    def inner_state(self) -> dict[str, torch.Tensor]:
        """The inner optimizer's memory: "exp_avg" and "exp_avg_sq", flat as the parameters, and "step", one number.

        Empty before the first step.
        """
        states = {place.name: self._optimizer.state[parameter] for place, parameter in self.flat.parameters()}
        if not all(states.values()):
            return {}
        saved = {key: self.flat.gather({name: state[key] for name, state in states.items()}) for key in MOMENTS}
        return {**saved, "step": next(iter(states.values()))["step"].detach().to("cpu", copy=True)}

    def restore_inner(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Takes back what `inner_state` returned; nothing stands for zero moments.

        Raises:
            SettingsError: It belongs to another model or optimizer, or is damaged.
        """
        if not saved:
            self._optimizer.state.clear()
            return
        if saved.keys() != {*MOMENTS, "step"}:
            raise SettingsError(f"the inner optimizer's state has {sorted(saved)}, not {sorted({*MOMENTS, 'step'})}")
        moments = {key: self.flat.scatter(checked(f"the saved {key}", saved[key])) for key in MOMENTS}
        checked("the saved number of steps", saved["step"], ())
        for place, parameter in self.flat.parameters():
            # AdamW's fused kernel wants the step count beside the parameter.
            state = {key: named[place.name].to(parameter, copy=True) for key, named in moments.items()}
            self._optimizer.state[parameter] = {**state, "step": saved["step"].to(parameter, copy=True)}

    def own_state(self) -> dict[str, torch.Tensor]:
        """What this peer remembers for itself of exchanges, by name: what was left out, what is not applied yet."""
        return self._replica.own_state()

    def resume(self, state: OuterState, revision: int, own: Mapping[str, torch.Tensor]) -> None:
        """Goes on from a checkpoint of ours: from the state of a revision, with what `own_state` returned then.

        Raises:
            SettingsError: It belongs to another model or method, or is damaged.
        """
        self._replica.restart(state, self._position(revision + 1)[0] - 1)
        self._replica.load_own_state(own)
        self._state = state

    def _step(self, windows: torch.Tensor, on_step: Callable[[StepInfo], None]) -> None:
        nominal = math.floor(self._replica.local_steps * self._stretch)
        done = self.schedule.before(self._replica.begun + 1) + nominal
        lr = self.schedule.rate(done)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        value = self._gradient(windows)
        if value is None:
            self._finite = False
            return
        self._optimizer.step()
        self._replica.stepped()
        on_step(StepInfo(done + 1, value, windows.shape[0] * (windows.shape[1] - 1), lr))

    def _gradient(self, windows: torch.Tensor) -> float | None:
        """Computes the gradient that the inner optimizer is to step with. The loss; None if either is not finite."""
        windows = windows.to(self._device)

        def closure() -> float:
            self._optimizer.zero_grad()
            loss = _loss(self.model, windows)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.item()

        value = closure()
        if not isinstance(self.recipe.regularizer, Free):
            anchors = self.flat.scatter(self._replica.outer.parameters)
            parameters = [(parameter, anchors[place.name]) for place, parameter in self.flat.parameters()]
            self.recipe.regularizer.regularize(parameters, closure)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.inner.clip)
        return value if math.isfinite(value) and bool(torch.isfinite(norm)) else None


def _bounded(recipe: Recipe, max_weight: float) -> Recipe:
    """The recipe, with the run's bound on weights where the collective does not see to that."""
    if not isinstance(recipe.mixer, GatheredMean):
        return recipe
    return attrs.evolve(recipe, mixer=attrs.evolve(recipe.mixer, max_weight=max_weight))


def _outcome_of(reduced: Reduced) -> Outcome:
    """What a result is that was fetched, by its operation."""
    return gathered_of(reduced) if reduced.plan.operation == "gather" else reduced


def _answered(asking: Generator[Operation, Outcome, _T], outcome: Outcome) -> _T:
    """The result of an exchange whose one operation gave this."""
    try:
        asking.send(outcome)
    except StopIteration as end:
        result: _T = end.value
        return result
    raise RuntimeError("a method asks for several operations in a round")


def default_threads(model: ModelSettings) -> int:
    """How many processor threads to train a model with, if nobody says: OMP_NUM_THREADS, one, or PyTorch's choice."""
    blocks = 12 * model.layers * model.width**2  # nearly all of the parameters
    return 1 if blocks <= SMALL_MODEL and not os.environ.get("OMP_NUM_THREADS") else torch.get_num_threads()


def sample_text(
    settings: Settings, state: OuterState, prompt: bytes, length: int, *, temperature: float = 0.8, seed: int = 0
) -> bytes:
    """`length` bytes that follow `prompt`, in the opinion of `state`, on the CPU; no trainer and no data are needed.

    Temperature 0 takes the likeliest byte each time. An empty prompt stands for a line break.

    Raises:
        SettingsError: The temperature is negative.
    """
    model = Transformer(settings.model)
    FlatParameters(model).write(state.parameters)
    return _continue(model, prompt, length, temperature, seed)


@torch.no_grad()
def _continue(model: Transformer, prompt: bytes, length: int, temperature: float, seed: int) -> bytes:
    if temperature < 0:
        raise SettingsError(f"the temperature must not be negative, but is {temperature}")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    text = bytearray(prompt or b"\n")
    begin = len(text)
    while len(text) < begin + length:
        window = torch.tensor([list(text[-model.context :])], device=device)
        logits = model(window)[0, -1].float().cpu()
        if temperature == 0:
            text.append(int(logits.argmax()))
        else:
            text.append(int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator)))
    return bytes(text[begin:])


def adamw(model: nn.Module, settings: InnerSettings) -> torch.optim.AdamW:
    """AdamW that decays matrices, but not the gains of the norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    gains = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)


def _loss(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of each byte given those before it in its window, in nats."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

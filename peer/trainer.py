"""The local part of training: model, inner optimizer and data, without any network.

Synchronous, and used by one thread at a time. A round goes

    start_round(state, revision, members)   local parameters := outer parameters, data of this peer's shards
    run(steps, …)                           inner steps, as often as needed
    contribution()                          what to hand to the collective
    outer_step(state, mean, revision)       the next outer state, from the collective's mean

The inner optimizer's moments belong to the peer: they go through all rounds, are never averaged and never reset, and
start at zero where a peer joins.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from optim.flat import FlatParameters
from optim.methods import recipe
from optim.slots import Local, Mixed, Moment, Work
from optim.state import OuterState
from peer.data import Corpus, Dataset
from peer.model import Transformer
from peer.settings import InnerSettings, ModelSettings, Settings
from protocol.errors import SettingsError
from protocol.identity import PeerId

VALIDATION_WINDOWS = 64
VALIDATION_BATCH = 16
FINAL_LR = 0.1
"""The cosine schedule of a run of known length ends at this fraction of the learning rate."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's tensors, by PyTorch's names."""

SMALL_MODEL = 2_000_000
"""Parameters. Up to here a step is short: more threads mostly wait for each other, above all on a busy machine."""


@attrs.frozen
class StepInfo:
    """One inner step."""

    step: int
    """How many inner steps of the run are done, this one included; a joiner counts the rounds before it as well."""

    loss: float
    """Mean loss of the batch, in nats per byte."""

    tokens: int
    """Tokens in the batch."""

    lr: float
    """The learning rate that the step used."""


@attrs.frozen(eq=False)
class Contribution:
    """What a peer brings to a round."""

    values: torch.Tensor
    """One-dimensional, fp32: the pseudo-gradient, old outer minus new local parameters, as the recipe encodes it."""

    weight: float
    """How much it counts: tokens trained on in this round. Zero: nothing was done, or the result is unusable."""

    steps: int
    """Inner steps done in this round."""

    finite: bool
    """False if a loss, a gradient or a value was infinite or not a number. Values and weight are zero then."""


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
        algorithm = settings.algorithm
        self.recipe = recipe(
            algorithm.name,
            inner_steps=algorithm.inner_steps,
            outer_lr=algorithm.outer_lr,
            outer_momentum=algorithm.outer_momentum,
        )
        self.model = Transformer(settings.model, seed=settings.run.seed).to(device)
        self.flat = FlatParameters(self.model)
        self._settings = settings
        self._peer_id = peer_id
        self._device = torch.device(device)
        self._data = Dataset(corpus, settings.data, seed=settings.run.seed, context=settings.model.context)
        self._optimizer = _adamw(self.model, settings.inner)
        # A second copy of the model, so that evaluating the outer parameters leaves the local ones alone.
        self._outer_model = Transformer(settings.model).to(device)
        self._outer_flat = FlatParameters(self._outer_model)
        self._anchor = self.flat.read()
        self._outer = self.recipe.outer.init(self._anchor)
        self.buffers = tuple(sorted(self.recipe.outer.init(torch.empty(0)).buffers))
        """The names of the outer state's buffers."""
        self._batches: Iterator[torch.Tensor] = iter(())
        self._revision = 0
        self._steps = self._tokens = 0
        self._finite = True
        self._carries = False

    def initial_state(self) -> OuterState:
        """The outer state before the first round, from the run's seed. Only the founder uses its own."""
        fresh = Transformer(self._settings.model, seed=self._settings.run.seed)
        return self.recipe.outer.init(FlatParameters(fresh).read())

    def start_round(self, state: OuterState, revision: int, members: Sequence[PeerId]) -> None:
        """Begins the inner steps that lead to `revision`, counted from 1, from the outer parameters before it.

        `members` are the peers among whom the data is shared out; this one is added if missing.
        """
        carried = self.flat.read() - self._anchor if self._carries else None
        self._outer, self._anchor = state, self.flat.rounded(state.parameters)
        self.flat.write(state.parameters if carried is None else self._anchor + carried)
        self._batches = self._data.training_batches(self._peer_id, members, revision, self._settings.inner.batch)
        self._revision = revision
        if carried is None:
            self._steps = self._tokens = 0
            self._finite = True
        self._carries = False

    def carry_over(self) -> None:
        """The round's inner steps so far are not to be lost, although the state that they began from is given up.

        The next round begins with them: with the same change of the parameters, but from its own state.
        """
        self._carries = self._finite and self._steps > 0

    def run(self, steps: int, *, should_stop: Callable[[], bool], on_step: Callable[[StepInfo], None]) -> None:
        """Goes on with the round's inner steps until `steps` of them are done, or `should_stop()`.

        Also ends when a loss or a gradient is not finite. That step is not taken, so the optimizer's moments stay
        sound, and the round's contribution will say so.
        """
        if self._revision == 0:
            raise RuntimeError("start_round comes before run")
        while self._steps < steps and self._finite and not should_stop():
            self._step(next(self._batches), on_step)

    def contribution(self) -> Contribution:
        """What the round's inner steps so far amount to. The local parameters stay as they are."""
        rate = self._optimizer.param_groups[0]["lr"]
        local = Local(state=self._outer, anchor=self._anchor, inner=self.flat.read(), lr=rate)
        values, _ = self.recipe.payload.take(local, {})
        finite = self._finite and bool(torch.isfinite(values).all())
        if not finite or self._steps == 0:
            return Contribution(torch.zeros_like(values), 0.0, self._steps, finite)
        weight = self.recipe.weighting.weight(Work(self._steps, self._tokens))
        return Contribution(values, min(weight, self._settings.limits.weight), self._steps, finite)

    def outer_step(self, state: OuterState, mean: torch.Tensor, revision: int) -> OuterState:
        """The outer state after the round that makes `revision`. Pure, and the same bits on every peer."""
        rate = _learning_rate(self._settings, revision * self._settings.algorithm.inner_steps)
        mixed = Mixed(mean=mean, own=mean, members=(), share=0.0)
        return self.recipe.outer.step(state, mixed, Moment(round=revision, lr=rate), mean)

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
            SettingsError: It belongs to another model or optimizer.
        """
        if not saved:
            self._optimizer.state.clear()
            return
        if saved.keys() != {*MOMENTS, "step"}:
            raise SettingsError(f"the inner optimizer's state has {sorted(saved)}, not {sorted({*MOMENTS, 'step'})}")
        moments = {key: self.flat.scatter(saved[key]) for key in MOMENTS}
        for place, parameter in self.flat.parameters():
            # AdamW's fused kernel wants the step count beside the parameter.
            state = {key: named[place.name].to(parameter, copy=True) for key, named in moments.items()}
            self._optimizer.state[parameter] = {**state, "step": saved["step"].to(parameter, copy=True)}

    def _step(self, windows: torch.Tensor, on_step: Callable[[StepInfo], None]) -> None:
        inner = self._settings.inner
        done = (self._revision - 1) * self._settings.algorithm.inner_steps + self._steps
        lr = _learning_rate(self._settings, done)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.zero_grad()
        loss = _loss(self.model, windows.to(self._device))
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), inner.clip)
        value = loss.item()
        if not (math.isfinite(value) and bool(torch.isfinite(norm))):
            self._finite = False
            return
        self._optimizer.step()
        self._steps += 1
        tokens = windows.shape[0] * (windows.shape[1] - 1)
        self._tokens += tokens
        on_step(StepInfo(done + 1, value, tokens, lr))


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


def _adamw(model: nn.Module, settings: InnerSettings) -> torch.optim.AdamW:
    """AdamW that decays matrices, but not the gains of the norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    gains = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)


def _learning_rate(settings: Settings, done: int) -> float:
    """The rate of the inner step after `done` others of the whole run.

    Linear warm-up; then constant or, in a run whose number of rounds is known, half a cosine down to a tenth.
    """
    inner = settings.inner
    if done < inner.warmup:
        return inner.lr * (done + 1) / inner.warmup
    if settings.run.rounds == 0:
        return inner.lr
    total = settings.run.rounds * settings.algorithm.inner_steps
    progress = min(1.0, (done - inner.warmup) / max(1, total - inner.warmup))
    return inner.lr * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress)))


def _loss(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of each byte given those before it in its window, in nats."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

"""The slots of a low-communication method.

Local updates, an exchange, an outer step: methods differ only in what they put into each of a few slots. A `Recipe`
(`optim/recipe.py`) fills all of them, and whoever drives the training, the daemon or a plain PyTorch loop, goes
through the slots in the same order:

    regularizer.regularize(parameters, closure) how a local step differs from one of the inner optimizer alone
    policy.steps(moment)                        how many inner steps until the next exchange?
    fragmenter.fragments(layout)                and of which part of the model?
    payload.take(local, memory)                 what to exchange
    feedback.before(values, memory)             with what earlier exchanges have left out
    weighting.weight(work)                      and how much it counts
    mixer.mix(values, weight, layout, …)        by which operations of the collective, and in which form
        … others do the same …
    feedback.after(values, own, memory)
    outer.step(state, mixed, moment)            what every peer does with the result
    merge.apply(inner, old, new)                and how it comes back into the local parameters
    finalizer.finish(parameters, layout)        once, after the last exchange

All tensors are one-dimensional, fp32 and on the CPU. Parts are immutable values. What a peer has to remember by itself
lives in its `Memory`; what all peers have in common, and a newcomer receives, in the `OuterState`. Whatever runs on
every peer after the exchange must give the same bits on every processor: elementwise operations that round once
each, a multiplication, then an addition, and no reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Protocol, TypeAlias, TypeVar

import attrs
import torch
from torch import nn

from optim.flat import Slice
from optim.state import OuterState
from protocol.collective import Outcome, Window
from protocol.identity import PeerId
from protocol.pairs import Pairing

Memory: TypeAlias = Mapping[str, torch.Tensor]
"""What one peer remembers from one exchange to the next, by name. Never changed in place."""

Layout: TypeAlias = Sequence[Slice]
"""Which tensors a flat vector is made of, in order."""


@attrs.frozen
class Work:
    """What a peer has done since its last exchange."""

    steps: int
    """Inner steps."""

    tokens: int
    """Tokens (for other models: examples) that those steps trained on."""


@attrs.frozen
class Moment:
    """Where a run stands. The same for all peers, but for `pace`."""

    round: int
    """The exchange in question, counted from 1."""

    lr: float
    """The inner learning rate."""

    total: int | None = None
    """Inner steps that are left in the run; None if nobody knows."""

    pace: float = 1.0
    """Inner steps per second, as a share of the fastest peer's."""

    load: float = 1.0
    """How much is sent in an exchange, as a share of what the first one sent."""


@attrs.frozen(kw_only=True, eq=False)
class Local:
    """What a peer has when an exchange is due: of one fragment, all of one length."""

    state: OuterState
    """The outer state before the exchange."""

    anchor: torch.Tensor
    """The outer parameters as the model's own number format holds them: from where the local ones started."""

    inner: torch.Tensor
    """The local parameters."""

    gradient: torch.Tensor | None = None
    """The gradient of the local loss, for methods that exchange it."""

    lr: float


@attrs.frozen(kw_only=True, eq=False)
class Mixed:
    """What came of an exchange."""

    mean: torch.Tensor
    """The weighted mean of what the contributors brought."""

    own: torch.Tensor
    """What the others have understood of what we brought."""

    members: tuple[PeerId, ...]
    """Whose values are in the mean."""

    share: float
    """Our own weight, as a share of all; 0 if we are not among them."""

    memory: Memory | None = None
    """What the mixer has to remember of it, in place of the memory that it was given."""

    load: float = 1.0
    """How much the next exchange will send, as a share of what the first one has sent. The same at all peers."""

    missed: tuple[Mixed, ...] = ()
    """What came of exchanges that others have had without us since our last one, the oldest first."""


@attrs.frozen
class AllReduce:
    """Asks the collective for the weighted mean of everybody's values, or of those who are ready in time."""

    values: torch.Tensor
    weight: float
    window: Window | None = None


@attrs.frozen
class Gather:
    """Asks the collective for everybody's block of bytes."""

    block: bytes | None


@attrs.frozen
class Exchange:
    """Asks the collective to swap values with one other peer, another one each time."""

    values: torch.Tensor
    weight: float
    pairing: Pairing = "random"


Operation: TypeAlias = AllReduce | Gather | Exchange

_T = TypeVar("_T")

Mixing: TypeAlias = Generator[Operation, Outcome, _T]
"""Asks for operations of the collective, one after the other, is sent what came of each, and returns the result."""


class LocalRegularizer(Protocol):
    """What becomes of the local gradient before the inner optimizer steps with it."""

    def regularize(
        self, parameters: Sequence[tuple[nn.Parameter, torch.Tensor]], closure: Callable[[], float] | None
    ) -> None:
        """Changes the gradients.

        Args:
            parameters: Each with its values in the outer parameters.
            closure: Computes loss and gradients anew, if the caller of `step` has one.
        """
        ...


class SyncPolicy(Protocol):
    """When to exchange."""

    @property
    def delay(self) -> int:
        """Inner steps that go on between an exchange's beginning and its result; it lands at the next at the latest."""
        ...

    def steps(self, moment: Moment) -> int:
        """Inner steps from the last exchange (or the beginning) to this one."""
        ...


class Fragmenter(Protocol):
    """Which part of the model takes its turn in an exchange."""

    def fragment(self, layout: Layout, round: int) -> Sequence[int]:
        """Places in the layout of the tensors that are exchanged in this round, in order. The same at all peers."""
        ...


class Payload(Protocol):
    """What is exchanged."""

    @property
    def settled(self) -> bool:
        """Whether it is taken after the result of the exchange before, if that comes late, has been applied."""
        ...

    def take(self, local: Local, memory: Memory) -> tuple[torch.Tensor, Memory]:
        """The values to exchange, and what is to be remembered once they are."""
        ...


class Feedback(Protocol):
    """What becomes of that which a lossy form leaves out."""

    def before(self, values: torch.Tensor, memory: Memory) -> torch.Tensor:
        """The values to send, with what was left out earlier."""
        ...

    def after(self, intended: torch.Tensor, own: torch.Tensor, memory: Memory) -> Memory:
        """What to remember, given what was to be sent and what the others have understood."""
        ...


class Weighting(Protocol):
    """How much a peer counts."""

    def weight(self, work: Work) -> float:
        """Its weight in the mean; all weights together need not add up to one."""
        ...


class Mixer(Protocol):
    """How the peers' values become one: the operations of the collective, and the form in which values travel."""

    def mix(self, values: torch.Tensor, weight: float, layout: Layout, round: int, memory: Memory) -> Mixing[Mixed]:
        """Mixes ours with the others'."""
        ...


class OuterOptimizer(Protocol):
    """What every peer does with the result."""

    @property
    def ahead(self) -> bool:
        """Whether it takes our own part of a mean when we send it, and only the others' when the mean arrives."""
        ...

    def init(self, parameters: torch.Tensor) -> OuterState:
        """The state before the first round."""
        ...

    def step(self, state: OuterState, mixed: Mixed, moment: Moment, fresh: torch.Tensor) -> OuterState:
        """The state after a round. A pure function that gives the same bits on every processor.

        Args:
            state: Before it.
            mixed: What came of the exchange.
            moment: Where the run stands.
            fresh: What we would exchange now; later than what we did exchange, if the policy has a delay.
        """
        ...


class Merge(Protocol):
    """How new outer parameters come back into the local ones."""

    def apply(self, inner: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """The local parameters to go on from, given the local, the old outer and the new outer ones."""
        ...


class Finalizer(Protocol):
    """What happens after the last exchange."""

    def finish(self, parameters: torch.Tensor, layout: Layout) -> Mixing[torch.Tensor]:
        """The parameters that the run ends with, given our own outer ones."""
        ...

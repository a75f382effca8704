"""What both kinds of recipes have in common: one peer's side of an exchange."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TypeVar

import attrs
import torch

from optim.lowrank import unshared
from optim.memory import checked_memory
from optim.recipe import GradientRecipe, Recipe
from optim.slots import AllReduce, Exchange, Gather, Layout, Local, Memory, Mixed, Mixing, Operation, Work
from protocol.collective import Collective, Outcome
from protocol.errors import SettingsError

_T = TypeVar("_T")


class MissedExchange(UserWarning):
    """Others have had an exchange without this peer, whose parameters are not theirs any more."""


@attrs.frozen(kw_only=True, eq=False)
class Message:
    """What a peer is about to send. Nothing is remembered of it before it has arrived."""

    taken: torch.Tensor
    """What the payload is."""
    values: torch.Tensor
    """What is sent: with what earlier exchanges left out."""
    weight: float
    memory: Memory
    layout: Layout
    round: int
    steps: int
    """Inner steps that it stands for."""


class Sender:
    """Prepares what a peer sends, and remembers what it has to.

    Args:
        recipe: Says how.
        in_all: Whether a condition holds in all processes that are one peer.
    """

    def __init__(self, recipe: Recipe | GradientRecipe, in_all: Callable[[bool], bool] = bool) -> None:
        self._recipe, self._in_all = recipe, in_all
        self._memory: dict[tuple[str, ...], Memory] = {}
        self._anew = True  # nothing was sent yet from the state that we have

    def prepare(self, local: Local, work: Work, layout: Layout, round: int) -> Message:
        """What to send of one fragment. Values that are not finite do not count, and are not remembered."""
        memory = self._memory.get(_key(layout), {})
        taken, after = self._recipe.payload.take(local, memory)
        values = self._recipe.feedback.before(taken, after)
        weight = self._recipe.weighting.weight(work)
        if not self._in_all(bool(torch.isfinite(values).all())):
            taken, values, after, weight = torch.zeros_like(taken), torch.zeros_like(values), memory, 0.0
        return Message(
            taken=taken, values=values, weight=weight, memory=after, layout=layout, round=round, steps=work.steps
        )

    @property
    def shares(self) -> bool:
        """Whether we do not have what the others have if we have missed an exchange since our last one."""
        return not self._anew and (isinstance(self._recipe, GradientRecipe) or self._recipe.shared)

    def mix(self, message: Message) -> Mixing[Mixed]:
        """The exchange."""
        return self._recipe.mixer.mix(message.values, message.weight, message.layout, message.round, message.memory)

    def sent(self, message: Message, mixed: Mixed) -> None:
        """The exchange was a success."""
        memory = message.memory if mixed.memory is None else mixed.memory
        if mixed.share > 0:
            memory = self._recipe.feedback.after(message.values, mixed.own, memory)
        self._memory[_key(message.layout)] = memory
        self._anew = False

    def forget(self) -> None:
        """The peer goes on from somebody else's state: what it has left out belongs to another one."""
        self._memory.clear()
        self._anew = True

    def renew(self) -> None:
        """What mixers have in common begins anew at all peers, as somebody does not have it."""
        self._memory = {key: unshared(memory) for key, memory in self._memory.items()}

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """What is remembered, by fragment."""
        return {"\n".join(key): dict(memory) for key, memory in self._memory.items()}

    def load_state_dict(
        self, saved: Mapping[str, Mapping[str, object]], fragments: Iterable[tuple[Local, Layout, Layout]]
    ) -> None:
        """Takes back what `state_dict` returned.

        Args:
            saved: That.
            fragments: Of each what would be exchanged now, its layout here, and that of all of it.

        Raises:
            SettingsError: It belongs to another model or method, or is damaged.
        """
        known = {_key(layout): (local, whole) for local, layout, whole in fragments}
        memory: dict[tuple[str, ...], Memory] = {}
        for key, kept in saved.items():
            if (names := tuple(key.split("\n"))) not in known:
                raise SettingsError("something was remembered of tensors that are not exchanged together")
            memory[names] = checked_memory(self._recipe, kept, *known[names])
        self._memory = memory


def _key(layout: Layout) -> tuple[str, ...]:
    return tuple(place.name for place in layout)


def carry_out(
    swarm: Collective, mixing: Generator[Operation, Outcome, _T], *, tag: str = "", shares: bool = False
) -> _T:
    """Does what an exchange asks for, one operation after the other, and waits for each.

    Args:
        swarm: What is asked.
        mixing: The exchange.
        tag: Tells apart exchanges that must not be mistaken for one another, see `Collective`.
        shares: Whether to warn of exchanges that others have had without us.

    Raises:
        ShoalError: One of them failed.
    """
    try:
        operation = next(mixing)
        while True:
            outcome = perform(swarm, operation, tag)
            if shares and outcome.skipped:
                _warn(outcome.skipped)
            operation = mixing.send(outcome)
    except StopIteration as end:
        result: _T = end.value
        return result
    finally:
        mixing.close()


def _warn(skipped: int) -> None:
    warnings.warn(
        f"{skipped} exchange{'s have' if skipped > 1 else ' has'} taken place without this peer, which came too late: "
        "its parameters are not those of the others any more. If all peers call welcome() after each exchange, it gets "
        "theirs",
        MissedExchange,
        stacklevel=3,
    )


def tag_of(fragment: Layout, layout: Layout) -> str:
    """A tag for exchanges of one fragment: peers that are at different ones must not mix them."""
    if len(fragment) == len(layout):
        return ""
    return hashlib.sha256("\n".join(_key(fragment)).encode()).hexdigest()[:16]


def perform(swarm: Collective, operation: Operation, tag: str) -> Outcome:
    """Does one thing that an exchange asks for, and waits for it."""
    match operation:
        case AllReduce(values, weight, None):
            return swarm.all_reduce(values, weight, tag=tag)
        case AllReduce(values, weight, window):
            return swarm.all_reduce(values, weight, tag=tag, window=window)
        case Gather(block):
            return swarm.gather(block, tag=tag)
        case Exchange(values, weight, pairing):
            return swarm.exchange(values, weight, tag=tag, pairing=pairing)

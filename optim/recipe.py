"""Recipes: methods of low-communication training, each a choice of parts for the slots of `optim/slots.py`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping

import attrs
import torch

from optim.slots import (
    ByTokens,
    Compressor,
    FixedSteps,
    Identity,
    Merge,
    Nesterov,
    OuterOptimizer,
    Payload,
    PseudoGradient,
    Replace,
    SyncPolicy,
    Weighting,
)
from optim.state import OuterState
from protocol.errors import SettingsError


@attrs.frozen(kw_only=True)
class Recipe:
    """One part for each slot. Peers average together only if their recipes are equal."""

    policy: SyncPolicy
    payload: Payload = attrs.field(factory=PseudoGradient)
    compressor: Compressor = attrs.field(factory=Identity)
    weighting: Weighting = attrs.field(factory=ByTokens)
    outer: OuterOptimizer
    merge: Merge = attrs.field(factory=Replace)

    def message(self, anchor: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
        """What a peer hands to the collective (see `Payload.take` for the arguments)."""
        return self.compressor.encode(self.payload.take(anchor, inner))

    def step(self, state: OuterState, mean: torch.Tensor) -> OuterState:
        """The next outer state, from the mean of the peers' messages. Pure, and the same bits on every processor."""
        return self.outer.step(state, self.compressor.decode(mean))


def diloco(*, inner_steps: int = 500, outer_lr: float = 0.7, outer_momentum: float = 0.9) -> Recipe:
    """DiLoCo (Douillard et al., arXiv 2311.08105): local AdamW, then Nesterov on the mean pseudo-gradient.

    A run of few rounds wants less momentum: 0.9 remembers about ten rounds and ends up moving seven times the mean
    pseudo-gradient, which needs some fifty rounds to pay off; below that, 0.5 is a good choice.
    """
    return Recipe(policy=FixedSteps(inner_steps), outer=Nesterov(lr=outer_lr, momentum=outer_momentum))


RECIPES: Mapping[str, Callable[..., Recipe]] = {"diloco": diloco}


def recipe(name: str, **constants: float) -> Recipe:
    """The recipe called `name`, with its constants; those left out take the recipe's defaults.

    Raises:
        SettingsError: No such recipe, a constant that it does not have, or a value that cannot work.
    """
    if name not in RECIPES:
        raise SettingsError(f"there is no algorithm {name!r}", hint=_suggest(name, RECIPES))
    known = inspect.signature(RECIPES[name]).parameters
    for constant in constants:
        if constant not in known:
            raise SettingsError(f"{name} has no setting {constant!r}", hint=_suggest(constant, known))
    try:
        return RECIPES[name](**constants)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{name} cannot work with {constants}: {error.args[0]}") from error


def _suggest(word: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(known)}"

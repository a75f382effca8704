"""Whether a recipe's parts work on a part of a model as they do on all of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from optim.recipe import GradientRecipe, Recipe
from optim.regularizers import SharpnessAware
from optim.slots import Local, LocalRegularizer, Memory, Mixed, Moment
from optim.state import OuterState
from protocol.errors import SettingsError
from protocol.identity import PeerId

_LENGTH = 8
_HALVES = (slice(0, 3), slice(3, _LENGTH))
_MEMBERS = (PeerId(bytes(32)), PeerId(bytes([1] * 32)))
_SIZES = (0.01, 1.0, 100.0)  # of the values: a part may do something else with large ones


def check_elementwise(recipe: Recipe | GradientRecipe) -> None:
    """Tries what processes that share a model do with their own part of it: on a few numbers at once, and in halves.

    What happens between peers (mixers, finalizers) is given the whole model, and is not tried.

    Raises:
        SettingsError: Halves come to something else, as they do if a part computes a norm.
    """
    generator = torch.Generator().manual_seed(0)
    for size in _SIZES:
        values = [torch.randn(_LENGTH, generator=generator) * size for _ in range(6)]
        whole = _results(recipe, values)
        halves = zip(*(_results(recipe, [value[half] for value in values]) for half in _HALVES), strict=True)
        if not all(_is_made_of(one, two) for one, two in zip(whole, halves, strict=True)):
            raise SettingsError(
                "each process has a part of the model, and a part of this recipe needs all of it, such as for a norm",
                hint="Use another method, or DistributedDataParallel.",
            )


def _is_made_of(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    """A payload may have several values for each of the model's, one after the other."""
    if whole.numel() % _LENGTH:
        return False
    rows = whole.numel() // _LENGTH
    return torch.equal(whole.view(rows, -1), torch.cat([part.view(rows, -1) for part in parts], dim=1))


def _results(recipe: Recipe | GradientRecipe, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """What two rounds of these values come to."""
    state = recipe.outer.init(values[0]) if isinstance(recipe, Recipe) else OuterState(values[0])
    memory: Memory = {}
    results = []
    for round in (1, 2):
        local = Local(state=state, anchor=state.parameters, inner=values[round], gradient=values[2 + round], lr=0.1)
        taken, memory = recipe.payload.take(local, memory)
        sent = recipe.feedback.before(taken, memory)
        mixed = Mixed(mean=sent.mul(0.5), own=sent.mul(0.75), members=_MEMBERS, share=0.5)
        memory = recipe.feedback.after(sent, mixed.own, memory)
        results += [sent, *(memory[name] for name in sorted(memory))]
        if isinstance(recipe, Recipe):
            merged = recipe.merge.apply(values[round], state.parameters, values[5])
            state = recipe.outer.step(state, mixed, Moment(round=round, lr=0.1), taken.mul(2.0))
            results += [state.parameters, *(state.buffers[name] for name in sorted(state.buffers)), merged]
            results.append(_regularized(recipe.regularizer, values))
    return results


def _regularized(regularizer: LocalRegularizer, values: Sequence[torch.Tensor]) -> torch.Tensor:
    if isinstance(regularizer, SharpnessAware):
        raise SettingsError("each process has a part of the model, and sharpness-aware steps need all of the gradient")
    parameter = nn.Parameter(values[0].clone())
    parameter.grad = values[1].clone()
    regularizer.regularize([(parameter, values[2])], None)
    return parameter.grad

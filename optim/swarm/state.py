"""What a stage's servers have in common, by the names of the whole model: for newcomers, and for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
import torch
from torch import nn

from optim.swarm.stages import assemble
from protocol.errors import SettingsError


@attrs.frozen(eq=False)
class StageState:
    """A stage at a step; or, put together from all stages, a whole model."""

    step: int
    model: Mapping[str, torch.Tensor]
    """Parameters and saved buffers, by their names in the model."""
    inner: Mapping[str, Mapping[str, torch.Tensor]]
    """The optimizer's tensors: of each kind, by the parameters' names."""
    mean: torch.Tensor | None = None
    """The stage's mean gradient, flat, if it has settled the step already."""
    tied: Mapping[int, Mapping[str, torch.Tensor]] = attrs.field(factory=dict)
    """The stage's gradients of what other stages use as well, of the last steps: for those that are still there."""


def whole_state(states: Iterable[StageState]) -> StageState:
    """The state of the whole model, from those of all its stages. Any number of stages can go on from it.

    Raises:
        SettingsError: They are of different steps.
    """
    states = list(states)
    if len({state.step for state in states}) != 1:
        raise SettingsError(f"the stages' states are of steps {sorted({state.step for state in states})}")
    kinds = sorted({kind for state in states for kind in state.inner})
    return StageState(
        states[0].step,
        assemble(state.model for state in states),
        {kind: assemble(state.inner.get(kind, {}) for state in states) for kind in kinds},
    )


def inner_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Copies of what the optimizer remembers, numbers as tensors; empty before its first step."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            found.setdefault(kind, {})[name] = torch.as_tensor(value).detach().clone()
    return found


def restore_inner(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Mapping[str, torch.Tensor]]
) -> None:
    """Takes the model's part of what `inner_state` has returned, of the same stage or of a larger part of the model."""
    optimizer.state.clear()
    for name, parameter in model.named_parameters():
        for kind, named in saved.items():
            if name in named:
                values = named[name].detach().clone()
                same = values.shape == parameter.shape
                optimizer.state[parameter][kind] = values.to(parameter.device) if same else values

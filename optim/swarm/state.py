"""What a stage's servers have in common, by the names of the whole model: for newcomers, and for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import attrs
import torch
from torch import nn

from optim.swarm.stages import Stage, assemble
from protocol.errors import ProtocolError, SettingsError

OVERHEAD = 1 << 10
"""Bytes that a tensor's name and place may take in a state, at most."""


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
    outer: Mapping[str, Mapping[str, torch.Tensor]] = attrs.field(factory=dict)
    """With local steps: the outer optimizer's tensors, as those of the optimizer, which are one server's own then."""


@attrs.frozen(eq=False)
class Form:
    """What the state of a stage looks like: what others send has to."""

    model: Mapping[str, tuple[torch.Size, torch.dtype]]
    parameters: Mapping[str, torch.Size]
    tied: Mapping[str, str]
    """As `Stage.tied`."""

    @classmethod
    def of(cls, stage: Stage) -> Form:
        """That of a stage."""
        state, named = stage.model.state_dict(), dict(stage.model.named_parameters())
        model = {name: (values.shape, values.dtype) for name, values in state.items()}
        return cls(model, {name: values.shape for name, values in named.items()}, stage.tied)

    @property
    def most(self) -> int:
        """Bytes of a state, at most: with five tensors per parameter of both optimizers, the mean, and what is tied."""
        elements = sum(shape.numel() for shape in self.parameters.values())
        own = sum(shape.numel() * dtype.itemsize for shape, dtype in self.model.values())
        return own + 4 * 8 * elements + OVERHEAD * 16 * (len(self.model) + 1)

    def check(self, state: StageState, kinds: Mapping[str, bool]) -> None:
        """Refuses a state that is not one of this stage.

        Args:
            state: Of somebody else.
            kinds: See `inner_kinds`.

        Raises:
            ProtocolError: Names, shapes or types are others, or something is missing.
        """
        found = {name: (values.shape, values.dtype) for name, values in state.model.items()}
        if found != dict(self.model):
            wrong = sorted(name for name in found.keys() | self.model.keys() if found.get(name) != self.model.get(name))
            raise ProtocolError(f"a stage's state with another {wrong[0][:80]}, or without it")
        for kind, named in state.inner.items():
            for name, values in named.items():
                shape = self.parameters.get(name)
                if kind not in kinds or shape is None or values.shape != (shape if kinds[kind] else ()):
                    raise ProtocolError(f"a stage's state with a strange {kind[:80]} of {name[:80]}")
                if not values.is_floating_point():
                    raise ProtocolError(f"a stage's state whose {kind[:80]} has no numbers with fractions")
        named_by = [state.inner.get(kind, {}).keys() for kind in kinds]
        if any(names != named_by[0] for names in named_by):
            raise ProtocolError("a stage's state with a part of what the optimizer remembers")
        for kind, named in state.outer.items():
            if {name: values.shape for name, values in named.items()} != dict(self.parameters):
                raise ProtocolError(f"a stage's state with a strange {kind[:80]} of rounds")
        length = sum(shape.numel() for shape in self.parameters.values())
        if state.mean is not None and (state.mean.shape, state.mean.dtype) != ((length,), torch.float32):
            raise ProtocolError("a stage's state whose mean gradient has another length")
        for step, gradients in state.tied.items():
            if step > state.step:
                raise ProtocolError("a stage's state with gradients of later steps")
            self.check_tied(gradients)

    def check_tied(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Refuses gradients that are not those of what this stage shares with others.

        Raises:
            ProtocolError: Names, shapes or types are others, or something is missing.
        """
        found = {first: (values.shape, values.dtype) for first, values in gradients.items()}
        if found != {first: (self.parameters[name], torch.float32) for name, first in self.tied.items()}:
            raise ProtocolError("gradients of something else than what stages share")


def whole_state(states: Iterable[StageState]) -> StageState:
    """The state of the whole model, from those of all its stages. Any number of stages can go on from it.

    Raises:
        SettingsError: They are of different steps.
    """
    states = list(states)
    if len({state.step for state in states}) != 1:
        raise SettingsError(f"the stages' states are of steps {sorted({state.step for state in states})}")
    outer = _by_kind([state.outer for state in states], assemble)
    return StageState(
        states[0].step,
        assemble(state.model for state in states),
        _by_kind([state.inner for state in states], _first if outer else assemble),
        outer=outer,
    )


_Named: TypeAlias = Mapping[str, torch.Tensor]


def _by_kind(
    parts: Sequence[Mapping[str, _Named]], together: Callable[[Iterable[_Named]], _Named]
) -> dict[str, _Named]:
    return {
        kind: together(part.get(kind, {}) for part in parts)
        for kind in sorted({kind for part in parts for kind in part})
    }


def _first(states: Iterable[_Named]) -> _Named:
    """As `assemble`, but of what stages have in common one has another value than the other."""
    return {name: values for state in reversed([*states]) for name, values in state.items()}


def inner_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Copies of what the optimizer remembers, numbers as tensors; empty before its first step."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            found.setdefault(kind, {})[name] = torch.as_tensor(value).detach().clone()
    return found


def inner_kinds(optimizer: torch.optim.Optimizer, like: Sequence[nn.Parameter]) -> dict[str, bool]:
    """What an optimizer remembers of each parameter, and whether that has the parameter's shape, or is a number.

    Found out with a parameter that it has for a moment, while the others have no gradients.
    """
    tried = nn.Parameter(torch.ones(2, dtype=like[0].dtype, device=like[0].device))
    tried.grad = torch.zeros_like(tried)
    optimizer.add_param_group({"params": [tried]})
    optimizer.step()
    optimizer.param_groups.pop()
    remembered: Mapping[str, object] = optimizer.state.pop(tried, {})
    return {kind: torch.as_tensor(value).ndim > 0 for kind, value in remembered.items()}


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

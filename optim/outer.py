"""Low-communication training inside a plain PyTorch loop: an inner optimizer, and now and then the swarm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from optim.flat import FlatParameters
from optim.recipe import Recipe, recipe
from optim.slots import Work
from optim.state import OuterState
from protocol.collective import Collective
from protocol.errors import ProtocolError, SettingsError


class LowCommunicationOptimizer(torch.optim.Optimizer):
    """An optimizer that steps locally and, when its recipe says so, exchanges with the swarm inside `step`.

    Parameter groups and per-parameter state are those of the inner optimizer, the very same objects, so that learning
    rate schedulers, gradient scaling and clipping work as they do with the inner optimizer alone. `state_dict` holds
    the inner optimizer's state and, under "outer", the outer one.

    The outer state starts from the model's values at construction. All peers of a swarm must start from the same.

    If an exchange fails, its exception leaves `step`. By then the local step is done, and neither the local parameters
    nor the outer state have been touched: the exchange stays due, and the next `step` tries again with all the work
    done since the last one that succeeded.

    Args:
        model: The model that the inner optimizer trains. Its trainable parameters are averaged.
        inner: Any optimizer over parameters of that model.
        swarm: Forms the mean over peers; called from the thread that calls `step`, and blocks it.
        method: The recipe.
        tokens_per_step: What one step counts for in the mean, beside the steps of other peers: the number of tokens
            (or examples) in a batch, if batches differ between peers.

    Raises:
        SettingsError: The inner optimizer trains something that is not a parameter of the model.
    """

    # Set at the end of construction: the base class adds the first groups through add_param_group as well.
    _complete = False

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        swarm: Collective,
        method: Recipe,
        *,
        tokens_per_step: int = 1,
    ) -> None:
        self._flat = FlatParameters(model)
        trained = [parameter for group in inner.param_groups for parameter in group["params"]]
        if not self._flat.holds(parameter for parameter in trained if parameter.requires_grad):
            raise SettingsError("the inner optimizer trains a parameter that the model does not have")
        if tokens_per_step < 1:
            raise SettingsError(f"tokens_per_step must be at least 1, not {tokens_per_step}")
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.recipe = method
        self.outer: OuterState = method.outer.init(self._flat.read())
        self.rounds = 0
        """Exchanges that succeeded."""
        self.local_steps = 0
        """Inner steps since the last of them."""
        self._swarm = swarm
        self._tokens_per_step = tokens_per_step
        self._share_with_inner()
        self._complete = True

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One inner step, and an exchange if one is due.

        Raises:
            ShoalError: The exchange failed; see the class.
        """
        loss = self.inner.step(closure) if closure is not None else self.inner.step()
        self.local_steps += 1
        if self.recipe.policy.due(self.local_steps):
            self.synchronize()
        return loss

    def synchronize(self) -> None:
        """Exchanges now, due or not, and goes on from the new outer parameters.

        A peer whose values are not finite takes part with weight zero, and is healed by the others' result.
        """
        inner = self._flat.read()
        message = self.recipe.message(self._flat.rounded(self.outer.parameters), inner)
        weight = self.recipe.weighting.weight(Work(self.local_steps, self.local_steps * self._tokens_per_step))
        if not bool(torch.isfinite(message).all()):
            message, weight = torch.zeros_like(message), 0.0
        mean = self._swarm.all_reduce(message, weight).mean
        if mean.shape != message.shape:
            raise ProtocolError(f"the swarm's mean has shape {list(mean.shape)}, not {list(message.shape)}")
        outer = self.recipe.step(self.outer, mean)
        self._flat.write(self.recipe.merge.apply(inner, self.outer.parameters, outer.parameters))
        self.outer = outer
        self.rounds += 1
        self.local_steps = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._complete:
            raise SettingsError("parameters cannot be added later: all peers of a swarm have the same ones")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dictionary, with the outer state under "outer"."""
        outer = {
            "parameters": self.outer.parameters,
            "buffers": dict(self.outer.buffers),
            "rounds": self.rounds,
            "local_steps": self.local_steps,
        }
        return {**self.inner.state_dict(), "outer": outer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. The model's own values are restored by the model's `load_state_dict`.

        Raises:
            SettingsError: The dictionary has no outer state, or one of another model or recipe.
        """
        if "outer" not in state_dict:
            raise SettingsError(
                "the state dictionary has no outer state", hint="load a plain optimizer's state into `optimizer.inner`"
            )
        saved = state_dict["outer"]
        outer = OuterState(_flat(saved["parameters"]), {key: _flat(value) for key, value in saved["buffers"].items()})
        if outer.parameters.shape != (self._flat.length,):
            raise SettingsError(f"saved are {outer.parameters.numel()} values, but the model has {self._flat.length}")
        if {key: value.shape for key, value in outer.buffers.items()} != {
            key: value.shape for key, value in self.outer.buffers.items()
        }:
            raise SettingsError("the saved outer state belongs to another recipe")
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "outer"})
        self._share_with_inner()
        self.outer, self.rounds, self.local_steps = outer, saved["rounds"], saved["local_steps"]

    def _share_with_inner(self) -> None:
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state


def DiLoCo(
    model: nn.Module,
    inner: torch.optim.Optimizer,
    swarm: Collective,
    *,
    sync_every: int = 500,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    tokens_per_step: int = 1,
) -> LowCommunicationOptimizer:
    """DiLoCo around an inner optimizer: an exchange after every `sync_every` steps.

    Raises:
        SettingsError: A setting that cannot work.
    """
    method = recipe("diloco", inner_steps=sync_every, outer_lr=outer_lr, outer_momentum=outer_momentum)
    return LowCommunicationOptimizer(model, inner, swarm, method, tokens_per_step=tokens_per_step)


def _flat(values: torch.Tensor) -> torch.Tensor:
    """A private copy, so that neither side's later changes reach the other."""
    return values.detach().to("cpu", torch.float32, copy=True)

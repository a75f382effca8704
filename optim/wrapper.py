"""What the optimizers for plain PyTorch loops have in common: they look like the inner optimizer that they wrap."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from optim.flat import FlatParameters
from protocol.errors import SettingsError


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one.

    Parameter groups and per-parameter state are those of the inner optimizer, the very same objects, so that learning
    rate schedulers, gradient scaling and clipping work as they do with the inner optimizer alone.

    Args:
        model: The model that the inner optimizer trains.
        inner: Any optimizer over parameters of that model.
        tokens_per_step: What one step counts for in the mean, beside the steps of other peers.

    Raises:
        SettingsError: The inner optimizer trains something that is not a parameter of the model.
    """

    # Set at the end of construction: the base class adds the first groups through add_param_group as well.
    _complete = False

    def __init__(self, model: nn.Module, inner: torch.optim.Optimizer, *, tokens_per_step: int) -> None:
        self._flat = FlatParameters(model)
        trained = [parameter for group in inner.param_groups for parameter in group["params"]]
        if not self._flat.holds(parameter for parameter in trained if parameter.requires_grad):
            raise SettingsError("the inner optimizer trains a parameter that the model does not have")
        if tokens_per_step < 1:
            raise SettingsError(f"tokens_per_step must be at least 1, not {tokens_per_step}")
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self._tokens_per_step = tokens_per_step
        self._share_with_inner()
        self._complete = True

    @property
    def learning_rate(self) -> float:
        """The inner learning rate, of the first parameter group."""
        return float(self.inner.param_groups[0]["lr"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._complete:
            raise SettingsError("parameters cannot be added later: all peers of a swarm have the same ones")
        super().add_param_group(param_group)

    def _share_with_inner(self) -> None:
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

"""What the optimizers for plain PyTorch loops have in common: they look like the inner optimizer that they wrap."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from optim.flat import FlatParameters
from protocol.errors import SettingsError


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one.

    Parameter groups and per-parameter state are those of the inner optimizer, the very same objects, so that learning
    rate schedulers, gradient scaling and clipping work as they do with the inner optimizer alone, and its state may be
    loaded into it whenever one likes.

    Args:
        model: The model that the inner optimizer trains.
        inner: Any optimizer over parameters of that model.
        tokens_per_step: What one step counts for in the mean, beside the steps of other peers.

    Raises:
        SettingsError: The inner optimizer trains something that is not a parameter of the model.
    """

    _complete = False

    def __init__(self, model: nn.Module, inner: torch.optim.Optimizer, *, tokens_per_step: int) -> None:
        self._flat = FlatParameters(model)
        self._exchanged: set[torch.Tensor] = set()
        self.inner = inner
        if not self._exchanges_all():
            raise SettingsError("the inner optimizer trains a parameter that the model does not have")
        if tokens_per_step < 1:
            raise SettingsError(f"tokens_per_step must be at least 1, not {tokens_per_step}")
        super().__init__(inner.param_groups, inner.defaults)  # sets groups and state up, which are there already
        self._tokens_per_step = tokens_per_step
        self._complete = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the inner optimizer, which has others after its `load_state_dict`."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._complete:
            self.inner.param_groups = groups

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """That of the inner optimizer, as `param_groups`."""
        return self.inner.state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        if self._complete:
            self.inner.state = state

    @property
    def learning_rate(self) -> float:
        """The inner learning rate, of the first parameter group."""
        return float(self.inner.param_groups[0]["lr"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: all peers of a swarm have the same parameters."""
        if self._complete:
            raise SettingsError("parameters cannot be added later: all peers of a swarm have the same ones")

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dictionary."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.inner.load_state_dict(state_dict)

    def _check_trained(self) -> None:
        """Before each step.

        Raises:
            SettingsError: What it would train is not exchanged.
        """
        if not self._exchanges_all():
            raise SettingsError(
                "the inner optimizer trains a parameter that is not exchanged: it was frozen, or not there, before",
                hint="Make the optimizer while everything is trainable that ever will be, and freeze it afterwards.",
            )

    def _exchanges_all(self) -> bool:
        trained = {each for group in self.inner.param_groups for each in group["params"] if each.requires_grad}
        if new := trained - self._exchanged:
            if not self._flat.holds(new):
                return False
            self._exchanged |= new
        return True

"""Methods that exchange something in every step, inside a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from optim.buffers import Buffers
from optim.elementwise import check_elementwise
from optim.flat import select
from optim.machine import Machine, link_of
from optim.recipe import GradientRecipe
from optim.sender import Sender
from optim.slots import Local, Work
from optim.state import OuterState
from optim.wrapper import Wrapper
from protocol.collective import Collective
from protocol.errors import SettingsError


class GradientOptimizer(Wrapper):
    """An optimizer that exchanges with the swarm before each step, which is then the same at all peers.

    All peers must start from the same values, and take the same steps: one that skips a step, as a `GradScaler` does
    when it finds an overflow, keeps the others waiting. Gradients that are not finite do not count. If an exchange
    fails, its exception leaves `step`, and nothing has been changed.

    Buffers of the model that belong to its state are averaged in every step as well, whole numbers take the largest
    value. If only that fails, its exception leaves `step` after all else is done: the next step makes up for it.

    Args:
        model: The model that the inner optimizer trains.
        inner: Any optimizer over parameters of that model.
        swarm: Carries the exchanges; they block the thread that calls `step`. See `LowCommunicationOptimizer`.
        method: The recipe.
        tokens_per_step: What one step counts for in the mean, beside the steps of other peers.

    Raises:
        SettingsError: The inner optimizer trains something that is not a parameter of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        swarm: Collective | Machine,
        method: GradientRecipe,
        *,
        tokens_per_step: int = 1,
    ) -> None:
        super().__init__(model, inner, tokens_per_step=tokens_per_step)
        self.recipe = method
        self.rounds = 0
        """Exchanges that succeeded."""
        self._link = link_of(swarm, self._flat)
        if self._flat.slices != self._flat.whole:
            check_elementwise(method)
        self._buffers = Buffers(model)
        self._sender = Sender(method, self._link.all)
        self._everything = select(self._flat.slices, range(len(self._flat.slices)))

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """An exchange, and one inner step with what came of it.

        Args:
            closure: Computes the loss and its gradients once.

        Raises:
            ShoalError: The exchange failed; see the class.
            SettingsError: A parameter is trained that was frozen when this was made, so it is not exchanged.
        """
        self._check_trained()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        local = self._local()
        work = Work(1, self._tokens_per_step)
        message = self._sender.prepare(local, work, self._everything.layout, self.rounds + 1)
        problem = self._buffers.average(self._link.gather, message.weight)
        mixed = self._link.mix(self._sender, message, self._everything, "")
        self._sender.sent(message, mixed)
        self._flat.write_gradient(mixed.mean.sign() if self.recipe.sign else mixed.mean)
        self.rounds += 1
        self.inner.step()
        if problem is not None:
            raise problem
        return loss

    def _local(self) -> Local:
        parameters = self._flat.read()
        return Local(
            state=OuterState(parameters),
            anchor=parameters,
            inner=parameters,
            gradient=self._flat.read_gradient(),
            lr=self.learning_rate,
        )

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dictionary; under "exchange", what this peer remembers of exchanges."""
        return {**self.inner.state_dict(), "exchange": {"rounds": self.rounds, "memory": self._sender.state_dict()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            SettingsError: It is not one of these, or of another model or recipe, or damaged.
        """
        if "exchange" not in state_dict:
            raise SettingsError(
                "the state dictionary is not one of an optimizer that exchanges",
                hint="load a plain optimizer's state into `optimizer.inner`",
            )
        memory, everything = (
            state_dict["exchange"]["memory"],
            (self._local(), self._everything.layout, self._flat.whole),
        )
        self._sender.load_state_dict(memory, [everything])
        self.rounds = state_dict["exchange"]["rounds"]
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "exchange"})

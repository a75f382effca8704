"""Low-communication training inside a plain PyTorch loop: an inner optimizer, and now and then the swarm."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from optim.recipe import Recipe
from optim.regularizers import Free
from optim.replica import Replica
from optim.sender import carry_out, tag_of
from optim.slots import Mixed, Moment
from optim.state import OuterState
from optim.wrapper import Wrapper
from protocol.collective import Collective
from protocol.errors import SettingsError


class LowCommunicationOptimizer(Wrapper):
    """An optimizer that steps locally and, when its recipe says so, exchanges with the swarm inside `step`.

    Parameter groups and per-parameter state are those of the inner optimizer, see `Wrapper`. `state_dict` holds the
    inner optimizer's state and, under "outer", the outer one.

    The outer state starts from the model's values at construction. All peers of a swarm must start from the same.

    If an exchange fails, its exception leaves `step`. By then the local step is done, and neither the local parameters
    nor the outer state have been touched: the exchange stays due, and the next `step` tries again with all the work
    done since the last one that succeeded.

    Args:
        model: The model that the inner optimizer trains. Its trainable parameters are averaged.
        inner: Any optimizer over parameters of that model.
        swarm: Forms the mean over peers. Exchanges without a delay block the thread that calls `step`; others run in
            a thread of their own, one at a time.
        method: The recipe.
        tokens_per_step: What one step counts for in the mean, beside the steps of other peers: the number of tokens
            (or examples) in a batch, if batches differ between peers.
        pace: Our speed as a share of the fastest peer's, for recipes whose number of steps depends on it.

    Raises:
        SettingsError: The inner optimizer trains something that is not a parameter of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        swarm: Collective,
        method: Recipe,
        *,
        tokens_per_step: int = 1,
        pace: Callable[[], float] = lambda: 1.0,
    ) -> None:
        super().__init__(model, inner, tokens_per_step=tokens_per_step)
        self.recipe = method
        self._replica = Replica(method, self._flat, tokens_per_step=tokens_per_step)
        self._swarm, self._pace = swarm, pace
        self._pending: Future[Mixed] | None = None  # the exchange that is under way in its thread
        self._thread: ThreadPoolExecutor | None = None
        self._wait: int | None = None  # inner steps from the beginning of the last exchange to the next

    @property
    def outer(self) -> OuterState:
        """The outer state, as far as results have been applied."""
        return self._replica.outer

    @property
    def rounds(self) -> int:
        """Exchanges that succeeded."""
        return self._replica.rounds

    @property
    def local_steps(self) -> int:
        """Inner steps since the last of them began."""
        return self._replica.local_steps

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One inner step, and an exchange if one is due.

        Raises:
            ShoalError: The exchange failed; see the class.
        """
        loss = self._local_step(closure)
        self._replica.stepped()
        if self._wait is None:
            self._wait = self.recipe.policy.steps(self._moment())
        if self.local_steps >= self._wait:
            self.synchronize()
        elif self._replica.flying and self.local_steps >= self.recipe.policy.delay:
            self._land()
        return loss

    def _local_step(self, closure: Callable[[], float] | None) -> float | None:
        if isinstance(self.recipe.regularizer, Free):
            return self.inner.step(closure) if closure is not None else self.inner.step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        anchors = self._flat.scatter(self.outer.parameters)
        parameters = [(parameter, anchors[place.name]) for place, parameter in self._flat.parameters()]
        self.recipe.regularizer.regularize(parameters, closure)
        self.inner.step()
        return loss

    def synchronize(self) -> None:
        """Begins the next exchange, due or not, and applies the result: at once, or after the recipe's delay.

        The exchange before is applied first, if that has not been done. A peer whose values are not finite takes part
        with weight zero, and is healed by the others' result.
        """
        self._receive()
        waits, message = self._replica.waits, self._replica.begin(self._moment())
        mixing = self._replica.sender.mix(message)
        tag = tag_of(message.layout, self._flat.slices)
        if waits:
            mixed = carry_out(self._swarm, mixing, tag=tag)
            self._replica.send(message)
            self._replica.arrived(mixed)
            self._replica.land(self._moment(), message.taken)
        else:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="shoal-exchange")
            self._pending = self._thread.submit(carry_out, self._swarm, mixing, tag=tag)
            self._replica.send(message)
        self._wait = None

    def finish(self) -> None:
        """Ends the run: applies what is under way, and makes one set of parameters of the peers' if they differ.

        All peers call this after the same number of exchanges. The model then has the run's outer parameters.

        Raises:
            ShoalError: An exchange failed; it may be called again.
        """
        if self._replica.flying:
            self._land()
        finishing = self.recipe.finalizer.finish(self.outer.parameters, self._flat.slices)
        parameters = carry_out(self._swarm, finishing, tag="finish")
        self._replica.outer = OuterState(parameters, self.outer.buffers)
        self._flat.write(parameters)
        self.close()

    def close(self) -> None:
        """Lets go of the thread of exchanges, after the one that is under way."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _land(self) -> None:
        self._receive()
        self._replica.land(self._moment())

    def _receive(self) -> None:
        """Waits for the exchange that is under way, if any. One that failed is lost."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            self._replica.arrived(pending.result())
        except BaseException:
            self._replica.lost()
            raise

    def _moment(self) -> Moment:
        return Moment(round=self._replica.begun + 1, lr=self.learning_rate, pace=self._pace())

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dictionary, with the outer state under "outer".

        Waits for an exchange that is under way.
        """
        if self._pending is not None and self._pending.exception() is None:
            self._receive()
        return {**self.inner.state_dict(), "outer": self._replica.state_dict()}

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
        self._wait, self._pending = None, None
        self._replica.load_state_dict(saved, outer)


def _flat(values: torch.Tensor) -> torch.Tensor:
    """A private copy, so that neither side's later changes reach the other."""
    return values.detach().to("cpu", torch.float32, copy=True)

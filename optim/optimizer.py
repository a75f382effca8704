"""Low-communication training inside a plain PyTorch loop: an inner optimizer, and now and then the swarm."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import attrs
import torch
from torch import nn

from optim.buffers import Buffers
from optim.elementwise import check_elementwise
from optim.machine import Machine, link_of
from optim.recipe import Recipe
from optim.regularizers import Free
from optim.replica import Replica
from optim.sender import Message, tag_of
from optim.shards import local
from optim.slots import Mixed, Moment
from optim.standing import Standing, foremost, standings
from optim.state import OuterState
from optim.warmup import Warmup
from optim.wrapper import Wrapper
from protocol.collective import Collective
from protocol.errors import ProtocolError, RequestTimeout, SettingsError, ShoalError

_PAUSE = 0.5  # seconds between two attempts to join: who is alone, or among newcomers, gets an answer at once


class LowCommunicationOptimizer(Wrapper):
    """An optimizer that steps locally and, when its recipe says so, exchanges with the swarm inside `step`.

    Parameter groups and per-parameter state are those of the inner optimizer, see `Wrapper`. `state_dict` holds the
    inner optimizer's state and, under "outer", the outer one.

    The outer state starts from the model's values at construction. All peers of a swarm must start from the same; see
    `welcome` for those who come later.

    Buffers of the model that belong to its state are averaged, whole numbers take the largest value, whenever the first
    parameter is exchanged; if peers have outer states of their own, or do not wait for each other, in the end. If only
    that fails, the exchange takes place all the same, and the exception leaves `step` when it is done, or on its way.

    If an exchange fails, its exception leaves `step`. By then the local step is done, and neither the local parameters
    nor the outer state have been touched: the exchange stays due, and the next `step` tries again with all the work
    done since the last one that succeeded. Methods whose results come a round late (`delayed`, `dilocox`, `eager`,
    `co2`) have gone on from the outer parameters by then, and lose what they were about to exchange.

    Args:
        model: The model that the inner optimizer trains. Its trainable parameters are averaged.
        inner: Any optimizer over parameters of that model.
        swarm: Forms the mean over peers. Exchanges without a delay block the thread that calls `step`; others run in
            a thread of their own, one at a time. Processes of one machine that share the model give a `Machine`.
        method: The recipe.
        tokens_per_step: What one step counts for in the mean, beside the steps of other peers: the number of tokens
            (or examples) in a batch, if batches differ between peers; of a machine, in those of all its processes.
        pace: Our speed as a share of the fastest peer's, for recipes whose number of steps depends on it.

    Raises:
        SettingsError: The inner optimizer trains something that is not a parameter of the model; or each process has
            a part of the model, and the recipe cannot be carried out on parts.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        swarm: Collective | Machine,
        method: Recipe,
        *,
        tokens_per_step: int = 1,
        pace: Callable[[], float] = lambda: 1.0,
    ) -> None:
        super().__init__(model, inner, tokens_per_step=tokens_per_step)
        self.recipe = method
        self._link, self._pace = link_of(swarm, self._flat), pace
        if self._flat.slices != self._flat.whole:
            check_elementwise(method)
        self._buffers = Buffers(model)
        self._replica = Replica(method, self._flat, tokens_per_step=tokens_per_step, in_all=self._link.all)
        self._pending: Future[Mixed] | None = None  # the exchange that is under way in its thread
        self._thread: ThreadPoolExecutor | None = None
        self._wait: int | None = None  # inner steps from the beginning of the last exchange to the next
        self._warmup = Warmup(self.learning_rate)
        self._averaged = 0  # the exchange with which buffers were averaged last

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
            SettingsError: A parameter is trained that was frozen when this was made, so it is not exchanged.
        """
        self._check_trained()
        group = self.inner.param_groups[0]
        self._warmup.sees(group)
        loss = self._local_step(closure)
        self._replica.stepped()
        if self._wait is None:
            self._wait = self.recipe.policy.steps(attrs.evolve(self._moment(), lr=self._warmup.after(group)))
        if self.local_steps >= min(self._wait, self.recipe.policy.delay) and self._ready():
            if self.local_steps >= self._wait:
                self.synchronize()
            elif self._replica.flying:
                self._land()
        elif self.local_steps >= self._wait:
            self._replica.pass_over()
            self._wait = None
        return loss

    def _ready(self) -> bool:
        """Whether what is under way does not keep us from going on. All processes of a machine find that alike."""
        if self.recipe.waits or not self._replica.flying:
            return True
        return self._link.all(self._pending is None or self._pending.done())

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
        problem = self._average_buffers()  # before the exchange has changed anything
        waits, message = self._replica.waits, self._replica.begin(self._moment())
        if waits:
            mixed = self._mix(message)
            self._replica.send(message)
            self._replica.arrived(mixed)
            self._replica.land(self._moment(), message.taken)
        else:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="shoal-exchange")
            self._pending = self._thread.submit(self._mix, message)
            self._replica.send(message)
        self._heal()
        self._wait = None
        if problem is not None:
            raise problem

    def _mix(self, message: Message) -> Mixed:
        fragment = self._replica.fragment(message.round)
        tag = tag_of(message.layout, self._flat.slices)
        return self._link.mix(self._replica.sender, message, fragment, tag)

    def _average_buffers(self) -> ShoalError | None:
        """Averages buffers, once for an exchange that they go with, however often that is tried.

        None do if exchanges do not wait for all peers. Returns why it failed.
        """
        due = self._replica.begun + 1
        fragment = self._replica.fragment(due)
        if not self.recipe.shared or self.recipe.late or 0 not in fragment.places or due == self._averaged:
            return None
        problem = self._buffers.average(self._link.gather, self._replica.weight(fragment))
        self._averaged = due if problem is None else 0
        return problem

    def welcome(self) -> int:
        """Lets peers that have just come, or have missed an exchange, go on from the outer state of the others.

        All peers call it at the same point, such as after each exchange; a newcomer first of all, see `join`. What a
        peer has done since its last exchange is kept, and part of the next one. Whose state it is:
        that of the most peers, of those that have exchanged at all.

        Returns:
            How many peers took part.

        Raises:
            SettingsError: With this method peers are at different exchanges, and may still get those that they missed.
            ProtocolError: The others' state is not finite.
            ShoalError: It failed, and may be called again.
        """
        if self.recipe.late:
            raise SettingsError("exchanges go on without those who are late: nobody can come to such a run later")
        if self._replica.flying:
            self._receive()
            self._replica.settle(self._moment())
            self._heal()
        replica, nonce = self._replica, secrets.token_bytes(8)
        ours = Standing(replica.rounds, replica.begun, replica.history, nonce, warm=self._warmup.over)
        told = standings(self._link.gather(ours.pack(), "welcome").values())
        source = foremost(told)
        if any(self._is_behind(theirs, source) for theirs in told):
            self._replica.renew()
            self._wait = None
            names = sorted(self.outer.buffers)
            state = torch.cat([self.outer.parameters, *(self.outer.buffers[name] for name in names)])
            state = self._link.broadcast(state, "state", ours=source == ours)
            if not self._link.all(bool(torch.isfinite(state).all())):
                raise ProtocolError("the state that the others go on from is not finite")
            if self._is_behind(ours, source):
                parameters, *buffers = torch.split(state, self._flat.length)
                self._restart(OuterState(parameters, dict(zip(names, buffers, strict=True))), source)
        return len(told)

    def join(self, timeout: float = 600.0) -> None:
        """A newcomer's beginning: takes part in `welcome` until it has the outer state of a run that others have begun.

        Args:
            timeout: Seconds after which it gives up; more than the others take from one `welcome` to the next.

        Raises:
            RequestTimeout: Nobody was there in that time who has exchanged.
            ShoalError: As `welcome`; it may be called again.
        """
        ends = time.monotonic() + timeout
        self.welcome()
        while not self.rounds:
            if not self._link.all(time.monotonic() < ends):
                raise RequestTimeout(
                    f"nobody who has exchanged has welcomed us within {timeout:g} s",
                    hint="Those who begin a run do not join it; they train, and call `welcome` after each exchange.",
                )
            time.sleep(_PAUSE)
            self.welcome()

    def finish(self) -> None:
        """Ends the run: applies what is under way, and makes one set of parameters of the peers' if they differ.

        All peers call this, after the same number of exchanges unless some go on without those who are late. The model
        then has the run's outer parameters, and the mean of all peers' buffers. Who calls it later than the collective
        waits for (`RoundTimes.grace`) ends with what those have who call it then.

        Raises:
            ShoalError: An exchange failed; it may be called again.
        """
        if self._replica.flying:
            self._land()
        if self.recipe.late:
            self._catch_up()
        parameters = self._link.finish(self.recipe.finalizer, self.outer.parameters)
        self._replica.outer = OuterState(parameters, self.outer.buffers)
        self._flat.write(parameters)
        self.close()
        if (problem := self._buffers.average(self._link.gather, 1.0)) is not None:
            raise problem

    def _catch_up(self) -> None:
        """Gets what others have made without us, when nobody makes anything more: with an exchange of nothing."""
        self._link.gather(b"", "finish")
        for message in self._replica.turns(self._moment()):
            self._replica.caught_up(message, self._mix(message), self._moment())
        self._link.gather(b"", "finish")  # nobody leaves who may be the only one that has something

    def close(self) -> None:
        """Lets go of the thread of exchanges, after the one that is under way."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _land(self) -> None:
        self._receive()
        self._replica.land(self._moment())
        self._heal()

    def _is_behind(self, peer: Standing, source: Standing) -> bool:
        """Whether a peer needs the state of another. One with an outer state of its own needs it to begin with."""
        return not peer.agrees(source) and (self.recipe.shared or peer.rounds == 0)

    def _restart(self, outer: OuterState, source: Standing) -> None:
        """Goes on from a state that others have, with what we have not exchanged yet, if that is any good."""
        drift = self._replica.drift
        sound = self._link.all(bool(torch.isfinite(drift).all()))
        self._replica.restart(outer, source.begun, drift if sound else None)
        self._replica.rounds, self._replica.history = source.rounds, source.history
        self._warmup.over = source.warm
        self._replica.sender.forget()  # what was left out belongs to the state that is given up
        self._wait, self._averaged = None, 0

    def _heal(self) -> None:
        """The inner optimizer forgets what is not finite: moments stay so after one step with such a gradient."""
        if self._replica.share != 0:
            return
        for state in self.inner.state.values():
            tensors = [local(value) for value in state.values() if isinstance(value, torch.Tensor)]
            if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
                state.clear()

    def _receive(self) -> None:
        """Waits for the exchange that is under way, if any. One that failed is lost."""
        if self._pending is None:
            return
        pending = self._pending
        wait([pending])  # whoever is interrupted here still has it
        self._pending = None
        try:
            self._replica.arrived(pending.result())
        except BaseException:
            self._replica.lost()
            raise

    def _moment(self) -> Moment:
        pace = self._link.same(self._pace())
        return Moment(round=self._replica.begun + 1, lr=self.learning_rate, pace=pace, load=self._replica.load)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dictionary, with the outer state under "outer".

        Waits for an exchange that is under way.
        """
        if self._pending is not None and self._pending.exception() is None:
            self._receive()
        warmup = attrs.asdict(self._warmup)
        return {**self.inner.state_dict(), "outer": {**self._replica.state_dict(), "warmup": warmup}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. The model's own values are restored by the model's `load_state_dict`.

        Raises:
            SettingsError: The dictionary has no outer state, or one of another model or recipe, or a damaged one.
        """
        if "outer" not in state_dict:
            raise SettingsError(
                "the state dictionary has no outer state", hint="load a plain optimizer's state into `optimizer.inner`"
            )
        saved = state_dict["outer"]
        if lacking := {"parameters", "buffers", "warmup"} - saved.keys():
            raise SettingsError(f"the saved outer state has no {min(lacking)!r}")
        outer = OuterState(_flat(saved["parameters"]), {key: _flat(value) for key, value in saved["buffers"].items()})
        if outer.parameters.shape != (self._flat.length,):
            raise SettingsError(f"saved are {outer.parameters.numel()} values, but the model has {self._flat.length}")
        if {key: value.shape for key, value in outer.buffers.items()} != {
            key: value.shape for key, value in self.outer.buffers.items()
        }:
            raise SettingsError("the saved outer state belongs to another recipe")
        if not all(bool(torch.isfinite(values).all()) for values in (outer.parameters, *outer.buffers.values())):
            raise SettingsError("the saved outer state is not finite")
        self._replica.load_state_dict(saved, outer)
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "outer"})
        self._wait, self._pending, self._warmup, self._averaged = None, None, Warmup(**saved["warmup"]), 0


def _flat(values: torch.Tensor) -> torch.Tensor:
    """A private copy, so that neither side's later changes reach the other."""
    return values.detach().to("cpu", torch.float32, copy=True)

"""Low-communication training inside a plain PyTorch loop: an inner optimizer, and now and then the swarm."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import attrs
import torch
from torch import nn

from optim.buffers import Buffers
from optim.elementwise import check_elementwise
from optim.flat import Selection, select
from optim.machine import Machine, link_of
from optim.recipe import Recipe
from optim.regularizers import Free
from optim.sender import Message, Sender, tag_of
from optim.shards import local
from optim.slots import Local, Mixed, Moment, Work
from optim.standing import Standing, foremost, standings, told_of
from optim.state import OuterState
from optim.wrapper import Wrapper
from protocol.collective import Collective
from protocol.errors import SettingsError
from protocol.identity import PeerId


@attrs.define(eq=False)
class _Flight:
    """An exchange that goes on while the local steps do."""

    message: Message
    mixed: Future[Mixed]


class LowCommunicationOptimizer(Wrapper):
    """An optimizer that steps locally and, when its recipe says so, exchanges with the swarm inside `step`.

    Parameter groups and per-parameter state are those of the inner optimizer, see `Wrapper`. `state_dict` holds the
    inner optimizer's state and, under "outer", the outer one.

    The outer state starts from the model's values at construction. All peers of a swarm must start from the same; see
    `welcome` for those who come later.

    Buffers of the model that belong to its state are averaged, whole numbers take the largest value, whenever the first
    parameter is exchanged; if peers have outer states of their own, in the end.

    If an exchange fails, its exception leaves `step`. By then the local step is done, and neither the local parameters
    nor the outer state have been touched: the exchange stays due, and the next `step` tries again with all the work
    done since the last one that succeeded.

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
        self.outer: OuterState = method.outer.init(self._flat.read())
        self.rounds = 0
        """Exchanges that succeeded."""
        self.local_steps = 0
        """Inner steps since the last of them began."""
        self._link, self._pace = link_of(swarm, self._flat), pace
        if self._flat.slices != self._flat.whole:
            check_elementwise(method)
        self._buffers = Buffers(model)
        self._sender = Sender(method, self._link.all)
        self._flight: _Flight | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._share: float | None = None  # ours of the last mean
        self._begun = 0  # exchanges
        self._history = bytes(16)  # a digest of who contributed to each of those that succeeded
        self._wait: int | None = None  # inner steps from the beginning of the last exchange to the next
        self._done = 0  # inner steps of all rounds
        self._taken: dict[Selection, int] = {}  # how many of them there had been when each fragment was taken last

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One inner step, and an exchange if one is due.

        Raises:
            ShoalError: The exchange failed; see the class.
        """
        loss = self._local_step(closure)
        self.local_steps += 1
        self._done += 1
        if self._wait is None:
            self._wait = self.recipe.policy.steps(self._moment())
        if self.local_steps >= self._wait:
            self.synchronize()
        elif self._flight is not None and self.local_steps >= self.recipe.policy.delay:
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
        fragment = self._fragment(self._begun + 1)
        if self._flight is not None and self.recipe.payload.settled:
            self._land()
        message = self._prepare(fragment)
        first = self.recipe.outer.ahead and self._share is None  # our share is not known yet
        if self._flight is not None:
            self._land(message.taken)
        elif self._share is not None and self.recipe.outer.ahead:
            none = torch.zeros_like(message.taken)
            nobody = Mixed(mean=none, own=none, members=(), share=self._share)
            self._apply(message, nobody, message.taken, fragment)
        elif self._a_round_late and not first:
            self._merge(fragment, self.outer)  # what was done comes back with the result
        if self._buffers and self.recipe.shared and 0 in fragment.places:
            self._buffers.take(self._link.gather(self._buffers.block(message.weight), "buffers"))
        tag = tag_of(message.layout, self._flat.slices)
        exchange = partial(self._link.mix, self._sender, message, fragment, tag)
        if self.recipe.policy.delay == 0 or first:
            self._arrived(message, exchange(), message.taken, fragment)
        else:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="shoal-exchange")
            self._flight = _Flight(message, self._thread.submit(exchange))
        self._begun += 1
        self._taken[fragment] = self._done
        self.local_steps, self._wait = 0, None

    def welcome(self) -> int:
        """Lets peers that have just come, or have missed an exchange, go on from the outer state of the others.

        All peers call it at the same point, such as after each exchange; a newcomer first of all, until it has
        `rounds`. What a peer has done since its last exchange is kept, and part of the next one. Whose state it is:
        that of the most peers, of those that have exchanged at all.

        Returns:
            How many peers took part.

        Raises:
            ShoalError: It failed, and may be called again.
        """
        if self._flight is not None:
            self._land()
        ours = Standing(self.rounds, self._begun, self._history, secrets.token_bytes(8))
        told = standings(self._link.gather(ours.pack(), "welcome").values())
        source = foremost(told)
        if any(self._is_behind(theirs, source) for theirs in told):
            names = sorted(self.outer.buffers)
            state = torch.cat([self.outer.parameters, *(self.outer.buffers[name] for name in names)])
            state = self._link.broadcast(state, "state", ours=source == ours)
            if self._is_behind(ours, source):
                parameters, *buffers = torch.split(state, self._flat.length)
                self._restart(OuterState(parameters, dict(zip(names, buffers, strict=True))), source)
        return len(told)

    def finish(self) -> None:
        """Ends the run: applies what is under way, and makes one set of parameters of the peers' if they differ.

        All peers call this after the same number of exchanges. The model then has the run's outer parameters.

        Raises:
            ShoalError: An exchange failed; it may be called again.
        """
        if self._flight is not None:
            self._land()
        parameters = self._link.finish(self.recipe.finalizer, self.outer.parameters)
        if self._buffers:
            self._buffers.take(self._link.gather(self._buffers.block(1.0), "buffers"))
        self.outer = OuterState(parameters, self.outer.buffers)
        self._flat.write(parameters)
        self.close()

    def close(self) -> None:
        """Lets go of the thread of exchanges, after the one that is under way."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _land(self, fresh: torch.Tensor | None = None) -> None:
        """Waits for the exchange that is under way, and applies its result. One that failed is lost."""
        assert self._flight is not None
        flight, self._flight = self._flight, None
        mixed = flight.mixed.result()
        fragment = self._fragment(flight.message.round)
        if fresh is None:
            fresh = self._prepare(fragment).taken
        self._arrived(flight.message, mixed, fresh, fragment)

    def _arrived(self, message: Message, mixed: Mixed, fresh: torch.Tensor, fragment: Selection) -> None:
        self._apply(message, mixed, fresh, fragment)
        self._sender.sent(message, mixed)
        if mixed.share == 0:
            self._heal()
        self._share = mixed.share
        self.rounds += 1
        self._history = told_of(self._history, message.round, mixed.members)

    def _apply(self, message: Message, mixed: Mixed, fresh: torch.Tensor, fragment: Selection) -> None:
        before = _part(self.outer, fragment)
        after = self.recipe.outer.step(before, mixed, attrs.evolve(self._moment(), round=message.round), fresh)
        self._merge(fragment, _replaced(self.outer, fragment, after))

    def _is_behind(self, peer: Standing, source: Standing) -> bool:
        """Whether a peer needs the state of another. One with an outer state of its own needs it to begin with."""
        return not peer.agrees(source) and (self.recipe.shared or peer.rounds == 0)

    def _restart(self, outer: OuterState, source: Standing) -> None:
        """Goes on from a state that others have, with what was done since our last exchange."""
        drift = torch.sub(self._flat.read(), self._flat.rounded(self.outer.parameters))
        self._flat.write(torch.add(outer.parameters, drift) if self.local_steps else outer.parameters)
        self.outer, self.rounds, self._begun = outer, source.rounds, source.begun
        self._history, self._wait = source.history, None
        self._sender.forget()  # what was left out belongs to the state that is given up

    def _heal(self) -> None:
        """The inner optimizer forgets what is not finite: moments stay so after one step with such a gradient."""
        for state in self.inner.state.values():
            tensors = [local(value) for value in state.values() if isinstance(value, torch.Tensor)]
            if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
                state.clear()

    def _merge(self, fragment: Selection, outer: OuterState) -> None:
        inner = self._flat.read()
        merged = self.recipe.merge.apply(
            fragment.take(inner), fragment.take(self.outer.parameters), fragment.take(outer.parameters)
        )
        self._flat.write(fragment.put(inner, merged))
        self.outer = outer

    def _prepare(self, fragment: Selection) -> Message:
        anchor = self._flat.rounded(self.outer.parameters)
        local = Local(
            state=_part(self.outer, fragment),
            anchor=fragment.take(anchor),
            inner=fragment.take(self._flat.read()),
            lr=self.learning_rate,
        )
        steps = self._done - self._taken.get(fragment, 0)
        return self._sender.prepare(local, Work(steps, steps * self._tokens_per_step), fragment.layout, self._begun + 1)

    def _fragment(self, round: int) -> Selection:
        return select(self._flat.slices, self.recipe.fragmenter.fragment(self._flat.whole, round))

    def _moment(self) -> Moment:
        return Moment(round=self._begun + 1, lr=self.learning_rate, pace=self._link.same(self._pace()))

    @property
    def _a_round_late(self) -> bool:
        """Whether a result is applied when the next exchange begins, and local steps begin at the outer parameters."""
        policy = self.recipe.policy
        if policy.delay == 0 or self.recipe.payload.settled:
            return False
        return policy.delay >= policy.steps(attrs.evolve(self._moment(), round=2))

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dictionary, with the outer state under "outer".

        Waits for an exchange that is under way.
        """
        outer: dict[str, Any] = {
            "parameters": self.outer.parameters,
            "buffers": dict(self.outer.buffers),
            "rounds": self.rounds,
            "local_steps": self.local_steps,
            "begun": self._begun,
            "taken": [(list(fragment.places), done - self._done) for fragment, done in self._taken.items()],
            "memory": self._sender.state_dict(),
            "share": self._share,
            "history": self._history.hex(),
        }
        if self._flight is not None and self._flight.mixed.exception() is None:
            message, mixed = self._flight.message, self._flight.mixed.result()
            outer["flight"] = {
                "taken": message.taken,
                "values": message.values,
                "weight": message.weight,
                "memory": dict(message.memory if mixed.memory is None else mixed.memory),
                "round": message.round,
                "mean": mixed.mean,
                "own": mixed.own,
                "share": mixed.share,
                "members": [member.hex() for member in mixed.members],
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
        self._begun, self._wait, self._done, self._share = saved["begun"], None, 0, saved["share"]
        self._history = bytes.fromhex(saved["history"])
        self._taken = {select(self._flat.slices, places): done for places, done in saved["taken"]}
        self._sender.load_state_dict(saved["memory"])
        self._flight = self._saved_flight(saved["flight"]) if "flight" in saved else None

    def _saved_flight(self, saved: Mapping[str, Any]) -> _Flight:
        mixed: Future[Mixed] = Future()
        members = tuple(PeerId(bytes.fromhex(member)) for member in saved["members"])
        mixed.set_result(Mixed(mean=saved["mean"], own=saved["own"], members=members, share=saved["share"]))
        fields = {key: saved[key] for key in ("taken", "values", "weight", "memory", "round")}
        message = Message(**fields, layout=self._fragment(saved["round"]).layout)
        return _Flight(message, mixed)


def _part(state: OuterState, fragment: Selection) -> OuterState:
    """The outer state of one fragment."""
    return OuterState(
        fragment.take(state.parameters), {name: fragment.take(buffer) for name, buffer in state.buffers.items()}
    )


def _replaced(state: OuterState, fragment: Selection, part: OuterState) -> OuterState:
    """The outer state with another one of a fragment."""
    buffers = {name: fragment.put(buffer, part.buffers[name]) for name, buffer in state.buffers.items()}
    return OuterState(fragment.put(state.parameters, part.parameters), buffers)


def _flat(values: torch.Tensor) -> torch.Tensor:
    """A private copy, so that neither side's later changes reach the other."""
    return values.detach().to("cpu", torch.float32, copy=True)

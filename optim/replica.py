"""One peer's side of a method: its outer state, its local parameters, and what it has exchanged and not applied yet.

Who drives the training, a plain loop or the daemon, takes inner steps and carries out exchanges; in between it calls

    stepped()                   after each inner step
    begin(moment)               when an exchange is due: what to send
    send(message)               the exchange is under way
    arrived(mixed), lost()      what came of it, or that nothing did
    land(moment)                applies the result: at once, or when the policy's delay is over
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from optim.flat import FlatParameters, Selection, select
from optim.recipe import Recipe
from optim.sender import Message, Sender
from optim.slots import Local, Mixed, Moment, Work
from optim.state import OuterState


@attrs.define(eq=False)
class _Flight:
    """An exchange from its beginning until its result is applied."""

    message: Message
    local_steps: int
    """Inner steps that it took."""
    taken: int
    """`_taken` of its fragment before it."""
    mixed: Mixed | None = None
    after: OuterState | None = None


class Replica:
    """The state of one peer between exchanges.

    Args:
        method: The recipe.
        flat: The parameters of the model that is trained locally; the outer state starts from their values.
        tokens_per_step: What one inner step counts for.
    """

    def __init__(self, method: Recipe, flat: FlatParameters, *, tokens_per_step: int = 1) -> None:
        self.recipe = method
        self.outer: OuterState = method.outer.init(flat.read())
        """As far as results have been applied."""
        self.rounds = 0
        """Exchanges whose result was applied."""
        self.begun = 0
        """Exchanges that were sent."""
        self.local_steps = 0
        """Inner steps since the last of them."""
        self.sender = Sender(method)
        self._flat, self._tokens_per_step = flat, tokens_per_step
        self._flight: _Flight | None = None
        self._share: float | None = None  # ours of the last mean
        self._done = 0  # inner steps of all rounds
        self._taken: dict[Selection, int] = {}  # how many of them there had been when each fragment was taken last

    @property
    def flying(self) -> bool:
        """Whether an exchange has been sent, and its result not been applied."""
        return self._flight is not None

    @property
    def has_arrived(self) -> bool:
        """Whether the result of the exchange that is under way is here."""
        return self._flight is not None and self._flight.mixed is not None

    @property
    def latest(self) -> OuterState:
        """The outer state with what has arrived, applied or not."""
        flight = self._flight
        return self.outer if flight is None or flight.after is None else flight.after

    @property
    def waits(self) -> bool:
        """Whether the next exchange has to be waited for: without a delay, or while our share is not known yet."""
        return self.recipe.policy.delay == 0 or (self.recipe.outer.ahead and self._share is None)

    def stepped(self) -> None:
        """An inner step has been taken."""
        self.local_steps += 1
        self._done += 1

    def begin(self, moment: Moment) -> Message:
        """What to send in the next exchange. The result of the one before, which must be here, is applied first."""
        waits = self.waits
        fragment = self._fragment(self.begun + 1)
        if self._flight is not None and self.recipe.payload.settled:
            self.land(moment)
        message = self._prepare(fragment, moment.lr)
        if self._flight is not None:
            self.land(moment, message.taken)
        elif self._share is not None and self.recipe.outer.ahead:
            none = torch.zeros_like(message.taken)
            nobody = Mixed(mean=none, own=none, members=(), share=self._share)
            self._merge(fragment, self._after(message, nobody, moment, message.taken))
        elif self._a_round_late(moment) and not waits:
            self._merge(fragment, self.outer)  # what was done comes back with the result
        return message

    def send(self, message: Message) -> None:
        """This message, of which `begin` has told, is under way."""
        fragment = self._fragment(message.round)
        self._flight = _Flight(message, self.local_steps, self._taken.get(fragment, 0))
        self.begun += 1
        self._taken[fragment] = self._done
        self.local_steps = 0

    def arrived(self, mixed: Mixed, after: OuterState | None = None) -> None:
        """What came of the exchange that is under way. `after`: the outer state that follows from it, if known."""
        assert self._flight is not None
        self._flight.mixed, self._flight.after = mixed, after

    def lost(self) -> None:
        """Nothing came of the exchange that is under way, and nothing will. It was one all the same."""
        self._flight = None

    def recall(self, moment: Moment) -> None:
        """The exchange that is under way is to begin anew, with what has been done since then as well."""
        flight, self._flight = self._flight, None
        assert flight is not None and flight.mixed is None
        self.begun -= 1
        self._taken[self._fragment(flight.message.round)] = flight.taken
        if not self._a_round_late(moment):  # else that work is lost
            self.local_steps += flight.local_steps

    def skip(self, moment: Moment) -> None:
        """The exchange that is under way, or due, has taken place without us. Our work counts in the next one."""
        if self._flight is not None:
            self.recall(moment)
        self.begun += 1

    def restart(self, outer: OuterState, begun: int, drift: torch.Tensor | None = None) -> None:
        """Goes on from another outer state, after so many exchanges.

        Args:
            outer: The state.
            begun: Exchanges that led to it.
            drift: By how much the local parameters already differ from it, after `local_steps` steps; None: not at all.
        """
        anchor = self._flat.rounded(outer.parameters)
        self._flat.write(outer.parameters if drift is None else anchor + drift)
        self.outer, self.begun = outer, begun
        self.local_steps = 0 if drift is None else self.local_steps
        self._done, self._taken, self._share, self._flight = self.local_steps, {}, None, None

    @property
    def drift(self) -> torch.Tensor:
        """By how much the local parameters differ from the outer ones."""
        return torch.sub(self._flat.read(), self._flat.rounded(self.outer.parameters))

    def land(self, moment: Moment, fresh: torch.Tensor | None = None) -> None:
        """Applies the result that has arrived.

        Args:
            moment: Now.
            fresh: What we would exchange now, if the caller knows it.
        """
        flight, self._flight = self._flight, None
        assert flight is not None and flight.mixed is not None
        message, mixed, after = flight.message, flight.mixed, flight.after
        fragment = self._fragment(message.round)
        if after is None:
            fresh = self._prepare(fragment, moment.lr).taken if fresh is None else fresh
            after = self._after(message, mixed, moment, fresh)
        self._merge(fragment, after)
        self.sender.sent(message, mixed)
        self._share = mixed.share
        self.rounds += 1

    def step_of(self, state: OuterState, mixed: Mixed, moment: Moment, fresh: torch.Tensor) -> OuterState:
        """The outer state after the exchange `moment.round`; a pure function of its arguments."""
        fragment = self._fragment(moment.round)
        return _replaced(state, fragment, self.recipe.outer.step(_part(state, fragment), mixed, moment, fresh))

    def _after(self, message: Message, mixed: Mixed, moment: Moment, fresh: torch.Tensor) -> OuterState:
        return self.step_of(self.outer, mixed, attrs.evolve(moment, round=message.round), fresh)

    def _merge(self, fragment: Selection, outer: OuterState) -> None:
        inner = self._flat.read()
        merged = self.recipe.merge.apply(
            fragment.take(inner), fragment.take(self.outer.parameters), fragment.take(outer.parameters)
        )
        self._flat.write(fragment.put(inner, merged))
        self.outer = outer

    def _prepare(self, fragment: Selection, lr: float) -> Message:
        anchor = self._flat.rounded(self.outer.parameters)
        local = Local(
            state=_part(self.outer, fragment),
            anchor=fragment.take(anchor),
            inner=fragment.take(self._flat.read()),
            lr=lr,
        )
        steps = self._done - self._taken.get(fragment, 0)
        return self.sender.prepare(local, Work(steps, steps * self._tokens_per_step), fragment.layout, self.begun + 1)

    def _fragment(self, round: int) -> Selection:
        slices = self._flat.slices
        return select(slices, self.recipe.fragmenter.fragment(slices, round))

    def _a_round_late(self, moment: Moment) -> bool:
        """Whether a result is applied when the next exchange begins, and local steps begin at the outer parameters."""
        policy = self.recipe.policy
        if policy.delay == 0 or self.recipe.payload.settled:
            return False
        return policy.delay >= policy.steps(attrs.evolve(moment, round=2))

    def state_dict(self) -> dict[str, Any]:
        """All of it but the local parameters, and what is under way only if its result is here."""
        saved: dict[str, Any] = {
            "parameters": self.outer.parameters,
            "buffers": dict(self.outer.buffers),
            "rounds": self.rounds,
            "local_steps": self.local_steps,
            "begun": self.begun,
            "taken": [(list(fragment.places), done - self._done) for fragment, done in self._taken.items()],
            "memory": self.sender.state_dict(),
            "share": self._share,
        }
        if self._flight is not None and self._flight.mixed is not None:
            message, mixed = self._flight.message, self._flight.mixed
            saved["flight"] = {
                "taken": message.taken,
                "values": message.values,
                "weight": message.weight,
                "memory": dict(message.memory if mixed.memory is None else mixed.memory),
                "round": message.round,
                "mean": mixed.mean,
                "own": mixed.own,
                "share": mixed.share,
            }
        return saved

    def own_state(self) -> dict[str, torch.Tensor]:
        """What this peer remembers for itself, by name: with this, and an outer state, it can go on.

        Where all peers have one outer state, that is what exchanges have left out; else also what is not applied yet.
        """
        memory = self.sender.state_dict()
        own = {f"memory.{name}\n{key}": values for key, kept in memory.items() for name, values in kept.items()}
        if self.recipe.shared or self._share is None:
            return own
        own["share"] = torch.tensor(self._share, dtype=torch.float64)
        if self._flight is not None and self._flight.mixed is not None:
            message, mixed = self._flight.message, self._flight.mixed
            after = message.memory if mixed.memory is None else mixed.memory
            numbers = torch.tensor([message.round, message.weight, mixed.share], dtype=torch.float64)
            flight = {"taken": message.taken, "values": message.values, "mean": mixed.mean, "own": mixed.own}
            # Copies, as they may be the same tensors.
            own |= {f"flight.{name}": values.clone() for name, values in {**flight, "numbers": numbers}.items()}
            own |= {f"flight.memory.{name}": values.clone() for name, values in after.items()}
        return own

    def load_own_state(self, own: Mapping[str, torch.Tensor]) -> None:
        """Takes back what `own_state` returned."""
        memory: dict[str, dict[str, torch.Tensor]] = {}
        for name in own:
            if name.startswith("memory."):
                kept, _, key = name.removeprefix("memory.").partition("\n")
                memory.setdefault(key, {})[kept] = own[name]
        self.sender.load_state_dict(memory)
        self._share = float(own["share"]) if "share" in own else None
        if "flight.numbers" in own:
            number, weight, share = own["flight.numbers"].tolist()
            prefix = "flight.memory."
            after = {name.removeprefix(prefix): values for name, values in own.items() if name.startswith(prefix)}
            tensors = {name: own[f"flight.{name}"] for name in ("taken", "values", "mean", "own")}
            fields = {"round": int(number), "weight": weight, "share": share, "memory": after}
            self._flight = self._saved_flight({**tensors, **fields})

    def load_state_dict(self, saved: Mapping[str, Any], outer: OuterState) -> None:
        """Takes back what `state_dict` returned, with its outer state."""
        self.outer, self.rounds, self.local_steps = outer, saved["rounds"], saved["local_steps"]
        self.begun, self._done, self._share = saved["begun"], 0, saved["share"]
        self._taken = {select(self._flat.slices, places): done for places, done in saved["taken"]}
        self.sender.load_state_dict(saved["memory"])
        self._flight = self._saved_flight(saved["flight"]) if "flight" in saved else None

    def _saved_flight(self, saved: Mapping[str, Any]) -> _Flight:
        fields = {key: saved[key] for key in ("taken", "values", "weight", "memory", "round")}
        message = Message(**fields, layout=self._fragment(saved["round"]).layout)
        return _Flight(message, 0, 0, Mixed(mean=saved["mean"], own=saved["own"], members=(), share=saved["share"]))


def _part(state: OuterState, fragment: Selection) -> OuterState:
    """The outer state of one fragment."""
    return OuterState(
        fragment.take(state.parameters), {name: fragment.take(buffer) for name, buffer in state.buffers.items()}
    )


def _replaced(state: OuterState, fragment: Selection, part: OuterState) -> OuterState:
    """The outer state with another one of a fragment."""
    buffers = {name: fragment.put(buffer, part.buffers[name]) for name, buffer in state.buffers.items()}
    return OuterState(fragment.put(state.parameters, part.parameters), buffers)

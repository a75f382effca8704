"""One peer's side of a method: its outer state, its local parameters, and what it has exchanged and not applied yet.

Who drives the training, a plain loop or the daemon, takes inner steps and carries out exchanges; in between it calls

    stepped()                   after each inner step
    begin(moment)               when an exchange is due: what to send
    send(message)               the exchange is under way
    arrived(mixed), lost()      what came of it, or that nothing did
    land(moment)                applies the result: at once, or when the policy's delay is over
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch

from optim.flat import FlatParameters, Selection, select
from optim.memory import checked, heard, joined_memory, numbers, split_memory, told
from optim.merges import Carry
from optim.recipe import Recipe
from optim.sender import Message, Sender
from optim.slots import Layout, Local, Mixed, Moment, Work
from optim.standing import told_of
from optim.state import OuterState
from protocol.errors import SettingsError
from protocol.identity import PeerId
from protocol.plan import MAX_WEIGHT


@attrs.define(eq=False)
class _Flight:
    """An exchange from its beginning until its result is applied."""

    message: Message
    kept: bool
    """Whether the local parameters still have what it brings: else they went on from the outer ones."""
    local_steps: int = 0
    """Inner steps between the exchange before and this one."""
    mixed: Mixed | None = None
    after: OuterState | None = None


class Replica:
    """The state of one peer between exchanges.

    Args:
        method: The recipe.
        flat: The parameters of the model that is trained locally; the outer state starts from their values.
        tokens_per_step: What one inner step counts for.
        in_all: Whether a condition holds in all processes that are one peer.
    """

    def __init__(
        self,
        method: Recipe,
        flat: FlatParameters,
        *,
        tokens_per_step: int = 1,
        in_all: Callable[[bool], bool] = bool,
    ) -> None:
        self.recipe = method
        self.outer: OuterState = method.outer.init(flat.read())
        """As far as results have been applied."""
        self.rounds = 0
        """Exchanges whose result was applied."""
        self.begun = 0
        """Exchanges that were sent."""
        self.local_steps = 0
        """Inner steps since the last of them."""
        self.history = bytes(16)
        """A digest of who contributed to each of the exchanges whose result was applied."""
        self.sender = Sender(method, in_all)
        self._flat, self._tokens_per_step = flat, tokens_per_step
        self._flight: _Flight | None = None
        self._kept = True  # what the last message that was prepared brings, see `_Flight`
        self._share: float | None = None  # ours of the last mean
        self._load = 1.0  # of the next exchange
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

    @property
    def share(self) -> float | None:
        """Ours of the last mean that was applied; None before the first."""
        return self._share

    @property
    def load(self) -> float:
        """How much the next exchange will send, as a share of what the first one has sent."""
        return self._load

    def stepped(self) -> None:
        """An inner step has been taken."""
        self.local_steps += 1
        self._done += 1

    def begin(self, moment: Moment) -> Message:
        """What to send in the next exchange. The result of the one before, which must be here, is applied first."""
        fragment = self.fragment(self.begun + 1)
        self._kept = self.waits or not self._starts_over(moment)
        if self._flight is not None and self._kept:
            self.land(moment)
        message = self._prepare(fragment, moment.lr)
        if self._flight is not None:
            self.land(moment, message.taken)
        elif self._share is not None and self.recipe.outer.ahead:
            none = torch.zeros_like(message.taken)
            nobody = Mixed(mean=none, own=none, members=(), share=self._share)
            self._merge(fragment, self._after(message, nobody, moment, message.taken))
        elif not self._kept:
            self._merge(fragment, self.outer)  # what was done comes back with the result
        return message

    def send(self, message: Message) -> None:
        """This message, of which `begin` has told, is under way."""
        self._flight = _Flight(message, self._kept, self.local_steps)
        self.begun += 1
        self._taken[self.fragment(message.round)] = self._done
        self.local_steps = 0

    def pass_over(self) -> None:
        """The turn of a fragment passes. What was done is part of what its next exchange brings."""
        self.begun += 1
        self.local_steps = 0

    def arrived(self, mixed: Mixed, after: OuterState | None = None) -> None:
        """What came of the exchange that is under way. `after`: the outer state that follows from it, if known.

        What it has left out is remembered from now on, as it is part of the next one.
        """
        assert self._flight is not None
        self._flight.mixed, self._flight.after = mixed, after
        self.sender.sent(self._flight.message, mixed)

    def lost(self) -> None:
        """Nothing came of the exchange that is under way, and nothing will. It was one all the same."""
        flight, self._flight = self._flight, None
        assert flight is not None
        self._count_again(flight)

    def recall(self) -> None:
        """The exchange that is under way is to begin anew, with what has been done since then as well."""
        flight, self._flight = self._flight, None
        assert flight is not None and flight.mixed is None
        self.begun -= 1
        self._count_again(flight)
        if flight.kept:
            self.local_steps += flight.local_steps

    def skip(self) -> None:
        """The exchange that is under way, or due, has taken place without us. Our work counts in the next one."""
        if self._flight is not None:
            self.recall()
        self.begun += 1

    def overheard(self, mixing: Callable[[Message], Mixed], moment: Moment) -> None:
        """Applies an exchange that others have had without us, before ours. All that was done here stays, and is due.

        `mixing` tells what came of it, to who brings such a message. What arrived before is applied first.
        """
        if self._flight is not None and self.has_arrived:
            self.land(moment)
        elif self._flight is not None:
            self.recall()
        message = self.nothing(self.begun + 1, moment.lr)
        mixed = mixing(message)
        self._merge(self.fragment(message.round), self._after(message, mixed, moment, message.taken), carry=True)
        self.history = told_of(self.history, message.round, mixed.members)
        self.begun, self.rounds = self.begun + 1, self.rounds + 1

    def _count_again(self, flight: _Flight) -> None:
        """What an exchange brought did not count. If it is not lost, it counts in the fragment's next one."""
        if flight.kept:
            self._taken[self.fragment(flight.message.round)] -= flight.message.steps

    def restart(self, outer: OuterState, begun: int, drift: torch.Tensor | None = None) -> None:
        """Goes on from another outer state, after so many exchanges.

        Args:
            outer: The state.
            begun: Exchanges that led to it.
            drift: By how much the local parameters already differ from it, for what has not been exchanged yet; None:
                not at all.
        """
        if drift is None:
            self._flat.write(outer.parameters)
            self.local_steps, self._done, self._taken = 0, 0, {}
        else:
            self._flat.write(self._flat.rounded(outer.parameters) + drift)
        self.outer, self.begun = outer, begun
        self._flight, self._share, self._load = None, None, 1.0

    def start_over(self, moment: Moment) -> None:
        """Gives up what was done since the last exchange began: it is no good. A result that is here is applied."""
        if self._flight is not None and self._flight.mixed is not None:
            self.land(moment, self._unmoved(self._flight.message))
        self._flat.write(self.outer.parameters)
        self.local_steps, self._done, self._taken, self._flight = 0, 0, {}, None

    def settle(self, moment: Moment) -> None:
        """Applies the result that has arrived, before its time. What was done meanwhile is still to be exchanged."""
        flight = self._flight
        assert flight is not None
        if flight.kept:  # it is blended in as it would be later
            self.land(moment)
            return
        drift = self.drift
        self.land(moment, self._unmoved(flight.message))
        self._flat.write(self._flat.rounded(self.outer.parameters) + drift)

    def _unmoved(self, sent: Message) -> torch.Tensor:
        """What we would exchange now if nothing had been done since that was sent."""
        return sent.taken if self.recipe.payload.settled else torch.zeros_like(sent.taken)

    def renew(self) -> None:
        """Somebody comes who has the outer state, and nothing else that peers have in common: all do without it."""
        self.sender.renew()
        self._load = 1.0

    @property
    def drift(self) -> torch.Tensor:
        """By how much the local parameters differ from the outer ones."""
        return torch.sub(self._flat.read(), self._flat.rounded(self.outer.parameters))

    def land(self, moment: Moment, fresh: torch.Tensor | None = None) -> None:
        """Applies the result that has arrived. If it was made without us, what we brought is kept for the next one.

        Args:
            moment: Now.
            fresh: What we would exchange now, if the caller knows it.
        """
        flight, self._flight = self._flight, None
        assert flight is not None and flight.mixed is not None
        message, mixed, after = flight.message, flight.mixed, flight.after
        fragment = self.fragment(message.round)
        if after is None:
            fresh = self._prepare(fragment, moment.lr).taken if fresh is None else fresh
            after = self._after(message, mixed, moment, fresh)
        unheard = message.weight > 0 and mixed.share == 0
        if unheard:
            self._count_again(flight)
        self._merge(fragment, after, carry=unheard and flight.kept)
        self._share, self._load = mixed.share, mixed.load
        self.history = told_of(self.history, message.round, mixed.members)
        self.rounds += 1

    def step_of(self, state: OuterState, mixed: Mixed, moment: Moment, fresh: torch.Tensor) -> OuterState:
        """The outer state after the exchange `moment.round`, and those before it that we have missed.

        A pure function of its arguments. Of an exchange to which nobody contributed, nothing comes.
        """
        fragment = self.fragment(moment.round)
        part = _part(state, fragment)
        for one in (*mixed.missed, mixed):
            if one.members or one.share > 0:
                part = self.recipe.outer.step(part, one, moment, fresh)
        return _replaced(state, fragment, part)

    def _after(self, message: Message, mixed: Mixed, moment: Moment, fresh: torch.Tensor) -> OuterState:
        return self.step_of(self.outer, mixed, attrs.evolve(moment, round=message.round), fresh)

    def _merge(self, fragment: Selection, outer: OuterState, *, carry: bool = False) -> None:
        """Goes on from this outer state. `carry`: with all that was done locally, as it is not in it."""
        inner = self._flat.read()
        merge = Carry() if carry else self.recipe.merge
        merged = merge.apply(
            fragment.take(inner), fragment.take(self.outer.parameters), fragment.take(outer.parameters)
        )
        self._flat.write(fragment.put(inner, merged))
        self.outer = outer

    def _prepare(self, fragment: Selection, lr: float) -> Message:
        return self.sender.prepare(self._local(fragment, lr), self._work(fragment), fragment.layout, self.begun + 1)

    def _local(self, fragment: Selection, lr: float) -> Local:
        return Local(
            state=_part(self.outer, fragment),
            anchor=fragment.take(self._flat.rounded(self.outer.parameters)),
            inner=fragment.take(self._flat.read()),
            lr=lr,
        )

    def weight(self, fragment: Selection) -> float:
        """What we would count if a fragment were exchanged now, and our values are sound."""
        return self.recipe.weighting.weight(self._work(fragment))

    def _work(self, fragment: Selection) -> Work:
        """What was done since a fragment was exchanged last."""
        steps = self._done - self._taken.get(fragment, 0)
        return Work(steps, steps * self._tokens_per_step)

    def turns(self, moment: Moment) -> Iterator[Message]:
        """What to send, once for each fragment, to get what others have made of it without bringing anything."""
        seen: set[Selection] = set()
        while (fragment := self.fragment(len(seen) + 1)) not in seen:
            seen.add(fragment)
            yield self.nothing(len(seen), moment.lr)

    def nothing(self, round: int, lr: float) -> Message:
        """A message that takes part in an exchange without bringing anything."""
        message = self._prepare(self.fragment(round), lr)
        return attrs.evolve(message, values=torch.zeros_like(message.values), weight=0.0, round=round)

    def caught_up(self, message: Message, mixed: Mixed, moment: Moment) -> None:
        """Applies what came of one of `turns`."""
        self._merge(self.fragment(message.round), self._after(message, mixed, moment, message.taken))

    def fragment(self, round: int) -> Selection:
        """The part of the model that takes its turn in an exchange."""
        return select(self._flat.slices, self.recipe.fragmenter.fragment(self._flat.whole, round))

    def _starts_over(self, moment: Moment) -> bool:
        """Whether local steps begin at the outer parameters when what they come to is on its way.

        They do if all of the model is exchanged, and the result is applied when the next exchange begins.
        """
        policy = self.recipe.policy
        if policy.delay == 0 or self.recipe.payload.settled or len(self.fragment(1).places) < len(self._flat.slices):
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
            "load": self._load,
            "history": self.history.hex(),
        }
        if self._flight is not None and self._flight.mixed is not None:
            message = self._flight.message
            saved["flight"] = {
                "taken": message.taken,
                "values": message.values,
                "weight": message.weight,
                "round": message.round,
                "steps": message.steps,
                "kept": self._flight.kept,
                "mixed": _saved(self._flight.mixed),
            }
        return saved

    def own_state(self) -> dict[str, torch.Tensor]:
        """What this peer remembers for itself, by name: with this, and an outer state, it can go on.

        Where all peers have one outer state, that is what exchanges have left out; else also what is not applied yet.
        """
        own = joined_memory(self.sender.state_dict())
        if self._load != 1.0:
            own["load"] = torch.tensor(self._load, dtype=torch.float64)
        if self.recipe.shared or self._share is None:
            return own
        own["share"] = torch.tensor(self._share, dtype=torch.float64)
        if self._flight is not None and self._flight.mixed is not None:
            message = self._flight.message
            own["flight.taken"], own["flight.values"] = message.taken.clone(), message.values.clone()
            own["flight.message"] = torch.tensor([message.round, message.weight], dtype=torch.float64)
            own |= told(self._flight.mixed, "flight.")
        return own

    def load_own_state(self, own: Mapping[str, torch.Tensor]) -> None:
        """Takes back what `own_state` returned.

        Raises:
            SettingsError: It belongs to another model or method, or is damaged.
        """
        left = dict(own)
        self.sender.load_state_dict(split_memory(left), self._fragments())
        load, share = left.pop("load", None), left.pop("share", None)
        self._load = 1.0 if load is None else numbers("the load", load, (0.0, 1.0))[0]
        self._share = None if share is None else numbers("our share", share, (0.0, 1.0))[0]
        if "flight.message" in left:
            sent = left.pop("flight.message")
            _, weight = numbers("flight.message", sent, (self.begun, self.begun), (0.0, MAX_WEIGHT))
            self._flight = self._loaded_flight(left, weight)
        if left:
            raise SettingsError(f"{min(left)!r} is nothing that this method remembers")

    def _loaded_flight(self, own: dict[str, torch.Tensor], weight: float) -> _Flight:
        """The exchange that was sent last; taken out of what was saved."""
        fragment = self.fragment(self.begun)
        length = len(self.recipe.payload.take(self._local(fragment, 0.0), {})[0])
        message = Message(
            taken=checked("flight.taken", own.pop("flight.taken", None), (length,)),
            values=checked("flight.values", own.pop("flight.values", None), (length,)),
            weight=weight,
            memory={},
            layout=fragment.layout,
            round=self.begun,
            steps=0,
        )
        return _Flight(message, kept=False, mixed=heard(own, "flight.", length))  # the local parameters were not saved

    def _fragments(self) -> Iterator[tuple[Local, Layout, Layout]]:
        """Of each fragment what would be exchanged now, its layout here, and that of all of it."""
        seen: set[Selection] = set()
        while (fragment := self.fragment(len(seen) + 1)) not in seen:
            seen.add(fragment)
            yield self._local(fragment, 0.0), fragment.layout, select(self._flat.whole, fragment.places).layout

    def load_state_dict(self, saved: Mapping[str, Any], outer: OuterState) -> None:
        """Takes back what `state_dict` returned, with its outer state.

        Raises:
            SettingsError: It belongs to another model or method, or is damaged.
        """
        if lacking := {"memory", "taken", "begun", "rounds", "local_steps", "share", "load", "history"} - saved.keys():
            raise SettingsError(f"the saved outer state has no {min(lacking)!r}")
        flight = self._saved_flight(saved["flight"]) if "flight" in saved else None
        self.sender.load_state_dict(saved["memory"], self._fragments())
        self.outer, self.rounds, self.local_steps = outer, saved["rounds"], saved["local_steps"]
        self.begun, self._done, self._share = saved["begun"], 0, saved["share"]
        self._load, self.history = saved["load"], bytes.fromhex(saved["history"])
        self._taken = {select(self._flat.slices, places): done for places, done in saved["taken"]}
        self._flight = flight

    def _saved_flight(self, saved: Mapping[str, Any]) -> _Flight:
        fragment = self.fragment(saved["round"])
        length = len(self.recipe.payload.take(self._local(fragment, 0.0), {})[0])
        message = Message(
            taken=checked("what was sent", saved["taken"], (length,)),
            values=checked("what was sent", saved["values"], (length,)),
            weight=saved["weight"],
            memory={},
            layout=fragment.layout,
            round=saved["round"],
            steps=saved["steps"],
        )
        return _Flight(message, saved["kept"], mixed=_loaded(saved["mixed"], length))


def _saved(mixed: Mixed) -> dict[str, Any]:
    """All of it but the memory, which is kept elsewhere."""
    return {
        "mean": mixed.mean,
        "own": mixed.own,
        "share": mixed.share,
        "load": mixed.load,
        "members": [member.hex() for member in mixed.members],
        "missed": [_saved(each) for each in mixed.missed],
    }


def _loaded(saved: Mapping[str, Any], length: int) -> Mixed:
    return Mixed(
        mean=checked("a result that is not applied yet", saved["mean"], (length,)),
        own=checked("our part of a result", saved["own"], (length,)),
        share=saved["share"],
        load=saved["load"],
        members=tuple(PeerId(bytes.fromhex(member)) for member in saved["members"]),
        missed=tuple(_loaded(each, length) for each in saved["missed"]),
    )


def _part(state: OuterState, fragment: Selection) -> OuterState:
    """The outer state of one fragment."""
    return OuterState(
        fragment.take(state.parameters), {name: fragment.take(buffer) for name, buffer in state.buffers.items()}
    )


def _replaced(state: OuterState, fragment: Selection, part: OuterState) -> OuterState:
    """The outer state with another one of a fragment."""
    buffers = {name: fragment.put(buffer, part.buffers[name]) for name, buffer in state.buffers.items()}
    return OuterState(fragment.put(state.parameters, part.parameters), buffers)

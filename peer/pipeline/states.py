"""Where a peer has the state of a stage from that it is to serve."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from random import Random

import attrs
import torch
import trio

from optim.swarm.server import StageServer
from optim.swarm.stages import Chain, Stage, cut
from optim.swarm.state import Form, StageState
from peer.node import Compute
from peer.pipeline.copies import Copies
from peer.pipeline.crew import Crew
from peer.pipeline.transfer import Fetcher
from protocol.errors import ShoalError
from protocol.identity import PeerId

RETRY = 0.5
"""Seconds until a state that could not be had is asked for again, unless the standings change earlier."""

LOST = 5.0
"""Seconds for which nobody else has to have had a state before ours is good enough, though it is old."""


class States:
    """Finds the states of stages.

    Args:
        fetcher: Fetches states of others.
        crew: Who does what.
        copies: Those that peers keep of other stages.
        chain: Makes the model.
        initial: Its first values, by name; None: those that it has.
        device: Where stages are to be.
        stages: How many it has.
        compute: Runs what takes long.
        rng: Spreads load.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        *,
        crew: Crew,
        copies: Copies,
        chain: Callable[[], Chain],
        initial: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None,
        device: str,
        stages: int,
        compute: Compute,
        rng: Random,
    ) -> None:
        self._fetcher, self._crew, self._copies = fetcher, crew, copies
        self._chain, self._stages, self._compute, self._rng = chain, stages, compute, rng
        self._initial, self._device = initial, device
        self.forms: list[Form] = []
        """What the states of all stages look like, once one has been made."""

    async def make(self, number: int) -> Stage:
        """A stage with its first values."""
        return await self._compute(self._make, number)

    def _make(self, number: int) -> Stage:
        every = cut(self._chain(), self._stages)
        self.forms = [Form.of(each) for each in every]
        stage = every[number]
        if self._initial is not None:
            names = stage.model.state_dict().keys()
            stage.load({name: values for name, values in self._initial() if name in names})
        return stage.to(self._device)

    async def find(
        self,
        server: StageServer,
        number: int,
        *,
        over: Callable[[], bool],
        old: StageState | None = None,
        lost: bool = False,
    ) -> StageState | None:
        """The state of a stage: from another server, from a copy, or the first one.

        Args:
            server: Of the stage that `make` has made, with its first values unless `old` is given.
            number: Its number.
            over: Whether there is no use in looking any longer.
            old: One that is better than nothing if no other peer has any.
            lost: Whether that leads nowhere, as other stages are at a later step. Then others of the stage that are no
                further are of no help, and have to find that out before anybody goes on from an old state: each
                would otherwise take it from another one, for ever.

        Returns:
            None if it is over before one was found.
        """
        began = trio.current_time()
        while True:
            changed = self._crew.changed
            patient = old is not None and trio.current_time() < began + LOST
            state = await self._look(number, server, old, patient=patient, lost=lost)
            if state is not None or (over() and not self._others(number)):
                return state
            with trio.move_on_after(RETRY):
                await changed.wait()

    async def _revive(self, number: int, old: StageState, kinds: Mapping[str, bool]) -> StageState | None:
        """An old state of a stage, for the step that the others are at; None if that cannot be said at the moment.

        What other stages use as well is theirs: else the copies would be different for ever.
        """
        revived = attrs.evolve(old, step=self._crew.furthest, mean=None, tied={})
        tied = {other: form.tied for other, form in enumerate(self.forms) if form.tied}
        if number not in tied:
            return revived
        for other in sorted(tied.keys() - {number}):
            state = await self._fetch(other, kinds)
            if state is not None:
                return _with_tied(revived, tied[number], state, tied[other]) if state.step == revived.step else None
        return revived if number == min(tied) else None  # the others follow the first, if all are lost

    async def _look(
        self, number: int, server: StageServer, old: StageState | None, *, patient: bool, lost: bool
    ) -> StageState | None:
        crew, others = self._crew, self._others(number)
        # A step that nobody else is near to is one of a history that the others do not share.
        least = old.step + lost if old is not None and crew.is_credible(crew.peer, old.step) else 0
        if any(crew.standings[peer].step >= least for peer in others):
            return await self._fetch(number, server.kinds, least)
        if not crew.furthest and old is None:
            # Nobody has made a step yet, unless it is somebody who has not told us: who founds a run with a checkpoint
            # has its states, and says so once all whom it waits for are there.
            return StageState(0, server.stage.state(), {}) if crew.is_acquainted else None
        if patient or (lost and others) or not self._is_next(number):
            return None
        found = [state for state in (old, await self._copies.find(number, server.kinds)) if state is not None]
        if not found:
            return None
        return await self._revive(
            number, max(found, key=lambda state: (crew.is_credible(crew.peer, state.step), state.step)), server.kinds
        )

    def _others(self, number: int) -> list[PeerId]:
        servers, trust = self._crew.servers(number), self._fetcher.trust
        return [peer for peer in servers if peer != self._crew.peer and peer in trust]

    def _is_next(self, number: int) -> bool:
        """Whether it is for us to revive the stage, of all who are to serve it: the others take it from us then."""
        standings, trust = self._crew.standings.items(), self._fetcher.trust
        there = {peer: each.step for peer, each in standings if each.stage == number and peer in trust}
        return self._crew.peer == min(there, key=lambda peer: (-there[peer], peer))

    async def _fetch(self, number: int, kinds: Mapping[str, bool], least: int = 0) -> StageState | None:
        """From a server of the stage that is at least at a step, if one has it and sends it: the furthest first."""
        steps = {peer: self._crew.standings[peer].step for peer in self._others(number)}
        others = [peer for peer, step in steps.items() if step >= least]
        self._rng.shuffle(others)
        for peer in sorted(others, key=lambda peer: -steps[peer]):
            state = await self._fetch_from(peer, number, kinds)
            if state is not None and state.step >= least:
                return state
        return None

    async def _fetch_from(self, peer: PeerId, number: int, kinds: Mapping[str, bool]) -> StageState | None:
        with contextlib.suppress(ShoalError):
            state, _ = await self._fetcher.state(peer, number, self.forms[number], kinds)
            # Of a step that it cannot be at, it is none to go on from.
            return state if self._crew.is_credible(peer, state.step) else None
        return None


def _with_tied(
    state: StageState, names: Mapping[str, str], other: StageState, other_names: Mapping[str, str]
) -> StageState:
    """A state with the values of another stage for what both use."""
    at_other = {first: name for name, first in other_names.items()}
    places = {name: at_other[first] for name, first in names.items() if first in at_other}

    def replaced(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        taken = {name: theirs[place] for name, place in places.items() if place in theirs}
        return {**{name: values for name, values in ours.items() if name not in places}, **taken}

    def of_all_kinds(
        ours: Mapping[str, Mapping[str, torch.Tensor]], theirs: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> dict[str, dict[str, torch.Tensor]]:
        kinds = sorted(ours.keys() | theirs.keys())
        return {kind: replaced(ours.get(kind, {}), theirs.get(kind, {})) for kind in kinds}

    return attrs.evolve(
        state,
        model=replaced(state.model, other.model),
        inner=of_all_kinds(state.inner, other.inner),
        outer=of_all_kinds(state.outer, other.outer),
    )

"""Who does what in a pipeline: each peer tells all others of its standing, and hears theirs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import attrs
import trio

from peer.pipeline.claims import is_credible
from peer.pipeline.messages import Hello, Standing, Welcome
from protocol.endpoint import Endpoint
from protocol.errors import RequestRefused, ShoalError
from protocol.identity import PeerId
from protocol.roster import Roster
from protocol.stream import Stream

RETRY = 0.5
"""Seconds until a member that did not hear us is told again."""

MOST_GONE = 256
"""Peers that were there, and are remembered."""


class Members(Roster, Protocol):
    """Who is there."""

    @property
    def members(self) -> Collection[PeerId]:
        """All who are connected and take part in the run, ourselves included."""

    async def changes(self) -> None:
        """Returns when somebody has come or gone after this call, or may have."""


class Crew:
    """The standings of a run's members. `run` must run.

    Args:
        endpoint: Carries everything.
        run_id: 32 bytes.
        mesh: Who is there.
        standing: Ours, to begin with.
        stages: How many the model has.
        last: The step that ends the run; 0 if none does.
    """

    def __init__(
        self, endpoint: Endpoint, run_id: bytes, mesh: Members, standing: Standing, *, stages: int, last: int
    ) -> None:
        self._endpoint, self._run, self._mesh = endpoint, run_id, mesh
        self._stages, self._last = stages, last
        self.own = standing
        self._claims: dict[PeerId, Standing] = {}  # what they say
        self._others: dict[PeerId, Standing] = {}  # the last of it that can be
        self._gone: dict[PeerId, Standing] = {}  # of those that are not there any more
        self._reached = standing.step
        self._announced = trio.Event()
        self._heard_by: dict[PeerId, int] = {}  # which of our standings they have
        self.changed = trio.Event()
        """Set, and replaced, when a standing changes, ours included, or somebody comes or goes."""

    @property
    def peer(self) -> PeerId:
        """Who we are."""
        return self._endpoint.peer_id

    @property
    def furthest(self) -> int:
        """The last step that anybody has been at, as far as we know."""
        for step in (max(self._reached, self.own.step), self._reached):
            if self.is_credible(self.peer, step):
                return step
        return max(each.step for each in self._others.values())

    @property
    def has_met(self) -> bool:
        """Whether anybody else has ever told us its standing."""
        return bool(self._others or self._gone)

    @property
    def is_acquainted(self) -> bool:
        """Whether all who are there have told us what they do."""
        return all(peer in self._claims for peer in self._mesh.members if peer != self.peer)

    @property
    def is_stuck_alone(self) -> bool:
        """Whether nobody else is there, and we cannot go on without."""
        return len(self._mesh.members) == 1 and not all(self.servers(stage) for stage in range(self._stages))

    def is_credible(self, peer: PeerId, step: int) -> bool:
        """Whether a peer may be at a step, by what all others say."""
        said = {self.peer: self.own, **self._claims}
        return is_credible(step, [each for other, each in said.items() if other != peer])

    def lags(self, step: int) -> bool:
        """Whether a server that is there, or has gone without a word, is not at a step yet."""
        gone = [each for each in self._gone.values() if not each.leaving]
        return any(each.stage is not None and each.step < step for each in [*self.standings.values(), *gone])

    @property
    def standings(self) -> dict[PeerId, Standing]:
        """Of all who are there and have told theirs, ourselves included."""
        members = self._mesh.members
        return {self.peer: self.own} | {peer: self._others[peer] for peer in members if peer in self._others}

    @property
    def heeded(self) -> dict[PeerId, Standing]:
        """Those of them that count: not of others who are shunned."""
        there = self.standings
        accused = {peer for each in there.values() for peer in each.distrusts} - {self.peer}
        return {peer: each for peer, each in there.items() if peer not in accused or not self.is_shunned(peer)}

    def is_shunned(self, peer: PeerId) -> bool:
        """Whether most of those who can know, and at least two, distrust a peer: who trains, or serves its stage too.

        Of two that distrust each other, nobody can tell who is right.
        """
        others = self.standings
        there = others.pop(peer, None)
        trainers = [each for each in others.values() if each.trains_from is not None]
        servers = [each for each in others.values() if each.ready and there is not None and each.stage == there.stage]
        distrust = ([peer in each.distrusts for each in group] for group in (trainers, servers))
        return any(len(said) < 2 * sum(said) and sum(said) > 1 for said in distrust)

    def servers(self, stage: int) -> dict[PeerId, Standing]:
        """Of those who serve a stage and have its state, ourselves included; not of those who are shunned."""
        return {
            peer: standing
            for peer, standing in sorted(self.heeded.items())
            if standing.stage == stage and standing.ready
        }

    def trainers(self, step: int) -> list[PeerId]:
        """Those who lead the microbatches of a step, in order: who came during it only if there is nobody else.

        Nobody who is shunned: it may lead them through itself.
        """
        since = {peer: each.trains_from for peer, each in sorted(self.heeded.items()) if each.trains_from is not None}
        return [peer for peer, first in since.items() if first <= step] or list(since)

    def announce(self, **changes: Any) -> None:  # noqa: ANN401 - the fields of a standing
        """Changes our standing, and tells all members without waiting for any."""
        changed = attrs.evolve(self.own, **changes)
        if changed != self.own:
            self.own = attrs.evolve(changed, number=self.own.number + 1)
            if changed.ready:
                self._reached = max(self._reached, changed.step)
            self._review()
            self._announced.set()
            self._announced = trio.Event()
            self.notify()

    def fall_back(self, step: int) -> None:
        """We go on from an earlier step: what we had reached is of a history that the others do not share."""
        self._reached = step
        self._review()
        self.notify()

    def is_known(self, number: int, to: Collection[PeerId] | None = None) -> bool:
        """Whether all members have heard that standing of ours, or a later one, and we theirs as they heard it.

        Args:
            number: Of the standing.
            to: Only these.
        """
        others = set(self._mesh.members if to is None else to) - {self.peer}
        return all(self._heard_by.get(peer, -1) >= number for peer in others)

    def notify(self) -> None:
        """Wakes up those who wait for changes."""
        self.changed.set()
        self.changed = trio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for something that depends on the standings."""
        while not condition():
            await self.changed.wait()
        await trio.lowlevel.checkpoint()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Tells and hears, until cancelled."""
        told: set[PeerId] = set()
        with self._endpoint.serving(self._run, "", {Hello: self._on_hello}):
            async with trio.open_nursery() as nursery:
                task_status.started()
                while True:
                    members = set(self._mesh.members) - {self.peer}
                    for peer in members - told:
                        nursery.start_soon(self._tell, peer, told)
                    told |= members
                    for peer in self._claims.keys() - members:
                        del self._claims[peer]
                    for peer in self._others.keys() - members:
                        self._gone[peer] = self._others.pop(peer)
                    while len(self._gone) > MOST_GONE:
                        del self._gone[next(iter(self._gone))]
                    self._review()
                    for peer in self._heard_by.keys() - members:  # it forgets ours, too, and may be back in a moment
                        del self._heard_by[peer]
                    self.notify()
                    await self._mesh.changes()

    async def _tell(self, peer: PeerId, told: set[PeerId]) -> None:
        """Keeps one member up to date for as long as it is there."""
        try:
            while peer in self._mesh.members:
                announced, current = self._announced, self.own
                if current.number == self._heard_by.get(peer):
                    with trio.move_on_after(RETRY):  # it may be gone
                        await announced.wait()
                    continue
                try:
                    welcome = await self._endpoint.request(peer, Hello(self._run, current), Welcome)
                except ShoalError:
                    await trio.sleep(RETRY)
                    continue
                self._heard_by[peer] = current.number
                self._hear(peer, welcome.standing)
                if self.is_known(self.own.number):
                    self.notify()
        finally:
            told.discard(peer)
            self._heard_by.pop(peer, None)

    async def _on_hello(self, hello: Hello, stream: Stream) -> Welcome:
        if not self._mesh.knows(stream.peer):
            raise RequestRefused("say hello to the run first", code="not_a_member")
        if not self._can_be(hello.standing):
            raise RequestRefused("there is no such stage, or no such step, in this run", code="implausible")
        self._hear(stream.peer, hello.standing)
        return Welcome(self.own)

    def _can_be(self, standing: Standing) -> bool:
        stages = {*standing.copies, *(() if standing.stage is None else (standing.stage,))}
        return max(stages, default=0) < self._stages and (not self._last or standing.step <= self._last)

    def _hear(self, peer: PeerId, standing: Standing) -> None:
        known = self._claims.get(peer)
        new = self._mesh.knows(peer) and (known is None or known.number < standing.number)
        if new and self._can_be(standing):
            self._claims[peer] = standing
            self._review()
            self.notify()

    def _review(self) -> None:
        """Believes what has been said as far as it can be. Until then, what a peer said before holds."""
        for peer, claim in self._claims.items():
            if self.is_credible(peer, claim.step):
                self._others[peer] = claim
                self._gone.pop(peer, None)
                self._reached = max(self._reached, claim.step)


class StageRoster:
    """The servers of our stage, for the operations among them. Implements `protocol.roster.Roster`."""

    def __init__(self, crew: Crew, mesh: Members, stage: int) -> None:
        self._crew, self._mesh, self._stage = crew, mesh, stage

    def partners(self) -> Collection[PeerId]:
        able = set(self._mesh.partners())
        return [peer for peer in self._crew.servers(self._stage) if peer in able]

    def expected(self) -> Collection[PeerId]:
        return list(self._crew.servers(self._stage))

    def arriving(self) -> Collection[PeerId]:
        return self._mesh.arriving()

    def woken(self) -> bool:
        return self._mesh.woken()

    def knows(self, peer: PeerId) -> bool:
        return peer in self._crew.servers(self._stage)

    def doubt(self, peer: PeerId, seconds: float) -> None:
        self._mesh.doubt(peer, seconds)

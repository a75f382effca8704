"""Simulated peers that train: one round after the other, and whatever it takes to stay with the others."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from unittest import mock

import attrs
import torch
import trio

from protocol.codecs import CodecName, block_of, make_codec
from protocol.collective import Reduced
from protocol.endpoint import Limits
from protocol.errors import Behind, Fork, RoundAborted, ShoalError
from protocol.identity import PeerId
from protocol.member import Work
from protocol.plan import Plan, largest_part
from protocol.planner import Lines, scheduled
from protocol.ring import reference
from protocol.rounds import RoundEvent, Rounds
from protocol.transfer import Transfer
from protocol.vectors import vector_bytes
from tests.sim.swarm import SimulatedPeer, SimulatedSwarm, bits

RUN = hashlib.sha256(b"a simulated run").digest()
FOUNDED = bytes(32)


def next_digest(digest: bytes, reduced: Reduced) -> bytes:
    return hashlib.sha256(digest + reduced.plan.id + vector_bytes(reduced.mean)).digest()


class Trainer(SimulatedPeer):
    """One peer: trains for a while, takes part in a round, and so on; catches up when it is behind."""

    def __init__(self, swarm: Trainers, number: int, limits: Limits) -> None:
        super().__init__(swarm, number, limits)
        self.rng = random.Random(f"{swarm.seed}/{number}")
        self.events: list[RoundEvent] = []
        self.rounds = Rounds(
            self.endpoint,
            RUN,
            settings=swarm.times,
            roster=self,
            report=self._report,
            codec=swarm.codec,
        )
        self._begin, self.rounds._begin = self.rounds._begin, self._note
        self.revision = 0
        self.digest = FOUNDED
        self.chain = {0: FOUNDED}  # digest by revision, of the branch that this peer is on
        self.weight = 0.0  # accumulated over the branch, which decides between branches
        self.results: dict[int, Reduced] = {}  # by revision: what it reduced itself, or fetched
        self.reduced: list[Reduced] = []  # all that it got from rounds it took part in, on whatever branch
        self.adoptions = 0
        self.passed_over: set[PeerId] = set()  # connected, but no candidates for coordinating as far as this peer knows
        self.doubted: dict[PeerId, float] = {}  # until when; said to be ahead of us, but with nothing better
        self.rivals: list[PeerId] = []  # they have found that their branch is better than ours, and told us
        self.moved = trio.Event()

    def partners(self) -> Sequence[PeerId]:
        return [peer for peer in self.expected() if peer not in self.passed_over]

    def expected(self) -> Sequence[PeerId]:
        now = trio.current_time()
        return (self.id, *(peer for peer in self.endpoint.connected if self.doubted.get(peer, now) <= now))

    def _note(self, plan: Plan, work: Work) -> Transfer:
        """Begins an attempt, as the peer would, and remembers the plan: others may salvage from it."""
        self.swarm.plans[plan.id] = plan
        self.swarm.brought[plan.id, self.id] = work
        accepted = self.swarm.accepted.setdefault(plan.id, set())
        if any(other.id == self.id and other is not self for other in accepted):
            self.swarm.repeated.add(plan.id)
        accepted.add(self)
        return self._begin(plan, work)

    def values(self, revision: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * revision + self.number)
        return torch.randn(self.swarm.length, generator=generator)

    async def begin(self, nursery: trio.Nursery) -> None:
        await nursery.start(self.rounds.run)
        self.rounds.committed(self.revision, self.digest)

    async def act(self) -> None:
        await self.swarm.begin.wait()
        while True:
            await self.step()

    async def step(self) -> None:
        """One round."""
        while self.rivals:
            await self._adopt(self.rivals.pop())
        revision = self.revision + 1
        await self.swarm.train(self, revision)
        if self.revision >= revision:
            return
        try:
            reduced = await self.rounds.all_reduce(
                revision, self.values(revision), self.swarm.weight(self), digest=self.digest
            )
            self.reduced.append(reduced)
        except Behind as behind:
            try:
                reduced = await self.rounds.fetch_result(behind.peer, revision)
            except ShoalError:
                await self._adopt(behind.peer)
                return
            if reduced.plan.base != self.digest:
                await self._adopt(behind.peer)
                return
        except Fork as fork:
            await self._adopt(fork.peer)
            return
        except RoundAborted:
            await trio.sleep(1)
            return
        await self.outer_step()
        self._commit(reduced)

    async def outer_step(self) -> None:
        """What lies between having a result and committing it."""

    def _commit(self, reduced: Reduced) -> None:
        assert reduced.plan.revision == self.revision + 1
        assert reduced.plan.base == self.digest
        self.revision += 1
        self.weight += reduced.weight
        self.digest = self.chain[self.revision] = next_digest(self.digest, reduced)
        self.results[self.revision] = reduced
        self.rounds.committed(self.revision, self.digest)
        self._move()

    async def _adopt(self, holder: PeerId) -> None:
        """What the daemon does when it is far behind or on another branch: fetch the better state (here by magic).

        The heavier branch wins, ties go to the lower digest.
        """
        await trio.sleep(0.5)
        other = self.swarm.by_id(holder)
        if other.alive and self._is_better(other):
            self.weight = other.weight
            self.revision, self.digest, self.chain = other.revision, other.digest, dict(other.chain)
            self.results = {number: other.results[number] for number in other.results}
            self.rounds.adopted(self.revision, self.digest)
            self.adoptions += 1
            self._move()
        else:
            self.doubted[holder] = trio.current_time() + 5
            if other._is_better(self):
                other.rivals.append(self.id)  # daemons tell each other of their branches all the time

    def _is_better(self, other: Trainer) -> bool:
        if self.chain.get(other.revision) == other.digest:
            return False  # it is behind, or the same
        if other.chain.get(self.revision) == self.digest:
            return True
        return other.weight > self.weight or (other.weight == self.weight and other.digest < self.digest)

    def sleep_in_ring(self) -> Callable[[], None]:
        """From now on, this peer accepts plans but does nothing about them. Returns what undoes it."""
        original = self.rounds._begin

        def begin(plan, work):
            return self.rounds._carrying.make(plan, work)

        self.rounds._begin = begin

        def undo() -> None:
            self.rounds._begin = original

        return undo

    def _move(self) -> None:
        self.moved.set()
        self.moved = trio.Event()

    def _report(self, event: RoundEvent) -> None:
        self.events.append(event)
        self._move()

    async def enter(self, revision: int) -> None:
        """Waits until this peer takes part in an attempt at a revision."""
        while not any(event.event == "round_started" and event.round == revision for event in self.events):
            await self.moved.wait()

    async def reach(self, revision: int) -> None:
        while self.revision < revision:
            await self.moved.wait()


class Trainers(SimulatedSwarm[Trainer]):
    """Peers that make rounds, and what holds whatever happens to them."""

    def __init__(
        self,
        count: int,
        *,
        length: int = 23,
        codec: CodecName = "fp32",
        schedule: str = "",
        limits: Limits | None = None,
        **options,
    ) -> None:
        self.codec, self.length, self.schedule, self.limits = codec, length, schedule, limits or Limits()
        self.begin = trio.Event()
        self.training_time: Callable[[Trainer, int], float] = lambda peer, revision: 1.0 + 0.01 * peer.number
        self.weight: Callable[[Trainer], float] = lambda peer: float(peer.number + 1)
        self.plans: dict[bytes, Plan] = {}
        """All that anybody has carried out, by id."""
        self.brought: dict[tuple[bytes, PeerId], Work] = {}
        """What everybody has brought to each plan."""
        self.accepted: dict[bytes, set[Trainer]] = {}
        """Who has begun to carry out each plan."""
        self.repeated: set[bytes] = set()
        """Plans that a peer has made again after its death, of which it knows nothing: it need not bring the same, so
        there are two results. Their digests differ, and nobody else can have taken part in both, see `Ready.ballot`."""
        self.last: int | None = None
        """The last revision that peers make; afterwards they rest."""
        super().__init__(count, run_id=RUN, **options)

        self._chance = random.Random(f"{self.seed}/plans")

    def arranged(self) -> AbstractContextManager[object]:
        return mock.patch("protocol.coordinator.scheduled", self.scheduled)

    def scheduled(self, plan: Plan, lines: Lines) -> Plan:
        """What coordinators make of a plan: what the planner says, or as this swarm was told."""
        if not self.schedule or plan.operation != "reduce":
            return scheduled(plan, lines)
        chosen = self._chance.choice(["ring", "direct"]) if self.schedule == "any" else self.schedule
        if plan.codec != "fp32":
            chosen = "direct"
        blocks = ()
        if self.schedule == "any" and self._chance.random() < 0.6:
            unit = block_of(plan.codec)
            cuts = sorted(
                min(unit * self._chance.randint(0, -(-plan.free // unit)), plan.free) for _ in plan.members[1:]
            )
            blocks = tuple(stop - start for start, stop in itertools.pairwise([0, *cuts, plan.free]))
            if max(blocks) > largest_part(len(blocks)) * plan.free:
                blocks = ()
        return attrs.evolve(plan, schedule=chosen, blocks=blocks)

    def make(self, number: int) -> Trainer:
        return Trainer(self, number, self.limits)

    async def train(self, peer: Trainer, revision: int) -> None:
        """Inner steps: take their time, but stop at the deadline that a coordinator has set."""
        if self.last is not None and revision > self.last:
            await trio.sleep_forever()
        end = trio.current_time() + self.training_time(peer, revision)
        while trio.current_time() < end:
            opened = peer.rounds.opened(revision)
            if opened is not None and trio.current_time() >= opened:
                return
            await trio.sleep(min(0.25, end - trio.current_time()))

    async def progress(self, revision: int, *, within: float) -> None:
        """Waits until every living peer has committed a revision."""
        with trio.fail_after(within):
            for peer in self.alive:
                await peer.reach(revision)

    async def rest(self, revision: int, *, within: float) -> None:
        """Waits until every living peer has committed the last revision, and nothing is left over from any round."""
        self.last = revision
        await self.progress(revision, within=within)
        await trio.sleep(60)
        for peer in self.alive:
            assert not peer.rounds.statistics().busy, peer.rounds.statistics()
            for connection in peer.endpoint._connections:
                assert connection.streams == 0

    def check(self) -> None:
        """The invariants that hold whatever happened."""
        means: dict[bytes, torch.Tensor] = {}
        for peer in self.peers:
            for revision, reduced in peer.results.items():
                assert reduced.plan.revision == revision
                assert bits(reduced.mean) == bits(self.expected(reduced.plan, means)), (
                    "not the mean of what was brought"
                )
        self._check_agreement()

    def expected(self, plan: Plan, means: dict[bytes, torch.Tensor]) -> torch.Tensor:
        """The weighted mean of what the contributors to each part have brought. Remembers it in `means`."""
        if plan.id not in means:
            inputs = {peer: self._input(peer, plan) for peer in plan.members}
            earlier: dict[bytes, Plan] = {}
            for source in plan.sources:
                # What it has made stands for it: the plan of one member that brings just that.
                one = PeerId(source.plan)
                inputs[one] = self.expected(self.plans[source.plan], means)
                earlier[source.plan] = attrs.evolve(
                    plan,
                    coordinator=one,
                    members=(one,),
                    weights=(1.0,),
                    codec="fp32",
                    sources=(),
                    salvaged=(),
                    schedule="ring",
                    blocks=(),
                )
            means[plan.id] = reference(plan, inputs, earlier)
        return means[plan.id]

    def _input(self, peer: PeerId, plan: Plan) -> torch.Tensor:
        """A peer's values; with a lossy codec, what it has sent means: to encode that again changes nothing."""
        work = self.brought.get((plan.id, peer))
        if self.codec == "fp32" or work is None or not work.encoded:
            return self.by_id(peer).values(plan.revision)
        values = torch.zeros(self.length)
        make_codec(self.codec).decode(work.encoded, values)
        return values

    def _check_agreement(self) -> None:
        """Different results of one round on one branch: only where the later plan excludes the earlier's holder."""
        found: dict[bytes, bytes] = {}
        rounds: dict[tuple[int, bytes], dict[bytes, tuple[Plan, set[Trainer]]]] = {}
        for peer in self.peers:
            for reduced in peer.reduced:
                plan = reduced.plan
                if plan.id in self.repeated:
                    continue
                assert found.setdefault(plan.id, bits(reduced.mean)) == bits(reduced.mean), "two results of one plan"
                plans = rounds.setdefault((plan.revision, plan.base), {})
                plans.setdefault(plan.id, (plan, set()))[1].add(peer)
        for plans in rounds.values():
            for (one, holders), (other, _) in itertools.permutations(plans.values(), 2):
                if one.ballot < other.ballot:
                    assert not holders & self.accepted[other.id], "a later plan includes who has an earlier result"

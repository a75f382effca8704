"""Swarms of real endpoints and rounds on a network in memory, on simulated time."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from unittest import mock

import attrs
import pytest
import torch
import trio

from protocol.codecs import CodecName, block_of, make_codec
from protocol.collective import Reduced
from protocol.coordinator import RoundTimes
from protocol.endpoint import Endpoint
from protocol.errors import Behind, Fork, RoundAborted, ShoalError
from protocol.identity import Identity, PeerId
from protocol.member import Work
from protocol.memory import MemoryNetwork
from protocol.plan import Plan, largest_part
from protocol.planner import Lines, scheduled
from protocol.ring import reference
from protocol.round_messages import RingData
from protocol.rounds import RoundEvent, Rounds
from protocol.transfer import Transfer
from protocol.transport import Address
from protocol.vectors import vector_bytes

RUN = hashlib.sha256(b"a simulated run").digest()
FOUNDED = bytes(32)
TIMES = RoundTimes(grace=5.0, slack=1.0, stall=6.0, settle=0.5, poll=0.5)


def next_digest(digest: bytes, reduced: Reduced) -> bytes:
    return hashlib.sha256(digest + reduced.plan.id + vector_bytes(reduced.mean)).digest()


class JammedStream:
    """A stream that takes some data and then no more."""

    def __init__(self, stream, after: int) -> None:
        self.stream, self.left = stream, after

    async def send_bytes(self, data) -> None:
        if not self.left:
            await trio.sleep_forever()
        self.left -= 1
        await self.stream.send_bytes(data)

    async def finish(self) -> None:
        await self.stream.finish()


class Peer:
    """One peer: trains for a while, takes part in a round, and so on; catches up when it is behind."""

    def __init__(self, swarm: Swarm, number: int) -> None:
        self.swarm = swarm
        self.number = number
        self.host = f"host{number}"
        self.identity = Identity.from_seed(hashlib.sha256(b"%d" % number).digest())
        self.id: PeerId = self.identity.peer_id
        self.rng = random.Random(f"{swarm.seed}/{number}")
        self.endpoint = Endpoint(self.identity, swarm.network.transport(self.host), rng=random.Random(number))
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
        self.alive = False
        self.scope = trio.CancelScope()
        self.moved = trio.Event()

    def partners(self) -> Sequence[PeerId]:
        return [peer for peer in self.expected() if peer not in self.passed_over]

    def expected(self) -> Sequence[PeerId]:
        now = trio.current_time()
        return (self.id, *(peer for peer in self.endpoint.connected if self.doubted.get(peer, now) <= now))

    def arriving(self) -> Sequence[PeerId]:
        return ()

    def knows(self, peer: PeerId) -> bool:
        return peer in self.endpoint.connected

    def doubt(self, peer: PeerId, seconds: float) -> None:
        """Nothing: the swarm's own doubts are about states."""

    def _note(self, plan: Plan, work: Work) -> Transfer:
        """Begins an attempt, as the peer would, and remembers the plan: others may salvage from it."""
        self.swarm.plans[plan.id] = plan
        self.swarm.brought[plan.revision, plan.base, self.id] = work
        return self._begin(plan, work)

    def values(self, revision: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * revision + self.number)
        return torch.randn(self.swarm.length, generator=generator)

    async def run(self, *, task_status=trio.TASK_STATUS_IGNORED) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.endpoint.run, Address(self.host, 0))
                await nursery.start(self.rounds.run)
                self.rounds.committed(self.revision, self.digest)
                nursery.start_soon(self._keep_connected)
                self.alive = True
                task_status.started()
                await self.swarm.begin.wait()
                while True:
                    await self.step()

    async def step(self) -> None:
        """One round."""
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
        self._commit(reduced)

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
        better = other.weight > self.weight or (other.weight == self.weight and other.digest < self.digest)
        if other.alive and better:
            self.weight = other.weight
            self.revision, self.digest, self.chain = other.revision, other.digest, dict(other.chain)
            self.results = {number: other.results[number] for number in other.results}
            self.rounds.adopted(self.revision, self.digest)
            self.adoptions += 1
            self._move()
        else:
            self.doubted[holder] = trio.current_time() + 5

    def jam_ring(self, *, after: int) -> Callable[[], None]:
        """From now on, nothing but the first `after` segments of each ring leaves this peer. Returns what undoes it."""
        original = self.endpoint.open

        @asynccontextmanager
        async def jammed(peer, request, *, bulk=False):
            async with original(peer, request, bulk=bulk) as stream:
                yield JammedStream(stream, after) if isinstance(request, RingData) else stream

        self.endpoint.open = jammed

        def undo() -> None:
            self.endpoint.open = original

        return undo

    def sleep_in_ring(self) -> Callable[[], None]:
        """From now on, this peer accepts plans but does nothing about them. Returns what undoes it."""
        original = self.rounds._begin

        def begin(plan, work):
            return Transfer(
                plan,
                work.values,
                endpoint=self.endpoint,
                inbox=self.rounds._inbox,
                times=self.swarm.times,
                memory=self.rounds._carrying.vectors,
                previous=work.last,
            )

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

    async def _keep_connected(self) -> None:
        while True:
            for other in self.swarm.peers:
                if other is not self and other.alive and not self.endpoint.is_connected(other.id):
                    assert other.endpoint.address is not None
                    self.endpoint.learn(other.id, other.endpoint.address)
                    try:
                        with trio.move_on_after(3):
                            await self.endpoint.connect(other.id)
                    except ShoalError:
                        pass
            await trio.sleep(2)


class Swarm:
    """Peers that know each other, and what goes wrong with them."""

    def __init__(
        self,
        count: int,
        *,
        seed: int = 0,
        length: int = 23,
        latency: float = 0.05,
        bandwidth: float | None = None,
        times: RoundTimes = TIMES,
        codec: CodecName = "fp32",
        schedule: str = "",
    ) -> None:
        self.run_id, self.codec, self.schedule = RUN, codec, schedule
        self._chance = random.Random(f"{seed}/plans")
        self.seed, self.length, self.times = seed, length, times
        self.network = MemoryNetwork(latency=latency, bandwidth=bandwidth)
        self.begin = trio.Event()
        self.training_time: Callable[[Peer, int], float] = lambda peer, revision: 1.0 + 0.01 * peer.number
        self.weight: Callable[[Peer], float] = lambda peer: float(peer.number + 1)
        self.peers: list[Peer] = [Peer(self, number) for number in range(count)]
        self.plans: dict[bytes, Plan] = {}
        """All that anybody has carried out, by id."""
        self.brought: dict[tuple[int, bytes, PeerId], Work] = {}
        """What everybody has brought to the rounds of each branch."""
        self.last: int | None = None
        """The last revision that peers make; afterwards they rest."""

    def scheduled(self, plan: Plan, lines: Lines) -> Plan:
        """What coordinators make of a plan: what the planner says, or as this swarm was told."""
        if not self.schedule:
            return scheduled(plan, lines)
        chosen = self._chance.choice(["ring", "direct"]) if self.schedule == "any" else self.schedule
        if plan.codec != "fp32":
            chosen = "direct"
        blocks = ()
        if self.schedule == "any" and self._chance.random() < 0.6:
            unit = block_of(self.codec)
            cuts = sorted(
                min(unit * self._chance.randint(0, -(-plan.free // unit)), plan.free) for _ in plan.members[1:]
            )
            blocks = tuple(stop - start for start, stop in itertools.pairwise([0, *cuts, plan.free]))
            if max(blocks) > largest_part(len(blocks)) * plan.free:
                blocks = ()
        return attrs.evolve(plan, schedule=chosen, blocks=blocks)

    def by_id(self, peer: PeerId) -> Peer:
        return next(candidate for candidate in self.peers if candidate.id == peer)

    @property
    def alive(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.alive]

    async def train(self, peer: Peer, revision: int) -> None:
        """Inner steps: take their time, but stop at the deadline that a coordinator has set."""
        if self.last is not None and revision > self.last:
            await trio.sleep_forever()
        end = trio.current_time() + self.training_time(peer, revision)
        while trio.current_time() < end:
            opened = peer.rounds.opened(revision)
            if opened is not None and trio.current_time() >= opened:
                return
            await trio.sleep(min(0.25, end - trio.current_time()))

    async def start(self, nursery: trio.Nursery) -> None:
        """Starts all peers and returns when everybody is connected with everybody and about to train."""
        for peer in self.peers:
            await nursery.start(peer.run)
        for peer in self.peers:
            with peer.endpoint.watch() as events:
                while len(peer.endpoint.connected) < len(self.peers) - 1:
                    await events.receive()

    def kill(self, peer: Peer) -> None:
        """Without a word, as SIGKILL does it."""
        peer.alive = False
        self.network.kill(peer.host)
        peer.scope.cancel()

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
        for peer in self.peers:
            for revision, reduced in peer.results.items():
                assert reduced.plan.revision == revision
                inputs = {member.id: self._input(member, reduced.plan) for member in self.peers}
                expected = reference(reduced.plan, inputs, self.plans)
                assert bits(reduced.mean) == bits(expected), "not the mean of its contributors"
        self._check_agreement()

    def _input(self, peer: Peer, plan: Plan) -> torch.Tensor:
        """A peer's values; with a lossy codec, what it has sent means: to encode that again changes nothing."""
        work = self.brought.get((plan.revision, plan.base, peer.id))
        if self.codec == "fp32" or work is None:
            return peer.values(plan.revision)
        values = torch.zeros(self.length)
        make_codec(self.codec).decode(work.encoded, values)
        return values

    def _check_agreement(self) -> None:
        """Different results of one round on one branch: only where the later plan excludes the earlier's holder."""
        for one, other in itertools.permutations(self.peers, 2):
            for mine, theirs in itertools.product(one.reduced, other.reduced):
                if (mine.plan.revision, mine.plan.base) != (theirs.plan.revision, theirs.plan.base):
                    continue
                if mine.plan.id == theirs.plan.id:
                    assert bits(mine.mean) == bits(theirs.mean)
                elif mine.plan.ballot < theirs.plan.ballot:
                    assert one.id not in theirs.plan.members


def bits(values: torch.Tensor) -> bytes:
    return bytes(vector_bytes(values))


@asynccontextmanager
async def running_swarm(count: int, *, train: bool = True, **options):
    """A swarm whose peers run; everything has ended, and nothing hangs, when the block is left.

    Without `train`, the peers are connected and take part in nothing by themselves. With a `schedule`, all plans have
    that one; with "any", this or that, and members own parts of any size.
    """
    swarm = Swarm(count, **options)
    trio._core._run._r.seed(swarm.seed)  # the order of tasks; importing hypothesis makes trio respect it
    with trio.fail_after(3600), mock.patch("protocol.coordinator.scheduled", swarm.scheduled):
        async with trio.open_nursery() as nursery:
            await swarm.start(nursery)
            if train:
                swarm.begin.set()
            yield swarm
            for peer in swarm.peers:
                peer.scope.cancel()


@pytest.fixture
def swarm_of():
    """A factory of running swarms: `async with swarm_of(4, seed=…) as swarm`. Tests also take `autojump_clock`."""
    torch.set_num_threads(1)
    return running_swarm

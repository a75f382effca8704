"""Random histories: swarms in which peers die, stall, are cut off, come back and join. One seed, one history.

Faults come at random times, and at the moments at which most can go wrong: when a plan has been accepted, in the ring,
between finishing and committing. After them everything is mended, and then these invariants hold:

- I1: peers that hold the result of one plan hold the same bits, and a plan that somebody completed includes nobody who
  holds the result of an earlier plan for the same round. Of the states, whose digests chain the results, there is one.
- I2: within `CALM` simulated seconds everybody who is alive takes part in one and the same round.
- I3: every result is, to the last bit, the weighted mean of the recorded contributors, part by part.
- I4: afterwards no session, stream, transfer or task is left, and no memory of one.

In a part of the histories the peers call all other operations at the same time, for which the same holds.
"""

from __future__ import annotations

import gc
import hashlib
import math
import random
import weakref
from collections.abc import Callable
from contextlib import contextmanager

import attrs
import torch
import trio

from protocol.attempt import Attempt
from protocol.channels import ChannelSettings
from protocol.codecs import NAMES
from protocol.collective import Reduced
from protocol.endpoint import Limits
from protocol.operations import AsyncCollective
from protocol.plan import Plan, coordinators
from tests.sim.calls import CALLS, PATIENCE, Calls
from tests.sim.swarm import TIMES, running
from tests.sim.trainers import Trainer, Trainers

CALLS_RUN = hashlib.sha256(b"simulated calls").digest()
SIZES = {2: 18, 3: 26, 4: 22, 5: 14, 6: 8, 7: 4, 8: 3, 10: 2, 12: 1, 16: 0.4, 32: 0.15}
"""How often a swarm begins with so many peers, in percent, about. What one costs grows with the square of its size."""
LARGE = 12
"""Larger swarms suffer less at a time: no joining, no other operations, two faults."""
MOST_BORN = 3
"""Peers that join or come back in one history, at most."""
LIMITS = Limits(heartbeat=2.0, dead_after=5.0)
MOMENTS = ("begun", "sending", "finished", "committed")
CALM = 240.0
REST = 60
"""Simulated seconds in which nothing is left of the last round."""


class Actor(Trainer):
    """One life of a peer in a history."""

    swarm: HistorySwarm

    def __init__(self, swarm: HistorySwarm, number: int, limits: Limits, before: Trainer | None = None) -> None:
        super().__init__(swarm, number, limits)
        self.stalled = False
        if before is not None:  # it comes back with its checkpoint
            self.revision, self.digest, self.weight = before.revision, before.digest, before.weight
            self.chain, self.results = dict(before.chain), dict(before.results)
        self._kept, self.rounds._keep = self.rounds._keep, self._keep
        self.collective: AsyncCollective | None = None
        if swarm.calls is not None:
            settings = ChannelSettings(times=swarm.times)
            self.collective = AsyncCollective(self.endpoint, CALLS_RUN, roster=self, settings=settings)
            swarm.calls.observe(self)

    def values(self, revision: int) -> torch.Tensor:
        values = super().values(revision)
        if self.swarm.draw(self, revision) < 0.05:
            values[0] = math.nan
        return values

    def _note(self, plan: Plan, work) -> Attempt:
        attempt = super()._note(plan, work)
        self.swarm.attempts.add(attempt)
        self.swarm.newest = plan
        self.swarm.passed(self, "begun")
        return attempt

    def _keep(self, reduced: Reduced) -> None:
        self._kept(reduced)
        self.swarm.passed(self, "finished")

    async def outer_step(self) -> None:
        await trio.sleep(self.swarm.outer_time)

    def _commit(self, reduced: Reduced) -> None:
        super()._commit(reduced)
        self.swarm.passed(self, "committed")

    def _move(self) -> None:
        super()._move()
        self.swarm.stir()

    async def begin(self, nursery: trio.Nursery) -> None:
        await super().begin(nursery)
        if self.collective is not None:
            await nursery.start(self.collective.run)

    async def act(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(super().act)
            if self.swarm.calls is not None:
                for tag in self.swarm.calls.tags:
                    nursery.start_soon(self._call, self.swarm.calls, tag)

    async def _call(self, calls: Calls, tag: str) -> None:
        await self.swarm.begin.wait()
        rng = random.Random(f"{self.swarm.seed}/{self.number}/{tag}")
        while not self.swarm.mended:
            with self.swarm.calling():
                await calls.one(self, tag)
            await trio.sleep(rng.uniform(0, 4))


class HistorySwarm(Trainers):
    """The peers of one history."""

    def __init__(self, seed: int, rng: random.Random) -> None:
        codec = "fp32" if rng.random() < 0.6 else rng.choice(NAMES)
        size = rng.choices(list(SIZES), list(SIZES.values()))[0]
        self.calls = _calls(rng) if rng.random() < 0.25 and size <= LARGE else None
        self.mended = False
        self.silent = trio.Event()
        """Set while nobody calls an operation."""
        self._calls = 0
        self.outer_time = rng.choice([0.0, 0.1, 0.5])
        self.attempts: weakref.WeakSet[Attempt] = weakref.WeakSet()
        self.newest: Plan | None = None
        self._awaited: tuple[str, trio.Event] | None = None
        self._passer: Actor | None = None
        self._news = trio.Event()
        super().__init__(
            size,
            length=rng.choice([1, 2, 7, 40]) * (1 if codec == "fp32" else 100),
            codec=codec,
            schedule=rng.choice(["", "any", "any"]),
            limits=LIMITS,
            seed=seed,
            latency=rng.choice([0.001, 0.05, 0.2]),
            times=TIMES,
        )
        self.training_time = lambda peer, revision: 0.5 + 0.01 * peer.number
        self.weighing = rng.choice([0.0, 0.2])

    def make(self, number: int, before: Trainer | None = None) -> Actor:
        return Actor(self, number, self.limits, before)

    def draw(self, peer: Trainer, revision: int) -> float:
        """A random number that depends on the peer and the round only."""
        return random.Random(f"{self.seed} {peer.number} {revision}").random()

    def weigh(self, peer: Trainer) -> float:
        """What a peer's values count in its next round: now and then nothing, or very much."""
        drawn = self.draw(peer, -peer.revision)
        if drawn < self.weighing:
            return 0.0 if drawn < 0.8 * self.weighing else 1e12
        return peer.number + 1.0

    def passed(self, peer: Actor, moment: str) -> None:
        """A peer gets to a moment that a fault may be waiting for."""
        if self._awaited is not None and self._awaited[0] == moment:
            self._passer = peer
            self._awaited[1].set()
            self._awaited = None

    async def moment(self, name: str) -> Actor | None:
        """Waits for a peer to get there; None if nobody does for a while."""
        self._awaited = name, trio.Event()
        with trio.move_on_after(15):
            await self._awaited[1].wait()
            return self._passer
        self._awaited = None
        return None

    def stir(self) -> None:
        self._news.set()
        self._news = trio.Event()

    @property
    def calls_going_on(self) -> bool:
        return self._calls > 0

    @contextmanager
    def calling(self):
        """Somebody calls an operation."""
        self._calls += 1
        self.silent = trio.Event()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self.silent.set()

    async def born(self, number: int, before: Trainer | None = None) -> None:
        """A peer joins, or one that was killed comes back."""
        peer = self.make(number, before)
        self.peers.append(peer)
        await self.nursery.start(peer.run)

    async def united(self) -> None:
        """Waits for a round in which everybody who is alive takes part, and after which all have one state."""
        while not self._are_united():
            await self._news.wait()

    def _are_united(self) -> bool:
        alive = self.alive
        ids = {peer.id for peer in alive}
        newest = min(peer.revision for peer in alive)
        results = [peer.results.get(newest) for peer in alive]
        return (
            len({peer.chain.get(newest) for peer in alive}) == 1
            and all(result is not None and set(result.plan.members) == ids for result in results)
            and newest > self.first
        )

    first = 0
    """The rounds after this one began when everything was mended."""


def _calls(rng: random.Random) -> Calls:
    names = rng.sample(sorted(CALLS), rng.randint(1, 3))
    return Calls({name: name for name in names})


@attrs.define
class History:
    """What has happened."""

    seed: int
    peers: int = 0
    codec: str = ""
    faults: list[str] = attrs.field(factory=list)
    rounds: int = 0
    attempts: int = 0
    """Most that a round took."""
    calm: float = 0.0
    """Simulated seconds from the end of the faults until everybody was in one round again."""
    operations: int = 0

    def __str__(self) -> str:
        return "\n".join((f"seed {self.seed}: {self.peers} peers, {self.codec}", *self.faults))


class Faults:
    """What goes wrong, one after the other."""

    def __init__(self, swarm: HistorySwarm, rng: random.Random, history: History) -> None:
        self.swarm, self.rng, self.history = swarm, rng, history
        self.undo: list[Callable[[], None]] = []
        self.large = len(swarm.peers) > LARGE
        self.born = MOST_BORN if self.large else 0
        self.single = {self.jam, self.lie_still, self.slow, self.dawdle}  # what they change is put back as it was
        self.kinds = [self.kill, self.kill, self.stall, self.cut, self.jam, self.lie_still, self.slow, self.dawdle]
        self.kinds += [self.come_back, self.come_back, self.join, self.mend]

    async def run(self, nursery: trio.Nursery) -> None:
        for _ in range(self.rng.randint(1, 2 if self.large else 6)):
            peer = await self._moment()
            for kind in self.rng.sample(self.kinds, self.rng.choice([1, 1, 1, 2])):
                if not (self.undo and kind in self.single):
                    await kind(peer, nursery)
        await trio.sleep(self.rng.choice([0.1, 2.0, 8.0]) * self.rng.random())

    async def _moment(self) -> Actor:
        """Waits for the next fault's time; who it is about."""
        swarm, rng = self.swarm, self.rng
        passer = None
        if rng.random() < 0.5:
            name = rng.choice(MOMENTS)
            passer = await swarm.moment("begun" if name == "sending" else name)
            if name == "sending":
                await trio.sleep(rng.uniform(0, 4) * swarm.network.link("host0", "host1").latency)
        else:
            await trio.sleep(rng.choice([0.02, 0.2, 1.0, 4.0]) * rng.random())
        alive = swarm.alive
        choices = [rng.choice(alive)]
        if passer is not None and passer.alive:
            choices += [passer, passer]
        plan = swarm.newest
        if plan is not None:
            order = coordinators(plan.run, plan.revision, [peer.id for peer in alive])
            ring = [member for member in plan.members if member in order]
            wanted = [plan.coordinator, *order[:2], *ring[:1]]
            choices += [peer for peer in alive if peer.id in wanted]
        return rng.choice(choices)

    def note(self, what: str) -> None:
        self.history.faults.append(f"{trio.current_time():.3f} {what}")

    def later(self, nursery: trio.Nursery, seconds: float, undo: Callable[[], None]) -> None:
        """Undoes something after a while, if that is before everything is mended."""

        async def wait() -> None:
            await trio.sleep(seconds)
            if undo in self.undo:
                self.undo.remove(undo)
                undo()

        self.undo.append(undo)
        nursery.start_soon(wait)

    async def kill(self, peer: Actor, nursery: trio.Nursery) -> None:
        """One, its neighbours too, or several at once."""
        alive = self.swarm.alive
        start = alive.index(peer) if peer in alive else 0
        count = self.rng.choice([1, 1, 1, 2, 3])
        victims = (alive[start:] + alive[:start])[: min(count, len(alive) - 1)]
        if self.rng.random() < 0.3:
            victims = self.rng.sample(alive, len(victims))
        for victim in victims:
            self.note(f"kill {victim.host}")
            self.swarm.kill(victim)

    async def stall(self, peer: Actor, nursery: trio.Nursery) -> None:
        seconds = self.swarm.times.stall * self.rng.choice([0.2, 0.8, 1.3, 3.0])
        self.note(f"stall {peer.host} for {seconds:.1f} s")
        self.swarm.network.stall(peer.host)
        self.later(nursery, seconds, lambda: peer.alive and self.swarm.network.resume(peer.host))

    async def cut(self, peer: Actor, nursery: trio.Nursery) -> None:
        hosts = sorted({other.host for other in self.swarm.peers})
        one = {peer.host, *self.rng.sample(hosts, self.rng.randint(0, len(hosts) // 2))}
        others = set(hosts) - one
        others = set(self.rng.sample(sorted(others), self.rng.randint(min(1, len(others)), len(others))))
        one_way = self.rng.random() < 0.3
        seconds = self.rng.choice([1.0, 6.0, 15.0])
        self.note(f"cut {sorted(one)} {'->' if one_way else '|'} {sorted(others)} for {seconds:g} s")
        self.swarm.network.partition(one, others, one_way=one_way)
        self.later(nursery, seconds, self.swarm.network.heal)

    async def jam(self, peer: Actor, nursery: trio.Nursery) -> None:
        after = self.rng.randint(0, 4)
        self.note(f"jam {peer.host} after {after}")
        self.later(nursery, self.rng.choice([3.0, 10.0]), peer.jam_ring(after=after))

    async def lie_still(self, peer: Actor, nursery: trio.Nursery) -> None:
        self.note(f"lie still {peer.host}")
        self.later(nursery, self.rng.choice([3.0, 10.0]), peer.sleep_in_ring())

    async def slow(self, peer: Actor, nursery: trio.Nursery) -> None:
        """Alive, but far away."""
        latency, before = self.rng.choice([0.4, 1.0]), self.swarm.network.link("host0", "host1").latency
        hosts = {other.host for other in self.swarm.peers} - {peer.host}
        self.note(f"slow {peer.host}")

        def set_latency(seconds: float) -> None:
            for host in hosts:
                self.swarm.network.set_link(peer.host, host, latency=seconds)

        set_latency(latency)
        self.later(nursery, self.rng.choice([3.0, 10.0]), lambda: set_latency(before))

    async def dawdle(self, peer: Actor, nursery: trio.Nursery) -> None:
        swarm, pause, before = self.swarm, self.rng.choice([3.0, 8.0]), self.swarm.training_time
        self.note(f"dawdle {peer.host}")
        swarm.training_time = lambda one, revision: pause if one is peer else before(one, revision)
        self.later(nursery, 10.0, lambda: setattr(swarm, "training_time", before))

    async def come_back(self, peer: Actor, nursery: trio.Nursery) -> None:
        """With its identity, and with its checkpoint or from scratch."""
        alive = {other.number for other in self.swarm.alive}
        dead = {other.number: other for other in self.swarm.peers if other.number not in alive}
        if dead and self.born < MOST_BORN:
            self.born += 1
            number = self.rng.choice(sorted(dead))
            before = dead[number] if self.rng.random() < 0.7 else None
            self.note(f"come back {dead[number].host} {'with its checkpoint' if before else 'from scratch'}")
            await self.swarm.born(number, before)

    async def join(self, peer: Actor, nursery: trio.Nursery) -> None:
        if self.born < MOST_BORN:
            self.born += 1
            number = max(other.number for other in self.swarm.peers) + 1
            self.note(f"join host{number}")
            await self.swarm.born(number)

    async def mend(self, peer: Actor | None = None, nursery: trio.Nursery | None = None) -> None:
        """Undoes whatever can be undone."""
        self.note("mend")
        while self.undo:
            self.undo.pop()()


async def run_history(seed: int) -> History:
    """Runs one history and checks the invariants.

    Raises:
        AssertionError: One of them does not hold. The history is in its notes, as with any other exception.
    """
    rng = random.Random(seed)
    history = History(seed)
    try:
        swarm = HistorySwarm(seed, rng)
        history.peers, history.codec = len(swarm.peers), swarm.codec
        async with running(swarm), trio.open_nursery() as nursery:
            swarm.weight = swarm.weigh
            swarm.begin.set()
            faults = Faults(swarm, rng, history)
            await faults.run(nursery)
            await faults.mend()
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await _calm(swarm, history)
        _forgotten(swarm)
    except BaseException as error:
        error.add_note(str(history))
        raise
    return history


async def _calm(swarm: HistorySwarm, history: History) -> None:
    """What has to come of it."""
    swarm.check()
    swarm.weighing = 0.0
    swarm.first = max(peer.revision for peer in swarm.alive)
    began = trio.current_time()
    with trio.fail_after(CALM):
        await swarm.united()
    history.calm = trio.current_time() - began
    swarm.mended = True
    swarm.last = max(peer.revision for peer in swarm.alive) + 1
    with trio.fail_after(CALM):
        for peer in swarm.alive:
            await peer.reach(swarm.last)
    if swarm.calls is not None:
        await _last_calls(swarm, swarm.calls)
        swarm.calls.check({peer.id: peer.number for peer in swarm.peers})
        history.operations = len(swarm.calls.outcomes)
    assert len({peer.digest for peer in swarm.alive}) == 1
    swarm.check()
    history.rounds = swarm.last
    history.attempts = max(result.plan.attempt for peer in swarm.alive for result in peer.results.values())
    for _ in range(REST):
        if not _left(swarm):
            break
        await trio.sleep(1)
    assert not _left(swarm), "; ".join(_left(swarm))


async def _last_calls(swarm: HistorySwarm, calls: Calls) -> None:
    """Once nothing goes wrong any more, everybody takes part, if not in the first try: some may be ahead."""
    with trio.fail_after(2 * PATIENCE):
        while swarm.calls_going_on:  # one may begin as another ends
            await swarm.silent.wait()
        for tag in calls.tags:
            for _ in range(4):
                outcomes = []

                async def call(peer: Actor, tag: str = tag, outcomes: list = outcomes) -> None:
                    outcomes.append(await calls.one(peer, tag))

                async with trio.open_nursery() as nursery:
                    for peer in swarm.alive:
                        nursery.start_soon(call, peer)
                members = {outcome and outcome.members for outcome in outcomes}
                if len(members) == 1 and all(outcome and len(outcome.members) == len(outcomes) for outcome in outcomes):
                    break
            else:
                if tag == "broadcast" and all(peer.number % 2 for peer in swarm.alive):
                    continue  # nobody has anything to broadcast
                raise AssertionError(f"{tag}: {members}")


def _left(swarm: HistorySwarm) -> list[str]:
    """What is left over though nothing goes on."""
    left = []
    for peer in swarm.alive:
        rounds = peer.rounds
        if rounds.statistics().busy or rounds._attempts or rounds._inbox._wanted:
            left.append(f"{peer.host}: {rounds.statistics()}, {len(rounds._attempts)} attempts")
        if tasks := [task for task in rounds._nursery.child_tasks if not task.name.endswith("Meter.run")]:
            left.append(f"{peer.host}: tasks {sorted(task.name for task in tasks)}")
        if peer.collective is not None and peer.collective.busy:
            left.append(f"{peer.host}: operations")
        for connection in peer.endpoint._connections:
            if connection.streams:
                left.append(f"{peer.host}: {connection.streams} streams")
    return left


def _forgotten(swarm: HistorySwarm) -> None:
    """Nothing but the results is left in memory of what was reduced."""
    for peer in swarm.peers:
        peer.results.clear()
        peer.reduced.clear()
    swarm.brought.clear()
    gc.collect()
    assert not swarm.attempts, f"{len(swarm.attempts)} attempts are still in memory"

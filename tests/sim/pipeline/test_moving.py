"""Peers that move between stages at the same time, while each knows something else of the others."""

import hashlib
import random

import pytest
import trio

from optim.swarm.balance import Policy
from peer.pipeline.crew import Crew
from peer.pipeline.messages import Standing
from peer.pipeline.moving import Balance
from protocol.endpoint import Endpoint
from protocol.identity import Identity
from protocol.memory import MemoryNetwork
from protocol.mesh import Mesh
from protocol.transport import Address

RUN = hashlib.sha256(b"a crew that moves").digest()
POLICY = Policy(gain=0.1, rest=2)


class Server:
    """A peer that makes steps, and moves as a node does; it computes nothing."""

    def __init__(self, group, number, stage):
        self.group, self.number, self.stage = group, number, stage
        self.host = f"host{number}"
        identity = Identity.from_seed(hashlib.sha256(f"{group.seed} {number}".encode()).digest())
        self.endpoint = Endpoint(identity, group.network.transport(self.host), rng=random.Random(number))
        self.mesh = Mesh(self.endpoint, RUN, [Address("host0", 7070)] if number else [])
        self.crew = Crew(self.endpoint, RUN, self.mesh, Standing(), stages=group.stages, last=0)
        self.balance = Balance(self.crew, group.stages, POLICY)
        self.scope = trio.CancelScope()
        self.alive = self.ready = True
        self.decided = False
        self.moves = []

    async def run(self):
        with self.scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.endpoint.run, Address(self.host, 7070))
                await nursery.start(self.mesh.run)
                await self.mesh.wait_for(len(self.group.servers))
                await nursery.start(self.crew.run)
                self.crew.announce(stage=self.stage, ready=True, rate=self.rate())
                nursery.start_soon(self.step)
                nursery.start_soon(self.rescue)

    def rate(self):
        """Equal machines, measured a little differently each time."""
        return self.group.random.uniform(0.98, 1.02)

    async def step(self):
        while True:
            await trio.sleep(self.group.random.uniform(0.9, 1.1))
            if not self.ready:
                continue
            if not all(self.group.ready(stage) for stage in range(self.group.stages)):  # that stops them all
                self.crew.announce(step=self.crew.furthest)
                continue
            step = int(trio.current_time())  # that of all, give or take who is late
            self.crew.announce(step=step, rested=self.crew.own.rested + 1, rate=self.rate())
            move = self.balance.wanted()
            if move is not None and await self.balance.claim(move):
                await self.go(move)

    async def rescue(self):
        while True:
            await self.crew.until(lambda: self.ready and self.balance.rescue() is not None)
            await trio.sleep(3.0)
            move = self.balance.rescue()
            if move is not None and self.ready and await self.balance.claim(move, urgent=True):
                await self.go(move)

    async def go(self, move):
        self.ready = False
        self.moves.append(move)
        left = self.group.ready(move.source)
        self.group.lost_by_moves += not left
        self.stage = move.target
        own = self.crew.own
        await trio.lowlevel.checkpoint()
        self.crew.announce(stage=move.target, ready=False, moving=None, rested=0, life=own.life + 1)
        await trio.sleep(self.group.random.uniform(0.5, 5.0))
        self.ready = True
        self.crew.announce(ready=True)


def serving(server):
    """How many serve a stage, as far as a server knows."""
    return sum(each.stage is not None for each in server.crew.standings.values())


class Group:
    """Servers of some stages on links of all latencies."""

    def __init__(self, assignment, seed):
        self.seed, self.random = seed, random.Random(seed)
        self.stages = max(assignment) + 1
        self.network = MemoryNetwork()
        for a in range(len(assignment)):
            for b in range(a):
                self.network.set_link(f"host{a}", f"host{b}", latency=self.random.choice([0.01, 0.1, 0.3, 0.8]))
        self.lost_by_moves = 0
        self.servers = []
        self.servers = [Server(self, number, stage) for number, stage in enumerate(assignment)]

    def ready(self, stage):
        """Who can serve a stage in truth, whatever others know of it."""
        return [each for each in self.servers if each.alive and each.ready and each.stage == stage]

    def counts(self):
        return [sum(each.alive and each.stage == stage for each in self.servers) for stage in range(self.stages)]

    async def until(self, condition):
        while not condition():  # noqa: ASYNC110 - on simulated time
            await trio.sleep(0.1)

    async def acquainted(self):
        """Until all have told all others that they serve."""
        number = len(self.servers)
        await self.until(lambda: all(serving(each) == number for each in self.servers))

    def kill(self, server):
        server.alive = False
        self.network.kill(server.host)
        server.scope.cancel()


@pytest.fixture
async def group_of(nursery):
    def make(assignment, seed):
        group = Group(assignment, seed)
        for server in group.servers:
            nursery.start_soon(server.run)
        return group

    return make


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("assignment", [[0] * 5 + [1], [0] * 4 + [1, 2]])
async def test_stages_become_equal_with_hardly_more_moves_than_it_takes(autojump_clock, group_of, assignment, seed):
    group = group_of(assignment, seed)
    best = len(assignment) // group.stages
    with trio.fail_after(300):
        await group.until(lambda: min(len(group.ready(stage)) for stage in range(group.stages)) >= best)
    made = [move for server in group.servers for move in server.moves]
    needed = sum(max(0, best - assignment.count(stage)) for stage in range(group.stages))
    assert needed <= len(made) <= needed + 1
    await trio.sleep(20)
    assert len([move for server in group.servers for move in server.moves]) == len(made)  # and then nobody moves
    assert group.lost_by_moves == 0


@pytest.mark.parametrize("seed", range(3))
async def test_no_stage_loses_its_last_server_by_moves_while_others_die(autojump_clock, group_of, seed):
    """Two servers of each stage; those of one die. Of several that want to help, none leaves its stage empty."""
    group = group_of([0, 0, 1, 1, 2, 2], seed)
    await group.acquainted()
    for victim in group.ready(seed % 3):
        group.kill(victim)
    with trio.fail_after(120):
        await group.until(lambda: min(group.counts()) > 0)
        await trio.sleep(10)
    assert group.lost_by_moves == 0
    assert min(group.counts()) >= 1


@pytest.mark.parametrize("seed", range(2))
async def test_of_two_servers_that_both_want_to_leave_one_stays(autojump_clock, group_of, seed):
    """Each of them alone could help one of the stages without servers."""
    group = group_of([0, 0, 1, 2], seed)
    await group.acquainted()
    for victim in [*group.ready(1), *group.ready(2)]:
        group.kill(victim)
    await trio.sleep(20)
    assert group.lost_by_moves == 0
    assert sorted(group.counts()) == [0, 1, 1]
    assert group.counts()[0] == 1

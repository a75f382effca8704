"""Pipelines of real nodes on a network in memory, on simulated time."""

from __future__ import annotations

import hashlib
import random

import trio

from optim.swarm.balance import Policy
from optim.swarm.messages import Request
from optim.swarm.server import Batch, StageServer, clipping
from optim.swarm.stages import cut
from optim.swarm.state import whole_state
from peer.events import EventLog
from peer.pipeline.messages import Sizes
from peer.pipeline.node import PipelineNode
from peer.pipeline.settings import Pipeline
from protocol.coordinator import RoundTimes
from protocol.endpoint import Endpoint
from protocol.errors import ShoalError
from protocol.identity import Identity
from protocol.memory import MemoryNetwork
from protocol.mesh import Mesh
from protocol.transport import Address
from tests.optim.swarm.toys import SETTINGS, adamw, sample, text_batch, transformer_chain

RUN = hashlib.sha256(b"a simulated pipeline").digest()
TIMES = RoundTimes(grace=2.0, slack=1.0, stall=4.0, settle=0.5, poll=0.5)
MICROBATCHES = 6


def pipeline(stages, steps, **options):
    """A pipeline of a tiny transformer."""
    defaults = {
        "run_id": RUN,
        "chain": transformer_chain,
        "stages": stages,
        "microbatches": MICROBATCHES,
        "sample": lambda step, number: sample(text_batch(step, number)),
        "optimizer": adamw,
        "rate": lambda step: 0.01,
        "sizes": Sizes(samples=2, tokens=SETTINGS.context, width=SETTINGS.width),
        "steps": steps,
        "balance": Policy(gain=10.0, rest=1e9),
        "save_every": 1,
        "times": TIMES,
    }
    return Pipeline(**{**defaults, **options})


class Peer:
    """One life of a peer."""

    def __init__(self, swarm, number, stage, options):
        self.swarm, self.number, self.host = swarm, number, f"host{number}"
        seed = f"{swarm.seed} {number}".encode()
        identity = Identity.from_seed(hashlib.sha256(seed).digest())
        self.id = identity.peer_id
        self.endpoint = Endpoint(identity, swarm.network.transport(self.host), rng=random.Random(number))
        first = [Address("host0", 7070)] if number else []
        self.mesh = Mesh(self.endpoint, RUN, first)
        self.events = []
        log = EventLog(None, self.id)
        log.subscribe(self.events.append)
        self.node = PipelineNode(
            pipeline=swarm.pipeline,
            endpoint=self.endpoint,
            mesh=self.mesh,
            events=log,
            compute=self.compute,
            rng=random.Random(number),
            stage=stage,
            save=self.save,
            **options,
        )
        self.scope = trio.CancelScope()
        self.alive = True
        self.saved = None
        self.problem = None
        self.running = True
        self.begins = trio.Event()
        self.begins.set()
        self.on_compute = None

    async def compute(self, function, *arguments):
        requests = len(arguments[0].arrived) if arguments and isinstance(arguments[0], Batch) else 1
        await trio.sleep(requests * self.swarm.random.uniform(0.01, 0.03))
        if self.on_compute is not None:
            self.on_compute(function)
        result = function(*arguments)
        await trio.lowlevel.checkpoint()
        return result

    def save(self, stage, state):
        self.saved = stage, state

    async def run(self):
        with self.scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.endpoint.run, Address(self.host, 7070))
                await nursery.start(self.mesh.run)
                await self.mesh.wait_for(min(self.swarm.founders, 2 if self.number >= self.swarm.founders else 99))
                await self.begins.wait()
                try:
                    await self.node.run()
                except ShoalError as problem:
                    self.problem = problem
                self.running = False
                nursery.cancel_scope.cancel()

    def of(self, kind):
        return [event for event in self.events if event["event"] == kind]


class PipelineSwarm:
    """Peers of one pipeline, and what goes wrong with them."""

    def __init__(self, pipeline, assignment, seed):
        self.pipeline, self.seed, self.random = pipeline, seed, random.Random(seed)
        self.network = MemoryNetwork(latency=0.02)
        self.founders = len(assignment)
        self.peers = []
        for stage in assignment:
            self.add(stage)
        self.nursery = None

    def add(self, stage=None, **options):
        peer = Peer(self, len(self.peers), stage, options)
        self.peers.append(peer)
        return peer

    def start(self, peer):
        self.nursery.start_soon(peer.run)

    def kill(self, peer):
        peer.alive = False
        self.network.kill(peer.host)
        peer.scope.cancel()

    async def until(self, condition):
        while not condition():  # noqa: ASYNC110 - on simulated time
            await trio.sleep(0.1)

    @property
    def alive(self):
        return [peer for peer in self.peers if peer.alive]


def single_process(steps, microbatches=MICROBATCHES, lr=0.01, optimizer=adamw, clip=None):
    """What one process makes of the same samples: the state of the whole model."""
    (stage,) = cut(transformer_chain(), 1)
    server = StageServer(stage, optimizer(stage), microbatches=microbatches)
    server.stage.load(stage.state())
    for step in range(steps):
        for number in range(microbatches):
            each = sample(text_batch(step, number))
            request = Request(
                kind="backward", step=step, number=number, inputs=each.tokens, targets=each.targets, count=True
            )
            server.submit(number, request, 0.0)
            batch = server.take(0.0)
            server.finish(batch, server.compute(batch))
        server.freeze()
        server.settled(server.contribution().values)
        server.advance(scale=1.0 if clip is None else clipping([server.squares()], clip))
    return whole_state([server.snapshot()])

"""What all simulated swarms have in common: real endpoints on a network in memory, and what goes wrong with them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Generic, TypeVar

import torch
import trio

from protocol.awake import Awake
from protocol.coordinator import RoundTimes
from protocol.endpoint import Endpoint, Limits
from protocol.errors import ShoalError
from protocol.identity import Identity, PeerId
from protocol.memory import MemoryNetwork
from protocol.round_messages import RingData
from protocol.transport import Address
from protocol.vectors import vector_bytes

TIMES = RoundTimes(grace=5.0, slack=1.0, stall=6.0, settle=0.5, poll=0.5)


def bits(values: torch.Tensor) -> bytes:
    return bytes(vector_bytes(values))


class JammedStream:
    """A stream that takes some data and then no more."""

    def __init__(self, stream, after: int) -> None:
        self.stream, self.left = stream, after

    async def send(self, message) -> None:
        if not self.left:
            await trio.sleep_forever()
        await self.stream.send(message)

    async def send_bytes(self, data, **how) -> None:
        if not self.left:
            await trio.sleep_forever()
        self.left -= 1
        await self.stream.send_bytes(data, **how)

    def __getattr__(self, name):
        return getattr(self.stream, name)


class SimulatedPeer:
    """One life of one peer. It knows the others by magic, and takes those that are connected for members."""

    def __init__(self, swarm: SimulatedSwarm, number: int, limits: Limits) -> None:
        self.swarm, self.number, self.host = swarm, number, f"host{number}"
        self.identity = Identity.from_seed(hashlib.sha256(b"%d" % number).digest())
        self.id: PeerId = self.identity.peer_id
        self.endpoint = Endpoint(
            self.identity, swarm.network.transport(self.host), rng=random.Random(number), limits=limits
        )
        self.scope = trio.CancelScope()
        self.alive = False
        self.awake = Awake()

    # The roster.

    def partners(self) -> Sequence[PeerId]:
        return (self.id, *self.endpoint.connected)

    def expected(self) -> Sequence[PeerId]:
        return self.partners()

    def arriving(self) -> Sequence[PeerId]:
        return ()

    def woken(self) -> bool:
        return self.awake.lately

    def knows(self, peer: PeerId) -> bool:
        return peer in self.endpoint.connected

    def doubt(self, peer: PeerId, seconds: float) -> None:
        """Nothing: who is connected is a member."""

    # Its tasks.

    async def run(self, *, task_status=trio.TASK_STATUS_IGNORED) -> None:
        """Lives until it is killed."""
        with self.scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.endpoint.run, Address(self.host, 0))
                await self.begin(nursery)
                nursery.start_soon(self._keep_connected)
                self.alive = True
                task_status.started()
                await self.act()

    async def begin(self, nursery: trio.Nursery) -> None:
        """Starts what serves others."""

    async def act(self) -> None:
        """What it does of its own accord."""

    async def _keep_connected(self) -> None:
        while True:
            for other in self.swarm.alive:
                if other is not self and other.alive and not self.endpoint.is_connected(other.id):
                    assert other.endpoint.address is not None
                    self.endpoint.learn(other.id, other.endpoint.address)
                    try:
                        with trio.move_on_after(3):
                            await self.endpoint.connect(other.id)
                    except ShoalError:
                        pass
            await trio.sleep(2)

    def jam_ring(self, *, after: int) -> Callable[[], None]:
        """From now on, nothing but the first `after` segments of each ring leaves this peer. Returns what undoes it."""
        original = self.endpoint.open

        @asynccontextmanager
        async def jammed(peer, request, **how):
            async with original(peer, request, **how) as stream:
                yield JammedStream(stream, after) if isinstance(request, RingData) else stream

        self.endpoint.open = jammed

        def undo() -> None:
            self.endpoint.open = original

        return undo


P = TypeVar("P", bound=SimulatedPeer)


class SimulatedSwarm(Generic[P]):
    """Peers that know each other, and what goes wrong with them."""

    def __init__(
        self,
        count: int,
        *,
        run_id: bytes,
        seed: int = 0,
        latency: float = 0.05,
        bandwidth: float | None = None,
        times: RoundTimes = TIMES,
    ) -> None:
        self.run_id, self.seed, self.times = run_id, seed, times
        self.network = MemoryNetwork(latency=latency, bandwidth=bandwidth)
        self.nursery: trio.Nursery | None = None
        self.peers: list[P] = [self.make(number) for number in range(count)]

    def arranged(self) -> AbstractContextManager[object]:
        """What has to be arranged while the swarm is there."""
        return nullcontext()

    def make(self, number: int) -> P:
        """A peer that is about to be born."""
        raise NotImplementedError

    @property
    def alive(self) -> list[P]:
        return [peer for peer in self.peers if peer.alive]

    def by_id(self, peer: PeerId) -> P:
        """The peer of that identity; the last one, if it has been there several times."""
        return next(candidate for candidate in reversed(self.peers) if candidate.id == peer)

    async def start(self, nursery: trio.Nursery) -> None:
        """Starts all peers and returns when everybody is connected with everybody."""
        self.nursery = nursery
        for peer in self.peers:
            await nursery.start(peer.run)
        for peer in self.peers:
            with peer.endpoint.watch() as events:
                while len(peer.endpoint.connected) < len(self.peers) - 1:
                    await events.receive()

    def kill(self, peer: P) -> None:
        """Without a word, as SIGKILL does it."""
        peer.alive = False
        self.network.kill(peer.host)
        peer.scope.cancel()


S = TypeVar("S", bound=SimulatedSwarm)


@asynccontextmanager
async def running(swarm: S):
    """A swarm whose peers run and are connected; everything has ended, and nothing hangs, when the block is left."""
    trio._core._run._r.seed(swarm.seed)  # the order of tasks; importing hypothesis makes trio respect it
    torch.set_num_threads(1)
    with trio.fail_after(3600), swarm.arranged():
        async with trio.open_nursery() as nursery:
            await swarm.start(nursery)
            yield swarm
            for peer in swarm.peers:
                peer.scope.cancel()

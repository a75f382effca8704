"""Swarms of collectives on a network in memory, on simulated time."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager

import pytest
import torch
import trio

from protocol.channels import ChannelSettings
from protocol.codecs import CodecName
from protocol.coordinator import RoundTimes
from protocol.courtesy import Courtesy
from protocol.endpoint import Endpoint, Limits
from protocol.errors import ShoalError
from protocol.identity import Identity, PeerId
from protocol.memory import MemoryNetwork
from protocol.operations import AsyncCollective
from protocol.round_messages import RingData
from protocol.transport import Address

RUN = hashlib.sha256(b"a simulated collective").digest()
TIMES = RoundTimes(grace=5.0, slack=1.0, stall=6.0, settle=0.5, poll=0.5)


class JammedStream:
    """A stream that takes some data and then no more."""

    def __init__(self, stream, after: int) -> None:
        self.stream, self.left = stream, after

    async def send(self, message) -> None:
        if not self.left:
            await trio.sleep_forever()
        await self.stream.send(message)

    async def send_bytes(self, data) -> None:
        if not self.left:
            await trio.sleep_forever()
        self.left -= 1
        await self.stream.send_bytes(data)

    async def finish(self) -> None:
        await self.stream.finish()


class Peer:
    """One peer. It knows the others by magic, and takes those that are connected for members."""

    def __init__(self, swarm: Swarm, number: int, limits: Limits) -> None:
        self.swarm, self.number, self.host = swarm, number, f"host{number}"
        self.identity = Identity.from_seed(hashlib.sha256(b"%d" % number).digest())
        self.id: PeerId = self.identity.peer_id
        self.endpoint = Endpoint(
            self.identity, swarm.network.transport(self.host), rng=random.Random(number), limits=limits
        )
        self.courtesy = Courtesy(lambda: self.endpoint.bytes_sent)
        settings = ChannelSettings(times=swarm.times, codec=swarm.codec, max_block=1 << 24, courtesy=self.courtesy)
        self.collective = AsyncCollective(self.endpoint, RUN, roster=self, settings=settings)
        self.scope = trio.CancelScope()
        self.alive = False

    def jam_ring(self, *, after: int) -> None:
        """From now on, nothing but the first `after` pieces of each ring leaves this peer."""
        original = self.endpoint.open

        @asynccontextmanager
        async def jammed(peer, request, *, bulk=False):
            async with original(peer, request, bulk=bulk) as stream:
                yield JammedStream(stream, after) if isinstance(request, RingData) else stream

        self.endpoint.open = jammed

    def partners(self) -> Sequence[PeerId]:
        return (self.id, *self.endpoint.connected)

    expected = partners

    def arriving(self) -> Sequence[PeerId]:
        return ()

    def knows(self, peer: PeerId) -> bool:
        return peer in self.endpoint.connected

    def doubt(self, peer: PeerId, seconds: float) -> None:
        """Nothing: who is connected is a member."""

    async def run(self, *, task_status=trio.TASK_STATUS_IGNORED) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.endpoint.run, Address(self.host, 0))
                await nursery.start(self.collective.run)
                nursery.start_soon(self._keep_connected)
                self.alive = True
                task_status.started()

    async def _keep_connected(self) -> None:
        while True:
            for other in self.swarm.peers:
                if other is not self and other.alive and not self.endpoint.is_connected(other.id):
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
        latency: float = 0.05,
        bandwidth: float | None = None,
        times: RoundTimes = TIMES,
        limits: Callable[[int], Limits] = lambda number: Limits(),
        codec: CodecName = "fp32",
    ) -> None:
        self.codec: CodecName = codec
        self.run_id, self.seed, self.times = RUN, seed, times
        self.network = MemoryNetwork(latency=latency, bandwidth=bandwidth)
        self.peers = [Peer(self, number, limits(number)) for number in range(count)]

    @property
    def alive(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.alive]

    async def start(self, nursery: trio.Nursery) -> None:
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

    def stall(self, peer: Peer) -> None:
        """As SIGSTOP does it."""
        peer.alive = False
        self.network.stall(peer.host)

    async def together(self, call, peers: Sequence[Peer] | None = None) -> dict[Peer, object]:
        """All peers, or these, begin `call(peer)` at once; what they get, or the error. The dead get nothing."""
        outcomes: dict[Peer, object] = {}

        async def one(peer: Peer) -> None:
            try:
                outcomes[peer] = await call(peer)
            except ShoalError as error:
                outcomes[peer] = error

        async with trio.open_nursery() as nursery:
            for peer in self.peers if peers is None else peers:
                nursery.start_soon(one, peer)
        return outcomes

    async def rest(self) -> None:
        """Waits until all that is still going on has ended, and sees to it that nothing is left over."""
        await trio.sleep(30)
        for peer in self.alive:
            assert not peer.collective.busy
            for connection in peer.endpoint._connections:
                assert connection.streams == 0


@asynccontextmanager
async def running_swarm(count: int, **options):
    """A swarm whose peers run and are connected; everything has ended when the block is left."""
    swarm = Swarm(count, **options)
    trio._core._run._r.seed(swarm.seed)  # the order of tasks; importing hypothesis makes trio respect it
    with trio.fail_after(3600):
        async with trio.open_nursery() as nursery:
            await swarm.start(nursery)
            yield swarm
            for peer in swarm.peers:
                peer.scope.cancel()


@pytest.fixture
def swarm_of():
    """A factory of running swarms: `async with swarm_of(4, seed=…) as swarm`. Tests also take `autojump_clock`."""
    torch.set_num_threads(1)
    return running_swarm

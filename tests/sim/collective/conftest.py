"""Swarms of collectives on a network in memory, on simulated time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence

import pytest
import trio

from protocol.channels import ChannelSettings
from protocol.codecs import CodecName
from protocol.courtesy import Courtesy
from protocol.endpoint import Limits
from protocol.errors import ShoalError
from protocol.operations import AsyncCollective
from protocol.plan import MAX_WEIGHT
from protocol.round_events import RoundEvent
from tests.sim.swarm import SimulatedPeer, SimulatedSwarm, running

RUN = hashlib.sha256(b"a simulated collective").digest()


class Peer(SimulatedPeer):
    """One peer, which does what it is told."""

    def __init__(self, swarm: Swarm, number: int, limits: Limits) -> None:
        super().__init__(swarm, number, limits)
        self.courtesy = Courtesy(lambda: self.endpoint.bytes_sent)
        self.events: list[RoundEvent] = []
        settings = ChannelSettings(
            times=swarm.times,
            codec=swarm.codecs.get(number, swarm.codec),
            report=self.events.append,
            fixed=swarm.fixed,
            max_weight=MAX_WEIGHT if number in swarm.limitless else swarm.max_weight,
            max_block=1 << 24,
            courtesy=self.courtesy,
        )
        self.collective = AsyncCollective(self.endpoint, RUN, roster=self, settings=settings)

    async def begin(self, nursery: trio.Nursery) -> None:
        await nursery.start(self.collective.run)


class Swarm(SimulatedSwarm[Peer]):
    """Peers that call operations."""

    def __init__(
        self,
        count: int,
        *,
        limits: Callable[[int], Limits] = lambda number: Limits(),
        codec: CodecName = "fp32",
        codecs: Mapping[int, CodecName] | None = None,
        fixed: bool = False,
        max_weight: float = MAX_WEIGHT,
        limitless: Collection[int] = (),
        **options,
    ) -> None:
        self.limits, self.codec, self.max_weight, self.limitless = limits, codec, max_weight, limitless
        self.codecs, self.fixed = codecs or {}, fixed
        super().__init__(count, run_id=RUN, **options)

    def make(self, number: int) -> Peer:
        return Peer(self, number, self.limits(number))

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


@pytest.fixture
def swarm_of():
    """A factory of running swarms: `async with swarm_of(4, seed=…) as swarm`. Tests also take `autojump_clock`."""
    return lambda count, **options: running(Swarm(count, **options))

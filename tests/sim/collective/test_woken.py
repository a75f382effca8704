"""Peers whose processes were stopped together and go on: they have each other, and seem to have lost the rest."""

from __future__ import annotations

import itertools

import attrs
import pytest
import torch
import trio

from protocol.channels import ChannelSettings
from protocol.courtesy import Courtesy
from protocol.endpoint import Limits
from protocol.mesh import Mesh
from protocol.operations import AsyncCollective
from protocol.transport import Address
from tests.sim.collective.conftest import RUN, Peer, Swarm
from tests.sim.swarm import TIMES, running

LENGTH = 300_000


class Meshed(Peer):
    """A peer whose members are those of its mesh."""

    def __init__(self, swarm: Swarm, number: int, limits: Limits) -> None:
        super().__init__(swarm, number, limits)
        first = [] if not number else [Address("host0", 1)]
        self.mesh = Mesh(self.endpoint, RUN, first)
        # While a process is stopped, no time passes for it: it notices nothing.
        times = attrs.evolve(TIMES, stall=60.0, quiet=60.0, grace=60.0) if limits.dead_after > 4 else TIMES
        settings = ChannelSettings(times=times, courtesy=Courtesy(lambda: self.endpoint.bytes_sent))
        self.collective = AsyncCollective(self.endpoint, RUN, roster=self.mesh, settings=settings)

    async def begin(self, nursery: trio.Nursery) -> None:
        await nursery.start(self.mesh.run)
        await super().begin(nursery)


class MeshedSwarm(Swarm):
    def make(self, number: int) -> Meshed:
        return Meshed(self, number, self.limits(number))


@pytest.mark.parametrize("delay", [0.05, 0.4, 0.9])
@pytest.mark.parametrize("stopped", list(itertools.combinations(range(4), 2)))
async def test_who_was_stopped_together_makes_no_operation_apart(autojump_clock, stopped, delay):
    """The others have lost them and gone on. It takes the stopped a moment to find them again."""
    limits = {True: Limits(dead_after=60.0), False: Limits(dead_after=4.0)}  # who is stopped does not count silence
    async with running(MeshedSwarm(4, bandwidth=1e6, limits=lambda number: limits[number in stopped])) as swarm:
        for peer in swarm.peers:
            await peer.mesh.wait_for(4)
        victims = [swarm.peers[number] for number in stopped]
        others = [peer for peer in swarm.peers if peer not in victims]

        async def wake():
            await trio.sleep(delay)
            swarm.network.partition([peer.host for peer in victims], [peer.host for peer in others])
            for peer in others:
                while set(peer.mesh.members) & {victim.id for victim in victims}:
                    await peer.mesh._changed.wait()
            await trio.sleep(5)  # until they have gone on
            for peer in victims:
                peer.mesh._awake.woken()
            swarm.network.heal()

        met = []

        async def until_all_are_there(peer):
            await swarm.peers[0].mesh.wait_for(4)
            while True:
                outcome = await peer.collective.all_reduce(torch.full((LENGTH,), float(peer.number)))
                met.append(outcome.members)
                if outcome.number > 1 and len(outcome.members) == 4:  # some may have finished the first
                    return

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wake)
            with trio.fail_after(60):
                await swarm.together(until_all_are_there)
        assert not {frozenset(victim.id for victim in victims)} & {frozenset(members) for members in met}

"""Who gets how much of a slow uplink, when several things want it at once."""

from __future__ import annotations

import pytest
import torch
import trio

from protocol.endpoint import Limits
from protocol.wire import message


@message("test.state")
class StateRequest:
    """Asks for zeros without end."""


def slow(number: int) -> Limits:
    return Limits(max_upload=36_000)


async def seconds_of_a_ring(swarm, peers) -> float:
    begun = trio.current_time()
    outcomes = await swarm.together(lambda peer: peer.collective.all_reduce(torch.ones(50_000)), peers)
    assert all(len(reduced.members) == len(peers) and reduced.attempts == 1 for reduced in outcomes.values())
    return trio.current_time() - begun


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("newcomers", [1, 3])
async def test_giving_a_state_hardly_slows_a_ring_down(autojump_clock, swarm_of, newcomers, streams):
    async with swarm_of(3 + newcomers, limits=slow) as swarm:
        members = swarm.peers[:3]
        received = [0]
        for peer in members:
            peer.partners = peer.expected = lambda: [member.id for member in members]
            peer.endpoint.handle(StateRequest, give_with(peer.courtesy))

        async def fetch(peer) -> None:
            async with peer.endpoint.open(members[0].id, StateRequest(), bulk=True) as stream:
                buffer = bytearray(1024)
                while True:
                    await stream.receive_into(buffer)
                    received[0] += len(buffer)

        alone = await seconds_of_a_ring(swarm, members)
        async with trio.open_nursery() as nursery:
            for peer in swarm.peers[3:]:
                for _ in range(streams):
                    nursery.start_soon(fetch, peer)
            await trio.sleep(30)
            assert received[0] > 30 * 36_000 * 0.9  # between rings, nothing is held back
            before = received[0]
            beside = await seconds_of_a_ring(swarm, members)
            assert beside < 1.4 * alone
            assert 0 < received[0] - before < 36_000 * beside / 3
            nursery.cancel_scope.cancel()


def give_with(courtesy):
    async def give(request, stream) -> None:
        while True:
            await courtesy.send(stream, bytes(1 << 16))

    return give


async def test_a_small_operation_is_not_starved_by_a_large_one(autojump_clock, swarm_of):
    async with swarm_of(3, limits=slow) as swarm:
        seconds = {}

        async def call(peer):
            large = peer.collective.start_all_reduce(torch.ones(200_000), tag="large")
            await trio.sleep(3)
            begun = trio.current_time()
            await peer.collective.all_reduce(torch.ones(5000), tag="small")
            seconds[peer] = trio.current_time() - begun
            assert not large.done.is_set()
            return await large.wait()

        begun = trio.current_time()
        await swarm.together(call)
        # 27 kB at 18 kB/s; and at each of four hops up to a turn of the large one, 16 KiB. That takes 30 s by itself.
        assert max(seconds.values()) < 4
        assert trio.current_time() - begun < 33

"""Peers that use a tag for the first time, when others have used it for long."""

from __future__ import annotations

import pytest
import torch
import trio

from protocol.plan import NO_DIGEST, coordinators


def vector(peer) -> torch.Tensor:
    return torch.full((1000,), float(peer.number))


@pytest.mark.parametrize("latency", [0.001, 0.05])
@pytest.mark.parametrize("newcomer", range(4))
async def test_one_that_coordinates_at_once_leaves_nobody_out(autojump_clock, swarm_of, newcomer, latency):
    """It does not know yet how far the others are when they come to it, and they go elsewhere first."""
    async with swarm_of(4, latency=latency) as swarm:
        peers = [peer.id for peer in swarm.peers]
        late = swarm.peers[newcomer]
        number = next(n for n in range(4, 100) if coordinators(swarm.run_id, n, peers)[0] == late.id)
        others = [peer for peer in swarm.peers if peer is not late]
        for peer in others:
            rounds = await peer.collective._channels.get("", None)
            rounds.committed(number - 1, NO_DIGEST)
        began = trio.current_time()
        outcomes = await swarm.together(lambda peer: peer.collective.all_reduce(vector(peer)))
        assert {outcome.number for outcome in outcomes.values()} == {number}
        assert all(set(outcome.members) == set(peers) for outcome in outcomes.values())
        assert {outcome.mean[0].item() for outcome in outcomes.values()} == {1.5}
        assert trio.current_time() - began < swarm.times.grace
        await swarm.rest()

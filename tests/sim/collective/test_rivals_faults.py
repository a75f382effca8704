"""Operations that others report as done though they are not: see `tests/sim/rounds/test_rivals_faults.py`."""

from __future__ import annotations

import random

import pytest
import torch
import trio

from protocol.collective import Outcome
from protocol.errors import Misfit, ShoalError


@pytest.mark.parametrize("seed", range(8))
async def test_many_operations_in_flight_while_one_is_killed_are_all_done(autojump_clock, swarm_of, seed):
    """Each has the mean of its recorded members at every survivor, whoever else was in flight with it."""
    rng = random.Random(seed)
    async with swarm_of(4, seed=seed, bandwidth=400_000) as swarm:
        numbers = {(peer.id, tag): float(2**peer.number * (1 + tag)) for peer in swarm.peers for tag in range(4)}
        victim = rng.choice(swarm.peers)

        async def kill():
            await trio.sleep(rng.uniform(0, 2.5))
            swarm.kill(victim)

        def start(peer, tag):
            return peer.collective.start_all_reduce(torch.full((20_000,), numbers[peer.id, tag]), tag=str(tag))

        async def call(peer):
            handles = [start(peer, tag) for tag in range(4)]
            return [await handle.wait() for handle in handles]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            with trio.fail_after(60):
                outcomes = await swarm.together(call)
        survivors = {peer.id for peer in swarm.alive}
        for peer in swarm.alive:
            for tag, reduced in enumerate(outcomes[peer]):
                assert set(reduced.members) >= survivors
                for part in reduced.plan.parts:
                    mean = sum(numbers[member, tag] for member in part.members) / len(part.members)
                    found = reduced.mean[part.start : part.stop]
                    torch.testing.assert_close(found, torch.full_like(found, mean))
        await swarm.rest()


async def test_every_tensor_of_a_list_is_reduced(autojump_clock, swarm_of):
    async with swarm_of(2) as swarm:
        outcomes = await swarm.together(
            lambda peer: peer.collective.all_reduce([torch.full((size,), float(peer.number)) for size in (60, 60, 10)])
        )
        for reduced in outcomes.values():
            assert [tensor.tolist() for tensor in reduced.tensors] == [[0.5] * 60, [0.5] * 60, [0.5] * 10]


async def test_vectors_of_different_lengths_are_not_mixed(autojump_clock, swarm_of):
    async with swarm_of(3) as swarm:
        odd = swarm.peers[2]
        outcomes = await swarm.together(lambda peer: peer.collective.all_reduce(torch.ones(4 if peer is odd else 3)))
        assert isinstance(outcomes.pop(odd), Misfit)
        for outcome in outcomes.values():
            assert set(outcome.members) == {peer.id for peer in outcomes}
            assert outcome.mean.tolist() == [1.0] * 3


async def test_a_weight_beyond_the_limit_does_not_count(autojump_clock, swarm_of):
    async with swarm_of(3, max_weight=10.0, limitless=[1]) as swarm:
        heavy = swarm.peers[1]
        with trio.move_on_after(60):
            outcomes = {}

            async def call(peer):
                outcomes[peer] = await peer.collective.all_reduce(
                    torch.full((3,), float(peer.number)), 1e12 if peer is heavy else 1.0
                )

            await swarm.together(call)
        for peer in swarm.peers:
            if peer is not heavy:
                assert outcomes[peer].mean.tolist() == [1.0] * 3  # of 0 and 2
                assert heavy.id not in outcomes[peer].contributors
        assert isinstance(outcomes.get(heavy), ShoalError | None | Outcome)
        if heavy in outcomes:
            assert set(outcomes[heavy].members) == {heavy.id}


async def test_who_is_alone_is_told_so(autojump_clock, swarm_of):
    """With nobody in reach, there is a result: of ourselves, and it says so."""
    async with swarm_of(3) as swarm:
        alone, *others = swarm.peers
        swarm.network.partition([alone.host], [peer.host for peer in others])
        outcomes = await swarm.together(lambda peer: peer.collective.all_reduce(torch.full((2,), float(peer.number))))
        assert outcomes[alone].members == outcomes[alone].contributors == (alone.id,)
        assert outcomes[alone].mean.tolist() == [0.0] * 2
        for peer in others:
            assert set(outcomes[peer].contributors) == {other.id for other in others}
            assert outcomes[peer].mean.tolist() == [1.5] * 2

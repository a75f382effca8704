"""Peers that die, return with an earlier checkpoint, and make a plan again that they have made before.

They know nothing of it, and have trained anew: so one plan id stands for two results. Digests tell them apart.
"""

from __future__ import annotations

import contextlib
import hashlib

import pytest
import torch
import trio

from protocol.errors import Behind, Fork
from protocol.vectors import vector_bytes

STATE = bytes([1] * 32)


def digest_of(reduced) -> bytes:
    return hashlib.sha256(STATE + reduced.plan.id + vector_bytes(reduced.mean)).digest()


async def reborn(swarm, peer):
    """The next life of a peer, which knows nothing of the one before."""
    swarm.kill(peer)
    again = swarm.make(peer.number)
    swarm.peers.append(again)
    await swarm.nursery.start(again.run)
    return again


async def connected(*peers):
    for one in peers:
        with one.endpoint.watch() as events:
            while not all(one is other or one.endpoint.is_connected(other.id) for other in peers):
                await events.receive()


async def make_round(peers, value):
    """What these peers get out of the round for revision 2."""
    found = {}

    async def take_part(peer):
        with contextlib.suppress(Behind):
            found[peer] = await peer.rounds.all_reduce(2, torch.full((5,), value), 1.0, digest=STATE)

    for peer in peers:
        peer.rounds.committed(1, STATE)
    async with trio.open_nursery() as nursery:
        for peer in peers:
            nursery.start_soon(take_part, peer)
    return found


@pytest.mark.parametrize("members", [1, 2, 3])
async def test_two_results_of_one_plan_are_told_apart(autojump_clock, swarm_of, members):
    async with swarm_of(members + 1, train=False) as swarm:
        *makers, witness = swarm.peers
        swarm.network.partition([witness.host], [peer.host for peer in makers])
        await trio.sleep(10)
        first = await make_round(makers, 1.0)
        swarm.network.heal()
        await connected(witness, *makers)
        witness.rounds.committed(1, STATE)
        kept = await witness.rounds.fetch_result(makers[0].id, 2)
        swarm.network.partition([witness.host], [peer.host for peer in makers])
        makers = [await reborn(swarm, peer) for peer in makers]
        await connected(*makers)
        second = await make_round(makers, 2.0)

        assert {reduced.plan.id for reduced in (*first.values(), *second.values())} == {kept.plan.id}
        assert len({digest_of(reduced) for reduced in second.values()}) == 1
        assert digest_of(kept) != digest_of(second[makers[0]])
        swarm.network.heal()
        await connected(witness, *makers)
        witness.rounds.committed(2, digest_of(kept))
        forks = []

        async def go_on(peer, digest):
            try:
                await peer.rounds.all_reduce(3, torch.zeros(5), 1.0, digest=digest)
            except Fork as fork:
                forks.append(fork)

        async with trio.open_nursery() as nursery:
            for peer in makers:
                peer.rounds.committed(2, digest_of(second[peer]))
            await trio.sleep(1)
            nursery.start_soon(go_on, witness, digest_of(kept))
            for peer in makers:
                nursery.start_soon(go_on, peer, digest_of(second[peer]))
        assert forks
        assert all({fork.ours, fork.theirs} == {digest_of(kept), digest_of(second[makers[0]])} for fork in forks)


@pytest.mark.parametrize("seed", range(4))
async def test_all_agree_in_the_end(autojump_clock, swarm_of, seed):
    """The other one has taken over what came of the first life."""
    async with swarm_of(2, seed=seed, train=False) as swarm:
        witness, maker = swarm.peers
        swarm.network.partition([witness.host], [maker.host])
        await trio.sleep(10)
        await maker.step()
        await witness._adopt(maker.id)
        assert witness.digest == maker.digest
        again = await reborn(swarm, maker)
        again.values = lambda revision: torch.full((swarm.length,), 1.0 + revision)
        await again.step()
        assert again.results[1].plan.id == maker.results[1].plan.id
        assert again.digest != maker.digest
        swarm.network.heal()
        await connected(witness, again)
        swarm.begin.set()
        with trio.fail_after(120):
            await again.reach(4)
            await witness.reach(4)
        assert [again.chain[revision] for revision in range(5)] == [witness.chain[revision] for revision in range(5)]
        assert len(again.results[4].plan.members) == 2


async def test_who_survives_has_the_others_make_another_plan(autojump_clock, swarm_of):
    """It has accepted the first one, and says so."""
    async with swarm_of(3, train=False, latency=0.1) as swarm:
        survivor, *others = swarm.peers
        found = []

        async def take_part():
            found.append(await survivor.rounds.all_reduce(2, torch.ones(5), 1.0, digest=STATE))

        async with trio.open_nursery() as nursery:
            survivor.rounds.committed(1, STATE)
            nursery.start_soon(take_part)
            with trio.move_on_after(60):
                async with trio.open_nursery() as doomed:
                    doomed.start_soon(make_round, others, 1.0)
                    await survivor.enter(2)
                    doomed.cancel_scope.cancel()
            (plan,) = swarm.plans.values()
            others = [await reborn(swarm, peer) for peer in others]
            await connected(survivor, *others)
            again = await make_round(others, 2.0)
        results = [*found, *again.values()]
        assert all(reduced.plan.id != plan.id for reduced in results)
        for one in results:
            assert {bytes(vector_bytes(r.mean)) for r in results if r.plan.id == one.plan.id} == {
                bytes(vector_bytes(one.mean))
            }

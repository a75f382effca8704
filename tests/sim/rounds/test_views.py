"""Rounds of peers that are connected, but take different ones for candidates."""

from __future__ import annotations

import pytest
import torch
import trio

from protocol.plan import coordinators

STATE = bytes([1] * 32)


def ranked(swarm, revision):
    return [swarm.by_id(peer) for peer in coordinators(swarm.run_id, revision, [peer.id for peer in swarm.peers])]


class Reduction:
    """What peers get out of the round for revision 2, each of them beginning when it is told to."""

    def __init__(self, nursery):
        self.nursery, self.reduced = nursery, {}
        self.news = trio.Event()

    def begin(self, *peers):
        for peer in peers:
            peer.rounds.committed(1, STATE)
            self.nursery.start_soon(self._reduce, peer)

    async def _reduce(self, peer):
        self.reduced[peer] = await peer.rounds.all_reduce(2, torch.ones(3), 1.0, digest=STATE)
        self.news.set()
        self.news = trio.Event()

    async def ended(self, count):
        while len(self.reduced) < count:
            await self.news.wait()

    def plans(self):
        return {reduced.plan.id for reduced in self.reduced.values()}


@pytest.mark.parametrize("seed", range(4))
async def test_a_coordinator_that_catches_up_is_followed_by_those_who_had_passed_it_over(
    autojump_clock, swarm_of, seed
):
    async with swarm_of(4, seed=seed, train=False) as swarm, trio.open_nursery() as nursery:
        first, second, third, fourth = ranked(swarm, 2)
        for peer in (third, fourth):
            peer.passed_over = {first.id}  # it is a round behind
        round = Reduction(nursery)
        round.begin(second)
        await trio.sleep(0.3)
        round.begin(third)
        await trio.sleep(0.3)
        round.begin(fourth)
        await trio.sleep(swarm.times.grace / 2)
        assert not round.reduced
        round.begin(first)
        with trio.fail_after(5):
            await round.ended(4)
        assert len(round.plans()) == 1
        assert len(round.reduced[first].plan.members) == 4


async def test_a_connected_member_is_waited_for_although_it_is_behind(autojump_clock, swarm_of):
    async with swarm_of(3, train=False) as swarm, trio.open_nursery() as nursery:
        *quick, late = ranked(swarm, 2)
        for peer in quick:
            peer.passed_over = {late.id}
        round = Reduction(nursery)
        round.begin(*quick)
        await trio.sleep(swarm.times.grace)
        assert not round.reduced
        round.begin(late)
        with trio.fail_after(5):
            await round.ended(3)
        assert len(round.plans()) == 1


async def test_a_member_that_is_behind_and_never_comes_costs_the_grace(autojump_clock, swarm_of):
    async with swarm_of(3, train=False) as swarm, trio.open_nursery() as nursery:
        *quick, late = ranked(swarm, 2)
        for peer in quick:
            peer.passed_over = {late.id}
        round = Reduction(nursery)
        started = trio.current_time()
        round.begin(*quick)
        await round.ended(2)
        assert trio.current_time() - started <= swarm.times.grace + swarm.times.slack + 1
        assert len(round.plans()) == 1


async def test_a_member_goes_over_to_a_better_placed_coordinator(autojump_clock, swarm_of):
    """Two coordinators that cannot reach each other have a member in common, and make one round of it."""
    async with swarm_of(3, train=False) as swarm, trio.open_nursery() as nursery:
        first, second, third = ranked(swarm, 2)
        swarm.network.partition([first.host], [second.host])
        await trio.sleep(10)
        third.passed_over = {first.id}
        round = Reduction(nursery)
        round.begin(third)  # goes to the second, which is not ready yet
        await trio.sleep(1)
        round.begin(first)
        with trio.fail_after(60):
            await round.ended(2)
        assert set(round.reduced) == {first, third}
        assert len(round.plans()) == 1
        nursery.cancel_scope.cancel()


async def test_a_peer_does_not_go_to_one_that_waits_at_it(autojump_clock, swarm_of):
    """Each would wait for the other, since the better placed one has been told of the other before."""
    async with swarm_of(2, train=False) as swarm, trio.open_nursery() as nursery:
        first, second = ranked(swarm, 2)
        round = Reduction(nursery)
        first.rounds._leadership(2).follow(second.id)
        round.begin(second)
        await trio.sleep(1)
        round.begin(first)
        with trio.fail_after(5):
            await round.ended(2)
        assert len(round.plans()) == 1

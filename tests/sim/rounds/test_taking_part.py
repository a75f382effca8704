"""One round at a time, by hand: what a caller of `Rounds` gets back."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import trio

from protocol.errors import Behind, Fork, RequestRefused, ShoalError
from protocol.plan import NO_DIGEST, coordinators
from protocol.round_messages import Noted, RoundOpen
from protocol.vectors import vector_bytes

OTHER = bytes([7] * 32)


def ranked(swarm, revision: int):
    return [swarm.by_id(peer) for peer in coordinators(swarm.run_id, revision, [peer.id for peer in swarm.peers])]


async def reduce_all(peers, revision, values, weights, *, digest=bytes(32)):
    """All peers take part at once; their results or errors, in order."""
    outcomes = [None] * len(peers)

    async def one(index):
        try:
            outcomes[index] = await peers[index].rounds.all_reduce(
                revision, values[index], weights[index], digest=digest
            )
        except ShoalError as error:
            outcomes[index] = error

    async with trio.open_nursery() as nursery:
        for index in range(len(peers)):
            nursery.start_soon(one, index)
    return outcomes


async def test_weighted_mean_and_what_is_told_about_it(autojump_clock, swarm_of):
    async with swarm_of(3, train=False) as swarm:
        values = [torch.full((5,), float(number)) for number in (1, 2, 6)]
        results = await reduce_all(swarm.peers, 1, values, [1.0, 1.0, 2.0])
        for peer, reduced in zip(swarm.peers, results, strict=True):
            assert reduced.mean.tolist() == [3.75] * 5
            assert reduced.weight == 4.0
            assert set(reduced.contributors) == {other.id for other in swarm.peers}
            assert reduced.attempts == 1
            assert reduced.seconds > 0
            assert reduced.bytes_received == 4 * 5 * (2 if peer.id == reduced.plan.coordinator else 1)
            assert reduced.bytes_sent == reduced.bytes_received
            assert [event.event for event in peer.events] == ["round_started"]
            assert peer.events[0].members == reduced.plan.members
        assert [value.tolist() for value in values] == [[1.0] * 5, [2.0] * 5, [6.0] * 5]


async def test_alone_the_mean_is_the_values_bit_for_bit(autojump_clock, swarm_of):
    async with swarm_of(1, train=False) as swarm:
        values = torch.randn(100)
        (reduced,) = await reduce_all(swarm.peers, 1, [values], [0.1])
        assert bytes(vector_bytes(reduced.mean)) == bytes(vector_bytes(values))


async def test_values_that_are_not_finite_are_left_out(autojump_clock, swarm_of):
    async with swarm_of(3, train=False) as swarm:
        values = [torch.ones(4), torch.tensor([1.0, math.nan, 1.0, math.inf]), torch.full((4,), 3.0)]
        results = await reduce_all(swarm.peers, 1, values, [1.0, 5.0, 1.0])
        for reduced in results:
            assert reduced.mean.tolist() == [2.0] * 4
            assert len(reduced.plan.members) == 3
            assert set(reduced.contributors) == {swarm.peers[0].id, swarm.peers[2].id}
        assert "contribution_dropped" in [event.event for event in swarm.peers[1].events]


async def test_nobody_has_weight(autojump_clock, swarm_of):
    async with swarm_of(2, train=False) as swarm:
        results = await reduce_all(swarm.peers, 1, [torch.ones(3), torch.ones(3)], [0.0, 0.0])
        assert [reduced.mean.tolist() for reduced in results] == [[0.0] * 3] * 2
        assert results[0].contributors == ()


@pytest.mark.parametrize(
    ("values", "weight", "revision"),
    [
        (torch.ones(2, 2), 1.0, 1),
        (torch.ones(3, dtype=torch.float64), 1.0, 1),
        (torch.ones(0), 1.0, 1),
        (torch.ones(3), -1.0, 1),
        (torch.ones(3), math.nan, 1),
        (torch.ones(3), 1.0, 0),
    ],
)
async def test_senseless_arguments(autojump_clock, swarm_of, values, weight, revision):
    async with swarm_of(1, train=False) as swarm:
        with pytest.raises(ValueError, match=r"values|weight|revision"):
            await swarm.peers[0].rounds.all_reduce(revision, values, weight)


async def test_values_must_belong_to_the_state_that_we_hold(autojump_clock, swarm_of):
    async with swarm_of(1, train=False) as swarm:
        with pytest.raises(ValueError, match="digest"):
            await swarm.peers[0].rounds.all_reduce(1, torch.ones(3), 1.0, digest=OTHER)
        swarm.peers[0].rounds.committed(1, OTHER)
        with pytest.raises(ValueError, match="there already"):
            await swarm.peers[0].rounds.all_reduce(1, torch.ones(3), 1.0)


async def test_the_slow_are_told_and_can_still_come(autojump_clock, swarm_of):
    async with swarm_of(3, train=False) as swarm:
        slow = ranked(swarm, 1)[2]
        quick = [peer for peer in swarm.peers if peer is not slow]
        assert slow.rounds.opened(1) is None
        async with trio.open_nursery() as nursery:
            begun = trio.current_time()
            nursery.start_soon(reduce_all, quick, 1, [torch.ones(3)] * 2, [1.0] * 2)
            await slow.rounds.due(1)
            assert trio.current_time() - begun == pytest.approx(swarm.times.grace, abs=0.2)
            reduced = await slow.rounds.all_reduce(1, torch.full((3,), 4.0), 1.0)
        assert reduced.mean.tolist() == [2.0] * 3


@pytest.mark.parametrize("said", [[1e6], [1e6, 2.0], [2.0, 1e6], [1e6, 3.0, 2.0, 1e6]])
async def test_nobody_can_make_others_wait_longer_than_they_would(autojump_clock, swarm_of, said):
    """Of several that wait for a peer, the first to go on is right, and none has longer than everybody has."""
    async with swarm_of(2, train=False) as swarm:
        one, other = swarm.peers
        begun = trio.current_time()
        for remaining in said:
            question = RoundOpen(swarm.run_id, "", 1, NO_DIGEST, remaining)
            assert await one.endpoint.request(other.id, question, Noted) == Noted()
        await other.rounds.due(1)
        assert trio.current_time() - begun == pytest.approx(min([*said, swarm.times.grace]), abs=0.5)


async def test_a_coordinator_that_is_not_ready_coordinates_all_the_same(autojump_clock, swarm_of):
    async with swarm_of(3, train=False) as swarm:
        slow, *quick = ranked(swarm, 1)
        results = await reduce_all(quick, 1, [torch.ones(3)] * 2, [1.0] * 2)
        assert all(reduced.plan.coordinator == slow.id for reduced in results)
        assert slow.id not in results[0].plan.members
        # It missed the round, and can have the result.
        with pytest.raises(Behind) as caught:
            await slow.rounds.all_reduce(1, torch.ones(3), 1.0)
        fetched = await slow.rounds.fetch_result(caught.value.peer, caught.value.revision)
        assert fetched.plan == results[0].plan
        assert torch.equal(fetched.mean, results[0].mean)


async def test_a_result_that_is_here_can_be_had_though_its_holder_is_gone(autojump_clock, swarm_of):
    async with swarm_of(3, train=False) as swarm:
        *quick, slow = ranked(swarm, 1)
        await reduce_all(quick, 1, [torch.ones(3)] * 2, [1.0] * 2)
        fetched = await slow.rounds.fetch_result(quick[0].id, 1)
        swarm.kill(quick[0])
        assert await slow.rounds.fetch_result(quick[0].id, 1) is fetched


async def test_who_missed_the_round_is_told_who_has_it(autojump_clock, swarm_of):
    async with swarm_of(3, train=False) as swarm:
        *quick, slow = ranked(swarm, 1)
        await reduce_all(quick, 1, [torch.ones(3)] * 2, [1.0] * 2)
        for peer in quick:
            peer.rounds.committed(1, OTHER)
        with pytest.raises(Behind) as caught:
            await slow.rounds.all_reduce(1, torch.ones(3), 1.0)
        assert caught.value.peer == quick[0].id
        assert caught.value.revision == 1


async def test_a_trainer_learns_that_others_are_ahead(autojump_clock, swarm_of):
    async with swarm_of(3, train=False) as swarm:
        *quick, slow = ranked(swarm, 1)
        await reduce_all(quick, 1, [torch.ones(3)] * 2, [1.0] * 2)
        for peer in quick:
            peer.rounds.committed(1, OTHER)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(reduce_all, quick, 2, [torch.ones(3)] * 2, [1.0] * 2, digest=OTHER))
            while slow.rounds.opened(1) != -math.inf:
                await slow.rounds._news.wait()
            assert slow.rounds.heard in [(1, peer.id) for peer in quick]


async def test_another_branch_is_told_from_falling_behind(autojump_clock, swarm_of):
    async with swarm_of(2, train=False) as swarm:
        first, second = ranked(swarm, 2)
        first.rounds.committed(1, bytes([1] * 32))
        second.rounds.committed(1, OTHER)
        with pytest.raises(Fork) as caught:
            await second.rounds.all_reduce(2, torch.ones(3), 1.0, digest=OTHER)
        assert (caught.value.peer, caught.value.revision) == (first.id, 1)
        assert (caught.value.ours, caught.value.theirs) == (OTHER, bytes([1] * 32))
        # Whoever stays with its branch can go on alone.
        reduced = await second.rounds.all_reduce(2, torch.ones(3), 1.0, digest=OTHER)
        assert reduced.plan.members == (second.id,)
        # The other one is on another branch, not behind, even when it comes later.
        with pytest.raises(Fork):
            first.rounds.adopted(1, bytes([2] * 32))
            first.endpoint.learn(second.id, second.endpoint.address)
            await _ready_at(first, second, 2, bytes([2] * 32))


async def _ready_at(peer, coordinator, revision, digest):
    """Takes part under a chosen coordinator."""
    leadership = peer.rounds._leadership(revision)
    leadership.follow(coordinator.id)
    await peer.rounds.all_reduce(revision, torch.ones(3), 1.0, digest=digest)


async def test_results_are_kept_for_a_while(autojump_clock, swarm_of):
    async with swarm_of(2, train=False) as swarm:
        one, other = swarm.peers
        for revision in range(1, 6):
            await one.rounds.all_reduce(revision, torch.ones(3), 1.0)
            one.rounds.committed(revision, bytes(32))
            other.rounds.adopted(revision, bytes(32))
        assert one.rounds.statistics().results == swarm.times.keep
        assert (await other.rounds.fetch_result(one.id, 5)).mean.tolist() == [1.0] * 3
        with pytest.raises(RequestRefused) as caught:
            await other.rounds.fetch_result(one.id, 2)
        assert caught.value.code == "unknown_round"


async def test_giving_up_leaves_nothing_behind(autojump_clock, swarm_of):
    async with swarm_of(3, train=False) as swarm:
        for peer in ranked(swarm, 1)[:2]:
            with trio.move_on_after(2) as scope:
                await peer.rounds.all_reduce(1, torch.ones(3), 1.0)
            assert scope.cancelled_caught
        await trio.sleep(20)
        assert not any(peer.rounds.statistics().busy for peer in swarm.peers)
        # And the round can still be made.
        results = await reduce_all(swarm.peers, 1, [torch.ones(3)] * 3, [1.0] * 3)
        assert [len(reduced.contributors) for reduced in results] == [3, 3, 3]


@pytest.mark.parametrize("length", [1, 2, 3, 300_000])
async def test_lengths(autojump_clock, swarm_of, length):
    async with swarm_of(3, train=False) as swarm:
        values = [torch.full((length,), float(number)) for number in (3, 6, 9)]
        results = await reduce_all(swarm.peers, 1, values, [1.0] * 3)
        means = {bytes(vector_bytes(reduced.mean)) for reduced in results}
        assert len(means) == 1
        torch.testing.assert_close(results[0].mean, torch.full((length,), 6.0))

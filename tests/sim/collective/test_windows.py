"""Operations that begin without those who are late."""

from __future__ import annotations

import random

import pytest
import torch
import trio

from protocol import operations
from protocol.codecs import ErrorFeedback, make_codec
from protocol.collective import Window
from protocol.errors import Behind, RequestTimeout, ShoalError
from protocol.rounds import Rounds

WINDOW = Window(quorum=2, grace=1.0, keep=4)


async def reduce(peer, value, window=WINDOW):
    return await peer.collective.all_reduce(torch.full((3,), float(value)), window=window)


def told(reduced):
    return [(one.number, one.mean[0].item(), len(one.contributors)) for one in (*reduced.missed, reduced)]


async def test_who_is_late_gets_what_it_has_missed_and_takes_part_in_the_next_one(autojump_clock, swarm_of):
    async with swarm_of(3) as swarm:
        *quick, slow = swarm.peers
        early = [await swarm.together(lambda peer, value=value: reduce(peer, value), quick) for value in (2.0, 4.0)]
        values = dict(zip(swarm.peers, (3.0, 6.0, 12.0), strict=True))
        last = await swarm.together(lambda peer: reduce(peer, values[peer]))
        late = last[slow]
        assert told(late) == [(1, 2.0, 2), (2, 4.0, 2), (3, 7.0, 3)]
        first = {peer: [*(results[peer] for results in early), last[peer]] for peer in quick}
        for results in first.values():
            assert [told(one) for one in results] == [[(1, 2.0, 2)], [(2, 4.0, 2)], [(3, 7.0, 3)]]
        assert late.counted
        for theirs, ours in zip(first[quick[0]], (*late.missed, late), strict=True):
            assert torch.equal(theirs.mean, ours.mean)
        await swarm.rest()


async def test_too_few_wait_for_more_until_the_grace_time_is_over(autojump_clock, swarm_of):
    """The second peer comes within it, and then the window's own is enough; the third one, much later, is alone."""
    async with swarm_of(3) as swarm:
        begun = trio.current_time()
        times, found = {}, {}

        async def come(peer, delay):
            await trio.sleep(delay)
            found[peer] = await reduce(peer, delay)
            times[peer] = trio.current_time() - begun

        grace = swarm.times.grace
        delays = (0.0, grace / 2, 10 * grace)
        async with trio.open_nursery() as nursery:
            for peer, delay in zip(swarm.peers, delays, strict=True):
                nursery.start_soon(come, peer, delay)
        quorum = (1, grace / 4, 2)
        alone = (2, 10 * grace, 1)
        assert [told(found[peer]) for peer in swarm.peers] == [[quorum], [quorum], [quorum, alone]]
        assert times[swarm.peers[0]] < grace / 2 + WINDOW.grace + 1
        assert grace * 11 <= times[swarm.peers[2]] < grace * 11 + 1  # neither longer, nor for ever
        await swarm.rest()


async def test_those_who_are_left_are_enough(autojump_clock, swarm_of):
    async with swarm_of(1) as swarm:
        assert told(await reduce(swarm.peers[0], 5.0)) == [(1, 5.0, 1)]


async def test_who_has_missed_more_than_is_kept_is_told(autojump_clock, swarm_of):
    async with swarm_of(3) as swarm:
        *quick, slow = swarm.peers
        for value in range(6):
            await swarm.together(lambda peer, value=value: reduce(peer, value), quick)
        with pytest.raises(Behind):
            await reduce(slow, 1.0)
        results = await swarm.together(lambda peer: reduce(peer, 1.0))  # with a state from elsewhere, it goes on
        assert {result.number for result in results.values()} == {7}
        await swarm.rest()


async def test_who_learns_late_that_its_values_were_in_a_result_does_not_bring_them_again(
    autojump_clock, swarm_of, monkeypatch
):
    """Its line breaks when all have what it brings, and when it is back the operation is over."""
    async with swarm_of(2) as swarm:
        one, other = swarm.peers
        original = Rounds.all_reduce

        async def broken(rounds, revision, values, weight, **options):
            reduced = await original(rounds, revision, values, weight, **options)
            if values[0] == 2.0 and revision == 1:
                raise Behind(other.endpoint.peer_id, 1)
            return reduced

        monkeypatch.setattr(Rounds, "all_reduce", broken)
        first = await swarm.together(lambda peer: reduce(peer, 2.0 if peer is one else 4.0))
        assert [told(first[peer]) for peer in (one, other)] == [[(1, 3.0, 2)]] * 2
        assert first[one].counted
        second = await swarm.together(lambda peer: reduce(peer, 2.0))
        assert [told(second[peer]) for peer in (one, other)] == [[(2, 2.0, 2)]] * 2
        await swarm.rest()


async def test_nor_if_it_has_missed_more_results_since(autojump_clock, swarm_of, monkeypatch):
    """Its line breaks when all have what it brings; when it is back, another operation is over, too."""
    async with swarm_of(2) as swarm:
        one, other = swarm.peers
        original = Rounds.all_reduce

        async def broken(rounds, revision, values, weight, **options):
            reduced = await original(rounds, revision, values, weight, **options)
            if values[0] == 2.0 and revision == 1:
                await ahead.wait()
                raise Behind(other.endpoint.peer_id, 2)
            return reduced

        ahead = trio.Event()
        monkeypatch.setattr(Rounds, "all_reduce", broken)
        found = {}

        async def work(peer, *values):
            found[peer] = [await reduce(peer, value) for value in values]
            ahead.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(work, one, 2.0)
            nursery.start_soon(work, other, 4.0, 6.0)
        assert [told(result) for result in found[one]] == [[(1, 3.0, 2)]]
        second = await swarm.together(lambda peer: reduce(peer, 8.0))
        assert told(second[one]) == [(2, 6.0, 1), (3, 8.0, 2)]
        await swarm.rest()


async def test_results_that_nobody_takes_are_kept_up_to_a_limit(autojump_clock, swarm_of, monkeypatch):
    """A peer fetches what it has missed and then finds nobody to reduce with, again and again, under several tags."""
    kept = 5
    monkeypatch.setattr(operations, "MOST_MISSED", kept * 12)
    lonely = Window(quorum=2, grace=20.0, keep=4)
    async with swarm_of(3) as swarm:
        *quick, slow = swarm.peers
        errors = []
        for tag in ("a", "b", "c"):

            def call(peer, tag=tag, timeout=None):
                return peer.collective.all_reduce(torch.ones(3), window=lonely, tag=tag, timeout=timeout)

            async with trio.open_nursery() as nursery:
                for peer in quick * 2:
                    nursery.start_soon(call, peer)
            with pytest.raises(ShoalError) as info:
                await call(slow, timeout=10.0)
            errors.append(type(info.value))
        assert errors == [RequestTimeout, RequestTimeout, Behind]
        assert slow.collective._missed_bytes <= kept * 12


async def test_all_have_to_have_the_same_window_for_a_tag(autojump_clock, swarm_of):
    async with swarm_of(1) as swarm:
        await reduce(swarm.peers[0], 1.0)
        with pytest.raises(ValueError, match="another window"):
            await reduce(swarm.peers[0], 1.0, Window(quorum=3))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [2, 3])
async def test_of_each_operation_there_is_one_result_though_nobody_waits(autojump_clock, swarm_of, seed, count):
    """A window that is shorter than a message takes: who begins an operation has to hear first that it is over."""
    window = Window(quorum=1, grace=0.001, keep=64)
    async with swarm_of(count, seed=seed, latency=0.05) as swarm:
        rng, plans = random.Random(seed), {}

        async def life(peer):
            for _ in range(12):
                await trio.sleep(rng.choice([0.01, 0.1, 1.0]) * rng.random())
                reduced = await reduce(peer, 1.0, window)
                for one in (*reduced.missed, reduced):
                    plans.setdefault(one.number, set()).add(one.plan.id)

        await swarm.together(life)
        assert {number: len(found) for number, found in plans.items() if len(found) > 1} == {}
        await swarm.rest()


async def test_what_a_call_that_was_given_up_has_brought_is_not_taken_for_what_the_next_one_brings(
    autojump_clock, swarm_of, monkeypatch
):
    """Others finish the operation with the first call's values, and its caller does not wait for that."""
    async with swarm_of(2) as swarm:
        one, other = swarm.peers
        original = Rounds._take_part

        async def interrupted(rounds, work):
            reduced = await original(rounds, work)
            if work.values[0] == 2.0:
                rounds._results.clear()  # it is only about to be complete here
                await trio.sleep_forever()
            return reduced

        monkeypatch.setattr(Rounds, "_take_part", interrupted)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reduce, other, 4.0)
            with trio.move_on_after(10):
                await reduce(one, 2.0)
        results = await swarm.together(lambda peer: reduce(peer, 8.0 if peer is one else 6.0))
        assert [told(results[peer]) for peer in (one, other)] == [[(1, 3.0, 2), (2, 7.0, 2)], [(2, 7.0, 2)]]
        assert results[one].counted
        await swarm.rest()


def hold_up(peer, number, monkeypatch):
    """The peer's operation of this number does not return when its result is there."""
    original = Rounds._take_part

    async def held_up(rounds, work):
        reduced = await original(rounds, work)
        if rounds._endpoint is peer.endpoint and work.offer.revision == number:
            await trio.sleep_forever()
        return reduced

    monkeypatch.setattr(Rounds, "_take_part", held_up)


@pytest.mark.parametrize("window", [WINDOW, None])
@pytest.mark.parametrize("number", [1, 2])
async def test_a_result_that_was_here_when_its_call_was_given_up_comes_with_the_next_one(
    autojump_clock, swarm_of, monkeypatch, number, window
):
    """Without a window, the next one says that there is one of which nobody knows what came."""
    async with swarm_of(2) as swarm:
        one, other = swarm.peers
        hold_up(one, number, monkeypatch)
        results = {one: [], other: []}
        for value in (1.0, 2.0, 3.0):
            outcomes = await swarm.together(
                lambda peer, value=value: peer.collective.all_reduce(torch.full((3,), value), window=window, timeout=20)
            )
            for peer, outcome in outcomes.items():
                results[peer] += [outcome] if not isinstance(outcome, RequestTimeout) else []
        everything = [(1, 1.0, 2), (2, 2.0, 2), (3, 3.0, 2)]
        assert [one for result in results[other] for one in told(result)] == everything
        if window is None:
            del everything[number - 1]
        assert [one for result in results[one] for one in told(result)] == everything
        skipped = {result.number: result.skipped for result in results[one] if result.skipped}
        assert skipped == ({} if window else {number + 1: 1})
        await swarm.rest()


async def test_what_was_skipped_is_told_though_a_call_was_given_up_meanwhile(autojump_clock, swarm_of):
    async with swarm_of(2) as swarm:
        one, other = swarm.peers
        await swarm.together(lambda peer: reduce(peer, 1.0, None))
        for _ in range(3):
            await reduce(other, 2.0, None)
        with pytest.raises(RequestTimeout):
            await one.collective.all_reduce(torch.ones(3), timeout=3)
        results = await swarm.together(lambda peer: reduce(peer, 3.0, None))
        assert [(results[peer].number, results[peer].skipped) for peer in (one, other)] == [(5, 3), (5, 0)]
        await swarm.rest()


@pytest.mark.parametrize("ending", [lambda other: Behind(other.id, 1), None])
async def test_what_a_lossy_codec_leaves_out_counts_once_though_the_result_is_only_heard_of(
    autojump_clock, swarm_of, monkeypatch, ending
):
    """Either the call goes on after its line broke, or it is given up when all have what it brings."""
    async with swarm_of(1, codec="int4") as swarm:
        (one,) = swarm.peers
        original, values = Rounds._take_part, torch.randn(300, generator=torch.Generator().manual_seed(1))

        async def held_up(rounds, work):
            reduced = await original(rounds, work)
            if work.offer.revision == 1:
                if ending is not None:
                    raise ending(one)
                await trio.sleep_forever()
            return reduced

        monkeypatch.setattr(Rounds, "_take_part", held_up)
        results = []
        while len(results) < 3:
            with trio.move_on_after(20):
                reduced = await one.collective.all_reduce(values, window=WINDOW)
                results += [*reduced.missed, reduced]
        feedback, codec = ErrorFeedback(make_codec("int4"), len(values)), make_codec("int4")
        for reduced in results:
            data, expected = bytearray(codec.encoded_size(len(values))), torch.empty(len(values))
            feedback.encode(0, values, data)
            codec.decode(data, expected)
            feedback.commit()
            assert torch.equal(reduced.mean, expected)

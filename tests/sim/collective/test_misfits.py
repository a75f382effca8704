"""Members that bring something else to an operation than the others do."""

from __future__ import annotations

import pytest
import torch
import trio

from protocol.collective import Window
from protocol.coordinator import Coordinator, Send
from protocol.errors import Misfit
from protocol.kinds import Brought, Kind
from protocol.round_messages import Misfits

WINDOW = Window(quorum=2, grace=1.0)


def reducing(length, value=1.0, **options):
    return lambda peer: peer.collective.all_reduce(torch.full((length,), value), **options)


def bringing(swarm, calls):
    """What all peers do, given by number; `calls[None]` is for all others."""
    by_peer = {peer: calls.get(peer.number, calls[None]) for peer in swarm.peers}
    return lambda peer: by_peer[peer](peer)


CASES = {
    "length": (reducing(10), reducing(12), "length: 12 here, 10 there"),
    "window": (reducing(10), reducing(10, window=WINDOW), "window: quorum 2 grace 1 s keep 8 here, none there"),
    "another window": (
        reducing(10, window=Window(quorum=2, grace=1.0, keep=3)),
        reducing(10, window=WINDOW),
        "window: quorum 2 grace 1 s keep 8 here, quorum 2 grace 1 s keep 3 there",
    ),
    "operation": (
        reducing(10),
        lambda peer: peer.collective.gather(b"block"),
        "operation: gather here, all_reduce there",
    ),
    "purpose": (
        lambda peer: peer.collective.gather(b"block"),
        lambda peer: peer.collective.barrier(),
        "operation: barrier here, gather there",
    ),
    "pairing": (
        lambda peer: peer.collective.exchange(torch.ones(10)),
        lambda peer: peer.collective.exchange(torch.ones(10), pairing="exponential"),
        "pairing: exponential here, random there",
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_of_two_that_do_not_fit_both_are_told(autojump_clock, swarm_of, case):
    right, wrong, difference = CASES[case]
    async with swarm_of(2) as swarm:
        one, other = swarm.peers
        begun = trio.current_time()
        outcomes = await swarm.together(bringing(swarm, {1: wrong, None: right}))
        assert trio.current_time() < begun + 2
        assert [type(outcome) for outcome in outcomes.values()] == [Misfit] * 2
        assert difference in str(outcomes[other])
        assert one.id.short in str(outcomes[other])
        assert other.id.short in str(outcomes[one])
        assert (outcomes[one].peers, outcomes[other].peers) == ((other.id,), (one.id,))
        await swarm.rest()


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("case", CASES)
async def test_two_that_agree_go_on_without_the_third_and_all_hear_of_it(autojump_clock, swarm_of, case, number):
    """Whoever coordinates."""
    right, wrong, difference = CASES[case]
    async with swarm_of(3) as swarm:
        misfit = swarm.peers[number]
        others = [peer for peer in swarm.peers if peer is not misfit]
        begun = trio.current_time()
        outcomes = await swarm.together(bringing(swarm, {number: wrong, None: right}))
        assert trio.current_time() < begun + 2
        assert isinstance(outcomes[misfit], Misfit)
        assert difference in str(outcomes[misfit])
        assert set(outcomes[misfit].peers) == {peer.id for peer in others}
        for peer in others:
            assert set(outcomes[peer].members) == {other.id for other in others}
            (event,) = (event for event in peer.events if event.event == "misfit")
            assert event.members == (misfit.id,)
            assert event.reason
        await swarm.rest()


@pytest.mark.parametrize("odd", [{0}, {1, 3}, {0, 4}, {2, 3, 4}])
@pytest.mark.parametrize("tag", ["", "a", "b", "c"])  # each has another coordinator
async def test_of_five_the_most_are_right(autojump_clock, swarm_of, odd, tag):
    async with swarm_of(5) as swarm:
        wrong = odd if len(odd) < 3 else set(range(5)) - odd
        outcomes = await swarm.together(
            bringing(swarm, {None: reducing(10, 2.0, tag=tag)} | {n: reducing(11, 5.0, tag=tag) for n in wrong})
        )
        for peer, outcome in outcomes.items():
            if peer.number in wrong:
                assert isinstance(outcome, Misfit)
                assert "length: 11 here, 10 there" in str(outcome)
            else:
                assert outcome.mean.tolist() == [2.0] * 10
                assert len(outcome.members) == 5 - len(wrong)


async def test_of_as_many_that_agree_those_go_on_that_coordinate(autojump_clock, swarm_of):
    async with swarm_of(4) as swarm:
        outcomes = await swarm.together(lambda peer: reducing(10 + peer.number // 2)(peer))
        halves = [[outcomes[peer] for peer in swarm.peers[start : start + 2]] for start in (0, 2)]
        (told,) = (half for half in halves if all(isinstance(outcome, Misfit) for outcome in half))
        (made,) = (half for half in halves if half is not told)
        assert made[0].members == made[1].members
        assert len(made[0].members) == 2


async def test_if_all_bring_something_else_all_are_told(autojump_clock, swarm_of):
    async with swarm_of(5) as swarm:
        outcomes = await swarm.together(lambda peer: reducing(10 + peer.number)(peer))
        assert [type(outcome) for outcome in outcomes.values()] == [Misfit] * 5
        assert all(len(outcome.peers) == 4 for outcome in outcomes.values())


@pytest.mark.parametrize("call", ["all_reduce", "barrier", "exchange"])
@pytest.mark.parametrize("count", [2, 3])
async def test_another_codec(autojump_clock, swarm_of, count, call):
    async with swarm_of(count, codec="int8", codecs={1: "fp32"}) as swarm:
        arguments = () if call == "barrier" else (torch.ones(1000),)
        outcomes = await swarm.together(lambda peer: getattr(peer.collective, call)(*arguments))
        told = {peer.number for peer, outcome in outcomes.items() if isinstance(outcome, Misfit)}
        assert told == ({0, 1} if count == 2 else {1})
        assert "codec: fp32 here, int8 there" in str(outcomes[swarm.peers[1]])


async def test_after_the_mistake_is_mended_all_go_on(autojump_clock, swarm_of):
    async with swarm_of(3) as swarm:
        for wrong in ({0}, {1, 2}, {1}):
            await swarm.together(bringing(swarm, {None: reducing(10)} | {number: reducing(9) for number in wrong}))
        outcomes = await swarm.together(reducing(10))
        assert all(len(outcome.members) == 3 for outcome in outcomes.values())
        await swarm.rest()


async def test_who_comes_when_the_others_are_at_it_is_told_at_once(autojump_clock, swarm_of):
    """Its members have a plan already, which takes a while."""
    async with swarm_of(3, bandwidth=1e6) as swarm:
        *others, late = swarm.peers
        outcomes = {}

        async def call(peer):
            if peer is late:
                await trio.sleep(8)  # longer than the others wait
                begun = trio.current_time()
                try:
                    await reducing(12)(peer)
                except Misfit as misfit:
                    outcomes[peer] = trio.current_time() - begun, misfit
            else:
                outcomes[peer] = await reducing(5_000_000)(peer)

        async with trio.open_nursery() as nursery:
            for peer in swarm.peers:
                nursery.start_soon(call, peer)
        took, misfit = outcomes[late]
        assert took < 2
        assert "length: 12 here, 5000000 there" in str(misfit)
        assert all(set(outcomes[peer].members) == {other.id for other in others} for peer in others)


async def test_one_that_is_new_to_the_others_operations_has_to_fit_them(autojump_clock, swarm_of):
    """However few they are: who has been there all the time has made no mistake."""
    async with swarm_of(2) as swarm:
        one, new = swarm.peers
        for _ in range(3):
            await swarm.together(reducing(10), [one])
        outcomes = await swarm.together(bringing(swarm, {1: reducing(12), None: reducing(10)}))
        assert isinstance(outcomes[new], Misfit)
        assert outcomes[one].members == (one.id,)
        assert [event.members for event in one.events if event.event == "misfit"] == [(new.id,)]


async def test_a_window_that_was_missed_with_other_values(autojump_clock, swarm_of):
    async with swarm_of(3) as swarm:
        *others, new = swarm.peers
        await swarm.together(reducing(10, window=WINDOW), others)
        with pytest.raises(Misfit, match="length: 12 here, 10 there"):
            await reducing(12, window=WINDOW)(new)


async def test_if_somebody_does_not_come_it_takes_as_long_as_if_all_agreed(autojump_clock, swarm_of):
    took = {}
    for length in (10, 12):
        async with swarm_of(4) as swarm:
            begun = trio.current_time()
            outcomes = await swarm.together(bringing(swarm, {1: reducing(length), None: reducing(10)}), swarm.peers[:3])
            took[length] = trio.current_time() - begun
    assert isinstance(outcomes[swarm.peers[1]], Misfit)
    assert {len(outcomes[peer].members) for peer in (swarm.peers[0], swarm.peers[2])} == {2}
    assert took[12] < took[10] + 1


def lying(monkeypatch, liar, brought):
    """Has a peer tell everybody that comes to it that they do not fit, as soon as they come; returns whom it told."""
    poll, lies = Coordinator.poll, []

    def told(self, now, view):
        actions = poll(self, now, view)
        if self._peer == liar.id:
            others = [peer for peer in self.candidates if peer != liar.id]
            for peer in others:
                self.gone(peer)
            lies.extend(others)
            return [Send(peer, Misfits(tuple(brought))) for peer in others]
        return actions

    monkeypatch.setattr(Coordinator, "poll", told)
    return lies


@pytest.mark.parametrize("late", [0.0, 2.0])
async def test_a_liar_that_coordinates_does_not_make_those_fail_that_agree(autojump_clock, swarm_of, monkeypatch, late):
    """Also if it names honest peers, before these have come."""
    async with swarm_of(4) as swarm:
        liar, *others = swarm.peers
        lies = lying(monkeypatch, liar, [Brought(peer.id, Kind("reduce", 12)) for peer in swarm.peers])
        for tag in "abcdefgh":  # it coordinates some of these

            async def call(peer, tag=tag):
                await trio.sleep(late * others.index(peer))
                return await reducing(10, tag=tag)(peer)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(swarm.together, reducing(12, tag=tag), [liar])
                outcomes = await swarm.together(call, others)
                nursery.cancel_scope.cancel()
            for outcome in outcomes.values():
                assert not isinstance(outcome, Misfit), outcome
                assert set(outcome.members) == {peer.id for peer in others}
        assert lies


async def test_a_liar_that_is_no_coordinator_is_left_out(autojump_clock, swarm_of):
    async with swarm_of(4) as swarm:
        for tag in "abcdef":
            outcomes = await swarm.together(bringing(swarm, {3: reducing(12, tag=tag), None: reducing(10, tag=tag)}))
            assert [len(outcomes[peer].members) for peer in swarm.peers[:3]] == [3] * 3


@pytest.mark.parametrize("tag", ["", "a", "b", "c", "d", "e"])
async def test_where_the_run_says_what_operations_are_about_nobody_fails(autojump_clock, swarm_of, tag):
    """As in runs of daemons: who brings something else lies."""
    async with swarm_of(2, fixed=True) as swarm:
        honest, liar = swarm.peers
        async with trio.open_nursery() as nursery:
            nursery.start_soon(swarm.together, reducing(12, tag=tag), [liar])
            outcome = await reducing(10, tag=tag, timeout=60)(honest)
            nursery.cancel_scope.cancel()
        assert outcome.members == (honest.id,)


async def test_nor_if_somebody_says_that_it_does_not_fit(autojump_clock, swarm_of, monkeypatch):
    async with swarm_of(2, fixed=True) as swarm:
        honest, liar = swarm.peers
        lies = lying(monkeypatch, liar, [Brought(liar.id, Kind("reduce", 12))])
        for tag in "abcd":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(swarm.together, reducing(10, tag=tag), [liar])
                outcome = await reducing(10, tag=tag, timeout=60)(honest)
                nursery.cancel_scope.cancel()
            assert honest.id in outcome.members
        assert lies


async def test_two_sources_of_a_broadcast(autojump_clock, swarm_of):
    async with swarm_of(3) as swarm:
        sources = swarm.peers[:2]
        outcomes = await swarm.together(
            lambda peer: peer.collective.broadcast(b"%d" % peer.number if peer in sources else None)
        )
        for outcome in outcomes.values():
            assert isinstance(outcome, Misfit)
            assert all(source.id.short in str(outcome) for source in sources)
        outcomes = await swarm.together(lambda peer: peer.collective.broadcast(b"it" if peer in sources else None))
        assert {bytes(outcome.data) for outcome in outcomes.values()} == {b"it"}

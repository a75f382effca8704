"""Operations in which somebody dies, or stops, at any moment. One seed, one history.

With these blocks and links an operation takes about 2 s: the faults hit the announcements, the plan, its acceptance,
each hop around the ring, and the end.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import trio

from protocol.collective import Broadcasted, Exchanged, Gathered, Outcome, Reduced
from protocol.errors import RequestTimeout, RoundAborted

SIZES = [70_000, 0, 1, 200_000, 30_000]
ELEMENTS = 30_001


def block(peer) -> bytes:
    return random.Random(peer.number).randbytes(SIZES[peer.number])


def vector(peer) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(peer.number))


STATE = random.Random(9).randbytes(150_000)
CALLS = {
    "all_reduce": lambda peer: peer.collective.all_reduce(vector(peer)),
    "gather": lambda peer: peer.collective.gather(block(peer)),
    "broadcast": lambda peer: peer.collective.broadcast(STATE if peer.number in (1, 3) else None),
    "barrier": lambda peer: peer.collective.barrier(),
    "exchange": lambda peer: peer.collective.exchange(vector(peer)),
}


def content(outcome):
    match outcome:
        case Reduced():
            return outcome.mean.numpy().tobytes()
        case Gathered():
            return {peer: bytes(data) for peer, data in outcome.blocks.items()}
        case Broadcasted():
            return outcome.source, bytes(outcome.data)
        case _:
            return None


def check(swarm, outcomes) -> None:
    """What holds whatever happened."""
    peers = {peer.id: peer for peer in swarm.peers}
    done = {peer: outcome for peer, outcome in outcomes.items() if isinstance(outcome, Outcome)}
    for one, other in itertools.permutations(done, 2):
        mine, theirs = done[one], done[other]
        if mine.plan.id == theirs.plan.id:
            assert content(mine) == content(theirs)
        elif mine.number == theirs.number and mine.plan.ballot < theirs.plan.ballot:
            assert one.id not in theirs.members
    for peer, outcome in done.items():
        match outcome:
            case Gathered():
                assert set(outcome.blocks) == set(outcome.members)
                assert all(bytes(data) == block(peers[source]) for source, data in outcome.blocks.items())
            case Broadcasted():
                assert bytes(outcome.data) == STATE
            case Exchanged(values=torch.Tensor()):
                assert torch.equal(outcome.values, vector(peers[outcome.partner]))
                partner = done.get(peers[outcome.partner])
                if partner is not None and partner.plan.id == outcome.plan.id:
                    assert partner.partner == peer.id
            case Exchanged():
                assert outcome.problem or outcome.partner is None


def survivors_swapped(swarm, outcomes) -> None:
    """A death harms one pair only."""
    peers = {peer.id: peer for peer in swarm.peers}
    for peer in swarm.alive:
        exchanged = outcomes[peer]
        if exchanged.partner is not None and peers[exchanged.partner].alive:
            assert exchanged.values is not None, exchanged.problem


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("operation", CALLS)
async def test_one_or_two_are_killed(autojump_clock, swarm_of, operation, seed):
    rng = random.Random(f"{operation} {seed}")
    async with swarm_of(5, seed=seed, bandwidth=400_000) as swarm:
        victims = rng.sample([peer for peer in swarm.peers if peer.number != 3], rng.randint(1, 2))

        async def kill():
            for victim in victims:
                await trio.sleep(rng.uniform(0, 1.5))
                swarm.kill(victim)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            with trio.fail_after(30):
                outcomes = await swarm.together(CALLS[operation])
        assert all(isinstance(outcomes[peer], Outcome) for peer in swarm.alive), outcomes
        check(swarm, outcomes)
        if operation == "exchange":
            survivors_swapped(swarm, outcomes)
        # And the next one is as if nothing had been.
        outcomes = await swarm.together(CALLS[operation], swarm.alive)
        check(swarm, outcomes)
        assert {outcome.members for outcome in outcomes.values()} == {outcomes[swarm.peers[3]].members}
        assert set(outcomes[swarm.peers[3]].members) == {peer.id for peer in swarm.alive}
        await swarm.rest()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("operation", CALLS)
async def test_one_stops_and_goes_on(autojump_clock, swarm_of, operation, seed):
    rng = random.Random(f"{operation} {seed}")
    async with swarm_of(4, seed=seed, bandwidth=400_000) as swarm:
        victim = rng.choice([peer for peer in swarm.peers if peer.number != 3])
        outcomes = {}
        stopped = trio.Event()

        async def stop():
            await trio.sleep(rng.uniform(0, 1.5))
            swarm.stall(victim)
            stopped.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop)
            others = [peer for peer in swarm.peers if peer is not victim]
            nursery.start_soon(swarm.together, CALLS[operation], [victim])
            with trio.fail_after(60):
                outcomes = await swarm.together(CALLS[operation], others)
            check(swarm, outcomes)
            assert all(isinstance(outcome, Outcome) for outcome in outcomes.values()), outcomes
            await stopped.wait()
            victim.alive = True
            swarm.network.resume(victim.host)
        await trio.sleep(30)
        # It may have counted operations of its own meanwhile.
        for _ in range(2):
            outcomes = await swarm.together(CALLS[operation])
            check(swarm, outcomes)
        assert set(outcomes[victim].members) == {peer.id for peer in swarm.peers}
        await swarm.rest()


@pytest.mark.parametrize("phase", range(0, 16, 3))
@pytest.mark.parametrize("operation", CALLS)
async def test_one_gives_up(autojump_clock, swarm_of, operation, phase):
    """Cancelled in whatever phase, an operation leaves nothing behind, and the others go on."""
    async with swarm_of(4, bandwidth=400_000) as swarm:
        outcomes = {}
        one, *others = swarm.peers

        async def give_up():
            with trio.move_on_after(0.12 * phase):
                await CALLS[operation](one)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(give_up)
            with trio.fail_after(30):
                outcomes = await swarm.together(CALLS[operation], others)
        check(swarm, outcomes)
        assert all(isinstance(outcome, Outcome) for outcome in outcomes.values()), outcomes
        await swarm.rest()
        outcomes = await swarm.together(CALLS[operation])
        check(swarm, outcomes)
        assert {len(outcome.members) for outcome in outcomes.values()} == {4}


@pytest.mark.parametrize("operation", CALLS)
async def test_progress_cancel_and_deadline_of_a_handle(autojump_clock, swarm_of, operation):
    async with swarm_of(3, bandwidth=400_000) as swarm:
        one, *others = swarm.peers
        start = {
            "all_reduce": lambda **more: one.collective.start_all_reduce(vector(one), **more),
            "gather": lambda **more: one.collective.start_gather(block(one), **more),
            "broadcast": lambda **more: one.collective.start_broadcast(STATE, **more),
            "barrier": lambda **more: one.collective.start_barrier(**more),
            "exchange": lambda **more: one.collective.start_exchange(vector(one), **more),
        }[operation]
        handle, second, third = start(), start(), start(timeout=3)
        seen = set()
        assert (handle.progress.received, handle.progress.total) == (0, 0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(swarm.together, CALLS[operation], others)
            while not handle.done.is_set():
                seen.add(handle.progress)
                await trio.sleep(0.05)
        assert len(handle.result().members) == 3
        total = max(progress.total for progress in seen)
        assert all(progress.received <= progress.total <= total for progress in seen)
        assert total > 0
        second.cancel()
        with pytest.raises(RoundAborted, match="cancelled"):
            await second.wait()
        with pytest.raises(RequestTimeout, match="3 s"):
            await third.wait()
        await swarm.rest()


@pytest.mark.parametrize("pieces", [0, 1, 3])
async def test_who_can_send_nothing_in_the_ring_has_all_and_gives_it_to_the_others(autojump_clock, swarm_of, pieces):
    async with swarm_of(5) as swarm:
        swarm.peers[pieces].jam_ring(after=pieces)
        outcomes = await swarm.together(CALLS["gather"])
        check(swarm, outcomes)
        assert {len(gathered.blocks) for gathered in outcomes.values()} == {5}


async def lie_still(attempt) -> None:
    await trio.sleep_forever()


@pytest.mark.parametrize("operation", CALLS)
@pytest.mark.parametrize("number", range(4))
async def test_who_accepts_and_then_does_nothing_is_left_out(autojump_clock, swarm_of, operation, number):
    """It is found, however uneven the blocks are that the others wait for."""
    async with swarm_of(4) as swarm:
        culprit = swarm.peers[number]
        others = [peer for peer in swarm.peers if peer is not culprit]
        rounds = await culprit.collective._channels.get("", None)
        rounds._carrying.run = lie_still
        async with trio.open_nursery() as nursery:
            nursery.start_soon(swarm.together, CALLS[operation], [culprit])
            outcomes = await swarm.together(CALLS[operation], others)
            nursery.cancel_scope.cancel()
        check(swarm, outcomes)
        for outcome in outcomes.values():
            assert set(outcome.members) == {peer.id for peer in others}

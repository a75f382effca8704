"""Peers of unequal speed: fewer steps for the slow ones, or rounds that go on without those who are late."""

import itertools

import attrs
import pytest
import torch
import trio

from peer import checkpoint
from peer.settings import AlgorithmSettings, InnerSettings, ModelSettings, RoundSettings, RunSettings

LIMIT = 2000
ASYNCHRONOUS = AlgorithmSettings("asynchronous", inner_steps=4, buffer=3, outer_momentum=0.5, grace=0.5)
PLAIN = AlgorithmSettings("asynchronous-plain", inner_steps=4, outer_lr=0.3, outer_momentum=0.3, grace=0.5)
DECOUPLED = AlgorithmSettings(
    "decoupled", inner_steps=8, fragments=2, delay=1, quorum=2, grace=0.5, outer_momentum=0.5, radial=False
)
LATE = [ASYNCHRONOUS, PLAIN, DECOUPLED, AlgorithmSettings("decoupled", inner_steps=4, fragments=1, delay=0, grace=0.5)]
SPEEDS = {"a": 0.5, "b": 0.5, "c": 2.3, "d": 1.1, "late": 0.7}


def named(algorithm):
    return algorithm.name


def running(settings, algorithm, rounds=20, grace=30.0):
    return attrs.evolve(
        settings,
        run=RunSettings(name="simulated", seed=1, rounds=rounds),
        model=ModelSettings(layers=2, width=16, heads=2, context=8),
        inner=InnerSettings(batch=2, warmup=0),
        algorithm=algorithm,
        round=RoundSettings(grace=grace),
    )


@pytest.fixture
def unequal(seeded_swarm, simulated_swarm):
    """`unequal(seed, algorithm, …)` makes a swarm whose peers take their time for each inner step."""

    def make(seed, algorithm, **options):
        swarm = seeded_swarm(seed, running(simulated_swarm.settings, algorithm, **options))
        swarm.per_step = dict(SPEEDS)
        swarm.step = dict.fromkeys(SPEEDS, 0.1)
        return swarm

    return make


def agree(*peers):
    common = set.intersection(*(set(peer.digests()) for peer in peers))
    for revision in common:
        assert len({peer.digests()[revision] for peer in peers}) == 1, f"fork at {revision}"
    return common


def end_alike(last, *peers):
    assert last in agree(*peers)
    states = [checkpoint.load_latest(peer.home.checkpoints).state.outer for peer in peers]
    assert all(torch.equal(state.parameters, states[0].parameters) for state in states)
    losses = [event["loss"] for event in peers[0].events("validation")]
    assert losses[-1] < losses[0]


def contributions(peer, by):
    return [event["round"] for event in peer.events("round_committed") if str(by.id) in event["contributors"]]


@pytest.mark.parametrize("algorithm", LATE, ids=named)
async def test_rounds_go_on_without_those_who_are_late(autojump_clock, unequal, algorithm):
    swarm = unequal(0, algorithm, rounds=24)
    with trio.fail_after(LIMIT):
        a, b, c = [await swarm.start(name, wait_for=3) for name in "abc"]
        for peer in (a, b, c):
            await peer.ended.wait()
            assert peer.error is None
    end_alike(24, a, b, c)
    theirs, ours = contributions(a, a), contributions(a, c)
    assert len(ours) >= 2 and len(theirs) > len(ours)  # the slow one counts, and is not waited for
    assert not c.events("synced")[1:]  # it catches up by results: what it does meanwhile is not lost
    assert any(event["fetched"] for event in c.events("round_committed"))
    assert len(ours) >= swarm.taken["c"] // 4 - 3  # with all that it does, but for the beginning and the end


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("algorithm", [ASYNCHRONOUS, DECOUPLED], ids=named)
async def test_late_peers_come_and_go(autojump_clock, unequal, algorithm, seed):
    swarm = unequal(seed, algorithm, rounds=40, grace=5.0)
    with trio.fail_after(LIMIT):
        a, b, c, d = [await swarm.start(name) for name in "abcd"]
        await c.until_round(4)
        late = await swarm.start("late")
        begun = len(d.events("round_started"))
        await d.until(lambda: len(d.events("round_started")) > begun)
        swarm.kill("d")  # in the midst of an operation
        await a.until_round(max(a.digests()) + 3)
        again = await swarm.start("d")
        swarm.leave("a")
        for peer in (b, c, late, again):
            await peer.ended.wait()
            assert peer.error is None
    end_alike(40, b, c, late, again)
    for peer in (late, again):
        assert contributions(b, peer)


@pytest.mark.parametrize("algorithm", [ASYNCHRONOUS, DECOUPLED, AlgorithmSettings("paced", inner_steps=4)], ids=named)
async def test_a_run_that_everybody_has_left_goes_on_where_it_was(autojump_clock, unequal, algorithm):
    swarm = unequal(0, algorithm, rounds=0)
    with trio.fail_after(LIMIT):
        a, b = [await swarm.start(name, wait_for=2) for name in "ab"]
        for peer in (a, b):
            await peer.until_round(4)
        for name in "ab":
            swarm.kill(name)
        saved = checkpoint.load_latest(a.home.checkpoints).state
        again = await swarm.start("a")
        other = await swarm.start("b")
        await again.until_round(saved.header.revision + 4)
        await other.until_round(saved.header.revision + 4)
    agree(again, other)
    assert saved.header.revision + 1 in again.digests()
    for name in "ab":
        swarm.leave(name)


async def test_nobody_waits_for_a_quorum_longer_than_the_grace_time(autojump_clock, unequal):
    """One peer alone is no quorum. While the other one takes for ever for its steps, it makes rounds all the same."""
    swarm = unequal(0, DECOUPLED, rounds=0, grace=8.0)
    swarm.per_step["b"] = 100.0
    with trio.fail_after(LIMIT):
        a, _ = [await swarm.start(name, wait_for=2) for name in "ab"]
        await a.until_round(3)
        times = [event["t"] for event in a.events("round_committed")]
    steps = 8 * SPEEDS["a"] + 5
    assert all(later - earlier < 8.0 + steps for earlier, later in itertools.pairwise(times))
    for name in "ab":
        swarm.leave(name)


async def test_a_dead_peer_is_no_part_of_a_quorum(autojump_clock, unequal):
    swarm = unequal(0, DECOUPLED, rounds=0, grace=500.0)
    with trio.fail_after(LIMIT):
        a, b = [await swarm.start(name, wait_for=2) for name in "ab"]
        await a.until_round(2)
        swarm.kill("b")
        before = trio.current_time()
        await a.until_round(max(a.digests()) + 2)
    assert trio.current_time() - before < 100
    assert b.ended.is_set()
    swarm.leave("a")


async def test_slower_peers_take_fewer_steps_and_all_are_ready_at_once(autojump_clock, unequal):
    swarm = unequal(0, AlgorithmSettings("paced", inner_steps=8), rounds=8)
    swarm.per_step |= {"b": 1.0, "c": 2.0}
    with trio.fail_after(LIMIT):
        peers = a, b, c = [await swarm.start(name, wait_for=3) for name in "abc"]
        for peer in peers:
            await peer.until_round(2)
        taken = dict(swarm.taken)
        begun = trio.current_time()
        for peer in peers:
            await peer.until_round(6)
        took = trio.current_time() - begun
        steps = {name: swarm.taken[name] - taken.get(name, 0) for name in "abc"}
        for peer in peers:
            await peer.ended.wait()
    end_alike(8, a, b, c)
    assert steps["a"] > 1.5 * steps["b"] > 2 * steps["c"]
    assert took < 0.5 * 4 * 8 * SPEEDS["c"]  # all take what one of full length takes the fastest
    assert all(len(event["contributors"]) == 3 for event in a.events("round_committed"))

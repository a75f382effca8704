"""Machines that move to another network, sleep, or have no idea what time it is."""

import itertools
import random
import time

import attrs
import pytest
import trio

LIMIT = 900


@pytest.fixture
def endless(simulated_swarm):
    settings = simulated_swarm.settings
    simulated_swarm.settings = attrs.evolve(settings, run=attrs.evolve(settings.run, rounds=0))
    return simulated_swarm


def together(peer, others):
    """The rounds that this peer has committed to which all of these contributed."""
    everybody = {str(other.id) for other in (peer, *others)}
    return [e["round"] for e in peer.events("round_committed") if everybody <= set(e["contributors"])]


async def rounds_together(peers, count=2):
    """Waits until all of these have made some more rounds together, with the same bits."""
    for peer in peers:
        others = [other for other in peers if other is not peer]
        before = len(together(peer, others))
        await peer.until(lambda peer=peer, others=others, before=before: len(together(peer, others)) >= before + count)
    common = set.intersection(*(set(peer.digests()) for peer in peers))
    last = max(common)
    assert len({peer.digests()[last] for peer in peers}) == 1


@pytest.mark.parametrize("apart", [0.0, 3.0, 60.0])
async def test_members_go_on_without_the_founder_when_all_have_died(autojump_clock, endless, apart):
    """Each is the first one to be there again; whoever comes later finds it, and if they come together, they meet."""
    with trio.fail_after(LIMIT):
        peers = [await endless.start(name) for name in "abc"]
        await rounds_together(peers)
        for name in "abc":
            endless.kill(name)
        before = max(peers[1].digests())
        b = endless.launch("b")
        await trio.sleep(apart)
        c = endless.launch("c")
        await rounds_together([b, c])
        assert min(b.digests()) > before - 2  # from its checkpoint
        a = await endless.start("a")
        await rounds_together([a, b, c])
    for name in "abc":
        endless.leave(name)


@pytest.mark.parametrize("mover", ["a", "c"])
async def test_a_member_that_moves_goes_on_contributing(autojump_clock, endless, mover):
    """Be it the founder, whose old address is all that the ticket has."""
    with trio.fail_after(LIMIT):
        peers = [await endless.start(name) for name in "abc"]
        await rounds_together(peers)
        endless.network.move(mover, "elsewhere")
        await rounds_together(peers)
        endless.network.move("elsewhere", "somewhere")
        await rounds_together(peers)
    for name in "abc":
        endless.leave(name)


async def test_members_of_which_all_but_one_move_at_once_find_together(autojump_clock, endless):
    with trio.fail_after(LIMIT):
        peers = [await endless.start(name) for name in "abc"]
        await rounds_together(peers)
        endless.network.move("a", "new-a")
        endless.network.move("c", "new-c")
        await rounds_together(peers)
    for name in "abc":
        endless.leave(name)


@pytest.mark.parametrize("seed", range(3))
async def test_a_swarm_on_a_machine_that_sleeps_goes_on(autojump_clock, endless, seed):
    """As when a laptop with all of them is closed, and time goes on: for seconds, minutes, hours."""
    rng = random.Random(seed)
    with trio.fail_after(10 * 3600):
        peers = [await endless.start(name) for name in "abc"]
        await rounds_together(peers)
        for seconds in (5, 70, 600, 4 * 3600):
            await trio.sleep(rng.random() * 10)
            autojump_clock.jump(seconds)
            await rounds_together(peers)
    for name in "abc":
        endless.leave(name)


async def test_wall_clocks_that_are_wrong_and_jump_bother_nobody(autojump_clock, endless, monkeypatch):
    """Each look at it shows another time, hours from the last, back and forth."""
    rng = random.Random(1)
    looks = itertools.count()

    def confused():
        next(looks)
        return 1.7e9 + rng.uniform(-1, 1) * 10 * 3600

    monkeypatch.setattr(time, "time", confused)
    endless.clock = time.time
    with trio.fail_after(LIMIT):
        peers = [await endless.start(name) for name in "ab"]
        await rounds_together(peers)
        peers.append(await endless.start("late"))
        await rounds_together(peers)
        endless.kill("b")
        await rounds_together([peers[0], peers[2]])
    assert next(looks) > 100
    for name in ("a", "late"):
        endless.leave(name)

"""Two daemons with copies of one home: one of them goes on as if nothing were, and the other ends and says why."""

import shutil

import attrs
import pytest
import trio

from protocol.errors import IdentityInUse

LIMIT = 600  # simulated seconds


@pytest.fixture
def endless(simulated_swarm):
    settings = simulated_swarm.settings
    simulated_swarm.settings = attrs.evolve(settings, run=attrs.evolve(settings.run, rounds=0))
    return simulated_swarm


@pytest.fixture
def copied(endless):
    """Copies a peer's home, as it is now, to another machine."""

    def copy(name, other):
        home = endless.peers[name].home.path
        shutil.copytree(home, home.with_name(other), ignore=shutil.ignore_patterns(".*"))
        return endless.launch(other)

    return copy


async def test_a_copy_ends_and_the_rounds_go_on(autojump_clock, endless, copied):
    with trio.fail_after(LIMIT):
        peers = *_, c = [await endless.start(name) for name in "abc"]
        await c.until(lambda: c.events("round_committed"))
        await c.until(lambda: len(c.events("round_committed")[-1]["members"]) == 3)
        begun, before = trio.current_time(), max(c.digests())
        copy = copied("c", "copy")
        await copy.ended.wait()
        assert trio.current_time() - begun < 5.0
        assert isinstance(copy.error, IdentityInUse)
        assert "another daemon with this identity is connected, from c" in str(copy.error)
        assert copy.events("stopped")[0]["reason"] == str(copy.error)
        again = copied("c", "again")
        await again.ended.wait()
        assert isinstance(again.error, IdentityInUse)
        for peer in peers:
            await peer.until_round(before + 4)
    for peer in peers:
        assert not peer.events("peer_lost")
        assert not peer.events("round_failed")
        assert all(len(e["members"]) == 3 for e in peer.events("round_committed") if e["round"] > before)
    for name in "abc":
        endless.leave(name)


async def test_a_copy_may_start_when_the_first_has_left(autojump_clock, endless, copied):
    with trio.fail_after(LIMIT):
        _, b = [await endless.start(name) for name in "ab"]
        await b.until_round(1)
        endless.leave("b")
        await b.ended.wait()
        copy = copied("b", "copy")
        await copy.until(lambda: copy.events("round_committed"))
        assert len(copy.events("round_committed")[0]["members"]) == 2
    endless.leave("a")
    endless.leave("copy")


@pytest.mark.parametrize("others", ["a", "abc"])
async def test_one_that_wakes_and_finds_a_copy_in_its_place_ends(autojump_clock, endless, copied, others):
    with trio.fail_after(LIMIT):
        peers = [await endless.start(name) for name in others]
        sleeper = endless.launch("sleeper")
        await sleeper.until_round(2)
        endless.network.stall("sleeper")
        await trio.sleep(20)
        copy = copied("sleeper", "copy")
        await copy.until(lambda: copy.events("round_committed"))
        endless.network.resume("sleeper")
        await sleeper.ended.wait()
        assert isinstance(sleeper.error, IdentityInUse)
        last = max(copy.digests()) + 2
        for peer in (copy, *peers):
            await peer.until_round(last)
    everybody = {str(peer.id) for peer in (copy, *peers)}
    assert set(copy.events("round_committed")[-1]["members"]) == everybody
    assert not copy.events("peer_lost")
    assert copy.error is None
    for name in ("copy", *others):
        endless.leave(name)


async def test_a_founder_with_a_copied_home_ends(autojump_clock, endless, copied):
    with trio.fail_after(LIMIT):
        a, b = [await endless.start(name) for name in "ab"]
        await a.until(lambda: (a.home.path / "book.json").exists())
        await b.until_round(2)
        copy = copied("a", "copy")
        await copy.ended.wait()
        assert isinstance(copy.error, IdentityInUse)
        await b.until_round(max(b.digests()) + 2)
    assert not b.events("peer_lost")
    endless.leave("a")
    endless.leave("b")


async def test_copies_that_begin_apart_are_told(autojump_clock, endless, copied):
    with trio.fail_after(LIMIT):
        a, b, c = [await endless.start(name) for name in "abc"]
        await c.until_round(1)
        endless.network.partition(["a", "c"], ["b", "copy"])
        await trio.sleep(10)
        copy = copied("c", "copy")  # among those that do not see the first one any more
        await copy.until(lambda: copy.events("round_committed"))
        assert not copy.events("identity_shared")
        endless.network.heal()
        for one in (c, copy):
            await one.until(lambda one=one: one.events("identity_shared"))
            assert "another daemon with this identity is connected" in one.events("identity_shared")[0]["reason"]
        await trio.sleep(60)
        assert [len(one.events("identity_shared")) for one in (c, copy)] == [1, 1]
        assert c.error is copy.error is None
        await a.until_round(max(a.digests()) + 1)
        await b.until_round(max(b.digests()) + 1)
    for name in ("a", "b", "c", "copy"):
        endless.leave(name)

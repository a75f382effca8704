"""Whole daemons on simulated time: what is promised when peers come, go, stall, and lose sight of each other."""

import attrs
import pytest
import trio

LIMIT = 600  # simulated seconds; nothing here takes half as long unless it hangs


def endless(settings):
    return attrs.evolve(settings, run=attrs.evolve(settings.run, rounds=0))


def agree(*peers):
    """No two of these peers have different digests for a revision; returns the revisions that all have."""
    common = set.intersection(*(set(peer.digests()) for peer in peers))
    for revision in common:
        assert len({peer.digests()[revision] for peer in peers}) == 1, f"fork at {revision}"
    return common


async def test_a_swarm_of_one_trains_to_the_end(autojump_clock, simulated_swarm):
    with trio.fail_after(LIMIT):
        alone = await simulated_swarm.start("a")
        await alone.ended.wait()
    assert sorted(alone.digests()) == [1, 2, 3, 4, 5, 6]
    assert [e["round"] for e in alone.events("validation")] == [0, 1, 2, 3, 4, 5, 6]
    assert alone.events("stopped")[0]["reason"] == "finished"


async def test_peers_make_rounds_together_and_end_with_the_same_bits(autojump_clock, simulated_swarm):
    with trio.fail_after(LIMIT):
        peers = [await simulated_swarm.start(name) for name in "abc"]
        for peer in peers:
            await peer.ended.wait()
    assert 6 in agree(*peers)
    last = peers[0].events("round_committed")[-1]
    assert sorted(last["members"]) == sorted(str(peer.id) for peer in peers)
    assert sorted(last["contributors"]) == sorted(last["members"])
    losses = [[e["loss"] for e in peer.events("validation")][-1] for peer in peers]
    assert len(set(losses)) == 1
    assert all(peer.events("stopped")[0]["reason"] == "finished" for peer in peers)


@pytest.mark.parametrize("codec", ["int8", "e3m0"])
async def test_a_run_whose_manifest_names_a_codec_trains_with_it(autojump_clock, simulated_swarm, codec):
    settings = simulated_swarm.settings
    simulated_swarm.settings = attrs.evolve(settings, round=attrs.evolve(settings.round, codec=codec))
    with trio.fail_after(LIMIT):
        peers = [await simulated_swarm.start(name) for name in "abc"]
        for peer in peers:
            await peer.ended.wait()
    assert 6 in agree(*peers)
    losses = [event["loss"] for event in peers[0].events("validation")]
    assert losses[-1] < losses[0]


async def test_the_others_go_on_when_any_peer_dies_also_the_founder(autojump_clock, simulated_swarm):
    simulated_swarm.settings = endless(simulated_swarm.settings)
    with trio.fail_after(LIMIT):
        a, b, _, d = [await simulated_swarm.start(name) for name in "abcd"]
        await d.until_round(2)
        simulated_swarm.kill("c")
        await a.until_round(max(a.digests()) + 2)
        simulated_swarm.kill("a")
        await b.until_round(max(b.digests()) + 2)
        await d.until_round(max(b.digests()))
    agree(b, d)
    assert sorted(b.events("round_committed")[-1]["members"]) == sorted([str(b.id), str(d.id)])
    simulated_swarm.leave("b")
    simulated_swarm.leave("d")


async def test_a_newcomer_fetches_the_state_and_contributes(autojump_clock, simulated_swarm):
    simulated_swarm.settings = endless(simulated_swarm.settings)
    with trio.fail_after(LIMIT):
        a, b = [await simulated_swarm.start(name) for name in "ab"]
        await b.until_round(2)
        late = await simulated_swarm.start("late")
        await late.until(lambda: late.events("round_committed"))
        await late.until(lambda: str(late.id) in late.events("round_committed")[-1]["contributors"])
        await a.until_round(max(late.digests()))
    assert late.events("synced")[0]["round"] >= 2
    assert agree(a, late) >= {late.events("synced")[0]["round"], max(late.digests())}
    for name in ("a", "b", "late"):
        simulated_swarm.leave(name)


async def test_leaving_is_told_to_the_others(autojump_clock, simulated_swarm):
    simulated_swarm.settings = endless(simulated_swarm.settings)
    with trio.fail_after(LIMIT):
        a, b = [await simulated_swarm.start(name) for name in "ab"]
        await a.until_round(1)
        before = trio.current_time()
        simulated_swarm.leave("b")
        await b.ended.wait()
        assert trio.current_time() - before <= 2.0
        await a.until(lambda: a.events("peer_lost"))
        await a.until_round(max(a.digests()) + 1)
    assert a.events("peer_lost")[0]["peer"] == str(b.id)
    assert b.events("stopped")[0]["reason"] == "cancelled"
    simulated_swarm.leave("a")


async def test_a_killed_peer_restarts_with_its_identity_and_catches_up(autojump_clock, simulated_swarm):
    simulated_swarm.settings = endless(simulated_swarm.settings)
    with trio.fail_after(LIMIT):
        a, b, _ = [await simulated_swarm.start(name) for name in "abc"]
        await a.until_round(2)
        simulated_swarm.kill("a")  # the founder, whose address is the one in the ticket
        await b.until_round(max(b.digests()) + 2)
        again = await simulated_swarm.start("a", ticket=None)
        assert again.id == a.id
        await again.until(lambda: again.events("round_committed"))
        await b.until_round(max(again.digests()))
    assert max(again.digests()) in agree(b, again)
    for name in "abc":
        simulated_swarm.leave(name)


async def test_a_stalled_peer_is_left_behind_and_catches_up(autojump_clock, simulated_swarm):
    simulated_swarm.settings = endless(simulated_swarm.settings)
    with trio.fail_after(LIMIT):
        a, b, c = [await simulated_swarm.start(name) for name in "abc"]
        await c.until_round(2)
        simulated_swarm.network.stall("c")
        await a.until_round(max(a.digests()) + 3)
        simulated_swarm.network.resume("c")
        back = max(a.digests())
        await c.until(lambda: max(c.digests()) > back and len(c.events("round_committed")[-1]["members"]) == 3)
        last = max(c.digests())
        await a.until_round(last)
        await b.until_round(last)
    agree(a, b)
    assert a.digests()[last] == c.digests()[last]  # what c made alone meanwhile is gone
    for name in "abc":
        simulated_swarm.leave(name)


async def test_both_sides_of_a_partition_go_on_and_one_branch_survives(autojump_clock, simulated_swarm):
    simulated_swarm.settings = endless(simulated_swarm.settings)
    with trio.fail_after(LIMIT):
        peers, cut = await simulated_swarm.split_and_heal()
    assert any(event["round"] > cut for peer in peers for event in peer.events("synced"))  # one side took the other's


async def test_peers_that_cannot_reach_each_other_train_together_through_a_third(autojump_clock, simulated_swarm):
    simulated_swarm.settings = endless(simulated_swarm.settings)
    simulated_swarm.network.partition("b", "c")
    with trio.fail_after(LIMIT):
        a, b, c = [await simulated_swarm.start(name) for name in "abc"]
        await c.until(lambda: c.events("round_committed"))
        await c.until(lambda: len(c.events("round_committed")[-1]["members"]) == 3)
        simulated_swarm.network.heal()
        await c.until(lambda: c.events("connected")[-1]["path"] == "direct")
        last = max(c.digests()) + 2
        for peer in (a, b, c):
            await peer.until_round(last)
    agree(a, b, c)
    paths = {(event["peer"], event["path"]) for event in c.events("connected")}
    assert paths == {(str(a.id), "direct"), (str(b.id), "relayed"), (str(b.id), "direct")}
    assert [event["verdict"] for event in a.events("reachability")] == ["public"]
    assert not c.events("peer_lost")
    for name in "abc":
        simulated_swarm.leave(name)


async def test_a_newcomer_does_not_wait_for_the_dead(autojump_clock, simulated_swarm):
    """The record of a peer that died outlives it in the DHT for two minutes."""
    simulated_swarm.settings = endless(simulated_swarm.settings)
    with trio.fail_after(LIMIT):
        a, *_ = [await simulated_swarm.start(name) for name in "abc"]
        await a.until_round(1)
        simulated_swarm.network.partition(["b"], ["a", "c", "late"])  # silent, unlike a crash: dials time out
        await a.until_round(max(a.digests()) + 2)
        late = await simulated_swarm.start("late")
        await late.until(lambda: late.events("round_committed"))
        first = late.events("synced")[0]["round"]
    assert [event["round"] for event in late.events("round_committed")] == [first + 1]
    assert str(late.id) in late.events("round_committed")[0]["contributors"]
    for name in ("a", "b", "c", "late"):
        simulated_swarm.leave(name)

"""Newcomers whose links are slow for the size of the model, or long."""

import attrs
import pytest
import trio

from peer.settings import RoundSettings

LIMIT = 900
UPLOAD = 36_000  # bytes per second


def contributed(peer):
    """The rounds that this peer has contributed to."""
    return [e["round"] for e in peer.events("round_committed") if str(peer.id) in e["contributors"]]


# A result has 0.27 MB: it takes 7 s to send and, in the second case, 13 s to receive. The others need 8 s of computing
# for a round, at most 7 s until the window closes, and then 7 s to reduce; the newcomer 5 s of computing.
@pytest.mark.parametrize("download", [None, 20_000])
async def test_a_newcomer_on_a_slow_link_gets_in(autojump_clock, simulated_swarm, download):
    settings = simulated_swarm.settings
    simulated_swarm.settings = attrs.evolve(
        settings,
        run=attrs.evolve(settings.run, rounds=0),
        model=attrs.evolve(settings.model, width=64),
    )
    with trio.fail_after(LIMIT):
        a, b = [await simulated_swarm.start(name, max_upload=UPLOAD) for name in "ab"]
        await b.until(lambda: contributed(b))
        late = await simulated_swarm.start("late", max_upload=UPLOAD, max_download=download)
        before = max(a.digests())
        await late.until(lambda: contributed(late))
        assert contributed(late)[0] <= before + 6
        last = contributed(late)[0]
        await late.until_round(last + 2)
    assert len(contributed(late)) == 3  # and stays in
    for name in ("a", "b", "late"):
        simulated_swarm.leave(name)


@pytest.mark.parametrize("latency", [0.3, 1.5])
async def test_a_newcomer_that_is_far_away_gets_in_and_stays(autojump_clock, simulated_swarm, latency):
    """As over satellites, where half a second is the least, and queues add to it."""
    settings = simulated_swarm.settings
    simulated_swarm.settings = attrs.evolve(settings, run=attrs.evolve(settings.run, rounds=0))
    for other in "ab":
        simulated_swarm.network.set_link("far", other, latency=latency)
    with trio.fail_after(LIMIT):
        for name in "ab":
            await simulated_swarm.start(name)
        far = await simulated_swarm.start("far")
        await far.until(lambda: contributed(far))
        first = contributed(far)[0]
        await far.until_round(first + 4)
    assert contributed(far) == list(range(first, first + 5))
    assert not far.events("peer_lost")
    for name in ("a", "b", "far"):
        simulated_swarm.leave(name)


def of_short_rounds(swarm):
    """Rounds take far less time than it takes to fetch the first state over these lines."""
    swarm.settings = attrs.evolve(
        swarm.settings,
        run=attrs.evolve(swarm.settings.run, rounds=4),
        model=attrs.evolve(swarm.settings.model, width=64),
        round=RoundSettings(grace=60.0),
    )
    swarm.step = dict.fromkeys("abc", 0.1)


async def test_a_founder_begins_when_enough_peers_have_its_state(autojump_clock, simulated_swarm):
    of_short_rounds(simulated_swarm)
    with trio.fail_after(LIMIT):
        peers = [await simulated_swarm.start(name, wait_for=3, max_upload=UPLOAD) for name in "abc"]
        for peer in peers:
            await peer.ended.wait()
            assert peer.error is None
    for peer in peers:
        assert contributed(peer) == [1, 2, 3, 4]
    assert [event["here"] for event in peers[0].events("waiting")] == [1, 2]
    assert peers[0].events("waiting")[0]["wanted"] == 3


async def test_nobody_waits_for_a_founder_that_is_gone(autojump_clock, simulated_swarm):
    of_short_rounds(simulated_swarm)
    with trio.fail_after(LIMIT):
        a, b, c = [await simulated_swarm.start(name, wait_for=4, max_upload=UPLOAD) for name in "abc"]
        for peer in (b, c):
            await peer.until(lambda peer=peer: peer.events("synced"))
        assert not b.events("round_started") and not c.events("inner")
        simulated_swarm.kill("a")
        for peer in (b, c):
            await peer.ended.wait()
            assert peer.error is None
    assert b.digests()[4] == c.digests()[4]
    assert not a.events("inner")

"""Newcomers of runs that do not wait for those who are late."""

import attrs
import pytest
import trio

from peer.settings import AlgorithmSettings, RoundSettings

LIMIT = 150
GRACE = 10.0


def contributed(peer):
    """The rounds that this peer has contributed to."""
    return [e["round"] for e in peer.events("round_committed") if str(peer.id) in e["contributors"]]


@pytest.mark.parametrize(("name", "per_step"), [("asynchronous", 0.05), ("asynchronous", 1.0), ("decoupled", 0.05)])
async def test_a_quick_founder_does_not_outrun_a_newcomer_on_a_thin_line(
    autojump_clock, simulated_swarm, name, per_step
):
    """It alone takes less than a second for a round, of which 3 s are needed to send the result, and 10 the state."""
    constants = {"asynchronous": {"buffer": 2}, "decoupled": {"fragments": 1, "delay": 0, "quorum": 1}}[name]
    swarm = simulated_swarm
    swarm.settings = attrs.evolve(
        swarm.settings,
        run=attrs.evolve(swarm.settings.run, rounds=0),
        model=attrs.evolve(swarm.settings.model, width=64),
        algorithm=AlgorithmSettings(name, inner_steps=4, grace=0.2, **constants),
        round=RoundSettings(grace=GRACE),
    )
    swarm.step = dict.fromkeys("ab", 0.05)
    swarm.per_step = {"a": 0.05, "b": per_step}
    with trio.fail_after(LIMIT):
        a = await swarm.start("a", max_upload=100_000)
        await a.until_round(3)
        b = await swarm.start("b")
        await b.until(lambda: len(contributed(b)) >= 5)
    for each in "ab":
        swarm.leave(each)

"""Peers that die, stall and come back: the others go on, and whoever comes back ends with their state."""

import signal

import pytest

from protocol.identity import PeerId
from protocol.plan import coordinators

pytestmark = pytest.mark.processes


async def test_a_run_outlives_everybody_it_began_with(swarm):
    founder = await swarm.found()
    one, two = await swarm.joined(founder, "one", "two")

    one.kill()
    await swarm.together(founder, two)
    founder.kill()
    await swarm.together(two)

    (newcomer,) = await swarm.joined(two, "newcomer")
    identity, left_at = founder.peer, founder.revision
    swarm.start(founder)
    await swarm.started(founder)
    assert founder.peer == identity
    last = await swarm.together(founder, two, newcomer)
    assert last > left_at
    assert founder.run == two.run == newcomer.run
    await swarm.stop(founder, two, newcomer)
    swarm.check_agreement()


async def test_peers_killed_in_mid_reduce_cost_only_an_attempt(swarm):
    slow = ("--max-upload", "60k")
    larger = {"model": {"layers": 2, "width": 32}, "algorithm": {"inner_steps": 100}, "round": {"grace": 20.0}}
    founder = await swarm.found(**larger)
    joiners = await swarm.joined(founder, "one", "two", "three", options=slow)
    alive = [founder, *joiners]
    run = bytes.fromhex(founder.run)

    for victim_leads in (False, True):
        attempt = await attempt_of(swarm, alive)
        leader = coordinators(run, attempt, [PeerId.parse(daemon.peer) for daemon in alive])[0]
        victim = next(daemon for daemon in alive if (PeerId.parse(daemon.peer) == leader) == victim_leads)
        victim.kill()
        assert attempt not in victim.committed
        alive.remove(victim)
        await swarm.until(lambda: all(attempt in daemon.committed for daemon in alive), f"round {attempt} without it")  # noqa: B023
        commits = [daemon.committed[attempt] for daemon in alive]
        assert all(commit.integer("attempt") >= 2 for commit in commits)
        assert all(set(commit.names("contributors")) == {daemon.peer for daemon in alive} for commit in commits)
        assert len({commit.text("digest") for commit in commits}) == 1
    await swarm.stop(*alive)
    swarm.check_agreement()


async def attempt_of(swarm, daemons):
    """Waits until all of these are in the middle of a round, and returns which."""
    everybody = {daemon.peer for daemon in daemons}
    found = []

    def begun():
        rounds = [
            {
                event.integer("round")
                for event in daemon.of("round_started")
                if set(event.names("members")) == everybody and event.integer("round") not in daemon.committed
            }
            for daemon in daemons
        ]
        found[:] = set.intersection(*rounds)
        return bool(found)

    await swarm.until(begun, "a round that all are in the middle of")
    return found[0]


async def test_a_stalled_peer_holds_nobody_up_and_catches_up(swarm):
    founder = await swarm.found()
    one, two = await swarm.joined(founder, "one", "two")
    two.send(signal.SIGSTOP)
    await swarm.together(founder, one)
    await swarm.progress(founder, one)
    assert two.revision < min(founder.revision, one.revision)
    two.send(signal.SIGCONT)
    await swarm.together(founder, one, two)
    await swarm.stop(founder, one, two)
    swarm.check_agreement()

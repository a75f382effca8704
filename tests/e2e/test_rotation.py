"""The founder of a private run replaces its swarm key while everybody trains."""

import signal

import pytest

from peer.ticket import Ticket

pytestmark = pytest.mark.processes


async def test_a_leaked_ticket_is_made_worthless(swarm, shoal):
    founder = await swarm.found(membership={"policy": "private"})
    one, two = await swarm.joined(founder, "one", "two")
    leaked = founder.ticket
    outcome = shoal("rotate-key", "--except", two.peer, home=one.home)
    assert (outcome.code, outcome.out) == (1, "")
    assert "founded by another peer" in outcome.error

    outcome = shoal("rotate-key", "--except", two.peer, home=founder.home)
    assert outcome.code == 0
    fresh = outcome.out.strip()
    assert Ticket.parse(fresh, 0.0).swarm_key != Ticket.parse(leaked, 0.0).swarm_key
    assert founder.ticket == fresh
    await swarm.until(lambda: bool(founder.of("key_rotated") and one.of("key_rotated")), "the new key at both")
    await swarm.together(founder, one)
    await swarm.until(lambda: bool(two.of("rejected")), "the news that it is out")
    assert not two.of("key_rotated")
    two.send(signal.SIGTERM)  # else it would go on with whoever has the old key
    await swarm.ended(two)
    assert Ticket.parse(one.ticket, 0.0).key_number == Ticket.parse(founder.ticket, 0.0).key_number == 1

    late = swarm.daemon("late")
    outcome = shoal("join", leaked, *swarm.options(late)[2:], home=late.home)
    assert outcome.code == 4
    assert outcome.err.splitlines()[-1].startswith("error: ")
    assert "swarm key was rotated: ask somebody in the run for a fresh ticket" in outcome.err.splitlines()[-1]
    swarm.join(late, one.ticket)
    await swarm.started(late)
    await swarm.together(founder, one, late)

    for daemon, start in ((one, lambda: swarm.join(one, leaked)), (founder, lambda: swarm.start(founder))):
        daemon.kill()
        start()  # by what it was started with first; the key is in its home
        await swarm.started(daemon)
        await swarm.together(founder, one, late)
    await swarm.stop(late, one, founder)

"""Private runs and runs with a list of peers let in those that they should, and nobody else."""

import attrs
import pytest

from peer.home import Home
from peer.ticket import Ticket

pytestmark = pytest.mark.processes


async def test_a_private_run_is_joined_with_its_key_while_there_is_room(swarm, shoal):
    founder = await swarm.found(membership={"policy": "private"}, limits={"peers": 2})
    ticket = Ticket.parse(founder.ticket, 0.0)
    assert ticket.swarm_key is not None
    for key, reason in ((None, "asks for a swarm key"), (bytes(32), "another swarm key")):
        outcome = shoal("join", attrs.evolve(ticket, swarm_key=key).encode(), "--listen", "127.0.0.1:0")
        assert (outcome.code, outcome.out) == (4, "")
        assert reason in outcome.error
    (one,) = await swarm.joined(founder, "one")
    assert Ticket.parse(one.ticket, 0.0).swarm_key == ticket.swarm_key
    late = swarm.daemon("late")
    outcome = shoal("join", founder.ticket, *swarm.options(late)[2:], home=late.home)
    assert outcome.code == 4
    assert outcome.err.splitlines()[-1].endswith("this run is full: it admits 2 peers at most")

    founder.kill()
    await swarm.together(one)
    swarm.start(founder)  # the key is in its home
    await swarm.started(founder)
    await swarm.together(founder, one)
    await swarm.stop(founder, one)


async def test_a_run_with_a_list_admits_who_is_on_it(swarm, shoal):
    # The founder needs not be listed.
    names = ("founder", "one", "stranger")
    daemons = {name: swarm.daemon(name) for name in names}
    one_id, stranger_id = (str(Home(daemons[name].home).identity.peer_id) for name in names[1:])
    founder, one, stranger = daemons.values()
    swarm.start(founder, swarm.manifest(membership={"policy": "allow", "allow": [one_id]}))
    await swarm.started(founder)
    swarm.join(one, founder.ticket)
    await swarm.started(one)
    await swarm.together(founder, one)

    outcome = shoal("join", founder.ticket, *swarm.options(stranger)[2:], home=stranger.home)
    assert (outcome.code, outcome.out) == (4, "")
    assert f"{stranger_id} is not on it" in outcome.error
    assert not (stranger.home / "ticket").exists()
    await swarm.stop(founder, one)

"""A home that was copied to another machine: two daemons cannot be the same peer at the same time."""

import shutil

import pytest

pytestmark = pytest.mark.processes


async def test_a_daemon_with_a_copied_home_says_why_it_cannot_take_part(swarm):
    founder = await swarm.found()
    (member,) = await swarm.joined(founder, "member")
    copy = swarm.daemon("copy")
    shutil.copytree(member.home, copy.home, ignore=shutil.ignore_patterns(".*"))  # no half-written files
    swarm.join(copy, founder.ticket)
    assert await swarm.ended(copy) == 2
    error, hint = copy.log.read_text().splitlines()[-2:]
    assert error.startswith("error: ")
    assert error.endswith("says that another daemon with this identity is connected, from 127.0.0.1")
    assert hint.startswith("hint: stop one of the two daemons, or give this one a home of its own")
    await swarm.together(founder, member)
    assert not founder.of("peer_lost")
    assert not member.of("peer_lost")

    await swarm.stop(member)
    swarm.join(copy, founder.ticket)
    await swarm.started(copy)
    assert copy.peer == member.peer
    await swarm.together(founder, copy)
    swarm.check_agreement()
    await swarm.stop(copy, founder)

"""Helper peers: places to begin that belong to no run."""

import random
import shutil

import attrs
import pytest
import trio

from peer.contact import parse_contact
from peer.events import EventLog
from peer.helper import HelperConfig, run_helper
from peer.home import Home
from peer.settings import RunSettings
from protocol.errors import AddressError, HandshakeError, IdentityInUse, PeerUnreachable
from protocol.identity import PeerId
from protocol.transport import Address

HELPER = Address("helper", 4000)


@attrs.define
class RunningHelper:
    contact: tuple[PeerId, Address]
    log: list
    scope: trio.CancelScope

    @property
    def seen(self):
        """Who is there, by the events."""
        here = set()
        for event in self.log:
            if event["event"] == "peer_seen":
                here.add(event["peer"])
            elif event["event"] == "peer_lost":
                here.discard(event["peer"])
        return here


@pytest.fixture
async def helper(simulated_swarm, tmp_path, nursery):
    """`await helper(name, …)` starts one."""

    async def make(name="helper", **options):
        home = Home(tmp_path / name)
        log, scope = [], trio.CancelScope()
        events = EventLog(None, home.identity.peer_id, clock=trio.current_time)
        events.subscribe(log.append)
        config = HelperConfig(home=home, listen=Address(name, 4000), events=events, **options)

        async def run(*, task_status):
            with scope:
                await run_helper(
                    config,
                    transport=simulated_swarm.network.transport(name),
                    rng=random.Random(name),
                    task_status=task_status,
                )

        return RunningHelper(parse_contact(await nursery.start(run)), log, scope)

    return make


async def test_a_swarm_is_found_through_a_helper(simulated_swarm, helper, autojump_clock):
    found = await helper()
    assert found.contact[1] == HELPER
    a = await simulated_swarm.start("a", bootstrap=(found.contact,))
    b = await simulated_swarm.start("b")
    await b.until_round(1)
    assert found.contact in simulated_swarm.ticket.bootstrap
    simulated_swarm.kill("a")
    await trio.sleep(10.0)
    c = await simulated_swarm.start("c")
    await c.until_round(3)
    assert c.digests()[3] == b.digests()[3]
    assert found.seen >= {str(b.id), str(c.id)}
    assert str(a.id) not in found.seen
    found.scope.cancel()
    await trio.sleep(3.0)  # it says goodbye to all for one second
    assert found.log[-1]["event"] == "stopped"
    await c.until_round(5)


async def test_one_helper_serves_several_runs(simulated_swarm, helper, autojump_clock):
    found = await helper()
    a = await simulated_swarm.start("a", bootstrap=(found.contact,))
    first = simulated_swarm.ticket
    simulated_swarm.ticket = None
    another = attrs.evolve(simulated_swarm.settings, run=RunSettings(name="another", seed=2, rounds=6))
    other = await simulated_swarm.start("other", bootstrap=(found.contact,), settings=another)
    second = simulated_swarm.ticket
    assert first.run_id != second.run_id
    only_helper = {run: attrs.evolve(ticket, bootstrap=(found.contact,)) for run, ticket in ((1, first), (2, second))}
    b = await simulated_swarm.start("b", ticket=only_helper[1])
    c = await simulated_swarm.start("c", ticket=only_helper[2])
    for peer in (a, b, other, c):
        await peer.until_round(6)
    assert b.digests()[6] == a.digests()[6]
    assert c.digests()[6] == other.digests()[6]
    assert b.digests()[6] != c.digests()[6]


async def test_a_helper_that_comes_back_is_used_again(simulated_swarm, helper, autojump_clock):
    simulated_swarm.settings = attrs.evolve(simulated_swarm.settings, run=RunSettings(rounds=0))  # without end
    found = await helper()
    await simulated_swarm.start("a", bootstrap=(found.contact,))
    await trio.sleep(15.0)
    found.scope.cancel()
    await trio.sleep(60.0)
    again = await helper()
    assert again.contact == found.contact
    b = await simulated_swarm.start("b", ticket=attrs.evolve(simulated_swarm.ticket, bootstrap=(again.contact,)))
    await b.until_round(1)


async def test_a_run_that_the_helper_knows_nobody_of(simulated_swarm, helper, autojump_clock):
    found = await helper()
    await simulated_swarm.start("a")
    ticket = attrs.evolve(simulated_swarm.ticket, bootstrap=(found.contact,))
    with pytest.raises(PeerUnreachable, match="no peer of this run was found"):
        await simulated_swarm.start("b", ticket=ticket)


async def test_helpers_find_each_other(simulated_swarm, helper, autojump_clock):
    one = await helper("helper")
    two = await helper("second", bootstrap=(one.contact,))
    await simulated_swarm.start("a", bootstrap=(one.contact,))
    b = await simulated_swarm.start("b", ticket=attrs.evolve(simulated_swarm.ticket, bootstrap=(two.contact,)))
    await b.until_round(1)


async def test_a_private_run_needs_a_helper_with_its_key(simulated_swarm, helper, autojump_clock):
    simulated_swarm.settings = attrs.evolve(
        simulated_swarm.settings, membership=attrs.evolve(simulated_swarm.settings.membership, policy="private")
    )
    await simulated_swarm.start("a")
    stranger = await helper("helper")
    insider = await helper("insider", ticket=simulated_swarm.ticket)
    with pytest.raises(HandshakeError):
        await simulated_swarm.start("b", ticket=attrs.evolve(simulated_swarm.ticket, bootstrap=(stranger.contact,)))
    c = await simulated_swarm.start("c", ticket=attrs.evolve(simulated_swarm.ticket, bootstrap=(insider.contact,)))
    await c.until_round(1)


async def test_a_founder_begins_without_a_helper_that_is_not_there_yet(simulated_swarm, helper, autojump_clock):
    home = Home(simulated_swarm.home("helper").path)
    contact = (home.identity.peer_id, HELPER)
    simulated_swarm.settings = attrs.evolve(simulated_swarm.settings, run=RunSettings(rounds=0))
    a = await simulated_swarm.start("a", bootstrap=(contact,))
    (failure,) = a.events("bootstrap_failed")
    assert "helper:4000" in failure["reason"]
    assert contact in simulated_swarm.ticket.bootstrap
    found = await helper()
    assert found.contact == contact
    await trio.sleep(90.0)
    assert str(a.id) in found.seen
    await simulated_swarm.start("b", ticket=attrs.evolve(simulated_swarm.ticket, bootstrap=(contact,)))


async def test_a_helper_with_a_copied_home(simulated_swarm, helper, tmp_path, autojump_clock):
    simulated_swarm.settings = attrs.evolve(simulated_swarm.settings, run=RunSettings(rounds=0))
    found = await helper()
    a = await simulated_swarm.start("a", bootstrap=(found.contact,))
    await a.until_round(1)
    shutil.copytree(tmp_path / "helper", tmp_path / "copy", ignore=shutil.ignore_patterns(".*"))  # half-written files
    home = Home(tmp_path / "copy")
    events = EventLog(None, home.identity.peer_id, clock=trio.current_time)
    config = HelperConfig(
        home=home, listen=Address("copy", 4000), events=events, bootstrap=((a.id, Address("a", 4000)),)
    )
    with trio.fail_after(5), pytest.raises(IdentityInUse, match=r"another daemon with this .*, from helper"):
        await run_helper(config, transport=simulated_swarm.network.transport("copy"), rng=random.Random(1))
    await a.until_round(max(a.digests()) + 2)
    assert str(a.id) in found.seen
    assert not [event for event in found.log if event["event"] == "peer_lost"]
    simulated_swarm.leave("a")


async def test_a_port_that_is_taken(simulated_swarm, helper, autojump_clock):
    await simulated_swarm.network.transport("helper").listen(HELPER)
    with pytest.raises(AddressError):
        await helper()


async def test_members_are_told_to_the_status(simulated_swarm, autojump_clock):
    a = await simulated_swarm.start("a")
    b = await simulated_swarm.start("b")
    await b.until_round(2)
    await trio.sleep(5.0)
    (member,) = a.events("members")[-1]["members"]
    assert (member["peer"], member["address"], member["path"]) == (str(b.id), "b:4000", "direct")
    assert member["revision"] >= 1
    assert member["rtt"] == pytest.approx(0.02, rel=0.5)

"""A helper keeps a swarm findable when the address in everybody's ticket is dead."""

import json
import signal

import pytest

from peer.contact import parse_contact
from peer.status import read_status
from peer.ticket import Ticket

pytestmark = pytest.mark.processes


async def serve(swarm, *options):
    """Starts a helper; returns it and its address."""
    helper = swarm.daemon("helper")
    files = ["--home", helper.home, "--events", helper.events]
    helper.launch("serve", *files, "--listen", "127.0.0.1:0", *options)
    output = helper.root / "stdout"
    await swarm.until(lambda: output.exists() and output.read_text().endswith("\n"), "the helper's address")
    (address,) = output.read_text().splitlines()
    return helper, address


async def test_a_newcomer_finds_the_swarm_through_the_helper_alone(swarm, shoal):
    helper, address = await serve(swarm)
    founder = await swarm.found("--bootstrap", address)
    ticket = Ticket.parse(founder.ticket, now=0.0)
    assert parse_contact(address) in ticket.bootstrap
    (member,) = await swarm.joined(founder, "member")
    await swarm.until(lambda: len(helper.of("peer_seen")) >= 2, "both at the helper")

    founder.kill()
    await swarm.together(member)
    newcomer = swarm.daemon("newcomer")
    swarm.join(newcomer, founder.ticket)  # nobody in it answers but the helper
    await swarm.started(newcomer)
    await swarm.together(member, newcomer)

    status = json.loads(shoal("status", "--json", home=helper.home).out)
    assert (status["running"], status["activity"], status["run"]) == (True, "serving", None)

    def known():
        return {each.peer for each in read_status(helper.home / "status.json").members}

    await swarm.until(lambda: known() >= {member.peer, newcomer.peer}, "both in the helper's status")
    peers = json.loads(shoal("peers", "--json", home=helper.home).out)["peers"]
    assert {peer["peer"] for peer in peers} >= {member.peer, newcomer.peer}
    assert f"--bootstrap {address}" in helper.log.read_text()

    helper.send(signal.SIGTERM)
    assert await swarm.ended(helper) == 0
    assert helper.of("stopped")
    await swarm.together(member, newcomer)
    swarm.check_agreement()
    await swarm.stop(newcomer, member)


async def test_a_swarm_whose_ticket_does_not_know_the_helper(swarm, shoal):
    founder = await swarm.found()
    helper, address = await serve(swarm, "--bootstrap", f"{founder.peer}@{founder.of('started')[-1].text('address')}")
    (member,) = await swarm.joined(founder, "member", options=("--bootstrap", address))
    await swarm.until(lambda: len(helper.of("peer_seen")) >= 2, "both at the helper")
    founder.kill()
    await swarm.together(member)
    old = Ticket.parse(founder.ticket, now=0.0)
    assert [peer for peer, _ in old.bootstrap] == [parse_contact(f"{founder.peer}@x:1")[0]]
    newcomer = swarm.daemon("newcomer")
    swarm.join(newcomer, founder.ticket, "--bootstrap", address)
    await swarm.started(newcomer)
    await swarm.together(member, newcomer)
    status = newcomer.home / "status.json"
    await swarm.until(lambda: read_status(status).members != (), "a status with the members")
    lines = shoal("peers", home=newcomer.home).out.splitlines()
    assert lines[0].split() == ["peer", "address", "path", "rtt", "round"]
    assert any(line.startswith(member.peer[:8]) for line in lines)
    await swarm.stop(newcomer, member, helper)


async def test_a_helper_of_a_private_run_needs_its_key(swarm, shoal):
    founder = await swarm.found(membership={"policy": "private"})
    outcome = shoal("doctor", founder.ticket, "--no-map", "--listen", "127.0.0.1:0", "--json")
    assert (outcome.code, json.loads(outcome.out)["ok"]) == (0, True), outcome.out
    helper, address = await serve(swarm, founder.ticket)
    await swarm.until(lambda: any(event.peer == founder.peer for event in helper.of("peer_seen")), "the founder")
    outcome = shoal("doctor", address, "--no-map", "--listen", "127.0.0.1:0")
    assert outcome.code == 3
    assert "asks for a swarm key, and we have none" in outcome.out
    await swarm.stop(helper, founder)

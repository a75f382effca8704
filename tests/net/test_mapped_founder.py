"""A founder whose router maps ports is joined from outside, with a ticket that names the address outside."""

import json
import sys

import pytest

from peer.doctor import Finding
from peer.ticket import Ticket
from protocol.transport import Address
from tests.net.conftest import PORT
from tests.net.topology import Nat

pytestmark = pytest.mark.netns


def examined(host, target):
    """What `shoal doctor` finds on a host, by step; of several findings of a step, the last."""
    report = json.loads(host.namespace.run(sys.executable, "-m", "peer", "doctor", target, "--json"))
    assert report["ok"], report
    return {step["step"]: Finding(**step) for step in report["steps"]}


async def test_a_founder_behind_a_mapping_router_is_joined_from_outside(port_mapping, internet, net_swarm, tmp_path):
    home = internet.home("home", Nat.PORT_PRESERVING)
    home.offer_port_mapping(tmp_path)
    (inside,) = home.hosts
    outside = internet.host("outside")
    founder = await net_swarm.found(inside)
    external = Address(inside.public, PORT)
    await net_swarm.until(lambda: founder.recording.of("mapped") != [])
    (mapped,) = founder.recording.of("mapped")
    assert mapped.text("address") == str(external)

    def named():
        return [address for _, address in Ticket.parse(founder.child.ticket.read_text(), now=0.0).bootstrap]

    await net_swarm.until(lambda: external in named())
    assert named() == [external, Address(inside.address, PORT)]
    other = net_swarm.join(outside)
    await net_swarm.rounds_together([founder, other], 2)
    assert other.path_to(founder) == founder.path_to(other) == "mapped"

    ticket = founder.child.ticket.read_text().strip()
    report = examined(outside, ticket)
    assert report["run"].verdict == report["nat"].verdict == "ok", report
    report = examined(inside, f"{other.id}@{outside.address}:{PORT}")
    assert report["mapping"].message.startswith(f"the router maps {inside.public}:"), report
    behind = f"behind a router: this machine is {inside.address}, and peers see {inside.public}"
    assert report["nat"] == Finding("nat", "ok", f"{behind}; it maps a port"), report
    assert report["relay"].verdict == "ok", report

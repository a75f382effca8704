"""`shoal doctor` tells what kind of router a machine is behind, and whether somebody relays for it."""

import json
import sys

import pytest

from peer.doctor import Finding
from tests.net.topology import Nat

pytestmark = pytest.mark.netns


def examined(host, ticket):
    """What `shoal doctor` finds on a host, by step; of several findings of a step, the last."""
    report = json.loads(host.namespace.run(sys.executable, "-m", "peer", "doctor", ticket, "--no-map", "--json"))
    assert report["ok"], report
    return {step["step"]: Finding(**step) for step in report["steps"]}


EXPECTED = {
    Nat.NONE: ("ok", "peers see this machine at its own address, {own}"),
    Nat.FIREWALL: (
        "warn",
        "at its own address, {own}, but something drops what comes in: others can reach it by punch",
    ),
    Nat.PORT_PRESERVING: ("warn", "{own}, and peers see {public}, at the same port: others can reach it by punching"),
    Nat.OTHER_PORT: ("warn", "{own}, and peers see {public}, all at one port: others can reach it by punching"),
    Nat.SYMMETRIC: ("warn", "{own}, and peers see {public}, each at another port: only through a relay"),
}


async def test_routers_are_told_apart(internet, net_swarm):
    founder = await net_swarm.found(internet.host("public1"))
    net_swarm.join(internet.host("public2"))
    await net_swarm.rounds_together(net_swarm.peers, 1)
    ticket = founder.child.ticket.read_text().strip()
    for nat, (verdict, message) in EXPECTED.items():
        (host,) = internet.home(nat.value[:6], nat).hosts
        report = examined(host, ticket)
        assert report["nat"].verdict == verdict, report
        assert message.format(own=host.address, public=host.public) in report["nat"].message, report
        assert report["dial-back"].verdict == ("ok" if nat is Nat.NONE else "warn"), report
        assert report["relay"].verdict == "ok", report

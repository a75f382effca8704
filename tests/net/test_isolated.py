"""Two homes without anybody in between are told what they lack."""

import sys

import pytest

from tests.net.conftest import PORT
from tests.net.topology import Nat

pytestmark = pytest.mark.netns


async def test_two_homes_without_a_public_peer_are_told_what_to_start(internet, net_swarm, tmp_path):
    ours, theirs = [internet.home(name, Nat.PORT_PRESERVING, hosts=2).hosts for name in ("one", "two")]
    founder = await net_swarm.found(ours[0])
    join = [sys.executable, "-m", "peer", "join", founder.child.read_ticket(), "--listen", f"0.0.0.0:{PORT}"]
    for host in theirs:  # the first has the same private address as the founder, and finds itself there
        with pytest.raises(RuntimeError) as ended:
            host.namespace.run(*join, "--home", tmp_path / host.name)
        said = str(ended.value)
        assert "exited with 3: " in said
        assert "the only known peer of this run cannot be reached: all have private addresses only" in said
        assert "start `shoal serve`" in said
    await net_swarm.until(lambda: founder.recording.of("isolated") != [])
    reason = founder.recording.last("isolated").text("reason")
    own = f"{founder.host.address}:{PORT}"
    assert reason == f"machines on its own network reach this peer at {own}; for others, no peer in reach relays"
    assert "start `shoal serve`" in founder.child.log.read_text()

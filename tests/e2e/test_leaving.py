"""Ctrl-C and its relatives: a daemon leaves at once, says goodbye, and can be killed while it does."""

import re
import signal
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
async def test_a_daemon_that_is_asked_to_leave_says_goodbye(swarm, number, code):
    founder = await swarm.found()
    (one,) = await swarm.joined(founder, "one")
    one.send(number)
    assert await swarm.ended(one) == code
    assert one.of("stopped")[-1].text("reason") == "cancelled"
    assert "error" not in one.log.read_text()
    await swarm.until(lambda: bool(founder.of("peer_lost")), "the goodbye")
    (lost,) = founder.of("peer_lost")
    assert lost.peer == one.peer
    assert "shutting down" in lost.text("reason")
    await swarm.together(founder)
    await swarm.stop(founder)


# A step of this model takes much longer than the two seconds that a daemon has for leaving.
HUGE = {
    "model": {"layers": 24, "width": 64, "heads": 4, "context": 128},
    "inner": {"batch": 256},
    "algorithm": {"inner_steps": 3},
}


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(("signals", "code"), [(1, 130), (2, -signal.SIGINT)])
async def test_leaving_does_not_wait_for_a_computation(swarm, signals, code):
    founder = await swarm.found(**HUGE)
    await swarm.until(lambda: bool(founder.of("inner")), "the first step, after which comes the next")
    founder.send(signal.SIGINT)
    if signals == 2:
        await swarm.until(lambda: not catches(founder, signal.SIGINT), "a signal being final")
        founder.send(signal.SIGINT)
    assert await swarm.ended(founder) == code


def catches(daemon, number):
    """Whether the process has a handler for a signal."""
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    match = re.search(r"SigCgt:\s*(\w+)", status)
    return match is not None and bool(int(match[1], 16) >> (number - 1) & 1)

"""Ctrl-C and its relatives: a daemon leaves at once, says goodbye, and can be killed while it does."""

import re
import signal
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes


async def test_a_daemon_that_is_asked_to_leave_says_goodbye(swarm):
    founder = await swarm.found()
    joiners = await swarm.joined(founder, "one", "two")
    for daemon, number, code in zip(joiners, (signal.SIGINT, signal.SIGTERM), (130, 0), strict=True):
        daemon.send(number)
        assert await swarm.ended(daemon) == code
        assert daemon.of("stopped")[-1].text("reason") == "cancelled"
        assert "error" not in daemon.log.read_text()
    await swarm.until(lambda: len(founder.of("peer_lost")) == 2, "their goodbyes")
    lost = founder.of("peer_lost")
    assert [event.peer for event in lost] == [daemon.peer for daemon in joiners]
    assert all("shutting down" in event.text("reason") for event in lost)
    await swarm.together(founder)
    await swarm.stop(founder)


# A step of this model takes much longer than the two seconds that a daemon has for leaving.
HUGE = {
    "model": {"layers": 12, "width": 64, "heads": 4, "context": 128},
    "inner": {"batch": 128},
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

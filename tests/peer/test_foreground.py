"""How a daemon in the foreground is ended: by signals, in order or by force."""

import re
import signal
import subprocess
import sys
import textwrap

import pytest

from peer.status import read_status
from peer.ticket import Ticket
from protocol.identity import PeerId
from protocol.transport import Address

TICKET = Ticket(bytes(32), ((PeerId(b"p" * 32), Address("192.0.2.7", 7070)),))
PROCESS = """
import sys, types, time, trio
import peer.cli
from peer.ticket import Ticket

async def run_daemon(config, *, task_status):
    config.events.emit("started", address=config.listen, run=bytes(32))
    task_status.started(config.ticket)
    try:
        await trio.sleep_forever()
    finally:
        {farewell}

module = types.ModuleType("peer.daemon")
module.DaemonConfig = types.SimpleNamespace
module.run_daemon = run_daemon
sys.modules["peer.daemon"] = module
peer.cli._device = lambda name: name
peer.cli.main()
"""
CLEAN = "config.events.emit('stopped', reason='cancelled')"
STUCK = "print('stuck', flush=True); time.sleep(60)"


@pytest.fixture
def process(tmp_path):
    """Starts a daemon in a process of its own, which leaves as told, and waits until it can be joined."""
    started = []

    def start(farewell):
        code = textwrap.dedent(PROCESS).format(farewell=farewell)
        arguments = ["join", TICKET.encode(), "--home", str(tmp_path / "home")]
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        assert re.match(r"peer \w+ listens", process.stderr.readline())
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_the_daemon_in_order(process, tmp_path, number, code):
    daemon = process(CLEAN)
    daemon.send_signal(number)
    _, stderr = daemon.communicate(timeout=60)
    assert daemon.returncode == code
    assert stderr == "stopped, as asked; the peers that were connected have been told\n"
    assert read_status(tmp_path / "home" / "status.json").reason == "cancelled"


def test_a_daemon_that_hangs_is_ended(process):
    daemon = process(STUCK)
    daemon.send_signal(signal.SIGINT)
    daemon.communicate(timeout=30)  # half of what it would take by itself
    assert daemon.returncode == 130


def test_a_second_signal_kills(process):
    daemon = process(STUCK)
    daemon.send_signal(signal.SIGINT)
    assert daemon.stdout.readline() == "stuck\n"
    daemon.send_signal(signal.SIGINT)
    daemon.communicate(timeout=30)
    assert daemon.returncode == -signal.SIGINT  # and not 130, which it would be two seconds later


STARTING = """
import sys, time, types
import peer.cli

def slow(name):
    print("starting", flush=True)
    time.sleep(60)

sys.modules["peer.daemon"] = types.SimpleNamespace(DaemonConfig=None, run_daemon=None)
peer.cli._device = slow
peer.cli.main()
"""


def test_sigterm_ends_a_daemon_that_is_still_starting(tmp_path):
    command = [sys.executable, "-c", STARTING, "join", TICKET.encode(), "--home", str(tmp_path / "home")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().endswith("starting\n")
        process.terminate()
        _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (0, "")

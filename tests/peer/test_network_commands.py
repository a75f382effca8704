"""The commands about the network, in this process; `tests/e2e` has them in real ones."""

import json
import os
import pty
import select
import subprocess
import sys
import time
import types

import attrs
import pytest
import trio

import peer.cli
import peer.helper
from peer import doctor_machine
from peer.home import Home
from peer.status import MemberStatus, Status, write_status
from peer.ticket import Ticket
from protocol.errors import AddressError
from protocol.identity import PeerId
from protocol.transport import Address

CONTACT = (PeerId(b"p" * 32), Address("192.0.2.7", 7070))
TICKET = Ticket(bytes(32), (CONTACT,), b"k" * 32)
MEMBERS = (
    MemberStatus(peer="a" * 52, address="192.0.2.9:1", rtt=0.0125, revision=4),
    MemberStatus(peer="b" * 52, path="relayed"),
)


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path / "home")


# serve


@pytest.fixture
def helper(monkeypatch):
    """Stands in for the helper: records its configuration, then does what the test says."""
    fake = types.SimpleNamespace(config=None, error=None)

    async def run_helper(config, *, task_status):
        fake.config = config
        await trio.lowlevel.checkpoint()
        if fake.error is not None:
            raise fake.error
        config.events.emit("started", address=config.listen, role="helper")
        task_status.started("peer@192.0.2.1:4711")
        config.on_address("peer@203.0.113.1:4711")
        config.events.emit("stopped", reason="cancelled")

    monkeypatch.setattr(peer.helper, "run_helper", run_helper)
    return fake


def test_serve_prints_how_it_is_used(shoal, helper, home):
    result = shoal("serve", "--listen", "127.0.0.1:4711", "--events", "events.jsonl", "--max-upload", "2M")
    assert result.exit_code == 0, result.output
    assert result.stdout == "peer@192.0.2.1:4711\n"
    assert "shoal start --bootstrap peer@192.0.2.1:4711" in result.stderr
    assert "--bootstrap peer@203.0.113.1:4711" in result.stderr
    config = helper.config
    assert (config.listen, config.announce, config.ticket) == (Address("127.0.0.1", 4711), None, None)
    assert (config.max_upload, config.max_download, config.map_port) == (2_000_000, None, True)
    status = json.loads(shoal("status", "--json").stdout)
    assert (status["activity"], status["running"]) == ("stopped", False)


def test_serve_for_a_private_run_and_with_other_helpers(shoal, helper):
    other = f"{CONTACT[0]}@{CONTACT[1]}"
    options = ["--bootstrap", other, "--no-map", "--announce", "helper.example.org:7", "--quiet"]
    result = shoal("serve", "-", *options, input=TICKET.encode() + "\n")
    assert result.exit_code == 0
    assert result.stderr == ""
    config = helper.config
    assert (config.ticket, config.bootstrap) == (TICKET, (CONTACT,))
    assert (config.announce, config.map_port) == (Address("helper.example.org", 7), False)


def test_serve_that_fails(shoal, helper, home):
    helper.error = AddressError("the port is taken", hint="use another")
    result = shoal("serve")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == ["error: the port is taken", "hint: use another"]
    with home.lock():
        assert shoal("serve").exit_code == 2


# doctor


@pytest.fixture
def healthy_machine(monkeypatch):
    async def skip(*patient_and_examination):
        await trio.lowlevel.checkpoint()
        return []

    monkeypatch.setattr(doctor_machine, "examine", skip)
    monkeypatch.setattr(doctor_machine, "accelerator", skip)


def test_doctor_without_a_target(shoal, healthy_machine):
    result = shoal("doctor", "--listen", "127.0.0.1:0")
    assert result.exit_code == 0, result.output
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [
        ["ok", "port"],
        ["ok", "loopback"],
        ["can", "take"],
    ]


@pytest.mark.parametrize("target", [attrs.evolve(TICKET, bootstrap=((CONTACT[0], Address("127.0.0.1", 1)),)).encode(),
                                    f"{CONTACT[0]}@127.0.0.1:1"])  # fmt: skip
def test_doctor_when_nobody_answers(shoal, healthy_machine, target):
    result = shoal("doctor", "-", "--listen", "127.0.0.1:0", "--json", input=target)
    assert result.exit_code == 3
    report = json.loads(result.stdout)
    assert not report["ok"]
    dial = report["steps"][-1]
    assert (dial["step"], dial["verdict"]) == ("dial", "fail")
    assert dial["message"].endswith("refused: nobody listens there")
    assert "is that peer running" in dial["advice"]


def test_doctor_refuses_an_expired_ticket(shoal, healthy_machine):
    assert shoal("doctor", attrs.evolve(TICKET, expires=1.0).encode()).exit_code == 4


# peers and top


@pytest.fixture
def status(home):
    now = time.time()
    status = Status(pid=os.getpid(), peer="m" * 52, activity="training", since=now - 65, updated=now,
                    address="192.0.2.1:7070", run="ab" * 32, revision=4, members=MEMBERS)  # fmt: skip
    write_status(home.status, status)
    return status


def test_peers(shoal, home, status):
    result = shoal("peers")
    assert result.exit_code == 1
    assert "no daemon runs" in result.stderr
    with home.lock():
        result = shoal("peers")
        report = json.loads(shoal("peers", "--json").stdout)
    assert result.exit_code == 0
    assert [line.split() for line in result.stdout.splitlines()[1:]] == [
        ["aaaaaaaa", "192.0.2.9:1", "direct", "12.5", "ms", "4"],
        ["bbbbbbbb", "-", "relayed", "-", "-"],
    ]
    assert report == {"peer": status.peer, "peers": [attrs.asdict(member) for member in MEMBERS]}


def test_nobody_else(shoal, home, status):
    write_status(home.status, attrs.evolve(status, members=()))
    with home.lock():
        result = shoal("peers")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "nobody else is here\n")


def test_top_needs_a_terminal(shoal, status):
    result = shoal("top")
    assert result.exit_code == 1
    assert "needs a terminal" in result.stderr


def test_top_needs_a_daemon(shoal, tmp_path):
    assert "no peer has run" in shoal("top", "--home", tmp_path / "nowhere").stderr


@pytest.mark.parametrize(("key", "code"), [(b"q", 0), (b"\x03", 130)])
def test_top_on_a_terminal(home, status, key, code):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "peer", "top", "--home", str(home.path)]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, preexec_fn=take_terminal,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"},
    )  # fmt: skip
    with process, home.lock():
        os.close(theirs)
        read_until(ours, b"aaaaaaaa")
        write_status(home.status, attrs.evolve(status, members=(MemberStatus(peer="c" * 52),)))
        read_until(ours, b"cccccccc")
        os.write(ours, key)
        with open(os.devnull, "wb") as nowhere:
            drain(ours, nowhere)
        assert process.wait(30) == code
        assert process.stderr.read() == b""
    os.close(ours)


def take_terminal():
    """Makes standard input the controlling terminal, so that Ctrl-C on it is a signal."""
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def read_until(terminal, wanted):
    seen = b""
    while wanted not in seen:
        assert select.select([terminal], [], [], 30)[0], seen
        seen += os.read(terminal, 4096)


def drain(terminal, file):
    """Reads until the other side closes the terminal."""
    while True:
        try:
            data = os.read(terminal, 4096)
        except OSError:  # Linux's way of saying so
            return
        if not data:
            return
        file.write(data)

import errno
import json
import os
import subprocess
import sys
import time
import tomllib
import types
from pathlib import Path

import attrs
import pytest
import trio

import peer.cli
from peer.home import CheckpointError, CheckpointNotSaved, Home
from peer.manifest import Manifest, ManifestError, dump_settings
from peer.options import parse_size
from peer.settings import AlgorithmSettings, DataSettings, RunSettings, Settings
from peer.ticket import Ticket
from protocol.errors import (
    AddressError,
    DataError,
    HandshakeError,
    IdentityError,
    PeerUnreachable,
    RequestRefused,
    ShoalError,
)
from protocol.identity import Identity, PeerId
from protocol.transport import Address

TICKET = Ticket(bytes(32), ((PeerId(b"p" * 32), Address("192.0.2.7", 7070)),))
COMMANDS = [
    "init",
    "start",
    "join",
    "status",
    "ticket",
    "sample",
    "demo",
    "serve",
    "doctor",
    "peers",
    "top",
    "rotate-key",
]


class FakeDaemon:
    """Stands in for `peer.daemon`: records its configuration, then does what the test says."""

    def __init__(self):
        self.config = None
        self.error = None

    def DaemonConfig(self, **fields):
        return types.SimpleNamespace(**fields)

    async def run_daemon(self, config, *, task_status=trio.TASK_STATUS_IGNORED):
        self.config = config
        if self.error is not None:
            raise self.error
        config.events.emit("started", address=config.listen, run=bytes(32))
        task_status.started(TICKET)
        config.events.emit("stopped", reason="the run is over")


@pytest.fixture
def daemon(monkeypatch):
    daemon = FakeDaemon()
    module = types.ModuleType("peer.daemon")
    module.DaemonConfig = daemon.DaemonConfig
    module.run_daemon = daemon.run_daemon
    monkeypatch.setitem(sys.modules, "peer.daemon", module)
    monkeypatch.setattr("peer.cli._device", lambda name: name)  # without torch
    return daemon


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path / "home")


# Help, usage and errors


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(shoal, command):
    result = shoal(command, "--help")
    assert result.exit_code == 0
    assert f"Example: shoal {command}" in result.stdout


def test_help_does_not_import_what_is_slow():
    code = "import sys, peer.cli; sys.exit(any(name in sys.modules for name in ('torch', 'trio', 'rich.live')))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_python_m_peer():
    result = subprocess.run([sys.executable, "-m", "peer", "--help"], capture_output=True, text=True, check=True)
    assert all(command in result.stdout for command in COMMANDS)


@pytest.mark.parametrize(
    "arguments",
    [
        ["fly"],
        ["join"],
        ["join", "shoal:"],
        ["join", "nonsense"],
        ["join", TICKET.encode(), "--listen", "everywhere"],
        ["join", TICKET.encode(), "--max-upload", "fast"],
        ["join", TICKET.encode(), "--threads", "0"],
        ["join", TICKET.encode(), "--bootstrap", "192.0.2.7:7070"],
        ["serve", "nonsense"],
        ["doctor", "nonsense"],
        ["doctor", f"{PeerId(b'p' * 32)}@nowhere"],
        ["start", "missing.toml"],
        ["start", "--rounds", "-1"],
        ["start", "--width", "7"],
        ["start", "--algorithm", "magic"],
        ["start", "--algorithm", "powersgd"],
        ["start", "--constant", "fragments"],
        ["start", "--constant", "fragments=2"],
        ["start", "--no-serve"],
        ["start", "--from", "a.safetensors"],
        ["start", "--algorithm", "swarm", "--no-serve", "--from", "a.safetensors"],
        ["start", "--wait-for", "65"],
        ["demo", "--algorithm", "swarm", "--inner-steps", "5"],
        ["init", "--algorithm", "swarm", "--inner-steps", "5"],
        ["init", "--algorithm", "eager", "--outer-lr", "0.9"],
        ["init", "--heads", "3"],
        ["init", "--check"],
        ["ticket", "--show", "nonsense"],
        ["sample", "--length", "0"],
    ],
)
def test_usage_errors(shoal, daemon, arguments):
    result = shoal(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "rror: " in result.stderr
    assert "Traceback" not in result.stderr
    assert daemon.config is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ShoalError("it broke", hint="mend it"), 1),
        (PeerUnreachable("nobody answers", hint="mend it"), 3),
        (HandshakeError("wrong swarm key", hint="mend it"), 4),
        (DataError("no text", hint="mend it"), 2),
        (AddressError("the port is taken", hint="mend it"), 2),
        (IdentityError("damaged", hint="mend it"), 2),
        (CheckpointError("it is of another model", hint="mend it"), 2),
        (CheckpointNotSaved("the disk is full", hint="mend it"), 1),
        (RequestRefused("banned\x1b[2J", code="banned", hint="mend it"), 4),
        (ManifestError("model.layers = 0: must be >= 1", hint="mend it"), 4),
        (
            ExceptionGroup("", [ValueError(), ExceptionGroup("", [PeerUnreachable("nobody answers", hint="mend it")])]),
            3,
        ),
    ],
)
def test_errors_of_a_daemon_become_a_line_a_hint_and_a_code(shoal, daemon, error, code):
    daemon.error = error
    result = shoal("join", TICKET.encode())
    assert result.exit_code == code
    line, hint = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.isprintable()
    assert hint == "hint: mend it"


def test_a_bug_leaves_its_traceback_in_the_home(shoal, daemon, home):
    daemon.error = ZeroDivisionError("oops")
    result = shoal("join", TICKET.encode())
    assert result.exit_code == 1
    assert result.stderr.splitlines()[0] == "error: unexpected ZeroDivisionError: oops"
    assert str(home.crash_log) in result.stderr
    assert "Traceback" in home.crash_log.read_text()
    assert "Traceback" in shoal("join", TICKET.encode(), "--debug").stderr


def test_homes_that_cannot_be_used(shoal, daemon, home, tmp_path):
    (tmp_path / "file").touch()
    result = shoal("join", TICKET.encode(), "--home", tmp_path / "file")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 2)
    with home.lock():
        result = shoal("join", TICKET.encode())
    assert result.exit_code == 2
    assert f"in use by the daemon with process id {os.getpid()}" in result.stderr
    assert daemon.config is None


def test_an_event_file_that_cannot_be_written(shoal, daemon):
    result = shoal("join", TICKET.encode(), "--events", "missing/events.jsonl")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: the event file missing/events.jsonl cannot be opened")
    assert daemon.config is None


@pytest.mark.parametrize(
    ("text", "count"),
    [("1", 1), ("500k", 500_000), ("2M", 2_000_000), ("1.5G", 1_500_000_000), ("4Gi", 4 << 30), ("2 MB/s", 2_000_000)],
)
def test_sizes(text, count):
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "M", "0", "-1", "2X", "nan", "1e9", "2i", "0.1"])
def test_sizes_that_are_none(text):
    with pytest.raises(Exception, match="is not a size"):
        parse_size(text)


def test_devices(shoal, daemon, monkeypatch):
    monkeypatch.undo()
    assert peer.cli._device("cpu") == "cpu"
    assert peer.cli._device("auto") in ("cpu", "cuda")
    for name in ("cuda:99", "abacus"):
        with pytest.raises(peer.cli.UsageError, match=f"--device {name} cannot be used"):
            peer.cli._device(name)


# init


def test_init_writes_a_manifest_that_can_be_edited_and_checked(shoal, tmp_path):
    assert shoal("init", "--layers", 6, "--rounds", 200, "--name", "mine", "--private").exit_code == 0
    text = (tmp_path / "shoal.toml").read_text()
    tables = tomllib.loads(text)
    assert tables["model"]["layers"] == 6
    assert tables["run"] == {"name": "mine", "seed": 0, "rounds": 200}
    assert tables["membership"]["policy"] == "private"
    assert "# attention heads" in text
    assert shoal("init", "--check", "shoal.toml").exit_code == 0
    (tmp_path / "shoal.toml").write_text(text.replace("layers = 6", "layer = 6"))
    result = shoal("init", "--check", "shoal.toml")
    assert result.exit_code == 2
    assert result.stderr == "error: unknown key model.layer\nhint: did you mean model.layers?\n"


def test_init_never_overwrites(shoal, tmp_path):
    (tmp_path / "shoal.toml").write_text("precious")
    result = shoal("init", "--yes")
    assert result.exit_code == 1
    assert "exists" in result.stderr
    assert (tmp_path / "shoal.toml").read_text() == "precious"


def test_init_warns(shoal):
    result = shoal("init", "--rounds", 10, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["file"] == "shoal.toml"
    assert "outer_momentum" in report["warnings"][0]
    assert "warning: " in shoal("init", "--check").stderr


def test_init_asks_on_a_terminal(shoal, tmp_path, monkeypatch):
    monkeypatch.setattr("peer.cli._is_terminal", lambda: True)
    result = shoal("init", input="text\ny\nmine\n100\n2\n64\n\n")
    assert result.exit_code == 0, result.output
    tables = tomllib.loads((tmp_path / "shoal.toml").read_text())
    assert tables["data"]["source"] == "text"
    assert tables["membership"]["policy"] == "private"
    assert (tables["run"]["name"], tables["run"]["rounds"]) == ("mine", 100)
    assert (tables["model"]["layers"], tables["model"]["width"]) == (2, 64)
    assert tables["algorithm"]["inner_steps"] == Settings().algorithm["inner_steps"]


# start and join


def test_start_prints_the_ticket_alone(shoal, daemon, home, tmp_path):
    result = shoal("start", "--rounds", 3, "--inner-steps", 5, "--ticket-file", "ticket", "--listen", "127.0.0.1:0")
    assert result.exit_code == 0
    assert result.stdout == TICKET.encode() + "\n"
    assert (tmp_path / "ticket").read_text() == home.ticket.read_text() == TICKET.encode() + "\n"
    manifest = daemon.config.manifest
    assert manifest.founder == home.identity.public_key
    assert manifest.settings.run.rounds == 3
    assert manifest.settings.algorithm["inner_steps"] == 5
    assert daemon.config.ticket is None
    assert daemon.config.listen == Address("127.0.0.1", 0)
    assert "listens on 127.0.0.1:0" in result.stderr
    assert "warning: run.rounds = 3 is short" in result.stderr


def test_the_algorithm_and_its_constants_are_options(shoal, daemon):
    options = [
        "--algorithm",
        "streaming",
        "--inner-steps",
        9,
        "--constant",
        "fragments=3",
        "--constant",
        "strided=false",
    ]
    assert shoal("start", "--rounds", 3, *options).exit_code == 0
    settings = daemon.config.manifest.settings.algorithm
    assert settings == AlgorithmSettings("streaming", inner_steps=9, fragments=3, strided=False)
    assert shoal("init", "fedopt.toml", "--algorithm", "fedopt", "--constant", "rule=yogi").exit_code == 0
    assert 'rule = "yogi"' in Path("fedopt.toml").read_text()


def test_local_steps_of_stages_have_another_name(shoal, daemon):
    result = shoal("start", "--algorithm", "swarm", "--inner-steps", 10)
    assert result.exit_code == 2
    assert "--inner-steps is not for swarm" in result.stderr
    assert "--constant local_steps=10" in result.stderr


def test_start_signs_a_manifest(shoal, daemon, home, tmp_path):
    (tmp_path / "run.toml").write_text(dump_settings(Settings(run=RunSettings(name="mine"))))
    assert shoal("start", "run.toml", "--quiet").stderr == ""
    assert daemon.config.manifest == Manifest.create(Settings(run=RunSettings(name="mine")), home.identity)
    result = shoal("start", "run.toml", "--rounds", 3)
    assert result.exit_code == 2
    assert "exclude each other" in result.stderr


def test_start_goes_on_with_the_run_of_its_home(shoal, daemon, home):
    manifest = Manifest.create(Settings(run=RunSettings(name="mine")), home.identity)
    home.manifest.write_text(manifest.dump())
    assert shoal("start").exit_code == 0
    assert daemon.config.manifest == manifest
    home.manifest.write_text(Manifest.create(Settings(), Identity.generate()).dump())
    result = shoal("start")
    assert result.exit_code == 2
    assert "another peer founded" in result.stderr


def test_the_home_of_another_run(shoal, daemon, home):
    manifest = Manifest.create(Settings(run=RunSettings(name="mine")), home.identity)
    home.manifest.write_text(manifest.dump())
    for arguments in (("start", "--name", "other"), ("join", TICKET.encode())):
        result = shoal(*arguments)
        assert result.exit_code == 2
        assert "takes part in another run" in result.stderr
    assert daemon.config is None
    assert shoal("start", "--name", "mine").exit_code == 0
    assert home.manifest.read_text() == manifest.dump()


@pytest.mark.parametrize("contents", [b"\xff", b"[run", b"[run]\nname = 1\n"])
def test_a_damaged_manifest_in_the_home(shoal, daemon, home, contents):
    home.manifest.write_bytes(contents)
    for arguments in (("start",), ("start", "--name", "mine"), ("join", TICKET.encode())):
        result = shoal(*arguments)
        assert result.exit_code == 2
        assert f"error: {home.manifest} " in result.stderr
        assert "hint: " in result.stderr
    assert daemon.config is None


def test_start_needs_the_text_of_a_run_on_text(shoal, daemon, tmp_path):
    assert shoal("start", "--data", "corpus.txt").exit_code == 0
    assert daemon.config.manifest.settings.data.source == "text"
    assert daemon.config.data == "corpus.txt"
    (tmp_path / "run.toml").write_text(dump_settings(Settings(data=DataSettings(source="text"))))
    result = shoal("start", "run.toml")
    assert result.exit_code == 2
    assert "--data PATH" in result.stderr


def test_a_manifest_that_is_not_text(shoal, daemon, tmp_path):
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    assert shoal("start", "run.toml").exit_code == 2
    (tmp_path / "run.toml").write_bytes(b"#" * 100_000)
    assert "longer than 64 KiB" in shoal("start", "run.toml").stderr


def test_join_passes_its_options_on(shoal, daemon, home):
    result = shoal(
        "join", TICKET.encode().upper(), "--data", "mine.txt", "--events", "events.jsonl", "--max-upload", "2M",
        "--max-download", "1Mi", "--max-memory", "4G", "--threads", 2, "--device", "cpu", "--announce", "example.org:7",
    )  # fmt: skip
    assert result.exit_code == 0
    assert result.stdout == ""
    config = daemon.config
    assert (config.ticket, config.manifest) == (TICKET, None)
    assert config.home.path == home.path
    assert (config.data, config.threads, config.device) == ("mine.txt", 2, "cpu")
    assert (config.max_upload, config.max_download, config.max_memory) == (2_000_000, 1 << 20, 4_000_000_000)
    assert config.announce == Address("example.org", 7)
    assert (config.bootstrap, config.map_port) == ((), True)
    events = [json.loads(line) for line in Path("events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["started", "stopped"]
    assert events[0]["peer"] == str(home.identity.peer_id)


def test_threads_wait_without_spinning():
    code = "import os, peer.cli; peer.cli.app = lambda: print(os.environ['OMP_WAIT_POLICY']); peer.cli.main()"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    for given, used in (({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")):
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment | given
        )
        assert result.stdout == f"{used}\n"


def test_join_knows_helpers(shoal, daemon):
    one, two = f"{PeerId(b'1' * 32)}@192.0.2.1:1", f"{PeerId(b'2' * 32)}@[2001:db8::2]:2"
    assert shoal("join", TICKET.encode(), "--bootstrap", one, "--bootstrap", two, "--no-map").exit_code == 0
    assert daemon.config.bootstrap == (
        (PeerId(b"1" * 32), Address("192.0.2.1", 1)),
        (PeerId(b"2" * 32), Address("2001:db8::2", 2)),
    )
    assert not daemon.config.map_port


def test_a_ticket_is_replaced_when_addresses_change(shoal, daemon, home):
    assert shoal("join", TICKET.encode(), "--ticket-file", "ticket").exit_code == 0
    other = attrs.evolve(TICKET, run_id=b"r" * 32)
    daemon.config.on_ticket(other)
    assert Path("ticket").read_text() == home.ticket.read_text() == other.encode() + "\n"
    Path("ticket").unlink()
    Path("ticket").mkdir()
    daemon.config.on_ticket(TICKET)  # no reason to stop
    assert home.ticket.read_text() == TICKET.encode() + "\n"


def test_join_reads_the_ticket_from_a_pipe(shoal, daemon):
    assert shoal("join", "-", input=TICKET.encode() + "\n").exit_code == 0
    assert daemon.config.ticket == TICKET


def test_join_refuses_an_expired_ticket(shoal, daemon):
    result = shoal("join", attrs.evolve(TICKET, expires=1.0).encode())
    assert result.exit_code == 4
    assert "expired" in result.stderr
    assert daemon.config is None


@pytest.mark.parametrize("file", ["missing/ticket", "."])
def test_a_ticket_file_that_cannot_be_written(shoal, daemon, file):
    result = shoal("join", TICKET.encode(), "--ticket-file", file)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: --ticket-file {file} ")
    assert daemon.config is None


def test_a_ticket_that_cannot_be_saved_is_no_reason_to_stop(shoal, daemon, home, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("peer.home.write_atomically", full)
    result = shoal("start")
    assert (result.exit_code, result.stdout) == (0, TICKET.encode() + "\n")
    assert f"the ticket was NOT SAVED: {home.ticket}: No space left on device" in result.stderr


# status, ticket, sample and demo


def test_status_of_a_daemon(shoal, daemon, home):
    assert shoal("join", TICKET.encode()).exit_code == 0
    result = shoal("status", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert (report["running"], report["activity"], report["reason"]) == (False, "stopped", "the run is over")
    assert report["peer"] == str(home.identity.peer_id)
    with home.lock():
        assert json.loads(shoal("status", "--json").stdout)["running"]
        result = shoal("status")
    assert result.exit_code == 0
    assert f"running, process {os.getpid()}" in result.stdout


def test_status_without_a_daemon(shoal, tmp_path):
    result = shoal("status", "--home", tmp_path / "nowhere")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: no peer has run in")
    assert not (tmp_path / "nowhere").exists()


def test_ticket_shows_what_is_inside_but_not_the_key(shoal):
    secret = attrs.evolve(TICKET, swarm_key=b"\xaa" * 32, key_number=3, expires=0.0)
    report = json.loads(shoal("ticket", "--show", secret.encode(), "--json").stdout)
    assert report == {
        "run": "00" * 32,
        "bootstrap": [{"peer": str(PeerId(b"p" * 32)), "address": "192.0.2.7:7070"}],
        "private": True,
        "key_number": 3,
        "expires": 0.0,
    }
    text = shoal("ticket", "--show", secret.encode()).stdout
    assert "192.0.2.7:7070" in text
    assert "swarm key 3:" in text
    assert "1970-01-01 00:00 UTC (over)" in text
    assert "aa" * 8 not in text


def test_ticket_invites_others(shoal, daemon):
    result = shoal("ticket")
    assert (result.exit_code, result.stdout) == (1, "")
    shoal("join", TICKET.encode())
    assert shoal("ticket").stdout == TICKET.encode() + "\n"
    limited = json.loads(shoal("ticket", "--hours", 2, "--json").stdout)["ticket"]
    assert Ticket.parse(limited, time.time()).expires > time.time() + 7000


@pytest.fixture
def checkpoint(monkeypatch):
    """Stands in for `peer.checkpoint` and the model."""
    latest = types.SimpleNamespace(settings=Settings(), state=types.SimpleNamespace(outer="state"))
    checkpoints, trainer = types.ModuleType("peer.checkpoint"), types.ModuleType("peer.trainer")
    checkpoints.load_latest = lambda directory: latest if any(directory.iterdir()) else None
    trainer.sample_text = lambda settings, state, prompt, length, *, temperature, seed: b"\x1b[2J\xff" + prompt * length
    monkeypatch.setitem(sys.modules, "peer.checkpoint", checkpoints)
    monkeypatch.setitem(sys.modules, "peer.trainer", trainer)


def test_sample_of_a_stage(shoal, home, checkpoint, monkeypatch):
    monkeypatch.setattr(sys.modules["peer.checkpoint"], "load_latest", lambda directory: None)
    home.checkpoints.mkdir(exist_ok=True)
    (home.checkpoints / "stage-0000-0000000010.safetensors").touch()
    assert "`shoal export`" in shoal("sample").stderr


def test_sample(shoal, home, checkpoint):
    result = shoal("sample")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: there is no checkpoint of a whole model in")
    (home.checkpoints / "000001").touch()
    assert shoal("sample", "--prompt", "ab", "--length", 2).stdout == "ab�[2J�abab\n"
    report = json.loads(shoal("sample", "--prompt", "a", "--length", 1, "--json").stdout)
    assert report == {"prompt": "a", "text": "\x1b[2J�a"}


def test_demo(shoal, monkeypatch, tmp_path):
    module = types.ModuleType("peer.demo")
    module.DemoOptions = lambda **options: options
    seen = []
    module.run_demo = lambda options: seen.append(options) or 130
    monkeypatch.setitem(sys.modules, "peer.demo", module)
    result = shoal("demo", "--peers", 3, "--rounds", 6, "--inner-steps", 7, "--keep", "files", "--json")
    assert result.exit_code == 130
    (options,) = seen
    assert (options["peers"], options["rounds"], options["inner_steps"], options["json"]) == (3, 6, 7, True)
    assert str(options["keep"]) == "files"

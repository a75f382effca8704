"""The demo's orchestration, with a stand-in for the daemons: the good course, and everything that can go wrong."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from peer.child import Child
from peer.demo import DemoOptions, demo_settings, run_demo
from peer.live import status_table
from peer.manifest import dump_settings

FAKE = Path(__file__).with_name("fake_peer.py")
ROOT = Path(__file__).parents[2]


def play(mode, **options):
    return run_demo(DemoOptions(**{"rounds": 5, **options}), command=(sys.executable, "-S", str(FAKE), mode))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """The report goes to the current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_good_demo_passes_and_says_so_in_json(capsys, tmp_path):
    assert play("good", json=True) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    verdict = json.loads(out)
    assert verdict["passed"] and verdict["problems"] == []
    assert verdict["rounds"] == 5
    assert verdict["killed"] == ["id-peer-3"] and verdict["killed_in_reduce"] and verdict["killed_round"] == 3
    assert verdict["joined"] == ["id-newcomer"]
    assert verdict["digests"] == {f"id-{name}": "digest-5" for name in ("founder", "peer-1", "peer-2", "newcomer")}
    assert verdict["loss_last"] < verdict["loss_first"] == 5.5
    assert verdict["bytes_sent"] == 70_000
    assert "peer-3 gets SIGKILL in round 3" in err and "PASSED" in err and "def sampled(): <b>" in err
    assert "def sampled(): &lt;b&gt;" in (tmp_path / "report.html").read_text()


def test_a_report_that_cannot_be_written_does_not_hide_the_verdict(capsys, tmp_path):
    (tmp_path / "report.html").mkdir()
    assert play("crash") == 1
    out = capsys.readouterr().out
    assert "not written" in out and "peer-1 failed" in out


def test_kept_files_are_where_they_were_asked_for(capsys, tmp_path):
    keep = tmp_path / "kept" / "demo"
    assert play("good", keep=keep) == 0
    for name in ("founder", "peer-1", "peer-2", "peer-3", "newcomer"):
        assert (keep / name / "events.jsonl").stat().st_size > 0
        assert (keep / name / "log").exists()
    assert (keep / "report.html").exists() and not (tmp_path / "report.html").exists()
    assert "PASSED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        ("diverge", "the digests of the peers alive at the end are not equal"),
        ("flat", "the validation loss did not fall: 5.500 → 5.500"),
    ],
)
def test_a_swarm_that_disagrees_or_learns_nothing_fails(capsys, mode, problem):
    assert play(mode, json=True) == 1
    verdict = json.loads(capsys.readouterr().out)
    assert not verdict["passed"] and verdict["problems"] == [problem]


@pytest.mark.parametrize(
    ("mode", "problem", "log"),
    [
        ("crash", "peer-1 failed with exit code 1: error: the disk is full", "hint: make room"),
        ("complain", "peer-1 printed an error: ValueError: a bug", "Traceback"),
        ("early", "peer-1 ended at revision 2, before the last round", "it printed nothing"),
    ],
)
def test_a_daemon_that_fails_ends_the_demo_with_its_lines(capsys, mode, problem, log):
    assert play(mode) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out and problem in out and log in out


def test_a_run_that_is_over_too_soon_ends_the_demo(capsys):
    assert play("quick") == 1
    assert "peer-3 was at the end before it could be killed" in capsys.readouterr().out


def test_a_missing_sample_is_told_and_forgiven(capsys):
    assert play("no-sample") == 0
    assert "no text sample: error: no checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"peers": 1}, "--peers 2"),
        ({"rounds": 4}, "--rounds 5"),
        ({"inner_steps": 0}, "--inner-steps"),
        ({"algorithm": "powersgd"}, "cannot be used in a run"),
        ({"algorithm": "streeming"}, 'did you mean "streaming"?'),
        ({"data": "nowhere"}, "nowhere"),
        ({"keep": Path("full")}, "--keep"),
    ],
)
def test_impossible_options_are_refused_with_a_hint(capsys, tmp_path, options, hint):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert play("good", **options) == 2
    assert hint in capsys.readouterr().err


def test_the_settings_are_those_asked_for():
    settings = demo_settings(7, 30, "some/path")
    assert (settings.run.rounds, settings.algorithm["inner_steps"], settings.data.source) == (7, 30, "text")
    assert "rounds = 7" in dump_settings(demo_settings(7, 30))


def test_the_table_has_a_row_for_every_daemon(swarm, tmp_path):
    children = [Child(recording.name, tmp_path) for recording in swarm.recordings]
    for child, recording in zip(children, swarm.recordings, strict=True):
        child.recording = recording
    children[3].killed = True
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(status_table([*children, Child("late", tmp_path)]))
    rows = [line.split() for line in console.export_text().splitlines()]
    assert rows[0] == ["daemon", "peer", "state", "round", "loss", "tokens/s", "sent"]
    assert rows[1] == ["founder", "id-found", "stopped", "6", "0.714", "2,000", "50.0", "kB"]
    assert rows[4][2:4] == ["killed", "2"]
    assert rows[6] == ["late", "starting", "0", "B"]


@pytest.fixture
def waiting_demo(tmp_path):
    """Starts a demo, in a process of its own, whose founder never gets ready. Gives it and the founder's pid."""
    demos = []

    def start(mode):
        keep = tmp_path / mode
        code = (
            "import sys; from pathlib import Path; from peer.demo import DemoOptions, run_demo;"
            f"sys.exit(run_demo(DemoOptions(keep=Path({str(keep)!r})), command={(sys.executable, str(FAKE), mode)!r}))"
        )
        demo = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        demos.append(demo)
        events = keep / "founder" / "events.jsonl"
        assert eventually(lambda: events.exists() and "validation" in events.read_text())
        return demo, int((keep / "founder" / "pid").read_text())

    yield start
    for demo in demos:
        demo.kill()
        demo.communicate()


def test_ctrl_c_stops_the_daemons(waiting_demo):
    demo, founder = waiting_demo("silent")
    demo.send_signal(signal.SIGINT)
    out, _ = demo.communicate(timeout=30)
    assert demo.returncode == 130 and "interrupted" in out
    assert not running(founder)


def test_daemons_that_will_not_stop_are_killed(waiting_demo):
    demo, founder = waiting_demo("stubborn")
    demo.send_signal(signal.SIGINT)
    demo.communicate(timeout=30)
    assert demo.returncode == 130 and not running(founder)


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_killed_demo_leaves_no_daemons(waiting_demo):
    demo, founder = waiting_demo("stubborn")
    demo.kill()
    demo.communicate(timeout=30)
    assert eventually(lambda: not running(founder))


def running(pid):
    """True if a process with that id lives; one that has ended and waits to be reaped does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


def eventually(condition, within=30.0):
    """Waits for something that other processes do."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False

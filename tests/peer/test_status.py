import json
import os

import attrs
import pytest
import trio
import trio.testing

from peer.console import Console, describe, member_lines, size, stages_line, summary
from peer.events import EventLog
from peer.status import MemberStatus, Status, StatusError, StatusFile, read_status, write_status
from peer.text import duration

ME = "m" * 52
STORY = [
    ("started", {"address": "192.0.2.7:7070", "run": "ab" * 32}),
    ("peer_seen", {"peer": "a" * 52}),
    ("peer_seen", {"peer": "b" * 52}),
    ("peer_seen", {"peer": "a" * 52}),
    ("synced", {"round": 3, "digest": "00", "seconds": 1.0, "bytes": 5_000_000}),
    ("inner", {"step": 50, "loss": 2.5, "tokens": 800, "tokens_per_second": 1234.5}),
    ("inner", {"step": 51, "loss": 2.25, "tokens": 800, "tokens_per_second": 1200.0}),
    ("round_started", {"round": 4, "attempt": 1, "members": [ME, "a" * 52, "b" * 52]}),
    ("peer_lost", {"peer": "b" * 52, "reason": "silence"}),
    ("round_failed", {"round": 4, "attempt": 1, "reason": "a peer died"}),
    ("round_committed", {"round": 4, "attempt": 2, "members": [ME, "a" * 52], "contributors": [ME, "a" * 52],
                         "digest": "11", "seconds": 2.0, "bytes_sent": 1000, "bytes_received": 2000, "weight": 5.0}),
    ("validation", {"round": 4, "loss": 2.125}),
]  # fmt: skip


@pytest.fixture
def log():
    with EventLog(None, ME, clock=iter(range(1, 1000)).__next__) as log:
        yield log


def tell(log):
    for event, fields in STORY:
        log.emit(event, **fields)


def test_the_status_follows_the_events(log, tmp_path):
    file = StatusFile(tmp_path / "status.json", log, ME)
    tell(log)
    status = file.status
    assert status == Status(
        pid=os.getpid(), peer=ME, activity="training", since=1, updated=len(STORY), address="192.0.2.7:7070",
        run="ab" * 32, revision=4, digest="11", contributors=2, neighbours=("a" * 52,), step=51, loss=2.25,
        tokens=1600, tokens_per_second=1200.0, validation=2.125, bytes_sent=1000, bytes_received=2000, failures=1,
    )  # fmt: skip
    log.emit("stopped", reason="the run is over")
    assert file.status.activity == "stopped"
    assert file.status.reason == "the run is over"
    assert file.status.neighbours == ()


MEMBER = {"peer": "a" * 52, "address": "192.0.2.9:1", "path": "direct", "rtt": 0.0125, "revision": 4, "stage": None}


def test_the_status_says_what_is_known_of_members(log, tmp_path):
    file = StatusFile(tmp_path / "status.json", log, ME)
    log.tell("members", members=[MEMBER, {"peer": "b" * 52, "address": None, "rtt": None, "revision": None}])
    one, two = file.status.members
    assert attrs.asdict(one) == MEMBER
    assert two == MemberStatus(peer="b" * 52)
    write_status(tmp_path / "status.json", file.status)
    assert read_status(tmp_path / "status.json") == file.status
    assert member_lines(file.status) == [
        "peer      address      path    rtt      round",
        "aaaaaaaa  192.0.2.9:1  direct  12.5 ms  4",
        "bbbbbbbb  -            direct  -        -",
    ]
    log.emit("stopped", reason="over")
    assert member_lines(file.status) == []


def test_a_helper_serves_and_a_mapped_port_is_known_as_long_as_it_is(log, tmp_path):
    file = StatusFile(tmp_path / "status.json", log, ME)
    log.emit("started", address="192.0.2.7:7070", role="helper")
    log.emit("peer_seen", peer="a" * 52)
    assert summary(file.status) == "serving · 1 other peer"
    log.emit("mapped", address="203.0.113.5:7070", method="pcp", behind_nat=False)
    assert file.status.mapped == "203.0.113.5:7070"
    log.emit("unmapped", address="203.0.113.5:7070")
    assert file.status.mapped is None


def test_lengths_of_time():
    assert [duration(seconds) for seconds in (-1, 59.9, 61, 7500)] == ["0 s", "59 s", "1 min 01 s", "2 h 05 min"]


def test_unknown_events_and_missing_losses_do_no_harm(log, tmp_path):
    file = StatusFile(tmp_path / "status.json", log, ME)
    log.emit("comet_seen", tail=True)
    log.emit("inner", step=1, loss=float("nan"))
    assert file.status.loss is None
    assert "loss" not in summary(file.status)


def test_a_status_survives_its_file(log, tmp_path):
    file = StatusFile(tmp_path / "status.json", log, ME)
    tell(log)
    write_status(tmp_path / "status.json", file.status)
    assert read_status(tmp_path / "status.json") == file.status
    assert json.loads((tmp_path / "status.json").read_text()) == json.loads(json.dumps(attrs.asdict(file.status)))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": "x", "peer": "y"}', "\xff"])
def test_a_damaged_file_is_named(tmp_path, text):
    (tmp_path / "status.json").write_text(text, "latin-1")
    with pytest.raises(StatusError, match=r"status\.json is damaged"):
        read_status(tmp_path / "status.json")


def test_no_status_says_how_to_get_one(tmp_path):
    with pytest.raises(StatusError, match="no peer has run") as caught:
        read_status(tmp_path / "status.json")
    assert "shoal join" in caught.value.hint


async def test_the_file_is_written_while_it_runs_and_at_the_end(log, tmp_path, autojump_clock):
    path = tmp_path / "status.json"
    file = StatusFile(path, log, ME)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(file.run)
        await trio.testing.wait_all_tasks_blocked()
        assert read_status(path).activity == "starting"
        tell(log)
        await trio.sleep(1.5)
        assert read_status(path).revision == 4
        log.emit("stopped", reason="test")
        nursery.cancel_scope.cancel()
    assert read_status(path).activity == "stopped"


async def test_a_status_that_cannot_be_written_stops_nothing(log, tmp_path, autojump_clock):
    file = StatusFile(tmp_path / "missing" / "status.json", log, ME)
    with trio.move_on_after(5) as scope:
        await file.run()
    assert scope.cancelled_caught


def test_people_get_a_line_for_what_matters(log):
    said = []
    log.subscribe(lambda event: said.append(describe(event)))
    tell(log)
    assert [line for line in said if line] == [
        "peer mmmmmmmm listens on 192.0.2.7:7070",
        "peer aaaaaaaa is here",
        "peer bbbbbbbb is here",
        "peer aaaaaaaa is here",
        "round 3: fetched the state (5.0 MB)",
        "peer bbbbbbbb is gone: silence",
        "round 4: attempt 1 failed: a peer died",
        "round 4: work of 2 peers averaged in 2.0 s",
        "round 4: validation loss 2.1250 nats per byte",
    ]


def test_people_get_a_line_about_keys(log):
    said = []
    log.subscribe(lambda event: said.append(describe(event)))
    log.emit("key_rotated", number=2, excluded=())
    log.emit("key_taken", peer="a" * 52, number=2)
    log.emit("key_retired", number=1)
    log.emit("key_problem", reason="rotated.json: no space left")
    log.emit("rejected", peer="a" * 52, reason="b:1 has another swarm key than we", hint="Ask for a fresh ticket.")
    log.emit("rejected", peer="a" * 52, reason="this run is full", hint=None)
    assert said == [
        "the swarm key was rotated: this is key 2",
        "peer aaaaaaaa has swarm key 2",
        "swarm key 1 is no longer good",
        "the swarm key was NOT SAVED: rotated.json: no space left",
        "peer aaaaaaaa does not let this one in: b:1 has another swarm key than we. Ask for a fresh ticket.",
        "peer aaaaaaaa does not let this one in: this run is full.",
    ]


def test_the_live_line_does_not_swallow_lines(log, tmp_path, capsys):
    file = StatusFile(tmp_path / "status.json", log, ME)
    with Console(lambda: file.status, live=True) as console:
        log.subscribe(console.show)
        log.emit("started", address="192.0.2.7:7070")
        console.go_live()
        log.emit("peer_seen", peer="[bold]abc")
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert "peer mmmmmmmm listens on 192.0.2.7:7070" in stderr
    assert "peer [bold]ab is here" in stderr


def test_strangers_cannot_write_to_the_terminal(log):
    said = []
    log.subscribe(lambda event: said.append(describe(event)))
    log.emit("banned", peer="x" * 52, reason="\x1b[2J\n" + "y" * 1000)
    (line,) = said
    assert line.isprintable()
    assert len(line) < 300


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2e9, "2.0 GB"), (3e15, "3000.0 TB")]
)
def test_sizes_for_people(count, text):
    assert size(count) == text


def test_a_round_that_was_only_fetched_is_said_to_be(log):
    said = []
    log.subscribe(lambda event: said.append(describe(event)))
    log.emit("round_committed", round=3, contributors=["a" * 52, "b" * 52], seconds=0.0, fetched=True)
    assert said == ["round 3: fetched the work of 2 peers"]


@pytest.mark.parametrize(
    ("common", "text"), [(4, "what was made from round 5 to round 9 is"), (None, "what was made to round 9 is")]
)
def test_a_branch_that_was_given_up_is_told(log, common, text):
    said = []
    log.subscribe(lambda event: said.append(describe(event)))
    log.emit("branch_left", round=9, digest="d" * 64, weight=100.0, common=common)
    assert said == [f"{text} given up: the others had done more meanwhile"]


def stages(**changes):
    return {"stage": 1, "servers": [2, 1, 1], "step": 41, "bytes_sent": 5000, "bytes_received": 7000, **changes}


def test_the_status_of_a_run_of_stages_says_who_does_what(log, tmp_path):
    file = StatusFile(tmp_path / "status.json", log, ME)
    log.emit("started", address="192.0.2.7:7070", run="ab" * 32)
    log.emit("inner", step=40, loss=2.5, tokens=800, tokens_per_second=1234.5)
    log.tell("members", members=[MEMBER | {"stage": 2, "revision": 41}])
    log.tell("stages", **stages())
    assert file.status.updated == 2  # of an event, not of a look
    assert summary(file.status) == (
        "training · stage 1 of 3 · round 41 · 0 other peers · loss 2.500 · 1,234 tokens/s"
        " · sent 5.0 kB, received 7.0 kB"
    )
    assert stages_line(file.status) == "stage 0: 2, stage 1: 1, stage 2: 1"
    heading, row = member_lines(file.status)
    assert heading.split()[-2:] == ["round", "stage"]
    assert row.split()[-2:] == ["41", "2"]


def test_the_status_says_for_which_stage_a_run_waits(log, tmp_path):
    file = StatusFile(tmp_path / "status.json", log, ME)
    log.emit("started", address="192.0.2.7:7070", run="ab" * 32)
    log.emit("inner", step=40, loss=2.5, tokens=800, tokens_per_second=1234.5)
    log.tell("stages", **stages(stage=None, servers=[2, 0, 1]))
    assert summary(file.status).startswith("waiting for a server of stage 1 · no stage of 3 · round 41")
    assert "tokens/s" not in summary(file.status)
    log.emit("stopped", reason="cancelled")
    assert summary(file.status).startswith("stopped")


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"step": 0, "furthest": 0, "bytes": 0}, "stage 2: begins anew"),
        ({"step": 7, "furthest": 7, "bytes": 0}, "stage 2: begins with what is here, of step 7"),
        (
            {"step": 7, "furthest": 9, "bytes": 2000},
            "stage 2: has the state of step 7 (2.0 kB fetched); others are at step 9",
        ),
    ],
)
def test_the_console_says_from_where_a_stage_goes_on(fields, line):
    assert describe({"peer": ME, "event": "stage_synced", "stage": 2, "seconds": 1.0, **fields}) == line

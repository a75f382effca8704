import json
import logging
import os
import threading
from pathlib import Path

import pytest

from peer.events import EventLog, EventsError
from protocol.identity import PeerId
from protocol.transport import Address

ME = PeerId(bytes(32))
OTHER = PeerId(b"\1" * 32)


def lines(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_events_are_lines_of_json(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path, ME, clock=lambda: 12.5) as log:
        log.emit("started", address=Address("192.0.2.7", 7070), run=b"\xab" * 32)
        log.emit("round_committed", round=1, members=(ME, OTHER), seconds=0.25, digest=b"\xcd" * 32)
    assert lines(path) == [
        {"t": 12.5, "peer": str(ME), "event": "started", "address": "192.0.2.7:7070", "run": "ab" * 32},
        {
            "t": 12.5,
            "peer": str(ME),
            "event": "round_committed",
            "round": 1,
            "members": [str(ME), str(OTHER)],
            "seconds": 0.25,
            "digest": "cd" * 32,
        },
    ]


def test_events_about_others_name_both(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path, ME, clock=lambda: 1.0) as log:
        log.emit("peer_lost", peer=OTHER, reason="silence")
    assert lines(path) == [{"t": 1.0, "peer": str(OTHER), "event": "peer_lost", "reason": "silence", "by": str(ME)}]


def test_every_line_is_valid_json(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path, ME) as log:
        log.emit(
            "inner", loss=float("nan"), rates=[float("inf"), 1.0], nested={"a": {ME}}, text="a\nb\u2028", none=None
        )
    (event,) = lines(path)
    assert event["loss"] is None
    assert event["rates"] == [None, 1.0]
    assert event["nested"] == {"a": [str(ME)]}
    assert event["text"] == "a\nb\u2028"


def test_each_event_is_there_at_once_and_files_are_appended_to(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path, ME) as log:
        log.emit("started")
        assert [event["event"] for event in lines(path)] == ["started"]
    with EventLog(path, ME) as log:
        log.emit("stopped")
    assert [event["event"] for event in lines(path)] == ["started", "stopped"]


def test_a_line_that_a_crash_cut_off_spoils_no_other(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"t": 1, "pe')
    with EventLog(path, ME) as log:
        log.emit("started")
        log.emit("stopped")
    torn, *rest = path.read_text().splitlines()
    assert torn == '{"t": 1, "pe'
    assert [json.loads(line)["event"] for line in rest] == ["started", "stopped"]


def test_subscribers_need_no_file():
    seen = []
    with EventLog(None, ME, clock=lambda: 3.0) as log:
        log.subscribe(seen.append)
        log.emit("validation", round=2, loss=1.5)
    assert seen == [{"t": 3.0, "peer": str(ME), "event": "validation", "round": 2, "loss": 1.5}]


def test_threads_do_not_mix_lines(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path, ME) as log:
        threads = [
            threading.Thread(target=lambda i=i: [log.emit("inner", step=i, pad="x" * 5000) for _ in range(20)])
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(event["step"] for event in lines(path)) == sorted([0, 1, 2, 3] * 20)


@pytest.mark.parametrize("path", ["missing/events.jsonl", "."])
def test_a_file_that_cannot_be_opened_is_an_error_at_once(tmp_path, path):
    with pytest.raises(EventsError, match="cannot be opened"):
        EventLog(tmp_path / path, ME)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_costs_one_warning(caplog):
    seen = []
    with caplog.at_level(logging.WARNING), EventLog(Path("/dev/full"), ME) as log:
        log.subscribe(seen.append)
        for _ in range(3):
            log.emit("inner")
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert len(seen) == 3


def test_a_closed_log_still_reaches_subscribers(tmp_path):
    seen = []
    log = EventLog(tmp_path / "events.jsonl", ME)
    log.subscribe(seen.append)
    log.close()
    log.close()
    log.emit("stopped")
    assert len(seen) == 1
    assert (tmp_path / "events.jsonl").read_bytes() == b""


def test_what_is_told_reaches_subscribers_but_not_the_file(tmp_path):
    heard = []
    with EventLog(tmp_path / "events.jsonl", "me", clock=lambda: 1.0) as log:
        log.subscribe(heard.append)
        log.tell("members", members=[{"rtt": float("nan")}])
    assert heard == [{"t": 1.0, "peer": "me", "event": "members", "members": [{"rtt": None}]}]
    assert (tmp_path / "events.jsonl").read_bytes() == b""

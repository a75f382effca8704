"""The verdict on recorded demos: what passes, what fails and why, and how things are counted."""

from __future__ import annotations

import json
import math

import attrs
import pytest

from peer.recording import Event, EventError, LineTail, Recording
from peer.verdict import judge

KEYS = {
    "rounds",
    "digests",
    "loss_first",
    "loss_last",
    "bytes_sent",
    "bytes_data_parallel",
    "killed",
    "joined",
    "recovery_seconds",
    "seconds",
}


def test_a_good_demo_passes(swarm):
    verdict = judge(swarm.recordings, swarm.scenario)
    assert verdict.passed and verdict.problems == ()
    assert verdict.rounds == 6
    assert verdict.digests == {f"id-{name}": "digest-6" for name in ("founder", "peer-1", "peer-2", "newcomer")}
    assert (verdict.loss_first, verdict.loss_last) == (5.5, 2.5)
    assert verdict.joined == "id-newcomer" and verdict.joined_rounds == 2


def test_recovery_is_the_excess_over_the_median_round(swarm):
    death = judge(swarm.recordings, swarm.scenario).death
    assert death.peer == "id-peer-3" and death.round == 3 and death.in_reduce and death.attempts == 2
    assert (death.seconds, death.usual, death.recovery) == (12.0, 10.0, 2.0)


def test_bytes_are_means_over_the_peers_alive_at_the_end(swarm):
    verdict = judge(swarm.recordings, swarm.scenario)
    assert verdict.bytes_sent == 50_000

    def per_round(members):
        return 50 * 4 * 1000 * 2 * (members - 1) / members

    old = 2 * per_round(4) + 2 * per_round(3) + 2 * per_round(4)
    assert verdict.bytes_data_parallel == pytest.approx((3 * old + 2 * per_round(4)) / 4)


def test_without_totals_the_bytes_of_the_rounds_count(swarm):
    swarm.replace_all(lambda event: None if event.kind == "stopped" else event)
    assert judge(swarm.recordings, swarm.scenario).bytes_sent == 6000 * (3 * 6 + 2) / 4


def test_json_has_the_promised_keys_on_one_line(swarm):
    text = judge(swarm.recordings, swarm.scenario).to_json()
    assert "\n" not in text
    verdict = json.loads(text)
    assert verdict.keys() >= KEYS
    assert verdict["killed"] == ["id-peer-3"] and verdict["joined"] == ["id-newcomer"]
    assert verdict["recovery_seconds"] == 2.0 and verdict["passed"] is True and verdict["killed_in_reduce"] is True


def test_text_names_the_outcome_and_the_numbers(swarm):
    text = judge(swarm.recordings, swarm.scenario).to_text()
    for part in ("PASSED", "6 rounds", "5.500 → 2.500", "killed in mid-reduce of round 3", "2.0 s lost", "2 rounds"):
        assert part in text


def test_different_digests_fail(swarm, change):
    def fork(event):
        last = event.kind == "round_committed" and event.fields["round"] == 6
        return change(event, digest="digest-x") if last else event

    swarm.replace("peer-1", fork)
    verdict = judge(swarm.recordings, swarm.scenario)
    assert not verdict.passed
    assert any("digests" in problem for problem in verdict.problems)
    assert "NOT EQUAL" in verdict.to_text() and "FAILED" in verdict.to_text()


def test_different_revisions_fail_and_name_the_peers(swarm):
    swarm.replace("peer-1", lambda e: None if e.kind == "round_committed" and e.fields["round"] == 6 else e)
    assert any("peer-1 at 5" in problem for problem in judge(swarm.recordings, swarm.scenario).problems)


def test_a_peer_without_a_revision_fails(swarm):
    swarm.replace("newcomer", lambda event: event if event.kind == "started" else None)
    assert "newcomer never had a revision" in judge(swarm.recordings, swarm.scenario).problems


def test_a_fetched_revision_counts_as_well_as_a_committed_one(swarm, change):
    def fetch(event):
        if event.kind == "round_committed" and event.fields["round"] == 6:
            return attrs.evolve(event, kind="synced")
        return event

    swarm.replace("peer-1", fetch)
    assert judge(swarm.recordings, swarm.scenario).passed


@pytest.mark.parametrize("last", [5.5, 6.0])
def test_a_loss_that_did_not_fall_fails(swarm, change, last):
    swarm.replace_all(lambda e: change(e, loss=last) if e.kind == "validation" and e.fields["round"] == 6 else e)
    assert any("did not fall" in problem for problem in judge(swarm.recordings, swarm.scenario).problems)


def test_a_loss_never_measured_fails(swarm):
    swarm.replace_all(lambda event: None if event.kind == "validation" else event)
    verdict = judge(swarm.recordings, swarm.scenario)
    assert any("not measured" in problem for problem in verdict.problems)
    assert json.loads(verdict.to_json())["loss_last"] is None


def test_losses_that_are_no_numbers_are_left_out(swarm, change):
    swarm.replace("founder", lambda e: change(e, loss=None) if e.kind == "validation" and e.fields["round"] == 6 else e)
    assert judge(swarm.recordings, swarm.scenario).loss_last == 2.5


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"failure": "peer-1 failed"}, "peer-1 failed"),
        ({"rounds": 8}, "only 6 of 8 rounds were committed"),
        ({"joined": None}, "no peer joined later"),
    ],
)
def test_what_did_not_happen_fails(swarm, changes, problem):
    verdict = judge(swarm.recordings, attrs.evolve(swarm.scenario, **changes))
    assert problem in verdict.problems


def test_no_death_fails(swarm):
    swarm.recordings = [recording for recording in swarm.recordings if recording.name != "peer-3"]
    scenario = attrs.evolve(swarm.scenario, killed=None, killed_round=None, killed_at=None)
    verdict = judge(swarm.recordings, scenario)
    assert "no peer was killed" in verdict.problems
    assert json.loads(verdict.to_json())["killed"] == []


def test_a_kill_after_the_reduce_is_not_called_one_in_it(swarm):
    committed = swarm["founder"].committed[3]
    swarm["peer-3"].add(attrs.evolve(committed, peer="id-peer-3"))
    death = judge(swarm.recordings, swarm.scenario).death
    assert not death.in_reduce and death.round == 4
    assert "outside of a reduce" in judge(swarm.recordings, swarm.scenario).to_text()


def test_a_reduce_that_nobody_repeated_was_not_hit(swarm, change):
    def smooth(event):
        if event.fields.get("attempt") == 2:
            return None if event.kind == "round_started" else change(event, attempt=1)
        return None if event.kind == "round_failed" else event

    swarm.replace_all(smooth)
    death = judge(swarm.recordings, swarm.scenario).death
    assert death.attempts == 1 and not death.in_reduce


def test_an_early_failure_gives_a_verdict_too(swarm):
    scenario = attrs.evolve(swarm.scenario, killed=None, joined=None, failure="founder failed")
    verdict = judge([Recording("founder")], scenario)
    assert verdict.rounds == 0 and not verdict.passed
    assert json.loads(verdict.to_json())["recovery_seconds"] is None
    assert "FAILED" in verdict.to_text()
    assert not judge([], scenario).passed


def test_an_incomplete_event_is_an_error(swarm):
    with pytest.raises(EventError, match="digest"):
        swarm["founder"].add(Event(0.0, "id", "round_committed", {"round": 7}))


@pytest.mark.parametrize(
    "line", ["", "{", "[]", '"text"', '{"t": 1, "peer": "a"}', '{"t": "1", "peer": "a", "event": "b"}']
)
def test_lines_that_are_no_events_are_errors(line):
    with pytest.raises(EventError):
        Event.parse(line)


def test_event_fields_are_checked_as_they_are_read():
    event = Event.parse('{"t": 1, "peer": "p", "event": "e", "n": 3, "f": 0.5, "s": "x", "l": ["a"], "none": null}')
    assert (event.t, event.peer, event.kind) == (1.0, "p", "e")
    assert (event.integer("n"), event.number("f"), event.text("s"), event.names("l")) == (3, 0.5, "x", ("a",))
    assert math.isnan(event.number("none"))
    for read, name in [(event.integer, "f"), (event.number, "s"), (event.text, "n"), (event.names, "s")]:
        with pytest.raises(EventError, match=name):
            read(name)
    with pytest.raises(EventError, match="missing"):
        event.number("missing")


def test_a_tail_gives_whole_lines_only(tmp_path):
    path = tmp_path / "events"
    tail = LineTail(path)
    assert tail.read() == []
    with path.open("w") as file:
        for written, lines in [("one\ntw", ["one"]), ("", []), ("o\nthree\n", ["two", "three"]), ("torn", [])]:
            file.write(written)
            file.flush()
            assert tail.read() == lines

"""Who is silent for longer than the line explains, and who is only slow, or was stopped."""

import pytest

from protocol.coordinator import RoundTimes
from protocol.silence import FACTOR, LEAST, PERIOD, SAMPLE, Silence

TIMES = RoundTimes(stall=10.0, quiet=3.0)
LINES = {1: 10**6, 2: 10**6}


def watched(pace: float = 0.0, sources=(1,), *, gap: int = 0, bytes_each_second: int = 0, seconds: int = 0):
    """A silence that has been looked at regularly while so much came, and the time and the counts by now."""
    silence = Silence(TIMES, dict.fromkeys(sources, 10**6), pace=pace, gap=gap, now=0.0)
    now, counts = 0.0, dict.fromkeys(sources, 0)
    for source in sources:
        silence.begun(source)
    while now < seconds:
        now += PERIOD
        counts = {source: int(bytes_each_second * now) for source in sources}
        assert silence.look(counts, LINES, now) == []
    return silence, now, counts


def found(silence: Silence, now: float, counts) -> float:
    """When the first one is overdue, if nothing more comes."""
    began = now
    while not silence.look(counts, LINES, now):
        now += PERIOD
    return now - began


@pytest.mark.parametrize(
    ("pace", "rate", "limit"),
    [
        (0, 0, 10.0),  # nothing is known
        (10_000_000, 0, 3.0),  # all went quickly the last time
        (10_000, 0, 10.0),  # slowly
        (0, 10_000_000, 3.0),  # what has come was quick
        (10_000_000, 100_000, FACTOR * SAMPLE / 100_000),  # and counts more than the last time
        (10_000_000, 1000, 3.0),  # but too little has come to tell
        (10_000_000, 20_000, 10.0),
    ],
)
def test_what_has_come_says_how_long_silence_may_last(pace, rate, limit):
    history = watched(pace, bytes_each_second=rate, seconds=4 if rate else 0)
    assert found(*history) == pytest.approx(limit, abs=2 * PERIOD)


def test_who_has_not_opened_its_stream_may_still_be_connecting():
    silence = Silence(TIMES, {1: 10**6}, pace=1e9, now=0.0)
    assert found(silence, 0.0, {1: 0}) == pytest.approx(10.0, abs=2 * PERIOD)


def test_a_single_byte_ends_silence():
    silence, now, counts = watched(bytes_each_second=10_000_000, seconds=1)
    for _ in range(100):
        now += 2.9
        silence.due = now
        counts[1] += 1
        assert silence.look(counts, LINES, now) == []


def test_as_long_as_the_line_brings_something_silence_may_be_longer():
    """Of several streams that share it, each has to wait until whole records of the others have come."""
    silence, now, counts = watched(bytes_each_second=10_000_000, seconds=1, sources=(1, 2))
    began, line = now, 10**6
    while not silence.look(counts, dict.fromkeys(counts, line), now):
        now, line = now + PERIOD, line + int(TIMES.slowest * PERIOD)
    assert now - began == pytest.approx(TIMES.stall + 2 * SAMPLE / TIMES.slowest, abs=2 * PERIOD)


def test_while_this_process_is_stopped_nobody_is_silent():
    silence, now, counts = watched(bytes_each_second=10_000_000, seconds=1)
    assert silence.look(counts, LINES, now + 3600) == []
    assert silence.last(now + 3600) == pytest.approx(2 * PERIOD)
    assert found(silence, now + 3600, counts) == pytest.approx(3.0, abs=2 * PERIOD)


def test_who_waits_itself_is_excused_for_a_while():
    silence, now, counts = watched(bytes_each_second=10_000_000, seconds=1, sources=(1, 2))
    now += found(silence, now, counts)
    silence.excuse(1, now)
    assert silence.look(counts, LINES, now) == [2]
    assert silence.last(now) == 0
    silence.over(2)
    assert found(silence, now, counts) == pytest.approx(3.0, abs=2 * PERIOD)


def test_the_longest_silent_is_named_first():
    silence, now, counts = watched(bytes_each_second=10_000_000, seconds=1, sources=(1, 2))
    now += PERIOD
    counts[1] += 1
    silence.look(counts, LINES, now)
    for _ in range(int(4 / PERIOD)):
        now += PERIOD
        overdue = silence.look(counts, LINES, now)
    assert overdue == [2, 1]


def test_what_the_line_has_brought_counts_for_a_moment_only():
    silence, now, counts = watched(bytes_each_second=10_000_000, seconds=1)
    assert silence.look(counts, {1: 10**6 + 100 * LEAST}, now + PERIOD) == []
    began = now
    while not silence.look(counts, {1: 10**6 + 100 * LEAST}, now):
        now += PERIOD
    assert now - began == pytest.approx(TIMES.quiet, abs=3 * PERIOD)


@pytest.mark.parametrize("gap", [0, 10 * 65536])
def test_who_always_says_that_it_waits_is_not_believed_for_ever(gap):
    silence, now, counts = watched(bytes_each_second=10_000_000, seconds=1, sources=(1, 2), gap=gap)
    began = now
    while silence.believe(1, now):
        now += found(silence, now, counts)
        silence.believe(2, now)
    assert now - began == pytest.approx(silence.longest + gap / TIMES.slowest, abs=TIMES.quiet + PERIOD)
    counts[1] += 1
    silence.look(counts, LINES, now)
    assert silence.believe(1, now)


def test_who_can_send_nothing_because_of_us_is_not_to_blame():
    silence, now, counts = watched(bytes_each_second=10_000_000, seconds=1)
    for _ in range(100):
        now += found(silence, now, counts)
        silence.excuse(1, now)
    assert silence.believe(1, now)


def test_a_trickle_over_the_line_is_no_movement():
    """Heartbeats add up to `LEAST` bytes in the long run."""
    silence, now, counts = watched(bytes_each_second=10_000_000, seconds=1)
    began, line = now, 10**6
    while not silence.look(counts, {1: line}, now):
        now, line = now + PERIOD, line + LEAST // 16
    assert now - began < 2 * TIMES.quiet

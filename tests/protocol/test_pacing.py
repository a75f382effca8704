"""Pacing against a simulated bottleneck: a fluid queue with a base round-trip time."""

import math
import random
import statistics

import pytest

from protocol.pacing import LARGEST_BURST, SLOWEST, SMALLEST_BURST, Pacer, Senders, next_size
from protocol.transport import LineState

STEP = 0.001
LINK = 12.5e6  # bytes per second: 100 Mbit/s
RTT = 0.05
DEEP = 0.2  # seconds that the link's queue holds


class Line:
    """A sender with data at all times, and a kernel that sends as fast as the pacer and a growing window let it.

    A busy one does not get its turn again and again, for 50 to 500 ms, and then the kernel has what waits unsent. Nor
    does a receiver that is busy in the same way; then, acknowledgements are up to 40 ms late.
    """

    def __init__(self, *, link=LINK, rtt=RTT, jitter=0.0, foreign=0.0, seed=1, busy=0.0, tells=True):
        self.link = link
        self.foreign = foreign  # seconds of queue that are not ours
        self.busy = busy  # turns that are missed, each second, by either side
        self.turns = 0.0  # seconds in which the sender had its turn
        self.pacer = Pacer()
        self.now = 100.0
        self.arrived = 0.0
        self.queues = []  # seconds, over time
        self._rtt = rtt
        self._jitter = jitter
        self._random = random.Random(seed)
        self._queue = 0.0  # bytes
        self._startup = 1e6
        self._unsent = math.inf
        self._absent = self._deaf = 0.0  # until when the sender, and the receiver, miss their turn
        self._acks = []  # (when, bytes arrived by then, round trip, when sent, …); see `_sample`
        self._acked_sent = self.now  # when what was acknowledged last had been sent
        self._acked = 0.0
        self._acked_at = self.now
        self._dry_until = -1.0  # the bytes that had been sent when the sender last ran dry
        self._rate, self._limited = None, False
        self._tells = tells
        self._smoothed = rtt

    def run(self, seconds):
        end = self.now + seconds
        begin = self.arrived
        self.queues = []
        while self.now < end:
            self.now += STEP
            self._startup *= 2 ** (STEP / self._rtt) if self._startup < 1e10 else 1
            present = self.now >= self._absent
            if present:
                self._unsent = self.pacer.unsent if self.busy else math.inf
                self.turns += STEP
                self._absent = self._missed_turn()
            if self.now >= self._deaf:
                self._deaf = self._missed_turn()
            allowed = min(self.pacer.rate, self._startup) * STEP
            offered = min(allowed, self._unsent)
            if self._unsent < allowed:
                self._dry_until = self.arrived + self._queue + offered
            self._unsent -= offered
            self._queue = min(self._queue + offered, self.link * DEEP)
            leaving = min(self._queue, self.link * STEP)
            self._queue -= leaving
            self.arrived += leaving
            waiting = self._queue / self.link
            self.queues.append(waiting)
            trip = self._rtt + waiting + self.foreign + abs(self._random.gauss(0, self._jitter))
            if self.now < self._deaf:
                trip += min(self._deaf - self.now, 0.04 * self._random.random())
            dry = self._acked < self._dry_until
            start = self.now - waiting, self._acked, self._acked_at, self._acked_sent, dry
            self._acks.append((self.now + trip - waiting, self.arrived, trip, *start))
            while self._acks and self._acks[0][0] <= self.now:
                _, self._acked, trip, *start = self._acks.pop(0)
                self._acked_at, self._acked_sent = self.now, start[0]
                self._smoothed += (trip - self._smoothed) / 8
                self._sample(*start)
            if not present:
                continue
            if self.pacer.due(self.now):
                rate = self._rate if self._tells else None
                state = LineState(self._smoothed, int(self._acked), rate=rate, limited=self._limited and self._tells)
                self.pacer.update(self.now, state)
        return (self.arrived - begin) / seconds / self.link

    def _missed_turn(self):
        if self._random.random() >= self.busy * STEP:
            return 0.0
        return self.now + self._random.uniform(0.05, 0.5)

    def _sample(self, sent, acked, acked_at, acked_sent, dry):
        """As Linux does: a round trip that was not dry counts, and another one if more arrived than in that."""
        seconds = max(self.now - acked_at, sent - acked_sent)
        if seconds < self._rtt / 2:
            return
        rate = (self._acked - acked) / seconds
        if not dry or self._rate is None or rate > self._rate:
            self._rate, self._limited = rate, dry


def test_without_a_queue_there_is_no_limit():
    line = Line(link=1e12, rtt=0.0002)
    line.run(1.0)
    assert line.pacer.rate == math.inf
    assert SMALLEST_BURST <= line.pacer.burst <= LARGEST_BURST


@pytest.mark.parametrize("link", [2.5e5, 2.5e6, 12.5e6, 125e6])
@pytest.mark.parametrize("rtt", [0.01, 0.05, 0.2])
def test_the_link_is_used_and_hardly_anything_queues(link, rtt):
    line = Line(link=link, rtt=rtt)
    line.run(5 + 100 * rtt)
    assert line.run(5 + 100 * rtt) > 0.9
    assert statistics.median(line.queues) < 0.008
    assert max(line.queues) < 0.02 + 0.25 * rtt


def test_what_waits_unsent_lasts_milliseconds():
    line = Line()
    line.run(5.0)
    assert line.pacer.burst < 0.006 * LINK
    assert line.pacer.unsent < 0.012 * LINK


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rtt", [0.01, 0.05, 0.2])
def test_a_busy_machine_is_not_mistaken_for_a_slow_line(rtt, seed):
    line = Line(rtt=rtt, seed=seed, busy=1.0)
    line.run(5.0)
    line.turns = 0.0
    used = line.run(40.0)
    assert used > 0.7 * line.turns / 40.0
    line.busy = 0.0
    line.run(2.0 + 20 * rtt)
    assert line.run(5.0) > 0.85
    assert statistics.median(line.queues) < 0.01


def test_on_a_busy_machine_more_waits_unsent_until_it_is_idle_again():
    line = Line(busy=2.0)
    line.run(10.0)
    assert line.pacer.unsent > 0.012 * LINK
    line.busy = 1e-9
    line.run(10.0)
    assert line.pacer.unsent < 0.012 * LINK


@pytest.mark.parametrize("tells", [True, False])
def test_after_a_collapse_the_rate_is_back_within_seconds(tells):
    line = Line(tells=tells)
    line.run(5.0)
    line.link = LINK / 20
    line.run(5.0)
    assert line.pacer.rate < LINK / 15
    line.link = LINK
    line.run(2.5)
    assert line.run(2.0) > 0.85


@pytest.mark.parametrize("jitter", [0.005, 0.02])
def test_a_jittery_path_is_not_mistaken_for_a_full_one(jitter):
    line = Line(jitter=jitter)
    line.run(10.0)
    assert line.run(20.0) > 0.85


def test_a_link_that_becomes_slower_is_followed_at_once():
    line = Line()
    line.run(10.0)
    line.link = LINK / 4
    line.run(2.0)
    assert line.run(5.0) > 0.9
    assert statistics.median(line.queues) < 0.02


def test_a_link_that_becomes_faster_is_found():
    line = Line(link=LINK / 4)
    line.run(10.0)
    line.link = LINK
    line.run(5.0)
    assert line.run(5.0) > 0.9


def test_a_queue_of_others_does_not_starve_us():
    line = Line()
    line.run(5.0)
    line.foreign = 0.1
    line.run(5.0)
    assert line.run(10.0) > 0.8
    line.foreign = 0.0  # and what is normal is learned again
    line.run(5.0)
    assert line.run(10.0) > 0.9
    assert statistics.median(line.queues) < 0.01


def test_pauses_say_nothing_about_the_link():
    line = Line()
    line.run(5.0)
    rate = line.pacer.rate
    for number in range(100):
        line.pacer.pause()
        line.now += 1.0
        line.pacer.update(line.now, LineState(0.3, int(line.arrived) + number))
    assert line.pacer.rate == rate


@pytest.mark.parametrize("seed", range(20))
def test_a_trickle_on_a_busy_machine_does_not_bring_the_connection_to_a_halt(seed):
    """Between two small bursts nothing arrives, and a late wake-up looks like a queue: the link still has a rate."""
    chance = random.Random(seed)
    pacer = Pacer()
    for step in range(3000):
        late = 0.03 if chance.random() < 0.05 else 0.0
        burst = step // 27  # 16 KiB each 0.27 s
        pacer.update(step / 100, LineState(0.0002 + late + chance.random() / 1000, burst << 14))
        assert pacer.rate >= SLOWEST


def test_a_moment_of_losses_is_not_the_rate_of_the_link():
    """The kernel repairs what a full queue has dropped: meanwhile hardly anything arrives, and the queue seems long."""
    line = Line()
    line.run(1.0)
    line.foreign, line.link = 0.08, LINK / 100
    line.run(0.15)
    line.foreign, line.link = 0.0, LINK
    line.run(1.5)
    assert line.run(2.0) > 0.85


def test_while_nothing_is_known_no_more_than_a_multiple_of_what_arrived_is_sent():
    pacer = Pacer()
    assert pacer.limit == math.inf
    for number in range(1, 5):
        pacer.update(100 + number, LineState(RTT, int(number * 2e6), rate=2e6, limited=True))
    assert pacer.rate == math.inf
    assert 2e6 < pacer.limit < 10e6


def test_of_several_that_share_a_line_none_decides():
    line, senders = Line(), Senders()
    line.run(5.0)
    rate = line.pacer.rate
    one, other = Pacer(), Pacer()
    assert senders.alone(one, 0.0)
    assert not senders.alone(other, 0.1)
    assert senders.alone(other, 5.0)
    path = LineState(10 * RTT, int(line.arrived), rate=LINK, limited=False)
    for number in range(1, 20):
        line.pacer.update(line.now + number, path, alone=False)
    assert line.pacer.rate == rate
    assert line.pacer.limit > LINK


def test_what_was_carried_is_less_than_late_acknowledgements_say():
    pacer = Pacer()
    pacer.update(100.0, LineState(RTT, 0, rate=1e6))
    pacer.update(100.1, LineState(RTT, int(1e6), rate=1e6))  # ten times as much as the kernel says
    assert pacer.carried == 1e6


def test_only_a_write_of_some_size_says_that_larger_ones_are_quick():
    bounds = {"smallest": 1 << 14, "largest": 1 << 17}
    assert next_size(1 << 14, 100, 0.0, **bounds) == 1 << 14
    assert next_size(1 << 14, 1 << 13, 0.0, **bounds) == 1 << 15
    assert next_size(1 << 17, 1 << 17, 0.0, **bounds) == 1 << 17
    assert next_size(1 << 16, 100, 1.0, **bounds) == 1 << 15
    assert next_size(1 << 14, 1 << 14, 1.0, **bounds) == 1 << 14
    assert next_size(1 << 16, 1 << 16, 0.03, **bounds) == 1 << 16

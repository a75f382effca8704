from __future__ import annotations

import math

import pytest

from protocol.lane_policy import IDLE, LONG, MAX_LANES, LanePolicy, Traffic

TICK = 0.25


class Way:
    """Bulk data over a way on which each connection has a rate, up to that of the way."""

    def __init__(self, *, rtt=0.1, each=1e6, all_together=1e9, lossy=True, tells=True, allowed=math.inf):
        self.policy = LanePolicy()
        self.now = 100.0
        self.rtt, self.each, self.all_together = rtt, each, all_together
        self.lossy, self.tells, self.allowed = lossy, tells, allowed
        self.most = 0

    def run(self, seconds, *, busy=True):
        for _ in range(round(seconds / TICK)):
            self.now += TICK
            lanes = self.policy.wanted
            moved = round(min(max(1, lanes) * self.each, self.all_together) * TICK) if busy else 0
            sent = moved // 1400 if self.tells else None
            resent = moved // 140_000 if self.lossy and self.tells else 0
            traffic = Traffic(moved, busy, self.allowed, sent, resent)
            self.policy.update(self.now, self.rtt, lanes, traffic)
            self.most = max(self.most, self.policy.wanted)
        return self.policy.wanted


def test_a_short_way_needs_no_lanes():
    assert Way(rtt=0.9 * LONG).run(60) == 0


def test_bulk_data_on_a_long_way_gets_a_lane_at_once():
    assert Way(rtt=LONG).run(TICK) == 1


def test_a_trickle_needs_no_lane():
    assert Way(each=36_000).run(60) == 0


def test_where_nothing_is_lost_one_lane_is_enough():
    way = Way(lossy=False)
    way.run(60)
    assert way.most == 1


@pytest.mark.parametrize("tells", [True, False])
def test_lanes_are_added_while_they_help(tells):
    way = Way(tells=tells)
    assert way.run(20) == MAX_LANES
    assert way.run(60) == MAX_LANES


def test_lanes_that_bring_nothing_are_given_up():
    way = Way(all_together=2e6)
    assert way.run(20) == 2
    assert way.most == 4
    way.most = 0
    assert way.run(30) == way.most == 2  # not tried again soon
    way.run(60)
    assert way.most == 4


def test_more_lanes_are_of_no_use_while_we_hold_back_ourselves():
    way = Way(each=1e6, allowed=1.1e6)
    way.run(60)
    assert way.most == 1


def test_idle_lanes_are_given_up():
    way = Way()
    way.run(20)
    assert way.run(IDLE - 1, busy=False) == MAX_LANES
    assert way.policy.active
    assert way.run(2, busy=False) == 0
    assert not way.policy.active
    assert way.run(TICK) == 1


def test_a_limit_of_none():
    policy = LanePolicy(0)
    assert policy.update(1.0, 1.0, 0, Traffic(10, True, math.inf, None, 0)) == 0

"""What byte counts say about lines."""

from __future__ import annotations

import pytest

from protocol.identity import PeerId
from protocol.plan import NO_BALLOT
from protocol.rates import MAX_PARTNERS, PERIOD, Count, RateMeter
from protocol.round_messages import Ready
from protocol.wire import decode, encode

A, B, C = (PeerId(bytes([number]) * 32) for number in (1, 2, 3))


class Wire:
    """Connections whose counts are moved by hand."""

    def __init__(self) -> None:
        self.meter, self.now = RateMeter(), 50.0
        self.counts = {peer: Count(0, 0, 0.05, False) for peer in (A, B, C)}

    def carry(self, seconds, sent=None, received=None, relayed=()):
        """So many bytes per second to and from peers, for a while."""
        for _ in range(round(seconds / PERIOD)):
            self.now += PERIOD
            for peer, count in self.counts.items():
                out, back = ((rates or {}).get(peer, 0) * PERIOD for rates in (sent, received))
                self.counts[peer] = Count(count.sent + int(out), count.received + int(back), count.rtt, peer in relayed)
            self.meter.look(self.now, self.counts)

    def rates(self):
        return self.meter.rates(self.counts, self.counts)

    def towards(self, peer):
        (partner,) = (partner for partner in self.rates().partners if partner.peer == peer)
        return partner


@pytest.fixture
def wire():
    return Wire()


def test_nothing_is_known_before_anything_was_moved(wire):
    wire.carry(3)
    wire.meter.conclude()
    rates = wire.rates()
    assert (rates.up, rates.down) == (0, 0)
    assert [(one.sent, one.received, one.rtt, one.relayed) for one in rates.partners] == [(0, 0, 50_000, False)] * 3


def test_what_a_line_carries_to_one_peer_is_what_both_can_do(wire):
    wire.carry(3, sent={A: 1e6}, received={B: 2e6})
    wire.meter.conclude()
    rates = wire.rates()
    assert (rates.up, rates.down) == (pytest.approx(1e6), pytest.approx(2e6))
    assert wire.towards(A).sent == pytest.approx(1e6)
    assert wire.towards(B).received == pytest.approx(2e6)
    assert wire.towards(A).received == wire.towards(B).sent == 0


def test_a_share_of_the_line_says_nothing_about_the_way_to_one_peer(wire):
    wire.carry(3, sent={A: 1e6, B: 1e6, C: 1e6})
    wire.meter.conclude()
    assert wire.rates().up == pytest.approx(3e6)
    assert wire.towards(A).sent == 0


def test_pauses_do_not_count_and_neither_does_a_full_buffer(wire):
    wire.carry(5, sent={A: 1e6})
    wire.carry(3)
    wire.carry(PERIOD, sent={A: 9e6})
    wire.carry(3)
    wire.meter.conclude()
    assert wire.rates().up == pytest.approx(1e6)


def test_a_slow_line_is_not_as_fast_as_what_is_handed_over_at_a_time(wire):
    for _ in range(40):  # 80 kB/s, in pieces of 16 kB
        wire.carry(PERIOD, sent={A: 160e3})
        wire.carry(PERIOD)
    wire.meter.conclude()
    assert wire.rates().up == pytest.approx(80e3, rel=0.15)


def test_a_few_bytes_say_nothing(wire):
    wire.carry(1, sent={A: 1e5})
    wire.meter.conclude()
    assert wire.rates().up == 0


def test_what_is_over_in_a_moment_measures_nothing(wire):
    wire.carry(1.5, sent={A: 9e6})  # into buffers, perhaps
    wire.meter.conclude()
    assert wire.rates().up == 0


def test_a_line_that_gets_worse_is_believed_little_by_little_and_a_better_one_at_once(wire):
    for rate, known in ((4e6, 4e6), (2e6, 3.5e6), (2e6, 3.125e6), (8e6, 8e6)):
        wire.carry(5, sent={A: rate})
        wire.meter.conclude()
        assert wire.rates().up == pytest.approx(known)
        assert wire.towards(A).sent == pytest.approx(known)


def test_what_tells_only_what_a_line_can_do_at_least_makes_no_figure_worse(wire):
    wire.carry(5, sent={A: 4e6})
    wire.meter.conclude()
    for rate, known in ((1e6, 4e6), (8e6, 8e6)):
        wire.carry(5, sent={A: rate})
        wire.meter.conclude(raise_only=True)
        assert wire.rates().up == pytest.approx(known)
        assert wire.towards(A).sent == pytest.approx(known)


def test_what_was_measured_long_ago_of_one_peer_is_forgotten(wire):
    wire.carry(5, sent={A: 1e6})
    wire.meter.conclude()
    for _ in range(20):
        wire.carry(5, sent={B: 1e6})
        wire.meter.conclude()
    assert wire.towards(A).sent == 0
    assert wire.rates().up == pytest.approx(1e6)


def test_what_goes_through_a_relay_is_not_counted_twice(wire):
    wire.carry(5, sent={A: 1e6, B: 1e6}, relayed={A})
    wire.meter.conclude()
    assert wire.rates().up == pytest.approx(1e6)
    assert wire.towards(A).relayed


def test_another_connection_to_the_same_peer_counts_from_its_beginning(wire):
    wire.carry(5, sent={A: 1e6})
    wire.counts[A] = Count(0, 0, 0.05, False)
    wire.carry(5, sent={A: 1e6})
    wire.meter.conclude()
    assert wire.rates().up == pytest.approx(1e6)


def test_a_report_is_bounded_and_fits_its_message():
    peers = [PeerId(bytes([number]) * 32) for number in range(100)]
    counts = {peer: Count(0, 0, 1e9, True) for peer in peers}
    rates = RateMeter().rates(counts, peers)
    assert len(rates.partners) == MAX_PARTNERS
    ready = Ready(bytes(32), "", 1, bytes(32), 1.0, 4, NO_BALLOT, (), rates=rates)
    assert decode(encode(ready), [Ready]) == ready

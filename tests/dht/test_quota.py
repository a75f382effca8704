from __future__ import annotations

from dht.quota import Quota
from protocol.identity import PeerId

ALICE, BOB, CAROL = (PeerId(bytes([n]) * 32) for n in range(3))


def allowed(quota: Quota, peer: PeerId, now: float, tries: int = 100) -> int:
    return sum(quota.allow(peer, now) for _ in range(tries))


def test_a_burst_and_then_a_rate():
    quota = Quota(rate=2.0, burst=5)
    assert allowed(quota, ALICE, 10.0) == 5
    assert allowed(quota, ALICE, 11.5) == 3
    assert allowed(quota, ALICE, 1000.0) == 5


def test_peers_do_not_share():
    quota = Quota(rate=2.0, burst=5)
    assert allowed(quota, ALICE, 0.0) == 5
    assert allowed(quota, BOB, 0.0) == 5


def test_memory_is_bounded():
    quota = Quota(rate=1.0, burst=1, peers=2)
    for peer in (ALICE, BOB, CAROL):
        assert quota.allow(peer, 0.0)
    assert len(quota._buckets) == 2
    assert not quota.allow(CAROL, 0.0)

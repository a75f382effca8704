from __future__ import annotations

import pytest

from protocol.rate import Quota, TokenBucket


@pytest.mark.parametrize("rate", [3e4, 1e6])
def test_those_who_wait_take_turns_whoever_looks_first(rate):
    """Else whoever happens to be woken first could take all, again and again."""
    bucket, now = TokenBucket(rate), 0.0
    bucket.spend(200_000, now)
    served = dict.fromkeys("abcde", 0)
    for _ in range(1000):
        now += 0.01
        for who in served:  # always in the same order
            if not bucket.delay(now, who):
                bucket.spend(max(1, bucket.level(now)), now, who)
                served[who] += 1
    bucket.leave("e")
    assert min(served.values()) >= max(1, max(served.values()) - 1)


def test_a_rate_is_kept_over_time():
    bucket = TokenBucket(1e6)
    now = sent = 0.0
    while sent < 1e7:
        now += bucket.delay(now)
        bucket.spend(50_000, now)
        sent += 50_000
    assert now == pytest.approx(10, abs=0.2)


def test_unused_budget_does_not_pile_up():
    bucket = TokenBucket(1e6)
    assert bucket.level(0) == 100_000
    assert bucket.level(1000) == 100_000
    bucket.spend(300_000, 1000)
    assert bucket.level(1000) == -200_000
    assert bucket.delay(1000) == pytest.approx(0.208192)
    assert bucket.delay(1001) == 0


def test_low_rates_still_make_progress():
    bucket = TokenBucket(10)
    bucket.spend(20_000, 0)
    delay = bucket.delay(0)
    assert bucket.delay(delay + 0.001) == 0


def test_a_rate_of_nothing_is_refused():
    with pytest.raises(ValueError, match="above zero"):
        TokenBucket(0)


def allowed(quota: Quota[str], who: str, now: float, tries: int = 100) -> int:
    return sum(quota.allow(who, now) for _ in range(tries))


def test_a_quota_is_a_burst_and_then_a_rate():
    quota: Quota[str] = Quota(rate=2.0, burst=5)
    assert allowed(quota, "alice", 10.0) == 5
    assert allowed(quota, "bob", 10.0) == 5
    assert allowed(quota, "alice", 11.5) == 3
    assert allowed(quota, "alice", 1000.0) == 5


def test_a_quota_can_be_in_debt_by_one_burst():
    quota: Quota[str] = Quota(rate=1.0, burst=5)
    quota.charge("alice", 3, 0.0)
    assert allowed(quota, "alice", 0.0) == 2
    for _ in range(10):
        quota.charge("alice", 3, 0.0)
    assert allowed(quota, "alice", 5.5) == 0
    assert allowed(quota, "alice", 6.0) == 1
    assert allowed(quota, "bob", 0.0) == 5


def test_a_quota_remembers_so_many():
    quota: Quota[str] = Quota(rate=1.0, burst=1, remembered=2)
    for who in ("alice", "bob", "carol"):
        assert quota.allow(who, 0.0)
    assert len(quota._allowances) == 2
    assert not quota.allow("carol", 0.0)


@pytest.mark.parametrize("rate", [1 << 20, 1 << 19, 123_456.7])
def test_however_many_have_given_up_waiting_a_full_bucket_serves(rate):
    bucket, now = TokenBucket(rate), 0.0
    bucket.spend(1 << 20, now)
    for who in range(40):
        bucket.delay(now, who)  # and never comes back
    now += 60.0
    assert bucket.delay(now, "the last") == 0

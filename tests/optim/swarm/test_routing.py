"""Servers get work in proportion to what they can do."""

from collections import Counter
from random import Random

import pytest

from optim.swarm.routing import FIRST_PAUSE, LONGEST_PAUSE, Router
from tests.optim.swarm.toys import peer_id

A, B, C = map(peer_id, "abc")


@pytest.fixture
def router():
    router = Router(Random(0))
    for peer, rate in ((A, 1.0), (B, 2.0), (C, 5.0)):
        router.add(peer, rate)
    return router


def test_work_is_shared_in_proportion_to_rates(router):
    counts = Counter(router.choose(1.0, 0.0) for _ in range(800))
    assert all(abs(counts[peer] - share) <= 2 for peer, share in ((A, 100), (B, 200), (C, 500)))


def test_it_is_interleaved(router):
    for _ in range(20):
        counts = Counter(router.choose(1.0, 0.0) for _ in range(8))
        assert counts[C] in (4, 5, 6)


def test_larger_work_counts_for_more(router):
    for _ in range(50):
        router.choose(4.0, 0.0)
    counts = Counter(router.choose(1.0, 0.0) for _ in range(400))
    assert abs(counts[C] - 250) <= 5


def test_equal_ones_are_chosen_in_random_order():
    firsts = set()
    for seed in range(20):
        router = Router(Random(seed))
        for peer in (A, B, C):
            router.add(peer)
        firsts.add(router.choose(1.0, 0.0))
    assert firsts == {A, B, C}


def test_a_newcomer_is_tried_soon_and_takes_no_more_than_its_share(router):
    for _ in range(100):
        router.choose(1.0, 0.0)
    new = peer_id("new")
    router.add(new)
    counts = Counter(router.choose(1.0, 0.0) for _ in range(32))
    assert 1 <= counts[new] <= 10


def test_rates_follow_what_is_measured(router):
    for _ in range(50):
        router.succeeded(A, 10.0, 1.0)
    assert router.rate(A) == pytest.approx(10.0, rel=0.01)


def test_who_has_failed_gets_nothing_for_a_time_that_grows(router):
    router.failed(C, 0.0)
    assert C not in {router.choose(1.0, FIRST_PAUSE - 0.1) for _ in range(50)}
    assert C in {router.choose(1.0, FIRST_PAUSE) for _ in range(50)}
    for _ in range(20):
        router.failed(C, 0.0)
    assert C not in {router.choose(1.0, LONGEST_PAUSE - 1) for _ in range(50)}
    router.succeeded(C, 1.0, 1.0)
    router.failed(C, 200.0)
    assert C in {router.choose(1.0, 200.0 + FIRST_PAUSE) for _ in range(50)}


def test_who_has_failed_is_better_than_nobody(router):
    for peer in (A, B, C):
        router.failed(peer, 0.0)
    assert router.choose(1.0, 0.0) in (A, B, C)


def test_excluded_ones_and_those_who_are_gone_are_not_chosen(router):
    router.remove(B)
    assert {router.choose(1.0, 0.0, [C]) for _ in range(20)} == {A}
    assert router.choose(1.0, 0.0, [A, C]) is None
    assert Router(Random(0)).choose(1.0, 0.0) is None

"""Whose sums count, and what an audit finds."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optim.swarm.ledger import Settled, audit, settle
from tests.optim.swarm.toys import peer_id

A, B, C = sorted(map(peer_id, "abc"))


def ledger(*numbers):
    return dict.fromkeys(numbers, 4)


def test_disjoint_ledgers_all_count():
    settlement = settle({A: ledger(0, 2), B: ledger(1), C: {}}, 3)
    assert settlement.ledgers == {A: ledger(0, 2), B: ledger(1)}
    assert not settlement.missing
    assert settlement.samples == 12


def test_of_two_that_overlap_the_longer_counts_and_the_rest_is_missing():
    settlement = settle({A: ledger(0, 1), B: ledger(1, 2, 3), C: ledger(4)}, 5)
    assert set(settlement.ledgers) == {B, C}
    assert settlement.missing == {0}


def test_of_equal_ones_the_first_by_name_counts():
    assert set(settle({B: ledger(0), A: ledger(0)}, 1).ledgers) == {A}


def test_what_the_step_does_not_have_spoils_a_ledger():
    assert settle({A: ledger(0, 7), B: ledger(1)}, 2).missing == {0}


def test_who_dies_in_the_reduction_is_missing_with_all_that_it_has_counted():
    assert settle({A: ledger(0, 2), B: ledger(1)}, 3).among([B]).missing == {0, 2}


@given(st.dictionaries(st.sampled_from([A, B, C]), st.dictionaries(st.integers(0, 6), st.integers(0, 3))))
def test_no_number_counts_twice_and_none_is_forgotten(ledgers):
    settlement = settle(ledgers, 6)
    counted = [number for each in settlement.ledgers.values() for number in each]
    assert sorted([*counted, *settlement.missing]) == list(range(6))
    assert settle(dict(reversed(ledgers.items())), 6).ledgers == settlement.ledgers


RECORD = Settled(stage=0, step=0, ledgers={A: ledger(0, 2), B: ledger(1)})


def found(*records):
    return audit(records, stages=1, steps=range(1), samples={0: 4, 1: 4, 2: 4})


def test_an_audit_of_what_is_right_finds_nothing():
    assert found(RECORD, RECORD) == []
    assert found(attrs.evolve(RECORD, ledgers={A: {0: 4, 1: 0, 2: 4}})) == []


@pytest.mark.parametrize(
    ("ledgers", "fault"),
    [
        ({A: ledger(0, 1, 2), B: ledger(1)}, "microbatch 1 counted 2 times"),
        ({A: ledger(0, 1)}, "microbatch 2 is missing"),
        ({A: ledger(0, 1, 2, 3)}, "microbatch 3 does not exist"),
        ({A: {0: 4, 1: 3, 2: 4}}, "3 of 4 samples of microbatch 1"),
    ],
)
def test_an_audit_finds_what_is_wrong(ledgers, fault):
    (sentence,) = found(attrs.evolve(RECORD, ledgers=ledgers))
    assert sentence == f"stage 0, step 0: {fault}"


def test_an_audit_misses_steps_and_contradictions():
    assert found() == ["stage 0 has not settled step 0"]
    assert found(RECORD, attrs.evolve(RECORD, ledgers={A: ledger(0, 1, 2)})) == [
        "stage 0 has settled step 0 in two ways"
    ]

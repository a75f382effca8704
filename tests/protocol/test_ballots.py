"""What a member promises, and the argument that it is enough."""

from __future__ import annotations

import itertools

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from protocol.ballots import Acceptor, Offer
from protocol.identity import PeerId
from protocol.plan import MAX_ATTEMPT, MAX_JUMP, NO_BALLOT, Ballot, Plan

PEERS = [PeerId(bytes([number]) * 32) for number in range(1, 5)]
OFFER = Offer(run=bytes(32), tag="", revision=1, base=bytes(32), weight=1.0, length=4)


def plan(attempt: int, rank: int = 0, members=PEERS, **changes) -> Plan:
    fields = {
        "run": bytes(32),
        "revision": 1,
        "attempt": attempt,
        "rank": rank,
        "coordinator": PEERS[rank],
        "members": tuple(members),
        "weights": (1.0,) * len(members),
        "length": 4,
    }
    return Plan(**{**fields, **changes})


def accept(acceptor: Acceptor, offered: Plan):
    return acceptor.accept(offered, OFFER, offered.coordinator)


GATHER = attrs.evolve(OFFER, operation="gather", max_block=5)
SIZES = {"operation": "gather", "length": 10, "sizes": (4, 4, 2, 0)}


@pytest.mark.parametrize(
    ("offer", "changes", "reason"),
    [
        (OFFER, SIZES, "another operation"),
        (OFFER, {"operation": "exchange"}, "another operation"),
        (GATHER, {}, "another operation"),
        (GATHER, {**SIZES, "sizes": (4, 3, 3, 0)}, "another size"),
        (GATHER, {**SIZES, "length": 14, "sizes": (4, 4, 6, 0)}, "beyond the limit"),
        (attrs.evolve(OFFER, operation="exchange"), {"operation": "exchange", "length": 5}, "another length"),
    ],
)
def test_a_plan_must_fit_what_the_member_brings(offer, changes, reason):
    offered = plan(1, **changes)
    refusal = Acceptor(PEERS[1]).accept(offered, offer, offered.coordinator)
    assert refusal is not None
    assert reason in refusal.reason


def test_a_gather_that_fits_is_accepted():
    assert Acceptor(PEERS[1]).accept(plan(1, **SIZES), GATHER, PEERS[0]) is None


def test_only_higher_ballots_are_accepted():
    acceptor = Acceptor(PEERS[1])
    assert accept(acceptor, plan(2)) is None
    for lower in (plan(1), plan(1, rank=3), plan(2)):
        refusal = accept(acceptor, lower)
        assert refusal is not None
        assert refusal.ballot == plan(2).ballot
    assert accept(acceptor, plan(2, rank=1)) is None
    assert acceptor.plan == plan(2, rank=1)


def test_a_plan_that_was_given_up_is_never_completed():
    acceptor = Acceptor(PEERS[1])
    accept(acceptor, plan(1))
    accept(acceptor, plan(2))
    assert not acceptor.complete(plan(1))
    acceptor.renounce(plan(2).ballot)
    assert not acceptor.complete(plan(2))
    assert accept(acceptor, plan(2)) is not None


def test_renouncing_an_earlier_plan_leaves_the_present_one():
    acceptor = Acceptor(PEERS[1])
    accept(acceptor, plan(1))
    accept(acceptor, plan(2))
    acceptor.renounce(plan(1).ballot)
    assert acceptor.complete(plan(2))


@pytest.mark.parametrize("attempt", [8 + MAX_JUMP, MAX_ATTEMPT])
def test_nobody_can_use_up_the_attempts(attempt):
    acceptor = Acceptor(PEERS[1])
    assert accept(acceptor, plan(7)) is None
    refusal = accept(acceptor, plan(attempt))
    assert refusal is not None
    assert refusal.ballot == plan(7).ballot
    acceptor.renounce(plan(attempt).ballot)
    assert not acceptor.complete(plan(7))
    assert accept(acceptor, plan(7)) is not None
    assert accept(acceptor, plan(7 + MAX_JUMP)) is None


def test_after_completion_nothing_is_accepted():
    acceptor = Acceptor(PEERS[1])
    accept(acceptor, plan(1))
    assert acceptor.complete(plan(1))
    acceptor.renounce(plan(9).ballot)
    refusal = accept(acceptor, plan(10))
    assert refusal is not None
    assert "complete" in refusal.reason
    assert not acceptor.complete(plan(1))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run": bytes([1] * 32)}, "another round"),
        ({"tag": "x"}, "another round"),
        ({"revision": 2}, "another round"),
        ({"base": bytes([1] * 32)}, "another state"),
        ({"length": 5}, "another length"),
        ({"codec": "int8"}, "another codec"),
        ({"weights": (1.0, 2.0, 1.0, 1.0)}, "another weight"),
        ({"members": (PEERS[0],), "weights": (1.0,)}, "does not include"),
    ],
)
def test_a_plan_must_fit_what_was_offered(changes, reason):
    acceptor = Acceptor(PEERS[1])
    refusal = accept(acceptor, plan(1, **changes))
    assert refusal is not None
    assert reason in refusal.reason
    assert acceptor.promised == NO_BALLOT


def test_a_plan_must_be_its_senders_own():
    refusal = Acceptor(PEERS[1]).accept(plan(1), OFFER, PEERS[2])
    assert refusal is not None
    assert "another coordinator" in refusal.reason


class Safety(RuleBasedStateMachine):
    """Rival coordinators issue any plans in any order; members accept, give up and complete as the rules allow.

    A member may complete a plan when every member of it has accepted it at some time, since only then can all the data
    have come round: the weakest assumption about the ring.
    """

    def __init__(self) -> None:
        super().__init__()
        self.members = {peer: Acceptor(peer) for peer in PEERS}
        self.accepted: dict[Ballot, set[PeerId]] = {}
        self.plans: dict[Ballot, Plan] = {}
        self.completed: dict[PeerId, Plan] = {}

    @rule(
        attempt=st.integers(1, 4),
        rank=st.integers(0, 3),
        members=st.sets(st.sampled_from(PEERS), min_size=1),
    )
    def propose(self, attempt, rank, members):
        made = plan(attempt, rank, sorted(members))
        self.plans.setdefault(made.ballot, made)

    @rule(data=st.data(), peer=st.sampled_from(PEERS))
    def receive(self, data, peer):
        if self.plans:
            made = data.draw(st.sampled_from(sorted(self.plans.values(), key=lambda one: one.ballot)))
            if accept(self.members[peer], made) is None:
                self.accepted.setdefault(made.ballot, set()).add(peer)

    @rule(peer=st.sampled_from(PEERS), attempt=st.integers(1, 4), rank=st.integers(0, 3))
    def renounce(self, peer, attempt, rank):
        self.members[peer].renounce(Ballot(attempt, rank, PEERS[rank]))

    @rule(peer=st.sampled_from(PEERS))
    def complete(self, peer):
        mine = self.members[peer].plan
        if mine is not None and self.accepted[mine.ballot] >= set(mine.members) and self.members[peer].complete(mine):
            self.completed[peer] = mine

    @invariant()
    def only_the_excluded_differ(self):
        for (one, mine), (_, theirs) in itertools.permutations(self.completed.items(), 2):
            if mine.ballot < theirs.ballot:
                assert one not in theirs.members


Safety.TestCase.settings = settings(deadline=None, max_examples=150, stateful_step_count=40)
TestSafety = Safety.TestCase

import attrs
import pytest

from protocol import signatures, weights
from protocol.identity import Identity
from protocol.plan import Plan
from protocol.signatures import Signatures
from protocol.weights import SIZE, sign_weight

RUN, BASE = b"r" * 32, b"b" * 32
ALICE, BOB, CAROL = (Identity.from_seed(bytes([number]) * 32) for number in range(1, 4))


def signature(identity, *, run=RUN, tag="", revision=3, base=BASE, weight=2.0):
    return sign_weight(identity, run, tag, revision, base, weight).signature


def check(identity, *, weight=2.0, signature, **options):
    return Signatures(ALICE, RUN, "", **options).problem(identity.peer_id, 3, BASE, weight, signature)


def plan(**changes):
    fields = {
        "run": RUN,
        "revision": 3,
        "attempt": 1,
        "rank": 0,
        "coordinator": ALICE.peer_id,
        "members": (BOB.peer_id, CAROL.peer_id, ALICE.peer_id),
        "weights": (2.0, 0.0, 1.0),
        "length": 10,
        "base": BASE,
        "signatures": (signature(BOB), signature(ALICE, weight=1.0)),
    }
    return Plan(**{**fields, **changes})


def test_a_contributor_signs_its_weight():
    assert check(BOB, signature=signature(BOB)) is None
    assert check(BOB, weight=0.0, signature=None) is None
    assert Signatures(ALICE, RUN, "").sign(3, BASE, 0.0) is None
    assert Signatures(BOB, RUN, "").sign(3, BASE, 2.0) == signature(BOB)


@pytest.mark.parametrize(
    "changes",
    [{"run": BASE}, {"tag": "x"}, {"revision": 2}, {"base": RUN}, {"weight": 1.0}],
    ids=lambda c: next(iter(c)),
)
def test_what_was_signed_for_something_else_counts_for_nothing(changes):
    assert "is wrong" in check(BOB, signature=signature(BOB, **changes))


def test_forgeries():
    forged = BOB.public_key + signature(CAROL)[32:]
    assert "is wrong" in check(BOB, signature=forged)
    assert "is wrong" in check(BOB, signature=signature(CAROL))
    assert "is wrong" in check(BOB, signature=bytes(SIZE))
    assert "has not signed" in check(BOB, signature=None)
    assert "weight of 0" in check(BOB, weight=0.0, signature=signature(BOB))


def test_those_who_are_not_admitted_do_not_contribute():
    assert "not admitted" in check(BOB, signature=signature(BOB), admits=lambda peer: peer != BOB.peer_id)


async def test_the_contributors_to_a_plan_have_signed():
    assert await Signatures(CAROL, RUN, "").problem_of(plan()) is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"signatures": ()}, "2 contributors and 0 signatures"),
        ({"signatures": (signature(BOB),)}, "2 contributors and 1 signatures"),
        ({"signatures": (signature(BOB), signature(CAROL), signature(ALICE, weight=1.0))}, "and 3 signatures"),
        ({"signatures": (signature(ALICE, weight=1.0), signature(BOB))}, "is wrong"),
        ({"weights": (2e9, 0.0, 1.0)}, "is wrong"),
        ({"weights": (2.0, 1.0, 1.0)}, "3 contributors"),
        ({"base": RUN}, "is wrong"),
        ({"revision": 4}, "is wrong"),
    ],
)
async def test_a_plan_that_its_coordinator_has_embellished(changes, problem):
    assert problem in await Signatures(CAROL, RUN, "").problem_of(plan(**changes))


async def test_more_members_than_a_round_can_have():
    assert "3 members" in await Signatures(CAROL, RUN, "", max_members=1).problem_of(plan())


async def test_a_signature_is_checked_once_for_all_attempts(monkeypatch):
    checked = []

    def verify(*arguments):
        checked.append(arguments)
        return True

    monkeypatch.setattr(weights, "verify", verify)
    ours = Signatures(ALICE, RUN, "")
    ours.sign(3, BASE, 1.0)
    assert ours.problem(BOB.peer_id, 3, BASE, 2.0, signature(BOB)) is None  # as the coordinator, when Bob is ready
    for attempt in range(1, 5):
        assert await ours.problem_of(plan(attempt=attempt)) is None
    assert len(checked) == 1


async def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(signatures, "_MAX_REMEMBERED", 4)
    ours = Signatures(ALICE, RUN, "")
    for revision in range(20):
        assert ours.problem(BOB.peer_id, revision, BASE, 2.0, signature(BOB, revision=revision)) is None
        assert len(ours._valid) <= 4


def test_the_id_of_a_plan_says_nothing_of_signatures_but_of_what_they_sign():
    assert plan().id == plan(signatures=()).id
    assert [signed.weight for signed in plan().contributions] == [2.0, 1.0]
    assert [signed.peer for signed in plan().contributions] == list(plan().contributors)
    assert attrs.evolve(plan(), weights=(2.0, 0.0, 1.5)).id != plan().id

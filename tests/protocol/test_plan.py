"""Plans: identity, shares, the order of coordinators."""

from __future__ import annotations

import hashlib
import itertools
import struct

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.identity import PeerId
from protocol.plan import NO_BALLOT, SMALL, Ballot, Part, Plan, Salvaged, Source, coordinators
from protocol.round_messages import Propose
from protocol.wire import decode, encode

RUN = bytes(range(32))


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


SOURCE = Source(bytes(range(32)), (peer(3),), (2.0,))


def plan(**changes) -> Plan:
    fields = {
        "run": RUN,
        "revision": 3,
        "attempt": 1,
        "rank": 0,
        "coordinator": peer(1),
        "members": (peer(1), peer(2)),
        "weights": (1.0, 3.0),
        "length": 10,
    }
    return Plan(**{**fields, **changes})


def test_id_is_that_of_the_documented_encoding():
    members = b"".join(bytes(31) + bytes([number]) for number in (1, 2))
    encoding = b"shoal-plan-v1" + RUN + struct.pack(">H", 0) + struct.pack(">Q", 3) + bytes(32)
    encoding += struct.pack(">QI", 1, 0) + bytes(peer(1)) + struct.pack(">I", 2) + members
    encoding += struct.pack(">dd", 1.0, 3.0) + struct.pack(">QH", 10, 4) + b"fp32"
    encoding += struct.pack(">H", 6) + b"reduce" + struct.pack(">I", 0)
    encoding += struct.pack(">H", 4) + b"ring" + struct.pack(">I", 0)
    assert plan().id == hashlib.sha256(encoding + bytes(4)).digest()
    encoding += struct.pack(">I", 1) + bytes(range(32)) + struct.pack(">I", 1) + bytes(peer(3)) + struct.pack(">d", 2.0)
    encoding += struct.pack(">QQII", 4, 9, 0, 2) + struct.pack(">II", 0, 1)
    salvaging = plan(sources=(SOURCE,), salvaged=(Salvaged(4, 9, 0, (0, 1)),))
    assert salvaging.id == hashlib.sha256(encoding).digest()


def test_id_depends_on_the_sizes_of_a_gather():
    plans = [plan(operation="gather", sizes=sizes) for sizes in ((10, 0), (0, 10), (5, 5))]
    assert len({each.id for each in plans}) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"sizes": (5, 5)},
        {"operation": "exchange", "sizes": (5, 5)},
        {"operation": "gather", "sizes": (10,)},
        {"operation": "gather", "sizes": (5, 6)},
        {"operation": "gather", "sizes": (5, 5), "weights": (1.0, 0.0)},
    ],
)
def test_impossible_sizes_are_refused(changes):
    with pytest.raises(ValueError, match="size"):
        plan(**changes)


def test_only_what_is_reduced_is_salvaged():
    with pytest.raises(ValueError, match="salvaged"):
        plan(operation="exchange", sources=(SOURCE,), salvaged=(Salvaged(4, 9, 0, (0, 1)),))


CHANGES = {
    "run": bytes(32),
    "tag": "x",
    "revision": 4,
    "base": bytes(31) + b"\1",
    "attempt": 2,
    "rank": 1,
    "coordinator": peer(2),
    "members": (peer(2), peer(1)),
    "weights": (3.0, 1.0),
    "length": 11,
    "sources": (SOURCE,),
    "operation": "exchange",
    "schedule": "direct",
    "blocks": (10, 0),
}


@pytest.mark.parametrize("field", CHANGES)
def test_id_depends_on_every_field(field):
    assert plan(**{field: CHANGES[field]}).id != plan().id


def test_every_field_is_covered_by_the_test_above():
    assert {field.name for field in attrs.fields(Plan)} == {*CHANGES, "codec", "salvaged", "sizes", "signatures"}


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": "ring", "codec": "int8"},
        {"schedule": "direct", "operation": "exchange"},
        {"schedule": "direct", "operation": "gather", "sizes": (5, 5)},
    ],
)
def test_impossible_schedules_are_refused(changes):
    with pytest.raises(ValueError, match=r"ring|owners"):
        plan(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"blocks": (10,)},
        {"blocks": (5, 4)},
        {"blocks": (5, 5, 0)},
        {"blocks": (5, 5), "operation": "exchange"},
        {"blocks": (5, 5), "codec": "int8"},
        {"blocks": (5, 5), "sources": (SOURCE,), "salvaged": (Salvaged(4, 9, 0, (0, 1)),)},
    ],
)
def test_impossible_blocks_are_refused(changes):
    with pytest.raises(ValueError, match=r"blocks? "):
        plan(**changes)


def test_blocks_are_of_what_is_reduced_and_of_any_size():
    assert plan(blocks=(0, 10)).blocks == (0, 10)
    assert plan(blocks=(1, 4), sources=(SOURCE,), salvaged=(Salvaged(4, 9, 0, (0, 1)),)).free == 5
    assert plan(blocks=(256, 44), length=300, codec="int8").schedule == "direct"
    assert plan(blocks=(0, 300), length=300, codec="int8").load == 300


def test_nobody_owns_so_much_that_it_keeps_more_than_two_vectors_of_others():
    members = tuple(peer(number) for number in range(6))
    many = {"members": members, "weights": (1.0,) * 6, "length": 100_000}
    assert plan(blocks=(50_000, 50_000, 0, 0, 0, 0), **many)
    with pytest.raises(ValueError, match="owns too much"):
        plan(blocks=(50_010, 49_990, 0, 0, 0, 0), **many)
    small = SMALL // 6
    assert plan(blocks=(small, 0, 0, 0, 0, 0), **many | {"length": small})
    with pytest.raises(ValueError, match="owns too much"):
        plan(blocks=(small + 1, 0, 0, 0, 0, 0), **many | {"length": small + 1})


def test_who_owns_much_has_more_time():
    members = tuple(peer(number) for number in range(6))
    assert plan(members=members, weights=(1.0,) * 6, length=100, blocks=(0, 50, 50, 0, 0, 0)).load == 150


def test_whose_values_most_of_the_result_has():
    def included(plan):
        return [number for number in range(1, 5) if plan.includes(peer(number))]

    assert included(plan()) == [1, 2]
    assert included(plan(weights=(0.0, 3.0))) == [2]
    assert included(plan(operation="gather", sizes=(0, 10), weights=(0.0, 1.0))) == [2]
    for stop, expected in ((4, [1, 2]), (9, [3])):
        assert included(plan(sources=(SOURCE,), salvaged=(Salvaged(0, stop, 0, (0, 1)),))) == expected


def test_id_depends_on_what_is_salvaged():
    part = Salvaged(4, 9, 0, (0, 1))
    other = attrs.evolve(SOURCE, plan=bytes(32))
    plans = [
        plan(sources=(SOURCE, other), salvaged=salvaged)
        for salvaged in [
            (),
            (part,),
            (attrs.evolve(part, start=5),),
            (attrs.evolve(part, stop=10),),
            (attrs.evolve(part, source=1),),
            (attrs.evolve(part, holders=(1,)),),
        ]
    ]
    assert len({each.id for each in plans}) == len(plans)


@pytest.mark.parametrize(
    "parts",
    [
        [Salvaged(4, 9, 1, (0,))],  # no such source
        [Salvaged(4, 9, 0, (2,))],  # no such place
        [Salvaged(4, 11, 0, (0,))],
        [Salvaged(4, 4, 0, (0,))],
        [Salvaged(4, 9, 0, (0,)), Salvaged(8, 10, 0, (0,))],
        [Salvaged(4, 9, 0, (0,)), Salvaged(1, 2, 0, (0,))],
        [Salvaged(0, 4, 0, (0,)), Salvaged(4, 10, 0, (1,))],  # nothing is left to reduce
    ],
)
def test_impossible_salvage_is_refused(parts):
    with pytest.raises(ValueError, match="salvaged"):
        plan(sources=(SOURCE,), salvaged=tuple(parts))


def test_a_source_has_one_weight_for_each_member():
    with pytest.raises(ValueError, match="one weight"):
        Source(bytes(32), (peer(1), peer(2)), (1.0,))


def test_parts_say_whose_values_the_result_is_made_of():
    one = plan(sources=(SOURCE,), salvaged=(Salvaged(0, 2, 0, (0,)), Salvaged(4, 9, 0, (0, 1))))
    rest = (one.members, one.weights)
    assert one.parts == (
        Part(0, 2, SOURCE.members, SOURCE.weights, SOURCE.plan),
        Part(2, 4, *rest),
        Part(4, 9, SOURCE.members, SOURCE.weights, SOURCE.plan),
        Part(9, 10, *rest),
    )
    assert one.heaviest == 3.0
    assert plan().parts == (Part(0, 10, *rest),)
    assert one.includes(peer(3))
    assert one.includes(peer(3), {SOURCE.plan})
    assert not one.includes(peer(3), {one.id})


@pytest.mark.parametrize(
    "changes",
    [
        {"members": (), "weights": ()},
        {"members": (peer(1), peer(1))},
        {"weights": (1.0,)},
        {"weights": (1.0, -1.0)},
        {"weights": (1.0, float("nan"))},
        {"weights": (1.0, float("inf"))},
    ],
)
def test_senseless_plans_are_refused(changes):
    with pytest.raises(ValueError, match=r"plan|weights"):
        plan(**changes)


def test_travels_in_a_message():
    assert decode(encode(Propose(plan())), [Propose]) == Propose(plan())


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e15), min_size=1, max_size=8))
def test_shares_are_fp32_and_sum_to_one(weights):
    members = tuple(peer(number) for number in range(len(weights)))
    made = plan(members=members, weights=tuple(weights))
    assert all(torch.tensor(share, dtype=torch.float32).item() == share for share in made.shares)
    if made.weight:
        assert sum(made.shares) == pytest.approx(1, abs=1e-6)
    else:
        assert set(made.shares) == {0.0}
    assert made.contributors == tuple(p for p, w in zip(members, weights, strict=True) if w > 0)


def test_alone_means_a_share_of_exactly_one():
    assert plan(members=(peer(1),), weights=(0.1,)).shares == (1.0,)


def test_ballots_are_ordered_by_attempt_then_rank_then_coordinator():
    ballots = [NO_BALLOT, Ballot(1, 0, peer(9)), Ballot(1, 1, peer(1)), Ballot(1, 1, peer(2)), Ballot(2, 0, peer(1))]
    assert all(one < two for one, two in itertools.pairwise(ballots))


@settings(deadline=None)
@given(st.sets(st.integers(0, 2**256 - 1), min_size=1, max_size=10), st.integers(1, 1000))
def test_coordinators_do_not_depend_on_the_order_of_peers(numbers, revision):
    peers = [peer(number) for number in numbers]
    order = coordinators(RUN, revision, peers)
    assert order == coordinators(RUN, revision, reversed(peers))
    assert set(order) == set(peers)
    # Peers that miss somebody agree on the order of the others.
    assert coordinators(RUN, revision, order[1:]) == order[1:]


def test_another_coordinator_in_other_rounds():
    peers = [peer(number << 248) for number in range(8)]
    assert len({coordinators(RUN, revision, peers)[0] for revision in range(1, 50)}) > 4

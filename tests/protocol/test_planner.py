"""The order of the ring, and the choice of a schedule and of blocks, by what members say about their lines."""

from __future__ import annotations

import itertools

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codecs import block_of
from protocol.identity import PeerId
from protocol.plan import SMALL, Plan, Salvaged, Source, largest_part
from protocol.planner import MARGIN, UNEQUAL, estimate, lines_of, ring_order, scheduled
from protocol.rates import Partner, Rates
from protocol.reduction import own_blocks

MEGABIT = 125_000  # bytes per second
MIB = 1 << 20


def peers(count: int) -> tuple[PeerId, ...]:
    return tuple(PeerId(bytes([number // 256, number % 256]) * 16) for number in range(count))


def make_plan(members, length, codec="fp32", weights=None, **changes) -> Plan:
    return Plan(
        run=bytes(32),
        revision=1,
        attempt=1,
        rank=0,
        coordinator=members[0],
        members=tuple(members),
        weights=tuple(weights or (1.0,) * len(members)),
        length=length,
        codec=codec,
        **changes,
    )


def with_lines(members, up, *, down=None, rtt=50_000, relayed=()) -> dict[PeerId, Rates]:
    """Members that all know each other; `relayed` are those of whom no two reach each other."""
    return {
        peer: Rates(
            up[place],
            (down or up)[place],
            tuple(
                Partner(other, 0, 0, rtt, place in relayed and number in relayed)
                for number, other in enumerate(members)
                if other != peer
            ),
        )
        for place, peer in enumerate(members)
    }


rates = st.one_of(st.just(0), st.integers(1, 2**40))


@st.composite
def said(draw):
    """Some members, and what they say: true or not."""
    members = peers(draw(st.integers(1, 8)))
    return members, {
        peer: Rates(
            draw(rates),
            draw(rates),
            tuple(
                Partner(
                    draw(st.sampled_from(members)),
                    draw(rates),
                    draw(rates),
                    draw(st.integers(0, 10**8)),
                    relayed,
                    draw(rates),
                )
                for relayed in draw(st.lists(st.booleans(), max_size=4))
            ),
        )
        for peer in members
        if draw(st.integers(0, 9))
    }


@settings(deadline=None)
@given(said=said(), nbytes=st.integers(0, 2**32))
def test_whatever_members_say_the_order_has_them_all_and_is_no_slower_than_without(said, nbytes):
    members, claims = said
    lines = lines_of(members, claims)
    order = ring_order(lines, nbytes)
    assert sorted(order) == list(range(len(members)))
    ordered = lines.reordered(order)
    assert set(ordered.members) == set(members)
    assert ordered.ring_time(nbytes) <= lines.ring_time(nbytes)
    assert ring_order(lines_of(members, claims), nbytes) == order


@settings(deadline=None)
@given(
    said=said(),
    length=st.one_of(st.integers(0, 3000), st.integers(0, 2**40)),
    codec=st.sampled_from(["fp32", "bf16", "int8", "e3m0"]),
    data=st.data(),
)
def test_whatever_members_say_the_plan_is_valid_and_no_slower_than_the_usual_one(said, length, codec, data):
    members, claims = said
    weights = data.draw(st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=len(members), max_size=len(members)))
    usual = make_plan(members, length, codec, weights)
    lines = lines_of(members, claims)
    plan = scheduled(usual, lines)
    assert attrs.evolve(plan, schedule=usual.schedule, blocks=()) == usual
    assert plan == scheduled(usual, lines_of(members, claims))
    bounds = own_blocks(plan)
    assert [bounds[0][0], bounds[-1][1]] == [0, length]
    assert all(one[1] == two[0] for one, two in itertools.pairwise(bounds))
    assert all(start <= stop for start, stop in bounds)
    assert all(stop % block_of(codec) == 0 or stop == length for _, stop in bounds)
    before, after = estimate(usual, claims), estimate(plan, claims)
    assert np.isfinite(after)
    small = len(members) * length <= SMALL
    assert plan == usual or MARGIN * after < before or (small and after < UNEQUAL * before)
    # Whoever owns something may have to keep everybody else's values of it.
    kept = max(plan.blocks, default=0) * (len(members) - 2)
    assert small or kept <= 2 * (plan.free + len(members) * block_of(codec))


def test_a_slow_member_owns_nothing():
    """It has to send its values and get the result whatever is done: that is the bound."""
    members = peers(4)
    claims = with_lines(members, [100 * MEGABIT] * 2 + [20 * MEGABIT] + [100 * MEGABIT])
    usual = make_plan(members, 100 * MIB // 4)
    plan = scheduled(usual, lines_of(members, claims))
    assert plan.schedule == "direct"
    assert plan.blocks[2] == 0
    assert max(plan.blocks) - min(plan.blocks[:2]) <= 1
    bound = 100 * MIB / (20 * MEGABIT)
    assert bound < estimate(plan, claims) < 1.01 * bound
    assert estimate(usual, claims) > 1.5 * bound


def test_members_that_are_fast_enough_own_as_much_as_each_other():
    members = peers(4)
    claims = with_lines(members, [200 * MEGABIT, 100 * MEGABIT, 20 * MEGABIT, 100 * MEGABIT])
    plan = scheduled(make_plan(members, 100 * MIB // 4), lines_of(members, claims))
    assert plan.blocks[2] == 0
    assert max(plan.blocks) - min(plan.blocks[0], plan.blocks[1], plan.blocks[3]) <= 2


def test_one_whom_all_reach_well_does_not_own_all_where_that_gains_nothing():
    """The slow member's line takes as long either way, and waits at an owner whose line the others' values fill."""
    members = peers(4)
    claims = with_lines(members, [20 * MEGABIT] + [100 * MEGABIT] * 3)
    for one, other in ((0, 2), (2, 0), (1, 2), (2, 1)):
        way = Partner(members[other], sent=15 * MEGABIT, received=15 * MEGABIT, rtt=50_000, relayed=False)
        others = tuple(known for known in claims[members[one]].partners if known.peer != members[other])
        claims[members[one]] = attrs.evolve(claims[members[one]], partners=(*others, way))
    plan = scheduled(make_plan(members, 100 * MIB // 4), lines_of(members, claims))
    assert plan.blocks[0] == 0
    assert min(plan.blocks[1:]) > 0.3 * plan.free


@pytest.mark.parametrize("fast", [1, 2, 3])
def test_a_few_fast_members_do_not_own_so_much_that_they_keep_more_than_two_vectors(fast):
    members = peers(8)
    claims = with_lines(members, [10 * MEGABIT] * (8 - fast) + [20 * MEGABIT] * fast)
    plan = scheduled(make_plan(members, 1 << 24), lines_of(members, claims))
    assert max(plan.blocks, default=0) <= plan.free / 3 + 1


def test_where_too_few_are_reached_by_all_the_others_own_something_as_well():
    members = peers(8)
    claims = with_lines(members, [100 * MEGABIT] * 6 + [50 * MEGABIT] * 2, relayed=range(1, 8))
    plan = scheduled(make_plan(members, 1 << 24), lines_of(members, claims))
    assert max(plan.blocks, default=0) <= plan.free / 3 + 1


@settings(deadline=None)
@given(
    up=st.lists(st.integers(1, 100), min_size=3, max_size=7),
    codec=st.sampled_from(["fp32", "int8"]),
)
def test_no_other_blocks_are_much_better(up, codec):
    """Moving a part from one owner to another does not shorten the time by more than the margin."""
    members = peers(len(up))
    claims = with_lines(members, [rate * MEGABIT for rate in up], rtt=1000)
    length = 1 << 24
    plan = scheduled(make_plan(members, length, codec), lines_of(members, claims))
    best = estimate(plan, claims)
    blocks = plan.blocks or tuple(stop - start for start, stop in own_blocks(plan))
    for source, sink in itertools.permutations(range(len(up)), 2):
        moved = min(blocks[source], 1 << 20)
        other = list(blocks)
        other[source], other[sink] = other[source] - moved, other[sink] + moved
        if other[sink] > largest_part(len(up)) * length:
            continue
        changed = attrs.evolve(plan, schedule="direct", blocks=tuple(other)) if moved % 256 == 0 else plan
        assert estimate(changed, claims) * UNEQUAL >= best


@pytest.mark.parametrize("count", [3, 4, 8])
def test_short_vectors_go_to_owners_and_back(count):
    members = peers(count)
    lines = lines_of(members, with_lines(members, [100 * MEGABIT] * count))
    assert scheduled(make_plan(members, SMALL), lines).schedule == "direct"
    assert scheduled(make_plan(members, SMALL), lines).blocks == ()
    assert scheduled(make_plan(members, 100 * MIB // 4), lines).schedule == "ring"


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("count", [3, 4, 8, 64])
def test_of_what_is_small_the_coordinator_owns_all(count, codec):
    members = peers(count)
    for lines in (lines_of(members, {}), lines_of(members, with_lines(members, [0] * count, rtt=0))):
        plan = attrs.evolve(make_plan(members, SMALL // count, codec), coordinator=members[2])
        assert scheduled(plan, lines).blocks == (0, 0, SMALL // count, *[0] * (count - 3))


def test_where_the_coordinator_is_no_member_several_own_what_is_small():
    members = peers(4)
    plan = attrs.evolve(make_plan(members, 1024), coordinator=PeerId(bytes([9]) * 32))
    assert max(scheduled(plan, lines_of(members, {})).blocks, default=0) < 1024


def test_who_is_slow_owns_nothing_small_either():
    members = peers(3)
    lines = lines_of(members, with_lines(members, [MEGABIT // 10, 100 * MEGABIT, 100 * MEGABIT]))
    assert scheduled(make_plan(members, SMALL // 3), lines).blocks[0] == 0


def test_two_members_swap_halves():
    members = peers(2)
    lines = lines_of(members, with_lines(members, [MEGABIT, 100 * MEGABIT]))
    assert scheduled(make_plan(members, 1 << 24), lines) == make_plan(members, 1 << 24)


def test_of_what_is_salvaged_nobody_owns_anything():
    members = peers(4)
    claims = with_lines(members, [100 * MEGABIT] * 3 + [MEGABIT])
    source = Source(bytes(32), members, (1.0,) * 4)
    parts = (Salvaged(1000, 1 << 20, 0, (0, 1)),)
    plan = scheduled(make_plan(members, 1 << 22, sources=(source,), salvaged=parts), lines_of(members, claims))
    assert sum(plan.blocks) == plan.free == (1 << 22) - (1 << 20) + 1000


@pytest.mark.parametrize("count", [4, 6, 12, 40])
def test_peers_that_cannot_reach_each_other_have_others_between_them(count):
    members = peers(count)
    relayed = set(range(count // 2))
    claims = with_lines(members, [100 * MEGABIT] * count, relayed=relayed)
    order = ring_order(lines_of(members, claims), 100 * MIB)
    for place, following in zip(order, [*order[1:], order[0]], strict=True):
        assert not {place, following} <= relayed


def test_a_slow_way_that_both_ends_have_measured_is_avoided():
    members = peers(4)
    claims = with_lines(members, [100 * MEGABIT] * 4)

    def measured(here, there, *, sent=0, received=0):
        one = claims[members[here]]
        partners = tuple(
            attrs.evolve(partner, sent=sent, received=received) if partner.peer == members[there] else partner
            for partner in one.partners
        )
        claims[members[here]] = attrs.evolve(one, partners=partners)

    measured(0, 1, sent=MEGABIT)
    assert ring_order(lines_of(members, claims), 100 * MIB) == (0, 1, 2, 3)  # it may have been sharing its line
    measured(1, 0, received=2 * MEGABIT)
    order = ring_order(lines_of(members, claims), 100 * MIB)
    assert order[order.index(0) - 3] != 1
    lines = lines_of(members, claims)
    assert lines.reordered(order).ring_time(100 * MIB) < lines.ring_time(100 * MIB) / 20


@pytest.mark.parametrize("count", [5, 30])
def test_near_peers_are_neighbours(count):
    """Two sites, far from each other: the ring crosses twice."""
    members = peers(count)
    claims = {
        peer: Rates(
            100 * MEGABIT,
            100 * MEGABIT,
            tuple(
                Partner(other, 0, 0, 1000 if (place - number) % 2 == 0 else 200_000, False)
                for number, other in enumerate(members)
                if other != peer
            ),
        )
        for place, peer in enumerate(members)
    }
    order = ring_order(lines_of(members, claims), MIB)
    crossings = sum((one - two) % 2 for one, two in zip(order, [*order[1:], order[0]], strict=True))
    assert crossings == 2


@pytest.mark.parametrize("count", [4, 5, 8])
def test_who_claims_a_line_beyond_all_others_does_not_own_all(count):
    members = peers(count)
    honest = with_lines(members, [100 * MEGABIT] * count)
    usual = make_plan(members, 1 << 24)
    plan = scheduled(usual, lines_of(members, honest | {members[0]: Rates(2**40, 2**40)}))
    assert max(plan.blocks, default=0) <= plan.free * 0.75
    assert estimate(plan, honest) < 2 * estimate(usual, honest)


def test_a_line_far_beyond_all_others_is_believed_if_others_have_measured_it():
    members = peers(4)
    claims = with_lines(members, [10 * MEGABIT] * 4) | {members[0]: Rates(100 * MEGABIT, 100 * MEGABIT)}
    assert lines_of(members, claims).up[0] == lines_of(members, claims).down[0] == 20 * MEGABIT
    partner = Partner(members[0], sent=30 * MEGABIT, received=40 * MEGABIT, rtt=1000, relayed=False)
    claims[members[1]] = Rates(10 * MEGABIT, 10 * MEGABIT, (partner,))
    lines = lines_of(members, claims)
    assert (lines.up[0], lines.down[0]) == (40 * MEGABIT, 30 * MEGABIT)
    own = Partner(members[0], sent=2**40, received=2**40, rtt=1000, relayed=False)
    claims[members[0]] = Rates(2**40, 2**40, (own,))
    assert lines_of(members, claims).up[0] == 40 * MEGABIT


def test_one_that_claims_anything_changes_nothing_for_the_others():
    members = peers(5)
    honest = with_lines(members, [100 * MEGABIT] * 5)
    for claim in (Rates(), Rates(1, 1), Rates(2**40, 2**40), Rates(2**40, 1)):
        plan = scheduled(make_plan(members, 1 << 24), lines_of(members, honest | {members[0]: claim}))
        assert len(set(plan.blocks[1:])) <= 2  # all equal, but for rounding
        assert estimate(plan, honest) <= 3 * estimate(make_plan(members, 1 << 24), honest)


def test_who_waited_for_others_has_no_slow_line():
    """A measured rate may be what there was to send. What a connection has carried for a moment is what it can do."""
    members = peers(4)
    waited = with_lines(members, [100 * MEGABIT, 20 * MEGABIT, 30 * MEGABIT, 25 * MEGABIT])
    rates = {
        peer: attrs.evolve(one, partners=tuple(attrs.evolve(way, carries=90 * MEGABIT) for way in one.partners))
        for peer, one in waited.items()
    }
    lines = lines_of(members, rates)
    assert min(lines.up.min(), lines.down.min()) == 90 * MEGABIT
    plan = scheduled(make_plan(members, 25 << 18), lines)
    assert (plan.schedule, plan.blocks) == ("ring", ())


def test_latency_that_is_hidden_behind_the_data_is_no_reason_against_a_ring():
    members = peers(4)
    lines = lines_of(members, with_lines(members, [100 * MEGABIT] * 4, rtt=100_000))
    assert scheduled(make_plan(members, 25 << 18), lines).schedule == "ring"
    assert scheduled(make_plan(members, 1 << 14), lines).schedule == "direct"


def test_one_that_claims_to_reach_all_quickly_makes_no_line_faster_than_twice_the_usual():
    members = peers(5)
    honest = with_lines(members, [100 * MEGABIT] * 5)
    ways = tuple(attrs.evolve(way, carries=2**40) for way in honest[members[0]].partners)
    lines = lines_of(members, honest | {members[0]: Rates(0, 0, ways)})
    assert lines.down.max() <= 200 * MEGABIT
    assert lines.up.max() <= 200 * MEGABIT

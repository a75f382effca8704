"""What a coordinator makes of what failed attempts have left."""

from __future__ import annotations

import pytest

from protocol.candidates import Candidate
from protocol.plan import NO_BALLOT, Ballot, Plan, Source
from protocol.round_messages import CallOff, Halt, Propose
from protocol.salvage import Holding, Span
from tests.protocol.coordinating import BASE, RUN, TIMES, US, A, B, C, D, Table, sent


def held(plan, *spans):
    return (Holding(Source(plan.id, plan.members, plan.weights), tuple(Span(*span) for span in spans)),)


def test_the_next_plan_takes_over_what_the_members_have():
    table = Table()
    first = table.start(US, A, B)
    table.holdings = {US: held(first, (0, 2)), A: held(first, (1, 3))}
    table.core.gone(B)
    second = sent(table.poll(), Propose)[US].plan
    assert second.sources == (Source(first.id, first.members, first.weights),)
    assert [(part.start, part.stop) for part in second.salvaged] == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("heard", [NO_BALLOT, Ballot(1, 0, B)])
def test_who_has_accepted_no_plan_holds_nothing(heard):
    """Whatever it says: of attempts that never were, it could make up the contributors."""
    table = Table(live=[US, A])
    made_up = (Holding(Source(bytes([7] * 32), (A, D), (1.0, 1.0)), (Span(0, 3),)),)
    table.ready(US)
    table.core.ready(A, Candidate(1.0, 4, BASE, frozenset(), made_up), heard)
    plan = sent(table.poll(), Propose)[US].plan
    assert set(plan.members) == {US, A}
    assert bool(plan.sources) == bool(plan.salvaged) == (heard != NO_BALLOT)


@pytest.mark.parametrize("promised", [Ballot(1, 0, B), Ballot(2, 0, D)])
def test_who_refuses_is_believed_no_more_what_it_holds(promised):
    """Else others would overwrite what they do hold each time that it lies."""
    table = Table(live=[US, A, B])
    made_up = (Holding(Source(bytes([7] * 32), (A, D), (1.0, 1.0)), (Span(0, 3),)),)
    table.ready(US, B)
    table.core.ready(A, Candidate(1.0, 4, BASE, frozenset(), made_up), Ballot(1, 0, B))
    table.poll()
    first = table.plan
    assert first.salvaged
    table.accept(US, B)
    table.holdings = {A: made_up, US: held(first, (0, 2))}
    table.core.rejected(A, first.ballot, promised)
    second = sent(table.poll(), Propose)[US].plan
    assert A in second.members  # it may have promised something to another one
    assert {source.plan for source in second.sources} == {first.id}


def test_members_that_do_not_halt_are_waited_for_no_longer_than_reports():
    table = Table()
    first = table.start(US, A, B)
    table.holdings, table.silent = {US: held(first, (0, 2))}, {A}
    table.core.gone(B)
    assert sent(table.poll(), Propose) == {}
    second = sent(table.wait(TIMES.settle), Propose)[A].plan
    assert set(second.members) == {US, A}
    assert [(part.start, part.stop) for part in second.salvaged] == [(0, 2)]
    table.core.halted(A, first.ballot, held(first, (0, 4)))  # too late
    assert table.poll() == []


def test_a_member_that_completes_while_others_halt_has_the_result():
    table = Table()
    first = table.start(US, A, B)
    table.silent = {US, A}
    table.core.gone(B)
    assert set(sent(table.poll(), Halt)) == {US, A}
    table.complete(A, plan=first)
    assert sent(table.poll(), CallOff) == {US: CallOff(first.ballot, A)}


def test_a_member_that_is_lost_while_others_halt_is_not_waited_for():
    table = Table()
    table.start(US, A, B, C)
    table.silent = {A}
    table.core.gone(B)
    assert sent(table.poll(), Propose) == {}
    table.core.gone(A)
    assert set(sent(table.poll(), Propose)[US].plan.members) == {US, C}


def test_a_new_coordinator_takes_over_what_the_old_one_left():
    lost = Plan(
        run=RUN, revision=1, attempt=1, rank=0, coordinator=C, members=(US, A, C), weights=(1.0, 1.0, 1.0), length=4
    )
    table = Table(live=[US, A])
    for peer, spans in ((US, (0, 1)), (A, (0, 3))):
        table.core.ready(peer, Candidate(1.0, 4, BASE, frozenset({C}), held(lost, spans)), lost.ballot)
    plan = sent(table.poll(), Propose)[A].plan
    places = {peer: place for place, peer in enumerate(plan.members)}
    assert [(part.start, part.stop, part.holders) for part in plan.salvaged] == [
        (0, 1, (0, 1)),
        (1, 3, (places[A],)),
    ]

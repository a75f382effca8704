"""What a coordinator does about members that bring something else, where no manifest says who is right."""

from __future__ import annotations

from protocol.identity import PeerId
from protocol.kinds import Terms
from protocol.plan import NO_BALLOT
from protocol.round_messages import Ahead, CallOff, Misfits, Propose
from tests.protocol.coordinating import PEERS, US, A, B, C, D, Table, sent

E = PeerId(bytes([9]) * 32)


def disagreeing(*peers):
    return Table(live=peers, fixed=False)


def told(actions):
    return {
        peer: {each.peer: each.kind.length for each in message.brought}
        for peer, message in sent(actions, Misfits).items()
    }


def test_those_that_are_fewer_are_sent_away_as_soon_as_all_are_there():
    table = disagreeing(US, A, B)
    table.ready(US, A)
    table.ready(B, length=5)
    actions = table.poll()
    assert set(sent(actions, Propose)) == {US, A}
    assert told(actions) == {B: {US: 4, A: 4}}
    assert table.core.candidates == {US, A}


def test_also_if_that_is_the_coordinator():
    table = disagreeing(US, A, B)
    table.ready(US)
    table.ready(A, B, length=5)
    actions = table.poll()
    assert set(sent(actions, Propose)) == {A, B}
    assert told(actions) == {US: {A: 5, B: 5}}


def test_of_two_nobody_is_right_and_who_comes_next_begins_anew():
    table = disagreeing(US, A)
    table.ready(US)
    table.ready(A, length=5)
    actions = table.poll()
    assert told(actions) == {US: {A: 5}, A: {US: 4}}
    assert table.core.plan is None
    assert not table.core.collecting
    table.ready(US, A, length=5)
    assert set(sent(table.poll(), Propose)) == {US, A}


def test_who_has_missed_something_does_not_stop_who_has_not():
    table = disagreeing(US, A)
    table.ready(US)
    table.ready(A, length=5, late=True)
    actions = table.poll()
    assert set(sent(actions, Propose)) == {US}
    assert told(actions) == {A: {US: 4}}


def test_codecs_and_terms_have_to_be_the_same_and_the_plan_has_that_codec():
    table = disagreeing(*PEERS)
    table.ready(US, A, codec="int8")
    table.ready(B)
    table.ready(C, codec="int8", terms=Terms(quorum=2))
    table.ready(D, codec="int8", operation="exchange")
    actions = table.poll()
    assert set(sent(actions, Propose)) == {US, A}
    assert table.plan.codec == "int8"
    assert set(told(actions)) == {B, C, D}


def test_who_comes_when_the_plan_is_out_is_told_at_once_what_it_is_for():
    table = disagreeing(US, A, B)
    table.start(US, A)
    table.complete(US)
    table.ready(B, length=5)
    assert told(table.poll()) == {B: {US: 4, A: 4}}
    table.complete(A)
    table.poll()
    assert table.core.holder in (US, A)


def test_who_comes_then_with_another_call_is_late_and_may_fit_the_next_one():
    table = disagreeing(US, A, B)
    table.start(US, A)
    table.ready(B, operation="gather")
    assert table.poll() == []
    table.complete(US, A)
    assert B in sent(table.poll(), Ahead)


def test_what_was_settled_holds_for_the_next_attempts():
    """Though those that are left are no longer the most."""
    table = disagreeing(US, A, B)
    table.start(US, A, B)
    table.core.gone(A)
    table.ready(C, D, E, length=5)
    actions = table.poll() + table.wait(2)
    assert set(told(actions)) == {C, D, E}
    assert (set(table.plan.members), table.plan.length, table.plan.attempt) == ({US, B}, 4, 2)
    assert not sent(actions, CallOff)


def test_it_does_not_hold_when_nobody_is_left_of_those():
    table = disagreeing(US, A, B)
    table.core.gone(US)
    table.start(A, B)
    table.core.gone(A)
    table.core.gone(B)
    table.poll()
    table.wait(2)
    table.live = {C, D}
    table.ready(C, D, length=5, heard=NO_BALLOT)
    table.wait(12)
    assert (set(table.plan.members), table.plan.length) == ({C, D}, 5)

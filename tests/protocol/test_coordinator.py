"""The decisions of a coordinator, on a clock moved by hand."""

from __future__ import annotations

import attrs
import pytest

from protocol.candidates import Candidate
from protocol.collective import Window
from protocol.coordinator import Aborted, Announce, Coordinator
from protocol.identity import PeerId
from protocol.plan import MAX_ATTEMPT, MAX_JUMP, MAX_LENGTH, NO_BALLOT, Ballot, Plan, coordinators
from protocol.round_messages import Ahead, CallOff, Forked, Propose, Queued, Redirect
from protocol.wire import decode, encode
from tests.protocol.coordinating import BASE, OTHER, PEERS, RUN, TIMES, US, A, B, C, D, Table, sent


@pytest.mark.parametrize("answer", ["late", "noted"])
def test_the_window_is_longer_for_a_member_that_is_behind(answer):
    table = Table(live=[US, A])
    table.patience = 30.0
    table.ready(US)
    table.poll()
    table.core.answered(A, answer)
    proposed = bool(sent(table.wait(TIMES.grace + TIMES.slack + 1), Propose))
    assert proposed == (answer == "noted")
    assert proposed or sent(table.wait(29), Propose)[US].plan.members == (US,)


def test_the_window_is_longer_if_we_are_behind_ourselves():
    table = Table(live=[US, A])
    table.patience, table.base = 30.0, None
    table.ready(A)
    table.poll()
    assert sent(table.wait(TIMES.grace + TIMES.slack + 1), Propose) == {}
    table.ready(US)
    table.base = BASE
    assert set(sent(table.poll(), Propose)) == {US, A}


def test_peers_that_arrive_are_waited_for_but_not_asked():
    table = Table(live=[US])
    table.arriving = {A, B}
    table.ready(US)
    assert table.poll() == []
    table.arriving = {B}
    table.live = {US, A}
    assert table.poll() == [Announce(A)]
    table.ready(A)
    assert table.poll() == []
    table.arriving = set()
    assert sent(table.poll(), Propose)[US].plan.members == tuple(coordinators(RUN, 1, [US, A]))


def test_peers_that_arrive_are_waited_for_no_longer_than_others():
    table = Table(live=[US])
    table.arriving = {A}
    table.ready(US)
    assert table.poll() == []
    assert sent(table.wait(TIMES.grace + TIMES.slack), Propose)[US].plan.members == (US,)


def test_who_loses_everybody_at_once_asks_again_before_it_goes_on_alone():
    table = Table()
    table.start(US, A, B)
    table.arriving, table.live = {A, B}, {US}
    table.core.gone(A)
    table.core.gone(B)
    assert sent(table.poll(), Propose) == {}
    table.arriving, table.live = set(), {US, A, B}
    assert {action.peer for action in table.poll() if isinstance(action, Announce)} == {A, B}
    table.core.finished_elsewhere(A)
    assert sent(table.poll(), Ahead)[US] == Ahead(1, A)


def test_who_finds_connections_broken_one_after_the_other_has_lost_everybody():
    table = Table()
    table.silent = {B}
    table.start(US, A, B)
    table.arriving, table.live = {A, B}, {US}
    table.core.gone(A)
    assert sent(table.poll(), Propose) == {}
    table.core.gone(B)
    table.ready(A)  # it is back, and was lost all the same
    assert sent(table.poll(), Propose) == {}
    table.core.finished_elsewhere(A)
    assert sent(table.poll(), Ahead)[US] == Ahead(1, A)


def test_who_was_stopped_and_has_lost_some_looks_around_once():
    """Of several that were stopped together, each still has the others."""
    table = Table()
    table.start(US, A, B, C)
    table.woken, table.arriving, table.live = True, {B, C}, {US, A}
    table.core.gone(B)
    table.core.gone(C)
    assert sent(table.poll(), Propose) == {}
    table.arriving, table.live = set(), {US, A, B}
    assert {action.peer for action in table.poll() if isinstance(action, Announce)} == {B}
    table.ready(B)
    assert set(sent(table.poll(), Propose)) == {US, A, B}
    table.core.gone(B)
    table.live = {US, A}
    assert set(sent(table.poll(), Propose)) == {US, A}


def test_who_loses_everybody_a_second_time_goes_on_alone():
    table = Table()
    table.start(US, A)
    table.core.gone(A)
    assert sent(table.poll(), Propose) == {}
    table.ready(A)
    first = sent(table.poll(), Propose)[US].plan
    assert A in first.members
    table.core.gone(A)
    table.arriving = {A}
    second = sent(table.poll(), Propose)[US].plan
    assert second.members == (US,)
    assert second.attempt > first.attempt


def test_window_closes_when_all_live_members_are_ready():
    table = Table()
    table.ready(US, A)
    actions = table.poll()
    assert {action.peer for action in actions if isinstance(action, Announce)} == {B, C}
    table.ready(B)
    assert table.poll() == []
    table.ready(C)
    plan = next(iter(sent(table.poll(), Propose).values())).plan
    assert set(plan.members) == {US, A, B, C}
    assert list(plan.members) == coordinators(RUN, 0, plan.members)  # in all rounds the same
    assert (plan.attempt, plan.rank, plan.coordinator, plan.length, plan.base) == (1, 0, US, 4, BASE)


def test_window_closes_when_the_grace_is_over():
    table = Table()
    table.ready(A)
    table.poll()
    assert table.core.deadline == table.core.closes == 112
    assert table.wait(11.9) == []
    assert set(sent(table.wait(0.1), Propose)) == {A}


def with_a_quorum(of):
    table = Table()
    times = TIMES.within(Window(quorum=of, grace=2.0))
    table.core = Coordinator(run=RUN, tag="", revision=1, peer=US, times=times)
    table.patience = 30.0
    return table


def test_a_quorum_waits_for_its_own_grace_time_only():
    table = with_a_quorum(2)
    table.ready(US)
    table.poll()
    assert sent(table.wait(TIMES.grace - 5), Propose) == {}
    table.ready(A)
    table.poll()
    table.core.answered(B, "late")
    table.core.answered(C, "noted")
    assert sent(table.wait(1.9), Propose) == {}
    assert set(sent(table.wait(0.1), Propose)) == {US, A}


def test_a_window_stays_open_until_all_have_said_that_the_round_is_not_over():
    table = with_a_quorum(2)
    table.ready(US, A)
    table.poll()
    assert sent(table.wait(3), Propose) == {}
    table.core.answered(B, "noted")
    table.core.answered(C, "noted")
    assert set(sent(table.poll(), Propose)) == {US, A}


def test_nobody_waits_for_a_quorum_beyond_the_grace_time():
    table = with_a_quorum(3)
    table.ready(US)
    table.poll()
    table.core.answered(B, "noted")
    table.core.answered(C, "noted")
    assert sent(table.wait(TIMES.grace - 1), Propose) == {}
    table.ready(A)
    assert sent(table.wait(0.9), Propose) == {}
    assert set(sent(table.wait(0.1), Propose)) == {US, A}
    late = with_a_quorum(2)
    late.ready(US)
    late.poll()
    late.core.answered(B, "noted")
    late.core.answered(C, "noted")
    late.wait(TIMES.grace - 1)
    late.ready(A)  # with whom the quorum's own grace time would begin
    late.poll()
    assert set(sent(late.wait(1), Propose)) == {US, A}


def test_if_fewer_than_a_quorum_are_there_all_of_them_are_enough():
    table = Table(live=[US, A])
    table.core = Coordinator(run=RUN, tag="", revision=1, peer=US, times=attrs.evolve(TIMES, quorum=3))
    table.ready(US, A)
    assert set(sent(table.poll(), Propose)) == {US, A}


def test_who_was_gone_and_comes_back_is_asked_again():
    """Its connection broke when it was asked."""
    table = Table(live=[US, A])
    table.ready(US)
    assert table.poll() == [Announce(A)]
    table.live, table.arriving = {US}, {A}
    table.core.answered(A, "gone")
    assert table.poll() == []
    table.live, table.arriving = {US, A}, set()
    assert table.poll() == [Announce(A)]
    table.core.answered(A, "gone")
    assert set(sent(table.poll(), Propose)) == {US}


def test_members_that_vanish_are_not_waited_for():
    table = Table()
    table.ready(US, A)
    table.poll()
    table.core.answered(B, "gone")
    table.live.discard(C)
    assert set(sent(table.poll(), Propose)) == {US, A}


def test_alone():
    table = Table(live=[US])
    table.ready(US)
    assert set(sent(table.poll(), Propose)) == {US}
    table.complete(US)
    table.poll()
    assert table.core.holder == US


def test_nothing_happens_while_another_peer_leads():
    table = Table(live=[US, A])
    table.ready(US, A)
    assert table.poll(leading=False) == []
    assert sent(table.poll(), Propose)


def test_waits_for_a_peer_that_is_led_elsewhere_and_learns_the_result_from_it():
    table = Table()
    table.ready(US, A, B)
    table.poll()
    table.core.answered(C, "led")
    assert table.wait(13) == []
    table.core.finished_elsewhere(C)
    assert sent(table.poll(), Ahead) == {peer: Ahead(1, C) for peer in (US, A, B)}


def test_does_not_wait_for_ever_for_a_peer_that_is_led_elsewhere():
    table = Table()
    table.ready(US, A, B)
    table.poll()
    table.core.answered(C, "led")
    assert set(sent(table.wait(12 + TIMES.attempt(4, 4)), Propose)) == {US, A, B}


def test_steps_down_but_keeps_those_who_cannot_reach_the_other():
    table = Table()
    table.ready(US, A)
    table.ready(B, tried=[D])
    table.poll()
    assert table.core.step_down(D, ())
    assert sent(table.poll(leading=False), Redirect) == {US: Redirect(D, ()), A: Redirect(D, ())}
    assert table.core.candidates == {B}


def test_who_steps_down_goes_there_itself_although_it_had_tried():
    """It would open the window again, ask, be told where to go, and so on as fast as messages travel."""
    table = Table()
    table.ready(US, tried=[D])
    table.poll()
    assert table.core.step_down(D, ())
    assert sent(table.poll(), Redirect) == {US: Redirect(D, ())}
    assert table.core.closes is None


def test_does_not_step_down_once_a_plan_is_out():
    table = Table()
    table.start(US, A)
    assert not table.core.step_down(D, ())


def test_candidates_of_another_branch_are_sent_away():
    table = Table(live=[US, A, B])
    table.ready(US, A)
    table.ready(B, base=OTHER)
    actions = table.poll()
    assert sent(actions, Forked) == {B: Forked(BASE)}
    assert table.core.candidates == {US, A}


def test_without_a_state_of_our_own_the_majority_decides():
    table = Table(live=[US, A, B, C])
    table.base = None
    table.ready(A, B, base=OTHER)
    table.ready(C)
    assert sent(table.wait(0), Forked) == {C: Forked(OTHER)}
    assert table.wait(12) != []
    assert table.plan.base == OTHER


def test_vectors_of_another_length_do_not_take_part():
    table = Table(live=[US, A, B])
    table.ready(US, A)
    table.ready(B, length=5)
    assert set(sent(table.wait(0), Propose)) == set()
    assert set(sent(table.wait(12), Propose)) == {US, A}


def gatherer(size: int, weight: float = 1.0) -> Candidate:
    return Candidate(weight, size, BASE, frozenset(), operation="gather")


def test_blocks_of_all_sizes_are_gathered_by_one_plan():
    table = Table(live=[US, A, B])
    for peer, size in ((US, 7), (A, 0), (B, 5)):
        table.core.ready(peer, gatherer(size, weight=float(size > 0)), NO_BALLOT)
    table.poll()
    assert (table.plan.operation, table.plan.length) == ("gather", 12)
    by_peer = dict(zip(table.plan.members, zip(table.plan.sizes, table.plan.weights, strict=True), strict=True))
    assert by_peer == {US: (7, 1.0), A: (0, 0.0), B: (5, 1.0)}


def test_those_who_want_another_operation_do_not_take_part():
    table = Table(live=[US, A, B])
    table.ready(US, A)
    table.core.ready(B, gatherer(4), NO_BALLOT)
    table.poll()
    table.wait(12)
    assert set(table.plan.members) == {US, A}
    assert table.plan.operation == "reduce"


def test_attempts_go_past_every_ballot_that_was_heard_of():
    table = Table(live=[US, A])
    table.ready(US)
    table.ready(A, heard=Ballot(7, 3, B))
    table.poll()
    assert table.plan.attempt == 8


@pytest.mark.parametrize("claim", [MAX_JUMP + 1, MAX_ATTEMPT - 1, MAX_ATTEMPT])
def test_liars_cannot_use_up_the_attempts(claim):
    table = Table(live=[US, A, B])
    table.ready(US, B)
    table.ready(A, heard=Ballot(claim, 0, C))
    table.poll()
    assert (table.plan.attempt, set(table.plan.members)) == (1, {US, B})
    table.complete(A, plan=attrs.evolve(table.plan, attempt=9))
    table.poll()
    assert table.core.holder is None


def test_members_that_a_liar_has_made_promise_a_lot_go_on_from_there():
    """Each of them has accepted some of its plans, one further ahead than the other."""
    table = Table(live=[US, A, B, C])
    table.ready(US, heard=Ballot(2**40, 0, D))
    table.ready(A, heard=Ballot(2**40 + 5, 0, D))
    table.ready(B, heard=Ballot(2**50, 0, D))
    table.ready(C)
    table.poll()
    assert (table.plan.attempt, set(table.plan.members)) == (2**40 + 6, {US, A})


def test_a_refusal_tells_where_to_go_on_but_not_how_far_away_that_is():
    table = Table(live=[US, A, B])
    table.ready(US, A, B)
    table.poll()
    table.accept(US)
    for peer, promised in ((A, 7), (B, MAX_ATTEMPT - 1)):
        table.core.rejected(peer, table.plan.ballot, Ballot(promised, 0, C))
    table.poll()
    assert (table.plan.attempt, set(table.plan.members)) == (8, {US, A})


def test_over_when_all_have_the_result():
    table = Table()
    table.start(US, A, B)
    table.complete(US, A)
    assert table.poll() == []
    table.complete(B)
    table.ready(C)
    assert sent(table.poll(), Ahead) == {C: Ahead(1, min(US, A, B))}


def test_a_lost_member_leads_to_the_next_attempt_at_once():
    table = Table()
    first = table.start(US, A, B, C)
    table.core.gone(B)
    actions = table.poll()
    assert [type(action) for action in actions if isinstance(action, Aborted)] == [Aborted]
    assert set(sent(actions, Propose)) == {US, A, C}
    assert table.plan.ballot > first.ballot


def test_a_lost_member_after_somebody_completed_means_that_the_others_fetch():
    table = Table()
    plan = table.start(US, A, B, C)
    table.complete(A)
    table.core.gone(B)
    actions = table.poll()
    assert sent(actions, CallOff) == {US: CallOff(plan.ballot, A), C: CallOff(plan.ballot, A)}
    assert table.core.holder == A


def test_a_member_that_has_completed_an_earlier_attempt_ends_the_later_one():
    table = Table()
    first = table.start(US, A, B, C)
    table.core.gone(B)
    table.poll()
    second = table.plan
    table.complete(A, plan=first)
    assert sent(table.poll(), CallOff) == {US: CallOff(second.ballot, A), C: CallOff(second.ballot, A)}


def test_somebody_excluded_that_has_completed_an_earlier_attempt_changes_nothing():
    table = Table()
    first = table.start(US, A, B, C)
    table.core.gone(B)
    table.poll()
    table.complete(B, plan=first)
    assert table.poll() == []
    assert table.core.holder is None


def ring_of(table, *reports):
    """Reports by (accuser, progress): each blames its left neighbour."""
    plan = table.plan
    for accuser, progress in reports:
        suspect = plan.members[plan.members.index(accuser) - 1]
        table.core.failed(accuser, plan.ballot, suspect, progress, table.now)


def excluded(table, first: Plan) -> set[PeerId]:
    return set(first.members) - set(table.plan.members)


@pytest.mark.parametrize("place", range(1, 5))
def test_the_culprit_is_who_is_accused_and_does_not_report(place):
    table = Table()
    first = table.start(*PEERS)
    order = [first.members[(first.members.index(US) + offset) % 5] for offset in range(5)]
    culprit = order[place]
    ring_of(table, *((peer, 3) for peer in order if peer != culprit))
    assert table.poll() == []  # more reports may come
    table.wait(1)
    assert excluded(table, first) == {culprit}


@pytest.mark.parametrize("place", range(1, 5))
def test_if_all_report_the_culprit_is_left_of_who_starved_first(place):
    table = Table()
    first = table.start(*PEERS)
    order = [first.members[(first.members.index(US) + offset) % 5] for offset in range(5)]
    progress = {order[(place + 1 + offset) % 5]: 2 + offset for offset in range(5)}
    ring_of(table, *progress.items())
    table.wait(1)
    assert excluded(table, first) == {order[place]}


def test_a_member_that_has_not_accepted_is_the_culprit():
    table = Table(live=PEERS[:4])
    table.ready(US, A, B, C)
    table.poll()
    first = table.plan
    silent = next(peer for peer in first.members if peer != US)
    table.accept(*(peer for peer in first.members if peer != silent))
    ring_of(table, *((peer, 0) for peer in first.members if peer != silent))
    table.wait(1)
    assert excluded(table, first) == {silent}


def test_accused_coordinators_exclude_the_accuser_first_and_then_themselves():
    table = Table()
    first = table.start(US, A, B, C)
    accuser = first.members[(first.members.index(US) + 1) % 4]
    ring_of(table, (accuser, 0))
    actions = table.wait(1)
    assert excluded(table, first) == {accuser}
    assert sent(actions, CallOff) == {accuser: CallOff(first.ballot, None)}
    second = table.plan
    table.accept(*second.members)
    ring_of(table, (second.members[(second.members.index(US) + 1) % 3], 0))
    table.wait(1)
    assert set(table.plan.members) == {A, B, C}


def test_who_has_excluded_itself_and_then_loses_all_others_goes_on_alone():
    table = Table()
    table.start(US, A, B)
    for accuser in (A, B):
        table.core.failed(accuser, table.plan.ballot, US, 0, table.now)
        table.wait(TIMES.settle)
        table.accept(*table.plan.members)
    assert US not in table.plan.members
    alone = {US}
    for peer in (A, B):
        table.core.gone(peer)
    table.live = alone
    table.poll()
    table.wait(TIMES.settle)
    assert table.plan.members == (US,)


def test_old_and_foreign_reports_are_ignored():
    table = Table()
    plan = table.start(US, A, B)
    table.core.failed(A, Ballot(9, 9, US), B, 0, table.now)
    table.core.failed(D, plan.ballot, B, 0, table.now)
    table.core.failed(A, plan.ballot, D, 0, table.now)
    assert table.wait(2) == []


def test_an_attempt_of_which_nobody_hears_anything_ends():
    table = Table()
    table.live = {US, A, B}
    table.ready(US, A, B)
    table.poll()
    first = table.plan
    table.accept(US, A)
    assert table.wait(TIMES.attempt(4, 3)) == []
    table.wait(TIMES.stall + TIMES.settle)
    assert excluded(table, first) == {B}


def test_a_refusing_member_gets_another_chance_and_is_left_out_in_the_end():
    table = Table()
    table.start(US, A, B)
    for number in range(3):
        assert set(table.plan.members) == {US, A, B}
        assert table.plan.attempt > 10 * number
        table.core.rejected(A, table.plan.ballot, Ballot(10 * number + 10, 0, D))
        table.poll()
    assert set(table.plan.members) == {US, B}


def test_who_comes_anew_while_a_plan_is_out_is_in_the_next_one():
    """Its call was given up, and it makes another; or its connection was replaced."""
    table = Table()
    first = table.start(US, A, B)
    for number in range(3):
        table.ready(A, heard=table.plan.ballot)
        table.poll()
        assert table.plan.attempt == first.attempt + number + 1
        table.accept(US, A, B)
        assert set(table.plan.members) == ({US, A, B} if number < 2 else {US, B})


def test_attempts_end_even_if_each_fails():
    table = Table()
    table.start(*PEERS)
    attempts = 0
    while len(table.plan.members) > 1:
        table.accept(*table.plan.members)
        ring_of(table, *((peer, 0) for peer in table.plan.members))
        table.wait(1)
        attempts += 1
    assert attempts <= 5


def test_if_the_holder_is_lost_the_round_begins_again():
    table = Table()
    first = table.start(US, A, B)
    table.complete(A)
    table.core.gone(B)
    table.poll()
    assert table.core.holder == A
    table.core.reopen()
    table.live = {US}
    table.ready(US, heard=first.ballot)
    table.poll()
    assert table.plan.members == (US,)
    assert table.plan.ballot > first.ballot


def test_if_all_are_lost_the_coordinator_waits_for_who_comes():
    table = Table(live=[US, A])
    table.ready(A)
    table.wait(0)
    table.wait(12)
    table.core.gone(A)
    table.poll()
    assert table.core.plan is None
    table.ready(A)
    table.poll()
    table.wait(12)
    assert table.plan.members == (A,)
    assert table.plan.attempt == 2


def test_what_is_announced_to_all_fits_its_message_whatever_members_say_they_bring():
    table = Table()
    table.ready(US, length=MAX_LENGTH)
    table.core.ready(A, Candidate(1.0, 100, BASE, frozenset(), operation="gather"), NO_BALLOT)
    assert decode(encode(Queued(table.core.load)), [Queued]).load == MAX_LENGTH

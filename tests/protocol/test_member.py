"""A member's side of a round, with a coordinator that is played by hand."""

from __future__ import annotations

import contextlib
import weakref

import attrs
import pytest
import torch
import trio
import trio.testing

from protocol.attempt import Failure
from protocol.ballots import Acceptor, Offer
from protocol.collective import Reduced
from protocol.coordinator import RoundTimes
from protocol.errors import Behind, Overloaded, ProtocolError, RequestTimeout
from protocol.identity import PeerId
from protocol.member import Member, Work
from protocol.plan import Ballot, Plan
from protocol.round_messages import Accepted, Ahead, CallOff, Completed, Failed, Halt, Halted, Propose, Queued, Rejected
from protocol.sessions import local_lines

US, COORDINATOR, HOLDER = (PeerId(bytes([number]) * 32) for number in range(1, 4))
PLAN = Plan(
    run=bytes(32),
    revision=1,
    attempt=5,
    rank=0,
    coordinator=COORDINATOR,
    members=(US, COORDINATOR),
    weights=(1.0, 1.0),
    length=4,
)


TOO_LARGE = 77
"""An attempt that there is no memory for."""


class Attempt:
    """A transfer that ends when it is told to."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.settled = trio.Event()
        self.failure = None
        self.mean = torch.zeros(plan.length)
        self.bytes_sent = self.bytes_received = 0
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True
        self.settled.set()

    def holdings(self):
        return ()


@attrs.define
class Stage:
    """A member that carries out `PLAN`, and what becomes of it."""

    coordinator: object
    attempt: Attempt
    begun: list[Attempt]
    """Those that came after it."""
    kept: list[Reduced]
    fetching: trio.Event
    fetched: trio.Event
    done: trio.Event
    results: list[Reduced]
    """What is fetched is the last one."""


def elsewhere(attempt: int) -> Reduced:
    """The result of another attempt."""
    plan = attrs.evolve(PLAN, attempt=attempt)
    return Reduced(
        plan=plan,
        mean=torch.ones(4),
        contributors=plan.members,
        attempts=1,
        bytes_sent=0,
        bytes_received=0,
        seconds=1.0,
        weight=2.0,
    )


@pytest.fixture
async def stage(nursery):
    theirs, ours = local_lines(COORDINATOR)
    offer = Offer(run=PLAN.run, tag="", revision=1, base=PLAN.base, weight=1.0, length=4)
    attempts, kept, results = [], [], [elsewhere(4)]
    fetching, fetched, done = trio.Event(), trio.Event(), trio.Event()

    async def signed(plan):
        return None

    def begin(plan):
        if plan.attempt == TOO_LARGE:
            raise Overloaded("no memory")
        attempts.append(Attempt(plan))
        return attempts[-1]

    def keep(reduced):
        kept.append(reduced)
        fetched.set()  # at this very moment, at the latest

    async def fetch(holder):
        fetching.set()
        await fetched.wait()
        return results[-1]

    member = Member(
        ours,
        Work(values=torch.zeros(4), offer=offer, started=0.0),
        Acceptor(US),
        RoundTimes(),
        check=signed,
        begin=begin,
        fetch=fetch,
        keep=keep,
        report=lambda plan, reason: None,
        load=1 << 22,
        most=1 << 22,
        size=2,
    )

    async def run():
        with contextlib.suppress(Behind, RequestTimeout, ProtocolError):
            await member.run()
        done.set()

    nursery.start_soon(run)
    await theirs.send(Propose(PLAN))
    assert await theirs.receive(Accepted) == Accepted(PLAN.ballot)
    return Stage(theirs, attempts.pop(), attempts, kept, fetching, fetched, done, results)


CALLED_OFF = CallOff(Ballot(4, 0, COORDINATOR), HOLDER)
"""A ballot below that of the plan that is being carried out."""


async def test_a_result_that_is_adopted_ends_the_attempt_that_is_being_carried_out(stage, autojump_clock):
    await stage.coordinator.send(CALLED_OFF)
    await stage.fetching.wait()
    assert not stage.attempt.aborted
    stage.fetched.set()
    assert (await stage.coordinator.receive(Completed)).ballot == CALLED_OFF.ballot
    await stage.done.wait()
    assert stage.attempt.aborted
    assert [reduced.plan.attempt for reduced in stage.kept] == [4]


async def test_an_attempt_that_completes_while_a_result_is_fetched_stays_the_result(stage, autojump_clock):
    await stage.coordinator.send(CALLED_OFF)
    await stage.fetching.wait()
    stage.attempt.settled.set()
    assert (await stage.coordinator.receive(Completed)).ballot == PLAN.ballot
    await stage.done.wait()
    assert not stage.attempt.aborted
    assert [reduced.plan.attempt for reduced in stage.kept] == [5]


@pytest.mark.parametrize("ours", [True, False])
async def test_a_round_that_is_over_elsewhere_is_ours_if_it_was_made_by_a_plan_of_ours(stage, autojump_clock, ours):
    """The coordinator died after another member had completed the plan."""
    stage.results.append(elsewhere(PLAN.attempt if ours else PLAN.attempt + 1))
    stage.fetched.set()
    await stage.coordinator.send(Ahead(1, HOLDER))
    await stage.done.wait()
    assert stage.attempt.aborted
    assert [reduced.plan for reduced in stage.kept] == ([PLAN] if ours else [])


async def keep_alive(coordinator):
    """What a coordinator says that does nothing."""
    while True:
        await trio.sleep(2.0)
        await coordinator.send(Queued(0))


async def test_a_plan_has_the_time_that_it_needs_whatever_the_first_one_had(stage, autojump_clock, nursery):
    nursery.start_soon(keep_alive, stage.coordinator)
    large = attrs.evolve(PLAN, attempt=6, length=4 << 20)
    await stage.coordinator.send(Propose(large))  # for vectors of another length
    await stage.coordinator.receive(Rejected)
    begun = trio.current_time()
    await stage.done.wait()
    times = RoundTimes()
    attempt = times.attempt(PLAN.load, 2) + times.stall + times.settle
    assert attempt < trio.current_time() - begun < attempt + times.grace + times.slack + times.stall
    assert stage.attempt.aborted


@pytest.mark.parametrize("suspect", [COORDINATOR, None])
async def test_a_failure_that_may_be_our_own_fault_accuses_nobody(stage, autojump_clock, suspect):
    stage.attempt.failure, stage.attempt.segments = Failure(suspect, "the attempt took too long"), 3
    stage.attempt.settled.set()
    await trio.testing.wait_all_tasks_blocked()
    await stage.coordinator.send(Halt(PLAN.ballot))
    said = await stage.coordinator.receive(Failed, Halted)
    assert said == (Halted(PLAN.ballot, ()) if suspect is None else Failed(PLAN.ballot, suspect, 3))


@pytest.mark.parametrize("proposes", [False, True])
async def test_a_quorum_is_not_waited_for_without_end(autojump_clock, nursery, proposes):
    """With a coordinator that says that too few are ready, or makes one plan after the other that nobody accepts."""
    theirs, ours = local_lines(COORDINATOR)
    offer = Offer(run=PLAN.run, tag="", revision=1, base=PLAN.base, weight=1.0, length=4)
    times = RoundTimes(quorum=2, grace=1.0)

    async def unsigned(plan):
        return "it is not signed"

    member = Member(
        ours,
        Work(values=torch.zeros(4), offer=offer, started=0.0),
        Acceptor(US),
        times,
        check=unsigned,
        begin=Attempt,
        fetch=lambda holder: None,
        keep=lambda reduced: None,
        report=lambda plan, reason: None,
        load=4,
        most=4,
        size=2,
    )

    async def propose():
        while True:
            await trio.sleep(60.0)
            await theirs.send(Propose(PLAN))
            await theirs.receive(Rejected)

    nursery.start_soon(keep_alive, theirs)
    if proposes:
        nursery.start_soon(propose)
    with pytest.raises(RequestTimeout):
        await member.run()
    most = 2 * (times.window + 2 * times.attempt(8, 2))
    assert times.window < trio.current_time() < most + times.stall


async def test_plans_without_end_are_not_followed_and_those_that_were_are_forgotten(stage, autojump_clock):
    followed = [weakref.ref(stage.attempt)]
    stage.attempt = None
    for attempt in range(PLAN.attempt + 1, PLAN.attempt + 100):
        plan = attrs.evolve(PLAN, attempt=attempt)
        await stage.coordinator.send(Propose(plan))
        await trio.testing.wait_all_tasks_blocked()
        if stage.done.is_set():
            break
        assert await stage.coordinator.receive(Accepted) == Accepted(plan.ballot)
        followed.append(weakref.ref(stage.begun.pop()))
    assert stage.done.is_set()
    assert 2 < len(followed) < 50
    assert not [one for one in followed[:-1] if one() is not None]


async def test_a_plan_that_there_is_no_memory_for_is_refused_and_the_next_one_followed(stage, autojump_clock):
    too_large = attrs.evolve(PLAN, attempt=TOO_LARGE)
    await stage.coordinator.send(Propose(too_large))
    assert await stage.coordinator.receive(Rejected) == Rejected(too_large.ballot, too_large.ballot, "no memory")
    following = attrs.evolve(PLAN, attempt=TOO_LARGE + 1)
    await stage.coordinator.send(Propose(following))
    assert await stage.coordinator.receive(Accepted) == Accepted(following.ballot)

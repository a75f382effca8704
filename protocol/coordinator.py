"""The coordination of one round by one peer, without any input or output.

Facts go in (`ready`, `gone`, `accepted`, `failed`, …), `poll` decides and returns what to send. Every peer that is
asked keeps a `Coordinator` for the round, but it only acts while the caller says that it leads; until then it queues
those who are ready.

Phases:
- *collecting*: from the first ready peer until all live ones are, or the grace time is over;
- *running*: a plan is out. It ends well when every member holds the result. When a member is lost or reports a failure
  before anybody holds the result, the others halt and say which parts they hold, and the next plan goes out without the
  culprit and salvages these parts (but if all others are lost at once, or we were away, we collect again); when
  somebody holds the result already, the plan is called off and the others fetch it. Every attempt has a time limit and
  every failed one costs a member, so a round ends;
- *over*: `holder` names a peer with the result, and whoever is still here is sent there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from typing import Literal

import attrs
from attrs.validators import ge, gt

from protocol.candidates import Candidate, believed, brought, kind_of, most_common, next_attempt, total_length
from protocol.codecs import block_of, encoded_size
from protocol.collective import Window
from protocol.identity import PeerId
from protocol.kinds import Brought, Kind, agreed
from protocol.plan import (
    MAX_LENGTH,
    MAX_WEIGHT,
    NO_BALLOT,
    NO_DIGEST,
    Ballot,
    Plan,
    coordinators,
    load,
)
from protocol.planner import Lines, lines_of, ring_order, scheduled
from protocol.round_messages import MAX_MISFITS, Ahead, CallOff, Forked, Halt, Misfits, Propose, Redirect
from protocol.salvage import Holding, salvage
from protocol.transport import Address
from protocol.wire import Message


@attrs.frozen(kw_only=True)
class RoundTimes:
    """How long rounds wait for what, in seconds."""

    grace: float = attrs.field(default=10.0, validator=gt(0))
    """How long the first ready peer waits for the others."""
    quorum: int = attrs.field(default=1, validator=ge(1))
    """As soon as so many are ready, they wait for `late` at most; all who are there if they are fewer."""
    late: float = attrs.field(default=math.inf, validator=gt(0))
    """How long a quorum waits for the others; together with the time before, no longer than the grace time."""
    slack: float = attrs.field(default=2.0, validator=ge(0))
    """What the coordinator waits beyond the grace that it announces: time to compute and to deliver a contribution."""
    stall: float = attrs.field(default=10.0, validator=gt(0))
    """A peer from which nothing came for so long, although it should have, counts as failed."""
    quiet: float = attrs.field(default=3.0, validator=gt(0))
    """The same while data is carried that usually comes quickly; what has come so far decides between the two, see
    `protocol.silence`."""
    settle: float = attrs.field(default=1.0, validator=gt(0))
    """How long further reports are gathered after the first one that an attempt failed. More than a round trip."""
    poll: float = attrs.field(default=0.5, validator=gt(0))
    """How often the membership is looked at while a round is being collected."""
    slowest: float = attrs.field(default=65536.0, validator=gt(0))
    """Bytes per second below which a link is not worth waiting for; bounds the time of an attempt."""
    hop: float = attrs.field(default=0.5, validator=gt(0))
    """Longest latency of one step around the ring that is worth waiting for."""
    keep: int = attrs.field(default=3, validator=ge(1))
    """Results that are kept for peers that missed them."""
    patient: bool = True
    """Whether members that are behind are waited for beyond the grace time."""
    steady: float = attrs.field(default=0.0, validator=ge(0))
    """The members of the last round are waited for, also beyond the grace time, so many times as long as it took the
    first of them to be ready again."""

    def within(self, window: Window) -> RoundTimes:
        """The same for operations with a window: nobody hurries to be in time, so nothing comes after it closes."""
        return attrs.evolve(
            self,
            grace=max(self.grace, window.grace),
            quorum=window.quorum,
            late=window.grace,
            slack=0.0,
            keep=window.keep,
            patient=False,
            steady=0.0,
        )

    def after(self, pause: float) -> RoundTimes:
        """The same if it took so many seconds from the last round to this one, for those who wait for its members."""
        return attrs.evolve(self, grace=max(self.grace, self.steady * max(pause, 0.0)))

    @property
    def window(self) -> float:
        """For how long a window is open for those who are not ready."""
        return self.grace + self.slack

    def transfer(self, length: int) -> float:
        """Longest that a transfer of `length` fp32 elements may take."""
        return self.stall + 4 * length / self.slowest

    def attempt(self, length: int, members: int) -> float:
        """Longest that a member works on one attempt: each element comes by twice, in 2(n-1) steps."""
        return self.stall + self.transfer(2 * length) + 2 * members * self.hop


@attrs.frozen
class View:
    """What the coordinating peer knows at the moment of a decision."""

    expected: frozenset[PeerId]
    """Connected members that this round may bring together, ourselves included: who is not ready is waited for."""
    arriving: frozenset[PeerId]
    """Peers that may be among those in a moment: they are waited for as well, and not asked yet."""
    leading: bool
    """Whether it is up to us to coordinate."""
    rank: int
    base: bytes | None
    """Digest of our own state before the round; None if we are not there yet."""
    woken: bool = False
    """This process was stopped, and went on a moment ago."""
    patience: float = 0.0
    """Seconds that a round goes on for members that say they are `late`: as long as the last one took to reduce."""
    regulars: frozenset[PeerId] = frozenset()
    """The members of the last round."""
    since: float = math.inf
    """When that was over here."""


@attrs.frozen
class Send:
    """A message for a ready peer."""

    peer: PeerId
    message: Message


@attrs.frozen
class Announce:
    """A live peer that is not ready is to be told with `RoundOpen`."""

    peer: PeerId


@attrs.frozen
class Aborted:
    """An attempt failed."""

    plan: Plan
    reason: str


Action = Send | Announce | Aborted
Answer = Literal["asked", "noted", "late", "led", "gone"]


@attrs.frozen
class _Report:
    suspect: PeerId
    progress: int


class Coordinator:
    """See the module's docstring. Times are the caller's, in seconds, and only compared with each other.

    Args:
        fixed: Whether the run says what its rounds are about, so that whoever brings something else than we do lies,
            and is passed over. Else what most bring is right, and the others are told that they do not fit.
    """

    def __init__(
        self,
        *,
        run: bytes,
        tag: str,
        revision: int,
        peer: PeerId,
        times: RoundTimes,
        max_weight: float = MAX_WEIGHT,
        fixed: bool = True,
    ) -> None:
        self._run, self._tag, self._revision, self._peer, self._times = run, tag, revision, peer, times
        self._max_weight, self._fixed = max_weight, fixed
        self._actions: list[Action] = []
        self._candidates: dict[PeerId, Candidate] = {}
        self._attempt = 0  # the last one
        self.plan: Plan | None = None
        self.closes: float | None = None
        """When the window closes; None before it opens."""
        self.base = NO_DIGEST
        """Digest of the state that the candidates build on, once the window is open."""
        self.holder: PeerId | None = None
        """Set when the round is over: a peer that holds its result."""
        self._reset()

    def _reset(self) -> None:
        self.plan = self.closes = self.holder = None
        self._enough = False  # are ready, as far as we knew when we last looked
        self._blamed: set[PeerId] = set()
        self._alone = False  # we have lost all others once, or were away
        self._accusers: set[PeerId] = set()  # those who were blamed only because they accused us
        self._answers: dict[PeerId, Answer] = {}
        self._refusals: Counter[PeerId] = Counter()
        self._rival: PeerId | None = None
        self._kind: Kind | None = None  # what the round is about, once it is decided who fits and who does not
        self._fitting: list[Brought] = []  # then
        self._begin_attempt(0.0)

    def _begin_attempt(self, limit: float) -> None:
        self._accepted: set[PeerId] = set()
        self._holders: set[PeerId] = set()
        self._refused: set[PeerId] = set()
        self._reports: dict[PeerId, _Report] = {}
        self._settles: float | None = None
        self._limit = limit
        self._halts: float | None = None  # until when we wait for members to say what they have of a failed attempt
        self._halted: set[PeerId] = set()
        self._lost: set[PeerId] = set()  # since the attempt has failed: whoever comes back was lost all the same

    # Facts.

    @property
    def candidates(self) -> frozenset[PeerId]:
        """Those who are ready and have not been sent away."""
        return frozenset(self._candidates)

    @property
    def collecting(self) -> bool:
        """Whether the window is open."""
        return self.closes is not None and self.plan is None and self.holder is None

    @property
    def load(self) -> int:
        """What the plan that is out takes, see `Plan.load`, or else one for all who are ready."""
        if self.plan is not None:
            return self.plan.load
        loads = [load(candidate.operation, candidate.length) for candidate in self._candidates.values()]
        gathering = any(candidate.operation == "gather" for candidate in self._candidates.values())
        # Whoever says what it brings, a message has to be able to say so to all others.
        return min(sum(loads) if gathering else max(loads, default=0), MAX_LENGTH)

    def ready(self, peer: PeerId, candidate: Candidate, heard: Ballot) -> None:
        """A peer is ready, and has accepted no higher ballot than `heard`: if none at all, it can hold nothing."""
        members = self.plan.members if self.plan is not None and peer in self._candidates else ()
        if peer in members and len(members) > 1:
            self._refuse(peer)  # it comes anew, so it has left what it was doing, and the others wait for it
        holdings = () if heard == NO_BALLOT else candidate.holdings
        self._candidates[peer] = attrs.evolve(candidate, holdings=holdings, promised=heard.attempt)

    def gone(self, peer: PeerId) -> None:
        """A ready peer's stream has ended."""
        self._candidates.pop(peer, None)

    def answered(self, peer: PeerId, answer: Answer) -> None:
        """What came of an `Announce`: noted, late, led by another coordinator (we wait for it), or gone (we do not)."""
        if peer in self._answers:
            self._answers[peer] = answer

    def accepted(self, peer: PeerId, ballot: Ballot) -> None:
        if self.plan is not None and ballot == self.plan.ballot:
            self._accepted.add(peer)
            self._promised(peer, ballot)

    def rejected(self, peer: PeerId, ballot: Ballot, promised: Ballot) -> None:
        self._promised(peer, promised)
        if self.plan is not None and ballot == self.plan.ballot:
            self._refuse(peer)

    def _refuse(self, peer: PeerId) -> None:
        self._refused.add(peer)
        self._refusals[peer] += 1

    def _promised(self, peer: PeerId, ballot: Ballot) -> None:
        """Our attempts have to go past this one if that peer is to take part."""
        if peer in self._candidates:
            self._candidates[peer] = attrs.evolve(self._candidates[peer], promised=ballot.attempt)

    def failed(self, peer: PeerId, ballot: Ballot, suspect: PeerId, progress: int, now: float) -> None:
        """A member cannot go on, and blames a neighbour."""
        plan = self.plan
        if plan is None or ballot != plan.ballot or peer not in plan.members or suspect not in plan.members:
            return
        self._reports.setdefault(peer, _Report(suspect, progress))
        if self._settles is None:
            self._settles = now + self._times.settle

    def halted(self, peer: PeerId, ballot: Ballot, holdings: tuple[Holding, ...]) -> None:
        """A member has stopped, and has these parts."""
        if self.plan is not None and ballot == self.plan.ballot and peer in self._candidates:
            self._halted.add(peer)
            self._candidates[peer] = attrs.evolve(self._candidates[peer], holdings=holdings)

    def completed(self, peer: PeerId, ballot: Ballot, plan_id: bytes) -> None:
        """A member holds the complete result of a plan, which need not be the latest."""
        self._candidates.pop(peer, None)
        plan = self.plan
        if plan is None:
            self._rival = peer
        elif ballot == plan.ballot:
            if plan_id == plan.id:
                self._holders.add(peer)
        elif ballot < plan.ballot and peer in plan.members:
            self._rival = peer  # the plan that is out can never complete, see protocol.ballots

    def finished_elsewhere(self, holder: PeerId) -> None:
        """Some peer has the result of this round; nothing is to be done any more unless a plan is out."""
        if self.plan is None:
            self._rival = holder

    def reopen(self) -> None:
        """The holder of the result is lost, and the result with it: the round begins again."""
        self._reset()

    def step_down(self, leader: PeerId, addresses: tuple[Address, ...]) -> bool:
        """Another peer leads: those who can reach it are sent there. False when it is too late for that.

        We go there in any case: whatever we had tried when we got ready, by now we do not take that peer for lost.
        """
        if self.plan is not None or self.holder is not None:
            return False
        for peer, candidate in tuple(self._candidates.items()):
            if peer != leader and (peer == self._peer or leader not in candidate.tried):
                self._dismiss(peer, Redirect(leader, addresses))
        self.closes = None
        self._answers.clear()
        return True

    # Decisions.

    @property
    def deadline(self) -> float:
        """When `poll` is due even if nothing happens."""
        if self.holder is not None:
            return float("inf")
        if self.plan is not None:
            return min(time for time in (self._limit, self._settles, self._halts) if time is not None)
        return float("inf") if self.closes is None else self.closes

    def poll(self, now: float, view: View) -> list[Action]:
        """Decides on all that is known, and returns what is to be done about it, in order."""
        if self.holder is None:
            if self._rival is not None:
                self._finish(self._rival)
            elif self.plan is not None:
                self._supervise(self.plan, now, view)
            elif view.leading:
                self._collect(now, view)
        if self.holder is not None:
            self._send_away_late(self.holder)
        elif self._kind is not None:
            # Who makes another call is late, and at another point of its program: it may fit the next operation.
            self._send_away_misfits(only=self._kind.call)
        actions, self._actions = self._actions, []
        return actions

    def _collect(self, now: float, view: View) -> None:
        fit = self._fit(view)
        if not fit and self._candidates and self._blamed:
            self._blamed = set()  # there is nobody else: to do without them means to do nothing for ever
            fit = self._fit(view)
        if not fit:
            self.closes = None
            return
        if self.closes is None:
            self.closes, self._enough = now + self._times.grace + self._times.slack, False
        if len(fit) >= self._times.quorum and not self._enough:
            self.closes, self._enough = min(self.closes, now + self._times.late + self._times.slack), True
        for peer in [peer for peer in view.arriving if self._answers.get(peer) == "gone"]:
            del self._answers[peer]  # only its connection was: it is asked again when it is back
        here = fit.keys() if self._fixed else self._candidates.keys()
        awaited = {peer for peer in view.expected - here - self._blamed if self._answers.get(peer) != "gone"}
        for peer in sorted(awaited - self._answers.keys() - {self._peer}):
            self._answers[peer] = "asked"
            self._actions.append(Announce(peer))
        awaited |= view.arriving - here - self._blamed
        if not awaited or now >= self.closes + self._extension(awaited, fit, view):
            self._propose(now, view)

    def _extension(self, awaited: set[PeerId], fit: dict[PeerId, Candidate], view: View) -> float:
        """Seconds that the window stays open beyond the grace time for those who cannot be quicker."""
        answers = {self._answers.get(peer) for peer in awaited}
        times, extension = self._times, 0.0
        if "led" in answers:
            kind = next(iter(fit.values())).kind
            extension = times.attempt(load(kind.operation, total_length(fit, kind)), len(view.expected))
        elif times.patient and ("late" in answers or (self._peer in awaited and view.base is None)):
            extension = view.patience
        if "asked" in answers and math.isfinite(times.late):  # it may have the result, and a window may be very short
            extension = max(extension, times.stall)
        if awaited & view.regulars and self.closes is not None:
            pause = self.closes - times.window - view.since
            extension = max(extension, times.after(pause).window - times.window)
        return extension

    def _fit(self, view: View) -> dict[PeerId, Candidate]:
        """The candidates that can be in one plan. Those on another branch are sent away, with our digest."""
        if not self._candidates:
            return {}
        base = view.base if view.base is not None else most_common(c.base for c in self._candidates.values())
        self.base = base
        for peer, candidate in tuple(self._candidates.items()):
            if candidate.base != base:
                self._dismiss(peer, Forked(base))
        fit = {peer: candidate for peer, candidate in self._candidates.items() if peer not in self._blamed}
        if not fit:
            return {}
        kind = self._kind or kind_of(fit, self._peer, fixed=self._fixed)
        return {peer: candidate for peer, candidate in fit.items() if candidate.kind == kind}

    def _propose(self, now: float, view: View) -> None:
        previous = self.plan
        fit = self._fit(view)
        attempt = next_attempt(fit.values(), self._attempt)
        if attempt is None:
            self._release(previous, fit)
            self._reset()  # nobody is left to blame or to plan for: whoever comes next starts afresh
            return
        if not self._fixed and self._kind is None and not self._decide():
            return
        self._blamed |= {peer for peer in fit if not fit[peer].follows(attempt)}
        fit = {peer: candidate for peer, candidate in fit.items() if candidate.follows(attempt)}
        kind = next(iter(fit.values())).kind
        operation, length = kind.operation, total_length(fit, kind)
        lines = self._lines(fit, kind, length)
        members = lines.members
        holdings = believed(fit, members, self._refusals) if operation == "reduce" else {}
        sources, salvaged = salvage(members, holdings, length, self._max_weight, block_of(kind.codec))
        self._attempt = attempt
        simplest = Plan(
            run=self._run,
            tag=self._tag,
            revision=self._revision,
            base=self.base,
            attempt=attempt,
            rank=view.rank,
            coordinator=self._peer,
            members=members,
            weights=tuple(fit[peer].weight for peer in members),
            length=length,
            codec=kind.codec,
            sources=sources,
            salvaged=salvaged,
            operation=operation,
            sizes=tuple(fit[peer].length for peer in members) if operation == "gather" else (),
            signatures=tuple(signature for peer in members if (signature := fit[peer].signature) is not None),
        )
        self.plan = plan = scheduled(simplest, lines)
        # Members notice stalls first; the limit is for those who notice nothing.
        self._begin_attempt(now + self._times.attempt(plan.load, len(members)) + self._times.stall + self._times.settle)
        for peer in members:
            self._actions.append(Send(peer, Propose(plan)))
            # Whoever accepts keeps nothing that the plan does not salvage.
            self._candidates[peer] = attrs.evolve(self._candidates[peer], holdings=())
        self._release(previous, fit)

    def _decide(self) -> bool:
        """Settles for all attempts what the round is about, and sends the others away. False: that is everybody."""
        possible = {peer: candidate for peer, candidate in self._candidates.items() if peer not in self._blamed}
        own = possible[self._peer].kind if self._peer in possible else None
        self._kind = agreed(brought(possible), own)
        self._fitting = [each for each in brought(possible) if each.kind == self._kind]
        self._send_away_misfits()
        if self._kind is None:
            self._reset()
            return False
        return True

    def _send_away_misfits(self, *, only: str | None = None) -> None:
        """Tells those who bring something else, all of them or those who make this call."""
        kinds = {peer: candidate.kind for peer, candidate in self._candidates.items()}
        misfits = {peer: kind for peer, kind in kinds.items() if kind != self._kind and only in (None, kind.call)}
        known = {each.peer: each for each in (*self._fitting, *brought(self._candidates))} if misfits else {}
        for peer, kind in misfits.items():
            others = [each for each in known.values() if each.kind != kind]
            self._dismiss(peer, Misfits(tuple(others[:MAX_MISFITS])))

    def _lines(self, fit: dict[PeerId, Candidate], kind: Kind, length: int) -> Lines:
        """The lines of the candidates, in the order in which they make the fastest ring.

        Where no order is better than others, it stays the same: connections that have carried data know their way.
        """
        members = coordinators(self._run, 0, fit, tag=self._tag)
        lines = lines_of(members, {peer: fit[peer].rates for peer in members})
        nbytes = encoded_size(kind.codec, length) if kind.operation == "reduce" else length / 2
        return lines.reordered(ring_order(lines, nbytes))

    def _release(self, previous: Plan | None, fit: Collection[PeerId]) -> None:
        """Tells the members of the last attempt that are not in the next one to give it up."""
        if previous is not None:
            for peer in previous.members:
                if peer in self._candidates and peer not in fit:
                    self._actions.append(Send(peer, CallOff(previous.ballot, None)))

    def _supervise(self, plan: Plan, now: float, view: View) -> None:
        waiting = set(plan.members) - self._holders
        if not waiting:
            self._finish(min(self._holders))
            return
        if self._halts is not None:
            self._go_on(plan, now, view)
            return
        lost = waiting - self._candidates.keys()
        settled = self._settles is not None and now >= self._settles
        late = now >= self._limit
        if not (lost or self._refused or settled or late):
            return
        if self._holders:
            self._finish(min(self._holders))
            return
        if lost:
            culprits, reason = lost, "lost"
        elif self._refused:
            # A second chance for the attempt number to go past what they have promised to others.
            culprits, reason = {peer for peer in self._refused if self._refusals[peer] > 2}, "refused the plan"
        elif settled:
            culprits, reason = self._culprits(plan), "failed in the ring"
        else:
            culprits = waiting - self._accepted - {self._peer} or waiting - {self._peer} or waiting
            reason = "out of time"
        self._blamed |= culprits
        names = ", ".join(sorted(peer.short for peer in culprits or self._refused))
        self._actions.append(Aborted(plan, f"{names} {reason}"))
        self._halts = now + self._times.settle
        for peer in self._left(plan):
            self._actions.append(Send(peer, Halt(plan.ballot)))
        self._go_on(plan, now, view)

    def _left(self, plan: Plan) -> set[PeerId]:
        """The members of a failed attempt that may be in the next one."""
        return (set(plan.members) & self._candidates.keys()) - self._blamed

    def _go_on(self, plan: Plan, now: float, view: View) -> None:
        """After a failed attempt, once it is known what the members have of it."""
        others = set(plan.members) - {self._peer}
        self._lost |= others - self._candidates.keys()
        if self._holders:
            self._finish(min(self._holders))
        elif now < (self._halts or 0.0) and self._left(plan) - self._halted:
            pass
        elif others and (view.woken or self._lost == others) and not self._alone:
            # Whoever loses everybody has perhaps been away itself, as whoever has been away may have lost some: it
            # opens the window again, once a round. Connections that broke meanwhile are found broken one by one.
            blamed = self._blamed - set(plan.members)
            self._reset()
            self._blamed, self._alone = blamed, True
            self._collect(now, view)
        else:
            self._propose(now, view)

    def _culprits(self, plan: Plan) -> set[PeerId]:
        """Who is at the root of the reports.

        One stuck member starves the whole ring, so that everybody blames its left neighbour in the end. The root is
        blamed by others but has no report of its own, or has not even accepted; if several or none are like that, it
        is the one whose accuser starved first, that is, has received least.

        If it is us, we take it for a bad link, and the accuser has to go: one end of a broken link must, or it would
        break every attempt. If then another member accuses us, it is us after all.
        """
        least: dict[PeerId, tuple[int, int, PeerId]] = {}
        for accuser, report in self._reports.items():
            key = (report.progress, plan.members.index(accuser), accuser)
            least[report.suspect] = min(key, least.get(report.suspect, key))
        suspects = (
            {peer for peer in least if peer not in self._accepted}
            or {peer for peer in least if peer not in self._reports}
            or set(least)
        )
        root = min(suspects, key=lambda peer: least[peer])
        if root != self._peer:
            return {root}
        if self._accusers:
            self._blamed -= self._accusers
            return {self._peer}
        self._accusers = {least[root][2]}
        return set(self._accusers)

    def _finish(self, holder: PeerId) -> None:
        self.holder = holder
        if self.plan is None:
            return
        for peer in self.plan.members:
            if peer in self._candidates:
                self._actions.append(Send(peer, CallOff(self.plan.ballot, holder)))

    def _send_away_late(self, holder: PeerId) -> None:
        members = self.plan.members if self.plan is not None else ()
        for peer in tuple(self._candidates):
            if peer not in members:
                self._dismiss(peer, Ahead(self._revision, holder))

    def _dismiss(self, peer: PeerId, message: Message) -> None:
        self._candidates.pop(peer, None)
        self._actions.append(Send(peer, message))

"""One round as one peer sees it: who coordinates it, and the coordinating if it is this peer.

The best placed live member coordinates (see `protocol.plan.coordinators`). Peers see different members, so the first
choice of two peers may differ; these rules bring them together:
- A peer that is not better placed sends a member on to whom it takes for the coordinator, unless the member has tried.
- A coordinator announces itself to live peers that are not ready. One that takes part under a better placed coordinator
  says so (`Led`); the announcer then steps down and sends its members there. If it cannot reach that coordinator, it
  waits until the round is finished there, and its members fetch the result. Waiting goes from worse to better placed
  coordinators only, so it never goes round in circles.
- Once a plan is out, nobody steps down: ballots decide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

import trio

from protocol.ballots import Acceptor
from protocol.candidates import Candidate
from protocol.coordinator import Aborted, Action, Announce, Coordinator, RoundTimes, Send, View
from protocol.endpoint import Endpoint
from protocol.errors import ProtocolError, ShoalError
from protocol.identity import PeerId
from protocol.plan import Plan, coordinators
from protocol.roster import Roster
from protocol.round_messages import (
    MAX_ADDRESSES,
    Accepted,
    Ahead,
    Completed,
    Failed,
    Halted,
    Late,
    Led,
    Noted,
    Ready,
    Redirect,
    Rejected,
    RoundOpen,
)
from protocol.sessions import SOON, Line, Session


class Leadership:
    """One round, from the first that is heard of it until everybody here is done with it.

    Args:
        revision: The revision that the round makes.
        max_weight: The most that one peer's values may count.
        fixed: Whether the run says what its rounds are about; see `Coordinator`.
        spawn: Starts a task of the round; does nothing once everything is being shut down.
        roster: Who can take part.
        patience: How long a round waits for members that are late; see `View`.
        regulars: The members of the last round, and when that was over here.
        base: The digest of our own state before the round; None while we are not there yet.
        notify: Called when the round's window opens, or turns out to close earlier.
        aborted: Called when an attempt that we coordinate fails, with the reason.
    """

    def __init__(
        self,
        revision: int,
        *,
        endpoint: Endpoint,
        run: bytes,
        tag: str,
        times: RoundTimes,
        max_weight: float,
        fixed: bool,
        spawn: Callable[..., None],
        roster: Roster,
        patience: Callable[[], float],
        regulars: Callable[[], tuple[frozenset[PeerId], float]],
        base: Callable[[], bytes | None],
        notify: Callable[[], None],
        aborted: Callable[[Plan, str], None],
    ) -> None:
        self.revision = revision
        self._endpoint, self._run, self._tag, self._times = endpoint, run, tag, times
        self._peer = endpoint.peer_id
        self._spawn, self._roster = spawn, roster
        self._patience, self._regulars, self._base = patience, regulars, base
        self._notify, self._aborted = notify, aborted
        self.acceptor = Acceptor(self._peer)
        self.coordinator = Coordinator(
            run=run, tag=tag, revision=revision, peer=self._peer, times=times, max_weight=max_weight, fixed=fixed
        )
        self.opened: float | None = None
        """Until when peers that are not ready may still come, on trio's clock; None while nobody is ready."""
        self.attending: PeerId | None = None
        """The coordinator that we take part under now; it may be ourselves."""
        self.attendance = trio.CancelScope()
        """Cancelled to leave that coordinator for another one."""
        self._hint: PeerId | None = None  # who has told us that it coordinates
        self._hint_ends = 0.0
        self._lost: set[PeerId] = set()
        self._losses: Counter[PeerId] = Counter()
        self._sessions: dict[PeerId, Session] = {}
        self._changed = trio.Event()
        self._driven = False

    # Who coordinates.

    @property
    def tried(self) -> frozenset[PeerId]:
        """Peers that could not be reached, or were lost, in this round."""
        return frozenset(self._lost)

    def next_leader(self) -> PeerId:
        """The peer to take part under; in the end ourselves."""
        if self._coordinating or self._hinted == self._peer:
            return self._peer
        leader = self._hinted or self._best(frozenset())
        # If it waits here, and we went there, neither would lead.
        return self._peer if leader in self._sessions and self._closer(self._peer, leader) else leader

    def crossed(self, peer: PeerId) -> None:
        """A ready peer comes to us. If we have gone to that very peer, the better placed one of us has to lead."""
        if self.attending == peer and self.acceptor.plan is None and self._closer(self._peer, peer):
            self.follow(self._peer)
            self.attendance.cancel()

    def _elsewhere(self, peer: PeerId, tried: Collection[PeerId]) -> PeerId | None:
        """Where to send a ready peer; None if it may stay."""
        if self.attending not in (None, self._peer):
            target = self.attending
        elif self.attending == self._peer or self._coordinating:
            return None
        else:
            target = self._hinted or self._best(frozenset(tried))
        return None if target in (None, self._peer, peer) or target in tried else target

    def final_answer(self, ready: Ready, peer: PeerId) -> Ahead | Redirect | None:
        """Why a ready peer cannot stay here, or None."""
        holder = self.coordinator.holder
        if holder is not None:
            if holder in self._roster.partners():
                return Ahead(ready.revision, holder)
            self.coordinator.reopen()
        target = self._elsewhere(peer, ready.tried) if peer != self._peer else None
        return None if target is None else Redirect(target, self._endpoint.addresses(target)[:MAX_ADDRESSES])

    def follow(self, leader: PeerId) -> None:
        """We have been told that this peer coordinates."""
        self._hint = leader
        self._hint_ends = trio.current_time() + self._times.grace + self._times.stall

    def lose(self, peer: PeerId) -> None:
        """A coordinator cannot be reached, or is stuck."""
        if peer != self._peer:
            self._lost.add(peer)
            self._losses[peer] += 1

    def close(self) -> None:
        """Sends everybody away: the round is of no interest here any more."""
        for session in self._sessions.values():
            session.end()

    def finished(self) -> None:
        """The round is complete here, by whatever way: those who wait at this peer are to know."""
        self.coordinator.finished_elsewhere(self._peer)
        self.wake()

    def announced(self, sender: PeerId, remaining: float) -> Noted | Led | Ahead:
        """Answers a coordinator that waits `remaining` seconds for us; we go to it if it is better placed than ours."""
        if self.coordinator.holder is not None:
            return Ahead(self.revision, self.coordinator.holder)
        self._open_until(trio.current_time() + remaining)
        self._forgive(sender)
        leader = self._peer if self._coordinating else self.attending
        if leader is None:
            if sender not in self._lost:
                self.follow(sender)
            return Noted()
        busy = self.acceptor.plan is not None or self.coordinator.plan is not None
        if leader != sender and (busy or self._closer(leader, sender)):
            return Led(leader, self._endpoint.addresses(leader)[:MAX_ADDRESSES])
        if leader != sender and sender not in self._lost:
            if leader == self._peer:
                self._step_down(sender)
            else:
                self.follow(sender)
                self.attendance.cancel()
        return Noted()

    @property
    def _coordinating(self) -> bool:
        coordinator = self.coordinator
        return coordinator.holder is None and (coordinator.closes is not None or coordinator.plan is not None)

    @property
    def _hinted(self) -> PeerId | None:
        """Who coordinates as far as we have been told, if that is still to be believed.

        It need not be a candidate in our own view: views differ, and who is told and does not go there makes a second
        round beside the first.
        """
        hint = self._hint
        if hint is None or hint in self._lost or trio.current_time() >= self._hint_ends:
            return None
        return hint if hint == self._peer or self._roster.knows(hint) else None

    def _live(self) -> frozenset[PeerId]:
        return (frozenset(self._roster.partners()) | {self._peer}) - self._lost

    def _best(self, without: frozenset[PeerId]) -> PeerId:
        live = (self._live() - without) | {self._peer}
        return coordinators(self._run, self.revision, live, tag=self._tag)[0]

    def _closer(self, one: PeerId, other: PeerId) -> bool:
        return coordinators(self._run, self.revision, (one, other), tag=self._tag)[0] == one

    def _forgive(self, peer: PeerId) -> None:
        """A lost peer has been in touch: it was a broken connection and no death. Once only, lest it goes on."""
        if self._losses[peer] <= 1:
            self._lost.discard(peer)

    def _step_down(self, leader: PeerId) -> bool:
        addresses = self._endpoint.addresses(leader)[:MAX_ADDRESSES]
        if not self.coordinator.step_down(leader, addresses):
            return False
        self.follow(leader)
        if self.attending == self._peer:
            # We are not sent there by ourselves if we have tried it before. It was not where we are yet, perhaps.
            self.attendance.cancel()
        self.wake()
        return True

    # Coordinating.

    def wake(self) -> None:
        """Something changed: decide anew."""
        self._changed.set()
        if not self._driven and self._sessions:
            self._driven = True
            self._spawn(self._drive)

    async def serve(self, ready: Ready, line: Line) -> None:
        """Coordinates for one ready member, until it holds the result, is sent elsewhere, or is lost.

        Raises:
            ProtocolError: It said something that is not allowed.
        """
        peer = line.peer
        session = Session(line, self._times.stall / 4, self._load)
        previous, self._sessions[peer] = self._sessions.get(peer), session
        if previous is not None:
            previous.end()
        candidate = Candidate(
            ready.weight,
            ready.length,
            ready.base,
            frozenset(ready.tried),
            ready.holdings,
            ready.operation,
            ready.signature,
            ready.rates,
            ready.codec,
            ready.terms,
            ready.late,
        )
        self.coordinator.ready(peer, candidate, ready.ballot)
        self.wake()
        try:
            await session.run(self._read)
        finally:
            if self._sessions.get(peer) is session:
                del self._sessions[peer]
                self.coordinator.gone(peer)
            self.wake()
        if isinstance(session.error, ProtocolError):
            raise session.error

    def _load(self) -> int:
        """What is going on, here or where we have gone ourselves."""
        following = self.acceptor.plan
        return max(self.coordinator.load, 0 if following is None else following.load)

    async def _read(self, session: Session) -> None:
        peer, coordinator = session.line.peer, self.coordinator
        while True:
            message = await session.line.receive(Accepted, Rejected, Failed, Halted, Completed)
            if self._sessions.get(peer) is not session:
                return
            match message:
                case Accepted(ballot):
                    coordinator.accepted(peer, ballot)
                case Rejected(ballot, promised):
                    coordinator.rejected(peer, ballot, promised)
                case Failed(ballot, suspect, progress):
                    coordinator.failed(peer, ballot, suspect, progress, trio.current_time())
                case Halted(ballot, holdings):
                    coordinator.halted(peer, ballot, holdings)
                case Completed(ballot, plan_id):
                    coordinator.completed(peer, ballot, plan_id)
                    return
            self.wake()

    async def _drive(self) -> None:
        """Lets the coordinator decide whenever something changed, until no member is left here."""
        try:
            while True:
                now = trio.current_time()
                self._changed = trio.Event()
                for action in self.coordinator.poll(now, self._view()):
                    self._perform(action)
                if self.coordinator.closes is not None:
                    self._open_until(self.coordinator.closes - self._times.slack)
                if not self._sessions:
                    return
                due = now + self._times.poll
                if now < self.coordinator.deadline < due:
                    due = self.coordinator.deadline
                with trio.move_on_at(due):
                    await self._changed.wait()
        finally:
            self._driven = False

    def _view(self) -> View:
        if self.attending is not None:
            leading = self.attending == self._peer
        else:
            leading = self._coordinating or (self._hinted or self._best(frozenset())) == self._peer
        everybody = frozenset(self._roster.partners()) | {self._peer}
        rank = coordinators(self._run, self.revision, everybody, tag=self._tag).index(self._peer)
        regulars, since = self._regulars()
        return View(
            expected=frozenset(self._roster.expected()) | everybody,
            arriving=frozenset(self._roster.arriving()),
            leading=leading,
            rank=rank,
            base=self._base(),
            woken=self._roster.woken(),
            patience=self._patience(),
            regulars=regulars,
            since=since,
        )

    def _perform(self, action: Action) -> None:
        match action:
            case Send(peer, message):
                if peer in self._sessions:
                    self._sessions[peer].put(message)
            case Announce(peer):
                self._spawn(self._announce, peer)
            case Aborted(plan, reason):
                self._aborted(plan, reason)

    async def _announce(self, peer: PeerId) -> None:
        """Tells a member that the window is open, and asks again until it is ready: it may have gone to another one."""
        coordinator, times = self.coordinator, self._times
        await trio.sleep(min(SOON, times.poll))
        while coordinator.closes is not None and coordinator.collecting and peer not in coordinator.candidates:
            remaining = max(0.0, coordinator.closes - times.slack - trio.current_time())
            question = RoundOpen(self._run, self._tag, self.revision, coordinator.base, remaining)
            try:
                answer = await self._endpoint.request(peer, question, (Noted, Late, Led, Ahead), timeout=times.stall)
            except ShoalError:
                coordinator.answered(peer, "gone")
                self.wake()
                return
            match answer:
                case Noted():
                    coordinator.answered(peer, "noted")
                    self.wake()
                case Late():
                    coordinator.answered(peer, "late")
                    self.wake()
                case Ahead(revision, holder):
                    if revision >= self.revision and holder != self._peer:
                        coordinator.finished_elsewhere(holder)
                    else:
                        coordinator.answered(peer, "gone")
                    self.wake()
                    return
                case Led(leader, addresses):
                    if leader == self._peer:
                        coordinator.answered(peer, "noted")
                        return  # it is coming
                    self._endpoint.learn(leader, *addresses)
                    if leader == peer:
                        self._forgive(peer)
                    if leader not in self._lost and self._step_down(leader):
                        return
                    coordinator.answered(peer, "led")
                    self.wake()
            await trio.sleep(times.poll)

    def _open_until(self, deadline: float) -> None:
        """Somebody says how long it waits. Who goes on first is right, and nobody waits longer than we would."""
        deadline = min(deadline, trio.current_time() + self._times.grace)
        if self.opened is None or deadline < self.opened:
            self.opened = deadline
            self._notify()

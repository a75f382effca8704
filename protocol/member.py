"""A member's side of one round under one coordinator.

The member follows the plans that the coordinator sends, as `protocol.ballots` allows, carries each out until the next
one comes, and reports. It is done when it holds the result: from its own ring, or fetched from a peer that the
coordinator names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import attrs
import torch
import trio

from protocol.attempt import Attempt
from protocol.ballots import Acceptor, Offer, Refusal
from protocol.collective import Reduced
from protocol.coordinator import RoundTimes
from protocol.errors import Behind, Fork, Overloaded, PeerGone, ProtocolError, RequestTimeout, RoundAborted, ShoalError
from protocol.identity import PeerId
from protocol.kinds import Brought
from protocol.plan import MAX_JUMP, Ballot, Plan
from protocol.rates import Rates
from protocol.round_messages import (
    Accepted,
    Ahead,
    CallOff,
    Completed,
    Failed,
    Forked,
    Halt,
    Halted,
    Misfits,
    Propose,
    Queued,
    Ready,
    Redirect,
    Rejected,
)
from protocol.salvage import Holding
from protocol.sessions import Line
from protocol.silence import LEAST
from protocol.wire import Message

_Said: TypeAlias = Queued | Propose | Halt | CallOff | Redirect | Ahead | Forked | Misfits
_SAID = (Queued, Propose, Halt, CallOff, Redirect, Ahead, Forked, Misfits)


_PLANS = 16
"""Plans of one coordinator that a member follows, and two more for each peer that may be lost meanwhile."""


class Redirected(ShoalError):
    """Another peer coordinates the round."""

    def __init__(self, message: Redirect) -> None:
        super().__init__(f"{message.coordinator.short} coordinates the round")
        self.coordinator = message.coordinator
        self.addresses = message.addresses


class LeftOut(ShoalError):
    """A coordinator says that what we bring does not fit what others bring."""

    def __init__(self, coordinator: PeerId, brought: tuple[Brought, ...]) -> None:
        super().__init__(f"{coordinator.short} leaves us out")
        self.brought = brought


@attrs.define(eq=False, kw_only=True)
class Work:
    """What this peer brings to a round, and what the round has cost it so far, over all coordinators."""

    values: torch.Tensor
    offer: Offer
    started: float
    encoded: bytes | memoryview = b""
    """The values as the run's codec writes them; nothing for fp32, or without weight."""
    attempts: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    last: Attempt | None = None
    """The last attempt that was given up."""
    followed: set[bytes] = attrs.field(factory=set)
    """Ids of the plans that were accepted."""

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """What is reduced here by the attempts that were given up."""
        return () if self.last is None else self.last.holdings()

    def ready(self, promised: Ballot, tried: tuple[PeerId, ...], rates: Rates) -> Ready:
        """The message that takes us to a coordinator."""
        return Ready(
            run=self.offer.run,
            tag=self.offer.tag,
            revision=self.offer.revision,
            base=self.offer.base,
            weight=self.offer.weight,
            length=self.offer.length,
            ballot=promised,
            tried=tried,
            holdings=self.holdings,
            operation=self.offer.operation,
            signature=self.offer.signature,
            rates=rates,
            codec=self.offer.codec,
            terms=self.offer.terms,
            late=self.offer.late,
        )

    def count(self, transfer: Attempt) -> None:
        self.bytes_sent += transfer.bytes_sent
        self.bytes_received += transfer.bytes_received


class Member:
    """One stay with one coordinator.

    Args:
        line: The conversation with the coordinator, begun with `Ready`.
        work: Our contribution.
        acceptor: Our ballots for the round, kept over all coordinators.
        check: Says what is wrong with the signatures of a plan, or None.
        begin: Makes a transfer for a plan and starts it, in a task that outlives this object. Raises Overloaded if
            there is no memory for it.
        fetch: Fetches the result of the round from a peer; None if that peer cannot give it.
        keep: Told of the result as soon as it is complete.
        report: Told of attempts that began (no reason) and failed (with a reason).
        load: What is to be done, see `Plan.load`, as far as we know. This decides for how long we wait.
        most: What we believe if we are told that it is more.
        size: How many may take part.
        received: How many bytes have come from the coordinator in all: what it says may have to wait behind others.
    """

    def __init__(
        self,
        line: Line,
        work: Work,
        acceptor: Acceptor,
        times: RoundTimes,
        *,
        check: Callable[[Plan], Awaitable[str | None]],
        begin: Callable[[Plan], Attempt],
        fetch: Callable[[PeerId], Awaitable[Reduced | None]],
        keep: Callable[[Reduced], None],
        report: Callable[[Plan, str | None], None],
        load: int,
        most: int,
        size: int,
        received: Callable[[], int] = lambda: 0,
    ) -> None:
        self._line, self._work, self._acceptor, self._times = line, work, acceptor, times
        self._check, self._begin, self._fetch, self._keep, self._report = check, begin, fetch, keep, report
        self._load, self._most, self._size, self._received = load, most, size, received
        self._patience = 0.0
        self._transfer: Attempt | None = None
        self._reduced: Reduced | None = None
        self._error: ShoalError | None = None
        self._plans = 0
        self._sending = trio.Lock()

    async def run(self) -> Reduced:
        """Stays until the round is complete here.

        Raises:
            Redirected: Another peer coordinates.
            Behind: The round was finished without us.
            Fork: The coordinator builds on another state.
            LeftOut: The coordinator leaves us out.
            RoundAborted: The result could not be fetched from the peer that has it.
            ShoalError: The coordinator is lost, or stuck, or refuses.
        """
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                try:
                    await self._listen()
                except ShoalError as error:
                    self._error = error
                nursery.cancel_scope.cancel()
        finally:
            if self._reduced is None:
                self._drop("the coordinator is lost")
        if self._reduced is not None:
            return self._reduced
        raise self._error or PeerGone("the coordinator said nothing more")

    async def _listen(self) -> None:
        begun = news = trio.current_time()
        while True:
            message = await self._hear(self._deadline(begun, news))
            if isinstance(message, Queued):
                self._load = max(self._load, min(message.load, self._most))
                continue
            news = trio.current_time()
            match message:
                case Propose(plan):
                    await self._follow(plan)
                case Halt(ballot):
                    await self._halt(ballot)
                case CallOff():
                    await self._call_off(message)
                case Redirect():
                    raise Redirected(message)
                case Ahead(revision, holder):
                    await self._take_over(holder)
                    ours = self._work.offer.revision
                    raise Behind(holder, min(max(revision, ours), ours + MAX_JUMP))
                case Misfits(brought):
                    raise LeftOut(self._line.peer, brought)
                case Forked(base):
                    offer = self._work.offer
                    raise Fork(self._line.peer, offer.revision - 1, ours=offer.base, theirs=base)

    def _deadline(self, begun: float, news: float) -> float:
        """Until when we wait for something new, having begun then and heard something new then."""
        times = self._times
        # For news of a plan that is being carried out we wait as that one takes.
        patience = self._patience or times.window + times.attempt(self._load, self._size)
        # One plan after the other, in vain, is no better than none. A plan's load is twice the usual at most.
        return min(news + patience, begun + 2 * (times.window + 2 * times.attempt(2 * self._load, self._size)))

    async def _hear(self, deadline: float) -> _Said:
        """The next message. A coordinator that is stuck says nothing; one that goes on without news is no better."""
        while True:
            before, timeout = self._received(), min(self._times.stall, deadline - trio.current_time())
            try:
                return await self._line.receive(*_SAID, timeout=max(0.0, timeout))
            except RequestTimeout:
                if trio.current_time() >= deadline or self._received() - before < LEAST:
                    raise

    async def _follow(self, plan: Plan) -> None:
        holdings = self._work.holdings if self._transfer is None else self._transfer.holdings()
        unsigned = await self._check(plan)
        if unsigned is not None:
            refusal: Refusal | None = Refusal(unsigned, self._acceptor.promised)
        else:
            refusal = self._acceptor.accept(plan, self._work.offer, self._line.peer, holdings)
        if refusal is not None:
            await self._send(Rejected(plan.ballot, refusal.ballot, refusal.reason))
            return
        self._plans += 1
        if self._plans > _PLANS + 2 * self._size:
            raise ProtocolError(
                f"{self._line.peer.short} has made {self._plans} plans for one round, and none came to an end"
            )
        self._drop("another attempt")
        self._work.attempts += 1
        self._work.followed.add(plan.id)
        try:
            self._transfer = self._begin(plan)
        except Overloaded as error:
            self._acceptor.renounce(plan.ballot)
            await self._send(Rejected(plan.ballot, plan.ballot, str(error)))
            return
        self._report(plan, None)
        # So long the coordinator may work on it, and on collecting members anew if it fails.
        times = self._times
        limit = times.attempt(plan.load, len(plan.members)) + times.stall + times.settle
        self._patience = limit + times.window
        self._load = max(self._load, min(plan.load, self._most))
        self._nursery.start_soon(self._watch, self._transfer)
        await self._send(Accepted(plan.ballot))

    async def _halt(self, ballot: Ballot) -> None:
        if self._acceptor.completed:
            return  # the coordinator is about to learn that
        self._acceptor.renounce(ballot)
        if self._acceptor.plan is None:
            self._drop("the attempt has failed")
        await self._send(Halted(ballot, self._work.holdings))

    async def _call_off(self, message: CallOff) -> None:
        if self._acceptor.completed:
            return  # too late, and the coordinator is about to learn that
        self._acceptor.renounce(message.ballot)
        if self._acceptor.plan is None:
            self._drop("called off")
        if message.holder is None:
            return
        reduced = await self._fetch(message.holder)
        if self._acceptor.completed:
            return  # a higher ballot was not called off, and has come to its end meanwhile
        if reduced is None or reduced.plan.base != self._work.offer.base:
            raise RoundAborted(f"{message.holder.short} completed the round, but its result cannot be had")
        await self._adopt(reduced)

    async def _take_over(self, holder: PeerId) -> None:
        """The round is over. If that came of a plan that we have followed, we are among those who made the result."""
        reduced = await self._fetch(holder) if self._work.followed else None
        if reduced is not None and reduced.plan.id in self._work.followed and not self._acceptor.completed:
            await self._adopt(reduced)

    async def _adopt(self, reduced: Reduced) -> None:
        self._drop("the round is complete elsewhere")
        self._acceptor.adopt(reduced.plan)
        await self._conclude(reduced)

    async def _watch(self, transfer: Attempt) -> None:
        """Waits for the end of one attempt and tells the coordinator."""
        await transfer.settled.wait()
        plan = transfer.plan
        if transfer is not self._transfer:
            return
        if transfer.failure is not None:
            if transfer.failure.suspect is None:
                return  # others may know; the coordinator knows when the time is over
            with contextlib.suppress(ShoalError):  # the listening task will notice
                await self._send(Failed(plan.ballot, transfer.failure.suspect, transfer.segments))
        elif self._acceptor.complete(plan):
            self._work.count(transfer)
            reduced = Reduced(
                plan=plan,
                mean=transfer.mean,
                contributors=plan.contributors,
                attempts=self._work.attempts,
                bytes_sent=self._work.bytes_sent,
                bytes_received=self._work.bytes_received,
                seconds=trio.current_time() - self._work.started,
                weight=plan.weight,
            )
            await self._conclude(reduced)

    async def _conclude(self, reduced: Reduced) -> None:
        self._reduced = reduced
        self._keep(reduced)
        # The result is ours whether or not the coordinator still hears of it.
        with contextlib.suppress(ShoalError), trio.move_on_after(self._times.settle):
            await self._send(Completed(reduced.plan.ballot, reduced.plan.id), last=True)
        self._nursery.cancel_scope.cancel()

    def _drop(self, reason: str) -> None:
        """Gives up the attempt that is being carried out, if any."""
        transfer, self._transfer = self._transfer, None
        if transfer is None:
            return
        transfer.abort()
        self._acceptor.renounce(transfer.plan.ballot)
        self._work.last = transfer
        self._work.count(transfer)
        self._report(transfer.plan, transfer.failure.reason if transfer.failure is not None else reason)

    async def _send(self, message: Message, *, last: bool = False) -> None:
        async with self._sending:
            if self._reduced is None or last:  # else the last word is said, or about to be
                await self._line.send(message, last=last)

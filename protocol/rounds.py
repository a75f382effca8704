"""Rounds: how the members of a run reduce their values to one mean without a master.

`Rounds` is the one object that the rest of the program sees. A member calls `all_reduce` when it is ready for a round
and gets the mean over all members that were, whoever dies meanwhile; the parts are
- `plan`, `ballots`, `coordinator`, `ring`: what is decided and computed, without input or output;
- `member`: taking part under one coordinator; `leadership`: finding the coordinator, or being it;
- `transfer`: the ring on streams; `sessions`: the conversation between member and coordinator.

All peers that complete a round hold the same plan and the same bits, except for peers that a later plan excluded: see
`protocol.ballots` for the argument.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from functools import partial

import attrs
import torch
import trio

from protocol.agreement import Agreement
from protocol.attempt import Attempt
from protocol.attempts import Attempts
from protocol.ballots import Offer, unusable
from protocol.branch import Branch
from protocol.codecs import CodecName, NotFinite
from protocol.collective import Reduced
from protocol.contribution import Contributor
from protocol.coordinator import RoundTimes
from protocol.courtesy import Courtesy
from protocol.endpoint import Endpoint, Stream
from protocol.errors import Behind, Fork, ProtocolError, RequestRefused, RequestTimeout, RoundAborted, ShoalError
from protocol.handlers import Handler
from protocol.identity import PeerId
from protocol.kinds import NO_TERMS, Terms
from protocol.leadership import Leadership
from protocol.member import LeftOut, Member, Redirected, Work
from protocol.metering import Meter
from protocol.news import LOOKAHEAD, News
from protocol.pairs import Pairing
from protocol.plan import MAX_BLOCK, MAX_MEMBERS, MAX_REVISION, MAX_WEIGHT, NO_DIGEST, Operation, Plan, load
from protocol.results import Results
from protocol.roster import Roster
from protocol.round_events import RoundEvent, RoundStatistics, attempt_event
from protocol.round_messages import (
    MAX_TRIED,
    Ahead,
    Compare,
    FetchResult,
    Forked,
    Late,
    Noted,
    Ready,
    RingData,
    RoundOpen,
    Waiting,
)
from protocol.sessions import Line, local_line
from protocol.signatures import Signatures
from protocol.swap import Swap
from protocol.transfer import RingInbox
from protocol.watch import received
from protocol.wire import Message

__all__ = ["RoundEvent", "RoundStatistics", "Rounds"]

_MAX_REDIRECTS = 16


class Rounds:
    """The rounds of one run at one peer.

    Args:
        endpoint: Carries everything.
        run_id: 32 bytes.
        settings: How long to wait for what.
        roster: Who can take part.
        report: Called with each `RoundEvent`.
        tag: Tells concurrent collectives of one run apart.
        max_weight: The most that one peer's values may count.
        max_block: The most bytes that one peer's block may have in a gather.
        max_members: The most peers that take part in one round.
        admits: Whether a peer may contribute at all.
        courtesy: Told when an attempt is going on, so that others can let it go first.
        codec: How values look on the wire. Lossy ones keep what they leave out for the next round.
        fixed: Whether the run says what its rounds are about, so that whoever brings something else lies; see
            `Coordinator`. Else it is an error of those that are fewer.
        meter: Measures the lines; one for all that goes on at the endpoint.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        run_id: bytes,
        *,
        settings: RoundTimes,
        roster: Roster,
        report: Callable[[RoundEvent], None],
        tag: str = "",
        max_weight: float = MAX_WEIGHT,
        max_block: int = MAX_BLOCK,
        max_members: int = MAX_MEMBERS,
        admits: Callable[[PeerId], bool] = lambda peer: True,
        codec: CodecName = "fp32",
        fixed: bool = True,
        courtesy: Courtesy | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._endpoint, self._run, self._tag, self._times = endpoint, run_id, tag, settings
        self._roster, self._report = roster, report
        self._max_weight, self._max_block = max_weight, max_block
        self._signatures = Signatures(endpoint.identity, run_id, tag, max_members=max_members, admits=admits)
        self._codec, self._contributor, self._swapper = codec, Contributor(codec), Contributor(codec)
        self._fixed = fixed
        self._agreement = Agreement(endpoint, run_id, tag, times=settings, roster=roster, report=report)
        self._meter = meter or Meter(endpoint)
        self._inbox = RingInbox(run_id, tag, settings.stall, roster.knows)
        self._carrying = Attempts(
            endpoint, self._inbox, settings, courtesy or Courtesy(lambda: endpoint.bytes_sent), self._meter
        )
        self._nursery: trio.Nursery | None = None
        self._branch = Branch()
        self.made = 0
        """The newest revision that was made with us."""
        self._offered: Offer | None = None
        self._attempts: dict[int, Attempt] = {}  # by revision, while we take part
        self._rounds: dict[int, Leadership] = {}
        self._results = Results(endpoint, run_id, tag, settings)
        self._news = News(roster)
        self._sessions = 0
        self.handlers: dict[type, Handler] = {
            Ready: self._on_ready,
            RoundOpen: self._on_open,
            RingData: self._inbox.deliver,
            Waiting: self._carrying.answer,
            FetchResult: self._on_fetch,
        }
        """What serves the requests of others, while `run` runs."""
        if not fixed:
            self.handlers[Compare] = self._agreement.answer

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Owns the tasks of all rounds; runs until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._meter.run)
            try:
                with self._endpoint.serving(self._run, self._tag, self.handlers):
                    task_status.started()
                    await trio.sleep_forever()
            finally:
                self._nursery = None

    def _spawn(self, task: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Starts a task, unless everything is being shut down."""
        if self._nursery is not None:
            self._nursery.start_soon(task, *arguments)

    # What the local peer holds.

    def committed(self, revision: int, digest: bytes) -> None:
        """We hold the state `revision` now, by way of the round that made it (or as the founder)."""
        self._results.pass_over(revision)
        self._branch.advance(revision, digest)
        for number in [number for number in self._rounds if number <= revision]:
            self._rounds.pop(number).finished()
        for leadership in self._rounds.values():
            leadership.wake()

    def adopted(self, revision: int, digest: bytes) -> None:
        """We hold the state `revision` now, fetched from others: results of before may be another branch's."""
        self._results.clear()
        self._contributor.reset()
        self._swapper.reset()
        self._news.forget()
        self._branch.leave()
        for leadership in self._rounds.values():
            leadership.close()
        self._rounds.clear()
        self.committed(revision, digest)

    @property
    def heard(self) -> tuple[int, PeerId] | None:
        """The newest revision that some live member says it holds, and that member."""
        return self._news.heard

    def opened(self, revision: int) -> float | None:
        """Until when (trio's clock) this peer should be ready for the round that makes `revision`.

        None while nobody else is ready; -inf if others have finished that round.
        """
        heard = self.heard
        if heard is not None and heard[0] >= revision:
            return -math.inf
        leadership = self._rounds.get(revision)
        return None if leadership is None else leadership.opened

    async def due(self, revision: int) -> None:
        """Returns when this peer should be ready for the round that makes `revision`, as others are; see `opened`."""
        await trio.lowlevel.checkpoint()
        while (deadline := self.opened(revision)) is None or trio.current_time() < deadline:
            with trio.move_on_at(math.inf if deadline is None else deadline):
                await self._news.wait()

    def statistics(self) -> RoundStatistics:
        """What is going on."""
        return RoundStatistics(
            sessions=self._sessions,
            parked=self._inbox.parked,
            transfers=self._carrying.going_on,
            results=len(self._results),
        )

    def measuring(self) -> AbstractContextManager[None]:
        """Within the block, states are moved: they tell what our lines can do at least, as others may be slower."""
        return self._meter.during(raise_only=True)

    # Taking part.

    async def all_reduce(
        self,
        revision: int,
        values: torch.Tensor,
        weight: float,
        *,
        digest: bytes = NO_DIGEST,
        part: str = "",
        terms: Terms = NO_TERMS,
        followed: set[bytes] | None = None,
    ) -> Reduced:
        """Takes part in the round that makes `revision`, and returns when this peer holds the whole mean.

        Args:
            revision: At least 1. We must hold the state of the revision before.
            values: 1-D fp32 on the CPU, at least one element. Not changed, and not to be changed meanwhile.
            weight: What our values count; 0 to take part without contributing.
            digest: Of the state that the values belong to, that is, revision - 1.
            part: Names what the values are a part of, if not all rounds are about the same values.
            terms: What else members have to agree on.
            followed: Gets the ids of the plans for which these values are brought; None: other ones never were.

        Raises:
            Behind: Others finished the round without us; fetch its result (`fetch_result`) or the state.
            Fork: The others' state of revision - 1 is not ours.
            Misfit: Others bring something else, unless rounds are fixed.
            RoundAborted: Nothing came of it; it may be tried again.
            ValueError: The arguments make no sense.
        """
        if values.dim() != 1 or values.dtype != torch.float32 or values.device.type != "cpu" or not len(values):
            raise ValueError("values are a non-empty vector of fp32 numbers on the CPU")
        offer = self._offer("reduce", revision, len(values), weight, digest, terms)
        try:
            encoded = await self._contributor.encode(values, part)
        except NotFinite as error:
            self._report(RoundEvent(event="contribution_dropped", round=revision, reason=str(error)))
            offer, encoded = attrs.evolve(offer, weight=0.0, signature=None), memoryview(b"")
        work = Work(values=values, encoded=encoded, offer=offer, started=trio.current_time())
        if followed is not None:
            work.followed = followed
        try:
            reduced = await self._take_part(work)
        except BaseException:
            self._contributor.left(revision, followed)
            raise
        counted = reduced.plan.includes(self._endpoint.peer_id, followed)
        self._contributor.finished(counted=counted)
        return attrs.evolve(reduced, counted=counted)

    async def gather(
        self, revision: int, block: torch.Tensor | None, *, digest: bytes = NO_DIGEST, terms: Terms = NO_TERMS
    ) -> Reduced:
        """Takes part in the round that makes `revision`, and returns when this peer holds every member's block.

        The blocks have the sizes `plan.sizes`, and are in `mean` one after the other.

        Args:
            revision: As for `all_reduce`, as is the rest.
            block: 1-D uint8 on the CPU; None to bring nothing, which others can tell from a block without bytes.
            digest: As for `all_reduce`, as are the terms.

        Raises: As `all_reduce`.
        """
        size, weight = (0, 0.0) if block is None else (len(block), 1.0)
        if size > self._max_block:
            raise ValueError(f"a block has at most {self._max_block} bytes, not {size}")
        values = torch.empty(0, dtype=torch.uint8) if block is None else block
        offer = self._offer("gather", revision, size, weight, digest, terms)
        work = Work(values=values, offer=offer, started=trio.current_time())
        reduced = await self._take_part(work)
        counted = reduced.plan.id in work.followed and self._endpoint.peer_id in reduced.contributors
        return attrs.evolve(reduced, counted=counted)

    async def exchange(
        self,
        revision: int,
        values: torch.Tensor,
        weight: float,
        *,
        digest: bytes = NO_DIGEST,
        pairing: Pairing,
        terms: Terms = NO_TERMS,
    ) -> tuple[Reduced, Swap]:
        """Takes part in the round that makes `revision`, in which the members are matched in pairs, and swap vectors.

        Args:
            revision: As for `all_reduce`, as are values, digest, terms and the errors.
            weight: Told to the partner.
            pairing: Who belongs to whom; the same at all members.

        Returns:
            The plan, without data, and what came of it for us. A partner that is lost is no error.
        """
        encoded: memoryview | None = None
        try:
            encoded = await self._swapper.encode(values)
        except NotFinite:
            weight = 0.0  # takes part all the same: the partner finds that it gets no numbers
        offer = self._offer("exchange", revision, len(values), weight, digest, terms)
        agreed = await self._take_part(Work(values=values, offer=offer, started=trio.current_time()))
        swap = await self._carrying.swap(agreed.plan, values, encoded, pairing)
        self._swapper.finished(counted=swap.ours is not None)
        return agreed, swap

    def progress(self, revision: int) -> tuple[int, int]:
        """How much has come in of what we take part in, and of how much; (0, 0) while there is no plan."""
        attempt = self._attempts.get(revision)
        return (0, 0) if attempt is None else attempt.progress

    def _offer(
        self, operation: Operation, revision: int, length: int, weight: float, digest: bytes, terms: Terms
    ) -> Offer:
        """Checks that we may take part now, and says with what."""
        assert self._nursery is not None, "Rounds.run must be running"
        if not 1 <= revision <= MAX_REVISION:
            raise ValueError(f"revisions are made from 1 on, not {revision}")
        if len(digest) != len(NO_DIGEST):
            raise ValueError("a digest has 32 bytes")
        if not 0 <= weight <= self._max_weight:
            raise ValueError(f"a weight is a number from 0 to {self._max_weight:g} here, not {weight}")
        if self._branch.tip is None or self._branch.tip < revision - 1:
            self.committed(revision - 1, digest)
        if self.finished >= revision:
            raise ValueError(f"revision {revision} is there already")
        if self._branch.digest(revision - 1) != digest:
            raise ValueError(f"the digest is not that of the committed revision {revision - 1}")
        self._offered = Offer(
            run=self._run,
            tag=self._tag,
            revision=revision,
            base=digest,
            weight=float(weight),
            length=length,
            codec=self._codec,
            operation=operation,
            signature=self._signatures.sign(revision, digest, float(weight)),
            terms=terms,
            late=self.made < revision - 1,
            max_weight=self._max_weight,
            max_block=self._max_block,
        )
        self._agreement.bring(revision, self._offered.kind, late=self._offered.late)
        return self._offered

    async def _misfit(self, peer: PeerId, length: int | None, plan: Plan) -> str | None:
        """Why a result is none that we can use: it is not of the kind of what we bring to rounds, or not signed."""
        if self._offered is not None and length is None and not self._fixed:
            self._agreement.compare(peer, plan, self._offered.kind)
        problem = unusable(plan, self._offered, length, self._max_weight)
        return await self._signatures.problem_of(plan) if problem is None else problem

    async def _take_part(self, work: Work) -> Reduced:
        try:
            return await self._find_result(work)
        finally:
            self._attempts.pop(work.offer.revision, None)

    async def _find_result(self, work: Work) -> Reduced:
        """Goes from one coordinator to the next until one of them finishes the round; the last resort is ourselves."""
        revision = work.offer.revision
        redirects, failures, problem = 0, 0, ""
        while failures <= len(self._roster.partners()) + 3:
            leadership = self._leadership(revision)
            leader = leadership.next_leader()
            begun = trio.current_time()
            try:
                if (reduced := await self._attend(leadership, work, leader)) is not None:
                    return reduced
                redirects += 1
            except Behind:
                raise
            except Fork:
                leadership.lose(leader)  # if we stay with our branch, we do without that peer
                raise
            except Redirected as redirected:
                redirects += 1
                target = redirected.coordinator
                self._endpoint.learn(target, *redirected.addresses)
                if redirects > _MAX_REDIRECTS or target in leadership.tried:
                    leadership.lose(leader)
                leadership.follow(target)
            except LeftOut as left_out:
                failures, problem = failures + 1, str(left_out)
                if not self._fixed:
                    await self._agreement.check(revision, leader, left_out.brought, work.started + self._times.window)
                leadership.lose(leader)
            except RoundAborted as error:
                failures, problem = failures + 1, str(error)
            except ShoalError as error:
                failures, problem = failures + 1, f"{leader.short}: {error}"
                leadership.lose(leader)
                if isinstance(error, RequestTimeout):
                    self._roster.doubt(leader, trio.current_time() - begun)
            await trio.lowlevel.checkpoint()
        raise RoundAborted(f"no coordinator could finish the round for revision {revision}; at last {problem}")

    async def _attend(self, leadership: Leadership, work: Work, leader: PeerId) -> Reduced | None:
        """One stay with one coordinator; None if we left it for another one."""
        offer, tried = work.offer, sorted(leadership.tried)[:MAX_TRIED]
        rates = self._meter.rates(self._roster.partners())
        ready = work.ready(leadership.acceptor.promised, tuple(tried), rates)
        size, usual = len(self._roster.partners()) + 1, load(offer.operation, offer.length)
        # Of a gather, nobody knows what others bring.
        most = load("gather", self._max_block * size) if offer.operation == "gather" else usual
        leadership.attending, leadership.attendance = leader, trio.CancelScope()
        try:
            with leadership.attendance:
                async with self._line(leadership, ready, leader) as line:
                    return await Member(
                        line,
                        work,
                        leadership.acceptor,
                        self._times.after(work.started - self._results.before(offer.revision)[1]),
                        check=self._signatures.problem_of,
                        begin=lambda plan: self._begin(plan, work),
                        fetch=lambda holder: self._fetch(holder, offer.revision),
                        keep=self._keep,
                        report=self._report_attempt if leader != self._endpoint.peer_id else self._report_start,
                        load=usual,
                        most=most,
                        size=size,
                        received=lambda: received(self._endpoint, leader),
                    ).run()
        finally:
            leadership.attending = None
            leadership.wake()
        return self._results.get(offer.revision)  # we left to lead ourselves, perhaps a moment after the end

    @contextlib.asynccontextmanager
    async def _line(self, leadership: Leadership, ready: Ready, leader: PeerId) -> AsyncIterator[Line]:
        """A conversation with a coordinator, which may be ourselves."""
        if leader != self._endpoint.peer_id:
            async with self._endpoint.open(leader, ready) as stream:
                yield stream
                with contextlib.suppress(ShoalError):  # the result is here, whatever becomes of the stream
                    await stream.finish()
            return
        final = leadership.final_answer(ready, leader)
        async with local_line(leader, final, partial(self._serve, leadership, ready), self._spawn) as line:
            yield line

    async def _serve(self, leadership: Leadership, ready: Ready, line: Line) -> None:
        self._sessions += 1
        try:
            await leadership.serve(ready, line)
        finally:
            self._sessions -= 1

    def _begin(self, plan: Plan, work: Work) -> Attempt:
        attempt = self._carrying.make(plan, work)
        self._attempts[plan.revision] = attempt
        self._spawn(self._carrying.run, attempt)
        return attempt

    async def _fetch(self, holder: PeerId, revision: int) -> Reduced | None:
        try:
            return await self.fetch_result(holder, revision)
        except ShoalError:
            return None

    def _keep(self, reduced: Reduced) -> None:
        self._results.keep(reduced)
        if self._endpoint.peer_id in reduced.members:
            self.made = max(self.made, reduced.plan.revision)
        if reduced.plan.revision in self._rounds:
            self._rounds[reduced.plan.revision].finished()

    def _report_start(self, plan: Plan, reason: str | None) -> None:
        """Of attempts that we coordinate, the member reports the start only: the coordinator knows why they fail."""
        if reason is None:
            self._report_attempt(plan, None)

    def _report_attempt(self, plan: Plan, reason: str | None) -> None:
        self._report(attempt_event(plan, reason))

    @property
    def tip(self) -> int:
        """The newest revision that is committed; -1 before the first."""
        return -1 if self._branch.tip is None else self._branch.tip

    @property
    def finished(self) -> int:
        """The newest revision that is complete here, committed or not."""
        return max(self.tip, self._results.newest)

    @property
    def kept(self) -> int:
        """How many results every member keeps."""
        return self._times.keep

    def _leadership(self, revision: int) -> Leadership:
        if revision not in self._rounds:
            self._rounds[revision] = Leadership(
                revision,
                endpoint=self._endpoint,
                run=self._run,
                tag=self._tag,
                times=self._times,
                max_weight=self._max_weight,
                fixed=self._fixed,
                spawn=self._spawn,
                roster=self._roster,
                patience=lambda: self._carrying.reducing,
                regulars=lambda: self._results.before(revision),
                base=lambda: self._branch.digest(revision - 1),
                notify=self._news.spread,
                aborted=self._report_attempt,
            )
        return self._rounds[revision]

    # What others ask.

    def _check_request(self, peer: PeerId) -> int:
        """Returns the revision that we hold."""
        if not self._roster.knows(peer):
            raise RequestRefused("rounds are for members: say hello first", code="not_a_member")
        if self._branch.tip is None or self._nursery is None:
            raise RequestRefused("this peer is not synchronised yet", code="not_synchronised")
        return self._branch.tip

    async def _on_ready(self, request: Ready, stream: Stream) -> Message | None:
        tip = self._check_request(stream.peer)
        if request.weight > self._max_weight:
            raise ProtocolError(f"a weight of {request.weight:g}; in this run {self._max_weight:g} is the most")
        if request.operation == "gather" and request.length > self._max_block:
            raise ProtocolError(f"a block of {request.length} bytes; in this run {self._max_block} is the most")
        self._news.hear(request.revision - 1, stream.peer, tip)
        ours = self._branch.digest(request.revision - 1)
        if ours not in (None, request.base):
            return Forked(ours)
        if request.revision <= self.finished:
            return Ahead(self.finished, self._endpoint.peer_id)
        if request.revision > tip + LOOKAHEAD:
            raise RequestRefused(f"this peer holds revision {tip} only", code="behind")
        problem = self._signatures.problem(
            stream.peer, request.revision, request.base, request.weight, request.signature
        )
        if problem is not None:
            raise ProtocolError(problem)
        leadership = self._leadership(request.revision)
        leadership.crossed(stream.peer)
        final = leadership.final_answer(request, stream.peer)
        if final is None:
            await self._serve(leadership, request, stream)
        return final

    async def _on_open(self, request: RoundOpen, stream: Stream) -> Message:
        tip = self._check_request(stream.peer)
        self._news.hear(request.revision - 1, stream.peer, tip)
        if self._branch.digest(request.revision - 1) not in (None, request.base):
            raise RequestRefused("this peer's state is another one", code="fork")
        if request.revision <= self.finished:
            return Ahead(self.finished, self._endpoint.peer_id)
        if request.revision > tip + LOOKAHEAD:
            return Late()
        answer = self._leadership(request.revision).announced(stream.peer, request.remaining)
        return Late() if answer == Noted() and tip < request.revision - 1 else answer

    async def _on_fetch(self, request: FetchResult, stream: Stream) -> None:
        self._check_request(stream.peer)
        await self._results.give(request, stream)

    async def fetch_result(self, peer: PeerId, revision: int, *, length: int | None = None) -> Reduced:
        """The result of a round that this peer missed. It is kept, and given to others, as if it were our own.

        `length` is that of a mean; None: of what we have brought last. Raises: See `Results.fetch`.
        """
        base = self._branch.digest(revision - 1)
        kept = self._results.get(revision)
        if kept is not None and base in (None, kept.plan.base):  # fetched before we knew that the round is over for us
            await trio.lowlevel.checkpoint()
            reduced = kept
        else:
            reduced = await self._results.fetch(peer, revision, base=base, misfit=partial(self._misfit, peer, length))
            self._keep(reduced)
        self._contributor.heard(reduced.plan, self._endpoint.peer_id)
        return reduced

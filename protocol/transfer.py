"""One attempt at reducing on real streams: what a schedule (see `protocol.reduction`) says, moved by its tasks.

One task for each neighbour that sends to us receives, adds, and lets the others know; one for each neighbour that we
send to sends whatever has become sendable. A transfer that fails keeps its streams open and waits to be aborted: if it
tore them down, its neighbours would blame it and not the peer that is at fault.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

import attrs
import torch
import trio

from protocol.attempt import Failure
from protocol.coordinator import RoundTimes
from protocol.direct import Direct
from protocol.endpoint import Endpoint, Stream
from protocol.errors import RequestRefused, ShoalError
from protocol.identity import PeerId
from protocol.plan import Plan
from protocol.reduction import Reduction
from protocol.ring import Ring
from protocol.round_messages import RingData
from protocol.salvage import Holding
from protocol.vectors import VectorPool, vector_bytes
from protocol.watch import Watch, received

MAX_PARKED = 128
"""Streams of ring data that wait for their plan at a time. Each holds at most one stream window of data. Streams whose
plan has been accepted here are no part of that."""

MAX_PARKED_BY_ONE = 8
"""Of these, those of one peer."""

READ = 1 << 16
"""Bytes after which a receiver of a result or a vector looks at the clock again: a link with less than this per stall
time counts as stuck."""

LEAD = 4
"""Segments that one neighbour may be ahead of the others. Data for several of them shares a line, not always fairly,
and a sum is complete when the last one's values have come in."""

AHEAD, FASTER = 8, 3
"""So many segments, and times as many, as the slowest neighbour's may come from another, if they are to be added. More
would be of no use yet, and fill the queue in front of our line, where the slowest one's wait as well."""

TURN = (0.25, 1.0)
"""Seconds that a segment waits at most for another neighbour's sake, depending on how long that takes for one: it may
be slower than our line, or gone."""

IN_WORKER = 1 << 20
"""Elements from which on copying a vector (a few ms) is worth a worker thread."""


@attrs.define(eq=False)
class _Arrival:
    stream: Stream
    taken: trio.Event = attrs.field(factory=trio.Event)
    over: trio.Event = attrs.field(factory=trio.Event)


class RingInbox:
    """Streams of ring data meet the transfers that want them, whichever comes first."""

    def __init__(
        self, run: bytes, tag: str, patience: float, admits: Callable[[PeerId], bool] = lambda peer: True
    ) -> None:
        self._run, self._tag, self._admits = run, tag, admits
        self._patience = patience
        self._parked: dict[tuple[bytes, PeerId], _Arrival] = {}
        self._wanted: dict[tuple[bytes, PeerId], trio.Event] = {}

    @property
    def parked(self) -> int:
        """Streams that wait for their plan."""
        return len(self._parked)

    async def deliver(self, request: RingData, stream: Stream) -> None:
        """The handler of `RingData`: holds the stream until a transfer has taken it and is done with it."""
        if (request.run, request.tag) != (self._run, self._tag):
            raise RequestRefused("another run", code="unknown_run")
        key = (request.plan_id, stream.peer)
        if key not in self._wanted and not self._admits(stream.peer):
            raise RequestRefused("rounds are for members: say hello first", code="not_a_member")
        theirs = sum(peer == stream.peer for _, peer in self._parked)
        full = len(self._parked) >= MAX_PARKED or theirs >= MAX_PARKED_BY_ONE
        if key in self._parked or (full and key not in self._wanted):
            raise RequestRefused("too many streams of ring data", code="busy")
        arrival = self._parked[key] = _Arrival(stream)
        if key in self._wanted:
            self._wanted[key].set()
        try:
            with trio.move_on_after(self._patience):
                await arrival.taken.wait()
        finally:
            self._parked.pop(key, None)
        if not arrival.taken.is_set():
            raise RequestRefused("no such plan here", code="unknown_plan")
        await arrival.over.wait()

    async def take(self, plan_id: bytes, left: PeerId) -> _Arrival:
        """Waits for the stream of a plan's left neighbour. The caller sets `over` when it is done with it."""
        key = (plan_id, left)
        while key not in self._parked:  # also if one came and broke before we went on
            self._wanted[key] = trio.Event()
            try:
                await self._wanted[key].wait()
            finally:
                del self._wanted[key]
        arrival = self._parked.pop(key)
        arrival.taken.set()
        return arrival

    async def receive(
        self,
        plan_id: bytes,
        peer: PeerId,
        watch: Watch,
        place: int,
        take: Callable[[Stream], Awaitable[None]],
        fail: Callable[[PeerId, str], None],
    ) -> None:
        """One neighbour's part in an attempt, from when its stream comes until it has finished.

        Args:
            plan_id: The plan.
            peer: The neighbour.
            watch: Whose watch it is under.
            place: What that calls it by.
            take: Takes all that comes from the stream.
            fail: Told who is at fault, and why, if that fails. Then everything stays open until we are cancelled.
        """
        arrival: _Arrival | None = None
        try:
            arrival = await self.take(plan_id, peer)
            watch.begun(place, arrival.stream)
            await take(arrival.stream)
            watch.over(place)
            # Closing before the neighbour has finished would look to it as if we had given up.
            with contextlib.suppress(ShoalError):  # whatever becomes of it, we have all
                await arrival.stream.receive(RingData, timeout=self._patience)
        except ShoalError as error:
            watch.over(place)
            fail(peer, str(error))
            await trio.sleep_forever()
        finally:
            if arrival is not None:
                arrival.over.set()


class Transfer:
    """This peer's part in one attempt. `run` is a task of its own, which never raises but when cancelled.

    Args:
        plan: The accepted plan, which includes this peer.
        values: This peer's values; only read.
        encoded: The same values as the plan's codec writes them; nothing for fp32, or without weight.
        memory: Where the result's vector comes from.
        pace: Bytes per second that came in when something was carried out last; 0 if that is not known.
        ask: Asks a member whether it is waiting itself, see `Attempt.waiting`; as `watch.Ask`, but by its id.
        previous: The attempt before, which has been aborted. What it leaves is used once it has ended.
    """

    def __init__(
        self,
        plan: Plan,
        values: torch.Tensor,
        *,
        encoded: bytes | memoryview = b"",
        endpoint: Endpoint,
        inbox: RingInbox,
        times: RoundTimes,
        memory: VectorPool,
        pace: float,
        ask: Callable[[PeerId], Awaitable[float | None]],
        previous: Transfer | None = None,
    ) -> None:
        self.plan = plan
        self.settled = trio.Event()
        """Set when the result is complete, or the transfer has failed or was aborted."""
        self.failure: Failure | None = None
        self.bytes_received = 0
        self._bytes_sent = 0
        self._values, self._encoded = values, encoded
        self._endpoint, self._inbox, self._times, self._memory = endpoint, inbox, times, memory
        self._place = plan.members.index(endpoint.peer_id)
        self._previous = None if previous is None else previous._last_to_begin
        self._pace, self._ask = pace, ask
        self._ring: Reduction | None = None
        self._watch: Watch | None = None
        self._begun, self._started = False, 0.0
        self._ended = trio.Event()
        self._progress, self._turns = trio.lowlevel.ParkingLot(), trio.lowlevel.ParkingLot()
        self._sent: Counter[int] = Counter()  # segments, by neighbour
        self._sending: dict[int, float] = {}  # since when the next one is being sent
        self._scope = trio.CancelScope()

    @property
    def complete(self) -> bool:
        """Whether every reduced element is here."""
        return self._ring is not None and self._ring.plan is self.plan and self._ring.complete

    @property
    def bytes_sent(self) -> int:
        """Bytes of data that have left; of what is complete here, also those that are about to."""
        return self._ring.bytes_out if self._ring is not None and self.complete else self._bytes_sent

    @property
    def segments(self) -> int:
        """See `Reduction.standing`."""
        return self._ring.standing if self._ring is not None and self._ring.plan is self.plan else 0

    @property
    def progress(self) -> tuple[int, int]:
        """Segments that have come in, and how many there are."""
        ring = self._ring
        if ring is None or ring.plan is not self.plan:
            return 0, 0
        return ring.received, sum(ring.incoming(place) for place in ring.sources)

    @property
    def mean(self) -> torch.Tensor:
        """The result, once `complete`."""
        assert self._ring is not None
        return self._ring.mean

    def waiting(self, peer: PeerId) -> float | None:
        """See `Attempt.waiting`."""
        ring, place = self._ring, self.plan.members.index(peer)
        if self._watch is None or ring is None or place not in ring.sinks:
            return None
        sent, began = self._sent[place], self._sending.get(place)
        sendable, outgoing = ring.sendable(place), ring.outgoing(place)
        return self._watch.waiting(sent=sent, sendable=sendable, outgoing=outgoing, began=began)

    def abort(self) -> None:
        """Ends the transfer; its streams are reset."""
        self._scope.cancel()
        self.settled.set()
        if not self._begun:
            self._ended.set()

    @property
    def _last_to_begin(self) -> Transfer:
        """The attempt that holds what is left of this one and those before it: of any number that were aborted at once,
        none is kept."""
        return self if self._previous is None else self._previous

    async def ended(self) -> Reduction | None:
        """Waits until nothing is sent or received any more; returns the ring, or that of the attempt before."""
        await self._ended.wait()
        return self._ring if self._previous is None else await self._previous.ended()

    def holdings(self) -> tuple[Holding, ...]:
        """What is reduced here by now, by this attempt or those before."""
        if self._previous is not None:
            return self._previous.holdings()
        return () if self._ring is None else self._ring.holdings()

    async def run(self) -> None:
        """Carries the plan out, and returns when the right neighbour has got everything from us, too."""
        plan, times = self.plan, self._times
        self._begun = True
        self._scope.deadline = trio.current_time() + times.attempt(plan.load, len(plan.members))
        try:
            with self._scope:
                ring = await self._prepare()
                self._started = trio.current_time()
                watch = self._watch = Watch(
                    ring.sources,
                    times=times,
                    pace=self._pace,
                    ask=lambda place: self._ask(plan.members[place]),
                    line=lambda place: received(self._endpoint, plan.members[place]),
                    gap=4 * ring.gap,
                    suspect=ring.suspect,
                )
                async with trio.open_nursery() as nursery:
                    for place in ring.sinks:
                        nursery.start_soon(self._send, ring, place)
                    for place in ring.sources:
                        nursery.start_soon(self._receive, ring, place, watch)
                    if ring.sources and (stuck := await watch.run()) is not None:
                        self._fail(plan.members[stuck[0]], stuck[1])
        finally:
            self._watch = None  # it refers to us: the ring's memory would be in use until cycles are collected
            if self._ring is not None and not self.complete:
                self._ring.release()
            self._ended.set()
        if trio.current_time() >= self._scope.deadline:
            late = None if self._ring is None or self._ring.plan is not plan else self._ring.late()
            self._fail(None if late is None else plan.members[late], "the attempt took too long")

    async def _prepare(self) -> Reduction:
        """Makes the ring. It takes over the memory of the attempt before, which has to have ended for good."""
        await trio.lowlevel.checkpoint()  # we may have been aborted, and somebody else may be using that memory
        if self._previous is not None:
            self._ring, self._previous = await self._previous.ended(), None
            await trio.lowlevel.checkpoint_if_cancelled()  # or aborted since that ended
        make: Callable[[], Reduction]
        if self.plan.schedule == "ring":
            make = partial(Ring, self.plan, self._place, self._values, previous=self._ring, memory=self._memory)
        else:
            encoded = vector_bytes(self._values.contiguous()) if self.plan.codec == "fp32" else self._encoded
            make = partial(Direct, self.plan, self._place, encoded, previous=self._ring, memory=self._memory)
        self._ring = None  # its memory is being overwritten: until that is over, it is not certain what we hold
        alone = len(self.plan.members) == 1  # so the whole vector is copied at once
        self._ring = await trio.to_thread.run_sync(make) if alone and self.plan.length >= IN_WORKER else make()
        if self._ring.complete:
            self.settled.set()
        return self._ring

    async def _send(self, ring: Reduction, place: int) -> None:
        plan, peer = self.plan, self.plan.members[place]
        try:
            request, count = RingData(plan.run, plan.tag, plan.id), ring.outgoing(place)
            async with self._endpoint.open(peer, request, bulk=True, one_way=True) as stream:
                for number in range(count):
                    while number >= ring.sendable(place):
                        await self._progress.park()
                    with trio.move_on_after(self._turn(min(self._sent[other] for other in ring.sinks))):
                        while self._is_ahead(ring, place):
                            await self._turns.park()
                    data = ring.segment(place, number)
                    self._sending[place] = trio.current_time()
                    await stream.send_bytes(data, last=number == count - 1)
                    del self._sending[place]
                    self._bytes_sent += data.nbytes
                    self._sent[place] = number + 1
                    self._turns.unpark_all()
        except ShoalError as error:
            self._sent[place] = ring.outgoing(place)  # nobody waits for its turn any more
            self._turns.unpark_all()
            self._fail(peer, str(error))

    def _is_ahead(self, ring: Reduction, place: int) -> bool:
        """Whether another neighbour has got much less of its data by now, although there is some to send."""
        behind = (
            self._sent[other] / ring.outgoing(other)
            for other in ring.sinks
            if self._sent[other] < min(ring.sendable(other), ring.outgoing(other))
        )
        lead = LEAD / ring.outgoing(place)
        return self._sent[place] / ring.outgoing(place) > min(behind, default=1.0) + lead

    def _turn(self, count: int) -> float:
        """Seconds that a segment waits at most for a neighbour that has had so many; see `TURN`."""
        least, most = TURN
        return min(max((trio.current_time() - self._started) / (count + 1), least), most)

    async def _receive(self, ring: Reduction, place: int, watch: Watch) -> None:
        async def take(stream: Stream) -> None:
            for number in range(ring.incoming(place)):
                with trio.move_on_after(self._turn(ring.slowest(place))):
                    while number >= FASTER * ring.slowest(place) + AHEAD:
                        await self._progress.park()
                target = ring.target(place)
                await stream.receive_into(target)
                self.bytes_received += target.nbytes
                watch.came(place, target.nbytes)
                ring.filled(place)
                self._progress.unpark_all()
            if ring.complete:
                self.settled.set()

        await self._inbox.receive(self.plan.id, self.plan.members[place], watch, place, take, self._fail)

    def _fail(self, suspect: PeerId | None, reason: str) -> None:
        if not self.settled.is_set():
            self.failure = Failure(suspect, reason)
            self.settled.set()

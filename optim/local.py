"""A swarm inside one process, for notebooks, experiments and tests: its peers are threads, and nothing is sent."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeAlias, TypeVar

import attrs
import torch

from optim.windows import Arrival, Clocks, Key, Meeting, Queue, next_to_close
from protocol.codecs import CodecName, ErrorFeedback, NotFinite, make_codec
from protocol.collective import Block, Broadcasted, Collective, Exchanged, Gathered, Outcome, Reduced, Tensors, Window
from protocol.errors import Behind, Misfit, RequestTimeout, RoundAborted
from protocol.flatten import block_bytes, flat, shapes_of
from protocol.identity import PeerId
from protocol.pairs import Pairing, partner
from protocol.plan import Operation, Plan, coordinators
from protocol.ring import reference
from protocol.vectors import all_finite, vector_bytes

_T = TypeVar("_T")
Group: TypeAlias = Collection[PeerId] | None


class LocalSwarm:
    """So many peers, each of which is a `Collective` for a thread of its own.

    Operations give the bits that real peers would with the same members in the same order and the same codec, to each
    peer in memory of its own. Every operation waits for all peers that have not left; if it has a window, only for
    those that come in time. That is simulated time, which passes where `LocalPeer.advance` says so: who is late does
    not depend on the machine, as long as exchanges block their peers.

        def replica(peer):
            optimizer = DiLoCo(model, inner, peer)
            …

        results = LocalSwarm(4).run(replica)

    Args:
        size: How many.
        codec: How the values of `all_reduce` would look on the wire; lossy ones keep what they leave out.
        run: Identifies the run, 32 bytes: with the peers' ids it decides their order.
        peer_ids: Whose parts the peers play, if that matters.
    """

    def __init__(
        self,
        size: int,
        *,
        codec: CodecName = "fp32",
        run: bytes = bytes(32),
        peer_ids: Sequence[PeerId] | None = None,
    ) -> None:
        names = peer_ids or [PeerId(hashlib.sha256(b"local peer %d" % index).digest()) for index in range(size)]
        if len(names) != size or not size:
            raise ValueError(f"{len(names)} names for {size} peers")
        self.peers: tuple[LocalPeer, ...] = tuple(LocalPeer(self, name, codec) for name in names)
        self._codec: CodecName = codec
        self._run = run
        self._present = frozenset(names)
        self._failure: str | None = None
        self._lives: Sequence[Future[Any]] = ()  # of the last run
        self._changed = threading.Condition()
        self._meetings: dict[tuple[Key, int], Meeting] = {}
        self._queues: dict[Key, Queue] = {}
        self._clocks = Clocks()

    def run(self, replica: Callable[[LocalPeer], _T]) -> list[_T]:
        """Calls `replica` for each peer, all at the same time, and returns what they return.

        If one raises an exception, the others' operations raise `RoundAborted`, and it is raised here. The same goes
        for a `KeyboardInterrupt`. May be called again: the peers go on with what they remember.
        """
        wait(self._lives)  # those of a run that was interrupted twice
        self._present = frozenset(peer.peer_id for peer in self.peers)
        self._failure = None
        self._meetings.clear()
        self._clocks.begin(self._present)

        def live(peer: LocalPeer) -> _T:
            start.wait()
            try:
                return replica(peer)
            except BaseException as error:
                self._fail(f"{peer.peer_id.short} has failed: {error}")
                raise
            finally:
                with self._changed:
                    self._present -= {peer.peer_id}
                    self._clocks.leave(peer.peer_id)
                    self._settle()

        start = threading.Barrier(len(self.peers) + 1)  # an interruption before there are all of them leaves none
        with ThreadPoolExecutor(len(self.peers), thread_name_prefix="replica") as threads:
            try:
                self._lives = lives = [threads.submit(live, peer) for peer in self.peers]
                start.wait()
                wait(lives)
            except BaseException:
                start.abort()
                self._fail("the run was interrupted")
                raise
        errors = [error for one in lives if (error := one.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, RoundAborted)):  # the cause before its effects
            raise error
        return [one.result() for one in lives]

    def _fail(self, reason: str) -> None:
        """All operations of this run raise an exception from now on."""
        with self._changed:
            self._failure = self._failure or reason
            self._settle()

    def meet(
        self, peer: PeerId, key: Key, number: int, offer: torch.Tensor | None, weight: float, timeout: float | None
    ) -> tuple[Plan, Meeting]:
        """One peer comes to an operation, and waits for the others; one of them does the work for all.

        Raises:
            RoundAborted: Another peer has failed.
            Misfit: What they bring does not fit together.
            RequestTimeout: The others have not come in time.
        """
        with self._changed:
            meeting = self._meetings.setdefault((key, number), Meeting())
            meeting.offers[peer], meeting.weights[peer] = offer, weight
            if ran := self._clocks.wait(peer):
                meeting.runners.add(peer)
            self._settle()
            try:
                self._changed.wait_for(lambda: meeting.over, timeout)
            finally:
                if not meeting.over:  # time is over, or we were interrupted
                    del meeting.offers[peer], meeting.weights[peer]
                    self._give_up(peer, ran)
            if not meeting.over:
                raise RequestTimeout(f"the other peers have not come within {timeout:g} s")
            if meeting.error is not None:
                raise meeting.problem(peer)
            assert meeting.plan is not None
            return meeting.plan, meeting

    def come(
        self,
        peer: PeerId,
        key: Key,
        seen: int,
        values: torch.Tensor,
        weight: float,
        window: Window,
        timeout: float | None,
    ) -> tuple[int, list[Meeting]]:
        """One peer comes to an operation with a window. Returns its number, and those since number `seen` that have
        come to something; it takes part in the last.

        Raises:
            Behind: What it has missed is not kept any more.
            RoundAborted: As `meet`, as are Misfit and RequestTimeout.
            ValueError: The operations of this tag and group have another window.
        """
        with self._changed:
            queue = self._queues.setdefault(key, Queue(window, key[2]))
            if queue.window != window:
                raise ValueError(f"the operations of tag {key[1]!r} have another window: {queue.window}")
            arrival = Arrival(self._clocks[peer], values, weight, self._clocks.wait(peer))
            queue.arrivals[peer] = arrival
            self._settle()
            if not self._changed.wait_for(lambda: queue.arrivals.get(peer) is not arrival, timeout):
                del queue.arrivals[peer]
                self._give_up(peer, arrival.ran)
                raise RequestTimeout(f"nobody else has come within {timeout:g} s")
            number = max(number for number, meeting in queue.results.items() if peer in meeting.offers)
            if queue.results[number].error is not None:
                raise queue.results[number].problem(peer)
            if seen + 1 not in queue.results:
                raise Behind(next(iter(queue.results[number].offers)), number)
            since = [queue.results[each] for each in range(seen + 1, number + 1)]
            return number, [meeting for meeting in since if meeting.error is None]

    def _give_up(self, peer: PeerId, ran: bool) -> None:
        if ran:
            self._clocks.go_on(peer, self._clocks[peer])
        self._settle()

    def advance(self, peer: PeerId, seconds: float) -> None:
        """Simulated time passes at one peer."""
        with self._changed:
            self._clocks.advance(peer, seconds)
            self._settle()

    def time_of(self, peer: PeerId) -> float:
        """How much has passed there."""
        with self._changed:
            return self._clocks[peer]

    def _settle(self) -> None:
        """Something changed: holds all operations that are due."""
        for (key, number), meeting in tuple(self._meetings.items()):
            awaited = self._present if key[2] is None else self._present & key[2]
            if meeting.offers and (self._failure is not None or meeting.offers.keys() >= awaited):
                del self._meetings[key, number]
                self._hold(meeting, key, number, max(self._clocks[peer] for peer in meeting.offers))
        while (due := next_to_close(self._queues, self._present, self._clocks, self._failure is not None)) is not None:
            key, time = due
            queue = self._queues[key]
            self._hold(queue.close(time), key, queue.number, time)
        self._changed.notify_all()

    def _hold(self, meeting: Meeting, key: Key, number: int, time: float) -> None:
        for peer in meeting.runners:
            self._clocks.go_on(peer, time)
        if self._failure is not None:
            meeting.error = RoundAborted(self._failure)
            return
        try:
            meeting.plan = self._plan(meeting, key, number)
        except Misfit as error:
            meeting.error = error
            return
        if meeting.plan.operation == "reduce":
            inputs = {peer: offer for peer, offer in meeting.offers.items() if offer is not None}
            meeting.mean = reference(meeting.plan, inputs)

    def _plan(self, meeting: Meeting, key: Key, number: int) -> Plan:
        operation, tag, _ = key
        members = coordinators(self._run, 0, meeting.offers, tag=tag)  # in all operations the same order
        sizes = tuple(0 if (offer := meeting.offers[peer]) is None else len(offer) for peer in members)
        if operation != "gather" and len(set(sizes)) > 1:
            raise Misfit(f"the peers bring different numbers of values: {sorted(set(sizes))}", tuple(members))
        return Plan(
            run=self._run,
            revision=number,
            attempt=1,
            rank=0,
            coordinator=coordinators(self._run, number, members, tag=tag)[0],
            members=tuple(members),
            weights=tuple(meeting.weights[peer] for peer in members),
            length=sum(sizes) if operation == "gather" else sizes[0],
            tag=tag,
            codec=self._codec if operation == "reduce" else "fp32",
            operation=operation,
            sizes=sizes if operation == "gather" else (),
        )


class LocalPeer(Collective):
    """One peer of a `LocalSwarm`."""

    def __init__(self, swarm: LocalSwarm, peer_id: PeerId, codec: CodecName) -> None:
        self._swarm, self.peer_id = swarm, peer_id
        self._codec = make_codec(codec)
        self._feedback: dict[tuple[Key, int], ErrorFeedback] = {}
        self._numbers: dict[Key, int] = {}
        self.bytes_sent = 0
        """Bytes that a real peer would have sent as payload."""

    @property
    def members(self) -> tuple[PeerId, ...]:
        """All peers of the swarm."""
        return tuple(peer.peer_id for peer in self._swarm.peers)

    @property
    def time(self) -> float:
        """Seconds of simulated time that have passed for this peer."""
        return self._swarm.time_of(self.peer_id)

    def advance(self, seconds: float) -> None:
        """Lets simulated time pass: what the peer has just done takes so long."""
        self._swarm.advance(self.peer_id, seconds)

    def all_reduce(
        self,
        values: Tensors,
        weight: float = 1.0,
        *,
        group: Group = None,
        tag: str = "",
        timeout: float | None = None,
        window: Window | None = None,
    ) -> Reduced:
        """See `Collective.all_reduce`. A window's grace time is simulated time."""
        key, vector = _key("reduce", tag, group), flat(values)
        if not all_finite(vector):
            vector, weight = torch.zeros_like(vector), 0.0
        feedback = self._feedback_of(key, len(vector)) if weight else None
        if feedback is not None:
            try:
                feedback.encode(0, vector, bytearray(self._codec.encoded_size(len(vector))))
            except NotFinite:  # with what was left out so far
                vector, weight = torch.zeros_like(vector), 0.0
            else:
                vector = torch.add(vector, feedback.residual)  # what is encoded, in this operation as well
        if window is None:
            meetings = [self._meet(key, vector, weight, timeout)[1]]
        else:
            seen = self._numbers.get(key, 0)
            number, meetings = self._swarm.come(self.peer_id, key, seen, vector, weight, window, timeout)
            self._numbers[key] = number
        if feedback is not None:
            feedback.commit()
        *missed, reduced = (self._reduced(meeting, shapes_of(values)) for meeting in meetings)
        return attrs.evolve(reduced, missed=tuple(missed))

    def _reduced(self, meeting: Meeting, shapes: tuple[torch.Size, ...]) -> Reduced:
        plan, mean = meeting.plan, meeting.mean
        assert plan is not None and mean is not None
        size, others = self._codec.encoded_size(plan.length), len(plan.members) - 1
        took_part = self.peer_id in plan.members
        sent = self._sent(2 * others * size // len(plan.members) if took_part else 0)
        return Reduced(
            plan=plan,
            mean=mean.clone(),
            contributors=plan.contributors,
            weight=plan.weight,
            shapes=shapes,
            counted=self.peer_id in plan.contributors,
            attempts=1,
            bytes_sent=sent,
            bytes_received=sent if took_part else 4 * plan.length,
            seconds=0.0,
        )

    def exchange(
        self,
        values: Tensors,
        weight: float = 1.0,
        *,
        group: Group = None,
        tag: str = "",
        timeout: float | None = None,
        pairing: Pairing = "random",
    ) -> Exchanged:
        """See `Collective.exchange`."""
        key, vector = _key("exchange", tag, group), flat(values)
        feedback = self._feedback_of(key, len(vector))
        ours = self._meant(vector, feedback)
        offer = torch.full_like(vector, math.nan) if ours is None else ours.clone()  # for the partner alone
        plan, meeting = self._meet(key, offer, 0.0 if ours is None else weight, timeout)
        other = partner(plan, self.peer_id, pairing)
        theirs, problem = None, "there is no partner"
        if other is not None:
            theirs, problem = meeting.offers[other], ""
            assert theirs is not None
            if not all_finite(theirs):
                theirs, problem = None, f"{other.short} has brought values that are not finite"
        if feedback is not None:
            feedback.abort() if theirs is None else feedback.commit()
        size = self._codec.encoded_size(len(vector))
        return Exchanged(
            plan=plan,
            partner=other,
            values=theirs,
            ours=None if theirs is None else ours,
            weight=0.0 if other is None else meeting.weights[other],
            problem=problem,
            shapes=shapes_of(values),
            attempts=1,
            counted=ours is not None,
            bytes_sent=self._sent(0 if other is None or ours is None else size),
            bytes_received=0 if theirs is None else size,
            seconds=0.0,
        )

    def _meant(self, vector: torch.Tensor, feedback: ErrorFeedback | None) -> torch.Tensor | None:
        """What the bytes of a vector mean; None if it is not finite, with what was left out so far."""
        if feedback is None:
            return vector if all_finite(vector) else None
        encoded, meant = bytearray(self._codec.encoded_size(len(vector))), torch.empty_like(vector)
        try:
            feedback.encode(0, vector, encoded)
        except NotFinite:
            return None
        self._codec.decode(encoded, meant)
        return meant

    def gather(
        self, block: Block | None, *, group: Group = None, tag: str = "", timeout: float | None = None
    ) -> Gathered:
        """See `Collective.gather`."""
        data = block_bytes(block)
        if isinstance(block, torch.Tensor) and data is not None:
            data = data.clone()  # the caller may change its own as soon as it has the result
        plan, meeting = self._meet(_key("gather", tag, group), data, 0.0 if data is None else 1.0, timeout)
        sent = self._sent(0 if data is None else (len(plan.members) - 1) * len(data))
        offers = [(peer, offer) for peer in plan.members if (offer := meeting.offers[peer]) is not None]
        return Gathered(
            plan=plan,
            blocks={peer: vector_bytes(offer.clone()).toreadonly() for peer, offer in offers},
            attempts=1,
            bytes_sent=sent,
            bytes_received=plan.length - (0 if data is None else len(data)),
            seconds=0.0,
        )

    def broadcast(
        self, block: Block | None, *, group: Group = None, tag: str = "", timeout: float | None = None
    ) -> Broadcasted:
        """See `Collective.broadcast`."""
        gathered = self.gather(block, group=group, tag=f"broadcast {tag}", timeout=timeout)
        if len(gathered.blocks) != 1:
            raise RoundAborted(f"{len(gathered.blocks)} peers have something to broadcast, not one")
        ((source, data),) = gathered.blocks.items()
        return Broadcasted(
            plan=gathered.plan,
            source=source,
            data=data,
            attempts=1,
            bytes_sent=gathered.bytes_sent,
            bytes_received=gathered.bytes_received,
            seconds=0.0,
        )

    def barrier(self, *, group: Group = None, tag: str = "", timeout: float | None = None) -> Outcome:
        """See `Collective.barrier`."""
        return self.gather(None, group=group, tag=f"barrier {tag}", timeout=timeout)

    def _meet(self, key: Key, offer: torch.Tensor | None, weight: float, timeout: float | None) -> tuple[Plan, Meeting]:
        number = self._numbers.get(key, 0) + 1
        result = self._swarm.meet(self.peer_id, key, number, offer, weight, timeout)
        self._numbers[key] = number
        return result

    def _feedback_of(self, key: Key, length: int) -> ErrorFeedback | None:
        if self._codec.name == "fp32":
            return None
        if (key, length) not in self._feedback:
            self._feedback[key, length] = ErrorFeedback(self._codec, length)
        return self._feedback[key, length]

    def _sent(self, count: int) -> int:
        self.bytes_sent += count
        return count


def _key(operation: Operation, tag: str, group: Group) -> Key:
    return operation, tag, None if group is None else frozenset(group)

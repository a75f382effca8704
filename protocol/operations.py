"""The collective operations for trio programs: what stands behind the interface of `protocol.collective`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any, TypeVar

import attrs
import torch
import trio

from protocol.channels import Channels, ChannelSettings, checked_group
from protocol.collective import Block, Broadcasted, Exchanged, Gathered, Outcome, Reduced, Tensors, Window
from protocol.endpoint import Endpoint
from protocol.errors import Behind, Fork, Misfit, RequestRefused, RoundAborted
from protocol.flatten import block_bytes, blocks_of, flat, shapes_of
from protocol.identity import PeerId
from protocol.kinds import Terms
from protocol.operation import Operation
from protocol.pairs import Pairing
from protocol.plan import NO_DIGEST, Plan
from protocol.roster import Roster
from protocol.rounds import Rounds
from protocol.swap import Swap
from protocol.transfer import IN_WORKER

_T = TypeVar("_T", bound=Outcome)
Group = Collection[PeerId] | None

MOST_MISSED = 1 << 32
"""Bytes of results that were missed, and are kept for who asks for them, of all tags and groups together."""


@attrs.define(eq=False)
class _Past:
    """What has come of the operations of one tag and group."""

    last: int | None = None
    """The number of the last one that has given a result to its caller; None before the first in which we took part."""
    missed: list[Reduced] = attrs.field(factory=list)
    """With a window: results that are here, and not yet given to who asks for them."""


class AsyncCollective:
    """The operations of one run at one peer. `run` must run.

    What the operations do, and what their arguments mean, is said at `protocol.collective.Collective`. Each exists
    twice: `start_…` returns a handle at once; the other waits for the result, and gives the operation up if it is
    cancelled.

    Operations of one tag and group have numbers. Peers that call the same one at about the same time take part in it
    together; one that comes too late takes part in the next one with what it has: see `Outcome.number`.

    Args:
        endpoint: Carries everything.
        run_id: 32 bytes; what all members have in common.
        roster: Who is there.
        settings: What all members have to agree on.
    """

    def __init__(
        self, endpoint: Endpoint, run_id: bytes, *, roster: Roster, settings: ChannelSettings | None = None
    ) -> None:
        self._channels = Channels(endpoint, run_id, roster, settings or ChannelSettings())
        self._peer = endpoint.peer_id
        self._pasts: dict[Rounds, _Past] = {}
        self._operations = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Owns all tasks; runs until cancelled."""
        await self._channels.run(task_status=task_status)

    @property
    def busy(self) -> bool:
        """Whether an operation goes on here, ours or others' that we coordinate."""
        return self._operations > 0 or self._channels.busy

    async def all_reduce(
        self,
        values: Tensors,
        weight: float = 1.0,
        *,
        group: Group = None,
        tag: str = "",
        timeout: float | None = None,
        window: Window | None = None,
    ) -> Reduced:
        """See `Collective.all_reduce`."""
        operation = self.start_all_reduce(values, weight, group=group, tag=tag, timeout=timeout, window=window)
        return await _finished(operation)

    async def exchange(
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
        operation = self.start_exchange(values, weight, group=group, tag=tag, timeout=timeout, pairing=pairing)
        return await _finished(operation)

    async def gather(
        self, block: Block | None, *, group: Group = None, tag: str = "", timeout: float | None = None
    ) -> Gathered:
        """See `Collective.gather`."""
        return await _finished(self.start_gather(block, group=group, tag=tag, timeout=timeout))

    async def broadcast(
        self, block: Block | None, *, group: Group = None, tag: str = "", timeout: float | None = None
    ) -> Broadcasted:
        """See `Collective.broadcast`."""
        return await _finished(self.start_broadcast(block, group=group, tag=tag, timeout=timeout))

    async def barrier(self, *, group: Group = None, tag: str = "", timeout: float | None = None) -> Outcome:
        """See `Collective.barrier`."""
        return await _finished(self.start_barrier(group=group, tag=tag, timeout=timeout))

    def start_all_reduce(
        self,
        values: Tensors,
        weight: float = 1.0,
        *,
        group: Group = None,
        tag: str = "",
        timeout: float | None = None,
        window: Window | None = None,
    ) -> Operation[Reduced]:
        """Starts `all_reduce`."""
        followed: set[bytes] = set()  # plans for which these values are brought, and not those of an earlier call

        def heard(plan: Plan) -> bool:
            return plan.includes(self._peer, followed)

        async def act(rounds: Rounds, number: int) -> Reduced:
            missed = self._pasts[rounds].missed
            if missed and missed[-1].counted:
                reduced = missed.pop()  # our line broke when all had what we bring
            elif window is not None and rounds.tip < number - 1:
                raise Behind(self._peer, number - 1)  # a call was given up when its result was here
            else:
                vector, terms = await _flat(values), Terms.of("all_reduce", window)
                reduced = await rounds.all_reduce(number, vector, weight, terms=terms, followed=followed)
                if window is not None and weight > 0 and reduced.plan.id not in followed:
                    raise Behind(self._peer, number)  # the result is kept here
            earlier = tuple(missed)
            missed.clear()
            return attrs.evolve(reduced, shapes=shapes_of(values), missed=earlier)

        return self._start(act, group, tag, timeout, window, None if window is None else heard)

    def start_exchange(
        self,
        values: Tensors,
        weight: float = 1.0,
        *,
        group: Group = None,
        tag: str = "",
        timeout: float | None = None,
        pairing: Pairing = "random",
    ) -> Operation[Exchanged]:
        """Starts `exchange`."""

        async def act(rounds: Rounds, number: int) -> Exchanged:
            vector = await _flat(values)
            started = trio.current_time()
            terms = Terms.of("exchange", pairing=pairing)
            agreed, swap = await rounds.exchange(number, vector, weight, pairing=pairing, terms=terms)
            exchanged = exchanged_of(agreed, swap, trio.current_time() - started)
            return attrs.evolve(exchanged, shapes=shapes_of(values))

        return self._start(act, group, tag, timeout)

    def start_gather(
        self, block: Block | None, *, group: Group = None, tag: str = "", timeout: float | None = None
    ) -> Operation[Gathered]:
        """Starts `gather`."""
        return self._start(partial(_gather, block), group, tag, timeout)

    def start_broadcast(
        self, block: Block | None, *, group: Group = None, tag: str = "", timeout: float | None = None
    ) -> Operation[Broadcasted]:
        """Starts `broadcast`."""
        return self._start(partial(_broadcast, block), group, tag, timeout)

    def start_barrier(self, *, group: Group = None, tag: str = "", timeout: float | None = None) -> Operation[Outcome]:
        """Starts `barrier`."""

        async def act(rounds: Rounds, number: int) -> Outcome:
            return Outcome(**_costs(await rounds.gather(number, None, terms=Terms.of("barrier"))))

        return self._start(act, group, tag, timeout)

    def _start(
        self,
        act: Callable[[Rounds, int], Awaitable[_T]],
        group: Group,
        tag: str,
        timeout: float | None,
        window: Window | None = None,
        heard: Callable[[Plan], bool] | None = None,
    ) -> Operation[_T]:
        if self._channels.nursery is None:
            raise RoundAborted("the collective is not running")
        members = checked_group(group)

        async def work(operation: Operation[_T]) -> _T:
            await turn.wait()
            rounds = await self._channels.get(tag, members, window)
            return await self._carry_out(operation, act, rounds, heard)

        async def run() -> None:
            try:
                await operation.run()
            finally:
                queue.leave(turn)
                self._operations -= 1

        operation = Operation(work, timeout)
        queue = self._channels.queue(tag, members)
        turn = queue.join()
        try:
            self._channels.nursery.start_soon(run)
        except RuntimeError:  # it is about to end
            queue.leave(turn)
            raise RoundAborted("the collective has ended") from None
        self._operations += 1
        return operation

    async def _carry_out(
        self,
        operation: Operation[Any],
        act: Callable[[Rounds, int], Awaitable[_T]],
        rounds: Rounds,
        heard: Callable[[Plan], bool] | None,
    ) -> _T:
        """Takes part in the first operation that others have not finished without us; fetches what they have made.

        `heard`, with a window: whether most of the result of a plan has the values that we bring now.
        """
        past = self._pasts.setdefault(rounds, _Past())
        if past.last is None and rounds.made:  # what came of that, nobody has heard who called it
            past.last = rounds.made - 1
        while True:
            number = rounds.finished + 1
            operation.measure = partial(rounds.progress, number)
            try:
                outcome = await act(rounds, number)
            except Behind as behind:
                if heard is None:
                    rounds.committed(max(number, behind.revision), NO_DIGEST)
                else:
                    await self._catch_up(rounds, behind, past.missed, heard)
            except Fork:  # there are no states here: somebody lies, and is passed over from now on
                await trio.lowlevel.checkpoint()
            else:
                rounds.committed(outcome.number, NO_DIGEST)
                last, past.last = past.last, outcome.number
                return attrs.evolve(outcome, skipped=0 if heard or last is None else outcome.number - last - 1)

    async def _catch_up(
        self, rounds: Rounds, behind: Behind, missed: list[Reduced], heard: Callable[[Plan], bool]
    ) -> None:
        """Fetches the results that we have missed.

        Raises:
            Behind: They are not kept any more, or are too many. We go on with the operation after those.
            ShoalError: They cannot be had now. What is here already remains.
        """
        first = rounds.tip + 1
        last = max(first, behind.revision)
        lost = last - first >= rounds.kept
        for revision in range(first, first if lost else last + 1):
            try:
                reduced = await rounds.fetch_result(behind.peer, revision)
            except RequestRefused as refused:
                if refused.code != "unknown_round":
                    raise
                lost = True
                break
            kept = self._missed_bytes
            lost = kept > 0 and kept + reduced.mean.nbytes > MOST_MISSED
            if lost:
                break
            missed.append(attrs.evolve(reduced, counted=heard(reduced.plan)))
            rounds.committed(revision, NO_DIGEST)
            if missed[-1].counted:  # that is what came of our operation; the next one fetches the rest
                return
        if lost:  # with a state from elsewhere, the caller can take part in the next one
            missed.clear()
            rounds.committed(last, NO_DIGEST)
            raise behind

    @property
    def _missed_bytes(self) -> int:
        return sum(reduced.mean.nbytes for past in self._pasts.values() for reduced in past.missed)


async def _finished(operation: Operation[_T]) -> _T:
    try:
        return await operation.wait()
    finally:
        operation.cancel()
        with trio.CancelScope(shield=True):  # it has no reason to take long
            await operation.done.wait()


async def _flat(values: Tensors) -> torch.Tensor:
    size = sum(shape.numel() for shape in shapes_of(values))
    return flat(values) if size < IN_WORKER else await trio.to_thread.run_sync(flat, values)


def exchanged_of(agreed: Reduced, swap: Swap, seconds: float) -> Exchanged:
    """What came of an exchange, from what `Rounds.exchange` returned after so many seconds."""
    weights = dict(zip(agreed.members, agreed.weights, strict=True))
    return Exchanged(
        plan=agreed.plan,
        attempts=agreed.attempts,
        bytes_sent=swap.bytes_sent,
        bytes_received=swap.bytes_received,
        seconds=seconds,
        partner=swap.partner,
        values=swap.theirs,
        ours=swap.ours,
        counted=swap.finite,
        weight=0.0 if swap.partner is None or swap.theirs is None else weights[swap.partner],
        problem=swap.problem,
    )


def gathered_of(reduced: Reduced) -> Gathered:
    """What came of a gather, from what `Rounds.gather` or `Rounds.fetch_result` returned."""
    return Gathered(blocks=blocks_of(reduced), **_costs(reduced))


async def _gather(block: Block | None, rounds: Rounds, number: int) -> Gathered:
    return gathered_of(await rounds.gather(number, block_bytes(block), terms=Terms.of("gather")))


async def _broadcast(block: Block | None, rounds: Rounds, number: int) -> Broadcasted:
    gathered = gathered_of(await rounds.gather(number, block_bytes(block), terms=Terms.of("broadcast")))
    if not gathered.blocks:
        raise RoundAborted("nobody who took part has what is to be broadcast")
    (source, data), *others = gathered.blocks.items()
    for other, theirs in others:
        if theirs != data:
            raise Misfit(
                f"broadcast number {number} has two sources, with different blocks: {source.short} and {other.short}. "
                "One gives a block, and all others None",
                (source, other),
            )
    return Broadcasted(source=source, data=data, **_costs(gathered))


def _costs(outcome: Outcome) -> dict[str, Any]:
    return {field.name: getattr(outcome, field.name) for field in attrs.fields(Outcome)}

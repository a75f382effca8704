"""The results of the last few rounds: kept, given to peers that missed one, and fetched from them."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import torch
import trio

from protocol.collective import Reduced
from protocol.contribution import is_finite
from protocol.coordinator import RoundTimes
from protocol.endpoint import Endpoint, Stream
from protocol.errors import Fork, ProtocolError, RequestRefused, RequestTimeout
from protocol.identity import PeerId
from protocol.plan import Plan
from protocol.round_messages import FetchResult, Result
from protocol.transfer import READ
from protocol.vectors import room_for, vector_bytes


class Results:
    """The results of one run and tag at one peer."""

    def __init__(self, endpoint: Endpoint, run: bytes, tag: str, times: RoundTimes) -> None:
        self._endpoint, self._run, self._tag, self._times = endpoint, run, tag, times
        self._kept: dict[int, Reduced] = {}
        self._came = self._since = math.inf  # when the newest one did; and when we would have had the last one
        self._passed = -1

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def newest(self) -> int:
        """The newest revision of which the result is kept; -1 if there is none."""
        return max(self._kept, default=-1)

    def get(self, revision: int) -> Reduced | None:
        """The result of one round, if it is kept."""
        return self._kept.get(revision)

    def before(self, revision: int) -> tuple[frozenset[PeerId], float]:
        """The members of the round before this one, and when its result came here on trio's clock, if it has.

        If we have missed that, those of our last one, and when it would have come if all rounds took equally long.
        """
        last = self._kept.get(self.newest)
        if last is None or revision != max(self.newest, self._passed) + 1:
            return frozenset(), math.inf
        return frozenset(last.plan.members), self._since

    def keep(self, reduced: Reduced) -> None:
        """Keeps a result, and drops the oldest one if there are too many."""
        if reduced.plan.revision > self.newest:
            self._came = self._since = trio.current_time()
        self._kept[reduced.plan.revision] = reduced
        for revision in sorted(self._kept)[: -self._times.keep]:
            del self._kept[revision]

    def pass_over(self, revision: int) -> None:
        """The rounds up to this one are over. Those of which we have no result were finished by others."""
        if revision > max(self.newest, self._passed):
            now = trio.current_time()
            self._passed, self._since = revision, now - (now - self._came) / (revision - self.newest + 1)

    def clear(self) -> None:
        """Drops all results."""
        self._kept.clear()

    async def give(self, request: FetchResult, stream: Stream) -> None:
        """Answers a peer that missed a round.

        Raises:
            RequestRefused: The result is not kept.
        """
        reduced = self._kept.get(request.revision)
        if reduced is None:
            raise RequestRefused(f"no result of revision {request.revision} is kept here", code="unknown_round")
        await stream.send(Result(reduced.plan))
        data = vector_bytes(reduced.mean)
        for start in range(0, data.nbytes, READ):
            await stream.send_bytes(data[start : start + READ])

    async def fetch(
        self, peer: PeerId, revision: int, *, base: bytes | None, misfit: Callable[[Plan], Awaitable[str | None]]
    ) -> Reduced:
        """The result of a round that this peer missed.

        Args:
            peer: Who has it.
            revision: Which round.
            base: Digest of the state that the result has to belong to; None if any will do.
            misfit: Says what is wrong with the plan of a result, or None.

        Raises:
            RequestRefused: With code "unknown_round": the peer does not keep it (any more).
            Fork: The result belongs to another state of the revision before than ours.
            ShoalError: The peer cannot be reached, is too slow, or sent something else.
        """
        started, times = trio.current_time(), self._times
        try:
            async with self._endpoint.open(peer, FetchResult(self._run, self._tag, revision), bulk=True) as stream:
                plan = (await stream.receive(Result, timeout=times.stall)).plan
                self._check(plan, peer, revision, base)
                if (problem := await misfit(plan)) is not None:
                    raise ProtocolError(f"{peer.short} sent a result that does not fit: {problem}")
                result = room_for(plan.nbytes)
                if plan.operation != "gather":
                    result = result.view(torch.float32)
                data = vector_bytes(result)
                with trio.fail_after(times.transfer(plan.load)):
                    for start in range(0, data.nbytes, READ):
                        with trio.fail_after(times.stall):
                            await stream.receive_into(data[start : start + READ])
                await stream.finish()
        except trio.TooSlowError:
            raise RequestTimeout(f"{peer.short} is too slow to give us the result of revision {revision}") from None
        if plan.operation == "reduce" and not await is_finite(result):
            raise ProtocolError(f"{peer.short} sent a result that is not finite")
        return Reduced(
            plan=plan,
            mean=result,
            contributors=plan.contributors,
            attempts=plan.attempt,
            bytes_sent=0,
            bytes_received=data.nbytes,
            seconds=trio.current_time() - started,
            weight=plan.weight,
        )

    def _check(self, plan: Plan, peer: PeerId, revision: int, base: bytes | None) -> None:
        if (plan.run, plan.tag, plan.revision) != (self._run, self._tag, revision):
            raise ProtocolError(f"{peer.short} sent the result of another round")
        if base is not None and plan.base != base:
            raise Fork(peer, revision - 1, ours=base, theirs=plan.base)

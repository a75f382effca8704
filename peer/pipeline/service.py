"""A stage's server on the network: takes requests of trainers, computes them in a worker thread, and answers."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial

import attrs
import torch
import trio

from optim.swarm.arrivals import Arrived
from optim.swarm.messages import Answer, Kind, Request, Withdraw
from optim.swarm.server import Batch, StageServer
from optim.swarm.state import StageState
from optim.swarm.trainer import WORK
from peer.node import Compute
from peer.pipeline.messages import (
    Ask,
    FetchState,
    FetchTied,
    Sizes,
    TensorsReply,
    WithdrawReply,
    WithdrawRequest,
    receive_request,
    send_answer,
)
from peer.pipeline.tensors import dump, dump_tensors
from protocol.courtesy import Courtesy
from protocol.endpoint import Endpoint
from protocol.errors import ProtocolError, RequestRefused, ShoalError
from protocol.handlers import Handler
from protocol.identity import PeerId
from protocol.stream import Stream

RATE_SMOOTHING = 0.2
"""How much the newest batch counts in the measured rate."""

LONGEST_BATCH = 0.1
"""Seconds that a batch takes at most, about, if it has more than one request: the next stage waits for all of it."""

IDLE = 60.0
"""Seconds after which a stream on which nothing is asked any more is given up."""

TIED_STEPS = 2
"""Steps for which the gradients of what several stages use are kept for other stages."""


@attrs.define(eq=False)
class _Waiting:
    """A trainer that waits for an answer."""

    done: trio.Event = attrs.field(factory=trio.Event)
    answer: Answer | None = None
    error: ShoalError | None = None
    gone: bool = False

    def fail(self, error: ShoalError) -> None:
        self.error = error
        self.done.set()


@attrs.frozen(eq=False)
class _Dump:
    """A state as bytes."""

    of: tuple[int, int, bool]
    """How many states had been taken in, the step, and whether that was settled: what else it has follows from that."""
    data: bytes


class StageService:
    """Serves one stage until cancelled.

    Args:
        endpoint: Carries everything.
        run_id: The stage's, see `stage_run`.
        server: What it does.
        sizes: What a microbatch has at most.
        admits: Who is a member of the run.
        compute: Runs what takes long.
        courtesy: Lets operations go before states that are sent.
        changed: Called when the ledger has changed.
        began: Told of the first batch of each kind in a step, before it is computed.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        run_id: bytes,
        server: StageServer,
        *,
        sizes: Sizes,
        admits: Callable[[PeerId], bool],
        compute: Compute,
        courtesy: Courtesy,
        changed: Callable[[], None],
        began: Callable[[str, int], None],
    ) -> None:
        self.server = server
        self.rate = 0.0
        """Samples per second, forwards and backwards, as measured."""
        self.served = -math.inf
        """When a state was last sent."""
        self._endpoint, self._run, self._admits, self._sizes = endpoint, run_id, admits, sizes
        self._compute, self._courtesy, self._changed = compute, courtesy, changed
        self._began, self._begun = began, set[tuple[str, int]]()
        self._arrived = trio.Event()
        self._lock = trio.Lock()
        self._tied: dict[int, Mapping[str, torch.Tensor]] = {}
        self._dump: _Dump | None = None
        self._dumping = trio.Lock()
        self._restored = 0
        self._fetching = 0  # who is being sent a state
        self._ended = False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Computes what is asked for, in batches, until cancelled; who waits then is refused."""
        handlers: dict[type, Handler] = {
            Ask: self._on_ask,
            WithdrawRequest: self._on_withdraw,
            FetchState: self._on_fetch,
            FetchTied: self._on_tied,
        }
        waiting = self.server.arrivals
        try:
            with self._endpoint.serving(self._run, "", handlers):
                task_status.started()
                while True:
                    arrived = self._arrived
                    for each in waiting.expired(trio.current_time()):
                        _waiting(each.ticket).fail(RequestRefused("it has waited too long", code="late"))
                    async with self._lock:
                        batch = self.server.take(trio.current_time(), self._most())
                        if batch is not None:
                            await self._work(batch)
                    if batch is None:
                        with trio.move_on_after(1.0 if len(waiting) else math.inf):
                            await arrived.wait()
        finally:
            self._ended = True
            for each in waiting.expired(math.inf):
                _waiting(each.ticket).fail(_gone())

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[StageServer]:
        """The server, between two batches; nothing is computed within the block."""
        async with self._lock:
            yield self.server
        self.wake()

    def wake(self) -> None:
        """There may be something to compute."""
        self._arrived.set()
        self._arrived = trio.Event()

    def keep_tied(self, gradients: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Keeps our part of the gradients of what several stages use, by step, for those stages."""
        kept = {**self._tied, **gradients}
        self._tied = {step: named for step, named in kept.items() if step > max(kept) - TIED_STEPS}

    async def snapshot(self) -> StageState:
        """A copy of the stage's state."""
        async with self.paused() as server:
            state = await self._compute(server.snapshot)
            return attrs.evolve(state, tied=self._tied)

    async def advance(self, tied: Mapping[int, Mapping[str, torch.Tensor]], scale: float) -> None:
        """Makes the optimizer's step, see `StageServer.advance`."""
        async with self.paused() as server:
            self._give_up(await self._compute(server.advance, tied, scale))

    def _give_up(self, arrived: Iterable[Arrived]) -> None:
        """Tells those who wait that what they have asked for is not done any more."""
        for each in arrived:
            _waiting(each.ticket).fail(RequestRefused(f"the stage is at step {self.server.step} by now", code="stale"))

    async def restore(self, state: StageState) -> None:
        """Goes on from a state."""
        async with self.paused() as server:
            self._give_up(await self._compute(server.restore, state))
            self._restored += 1
            self._tied = {}  # it may be of another history
            self.keep_tied(state.tied)

    async def _work(self, batch: Batch) -> None:
        began = trio.current_time()
        self._tell_begin(batch)
        answers: list[Answer | ProtocolError] | None = None
        try:
            answers = await self._compute(self.server.compute, batch)
        finally:
            finished = self.server.finish(batch, answers)
        self._measure(batch, trio.current_time() - began)
        for ticket, answer in finished:
            waiting = _waiting(ticket)
            if isinstance(answer, ProtocolError):
                waiting.fail(RequestRefused(str(answer), code="misfit"))
                continue
            waiting.answer = answer
            waiting.done.set()
        if batch.counts:
            self._changed()

    def _tell_begin(self, batch: Batch) -> None:
        kind, step = batch.requests[0].kind, self.server.step
        if (kind, step) not in self._begun:
            self._begun = {each for each in self._begun if each[1] == step} | {(kind, step)}
            self._began(kind, step)

    def _measure(self, batch: Batch, seconds: float) -> None:
        work = sum(WORK[request.kind] * request.samples for request in batch.requests)
        if work and seconds > 0:
            rate = work / sum(WORK.values()) / seconds  # a sample takes each kind once
            self.rate = rate if not self.rate else self.rate + RATE_SMOOTHING * (rate - self.rate)

    def _most(self) -> dict[Kind, float]:
        """Samples that are computed at once, by kind: before anything is measured, a single request."""
        work = LONGEST_BATCH * self.rate * sum(WORK.values())
        return {kind: work / each for kind, each in WORK.items() if each}

    def _check(self, stream: Stream) -> None:
        if not self._admits(stream.peer):
            raise RequestRefused("stages are for members: say hello first", code="not_a_member")

    async def _on_ask(self, ask: Ask, stream: Stream) -> None:
        while True:  # a trainer uses its streams again and again
            self._check(stream)
            if ask.run != self._run:
                raise RequestRefused("this stream is for requests to another stage", code="unknown_run")
            await send_answer(stream, await self.ask(await receive_request(stream, ask, self._sizes)))
            ask = await stream.receive(Ask, timeout=IDLE)

    async def ask(self, request: Request) -> Answer:
        """Does what a trainer asks for.

        Raises:
            ShoalError: Nothing comes of it.
        """
        if self._ended:
            raise _gone()
        waiting = _Waiting()
        self.server.submit(waiting, request, trio.current_time())
        self.wake()
        try:
            with trio.move_on_after(request.patience):
                await waiting.done.wait()
        finally:
            waiting.gone = True
            self.server.arrivals.forget(lambda ticket: _waiting(ticket).gone)
        if waiting.answer is None:
            raise waiting.error or RequestRefused("it was given up, or has waited too long", code="late")
        return waiting.answer

    async def _on_withdraw(self, request: WithdrawRequest, stream: Stream) -> WithdrawReply:
        self._check(stream)
        self._give_up(self.server.arrivals.withdraw(request.step, request.number))
        said = self.server.withdraw(Withdraw(step=request.step, number=request.number))
        return WithdrawReply(step=said.step, number=said.number, counted=said.counted, attempt=said.attempt)

    async def _on_fetch(self, request: FetchState, stream: Stream) -> None:
        self._check(stream)
        self._fetching += 1
        try:
            step, data = await self._dumped()
            await send_tensors(stream, step, data, self._courtesy)
        finally:
            self._fetching -= 1
            if not self._fetching:
                self._dump = None
        self.served = trio.current_time()

    async def _dumped(self) -> tuple[int, bytes]:
        """The state as bytes: the same for all who fetch it at the same time."""
        async with self._dumping:
            dumped, of = self._dump, (self._restored, self.server.step, self.server.phase == "settled")
            if dumped is None or dumped.of != of:
                restored, state = self._restored, await self.snapshot()
                data = await self._compute(partial(dump, state))
                dumped = self._dump = _Dump((restored, state.step, state.mean is not None), data)
            return dumped.of[1], dumped.data

    async def _on_tied(self, request: FetchTied, stream: Stream) -> None:
        self._check(stream)
        if request.step not in self._tied:
            raise RequestRefused(f"step {request.step} is not settled here, or long over", code="unsettled")
        data = await self._compute(dump_tensors, self._tied[request.step])
        await send_tensors(stream, request.step, data, self._courtesy)


async def send_tensors(stream: Stream, step: int, data: bytes, courtesy: Courtesy) -> None:
    """Sends tensors, which give way to operations."""
    await stream.send(TensorsReply(step, len(data)))
    await courtesy.send(stream, data)
    await stream.finish()


def _gone() -> RequestRefused:
    return RequestRefused("this peer does not serve the stage any more", code="gone")


def _waiting(ticket: object) -> _Waiting:
    assert isinstance(ticket, _Waiting)
    return ticket

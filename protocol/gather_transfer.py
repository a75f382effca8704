"""A gather on real streams: what `protocol.gather` schedules, moved by two tasks, as `protocol.transfer` does it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import torch
import trio

from protocol.attempt import Failure
from protocol.coordinator import RoundTimes
from protocol.endpoint import Endpoint, Stream
from protocol.errors import ProtocolError, ShoalError
from protocol.gather import PIECE, Gather
from protocol.identity import PeerId
from protocol.plan import Plan
from protocol.round_messages import GatherBlock, RingData
from protocol.salvage import Holding
from protocol.transfer import RingInbox
from protocol.watch import Watch, received


class GatherTransfer:
    """This peer's part in one attempt at a gather, or at an operation without data; see `Attempt`.

    Args:
        plan: The accepted plan, which includes this peer.
        block: This peer's block; only read.
        pace: As for `Transfer`, as is `ask`.
    """

    def __init__(
        self,
        plan: Plan,
        block: torch.Tensor,
        *,
        endpoint: Endpoint,
        inbox: RingInbox,
        times: RoundTimes,
        pace: float,
        ask: Callable[[PeerId], Awaitable[float | None]],
    ) -> None:
        self.plan = plan
        self.settled = trio.Event()
        self.failure: Failure | None = None
        self.bytes_sent = 0
        self.bytes_received = 0
        self._endpoint, self._inbox, self._times = endpoint, inbox, times
        self._place = plan.members.index(endpoint.peer_id)
        self._gather = Gather(plan, self._place, block)
        self._progress = trio.Event()
        self._pace, self._ask = pace, ask
        self._watch: Watch | None = None
        self._sent = 0
        self._sending: float | None = None  # since when the next piece is being sent
        self._scope = trio.CancelScope()

    @property
    def complete(self) -> bool:
        """Whether every block is here."""
        return self._gather.complete

    @property
    def segments(self) -> int:
        """Number of blocks that have come in."""
        return self._gather.blocks

    @property
    def progress(self) -> tuple[int, int]:
        """Pieces that have come in, and how many there are."""
        return self._gather.received, self._gather.incoming

    @property
    def mean(self) -> torch.Tensor:
        """All blocks one after the other, once `complete`."""
        return self._gather.values

    def waiting(self, peer: PeerId) -> float | None:
        """See `Attempt.waiting`."""
        right = self.plan.members[(self._place + 1) % len(self.plan.members)]
        if self._watch is None or peer != right:
            return None
        gather = self._gather
        return self._watch.waiting(
            sent=self._sent, sendable=gather.sendable, outgoing=gather.outgoing, began=self._sending
        )

    def abort(self) -> None:
        """Ends the transfer; its streams are reset."""
        self._scope.cancel()
        self.settled.set()

    def holdings(self) -> tuple[Holding, ...]:
        """Nothing: blocks are not salvaged."""
        return ()

    async def run(self) -> None:
        """Carries the plan out, and returns when the right neighbour has got everything from us, too."""
        members = self.plan.members
        self._scope.deadline = trio.current_time() + self._times.attempt(self.plan.load, len(members))
        try:
            with self._scope:
                await trio.lowlevel.checkpoint()
                if self._gather.complete:
                    self.settled.set()
                    return
                left = members[self._place - 1]
                watch = self._watch = Watch(
                    (0,),
                    times=self._times,
                    pace=self._pace,
                    ask=lambda _: self._ask(left),
                    line=lambda _: received(self._endpoint, left),
                    gap=2 * PIECE,
                )
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send, members[(self._place + 1) % len(members)])
                    nursery.start_soon(self._receive, left, watch)
                    if (stuck := await watch.run()) is not None:
                        self._fail(left, stuck[1])
        finally:
            self._watch = None  # it refers to us
        if trio.current_time() >= self._scope.deadline:
            self._fail(members[self._place - 1], "the attempt took too long")

    async def _send(self, right: PeerId) -> None:
        plan, gather = self.plan, self._gather
        try:
            request = RingData(plan.run, plan.tag, plan.id)
            async with self._endpoint.open(right, request, bulk=True, one_way=True) as stream:
                for number in range(gather.outgoing):
                    while number >= gather.sendable:
                        self._progress = trio.Event()
                        await self._progress.wait()
                    piece = gather.outgoing_piece(number)
                    if piece.first:
                        await stream.send(GatherBlock(piece.place))
                    self._sending = trio.current_time()
                    await stream.send_bytes(gather.data(piece), last=number == gather.outgoing - 1)
                    self._sending = None
                    self.bytes_sent += piece.stop - piece.start
                    self._sent = number + 1
        except ShoalError as error:
            self._fail(right, str(error))

    async def _receive(self, left: PeerId, watch: Watch) -> None:
        gather = self._gather

        async def take(stream: Stream) -> None:
            while not gather.complete:
                piece = gather.expected
                if piece.first and (await stream.receive(GatherBlock)).place != piece.place:
                    raise ProtocolError(f"{left.short} sent a block out of turn")
                target = gather.data(piece)
                await stream.receive_into(target)
                self.bytes_received += target.nbytes
                watch.came(0, target.nbytes + piece.first)
                gather.filled()
                self._progress.set()
            self.settled.set()

        await self._inbox.receive(self.plan.id, left, watch, 0, take, self._fail)

    def _fail(self, suspect: PeerId, reason: str) -> None:
        if not self.settled.is_set():
            self.failure = Failure(suspect, reason)
            self.settled.set()

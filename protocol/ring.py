"""Ring all-reduce as a schedule and the arithmetic on it, without any input or output.

The vector is cut into one block per member. In step t of 2(n-1), the member at place r sends block r-t to its right
neighbour and receives block r-t-1 (all modulo n) from its left one. In the first n-1 steps it adds its own values to
what it receives (reduce-scatter), so that block p is summed in the order p, p+1, ..., p+n-1 of the places; afterwards
it stores what it receives (all-gather). What is received in one step is exactly what is sent in the next, so each
member sends its own block and then forwards, piece by piece, all that comes in, except for the last step's. (Patarasuk
and Yuan 2009, "Bandwidth optimal all-reduce algorithms".)

Parts that an earlier attempt has reduced belong to no block. They travel with the all-gather: from each member that
holds one to the right, until the next member that holds it.

Invariants:
- Every block is summed once, along one chain, and its final bytes are passed on verbatim: all members end with
  identical bits.
- The caller's values are never written. Every element of the result is received in its place, and what is ours is
  scaled a piece at a time, while the piece is in the cache: before it is sent first, or when it is added.
- A piece overwrites only bytes that have been sent before: what comes back has gone round the ring.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from protocol.direct import reference_direct
from protocol.errors import ProtocolError
from protocol.identity import PeerId
from protocol.plan import Plan
from protocol.reduction import Reduction, Segment, pieces, placed_blocks
from protocol.salvage import nearest_holder
from protocol.vectors import VectorPool, add_scaled, all_finite, cut, scale

LARGEST_PIECE = 1 << 20
"""Elements of a segment, at most: 4 MiB. What arrives with the last bytes of one has to be copied."""

SMALLEST_PIECE = 1 << 14
"""Elements that fill a record."""

_AT_ONCE = 1 << 16
"""Elements that are scaled and added together: they stay in the cache meanwhile. That takes less time than handing it
to a worker thread (50 µs and more), so it is done in the caller's task."""

MOST_PIECES = 8
"""Of a block, if they are not too small: a member need not have a whole block before it sends the first."""


def piece_of(plan: Plan) -> int:
    """Most elements of a segment. The bytes on the wire do not depend on it."""
    return min(max(plan.length // (len(plan.members) * MOST_PIECES), SMALLEST_PIECE), LARGEST_PIECE)


class Schedule:
    """Who sends what in which step.

    Args:
        plan: The plan.
        piece: Most elements of a segment.
    """

    def __init__(self, plan: Plan, *, piece: int) -> None:
        self._size = len(plan.members)
        self._salvaged = plan.salvaged
        self._piece = piece
        self._blocks = [tuple(pieces(block, piece)) for block in placed_blocks(plan)]
        self._passing: dict[int, dict[int, list[Segment]]] = {}  # see `_passed_on`, by place

    @property
    def steps(self) -> int:
        return 2 * (self._size - 1)

    def sends(self, place: int, step: int) -> Iterator[Segment]:
        """What the member at `place` sends in one step, in order."""
        add = step < self._size - 1
        for start, stop in self._blocks[(place - step) % self._size]:
            yield Segment(start, stop, add)
        if not add:
            yield from self._passed_on(place).get(step - (self._size - 1), ())

    def receives(self, place: int, step: int) -> Iterator[Segment]:
        """What the member at `place` receives in one step: what its left neighbour sends."""
        return self.sends((place - 1) % self._size, step)

    def _passed_on(self, place: int) -> dict[int, list[Segment]]:
        """The salvaged parts that our right neighbour lacks, by how far the next holder to the left is (0: we)."""
        if place not in self._passing:
            right, found = (place + 1) % self._size, defaultdict[int, list[Segment]](list)
            for part in self._salvaged:
                if nearest_holder(part, right) != right:
                    distance = (place - nearest_holder(part, place)) % self._size
                    bounds = pieces([(part.start, part.stop)], self._piece)
                    found[distance] += [Segment(start, stop, False, part.source) for start, stop in bounds]
            self._passing[place] = found
        return self._passing[place]


class Ring(Reduction):
    """One member's part in one attempt at a ring: it receives from the left, and sends to the right.

    Args:
        plan: The plan that was accepted.
        place: Our place in it.
        values: Our values: 1-D fp32 on the CPU, `plan.length` elements. Only read.
        previous: See `Reduction`.
        memory: See `Reduction`.
        piece: Most elements of a segment; by default as the plan's length suggests.
    """

    def __init__(
        self,
        plan: Plan,
        place: int,
        values: torch.Tensor,
        *,
        previous: Reduction | None = None,
        memory: VectorPool | None = None,
        piece: int | None = None,
    ) -> None:
        super().__init__(plan, place, previous, memory or VectorPool())
        size = len(plan.members)
        self.sources = ((place - 1) % size,) if size > 1 else ()
        self.sinks = ((place + 1) % size,) if size > 1 else ()
        schedule = Schedule(plan, piece=piece_of(plan) if piece is None else piece)
        self._values, self._share = values, plan.shares[place]
        self._sends, self._receives, self._needs = _itinerary(schedule, place)
        self._own = sum(1 for _ in schedule.sends(place, 0)) if size > 1 else 0  # segments that nobody has added to
        last = schedule.steps // 2 - 1  # the step in which reduced elements come in for the first time
        self._summed = sum(1 for step in range(last) for _ in schedule.receives(place, step))
        # NumPy computes the same bits as PyTorch, and takes a fifth of the time to begin with it.
        self._ours, self._array = values.detach().numpy(), self._buffer.numpy()
        self._scratch = np.empty(min(plan.length, _AT_ONCE), dtype=np.float32)
        if size == 1:
            for start, stop in self._free:
                scale(values[start:stop], self._share, out=self._buffer[start:stop])
                self._hold(start, stop)

    @property
    def complete(self) -> bool:
        return self.received == len(self._receives)

    @property
    def gap(self) -> int:
        return 2 * max((segment.stop - segment.start for segment in self._receives), default=0) + self._salvaged

    @property
    def bytes_out(self) -> int:
        return sum(4 * (segment.stop - segment.start) for segment in self._sends)

    def outgoing(self, sink: int) -> int:
        return len(self._sends)

    def incoming(self, source: int) -> int:
        return len(self._receives)

    def sendable(self, sink: int) -> int:
        return bisect_right(self._needs, self.received)

    def segment(self, sink: int, number: int) -> memoryview:
        segment = self._sends[number]
        if number < self._own:
            part = slice(segment.start, segment.stop)
            scale(self._values[part], self._share, out=self._buffer[part])
        return self._bytes[4 * segment.start : 4 * segment.stop]

    def target(self, source: int) -> memoryview:
        segment = self._receives[self.received]
        return self._bytes[4 * segment.start : 4 * segment.stop]

    def release(self) -> None:
        self._scratch = np.empty(0, dtype=np.float32)

    def filled(self, source: int) -> None:
        """See `Reduction.filled`.

        Raises:
            ProtocolError: The values are not finite. What came in before was finite, and is passed on only after it
                was looked at here, so the left neighbour itself is the cause.
        """
        segment = self._receives[self.received]
        for start, stop in pieces([(segment.start, segment.stop)], _AT_ONCE):
            if segment.add:
                add_scaled(self._array[start:stop], self._ours[start:stop], self._share, self._scratch[: stop - start])
            values = self._buffer[start:stop]
            if not all_finite(values) and not (segment.add and all_finite(cut(values))):
                raise ProtocolError("the left neighbour's values are not finite")
        if self.received >= self._summed:
            self._hold(segment.start, segment.stop, segment.source)
        self.received += 1


def _itinerary(schedule: Schedule, place: int) -> tuple[tuple[Segment, ...], tuple[Segment, ...], list[int]]:
    """What a member sends, what it receives, and how many of these it needs before it can send each of those."""
    sends: list[Segment] = []
    receives: list[Segment] = []
    needs: list[int] = []
    came: dict[int, int] = {}  # in the step before, by where the segment starts
    for step in range(schedule.steps):
        for segment in schedule.sends(place, step):
            sends.append(segment)
            needs.append(max(came.get(segment.start, 0), needs[-1] if needs else 0))
        came = {}
        for segment in schedule.receives(place, step):
            receives.append(segment)
            came[segment.start] = len(receives)
    return tuple(sends), tuple(receives), needs


def reference(
    plan: Plan, inputs: Mapping[PeerId, torch.Tensor], earlier: Mapping[bytes, Plan] | None = None
) -> torch.Tensor:
    """What every member of a plan ends with, bit for bit, computed in one place.

    Args:
        plan: The plan that was carried out.
        inputs: Everybody's values.
        earlier: The plans that it salvages from, by id.
    """
    mean = torch.empty(plan.length, dtype=torch.float32)
    if plan.schedule == "ring":
        _reference_ring(plan, inputs, mean)
    else:
        reference_direct(plan, inputs, mean)
    for part in plan.salvaged:
        assert earlier is not None
        source = reference(earlier[plan.sources[part.source].plan], inputs, earlier)
        mean[part.start : part.stop] = source[part.start : part.stop]
    return mean


def _reference_ring(plan: Plan, inputs: Mapping[PeerId, torch.Tensor], mean: torch.Tensor) -> None:
    size = len(plan.members)
    scaled = [torch.empty(plan.length, dtype=torch.float32) for _ in plan.members]
    for peer, share, out in zip(plan.members, plan.shares, scaled, strict=True):
        scale(inputs[peer], share, out=out)
    for index, block in enumerate(placed_blocks(plan)):
        for start, stop in block:
            mean[start:stop] = scaled[index][start:stop]
            for step in range(1, size):
                cut(mean[start:stop].add_(scaled[(index + step) % size][start:stop]))

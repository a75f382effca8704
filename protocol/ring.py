"""Ring all-reduce as a schedule and the arithmetic on it, without any input or output.

The vector is cut into one block per member. In step t of 2(n-1), the member at place r sends block r-t to its right
neighbour and receives block r-t-1 (all modulo n) from its left one. In the first n-1 steps it adds what it receives to
its own values (reduce-scatter), so that block p is summed in the order p, p+1, ..., p+n-1 of the places; afterwards it
stores what it receives (all-gather). What is received in one step is exactly what is sent in the next, so each member
sends its own block and then forwards, piece by piece, all that comes in, except for the last step's. (Patarasuk and
Yuan 2009, "Bandwidth optimal all-reduce algorithms".)

Parts that an earlier attempt has reduced belong to no block. They travel with the all-gather: from each member that
holds one to the right, until the next member that holds it.

Invariants:
- Every block is summed once, along one chain, and its final bytes are passed on verbatim: all members end with
  identical bits.
- The caller's values are never written: attempts work on a scaled copy.
- A piece overwrites only bytes that have been sent before: what comes back has gone round the ring.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping

import attrs
import torch

from protocol.errors import ProtocolError
from protocol.identity import PeerId
from protocol.plan import Plan, Source
from protocol.salvage import MAX_HOLDINGS, Bounds, Holding, merged, missing

PIECE = 1 << 16
"""Elements that are received, added and forwarded together: 256 KiB. Adding that many takes about 20 µs, less than
handing it to a worker thread does (50 µs and more, measured), so the additions stay in the caller's task."""


@attrs.frozen
class Segment:
    """Elements [start, stop) of the vector, on their way."""

    start: int
    stop: int
    add: bool
    """Whether the receiver adds or stores them."""
    source: int | None = None
    """Which of the plan's sources has reduced them; None: the plan itself."""


def partition(length: int, size: int, index: int) -> tuple[int, int]:
    """Bounds of one of `size` parts of `length` elements; the first `length % size` have one element more."""
    base, extra = divmod(length, size)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)


class Schedule:
    """Who sends what in which step.

    Args:
        plan: The plan.
        piece: Most elements of a segment.
    """

    def __init__(self, plan: Plan, *, piece: int = PIECE) -> None:
        self._size = len(plan.members)
        self._salvaged = plan.salvaged
        self._piece = piece
        self.free = tuple(_free(plan))
        """What is not salvaged: bounds, in order."""
        total = sum(stop - start for start, stop in self.free)
        self._blocks = [
            tuple(_pieces(_window(self.free, *partition(total, self._size, index)), piece))
            for index in range(self._size)
        ]

    @property
    def steps(self) -> int:
        return 2 * (self._size - 1)

    def sends(self, place: int, step: int) -> Iterator[Segment]:
        """What the member at `place` sends in one step, in order."""
        add = step < self._size - 1
        for start, stop in self._blocks[(place - step) % self._size]:
            yield Segment(start, stop, add)
        if not add:
            yield from self._passed_on(place, step - (self._size - 1))

    def receives(self, place: int, step: int) -> Iterator[Segment]:
        """What the member at `place` receives in one step: what its left neighbour sends."""
        return self.sends((place - 1) % self._size, step)

    def _passed_on(self, place: int, distance: int) -> Iterator[Segment]:
        """The salvaged parts whose next holder to the left is so far away (0: we), and which our neighbour lacks."""
        for part in self._salvaged:
            holders = frozenset(part.holders)
            if (place - distance) % self._size not in holders or (place + 1) % self._size in holders:
                continue
            if all((place - nearer) % self._size not in holders for nearer in range(distance)):
                for start, stop in _pieces([(part.start, part.stop)], self._piece):
                    yield Segment(start, stop, False, part.source)


def _free(plan: Plan) -> Iterator[Bounds]:
    position = 0
    for part in plan.salvaged:
        if position < part.start:
            yield position, part.start
        position = part.stop
    if position < plan.length:
        yield position, plan.length


def _window(spans: Iterable[Bounds], first: int, end: int) -> Iterator[Bounds]:
    """Where the elements `first` to `end` are, of those in the spans."""
    position = 0
    for start, stop in spans:
        low, high = max(first - position, 0), min(end - position, stop - start)
        if low < high:
            yield start + low, start + high
        position += stop - start


def _pieces(spans: Iterable[Bounds], piece: int) -> Iterator[Bounds]:
    for first, end in spans:
        for start in range(first, end, piece):
            yield start, min(start + piece, end)


class Ring:
    """One member's part in one attempt: where the next bytes go, and which can be sent.

    Segments are numbered in the order of the schedule. Segment k of what is sent may be sent as soon as
    `k < sendable`.

    Args:
        plan: The plan that was accepted.
        place: Our place in it.
        values: Our values: 1-D fp32 on the CPU, `plan.length` elements. Only read, and only in the constructor.
        previous: Our part in the attempt before, which has ended: its memory is used again, and what it holds of the
            parts that the plan salvages.
        piece: Most elements of a segment.

    Raises:
        ValueError: We do not hold a part that the plan says we hold.
    """

    def __init__(
        self, plan: Plan, place: int, values: torch.Tensor, *, previous: Ring | None = None, piece: int = PIECE
    ) -> None:
        if missing(plan, place, () if previous is None else previous.holdings()):
            raise ValueError("the plan relies on parts that this member does not hold")
        schedule = Schedule(plan, piece=piece)
        self.plan = plan
        self._kept = [(part.source, (part.start, part.stop)) for part in plan.salvaged if place in part.holders]
        self._free = schedule.free
        self._buffer: torch.Tensor = (
            torch.empty(plan.length, dtype=torch.float32) if previous is None else previous._buffer
        )
        for start, stop in self._free:
            _scale(values[start:stop], plan.shares[place], out=self._buffer[start:stop])
        self._bytes = _byte_view(self._buffer)
        self._sends, self._receives, self._needs = _itinerary(schedule, place)
        longest = max((segment.stop - segment.start for segment in self._receives if segment.add), default=0)
        self._scratch = torch.empty(longest, dtype=torch.float32)
        self._scratch_bytes = _byte_view(self._scratch)
        last = schedule.steps // 2 - 1  # the step in which reduced elements come in for the first time
        self._summed = sum(1 for step in range(last) for _ in schedule.receives(place, step))
        self.received = 0
        """Number of segments that have come in and been dealt with."""

    @property
    def incoming(self) -> int:
        """Number of segments to receive in all."""
        return len(self._receives)

    @property
    def outgoing(self) -> int:
        """Number of segments to send in all."""
        return len(self._sends)

    @property
    def sendable(self) -> int:
        """Number of segments, from the first, whose contents are there by now."""
        return bisect_right(self._needs, self.received)

    @property
    def complete(self) -> bool:
        """Whether every reduced element is here."""
        return self.received == len(self._receives)

    def target(self) -> memoryview:
        """Where the bytes of the next segment to receive belong, exactly as long as it is."""
        segment = self._receives[self.received]
        if segment.add:
            return self._scratch_bytes[: 4 * (segment.stop - segment.start)]
        return self._bytes[4 * segment.start : 4 * segment.stop]

    def filled(self) -> None:
        """The bytes of `target` are there: adds them if they are to be added, and goes on to the next segment.

        Raises:
            ProtocolError: They are not finite numbers, or too large to be added to ours. What came in before was
                finite, and is passed on only after it was looked at here, so the left neighbour itself is the cause.
        """
        segment = self._receives[self.received]
        values = self._buffer[segment.start : segment.stop]
        if segment.add:
            values += self._scratch[: segment.stop - segment.start]
        if not all_finite(values):
            raise ProtocolError("the left neighbour's values are not finite")
        self.received += 1

    def segment(self, number: int) -> memoryview:
        """The bytes of one segment to send; not before `sendable` says so."""
        segment = self._sends[number]
        return self._bytes[4 * segment.start : 4 * segment.stop]

    def holdings(self) -> tuple[Holding, ...]:
        """What is reduced here by now, by the plan that has done so."""
        spans: dict[int | None, list[Bounds]] = {}
        for source, bounds in self._kept:
            spans.setdefault(source, []).append(bounds)
        if not self._receives:
            spans[None] = list(self._free)
        for segment in self._receives[self._summed : self.received]:
            spans.setdefault(segment.source, []).append((segment.start, segment.stop))
        own = Source(self.plan.id, self.plan.members, self.plan.weights)
        return tuple(
            Holding(own if source is None else self.plan.sources[source], merged(bounds))
            for source, bounds in list(spans.items())[-MAX_HOLDINGS:]
        )

    @property
    def mean(self) -> torch.Tensor:
        """The result, once `complete`. Shares memory with the ring, which changes it no more."""
        return self._buffer


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
    size = len(plan.members)
    scaled = [torch.empty(plan.length, dtype=torch.float32) for _ in plan.members]
    for peer, share, out in zip(plan.members, plan.shares, scaled, strict=True):
        _scale(inputs[peer], share, out=out)
    mean = torch.empty(plan.length, dtype=torch.float32)
    free = tuple(_free(plan))
    total = sum(stop - start for start, stop in free)
    for index in range(size):
        for start, stop in _window(free, *partition(total, size, index)):
            mean[start:stop] = scaled[index][start:stop]
            for step in range(1, size):
                mean[start:stop] += scaled[(index + step) % size][start:stop]
    for part in plan.salvaged:
        assert earlier is not None
        source = reference(earlier[plan.sources[part.source].plan], inputs, earlier)
        mean[part.start : part.stop] = source[part.start : part.stop]
    return mean


def all_finite(values: torch.Tensor) -> bool:
    """Whether every element is a finite number.

    The sum is an order of magnitude cheaper than looking at each element, and finite only if they all are.
    """
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def vector_bytes(values: torch.Tensor) -> memoryview:
    """The bytes of a contiguous 1-D fp32 CPU tensor, little-endian as on every machine that PyTorch supports."""
    return _byte_view(values)


def _byte_view(values: torch.Tensor) -> memoryview:
    view: memoryview = values.detach().numpy().view("u1").data
    return view


def _scale(values: torch.Tensor, share: float, *, out: torch.Tensor) -> None:
    """values * share. A share of 0 gives zeros even where values are not finite."""
    if share == 0:
        out.zero_()
    else:
        torch.mul(values.detach(), torch.tensor(share, dtype=torch.float32), out=out)

"""One member's part in one attempt at reducing vectors, without any input or output: what all schedules have in common.

A schedule says which members send to which, and what: for each neighbour a list of segments in a fixed order, known to
both sides from the plan alone, so that the streams carry nothing but their bytes.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import attrs
import torch

from protocol.codecs import block_of
from protocol.plan import Plan, Source
from protocol.salvage import MAX_HOLDINGS, Bounds, Holding, merged, missing
from protocol.vectors import VectorPool, vector_bytes


@attrs.frozen
class Segment:
    """Elements [start, stop) of the vector, on their way."""

    start: int
    stop: int
    add: bool
    """Whether the receiver adds or stores them."""
    source: int | None = None
    """Which of the plan's sources has reduced them; None: the plan itself."""


class Reduction(ABC):
    """Where the next bytes go, and which can be sent.

    Neighbours go by their places in the plan. The segments for one neighbour are numbered in the order of the schedule;
    segment k may be sent as soon as `k < sendable`.

    Args:
        plan: The plan that was accepted.
        place: Our place in it.
        previous: Our part in the attempt before, which has ended: its memory is used again, and what it holds of the
            parts that the plan salvages.
        memory: Where a vector for the result comes from if there was no attempt before.

    Raises:
        ValueError: We do not hold a part that the plan says we hold.
    """

    sources: tuple[int, ...]
    """Who sends to us."""
    sinks: tuple[int, ...]
    """Whom we send to."""

    def __init__(self, plan: Plan, place: int, previous: Reduction | None, memory: VectorPool) -> None:
        if missing(plan, place, () if previous is None else previous.holdings()):
            raise ValueError("the plan relies on parts that this member does not hold")
        self.plan = plan
        self.received = 0
        """Number of segments that have come in and been dealt with."""
        self._place = place
        self._free = tuple(free_parts(plan))
        self._buffer: torch.Tensor = memory.take(plan.length) if previous is None else previous._buffer
        self._bytes = vector_bytes(self._buffer)
        self._held: dict[int | None, list[Bounds]] = {}
        for part in plan.salvaged:
            if place in part.holders:
                self._hold(part.start, part.stop, part.source)

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether every reduced element is here."""

    @property
    @abstractmethod
    def bytes_out(self) -> int:
        """Bytes of all segments to send."""

    @abstractmethod
    def outgoing(self, sink: int) -> int:
        """Number of segments to send to a neighbour in all."""

    @abstractmethod
    def incoming(self, source: int) -> int:
        """Number of segments to receive from a neighbour in all."""

    @abstractmethod
    def sendable(self, sink: int) -> int:
        """Number of segments for a neighbour, from the first, whose contents are there by now."""

    @abstractmethod
    def segment(self, sink: int, number: int) -> memoryview:
        """The bytes of one segment to send; not before `sendable` says so."""

    @abstractmethod
    def target(self, source: int) -> memoryview:
        """Where the bytes of the next segment of a neighbour belong, exactly as long as it is."""

    @abstractmethod
    def filled(self, source: int) -> None:
        """The bytes of `target` are there: deals with them, and goes on to the next segment.

        Raises:
            ProtocolError: They do not mean finite numbers, or sums would not be finite: the neighbour is the cause.
        """

    @abstractmethod
    def release(self) -> None:
        """It has failed, and has ended: frees all memory but that of the result, which a later attempt may use."""

    def slowest(self, source: int) -> int:
        """Number of segments that have come from everybody whose values are added to a neighbour's next ones."""
        return self.incoming(source)

    @property
    def standing(self) -> int:
        """How far we have got, to be compared with others: whoever starved first has the least."""
        return self.received

    def suspect(self, source: int) -> int:
        """Who is at fault, as far as we can tell, if a neighbour sends nothing."""
        return source

    def late(self) -> int | None:
        """Who has not delivered, now that the time is over; None if that may be our own fault."""
        return self.sources[0] if self.sources else None

    @property
    @abstractmethod
    def gap(self) -> int:
        """Elements that others may have to move before a neighbour has the next segment for us, about."""

    def holdings(self) -> tuple[Holding, ...]:
        """What is reduced here by now, by the plan that has done so."""
        own = Source(self.plan.id, self.plan.members, self.plan.weights)
        return tuple(
            Holding(own if source is None else self.plan.sources[source], merged(bounds))
            for source, bounds in list(self._held.items())[-MAX_HOLDINGS:]
        )

    @property
    def mean(self) -> torch.Tensor:
        """The result, once `complete`. Shares memory with this object, which changes it no more."""
        return self._buffer

    @property
    def _salvaged(self) -> int:
        """Elements that are salvaged, not all of which pass everybody."""
        return self.plan.length - self.plan.free

    def _hold(self, start: int, stop: int, source: int | None = None) -> None:
        self._held.setdefault(source, []).append((start, stop))


def partition(length: int, size: int, index: int) -> tuple[int, int]:
    """Bounds of one of `size` parts of `length` elements; the first `length % size` have one element more."""
    base, extra = divmod(length, size)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)


def own_blocks(plan: Plan) -> list[Bounds]:
    """Each member's own block: bounds among the elements that are not salvaged, at whole blocks of the codec."""
    if plan.blocks:
        ends = list(itertools.accumulate(plan.blocks))
        return list(zip([0, *ends], ends, strict=False))
    size, unit, free = len(plan.members), block_of(plan.codec), plan.free
    parts = (partition(-(-free // unit), size, index) for index in range(size))
    return [(min(start * unit, free), min(stop * unit, free)) for start, stop in parts]


def free_parts(plan: Plan) -> Iterator[Bounds]:
    """What is not salvaged: bounds, in order."""
    position = 0
    for part in plan.salvaged:
        if position < part.start:
            yield position, part.start
        position = part.stop
    if position < plan.length:
        yield position, plan.length


def placed_blocks(plan: Plan) -> list[list[Bounds]]:
    """Where in the vector each member's own block is: between what is salvaged, in as many spans as that takes."""
    spans, blocks = free_parts(plan), []
    start = stop = 0
    for first, end in own_blocks(plan):
        block, left = list[Bounds](), end - first
        while left:
            if start == stop:
                start, stop = next(spans)
            step = min(left, stop - start)
            block.append((start, start + step))
            start, left = start + step, left - step
        blocks.append(block)
    return blocks


def pieces(spans: Iterable[Bounds], piece: int) -> Iterator[Bounds]:
    """The spans in pieces of that many elements at most."""
    for first, end in spans:
        for start in range(first, end, piece):
            yield start, min(start + piece, end)

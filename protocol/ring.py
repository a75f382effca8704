"""Ring all-reduce as a schedule and the arithmetic on it, without any input or output.

The vector is cut into one partition per member. In step t of 2(n-1), the member at place r sends partition r-t to its
right neighbour and receives partition r-t-1 (all modulo n) from its left one. In the first n-1 steps it adds what it
receives to its own values (reduce-scatter), so that partition p is summed in the order p, p+1, ..., p+n-1 of the
places; afterwards it stores what it receives (all-gather). What is received in one step is exactly what is sent in the
next, so each member sends its own partition and then forwards, piece by piece, all that comes in, except for the last
step's. (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms".)

Invariants:
- Every partition is summed once, along one chain, and its final bytes are passed on verbatim: all members end with
  identical bits.
- The caller's values are never written: each attempt works on a scaled copy.
- A piece overwrites only bytes that have been sent before: what comes back has gone round the ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch

from protocol.plan import Plan

PIECE = 1 << 16
"""Elements that are received, added and forwarded together: 256 KiB. Adding that many takes about 20 µs, less than
handing it to a worker thread does (50 µs and more, measured), so the additions stay in the caller's task."""


@attrs.frozen
class Segment:
    """Elements [start, stop) of the vector, on their way; `add` says whether the receiver adds or stores them."""

    start: int
    stop: int
    add: bool


def partition(length: int, size: int, index: int) -> tuple[int, int]:
    """Bounds of one of `size` parts of `length` elements; the first `length % size` have one element more."""
    base, extra = divmod(length, size)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)


def sends(length: int, size: int, place: int, *, piece: int = PIECE) -> Iterator[Segment]:
    """All segments that the member at `place` of a ring of `size` sends, in order."""
    for step in range(2 * (size - 1)):
        yield from _pieces(length, size, (place - step) % size, piece, add=step < size - 1)


def receives(length: int, size: int, place: int, *, piece: int = PIECE) -> Iterator[Segment]:
    """All segments that the member at `place` receives, in order: what its left neighbour sends."""
    return sends(length, size, (place - 1) % size, piece=piece)


def _pieces(length: int, size: int, index: int, piece: int, *, add: bool) -> Iterator[Segment]:
    first, end = partition(length, size, index)
    for start in range(first, end, piece):
        yield Segment(start, min(start + piece, end), add)


class Ring:
    """One member's part in one attempt: where the next bytes go, and which can be sent.

    Segments are numbered in the order of the schedule. Segment k of what is sent may be sent as soon as
    `k < sendable`.

    Args:
        plan: The plan that was accepted.
        place: Our place in it.
        values: Our values: 1-D fp32 on the CPU, `plan.length` elements. Only read, and only in the constructor.
        piece: Most elements of a segment.
    """

    def __init__(self, plan: Plan, place: int, values: torch.Tensor, *, piece: int = PIECE) -> None:
        size = len(plan.members)
        self._buffer = _scaled(values, plan.shares[place])
        self._bytes = _byte_view(self._buffer)
        self._scratch = torch.empty(min(piece, -(-plan.length // size)), dtype=torch.float32)
        self._scratch_bytes = _byte_view(self._scratch)
        self._sends = tuple(sends(plan.length, size, place, piece=piece))
        self._receives = tuple(receives(plan.length, size, place, piece=piece))
        self._own = len(tuple(_pieces(plan.length, size, place, piece, add=True)))
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
        return min(self._own + self.received, len(self._sends))

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
        """The bytes of `target` are there: adds them if they are to be added, and goes on to the next segment."""
        segment = self._receives[self.received]
        if segment.add:
            self._buffer[segment.start : segment.stop] += self._scratch[: segment.stop - segment.start]
        self.received += 1

    def segment(self, number: int) -> memoryview:
        """The bytes of one segment to send; not before `sendable` says so."""
        segment = self._sends[number]
        return self._bytes[4 * segment.start : 4 * segment.stop]

    @property
    def mean(self) -> torch.Tensor:
        """The result, once `complete`. Shares memory with the ring, which changes it no more."""
        return self._buffer


def reference(plan: Plan, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """What every member of a plan ends with, bit for bit, computed in one place.

    Args:
        plan: The plan that was carried out.
        inputs: Each member's values in the order of `plan.members`.
    """
    size = len(plan.members)
    scaled = [_scaled(values, share) for values, share in zip(inputs, plan.shares, strict=True)]
    mean = torch.empty(plan.length, dtype=torch.float32)
    for index in range(size):
        start, stop = partition(plan.length, size, index)
        total = scaled[index][start:stop].clone()
        for step in range(1, size):
            total += scaled[(index + step) % size][start:stop]
        mean[start:stop] = total
    return mean


def vector_bytes(values: torch.Tensor) -> memoryview:
    """The bytes of a contiguous 1-D fp32 CPU tensor, little-endian as on every machine that PyTorch supports."""
    return _byte_view(values)


def _byte_view(values: torch.Tensor) -> memoryview:
    view: memoryview = values.detach().numpy().view("u1").data
    return view


def _scaled(values: torch.Tensor, share: float) -> torch.Tensor:
    """A new tensor: values * share. A share of 0 gives zeros even where values are not finite."""
    if share == 0:
        return torch.zeros(values.shape, dtype=torch.float32)
    return values.detach() * torch.tensor(share, dtype=torch.float32)

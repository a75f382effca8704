"""All-gather as a schedule, without any input or output: blocks of bytes, one of each member, go once round the ring.

In step t of n - 1, the member at place r sends block r - t to its right neighbour and receives block r - t - 1 (modulo
n) from its left one. So each member sends its own block and then forwards, piece by piece, all that comes in except for
the last block, which its right neighbour has made. Every block has at least one piece, if need be an empty one: who has
all of them knows that all members have begun.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import attrs
import torch

from protocol.plan import Plan
from protocol.vectors import room_for

PIECE = 1 << 16
"""Bytes that are received and forwarded together, on whatever link within the time that counts as stuck."""


@attrs.frozen
class Piece:
    """Bytes [start, stop) of all blocks one after the other, on their way."""

    place: int
    """Whose block they are part of."""
    start: int
    stop: int
    first: bool
    """Whether the block begins here."""


class Gather:
    """One member's part in one attempt. Pieces are numbered in the order of the schedule.

    Args:
        plan: A plan that gathers, or one without data, in which all blocks are empty.
        place: Our place in it.
        block: Our block.
        piece: Most bytes of a piece.

    Raises:
        Overloaded: There is no memory for all blocks.
    """

    def __init__(self, plan: Plan, place: int, block: torch.Tensor, *, piece: int = PIECE) -> None:
        size = len(plan.members)
        self._bounds = bounds(plan)
        self.values = room_for(sum(plan.sizes))
        """All blocks one after the other, once `complete`."""
        start, stop = self._bounds[place]
        self.values[start:stop] = block
        view: memoryview = self.values.numpy().data
        self._bytes = view
        places = [(place - step) % size for step in range(size)]
        self._receives = [part for other in places[1:] for part in self._pieces(other, piece)]
        self._sends = [part for other in places[:-1] for part in self._pieces(other, piece)]
        self._ours = sum(1 for _ in self._pieces(place, piece))
        self.received = 0
        """Number of pieces that have come in."""
        self._blocks = 0

    @property
    def blocks(self) -> int:
        """Number of blocks that have come in. If a member is stuck, it grows by one with each place to its right."""
        return self._blocks

    def _pieces(self, place: int, piece: int) -> Iterator[Piece]:
        first, end = self._bounds[place]
        for start in range(first, end, piece) if first < end else (first,):
            yield Piece(place, start, min(start + piece, end), start == first)

    @property
    def incoming(self) -> int:
        """Number of pieces to receive in all."""
        return len(self._receives)

    @property
    def outgoing(self) -> int:
        """Number of pieces to send in all."""
        return len(self._sends)

    @property
    def sendable(self) -> int:
        """Number of pieces, from the first, whose contents are there by now."""
        return min(self._ours + self.received, len(self._sends))

    @property
    def complete(self) -> bool:
        """Whether every block is here."""
        return self.received == len(self._receives)

    def filled(self) -> None:
        """The expected piece is there."""
        self.received += 1
        self._blocks += self.complete or self.expected.first

    @property
    def expected(self) -> Piece:
        """The next piece to receive."""
        return self._receives[self.received]

    def outgoing_piece(self, number: int) -> Piece:
        """One of the pieces to send."""
        return self._sends[number]

    def data(self, piece: Piece) -> memoryview:
        """The bytes of a piece, or where they belong."""
        return self._bytes[piece.start : piece.stop]


def bounds(plan: Plan) -> list[tuple[int, int]]:
    """Where each member's block is among all blocks one after the other."""
    sizes = plan.sizes or (0,) * len(plan.members)
    return [(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]

"""Data that takes several ways at once, without IO: cut into pieces, put together again, kept until it has arrived.

A *piece* is a run of a stream's bytes with its place in the stream, so it does not matter which connection carries it
and which piece arrives first. What a lane carries is kept until the other side says that it has arrived: if the lane is
lost, another one carries it again, cut into the same records. So a record that arrives a second time is one that
arrived before, byte for byte in the same place, and everything else that overlaps is an error.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import TYPE_CHECKING

import attrs

from protocol.errors import ProtocolError
from protocol.frames import FIN, HEADER, PIECE, RECORD, Buffer, Kind

if TYPE_CHECKING:
    from protocol.mux_stream import MuxStream

MAX_UNACKNOWLEDGED = 64
"""Pieces that a lane carries before one of them is acknowledged, at most."""

_FEWEST_GAPS = 1024  # records kept ahead of a gap that are allowed in any case: a lane has 64 pieces, and there are 8


@attrs.frozen(eq=False)
class Piece:
    """Bytes of a stream."""

    stream: MuxStream
    offset: int
    data: Buffer
    fin: bool
    """These are the stream's last ones."""
    copied: bool = False
    """The data is a copy, for which memory was taken."""

    @property
    def announcement(self) -> bytes:
        """The frame that announces it."""
        flags = FIN if self.fin else 0
        header = HEADER.pack(Kind.PIECE, flags, PIECE.size, self.stream.id)
        return header + PIECE.pack(self.offset, len(self.data))

    def records(self) -> list[Buffer]:
        """As a lane carries it."""
        view = memoryview(self.data)
        body = (view[start : start + RECORD] for start in range(0, len(view), RECORD))
        return [self.announcement, *body]


class Ahead:
    """Records of a stream that arrived before the bytes in front of them.

    Args:
        window: Bytes that there may be, which the stream's credit makes sure of. Bounds the number of records.
    """

    def __init__(self, window: int) -> None:
        self._limit = _FEWEST_GAPS + window // (1 << 15)
        self._offsets: list[int] = []  # in order
        self._records: dict[int, Buffer] = {}

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def first(self) -> int | None:
        """Where the first of them begins."""
        return self._offsets[0] if self._offsets else None

    def put(self, offset: int, record: Buffer) -> None:
        """Keeps a record, unless it is here already.

        Raises:
            ProtocolError: If it overlaps others, or there are too many.
        """
        index = bisect_right(self._offsets, offset)
        if index:
            before = self._offsets[index - 1]
            if before == offset and len(self._records[before]) == len(record):
                return
            if before + len(self._records[before]) > offset:
                raise ProtocolError("pieces of a stream overlap")
        if index < len(self._offsets) and self._offsets[index] < offset + len(record):
            raise ProtocolError("pieces of a stream overlap")
        if len(self._offsets) >= self._limit:
            raise ProtocolError("too many pieces of a stream arrived before what is in front of them")
        self._offsets.insert(index, offset)
        self._records[offset] = record

    def take(self, position: int) -> list[Buffer]:
        """The records that follow each other from a position on.

        Raises:
            ProtocolError: If there is one before it.
        """
        if self._offsets and self._offsets[0] < position:
            raise ProtocolError("pieces of a stream overlap")
        taken: list[Buffer] = []
        while len(taken) < len(self._offsets) and self._offsets[len(taken)] == position:
            record = self._records.pop(position)
            taken.append(record)
            position += len(record)
        del self._offsets[: len(taken)]
        return taken


class Outbox:
    """The pieces that one lane carries, until they have arrived."""

    def __init__(self) -> None:
        self._pieces: deque[Piece] = deque()
        self.size = 0
        """Bytes of them."""
        self.acknowledged = 0
        """Pieces that have arrived so far."""

    def __len__(self) -> int:
        return len(self._pieces)

    def add(self, piece: Piece) -> Piece:
        """Keeps a copy of a piece that the lane will carry now, and returns it."""
        kept = piece if piece.copied else attrs.evolve(piece, data=bytes(piece.data), copied=True)
        self._pieces.append(kept)
        self.size += len(kept.data)
        return kept

    def acknowledge(self, count: int) -> bool:
        """The other side says how many pieces have arrived on this lane. Returns whether that is news.

        Raises:
            ProtocolError: If they were never sent.
        """
        if not self.acknowledged <= count <= self.acknowledged + len(self._pieces):
            raise ProtocolError(f"{count} pieces acknowledged on a lane that has carried others")
        news = count > self.acknowledged
        while self.acknowledged < count:
            self.size -= len(self._pieces.popleft().data)
            self.acknowledged += 1
        return news

    def lose(self) -> list[Piece]:
        """The lane is lost: what has to be carried again, in order."""
        pieces, self._pieces, self.size = list(self._pieces), deque(), 0
        return pieces

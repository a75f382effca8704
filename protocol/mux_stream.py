"""One stream's state in the mux, and what the mux reports."""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

import attrs

from protocol.frames import Buffer
from protocol.pieces import Ahead

INITIAL_WINDOW = 1 << 16
"""Bytes that each side may send on a stream before the first grant."""


@attrs.frozen
class MuxLimits:
    """Bounds on what the other side can make us keep."""

    max_streams: int = 128
    """Streams that the other side may have open."""
    window: int = 1 << 23
    """Bytes of a bulk stream that may be on their way or unread, at most."""


class MuxStream:
    """One stream's state. Its methods are the mux's; others read the properties."""

    __slots__ = (
        "_ahead",
        "_allowance",
        "_by_pieces",
        "_chunks",
        "_credit",
        "_credited",
        "_discard",
        "_end",
        "_extra",
        "_fin",
        "_fin_sent",
        "_highest",
        "_kept",
        "_out",
        "_owed",
        "_peer_fin",
        "_placed",
        "_position",
        "_scheduled",
        "_taken",
        "abandoned",
        "available",
        "bulk",
        "id",
        "lost",
        "pending",
        "pieced",
        "stopped",
        "wanted",
    )

    def __init__(self, stream_id: int, *, bulk: bool, ours: bool = True, theirs: bool = True) -> None:
        self.id = stream_id
        self.bulk = bulk
        self.pending = 0  # bytes written that no record has taken yet
        self.available = 0  # bytes received that nobody has read yet
        self.lost = False  # written data was dropped
        self.stopped = not ours  # the other side wants no more data
        self.abandoned = False  # it was reset, by either side
        self.pieced = False  # what we send goes in pieces: it may take several ways
        self.wanted: memoryview | None = None  # where the next raw bytes go, if they come in records that fit
        self._out: deque[memoryview] = deque()
        self._credit = INITIAL_WINDOW  # what we may still send
        self._credited = False  # the other side has given more since, so it knows the stream
        self._taken = 0  # bytes that records have taken
        self._fin = self._fin_sent = not ours
        self._kept = 0  # bytes of messages among those written, for which memory was taken
        self._scheduled = False
        self._chunks: deque[Buffer] = deque()
        self._allowance = INITIAL_WINDOW  # what they may still send, beyond the highest byte that has arrived
        self._highest = 0
        self._position = 0  # up to here, all has arrived
        self._ahead: Ahead | None = None  # what arrived beyond
        self._by_pieces = False  # and a piece took it there
        self._end = None if theirs else 0  # of their data, once known
        self._extra = 0  # by how much our window is larger than the initial one
        self._owed = 0  # what we may grant them
        self._placed = 0  # what came into `wanted` and was not reported yet
        self._peer_fin = not theirs
        self._discard = False

    @property
    def at_end(self) -> bool:
        """The other side finished, and everything that it sent has been read."""
        return self._peer_fin and not self.available

    @property
    def finished(self) -> bool:
        """`Mux.finish` was called: no more data may be written."""
        return self._fin

    @property
    def starved(self) -> bool:
        """There is data to send, and the other side lets us send none."""
        return bool(self._out) and self._credit <= 0

    @property
    def allowance(self) -> int:
        """Bytes that the other side may send now."""
        return self._allowance

    @property
    def window(self) -> int:
        """Bytes that the other side may send before somebody reads."""
        return INITIAL_WINDOW + self._extra

    def cut(self, room: int) -> memoryview:
        """The next bytes to send, at most `room`. `_fin_sent` tells whether they are the last ones."""
        data = memoryview(b"")
        if self._out:
            head = self._out[0]
            data = head[: min(len(head), self._credit, room)]
            if len(data) == len(head):
                self._out.popleft()
            else:
                self._out[0] = head[len(data) :]
        self.pending -= len(data)
        self._credit -= len(data)
        self._taken += len(data)
        self._fin_sent = self._fin and not self._out
        return data

    @property
    def _sendable(self) -> bool:
        if self._out:
            return self._credit > 0
        return self._fin and not self._fin_sent


@attrs.frozen
class Batch:
    """What to send now."""

    records: list[Buffer]
    """To be sealed before anything else runs: some are views of the writers' own buffers."""
    bulk: int
    """Bytes of bulk data in them."""
    progressed: list[MuxStream]
    """The streams that data was taken from."""


@attrs.define
class Intake:
    """What one connection, or lane, is in the middle of receiving: the body that was announced."""

    stream: MuxStream | None = None
    """Whose; None if that is gone."""
    offset: int = 0
    """Where the next record belongs in the stream."""
    left: int = 0
    """Bytes to come; 0 if no body was announced."""
    fin: bool = False
    """They are the last ones."""
    piece: bool = False
    """They are a piece."""
    pieces: int = 0
    """Those that have come completely."""


@attrs.frozen
class Opened:
    """The other side opened a stream."""

    stream: MuxStream


@attrs.frozen
class Readable:
    """Data, or the end of it, arrived."""

    stream: MuxStream


@attrs.frozen
class Placed:
    """So many bytes came into the buffer `stream.wanted`, which has become shorter by them. A `grant` is owed."""

    stream: MuxStream
    count: int


@attrs.frozen
class Stopped:
    """The other side wants no more data on this stream: what was written and not sent is gone."""

    stream: MuxStream


@attrs.frozen
class Reset:
    """The other side gave up the stream. An empty code says no more than that."""

    stream: MuxStream
    code: str
    text: str


@attrs.frozen
class Pong:
    """The answer to a ping."""

    token: bytes


@attrs.frozen
class Retired:
    """The other side opens no more streams on this connection."""


@attrs.frozen
class Goodbye:
    """The other side ends the connection, for this reason."""

    reason: str
    evidence: bytes = b""
    """That our identity is in use, if that is the reason."""


@attrs.frozen
class Acknowledged:
    """So many pieces have arrived on a lane."""

    lane: int
    pieces: int


@attrs.frozen
class LanesWanted:
    """The other side would like so many lanes."""

    count: int


Event: TypeAlias = Opened | Readable | Placed | Stopped | Reset | Pong | Retired | Goodbye | Acknowledged | LanesWanted

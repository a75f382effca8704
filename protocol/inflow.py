"""What arrives on a stream: put in order, written where its reader wants it, or kept until it is read. Without IO.

Bytes have their places in the stream: those of a piece are told, others follow each other.
"""

from __future__ import annotations

from protocol.errors import ProtocolError
from protocol.frames import Buffer
from protocol.mux_stream import INITIAL_WINDOW, Event, MuxStream, Placed, Readable
from protocol.pieces import Ahead

SMALL = 4096
"""Bytes below which data is copied together with other data."""


def next_offset(stream: MuxStream | None) -> int:
    """The place of data that comes without one.

    Raises:
        ProtocolError: If there can be none.
    """
    if stream is None:
        return 0
    if stream._peer_fin:  # a lane may be quicker, and have brought the end: `note_end` sees to it that this fits
        raise ProtocolError("data after the end of a stream")
    if stream._by_pieces:
        raise ProtocolError("data without a place after pieces of the same stream")
    return stream._position


def note_end(stream: MuxStream, end: int, fin: bool) -> None:
    """There is data up to `end`, and with `fin` no more.

    Raises:
        ProtocolError: If there may be none, or it does not fit what was said before.
    """
    if end > stream._highest:
        stream._allowance -= end - stream._highest
        stream._highest = end
        if stream._allowance < 0:
            raise ProtocolError("more data than credit was given for")
    if (fin and end < stream._highest) or (stream._end is not None and end > stream._end):
        raise ProtocolError("data after the end of a stream")
    if fin:
        stream._end = end


def room(stream: MuxStream, offset: int, size: int) -> memoryview | None:
    """Where the next of so many bytes may be written that are about to arrive."""
    if stream.wanted is None or stream.available or offset != stream._position:
        return None
    if stream._ahead and stream._ahead.first is not None:
        size = max(0, min(size, stream._ahead.first - offset))  # more would overlap, as `take_in` will say
    return stream.wanted[:size]


def take_in(
    stream: MuxStream, offset: int, data: Buffer, events: list[Event], *, placed: bool, piece: bool, window: int
) -> bool:
    """Takes in data, of which `note_end` knows.

    Args:
        stream: Whose.
        offset: Where it belongs.
        data: What arrived.
        events: Gets what the reader should know.
        placed: It was written where `room` said.
        piece: It came with its place.
        window: See `pieces.Ahead`.

    Returns:
        Whether all the data of the stream has arrived now.

    Raises:
        ProtocolError: If it overlaps other data.
    """
    if offset > stream._position:
        if data:
            if stream._ahead is None:
                stream._ahead = Ahead(window)
            stream._ahead.put(offset, data)
        return False
    if offset == stream._position and not stream._peer_fin:
        return _advance(stream, data, events, placed=placed, piece=piece)
    if offset + len(data) > stream._position:
        raise ProtocolError("pieces of a stream overlap")
    return False  # it was here before


def read_into(stream: MuxStream, buffer: memoryview) -> int:
    """Moves what has arrived to `buffer`; returns the number of bytes."""
    filled = 0
    while filled < len(buffer) and stream._chunks:
        chunk = stream._chunks[0]
        count = min(len(chunk), len(buffer) - filled)
        with memoryview(chunk) as view:
            buffer[filled : filled + count] = view[:count]
        filled += count
        if count == len(chunk):
            stream._chunks.popleft()
        elif isinstance(chunk, bytearray):
            del chunk[:count]
        else:
            stream._chunks[0] = memoryview(chunk)[count:]
    stream.available -= filled
    return filled


def discard(stream: MuxStream) -> None:
    """Drops what has arrived in order, and what will."""
    stream._discard = True
    stream._chunks.clear()
    stream.available = 0


def _advance(stream: MuxStream, data: Buffer, events: list[Event], *, placed: bool, piece: bool) -> bool:
    """Takes in the bytes at the position up to which all has arrived, and what had arrived beyond them."""
    stream._by_pieces = stream._by_pieces or piece
    if placed:
        _keep_place(stream, len(data), events)
    else:
        _store(stream, data)
    stream._position += len(data)
    if stream._ahead:
        for record in stream._ahead.take(stream._position):
            stream._by_pieces = True
            stream._position += len(record)
            _store(stream, record)
    stream._peer_fin = stream._position == stream._end
    if stream._peer_fin or stream.available or not placed or not stream.wanted:
        events.append(Readable(stream))
    return stream._peer_fin


def _keep_place(stream: MuxStream, count: int, events: list[Event]) -> None:
    if stream.wanted is None:
        raise RuntimeError("a buffer was withdrawn while a record was written to it")
    stream.wanted = stream.wanted[count:]
    stream._placed += count
    if not stream.wanted or stream._placed * 4 >= stream.window:
        events.append(Placed(stream, stream._placed))
        stream._placed = 0


def _store(stream: MuxStream, data: Buffer) -> None:
    """Keeps received data. Small pieces are copied together: what is kept is never much more than its length."""
    if not data or stream._discard:
        return
    stream.available += len(data)
    if len(data) >= SMALL and isinstance(data, bytes):
        stream._chunks.append(data)
        return
    last = stream._chunks[-1] if stream._chunks else None
    if isinstance(last, bytearray) and len(last) < INITIAL_WINDOW:
        last += data
    else:
        stream._chunks.append(bytearray(data))

"""Frames: the unit that the streams of a connection are made of. Their meaning is in `mux`.

A frame is a header of 8 bytes, kind u8, flags u8, payload length u16 and stream u32 in big-endian order, and a payload.
Frames of stream 0 concern the connection.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TypeAlias

from protocol.errors import ProtocolError

RECORD = 1 << 16
"""Bytes of a record, if there is enough to send: at most of frames, and of what lanes may carry again."""

MAX_RECORD = 1 << 19
"""Bytes of the longest record. Only raw ones are longer than `RECORD`, where the line is known to be fast."""

_OF_A_WRITE = 4  # records that a write is made of, if they may be longer

HEADER = struct.Struct(">BBHI")
U32 = struct.Struct(">I")
PIECE = struct.Struct(">QI")
"""Payload of PIECE: offset and length."""

ACK = struct.Struct(">II")
"""Payload of ACK: the lane's number, and how many pieces have arrived on it."""

FIN = 1
"""Flag of DATA, BODY and PIECE: the last data of this direction."""

BULK = 1
"""Flag of OPEN: it carries bulk data."""

ONE_WAY = 2
"""Flag of OPEN: only the side that opened it sends, and the other direction has ended from the start."""

IN_USE = 1
"""Flag of GOODBYE: there is another daemon with the receiver's identity, and evidence of it before the text."""

EVIDENCE = 72
"""Bytes of it: the other daemon's instance and its signature, see `rivals`."""

_MAX_TEXT = 512  # bytes: enough for people

Buffer: TypeAlias = bytes | bytearray | memoryview


class Kind(IntEnum):
    """The kinds of frames."""

    OPEN = 1
    DATA = 2
    BODY = 3
    CREDIT = 4
    RESET = 5
    STOP = 6
    PING = 7
    PONG = 8
    RETIRE = 9
    GOODBYE = 10
    PIECE = 11
    ACK = 12
    LANES = 13


_KINDS = {int(kind): kind for kind in Kind}
_SIZES = {
    Kind.OPEN: 0,
    Kind.BODY: 4,
    Kind.CREDIT: 4,
    Kind.STOP: 0,
    Kind.PING: 8,
    Kind.PONG: 8,
    Kind.RETIRE: 0,
    Kind.PIECE: PIECE.size,
    Kind.ACK: ACK.size,
    Kind.LANES: 4,
}
_OF_CONNECTION = frozenset({Kind.PING, Kind.PONG, Kind.RETIRE, Kind.GOODBYE, Kind.ACK, Kind.LANES})


def pack(kind: Kind, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return HEADER.pack(kind, flags, len(payload), stream) + payload


def unpack(record: memoryview, position: int) -> tuple[Kind, int, int, memoryview]:
    """The frame that starts at a position of a record: kind, flags, stream and payload.

    Raises:
        ProtocolError: If there is no whole, well-formed frame.
    """
    start = position + HEADER.size
    if start > len(record):
        raise ProtocolError("a record does not end with a whole frame")
    if len(record) > RECORD:
        raise ProtocolError("a record with more frames than are allowed")
    number, flags, length, stream = HEADER.unpack_from(record, position)
    if length > len(record) - start:
        raise ProtocolError("a frame is longer than its record")
    kind = _KINDS.get(number)
    if kind is None:
        raise ProtocolError(f"frame of unknown kind {number}")
    if length != _SIZES.get(kind, length) or (kind in _OF_CONNECTION) != (stream == 0):
        raise ProtocolError(f"malformed {kind.name} frame")
    return kind, flags, stream, record[start : start + length]


def pack_text(text: str) -> bytes:
    """Text for people, cut to what fits."""
    return text.encode()[:_MAX_TEXT]


def unpack_text(data: Buffer) -> str:
    """Text from the other side, made safe to show on a terminal.

    Raises:
        ProtocolError: If it is too long.
    """
    if len(data) > _MAX_TEXT:
        raise ProtocolError("text too long")
    text = bytes(data).decode(errors="replace")
    return "".join(character if character.isprintable() else "?" for character in text)


def pack_reset(code: str, text: str) -> bytes:
    """The payload of a RESET: a code for programs, preceded by its length (u8), and text for people."""
    short = code.encode()[:255]
    return bytes([len(short)]) + short + pack_text(text)


def unpack_reset(payload: memoryview) -> tuple[str, str]:
    """The code and text of a RESET.

    Raises:
        ProtocolError: If it is malformed.
    """
    if not payload or len(payload) < 1 + payload[0]:
        raise ProtocolError("malformed RESET frame")
    split = 1 + payload[0]
    return unpack_text(payload[1:split]), unpack_text(payload[split:])


def unpack_goodbye(flags: int, payload: memoryview) -> tuple[str, bytes]:
    """The text of a GOODBYE, and the evidence that an identity is in use, or nothing.

    Raises:
        ProtocolError: If it is malformed.
    """
    size = EVIDENCE if flags & IN_USE else 0
    if len(payload) < size:
        raise ProtocolError("malformed GOODBYE frame")
    return unpack_text(payload[size:]), bytes(payload[:size])


def record_size(write: int) -> int:
    """How long raw records may be in a write of so many bytes, which follows from the line's rate: a quarter of it."""
    return max(RECORD, min(write // _OF_A_WRITE // RECORD * RECORD, MAX_RECORD))


class Packer:
    """Packs frames, and bodies announced by them, into records.

    Args:
        record: Bytes of a raw record, see `record_size`.
    """

    def __init__(self, record: int) -> None:
        self._record = record
        self.records: list[Buffer] = []
        self.size = 0
        self._frames = bytearray()

    def add(self, frame: Buffer, payload: Buffer = b"") -> None:
        """Appends a frame, given as a whole or as header and payload."""
        length = len(frame) + len(payload)
        if len(self._frames) + length > RECORD:
            self.flush()
        self._frames += frame
        self._frames += payload
        self.size += length

    def add_body(self, body: memoryview, *, piece: bool = False) -> None:
        """Appends raw records, by reference. The frame that announces them was added last.

        Args:
            body: The bytes.
            piece: They may be carried again, and have to be cut in the same way then.
        """
        self.flush()
        record = RECORD if piece else self._record
        self.records.extend(body[start : start + record] for start in range(0, len(body), record))
        self.size += len(body)

    def flush(self) -> None:
        """Ends the current record."""
        if self._frames:
            self.records.append(self._frames)
            self._frames = bytearray()

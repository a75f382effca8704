"""Fuzz target: the records of a channel, as they are read."""

from __future__ import annotations

from protocol.errors import ProtocolError
from protocol.noise import TAG_SIZE, CipherState
from protocol.records import LARGEST_BUFFER, MAX_PLAINTEXT, SMALLEST_BUFFER, RecordReader, RecordWriter
from tests.fuzz.choices import Choices

KEY = bytes(range(32))
_SIZES = (0, 1, 100, 4096, 65_536, MAX_PLAINTEXT)
_MOST = 12


def run(data: bytes) -> None:
    """Records that somebody on the way has cut, moved, repeated or changed, in pieces of any size.

    What comes out is what was sealed, in order, up to the first damage; from then on every call is a `ProtocolError`.
    Nothing is written beyond the places that are given for plaintexts. There is always room for more, and the reader
    keeps no more than twice what has arrived.
    """
    choices = Choices(data)
    writer = RecordWriter(CipherState(KEY))
    plaintexts = [bytes([number]) * choices.of(_SIZES) for number in range(1 + choices.number(_MOST))]
    sealed = [bytes(writer.seal(plaintext)) for plaintext in plaintexts]
    wire = _tampered(choices, sealed)
    reader = RecordReader(CipherState(KEY))
    opened = bytearray()
    position = 0
    while position < len(wire):
        space = reader.space()
        assert space
        assert len(reader._buffer) <= max(SMALLEST_BUFFER, min(2 * position, LARGEST_BUFFER))
        count = min(len(wire) - position, len(space), 1 + choices.number(2**20) if choices.left else LARGEST_BUFFER)
        space[:count] = wire[position : position + count]
        reader.received(count)
        position += count
        if not _take_all(choices, reader, opened):
            break
        if choices.one_in(4):
            reader.release()
    assert b"".join(plaintexts).startswith(opened)
    assert reader.pending <= len(wire)
    if wire == b"".join(sealed):
        assert opened == b"".join(plaintexts)
        assert not reader.pending


def _tampered(choices: Choices, sealed: list[bytes]) -> bytes:
    records = list(sealed)
    while choices.one_in(3):
        place, other = choices.number(len(sealed)), choices.number(len(sealed))
        match choices.number(4):
            case 0:
                records[place : place + 1] = [choices.damaged(record) for record in records[place : place + 1]]
            case 1:
                records[place:place] = records[other : other + 1]
            case 2:
                del records[place : place + 1]
            case 3:
                records[place:other] = records[place:other][::-1]
            case _:
                records.insert(place, choices.number(2 * MAX_PLAINTEXT).to_bytes(4, "big") + choices.blob())
    return b"".join(records)


def _take_all(choices: Choices, reader: RecordReader, opened: bytearray) -> bool:
    """Takes what has arrived; False once the reader has found damage, for good."""
    while True:
        try:
            if choices.one_in(2):
                opened += _filled(reader, 1 + choices.number(2 * MAX_PLAINTEXT))
            record = reader.next_record()
        except ProtocolError:
            _stays_broken(reader)
            return False
        if record is None:
            return True
        opened += record


def _filled(reader: RecordReader, room: int) -> bytearray:
    frame = bytearray(room + 2 * TAG_SIZE)
    count = reader.fill(memoryview(frame)[TAG_SIZE : TAG_SIZE + room])
    assert not any(frame[:TAG_SIZE])
    assert not any(frame[TAG_SIZE + count :])
    return frame[TAG_SIZE : TAG_SIZE + count]


def _stays_broken(reader: RecordReader) -> None:
    try:
        reader.next_record()
    except ProtocolError:
        return
    raise AssertionError("something was read after damage")

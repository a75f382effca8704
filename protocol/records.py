"""Records: what a secure channel consists of once the handshake is over.

A record is a big-endian u32, the length of the ciphertext, and the ciphertext with its tag. Records are numbered by the
cipher, so one that was changed, repeated, left out or moved does not decrypt, and from then on nothing is accepted.
Both sides replace the key after every 2**17 records of a direction: at most 64 GiB under one key, well below the
limit for AES-GCM (RFC 8446 section 5.5). No input, output, clock or randomness in here.
"""

from __future__ import annotations

import struct

from protocol.errors import ProtocolError
from protocol.noise import TAG_SIZE, CipherState

MAX_PLAINTEXT = 1 << 19
"""Bytes that one record carries at most."""

REKEY_INTERVAL = 2**17
"""Records of one direction under one key."""

SHORT = 4096
"""Bytes on the wire below which a record is dealt with by itself."""

_LENGTH = struct.Struct(">I")
_HEADER = _LENGTH.size
_AHEAD = 4096  # what is read beyond the end of a long record at most, as it has to be moved
_LONG = 1 << 17
SMALLEST_BUFFER, LARGEST_BUFFER = _LONG, _HEADER + MAX_PLAINTEXT + TAG_SIZE + _AHEAD
"""Bytes that a reader keeps."""

_KEPT = 1 << 16  # records that together are longer go into a buffer that is kept for the next ones


class RecordWriter:
    """Turns plaintexts into records.

    Args:
        cipher: The cipher of this direction. Only this writer may use it.
    """

    def __init__(self, cipher: CipherState) -> None:
        self._cipher = cipher
        self._count = 0
        self._kept = bytearray()

    def seal(self, *plaintexts: bytes | bytearray | memoryview) -> memoryview:
        """One record for each plaintext (any of which may be empty), one after the other in one buffer.

        Plaintexts are flat buffers of bytes, at most `MAX_PLAINTEXT` long. The records must reach the reader
        completely and in order. The buffer is only valid until the next call.

        Raises:
            ValueError: a plaintext is too long; nothing was sealed.
        """
        lengths = [len(plaintext) for plaintext in plaintexts]
        if max(lengths, default=0) > MAX_PLAINTEXT:
            raise ValueError(f"a record carries at most {MAX_PLAINTEXT} bytes, not {max(lengths)}")
        view = self._buffer(sum(lengths) + (_HEADER + TAG_SIZE) * len(lengths))
        start = 0
        for plaintext in plaintexts:
            body = start + _HEADER
            end = body + len(plaintext) + TAG_SIZE
            _LENGTH.pack_into(view, start, end - body)
            self._cipher.encrypt_into(plaintext, view[body:end])
            start = end
            self._count += 1
            if self._count % REKEY_INTERVAL == 0:
                self._cipher.rekey()
        return view

    def release(self) -> None:
        """Gives back the memory that is kept for large writes: none is expected soon."""
        self._kept = bytearray()

    def _buffer(self, size: int) -> memoryview:
        if size <= _KEPT:
            return memoryview(bytearray(size))
        if len(self._kept) < size:
            self._kept = bytearray(size)
        return memoryview(self._kept)[:size]


class RecordReader:
    """Turns bytes, however they arrive, back into plaintexts.

    Received bytes go into one buffer: read into `space()`, say how much it was with `received()`, then take plaintexts
    with `next_record()` or `fill()` until there is no whole record. The buffer grows when it has been filled: what was
    only announced takes no memory.

    Args:
        cipher: The cipher of this direction. Only this reader may use it.
    """

    def __init__(self, cipher: CipherState) -> None:
        self._cipher = cipher
        self._count = 0
        self._buffer = memoryview(bytearray(SMALLEST_BUFFER))
        self._start = 0  # self._buffer[start:end] holds what was received and not yet decrypted
        self._end = 0
        self._released = False
        self._broken = False

    def space(self) -> memoryview:
        """Where to put the next bytes, once there is no whole record."""
        size = self._size()
        needed = _HEADER + (size or 0)
        if self._end == len(self._buffer) < LARGEST_BUFFER:
            self._move(min(2 * len(self._buffer), LARGEST_BUFFER))
        elif self._start == self._end:
            self._move(SMALLEST_BUFFER if self._released else len(self._buffer))
            self._released = False
        elif self._start + needed > len(self._buffer):
            self._move(len(self._buffer))
        return self._buffer[self._end : self._start + needed + _AHEAD if needed > _LONG else None]

    def received(self, count: int) -> None:
        """Say that the first `count` bytes of the last `space()` have been filled."""
        self._end += count

    def release(self) -> None:
        """Gives back the memory that is kept for long records, as soon as it is empty: none is expected soon."""
        self._released = True

    def next_record(self) -> bytes | None:
        """The next plaintext, or None if its record has not arrived completely.

        Raises:
            ProtocolError: what arrived is not the record that the other side sealed next. All later calls raise too.
        """
        size = self._size()
        body = self._start + _HEADER
        if size is None or self._end < body + size:
            return None
        try:
            plaintext = self._cipher.decrypt(self._buffer[body : body + size])
        except ProtocolError:
            self._broken = True
            raise
        self._taken(body + size)
        return plaintext

    def fill(self, target: memoryview) -> int:
        """Decrypts the next records into a buffer, one after the other, and returns how many bytes these are.

        It ends before a record that has not arrived completely, or does not fit in, and before one that is shorter than
        `SHORT` and does not fill the buffer.

        Raises:
            ProtocolError: as `next_record`. What the buffer holds is undefined then.
        """
        filled, room = 0, len(target)
        while filled < room and (size := self._size()) is not None:
            body = self._start + _HEADER
            stop = filled + size - TAG_SIZE
            if stop > room or (size < SHORT and stop < room) or body + size > self._end:
                break
            try:
                self._cipher.decrypt_into(self._buffer[body : body + size], target[filled:stop])
            except ProtocolError:
                self._broken = True
                raise
            self._taken(body + size)
            filled = stop
        return filled

    @property
    def pending(self) -> int:
        """Bytes received that are not yet taken: if the stream ends with some, it was cut inside a record."""
        return self._end - self._start

    def _size(self) -> int | None:
        """The length of the next ciphertext, if that much is known."""
        if self._broken:
            raise ProtocolError("nothing more can be read after a record that was forged or damaged")
        if self._end - self._start < _HEADER:
            return None
        size: int = _LENGTH.unpack_from(self._buffer, self._start)[0]
        if not TAG_SIZE <= size <= TAG_SIZE + MAX_PLAINTEXT:
            self._broken = True
            raise ProtocolError(f"a record of {size} bytes was announced: there is none so long, or so short")
        return size

    def _move(self, size: int) -> None:
        """What was received goes to the beginning of the buffer, which has that size from now on."""
        held = self._end - self._start
        old = self._buffer
        if size != len(old):
            self._buffer = memoryview(bytearray(size))
        self._buffer[:held] = old[self._start : self._end]
        self._start, self._end = 0, held

    def _taken(self, end: int) -> None:
        self._start = end
        self._count += 1
        if self._count % REKEY_INTERVAL == 0:
            self._cipher.rekey()

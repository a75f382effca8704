"""Records: what a secure channel consists of once the handshake is over.

A record is a big-endian u16, the length of the ciphertext, and the ciphertext with its tag. Records are numbered by the
cipher, so one that was changed, repeated, left out or moved does not decrypt, and from then on nothing is accepted.
Both sides replace the key after every 2**20 records of a direction: at most 64 GiB under one key, well below the
limit for AES-GCM (RFC 8446 section 5.5). No input, output, clock or randomness in here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from protocol.errors import ProtocolError
from protocol.noise import MAX_MESSAGE, TAG_SIZE, CipherState

MAX_PLAINTEXT = MAX_MESSAGE - TAG_SIZE
"""Bytes that one record carries at most: 65 519."""

REKEY_INTERVAL = 2**20
"""Records of one direction under one key."""

READ_SIZE = 512 * 1024
"""Bytes that `RecordReader.space` offers at least."""

_LENGTH = struct.Struct(">H")
_HEADER = _LENGTH.size
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
        sizes = [len(plaintext) + TAG_SIZE for plaintext in plaintexts]
        if max(sizes, default=0) > MAX_MESSAGE:
            raise ValueError(f"a record carries at most {MAX_PLAINTEXT} bytes, not {max(sizes) - TAG_SIZE}")
        view = self._buffer(sum(sizes) + _HEADER * len(sizes))
        start = 0
        for plaintext, size in zip(plaintexts, sizes, strict=True):
            body = start + _HEADER
            _LENGTH.pack_into(view, start, size)
            self._cipher.encrypt_into(plaintext, view[body : body + size])
            start = body + size
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

    Received bytes go into one buffer that is allocated once: read into `space()`, say how much it was with
    `received()`, then take plaintexts with `next_record()` until it returns None.

    Args:
        cipher: The cipher of this direction. Only this reader may use it.
    """

    def __init__(self, cipher: CipherState) -> None:
        self._cipher = cipher
        self._count = 0
        self._buffer = memoryview(bytearray(READ_SIZE + _HEADER + MAX_MESSAGE))
        self._start = 0  # self._buffer[start:end] holds what was received and not yet decrypted
        self._end = 0
        self._broken = False

    def space(self) -> memoryview:
        """Where to put the next bytes: at least `READ_SIZE`, once `next_record` has returned None."""
        held = self._end - self._start
        self._buffer[:held] = self._buffer[self._start : self._end]
        self._start, self._end = 0, held
        return self._buffer[held:]

    def received(self, count: int) -> None:
        """Say that the first `count` bytes of the last `space()` have been filled."""
        self._end += count

    def next_record(self, place: Callable[[int], memoryview | None] | None = None) -> bytes | memoryview | None:
        """The next plaintext, or None if its record has not arrived completely.

        Args:
            place: Told the plaintext's length, it may give a buffer of that length, into which it is decrypted and
                which is then returned.

        Raises:
            ProtocolError: what arrived is not the record that the other side sealed next. All later calls raise too.
        """
        if self._broken:
            raise ProtocolError("nothing more can be read after a record that was forged or damaged")
        body = self._start + _HEADER
        if self._end < body:
            return None
        (size,) = _LENGTH.unpack_from(self._buffer, self._start)
        if self._end < body + size and size >= TAG_SIZE:
            return None
        ciphertext = self._buffer[body : body + size]
        target = place(size - TAG_SIZE) if place is not None and size >= TAG_SIZE else None
        plaintext: bytes | memoryview
        try:
            if target is None:
                plaintext = self._cipher.decrypt(ciphertext)
            else:
                self._cipher.decrypt_into(ciphertext, target)
                plaintext = target
        except ProtocolError:
            self._broken = True
            raise
        self._start = body + size
        self._count += 1
        if self._count % REKEY_INTERVAL == 0:
            self._cipher.rekey()
        return plaintext

    @property
    def pending(self) -> int:
        """Bytes received that are not yet taken: if the stream ends with some, it was cut inside a record."""
        return self._end - self._start

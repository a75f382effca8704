"""Records: what a secure channel consists of once the handshake is over.

A record is a big-endian u16, the length of the ciphertext, and the ciphertext with its tag. Records are numbered by the
cipher, so one that was changed, repeated, left out or moved does not decrypt, and from then on nothing is accepted.
Both sides replace the key after every 2**20 records of a direction: at most 64 GiB under one key, well below the
limit for AES-GCM (RFC 8446 section 5.5). No input, output, clock or randomness in here.
"""

from __future__ import annotations

from protocol.errors import ProtocolError
from protocol.noise import MAX_MESSAGE, TAG_SIZE, CipherState

MAX_PLAINTEXT = MAX_MESSAGE - TAG_SIZE
"""Bytes that one record carries at most: 65 519."""

REKEY_INTERVAL = 2**20
"""Records of one direction under one key."""

READ_SIZE = 256 * 1024
"""Bytes that `RecordReader.space` offers at least."""

_HEADER = 2


class RecordWriter:
    """Turns plaintexts into records.

    Args:
        cipher: The cipher of this direction. Only this writer may use it.
    """

    def __init__(self, cipher: CipherState) -> None:
        self._cipher = cipher
        self._count = 0

    def seal(self, *plaintexts: bytes | bytearray | memoryview) -> bytearray:
        """One record for each plaintext (any of which may be empty), one after the other in one new buffer.

        Plaintexts are flat buffers of bytes, at most `MAX_PLAINTEXT` long. The records must reach the reader
        completely and in order.

        Raises:
            ValueError: a plaintext is too long; nothing was sealed.
        """
        sizes = [len(plaintext) + TAG_SIZE for plaintext in plaintexts]
        if max(sizes, default=0) > MAX_MESSAGE:
            raise ValueError(f"a record carries at most {MAX_PLAINTEXT} bytes, not {max(sizes) - TAG_SIZE}")
        sealed = bytearray(sum(sizes) + _HEADER * len(sizes))
        view = memoryview(sealed)
        start = 0
        for plaintext, size in zip(plaintexts, sizes, strict=True):
            body = start + _HEADER
            view[start:body] = size.to_bytes(_HEADER, "big")
            self._cipher.encrypt_into(plaintext, view[body : body + size])
            start = body + size
            self._count += 1
            if self._count % REKEY_INTERVAL == 0:
                self._cipher.rekey()
        return sealed


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

    def next_record(self) -> bytes | None:
        """The next plaintext, or None if its record has not arrived completely.

        Raises:
            ProtocolError: what arrived is not the record that the other side sealed next. All later calls raise too.
        """
        if self._broken:
            raise ProtocolError("nothing more can be read after a record that was forged or damaged")
        body = self._start + _HEADER
        if self._end < body:
            return None
        size = int.from_bytes(self._buffer[self._start : body], "big")
        if self._end < body + size and size >= TAG_SIZE:
            return None
        try:
            plaintext = self._cipher.decrypt(self._buffer[body : body + size])
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

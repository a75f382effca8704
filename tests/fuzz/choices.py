"""Decisions out of a string of bytes: what a fuzzer makes up steers a target, and always the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")

BOUNDARIES = (
    0,
    1,
    2,
    7,
    8,
    15,
    16,
    31,
    32,
    255,
    256,
    4095,
    4096,
    65_520,
    65_535,
    65_536,
    2**19,
    2**31,
    2**32 - 1,
    2**63,
    2**64,
)
"""Numbers at which something tends to change."""

HOSTILE_TEXT = (
    "",
    "$[99]",
    "$[",
    "%s{0}",
    "\x00",
    "\x1b[2J",
    "\u202e",
    "é" * 40,
    "a" * 5000,
    "[::1%25eth0]:1",
    "0x7f.1:80",
)
"""Words that trouble programs which put them into something else."""


class Choices:
    """Reads decisions from bytes. When they are used up, every further decision is the first option."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def left(self) -> bool:
        """There are bytes that nothing was decided by yet."""
        return self._position < len(self._data)

    def take(self, size: int) -> bytes:
        """The next bytes, at most `size`."""
        self._position += size
        return self._data[self._position - size : self._position]

    def number(self, most: int) -> int:
        """From 0 to `most`, which is below 2**32."""
        size = 1 if most < 256 else 2 if most < 65_536 else 4
        return int.from_bytes(self.take(size), "big") % (most + 1)

    def one_in(self, count: int) -> bool:
        """True for one of so many bytes; False once there are none left."""
        return self.left and self.number(255) % count == count - 1

    def of(self, options: Sequence[_T]) -> _T:
        """One of the options."""
        return options[self.number(len(options) - 1)]

    def boundary(self) -> int:
        """A number at or beside one of the `BOUNDARIES`, at least 0."""
        return max(0, self.of(BOUNDARIES) + self.of((0, -1, 1)))

    def blob(self, most: int = 64) -> bytes:
        """Arbitrary bytes, at most so many."""
        return self.take(self.number(most))

    def damaged(self, data: bytes) -> bytes:
        """Valid bytes with one thing wrong: some changed, removed, repeated or inserted."""
        start = self.number(max(len(data) - 1, 0))
        end = min(len(data), start + 1 + self.number(16))
        match self.number(5):
            case 0:
                return data[:start] + bytes([self.number(255)]) + data[start + 1 :]
            case 1:
                return data[:start]
            case 2:
                return data[:start] + data[end:]
            case 3:
                return data[:end] + data[start:]
            case 4:
                return data[:start] + self.blob() + data[start:]
            case _:
                return data[:start] + self.blob() + data[end:]

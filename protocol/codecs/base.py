"""What all codecs have in common."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from typing import ClassVar, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.errors import ProtocolError, ShoalError

CodecName = Literal["fp32", "bf16", "int8", "int4", "e3m0"]
Bytes: TypeAlias = bytes | bytearray | memoryview | NDArray[np.uint8] | torch.Tensor
"""A buffer: any object with contiguous bytes, or a 1-D uint8 tensor."""

BLOCK = 256
"""Elements that share a scale, or a part of them."""

PIECE = 1 << 18
"""Elements at a time. Their 1 MiB and as much scratch stay in the last cache between one operation and the next. Fewer
would be in a nearer one, but each of 20 operations costs 1 µs whatever its length, which is more than that gains."""

LARGEST = 2.0**126
"""Lossy codecs cut greater magnitudes to this one, so that no rounding up leaves the range of fp32."""

SMALLEST = 2.0**-100
"""A block with scales whose magnitudes are all below this is 0, so that no product is subnormal."""

CHANCES = 1 << 16
"""Different random numbers."""

_STRIDES = 40503, 26171
"""From the random numbers of one seed, and of one piece, to those of the next. Odd, and far from each other."""


class NotFinite(ShoalError, ValueError):
    """Values that should be encoded are not all finite numbers."""


class Codec(ABC):
    """One way to write fp32 values as bytes. Holds scratch memory, so it is for one thread at a time."""

    name: ClassVar[CodecName]
    block: ClassVar[int]
    """Chunks that are to be encoded by themselves start at multiples of this many elements."""

    def __init__(self) -> None:
        self._values = torch.empty(PIECE)

    @classmethod
    @abstractmethod
    def encoded_size(cls, length: int) -> int:
        """Bytes that `length` elements take."""

    def encode(
        self,
        values: torch.Tensor,
        out: Bytes,
        *,
        seed: int | None = None,
        meaning: torch.Tensor | None = None,
        rest: torch.Tensor | None = None,
    ) -> None:
        """Writes values as bytes.

        Args:
            values: 1-D contiguous fp32 on the CPU; only read.
            out: Writable, exactly `encoded_size` bytes.
            seed: Round stochastically, with random numbers that depend on this alone; at least 0, of any size.
                `None` rounds to nearest.
            meaning: Where what `decode` makes of the bytes goes, which costs less than `decode`; as long as the
                values. To nearest, zeros may have another sign.
            rest: Where the values minus their meaning go. Either of the two may be the values, which are overwritten
                then.

        Raises:
            NotFinite: A value is infinite or not a number. `out`, `meaning` and `rest` hold anything.
            ValueError: `out` has another size.
        """
        target = as_array(out)
        if target.size != self.encoded_size(values.numel()):
            raise ValueError(f"{target.size} bytes for {values.numel()} elements of {self.name}")
        values = values.detach()
        for number, (start, stop) in enumerate(pieces(values.numel())):
            piece = target[self.encoded_size(start) : self.encoded_size(stop)]
            self._encode(
                values[start:stop],
                piece,
                None if seed is None else (seed * _STRIDES[0] + number * _STRIDES[1]) % CHANCES,
                None if meaning is None else meaning[start:stop],
                None if rest is None else rest[start:stop],
            )

    def decode(self, data: Bytes, into: torch.Tensor) -> None:
        """Reads values: all of `into`, 1-D contiguous fp32 on the CPU.

        Raises:
            ProtocolError: The bytes are not as many as they have to be, or do not mean finite numbers. `into` is as it
                was before.
        """
        source, into = self._checked(data, into.numel()), into.detach()
        for start, stop in pieces(into.numel()):
            self._decode(source[self.encoded_size(start) : self.encoded_size(stop)], into[start:stop])

    def add(self, data: Bytes, into: torch.Tensor, factor: float = 1.0, *, first: bool = False) -> None:
        """Adds values times a factor to all of `into`, rounding factor · scale, the product and the sum, which may
        overflow.

        Args:
            data: What `check` accepts.
            into: As for `decode`.
            factor: Is rounded to fp32 first.
            first: There is nothing yet to add to: `into` may hold anything.
        """
        source, into = _readable(data), into.detach()
        for start, stop in pieces(into.numel()):
            values = into[start:stop] if first else self._values[: stop - start]
            self._decode(source[self.encoded_size(start) : self.encoded_size(stop)], values, factor)
            if not first:
                into[start:stop].add_(values)

    def check(self, data: Bytes, length: int) -> None:
        """Looks at the bytes of so many values without decoding them.

        Raises:
            ProtocolError: As for `decode`.
        """
        self._checked(data, length)

    def _checked(self, data: Bytes, length: int) -> NDArray[np.uint8]:
        source = _readable(data)
        if source.size != self.encoded_size(length):
            raise ProtocolError(f"{source.size} bytes of {self.name} for {length} elements")
        self._check(source)
        return source

    @abstractmethod
    def _encode(
        self,
        values: torch.Tensor,
        out: NDArray[np.uint8],
        chance: int | None,
        meaning: torch.Tensor | None,
        rest: torch.Tensor | None,
    ) -> None:
        """Encodes one piece; `chance` is the place of its first random number."""

    @abstractmethod
    def _decode(self, data: NDArray[np.uint8], into: torch.Tensor, factor: float = 1.0) -> None:
        """Decodes one piece, which was checked."""

    @abstractmethod
    def _check(self, data: NDArray[np.uint8]) -> None:
        """Raises ProtocolError if bytes, of any number of elements, do not mean finite numbers."""


def pieces(length: int) -> list[tuple[int, int]]:
    """Bounds of what is encoded or decoded at a time."""
    return [(start, min(start + PIECE, length)) for start in range(0, length, PIECE)]


def as_array(data: Bytes) -> NDArray[np.uint8]:
    """A buffer's bytes, where they are."""
    array: NDArray[np.uint8] = data.numpy() if isinstance(data, torch.Tensor) else np.frombuffer(data, np.uint8)
    return array


def _readable(data: Bytes) -> NDArray[np.uint8]:
    array = as_array(data)
    return array if array.flags.writeable else array.copy()  # PyTorch has no read-only tensors


def largest(magnitudes: torch.Tensor) -> float:
    """The largest of the magnitudes; raises NotFinite."""
    return finite(magnitudes.max().item())


def finite(magnitude: float) -> float:
    """The same; raises NotFinite."""
    if not math.isfinite(magnitude):
        raise NotFinite("values are not finite numbers")
    return magnitude


@functools.cache
def chances() -> torch.Tensor:
    """Random numbers: int32, `CHANCES` of them in a fixed random order, and again from the first for a piece.

    Each integer from 0 to 65535 occurs once: what begins anywhere with the same probability is, at each place, any of
    them with the same probability. A generator takes longer for its numbers than everything else that encodes a sum.
    """
    order = np.argsort(np.random.SFC64(1).random_raw(CHANCES), kind="stable").astype(np.int32)
    return torch.from_numpy(np.resize(order, CHANCES + PIECE))


@functools.cache
def fractions() -> torch.Tensor:
    """The same as fp32 from 0 to 1, with the mean 1/2, and farther from both ends than a quotient is rounded."""
    return (chances() + 1.5).div_(CHANCES + 2)

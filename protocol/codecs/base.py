"""What all codecs have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.errors import ProtocolError, ShoalError

CodecName = Literal["fp32", "bf16", "int8", "int4", "e3m0"]
Bytes: TypeAlias = bytes | bytearray | memoryview | torch.Tensor
"""A buffer: any object with contiguous bytes, or a 1-D uint8 tensor."""

BLOCK = 256
"""Elements that share a scale."""

PIECE = 1 << 16
"""Elements at a time: their 256 KiB and the scratch stay in the cache between one operation and the next."""

LARGEST = 2.0**126
"""Lossy codecs cut greater magnitudes to this one, so that no rounding up leaves the range of fp32."""

SMALLEST = 2.0**-100
"""A block with scales whose magnitudes are all below this is 0, so that no product is subnormal."""


class NotFinite(ShoalError):
    """Values that should be encoded are not all finite numbers."""


class Codec(ABC):
    """One way to write fp32 values as bytes. Holds scratch memory, so it is for one thread at a time."""

    name: ClassVar[CodecName]
    block: ClassVar[int]
    """Chunks that are to be encoded by themselves start at multiples of this many elements."""

    def __init__(self) -> None:
        self._values = torch.empty(PIECE)

    @abstractmethod
    def encoded_size(self, length: int) -> int:
        """Bytes that `length` elements take."""

    def encode(self, values: torch.Tensor, out: Bytes, *, seed: int | None = None) -> None:
        """Writes values as bytes.

        Args:
            values: 1-D contiguous fp32 on the CPU; only read.
            out: Writable, exactly `encoded_size` bytes.
            seed: Round stochastically, with random numbers that depend on this alone; at least 0, of any size.
                `None` rounds to nearest.

        Raises:
            NotFinite: A value is infinite or not a number. `out` holds anything.
            ValueError: `out` has another size.
        """
        target = _array(out)
        if target.size != self.encoded_size(values.numel()):
            raise ValueError(f"{target.size} bytes for {values.numel()} elements of {self.name}")
        values, noise = values.detach(), None if seed is None else np.random.SFC64(seed)
        for start, stop in _pieces(values.numel()):
            piece = target[self.encoded_size(start) : self.encoded_size(stop)]
            self._encode(values[start:stop], torch.from_numpy(piece), noise)

    def decode(self, data: Bytes, into: torch.Tensor) -> None:
        """Reads values: all of `into`, 1-D contiguous fp32 on the CPU.

        Raises:
            ProtocolError: The bytes are not as many as they have to be, or do not mean finite numbers. `into` is as it
                was before.
        """
        source, into = self._checked(data, into.numel()), into.detach()
        for start, stop in _pieces(into.numel()):
            self._decode(source[self.encoded_size(start) : self.encoded_size(stop)], into[start:stop])

    def add(self, data: Bytes, into: torch.Tensor, factor: float = 1.0) -> None:
        """Adds values times a factor, rounding the product and then the sum, to all of `into`. The sum may overflow.

        Raises:
            ProtocolError: As for `decode`.
        """
        source, into = self._checked(data, into.numel()), into.detach()
        for start, stop in _pieces(into.numel()):
            values = self._values[: stop - start]
            self._decode(source[self.encoded_size(start) : self.encoded_size(stop)], values)
            into[start:stop] += values.mul_(factor)

    def check(self, data: Bytes, length: int) -> None:
        """Looks at the bytes of so many values without decoding them.

        Raises:
            ProtocolError: As for `decode`.
        """
        self._checked(data, length)

    def _checked(self, data: Bytes, length: int) -> NDArray[np.uint8]:
        source = _array(data)
        if source.size != self.encoded_size(length):
            raise ProtocolError(f"{source.size} bytes of {self.name} for {length} elements")
        for start, stop in _pieces(length):
            self._check(source[self.encoded_size(start) : self.encoded_size(stop)])
        return source

    @abstractmethod
    def _encode(self, values: torch.Tensor, out: torch.Tensor, noise: np.random.SFC64 | None) -> None:
        """Encodes one piece."""

    @abstractmethod
    def _decode(self, data: NDArray[np.uint8], into: torch.Tensor) -> None:
        """Decodes one piece, which was checked."""

    @abstractmethod
    def _check(self, data: NDArray[np.uint8]) -> None:
        """Raises ProtocolError if one piece does not mean finite numbers."""


def _pieces(length: int) -> list[tuple[int, int]]:
    return [(start, min(start + PIECE, length)) for start in range(0, length, PIECE)]


def _array(data: Bytes) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = data.numpy() if isinstance(data, torch.Tensor) else np.frombuffer(data, np.uint8)
    return array


def largest(magnitudes: torch.Tensor) -> float:
    """The largest of the magnitudes; raises NotFinite."""
    value = magnitudes.max().item()
    if not math.isfinite(value):
        raise NotFinite("values are not finite numbers")
    return value


def random_integers(noise: np.random.SFC64, like: torch.Tensor) -> torch.Tensor:
    """A new int32 tensor with integers from 0 to 65535: 16 bits each of the generator's numbers, the lowest first."""
    raw = noise.random_raw(-(-like.numel() // 4)).astype("<u8", copy=False)
    return torch.from_numpy(raw.view("<u2")[: like.numel()].astype(np.int32)).view_as(like)

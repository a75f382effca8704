"""Codecs that treat each value by itself."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.codecs.base import LARGEST, PIECE, Codec, chances, largest, pieces
from protocol.errors import ProtocolError


class _Plain(Codec):
    """A fixed number of bytes per element."""

    block = 1
    size: ClassVar[int]

    @classmethod
    def encoded_size(cls, length: int) -> int:
        return length * cls.size

    def _check(self, data: NDArray[np.uint8]) -> None:
        for start, stop in pieces(data.size // self.size):
            values = self._values[: stop - start]
            self._decode(data[self.size * start : self.size * stop], values)
            if not math.isfinite(values.abs_().max().item()):
                raise ProtocolError(f"{self.name} values that are not finite")


class Identity(_Plain):
    """The values themselves; there is nothing to round."""

    name = "fp32"
    size = 4

    def _encode(
        self,
        values: torch.Tensor,
        out: NDArray[np.uint8],
        chance: int | None,
        meaning: torch.Tensor | None,
        rest: torch.Tensor | None,
    ) -> None:
        largest(torch.abs(values, out=self._values[: values.numel()]))
        np.copyto(out, values.view(torch.uint8).numpy())
        if meaning is not None:
            meaning.copy_(values)
        if rest is not None:
            rest.zero_()

    def _decode(self, data: NDArray[np.uint8], into: torch.Tensor, factor: float = 1.0) -> None:
        np.copyto(into.view(torch.uint8).numpy(), data)
        if factor != 1:
            into.mul_(factor)


class BFloat16(_Plain):
    """The upper half of fp32: the same range with 8 significant bits; relative error at most 2^-8 to nearest.

    The error of a value is in proportion to the value itself, so few need stochastic rounding here.
    """

    name = "bf16"
    size = 2

    def __init__(self) -> None:
        super().__init__()
        self._bits = torch.empty(PIECE, dtype=torch.int32)
        self._halves = torch.empty(PIECE, dtype=torch.int16)

    def _encode(
        self,
        values: torch.Tensor,
        out: NDArray[np.uint8],
        chance: int | None,
        meaning: torch.Tensor | None,
        rest: torch.Tensor | None,
    ) -> None:
        length, exact = values.numel(), values
        bits, halves = self._bits[:length], self._halves[:length]
        if largest(torch.abs(values, out=self._values[:length])) > LARGEST:
            values = values.clamp(-LARGEST, LARGEST)
        # In integers, since some processors' own conversion takes subnormal numbers for 0.
        if chance is None:
            torch.bitwise_right_shift(values.view(torch.int32), 16, out=bits)
            bits.bitwise_and_(1).add_(0x7FFF)  # ties go to the even one
            bits.add_(values.view(torch.int32))
        else:
            torch.add(chances()[chance : chance + length], values.view(torch.int32), out=bits)
        bits.bitwise_right_shift_(16)
        np.copyto(out, halves.copy_(bits).view(torch.uint8).numpy())
        decoded = bits.bitwise_left_shift_(16).view(torch.float32)
        if rest is not None:
            torch.sub(exact, decoded, out=rest)
        if meaning is not None:
            meaning.copy_(decoded)

    def _decode(self, data: NDArray[np.uint8], into: torch.Tensor, factor: float = 1.0) -> None:
        halves = self._halves[: into.numel()]
        np.copyto(halves.view(torch.uint8).numpy(), data)
        into.copy_(halves.view(torch.bfloat16))
        if factor != 1:
            into.mul_(factor)

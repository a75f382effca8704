"""Codecs that treat each value by itself."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.codecs.base import LARGEST, PIECE, Codec, largest, random_integers
from protocol.errors import ProtocolError


class _Plain(Codec):
    """A fixed number of bytes per element."""

    block = 1
    size: ClassVar[int]

    def encoded_size(self, length: int) -> int:
        return length * self.size

    def _check(self, data: NDArray[np.uint8]) -> None:
        values = self._values[: data.size // self.size]
        self._decode(data, values)
        if not math.isfinite(values.abs_().max().item()):
            raise ProtocolError(f"{self.name} values that are not finite")


class Identity(_Plain):
    """The values themselves; there is nothing to round."""

    name = "fp32"
    size = 4

    def _encode(self, values: torch.Tensor, out: torch.Tensor, noise: np.random.SFC64 | None) -> None:
        largest(torch.abs(values, out=self._values[: values.numel()]))
        out.copy_(values.view(torch.uint8))

    def _decode(self, data: NDArray[np.uint8], into: torch.Tensor) -> None:
        np.copyto(into.view(torch.uint8).numpy(), data)


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

    def _encode(self, values: torch.Tensor, out: torch.Tensor, noise: np.random.SFC64 | None) -> None:
        length = values.numel()
        bits, halves = self._bits[:length], self._halves[:length]
        if largest(torch.abs(values, out=self._values[:length])) > LARGEST:
            values = values.clamp(-LARGEST, LARGEST)
        # In integers, since some processors' own conversion takes subnormal numbers for 0.
        if noise is None:
            torch.bitwise_right_shift(values.view(torch.int32), 16, out=bits)
            bits.bitwise_and_(1).add_(0x7FFF)  # ties go to the even one
        else:
            bits.copy_(random_integers(noise, bits))
        bits.add_(values.view(torch.int32)).bitwise_right_shift_(16)
        out.copy_(halves.copy_(bits).view(torch.uint8))

    def _decode(self, data: NDArray[np.uint8], into: torch.Tensor) -> None:
        halves = self._halves[: into.numel()]
        np.copyto(halves.view(torch.uint8).numpy(), data)
        into.copy_(halves.view(torch.bfloat16))

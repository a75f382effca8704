"""Codecs with one scale for each block of values."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.codecs.base import BLOCK, LARGEST, PIECE, SMALLEST, Codec, largest, random_integers
from protocol.errors import ProtocolError

SCALE = 4  # bytes


class _Blockwise(Codec):
    """One scale for `BLOCK` elements; the last block may have fewer."""

    block = BLOCK
    bits: ClassVar[int]
    """Per code."""
    levels: ClassVar[int]
    """Largest magnitude / scale."""

    def __init__(self) -> None:
        super().__init__()
        rows = PIECE // BLOCK
        self._scratch = torch.empty(rows, BLOCK)
        self._codes = torch.empty(rows, BLOCK, dtype=torch.int32)
        self._scales = torch.empty(rows, 1)
        self._peaks = torch.empty(rows, 1)
        self._last = torch.empty(1, BLOCK)
        self._last_row = torch.empty(1, self.encoded_size(BLOCK), dtype=torch.uint8)
        self._most = _round_up(torch.tensor([LARGEST / self.levels])).item()
        self._least = SMALLEST / self.levels

    def encoded_size(self, length: int) -> int:
        return -(-length // BLOCK) * SCALE + -(-length * self.bits // 8)

    def _encode(self, values: torch.Tensor, out: torch.Tensor, noise: np.random.SFC64 | None) -> None:
        whole = values.numel() // BLOCK * BLOCK
        size = self.encoded_size(whole)
        if whole:
            self._encode_rows(values[:whole].view(-1, BLOCK), out[:size].view(-1, self.encoded_size(BLOCK)), noise)
        if whole < values.numel():
            self._last.zero_()[0, : values.numel() - whole] = values[whole:]
            self._encode_rows(self._last, self._last_row, noise)
            out[size:] = self._last_row[0, : out.numel() - size]

    def _encode_rows(self, values: torch.Tensor, out: torch.Tensor, noise: np.random.SFC64 | None) -> None:
        rows = len(values)
        magnitudes, peaks = torch.abs(values, out=self._scratch[:rows]), self._peaks[:rows]
        if largest(torch.amax(magnitudes, 1, keepdim=True, out=peaks)) > LARGEST:
            values = values.clamp(-LARGEST, LARGEST)
            peaks.clamp_(max=LARGEST)
        scales = torch.div(peaks, self.levels, out=self._scales[:rows])
        if self.levels > 1:
            _round_up(scales)
        scales.masked_fill_(peaks < SMALLEST, 0)
        out[:, :SCALE] = scales.view(torch.uint8)
        quotients = torch.div(values, scales.masked_fill_(scales == 0, 1), out=magnitudes)
        self._encode_codes(quotients, out[:, SCALE:], noise)

    def _decode(self, data: NDArray[np.uint8], into: torch.Tensor) -> None:
        whole = into.numel() // BLOCK * BLOCK
        size = self.encoded_size(whole)
        if whole:
            self._decode_rows(data[:size].reshape(-1, self.encoded_size(BLOCK)), into[:whole].view(-1, BLOCK))
        if whole < into.numel():
            row = self._last_row.zero_().numpy()
            row[0, : data.size - size] = data[size:]
            self._decode_rows(row, self._last)
            into[whole:] = self._last[0, : into.numel() - whole]

    def _decode_rows(self, data: NDArray[np.uint8], into: torch.Tensor) -> None:
        self._decode_codes(data[:, SCALE:], into)
        into.mul_(self._read_scales(data[:, :SCALE]))

    def _check(self, data: NDArray[np.uint8]) -> None:
        size = self.encoded_size(BLOCK)
        whole = data.size // size * size
        self._check_scales(data[:whole].reshape(-1, size)[:, :SCALE])
        if whole < data.size:
            self._check_scales(data[np.newaxis, whole : whole + SCALE])

    def _check_scales(self, data: NDArray[np.uint8]) -> None:
        scales = self._read_scales(data)
        valid = (scales == 0) | (scales >= self._least) & (scales <= self._most)
        if not valid.all():
            raise ProtocolError(f"a scale of {self.name} is out of bounds: {scales[~valid][0].item():g}")

    def _read_scales(self, data: NDArray[np.uint8]) -> torch.Tensor:
        scales = self._scales[: len(data)]
        np.copyto(scales.view(torch.uint8).numpy(), data)
        return scales

    @abstractmethod
    def _encode_codes(self, quotients: torch.Tensor, out: torch.Tensor, noise: np.random.SFC64 | None) -> None:
        """Writes the codes of values / scales, one block per row; overwrites the quotients."""

    @abstractmethod
    def _decode_codes(self, data: NDArray[np.uint8], into: torch.Tensor) -> None:
        """Reads the codes of whole blocks, one per row, as values for a scale of 1."""

    def _round(self, quotients: torch.Tensor, noise: np.random.SFC64 | None) -> torch.Tensor:
        """In place: to whole numbers. None is beyond `levels`, since scales were rounded up."""
        if noise is None:
            return quotients.round_()
        uniform = self._spare(quotients).copy_(random_integers(noise, quotients))
        return quotients.add_(uniform.add_(0.5).mul_(2.0**-16)).floor_()

    def _spare(self, like: torch.Tensor) -> torch.Tensor:
        return self._values[: like.numel()].view_as(like)


class Int8(_Blockwise):
    """Whole multiples of the scale: error at most scale/2 to nearest, below scale stochastically."""

    name = "int8"
    bits = 8
    levels = 127

    def _encode_codes(self, quotients: torch.Tensor, out: torch.Tensor, noise: np.random.SFC64 | None) -> None:
        out.view(torch.int8).copy_(self._round(quotients, noise))

    def _decode_codes(self, data: NDArray[np.uint8], into: torch.Tensor) -> None:
        np.copyto(into.numpy(), data.view(np.int8))


class _FourBit(_Blockwise):
    """Two codes per byte, decoded through a table of all 256 pairs."""

    bits = 4
    values: ClassVar[list[float]]
    """What the 16 codes mean for a scale of 1."""

    def __init__(self) -> None:
        super().__init__()
        pairs = np.array([(low, high) for high in self.values for low in self.values], dtype=np.float32)
        self._pairs = pairs.view(np.uint64).ravel()
        self._index = np.empty((PIECE // BLOCK, BLOCK // 2), dtype=np.intp)

    def _decode_codes(self, data: NDArray[np.uint8], into: torch.Tensor) -> None:
        index = self._index[: len(data)]
        np.copyto(index, data)
        np.take(self._pairs, index, out=into.numpy().view(np.uint64), mode="clip")

    def _pack(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        """Writes codes, int32 from 0 to 15, in pairs; overwrites them."""
        pairs = codes.view(torch.int64)
        out.copy_(pairs.bitwise_or_(pairs >> 28))


class Int4(_FourBit):
    """Like `Int8`, in 15 steps. Without error feedback or stochastic rounding all that is below scale/2 is lost."""

    name = "int4"
    levels = 7
    values: ClassVar[list[float]] = [*range(8), *range(-8, 0)]

    def _encode_codes(self, quotients: torch.Tensor, out: torch.Tensor, noise: np.random.SFC64 | None) -> None:
        codes = self._codes[: len(quotients)].copy_(self._round(quotients, noise))
        self._pack(codes.bitwise_and_(15), out)


class E3M0(_FourBit):
    """Sign and power of two. To nearest, magnitudes from 2^-6.5 of the largest on are at most 41 % off.

    The codes are read off the exponents of fp32. Adding to the bits of a number carries into its exponent from a
    certain mantissa on: a constant makes that the square root of 2, and a random number makes the probability of the
    carry equal to the place between the two powers of two.
    """

    name = "e3m0"
    levels = 1
    values: ClassVar[list[float]] = [
        sign * magnitude for sign in (1, -1) for magnitude in (0.0, *(2.0**m for m in range(-6, 1)))
    ]
    FLOOR = 2.0**-7  # the power of two that stands for 0
    FLOOR_EXPONENT = 120  # its exponent in fp32
    FROM_ROOT = 0x800000 - 0x3504F3  # carries from the mantissa of the square root of 2 on

    def _encode_codes(self, quotients: torch.Tensor, out: torch.Tensor, noise: np.random.SFC64 | None) -> None:
        codes = quotients.view(torch.int32)
        signs = torch.bitwise_right_shift(codes, 28, out=self._codes[: len(codes)]).bitwise_and_(8)
        ratios = quotients.abs_()
        if noise is None:
            ratios.clamp_(min=self.FLOOR)
            codes.add_(self.FROM_ROOT)
        else:
            # From 0 to the smallest power is mapped onto the octave below it, where chance can choose between the two.
            lifted = torch.mul(ratios, 0.5, out=self._spare(ratios)).add_(self.FLOOR)
            torch.maximum(ratios, lifted, out=ratios)
            codes.add_(random_integers(noise, codes).mul_(128).add_(64))
        self._pack(codes.bitwise_right_shift_(23).sub_(self.FLOOR_EXPONENT).bitwise_or_(signs), out)


def _round_up(values: torch.Tensor) -> torch.Tensor:
    """In place: positive values to 16 significant bits. The product with a code of 7 bits is then exact.

    A quotient that was rounded down to just 16 bits would come out too small. There is none: for a divisor 2^k - 1
    the next greater dividend is more than half a unit in the last place of the quotient away.
    """
    values.view(torch.int32).add_(0xFF).bitwise_and_(-0x100)
    return values

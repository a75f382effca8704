"""Codecs with one scale for each block of values."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.codecs.base import BLOCK, LARGEST, PIECE, SMALLEST, Codec, chances, finite, fractions
from protocol.errors import ProtocolError


class _Scratch:
    """Memory for some blocks. Scales are there for PyTorch, and for NumPy, which is quicker with so few numbers."""

    def __init__(self, rows: int, block: int) -> None:
        self._rows = rows
        self.values = torch.empty(rows, block)
        self.peaks, self.scales, self.inverses = (np.ones((rows, 1), np.float32) for _ in range(3))
        self.peak_tensor, self.scale_tensor, self.inverse_tensor = map(
            torch.from_numpy, (self.peaks, self.scales, self.inverses)
        )

    def first(self, rows: int) -> _Scratch:
        """The same memory for fewer blocks."""
        if rows == self._rows:
            return self
        part = _Scratch.__new__(_Scratch)
        vars(part).update({name: value[:rows] for name, value in vars(self).items() if name != "_rows"}, _rows=rows)
        return part


class _Blockwise(Codec):
    """One scale for `block` elements; the last block may have fewer."""

    block = BLOCK
    scale: ClassVar[int] = 4
    """Bytes of a scale: as many of fp32's as there are, the upper ones."""
    spare: ClassVar[int] = 0
    """Low bits of fp32 that scales are rounded up to have none of."""
    bits: ClassVar[int]
    """Per code."""
    levels: ClassVar[int]
    """Largest magnitude / scale."""

    def __init__(self) -> None:
        super().__init__()
        self._row = self.encoded_size(self.block)
        self._scratch = _Scratch(PIECE // self.block, self.block)
        self._last = torch.empty(3, 1, self.block)
        self._last_row = np.empty((1, self._row), np.uint8)
        most = np.array([LARGEST / self.levels], np.float32)
        self._most, self._least = _round_up(most, self.spare)[0], np.float32(SMALLEST / self.levels)

    @classmethod
    def encoded_size(cls, length: int) -> int:
        return -(-length // cls.block) * cls.scale + -(-length * cls.bits // 8)

    def _encode(
        self,
        values: torch.Tensor,
        out: NDArray[np.uint8],
        chance: int | None,
        meaning: torch.Tensor | None,
        rest: torch.Tensor | None,
    ) -> None:
        length = values.numel()
        whole = length // self.block * self.block
        size = self.encoded_size(whole)
        if whole:
            self._encode_rows(
                values[:whole].view(-1, self.block),
                out[:size].reshape(-1, self._row),
                chance,
                None if meaning is None else meaning[:whole].view(-1, self.block),
                None if rest is None else rest[:whole].view(-1, self.block),
            )
        if whole < length:
            last, meant, left = self._last.zero_()
            last[0, : length - whole] = values[whole:]
            self._encode_rows(last, self._last_row, None if chance is None else chance + whole, meant, left)
            out[size:] = self._last_row[0, : out.size - size]
            if meaning is not None:
                meaning[whole:] = meant[0, : length - whole]
            if rest is not None:
                rest[whole:] = left[0, : length - whole]

    def _encode_rows(
        self,
        values: torch.Tensor,
        out: NDArray[np.uint8],
        chance: int | None,
        meaning: torch.Tensor | None,
        rest: torch.Tensor | None,
    ) -> None:
        scratch, exact = self._scratch.first(len(values)), values
        peaks, scales, inverses = scratch.peaks, scratch.scales, scratch.inverses
        torch.amax(torch.abs(values, out=scratch.values), 1, keepdim=True, out=scratch.peak_tensor)
        if finite(peaks.max().item()) > LARGEST:
            values = values.clamp(-LARGEST, LARGEST)
            np.minimum(peaks, np.float32(LARGEST), out=peaks)
        np.divide(peaks, np.float32(self.levels), out=scales)
        _round_up(scales, self.spare)
        np.divide(np.float32(1), np.maximum(scales, self._least, out=inverses), out=inverses)
        if peaks.min() < SMALLEST:
            zero = peaks < SMALLEST
            scales[zero] = inverses[zero] = 0
        out[:, : self.scale] = _bytes_of(scales)[:, -self.scale :]
        quotients = torch.mul(values, scratch.inverse_tensor, out=scratch.values)
        self._encode_codes(quotients, torch.from_numpy(out)[:, self.scale :], chance)
        if rest is not None:  # products are exact, so it does not matter whether they are rounded before they are added
            torch.addcmul(exact, quotients, scratch.scale_tensor, value=-1, out=rest)
        if meaning is not None:
            torch.mul(quotients, scratch.scale_tensor, out=meaning)

    def _decode(self, data: NDArray[np.uint8], into: torch.Tensor, factor: float = 1.0) -> None:
        whole = into.numel() // self.block * self.block
        size = self.encoded_size(whole)
        if whole:
            self._decode_rows(data[:size].reshape(-1, self._row), into[:whole].view(-1, self.block), factor)
        if whole < into.numel():
            self._last_row.fill(0)
            self._last_row[0, : data.size - size] = data[size:]
            self._decode_rows(self._last_row, self._last[0], factor)
            into[whole:] = self._last[0, 0, : into.numel() - whole]

    def _decode_rows(self, data: NDArray[np.uint8], into: torch.Tensor, factor: float) -> None:
        scratch = self._scratch.first(len(data))
        self._decode_codes(data[:, self.scale :], into)
        np.multiply(self._scales_in(data), np.float32(factor), out=scratch.scales)
        into.mul_(scratch.scale_tensor)

    def _check(self, data: NDArray[np.uint8]) -> None:
        rows = data.size // self._row
        self._check_scales(self._scales_in(data[: rows * self._row].reshape(rows, self._row)))
        if rows * self._row < data.size:
            self._check_scales(self._scales_in(data[np.newaxis, rows * self._row :]))

    def _scales_in(self, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The scales at the beginning of encoded blocks, one per row."""
        scales = np.zeros((len(rows), 1), np.float32)
        _bytes_of(scales)[:, -self.scale :] = rows[:, : self.scale]
        return scales

    def _check_scales(self, scales: NDArray[np.float32]) -> None:
        valid = (scales >= self._least) & (scales <= self._most) | (scales == 0)
        if not valid.all():
            raise ProtocolError(f"a scale of {self.name} is out of bounds: {scales[~valid][0]:g}")

    @abstractmethod
    def _encode_codes(self, quotients: torch.Tensor, out: torch.Tensor, chance: int | None) -> None:
        """Writes the codes of values / scales, one block per row. The quotients become what these codes mean."""

    @abstractmethod
    def _decode_codes(self, data: NDArray[np.uint8], into: torch.Tensor) -> None:
        """Reads the codes of whole blocks, one per row, as values for a scale of 1."""

    def _round(self, quotients: torch.Tensor, chance: int | None) -> torch.Tensor:
        """In place: to whole numbers. None is beyond `levels`, since scales were rounded up."""
        if chance is None:
            return quotients.round_()
        return quotients.add_(fractions()[chance : chance + quotients.numel()].view_as(quotients)).floor_()


class Int8(_Blockwise):
    """Whole multiples of the scale: error at most scale/2 to nearest, below scale stochastically."""

    name = "int8"
    bits = 8
    levels = 127
    spare = 8

    def _encode_codes(self, quotients: torch.Tensor, out: torch.Tensor, chance: int | None) -> None:
        out.view(torch.int8).copy_(self._round(quotients, chance))

    def _decode_codes(self, data: NDArray[np.uint8], into: torch.Tensor) -> None:
        into.copy_(torch.from_numpy(data).view(torch.int8))


class _FourBit(_Blockwise):
    """Two codes per byte, decoded through a table of all 256 pairs."""

    bits = 4
    values: ClassVar[list[float]]
    """What the 16 codes mean for a scale of 1."""

    def __init__(self) -> None:
        super().__init__()
        pairs = np.array([(low, high) for high in self.values for low in self.values], dtype=np.float32)
        self._pairs = pairs.view(np.uint64).ravel()
        self._index = np.empty((PIECE // self.block, self.block // 2), dtype=np.intp)
        self._codes = torch.empty(PIECE // self.block, self.block, dtype=torch.int32)

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
    scale = 2
    spare = 16
    levels = 7
    values: ClassVar[list[float]] = [*range(8), *range(-8, 0)]

    def _encode_codes(self, quotients: torch.Tensor, out: torch.Tensor, chance: int | None) -> None:
        codes = self._codes[: len(quotients)].copy_(self._round(quotients, chance))
        self._pack(codes.bitwise_and_(15), out)


class E3M0(_FourBit):
    """Sign and power of two. To nearest, magnitudes from 2^-6.5 of the largest on are at most 41 % off.

    The codes are read off the exponents of fp32. Adding to the bits of a number carries into its exponent from a
    certain mantissa on: a constant makes that the square root of 2, and a random number makes the probability of the
    carry equal to the place between the two powers of two.
    """

    name = "e3m0"
    block = 4 * BLOCK  # codes reach over six octaves: an outlier hides less than with equal steps
    levels = 1
    values: ClassVar[list[float]] = [
        sign * magnitude for sign in (1, -1) for magnitude in (0.0, *(2.0**m for m in range(-6, 1)))
    ]
    FLOOR = 2.0**-7  # the power of two that stands for 0
    FLOOR_EXPONENT = 120  # its exponent in fp32
    FROM_ROOT = 0x800000 - 0x3504F3  # carries from the mantissa of the square root of 2 on

    def _encode_codes(self, quotients: torch.Tensor, out: torch.Tensor, chance: int | None) -> None:
        codes = quotients.view(torch.int32)
        signs = torch.bitwise_right_shift(codes, 28, out=self._codes[: len(codes)]).bitwise_and_(8)
        ratios = quotients.abs_()
        if chance is None:
            ratios.clamp_(min=self.FLOOR)
            codes.add_(self.FROM_ROOT)
        else:
            # From 0 to the smallest power is mapped onto the octave below it, where chance can choose between the two.
            lifted = torch.mul(ratios, 0.5, out=self._values[: ratios.numel()].view_as(ratios)).add_(self.FLOOR)
            torch.maximum(ratios, lifted, out=ratios)
            codes.add_(chances()[chance : chance + codes.numel()].view_as(codes), alpha=128).add_(64)
        self._pack(codes.bitwise_right_shift_(23).sub_(self.FLOOR_EXPONENT).bitwise_or_(signs), out)
        self._decode_codes(out.numpy(), quotients)


def _bytes_of(scales: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The bytes of each, where they are, in rows; the upper ones are the last."""
    return scales.view(np.uint8)


def _round_up(values: NDArray[np.float32], spare: int) -> NDArray[np.float32]:
    """In place: positive values to so many bits fewer. The product with a code of 7 bits is exact if these are 8.

    A quotient that was rounded down to just the bits that are left would come out too small. There is none: for a
    divisor 2^k - 1 the next greater dividend is more than half a unit in the last place of the quotient away.
    """
    bits, mask = values.view(np.int32), (1 << spare) - 1
    np.bitwise_and(np.add(bits, mask, out=bits), ~mask, out=bits)
    return values

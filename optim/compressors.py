"""In which form values travel that are gathered, and not summed on their way.

Messages come from others: `is_sound` looks at everything that `decode` relies on. Both ends see the same layout, so a
message holds values only, no shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import attrs
import torch
from attrs.validators import ge, gt, le

from optim.dct import dct_basis, divisor
from optim.slots import Layout

CHUNK = 64
"""Values along each dimension of a chunk."""


def length_of(layout: Layout) -> int:
    """Values in a layout."""
    return sum(place.stop - place.start for place in layout)


class Compressor(Protocol):
    """A lossy form of a vector."""

    def encode(self, values: torch.Tensor, layout: Layout, round: int) -> bytes:
        """The message."""
        ...

    def is_sound(self, message: bytes, layout: Layout) -> bool:
        """Whether it can be decoded, into finite values."""
        ...

    def decode(self, message: bytes, layout: Layout, round: int) -> torch.Tensor:
        """What a sound message means. The same bits on every processor."""
        ...

    def combine(self, messages: Sequence[tuple[bytes, float]], layout: Layout, round: int) -> torch.Tensor:
        """The mean of what sound messages mean, given with their shares. The same bits on every processor."""
        ...


def weighted_sum(
    compressor: Compressor, messages: Sequence[tuple[bytes, float]], layout: Layout, round: int
) -> torch.Tensor:
    """What most of them combine by: one message after the other is decoded and added in fp32."""
    mean = torch.zeros(length_of(layout))
    for message, share in messages:
        mean.add_(compressor.decode(message, layout, round).mul_(share))
    return mean


@attrs.frozen
class Signs:
    """One bit for each value: whether it is negative. (Distributed Lion, arXiv 2404.00438.)

    `vote` makes the mean what most have (0 if as many say this as that), else it is the mean of the signs.
    """

    vote: bool = True

    def encode(self, values: torch.Tensor, layout: Layout, round: int) -> bytes:
        bits = torch.zeros(-(-len(values) // 8) * 8, dtype=torch.uint8)
        bits[: len(values)] = values < 0
        return _pack(bits)

    def is_sound(self, message: bytes, layout: Layout) -> bool:
        return len(message) == -(-length_of(layout) // 8)

    def decode(self, message: bytes, layout: Layout, round: int) -> torch.Tensor:
        return _unpack(message)[: length_of(layout)].float().mul_(-2).add_(1)

    def combine(self, messages: Sequence[tuple[bytes, float]], layout: Layout, round: int) -> torch.Tensor:
        mean = weighted_sum(self, messages, layout, round)
        return mean.sign_() if self.vote else mean


@attrs.frozen
class TopChunks:
    """Of each chunk of 64 or 64 × 64 values the k largest, by magnitude: a 12-bit index, and a bf16 or 2-bit value.

    Chunks are pieces of each tensor whose sides are the largest divisors of the tensor's up to 64. With `dct` the
    values are those of the chunk's cosine transform (DeMo, arXiv 2411.19870), else its own (SparseLoCo, 2508.15706). A
    tensor of one dimension has chunks of up to 64. The mean of transformed values is taken over those who sent them.
    """

    k: int = attrs.field(validator=[ge(1), le(CHUNK * CHUNK)])
    dct: bool = False
    bits: int = attrs.field(default=16, validator=attrs.validators.in_((2, 16)))

    def encode(self, values: torch.Tensor, layout: Layout, round: int) -> bytes:
        parts = []
        for matrix, shape in _matrices(values, layout):
            chunks = _chunks(matrix, shape)
            if self.dct:
                chunks = _transform(chunks, shape)
            flat = chunks.flatten(1)
            k = min(self.k, flat.shape[1])
            index = flat.abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values
            parts.append(_pack12(index.flatten()) + self._values_out(flat.gather(1, index)))
        return b"".join(parts)

    def is_sound(self, message: bytes, layout: Layout) -> bool:
        if len(message) != sum(sum(self._sizes(shape)) for shape in _shapes(layout)):
            return False
        at = 0
        for shape in _shapes(layout):
            indices, values = self._sizes(shape)
            count, k, size = _count(shape), self._kept(shape), shape.chunk[0] * shape.chunk[1]
            index = _unpack12(message[at : at + indices], count * k).view(count, k)
            if bool((index >= size).any()) or bool((index.diff(dim=1) <= 0).any()):
                return False
            if not bool(torch.isfinite(self._values_in(message[at + indices : at + indices + values], count, k)).all()):
                return False
            at += indices + values
        return True

    def decode(self, message: bytes, layout: Layout, round: int) -> torch.Tensor:
        return self.combine([(message, 1.0)], layout, round)

    def combine(self, messages: Sequence[tuple[bytes, float]], layout: Layout, round: int) -> torch.Tensor:
        result, at = torch.zeros(length_of(layout)), 0
        for (matrix, _), shape in zip(_matrices(result, layout), _shapes(layout), strict=True):
            indices, values = self._sizes(shape)
            count, k = _count(shape), self._kept(shape)
            total = torch.zeros(count, shape.chunk[0] * shape.chunk[1])
            shares = torch.zeros_like(total)
            for message, share in messages:
                index = _unpack12(message[at : at + indices], count * k).view(count, k)
                kept = self._values_in(message[at + indices : at + indices + values], count, k)
                # Each index comes once in a message, so the order of these additions is that of the messages.
                total.scatter_add_(1, index, kept.mul_(share))
                shares.scatter_add_(1, index, torch.full_like(kept, share))
            if self.dct:
                total = torch.where(shares > 0, total / shares.clamp_min(1e-30), total)
            chunks = total.view(count, *shape.chunk)
            matrix.copy_(_unchunked(_transform(chunks, shape, inverse=True) if self.dct else chunks, shape))
            at += indices + values
        return result

    def _kept(self, shape: _Shape) -> int:
        return min(self.k, shape.chunk[0] * shape.chunk[1])

    def _sizes(self, shape: _Shape) -> tuple[int, int]:
        """Bytes of the indices and of the values of one tensor."""
        kept = _count(shape) * self._kept(shape)
        if self.bits == 16:
            return -(-kept * 12 // 8), 2 * kept
        return -(-kept * 12 // 8), 4 * _count(shape) + -(-kept * 2 // 8)

    def _values_out(self, values: torch.Tensor) -> bytes:
        if self.bits == 16:
            return values.bfloat16().view(torch.uint8).numpy().tobytes()
        # One of four levels for each value: its sign, and whether it is nearer to a third of the chunk's largest.
        scale = values.abs().amax(dim=1, keepdim=True)
        codes = (values < 0).to(torch.uint8) * 2 + (values.abs() * 3 > scale * 2).to(torch.uint8)
        return scale.numpy().tobytes() + _pack2(codes.flatten())

    def _values_in(self, data: bytes, count: int, k: int) -> torch.Tensor:
        if not count * k:
            return torch.empty(count, k)
        if self.bits == 16:
            return torch.frombuffer(bytearray(data), dtype=torch.bfloat16).float().view(count, k)
        scale = torch.frombuffer(bytearray(data[: 4 * count]), dtype=torch.float32).view(count, 1)
        levels = torch.tensor([1 / 3, 1.0, -1 / 3, -1.0])
        return levels[_unpack2(data[4 * count :], count * k)].view(count, k) * scale


@attrs.frozen
class Ternary:
    """−s, 0 or s for each value, drawn so that the mean is right, s being the tensor's largest (TernGrad, 1705.07878).

    The draws are pseudo-random and differ from round to round.
    """

    seed: int = attrs.field(default=0, validator=ge(0))

    def encode(self, values: torch.Tensor, layout: Layout, round: int) -> bytes:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + round)
        parts = []
        for part in _parts(values, layout):
            scale = part.abs().amax() if len(part) else torch.zeros(())
            drawn = torch.rand(len(part), generator=generator) * scale < part.abs()
            codes = drawn.to(torch.uint8) * (1 + (part < 0).to(torch.uint8))
            parts.append(scale.reshape(1).numpy().tobytes() + _pack2(codes))
        return b"".join(parts)

    def is_sound(self, message: bytes, layout: Layout) -> bool:
        lengths = [place.stop - place.start for place in layout]
        if len(message) != sum(4 + -(-length // 4) for length in lengths):
            return False
        return bool(torch.isfinite(self.decode(message, layout, 0)).all())

    def decode(self, message: bytes, layout: Layout, round: int) -> torch.Tensor:
        result, at = torch.zeros(length_of(layout)), 0
        for part in _parts(result, layout):
            size = -(-len(part) // 4)
            scale = torch.frombuffer(bytearray(message[at : at + 4]), dtype=torch.float32)
            if len(part):
                codes = _unpack2(message[at + 4 : at + 4 + size], len(part))
                part.copy_(torch.tensor([0.0, 1.0, -1.0, 0.0])[codes] * scale)
            at += 4 + size
        return result

    def combine(self, messages: Sequence[tuple[bytes, float]], layout: Layout, round: int) -> torch.Tensor:
        return weighted_sum(self, messages, layout, round)


@attrs.frozen
class _Shape:
    """A tensor as a matrix, and the chunks that it is cut into."""

    rows: int
    columns: int
    chunk: tuple[int, int] = attrs.field(validator=attrs.validators.deep_iterable(gt(0)))


def _shapes(layout: Layout) -> Iterator[_Shape]:
    for place in layout:
        if place.stop > place.start:
            columns = place.shape[-1] if len(place.shape) > 1 else place.stop - place.start
            rows = (place.stop - place.start) // columns
            side = divisor(rows, CHUNK) if len(place.shape) > 1 else 1
            yield _Shape(rows, columns, (side, divisor(columns, CHUNK)))


def _parts(values: torch.Tensor, layout: Layout) -> Iterator[torch.Tensor]:
    yield from torch.split(values, [place.stop - place.start for place in layout])


def _matrices(values: torch.Tensor, layout: Layout) -> Iterator[tuple[torch.Tensor, _Shape]]:
    parts = (part for part in _parts(values, layout) if len(part))
    for part, shape in zip(parts, _shapes(layout), strict=True):
        yield part.view(shape.rows, shape.columns), shape


def _count(shape: _Shape) -> int:
    return (shape.rows // shape.chunk[0]) * (shape.columns // shape.chunk[1])


def _chunks(matrix: torch.Tensor, shape: _Shape) -> torch.Tensor:
    """Chunks, one after the other: count × rows × columns."""
    rows, columns = shape.chunk
    tiles = matrix.view(shape.rows // rows, rows, shape.columns // columns, columns)
    return tiles.transpose(1, 2).reshape(-1, rows, columns)


def _unchunked(chunks: torch.Tensor, shape: _Shape) -> torch.Tensor:
    rows, columns = shape.chunk
    tiles = chunks.view(shape.rows // rows, shape.columns // columns, rows, columns)
    return tiles.transpose(1, 2).reshape(shape.rows, shape.columns)


def _transform(chunks: torch.Tensor, shape: _Shape, *, inverse: bool = False) -> torch.Tensor:
    left, right = (dct_basis(side) for side in shape.chunk)
    if not inverse:
        return left @ chunks @ right.T
    # What everybody computes has to be the same everywhere: a matrix product adds up in no particular order.
    rows = torch.zeros_like(chunks)
    for place in range(shape.chunk[0]):
        rows.add_(chunks[:, place : place + 1, :] * left[place].view(1, -1, 1))
    result = torch.zeros_like(chunks)
    for place in range(shape.chunk[1]):
        result.add_(rows[:, :, place : place + 1] * right[place].view(1, 1, -1))
    return result


def _pack(bits: torch.Tensor) -> bytes:
    octets = bits.view(-1, 8)
    packed = torch.zeros(len(octets), dtype=torch.uint8)
    for place in range(8):
        packed |= octets[:, place] << place
    return packed.numpy().tobytes()


def _unpack(data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    packed = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return torch.stack([packed >> place & 1 for place in range(8)], dim=1).flatten()


def _pack2(codes: torch.Tensor) -> bytes:
    """Numbers below 4, four of them in a byte."""
    padded = torch.zeros(-(-len(codes) // 4) * 4, dtype=torch.uint8)
    padded[: len(codes)] = codes
    quads = padded.view(-1, 4)
    return (quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6).numpy().tobytes()


def _unpack2(data: bytes, count: int) -> torch.Tensor:
    packed = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=1).flatten()[:count].long()


def _pack12(numbers: torch.Tensor) -> bytes:
    """Numbers below 4096, two of them in three bytes."""
    padded = torch.zeros(-(-len(numbers) // 2) * 2, dtype=torch.int32)
    padded[: len(numbers)] = numbers
    first, second = padded[0::2], padded[1::2]
    packed = torch.stack([first & 255, first >> 8 | (second & 15) << 4, second >> 4], dim=1)
    return packed.to(torch.uint8).numpy().tobytes()[: -(-len(numbers) * 12 // 8)]


def _unpack12(data: bytes, count: int) -> torch.Tensor:
    if not count:
        return torch.empty(0, dtype=torch.int64)
    padded = bytearray(data) + bytes(-len(data) % 3)
    low, middle, high = torch.frombuffer(padded, dtype=torch.uint8).long().view(-1, 3).unbind(1)
    return torch.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], dim=1).flatten()[:count]

"""What a model keeps beside its parameters, such as the running statistics of batch normalisation."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping

import attrs
import torch
from torch import nn

from optim.flat import unwrapped
from protocol.errors import ShoalError
from protocol.identity import PeerId
from protocol.plan import MAX_WEIGHT

_HEAD = struct.Struct("<d")


@attrs.frozen(eq=False)
class _Told:
    """What one peer has."""

    weight: float
    statistics: torch.Tensor
    counters: torch.Tensor


class Buffers:
    """A model's buffers that belong to its state: fractions are averaged, whole numbers are counters and take the
    largest value that a peer has. Buffers that `state_dict` leaves out are constants, and so are truth values.

    Everybody is told everybody's in full precision: these are few, and a variance must not become negative.
    """

    def __init__(self, model: nn.Module) -> None:
        model = unwrapped(model)
        kept = model.state_dict().keys()
        buffers = [buffer for name, buffer in model.named_buffers() if name in kept and not buffer.is_complex()]
        self._statistics = [buffer for buffer in buffers if buffer.is_floating_point()]
        self._counters = [b for b in buffers if not b.is_floating_point() and b.dtype != torch.bool]

    def __bool__(self) -> bool:
        return bool(self._statistics or self._counters)

    def average(self, gather: Callable[[bytes, str], Mapping[PeerId, bytes]], weight: float) -> ShoalError | None:
        """Averages them, if there are any, by way of `gather`, which takes a block and a tag.

        Returns:
            Why it failed; they are as they were then. The exchange that this goes with is worth more, and need not
            fail as well.
        """
        if not self:
            return None
        try:
            self.take(gather(self.block(weight), "buffers"))
        except ShoalError as error:
            return error
        return None

    def block(self, weight: float) -> bytes:
        """Ours, for a `gather`."""
        statistics = _joined(self._statistics, torch.float32)
        if not bool(torch.isfinite(statistics).all()):
            weight, statistics = 0.0, torch.zeros_like(statistics)
        parts = (statistics, _joined(self._counters, torch.int64))
        return _HEAD.pack(weight) + b"".join(part.numpy().tobytes() for part in parts)

    @torch.no_grad()
    def take(self, blocks: Mapping[PeerId, bytes]) -> None:
        """Goes on from what all have told. Blocks that make no sense do not count; all peers find that alike."""
        told = [one for peer in sorted(blocks) if (one := self._read(blocks[peer])) is not None]
        total = math.fsum(one.weight for one in told)
        if total > 0:
            mean = torch.zeros(sum(buffer.numel() for buffer in self._statistics))
            for one in told:
                mean.add_(one.statistics.mul(one.weight / total))
            _put(mean, self._statistics)
        if told:
            _put(torch.stack([one.counters for one in told]).amax(0), self._counters)

    def _read(self, block: bytes) -> _Told | None:
        statistics = sum(buffer.numel() for buffer in self._statistics)
        counters = sum(buffer.numel() for buffer in self._counters)
        if len(block) != _HEAD.size + 4 * statistics + 8 * counters:
            return None
        (weight,) = _HEAD.unpack_from(block)
        numbers = bytearray(block[_HEAD.size :])
        values = torch.frombuffer(numbers[: 4 * statistics] or bytearray(4), dtype=torch.float32)[:statistics]
        counts = torch.frombuffer(numbers[4 * statistics :] or bytearray(8), dtype=torch.int64)[:counters]
        if not 0 <= weight <= MAX_WEIGHT or not bool(torch.isfinite(values).all()):
            return None
        return _Told(weight, values, counts)


def _joined(buffers: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    parts = [buffer.detach().to("cpu", dtype).flatten() for buffer in buffers]
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)


def _put(values: torch.Tensor, buffers: list[torch.Tensor]) -> None:
    if buffers:
        parts = torch.split(values, [buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view(buffer.shape))

"""What a model keeps beside its parameters, such as the running statistics of batch normalisation."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping

import attrs
import torch
from torch import nn

from optim.flat import unwrapped
from protocol.errors import SettingsError, ShoalError
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

    They are looked up anew each time: a module that is moved, or loaded with `assign`, has others in their place, and
    so may a step of its own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = unwrapped(model)
        self._statistics, self._counters = ({name: b.shape for name, b in now.items()} for now in self._now())

    def average(self, gather: Callable[[bytes, str], Mapping[PeerId, bytes]], weight: float) -> ShoalError | None:
        """Averages them, if there are any, by way of `gather`, which takes a block and a tag.

        Returns:
            Why it failed; they are as they were then. The exchange that this goes with is worth more, and need not
            fail as well.

        Raises:
            SettingsError: The model has other buffers than it had, so what it tells would not fit the others'.
        """
        ours = self._found()
        if not any(ours):
            return None
        try:
            blocks = gather(_block(*ours, weight), "buffers")
        except ShoalError as error:
            return error
        self._take(blocks)
        return None

    @torch.no_grad()
    def _take(self, blocks: Mapping[PeerId, bytes]) -> None:
        """Goes on from what all have told. Blocks that make no sense do not count; all peers find that alike."""
        statistics, counters = self._found()
        told = [one for peer in sorted(blocks) if (one := self._read(blocks[peer])) is not None]
        total = math.fsum(one.weight for one in told)
        if total > 0:
            mean = torch.zeros(_size(self._statistics))
            for one in told:
                mean.add_(one.statistics.mul(one.weight / total))
            _put(mean, statistics)
        if told:
            _put(torch.stack([one.counters for one in told]).amax(0), counters)

    def _found(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Statistics and counters, as they are now."""
        statistics, counters = self._now()
        for kind, before, now in (("fractions", self._statistics, statistics), ("counters", self._counters, counters)):
            for name in before.keys() | now.keys():
                if name not in before or name not in now or before[name] != now[name].shape:
                    raise SettingsError(
                        f"the model's buffer {name} is not what it was when the optimizer was made, among its {kind}",
                        hint="All peers need the same buffers: give the model all that it will have before that.",
                    )
        return list(statistics.values()), list(counters.values())

    def _now(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        kept = self._model.state_dict().keys()
        # All names of one that is shared: moving a model parts them.
        named = self._model.named_buffers(remove_duplicate=False)
        buffers = {name.replace("_orig_mod.", ""): each for name, each in named if name in kept}
        statistics = {name: each for name, each in buffers.items() if each.is_floating_point()}
        return statistics, {name: each for name, each in buffers.items() if _counts(each)}

    def _read(self, block: bytes) -> _Told | None:
        statistics, counters = _size(self._statistics), _size(self._counters)
        if len(block) != _HEAD.size + 4 * statistics + 8 * counters:
            return None
        (weight,) = _HEAD.unpack_from(block)
        numbers = bytearray(block[_HEAD.size :])
        values = torch.frombuffer(numbers[: 4 * statistics] or bytearray(4), dtype=torch.float32)[:statistics]
        counts = torch.frombuffer(numbers[4 * statistics :] or bytearray(8), dtype=torch.int64)[:counters]
        if not 0 <= weight <= MAX_WEIGHT or not bool(torch.isfinite(values).all()):
            return None
        return _Told(weight, values, counts)


def _block(statistics: list[torch.Tensor], counters: list[torch.Tensor], weight: float) -> bytes:
    """Ours, for a `gather`."""
    fractions = _joined(statistics, torch.float32)
    if not bool(torch.isfinite(fractions).all()):
        weight, fractions = 0.0, torch.zeros_like(fractions)
    parts = (fractions, _joined(counters, torch.int64))
    return _HEAD.pack(weight) + b"".join(part.numpy().tobytes() for part in parts)


def _counts(buffer: torch.Tensor) -> bool:
    return not buffer.is_floating_point() and not buffer.is_complex() and buffer.dtype != torch.bool


def _size(shapes: Mapping[str, torch.Size]) -> int:
    return sum(shape.numel() for shape in shapes.values())


def _joined(buffers: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    parts = [buffer.detach().to("cpu", dtype).flatten() for buffer in buffers]
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)


def _put(values: torch.Tensor, buffers: list[torch.Tensor]) -> None:
    if buffers:
        parts = torch.split(values, [buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view(buffer.shape))

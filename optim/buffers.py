"""What a model keeps beside its parameters, such as the running statistics of batch normalisation."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import torch
from torch import nn

from protocol.collective import Collective

_COUNT = struct.Struct("<q")


@torch.no_grad()
def average_buffers(model: nn.Module, swarm: Collective) -> None:
    """Gives all peers the same buffers: the mean of real ones, the largest of each integer.

    Only buffers that are saved with the model count; others follow from its definition. All peers call this at the
    same time. Statistics of averaged parameters are better estimated anew, by a few batches without training.

    Raises:
        ShoalError: An exchange failed; no buffer has been changed.
    """
    buffers = list(_saved(model))
    reals = [buffer for buffer in buffers if buffer.is_floating_point()]
    integers = [buffer for buffer in buffers if not buffer.is_floating_point() and not buffer.is_complex()]
    means: tuple[torch.Tensor, ...] = ()
    if sum(buffer.numel() for buffer in reals):
        means = swarm.all_reduce([buffer.float() for buffer in reals], tag="buffers").tensors
    if ours := [int(value) for buffer in integers for value in buffer.flatten()]:
        block = b"".join(_COUNT.pack(value) for value in ours)
        told = [theirs for theirs in swarm.gather(block, tag="counts").blocks.values() if len(theirs) == len(block)]
        largest = [max(values) for values in zip(*(_COUNT.iter_unpack(theirs) for theirs in told), strict=True)]
        _put(integers, torch.tensor([value for (value,) in largest]))
    for buffer, mean in zip(reals, means, strict=False):
        buffer.copy_(mean)


def has_buffers(model: nn.Module) -> bool:
    """Whether there is anything to average."""
    return any(buffer.numel() for buffer in _saved(model))


def _put(buffers: list[torch.Tensor], values: torch.Tensor) -> None:
    parts = torch.split(values, [buffer.numel() for buffer in buffers])
    for buffer, part in zip(buffers, parts, strict=True):
        buffer.copy_(part.view(buffer.shape))


def _saved(model: nn.Module) -> Iterator[torch.Tensor]:
    kept = model.state_dict(keep_vars=True)
    return (buffer for name, buffer in model.named_buffers() if name in kept)

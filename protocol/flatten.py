"""Between what callers have, tensors of any shape or bytes, and the flat vectors that operations work on."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from protocol.collective import Block, Reduced, Tensors
from protocol.gather import bounds
from protocol.identity import PeerId
from protocol.vectors import vector_bytes

_INPUTS = (torch.float32, torch.bfloat16, torch.float16)


def shapes_of(values: Tensors) -> tuple[torch.Size, ...]:
    """The shapes of the tensors that make up the values."""
    return tuple(tensor.shape for tensor in _listed(values))


def flat(values: Tensors) -> torch.Tensor:
    """All values in one fp32 vector on the CPU. One that is so already is not copied.

    Raises:
        TypeError: They are no tensors.
        ValueError: There are no values, or they are of another type than fp32, bf16 and fp16.
    """
    tensors = _listed(values)
    for tensor in tensors:
        if tensor.dtype not in _INPUTS:
            raise ValueError(f"values are fp32, bf16 or fp16 numbers, not {tensor.dtype}")
    parts = [tensor.detach().reshape(-1).to("cpu", torch.float32) for tensor in tensors]
    if not any(len(part) for part in parts):
        raise ValueError("there are no values")
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def block_bytes(block: Block | None) -> torch.Tensor | None:
    """A block as a vector of bytes. Bytes are copied, tensors on the CPU are not."""
    if block is None:
        return None
    if isinstance(block, torch.Tensor):
        return block.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    copy = bytearray(memoryview(block))  # PyTorch does not take what it could not write to; a number is no block
    return torch.frombuffer(copy, dtype=torch.uint8) if copy else torch.empty(0, dtype=torch.uint8)


def blocks_of(gathered: Reduced) -> Mapping[PeerId, memoryview]:
    """The blocks of those who brought one, read-only."""
    plan, data = gathered.plan, vector_bytes(gathered.mean).toreadonly()
    return {
        peer: data[start:stop]
        for peer, weight, (start, stop) in zip(plan.members, plan.weights, bounds(plan), strict=True)
        if weight > 0
    }


def _listed(values: Tensors) -> list[torch.Tensor]:
    tensors = [values] if isinstance(values, torch.Tensor) else list(values)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"values are a tensor or a sequence of tensors, not of {type(tensor).__name__}")
    return tensors

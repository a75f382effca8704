"""Vectors of fp32 in memory."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

_HUGE = 1 << 21  # bytes of a huge page


def new_vector(length: int) -> torch.Tensor:
    """A 1-D fp32 CPU tensor with any contents.

    In huge pages where the system has them: touching 100 MiB of new memory for the first time costs 40 ms and more in
    small pages, as much as encrypting it four times.
    """
    size = 4 * length
    if size < 2 * _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(length, dtype=torch.float32)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32)


def vector_bytes(values: torch.Tensor) -> memoryview:
    """The bytes of a contiguous 1-D fp32 CPU tensor, little-endian as on every machine that PyTorch supports."""
    view: memoryview = values.detach().numpy().view("u1").data
    return view


def all_finite(values: torch.Tensor) -> bool:
    """Whether every element is a finite number.

    The sum is an order of magnitude cheaper than looking at each element, and finite only if they all are.
    """
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def scale(values: torch.Tensor, share: float, *, out: torch.Tensor) -> None:
    """values * share. A share of 0 gives zeros even where values are not finite."""
    if share == 0:
        out.zero_()
    else:
        torch.mul(values.detach(), torch.tensor(share, dtype=torch.float32), out=out)

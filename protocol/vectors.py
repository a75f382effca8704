"""Vectors of fp32 in memory."""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref

import numpy as np
import numpy.typing as npt
import torch

from protocol.errors import Overloaded

Array = npt.NDArray[np.float32]

_SMALLEST = 1 << 22  # bytes of which it is worth while: two huge pages
_SPARE = 2  # memories that wait to be used again: a result's, and that for the bytes of encoded sums


class VectorPool:
    """Makes vectors. The memory of a large one that nobody refers to any more becomes the next one of its length.

    New memory costs more than anything else that is done with a vector: the system fills it with zeros, page by page,
    when it is touched for the first time.
    """

    def __init__(self) -> None:
        self._spare: dict[int, mmap.mmap] = {}  # by bytes; the one that was given back last is last

    def take(self, length: int) -> torch.Tensor:
        """A 1-D fp32 CPU tensor with any contents."""
        size = 4 * length
        if size < _SMALLEST:
            return torch.empty(length, dtype=torch.float32)
        memory = self._spare.pop(size, None) or _new_memory(size)
        array = np.frombuffer(memory, dtype=np.float32)
        weakref.finalize(
            array, self._give, memory
        ).atexit = False  # the tensor, and all views of it, refer to the array
        return torch.from_numpy(array)

    def _give(self, memory: mmap.mmap) -> None:
        self._spare.pop(len(memory), None)
        self._spare[len(memory)] = memory
        if len(self._spare) > _SPARE:
            del self._spare[next(iter(self._spare))]


def _new_memory(size: int) -> mmap.mmap:
    """In huge pages where the system has them: with small ones, 100 MiB take 40 ms and more."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def room_for(size: int) -> torch.Tensor:
    """A 1-D uint8 CPU tensor of that many bytes, with any contents.

    Raises:
        Overloaded: There is no memory for them.
    """
    try:
        return torch.empty(size, dtype=torch.uint8)
    except (RuntimeError, MemoryError):
        raise Overloaded(f"this machine has no memory for {size / 1e6:.0f} MB of others' data") from None


def vector_bytes(values: torch.Tensor) -> memoryview:
    """The bytes of a contiguous 1-D fp32 CPU tensor, little-endian as on every machine that PyTorch supports."""
    view: memoryview = values.detach().numpy().view("u1").data
    return view


def all_finite(values: torch.Tensor) -> bool:
    """Whether every element is a finite number.

    The sum is an order of magnitude cheaper than looking at each element, and finite only if they all are.
    """
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def cut(values: torch.Tensor) -> torch.Tensor:
    """In place: infinite numbers become the largest that are not.

    That is for sums of finite values at the end of the range, of which shares that were rounded up make too much.
    """
    most = torch.finfo(torch.float32).max
    return values.clamp_(-most, most)


def scale(values: torch.Tensor, share: float, *, out: torch.Tensor) -> None:
    """values * share. A share of 0 gives zeros even where values are not finite."""
    if share == 0:
        out.zero_()
    else:
        torch.mul(values.detach(), torch.tensor(share, dtype=torch.float32), out=out)


def add_scaled(total: Array, values: Array, share: float, scratch: Array) -> None:
    """total += values * share, rounded in between, as `scale` has it. Sums that overflow become infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        if share == 0:
            scratch.fill(0)
        else:
            np.multiply(values, np.float32(share), out=scratch)
        np.add(total, scratch, out=total)

"""The cosine transform of small chunks."""

from __future__ import annotations

import math
from functools import cache

import torch


@cache
def dct_basis(size: int) -> torch.Tensor:
    """The orthonormal DCT-II as a matrix: its rows are cosines of growing frequency. Not to be changed."""
    place = torch.arange(size, dtype=torch.float64)
    basis = torch.cos(math.pi / size * torch.outer(place, place + 0.5)) * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)
    return basis.float()


def divisor(number: int, largest: int) -> int:
    """The largest divisor up to `largest`."""
    return next(size for size in range(min(number, largest), 0, -1) if number % size == 0)

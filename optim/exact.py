"""Sums and products that give the same bits on every processor: elementwise operations in a fixed order only."""

from __future__ import annotations

import torch


def tree_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension: the second half is added to the first, until one is left."""
    while len(values) > 1:
        half = (len(values) + 1) // 2
        upper = values[half:]
        lower = values[:half].clone()
        lower[: len(upper)] += upper
        values = lower
    return values[0]


def mean_and_variance(values: torch.Tensor) -> tuple[float, float]:
    """Of all of them, in double precision; no values have 0 and 0."""
    if not values.numel():
        return 0.0, 0.0
    doubled = values.flatten().double()
    mean = tree_sum(doubled) / len(doubled)
    apart = doubled - mean
    return float(mean), float(tree_sum(apart * apart) / len(doubled))


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """The columns made orthonormal, one after the other (modified Gram-Schmidt).

    What is next to zero, or next to a combination of columns before, becomes zero: its direction would be that of
    rounding errors.
    """
    result = matrix.clone()
    least = tree_sum(matrix * matrix).sqrt().mul_(1e-5).clamp_min_(1e-20)
    for column in range(matrix.shape[1]):
        current = result[:, column].clone()
        norm = tree_sum(current * current).sqrt()
        result[:, column] = current / norm if bool(norm > least[column]) else torch.zeros_like(current)
        rest = result[:, column + 1 :]
        if rest.shape[1]:
            unit = result[:, column : column + 1]
            rest -= unit * tree_sum(unit * rest)
    return result


def outer_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left · rightᵀ, column by column."""
    result = left[:, :1] * right[:, 0]
    for column in range(1, left.shape[1]):
        result += left[:, column : column + 1] * right[:, column]
    return result

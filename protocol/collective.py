"""What a training loop sees of the swarm: a blocking weighted mean."""

from __future__ import annotations

import typing

import attrs
import torch


@attrs.frozen(eq=False)
class Reduced:
    """The outcome of a round."""

    mean: torch.Tensor
    """One-dimensional, fp32: the weighted mean of the contributors' values."""


class Collective(typing.Protocol):
    """Forms weighted means over the swarm. Blocking; called from the training thread."""

    def all_reduce(self, values: torch.Tensor, weight: float) -> Reduced:
        """The weighted mean of all peers' values, the same bits on every peer."""
        ...

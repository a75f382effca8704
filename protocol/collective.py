"""What a collective operation gives, and the interface that optimizers see of it."""

from __future__ import annotations

from typing import Protocol

import attrs
import torch

from protocol.identity import PeerId
from protocol.plan import Plan


@attrs.frozen(kw_only=True, eq=False)
class Reduced:
    """The result of one round: the same bits at every member of `plan`."""

    plan: Plan
    mean: torch.Tensor
    """1-D, fp32, CPU: the weighted mean of the contributors' values; zeros if nobody's weight is above 0."""
    contributors: tuple[PeerId, ...]
    """Members with a weight above 0, in ring order."""
    attempts: int
    """How many attempts the round took, as far as this peer saw it."""
    bytes_sent: int
    """Payload bytes that this peer had sent for the round when it held the result, failed attempts included."""
    bytes_received: int
    seconds: float
    """From this peer's being ready to its holding the result."""
    weight: float
    """Sum of the weights."""


class Collective(Protocol):
    """A weighted mean over all peers of a run. Blocking; called from the training thread."""

    def all_reduce(self, values: torch.Tensor, weight: float) -> Reduced:
        """The mean of all members' `values` (1-D fp32 CPU, the same length everywhere), each counting `weight`.

        The values are not changed. A weight of 0 takes part without contributing.
        """
        ...

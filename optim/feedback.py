"""What becomes of that which a lossy form leaves out."""

from __future__ import annotations

import attrs
import torch
from attrs.validators import gt, le

from optim.slots import Memory


@attrs.frozen
class Forget:
    """It is lost."""

    def before(self, values: torch.Tensor, memory: Memory) -> torch.Tensor:
        return values

    def after(self, intended: torch.Tensor, own: torch.Tensor, memory: Memory) -> Memory:
        return memory


@attrs.frozen
class ErrorFeedback:
    """It is added to the next exchange: x' = d·e + x is sent, and e ← x' − decoded(x') stays.

    With d = 1 nothing is ever lost (Seide et al. 2014); d < 1 lets go of what is old (SparseLoCo: 0.95; DeMo: 0.999).
    """

    decay: float = attrs.field(default=1.0, validator=[gt(0), le(1)])

    def before(self, values: torch.Tensor, memory: Memory) -> torch.Tensor:
        left = memory.get("error")
        return values if left is None else left.mul(self.decay).add_(values)

    def after(self, intended: torch.Tensor, own: torch.Tensor, memory: Memory) -> Memory:
        return {**memory, "error": torch.sub(intended, own)}

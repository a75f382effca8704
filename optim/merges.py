"""How new outer parameters come back into the local ones."""

from __future__ import annotations

import attrs
import torch
from attrs.validators import ge, lt


@attrs.frozen
class Replace:
    """Go on from the new outer parameters: θ ← Θ'."""

    def apply(self, inner: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return new


@attrs.frozen
class Carry:
    """Move the local ones by as much as the outer ones have moved: θ ← θ + (Θ' − Θ). Nothing local is lost."""

    def apply(self, inner: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return torch.sub(new, old).add_(inner)


@attrs.frozen
class Blend:
    """Keep a share α of the local ones, which have moved on meanwhile: θ ← α·θ + (1 − α)·Θ'.

    What is kept is part of the next pseudo-gradient, which is taken against Θ'. (Streaming DiLoCo, arXiv 2501.18512.)
    """

    alpha: float = attrs.field(validator=[ge(0), lt(1)])

    def apply(self, inner: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        if self.alpha == 0:
            return new
        return inner.mul(self.alpha).add_(new.mul(1 - self.alpha))

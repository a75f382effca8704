"""What is exchanged."""

from __future__ import annotations

import attrs
import torch

from optim.slots import Local, Memory


@attrs.frozen
class PseudoGradient:
    """Old outer parameters minus new local ones: a direction of ascent, as a gradient is (DiLoCo, arXiv 2311.08105)."""

    settled: bool = attrs.field(default=False, init=False)

    def take(self, local: Local, memory: Memory) -> tuple[torch.Tensor, Memory]:
        return torch.sub(local.anchor, local.inner), memory


@attrs.frozen
class Parameters:
    """The local parameters themselves, for gossip."""

    settled: bool = attrs.field(default=True, init=False)

    def take(self, local: Local, memory: Memory) -> tuple[torch.Tensor, Memory]:
        return local.inner, memory


@attrs.frozen
class Gradient:
    """The gradient of the local loss; the inner optimizer steps with the peers' mean of it."""

    settled: bool = attrs.field(default=False, init=False)

    def take(self, local: Local, memory: Memory) -> tuple[torch.Tensor, Memory]:
        assert local.gradient is not None
        return local.gradient, memory

"""What keeps local steps from running away from the others', or into sharp places."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch
from attrs.validators import gt
from torch import nn

from protocol.errors import SettingsError


@attrs.frozen
class Free:
    """Nothing: local steps follow the gradient."""

    def regularize(
        self, parameters: Sequence[tuple[nn.Parameter, torch.Tensor]], closure: Callable[[], float] | None
    ) -> None:
        """Leaves the gradients as they are."""


@attrs.frozen
class Proximal:
    """FedProx (Li et al., arXiv 1812.06127): the local loss gets a term μ/2·‖θ − Θ‖², and the gradient μ·(θ − Θ)."""

    mu: float = attrs.field(validator=gt(0))

    @torch.no_grad()
    def regularize(
        self, parameters: Sequence[tuple[nn.Parameter, torch.Tensor]], closure: Callable[[], float] | None
    ) -> None:
        for parameter, anchor in parameters:
            if parameter.grad is not None:
                drift = torch.sub(parameter, anchor.to(parameter))
                parameter.grad.add_(drift, alpha=self.mu)


@attrs.frozen
class SharpnessAware:
    """SAM (Foret et al., arXiv 2010.01412), as DFedSAM uses it: the gradient is that at θ + ρ·∇/‖∇‖.

    It is computed by the closure that `step` is given, so each step computes two gradients.
    """

    rho: float = attrs.field(default=0.05, validator=gt(0))

    def regularize(
        self, parameters: Sequence[tuple[nn.Parameter, torch.Tensor]], closure: Callable[[], float] | None
    ) -> None:
        if closure is None:
            raise SettingsError("sharpness-aware steps compute the gradient twice: give `step` a closure")
        steps = [(parameter, parameter.grad.clone()) for parameter, _ in parameters if parameter.grad is not None]
        length = torch.linalg.vector_norm(torch.stack([gradient.norm() for _, gradient in steps]))
        scale = self.rho / max(float(length), 1e-12)
        starts = [(parameter, parameter.detach().clone()) for parameter, _ in steps]
        try:
            with torch.no_grad():
                for parameter, gradient in steps:
                    parameter.add_(gradient, alpha=scale)
            with torch.enable_grad():
                closure()
        finally:
            with torch.no_grad():
                for parameter, start in starts:
                    parameter.copy_(start)

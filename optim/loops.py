"""Methods by name for plain PyTorch loops."""

from __future__ import annotations

import torch
from torch import nn

from optim.machine import Machine
from optim.methods import recipe
from optim.optimizer import LowCommunicationOptimizer
from protocol.collective import Collective


def DiLoCo(
    model: nn.Module,
    inner: torch.optim.Optimizer,
    swarm: Collective | Machine,
    *,
    sync_every: int = 500,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    tokens_per_step: int = 1,
) -> LowCommunicationOptimizer:
    """DiLoCo around an inner optimizer: an exchange after every `sync_every` steps.

    Raises:
        SettingsError: A setting that cannot work.
    """
    method = recipe("diloco", inner_steps=sync_every, outer_lr=outer_lr, outer_momentum=outer_momentum)
    return LowCommunicationOptimizer(model, inner, swarm, method, tokens_per_step=tokens_per_step)

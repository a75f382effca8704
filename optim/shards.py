"""Tensors that several processes of one machine share, as FSDP2 (`torch.distributed.fsdp.fully_shard`) has them."""

from __future__ import annotations

import math
from typing import Any, cast

import attrs
import torch
from torch import nn

from protocol.errors import SettingsError


@attrs.frozen
class Span:
    """Which of a tensor's values this process has: those from `start` to `stop`, of the tensor as a flat vector."""

    start: int
    stop: int


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor: all of it, unless it is a `DTensor`. Shares its memory."""
    if hasattr(tensor, "to_local"):
        part: torch.Tensor = tensor.to_local()
        return part
    return tensor


def span_of(name: str, tensor: torch.Tensor) -> Span:
    """Where the values that this process has of a tensor lie in all of it.

    Raises:
        SettingsError: They lie scattered: the tensor is not cut along its first dimension, or more than once.
    """
    placements = getattr(tensor, "placements", ())
    cut = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if not cut:
        return Span(0, tensor.numel())
    kinds = [str(placements[dim]) for dim in cut]
    if kinds != ["S(0)"]:
        raise SettingsError(
            f"parameter {name} is cut up as {kinds}; parameters can be cut once, along their first dimension",
            hint="Use fully_shard as it is, without tensor or pipeline parallelism.",
        )
    mesh, rows = cast(Any, tensor).device_mesh, tensor.shape[0]
    each = math.ceil(rows / mesh.size(cut[0]))
    first = min(each * mesh.get_local_rank(cut[0]), rows)
    width = tensor.numel() // rows if rows else 0
    part = local(tensor).numel()
    if part != width * (min(first + each, rows) - first):
        raise SettingsError(f"parameter {name} has {part} values here: it is not cut as evenly as can be")
    return Span(first * width, first * width + part)


def local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter and its gradient as far as this process has them, in the same memory."""
    if not hasattr(parameter, "to_local"):
        return parameter
    ours = nn.Parameter(local(parameter.detach()))
    if parameter.grad is not None:
        ours.grad = local(parameter.grad)
    return ours

"""Means of which the length does not shrink with the number of peers."""

from __future__ import annotations

import re

import attrs
import torch

from optim.exact import tree_sum
from optim.mixers import share_of
from optim.slots import AllReduce, Layout, Memory, Mixed, Mixing
from protocol.collective import Reduced, Window
from protocol.errors import ProtocolError

_EMBEDDING = re.compile("embed", re.IGNORECASE)
_CANCELLED = 1e-4
"""A mean of directions that is shorter has none."""


@attrs.frozen
class RadialMean:
    """The mean length of the peers' values, along the mean of their directions, tensor by tensor (Decoupled DiLoCo).

    With vᵢ = δᵢ/‖δᵢ‖ for each tensor: mean(‖δᵢ‖) · v̄/‖v̄‖. The plain mean of M directions that have little in common
    is shorter by √M. Where they cancel each other out, and for embeddings, it is the plain mean of what was sent:
    mean(‖δᵢ‖) · v̄ and δ̄.
    """

    window: Window | None = None

    def mix(self, values: torch.Tensor, weight: float, layout: Layout, round: int, memory: Memory) -> Mixing[Mixed]:
        lengths = torch.ones(len(layout))
        directions = values.clone()
        for index, place in enumerate(layout):
            part = directions[place.start : place.stop]
            if not _EMBEDDING.search(place.name):
                lengths[index] = part.norm()
                part.div_(lengths[index].clamp_min(1e-30))
        reduced = yield AllReduce(torch.cat([directions, lengths]), weight, self.window)
        assert isinstance(reduced, Reduced)
        missed = tuple(
            Mixed(mean=_meant(one, layout), own=torch.zeros_like(values), members=one.contributors, share=0.0)
            for one in reduced.missed
        )
        return Mixed(
            mean=_meant(reduced, layout),
            own=values,
            members=reduced.contributors,
            share=share_of(reduced, weight),
            missed=missed,
        )


def _meant(reduced: Reduced, layout: Layout) -> torch.Tensor:
    length = layout[-1].stop
    if len(reduced.mean) != length + len(layout):
        raise ProtocolError(f"the swarm's mean has {len(reduced.mean)} values, not {length + len(layout)}")
    mean = reduced.mean[:length].clone()
    for place, size in zip(layout, reduced.mean[length:], strict=True):
        part = mean[place.start : place.stop]
        if not _EMBEDDING.search(place.name):
            norm = tree_sum(part * part).sqrt() if len(part) else torch.zeros(())
            if float(norm) > _CANCELLED:
                part.div_(norm)
            part.mul_(size)
    return mean

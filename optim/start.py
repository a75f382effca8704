"""Whether the peers of a swarm begin alike: what they average is worth nothing if they do not."""

from __future__ import annotations

import hashlib

from torch import nn

from optim.flat import FlatParameters
from optim.machine import Machine, link_of
from optim.recipe import GradientRecipe, Recipe
from protocol.collective import Collective
from protocol.errors import SettingsError

_DIFFERENCES = {
    "the recipes": "give all peers the same method with the same constants",
    "the models": "all peers need the same tensors with the same names, in the same order",
    "the values": "load the same checkpoint at all peers: equal seeds may make other values on other machines",
}


def check_start(model: nn.Module, swarm: Collective | Machine, method: Recipe | GradientRecipe) -> None:
    """Compares what all peers begin with; to be called by all their processes, before the first step.

    Only differences from the outer parameters are exchanged, so different values at the beginning never heal; and
    tensors of equal size in another order are averaged without anybody noticing.

    Raises:
        SettingsError: The peers differ; the message says in what. Or this process has only a part of the model, and no
            `Machine`.
        ShoalError: They could not be asked.
    """
    flat = FlatParameters(model)
    link = link_of(swarm, flat)
    layout = "\n".join(f"{place.name} {list(place.shape)}" for place in flat.whole)
    texts = (repr(method), layout)
    ours = b"".join(hashlib.sha256(text.encode()).digest() for text in texts) + link.digest(flat.read())
    theirs = link.gather(ours, "start")
    for index, (what, hint) in enumerate(_DIFFERENCES.items()):
        part = slice(32 * index, 32 * index + 32)
        others = [peer.short for peer, block in sorted(theirs.items()) if block[part] != ours[part]]
        if others:
            raise SettingsError(f"{what} of {', '.join(others)} are not ours", hint=hint)

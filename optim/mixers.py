"""How the peers' values become one."""

from __future__ import annotations

import math
import struct

import attrs
import torch

from optim.compressors import Compressor
from optim.slots import AllReduce, Exchange, Gather, Layout, Memory, Mixed, Mixing
from protocol.collective import Exchanged, Gathered, Reduced
from protocol.errors import ProtocolError
from protocol.plan import MAX_WEIGHT


@attrs.frozen
class RingMean:
    """The collective's own weighted mean, in the run's number format on the wire."""

    def mix(self, values: torch.Tensor, weight: float, layout: Layout, round: int, memory: Memory) -> Mixing[Mixed]:
        reduced = yield AllReduce(values, weight)
        assert isinstance(reduced, Reduced)
        if reduced.mean.shape != values.shape:
            raise ProtocolError(f"the swarm's mean has shape {list(reduced.mean.shape)}, not {list(values.shape)}")
        share = weight / reduced.weight if reduced.weight else 0.0
        return Mixed(mean=reduced.mean, own=values, members=reduced.contributors, share=share)


@attrs.frozen
class RandomPairs:
    """The plain mean with one other peer, drawn anew each time; the odd one out, or who loses its partner, is alone."""

    def mix(self, values: torch.Tensor, weight: float, layout: Layout, round: int, memory: Memory) -> Mixing[Mixed]:
        swapped = yield Exchange(values, weight)
        assert isinstance(swapped, Exchanged)
        theirs = swapped.values
        if theirs is None or swapped.partner is None:
            return Mixed(mean=values, own=values, members=(), share=1.0)
        if theirs.shape != values.shape:
            raise ProtocolError(f"{swapped.partner.short} sent {len(theirs)} values, not {len(values)}")
        if swapped.weight == 0:
            return Mixed(mean=values, own=values, members=(), share=1.0)
        if weight == 0:  # ours are no good
            return Mixed(mean=theirs, own=values, members=(swapped.partner,), share=0.0)
        ours = values if swapped.ours is None else swapped.ours  # both take the same two
        return Mixed(mean=torch.add(ours, theirs).mul_(0.5), own=ours, members=(swapped.partner,), share=0.5)


@attrs.frozen
class GatheredMean:
    """Everybody gets everybody's values in compressed form, and sums what they mean, in the order of the peer ids."""

    compressor: Compressor
    max_weight: float = MAX_WEIGHT
    """The most that one peer's values may count; those that claim more do not count at all."""

    def mix(self, values: torch.Tensor, weight: float, layout: Layout, round: int, memory: Memory) -> Mixing[Mixed]:
        encoded = self.compressor.encode(values, layout, round)
        gathered = yield Gather(struct.pack("<d", weight) + encoded if weight else None)
        assert isinstance(gathered, Gathered)
        told = {peer: _told(gathered.blocks[peer], self.compressor, layout) for peer in sorted(gathered.blocks)}
        said = {peer: (weight, block) for peer, (weight, block) in told.items() if 0 < weight <= self.max_weight}
        total = math.fsum(weight for weight, _ in said.values())
        mean = self.compressor.combine([(block, weight / total) for weight, block in said.values()], layout, round)
        own = self.compressor.decode(encoded, layout, round) if weight else torch.zeros_like(values)
        return Mixed(mean=mean, own=own, members=tuple(said), share=weight / total if total else 0.0)


def _told(block: memoryview, compressor: Compressor, layout: Layout) -> tuple[float, bytes]:
    """A peer's weight and its encoded values. The weight is 0 if they cannot be used: everybody finds that alike."""
    if len(block) < struct.calcsize("<d"):
        return 0.0, b""
    (weight,) = struct.unpack_from("<d", block)
    encoded = bytes(block[struct.calcsize("<d") :])
    if not 0 < weight <= MAX_WEIGHT or not compressor.is_sound(encoded, layout):
        return 0.0, b""
    return weight, encoded

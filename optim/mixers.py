"""How the peers' values become one."""

from __future__ import annotations

import math
import statistics
import struct
from typing import get_args

import attrs
import torch
from attrs.validators import in_

from optim.compressors import Compressor
from optim.exact import tree_sum
from optim.slots import AllReduce, Exchange, Gather, Layout, Memory, Mixed, Mixing
from protocol.collective import Exchanged, Gathered, Reduced, Window
from protocol.errors import ProtocolError
from protocol.pairs import Pairing
from protocol.plan import MAX_WEIGHT


@attrs.frozen
class RingMean:
    """The collective's own weighted mean, in the run's number format on the wire.

    With a window it is that of those who are ready in time; who is late takes part in the next exchange.
    """

    window: Window | None = None

    def mix(self, values: torch.Tensor, weight: float, layout: Layout, round: int, memory: Memory) -> Mixing[Mixed]:
        reduced = yield AllReduce(values, weight, self.window)
        assert isinstance(reduced, Reduced)
        for one in (*reduced.missed, reduced):
            if one.mean.shape != values.shape:
                raise ProtocolError(f"the swarm's mean has shape {list(one.mean.shape)}, not {list(values.shape)}")
        missed = tuple(
            Mixed(mean=one.mean, own=torch.zeros_like(values), members=one.contributors, share=0.0)
            for one in reduced.missed
        )
        share = share_of(reduced, weight)
        return Mixed(mean=reduced.mean, own=values, members=reduced.contributors, share=share, missed=missed)


@attrs.frozen
class Pairs:
    """The plain mean with one other peer, another one each time; the odd one out, or who loses its partner, is alone.

    Either drawn anew, or one after the other on a graph: see `protocol.pairs`.
    """

    pairing: Pairing = attrs.field(default="random", validator=in_(get_args(Pairing)))

    def mix(self, values: torch.Tensor, weight: float, layout: Layout, round: int, memory: Memory) -> Mixing[Mixed]:
        swapped = yield Exchange(values, weight, self.pairing)
        assert isinstance(swapped, Exchanged)
        theirs, alone = swapped.values, Mixed(mean=values, own=values, members=(), share=1.0 if weight else 0.0)
        if theirs is None or swapped.partner is None:
            return alone
        if theirs.shape != values.shape:
            raise ProtocolError(f"{swapped.partner.short} sent {len(theirs)} values, not {len(values)}")
        if swapped.weight == 0:
            return alone
        if weight == 0:  # ours are no good
            return Mixed(mean=theirs, own=values, members=(swapped.partner,), share=0.0)
        ours = values if swapped.ours is None else swapped.ours  # both take the same two
        return Mixed(mean=torch.add(ours, theirs).mul_(0.5), own=ours, members=(swapped.partner,), share=0.5)


@attrs.frozen
class GatheredMean:
    """Everybody gets everybody's values in compressed form, and sums what they mean, in the order of the peer ids.

    `capped` makes nobody's values longer than the median of all peers': ‖δᵢ‖ ← min(‖δᵢ‖, median).
    """

    compressor: Compressor
    capped: bool = False
    max_weight: float = MAX_WEIGHT
    """The most that one peer's values may count; those that claim more do not count at all."""

    def mix(self, values: torch.Tensor, weight: float, layout: Layout, round: int, memory: Memory) -> Mixing[Mixed]:
        encoded = self.compressor.encode(values, layout, round)
        gathered = yield Gather(struct.pack("<d", weight) + encoded if weight else None)
        assert isinstance(gathered, Gathered)
        told = {peer: _told(gathered.blocks[peer], self.compressor, layout) for peer in sorted(gathered.blocks)}
        said = {peer: (weight, block) for peer, (weight, block) in told.items() if 0 < weight <= self.max_weight}
        total = math.fsum(weight for weight, _ in said.values())
        factors = self._caps([block for _, block in said.values()], layout, round)
        shares = [weight / total * factor for (weight, _), factor in zip(said.values(), factors, strict=True)]
        blocks = [block for _, block in said.values()]
        mean = self.compressor.combine(list(zip(blocks, shares, strict=True)), layout, round)
        own = self.compressor.decode(encoded, layout, round) if weight else torch.zeros_like(values)
        share = weight / total if total and gathered.counted else 0.0
        return Mixed(mean=mean, own=own, members=tuple(said), share=share)

    def _caps(self, blocks: list[bytes], layout: Layout, round: int) -> list[float]:
        """By what factor each message counts less than its weight. The same bits on every processor."""
        if not self.capped or not blocks:
            return [1.0] * len(blocks)
        values = [self.compressor.decode(block, layout, round) for block in blocks]
        lengths = [math.sqrt(float(tree_sum(one.mul_(one)))) for one in values]
        median = statistics.median(lengths)
        return [min(1.0, median / length) if length else 1.0 for length in lengths]


def share_of(reduced: Reduced, weight: float) -> float:
    """Our share of a mean; 0 if it was made without us."""
    # Where most of it was salvaged, it may have us, and its weight not.
    return min(1.0, weight / reduced.weight) if reduced.weight and reduced.counted else 0.0


def _told(block: memoryview, compressor: Compressor, layout: Layout) -> tuple[float, bytes]:
    """A peer's weight and its encoded values. The weight is 0 if they cannot be used: everybody finds that alike."""
    if len(block) < struct.calcsize("<d"):
        return 0.0, b""
    (weight,) = struct.unpack_from("<d", block)
    encoded = bytes(block[struct.calcsize("<d") :])
    if not 0 < weight <= MAX_WEIGHT or not compressor.is_sound(encoded, layout):
        return 0.0, b""
    return weight, encoded

"""Reducing encoded values, without any input or output: every member sends to the owner of each block, and back.

A sum of encoded values that is passed on would have to be encoded at each hop, with a new error each time. So here the
vector is cut into one block per member, which owns it. Each member sends its encoded values of a block to the owner;
the owner decodes them, sums them in fp32 in the order of the members, encodes the sum once, and sends these bytes to
all. Everybody, the owner included, takes for the result what these bytes mean. That is as many bytes as around a ring.

What a member contributes was encoded before the attempt, for all attempts alike (see `codecs.ErrorFeedback`); what the
owner encodes is rounded stochastically, with a seed that the plan and the place in the vector decide. Blocks and their
pieces begin at multiples of the codec's block. Parts that an earlier attempt has reduced belong to no block: whoever
lacks one gets its fp32 bits from the nearest member to the left that holds it.

With the codec `fp32` nothing is lost on the way, and the two hops are fewer than around a ring of three and more.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping

import torch

from protocol.codecs import Codec, NotFinite, make_codec
from protocol.errors import ProtocolError
from protocol.identity import PeerId
from protocol.plan import Plan
from protocol.reduction import Reduction, Segment, free_parts, own_blocks, pieces, window
from protocol.salvage import Bounds
from protocol.vectors import VectorPool, all_finite

PIECE = 1 << 18
"""Elements of a segment, at most; a multiple of every codec's block. Seeds depend on it."""

_MOST = torch.finfo(torch.float32).max

_NOTHING = Segment(0, 0, False)


class Direct(Reduction):
    """One member's part in one attempt.

    Args:
        plan: The plan that was accepted.
        place: Our place in it.
        encoded: Our values, encoded from the first to the last; not looked at if our share is 0. With the codec `fp32`
            they may be the values' own bytes (see `vector_bytes`), which do not change then.
        previous: See `Reduction`.
        memory: See `Reduction`.
        piece: Most elements of a segment.
    """

    def __init__(
        self,
        plan: Plan,
        place: int,
        encoded: bytes | bytearray | memoryview,
        *,
        previous: Reduction | None = None,
        memory: VectorPool | None = None,
        piece: int = PIECE,
    ) -> None:
        super().__init__(plan, place, previous, memory or VectorPool())
        size = len(plan.members)
        self.sources = self.sinks = tuple((place + distance) % size for distance in range(1, size))
        self._codec, self._id, self._shares = make_codec(plan.codec), plan.id, plan.shares
        self._encoded = memoryview(encoded)
        blocks = _blocks(plan, piece)
        self._own = blocks[place]
        self._outgoing = {sink: _segments(plan, blocks, place, sink) for sink in self.sinks}
        self._incoming = {source: _segments(plan, blocks, source, place) for source in self.sources}
        self._given = {sink: sum(segment.add for segment in segments) for sink, segments in self._outgoing.items()}
        self._next = dict.fromkeys(self.sources, 0)
        self._arriving: dict[int, bytearray] = {}  # by who sends it
        self._contributions: dict[int, dict[int, bytearray]] = {start: {} for start, _ in self._own}  # by place
        self._sums: dict[int, bytearray] = {}  # our own block's, encoded, by where they start
        self._contributors = [source for source in self.sources if self._shares[source]]
        if not self._contributors:
            for start, stop in self._own:
                self._sum(start, stop)

    @property
    def complete(self) -> bool:
        everything = all(self._next[source] == len(self._incoming[source]) for source in self.sources)
        return everything and len(self._sums) == len(self._own)

    def outgoing(self, sink: int) -> int:
        return len(self._outgoing[sink])

    def incoming(self, source: int) -> int:
        return len(self._incoming[source])

    def sendable(self, sink: int) -> int:
        # Everybody's contributions come in order, so sums become complete in order, too.
        if len(self._sums) == len(self._own):
            return len(self._outgoing[sink])
        return self._given[sink] + len(self._sums)

    def segment(self, sink: int, number: int) -> memoryview:
        segment = self._outgoing[sink][number]
        if segment.source is not None:
            return self._bytes[4 * segment.start : 4 * segment.stop]
        if segment.add:
            return self._slice(segment.start, segment.stop)
        return memoryview(self._sums[segment.start] if segment != _NOTHING else b"")

    def target(self, source: int) -> memoryview:
        segment = self._incoming[source][self._next[source]]
        if segment.source is not None:
            return self._bytes[4 * segment.start : 4 * segment.stop]
        arriving = self._arriving[source] = bytearray(self._codec.encoded_size(segment.stop - segment.start))
        return memoryview(arriving)

    def filled(self, source: int) -> None:
        segment = self._incoming[source][self._next[source]]
        values = self._buffer[segment.start : segment.stop]
        if segment.source is not None:
            if not all_finite(values):
                raise ProtocolError("values that were salvaged are not finite")
            self._hold(segment.start, segment.stop, segment.source)
        elif segment.add:
            data = self._arriving.pop(source)
            self._codec.check(data, len(values))
            contributions = self._contributions[segment.start]
            contributions[source] = data
            if len(contributions) == len(self._contributors):
                self._sum(segment.start, segment.stop)
        elif segment != _NOTHING:
            self._codec.decode(self._arriving.pop(source), values)
            self._hold(segment.start, segment.stop)
        self._next[source] += 1
        self.received += 1

    def _sum(self, start: int, stop: int) -> None:
        values, contributions = self._buffer[start:stop], self._contributions.pop(start)
        if self._shares[self._place]:
            contributions[self._place] = bytearray(self._slice(start, stop))
        self._sums[start] = _sum(self._codec, self._id, self._shares, contributions, start, values)
        self._hold(start, stop)

    def _slice(self, start: int, stop: int) -> memoryview:
        return self._encoded[self._codec.encoded_size(start) : self._codec.encoded_size(stop)]


def _blocks(plan: Plan, piece: int) -> list[list[Bounds]]:
    """Each member's own block, in pieces."""
    free = tuple(free_parts(plan))
    return [list(pieces(window(free, *bounds), piece)) for bounds in own_blocks(plan)]


def _segments(plan: Plan, blocks: list[list[Bounds]], source: int, sink: int) -> list[Segment]:
    """What one member sends to another, if need be nothing: whoever has got all knows that all others have begun."""
    return list(_sends(plan, blocks, source, sink)) or [_NOTHING]


def _sends(plan: Plan, blocks: list[list[Bounds]], source: int, sink: int) -> Iterator[Segment]:
    """What one member sends to another: its values of the other's block, the sums of its own, and what was salvaged."""
    size = len(plan.members)
    if plan.shares[source]:
        for start, stop in blocks[sink]:
            yield Segment(start, stop, True)
    for start, stop in blocks[source]:
        yield Segment(start, stop, False)
    for part in plan.salvaged:
        if sink in part.holders:
            continue
        nearest = min(part.holders, key=lambda holder: (sink - holder) % size)
        if nearest == source:
            for start, stop in pieces([(part.start, part.stop)], PIECE):
                yield Segment(start, stop, False, part.source)


def _sum(
    codec: Codec,
    plan_id: bytes,
    shares: tuple[float, ...],
    contributions: Mapping[int, bytearray],
    start: int,
    values: torch.Tensor,
) -> bytearray:
    """The encoded sum of a piece that begins at `start`; its meaning goes into `values`.

    A single member has nobody to send it to, and leaves the sum as it is.
    """
    values.zero_()
    for place in sorted(contributions):
        codec.add(contributions[place], values, shares[place])
    if len(shares) == 1:
        return bytearray()
    encoded = bytearray(codec.encoded_size(len(values)))
    seed = int.from_bytes(hashlib.sha256(plan_id + struct.pack(">Q", start)).digest()[:16])
    try:
        codec.encode(values, encoded, seed=seed)
    except NotFinite:  # finite values at the end of the range, of which shares that were rounded up make too much
        codec.encode(values.clamp_(-_MOST, _MOST), encoded, seed=seed)
    codec.decode(encoded, values)
    return encoded


def reference_direct(
    plan: Plan, inputs: Mapping[PeerId, torch.Tensor], mean: torch.Tensor, *, piece: int = PIECE
) -> None:
    """Computes what is not salvaged of `mean` as the members do, if none of them has left out anything so far."""
    codec = make_codec(plan.codec)
    encoded: dict[int, bytearray] = {}
    for place, peer in enumerate(plan.members):
        if plan.shares[place]:
            encoded[place] = bytearray(codec.encoded_size(plan.length))
            codec.encode(inputs[peer], encoded[place])
    for start, stop in (bounds for block in _blocks(plan, piece) for bounds in block):
        part = slice(codec.encoded_size(start), codec.encoded_size(stop))
        _sum(codec, plan.id, plan.shares, {p: e[part] for p, e in encoded.items()}, start, mean[start:stop])

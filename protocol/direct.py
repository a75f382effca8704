"""Reducing encoded values, without any input or output: every member sends to the owner of each block, and back.

A sum of encoded values that is passed on would have to be encoded at each hop, with a new error each time. So here the
vector is cut into one block per member, which owns it. Each member sends its encoded values of a block to the owner;
the owner decodes them, sums them in fp32 in the order of the members, encodes the sum once, and sends these bytes to
all. Everybody, the owner included, takes for the result what these bytes mean. That is as many bytes as around a ring.

What a member contributes was encoded before the attempt, for all attempts alike (see `codecs.ErrorFeedback`); what the
owner encodes is rounded stochastically, with a seed that the plan and the place in the vector decide. Blocks and their
pieces begin at multiples of the codec's block. Parts that an earlier attempt has reduced belong to no block: whoever
lacks one gets its fp32 bits from the nearest member to the left that holds it.

With the codec `fp32` nothing is lost on the way, and the two hops are fewer than around a ring of three and more. A
member that owns no block only sends its values and gets the result, which is the least that can be.
"""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict
from collections.abc import Mapping
from typing import TypeAlias

import torch

from protocol.codecs import Codec, NotFinite, make_codec
from protocol.errors import ProtocolError
from protocol.identity import PeerId
from protocol.plan import Plan
from protocol.reduction import Reduction, Segment, pieces, placed_blocks
from protocol.salvage import Bounds, nearest_holder
from protocol.vectors import VectorPool, all_finite, cut, vector_bytes

LARGEST_PIECE = 1 << 20
"""Elements of a segment, at most. Each takes some 300 calls on both sides together, whatever it holds."""

SMALLEST_PIECE = 1 << 14
"""Elements of a segment, if there are as many; a multiple of every codec's block."""

_PIECES = 8  # of a block, if they are not too small: sums are under way while other contributions still come in

_MORE = 32  # times as many, of blocks that are unequal: a sum leaves when its last values have come from a slow line

_AT_ONCE = 1 << 18
"""Elements that are summed and encoded together: they stay in the cache meanwhile. Seeds depend on it."""

_NOTHING = Segment(0, 0, False)

_ByPlace: TypeAlias = dict[int, list[Segment]]

_ONLY_SUMS = 1 << 32  # more than there are segments


def piece_of(plan: Plan) -> int:
    """Most elements of a segment. Sums are rounded differently in other pieces, but the plan alone decides."""
    # Where lines differ, somebody's is slow, and what a segment costs matters less than how long it takes.
    count = len(plan.members) * _PIECES * (_MORE if plan.blocks else 1)
    piece = min(max(plan.length // count, SMALLEST_PIECE), LARGEST_PIECE)
    return piece // SMALLEST_PIECE * SMALLEST_PIECE


class Direct(Reduction):
    """One member's part in one attempt.

    Args:
        plan: The plan that was accepted.
        place: Our place in it.
        encoded: Our values, encoded from the first to the last; not looked at if our share is 0. With the codec `fp32`
            they may be the values' own bytes (see `vector_bytes`), which do not change then.
        previous: See `Reduction`.
        memory: See `Reduction`.
        piece: Most elements of a segment; by default as the plan's length suggests.
    """

    def __init__(
        self,
        plan: Plan,
        place: int,
        encoded: bytes | bytearray | memoryview,
        *,
        previous: Reduction | None = None,
        memory: VectorPool | None = None,
        piece: int | None = None,
    ) -> None:
        pool = memory or VectorPool()
        super().__init__(plan, place, previous, pool)
        size = len(plan.members)
        others = [(place + distance) % size for distance in range(1, size)]
        self._codec, self._id, self._shares = make_codec(plan.codec), plan.id, plan.shares
        piece = piece_of(plan) if piece is None else piece
        self._encoded, self._piece = memoryview(encoded), min(piece, plan.length)
        blocks = _blocks(plan, piece)
        self._own = blocks[place]
        given, brought = _salvaged(plan, place, piece)
        gives = [share > 0 for share in self._shares]
        outgoing = {sink: _segments(gives[place], blocks, place, sink, given[sink]) for sink in others}
        incoming = {source: _segments(gives[source], blocks, source, place, brought[source]) for source in others}
        self._outgoing = {sink: segments for sink, segments in outgoing.items() if segments}
        self._incoming = {source: segments for source, segments in incoming.items() if segments}
        self.sinks, self.sources = tuple(self._outgoing), tuple(self._incoming)
        self._given = {sink: sum(segment.add for segment in segments) for sink, segments in self._outgoing.items()}
        self._brought = {source: sum(segment.add for segment in self._incoming[source]) for source in self.sources}
        self._next = dict.fromkeys(self.sources, 0)
        self._arriving: dict[int, memoryview] = {}  # by who sends it; may be longer
        self._contributions: dict[int, dict[int, memoryview]] = {start: {} for start, _ in self._own}  # by place
        self._spare: list[memoryview] = []  # for what arrives
        self._scratch = torch.empty(min(self._piece, _AT_ONCE))
        self._sums: dict[int, memoryview] = {}  # our own block's, encoded, by where they start
        self._unused = self._memory_of_sums(pool)
        self._contributors = [source for source in self.sources if self._shares[source]]
        if not self._contributors:
            for start, stop in self._own:
                self._sum(start, stop)

    @property
    def complete(self) -> bool:
        everything = all(self._next[source] == len(self._incoming[source]) for source in self.sources)
        return everything and len(self._sums) == len(self._own)

    @property
    def gap(self) -> int:
        # Who is slow sends to everybody at the same time.
        return 2 * len(self.plan.members) * self._piece + self._salvaged

    @property
    def bytes_out(self) -> int:
        return sum(self._size(segment) for segments in self._outgoing.values() for segment in segments)

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
        return self._sums[segment.start] if segment != _NOTHING else memoryview(b"")

    def target(self, source: int) -> memoryview:
        segment = self._incoming[source][self._next[source]]
        if segment.source is not None:
            return self._bytes[4 * segment.start : 4 * segment.stop]
        if not self._spare:
            self._spare.append(memoryview(bytearray(self._codec.encoded_size(self._piece))))
        arriving = self._arriving[source] = self._spare.pop()
        return arriving[: self._codec.encoded_size(segment.stop - segment.start)]

    def release(self) -> None:
        self._encoded = self._unused = memoryview(b"")
        for waiting in (self._arriving, self._contributions, self._spare, self._sums):
            waiting.clear()

    def slowest(self, source: int) -> int:
        if self._next[source] >= self._brought[source]:
            return self.incoming(source)
        return min(self._next[other] for other in self._contributors)

    @property
    def standing(self) -> int:
        # Whoever lacks values knows whose; whoever lacks sums only cannot tell why.
        return self.received if self._owing() else _ONLY_SUMS + self.received

    def suspect(self, source: int) -> int:
        # The owner of a block that waits for a sum may wait for the same values as we do.
        owing = self._owing()
        return source if not owing or source in owing else owing[0]

    def late(self) -> int | None:
        late = self._owing() or [source for source in self.sources if self._next[source] < len(self._incoming[source])]
        if not late or 1 < len(late) == len(self.sources):
            return None
        return min(late, key=lambda source: self._next[source] / len(self._incoming[source]))

    def _owing(self) -> list[int]:
        """Whose values of our own block have not all come in."""
        return [source for source in self.sources if self._next[source] < self._brought[source]]

    def filled(self, source: int) -> None:
        segment = self._incoming[source][self._next[source]]
        values = self._buffer[segment.start : segment.stop]
        size = self._codec.encoded_size(len(values))
        if segment.source is not None:
            if not all_finite(values):
                raise ProtocolError("values that were salvaged are not finite")
            self._hold(segment.start, segment.stop, segment.source)
        elif segment.add:
            data = self._arriving.pop(source)
            self._codec.check(data[:size], len(values))
            contributions = self._contributions[segment.start]
            contributions[source] = data
            if len(contributions) == len(self._contributors):
                self._sum(segment.start, segment.stop)
        else:
            data = self._arriving.pop(source)
            self._codec.decode(data[:size], values)
            self._spare.append(data)
            if segment != _NOTHING:
                self._hold(segment.start, segment.stop)
        self._next[source] += 1
        self.received += 1

    def _sum(self, start: int, stop: int) -> None:
        values, contributions = self._buffer[start:stop], self._contributions.pop(start)
        self._spare += contributions.values()
        if self._shares[self._place]:
            contributions[self._place] = self._slice(start, stop)
        size = self._codec.encoded_size(stop - start) if self.sinks else 0
        sums, self._unused = self._unused[:size], self._unused[size:]
        _sum(self._codec, self._id, self._shares, contributions, start, values, sums, self._scratch)
        self._sums[start] = sums
        self._hold(start, stop)

    def _size(self, segment: Segment) -> int:
        """Its bytes."""
        length = segment.stop - segment.start
        return self._codec.encoded_size(length) if segment.source is None else 4 * length

    def _memory_of_sums(self, pool: VectorPool) -> memoryview:
        size = sum(self._codec.encoded_size(stop - start) for start, stop in self._own) if self.sinks else 0
        return vector_bytes(pool.take(-(-size // 4)))[:size]

    def _slice(self, start: int, stop: int) -> memoryview:
        return self._encoded[self._codec.encoded_size(start) : self._codec.encoded_size(stop)]


def _blocks(plan: Plan, piece: int) -> list[list[Bounds]]:
    """Each member's own block, in pieces."""
    return [list(pieces(block, piece)) for block in placed_blocks(plan)]


def _segments(
    gives: bool, blocks: list[list[Bounds]], source: int, sink: int, salvaged: list[Segment]
) -> list[Segment]:
    """What one member sends to another: its values of the other's block, the sums of its own, and what was salvaged.

    Whoever has got all knows that all others have begun: there is a sum among it, and their values are in that. So only
    those without values send to all, if need be nothing.
    """
    values = [Segment(start, stop, True) for start, stop in blocks[sink]] if gives else []
    segments = [*values, *(Segment(start, stop, False) for start, stop in blocks[source]), *salvaged]
    return segments or ([] if gives else [_NOTHING])


def _salvaged(plan: Plan, place: int, piece: int) -> tuple[_ByPlace, _ByPlace]:
    """What was salvaged, and one member sends to others, and others send to it: each part comes from the left."""
    size = len(plan.members)
    given, brought = defaultdict[int, list[Segment]](list), defaultdict[int, list[Segment]](list)
    for part in plan.salvaged:
        bounds = pieces([(part.start, part.stop)], piece)
        segments = [Segment(start, stop, False, part.source) for start, stop in bounds]
        nearest = nearest_holder(part, place)
        if nearest != place:
            brought[nearest] += segments
            continue
        following = part.holders[(part.holders.index(place) + 1) % len(part.holders)]
        for distance in range(1, (following - place) % size or size):
            given[(place + distance) % size] += segments
    return given, brought


def _sum(
    codec: Codec,
    plan_id: bytes,
    shares: tuple[float, ...],
    contributions: Mapping[int, memoryview],
    start: int,
    values: torch.Tensor,
    sums: memoryview,
    scratch: torch.Tensor,
) -> None:
    """Sums a piece that begins at `start`: the encoded sum goes into `sums`, and its meaning into `values`.

    A single member has nobody to send it to, and leaves the sum as it is.
    """
    for first, end in pieces([(0, len(values))], _AT_ONCE):
        part = slice(codec.encoded_size(first), codec.encoded_size(end))
        total, meaning = scratch[: end - first], values[first:end]
        for number, place in enumerate(sorted(contributions)):
            codec.add(contributions[place][part], total, shares[place], first=not number)
        if not contributions:
            total.zero_()
        if len(shares) == 1:
            meaning.copy_(total)
            continue
        seed = int.from_bytes(hashlib.sha256(plan_id + struct.pack(">Q", start + first)).digest()[:16])
        try:
            codec.encode(total, sums[part], seed=seed, meaning=meaning)
        except NotFinite:
            codec.encode(cut(total), sums[part], seed=seed, meaning=meaning)


def reference_direct(
    plan: Plan, inputs: Mapping[PeerId, torch.Tensor], mean: torch.Tensor, *, piece: int | None = None
) -> None:
    """Computes what is not salvaged of `mean` as the members do, if none of them has left out anything so far."""
    codec, scratch = make_codec(plan.codec), torch.empty(min(plan.length, _AT_ONCE))
    piece, shares = piece_of(plan) if piece is None else piece, plan.shares
    encoded: dict[int, memoryview] = {}
    for place, peer in enumerate(plan.members):
        if shares[place]:
            encoded[place] = memoryview(bytearray(codec.encoded_size(plan.length)))
            codec.encode(inputs[peer], encoded[place])
    for start, stop in (bounds for block in _blocks(plan, piece) for bounds in block):
        part = slice(codec.encoded_size(start), codec.encoded_size(stop))
        contributions = {place: data[part] for place, data in encoded.items()}
        sums = memoryview(bytearray(part.stop - part.start))
        _sum(codec, plan.id, shares, contributions, start, mean[start:stop], sums, scratch)

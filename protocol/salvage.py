"""What an attempt that failed leaves behind: parts of the vector that are reduced already. Without input or output.

The reduced bytes of an element are made once for each plan, along one chain of members. So whoever holds them under the
id of the same plan holds the same bits, and a later plan can say that they stay: its members then have the same
contributors for each part, though not for all parts the same.

A plan of several members takes over all but one element at most. That one is summed by everybody, so nobody can
complete the plan unless all of its members have accepted it, which `protocol.ballots` builds on.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, TypeAlias

import attrs
from msgspec import Meta

from protocol.identity import PeerId
from protocol.plan import MAX_SALVAGED, MAX_WEIGHT, Length, Plan, Salvaged, Source

MAX_SPANS = 256
"""Most parts that a member says it holds of one plan. There is about one for each member."""

MAX_HOLDINGS = 16
"""Most plans of which a member says what it holds of them: one for each failed attempt."""

_MAX_TOLD = 1 << 18  # bytes of a plan for what it takes over: it has to fit into a message, whatever members say

Bounds: TypeAlias = tuple[int, int]
_Part: TypeAlias = tuple[int, int, bytes, tuple[int, ...]]  # start, stop, source, holders
_Event: TypeAlias = tuple[bool, bytes, int]  # begins or ends, source, place


@attrs.frozen
class Span:
    """Elements [start, stop)."""

    start: Length
    stop: Length


@attrs.frozen
class Holding:
    """What a member holds of what one plan has reduced."""

    source: Source
    spans: Annotated[tuple[Span, ...], Meta(max_length=MAX_SPANS)]


def nearest_holder(part: Salvaged, place: int) -> int:
    """The member that holds a part and is nearest to the left of a place, or at it."""
    return part.holders[bisect_right(part.holders, place) - 1]  # before the first one comes the last one


def merged(bounds: Iterable[Bounds]) -> tuple[Span, ...]:
    """The same elements in as few spans as possible, in order; of more than `MAX_SPANS` of them the longest."""
    spans: list[Bounds] = []
    for start, stop in sorted(bounds):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], stop)
        else:
            spans.append((start, stop))
    spans.sort(key=lambda bounds: bounds[0] - bounds[1])
    return tuple(Span(start, stop) for start, stop in sorted(spans[:MAX_SPANS]))


def missing(plan: Plan, place: int, holdings: Iterable[Holding]) -> bool:
    """Whether a plan says of the member at a place that it holds what it does not."""
    held = {holding.source.plan: holding for holding in holdings}
    for part in plan.salvaged:
        if place not in part.holders:
            continue
        holding = held.get(plan.sources[part.source].plan)
        if holding is None or holding.source != plan.sources[part.source]:
            return True
        if not any(span.start <= part.start and part.stop <= span.stop for span in holding.spans):
            return True
    return False


def salvage(
    members: Sequence[PeerId],
    holdings: Mapping[PeerId, Collection[Holding]],
    length: int,
    max_weight: float = MAX_WEIGHT,
    block: int = 1,
) -> tuple[tuple[Source, ...], tuple[Salvaged, ...]]:
    """What a plan of these members can take over: of each element, the bytes that most of them hold.

    Less than all, if there are several members, and of very much the largest parts.

    Args:
        members: In the order of the plan.
        holdings: What they say they hold; unknown members count as holding nothing.
        length: Elements of the vector.
        max_weight: A source in which anybody's values count more is not believed.
        block: Elements that are encoded together: of a part, only whole blocks are taken.

    Returns:
        `Plan.sources` and `Plan.salvaged`.
    """
    sources: dict[bytes, Source] = {}
    events: dict[int, list[_Event]] = defaultdict(list)  # by position
    for place, peer in enumerate(members):
        for holding in holdings.get(peer, ()):
            source = sources.setdefault(holding.source.plan, holding.source)
            if source != holding.source or max(source.weights) > max_weight:
                continue  # somebody lies: of two stories about one plan, the first is believed
            for span in holding.spans:
                start, stop = -(-span.start // block) * block, span.stop
                if stop != length:
                    stop -= stop % block
                if start < stop <= length:
                    events[start].append((True, source.plan, place))
                    events[stop].append((False, source.plan, place))
    parts = sorted(_affordable(_parts(events), sources))
    if parts and len(members) > 1 and sum(stop - start for start, stop, _, _ in parts) == length:
        start, _, plan_id, holders = parts.pop()
        stop = (length - 1) // block * block
        parts += [(start, stop, plan_id, holders)] if start < stop else []
    used = sorted({source for _, _, source, _ in parts})
    return tuple(sources[source] for source in used), tuple(
        Salvaged(start, stop, used.index(source), holders) for start, stop, source, holders in parts
    )


def _affordable(parts: Iterable[_Part], sources: Mapping[bytes, Source]) -> Iterator[_Part]:
    """The largest parts, as many as a plan can name."""
    room, used = _MAX_TOLD, set[bytes]()
    for part in sorted(parts, key=lambda part: part[0] - part[1])[:MAX_SALVAGED]:
        _, _, source, holders = part
        room -= 25 + 3 * len(holders)  # the longest that each of these is in a message
        room -= 0 if source in used else 40 + 43 * len(sources[source].members)
        if room < 0:
            return
        used.add(source)
        yield part


def _parts(events: Mapping[int, list[_Event]]) -> list[_Part]:
    """What somebody holds, in order."""
    parts: list[_Part] = []
    holders: dict[bytes, Counter[int]] = defaultdict(Counter)  # how often each counts itself
    ranking: list[tuple[int, bytes]] = []  # a heap: sources with most holders first, and what they once had
    position = 0
    for at in sorted(events):
        while ranking and -ranking[0][0] != len(holders[ranking[0][1]]):
            heapq.heappop(ranking)
        if ranking:
            best = ranking[0][1]
            places = tuple(sorted(holders[best]))
            if parts and parts[-1][1:] == (position, best, places):
                position = parts.pop()[0]
            parts.append((position, at, best, places))
        for begins, source, place in events[at]:
            counts = holders[source]
            counts[place] += 1 if begins else -1
            if not counts[place]:
                del counts[place]
            if counts:
                heapq.heappush(ranking, (-len(counts), source))
        position = at
    return parts

"""What an attempt that failed leaves behind: parts of the vector that are reduced already. Without input or output.

The reduced bytes of an element are made once for each plan, along one chain of members. So whoever holds them under the
id of the same plan holds the same bits, and a later plan can say that they stay: its members then have the same
contributors for each part, though not for all parts the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, TypeAlias

import attrs
from msgspec import Meta

from protocol.identity import PeerId
from protocol.plan import MAX_SALVAGED, MAX_WEIGHT, Length, Plan, Salvaged, Source

MAX_SPANS = 256
"""Most parts that a member says it holds of one plan. There is about one for each member."""

MAX_HOLDINGS = 16
"""Most plans of which a member says what it holds of them: one for each failed attempt."""

Bounds: TypeAlias = tuple[int, int]


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


def merged(bounds: Iterable[Bounds]) -> tuple[Span, ...]:
    """The same elements in as few spans as possible, in order."""
    spans: list[Bounds] = []
    for start, stop in sorted(bounds):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], stop)
        else:
            spans.append((start, stop))
    return tuple(Span(start, stop) for start, stop in spans)


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
    events: dict[int, list[tuple[bool, bytes, int]]] = defaultdict(list)  # by position: begins or ends, source, place
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
    parts = sorted(_parts(events), key=lambda part: part[0] - part[1])[:MAX_SALVAGED]
    used = sorted({source for _, _, source, _ in parts})
    return tuple(sources[source] for source in used), tuple(
        Salvaged(start, stop, used.index(source), holders) for start, stop, source, holders in sorted(parts)
    )


def _parts(events: Mapping[int, list[tuple[bool, bytes, int]]]) -> list[tuple[int, int, bytes, tuple[int, ...]]]:
    """Start, stop, source and holders of each part, in order."""
    parts: list[tuple[int, int, bytes, tuple[int, ...]]] = []
    holders: dict[bytes, list[int]] = defaultdict(list)  # a member that counts itself twice is there twice
    position = 0
    for at in sorted(events):
        best = min(
            (source for source in holders if holders[source]), key=lambda s: (-len(set(holders[s])), s), default=None
        )
        if best is not None:
            places = tuple(sorted(set(holders[best])))
            if parts and parts[-1][1:] == (position, best, places):
                position = parts.pop()[0]
            parts.append((position, at, best, places))
        for begins, source, place in events[at]:
            if begins:
                holders[source].append(place)
            else:
                holders[source].remove(place)
        position = at
    return parts

"""How a round's data is to travel: the order of the ring, or the way over owners of blocks, and how large these are.

Everything here is a pure function of what the members say about their lines (`protocol.rates`). Whatever they say, a
plan comes out that all can carry out, and in which nobody owns more than `largest_part`. Who lies, or does not know,
makes rounds slower, and gets no more of the data than a line twice as fast as usual would: more has to be confirmed.

The model. Data of V bytes in n blocks takes, around a ring, 2(n-1)/n · V on each hop, and 2(n-1) steps. What comes in
is passed on piece by piece, so the latency of a step shows only if all hops together take longer for the first piece
than the slowest one for all of the blocks. A hop is as fast as the sender's uplink, the receiver's downlink and the way
between them allow, so the order matters where ways differ: peers that reach each other through a relay only get others
between them. By way of the owners it takes two steps, and the owner of the part b of the data moves (1 + (n-2) · b) · V
bytes each way: a slow member should own little. (Hivemind computes that as a linear program. Here it is a search for
the time in which all of V finds an owner.)

What is small costs messages, and nothing else: the coordinator owns it all, so that there are 2(n-1) of them in place
of 2n(n-1). It is another one in each round.

So the owners' way wins where steps take longer than the data, and where members differ. The ring needs fewer streams
and keeps nothing, so it is taken unless it is slower by `MARGIN`; blocks are equal unless that is slower by `UNEQUAL`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from protocol.codecs import block_of, encoded_size
from protocol.identity import PeerId
from protocol.plan import SMALL, Plan, largest_part
from protocol.rates import UNKNOWN, Rates
from protocol.ring import MOST_PIECES, SMALLEST_PIECE

_Floats: TypeAlias = NDArray[np.float64]

TYPICAL = 12.5e6
"""Bytes per second of a line of which nobody knows anything: 100 Mbit/s."""

TYPICAL_RTT = 0.05
"""Seconds of a round trip between peers that do not know each other."""

RELAYED = 1e6
"""Bytes per second between peers that need a relay, until they have measured it: an eighth of what relays pass on."""

STEP = 3e-4
"""Seconds that a step takes beside the line's latency."""

STREAM = 8e-4
"""Seconds that each further stream takes, of the processor mostly: within a machine, the ring is as quick."""

MARGIN = 1.1
"""How much longer the ring may take than the way over owners."""

UNEQUAL = 1.2
"""How much longer equal blocks may take than unequal ones, and those of all than of few: measured rates are not more
certain than that."""

BELIEVED = 2.0
"""Times the usual rate up to which a member's word on its own line is enough."""

_EXACT = 6  # members up to which all orders of the ring are looked at
_LARGEST = 256  # above, the order is left as it is
_MOVES = 200  # by which an order is made better, at most
_BETTER = 0.99  # of the time as it was: else the order is left as it is
_HALVINGS = 40
_SHORTEST_RTT = 1e-5
_NARROW = 0.9  # of what the lines at both ends could do


@attrs.frozen(eq=False)
class Lines:
    """The lines of some members, as far as they know them; see `lines_of`."""

    members: tuple[PeerId, ...]
    rates: _Floats
    """Bytes per second from each place to each other."""
    latencies: _Floats
    """Seconds that a step from each place to each other takes without any data."""
    up: _Floats
    """Bytes per second that each member can send to all others together."""
    down: _Floats

    def reordered(self, order: Sequence[int]) -> Lines:
        """The same with the members at other places."""
        places = np.array(order, dtype=np.intp)
        square = np.ix_(places, places)
        return Lines(
            tuple(self.members[place] for place in order),
            self.rates[square],
            self.latencies[square],
            self.up[places],
            self.down[places],
        )

    def ring_times(self, nbytes: float, orders: Sequence[Sequence[int]]) -> _Floats:
        """Seconds that so many bytes take around a ring, for some orders of the places."""
        here = np.array(orders, dtype=np.intp)
        there, size = np.roll(here, -1, axis=1), here.shape[1]
        if size < 2:
            return np.zeros(len(here))
        blocks, latency = nbytes / size / self.rates[here, there], self.latencies[here, there].sum(axis=1)
        passing = blocks.sum(axis=1) / _pieces(nbytes / size) + latency  # of a piece, all the way round
        round_trip = np.maximum(size * blocks.max(axis=1), passing)
        times: _Floats = 2 * (size - 1) / size * round_trip + latency / size
        return times

    def ring_time(self, nbytes: float) -> float:
        """Seconds that so many bytes take around the ring of the members as they are."""
        return float(self.ring_times(nbytes, [range(len(self.members))])[0])

    def direct_time(self, nbytes: float, parts: _Floats, giving: _Floats) -> float:
        """Seconds that so many bytes take by way of owners.

        Args:
            nbytes: Of the whole vector.
            parts: Which part of it each member owns.
            giving: 1 for those who have values of their own, else 0.
        """
        size = len(parts)
        if size < 2:
            return 0.0
        out = giving * (1 - parts) + (size - 1) * parts
        back = (giving.sum() - giving) * parts + 1 - parts
        between = giving[:, None] * parts[None, :] + parts[:, None]
        np.fill_diagonal(between, 0.0)
        busiest = max((out / self.up).max(), (back / self.down).max(), (between / self.rates).max())
        streams = np.count_nonzero(between) / size  # of one member, on average
        return float(nbytes * busiest + 2 * self.latencies.max() + (streams - 1) * STREAM)

    def parts(self, owners: NDArray[np.bool_], giving: _Floats) -> _Floats:
        """Which part of the data each of the owners should have, so that the one that takes longest is done soonest.

        In a given time, a line carries what its member has to send in any case, and then so much for others. The
        shortest time in which all of the data finds an owner is looked for. There are enough owners (`largest_part`).
        In that time, parts are as alike as they can be: a member sends to all owners at once, and none gets more of its
        line than another.
        """
        size, givers = len(self.members), giving.sum()
        most = largest_part(size)

        def capacity(time: float) -> _Floats:
            # As in `direct_time`: out = giving + (n - 1 - giving) · part, back = 1 + (givers - giving - 1) · part.
            out = (time * self.up - giving) / (size - 1 - giving)
            back = (time * self.down - 1) / np.maximum(givers - giving - 1, 1e-9)
            found: _Floats = np.minimum(out, back).clip(0.0, most) * owners
            return found

        anyway = max((giving / self.up).max(), (1 / self.down).max())  # it takes so long whoever owns what
        low, high = anyway, size / min(self.up.min(), self.down.min())
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if capacity(middle).sum() >= 1 else (middle, high)
        room = capacity(high)
        low, level = 0.0, most
        for _ in range(_HALVINGS):
            middle = (low + level) / 2
            low, level = (low, middle) if np.minimum(room, middle).sum() >= 1 else (middle, level)
        parts: _Floats = np.minimum(room, level) / np.minimum(room, level).sum()
        return parts


def _pieces(nbytes: float) -> float:
    """In how many pieces a block of so many bytes travels around a ring, about."""
    return min(max(nbytes / (4 * SMALLEST_PIECE), 1.0), MOST_PIECES)


def lines_of(members: Sequence[PeerId], said: Mapping[PeerId, Rates]) -> Lines:
    """The lines of members, by what each says about them; who is missing says nothing.

    A line is as fast as the fastest way that begins or ends there. It counts as at most `BELIEVED` times the usual one,
    unless partners of its owner have measured more.
    A way between two counts as slower than their lines if both say so: one alone may have been sharing its line.
    """
    size, reports = len(members), [said.get(peer, UNKNOWN) for peer in members]
    places = {peer: place for place, peer in enumerate(members)}
    heard = [
        (place, places[partner.peer], partner.sent, partner.received, partner.rtt, partner.relayed, partner.carries)
        for place, one in enumerate(reports)
        for partner in one.partners
        if places.get(partner.peer, place) != place
    ]
    told = np.array(heard, dtype=np.float64).reshape(-1, 7)
    pairs = tuple(told[:, :2].astype(np.intp).T)
    sent, received, carries = (np.zeros((size, size)) for _ in range(3))
    rtt, relayed = np.full((size, size), np.inf), np.full((size, size), np.nan)
    sent[pairs], received[pairs], rtt[pairs], relayed[pairs], carries[pairs] = told[:, 2:].T
    up = np.array([one.up for one in reports], dtype=np.float64)
    down = np.array([one.down for one in reports], dtype=np.float64)
    up = np.maximum(up, carries.max(axis=1))
    known = np.concatenate((up, down))
    usual = float(np.median(known[known > 0])) if known.any() else TYPICAL
    up, down = (np.where(one > 0, one, usual) for one in (up, down))
    # What others say of somebody's line is not believed without bound.
    down = np.maximum(down, np.minimum(carries.max(axis=0), BELIEVED * np.median(up)))
    up = np.minimum(up, np.maximum(BELIEVED * np.median(up), received.max(axis=0)))
    down = np.minimum(down, np.maximum(BELIEVED * np.median(down), sent.max(axis=0)))
    rtt = np.minimum(rtt, rtt.T) / 1e6
    finite = rtt[np.isfinite(rtt)]
    rtt[np.isinf(rtt)] = np.median(finite) if len(finite) else TYPICAL_RTT
    both = (sent > 0) & (received.T > 0)
    needs_relay = np.fmin(relayed, relayed.T) == 1  # of those who say anything, all
    limit = np.where(both, np.maximum(np.maximum(sent, received.T), carries), np.where(needs_relay, RELAYED, np.inf))
    rates = np.minimum(np.minimum(up[:, None], down[None, :]), limit)
    return Lines(tuple(members), rates, np.maximum(rtt, _SHORTEST_RTT) / 2 + STEP, up, down)


def ring_order(lines: Lines, nbytes: float) -> tuple[int, ...]:
    """The places in the order in which so many bytes go around fastest: as they are if there is none much better."""
    size = len(lines.members)
    usual = tuple(range(size))
    if not 2 < size <= _LARGEST:
        return usual
    if size <= _EXACT:
        orders = [(0, *rest) for rest in itertools.permutations(usual[1:])]  # the first one is the usual one
    else:
        orders = [usual, _short_tour(_costs(lines, nbytes))]
    times = lines.ring_times(nbytes, orders)
    best = int(times.argmin())
    return orders[best] if times[best] < _BETTER * times[0] else usual


def scheduled(plan: Plan, lines: Lines) -> Plan:
    """A plan with the schedule, and the blocks, that reduce what it does not salvage best.

    Args:
        plan: With its members in the order of the ring.
        lines: Theirs, in the same order.
    """
    size, free = len(plan.members), plan.free
    if plan.operation != "reduce" or size < 3 or not free:  # two can only swap halves, whatever their lines
        return plan
    nbytes = encoded_size(plan.codec, free)
    giving = _giving(plan)
    direct = attrs.evolve(plan, schedule="direct", blocks=())
    best, time = plan, _time(plan, lines)
    if plan.schedule == "ring" and MARGIN * (equal := _time(direct, lines)) < time:
        best, time = direct, equal
    least = nbytes * max((giving / lines.up).max(), 1 / lines.down.min()) + 2 * lines.latencies.max()
    if size * free <= SMALL and plan.coordinator in plan.members:
        star = attrs.evolve(direct, blocks=tuple(free * (peer == plan.coordinator) for peer in plan.members))
        if _time(star, lines) < UNEQUAL * time:
            return star
    if UNEQUAL * least >= time:
        return best
    shapes = (_rounded(lines.parts(owners, giving), free, block_of(plan.codec)) for owners in _owners(lines))
    unequal, *narrower = (attrs.evolve(direct, blocks=blocks) for blocks in shapes)
    for fewer in narrower:  # who own more, so that their lines have less to spare
        if UNEQUAL * _time(fewer, lines) < _time(unequal, lines):
            unequal = fewer
    return unequal if UNEQUAL * _time(unequal, lines) < time else best


def estimate(plan: Plan, said: Mapping[PeerId, Rates]) -> float:
    """Seconds that a plan's data takes to be reduced, and to be with everybody, if members' lines do what they say.

    Protocol overhead and the agreement on the plan are not counted, so of the best plan this is a bound.
    """
    return _time(plan, lines_of(plan.members, said))


def _time(plan: Plan, lines: Lines) -> float:
    size, nbytes = len(plan.members), encoded_size(plan.codec, plan.free)
    if plan.schedule == "ring" or not nbytes:
        return lines.ring_time(nbytes)
    parts = np.array(plan.blocks) / plan.free if plan.blocks else np.full(size, 1 / size)
    return lines.direct_time(nbytes, parts, _giving(plan))


def _giving(plan: Plan) -> _Floats:
    """1 for each member whose values count, else 0."""
    return (np.array(plan.shares) > 0).astype(np.float64)


def _owners(lines: Lines) -> Iterator[NDArray[np.bool_]]:
    """Who may own something: all, or those whom most others reach as well as their lines allow, if that is enough."""
    yield np.ones(len(lines.members), dtype=np.bool_)
    narrow = lines.rates < _NARROW * np.minimum(lines.up[:, None], lines.down[None, :])
    count = (narrow | narrow.T).sum(axis=1)
    best = count == count.min()
    if not best.all() and best.sum() * largest_part(len(best)) >= 1:
        yield best


def _rounded(parts: _Floats, free: int, unit: int) -> tuple[int, ...]:
    """Parts as numbers of elements, cut at whole units."""
    units = -(-free // unit)
    ends = [min(round(units * end) * unit, free) for end in itertools.accumulate(parts.tolist())]
    ends[-1] = free
    return tuple(end - start for start, end in itertools.pairwise([0, *ends]))


def _costs(lines: Lines, nbytes: float) -> _Floats:
    """What a hop between two places adds to the time of a ring, whichever way it is gone.

    A way that is slower than the slowest line counts n-fold, since all hops wait for the slowest.
    """
    size, slowest = len(lines.members), min(lines.up.min(), lines.down.min())
    excess = np.maximum(nbytes / lines.rates - nbytes / slowest, 0.0)
    costs = lines.latencies + size * excess
    both: _Floats = np.maximum(costs, costs.T)
    return both


def _short_tour(costs: _Floats) -> tuple[int, ...]:
    """A cheap way round all places: always on to the nearest; then two hops are crossed while that helps (2-opt)."""
    size = len(costs)
    left = costs.copy()
    np.fill_diagonal(left, np.inf)
    left[:, 0] = np.inf
    tour = [0]
    for _ in range(size - 1):
        tour.append(int(left[tour[-1]].argmin()))
        left[:, tour[-1]] = np.inf
    order = np.array(tour)
    between = costs[np.ix_(order, order)]
    for _ in range(_MOVES):
        ahead = np.roll(between, (-1, -1), axis=(0, 1))
        hops = np.append(between.diagonal(1), between[-1, 0])
        # What it costs to go i -> j and i + 1 -> j + 1 in place of i -> i + 1 and j -> j + 1.
        change = np.triu(between + ahead - hops[:, None] - hops[None, :], 1)
        first, second = divmod(int(change.argmin()), size)
        if change[first, second] > -1e-9:
            break
        turned = slice(first + 1, second + 1)
        order[turned] = order[turned][::-1].copy()
        between[turned] = between[turned][::-1].copy()
        between[:, turned] = between[:, turned][:, ::-1].copy()
    return tuple(order.tolist())

"""Simulated time for peers in threads, and which operations with a window it decides."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TypeAlias

import attrs
import torch

from protocol.collective import Window
from protocol.errors import Misfit, RoundAborted, ShoalError
from protocol.identity import PeerId
from protocol.plan import Operation, Plan

Key: TypeAlias = tuple[Operation, str, frozenset[PeerId] | None]
"""What an operation is, its tag, and its group."""


@attrs.define(eq=False)
class Meeting:
    """One operation: who has come to it, with what, and what comes of it."""

    offers: dict[PeerId, torch.Tensor | None] = attrs.field(factory=dict)
    weights: dict[PeerId, float] = attrs.field(factory=dict)
    runners: set[PeerId] = attrs.field(factory=set)
    """Whose time goes on when it is over."""
    plan: Plan | None = None
    mean: torch.Tensor | None = None
    error: RoundAborted | Misfit | None = None

    @property
    def over(self) -> bool:
        """There is a result, or an error."""
        return self.plan is not None or self.error is not None

    def problem(self, peer: PeerId) -> ShoalError:
        """The error for one of those who have come: each raises its own, in a thread of its own."""
        if isinstance(self.error, Misfit):
            return Misfit(str(self.error), tuple(other for other in self.error.peers if other != peer))
        return RoundAborted(str(self.error))


@attrs.define(eq=False)
class Clocks:
    """Where each peer is. Time passes only where somebody says so, and with waiting for others."""

    _times: dict[PeerId, float] = attrs.field(factory=dict)
    _running: set[PeerId] = attrs.field(factory=set)
    _left: dict[PeerId, float] = attrs.field(factory=dict)

    def __getitem__(self, peer: PeerId) -> float:
        return self._times.get(peer, 0.0)

    def begin(self, peers: Collection[PeerId]) -> None:
        """These peers run from now on."""
        self._running = set(peers)
        self._left.clear()

    def advance(self, peer: PeerId, seconds: float) -> None:
        """A peer has done something that takes so long."""
        self._times[peer] = self[peer] + seconds

    def wait(self, peer: PeerId) -> bool:
        """A peer does nothing but wait, from here on; returns whether it ran."""
        ran = peer in self._running
        self._running.discard(peer)
        return ran

    def go_on(self, peer: PeerId, time: float) -> None:
        """What a running peer has waited for is there, since this time."""
        self._times[peer] = max(self[peer], time)
        self._running.add(peer)

    def leave(self, peer: PeerId) -> None:
        """A peer has come to its end."""
        self._running.discard(peer)
        self._left[peer] = self[peer]

    @property
    def soonest(self) -> float:
        """Before this time nobody does anything more that others have to know."""
        return min((self[peer] for peer in self._running), default=math.inf)

    @property
    def last_end(self) -> float:
        """When the last one came to its end, of those who have."""
        return max(self._left.values(), default=-math.inf)


@attrs.frozen(eq=False)
class Arrival:
    """A peer that is ready, since when, and what it brings."""

    time: float
    values: torch.Tensor
    weight: float
    ran: bool


@attrs.define(eq=False)
class Queue:
    """Operations of one tag and group that have a window, one after the other."""

    window: Window
    group: frozenset[PeerId] | None
    arrivals: dict[PeerId, Arrival] = attrs.field(factory=dict)
    results: dict[int, Meeting] = attrs.field(factory=dict)
    """By number, as many as the window says."""
    number: int = 0
    """Of the last operation."""

    def closing(self, present: frozenset[PeerId], clocks: Clocks) -> float:
        """When the next operation begins if nobody else comes; infinity if too few are ready."""
        times = sorted(arrival.time for arrival in self.arrivals.values())
        quorum = self.window.quorum
        closing = times[quorum - 1] + self.window.grace if len(times) >= quorum else math.inf
        if self.complete(present):
            closing = min(closing, max(self.ready, clocks.last_end))
        return closing

    @property
    def ready(self) -> float:
        """When the last of those who wait has come."""
        return max(arrival.time for arrival in self.arrivals.values())

    def complete(self, present: frozenset[PeerId]) -> bool:
        """Nobody else can come."""
        awaited = present if self.group is None else present & self.group
        return bool(self.arrivals) and awaited <= self.arrivals.keys()

    def close(self, time: float) -> Meeting:
        """Begins the next operation with those who have come by this time; the others wait for the one after it."""
        members = {peer: arrival for peer, arrival in self.arrivals.items() if arrival.time <= time}
        for peer in members:
            del self.arrivals[peer]
        meeting = Meeting(
            {peer: arrival.values for peer, arrival in members.items()},
            {peer: arrival.weight for peer, arrival in members.items()},
            {peer for peer, arrival in members.items() if arrival.ran},
        )
        self.number += 1
        self.results[self.number] = meeting
        self.results.pop(self.number - self.window.keep, None)
        return meeting


def next_to_close(
    queues: Mapping[Key, Queue], present: frozenset[PeerId], clocks: Clocks, over: bool
) -> tuple[Key, float] | None:
    """The next operation to which nobody can come any more in time, and when it begins; None if there is none.

    Args:
        queues: All that there are.
        present: The peers that have not come to their end.
        clocks: Where they are.
        over: Whether all operations are to end, whoever may come.
    """
    closing = {key: queue.closing(present, clocks) for key, queue in queues.items() if queue.arrivals}
    if not closing:
        return None
    key = min(closing, key=lambda key: (closing[key], queues[key].ready))
    if math.isinf(closing[key]) and (over or math.isinf(clocks.soonest)):  # too few, and nothing else can happen
        return key, queues[key].ready
    if over or closing[key] < clocks.soonest:
        return key, closing[key]
    return next(((key, time) for key, time in closing.items() if queues[key].complete(present)), None)

"""What a server has been asked for, in the order of arrival. The time is an argument: seconds of any clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping

import attrs

from optim.swarm.messages import Kind, Request
from protocol.errors import Overloaded

Ticket = Hashable
"""Who is waiting for an answer: whatever identifies it to the caller."""


@attrs.frozen(kw_only=True)
class Bounds:
    """What a server keeps and does at a time."""

    requests: int = 256
    size: int = 1 << 30
    """Bytes of all requests that wait."""
    batch: int = 64
    """Samples that are computed at once; a microbatch that has more is computed alone."""


@attrs.frozen(eq=False)
class Arrived:
    """One request that waits."""

    ticket: Ticket
    request: Request
    deadline: float


class Arrivals:
    """A queue with bounds and deadlines."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._waiting: list[Arrived] = []
        self._size = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def samples(self) -> int:
        """Samples of all that wait."""
        return sum(each.request.samples for each in self._waiting)

    def put(self, ticket: Ticket, request: Request, now: float) -> None:
        """Takes in a request.

        Raises:
            Overloaded: There is no room.
        """
        if len(self._waiting) >= self._bounds.requests or self._size + request.size > self._bounds.size:
            raise Overloaded(f"{len(self._waiting)} requests of {self._size} bytes wait already")
        self._waiting.append(Arrived(ticket, request, now + request.patience))
        self._size += request.size

    def take(
        self, now: float, form: Callable[[Request], Hashable | None], most: Mapping[Kind, float] | None = None
    ) -> list[Arrived]:
        """The next batch: the first request that may begin, and those that can be computed together with it.

        Args:
            now: What is late by then is passed over; see `expired`.
            form: What has to be equal for requests that are computed together; None for those that have to wait.
            most: Samples that are computed at once, by kind, where that is less than the bounds say.
        """
        most = most or {}
        batch: list[Arrived] = []
        first, samples = None, 0
        for each in self._waiting:
            request, its_form = each.request, form(each.request)
            if each.deadline < now or its_form is None:
                continue
            limit = min(self._bounds.batch, most.get(request.kind, math.inf))
            if batch and (its_form != first or samples + request.samples > limit):
                continue
            if any(request.number == other.request.number for other in batch):
                continue
            batch.append(each)
            first, samples = its_form, samples + request.samples
        self._remove(batch)
        return batch

    def expired(self, now: float) -> list[Arrived]:
        """Takes out what has waited too long."""
        late = [each for each in self._waiting if each.deadline < now]
        self._remove(late)
        return late

    def withdraw(self, step: int, number: int) -> list[Arrived]:
        """Takes out what was asked about a microbatch."""
        found = [each for each in self._waiting if (each.request.step, each.request.number) == (step, number)]
        self._remove(found)
        return found

    def forget(self, gone: Callable[[Ticket], bool]) -> None:
        """Takes out what nobody waits for any more."""
        self._remove([each for each in self._waiting if gone(each.ticket)])

    def outdated(self, step: int) -> list[Arrived]:
        """Takes out what belongs to an earlier step."""
        old = [each for each in self._waiting if each.request.step < step]
        self._remove(old)
        return old

    def _remove(self, some: list[Arrived]) -> None:
        gone = set(map(id, some))
        self._waiting = [each for each in self._waiting if id(each) not in gone]
        self._size -= sum(each.request.size for each in some)

"""What users are told of a pipeline as a whole: which stages lack servers, how many each has, and how far all are."""

from __future__ import annotations

import attrs
import trio

from peer.events import EventLog
from peer.pipeline.crew import Crew
from protocol.endpoint import Endpoint

EMPTY = 3.0
"""Seconds for which a stage must have been without any server before that is told, or somebody leaves its own stage for
it at once."""

PERIOD = 1.0
"""Seconds between two looks for the status."""


@attrs.frozen(kw_only=True)
class Overview:
    """Tells it as events until cancelled.

    Args:
        crew: Who does what.
        stages: How many the model has.
        steps: Of the run; 0 if it has no end.
        endpoint: Counts bytes.
        events: Where it is told.
    """

    crew: Crew
    stages: int
    steps: int
    endpoint: Endpoint
    events: EventLog

    async def run(self) -> None:
        """Follows the standings."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell_empty)
            nursery.start_soon(self._tell_all)

    @property
    def _empty(self) -> frozenset[int]:
        """Stages that nobody serves."""
        return frozenset(stage for stage in range(self.stages) if not self.crew.servers(stage))

    async def _tell_empty(self) -> None:
        told: frozenset[int] = frozenset()
        while True:
            while self._empty == told:
                await self.crew.changed.wait()
            await trio.sleep(EMPTY)
            if 0 < self.steps <= self.crew.furthest:
                return  # all go
            empty = self._empty
            for stage in sorted(empty - told):
                self.events.emit("stage_empty", stage=stage, step=self.crew.furthest)
            for stage in sorted(told - empty):
                self.events.emit("stage_filled", stage=stage, step=self.crew.furthest)
            told = empty

    async def _tell_all(self) -> None:
        while True:
            own = self.crew.own
            self.events.tell(
                "stages",
                stage=own.stage,
                servers=[len(self.crew.servers(stage)) for stage in range(self.stages)],
                step=self.crew.furthest,
                bytes_sent=self.endpoint.bytes_sent,
                bytes_received=self.endpoint.bytes_received,
            )
            await trio.sleep(PERIOD)

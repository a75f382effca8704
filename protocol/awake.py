"""Notices when this very process was stopped, or its machine suspended, and goes on."""

from __future__ import annotations

import math

import trio

_BEAT = 0.5  # seconds
_LATE = 1.5  # seconds beyond which a beat is not late because of load
_LATELY = 5.0
"""Seconds after which it makes no difference any more."""


class Awake:
    """Whether we were away. `run` must run."""

    def __init__(self) -> None:
        self._since = -math.inf

    @property
    def lately(self) -> bool:
        """We were stopped, and have gone on a moment ago: whom we seem to have lost may be there all the same."""
        return trio.current_time() < self._since + _LATELY

    def woken(self) -> None:
        """We have just gone on."""
        self._since = trio.current_time()

    async def run(self) -> None:
        """Looks at the clock, until cancelled."""
        while True:
            due = trio.current_time() + _BEAT
            await trio.sleep_until(due)
            if trio.current_time() > due + _LATE:
                self.woken()

"""How a daemon that is asked to leave says so to those who need it, before it is cancelled."""

from __future__ import annotations

import attrs
import trio


@attrs.define(eq=False)
class Farewell:
    """Between a daemon and whoever runs it."""

    patience: float = 0.0
    """Seconds that the daemon may go on after it was asked; it says so beforehand, and ends earlier if it can."""
    asked: trio.Event = attrs.field(factory=trio.Event)
    """Set when it is to leave."""

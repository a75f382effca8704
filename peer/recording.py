"""Reading what daemons write: event files (JSON Lines), while they grow and afterwards.

The demo knows its daemons only from these files. They are our own, so anything that is not an event is an error and
not skipped; only the last line of a file may be incomplete, because its writer may have been killed in the middle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import attrs

from protocol.errors import ShoalError


class EventError(ShoalError):
    """A line of an event file is not an event, or an event lacks a field."""


@attrs.frozen
class Event:
    """One line of an event file.

    Args:
        t: When, in Unix seconds.
        peer: Id of the peer that wrote it, or that it is about (`peer_lost`, `banned`).
        kind: What happened: the line's `event`.
        fields: Everything else of the line.
    """

    t: float
    peer: str
    kind: str
    fields: Mapping[str, object]

    @classmethod
    def parse(cls, line: str) -> Event:
        """Reads one line; raises EventError."""
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise EventError(f"not an event: {line[:200]!r} ({error})") from None
        if not isinstance(fields, dict):
            raise EventError(f"not an event: {line[:200]!r}")
        t, peer, kind = fields.pop("t", None), fields.pop("peer", None), fields.pop("event", None)
        if not isinstance(t, int | float) or not isinstance(peer, str) or not isinstance(kind, str):
            raise EventError(f"an event needs t, peer and event: {line[:200]!r}")
        return cls(float(t), peer, kind, fields)

    def number(self, name: str) -> float:
        """A field that is a number (nan where a null stands for one); raises EventError."""
        value = self.fields.get(name, ...)
        if value is None:
            return math.nan
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise EventError(f"event {self.kind} has no number {name}")
        return float(value)

    def integer(self, name: str) -> int:
        """A field that is a whole number; raises EventError."""
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise EventError(f"event {self.kind} has no whole number {name}")
        return value

    def text(self, name: str) -> str:
        """A field that is text; raises EventError."""
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise EventError(f"event {self.kind} has no text {name}")
        return value

    def names(self, name: str) -> tuple[str, ...]:
        """A field that is a list of texts, such as peer ids; raises EventError."""
        value = self.fields.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise EventError(f"event {self.kind} has no list {name}")
        return tuple(value)


@attrs.define
class Recording:
    """The events of one daemon in order, indexed by kind as they come.

    Args:
        name: What the demo calls the daemon, such as "founder".
    """

    name: str
    events: list[Event] = attrs.field(factory=list, init=False)
    committed: dict[int, Event] = attrs.field(factory=dict, init=False)
    """`round_committed` by round."""
    revision: int | None = attrs.field(default=None, init=False)
    """The last revision that the daemon committed or fetched."""
    digest: str | None = attrs.field(default=None, init=False)
    """The digest of that revision."""
    _kinds: dict[str, list[Event]] = attrs.field(factory=dict, init=False)

    def add(self, event: Event) -> None:
        """Takes the next event; raises EventError if one that the demo relies on is incomplete."""
        self.events.append(event)
        self._kinds.setdefault(event.kind, []).append(event)
        if event.kind in ("round_committed", "synced"):
            self.revision, self.digest = event.integer("round"), event.text("digest")
        if event.kind == "round_committed":
            self.committed[event.integer("round")] = event

    def of(self, kind: str) -> list[Event]:
        """All events of a kind, in order."""
        return self._kinds.get(kind, [])

    def last(self, kind: str) -> Event | None:
        """The newest event of a kind."""
        events = self.of(kind)
        return events[-1] if events else None

    @property
    def peer(self) -> str | None:
        """The daemon's peer id, once it has started."""
        started = self.last("started")
        return started.peer if started else None

    @property
    def bytes_sent(self) -> float:
        """Bytes that the daemon sent in all, or in its committed rounds if it never got to say its total."""
        stopped = self.last("stopped")
        if stopped is not None and "bytes_sent" in stopped.fields:
            return stopped.number("bytes_sent")
        return sum(event.number("bytes_sent") for event in self.committed.values())


class LineTail:
    """Follows a text file that another process appends to. The file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._rest = b""

    def read(self) -> list[str]:
        """The lines completed since the last call. Reads a local file, so it is quick enough for an event loop."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return []
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

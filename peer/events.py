"""The event log: one JSON object per line about everything that happens to a peer, for programs and people.

Every event has `t` (Unix seconds), `peer` and `event`; the other fields depend on its kind. `peer` is who the event
happened to: the peer that writes the log, except in events about another one (`connected`, `peer_seen`, `peer_lost`,
`banned`); those name the writer as `by`. Training never stops because an event could not be written: a full disk costs
events, and one warning.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from protocol.errors import ShoalError
from protocol.round_events import RoundEvent

Event = Mapping[str, Any]  # what subscribers get: the object as it stands in the file

_log = logging.getLogger(__name__)


class EventsError(ShoalError):
    """The event file cannot be opened."""


class EventLog:
    """Appends events to a file, and hands them to subscribers. Any thread may emit; lines never mix.

    Args:
        path: The file, appended to and created if need be; None: subscribers only.
        peer_id: Who writes the log.
        clock: Unix seconds.

    Raises:
        EventsError: The file cannot be opened for writing.
    """

    def __init__(self, path: Path | str | None, peer_id: object, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._peer = str(peer_id)
        self._clock = clock
        self._subscribers: list[Callable[[Event], None]] = []
        self._lock = threading.Lock()
        self._warned = False
        self._descriptor: int | None = None
        self._torn = False
        if path is not None:
            self._descriptor, self._torn = _open(Path(path))

    def now(self) -> float:
        """Unix seconds, as they stand in events."""
        return self._clock()

    def subscribe(self, subscriber: Callable[[Event], None]) -> None:
        """Calls `subscriber` with every event from now on, in the thread that emits it. It must be quick."""
        self._subscribers.append(subscriber)

    def emit(self, event: str, **fields: object) -> None:
        """Records that `event` happened, now. Ids and other bytes become text; NaN and infinity become null.

        A field `peer` says that the event is about another peer.
        """
        entry = self._entry(event, fields)
        with self._lock:
            if self._descriptor is not None:
                self._write(self._descriptor, json.dumps(entry, allow_nan=False).encode() + b"\n")
        for subscriber in self._subscribers:
            subscriber(entry)

    def report(self, event: RoundEvent) -> None:
        """Records what happened in a round."""
        self.emit(event.event, **attrs.asdict(event, filter=lambda field, value: field.name != "event" and bool(value)))

    def tell(self, event: str, **fields: object) -> None:
        """As `emit`, to subscribers only: for what is true now, and not worth a line in a file."""
        entry = self._entry(event, fields)
        for subscriber in self._subscribers:
            subscriber(entry)

    def _entry(self, event: str, fields: Mapping[str, object]) -> Event:
        entry: dict[str, Any] = {"t": round(self._clock(), 6), "peer": self._peer, "event": event}
        entry.update({name: _plain(value) for name, value in fields.items()})
        if "peer" in fields:
            entry["by"] = self._peer
        return entry

    def close(self) -> None:
        """Closes the file; later events reach subscribers only."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _write(self, descriptor: int, line: bytes) -> None:
        # A line that was cut off by a full disk or a crash must not swallow the next one.
        line = b"\n" + line if self._torn else line
        try:
            written = os.write(descriptor, line)
        except OSError as error:
            reason = error.strerror
        else:
            self._torn = written < len(line)
            reason = "no space left" if self._torn else None
        if reason and not self._warned:
            self._warned = True
            _log.warning("events are being lost: %s cannot be written: %s", self._path, reason)


def _open(path: Path) -> tuple[int, bool]:
    """The file's descriptor for appending, and whether its last line is incomplete."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        raise EventsError(
            f"the event file {path} cannot be opened: {error.strerror}",
            hint="--events takes a file in a directory that exists",
        ) from error
    size = os.fstat(descriptor).st_size  # 0 for terminals and pipes
    return descriptor, size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def _plain(value: object) -> object:
    """`value` as JSON knows it: bytes in hexadecimal unless they know better, as peer ids do."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if type(value) is bytes:
        return value.hex()
    return str(value)

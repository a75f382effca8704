"""What a daemon does now, in short: a fold over its events, kept in HOME/status.json for `shoal status`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec
import trio

from peer.events import Event, EventLog
from peer.home import write_atomically
from protocol.errors import ShoalError

if TYPE_CHECKING:
    from protocol.endpoint import Endpoint
    from protocol.identity import PeerId

INTERVAL: Final = 1.0  # seconds between two writes at most


class StatusError(ShoalError):
    """There is no status, or it is damaged."""


@attrs.frozen(kw_only=True)
class MemberStatus:
    """Another peer that the daemon is connected to."""

    peer: str
    address: str | None = None  # where it was reached last; None if it connected to us and does not listen
    path: str = "direct"  # how bytes get there
    rtt: float | None = None  # seconds; None if not measured yet
    revision: int | None = None  # committed rounds, as it says; None if it has no state, or is no member of our run
    stage: int | None = None  # that it serves, in a run of stages


@attrs.frozen(kw_only=True)
class Status:
    """A daemon at one moment. What is not known yet is None or 0."""

    pid: int
    peer: str
    activity: str = "starting"  # "starting", "synchronising", "training", "averaging", "serving", "stopped"
    since: float = 0.0  # Unix seconds of the first event
    updated: float = 0.0  # … and of the latest, but for what only the status is told
    address: str | None = None
    reachability: str | None = None  # "public", "private": whether others can connect to it
    run: str | None = None  # run id in base32 or hexadecimal, as the daemon's events have it
    revision: int = 0  # committed rounds
    digest: str | None = None
    contributors: int = 0  # in the latest round
    neighbours: tuple[str, ...] = ()  # peers seen and not lost
    members: tuple[MemberStatus, ...] = ()  # … and what is known of them, as of a second ago
    mapped: str | None = None  # the gateway's address that leads to ours
    step: int = 0
    loss: float | None = None
    tokens: int = 0  # trained on by this peer
    tokens_per_second: float = 0.0
    validation: float | None = None
    bytes_sent: int = 0  # in rounds; in all in a run of stages
    bytes_received: int = 0
    failures: int = 0  # rounds that failed
    problem: str | None = None  # why the latest checkpoint could not be saved
    reason: str | None = None  # why it stopped
    stage: int | None = None  # that it serves, in a run of stages
    servers: tuple[int, ...] = ()  # how many each stage of such a run has

    @property
    def empty_stages(self) -> tuple[int, ...]:
        """Stages without a server, for which all others wait."""
        over = self.activity in ("starting", "stopped")
        return () if over else tuple(stage for stage, servers in enumerate(self.servers) if not servers)

    def after(self, event: Event) -> Status:
        """The status once `event` has happened; kinds that it does not know change only the time."""
        quiet = event["event"] in ("members", "stages")
        updated = self.updated if quiet else event["t"]
        return attrs.evolve(self, updated=updated, since=self.since or event["t"], **_changes(self, event))


def member_status(
    endpoint: Endpoint, peer: PeerId, revision: int | None = None, stage: int | None = None
) -> Mapping[str, object]:
    """What an endpoint knows of a peer that it is connected to, as the event `members` has it."""
    statistics = endpoint.statistics(peer)
    addresses = endpoint.addresses(peer)
    status = MemberStatus(
        peer=str(peer),
        address=str(addresses[0]) if addresses else None,
        path="direct" if statistics is None else statistics.path,
        rtt=None if statistics is None else statistics.rtt,
        revision=revision,
        stage=stage,
    )
    return attrs.asdict(status)


def write_status(path: Path, status: Status) -> None:
    """Replaces the status file in one step.

    Raises:
        OSError: It cannot be written.
    """
    write_atomically(path, msgspec.json.encode(status))


def read_status(path: Path) -> Status:
    """The status that a daemon has left.

    Raises:
        StatusError: There is none, or it is damaged.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Status)
    except FileNotFoundError as error:
        raise StatusError(
            f"no peer has run in {path.parent}", hint="start one with `shoal join` or `shoal start`, or pass its --home"
        ) from error
    except OSError as error:
        raise StatusError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StatusError(f"{path} is damaged: {error}", hint="a running daemon writes it anew every second") from error


class StatusFile:
    """Follows an event log and keeps the status file up to date, with at most one write a second.

    Args:
        path: The status file.
        log: Whose events to follow.
        peer: The own peer id as text.
    """

    def __init__(self, path: Path, log: EventLog, peer: str) -> None:
        self._path = path
        self._written: Status | None = None
        self.status = Status(pid=os.getpid(), peer=peer)
        log.subscribe(self._follow)

    async def run(self) -> None:
        """Writes until it is cancelled, and then once more. A full disk makes the status stale, nothing worse."""
        try:
            while True:
                self._write()
                await trio.sleep(INTERVAL)
        finally:
            self._write()

    def _follow(self, event: Event) -> None:
        self.status = self.status.after(event)

    def _write(self) -> None:
        if self.status is not self._written:
            self._written = self.status
            with contextlib.suppress(OSError):
                write_status(self._path, self.status)


def _changes(status: Status, event: Event) -> dict[str, Any]:
    match event["event"]:
        case "started":
            activity = "serving" if event.get("role") == "helper" else "synchronising"
            return {"address": event.get("address"), "run": event.get("run"), "activity": activity}
        case "members":
            return {"members": msgspec.convert(event["members"], tuple[MemberStatus, ...])}
        case "stages":
            return {
                "stage": event["stage"],
                "servers": tuple(event["servers"]),
                "revision": event["step"],
                "bytes_sent": event["bytes_sent"],
                "bytes_received": event["bytes_received"],
            }
        case "mapped":
            return {"mapped": event["address"]}
        case "unmapped":
            return {"mapped": None}
        case "synced":
            return {"activity": "training", "revision": event["round"], "digest": event.get("digest")}
        case "stage_synced":
            return {"activity": "training", "revision": event["step"]}
        case "stage_step":
            return {
                "activity": "training",
                "revision": event["step"] + 1,
                "contributors": len(event.get("ledgers", ())),
            }
        case "reachability":
            return {"reachability": event["verdict"]}
        case "peer_seen":
            return {"neighbours": (*_others(status, event), event["peer"])}
        case "peer_lost" | "banned":
            return {"neighbours": _others(status, event)}
        case "round_started":
            return {"activity": "averaging"}
        case "round_committed":
            return {
                "activity": "training",
                "revision": event["round"],
                "digest": event.get("digest"),
                "contributors": len(event.get("contributors", ())),
                "bytes_sent": status.bytes_sent + event.get("bytes_sent", 0),
                "bytes_received": status.bytes_received + event.get("bytes_received", 0),
            }
        case "round_failed":
            return {"activity": "training", "failures": status.failures + 1}
        case "inner":
            return {
                "activity": "training",
                "step": event["step"],
                "loss": event["loss"],
                "tokens": status.tokens + event.get("tokens", 0),
                "tokens_per_second": event.get("tokens_per_second") or 0.0,
            }
        case "checkpoint_failed":
            return {"problem": event.get("reason")}
        case "validation":
            return {"validation": event["loss"]}
        case "stopped":
            over = {"activity": "stopped", "reason": event.get("reason"), "neighbours": (), "members": ()}
            return over | {"tokens_per_second": 0.0}
    return {}


def _others(status: Status, event: Event) -> tuple[str, ...]:
    """The neighbours without the one that `event` is about."""
    return tuple(peer for peer in status.neighbours if peer != event["peer"])

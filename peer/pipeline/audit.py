"""What the stages of a run have counted, from the events of its peers: for the audit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from optim.swarm.ledger import Settled
from protocol.identity import PeerId


def records(events: Iterable[Mapping[str, Any]]) -> list[Settled]:
    """What all servers of all stages have recorded, from objects as they stand in event files.

    A step that was made counts as its `stage_step` says. A server that dies after it has told others that its stage has
    settled has not written that; then its `stage_settled` counts, which it has written before it told anybody.
    """
    made: list[Settled] = []
    settled: dict[tuple[int, int], Settled] = {}
    for event in events:
        if event["event"] == "stage_step":
            made.append(_record(event))
        elif event["event"] == "stage_settled":
            settled[event["stage"], event["step"]] = _record(event)
    known = {(record.stage, record.step) for record in made}
    return made + [record for place, record in settled.items() if place not in known]


def ledgers_told(ledgers: Mapping[PeerId, Mapping[int, int]]) -> dict[str, dict[str, int]]:
    """Ledgers as events have them."""
    return {str(peer): {str(number): count for number, count in each.items()} for peer, each in ledgers.items()}


def _record(event: Mapping[str, Any]) -> Settled:
    ledgers = {
        PeerId.parse(name): {int(number): count for number, count in ledger.items()}
        for name, ledger in event["ledgers"].items()
    }
    return Settled(stage=event["stage"], step=event["step"], ledgers=ledgers)

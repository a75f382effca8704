"""The fuzz targets by name. Each takes bytes that decide what happens, and raises if it is something that must not."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.fuzz import endpoints, handshakes, messages, records, states, streams, swarm

TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "handshake": handshakes.run,
    "records": records.run,
    "streams": streams.attack,
    "conversation": streams.converse,
    "messages": messages.run,
    "dht-records": messages.records,
    "tickets": messages.tickets,
    "manifests": messages.manifests,
    "texts": messages.texts,
    "gateways": messages.gateways,
    "dht-store": swarm.store,
    "dht-table": swarm.table,
    "dht-lookup": swarm.lookup,
    "dht-reading": swarm.reading,
    "address-book": swarm.book,
    "coordinator": swarm.coordinator,
    "acceptor": swarm.acceptor,
    "state": states.run,
    "history": states.history,
    "endpoint": endpoints.run,
}

"""Fixtures that tests of several modules of `peer` share."""

from __future__ import annotations

import random
from collections.abc import Callable

import attrs
import pytest
from typer.testing import CliRunner

import peer.cli
from peer.recording import Event, Recording
from peer.verdict import Scenario
from protocol.endpoint import Endpoint
from protocol.identity import Identity
from protocol.memory import MemoryNetwork
from protocol.transport import Address

PARAMETERS = 1000
ROUND_SECONDS = 10.0
REDUCE_SECONDS = 1.0
BYTES_PER_ROUND = 6000


@attrs.define
class RecordedSwarm:
    """Recordings of a made-up demo: 4 daemons, 6 rounds, `peer-3` killed in round 3, `newcomer` from round 5 on.

    Every round takes 10 s, the last second of which is the reduce; round 3 takes 2 s more.
    """

    recordings: list[Recording]
    scenario: Scenario

    def __getitem__(self, name: str) -> Recording:
        return next(recording for recording in self.recordings if recording.name == name)

    def replace(self, name: str, change: Callable[[Event], Event | None]) -> None:
        """Changes one daemon's events; None drops one."""
        index = self.recordings.index(self[name])
        changed = Recording(name)
        for event in self[name].events:
            if (kept := change(event)) is not None:
                changed.add(event if kept is event else kept)
        self.recordings[index] = changed

    def replace_all(self, change: Callable[[Event], Event | None]) -> None:
        """Changes every daemon's events."""
        for recording in list(self.recordings):
            self.replace(recording.name, change)


def change_fields(event: Event, **fields: object) -> Event:
    """The event with some fields changed."""
    return attrs.evolve(event, fields={**event.fields, **fields})


@pytest.fixture
def change() -> Callable[..., Event]:
    return change_fields


@pytest.fixture
def swarm() -> RecordedSwarm:
    names = ["founder", "peer-1", "peer-2", "peer-3", "newcomer"]
    swarm = RecordedSwarm([Recording(name) for name in names], Scenario(rounds=6, inner_steps=50))

    def tell(name: str, t: float, kind: str, **fields: object) -> None:
        swarm[name].add(Event(1000.0 + t, f"id-{name}", kind, fields))

    for name in names[:4]:
        tell(name, 0.0, "started", address="127.0.0.1:1", run="run", parameters=PARAMETERS)
    tell("founder", 0.5, "validation", round=0, loss=5.5)
    end = 0.0
    for round_ in range(1, 7):
        began, end = end, end + ROUND_SECONDS + (2.0 if round_ == 3 else 0.0)
        members = names[:4] if round_ < 3 else names[:3] if round_ < 5 else [*names[:3], "newcomer"]
        if round_ == 4:
            tell("newcomer", began + 2.0, "started", address="127.0.0.1:2", run="run", parameters=PARAMETERS)
            tell("newcomer", began + 3.0, "synced", round=3, digest="digest-3", seconds=0.1, bytes=12_000)
        starters = names[:4] if round_ == 3 else members
        ids = [f"id-{name}" for name in members]
        for name in starters:
            for step in range(1, 9):
                speed = {"loss": 5.0 / (round_ + step / 8), "tokens": 2048, "tokens_per_second": 2000.0}
                tell(name, began + step, "inner", step=50 * round_ + step, **speed)
            reduce = began + ROUND_SECONDS - REDUCE_SECONDS
            tell(name, reduce, "round_started", round=round_, attempt=1, members=[f"id-{n}" for n in starters])
        for name in members:
            if round_ == 3:
                tell(name, end - 1.5, "round_failed", round=3, attempt=1, reason="id-peer-3 is gone")
                tell(name, end - 1.0, "round_started", round=3, attempt=2, members=ids)
            attempt = 2 if round_ == 3 else 1
            sent = {"seconds": 1.0, "bytes_sent": BYTES_PER_ROUND, "bytes_received": BYTES_PER_ROUND, "weight": 1e5}
            about = {"round": round_, "attempt": attempt, "members": ids, "contributors": ids}
            tell(name, end, "round_committed", digest=f"digest-{round_}", **about, **sent)
            tell(name, end + 0.2, "validation", round=round_, loss=5.5 - 0.5 * round_)
    for name in [*names[:3], "newcomer"]:
        tell(name, end + 1, "stopped", reason="the run is over", bytes_sent=50_000, bytes_received=50_000)
    swarm.scenario = Scenario(
        rounds=6,
        inner_steps=50,
        killed="peer-3",
        killed_round=3,
        killed_at=1029.1,
        joined="newcomer",
        joined_at=1033.0,
        seconds=70.0,
    )
    return swarm


@attrs.frozen
class Mesh:
    """Endpoints that know each other's addresses, on an in-memory network and simulated time."""

    network: MemoryNetwork
    endpoints: list[Endpoint]


@pytest.fixture
async def mesh(nursery):
    """`await mesh(n)` makes n endpoints on hosts h0, h1, …"""

    async def make(count):
        network = MemoryNetwork(latency=0.01)
        endpoints = []
        for number in range(count):
            identity = Identity.from_seed(bytes([number + 1]) * 32)
            endpoint = Endpoint(identity, network.transport(f"h{number}"), rng=random.Random(number))
            await nursery.start(endpoint.run, Address(f"h{number}", 4000))
            endpoints.append(endpoint)
        for one in endpoints:
            for number, two in enumerate(endpoints):
                if one is not two:
                    one.learn(two.peer_id, Address(f"h{number}", 4000))
        return Mesh(network, endpoints)

    return make


@pytest.fixture
def shoal(tmp_path, monkeypatch):
    """Runs a command line in an empty directory, with a home of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))

    def run(*arguments, input=None):
        return CliRunner().invoke(peer.cli.app, [str(argument) for argument in arguments], input=input)

    return run

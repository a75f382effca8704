import json
import random

import attrs
import pytest
import trio

from peer.daemon import DaemonConfig, run_daemon
from peer.events import EventLog
from peer.home import Home
from peer.manifest import Manifest
from peer.settings import (
    AlgorithmSettings,
    DataSettings,
    InnerSettings,
    ModelSettings,
    RoundSettings,
    RunSettings,
    Settings,
)
from peer.ticket import Ticket
from protocol.memory import MemoryNetwork
from protocol.transport import Address

STEP = 1.0  # simulated seconds that a computation takes

SETTINGS = Settings(
    run=RunSettings(name="simulated", seed=1, rounds=6),
    model=ModelSettings(layers=1, width=16, heads=2, context=8),
    data=DataSettings(source="text", shards=16),
    inner=InnerSettings(batch=2, warmup=2),
    algorithm=AlgorithmSettings(inner_steps=2, outer_momentum=0.5),
    round=RoundSettings(grace=5.0),
)


@attrs.define
class Peer:
    """One simulated daemon and what it said."""

    name: str
    home: Home
    log: list = attrs.field(factory=list)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    error: BaseException | None = None
    ended: trio.Event = attrs.field(factory=trio.Event)
    _news: trio.Event = attrs.field(factory=trio.Event)

    @property
    def id(self):
        return self.home.identity.peer_id

    def events(self, kind):
        return [event for event in self.log if event["event"] == kind]

    def digests(self):
        """Revision → digest of everything that was committed or fetched, the last word on each."""
        return {e["round"]: e["digest"] for e in self.log if e["event"] in ("round_committed", "synced")}

    def hear(self, event):
        self.log.append(json.loads(json.dumps(event)))
        self._news.set()
        self._news = trio.Event()

    async def until(self, condition):
        """Waits until `condition()` holds, looking after every event of this peer."""
        while not condition():
            await self._news.wait()

    async def until_round(self, revision):
        await self.until(lambda: max(self.digests(), default=0) >= revision)


class SimulatedSwarm:
    """Daemons as they are, on an in-memory network and simulated time."""

    def __init__(self, directory, nursery, settings=SETTINGS):
        self.network = MemoryNetwork(latency=0.01)
        self.settings = settings
        self.peers = {}
        self.ticket: Ticket | None = None
        self._directory = directory
        self._nursery = nursery
        self._text = directory / "text"
        letters = random.Random(5)
        self._text.write_text("".join(letters.choice("abcdefgh \n") for _ in range(60_000)))

    async def start(self, name, *, ticket=None, settings=None):
        """Founds the run if there is no ticket yet, else joins it. Returns when the peer can be joined."""
        home = Home(self._directory / name)
        peer = self.peers[name] = Peer(name, home)
        events = EventLog(None, home.identity.peer_id)
        events.subscribe(peer.hear)
        ticket = ticket or self.ticket
        config = DaemonConfig(
            home=home,
            listen=Address(name, 4000),
            events=events,
            data=str(self._text),
            manifest=None if ticket else Manifest.create(settings or self.settings, home.identity),
            ticket=ticket,
        )
        got = await self._nursery.start(self._run, peer, config)
        self.ticket = self.ticket or got
        return peer

    def kill(self, name):
        """As kill -9: nobody is told."""
        self.network.kill(name)
        self.peers[name].scope.cancel()

    def leave(self, name):
        """As Ctrl-C."""
        self.peers[name].scope.cancel()

    async def _run(self, peer, config, *, task_status):
        try:
            with peer.scope:
                await run_daemon(
                    config, transport=self.network.transport(peer.name), compute=simulated, task_status=task_status
                )
        finally:
            peer.ended.set()


async def simulated(function, *arguments):
    result = function(*arguments)
    await trio.sleep(STEP)
    return result


@pytest.fixture
def simulated_swarm(tmp_path, nursery):
    return SimulatedSwarm(tmp_path, nursery)

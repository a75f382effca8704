import hashlib
import json
import random
from collections import Counter
from functools import partial

import attrs
import pytest
import torch
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
from peer.trainer import Trainer
from protocol.errors import ShoalError
from protocol.identity import Identity
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
    """Daemons as they are, on an in-memory network and simulated time. The same seed makes the same history."""

    def __init__(self, directory, nursery, settings=SETTINGS, seed=0):
        trio._core._run._r.seed(seed)  # the order of tasks; importing hypothesis makes trio respect it
        torch.set_num_threads(1)
        self.seed = seed
        self.network = MemoryNetwork(latency=0.01)
        self.settings = settings
        self.peers = {}
        self.ticket: Ticket | None = None
        self.founder = None
        self.clock = trio.current_time  # for events
        self.step = {}  # seconds that a computation takes at a peer, if not STEP, by name
        self.per_step = {}  # seconds that each inner step takes at a peer, by name; those of others take STEP together
        self.taken = Counter()  # inner steps of these, by name
        self.trainers = {}  # the last one of each peer, by name
        self._directory = directory
        self._nursery = nursery
        self._starts = 0
        self._text = directory / "text"
        letters = random.Random(5)
        self._text.write_text("".join(letters.choice("abcdefgh \n") for _ in range(60_000)))

    def home(self, name):
        """A peer's home, with an identity that follows from the seed."""
        home = Home(self._directory / name)
        key = home.path / "identity.key"
        if not key.exists():
            identity = Identity.from_seed(hashlib.sha256(f"{self.seed}/{name}".encode()).digest())
            key.touch(mode=0o600)
            key.write_bytes(identity._pem())
        return home

    def prepare(self, name, *, ticket=None, settings=None, **options):
        """A peer and its configuration: it founds the run if there is no ticket yet, else it joins it."""
        home = self.home(name)
        peer = self.peers[name] = Peer(name, home)
        events = EventLog(None, home.identity.peer_id, clock=self.clock)
        events.subscribe(peer.hear)
        ticket = ticket or self.ticket
        founds = ticket is None or home.identity.peer_id == self.founder
        config = DaemonConfig(
            home=home,
            listen=options.pop("listen", Address(name, 4000)),
            events=events,
            data=options.pop("data", str(self._text)),
            manifest=Manifest.create(settings or self.settings, home.identity) if founds else None,
            ticket=None if founds else ticket,
            **options,
        )
        return peer, config

    async def start(self, name, **options):
        """Starts a peer as `prepare` describes it, and returns it when it can be joined."""
        peer, config = self.prepare(name, **options)
        got = await self._nursery.start(self._run, peer, config)
        if self.ticket is None:
            self.ticket, self.founder = got, peer.id
        return peer

    def launch(self, name):
        """Starts a peer without waiting for it. If it cannot begin, that is its end, and its `error`."""
        peer, config = self.prepare(name)
        self.network.transport(name)  # the host is there from now on, and may be stalled or cut off
        self._nursery.start_soon(self._run, peer, config)
        return peer

    def kill(self, name):
        """As kill -9: nobody is told."""
        self.network.kill(name)
        self.peers[name].scope.cancel()

    def leave(self, name):
        """As Ctrl-C."""
        self.peers[name].scope.cancel()

    async def _run(self, peer, config, *, task_status=None):
        self._starts += 1
        try:
            with peer.scope:
                await run_daemon(
                    config,
                    transport=self.network.transport(peer.name),
                    compute=partial(self._compute, peer.name),
                    rng=random.Random(f"{self.seed}/{peer.name}/{self._starts}"),
                    task_status=task_status or trio.TASK_STATUS_IGNORED,
                )
        except ShoalError as error:
            peer.error = error
            if task_status is not None:
                raise
        finally:
            peer.ended.set()

    async def split_and_heal(self):
        """Five peers make rounds, then each side of a partition for itself, then all of them together again.

        Returns:
            The peers, and the revision at which they parted.
        """
        peers = a, _, _, _, e = [await self.start(name) for name in "abcde"]
        await e.until_round(2)
        self.network.partition("abc", "de")
        cut = max(a.digests())
        await a.until_round(cut + 3)
        await e.until_round(cut + 3)
        self.network.heal()
        await e.until(lambda: len(e.events("round_committed")[-1]["members"]) == 5)
        last = max(e.digests())
        for peer in peers:
            await peer.until_round(last)
        assert len({peer.digests()[last] for peer in peers}) == 1
        for name in "abcde":
            self.leave(name)
        return peers, cut

    async def _train(self, name, run):
        """Calls `Trainer.run` step by step, each of which takes its time."""
        (steps,), stop, told = run.args, run.keywords["should_stop"], run.keywords["on_step"]
        before = None
        while before != self.taken[name]:
            before = self.taken[name]

            def on_step(info):
                self.taken[name] += 1
                told(info)

            run.func(steps, should_stop=lambda: self.taken[name] > before or stop(), on_step=on_step)  # noqa: B023
            if before != self.taken[name]:
                await trio.sleep(self.per_step[name])

    async def _compute(self, name, function, *arguments):
        if name in self.per_step and isinstance(function, partial) and function.func.__name__ == "run":
            return await self._train(name, function)
        result = function(*arguments)
        if isinstance(result, Trainer):
            self.trainers[name] = result
        await trio.sleep(self.step.get(name, STEP))
        return result


@pytest.fixture
def simulated_swarm(tmp_path, nursery):
    return SimulatedSwarm(tmp_path, nursery)


@pytest.fixture
def seeded_swarm(tmp_path, nursery):
    """`seeded_swarm(seed, settings)` makes a swarm whose history follows from the seed."""

    def make(seed, settings=SETTINGS):
        return SimulatedSwarm(tmp_path, nursery, settings, seed)

    return make

"""Whole daemons to which random things happen. One seed, one history; afterwards all of them are one swarm again."""

import random
from contextlib import contextmanager

import attrs
import pytest
import trio

SEEDS = 30
NAMES = "abcdefgh"
SETTLE = 20  # simulated seconds within which those who cannot reach anybody give up
CALM = 300  # simulated seconds within which everything has to be well again


@contextmanager
def explained(seed, history):
    try:
        yield
    except BaseException:
        print(f"seed {seed}", *history, sep="\n")  # pytest shows it if the test fails
        raise


class Chaos:
    """Random faults, one after the other. At least one peer is always left alive."""

    def __init__(self, swarm, rng):
        self.swarm, self.rng = swarm, rng
        self.alive = {}
        self.history = []

    async def run(self, faults):
        for _ in range(faults):
            await trio.sleep(self.rng.choice([0.1, 1.0, 5.0, 20.0]) * self.rng.random())
            kind = self.rng.choice(
                [self.kill, self.restart, self.leave, self.stall, self.resume, self.cut, self.heal, self.join]
            )
            self.note(f"{kind.__name__} {kind() or ''}")

    def note(self, what):
        self.history.append(f"{trio.current_time():.2f} {what}")

    def kill(self, end=None):
        if len(self.alive) < 2:
            return None
        name = self.rng.choice(sorted(self.alive))
        del self.alive[name]
        (end or self.swarm.kill)(name)
        return name

    def leave(self):
        return self.kill(self.swarm.leave)

    def restart(self):
        gone = sorted(name for name, peer in self.swarm.peers.items() if name not in self.alive and peer.ended.is_set())
        return self._launch(self.rng.choice(gone)) if gone else None

    def join(self):
        fresh = [name for name in NAMES if name not in self.swarm.peers]
        return self._launch(fresh[0]) if fresh else None

    def stall(self):
        name = self.rng.choice(sorted(self.alive))
        self.swarm.network.stall(name)
        return name

    def resume(self):
        for name in self.alive:
            self.swarm.network.resume(name)

    def cut(self):
        names = sorted(self.swarm.peers)
        one = self.rng.sample(names, self.rng.randint(1, len(names)))
        self.swarm.network.partition(one, [name for name in names if name not in one])
        return "".join(one)

    def heal(self):
        self.swarm.network.heal()

    async def calm(self):
        self.heal()
        self.resume()
        await trio.sleep(SETTLE)
        lonely = [name for name in self.alive if self.swarm.peers[name].ended.is_set()]  # they could not reach anybody
        stateless = not any(peer.events("validation") for peer in self.alive.values())
        if "a" not in self.alive and (lonely or stateless):
            self._launch("a")  # the founder has to come back: the ticket names nobody else, or nobody else has a state
            await trio.sleep(SETTLE)
        for name in lonely:
            self._launch(name)
        self.note("calm")

    def _launch(self, name):
        self.alive[name] = self.swarm.launch(name)
        return name


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_whatever_happens(autojump_clock, seeded_swarm, seed):
    rng = random.Random(seed)
    swarm = seeded_swarm(seed)
    swarm.settings = attrs.evolve(swarm.settings, run=attrs.evolve(swarm.settings.run, rounds=0))
    chaos = Chaos(swarm, rng)
    with explained(seed, chaos.history):
        for name in NAMES[: rng.randint(2, 5)]:
            chaos.alive[name] = await swarm.start(name)
        await chaos.run(faults=rng.randint(3, 8))
        for name, peer in swarm.peers.items():
            assert peer.error is None or type(peer.error).__name__ == "PeerUnreachable", (name, peer.error)
        await chaos.calm()
        try:
            with trio.fail_after(CALM):
                await all_in_one_round(chaos.alive.values())
        except BaseException:
            for name, peer in sorted(chaos.alive.items()):
                chaos.history += [f"{name} = {peer.id}", *map(str, peer.log[-5:])]
            raise
        for name in chaos.alive:
            swarm.leave(name)


async def all_in_one_round(peers):
    """Returns when all of these peers have committed the same state of one revision, made by all of them."""
    ids = sorted(str(peer.id) for peer in peers)

    def together(peer):
        return {e["digest"] for e in peer.events("round_committed") if sorted(e["members"]) == ids}

    while not set.intersection(*(together(peer) for peer in peers)):
        for peer in peers:
            assert not peer.ended.is_set(), (peer.name, peer.error, peer.log[-3:])
        await trio.sleep(1)

"""How much of the optimal throughput does a pipeline keep while its peers come and go?

    python scripts/experiments/rebalancing.py                          # none, 300 s and 60 s; 10 seeds
    python scripts/experiments/rebalancing.py --period 300 --moves 4

The set-up of the SWARM paper's replay: 32 stages, 32 hours, up to 400 equal preemptible machines. Its logs are not
published, so the log here is made from a model. How many machines are to be had goes up and down at random; when it
falls, any of them are lost at once, and when it rises, new ones come within ten minutes; besides, each machine lives
for a random time. How quickly it goes up and down is chosen such that without rebalancing the pipeline keeps about what
the paper reports for that, 83 %. Newcomers go to the slowest stage, with and without rebalancing. Whoever comes or
moves is useless until it has fetched the stage's state. The optimum is that of the same machines, spread evenly at
once.
"""

from __future__ import annotations

import argparse
import heapq
import math
import statistics
import sys
from pathlib import Path
from random import Random

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from optim.swarm.balance import Member, Policy, moves, newcomers_stage
from protocol.identity import PeerId

HOUR, TICK = 3600.0, 600.0


@attrs.frozen(kw_only=True)
class Setting:
    """What is replayed."""

    stages: int = 32
    hours: float = 32.0
    machines: int = 400
    """At most."""
    fewest: int = 64
    """At least."""
    unrest: float = 10.0
    """How many machines more or less are to be had after ten minutes: the standard deviation."""
    lifetime: float = 24 * HOUR
    """Seconds that a machine lives on average, unless there are too many."""
    transfer: float = 60.0
    """Seconds that a stage's state takes."""


@attrs.frozen
class Event:
    """A machine comes, or goes."""

    time: float
    peer: PeerId
    comes: bool


def log(setting: Setting, random: Random) -> list[Event]:
    """Comings and goings in order."""
    capacity = float(setting.machines + setting.fewest) / 2
    alive = [PeerId(number.to_bytes(32)) for number in range(round(capacity))]
    events = [Event(0.0, peer, True) for peer in alive]
    born = len(alive)
    for tick in range(1, int(setting.hours * HOUR / TICK)):
        now = tick * TICK
        capacity = min(max(capacity + random.gauss(0.0, setting.unrest), setting.fewest), setting.machines)
        keeps = math.exp(-TICK / setting.lifetime)
        stay = [peer for peer in alive if random.random() < keeps]
        stay = random.sample(stay, min(len(stay), round(capacity)))
        events += [Event(now, peer, False) for peer in sorted(set(alive) - set(stay))]
        new = [PeerId(number.to_bytes(32)) for number in range(born, born + round(capacity) - len(stay))]
        born += len(new)
        events += [Event(now + random.uniform(0, TICK / 2), peer, True) for peer in new]
        alive = [*stay, *new]
    return sorted(events, key=lambda event: event.time)


@attrs.define
class Machine:
    """A machine that is there."""

    stage: int
    since: float
    ready: float


def replay(
    setting: Setting, seed: int, period: float | None, policy: Policy, *, choosing: bool = True
) -> tuple[float, int]:
    """The share of the optimal throughput over the whole time, and how many moves there were.

    Args:
        setting: The log and the stages.
        seed: Of the log.
        period: Seconds between looks at the balance; None for never.
        policy: When moves are worth it.
        choosing: Whether newcomers go to the slowest stage, or else to any.
    """
    random = Random(seed)
    events = log(setting, Random(seed))
    # (time, order, what): machines come and go, states arrive, and peers look whether somebody should move.
    queue: list[tuple[float, int, Event | None]] = [(event.time, 1, event) for event in events]
    if period is not None:
        queue += [(period * number, 2, None) for number in range(1, int(setting.hours * HOUR / period))]
    queue.sort(key=lambda item: item[:2])
    there: dict[PeerId, Machine] = {}
    arrivals: list[float] = []
    now = useful = optimal = 0.0
    moved = 0

    def pass_until(until: float) -> None:
        nonlocal now, useful, optimal
        while now < until:
            while arrivals and arrivals[0] <= now:
                heapq.heappop(arrivals)
            stop = min([until, *arrivals[:1]])
            rates = [0] * setting.stages
            for machine in there.values():
                rates[machine.stage] += machine.ready <= now
            useful += min(rates) * (stop - now)
            optimal += len(there) // setting.stages * (stop - now)
            now = stop

    def members() -> list[Member]:
        return [
            Member(peer=peer, stage=machine.stage, rate=1.0, settled_for=now - machine.since)
            for peer, machine in there.items()
        ]

    def place(peer: PeerId, stage: int, *, at_once: bool = False) -> None:
        there[peer] = Machine(stage, -math.inf if at_once else now, now if at_once else now + setting.transfer)
        heapq.heappush(arrivals, there[peer].ready)

    for time, _, event in queue:
        pass_until(time)
        if event is None:
            for move in moves(members(), setting.stages, policy):
                place(move.peer, move.target)
                moved += 1
        elif event.comes:
            chosen = choosing or time == 0
            stage = newcomers_stage(members(), setting.stages) if chosen else random.randrange(setting.stages)
            place(event.peer, stage, at_once=time == 0)
        else:
            del there[event.peer]
    pass_until(setting.hours * HOUR)
    return useful / optimal, moved


def main() -> None:
    """Prints a line for each period."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--period", type=float, nargs="*", default=[300.0, 60.0], help="seconds")
    parser.add_argument("--moves", type=int, default=Policy().most, help="at a time")
    options = parser.parse_args()
    setting = Setting()
    for period in [None, *options.period]:
        policy = Policy(most=options.moves, rest=period or math.inf)
        results = [replay(setting, seed, period, policy) for seed in range(options.seeds)]
        shares = [share for share, _ in results]
        moved = statistics.mean(moved for _, moved in results) / setting.hours
        print(
            f"{'none' if period is None else f'{period:g} s':>6}: {statistics.mean(shares):6.1%} of the optimum "
            f"({min(shares):.1%} to {max(shares):.1%} by seed), {moved:.1f} moves per hour"
        )


if __name__ == "__main__":
    main()

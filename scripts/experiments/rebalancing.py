"""How much of the optimal throughput does a pipeline keep while its peers come and go?

    python scripts/experiments/rebalancing.py                 # none, 300 s and 60 s; 10 seeds
    python scripts/experiments/rebalancing.py --sensitivity   # how that depends on what the log is made from

The set-up of the SWARM paper's replay: 32 stages, 32 hours, up to 400 equal preemptible machines. Its logs are not
published, so the log here is made from a model. How many machines are to be had goes up and down at random; when it
falls, any of them are lost at once, and when it rises, new ones come within ten minutes; besides, each machine lives
for a random time. How quickly it goes up and down is chosen such that without rebalancing the pipeline keeps about what
the paper reports for that, 83 %. Newcomers go to the slowest stage, with and without rebalancing. Whoever comes or
moves is useless until it has fetched the stage's state. The optimum is that of the same machines, spread evenly at
once.

Who moves where is said by the functions, and the limits, that peers of a run go by. They look after each step of the
run; here a period stands for a step.
"""

from __future__ import annotations

import argparse
import heapq
import math
import statistics
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from random import Random

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from optim.swarm.balance import Member, Move, Policy, moves, newcomers_stage
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
    noise: float = 0.0
    """By what share rates are measured too high or too low: the standard deviation."""
    choosing: bool = True
    """Whether newcomers go to the stage that needs them most, or else to any."""


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


Rule = Callable[[Collection[Member], int, Policy], Sequence[Move]]
"""Who moves, see `optim.swarm.balance.moves`."""


def one_move(members: Collection[Member], stages: int, policy: Policy) -> Sequence[Move]:
    """What the paper says: a single peer at a time."""
    return moves(members, stages, policy)[:1]


@attrs.define
class Machine:
    """A machine that is there."""

    stage: int
    ready: float
    steps: int = 0


def replay(setting: Setting, seed: int, period: float | None, rule: Rule = moves) -> tuple[float, int]:
    """The share of the optimal throughput over the whole time, and how many moves there were.

    Args:
        setting: The log and the stages.
        seed: Of the log.
        period: Seconds of a step, after which peers look at the balance; None for never.
        rule: Who moves.
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
            Member(
                peer=peer,
                stage=machine.stage,
                rate=math.exp(random.gauss(0.0, setting.noise)),
                settled_for=machine.steps,
                ready=machine.ready <= now,
            )
            for peer, machine in there.items()
        ]

    def place(peer: PeerId, stage: int, *, at_once: bool = False) -> None:
        there[peer] = Machine(stage, now if at_once else now + setting.transfer)
        heapq.heappush(arrivals, there[peer].ready)

    for time, _, event in queue:
        pass_until(time)
        if event is None:
            for machine in there.values():
                machine.steps += machine.ready <= now
            for move in rule(members(), setting.stages, Policy()):
                place(move.peer, move.target)
                moved += 1
        elif event.comes:
            chosen = setting.choosing or time == 0
            stage = newcomers_stage(members(), setting.stages) if chosen else random.randrange(setting.stages)
            place(event.peer, stage, at_once=time == 0)
        else:
            del there[event.peer]
    pass_until(setting.hours * HOUR)
    return useful / optimal, moved


SENSITIVITY: Mapping[str, Sequence[Setting]] = {
    "as above": [Setting()],
    "unrest": [Setting(unrest=unrest) for unrest in (2.5, 5.0, 20.0, 40.0)],
    "lifetime": [Setting(lifetime=hours * HOUR) for hours in (3, 8, math.inf)],
    "transfer": [Setting(transfer=seconds) for seconds in (0.0, 180.0, 300.0)],
    "machines": [Setting(machines=200), Setting(fewest=160), Setting(machines=800, fewest=128)],
    "stages": [Setting(stages=8), Setting(stages=16)],
    "noise": [Setting(noise=noise) for noise in (0.02, 0.05, 0.1, 0.2)],
    "choosing": [Setting(choosing=False)],
}
"""What is changed, one thing at a time."""


def summary(setting: Setting, seeds: int, period: float | None, rule: Rule) -> str:
    """One line about several logs."""
    results = [replay(setting, seed, period, rule) for seed in range(seeds)]
    shares = [share for share, _ in results]
    moved = statistics.mean(moved for _, moved in results) / setting.hours
    spread = f"{min(shares):5.1%} to {max(shares):5.1%}"
    return f"{statistics.mean(shares):6.1%} of the optimum ({spread} by seed), {moved:5.1f} moves per hour"


def main() -> None:
    """Prints a line for each period, or for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--period", type=float, nargs="*", default=[300.0, 60.0], help="seconds")
    parser.add_argument("--sensitivity", action="store_true", help="with other logs, and the first of the periods")
    options = parser.parse_args()
    if not options.sensitivity:
        print(f"  none            : {summary(Setting(), options.seeds, None, moves)}")
        for period in options.period:
            for name, rule in (("all", moves), ("one", one_move)):
                print(f"{period:5g} s, {name} moves: {summary(Setting(), options.seeds, period, rule)}", flush=True)
        return
    default = attrs.asdict(Setting())
    for setting in [setting for settings in SENSITIVITY.values() for setting in settings]:
        changed = {name: value for name, value in attrs.asdict(setting).items() if value != default[name]}
        print(", ".join(f"{name} {value:g}" for name, value in changed.items()) or "as above")
        for name, period in {"none": None, f"{options.period[0]:g} s": options.period[0]}.items():
            print(f"{name:>8}: {summary(setting, options.seeds, period, moves)}", flush=True)


if __name__ == "__main__":
    main()

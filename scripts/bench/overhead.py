"""What a live peer costs a training loop, and what training costs the peer.

    python scripts/bench/overhead.py --quick --json

A plain PyTorch loop, and the same one with Shoal's optimizer and a peer in the process, which is connected to one in
another process and has no exchange to make: they take turns, with the same model, and the median of the ratios of
neighbours counts. During the plain loop there is no peer in the process at all. One model is a transformer whose steps
are PyTorch's kernels for the most part, the other one so small that the interpreter works all the time, also on data of
its own.

Then the other process asks this one, 20 ms after each answer, while it trains, and while the two also average vectors
at 100 Mbit/s: 99 of 100 round trips have to stay below 50 ms. Exit code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import torch
import trio
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rows import Row, conclude, row

from optim import DiLoCo
from peer.model import Transformer
from peer.settings import ModelSettings
from protocol.endpoint import Limits
from protocol.mesh import MeshHello, MeshWelcome
from protocol.standalone import Joined, Place, join_collective, open_collective

NAME = "overhead"
RUN = hashlib.sha256(b"shoal-collective-v1" + NAME.encode()).digest()
NEVER = 10**9  # steps between exchanges
PERIOD = 0.02  # seconds from an answer to the next question
LINE = 100e6 / 8  # bytes per second that each peer sends at most
ALLOWED = 50.0  # ms
LEAST = 0.97
WARM_UP = 2  # vectors that are averaged before those that are measured: lanes are open then
QUESTIONS = 6  # times as long as a turn of a loop they go on


@attrs.frozen(kw_only=True)
class Work:
    """What is trained."""

    name: str
    sizes: ModelSettings
    batch: int
    python: bool
    """Whether each batch is made by the interpreter."""


LARGE = Work(name="transformer", sizes=ModelSettings(layers=4, width=128, heads=4, context=128), batch=8, python=False)
SMALL = Work(name="small steps", sizes=ModelSettings(layers=1, width=32, heads=2, context=32), batch=4, python=True)


class Loop:
    """A model in training."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._random = random.Random(1)
        self._batch = self._new_batch()
        self.model = Transformer(work.sizes)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One step."""
        batch = self._new_batch() if self._work.python else self._batch
        optimizer.zero_grad()
        logits = self.model(batch[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def rate(self, optimizer: torch.optim.Optimizer, seconds: float) -> float:
        """Tokens per second, of about so many seconds."""
        self.step(optimizer)  # whatever is done but once
        began, steps, took = time.perf_counter(), 0, 0.0
        while took < seconds:
            self.step(optimizer)
            steps, took = steps + 1, time.perf_counter() - began
        return steps * self._batch[:, 1:].numel() / took

    def _new_batch(self) -> torch.Tensor:
        length, count = self._work.sizes.context + 1, self._work.batch
        return torch.tensor([[self._random.randrange(256) for _ in range(length)] for _ in range(count)])


class Partner:
    """The peer in the other process, seen from here."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, "--work"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = str(self._answer())

    def do(self, *what: object) -> object:
        """Has it do something; returns what it answers."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def asks(self, train: Callable[[], None]) -> list[float]:
        """The milliseconds that its questions took during something."""
        self.do("ask")
        train()
        times: list[float] = self.do("asked")  # type: ignore[assignment]
        return sorted(1e3 * seconds for seconds in times)

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> object:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the other peer ended with code {self._process.wait()}")
        return json.loads(line)


async def partner() -> None:
    """The other process: does what lines of JSON say, [name, argument, …], and answers each with one."""
    torch.set_num_threads(1)
    times: list[float] = []
    asking = trio.CancelScope()
    async with open_collective(NAME, limits=Limits(max_upload=LINE)) as place, trio.open_nursery() as nursery:
        print(json.dumps(str(place.address)), flush=True)
        async for line in trio.wrap_file(sys.stdin):
            name, *arguments = json.loads(line)
            answer: object = None
            if name == "ask":
                times, asking = [], trio.CancelScope()
                await nursery.start(ask, place, asking, times)
            elif name == "asked":
                asking.cancel()
                answer = times
            else:
                nursery.start_soon(average, place, *arguments)
            print(json.dumps(answer), flush=True)
        nursery.cancel_scope.cancel()


async def ask(
    place: Place,
    scope: trio.CancelScope,
    times: list[float],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Asks the other member, again and again, and has started when the first answer is there."""
    (other,) = set(place.mesh.members) - {place.endpoint.peer_id}
    with scope:
        while True:
            began = time.perf_counter()
            await place.endpoint.request(other, MeshHello(RUN, ()), MeshWelcome)
            times.append(time.perf_counter() - began)
            if len(times) == 1:
                task_status.started()
            await trio.sleep(PERIOD)


async def average(place: Place, length: int, count: int) -> None:
    """Takes part in averaging vectors."""
    for _ in range(count):
        await place.collective.all_reduce(torch.zeros(length))


@contextmanager
def live(partner: Partner) -> Iterator[Joined]:
    """A peer in this process, which is connected to the other one."""
    with join_collective(NAME, peers=[partner.address], limits=Limits(max_upload=LINE)) as swarm:
        swarm.wait_for(2, timeout=60)
        yield swarm


def throughput(partner: Partner, work: Work, turns: int, seconds: float) -> dict[str, object]:
    """One row: the loop with a peer, and without."""
    loop = Loop(work)
    plain, ours = [], []
    loop.rate(loop.inner, seconds)
    for turn in range(turns):
        if turn % 2 == 0:
            plain.append(loop.rate(loop.inner, seconds))
        with live(partner) as swarm:
            ours.append(loop.rate(DiLoCo(loop.model, loop.inner, swarm, sync_every=NEVER), seconds))
        if turn % 2 == 1:
            plain.append(loop.rate(loop.inner, seconds))
    ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, plain, strict=True))
    rival = statistics.median(plain)
    return row(f"{work.name}: tokens in training", ratio * rival, rival, "1/s", f">= {LEAST}", "plain PyTorch")


def round_trips(partner: Partner, work: Work, seconds: float, length: int) -> Iterator[dict[str, object]]:
    """The rows for questions."""
    loop = Loop(work)
    with live(partner) as swarm:
        optimizer = DiLoCo(loop.model, loop.inner, swarm, sync_every=NEVER)

        def train() -> None:
            loop.rate(optimizer, seconds)

        def train_and_average() -> None:
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                partner.do("average", length, 1)
                handle = swarm.start_all_reduce(torch.zeros(length))
                while not handle.done:
                    loop.step(optimizer)
                handle.wait()

        partner.do("average", length, WARM_UP)
        for _ in range(WARM_UP):
            swarm.all_reduce(torch.zeros(length))
        idle = partner.asks(lambda: time.sleep(seconds))
        alone = partner.asks(train)
        beside = partner.asks(train_and_average)
    for name, times in (("", alone), (f", averaging {length >> 18} MiB", beside)):
        where = f"{work.name}: round trips while training{name}"
        late = times[int(0.99 * len(times))]
        yield row(f"{where}, median", statistics.median(times), statistics.median(idle), "ms", "", "idle")
        yield row(f"{where}, 99 of 100", late, ALLOWED, "ms", "<= 1", "what is allowed")
        yield row(f"{where}, longest of {len(times)}", times[-1], ALLOWED, "ms", "", "what is allowed")


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer turns, and shorter ones")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--seconds", type=float, help="of each turn; 0.5 with --quick, else 1")
    parser.add_argument("--turns", type=int, help="of each loop; 12 with --quick, else 30")
    parser.add_argument("--mib", type=int, default=16, help="size of the vector that is averaged")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        trio.run(partner)
        return 0
    seconds = options.seconds or (0.5 if options.quick else 1.0)
    turns = options.turns or (12 if options.quick else 30)
    print(f"{torch.get_num_threads()} threads of PyTorch")
    other = Partner()

    def rows() -> Iterator[Row]:
        for work in (LARGE, SMALL):
            yield throughput(other, work, turns, seconds)
            yield from round_trips(other, work, QUESTIONS * seconds, options.mib << 18)

    try:
        return conclude("overhead", rows(), as_json=options.json)
    finally:
        other.close()


if __name__ == "__main__":
    sys.exit(main())

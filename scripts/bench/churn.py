"""Kills and stops processes in mid-operation, and looks at what the survivors end with, and when.

    python scripts/bench/churn.py --quick --json

Processes on this machine average vectors with unequal weights. At a random moment of an operation some get SIGKILL or
SIGSTOP. All survivors must end with one plan and the same bits, which this process computes anew from the plans and
everybody's values. Every other one that was stopped goes on afterwards: it has to notice that it was excluded, and to
take part in the next operation, as does whoever replaces one that is gone; that operation is checked, too.

Extra time is that of a disturbed operation beyond the median of undisturbed ones. Allowed is, in the median, what it
takes to notice and to plan anew (0.5 s for a death; for a silence `Limits.dead_after` more, at most 5 s in all) and to
do again what no survivor held: that part of an undisturbed operation. Exit code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import attrs
import torch
import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from protocol import wire
from protocol.attempt import Attempt
from protocol.endpoint import Limits
from protocol.identity import PeerId
from protocol.member import Work
from protocol.plan import Plan, coordinators
from protocol.ring import reference
from protocol.round_messages import Result
from protocol.standalone import open_collective
from protocol.vectors import vector_bytes

NAME = "churn bench"
SILENCE = Limits().dead_after  # seconds after which one that says nothing is lost
NOTICED = {"kill": 0.5, "stop": SILENCE + 0.5}  # seconds after which the survivors go on
LONGEST_DEADLINE = 5.0
HANG = 120.0  # seconds after which an operation counts as one that never ends
START = 180.0  # seconds that a process has to start, and to find the others
WARM_UP = 4  # operations: a peer keeps the last results, and uses their memory again from then on
SAMPLE = 1009  # every so manieth element is computed in a second way


@attrs.frozen
class Case:
    """Who is disturbed, and how."""

    how: str
    """"kill" or "stop"."""
    victims: int
    size: int
    coordinator: bool
    """Whether the coordinator is among the victims, in each run."""
    scale: float = 1.0
    """Of the size of the vectors: many processes need much memory."""

    @property
    def name(self) -> str:
        whom = "the coordinator" if self.coordinator and self.victims == 1 else f"{self.victims}"
        more = " with the coordinator" if self.coordinator and self.victims > 1 else ""
        return f"{self.how} {whom} of {self.size}{more}"


CASES = {
    "one": [Case("kill", 1, 4, False), Case("stop", 1, 4, False)],
    "coordinator": [Case("kill", 1, 4, True), Case("stop", 1, 4, True)],
    "two": [Case("kill", 2, 4, True), Case("stop", 2, 4, True)],
    "three": [Case("kill", 3, 8, True, 0.5), Case("stop", 3, 8, True, 0.5)],
}


def some_values(length: int, slot: int) -> torch.Tensor:
    """The values of the process in one slot, whoever that is."""
    return torch.randn(length, generator=torch.Generator().manual_seed(slot))


def plan_text(plan: Plan) -> str:
    """A plan as text."""
    return wire.encode(Result(plan)).hex()


def plan_of(text: str) -> Plan:
    """The plan of a text."""
    return wire.decode(bytes.fromhex(text), [Result]).plan


# A process that takes part.


async def work(slot: int, length: int, addresses: list[str]) -> None:
    """Does what lines of JSON say, [name, argument], and answers each with one."""
    torch.set_num_threads(1)
    values, plans = some_values(length, slot), list[Plan]()
    async with open_collective(NAME, peers=addresses) as place:
        rounds = await place.collective._channels.get("", None)
        begin = rounds._begin

        def note(plan: Plan, mine: Work) -> Attempt:
            plans.append(plan)  # a later one may salvage from it, and does not say how it was summed
            return begin(plan, mine)

        rounds._begin = note  # type: ignore[method-assign]
        print(json.dumps([place.endpoint.peer_id.hex(), str(place.address)]), flush=True)
        async for line in trio.wrap_file(sys.stdin):
            name, argument = json.loads(line)
            if name == "meet":
                wanted = {bytes.fromhex(peer) for peer in argument}
                while set(place.mesh.members) != wanted:
                    await place.mesh._changed.wait()
                print("true", flush=True)
                continue
            began = time.perf_counter()
            reduced = await place.collective.all_reduce(values, argument)
            answer = Answer(
                began=began,
                ended=time.perf_counter(),
                plan=plan_text(reduced.plan),
                plans=[plan_text(plan) for plan in plans],
                digest=hashlib.sha256(vector_bytes(reduced.mean)).hexdigest(),
            )
            del reduced  # or its memory could not be used again
            plans.clear()
            print(json.dumps(attrs.asdict(answer)), flush=True)


@attrs.frozen(kw_only=True)
class Answer:
    """What one process says about one operation."""

    began: float
    ended: float
    plan: str
    plans: list[str]
    """All plans that it has carried out since it answered last."""
    digest: str
    """Of the result."""


class Process:
    """A process that takes part, seen from outside."""

    def __init__(self, slot: int, process: trio.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.slot, self.peer, self.address = slot, PeerId(bytes(32)), ""
        self._process, self._input, self._output = process, process.stdin, process.stdout
        self._text = b""

    @classmethod
    async def start(cls, slot: int, length: int, addresses: list[str]) -> Process:
        """Starts one."""
        command = [sys.executable, __file__, "--work", str(slot), str(length), *addresses]
        process = await trio.lowlevel.open_process(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        return cls(slot, process)

    async def introduce(self) -> None:
        """Waits until it runs."""
        peer, self.address = await self.answer(START)
        self.peer = PeerId(bytes.fromhex(peer))

    async def tell(self, name: str, argument: object) -> None:
        """Has it do something."""
        await self._input.send_all(json.dumps([name, argument]).encode() + b"\n")

    async def answer(self, seconds: float) -> list[str]:
        """Its next line. Raises `trio.TooSlowError`, or `EOFError`."""
        with trio.fail_after(seconds):
            while b"\n" not in self._text:
                received = await self._output.receive_some()
                if not received:
                    raise EOFError(f"process {self.slot} has ended")
                self._text += received
        line, self._text = self._text.split(b"\n", 1)
        found: list[str] = json.loads(line)
        return found

    async def reduced(self, seconds: float) -> Answer:
        """Its answer to an operation."""
        return Answer(**await self.answer(seconds))  # type: ignore[arg-type]

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        self._process.send_signal(number)

    async def close(self) -> None:
        """Ends it, stopped or not."""
        self._process.kill()
        await self._process.wait()
        await self._input.aclose()
        await self._output.aclose()


# The process that watches them.


@attrs.define(kw_only=True)
class Tally:
    """What came of one case."""

    case: Case
    mib: int
    calm: list[float] = attrs.field(factory=list)
    """Seconds of undisturbed operations."""
    disturbed: list[float] = attrs.field(factory=list)
    redone: list[float] = attrs.field(factory=list)
    """For each disturbed one, the part of the vector that was reduced without a victim; 0 if there was none."""
    wrong: list[str] = attrs.field(factory=list)
    apart: int = 0
    """Processes that went on, and made the operation anew among themselves before they found the others again."""
    hangs: int = 0

    def row(self) -> dict[str, object]:
        """What there is to say about it."""
        usual = statistics.median(self.calm)
        extra = [seconds - usual for seconds in self.disturbed]
        beyond = [more - part * usual for more, part in zip(extra, self.redone, strict=True)]
        limit = NOTICED[self.case.how]
        hit = [part for part in self.redone if part]
        good = (
            not self.wrong
            and not self.apart
            and not self.hangs
            and statistics.median(beyond) <= limit <= LONGEST_DEADLINE
        )
        return {
            "case": f"{self.case.name}, {self.mib} MiB",
            "runs": len(self.disturbed),
            "wrong": len(self.wrong),
            "apart": self.apart,
            "hangs": self.hangs,
            "usual_s": round(usual, 3),
            "extra_median_s": round(statistics.median(extra), 3),
            "extra_max_s": round(max(extra), 3),
            "beyond_redone_median_s": round(statistics.median(beyond), 3),
            "beyond_redone_max_s": round(max(beyond), 3),
            "limit_s": limit,
            "hit": len(hit),
            "redone": round(statistics.fmean(hit), 3) if hit else 0.0,
            "met": good,
        }


class Swarm:
    """Processes that average together, and what they ought to get.

    Args:
        tally: Where it is written down.
        length: Elements of a vector.
        rng: Decides who is disturbed, and when.
    """

    def __init__(self, tally: Tally, length: int, rng: random.Random) -> None:
        self._tally, self._case, self._length, self._rng = tally, tally.case, length, rng
        self._values = [some_values(length, slot) for slot in range(tally.case.size)]
        self._slots: dict[PeerId, int] = {}
        self._plans: dict[bytes, Plan] = {}
        self._processes: list[Process] = []
        self._last: Plan | None = None
        self._count = 0

    async def start(self) -> None:
        """Starts all processes."""
        await self._add(range(1))
        await self._add(range(1, self._case.size))
        for _ in range(WARM_UP):
            await self._together()

    async def close(self) -> None:
        """Ends all processes."""
        with trio.CancelScope(shield=True):
            for process in self._processes:
                await process.close()
        self._processes.clear()

    async def calm(self) -> None:
        """An undisturbed operation."""
        self._tally.calm.append(await self._together())

    async def disturb(self, *, resume: bool) -> None:
        """An operation in which something happens, and the next one.

        Args:
            resume: Those who are stopped go on afterwards. Else they are replaced, as are those who are killed.
        """
        victims = self._victims()
        survivors = [process for process in self._processes if process not in victims]
        await self._begin(self._processes)
        await trio.sleep(self._rng.uniform(0, statistics.median(self._tally.calm)))
        for victim in victims:
            victim.signal(signal.SIGKILL if self._case.how == "kill" else signal.SIGSTOP)
        answers = await self._answers(survivors)
        self._check(answers)
        assert self._last is not None
        parts = sum(part.stop - part.start for part in self._last.salvaged)
        self._tally.disturbed.append(_seconds(answers))
        without = any(victim.peer not in self._last.members for victim in victims)
        self._tally.redone.append(1 - parts / self._length if without else 0.0)
        if resume:
            await self._resume(victims, survivors)
            return
        for victim in victims:
            await victim.close()
            self._processes.remove(victim)
        await self._add(victim.slot for victim in victims)
        await self._together()

    def _victims(self) -> list[Process]:
        others = self._rng.sample(self._processes, self._case.size)
        if self._case.coordinator:
            assert self._last is not None
            peers = [process.peer for process in self._processes]
            first = coordinators(self._last.run, self._last.revision + 1, peers)[0]
            others.sort(key=lambda process: process.peer != first)
        return others[: self._case.victims]

    async def _add(self, slots: Iterable[int]) -> None:
        """Starts processes, which find the others."""
        addresses = [process.address for process in self._processes]
        added = [await Process.start(slot, self._length, addresses) for slot in slots]
        self._processes += added
        for process in added:
            await process.introduce()
            self._slots[process.peer] = process.slot
        await self._meet(self._processes)

    async def _meet(self, processes: list[Process]) -> None:
        """Waits until these know all of them, and nobody else."""
        for process in processes:
            await process.tell("meet", [other.peer.hex() for other in self._processes])
        for process in processes:
            await process.answer(START)

    async def _together(self) -> float:
        """One operation of all, checked; returns its seconds."""
        await self._begin(self._processes)
        answers = await self._answers(self._processes)
        self._check(answers)
        return _seconds(answers)

    async def _resume(self, victims: list[Process], survivors: list[Process]) -> None:
        """Those who were stopped go on. Unless they had finished, what they have begun becomes the next operation."""
        assert self._last is not None
        over = self._last
        for victim in victims:
            victim.signal(signal.SIGCONT)
        await self._meet(survivors)
        await self._begin(survivors)
        answers: list[Answer] = []

        async def follow(victim: Process) -> None:
            answer = await victim.reduced(HANG)
            if plan_of(answer.plan).revision == over.revision:
                self._check([answer])
                self._tally.apart += plan_of(answer.plan) != over
                await self._begin([victim])
                answer = await victim.reduced(HANG)
            answers.append(answer)

        async with trio.open_nursery() as nursery:  # the next operation waits for all of them
            for victim in victims:
                nursery.start_soon(follow, victim)
        self._check([*answers, *await self._answers(survivors)])

    async def _begin(self, processes: list[Process]) -> None:
        self._count += 1
        for process in processes:
            await process.tell("reduce", 1.0 + (3 * process.slot + self._count) % 7)

    async def _answers(self, processes: list[Process]) -> list[Answer]:
        return [await process.reduced(HANG) for process in processes]

    def _check(self, answers: list[Answer]) -> None:
        """Writes down what is wrong with answers to one operation. All have to have carried out one plan."""
        for answer in answers:
            for plan in map(plan_of, answer.plans):
                self._plans[plan.id] = plan
        self._last = plan = plan_of(answers[0].plan)
        if len({answer.plan for answer in answers}) > 1:
            members = [len(plan_of(answer.plan).members) for answer in answers]
            self._tally.wrong.append(f"operation {plan.revision}: different plans, of {members} members")
            return
        inputs = {peer: self._values[self._slots[peer]] for part in plan.parts for peer in part.members}
        mean = reference(plan, inputs | {peer: self._values[slot] for peer, slot in self._slots.items()}, self._plans)
        expected = hashlib.sha256(vector_bytes(mean)).hexdigest()
        if any(answer.digest != expected for answer in answers):
            self._tally.wrong.append(f"operation {plan.revision}: other bits than those of its plan")
        if not _is_mean(plan, inputs, mean):
            self._tally.wrong.append(f"operation {plan.revision}: not the mean of the recorded contributors")


def _seconds(answers: list[Answer]) -> float:
    return max(answer.ended for answer in answers) - min(answer.began for answer in answers)


def _is_mean(plan: Plan, inputs: dict[PeerId, torch.Tensor], mean: torch.Tensor) -> bool:
    """Whether each part is the mean that its contributors say, computed plainly, at some of its elements."""
    for part in plan.parts:
        some = slice(part.start, part.stop, SAMPLE)
        weighted = [
            inputs[peer][some].double() * weight for peer, weight in zip(part.members, part.weights, strict=True)
        ]
        plain = torch.stack(weighted).sum(0) / sum(part.weights)
        if not torch.allclose(mean[some].double(), plain, rtol=1e-5, atol=1e-5):
            return False
    return True


async def measure(case: Case, mib: int, repeat: int, rng: random.Random) -> Tally:
    """One case. A swarm that hangs is replaced."""
    size = max(1, int(mib * case.scale))
    tally = Tally(case=case, mib=size)
    swarm = Swarm(tally, size << 18, rng)
    try:
        await swarm.start()
        for _ in range(3):
            await swarm.calm()
        for run in range(repeat):
            try:
                await swarm.disturb(resume=case.how == "stop" and run % 2 == 0)
            except* trio.TooSlowError:
                tally.hangs += 1
                await swarm.close()
                await swarm.start()
            await swarm.calm()
    finally:
        await swarm.close()
    return tally


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, help="whom it hits; default: all")
    parser.add_argument("--how", nargs="+", default=list(NOTICED), choices=NOTICED, help="default: both")
    parser.add_argument("--mib", type=float, nargs="+", default=[100, 200], help="size of a vector")
    parser.add_argument("--repeat", type=int, default=20, help="runs of each case")
    parser.add_argument("--quick", action="store_true", help="3 runs of each case, with 20 MiB")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--seed", type=int, default=1, help="of who is disturbed, and when")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        with contextlib.suppress(OSError):
            os.nice(-10)  # what else runs here is not what is measured
            Path("/proc/self/autogroup").write_text("-10")  # where that counts only within a session
        slot, length, *addresses = options.work
        trio.run(work, int(slot), int(length), addresses)
        return 0
    sizes, repeat = ([20], 3) if options.quick else (options.mib, options.repeat)
    load, rows, rng = os.getloadavg()[0], [], random.Random(options.seed)
    print(f"load before: {load:.1f} on {os.cpu_count()} cores; a silent peer is lost after {SILENCE:g} s")
    for case in (case for name in options.cases for case in CASES[name] if case.how in options.how):
        for mib in sizes:
            tally = trio.run(measure, case, mib, repeat, rng)
            rows.append(tally.row())
            show(rows[-1], tally.wrong)
    if options.json:
        print(json.dumps({"bench": "churn", "load": load, "rows": rows}))
    return 0 if all(line["met"] for line in rows) else 1


def show(line: dict[str, object], wrong: list[str]) -> None:
    """Prints what came of one case."""
    print(
        f"{line['case']}: {line['runs']} runs, {line['wrong']} wrong, {line['apart']} apart, {line['hangs']} hangs"
        f"; usual {line['usual_s']} s"
        f"; extra: median {line['extra_median_s']} s, max {line['extra_max_s']} s; without what was redone: "
        f"median {line['beyond_redone_median_s']} s, max {line['beyond_redone_max_s']} s, goal <= {line['limit_s']} s; "
        f"{line['hit']} hit, which redid {line['redone']:.0%}{'' if line['met'] else '  MISSED'}",
        flush=True,
    )
    for problem in wrong:
        print("  " + problem)


if __name__ == "__main__":
    sys.exit(main())

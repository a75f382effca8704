"""Newcomers fetch a state from donors that make rounds meanwhile, all of them processes on this machine.

    python scripts/bench/newcomers.py --quick --json

Two donors with a capped upload train (they sleep, then average vectors as large as the state's parameters) and commit a
new state after each round. After some rounds three newcomers, which take part in no round, fetch the newest state at
once. Goals: the last one has it within 1.2 times what the donors' uplinks need for three states and for what the rounds
have sent meanwhile; and rounds take at most 10 % longer than before. Exit code 1 if one is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import attrs
import torch
import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from allreduce import Everybody, identity_of

from optim import OuterState
from peer.chain import Tip
from peer.history import Rules
from peer.state import CommittedState
from peer.sync import Donor, fetch_history, fetch_state
from protocol.coordinator import RoundTimes
from protocol.courtesy import Courtesy
from protocol.endpoint import Endpoint, Limits
from protocol.rounds import Rounds
from protocol.tcp import TcpTransport
from protocol.transport import Address
from protocol.vectors import vector_bytes

RUN = bytes(31) + b"\x02"
BUFFER = "momentum"
BEFORE = 3  # rounds before newcomers come; the first does not count
LONGEST_FETCH, LONGEST_ROUND = 1.2, 1.1


@attrs.frozen(kw_only=True)
class Setting:
    """What is measured."""

    donors: int
    newcomers: int
    elements: int
    """Of the state's parameters; it has as many of momentum."""
    upload: float
    """Bytes per second of each donor."""
    training: float
    """Seconds between two rounds."""


def say(what: object) -> None:
    """One line for the process that watches."""
    print(json.dumps(what), flush=True)


async def next_line() -> list[int]:
    """What the process that watches says."""
    line: list[int] = json.loads(await trio.to_thread.run_sync(sys.stdin.readline))
    return line


async def join(endpoint: Endpoint, rank: int, ports: list[int]) -> None:
    """Connects to the donors of lower rank."""
    for other, port in enumerate(ports[:rank]):
        peer = identity_of(other).peer_id
        endpoint.learn(peer, Address("127.0.0.1", port))
        await endpoint.connect(peer)


async def donate(rank: int, setting: Setting) -> None:
    """A donor: makes rounds until it is killed, and says of each when it began, when it ended, and what it had sent."""
    torch.set_num_threads(1)
    endpoint = Endpoint(
        identity_of(rank), TcpTransport(), limits=Limits(max_upload=setting.upload), rng=random.Random(rank)
    )
    courtesy = Courtesy(lambda: endpoint.bytes_sent)
    rounds = Rounds(
        endpoint,
        RUN,
        settings=RoundTimes(),
        roster=Everybody(setting.donors),
        report=lambda event: None,
        courtesy=courtesy,
    )
    donor = Donor(endpoint, RUN, "", courtesy=courtesy)
    generator = torch.Generator().manual_seed(1)
    parameters = torch.randn(setting.elements, generator=generator)
    outer = OuterState(parameters, {BUFFER: torch.randn(setting.elements, generator=generator)})
    state = CommittedState.genesis(RUN, outer)
    async with trio.open_nursery() as nursery:
        address: Address = await nursery.start(endpoint.run, Address("127.0.0.1", 0))
        await nursery.start(rounds.run)
        say(address.port)
        await join(endpoint, rank, await next_line())
        while True:
            donor.offer(state)
            header = state.header
            rounds.committed(header.revision, header.digest)
            await trio.sleep(setting.training)
            began = time.perf_counter()
            reduced = await rounds.all_reduce(header.revision + 1, parameters, 1.0, digest=header.digest)
            tip = [header.revision, header.weight, header.digest.hex()]
            say([began, time.perf_counter(), reduced.bytes_sent, tip])
            commit = partial(state.commit, plan=reduced.plan.id, contributions=reduced.plan.contributions)
            state = await trio.to_thread.run_sync(commit, OuterState(reduced.mean, outer.buffers))


async def come(rank: int, setting: Setting) -> None:
    """A newcomer: fetches the state that it is told of, and says when it began and ended, and what it has."""
    torch.set_num_threads(1)
    endpoint = Endpoint(identity_of(rank), TcpTransport(), rng=random.Random(rank))
    donors = [identity_of(other).peer_id for other in range(setting.donors)]
    random.Random(rank).shuffle(donors)
    async with trio.open_nursery() as nursery:
        await nursery.start(endpoint.run, Address("127.0.0.1", 0))
        say(0)
        await join(endpoint, setting.donors, await next_line())
        say(0)
        revision, weight, digest = await next_line()
        tip = Tip(revision, weight, bytes.fromhex(str(digest)))
        began = time.perf_counter()
        rules = Rules(max_weight=1.0, max_members=setting.donors, admits=lambda peer: True)
        compute = trio.to_thread.run_sync
        history = await fetch_history(endpoint, RUN, tip, donors[0], ours=None, rules=rules, compute=compute)
        state = await fetch_state(endpoint, RUN, history, donors, elements=setting.elements, buffers=[BUFFER])
        ended = time.perf_counter()
        rest = CommittedState.seal(history, state.outer)
        right = rest is not None and rest.tip == tip
        say([began, ended, right, hashlib.sha256(vector_bytes(state.outer.parameters)).hexdigest()])
        nursery.cancel_scope.cancel()


class Child:
    """A process of the bench, seen from outside."""

    def __init__(self, kind: str, rank: int, setting: Setting) -> None:
        command = [sys.executable, __file__, "--work", kind, str(rank), json.dumps(attrs.asdict(setting))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def tell(self, what: object) -> None:
        """Says something to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def heard(self) -> list[float]:
        """Its next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process ended with code {self._process.wait()}")
        found: list[float] = json.loads(line)
        return found

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.communicate()


@attrs.frozen
class Round:
    """One round, as a donor tells it."""

    began: float
    ended: float
    sent: int
    tip: tuple[int, float, str]
    """Of the state before."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def measure(setting: Setting) -> dict[str, object]:
    """The figures."""
    children: list[Child] = []
    try:
        donors = [Child("donate", rank, setting) for rank in range(setting.donors)]
        children += donors
        newcomers = [Child("come", setting.donors + number, setting) for number in range(setting.newcomers)]
        children += newcomers
        ports = [child.heard() for child in donors]
        for child in children:
            child.tell(ports)
        for child in newcomers:
            child.heard()  # where it listens
            child.heard()  # it is connected
        before = [_round(donors) for _ in range(BEFORE)][1:]
        for child in newcomers:
            child.tell(before[-1].tip)
        fetched = [child.heard() for child in newcomers]
        ended = max(end for _, end, _, _ in fetched)
        during = [_round(donors)]
        while during[-1].ended < ended:
            during.append(_round(donors))
    finally:
        for child in children:
            child.close()
    return _figures(setting, before, during, fetched)


def _round(donors: list[Child]) -> Round:
    """The next round, by whoever was last."""
    said = [Round(*child.heard()) for child in donors]  # type: ignore[arg-type]
    return max(said, key=lambda one: one.ended)


def _figures(
    setting: Setting, before: list[Round], during: list[Round], fetched: list[list[float]]
) -> dict[str, object]:
    began, ended = min(one[0] for one in fetched), max(one[1] for one in fetched)
    seconds = ended - began
    rounds = sum(one.sent * _overlap(one, began, ended) for one in during)  # of each donor
    bound = (setting.newcomers * 8 * setting.elements / setting.donors + rounds) / setting.upload
    beside = [one.seconds for one in during if _overlap(one, began, ended) == 1]
    usual = statistics.median(one.seconds for one in before)
    longer = (statistics.median(beside) + setting.training) / (usual + setting.training) if beside else math.nan
    right = all(one[2] for one in fetched) and len({one[3] for one in fetched}) == 1
    return {
        "case": f"{setting.newcomers} newcomers, {setting.donors} donors, {8 * setting.elements >> 20} MiB",
        "right": right,
        "seconds": round(seconds, 2),
        "bound": round(bound, 2),
        "ratio": round(seconds / bound, 3),
        "reduce_before": round(usual, 2),
        "reduce_during": [round(one, 2) for one in beside],
        "round_ratio": round(longer, 3),
        "met": right and seconds <= LONGEST_FETCH * bound and longer <= LONGEST_ROUND,
    }


def _overlap(one: Round, began: float, ended: float) -> float:
    """The part of a round that is in a period."""
    return max(0.0, min(one.ended, ended) - max(one.began, began)) / one.seconds


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--mib", type=float, default=100, help="size of the state")
    parser.add_argument("--upload", type=float, default=12.5e6, help="bytes per second of each donor")
    parser.add_argument("--training", type=float, default=5.0, help="seconds between rounds")
    parser.add_argument("--quick", action="store_true", help="a state of 20 MiB, a second between rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        with contextlib.suppress(OSError):
            os.nice(-10)  # what else runs here is not what is measured
            Path("/proc/self/autogroup").write_text("-10")  # where that counts only within a session
        kind, rank, text = options.work
        trio.run(donate if kind == "donate" else come, int(rank), Setting(**json.loads(text)))
        return 0
    mib, training = (20.0, 1.0) if options.quick else (options.mib, options.training)
    setting = Setting(donors=2, newcomers=3, elements=int(mib * (1 << 17)), upload=options.upload, training=training)
    load = os.getloadavg()[0]
    line = measure(setting)
    print(f"load before: {load:.1f} on {os.cpu_count()} cores")
    print(
        f"{line['case']}: {line['seconds']} s, the donors' link bound {line['bound']} s, ratio {line['ratio']}, "
        f"goal <= {LONGEST_FETCH}; reducing took {line['reduce_before']} s before, {line['reduce_during']} s meanwhile"
        f", whole rounds {line['round_ratio']} times as long, goal <= {LONGEST_ROUND}"
        f"{'' if line['right'] else '; WRONG STATES'}{'' if line['met'] else '  MISSED'}"
    )
    if options.json:
        print(json.dumps({"bench": "newcomers", "load": load, "rows": [line]}))
    return 0 if line["met"] else 1


if __name__ == "__main__":
    sys.exit(main())

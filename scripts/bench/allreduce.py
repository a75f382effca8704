"""Measures whole rounds against torch.distributed with gloo, between processes on this machine.

    python scripts/bench/allreduce.py --quick --json

A round of ours is everything from being ready to holding the mean: the coordinator's plan, the encrypted ring, the
commit. Gloo sums in place, unencrypted, among processes that cannot change. Both take turns in one run, with one thread
each for torch, and medians are compared. The time of an operation is that of several, one after the other, from the
first process's start to the last one's end. For a fair reading ours also runs without encryption, which only
this script can do: a copy takes the cipher's place. Exit code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path

import attrs
import torch
import torch.distributed
import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rows import conclude, row
from transport import Usage, forget_peak

from protocol import noise
from protocol.codecs import CodecName
from protocol.coordinator import RoundTimes
from protocol.endpoint import Endpoint
from protocol.identity import Identity, PeerId
from protocol.plan import NO_DIGEST
from protocol.rounds import Rounds
from protocol.tcp import TcpTransport
from protocol.transport import Address, Buffer
from protocol.vectors import vector_bytes

RUN = bytes(31) + b"\x01"
SMALL = 1024  # elements: 4 KiB
SMALL_LIMITS = {2: 5.0, 4: 12.0}  # ms
WARM_UP = 4  # operations: a peer of ours keeps the last results, and uses their memory again from then on
SLACK = 64.0  # MiB that a process may grow by beyond input and result


def some_values(length: int, rank: int) -> torch.Tensor:
    """Values of one process."""
    return torch.randn(length, generator=torch.Generator().manual_seed(rank))


def identity_of(rank: int) -> Identity:
    """Who a process is."""
    return Identity.from_seed(hashlib.sha256(b"%d" % rank).digest())


class Everybody:
    """A roster of all processes from the start."""

    def __init__(self, size: int) -> None:
        self._peers = frozenset(identity_of(rank).peer_id for rank in range(size))

    def partners(self) -> Collection[PeerId]:
        return self._peers

    def expected(self) -> Collection[PeerId]:
        return self._peers

    def arriving(self) -> Collection[PeerId]:
        return ()

    def knows(self, peer: PeerId) -> bool:
        return peer in self._peers

    def woken(self) -> bool:
        return False

    def doubt(self, peer: PeerId, seconds: float) -> None:
        raise RuntimeError(f"{peer.short} was silent for {seconds:g} s")


class Copy:
    """What takes the place of AES-GCM to see what that costs: copies, and leaves room for a tag."""

    def __init__(self, key: bytes) -> None:
        self._tag = bytes(noise.TAG_SIZE)

    def encrypt(self, nonce: bytes, data: Buffer, associated_data: bytes | None) -> bytes:
        return bytes(data) + self._tag

    def decrypt(self, nonce: bytes, data: Buffer, associated_data: bytes | None) -> bytes:
        return bytes(data[: -noise.TAG_SIZE])

    def encrypt_into(self, nonce: bytes, data: Buffer, associated_data: bytes | None, buffer: memoryview) -> None:
        buffer[: len(data)] = data

    def decrypt_into(self, nonce: bytes, data: memoryview, associated_data: bytes | None, buffer: memoryview) -> None:
        buffer[:] = data[: -noise.TAG_SIZE]


class Ours:
    """A peer of ours that takes part in rounds."""

    def __init__(self, rank: int, size: int, host: str, codec: CodecName) -> None:
        self._rank, self._size, self._host = rank, size, host
        self._endpoint = Endpoint(identity_of(rank), TcpTransport(), rng=random.Random(rank))
        self._rounds = Rounds(
            self._endpoint,
            RUN,
            settings=RoundTimes(),
            roster=Everybody(size),
            report=lambda event: None,
            codec=codec,
        )
        self._revision, self._digest = 0, NO_DIGEST
        self._values = self._result = torch.empty(0)

    async def start(self, nursery: trio.Nursery) -> int:
        """Listens; returns the port."""
        address: Address = await nursery.start(self._endpoint.run, Address(self._host, 0))
        await nursery.start(self._rounds.run)
        self._rounds.committed(self._revision, self._digest)
        return address.port

    async def join(self, addresses: list[tuple[str, int]]) -> None:
        """Connects to the processes of lower rank."""
        for rank, (host, port) in enumerate(addresses[: self._rank]):
            peer = identity_of(rank).peer_id
            self._endpoint.learn(peer, Address(host, port))
            await self._endpoint.connect(peer)

    async def fill(self, length: int) -> None:
        """Prepares the input."""
        self._values = some_values(length, self._rank)

    async def reduce(self, count: int) -> tuple[float, float]:
        """So many rounds, one after the other: when they began and ended."""
        self._result = torch.empty(0)  # or its memory could not be used again
        began = time.perf_counter()
        for _ in range(count):
            reduced = await self._rounds.all_reduce(self._revision + 1, self._values, 1.0, digest=self._digest)
            self._revision += 1
            self._digest = hashlib.sha256(self._digest + reduced.plan.id).digest()
            self._rounds.committed(self._revision, self._digest)
        ended = time.perf_counter()
        self._result = reduced.mean
        return began, ended

    async def digest(self) -> str:
        """Of the last result."""
        return hashlib.sha256(vector_bytes(self._result)).hexdigest()

    async def sent(self) -> int:
        """Bytes sent to all others so far, as they are on the connections."""
        return self._endpoint.bytes_sent


class Gloo:
    """A process of torch.distributed."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._values = torch.empty(0)

    async def start(self, nursery: trio.Nursery) -> int:
        """Nothing to do."""
        return 0

    async def join(self, rendezvous: str) -> None:
        """Meets the others by a file."""
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=self._rank, world_size=self._size
        )

    async def fill(self, length: int) -> None:
        """Prepares the input, which will be overwritten by sums of sums."""
        self._values = some_values(length, self._rank)

    async def reduce(self, count: int) -> tuple[float, float]:
        """As `Ours.reduce`."""
        began = time.perf_counter()
        for _ in range(count):
            torch.distributed.all_reduce(self._values)
        return began, time.perf_counter()

    async def digest(self) -> str:
        """Of the last result."""
        return hashlib.sha256(vector_bytes(self._values)).hexdigest()


async def work(kind: str, rank: int, size: int, host: str) -> None:
    """A child process: does what lines of JSON say, [name, argument, …], and answers each with one."""
    torch.set_num_threads(1)
    if kind == "plain":
        kind, noise.AESGCM = "fp32", Copy  # type: ignore[misc,assignment]
    member = Gloo(rank, size) if kind == "gloo" else Ours(rank, size, host, typing.cast(CodecName, kind))
    async with trio.open_nursery() as nursery:
        print(json.dumps(await member.start(nursery)), flush=True)
        async for line in trio.wrap_file(sys.stdin):
            name, *arguments = json.loads(line)
            result: object = None
            if name == "usage":
                result = attrs.astuple(Usage.now())
            elif name == "forget_peak":
                forget_peak()
            else:
                doing: Callable[..., Awaitable[object]] = getattr(type(member), name)
                result = await doing(member, *arguments)
            print(json.dumps(result), flush=True)
        nursery.cancel_scope.cancel()


class Group:
    """Processes that reduce together.

    Args:
        kind: "gloo", a codec of ours, or "plain" for fp32 without encryption.
        size: How many.
        directory: For files.
        places: The address of each, and the beginning of the command that runs it there; here if there are none.
    """

    def __init__(self, kind: str, size: int, directory: str, places: Sequence[tuple[str, Sequence[str]]] = ()) -> None:
        self.values: dict[str, list[float]] = {}
        self._processes: list[subprocess.Popen[str]] = []
        places = places or [("127.0.0.1", ())] * size
        for rank, (host, prefix) in enumerate(places):
            command = [*prefix, sys.executable, __file__, "--work", kind, str(rank), str(size), host]
            self._processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        ports = [self._answer(process) for process in self._processes]
        addresses = [(host, port) for (host, _), port in zip(places, ports, strict=True)]
        self.do("join", str(Path(directory) / f"gloo{size}") if kind == "gloo" else addresses)

    def do(self, *what: object) -> list[object]:
        """Has all processes do something at once; returns the results."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(what) + "\n")
            process.stdin.flush()
        return [self._answer(process) for process in self._processes]

    def usage(self) -> list[Usage]:
        """What each process has used so far."""
        return [Usage(*usage) for usage in self.do("usage")]  # type: ignore[misc]

    def reduce(self, name: str, length: int, count: int) -> None:
        """Measures so many operations: seconds of one, and CPU seconds of one for a process, on average."""
        self.do("fill", length)
        self.time(WARM_UP)
        before = self.usage()
        seconds = self.time(count)
        cpu = statistics.fmean(end.cpu - start.cpu for start, end in zip(before, self.usage(), strict=True))
        self.check()
        self._add(name, seconds)
        self._add(name + "/cpu", cpu / count)

    def time(self, count: int) -> float:
        """Seconds of one operation, of so many one after the other."""
        times: list[tuple[float, float]] = self.do("reduce", count)  # type: ignore[assignment]
        return (max(end for _, end in times) - min(began for began, _ in times)) / count

    def check(self) -> None:
        """Makes sure that all hold the same result, bit for bit."""
        if len(set(self.do("digest"))) != 1:
            raise RuntimeError("the processes hold different results")

    def growth(self, length: int) -> float:
        """MiB by which the largest process grows at most during one operation."""
        self.do("fill", length)
        self.do("forget_peak")
        before = self.usage()
        self.time(1)
        return max(end.peak - start.resident for start, end in zip(before, self.usage(), strict=True))

    def median(self, name: str) -> float:
        """Of all repetitions."""
        return statistics.median(self.values[name])

    def close(self) -> None:
        """Ends all processes."""
        for process in self._processes:
            process.kill()
            process.communicate()

    def _add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)

    def _answer(self, process: subprocess.Popen[str]) -> object:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process ended with code {process.wait()}")
        return json.loads(line)


def measure(size: int, mib: int, repetitions: int, count: int, small: int) -> list[dict[str, object]]:
    """The rows for so many processes."""
    length = mib << 18
    groups: list[Group] = []
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        for kind in ("fp32", "gloo", "int8", "plain"):
            groups.append(Group(kind, size, directory))
            stack.callback(groups[-1].close)
        ours, gloo, encoded, plain = groups
        growth = ours.growth(length)
        for _ in range(repetitions):
            for group in groups:
                group.reduce("large", length, count)
        for _ in range(repetitions):
            for group in (ours, gloo):
                group.reduce("small", SMALL, small)
    case, small_case = f"{size} processes, {mib} MiB", f"{size} processes, 4 KiB"
    milliseconds = 1e3 * ours.median("small")
    allowed, moved = mib + SLACK, 2 * (size - 1) / size * length * 4 / 1e6
    rate, exact_rate = moved / encoded.median("large"), moved / ours.median("large")
    return [
        row(case, ours.median("large"), gloo.median("large"), "s", "<= 1.5", "gloo"),
        row(f"{case}, CPU of one", ours.median("large/cpu"), gloo.median("large/cpu"), "s", "", "gloo"),
        row(f"{case}, without encryption", plain.median("large"), gloo.median("large"), "s", "", "gloo"),
        row(
            f"{case}, without encryption, CPU of one",
            plain.median("large/cpu"),
            gloo.median("large/cpu"),
            "s",
            "",
            "gloo",
        ),
        row(f"{case}, growth, result included", growth, allowed, "MiB", "<= 1", "what is allowed"),
        row(f"{case}, int8, effective bus rate", rate, exact_rate, "MB/s", ">= 1.3", "fp32"),
        row(small_case, milliseconds, SMALL_LIMITS[size], "ms", "<= 1", "what is allowed"),
        row(small_case, milliseconds, 1e3 * gloo.median("small"), "ms", "", "gloo"),
    ]


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="half a minute in place of two")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4], choices=SMALL_LIMITS, help="processes")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        with contextlib.suppress(OSError):
            os.nice(-10)  # what else runs here is not what is measured
            Path("/proc/self/autogroup").write_text("-10")  # where that counts only within a session
        kind, rank, size, host = options.work
        trio.run(work, kind, int(rank), int(size), host)
        return 0
    rows = (
        line
        for size in options.sizes
        for line in (measure(size, 100, 3, 3, 50) if options.quick else measure(size, 100, 9, 5, 200))
    )
    return conclude("allreduce", rows, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())

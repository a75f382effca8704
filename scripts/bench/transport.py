"""Measures the encrypted transport against plain trio sockets, between two processes on this machine.

    python scripts/bench/transport.py --quick --json

The rival does the same over a bare TCP socket of trio, with the same socket options, with reads and writes of the same
size, out of and into buffers as large: no encryption, no streams, no credit. Both take turns in one run, and medians
are compared. Exit code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import attrs
import trio
from rows import Row, conclude, row

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from protocol.connection import LARGEST_WRITE
from protocol.endpoint import Endpoint, Limits, Stream
from protocol.identity import Identity
from protocol.lane_policy import MAX_LANES
from protocol.pacing import LARGEST_BURST
from protocol.records import MAX_PLAINTEXT
from protocol.tcp import TcpTransport, set_options
from protocol.transport import Address
from protocol.wire import message

CHUNK = 16 << 20
PIECE = 1 << 20  # what the slow reader takes at a time
PAUSE = 0.005  # seconds, between the slow reader's pieces
SLACK = 64  # MiB that a process may grow by while it serves a slow reader
SERVER, CLIENT = bytes(31) + b"\x01", bytes(31) + b"\x02"


@message("bench.push")
class Push:
    """Announces raw bytes: a multiple of `CHUNK`."""

    size: int
    slow: bool


@message("bench.ping")
class Ping:
    """A question, and its answer."""

    number: int


@attrs.frozen
class Usage:
    """What a process has used."""

    cpu: float
    """Seconds."""
    resident: float
    """MiB, now."""
    peak: float
    """MiB, since `forget_peak` where the system knows that, else ever."""

    @classmethod
    def now(cls) -> Usage:
        """This process's."""
        try:
            lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            resident, peak = (int(lines[key].split()[0]) / 1024 for key in ("VmRSS", "VmHWM"))
        except FileNotFoundError:
            resident = peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return cls(time.process_time(), resident, peak)


def forget_peak() -> None:
    """Starts measuring the peak anew, where that is possible."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def some_bytes() -> bytearray:
    """A chunk. Zeros would be one page, mapped many times, and always in the cache."""
    chunk, source = bytearray(CHUNK), random.Random(1)
    for start in range(0, CHUNK, 1 << 12):  # in small pieces: no memory is left over that would hide growth
        chunk[start : start + (1 << 12)] = source.randbytes(1 << 12)
    return chunk


def set_options_for_bulk(sock: trio.socket.SocketType, congestion: str) -> None:
    """What a connection of ours sets for itself, when it is as fast as this."""
    set_options(sock, congestion)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, LARGEST_BURST)


class RawServer:
    """Each connection starts with one byte: "b" takes bytes until the end, "r" echoes 8 bytes at a time."""

    def __init__(self, host: str, congestion: str) -> None:
        self._view = memoryview(some_bytes())
        self._host = host
        self._congestion = congestion

    async def listen(self, nursery: trio.Nursery) -> int:
        """Starts; returns the port."""
        listeners = await trio.open_tcp_listeners(0, host=self._host)
        nursery.start_soon(trio.serve_listeners, self._handle, listeners)
        port: int = listeners[0].socket.getsockname()[1]
        return port

    async def _handle(self, stream: trio.SocketStream) -> None:
        set_options_for_bulk(stream.socket, self._congestion)
        kind = await stream.receive_some(1)
        if kind == b"b":
            filled, size = 0, 1
            while size:
                filled %= CHUNK
                size = await stream.socket.recv_into(self._view[filled : filled + MAX_PLAINTEXT])
                filled += size
            await stream.send_all(b"k")
        while data := await stream.receive_some(8):
            await stream.send_all(data)


class OurServer:
    """An endpoint that takes pushes and answers pings."""

    def __init__(self, host: str, congestion: str | None, lanes: int) -> None:
        self._buffer = some_bytes()
        self._host = host
        self._transport = TcpTransport(congestion=congestion)
        self._limits = Limits(max_lanes=lanes)

    async def listen(self, nursery: trio.Nursery) -> int:
        """Starts; returns the port."""
        endpoint = Endpoint(Identity.from_seed(SERVER), self._transport, limits=self._limits, rng=random.Random(1))
        endpoint.handle(Push, self._take)
        endpoint.handle(Ping, self._answer)
        address: Address = await nursery.start(endpoint.run, Address(self._host, 0))
        return address.port

    async def _take(self, request: Push, stream: Stream) -> Ping:
        view = memoryview(self._buffer)
        step = PIECE if request.slow else CHUNK
        for _ in range(request.size // step):
            await stream.receive_into(view[:step])
            if request.slow:
                await trio.sleep(PAUSE)
        return Ping(request.size)

    async def _answer(self, request: Ping, stream: Stream) -> Ping:
        return request


class RawClient:
    """What `OurClient` does, over plain sockets."""

    def __init__(self, host: str, port: int, congestion: str) -> None:
        self._host = host
        self._port = port
        self._congestion = congestion
        self._data = memoryview(some_bytes())

    async def start(self, nursery: trio.Nursery) -> None:
        """Nothing to do: every measurement makes its own connection."""

    async def bulk(self, size: int) -> float:
        """Seconds for so many bytes."""
        async with await self._connect(b"b") as stream:
            began = time.perf_counter()
            for start in (start for _ in range(size // CHUNK) for start in range(0, CHUNK, LARGEST_WRITE)):
                rest = self._data[start : start + LARGEST_WRITE]
                while rest:
                    rest = rest[await stream.socket.send(rest) :]
            await stream.send_eof()
            await stream.receive_some(1)
            return time.perf_counter() - began

    async def flow(self, seconds: float) -> tuple[int, float]:
        """Bytes that the other side has taken, after so many seconds, and the seconds that it took."""
        async with await self._connect(b"b") as stream:
            began, sent = time.perf_counter(), 0
            with trio.move_on_after(seconds):
                while True:
                    sent += await stream.socket.send(self._data[:MAX_PLAINTEXT])
            await stream.send_eof()
            await stream.receive_some(1)
            return sent, time.perf_counter() - began

    async def requests(self, count: int) -> list[float]:
        """Seconds of each of so many round trips, one after the other."""
        times = []
        async with await self._connect(b"r") as stream:
            for _ in range(count):
                began = time.perf_counter()
                await stream.send_all(bytes(8))
                await stream.receive_some(8)
                times.append(time.perf_counter() - began)
        return times

    async def connect(self) -> None:
        """A new connection, and a round trip on it."""
        async with await self._connect(b"r") as stream:
            await stream.send_all(bytes(8))
            await stream.receive_some(8)

    async def _connect(self, kind: bytes) -> trio.SocketStream:
        stream = await trio.open_tcp_stream(self._host, self._port)
        set_options_for_bulk(stream.socket, self._congestion)
        await stream.send_all(kind)
        return stream


class OurClient:
    """An endpoint that is connected to the server."""

    def __init__(self, host: str, port: int, congestion: str | None, lanes: int) -> None:
        self._address = Address(host, port)
        self._data = some_bytes()
        transport = TcpTransport(congestion=congestion)
        limits = Limits(max_lanes=lanes)
        self._endpoint = Endpoint(Identity.from_seed(CLIENT), transport, limits=limits, rng=random.Random(2))
        self._peer = Identity.from_seed(SERVER).peer_id

    async def start(self, nursery: trio.Nursery) -> None:
        """Connects."""
        self._endpoint.learn(self._peer, self._address)
        await nursery.start(self._endpoint.run, None)
        await self._endpoint.connect(self._peer)

    async def bulk(self, size: int, *, slow: bool = False) -> float:
        """Seconds for so many bytes, to a reader that takes them as they come or slowly."""
        began = time.perf_counter()
        async with self._endpoint.open(self._peer, Push(size, slow), bulk=True) as stream:
            for _ in range(size // CHUNK):
                await stream.send_bytes(self._data)
            await stream.receive(Ping)
        return time.perf_counter() - began

    async def requests(self, count: int) -> list[float]:
        """Seconds of each of so many requests, one after the other."""
        times = []
        for number in range(count):
            began = time.perf_counter()
            await self._endpoint.request(self._peer, Ping(number), Ping)
            times.append(time.perf_counter() - began)
        return times

    async def connect(self) -> None:
        """A new connection, and a request on it."""
        self._endpoint.disconnect(self._peer, "measured")
        await self._endpoint.request(self._peer, Ping(0), Ping)


async def loaded(client: RawClient | OurClient, size: int, count: int) -> list[float]:
    """Round trips while so many bytes flow, again and again."""

    async def flow() -> None:
        while True:
            await client.bulk(size)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(flow)
        times = await client.requests(count)
        nursery.cancel_scope.cancel()
    return times


async def paced(client: OurClient, size: int, interval: float) -> tuple[float, list[float]]:
    """Bytes per second of so many, and round trips at intervals meanwhile."""
    times: list[float] = []

    async def ping() -> None:
        times.extend(await client.requests(1))

    async with trio.open_nursery() as nursery:

        async def beat() -> None:
            while True:
                nursery.start_soon(ping)
                await trio.sleep(interval)

        nursery.start_soon(beat)
        seconds = await client.bulk(size)
        nursery.cancel_scope.cancel()
    return size / seconds, times


async def work(kind: str, host: str, port: int | None) -> None:
    """A child process: does what lines of JSON say, [name, argument, …], and answers each with one."""
    async with trio.open_nursery() as nursery:
        client: RawClient | OurClient | None = None
        kind, *named = kind.split("/")
        congestion = named[0] if named else "cubic"  # as connections within one machine
        lanes = int(named[1]) if named[1:] else MAX_LANES
        if port is None:
            server = RawServer(host, congestion) if kind == "raw" else OurServer(host, congestion, lanes)
            port = await server.listen(nursery)
        else:
            raw = kind == "raw"
            client = RawClient(host, port, congestion) if raw else OurClient(host, port, congestion, lanes)
            await client.start(nursery)
        print(json.dumps(port), flush=True)
        async for line in trio.wrap_file(sys.stdin):
            name, *arguments = json.loads(line)
            result: object = None
            if name == "usage":
                result = attrs.astuple(Usage.now())
            elif name == "forget_peak":
                forget_peak()
            elif client is not None:
                doing: Callable[..., Awaitable[object]]
                doing = {"slow": _slow, "loaded": loaded, "paced": paced}.get(name) or getattr(type(client), name)
                result = await doing(client, *arguments)
            print(json.dumps(result), flush=True)
        nursery.cancel_scope.cancel()


async def _slow(client: OurClient, size: int) -> float:
    return await client.bulk(size, slow=True)


class Child:
    """A process that does `work`: a server on this host, or with a port a client of the server there.

    Args:
        kind: "raw" or "ours"; then, each after a slash, the name of a congestion control and the most lanes.
    """

    def __init__(self, kind: str, host: str = "127.0.0.1", port: int | None = None, prefix: Sequence[str] = ()) -> None:
        command = [*prefix, sys.executable, __file__, "--work", kind, host, *([] if port is None else [str(port)])]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port: int = self._answer()

    def do(self, *what: object) -> object:
        """Has the process do something; returns the result."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def usage(self) -> Usage:
        """What it has used so far."""
        return Usage(*self.do("usage"))  # type: ignore[misc]

    def _answer(self) -> int:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process ended with code {self.process.wait()}")
        answer: int = json.loads(line)
        return answer


@attrs.define
class Side:
    """A server and a client, and what was measured with them."""

    server: Child
    client: Child
    values: dict[str, list[float]] = attrs.field(factory=dict)

    @classmethod
    def start(cls, kind: str) -> Side:
        """Starts both processes."""
        server = Child(kind)
        return cls(server, Child(kind, port=server.port))

    def measure(self, size: int, pings: int, connects: int) -> None:
        """One repetition of everything that both sides do."""
        before = self.client.usage().cpu, self.server.usage().cpu
        self._add("bulk", size / 1e6 / float(self.client.do("bulk", size)))  # type: ignore[arg-type]
        after = self.client.usage().cpu, self.server.usage().cpu
        for name, start, end in zip(("sender", "receiver"), before, after, strict=True):
            self._add(name, (end - start) * 2**30 / size)
        times: list[float] = self.client.do("requests", pings)  # type: ignore[assignment]
        self._add("requests", pings / sum(times))
        self._add("loaded", 1e3 * statistics.median(self.client.do("loaded", size, pings // 5)))  # type: ignore[call-overload]
        began = time.perf_counter()
        for _ in range(connects):
            self.client.do("connect")
        self._add("connect", (time.perf_counter() - began) / connects * 1e3)

    def growth(self, size: int) -> float:
        """MiB by which the larger process grows at most while so many bytes go to a slow reader."""
        idle = []
        for child in (self.client, self.server):
            child.do("forget_peak")
            idle.append(child.usage().resident)
        self.client.do("slow", size)
        return max(child.usage().peak - before for child, before in zip((self.client, self.server), idle, strict=True))

    def median(self, name: str) -> float:
        """Of all repetitions."""
        return statistics.median(self.values[name])

    def close(self) -> None:
        """Ends both processes."""
        for child in (self.client, self.server):
            child.process.kill()
            child.process.communicate()

    def _add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)


def measure(size: int, repetitions: int, pings: int, connects: int) -> Iterator[Row]:
    """All rows."""
    sides: list[Side] = []
    try:
        sides = [Side.start("raw"), Side.start("ours")]
        raw, ours = sides
        for _ in range(repetitions):
            for side in sides:
                side.measure(size, pings, connects)
        sides.append(Side.start("ours"))  # which has no memory yet that earlier transfers left to it
        growth = sides[-1].growth(size)
    finally:
        for side in sides:
            side.close()
    cases = (
        ("bulk", f"one stream, {size >> 20} MiB", "MB/s", ">= 0.6"),
        ("sender", "sender's CPU time for 1 GiB", "s", ""),
        ("receiver", "receiver's CPU time for 1 GiB", "s", ""),
        ("requests", "requests, one after the other", "1/s", ">= 0.05"),
        ("loaded", "median round trip while bulk data flows", "ms", ""),
        ("connect", "connection and first answer", "ms", "<= 60"),
    )
    for key, case, unit, goal in cases:
        yield row(case, ours.median(key), raw.median(key), unit, goal)
    yield row(f"growth with a slow reader, {size >> 20} MiB", growth, SLACK, "MiB", "<= 1", "what is allowed")


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="a few seconds in place of a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        with contextlib.suppress(PermissionError):
            os.nice(-10)  # what else runs here is not what is measured
        kind, host, *port = options.work
        trio.run(work, kind, host, int(port[0]) if port else None)
        return 0
    rows = measure(128 << 20, 5, 200, 5) if options.quick else measure(1 << 30, 5, 2000, 10)
    return conclude("transport", rows, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())

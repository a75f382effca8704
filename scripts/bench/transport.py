"""Measures the encrypted transport against plain trio sockets, between two processes on this machine.

    python scripts/bench/transport.py --quick --json

The rival does the same over a bare TCP socket of trio: no encryption, no streams, no credit. Exit code 1 if a goal is
missed.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from protocol.endpoint import Endpoint, Stream
from protocol.identity import Identity
from protocol.tcp import TcpTransport
from protocol.transport import Address
from protocol.wire import message

CHUNK = 16 << 20
GOALS = {"bulk": 0.4, "requests": 0.05, "connect": 60.0}
SERVER, CLIENT = bytes(31) + b"\x01", bytes(31) + b"\x02"


@message("bench.push")
class Push:
    """Announces chunks of `CHUNK` raw bytes."""

    chunks: int


@message("bench.ping")
class Ping:
    """A question, and its answer."""

    number: int


async def serve_raw() -> None:
    """Each connection starts with one byte: "b" takes bytes until the end, "r" echoes 8 bytes at a time."""

    async def handle(stream: trio.SocketStream) -> None:
        kind = await stream.receive_some(1)
        if kind == b"b":
            view = memoryview(bytearray(1 << 20))
            while await stream.socket.recv_into(view):
                pass
            await stream.send_all(b"k")
        while data := await stream.receive_some(8):
            await stream.send_all(data)

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    print(listeners[0].socket.getsockname()[1], flush=True)
    await trio.serve_listeners(handle, listeners)


async def serve_ours() -> None:
    """An endpoint that takes pushes and answers pings."""

    async def take(request: Push, stream: Stream) -> Ping:
        buffer = bytearray(CHUNK)
        for _ in range(request.chunks):
            await stream.receive_into(buffer)
        return Ping(request.chunks)

    async def answer(request: Ping, stream: Stream) -> Ping:
        return request

    endpoint = Endpoint(Identity.from_seed(SERVER), TcpTransport(), rng=random.Random(1))
    endpoint.handle(Push, take)
    endpoint.handle(Ping, answer)
    async with trio.open_nursery() as nursery:
        address = await nursery.start(endpoint.run, Address("127.0.0.1", 0))
        print(address.port, flush=True)


async def measure_raw(port: int, chunks: int, pings: int, connects: int) -> dict[str, float]:
    """Bytes, round trips and connections per second of plain sockets."""
    data = bytes(CHUNK)
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(b"b")
        began = time.perf_counter()
        for _ in range(chunks):
            await stream.send_all(data)
        await stream.send_eof()
        await stream.receive_some(1)
        bulk = chunks * CHUNK / (time.perf_counter() - began)
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(b"r")
        began = time.perf_counter()
        for _ in range(pings):
            await stream.send_all(bytes(8))
            await stream.receive_some(8)
        requests = pings / (time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(connects):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(b"r" + bytes(8))
            await stream.receive_some(8)
    connect = (time.perf_counter() - began) / connects
    return {"bulk": bulk, "requests": requests, "connect": connect}


async def measure_ours(port: int, chunks: int, pings: int, connects: int) -> dict[str, float]:
    """The same of an endpoint; a new connection is measured with one request on it."""
    endpoint = Endpoint(Identity.from_seed(CLIENT), TcpTransport(), rng=random.Random(2))
    peer = Identity.from_seed(SERVER).peer_id
    endpoint.learn(peer, Address("127.0.0.1", port))
    data = bytes(CHUNK)
    async with trio.open_nursery() as nursery:
        await nursery.start(endpoint.run, None)
        await endpoint.connect(peer)
        began = time.perf_counter()
        async with endpoint.open(peer, Push(chunks), bulk=True) as stream:
            for _ in range(chunks):
                await stream.send_bytes(data)
            await stream.receive(Ping)
        bulk = chunks * CHUNK / (time.perf_counter() - began)
        began = time.perf_counter()
        for number in range(pings):
            await endpoint.request(peer, Ping(number), Ping)
        requests = pings / (time.perf_counter() - began)
        began = time.perf_counter()
        for number in range(connects):
            endpoint.disconnect(peer, "measured")
            await endpoint.request(peer, Ping(number), Ping)
        connect = (time.perf_counter() - began) / connects
        nursery.cancel_scope.cancel()
    return {"bulk": bulk, "requests": requests, "connect": connect}


def against(kind: str, measure: Callable[..., Awaitable[dict[str, float]]], *arguments: int) -> dict[str, float]:
    """Runs a measurement against a server process of its own."""
    command = [sys.executable, __file__, "--serve", kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            return trio.run(measure, port, *arguments)
        finally:
            server.kill()


def row(case: str, key: str, ours: float, rival: float, unit: str) -> dict[str, object]:
    """One line of the result."""
    goal = GOALS[key]
    better = "<=" if key == "connect" else ">="
    return {
        "case": case,
        "ours": round(ours, 3),
        "rival": round(rival, 3),
        "rival_name": "plain trio socket",
        "unit": unit,
        "ratio": round(ours / rival, 3),
        "goal": f"{better} {goal:g}",
    }


def met(line: dict[str, object]) -> bool:
    """Whether a line's goal was reached."""
    better, goal = str(line["goal"]).split()
    ratio = float(str(line["ratio"]))
    return ratio <= float(goal) if better == "<=" else ratio >= float(goal)


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="a few seconds in place of half a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--serve", choices=["raw", "ours"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        trio.run({"raw": serve_raw, "ours": serve_ours}[options.serve])
        return 0
    sizes = (32, 1000, 50) if options.quick else (256, 10_000, 500)
    raw = against("raw", measure_raw, *sizes)
    ours = against("ours", measure_ours, *sizes)
    rows = [
        row(f"one stream, {sizes[0] * CHUNK >> 20} MiB", "bulk", ours["bulk"] / 1e6, raw["bulk"] / 1e6, "MB/s"),
        row("requests, one after the other", "requests", ours["requests"], raw["requests"], "1/s"),
        row("connection and first answer", "connect", ours["connect"] * 1e3, raw["connect"] * 1e3, "ms"),
    ]
    for line in rows:
        verdict = "" if met(line) else "  MISSED"
        print(f"{line['case']}: {line['ours']} {line['unit']}, plain {line['rival']}, goal {line['goal']}{verdict}")
    if options.json:
        print(json.dumps({"bench": "transport", "rows": rows}))
    return 0 if all(map(met, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())

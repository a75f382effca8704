"""Measures bulk data and requests together over an emulated line, where the system lets us.

    sudo python scripts/bench/link.py --quick --json
    sudo python scripts/bench/link.py --quick --rtt 100 --loss 1
    sudo python scripts/bench/link.py --quick --busy 4

The line has 100 Mbit/s and a queue of 200 ms. A transfer has to fill it while the round trip of a request, made every
50 ms, stays close to the line's own: with lanes for the bulk data, and on one connection for everything. Where packets
are lost, a bare TCP connection with cubic is measured too, and lanes with bbr have to reach ten times its rate or 80 %
of the line. With busy processes beside them on the same machine, as nice as they are, a transfer has to reach 70 % of
what it reaches without. Exit code 1 if a goal is missed; 0 if there can be no network namespaces, which it says.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from rows import Row, conclude, row  # noqa: E402
from transport import CHUNK, Child  # noqa: E402

from protocol.lane_policy import MAX_LANES  # noqa: E402
from tests.net.topology import Internet, Link, missing, sweep  # noqa: E402

RATE = 100.0  # Mbit/s
QUEUE = 200.0  # ms
INTERVAL = 0.05  # seconds between requests
ALONE = 20.0  # seconds that the bare connection gets
SPIN = "import os\nos.nice(-10)\nwhile True:\n    pass"  # as nice as those that are measured


@attrs.frozen
class Line:
    """The line, and how much to send over it."""

    rtt: float
    """ms."""
    loss: float
    """Percent of the packets, each way."""
    size: int
    """Bytes."""


def measure(line: Line, congestion: str, lanes: int) -> tuple[float, list[float], float]:
    """The transfer's rate in Mbit/s, the requests' round trips in ms, and their median before the transfer."""
    with tempfile.TemporaryDirectory() as directory, Internet(Path(directory)) as internet:
        client, children = _pair(internet, line, f"ours/{congestion}/{lanes}")
        try:
            idle = 1e3 * statistics.median(client.do("requests", 20))  # type: ignore[call-overload]
            rate, times = client.do("paced", line.size, INTERVAL)  # type: ignore[misc]
        finally:
            _end(children)
    return rate * 8 / 1e6, [1e3 * seconds for seconds in times], idle


def alone(line: Line) -> float:
    """The rate of a bare TCP connection with cubic, in Mbit/s."""
    with tempfile.TemporaryDirectory() as directory, Internet(Path(directory)) as internet:
        client, children = _pair(internet, line, "raw/cubic")
        try:
            sent, seconds = client.do("flow", ALONE)  # type: ignore[misc]
        finally:
            _end(children)
    return float(sent * 8 / seconds / 1e6)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes compute meanwhile."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def busy_rows(line: Line, congestion: str, lanes: int, count: int) -> list[dict[str, object]]:
    """What is measured without and with so many busy processes."""
    idle, _, _ = measure(line, congestion, lanes)
    with busy(count):
        rate, times, _ = measure(line, congestion, lanes)
    where = f"{'lanes' if lanes else 'one connection'}, {congestion}, {count} busy processes"
    return [
        row(f"{where}: bulk", rate, idle, "Mbit/s", ">= 0.7", "without"),
        row(f"{where}: median round trip", statistics.median(times), line.rtt, "ms", "", "the line"),
    ]


def _pair(internet: Internet, line: Line, kind: str) -> tuple[Child, list[Child]]:
    near = internet.host("near")
    access = Link(rate=(RATE, RATE), delay=line.rtt / 2, queue=QUEUE, loss=(line.loss, line.loss))
    far = internet.host("far", link=access)
    children: list[Child] = []
    try:
        children.append(Child(kind, near.address, prefix=near.namespace.command()))
        children.append(Child(kind, near.address, children[0].port, prefix=far.namespace.command()))
    except BaseException:
        _end(children)
        raise
    return children[1], children


def _end(children: list[Child]) -> None:
    for child in children:
        child.process.kill()
        child.process.communicate()


def rows_of(line: Line, congestion: str, lanes: int, single: float | None) -> list[dict[str, object]]:
    """What is measured with one congestion control.

    Args:
        line: See `Line`.
        congestion: Its name.
        lanes: The most lanes.
        single: Mbit/s of a bare connection with cubic, if that was measured.
    """
    rate, times, idle = measure(line, congestion, lanes)
    where = f"{'lanes' if lanes else 'one connection'}, {congestion}, {line.rtt:g} ms, {line.loss:g} % loss"
    high = statistics.quantiles(times, n=20)[-1]
    rows = [row(f"{where}: median round trip without bulk", idle, line.rtt, "ms", "", "the line")]
    if single is None:
        return [
            *rows,
            row(f"{where}: bulk", rate, RATE, "Mbit/s", ">= 0.85", "the line"),
            row(f"{where}: median round trip", statistics.median(times), line.rtt, "ms", "<= 1.2", "the line"),
            row(f"{where}: 95th percentile", high, line.rtt, "ms", "<= 2", "the line"),
        ]
    # With cubic, eight lanes are eight times one connection at best: the goal is for what is used where it exists.
    enough = rate >= 0.8 * RATE or not lanes or congestion != "bbr"
    return [
        *rows,
        row(f"{where}: bulk", rate, single, "Mbit/s", "" if enough else ">= 10", "a bare cubic connection"),
        row(f"{where}: bulk", rate, RATE, "Mbit/s", "", "the line"),
        row(f"{where}: median round trip", statistics.median(times), line.rtt, "ms", "", "the line"),
        row(f"{where}: 95th percentile", high, line.rtt, "ms", "", "the line"),
    ]


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="a few seconds in place of a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--congestion", nargs="+", default=["bbr", "cubic"], help="congestion controls to try")
    parser.add_argument("--rtt", type=float, default=50.0, help="the line's round trip in ms")
    parser.add_argument("--loss", type=float, default=0.0, help="percent")
    parser.add_argument("--lanes", nargs="+", type=int, default=[MAX_LANES, 0], help="the most lanes, for each row")
    parser.add_argument("--busy", type=int, default=0, help="measure beside so many busy processes")
    options = parser.parse_args()
    reason = missing()
    if reason is not None:
        print(f"not measured: {reason}")
        return 0
    sweep()
    line = Line(options.rtt, options.loss, (8 if options.quick else 24) * CHUNK)
    single = alone(line) if line.loss else None

    def rows() -> Iterator[Row]:
        for congestion in options.congestion:
            for lanes in options.lanes:
                if options.busy:
                    yield from busy_rows(line, congestion, lanes, options.busy)
                else:
                    yield from rows_of(line, congestion, lanes, single)

    return conclude("link", rows(), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())

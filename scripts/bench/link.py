"""Measures bulk data and requests together on one connection over an emulated line, where the system lets us.

    sudo python scripts/bench/link.py --quick --json

The line has 100 Mbit/s, a round trip of 50 ms and a queue of 200 ms. A transfer has to fill it while the round trip of
a request, made every 50 ms, stays close to the line's own. Exit code 1 if a goal is missed; 0 if
there can be no network namespaces, which it says.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from transport import CHUNK, Child, met, row  # noqa: E402

from tests.net.topology import Internet, Link, missing, sweep  # noqa: E402

RATE = 100.0  # Mbit/s
RTT = 50.0  # ms
QUEUE = 200.0  # ms
INTERVAL = 0.05  # seconds between requests


def measure(internet: Internet, congestion: str, loss: float, size: int) -> tuple[float, list[float], float]:
    """The transfer's rate in Mbit/s, the requests' round trips in ms, and their median before the transfer."""
    near = internet.host("near")
    far = internet.host("far", link=Link(rate=(RATE, RATE), delay=RTT / 2, queue=QUEUE, loss=(loss, loss)))
    kind = f"ours/{congestion}"
    children: list[Child] = []
    try:
        server = Child(kind, near.address, prefix=near.namespace.command())
        children.append(server)
        client = Child(kind, near.address, server.port, prefix=far.namespace.command())
        children.append(client)
        idle = 1e3 * statistics.median(client.do("requests", 20))  # type: ignore[call-overload]
        rate, times = client.do("paced", size, INTERVAL)  # type: ignore[misc]
    finally:
        for child in children:
            child.process.kill()
            child.process.communicate()
    return rate * 8 / 1e6, [1e3 * seconds for seconds in times], idle


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="a few seconds in place of a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--congestion", nargs="+", default=["bbr", "cubic"], help="congestion controls to try")
    parser.add_argument("--loss", type=float, default=0.0, help="percent")
    options = parser.parse_args()
    reason = missing()
    if reason is not None:
        print(f"not measured: {reason}")
        return 0
    sweep()
    load = os.getloadavg()[0]
    rows = []
    for congestion in options.congestion:
        with tempfile.TemporaryDirectory() as directory, Internet(Path(directory)) as internet:
            rate, times, idle = measure(internet, congestion, options.loss, (8 if options.quick else 24) * CHUNK)
        case = f"one connection, {congestion}, {options.loss:g} % loss"
        high = statistics.quantiles(times, n=20)[-1]
        rows += [
            row(f"{case}: median round trip without bulk", idle, RTT, "ms", "", "the line"),
            row(f"{case}: bulk", rate, RATE, "Mbit/s", ">= 0.85", "the line"),
            row(f"{case}: median round trip", statistics.median(times), RTT, "ms", "<= 1.2", "the line"),
            row(f"{case}: 95th percentile", high, RTT, "ms", "<= 2", "the line"),
        ]
    print(f"load before: {load:.1f} on {os.cpu_count()} cores")
    for line in rows:
        verdict = "" if met(line) else "  MISSED"
        print(f"{line['case']}: {line['ours']} {line['unit']}, ratio {line['ratio']}, goal {line['goal']}{verdict}")
    if options.json:
        print(json.dumps({"bench": "link", "load": load, "rows": rows}))
    return 0 if all(map(met, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())

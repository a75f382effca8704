"""Measures the codecs on one core: how fast they are, beside a copy of the values, and how large their errors are.

    python scripts/bench/codecs.py --quick --json

Rates are in GB of fp32 per second of processor time, the median of some repetitions that take turns; errors are the
root mean square of the difference over that of the values. "Gaussian" values are all alike; "heavy-tailed" ones are
like the difference that a few hundred steps make: rows of 768 with log-normal magnitudes (sigma 1), and in them
Student's t with 3 degrees of freedom. Exit code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from protocol.codecs import NAMES, Codec, CodecName, make_codec

ROW = 768
MOST: dict[CodecName, float] = {"fp32": 1, "bf16": 0.5, "int8": 0.27, "int4": 0.14, "e3m0": 0.14}  # of fp32's bytes
LEAST = 1.0  # GB/s, so that int8 can be faster than fp32 on loopback


def gaussian(length: int) -> torch.Tensor:
    """Values that are all alike."""
    return torch.from_numpy(np.random.default_rng(1).standard_normal(length, dtype=np.float32))


def heavy_tailed(length: int) -> torch.Tensor:
    """Values like those of a pseudo-gradient."""
    rng = np.random.default_rng(2)
    rows = np.exp(rng.standard_normal((length // ROW, 1))) * rng.standard_t(3, (length // ROW, ROW))
    return torch.from_numpy(rows.astype(np.float32).ravel())


def rates(names: tuple[CodecName, ...], values: torch.Tensor, repetitions: int) -> dict[str, dict[str, float]]:
    """GB/s of everything that each codec does, and of a copy."""
    into, buffers = torch.zeros_like(values), {}
    jobs: dict[tuple[str, str], Callable[[], object]] = {("memcpy", "copy"): lambda: into.copy_(values)}
    for name in names:
        codec = make_codec(name)
        out = buffers[name] = torch.empty(codec.encoded_size(values.numel()), dtype=torch.uint8)
        jobs[name, "encode"] = lambda codec=codec, out=out: codec.encode(values, out)  # type: ignore[misc]
        jobs[name, "stochastic"] = lambda codec=codec, out=out: codec.encode(values, out, seed=1)  # type: ignore[misc]
        jobs[name, "decode"] = lambda codec=codec, out=out: codec.decode(out, into)  # type: ignore[misc]
        jobs[name, "add"] = lambda codec=codec, out=out: codec.add(out, into, 0.5)  # type: ignore[misc]
    seconds: dict[tuple[str, str], list[float]] = {job: [] for job in jobs}
    for _ in range(1 + repetitions):
        for job, do in jobs.items():
            began = time.process_time()
            do()
            seconds[job].append(time.process_time() - began)
    result: dict[str, dict[str, float]] = {}
    for (name, what), times in seconds.items():
        result.setdefault(name, {})[what] = 4e-9 * values.numel() / statistics.median(times[1:])
    return result


def error(codec: Codec, values: torch.Tensor, seed: int | None) -> float:
    """Root mean square of what a codec changes, over that of the values."""
    out, result = torch.empty(codec.encoded_size(values.numel()), dtype=torch.uint8), torch.empty_like(values)
    codec.encode(values, out, seed=seed)
    codec.decode(out, result)
    return float((result.double() - values.double()).norm() / values.double().norm())


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="4 MiB in place of 64")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    length = (1 if options.quick else 16) << 20
    data = {"gaussian": gaussian(length), "heavy-tailed": heavy_tailed(length)}
    speeds = rates(NAMES, data["heavy-tailed"], 3 if options.quick else 9)
    copy = speeds["memcpy"]["copy"]
    print(f"load before: {load:.1f} on {os.cpu_count()} cores; a copy: {copy:.1f} GB/s; rates in GB/s of fp32")
    print("codec   bytes  encode  stochastic  decode    add  errors: gaussian, stochastic; heavy-tailed, stochastic")
    rows, missed = [], 0
    for name in NAMES:
        codec, speed = make_codec(name), speeds[name]
        share = codec.encoded_size(length) / (4 * length)
        errors = {
            f"{kind}{suffix}": error(codec, values, seed)
            for kind, values in data.items()
            for suffix, seed in (("", None), (", stochastic", 3))
        }
        good = share <= MOST[name] and (name != "int8" or min(speed["encode"], speed["decode"]) >= LEAST)
        missed += not good
        figures = "  ".join(f"{value:.5f}" for value in errors.values())
        print(
            f"{name:6}  {share:.3f}  {speed['encode']:6.2f}  {speed['stochastic']:10.2f}  {speed['decode']:6.2f}"
            f"  {speed['add']:5.2f}  {figures}{'' if good else '  MISSED'}"
        )
        rows.append({"codec": name, "share": share, "rates": speed, "errors": errors, "good": good})
    if options.json:
        print(json.dumps({"load": load, "memcpy": copy, "rows": rows, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

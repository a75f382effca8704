"""Run random histories of faults (tests/sim/history.py), and tell which of them break an invariant.

    python scripts/simulate.py --seeds 0:10000 --jobs 2
    python scripts/simulate.py --seeds 4711

One seed is one history, whichever machine it runs on. The exit status is 1 if any fails.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":  # histories depend on the order in sets
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})
    arguments = parse()
    seeds, done = arguments.seeds, 0
    began, failed, sizes, longest, rounds = time.monotonic(), [], Counter[int](), (0.0, 0), 0
    with multiprocessing.Pool(arguments.jobs, prepare) as pool, contextlib.suppress(KeyboardInterrupt):
        for seed, history, problem in pool.imap_unordered(one, seeds):
            done += 1
            if problem:
                failed.append(seed)
                print(f"{problem}\nseed {seed} FAILED: python scripts/simulate.py --seeds {seed}\n", flush=True)
                continue
            sizes[history.peers] += 1
            rounds += history.rounds
            longest = max(longest, (history.calm, seed))
            if len(seeds) == 1:
                print(history)
    print(f"{done} histories in {time.monotonic() - began:.0f} s, {len(failed)} failed {sorted(failed) or ''}")
    print(f"{rounds} rounds; peers: {dict(sorted(sizes.items()))}")
    print(f"longest until all were well again: {longest[0]:.0f} simulated s (seed {longest[1]})")
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=seeds, default=range(1000), help="one, or FIRST:END")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes; as many as there are cores")
    return parser.parse_args()


def seeds(text: str) -> range:
    first, _, end = text.partition(":")
    return range(int(first), int(end) if end else int(first) + 1)


def prepare() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that has started this one ends it
    import hypothesis  # noqa: F401  with it, trio's order of tasks is that of its seed

    import tests.sim.history  # noqa: F401

    gc.freeze()


def one(seed: int):  # noqa: ANN201  the seed, and the history or what was wrong with it
    import trio
    from trio.testing import MockClock

    from tests.sim.history import run_history

    try:
        return seed, trio.run(run_history, seed, clock=MockClock(autojump_threshold=0)), ""
    except BaseException as error:
        return seed, None, "".join(traceback.format_exception(error))


if __name__ == "__main__":
    sys.exit(main())

"""Run the fuzz targets of tests/fuzz, guided by coverage.

    python scripts/fuzz.py --minutes 60
    python scripts/fuzz.py --replay build/fuzz/failures/streams-0f3a…

Needs Atheris (`pip install -e .[dev,fuzz]`). Each target gets the same share of the time, in a process of its own.
What was learned stays in OUTPUT/corpus for the next time. Inputs that fail go to OUTPUT/failures, with the traceback
beside them: for each place at which a target failed, the first that was found. The exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
INSTRUMENTED = ["protocol", "dht", "peer"]
CHILD = "fuzz-one-target"  # how this script calls itself: then come the target, a folder, and the fuzzer's own options
LONGEST_INPUT = 2048  # bytes
SLOWEST_INPUT = 60  # seconds after which a target counts as hanging
MOST_MEMORY = 3072  # MiB


def main() -> int:
    if sys.argv[1:2] == [CHILD]:
        fuzz(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    arguments = parse(sys.argv[1:])
    if arguments.replay is not None:
        return replay(arguments.replay)
    from tests.fuzz.targets import TARGETS

    names = arguments.targets or list(TARGETS)
    if unknown := set(names) - set(TARGETS):
        sys.exit(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    print(f"seed {arguments.seed}, {arguments.minutes:g} minutes for {len(names)} targets", flush=True)
    print("| target | executions | per second | new inputs | edges covered | failures |\n|---|---|---|---|---|---|")
    seconds = 60 * arguments.minutes / len(names)
    failed = sum(run_target(name, seconds, arguments.seed, arguments.output) for name in names)
    if failed:
        print(f"{failed} failing inputs in {arguments.output / 'failures'}; replay one with --replay FILE")
    return 1 if failed else 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help="all, if none is named")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all targets together")
    parser.add_argument("--seed", type=int, default=1, help="of the fuzzer's random numbers, at least 1")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "fuzz")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run the one input in this file")
    return parser.parse_args(arguments)


def replay(path: Path) -> int:
    """Runs one input, and shows how it fails."""
    from tests.fuzz.targets import TARGETS

    name = max((name for name in TARGETS if path.name.startswith(f"{name}-")), key=len, default=None)
    if name is None:
        sys.exit(f"{path.name} does not begin with the name of a target")
    TARGETS[name](path.read_bytes())
    print("it does not fail")
    return 0


def run_target(name: str, seconds: float, seed: int, output: Path) -> int:
    """Fuzzes one target in processes of its own and prints a line about it. Returns the number of its failures."""
    corpus, failures = output / "corpus" / name, output / "failures"
    corpus.mkdir(parents=True, exist_ok=True)
    failures.mkdir(parents=True, exist_ok=True)
    known, learned = set(failures.iterdir()), len(list(corpus.iterdir()))
    began, executions, covered, running = time.monotonic(), 0, 0, 0.0
    # The process ends early only if an input hangs, or takes up too much memory.
    while (left := round(seconds - (time.monotonic() - began))) > 0:
        started = time.monotonic()
        said = run_fuzzer(name, left, seed, output)
        running += time.monotonic() - started
        executions += max(map(int, re.findall(r"^#(\d+)", said, re.MULTILINE)), default=0)
        covered = max(map(int, re.findall(r"cov: (\d+)", said)), default=covered)
        seed += 1
        if not executions:
            sys.exit(f"the fuzzer does not start:\n{said[-2000:]}")
    new = sum(path.suffix != ".txt" for path in set(failures.iterdir()) - known)
    learned = len(list(corpus.iterdir())) - learned
    print(f"| {name} | {executions} | {executions / running:.0f} | {learned} | {covered} | {new} |", flush=True)
    return new


def run_fuzzer(name: str, seconds: int, seed: int, output: Path) -> str:
    """One process of the fuzzer; returns what it said."""
    options = [
        f"-max_total_time={seconds}",
        f"-seed={seed}",
        f"-max_len={LONGEST_INPUT}",
        f"-timeout={SLOWEST_INPUT}",
        f"-rss_limit_mb={MOST_MEMORY}",
        f"-artifact_prefix={output / 'failures' / name}-",
        "-print_final_stats=1",
        str(output / "corpus" / name),
    ]
    command = [sys.executable, __file__, CHILD, name, str(output / "failures"), *options]
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    return subprocess.run(
        command, text=True, errors="replace", capture_output=True, env=environment, check=False
    ).stderr


def fuzz(name: str, failures: Path, options: list[str]) -> None:
    """Fuzzes until the time is over; does not return."""
    try:
        import atheris
    except ImportError:
        sys.exit("Atheris is not installed: pip install -e .[dev,fuzz] (Linux on x86-64, Python up to 3.13)")
    with atheris.instrument_imports(include=INSTRUMENTED):
        from tests.fuzz.targets import TARGETS
    seen: set[str] = set()
    target = TARGETS[name]
    atheris.Setup([sys.argv[0], *options], lambda data: keep_failures(name, target, data, failures, seen))
    atheris.Fuzz()


def keep_failures(name: str, target: Callable[[bytes], None], data: bytes, failures: Path, seen: set[str]) -> None:
    """Runs one input, and keeps it if it fails where none has failed yet."""
    try:
        target(data)
    except Exception as error:
        place = where(error)
        if place not in seen:
            seen.add(place)
            stem = failures / f"{name}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"
            if not stem.exists():
                stem.write_bytes(data)
                stem.with_suffix(".txt").write_text("".join(traceback.format_exception(error)))


def where(error: BaseException) -> str:
    """The kind of an error, and the line that raised it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} {last.filename}:{last.lineno}"


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)

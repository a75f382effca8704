"""The virtual environment that the scripts run in: `.venv` in the repository root, made on first use.

It holds the project (editable, with its development tools) under `constraints.txt`. A stamp in it records what it was
made from; while that matches, nothing is checked or fetched again. Without a stamp the installation never finished
and is done again. Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
OURS = "made-by-shoal"  # in `.venv`: these scripts made it, so they may mend it
STAMP = "stamp"  # in `.venv`: what the finished installation was made from
LOG = "install.log"


def run(module: str, *arguments: str) -> NoReturn:
    """Replace this process by `python -m module arguments` in the environment."""
    if os.name != "posix":
        sys.exit("Shoal runs on Linux and macOS; on Windows use it inside WSL.")
    try:
        python = str(prepare(ROOT / ".venv"))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        sys.exit(f"Cannot set up {ROOT / '.venv'}: {error}")
    os.execv(python, [python, "-m", module, *arguments])


def prepare(directory: Path) -> Path:
    """Make or mend the environment in `directory`, unless it is good already, and return its Python."""
    if not is_ready(directory):
        with exclusive() as lock:
            if not is_ready(directory):  # another process may have made it while this one waited
                build(directory, lock)
    return directory / "bin" / "python"


def origin(directory: Path) -> str:
    """What an environment there is bound to for good: this minor version of Python, and its place."""
    return f"{sys.version_info[0]}.{sys.version_info[1]} {directory}"


def contents() -> str:
    """A hash of all that decides what is installed."""
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", CONSTRAINTS):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def read_stamp(directory: Path) -> list[str]:
    """The origin and contents of the finished installation there; nothing if there is none."""
    try:
        return (directory / STAMP).read_text().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_ready(directory: Path) -> bool:
    """Whether just the installation that is wanted now was finished there, and its Python still exists."""
    python = directory / "bin" / "python"
    return read_stamp(directory) == [origin(directory), contents()] and os.access(python, os.X_OK)


@contextlib.contextmanager
def exclusive() -> Iterator[int]:
    """Hold the lock on the repository's root directory, so that one process at a time installs."""
    import fcntl  # not on Windows

    lock = os.open(ROOT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Waiting for another process that is setting up .venv ...")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


def build(directory: Path, lock: int) -> None:
    """Create the environment and install into it; write the stamp last."""
    if directory.is_symlink() or (directory.exists() and not is_ours(directory)):
        sys.exit(f"{directory} was not made by this script. Move it away, or remove it, and start again.")
    directory.mkdir(exist_ok=True)
    (directory / OURS).touch()
    stamp = read_stamp(directory)
    (directory / STAMP).unlink(missing_ok=True)
    if stamp[:1] == [origin(directory)] and starts(directory):
        say(f"Updating {directory} ...")
    else:
        say(f"Setting up {directory}: the first time this takes a few minutes ...")
        create(directory)
    install(directory, lock, "setuptools")
    # Built with the environment's own setuptools, so that a change of pyproject.toml alone needs no network.
    install(directory, lock, "--no-build-isolation", "--editable", f"{ROOT}[dev]")
    (directory / STAMP).write_text(f"{origin(directory)}\n{contents()}\n")


def is_ours(directory: Path) -> bool:
    """Whether these scripts made the directory, or nobody has put anything into it."""
    return directory.is_dir() and ((directory / OURS).is_file() or not any(directory.iterdir()))


def starts(directory: Path) -> bool:
    """Whether the environment's Python and pip run."""
    command = [directory / "bin" / "python", "-m", "pip", "--version"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def create(directory: Path) -> None:
    """Make an empty environment there, in place of what an earlier, unfinished attempt left."""
    if importlib.util.find_spec("ensurepip") is None:
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        sys.exit(f"This Python comes without ensurepip. On Debian and Ubuntu: sudo apt install {package}")
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != OURS:
            entry.unlink()
    # Made by the Python outside of any environment: this script may run in the very one that it replaces.
    base = getattr(sys, "_base_executable", sys.executable)
    result = subprocess.run([base, "-m", "venv", directory], capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"Cannot make {directory}:\n{result.stdout}{result.stderr}".rstrip())


def install(directory: Path, lock: int, *requirements: str) -> None:
    """Run pip quietly; exit with the end of what it said if it fails."""
    command = [directory / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    with (directory / LOG).open("w") as log:
        # The child inherits the lock: should this process be killed, pip may still be writing.
        result = subprocess.run(
            [*command, "--constraint", CONSTRAINTS, *requirements],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[lock],
            check=False,
        )
    if result.returncode:
        tail = (directory / LOG).read_text(errors="replace").splitlines()[-20:]
        hint = f"pip failed; all that it said is in {directory / LOG}. Start again when the cause is mended."
        sys.exit("\n".join([*tail, hint]))


def say(text: str) -> None:
    """Tell the user, on standard error: standard output belongs to the program that runs afterwards."""
    print(text, file=sys.stderr, flush=True)

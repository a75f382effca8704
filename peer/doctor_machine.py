"""The doctor's steps about the machine itself: Python, home, disk, memory and accelerator."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import trio

from peer.console import size
from peer.doctor import Examination, Finding, Findings, Patient
from peer.home import Home
from protocol.errors import ShoalError
from protocol.identity import Identity

PYTHON: Final = (3, 11)
NEEDED: Final = (
    "torch", "numpy", "trio", "msgpack", "msgspec", "cryptography", "attrs", "safetensors", "rich", "tomli_w"
)  # fmt: skip
TIGHT_DISK, LOW_DISK = 200_000_000, 5_000_000_000
"""Bytes: too little for anything, and too little for the checkpoints of a large model."""

LOW_MEMORY: Final = 2_000_000_000
"""Bytes: PyTorch alone takes some hundred MB."""


async def examine(patient: Patient, examination: Examination) -> None:
    """Takes all steps of this module but that about the accelerator, which is for the background."""

    async def step(name: str, check: Callable[[], Findings]) -> None:
        async def in_thread() -> Findings:
            return await trio.to_thread.run_sync(check, abandon_on_cancel=True)

        await examination.step(name, 3.0, in_thread, "the machine may be overloaded, or a disk may hang")

    await step("python", python)
    await step("home", partial(home, patient.home))
    await step("disk", partial(disk, patient.home))
    await step("memory", memory)


def python() -> Findings:
    """Whether Python is new enough and all packages are there."""
    version = platform.python_version()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if sys.version_info < PYTHON:
        return [Finding("python", "fail", f"Python {version} is too old", "install Python 3.11 or newer")]
    if missing:
        return [Finding("python", "fail", f"not installed: {', '.join(missing)}", "install Shoal again: pip install .")]
    torch, system = importlib.metadata.version("torch"), f"{platform.system()} {platform.machine()}"
    return [Finding("python", "ok", f"Python {version} with PyTorch {torch}, on {system}")]


def home(path: Path) -> Findings:
    """Whether the home can be used, or made."""
    try:
        found = Home(path, create=False)
        if not found.path.exists():
            parent = _existing(found.path)
            if os.access(parent, os.W_OK | os.X_OK):
                return [Finding("home", "ok", f"{path} is not there yet, and can be made")]
            return [Finding("home", "fail", f"{path} cannot be made in {parent}", "use another --home")]
        found.check_owner()
        if not os.access(found.path, os.W_OK | os.X_OK):
            return [Finding("home", "fail", f"{path} cannot be written to", "use another --home, or change its owner")]
        key = found.path / "identity.key"
        if not key.exists():
            return [Finding("home", "ok", f"{path}, without an identity yet")]
        return [Finding("home", "ok", f"{path} of peer {Identity.load(key).peer_id}")]
    except ShoalError as error:
        return [Finding("home", "fail", str(error), error.hint or "use another --home")]


def disk(path: Path) -> Findings:
    """Whether there is room for checkpoints."""
    try:
        free = shutil.disk_usage(_existing(path.expanduser().absolute())).free
    except OSError as error:
        return [Finding("disk", "warn", f"the free space is not known: {error.strerror}", "look yourself: df -h")]
    advice = "delete something, or use a --home on another disk"
    if free < TIGHT_DISK:
        return [Finding("disk", "fail", f"only {size(free)} are free for checkpoints", advice)]
    if free < LOW_DISK:
        return [Finding("disk", "warn", f"{size(free)} are free: enough for small models only", advice)]
    return [Finding("disk", "ok", f"{size(free)} are free")]


def memory() -> Findings:
    """Whether there is memory for a model."""
    free = available_memory()
    if free is None:
        return [Finding("memory", "ok", "how much is free is not known on this system")]
    if free < LOW_MEMORY:
        advice = "end other programs, or join runs with small models only; --max-memory sets a limit"
        return [Finding("memory", "warn", f"only {size(free)} are free", advice)]
    return [Finding("memory", "ok", f"{size(free)} are free")]


def available_memory() -> int | None:
    """Bytes that programs can still get, as far as the system says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        pass  # not Linux
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


async def accelerator() -> Findings:
    """What would train: `--device auto`.

    PyTorch is loaded in a process of its own. That takes seconds, and on a busy machine many; meanwhile the other steps
    go on, and what they measure is not disturbed.
    """
    try:
        result = await trio.run_process(
            [sys.executable, "-c", _LOOK_AT_DEVICE], capture_stdout=True, capture_stderr=True, check=False
        )
    except OSError as error:
        return [Finding("accelerator", "warn", f"not known: Python cannot be started: {error}", "is memory short?")]
    try:
        found = json.loads(result.stdout)
    except ValueError:
        last = (result.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
        advice = "install PyTorch again: pip install torch"
        return [Finding("accelerator", "fail", f"PyTorch cannot be loaded: {last}", advice)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if found["name"] is None:
        hint = ", though PyTorch is built for CUDA" if found["built"] else ""
        return [Finding("accelerator", "ok", f"none{hint}: {cores} processor cores will train")]
    if found["error"] is not None:
        message = f"{found['name']} does not work: {found['error']}"
        return [Finding("accelerator", "fail", message, "update the driver, or train with --device cpu")]
    return [Finding("accelerator", "ok", f"{found['name']} with {size(found['memory'])}")]


_LOOK_AT_DEVICE: Final = """
import json, torch
found = {"name": None, "built": torch.version.cuda is not None, "error": None, "memory": 0}
if torch.cuda.is_available():
    found["name"] = torch.cuda.get_device_name()
    try:
        found["memory"] = torch.cuda.get_device_properties(0).total_memory
        torch.ones(8, device="cuda").sum().item()
    except RuntimeError as error:
        found["error"] = str(error).splitlines()[0]
print(json.dumps(found))
"""


def _existing(path: Path) -> Path:
    """The path, or the closest directory above it that exists."""
    return next(each for each in (path, *path.parents) if each.exists())

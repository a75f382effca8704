"""A Docker engine for the tests, and Shoal's image in it.

Where no engine answers, one is started: as root, on a machine with Debian's docker.io installed. Where the base image
cannot be pulled, one is made with debootstrap. Python packages come to the build from the host, through its pip, in a
layer under the image's own, so that the build needs no network. What takes long to make is kept in the user's cache
directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import platformdirs
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
BASE_IMAGE = "python:3.11-slim"
SUITE = "bookworm"  # the Debian whose python3 is 3.11
BASE_PACKAGES = "python3,python3-venv,python-is-python3,ca-certificates"
ENGINE_START = 60.0  # seconds; it took 1 on a 2-core machine


@attrs.frozen
class Engine:
    """A Docker engine that answers, and how to call its clients."""

    environment: Mapping[str, str]
    compose: Sequence[str]
    temporary: bool
    """Whether it was started for these tests, and nothing in it outlives them."""

    def run(self, *command: str | Path, **more_environment: str) -> str:
        """Run a command for the engine and return its standard output; if it fails, so does the test."""
        environment = {**self.environment, **more_environment}
        result = subprocess.run(command, env=environment, cwd=ROOT, text=True, capture_output=True)
        if result.returncode:
            output = result.stdout[-4000:] + result.stderr[-4000:]
            pytest.fail(f"{' '.join(map(str, command))} exited with {result.returncode}:\n{output}")
        return result.stdout

    def succeeds(self, *command: str) -> bool:
        return succeeds(command, self.environment)


def succeeds(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a program is installed and exits with 0."""
    try:
        return subprocess.run(command, env=environment, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """The engine that is there already, or one of our own for as long as the tests run."""
    environment = dict(os.environ)
    clients = (["docker", "compose"], ["docker-compose"])
    compose = next((client for client in clients if succeeds([*client, "version"], environment)), None)
    if compose is None or shutil.which("docker") is None:
        pytest.skip("no Docker client with compose (Debian: apt-get install docker.io docker-compose)")
    if succeeds(["docker", "version"], environment):
        yield Engine(environment, compose, temporary=False)
        return
    if os.geteuid() != 0:
        pytest.skip("no Docker engine answers, and only root can start one")
    if shutil.which("dockerd") is None:
        pytest.skip("no Docker engine answers, and none is installed (Debian: apt-get install docker.io)")
    with tempfile.TemporaryDirectory(prefix="shoal-docker-") as directory, own_engine(Path(directory)) as address:
        yield Engine({**environment, "DOCKER_HOST": address}, compose, temporary=True)


@contextlib.contextmanager
def own_engine(directory: Path) -> Iterator[str]:
    """Run `dockerd` with all of its state in `directory`; gives the address of its API.

    It lives in a network and a mount namespace of its own: interfaces, firewall rules and mounts end with it, and what
    another engine left in the machine's firewall does not concern it. Its containers reach each other, nothing else.
    Images and volumes are in memory, 2 GiB in all, because disks take minutes for them.
    """
    address = f"unix://{directory}/api"
    places = {"data-root": "data", "exec-root": "exec", "pidfile": "pid", "config-file": "none.json"}
    (directory / "none.json").write_text("{}")
    (directory / "data").mkdir()
    in_memory = 'mount -t tmpfs tmpfs "$0" && exec "$@"'
    command = ["unshare", "--net", "--mount", "sh", "-c", in_memory, str(directory / "data")]
    command += ["dockerd", "--host", address, "--bridge", "none"]
    command += [argument for option, name in places.items() for argument in (f"--{option}", str(directory / name))]
    with (directory / "log").open("wb") as log, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
        ready.bind(str(directory / "ready"))
        environment = {**os.environ, "NOTIFY_SOCKET": str(directory / "ready")}
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            if not notified(ready, process):
                tail = (directory / "log").read_text(errors="replace")[-1000:]
                pytest.skip(f"no Docker engine answers, and dockerd does not start here:\n{tail}")
            yield address
        finally:
            process.terminate()
            process.wait()


def notified(ready: socket.socket, process: subprocess.Popen[bytes]) -> bool:
    """Wait until the process says on its notification socket that it is ready; whether it does."""
    ready.settimeout(1.0)
    deadline = time.monotonic() + ENGINE_START
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            return bool(ready.recv(4096))
    return False


@pytest.fixture(scope="session")
def image(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of Shoal's image, built from the checkout."""
    provide_base_image(engine, tmp_path_factory.mktemp("base"))
    name = f"shoal:test-{os.getpid()}"
    base = f"{name}-base"
    recipe = tmp_path_factory.mktemp("recipe") / "Dockerfile"
    recipe.write_text(f"FROM {BASE_IMAGE}\nCOPY . /wheels\n")
    arguments = {"BASE": base, "PIP_FIND_LINKS": "/wheels", "PIP_NO_INDEX": "1", "PIP_EXTRA_INDEX_URL": ""}
    options = [option for key, value in arguments.items() for option in ("--build-arg", f"{key}={value}")]
    try:
        engine.run("docker", "build", "-f", recipe, "-t", base, provide_wheels())
        engine.run("docker", "build", "--network", "none", *options, "-f", "docker/Dockerfile", "-t", name, ".")
        yield name
    finally:
        if not engine.temporary:
            engine.succeeds("docker", "image", "rm", "--force", name, base)


def cache() -> Path:
    """Where things are kept from one run of the tests to the next."""
    return platformdirs.user_cache_path("shoal-tests", ensure_exists=True)


def provide_base_image(engine: Engine, scratch: Path) -> None:
    """Find the base image in the engine, pull it, or make one like it from Debian's packages."""
    if engine.succeeds("docker", "image", "inspect", BASE_IMAGE) or engine.succeeds("docker", "pull", BASE_IMAGE):
        return
    archive = cache() / f"python-{SUITE}.tar"
    if not archive.exists():
        if os.geteuid() != 0 or shutil.which("debootstrap") is None:
            pytest.skip(f"{BASE_IMAGE} cannot be pulled, and only root with debootstrap installed can make one")
        tree, unfinished = scratch / "tree", archive.with_suffix(".part")
        engine.run("debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", SUITE, tree)
        engine.run("tar", "-C", tree, "-cf", unfinished, "--exclude=./var/cache/apt/archives/*.deb", ".")
        shutil.rmtree(tree)
        unfinished.rename(archive)
    engine.run("docker", "import", archive, BASE_IMAGE)


def provide_wheels() -> Path:
    """Download all that the image's Python needs, in the build of PyTorch that runs these tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = project["build-system"]["requires"] + project["project"]["dependencies"] + [f"torch=={torch.__version__}"]
    key = hashlib.sha256(CONSTRAINTS.read_bytes() + "\n".join(needed).encode()).hexdigest()[:16]
    wheels = cache() / f"wheels-{key}"
    if not wheels.exists():
        unfinished = Path(tempfile.mkdtemp(dir=cache()))
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--only-binary", ":all:", "--python-version", "3.11", "--constraint", str(CONSTRAINTS)]
        result = subprocess.run([*command, "--dest", unfinished, *needed], text=True, capture_output=True)
        if result.returncode:
            shutil.rmtree(unfinished)
            pytest.skip(f"the image's Python packages cannot be had:\n{result.stderr[-1000:]}")
        for stale in cache().glob("wheels-*"):
            shutil.rmtree(stale)
        unfinished.rename(wheels)
    return wheels

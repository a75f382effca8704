"""A Docker engine for the tests, and Shoal's image in it.

Where no engine answers, one is started: as root, on a machine with Debian's docker.io installed. Where the base image
cannot be pulled, one is made with debootstrap. Python packages come to the build from the host, through its pip, so
that the build depends neither on the containers' network nor on the host's pip configuration. What takes long to make
is kept in the user's cache directory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.server
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
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
    """Run `dockerd` with all of its state in `directory`; gives the address of its API."""
    address = f"unix://{directory}/api"
    places = {"data-root": "data", "exec-root": "exec", "pidfile": "pid", "config-file": "none.json"}
    (directory / "none.json").write_text("{}")
    # Without a default bridge: compose makes its own networks, and builds use the host's.
    command = ["dockerd", "--host", address, "--bridge", "none"]
    command += [argument for option, name in places.items() for argument in (f"--{option}", str(directory / name))]
    with (directory / "log").open("wb") as log, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
        ready.bind(str(directory / "ready"))
        ready.settimeout(ENGINE_START)
        environment = {**os.environ, "NOTIFY_SOCKET": str(directory / "ready")}
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            try:
                ready.recv(4096)
            except TimeoutError:
                tail = (directory / "log").read_text(errors="replace")[-1000:]
                pytest.skip(f"no Docker engine answers, and dockerd does not start here:\n{tail}")
            yield address
        finally:
            process.terminate()
            process.wait()
            for mount in reversed(Path("/proc/self/mounts").read_text().splitlines()):
                if (point := mount.split()[1]).startswith(f"{directory}/"):  # dockerd leaves its network namespace
                    subprocess.run(["umount", "--lazy", point], check=True)


@pytest.fixture(scope="session")
def image(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of Shoal's image, built from the checkout."""
    provide_base_image(engine, tmp_path_factory.mktemp("base"))
    name = f"shoal:test-{os.getpid()}"
    with served(provide_wheels()) as address:
        arguments = {"PIP_FIND_LINKS": address, "PIP_NO_INDEX": "1", "PIP_EXTRA_INDEX_URL": ""}
        options = [option for key, value in arguments.items() for option in ("--build-arg", f"{key}={value}")]
        engine.run("docker", "build", "--network", "host", *options, "-f", "docker/Dockerfile", "-t", name, ".")
    yield name
    if not engine.temporary:
        engine.run("docker", "image", "rm", "--force", name)


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


@contextlib.contextmanager
def served(directory: Path) -> Iterator[str]:
    """Serve a directory over HTTP on this machine's loopback address; gives the URL."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            """Keep quiet."""

    handler = functools.partial(Handler, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()

"""Swarms of real daemons in real processes on loopback, for tests that drive them by what their event files say."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs
import pytest
import tomli_w
import trio

from peer.child import spawn
from peer.recording import Event, LineTail, Recording

LIMIT = 150.0
"""Seconds that a test may wait in all. Only a hang takes so long: passing takes a few."""

POLL = 0.02
COMMAND = [sys.executable, "-m", "peer"]
TEXT = "The shoal turns as one, and nobody leads it. " * 300


@attrs.define(eq=False)
class Daemon:
    """A daemon's process, its files, and what it has told so far. It may be launched again with the same home."""

    name: str
    root: Path
    process: subprocess.Popen[bytes] | None = None
    expected: bool = False
    """The process is to end now."""
    recording: Recording = attrs.field(init=False)
    _tail: LineTail = attrs.field(init=False)

    def __attrs_post_init__(self):
        self.root.mkdir()
        self.recording = Recording(self.name)
        self._tail = LineTail(self.events)

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def ticket(self) -> str:
        return (self.home / "ticket").read_text().strip()

    @property
    def peer(self) -> str:
        peer = self.recording.peer
        assert peer is not None
        return peer

    @property
    def run(self) -> str:
        return self.of("started")[-1].text("run")

    @property
    def exit_code(self) -> int | None:
        return None if self.process is None else self.process.poll()

    @property
    def committed(self) -> dict[int, Event]:
        """Its own commits by round."""
        return self.recording.committed

    @property
    def digests(self) -> dict[int, str]:
        """The digest of each state that it has held, committed or fetched."""
        return {event.integer("round"): event.text("digest") for event in self.of("round_committed", "synced")}

    @property
    def revision(self) -> int:
        return self.recording.revision or 0

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.recording.events if event.kind in kinds]

    def launch(self, *arguments: object) -> None:
        self.expected = False
        self.process = spawn([*COMMAND, *map(str, arguments)], self.log, self.root / "stdout")

    def read(self) -> None:
        for line in self._tail.read():
            self.recording.add(Event.parse(line))

    def send(self, number: signal.Signals) -> None:
        """Sends a signal; all but SIGSTOP and SIGCONT end the process."""
        assert self.process is not None
        self.expected = self.expected or number not in (signal.SIGSTOP, signal.SIGCONT)
        self.process.send_signal(number)

    def kill(self) -> None:
        """Ends the process with SIGKILL, and returns when it is gone."""
        self.send(signal.SIGKILL)
        assert self.process is not None
        self.process.wait()


@attrs.define(eq=False)
class Swarm:
    """Daemons that take part in one run, and the patience of the test that drives them."""

    root: Path
    text: Path
    deadline: float
    daemons: list[Daemon] = attrs.field(factory=list)

    def manifest(self, **tables: Mapping[str, object]) -> Path:
        """Writes the manifest of a run with a tiny model and rounds that take a moment."""
        defaults = {
            "model": {"layers": 1, "width": 16, "heads": 2, "context": 16},
            "data": {"source": "text", "shards": 8},
            "inner": {"batch": 4},
            "algorithm": {"inner_steps": 20, "outer_momentum": 0.5},
            "round": {"grace": 2.0},
        }
        for name, table in tables.items():
            defaults[name] = {**defaults.get(name, {}), **table}
        path = self.root / "run.toml"
        path.write_text(tomli_w.dumps(defaults))
        return path

    def daemon(self, name: str) -> Daemon:
        """A daemon that has not been started."""
        daemon = Daemon(name, self.root / name)
        self.daemons.append(daemon)
        return daemon

    async def found(self, *options: object, **tables: Mapping[str, object]) -> Daemon:
        """Founds a run; returns once its daemon can be joined."""
        founder = self.daemon("founder")
        self.start(founder, self.manifest(**tables), *options)
        await self.started(founder)
        return founder

    def start(self, daemon: Daemon, *arguments: object) -> None:
        """Runs `shoal start`; without a manifest it goes on with the run of the daemon's home."""
        daemon.launch("start", *arguments, *self.options(daemon))

    def join(self, daemon: Daemon, ticket: str, *options: object) -> None:
        """Runs `shoal join`."""
        daemon.launch("join", ticket, *options, *self.options(daemon))

    def options(self, daemon: Daemon) -> list[object]:
        files = ["--home", daemon.home, "--events", daemon.events, "--data", self.text]
        return [*files, "--listen", "127.0.0.1:0", "--threads", 1, "--device", "cpu"]

    async def joined(self, founder: Daemon, *names: str, options: tuple[object, ...] = ()) -> list[Daemon]:
        """Starts daemons that join through `founder`; returns once all of them are in one round."""
        joiners = [self.daemon(name) for name in names]
        for joiner in joiners:
            self.join(joiner, founder.ticket, *options)
        await self.started(*joiners)
        await self.together(founder, *joiners)
        return joiners

    async def started(self, *daemons: Daemon) -> None:
        """Waits until these, just launched, can be joined through."""
        before = {daemon: len(daemon.of("started")) for daemon in daemons}
        await self.until(
            lambda: all(len(d.of("started")) > before[d] and (d.home / "ticket").exists() for d in daemons), "started"
        )

    async def together(self, *daemons: Daemon) -> int:
        """Waits until these, and nobody else, contribute to a round that begins from now on; returns the round."""
        everybody = {daemon.peer for daemon in daemons}
        after = max(daemon.revision for daemon in daemons)
        found: list[int] = []

        def done() -> bool:
            common = set.intersection(*({r for r in daemon.committed if r > after} for daemon in daemons))
            found[:] = sorted(r for r in common if set(daemons[0].committed[r].names("contributors")) == everybody)
            return bool(found)

        await self.until(done, f"a round of {', '.join(daemon.name for daemon in daemons)} together")
        assert len({daemon.digests[found[0]] for daemon in daemons}) == 1
        return found[0]

    async def progress(self, *daemons: Daemon, rounds: int = 3) -> None:
        """Waits until each of these has committed so many rounds more."""
        targets = {daemon: len(daemon.committed) + rounds for daemon in daemons}
        await self.until(
            lambda: all(len(daemon.committed) >= count for daemon, count in targets.items()),
            f"{rounds} more rounds of {', '.join(daemon.name for daemon in daemons)}",
        )

    async def ended(self, daemon: Daemon) -> int:
        """Waits until the process ends; returns its exit code."""
        daemon.expected = True
        await self.until(lambda: daemon.exit_code is not None, f"the end of {daemon.name}")
        assert daemon.exit_code is not None
        return daemon.exit_code

    async def stop(self, *daemons: Daemon) -> None:
        """Ends these in order."""
        for daemon in daemons:
            daemon.send(signal.SIGTERM)
        assert [await self.ended(daemon) for daemon in daemons] == [0] * len(daemons)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for a condition on what the daemons have told; fails if one of them ends that should not."""
        while True:
            for daemon in self.daemons:
                daemon.read()
            if condition():
                return
            for daemon in self.daemons:
                if daemon.exit_code is not None and not daemon.expected:
                    pytest.fail(f"{daemon.name} ended with exit code {daemon.exit_code} during the wait for: {what}")
            if trio.current_time() > self.deadline:
                pytest.fail(f"waited in vain for: {what}")
            await trio.sleep(POLL)

    def check_agreement(self) -> None:
        """Whoever held a revision held the same as everybody else."""
        held: dict[int, set[str]] = {}
        for daemon in self.daemons:
            for revision, digest in daemon.digests.items():
                held.setdefault(revision, set()).add(digest)
        assert {revision: digests for revision, digests in held.items() if len(digests) > 1} == {}

    def close(self) -> None:
        """Leaves no process behind, and prints what pytest shows of a test that failed."""
        for daemon in self.daemons:
            if daemon.process is not None:
                daemon.process.kill()
                daemon.process.wait()
            for path, lines in ((daemon.log, 60), (daemon.events, 30)):
                if path.exists():
                    print(f"--- {daemon.name}: {path.name}")
                    print("\n".join(path.read_text(errors="replace").splitlines()[-lines:]))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """What every daemon trains on."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
async def swarm(tmp_path: Path, text: Path):
    swarm = Swarm(tmp_path, text, trio.current_time() + LIMIT)
    try:
        yield swarm
    finally:
        swarm.close()


@attrs.frozen
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """Its error message, which comes last, with a hint perhaps; before it, only what the daemon tells anyway."""
        lines = self.err.splitlines()
        errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
        assert len(errors) == 1, self.err
        lines = lines[errors[0] :]
        assert all(line.startswith("hint: ") for line in lines[1:]), self.err
        assert len(lines) <= 2, self.err
        return lines[0].removeprefix("error: ")


@pytest.fixture
def shoal(tmp_path: Path) -> Iterator[Callable[..., Outcome]]:
    """Runs a command to its end, with a home of its own unless told otherwise."""

    def run(*arguments: object, home: Path = tmp_path / "own" / "home") -> Outcome:
        home.parent.mkdir(exist_ok=True)
        result = subprocess.run(
            [*COMMAND, *map(str, arguments), "--home", str(home)], capture_output=True, text=True, timeout=LIMIT
        )
        assert "Traceback" not in result.stderr, result.stderr
        return Outcome(result.returncode, result.stdout, result.stderr)

    return run

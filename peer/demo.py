"""`shoal demo`: a swarm of real processes on this machine that loses a peer and gains one.

The demo starts daemons as anybody would, by `shoal start` and `shoal join`, and follows their event files. It kills one
the moment that one starts the reduce of round 3, starts a new one when the survivors have committed that round, and
lets the run come to its end. Then it judges what the events say (`peer.verdict`) and draws it (`peer.report`).
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import trio

from optim.methods import RECIPES
from peer.algorithm import types_of
from peer.child import Child, spawn
from peer.console import size
from peer.data import Corpus, Dataset
from peer.live import Display
from peer.manifest import ManifestError, dump_settings, settings_from
from peer.recording import Event
from peer.report import write_report
from peer.schedule import Schedule
from peer.settings import (
    DataSettings,
    InnerSettings,
    ModelSettings,
    RoundSettings,
    RunSettings,
    Settings,
)
from peer.verdict import Scenario, judge
from protocol.errors import DataError, ShoalError

COMMAND = (sys.executable, "-m", "peer")
KILL_ROUND = 3  # the victim dies in the first reduce of this round or a later one that it takes part in
LEAST_ROUNDS = KILL_ROUND + 2  # so that there are rounds left for the newcomer
UPLOAD = 4_000_000  # bytes/s, a good home uplink: a reduce takes long enough to be interrupted
POLL = 0.02  # seconds between looks at the event files; far less than a reduce takes
REDRAW = 0.25  # seconds between updates of the live table
LINGER = 60.0  # seconds that the last daemons may be behind the first one that finished
STOP = 3.0  # seconds that a daemon has to stop when asked (it takes two at most), before it is killed
ERROR_SETTLE = 1.0  # seconds for a daemon that printed an error to print the rest and exit
SAMPLE_BYTES = 300
SAMPLE_SECONDS = 60.0


class DemoFailed(ShoalError):
    """The demo could not go on. `log` has the last lines of the daemon that is to blame, if one is."""

    def __init__(self, message: str, *, log: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.log = log


@attrs.frozen(kw_only=True)
class DemoOptions:
    """What to show.

    Args:
        peers: Daemons at the start, the founder included.
        rounds: Rounds of the run.
        inner_steps: Inner steps per round, or from one exchange of the same parameters to the next.
        algorithm: The method by name.
        data: "stdlib", or the path of a text file or directory to train on.
        keep: Directory for homes, logs, events and the report; None keeps only the report, in the current directory.
        json: Print the verdict as one JSON object on the last line of standard output, and all else to standard error.
    """

    peers: int = 4
    rounds: int = 8
    inner_steps: int = 100
    algorithm: str = "diloco"
    data: str = "stdlib"
    keep: Path | None = None
    json: bool = False

    @property
    def settings(self) -> Settings:
        """What the run is to be; raises ManifestError."""
        return demo_settings(self.rounds, self.inner_steps, self.data, self.algorithm)


def demo_settings(rounds: int, inner_steps: int, data: str = "stdlib", algorithm: str = "diloco") -> Settings:
    """The run that the demo trains: a byte-level transformer of half a million parameters, minutes on two cores.

    Raises:
        ManifestError: There is no such algorithm, or it cannot work with so many steps.
    """
    # For a run of a few rounds; anything else is the method's own choice.
    short: dict[str, object] = {"inner_steps": inner_steps, "base_steps": inner_steps, "outer_momentum": 0.5}
    if algorithm == "diloco":
        short["outer_lr"] = 0.7
    if algorithm == "decoupled":
        short["fragments"] = math.gcd(8, inner_steps)
    known = types_of(algorithm) if algorithm in RECIPES else {}
    chosen = {key: value for key, value in short.items() if key in known}
    settings = Settings(
        run=RunSettings(name="demo", seed=1, rounds=rounds),
        model=ModelSettings(layers=2, width=144, heads=4, context=64),
        data=DataSettings(source="stdlib" if data == "stdlib" else "text"),
        inner=InnerSettings(lr=3e-3, warmup=20, batch=16),
        round=RoundSettings(grace=5.0),
    )
    return settings_from({**settings.tables(), "algorithm": {"name": algorithm, **chosen}})


def run_demo(options: DemoOptions, *, command: Sequence[str] = COMMAND) -> int:
    """Plays the demo and prints its verdict.

    Runs trio; call it from the main thread, which its daemons do not outlive.

    Args:
        options: What to show.
        command: How to call Shoal's command line.

    Returns:
        The exit code: 0 passed, 1 failed, 2 impossible options, 130 interrupted.
    """
    try:
        _check(options)
    except DemoFailed as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        return 2
    with _directory(options.keep) as root, Display(json=options.json) as display:
        stage = _Stage(options, root, display, command)
        try:
            trio.run(stage.run)
        except KeyboardInterrupt:
            display.say("interrupted; all daemons are stopped")
            return 130
    return _conclude(stage, options)


def _conclude(stage: _Stage, options: DemoOptions) -> int:
    """Prints the verdict, writes the report, and gives the exit code. The verdict matters more than the report."""
    out = sys.stderr if options.json else sys.stdout
    scenario = stage.scenario()
    recordings = [child.recording for child in stage.children]
    verdict = judge(recordings, scenario)
    report = (options.keep or Path.cwd()) / "report.html"
    try:
        write_report(report, verdict, recordings, scenario, stage.sample)
    except OSError as error:
        report_at = f"not written: {error}"
    else:
        report_at = str(report)
    if stage.sample:
        print(f"\nThe model writes:\n{stage.sample}\n", file=out)
    print(verdict.to_text(), file=out)
    print(f"  {'report':<11} {report_at}", file=out)
    if stage.failure is not None and stage.failure.log:
        print(f"\n{stage.failure}. Its last lines:\n{stage.failure.log}", file=out)
    if options.json:
        print(verdict.to_json(), flush=True)
    return 0 if verdict.passed else 1


def _check(options: DemoOptions) -> None:
    if options.peers < 2:
        raise DemoFailed(f"{options.peers} peers are too few", hint="one is killed, so it takes at least --peers 2")
    if options.rounds < LEAST_ROUNDS:
        raise DemoFailed(
            f"{options.rounds} rounds are too few",
            hint=f"a peer dies in round {KILL_ROUND} and one joins after that, so it takes --rounds {LEAST_ROUNDS}",
        )
    if options.inner_steps < 1:
        raise DemoFailed(f"{options.inner_steps} inner steps are too few", hint="use --inner-steps 1 or more")
    try:
        settings = options.settings
        Dataset(Corpus.open(options.data), settings.data, seed=settings.run.seed, context=settings.model.context)
    except (DataError, ManifestError) as error:
        raise DemoFailed(str(error), hint=error.hint) from error
    if options.keep is not None and options.keep.exists() and not (options.keep.is_dir() and _empty(options.keep)):
        raise DemoFailed(f"{options.keep} is not an empty directory", hint="--keep takes a new or an empty directory")
    if options.keep is not None:
        try:
            options.keep.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DemoFailed(
                f"{options.keep} cannot be made: {error.strerror}", hint="choose another --keep"
            ) from error


def _empty(directory: Path) -> bool:
    return next(directory.iterdir(), None) is None


@contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    """The directory of all homes, logs and events: `keep`, or a temporary one."""
    if keep is not None:
        yield keep.resolve()
    else:
        with tempfile.TemporaryDirectory(prefix="shoal-demo-") as temporary:
            yield Path(temporary)


async def _wait(condition: Callable[[], bool]) -> None:
    """Looks again and again until something holds about other processes, which cannot set an event of ours."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(POLL)


class _Stage:
    """Plays one demo: its daemons, and what has happened to them."""

    def __init__(self, options: DemoOptions, root: Path, display: Display, command: Sequence[str]) -> None:
        self.children: list[Child] = []
        self.sample = ""
        self.failure: DemoFailed | None = None
        self._options = options
        self._root = root
        self._display = display
        self._command = command
        self._settings = options.settings
        schedule = Schedule(self._settings, self._settings.algorithm.recipe())
        self._last = schedule.last
        self._steps = schedule.before(options.rounds + 1)
        revisions = options.rounds * schedule.operations
        self._plot = Scenario(rounds=revisions, inner_steps=round(self._steps / revisions))
        self._began = 0.0  # on trio's clock, as the others
        self._drawn = 0.0
        self._complained: dict[str, float] = {}
        self._told: set[tuple[str, int]] = set()

    def scenario(self) -> Scenario:
        """What has happened."""
        return attrs.evolve(self._plot, failure=None if self.failure is None else str(self.failure))

    async def run(self) -> None:
        """Plays the demo to its end or its failure, and leaves no daemon behind."""
        self._began = trio.current_time()
        limit = 300 + 2.0 * self._steps  # generous for a slow and busy machine
        try:
            with trio.fail_after(limit):
                await self._play()
                self.sample = await self._take_sample()
        except trio.TooSlowError:
            self.failure = DemoFailed(f"the demo was not over after {limit:.0f} s")
        except DemoFailed as failure:
            self.failure = failure
        except ShoalError as error:
            self.failure = DemoFailed(str(error))
        finally:
            try:
                await self._stop()
            finally:
                for child in self.children:
                    child.kill()
        self._display.refresh(self.children)
        self._plot = attrs.evolve(self._plot, seconds=self._elapsed())

    async def _play(self) -> None:
        founder = await self._found()
        for number in range(1, self._options.peers):
            self._join(f"peer-{number}", founder)
        victim = self.children[-1]
        await self._kill_in_reduce(victim)
        survivors = [child for child in self.children if child is not victim]
        death_round = self._plot.killed_round or 0
        await self._until(lambda: all((child.recording.revision or 0) >= death_round for child in survivors))
        # Any peer's ticket will do, and a survivor that is not the founder proves it.
        self._join("newcomer", survivors[-1])
        self._plot = attrs.evolve(self._plot, joined="newcomer", joined_at=time.time())
        self._say("a new peer joins")
        await self._finish([child for child in self.children if child is not victim])

    async def _found(self) -> Child:
        options = self._options
        manifest = self._root / "manifest.toml"
        manifest.write_text(dump_settings(self._settings))
        self._say(
            f"{options.peers} daemons, {options.rounds} rounds of {round(self._steps / options.rounds)} inner steps"
        )
        founder = self._start("founder", "start", str(manifest), "--wait-for", str(options.peers))
        await self._until(lambda: bool(founder.read_ticket()))
        return founder

    def _join(self, name: str, contact: Child) -> Child:
        return self._start(name, "join", contact.read_ticket())

    def _start(self, name: str, *what: str) -> Child:
        """Starts a daemon that is called `name`."""
        child = Child(name, self._root)
        # However short the run is, the newcomer finds somebody.
        flags = {"--linger": LINGER, "--max-upload": UPLOAD}
        child.start_daemon(self._command, *what, data=self._options.data, flags=flags)
        self.children.append(child)
        return child

    async def _kill_in_reduce(self, victim: Child) -> None:
        """Kills a daemon as soon as it says that it has started a reduce, or between two if they are too short."""

        def round_to_die_in() -> int:
            started, done = victim.recording.last("round_started"), victim.recording.revision or 0
            round_ = 0 if started is None else started.integer("round")
            if round_ >= KILL_ROUND and round_ not in victim.recording.committed:
                return round_
            return done + 1 if done > KILL_ROUND else 0  # its reduces are over before anybody can look

        def is_over() -> bool:
            return victim.recording.revision == self._last or not victim.running

        await self._until(lambda: is_over() or round_to_die_in() > 0)
        if is_over():
            raise DemoFailed(f"{victim.name} was at the end before it could be killed", hint="use more --rounds")
        round_ = round_to_die_in()
        victim.kill()
        self._plot = attrs.evolve(self._plot, killed=victim.name, killed_round=round_, killed_at=time.time())
        self._say(f"{victim.name} gets SIGKILL in round {self._plot.killed_round}")

    async def _finish(self, alive: Sequence[Child]) -> None:
        """Waits until all daemons have the last round, and lets them go."""
        await self._until(lambda: any(self._is_done(child) for child in alive))
        with trio.move_on_after(LINGER):
            await self._until(lambda: all(self._is_done(child) for child in alive))
            await self._stop()
            for child in alive:
                child.poll()  # for their last words, which have the totals of bytes
            return
        late = next(child for child in alive if not self._is_done(child))
        raise DemoFailed(f"{late.name} did not get to the last round", log=late.log_tail())

    def _is_done(self, child: Child) -> bool:
        validated = child.recording.last("validation")
        last = self._last
        return child.recording.revision == last and validated is not None and validated.integer("round") == last

    async def _take_sample(self) -> str:
        """Text from the trained model; empty if that could not be had."""
        founder = self.children[0]
        output, log = self._root / "sample.txt", self._root / "sample.log"
        arguments = ["sample", "--home", str(founder.home), "--length", str(SAMPLE_BYTES)]
        process = spawn([*self._command, *arguments], log, output)
        with trio.move_on_after(SAMPLE_SECONDS):
            await _wait(lambda: process.poll() is not None)
        process.kill()
        if process.wait() != 0:
            self._say(f"no text sample: {log.read_text(errors='replace').strip() or 'it took too long'}")
            return ""
        return output.read_text(errors="replace").strip()

    async def _stop(self) -> None:
        """Ends what still runs: politely, then not."""
        for child in self.children:
            child.terminate()
        with trio.move_on_after(STOP, shield=True):
            await _wait(lambda: not any(child.running for child in self.children))

    async def _until(self, reached: Callable[[], bool]) -> None:
        """Follows the daemons until something holds; raises DemoFailed when one of them fails."""

        def polled() -> bool:
            self._poll()
            return reached()

        await _wait(polled)

    def _poll(self) -> None:
        for child in self.children:
            exit_code = child.exit_code  # before its last events are read, so that none is missed
            for event in child.poll():
                self._narrate(event)
            self._check_health(child, exit_code)
        if trio.current_time() - self._drawn >= REDRAW:
            self._drawn = trio.current_time()
            self._display.refresh(self.children)

    def _check_health(self, child: Child, exit_code: int | None) -> None:
        """Raises DemoFailed if a daemon has failed, or ended before the run did."""
        if child.killed or (exit_code == 0 and child.recording.revision == self._last):
            return
        if exit_code is None:
            if not child.complained:
                return
            since = self._complained.setdefault(child.name, trio.current_time())
            if trio.current_time() - since < ERROR_SETTLE:
                return
            problem = "printed an error"
        elif exit_code != 0:
            problem = f"failed with exit code {exit_code}"
        else:
            problem = f"ended at revision {child.recording.revision}, before the last round"
        raise DemoFailed(f"{child.name} {problem}: {child.explanation()}", log=child.log_tail())

    def _narrate(self, event: Event) -> None:
        """Tells what is worth a line, once for the whole swarm."""
        if event.kind not in ("round_committed", "round_failed", "validation"):
            return
        round_ = event.integer("round")
        if (event.kind, round_) in self._told:
            return
        self._told.add((event.kind, round_))
        if event.kind == "round_committed":
            peers, sent = len(event.names("contributors")), size(event.number("bytes_sent"))
            self._say(f"round {round_}: {peers} contributors, {event.number('seconds'):.1f} s, {sent} sent by each")
        elif event.kind == "round_failed":
            self._say(f"round {round_}, attempt {event.integer('attempt')} failed: {event.text('reason')}")
        else:
            self._say(f"revision {round_}: validation loss {event.number('loss'):.3f} nats per byte")

    def _say(self, text: str) -> None:
        self._display.say(f"{self._elapsed():6.1f} s  {text}")

    def _elapsed(self) -> float:
        return trio.current_time() - self._began

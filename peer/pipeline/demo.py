"""`shoal demo --algorithm swarm`: a model in stages at real processes, some of which are killed.

One server dies while it does forward passes, one in backward passes, and one stage is reduced to a single server and
filled again. Then the events are judged: every sample counted once in every step, the servers of a stage agree, and the
loss is that of a run in this process that nothing has happened to.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import torch
import trio

from optim.swarm.ledger import audit
from peer.child import Child
from peer.data import Corpus
from peer.demo import COMMAND, POLL, STOP, UPLOAD, DemoFailed
from peer.manifest import ManifestError, dump_settings, settings_from
from peer.pipeline.audit import records
from peer.pipeline.files import StageFiles
from peer.pipeline.reference import undisturbed
from peer.recording import Event
from peer.settings import Settings
from peer.verdict import validation_losses
from protocol.errors import DataError

LEAST_STEPS = 30
"""So that there are steps left for those who come late."""

FIRST = 3
"""Steps before the first death, and between two."""

COMPARED = 5
"""Last steps whose losses are compared."""

TOLERANCE = 0.02
LIMIT = 600.0
"""Seconds for all of it, on a slow and busy machine."""


@attrs.frozen(kw_only=True)
class PipelineDemoOptions:
    """What to show."""

    peers: int = 7
    stages: int = 3
    steps: int = 60
    data: str = "stdlib"
    keep: Path | None = None
    """Where all files stay; None: nowhere."""
    json: bool = False

    @property
    def settings(self) -> Settings:
        """The run; raises ManifestError."""
        return settings_from(
            {
                "run": {"name": "demo", "seed": 1, "rounds": self.steps},
                "model": {"layers": 4, "width": 48, "heads": 4, "context": 64},
                "data": {"source": "stdlib" if self.data == "stdlib" else "text"},
                "inner": {"lr": 3e-3, "warmup": 10, "batch": 4},
                "round": {"grace": 2.0},
                "algorithm": {"name": "swarm", "stages": self.stages, "microbatches": 8},
            }
        )


@attrs.frozen(kw_only=True)
class PipelineVerdict:
    """How it went."""

    steps: int
    killed: dict[str, str]
    """Who died how."""
    refilled: int | None
    """The stage that was reduced to a single server, and filled again."""
    loss: float
    """The mean over the last steps."""
    loss_first: float
    loss_undisturbed: float
    validation: dict[int, float]
    """On held-out text, by step."""
    problems: list[str]

    @property
    def passed(self) -> bool:
        """Whether all that was to be shown was shown."""
        return not self.problems

    def to_text(self) -> str:
        """For people."""
        killed = ", ".join(f"{name} {how}" for name, how in self.killed.items())
        lines = {
            "verdict": "PASSED" if self.passed else "FAILED",
            "steps": self.steps,
            "killed": killed or "nobody",
            "refilled": "no stage" if self.refilled is None else f"stage {self.refilled}",
            "loss": f"{self.loss_first:.4f} → {self.loss:.4f}; undisturbed {self.loss_undisturbed:.4f}",
            "validation": " → ".join(f"{self.validation[step]:.4f}" for step in _ends(self.validation)) or "never",
        }
        problems = [f"  problem     {problem}" for problem in self.problems]
        return "\n".join([*(f"  {name:<11} {value}" for name, value in lines.items()), *problems])


def run_pipeline_demo(options: PipelineDemoOptions, *, command: Sequence[str] = COMMAND) -> int:
    """Plays the demo and prints its verdict. Call it from the main thread.

    Returns:
        The exit code: 0 passed, 1 failed, 2 impossible options, 130 interrupted.
    """
    try:
        settings, corpus = options.settings, Corpus.open(options.data)
        if options.peers < 2 * options.stages or options.steps < LEAST_STEPS:
            raise DemoFailed(
                f"{options.peers} peers and {options.steps} steps are too few",
                hint=f"two die, so it takes --peers {2 * options.stages} and --rounds {LEAST_STEPS}",
            )
    except (ManifestError, DataError, DemoFailed) as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="shoal-demo-") as temporary:
        play = _Play(options, settings, options.keep or Path(temporary), command)
        try:
            trio.run(play.run)
        except KeyboardInterrupt:
            return 130
        verdict = play.judge(undisturbed(settings, corpus))
    print(verdict.to_text(), file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps({"passed": verdict.passed, **attrs.asdict(verdict)}), flush=True)
    return 0 if verdict.passed else 1


class _Play:
    def __init__(self, options: PipelineDemoOptions, settings: Settings, root: Path, command: Sequence[str]) -> None:
        self._options, self._settings, self._root, self._command = options, settings, root.resolve(), command
        self._children: list[Child] = []
        self._killed: dict[str, str] = {}
        self._refilled: int | None = None
        self._failure: str | None = None

    async def run(self) -> None:
        """Plays to the end, and leaves no process behind."""
        try:
            with trio.fail_after(LIMIT):
                await self._act()
        except trio.TooSlowError:
            self._failure = f"the demo was not over after {LIMIT:.0f} s"
        except DemoFailed as failure:
            self._failure = str(failure)
        finally:
            for child in self._children:
                child.terminate()
            with trio.move_on_after(STOP, shield=True):
                while any(child.running for child in self._children):  # noqa: ASYNC110 - other processes
                    await trio.sleep(POLL)
            for child in self._children:
                child.kill()

    async def _act(self) -> None:
        options = self._options
        manifest = self._root / "manifest.toml"
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_text(dump_settings(self._settings))
        founder = self._start("founder", "start", str(manifest), "--wait-for", str(options.peers))
        await self._until(lambda: bool(founder.read_ticket()))
        for number in range(1, options.peers):
            self._start(f"peer-{number}", "join", founder.read_ticket())
        self._say(f"{options.peers} peers, {options.stages} stages, {options.steps} steps")
        await self._until(lambda: self._steps() >= FIRST)
        await self._kill_in("forward", range(options.stages - 1))
        made = self._steps()
        await self._until(lambda: self._steps() >= made + FIRST)
        stage = await self._kill_in("backward", range(options.stages))
        while len(servers := self._servers(stage)) > 1:
            self._kill(next(child for child in servers if child is not founder), f"as stage {stage} is emptied")
        self._say(f"stage {stage} has a single server; a newcomer comes")
        self._start("newcomer", "join", founder.read_ticket())
        await self._until(lambda: len(self._servers(stage)) > 1)
        self._refilled = stage
        self._say(f"stage {stage} has {len(self._servers(stage))} servers again")
        await self._until(lambda: all(not child.running for child in self._children))

    async def _kill_in(self, kind: str, stages: range) -> int:
        """Kills a server, not the founder or a stage's last, as soon as it says that it does such passes of a step."""
        founder, seen = self._children[0], {id(event) for child in self._children for event in child.recording.events}

        def found() -> tuple[Child, Event] | None:
            for stage in stages:
                servers = self._servers(stage)
                for child in servers if len(servers) > 1 else ():
                    event = child.recording.last("stage_pass")
                    if child is not founder and event and id(event) not in seen and event.text("kind") == kind:
                        return child, event
            return None

        await self._until(lambda: found() is not None)
        victim = found()
        assert victim is not None
        child, event = victim
        self._kill(child, f"in {kind} passes of step {event.integer('step')} at stage {event.integer('stage')}")
        return event.integer("stage")

    def _kill(self, child: Child, how: str) -> None:
        child.kill()
        self._killed[child.name] = how
        self._say(f"{child.name} gets SIGKILL {how}")

    def _servers(self, stage: int) -> list[Child]:
        """Processes that have the state of a stage, by what they have said last."""
        found = []
        for child in self._children:
            told = [event for event in child.recording.events if event.kind in ("stage_synced", "moved")]
            if child.running and told and told[-1].kind == "stage_synced" and told[-1].integer("stage") == stage:
                found.append(child)
        return found

    def _steps(self) -> int:
        """Steps that all stages have made."""
        made = [event for child in self._children for event in child.recording.of("stage_step")]
        return min(
            max((event.integer("step") + 1 for event in made if event.integer("stage") == stage), default=0)
            for stage in range(self._options.stages)
        )

    def _start(self, name: str, *what: str) -> Child:
        child = Child(name, self._root)
        child.start_daemon(self._command, *what, "--no-map", data=self._options.data, flags={"--max-upload": UPLOAD})
        self._children.append(child)
        return child

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            for child in self._children:
                child.poll()
                if not child.running and child.exit_code and child.name not in self._killed:
                    raise DemoFailed(f"{child.name} has failed: {child.explanation()}")
            if not any(child.running for child in self._children) and not condition():
                raise DemoFailed("all peers were done before everything had happened")
            await trio.sleep(POLL)

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr if self._options.json else sys.stdout, flush=True)

    def judge(self, reference: list[float]) -> PipelineVerdict:
        """What the events say."""
        options, settings = self._options, self._settings
        events: list[Event] = []
        for child in self._children:
            child.poll()
            events += child.recording.events
        plain = ({"event": event.kind, **event.fields} for event in events)
        samples = dict.fromkeys(range(8), settings.inner.batch)
        problems = [self._failure] if self._failure else []
        problems += audit(records(plain), stages=options.stages, steps=range(options.steps), samples=samples)
        problems += self._disagreements()
        losses = _losses(events)
        last = range(options.steps - COMPARED, options.steps)
        ours = [losses[step] for step in last if step in losses]
        loss = sum(ours) / len(ours) if ours else float("nan")
        expected = sum(reference[step] for step in last) / COMPARED
        if not abs(loss / expected - 1) <= TOLERANCE:
            problems.append(f"the loss is {loss:.4f}, and {expected:.4f} in an undisturbed run")
        validation = validation_losses([child.recording for child in self._children])
        first, *later = (validation[step] for step in _ends(validation)) if validation else (math.nan,)
        if not later or not later[0] < first:
            problems.append("the validation loss did not fall, or was not measured")
        return PipelineVerdict(
            steps=self._steps(),
            killed=self._killed,
            refilled=self._refilled,
            loss=loss,
            loss_first=losses.get(0, float("nan")),
            loss_undisturbed=expected,
            validation=validation,
            problems=problems,
        )

    def _disagreements(self) -> list[str]:
        """Stages whose servers have ended with different parameters, or with none."""
        problems, steps = [], self._options.steps
        for stage in range(self._options.stages):
            files = [StageFiles(child.home / "checkpoints") for child in self._children if not child.killed]
            found = [state.model for each in files if (state := each.load(stage, steps)) is not None]
            if not found:
                problems.append(f"nobody has the last state of stage {stage}")
            if any(not torch.equal(found[0][name], each[name]) for each in found for name in each):
                problems.append(f"the servers of stage {stage} have different parameters")
        return problems


def _ends(measured: dict[int, float]) -> list[int]:
    """The first and the last step of which there is a measurement, if these are two."""
    return sorted({min(measured), max(measured)}) if measured else []


def _losses(events: Sequence[Event]) -> dict[int, float]:
    """The mean loss of each step, over what all trainers have led."""
    sums: dict[int, tuple[float, int]] = {}
    for event in events:
        if event.kind == "inner":
            total, count = sums.get(event.integer("step"), (0.0, 0))
            samples = event.integer("samples")
            sums[event.integer("step")] = (total + samples * event.number("loss"), count + samples)
    return {step: total / count for step, (total, count) in sums.items()}

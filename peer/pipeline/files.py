"""Stages' states on the disk of a peer: what a restart goes on from, and what whole models are put together of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs
import torch

from optim import FlatParameters, OuterState
from optim.swarm.stages import cut
from optim.swarm.state import StageState, whole_state
from peer.algorithm import PIPELINE
from peer.chain import Header
from peer.checkpoint import Checkpoint
from peer.checkpoint import load as load_checkpoint
from peer.checkpoint import save as save_checkpoint
from peer.history import History
from peer.home import CheckpointError, CheckpointNotSaved, Home, HomeError, write_atomically
from peer.manifest import Manifest, kept_manifest
from peer.model import Transformer
from peer.pipeline.tensors import dump, load
from peer.settings import ModelSettings
from peer.state import CommittedState
from protocol.errors import ProtocolError, SettingsError

KEPT = 2
"""Files of a stage that stay: all stages have one of the same step then, as none is more than one file ahead."""

_NAME = re.compile(r"stage-(\d{4})-(\d{10})\.safetensors")


class StageFiles:
    """The states in a directory: `stage-STAGE-STEP.safetensors`, in the format of `peer.pipeline.tensors`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def steps(self, stage: int) -> list[int]:
        """Of which steps there are files of a stage, the newest first."""
        return sorted((step for each, step in self._found() if each == stage), reverse=True)

    def newest(self) -> tuple[int, list[int]]:
        """The latest step that there is a file of, and the stages that have one of that step."""
        found = self._found()
        latest = max((step for _, step in found), default=0)
        return latest, sorted(stage for stage, step in found if step == latest)

    def save(self, stage: int, state: StageState) -> None:
        """Writes a stage's state, whole or not at all, and removes all but the newest few.

        Files of other stages, where we were before, go when this stage has as many that are newer. So do files of later
        steps, which are of a history that nobody goes on with, and parts that a killed process has left.

        Raises:
            CheckpointNotSaved: It cannot be written.
        """
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path(stage, state.step), dump(state))
            kept = [step for step in self.steps(stage) if step <= state.step][:KEPT]
            least = kept[-1] if len(kept) == KEPT else 0
            for other, step in self._found():
                if not least <= step <= state.step:
                    self._path(other, step).unlink()
            for path in self._directory.glob(".stage-*.safetensors.*"):  # of `write_atomically`
                path.unlink()
        except OSError as error:
            raise CheckpointNotSaved(f"stage {stage} cannot be saved: {error}", hint="free some space") from error

    def load(self, stage: int, step: int | None = None) -> StageState | None:
        """A stage's state of a step, or the newest that can be read; None if there is none."""
        for each in self.steps(stage):
            if step in (None, each):
                try:
                    return load(self._path(stage, each).read_bytes(), each)
                except (OSError, ProtocolError):  # a damaged file is passed over
                    continue
        return None

    def _path(self, stage: int, step: int) -> Path:
        return self._directory / f"stage-{stage:04d}-{step:010d}.safetensors"

    def _found(self) -> list[tuple[int, int]]:
        if not self._directory.is_dir():
            return []
        matches = [_NAME.fullmatch(path.name) for path in self._directory.iterdir()]
        return [(int(match[1]), int(match[2])) for match in matches if match]


def export_model(home: Home, others: Iterable[Home]) -> Path:
    """Writes the whole model as a checkpoint into a home, from its files and those of others.

    Raises:
        CheckpointError: They do not make a whole model.
        HomeError: A home is of another run, or of none.
    """
    manifest = kept_manifest(home)
    if manifest is None or manifest.settings.algorithm.name != PIPELINE:
        raise HomeError(f"{home.path} is not the home of a peer of a run of stages")
    directories = [home.checkpoints]
    for other in others:
        if kept_manifest(other, manifest.run_id) is None:
            raise HomeError(f"{other.path} is not the home of a peer of this run")
        directories.append(other.checkpoints)
    stages = manifest.settings.algorithm["stages"]
    assert isinstance(stages, int)
    return save_checkpoint(home.checkpoints, *assemble(manifest, directories, stages))


def assemble(manifest: Manifest, directories: Iterable[Path], stages: int) -> tuple[Checkpoint, FlatParameters]:
    """The whole model as a checkpoint, from the files of several peers: of the latest step that all stages have.

    Raises:
        CheckpointError: There is no such step, or the files belong to another model.
    """
    files = [StageFiles(directory) for directory in directories]
    common = set.intersection(*({step for each in files for step in each.steps(stage)} for stage in range(stages)))
    for step in sorted(common, reverse=True):
        found = [next(filter(None, (each.load(stage, step) for each in files)), None) for stage in range(stages)]
        states = [state for state in found if state is not None]
        if len(states) == stages:
            return _checkpoint(manifest, states)
    missing = [stage for stage in range(stages) if not any(each.steps(stage) for each in files)]
    raise CheckpointError(
        f"there is no file of stage {missing[0]}" if missing else "the stages' files are of different steps",
        hint="name the homes of peers of all stages",
    )


def cut_checkpoint(path: Path, manifest: Manifest, home: Home) -> None:
    """Writes into a home what its run begins with: the states of its stages, from a checkpoint of another run.

    Raises:
        CheckpointError: It is no checkpoint of a run of stages with the same model, or is at the run's last step, or
            there is no room.
        HomeError: The home is in a run already.
    """
    if kept_manifest(home) is not None:
        raise HomeError(f"{home.path} is in a run already, and goes on with it", hint="use another --home")
    checkpoint, settings = load_checkpoint(path), manifest.settings
    model, local_steps = Transformer(settings.model, seed=settings.run.seed), int(settings.algorithm["local_steps"])
    if (other := checkpoint.settings.algorithm.name) != PIPELINE:
        raise CheckpointError(f"{path} is of a run with the algorithm {other}, which has no stages")
    if checkpoint.settings.model != settings.model:
        raise CheckpointError(f"{path} is of another model: {_differences(checkpoint.settings.model, settings.model)}")
    # A step has another number of local steps now, perhaps: the schedule of learning rates goes on where it was.
    done = checkpoint.state.header.revision * int(checkpoint.settings.algorithm["local_steps"])
    step = max(1, done // local_steps)
    if 0 < settings.run.rounds <= step:
        raise CheckpointError(
            f"{path} would be step {step}, and the run has {settings.run.rounds}",
            hint="a run goes on at the checkpoint's step: give it more --rounds",
        )
    layout, files = FlatParameters(model), StageFiles(home.checkpoints)
    whole = layout.scatter(checkpoint.state.outer.parameters)
    moments = {kind: layout.scatter(values) for kind, values in checkpoint.inner.items() if kind != "step"}
    if checkpoint.inner:
        moments["step"] = dict.fromkeys(whole, checkpoint.inner["step"])
    buffers = checkpoint.state.outer.buffers if local_steps > 1 else {}
    outer = {kind: layout.scatter(values) for kind, values in buffers.items()}
    stages = settings.algorithm["stages"]
    assert isinstance(stages, int)
    for number, stage in enumerate(cut(model.chain(), stages)):
        names = [name for name, _ in stage.model.named_parameters()]
        values = {name: whole[name] for name in names}
        files.save(number, StageState(step, values, _part(moments, names), outer=_part(outer, names)))


def _differences(theirs: ModelSettings, ours: ModelSettings) -> str:
    pairs = zip(attrs.asdict(theirs).items(), attrs.astuple(ours), strict=True)
    return ", ".join(f"{name} {value}, not {here}" for (name, value), here in pairs if value != here)


def _part(
    by_kind: Mapping[str, Mapping[str, torch.Tensor]], names: Iterable[str]
) -> dict[str, dict[str, torch.Tensor]]:
    return {kind: {name: named[name] for name in names} for kind, named in by_kind.items()}


def _checkpoint(manifest: Manifest, states: list[StageState]) -> tuple[Checkpoint, FlatParameters]:
    layout = FlatParameters(Transformer(manifest.settings.model, seed=manifest.settings.run.seed))
    try:
        whole = whole_state(states)
        buffers = {kind: layout.gather(named) for kind, named in whole.outer.items()}
        outer = OuterState(layout.gather(whole.model), buffers)
        inner = {kind: layout.gather(named) for kind, named in whole.inner.items() if kind != "step"}
    except (SettingsError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"the files do not fit together: {error}") from error
    if steps := whole.inner.get("step"):
        inner["step"] = next(iter(steps.values()))
    header = _header(manifest, whole.step, outer)
    state = CommittedState.seal(History((header,)), outer)
    assert state is not None
    return Checkpoint(manifest.settings, state, inner), layout


def _header(manifest: Manifest, step: int, outer: OuterState) -> Header:
    """Of a state that no peer vouches for: it is of so many steps, and has no history."""
    settings, zeros = manifest.settings, bytes(32)
    samples = settings.inner.batch * int(settings.algorithm["microbatches"]) * int(settings.algorithm["local_steps"])
    tokens = samples * settings.model.context * step
    root = CommittedState.genesis(manifest.run_id, outer).root
    run = manifest.run_id
    return Header(
        run=run, revision=step, previous=run, plan=zeros, contributions=zeros, weight=float(tokens), root=root
    )

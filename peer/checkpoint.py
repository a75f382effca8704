"""Checkpoints: the committed state and the local optimizer's memory, as safetensors.

A file holds one tensor per parameter (`model.<name>`), one per parameter and outer buffer (`outer.<buffer>.<name>`) and
the local optimizer's tensors (`inner.<name>`), so that any tool that reads safetensors can use it; what a method has a
peer remember is there as `own.<name>`. A JSON header in the file's metadata holds the run's settings, and the chain
header with which the history begins, whose packed links are the tensor `history`.

A checkpoint is written under a temporary name, synced to disk and renamed: a crash at any moment leaves the last one.
What crashes left half-written, and later revisions of a branch that was given up, go when the next one is saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import safetensors
import safetensors.torch
import torch

from optim import FlatParameters, OuterState
from peer.chain import Header, unpack_links
from peer.fingerprint import fingerprint
from peer.history import History
from peer.home import CheckpointError, CheckpointNotSaved
from peer.manifest import ManifestError, settings_from
from peer.settings import Settings
from peer.state import CommittedState
from protocol.errors import ProtocolError
from protocol.plan import MAX_MEMBERS

KEPT = 3
"""Checkpoints that stay in the directory, the newest ones."""

_UNUSABLE = (
    OSError,
    safetensors.SafetensorError,
    ManifestError,
    ProtocolError,
    KeyError,
    TypeError,
    ValueError,
    struct.error,
)
"""What reading a file raises that is no checkpoint."""


@attrs.frozen(eq=False)
class Checkpoint:
    """What a checkpoint file holds."""

    settings: Settings
    state: CommittedState
    inner: Mapping[str, torch.Tensor]
    """The local optimizer's tensors, as `Trainer.inner_state` gave them."""
    own: Mapping[str, torch.Tensor] = attrs.field(factory=dict)
    """What the peer remembers for itself of the method's exchanges, as `Trainer.own_state` gave it."""


def save(directory: Path, checkpoint: Checkpoint, layout: FlatParameters) -> Path:
    """Writes a checkpoint and removes all but the newest few.

    Args:
        directory: Where checkpoints live; made if missing.
        checkpoint: What to write.
        layout: The model's parameters by name and place.

    Raises:
        CheckpointNotSaved: The disk is full or the directory cannot be written. Earlier checkpoints stay as they were.
    """
    header = checkpoint.state.header
    path = directory / f"round-{header.revision:08d}.safetensors"
    temporary = path.with_suffix(".partial")
    outer = checkpoint.state.outer
    tensors = {f"model.{name}": values for name, values in layout.scatter(outer.parameters).items()}
    for buffer, flat in outer.buffers.items():
        tensors |= {f"outer.{buffer}.{name}": values for name, values in layout.scatter(flat).items()}
    tensors |= {f"inner.{name}": values for name, values in checkpoint.inner.items()}
    tensors |= {f"own.{name}": values for name, values in checkpoint.own.items()}
    links = bytearray(b"".join(checkpoint.state.history.links))
    tensors["history"] = torch.frombuffer(links, dtype=torch.uint8) if links else torch.empty(0, dtype=torch.uint8)
    metadata = {"shoal": json.dumps(_describe(checkpoint, layout))}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(tensors, temporary, metadata)
        _sync(temporary)
        temporary.rename(path)
        _sync(directory)
        _clean(directory, path)
    except (OSError, safetensors.SafetensorError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise CheckpointNotSaved(
            f"cannot write the checkpoint {path}: {error}", hint="free some space, or choose another --home"
        ) from error
    return path


def load_latest(directory: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None if there is none. Damaged ones are passed over."""
    for path in _newest_first(directory):
        try:
            return load(path)
        except CheckpointError:
            continue
    return None


def load(path: Path) -> Checkpoint:
    """Reads one checkpoint and checks its bytes against its digests.

    Raises:
        CheckpointError: It is unreadable, incomplete, or damaged.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if "shoal" not in metadata:
                raise _of_something_else(path, metadata)
            described = json.loads(metadata["shoal"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        settings = settings_from(described["settings"])
        links = tensors["history"].numpy().tobytes()
        history = History((_read_header(described["start"]),)).extended(unpack_links(links, MAX_MEMBERS))
        own_root = bytes.fromhex(described.get("root", ""))
        names: Sequence[str] = described["parameters"]
        outer = OuterState(
            _join(tensors, "model", names),
            {buffer: _join(tensors, f"outer.{buffer}", names) for buffer in described["buffers"]},
        )
    except _UNUSABLE as error:
        raise CheckpointError(f"{path} is not a usable checkpoint: {error}") from error
    state = CommittedState.seal(history, outer, own_root=own_root)
    inner, own = _under("inner.", tensors), _under("own.", tensors)
    hashes = {
        "digest": history.header.digest.hex(),
        "history": hashlib.sha256(links).hexdigest(),
        "inner": fingerprint(inner),
        "own": fingerprint(own),
    }
    if state is None or any(described.get(name) != value for name, value in hashes.items()):
        raise CheckpointError(f"{path} is damaged: its contents do not have the digest that it states")
    return Checkpoint(settings, state, inner, own)


def _of_something_else(path: Path, metadata: Mapping[str, str]) -> CheckpointError:
    if "step" in metadata:  # see `peer.pipeline.tensors`
        return CheckpointError(f"{path} is one stage of a model", hint="`shoal export` puts all stages together")
    return CheckpointError(f"{path} is not a checkpoint of Shoal")


def _under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _describe(checkpoint: Checkpoint, layout: FlatParameters) -> dict[str, Any]:
    history = checkpoint.state.history
    return {
        "format": 3,
        "settings": checkpoint.settings.tables(),
        "start": _write_header(history.headers[0]),
        "history": hashlib.sha256(b"".join(history.links)).hexdigest(),
        "digest": history.header.digest.hex(),
        "inner": fingerprint(checkpoint.inner),
        "own": fingerprint(checkpoint.own),
        "root": checkpoint.state.root.hex(),
        "parameters": [place.name for place in layout.slices],
        "buffers": sorted(checkpoint.state.outer.buffers),
    }


def _write_header(header: Header) -> dict[str, Any]:
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in attrs.asdict(header).items()}


def _read_header(described: Mapping[str, Any]) -> Header:
    """Raises KeyError, TypeError or ValueError."""

    def read(name: str) -> bytes:
        return bytes.fromhex(described[name])

    return Header(
        run=read("run"),
        revision=int(described["revision"]),
        previous=read("previous"),
        plan=read("plan"),
        contributions=read("contributions"),
        weight=float(described["weight"]),
        root=read("root"),
    )


def _join(tensors: Mapping[str, torch.Tensor], prefix: str, names: Sequence[str]) -> torch.Tensor:
    return torch.cat([tensors[f"{prefix}.{name}"].reshape(-1).to(torch.float32) for name in names])


def _newest_first(directory: Path) -> list[Path]:
    return sorted(directory.glob("round-*.safetensors"), reverse=True)


def _clean(directory: Path, saved: Path) -> None:
    """Removes what the checkpoint `saved` makes useless."""
    for partial in directory.glob("round-*.partial"):
        partial.unlink()
    checkpoints = _newest_first(directory)
    current = checkpoints.index(saved)
    for old in checkpoints[:current] + checkpoints[current + KEPT :]:
        old.unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

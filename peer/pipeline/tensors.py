"""A stage's state as bytes: for those who join the stage, and for the disk."""

from __future__ import annotations

import json
from collections.abc import Mapping

import safetensors
import safetensors.torch
import torch

from optim.swarm.state import StageState
from peer.fingerprint import fingerprint
from protocol.errors import ProtocolError

MEAN = "mean"
_DTYPES = {*(torch.float64, torch.float32, torch.float16, torch.bfloat16), *(torch.int64, torch.int32, torch.int16)}
_DTYPES |= {torch.int8, torch.uint8, torch.bool}
_MODEL, _INNER, _TIED, _OUTER = "model/", "inner/", "tied/", "outer/"


def dump(state: StageState) -> bytes:
    """A state in the format of safetensors: `model/NAME`, `inner/KIND/NAME`, `tied/STEP/NAME`, and perhaps `mean` and
    `outer/KIND/NAME`."""
    tensors = {_MODEL + name: values for name, values in state.model.items()}
    for kind, named in state.inner.items():
        tensors |= {f"{_INNER}{kind}/{name}": values for name, values in named.items()}
    for kind, named in state.outer.items():
        tensors |= {f"{_OUTER}{kind}/{name}": values for name, values in named.items()}
    for step, named in state.tied.items():
        tensors |= {f"{_TIED}{step}/{name}": values for name, values in named.items()}
    if state.mean is not None:
        tensors[MEAN] = state.mean
    plain = {name: values.detach().cpu().contiguous() for name, values in tensors.items()}
    return safetensors.torch.save(_apart(plain), {"step": json.dumps(state.step), "digest": fingerprint(plain)})


def load(data: bytes, step: int) -> StageState:
    """The inverse of `dump`.

    Raises:
        ProtocolError: It is not that, or is damaged, or a value is not finite.
    """
    tensors = load_tensors(data)
    if _stated_digest(data) != fingerprint(tensors):
        raise ProtocolError("a stage's state that does not have the digest that it states")
    tied = _by_first(tensors, _TIED)
    if not all(number.isdecimal() and len(number) < 16 for number in tied):
        raise ProtocolError("a stage's state with gradients of no step")
    model = {name.removeprefix(_MODEL): values for name, values in tensors.items() if name.startswith(_MODEL)}
    return StageState(
        step,
        model,
        _by_first(tensors, _INNER),
        tensors.get(MEAN),
        {int(number): named for number, named in tied.items()},
        _by_first(tensors, _OUTER),
    )


def _stated_digest(data: bytes) -> object:
    """What the metadata of tensors that can be read says: a length, and JSON, come first."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header.get("__metadata__", {}).get("digest")


def _by_first(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, dict[str, torch.Tensor]]:
    """Those called PREFIX FIRST/REST, by these."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, values in tensors.items():
        if name.startswith(prefix):
            first, slash, rest = name.removeprefix(prefix).partition("/")
            if not slash:
                raise ProtocolError(f"a stage's state with {name[:80]!r}")
            found.setdefault(first, {})[rest] = values
    return found


def dump_tensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Tensors by name, in the format of safetensors."""
    return safetensors.torch.save(_apart({name: each.detach().cpu().contiguous() for name, each in tensors.items()}))


def load_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """The inverse of `dump_tensors`.

    Raises:
        ProtocolError: It is not that, or a value is not finite.
    """
    try:
        tensors = safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise ProtocolError(f"tensors that cannot be read: {error}") from error
    for name, values in tensors.items():
        if values.dtype not in _DTYPES:
            raise ProtocolError(f"{name[:80]} has numbers of a strange kind: {values.dtype}")
        if not bool(torch.isfinite(values).all()):
            raise ProtocolError(f"{name[:80]} has values that are not finite")
    return tensors


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The format wants each tensor to have memory of its own."""
    seen: set[int] = set()
    apart = {}
    for name, values in tensors.items():
        place = values.untyped_storage().data_ptr()
        apart[name] = values.clone() if place in seen else values
        seen.add(place)
    return apart

"""What a peer has remembered for itself, taken back from a file: nothing of it is believed before it was looked at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch

from optim.recipe import GradientRecipe, Recipe
from optim.slots import Layout, Local, Memory, Mixed
from protocol.errors import SettingsError
from protocol.identity import PeerId

_ID = 32  # bytes of a peer's


@runtime_checkable
class Remembering(Protocol):
    """A mixer that remembers something, and says what it takes back."""

    def fits(self, name: str, values: torch.Tensor, layout: Layout) -> bool:
        """Whether it could have remembered this of such a vector."""
        ...


def checked(what: str, values: object, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """A private copy of fp32 values, on the CPU.

    Raises:
        SettingsError: These are none, or not of this shape, or not finite.
    """
    if not isinstance(values, torch.Tensor) or values.dtype != torch.float32:
        raise SettingsError(f"{what} is no tensor of fp32 numbers")
    if shape is not None and tuple(values.shape) != shape:
        raise SettingsError(f"{what} has shape {list(values.shape)}, not {list(shape)}")
    if not bool(torch.isfinite(values).all()):
        raise SettingsError(f"{what} is not finite")
    return values.detach().to("cpu", copy=True)


def numbers(what: str, values: object, *bounds: tuple[float, float]) -> list[float]:
    """As many numbers as there are bounds, which they keep.

    Raises:
        SettingsError: They do not.
    """
    found = values.double().flatten().tolist() if isinstance(values, torch.Tensor) else []
    fits = len(found) == len(bounds) and all(low <= one <= high for one, (low, high) in zip(found, bounds, strict=True))
    if not fits:
        raise SettingsError(f"{what} is {found}, which cannot be")
    return found


def checked_memory(
    recipe: Recipe | GradientRecipe, memory: Mapping[str, object], local: Local, whole: Layout
) -> dict[str, torch.Tensor]:
    """The memory of one fragment, as this recipe would have made it.

    Args:
        recipe: Whose memory it is.
        memory: What was saved.
        local: What would be exchanged of the fragment now.
        whole: The fragment, of which a process of a machine may have a part only: mixers see all of it.

    Raises:
        SettingsError: It belongs to another model or method, or is damaged.
    """
    taken, after = recipe.payload.take(local, {})
    made = recipe.feedback.after(taken, taken, after)
    result = {}
    for name, values in memory.items():
        what = f"what was remembered as {name!r}"
        result[name] = checked(what, values, tuple(made[name].shape) if name in made else None)
        if name not in made and not (
            isinstance(recipe.mixer, Remembering) and recipe.mixer.fits(name, result[name], whole)
        ):
            raise SettingsError(f"{what} is nothing that this method remembers of this model")
    return result


def told(mixed: Mixed, prefix: str) -> dict[str, torch.Tensor]:
    """A result as tensors by name, without the memory, which is kept elsewhere."""
    tensors = {
        "mean": mixed.mean.clone(),  # copies, as they may be the same
        "own": mixed.own.clone(),
        "members": torch.tensor(list(b"".join(mixed.members)), dtype=torch.uint8).view(-1, _ID),
        "numbers": torch.tensor([mixed.share, mixed.load, len(mixed.missed)], dtype=torch.float64),
    }
    found = {prefix + name: values for name, values in tensors.items()}
    for index, one in enumerate(mixed.missed):
        found |= told(one, f"{prefix}missed.{index}.")
    return found


def heard(tensors: dict[str, torch.Tensor], prefix: str, length: int) -> Mixed:
    """What `told` has told, of so many values; takes it out of the tensors.

    Raises:
        SettingsError: It is no such thing.
    """
    share, load, missed = numbers(
        prefix + "numbers", tensors.pop(prefix + "numbers", None), (0.0, 1.0), (0.0, 1.0), (0, len(tensors))
    )
    members = tensors.pop(prefix + "members", None)
    if members is None or members.dtype != torch.uint8 or members.shape[1:] != (_ID,):
        raise SettingsError(f"{prefix}members are no peers")
    return Mixed(
        mean=checked(prefix + "mean", tensors.pop(prefix + "mean", None), (length,)),
        own=checked(prefix + "own", tensors.pop(prefix + "own", None), (length,)),
        members=tuple(PeerId(bytes(row)) for row in members.tolist()),
        share=share,
        load=load,
        missed=tuple(heard(tensors, f"{prefix}missed.{index}.", length) for index in range(int(missed))),
    )


def split_memory(own: dict[str, torch.Tensor]) -> dict[str, Memory]:
    """Takes memory by fragment out of tensors named as by `joined_memory`."""
    memory: dict[str, dict[str, torch.Tensor]] = {}
    for name in [name for name in own if name.startswith("memory.")]:
        kept, _, key = name.removeprefix("memory.").partition("\n")
        memory.setdefault(key, {})[kept] = own.pop(name)
    return dict(memory)


def joined_memory(memory: Mapping[str, Memory]) -> dict[str, torch.Tensor]:
    """Memory by fragment as tensors by name."""
    return {f"memory.{name}\n{key}": values for key, kept in memory.items() for name, values in kept.items()}

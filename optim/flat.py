"""A model's trainable parameters as one flat fp32 tensor, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from optim.shards import Span, local, local_parameter, span_of
from protocol.errors import SettingsError


@attrs.frozen
class Slice:
    """Where one parameter lies in the flat tensor: `flat[start:stop].view(shape)`."""

    name: str
    shape: torch.Size
    start: int
    stop: int


@attrs.frozen
class Selection:
    """Some of the tensors of a flat vector, and how they make a vector of their own."""

    places: tuple[int, ...]
    """Which of them, in order."""
    layout: tuple[Slice, ...] = attrs.field(eq=False)
    """Where they lie in the selection."""
    _spans: tuple[tuple[int, int], ...] = attrs.field(eq=False)  # where they lie in the whole vector
    _whole: bool = attrs.field(eq=False)

    def take(self, flat: torch.Tensor) -> torch.Tensor:
        """The selected values. If all are selected, `flat` itself."""
        if self._whole:
            return flat
        return torch.cat([flat[start:stop] for start, stop in self._spans])

    def put(self, flat: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """A vector like `flat` with these in their places. If all are selected, `values` itself."""
        if self._whole:
            return values
        changed = flat.clone()
        parts = torch.split(values, [stop - start for start, stop in self._spans])
        for (start, stop), part in zip(self._spans, parts, strict=True):
            changed[start:stop] = part
        return changed


def select(slices: Sequence[Slice], places: Iterable[int]) -> Selection:
    """The tensors at these places."""
    chosen = tuple(places)
    layout, at = [], 0
    for place in chosen:
        size = slices[place].stop - slices[place].start
        layout.append(attrs.evolve(slices[place], start=at, stop=at + size))
        at += size
    spans = tuple((slices[place].start, slices[place].stop) for place in chosen)
    return Selection(chosen, tuple(layout), spans, chosen == tuple(range(len(slices))))


class FlatParameters:
    """The trainable parameters of a model, in the order in which the model names them.

    Frozen parameters are left out. Tied ones, the same parameter or the same memory under several names, are taken
    once, under the first name. Values are written into the tensors that the model already has, so that compiled graphs
    and optimizers keep working.

    Of a model that several processes share (FSDP2), the flat tensor holds what this process has: a part of each
    parameter, maybe none.

    Raises:
        SettingsError: There is nothing to train, or a parameter whose values are not real floating-point numbers, or
            one that is shared in another way than FSDP2's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = unwrapped(model)
        self._parameters = dict(_trainable(self._model))
        for name, parameter in self._parameters.items():
            if not parameter.is_floating_point():
                raise SettingsError(f"parameter {name} is of type {parameter.dtype}, which cannot be averaged")
        self.slices: tuple[Slice, ...] = _layout({name: local(each) for name, each in self._parameters.items()})
        """The parameters in the flat tensor."""
        self.whole: tuple[Slice, ...] = _layout(self._parameters)
        """The same for a process that has all of each: places that all peers agree on."""
        self.spans: tuple[Span, ...] = tuple(span_of(name, each) for name, each in self._parameters.items())
        """Which part of each parameter is here."""
        if not self.whole or self.whole[-1].stop == 0:
            raise SettingsError("the model has no trainable parameters")
        self.length: int = self.slices[-1].stop

    def holds(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether all of these are among the parameters here, be it under another name."""
        return {_memory(parameter) for parameter in parameters} <= {_memory(ours) for ours in self._parameters.values()}

    def parameters(self) -> Iterator[tuple[Slice, nn.Parameter]]:
        """The parameters, as far as they are here, with their places."""
        return zip(self.slices, map(local_parameter, self._parameters.values()), strict=True)

    def originals(self) -> Iterator[tuple[Slice, nn.Parameter]]:
        """The parameters as the model has them, which may be shared, with the places of what is here."""
        return zip(self.slices, self._parameters.values(), strict=True)

    def read(self) -> torch.Tensor:
        """A copy of the model's values: one-dimensional, fp32, on the CPU.

        Raises:
            SettingsError: The model has other parameters in the place of these.
        """
        self._check_kept()
        return self.gather({name: local(parameter.detach()) for name, parameter in self._parameters.items()})

    def _check_kept(self) -> None:
        if any(local(parameter) is not parameter for parameter in self._parameters.values()):
            return  # FSDP2 puts others in place, and back, by itself
        kept = set(self._model.parameters())
        for name, parameter in self._parameters.items():
            if parameter not in kept:
                raise SettingsError(
                    f"parameter {name} is not the model's any more, which has another one in its place",
                    hint="Load with assign=True, convert or shard the model before its optimizers are made.",
                )

    @torch.no_grad()
    def write(self, flat: torch.Tensor) -> None:
        """Copies values into the model, rounding them to its parameters' number formats."""
        for name, values in self.scatter(flat).items():
            local(self._parameters[name]).copy_(values)

    def read_gradient(self) -> torch.Tensor:
        """A copy of the gradients, as of the values; zeros where there is none."""
        gradients = {name: parameter.grad for name, parameter in self._parameters.items()}
        none = torch.zeros(())
        return self.gather({name: none if each is None else local(each) for name, each in gradients.items()})

    @torch.no_grad()
    def write_gradient(self, flat: torch.Tensor) -> None:
        """Copies values into the gradients."""
        for name, values in self.scatter(flat).items():
            parameter = self._parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            local(parameter.grad).copy_(values)

    def rounded(self, flat: torch.Tensor) -> torch.Tensor:
        """The values that `read` would return after a `write`. For fp32 models that is `flat` itself."""
        if all(parameter.dtype == torch.float32 for parameter in self._parameters.values()):
            return flat
        named = self.scatter(flat)
        return self.gather({name: named[name].to(parameter.dtype) for name, parameter in self._parameters.items()})

    def scatter(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views into a flat tensor, by parameter name and in the parameters' shapes."""
        if flat.shape != (self.length,):
            raise SettingsError(f"the model has {self.length} trainable values, but was given shape {list(flat.shape)}")
        return {place.name: flat[place.start : place.stop].view(place.shape) for place in self.slices}

    def gather(self, named: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The inverse of `scatter`: a new flat fp32 tensor on the CPU."""
        flat = torch.empty(self.length, dtype=torch.float32)
        for name, values in self.scatter(flat).items():
            values.copy_(named[name])
        return flat


def _layout(named: Mapping[str, torch.Tensor]) -> tuple[Slice, ...]:
    slices, start = [], 0
    for name, tensor in named.items():
        slices.append(Slice(name, tensor.shape, start, start + tensor.numel()))
        start += tensor.numel()
    return tuple(slices)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, inside of `DistributedDataParallel` and `torch.compile`: peers may differ in what they use."""
    while True:
        inside = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inside, nn.Module):
            return model
        model = inside


def _trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    seen = set()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and _memory(parameter) not in seen:
            seen.add(_memory(parameter))
            yield name.replace("_orig_mod.", ""), parameter  # a part of the model may be compiled by itself


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """What is equal for tensors that are the same memory."""
    part = local(tensor)
    if part.numel() == 0:
        return (id(tensor),)
    return (part.device, part.data_ptr(), part.shape, part.stride())

"""How a model is cut into stages, and put together again.

A model is a chain of links, the steps of its forward pass. A link names the parts of the model that it uses, and a
stage is a run of links with a copy of their parts, at the places that they have in the model. So a stage's parameters
have the names that they have in the whole model, whatever the number of stages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from protocol.errors import SettingsError

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The loss of each sample, of shape (samples,), from the model's outputs and the targets."""


@attrs.frozen(eq=False)
class Link:
    """One step of a model's forward pass. What goes from one to the next is one tensor, samples first."""

    parts: tuple[str, ...]
    """Modules, parameters and buffers that it uses, by their dotted paths in the model."""
    run: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    """A function of a module that has these parts at these paths, and of what the link before has returned."""


@attrs.frozen(eq=False)
class Chain:
    """A model as links, whose composition is its forward pass, and its loss.

    The model may be without memory (on the device "meta", but for buffers that are not saved); stages get theirs when
    they load values.
    """

    model: nn.Module
    links: tuple[Link, ...]
    loss: Loss
    vocabulary: int | None = None
    """How many tokens there are: inputs and targets that are tokens lie below. None: anything goes."""

    def weight(self, link: Link) -> int:
        """How many parameters a link uses."""
        model = self.model
        found = {id(each): each.numel() for path in link.parts for each in _parameters(_at(model, path))}
        return sum(found.values())


def sequential(model: nn.Sequential, loss: Loss) -> Chain:
    """A chain of modules, each of which is called with what the one before has returned."""

    def call(name: str) -> Link:
        return Link((name,), lambda parts, x: parts.get_submodule(name)(x))

    return Chain(model, tuple(call(name) for name, _ in model.named_children()), loss)


def sample_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy, the mean over a sample's tokens; logits (samples, length, vocabulary), targets (samples, length).

    Targets are the tokens that follow, already shifted.
    """
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(1)


class Stage(nn.Module):
    """A run of links with copies of their parts, under `model`.

    Args:
        chain: The whole model.
        links: Which of its links, a range.

    Raises:
        SettingsError: A second forward pass would differ from the first: there is dropout or batch normalisation.
    """

    def __init__(self, chain: Chain, links: range) -> None:
        super().__init__()
        mine = chain.links[links.start : links.stop]
        parts = nn.Module()
        for path in dict.fromkeys(path for link in mine for path in link.parts):
            _graft(parts, chain.model, path)
        _check(parts)
        others = [link for index, link in enumerate(chain.links) if index not in links]
        elsewhere = {id(each) for link in others for path in link.parts for each in _parameters(_at(chain.model, path))}
        first_names: dict[int, str] = {}
        for name, parameter in chain.model.named_parameters(remove_duplicate=False):
            first_names.setdefault(id(parameter), name)
        self.tied: Mapping[str, str] = {
            name: first_names[id(parameter)]
            for name, parameter in parts.named_parameters()
            if id(parameter) in elsewhere
        }
        """Parameters that other stages use as well: the name here, and the first of its names in the whole model."""
        self.model = copy.deepcopy(parts)
        self._runs = tuple(link.run for link in mine)
        self._loss = chain.loss if links.stop == len(chain.links) else None
        self.vocabulary = chain.vocabulary

    @property
    def is_last(self) -> bool:
        """Whether it makes losses of targets."""
        return self._loss is not None

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """What goes to the next stage; at the last, each sample's loss, or without targets the model's outputs."""
        for run in self._runs:
            x = run(self.model, x)
        return x if self._loss is None or targets is None else self._loss(x, targets)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes this stage's values out of the state of a whole model, or of any part of it that holds them.

        Raises:
            SettingsError: Values are missing, or have other shapes.
        """
        own = self.model.state_dict()
        if missing := sorted(own.keys() - state.keys()):
            raise SettingsError(f"the state has no {missing[0]}" + f" and {len(missing) - 1} more" * (len(missing) > 1))
        for name, values in own.items():
            if values.shape != state[name].shape:
                raise SettingsError(f"{name} has shape {list(state[name].shape)}, not {list(values.shape)}")
        _allocate(self.model)
        self.model.load_state_dict({name: state[name] for name in own})

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of the values, by their names in the whole model."""
        return {name: values.detach().clone() for name, values in self.model.state_dict().items()}


def cut(chain: Chain, count: int) -> list[Stage]:
    """So many stages, the largest of which has as few parameters as possible.

    Raises:
        SettingsError: The model has fewer links; or see `Stage`.
    """
    return [Stage(chain, links) for links in bounds([chain.weight(link) for link in chain.links], count)]


def bounds(weights: Sequence[int], count: int) -> list[range]:
    """Cuts a row of weights into so many runs, none empty, the heaviest of which is as light as possible.

    Raises:
        SettingsError: There are fewer weights.
    """
    if not 1 <= count <= len(weights):
        raise SettingsError(f"a model of {len(weights)} links cannot be cut into {count} stages")
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_fill(weights, middle, 1)) <= count else (middle + 1, high)
    return _fill(weights, low, count)


def assemble(states: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The state of the whole model, from those of all its stages.

    Raises:
        SettingsError: Stages hold different values of what they have in common: they are of different steps.
    """
    whole: dict[str, torch.Tensor] = {}
    for state in states:
        for name, values in state.items():
            if not torch.equal(whole.setdefault(name, values), values):
                raise SettingsError(f"stages have different values of {name}", hint="take states of the same step")
    return whole


def _fill(weights: Sequence[int], capacity: int, count: int) -> list[range]:
    """Runs as long as the capacity allows, but at least `count` of them."""
    runs: list[range] = []
    start, load = 0, 0
    for index, weight in enumerate(weights):
        full = load + weight > capacity or len(weights) - index < count - len(runs)
        if index > start and full:
            runs.append(range(start, index))
            start, load = index, 0
        load += weight
    return [*runs, range(start, len(weights))]


def _at(model: nn.Module, path: str) -> nn.Module | torch.Tensor:
    owner, _, name = path.rpartition(".")
    part: nn.Module | torch.Tensor = getattr(model.get_submodule(owner), name)
    return part


def _parameters(part: nn.Module | torch.Tensor) -> Iterator[nn.Parameter]:
    if isinstance(part, nn.Module):
        yield from part.parameters()
    elif isinstance(part, nn.Parameter):
        yield part


def _graft(parts: nn.Module, model: nn.Module, path: str) -> None:
    """Puts a part of the model at its path, into a tree that has nothing else."""
    *owners, name = path.split(".")
    for owner in owners:
        if owner not in parts._modules:
            parts.add_module(owner, nn.Module())
        parts = parts.get_submodule(owner)
    part = _at(model, path)
    if isinstance(part, nn.Module):
        parts.add_module(name, part)
    elif isinstance(part, nn.Parameter):
        parts.register_parameter(name, part)
    else:
        holder = model.get_submodule(".".join(owners))
        parts.register_buffer(name, part, persistent=name not in holder._non_persistent_buffers_set)


def _check(parts: nn.Module) -> None:
    for name, module in parts.named_modules():
        if isinstance(module, _BatchNorm) or (isinstance(module, _DropoutNd) and module.p > 0):
            raise SettingsError(
                f"{name} ({type(module).__name__}) makes a second forward pass differ from the first",
                hint="stages repeat the forward pass in backward: set dropout to 0, and take another normalisation",
            )


def _allocate(parts: nn.Module) -> None:
    """Gives memory to parameters and saved buffers that have none."""
    made: dict[int, nn.Parameter] = {}
    for module in parts.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    empty = torch.empty_like(parameter, device="cpu")
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                if name in module._non_persistent_buffers_set:
                    raise SettingsError(
                        f"{name} has no values, and is not saved", hint="make the model with its buffers"
                    )
                module._buffers[name] = torch.empty_like(buffer, device="cpu")

"""The method of a run: which recipes the daemon can carry out, and with what constants."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeAlias

import attrs

from optim.methods import GRADIENT_RECIPES, RECIPES
from optim.mixers import RingMean
from optim.outers import Nesterov
from optim.policies import FixedSteps
from optim.radial import RadialMean
from optim.recipe import Recipe
from protocol.collective import Window

Constant: TypeAlias = bool | int | float | str

PIPELINE: Final = "swarm"
"""The method that cuts the model into stages."""


def swarm(
    *,
    stages: int = 4,
    microbatches: int = 32,
    activations: Literal["fp32", "bf16", "int8"] = "int8",
    local_steps: int = 1,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
) -> Recipe:
    """SWARM (arXiv 2301.11913): the model in stages at different peers, see `peer.pipeline`.

    With more local steps than one, the servers of a stage do DiLoCo among each other, as in DiLoCoX (arXiv 2506.21263)
    without its delay and its compression. With one, the outer constants have no meaning.
    """
    if not 1 <= stages <= 1024:
        raise ValueError("'stages' must be between 1 and 1024")
    if not 1 <= microbatches <= 4096:
        raise ValueError("'microbatches' must be between 1 and 4096")
    if not 1 <= local_steps <= 4096 // microbatches:
        raise ValueError("'local_steps' must be at least 1, and 4096 / microbatches at most")
    if local_steps == 1:
        if (outer_lr, outer_momentum) != (0.7, 0.9):
            raise ValueError("'outer_lr' and 'outer_momentum' are for 'local_steps' of more than 1")
        return Recipe(policy=FixedSteps(1), outer=Nesterov(lr=1.0, momentum=0.0))
    return Recipe(policy=FixedSteps(local_steps), outer=Nesterov(lr=outer_lr, momentum=outer_momentum))


METHODS: Final[Mapping[str, Callable[..., Recipe]]] = {**RECIPES, PIPELINE: swarm}
"""All that a daemon can carry out."""

_DEFAULTS: Final[Mapping[str, Mapping[str, Constant]]] = {"diloco": {"inner_steps": 50}}
"""Where runs of small models start from something else than the recipe does."""

_LARGEST: Final = {"outer_lr": 10.0}
MAX_INTEGER: Final = 1 << 24
"""No constant that is an integer is larger."""


@attrs.frozen(init=False)
class AlgorithmSettings:
    """`[algorithm]`: the recipe by name, and all of its constants: those that are not given have their defaults.

    Raises:
        ValueError: There is no such recipe, or it has no such constant.
    """

    name: str
    constants: tuple[tuple[str, Constant], ...]
    """By name, in the recipe's order."""

    def __init__(self, name: str = "diloco", **constants: Constant) -> None:
        if name not in METHODS:
            raise ValueError(f"there is no recipe {name!r}")
        values = defaults(name)
        if unknown := constants.keys() - values:
            raise ValueError(f"{name} has no constant {min(unknown)!r}")
        self.__attrs_init__(name, tuple({**values, **constants}.items()))

    def __getitem__(self, constant: str) -> Constant:
        return dict(self.constants)[constant]

    def get(self, constant: str) -> Constant | None:
        """A constant; None if the recipe has none of that name."""
        return dict(self.constants).get(constant)

    def table(self) -> dict[str, Constant]:
        """The table of the manifest."""
        return {"name": self.name, **dict(self.constants)}

    def recipe(self) -> Recipe:
        """The recipe.

        Raises:
            SettingsError, ValueError, TypeError: The constants cannot work.
        """
        return METHODS[self.name](**dict(self.constants))


def defaults(name: str) -> dict[str, Constant]:
    """All constants of a recipe, with their defaults."""
    parameters = inspect.signature(METHODS[name]).parameters
    return {key: parameter.default for key, parameter in parameters.items()} | dict(_DEFAULTS.get(name, {}))


def types_of(name: str) -> dict[str, Any]:
    """The types of a recipe's constants."""
    hints = typing.get_type_hints(METHODS[name])
    return {key: hint for key, hint in hints.items() if key != "return"}


def check_bounds(key: str, value: object) -> None:
    """Bounds that hold for a constant whatever the recipe is.

    Raises:
        ValueError: It is beyond them.
    """
    largest = _LARGEST.get(key, MAX_INTEGER if isinstance(value, int) else float("inf"))
    if isinstance(value, (int, float)) and value > largest:
        raise ValueError(f"must be <= {largest:g}" if isinstance(value, float) else f"must be <= {largest}")


def names() -> list[str]:
    """The recipes that the daemon can carry out in rounds."""
    return list(RECIPES)


def why_not(name: str) -> str | None:
    """Why the daemon cannot carry out a method that there is; None if it can."""
    if name in GRADIENT_RECIPES:
        return "it exchanges in every step, and a run makes rounds: use it with optim.GradientOptimizer"
    return None


def window_of(recipe: Recipe) -> Window | None:
    """When rounds go on without those who are late; None if they wait for all."""
    return recipe.mixer.window if isinstance(recipe.mixer, (RingMean, RadialMean)) else None

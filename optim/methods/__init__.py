"""The methods that ship, by name. Each is a function that puts a recipe together from its constants."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import TypeAlias, TypeVar

from optim.methods import asynchronous, diloco, gathered, gossip, late
from optim.recipe import GradientRecipe, Recipe
from protocol.errors import SettingsError

_T = TypeVar("_T")
Constant: TypeAlias = float | str

RECIPES: Mapping[str, Callable[..., Recipe]] = {
    "diloco": diloco.diloco,
    "fedavg": diloco.fedavg,
    "fedprox": diloco.fedprox,
    "fedsam": diloco.fedsam,
    "fedopt": diloco.fedopt,
    "slowmo": diloco.slowmo,
    "quadratic": diloco.quadratic,
    "paced": diloco.paced,
    "streaming": diloco.streaming,
    "eager": late.eager,
    "delayed": late.delayed,
    "dilocox": late.dilocox,
    "co2": late.co2,
    "asynchronous": asynchronous.asynchronous,
    "asynchronous-plain": asynchronous.asynchronous_plain,
    "decoupled": asynchronous.decoupled,
    "noloco": gossip.noloco,
    "gossip": gossip.gossip,
    "sparseloco": gathered.sparseloco,
}
"""Methods that exchange now and then, for `LowCommunicationOptimizer`."""

GRADIENT_RECIPES: Mapping[str, Callable[..., GradientRecipe]] = {
    "data-parallel": gathered.data_parallel,
    "powersgd": gathered.powersgd,
    "demo": gathered.demo,
    "lion": gathered.lion,
    "terngrad": gathered.terngrad,
}
"""Methods that exchange in every step, for `GradientOptimizer`."""


def recipe(name: str, **constants: Constant) -> Recipe:
    """The recipe called `name`, with its constants; those left out take the recipe's defaults.

    Raises:
        SettingsError: No such recipe, a constant that it does not have, or a value that cannot work.
    """
    return _make(RECIPES, name, constants)


def gradient_recipe(name: str, **constants: Constant) -> GradientRecipe:
    """As `recipe`, of the methods that exchange in every step.

    Raises:
        SettingsError: As `recipe`.
    """
    return _make(GRADIENT_RECIPES, name, constants)


def _make(known: Mapping[str, Callable[..., _T]], name: str, constants: Mapping[str, Constant]) -> _T:
    if name not in known:
        raise SettingsError(f"there is no algorithm {name!r}", hint=_suggest(name, known))
    parameters = inspect.signature(known[name]).parameters
    for constant in constants:
        if constant not in parameters:
            raise SettingsError(f"{name} has no setting {constant!r}", hint=_suggest(constant, parameters))
    try:
        return known[name](**constants)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{name} cannot work with {dict(constants)}: {error.args[0]}") from error


def _suggest(word: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(known)}"

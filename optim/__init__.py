"""Low-communication optimizers, each a recipe of a few small parts."""

from optim.flat import FlatParameters
from optim.outer import DiLoCo, LowCommunicationOptimizer
from optim.recipe import Recipe
from optim.state import OuterState

__all__ = ["DiLoCo", "FlatParameters", "LowCommunicationOptimizer", "OuterState", "Recipe"]

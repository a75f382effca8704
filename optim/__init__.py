"""Low-communication optimizers, each a recipe of a few small parts."""

from optim.everystep import GradientOptimizer
from optim.flat import FlatParameters
from optim.local import LocalSwarm
from optim.loops import DiLoCo
from optim.machine import Machine
from optim.methods import gradient_recipe, recipe
from optim.mtdao import MultiTimescaleOptimizer, QuasiHyperbolicAdam
from optim.muon import MuonAdamW
from optim.optimizer import LowCommunicationOptimizer
from optim.recipe import GradientRecipe, Recipe
from optim.sender import MissedExchange
from optim.start import check_start
from optim.state import OuterState

__all__ = [
    "DiLoCo",
    "FlatParameters",
    "GradientOptimizer",
    "GradientRecipe",
    "LocalSwarm",
    "LowCommunicationOptimizer",
    "Machine",
    "MissedExchange",
    "MultiTimescaleOptimizer",
    "MuonAdamW",
    "OuterState",
    "QuasiHyperbolicAdam",
    "Recipe",
    "check_start",
    "gradient_recipe",
    "recipe",
]

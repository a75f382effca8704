"""Which recipes work for processes that share a model."""

import pytest

from optim.elementwise import check_elementwise
from optim.methods import GRADIENT_RECIPES, RECIPES, gradient_recipe, recipe
from protocol.errors import SettingsError

NOT = {"co2", "fedsam", "terngrad"}


@pytest.mark.parametrize("name", sorted(RECIPES.keys() | GRADIENT_RECIPES.keys()))
def test_recipes_that_need_all_of_a_model_are_refused(name):
    method = recipe(name) if name in RECIPES else gradient_recipe(name)
    if name in NOT:
        with pytest.raises(SettingsError, match="each process has a part of the model"):
            check_elementwise(method)
    else:
        check_elementwise(method)

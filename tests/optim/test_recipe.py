import pytest

from optim.methods import recipe
from optim.outers import Nesterov
from optim.policies import FixedSteps
from protocol.errors import SettingsError


def test_diloco_fills_the_slots():
    method = recipe("diloco", inner_steps=50, outer_lr=0.7, outer_momentum=0.5)
    assert method.policy == FixedSteps(50)
    assert method.outer == Nesterov(lr=0.7, momentum=0.5)


def test_recipes_are_equal_if_their_constants_are():
    assert recipe("diloco", inner_steps=5) == recipe("diloco", inner_steps=5)
    assert recipe("diloco", inner_steps=5) != recipe("diloco", inner_steps=6)


def test_an_unknown_algorithm_is_refused_with_a_suggestion():
    with pytest.raises(SettingsError, match="no algorithm 'dilocco'") as caught:
        recipe("dilocco")
    assert "diloco" in caught.value.hint


def test_an_unknown_constant_is_refused_with_a_suggestion():
    with pytest.raises(SettingsError, match="no setting 'outer_momentun'") as caught:
        recipe("diloco", outer_momentun=0.5)
    assert "outer_momentum" in caught.value.hint


@pytest.mark.parametrize(
    "constants", [{"inner_steps": 0}, {"outer_lr": 0.0}, {"outer_momentum": 1.0}, {"outer_lr": float("nan")}]
)
def test_impossible_constants_are_refused(constants):
    with pytest.raises(SettingsError, match="cannot work"):
        recipe("diloco", **constants)

"""Which tensors take their turn."""

import pytest
import torch

from optim.flat import Slice
from optim.fragments import Blocks, Whole

NAMES = [
    "embedding.weight",
    *(f"blocks.{block}.{part}" for block in range(6) for part in ("attention", "mlp.0")),
    "norm",
]
LAYOUT = [Slice(name, torch.Size([1]), place, place + 1) for place, name in enumerate(NAMES)]


def names_of(fragmenter, round):
    return [NAMES[place] for place in fragmenter.fragment(LAYOUT, round)]


@pytest.mark.parametrize("strided", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 6, 7])
def test_each_tensor_takes_its_turn_once(groups, strided):
    fragmenter = Blocks(groups, strided=strided)
    taken = [name for round in range(1, groups + 1) for name in names_of(fragmenter, round)]
    assert sorted(taken) == sorted(NAMES)
    assert all(names_of(fragmenter, round) == names_of(fragmenter, round + groups) for round in range(1, groups + 1))


def test_strided_and_consecutive_blocks():
    strided, consecutive = names_of(Blocks(3), 2), names_of(Blocks(3, strided=False), 2)
    assert [name.split(".")[1] for name in strided] == ["1", "1", "4", "4"]
    assert [name.split(".")[1] for name in consecutive] == ["2", "2", "3", "3"]


def test_what_belongs_to_no_block_goes_with_the_first():
    assert {"embedding.weight", "norm"} <= set(names_of(Blocks(3), 1))


def test_the_whole_model_each_time():
    assert names_of(Whole(), 5) == NAMES


@pytest.mark.parametrize("strided", [True, False])
def test_more_groups_than_tensors_are_as_many_as_there_are(strided):
    layout = [Slice(f"tensor{number}", torch.Size([2]), 2 * number, 2 * number + 2) for number in range(3)]
    turns = [tuple(Blocks(16, strided=strided).fragment(layout, round)) for round in range(1, 7)]
    assert turns == [(0,), (1,), (2,)] * 2

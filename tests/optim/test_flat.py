import pytest
import torch
from torch import nn

from optim.flat import FlatParameters
from protocol.errors import SettingsError


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.head = nn.Linear(3, 5, bias=True)
        self.head.weight = self.embedding.weight


def test_values_go_out_and_in_again():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    flat = FlatParameters(model)
    values = flat.read()
    assert values.shape == (3 * 4 + 4 + 4 * 2 + 2,)
    assert torch.equal(values[:12].view(4, 3), model[0].weight)
    flat.write(torch.arange(26.0))
    assert torch.equal(flat.read(), torch.arange(26.0))
    assert model[1].bias.tolist() == [24.0, 25.0]


def test_what_was_read_is_a_copy():
    model = nn.Linear(2, 2)
    values = FlatParameters(model).read()
    values.zero_()
    assert model.weight.abs().sum() > 0


def test_writing_keeps_the_tensors_of_the_model():
    model = nn.Linear(2, 2)
    parameter, memory = model.weight, model.weight.data_ptr()
    FlatParameters(model).write(torch.ones(6))
    assert model.weight is parameter
    assert model.weight.data_ptr() == memory
    assert model.weight.grad_fn is None


def test_tied_parameters_are_taken_once_and_frozen_ones_not_at_all():
    flat = FlatParameters(Tied())
    assert [place.name for place in flat.slices] == ["embedding.weight", "head.bias"]
    assert flat.length == 20


def test_parameters_that_share_memory_are_taken_once():
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight.data = model["a"].weight.data
    assert FlatParameters(model).length == 4


def test_bf16_parameters_are_read_as_fp32_and_rounded_on_writing():
    model = nn.Linear(16, 16, dtype=torch.bfloat16)
    flat = FlatParameters(model)
    values = torch.randn(flat.length)
    flat.write(values)
    assert flat.read().dtype == torch.float32
    assert torch.equal(flat.read(), flat.rounded(values))
    assert not torch.equal(flat.rounded(values), values)


def test_fp32_values_are_not_rounded():
    flat = FlatParameters(nn.Linear(2, 2))
    values = torch.randn(6)
    assert flat.rounded(values) is values


def test_values_of_another_length_are_refused():
    with pytest.raises(SettingsError, match="6 trainable values"):
        FlatParameters(nn.Linear(2, 2)).write(torch.ones(7))


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(SettingsError, match="no trainable"):
        FlatParameters(nn.Linear(2, 2).requires_grad_(False))


def test_complex_parameters_are_refused():
    with pytest.raises(SettingsError, match="weight is of type"):
        FlatParameters(nn.Linear(2, 2, dtype=torch.complex64))


def test_what_wraps_a_model_does_not_matter():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    names = [place.name for place in FlatParameters(model).slices]
    assert [place.name for place in FlatParameters(torch.compile(model, backend="eager")).slices] == names
    model[0] = torch.compile(model[0], backend="eager")
    assert [place.name for place in FlatParameters(model).slices] == names

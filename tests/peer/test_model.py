import pytest
import torch

from peer.model import Transformer
from peer.settings import ModelSettings
from protocol.errors import SettingsError

SMALL = ModelSettings(layers=2, width=16, heads=2, context=12)


def test_tokens_become_logits():
    logits = Transformer(SMALL)(torch.zeros(3, 12, dtype=torch.int64))
    assert logits.shape == (3, 12, 256)
    assert Transformer(SMALL)(torch.zeros(1, 5, dtype=torch.int64)).shape == (1, 5, 256)


def test_the_seed_decides_the_initial_values_and_nothing_else_does():
    torch.manual_seed(1)
    first = Transformer(SMALL, seed=5).state_dict()
    torch.manual_seed(2)
    again = Transformer(SMALL, seed=5).state_dict()
    other = Transformer(SMALL, seed=6).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


def test_making_a_model_draws_nothing_from_the_process():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    Transformer(SMALL)
    assert torch.equal(torch.rand(1), expected)


def test_every_value_is_initialised():
    for name, parameter in Transformer(SMALL).named_parameters():
        assert torch.isfinite(parameter).all(), name
        assert parameter.abs().max() <= (1 if parameter.ndim == 1 else 0.2), name


def test_an_untrained_model_knows_nothing():
    tokens = torch.randint(0, 256, (4, 13), generator=torch.Generator().manual_seed(0))
    logits = Transformer(SMALL)(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(5.545, abs=0.3)  # ln 256


def test_the_future_is_not_seen():
    model = Transformer(SMALL)
    tokens = torch.arange(12)[None]
    changed = tokens.clone()
    changed[0, 7:] = 99
    torch.testing.assert_close(model(tokens)[0, :7], model(changed)[0, :7])
    assert not torch.allclose(model(tokens)[0, 7], model(changed)[0, 7])


def test_order_and_distance_matter():
    model = Transformer(SMALL)
    one = model(torch.tensor([[1, 2, 3, 4]]))[0, -1]
    other = model(torch.tensor([[2, 1, 3, 4]]))[0, -1]
    assert not torch.allclose(one, other, atol=1e-6)


def test_embedding_and_output_are_one_matrix():
    names = [name for name, _ in Transformer(SMALL).named_parameters()]
    assert len(names) == len(set(names))
    assert sum("embedding" in name for name in names) == 1
    assert not any("cosines" in name for name in Transformer(SMALL).state_dict())


def test_a_width_that_heads_do_not_divide_is_refused():
    with pytest.raises(SettingsError, match=r"width \(16\) must be a multiple of its heads \(3\)"):
        Transformer(ModelSettings(width=16, heads=3))


def test_an_odd_number_of_values_per_head_is_refused():
    with pytest.raises(SettingsError, match="3 values per head, which must be even"):
        Transformer(ModelSettings(width=12, heads=4))

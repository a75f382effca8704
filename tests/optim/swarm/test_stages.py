"""Models are cut into stages, and put together again."""

import itertools

import pytest
import torch
from torch import nn

from optim.swarm import Stage, assemble, cut, sample_losses, sequential
from optim.swarm.stages import bounds
from peer.model import Transformer
from protocol.errors import SettingsError
from tests.optim.swarm.toys import SETTINGS, perceptron_batch, perceptron_chain, squared, text_batch, transformer_chain


def through(stages, tokens, targets=None):
    for stage in stages[:-1]:
        tokens = stage(tokens)
    return stages[-1](tokens, targets)


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_a_transformer_in_stages_gives_the_bits_of_the_whole(count):
    model = Transformer(SETTINGS, seed=3)
    tokens, targets = text_batch(0, 0)
    stages = cut(model.chain(), count)
    assert torch.equal(through(stages, tokens), model(tokens))
    assert torch.equal(through(stages, tokens, targets), sample_losses(model(tokens), targets))


def test_a_sequential_in_stages_gives_the_bits_of_the_whole():
    chain = perceptron_chain()
    tokens, targets = perceptron_batch(0, 0)
    assert torch.equal(through(cut(chain, 3), tokens, targets), squared(chain.model(tokens), targets))


def test_stages_have_the_names_of_the_whole_model():
    model = Transformer(SETTINGS)
    stages = cut(model.chain(), 3)
    assert set().union(*(stage.state() for stage in stages)) == set(model.state_dict())


def test_a_stage_has_copies_of_its_own():
    model = Transformer(SETTINGS)
    first, *_, last = cut(model.chain(), 2)
    with torch.no_grad():
        first.model.get_parameter("embedding.weight").zero_()
    assert last.model.get_parameter("embedding.weight").any()
    assert model.embedding.weight.any()


def test_only_the_ends_share_the_transformers_embedding():
    tied = [dict(stage.tied) for stage in cut(transformer_chain(), 3)]
    assert tied == [{"embedding.weight": "embedding.weight"}, {}, {"embedding.weight": "embedding.weight"}]


def test_one_stage_has_nothing_tied():
    (stage,) = cut(transformer_chain(), 1)
    assert not stage.tied


def test_the_whole_state_is_put_together_and_cut_into_another_number_of_stages():
    model = Transformer(SETTINGS, seed=5)
    whole = assemble(stage.state() for stage in cut(model.chain(), 3))
    assert whole.keys() == model.state_dict().keys()
    tokens, _ = text_batch(0, 0)
    stages = cut(transformer_chain(seed=6), 4)
    for stage in stages:
        stage.load(whole)
    assert torch.equal(through(stages, tokens), model(tokens))
    other = Transformer(SETTINGS, seed=6)
    other.load_state_dict(whole)
    assert torch.equal(other(tokens), model(tokens))


def test_stages_of_different_steps_are_not_put_together():
    first, last = cut(transformer_chain(), 2)
    with torch.no_grad():
        last.model.get_parameter("embedding.weight").add_(1)
    with pytest.raises(SettingsError, match="different values"):
        assemble([first.state(), last.state()])


def test_a_stage_is_made_without_memory_for_the_rest_of_the_model():
    whole = Transformer(SETTINGS, seed=7)
    empty = Transformer(SETTINGS, seed=None)
    stages = cut(empty.chain(), 3)
    assert all(parameter.is_meta for stage in stages for parameter in stage.parameters())
    for stage in stages:
        names = stage.model.state_dict().keys()
        stage.load({name: values for name, values in empty.initial_values(7) if name in names})
    tokens, _ = text_batch(0, 0)
    assert torch.equal(through(stages, tokens), whole(tokens))


def test_values_that_are_missing_or_of_another_shape_are_refused():
    stage = cut(transformer_chain(), 2)[0]
    state = stage.state()
    with pytest.raises(SettingsError, match="has shape"):
        stage.load(state | {"embedding.weight": torch.zeros(1)})
    del state["embedding.weight"]
    with pytest.raises(SettingsError, match=r"no embedding\.weight"):
        stage.load(state)


@pytest.mark.parametrize("module", [nn.Dropout(0.1), nn.BatchNorm1d(4)])
def test_what_differs_in_a_second_pass_is_refused(module):
    chain = sequential(nn.Sequential(nn.Linear(4, 4), module), squared)
    with pytest.raises(SettingsError, match="second forward pass"):
        cut(chain, 1)


def test_dropout_of_nothing_is_no_dropout():
    assert cut(sequential(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)), squared), 1)


def test_stages_are_as_equal_as_possible():
    def heaviest(weights, runs):
        return max(sum(weights[run.start : run.stop]) for run in runs)

    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        weights = torch.randint(1, 20, (7,), generator=generator).tolist()
        for count in range(1, 8):
            runs = bounds(weights, count)
            assert [run.start for run in runs] == [0, *(run.stop for run in runs[:-1])]
            assert runs[-1].stop == 7 and len(runs) == count and all(runs)
            cuts = itertools.combinations(range(1, 7), count - 1)
            best = min(
                heaviest(weights, itertools.starmap(range, itertools.pairwise([0, *places, 7]))) for places in cuts
            )
            assert heaviest(weights, runs) == best


def test_there_are_no_more_stages_than_links():
    with pytest.raises(SettingsError, match="6 links cannot be cut into 7"):
        cut(transformer_chain(), 7)


def test_links_without_parameters_may_make_a_stage():
    chain = perceptron_chain()
    assert len(cut(chain, len(chain.links))) == 7
    assert isinstance(Stage(chain, range(1, 2)), nn.Module)

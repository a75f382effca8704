"""Decoders of Hugging Face transformers in stages give the bits of the whole."""

import pytest
import torch

from optim.swarm import assemble, cut, sample_losses
from optim.swarm.decoders import decoder
from protocol.errors import SettingsError

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
CONFIGS = {
    "llama": lambda **more: transformers.LlamaConfig(**SIZES, **more),
    "mistral": lambda **more: transformers.MistralConfig(**SIZES, sliding_window=None, **more),
    "qwen2": lambda **more: transformers.Qwen2Config(**SIZES, **more),
    "qwen3": lambda **more: transformers.Qwen3Config(**SIZES, head_dim=8, **more),
    "gpt2": lambda **more: transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **more
    ),
}
TOKENS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))


def model_of(config):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def through(stages, tokens, targets=None):
    for stage in stages[:-1]:
        tokens = stage(tokens)
    return stages[-1](tokens, targets)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_stages_give_the_bits_of_the_whole(family, tied):
    model = model_of(CONFIGS[family](tie_word_embeddings=tied))
    stages = cut(decoder(model), 3)
    expected = model(input_ids=TOKENS).logits
    assert torch.equal(through(stages, TOKENS), expected)
    targets = TOKENS.roll(-1, 1)
    assert torch.equal(through(stages, TOKENS, targets), sample_losses(expected, targets))
    firsts = [set(stage.tied.values()) for stage in stages]
    assert firsts == [firsts[0], set(), firsts[0]]
    assert len(firsts[0]) == tied


@pytest.mark.parametrize("family", CONFIGS)
def test_the_whole_is_put_together_again(family):
    model = model_of(CONFIGS[family](tie_word_embeddings=False))
    whole = assemble(stage.state() for stage in cut(decoder(model), 2))
    other = model_of(CONFIGS[family](tie_word_embeddings=False))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(whole)
    assert torch.equal(other(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4), "of type bloom"),
        (lambda: transformers.MistralConfig(**SIZES, sliding_window=8), "windows"),
        (lambda: transformers.LlamaConfig(**SIZES, attn_implementation="eager"), "sdpa"),
    ],
)
def test_what_would_give_other_results_is_refused(config, reason):
    with pytest.raises(SettingsError, match=reason):
        decoder(model_of(config()))


def test_dropout_is_refused():
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4)
    with pytest.raises(SettingsError, match="Dropout"):
        cut(decoder(model_of(config)), 1)

"""Decoders of Hugging Face transformers as chains: embedding, blocks, head.

Each family that is listed is compared with its whole model in tests/optim/swarm/test_decoders.py: a family that does
something else between its blocks (scaled embeddings, windows of attention, shared caches) would give other results
without any error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from optim.swarm.stages import Chain, Link, sample_losses
from protocol.errors import SettingsError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def decoder(model: PreTrainedModel) -> Chain:
    """The chain of a causal language model. Its loss takes targets that are shifted already.

    Raises:
        SettingsError: It is of a family that is not known to work, has windows of attention, or computes attention in
            another way than by PyTorch's fused kernel.
    """
    config: Any = model.config
    make = _FAMILIES.get(config.model_type)
    if make is None:
        raise SettingsError(
            f"models of type {config.model_type} cannot be cut into stages", hint=f"known are {', '.join(_FAMILIES)}"
        )
    if config._attn_implementation != "sdpa":
        raise SettingsError("stages need attn_implementation='sdpa': it is causal without a mask")
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        raise SettingsError("models with windows of attention cannot be cut into stages")
    if config.model_type == "mistral" and config.sliding_window is not None:
        raise SettingsError(
            "models with windows of attention cannot be cut into stages", hint="set sliding_window=None"
        )
    return Chain(model, make(config), sample_losses, config.vocab_size)


def _llama(config: Any) -> tuple[Link, ...]:  # noqa: ANN401 - a configuration of any of the families
    def embed(parts: Any, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - a tree of whatever the model has
        return _tensor(parts.model.embed_tokens(tokens))

    def block(number: int, parts: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        layer = parts.get_submodule(f"model.layers.{number}")
        rotations = parts.model.rotary_emb(x, position_ids=positions)
        return _tensor(layer(x, attention_mask=None, position_ids=positions, position_embeddings=rotations))

    def head(parts: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        return _tensor(parts.lm_head(parts.model.norm(x)))

    return (
        Link(("model.embed_tokens",), embed),
        *(
            Link((f"model.layers.{number}", "model.rotary_emb"), partial(block, number))
            for number in range(config.num_hidden_layers)
        ),
        Link(("model.norm", "lm_head"), head),
    )


def _gpt2(config: Any) -> tuple[Link, ...]:  # noqa: ANN401
    def embed(parts: Any, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return _tensor(parts.transformer.wte(tokens) + parts.transformer.wpe(positions))

    def block(number: int, parts: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        return _tensor(parts.get_submodule(f"transformer.h.{number}")(x))

    def head(parts: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        return _tensor(parts.lm_head(parts.transformer.ln_f(x)))

    return (
        Link(("transformer.wte", "transformer.wpe", "transformer.drop"), embed),
        *(Link((f"transformer.h.{number}",), partial(block, number)) for number in range(config.n_layer)),
        Link(("transformer.ln_f", "lm_head"), head),
    )


_FAMILIES: dict[str, Callable[[Any], tuple[Link, ...]]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "gpt2": _gpt2,
}


def _tensor(result: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Blocks return a tuple in some versions."""
    return result if isinstance(result, torch.Tensor) else result[0]

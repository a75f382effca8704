"""The built-in model: a small decoder-only transformer over bytes.

Pre-normalisation with RMSNorm, rotary positions, SwiGLU, causal attention by PyTorch's fused kernel, no biases, and
one matrix for embedding and output.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from optim.swarm import Chain, Link, sample_losses
from peer.settings import ModelSettings
from protocol.errors import SettingsError

VOCABULARY = 256
"""One token per byte value."""

ROTARY_BASE = 10_000.0
INIT_STD = 0.02


class Transformer(nn.Module):
    """Maps tokens of shape (batch, length ≤ context) to logits of shape (batch, length, 256).

    Args:
        settings: Sizes.
        seed: Where the initial values come from. The same seed gives the same values, whatever else draws random
            numbers in the process. None: parameters get no values and no memory, for a model that is to be cut into
            stages.

    Raises:
        SettingsError: The width is not a multiple of the heads, or leaves an odd number of values per head.
    """

    cosines: torch.Tensor
    sines: torch.Tensor

    def __init__(self, settings: ModelSettings, *, seed: int | None = 0) -> None:
        super().__init__()
        width, heads = settings.width, settings.heads
        if width % heads != 0:
            raise SettingsError(f"the model's width ({width}) must be a multiple of its heads ({heads})")
        if (width // heads) % 2 != 0:
            raise SettingsError(
                f"width {width} with {heads} heads leaves {width // heads} values per head, which must be even",
                hint="rotary positions turn pairs of values",
            )
        self.context = settings.context
        self.embedding = nn.Embedding(VOCABULARY, width, device="meta")
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(width, device="meta")
        cosines, sines = _rotations(settings.context, width // heads)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)
        if seed is not None:
            self.load_state_dict(dict(self.initial_values(seed)), assign=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[-1]
        cosines, sines = self.cosines[:length], self.sines[:length]
        x = F.embedding(tokens, self.embedding.weight)
        for block in self.blocks:
            x = block(x, cosines, sines)
        return F.linear(self.norm(x), self.embedding.weight)

    def initial_values(self, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters' values at the beginning, one after the other, so that a part of them takes little memory.

        Normal; the projections that write into the residual stream start smaller, as in GPT-2.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            values = torch.ones(parameter.shape)
            if parameter.ndim > 1:
                shrink = (2 * len(self.blocks)) ** -0.5 if name.endswith(("project.weight", "down.weight")) else 1.0
                values.normal_(0.0, INIT_STD * shrink, generator=generator)
            yield name, values

    def chain(self) -> Chain:
        """The model as links for `optim.swarm`: the embedding, each block, the output."""
        tables = ("cosines", "sines")
        blocks = [Link((f"blocks.{index}", *tables), partial(_block, index)) for index in range(len(self.blocks))]
        links = (Link(("embedding",), _embed), *blocks, Link(("norm", "embedding"), _head))
        return Chain(self, links, sample_losses, VOCABULARY)


class Block(nn.Module):
    """Attention, then a gated feed-forward layer, each added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        hidden = -(-width * 8 // 3 // 16) * 16  # SwiGLU's usual 8/3 of the width, rounded up to whole vectors
        self.attention_norm = nn.RMSNorm(width, device="meta")
        self.attention = _linear(width, 3 * width)
        self.project = _linear(width, width)
        self.feed_norm = nn.RMSNorm(width, device="meta")
        self.up = _linear(width, 2 * hidden)
        self.down = _linear(hidden, width)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width per head)
        query, key = _rotate(query, cosines, sines), _rotate(key, cosines, sines)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = torch.add(x, self.project(mixed.transpose(1, 2).reshape(batch, length, width)))
        gate, value = self.up(self.feed_norm(x)).chunk(2, dim=-1)
        return torch.add(x, self.down(F.silu(gate) * value))


def _embed(parts: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.embedding(tokens, parts.get_parameter("embedding.weight"))


def _block(index: int, parts: nn.Module, x: torch.Tensor) -> torch.Tensor:
    length = x.shape[1]
    cosines, sines = parts.get_buffer("cosines")[:length], parts.get_buffer("sines")[:length]
    result: torch.Tensor = parts.get_submodule(f"blocks.{index}")(x, cosines, sines)
    return result


def _head(parts: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.linear(parts.get_submodule("norm")(x), parts.get_parameter("embedding.weight"))


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """A matrix without values yet. PyTorch's own initial values would draw from the process's random numbers."""
    return nn.Linear(inputs, outputs, bias=False, device="meta")


def _rotations(context: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of each position's angles, each of shape (context, size // 2)."""
    frequencies = ROTARY_BASE ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def _rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al., arXiv 2104.09864) on pairs made of the first and the second half of the values."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)

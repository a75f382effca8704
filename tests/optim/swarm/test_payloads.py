"""Activations as bytes."""

import attrs
import pytest
import torch

from optim.swarm.payloads import Packer, Payload
from protocol.codecs import NotFinite
from protocol.errors import ProtocolError


@pytest.fixture
def packer():
    return Packer()


@pytest.fixture
def values():
    return torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))


def test_without_compression_nothing_changes(packer, values):
    payload = packer.pack(values, "fp32")
    assert torch.equal(packer.unpack(payload), values)
    assert payload.samples == 3


def test_numbers_of_16_bits_lose_nothing_in_as_many(packer, values):
    payload = packer.pack(values.bfloat16(), "bf16")
    assert torch.equal(packer.unpack(payload), values.bfloat16().float())
    assert len(payload.data) == 2 * values.numel()


def test_eight_bits_take_a_quarter(packer):
    values = torch.randn(8, 16, 64, generator=torch.Generator().manual_seed(1))
    payload = packer.pack(values, "int8")
    assert len(payload.data) <= 0.27 * 4 * values.numel()
    error = (packer.unpack(payload) - values).abs().max()
    assert 0 < error <= values.abs().max() / 127


def test_tokens_are_whole_numbers(packer):
    tokens = torch.tensor([[0, 255], [70_000, -1]])
    assert torch.equal(packer.unpack(packer.pack(tokens, "tokens")), tokens)


def test_what_is_not_finite_is_not_packed(packer, values):
    values[0, 0, 0] = torch.nan
    with pytest.raises(NotFinite):
        packer.pack(values, "fp32")


@pytest.mark.parametrize("shape", [(), (0, 4), (-1, 4), (2, 4), (1 << 60, 1 << 60), (1,) * 9])
@pytest.mark.parametrize("encoding", ["fp32", "bf16", "int8", "tokens"])
def test_bytes_that_do_not_fit_the_shape_are_refused(packer, shape, encoding):
    payload = packer.pack(torch.ones(3, 4), encoding)
    with pytest.raises(ProtocolError):
        packer.unpack(attrs.evolve(payload, shape=shape))


def test_bytes_that_mean_no_finite_numbers_are_refused(packer):
    with pytest.raises(ProtocolError):
        packer.unpack(Payload("fp32", (1,), b"\xff" * 4))

"""What a peer contributes: the same bytes for all attempts, and nothing left out for good."""

from __future__ import annotations

import pytest
import torch

from protocol.codecs import NotFinite, make_codec
from protocol.contribution import Contributor


def decoded(data: bytearray, length: int) -> torch.Tensor:
    values = torch.empty(length)
    make_codec("int4").decode(data, values)
    return values


VALUES = torch.randn(3000, generator=torch.Generator().manual_seed(1))


async def test_fp32_needs_no_encoding():
    assert await Contributor("fp32").encode(VALUES) == b""


async def test_the_same_bytes_until_a_round_counts():
    contributor = Contributor("int4")
    first = await contributor.encode(VALUES)
    contributor.finished(counted=False)
    assert await contributor.encode(VALUES) == first
    contributor.finished(counted=True)
    assert await contributor.encode(VALUES) != first


async def test_what_is_left_out_of_rounds_that_count_comes_later():
    contributor, total = Contributor("int4"), torch.zeros(3000)
    for _ in range(40):
        total += decoded(await contributor.encode(VALUES), 3000)
        contributor.finished(counted=True)
    alone = decoded(await Contributor("int4").encode(VALUES), 3000)
    assert (total / 40 - VALUES).abs().mean() < (alone - VALUES).abs().mean() / 10


async def test_a_state_that_was_fetched_begins_anew():
    contributor = Contributor("int4")
    first = await contributor.encode(VALUES)
    contributor.finished(counted=True)
    contributor.reset()
    assert await contributor.encode(VALUES) == first


async def test_what_is_left_out_of_one_part_is_not_added_to_another():
    contributor, others = Contributor("int4"), -VALUES
    first = bytes(await contributor.encode(VALUES, "one"))
    contributor.finished(counted=True)
    alone = bytes(await Contributor("int4").encode(others))
    assert await contributor.encode(others, "other") == alone
    contributor.finished(counted=True)
    assert await contributor.encode(VALUES, "one") != first


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "e3m0"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
async def test_what_is_not_finite_is_not_contributed(codec, bad):
    values = VALUES.clone()
    values[1234] = bad
    with pytest.raises(NotFinite):
        await Contributor(codec).encode(values)


async def test_vectors_of_another_length():
    contributor = Contributor("int4")
    await contributor.encode(VALUES)
    contributor.finished(counted=True)
    assert await contributor.encode(VALUES[:300]) == await Contributor("int4").encode(VALUES[:300])

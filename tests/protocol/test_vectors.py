"""Memory of vectors: used again, but never while anybody looks at it."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from protocol.errors import Overloaded
from protocol.vectors import VectorPool, add_scaled, all_finite, room_for, scale, vector_bytes

LONG = 1 << 21  # elements


def test_memory_that_nobody_refers_to_is_used_again():
    pool = VectorPool()
    vector = pool.take(LONG)
    place = vector.data_ptr()
    del vector
    gc.collect()
    assert pool.take(LONG).data_ptr() == place


@pytest.mark.parametrize("look", [vector_bytes, lambda v: v[5:9], lambda v: v.numpy(), lambda v: v.view(torch.int32)])
def test_memory_that_somebody_looks_at_is_left_alone(look):
    pool = VectorPool()
    vector = pool.take(LONG)
    vector.fill_(1.0)
    view = look(vector)
    before = bytes(view)[:16] if isinstance(view, memoryview) else view.tolist()[:4]
    del vector
    gc.collect()
    pool.take(LONG).fill_(2.0)
    assert (bytes(view)[:16] if isinstance(view, memoryview) else view.tolist()[:4]) == before


@pytest.mark.parametrize("length", [0, 1, 1000, LONG, LONG + 1])
def test_vectors_of_any_length(length):
    pool = VectorPool()
    for _ in range(3):
        vector = pool.take(length)
        assert (vector.shape, vector.dtype) == ((length,), torch.float32)
        vector.fill_(3.0)
        assert all_finite(vector)
        assert len(vector_bytes(vector)) == 4 * length


def test_memory_of_another_length_is_not_used():
    pool = VectorPool()
    del_me = pool.take(LONG)
    del del_me
    gc.collect()
    assert len(pool.take(2 * LONG)) == 2 * LONG


def test_memory_of_two_lengths_waits_to_be_used_again():
    pool = VectorPool()
    places = {length: pool.take(length).data_ptr() for length in (LONG, 2 * LONG)}
    assert {length: pool.take(length).data_ptr() for length in places} == places


@pytest.mark.parametrize("share", [0.0, 1.0, 1 / 3, 0.1, 2.0**-100])
def test_what_is_added_is_what_scaling_gives(share):
    generator = torch.Generator().manual_seed(1)
    total, values = torch.randn(2, 10_007, generator=generator) * 10.0 ** torch.randint(-38, 38, (2, 10_007))
    values[:4] = torch.tensor([float("inf"), float("nan"), -0.0, 3e38])
    total[3] = 3e38
    expected = torch.empty_like(values)
    scale(values, share, out=expected)
    expected += total
    add_scaled(total.numpy(), values.numpy(), share, np.empty(10_007, dtype=np.float32))
    assert torch.equal(total.view(torch.int32), expected.view(torch.int32))


def test_what_there_is_no_memory_for_is_refused():
    assert len(room_for(5)) == 5
    with pytest.raises(Overloaded, match="no memory"):
        room_for(1 << 50)

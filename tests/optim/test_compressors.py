"""Forms in which values travel that are gathered: what they mean, what they leave out, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optim.compressors import Signs, Ternary, TopChunks, length_of
from optim.dct import dct_basis, divisor
from optim.exact import mean_and_variance, orthonormal, outer_product, tree_sum
from optim.feedback import ErrorFeedback, Forget
from optim.flat import Slice, select

SHAPES = [(128, 64), (64,), (10, 6), (7,), (1, 1), (0, 3), (3, 2, 4)]


def layout_of(shapes):
    places, at = [], 0
    for index, shape in enumerate(shapes):
        size = torch.Size(shape).numel()
        places.append(Slice(f"tensor {index}", torch.Size(shape), at, at + size))
        at += size
    return places


LAYOUT = layout_of(SHAPES)
COMPRESSORS = [Signs(), Signs(vote=False), Ternary(), TopChunks(4), TopChunks(4, bits=2), TopChunks(3, dct=True)]


def some_values(seed, layout=LAYOUT):
    return torch.randn(length_of(layout), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_a_message_of_ours_is_sound_and_any_other_size_is_not(compressor):
    message = compressor.encode(some_values(0), LAYOUT, 1)
    assert compressor.is_sound(message, LAYOUT)
    assert len(compressor.decode(message, LAYOUT, 1)) == length_of(LAYOUT)
    for wrong in (b"", message[:-1], message + b"\0"):
        assert not compressor.is_sound(wrong, LAYOUT)


@given(st.data())
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_whatever_is_sound_means_finite_values(compressor, data):
    layout = layout_of([(4, 4), (5,)])
    size = len(compressor.encode(some_values(0, layout), layout, 1))
    message = data.draw(st.binary(min_size=size, max_size=size))
    if compressor.is_sound(message, layout):
        assert torch.isfinite(compressor.decode(message, layout, 1)).all()


def test_values_that_are_not_finite_are_not_sound():
    layout = layout_of([(4,)])
    message = TopChunks(4).encode(torch.ones(4), layout, 1)
    infinite = torch.tensor([float("inf")] * 4).bfloat16().view(torch.uint8).numpy().tobytes()
    assert not TopChunks(4).is_sound(message[:6] + infinite, layout)
    scale = torch.tensor([float("nan")]).numpy().tobytes()
    assert not Ternary().is_sound(scale + b"\0", layout)


def test_an_index_comes_once_and_lies_in_its_chunk():
    layout = layout_of([(4,)])
    values = torch.tensor([1.0, 2.0]).bfloat16().view(torch.uint8).numpy().tobytes()
    for first, second, sound in ((0, 3, True), (0, 4, False), (2, 2, False), (3, 1, False)):
        indices = bytes([first, second << 4, 0])
        assert TopChunks(2).is_sound(indices + values, layout) == sound


def test_the_largest_values_of_each_chunk_are_kept():
    values = torch.zeros(128, 64)
    values[0, 5], values[3, 3], values[70, 1] = 8.0, -16.0, 0.5
    layout = layout_of([(128, 64)])
    compressor = TopChunks(2)
    decoded = compressor.decode(compressor.encode(values.flatten(), layout, 1), layout, 1)
    assert torch.equal(decoded.view(128, 64), values)


@pytest.mark.parametrize("dct", [False, True])
def test_keeping_everything_loses_nothing_but_bits(dct):
    layout = layout_of([(8, 6), (7,)])
    values, compressor = some_values(3, layout), TopChunks(64, dct=dct)
    decoded = compressor.decode(compressor.encode(values, layout, 1), layout, 1)
    torch.testing.assert_close(decoded, values, rtol=0.02, atol=0.02)


def test_two_bits_keep_the_sign_and_the_rough_size():
    layout = layout_of([(4,)])
    compressor = TopChunks(4, bits=2)
    message = compressor.encode(torch.tensor([3.0, -3.0, 1.2, -0.9]), layout, 1)
    assert compressor.decode(message, layout, 1).tolist() == pytest.approx([3.0, -3.0, 1.0, -1.0])
    assert len(message) == 6 + 4 + 1


def test_a_transformed_value_is_averaged_over_those_who_sent_it():
    layout, compressor = layout_of([(4,)]), TopChunks(1, dct=True)
    constant, wave = torch.full((4,), 2.0), torch.tensor([1.0, -1.0, -1.0, 1.0])
    messages = [(compressor.encode(values, layout, 1), 0.5) for values in (constant, wave)]
    torch.testing.assert_close(compressor.combine(messages, layout, 1), constant + wave, rtol=0.01, atol=0.01)


def test_votes_and_means_of_signs():
    layout = layout_of([(3,)])
    signs = [torch.tensor(values) for values in ([1.0, -1.0, 0.0], [2.0, -3.0, -1.0], [-1.0, -0.1, 5.0])]
    for vote, expected in ((True, [1.0, -1.0, 1.0]), (False, [1 / 3, -1.0, 1 / 3])):
        compressor = Signs(vote)
        messages = [(compressor.encode(values, layout, 1), 1 / 3) for values in signs]
        assert compressor.combine(messages, layout, 1).tolist() == pytest.approx(expected)
    assert Signs().combine([], layout, 1).tolist() == [0.0, 0.0, 0.0]


def test_ternary_values_are_right_on_average():
    layout, values = layout_of([(4,)]), torch.tensor([0.5, -1.0, 0.0, 0.25])
    mean = torch.zeros(4)
    for round in range(2000):
        mean += Ternary().decode(Ternary().encode(values, layout, round), layout, round) / 2000
    torch.testing.assert_close(mean, values, rtol=0, atol=0.04)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_nothing_is_lost_with_error_feedback(compressor):
    feedback, memory = ErrorFeedback(), {}
    total, sent = torch.zeros(length_of(LAYOUT)), torch.zeros(length_of(LAYOUT))
    for round in range(5):
        values = some_values(round)
        intended = feedback.before(values, memory)
        understood = compressor.decode(compressor.encode(intended, LAYOUT, round), LAYOUT, round)
        memory = feedback.after(intended, understood, memory)
        total, sent = total + values, sent + understood
    torch.testing.assert_close(sent + memory["error"], total, rtol=1e-4, atol=1e-4)


def test_old_errors_fade():
    feedback = ErrorFeedback(0.5)
    memory = feedback.after(torch.tensor([4.0]), torch.tensor([1.0]), {})
    assert feedback.before(torch.tensor([1.0]), memory).item() == 2.5
    assert Forget().before(torch.tensor([1.0]), memory).item() == 1.0


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_the_cosine_transform_is_orthonormal(size):
    basis = dct_basis(size)
    torch.testing.assert_close(basis @ basis.T, torch.eye(size), rtol=0, atol=1e-5)


def test_the_largest_divisor():
    assert [divisor(number, 64) for number in (1, 7, 64, 67, 96, 130)] == [1, 7, 64, 1, 48, 26]


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 100))
def test_exact_sums_and_products_are_sums_and_products(rows, columns, seed):
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(tree_sum(matrix), matrix.sum(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outer_product(matrix, matrix), matrix @ matrix.T, rtol=1e-4, atol=1e-5)


def test_a_variance_does_not_depend_on_the_number_of_threads():
    threads, found = torch.get_num_threads(), set()
    values = torch.randn(999, 777, generator=torch.Generator().manual_seed(0)) * 3 + 1
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            found.add(mean_and_variance(values))
    finally:
        torch.set_num_threads(threads)
    ((mean, variance),) = found
    assert mean == pytest.approx(float(values.double().mean()))
    assert variance == pytest.approx(float(values.double().var(correction=0)))
    assert mean_and_variance(torch.empty(0, 3)) == (0.0, 0.0)


def test_columns_become_orthonormal_and_what_depends_on_others_vanishes():
    matrix = some_values(1, layout_of([(30, 3)])).view(30, 3)
    base = orthonormal(matrix)
    torch.testing.assert_close(base.T @ base, torch.eye(3), rtol=0, atol=1e-5)
    assert torch.equal(orthonormal(torch.zeros(5, 2)), torch.zeros(5, 2))


def test_a_selection_is_taken_and_put_back():
    slices, flat = layout_of([(2,), (3,), (1,)]), torch.arange(6.0)
    some = select(slices, [0, 2])
    assert some.take(flat).tolist() == [0.0, 1.0, 5.0]
    assert some.put(flat, torch.tensor([7.0, 8.0, 9.0])).tolist() == [7.0, 8.0, 2.0, 3.0, 4.0, 9.0]
    assert flat.tolist() == list(range(6))
    assert [(place.start, place.stop) for place in some.layout] == [(0, 2), (2, 3)]
    everything = select(slices, range(3))
    assert everything.take(flat) is flat

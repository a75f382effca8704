"""Codecs: bits as a plain NumPy reference has them, bounds on size and error, strangers' bytes, error feedback."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codecs import BLOCK, LARGEST, NAMES, SMALLEST, ErrorFeedback, NotFinite, make_codec
from protocol.codecs.base import PIECE
from protocol.codecs.base import chances as chances_table
from protocol.errors import ProtocolError

ROOT = Path(__file__).resolve().parents[2]
SCALED = ["int8", "int4", "e3m0"]
LEVELS = {"int8": 127, "int4": 7, "e3m0": 1}
BLOCKS = {"int8": 256, "int4": 256, "e3m0": 1024}
SCALE = {"int8": 4, "int4": 2, "e3m0": 4}  # bytes
OFF = {"int8": 2.0**-14, "int4": 2.0**-7, "e3m0": 0.0}  # how much too large a scale may be
F = np.float32
LENGTHS = [0, 1, 2, 255, 256, 257, 511, 1000, 1025, PIECE + 255, 2 * PIECE + 257]

lengths = st.integers(0, 3 * BLOCK + 1) | st.integers(1000, 2100)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def vectors(draw):
    """Vectors of any length and magnitude, often with special values in them."""
    length = draw(lengths)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = rng.standard_t(2, length).astype(F) * F(2.0 ** draw(st.integers(-130, 100)))
    for place, value in draw(
        st.lists(st.tuples(st.integers(0, max(length - 1, 0)), finite), max_size=5 * (length > 0))
    ):
        values[place] = value
    return torch.from_numpy(values)


def vector(length, seed=1):
    """Heavy-tailed values of different magnitudes, some of them 0."""
    rng = np.random.default_rng(seed)
    values = rng.standard_t(3, length) * np.exp(rng.normal(0, 2, length)) * (rng.random(length) > 0.1)
    return torch.from_numpy(values.astype(F))


def encoded(name, values, seed=None):
    codec = make_codec(name)
    out = bytearray(codec.encoded_size(len(values)))
    codec.encode(values, out, seed=seed)
    return bytes(out)


def decoded(name, data, length):
    into = torch.full((length,), math.nan)
    make_codec(name).decode(data, into)
    return into


def there_and_back(name, values, seed=None):
    return decoded(name, encoded(name, values, seed), len(values))


def same_bits(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


CHANCE_TABLE = chances_table().numpy()


# The reference: block by block, as the documents say it, in NumPy.


def chances(seed, length):
    """16 random bits for each element: from a place in the table that the seed decides, another for each piece."""
    numbers = [
        CHANCE_TABLE[(seed * 40503 + piece * 26171) % 65536 :][: min(PIECE, length - start)]
        for piece, start in enumerate(range(0, length, PIECE))
    ]
    return np.concatenate(numbers) if numbers else np.empty(0, np.int32)


def reference(name, values, seed=None):
    """The bytes of a vector."""
    x = values.numpy()
    if name == "fp32":
        return x.tobytes()
    if name == "bf16":
        bits = np.clip(x, F(-LARGEST), F(LARGEST)).view(np.uint32)
        up = 0x7FFF + (bits >> 16 & 1) if seed is None else chances(seed, len(x)).astype(np.uint32)
        return ((bits + up) >> 16).astype("<u2").tobytes()
    chance, block = None if seed is None else chances(seed, len(x)), BLOCKS[name]
    return b"".join(
        reference_block(name, x[start : start + block], None if chance is None else chance[start : start + block])
        for start in range(0, len(x), block)
    )


def reference_block(name, x, chance):
    x = np.clip(x, F(-LARGEST), F(LARGEST))
    peak = np.abs(x).max()
    scale = F(peak / F(LEVELS[name]))
    spare = {"int8": 0xFF, "int4": 0xFFFF, "e3m0": 0}[name]
    scale = ((scale.view(np.uint32) + np.uint32(spare)) & np.uint32(0xFFFFFFFF - spare)).view(F)
    if peak < F(SMALLEST):
        scale = F(0)
    y = x * (F(1) / scale if scale else F(0))
    if name == "e3m0":
        codes = (y.view(np.uint32) >> 31) * 8 + np.array(
            [exponent(abs(v), None if chance is None else chance[i]) for i, v in enumerate(y)], dtype=np.uint32
        )
    elif chance is None:
        codes = np.rint(y).astype(int)
    else:
        codes = np.floor(y + (chance.astype(F) + F(1.5)) / F(65538)).astype(int)
    if name == "int8":
        return scale.tobytes() + codes.astype(np.int8).tobytes()
    codes = np.pad(codes, (0, len(codes) % 2)) & 15
    return scale.tobytes()[-SCALE[name] :] + (codes[0::2] | codes[1::2] << 4).astype(np.uint8).tobytes()


def exponent(ratio, chance):
    """The code m of a magnitude in units of the largest one, by cases; `chance` or to nearest in the logarithm."""
    ratio = float(ratio)
    if chance is None:
        return sum(ratio >= float(F(math.sqrt(2))) * 2.0 ** (k - 1) for k in range(-6, 1))
    threshold = 1 - (int(chance) + 0.5) / 65536  # goes up if the place between the codes is at least that
    if ratio < 2.0**-6:
        return int(float(F(ratio / 2) + F(2.0**-7)) * 2**7 - 1 >= threshold)
    mantissa, power = math.frexp(ratio)
    return power - 1 + 7 + (mantissa * 2 - 1 >= threshold)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_the_reference(name, seed, length):
    values = vector(length)
    assert encoded(name, values, seed) == reference(name, values, seed)


@settings(deadline=None)
@given(vectors(), st.none() | st.integers(0, 2**256))
@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_any_values_are_those_of_the_reference(name, values, seed):
    assert encoded(name, values, seed) == reference(name, values, seed)


def test_format_is_fixed():
    values = torch.tensor([0.0, 1.0, -1.0, 0.25, -0.1, 0.03, 1e-3, 0.7, 0.72])
    assert {name: encoded(name, values).hex() for name in NAMES} == {
        "fp32": values.numpy().tobytes().hex(),
        "bf16": "0000803f80bf803ecdbdf63c833a333f383f",
        "int8": "0003013c007f8120f30400595b",
        "int4": "133e70290f5005",
        "e3m0": "0000803f705f2c6007",
    }
    assert encoded("e3m0", torch.tensor([])) == b""


PRINT_BYTES = """
import sys, torch
from protocol.codecs import NAMES, make_codec
torch.set_num_threads(2)
length = 65536 + 300
values = torch.tensor(bytearray.fromhex(sys.stdin.read()), dtype=torch.uint8).view(torch.float32)
for name in NAMES:
    codec = make_codec(name)
    for seed in (None, 3):
        out = bytearray(codec.encoded_size(length))
        codec.encode(values, out, seed=seed)
        result = torch.ones(length)
        codec.add(out, result, 0.3)
        print(out.hex(), result.numpy().tobytes().hex())
"""


def test_bits_do_not_depend_on_the_instructions_that_the_processor_has():
    values = vector(65536 + 300)
    expected = []
    for name in NAMES:
        for seed in (None, 3):
            data, result = encoded(name, values, seed), torch.ones(len(values))
            make_codec(name).add(data, result, 0.3)
            expected.append(f"{data.hex()} {result.numpy().tobytes().hex()}")
    child = subprocess.run(
        [sys.executable, "-c", PRINT_BYTES],
        input=values.numpy().tobytes().hex(),
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default"},
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=True,
    )
    assert child.stdout.split("\n")[:-1] == expected


# Sizes and chunks


@pytest.mark.parametrize(("name", "most"), [("fp32", 1), ("bf16", 0.5), ("int8", 0.27), ("int4", 0.14), ("e3m0", 0.14)])
def test_encodings_are_small(name, most):
    assert make_codec(name).encoded_size(10**6) <= most * 4 * 10**6


@settings(deadline=None)
@given(vectors(), st.integers(0, 3), st.none() | st.integers(0, 9))
@pytest.mark.parametrize("name", NAMES)
def test_chunks_from_multiples_of_the_block_are_independent(name, values, cut, seed):
    codec = make_codec(name)
    start = min(cut * BLOCKS.get(name, 256), len(values) // codec.block * codec.block)
    data = encoded(name, values)
    assert encoded(name, values[:start]) + encoded(name, values[start:]) == data
    whole = decoded(name, data, len(values))
    offset = codec.encoded_size(start)
    assert same_bits(decoded(name, data[offset:], len(values) - start), whole[start:])


@pytest.mark.parametrize("name", NAMES)
def test_buffers_may_be_anything_and_anywhere(name):
    codec, values = make_codec(name), vector(700)
    size = codec.encoded_size(700)
    around = bytearray(b"\xaa" * (size + 5))
    codec.encode(values, memoryview(around)[3 : 3 + size])
    assert around[:3] + around[3 + size :] == b"\xaa" * 5
    tensor = torch.empty(size, dtype=torch.uint8)
    codec.encode(values, tensor)
    assert tensor.numpy().tobytes() == around[3:-2]
    results = [decoded(name, data, 700) for data in (tensor, memoryview(around)[3:-2], bytes(around[3:-2]))]
    assert all(same_bits(result, results[0]) for result in results)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_size_is_refused(name):
    codec = make_codec(name)
    size = codec.encoded_size(300)
    for wrong in (0, size - 1, size + 1):
        with pytest.raises(ValueError, match="bytes for 300 elements"):
            codec.encode(vector(300), bytearray(wrong))
        with pytest.raises(ProtocolError, match="for 300 elements"):
            codec.decode(bytes(wrong), torch.empty(300))


# Values


@settings(deadline=None)
@given(vectors())
@pytest.mark.parametrize("name", NAMES)
def test_error_is_bounded(name, values):
    result, x = there_and_back(name, values), values.double().clamp(-LARGEST, LARGEST)
    error = (result - x).abs()
    if name == "fp32":
        assert same_bits(result, values)
    elif name == "bf16":
        assert (error <= x.abs() * 2.0**-8 + 2.0**-134).all()
    else:
        for part, off in zip(x.split(BLOCKS[name]), error.split(BLOCKS[name]), strict=True):
            peak = part.abs().amax() if len(part) else 0
            if peak < SMALLEST:
                assert torch.equal(off, part.abs())
            elif name == "e3m0":
                near = part.abs() >= peak * 2**-6.499
                assert (off[near] <= (math.sqrt(2) - 1 + 1e-6) * part.abs()[near]).all()
                assert (off[~near] <= peak * 2.0**-6).all()
            else:
                assert (off <= peak / LEVELS[name] / 2 * (1 + OFF[name])).all()


@settings(deadline=None)
@given(vectors(), st.none() | st.integers(0, 9))
@pytest.mark.parametrize("name", NAMES)
def test_decoded_values_encode_to_the_same_bytes(name, values, seed):
    data = encoded(name, values)
    result = decoded(name, data, len(values))
    assert encoded(name, result, seed) == data


@settings(deadline=None)
@given(vectors(), st.none() | st.integers(0, 9))
@pytest.mark.parametrize("name", NAMES)
def test_signs_and_zeros_are_kept(name, values, seed):
    result = there_and_back(name, values, seed)
    assert (result * values.sign() >= 0).all()
    assert (result[values == 0] == 0).all()


@settings(deadline=None)
@given(st.floats(SMALLEST, LARGEST, width=32), st.integers(1, BLOCK), st.none() | st.integers(0, 9))
@pytest.mark.parametrize("name", SCALED)
def test_the_largest_magnitude_takes_the_last_code(name, value, length, seed):
    """For e3m0 it is exact; the steps of the others never leave their range, at whatever magnitude.

    Scales are rounded up, so the largest one is a little below the last code, and chance can take the one before.
    """
    values = torch.linspace(-value, value / 3, length)
    result = there_and_back(name, values, seed)
    largest = values.abs().max().item()
    off = OFF[name] if seed is None or name == "e3m0" else 1 / LEVELS[name] + OFF[name]
    assert result.abs().max().item() == pytest.approx(largest, rel=off)


@pytest.mark.parametrize("value", [0.0, 1.0, -3e-5, 1e30, SMALLEST, 2.0**-120, 1e-45])
@pytest.mark.parametrize("name", SCALED)
def test_constant_vectors(name, value):
    result = there_and_back(name, torch.full((300,), value))
    expected = value if abs(value) >= SMALLEST else 0.0
    assert torch.allclose(result, torch.tensor(expected), rtol=OFF[name], atol=0)


def test_powers_of_two_are_exact_in_e3m0():
    values = torch.tensor([0.0] + [sign * 3.7 * 2.0**-k for k in range(7) for sign in (1, -1)])
    assert torch.equal(there_and_back("e3m0", values), values)


@pytest.mark.parametrize("name", NAMES)
def test_values_that_do_not_fit_are_cut(name):
    most = torch.finfo(torch.float32).max
    values = torch.tensor([most, -most, 1.0])
    result = there_and_back(name, values, seed=3)
    assert result[0] == -result[1] == (most if name == "fp32" else pytest.approx(LARGEST, rel=OFF.get(name, 0)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 1, 77, 255, 256, PIECE, PIECE + 460])
def test_values_that_are_not_finite_are_refused(name, bad, place):
    values = vector(PIECE + 461)
    values[place] = bad
    with pytest.raises(NotFinite, match="not finite"):
        encoded(name, values)


# Stochastic rounding


@pytest.mark.parametrize("name", ["bf16", *SCALED])
def test_stochastic_rounding_is_right_on_average_and_reproducible(name):
    values = vector(3 * BLOCKS.get(name, 256))
    total, repeats = torch.zeros(len(values), dtype=torch.float64), 2000
    for seed in range(repeats):
        total += there_and_back(name, values, seed)
    one = there_and_back(name, values, 5)
    assert same_bits(one, there_and_back(name, values, 5))
    assert not same_bits(one, there_and_back(name, values, 6))
    peaks = torch.cat([part.abs().max().expand(len(part)) for part in values.split(BLOCKS.get(name, 256))])
    step = {"bf16": values.abs() / 128, "int8": peaks / 127, "int4": peaks / 7, "e3m0": values.abs() + peaks / 64}[name]
    # The mean of `repeats` values, each at most a step away: half a step is the largest standard deviation.
    assert ((total / repeats - values).abs() <= 6 * step / 2 / math.sqrt(repeats) + step * 2.0**-16).all()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_an_outlier_hides_small_values_only_from_rounding_to_nearest(name):
    values = torch.full((BLOCK,), 1.0)
    values[0] = 1000
    assert not there_and_back(name, values)[1:].any()
    mean = torch.stack([there_and_back(name, values, seed)[1:] for seed in range(200)]).mean()
    assert mean == pytest.approx(1, rel=0.2)


# What strangers send


@settings(deadline=None)
@given(st.data(), lengths)
@pytest.mark.parametrize("name", NAMES)
def test_any_bytes_give_finite_numbers_or_an_error(name, data, length):
    codec = make_codec(name)
    seed = data.draw(st.integers(0, 2**32))
    blob = bytearray(np.random.default_rng(seed).bytes(codec.encoded_size(length)))
    if name in SCALED:  # otherwise a random scale would be refused most of the time
        exponent = data.draw(st.integers(0, 255))
        for start in range(0, length, BLOCKS[name]):
            upper = slice(codec.encoded_size(start) + SCALE[name] - 2, codec.encoded_size(start) + SCALE[name])
            blob[upper] = (int.from_bytes(blob[upper], "little") & 0x7F | exponent << 7).to_bytes(2, "little")
    into = torch.full((length,), 7.0)
    try:
        codec.decode(blob, into)
    except ProtocolError:
        assert (into == 7).all()
    else:
        assert into.isfinite().all()


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, -1e-30, 3e38, 1e-40])
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("place", [0, 1024, PIECE + 1024])
def test_a_wrong_scale_is_refused_before_anything_changes(name, scale, place):
    codec, length = make_codec(name), PIECE + 1024 + 10
    blob = bytearray(encoded(name, vector(length)))
    at = codec.encoded_size(place)
    blob[at : at + SCALE[name]] = F(scale).tobytes()[-SCALE[name] :]
    into = torch.zeros(length)
    with pytest.raises(ProtocolError, match="scale"):
        codec.decode(blob, into)
    with pytest.raises(ProtocolError, match="scale"):
        codec.check(blob, length)
    assert not into.any()


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFF81])
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_numbers_that_are_not_finite_are_refused_before_anything_changes(name, bits):
    codec, length = make_codec(name), PIECE + 10
    size = codec.encoded_size(1)
    blob = bytearray(codec.encoded_size(length))
    blob[-size:] = (bits << 16).to_bytes(4, "little")[-size:]
    into = torch.ones(length)
    with pytest.raises(ProtocolError, match="not finite"):
        codec.decode(blob, into)
    with pytest.raises(ProtocolError, match="not finite"):
        codec.check(blob, length)
    assert (into == 1).all()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_adding_rounds_the_factor_of_a_block_and_then_the_product_and_the_sum(name, length):
    factor, start = F(0.3), vector(length, seed=2)
    data = encoded(name, vector(length))
    into = start.clone()
    make_codec(name).add(data, into, float(factor))
    values, scales = decoded(name, data, length).numpy(), np.ones(length, F)
    if name in SCALED:
        codec = make_codec(name)
        for first in range(0, length, BLOCKS[name]):
            at = codec.encoded_size(first)
            upper = data[at : at + SCALE[name]].rjust(4, b"\0")
            scales[first : first + BLOCKS[name]] = np.frombuffer(upper, F)
    codes = np.divide(values, scales, out=np.zeros(length, F), where=scales != 0)
    assert same_bits(into, torch.from_numpy(start.numpy() + codes * (scales * factor)))
    into.fill_(math.nan)
    make_codec(name).add(data, into, float(factor), first=True)
    assert same_bits(into, torch.from_numpy(codes * (scales * factor)))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("name", NAMES)
def test_an_encoder_knows_what_its_bytes_mean_and_what_they_leave_out(name, seed, length, in_place):
    values, codec = vector(length), make_codec(name)
    values[length // 2 : length // 2 + 1] = torch.finfo(torch.float32).max
    meaning = values.clone() if in_place else torch.full((length,), math.nan)
    rest, out = meaning.clone(), bytearray(codec.encoded_size(length))
    codec.encode(meaning if in_place else values, out, seed=seed, meaning=meaning)
    assert out == encoded(name, values, seed)
    expected = decoded(name, out, length)
    assert torch.equal(meaning, expected)
    if seed is not None:
        assert same_bits(meaning, expected)
    codec.encode(rest if in_place else values, out, seed=seed, rest=rest)
    assert torch.equal(rest, values - expected)


# Error feedback


def send(feedback, name, values, start=0):
    out = bytearray(make_codec(name).encoded_size(len(values)))
    feedback.encode(start, values, out)
    return decoded(name, out, len(values))


@pytest.mark.parametrize("name", NAMES)
def test_what_was_sent_and_what_is_left_make_the_inputs(name):
    feedback = ErrorFeedback(make_codec(name), 1000)
    inputs = sent = torch.zeros(1000, dtype=torch.float64)
    for number in range(20):
        values = vector(1000, seed=number)
        inputs = inputs + values
        sent = sent + send(feedback, name, values)
        feedback.commit()
    assert torch.allclose(sent + feedback.residual, inputs, rtol=1e-5, atol=1e-3)
    assert (name == "fp32") == (not feedback.residual.any())


def test_a_round_that_is_given_up_changes_nothing():
    feedback = ErrorFeedback(make_codec("int4"), 500)
    send(feedback, "int4", vector(500))
    feedback.commit()
    before = feedback.residual.clone()
    first = send(feedback, "int4", vector(500, seed=2))
    feedback.abort()
    feedback.commit()  # nothing was encoded since
    assert same_bits(feedback.residual, before)
    assert same_bits(send(feedback, "int4", vector(500, seed=2)), first)


def test_attempts_at_one_round_send_the_same_and_count_once():
    block = BLOCKS["e3m0"]
    once, often = (ErrorFeedback(make_codec("e3m0"), 3 * block) for _ in range(2))
    for number in range(3):
        values = vector(3 * block, seed=number)
        whole = send(once, "e3m0", values)
        for _ in range(2):
            assert same_bits(send(often, "e3m0", values), whole)
        # In other chunks than before
        assert same_bits(send(often, "e3m0", values[block:], block), whole[block:])
        once.commit()
        often.commit()
        often.commit()
        assert same_bits(once.residual, often.residual)


def test_only_what_was_encoded_is_settled():
    feedback = ErrorFeedback(make_codec("int4"), 2 * BLOCK)
    values = vector(2 * BLOCK)
    send(feedback, "int4", values)
    feedback.commit()
    before = feedback.residual.clone()
    send(feedback, "int4", values[BLOCK:], BLOCK)
    feedback.commit()
    assert same_bits(feedback.residual[:BLOCK], before[:BLOCK])
    assert not same_bits(feedback.residual[BLOCK:], before[BLOCK:])


def test_a_downloaded_state_starts_without_old_errors():
    feedback = ErrorFeedback(make_codec("int4"), 500)
    send(feedback, "int4", vector(500))
    feedback.commit()
    send(feedback, "int4", vector(500))
    feedback.reset()
    assert not feedback.residual.any()
    feedback.commit()
    assert not feedback.residual.any()


def test_old_errors_fade():
    feedback = ErrorFeedback(make_codec("int4"), BLOCK, decay=0.5)
    values = vector(BLOCK)
    left = values - send(feedback, "int4", values)
    feedback.commit()
    assert torch.equal(feedback.residual, left * 0.5)


def test_values_that_are_not_finite_leave_the_feedback_as_it_was():
    feedback = ErrorFeedback(make_codec("int8"), 10)
    send(feedback, "int8", vector(10))
    feedback.commit()
    before = feedback.residual.clone()
    with pytest.raises(NotFinite):
        send(feedback, "int8", torch.full((10,), math.nan))
    feedback.commit()
    assert same_bits(feedback.residual, before)


def test_feedback_keeps_what_rounding_to_nearest_would_lose_for_ever():
    feedback = ErrorFeedback(make_codec("int4"), BLOCK)
    values = torch.full((BLOCK,), 0.01)
    values[0] = 1
    total = torch.zeros(BLOCK)
    for _ in range(100):
        total += send(feedback, "int4", values)
        feedback.commit()
    assert torch.allclose(total, 100 * values, atol=0.15)

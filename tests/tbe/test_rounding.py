import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsembed import tbe as rt
from rsembed.kernels import api
from rsembed.tbe.rounding import numbers_of_rows, round_with_noise, rounding_noise
from tests.tbe.oracle import make, train

CASES = json.loads((Path(__file__).parents[1] / "data" / "tbe_cases.json").read_text())["cases"]
SIXTEEN_BITS = [np.dtype(np.float16), jnp.dtype(jnp.bfloat16)]
rounded = jax.jit(round_with_noise, static_argnums=2)


def random_floats(seed, count, exponents):
    """Both signs, any mantissa, binary exponents in the given range."""
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1.0, 1.0], count)
    return (signs * rng.uniform(1, 2, count) * 2.0 ** rng.integers(*exponents, count)).astype(np.float32)


def random_words(seed, count):
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)


def test_the_published_bits_are_reproduced():
    (case,) = (case for case in CASES if case["name"] == "stochastic_rounding_fp16_bits")
    values = np.array(case["inputs"]["x"], np.float32)
    for column, word in enumerate(case["inputs"]["random_bits"]):
        found = np.asarray(rounded(values, np.full(len(values), word, np.uint32), jnp.dtype(jnp.float16)))
        assert found.view(np.uint16).tolist() == [bits[column] for bits in case["expected"]["fp16_bits"]]


def test_float16_is_the_noisy_value_rounded_toward_zero():
    values, words = random_floats(0, 4000, (-14, 15)), random_words(1, 4000)
    start = (values.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    noisy_start = ((values.view(np.uint32) & np.uint32(0xFF800000)) | (words >> 19)).view(np.float32)
    noisy = values.astype(np.float64) + (noisy_start.astype(np.float64) - start)
    nearest = noisy.astype(np.float16)
    wanted = np.where(np.abs(nearest.astype(np.float64)) > np.abs(noisy), np.nextafter(nearest, np.float16(0)), nearest)
    np.testing.assert_array_equal(rounded(values, words, jnp.dtype(jnp.float16)), wanted)


@pytest.mark.parametrize("value", [3e-6, -3e-6, 6.1e-5, 4e-8, 1e-9])
def test_subnormal_float16_keeps_the_mean(value):
    float16, core = jnp.dtype(jnp.float16), api.stochastic_rounding(jax.random.key(0))
    for found in (
        rounded(np.full(200_000, value, np.float32), random_words(1, 200_000), float16),
        core(jnp.full((2_000, 100), value, jnp.float32), float16, jnp.arange(2_000)),
    ):
        found = np.asarray(found, np.float64)
        assert np.abs(found - value).max() < 2.0**-24
        assert abs(found.mean() - value) < 5 * 2.0**-25 / np.sqrt(200_000)  # a spread of at most half a spacing


def test_bfloat16_steps_up_when_the_low_half_overflows():
    values, words = random_floats(2, 4000, (-126, 127)), random_words(3, 4000)
    bits = [int(b) for b in values.view(np.uint32)]
    wanted = [(b >> 16) + ((b & 0xFFFF) + (int(w) >> 16) >= 0x10000) for b, w in zip(bits, words, strict=True)]
    found = np.asarray(rounded(values, words, jnp.dtype(jnp.bfloat16)))
    assert found.view(np.uint16).tolist() == wanted


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_the_mean_over_all_noise_is_the_value(dtype):
    dropped = 13 if dtype == np.float16 else 16
    every_word = np.arange(2**dropped, dtype=np.uint32) << np.uint32(32 - dropped)
    for value in np.array([0.3, -1.7, 1.9999999, 1234.567], np.float32):
        found = np.asarray(rounded(np.full(len(every_word), value), every_word, dtype))
        assert found.astype(np.float64).mean() == value


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_numbers_of_the_target_stay_what_they_are(dtype):
    values = random_floats(4, 1000, (-13, 15)).astype(dtype)
    values = np.concatenate([values, np.array([0.0, -0.0], dtype), [jnp.finfo(dtype).max]]).astype(dtype)
    words = np.full(len(values), 0xFFFFFFFF, np.uint32)
    found = np.asarray(rounded(values.astype(np.float32), words, dtype))
    np.testing.assert_array_equal(found.view(np.uint16), values.view(np.uint16))


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_what_does_not_fit_is_rounded_to_nearest(dtype):
    largest = np.float32(jnp.finfo(dtype).max)
    half_spacing = np.float32(16.0 if dtype == np.float16 else 2.0**119)
    values = np.array([np.inf, -np.inf, np.nan, largest, largest + half_spacing / 2, 3.4e38, -3.4e38], np.float32)
    found = np.asarray(rounded(values, np.full(len(values), 0xFFFFFFFF, np.uint32), dtype)).astype(np.float32)
    np.testing.assert_array_equal(found, [np.inf, -np.inf, np.nan, largest, largest, np.inf, -np.inf])


def test_noise_depends_on_key_row_and_column_alone():
    key = jax.random.key(3)
    words = np.asarray(rounding_noise(key, jnp.asarray([4, 9, 2]), 6))
    assert words.dtype == np.uint32
    np.testing.assert_array_equal(rounding_noise(key, jnp.asarray([9, 4]), 6), words[[1, 0]])
    np.testing.assert_array_equal(rounding_noise(key, jnp.asarray([9]), 3)[0], words[1, :3])
    other = rounding_noise(jax.random.key(4), jnp.asarray([9]), 6)
    assert len(np.unique(np.concatenate([words, other]))) == words.size + 6


def test_rows_of_all_tables_have_numbers_of_their_own_whatever_stands_beside_them():
    names, ids = ["user", "item", "word"], jnp.arange(1000)
    numbers = [np.asarray(numbers_of_rows(names, jnp.full(1000, t), ids)) for t in range(3)]
    assert len(np.unique(numbers)) > 2990  # by chance, two of 3,000 numbers of 32 bits may be equal
    np.testing.assert_array_equal(numbers_of_rows(["word", "user"], jnp.zeros(1000, jnp.int32), ids), numbers[2])


def test_noise_is_uniform():
    words = np.asarray(rounding_noise(jax.random.key(0), jnp.arange(500), 64), np.float64)
    counts, _ = np.histogram(words, bins=16, range=(0, 2**32))
    expected = words.size / 16
    assert np.sum((counts - expected) ** 2 / expected) < 44  # 0.9999 quantile of chi square with 15 degrees


# Modules


FP16, FP32, BF16 = rt.SparseType.FP16, rt.SparseType.FP32, rt.SparseType.BF16
NUM_ROWS, DIM = 200, 32


def stepped(rate, *, num_steps=40, **arguments):
    """Weights after that many steps of `-rate` from 1.0, of rows more than fit into the cache and of 20 that do."""
    caching = {"location": rt.EmbeddingLocation.MANAGED_CACHING, "cache_sets": 1}
    module = make(((NUM_ROWS, DIM),), learning_rate=rate, uniform=None, **caching, **arguments)
    module.load_state_dict({"table_0.weight": np.ones((NUM_ROWS, DIM), np.float32)})
    for few in (False, True):
        ids = np.arange(20) if few else np.arange(20, NUM_ROWS)
        for _ in range(num_steps):
            train(module, ids, np.array([0, ids.size]))
    (weights,) = module.split_embedding_weights()
    return weights.astype(np.float64)


@pytest.mark.parametrize(
    ("weights", "cache", "rate"), [(FP16, FP32, 1e-5), (FP32, FP16, 1e-5), (BF16, FP32, 1e-4), (FP16, BF16, 1e-4)]
)
def test_steps_smaller_than_the_rounding_are_not_lost_where_the_cache_has_another_precision(weights, cache, rate):
    values = stepped(rate, weights_precision=weights, cache_precision=cache)
    spacing = {FP16: 2.0**-11, BF16: 2.0**-8}[cache if cache != FP32 else weights]  # below 1.0
    for own in (values[:20], values[20:]):
        # Each step rounds once: a random walk of at most 40 times `spacing`, of which a share moves.
        deviation = np.sqrt(40 * spacing * rate / own.size) + 1e-9
        assert 5 * deviation < 40 * rate / 4  # lost steps would leave 1
        np.testing.assert_allclose(own.mean(), 1 - 40 * rate, atol=5 * deviation)


@pytest.mark.parametrize(("weights", "cache"), [(FP32, FP16), (FP32, BF16), (FP16, BF16)])
def test_a_lookup_through_a_narrower_cache_changes_no_bit_of_the_table(weights, cache):
    caching = {"location": rt.EmbeddingLocation.MANAGED_CACHING, "cache_sets": 1, "cache_precision": cache}
    module = make(((NUM_ROWS, DIM),), uniform=(-1, 1), weights_precision=weights, **caching)
    (before,) = module.split_embedding_weights()
    for first in (0, 30, 60):  # rows leave for others, and all come home in the end
        module(np.arange(first, first + 30), np.array([0, 30]))
    np.testing.assert_array_equal(module.split_embedding_weights()[0], before)


def test_without_stochastic_rounding_a_cache_of_another_precision_rounds_to_nearest():
    values = stepped(1e-5, num_steps=5, weights_precision=FP16, cache_precision=FP32, stochastic_rounding=False)
    np.testing.assert_array_equal(values[52:], 1.0)

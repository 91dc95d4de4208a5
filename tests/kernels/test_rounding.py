"""Stochastic rounding: published bits, mean, and noise that depends on key, row and column."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from rsembed.kernels import api
from rsembed.kernels.reference import round_with_noise

CASES = json.loads((Path(__file__).parents[1] / "data" / "tbe_cases.json").read_text())["cases"]
FLOAT16, BFLOAT16 = jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16)
rounded = jax.jit(round_with_noise, static_argnums=2)


def rounded_rows(seed, values, rows):
    return api.stochastic_rounding(jax.random.key(seed))(values, FLOAT16, jnp.asarray(rows))


def draw_values_and_words(exponents):
    """Random floats of both signs with binary exponents in a range, and random 32-bit words."""
    rng = np.random.default_rng(0)
    mantissas = rng.choice([-1.0, 1.0], 4000) * rng.uniform(1, 2, 4000)
    values = np.ldexp(mantissas, rng.integers(*exponents, 4000)).astype(np.float32)
    return values, rng.integers(0, 2**32, 4000, np.uint32)


def test_the_published_bits_are_reproduced():
    (case,) = (case for case in CASES if case["name"] == "stochastic_rounding_fp16_bits")
    values = np.float32(case["inputs"]["x"])
    bits = np.uint16(case["expected"]["fp16_bits"])
    for column, word in enumerate(case["inputs"]["random_bits"]):
        actual = rounded(values, np.full(len(values), word, np.uint32), FLOAT16)
        assert_array_equal(np.asarray(actual).view(np.uint16), bits[:, column])


def test_float16_is_the_noisy_value_rounded_toward_zero():
    values, words = draw_values_and_words((-14, 15))
    power_of_two = values.view(np.uint32) & np.uint32(0xFF800000)
    start = power_of_two.view(np.float32)
    noise = (power_of_two | (words >> 19)).view(np.float32).astype(np.float64) - start
    noisy = values + noise
    nearest = noisy.astype(np.float16)
    is_too_far = np.abs(nearest.astype(np.float64)) > np.abs(noisy)
    wanted = np.where(is_too_far, np.nextafter(nearest, np.float16(0)), nearest)
    assert_array_equal(rounded(values, words, FLOAT16), wanted)


@pytest.mark.parametrize("value", [3e-6, -3e-6, 6.1e-5, 4e-8, 1e-9])
def test_subnormal_float16_keeps_the_mean(value):
    actual = rounded_rows(0, jnp.full((2_000, 100), value), jnp.arange(2_000))
    actual = np.asarray(actual, np.float64)
    assert np.abs(actual - value).max() < 2.0**-24
    # The standard deviation of a value is at most half a spacing of 2**-24.
    assert abs(actual.mean() - value) < 5 * 2.0**-25 / np.sqrt(200_000)


def test_bfloat16_steps_up_when_the_low_half_overflows():
    values, words = draw_values_and_words((-126, 127))
    bits = values.view(np.uint32)
    sums = (bits & 0xFFFF) + (words >> 16)
    actual = np.asarray(rounded(values, words, BFLOAT16))
    assert_array_equal(actual.view(np.uint16), (bits >> 16) + (sums >> 16))


@pytest.mark.parametrize(
    ("dtype", "half_spacing"), [(FLOAT16, np.float32(16.0)), (BFLOAT16, np.float32(2.0**119))]
)
def test_what_does_not_fit_is_rounded_to_nearest(dtype, half_spacing):
    largest = np.float32(jnp.finfo(dtype).max)
    values = [np.inf, -np.inf, np.nan, largest, largest + half_spacing / 2, 3.4e38, -3.4e38]
    actual = rounded(np.float32(values), np.full(7, 0xFFFFFFFF, np.uint32), dtype)
    wanted = [np.inf, -np.inf, np.nan, largest, largest, np.inf, -np.inf]
    assert_array_equal(np.asarray(actual, np.float32), wanted)


@pytest.mark.slow
def test_noise_depends_on_key_row_and_column_alone():
    values = jnp.full((3, 60), 1 / 3)
    actual = np.asarray(rounded_rows(3, values, [4, 9, 2]))
    assert_array_equal(rounded_rows(3, values[:2], [9, 4]), actual[[1, 0]])
    assert_array_equal(rounded_rows(3, values[:1, :3], [9]), actual[1:2, :3])
    of_another_key = rounded_rows(4, values[:1], [9])
    assert len(np.unique([*actual, *of_another_key], axis=0)) == 4

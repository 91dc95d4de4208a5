"""Stochastic rounding: the published bits, the mean, and noise by row."""

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
SIXTEEN_BITS = [np.dtype(np.float16), jnp.dtype(jnp.bfloat16)]
rounded = jax.jit(round_with_noise, static_argnums=2)


def rounded_rows(seed, values, rows):
    return api.stochastic_rounding(jax.random.key(seed))(
        values, jnp.dtype(jnp.float16), jnp.asarray(rows)
    )


def random_floats(seed, count, exponents):
    """Both signs, any mantissa, binary exponents in the given range."""
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1.0, 1.0], count)
    return (signs * rng.uniform(1, 2, count) * 2.0 ** rng.integers(*exponents, count)).astype(
        np.float32
    )


def random_words(seed, count):
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)


def test_the_published_bits_are_reproduced():
    (case,) = (case for case in CASES if case["name"] == "stochastic_rounding_fp16_bits")
    values = np.array(case["inputs"]["x"], np.float32)
    for column, word in enumerate(case["inputs"]["random_bits"]):
        found = np.asarray(
            rounded(values, np.full(len(values), word, np.uint32), jnp.dtype(jnp.float16))
        )
        assert found.view(np.uint16).tolist() == [
            bits[column] for bits in case["expected"]["fp16_bits"]
        ]


def test_float16_is_the_noisy_value_rounded_toward_zero():
    values, words = random_floats(0, 4000, (-14, 15)), random_words(1, 4000)
    start = (values.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    noisy_start = ((values.view(np.uint32) & np.uint32(0xFF800000)) | (words >> 19)).view(
        np.float32
    )
    noisy = values.astype(np.float64) + (noisy_start.astype(np.float64) - start)
    nearest = noisy.astype(np.float16)
    wanted = np.where(
        np.abs(nearest.astype(np.float64)) > np.abs(noisy),
        np.nextafter(nearest, np.float16(0)),
        nearest,
    )
    assert_array_equal(rounded(values, words, jnp.dtype(jnp.float16)), wanted)


@pytest.mark.parametrize("value", [3e-6, -3e-6, 6.1e-5, 4e-8, 1e-9])
def test_subnormal_float16_keeps_the_mean(value):
    found = np.asarray(
        rounded_rows(0, jnp.full((2_000, 100), value), jnp.arange(2_000)), np.float64
    )
    assert np.abs(found - value).max() < 2.0**-24
    # A spread of at most half a spacing.
    assert abs(found.mean() - value) < 5 * 2.0**-25 / np.sqrt(200_000)


def test_bfloat16_steps_up_when_the_low_half_overflows():
    values, words = random_floats(2, 4000, (-126, 127)), random_words(3, 4000)
    bits = [int(b) for b in values.view(np.uint32)]
    wanted = [
        (b >> 16) + ((b & 0xFFFF) + (int(w) >> 16) >= 0x10000)
        for b, w in zip(bits, words, strict=True)
    ]
    found = np.asarray(rounded(values, words, jnp.dtype(jnp.bfloat16)))
    assert found.view(np.uint16).tolist() == wanted


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_what_does_not_fit_is_rounded_to_nearest(dtype):
    largest = np.float32(jnp.finfo(dtype).max)
    half_spacing = np.float32(16.0 if dtype == np.float16 else 2.0**119)
    values = np.array(
        [np.inf, -np.inf, np.nan, largest, largest + half_spacing / 2, 3.4e38, -3.4e38], np.float32
    )
    found = np.asarray(rounded(values, np.full(len(values), 0xFFFFFFFF, np.uint32), dtype)).astype(
        np.float32
    )
    assert_array_equal(found, [np.inf, -np.inf, np.nan, largest, largest, np.inf, -np.inf])


def test_noise_depends_on_key_row_and_column_alone():
    values = jnp.full((3, 60), 1 / 3)
    found = np.asarray(rounded_rows(3, values, [4, 9, 2]))
    assert_array_equal(rounded_rows(3, values[:2], [9, 4]), found[[1, 0]])
    assert_array_equal(rounded_rows(3, values[:1, :3], [9]), found[1:2, :3])
    assert len(np.unique(np.concatenate([found, rounded_rows(4, values[:1], [9])]), axis=0)) == 4

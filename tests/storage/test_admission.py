"""Admission by chance: the draws are those of the documented formula, and as frequent as they should be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsembed.keys import split_keys
from rsembed.storage.hashed import is_drawn

KEYS = split_keys(np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64))
KEY = jax.random.key(5)
drawn = jax.jit(is_drawn, static_argnums=4)


def share(number, occurrences, probability, keys=KEYS):
    return np.asarray(
        drawn(
            KEY,
            keys,
            jnp.int32(number),
            jnp.full(len(keys.low), occurrences, jnp.int32),
            probability,
        )
    )


@pytest.mark.parametrize(
    ("occurrences", "probability"),
    [(1, 0.3), (3, 0.3), (1000, 1e-3), (2**31 - 1, 1e-9), (1, 1e-12)],
)
def test_each_occurrence_has_its_chance(occurrences, probability):
    expected = -np.expm1(occurrences * np.log1p(-probability))
    deviation = np.sqrt(expected * (1 - expected) / KEYS.low.size)
    assert abs(share(3, occurrences, probability).mean() - expected) <= 4 * deviation + 1e-9


def test_the_chance_of_no_luck_is_that_of_exact_numbers():
    """To the rounding of float32: whoever drew less stays outside, whoever drew more gets in."""
    counts = np.arange(1, 20_001, dtype=np.int32)
    found = np.asarray(drawn(KEY, KEYS, jnp.int32(0), jnp.asarray(counts), 0.01))
    own = jax.random.fold_in(jax.random.fold_in(KEY, 0x61646D74), 0)
    fold = jax.vmap(
        lambda high, low: jax.random.bits(
            jax.random.fold_in(jax.random.fold_in(own, high), low), (1,)
        )[0]
    )
    lucky = np.float64(fold(KEYS.high, KEYS.low)) - 0.99 ** np.float64(counts) * 2**32
    is_clear = np.abs(lucky) > 2**13  # of 2**32, of which 30 products of float32 lose less
    np.testing.assert_array_equal(found[is_clear], lucky[is_clear] > 0)
    assert is_clear.mean() > 0.999

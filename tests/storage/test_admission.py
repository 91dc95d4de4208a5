"""Admission by probability: the share of admitted keys is as expected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsembed.keys import split_keys
from rsembed.storage.hashed import is_drawn

KEYS = split_keys(np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64))


@pytest.mark.parametrize(
    ("occurrences", "probability"),
    [(1, 0.3), (3, 0.3), (1000, 1e-3), (2**31 - 1, 1e-9), (1, 1e-12)],
)
def test_each_occurrence_has_its_chance(occurrences, probability):
    counts = jnp.full(KEYS.low.size, occurrences, jnp.int32)
    draw = jax.jit(is_drawn, static_argnums=4)
    drawn = draw(jax.random.key(5), KEYS, jnp.int32(3), counts, probability)
    expected = -np.expm1(occurrences * np.log1p(-probability))
    deviation = np.sqrt(expected * (1 - expected) / KEYS.low.size)
    assert abs(np.mean(drawn) - expected) <= 4 * deviation + 1e-9

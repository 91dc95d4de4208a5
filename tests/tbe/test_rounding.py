"""Modules whose rows are rounded stochastically, also where the cache has another precision."""

import jax.numpy as jnp
import numpy as np
import pytest

from rsembed import tbe as rt
from rsembed.collection.dense_rows import numbers_of_rows
from tests.tbe.oracle import make, train


def test_rows_of_all_tables_have_numbers_of_their_own_whatever_stands_beside_them():
    names, ids = ["user", "item", "word"], jnp.arange(1000)
    numbers = [np.asarray(numbers_of_rows(names, jnp.full(1000, t), ids)) for t in range(3)]
    assert len(np.unique(numbers)) > 2990  # by chance, two of 3,000 numbers of 32 bits may be equal
    np.testing.assert_array_equal(numbers_of_rows(["word", "user"], jnp.zeros(1000, jnp.int32), ids), numbers[2])


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
    narrow = {FP16: jnp.float16, BF16: jnp.bfloat16}[cache]
    for first in (0, 30, 60):  # rows leave for others, and all come home in the end
        found = module(np.arange(first, first + 30), np.arange(31))
        np.testing.assert_array_equal(found, np.asarray(before)[first : first + 30].astype(narrow).astype(np.float32))
    np.testing.assert_array_equal(module.split_embedding_weights()[0], before)


def test_without_stochastic_rounding_a_cache_of_another_precision_rounds_to_nearest():
    values = stepped(1e-5, num_steps=5, weights_precision=FP16, cache_precision=FP32, stochastic_rounding=False)
    np.testing.assert_array_equal(values[52:], 1.0)

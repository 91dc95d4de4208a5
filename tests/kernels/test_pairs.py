"""Products of all pairs of vectors, compared with loops in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rsembed as rs
from tests.kernels.cases import IMPLEMENTATIONS

SHAPES = [(4, 27, 64), (3, 1, 8), (3, 2, 5), (2, 17, 13), (1, 0, 4), (2, 5, 0), (0, 3, 4)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pairs_and_their_gradient_are_those_of_loops(shape, implementation):
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal(shape)
    firsts, seconds = np.triu_indices(shape[1], 1)
    d_products = rng.standard_normal((shape[0], len(firsts)))
    products = np.zeros(d_products.shape)
    d_vectors = np.zeros(shape)
    for place, (i, j) in enumerate(zip(firsts, seconds, strict=True)):
        products[:, place] = (vectors[:, i] * vectors[:, j]).sum(axis=1)
        d_vectors[:, i] += d_products[:, place, None] * vectors[:, j]
        d_vectors[:, j] += d_products[:, place, None] * vectors[:, i]

    @jax.jit
    def both(vectors, d_products):
        interact = functools.partial(rs.pairwise_interaction, implementation=implementation)
        actual, pullback = jax.vjp(interact, vectors)
        return actual, *pullback(d_products)

    actual, d_found = both(np.float32(vectors), np.float32(d_products))
    np.testing.assert_allclose(actual, products, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(d_found, d_vectors, rtol=1e-5, atol=1e-5)


def test_products_of_halves_are_whole_floats():
    half = rs.pairwise_interaction(jnp.full((1, 2, 2), 0.5, jnp.bfloat16))
    assert half.dtype == jnp.float32 and half.tolist() == [[0.5]]

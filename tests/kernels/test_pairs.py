"""Pairs of vectors against loops in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rsembed as rs
from rsembed.kernels import native

SHAPES = [
    (5, 3, 2),
    (4, 27, 64),
    (3, 1, 8),
    (3, 2, 5),
    (2, 17, 13),
    (7, 33, 16),
    (1, 0, 4),
    (2, 5, 0),
    (0, 3, 4),
]
LIVE = ["reference"] if native.unavailable_because() else ["reference", "native"]


@pytest.mark.parametrize("implementation", LIVE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pairs_and_their_gradient_are_those_of_loops(shape, implementation):
    rng, pairs = np.random.default_rng(0), list(itertools.combinations(range(shape[1]), 2))
    vectors = rng.standard_normal(shape).astype(np.float32)
    d_products = rng.standard_normal((shape[0], len(pairs))).astype(np.float32)
    products, d_vectors = np.zeros(d_products.shape), np.zeros(shape)
    wide = vectors.astype(np.float64)
    for place, (i, j) in enumerate(pairs):
        products[:, place] = (wide[:, i] * wide[:, j]).sum(axis=1)
        d_vectors[:, i] += d_products[:, place, None] * wide[:, j]
        d_vectors[:, j] += d_products[:, place, None] * wide[:, i]

    @jax.jit
    def both(vectors, d_products):
        found, pullback = jax.vjp(
            lambda x: rs.pairwise_interaction(x, implementation=implementation), vectors
        )
        return found, pullback(d_products)[0]

    for found, expected in zip(both(vectors, d_products), (products, d_vectors), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_products_of_halves_are_whole_floats():
    half = rs.pairwise_interaction(jnp.full((1, 2, 2), 0.5, jnp.bfloat16))
    assert half.dtype == jnp.float32 and half.tolist() == [[0.5]]

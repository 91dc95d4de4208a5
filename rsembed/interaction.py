"""The products of all pairs of a sample's vectors, which is how DLRM lets its features meet."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from rsembed.checks import check_type
from rsembed.kernels import api


def pairwise_interaction(
    vectors: Float[Array, "batch n dim"], *, implementation: str | None = None
) -> Float[Array, "batch pairs"]:
    """Dot products of the vectors of every sample, in the order of `numpy.triu_indices(n, 1)`, float32.

    Differentiable once. On CPUs one native call serves all samples; XLA runs a small product for each of them, which
    takes several times as long as the tables of a model of 26 features.

    Args:
      vectors: one vector per feature, such as `jnp.stack([dense, *activations.values()], axis=1)`.
      implementation: name of a kernel implementation to insist on; None takes the fastest that can serve.

    Raises: TypeError or ValueError: `vectors` is no array of numbers, or has not three axes.

    Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019.

    Example:
      >>> import jax.numpy as jnp, rsembed as rs
      >>> rs.pairwise_interaction(jnp.asarray([[[1.0, 0.0], [2.0, 3.0], [0.0, 4.0]]])).tolist()
      [[2.0, 0.0, 12.0]]
    """
    check_type(vectors, Float[Array, "batch n dim"], "pairwise_interaction: vectors")
    api.check_implementation(implementation)
    return api.pair_products(implementation, jnp.asarray(vectors, jnp.float32))

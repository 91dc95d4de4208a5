"""Initial values that differ for all entries of a table."""

import jax.numpy as jnp


def ramp(key, shape):
    del key
    return jnp.arange(shape[0] * shape[1], dtype=jnp.float32).reshape(shape)

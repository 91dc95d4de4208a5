"""Stochastic rounding of float32 rows to 16 bits, from random words that a key, a table and a row determine."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

_DROPPED_BITS = {jnp.dtype(jnp.float16): 13, jnp.dtype(jnp.bfloat16): 16}
_SMALLEST_NORMAL_FLOAT16 = 2.0**-14
_FLOAT16_SUBNORMAL_SPACING = 2.0**-24


def round_with_noise(values: Float[Array, "*shape"], words: UInt32[Array, "*shape"], dtype: Any) -> Array:
    """`values` rounded to one of their two neighbours in `dtype`, up if the mantissa carries after adding the noise.

    The mean over all words is the value itself in the normal range of `dtype`; float16 values below 2**-14 lean
    toward zero. Infinities, NaN and values above the largest number of `dtype` are rounded to nearest.

    Args:
      values: float32.
      words: one random word per value, of which the upper bits are used: 13 for float16, 16 for bfloat16.
      dtype: float16 or bfloat16; float32 returns `values`.

    Raises: ValueError: another dtype.

    Source: FBGEMM's fused optimizers: noise of the size of the dropped bits, then rounding toward zero.
    """
    dtype = jnp.dtype(dtype)
    if dtype == jnp.float32:
        return values
    if dtype not in _DROPPED_BITS:
        raise ValueError(f"stochastic rounding knows float16 and bfloat16, not {dtype}.")
    dropped = _DROPPED_BITS[dtype]
    # Adding to the bits equals adding the noise as a number, except that nothing is flushed to zero on the way.
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32) + (words >> jnp.uint32(32 - dropped))
    kept = bits & jnp.uint32((0xFFFFFFFF << dropped) & 0xFFFFFFFF)
    rounded = jax.lax.bitcast_convert_type(kept, jnp.float32)
    largest = float(jnp.finfo(dtype).max)
    if dtype == jnp.float16:
        noisy = jax.lax.bitcast_convert_type(bits, jnp.float32)
        subnormal = jnp.trunc(noisy / _FLOAT16_SUBNORMAL_SPACING) * _FLOAT16_SUBNORMAL_SPACING
        rounded = jnp.where(jnp.abs(noisy) < _SMALLEST_NORMAL_FLOAT16, subnormal, rounded)
    # Not `>`: NaN must take the branch of nearest rounding too.
    return jnp.where(jnp.abs(values) <= largest, rounded, values).astype(dtype)


def rounding_noise(
    key: PRNGKeyArray, tables: int | Int[Array, "..."], rows: Int[Array, " touched"], dim: int
) -> UInt32[Array, "touched dim"]:
    """Random words that depend on the key, the table, the row and the column alone, not on the place in the batch.

    Args:
      key: a new one for every step.
      tables: number of the table, of all rows or of each.
      rows: row numbers.
      dim: columns.
    """

    def words(table: Array, row: Array) -> Array:
        return jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, table), row), (dim,))

    tables = jnp.broadcast_to(jnp.asarray(tables), rows.shape)
    return jax.vmap(words)(tables.astype(jnp.uint32), rows.astype(jnp.uint32))

"""Stochastic rounding of float32 rows to 16 bits, from random words that a key, a table and a row determine."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from rsembed.kernels.keyed import mix

_DROPPED_BITS = {jnp.dtype(jnp.float16): 13, jnp.dtype(jnp.bfloat16): 16}
_SMALLEST_NORMAL_FLOAT16 = 2.0**-14
_FLOAT16_SUBNORMAL_SPACING = 2.0**-24


def round_with_noise(values: Float[Array, "*shape"], words: UInt32[Array, "*shape"], dtype: Any) -> Array:
    """`values` rounded to one of their two neighbours in `dtype`, up if the mantissa carries after adding the noise.

    The mean over all words is the value itself. Infinities, NaN and values above the largest number of `dtype` are
    rounded to nearest.

    Args:
      values: float32.
      words: one random word per value, of which the upper bits are used: 13 for float16, 24 below its normal range, and
        16 for bfloat16.
      dtype: float16 or bfloat16; float32 returns `values`.

    Raises: ValueError: another dtype.

    Source: FBGEMM's fused optimizers: noise of the size of the dropped bits, then rounding toward zero. There, float16
      values below 2**-14 lean toward zero, because their noise is smaller than their spacing.
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
        steps = jnp.abs(values) / _FLOAT16_SUBNORMAL_SPACING
        whole = jnp.floor(steps)
        is_up = (words >> jnp.uint32(8)).astype(jnp.float32) * 2.0**-24 < steps - whole
        subnormal = jnp.copysign((whole + is_up.astype(jnp.float32)) * _FLOAT16_SUBNORMAL_SPACING, values)
        rounded = jnp.where(jnp.abs(values) < _SMALLEST_NORMAL_FLOAT16, subnormal, rounded)
    # Not `>`: NaN must take the branch of nearest rounding too.
    return jnp.where(jnp.abs(values) <= largest, rounded, values).astype(dtype)


def rounding_noise(key: PRNGKeyArray, rows: Int[Array, " rows"], dim: int) -> UInt32[Array, "rows dim"]:
    """Random words that depend on the key, the number of the row and the column alone."""
    return jax.vmap(lambda row: jax.random.bits(jax.random.fold_in(key, row), (dim,)))(rows.astype(jnp.uint32))


def round_stochastically(
    key: PRNGKeyArray, values: Float[Array, "rows dim"], dtype: Any, rows: Int[Array, " rows"]
) -> Float[Array, "rows dim"]:
    """`round_with_noise` by the noise of rows of these numbers; the key is a new one for every step."""
    return round_with_noise(values, rounding_noise(key, rows, values.shape[1]), dtype)


def numbers_of_rows(names: Sequence[str], tables: Int[Array, " rows"], ids: Int[Array, " rows"]) -> Int[Array, " rows"]:
    """Numbers that tell rows of all tables apart, as `RowLayout.rounding` does: no grouping or mesh changes them.

    Args:
      names: of tables.
      tables: position in `names` of each row's table.
      ids: row in its table.
    """
    of_names = np.asarray([zlib.crc32(name.encode()) for name in names], np.uint32)
    return mix(ids.astype(jnp.uint32), jnp.asarray(of_names)[tables]).astype(jnp.int32)

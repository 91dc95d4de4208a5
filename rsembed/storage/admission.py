"""Which new keys get a row by chance: equal draws on any mesh, and in the lookup before the step as in the step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from rsembed.kernels import api
from rsembed.kernels.contract import KeyOrKeys
from rsembed.kernels.keyed import varying_zero
from rsembed.keys import Keys

DRAWS = 0x61646D74
"""Tells these draws from the initial values of the same keys."""


def is_drawn(
    key: KeyOrKeys, keys: Keys, number: Int[Array, ""], occurrences: Int[Array, " nnz"], probability: float
) -> Bool[Array, " nnz"]:
    """Whether each key is admitted in step `number`: with this probability for each of its occurrences.

    A key draws one number of 32 bits a step, from `key` (where there are several, that of its table) folded with
    `DRAWS`, the step and the key's lanes. Below the chance that none of its occurrences is lucky, in units of 2**-32,
    it stays outside; the chance is a product of integers, so that no compiler rounds it otherwise.
    """
    own = jax.vmap(lambda key: jax.random.fold_in(jax.random.fold_in(key, DRAWS), number))(key.reshape(-1))
    drawn = api.row_bits(own if key.ndim else own[0], (keys.high, keys.low), 1, keys.table)[:, 0]
    return keys.is_key & (drawn >= _power(1.0 - probability, occurrences))


def _power(base: float, exponents: Int[Array, " nnz"]) -> UInt32[Array, " nnz"]:
    """`base**exponents` in units of 2**-32, for a base below 1 and positive exponents."""
    squares = jnp.asarray([min(int(base ** (2**bit) * 2**32), 2**32 - 1) for bit in range(31)], jnp.uint32)

    def multiply(bit: Array, product: Array) -> Array:
        is_set = (exponents >> bit) & 1 == 1
        return jnp.where(is_set, _upper_half(product, squares[bit]), product)

    start = jnp.full(exponents.shape, 0xFFFFFFFF, jnp.uint32) + varying_zero(exponents).astype(jnp.uint32)
    product: Array = jax.lax.fori_loop(0, 31, multiply, start)
    return product


def _upper_half(one: UInt32[Array, "*n"], other: UInt32[Array, ""]) -> UInt32[Array, "*n"]:
    """The upper 32 bits of a product of two 32-bit numbers."""
    half, low = jnp.uint32(16), jnp.uint32(0xFFFF)
    one_high, one_low, other_high, other_low = one >> half, one & low, other >> half, other & low
    crossed, across = one_high * other_low, one_low * other_high
    carried = (one_low * other_low >> half) + (crossed & low) + (across & low)
    return one_high * other_high + (crossed >> half) + (across >> half) + (carried >> half)

"""Arrays of row numbers, ids and keys that reject arithmetic.

Users often add gradients with `jax.tree.map(jnp.add, first, second)`. If row numbers were plain
integers, `jax.tree.map` would add row numbers as well as gradients, and return gradients of wrong
rows without an error. JAX rejects arithmetic on arrays of random keys (`jax.random.key`), so `wrap`
stores the bits of integers in an array of random keys. Wrapped numbers can be moved, indexed,
concatenated, compared, carried through loops and sharded over a mesh. `jnp.add` of wrapped numbers
raises a `TypeError`, also inside `jit`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl
from jaxtyping import Array, Integer, PyTree

DTYPES = {"row": jnp.int32, "place": jnp.int32, "id": jnp.int32, "key_lane": jnp.uint32}
"""Dtype of row numbers, positions of rows in an array, ids, and 32-bit words of keys."""

_IN_ERRORS = {
    "row": "row number: add row gradients by + or rs.combine",
    "place": "place of a row: add row gradients, not states",
    "id": "id: add gradients by +",
    "key_lane": "key: add row gradients by + or rs.combine, not states",
}
"""Text for each kind of numbers, shown in JAX errors: `add does not accept dtype key<TEXT>`."""


def _refuse(*arguments: object, **options: object) -> Any:
    raise TypeError(
        "these are numbers of rows, ids or keys of rsembed, not keys of a random number generator."
    )


_IMPLEMENTATIONS = {
    kind: define_prng_impl(
        key_shape=(1,),
        seed=_refuse,
        split=_refuse,
        random_bits=_refuse,
        fold_in=_refuse,
        name=f"rsembed_{kind}",
        tag=_IN_ERRORS[kind],
    )
    for kind in DTYPES
}
_KINDS = {implementation: kind for kind, implementation in _IMPLEMENTATIONS.items()}


@partial(jax.jit, static_argnames="kind", inline=True)
def wrap(numbers: Array, kind: str) -> Array:
    """The numbers as an array of the same shape that rejects arithmetic.

    The result contains the bits of `numbers`, so `unwrap` returns `numbers` exactly.

    Args:
      numbers: array with the dtype `DTYPES[kind]`.
      kind: kind of the numbers (row numbers, ids, ...), a key of `DTYPES`. JAX names the kind in
        the error message for arithmetic on wrapped numbers.

    Raises: TypeError: `numbers` does not have the dtype `DTYPES[kind]`.
    """
    if numbers.dtype != DTYPES[kind]:
        wanted = jnp.dtype(DTYPES[kind])
        raise TypeError(
            f"numbers of kind {kind!r} are {wanted}, got {numbers.dtype}; cast them first."
        )
    bits = jax.lax.bitcast_convert_type(numbers, jnp.uint32)
    return jax.random.wrap_key_data(bits[..., None], impl=_IMPLEMENTATIONS[kind])


@partial(jax.jit, static_argnames="kind", inline=True)
def _numbers(array: Array, kind: str) -> Integer[Array, "*shape"]:
    bits = jax.random.key_data(array)[..., 0]
    return jax.lax.bitcast_convert_type(bits, DTYPES[kind])


def kind_of(array: object) -> str | None:
    """The argument `kind` with which `wrap` made `array`, or None for any other value."""
    if not isinstance(array, jax.Array) or not jax.dtypes.issubdtype(
        array.dtype, jax.dtypes.prng_key
    ):
        return None
    return _KINDS.get(jax.random.key_impl(array))


def unwrap(array: object) -> Any:
    """The numbers in a result of `wrap`. A value that is not wrapped is returned unchanged."""
    kind = kind_of(array)
    if kind is None:
        return array
    return _numbers(array, kind)


def wrap_integers(tree: PyTree) -> PyTree:
    """Calls `wrap` on all int32 arrays (as ids) and uint32 arrays (as words of keys) of a tree."""

    def wrapped(leaf: object) -> Any:
        dtype = getattr(leaf, "dtype", None)
        if dtype == jnp.int32:
            return wrap(leaf, "id")
        if dtype == jnp.uint32:
            return wrap(leaf, "key_lane")
        return leaf

    return jax.tree.map(wrapped, tree)


def unwrap_all(tree: PyTree) -> PyTree:
    """The tree with every result of `wrap` replaced by its numbers."""
    return jax.tree.map(unwrap, tree)


def implementation(name: str) -> Any:
    """Argument `impl` of `jax.random.wrap_key_data`, for wrapped numbers or for random keys.

    Args:
      name: a key of `DTYPES` for wrapped numbers, or the name of a JAX random number generator for
        random keys.
    """
    return _IMPLEMENTATIONS.get(name, name)

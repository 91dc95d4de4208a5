"""64-bit keys as two 32-bit lanes, which JAX can hold without its 64-bit mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int, PyTree

from rsembed.specs import MAX_ROWS as NO_ROW

MAX_SHARDS = 65_536
ALL_BITS = 0xFFFFFFFF
KEY_DTYPES = ("int32", "int64", "uint32", "uint64")


class Keys(NamedTuple):
    """Keys of any shape; every 64-bit number is a key like any other.

    Attributes:
      high: upper 32 bits, uint32.
      low: lower 32 bits, uint32.
      is_key: False for padding, whose lanes mean nothing.
      table: number of each key's table among several, int32; None where there is one.
    """

    high: Any
    low: Any
    is_key: Any
    table: Any = None

    @property
    def lanes(self) -> tuple[PyTree, ...]:
        """Arrays that identify a key, most significant first."""
        return (self.high, self.low) if self.table is None else (self.table, self.high, self.low)

    @staticmethod
    def of_lanes(lanes: Sequence[PyTree], is_key: PyTree) -> Keys:
        """The inverse of `lanes`."""
        *table, high, low = lanes
        return Keys(high, low, is_key, *table)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Sizes of the axes, which all lanes have; symbols in a program that is exported for any size."""
        return self.is_key.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def reshape(self, *shape: int) -> Keys:
        """The keys in another shape."""
        reshaped: Keys = jax.tree.map(lambda lane: lane.reshape(*shape), self)
        return reshaped

    def only(self, mask: Any) -> Keys:
        """The keys, of which only those that `mask` marks count; the others become padding."""
        return self._replace(is_key=self.is_key & mask)


def split_keys(keys: PyTree, *, feature: str = "keys") -> Keys:
    """Keys from an integer array: numpy arrays stay on the host, jax arrays on their device.

    Args:
      keys: any integer dtype. If it is signed, -1 is padding, and other negative numbers are the key of their 64 bits.
        Pass 64-bit keys as numpy arrays: without its 64-bit mode JAX cuts them to 32 bits silently.
      feature: named in errors.

    Raises: TypeError: the keys are not integers.

    Example:
      >>> split_keys(np.array([2**32 + 5, -1])).high.tolist()
      [1, 4294967295]
    """
    if not isinstance(keys, jax.Array):
        keys = np.asarray(keys)
    if not jnp.issubdtype(keys.dtype, jnp.integer):
        raise TypeError(f"{feature}: keys must be integers, got {keys.dtype}; convert them, or hash strings first.")
    xp: Any = np if isinstance(keys, np.ndarray) else jnp
    is_signed = jnp.issubdtype(keys.dtype, jnp.signedinteger)
    is_key = keys != -1 if is_signed else xp.ones(keys.shape, bool)
    if keys.dtype.itemsize < 8:
        high = xp.where(keys < 0, np.uint32(ALL_BITS), np.uint32(0))
        return Keys(high, keys.astype(np.int32 if is_signed else np.uint32).astype(np.uint32), is_key)
    bits = keys.astype(np.uint64)
    return Keys((bits >> np.uint64(32)).astype(np.uint32), (bits & np.uint64(ALL_BITS)).astype(np.uint32), is_key)


def checked_keys(keys: PyTree, dtype: str, *, feature: str) -> Keys:
    """Keys from any accepted form, all of which `dtype` holds; among traced keys, others become padding.

    Raises: TypeError or ValueError: they are no integers, or outside `dtype`; or JAX may have cut them.
    """
    check_not_cut(keys, dtype, feature)
    found = keys if isinstance(keys, Keys) else split_keys(keys, feature=feature)
    if any(
        isinstance(lane, jax.core.Tracer) or not getattr(lane, "is_fully_addressable", True)
        for lane in jax.tree.leaves(found)
    ):
        lost = is_beyond(found, dtype)  # nobody sees them here: `num_invalid` counts them
        high, low = jnp.where(lost, jnp.uint32(ALL_BITS), found.high), jnp.where(lost, 0, found.low)
        return found._replace(high=high, low=low).only(~lost)
    check_fits(jax.tree.map(np.asarray, found), dtype, feature)
    return found


def check_not_cut(keys: PyTree, dtype: str, feature: str) -> None:
    """Raises: TypeError: a traced array of 32 bits for a table of 64-bit keys: JAX may have cut it where `jit` began.

    Args:
      keys: as users give them. `Keys`, and arrays outside of `jit`, have all their bits.
      dtype: `key_dtype` of the table.
      feature: named in the error.
    """
    is_wide = np.dtype(dtype).itemsize == 8
    if not is_wide or isinstance(keys, Keys) or not isinstance(keys, jax.core.Tracer):
        return
    if keys.dtype in (np.int32, np.uint32):
        narrow = dtype.replace("64", "32")
        raise TypeError(
            f"{feature}: inside jit its keys are an array of {keys.dtype}, but the table has key_dtype={dtype!r}: JAX "
            "cuts 64-bit integers to 32 bits where they enter jit, so that different keys become one. Prepare the "
            "batch before jit, with collection.prepare(batch) or rsembed.keys.split_keys(keys), or give the table "
            f"key_dtype={narrow!r} if all keys fit into it."
        )


def as_keys(ids: PyTree) -> Keys:
    """Keys from ids that are `Keys` or an array; numpy's keep their 64 bits."""
    keys: Keys = ids if isinstance(ids, Keys) else jax.tree.map(jnp.asarray, split_keys(ids))
    return keys


def is_beyond(keys: Keys, dtype: str) -> PyTree:
    """Which keys `dtype` cannot hold: any bits fit into 64, but for those of -1 if it is signed."""
    if dtype == "uint64":
        return keys.is_key & False
    sign = (keys.low >> np.uint32(31)) * np.uint32(ALL_BITS) if dtype == "int32" else np.uint32(0)
    is_minus_one = (keys.high == np.uint32(ALL_BITS)) & (keys.low == np.uint32(ALL_BITS))
    return keys.is_key & (is_minus_one if dtype == "int64" else is_minus_one | (keys.high != sign))


def check_fits(keys: Keys, dtype: str, feature: str) -> None:
    """Raises: ValueError: `dtype` cannot hold a key, on the host."""
    places = np.argwhere(is_beyond(keys, dtype))
    if places.size:
        place = tuple(places[0])
        (key,) = join_keys(keys.high[place][None], keys.low[place][None])
        key = int(key)
        shown = str(key)
        if 2**63 <= key < 2**64 - 1:  # keys have no sign of their own; -1 is padding and never comes here
            shown = f"{key} (of signed numbers: {key - 2**64})"
        raise ValueError(
            f"{feature}: key {shown} does not fit into key_dtype={dtype!r}; choose one of {', '.join(KEY_DTYPES)} that "
            "holds it."
        )


def num_invalid(keys: Keys) -> Int[Array, ""]:
    """Number of keys that `checked_keys` could only make padding; works inside `jit`."""
    ones = jnp.uint32(ALL_BITS)
    return jnp.sum(~keys.is_key & (keys.high == ones) & (keys.low != ones), dtype=jnp.int32)


def join_keys(high: PyTree, low: PyTree, *, dtype: DTypeLike = np.uint64) -> np.ndarray:
    """The keys as one number each, on the host: that whose bits they are.

    Raises: ValueError: `dtype` cannot hold a key.
    """
    joined = (np.asarray(high).astype(np.uint64) << np.uint64(32)) | np.asarray(low).astype(np.uint64)
    numbers = joined.view(np.int64) if np.issubdtype(dtype, np.signedinteger) else joined
    if (is_lost := numbers.astype(dtype) != numbers).any():
        raise ValueError(f"key {numbers[is_lost][0]} does not fit into {np.dtype(dtype)}; ask for uint64 or int64.")
    return numbers.astype(dtype)


def owners(keys: Keys, num_shards: int) -> PyTree:
    """The shard `key % num_shards` of every key, read as unsigned, int32; `num_shards` itself for padding.

    Raises: ValueError: `num_shards` is outside `[1, MAX_SHARDS]`, where the 32-bit arithmetic is exact.
    """
    check_num_shards(num_shards)
    xp: Any = np if isinstance(keys.high, np.ndarray) else jnp
    n, wrap = np.uint32(num_shards), np.uint32(2**32 % num_shards)
    # Of a power of two it is the last bits: one operation for every table of a program, where each `%` makes seven.
    remainder = ((keys.high % n) * wrap + keys.low % n) % n if wrap else keys.low & np.uint32(num_shards - 1)
    return xp.where(keys.is_key, remainder.astype(np.int32), np.int32(num_shards))


def local_rows(keys: Keys, num_shards: int, rows_per_shard: int) -> PyTree:
    """The row `key // num_shards` in a table without an index, int32.

    `NO_ROW` for padding, and for keys from `num_shards * rows_per_shard` on.

    Raises: ValueError: as for `owners`.
    """
    check_num_shards(num_shards)
    xp: Any = np if isinstance(keys.high, np.ndarray) else jnp
    n, half = np.uint32(num_shards), np.uint32(16)
    # Long division in halves of 16 bits; the quotient fits into 32 bits if the high lane is below the divisor.
    upper = (keys.high % n << half) | (keys.low >> half)
    lower = (upper % n << half) | (keys.low & np.uint32(0xFFFF))
    rows = (upper // n << half) | (lower // n)
    is_legal = keys.is_key & (keys.high < n) & (rows < np.uint32(rows_per_shard))
    return xp.where(is_legal, rows.astype(np.int32), np.int32(NO_ROW))


def check_num_shards(num_shards: int) -> None:
    """Raises: ValueError: more shards than the 32-bit arithmetic is exact for, or none."""
    if not 1 <= num_shards <= MAX_SHARDS:
        raise ValueError(f"num_shards must lie in [1, {MAX_SHARDS}], got {num_shards}.")

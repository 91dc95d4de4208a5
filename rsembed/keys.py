"""64-bit keys as two 32-bit lanes, which JAX can hold without its 64-bit mode."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, Int64, PyTree

from rsembed.checks import describe, validated
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


@validated
def hash_keys(column: Any, *, missing: int | None = None) -> Int64[np.ndarray, "..."] | list[Int64[np.ndarray, " ids"]]:
    """64-bit keys of texts or bytes, the same in every process, on every machine and in every release.

    For tables with `rs.Hashed`, which keep such keys; `rs.hash_keys(column) % vocabulary_size` are ids of a table
    without, where texts may share a row. A text has the key of its UTF-8 bytes, as they are: "é" has another key where
    it is written as "e" and an accent. Each distinct value of a column is hashed once.

    Args:
      column: texts or bytes as a list, a numpy array of any shape, or a column of pandas, polars or Arrow (of
        categories, too). A column of lists gives a list of arrays, which `prepare` takes as one bag a row.
      missing: key of all missing values (None, NaN, pandas.NA, masked), such as -1, which is no id. None refuses them.

    Returns:
      Keys in the shape of the column, int64, negative ones among them; never -1, unless it is `missing`.

    Raises:
      TypeError: a value is neither a text nor bytes (integers are keys already). The message has its row.
      ValueError: a value is missing, or a text is not Unicode; the message has its row. Or `missing` needs more than
        64 bits.

    Source: BLAKE2b with a digest of 8 bytes (RFC 7693), read as a signed little-endian number; -1 becomes -2.

    Example:
      >>> hash_keys(["apple", "pear", "apple"]).tolist()
      [-2328654269316264298, -1411252022289735552, -2328654269316264298]
    """
    if missing is not None and not -(2**63) <= missing < 2**63:
        raise ValueError(f"hash_keys: missing={missing} does not fit 64 bits with a sign; give another key.")
    values, shape = _values_of_column(column)
    known: dict[Any, int] = {}
    if any(_is_list(value) for value in values):
        rows = []
        for row, value in enumerate(values):
            entries = _entries(value) if _is_list(value) else [value]
            rows.append(_keys_of(entries, known, missing, row=row))
        return rows
    num_per_row = len(values) // shape[0] if values else 1
    return _keys_of(values, known, missing, num_per_row=num_per_row).reshape(shape)


def _values_of_column(column: Any) -> tuple[list[Any], tuple[int, ...]]:
    """All values of a column, and its shape. Raises: TypeError: it is no column of texts or bytes."""
    if isinstance(column, (str, bytes)) or not isinstance(column, Iterable):
        raise TypeError(f"hash_keys: column must be a column or list of texts, got {describe(column)}.")
    if not hasattr(column, "__array__"):
        values = list(column)
        return values, (len(values),)
    array = column if isinstance(column, np.ndarray) else np.asarray(column)
    if array.dtype.kind in "iu":
        raise TypeError("hash_keys: integers are keys already; pass them as they are.")
    return _entries(array.reshape(-1)), array.shape


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, np.ndarray))


def _entries(values: Any) -> list[Any]:
    """Values of a list or array, with None for masked ones."""
    entries: list[Any] = values.tolist() if isinstance(values, np.ndarray) else list(values)
    return entries


def _keys_of(
    values: list[Any], known: dict[Any, int], missing: int | None, *, row: int | None = None, num_per_row: int = 1
) -> Int64[np.ndarray, " ids"]:
    """Keys of flat values. Those that were hashed before are in `known`, which gets the others."""
    try:
        distinct = dict.fromkeys(values)
    except TypeError as error:
        raise TypeError(f"hash_keys: a list of lists of lists is nested too deeply ({error}); flatten it.") from error
    for value in distinct:
        if value in known:
            continue
        try:
            known[value] = _key_of(value, missing)
        except (TypeError, ValueError) as error:
            place = row
            if place is None:
                is_value = [other is value for other in values]  # pandas.NA refuses to be compared
                place = is_value.index(True) // num_per_row
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"hash_keys: row {place} has {error}") from error
    return np.fromiter(map(known.__getitem__, values), np.int64, len(values))


def _key_of(value: Any, missing: int | None) -> int:
    if isinstance(value, str):
        try:
            value = value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{value!r}, which is not Unicode; mend it, or pass bytes.") from error
    elif is_missing(value):
        if missing is None:
            raise ValueError(f"a missing value ({value}); give missing=-1, which is no id, or another key for all.")
        return missing
    elif not isinstance(value, bytes):
        way_out = "integers are keys already" if isinstance(value, int) else "convert it first"
        raise TypeError(f"{describe(value)}, neither text nor bytes; {way_out}.")
    digest = hashlib.blake2b(value, digest_size=8, usedforsecurity=False).digest()
    key = int.from_bytes(digest, "little", signed=True)
    if key == -1:  # which means no id
        key = -2
    return key


def is_missing(value: Any) -> bool:
    """Whether a value of a column is None, NaN, NaT or pandas.NA."""
    if value is None or isinstance(value, (str, bytes, int)):
        return value is None
    try:
        return bool(np.ndim(value) == 0 and value != value)
    except TypeError:  # pandas.NA, which is neither equal to itself nor not
        return True


def words_for_no_ids(ids: PyTree, offsets: PyTree = None) -> str:
    """Words for ids that are no integers: the row of a missing value, or their dtype, and the way out.

    Args:
      ids: an array; its first axis counts rows.
      offsets: where bags begin in flat ids; rows are bags then.
    """
    if isinstance(ids, np.ndarray):
        flat = _entries(ids.reshape(-1)) if ids.dtype.kind in "fOmM" else []
        place = next((place for place, value in enumerate(flat) if is_missing(value)), None)
        if place is not None:
            row = np.unravel_index(place, ids.shape)[0]
            if offsets is not None:
                row = np.searchsorted(np.asarray(offsets), place, side="right") - 1
            return f"row {row} has a missing value ({flat[place]}); {FILL}"
        if ids.dtype.kind in "OSTU":
            return f"ids must be integers, got {ids.dtype}; {HASH}"
    return f"ids must be integers, got {ids.dtype}; convert them."


FILL = "fill missing values with -1, which is no id."
HASH = "rs.hash_keys makes keys of texts."
"""Ways out of two errors."""


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
        raise TypeError(f"{feature}: {words_for_no_ids(keys)}")
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


def is_invalid(keys: Keys) -> Bool[Array, " nnz"]:
    """Which keys `checked_keys` could only make padding; works inside `jit`."""
    ones = jnp.uint32(ALL_BITS)
    return ~keys.is_key & (keys.high == ones) & (keys.low != ones)


def num_invalid(keys: Keys) -> Int[Array, ""]:
    """Number of keys that `checked_keys` could only make padding; works inside `jit`."""
    return jnp.sum(is_invalid(keys), dtype=jnp.int32)


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

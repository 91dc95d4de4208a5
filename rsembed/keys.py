"""64-bit keys as two arrays of 32-bit words ("lanes"), so that JAX needs no 64-bit mode."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int64, PyTree

from rsembed.arrays import numpy_or_jax
from rsembed.checks import describe, validated
from rsembed.specs import MAX_ROWS as NO_ROW

MAX_SHARDS = 65_536
ALL_BITS = 0xFFFFFFFF
KEY_DTYPES = ("int32", "int64", "uint32", "uint64")

Lane: TypeAlias = Any
"""NumPy array or JAX array with one 32-bit word (or flag, or table index) for each key."""
Ids: TypeAlias = PyTree
"""Ids as an integer array of NumPy or JAX, or as `Keys`."""


class Keys(NamedTuple):
    """64-bit keys in an array of any shape.

    Every 64-bit number can be a key, because the mask `is_key` marks padding.

    Attributes:
      high: upper 32 bits of each key, uint32.
      low: lower 32 bits of each key, uint32.
      is_key: mask, False for padding. The words in `high` and `low` are a key only where `is_key`
        is True. If `checked_keys` replaces a key by padding, it sets `high` and `low` to special
        values (see `is_invalid`).
      table: index of each key's table, int32. None if all keys belong to one table.
    """

    high: Lane
    low: Lane
    is_key: Lane
    table: Lane = None

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The words that identify each key, most significant first: `(table,) high, low`."""
        if self.table is None:
            return self.high, self.low
        return self.table, self.high, self.low

    @staticmethod
    def of_lanes(lanes: Sequence[Lane], is_key: Lane) -> Keys:
        """Keys from the mask `is_key` and the words `lanes`, ordered as in the property `lanes`."""
        *table, high, low = lanes
        return Keys(high, low, is_key, *table)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Shape of `high`, `low` and `is_key`.

        In a program that is exported for any batch size, `shape` contains symbolic dimensions.
        """
        return self.is_key.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def reshape(self, *shape: int) -> Keys:
        """The keys reshaped to `shape`, as by the method `reshape` of a NumPy array."""
        reshaped: Keys = jax.tree.map(lambda lane: lane.reshape(*shape), self)
        return reshaped

    def only(self, mask: Lane) -> Keys:
        """The keys, with padding where `mask` is False."""
        return self._replace(is_key=self.is_key & mask)


@validated
def hash_keys(
    column: object, *, missing: int | None = None
) -> Int64[np.ndarray, "..."] | list[Int64[np.ndarray, " ids"]]:
    """64-bit keys of strings or bytes, equal in every process, machine and release.

    The keys are ids for a table with the storage `rs.Hashed`. For a table with row numbers as ids,
    use `rs.hash_keys(column) % vocabulary_size`: several strings can then share a row. The key of a
    string depends on the UTF-8 bytes of the string: an "é" in one code point and an "e" with a
    combining accent have different keys. Each distinct value of a column is hashed once.

    Args:
      column: strings or bytes as a list, a NumPy array of any shape, or a column of pandas, polars
        or Arrow (including categories). A column of lists gives a list of arrays, which `prepare`
        reads as one bag per row.
      missing: key of all missing values (None, NaN, pandas.NA, masked), for example -1 (no id). If
        `missing` is None, the default, a missing value in the column raises an error.

    Returns:
      int64 keys, negative or not, in the shape of the column. The key of a string or bytes value is
      never -1.

    Raises:
      TypeError: a value is neither a string nor bytes. Integers need no hashing, because they are
        keys.
      ValueError: a value is missing and `missing` is None, a string is not Unicode, or `missing` is
        outside the range of int64.

    Source: the key is the 8-byte BLAKE2b digest of the value (RFC 7693), read as a signed
      little-endian number. A value with the digest -1 gets the key -2.

    Example:
      >>> hash_keys(["apple", "pear", "apple"]).tolist()
      [-2328654269316264298, -1411252022289735552, -2328654269316264298]
    """
    if missing is not None and not -(2**63) <= missing < 2**63:
        raise ValueError(
            f"hash_keys: missing={missing} does not fit 64 bits with a sign; give another key."
        )
    values, shape = _values_of_column(column)
    known: dict[Any, int] = {}
    if any(_is_list(value) for value in values):
        rows = []
        for row, value in enumerate(values):
            entries = [value]
            if _is_list(value):
                entries = _entries(value)
            rows.append(_keys_of(entries, known, missing, row=row))
        return rows
    num_per_row = 1
    if values:
        num_per_row = len(values) // shape[0]
    keys = _keys_of(values, known, missing, num_per_row=num_per_row)
    return keys.reshape(shape)


def _values_of_column(column: object) -> tuple[list[Any], tuple[int, ...]]:
    """All values of a column as a flat list, and the shape of the column.

    Raises: TypeError: `column` is not a list or array, or is an array of integers.
    """
    if isinstance(column, (str, bytes)) or not isinstance(column, Iterable):
        raise TypeError(
            f"hash_keys: column must be a column or list of texts, got {describe(column)}."
        )
    if not hasattr(column, "__array__"):
        values = list(column)
        return values, (len(values),)
    array = column if isinstance(column, np.ndarray) else np.asarray(column)
    if array.dtype.kind in "iu":
        raise TypeError("hash_keys: integers are keys already; pass them as they are.")
    return _entries(array.reshape(-1)), array.shape


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple, np.ndarray))


def _entries(values: Any) -> list[Any]:
    """Values of a list or array as a list. The masked values of a masked array become None."""
    entries: list[Any] = values.tolist() if isinstance(values, np.ndarray) else list(values)
    return entries


def _keys_of(
    values: list[Any],
    known: dict[Any, int],
    missing: int | None,
    *,
    row: int | None = None,
    num_per_row: int = 1,
) -> Int64[np.ndarray, " ids"]:
    """Keys of the values in a flat list.

    Args:
      values: strings, bytes or missing values.
      known: dictionary from each value that an earlier call has hashed to its key. The function
        adds the values that it hashes to this dictionary.
      missing: key of missing values. If `missing` is None, a missing value in `values` raises an
        error.
      row: index of a row of the column, for error messages, if `values` is this row. None, the
        default: `values` is the whole column, with `num_per_row` values in each row.
      num_per_row: number of values in each row of the column, 1 by default.
    """
    try:
        distinct = dict.fromkeys(values)
    except TypeError as error:
        raise TypeError(
            f"hash_keys: a list of lists of lists is nested too deeply ({error}); flatten it."
        ) from error
    for value in distinct:
        if value in known:
            continue
        try:
            known[value] = _key_of(value, missing)
        except (TypeError, ValueError) as error:
            if row is None:
                # Values are compared with `is`, because `pandas.NA == value` has no truth value.
                is_value = [other is value for other in values]
                row = is_value.index(True) // num_per_row
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"hash_keys: row {row} has {error}") from error
    return np.fromiter(map(known.__getitem__, values), np.int64, len(values))


def _key_of(value: object, missing: int | None) -> int:
    """64-bit key of one value of a column: a string, bytes or a missing value.

    Each error message of `_key_of` is only the end of a sentence, because `_keys_of` adds the
    beginning, such as "row 3 has".

    Raises:
      TypeError: the value is not a string, bytes or a missing value.
      ValueError: the value is a string that is not Unicode, or a missing value although `missing`
        is None.
    """
    if isinstance(value, str):
        try:
            value = value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{value!r}, which is not Unicode; mend it, or pass bytes.") from error
    elif is_missing(value):
        if missing is None:
            raise ValueError(
                f"a missing value ({value}); give missing=-1, which is no id, or another key for all."
            )
        return missing
    elif not isinstance(value, bytes):
        way_out = "integers are keys already" if isinstance(value, int) else "convert it first"
        raise TypeError(f"{describe(value)}, neither text nor bytes; {way_out}.")
    digest = hashlib.blake2b(value, digest_size=8, usedforsecurity=False).digest()
    key = int.from_bytes(digest, "little", signed=True)
    # An id of -1 means "no id", so no string or bytes value may have the key -1.
    if key == -1:
        key = -2
    return key


def is_missing(value: Any) -> bool:
    """Whether a value of a column is None, NaN, NaT or pandas.NA."""
    if value is None or isinstance(value, (str, bytes, int)):
        return value is None
    try:
        return bool(np.ndim(value) == 0 and value != value)
    except TypeError:
        # `value` is pandas.NA, and comparisons with pandas.NA have no truth value.
        return True


def words_for_no_ids(ids: Ids, offsets: Lane = None) -> str:
    """Error message for ids that are not integers, with advice on how to fix them.

    If a value is missing, the message names the row of the first missing value.

    Args:
      ids: array with one row of ids per sample, or flat array of the ids of all bags.
      offsets: index of the first id of each bag, if `ids` is a flat array. With `offsets`, the row
        number in the message is the index of a bag.
    """
    if not isinstance(ids, np.ndarray):
        return f"ids must be integers, got {ids.dtype}; convert them."
    values = []
    if ids.dtype.kind in "fOmM":
        values = _entries(ids.reshape(-1))
    for position, value in enumerate(values):
        if not is_missing(value):
            continue
        row = np.unravel_index(position, ids.shape)[0]
        if offsets is not None:
            row = np.searchsorted(np.asarray(offsets), position, side="right") - 1
        return f"row {row} has a missing value ({value}); {FILL}"
    way_out = HASH if ids.dtype.kind in "OSTU" else "convert them."
    return f"ids must be integers, got {ids.dtype}; {way_out}"


FILL = "fill missing values with -1, which is no id."
HASH = "rs.hash_keys makes keys of texts."
"""Advice at the end of error messages about ids that are strings."""


def split_keys(keys: object, *, feature: str = "keys") -> Keys:
    """Keys from an integer array. NumPy arrays stay on the host, JAX arrays stay on their device.

    Args:
      keys: array of any integer dtype. In a signed dtype, -1 is padding, and another negative
        number `x` becomes the key `2**64 + x`. Pass 64-bit keys as NumPy arrays, because JAX
        without its 64-bit mode silently truncates integers to 32 bits.
      feature: name of the keys in error messages.

    Raises: TypeError: the keys are not integers.

    Example:
      >>> split_keys(np.array([2**32 + 5, -1])).high.tolist()
      [1, 4294967295]
    """
    if not isinstance(keys, jax.Array):
        keys = np.asarray(keys)
    if not jnp.issubdtype(keys.dtype, jnp.integer):
        raise TypeError(f"{feature}: {words_for_no_ids(keys)}")
    xp = numpy_or_jax(keys)
    if jnp.issubdtype(keys.dtype, jnp.signedinteger):
        is_key = keys != -1
        wide_dtype: Any = np.int32
    else:
        is_key = xp.ones(keys.shape, bool)
        wide_dtype = np.uint32
    if keys.dtype.itemsize < 8:
        high = xp.where(keys < 0, np.uint32(ALL_BITS), np.uint32(0))
        wide = keys.astype(wide_dtype)
        low = wide.astype(np.uint32)
        return Keys(high, low, is_key)
    bits = keys.astype(np.uint64)
    high = (bits >> np.uint64(32)).astype(np.uint32)
    low = (bits & np.uint64(ALL_BITS)).astype(np.uint32)
    return Keys(high, low, is_key)


def checked_keys(keys: Ids, dtype: str, *, feature: str) -> Keys:
    """Converts an integer array to `Keys`, and checks that all keys fit in `dtype`.

    If this process cannot read the keys, because they are traced or partly on other hosts, keys
    that do not fit in `dtype` become padding. `is_invalid` marks the keys that became padding.

    Args:
      keys: `Keys` or an integer array.
      dtype: `key_dtype` of the table.
      feature: name of the keys in error messages.

    Raises: TypeError or ValueError: keys are not integers, do not fit in `dtype`, or may have been
      truncated by JAX.
    """
    check_not_cut(keys, dtype, feature)
    if not isinstance(keys, Keys):
        keys = split_keys(keys, feature=feature)
    if any(map(_is_hidden, jax.tree.leaves(keys))):
        is_lost = is_beyond(keys, dtype)
        # A key that does not fit gets the words `(ALL_BITS, 0)`, which `is_invalid` recognises.
        high = jnp.where(is_lost, jnp.uint32(ALL_BITS), keys.high)
        low = jnp.where(is_lost, 0, keys.low)
        marked = keys._replace(high=high, low=low)
        return marked.only(~is_lost)
    host_keys = jax.tree.map(np.asarray, keys)
    check_fits(host_keys, dtype, feature)
    return keys


def _is_hidden(lane: Lane) -> bool:
    """Whether an array cannot be read here: the array is traced, or is partly on other hosts."""
    return isinstance(lane, jax.core.Tracer) or not getattr(lane, "is_fully_addressable", True)


def check_not_cut(keys: Ids, dtype: str, feature: str) -> None:
    """Checks that JAX has not truncated 64-bit keys to 32 bits.

    JAX without its 64-bit mode truncates a 64-bit NumPy array that is an argument of a jitted
    function, so `check_not_cut` rejects traced 32-bit arrays. `Keys` are never truncated, because
    their words have 32 bits.

    Args:
      keys: the keys that a user passed.
      dtype: `key_dtype` of the table.
      feature: name of the keys in the error message.

    Raises: TypeError: `keys` is a traced 32-bit array, but the table has 64-bit keys.
    """
    is_wide = np.dtype(dtype).itemsize == 8
    if not is_wide or isinstance(keys, Keys) or not isinstance(keys, jax.core.Tracer):
        return
    if keys.dtype in (np.int32, np.uint32):
        narrow = dtype.replace("64", "32")
        raise TypeError(
            f"{feature}: inside jit its keys are an array of {keys.dtype}, but the table has "
            f"key_dtype={dtype!r}: JAX cuts 64-bit integers to 32 bits where they enter jit, so "
            "that different keys become one. Prepare the batch before jit, with "
            "collection.prepare(batch) or rsembed.keys.split_keys(keys), or give the table "
            f"key_dtype={narrow!r} if all keys fit into it."
        )


def as_keys(ids: Ids) -> Keys:
    """Converts `ids` to `Keys` with JAX arrays, and keeps all bits of 64-bit NumPy arrays."""
    if isinstance(ids, Keys):
        return ids
    keys: Keys = jax.tree.map(jnp.asarray, split_keys(ids))
    return keys


def is_beyond(keys: Keys, dtype: str) -> Lane:
    """Mask of the keys that do not fit in `dtype`.

    Every key fits in "uint64". Every key except `2**64 - 1` fits in "int64": as a signed number,
    `2**64 - 1` is -1, which means padding.
    """
    if dtype == "uint64":
        return keys.is_key & False
    ones = np.uint32(ALL_BITS)
    is_minus_one = (keys.high == ones) & (keys.low == ones)
    if dtype == "int64":
        return keys.is_key & is_minus_one
    wanted_high: Lane = np.uint32(0)
    if dtype == "int32":
        sign_bit = keys.low >> np.uint32(31)
        wanted_high = sign_bit * ones
    is_too_large = keys.high != wanted_high
    return keys.is_key & (is_minus_one | is_too_large)


def check_fits(keys: Keys, dtype: str, feature: str) -> None:
    """Checks that all keys fit in `dtype`. The keys must be NumPy arrays.

    Raises: ValueError: a key does not fit in `dtype`.
    """
    misfits = np.argwhere(is_beyond(keys, dtype))
    if misfits.size:
        index = tuple(misfits[0])
        (key,) = join_keys(keys.high[index][None], keys.low[index][None])
        key = int(key)
        shown = str(key)
        # A key of `2**63` or more may come from a negative number in the user's data, so the error
        # message shows both numbers. The key `2**64 - 1` cannot come from a negative number,
        # because -1 means padding.
        if 2**63 <= key < 2**64 - 1:
            shown = f"{key} (of signed numbers: {key - 2**64})"
        raise ValueError(
            f"{feature}: key {shown} does not fit into key_dtype={dtype!r}; choose one of "
            f"{', '.join(KEY_DTYPES)} that holds it."
        )


def is_invalid(keys: Keys) -> Bool[Array, " nnz"]:
    """Mask of keys that `checked_keys` replaced by padding, because they do not fit in the dtype.

    `is_invalid` works outside and inside `jit`.
    """
    ones = jnp.uint32(ALL_BITS)
    return ~keys.is_key & (keys.high == ones) & (keys.low != ones)


def join_keys(high: Lane, low: Lane, *, dtype: DTypeLike = np.uint64) -> np.ndarray:
    """Keys as a NumPy array of integers, from their high and low words.

    Args:
      high: upper 32 bits of each key.
      low: lower 32 bits of each key.
      dtype: integer dtype of the result, uint64 by default. In a signed dtype, a key `x` of `2**63`
        or more becomes the negative number `x - 2**64`.

    Raises: ValueError: a key does not fit in `dtype`.
    """
    upper = np.asarray(high).astype(np.uint64) << np.uint64(32)
    lower = np.asarray(low).astype(np.uint64)
    numbers = upper | lower
    if np.issubdtype(dtype, np.signedinteger):
        numbers = numbers.view(np.int64)
    joined = numbers.astype(dtype)
    is_lost = joined != numbers
    if is_lost.any():
        raise ValueError(
            f"key {numbers[is_lost][0]} does not fit into {np.dtype(dtype)}; ask for uint64 or int64."
        )
    return joined


def owners(keys: Keys, num_shards: int) -> Lane:
    """Index of the shard that owns each key, `key % num_shards` in int32.

    The result is `num_shards` for padding.

    Raises: ValueError: `num_shards` is outside `[1, MAX_SHARDS]`, the range of exact 32-bit
      arithmetic.
    """
    check_num_shards(num_shards)
    xp = numpy_or_jax(keys.high)
    shards = _remainder(keys, num_shards).astype(np.int32)
    return xp.where(keys.is_key, shards, np.int32(num_shards))


def _remainder(keys: Keys, num_shards: int) -> Lane:
    """Remainder `key % num_shards` for every key, in uint32."""
    n = np.uint32(num_shards)
    wrap = np.uint32(2**32 % num_shards)
    if not wrap:
        # `num_shards` is a power of two, so the remainder is the low bits of the key. The bitwise
        # `&` is a single operation, while JAX computes each `%` with seven operations.
        return keys.low & np.uint32(num_shards - 1)
    return ((keys.high % n) * wrap + keys.low % n) % n


def local_rows(keys: Keys, num_shards: int, rows_per_shard: int) -> Lane:
    """Row number `key // num_shards` of each key within its shard, in int32.

    Use `local_rows` for tables with row numbers as keys. The result is `NO_ROW` for padding, and
    for keys of `num_shards * rows_per_shard` or more.

    Raises: ValueError: `num_shards` is outside `[1, MAX_SHARDS]`.
    """
    check_num_shards(num_shards)
    xp = numpy_or_jax(keys.high)
    n = np.uint32(num_shards)
    half = np.uint32(16)
    # Each 64-bit key is divided by `n` in a long division with digits of 16 bits. The quotient
    # `key // n` fits in 32 bits if the high word of the key is below `n`.
    first_remainder = keys.high % n
    upper = (first_remainder << half) | (keys.low >> half)
    second_remainder = upper % n
    lower = (second_remainder << half) | (keys.low & np.uint32(0xFFFF))
    upper_digit = upper // n
    rows = (upper_digit << half) | (lower // n)
    fits_32_bits = keys.is_key & (keys.high < n)
    is_legal = fits_32_bits & (rows < np.uint32(rows_per_shard))
    return xp.where(is_legal, rows.astype(np.int32), np.int32(NO_ROW))


def check_num_shards(num_shards: int) -> None:
    """Checks that `num_shards` is in the range in which the 32-bit arithmetic is exact.

    Raises: ValueError: `num_shards` is outside `[1, MAX_SHARDS]`.
    """
    if not 1 <= num_shards <= MAX_SHARDS:
        raise ValueError(f"num_shards must lie in [1, {MAX_SHARDS}], got {num_shards}.")

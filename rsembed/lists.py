"""Converts Python lists of ids and weights to flat NumPy arrays, without changing any id."""

from __future__ import annotations

import itertools
import marshal
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Int32, Shaped

from rsembed.arrays import check_unmasked
from rsembed.keys import FILL, HASH, is_missing

# `Shaped` accepts any dtype. NumPy gives large Python integers the dtype `ulonglong`, which
# jaxtyping does not know as an integer dtype.
FlatIds = Shaped[np.ndarray, " nnz"]
Offsets = Int32[np.ndarray, " bags_plus_1"]


def offsets_of(
    lengths: Int[np.ndarray, " bags"], dtype: DTypeLike = np.int64
) -> Int[np.ndarray, " bags_plus_1"]:
    """Offsets of bags from their lengths. The last offset is the number of ids."""
    offsets = np.zeros(len(lengths) + 1, dtype)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ids_of_plain_rows(rows: Sequence[Any]) -> tuple[FlatIds, Offsets] | None:
    """Ids and offsets of a list of rows, or None if the rows need slower code.

    Either every row must be a list of `int` that fit in int64, or every row must be a flat array of
    signed integers. One call of NumPy or `marshal` converts all rows, which is 20 times as fast as
    one call of NumPy for each row.
    """
    small = small_ids_of_lists(rows)
    if small is not None:
        ids, offsets = small
        return ids.astype(np.int64), offsets
    kinds = set(map(type, rows))
    if kinds == {np.ndarray}:
        # Empty rows are left out, because `np.asarray([])` has the dtype float64.
        filled = [row for row in rows if row.size]
        numbers_of_axes = {row.ndim for row in rows}
        dtype_kinds = {row.dtype.kind for row in filled}
        if numbers_of_axes != {1} or dtype_kinds != {"i"}:
            return None
        ids = np.concatenate(filled)
    elif kinds == {list}:
        values = list(itertools.chain.from_iterable(rows))
        if not set(map(type, values)) <= {int}:
            return None
        try:
            ids = np.asarray(values, np.int64)
        except OverflowError:
            # An id is too large for int64.
            return None
    else:
        return None
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return ids, offsets_of(lengths).astype(np.int32)


_MARSHALLED = np.dtype([("kind", "u1"), ("value", "<i4")])


def small_ids_of_lists(rows: Sequence[object]) -> tuple[Int32[np.ndarray, " nnz"], Offsets] | None:
    """Int32 ids and offsets of a list of lists of 32-bit integers, or None for any other `rows`.

    `marshal` reads every object once, in C, while NumPy needs three passes to find types, values
    and lengths. In version 2 of the marshal format, five bytes start a list (the letter "[" and the
    length of the list), and five bytes encode a 32-bit integer (the letter "i" and the value).
    Marshal encodes objects of other types with other letters, such as "T" or "F" for bools.
    Marshalled bytes encode a list of lists of integers if each group of five bytes starts with "["
    or "i", and if each row has as many "i" groups after its "[" as the length of the row. If a
    later version of Python changes the marshal format, `small_ids_of_lists` returns None, and the
    caller converts the lists by slower code.
    """
    first_row = next(iter(rows), None)
    if type(rows) is not list or type(first_row) is not list:
        return None
    if first_row and (type(first_row[0]) is not int or first_row[0] >= 2**31):
        # If the first id does not fit in 32 bits, the ids are probably 64-bit keys, which this
        # function does not convert.
        return None
    try:
        written = marshal.dumps(rows, 2)
    except ValueError:
        # `rows` contains an object that marshal cannot write.
        return None
    if len(written) % _MARSHALLED.itemsize:
        return None
    items = np.frombuffer(written, _MARSHALLED)
    is_id = items["kind"] == ord("i")
    heads = np.flatnonzero(~is_id)
    if heads.size != len(rows) + 1 or (items["kind"][heads] != ord("[")).any():
        return None
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(items["value"][heads[1:]], out=offsets[1:])
    # `heads` contains the indices of the items that start a list. Item 0 is the start of `rows`.
    # The start of row `k` comes after the ids of the `k` earlier rows, and after `k + 1` starts,
    # one of `rows` and `k` of the earlier rows.
    num_earlier_heads = np.arange(1, len(rows) + 1)
    expected_heads = offsets[:-1] + num_earlier_heads
    if not np.array_equal(heads[1:], expected_heads):
        return None
    return items["value"][is_id], offsets


def ids_of_row(row: Any, position: int) -> FlatIds:
    """Ids of one row, which may be a list, a tuple or an array.

    Args:
      row: the row, which may be empty.
      position: index of the row, for error messages.

    Raises: TypeError: the row is not a flat sequence of integers.
    """
    if isinstance(row, str) or not hasattr(row, "__len__"):
        raise TypeError(
            f"row {position} must be a flat list of ids, got {row!r}; give one list of ids for each bag."
        )
    check_unmasked(row, f"the ids of row {position}")
    if isinstance(row, np.ndarray) and row.dtype == object:
        # From a list, NumPy makes an integer array if all values are integers.
        row = row.tolist()
    # `np.asarray([])` has the dtype float64, so an empty row is not converted by NumPy.
    array: np.ndarray = np.zeros(0, np.int64)
    if len(row):
        try:
            array = np.asarray(row)
        except ValueError:
            # NumPy cannot convert a row of lists with different lengths. `ids_of_row` rejects
            # arrays with two axes, so a row of lists becomes an empty array with two axes.
            array = np.zeros((0, 0))
    # NumPy converts integers to floats if some fit in int64 and others only in uint64, and to
    # objects if an integer does not fit in 64 bits.
    if array.dtype.kind in "fO" and array.ndim == 1 and are_integers(row):
        array = ids_of_integers(row, f"row {position} holds ids that do not fit 64 bits, such as")
    if array.ndim == 1 and np.issubdtype(array.dtype, np.integer):
        return array
    for value in row:
        if is_missing(value):
            raise TypeError(f"row {position} has a missing value ({value}); {FILL}")
        if isinstance(value, (str, bytes)):
            raise TypeError(
                f"row {position} holds texts ({value!r}), but ids must be integers; {HASH}"
            )
    if array.ndim != 1 or array.dtype == object:
        raise TypeError(
            f"row {position} must be a flat list of ids, got {row!r}; the input is nested too deeply."
        )
    raise TypeError(
        f"row {position} holds {array.dtype} values, but ids must be integers; convert them."
    )


def are_integers(values: Any) -> bool:
    """True if every entry of a list or array of Python objects is an integer, and not a bool."""
    return all(
        isinstance(value, (int, np.integer)) and not isinstance(value, bool) for value in values
    )


def ids_of_integers(values: Any, complaint: str) -> FlatIds:
    """Python integers as an int64 array, or as a uint64 array if an integer is `2**63` or more.

    Args:
      values: at least one integer.
      complaint: beginning of the error message.

    Raises: TypeError: an integer does not fit in 64 bits, or a negative integer occurs together
      with an integer that needs uint64.
    """
    numbers = [int(value) for value in values]
    least = min(numbers)
    largest = max(numbers)
    if not -(2**63) <= least <= largest < 2**64:
        raise TypeError(f"{complaint} {max(least, largest, key=abs)}; hash them.")
    # `join_ids` raises an error if there is a negative number and a number that needs uint64.
    ends = join_ids([np.asarray([least]), np.asarray([largest])])
    return np.asarray(numbers, ends.dtype)


def join_ids(arrays: Sequence[np.ndarray]) -> FlatIds:
    """Joins several arrays of ids into one integer array.

    `np.concatenate` would convert a mix of int64 and uint64 to floats.

    Raises: TypeError: a negative id occurs together with uint64 ids.
    """
    if not arrays:
        return np.zeros(0, np.int64)
    filled = [array for array in arrays if array.size]
    dtypes = {array.dtype for array in filled}
    has_unsigned = np.dtype(np.uint64) in dtypes
    if not has_unsigned or len(dtypes) == 1:
        return np.concatenate(filled or arrays)
    least = min(int(array.min()) for array in filled)
    if least < 0:
        largest = max(int(array.max()) for array in filled)
        raise TypeError(f"no integers of 64 bits hold both {least} and {largest}; hash the ids.")
    unsigned = [array.astype(np.uint64) for array in filled]
    return np.concatenate(unsigned)


def floats_of(weights: object, where: str) -> Float[np.ndarray, "..."]:
    """Weights as a float32 array.

    Args:
      weights: array or list of numbers.
      where: beginning of the error message.

    Raises: TypeError: the weights are not numbers, or are a masked array.
    """
    check_unmasked(weights, f"{where}: weights")
    array = np.asarray(weights)
    # The NumPy dtype bfloat16 has the kind "V", but JAX knows that bfloat16 is a float.
    is_float = jnp.issubdtype(array.dtype, np.floating)
    if not is_float and array.dtype.kind not in "fiu":
        raise TypeError(f"{where}: weights must be numbers, got {array.dtype}.")
    return array.astype(np.float32)

"""Ids and weights from Python lists, as flat arrays of NumPy. No id changes its value on the way."""

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

# Arrays of integers. jaxtyping does not know numpy's `ulonglong`, the dtype of large Python
# integers.
FlatIds = Shaped[np.ndarray, " nnz"]
Offsets = Int32[np.ndarray, " bags_plus_1"]


def offsets_of(
    lengths: Int[np.ndarray, " bags"], dtype: DTypeLike = np.int64
) -> Int[np.ndarray, " bags_plus_1"]:
    """Offsets of bags of these lengths: the first is 0, the last the number of ids."""
    offsets = np.zeros(len(lengths) + 1, dtype)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ids_of_plain_rows(rows: Sequence[Any]) -> tuple[FlatIds, Offsets] | None:
    """Ids and offsets of rows that are all lists of `int` or all arrays; None for other rows.

    All rows are read in one call. This is 20 times as fast as row by row.
    """
    small = small_ids_of_lists(rows)
    if small is not None:
        ids, offsets = small
        return ids.astype(np.int64), offsets
    kinds = set(map(type, rows))
    if kinds == {np.ndarray}:
        filled = [row for row in rows if row.size]  # Arrays made from [] are float64.
        if {row.ndim for row in rows} != {1} or {row.dtype.kind for row in filled} != {"i"}:
            return None
        ids = np.concatenate(filled)
    elif kinds == {list}:
        values = list(itertools.chain.from_iterable(rows))
        if not set(map(type, values)) <= {int}:
            return None
        try:
            ids = np.asarray(values, np.int64)
        except OverflowError:  # Some ids do not fit int64.
            return None
    else:
        return None
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return ids, offsets_of(lengths).astype(np.int32)


_MARSHALLED = np.dtype([("kind", "u1"), ("value", "<i4")])


def small_ids_of_lists(rows: Sequence[object]) -> tuple[Int32[np.ndarray, " nnz"], Offsets] | None:
    """Ids and offsets, int32, of a list of lists of `int` that fit 32 bits; else None.

    `marshal` reads every object once, in C. Numpy takes three passes to find types, values and
    lengths. In version 2 of the marshal format, a list is the letter "[" and its length, and an
    integer of 32 bits is "i" and its value: five bytes each. No other type has one of these letters
    (bool has "T" and "F"). The result is therefore correct if only these two letters occur, and if
    a list begins exactly at the byte at which a row must begin. If a later Python changes the
    format, the function returns None, and the caller converts the lists by slower code.
    """
    first_row = next(iter(rows), None)
    if type(rows) is not list or type(first_row) is not list:
        return None
    if first_row and (type(first_row[0]) is not int or first_row[0] >= 2**31):
        return None  # Large ids, probably 64-bit keys, are left to the caller.
    try:
        written = marshal.dumps(rows, 2)
    except ValueError:  # `rows` contains an object that marshal cannot write.
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
    # `heads[0]` is the list of all rows. Each row begins after the ids of the rows before it.
    expected_heads = offsets[:-1] + np.arange(1, len(rows) + 1)
    if not np.array_equal(heads[1:], expected_heads):
        return None
    return items["value"][is_id], offsets


def ids_of_row(row: Any, position: int) -> FlatIds:
    """Ids of one row, which may be a list, a tuple or an array.

    Args:
      row: the row, possibly empty.
      position: index of the row, for errors.

    Raises: TypeError: the row is not a flat sequence of integers.
    """
    if isinstance(row, str) or not hasattr(row, "__len__"):
        raise TypeError(
            f"row {position} must be a flat list of ids, got {row!r}; give one list of ids for each bag."
        )
    check_unmasked(row, f"the ids of row {position}")
    if isinstance(row, np.ndarray) and row.dtype == object:
        # Numpy converts the list to an integer array if all values are integers.
        row = row.tolist()
    try:
        # Numpy reads an empty list as float64.
        array = np.asarray(row) if len(row) else np.zeros(0, np.int64)
    except ValueError:  # `row` has nested lists of different lengths.
        array = np.zeros((0, 0))
    # Numpy makes floats of integers if some fit int64 and others only uint64.
    if array.dtype.kind == "f" and all(isinstance(value, int) for value in row):
        array = join_ids([np.asarray([value]) for value in row])
    if array.dtype == object and array.ndim == 1 and are_integers(array):
        array = ids_of_integers(array, f"row {position} holds ids that do not fit 64 bits, such as")
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
    """Whether every entry of a list or array of Python objects is an integer.

    Bools are not integers here.
    """
    return all(
        isinstance(value, (int, np.integer)) and not isinstance(value, bool) for value in values
    )


def ids_of_integers(values: Any, complaint: str) -> FlatIds:
    """Python integers in one array of 64 bits.

    Args:
      values: at least one integer.
      complaint: beginning of the error message.

    Raises: TypeError: an integer is too large for 64 bits, or neither int64 nor uint64 can hold all
      integers.
    """
    numbers = [int(value) for value in values]
    largest = max(numbers, key=abs)
    if not -(2**63) <= min(numbers) <= max(numbers) < 2**64:
        raise TypeError(f"{complaint} {largest}; hash them.")
    signed = np.asarray([number for number in numbers if number < 2**63], np.int64)
    if signed.size == len(numbers):
        return signed
    # `join_ids` raises if a negative number occurs together with a number that needs uint64.
    join_ids([signed, np.asarray([largest], np.uint64)])
    return np.asarray(numbers, np.uint64)


def join_ids(arrays: Sequence[np.ndarray]) -> FlatIds:
    """All ids in one array. Numpy alone would convert a mix of int64 and uint64 to floats.

    Raises: TypeError: a negative id occurs together with uint64 ids.
    """
    if not arrays:
        return np.zeros(0, np.int64)
    filled = [array for array in arrays if array.size]
    dtypes = {array.dtype for array in filled}
    if np.dtype(np.uint64) not in dtypes or len(dtypes) == 1:
        return np.concatenate(filled or arrays)
    least = min(int(array.min()) for array in filled)
    if least < 0:
        largest = max(int(array.max()) for array in filled)
        raise TypeError(f"no integers of 64 bits hold both {least} and {largest}; hash the ids.")
    return np.concatenate([array.astype(np.uint64) for array in filled])


def floats_of(weights: object, where: str) -> Float[np.ndarray, "..."]:
    """Weights as float32. `where` begins the error message.

    Raises: TypeError: weights are not numbers, or masked.
    """
    check_unmasked(weights, f"{where}: weights")
    array = np.asarray(weights)
    if not (array.dtype.kind in "fiu" or jnp.issubdtype(array.dtype, np.floating)):
        raise TypeError(f"{where}: weights must be numbers, got {array.dtype}.")
    return array.astype(np.float32)

"""Rows in host memory, and their exchange with a device cache.

A cache decides which rows are on the device. For each batch, the cache lists the evicted and the
inserted rows in a `Moves` tuple. Rows are exchanged between the host and the cache in three steps:

1. A program on the device gathers the evicted rows from the cache.
2. `BackingStore.exchange` writes the evicted rows to the host, and reads the inserted rows.
3. A program on the device writes the inserted rows to the cache.

There are two caches, in `host_cached.py` and in `set_associative.py`.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int
from numpy.typing import ArrayLike

from rsembed.kernels.contract import NO_ROW
from rsembed.sizes import padded_size

Rows = Int[np.ndarray, "..."]
FIRST_VALUES_BLOCK = 4096


class Lock:
    """Reentrant lock for an object that may be copied or pickled.

    If an object with a `Lock` is copied, the copy gets a new, unlocked lock.

    Example:
      >>> lock = Lock()
      >>> with lock, lock:
      ...     print("mine")
      mine
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[object, ...]:
        return Lock, ()


class Generation:
    """Version counter shared by a host store and the state on the device.

    The counter starts at a random number. Every new state gets the current value of the counter.
    `check` rejects a state if its value is not the current value of the counter. A rejected state
    is older than the host store, or belongs to a different store, so its cache does not hold the
    rows that the host expects.

    Example:
      >>> generation = Generation("the state is of another time; start again.")
      >>> state = generation.number
      >>> generation.advance(state)
      >>> generation.check(state)
      Traceback (most recent call last):
        ...
      RuntimeError: the state is of another time; start again. (It has another generation than the host.)
    """

    def __init__(self, refusal: str):
        """Creates a version counter that starts at a random number.

        Args:
          refusal: text with which the error message of `check` begins. `refusal` should tell the
            user how to fix the error.
        """
        self.number = secrets.randbits(31)
        self.lock = Lock()
        self._refusal = refusal

    def check(self, numbers: ArrayLike | None) -> None:
        """Checks that every number in `numbers` equals the current value of the counter.

        Raises: RuntimeError: a number in `numbers` differs from the counter.
        """
        if (np.asarray(numbers) != self.number).any():
            raise RuntimeError(f"{self._refusal} (It has another generation than the host.)")

    def advance(self, numbers: ArrayLike | None) -> None:
        """Adds 1 to the counter. Call `advance` before you change the store and the state.

        Args:
          numbers: counter value that the state contains, or an array with one value for each shard.

        Raises: RuntimeError: a number in `numbers` differs from the counter.
        """
        numbers = np.asarray(numbers)
        with self.lock:  # If two threads pass the same state, `check` fails in the second thread.
            self.check(numbers)
            self.number = (self.number + 1) % 2**32


class Moves(NamedTuple):
    """Rows that a cache exchanges with the host, as arrays padded with `NO_ROW`.

    Attributes:
      evicted: ids of the rows that are removed from the cache and copied to the host.
      evicted_places: index of each evicted row in the device array.
      inserted: ids of the rows that are copied from the host to the cache.
      inserted_places: index of each inserted row in the device array. An inserted row may replace
        an evicted row.
    """

    evicted: Int[Array | np.ndarray, " evicted"]
    evicted_places: Int[Array | np.ndarray, " evicted"]
    inserted: Int[Array | np.ndarray, " inserted"]
    inserted_places: Int[Array | np.ndarray, " inserted"]


def padded_rows(numbers: Rows, size: int | None = None) -> Int[np.ndarray, " size"]:
    """Row numbers as int32, padded with `NO_ROW` to `size` entries.

    Args:
      numbers: row numbers.
      size: length of the padded array. None, the default: the length of `numbers`, rounded up to
        a power of two.
    """
    if size is None:
        size = padded_size(numbers.size)
    padded = np.full(size, NO_ROW, np.int32)
    padded[: numbers.size] = numbers
    return padded


class BackingStore:
    """Table and slots in host memory.

    The host copy of a row may be stale while the row is in a device cache.

    Attributes:
      arrays: array of the table, and one array for each slot. `write` updates rows in place.
    """

    def __init__(
        self,
        arrays: Sequence[np.ndarray],
        first_values: Callable[[Rows], Sequence[ArrayLike]] | None = None,
        device_dtype: DTypeLike | None = None,
    ):
        """Creates a store with initial values in all rows.

        Args:
          arrays: array of the table, and one array for each slot, with equal numbers of rows. The
            operating system allocates memory of an `np.zeros` array only for rows that are written.
          first_values: function `(row numbers) -> values` that computes initial values, as one
            array of values for each array in `arrays`. `read` calls `first_values` for rows that
            `write` has never written, so possibly several times for the same row. `read` pads the
            row numbers to a power of two, so a jitted `first_values` is compiled only a few times.
            None, the default: `arrays` already contain the initial values.
          device_dtype: dtype of the table on the device, by default the dtype of the first array.
            If `device_dtype` has fewer bits than the dtype of the first array, `write` keeps each
            stored number that equals the device's number after a cast to `device_dtype`.
        """
        self.arrays = tuple(arrays)
        self._first_values = first_values
        self._device_dtypes = [array.dtype for array in arrays]
        if device_dtype is not None:
            self._device_dtypes[0] = np.dtype(device_dtype)
        self._rounds = self._device_dtypes[0] not in (np.float32, arrays[0].dtype)
        self._is_written = np.zeros(0, bool)
        if first_values is not None:
            self._is_written = np.zeros(arrays[0].shape[0], bool)

    def read(self, rows: Rows) -> list[np.ndarray]:
        """Copies of the rows `rows`, as a list of arrays: the table first, then each slot."""
        arrays = [array[rows] for array in self.arrays]
        if self._first_values is None:
            return arrays
        is_new = ~self._is_written[rows]
        new_entries = np.flatnonzero(is_new)
        for start in range(0, new_entries.size, FIRST_VALUES_BLOCK):
            block = new_entries[start : start + FIRST_VALUES_BLOCK]
            padded = np.zeros(padded_size(block.size), np.int32)
            padded[: block.size] = rows[block]
            first_values = self._first_values(padded)
            for array, values in zip(arrays, first_values, strict=True):
                array[block] = np.asarray(values)[: block.size]
        return arrays

    def write(self, rows: Rows, arrays: Sequence[ArrayLike]) -> None:
        """Writes distinct rows of the table and its slots.

        Args:
          rows: ids of the rows.
          arrays: new rows of the table and of each slot. If an array is longer than `rows`, the
            last rows of the array are padding.
        """
        new_rows = []
        for array in arrays:
            new_rows.append(np.asarray(array)[: rows.size])
        if self._rounds:
            stored = self.arrays[0][rows]
            with np.errstate(over="ignore"):
                on_device = stored.astype(self._device_dtypes[0])
            is_unchanged = on_device.astype(stored.dtype) == new_rows[0]
            new_rows[0] = np.where(is_unchanged, stored, new_rows[0])
        for array, new in zip(self.arrays, new_rows, strict=True):
            array[rows] = new
        if self._first_values is not None:
            self._is_written[rows] = True

    def exchange(
        self,
        evicted: ArrayLike,
        values: Sequence[ArrayLike],
        inserted: ArrayLike,
    ) -> list[np.ndarray]:
        """Writes the evicted rows to the store, then reads the inserted rows.

        Evicted rows are written before inserted rows are read, because an inserted row may be one
        of the evicted rows.

        Returns: the inserted rows of the table and of each slot, in the dtypes of the arrays on the
          device.

        Args:
          evicted: ids of the evicted rows, padded with `NO_ROW`.
          values: evicted rows of the table and of each slot.
          inserted: ids of the inserted rows, padded with `NO_ROW`. The result has a row of zeros
            for each `NO_ROW`.
        """
        evicted = np.asarray(evicted)
        evicted_entries = np.flatnonzero(evicted != NO_ROW)
        evicted_rows = []
        for array in values:
            evicted_rows.append(np.asarray(array)[evicted_entries])
        self.write(evicted[evicted_entries], evicted_rows)
        inserted = np.asarray(inserted)
        inserted_entries = np.flatnonzero(inserted != NO_ROW)
        arrays = []
        inserted_rows = self.read(inserted[inserted_entries])
        for rows, dtype in zip(inserted_rows, self._device_dtypes, strict=True):
            padded = np.zeros((inserted.size, *rows.shape[1:]), dtype)
            padded[inserted_entries] = rows
            arrays.append(padded)
        return arrays

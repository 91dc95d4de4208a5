"""Rows on the host, and their exchange with a cache on the device.

A cache decides which rows are on the device. The decision of a cache for a batch is a `Moves`
tuple. Then rows are exchanged in three steps: the device gathers the evicted rows,
`BackingStore.exchange` writes them to the host and reads the inserted rows, and the device scatters
these.

`host_cached.py` and `set_associative.py` have caches of this kind.
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
    """Reentrant lock for an object that may be copied or pickled. A copy has a new lock.

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

    The counter starts at a random number, and the state contains a copy. A state that is older than
    the store, or that belongs to a different store, is rejected, because its cache has other rows
    than the host assumes.

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
        """A version counter that starts at a random number.

        Args:
          refusal: error message for a state of a different generation, with the way out.
        """
        self.number = secrets.randbits(31)
        self.lock = Lock()
        self._refusal = refusal

    def check(self, numbers: ArrayLike | None) -> None:
        """Raises: RuntimeError: one of `numbers` is not the current generation."""
        if (np.asarray(numbers) != self.number).any():
            raise RuntimeError(f"{self._refusal} (It has another generation than the host.)")

    def advance(self, numbers: ArrayLike | None) -> None:
        """Starts a change of the store and the state.

        Raises: RuntimeError: see `check`.
        """
        numbers = np.asarray(numbers)
        with self.lock:  # If two threads use one state, the second one is rejected.
            self.check(numbers)
            self.number = (self.number + 1) % 2**32


class Moves(NamedTuple):
    """Rows that a cache exchanges with the host. `NO_ROW` is padding in all arrays.

    Attributes:
      evicted: ids of the rows that leave the device.
      evicted_places: rows of the device array that contain the evicted rows.
      inserted: ids of the rows that come to the device.
      inserted_places: rows of the device array that get the inserted rows. Inserted ids may get the
        device rows of evicted ids.
    """

    evicted: Int[Array | np.ndarray, " evicted"]
    evicted_places: Int[Array | np.ndarray, " evicted"]
    inserted: Int[Array | np.ndarray, " inserted"]
    inserted_places: Int[Array | np.ndarray, " inserted"]


def padded_rows(numbers: Rows, size: int | None = None) -> Int[np.ndarray, " size"]:
    """Row numbers as int32, with `NO_ROW` up to `size` entries, or to the next power of two."""
    if size is None:
        size = padded_size(numbers.size)
    padded = np.full(size, NO_ROW, np.int32)
    padded[: numbers.size] = numbers
    return padded


class BackingStore:
    """Host copies of a table and its slots. Rows that a device caches may be stale here.

    Attributes:
      arrays: the table and its slots. Rows are updated in place.
    """

    def __init__(
        self,
        arrays: Sequence[np.ndarray],
        first_values: Callable[[Rows], Sequence[ArrayLike]] | None = None,
        device_dtype: DTypeLike | None = None,
    ):
        """A store with initial values in all rows.

        Args:
          arrays: arrays with equally many rows. The system allocates memory of `np.zeros` only when
            rows are first written.
          first_values: function that computes the initial values of rows, for all arrays. The
            function is called when rows are read that were never written. The number of rows per
            call is one of a few sizes, and a row may occur in several calls. None, the default:
            `arrays` has the initial values.
          device_dtype: dtype that the first array has on the device. If it is narrower, a number
            that the device did not change keeps the unrounded value of the store. None, the
            default: the dtype of the first array.
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
        """Copies of some rows, from all arrays."""
        arrays = [array[rows] for array in self.arrays]
        if self._first_values is None:
            return arrays
        fresh = np.flatnonzero(~self._is_written[rows])
        for start in range(0, fresh.size, FIRST_VALUES_BLOCK):
            block = fresh[start : start + FIRST_VALUES_BLOCK]
            padded = np.zeros(padded_size(block.size), np.int32)
            padded[: block.size] = rows[block]
            for array, values in zip(arrays, self._first_values(padded), strict=True):
                array[block] = np.asarray(values)[: block.size]
        return arrays

    def write(self, rows: Rows, arrays: Sequence[ArrayLike]) -> None:
        """Writes distinct rows of all arrays. Values after the last row are padding."""
        values = [np.asarray(array)[: rows.size] for array in arrays]
        if self._rounds:
            stored = self.arrays[0][rows]
            with np.errstate(over="ignore"):
                rounded = stored.astype(self._device_dtypes[0]).astype(stored.dtype)
            values[0] = np.where(rounded == values[0], stored, values[0])
        for array, new in zip(self.arrays, values, strict=True):
            array[rows] = new
        if self._first_values is not None:
            self._is_written[rows] = True

    def exchange(
        self, evicted: ArrayLike, values: Sequence[ArrayLike], inserted: ArrayLike
    ) -> list[np.ndarray]:
        """Writes the evicted rows to the store, then reads the inserted rows.

        The returned rows have the dtypes of the device.

        Args:
          evicted: ids of the evicted rows, and padding, see `Moves`.
          values: values of the evicted rows.
          inserted: ids of the rows to read, and padding. Padding reads zeros. Inserted rows may
            include evicted rows, so evicted rows are written first.
        """
        evicted = np.asarray(evicted)
        evicted_entries = np.flatnonzero(evicted != NO_ROW)
        self.write(
            evicted[evicted_entries], [np.asarray(array)[evicted_entries] for array in values]
        )
        inserted = np.asarray(inserted)
        inserted_entries = np.flatnonzero(inserted != NO_ROW)
        arrays = []
        rows = self.read(inserted[inserted_entries])
        for stored, dtype in zip(rows, self._device_dtypes, strict=True):
            array = np.zeros((inserted.size, *stored.shape[1:]), dtype)
            array[inserted_entries] = stored
            arrays.append(array)
        return arrays

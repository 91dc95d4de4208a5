"""Rows on the host of which a device has some: how they are kept, exchanged, and known to belong to each other."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from rsembed.bags import padded_size

Rows = Int[np.ndarray, "..."]
FIRST_VALUES_BLOCK = 4096


class Generation:
    """Counts the changes that a host and a device make together, from a random number on.

    The state on the device carries the number, too. One of another time or of another owner, whose places hold other
    rows than the host believes, is noticed before it is used.

    Example:
      >>> generation = Generation("the state is of another time; begin anew.")
      >>> state = generation.number
      >>> generation.advance(state)
      >>> generation.check(state)
      Traceback (most recent call last):
        ...
      RuntimeError: the state is of another time; begin anew. (It has another generation than the host.)
    """

    def __init__(self, refusal: str):
        """`refusal` says what is wrong with a state of another generation, and the way out."""
        self.number, self._refusal = secrets.randbits(31), refusal

    def check(self, found: Any) -> None:
        """Raises: RuntimeError: a number is not the present one."""
        if (np.asarray(found) != self.number).any():
            raise RuntimeError(f"{self._refusal} (It has another generation than the host.)")

    def advance(self, found: Any) -> None:
        """Begins a change of host and device. Raises: as `check`."""
        self.check(found)
        self.number = (self.number + 1) % 2**32


class BackingStore:
    """The rows of an array and of what belongs to it, such as optimizer state; those that a device has may be stale.

    Attributes:
      arrays: the rows, changed in place.
    """

    def __init__(
        self,
        arrays: Sequence[np.ndarray],
        first_values: Callable[[Rows], Sequence[Any]] | None = None,
        near_dtype: Any = None,
    ):
        """A store of rows that were not written yet.

        Args:
          arrays: with equally many rows. Of zeros the system hands memory out as rows are first written.
          first_values: what rows hold in all arrays until they are written, which is made when they are read. It is
            called with few different numbers of rows, of which it may be asked again. None leaves it to `arrays`.
          near_dtype: what a device rounds the first array to, if it does. A number that comes back as it left keeps
            what the store has.
        """
        self.arrays, self._first_values, self._near_dtype = tuple(arrays), first_values, near_dtype
        self._is_written = np.zeros(0 if first_values is None else self.arrays[0].shape[0], bool)

    def read(self, rows: Rows) -> list[np.ndarray]:
        """Copies of rows of all arrays."""
        arrays = [array[rows] for array in self.arrays]
        if self._first_values is not None:
            fresh = np.flatnonzero(~self._is_written[rows])
            for start in range(0, fresh.size, FIRST_VALUES_BLOCK):
                some = fresh[start : start + FIRST_VALUES_BLOCK]
                padded = np.zeros(padded_size(some.size), np.int32)
                padded[: some.size] = rows[some]
                for array, values in zip(arrays, self._first_values(padded), strict=True):
                    array[some] = np.asarray(values)[: some.size]
        return arrays

    def write(self, rows: Rows, arrays: Sequence[Any]) -> None:
        """Replaces distinct rows of all arrays by the first of the values, which may be more."""
        own = [np.asarray(values)[: rows.size] for values in arrays]
        if self._near_dtype is not None:
            kept = self.arrays[0][rows]
            with np.errstate(over="ignore"):
                is_same = kept.astype(self._near_dtype).astype(kept.dtype) == own[0]
            own[0] = np.where(is_same, kept, own[0])
        for array, values in zip(self.arrays, own, strict=True):
            array[rows] = values
        if self._first_values is not None:
            self._is_written[rows] = True

    def exchange(self, left: Rows, arrays: Sequence[Any], come: Rows) -> list[np.ndarray]:
        """Writes rows that left the device, then reads those that come to it: they may be the same."""
        self.write(left, arrays)
        return self.read(come)

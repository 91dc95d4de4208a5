"""Rows on the host of which a device has some: how they are kept, exchanged, and known to belong to each other."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from rsembed.bags import padded_size
from rsembed.caching.stores import RowStore

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
      stores: one per array.
    """

    def __init__(
        self,
        stores: Sequence[RowStore],
        first_values: Callable[[Rows], Sequence[Any]] | None = None,
        near_dtype: Any = None,
    ):
        """A store of rows that were not written yet.

        Args:
          stores: with equally many rows.
          first_values: what rows hold in all arrays until they are written, which is made when they are read. It is
            called with few different numbers of rows, of which it may be asked again. None leaves it to `stores`.
          near_dtype: what a device rounds the first array to, if it does. A number that comes back as it left keeps
            what the store has.

        Raises: ValueError: there is no store, or their numbers of rows differ.
        """
        if len(sizes := {store.shape[0] for store in stores}) != 1:
            raise ValueError(f"BackingStore needs at least one store, all with equally many rows, got {sorted(sizes)}.")
        self.stores, self._first_values = tuple(stores), first_values
        self._near_dtype = near_dtype
        self._is_written = np.zeros(0 if first_values is None else self.stores[0].shape[0], bool)

    def read(self, rows: Rows) -> list[np.ndarray]:
        """Copies of rows of all arrays."""
        arrays = [store.read(rows) for store in self.stores]
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
        if len(arrays) != len(self.stores):
            raise ValueError(f"there are {len(arrays)} arrays of rows for {len(self.stores)} stores.")
        own = [np.ascontiguousarray(values)[: rows.size] for values in arrays]
        if self._near_dtype is not None:
            kept = self.stores[0].read(rows)
            with np.errstate(over="ignore"):
                is_same = kept.astype(self._near_dtype).astype(kept.dtype) == own[0]
            own[0] = np.where(is_same, kept, own[0])
        for store, values in zip(self.stores, own, strict=True):
            store.write(rows, values)
        if self._first_values is not None:
            self._is_written[rows] = True

    def exchange(self, left: Rows, arrays: Sequence[Any], come: Rows) -> list[np.ndarray]:
        """Writes rows that left the device, then reads those that come to it: they may be the same."""
        self.write(left, arrays)
        return self.read(come)

"""Where the rows live that are not cached: a host array, or a file mapped into memory."""

from __future__ import annotations

import math
import mmap
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped
from numpy.typing import DTypeLike

from rsembed.checks import check_type

ROWS_PER_BLOCK = 65536

BeforeChange = Callable[[np.ndarray, np.ndarray], None]
"""Called with rows that are about to change, and their values."""


class RowStore:
    """Rows of one shape and dtype on the host. Reads are copies; a write needs distinct rows.

    Any dtype numpy knows will do, bfloat16 of `ml_dtypes` included. Rows that were never written are zero.

    Attributes:
      shape: `(rows, *shape of a row)`.
      dtype: of every value.
      checksum: of all rows, for stores with `before_change`; 0 while all are zero.

    Example:
      >>> store = RowStore.in_memory((4, 2), np.float32)
      >>> store.fill(lambda start, stop: np.full((stop - start, 2), 0.5, np.float32))
      >>> store.write(np.array([3]), np.array([[1.0, 2.0]], np.float32))
      >>> store.read(np.array([3, 0])).tolist()
      [[1.0, 2.0], [0.5, 0.5]]
    """

    def __init__(
        self,
        values: Shaped[np.ndarray, "rows *row"],
        *,
        before_change: BeforeChange | None = None,
        checksum: int | None = None,
    ) -> None:
        """A store over an existing array (or `np.memmap`), which it changes in place.

        Args:
          values: the rows.
          before_change: called with rows and their values before these are given others. The price of it, and of
            keeping `checksum`, is that rows are read before they are replaced.
          checksum: of the rows, where it is known; None takes one pass over all rows, if there is a `before_change`.
        """
        check_type(values, np.ndarray, "RowStore: values")
        self.shape, self.dtype = values.shape, values.dtype
        self._values = values
        self._before_change, self.checksum = before_change, checksum or 0
        if before_change is not None and checksum is None:
            starts = range(0, self.shape[0], ROWS_PER_BLOCK)
            blocks = ((start, _words(values[start : start + ROWS_PER_BLOCK])) for start in starts)
            sums = (_checksum(start + np.arange(len(block)), block) for start, block in blocks if block.any())
            self.checksum = sum(sums) % 2**64

    @staticmethod
    def in_memory(shape: tuple[int, ...], dtype: DTypeLike) -> RowStore:
        """Zeros in host memory, which the system hands out as rows are first written."""
        return RowStore(np.zeros(shape, dtype))

    @staticmethod
    def in_file(
        path: str | os.PathLike[str],
        shape: tuple[int, ...],
        dtype: DTypeLike,
        *,
        before_change: BeforeChange | None = None,
    ) -> RowStore:
        """A file of raw values, row after row. A new one is sparse: it takes disk space as rows are written.

        Another `before_change` than None: as for the class.

        Raises: ValueError: the file exists with another size than `shape` and `dtype` need, or `shape` is empty.
        """
        path = Path(path)
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if not num_bytes:
            raise ValueError(f"a store of shape {shape} holds nothing and cannot be a file; use RowStore.in_memory.")
        is_new = not path.exists()
        if is_new:
            with path.open("xb") as file:
                file.truncate(num_bytes)
        elif path.stat().st_size != num_bytes:
            raise ValueError(
                f"{path} has {path.stat().st_size} bytes, but rows of shape {shape} and dtype {np.dtype(dtype)} need "
                f"{num_bytes}; give the shape it was made with, or another path."
            )
        values = np.memmap(path, dtype, mode="r+", shape=shape)
        store = RowStore(values, before_change=before_change, checksum=0 if is_new else None)
        source: Any = values.base
        if isinstance(source, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
            source.madvise(mmap.MADV_RANDOM)  # rows are read here and there: nothing around them is wanted
        return store

    @staticmethod
    def in_nameless_file(folder: str | os.PathLike[str], shape: tuple[int, ...], dtype: DTypeLike) -> RowStore:
        """A file in `folder`, which is made, that goes when the store does, however the process ends."""
        path = Path(folder) / f"{secrets.token_hex(8)}.rows"
        path.parent.mkdir(parents=True, exist_ok=True)
        store = RowStore.in_file(path, shape, dtype)
        path.unlink()  # a mapped file needs no name
        return store

    def read(self, rows: Int[np.ndarray, " n"]) -> Shaped[np.ndarray, "n *row"]:
        """Copies of the rows. Raises: IndexError: a row is outside the store. TypeError: rows are no integers."""
        return np.asarray(self._checked(rows)[rows])

    def view(self, first_row: int, last_row: int) -> Shaped[np.ndarray, "n *row"]:
        """Rows that follow each other, as a read-only view."""
        view = self._values[first_row:last_row]
        view.flags.writeable = False
        return view

    def write(self, rows: Int[np.ndarray, " n"], values: np.ndarray) -> None:
        """Replaces the rows. Raises: as `read`; ValueError: `values` have another shape or dtype."""
        stored = self._checked(rows)
        if values.shape != (rows.size, *self.shape[1:]) or values.dtype != self.dtype:
            raise ValueError(
                f"{rows.size} rows of shape {self.shape[1:]} and dtype {self.dtype} cannot take values of shape "
                f"{values.shape} and dtype {values.dtype}; convert them."
            )
        if self._before_change is not None:
            old, new = _words(stored[rows]), _words(values)
            differs = (old != new).any(axis=1)
            if not differs.any():
                return
            rows, values = rows[differs], values[differs]
            self._before_change(rows, stored[rows])
            change = _checksum(rows, new[differs]) - _checksum(rows, old[differs])
            self.checksum = (self.checksum + change) % 2**64
        stored[rows] = values

    def fill(self, block: Callable[[int, int], np.ndarray], *, rows_per_block: int = ROWS_PER_BLOCK) -> None:
        """Writes all rows, `block(start, stop)` at a time, so that initial values never exist as a whole.

        What `block` returns may have `stop - start` rows, or be anything that broadcasts to them.
        """
        for start in range(0, self.shape[0], rows_per_block):
            stop = min(start + rows_per_block, self.shape[0])
            values = np.broadcast_to(np.asarray(block(start, stop), self.dtype), (stop - start, *self.shape[1:]))
            self.write(np.arange(start, stop), values)

    def flush(self) -> None:
        """Brings what was written to the disk."""
        if isinstance(self._values, np.memmap):
            self._values.flush()

    def _checked(self, rows: np.ndarray) -> np.ndarray:
        if rows.dtype.kind not in "iu":
            raise TypeError(f"rows must be an integer array, got {rows.dtype}.")
        # numpy would take a negative row, such as the -1 of "not here", for one from the end.
        if rows.size and not 0 <= rows.min() <= rows.max() < self.shape[0]:
            raise IndexError(f"rows must lie in 0 to {self.shape[0] - 1}, got {rows.min()} to {rows.max()}.")
        return self._values


def _words(values: np.ndarray) -> np.ndarray:
    """The bits of rows, as few wide unsigned numbers as they fill: told apart also where equal as numbers."""
    row_bytes = math.prod(values.shape[1:]) * values.dtype.itemsize
    size = next(size for size in (8, 4, 2, 1) if row_bytes % size == 0)
    return np.ascontiguousarray(values).view(np.uint8).reshape(values.shape[0], row_bytes).view(f"u{size}")


def _checksum(rows: np.ndarray, words: np.ndarray) -> int:
    """A sum over all words modulo 2**64, each with an odd factor of its row and one of its column.

    A sum follows replaced rows without a look at the others. Odd factors let no change of a single word go unnoticed,
    and random ones let others go with a chance of 2**-63 or so.
    """
    columns = _odd_factors(np.arange(words.shape[1]))
    return int((_odd_factors(rows) * np.einsum("rw,w->r", words, columns, dtype=np.uint64)).sum())


def _odd_factors(numbers: np.ndarray) -> np.ndarray:
    """Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators (the finalizer of splitmix64)."""
    z = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)

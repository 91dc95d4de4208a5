"""Where the rows live that are not cached: a host array, or a file mapped into memory."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped
from numpy.typing import DTypeLike


class RowStore:
    """Rows of one shape and dtype on the host. Reads are copies; a write needs distinct rows.

    Any dtype numpy knows will do, bfloat16 of `ml_dtypes` included. Rows that were never written are zero.

    Attributes:
      shape: `(rows, *shape of a row)`.
      dtype: of every value.

    Example:
      >>> store = RowStore.in_memory((4, 2), np.float32)
      >>> store.fill(lambda start, stop: np.full((stop - start, 2), 0.5, np.float32))
      >>> store.write(np.array([3]), np.array([[1.0, 2.0]], np.float32))
      >>> store.read(np.array([3, 0])).tolist()
      [[1.0, 2.0], [0.5, 0.5]]
    """

    def __init__(self, values: Shaped[np.ndarray, "rows *row"]) -> None:
        """A store over an existing array (or `np.memmap`), which it changes in place."""
        self.shape, self.dtype = values.shape, values.dtype
        self._values: np.ndarray | None = values

    @staticmethod
    def in_memory(shape: tuple[int, ...], dtype: DTypeLike) -> RowStore:
        """Zeros in host memory, which the system hands out as rows are first written."""
        return RowStore(np.zeros(shape, dtype))

    @staticmethod
    def in_file(path: str | os.PathLike[str], shape: tuple[int, ...], dtype: DTypeLike) -> RowStore:
        """A file of raw values, row after row. A new one is sparse: it takes disk space as rows are written.

        Raises: ValueError: the file exists with another size than `shape` and `dtype` need, or `shape` is empty.
        """
        path = Path(path)
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if not num_bytes:
            raise ValueError(f"a store of shape {shape} holds nothing and cannot be a file; use RowStore.in_memory.")
        if not path.exists():
            with path.open("xb") as file:
                file.truncate(num_bytes)
        elif path.stat().st_size != num_bytes:
            raise ValueError(
                f"{path} has {path.stat().st_size} bytes, but rows of shape {shape} and dtype {np.dtype(dtype)} need "
                f"{num_bytes}; give the shape it was made with, or another path."
            )
        values = np.memmap(path, dtype, mode="r+", shape=shape)
        source: Any = values.base
        if isinstance(source, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
            source.madvise(mmap.MADV_RANDOM)  # rows are read here and there: nothing around them is wanted
        return RowStore(values)

    def read(self, rows: Int[np.ndarray, " n"]) -> Shaped[np.ndarray, "n *row"]:
        """Copies of the rows. Raises: IndexError: a row is outside the store; ValueError: it is closed."""
        return np.asarray(self._checked(rows)[rows])

    def view(self, first_row: int, last_row: int) -> Shaped[np.ndarray, "n *row"]:
        """Rows that follow each other, as a read-only view. Raises: ValueError: the store is closed."""
        view = self._open()[first_row:last_row]
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
        stored[rows] = values

    def fill(self, block: Callable[[int, int], np.ndarray], *, rows_per_block: int = 65536) -> None:
        """Writes all rows, `block(start, stop)` at a time, so that initial values never exist as a whole.

        What `block` returns may have `stop - start` rows, or be anything that broadcasts to them.
        """
        stored = self._open()
        for start in range(0, self.shape[0], rows_per_block):
            stop = min(start + rows_per_block, self.shape[0])
            stored[start:stop] = block(start, stop)

    def flush(self) -> None:
        """Brings what was written to the disk. Raises: ValueError: the store is closed."""
        stored = self._open()
        if isinstance(stored, np.memmap):
            stored.flush()

    def close(self) -> None:
        """Flushes and lets go of the memory or the file; closing again does nothing."""
        if self._values is not None:
            self.flush()
            self._values = None

    def _open(self) -> np.ndarray:
        if self._values is None:
            raise ValueError("the store is closed; open a new one.")
        return self._values

    def _checked(self, rows: np.ndarray) -> np.ndarray:
        # numpy would take a negative row, such as the -1 of "not here", for one from the end.
        if rows.size and not 0 <= rows.min() <= rows.max() < self.shape[0]:
            raise IndexError(f"rows must lie in 0 to {self.shape[0] - 1}, got {rows.min()} to {rows.max()}.")
        return self._open()

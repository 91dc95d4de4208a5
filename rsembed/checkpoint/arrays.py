"""One array as one file: its rows in order, in chunks with a checksum each."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from rsembed.checkpoint.states import TableRows

CHUNK_BYTES = 1 << 22


class CorruptCheckpointError(ValueError):
    """The files are not what was written."""


# Writing


def as_saved(leaf: Any, name: str) -> tuple[Any, str | None]:
    """The array of numbers that stands for a leaf, and the implementation of a PRNG key.

    Raises: TypeError: the leaf is no array of numbers, or more than that.
    """
    if isinstance(leaf, TableRows):
        return leaf, None
    if isinstance(leaf, jax.Array):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key_data(leaf), str(jax.random.key_impl(leaf))
        return leaf, None
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(
            f"checkpoint: leaf {name!r} is a masked array, whose mask would be lost; save .data and .mask as leaves."
        )
    array = np.asarray(leaf)
    if not _are_numbers(array.dtype):
        raise TypeError(
            f"checkpoint: leaf {name!r} is {array.dtype}; only arrays of numbers can be saved. Save the fields of a "
            "record as leaves of their own, and texts as metadata."
        )
    return array.astype(array.dtype.newbyteorder("="), copy=False), None


def _are_numbers(dtype: np.dtype[Any]) -> bool:
    is_time = dtype.kind in "mM"  # which numpy counts among the integers
    return dtype == np.bool_ or (jnp.issubdtype(dtype, np.number) and not is_time)


def write_array(file: Path | None, array: Any) -> tuple[dict[str, Any], OSError | None]:
    """Writes an array, and returns its description and why it could not be written.

    With several processes all gather the rows to the end, whatever the disk of the one that writes them says, so that
    nobody is left waiting.

    Args:
      file: None in processes that do not write.
      array: from `as_saved`.

    Raises: OSError: it could not be written, and there are no other processes.
    """
    row_bytes = max(1, array.dtype.itemsize * math.prod(array.shape[1:]))
    count, rows_per_chunk = (array.shape[0] if array.shape else 1), max(1, CHUNK_BYTES // row_bytes)
    checksums = []
    with _Output(file) as output:
        for first in range(0, count, rows_per_chunk):
            rows = _rows(array, first, min(rows_per_chunk, count - first))
            chunk = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
            checksums.append(f"{zlib.crc32(chunk):08x}")
            output.write(chunk)
    described = {"shape": list(array.shape), "dtype": array.dtype.name, "rows_per_chunk": rows_per_chunk}
    return {**described, "crc32": checksums}, output.failure


class _Output:
    """A file, or nothing, that remembers its first failure."""

    def __init__(self, file: Path | None):
        self.failure: OSError | None = None
        self._file = None if file is None else self._tried(open, file, "wb")

    def write(self, chunk: memoryview) -> None:
        if self._file is not None and self.failure is None:
            self._tried(self._file.write, chunk)

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._tried(self._file.flush)
            self._tried(os.fsync, self._file.fileno())
            self._tried(self._file.close)

    def _tried(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except OSError as error:
            self.failure = self.failure or error
            if jax.process_count() == 1:
                raise


def _rows(array: Any, first: int, count: int) -> np.ndarray:
    """Rows of a host or global array; every process calls this, and process 0 gets what others hold."""
    if isinstance(array, TableRows):
        return _picked(array.array, array.rows(first, count))
    array = array.reshape(1) if array.ndim == 0 else array
    return _picked(array, np.arange(first, first + count))


def _picked(array: Any, rows: np.ndarray) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array[_index(rows)]
    if array.is_fully_replicated:
        return _host_rows(array.addressable_data(0), rows)
    chunk = np.zeros((rows.size, *array.shape[1:]), array.dtype)
    for shard in array.addressable_shards:
        start, stop, _ = shard.index[0].indices(array.shape[0])
        is_own = (rows >= start) & (rows < stop)
        if shard.replica_id == 0 and is_own.any():
            chunk[(is_own, *shard.index[1:])] = _host_rows(shard.data, rows[is_own] - start)
    if array.is_fully_addressable:
        return chunk
    # Every element has one process that holds its first replica; all others send zeros, so adding bytes is exact.
    gathered = multihost_utils.process_allgather(chunk.reshape(-1).view(np.uint8))
    return gathered.sum(axis=0, dtype=np.uint8).view(array.dtype).reshape(chunk.shape)


def _host_rows(data: jax.Array, rows: np.ndarray) -> np.ndarray:
    if next(iter(data.devices())).platform == "cpu":
        return np.asarray(data)[_index(rows)]
    # On an accelerator np.asarray would keep a copy of the whole array on the host.
    first, last = int(rows.min()), int(rows.max())
    return np.asarray(jax.lax.dynamic_slice_in_dim(data, np.int32(first), last - first + 1))[rows - first]


def _index(rows: np.ndarray) -> np.ndarray | slice:
    """Neighbouring rows as a slice, which copies nothing."""
    is_run = rows.size > 0 and rows[-1] - rows[0] == rows.size - 1 and (np.diff(rows) == 1).all()
    return slice(int(rows[0]), int(rows[-1]) + 1) if is_run else rows


# Reading


def check_entry(entry: Any, number: int) -> None:
    """Whether a manifest's entry describes one array of the checkpoint's own folder, and a checksum for all of it.

    Raises: CorruptCheckpointError: it does not.
    """
    try:
        shape, rows_per_chunk, checksums = entry["shape"], entry["rows_per_chunk"], entry["crc32"]
        count = shape[0] if shape else 1
        is_sound = (
            entry["file"] == f"{number:04d}.bin"
            and all(isinstance(size, int) and size >= 0 for size in (*shape, rows_per_chunk - 1))
            and len(checksums) == -(-count // rows_per_chunk)
            and all(isinstance(part, str) for part in (*entry["path"], *checksums, entry["prng"] or ""))
            and jnp.dtype(entry["dtype"]).name == entry["dtype"]
            and _are_numbers(jnp.dtype(entry["dtype"]))
        )
    except (KeyError, IndexError, TypeError, ValueError):
        is_sound = False
    if not is_sound:
        raise CorruptCheckpointError(
            f"entry {number} of the manifest does not describe an array of this checkpoint with a checksum for each of "
            "its chunks; take an older checkpoint."
        )


def read_array(folder: Path, entry: Mapping[str, Any], name: str) -> Any:
    """The verified array of a checked entry.

    Raises: CorruptCheckpointError: the file is missing or not what was written.
    """
    file, dtype, shape = folder / entry["file"], jnp.dtype(entry["dtype"]), entry["shape"]
    num_bytes, size = math.prod(shape) * dtype.itemsize, file.stat().st_size if file.is_file() else None
    if size != num_bytes:
        was = "missing" if size is None else f"{size} bytes long"
        raise CorruptCheckpointError(f"{file} is {was}, but {name!r} has {num_bytes} bytes; take an older checkpoint.")
    array = np.empty(shape, dtype)
    flat = array.reshape(-1).view(np.uint8)
    count, rows_per_chunk = (shape[0] if shape else 1), entry["rows_per_chunk"]
    row_bytes = num_bytes // max(count, 1)
    with open(file, "rb") as data:
        for number, checksum in enumerate(entry["crc32"]):
            first, last = number * rows_per_chunk, min((number + 1) * rows_per_chunk, count)
            chunk = flat[first * row_bytes : last * row_bytes].data
            data.readinto(chunk)
            if f"{zlib.crc32(chunk):08x}" != checksum:
                raise CorruptCheckpointError(
                    f"{file}: chunk {number}, rows {first} to {last - 1} of {name!r}, is not what was written (CRC32 "
                    "differs); take an older checkpoint, and have the storage looked at."
                )
    return array if entry["prng"] is None else jax.random.wrap_key_data(jnp.asarray(array), impl=entry["prng"])

"""Writes every array of a checkpoint as a zarr array, and reads it, through TensorStore.

```
0000/
  zarr.json        shape, dtype and chunk shape
  c.0.0, c.1.0 ... one chunk of rows each (the last is padded), followed by a CRC32C
```

A scalar is stored as an array of one row.

Because zarr reads a missing chunk as zeros and does not notice swapped chunks, the manifest of a
checkpoint has the checksums of all files. `open_array` compares all files of an array with the
manifest before any row of the array is read.
"""

from __future__ import annotations

import collections
import errno
import functools
import math
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from jax.experimental import multihost_utils

from rsembed import opaque
from rsembed.checkpoint.entries import Entry, chunk_bytes, first_rows, holds_numbers
from rsembed.checkpoint.states import CorruptCheckpointError, Leaf, LeafPath, PickedRows
from rsembed.storage.logical_rows import Blocks, SavedArray

CHUNK_BYTES = 1 << 22
_BYTES_IN_FLIGHT = 1 << 24
"""Maximum size in bytes of all chunks that a save is writing at the same time."""
_CHUNKS_IN_FLIGHT = 4
"""Number of chunks that a load reads at the same time."""
_CHECKSUM_BYTES = 4
_METADATA = "zarr.json"
StoreFuture = tensorstore.Future[tensorstore.TensorStore]
_WAY_OUT = "take an older checkpoint"

ArrayToSave = np.ndarray | jax.Array | PickedRows
"""An array of numbers that `write_arrays` can write."""


class Chunk(NamedTuple):
    """Number and file name of a chunk, index of its first row, and index after its last row."""

    number: int
    file: str
    first: int
    last: int


# Writing


def as_saved(leaf: Leaf, name: str) -> tuple[ArrayToSave, str | None]:
    """The array of numbers to write for a leaf, and the kind of the leaf.

    If the leaf is an array of PRNG keys, its kind is the name of the PRNG implementation, such as
    "threefry2x32". If the leaf is an array from `rsembed.opaque.wrap`, its kind is a key of
    `opaque.DTYPES`, such as "row". The kind of any other leaf is None.

    Raises:
      TypeError: the leaf is not a plain array of numbers.
      RuntimeError: the leaf is a tracer, because the caller runs inside `jit`.
    """
    if isinstance(leaf, PickedRows):
        return leaf, None
    if isinstance(leaf, jax.core.Tracer):
        way_out = "save outside of jit, what a step returned"
        raise RuntimeError(f"checkpoint: leaf {name!r} is traced; {way_out}.")
    if isinstance(leaf, jax.Array):
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf, None
        implementation = opaque.kind_of(leaf) or str(jax.random.key_impl(leaf))
        return jax.random.key_data(leaf), implementation
    array = np.asarray(leaf)
    if isinstance(leaf, np.ma.MaskedArray) or not holds_numbers(array.dtype):
        raise TypeError(
            f"checkpoint: leaf {name!r} is {array.dtype}, made of a {type(leaf).__name__}; only "
            "arrays of numbers that zarr has can be saved. Save fields of a record, and data and "
            "mask, as leaves of their own, texts as metadata, of a collection its state."
        )
    return array.astype(array.dtype.newbyteorder("="), copy=False), None


def new_entry(number: int, path: LeafPath, array: ArrayToSave, prng: str | None) -> Entry:
    """Manifest entry of an array, without the checksums of its files.

    Args:
      number: number of the array in the checkpoint.
      path: path of the array in the saved tree.
      array: the array, see `as_saved`.
      prng: the kind of the array, see `as_saved`.
    """
    num_rows, *columns = array.shape or (1,)
    row_bytes = max(1, math.prod(columns) * array.dtype.itemsize)
    rows_per_full_chunk = max(1, CHUNK_BYTES // row_bytes)
    num_chunks = max(1, -(-num_rows // rows_per_full_chunk))
    return {
        "folder": f"{number:04d}",
        "path": list(path),
        "shape": list(array.shape),
        "dtype": array.dtype.name,
        "prng": prng,
        # All chunk files of an array have the same size, so the last chunk is padded. An even
        # division of the rows among the chunks keeps the padding of the last chunk small.
        "rows_per_chunk": max(1, -(-num_rows // num_chunks)),
    }


def write_arrays(
    path: Path | None, entries: Sequence[Entry], arrays: Sequence[ArrayToSave]
) -> None:
    """Writes each array into a folder in `path`, and adds the checksums of the files to `entries`.

    `write_arrays` writes many chunks at once, because most of the time goes into waiting for the
    disk. All processes must call `write_arrays`, because together they gather the rows. After a
    failed write, the process that writes still gathers the remaining rows, so that no other process
    waits forever.

    Args:
      path: folder to create. None in a process that only helps to gather the rows.
      entries: manifest entries of the arrays, from `new_entry`.
      arrays: arrays to write, which `as_saved` makes from the leaves of a tree.

    Raises: OSError: the operating system reports that a write failed.
    """
    blocks = _blocks_of(entries, arrays)
    try:
        if path is not None:
            _write_blocks(path, entries, blocks)
    except ValueError as error:  # TensorStore reports every OS error as ValueError.
        raise _system_error(error) or OSError(errno.EIO, str(error)) from error
    finally:
        if jax.process_count() > 1:
            collections.deque(blocks, maxlen=0)


RowBlock = tuple[int, int, np.ndarray]
"""Some rows of an array: index of the array, index of the first row, and the rows."""


def _blocks_of(entries: Sequence[Entry], arrays: Sequence[ArrayToSave]) -> Iterator[RowBlock]:
    for number, (entry, array) in enumerate(zip(entries, arrays, strict=True)):
        for chunk in _chunks(entry):
            yield number, chunk.first, _rows(array, chunk)


def _write_blocks(path: Path, entries: Sequence[Entry], blocks: Iterator[RowBlock]) -> None:
    """Writes all blocks of rows, and adds the checksums of the files to the manifest entries."""
    path.mkdir(parents=True)
    stores = [_store(path, entry, create=True) for entry in entries]
    writes: collections.deque[tuple[int, tensorstore.WriteFutures]] = collections.deque()
    try:
        for number, first, rows in blocks:
            target = stores[number].result()[first : first + len(rows)]
            write = target.write(rows, can_reference_source_data_indefinitely=True)
            writes.append((rows.nbytes, write))
            while sum(num_bytes for num_bytes, _ in writes) > _BYTES_IN_FLIGHT:
                _, oldest_write = writes.popleft()
                oldest_write.result()
        for store in stores:
            store.result()
        for _, write in writes:
            write.result()
    finally:
        # After a failure the caller removes the folder, so no write to the folder may be pending.
        for store in stores:
            store.exception()
        for _, write in writes:
            write.exception()
    for entry in entries:
        folder = path / entry["folder"]
        entry["metadata_crc32"] = _file_checksum(folder / _METADATA)
        entry["crc32c"] = [_chunk_checksum(folder / chunk.file) for chunk in _chunks(entry)]


def copied(entry: Entry, array: ArrayToSave) -> np.ndarray | None:
    """A copy of the array in the memory of process 0, None in other processes.

    All processes must call `copied`. `entry` is the manifest entry of the array.
    """
    copy = None
    if jax.process_index() == 0:
        copy = np.empty(entry["shape"] or [1], array.dtype)
    for chunk in _chunks(entry):
        rows = _rows(array, chunk)
        if copy is not None:
            copy[chunk.first : chunk.last] = rows
    if copy is None:
        return None
    return copy.reshape(entry["shape"])


def _system_error(error: ValueError) -> OSError | None:
    """The `OSError` behind an error of TensorStore, or None if `error` has no OS error code."""
    match = re.search(r"os_error_code='(\d+)'", str(error))
    if match is None:
        return None
    code = int(match[1])
    return OSError(code, f"{os.strerror(code)} ({error})")


def _file_checksum(file: Path) -> str:
    return f"{zlib.crc32(file.read_bytes()):08x}"


def _chunk_checksum(file: Path) -> str:
    """The stored CRC32C of a chunk, from the end of its file, in hexadecimal."""
    with open(file, "rb") as data:
        data.seek(-_CHECKSUM_BYTES, os.SEEK_END)
        return data.read().hex()


def _rows(array: ArrayToSave, chunk: Chunk) -> np.ndarray:
    """Rows of one chunk, read from an array in host memory or from a global array.

    All processes must call `_rows`, and process 0 gets all rows.
    """
    rows = np.arange(chunk.first, chunk.last)
    source: Any = array
    if isinstance(array, PickedRows):
        rows = array.positions(rows)
        source = array.array
    if not source.shape:
        source = source.reshape(1)
    if isinstance(source, np.ndarray):
        return source[_index(rows)]
    if source.is_fully_replicated:
        return _host_rows(source.addressable_data(0), rows)
    num_rows, *columns = source.shape
    values = np.zeros((rows.size, *columns), source.dtype)
    for shard in source.addressable_shards:
        if shard.replica_id != 0:
            continue
        row_slice, *column_slices = shard.index
        start, stop, _ = row_slice.indices(num_rows)
        is_in_shard = (rows >= start) & (rows < stop)
        if not is_in_shard.any():
            continue
        shard_rows = rows[is_in_shard] - start
        part = (is_in_shard, *column_slices)
        values[part] = _host_rows(shard.data, shard_rows)
    if source.is_fully_addressable:
        return values
    # Each element has its value in one process and is zero in all other processes, so adding the
    # bytes of all processes restores the array exactly.
    local_bytes = values.reshape(-1).view(np.uint8)
    bytes_by_process = multihost_utils.process_allgather(local_bytes)
    all_bytes = bytes_by_process.sum(axis=0, dtype=np.uint8)
    return all_bytes.view(source.dtype).reshape(values.shape)


def _host_rows(data: jax.Array, rows: np.ndarray) -> np.ndarray:
    (device,) = data.devices()
    if device.platform == "cpu":
        host_view = np.asarray(data)
        return host_view[_index(rows)]
    # Copy only `rows`, because `np.asarray(data)` would copy the whole array to the host, and JAX
    # would keep the copy.
    device_rows = data[rows.astype(np.int32)]
    return np.asarray(device_rows)


def _index(rows: np.ndarray) -> np.ndarray | slice:
    """If `rows` are consecutive, a slice that selects them without a copy, else `rows`."""
    if rows.size > 0 and (np.diff(rows) == 1).all():
        return slice(rows[0], rows[-1] + 1)
    return rows


# Chunks of a zarr array


def _chunks(entry: Entry) -> list[Chunk]:
    """Chunks of an array in the order of rows. An array of size 0 has no chunks."""
    num_rows, *columns = entry["shape"] or [1]
    chunks = []
    for number, first in enumerate(first_rows(entry)):
        file = f"c.{number}" + ".0" * len(columns)
        last = min(first + entry["rows_per_chunk"], num_rows)
        chunks.append(Chunk(number, file, first, last))
    return chunks


def _store(path: Path, entry: Entry, *, create: bool = False) -> StoreFuture:
    """Opens the TensorStore of a manifest entry, and returns it as a future."""
    shape = entry["shape"] or [1]
    chunk_shape = [entry["rows_per_chunk"]]
    for size in shape[1:]:
        chunk_shape.append(max(1, size))
    metadata = {
        "shape": shape,
        "data_type": entry["dtype"],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "crc32c"},
        ],
    }
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(path / entry["folder"])},
        "metadata": metadata,
        # By default, TensorStore writes no file for a chunk of zeros, and reads a missing file as
        # zeros. The options `store_data_equal_to_fill_value` and `fill_missing_data_reads` give
        # every chunk a file and make a missing file an error.
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }
    # Only one save writes to a folder, so TensorStore needs no file locks. With `file_io_sync`, the
    # data is on the disk when a write ends.
    options = {"file_io_locking": {"mode": "none"}, "file_io_sync": True}
    context = tensorstore.Context(options)
    return tensorstore.open(spec, context=context, create=create, open=not create)


# Reading


def open_array(path: Path, entry: Entry, name: str) -> SavedArray:
    """Compares the files of an array with its manifest entry, and opens the array.

    `open_array` compares the size and the stored checksum of every file with the manifest. When a
    chunk is read later, TensorStore computes the checksum of the rows and compares it with the
    stored checksum.

    Raises: CorruptCheckpointError: a file is missing or differs from the manifest.
    """
    folder = path / entry["folder"]
    metadata = folder / _METADATA
    if not metadata.is_file() or _file_checksum(metadata) != entry["metadata_crc32"]:
        raise CorruptCheckpointError(
            f"{metadata} of {name!r} is missing or not what was written (CRC32 differs); {_WAY_OUT}."
        )
    num_bytes = chunk_bytes(entry) + _CHECKSUM_BYTES
    for chunk, checksum in zip(_chunks(entry), entry["crc32c"], strict=True):
        file = folder / chunk.file
        # The size of each file is compared with the manifest, because a wrong shape in the manifest
        # could let a load allocate far more memory than the files have bytes.
        is_intact = file.is_file() and file.stat().st_size == num_bytes
        if is_intact:
            is_intact = _chunk_checksum(file) == checksum
        if not is_intact:
            raise _corrupt_chunk(folder, chunk, name)
    try:
        store = _store(path, entry)
    except ValueError as error:
        # TensorStore rejects the shape or the dtype in the manifest entry.
        raise _corrupt_array(folder, name, error) from error
    read = functools.partial(_read, store, folder, entry, name)
    shape = tuple(entry["shape"])
    dtype = jnp.dtype(entry["dtype"])
    return SavedArray(shape, dtype, read)


class _PendingRead(NamedTuple):
    chunk: Chunk
    rows: np.ndarray
    future: tensorstore.WriteFutures


def _read(
    store_future: StoreFuture,
    folder: Path,
    entry: Entry,
    name: str,
    into: np.ndarray | None,
) -> Blocks:
    """Yields the blocks of an array in the order of rows.

    While the caller uses a block, the next blocks are read.
    """
    try:
        store = store_future.result()
    except ValueError as error:
        raise _corrupt_array(folder, name, error) from error
    pending: collections.deque[_PendingRead] = collections.deque()
    for chunk in _chunks(entry):
        if into is None:
            shape = (chunk.last - chunk.first, *entry["shape"][1:])
            rows = np.empty(shape, jnp.dtype(entry["dtype"]))
        else:
            rows = into[chunk.first : chunk.last]
        source = store[chunk.first : chunk.last]
        future = tensorstore.array(rows, copy=False).write(source)
        pending.append(_PendingRead(chunk, rows, future))
        if len(pending) == _CHUNKS_IN_FLIGHT:
            yield _finished(pending.popleft(), folder, name)
    while pending:
        yield _finished(pending.popleft(), folder, name)


def _finished(read: _PendingRead, folder: Path, name: str) -> tuple[int, np.ndarray]:
    try:
        read.future.result()
    except ValueError as error:
        corrupt = _corrupt_chunk(folder, read.chunk, name)
        raise _system_error(error) or corrupt from error
    return read.chunk.first, read.rows


def _corrupt_array(folder: Path, name: str, error: ValueError) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{folder} does not hold {name!r}: {error}; {_WAY_OUT}.")


def _corrupt_chunk(folder: Path, chunk: Chunk, name: str) -> CorruptCheckpointError:
    file = folder / chunk.file
    why = "CRC32C differs" if file.is_file() else "the file is missing"
    rows = f"rows {chunk.first} to {chunk.last - 1} of {name!r}"
    return CorruptCheckpointError(
        f"{file}: chunk {chunk.number}, {rows}, is not what was written ({why}); {_WAY_OUT}, and "
        "have the storage looked at."
    )

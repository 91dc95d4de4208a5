"""Writes and reads one array as one zarr array. TensorStore transfers the bytes.

```
0000/
  zarr.json        shape, dtype and chunk shape
  c.0.0, c.1.0 ... one chunk each: some rows (padded in the last chunk) and their CRC32C
```

A scalar is stored as an array of one row.

Zarr reads a missing chunk as zeros and does not notice that two chunks were swapped. Therefore the
manifest also has the checksums, and `open_array` compares all files with it before it reads one.
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
from rsembed.checkpoint.entries import Entry, chunk_bytes
from rsembed.checkpoint.states import CorruptCheckpointError, Leaf, PickedRows
from rsembed.storage.logical_rows import Blocks, SavedArray

CHUNK_BYTES = 1 << 22
_BYTES_IN_FLIGHT = 1 << 24
"""Memory that a save needs in addition to the arrays."""
_CHUNKS_IN_FLIGHT = 4
"""Number of chunks that a load reads at the same time."""
_CHECKSUM_BYTES = 4
_METADATA = "zarr.json"
_WAY_OUT = "take an older checkpoint"

ArrayToSave = np.ndarray | jax.Array | PickedRows
"""An array of numbers that can be written: the first result of `as_saved`."""


class Chunk(NamedTuple):
    """File name of a chunk, index of its first row, and index after its last row."""

    file: str
    first: int
    last: int


# Writing


def as_saved(leaf: Leaf, name: str) -> tuple[ArrayToSave, str | None]:
    """The array of numbers to write for a leaf, and the PRNG implementation if the leaf holds keys.

    Instead of the PRNG implementation, the second item is None for ordinary arrays, and the kind
    for arrays of row numbers, ids or key lanes that reject arithmetic (see `rsembed.opaque`).

    Raises:
      TypeError: the leaf is not a plain array of numbers.
      RuntimeError: the leaf is traced.
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
    is_number = array.dtype == np.bool_ or jnp.issubdtype(array.dtype, np.number)
    # numpy counts times ("m", "M") among the integers, and zarr has no long doubles ("g", "G").
    is_number &= array.dtype.char not in "mMgG"
    if isinstance(leaf, np.ma.MaskedArray) or not is_number:
        raise TypeError(
            f"checkpoint: leaf {name!r} is {array.dtype}, made of a {type(leaf).__name__}; only "
            "arrays of numbers that zarr has can be saved. Save fields of a record, and data and "
            "mask, as leaves of their own, texts as metadata, of a collection its state."
        )
    return array.astype(array.dtype.newbyteorder("="), copy=False), None


def write_arrays(path: Path | None, arrays: Sequence[ArrayToSave]) -> list[Entry]:
    """Writes each array into a folder in `path`, and returns the entries for the manifest.

    Many chunks are written at once, because most of the time goes into waiting for the disk. All
    processes must call `write_arrays`. Even if a write to the disk fails, all processes gather all
    rows. Otherwise a process would wait forever for a process that stopped.

    Args:
      path: folder to create, None for processes that do not write.
      arrays: first results of `as_saved`.

    Raises: OSError: the operating system reports that a write failed.
    """
    entries = []
    for number, array in enumerate(arrays):
        entries.append(_new_entry(number, array))
    blocks = _blocks_of(entries, arrays)
    try:
        if path is not None:
            _write_blocks(path, entries, blocks)
    except ValueError as error:  # TensorStore reports every OS error as ValueError.
        raise _system_error(error) or OSError(errno.EIO, str(error)) from error
    finally:
        if jax.process_count() > 1:
            collections.deque(blocks, maxlen=0)
    return entries


Block = tuple[int, int, np.ndarray]
"""Rows of an array: index of the array, index of the first row, the rows."""


def _blocks_of(entries: Sequence[Entry], arrays: Sequence[ArrayToSave]) -> Iterator[Block]:
    for number, (entry, array) in enumerate(zip(entries, arrays, strict=True)):
        for chunk in _chunks(entry):
            yield number, chunk.first, _rows(array, chunk)


def _write_blocks(path: Path, entries: Sequence[Entry], blocks: Iterator[Block]) -> None:
    """Writes all blocks of rows, and adds the checksums to the entries."""
    path.mkdir(parents=True)
    stores = [_store(path, entry, create=True) for entry in entries]
    writes: collections.deque[tuple[int, Any]] = collections.deque()
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
        # Wait for all writes even after a failure: the caller removes the folder.
        for store in stores:
            store.exception()
        for _, write in writes:
            write.exception()
    for entry in entries:
        folder = path / entry["folder"]
        entry["metadata_crc32"] = _file_checksum(folder / _METADATA)
        entry["crc32c"] = [_chunk_checksum(folder / chunk.file) for chunk in _chunks(entry)]


def copied(array: ArrayToSave) -> np.ndarray | None:
    """A copy of the array in the memory of process 0, None in other processes.

    All processes must call `copied`.
    """
    entry = _new_entry(0, array)
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


def _new_entry(number: int, array: ArrayToSave) -> Entry:
    """Manifest entry of an array, without the checksums of its files."""
    row_bytes = max(1, array.dtype.itemsize * math.prod(array.shape[1:]))
    num_rows = 1
    if array.shape:
        num_rows = array.shape[0]
    rows_per_full_chunk = max(1, CHUNK_BYTES // row_bytes)
    num_chunks = max(1, -(-num_rows // rows_per_full_chunk))
    return {
        "folder": f"{number:04d}",
        "shape": list(array.shape),
        "dtype": array.dtype.name,
        # Chunks of nearly equal size need little padding in the last one.
        "rows_per_chunk": max(1, -(-num_rows // num_chunks)),
    }


def _system_error(error: ValueError) -> OSError | None:
    """The `OSError` that TensorStore reports as `error`; None if `error` has no OS error code."""
    match = re.search(r"os_error_code='(\d+)'", str(error))
    if match is None:
        return None
    code = int(match[1])
    return OSError(code, f"{os.strerror(code)} ({error})")


def _file_checksum(file: Path) -> str:
    return f"{zlib.crc32(file.read_bytes()):08x}"


def _chunk_checksum(file: Path) -> str:
    """The CRC32C at the end of a chunk's file, in hexadecimal."""
    with open(file, "rb") as data:
        num_bytes = os.fstat(data.fileno()).st_size
        data.seek(max(0, num_bytes - _CHECKSUM_BYTES))
        return data.read().hex()


def _rows(array: ArrayToSave, chunk: Chunk) -> np.ndarray:
    """Rows of a host or global array.

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
    values = np.zeros((rows.size, *source.shape[1:]), source.dtype)
    for shard in source.addressable_shards:
        start, stop, _ = shard.index[0].indices(source.shape[0])
        is_in_shard = (rows >= start) & (rows < stop)
        if shard.replica_id == 0 and is_in_shard.any():
            shard_rows = rows[is_in_shard] - start
            values[(is_in_shard, *shard.index[1:])] = _host_rows(shard.data, shard_rows)
    if source.is_fully_addressable:
        return values
    # One process has the first replica of an element, and all others send zeros: the sum is exact.
    gathered = multihost_utils.process_allgather(values.reshape(-1).view(np.uint8))
    return gathered.sum(axis=0, dtype=np.uint8).view(source.dtype).reshape(values.shape)


def _host_rows(data: jax.Array, rows: np.ndarray) -> np.ndarray:
    device = next(iter(data.devices()))
    if device.platform == "cpu":
        return np.asarray(data)[_index(rows)]
    # np.asarray(data) would keep a host copy of the whole array.
    return np.asarray(data[rows.astype(np.int32)])


def _index(rows: np.ndarray) -> np.ndarray | slice:
    """A slice if the rows are consecutive, because a slice copies nothing; `rows` otherwise."""
    is_run = rows.size > 0 and rows[-1] - rows[0] == rows.size - 1 and (np.diff(rows) == 1).all()
    if is_run:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


# The zarr array


def _chunks(entry: Entry) -> list[Chunk]:
    """Chunks of an array in the order of rows; none for an array of size 0."""
    shape = entry["shape"] or [1]
    if 0 in shape:
        return []
    num_rows, *columns = shape
    rows_per_chunk = entry["rows_per_chunk"]
    chunks = []
    for number, first in enumerate(range(0, num_rows, rows_per_chunk)):
        file = f"c.{number}" + ".0" * len(columns)
        chunks.append(Chunk(file, first, min(first + rows_per_chunk, num_rows)))
    return chunks


def _store(path: Path, entry: Entry, *, create: bool = False) -> Any:
    """A future of the open TensorStore of a manifest entry."""
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
        # Write even chunks of zeros, so that a missing file is always an error. A file may be
        # deleted after the comparison with the manifest, so reads must not fill in zeros either.
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }
    # Only one save writes to a folder, so locks are not needed. With `sync`, data is on the disk
    # when a write ends.
    options = {"file_io_locking": {"mode": "none"}, "file_io_sync": True}
    context = tensorstore.Context(options)
    return tensorstore.open(spec, context=context, create=create, open=not create)


# Reading


def open_array(path: Path, entry: Entry, name: str) -> SavedArray:
    """Reader of the array of a manifest entry, after a check of its files.

    The check compares the size and the stored checksum of every file. The data is compared with the
    checksum when it is read.

    Raises: CorruptCheckpointError: a file is missing or differs from the manifest.
    """
    folder = path / entry["folder"]
    metadata = folder / _METADATA
    if not metadata.is_file() or _file_checksum(metadata) != entry["metadata_crc32"]:
        raise CorruptCheckpointError(
            f"{metadata} of {name!r} is missing or not what was written (CRC32 differs); {_WAY_OUT}."
        )
    num_bytes = chunk_bytes(entry) + _CHECKSUM_BYTES
    checksums = zip(_chunks(entry), entry["crc32c"], strict=True)
    for number, (chunk, checksum) in enumerate(checksums):
        file = folder / chunk.file
        # With files of the declared size, a reader cannot allocate more than is on the disk.
        has_size = file.is_file() and file.stat().st_size == num_bytes
        if not has_size or _chunk_checksum(file) != checksum:
            raise _corrupt_chunk(folder, number, chunk, name)
    try:
        store = _store(path, entry)
    except ValueError as error:
        # zarr does not support arrays with the shape and dtype of the entry.
        raise _corrupt_array(folder, name, error) from error
    read = functools.partial(_read, store, folder, entry, name)
    return SavedArray(tuple(entry["shape"]), jnp.dtype(entry["dtype"]), read)


class _PendingRead(NamedTuple):
    number: int
    chunk: Chunk
    rows: np.ndarray
    future: Any


def _read(
    store_future: Any,
    folder: Path,
    entry: Entry,
    name: str,
    into: np.ndarray | None,
) -> Blocks:
    """Yields blocks of rows in order, while the next blocks are being read."""
    try:
        store = store_future.result()
    except ValueError as error:
        raise _corrupt_array(folder, name, error) from error
    pending: collections.deque[_PendingRead] = collections.deque()
    for number, chunk in enumerate(_chunks(entry)):
        if into is None:
            shape = (chunk.last - chunk.first, *entry["shape"][1:])
            rows = np.empty(shape, jnp.dtype(entry["dtype"]))
        else:
            rows = into[chunk.first : chunk.last]
        source = store[chunk.first : chunk.last]
        future = tensorstore.array(rows, copy=False).write(source)
        pending.append(_PendingRead(number, chunk, rows, future))
        if len(pending) == _CHUNKS_IN_FLIGHT:
            yield _finished(pending.popleft(), folder, name)
    while pending:
        yield _finished(pending.popleft(), folder, name)


def _finished(read: _PendingRead, folder: Path, name: str) -> tuple[int, np.ndarray]:
    try:
        read.future.result()
    except ValueError as error:
        corrupt = _corrupt_chunk(folder, read.number, read.chunk, name)
        raise _system_error(error) or corrupt from error
    return read.chunk.first, read.rows


def _corrupt_array(folder: Path, name: str, error: ValueError) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{folder} does not hold {name!r}: {error}; {_WAY_OUT}.")


def _corrupt_chunk(folder: Path, number: int, chunk: Chunk, name: str) -> CorruptCheckpointError:
    file = folder / chunk.file
    why = "CRC32C differs" if file.is_file() else "the file is missing"
    rows = f"rows {chunk.first} to {chunk.last - 1} of {name!r}"
    return CorruptCheckpointError(
        f"{file}: chunk {number}, {rows}, is not what was written ({why}); {_WAY_OUT}, and have the storage looked at."
    )

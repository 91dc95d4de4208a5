"""One array as one zarr array: its rows in order, in chunks with a CRC32C each; TensorStore carries the bytes.

```
0000/
  zarr.json        shape, dtype, shape of the chunks
  c.0.0, c.1.0 ... a chunk each: its rows, the last one filled up, and the CRC32C of all that
```

A number alone is an array of one row.

Zarr takes a missing chunk for one of zeros, and knows nothing of chunks that changed places. So the manifest has the
checksums too, and all files are compared with it before the first is read.
"""

from __future__ import annotations

import collections
import errno
import functools
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from rsembed import opaque
from rsembed.checkpoint.entries import chunk_bytes
from rsembed.checkpoint.states import CorruptCheckpointError, PickedRows
from rsembed.storage.logical_rows import Blocks, SavedArray

CHUNK_BYTES = 1 << 22
_BYTES_IN_FLIGHT = 1 << 24  # what a save needs of memory beside the arrays
_CHUNKS_IN_FLIGHT = 4  # and a load
_CHECKSUM_BYTES = 4
_METADATA = "zarr.json"


# Writing


def as_saved(leaf: PyTree, name: str) -> tuple[Any, str | None]:
    """The array of numbers that stands for a leaf, and the implementation of a PRNG key, or the kind of opaque numbers.

    Raises: TypeError: the leaf is no array of numbers, or more than that.
    """
    if isinstance(leaf, PickedRows):
        return leaf, None
    if isinstance(leaf, jax.Array):
        if isinstance(leaf, jax.core.Tracer):
            raise RuntimeError(f"checkpoint: leaf {name!r} is traced; save outside of jit, what a step returned.")
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            implementation = opaque.kind_of(leaf) or str(jax.random.key_impl(leaf))
            return jax.random.key_data(leaf), implementation
        return leaf, None
    array = np.asarray(leaf)
    is_number = array.dtype == np.bool_ or jnp.issubdtype(array.dtype, np.number)
    is_number &= array.dtype.char not in "mMgG"  # times, which numpy counts among integers, and long doubles
    if isinstance(leaf, np.ma.MaskedArray) or not is_number:
        raise TypeError(
            f"checkpoint: leaf {name!r} is {array.dtype}, made of a {type(leaf).__name__}; only arrays of numbers that "
            "zarr has can be saved. Save fields of a record, and data and mask, as leaves of their own, texts as "
            "metadata, of a collection its state."
        )
    return array.astype(array.dtype.newbyteorder("="), copy=False), None


def write_arrays(path: Path | None, arrays: Sequence[PyTree]) -> list[dict[str, PyTree]]:
    """Writes arrays into folders of their own, and returns their entries.

    Everything is under way at once, as far as memory allows: most of the time goes into waiting for the disk. With
    several processes all gather the rows to the end, also where the disk refuses them, so that nobody is left waiting.

    Args:
      path: where the folders come; None in processes that do not write.
      arrays: from `as_saved`.

    Raises: OSError: the system refuses to write them.
    """
    entries = [_described(number, array) for number, array in enumerate(arrays)]
    blocks = (
        (number, first, _rows(array, first, last))
        for number, (entry, array) in enumerate(zip(entries, arrays, strict=True))
        for _, first, last in _chunks(entry)
    )
    try:
        if path is not None:
            _write_blocks(path, entries, blocks)
    except ValueError as error:  # as which TensorStore says all that the system refuses
        raise _system_error(error) or OSError(errno.EIO, str(error)) from error
    finally:
        if jax.process_count() > 1:
            collections.deque(blocks, maxlen=0)
    return entries


def _write_blocks(
    path: Path, entries: Sequence[dict[str, PyTree]], blocks: Iterator[tuple[int, int, np.ndarray]]
) -> None:
    """Writes blocks of rows, each with the numbers of its array and its first row, and notes all checksums."""
    path.mkdir(parents=True)
    stores = [_store(path, entry, create=True) for entry in entries]
    writes: collections.deque[tuple[int, Any]] = collections.deque()
    try:
        for number, first, rows in blocks:
            target = stores[number].result()[first : first + len(rows)]
            write = target.write(rows, can_reference_source_data_indefinitely=True)
            writes.append((rows.nbytes, write))
            while sum(num_bytes for num_bytes, _ in writes) > _BYTES_IN_FLIGHT:
                writes.popleft()[1].result()
        for future in [*stores, *(write for _, write in writes)]:
            future.result()
    finally:  # after a failure too: no file may come into a folder that is being removed
        for future in [*stores, *(write for _, write in writes)]:
            future.exception()
    for entry in entries:
        folder = path / entry["folder"]
        checksums = [_chunk_checksum(folder / file) for file, _, _ in _chunks(entry)]
        entry |= {"metadata_crc32": _file_checksum(folder / _METADATA), "crc32c": checksums}


def copied(array: PyTree) -> np.ndarray | None:
    """Copy of an array of `as_saved` in the memory of process 0, None elsewhere; all processes call this."""
    entry = _described(0, array)
    copy = np.empty(entry["shape"] or [1], array.dtype) if jax.process_index() == 0 else None
    for _, first, last in _chunks(entry):
        rows = _rows(array, first, last)
        if copy is not None:
            copy[first:last] = rows
    return None if copy is None else copy.reshape(entry["shape"])


def _described(number: int, array: PyTree) -> dict[str, PyTree]:
    row_bytes = max(1, array.dtype.itemsize * math.prod(array.shape[1:]))
    count = array.shape[0] if array.shape else 1
    num_chunks = max(1, -(-count // max(1, CHUNK_BYTES // row_bytes)))
    return {
        "folder": f"{number:04d}",
        "shape": list(array.shape),
        "dtype": array.dtype.name,
        "rows_per_chunk": max(1, -(-count // num_chunks)),  # chunks of like size, so that little is filled up
    }


def _system_error(error: ValueError) -> OSError | None:
    """The `OSError` behind an error of TensorStore, None if it reports no code of the operating system."""
    number = re.search(r"os_error_code='(\d+)'", str(error))
    return None if number is None else OSError(int(number[1]), f"{os.strerror(int(number[1]))} ({error})")


def _file_checksum(file: Path) -> str:
    return f"{zlib.crc32(file.read_bytes()):08x}"


def _chunk_checksum(file: Path) -> str:
    """The CRC32C at the end of a chunk's file, in hexadecimal."""
    with open(file, "rb") as data:
        data.seek(max(0, os.fstat(data.fileno()).st_size - _CHECKSUM_BYTES))
        return data.read().hex()


def _rows(array: PyTree, first: int, last: int) -> np.ndarray:
    """Rows of a host or global array; every process calls this, and process 0 gets what others hold."""
    rows = np.arange(first, last)
    if isinstance(array, PickedRows):
        array, rows = array.array, array.positions(rows)
    array = array if array.shape else array.reshape(1)
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
    return np.asarray(data[rows.astype(np.int32)])  # np.asarray of all would keep a copy of it on the host


def _index(rows: np.ndarray) -> np.ndarray | slice:
    """A slice for neighbouring rows, which copies nothing; else `rows`."""
    is_run = rows.size > 0 and rows[-1] - rows[0] == rows.size - 1 and (np.diff(rows) == 1).all()
    return slice(int(rows[0]), int(rows[-1]) + 1) if is_run else rows


# The zarr array


def _chunks(entry: Mapping[str, PyTree]) -> list[tuple[str, int, int]]:
    """Each chunk's file, first row and the one behind its last, in the order of rows; none for an array of size 0."""
    shape, step = entry["shape"] or [1], entry["rows_per_chunk"]
    firsts, columns = () if 0 in shape else range(0, shape[0], step), ".0" * (len(shape) - 1)
    return [(f"c.{number}{columns}", first, min(first + step, shape[0])) for number, first in enumerate(firsts)]


def _store(path: Path, entry: Mapping[str, PyTree], *, create: bool = False) -> PyTree:
    """A future of the open zarr array of a manifest entry."""
    shape = entry["shape"] or [1]
    chunk = [entry["rows_per_chunk"], *(max(1, size) for size in shape[1:])]
    metadata = {
        "shape": shape,
        "data_type": entry["dtype"],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
    }
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(path / entry["folder"])},
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,  # a chunk of zeros is a file as well, and none may be missing,
        "fill_missing_data_reads": False,  # nor be deleted between the comparison with the manifest and its reading
    }
    # A folder of one save alone needs no locks; with sync, what was written is on the disk.
    context = tensorstore.Context({"file_io_locking": {"mode": "none"}, "file_io_sync": True})
    return tensorstore.open(spec, context=context, create=create, open=not create)


# Reading


def open_array(path: Path, entry: Mapping[str, PyTree], name: str) -> SavedArray:
    """The array of an entry of a manifest, once all its files are there and have the checksums that were written.

    Raises: CorruptCheckpointError: they are not.
    """
    folder, shape, dtype = path / entry["folder"], tuple(entry["shape"]), jnp.dtype(entry["dtype"])
    metadata, chunks = folder / _METADATA, _chunks(entry)
    if not metadata.is_file() or _file_checksum(metadata) != entry["metadata_crc32"]:
        raise CorruptCheckpointError(
            f"{metadata} of {name!r} is missing or not what was written (CRC32 differs); take an older checkpoint."
        )
    num_bytes = chunk_bytes(entry) + _CHECKSUM_BYTES
    for number, (chunk, checksum) in enumerate(zip(chunks, entry["crc32c"], strict=True)):
        file = folder / chunk[0]
        # A file of the declared size bounds what a reader allocates by what is on the disk.
        is_whole = file.is_file() and file.stat().st_size == num_bytes
        if not is_whole or _chunk_checksum(file) != checksum:
            raise _corrupt(folder, number, chunk, name)
    try:
        store = _store(path, entry)
    except ValueError as error:  # no array of zarr can be what the entry says
        raise CorruptCheckpointError(f"{folder} does not hold {name!r}: {error}; take an older checkpoint.") from error
    return SavedArray(shape, dtype, functools.partial(_read, store, folder, entry, name))


def _read(future: Any, folder: Path, entry: Mapping[str, PyTree], name: str, into: np.ndarray | None) -> Blocks:
    """Yields blocks of rows in order, while the next ones are being read."""
    try:
        store = future.result()
    except ValueError as error:
        raise CorruptCheckpointError(f"{folder} does not hold {name!r}: {error}; take an older checkpoint.") from error
    dtype, columns = jnp.dtype(entry["dtype"]), entry["shape"][1:]
    reads: collections.deque[tuple[int, tuple[str, int, int], np.ndarray, Any]] = collections.deque()

    def arrived() -> tuple[int, np.ndarray]:
        number, chunk, rows, read = reads.popleft()
        try:
            read.result()
        except ValueError as error:
            raise _system_error(error) or _corrupt(folder, number, chunk, name) from error
        return chunk[1], rows

    for number, chunk in enumerate(_chunks(entry)):
        _, first, last = chunk
        rows = np.empty((last - first, *columns), dtype) if into is None else into[first:last]
        reads.append((number, chunk, rows, tensorstore.array(rows, copy=False).write(store[first:last])))
        if len(reads) == _CHUNKS_IN_FLIGHT:
            yield arrived()
    while reads:
        yield arrived()


def _corrupt(folder: Path, number: int, chunk: tuple[str, int, int], name: str) -> CorruptCheckpointError:
    file, first, last = chunk
    why = "CRC32C differs" if (folder / file).is_file() else "the file is missing"
    return CorruptCheckpointError(
        f"{folder / file}: chunk {number}, rows {first} to {last - 1} of {name!r}, is not what was written ({why}); "
        "take an older checkpoint, and have the storage looked at."
    )

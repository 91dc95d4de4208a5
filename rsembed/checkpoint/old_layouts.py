"""Arrays of layouts 1 and 2: one file each, its rows in order, in chunks with a CRC32 each in the manifest."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from rsembed.checkpoint.saved import Blocks, CorruptCheckpointError, SavedArray


def open_array(path: Path, entry: Mapping[str, Any], name: str) -> SavedArray:
    """The array of a checked entry, of whose file the size is verified.

    Raises: CorruptCheckpointError: the file is missing or has another size.
    """
    file, shape, dtype = path / entry["file"], tuple(entry["shape"]), jnp.dtype(entry["dtype"])
    num_bytes, size = math.prod(shape) * dtype.itemsize, file.stat().st_size if file.is_file() else None
    if size != num_bytes:
        was = "missing" if size is None else f"{size} bytes long"
        raise CorruptCheckpointError(f"{file} is {was}, but {name!r} has {num_bytes} bytes; take an older checkpoint.")
    return SavedArray(shape, dtype, functools.partial(_read, file, entry, dtype, name))


def _read(file: Path, entry: Mapping[str, Any], dtype: Any, name: str, into: np.ndarray | None) -> Blocks:
    shape, rows_per_chunk = entry["shape"] or [1], entry["rows_per_chunk"]
    with open(file, "rb") as data:
        for number, checksum in enumerate(entry["crc32"]):
            first, last = number * rows_per_chunk, min((number + 1) * rows_per_chunk, shape[0])
            rows = np.empty((last - first, *shape[1:]), dtype) if into is None else into[first:last]
            chunk = rows.reshape(-1).view(np.uint8).data
            data.readinto(chunk)
            if f"{zlib.crc32(chunk):08x}" != checksum:
                raise CorruptCheckpointError(
                    f"{file}: chunk {number}, rows {first} to {last - 1} of {name!r}, is not what was written (CRC32 "
                    "differs); take an older checkpoint, and have the storage looked at."
                )
            yield first, rows

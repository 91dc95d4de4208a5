"""Checks the fields of a manifest, before a load uses them to allocate memory or to open files.

A load checks the fields in addition to the checksum, because another program may have written a
manifest with a correct checksum and wrong fields.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from rsembed.checkpoint.states import CorruptCheckpointError, joined
from rsembed.checks import NonNegativeInt, PositiveInt, check_type

MAX_DIMENSIONS = 32
"""Maximum number of dimensions of an array in a checkpoint."""
MAX_BYTES = 2**63

Entry = dict[str, Any]
"""Manifest entry of an array, with the keys of `ENTRY_FIELDS`."""
Body = dict[str, Any]
"""Manifest without its checksum, with `layout_version` and the keys of `BODY_FIELDS`."""
BODY_FIELDS: dict[str, Any] = {
    "step": NonNegativeInt,
    "metadata": dict,
    "belongs_to": dict,
    "arrays": list,
}
ENTRY_FIELDS: dict[str, Any] = {
    "folder": str,
    "path": list[str],
    "shape": list[NonNegativeInt],
    "dtype": str,
    "rows_per_chunk": PositiveInt,
    "prng": str | None,
    "metadata_crc32": str,
    "crc32c": list[str],
}


def check_body(file: Path, body: Body) -> None:
    """Checks all fields of a manifest, except for folders and checksums.

    A load finds wrong folders and checksums when it compares the files with the manifest.

    Raises: CorruptCheckpointError: a field is missing or has an invalid value. The error message
      names the manifest file and the field.
    """
    where = "its fields"
    try:
        _check_fields(body, BODY_FIELDS)
        paths = set()
        for number, entry in enumerate(body["arrays"]):
            where = f"entry {number} of arrays"
            check_type(entry, dict, "it")
            _check_fields(entry, ENTRY_FIELDS)
            _check_sizes(entry)
            name = joined(entry["path"])
            path = tuple(entry["path"])
            if path in paths:
                raise ValueError(f"another one is called {name!r}, too")
            paths.add(path)
    except (TypeError, ValueError, SyntaxError, OverflowError) as error:
        # `np.dtype("f4,(")` raises SyntaxError, and `float(10**400)` raises OverflowError.
        refuse(file, f"{where}: {error}")


def refuse(file: Path, why: str) -> NoReturn:
    """Raises the error for a checkpoint file with impossible contents.

    Raises: CorruptCheckpointError: always. The error message has the name of `file` and the text
      `why`.
    """
    reason = why.removesuffix(".")
    raise CorruptCheckpointError(
        f"{file} is not what was written: {reason}. Take an older checkpoint."
    )


def holds_numbers(dtype: np.dtype[Any]) -> bool:
    """True if a checkpoint can store arrays of this dtype: numbers that zarr has, or booleans."""
    is_number = dtype == np.bool_ or jnp.issubdtype(dtype, np.number)
    # For `issubdtype`, a time difference ("m") is an integer. Zarr has no long doubles ("g", "G").
    return is_number and dtype.char not in "mMgG"


def first_rows(entry: Entry) -> range:
    """Index of the first row of every chunk of an array. An array of size 0 has no chunks."""
    shape = entry["shape"] or [1]
    if 0 in shape:
        return range(0)
    return range(0, shape[0], entry["rows_per_chunk"])


def chunk_bytes(entry: Entry) -> int:
    """Size in bytes of every chunk of an array, without the checksum.

    The last chunk of an array is padded to the size of the other chunks.
    """
    num_columns = math.prod(max(1, size) for size in entry["shape"][1:])
    return entry["rows_per_chunk"] * num_columns * jnp.dtype(entry["dtype"]).itemsize


def _check_fields(fields: Entry | Body, hints: dict[str, Any]) -> None:
    for name, hint in hints.items():
        if name not in fields:
            raise ValueError(f"{name} is missing")
        check_type(fields[name], hint, name)


def _check_sizes(entry: Entry) -> None:
    """Checks that an array of this dtype and shape can exist, and has a checksum for each chunk."""
    dtype = jnp.dtype(entry["dtype"])
    if dtype.name != entry["dtype"] or not holds_numbers(dtype):
        raise ValueError(
            f"dtype must be the name of a dtype of numbers, got {entry['dtype']!r:.60}"
        )
    shape = entry["shape"]
    num_bytes = math.prod(max(1, size) for size in shape) * dtype.itemsize
    if len(shape) > MAX_DIMENSIONS or num_bytes >= MAX_BYTES:
        needed = f"at most {MAX_DIMENSIONS} sizes, of fewer than {MAX_BYTES} bytes"
        raise ValueError(f"shape must have {needed}, got {shape!r:.60}")
    if chunk_bytes(entry) > num_bytes:
        raise ValueError(
            f"rows_per_chunk is {entry['rows_per_chunk']}, more than shape {shape} has"
        )
    num_chunks = len(first_rows(entry))
    num_checksums = len(entry["crc32c"])
    if num_checksums != num_chunks:
        raise ValueError(f"crc32c has {num_checksums} checksums for {num_chunks} chunks")

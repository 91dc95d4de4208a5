"""Checks the fields of a manifest, before a load uses them to allocate memory or to open files.

A load checks the fields in addition to the checksum, because another program may have written a
manifest with a correct checksum and wrong fields.
"""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from rsembed.checkpoint.states import CorruptCheckpointError

MAX_DIMENSIONS = 32
"""Maximum number of dimensions of an array in a checkpoint."""
MAX_BYTES = 2**63
_HEXADECIMAL = re.compile(r"[0-9a-f]{8}")

Entry = dict[str, Any]
"""Manifest entry of an array.

The keys are `folder`, `path`, `shape`, `dtype`, `rows_per_chunk`, `prng`, `metadata_crc32` and
`crc32c`.
"""
Body = dict[str, Any]
"""Manifest without its checksum.

The keys are `step`, `metadata`, `belongs_to`, `arrays` and `layout_version`.
"""


def check_body(file: Path, body: Body) -> None:
    """Checks all fields of a manifest.

    Raises: CorruptCheckpointError: a field is missing or has an invalid value. The error message
      names the manifest file and the field.
    """
    check = functools.partial(_check, file, body, "")
    check("step", _is_count(body.get("step")), "a number of steps")
    for name in ("belongs_to", "metadata"):
        check(name, isinstance(body.get(name), dict), "an object")
    check("arrays", isinstance(body.get("arrays"), list), "a list")
    paths = set()
    for number, entry in enumerate(body["arrays"]):
        if not isinstance(entry, dict):
            refuse(file, f"entry {number} of arrays must be an object, got {entry!r:.60}")
        _check_entry(file, number, entry)
        path = tuple(entry["path"])
        if path in paths:
            refuse(file, f"two of the arrays are called {'/'.join(path)!r}")
        paths.add(path)


def refuse(file: Path, why: str) -> NoReturn:
    """Raises the error for a checkpoint file with impossible contents.

    Raises: CorruptCheckpointError: always. The error message has the name of `file` and the text
      `why`.
    """
    raise CorruptCheckpointError(
        f"{file} is not what was written: {why}. Take an older checkpoint."
    )


def num_chunks(shape: list[int], rows_per_chunk: int) -> int:
    """Number of chunks of an array, which is 0 for an array of size 0."""
    if 0 in shape:
        return 0
    num_rows = shape[0] if shape else 1
    return -(-num_rows // rows_per_chunk)


def chunk_bytes(entry: Entry) -> int:
    """Size in bytes of every chunk of an array, without the checksum.

    The last chunk of an array is padded to the size of the other chunks.
    """
    num_columns = math.prod(max(1, size) for size in entry["shape"][1:])
    return entry["rows_per_chunk"] * num_columns * jnp.dtype(entry["dtype"]).itemsize


def _check_entry(file: Path, number: int, entry: Entry) -> None:
    where = f" of entry {number} of arrays"
    check = functools.partial(_check, file, entry, where)
    folder = f"{number:04d}"
    check("folder", entry.get("folder") == folder, f"the folder {folder}")

    path = entry.get("path")
    is_path = isinstance(path, list) and all(map(_is_text, path))
    check("path", is_path, "a list of texts")

    shape: Any = entry.get("shape")
    is_shape = isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS
    is_shape = is_shape and all(map(_is_count, shape))
    check("shape", is_shape, f"a list of at most {MAX_DIMENSIONS} sizes")

    dtype: Any = entry.get("dtype")
    check("dtype", _is_dtype_of_numbers(dtype), "the name of a dtype of numbers")
    num_numbers = math.prod(max(1, size) for size in shape)
    num_bytes = num_numbers * jnp.dtype(dtype).itemsize
    check("shape", num_bytes < MAX_BYTES, f"of fewer than {MAX_BYTES} bytes")

    rows_per_chunk: Any = entry.get("rows_per_chunk")
    num_rows = shape[0] if shape else 1
    is_in_range = _is_count(rows_per_chunk) and 1 <= rows_per_chunk <= max(1, num_rows)
    check("rows_per_chunk", is_in_range, f"from 1 to the {num_rows} rows of the array")

    check("metadata_crc32", _is_checksum(entry.get("metadata_crc32")), "a checksum")
    checksums: Any = entry.get("crc32c")
    is_list = isinstance(checksums, list) and all(map(_is_checksum, checksums))
    check("crc32c", is_list, "a list of checksums")
    num_expected = num_chunks(shape, rows_per_chunk)
    if len(checksums) != num_expected:
        refuse(
            file,
            f"crc32c{where} has {len(checksums)} checksums, but shape {shape} in chunks of "
            f"{rows_per_chunk} rows has {num_expected} chunks",
        )

    # None is a valid value of `prng`, so a missing field is replaced by the invalid value 0.
    prng = entry.get("prng", 0)
    check("prng", prng is None or _is_text(prng), "null or the name of a generator")


def _check(
    file: Path,
    fields: Entry | Body,
    where: str,
    name: str,
    is_valid: bool,
    wanted: str,
) -> None:
    if is_valid:
        return
    if name not in fields:
        refuse(file, f"{name}{where} is missing; it must be {wanted}")
    refuse(file, f"{name}{where} must be {wanted}, got {fields[name]!r:.60}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_checksum(value: object) -> bool:
    return isinstance(value, str) and _HEXADECIMAL.fullmatch(value) is not None


def _is_dtype_of_numbers(name: object) -> bool:
    if not isinstance(name, str):
        return False
    try:
        dtype = jnp.dtype(name)
    except (TypeError, ValueError, SyntaxError):  # `np.dtype("f4,(")` raises SyntaxError.
        return False
    is_number = dtype == np.bool_ or jnp.issubdtype(dtype, jnp.number)
    return dtype.name == name and is_number and dtype.char not in "mMgG"

"""Checks of what a manifest says, before anything is allocated or listed by it.

Its checksum tells that the bytes are those which somebody wrote, not that a save of this library wrote them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from rsembed.checkpoint.states import CorruptCheckpointError

MAX_DIMENSIONS = 32
"""Dimensions that an array of zarr has at most."""
MAX_BYTES = 2**63
_HEXADECIMAL = re.compile(r"[0-9a-f]{8}")


def check_body(file: Path, body: Mapping[str, PyTree]) -> None:
    """Raises: CorruptCheckpointError: a field of a manifest is missing or has no possible value; names file, field."""
    _check(file, body, "step", _is_count(body.get("step")), "a number of steps")
    for name in ("belongs_to", "metadata"):
        _check(file, body, name, isinstance(body.get(name), dict), "an object")
    _check(file, body, "arrays", isinstance(body.get("arrays"), list), "a list")
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
    """Raises: CorruptCheckpointError: a file of a checkpoint cannot be what was written, and why."""
    raise CorruptCheckpointError(f"{file} is not what was written: {why}. Take an older checkpoint.")


def num_chunks(shape: list[int], rows_per_chunk: int) -> int:
    """Number of chunks of an array; 0 for an array without numbers."""
    if 0 in shape:
        return 0
    num_rows = shape[0] if shape else 1
    return -(-num_rows // rows_per_chunk)


def chunk_bytes(entry: Mapping[str, PyTree]) -> int:
    """Bytes of the numbers in each chunk of an array, the last one included, which is filled up."""
    columns = math.prod(max(1, size) for size in entry["shape"][1:])
    return entry["rows_per_chunk"] * columns * jnp.dtype(entry["dtype"]).itemsize


def _check_entry(file: Path, number: int, entry: Mapping[str, PyTree]) -> None:
    where = f" of entry {number} of arrays"
    path, shape, dtype = entry.get("path"), entry.get("shape"), entry.get("dtype")
    rows_per_chunk: Any = entry.get("rows_per_chunk")
    checksums = entry.get("crc32c")
    is_folder = entry.get("folder") == f"{number:04d}"
    _check(file, entry, "folder", is_folder, f"the folder {number:04d}", where)
    is_path = isinstance(path, list) and all(isinstance(part, str) for part in path)
    _check(file, entry, "path", is_path, "a list of texts", where)
    is_shape = isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS and all(map(_is_count, shape))
    _check(file, entry, "shape", is_shape, f"a list of at most {MAX_DIMENSIONS} sizes", where)
    _check(file, entry, "dtype", _is_dtype_of_numbers(dtype), "the name of a dtype of numbers", where)
    num_bytes = math.prod(max(1, size) for size in entry["shape"]) * jnp.dtype(entry["dtype"]).itemsize
    _check(file, entry, "shape", num_bytes < MAX_BYTES, f"of fewer than {MAX_BYTES} bytes", where)
    num_rows = entry["shape"][0] if entry["shape"] else 1
    is_part = _is_count(rows_per_chunk) and 1 <= rows_per_chunk <= max(1, num_rows)
    _check(file, entry, "rows_per_chunk", is_part, f"from 1 to the {num_rows} rows of the array", where)
    _check(file, entry, "metadata_crc32", _is_checksum(entry.get("metadata_crc32")), "a checksum", where)
    is_list = isinstance(checksums, list) and all(map(_is_checksum, checksums))
    _check(file, entry, "crc32c", is_list, "a list of checksums", where)
    expected = num_chunks(entry["shape"], entry["rows_per_chunk"])
    if len(entry["crc32c"]) != expected:
        refuse(
            file,
            f"crc32c{where} has {len(entry['crc32c'])} checksums, but shape {shape} in chunks of {rows_per_chunk} rows "
            f"has {expected} chunks",
        )
    prng = entry.get("prng", 0)
    _check(file, entry, "prng", prng is None or isinstance(prng, str), "null or the name of a generator", where)


def _check(file: Path, fields: Mapping[str, PyTree], name: str, is_right: bool, wanted: str, where: str = "") -> None:
    if is_right:
        return
    if name not in fields:
        refuse(file, f"{name}{where} is missing; it must be {wanted}")
    refuse(file, f"{name}{where} must be {wanted}, got {fields[name]!r:.60}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_checksum(value: Any) -> bool:
    return isinstance(value, str) and _HEXADECIMAL.fullmatch(value) is not None


def _is_dtype_of_numbers(name: Any) -> bool:
    if not isinstance(name, str):
        return False
    try:
        dtype = jnp.dtype(name)
    except (TypeError, ValueError, SyntaxError):  # numpy parses texts such as "f4,("
        return False
    is_number = dtype == np.bool_ or jnp.issubdtype(dtype, jnp.number)
    return dtype.name == name and is_number and dtype.char not in "mMgG"

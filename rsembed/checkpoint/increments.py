"""Incremental checkpoints: of a large array, the rows that differ from those of another checkpoint.

Rows are compared bit by bit with what is on the disk, so that nobody has to note which were touched, and a run that
was started again goes on with the chain. Rows of a table with keys are told apart by their keys: a new key moves the
others, but changes none of them.

```
0007/   the rows that differ    "changed": {"count": rows of the whole array, "rows": 2, "by_key": false}
0012/   their numbers           "row_numbers"[2]
```
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from rsembed.checkpoint.saved import Blocks, CorruptCheckpointError, SavedArray

LEAST_BYTES = 1 << 14
"""Smaller arrays are written whole: two files are dearer than their rows."""
MOST_CHANGED = 0.5
"""Share of the rows from which on an array is written whole."""
KEYS = "keys"
"""How the array is called that says whose the rows of those beside it are."""
_ROWS_AT_ONCE = 1 << 14

Path = tuple[str, ...]
ByPath = Mapping[Path, Any]


def changes(
    arrays: Mapping[Path, np.ndarray], base: ByPath
) -> tuple[dict[Path, np.ndarray], dict[Path, dict[str, Any]], list[np.ndarray]]:
    """What has to be written of arrays in memory, given those of another checkpoint.

    Returns: by path an array, or the rows of it that differ; of the latter what their entries say; and their numbers.
    """
    written, marks = dict(arrays), {}
    numbers: list[np.ndarray] = []
    for path, array in arrays.items():
        before = base.get(path)
        if not isinstance(before, SavedArray) or not _are_comparable(path, array, before):
            continue
        own_keys, base_keys = _keys_beside(path, arrays), _keys_beside(path, base)
        by_key = own_keys is not None and base_keys is not None
        if by_key:
            rows = _differing_by_key(array, before.whole(), _positions(own_keys, base_keys.whole()))
        elif array.shape == before.shape:
            rows = _differing(array, before)
        else:
            continue
        if len(rows) <= MOST_CHANGED * len(array):
            written[path] = array[rows]
            marks[path] = {"changed": {"count": len(array), "rows": len(numbers), "by_key": by_key}}
            numbers.append(rows)
    return written, marks, numbers


def check_manifest(body: Mapping[str, Any]) -> None:
    """Raises: CorruptCheckpointError: what a manifest says of a base and of changes cannot be."""
    numbers, base = body.get("row_numbers", []), body.get("base")
    changed = [(entry, entry["changed"]) for entry in body["arrays"] if entry.get("changed") is not None]
    try:
        is_sound = base is not None or not (changed or numbers)
        if base is not None:  # a folder beside, and never another one
            is_sound = pathlib.PurePath(base["name"]).parts == (base["name"],) and base["name"] != os.pardir
        for entry, facts in changed:
            is_sound &= 0 <= facts["rows"] < len(numbers) and entry["prng"] is None and len(entry["shape"]) > 0
            is_sound &= numbers[facts["rows"]]["shape"] == entry["shape"][:1] and facts["count"] >= entry["shape"][0]
            is_sound &= isinstance(facts["by_key"], bool) and numbers[facts["rows"]]["dtype"] == "int64"
    except (KeyError, IndexError, TypeError):
        is_sound = False
    if not is_sound:
        raise CorruptCheckpointError("the manifest says impossible things of its base; take an older checkpoint.")


def patched(
    path: Path, changed: Mapping[str, Any], rows: SavedArray, values: SavedArray, base: ByPath, keys: SavedArray | None
) -> SavedArray:
    """An array of which a checkpoint has the rows that differ from those of its base.

    Args:
      path: its name.
      changed: what its entry says.
      rows: numbers of the rows that differ, ascending.
      values: these rows.
      base: arrays of the other checkpoint.
      keys: which its rows belong to, if they are told apart by keys.

    Raises: CorruptCheckpointError: the base has nothing that these could be changes of.
    """
    before, shape = base.get(path), (changed["count"], *values.shape[1:])
    base_keys = base.get((*path[:-1], KEYS))
    if isinstance(before, SavedArray) and not changed["by_key"] and before.shape == shape:
        return SavedArray(shape, values.dtype, functools.partial(_patched, before, rows, values))
    if isinstance(before, SavedArray) and changed["by_key"] and keys is not None and base_keys is not None:
        read = functools.partial(_patched_by_key, shape, keys, base_keys, before, rows, values)
        return SavedArray(shape, values.dtype, read)
    raise CorruptCheckpointError(f"{'/'.join(path)!r} is changes of an array that the base does not have.")


def _are_comparable(path: Path, array: np.ndarray, before: SavedArray) -> bool:
    is_large = array.ndim > 0 and array.nbytes >= LEAST_BYTES
    return is_large and path[-1:] != (KEYS,) and (array.dtype, array.shape[1:]) == (before.dtype, before.shape[1:])


def _keys_beside(path: Path, arrays: ByPath) -> Any:
    """The keys that rows of an array belong to, of a table that has some."""
    keys, own = arrays.get((*path[:-1], KEYS)), arrays[path]
    return keys if keys is not None and keys.shape == own.shape[:1] else None


def _positions(keys: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Where each key stands among others, both ascending; -1 for those that do not."""
    places = np.minimum(np.searchsorted(among, keys), max(len(among) - 1, 0))
    return np.where(among[places] == keys, places, -1) if len(among) else np.full(len(keys), -1)


def _bits(rows: np.ndarray) -> np.ndarray:
    """Rows as words that are equal where all bits are: NaN equals itself, and 0 is not -0."""
    flat = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
    width = next(width for width in (8, 4, 2, 1) if flat.shape[1] % width == 0)
    return flat.view(f"u{width}")


def _differing(array: np.ndarray, before: SavedArray) -> np.ndarray:
    parts = [np.empty(0, np.int64)]
    for first, rows in before.blocks():
        own = array[first : first + len(rows)]
        parts.append(first + np.flatnonzero((_bits(own) != _bits(rows)).any(axis=1)))
    return np.concatenate(parts)


def _differing_by_key(array: np.ndarray, before: np.ndarray, source: np.ndarray) -> np.ndarray:
    differs = source < 0
    known = np.flatnonzero(~differs)
    for first in range(0, len(known), _ROWS_AT_ONCE):
        own = known[first : first + _ROWS_AT_ONCE]
        differs[own] = (_bits(array[own]) != _bits(before[source[own]])).any(axis=1)
    return np.flatnonzero(differs)


def _checked(rows: SavedArray, count: int) -> np.ndarray:
    numbers = rows.whole()
    if len(numbers) and (numbers[0] < 0 or numbers[-1] >= count or (np.diff(numbers) <= 0).any()):
        raise CorruptCheckpointError("row numbers of changes are not ascending; take an older checkpoint.")
    return numbers


def _patched(before: SavedArray, rows: SavedArray, values: SavedArray, into: np.ndarray | None) -> Blocks:
    numbers, changed = _checked(rows, before.shape[0]), values.whole()
    for first, block in before.read(into):
        begin, end = np.searchsorted(numbers, (first, first + len(block)))
        block[numbers[begin:end] - first] = changed[begin:end]
        yield first, block


def _patched_by_key(
    shape: tuple[int, ...],
    keys: SavedArray,
    base_keys: SavedArray,
    before: SavedArray,
    rows: SavedArray,
    values: SavedArray,
    into: np.ndarray | None,
) -> Blocks:
    array = np.empty(shape, values.dtype) if into is None else into
    source = _positions(keys.whole(), base_keys.whole())
    known = np.flatnonzero(source >= 0)
    array[known] = before.whole()[source[known]]
    array[_checked(rows, shape[0])] = values.whole()
    yield 0, array

"""Loads tables of a checkpoint into a collection with different table sizes or dtypes.

The load can append new rows to a table, leave out its last rows, or convert its values to another
dtype. New rows have the values that `EmbeddingCollection.init` draws with the PRNG key of the saved
state. Saved rows are read and new rows are made block by block, so an enlarged table is not in
memory twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from rsembed.checkpoint.states import Facts, Leaf, Path, SavedArray, Tables, flattened, joined
from rsembed.initial_values import fresh_rows, table_key
from rsembed.specs import TableSpec
from rsembed.storage.logical_rows import array_names, as_dtype
from rsembed.storage.protocol import Storage

ROWS_PER_BLOCK = 1 << 14
"""Number of new rows in a block."""
MakeRows = Callable[[int, int], np.ndarray]
"""Function `(first, end) -> rows` that makes the new rows `first` to `end - 1`."""


class WantedArray(NamedTuple):
    """Shape and dtype that an array has after a load, and a function that makes its new rows."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make_rows: MakeRows


def accepted_facts(
    saved: Facts,
    tables: Mapping[str, TableSpec],
    expected: Facts,
    *,
    shrinks: bool,
) -> Tables:
    """Metadata of the saved tables, with the sizes and dtypes that the collection expects.

    The caller of `accepted_facts` raises an error for every difference between the result and
    `expected`. The result differs from `expected` only where a load cannot resize a table or
    convert its dtype. The entry `storage`, which describes the storage of a table, is replaced only
    if the storage can be resized.

    Args:
      saved: metadata of the tables in the checkpoint, by name.
      tables: specs of the collection, by name.
      expected: metadata of the tables of the collection, by name.
      shrinks: whether a table may have fewer rows than in the checkpoint, so that the last rows of
        the saved table are not loaded.

    Raises: ValueError: a table has fewer rows than in the checkpoint, and `shrinks` is False. The
      error message names the table.
    """
    accepted = dict(saved)
    for name, table in tables.items():
        facts = saved.get(name)
        if not isinstance(facts, Mapping):
            continue
        replaced: dict[str, object] = {}
        wanted = expected[name]
        num_saved = facts.get("vocabulary_size")
        num_rows = wanted["vocabulary_size"]
        if isinstance(num_saved, int) and isinstance(num_rows, int):
            if num_saved > num_rows and not shrinks:
                raise ValueError(
                    f"table {name!r} has vocabulary_size={num_saved} in the file and {num_rows} "
                    "here; enlarge it, or pass resize='shrink' to leave out its last "
                    f"{num_saved - num_rows} rows and their slots."
                )
            replaced["vocabulary_size"] = num_rows
        if "dtype" in facts:
            replaced["dtype"] = wanted["dtype"]
        storage = cast(Storage | None, table.storage)
        description = facts.get("storage")
        can_resize = False
        if storage is not None and isinstance(description, str):
            can_resize = bool(storage.resizable(table, description))
        if can_resize:
            replaced["storage"] = wanted["storage"]
        accepted[name] = {**facts, **replaced}
    return accepted


def resized(
    arrays: Mapping[Path, Leaf],
    tables: Mapping[str, TableSpec],
    saved: Facts,
    key: PRNGKeyArray,
) -> dict[Path, Leaf]:
    """Arrays of a checkpoint, with values and slots resized to the tables in `tables`.

    Values are converted to the dtype of the table, and slots keep the saved dtype. The arrays of
    keyed tables are not resized, because a keyed table of any size can load saved keys, as many as
    it has rows.

    Args:
      arrays: result of `files.opened`.
      tables: specs of the collection, by name.
      saved: metadata of the tables in the checkpoint, by name, which `accepted_facts` has checked.
      key: PRNG key of the saved state, which draws new rows.
    """
    result = dict(arrays)
    for name, table in tables.items():
        storage = cast(Storage | None, table.storage)
        if storage is None or storage.in_files is None:
            wanted_arrays = _arrays_by_id(table, key)
        elif storage.takes_keys:
            continue
        else:
            wanted_arrays = _arrays_of_train(table, storage, saved[name]["storage"], key)
        for path, wanted in wanted_arrays.items():
            array = result.get(path)
            if not isinstance(array, SavedArray) or not array.shape:
                continue  # `states.restored` raises the error for a missing or wrong array.
            if array.shape[1:] == wanted.shape[1:]:
                result[path] = _resized_array(array, wanted, path)
    return result


def _resized_array(array: SavedArray, wanted: WantedArray, path: Path) -> SavedArray:
    part, table_name, *_ = path
    dtype = np.dtype(array.dtype)
    if part == "tables" and jnp.issubdtype(dtype, jnp.floating):
        dtype = wanted.dtype
    if array.shape == wanted.shape and array.dtype == dtype:
        return array
    num_rows = wanted.shape[0]
    read = functools.partial(
        _read,
        array,
        num_rows,
        dtype,
        wanted.make_rows,
        f"table {table_name!r}",
        joined(path),
    )
    return SavedArray(wanted.shape, dtype, read)


def _arrays_by_id(table: TableSpec, key: PRNGKeyArray) -> dict[Path, WantedArray]:
    """Shapes, dtypes and new rows for the values and slots of a table with rows in id order.

    The keys of the result are the paths of the arrays in the checkpoint.
    """
    num_rows = table.vocabulary_size
    key = table_key(key, table.name)
    make_fresh = functools.partial(fresh_rows, table=table)
    one_id = jnp.zeros(1, jnp.int32)
    fresh_values, *fresh_slots = jax.eval_shape(make_fresh, key, ids=one_id)
    _, *slot_names = array_names(table, fresh_slots)
    shape_of_path: dict[Path, jax.ShapeDtypeStruct] = {("tables", table.name): fresh_values}
    for name, slot in zip(slot_names, fresh_slots, strict=True):
        shape_of_path["slots", table.name, name.removeprefix("slot_")] = slot
    wanted: dict[Path, WantedArray] = {}
    for number, (path, fresh) in enumerate(shape_of_path.items()):
        program = jax.jit(functools.partial(_fresh_array, table=table, number=number))
        make_rows = functools.partial(_make_block, program, key, num_rows)
        shape = (num_rows, *fresh.shape[1:])
        wanted[path] = WantedArray(shape, np.dtype(fresh.dtype), make_rows)
    return wanted


def _fresh_array(key: PRNGKeyArray, ids: Array, *, table: TableSpec, number: int) -> Array:
    return fresh_rows(key, ids=ids, table=table)[number]


def _make_block(
    program: Callable[[PRNGKeyArray, np.ndarray], Array],
    key: PRNGKeyArray,
    num_rows: int,
    first: int,
    last: int,
) -> np.ndarray:
    """New rows `first` to `last - 1`.

    `program` always makes `ROWS_PER_BLOCK` rows, so that it is compiled only once.
    """
    ids = np.arange(first, first + ROWS_PER_BLOCK)
    ids = np.minimum(ids, num_rows - 1).astype(np.int32)
    return np.asarray(program(key, ids))[: last - first]


def _arrays_of_train(
    table: TableSpec,
    storage: Storage,
    description: str,
    key: PRNGKeyArray,
) -> dict[Path, WantedArray]:
    """Shapes, dtypes and new rows for a tensor train's parameters and its first core's slots.

    The keys of the result are the paths of the arrays in the checkpoint. If a tensor-train table
    gets more rows, its first core and the slots of this core get more slices. The cores after the
    first core, and the slots of these cores, keep their sizes.

    Args:
      table: spec of the table.
      storage: tensor-train storage of the table.
      description: description of the table's storage in the checkpoint, see `Storage.in_files`.
      key: PRNG key of the saved state, which draws new rows.
    """
    params, slots = storage.init(key, table, jnp.zeros((), jnp.int32), 1)
    prefixes = storage.resizable(table, description) or ()
    wanted = {}
    for part, tree in (("tables", params), ("slots", slots)):
        for leaf_path, leaf in flattened(tree).items():
            path = (part, table.name, *leaf_path)
            grows = any(path[: len(prefix)] == prefix for prefix in prefixes)
            if part == "slots" and not grows:
                continue
            array = np.asarray(leaf)
            make_rows = functools.partial(_slice, array)
            wanted[path] = WantedArray(array.shape, array.dtype, make_rows)
    return wanted


def _slice(array: np.ndarray, first: int, last: int) -> np.ndarray:
    return array[first:last]


def _read(
    array: SavedArray,
    num_rows: int,
    dtype: DTypeLike,
    make_rows: MakeRows,
    where: str,
    name: str,
    into: np.ndarray | None,
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields blocks of saved rows, then blocks of new rows, like the function `SavedArray.read`.

    All saved rows are read even if the table has fewer rows, so that all bytes are verified.
    """

    def put(first: int, rows: np.ndarray) -> tuple[int, np.ndarray]:
        if into is None:
            return first, rows
        last = first + len(rows)
        into[first:last] = rows
        return first, into[first:last]

    for first, rows in array.blocks():
        kept = rows[: max(num_rows - first, 0)]
        if len(kept) > 0:
            yield put(first, as_dtype(kept, dtype, where, name))
    for first in range(array.shape[0], num_rows, ROWS_PER_BLOCK):
        last = min(first + ROWS_PER_BLOCK, num_rows)
        yield put(first, make_rows(first, last))

"""Loads tables of a checkpoint into a collection with different table sizes or dtypes.

The load can append new rows to a table, leave out its last rows, or convert its values to another
dtype. New rows have the values that `EmbeddingCollection.init` draws with the PRNG key of the saved
state. Saved rows are read and new rows are made block by block, so an enlarged table is not in
memory twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from rsembed.checkpoint.states import Facts, Leaf, LeafPath, SavedArray, Tables, flattened, joined
from rsembed.initial_values import fresh_rows, table_key
from rsembed.specs import TableSpec
from rsembed.storage.logical_rows import array_names, as_dtype
from rsembed.storage.protocol import Storage

ROWS_PER_BLOCK = 1 << 14
"""Number of new rows in a block."""
MakeRows = Callable[[np.ndarray], np.ndarray]
"""Function `(row numbers) -> rows` that makes up to `ROWS_PER_BLOCK` new rows."""


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
        wanted = expected[name]
        num_saved = facts.get("vocabulary_size")
        num_rows = wanted["vocabulary_size"]
        has_numbers = isinstance(num_saved, int) and num_rows is not None
        if has_numbers and num_saved > num_rows and not shrinks:
            raise ValueError(
                f"table {name!r} has vocabulary_size={num_saved} in the file and {num_rows} "
                "here; enlarge it, or pass resize='shrink' to leave out its last "
                f"{num_saved - num_rows} rows and their slots."
            )
        replaced = {"vocabulary_size": num_rows, "dtype": wanted["dtype"]}
        storage = cast(Storage | None, table.storage)
        description = facts.get("storage")
        can_resize = False
        if storage is not None and isinstance(description, str):
            can_resize = storage.resizable(table, description)
        if can_resize:
            replaced["storage"] = wanted["storage"]
        accepted[name] = {**facts, **replaced}
    return accepted


def resized(
    arrays: Mapping[LeafPath, Leaf],
    tables: Mapping[str, TableSpec],
    key: PRNGKeyArray,
) -> dict[LeafPath, Leaf]:
    """Arrays of a checkpoint, with values and slots resized to the tables in `tables`.

    Values are converted to the dtype of the table, and slots keep the saved dtype. The arrays of
    keyed tables are not resized, because a keyed table of any size can load saved keys, as many as
    it has rows.

    Args:
      arrays: result of `files.opened`.
      tables: specs of the collection, by name.
      key: PRNG key of the saved state, which draws new rows.
    """
    result = dict(arrays)
    for table in tables.values():
        storage = cast(Storage | None, table.storage)
        if storage is not None and storage.takes_keys:
            continue
        if storage is None or storage.rows_on_host:
            wanted_arrays = _arrays_by_id(table, key)
        else:
            wanted_arrays = _arrays_of_train(table, storage, key)
        for path, wanted in wanted_arrays.items():
            array = result.get(path)
            if not isinstance(array, SavedArray) or not array.shape:
                continue  # `states.restored` raises the error for a missing or wrong array.
            if array.shape[1:] == wanted.shape[1:]:
                result[path] = _resized_array(array, wanted, path)
    return result


def _resized_array(array: SavedArray, wanted: WantedArray, path: LeafPath) -> SavedArray:
    dtype = array.dtype
    if path[0] == "tables" and jnp.issubdtype(dtype, jnp.floating):
        dtype = wanted.dtype
    if array.shape == wanted.shape and array.dtype == dtype:
        return array
    read = functools.partial(_read, array, wanted._replace(dtype=dtype), path)
    return SavedArray(wanted.shape, dtype, read)


def _arrays_by_id(table: TableSpec, key: PRNGKeyArray) -> dict[LeafPath, WantedArray]:
    """Shapes, dtypes and new rows for the values and slots of a table with rows in id order.

    The keys of the result are the paths of the arrays in the checkpoint.
    """
    draw = functools.partial(fresh_rows, table_key(key, table.name), table=table)
    one_row = jax.eval_shape(draw, jnp.zeros(1, jnp.int32))
    draw_array = jax.jit(functools.partial(_fresh_array, draw), static_argnums=0)
    names = array_names(table, one_row[1:])
    wanted: dict[LeafPath, WantedArray] = {}
    for number, (name, row) in enumerate(zip(names, one_row, strict=True)):
        path: LeafPath = ("slots", table.name, name.removeprefix("slot_"))
        if number == 0:
            path = ("tables", table.name)
        shape = (table.vocabulary_size, *row.shape[1:])
        make_rows = functools.partial(_drawn_rows, draw_array, number)
        wanted[path] = WantedArray(shape, np.dtype(row.dtype), make_rows)
    return wanted


def _fresh_array(draw: Callable[[Array], Sequence[Array]], number: int, ids: Array) -> Array:
    """Initial rows in array `number` of a table: 0 for its values, 1 for its first slot, and so on."""
    return draw(ids)[number]


def _drawn_rows(
    draw_array: Callable[[int, np.ndarray], Array], number: int, ids: np.ndarray
) -> np.ndarray:
    """Initial rows in array `number`. `draw_array` is compiled only once for each array."""
    padded = np.pad(ids, (0, ROWS_PER_BLOCK - ids.size), mode="edge")
    return np.asarray(draw_array(number, padded))[: ids.size]


def _arrays_of_train(
    table: TableSpec, storage: Storage, key: PRNGKeyArray
) -> dict[LeafPath, WantedArray]:
    """Shapes, dtypes and new rows for a tensor train's parameters and their slots.

    The keys of the result are the paths of the arrays in the checkpoint. If a tensor-train table
    gets more rows, its first core and the slots of this core get more slices. The cores after the
    first core, and the slots of these cores, keep their sizes.
    """
    params, slots = storage.init(key, table, jnp.zeros((), jnp.int32), 1)
    fresh = {"tables": {table.name: params}, "slots": {table.name: slots}}
    wanted = {}
    for path, leaf in flattened(fresh).items():
        array = np.asarray(leaf)
        wanted[path] = WantedArray(array.shape, array.dtype, array.__getitem__)
    return wanted


def _read(
    array: SavedArray, wanted: WantedArray, path: LeafPath, into: np.ndarray | None
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields blocks of saved rows, then blocks of new rows, like the function `SavedArray.read`."""
    for first, rows in _blocks(array, wanted, path):
        if into is not None:
            into[first : first + len(rows)] = rows
        yield first, rows


def _blocks(
    array: SavedArray, wanted: WantedArray, path: LeafPath
) -> Iterator[tuple[int, np.ndarray]]:
    """Blocks of saved rows in the wanted dtype, then blocks of new rows.

    All saved rows are read even if the table has fewer rows, so that all bytes are verified.
    """
    num_rows = wanted.shape[0]
    where = f"table {path[1]!r}"
    for first, rows in array.blocks():
        kept = rows[: max(num_rows - first, 0)]
        if len(kept) > 0:
            yield first, as_dtype(kept, wanted.dtype, where, joined(path))
    for first in range(array.shape[0], num_rows, ROWS_PER_BLOCK):
        last = min(first + ROWS_PER_BLOCK, num_rows)
        yield first, wanted.make_rows(np.arange(first, last, dtype=np.int32))

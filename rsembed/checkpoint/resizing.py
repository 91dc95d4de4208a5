"""Arrays of a file as tables of another size or dtype have them: with rows added, cut off, or rounded.

Rows that a file lacks are those that `EmbeddingCollection.init` makes of the saved state's key. They are made in
blocks while the file is read, so that a larger table needs no second copy of itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray, PyTree

from rsembed.checkpoint.states import SavedArray, flattened, joined
from rsembed.initial_values import fresh_rows, table_key
from rsembed.specs import TableSpec
from rsembed.storage.logical_rows import array_names, as_dtype
from rsembed.storage.protocol import Storage

ROWS_PER_BLOCK = 1 << 14
"""Rows that are made at once."""
Path = tuple[str, ...]
Rows = Callable[[int, int], np.ndarray]
"""Fresh rows from a first number to the one before a last number."""


def accepted_facts(
    saved: Mapping[str, PyTree], tables: Mapping[str, TableSpec], expected: Mapping[str, PyTree], *, shrinks: bool
) -> dict[str, PyTree]:
    """Facts of saved tables with the expected sizes and dtypes, where a load can change the saved ones into these.

    Args:
      saved: facts of tables in a file, by name.
      tables: specs of the collection.
      expected: facts of these.
      shrinks: whether rows at the end of a table may be left out.

    Raises: ValueError: a table is smaller than in the file, and may not shrink; names it.
    """
    accepted = dict(saved)
    for name, table in tables.items():
        facts, wanted = saved.get(name), expected[name]
        if not isinstance(facts, Mapping):
            continue
        num_saved, num_rows = facts.get("vocabulary_size"), wanted["vocabulary_size"]
        if isinstance(num_saved, int) and isinstance(num_rows, int):
            if num_saved > num_rows and not shrinks:
                raise ValueError(
                    f"table {name!r} has vocabulary_size={num_saved} in the file and {num_rows} here; enlarge it, or "
                    f"pass resize='shrink' to leave out its last {num_saved - num_rows} rows and their slots."
                )
            facts = {**facts, "vocabulary_size": num_rows}
        if "dtype" in facts:
            facts = {**facts, "dtype": wanted["dtype"]}
        storage, description = cast(Storage | None, table.storage), facts.get("storage")
        if storage is not None and isinstance(description, str) and storage.resizable(table, description):
            facts = {**facts, "storage": wanted["storage"]}
        accepted[name] = facts
    return accepted


def resized(
    arrays: Mapping[Path, PyTree], tables: Mapping[str, TableSpec], saved: Mapping[str, PyTree], key: PRNGKeyArray
) -> dict[Path, PyTree]:
    """Arrays of a file, those of tables with the size and dtype that `tables` say.

    Rows by key stay as they are: a table takes as many as it has room for.

    Args:
      arrays: by path, as `files.opened` returns them.
      tables: specs of the collection.
      saved: facts of tables in the file, which `accepted_facts` accepted.
      key: that of the saved state.
    """
    found = dict(arrays)
    for name, table in tables.items():
        storage = cast(Storage | None, table.storage)
        if storage is None or storage.in_files is None:
            wanted = _rows_of_table(table, key)
        elif storage.takes_keys:
            continue
        else:
            wanted = _slices_of_train(table, storage, saved[name]["storage"], key)
        for path, (shape, dtype, fresh) in wanted.items():
            array = found.get(path)
            if not isinstance(array, SavedArray) or not array.shape or array.shape[1:] != shape[1:]:
                continue  # a load says what does not match
            is_rounded = path[0] == "tables" and array.dtype != dtype and jnp.issubdtype(array.dtype, jnp.floating)
            if array.shape != shape or is_rounded:
                new_dtype = dtype if is_rounded else array.dtype
                read = functools.partial(_read, array, shape[0], new_dtype, fresh, f"table {name!r}", joined(path))
                found[path] = SavedArray((shape[0], *array.shape[1:]), np.dtype(new_dtype), read)
    return found


Wanted = dict[Path, tuple[tuple[int, ...], np.dtype, Rows]]
"""Shape, dtype and fresh rows of arrays by path."""


def _rows_of_table(table: TableSpec, key: PRNGKeyArray) -> Wanted:
    """Values and slots that files have by id."""
    own_key, num_rows = table_key(key, table.name), table.vocabulary_size
    shapes = jax.eval_shape(functools.partial(fresh_rows, table=table), own_key, ids=jnp.zeros(1, jnp.int32))
    names = array_names(table, shapes[1:])
    wanted: Wanted = {}
    for number, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        path: Path = ("tables", table.name)
        if number > 0:
            path = ("slots", table.name, name.removeprefix("slot_"))
        one_array = functools.partial(_nth_fresh, table=table, number=number)
        make = functools.partial(_in_blocks, jax.jit(one_array), own_key, num_rows)
        wanted[path] = (num_rows, *shape.shape[1:]), np.dtype(shape.dtype), make
    return wanted


def _nth_fresh(key: PRNGKeyArray, ids: PyTree, *, table: TableSpec, number: int) -> PyTree:
    return fresh_rows(key, ids=ids, table=table)[number]


def _in_blocks(make: Callable[..., PyTree], key: PRNGKeyArray, num_rows: int, first: int, last: int) -> np.ndarray:
    """Fresh rows, made by a program of one size; ids beyond the table repeat its last one."""
    ids = np.minimum(np.arange(first, first + ROWS_PER_BLOCK), num_rows - 1).astype(np.int32)
    return np.asarray(make(key, ids))[: last - first]


def _slices_of_train(table: TableSpec, storage: Storage, description: str, key: PRNGKeyArray) -> Wanted:
    """Arrays of a storage whose leading axis follows the size of the table, and all that have its dtype."""
    params, slots = storage.init(key, table, jnp.zeros((), jnp.int32), 1)
    prefixes = storage.resizable(table, description) or ()
    wanted: Wanted = {}
    for part, tree in (("tables", params), ("slots", slots)):
        for path, leaf in flattened(tree).items():
            own_path = (part, table.name, *path)
            if part == "tables" or any(own_path[: len(prefix)] == prefix for prefix in prefixes):
                array = np.asarray(leaf)
                wanted[own_path] = array.shape, array.dtype, functools.partial(_part, array)
    return wanted


def _part(array: np.ndarray, first: int, last: int) -> np.ndarray:
    return array[first:last]


def _read(
    array: SavedArray,
    num_rows: int,
    dtype: DTypeLike,
    fresh: Rows,
    where: str,
    name: str,
    into: np.ndarray | None,
) -> Iterator[tuple[int, np.ndarray]]:
    """Blocks of an array as `SavedArray.read` yields them: saved rows, then fresh ones.

    The file is read to its end, so that all of its bytes are verified.
    """

    def in_place(first: int, rows: np.ndarray) -> tuple[int, np.ndarray]:
        if into is None:
            return first, rows
        into[first : first + len(rows)] = rows
        return first, into[first : first + len(rows)]

    for first, rows in array.blocks():
        kept = rows[: max(num_rows - first, 0)]
        if len(kept) > 0:
            yield in_place(first, as_dtype(kept, dtype, where, name))
    for first in range(array.shape[0], num_rows, ROWS_PER_BLOCK):
        yield in_place(first, fresh(first, min(first + ROWS_PER_BLOCK, num_rows)))

"""Exports the rows of keyed tables by key, and imports rows by key.

Exported rows are in ascending order of their keys, so an export does not depend on row numbers or
on the number of shards. Imported rows may be in any order. The arrays of a state are concatenations
of all shards, so row `r` of shard `s` has index `s * capacity + r`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Num, PyTree
from numpy.typing import ArrayLike

from rsembed.arrays import is_traced
from rsembed.checks import check_type
from rsembed.kernels.contract import NO_ROW
from rsembed.keys import Keys, check_fits, join_keys, local_rows, owners, split_keys
from rsembed.sizes import padded_size
from rsembed.specs import TableSpec
from rsembed.storage import row_map
from rsembed.storage.hashed_rows import DynamicTable, stack, unstack, with_keys
from rsembed.storage.protocol import SlotTree, State, Storage, on_host
from rsembed.storage.row_map import Eviction, RowMap

ROWS_PER_BLOCK = 1 << 16
"""Number of rows in each block of an array that is already in memory."""

Blocks = Iterator[tuple[int, np.ndarray]]
"""Blocks of rows of an array, as pairs `(index of the first row, rows)`."""
Export = Mapping[str, PyTree]
"""Exported keyed table, as a mapping from names to arrays.

An export contains the arrays `keys`, `values`, and `slot_<name>` for each slot of the optimizer. An
export of a table with a hash table contains `last_step` and `count`. If keys can wait for
admission, an export contains `waiting_keys`, `waiting_last_step` and `waiting_count`."""
Facts = dict[str, np.ndarray]
"""Arrays `keys`, `last_step` and `count` of some rows, in ascending order of the keys."""
Positions = Int[np.ndarray, " n"]
"""Row indices in an array that is the concatenation of all shards."""

_find_or_assign = jax.jit(row_map.find_or_assign)


@jax.jit
def _removed(shard_map: RowMap, keys: Keys) -> RowMap:
    rows = row_map.find(shard_map, keys)
    return row_map.release(shard_map, rows)


@jax.jit
def _squared_norms(rows: Array) -> Array:
    return jnp.sum(jnp.square(rows.astype(jnp.float32)), axis=1)


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """An array that is stored in a checkpoint, and can be read from disk block by block.

    Attributes:
      shape: shape of the array.
      dtype: dtype of the array.
      read: function that reads the array, and yields blocks `(index of the first row, rows)`.
        `read(array)` writes the values to `array`. `read(None)` allocates a new array for each
        block. A scalar is read as an array with one row.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[np.ndarray | None], Blocks]

    def blocks(self) -> Blocks:
        """Blocks `(index of the first row, rows)` of a few MiB each, in ascending order of rows.

        Raises: CorruptCheckpointError: the file of a block is damaged.
        """
        return self.read(None)

    def whole(self) -> np.ndarray:
        """The whole array, in host memory.

        Raises: CorruptCheckpointError: the file is damaged.
        """
        array = np.empty(self.shape, self.dtype)
        for _ in self.read(np.atleast_1d(array)):
            pass
        return array


def as_dtype(values: ArrayLike, dtype: DTypeLike, where: str, name: str) -> np.ndarray:
    """Converts imported values to a dtype, and checks that the values fit this dtype.

    Args:
      values: array to convert, from the user or from a file.
      dtype: dtype of the result.
      where: subject of the error message, such as the name of the table.
      name: name of the array, for the error message.

    Raises: ValueError: finite numbers are too large for `dtype`.
    """
    values = np.asarray(values)
    with np.errstate(over="ignore"):
        converted: np.ndarray = values.astype(dtype, copy=False)
    if np.can_cast(values.dtype, dtype):
        return converted
    is_lost = np.isfinite(values) & ~np.isfinite(converted)
    num_lost = int(np.sum(is_lost))
    if num_lost:
        raise ValueError(
            f"{where}: {num_lost} numbers of imported {name!r} are too large for {converted.dtype}; clip them, or "
            "take a wider dtype."
        )
    return converted


def checked_slots(slots: PyTree, template: PyTree, table: TableSpec) -> PyTree:
    """Checks slots that a user passes for a table, and returns them in the structure of `template`.

    The returned slots are NumPy arrays in host memory. Inside `jit`, the returned slots are traced
    arrays.

    Args:
      slots: slots of a table as `EmbeddingCollection.slots` returns them, or a dictionary from slot
        name to slot, as in a checkpoint.
      template: slots with the shapes and dtypes that fit the table.
      table: spec of the table. Error messages contain the name of the table and of its optimizer.

    Raises:
      TypeError: a slot is not an array of numbers.
      ValueError: slots are missing or unknown, or a slot has the wrong shape or dtype.
    """
    where = f"table {table.name!r}"
    arrays = _by_path(slots)
    templates = _by_path(template)
    if arrays.keys() != templates.keys():
        # If the slots of an optimizer have no names, a checkpoint uses their numbers as names.
        by_number = {}
        for number, leaf in enumerate(templates.values()):
            by_number[str(number)] = leaf
        if arrays.keys() != by_number.keys():
            raise ValueError(
                f"{where}: its slots must be {list(templates)}, those of {type(table.optimizer).__name__}, got "
                f"{list(arrays)}; give them as collection.slots(state) returns them."
            )
        templates = by_number
    checked = []
    for name, slot_template in templates.items():
        slot = arrays[name]
        check_type(slot, Num[np.ndarray, "..."], f"{where}: its slot {name!r}")
        if not is_traced(slot):
            # `slot` may be an array on a mesh other than the mesh of the table.
            slot = on_host(slot)
        actual = f"{slot.dtype.name}{list(slot.shape)}"
        expected = f"{slot_template.dtype.name}{list(slot_template.shape)}"
        if actual != expected:
            raise ValueError(
                f"{where}: its slot {name!r} must be {expected}, got {actual}. Slots have a row for each row of the "
                "table; load_collection(..., resize=True) makes those of new rows."
            )
        checked.append(slot)
    structure = jax.tree.structure(template)
    return jax.tree.unflatten(structure, checked)


def _by_path(tree: PyTree) -> dict[str, PyTree]:
    """Dictionary from path to leaf, for all leaves of a tree.

    Paths are strings, so a named tuple and a dictionary with the same names have equal paths.
    """
    leaves = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        leaves[name] = leaf
    return leaves


def places_by_key(
    params: DynamicTable,
    table: TableSpec,
    num_shards: int,
) -> tuple[Positions, dict[str, np.ndarray]]:
    """Row index of each key of a table, and arrays such as `keys` and `last_step`.

    Args:
      params: arrays of all shards.
      table: spec of the table.
      num_shards: number of shards.

    Returns: the row indices in ascending order of the keys, and a dictionary of arrays. The
      dictionary of arrays always contains `keys`, in the table's `key_dtype`. For a table with a
      hash table, the dictionary contains `last_step` and `count`. For a table with a map of waiting
      keys, the dictionary contains `waiting_keys`, `waiting_last_step` and `waiting_count`, in
      ascending order of the waiting keys.

    Raises: ValueError: a key is outside the range of `key_dtype`.
    """
    if params.keys is None:
        keys = np.arange(params.rows.shape[0])
        positions = _fixed_positions(table, split_keys(keys), keys.size, num_shards)
        return positions, {"keys": keys.astype(_key_dtype(table))}
    positions, facts = _by_key(table, params.keys)
    if params.waiting is not None:
        _, waiting_facts = _by_key(table, params.waiting)
        for name, array in waiting_facts.items():
            facts[f"waiting_{name}"] = array
    return positions, facts


def rows_to_leave(
    params: DynamicTable,
    table: TableSpec,
    policy: Eviction,
    is_in_table: np.ndarray | bool = True,
    *,
    keep: int | None,
    unused_for: int | None,
    norm_below: float | None,
    step: int,
) -> tuple[Positions, Facts]:
    """Row indices of the keys that an eviction removes, and their `keys`, `last_step` and `count`.

    Each of the arguments `keep`, `unused_for` and `norm_below` can remove keys. An argument with
    value None removes no keys. The returned rows are in ascending order of their keys.

    Args:
      params: arrays of all shards.
      table: spec of the table.
      policy: eviction policy, "lru" or "lfu", which is used only if `keep` is not None.
      is_in_table: mask of the rows of the table, if several tables share the storage. True, the
        default, means that all rows belong to `table`.
      keep: number of rows to keep, on all shards together. Policy "lru" removes the least recently
        used rows, and "lfu" removes the least frequently used rows. Among equally old or equally
        frequent rows, the rows with the smallest keys are removed first.
      unused_for: number of steps. A key is removed if its last use was more than `unused_for` steps
        before `step`.
      norm_below: L2 norm. A key is removed if the norm of its row is below `norm_below`.
      step: index of the next step.
    """
    maps = params.keys
    last_step = on_host(maps.last_step)
    is_used = (last_step != row_map.FREE) & is_in_table
    is_evicted = np.zeros(last_step.shape, bool)
    if unused_for is not None:
        is_evicted |= is_used & (step - last_step.astype(np.int64) > unused_for)
    if norm_below is not None:
        squared_norms = on_host(_squared_norms(params.rows)).astype(np.float64)
        is_evicted |= is_used & (np.sqrt(squared_norms) < norm_below)
    if keep is not None:
        positions, _ = _by_key(table, maps, is_used)
        worth = on_host(row_map.worth(maps, policy))[positions]
        # `positions` are in ascending order of the keys, and a stable sort keeps this order among
        # rows of equal worth.
        order = np.argsort(worth, kind="stable")
        num_evicted = max(positions.size - keep, 0)
        is_evicted[positions[order[:num_evicted]]] = True
    return _by_key(table, maps, is_evicted)


def check_reasons(where: str, **reasons: float | None) -> None:
    """Checks the arguments that select the keys to evict, such as `keep=100`.

    Args:
      where: subject of the error message, such as the name of the table.
      **reasons: conditions of the eviction, by name. A condition with value None is not used.

    Raises: TypeError or ValueError: all conditions are None, or a condition has a wrong type or
      value.
    """
    if all(value is None for value in reasons.values()):
        raise ValueError(f"{where}: give one or more of {', '.join(reasons)}.")
    for name, value in reasons.items():
        if value is None:
            continue
        kind: type = int
        if name == "norm_below":
            kind = float
        check_type(value, Annotated[kind, "[0, inf)"], f"{where}: {name}")


def _key_dtype(table: TableSpec) -> str:
    return cast(str, cast(Storage, table.storage).key_dtype)


def array_names(table: TableSpec, slots: Sequence[PyTree]) -> list[str]:
    """Names of a table's vectors and slots in an export, in the order of the arrays in a state.

    If `slots` is empty (a state for serving), the result has no names of slots.
    """
    names = ["values"]
    for name in getattr(table.optimizer.slot_type, "_fields", range(len(slots))):
        names.append(f"slot_{name}")
    return names[: 1 + len(slots)]


def _by_key(
    table: TableSpec,
    maps: RowMap,
    marks: np.ndarray | bool = True,
) -> tuple[Positions, Facts]:
    """Indices of the marked rows that have a key, and `keys`, `last_step` and `count` of the rows.

    The returned rows are in ascending order of their keys.
    """
    last_step = on_host(maps.last_step)
    positions = np.flatnonzero((last_step != row_map.FREE) & marks)
    high = on_host(maps.high)[positions]
    low = on_host(maps.low)[positions]
    keys = join_keys(high, low, dtype=_key_dtype(table))
    order = np.argsort(keys)
    positions = positions[order]
    facts = {
        "keys": keys[order],
        "last_step": last_step[positions],
        "count": on_host(maps.counts)[positions],
    }
    return positions, facts


def import_rows(
    params: DynamicTable,
    slots: SlotTree,
    exported: Export,
    table: TableSpec,
    num_shards: int,
) -> State:
    """Writes exported rows to a table outside `jit`, and returns the new parameters and slots.

    Rows of keys that the table already has are overwritten. New keys get free rows. The returned
    vectors and slots are on the devices of `params` and `slots`. The returned maps of keys are
    NumPy arrays.

    Args:
      params: arrays of all shards.
      slots: slots of all shards.
      exported: result of `DynamicRows.rows`, or some of its arrays. Values and slots may be
        `SavedArray`s. `keys` and `values` are required, and all other arrays are optional. Missing
        slots get initial values. A missing `last_step` or `count` is 0. If new keys of the table do
        not wait for admission, waiting keys in `exported` are dropped with a warning.
      table: spec of the table.
      num_shards: number of shards.

    Raises: ValueError: arrays have the wrong shape or different lengths, a key occurs twice or is
      too large for `key_dtype`, or there are too few free rows.
    """
    names = array_names(table, slots)
    _check_names(table, exported, names)
    keys = _checked_keys(table, exported, "")
    arrays = dict(zip(names, (params.rows, *slots), strict=True))
    imported: dict[str, PyTree] = {}
    for name, array in arrays.items():
        if name == "values" or name in exported:
            shape = (*keys.shape, *array.shape[1:])
            imported[name] = _checked(table, exported, name, shape)
    where = f"table {table.name!r}"
    if len(imported) < len(names):
        values = imported["values"]
        if isinstance(values, SavedArray):
            values = values.whole()
        values = as_dtype(values, np.float32, where, "values")
        initial_slots = table.optimizer.init_slots(jnp.asarray(values))
        imported = dict(zip(names[1:], initial_slots, strict=True)) | imported
    params, positions = _with_keys(params, keys, exported, table, num_shards)
    written = []
    for name, array in arrays.items():
        written.append(_written(array, positions, imported[name], num_shards, where, name))
    return params._replace(rows=written[0]), tuple(written[1:])


def _check_names(table: TableSpec, exported: Export, names: Sequence[str]) -> None:
    """Checks that `exported` contains no array with an unknown name.

    Known names are the entries of `names`, and `keys`, `last_step` and `count` with or without the
    prefix `waiting_`.

    Raises: ValueError: `exported` contains an array with an unknown name.
    """
    known = set(names)
    for name in ("keys", "last_step", "count"):
        known |= {name, f"waiting_{name}"}
    unknown = sorted(set(exported) - known)
    if unknown:
        raise ValueError(f"table {table.name!r}: cannot import {unknown}; it has {sorted(known)}.")


def _with_keys(
    params: DynamicTable,
    keys: Keys,
    exported: Export,
    table: TableSpec,
    num_shards: int,
) -> tuple[DynamicTable, Positions]:
    """Adds the keys of `exported` to a table, with their `last_step` and `count`.

    `_with_keys` writes no vectors and no slots, so the caller must write them. `keys` are the keys
    of `exported`. All other arguments have the same meaning as in `import_rows`.

    Returns: the new parameters, and the row index of each key.

    Raises: ValueError: see `import_rows`.
    """
    if params.keys is None:
        positions = _fixed_positions(table, keys, params.rows.shape[0], num_shards)
    else:
        maps, positions = _with_rows_for(
            table,
            params.keys,
            keys,
            exported,
            "",
            num_shards,
        )
        params = with_keys(params, maps)
    if params.waiting is None:
        num_waiting = len(exported.get("waiting_keys", ()))
        if num_waiting:
            warnings.warn(
                f"table {table.name!r} admits every key at once: the counts of {num_waiting} keys that waited for "
                "admission are dropped. They have no rows yet.",
                stacklevel=2,
            )
        return params, positions
    # A key with a row does not wait for admission, so the imported keys are removed from the map of
    # waiting keys.
    waiting = _without(params.waiting, keys, num_shards)
    if "waiting_keys" in exported:
        waiting_keys = _checked_keys(table, exported, "waiting_")
        waiting, _ = _with_rows_for(
            table,
            waiting,
            waiting_keys,
            exported,
            "waiting_",
            num_shards,
        )
    return params._replace(waiting=waiting), positions


def _written(
    array: PyTree,
    positions: Positions,
    values: PyTree,
    num_shards: int,
    where: str,
    name: str,
) -> PyTree:
    """Copies an array of all shards, and writes `values` to some rows of the copy.

    A copy of a JAX array has the same sharding as `array`. `values` are written in blocks of rows.
    The first call of `_put` copies the JAX array. Later calls of `_put` donate the copy from the
    first call, and update it in place.

    Args:
      array: array of all shards.
      positions: index of each row to write.
      values: the new rows, as an array or a `SavedArray`.
      num_shards: number of shards.
      where: subject of the error message, such as the name of the table.
      name: name of the array, for the error message.

    Raises: ValueError: numbers are too large for the dtype of `array`.
    """
    if isinstance(array, np.ndarray):
        array = array.copy()
    for first, rows in _blocks_of(values):
        rows = as_dtype(rows, array.dtype, where, name)
        block_positions = positions[first : first + len(rows)]
        if isinstance(array, np.ndarray):
            array[block_positions] = rows
            continue
        shard, row = np.divmod(block_positions, array.shape[0] // num_shards)
        # Each block of rows is padded to a power of two, because `_put` is compiled for each block
        # size. Entries of padding have a shard index that is out of range, so `_put` does not write
        # them.
        num_rows = block_positions.size
        padding = (0, padded_size(max(num_rows, 1)) - num_rows)
        shard = np.pad(shard, padding, constant_values=num_shards).astype(np.int32)
        row = np.pad(row, padding).astype(np.int32)
        rows = np.pad(rows, [padding, *[(0, 0)] * (rows.ndim - 1)])
        donated: tuple[int, ...] = ()
        if first:
            donated = (1,)
        put = jax.jit(
            _put,
            static_argnums=0,
            donate_argnums=donated,
            out_shardings=array.sharding,
        )
        array = put(num_shards, array, shard, row, rows)
    return array


def _blocks_of(values: PyTree) -> Blocks:
    """Blocks of rows of an array or a `SavedArray`.

    An array without rows gives one empty block.
    """
    if isinstance(values, SavedArray):
        yield from values.blocks()
        return
    for first in range(0, max(len(values), 1), ROWS_PER_BLOCK):
        yield first, values[first : first + ROWS_PER_BLOCK]


def _put(
    num_shards: int,
    array: Array,
    shard: Array,
    row: Array,
    values: Array,
) -> Array:
    by_shard = array.reshape(num_shards, -1, *array.shape[1:])
    written = by_shard.at[shard, row].set(values, mode="drop")
    return written.reshape(array.shape)


def room_needed(params: DynamicTable, exported: Export, table: TableSpec, num_shards: int) -> int:
    """Number of rows that each shard must have, so that `import_rows` has room for all keys.

    The arguments have the same meaning as in `import_rows`. `params.keys` must not be None, so
    tables with storage `RowNumbers` are not supported.
    """
    keys = _checked_keys(table, exported, "")
    return _keys_on_fullest_shard(params.keys, keys, num_shards)


def _keys_on_fullest_shard(maps: RowMap, keys: Keys, num_shards: int) -> int:
    """Number of keys on the fullest shard, after `keys` have been added to the keys in `maps`."""
    is_used = on_host(maps.last_step) != row_map.FREE
    present = join_keys(on_host(maps.high), on_host(maps.low))[is_used]
    added = join_keys(keys.high, keys.low)
    distinct = split_keys(np.union1d(present, added))
    owner = owners(distinct, num_shards)
    num_keys = np.bincount(owner, minlength=1)
    return int(num_keys.max())


def _checked_keys(table: TableSpec, exported: Export, prefix: str) -> Keys:
    where = f"table {table.name!r}"
    name = f"{prefix}keys"
    num_keys = len(exported.get(name, ()))
    numbers = np.asarray(_checked(table, exported, name, (num_keys,)))
    keys = split_keys(numbers, feature=f"{where}, imported {name}")
    check_fits(keys, _key_dtype(table), where)
    distinct, counts = np.unique(numbers, return_counts=True)
    refused = [*numbers[~keys.is_key], *distinct[counts > 1]]
    if refused:
        raise ValueError(
            f"{where}: imported {name} must be distinct and not -1, but {int(refused[0])} is not; -1 stands for no "
            "key."
        )
    return keys


def _checked(table: TableSpec, exported: Export, name: str, shape: tuple[int, ...]) -> PyTree:
    if name not in exported:
        raise ValueError(
            f"table {table.name!r}: imported rows need {name!r}; give 'keys' and 'values'."
        )
    array = exported[name]
    if np.shape(array) != shape:
        raise ValueError(
            f"table {table.name!r}: imported {name!r} has shape {np.shape(array)}, not {shape}."
        )
    return array


def _fixed_positions(table: TableSpec, keys: Keys, num_rows: int, num_shards: int) -> Positions:
    """Row index of each key in a table without a hash table.

    Without a hash table, the shard and the row of a key are computed from the key itself.

    Raises: ValueError: a key is not below `num_rows`.
    """
    capacity = num_rows // num_shards
    rows = local_rows(keys, num_shards, capacity)
    is_beyond = rows == NO_ROW
    if is_beyond.any():
        high = keys.high[is_beyond]
        low = keys.low[is_beyond]
        (key,) = join_keys(high[:1], low[:1])
        raise ValueError(
            f"table {table.name!r}: imported keys must be below {num_rows}, the number of rows, got {key}."
        )
    owner = owners(keys, num_shards).astype(np.int64)
    return owner * capacity + rows


def _without(maps: RowMap, removed: Keys, num_shards: int) -> RowMap:
    """Removes keys from the maps of all shards, and returns the new maps."""
    is_used = on_host(maps.last_step) != row_map.FREE
    if not is_used.any():
        return maps
    smaller = []
    for shard_map in unstack(maps, num_shards, 1):
        smaller.append(_removed(shard_map, removed))
    return stack(smaller, 1)


def _with_rows_for(
    table: TableSpec,
    maps: RowMap,
    keys: Keys,
    exported: Export,
    prefix: str,
    num_shards: int,
) -> tuple[RowMap, Positions]:
    """Adds keys to the maps of all shards, and returns the new maps and the row index of each key.

    Args:
      table: spec of the table.
      maps: maps of all shards, either of the keys with rows or of the waiting keys.
      keys: distinct keys to add.
      exported: imported arrays. The arrays `<prefix>last_step` and `<prefix>count` have the last
        step and the count of each key.
      prefix: prefix of the array names in `exported`, which is "" for keys with rows, or "waiting_"
        for keys that wait for admission.
      num_shards: number of shards.

    Raises: ValueError: a value of `last_step` or `count` is out of range, or a shard has too few
      free rows.
    """
    last_steps = _checked_counts(table, exported, f"{prefix}last_step", keys.shape)
    counts = _checked_counts(table, exported, f"{prefix}count", keys.shape)
    capacity = maps.last_step.shape[0] // num_shards
    owner = owners(keys, num_shards)
    positions = np.zeros(keys.shape, np.int64)
    larger = []
    for shard, shard_map in enumerate(unstack(maps, num_shards, 1)):
        is_owned = owner == shard
        shard_keys = jax.tree.map(lambda lane, mask=is_owned: lane[mask], keys)
        larger_map, assigned = _find_or_assign(
            shard_map,
            shard_keys,
            last_steps[is_owned],
            counts[is_owned],
        )
        rows = np.asarray(assigned)
        num_missing = int(np.sum(rows == NO_ROW))
        if num_missing:
            num_free = int(shard_map.num_free[0])
            num_used = np.count_nonzero(shard_map.last_step != row_map.FREE)
            num_rows = num_free + num_used
            needed = _keys_on_fullest_shard(maps, keys, num_shards)
            if prefix:
                actual = f"admission_capacity={num_rows}"
                enough = f"admission_capacity={needed}"
            else:
                actual = f"capacity={num_rows}"
                # All shards must have the same number of rows, so the shard with the most keys
                # determines this number.
                enough = f"vocabulary_size={needed * num_shards}"
            raise ValueError(
                f"table {table.name!r}: {rows.size} imported {prefix}keys need {num_free + num_missing} free rows, "
                f"but the shard has {num_free} ({actual}); grow the table to {enough}, which is {needed} on each "
                "shard."
            )
        positions[is_owned] = shard * capacity + rows
        larger.append(larger_map)
    return stack(larger, 1), positions


def _checked_counts(
    table: TableSpec,
    exported: Export,
    name: str,
    shape: tuple[int, ...],
) -> Int[np.ndarray, " n"]:
    """Array `name` of `exported` as int32, or zeros if `exported` does not contain the array.

    Raises: ValueError: a number in the array is negative or larger than `MAX_COUNT`.
    """
    if name not in exported:
        return np.zeros(shape, np.int32)
    numbers = np.asarray(_checked(table, exported, name, shape))
    if numbers.size and (numbers.min() < 0 or numbers.max() > row_map.MAX_COUNT):
        raise ValueError(
            f"table {table.name!r}: imported {name!r} must lie in [0, {row_map.MAX_COUNT}]."
        )
    return numbers.astype(np.int32)

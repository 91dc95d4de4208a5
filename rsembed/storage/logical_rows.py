"""Export and import of keyed rows, by key.

The result does not depend on row numbers, shards or the order in a file. Every array has the rows
of all shards, concatenated: row `r` of shard `s` has index `s * capacity + r`.
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
from rsembed.storage.hashed_rows import DynamicTable, stack, unstack
from rsembed.storage.hashed_rows import with_keys as with_map
from rsembed.storage.protocol import State, Storage, on_host
from rsembed.storage.row_map import Eviction, RowMap

ROWS_PER_BLOCK = 1 << 16
"""Number of rows that are written at once."""

_find_or_assign, _release = jax.jit(row_map.find_or_assign), jax.jit(row_map.release)
_squared_norms = jax.jit(lambda rows: jnp.sum(jnp.square(rows.astype(jnp.float32)), axis=1))
Blocks = Iterator[tuple[int, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """An array of a checkpoint that is still on disk.

    Attributes:
      shape: shape of the array.
      dtype: dtype of the array.
      read: function that reads the array and yields blocks `(number of the first row, rows)`. Its
        argument is an array to fill, or None for new arrays. An array of shape `()` has one row.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[np.ndarray | None], Blocks]

    def blocks(self) -> Blocks:
        """Blocks `(number of the first row, rows)` of a few MiB each, in the order of rows.

        Raises: CorruptCheckpointError: the file of a block is damaged.
        """
        return self.read(None)

    def whole(self) -> np.ndarray:
        """The whole array, in host memory.

        Raises: CorruptCheckpointError: the file is damaged.
        """
        array = np.empty(self.shape, self.dtype)
        for _ in self.read(array if self.shape else array.reshape(1)):
            pass
        return array


def as_dtype(values: ArrayLike, dtype: DTypeLike, where: str, name: str) -> np.ndarray:
    """Imported values in another dtype.

    Args:
      values: numbers from a user or a file.
      dtype: dtype of the result.
      where: beginning of the error message, such as the table.
      name: name of the values in the error message.

    Raises: ValueError: finite numbers are too large for `dtype`.
    """
    given = np.asarray(values)
    with np.errstate(over="ignore"):
        fitting: np.ndarray = given.astype(dtype, copy=False)
    if not np.can_cast(given.dtype, dtype) and (
        lost := int(np.sum(np.isfinite(given) & ~np.isfinite(fitting)))
    ):
        raise ValueError(
            f"{where}: {lost} numbers of imported {name!r} are too large for {fitting.dtype}; clip them, or take a "
            "wider dtype."
        )
    return fitting


def checked_slots(given: PyTree, template: PyTree, table: TableSpec) -> PyTree:
    """Slots that a user passes for a table, in the structure of `template`.

    Concrete slots are in host memory. Traced slots stay traced.

    Args:
      given: slots of a table as `EmbeddingCollection.slots` returns them, or as a file has them: a
        dictionary by name.
      template: slots with the shapes and dtypes that fit the table.
      table: spec of the table, for its name and rule in error messages.

    Raises:
      TypeError: a slot is not an array of numbers.
      ValueError: slots are missing or unknown, or a slot has another shape or dtype. The message
        names the table and the slot.
    """
    where, wanted, found = f"table {table.name!r}", _by_path(template), _by_path(given)
    if found.keys() != wanted.keys():
        # Files have numbers instead of names if the rule has no names for its slots.
        by_number = {str(number): leaf for number, leaf in enumerate(wanted.values())}
        if found.keys() != by_number.keys():
            raise ValueError(
                f"{where}: its slots must be {list(wanted)}, those of {type(table.optimizer).__name__}, got "
                f"{list(found)}; give them as collection.slots(state) returns them."
            )
        wanted = by_number
    arrays = []
    for name, shaped in wanted.items():
        array = found[name]
        check_type(array, Num[np.ndarray, "..."], f"{where}: its slot {name!r}")
        if not is_traced(array):
            array = on_host(array)  # The slot may be on another mesh.
        has, wants = (f"{x.dtype.name}{list(x.shape)}" for x in (array, shaped))
        if has != wants:
            raise ValueError(
                f"{where}: its slot {name!r} must be {wants}, got {has}. Slots have a row for each row of the table; "
                "load_collection(..., resize=True) makes those of new rows."
            )
        arrays.append(array)
    return jax.tree.unflatten(jax.tree.structure(template), arrays)


def _by_path(tree: PyTree) -> dict[str, PyTree]:
    """Leaves by path. Paths are text, so a field and a dictionary key of one name are equal."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def places_by_key(
    params: DynamicTable, table: TableSpec, num_shards: int
) -> tuple[Int[np.ndarray, " n"], dict[str, np.ndarray]]:
    """Row indices of all keys, and all facts about the keys, in ascending order of the keys.

    Args:
      params: rows of all shards.
      table: spec of the table.
      num_shards: number of shards.

    Returns: the row indices, and a dictionary of arrays. It has `keys`, in the table's `key_dtype`.
      A hash table adds `last_step` and `count`. With waiting keys, it also has `waiting_keys`,
      `waiting_last_step` and `waiting_count`.

    Raises: ValueError: a key does not fit `key_dtype`.
    """
    if params.keys is None:
        keys = np.arange(params.rows.shape[0])
        places = _fixed_places(table, split_keys(keys), keys.size, num_shards)
        return places, {"keys": keys.astype(_key_dtype(table))}
    places, known = _by_key(table, params.keys)
    waiting = {} if params.waiting is None else _by_key(table, params.waiting)[1]
    return places, known | {f"waiting_{name}": array for name, array in waiting.items()}


def rows_to_leave(
    params: DynamicTable,
    table: TableSpec,
    policy: Eviction,
    is_own: np.ndarray | bool = True,
    *,
    keep: int | None,
    unused_for: int | None,
    norm_below: float | None,
    step: int,
) -> tuple[Int[np.ndarray, " n"], dict[str, np.ndarray]]:
    """Row indices of the keys to evict, and their `keys`, `last_step` and `count`.

    A key is evicted if at least one of `keep`, `unused_for` and `norm_below` selects it. Each of
    them may be None, which selects no key. The result is in ascending order of the keys.

    Args:
      params: rows of all shards.
      table: spec of the table.
      policy: how the worth of a row is computed, see `row_map.worth`.
      is_own: mask of the rows of the table, if several tables share the storage. True, the default,
        means all rows.
      keep: number of rows to keep, over all shards. Rows of the smallest worth are evicted. If rows
        have equal worth, the smallest keys are evicted.
      unused_for: evicts keys that were not used for more steps than this.
      norm_below: evicts keys with an L2 norm of their row below this.
      step: number of the next step.
    """
    known, last_step = params.keys, on_host(params.keys.last_step)
    is_used, leaves = (last_step != row_map.FREE) & is_own, np.zeros(last_step.shape, bool)
    if unused_for is not None:
        leaves |= is_used & (step - last_step.astype(np.int64) > unused_for)
    if norm_below is not None:
        squares = on_host(_squared_norms(params.rows))
        leaves |= is_used & (np.sqrt(squares.astype(np.float64)) < norm_below)
    if keep is not None:
        used = np.flatnonzero(is_used)
        high, low, worth = (
            on_host(lane)[used] for lane in (known.high, known.low, row_map.worth(known, policy))
        )
        lanes = join_keys(high, low, dtype=_key_dtype(table)), worth
        leaves[used[np.lexsort(lanes)[: max(used.size - keep, 0)]]] = True
    return _by_key(table, known, leaves)


def check_reasons(where: str, **given: float | None) -> None:
    """Checks the reasons for an eviction, such as `keep=100`.

    Args:
      where: beginning of the error message.
      given: all reasons by name. None for a reason that does not apply.

    Raises: TypeError or ValueError: all reasons are None, or one has a wrong type or value.
    """
    reasons = {name: value for name, value in given.items() if value is not None}
    if not reasons:
        raise ValueError(f"{where}: give one or more of {', '.join(given)}.")
    for name, value in reasons.items():
        check_type(
            value, Annotated[float if name == "norm_below" else int, "[0, inf)"], f"{where}: {name}"
        )


def _key_dtype(table: TableSpec) -> str:
    return cast(str, cast(Storage, table.storage).key_dtype)


def array_names(table: TableSpec, slots: Sequence[PyTree]) -> list[str]:
    """Names of the vectors and slots of a table in exports, in the order of the state.

    A state for serving has no slots, and gets no names for them.
    """
    names = getattr(table.optimizer.slot_type, "_fields", range(len(slots)))
    return ["values", *(f"slot_{name}" for name in names)][: 1 + len(slots)]


def _by_key(
    table: TableSpec, maps: RowMap, marks: np.ndarray | bool = True
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Indices of the marked rows with a key, and their `keys`, `last_step` and `count`.

    The result is in ascending order of the keys.
    """
    high, low, last_step, count = map(on_host, (maps.high, maps.low, maps.last_step, maps.counts))
    places = np.flatnonzero((last_step != row_map.FREE) & marks)
    keys = join_keys(high[places], low[places], dtype=_key_dtype(table))
    order = np.argsort(keys)
    places = places[order]
    return places, {"keys": keys[order], "last_step": last_step[places], "count": count[places]}


def import_rows(
    params: DynamicTable,
    slots: Sequence[PyTree],
    exported: Mapping[str, PyTree],
    table: TableSpec,
    num_shards: int,
) -> State:
    """Parameters and slots after the rows of `exported` are written, outside `jit`.

    Keys that the table already has are overwritten. New keys get free rows. Rows and slots keep
    their devices. The arrays of keys are returned as NumPy arrays.

    Args:
      params: rows of all shards.
      slots: slots of all shards.
      exported: result of `DynamicRows.rows`, or part of it. Values and slots may be `SavedArray`s.
        Only `keys` and `values` are required. Missing slots start at their initial values. A
        missing `last_step` or `count` is 0. If the table admits every key at once, waiting keys are
        dropped, with a warning.
      table: spec of the table.
      num_shards: number of shards.

    Raises: ValueError: arrays do not fit the table or each other, a key occurs twice or does not
      fit `key_dtype`, or there are too few free rows.
    """
    names, of_keys = array_names(table, slots), ("keys", "last_step", "count")
    known = {*names, *of_keys, *(f"waiting_{name}" for name in of_keys)}
    if unknown := sorted(set(exported) - known):
        raise ValueError(f"table {table.name!r}: cannot import {unknown}; it has {sorted(known)}.")
    where, num_keys, arrays = (
        f"table {table.name!r}",
        len(exported.get("keys", ())),
        (params.rows, *slots),
    )
    _checked(table, exported, "keys", (num_keys,))
    parts: dict[str, PyTree] = {}
    for name, array in zip(names, arrays, strict=True):
        if name == "values" or name in exported:
            parts[name] = _checked(table, exported, name, (num_keys, *array.shape[1:]))
    if len(parts) < len(names):
        values = parts["values"]
        values = as_dtype(
            values.whole() if isinstance(values, SavedArray) else values,
            np.float32,
            where,
            "values",
        )
        parts = (
            dict(zip(names[1:], table.optimizer.init_slots(jnp.asarray(values)), strict=True))
            | parts
        )
    params, places = with_keys(params, exported, table, num_shards)
    own = zip(names, arrays, strict=True)
    rows, *kept = (
        _written(array, places, parts[name], num_shards, where, name) for name, array in own
    )
    return params._replace(rows=rows), tuple(kept)


def with_keys(
    params: DynamicTable, exported: Mapping[str, PyTree], table: TableSpec, num_shards: int
) -> tuple[DynamicTable, Int[np.ndarray, " n"]]:
    """Parameters after the keys of `exported` are added, and the row index of each key.

    The steps and counts of the keys are added, too. The vectors are not written yet. For the
    arguments, see `import_rows`.

    Raises: ValueError: see `import_rows`.
    """
    keys = _checked_keys(table, exported, "")
    known_keys, waiting = params.keys, params.waiting
    if known_keys is None:
        places = _fixed_places(table, keys, params.rows.shape[0], num_shards)
    else:
        known_keys, places = _place(table, known_keys, keys, exported, "", num_shards)
    if waiting is not None:
        waiting = _without(waiting, keys, num_shards)  # Imported keys have a row now.
    if waiting is not None and "waiting_keys" in exported:
        waiting_keys = _checked_keys(table, exported, "waiting_")
        waiting, _ = _place(table, waiting, waiting_keys, exported, "waiting_", num_shards)
    elif num_waiting := len(exported.get("waiting_keys", ())):
        warnings.warn(
            f"table {table.name!r} admits every key at once: the counts of {num_waiting} keys that waited for "
            "admission are dropped. They have no rows yet.",
            stacklevel=2,
        )
    if known_keys is not None:
        params = with_map(params, known_keys)
    return params._replace(waiting=waiting), places


def _written(
    array: PyTree,
    places: Int[np.ndarray, " n"],
    values: PyTree,
    num_shards: int,
    where: str,
    name: str,
) -> PyTree:
    """A copy of an array of all shards, with `values` in some rows, on the devices of the array.

    The first block copies the array. Later blocks are written in place.

    Args:
      array: array of all shards.
      places: index of each row to write.
      values: the rows, as an array or a `SavedArray`.
      num_shards: number of shards.
      where: beginning of the error message.
      name: name of the values in the error message.

    Raises: ValueError: numbers are too large for the dtype of `array`.
    """
    if isinstance(values, SavedArray):
        blocks = values.blocks()
    else:
        starts = range(0, max(len(values), 1), ROWS_PER_BLOCK)
        blocks = ((first, values[first : first + ROWS_PER_BLOCK]) for first in starts)
    if isinstance(array, np.ndarray):
        array = array.copy()
    for first, rows in blocks:
        rows, own = as_dtype(rows, array.dtype, where, name), places[first : first + len(rows)]
        if isinstance(array, np.ndarray):
            array[own] = rows
            continue
        shard, row = np.divmod(own, array.shape[0] // num_shards)
        padding = (0, padded_size(max(own.size, 1)) - own.size)
        shard = np.pad(shard, padding, constant_values=num_shards).astype(np.int32)
        block = np.pad(rows, [padding, *[(0, 0)] * (rows.ndim - 1)])
        put = jax.jit(
            _put, static_argnums=0, donate_argnums=1 if first else (), out_shardings=array.sharding
        )
        array = put(num_shards, array, shard, np.pad(row, padding).astype(np.int32), block)
    return array


def _put(num_shards: int, array: Array, shard: Array, row: Array, values: Array) -> Array:
    by_shard = array.reshape(num_shards, -1, *array.shape[1:])
    return by_shard.at[shard, row].set(values, mode="drop").reshape(array.shape)


def room_needed(
    params: DynamicTable, exported: Mapping[str, PyTree], table: TableSpec, num_shards: int
) -> int:
    """Number of rows that the fullest shard of a hash table needs for `import_rows`."""
    return _most(params.keys, _checked_keys(table, exported, ""), num_shards)


def _most(maps: RowMap, keys: Keys, num_shards: int) -> int:
    """Largest number of keys on one shard, if `keys` are added to the maps of all shards."""
    high, low, last_step = map(on_host, (maps.high, maps.low, maps.last_step))
    present = join_keys(high, low)[last_step != row_map.FREE]
    distinct = split_keys(np.union1d(present, join_keys(keys.high, keys.low)))
    return int(np.bincount(owners(distinct, num_shards), minlength=1).max())


def _checked_keys(table: TableSpec, exported: Mapping[str, PyTree], prefix: str) -> Keys:
    where, name = f"table {table.name!r}", f"{prefix}keys"
    numbers = np.asarray(_checked(table, exported, name, (len(exported.get(name, ())),)))
    keys = split_keys(numbers, feature=f"{where}, imported {name}")
    check_fits(keys, _key_dtype(table), where)
    distinct, counts = np.unique(numbers, return_counts=True)
    if bad := [*numbers[~keys.is_key], *distinct[counts > 1]]:
        raise ValueError(
            f"{where}: imported {name} must be distinct and not -1, but {int(bad[0])} is not; -1 stands for no key."
        )
    return keys


def _checked(
    table: TableSpec, exported: Mapping[str, PyTree], name: str, shape: tuple[int, ...]
) -> PyTree:
    if name not in exported:
        raise ValueError(
            f"table {table.name!r}: imported rows need {name!r}; give 'keys' and 'values'."
        )
    if np.shape(exported[name]) != shape:
        raise ValueError(
            f"table {table.name!r}: imported {name!r} has shape {np.shape(exported[name])}, not {shape}."
        )
    return exported[name]


def _fixed_places(table: TableSpec, keys: Keys, num_rows: int, num_shards: int) -> np.ndarray:
    """Row index of each key in a table without a hash table.

    Raises: ValueError: a key is out of range.
    """
    capacity = num_rows // num_shards
    rows = local_rows(keys, num_shards, capacity)
    if (is_beyond := rows == NO_ROW).any():
        (key,) = join_keys(keys.high[is_beyond][:1], keys.low[is_beyond][:1])
        raise ValueError(
            f"table {table.name!r}: imported keys must be below {num_rows}, the number of rows, got {key}."
        )
    return owners(keys, num_shards).astype(np.int64) * capacity + rows


def _without(maps: RowMap, gone: Keys, num_shards: int) -> RowMap:
    """The maps of all shards after the keys in `gone` are removed."""
    high, low, last_step = map(on_host, (maps.high, maps.low, maps.last_step))
    is_gone = (last_step != row_map.FREE) & np.isin(
        join_keys(high, low), join_keys(gone.high, gone.low)
    )
    if not is_gone.any():
        return maps
    by_shard = is_gone.reshape(num_shards, -1)
    rows = np.where(by_shard, np.arange(by_shard.shape[1]), NO_ROW).astype(np.int32)
    return stack(list(map(_release, unstack(maps, num_shards, 1), rows)), 1)


def _place(
    table: TableSpec,
    maps: RowMap,
    keys: Keys,
    exported: Mapping[str, PyTree],
    prefix: str,
    num_shards: int,
) -> tuple[RowMap, np.ndarray]:
    """The maps of all shards after these keys are added, and the row index of each key.

    Args:
      table: spec of the table.
      maps: maps of all shards, of the keys with rows or of the waiting keys.
      keys: distinct keys.
      exported: imported arrays, with the steps and counts of the keys.
      prefix: prefix of their names: "" for keys with rows, "waiting_" for waiting keys.
      num_shards: number of shards.

    Raises: ValueError: a step or a count is out of range, or a shard has too few free rows.
    """
    lanes: list[np.ndarray] = []
    for name in (f"{prefix}last_step", f"{prefix}count"):
        zeros = np.zeros(keys.shape, np.int32)
        numbers = np.asarray(
            _checked(table, exported, name, keys.shape) if name in exported else zeros
        )
        if numbers.size and (numbers.min() < 0 or numbers.max() > row_map.MAX_COUNT):
            raise ValueError(
                f"table {table.name!r}: imported {name!r} must lie in [0, {row_map.MAX_COUNT}]."
            )
        lanes.append(numbers.astype(np.int32))
    capacity, owner = maps.last_step.shape[0] // num_shards, owners(keys, num_shards)
    places, placed = np.zeros(keys.shape, np.int64), []
    for shard, own_map in enumerate(unstack(maps, num_shards, 1)):
        is_own, free = owner == shard, int(own_map.num_free[0])
        own_map, found = _find_or_assign(
            own_map, *jax.tree.map(lambda lane, own=is_own: lane[own], (keys, *lanes))
        )
        rows = np.asarray(found)
        if num_left := int(np.sum(rows == NO_ROW)):
            num_rows = (
                free + int((own_map.last_step != row_map.FREE).sum()) - (rows.size - num_left)
            )
            what = f"admission_capacity={num_rows}" if prefix else f"capacity={num_rows}"
            most = _most(maps, keys, num_shards)
            # All devices have equally many rows, together perhaps more than vocabulary_size.
            enough = (
                f"admission_capacity={most}" if prefix else f"vocabulary_size={most * num_shards}"
            )
            raise ValueError(
                f"table {table.name!r}: {rows.size} imported {prefix}keys need {free + num_left} free rows, but the "
                f"shard has {free} ({what}); grow the table to {enough}, which is {most} on each shard."
            )
        places[is_own] = shard * capacity + rows
        placed.append(own_map)
    return stack(placed, 1), places

"""Rows out of a dynamic table and into one, by key: row numbers, shards and file order decide nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW
from rsembed.sok import row_map
from rsembed.sok.dynamic_table import DynamicTable, DynamicTableSpec
from rsembed.sok.keys import Keys, join_keys, split_keys
from rsembed.sok.row_map import RowMap


def export(spec: DynamicTableSpec, table: DynamicTable) -> dict[str, np.ndarray]:
    """Everything that belongs to keys, in ascending order of the keys (copies on the host).

    Returns: `keys` (of `spec.key_dtype`), `values`, `last_step`, `count`, one `slot_<name>` per optimizer slot; and
    with admission `waiting_keys`, `waiting_last_step` and `waiting_count`.

    Raises: ValueError: a key does not fit `spec.key_dtype`.
    """
    rows, exported = _keys_of(spec, table.keys, "")
    exported["values"] = np.asarray(table.rows)[rows]
    for name, slot in zip(slot_names(spec, len(table.slots)), table.slots, strict=True):
        exported[name] = np.asarray(slot)[rows]
    if table.waiting is not None:
        exported |= _keys_of(spec, table.waiting, "waiting_")[1]
    return exported


def slot_names(spec: DynamicTableSpec, num_slots: int) -> list[str]:
    """What `export` calls the optimizer slots."""
    fields = getattr(spec.optimizer.slot_type, "_fields", range(num_slots))
    return [f"slot_{field}" for field in fields]


def _keys_of(spec: DynamicTableSpec, keys: RowMap, prefix: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    last_step, count = np.asarray(keys.last_step), np.asarray(keys.counts)
    rows = np.flatnonzero(last_step != row_map.FREE)
    joined = join_keys(np.asarray(keys.high)[rows], np.asarray(keys.low)[rows], dtype=spec.key_dtype)
    order = np.argsort(joined)
    rows = rows[order]
    return rows, {f"{prefix}keys": joined[order], f"{prefix}last_step": last_step[rows], f"{prefix}count": count[rows]}


def import_rows(spec: DynamicTableSpec, table: DynamicTable, exported: Mapping[str, Any]) -> DynamicTable:
    """The table with the rows of `exported`; keys that it has already are overwritten, new ones get free rows.

    Args:
      spec: of the table.
      table: its state, not inside `jit`.
      exported: as from `export`; of several shards, the concatenation of what belongs here. Only `keys` and `values`
        are needed: without them slots start fresh, `last_step` and `count` at 0. Keys that wait for admission are not
        needed where every key is admitted at once.

    Raises: ValueError: arrays do not fit the table or each other, a key occurs twice, or there are too few free rows.
    """
    keys, num_keys = _checked_keys(spec, exported, "")
    names = slot_names(spec, len(table.slots))
    known = {"keys", "values", "last_step", "count", "waiting_keys", "waiting_last_step", "waiting_count", *names}
    if unknown := sorted(set(exported) - known):
        raise ValueError(f"table {spec.name!r}: cannot import {unknown}; it has {sorted(known)}.")
    values = jnp.asarray(_checked(spec, exported, "values", (num_keys, spec.embedding_dim)), jnp.float32)
    parts = [values, *spec.optimizer.init_slots(values)]
    for number, name in enumerate(names, start=1):
        if name in exported:
            parts[number] = jnp.asarray(_checked(spec, exported, name, parts[number].shape), parts[number].dtype)
    known_keys, rows = _place(spec, table.keys, keys, exported, "")
    arrays = api.scatter_rows((table.rows, *table.slots), rows, parts)
    waiting = table.waiting
    if waiting is not None and "waiting_keys" in exported:
        waiting, _ = _place(spec, waiting, _checked_keys(spec, exported, "waiting_")[0], exported, "waiting_")
    return table._replace(keys=known_keys, rows=arrays[0], slots=tuple(arrays[1:]), waiting=waiting)


def _checked_keys(spec: DynamicTableSpec, exported: Mapping[str, Any], prefix: str) -> tuple[Keys, int]:
    name = f"{prefix}keys"
    numbers = np.asarray(_checked(spec, exported, name, (len(exported.get(name, ())),)))
    keys = split_keys(numbers, feature=f"table {spec.name!r}, imported {name}")
    distinct, counts = np.unique(numbers, return_counts=True)
    if not keys.is_key.all() or (counts > 1).any():
        bad = numbers[~keys.is_key] if not keys.is_key.all() else distinct[counts > 1]
        raise ValueError(f"table {spec.name!r}: imported {name} must be distinct and not -1, but {int(bad[0])} is not.")
    return Keys(*map(jnp.asarray, keys)), numbers.size


def _checked(spec: DynamicTableSpec, exported: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Any:
    if name not in exported:
        raise ValueError(f"table {spec.name!r}: imported rows need {name!r}, got {sorted(exported)}.")
    if np.shape(exported[name]) != shape:
        raise ValueError(f"table {spec.name!r}: imported {name!r} has shape {np.shape(exported[name])}, not {shape}.")
    return exported[name]


def _place(
    spec: DynamicTableSpec, keys_of_rows: RowMap, keys: Keys, exported: Mapping[str, Any], prefix: str
) -> tuple[RowMap, Int[Array, " nnz"]]:
    n = keys.low.shape[0]
    lanes = []
    for name in (f"{prefix}last_step", f"{prefix}count"):
        numbers = np.asarray(_checked(spec, exported, name, (n,)) if name in exported else np.zeros(n, np.int32))
        if n and (numbers.min() < 0 or numbers.max() > row_map.MAX_COUNT):
            raise ValueError(f"table {spec.name!r}: imported {name!r} must lie in [0, {row_map.MAX_COUNT}].")
        lanes.append(jnp.asarray(numbers.astype(np.int32)))
    placed, rows = _find_or_assign(keys_of_rows, keys, *lanes)
    num_left = int(jnp.sum(rows == NO_ROW))
    if num_left:
        capacity, free = keys_of_rows.last_step.shape[0], int(keys_of_rows.num_free[0])
        what = f"admission_capacity={capacity}" if prefix else f"capacity={capacity}"
        raise ValueError(
            f"table {spec.name!r}: {n} imported {prefix}keys need {free + num_left} free rows, but the shard has "
            f"{free} ({what}); grow the table, or spread it over more shards."
        )
    return placed, rows


@jax.jit
def _find_or_assign(keys_of_rows: RowMap, keys: Keys, steps: Array, counts: Array) -> tuple[RowMap, Array]:
    rows = row_map.find(keys_of_rows, keys)
    new = keys._replace(is_key=rows == NO_ROW)
    keys_of_rows, new_rows, _ = row_map.assign(keys_of_rows, new, jnp.int32(0), counts)
    rows = jnp.where(new.is_key, new_rows, rows)
    return row_map.touch(keys_of_rows, rows, steps, counts), rows

"""Rows of tables out and in by key: into arrays of numpy, into a checkpoint, onto any number of devices."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rsembed import checkpoint
from rsembed.checkpoint.states import PickedRows
from rsembed.checks import validated
from rsembed.collection.rows import asks_nobody
from rsembed.homes.home import on_host
from rsembed.homes.logical_rows import array_names, places_by_key, room_needed
from rsembed.sok.row_numbers import RowNumbers
from rsembed.sok.sharded_table import ShardedTable, TableState, on_devices
from rsembed.sok.variables import EmbeddingVariable, grown, state_of


@validated
def export_rows(variable: EmbeddingVariable) -> dict[str, np.ndarray]:
    """All keys with what belongs to them, from all devices, in ascending order of the keys (copies on the host).

    Returns: `keys`, `values`, one `slot_<name>` per optimizer slot; of a hash table `last_step` and `count`, and
      `first_step` if it evicts by age; with admission by count `waiting_keys`, `waiting_last_step` and `waiting_count`.
      Equal tables give equal arrays, whatever the number of devices.
    """
    state, table = state_of(variable), variable.table
    return table.home.rows(state.shards, state.slots, table.spec, table.context.num_devices)


@validated
def assign_rows(variable: EmbeddingVariable, rows: Mapping[str, Any]) -> None:
    """Writes rows by key: keys that the table has are overwritten, a hash table gets those that it has not.

    Args:
      variable: the table.
      rows: `keys [n]` and `values [n, dim]`, and what else `export_rows` returns; slots that are missing start fresh.
        Without `last_step` they count as used now.

    Raises: ValueError: keys repeat, are out of range or find no room, or an array does not fit.
    """
    state = state_of(variable)
    if "last_step" not in rows:
        # Else they would be the first to go.
        rows = {**rows, "last_step": np.full(np.shape(rows.get("keys", ())), int(state.step))}
    variable.set_value(_with_rows(variable.table, state, rows))


def _with_rows(table: ShardedTable, state: TableState, rows: Mapping[str, Any]) -> TableState:
    """The state with rows written."""
    num_devices = table.context.num_devices
    if table.grows and "keys" in rows:
        num_rows, num_waiting = room_needed(state.shards, rows, table.spec, num_devices)
        there, waiting = state.shards.rows.shape[0] // num_devices, state.shards.waiting
        if num_rows > there or (waiting is not None and num_waiting > waiting.last_step.shape[0] // num_devices):
            state = grown(table, state, max(num_rows, there), num_waiting)
    written = table.home.with_rows(state.shards, state.slots, rows, table.spec, num_devices)
    shards, slots = table.engine.devices.place_from_host(written, table.engine.devices.split)
    return state._replace(shards=shards, slots=slots)


@validated
def dump(path: str | os.PathLike[str], variables: Any, optimizer: Any = None) -> None:
    """Writes keys, rows, optimizer state and step of tables, all of one instant, as a checksummed checkpoint.

    Args:
      path: a folder that does not exist yet.
      variables: `EmbeddingVariable`s, or a model that has some.
      optimizer: accepted, as published; states belong to their tables, and are always written.

    Raises:
      ValueError: there is none, or two have the same name.
      FileExistsError: the folder exists.
    """
    del optimizer
    by_name = _by_name(variables)
    tree, tables = {}, {}
    for name, variable in by_name.items():
        state, spec = state_of(variable), variable.table.spec
        places, by_key = places_by_key(state.shards, spec, variable.table.context.num_devices)
        arrays = zip(array_names(spec, state.slots), (state.shards.rows, *state.slots), strict=True)
        tree[name] = by_key | {part: PickedRows(array, places) for part, array in arrays}
        used_rows = _num_used(variable, len(places))
        tables[name] = {**_description(variable.table), "step": int(state.step), "used_rows": used_rows}
    checkpoint.save(path, tree, step=max(t["step"] for t in tables.values()), metadata={"sok_tables": tables})


@validated
def load(path: str | os.PathLike[str], variables: Any, optimizer: Any = None) -> None:
    """Makes tables what they were at the time of a `dump`, on this run's devices, however many there were then.

    Without hash table, the rows behind the last one that was ever trained may differ in number.

    Args:
      path: the folder.
      variables: as for `dump`; keys that the dump does not have are forgotten.
      optimizer: accepted, as published.

    Raises:
      ValueError: the dump has other tables, or they have other dims, optimizers, a dtype that cannot hold the dumped
        one, or more keys than there is room for.
      CorruptCheckpointError: the files were changed.
    """
    del optimizer
    by_name = _by_name(variables)
    tables = checkpoint.manifest(path)["metadata"].get("sok_tables", {})
    if set(tables) != set(by_name):
        raise ValueError(f"{path} holds the tables {sorted(tables)}, the model has {sorted(by_name)}.")
    tree, states = checkpoint.load(path).tree, {}
    for name, variable in by_name.items():
        _check_fits(path, name, tables[name], tree[name], variable.table)
        rows = _refitted(variable, tree[name], tables[name]["used_rows"])
        step = jax.device_put(jnp.asarray(tables[name]["step"], jnp.int32), variable.get_value().step.sharding)
        empty = _as_made(variable.table, state_of(variable))
        states[name] = _with_rows(variable.table, empty, rows)._replace(step=step)
    for name, variable in by_name.items():  # all of them, or none
        variable.set_value(states[name])


def _check_fits(
    path: str | os.PathLike[str], name: str, then: dict[str, Any], rows: Mapping[str, Any], table: ShardedTable
) -> None:
    """Raises: ValueError: the rows of a dump are not those of such a table."""
    now = _description(table)
    there, here = (jnp.finfo(dtype) for dtype in (rows["values"].dtype, table.spec.dtype))
    if there.nmant > here.nmant or there.maxexp > here.maxexp:  # a wider one holds every value as it is
        then, now = then | {"dtype": str(there.dtype)}, now | {"dtype": str(here.dtype)}
    if differs := {key: (then[key], value) for key, value in now.items() if then[key] != value}:
        raise ValueError(
            f"table {name!r} differs from {path} in {differs} (there, here); make it as it was, or take over "
            "keys and values alone, with assign_rows."
        )


def _description(table: ShardedTable) -> dict[str, Any]:
    """What a dump and the table that it goes into must agree in."""
    spec = table.spec
    return {
        "use_hashtable": table.use_hashtable,
        "embedding_dim": spec.embedding_dim,
        "optimizer": spec.optimizer.short_name(),
        "rule": spec.optimizer.identity,
    }


def _by_name(variables: Any) -> dict[str, EmbeddingVariable]:
    if isinstance(variables, EmbeddingVariable):
        variables = [variables]
    if not isinstance(variables, Sequence):
        variables = [node for _, node in nnx.iter_graph(variables)]
    found = [variable for variable in variables if isinstance(variable, EmbeddingVariable)]
    names = [variable.table.spec.name for variable in found]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated or not found:
        what = f"the names {repeated} occur more than once; pass name= to the layers" if found else "there is none"
        raise ValueError(f"dump and load need embedding variables with different names: {what}.")
    return dict(zip(names, found, strict=True))


@functools.partial(jax.jit, static_argnums=0)
def _as_made(table: ShardedTable, state: TableState) -> TableState:
    """The state, as large as it is, before anything was learned."""

    def on_device(own: TableState) -> tuple[Any, Any]:
        capacity, shard = own.shards.rows.shape[0], table.engine.devices.index()
        return table.home.start(own.shards.key[0], table.spec, capacity, shard=shard)

    return table.on_shards(on_device, state)


@functools.partial(jax.jit, static_argnums=0)
def _last_used(table: ShardedTable, state: TableState) -> Any:
    """Of every device: see `RowNumbers.last_used`."""

    @asks_nobody
    def on_device(table: ShardedTable, own: TableState) -> Any:
        home, shard = cast(RowNumbers, table.home), table.engine.devices.index()
        return home.last_used(own.shards, own.slots, table.spec, shard)

    return on_devices(on_device, [table], [state])[0]


def _num_used(variable: EmbeddingVariable, num_rows: int) -> int:
    """How many rows a table must have room for to take a dump: without hash table, all but those that none trained."""
    table = variable.table
    if not isinstance(table.home, RowNumbers):
        return num_rows
    last = on_host(_last_used(table, state_of(variable))).astype(np.int64)
    devices = np.arange(last.size)
    return int(np.where(last < 0, 0, last * last.size + devices + 1).max())


def _refitted(variable: EmbeddingVariable, rows: Mapping[str, Any], num_used: int) -> Mapping[str, Any]:
    """The rows of a dump that the table has, if it has no hash table; only unused ones are left out."""
    table, there = variable.table, len(rows["keys"])
    here = table.spec.vocabulary_size
    if table.use_hashtable or there <= here:
        return rows
    if num_used > here:
        devices = table.context.num_devices
        raise ValueError(
            f"table {table.spec.name!r} has {here} rows, {here // devices} on each of {devices} devices, but the "
            f"dump has used {num_used}; make max_vocabulary_size_per_gpu at least {-(-num_used // devices)}."
        )
    return {name: array[:here] for name, array in rows.items()}

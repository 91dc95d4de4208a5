"""Rows of tables out and in by key: into arrays of numpy, into a checkpoint, onto any number of devices."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PRNGKeyArray

from rsembed import checkpoint
from rsembed.homes.logical_rows import array_names, export, import_rows
from rsembed.keys import owners, split_keys
from rsembed.sok import static_table
from rsembed.sok.sharded_table import ShardedTable, TableState
from rsembed.sok.variables import EmbeddingVariable, grown, state_of


def export_rows(variable: EmbeddingVariable) -> dict[str, np.ndarray]:
    """All keys with what belongs to them, from all devices, in ascending order of the keys (copies on the host).

    Returns: `keys`, `values`, one `slot_<name>` per optimizer slot; of a hash table `last_step` and `count`, and with
      admission `waiting_keys`, `waiting_last_step` and `waiting_count`. Equal tables give equal arrays, whatever the
      number of devices.
    """
    return export(variable.table.spec, state_of(variable).shards, variable.table.context.num_devices)


def assign_rows(variable: EmbeddingVariable, rows: Mapping[str, Any]) -> None:
    """Writes rows by key: keys that the table has are overwritten, a hash table gets those that it has not.

    Args:
      variable: the table.
      rows: `keys [n]` and `values [n, dim]`, and what else `export_rows` returns; slots that are missing start fresh.

    Raises: ValueError: keys repeat, are out of range or find no room, or an array does not fit.
    """
    variable.set_value(_with_rows(variable.table, state_of(variable), rows))


def _with_rows(table: ShardedTable, state: TableState, rows: Mapping[str, Any]) -> TableState:
    num_devices = table.context.num_devices
    if table.spec.when_full == "grow" and "keys" in rows:
        lanes = split_keys(rows["keys"], feature=f"table {table.spec.name!r}")
        most = int(np.bincount(owners(lanes, num_devices), minlength=1)[:num_devices].max())
        if most > state.shards.rows.shape[0] // num_devices:
            state = grown(table, state, most)
    shards = import_rows(table.spec, state.shards, rows, num_devices)

    def placed(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array):
            return leaf
        return jax.make_array_from_callback(leaf.shape, table.context.sharding, lambda index: leaf[index])

    return state._replace(shards=jax.tree.map(placed, shards))


def dump(path: str | os.PathLike[str], variables: Any) -> None:
    """Writes keys, rows, optimizer state and step of tables, all of one instant, as a checksummed checkpoint.

    Args:
      path: a folder that does not exist yet.
      variables: `EmbeddingVariable`s, or a model that has some.

    Raises:
      ValueError: there is none, or two have the same name.
      FileExistsError: the folder exists.
    """
    by_name = _by_name(variables)
    tree = {name: export_rows(variable) for name, variable in by_name.items()}
    tables = {
        name: {
            **_description(variable.table),
            "step": int(variable.get_value().step),
            "used_rows": _num_used(variable, tree[name]),
        }
        for name, variable in by_name.items()
    }
    checkpoint.save(path, tree, step=max(t["step"] for t in tables.values()), metadata={"sok_tables": tables})


def load(path: str | os.PathLike[str], variables: Any) -> None:
    """Makes tables what they were at the time of a `dump`, on this run's devices, however many there were then.

    Without hash table, the rows behind the last one that was ever trained may differ in number.

    Args:
      path: the folder.
      variables: as for `dump`; keys that the dump does not have are forgotten.

    Raises:
      ValueError: the dump has other tables, or they have other dims, optimizers, a dtype that cannot hold the dumped
        one, or more keys than there is room for.
      CorruptCheckpointError: the files were changed.
    """
    found, by_name = checkpoint.load(path), _by_name(variables)
    tables = found.metadata.get("sok_tables", {})
    if set(tables) != set(by_name):
        raise ValueError(f"{path} holds the tables {sorted(tables)}, the model has {sorted(by_name)}.")
    for name, variable in by_name.items():
        then, now = tables[name], _description(variable.table)
        there, here = (jnp.finfo(dtype) for dtype in (found.tree[name]["values"].dtype, variable.table.spec.dtype))
        if there.nmant > here.nmant or there.maxexp > here.maxexp:  # a wider one holds every value as it is
            then, now = then | {"dtype": str(there.dtype)}, now | {"dtype": str(here.dtype)}
        # Files of earlier versions say less.
        if differs := {key: (then[key], value) for key, value in now.items() if then.get(key, value) != value}:
            raise ValueError(
                f"table {name!r} differs from {path} in {differs} (there, here); make it as it was, or take over "
                "keys and values alone, with assign_rows."
            )
    states = []
    for name, variable in by_name.items():
        rows = _refitted(variable, found.tree[name], tables[name].get("used_rows"))
        state = _with_rows(variable.table, _without_rows(variable), rows)
        step = jax.device_put(jnp.asarray(tables[name]["step"], jnp.int32), variable.get_value().step.sharding)
        states.append(state._replace(step=step))
    for variable, state in zip(by_name.values(), states, strict=True):  # all of them, or none
        variable.set_value(state)


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


def _without_rows(variable: EmbeddingVariable) -> TableState:
    """What rows are put into: nothing, or a table all of whose rows they replace."""
    table, state = variable.table, state_of(variable)
    if not table.use_hashtable:
        return state
    spec = dataclasses.replace(table.spec, capacity=state.shards.rows.shape[0] // table.context.num_devices)
    fresh = dataclasses.replace(table, spec=spec).init(jax.random.key(0))
    return fresh._replace(shards=fresh.shards._replace(key=state.shards.key))


def _num_used(variable: EmbeddingVariable, rows: Mapping[str, np.ndarray]) -> int:
    """How many of a dump's rows a table must have room for: those without hash table end with what none trained."""
    if variable.table.use_hashtable:
        return len(rows["keys"])
    return static_table.num_used(variable.table.spec, _own_key(variable), [rows[name] for name in _names(variable)])


def _refitted(variable: EmbeddingVariable, rows: Mapping[str, Any], num_used: int | None) -> Mapping[str, Any]:
    """The rows of a dump as many as the table has, if it has no hash table; unused ones are left out, or are new."""
    table, there = variable.table, len(rows["keys"])
    here = table.spec.capacity * table.context.num_devices
    if table.use_hashtable or there == here:
        return rows
    num_used = there if num_used is None else num_used
    if num_used > here:
        devices = table.context.num_devices
        raise ValueError(
            f"table {table.spec.name!r} has {here} rows, {table.spec.capacity} on each of {devices} devices, but the "
            f"dump has used {num_used}; make max_vocabulary_size_per_gpu at least {-(-num_used // devices)}."
        )
    new = static_table.initial_rows(table.spec, _own_key(variable), there, here) if here > there else None
    refitted: dict[str, Any] = {"keys": np.arange(here)}
    for position, name in enumerate(_names(variable)):
        array = rows[name]
        refitted[name] = array[:here] if new is None else np.concatenate([array, new[position].astype(array.dtype)])
    return refitted


def _names(variable: EmbeddingVariable) -> list[str]:
    return array_names(variable.table.spec, variable.get_value().shards)


def _own_key(variable: EmbeddingVariable) -> PRNGKeyArray:
    return variable.get_value().shards.key.addressable_shards[0].data[0]

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

from rsembed import checkpoint
from rsembed.sok.export import export, import_rows
from rsembed.sok.keys import owners, split_keys
from rsembed.sok.sharded_table import ShardedTable, TableState
from rsembed.sok.variables import EmbeddingVariable, grown


def export_rows(variable: EmbeddingVariable) -> dict[str, np.ndarray]:
    """All keys with what belongs to them, from all devices, in ascending order of the keys (copies on the host).

    Returns: `keys`, `values`, one `slot_<name>` per optimizer slot; of a hash table `last_step` and `count`, and with
      admission `waiting_keys`, `waiting_last_step` and `waiting_count`. Equal tables give equal arrays, whatever the
      number of devices.
    """
    return export(variable.table.spec, variable.get_value().shards, variable.table.context.num_devices)


def assign_rows(variable: EmbeddingVariable, rows: Mapping[str, Any]) -> None:
    """Writes rows by key: keys that the table has are overwritten, a hash table gets those that it has not.

    Args:
      variable: the table.
      rows: `keys [n]` and `values [n, dim]`, and what else `export_rows` returns; slots that are missing start fresh.

    Raises: ValueError: keys repeat, are out of range or find no room, or an array does not fit.
    """
    variable.set_value(_with_rows(variable.table, variable.get_value(), rows))


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
    tables = {
        name: {**_description(variable.table), "step": int(variable.get_value().step)}
        for name, variable in by_name.items()
    }
    tree = {name: export_rows(variable) for name, variable in by_name.items()}
    checkpoint.save(path, tree, step=max(t["step"] for t in tables.values()), metadata={"sok_tables": tables})


def load(path: str | os.PathLike[str], variables: Any) -> None:
    """Makes tables what they were at the time of a `dump`, on this run's devices, however many there were then.

    Args:
      path: the folder.
      variables: as for `dump`; keys that the dump does not have are forgotten.

    Raises:
      ValueError: the dump has other tables, or they have other sizes, optimizers or more keys than there is room for.
      CorruptCheckpointError: the files were changed.
    """
    found, by_name = checkpoint.load(path), _by_name(variables)
    tables = found.metadata.get("sok_tables", {})
    if set(tables) != set(by_name):
        raise ValueError(f"{path} holds the tables {sorted(tables)}, the model has {sorted(by_name)}.")
    for name, variable in by_name.items():
        then, now = tables[name], _description(variable.table)
        if differs := {key: (then[key], value) for key, value in now.items() if then[key] != value}:
            raise ValueError(f"table {name!r} differs from {path} in {differs} (there, here).")
    states = []
    for name, variable in by_name.items():
        state = _with_rows(variable.table, _without_rows(variable, found.tree[name]), found.tree[name])
        step = jax.device_put(jnp.asarray(tables[name]["step"], jnp.int32), variable.get_value().step.sharding)
        states.append(state._replace(step=step))
    for variable, state in zip(by_name.values(), states, strict=True):  # all of them, or none
        variable.set_value(state)


def _description(table: ShardedTable) -> dict[str, Any]:
    """What a dump and the table that it goes into must agree in."""
    spec = table.spec
    optimizer = spec.optimizer.short_name()
    return {"use_hashtable": table.use_hashtable, "embedding_dim": spec.embedding_dim, "optimizer": optimizer}


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


def _without_rows(variable: EmbeddingVariable, rows: Mapping[str, Any]) -> TableState:
    """What `rows` are put into: nothing, or a table all of whose rows they replace."""
    table, state = variable.table, variable.get_value()
    if table.use_hashtable:
        spec = dataclasses.replace(table.spec, capacity=state.shards.rows.shape[0] // table.context.num_devices)
        fresh = dataclasses.replace(table, spec=spec).init(jax.random.key(0))
        return fresh._replace(shards=fresh.shards._replace(key=state.shards.key))
    if len(rows["keys"]) != state.shards.rows.shape[0]:
        raise ValueError(
            f"table {table.spec.name!r} has {state.shards.rows.shape[0]} rows, the dump {len(rows['keys'])}; "
            "without hash table they must be equal. assign_rows takes over some rows."
        )
    return state

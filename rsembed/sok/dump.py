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
from rsembed.sok import dynamic_table, export, static_table
from rsembed.sok.dynamic_table import DynamicTableSpec
from rsembed.sok.keys import owners, split_keys
from rsembed.sok.sharded_table import ShardedTable, TableState
from rsembed.sok.variables import EmbeddingVariable, on_host


def export_rows(variable: EmbeddingVariable) -> dict[str, np.ndarray]:
    """All keys with what belongs to them, from all devices, in ascending order of the keys (copies on the host).

    Returns: `keys`, `values`, one `slot_<name>` per optimizer slot, and of a hash table `last_step` and `count`; see
      `export.export`. Equal tables give equal arrays, whatever the number of devices.
    """
    table, shards = variable.table, _shards_on_host(variable.table, variable.get_value())
    if table.use_hashtable:
        parts = [export.export(table.spec, shard) for shard in shards]
    else:
        rows, names = np.arange(table.spec.capacity), export.slot_names(table.spec, len(shards[0].slots))
        parts = [
            {"keys": (rows * len(shards) + number).astype(table.spec.key_dtype), "values": np.asarray(shard.rows)}
            | dict(zip(names, map(np.asarray, shard.slots), strict=True))
            for number, shard in enumerate(shards)
        ]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    for prefix in {name.removesuffix("keys") for name in joined if name.endswith("keys")}:
        order = np.argsort(joined[f"{prefix}keys"], kind="stable")
        own = [name for name in joined if name.startswith("waiting_") == (prefix != "")]
        joined |= {name: joined[name][order] for name in own}
    return joined


def assign_rows(variable: EmbeddingVariable, rows: Mapping[str, Any]) -> None:
    """Writes rows by key: keys that the table has are overwritten, a hash table gets those that it has not.

    Args:
      variable: the table.
      rows: `keys [n]` and `values [n, dim]`, and what else `export_rows` returns; slots that are missing start fresh.

    Raises: ValueError: keys repeat, are out of range or find no room, or an array does not fit.
    """
    variable.set_value(_with_rows(variable, variable.get_value(), rows))


def _with_rows(variable: EmbeddingVariable, state: TableState, rows: Mapping[str, Any]) -> TableState:
    table, shards = variable.table, _shards_on_host(variable.table, state)
    if "keys" not in rows:
        raise ValueError(f"table {table.spec.name!r}: rows need 'keys' and 'values', got {sorted(rows)}.")
    spec = table.spec
    for name, array in rows.items():
        num_keys = len(rows["waiting_keys" if name.startswith("waiting_") else "keys"])
        if len(array) != num_keys:
            raise ValueError(f"table {spec.name!r}: {name!r} has {len(array)} entries for {num_keys} keys.")
    owner = {p: _owners(spec, rows[f"{p}keys"], len(shards)) for p in ("", "waiting_") if f"{p}keys" in rows}

    def share(number: int) -> dict[str, np.ndarray]:
        prefixes = {name: "waiting_" if name.startswith("waiting_") else "" for name in rows}
        return {name: np.asarray(rows[name])[owner[prefix] == number] for name, prefix in prefixes.items()}

    own_rows = [share(number) for number in range(len(shards))]
    if not table.use_hashtable:
        shards = [_assign_static(spec, shard, own, len(shards)) for shard, own in zip(shards, own_rows, strict=True)]
    else:
        if spec.when_full == "grow":
            capacity = max(shards[0].rows.shape[0], *(len(own["keys"]) for own in own_rows))
            shards = [dynamic_table.grow(spec, shard, capacity) for shard in shards]
        shards = [export.import_rows(spec, shard, own) for shard, own in zip(shards, own_rows, strict=True)]
    joined = jax.tree.map(lambda *leaves: _global(table, leaves), *shards)
    return TableState(joined, state.step)


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
        name: {
            "use_hashtable": variable.table.use_hashtable,
            "embedding_dim": variable.table.spec.embedding_dim,
            "optimizer": variable.table.spec.optimizer.short_name(),
            "step": int(variable.get_value().step),
        }
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
        spec, then = variable.table.spec, tables[name]
        now = {"embedding_dim": spec.embedding_dim, "optimizer": spec.optimizer.short_name()}
        now["use_hashtable"] = variable.table.use_hashtable
        if differs := {key: (then[key], value) for key, value in now.items() if then[key] != value}:
            raise ValueError(f"table {name!r} differs from {path} in {differs} (there, here).")
    states = []
    for name, variable in by_name.items():
        state = _with_rows(variable, _without_rows(variable, found.tree[name]), found.tree[name])
        step = jax.device_put(jnp.asarray(tables[name]["step"], jnp.int32), variable.get_value().step.sharding)
        states.append(state._replace(step=step))
    for variable, state in zip(by_name.values(), states, strict=True):  # all of them, or none
        variable.set_value(state)


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


def _shards_on_host(table: ShardedTable, state: TableState) -> list[Any]:
    """The share of every device, in every process."""
    num_shards, shards = table.context.num_devices, state.shards

    def cut(array: Any) -> list[Any]:
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            return [jax.random.wrap_key_data(part) for part in cut(jax.random.key_data(array))]
        return [jnp.asarray(part) for part in np.split(on_host(array), num_shards)]

    leaves, structure = jax.tree.flatten(shards)
    return [jax.tree.unflatten(structure, own) for own in zip(*map(cut, leaves), strict=True)]


def _global(table: ShardedTable, leaves: Sequence[Any]) -> jax.Array:
    if jnp.issubdtype(leaves[0].dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_global(table, [jax.random.key_data(leaf) for leaf in leaves]))
    whole = np.concatenate([np.asarray(leaf) for leaf in leaves])
    return jax.make_array_from_callback(whole.shape, table.context.sharding, lambda index: whole[index])


def _owners(spec: DynamicTableSpec, keys: Any, num_shards: int) -> np.ndarray:
    keys = np.asarray(keys)
    lanes = split_keys(keys, feature=f"table {spec.name!r}")
    if keys.size and int(keys.max()) > np.iinfo(spec.key_dtype).max:
        raise ValueError(f"table {spec.name!r}: key {int(keys.max())} does not fit into key_dtype={spec.key_dtype!r}.")
    if not lanes.is_key.all():
        raise ValueError(f"table {spec.name!r}: -1 stands for no key and cannot have a row; leave it out.")
    return np.asarray(owners(lanes, num_shards))


def _assign_static(
    spec: DynamicTableSpec, shard: static_table.StaticTable, rows: Mapping[str, np.ndarray], num_shards: int
) -> static_table.StaticTable:
    places = np.asarray(rows["keys"]).astype(np.uint64) // np.uint64(num_shards)
    if places.size and (int(places.max()) >= shard.rows.shape[0] or np.unique(places).size < places.size):
        raise ValueError(
            f"table {spec.name!r}: keys must be distinct and below {shard.rows.shape[0] * num_shards}, got "
            f"{int(np.asarray(rows['keys']).max())} at most."
        )
    values = jnp.asarray(rows["values"], jnp.float32)
    if values.shape != (places.size, spec.embedding_dim):
        raise ValueError(f"table {spec.name!r}: values have shape {values.shape} for {places.size} keys.")
    index, parts = places.astype(np.int64), [values, *spec.optimizer.init_slots(values)]
    for number, name in enumerate(export.slot_names(spec, len(shard.slots)), start=1):
        part = jnp.asarray(rows.get(name, parts[number]))
        if part.shape != parts[number].shape:
            raise ValueError(
                f"table {spec.name!r}: {name!r} has shape {np.shape(rows[name])}, it needs {parts[number].shape}."
            )
        parts[number] = part
    arrays = [a.at[index].set(p.astype(a.dtype)) for a, p in zip((shard.rows, *shard.slots), parts, strict=True)]
    return shard._replace(rows=arrays[0], slots=tuple(arrays[1:]))


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

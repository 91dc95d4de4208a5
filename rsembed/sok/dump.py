"""Export and import of tables' rows by key: as numpy arrays, or as a checkpoint for any number of devices."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from rsembed import checkpoint
from rsembed.checkpoint.entries import refuse
from rsembed.checkpoint.files import MANIFEST, opened
from rsembed.checkpoint.states import PickedRows
from rsembed.checks import validated
from rsembed.sok.variables import EmbeddingVariable, VariableTable, make_larger, state_of
from rsembed.storage import Hashed
from rsembed.storage.logical_rows import array_names, places_by_key, room_needed


@validated
def export_rows(variable: EmbeddingVariable) -> dict[str, np.ndarray]:
    """Keys of a table in ascending order, with their rows and optimizer state, from all devices (host copies).

    Returns: `keys`, `values`, one `slot_<name>` per optimizer slot; of a hash table `last_step` and `count`;
      with admission by count `waiting_keys`, `waiting_last_step` and `waiting_count`.
      Equal tables give equal arrays, whatever the number of devices.
    """
    rows: dict[str, np.ndarray] = variable.table.collection.tables(state_of(variable))[variable.table.spec.name]
    return rows


@validated
def assign_rows(variable: EmbeddingVariable, rows: Mapping[str, PyTree], *, allow_nonfinite: bool = False) -> None:
    """Writes rows by key: rows of known keys are overwritten, and a hash table admits the others.

    Args:
      variable: the table.
      rows: `keys [n]` and `values [n, dim]`, and what else `export_rows` returns; slots that are missing start fresh.
        Without `last_step` they count as used now.
      allow_nonfinite: see `EmbeddingCollection.with_tables`.

    Raises: ValueError: a number is not finite, keys repeat, are out of range or find no room, or an array does not fit.
    """
    table, state, name = variable.table, state_of(variable), variable.table.spec.name
    if table.when_full == "grow" and "keys" in rows:
        num_rows = room_needed(state.tables[name], rows, table.spec, table.context.num_devices)
        if num_rows > table.rows_per_device:
            make_larger(variable, num_rows)
    collection = variable.table.collection
    variable.set_value(collection.with_tables(state_of(variable), {name: rows}, allow_nonfinite=allow_nonfinite))


@validated
def dump(path: str | os.PathLike[str], variables: PyTree, optimizer: object = None) -> None:
    """Writes keys, rows, optimizer state and step of tables as one checksummed checkpoint.

    Args:
      path: a folder that does not exist yet.
      variables: `EmbeddingVariable`s, or a model that has some.
      optimizer: accepted, as published; states belong to their tables, and are always written.

    Raises:
      ValueError: there is none, or two have the same name.
      FileExistsError: the folder exists.
    """
    del optimizer
    tree, tables = {}, {}
    for name, variable in _by_name(variables).items():
        state, spec = state_of(variable), variable.table.spec
        params, slots = state.tables[name], state.slots[name]
        places, by_key = places_by_key(params, spec, variable.table.context.num_devices)
        arrays = zip(array_names(spec, slots), (params.rows, *slots), strict=True)
        tree[name] = by_key | {part: PickedRows(array, places.size, places.__getitem__) for part, array in arrays}
        tables[name] = {**_description(variable.table), "step": int(state.step)}
    checkpoint.save(path, tree, step=max(t["step"] for t in tables.values()), metadata={"sok_tables": tables})


@validated
def load(path: str | os.PathLike[str], variables: PyTree, optimizer: object = None) -> None:
    """Restores tables from a `dump` onto this run's devices, whatever number of devices wrote it.

    Rows are read a few MiB at a time.

    Args:
      path: the folder.
      variables: as for `dump`; keys that the dump lacks start as new.
      optimizer: accepted, as published.

    Raises:
      ValueError: the dump has other tables, or they have other dims, optimizers, a dtype that cannot hold the dumped
        one, or more keys than there is room for.
      CorruptCheckpointError: the files were changed.
    """
    del optimizer
    by_name, found, states = _by_name(variables), checkpoint.manifest(path), {}
    tables = _dumped_tables(Path(path), found)
    if set(tables) != set(by_name):
        raise ValueError(f"{path} holds the tables {sorted(tables)}, the model has {sorted(by_name)}.")
    for name, variable in by_name.items():
        entries = [entry for entry in found["arrays"] if entry["path"][:1] == [name]]
        if not {(name, "keys"), (name, "values")} <= {tuple(entry["path"]) for entry in entries}:
            refuse(Path(path) / MANIFEST, f"table {name!r} must have arrays keys and values")
        arrays = {"/".join(parts[1:]): array for parts, array in opened(Path(path), entries).items()}
        _check_fits(path, tables[name], arrays, variable.table)
        rows = {part: array if len(array.shape) > 1 else array.whole() for part, array in arrays.items()}
        copy = EmbeddingVariable(variable.table.init(variable.get_value().key), table=variable.table)
        assign_rows(copy, rows, allow_nonfinite=True)  # as they were dumped
        state = copy.get_value()
        step = jax.device_put(jnp.asarray(tables[name]["step"], jnp.int32), state.step.sharding)
        states[name] = copy.table, state._replace(step=step)
    for name, variable in by_name.items():  # all of them, or none
        table, state = states[name]
        variable.set_metadata(table=table)
        variable.set_value(state)


def _dumped_tables(path: Path, found: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Facts of the tables in a dump. Raises: CorruptCheckpointError: one of them is no fact of a table."""
    tables = found["metadata"].get("sok_tables", {})
    names = {"use_hashtable", "embedding_dim", "optimizer", "rule", "step"}
    is_right = isinstance(tables, dict)
    for facts in tables.values() if is_right else ():
        is_right &= isinstance(facts, dict) and names <= facts.keys() and isinstance(facts["step"], int)
        is_right = is_right and 0 <= facts["step"] <= np.iinfo(np.int32).max
    if not is_right:
        refuse(path / MANIFEST, f"sok_tables of metadata must have {sorted(names)} of each table, got {tables!r:.200}")
    return dict(tables)


def _check_fits(
    path: str | os.PathLike[str], then: Mapping[str, PyTree], arrays: Mapping[str, PyTree], table: VariableTable
) -> None:
    """Raises: ValueError: the dump is of another kind of table."""
    now, name = _description(table), table.spec.name
    there, here = (jnp.finfo(dtype) for dtype in (arrays["values"].dtype, table.spec.dtype))
    if there.nmant > here.nmant or there.maxexp > here.maxexp:  # a wider one holds every value as it is
        then, now = {**then, "dtype": str(there.dtype)}, now | {"dtype": str(here.dtype)}
    if differs := {key: (then[key], value) for key, value in now.items() if then[key] != value}:
        raise ValueError(
            f"table {name!r} differs from {path} in {differs} (there, here); make it as it was, or take over keys and "
            "values alone, with assign_rows."
        )


def _description(table: VariableTable) -> dict[str, PyTree]:
    """Facts that must be equal in a dump and in the table that loads it."""
    spec = table.spec
    return {
        "use_hashtable": isinstance(spec.storage, Hashed),
        "embedding_dim": spec.embedding_dim,
        "optimizer": spec.optimizer.short_name(),
        "rule": spec.optimizer.identity,
    }


def _by_name(variables: PyTree) -> dict[str, EmbeddingVariable]:
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

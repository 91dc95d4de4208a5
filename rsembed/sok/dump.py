"""Export and import of the rows of a table by key, as NumPy arrays or as a checkpoint.

The number of devices at the import may differ from the number at the export.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rsembed import checkpoint
from rsembed.checkpoint.entries import refuse
from rsembed.checkpoint.files import MANIFEST, opened
from rsembed.checkpoint.states import Facts, Leaf, PickedRows, SavedArray
from rsembed.checks import validated
from rsembed.sok.variables import EmbeddingVariable, VariableTable, make_larger, state_of
from rsembed.storage import Hashed
from rsembed.storage.logical_rows import array_names, places_by_key, room_needed
from rsembed.storage.protocol import TableRows


@validated
def export_rows(variable: EmbeddingVariable) -> dict[str, np.ndarray]:
    """Host copies of all keys of a table in ascending order, with their rows and optimizer state.

    The arrays do not depend on the number of devices.

    Returns: arrays `keys`, `values` and one `slot_<name>` per optimizer slot. A hash table adds the
      arrays `last_step` and `count`. A hash table that admits keys by their count adds the arrays
      `waiting_keys`, `waiting_last_step` and `waiting_count`.
    """
    tables = variable.table.collection.tables(state_of(variable))
    rows: dict[str, np.ndarray] = tables[variable.table.spec.name]
    return rows


@validated
def assign_rows(
    variable: EmbeddingVariable,
    rows: Mapping[str, TableRows],
    *,
    allow_nonfinite: bool = False,
) -> None:
    """Writes rows to a table by key.

    If the table already has a row for a key, the row is overwritten. A hash table adds new keys.

    Args:
      variable: table to write to.
      rows: `keys [n]`, `values [n, dim]` and any other arrays that `export_rows` returns. If
        `rows` lacks an optimizer slot, the slot of the written rows gets its initial value. If
        `rows` lacks `last_step`, the current step becomes the last step that used the keys.
      allow_nonfinite: see `EmbeddingCollection.with_tables`.

    Raises: ValueError: a number is not finite, an array has the wrong shape or dtype, a key occurs
      twice or is out of range, or the table has no free row for a key.
    """
    table = variable.table
    name = table.spec.name
    state = state_of(variable)
    if table.when_full == "grow" and "keys" in rows:
        num_rows = room_needed(state.tables[name], rows, table.spec, table.context.num_devices)
        if num_rows > table.rows_per_device:
            make_larger(variable, num_rows)
            state = state_of(variable)
    collection = variable.table.collection
    state = collection.with_tables(state, {name: rows}, allow_nonfinite=allow_nonfinite)
    variable.set_value(state)


@validated
def dump(path: str | os.PathLike[str], variables: object, optimizer: object = None) -> None:
    """Writes keys, rows, optimizer state and step of tables as one checksummed checkpoint.

    Args:
      path: a folder that does not exist yet.
      variables: list of `EmbeddingVariable`s, or a model that contains such variables.
      optimizer: ignored, but accepted because `sok.dump` of the Sparse Operation Kit has this
        argument. In rsembed the optimizer state is a part of the variables.

    Raises:
      ValueError: `variables` contains no embedding variable, or two with the same name.
      FileExistsError: the folder exists.
    """
    del optimizer
    tree: dict[str, dict[str, Leaf]] = {}
    facts: dict[str, Facts] = {}
    for name, variable in _by_name(variables).items():
        spec = variable.table.spec
        state = state_of(variable)
        params = state.tables[name]
        slots = state.slots[name]
        positions, tree[name] = places_by_key(params, spec, variable.table.context.num_devices)
        arrays = zip(array_names(spec, slots), (params.rows, *slots), strict=True)
        for array_name, array in arrays:
            tree[name][array_name] = PickedRows(array, positions.size, positions.__getitem__)
        facts[name] = {**_description(variable.table), "step": int(state.step)}
    last_step = max(table_facts["step"] for table_facts in facts.values())
    checkpoint.save(path, tree, step=last_step, metadata={"sok_tables": facts})


@validated
def load(path: str | os.PathLike[str], variables: object, optimizer: object = None) -> None:
    """Restores tables from a `dump` onto the devices of this run.

    The number of devices may differ from the number in the run that wrote the dump. Rows are read
    from disk in blocks of a few MiB. If `load` raises an error, all tables stay unchanged.

    Args:
      path: folder of the dump.
      variables: list of `EmbeddingVariable`s, or a model that contains such variables. If the dump
        lacks a key that is in a hash table, the key is removed from the hash table.
      optimizer: ignored, but accepted because `sok.load` of the Sparse Operation Kit has this
        argument.

    Raises:
      ValueError: the table names differ from the names in the dump, or a table has a different dim,
        optimizer or `use_hashtable`, a dtype that cannot represent the dumped values, or too few
        rows for the dumped keys.
      CorruptCheckpointError: files of the dump are damaged.
    """
    del optimizer
    folder = Path(path)
    variable_of = _by_name(variables)
    manifest = checkpoint.manifest(path)
    facts = _dumped_facts(folder, manifest)
    if set(facts) != set(variable_of):
        expected = f"the model has {sorted(variable_of)}"
        raise ValueError(f"{path} holds the tables {sorted(facts)}, {expected}.")
    loaded = {}
    for name, variable in variable_of.items():
        arrays = _arrays_of_table(folder, manifest, name)
        _check_fits(path, facts[name], arrays, variable.table)
        loaded[name] = _loaded_copy(variable, arrays, facts[name]["step"])
    # The variables change only after the rows of all tables have been read without an error.
    for name, variable in variable_of.items():
        variable.set_metadata(table=loaded[name].table)
        variable.set_value(loaded[name].get_value())


def _arrays_of_table(folder: Path, manifest: Facts, name: str) -> dict[str, SavedArray]:
    """Arrays of a table in a dump, by the names that `export_rows` uses."""
    entries = [entry for entry in manifest["arrays"] if entry["path"][:1] == [name]]
    paths = {tuple(entry["path"]) for entry in entries}
    required = {(name, "keys"), (name, "values")}
    if not required <= paths:
        refuse(folder / MANIFEST, f"table {name!r} must have arrays keys and values")
    arrays = {}
    for path, array in opened(folder, entries).items():
        _, *parts = path
        arrays["/".join(parts)] = array
    return arrays


def _loaded_copy(
    variable: EmbeddingVariable,
    arrays: Mapping[str, SavedArray],
    step: int,
) -> EmbeddingVariable:
    """Copy of `variable` with the rows and the step count of a dump."""
    rows: dict[str, TableRows] = {}
    for array_name, array in arrays.items():
        is_matrix = len(array.shape) > 1
        rows[array_name] = array if is_matrix else array.whole()
    empty_state = variable.table.init(variable.get_value().key)
    copy = EmbeddingVariable(empty_state, table=variable.table)
    # A dump may contain NaN or infinity, because `dump` does not check rows.
    assign_rows(copy, rows, allow_nonfinite=True)
    state = copy.get_value()
    device_step = jax.device_put(jnp.asarray(step, jnp.int32), state.step.sharding)
    copy.set_value(state._replace(step=device_step))
    return copy


def _dumped_facts(folder: Path, manifest: Facts) -> dict[str, Facts]:
    """Metadata of each table in a dump, by table name.

    Raises: CorruptCheckpointError: an entry of the metadata is missing or invalid.
    """
    facts_of = manifest["metadata"].get("sok_tables", {})
    names = {"use_hashtable", "embedding_dim", "optimizer", "rule", "step"}
    is_valid = isinstance(facts_of, dict)
    if is_valid:
        for facts in facts_of.values():
            has_facts = isinstance(facts, dict) and names <= facts.keys()
            is_valid = is_valid and has_facts and _is_step(facts["step"])
    if not is_valid:
        wanted = f"sok_tables of metadata must have {sorted(names)} of each table"
        refuse(folder / MANIFEST, f"{wanted}, got {facts_of!r:.200}")
    return dict(facts_of)


def _is_step(value: object) -> bool:
    return isinstance(value, int) and 0 <= value <= np.iinfo(np.int32).max


def _check_fits(
    path: str | os.PathLike[str],
    dumped: Facts,
    arrays: Mapping[str, SavedArray],
    table: VariableTable,
) -> None:
    """Checks that a table can hold the rows of a dumped table.

    Raises: ValueError: the two tables differ in dim, optimizer or `use_hashtable`, or the dtype of
      the table cannot represent the dumped values.
    """
    there = jnp.finfo(arrays["values"].dtype)
    here = jnp.finfo(table.spec.dtype)
    facts = _description(table)
    # The dtypes may differ if the table's dtype represents every dumped value exactly.
    if there.nmant > here.nmant or there.maxexp > here.maxexp:
        dumped = {**dumped, "dtype": str(there.dtype)}
        facts["dtype"] = str(here.dtype)
    differs = {}
    for fact, value in facts.items():
        if dumped[fact] != value:
            differs[fact] = (dumped[fact], value)
    if differs:
        raise ValueError(
            f"table {table.spec.name!r} differs from {path} in {differs} (there, here); make it as "
            "it was, or take over keys and values alone, with assign_rows."
        )


def _description(table: VariableTable) -> dict[str, object]:
    """Metadata that must be equal in a dump and in the table that loads the dump."""
    spec = table.spec
    return {
        "use_hashtable": isinstance(spec.storage, Hashed),
        "embedding_dim": spec.embedding_dim,
        "optimizer": spec.optimizer.short_name(),
        "rule": spec.optimizer.identity,
    }


def _by_name(variables: object) -> dict[str, EmbeddingVariable]:
    """Embedding variables in a list or a model, by name.

    Raises: ValueError: there is no embedding variable, or a name occurs twice.
    """
    if isinstance(variables, EmbeddingVariable):
        variables = [variables]
    if not isinstance(variables, Sequence):
        variables = [node for _, node in nnx.iter_graph(variables)]
    variable_of: dict[str, EmbeddingVariable] = {}
    repeated = set()
    for variable in variables:
        if isinstance(variable, EmbeddingVariable):
            name = variable.table.spec.name
            if name in variable_of:
                repeated.add(name)
            variable_of[name] = variable
    what = ""
    if not variable_of:
        what = "there is none"
    elif repeated:
        what = f"the names {sorted(repeated)} occur more than once; pass name= to the layers"
    if what:
        raise ValueError(f"dump and load need embedding variables with different names: {what}.")
    return variable_of

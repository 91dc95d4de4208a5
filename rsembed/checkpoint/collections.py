"""Checkpoints of embedding collections: tables and slots by name, for any stacking and any mesh."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from jaxtyping import PyTree

from rsembed.checkpoint.files import Contents, check_owners, manifest, nested, placed, restored, write
from rsembed.checkpoint.states import logical, tables_of, with_states
from rsembed.checks import validated
from rsembed.collection import EmbeddingCollection, EmbeddingState


@validated
def save_collection(
    path: str | os.PathLike[str],
    collection: EmbeddingCollection,
    state: EmbeddingState,
    *,
    others: PyTree = None,
    metadata: Mapping[str, PyTree] | None = None,
) -> None:
    """Saves every table and its slots by table name, with step, key and whatever `others` belong to that step.

    The arrays are `tables/<table>`, `slots/<table>/<slot>`, `key` and `others/...`. Rows are in the order of ids,
    whatever mesh they lie on, and whether on the device or on the host. A table with keys has `tables/<table>/keys`,
    `.../values` and what else belongs to each key; a tensor train its cores.

    Args:
      path: see `save`.
      collection: the collection that the state belongs to.
      state: the state to save.
      others: any pytree, such as dense parameters and their optimizer state.
      metadata: values that JSON can hold; `manifest(path)["metadata"]["user"]` returns it.

    Raises:
      ValueError: the state is not this collection's.
      FileExistsError, OSError, TypeError: as `save`.
    """
    write(Path(path), contents_of(collection, state, others=others, metadata=metadata))


def contents_of(
    collection: EmbeddingCollection, state: EmbeddingState, *, others: PyTree, metadata: Mapping[str, PyTree] | None
) -> Contents:
    """Contents of the checkpoint that `save_collection` writes."""
    collection.check_state(state)
    owners = {"tables": tables_of(collection.template)}
    arrays, tables, slots = collection.logical.parted(state._replace(layout=collection.layout))
    tree = _without_step(arrays) | {"others": others}
    tree["tables"] |= tables
    tree["slots"] |= slots
    return Contents.of(tree, owners, step=int(state.step), metadata={"user": dict(metadata or {})})


@validated
def load_collection(
    path: str | os.PathLike[str], collection: EmbeddingCollection, *, others: PyTree = None, same_rules: bool = True
) -> PyTree:
    """The saved state for a collection with the same tables, whatever its stacking, placement or mesh.

    Args:
      path: see `load`.
      collection: its tables must be those that were saved; learning rates and other hyperparameters are its own.
      others: a template for what was saved as `others`, see `like` of `load`; None leaves that alone.
      same_rules: False takes slots over wherever their names and shapes fit. For rules that are the same under another
        name: a function that you renamed, a transformation that optax wrote anew.

    Returns: the `EmbeddingState`; with a template, the pair of it and the others.

    Raises:
      CorruptCheckpointError, FileNotFoundError: as `load`.
      ValueError: a table is missing or too many, or has another size, dtype, storage or optimizer.
    """
    path = Path(path)
    found, template = manifest(path), collection.template
    check_owners(path, *_tables(found, collection, same_rules=same_rules))
    implementation = next(entry["prng"] for entry in found["arrays"] if entry["path"] == ["key"])
    key = jax.eval_shape(lambda: jax.random.key(0, impl=implementation))
    template = template._replace(key=key.update(sharding=template.key.sharding))
    arrays, (tables, slots) = collection.logical.without_apart(template), collection.logical.templates()
    like = _without_step(arrays) | {"others": logical(others)}
    like["tables"] |= tables
    like["slots"] |= slots
    apart = [table.name for own in collection.logical.apart.values() for table in own.layout.stack.tables]
    by_key = [name for name in apart if name not in tables]
    entries: dict[bool, list[PyTree]] = {True: [], False: []}  # how many keys a table has, its file alone knows
    for entry in found["arrays"]:
        if others is not None or entry["path"][0] != "others":
            entries[entry["path"][0] == "tables" and entry["path"][1] in by_key].append(entry)
    tree = restored(path, entries[False], like)
    step = placed(np.asarray(found["step"], np.int32), template.step)
    state = with_states(arrays, tree | {"step": step})
    if apart:
        keyed = nested(path, entries[True]).get("tables", {}) if by_key else {}
        state = collection.logical.whole(state, tree["tables"] | keyed, tree["slots"], collection.layout)
    return state if others is None else (state, with_states(others, tree["others"]))


def _without_step(state: EmbeddingState) -> dict[str, PyTree]:
    """The state's tables and slots by table name, without the step, which the manifest has."""
    tree = logical(state)
    del tree["step"]
    return tree


def _tables(
    found: Mapping[str, PyTree], collection: EmbeddingCollection, *, same_rules: bool
) -> tuple[dict[str, PyTree], dict[str, PyTree]]:
    """Facts of the tables in the file, and those of the collection's tables."""
    saved, expected = found.get("belongs_to", {}).get("tables", {}), tables_of(collection.template)
    if not same_rules:
        for name in saved.keys() & expected.keys():
            expected[name]["optimizer"] = saved[name]["optimizer"]
    return {"tables": saved}, {"tables": expected}

"""Trained tables by the names that users gave them, out of whatever holds them, and back in.

Stacking, sharding, rotation and padding are matters of the physical layout; a logical table is `[vocabulary, dim]`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rsembed.sparsecore.belonging import check_logical, check_slots, check_variables, labelled, logical_of
from rsembed.sparsecore.layout import placed_stack, tables_by_stack
from rsembed.sparsecore.variables import EmbeddingVariables, Nested
from rsembed.specs import FeatureSpec, TableSpec, tables_of
from rsembed.stacking import place_of


def logical_tables(tree: Any, feature_specs: Nested[FeatureSpec]) -> dict[str, Array]:
    """Every table as `[vocabulary, dim]`, by table name.

    Args:
      tree: anything that has an `EmbeddingVariables` under the name of each stack: what `init_embedding_variables`
        returns, the parameters of a Linen model, the state of an NNX model.
      feature_specs: the placed specs it was made for.

    Raises:
      ValueError: a stack is missing, is there twice, or was made for other specs than these.
    """
    return {name: variables.table for name, variables in logical_variables(tree, feature_specs).items()}


def logical_variables(tree: Any, feature_specs: Nested[FeatureSpec]) -> dict[str, EmbeddingVariables]:
    """As `logical_tables`, with the slots: `EmbeddingVariables` of each table alone."""
    stacks = tables_by_stack(list(tables_of(feature_specs).values()))
    found = _stacks_in(tree, stacks)
    return {
        table.name: labelled(jax.tree.map(functools.partial(logical_rows, table), found[name]), logical_of(found[name]))
        for name, tables in stacks.items()
        for table in tables
    }


def logical_rows(table: TableSpec, stacked: Any) -> Any:
    """Rows of a table in the order of ids, without padding, from the array of its stack, `[rows, ...]`."""
    rows = stacked[physical_rows(table, stacked)]
    is_full_width = stacked.ndim == 2 and stacked.shape[1] == placed_stack(table).stack_embedding_dim
    return rows[:, : table.embedding_dim] if is_full_width else rows


def physical_rows(table: TableSpec, like: Any) -> Any:
    """Where the rows of a table lie in the array of its stack, in the order of ids; in numpy if `like` is."""
    stack, xp = placed_stack(table), np if isinstance(like, np.ndarray) else jnp
    place, ids = place_of(table.setting_in_stack, stack.num_shards), xp.arange(table.vocabulary_size, dtype=np.int32)
    return place.rows(ids, spread=stack.num_shards, rows_per_shard=stack.stack_vocab_size // stack.num_shards)


def with_logical_tables(tree: Any, feature_specs: Nested[FeatureSpec], tables: Mapping[str, Any]) -> Any:
    """A copy of `tree` in which some tables have new values; everything else, padding included, is as before.

    Args:
      tree: as for `logical_tables`.
      feature_specs: the placed specs it was made for.
      tables: `[vocabulary, dim]` by table name, which leaves the slots alone, or `EmbeddingVariables` as
        `logical_variables` returns them.

    Raises:
      ValueError: a table is unknown or has another shape than its spec, slots are not those of its optimizer, or the
        stacks in `tree` were made for other specs.
    """
    specs = tables_of(feature_specs)
    found = _stacks_in(tree, tables_by_stack(list(specs.values())))
    unknown = sorted(set(tables) - set(specs))
    if unknown:
        raise ValueError(f"the specs have no tables {unknown}; they have {sorted(specs)}.")
    for name, given in tables.items():
        stack = placed_stack(specs[name]).stack_name
        found[stack] = _with_table(specs[name], found[stack], given)

    def replaced(path: Any, value: Any) -> Any:
        return found.get(_last_name(path), value) if isinstance(value, EmbeddingVariables) else value

    return jax.tree_util.tree_map_with_path(replaced, tree, is_leaf=_is_variables)


def _with_table(table: TableSpec, stacked: EmbeddingVariables, given: Any) -> EmbeddingVariables:
    where, shape = f"table {table.name!r}", (table.vocabulary_size, table.embedding_dim)
    old, structure = jax.tree.flatten(stacked)
    new = jax.tree.leaves(given) if isinstance(given, EmbeddingVariables) else [given]
    if isinstance(given, EmbeddingVariables) and len(new) != len(old):
        raise ValueError(f"{where}: got {len(new) - 1} slots, but its optimizer has {len(old) - 1}.")
    if jnp.shape(new[0]) != shape:
        raise ValueError(f"{where}: got shape {jnp.shape(new[0])}, its spec says {shape}.")
    if isinstance(given, EmbeddingVariables):
        check_logical(given, table.optimizer, where=where)
        check_slots(given.slot, table.optimizer, shape, where=where)
    rows = physical_rows(table, old[0])
    for number, values in enumerate(new):
        old[number] = _set_rows(old[number], rows, jnp.asarray(values))
    return jax.tree.unflatten(structure, old)


def _set_rows(array: Array, rows: Array, values: Array) -> Array:
    columns = tuple(slice(size) for size in values.shape[1:])
    changed = jnp.asarray(array).at[(rows, *columns)].set(values.astype(array.dtype))
    return jax.device_put(changed, array.sharding) if isinstance(array, jax.Array) else changed


def _is_variables(value: Any) -> bool:
    return isinstance(value, EmbeddingVariables)


def _last_name(path: Any) -> Any:
    return getattr(path[-1], "key", None) if path else None


def _stacks_in(tree: Any, wanted: Mapping[str, Sequence[TableSpec]]) -> dict[str, EmbeddingVariables]:
    """The variables of every stack, wherever they lie in `tree`."""
    found: dict[str, EmbeddingVariables] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_variables):
        name = _last_name(path)
        if not _is_variables(value) or name not in wanted:
            continue
        if name in found:
            raise ValueError(f"stack {name!r} is there twice; pass the part of the tree that you mean.")
        check_variables(value, wanted[name])
        found[name] = value
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise ValueError(f"no EmbeddingVariables under the names of the stacks {missing}.")
    return found

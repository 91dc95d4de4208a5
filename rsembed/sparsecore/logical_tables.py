"""Trained tables by the names that users gave them, out of whatever holds them, and back in.

Stacking, sharding, rotation and padding are matters of the physical layout; a logical table is `[vocabulary, dim]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rsembed.sparsecore.belonging import check_logical, check_slots, check_variables
from rsembed.sparsecore.layout import tables_by_stack
from rsembed.sparsecore.table_stacking import stacking_plan, unshard_and_unstack_tables
from rsembed.sparsecore.variables import EmbeddingVariables, Nested
from rsembed.specs import FeatureSpec, tables_of
from rsembed.stacking import StackingPlan


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
    plan = stacking_plan(feature_specs)
    found = _stacks_in(tree, feature_specs)
    matrices = jax.tree.map(lambda array: array.reshape(array.shape[0], -1), found)
    tables = unshard_and_unstack_tables(list(tables_of(feature_specs).values()), matrices, plan.num_shards)

    def shaped(rows: Array, stacked: Array) -> Array:
        # Per-row state of an optax rule may have any shape behind its row axis.
        return rows if stacked.ndim == 2 else rows.reshape(rows.shape[0], *stacked.shape[1:])

    result = {}
    for name, table in tables.items():
        leaves, structure = jax.tree.flatten(table)
        stacked = jax.tree.leaves(found[plan.table(name)[0].name])
        result[name] = jax.tree.unflatten(structure, map(shaped, leaves, stacked))
    return result


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
    plan = stacking_plan(feature_specs)
    found = _stacks_in(tree, feature_specs)
    names = [table.name for stack in plan.stacks for table in stack.tables]
    unknown = sorted(set(tables) - set(names))
    if unknown:
        raise ValueError(f"the specs have no tables {unknown}; they have {sorted(names)}.")
    for name, given in tables.items():
        stack = plan.table(name)[0].name
        found[stack] = _with_table(plan, found[stack], name, given)

    def replaced(path: Any, value: Any) -> Any:
        return found.get(_last_name(path), value) if isinstance(value, EmbeddingVariables) else value

    return jax.tree_util.tree_map_with_path(replaced, tree, is_leaf=_is_variables)


def _with_table(plan: StackingPlan, stacked: EmbeddingVariables, name: str, given: Any) -> EmbeddingVariables:
    stack, table = plan.table(name)
    old, structure = jax.tree.flatten(stacked)
    new = jax.tree.leaves(given) if isinstance(given, EmbeddingVariables) else [given]
    if isinstance(given, EmbeddingVariables) and len(new) != len(old):
        raise ValueError(f"table {name!r}: got {len(new) - 1} slots, but its optimizer has {len(old) - 1}.")
    if jnp.shape(new[0]) != (table.rows, table.dim):
        raise ValueError(f"table {name!r}: got shape {jnp.shape(new[0])}, its spec says {(table.rows, table.dim)}.")
    if isinstance(given, EmbeddingVariables):
        check_logical(given, stack.spec.optimizer, where=f"table {name!r}")
        check_slots(given.slot, stack.spec.optimizer, (table.rows, table.dim), where=f"table {name!r}")
    rows = plan.flat_rows(name, jnp.arange(table.rows, dtype=jnp.int32))
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


def _stacks_in(tree: Any, feature_specs: Any) -> dict[str, EmbeddingVariables]:
    """The variables of every stack, wherever they lie in `tree`."""
    found: dict[str, EmbeddingVariables] = {}
    wanted = tables_by_stack(list(tables_of(feature_specs).values()))
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

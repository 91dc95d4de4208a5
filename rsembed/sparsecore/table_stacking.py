"""Published in-place functions that stack tables, over the pure planner `rsembed.stacking`."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from rsembed.checks import PositiveInt, check_finite, validated
from rsembed.collection.dense_rows import RowLayout
from rsembed.sparsecore.embedding_spec import EmbeddingSpecRecord
from rsembed.sparsecore.embedding_spec import compute_physical_row_ids as compute_physical_row_ids
from rsembed.sparsecore.embedding_spec import get_row_ids_in_stacked_table as get_row_ids_in_stacked_table
from rsembed.sparsecore.embedding_spec import get_row_ids_in_stacked_tables as get_row_ids_in_stacked_tables
from rsembed.sparsecore.layout import (
    Nested,
    check_is_array,
    cores_of,
    leaves_like,
    resolve_cores,
    stack_layouts,
    stacks_of,
    with_place,
)
from rsembed.sparsecore.layout import get_table_stacks as get_table_stacks
from rsembed.specs import (
    DEFAULT_ACTIVATION_MEM_BYTES_LIMIT,
    FeatureSpec,
    TableSettingInStack,
    TableSpec,
    features_of,
    tables_of,
)
from rsembed.specs import StackedTableSpec as StackedTableSpec
from rsembed.stacking import (
    SUBLANES,
    LimitsCallable,
    StackingPlan,
    StackPlan,
    TablePlacement,
    get_default_limits,
    group_tables,
    plan_groups,
    plan_stack,
    round_up,
    settings_in_stack,
    split_by_memory,
    stack_name_of,
)

_log = logging.getLogger("rsembed")


@validated
def auto_stack_tables(
    features: Nested[FeatureSpec],
    global_device_count: int,
    num_sc_per_device: int | None = None,
    rotation: int | None = None,
    stack_to_max_ids_per_partition: LimitsCallable = get_default_limits,
    stack_to_max_unique_ids_per_partition: LimitsCallable = get_default_limits,
    *,
    use_short_stack_names: bool = True,
    activation_mem_bytes_limit: PositiveInt | None = None,
) -> None:
    """Stacks all tables that can share one (equal padded dim, optimizer, combiner, quantization), in place.

    Tables that `stack_tables` placed before stay where they are.

    Args:
      features: specs of all features; their tables are changed. A list or tuple may hold a spec twice, as published
        programs do, for which it is placed once; batches name it once.
      global_device_count: devices of all processes.
      num_sc_per_device: cores per device; None means `utils.num_sparsecores_per_device()`.
      rotation: shards by which each further table of a stack is rotated; None means one device.
      stack_to_max_ids_per_partition: `(stack name, samples) -> limit` for stacks of several tables, whatever
        those declare; left out, 256. A table that declares another limit is then named by the logger "rsembed".
      stack_to_max_unique_ids_per_partition: likewise, for distinct ids.
      use_short_stack_names: cut names over 50 characters and add a hash.
      activation_mem_bytes_limit: activations per shard beyond which a group is split; None means 2 MiB.
    """
    if isinstance(features, (list, tuple)):
        features = [*{id(own): own for own in features}.values()]
    memory_limit = activation_mem_bytes_limit or DEFAULT_ACTIVATION_MEM_BYTES_LIMIT
    num_shards, rotation = _checked_sizes(features, global_device_count, num_sc_per_device, rotation)
    tables = tables_of(features)
    groups = group_tables(features, num_shards=num_shards, activation_mem_bytes_limit=memory_limit)
    free = [[name for name in group if tables[name].setting_in_stack.stack_name == name] for group in groups]
    plan = plan_groups(
        features,
        [group for group in free if group],
        num_shards=num_shards,
        rotation=rotation,
        use_short_stack_names=use_short_stack_names,
        max_ids_per_partition=stack_to_max_ids_per_partition,
        max_unique_ids_per_partition=stack_to_max_unique_ids_per_partition,
        activation_mem_bytes_limit=memory_limit,
    )
    for stack in plan.stacks:
        _tell_ignored_limits(tables, stack, stack_to_max_ids_per_partition, stack_to_max_unique_ids_per_partition)
    attach_placement(features, plan)


@validated
def stack_tables(
    features: Nested[FeatureSpec],
    table_names: Sequence[str],
    global_device_count: int,
    num_sc_per_device: int | None = None,
    rotation: int | None = None,
    stack_to_max_ids_per_partition: LimitsCallable = get_default_limits,
    stack_to_max_unique_ids_per_partition: LimitsCallable = get_default_limits,
    stack_name: str | None = None,
    fail_on_excess_padding: bool = False,
    *,
    activation_mem_bytes_limit: PositiveInt | None = None,
) -> None:
    """Stacks the named tables in the given order, in place. Narrower tables are padded to the widest.

    Args:
      features: specs of all features; the named tables are changed.
      table_names: tables of the stack, first row first.
      global_device_count: devices of all processes.
      num_sc_per_device: cores per device; None means `utils.num_sparsecores_per_device()`.
      rotation: shards by which each further table is rotated; None means one device.
      stack_to_max_ids_per_partition: `(stack name, samples) -> limit`, if there are several tables; left out, 256, as
        for `auto_stack_tables`.
      stack_to_max_unique_ids_per_partition: likewise, for distinct ids.
      stack_name: None joins the table names.
      fail_on_excess_padding: raise if a table is narrower than the widest one.
      activation_mem_bytes_limit: recorded in the stack; None means 2 MiB.

    Raises:
      ValueError: a table is repeated, unknown or already stacked, the tables disagree, or the name is taken.
    """
    num_shards, rotation = _checked_sizes(features, global_device_count, num_sc_per_device, rotation)
    memory_limit = activation_mem_bytes_limit or DEFAULT_ACTIVATION_MEM_BYTES_LIMIT
    tables = tables_of(features)
    name = stack_name_of(table_names) if stack_name is None else stack_name
    for table in (tables[table_name] for table_name in table_names if table_name in tables):
        own = table.setting_in_stack.stack_name
        if own != table.name:
            raise ValueError(f"Table {table.name} is already stacked, in {own!r}; a table has one place.")
    stack = plan_stack(
        features,
        table_names,
        stack_name=name,
        num_shards=num_shards,
        rotation=rotation,
        max_ids_per_partition=stack_to_max_ids_per_partition,
        max_unique_ids_per_partition=stack_to_max_unique_ids_per_partition,
        activation_mem_bytes_limit=memory_limit,
    )
    columns = stack.spec.stack_embedding_dim
    excess = {t.name: (columns - round_up(t.dim, SUBLANES)) * t.setting.padded_vocab_size for t in stack.tables}
    if fail_on_excess_padding and any(excess.values()):
        raise ValueError(
            f"stack {name!r}: padding to {columns} columns adds {sum(excess.values())} values ({excess}); stack tables "
            "of equal dim, or pass fail_on_excess_padding=False."
        )
    _tell_ignored_limits(tables, stack, stack_to_max_ids_per_partition, stack_to_max_unique_ids_per_partition)
    attach_placement(features, StackingPlan(num_shards=num_shards, stacks=(stack,)))


def _tell_ignored_limits(
    tables: Mapping[str, TableSpec], stack: StackPlan, max_ids: LimitsCallable, max_unique_ids: LimitsCallable
) -> None:
    """Warns of limits that tables declare and a stack of several ignores, unless the user chose the stack's limits."""
    if len(stack.tables) == 1:
        return
    chosen = {"max_ids_per_partition": max_ids, "max_unique_ids_per_partition": max_unique_ids}
    for name, limits in chosen.items():
        limit = getattr(stack.spec, name)
        declared = {table.name: getattr(tables[table.name], name) for table in stack.tables}
        if limits is get_default_limits and set(declared.values()) != {limit}:
            _log.warning(
                "stack %r has %s=%d, the default of stacks of several tables; that of its tables is ignored: %s. "
                "Choose one by stack_to_%s, or after stacking by update_preprocessing_parameters.",
                *(stack.spec.stack_name, name, limit, declared, name),
            )


def prepare_feature_specs_for_training(
    feature_specs: Nested[FeatureSpec], global_device_count: int, num_sc_per_device: int | None = None
) -> None:
    """Gives every table that has no place yet a stack of its own, in place.

    Args:
      feature_specs: specs of all features, with declared shapes.
      global_device_count: devices of all processes.
      num_sc_per_device: cores per device; None takes the number that other tables were placed for, or
        `utils.num_sparsecores_per_device()`.

    Raises:
      ValueError: a name is used twice, a feature declares no batch, a table's combiner is "none", tables were placed
        for another number of shards, features are new to placed tables, or a batch cannot be cut into equal parts.
    """
    tables = tables_of(feature_specs).values()
    placed = [table for table in tables if table.stacked_table_spec is not None]
    if placed:
        num_sc_per_device = cores_of(placed, global_device_count, num_sc_per_device)
    num_shards, _ = _checked_sizes(feature_specs, global_device_count, num_sc_per_device)
    alone = [[table.name] for table in tables if table.stacked_table_spec is None]
    how = {"use_short_stack_names": False, "sort_features_by_name": True}
    attach_placement(feature_specs, plan_groups(feature_specs, alone, num_shards=num_shards, **how))
    stack_layouts(feature_specs, num_devices=global_device_count, num_cores=num_sc_per_device)


def attach_placement(features: Nested[FeatureSpec], plan: StackingPlan) -> None:
    """Writes a plan into the specs, in place: the one function that changes a spec.

    Raises: ValueError: tables that the plan leaves where they are lie on another number of shards, or their stacks have
      (or will have) a name that it gives to another.
    """
    planned = {placement.name for stack in plan.stacks for placement in stack.tables}
    others = [table for name, table in tables_of(features).items() if name not in planned]
    cores_of([table for table in others if table.stacked_table_spec is not None], 1, plan.num_shards)
    for table in others:
        name = table.name if table.stacked_table_spec is None else table.stacked_table_spec.stack_name
        if name in {stack.name for stack in plan.stacks}:
            raise ValueError(f"stack name {name!r} is already used by table {table.name!r}; choose another stack_name.")
    by_name = {feature.name: feature for feature in features_of(features)}
    for stack in plan.stacks:
        settings = {placement.name: placement.setting for placement in stack.tables}
        for feature in stack.features:
            by_name[feature.name].id_transformation = feature.transformation
            # Features may hold equal copies of one table spec; all of them get the placement.
            spec = by_name[feature.name].table_spec
            spec.setting_in_stack, spec.stacked_table_spec = settings[spec.name], stack.spec


def _checked_sizes(
    features: Nested[FeatureSpec],
    global_device_count: int,
    num_sc_per_device: int | None,
    rotation: int | None = None,
) -> tuple[int, int]:
    """Number of shards, and rotation of each further table in shards: one device's shards by default."""
    num_cores = resolve_cores(num_sc_per_device, global_device_count)
    for feature in features_of(features):
        table = feature.table_spec
        check_is_array(table)
        if feature.num_samples is None:
            raise ValueError(
                f"feature {feature.name!r}: declare the global batch with input_shape=(samples, ids) or "
                "output_shape=(samples, dim); the partitioned layout depends on it."
            )
        if table.combiner == "none":
            raise ValueError(
                f"table {table.name!r}: combiner 'none' has no partitioned layout; use 'sum' and one id per sample "
                "(ids reshaped to (-1, 1)) for sequences."
            )
    return global_device_count * num_cores, num_cores if rotation is None else rotation


def stack_and_shard_tables(
    table_specs: Nested[TableSpec],
    tables: PyTree,
    num_shards: int,
    pad_value: float = np.nan,
    *,
    allow_nonfinite: bool = False,
) -> dict[str, PyTree]:
    """Logical tables to stacked arrays `[num_shards, rows per shard, columns]`, padding filled with `pad_value`.

    Args:
      table_specs: all tables of some stacks; those without a place stand alone.
      tables: `[vocabulary, dim]` (or `[vocabulary]`, for one column) by table name, or in a tree like `table_specs`;
        or trees of such arrays (a table and its slots).
      num_shards: devices times cores.
      pad_value: value of padding rows and columns.
      allow_nonfinite: whether NaN, infinity and negative sums of squares are taken as they are; by default they are
        refused.

    Raises:
      ValueError: the tables were placed for another number of shards, some of a stack are missing, an array has another
        number of rows than its table, or a number is not finite.
    """
    result, specs = {}, [with_place(table, num_shards) for table in jax.tree.leaves(table_specs)]
    if not isinstance(tables, Mapping) or not {table.name for table in specs} & set(tables):
        leaves = leaves_like(table_specs, tables, "tables")
        tables = {table.name: leaf for table, leaf in zip(specs, leaves, strict=True)}
    cores_of(specs, 1, num_shards)
    for name, layout in stacks_of(specs).items():
        given = [_given(tables, table.name, "tables") for table in layout.tables]
        for table, tree in zip(layout.tables, given, strict=True):
            if not allow_nonfinite:
                _check_finite(tree, table)
        result[name] = jax.tree.map(functools.partial(_stacked, layout.row_layout, pad_value), *given)
    return result


def _check_finite(tree: PyTree, table: TableSpec) -> None:
    """Raises: ValueError: a table or one of its slots has a number that is not finite, or is negative where none is."""
    for path, array in jax.tree.leaves_with_path(tree):
        slot = jax.tree_util.keystr(path[-1:], simple=True)
        may_be_negative = slot not in table.optimizer.non_negative_slots
        check_finite(array, f"table {table.name!r}{jax.tree_util.keystr(path)}", may_be_negative=may_be_negative)


def _replicated(array: Array | np.ndarray) -> NamedSharding | None:
    """A copy on every device of an array's mesh, as JAX asks for where its axes are explicit; None elsewhere."""
    mesh = jax.typeof(array).sharding.mesh
    return NamedSharding(mesh, P()) if AxisType.Explicit in mesh.axis_types else None


def _stacked(layout: RowLayout, pad_value: float, *given: Any) -> Any:
    """A stack `[shards, rows, columns]` with the tables in their places, and `pad_value` in all others."""
    tables, placed = [table[:, None] if table.ndim == 1 else table for table in given], layout.stack.tables
    for own, table in zip(placed, tables, strict=True):
        if len(table) != own.rows:
            raise ValueError(f"table {own.name!r}: got {len(table)} rows, but vocabulary_size={own.rows}.")
    rows = [np.r_[layout.all_rows(own.name, own.rows)] for own in placed]
    # State that is shared along a row has columns of its own.
    is_full_width = [table.shape[1] for table in tables] == [own.dim for own in placed]
    columns = layout.stack.spec.stack_embedding_dim if is_full_width else tables[0].shape[1]
    # Tables that a mesh of explicit axes splits in ways of their own could not be put together.
    copies = [_replicated(table) for table in tables]
    whole = [t if own is None else jax.sharding.reshard(t, own) for t, own in zip(tables, copies, strict=True)]
    xp = np if isinstance(tables[0], np.ndarray) else jnp
    values = [xp.pad(t, ((0, 0), (0, columns - t.shape[1])), constant_values=pad_value) for t in whole]
    flat: Any = xp.full((layout.num_rows, columns), pad_value, values[0].dtype)
    if xp is jnp:
        flat = flat.at[np.concatenate(rows)].set(jnp.concatenate(values))
    else:
        flat[np.concatenate(rows)] = np.concatenate(values)
    return flat.reshape(layout.num_shards, layout.rows_per_shard, columns)


def _unstacked(stacked: PyTree, layout: RowLayout) -> dict[str, PyTree]:
    """The tables of a stack by name, in the order of ids and without padding.

    Args:
      stacked: a tree of flat arrays; those of fewer columns than the stack hold something for every row, and keep them.
      layout: where its tables lie.
    """

    def logical_rows(table: TablePlacement, array: Any) -> Array | np.ndarray:
        is_full_width = array.ndim == 2 and array.shape[1] == layout.stack.spec.stack_embedding_dim
        index, is_host = layout.all_rows(table.name, table.rows), isinstance(array, np.ndarray)
        rows = array[index] if is_host else array.at[index].get(out_sharding=_replicated(array))
        return rows[:, : table.dim] if is_full_width else rows

    tables = layout.stack.tables
    return {table.name: jax.tree.map(functools.partial(logical_rows, table), stacked) for table in tables}


@validated
def unshard_and_unstack_tables(
    table_specs: Nested[TableSpec], stacked_tables: Mapping[str, PyTree], num_shards: int
) -> PyTree:
    """The inverse of `stack_and_shard_tables`, padding removed, in a tree like `table_specs`.

    Flat arrays `[shards * rows, columns]` work too.

    Raises: ValueError: the tables were placed for another number of shards, or an array has another number of rows.
    """
    result: dict[str, PyTree] = {}
    specs = [with_place(table, num_shards) for table in jax.tree.leaves(table_specs)]
    cores_of(specs, 1, num_shards)
    for name, layout in stacks_of(specs, must_be_whole=False).items():
        stacked, shards = _given(stacked_tables, name, "stacked_tables"), (num_shards, layout.rows_per_shard)
        for leaf in jax.tree.leaves(stacked):
            if leaf.shape[:-1] not in (shards, (layout.spec.stack_vocab_size,)):
                raise ValueError(
                    f"stack {name!r}: got shape {leaf.shape}, but its tables were placed in "
                    f"{layout.spec.stack_vocab_size} rows on {num_shards} shards."
                )
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), stacked)
        result |= _unstacked(flat, layout.row_layout)
    return jax.tree.unflatten(jax.tree.structure(table_specs), [result[table.name] for table in specs])


@validated
def stack_and_shard_feature_tables(
    feature_tables: Mapping[str, Array | np.ndarray],
    embedding_specs: EmbeddingSpecRecord,
    delete_input: bool = False,
    *,
    allow_nonfinite: bool = False,
) -> dict[str, Array]:
    """Logical tables to flat stacked arrays `[shards * rows, columns]` as a record tells, padding filled with zeros.

    Args:
      feature_tables: `[vocabulary, dim]` (or `[vocabulary]`, for one column) by table name.
      embedding_specs: result of `create_proto_from_feature_specs`.
      delete_input: free the tables of a stack when it is made.
      allow_nonfinite: whether NaN and infinity are taken as they are; by default they are refused.

    Returns:
      An array per stack, sharded as its first table.

    Raises: ValueError: a table is missing, has another shape than it was recorded with, or is not finite.
    """
    for record in (table for stack in embedding_specs.stacked_table_specs for table in stack.table_specs):
        found = np.shape(_given(feature_tables, record.table_name, "feature_tables"))  # all, before one is freed
        shape = (record.vocab_size, record.embedding_dim)
        if (found if len(found) > 1 else (*found, 1)) != shape:
            raise ValueError(f"table {record.table_name!r}: got shape {found}, but it was recorded as {shape}.")
        if not allow_nonfinite:
            check_finite(feature_tables[record.table_name], f"table {record.table_name!r}")
    result = {}
    for stack in embedding_specs.stacked_table_specs:
        tables = [jnp.asarray(feature_tables[table.table_name]) for table in stack.table_specs]
        flat = _stacked(stack.row_layout, 0.0, *tables).reshape(stack.stack_vocab_size, -1)
        sharding = tables[0].sharding
        result[stack.stack_name] = jax.device_put(flat, sharding if len(sharding.device_set) > 1 else None)
        for given in tables if delete_input else ():
            given.delete()
    return result


@validated
def unstack_and_unshard_stacked_tables(
    stacked_tables: Mapping[str, Array], embedding_specs: EmbeddingSpecRecord, donate: bool = False
) -> dict[str, Array]:
    """The inverse of `stack_and_shard_feature_tables`: logical tables by name.

    Args:
      stacked_tables: flat arrays, or `[shards, rows, columns]`, by stack name.
      embedding_specs: the record of what they were made for.
      donate: free a stack when its tables are made.

    Raises: ValueError: a stack is missing, or has another shape than it was recorded with.
    """
    result: dict[str, Array] = {}
    for stack in embedding_specs.stacked_table_specs:  # all, before one is freed
        given = _given(stacked_tables, stack.stack_name, "stacked_tables")
        shape = (stack.stack_vocab_size, stack.stack_embedding_dim)
        if math.prod(given.shape) != math.prod(shape) or given.shape[-1] != shape[-1]:
            raise ValueError(f"stack {stack.stack_name!r}: got shape {given.shape}, but it was recorded as {shape}.")
    for stack in embedding_specs.stacked_table_specs:
        given = stacked_tables[stack.stack_name]
        flat = given.reshape(stack.stack_vocab_size, stack.stack_embedding_dim)
        tables = _unstacked(flat, stack.row_layout)
        if donate and isinstance(given, jax.Array):
            jax.block_until_ready(tables)
            given.delete()
        result |= tables
    return result


_next_largest_multiple, _split_groups_by_memory_limit = round_up, split_by_memory  # published programs call them


@validated
def round_up_dim_and_vocab_size(tables: Mapping[str, TableSpec], num_sc: int) -> tuple[dict[str, int], dict[str, int]]:
    """Columns and rows of tables with padding, by table name, for so many cores over all devices."""
    dims = {name: round_up(table.embedding_dim, SUBLANES) for name, table in tables.items()}
    return dims, {name: round_up(table.vocabulary_size, SUBLANES * num_sc) for name, table in tables.items()}


@validated
def compute_table_to_setting_in_stack(
    stack_name: str,
    table_names: Sequence[str],
    padded_embedding_dim: int,
    table_to_padded_vocab_size: Mapping[str, int],
    num_shards: PositiveInt,
    rotation: int,
) -> dict[str, TableSettingInStack]:
    """Setting of each table in a stack, by name, from padded sizes; tables lie one under the other.

    Raises: ValueError: the rows of a table are missing.
    """
    rows = [_given(table_to_padded_vocab_size, name, "table_to_padded_vocab_size") for name in table_names]
    settings = settings_in_stack(stack_name, rows, padded_embedding_dim, num_shards=num_shards, rotation=rotation)
    return dict(zip(table_names, settings, strict=True))


def _given(given: Mapping[str, PyTree], name: str, what: str) -> PyTree:
    if name not in given:
        raise ValueError(f"{what} have no {name!r}, only {sorted(given)}.")
    return given[name]


def stacking_plan(feature_specs: Nested[FeatureSpec]) -> StackingPlan:
    """The plan behind placed specs: print it for memory and padding, ask it for the load of the shards.

    Raises: ValueError: a table has no place yet, or tables were placed for different numbers of shards.
    """
    layouts = stack_layouts(feature_specs, num_devices=1, num_cores=None).values()
    return StackingPlan(num_shards=next(iter(layouts)).num_shards, stacks=tuple(layout.plan for layout in layouts))

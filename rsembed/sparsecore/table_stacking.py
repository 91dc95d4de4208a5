"""Functions of jax-tpu-embedding that stack tables and write the placement into their specs.

`rsembed.stacking` plans the placement.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxtyping import Array, PyTree

from rsembed.arrays import copied_rows
from rsembed.checks import PositiveInt, check_finite, validated
from rsembed.sparsecore.embedding_spec import (
    EmbeddingSpecRecord,
    StackRecord,
    TableRecord,
    compute_physical_row_ids as compute_physical_row_ids,
    get_row_ids_in_stacked_table as get_row_ids_in_stacked_table,
    get_row_ids_in_stacked_tables as get_row_ids_in_stacked_tables,
    stack_record,
)
from rsembed.sparsecore.layout import (
    Nested,
    check_is_array,
    cores_of,
    entry_of,
    get_table_stacks as get_table_stacks,
    leaves_like,
    resolve_cores,
    stack_layouts,
    stacks_of,
    with_place,
)
from rsembed.specs import (
    DEFAULT_ACTIVATION_MEM_BYTES_LIMIT,
    FeatureSpec,
    StackedTableSpec as StackedTableSpec,
    TableSettingInStack,
    TableSpec,
    features_of,
    tables_of,
)
from rsembed.stacking import (
    SUBLANES,
    LimitsCallable,
    StackingPlan,
    StackPlan,
    get_default_limits,
    group_tables,
    plan_groups,
    plan_stack,
    round_up,
    settings_in_stack,
    split_by_memory,
    stack_name_of,
)
from rsembed.storage.protocol import TableRows

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
    activation_mem_bytes_limit: PositiveInt = DEFAULT_ACTIVATION_MEM_BYTES_LIMIT,
) -> None:
    """Stacks tables with equal padded dim, dtype, optimizer, combiner, rounding and quantization.

    `auto_stack_tables` writes the placement of every table in its stack into the specs of the
    tables and features. Tables that `stack_tables` has already assigned to stacks keep these
    stacks.

    Args:
      features: specs of all features, which are changed in place. A list or tuple may contain the
        same feature spec twice, as in programs for jax-tpu-embedding. A repeated feature is counted
        once, and a batch contains its ids once.
      global_device_count: number of devices of all processes.
      num_sc_per_device: cores per device, by default `utils.num_sparsecores_per_device()`.
      rotation: number of shards by which the ids of each table are shifted relative to the
        preceding table of the stack. The default rotation is the number of shards on one device.
      stack_to_max_ids_per_partition: function that returns the limit of ids per partition for a
        stack of several tables, called as `f(stack_name, samples)`. The limit of the stack replaces
        `max_ids_per_partition` of its tables. By default, the limit of a stack is 256, and the
        logger "rsembed" warns of tables that declare another limit.
      stack_to_max_unique_ids_per_partition: function that returns the limit of distinct ids per
        partition.
      use_short_stack_names: whether a stack name of more than 50 characters is shortened to its
        first 50 characters and a hash. True by default.
      activation_mem_bytes_limit: maximum size of the activations of a stack in bytes per shard, 2
        MiB by default. If the activations of all tables in one stack would be larger than
        `activation_mem_bytes_limit`, the tables are put into several stacks.
    """
    if isinstance(features, (list, tuple)):
        features = list({id(feature): feature for feature in features}.values())
    num_shards, rotation = _checked_sizes(
        features, global_device_count, num_sc_per_device, rotation
    )
    tables = tables_of(features)
    unstacked_groups = []
    for group in group_tables(
        features, num_shards=num_shards, activation_mem_bytes_limit=activation_mem_bytes_limit
    ):
        unstacked = [name for name in group if tables[name].setting_in_stack.stack_name == name]
        if unstacked:
            unstacked_groups.append(unstacked)
    plan = plan_groups(
        features,
        unstacked_groups,
        num_shards=num_shards,
        rotation=rotation,
        use_short_stack_names=use_short_stack_names,
        max_ids_per_partition=stack_to_max_ids_per_partition,
        max_unique_ids_per_partition=stack_to_max_unique_ids_per_partition,
        activation_mem_bytes_limit=activation_mem_bytes_limit,
    )
    for stack in plan.stacks:
        _warn_of_ignored_limits(
            tables, stack, stack_to_max_ids_per_partition, stack_to_max_unique_ids_per_partition
        )
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
    activation_mem_bytes_limit: PositiveInt = DEFAULT_ACTIVATION_MEM_BYTES_LIMIT,
) -> None:
    """Stacks tables in the order of `table_names`.

    `stack_tables` writes the placement of every table in the stack into the specs of the tables and
    features. All tables of the stack are padded to the number of columns of the widest table,
    rounded up to a multiple of 8.

    Args:
      features: specs of all features. The features that read the named tables are changed in place.
      table_names: names of the tables, in the order of their rows in the stack.
      global_device_count: number of devices of all processes.
      num_sc_per_device: cores per device, by default `utils.num_sparsecores_per_device()`.
      rotation: number of shards by which the ids of each table are shifted relative to the
        preceding table of the stack. The default rotation is the number of shards on one device.
      stack_to_max_ids_per_partition: function that returns the limit of ids per partition for a
        stack of several tables, called as `f(stack_name, samples)`. By default, the limit of a
        stack is 256. See `auto_stack_tables`.
      stack_to_max_unique_ids_per_partition: function that returns the limit of distinct ids per
        partition.
      stack_name: name of the stack, by default the joined table names.
      fail_on_excess_padding: whether it is an error to pad a table beyond the next multiple of 8
        columns, False by default.
      activation_mem_bytes_limit: maximum size of the activations of the stack in bytes per shard, 2
        MiB by default. `stack_tables` stores `activation_mem_bytes_limit` in the spec of the stack,
        but does not check the size of the activations.

    Raises:
      ValueError: a table is repeated, unknown or already stacked, the tables cannot share a stack,
        or the stack name is already used.
    """
    num_shards, rotation = _checked_sizes(
        features, global_device_count, num_sc_per_device, rotation
    )
    tables = tables_of(features)
    name = stack_name_of(table_names) if stack_name is None else stack_name
    stack = plan_stack(
        features,
        table_names,
        stack_name=name,
        num_shards=num_shards,
        rotation=rotation,
        max_ids_per_partition=stack_to_max_ids_per_partition,
        max_unique_ids_per_partition=stack_to_max_unique_ids_per_partition,
        activation_mem_bytes_limit=activation_mem_bytes_limit,
    )
    columns = stack.spec.stack_embedding_dim
    excess = {}
    for placement in stack.tables:
        present_stack = tables[placement.name].setting_in_stack.stack_name
        if present_stack != placement.name:
            raise ValueError(
                f"Table {placement.name} is already stacked, in {present_stack!r}; a table has one "
                "place."
            )
        excess_columns = columns - round_up(placement.dim, SUBLANES)
        excess[placement.name] = excess_columns * placement.setting.padded_vocab_size
    if fail_on_excess_padding and any(excess.values()):
        raise ValueError(
            f"stack {name!r}: padding to {columns} columns adds {sum(excess.values())} values "
            f"({excess}); stack tables of equal dim, or pass fail_on_excess_padding=False."
        )
    _warn_of_ignored_limits(
        tables, stack, stack_to_max_ids_per_partition, stack_to_max_unique_ids_per_partition
    )
    attach_placement(features, StackingPlan(num_shards=num_shards, stacks=(stack,)))


def _warn_of_ignored_limits(
    tables: Mapping[str, TableSpec],
    stack: StackPlan,
    max_ids: LimitsCallable,
    max_unique_ids: LimitsCallable,
) -> None:
    """Warns if the default limits of a stack replace limits that its tables declare."""
    if len(stack.tables) == 1:
        return
    chosen = {"max_ids_per_partition": max_ids, "max_unique_ids_per_partition": max_unique_ids}
    for name, limits in chosen.items():
        limit = getattr(stack.spec, name)
        declared = {table.name: getattr(tables[table.name], name) for table in stack.tables}
        if limits is get_default_limits and set(declared.values()) != {limit}:
            _log.warning(
                "stack %r has %s=%d, the default of stacks of several tables; that of its tables "
                "is ignored: %s. Choose one by stack_to_%s, or after stacking by "
                "update_preprocessing_parameters.",
                stack.spec.stack_name,
                name,
                limit,
                declared,
                name,
            )


@validated
def prepare_feature_specs_for_training(
    feature_specs: Nested[FeatureSpec],
    global_device_count: int,
    num_sc_per_device: int | None = None,
) -> None:
    """Assigns every table that has no stack yet to a separate stack.

    `prepare_feature_specs_for_training` writes the placement of every table in its stack into the
    specs of the tables and features.

    Args:
      feature_specs: specs of all features, with declared shapes.
      global_device_count: number of devices of all processes.
      num_sc_per_device: cores per device, by default the number that earlier calls used to stack
        tables, or `utils.num_sparsecores_per_device()` if no table is in a stack yet.

    Raises:
      ValueError: a name is used twice, a feature does not declare its batch size, a table has the
        combiner "none", a table was stacked for a different number of shards, a stacked table has
        new features, or a batch cannot be split into equal parts.
    """
    placed = []
    unplaced = []
    for table in tables_of(feature_specs).values():
        if table.stacked_table_spec is None:
            unplaced.append([table.name])
        else:
            placed.append(table)
    if placed:
        num_sc_per_device = cores_of(placed, global_device_count, num_sc_per_device)
    num_shards, _ = _checked_sizes(feature_specs, global_device_count, num_sc_per_device)
    plan = plan_groups(
        feature_specs,
        unplaced,
        num_shards=num_shards,
        use_short_stack_names=False,
        sort_features_by_name=True,
    )
    attach_placement(feature_specs, plan)
    stack_layouts(feature_specs, num_devices=global_device_count, num_cores=num_sc_per_device)


def attach_placement(features: Nested[FeatureSpec], plan: StackingPlan) -> None:
    """Writes the placement of a plan into the specs of features and tables.

    Raises: ValueError: a table outside the plan was stacked for a different number of shards, or
      its stack has the name of a planned stack.
    """
    settings = {}
    for stack in plan.stacks:
        for placement in stack.tables:
            settings[placement.name] = placement.setting
    planned_stacks = {stack.name for stack in plan.stacks}
    others = [table for name, table in tables_of(features).items() if name not in settings]
    placed = [table for table in others if table.stacked_table_spec is not None]
    cores_of(placed, 1, plan.num_shards)
    for table in others:
        name = table.setting_in_stack.stack_name
        if name in planned_stacks:
            raise ValueError(
                f"stack name {name!r} is already used by table {table.name!r}; choose another stack_name."
            )
    by_name = {feature.name: feature for feature in features_of(features)}
    for stack in plan.stacks:
        for feature in stack.features:
            by_name[feature.name].id_transformation = feature.transformation
            # Features of one table may refer to different copies of the table spec, so the
            # placement is written into every copy of this spec.
            spec = by_name[feature.name].table_spec
            spec.setting_in_stack = settings[spec.name]
            spec.stacked_table_spec = stack.spec


def _checked_sizes(
    features: Nested[FeatureSpec],
    global_device_count: int,
    num_sc_per_device: int | None,
    rotation: int | None = None,
) -> tuple[int, int]:
    """Checks the features, and returns the number of shards and the rotation in shards.

    If `rotation` is None, the rotation is the number of shards on one device.
    """
    num_cores = resolve_cores(num_sc_per_device, global_device_count)
    for feature in features_of(features):
        table = feature.table_spec
        check_is_array(table)
        if feature.num_samples is None:
            raise ValueError(
                f"feature {feature.name!r}: declare the global batch with input_shape=(samples, "
                "ids) or output_shape=(samples, dim); the partitioned layout depends on it."
            )
        if table.combiner == "none":
            raise ValueError(
                f"table {table.name!r}: combiner 'none' has no partitioned layout; use 'sum' and "
                "one id per sample (ids reshaped to (-1, 1)) for sequences."
            )
    if rotation is None:
        rotation = num_cores
    return global_device_count * num_cores, rotation


def stack_and_shard_tables(
    table_specs: Nested[TableSpec],
    tables: PyTree,
    num_shards: int,
    pad_value: float = np.nan,
    *,
    allow_nonfinite: bool = False,
) -> dict[str, TableRows]:
    """Stacked arrays `[num_shards, rows per shard, columns]` by stack name, from logical tables.

    Args:
      table_specs: all tables of one or more stacks. A table that has no stack yet becomes the
        only table of a stack.
      tables: arrays `[vocabulary, dim]` (or `[vocabulary]`, for one column) by table name or in a
        tree like `table_specs`. In place of an array, a tree of arrays is allowed, such as a table
        and its slots.
      num_shards: number of shards: devices times cores per device.
      pad_value: value of padding rows and columns, NaN by default.
      allow_nonfinite: whether NaN, infinity and negative sums of squares are accepted instead of
        raising an error, False by default.

    Raises:
      ValueError: the tables were stacked for a different number of shards, tables of a stack are
        missing, an array has a different number of rows than its table, or a number is not finite.
    """
    specs = [with_place(table, num_shards) for table in jax.tree.leaves(table_specs)]
    if not isinstance(tables, Mapping) or not {table.name for table in specs} & set(tables):
        leaves = leaves_like(table_specs, tables, "tables")
        tables = {table.name: leaf for table, leaf in zip(specs, leaves, strict=True)}
    result = {}
    for name, layout in stacks_of(specs, 1, num_shards).items():
        trees = []
        for table in layout.tables:
            tree = entry_of(tables, table.name, "tables")
            if not allow_nonfinite:
                _check_finite(tree, table)
            trees.append(tree)
        stack = stack_record(layout)
        result[name] = jax.tree.map(functools.partial(_stacked, stack, pad_value), *trees)
    return result


def _check_finite(tree: TableRows, table: TableSpec) -> None:
    """Raises: ValueError: a table or slot entry is not finite, or a sum of squares is negative."""
    for path, array in jax.tree.leaves_with_path(tree):
        slot = jax.tree_util.keystr(path[-1:], simple=True)
        may_be_negative = slot not in table.optimizer.non_negative_slots
        check_finite(
            array,
            f"table {table.name!r}{jax.tree_util.keystr(path)}",
            may_be_negative=may_be_negative,
        )


def _replicated(array: Array | np.ndarray) -> NamedSharding | None:
    """Sharding that replicates `array`, or None if the mesh of `array` has no explicit axes."""
    mesh = jax.typeof(array).sharding.mesh
    return NamedSharding(mesh, P()) if AxisType.Explicit in mesh.axis_types else None


def _stacked(stack: StackRecord, pad_value: float, *tables: Any) -> Any:
    """Stacked array `[shards, rows, columns]` of logical tables, with `pad_value` as padding."""
    arrays = []
    rows = []
    for table, array in zip(stack.table_specs, tables, strict=True):
        if len(array) != table.vocab_size:
            raise ValueError(
                f"table {table.table_name!r}: got {len(array)} rows, but vocabulary_size={table.vocab_size}."
            )
        if array.ndim == 1:
            array = array[:, None]
        arrays.append(array)
        rows.append(np.r_[stack.all_rows(table)])
    # Padding columns are added only if each array has as many columns as its table. Slots with one
    # number per row get no padding columns.
    columns = arrays[0].shape[1]
    widths = [array.shape[1] for array in arrays]
    dims = [table.embedding_dim for table in stack.table_specs]
    if widths == dims:
        columns = stack.stack_embedding_dim
    xp = np if isinstance(arrays[0], np.ndarray) else jnp
    values = []
    for array in arrays:
        # JAX cannot concatenate arrays with different explicit shardings, so replicate every array.
        sharding = _replicated(array)
        if sharding is not None:
            array = jax.sharding.reshard(array, sharding)
        padding = ((0, 0), (0, columns - array.shape[1]))
        values.append(xp.pad(array, padding, constant_values=pad_value))
    flat: Any = xp.full((stack.stack_vocab_size, columns), pad_value, values[0].dtype)
    if xp is jnp:
        flat = flat.at[np.concatenate(rows)].set(jnp.concatenate(values))
    else:
        flat[np.concatenate(rows)] = np.concatenate(values)
    return flat.reshape(stack.num_sparsecores, -1, columns)


def _rows_at(array: Any, index: Any) -> Array | np.ndarray:
    """`array[index]`, replicated if the mesh of the array has explicit axes."""
    if isinstance(array, np.ndarray):
        return array[index]
    sharding = _replicated(array)
    if sharding is not None:
        return array.at[index].get(out_sharding=sharding)
    (rows,) = copied_rows((array,), index)
    return rows


def _unstacked(stacked: TableRows, stack: StackRecord) -> dict[str, TableRows]:
    """The logical tables of a stack by name, with rows in the order of ids and without padding.

    Args:
      stacked: tree of arrays `[rows of the stack, columns]`. Padding columns are removed only from
        arrays that have as many columns as the stack, and not from slots with one number per row.
      stack: description of the stack.
    """

    def logical_rows(table: TableRecord, array: Any) -> Array | np.ndarray:
        rows = _rows_at(array, stack.all_rows(table))
        is_full_width = array.ndim == 2 and array.shape[1] == stack.stack_embedding_dim
        return rows[:, : table.embedding_dim] if is_full_width else rows

    tables = {}
    for table in stack.table_specs:
        tables[table.table_name] = jax.tree.map(functools.partial(logical_rows, table), stacked)
    return tables


@validated
def unshard_and_unstack_tables(
    table_specs: Nested[TableSpec], stacked_tables: Mapping[str, TableRows], num_shards: int
) -> PyTree:
    """Logical tables in a tree like `table_specs`: the inverse of `stack_and_shard_tables`.

    Args:
      table_specs: specs of the tables to return.
      stacked_tables: arrays `[shards, rows, columns]` or `[shards * rows, columns]`, or trees of
        such arrays, by stack name.
      num_shards: number of shards: devices times cores per device.

    Raises: ValueError: the tables were stacked for a different number of shards, or an array has a
      different number of rows than its stack.
    """
    result: dict[str, TableRows] = {}
    specs = [with_place(table, num_shards) for table in jax.tree.leaves(table_specs)]
    for name, layout in stacks_of(specs, 1, num_shards, must_be_whole=False).items():
        stacked = entry_of(stacked_tables, name, "stacked_tables")
        by_shard = (num_shards, layout.rows_per_shard)
        for leaf in jax.tree.leaves(stacked):
            if leaf.shape[:-1] not in (by_shard, (layout.spec.stack_vocab_size,)):
                raise ValueError(
                    f"stack {name!r}: got shape {leaf.shape}, but its tables were placed in "
                    f"{layout.spec.stack_vocab_size} rows on {num_shards} shards."
                )
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), stacked)
        result |= _unstacked(flat, stack_record(layout))
    return jax.tree.map(lambda table: result[table.name], table_specs)


@validated
def stack_and_shard_feature_tables(
    feature_tables: Mapping[str, Array | np.ndarray],
    embedding_specs: EmbeddingSpecRecord,
    delete_input: bool = False,
    *,
    allow_nonfinite: bool = False,
) -> dict[str, Array]:
    """Flat stacked arrays `[shards * rows, columns]` by stack name, from logical tables.

    Padding rows and columns are zero.

    Args:
      feature_tables: arrays `[vocabulary, dim]` (or `[vocabulary]`, for one column) by table name.
      embedding_specs: result of `create_proto_from_feature_specs`.
      delete_input: whether the input tables of a stack are deleted after the stack is built, False
        by default.
      allow_nonfinite: whether NaN and infinity are accepted instead of raising an error, False by
        default.

    Returns:
      One array per stack, by stack name. If the first table of a stack is on several devices, the
      array of the stack has the sharding of this table. If the first table of a stack is on one
      device, the array of the stack is on one device.

    Raises: ValueError: a table is missing, its shape differs from `embedding_specs`, or a number is
      not finite.
    """
    # Check all tables before the loop deletes the first table.
    for stack in embedding_specs.stacked_table_specs:
        for record in stack.table_specs:
            shape = np.shape(entry_of(feature_tables, record.table_name, "feature_tables"))
            recorded = (record.vocab_size, record.embedding_dim)
            if (shape if len(shape) > 1 else (*shape, 1)) != recorded:
                raise ValueError(
                    f"table {record.table_name!r}: got shape {shape}, but it was recorded as {recorded}."
                )
            if not allow_nonfinite:
                check_finite(feature_tables[record.table_name], f"table {record.table_name!r}")
    result = {}
    for stack in embedding_specs.stacked_table_specs:
        tables = [jnp.asarray(feature_tables[table.table_name]) for table in stack.table_specs]
        flat = _stacked(stack, 0.0, *tables).reshape(stack.stack_vocab_size, -1)
        is_sharded = len(tables[0].sharding.device_set) > 1
        result[stack.stack_name] = jax.device_put(flat, tables[0].sharding if is_sharded else None)
        if delete_input:
            for table in tables:
                table.delete()
    return result


@validated
def unstack_and_unshard_stacked_tables(
    stacked_tables: Mapping[str, Array], embedding_specs: EmbeddingSpecRecord, donate: bool = False
) -> dict[str, Array]:
    """Logical tables by name, from stacked arrays: inverse of `stack_and_shard_feature_tables`.

    Args:
      stacked_tables: arrays `[shards * rows, columns]` or `[shards, rows, columns]` by stack name.
      embedding_specs: description of the stacks, as returned by `create_proto_from_feature_specs`.
      donate: whether the array of a stack is deleted after its tables are built, False by default.

    Raises: ValueError: a stack is missing, or its shape differs from `embedding_specs`.
    """
    # Check all stacks before the loop deletes the first stack.
    for stack in embedding_specs.stacked_table_specs:
        stacked = entry_of(stacked_tables, stack.stack_name, "stacked_tables")
        recorded = (stack.stack_vocab_size, stack.stack_embedding_dim)
        if math.prod(stacked.shape) != math.prod(recorded) or stacked.shape[-1] != recorded[-1]:
            raise ValueError(
                f"stack {stack.stack_name!r}: got shape {stacked.shape}, but it was recorded as {recorded}."
            )
    result: dict[str, Array] = {}
    for stack in embedding_specs.stacked_table_specs:
        stacked = stacked_tables[stack.stack_name]
        flat = stacked.reshape(stack.stack_vocab_size, stack.stack_embedding_dim)
        tables = _unstacked(flat, stack)
        if donate and isinstance(stacked, jax.Array):
            jax.block_until_ready(tables)
            stacked.delete()
        result |= tables
    return result


# Programs for jax-tpu-embedding use `round_up` and `split_by_memory` under private names.
_next_largest_multiple = round_up
_split_groups_by_memory_limit = split_by_memory


@validated
def round_up_dim_and_vocab_size(
    tables: Mapping[str, TableSpec], num_sc: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Two dictionaries by table name: padded numbers of columns, and padded numbers of rows.

    `num_sc` is the number of cores of all devices.
    """
    dims = {}
    vocab_sizes = {}
    for name, table in tables.items():
        dims[name] = round_up(table.embedding_dim, SUBLANES)
        vocab_sizes[name] = round_up(table.vocabulary_size, SUBLANES * num_sc)
    return dims, vocab_sizes


@validated
def compute_table_to_setting_in_stack(
    stack_name: str,
    table_names: Sequence[str],
    padded_embedding_dim: int,
    table_to_padded_vocab_size: Mapping[str, int],
    num_shards: PositiveInt,
    rotation: int,
) -> dict[str, TableSettingInStack]:
    """Placement of each table in a stack, by table name.

    The tables are stacked in the order of `table_names`.

    Raises: ValueError: `table_to_padded_vocab_size` lacks a table in `table_names`.
    """
    rows = [
        entry_of(table_to_padded_vocab_size, name, "table_to_padded_vocab_size")
        for name in table_names
    ]
    settings = settings_in_stack(
        stack_name, rows, padded_embedding_dim, num_shards=num_shards, rotation=rotation
    )
    return dict(zip(table_names, settings, strict=True))


def stacking_plan(feature_specs: Nested[FeatureSpec]) -> StackingPlan:
    """Plan of the stacks that contain all tables of `feature_specs`.

    Print the plan to see memory and padding. `StackingPlan.shard_load` computes the ids per shard.

    Raises: ValueError: a table has no stack yet, or tables were stacked for different numbers of
      shards.
    """
    layouts = list(stack_layouts(feature_specs, num_devices=1, num_cores=None).values())
    stacks = tuple(layout.plan for layout in layouts)
    return StackingPlan(num_shards=layouts[0].num_shards, stacks=stacks)

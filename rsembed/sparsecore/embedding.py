"""Functions that initialize, look up and update stacks of tables, named as in jax-tpu-embedding.

On every device, lookup and update convert preprocessed buffers to row indices for the engine:

```
buffers ──entries by sample──▶ rows, samples, gains ──Rows, AskedRows──▶ activations; tables, slots
```
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, PRNGKeyArray, PyTree

from rsembed.checks import check_type, validated
from rsembed.collection.devices import Devices
from rsembed.collection.occurrences import Occurrences
from rsembed.fdo.statistics import (
    EXACT,
    LimitsPolicy,
    SparseDenseMatmulInputStats as SparseDenseMatmulInputStats,
    limits_from_statistics,
)
from rsembed.kernels import api
from rsembed.kernels.contract import Call, IdList, Rounding, Step
from rsembed.kernels.ids import Partitions
from rsembed.parallel.exchange import AxisName, default_capacity, together
from rsembed.row_gradients import check_gradient
from rsembed.sparsecore import table_stacking
from rsembed.sparsecore.embedding_spec import (
    create_proto_from_feature_specs as create_proto_from_feature_specs,
    get_optimizer_class as get_optimizer_class,
    get_optimizer_type as get_optimizer_type,
    optimizer_spec_to_proto as optimizer_spec_to_proto,
    proto_to_optimizer_spec as proto_to_optimizer_spec,
)
from rsembed.sparsecore.layout import (
    MAX_MINIBATCHES,
    ArrayLike as ArrayLike,
    Nested as Nested,
    Scalar,
    StackLayout,
    compute_row_pointers_size_per_device as compute_row_pointers_size_per_device,
    compute_theoretical_max_coo_buffer_size as compute_theoretical_max_coo_buffer_size,
    entry_of,
    leaves_like,
    placed_stack,
    sharding_strategy_to_enum as sharding_strategy_to_enum,
    stack_layouts,
)
from rsembed.sparsecore.preprocessing import (
    PreprocessedInput as PreprocessedInput,
    SparseDenseMatmulInput as SparseDenseMatmulInput,
    eval_preprocess_sparse_dense_matmul_input_shape as eval_preprocess_sparse_dense_matmul_input_shape,
    get_all_reduce_interface as get_all_reduce_interface,
    preprocess_sparse_dense_matmul_input as preprocess_sparse_dense_matmul_input,
    preprocess_sparse_dense_matmul_input_from_sparse_tensor as preprocess_sparse_dense_matmul_input_from_sparse_tensor,
)
from rsembed.sparsecore.table_stacking import (
    prepare_feature_specs_for_training as prepare_feature_specs_for_training,
    stack_tables as stack_tables,
)
from rsembed.sparsecore.variables import (
    Activations,
    EmbeddingVariables as EmbeddingVariables,
    RowLimits,
    checked_limits,
    initialize,
    rule_of,
    stack_rows,
    variables_of,
)
from rsembed.specs import (
    CallableTableInitializer,
    FeatureSpec,
    StackedTableSpec,
    TableSpec,
    features_of,
    tables_of,
)
from rsembed.stacking import (
    LimitsCallable as LimitsCallable,
    get_default_limits as get_default_limits,
)


class EmbeddingVariablesInitializer(NamedTuple):
    """Initializers `(key, shape) -> array` for the fields of an `EmbeddingVariables`."""

    table: CallableTableInitializer
    slot: tuple[CallableTableInitializer, ...]


def auto_stack_tables(
    feature_specs: Nested[FeatureSpec],
    global_device_count: int,
    num_sc_per_device: int | None = None,
    stack_to_max_ids_per_partition: LimitsCallable = get_default_limits,
    stack_to_max_unique_ids_per_partition: LimitsCallable = get_default_limits,
    use_short_stack_names: bool = True,
    **options: Any,
) -> None:
    """Stacks all tables that can share a stack.

    The function writes the result into the specs of the tables and features. For the arguments
    see `table_stacking.auto_stack_tables`, which also gets the keyword arguments `options`.
    """
    table_stacking.auto_stack_tables(
        feature_specs,
        global_device_count,
        num_sc_per_device,
        stack_to_max_ids_per_partition=stack_to_max_ids_per_partition,
        stack_to_max_unique_ids_per_partition=stack_to_max_unique_ids_per_partition,
        use_short_stack_names=use_short_stack_names,
        **options,
    )


def get_table_specs(feature_specs: Nested[FeatureSpec]) -> dict[str, TableSpec]:
    """The tables that the features read, by name."""
    return tables_of(feature_specs)


def get_stacked_table_specs(feature_specs: Nested[FeatureSpec]) -> dict[str, StackedTableSpec]:
    """The stacks that the features read, by name.

    Raises: ValueError: a table is not assigned to a stack yet.
    """
    stacks = {}
    for table in tables_of(feature_specs).values():
        stacks[table.setting_in_stack.stack_name] = placed_stack(table)
    return stacks


def compute_coo_buffer_size_per_device(
    feature_specs: Nested[FeatureSpec],
    global_device_count: int,
    num_sc_per_device: int | None = None,
    enable_minibatching: bool = False,
) -> dict[str, int]:
    """Size of the input buffer of one device, in entries, for each stack by name."""
    layouts = stack_layouts(
        feature_specs, num_devices=global_device_count, num_cores=num_sc_per_device
    )
    sizes = {}
    for name, layout in layouts.items():
        sizes[name] = layout.buffer_size_per_device(enable_minibatching)
    return sizes


@validated
def init_embedding_variables(
    rng: PRNGKeyArray,
    table_specs: Nested[TableSpec],
    global_sharding: NamedSharding,
    num_sparsecore_per_device: int | None = None,
    bypass_mesh_check: bool = False,
) -> dict[str, EmbeddingVariables]:
    """Initial tables and optimizer slots of all stacks. Every device builds only its shard.

    The initial values of a logical table depend only on `rng` and on the table's name and
    initializer, not on stacking, sharding or the number of devices. The shape that an initializer
    gets is the logical shape, `(vocabulary_size, embedding_dim)`. Padding rows and columns are
    zero.

    Args:
      rng: random key of the model.
      table_specs: tables, for example from `get_table_specs`. A table that is not assigned to a
        stack yet becomes the only table of a stack.
      global_sharding: `NamedSharding(mesh, PartitionSpec(axis, None))`. With
        `PartitionSpec(axis, None, None)`, tables and slots get a leading axis of devices, as
        `jax.pmap` needs.
      num_sparsecore_per_device: SparseCores per device, by default the number for which the tables
        were stacked. The variables do not record the number of SparseCores. A lookup with specs
        that were stacked for another number of SparseCores reads wrong rows without an error.
      bypass_mesh_check: ignored. The mesh may have its devices in any order.

    Raises:
      ValueError: the sharding does not split rows over devices, or the tables were stacked for a
        different number of shards.
    """
    del bypass_mesh_check
    axis, *others = (*global_sharding.spec, None)
    if axis is None or any(others) or len(others) > 3:
        raise ValueError(
            "global_sharding must split rows alone: the PartitionSpec of the global sharding "
            "either needs to be in the format ('x', None) or, for jax.pmap, ('x', None, None); "
            f"got {global_sharding.spec}."
        )
    mesh: Any = global_sharding.mesh  # `Any`, because the mesh can be an `AbstractMesh`.
    devices = Devices(mesh, (axis,) if isinstance(axis, str) else tuple(axis))
    variables = initialize(rng, jax.tree.leaves(table_specs), devices, num_sparsecore_per_device)
    if len(global_sharding.spec) < 3:
        return variables
    by_device = functools.partial(
        jax.tree.map, lambda rows: rows.reshape(devices.num_devices, -1, rows.shape[-1])
    )
    return jax.jit(by_device, out_shardings=global_sharding)(variables)


def update_preprocessing_parameters(
    feature_specs: Nested[FeatureSpec],
    updated_params: SparseDenseMatmulInputStats,
    num_sc_per_device: int,
    *,
    policy: LimitsPolicy = EXACT,
) -> None:
    """Sets the limits and buffer sizes of all stacks in place, from observed statistics.

    By default, as in jax-tpu-embedding, limits are set to the largest observed values. Limits
    without headroom keep the buffers small, but almost every call changes the buffer sizes, so
    `jit` compiles the training step again. For a long run, prefer `policy=LimitsPolicy()`, which
    adds headroom, never lowers a limit, and uses only a few sizes. The new limits are part of the
    next preprocessed batch, so `jit` traces the training step again if the limits changed.

    Args:
      feature_specs: specs of all features, with their tables already assigned to stacks.
        Stacks without statistics keep their limits.
      updated_params: statistics of one or more batches, as loaded by a client of `rsembed.fdo`.
      num_sc_per_device: SparseCores per device.
      policy: how limits are computed from the observed maxima. See
        `rsembed.fdo.limits_from_statistics`. Default: `EXACT`.
    """
    stacks = get_stacked_table_specs(feature_specs)
    limits = limits_from_statistics(
        stacks.values(), updated_params, num_sc_per_device, policy=policy
    )
    for feature in features_of(feature_specs):
        stack = placed_stack(feature.table_spec)
        feature.table_spec.stacked_table_spec = stack.replace(**limits[stack.stack_name]._asdict())


def sparse_dense_matmul(
    preprocessed_inputs: PreprocessedInput | SparseDenseMatmulInput,
    embedding_variables: Mapping[str, tuple[PyTree, ...]],
    feature_specs: Nested[FeatureSpec],
    *,
    global_device_count: int,
    sharding_strategy: str = "MOD",
    num_sc_per_device: int | None = None,
    enable_minibatching: bool = False,
    perform_unstacking: bool = True,
    use_activation_unstack_primitive: bool = False,
    axis_name: AxisName | None = None,
) -> Activations:
    """Activations of this device's samples.

    With several devices, call `sparse_dense_matmul` inside `jax.shard_map`.

    Args:
      preprocessed_inputs: this device's part of the batch.
      embedding_variables: this device's part of the variables, by stack.
      feature_specs: specs of all features, with their tables already assigned to stacks.
      global_device_count: number of devices that share the tables.
      sharding_strategy: "MOD", the only sharding strategy.
      num_sc_per_device: SparseCores per device, by default the number for which the tables were
        stacked.
      enable_minibatching: whether the batch was preprocessed with `enable_minibatching=True`, False
        by default.
      perform_unstacking: if False, the result is `{stack: activations}` in the layout of the stack.
      use_activation_unstack_primitive: ignored, as only jax-tpu-embedding uses this option.
      axis_name: mesh axes that shard the tables, outermost first. By default, tables are sharded by
        all axes of the surrounding `shard_map` if the axes together have `global_device_count`
        devices, else by the only axis with `global_device_count` devices.

    Returns:
      Activations `[samples of this device, output dim]` in a tree like `feature_specs`. The
      activations are summed in float32 and have the dtype of the table.

    Raises:
      ValueError: the batch was preprocessed for other specs or another number of devices, or the
        shapes of the variables do not match the specs.
    """
    del use_activation_unstack_primitive
    sharding_strategy_to_enum(sharding_strategy)
    sizes = (global_device_count, num_sc_per_device)
    stacks, devices = _stacks(
        preprocessed_inputs, feature_specs, *sizes, enable_minibatching, axis_name
    )
    tables = []
    lookups = []
    for layout, occurrences, capacity in stacks:
        table = variables_of(embedding_variables, layout).table
        rows = stack_rows(layout, devices, layout.spec.optimizer, capacity=capacity)
        tables.append(table)
        lookups.append(rows.look_up(table, occurrences, None))
    results = together(lookups, devices.axes)
    activations = {}
    for (layout, _, _), table, result in zip(stacks, tables, results, strict=True):
        (output,) = result[0]
        activations[layout.name] = output.astype(table.dtype)
    if not perform_unstacking:
        return activations
    return unstack_embedding_activations(activations, feature_specs, *sizes)


def sparse_dense_matmul_grad(
    activation_gradients: Activations,
    preprocessed_inputs: PreprocessedInput | SparseDenseMatmulInput,
    embedding_variables: Mapping[str, tuple[PyTree, ...]],
    feature_specs: Nested[FeatureSpec],
    *,
    global_device_count: int | None = None,
    sharding_strategy: str = "MOD",
    label: str = "",
    step: Scalar | None = None,
    num_sc_per_device: int | None = None,
    enable_minibatching: bool = False,
    perform_stacking: bool = True,
    use_gradient_stacking_primitive: bool = False,
    embedding_var_limits: Mapping[str, RowLimits] | None = None,
    axis_name: AxisName | None = None,
) -> dict[str, PyTree]:
    """Applies one optimizer step to every row that was looked up, and returns the new variables.

    If the variables are donated to the surrounding `jit`, they are updated in place.

    Args:
      activation_gradients: gradients of the activations, in a tree like `feature_specs`. With
        `perform_stacking=False`, `{stack: gradients}` in the layout of the stack.
      preprocessed_inputs: this device's part of the batch, as passed to `sparse_dense_matmul`.
      embedding_variables: this device's part of the variables, by stack: `EmbeddingVariables`, or a
        plain tuple of a table and its optimizer slots.
      feature_specs: specs of all features, with their tables already assigned to stacks.
      global_device_count: number of devices that share the tables, by default the number of samples
        in the global batch divided by the number of samples in `activation_gradients`.
      sharding_strategy: "MOD", the only sharding strategy.
      label: ignored. jax-tpu-embedding uses the label as the name of a program.
      step: index of the training step, from 0. Pass `step` if an optimizer, a learning rate or
        stochastic rounding depends on the step.
      num_sc_per_device: SparseCores per device, by default the number for which the tables were
        stacked.
      enable_minibatching: whether the batch was preprocessed with `enable_minibatching=True`, False
        by default.
      perform_stacking: if False, gradients are expected in the layout of the stack.
      use_gradient_stacking_primitive: ignored, as only jax-tpu-embedding uses this option.
      embedding_var_limits: a pair `(minimum, maximum)` for each stack, by stack name. The values of
        updated rows are clipped to the range from minimum to maximum. A minimum or maximum of None
        means no limit. By default, values are not clipped.
      axis_name: see `sparse_dense_matmul`.

    Returns: `{stack: variables}`. The new variables of a stack have the same tree structure as the
      entry of the stack in `embedding_variables`.

    Raises:
      ValueError: `embedding_var_limits` does not name every stack, `step` is None but an optimizer
        needs it, the batch was preprocessed for other specs or another number of devices, or the
        shapes of gradients or variables do not match the specs.
    """
    del label, use_gradient_stacking_primitive
    sharding_strategy_to_enum(sharding_strategy)
    num_devices = global_device_count or _num_devices(activation_gradients, feature_specs)
    if perform_stacking:
        activation_gradients = stack_embedding_gradients(
            activation_gradients, feature_specs, num_sc_per_device, num_devices
        )
    cut = (num_devices, num_sc_per_device)
    stacks, devices = _stacks(
        preprocessed_inputs, feature_specs, *cut, enable_minibatching, axis_name
    )
    limits = checked_limits(embedding_var_limits, [layout.name for layout, *_ in stacks])
    updates = []
    for layout, occurrences, capacity in stacks:
        rule = rule_of(layout, limits[layout.name])
        variables = variables_of(embedding_variables, layout, rule=rule)
        check_gradient(
            activation_gradients[layout.name], f"stack {layout.name!r}: activation gradients"
        )
        d_activations = layout.checked_activations(activation_gradients[layout.name]).astype(
            jnp.float32
        )
        hyper = layout.spec.optimizer.get_hyperparameters(step)
        row_step = Step(hyper, rule, _rounding(step, layout))
        rows = stack_rows(layout, devices, rule, capacity=capacity)
        table, *slots = jax.tree.leaves(variables)
        updates.append(rows.update(table, tuple(slots), occurrences, [d_activations], row_step))
    updated = {}
    results = together(updates, devices.axes)
    for (layout, _, _), (table, slots) in zip(stacks, results, strict=True):
        structure = jax.tree.structure(embedding_variables[layout.name])
        updated[layout.name] = jax.tree.unflatten(structure, [table, *slots])
    return updated


def unstack_embedding_activations(
    activations: Mapping[str, Array],
    feature_specs: Nested[FeatureSpec],
    global_device_count: int,
    num_sc_per_device: int | None = None,
    use_activation_unstack_primitive: bool = False,
) -> Activations:
    """Activations of every feature on one device, in a tree like `feature_specs`.

    Args:
      activations: activations of every stack on this device.
      feature_specs: specs of all features, with their tables already assigned to stacks.
      global_device_count: number of devices that share the tables.
      num_sc_per_device: SparseCores per device, by default the number for which the tables were
        stacked.
      use_activation_unstack_primitive: ignored, as only jax-tpu-embedding uses this option.

    Raises: ValueError: the activations of a stack are missing, or have the wrong shape.
    """
    del use_activation_unstack_primitive  # Accepted only because jax-tpu-embedding has this option.
    layouts = stack_layouts(
        feature_specs, num_devices=global_device_count, num_cores=num_sc_per_device
    )
    by_name: dict[str, Array] = {}
    for name, layout in layouts.items():
        stacked = layout.checked_activations(entry_of(activations, name, "activations"))
        by_core = stacked.reshape(layout.num_cores, layout.samples_per_core, -1)
        for feature in layout.features:
            start = feature.id_transformation.row_offset // layout.num_shards
            stop = start + (feature.num_samples or 0) // layout.num_shards
            piece = by_core[:, start:stop, : feature.output_dim]
            by_name[feature.name] = piece.reshape(-1, feature.output_dim)
    return jax.tree.map(lambda feature: by_name[feature.name], feature_specs)


def stack_embedding_gradients(
    activation_gradients: Activations,
    feature_specs: Nested[FeatureSpec],
    num_sc_per_device: int | None = None,
    global_device_count: int | None = None,
    use_gradient_stacking_primitive: bool = False,
) -> dict[str, Array]:
    """Gradients of every stack on one device, from gradients in a tree like `feature_specs`.

    `stack_embedding_gradients` is the inverse of `unstack_embedding_activations`. If a stack has
    more columns than the table of a feature, the additional columns are zero.

    Raises:
      ValueError: the tree differs from `feature_specs`, or a gradient has a different number of
        samples.
    """
    del use_gradient_stacking_primitive  # Accepted only because jax-tpu-embedding has this option.
    features = features_of(feature_specs)
    leaves = leaves_like(feature_specs, activation_gradients, "activation gradients")
    by_name = {}
    for feature, leaf in zip(features, leaves, strict=True):
        check_gradient(leaf, f"feature {feature.name!r}: activation gradients")
        by_name[feature.name] = jnp.asarray(leaf)
    num_devices = global_device_count or _num_devices(leaves, feature_specs)
    layouts = stack_layouts(feature_specs, num_devices=num_devices, num_cores=num_sc_per_device)
    result = {}
    for name, layout in layouts.items():
        pieces = []
        width = layout.spec.stack_embedding_dim
        for feature in layout.features:
            gradient = by_name[feature.name]
            gradient = gradient.reshape(-1, gradient.shape[-1])
            expected = (feature.num_samples or 0) // num_devices
            if gradient.shape != (expected, feature.output_dim):
                raise ValueError(
                    f"feature {feature.name!r}: activation gradients have shape {gradient.shape}, "
                    f"expected ({expected}, {feature.output_dim}) on each of {num_devices} "
                    "devices."
                )
            # If a feature has more output columns than its table, the last output columns are
            # padding, and the gradients of padding columns are ignored.
            gradient = gradient[:, : feature.table_spec.embedding_dim]
            padded = jnp.pad(gradient, ((0, 0), (0, width - gradient.shape[1])))
            pieces.append(padded.reshape(layout.num_cores, -1, width))
        result[name] = jnp.concatenate(pieces, axis=1).reshape(-1, width)
    return result


def _num_devices(gradients: Activations, feature_specs: Nested[FeatureSpec]) -> int:
    """Number of devices, computed from the global batch size and the gradients of one device.

    The number of devices is the number of samples of all features, divided by the number of samples
    in `gradients`, or 1 if the quotient is not a positive integer.
    """
    num_local = sum(math.prod(jnp.shape(leaf)[:-1]) for leaf in jax.tree.leaves(gradients))
    num_samples = sum(feature.num_samples or 0 for feature in features_of(feature_specs))
    if not num_local or num_samples % num_local:
        return 1
    return num_samples // num_local


def _stacks(
    inputs: PreprocessedInput | SparseDenseMatmulInput,
    feature_specs: Nested[FeatureSpec],
    num_devices: int,
    num_sc_per_device: int | None,
    enable_minibatching: bool,
    axis_name: AxisName | None,
) -> tuple[list[tuple[StackLayout, Occurrences, int]], Devices]:
    """Layout, ids and exchange capacity of every stack, and the devices that share the tables.

    The ids come from this device's part of the batch.

    The exchange capacity of a stack is the number of distinct rows that a device can request from
    one other device in one round of the exchange. Minibatches exist because the memory of a
    SparseCore can be too small for a whole batch. rsembed does not use the memory of a SparseCore,
    so all minibatches of a batch are looked up together.
    """
    if isinstance(inputs, SparseDenseMatmulInput):
        inputs = PreprocessedInput(inputs)
    check_type(inputs, PreprocessedInput, "preprocessed_inputs")
    layouts = stack_layouts(feature_specs, num_devices=num_devices, num_cores=num_sc_per_device)
    inputs.check_layout(layouts, enable_minibatching)
    num_minibatches = None
    if enable_minibatching:
        numbers = jnp.asarray(inputs.num_minibatches)
        if numbers.size != 1:
            raise ValueError(
                f"num_minibatches has {numbers.size} numbers, one per device; call this inside "
                "jax.shard_map over the axis that shards the input."
            )
        num_minibatches = numbers.reshape(()).astype(jnp.int32)
    partitions = []
    for name, layout in layouts.items():
        fields = (
            jnp.asarray(field[name]).reshape(-1) for field in inputs.sparse_dense_matmul_input
        )
        pointers, ids, samples, gains = fields
        num_pointers = compute_row_pointers_size_per_device(
            global_device_count=num_devices,
            num_sc_per_device=layout.num_cores,
            enable_minibatching=enable_minibatching,
        )
        if pointers.size != num_pointers:
            raise ValueError(
                f"stack {name!r}: the input has {pointers.size} row pointers, expected "
                f"{num_pointers} on each of {num_devices} devices with {layout.num_cores} cores; "
                "was it preprocessed for another global_device_count, or passed without "
                "shard_map?"
            )
        partition = Partitions(
            pointers,
            ids,
            samples,
            gains,
            num_minibatches,
            layout.num_cores,
            layout.num_shards,
            layout.rows_per_shard,
            layout.samples_per_core,
        )
        partitions.append(partition)
    entries = api.entries_by_sample(partitions)
    max_ids_of_stack = {name: max_ids for name, max_ids, _ in inputs.limits}
    stacks = []
    for layout, partition, (rows, offsets, gains) in zip(
        layouts.values(), partitions, entries, strict=True
    ):
        # Treat a stack as one table with one feature, which has row indices in the stack as ids,
        # and has its samples in the order of the buffers.
        occurrences = Occurrences(Call.of([IdList(rows, offsets, gains)], ["sum"]))
        num_ids = partition.embedding_ids.size
        if layout.declared_ids is not None:  # The buffer can have more entries than there are ids.
            num_ids = min(num_ids, layout.declared_ids)
        capacity = default_capacity(num_ids, num_devices)
        if layout.name in max_ids_of_stack:
            num_blocks = layout.num_cores**2 * (MAX_MINIBATCHES if enable_minibatching else 1)
            capacity = min(capacity, num_blocks * max_ids_of_stack[layout.name])
        stacks.append((layout, occurrences, capacity))
    return stacks, _table_devices(num_devices, axis_name)


def _rounding(step: Scalar | None, layout: StackLayout) -> Rounding | None:
    """Stochastic rounding with a random key for this step, or None if values round to nearest.

    The random noise for a row depends on the step, the table and the id, but not on the position of
    the row in a stack.
    """
    if not layout.tables[0].stochastic_rounding:
        return None
    if step is None:
        raise ValueError(
            f"stack {layout.name!r} rounds stochastically, which needs a new key every step; pass step=."
        )
    return api.stochastic_rounding(
        jax.random.fold_in(jax.random.key(0), jnp.asarray(step).astype(jnp.int32))
    )


tpu_sparse_dense_matmul = sparse_dense_matmul
tpu_sparse_dense_matmul_grad = sparse_dense_matmul_grad


def _table_devices(num_devices: int, axis_name: AxisName | None) -> Devices:
    """The devices that share the tables, as axes of the surrounding `shard_map`.

    Args:
      num_devices: number of devices that share the tables.
      axis_name: names of the axes, outermost first. None means all axes of the `shard_map` if the
        axes together have `num_devices` devices, else the only axis with `num_devices` devices.

    Raises:
      ValueError: there is no surrounding `shard_map`, or the axes in `axis_name` do not have
        `num_devices` devices. If `axis_name` is not given, the error means that no axis, or more
        than one axis, has `num_devices` devices.
    """
    if num_devices == 1:
        return Devices()
    mesh: Any = jax.sharding.get_abstract_mesh()
    sizes = {name: mesh.shape[name] for name in mesh.manual_axes}
    if axis_name is not None:
        wanted = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    elif math.prod(sizes.values()) == num_devices:
        wanted = tuple(sizes)
    else:
        wanted = tuple(name for name, size in sizes.items() if size == num_devices)
    if wanted and math.prod(sizes.get(name, 0) for name in wanted) == num_devices:
        return Devices(mesh, wanted)
    raise ValueError(
        f"global_device_count={num_devices}, but the surrounding shard_map has the axes {sizes}; "
        "call this inside jax.shard_map over the axis that shards the tables, and name it with "
        "axis_name= if several fit."
    )

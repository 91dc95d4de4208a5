"""Lookup and update of all stacks on one device, from preprocessed buffers and by the core's engine.

```
buffers ──entries by sample──▶ rows, samples, gains ──Rows, AskedRows──▶ activations; tables and slots
```
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from rsembed.checks import check_type, check_within
from rsembed.collection.devices import Devices
from rsembed.collection.rows import Occurrences
from rsembed.kernels import api
from rsembed.kernels.contract import Rounding, Segment, Step
from rsembed.kernels.ids import Partitions
from rsembed.parallel.exchange import AxisName, default_capacity, together
from rsembed.row_gradients import check_gradient
from rsembed.sparsecore.layout import (
    MAX_MINIBATCHES,
    Nested,
    Scalar,
    StackLayout,
    cores_from_row_pointers,
    leaves_like,
    placed_stack,
    sharding_strategy_to_enum,
    stack_layouts,
)
from rsembed.sparsecore.preprocessing import PreprocessedInput, SparseDenseMatmulInput
from rsembed.sparsecore.variables import EmbeddingVariables, RowLimits, check_variables, rule_of, stack_rows
from rsembed.specs import FeatureSpec, features_of


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
) -> PyTree:
    """Activations of this device's samples. With several devices, call it inside `jax.shard_map`.

    Args:
      preprocessed_inputs: this device's part of the batch.
      embedding_variables: this device's part of the variables, by stack.
      feature_specs: placed specs.
      global_device_count: devices that share the tables.
      sharding_strategy: "MOD".
      num_sc_per_device: None reads it off the input.
      enable_minibatching: as given to the preprocessing.
      perform_unstacking: False returns `{stack: activations}` as they are laid out.
      use_activation_unstack_primitive: ignored; a TPU detail.
      axis_name: mesh axes that shard the tables, outermost first; None takes those that fit the device count.

    Returns:
      Activations `[samples of this device, output dim]` in a tree like `feature_specs`, summed in float32 and handed
      out in the dtype of the table.

    Raises:
      ValueError: input, variables and specs do not belong together.
    """
    del use_activation_unstack_primitive
    sharding_strategy_to_enum(sharding_strategy)
    cut = (global_device_count, num_sc_per_device)
    stacks, devices = _stacks(preprocessed_inputs, feature_specs, *cut, enable_minibatching, axis_name)
    tables, askings = {}, []
    for layout, occurrences, capacity in stacks:
        variables = _variables_of(layout, embedding_variables)
        check_variables(variables, layout)
        tables[layout.name] = variables.table
        rows = stack_rows(layout, devices, layout.spec.optimizer, capacity=capacity)
        askings.append(rows.look_up(variables.table, occurrences, None))
    found = zip(tables.items(), together(askings, devices.axes), strict=True)
    activations = {name: output.astype(table.dtype) for (name, table), ((output,), *_) in found}
    return unstack_embedding_activations(activations, feature_specs, *cut) if perform_unstacking else activations


def sparse_dense_matmul_grad(
    activation_gradients: PyTree,
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
    """Variables after one optimizer step of every row that was looked up, in place when donated.

    Args:
      activation_gradients: like the activations; `{stack: gradients}` without `perform_stacking`.
      preprocessed_inputs: as given to `sparse_dense_matmul`.
      embedding_variables: this device's part of the variables; a plain tuple of a table and its slots is taken, too.
      feature_specs: placed specs.
      global_device_count: devices that share the tables; None reads it off the gradients' size.
      sharding_strategy: "MOD".
      label: ignored; it names a TPU program.
      step: 0-based step, for optimizers and learning rates that depend on it; None is the first step, for ever.
      num_sc_per_device: None reads it off the input.
      enable_minibatching: as given to the preprocessing.
      perform_stacking: False expects gradients as they are laid out.
      use_gradient_stacking_primitive: ignored; a TPU detail.
      embedding_var_limits: `{stack: (minimum or None, maximum or None)}` of stepped rows, for every stack.
      axis_name: as for `sparse_dense_matmul`.

    Returns: `{stack: variables}`, each in the structure that it was given in.

    Raises:
      ValueError: limits do not name every stack, shapes do not fit, a step is needed and missing, or input, variables
        and specs do not belong together.
    """
    del label, use_gradient_stacking_primitive
    sharding_strategy_to_enum(sharding_strategy)
    num_devices = global_device_count or _num_devices(activation_gradients, feature_specs, perform_stacking)
    cut = (num_devices, num_sc_per_device)
    stacks, devices = _stacks(preprocessed_inputs, feature_specs, *cut, enable_minibatching, axis_name)
    limits = _checked_limits(embedding_var_limits, [layout.name for layout, *_ in stacks])
    if perform_stacking:
        activation_gradients = stack_embedding_gradients(activation_gradients, feature_specs, *cut[::-1])
    askings = []
    for layout, occurrences, capacity in stacks:
        variables, rule = _variables_of(layout, embedding_variables), rule_of(layout, limits[layout.name])
        check_variables(variables, layout, rule=rule)
        check_gradient(activation_gradients[layout.name], f"stack {layout.name!r}: activation gradients")
        d_activations = layout.checked_activations(activation_gradients[layout.name]).astype(jnp.float32)
        how = Step(layout.spec.optimizer.get_hyperparameters(step), rule, _rounding(step, layout))
        rows = stack_rows(layout, devices, rule, capacity=capacity)
        askings.append(rows.update(variables.table, variables.slots(), occurrences, [d_activations], how))
    updated = {}
    for (layout, *_), (table, slots) in zip(stacks, together(askings, devices.axes), strict=True):
        structure = jax.tree.structure(embedding_variables[layout.name])
        updated[layout.name] = jax.tree.unflatten(structure, [table, *slots])
    return updated


def _variables_of(layout: StackLayout, embedding_variables: Mapping[str, PyTree]) -> EmbeddingVariables:
    check_type(embedding_variables, Mapping[str, tuple[Any, ...]], "embedding_variables")
    if layout.name not in embedding_variables:
        raise ValueError(
            f"embedding_variables have no stack {layout.name!r}, only {sorted(embedding_variables)}; were they made "
            "for these feature_specs?"
        )
    variables = embedding_variables[layout.name]
    if isinstance(variables, EmbeddingVariables):
        return variables
    return EmbeddingVariables(variables[0], tuple(jax.tree.leaves(tuple(variables[1:]))))


def unstack_embedding_activations(
    activations: Mapping[str, Array],
    feature_specs: Nested[FeatureSpec],
    global_device_count: int,
    num_sc_per_device: int | None = None,
    use_activation_unstack_primitive: bool = False,
) -> PyTree:
    """Activations of every feature, in a tree like `feature_specs`, from those of the stacks on one device.

    Raises: ValueError: those of a stack are missing, or have another shape.
    """
    del use_activation_unstack_primitive  # a TPU detail
    layouts = stack_layouts(feature_specs, num_devices=global_device_count, num_cores=num_sc_per_device)
    by_name: dict[str, Array] = {}
    for name, layout in layouts.items():
        if name not in activations:
            raise ValueError(f"activations have no stack {name!r}, only {sorted(activations)}.")
        stacked = layout.checked_activations(activations[name])
        by_core = stacked.reshape(layout.num_cores, layout.samples_per_core, -1)
        for feature in layout.features:
            start = feature.id_transformation.row_offset // layout.num_shards
            stop = start + (feature.num_samples or 0) // layout.num_shards
            piece = by_core[:, start:stop, : feature.output_dim]
            by_name[feature.name] = piece.reshape(-1, feature.output_dim)
    return jax.tree.unflatten(
        jax.tree.structure(feature_specs), [by_name[feature.name] for feature in features_of(feature_specs)]
    )


def stack_embedding_gradients(
    activation_gradients: PyTree,
    feature_specs: Nested[FeatureSpec],
    num_sc_per_device: int | None = None,
    global_device_count: int | None = None,
    use_gradient_stacking_primitive: bool = False,
) -> dict[str, Array]:
    """The inverse of `unstack_embedding_activations`; columns that a feature does not have are zero.

    Raises:
      ValueError: the tree differs from `feature_specs`, or a gradient has another number of samples.
    """
    del use_gradient_stacking_primitive  # a TPU detail
    num_devices = global_device_count or _num_devices(activation_gradients, feature_specs, True)
    layouts = stack_layouts(feature_specs, num_devices=num_devices, num_cores=num_sc_per_device)
    leaves = _gradient_leaves(activation_gradients, feature_specs)
    by_name = {feature.name: leaf for feature, leaf in zip(features_of(feature_specs), leaves, strict=True)}
    return {name: _stacked(layout, by_name) for name, layout in layouts.items()}


def _stacked(layout: StackLayout, by_feature: Mapping[str, Array]) -> Float[Array, "samples dim"]:
    pieces, width = [], layout.spec.stack_embedding_dim
    for feature in layout.features:
        gradient, expected = by_feature[feature.name], (feature.num_samples or 0) // layout.num_devices
        gradient = gradient.reshape(-1, gradient.shape[-1])
        if gradient.shape != (expected, feature.output_dim):
            raise ValueError(
                f"feature {feature.name!r}: activation gradients have shape {gradient.shape}, expected "
                f"({expected}, {feature.output_dim}) on each of {layout.num_devices} devices."
            )
        gradient = gradient[:, : feature.table_spec.embedding_dim]  # columns behind the table's are no parameters
        padded = jnp.pad(gradient, ((0, 0), (0, width - gradient.shape[1])))
        pieces.append(padded.reshape(layout.num_cores, -1, width))
    return jnp.concatenate(pieces, axis=1).reshape(-1, width)


def _gradient_leaves(activation_gradients: PyTree, feature_specs: Nested[FeatureSpec]) -> list[Array]:
    leaves = leaves_like(feature_specs, activation_gradients, "activation gradients")
    for feature, leaf in zip(features_of(feature_specs), leaves, strict=True):
        check_gradient(leaf, f"feature {feature.name!r}: activation gradients")
    return [jnp.asarray(leaf) for leaf in leaves]


def _num_devices(activation_gradients: PyTree, feature_specs: Nested[FeatureSpec], perform_stacking: bool) -> int:
    feature, stack = features_of(feature_specs)[0], placed_stack(features_of(feature_specs)[0].table_spec)
    if perform_stacking:
        where, declared = f"feature {feature.name!r}", feature.num_samples or 0
        gradient = _gradient_leaves(activation_gradients, feature_specs)[0]
    else:
        where, declared = f"stack {stack.stack_name!r}", stack.total_sample_count
        gradient = activation_gradients[stack.stack_name]
    found = gradient.size // max(1, gradient.shape[-1])
    if not found or declared % found:
        raise ValueError(
            f"{where}: activation gradients have shape {gradient.shape}, but the global batch has {declared} "
            "samples, of which each device has an equal part; give the gradients of this device's activations."
        )
    return declared // found


def _stacks(
    inputs: PreprocessedInput | SparseDenseMatmulInput,
    feature_specs: Nested[FeatureSpec],
    num_devices: int,
    num_sc_per_device: int | None,
    enable_minibatching: bool,
    axis_name: AxisName | None,
) -> tuple[list[tuple[StackLayout, Occurrences, int]], Devices]:
    """Layout, looked-up entries and exchange capacity of each stack on this device; and the devices.

    All minibatches are read together: a minibatch exists so that a SparseCore can hold it, and other machines need not.
    """
    if isinstance(inputs, SparseDenseMatmulInput):
        inputs = PreprocessedInput(inputs)
    check_type(inputs, PreprocessedInput, "preprocessed_inputs")
    if inputs.has_minibatches not in (None, enable_minibatching):
        raise ValueError(
            f"enable_minibatching={enable_minibatching}, but the input was preprocessed with "
            f"enable_minibatching={inputs.has_minibatches}; pass the same to both."
        )
    num_minibatches = None
    if enable_minibatching:
        numbers = jnp.asarray(inputs.num_minibatches)
        if numbers.size != 1:
            raise ValueError(
                f"num_minibatches has {numbers.size} numbers, one per device; call this inside jax.shard_map over the "
                "axis that shards the input."
            )
        num_minibatches = numbers.reshape(()).astype(jnp.int32)
    size = next(iter(inputs.lhs_row_pointers.values())).size
    num_cores = cores_from_row_pointers(size, num_devices, enable_minibatching)
    if num_sc_per_device not in (None, num_cores):
        raise ValueError(f"num_sc_per_device={num_sc_per_device}, but the input was preprocessed with {num_cores}.")
    layouts = stack_layouts(feature_specs, num_devices=num_devices, num_cores=num_cores)
    inputs.check_layout(layouts)
    partitions = []
    for name, layout in layouts.items():
        fields = (jnp.asarray(field[name]).reshape(-1) for field in inputs.sparse_dense_matmul_input)
        pointers, ids, samples, gains = fields
        sizes = layout.num_cores, layout.num_shards, layout.rows_per_shard, layout.samples_per_core
        partitions.append(Partitions(pointers, ids, samples, gains, num_minibatches, *sizes))
    found, stacks = api.entries_by_sample(partitions), []
    for layout, own, (rows, offsets, gains) in zip(layouts.values(), partitions, found, strict=True):
        # One feature, whose ids are rows of the physical table and whose samples lie as the buffers have them.
        occurrences = Occurrences([Segment(rows, offsets, gains, "sum")])
        num_ids, max_ids = own.embedding_ids.size, inputs.max_ids_per_partition(layout.name)
        if layout.declared_ids is not None:  # buffers may have room for more
            num_ids = min(num_ids, layout.declared_ids)
        capacity = default_capacity(num_ids, num_devices)
        if max_ids is not None:  # no more than the limits allow
            num_blocks = num_cores**2 * (MAX_MINIBATCHES if enable_minibatching else 1)
            capacity = min(capacity, num_blocks * max_ids)
        stacks.append((layout, occurrences, capacity))
    return stacks, _own_devices(num_devices, axis_name)


def _checked_limits(limits: Mapping[str, RowLimits] | None, stacks: Sequence[str]) -> Mapping[str, RowLimits]:
    if limits is None:
        return dict.fromkeys(stacks, (None, None))
    if set(limits) != set(stacks):
        raise ValueError(
            f"embedding_var_limits must name every stack: got {sorted(limits)}, need {sorted(stacks)}; (None, None) "
            "sets no limit."
        )
    for name, pair in limits.items():
        check_type(pair, tuple[object, object], f"embedding_var_limits of stack {name!r}: (minimum, maximum)")
        minimum, maximum = pair
        for which, limit in (("minimum", minimum), ("maximum", maximum)):
            check_within("[-inf, inf]", limit, f"embedding_var_limits of stack {name!r}: {which}")
        if minimum is not None and maximum is not None and minimum > maximum:
            raise ValueError(f"embedding_var_limits of stack {name!r}: minimum {minimum} is above maximum {maximum}.")
    return limits


def _rounding(step: Scalar | None, layout: StackLayout) -> Rounding | None:
    """Stochastic rounding with a key of the step, None if the stack rounds to nearest; the engine adds table and id."""
    if not layout.tables[0].stochastic_rounding:
        return None
    if step is None:
        raise ValueError(f"stack {layout.name!r} rounds stochastically, which needs a new key every step; pass step=.")
    return api.stochastic_rounding(jax.random.fold_in(jax.random.key(0), jnp.asarray(step).astype(jnp.int32)))


tpu_sparse_dense_matmul = sparse_dense_matmul
tpu_sparse_dense_matmul_grad = sparse_dense_matmul_grad


def _own_devices(num_devices: int, axis_name: AxisName | None = None) -> Devices:
    """Devices that share the tables: axes of the surrounding `shard_map` with this many devices in all.

    Args:
      num_devices: devices that share the tables.
      axis_name: the axes, outermost first, where the caller knows them; None searches: all axes in the order of the
        mesh, or the one that fits.

    Raises:
      ValueError: there is no `shard_map` around, none of its axes fits, or several do.
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
        f"global_device_count={num_devices}, but the surrounding shard_map has the axes {sizes}; call this inside "
        "jax.shard_map over the axis that shards the tables, and name it with axis_name= if several fit."
    )

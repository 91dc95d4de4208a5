"""Published runtime module: every function that a training program calls, by its published name."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from jaxtyping import PRNGKeyArray

from rsembed.checks import validated
from rsembed.collection.devices import Devices
from rsembed.fdo.limits import EXACT, LimitsPolicy, limits_from_statistics
from rsembed.fdo.statistics import SparseDenseMatmulInputStats as SparseDenseMatmulInputStats
from rsembed.sparsecore import table_stacking
from rsembed.sparsecore.embedding_spec import create_proto_from_feature_specs as create_proto_from_feature_specs
from rsembed.sparsecore.embedding_spec import get_optimizer_class as get_optimizer_class
from rsembed.sparsecore.embedding_spec import get_optimizer_type as get_optimizer_type
from rsembed.sparsecore.embedding_spec import optimizer_spec_to_proto as optimizer_spec_to_proto
from rsembed.sparsecore.embedding_spec import proto_to_optimizer_spec as proto_to_optimizer_spec
from rsembed.sparsecore.layout import ArrayLike as ArrayLike
from rsembed.sparsecore.layout import Nested as Nested
from rsembed.sparsecore.layout import ShardingStrategy as ShardingStrategy
from rsembed.sparsecore.layout import (
    compute_row_pointers_size_per_device as compute_row_pointers_size_per_device,
)
from rsembed.sparsecore.layout import (
    compute_theoretical_max_coo_buffer_size as compute_theoretical_max_coo_buffer_size,
)
from rsembed.sparsecore.layout import placed_stack, read_stacks, resolve_cores, stack_layouts, with_place
from rsembed.sparsecore.layout import sharding_strategy_to_enum as sharding_strategy_to_enum
from rsembed.sparsecore.matmul import sparse_dense_matmul as sparse_dense_matmul
from rsembed.sparsecore.matmul import sparse_dense_matmul_grad as sparse_dense_matmul_grad
from rsembed.sparsecore.matmul import stack_embedding_gradients as stack_embedding_gradients
from rsembed.sparsecore.matmul import tpu_sparse_dense_matmul as tpu_sparse_dense_matmul
from rsembed.sparsecore.matmul import tpu_sparse_dense_matmul_grad as tpu_sparse_dense_matmul_grad
from rsembed.sparsecore.matmul import unstack_embedding_activations as unstack_embedding_activations
from rsembed.sparsecore.preprocessing import PreprocessedInput as PreprocessedInput
from rsembed.sparsecore.preprocessing import SparseDenseMatmulInput as SparseDenseMatmulInput
from rsembed.sparsecore.preprocessing import (
    eval_preprocess_sparse_dense_matmul_input_shape as eval_preprocess_sparse_dense_matmul_input_shape,
)
from rsembed.sparsecore.preprocessing import get_all_reduce_interface as get_all_reduce_interface
from rsembed.sparsecore.preprocessing import (
    preprocess_sparse_dense_matmul_input as preprocess_sparse_dense_matmul_input,
)
from rsembed.sparsecore.preprocessing import (
    preprocess_sparse_dense_matmul_input_from_sparse_tensor as preprocess_sparse_dense_matmul_input_from_sparse_tensor,
)
from rsembed.sparsecore.table_stacking import prepare_feature_specs_for_training as prepare_feature_specs_for_training
from rsembed.sparsecore.table_stacking import stack_tables as stack_tables
from rsembed.sparsecore.variables import EmbeddingVariables as EmbeddingVariables
from rsembed.sparsecore.variables import initialize
from rsembed.sparsecore.variables import logical_tables as logical_tables
from rsembed.sparsecore.variables import logical_variables as logical_variables
from rsembed.sparsecore.variables import with_logical_tables as with_logical_tables
from rsembed.specs import CallableTableInitializer, FeatureSpec, StackedTableSpec, TableSpec, features_of, tables_of
from rsembed.stacking import LimitsCallable as LimitsCallable
from rsembed.stacking import get_default_limits as get_default_limits


class EmbeddingVariablesInitializer(NamedTuple):
    """Initializers `(key, shape) -> array` of a table and its slots, in the form of `EmbeddingVariables`."""

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
    """Stacks all tables that can share one, in place; `options` are others of `table_stacking.auto_stack_tables`."""
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
    """The stacks that the features read, by name. Raises: ValueError: a table has no place yet."""
    return {name: layout.spec for name, layout in read_stacks(feature_specs).items()}


def compute_coo_buffer_size_per_device(
    feature_specs: Nested[FeatureSpec],
    global_device_count: int,
    num_sc_per_device: int | None = None,
    enable_minibatching: bool = False,
) -> dict[str, int]:
    """Size of a device's input buffer, in entries, by stack."""
    layouts = stack_layouts(feature_specs, num_devices=global_device_count, num_cores=num_sc_per_device)
    return {name: layout.buffer_size_per_device(enable_minibatching) for name, layout in layouts.items()}


@validated
def init_embedding_variables(
    rng: PRNGKeyArray,
    table_specs: Nested[TableSpec],
    global_sharding: NamedSharding,
    num_sparsecore_per_device: int | None = None,
    bypass_mesh_check: bool = False,
) -> dict[str, EmbeddingVariables]:
    """Tables and slots of all stacks, every device building its own rows.

    A logical table depends on `rng`, its name and its initializer alone: stacking, sharding and the number of
    devices do not change it. Its initializer sees the logical shape; padding rows and columns are zero.

    Args:
      rng: the model's key.
      table_specs: tables, for example of `get_table_specs`; those that have no place yet stand alone.
      global_sharding: `NamedSharding(mesh, PartitionSpec(axis, None))`; with `PartitionSpec(axis, None, None)`, arrays
        get a leading axis of devices, as `jax.pmap` takes them.
      num_sparsecore_per_device: cores per device; None takes the number that the tables were placed for. Variables do
        not tell it, and specs of another number read other rows of an array of the same shape.
      bypass_mesh_check: ignored; rows follow the mesh, whatever the order of its devices.

    Raises:
      ValueError: the sharding does not deal rows to devices, or the tables were placed for another number of shards.
    """
    del bypass_mesh_check
    axis, *others = (*global_sharding.spec, None)
    if axis is None or any(others) or len(others) > 3:
        raise ValueError(
            "global_sharding must be of rows alone, PartitionSpec('x', None), or for jax.pmap PartitionSpec('x', None, "
            f"None); got {global_sharding.spec}."
        )
    mesh: Any = global_sharding.mesh  # an abstract one serves as well
    devices = Devices(mesh, (axis,) if isinstance(axis, str) else tuple(axis))
    num_shards = devices.num_devices * resolve_cores(num_sparsecore_per_device, devices.num_devices)
    tables = [with_place(table, num_shards) for table in jax.tree.leaves(table_specs)]
    variables = initialize(rng, tables, devices, num_cores=num_sparsecore_per_device)
    if len(global_sharding.spec) < 3:
        return variables
    by_device = functools.partial(jax.tree.map, lambda rows: rows.reshape(devices.num_devices, -1, rows.shape[-1]))
    return jax.jit(by_device, out_shardings=global_sharding)(variables)


def update_preprocessing_parameters(
    feature_specs: Nested[FeatureSpec],
    updated_params: SparseDenseMatmulInputStats,
    num_sc_per_device: int,
    *,
    policy: LimitsPolicy = EXACT,
) -> None:
    """Sets the limits and buffer sizes of all stacks from what `updated_params` observed, in place.

    The published call sets the largest observed values: small buffers, but new ones after almost every call, each of
    which compiles the training step anew. `policy=LimitsPolicy()` is the better choice for a long run: headroom, never
    shrinking, in few sizes. The next preprocessed batch carries the new limits, which makes `jit` trace its step anew.

    Args:
      feature_specs: placed specs. Stacks without statistics keep their limits.
      updated_params: statistics of one or many batches, as loaded by a client of `rsembed.fdo`.
      num_sc_per_device: cores per device.
      policy: how limits follow from maxima; see `rsembed.fdo.limits_from_statistics`, which computes them.
    """
    stacks = get_stacked_table_specs(feature_specs)
    limits = limits_from_statistics(stacks.values(), updated_params, num_sc_per_device, policy=policy)
    for feature in features_of(feature_specs):
        stack = placed_stack(feature.table_spec)
        feature.table_spec.stacked_table_spec = stack.replace(**limits[stack.stack_name]._asdict())

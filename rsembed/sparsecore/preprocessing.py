"""From a batch on the host to `PreprocessedInput` and its statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rsembed.fdo.statistics import SparseDenseMatmulInputStats
from rsembed.sparsecore.host_features import HostFeature, read_features, read_sparse_tensors
from rsembed.sparsecore.layout import (
    StackLayout,
    check_no_minibatching,
    check_sharding_strategy,
    resolve_cores,
    stack_layouts,
)
from rsembed.sparsecore.partitioner import StackBuffers, partition_stack
from rsembed.sparsecore.variables import Nested, PreprocessedInput, SparseDenseMatmulInput, StackLimits
from rsembed.specs import FeatureSpec


def preprocess_sparse_dense_matmul_input(
    features: Any,
    features_weights: Any,
    feature_specs: Nested[FeatureSpec],
    local_device_count: int,
    global_device_count: int,
    *,
    num_sc_per_device: int | None = None,
    sharding_strategy: str = "MOD",
    has_leading_dimension: bool = False,
    allow_id_dropping: bool = False,
    batch_number: int = 0,
    enable_minibatching: bool = False,
    all_reduce_interface: Any = None,
) -> tuple[PreprocessedInput, SparseDenseMatmulInputStats]:
    """Partitions this process' part of a batch for the cores of its devices. Runs on the host, outside `jit`.

    Args:
      features: ids, in a tree like `feature_specs`. A leaf is a 2-D integer array `[local samples, ids per sample]`, a
        1-D object array of 1-D arrays, or a list of lists. A process that is given the global batch takes its own part.
      features_weights: weights in the same tree and shapes; None means ones.
      feature_specs: placed specs. Their shapes are those of the global batch.
      local_device_count: devices of this process.
      global_device_count: devices of all processes.
      num_sc_per_device: cores per device; None means `utils.num_sparsecores_per_device()`.
      sharding_strategy: "MOD".
      has_leading_dimension: give every array a leading axis of local devices.
      allow_id_dropping: drop and count what exceeds a limit or the buffer; by default that is an error.
      batch_number: accepted for compatibility; results do not depend on it.
      enable_minibatching: not implemented yet.
      all_reduce_interface: accepted for compatibility and ignored.

    Returns:
      The buffers, and the counts of this batch for `rsembed.fdo`.

    Raises:
      ValueError: the trees differ, a batch has another size than declared, an id is out of range, a weight is not
        finite, the batch cannot be cut into equal parts, or a limit is exceeded.
      TypeError: ids are no integers.
    """
    del batch_number, all_reduce_interface
    layouts = _layouts(
        feature_specs,
        local_device_count,
        global_device_count,
        num_sc_per_device,
        sharding_strategy,
        enable_minibatching,
    )
    read = read_features(
        feature_specs,
        features,
        features_weights,
        local_device_count=local_device_count,
        global_device_count=global_device_count,
    )
    num_minibatches = np.ones(local_device_count, np.int64)
    return _partition(layouts, read, local_device_count, num_minibatches, has_leading_dimension, allow_id_dropping)


def preprocess_sparse_dense_matmul_input_from_sparse_tensor(
    indices: Any,
    values: Any,
    dense_shapes: Any,
    feature_specs: Nested[FeatureSpec],
    local_device_count: int,
    global_device_count: int,
    *,
    num_sc_per_device: int | None = None,
    sharding_strategy: str = "MOD",
    has_leading_dimension: bool = False,
    allow_id_dropping: bool = False,
    batch_number: int = 0,
    enable_minibatching: bool = False,
    all_reduce_interface: Any = None,
) -> tuple[PreprocessedInput, SparseDenseMatmulInputStats]:
    """As `preprocess_sparse_dense_matmul_input`, for ids given as sparse tensors without weights.

    Args:
      indices: tree of `[n, 2]` coordinates (sample, position).
      values: tree of `[n]` ids.
      dense_shapes: tree of `[2]` shapes; the first number is the local batch size.
      feature_specs: placed specs.
      local_device_count: devices of this process.
      global_device_count: devices of all processes.
      num_sc_per_device: as for dense input, like all that follow.
      sharding_strategy: "MOD".
      has_leading_dimension: leading axis of local devices.
      allow_id_dropping: drop and count instead of raising.
      batch_number: ignored.
      enable_minibatching: not implemented yet.
      all_reduce_interface: ignored.

    Raises:
      ValueError: as for dense input, or the shapes do not describe a sparse tensor.
      TypeError: ids are no integers.
    """
    del batch_number, all_reduce_interface
    layouts = _layouts(
        feature_specs,
        local_device_count,
        global_device_count,
        num_sc_per_device,
        sharding_strategy,
        enable_minibatching,
    )
    read = read_sparse_tensors(
        feature_specs,
        indices,
        values,
        dense_shapes,
        local_device_count=local_device_count,
        global_device_count=global_device_count,
    )
    num_minibatches = np.ones(local_device_count, np.int32)
    return _partition(layouts, read, local_device_count, num_minibatches, has_leading_dimension, allow_id_dropping)


def _layouts(
    feature_specs: Any,
    local_device_count: int,
    global_device_count: int,
    num_sc_per_device: int | None,
    sharding_strategy: str,
    enable_minibatching: bool,
) -> dict[str, StackLayout]:
    check_sharding_strategy(sharding_strategy)
    check_no_minibatching(enable_minibatching)
    if not 1 <= local_device_count <= global_device_count:
        raise ValueError(
            f"local_device_count={local_device_count} must be between 1 and global_device_count={global_device_count}."
        )
    num_cores = resolve_cores(num_sc_per_device, global_device_count)
    return stack_layouts(feature_specs, num_devices=global_device_count, num_cores=num_cores)


def _partition(
    layouts: dict[str, StackLayout],
    features: Sequence[HostFeature],
    local_device_count: int,
    num_minibatches: np.ndarray,
    has_leading_dimension: bool,
    allow_id_dropping: bool,
) -> tuple[PreprocessedInput, SparseDenseMatmulInputStats]:
    statistics = SparseDenseMatmulInputStats()
    by_name = {feature.spec.name: feature for feature in features}
    buffers = {
        name: partition_stack(
            layout,
            [by_name[feature.name] for feature in layout.features],
            local_device_count=local_device_count,
            allow_id_dropping=allow_id_dropping,
            statistics=statistics,
        )
        for name, layout in layouts.items()
    }
    if has_leading_dimension:
        buffers = {
            name: StackBuffers(*(array.reshape(local_device_count, -1) for array in stack))
            for name, stack in buffers.items()
        }
        num_minibatches = num_minibatches.reshape(local_device_count, 1)
    fields = ({name: getattr(stack, field) for name, stack in buffers.items()} for field in StackBuffers._fields)
    limits = tuple(
        StackLimits(name, layout.spec.max_ids_per_partition, layout.spec.max_unique_ids_per_partition)
        for name, layout in sorted(layouts.items())
    )
    return PreprocessedInput(SparseDenseMatmulInput(*fields), num_minibatches, limits), statistics

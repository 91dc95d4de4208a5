"""From a batch on the host to `PreprocessedInput` and its statistics."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rsembed.fdo.statistics import SparseDenseMatmulInputStats
from rsembed.sparsecore import native_partitioner, partitioner
from rsembed.sparsecore.belonging import batch_fingerprint
from rsembed.sparsecore.host_features import read_features, sparse_tensors_as_pairs
from rsembed.sparsecore.layout import (
    StackLayout,
    check_sharding_strategy,
    row_pointers_size,
    stack_layouts,
)
from rsembed.sparsecore.minibatching import partition_stacks_in_minibatches
from rsembed.sparsecore.partitioner import BUFFER_DTYPES, HostBatch
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
        1-D object array of 1-D arrays, a list of lists, a pair `(values, lengths)` of arrays, or `rsembed.Bags`. A
        process that is given the global batch takes its own part.
      features_weights: weights in the same tree and shapes (flat, one per id, where ids are a pair or `Bags`); None
        means ones, also for a single feature.
      feature_specs: placed specs. Their shapes are those of the global batch.
      local_device_count: devices of this process.
      global_device_count: devices of all processes.
      num_sc_per_device: cores per device; None takes the number that the specs were placed for.
      sharding_strategy: "MOD".
      has_leading_dimension: give every array a leading axis of local devices.
      allow_id_dropping: drop and count what exceeds a limit or the buffer; by default that is an error.
      batch_number: number of the batch, the same in all processes; minibatching needs it to agree.
      enable_minibatching: deal a batch that exceeds a limit to several minibatches, instead of raising or dropping;
        see `rsembed.sparsecore.minibatching`. Buffers get room for 64 of them unless
        `suggested_coo_buffer_size_per_device` says what is enough. Pass it to lookup and update as well.
      all_reduce_interface: how several processes agree on minibatches, a `minibatching.Agreement`; None lets the
        devices do it, so this function must then not run beside a training step.

    Returns:
      The buffers, and the counts of this batch for `rsembed.fdo`.

    Raises:
      ValueError: the trees differ, a batch has another size than declared, an id is out of range, a weight is not
        finite, the batch cannot be cut into equal parts, or a limit is exceeded.
      TypeError: ids are no integers.
    """
    check_sharding_strategy(sharding_strategy)
    layouts = _layouts(feature_specs, local_device_count, global_device_count, num_sc_per_device)
    read = read_features(
        feature_specs,
        features,
        features_weights,
        local_device_count=local_device_count,
        global_device_count=global_device_count,
    )
    by_name = {feature.spec.name: feature for feature in read}
    readers = {name: [by_name[feature.name] for feature in layout.features] for name, layout in layouts.items()}
    statistics, num_minibatches = SparseDenseMatmulInputStats(), 1
    batch = HostBatch(layouts, readers, local_device_count, allow_id_dropping, statistics)
    if enable_minibatching:
        buffers, num_minibatches = partition_stacks_in_minibatches(batch, batch_number, all_reduce_interface)
    else:
        chosen = partitioner if native_partitioner.unavailable_because() else native_partitioner
        buffers = chosen.partition_stacks(batch)
    numbers = np.full(local_device_count, num_minibatches, np.int64)
    return _processed(layouts, buffers, numbers, has_leading_dimension, enable_minibatching), statistics


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
      dense_shapes: tree of `[2]` shapes; the first number is the batch size, local or global as for dense input.
      feature_specs: placed specs; these and all that follow are as for dense input.
      local_device_count: devices of this process.
      global_device_count: devices of all processes.
      num_sc_per_device: cores per device.
      sharding_strategy: "MOD".
      has_leading_dimension: leading axis of local devices.
      allow_id_dropping: drop and count instead of raising.
      batch_number: number of the batch, the same in all processes.
      enable_minibatching: deal a batch that exceeds a limit to several minibatches.
      all_reduce_interface: how processes agree on them.

    Raises:
      ValueError: as for dense input, or the shapes do not describe a sparse tensor.
      TypeError: ids are no integers.
    """
    processed, statistics = preprocess_sparse_dense_matmul_input(
        sparse_tensors_as_pairs(feature_specs, indices, values, dense_shapes),
        None,
        feature_specs,
        local_device_count,
        global_device_count,
        num_sc_per_device=num_sc_per_device,
        sharding_strategy=sharding_strategy,
        has_leading_dimension=has_leading_dimension,
        allow_id_dropping=allow_id_dropping,
        batch_number=batch_number,
        enable_minibatching=enable_minibatching,
        all_reduce_interface=all_reduce_interface,
    )
    # The published entry points differ in the dtype of this number.
    numbers = processed.num_minibatches.astype(np.int32)
    return dataclasses.replace(processed, num_minibatches=numbers), statistics


def _layouts(
    feature_specs: Any, local_device_count: int, global_device_count: int, num_sc_per_device: int | None
) -> dict[str, StackLayout]:
    if not 1 <= local_device_count <= global_device_count:
        raise ValueError(
            f"local_device_count={local_device_count} must be between 1 and global_device_count={global_device_count}."
        )
    return stack_layouts(feature_specs, num_devices=global_device_count, num_cores=num_sc_per_device)


def _processed(
    layouts: dict[str, StackLayout],
    buffers: Mapping[str, Sequence[np.ndarray]],
    num_minibatches: np.ndarray,
    has_leading_dimension: bool,
    enable_minibatching: bool,
) -> PreprocessedInput:
    fields = [{name: stack[k] for name, stack in buffers.items()} for k in range(len(SparseDenseMatmulInput._fields))]
    limits = tuple(
        StackLimits(name, layout.spec.max_ids_per_partition, layout.spec.max_unique_ids_per_partition)
        for name, layout in sorted(layouts.items())
    )
    processed = PreprocessedInput(
        SparseDenseMatmulInput(*fields),
        num_minibatches,
        limits,
        has_minibatches=enable_minibatching,
        layout=batch_fingerprint(layouts),
    )
    if not has_leading_dimension:
        return processed
    return jax.tree.map(lambda array: array.reshape(len(num_minibatches), -1), processed)


def eval_preprocess_sparse_dense_matmul_input_shape(
    feature_specs: Nested[FeatureSpec],
    local_device_count: int,
    global_device_count: int,
    *,
    num_sc_per_device: int | None = None,
    has_leading_dimension: bool = False,
    enable_minibatching: bool = False,
) -> PreprocessedInput:
    """Shapes and dtypes of what `preprocess_sparse_dense_matmul_input` returns, for compiling ahead of time.

    Args:
      feature_specs: placed specs.
      local_device_count: devices of this process.
      global_device_count: devices of all processes.
      num_sc_per_device: cores per device; None takes the number that the specs were placed for.
      has_leading_dimension: as for preprocessing.
      enable_minibatching: as for preprocessing.

    Returns:
      A tree of `jax.ShapeDtypeStruct` with the structure of the real input, limits included.
    """
    layouts = _layouts(feature_specs, local_device_count, global_device_count, num_sc_per_device)

    def empty(size: int, dtype: Any) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), local_device_count * size)  # no memory behind it

    buffers = {}
    for name, layout in layouts.items():
        pointers = row_pointers_size(layout.num_devices, layout.num_cores, enable_minibatching)
        sizes = (pointers, *[layout.buffer_size_per_device(enable_minibatching)] * 3)
        buffers[name] = [empty(size, dtype) for size, dtype in zip(sizes, BUFFER_DTYPES, strict=True)]
    numbers = np.ones(local_device_count, np.int64)
    processed = _processed(layouts, buffers, numbers, has_leading_dimension, enable_minibatching)
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), processed)

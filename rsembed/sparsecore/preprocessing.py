"""From a batch on the host to `PreprocessedInput` and its statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rsembed.fdo.statistics import SparseDenseMatmulInputStats
from rsembed.sparsecore import native_partitioner, partitioner
from rsembed.sparsecore.host_features import HostFeature, read_features, read_sparse_tensors
from rsembed.sparsecore.layout import (
    MAX_MINIBATCHES,
    StackLayout,
    check_sharding_strategy,
    resolve_cores,
    row_pointers_size,
    stack_layouts,
)
from rsembed.sparsecore.minibatching import Agreement, partition_stacks_in_minibatches
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
      num_sc_per_device: cores per device; None means `utils.num_sparsecores_per_device()`.
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
    layouts = _layouts(feature_specs, local_device_count, global_device_count, num_sc_per_device, sharding_strategy)
    read = read_features(
        feature_specs,
        features,
        features_weights,
        local_device_count=local_device_count,
        global_device_count=global_device_count,
    )
    options = _Options(
        local_device_count, has_leading_dimension, allow_id_dropping, batch_number, enable_minibatching,
        all_reduce_interface, np.int64,
    )  # fmt: skip
    return _partition(layouts, read, options)


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
      batch_number: number of the batch, the same in all processes.
      enable_minibatching: deal a batch that exceeds a limit to several minibatches.
      all_reduce_interface: how processes agree on them.

    Raises:
      ValueError: as for dense input, or the shapes do not describe a sparse tensor.
      TypeError: ids are no integers.
    """
    layouts = _layouts(feature_specs, local_device_count, global_device_count, num_sc_per_device, sharding_strategy)
    read = read_sparse_tensors(
        feature_specs,
        indices,
        values,
        dense_shapes,
        local_device_count=local_device_count,
        global_device_count=global_device_count,
    )
    options = _Options(
        local_device_count, has_leading_dimension, allow_id_dropping, batch_number, enable_minibatching,
        all_reduce_interface, np.int32,
    )  # fmt: skip
    return _partition(layouts, read, options)


def _layouts(
    feature_specs: Any,
    local_device_count: int,
    global_device_count: int,
    num_sc_per_device: int | None,
    sharding_strategy: str,
) -> dict[str, StackLayout]:
    check_sharding_strategy(sharding_strategy)
    if not 1 <= local_device_count <= global_device_count:
        raise ValueError(
            f"local_device_count={local_device_count} must be between 1 and global_device_count={global_device_count}."
        )
    num_cores = resolve_cores(num_sc_per_device, global_device_count)
    return stack_layouts(feature_specs, num_devices=global_device_count, num_cores=num_cores)


class _Options(NamedTuple):
    local_device_count: int
    has_leading_dimension: bool
    allow_id_dropping: bool
    batch_number: int
    enable_minibatching: bool
    agree: Agreement | None
    dtype: type[np.integer]  # of num_minibatches; the published entry points differ in it


def _partition(
    layouts: dict[str, StackLayout], features: Sequence[HostFeature], options: _Options
) -> tuple[PreprocessedInput, SparseDenseMatmulInputStats]:
    statistics = SparseDenseMatmulInputStats()
    by_name = {feature.spec.name: feature for feature in features}
    readers = {name: [by_name[feature.name] for feature in layout.features] for name, layout in layouts.items()}
    number = 1
    if options.enable_minibatching:
        buffers, number = partition_stacks_in_minibatches(
            layouts,
            readers,
            local_device_count=options.local_device_count,
            allow_id_dropping=options.allow_id_dropping,
            batch_number=options.batch_number,
            agree=options.agree,
            statistics=statistics,
        )
    else:
        chosen = partitioner if native_partitioner.unavailable_because() else native_partitioner
        buffers = chosen.partition_stacks(
            layouts,
            readers,
            local_device_count=options.local_device_count,
            allow_id_dropping=options.allow_id_dropping,
            statistics=statistics,
        )
    num_minibatches = np.full(options.local_device_count, number, options.dtype)
    return _processed(layouts, buffers, num_minibatches, options), statistics


def _processed(
    layouts: dict[str, StackLayout], buffers: dict[str, Any], num_minibatches: Any, options: _Options
) -> PreprocessedInput:
    if options.has_leading_dimension:
        shape = (options.local_device_count, -1)
        buffers = {name: [array.reshape(shape) for array in stack] for name, stack in buffers.items()}
        num_minibatches = num_minibatches.reshape(shape)
    fields = [{name: stack[k] for name, stack in buffers.items()} for k in range(len(SparseDenseMatmulInput._fields))]
    limits = tuple(
        StackLimits(name, layout.spec.max_ids_per_partition, layout.spec.max_unique_ids_per_partition)
        for name, layout in sorted(layouts.items())
    )
    return PreprocessedInput(
        SparseDenseMatmulInput(*fields), num_minibatches, limits, has_minibatches=options.enable_minibatching
    )


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
      num_sc_per_device: cores per device; None means `utils.num_sparsecores_per_device()`.
      has_leading_dimension: as for preprocessing.
      enable_minibatching: as for preprocessing.

    Returns:
      A tree of `jax.ShapeDtypeStruct` with the structure of the real input, limits included.
    """
    layouts = _layouts(feature_specs, local_device_count, global_device_count, num_sc_per_device, "MOD")
    options = _Options(local_device_count, has_leading_dimension, False, 0, enable_minibatching, None, np.int64)
    dtypes = (np.int32, np.int32, np.int32, np.float32)

    def empty(size: int, dtype: Any) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), local_device_count * size)  # no memory behind it

    buffers = {}
    for name, layout in layouts.items():
        pointers = row_pointers_size(layout.num_devices, layout.num_cores)
        places = layout.buffer_size_per_device
        if enable_minibatching:
            pointers, places = MAX_MINIBATCHES * pointers, layout.minibatched_buffer_size_per_device
        sizes = (pointers, places, places, places)
        buffers[name] = [empty(size, dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    processed = _processed(layouts, buffers, np.ones(local_device_count, np.int64), options)
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), processed)

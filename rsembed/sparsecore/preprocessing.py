"""Checks and partitions a batch on the host, in any input format that jax-tpu-embedding accepts.

The module `preprocessing` checks the shapes and dtypes of a batch. The partitioners check the ids
and weights, because they read all of them anyway. The NumPy partitioner calls
`check_entries`. The C++ partitioner checks ids and weights itself, and calls `check_entries` only to
raise the error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Bool, PyTree

from rsembed.arrays import check_unmasked
from rsembed.bags import Bags, as_bags, check_bags, check_ids_dtype
from rsembed.checks import check_type
from rsembed.fdo.statistics import SparseDenseMatmulInputStats
from rsembed.fingerprint import Fingerprint, check_same
from rsembed.sparsecore import native_partitioner
from rsembed.sparsecore.layout import (
    ArrayLike,
    FeatureTree,
    Nested,
    StackLayout,
    compute_row_pointers_size_per_device,
    leaves_like,
    sharding_strategy_to_enum,
    stack_layouts,
)
from rsembed.sparsecore.partitioner import (
    BUFFER_DTYPES,
    HostBatch,
    StackBuffers,
    partition_stacks_in_minibatches,
)
from rsembed.specs import FeatureSpec, features_of


class SparseDenseMatmulInput(NamedTuple):
    """Partitioned ids of a batch: each core has one partition per shard (and minibatch).

    Each field has one flat array per stack, by stack name. The flat array of a stack is a
    concatenation of one part per device. Without minibatching, the part of a device is a
    concatenation of one part per core, all of equal size. With minibatching, all cores of a device
    write to one shared part.

    Attributes:
      lhs_row_pointers: offset of the end of each partition, relative to the start of the core's
        part (with minibatching: of the device's part).
      lhs_embedding_ids: index of each entry's row in its shard.
      lhs_sample_ids: index of each entry's sample among the samples of its core.
      lhs_gains: gain (factor of the row) of each entry. The activation of a sample is the sum of
        `gain * row` over the entries of the sample.
    """

    lhs_row_pointers: dict[str, ArrayLike]
    lhs_embedding_ids: dict[str, ArrayLike]
    lhs_sample_ids: dict[str, ArrayLike]
    lhs_gains: dict[str, ArrayLike]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PreprocessedInput:
    """A preprocessed batch, ready for the devices.

    Attributes:
      sparse_dense_matmul_input: partitioned ids of all stacks.
      num_minibatches: number of minibatches, repeated for every local device. Without minibatching,
        the number of minibatches is 1.
      limits: for every stack, its name and the maximum number of ids and of distinct ids in a
        partition. The limits are static, so a jitted step is traced again when they change. If
        `limits` is empty, the limits are unknown, and lookups assume that all buffers are full.
      layout: static fingerprint of the row and sample layout, and of `enable_minibatching`.
    """

    sparse_dense_matmul_input: SparseDenseMatmulInput
    num_minibatches: PyTree = dataclasses.field(default_factory=lambda: np.array(1))
    limits: tuple[tuple[str, int, int], ...] = dataclasses.field(
        default=(), metadata={"static": True}
    )
    layout: Fingerprint | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def lhs_row_pointers(self) -> dict[str, ArrayLike]:
        """Offset of the end of each partition, by stack name."""
        return self.sparse_dense_matmul_input.lhs_row_pointers

    @property
    def lhs_embedding_ids(self) -> dict[str, ArrayLike]:
        """Index of each entry's row in its shard, by stack name."""
        return self.sparse_dense_matmul_input.lhs_embedding_ids

    @property
    def lhs_sample_ids(self) -> dict[str, ArrayLike]:
        """Index of each entry's sample among the samples of its core, by stack name."""
        return self.sparse_dense_matmul_input.lhs_sample_ids

    @property
    def lhs_gains(self) -> dict[str, ArrayLike]:
        """Gain of each entry, by stack name: the factor by which the row of the entry is multiplied.

        See `SparseDenseMatmulInput`.
        """
        return self.sparse_dense_matmul_input.lhs_gains

    def check_layout(self, layouts: Mapping[str, StackLayout], enable_minibatching: bool) -> None:
        """Checks that the batch was preprocessed for `layouts` and `enable_minibatching`.

        Raises: ValueError: the batch was preprocessed for other stacks, other layouts or another
          value of `enable_minibatching`.
        """
        if set(layouts) != set(self.lhs_row_pointers):
            raise ValueError(
                f"the input was preprocessed for stacks {sorted(self.lhs_row_pointers)}, but "
                f"feature_specs have {sorted(layouts)}; use the same specs for both."
            )
        if self.layout is not None:
            check_same(
                self.layout,
                _fingerprint(layouts, enable_minibatching),
                what="the input was preprocessed for other specs",
                way_out="Preprocess it with the feature specs and enable_minibatching that are given here.",
            )


def preprocess_sparse_dense_matmul_input(
    features: FeatureTree,
    features_weights: FeatureTree,
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
    all_reduce_interface: AllReduce | None = None,
) -> tuple[PreprocessedInput, SparseDenseMatmulInputStats]:
    """Partitions the local part of a batch into the input buffers of all cores of this process.

    The partitioners run on the host CPU, so call `preprocess_sparse_dense_matmul_input` outside
    `jit`.

    Args:
      features: ids, in a tree like `feature_specs`. A leaf is a 2-D integer array
        `[local samples, ids per sample]`, a 1-D object array of 1-D arrays, a list of lists, or
        `rsembed.Bags`, which include their weights.
      features_weights: weights of the ids, in a tree like `features` and with leaves of the same
        shapes. If `features_weights` or a leaf of `features_weights` is None, ids have weight 1,
        except ids in `rsembed.Bags` with weights.
      feature_specs: specs of stacked tables. The shapes in the specs describe the global batch.
      local_device_count: number of devices of this process.
      global_device_count: number of devices of all processes.
      num_sc_per_device: cores per device, by default the number for which the tables were stacked.
      sharding_strategy: "MOD", the only sharding strategy.
      has_leading_dimension: whether every array gets a leading axis of local devices, False by
        default.
      allow_id_dropping: whether ids that exceed a limit or the buffer are dropped and counted. By
        default, ids that exceed a limit or the buffer are an error.
      batch_number: index of the batch, equal in all processes. With minibatching, the keys for
        `all_reduce_interface` are computed from `batch_number`. See `AllReduce`.
      enable_minibatching: whether a batch that exceeds a limit is split into minibatches, False by
        default. See `rsembed.sparsecore.partitioner`. Buffers are sized for 64 minibatches unless
        `suggested_coo_buffer_size_per_device` sets a smaller size. Lookup and update need the same
        value of `enable_minibatching`.
      all_reduce_interface: function that combines flags of all processes, so that all processes
        split the batch into the same minibatches. The default is `agree_through_devices`. With
        minibatching in several processes, preprocessing with the default function must not run
        concurrently with a training step.

    Returns:
      The input buffers, and the statistics of the batch for `rsembed.fdo`.

    Raises:
      ValueError: `features` or `features_weights` does not match the tree `feature_specs`, the
        batch size differs from the declared batch size, an id is out of range, a weight is not
        finite, the batch cannot be split into equal parts, or a limit is exceeded.
      TypeError: ids are not integers.
    """
    sharding_strategy_to_enum(sharding_strategy)
    layouts = _layouts(feature_specs, local_device_count, global_device_count, num_sc_per_device)
    bags = read_features(
        feature_specs, features, features_weights, local_device_count, global_device_count
    )
    statistics = SparseDenseMatmulInputStats()
    num_minibatches = 1
    batch = HostBatch(layouts, bags, int(local_device_count), allow_id_dropping, statistics)
    check_type(allow_id_dropping, bool, "allow_id_dropping")
    check_type(all_reduce_interface, Callable | None, "all_reduce_interface, an AllReduce,")

    def any_process(question: int, flags: np.ndarray) -> np.ndarray:
        if local_device_count == global_device_count:
            return flags
        agree = agree_through_devices if all_reduce_interface is None else all_reduce_interface
        return np.asarray(agree(2 * batch_number + question, flags), bool)

    if enable_minibatching:
        buffers, num_minibatches = partition_stacks_in_minibatches(batch, any_process)
    else:
        buffers = native_partitioner.partition_stacks(batch)
    numbers = np.full(local_device_count, num_minibatches, np.int64)
    return _processed(
        layouts, buffers, numbers, has_leading_dimension, enable_minibatching
    ), statistics


def preprocess_sparse_dense_matmul_input_from_sparse_tensor(
    indices: FeatureTree,
    values: FeatureTree,
    dense_shapes: FeatureTree,
    feature_specs: Nested[FeatureSpec],
    local_device_count: int,
    global_device_count: int,
    **options: Any,
) -> tuple[PreprocessedInput, SparseDenseMatmulInputStats]:
    """Partitions a batch of sparse tensors, which have no weights.

    See `preprocess_sparse_dense_matmul_input`.

    Args:
      indices: tree of `[n, 2]` coordinates (sample, position).
      values: tree of `[n]` ids.
      dense_shapes: tree of pairs (local batch size, maximum number of ids per sample).
      feature_specs: specs of all features, with their tables already assigned to stacks.
      local_device_count: number of devices of this process.
      global_device_count: number of devices of all processes.
      options: keyword options of `preprocess_sparse_dense_matmul_input`.

    Raises:
      ValueError: the arrays do not describe a sparse tensor, or
        `preprocess_sparse_dense_matmul_input` raises ValueError.
      TypeError: ids are not integers.
    """
    trees = {"indices": indices, "values": values, "dense_shapes": dense_shapes}
    leaves = [leaves_like(feature_specs, tree, name) for name, tree in trees.items()]
    bags = []
    for spec, index, value, shape in zip(features_of(feature_specs), *leaves, strict=True):
        try:
            bags.append(Bags.from_sparse_tensor(index, value, shape))
        except (TypeError, ValueError) as error:
            raise type(error)(f"feature {spec.name!r}: {error}") from error
    features = jax.tree.unflatten(jax.tree.structure(feature_specs), bags)
    processed, statistics = preprocess_sparse_dense_matmul_input(
        features, None, feature_specs, local_device_count, global_device_count, **options
    )
    # In jax-tpu-embedding, `num_minibatches` is int32 for sparse tensors and int64 for dense input.
    numbers = processed.num_minibatches.astype(np.int32)
    return dataclasses.replace(processed, num_minibatches=numbers), statistics


def _fingerprint(layouts: Mapping[str, StackLayout], enable_minibatching: bool) -> Fingerprint:
    """Fingerprint of the row and sample layouts.

    The fingerprint does not depend on the limits, because the limits of a model may change.
    """
    stacks = {}
    for name, layout in layouts.items():
        tables = {}
        for table in layout.tables:
            size = {"rows": table.vocabulary_size, "dim": table.embedding_dim}
            tables[table.name] = size | vars(table.setting_in_stack)
        features = {}
        for feature in layout.features:
            samples = {"table": feature.table_spec.name, "samples": feature.num_samples}
            features[feature.name] = samples | vars(feature.id_transformation)
        stacks[name] = {
            "shards": layout.num_shards,
            "rows": layout.spec.stack_vocab_size,
            "tables": tables,
            "features": features,
            "combiner": layout.spec.combiner,
        }
    return Fingerprint.of({"enable_minibatching": enable_minibatching, "stacks": stacks})


def _layouts(
    feature_specs: Nested[FeatureSpec],
    local_device_count: int,
    global_device_count: int,
    num_sc_per_device: int | None,
) -> dict[str, StackLayout]:
    check_type(local_device_count, int, "local_device_count")
    layouts = stack_layouts(
        feature_specs, num_devices=global_device_count, num_cores=num_sc_per_device
    )
    if not 1 <= local_device_count <= global_device_count:
        raise ValueError(
            f"local_device_count={local_device_count} must be between 1 and global_device_count={global_device_count}."
        )
    return layouts


def _processed(
    layouts: dict[str, StackLayout],
    buffers: Mapping[str, StackBuffers],
    num_minibatches: np.ndarray,
    has_leading_dimension: bool,
    enable_minibatching: bool,
) -> PreprocessedInput:
    """The buffers of all stacks as a `PreprocessedInput`."""
    fields: list[dict[str, ArrayLike]] = []
    for field in BUFFER_DTYPES:
        fields.append({name: stack_buffers[field] for name, stack_buffers in buffers.items()})
    limits = []
    for name, layout in sorted(layouts.items()):
        spec = layout.spec
        limits.append((name, spec.max_ids_per_partition, spec.max_unique_ids_per_partition))
    processed = PreprocessedInput(
        SparseDenseMatmulInput(*fields),
        num_minibatches,
        tuple(limits),
        layout=_fingerprint(layouts, enable_minibatching),
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
    """Shapes and dtypes of a `PreprocessedInput`, to compile a step before the first batch is read.

    Args:
      feature_specs: specs of all features, with their tables already assigned to stacks.
      local_device_count: number of devices of this process.
      global_device_count: number of devices of all processes.
      num_sc_per_device: cores per device, by default the number for which the tables were stacked.
      has_leading_dimension: whether every array has a leading axis of local devices, False by
        default.
      enable_minibatching: whether batches are preprocessed with minibatching, False by default.

    Returns:
      A tree of `jax.ShapeDtypeStruct` with the shapes and dtypes of the arrays in a preprocessed
      input. The static fields `limits` and `layout` have the values of a preprocessed batch.
    """
    layouts = _layouts(feature_specs, local_device_count, global_device_count, num_sc_per_device)
    buffers = {}
    for name, layout in layouts.items():
        pointers = compute_row_pointers_size_per_device(
            global_device_count=global_device_count,
            num_sc_per_device=layout.num_cores,
            enable_minibatching=enable_minibatching,
        )
        size = layout.buffer_size_per_device(enable_minibatching)
        stack_buffers = {}
        for field, dtype in BUFFER_DTYPES.items():
            length = local_device_count * (pointers if field == "row_pointers" else size)
            # An array from `np.broadcast_to` has the wanted shape, but memory for only one number.
            stack_buffers[field] = np.broadcast_to(np.zeros((), dtype), length)
        buffers[name] = stack_buffers
    numbers = np.ones(local_device_count, np.int64)
    processed = _processed(layouts, buffers, numbers, has_leading_dimension, enable_minibatching)
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), processed)


def read_features(
    feature_specs: Nested[FeatureSpec],
    features: FeatureTree,
    weights: FeatureTree,
    local_device_count: int,
    global_device_count: int,
) -> dict[str, Bags]:
    """Ids and weights of every feature, by name, after checks of shapes and dtypes.

    For the arguments see `preprocess_sparse_dense_matmul_input`.
    """
    specs = features_of(feature_specs)
    leaves = leaves_like(feature_specs, features, "features")
    all_weights = (
        [None] * len(specs)
        if weights is None
        else leaves_like(feature_specs, weights, "features_weights")
    )
    result = {}
    for spec, leaf, weight in zip(specs, leaves, all_weights, strict=True):
        if isinstance(leaf, Bags):
            check_ids_dtype(leaf, feature=spec.name)
            check_bags(as_bags(leaf, feature=spec.name), feature=spec.name)
        try:
            bags = _as_bags(leaf, weight)
        except (TypeError, ValueError) as error:
            raise type(error)(f"feature {spec.name!r}: {error}") from error
        check_ids_dtype(bags, feature=spec.name)
        expected = (spec.num_samples or 0) * local_device_count // global_device_count
        if bags.num_bags != expected:
            raise ValueError(
                f"feature {spec.name!r}: got {bags.num_bags} samples, but this process' share of "
                f"the declared batch of {spec.num_samples} is {expected} ({local_device_count} of "
                f"{global_device_count} devices); pass the local part of the batch, or declare "
                "another input_shape and output_shape."
            )
        result[spec.name] = jax.tree.map(np.asarray, bags)
    return result


def _as_bags(leaf: PyTree, weights: PyTree) -> Bags:
    """Bags of one feature, from ids and weights in any input format that preprocessing accepts.

    If `leaf` is a `Bags` with padding after the last bag, the padding is removed.
    """
    check_unmasked([leaf, weights], "ids or weights")
    if isinstance(leaf, Bags):
        if weights is not None:
            raise ValueError(
                "weights of Bags belong inside them, as in Bags.from_lists(ids, weights)."
            )
        num_ids = int(leaf.offsets[-1])
        bag_weights = None
        if leaf.weights is not None:
            bag_weights = leaf.weights[:num_ids].astype(np.float32)
        return Bags(leaf.ids[:num_ids], leaf.offsets, bag_weights)
    if isinstance(leaf, (np.ndarray, jax.Array)) and leaf.dtype != object:
        if leaf.ndim != 2:
            raise ValueError(
                f"a dense input is [samples, ids per sample], got {leaf.ndim} dimensions "
                f"({leaf.shape}); reshape it to (-1, 1) for one id per sample."
            )
        return Bags.from_dense(np.asarray(leaf), weights)
    if isinstance(leaf, np.ndarray):
        leaf = leaf.tolist()
    if isinstance(weights, np.ndarray):
        weights = weights.tolist()
    return Bags.from_lists(leaf, weights)


AllReduce = Callable[[int, np.ndarray], np.ndarray]
"""Function `(key, flags) -> flags` that returns the elementwise "or" of the flags of all processes.

All processes call an `AllReduce` function with the same keys, in the same order, and with equally
many flags for each key. Preprocessing of the batch with `batch_number` `b` uses the keys `2 * b`
and `2 * b + 1`.
"""


def agree_through_devices(
    key: int, flags: Bool[np.ndarray, " flags"]
) -> Bool[np.ndarray, " flags"]:
    """Elementwise "or" of the flags of all processes, computed with a collective over all devices.

    Do not call `agree_through_devices` concurrently with a training step. With only one process,
    the result is `flags`.
    """
    del key
    if jax.process_count() == 1:
        return flags
    gathered: np.ndarray = np.asarray(multihost_utils.process_allgather(flags.astype(np.uint8)))
    return np.any(gathered, axis=0)


def get_all_reduce_interface(
    peer_addresses: object = None,
    minibatching_port: object = None,
    host_id: object = None,
    host_count: object = None,
) -> AllReduce:
    """Returns `agree_through_devices`, and ignores all arguments."""
    del peer_addresses, minibatching_port, host_id, host_count
    return agree_through_devices

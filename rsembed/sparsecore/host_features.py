"""Ids and weights of a batch, brought from all accepted forms into one without a copy, and checked.

Shapes and kinds are checked here when a batch is read. Values are checked by whoever walks over them anyway: the numpy
partitioner asks for `HostFeature.ids`, the native one finds a bad value on its way and has `check_values` name it.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
from jaxtyping import Float32, Int64, Integer, PyTree

from rsembed.bags import PAD_ID, Bags, as_bags, check_bags, check_ids_dtype, check_unmasked
from rsembed.sparsecore.layout import Nested, leaves_like
from rsembed.specs import FeatureSpec, features_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostFeature:
    """The ids of one feature in this process.

    Attributes:
      spec: the feature.
      raw_ids: row of the logical table, per entry, sample after sample, as they were handed over: not yet compared
        with the vocabulary.
      lengths: number of ids of every sample of this process' batch.
      ids_per_sample: that number if it is the same by construction; None if samples may differ.
      weights: one per entry, not yet known to be finite; None means ones.
    """

    spec: FeatureSpec
    raw_ids: Integer[np.ndarray, " nnz"]
    lengths: Int64[np.ndarray, " samples"]
    ids_per_sample: int | None = None
    weights: Float32[np.ndarray, " nnz"] | None = None

    @functools.cached_property
    def ids(self) -> Int64[np.ndarray, " nnz"]:
        """Ids as int64, after `check_values`.

        Raises: ValueError: an id is outside its table, or a weight is not finite.
        """
        self.check_values()
        return self.raw_ids.astype(np.int64)

    @functools.cached_property
    def samples(self) -> Int64[np.ndarray, " nnz"]:
        """Number of each entry's sample in this process' batch."""
        return np.repeat(np.arange(len(self.lengths), dtype=np.int64), self.lengths)

    @functools.cached_property
    def gains(self) -> Float32[np.ndarray, " nnz"]:
        """Factor of each entry in its sample, before equal entries merge; zero where a sample's weights cancel."""
        combiner, num_samples = self.spec.table_spec.combiner, len(self.lengths)
        values = np.ones(self.samples.shape, np.float32) if self.weights is None else self.weights
        if combiner == "sum":
            return values
        wide = values.astype(np.float64)
        total = np.bincount(self.samples, wide if combiner == "mean" else wide * wide, minlength=num_samples)
        total = total.astype(np.float64, copy=False)  # without entries, bincount forgets that weights are floats
        divisor = total if combiner == "mean" else np.sqrt(total)
        inverse = np.divide(1.0, divisor, out=np.zeros_like(divisor), where=divisor != 0)
        return (wide * inverse[self.samples]).astype(np.float32)

    def check_values(self) -> None:
        """Raises: ValueError: an id is outside its table, or a weight is not finite; names the first one."""
        where, table, ids = f"feature {self.spec.name!r}", self.spec.table_spec, self.raw_ids
        if self.weights is not None and not np.isfinite(self.weights).all():
            entry = int(np.flatnonzero(~np.isfinite(self.weights))[0])
            raise ValueError(f"{where}: weight {self.weights[entry]} in sample {self.samples[entry]} is not finite.")
        if ids.size and (ids.min() < 0 or ids.max() >= table.vocabulary_size):
            worst = int(np.argmin(ids) if ids.min() < 0 else np.argmax(ids))
            raise ValueError(
                f"{where}: id {ids[worst]} in sample {self.samples[worst]} is outside table {table.name!r} with "
                f"vocabulary_size={table.vocabulary_size}; enlarge the table, or hash the ids first."
            )


def read_features(
    feature_specs: Nested[FeatureSpec],
    features: PyTree,
    weights: PyTree,
    local_device_count: int,
    global_device_count: int,
) -> list[HostFeature]:
    """Dense or ragged ids of every feature, checked; `preprocess_sparse_dense_matmul_input` tells their forms.

    Weights inside `Bags` need not be repeated in `weights`, of which a leaf may be None.
    """
    specs = features_of(feature_specs)
    leaves = leaves_like(feature_specs, features, "features")
    all_weights = [None] * len(specs) if weights is None else leaves_like(feature_specs, weights, "features_weights")
    result = []
    for spec, leaf, weight in zip(specs, leaves, all_weights, strict=True):
        where = f"feature {spec.name!r}"
        if isinstance(leaf, Bags):
            check_bags(as_bags(dataclasses.replace(leaf, weights=None), feature=spec.name), feature=spec.name)
        try:
            bags = _as_bags(leaf, weight)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}: {error}") from error
        check_ids_dtype(bags, feature=spec.name)
        lengths = np.diff(np.asarray(bags.offsets)).astype(np.int64)
        ids, values = np.asarray(bags.ids), None if bags.weights is None else np.asarray(bags.weights, np.float32)
        if isinstance(leaf, Bags) and (ids == PAD_ID).any():
            # Here too padding is no id, so that it does not count in means.
            is_id = ids != PAD_ID
            lengths = np.bincount(np.repeat(np.arange(len(lengths)), lengths)[is_id], minlength=len(lengths))
            ids, values = ids[is_id], None if values is None else values[is_id]
        if len(lengths) == spec.num_samples and jax.process_count() * local_device_count == global_device_count:
            ids, lengths, values = _own_share(ids, lengths, values)
        expected = (spec.num_samples or 0) * local_device_count // global_device_count
        if len(lengths) != expected:
            raise ValueError(
                f"{where}: got {len(lengths)} samples, but this process' share of the declared batch of "
                f"{spec.num_samples} is {expected} ({local_device_count} of {global_device_count} devices); pass the "
                "local part of the batch, or declare another input_shape and output_shape."
            )
        same = bags.dense_shape[1] if bags.dense_shape is not None and not isinstance(leaf, Bags) else None
        result.append(HostFeature(spec=spec, raw_ids=ids, lengths=lengths, ids_per_sample=same, weights=values))
    return result


def _as_bags(leaf: PyTree, weights: PyTree) -> Bags:
    """Ids and weights of a feature in any of the published forms, without what lies behind the last offset."""
    check_unmasked([leaf, weights], "ids or weights")
    if isinstance(leaf, Bags):
        if weights is not None and leaf.weights is not None:
            raise ValueError("weights are given twice, inside the Bags and in features_weights; keep one.")
        last = int(np.asarray(leaf.offsets)[-1])
        weights = leaf.weights if weights is None else weights
        weights = weights[:last] if _is_flat(weights) else weights
        leaf = np.asarray(leaf.ids)[:last], np.diff(np.asarray(leaf.offsets))
    if _is_pair(leaf):
        (ids, lengths), weights = leaf, weights[0] if _is_pair(weights) else weights
        if weights is not None and not _is_flat(weights):
            return Bags.from_lists(np.split(ids, np.cumsum(lengths)[:-1]), list(weights))
        try:
            return Bags.from_lengths(ids, lengths, weights)
        except ValueError as error:
            raise ValueError(
                f"a pair of arrays is (values, lengths), and rows are a list, no tuple: {error}"
            ) from error
    if isinstance(leaf, (np.ndarray, jax.Array)) and leaf.dtype != object:
        if leaf.ndim != 2:
            raise ValueError(
                f"a dense input is [samples, ids per sample], got {leaf.ndim} dimensions ({leaf.shape}); reshape it to "
                "(-1, 1) for one id per sample."
            )
        return Bags.from_dense(np.asarray(leaf), weights if weights is None else np.asarray(weights))
    ids, weights = (
        rows.tolist() if isinstance(rows, np.ndarray) and rows.ndim > 1 else rows for rows in (leaf, weights)
    )
    return Bags.from_lists(
        list(ids) if isinstance(ids, np.ndarray) else ids, weights if weights is None else list(weights)
    )


def sparse_tensors_as_pairs(
    feature_specs: Nested[FeatureSpec], indices: PyTree, values: PyTree, dense_shapes: PyTree
) -> PyTree:
    """Ids at `(sample, position)` coordinates as pairs `(values, lengths)`, which `read_features` takes."""
    trees = {"indices": indices, "values": values, "dense_shapes": dense_shapes}
    leaves = [leaves_like(feature_specs, tree, name) for name, tree in trees.items()]
    pairs = []
    for spec, index, value, shape in zip(features_of(feature_specs), *leaves, strict=True):
        check_unmasked([index, value, shape], f"feature {spec.name!r}: a sparse tensor's parts")
        try:
            bags = Bags.from_sparse_tensor(index, value, np.asarray(shape).tolist())
        except (TypeError, ValueError) as error:
            raise type(error)(f"feature {spec.name!r}: {error}") from error
        pairs.append((bags.ids, np.diff(bags.offsets)))
    return jax.tree.unflatten(jax.tree.structure(feature_specs), pairs)


def _is_flat(leaf: object) -> bool:
    return isinstance(leaf, (np.ndarray, jax.Array)) and leaf.ndim == 1 and leaf.dtype != object


def _is_pair(leaf: object) -> bool:
    """Whether a leaf is `(values, lengths)`; two samples are a list."""
    return isinstance(leaf, tuple) and len(leaf) == 2 and all(map(_is_flat, leaf))


def _own_share(
    ids: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """This process' part of a global batch, in which the processes' parts follow each other."""
    if jax.process_count() == 1:
        return ids, lengths, weights
    num_rows = len(lengths) // jax.process_count()
    first = jax.process_index() * num_rows
    start = int(lengths[:first].sum())
    own = lengths[first : first + num_rows]
    entries = slice(start, start + int(own.sum()))
    return ids[entries], own, None if weights is None else weights[entries]

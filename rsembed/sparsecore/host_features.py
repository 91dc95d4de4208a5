"""Ids and weights as users hand them over, brought into one form without a copy, and checked.

Shapes and kinds are checked here when a batch is read. Values are checked by whoever walks over them anyway: the numpy
partitioner asks for `HostFeature.ids`, the native one finds a bad value on its way and has `check_values` name it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32, Int64, Integer

from rsembed.bags import PAD_ID, Bags, check_bags, check_unmasked
from rsembed.sparsecore.layout import leaves_like
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
        """The ids, checked.

        Raises: ValueError: an id is outside its table, or a weight is not finite.
        """
        self.check_values()
        return self.raw_ids.astype(np.int64)

    @functools.cached_property
    def samples(self) -> Int64[np.ndarray, " nnz"]:
        """Sample of this process' batch, per entry."""
        return np.repeat(np.arange(len(self.lengths), dtype=np.int64), self.lengths)

    @functools.cached_property
    def gains(self) -> Float32[np.ndarray, " nnz"]:
        """The entry's factor in its sample, before equal entries are added; zeros in a sample whose weights cancel."""
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
        """Names the first bad value. Raises: ValueError: an id is outside its table, or a weight is not finite."""
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
    feature_specs: Any, features: Any, weights: Any, *, local_device_count: int, global_device_count: int
) -> list[HostFeature]:
    """Dense or ragged ids of every feature, checked; `preprocess_sparse_dense_matmul_input` tells their forms.

    Weights inside `Bags` need not be repeated in `weights`, of which a leaf may be None.
    """
    specs = features_of(feature_specs)
    leaves = leaves_like(feature_specs, features, "features")
    all_weights = [None] * len(specs) if weights is None else leaves_like(feature_specs, weights, "features_weights")
    result = []
    for spec, leaf, weight in zip(specs, leaves, all_weights, strict=True):
        where, is_bags = f"feature {spec.name!r}", isinstance(leaf, Bags)
        for part in (leaf, weight, leaf.ids if isinstance(leaf, Bags) else None):
            check_unmasked(part, f"{where}: ids or weights")
        if isinstance(leaf, Bags):
            leaf, weight = _used_part(leaf, weight, spec.name)
        ids, lengths, ids_per_sample = _rows(leaf, where)
        if _is_pair(leaf) and _is_flat(weight):
            weight = (np.asarray(weight), lengths)
        values = None if weight is None else _weights(weight, lengths, where)
        if is_bags and (ids == PAD_ID).any():
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
        ids = _integers(ids, where)
        result.append(
            HostFeature(spec=spec, raw_ids=ids, lengths=lengths, ids_per_sample=ids_per_sample, weights=values)
        )
    return result


def sparse_tensors_as_pairs(feature_specs: Any, indices: Any, values: Any, dense_shapes: Any) -> Any:
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


def _used_part(bags: Bags, weight: Any, feature: str) -> tuple[Any, Any]:
    """Ids of bags as values and lengths, and their weights, without what lies behind the last offset."""
    if weight is not None and bags.weights is not None:
        raise ValueError(
            f"feature {feature!r}: weights are given twice, inside the Bags and in features_weights; keep one."
        )
    check_bags(Bags(bags.ids, bags.offsets), feature=feature)
    offsets, weight = np.asarray(bags.offsets).astype(np.int64), bags.weights if weight is None else weight
    pair = (np.asarray(bags.ids)[: offsets[-1]], np.diff(offsets))
    return pair, np.asarray(weight)[: offsets[-1]] if _is_flat(weight) else weight


def _is_flat(leaf: Any) -> bool:
    return isinstance(leaf, (np.ndarray, jax.Array)) and leaf.ndim == 1 and leaf.dtype != object


def _is_pair(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and len(leaf) == 2 and all(map(_is_flat, leaf))


def _rows(leaf: Any, where: str) -> tuple[np.ndarray, np.ndarray, int | None]:
    """Flat values, the number of values in every row, and that number if all rows must have the same."""
    if _is_pair(leaf):
        values, lengths = (np.asarray(part) for part in leaf)
        if lengths.dtype.kind not in "iu" or (lengths.size and lengths.min() < 0) or lengths.sum() != len(values):
            raise ValueError(
                f"{where}: a pair of arrays is (values, lengths), but the lengths {lengths[:8].tolist()}... do not add "
                f"up to {len(values)} values; give rows as a list, not as a tuple."
            )
        return values, lengths.astype(np.int64, copy=False), None
    if not isinstance(leaf, (list, tuple)):
        leaf = np.asarray(leaf)
        if leaf.dtype != object:
            if leaf.ndim != 2:
                raise ValueError(
                    f"{where}: a dense input is [samples, ids per sample], got {leaf.ndim} dimensions ({leaf.shape}); "
                    "reshape it to (-1, 1) for one id per sample."
                )
            return leaf.reshape(-1), np.full(leaf.shape[0], leaf.shape[1], np.int64), leaf.shape[1]
        if leaf.ndim == 2:
            leaf = leaf.tolist()  # rows that happen to have equal lengths
        elif leaf.ndim != 1:
            raise ValueError(f"{where}: an object array must hold one array per sample, got shape {leaf.shape}.")
    return (*_ragged_rows(leaf, where), None)


def _ragged_rows(leaf: Sequence[Any] | np.ndarray, where: str) -> tuple[np.ndarray, np.ndarray]:
    rows = []
    for number, row in enumerate(leaf):
        try:
            array = np.asarray(row)
        except ValueError as error:
            raise ValueError(f"{where}: sample {number} mixes single ids and lists: {error}") from error
        if array.ndim != 1:
            depth = "a single value" if array.ndim == 0 else f"nested {array.ndim} deep"
            raise ValueError(f"{where}: sample {number} is {depth}, but every sample must be a flat list of ids.")
        rows.append(array)
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    filled = [row for row in rows if row.size]  # an empty list has the dtype float64
    return (np.concatenate(filled) if filled else np.zeros(0, np.int64)), lengths


def _own_share(
    ids: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """This process' part of a global batch: the processes' parts follow each other."""
    if jax.process_count() == 1:
        return ids, lengths, weights
    num_rows = len(lengths) // jax.process_count()
    first = jax.process_index() * num_rows
    start = int(lengths[:first].sum())
    own = lengths[first : first + num_rows]
    entries = slice(start, start + int(own.sum()))
    return ids[entries], own, None if weights is None else weights[entries]


def _integers(ids: np.ndarray, where: str) -> Integer[np.ndarray, " nnz"]:
    """Ids, if they are integers; an empty list of unknown kind counts as such."""
    if ids.dtype.kind in "iu":
        return ids
    if ids.size == 0:
        return np.zeros(0, np.int64)
    if ids.dtype == object:
        raise ValueError(f"{where}: ids must be integers that fit 64 bits, got {ids[0]!r}, ...; hash larger ids first.")
    raise TypeError(f"{where}: ids must be integers, got dtype {ids.dtype}; convert them with .astype('int32').")


def _weights(leaf: Any, lengths: np.ndarray, where: str) -> np.ndarray:
    values, weight_lengths, _ = _rows(leaf, f"{where}, weights")
    if not np.array_equal(lengths, weight_lengths):
        same_count = len(lengths) == len(weight_lengths)
        place = f" (first at sample {np.flatnonzero(lengths != weight_lengths)[0]})" if same_count else ""
        raise ValueError(f"{where}: weights must have one value per id, but their lengths differ{place}.")
    if values.dtype.kind not in "fiub":
        raise TypeError(f"{where}: weights must be numbers, got dtype {values.dtype}.")
    return values.astype(np.float32, copy=False)

"""Ids and weights as users hand them over, checked and brought into one form: one entry per id.

Every check of this room happens here, before anything is laid out, and names the feature, the place and the way out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32, Int64

from rsembed.specs import FeatureSpec, features_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostFeature:
    """The ids of one feature in this process.

    Attributes:
      spec: the feature.
      ids: row of the logical table, per entry.
      samples: sample of this process' batch, per entry.
      gains: the entry's factor in its sample, before equal entries are added.
    """

    spec: FeatureSpec
    ids: Int64[np.ndarray, " nnz"]
    samples: Int64[np.ndarray, " nnz"]
    gains: Float32[np.ndarray, " nnz"]


def read_features(
    feature_specs: Any, features: Any, weights: Any, *, local_device_count: int, global_device_count: int
) -> list[HostFeature]:
    """Dense or ragged ids of every feature, checked.

    Args:
      feature_specs: tree of FeatureSpecs.
      features: the same tree; each leaf is a 2-D integer array, a 1-D object array of 1-D arrays, or lists of lists. It
        has this process' part of the batch; of a whole global batch, that part is taken.
      weights: the same tree and shapes, or None for ones.
      local_device_count: devices of this process.
      global_device_count: devices of all processes.
    """
    specs = features_of(feature_specs)
    leaves = _matching_leaves(feature_specs, features, "features")
    all_weights = (
        [None] * len(specs) if weights is None else _matching_leaves(feature_specs, weights, "features_weights")
    )
    result = []
    for spec, leaf, weight in zip(specs, leaves, all_weights, strict=True):
        where = f"feature {spec.name!r}"
        ids, lengths = _rows(leaf, where)
        values = None if weight is None else _weights(weight, lengths, where)
        if len(lengths) == spec.num_samples and jax.process_count() * local_device_count == global_device_count:
            ids, lengths, values = _own_share(ids, lengths, values)
        _check_batch(spec, len(lengths), local_device_count, global_device_count)
        samples = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
        checked = _check_ids(spec, ids, samples)
        gains = _gains(spec.table_spec.combiner, samples, len(lengths), values)
        result.append(HostFeature(spec=spec, ids=checked, samples=samples, gains=gains))
    return result


def read_sparse_tensors(
    feature_specs: Any,
    indices: Any,
    values: Any,
    dense_shapes: Any,
    *,
    local_device_count: int,
    global_device_count: int,
) -> list[HostFeature]:
    """As `read_features`, for ids at `(sample, position)` coordinates."""
    specs = features_of(feature_specs)
    trees = [
        _matching_leaves(feature_specs, tree, name)
        for tree, name in ((indices, "indices"), (values, "values"), (dense_shapes, "dense_shapes"))
    ]
    result = []
    for spec, index, value, shape in zip(specs, *trees, strict=True):
        where = f"feature {spec.name!r}"
        index, value, shape = np.asarray(index), np.asarray(value), np.asarray(shape)
        if index.ndim != 2 or index.shape[1] != 2 or value.shape != index.shape[:1] or shape.shape != (2,):
            raise ValueError(
                f"{where}: a sparse tensor has indices [n, 2], values [n] and a dense shape [2], got shapes "
                f"{index.shape}, {value.shape} and {shape.shape}."
            )
        num_samples = int(shape[0])
        _check_batch(spec, num_samples, local_device_count, global_device_count)
        samples = index[:, 0].astype(np.int64)
        if samples.size and (samples.min() < 0 or samples.max() >= num_samples):
            worst = samples.min() if samples.min() < 0 else samples.max()
            raise ValueError(f"{where}: sparse index names sample {worst}, outside the dense shape's {num_samples}.")
        checked = _check_ids(spec, value, samples)
        gains = _gains(spec.table_spec.combiner, samples, num_samples, None)
        result.append(HostFeature(spec=spec, ids=checked, samples=samples, gains=gains))
    return result


def _matching_leaves(feature_specs: Any, tree: Any, name: str) -> list[Any]:
    structure: Any = jax.tree.structure(feature_specs)
    try:
        # Lists of lists are leaves here, so the tree is only taken apart as far as the specs go.
        return structure.flatten_up_to(tree)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{name} must have the tree structure of feature_specs, {structure}: {error}") from error


def _rows(leaf: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Flat values and the number of values in every row."""
    if not isinstance(leaf, (list, tuple)):
        leaf = np.asarray(leaf)
        if leaf.dtype != object:
            if leaf.ndim != 2:
                raise ValueError(
                    f"{where}: a dense input is [samples, ids per sample], got {leaf.ndim} dimensions ({leaf.shape}); "
                    "reshape it to (-1, 1) for one id per sample."
                )
            return leaf.reshape(-1), np.full(leaf.shape[0], leaf.shape[1], np.int64)
        if leaf.ndim != 1:
            raise ValueError(f"{where}: an object array must hold one array per sample, got shape {leaf.shape}.")
    return _ragged_rows(leaf, where)


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
    num_rows = len(lengths) // jax.process_count()
    first = jax.process_index() * num_rows
    start = int(lengths[:first].sum())
    own = lengths[first : first + num_rows]
    entries = slice(start, start + int(own.sum()))
    return ids[entries], own, None if weights is None else weights[entries]


def _check_batch(spec: FeatureSpec, num_rows: int, local_device_count: int, global_device_count: int) -> None:
    expected = (spec.num_samples or 0) * local_device_count // global_device_count
    if num_rows != expected:
        raise ValueError(
            f"feature {spec.name!r}: got {num_rows} samples, but this process' share of the declared batch of "
            f"{spec.num_samples} is {expected} ({local_device_count} of {global_device_count} devices); pass the local "
            "part of the batch, or declare another input_shape and output_shape."
        )


def _check_ids(spec: FeatureSpec, ids: np.ndarray, samples: np.ndarray) -> Int64[np.ndarray, " nnz"]:
    where, table = f"feature {spec.name!r}", spec.table_spec
    if ids.size == 0:
        return np.zeros(0, np.int64)
    if ids.dtype == object:
        raise ValueError(f"{where}: ids must be integers that fit 64 bits, got {ids[0]!r}, ...; hash larger ids first.")
    if ids.dtype.kind not in "iu":
        raise TypeError(f"{where}: ids must be integers, got dtype {ids.dtype}; convert them with .astype('int32').")
    lowest, highest = ids.min(), ids.max()
    if lowest < 0 or highest >= table.vocabulary_size:
        worst = int(np.argmin(ids) if lowest < 0 else np.argmax(ids))
        raise ValueError(
            f"{where}: id {ids[worst]} in sample {samples[worst]} is outside table {table.name!r} with "
            f"vocabulary_size={table.vocabulary_size}; enlarge the table, or hash the ids first."
        )
    return ids.astype(np.int64)


def _weights(leaf: Any, lengths: np.ndarray, where: str) -> np.ndarray:
    values, weight_lengths = _rows(leaf, f"{where}, weights")
    if not np.array_equal(lengths, weight_lengths):
        same_count = len(lengths) == len(weight_lengths)
        place = f" (first at sample {np.flatnonzero(lengths != weight_lengths)[0]})" if same_count else ""
        raise ValueError(f"{where}: weights must have one value per id, but their lengths differ{place}.")
    if values.dtype.kind not in "fiub":
        raise TypeError(f"{where}: weights must be numbers, got dtype {values.dtype}.")
    values = values.astype(np.float32)
    if not np.isfinite(values).all():
        entry = int(np.flatnonzero(~np.isfinite(values))[0])
        sample = int(np.searchsorted(np.cumsum(lengths), entry, side="right"))
        raise ValueError(f"{where}: weight {values[entry]} in sample {sample} is not finite.")
    return values


def _gains(combiner: str, samples: np.ndarray, num_samples: int, weights: np.ndarray | None) -> np.ndarray:
    """Factor of every entry. A sample whose weights cancel gets zeros, as everywhere in this library."""
    if combiner == "sum":
        return np.ones(samples.shape, np.float32) if weights is None else weights
    values = np.ones(samples.shape, np.float32) if weights is None else weights
    wide = values.astype(np.float64)
    total = np.bincount(samples, wide if combiner == "mean" else wide * wide, minlength=num_samples)
    divisor = total if combiner == "mean" else np.sqrt(total)
    inverse = np.divide(1.0, divisor, out=np.zeros_like(divisor), where=divisor != 0)
    return (wide * inverse[samples]).astype(np.float32)

"""Checks the batch of a call once, and converts it to the form that kernels read.

Ids and offsets that are out of range are corrected in copies, and never in the caller's arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from rsembed.arrays import AnyArray, check_unmasked, is_traced
from rsembed.bags import PAD_ID, Bags, Jagged, narrow_ids
from rsembed.checks import check_finite, check_type
from rsembed.collection import inputs
from rsembed.collection.inputs import is_unknown
from rsembed.collection.prepared import PreparedBatch
from rsembed.kernels.contract import Call
from rsembed.parallel.agreement import Agreement
from rsembed.row_gradients import check_gradient
from rsembed.sizes import padded_size
from rsembed.tbe.arguments import BoundsCheckMode
from rsembed.tbe.plan import LIST, AnyBatch, BagSizes, TBEPlan, engine_of, identity, with_list

Count: TypeAlias = int | np.integer | Array


def read(
    plan: TBEPlan,
    mode: BoundsCheckMode,
    indices: ArrayLike | AnyBatch,
    offsets: ArrayLike | None,
    per_sample_weights: ArrayLike | None = None,
    batch_size_per_feature_per_rank: Sequence[Sequence[int]] | None = None,
) -> tuple[AnyBatch, Count | None, str | None]:
    """Checks the arguments of a lookup, and converts them to a batch.

    `TableBatchedEmbeddingBags.__call__` describes the arguments. Inside `jit`, an id out of range
    cannot raise an error. In mode FATAL inside `jit`, ids out of range are counted, and contribute
    nothing to the output. On a mesh, only a prepared batch can be read inside `jit`.

    Args:
      plan: plan of the module's tables and features.
      mode: treatment of ids and offsets that are out of range.
      indices: ids of all features, or a prepared batch.
      offsets: positions in `indices`: the start of every bag, then the end of the last bag. None if
        `indices` is a prepared batch.
      per_sample_weights: one weight per id, or None.
      batch_size_per_feature_per_rank: entry `[f][r]` is the number of bags of feature `f` from rank
        `r`. None if all features have the same number of bags.

    Returns:
      The batch, the number of ids and offsets that are out of range, and a message or None. The ids
      and offsets of the batch are NumPy arrays, unless they are traced or the batch is prepared.
      The number of ids and offsets out of range is 0 in modes IGNORE and NONE, and None for a
      prepared batch. The message describes the first id or offset that is out of range, and is None
      except in mode WARNING outside `jit`.

    Raises: TypeError, ValueError: arrays of the batch have a wrong dtype or shape for the plan, or,
      in mode FATAL, an id or offset is out of range or a weight is not finite.
    """
    weights = per_sample_weights
    sizes = batch_size_per_feature_per_rank
    # If one process finds an error in its part of the batch, `Agreement` raises an error in all
    # processes.
    with Agreement(plan.devices.known_mesh, "the batch", (indices, offsets, weights, sizes)):
        if isinstance(indices, (Call, PreparedBatch)):
            if not (offsets is None and weights is None and sizes is None):
                raise ValueError(
                    "a prepared batch holds offsets, weights and sizes; pass none of them beside it."
                )
            if not _is_of(plan, mode, indices):
                raise ValueError(
                    "the batch was prepared by a module with other tables; prepare it with this module."
                )
            return indices, None, None
        if plan.is_shared and is_unknown((indices, offsets, weights)):
            raise ValueError(
                "on a mesh, indices and offsets cannot be split inside jit; call batch = "
                "module.prepare(indices, offsets) before, outside of jit, and pass batch in their place."
            )
        batch = _call_of(plan, indices, offsets, weights, sizes)
        return _checked(plan, mode, batch)


def _is_of(plan: TBEPlan, mode: BoundsCheckMode, batch: AnyBatch) -> bool:
    """Whether a prepared batch fits the devices, features, tables and pooling of the plan."""
    if isinstance(batch, PreparedBatch):
        return batch.made_for == identity(plan, mode)
    readers = [segment._replace(first_bag=0, num_bags=0) for segment in batch.segments]
    return not plan.is_shared and tuple(readers) == plan.readers


def split(plan: TBEPlan, mode: BoundsCheckMode, batch: Call) -> PreparedBatch:
    """Splits a checked batch by sample over the devices of a mesh.

    Each process passes its part of the global batch. Do not call `split` inside `jit`.

    Raises: ValueError: the batches of the processes do not match, or the number of samples is not a
      multiple of the number of devices.
    """

    def by_feature(batch: Call) -> Jagged:
        (ids,) = batch.lists
        offsets = np.asarray(ids.offsets)
        in_bags = slice(int(offsets[0]), int(offsets[-1]))
        weights = None if ids.weights is None else ids.weights[in_bags]
        lengths = np.diff(offsets)
        return Jagged(ids.ids[in_bags], lengths, features=plan.feature_names, weights=weights)

    return inputs.prepare(
        engine_of(plan).features,
        batch,
        plan.devices,
        bounds_check="ignore",
        # `prepare` calls `by_feature`. If `by_feature` raises an error in one process, `prepare`
        # raises an error in all processes.
        read=by_feature,
        lists=dict.fromkeys(plan.feature_names, LIST),
        made_for=identity(plan, mode),
    )


def weights_as_passed(
    prepared: PreparedBatch,
    batch: AnyBatch,
) -> dict[str, Array | np.ndarray] | Float[Array, " nnz"]:
    """Gradients of `per_sample_weights`, in the form in which the user passed the batch.

    If the user passed flat ids, the result is a flat array, with 0 for ids that are not in any bag.
    If the user passed a prepared batch, the result is a dictionary with one array `[ids]` per
    feature. Inside `jit`, the array of a feature has zeros for padding at its end.

    Args:
      prepared: result of `split`, with the gradients (or any other values) in place of the weights.
      batch: the batch that the user passed to the module.
    """
    by_feature = {name: bags.weights for name, bags in prepared.items()}
    if isinstance(batch, PreparedBatch):
        return by_feature
    (ids,) = batch.lists
    offsets = np.asarray(ids.offsets)
    num_after = ids.num_entries - int(offsets[-1])
    in_bags = jnp.concatenate(list(by_feature.values()))
    return jnp.pad(in_bags, (int(offsets[0]), num_after))


def _call_of(
    plan: TBEPlan,
    indices: ArrayLike,
    offsets: ArrayLike | None,
    weights: ArrayLike | None,
    sizes: Sequence[Sequence[int]] | None,
) -> Call:
    """Converts the arguments of a lookup to a `Call`, the form that kernels read.

    The types and shapes of the arguments are checked, but not the values of ids and offsets.
    """
    if offsets is None:
        raise TypeError("offsets is missing; pass indices and offsets.")
    ids = _integers(indices, "indices")
    ends = _integers(offsets, "offsets")
    by_rank: BagSizes | None = None
    if sizes is not None:
        check_type(
            sizes,
            Sequence[Sequence[int]],
            "batch_size_per_feature_per_rank [feature][rank]",
        )
        by_rank = tuple(tuple(map(int, of_feature)) for of_feature in sizes)
        if plan.is_shared:
            num_bags = list(map(sum, by_rank))
            way_out = "add bags without ids, and " if len(set(num_bags)) > 1 else ""
            raise ValueError(
                f"on a mesh all features need equally many bags, got {num_bags}; {way_out}leave "
                "batch_size_per_feature_per_rank out, which has no meaning there."
            )
        if plan.pooling == "none":
            raise ValueError(
                "batch_size_per_feature_per_rank needs pooled bags; PoolingMode.NONE returns one row per id."
            )
    if weights is not None:
        check_gradient(weights, "per_sample_weights")
        if not isinstance(weights, jax.Array):
            weights = np.asarray(weights)
        if weights.shape != ids.shape:
            raise ValueError(
                f"per_sample_weights has shape {tuple(weights.shape)}, but there are {ids.shape[0]} indices; pass one "
                "weight per index."
            )
        if plan.pooling == "none":
            raise ValueError(
                "per_sample_weights has no meaning for PoolingMode.NONE, which returns rows as they are (the original "
                "drops it silently); multiply the output, or pool."
            )
        weights = weights.astype(np.float32)
    return plan.batch(ids, ends, weights, by_rank)


def _integers(values: ArrayLike, name: str) -> AnyArray:
    check_unmasked(values, name)
    array: AnyArray = values if isinstance(values, jax.core.Tracer) else np.asarray(values)
    if array.ndim == 1 and array.size == 0:
        array = array.astype(np.int32)  # NumPy converts empty lists to float64.
    if array.ndim != 1 or not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(
            f"{name} must be a flat array of integers, got {array.dtype} of shape {array.shape}."
        )
    return array


def _checked(
    plan: TBEPlan,
    mode: BoundsCheckMode,
    batch: Call,
) -> tuple[Call, Count, str | None]:
    (ids,) = batch.lists
    is_known = not is_traced((ids.ids, ids.offsets))
    is_fatal = mode == BoundsCheckMode.FATAL
    mistake = None
    num_corrected: Count = 0
    if is_known and is_fatal and ids.weights is not None:
        check_finite(ids.weights, "per_sample_weights", way_out="clean the weights")
    if is_known and mode != BoundsCheckMode.NONE:
        mistake = _first_mistake(plan, batch, may_begin_later=not is_fatal)
        if mistake and is_fatal:
            raise ValueError(mistake)
    if mode != BoundsCheckMode.NONE and (mistake or not is_known):
        repaired, num_corrected = _repaired(plan, batch)
        batch = batch if is_fatal else repaired
    (ids,) = batch.lists
    narrowed_ids = narrow_ids(ids.ids)
    narrowed_offsets = narrow_ids(ids.offsets)
    batch = with_list(batch, ids=narrowed_ids, offsets=narrowed_offsets)
    if mode == BoundsCheckMode.IGNORE:
        return batch, 0, None
    return batch, num_corrected, mistake


def repeat_by_feature(values: AnyArray, starts: AnyArray, num_ids: int) -> AnyArray:
    """For each id, the value of the feature that reads the id.

    Args:
      values: array of shape `[1 + features]`. `values[0]` is used for ids before the first bag,
        and `values[1 + f]` for the ids of feature `f`.
      starts: position of the first id of every feature, then the end of the last feature's ids.
      num_ids: number of ids, which must be static inside `jit`.
    """
    if isinstance(starts, np.ndarray):
        return np.repeat(values, np.concatenate([starts[:1], np.diff(starts)]))
    lengths = jnp.concatenate([starts[:1], jnp.diff(starts)])
    return jnp.repeat(values, lengths, total_repeat_length=num_ids)


def _repaired(
    plan: TBEPlan,
    batch: Call,
) -> tuple[Call, Count]:
    """Corrects ids and offsets that are out of range.

    The last offset is set to the number of ids. All offsets before the last offset are clipped to
    `[0, number of ids]`. An offset that is smaller than an earlier offset is raised to the largest
    earlier offset. An id outside the rows of its table is set to 0. The id -1 is not changed,
    because it means no id. The arrays of the batch are NumPy arrays or traced arrays.

    Returns: the corrected batch, and the number of corrected ids and offsets.

    Source: FBGEMM, BoundsCheckMode.WARNING.
    """
    (entries,) = batch.lists
    num_ids = entries.num_entries
    xp: Any = jnp if is_traced((entries.ids, entries.offsets)) else np
    ids = narrow_ids(xp.asarray(entries.ids))
    offsets = xp.asarray(entries.offsets)
    ends: Any = xp.clip(offsets, 0, num_ids)
    is_last = xp.arange(ends.shape[0]) == ends.shape[0] - 1
    ends = xp.where(is_last, num_ids, ends)
    ends = np.maximum.accumulate(ends) if xp is np else jax.lax.cummax(ends)
    starts = ends[plan.first_bags(batch)]
    is_in_bag = xp.arange(num_ids) >= starts[0]
    num_rows = [reader.num_rows for reader in plan.readers]
    limits = xp.asarray([0, *num_rows], np.int32)
    limit = repeat_by_feature(limits, starts, num_ids)
    is_outside = is_in_bag & ((ids < PAD_ID) | (ids >= limit))
    fixed = xp.where(is_outside, 0, ids)
    num_changed = xp.sum(is_outside) + xp.sum(ends != offsets)
    repaired = with_list(batch, ids=fixed, offsets=ends.astype(offsets.dtype))
    return repaired, num_changed


def _first_mistake(
    plan: TBEPlan,
    batch: Call,
    *,
    may_begin_later: bool,
) -> str | None:
    """Message about the first id or offset that is out of range, or None if all are in range.

    A message about an id contains the names of the feature and the table, the index of the bag, and
    the position of the id in the bag.

    Args:
      plan: plan of the module's tables and features.
      batch: the batch, which must not be traced.
      may_begin_later: whether a first offset above 0 is accepted. Ids before the first offset are
        in no bag.
    """
    (entries,) = batch.lists
    ids = np.asarray(entries.ids)
    offsets = np.asarray(entries.offsets)
    if offsets[0] < 0 or (offsets[0] and not may_begin_later):
        return f"offsets begin with {int(offsets[0])}, but the first bag must begin at 0."
    first_bags = plan.first_bags(batch)
    is_bad_end = (offsets[1:] < offsets[:-1]) | (offsets[1:] > ids.size)
    if is_bad_end.any():
        bag = int(is_bad_end.argmax())
        feature = int(np.searchsorted(first_bags, bag, side="right")) - 1
        return (
            f"feature {plan.feature_names[feature]!r}: bag {bag - first_bags[feature]} goes from offset "
            f"{int(offsets[bag])} to {int(offsets[bag + 1])}, but offsets must never fall, and there are "
            f"{ids.size} ids."
        )
    if offsets[-1] != ids.size:
        return f"the last offset is {int(offsets[-1])}, but there are {ids.size} ids; they must be equal."
    starts = offsets[first_bags].astype(np.int64)
    has_ids = np.flatnonzero(np.diff(starts))
    limits = np.asarray([reader.num_rows for reader in plan.readers])
    smallest_ids = np.minimum.reduceat(ids, starts[has_ids])
    largest_ids = np.maximum.reduceat(ids, starts[has_ids])
    is_bad = (smallest_ids < PAD_ID) | (largest_ids >= limits[has_ids])
    if not is_bad.any():
        return None
    feature = int(has_ids[is_bad.argmax()])
    table = plan.tables[plan.features[feature]]
    ids_of_feature = ids[starts[feature] : starts[feature + 1]]
    is_outside = (ids_of_feature < PAD_ID) | (ids_of_feature >= table.num_rows)
    position = int(starts[feature] + is_outside.argmax())
    bag = int(np.searchsorted(offsets, position, side="right")) - 1
    return (
        f"feature {plan.feature_names[feature]!r}: id {int(ids[position])} at position "
        f"{position - int(offsets[bag])} of bag {bag - int(first_bags[feature])} is outside table {table.name!r} with "
        f"{table.num_rows} rows ({int(is_outside.sum())} such ids in this feature); enlarge the table, hash the ids "
        f"first, use {PAD_ID} for missing ids, or choose BoundsCheckMode.WARNING to read row 0 instead."
    )


def with_room(batch: Call) -> Call:
    """Pads the ids of a batch to a power of two.

    The padding comes after the last offset, so it is in no bag.
    """
    (ids,) = batch.lists
    bags = Bags(ids.ids, ids.all_offsets(), ids.weights)
    padded = bags.pad_to(padded_size(ids.num_entries))
    return with_list(batch, ids=padded.ids, weights=padded.weights)


def mask_of_ids(
    plan: TBEPlan,
    batch: AnyBatch,
    feature_requires_grad: ArrayLike,
) -> AnyArray | dict[str, Array]:
    """For each id, the number in `feature_requires_grad` for the feature that reads the id.

    Returns: an array with one number per id, or, for a batch that was prepared on a mesh, a
      dictionary with one number per feature.

    Raises: ValueError: `feature_requires_grad` does not have one entry per feature.
    """
    num_features = len(plan.features)
    mask = jnp.asarray(feature_requires_grad, jnp.float32)
    if mask.shape != (num_features,):
        raise ValueError(
            f"feature_requires_grad has shape {mask.shape}; give {num_features} numbers."
        )
    if isinstance(batch, PreparedBatch):
        return dict(zip(plan.feature_names, mask, strict=True))
    (ids,) = batch.lists
    starts = jnp.asarray(ids.offsets)[plan.first_bags(batch)]
    values = jnp.concatenate([jnp.zeros(1), mask])
    return repeat_by_feature(values, starts, ids.num_entries)

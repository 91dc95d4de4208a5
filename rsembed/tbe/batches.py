"""Checks the batch of a call once and converts it to the form that kernels read.

The caller's arrays are never changed. Ids and offsets that are out of range are corrected in
copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree
from numpy.typing import ArrayLike

from rsembed.arrays import check_unmasked, is_traced
from rsembed.bags import PAD_ID, Bags, narrow_ids
from rsembed.checks import check_type
from rsembed.collection import inputs
from rsembed.collection.inputs import is_unknown
from rsembed.collection.prepared import PreparedBatch
from rsembed.kernels.contract import Call
from rsembed.parallel.agreement import Agreement
from rsembed.sizes import padded_size
from rsembed.tbe.arguments import BoundsCheckMode
from rsembed.tbe.plan import AnyBatch, TBEPlan, engine_of, identity, with_list

AnyArray: TypeAlias = Array | np.ndarray
Count: TypeAlias = int | np.integer | Array


def read(
    plan: TBEPlan,
    mode: BoundsCheckMode,
    indices: ArrayLike | AnyBatch,
    offsets: ArrayLike | None,
    per_sample_weights: ArrayLike | None = None,
    batch_size_per_feature_per_rank: Sequence[Sequence[int]] | None = None,
) -> tuple[AnyBatch, Count | None, str | None]:
    """A checked batch, the number of ids and offsets out of range, and a warning message.

    Arguments are those of `TableBatchedEmbeddingBags.__call__`. Inside `jit` nothing can be raised:
    in mode FATAL, ids out of range then contribute nothing and are counted. On a mesh, only a
    prepared batch can be read inside `jit`.

    Args:
      plan: the tables and features.
      mode: treatment of ids and offsets that are out of range.
      indices: ids of all features, or a prepared batch.
      offsets: ends of all bags; None with a prepared batch.
      per_sample_weights: one weight per id, or None.
      batch_size_per_feature_per_rank: number of bags by feature and rank, or None.

    Returns:
      The batch, with numpy arrays unless it is traced or prepared.
      The number of ids and offsets out of range in modes WARNING and FATAL, 0 in the other modes.
      It is None for a prepared batch, which needs no count.
      In mode WARNING a message about the first one, else None. Also None inside `jit`.

    Raises: TypeError, ValueError: the batch does not fit the plan, or, in mode FATAL, an id or
      offset is out of range or a weight is not finite.
    """
    given = (indices, offsets, per_sample_weights, batch_size_per_feature_per_rank)
    # If one process refuses its part of the batch, `Agreement` raises in all processes.
    with Agreement(plan.devices.known_mesh, "the batch", given):
        if isinstance(indices, (Call, PreparedBatch)):
            if any(own is not None for own in given[1:]):
                raise ValueError(
                    "a prepared batch holds offsets, weights and sizes; pass none of them beside it."
                )
            if not _is_of(plan, mode, indices):
                raise ValueError(
                    "the batch was prepared for other tables than the module's; prepare it by the latter."
                )
            return indices, None, None
        if plan.is_shared and is_unknown(given[:3]):
            raise ValueError(
                "on a mesh, indices and offsets cannot be split inside jit; bring them into form before, with batch = "
                "module.prepare(indices, offsets), and pass batch in their place."
            )
        return _checked(plan, mode, _jagged(plan, *given))


def _is_of(plan: TBEPlan, mode: BoundsCheckMode, batch: AnyBatch) -> bool:
    """Whether a prepared batch fits the plan's devices, features, rows and pooling."""
    if isinstance(batch, PreparedBatch):
        return batch.made_for == identity(plan, checks=mode != BoundsCheckMode.NONE)
    places = [(plan.combiner, *plan.places[t], plan.tables[t].num_rows) for t in plan.features]
    return not plan.is_shared and [segment[3:] for segment in batch.segments] == places


def split(plan: TBEPlan, mode: BoundsCheckMode, batch: Call) -> PreparedBatch:
    """A checked batch, split by sample over the devices of a mesh. Not for use inside `jit`.

    Each process passes its part of the global batch.

    Raises: ValueError: the processes disagree, or the devices do not divide the samples.
    """
    bags = {}
    (listed,) = batch.lists
    offsets = np.asarray(listed.offsets)
    for name, segment in zip(plan.feature_names, batch.segments, strict=True):
        ends = offsets[segment.first_bag : segment.first_bag + segment.num_bags + 1]
        own = slice(int(ends[0]), int(ends[-1]))
        weights = None if listed.weights is None else np.asarray(listed.weights[own])
        bags[name] = Bags(np.asarray(listed.ids[own]), ends - ends[0], weights)
    return inputs.prepare(
        engine_of(plan).features,
        bags,
        plan.devices,
        bounds_check="ignore",
        lists=plan.list_of_feature,
        made_for=identity(plan, checks=mode != BoundsCheckMode.NONE),
    )


def weights_by_feature(batch: PreparedBatch) -> dict[str, Array | np.ndarray]:
    """The weights of a split batch, `[ids]` for each feature. Inside `jit`, zeros follow them."""
    return {name: bags.weights for name, bags in batch.items()}


def weights_in_order(prepared: PreparedBatch, batch: Call) -> Float[Array, " nnz"]:
    """The weights of a split batch in the order of the flat batch; 0 for ids outside all bags.

    Args:
      prepared: result of `split`, with weights or their gradients.
      batch: the flat batch that was split.
    """
    (listed,) = batch.lists
    offsets = np.asarray(listed.offsets)
    before = jnp.zeros(int(offsets[0]))
    after = jnp.zeros(listed.num_entries - int(offsets[-1]))
    return jnp.concatenate(
        [before, *map(jnp.asarray, weights_by_feature(prepared).values()), after]
    )


def _jagged(
    plan: TBEPlan, indices: PyTree, offsets: PyTree, weights: PyTree, sizes: PyTree
) -> Call:
    """One batch from the arguments of a call. Checks types and shapes, but no ids or offsets."""
    if offsets is None:
        raise TypeError("offsets is missing; pass indices and offsets.")
    ids, ends = _integers(indices, "indices"), _integers(offsets, "offsets")
    if sizes is not None:
        check_type(
            sizes, Sequence[Sequence[int]], "batch_size_per_feature_per_rank [feature][rank]"
        )
        sizes = tuple(tuple(int(n) for n in own) for own in sizes)
        if plan.is_shared:
            num_bags = [sum(own) for own in sizes]
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
        check_unmasked(weights, "per_sample_weights")
        weights = weights if isinstance(weights, jax.Array) else np.asarray(weights)
        if not jnp.issubdtype(weights.dtype, jnp.floating):
            raise TypeError(f"per_sample_weights must be floats, got {weights.dtype}.")
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
    return plan.batch(ids, ends, weights, sizes)


def _integers(values: ArrayLike, what: str) -> AnyArray:
    check_unmasked(values, what)
    array: AnyArray = values if isinstance(values, jax.core.Tracer) else np.asarray(values)
    if array.ndim == 1 and array.size == 0:
        array = array.astype(np.int32)  # numpy reads an empty list as float64
    if array.ndim != 1 or not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(
            f"{what} must be a flat array of integers, got {array.dtype} of shape {array.shape}."
        )
    return array


def _checked(plan: TBEPlan, mode: BoundsCheckMode, batch: Call) -> tuple[Call, Count, str | None]:
    is_known, mistake = not is_traced((batch.lists[0].ids, batch.lists[0].offsets)), None
    is_fatal, num_corrected = mode == BoundsCheckMode.FATAL, cast(Count, 0)
    if (
        is_known
        and is_fatal
        and batch.lists[0].weights is not None
        and not is_traced(batch.lists[0].weights)
    ):
        weights = np.asarray(batch.lists[0].weights)
        if not np.isfinite(weights).all():
            place = int(np.isfinite(weights).argmin())
            wrong = f"{weights[place]} at index {place} is not finite"
            raise ValueError(f"per_sample_weights: {wrong}; clean the weights.")
    if is_known and mode != BoundsCheckMode.NONE:
        mistake = _first_mistake(plan, batch, may_begin_later=not is_fatal)
        if mistake and is_fatal:
            raise ValueError(mistake)
    if mode != BoundsCheckMode.NONE and (mistake or not is_known):
        repaired, num_corrected = _repaired(plan, batch)
        batch = batch if is_fatal else repaired
    batch = with_list(
        batch, ids=narrow_ids(batch.lists[0].ids), offsets=narrow_ids(batch.lists[0].offsets)
    )
    warns = mode == BoundsCheckMode.WARNING
    return batch, num_corrected if warns or is_fatal else 0, mistake if warns else None


# Bounds


def feature_starts(offsets: AnyArray, num_bags: Sequence[int]) -> AnyArray:
    """Position of the first id of every feature, and the end of the last feature's ids."""
    return offsets[np.asarray([0, *itertools.accumulate(num_bags)])]


def repeat_by_feature(values: AnyArray, starts: AnyArray, num_ids: int) -> AnyArray:
    """Repeats one value per feature for each of the feature's ids.

    Args:
      values: `values[0]` is for ids before the first bag, `values[1:]` are for the features.
      starts: result of `feature_starts`.
      num_ids: number of ids. It must be static inside `jit`.
    """
    if isinstance(starts, np.ndarray):
        return np.repeat(values, np.concatenate([starts[:1], np.diff(starts)]))
    lengths = jnp.concatenate([starts[:1], jnp.diff(starts)])
    return jnp.repeat(values, lengths, total_repeat_length=num_ids)


def _repaired(plan: TBEPlan, batch: Call) -> tuple[Call, Count]:
    """The batch with ids and offsets in range, and how many of them were changed.

    The last offset becomes the number of ids. The others are clipped to `[0, number of ids]`, and
    an offset that falls becomes the largest one before it. An id outside its table becomes 0,
    except -1, which means no id. Works on numpy arrays and inside `jit`.

    Source: FBGEMM, BoundsCheckMode.WARNING.
    """
    (listed,) = batch.lists
    num_ids = listed.num_entries
    xp: Any = jnp if is_traced((listed.ids, listed.offsets)) else np
    ids, offsets = narrow_ids(xp.asarray(listed.ids)), xp.asarray(listed.offsets)
    ends: Any = xp.clip(offsets, 0, num_ids)
    is_last = xp.arange(ends.shape[0]) == ends.shape[0] - 1
    ends = xp.where(is_last, xp.asarray(num_ids, ends.dtype), ends)
    ends = np.maximum.accumulate(ends) if xp is np else jax.lax.cummax(ends)
    starts = feature_starts(ends, plan.bags_of(batch))
    limits = [np.iinfo(np.int32).max, *(plan.tables[t].num_rows for t in plan.features)]
    limit = repeat_by_feature(xp.asarray(np.asarray(limits, np.int32)), starts, num_ids)
    is_in_bag = xp.arange(num_ids) >= starts[0]
    is_outside = is_in_bag & (((ids < 0) & (ids != PAD_ID)) | (ids >= limit))
    fixed = xp.where(is_outside, xp.zeros_like(ids), ids)
    num_changed = xp.sum(is_outside) + xp.sum(ends != offsets)
    return with_list(batch, ids=fixed, offsets=ends.astype(offsets.dtype)), num_changed


def _first_mistake(plan: TBEPlan, batch: Call, *, may_begin_later: bool) -> str | None:
    """Message about the first id or offset out of range, or None.

    The message names feature, table, bag and position.

    Args:
      plan: the tables and features.
      batch: the batch, not traced.
      may_begin_later: whether the first offset may be above 0. Ids before it are in no bag.
    """
    ids, offsets = np.asarray(batch.lists[0].ids), np.asarray(batch.lists[0].offsets)
    if offsets[0] < 0 or (offsets[0] and not may_begin_later):
        return f"offsets begin with {int(offsets[0])}, but the first bag must begin at 0."
    first_bags = [0, *itertools.accumulate(plan.bags_of(batch))]
    falls = offsets[1:] < offsets[:-1]
    if falls.size and (falls.any() or offsets[-1] > ids.size):
        bag = int((falls | (offsets[1:] > ids.size)).argmax())
        feature = int(np.searchsorted(first_bags, bag, side="right")) - 1
        return (
            f"feature {plan.feature_names[feature]!r}: bag {bag - first_bags[feature]} goes from offset "
            f"{int(offsets[bag])} to {int(offsets[bag + 1])}, but offsets must never fall, and there are "
            f"{ids.size} ids."
        )
    if offsets[-1] != ids.size:
        return f"the last offset is {int(offsets[-1])}, but there are {ids.size} ids; they must be equal."
    for name, t, bags in zip(
        plan.feature_names, plan.features, itertools.pairwise(first_bags), strict=True
    ):
        (first, last), table = offsets[list(bags)].tolist(), plan.tables[t]
        own = ids[first:last]
        if own.size and (own.min() < PAD_ID or own.max() >= table.num_rows):
            bad = np.flatnonzero((own < PAD_ID) | (own >= table.num_rows))
            place = first + int(bad[0])
            bag = int(np.searchsorted(offsets, place, side="right")) - 1
            return (
                f"feature {name!r}: id {int(ids[place])} at position {place - int(offsets[bag])} of bag "
                f"{bag - bags[0]} is outside table {table.name!r} with {table.num_rows} rows ({bad.size} such ids in "
                f"this feature); enlarge the table, hash the ids first, use {PAD_ID} for missing ids, or choose "
                "BoundsCheckMode.WARNING to read row 0 instead."
            )
    return None


# For the module


def with_room(batch: Call) -> Call:
    """The batch padded to a power of two of ids. Padding follows the last offset, in no bag."""
    (listed,) = batch.lists
    bags: Any = Bags(listed.ids, listed.all_offsets(), listed.weights).pad_to(
        padded_size(listed.num_entries)
    )
    return with_list(batch, ids=bags.ids, weights=bags.weights)


def mask_of_ids(plan: TBEPlan, batch: AnyBatch, feature_requires_grad: ArrayLike) -> PyTree:
    """The entry of `feature_requires_grad` for each id's feature.

    Returns: array with one entry per id, or, for a batch prepared on a mesh, a dictionary with one
      entry per feature.

    Raises: ValueError: there is not one entry per feature.
    """
    num_features, mask = len(plan.features), jnp.asarray(feature_requires_grad, jnp.float32)
    if mask.shape != (num_features,):
        raise ValueError(
            f"feature_requires_grad has shape {mask.shape}; give {num_features} numbers."
        )
    if isinstance(batch, PreparedBatch):
        return dict(zip(plan.feature_names, mask, strict=True))
    num_bags = plan.bags_of(batch)
    starts = feature_starts(jnp.asarray(batch.lists[0].offsets), num_bags)
    return repeat_by_feature(
        jnp.concatenate([jnp.zeros(1), mask]), starts, batch.lists[0].ids.shape[0]
    )

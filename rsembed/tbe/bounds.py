"""Ids and offsets outside their range: found, told, and repaired in copies; what the caller passed stays as it is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from rsembed.bags import PAD_ID

Numbers = Int[Array | np.ndarray, " _"]


def feature_starts(offsets: Any, num_bags: Sequence[int]) -> Any:
    """Where the ids of every feature begin, and where those of the last one end."""
    return offsets[np.asarray([0, *itertools.accumulate(num_bags)])]


def repeat_by_feature(values: Any, starts: Any, num_ids: int) -> Any:
    """For every id the value of its feature, from `values[1:]`; `values[0]` for those in front of the first bag."""
    if isinstance(starts, np.ndarray):
        return np.repeat(values, np.concatenate([starts[:1], np.diff(starts)]))
    lengths = jnp.concatenate([starts[:1], jnp.diff(starts)])
    return jnp.repeat(values, lengths, total_repeat_length=num_ids)


def repair(
    indices: Numbers, offsets: Numbers, num_bags: Sequence[int], num_rows: Sequence[int]
) -> tuple[Any, Any, Any]:
    """Ids and offsets inside their range, and how many of them had to be changed.

    The last offset becomes the number of ids, the others are clipped to it and never fall; an id outside its table
    becomes 0, except for -1, which stands for no id. Works on numpy arrays and inside `jit`.

    Args:
      indices: ids of all features.
      offsets: ends of all bags.
      num_bags: bags of every feature.
      num_rows: rows of every feature's table.

    Source: FBGEMM, BoundsCheckMode.WARNING.
    """
    xp: Any = np if isinstance(indices, np.ndarray) and isinstance(offsets, np.ndarray) else jnp
    offsets = xp.asarray(offsets)
    num_ids = indices.shape[0]
    ends = xp.clip(offsets, 0, num_ids)
    is_last = xp.arange(ends.shape[0]) == ends.shape[0] - 1
    ends = xp.where(is_last, xp.asarray(num_ids, ends.dtype), ends)
    ends = np.maximum.accumulate(ends) if xp is np else jax.lax.cummax(ends)
    starts = feature_starts(ends, num_bags)
    no_limit = np.iinfo(np.int32).max
    limits = xp.asarray(np.asarray([no_limit, *num_rows], np.int64 if xp is np else np.int32))
    limit = repeat_by_feature(limits, starts, num_ids)
    is_in_bag = xp.arange(num_ids) >= starts[0]
    is_outside = is_in_bag & (((indices < 0) & (indices != PAD_ID)) | (indices >= limit))
    fixed = xp.where(is_outside, xp.zeros_like(indices), indices)
    num_changed = xp.sum(is_outside) + xp.sum(ends != offsets)
    return fixed, ends.astype(offsets.dtype), num_changed


def is_sound(indices: np.ndarray, offsets: np.ndarray, num_bags: Sequence[int], num_rows: Sequence[int]) -> bool:
    """Whether `repair` would change nothing: a few passes over the arrays without a copy."""
    if offsets[0] < 0 or offsets[-1] != indices.size or (offsets[1:] < offsets[:-1]).any():
        return False
    starts = feature_starts(offsets, num_bags).tolist()
    for (first, last), rows in zip(itertools.pairwise(starts), num_rows, strict=True):
        own = indices[first:last]
        if own.size and (own.min() < PAD_ID or own.max() >= rows):
            return False
    return True


def first_mistake(
    indices: np.ndarray,
    offsets: np.ndarray,
    num_bags: Sequence[int],
    num_rows: Sequence[int],
    feature_names: Sequence[str],
    table_names: Sequence[str],
) -> str | None:
    """What is wrong first, in words that name feature, table, bag, position, id and rows; None if nothing is."""
    if offsets[0] != 0:
        return f"offsets begin with {int(offsets[0])}, but the first bag must begin at 0."
    first_bags = [0, *itertools.accumulate(num_bags)]
    falls = np.flatnonzero((offsets[1:] < offsets[:-1]) | (offsets[1:] > indices.size))
    if falls.size:
        bag = int(falls[0])
        feature = int(np.searchsorted(first_bags, bag, side="right")) - 1
        return (
            f"feature {feature_names[feature]!r}: bag {bag - first_bags[feature]} goes from offset "
            f"{int(offsets[bag])} to {int(offsets[bag + 1])}, but offsets must never fall, and there are "
            f"{indices.size} ids."
        )
    if offsets[-1] != indices.size:
        return f"the last offset is {int(offsets[-1])}, but there are {indices.size} ids; they must be equal."
    for feature, rows in enumerate(num_rows):
        first, last = int(offsets[first_bags[feature]]), int(offsets[first_bags[feature + 1]])
        own = indices[first:last]
        bad = np.flatnonzero((own < PAD_ID) | (own >= rows))
        if bad.size:
            place = first + int(bad[0])
            bag = int(np.searchsorted(offsets, place, side="right")) - 1
            return (
                f"feature {feature_names[feature]!r}: id {int(indices[place])} at position {place - int(offsets[bag])} "
                f"of bag {bag - first_bags[feature]} is outside table {table_names[feature]!r} with {rows} rows "
                f"({bad.size} such ids in this feature); enlarge the table, hash the ids first, use {PAD_ID} for "
                "missing ids, or choose BoundsCheckMode.WARNING to read row 0 instead."
            )
    return None

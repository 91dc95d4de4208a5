"""The ids of many features as rows of their stack, and how many of them are in use, in plain JAX."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Int

from rsembed.bags import PAD_ID
from rsembed.kernels.contract import NO_ROW, as_rows
from rsembed.places import Place


def rows_of_ids(
    ids: Sequence[Int[Array, " _"]], places: Sequence[Place], sizes: Sequence[int], spread: int, rows_per_shard: int
) -> tuple[Int[Array, " _"], ...]:
    """Row of each id of each feature, `NO_ROW` for ids outside `[0, size)` of the feature's table."""
    rows = []
    for own, place, size in zip(map(as_rows, ids), places, sizes, strict=True):
        is_valid = (own >= 0) & (own < size)
        found = place.rows(jnp.where(is_valid, own, 0), spread=spread, rows_per_shard=rows_per_shard)
        rows.append(jnp.where(is_valid, found, NO_ROW))
    return tuple(rows)


def count_ids(
    ids: Sequence[Int[Array, " _"]], offsets: Sequence[Int[Array, " _"]], sizes: Sequence[int]
) -> tuple[tuple[Int[Array, ""], Int[Array, ""]], ...]:
    """Of each feature, how many ids lie inside its table, and how many outside that are no padding.

    Entries behind the last offset are neither.
    """
    counts = []
    for own, ends, size in zip(ids, offsets, sizes, strict=True):
        is_used = jnp.arange(own.shape[0], dtype=jnp.int32) < ends[-1]
        is_inside = (own >= 0) & (own < size)
        is_outside = ~is_inside & (own != PAD_ID)
        num_inside, num_outside = (jnp.sum(is_used & what, dtype=jnp.int32) for what in (is_inside, is_outside))
        counts.append((num_inside, num_outside))
    return tuple(counts)


def rows_by_bag(bags: Int[Array, " nnz"], num_bags: int) -> tuple[Int[Array, " num_bags_plus_1"], Int[Array, " nnz"]]:
    """Groups entries by bag: offsets, and the stable order in which entries belong to bags 0, 1, ...

    Entries whose bag lies outside `[0, num_bags)` come last, behind the final offset.
    """
    keys = jnp.where((bags >= 0) & (bags < num_bags), bags, num_bags)
    order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    offsets = jnp.searchsorted(keys[order], jnp.arange(num_bags + 1, dtype=keys.dtype), side="left")
    return offsets.astype(jnp.int32), order

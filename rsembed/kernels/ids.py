"""Ids of many features as rows of their stack, and the entries of preprocessed SparseCore batches, in plain JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rsembed.bags import PAD_ID
from rsembed.kernels.contract import NO_ROW, as_rows
from rsembed.places import Place

ALIGNMENT = 8
"""Partitions begin at multiples of it, and a block of row pointers has at least so many."""


def rows_of_ids(
    ids: Sequence[Int[Array, " _"]], places: Sequence[Place], sizes: Sequence[int], spread: int, rows_per_shard: int
) -> tuple[Int[Array, " _"], ...]:
    """Row of each id of each feature in their stack, `NO_ROW` for ids outside `[0, size)` of the feature's table.

    Args:
      ids: one array per feature.
      places: the `Place` of each feature's table.
      sizes: ids of these tables.
      spread: shards over which a table is dealt.
      rows_per_shard: rows of every shard.
    """
    rows = []
    for own, place, size in zip(map(as_rows, ids), places, sizes, strict=True):
        is_valid = (own >= 0) & (own < size)
        found = place.rows(jnp.where(is_valid, own, 0), spread=spread, rows_per_shard=rows_per_shard)
        rows.append(jnp.where(is_valid, found, NO_ROW))
    return tuple(rows)


def count_ids(
    ids: Sequence[Int[Array, " _"]], offsets: Sequence[Int[Array, " _"]], sizes: Sequence[int]
) -> tuple[tuple[Int[Array, ""], Int[Array, ""]], ...]:
    """How many ids of each feature are inside and outside its table; padding counts as neither.

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
    """Offsets of bags, and the stable order that sorts entries by bag.

    Entries whose bag lies outside `[0, num_bags)` come last, behind the final offset.
    """
    keys = jnp.where((bags >= 0) & (bags < num_bags), bags, num_bags)
    order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    offsets = jnp.searchsorted(keys[order], jnp.arange(num_bags + 1, dtype=keys.dtype), side="left")
    return offsets.astype(jnp.int32), order


class Partitions(NamedTuple):
    """Entries that one device looks up in a stack, ordered by core, (minibatch,) shard and row.

    Without minibatches, each core has a block of row pointers, which count from the first of its places. With them,
    blocks belong to (core, minibatch), one after the other, and count from the first place of all.

    Attributes:
      row_pointers: where the partition of each shard ends.
      embedding_ids: row of every entry in its shard.
      sample_ids: sample of every entry in its core.
      gains: factor of every row in its sample.
      num_minibatches: number of blocks of a core in use; None without minibatches.
      num_cores: cores of the device.
      num_shards: shards of the stack.
      rows_per_shard: rows of the stack in each shard.
      samples_per_core: samples of the stack on each core.
    """

    row_pointers: Int[Array, " pointers"]
    embedding_ids: Int[Array, " places"]
    sample_ids: Int[Array, " places"]
    gains: Float[Array, " places"]
    num_minibatches: Int[Array, ""] | None
    num_cores: int
    num_shards: int
    rows_per_shard: int
    samples_per_core: int

    @property
    def num_samples(self) -> int:
        """Number of samples of the device."""
        return self.num_cores * self.samples_per_core


SampleEntries = tuple[Int[Array, " places"], Int[Array, " samples_plus_1"], Float[Array, " places"]]
"""Rows, where the entries of each sample begin, and gains; `NO_ROW` and 0 behind the last entry."""


def entries_by_sample(stacks: Sequence[Partitions]) -> list[SampleEntries]:
    """Entries that one device looks up in each stack: rows, offsets by sample, and gains.

    Entries are those that the row pointers delimit; the ones of a sample come in the order of their rows.
    """
    return [_entries_by_sample(own) for own in stacks]


def _entries_by_sample(own: Partitions) -> SampleEntries:
    num_parts = own.num_cores if own.num_minibatches is None else 1
    places_per_part = own.embedding_ids.shape[0] // num_parts
    blocks = own.row_pointers.reshape(num_parts, -1, max(own.num_shards, ALIGNMENT))
    ends = blocks[:, :, : own.num_shards].reshape(num_parts, -1)
    starts = jnp.pad(-(-ends[:, :-1] // ALIGNMENT) * ALIGNMENT, ((0, 0), (1, 0)))
    if own.num_minibatches is not None:
        num_used = own.num_cores * own.num_minibatches * own.num_shards
        starts = jnp.where(jnp.arange(ends.size, dtype=jnp.int32)[None, :] < num_used, starts, places_per_part)
    # Counting the partitions that start up to a place tells its partition: the last of those, if some are empty.
    part = jnp.arange(num_parts, dtype=jnp.int32)[:, None]
    started = jnp.zeros((num_parts, places_per_part), jnp.int32).at[part, starts].add(1, mode="drop")
    partition = jnp.cumsum(started, axis=1) - 1
    place = jnp.arange(places_per_part, dtype=jnp.int32)[None, :]
    is_entry = (place < jnp.take_along_axis(ends, partition, axis=1)).reshape(-1)
    if own.num_minibatches is None:
        cores, shards = jnp.repeat(part.reshape(-1), places_per_part), partition.reshape(-1)
    else:
        cores, shards = partition[0] // (own.num_minibatches * own.num_shards), partition[0] % own.num_shards

    def used(values: Array) -> Array:
        return jnp.where(is_entry, values, NO_ROW)

    rows = used(shards * own.rows_per_shard + own.embedding_ids)
    samples, gains = used(cores * own.samples_per_core + own.sample_ids), jnp.where(is_entry, own.gains, 0.0)
    if own.num_minibatches is not None:
        order = jnp.lexsort((samples, rows))
        rows, samples, gains = (field[order] for field in (rows, samples, gains))
    offsets, order = rows_by_bag(samples, own.num_samples)
    return rows[order], offsets, gains[order]

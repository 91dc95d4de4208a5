"""Ids on their way to rows, in plain JAX: rows in a stack, entries of preprocessed batches, blocks between devices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped, UInt32

from rsembed.bags import PAD_ID
from rsembed.kernels.contract import NO_ROW, Call, as_rows
from rsembed.kernels.reference import by_bag, gather_rows
from rsembed.places import Place

ALIGNMENT = 8
"""Partitions begin at multiples of it, and a block of row pointers has at least so many."""


def rows_of_ids(
    call: Call, places: Sequence[Place], sizes: Sequence[int], spread: int, rows_per_shard: int
) -> tuple[Int[Array, " _"], ...]:
    """For each list of a call, the row that each id means in an array of shards.

    An id outside `[0, size)` of its table, or in no segment, gets `NO_ROW`.

    Args:
      call: the lists of ids, and which bags each feature reads.
      places: the `Place` of each segment's table.
      sizes: number of ids of each segment's table.
      spread: shards over which a table is dealt.
      rows_per_shard: rows of every shard.
    """
    rows = []
    for number, ids in enumerate(call.lists):
        readers = [k for k, segment in enumerate(call.segments) if segment.list == number]
        segments = [call.segments[k] for k in readers]
        fields = [by_bag(ids, segments, list(values), 0) for values in zip(*[places[k] for k in readers], strict=True)]
        num_ids = by_bag(ids, segments, [sizes[k] for k in readers], 0)
        entries = as_rows(ids.ids)
        is_valid = (entries >= 0) & (entries < num_ids)
        found = Place(*fields).rows(jnp.where(is_valid, entries, 0), spread=spread, rows_per_shard=rows_per_shard)
        rows.append(jnp.where(is_valid, found, NO_ROW))
    return tuple(rows)


def count_ids(
    ids: Sequence[Int[Array, " _"]], offsets: Sequence[Int[Array, " _"]], sizes: Sequence[int]
) -> tuple[tuple[Int[Array, ""], Int[Array, ""]], ...]:
    """Numbers of ids of each feature inside and outside its table; padding counts as neither.

    Entries before the first offset or after the last are neither.
    """
    counts = []
    for own, ends, size in zip(ids, offsets, sizes, strict=True):
        place = jnp.arange(own.shape[0], dtype=jnp.int32)
        is_used = (place >= ends[0]) & (place < ends[-1])
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
    found = []
    for own in stacks:
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
        rows = jnp.where(is_entry, shards * own.rows_per_shard + own.embedding_ids, NO_ROW)
        samples = jnp.where(is_entry, cores * own.samples_per_core + own.sample_ids, NO_ROW)
        gains = jnp.where(is_entry, own.gains, 0.0)
        if own.num_minibatches is not None:
            order = jnp.lexsort((samples, rows))
            rows, samples, gains = (field[order] for field in (rows, samples, gains))
        offsets, order = rows_by_bag(samples, own.num_samples)
        found.append((rows[order], offsets, gains[order]))
    return found


Rows = Int[Array, "devices _"] | None
"""Which rows go into the places of an array's blocks; None where it is blocks already."""


def pack_blocks(arrays: Sequence[Array], rows: Sequence[Rows]) -> Shaped[Array, "devices places *row"]:
    """Blocks of several arrays beside each other, to travel in one exchange.

    Args:
      arrays: `[n, ...]`, or blocks `[devices, capacity, ...]`; of one kind: rows of one shape and type, or lanes of 32
        bits, which become uint32.
      rows: for each array those rows that go into the places of its blocks, or for none. A row outside is an empty
        place, with `NO_ROW` in int32 arrays and zeros in others.
    """
    blocks = []
    for array, own in zip(arrays, rows, strict=True):
        block = array if own is None else gather_rows([array], own, NO_ROW)[0]
        blocks.append(jax.lax.bitcast_convert_type(block, word_dtype(block.dtype, is_lane=block.ndim == 2)))
    return jnp.concatenate(blocks, axis=1)


def unpack_blocks(packed: Shaped[Array, "devices places *row"], shapes: Sequence[PyTree]) -> tuple[Array, ...]:
    """The blocks of each array again, given their shapes and types."""
    ends = list(itertools.accumulate(shape.shape[1] for shape in shapes))
    parts = jnp.split(packed, ends[:-1], axis=1)
    return tuple(jax.lax.bitcast_convert_type(part, shape.dtype) for part, shape in zip(parts, shapes, strict=True))


class Queue(NamedTuple):
    """Entries that wait to travel, grouped by owner and ascending in each group.

    Attributes:
      offsets: entries `offsets[d] : offsets[d + 1]` belong to device `d`.
      cursor: how many of each owner's have travelled.
      lanes: what tells entries of one owner apart, int32 or uint32, most significant first.
      capacity: places for each owner in a round.
    """

    offsets: Int[Array, " devices_plus_1"]
    cursor: Int[Array, " devices"]
    lanes: tuple[Shaped[Array, " nnz"], ...]
    capacity: int

    def ordered_lanes(self, entries: Int[Array, "*places"]) -> list[UInt32[Array, "*places"]]:
        """Lanes of entries as unsigned words of the same order."""
        lanes = gather_rows(self.lanes, entries)
        return [lane if lane.dtype == jnp.uint32 else lane.astype(jnp.uint32) ^ jnp.uint32(2**31) for lane in lanes]


def block_ends(
    queues: Sequence[Queue],
) -> tuple[Int[Array, "queues devices"], UInt32[Array, "levels queues devices"]]:
    """For each owner in each queue: 1 if all entries that are left have places in this round, 0 if not.

    Where they have not, what tells the first one without a place from others, as words of the same order: one per lane
    of the queue that has most, of others the last again. Zeros where all fit.
    """
    fit, behind = [], []
    for queue in queues:
        ends = queue.offsets[:-1] + queue.cursor + queue.capacity
        own = (ends >= queue.offsets[1:]).astype(jnp.int32)
        fit.append(own)
        behind.append([jnp.where(own == 1, jnp.uint32(0), lane) for lane in queue.ordered_lanes(ends)])
    num_levels = max(map(len, behind))
    words = [jnp.stack([lanes[min(level, len(lanes) - 1)] for lanes in behind]) for level in range(num_levels)]
    return jnp.stack(fit), jnp.stack(words)


def round_places(
    queues: Sequence[Queue], fit: Int[Array, "queues devices"], cuts: UInt32[Array, "levels queues devices"]
) -> tuple[Sequence[Int[Array, "devices _"]], Sequence[Int[Array, " devices"]], Bool[Array, ""]]:
    """Entries that every queue sends to every owner in a round.

    Args:
      queues: of one device.
      fit: 1 where no device has more entries for an owner than places, 0 where some has.
      cuts: and then the least entry without a place, in the words of `block_ends`; only those before it travel.

    Returns: of each queue the entries in the places, `NO_ROW` in empty ones, and the cursor behind them; and whether
      any queue has entries left.
    """
    places, cursors, are_left = [], [], []
    for number, queue in enumerate(queues):
        ahead = queue.cursor[:, None] + jnp.arange(queue.capacity, dtype=jnp.int32)[None, :]
        entries, lengths = queue.offsets[:-1, None] + ahead, jnp.diff(queue.offsets)
        is_below, is_equal = jnp.zeros(entries.shape, bool), jnp.ones(entries.shape, bool)
        for word, cut in zip(queue.ordered_lanes(entries), cuts, strict=False):
            is_below |= is_equal & (word < cut[number][:, None])
            is_equal &= word == cut[number][:, None]
        is_sent = (ahead < lengths[:, None]) & (is_below | (fit[number][:, None] == 1))
        places.append(jnp.where(is_sent, entries, NO_ROW))
        cursors.append(queue.cursor + jnp.sum(is_sent, axis=1, dtype=jnp.int32))
        are_left.append(jnp.any(cursors[-1] < lengths))
    return places, cursors, jnp.any(jnp.stack(are_left))


def word_dtype(dtype: np.dtype[Any], is_lane: bool) -> np.dtype[Any]:
    """Dtype in which an array travels: all lanes of 32 bits as uint32."""
    return jnp.dtype(jnp.uint32) if is_lane and dtype.itemsize == 4 else dtype

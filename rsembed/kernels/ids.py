"""Kernels for the ids of a batch, in plain JAX.

The kernels turn ids into row numbers, sort preprocessed batches by sample, and fill the blocks that
devices exchange. Every other implementation of a kernel must return the same results as the plain
JAX function.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from rsembed.bags import PAD_ID
from rsembed.kernels.contract import (
    NO_ROW,
    Call,
    as_rows,
    int32_range,
    is_between,
)
from rsembed.kernels.reference import by_bag, gather_rows
from rsembed.places import Place

ALIGNMENT = 8
"""Each partition of a preprocessed buffer begins at a multiple of `ALIGNMENT`.

A block of row pointers has at least `ALIGNMENT` entries.
"""


IdCounts = tuple[tuple[Int[Array, ""], Int[Array, ""]], ...]
"""For each feature, the number of ids inside its table and the number of ids outside."""


def rows_of_ids(
    call: Call,
    table_places: Sequence[Place],
    sizes: Sequence[int],
    spread: int,
    rows_per_shard: int,
) -> tuple[Int[Array, " _"], ...]:
    """Row of every id of a call, one array per list.

    Rows are numbered consecutively over all shards. An id gets `NO_ROW` if it is outside its table,
    or if no segment reads the bag of the id.

    Args:
      call: lists of ids, and the bags that each feature reads.
      table_places: `rsembed.places.Place` of each segment's table.
      sizes: vocabulary size of each segment's table. Valid ids are `0` to `size - 1`.
      spread: number of shards over which a table is spread.
      rows_per_shard: number of rows in every shard.
    """
    rows = []
    for number, ids in enumerate(call.lists):
        segments = []
        segment_places = []
        segment_sizes = []
        for segment, place, size in zip(call.segments, table_places, sizes, strict=True):
            if segment.list == number:
                segments.append(segment)
                segment_places.append(place)
                segment_sizes.append(size)
        fields = []
        for values in zip(*segment_places, strict=True):
            fields.append(by_bag(ids, segments, list(values), 0))
        num_ids = by_bag(ids, segments, segment_sizes, 0)
        entries = as_rows(ids.ids)
        is_valid = is_between(entries, 0, num_ids)
        place = Place(*fields)
        valid_ids = jnp.where(is_valid, entries, 0)
        list_rows = place.rows(valid_ids, spread=spread, rows_per_shard=rows_per_shard)
        rows.append(jnp.where(is_valid, list_rows, NO_ROW))
    return tuple(rows)


def count_ids(
    ids: Sequence[Int[Array, " _"]],
    offsets: Sequence[Int[Array, " _"]],
    sizes: Sequence[int],
) -> IdCounts:
    """For each feature, the number of ids inside its table and the number of ids outside.

    Padding ids, and entries before the first offset or after the last, are not counted.
    """
    counts = []
    for feature_ids, ends, size in zip(ids, offsets, sizes, strict=True):
        position = int32_range(feature_ids.shape[0])
        is_used = (position >= ends[0]) & (position < ends[-1])
        is_inside = is_between(feature_ids, 0, size)
        is_id = feature_ids != PAD_ID
        is_outside = ~is_inside & is_id
        num_inside = jnp.sum(is_used & is_inside, dtype=jnp.int32)
        num_outside = jnp.sum(is_used & is_outside, dtype=jnp.int32)
        counts.append((num_inside, num_outside))
    return tuple(counts)


class Partitions(NamedTuple):
    """Preprocessed entries that one device looks up in a stack of tables.

    The entries are sorted by SparseCore, by minibatch if there are minibatches, by shard and by
    row, in this order. The entries with the same SparseCore, minibatch and shard form a partition.

    Without minibatches, each core has one block of row pointers, relative to the first entry of the
    core's buffer. With minibatches, each minibatch of each core has one block of row pointers,
    relative to the first entry of the device's buffer. The blocks of row pointers are sorted by
    core, then by minibatch.

    Attributes:
      row_pointers: position after the last entry of every partition. A block of row pointers has
        one position for each shard, and then padding if there are fewer than `ALIGNMENT` shards.
      embedding_ids: row number of every entry within its shard.
      sample_ids: sample number of every entry within its SparseCore.
      gains: factor by which the row of every entry is multiplied before the rows of a sample are
        summed.
      num_minibatches: number of minibatches that each SparseCore uses. Blocks of row pointers after
        the last minibatch of the last core are unused. None without minibatches.
      num_cores: number of SparseCores of the device.
      num_shards: number of shards of the stack.
      rows_per_shard: number of rows of the stack in each shard.
      samples_per_core: number of samples of the stack on each SparseCore.
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
        """Number of samples on the device."""
        return self.num_cores * self.samples_per_core


SampleEntries = tuple[Int[Array, " places"], Int[Array, " samples_plus_1"], Float[Array, " places"]]
"""Rows sorted by sample, offsets of the samples, and gains. Padding has row `NO_ROW` and gain 0."""


def entries_by_sample(stacks: Sequence[Partitions]) -> list[SampleEntries]:
    """Entries that one device looks up in each stack of tables, sorted by sample.

    Buffer positions outside all partitions hold no entries. Row pointers define the partitions. The
    entries of a sample are in the order of their rows.
    """
    return [_stack_entries_by_sample(stack) for stack in stacks]


def _stack_entries_by_sample(stack: Partitions) -> SampleEntries:
    partition, is_in_partition = _partition_of_position(stack)
    partitions_per_core: Any = stack.num_shards
    if stack.num_minibatches is not None:
        partitions_per_core = stack.num_shards * stack.num_minibatches
    cores = partition // partitions_per_core
    shards = partition % stack.num_shards
    stack_rows = shards * stack.rows_per_shard + stack.embedding_ids
    device_samples = cores * stack.samples_per_core + stack.sample_ids
    is_entry = is_in_partition & is_between(device_samples, 0, stack.num_samples)
    rows = jnp.where(is_entry, stack_rows, NO_ROW)
    samples = jnp.where(is_entry, device_samples, NO_ROW)
    gains = jnp.where(is_entry, stack.gains, 0.0)
    sort_keys = [samples]
    if stack.num_minibatches is not None:
        # Each minibatch has only some of a sample's rows, so the buffer does not order these rows.
        sort_keys = [rows, samples]
    order = jnp.lexsort(sort_keys)
    all_samples = int32_range(stack.num_samples + 1)
    offsets = jnp.searchsorted(samples[order], all_samples)
    return rows[order], offsets.astype(jnp.int32), gains[order]


def _partition_of_position(
    stack: Partitions,
) -> tuple[Int[Array, " places"], Bool[Array, " places"]]:
    """Index of the partition of every buffer position, and whether the position is in a partition.

    A position between two partitions gets the index of the first of them.
    """
    num_places = stack.embedding_ids.shape[0]
    num_parts = stack.num_cores if stack.num_minibatches is None else 1
    part_size = num_places // num_parts
    block_size = max(stack.num_shards, ALIGNMENT)
    blocks = stack.row_pointers.reshape(num_parts, -1, block_size)
    ends = blocks[:, :, : stack.num_shards]
    ends = ends.reshape(num_parts, -1)
    aligned_ends = -(-ends[:, :-1] // ALIGNMENT) * ALIGNMENT
    first_is_zero = ((0, 0), (1, 0))
    starts = jnp.pad(aligned_ends, first_is_zero)
    first_of_part = int32_range(num_parts)[:, None] * part_size
    starts = first_of_part + jnp.minimum(starts, part_size)
    starts = starts.reshape(-1)
    ends = first_of_part + ends
    ends = ends.reshape(-1)
    if stack.num_minibatches is not None:
        num_used = stack.num_cores * stack.num_minibatches * stack.num_shards
        is_used = int32_range(ends.size) < num_used
        starts = jnp.where(is_used, starts, num_places)
    # The partition of a position is the number of partitions that start at or before the position,
    # minus 1. If several partitions start at the same position, only the last of them can have
    # entries. The count includes every partition that starts at a position, so the result is the
    # last partition that starts there.
    num_starts = jnp.zeros(num_places, jnp.int32)
    num_starts = num_starts.at[starts].add(1, mode="drop")
    partition = jnp.cumsum(num_starts) - 1
    is_in_partition = int32_range(num_places) < ends[partition]
    return partition, is_in_partition


Rows = Int[Array, "devices _"] | None
"""Row to copy to each slot of a block, or None if the array already consists of blocks."""


def pack_blocks(
    arrays: Sequence[Array],
    rows: Sequence[Rows],
) -> Shaped[Array, "devices places *row"]:
    """One array with the blocks of several arrays side by side, to send in one exchange.

    Args:
      arrays: arrays `[n, ...]` with the rows to gather, or blocks `[devices, capacity, ...]`.
        Either all arrays hold rows with equal shapes and dtypes, or all are lanes (arrays of 32-bit
        words), which become uint32.
      rows: for each array, the row numbers to gather into its blocks. Every item of `rows` is None
        if the items of `arrays` are already blocks. A row number outside the array is padding, for
        which the block gets `NO_ROW` if the array is int32, else zeros.
    """
    blocks = []
    for array, block_rows in zip(arrays, rows, strict=True):
        block = array
        if block_rows is not None:
            (block,) = gather_rows([array], block_rows, NO_ROW)
        dtype = word_dtype(block.dtype, is_lane=block.ndim == 2)
        blocks.append(jax.lax.bitcast_convert_type(block, dtype))
    return jnp.concatenate(blocks, axis=1)


def unpack_blocks(
    packed: Shaped[Array, "devices places *row"],
    shapes: Sequence[jax.ShapeDtypeStruct],
) -> tuple[Array, ...]:
    """Splits the result of `pack_blocks` into the blocks of each array.

    Args:
      packed: result of `pack_blocks`, before or after devices have exchanged their blocks.
      shapes: objects with the shape and dtype of each array's blocks.
    """
    capacities = [shape.shape[1] for shape in shapes]
    ends = list(itertools.accumulate(capacities))
    parts = jnp.split(packed, ends[:-1], axis=1)
    blocks = []
    for part, shape in zip(parts, shapes, strict=True):
        block = jax.lax.bitcast_convert_type(part, shape.dtype)
        blocks.append(block)
    return tuple(blocks)


class Queue(NamedTuple):
    """Entries that a device sends to their owners, grouped by owner and ascending in each group.

    Attributes:
      offsets: device `d` owns the entries `offsets[d] : offsets[d + 1]`.
      cursor: number of entries already sent to each owner.
      lanes: int32 or uint32 arrays with one word per entry, most significant word first. The words
        of an entry identify the entry among all entries of its owner.
      capacity: maximum number of entries sent to one owner in an exchange round.
    """

    offsets: Int[Array, " devices_plus_1"]
    cursor: Int[Array, " devices"]
    lanes: tuple[Shaped[Array, " nnz"], ...]
    capacity: int

    def ordered_lanes(
        self,
        entries: Int[Array, "*places"],
    ) -> list[UInt32[Array, "*places"]]:
        """Lanes of `entries` as uint32.

        In int32 lanes, the sign bit is flipped, so that negative numbers stay smaller than positive
        numbers.
        """
        words = []
        for lane in gather_rows(self.lanes, entries):
            if lane.dtype != jnp.uint32:
                lane = lane.astype(jnp.uint32) ^ jnp.uint32(2**31)
            words.append(lane)
        return words


Fit = Int[Array, "queues devices"]
"""1 if all remaining entries of a queue for an owner fit in this exchange round, else 0."""

Cuts = UInt32[Array, "levels queues devices"]
"""For each queue and owner, lanes of the first entry that does not fit in this exchange round."""


def block_ends(queues: Sequence[Queue]) -> tuple[Fit, Cuts]:
    """Whether all remaining entries for each owner fit in this exchange round.

    Returns: arrays `fit` and `cuts`. `fit[q, d]` is 1 if all remaining entries of queue `q` for
      device `d` fit in this round, else 0. `cuts[:, q, d]` has the lanes of the first entry that
      does not fit, from `Queue.ordered_lanes`, or zeros if all entries fit. The last lane of a
      queue is repeated if another queue has more lanes.
    """
    fit = []
    first_left = []
    num_levels = 0
    for queue in queues:
        ends = queue.offsets[:-1] + queue.cursor + queue.capacity
        fits = (ends >= queue.offsets[1:]).astype(jnp.int32)
        fit.append(fits)
        lanes = []
        for lane in queue.ordered_lanes(ends):
            lanes.append(jnp.where(fits == 1, jnp.uint32(0), lane))
        first_left.append(lanes)
        num_levels = max(num_levels, len(lanes))
    words = []
    for level in range(num_levels):
        level_lanes = []
        for lanes in first_left:
            last_lane = len(lanes) - 1
            level_lanes.append(lanes[min(level, last_lane)])
        words.append(jnp.stack(level_lanes))
    return jnp.stack(fit), jnp.stack(words)


RoundEntries = tuple[
    Sequence[Int[Array, "devices _"]],
    Sequence[Int[Array, " devices"]],
    Bool[Array, ""],
]
"""Entries that each queue sends, its new cursor, and whether any queue has entries left."""


def round_places(
    queues: Sequence[Queue],
    fit: Fit,
    cuts: Cuts,
) -> RoundEntries:
    """Entries that each queue sends to each owner in this exchange round.

    Args:
      queues: queues of this device.
      fit: minimum over all devices of the `fit` that `block_ends` returns. The minimum is 1 for a
        queue and owner if the remaining entries of all devices fit in this round, else 0.
      cuts: for each queue and owner with `fit` 0, the minimum of the `cuts` that `block_ends`
        returns, over the devices with remaining entries that do not fit. Only entries with smaller
        lanes than `cuts` are sent to an owner with `fit` 0.

    Returns: `(entries, cursors, any_left)`. For each queue, `entries` has the entries to send, with
      `NO_ROW` in unused slots, and `cursors` has the cursor after this round. `any_left` is True if
      any queue has entries left.
    """
    sent = []
    cursors = []
    are_left = []
    for number, queue in enumerate(queues):
        slots = int32_range(queue.capacity)
        ranks = queue.cursor[:, None] + slots[None, :]
        entries = queue.offsets[:-1, None] + ranks
        lengths = jnp.diff(queue.offsets)
        is_below = jnp.zeros(entries.shape, bool)
        is_equal = jnp.ones(entries.shape, bool)
        for word, cut in zip(queue.ordered_lanes(entries), cuts, strict=False):
            queue_cut = cut[number][:, None]
            is_below |= is_equal & (word < queue_cut)
            is_equal &= word == queue_cut
        is_entry = ranks < lengths[:, None]
        all_fit = fit[number][:, None] == 1
        is_sent = is_entry & (is_below | all_fit)
        num_sent = jnp.sum(is_sent, axis=1, dtype=jnp.int32)
        cursor = queue.cursor + num_sent
        sent.append(jnp.where(is_sent, entries, NO_ROW))
        cursors.append(cursor)
        are_left.append(jnp.any(cursor < lengths))
    any_left = jnp.any(jnp.stack(are_left))
    return sent, cursors, any_left


def word_dtype(
    dtype: np.dtype[Any],
    is_lane: bool,
) -> np.dtype[Any]:
    """Dtype in which an array is sent: uint32 for 32-bit lanes, else the dtype of the array."""
    if is_lane and dtype.itemsize == 4:
        return jnp.dtype(jnp.uint32)
    return dtype

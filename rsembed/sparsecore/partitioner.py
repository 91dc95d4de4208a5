"""The host partitioner: from ids to the buffers of every core, with one sort per stack.

Layout, per device: each of its `C` cores has a part of the buffer. In it, the entries that go to shard 0 come first,
then those of shard 1, and so on; every partition starts at a multiple of 8, and its end is a row pointer. Entries are
ordered by row and sample; entries of one sample with equal rows are merged.

Source: the published behaviour of the JAX SparseCore API.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rsembed.fdo.statistics import SparseDenseMatmulInputStats
from rsembed.sparsecore.host_features import HostFeature
from rsembed.sparsecore.layout import MAX_SAMPLES_PER_DEVICE, StackLayout
from rsembed.sparsecore.variables import PADDING_VALUE
from rsembed.stacking import SUBLANES

_log = logging.getLogger("rsembed")


class StackBuffers(NamedTuple):
    """The flat buffers of one stack in this process."""

    row_pointers: np.ndarray
    embedding_ids: np.ndarray
    sample_ids: np.ndarray
    gains: np.ndarray


class _Entries(NamedTuple):
    """Merged entries of all cores, ordered by (partition, row, sample); a partition is `core * S + shard`."""

    partition: np.ndarray
    row: np.ndarray
    sample: np.ndarray
    gain: np.ndarray
    multiplicity: np.ndarray


def partition_stack(
    layout: StackLayout,
    features: Sequence[HostFeature],
    *,
    local_device_count: int,
    allow_id_dropping: bool,
    statistics: SparseDenseMatmulInputStats,
) -> StackBuffers:
    """Buffers of one stack; what was observed goes into `statistics`.

    Args:
      layout: the stack.
      features: the features that read it.
      local_device_count: devices of this process.
      allow_id_dropping: drop and count entries above a limit; otherwise they are an error.
      statistics: receives this stack's counts.

    Raises:
      ValueError: a limit is exceeded, the buffer is too small, or there are too many samples.
    """
    num_cores, num_shards = local_device_count * layout.num_cores, layout.num_shards
    if layout.samples_per_core * layout.num_cores > MAX_SAMPLES_PER_DEVICE:
        raise ValueError(
            f"stack {layout.name!r} has {layout.samples_per_core * layout.num_cores} samples per device, above the "
            f"limit of {MAX_SAMPLES_PER_DEVICE}; stack fewer features, or use more devices."
        )
    entries = _merge(*_sorted_entries(layout, features, num_cores), layout)
    num_partitions = num_cores * num_shards
    is_new_row = np.ones(entries.row.shape, bool)
    is_new_row[1:] = (np.diff(entries.row) != 0) | (np.diff(entries.partition) != 0)
    num_ids = np.bincount(entries.partition, minlength=num_partitions)
    num_unique = np.bincount(entries.partition[is_new_row], minlength=num_partitions)
    _record(statistics, layout, local_device_count, num_ids, num_unique)
    kept, num_dropped = entries, 0
    exceeded = _exceeded_limits(layout, num_ids, num_unique)
    if exceeded and not allow_id_dropping:
        raise ValueError(exceeded)
    if exceeded:
        keep = _within_limits(layout, entries, is_new_row, num_ids, num_unique)
        num_dropped = int(entries.multiplicity[~keep].sum())
        kept = _Entries(*(array[keep] for array in entries))
    buffers, num_lost = _fill(layout, kept, num_cores, local_device_count)
    if num_lost and not allow_id_dropping:
        needed = int(statistics.required_buffer_size_per_sc[layout.name].max()) * layout.num_cores
        raise ValueError(
            f"stack {layout.name!r}: {num_lost} entries do not fit the buffer of {layout.buffer_size_per_device} "
            f"places per device, {needed} are needed; raise suggested_coo_buffer_size_per_device to {needed} (or leave "
            "it None), or pass allow_id_dropping=True to drop and count them."
        )
    statistics.id_drop_counters[layout.name] = num_dropped + num_lost
    if num_dropped + num_lost:
        _warn_once(layout.name)
    return buffers


def _sorted_entries(
    layout: StackLayout, features: Sequence[HostFeature], num_cores: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Partitions, and `(row, sample)` packed into one number, and gains of all raw entries, sorted."""
    num_shards = layout.num_shards
    partitions, keys, gains = [], [], []
    for feature in features:
        placement = feature.spec.id_transformation
        samples_here = (feature.spec.num_samples or 0) // num_shards
        core, sample = np.divmod(feature.samples, samples_here)
        quotient, remainder = np.divmod(feature.ids, num_shards)
        shard = (remainder + placement.col_shift) % num_shards
        row = quotient + placement.col_offset // num_shards
        partitions.append(core * num_shards + shard)
        keys.append(row * layout.samples_per_core + (sample + placement.row_offset // num_shards))
        gains.append(feature.gains)
    partition, key, gain = (np.concatenate(arrays) for arrays in (partitions, keys, gains))
    num_keys = layout.rows_per_shard * layout.samples_per_core
    if num_cores * num_shards * num_keys < 2**63:
        packed = partition * num_keys + key
        # Equal keys must keep their order for sums of weights to be reproducible; numpy's fastest sort does not.
        order = np.argsort(packed, kind="stable")
        partition, key = np.divmod(packed[order], num_keys)
    else:
        order = np.lexsort((key, partition))
        partition, key = partition[order], key[order]
    return partition, key, gain[order]


def _merge(partition: np.ndarray, key: np.ndarray, gain: np.ndarray, layout: StackLayout) -> _Entries:
    """Adds the gains of equal (partition, row, sample)."""
    is_first = np.ones(key.shape, bool)
    is_first[1:] = (np.diff(key) != 0) | (np.diff(partition) != 0)
    starts = np.flatnonzero(is_first)
    merged = np.add.reduceat(gain, starts) if starts.size else gain
    multiplicity = np.diff(np.append(starts, key.size))
    row, sample = np.divmod(key[starts], layout.samples_per_core)
    return _Entries(partition[starts], row, sample, merged, multiplicity)


def _record(
    statistics: SparseDenseMatmulInputStats,
    layout: StackLayout,
    local_device_count: int,
    num_ids: np.ndarray,
    num_unique: np.ndarray,
) -> None:
    shape = (local_device_count, layout.num_cores, layout.num_shards)

    def most_of_any_core(counts: np.ndarray) -> np.ndarray:
        return counts.reshape(shape).max(axis=1).reshape(-1).astype(np.int32)

    statistics.max_ids_per_partition[layout.name] = most_of_any_core(num_ids)
    statistics.max_unique_ids_per_partition[layout.name] = most_of_any_core(num_unique)
    places = _round_up(num_ids).reshape(-1, layout.num_shards).sum(axis=1)
    statistics.required_buffer_size_per_sc[layout.name] = places.astype(np.int32)


def _exceeded_limits(layout: StackLayout, num_ids: np.ndarray, num_unique: np.ndarray) -> str:
    """What to tell about the limits that were exceeded; empty if none was."""
    parts, tables = [], sorted({feature.table_spec.name for feature in layout.features})
    for limit, counts in (("max_ids_per_partition", num_ids), ("max_unique_ids_per_partition", num_unique)):
        allowed = getattr(layout.spec, limit)
        if counts.max() > allowed:
            core, shard = divmod(int(counts.argmax()), layout.num_shards)
            parts.append(f"{limit}={allowed}, but core {core} has {counts.max()} for shard {shard}")
    if not parts:
        return ""
    return (
        f"stack {layout.name!r} (tables {', '.join(tables)}): {'; '.join(parts)}. Raise the limit to at least the "
        "observed number, spread ids over more shards (num_sc_per_device), or pass allow_id_dropping=True to drop and "
        "count them."
    )


def _within_limits(
    layout: StackLayout, entries: _Entries, is_new_row: np.ndarray, num_ids: np.ndarray, num_unique: np.ndarray
) -> np.ndarray:
    """Entries that survive: the first `max_ids` of their partition, among its first `max_unique` rows."""
    rank = np.arange(entries.row.size) - _starts(num_ids)[entries.partition]
    row_rank = np.cumsum(is_new_row) - 1 - _starts(num_unique)[entries.partition]
    return (rank < layout.spec.max_ids_per_partition) & (row_rank < layout.spec.max_unique_ids_per_partition)


def _fill(layout: StackLayout, entries: _Entries, num_cores: int, local_device_count: int) -> tuple[StackBuffers, int]:
    """The buffers, and how many merged entries found no place in their core's part."""
    num_shards = layout.num_shards
    places_per_core = layout.buffer_size_per_device // layout.num_cores
    counts = np.bincount(entries.partition, minlength=num_cores * num_shards)
    tiles = _round_up(counts).reshape(num_cores, num_shards)
    starts = np.cumsum(tiles, axis=1) - tiles
    ends = np.minimum(starts + counts.reshape(num_cores, num_shards), places_per_core)
    pointers = np.empty((num_cores, max(num_shards, SUBLANES)), np.int32)
    pointers[:, :num_shards] = ends
    pointers[:, num_shards:] = np.minimum(_round_up(ends[:, -1:]), places_per_core)

    rank = np.arange(entries.row.size) - _starts(counts)[entries.partition]
    place_in_core = starts.reshape(-1)[entries.partition] + rank
    fits = place_in_core < places_per_core
    place = (entries.partition // num_shards * places_per_core + place_in_core)[fits]
    size = layout.buffer_size_per_device * local_device_count
    embedding_ids = np.full(size, PADDING_VALUE, np.int32)
    sample_ids = np.full(size, PADDING_VALUE, np.int32)
    gains = np.full(size, np.nan, np.float32)
    embedding_ids[place], sample_ids[place], gains[place] = entries.row[fits], entries.sample[fits], entries.gain[fits]
    return StackBuffers(pointers.reshape(-1), embedding_ids, sample_ids, gains), int(np.count_nonzero(~fits))


def _round_up(counts: np.ndarray) -> np.ndarray:
    return -(-counts // SUBLANES) * SUBLANES


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.cumsum(counts) - counts


@functools.cache
def _warn_once(stack_name: str) -> None:
    _log.warning(
        "stack %r: ids were dropped; id_drop_counters of the statistics counts them. This is said once per stack.",
        stack_name,
    )

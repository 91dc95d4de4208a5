"""The host partitioner: from ids to the buffers of every core, with one sort per stack.

Layout, per device: each of its `C` cores has a part of the buffer. In it, the entries that go to shard 0 come first,
then those of shard 1, and so on; every partition starts at a multiple of 8, and its end is a row pointer. Entries are
ordered by row and sample; entries of one sample with equal rows are merged.

Where a batch is too large, it is laid out in several minibatches. The rows of all stacks fall into 64 buckets, by a
hash. Neighbouring buckets form a minibatch as long as every partition of every core keeps its limits; all stacks,
devices and processes cut at the same places. A row lies in one bucket, so it is in one minibatch and is stepped once,
as without minibatches.

```
buckets      2 5 | 1 6 | 3 4 | 2 0      limit 7: no two neighbouring pairs fit together
minibatches   1     2     3     4
```

Source: the published behaviour of the JAX SparseCore API. Its hash is another one (HighwayHash); only which rows share
a minibatch depends on it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int, Int64

from rsembed.bags import Bags
from rsembed.fdo.statistics import SparseDenseMatmulInputStats, TableDrops
from rsembed.places import Place
from rsembed.sparsecore.layout import MAX_MINIBATCHES, MAX_SAMPLES_PER_DEVICE, StackLayout
from rsembed.specs import FeatureSpec
from rsembed.stacking import SUBLANES, round_up

PADDING_VALUE = 2**31 - 1
"""Id and sample of places in a buffer that hold no entry."""
_log = logging.getLogger("rsembed")

SETTINGS = {
    "ids": "max_ids_per_partition",
    "unique_ids": "max_unique_ids_per_partition",
    "buffer": "suggested_coo_buffer_size_per_device",
}
"""The setting that causes each kind of drop, by the field of `TableDrops`."""
_told: set[tuple[str, str, str]] = set()
"""Tables, stacks and kinds of drop that a warning has named."""
BUFFER_DTYPES = {"row_pointers": "int32", "embedding_ids": "int32", "sample_ids": "int32", "gains": "float32"}
StackBuffers = dict[str, np.ndarray]
"""The flat buffers of one stack in this process, by the names in `BUFFER_DTYPES`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostFeature:
    """The ids of one feature in this process.

    Attributes:
      spec: the feature.
      bags: arrays of numpy, with a bag for every sample of this process' batch. Ids are rows of the logical table, not
        yet compared with the vocabulary; weights are not yet known to be finite.
    """

    spec: FeatureSpec
    bags: Bags

    @functools.cached_property
    def samples(self) -> Int64[np.ndarray, " nnz"]:
        """Sample of this process' batch, per entry."""
        return np.repeat(np.arange(self.bags.num_bags, dtype=np.int64), np.diff(self.bags.offsets))

    @functools.cached_property
    def gains(self) -> Float32[np.ndarray, " nnz"]:
        """The entry's factor in its sample, before equal entries are added; zeros in a sample whose weights cancel."""
        combiner, num_samples, weights = self.spec.table_spec.combiner, self.bags.num_bags, self.bags.weights
        values = np.ones(self.samples.shape, np.float32) if weights is None else np.asarray(weights)
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
        where, table = f"feature {self.spec.name!r}", self.spec.table_spec
        ids, weights = self.bags.ids, self.bags.weights
        if weights is not None and not np.isfinite(weights).all():
            entry = int(np.flatnonzero(~np.isfinite(weights))[0])
            raise ValueError(f"{where}: weight {weights[entry]} in sample {self.samples[entry]} is not finite.")
        if ids.size and (ids.min() < 0 or ids.max() >= table.vocabulary_size):
            worst = int(np.argmin(ids) if ids.min() < 0 else np.argmax(ids))
            raise ValueError(
                f"{where}: id {ids[worst]} in sample {self.samples[worst]} is outside table {table.name!r} with "
                f"vocabulary_size={table.vocabulary_size}; enlarge the table, hash the ids first, or leave out -1."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Entries:
    """Merged entries of all cores, in the order of the buffers: by partition, row and sample.

    A partition is `block * S + shard`. Without minibatching a core has one block, so that a block is a core.
    """

    partition: np.ndarray
    row: np.ndarray
    sample: np.ndarray
    gain: np.ndarray
    multiplicity: np.ndarray
    num_partitions: int

    @functools.cached_property
    def is_new_row(self) -> np.ndarray:
        """Mask of the entries that are the first of their row in their partition."""
        return _differs_from_the_last(self.partition, self.row)

    @functools.cached_property
    def num_ids(self) -> np.ndarray:
        """Number of entries of every partition."""
        return np.bincount(self.partition, minlength=self.num_partitions)

    @functools.cached_property
    def num_unique(self) -> np.ndarray:
        """Number of distinct rows of every partition."""
        return np.bincount(self.partition[self.is_new_row], minlength=self.num_partitions)

    @property
    def rank(self) -> np.ndarray:
        """Position of every entry in its partition."""
        return np.arange(self.row.size) - _starts(self.num_ids)[self.partition]

    @property
    def row_rank(self) -> np.ndarray:
        """Position of every entry's row among the distinct rows of its partition."""
        return np.cumsum(self.is_new_row) - 1 - _starts(self.num_unique)[self.partition]

    def take(self, places: np.ndarray) -> Entries:
        """Some entries, or all in another order."""
        names = ("partition", "row", "sample", "gain", "multiplicity")
        return dataclasses.replace(self, **{name: getattr(self, name)[places] for name in names})


class HostBatch(NamedTuple):
    """A batch of ids before partitioning, with the layouts of its stacks and the statistics to fill.

    Attributes:
      layouts: the stacks, by name.
      readers: the features that read them, likewise, in the order of their samples.
      local_device_count: devices of this process.
      allow_id_dropping: drop and count entries above a limit or behind the buffer; otherwise they are an error.
      statistics: receives the counts.
    """

    layouts: Mapping[str, StackLayout]
    readers: Mapping[str, Sequence[HostFeature]]
    local_device_count: int
    allow_id_dropping: bool
    statistics: SparseDenseMatmulInputStats

    def merged_entries(self, name: str) -> Entries:
        """Entries that the cores of this process look up, equal rows of one sample merged.

        Raises: ValueError: an id is outside its table, a weight is not finite, or a device has too many samples.
        """
        layout = self.layouts[name]
        if layout.samples_per_core * layout.num_cores > MAX_SAMPLES_PER_DEVICE:
            raise ValueError(
                f"stack {layout.name!r} has {layout.samples_per_core * layout.num_cores} samples per device, above the "
                f"limit of {MAX_SAMPLES_PER_DEVICE}; stack fewer features, or use more devices."
            )
        num_shards, partitions, keys, gains = layout.num_shards, [], [], []
        for feature in self.readers[name]:
            feature.check_values()
            ids, placement = feature.bags.ids.astype(np.int64), feature.spec.id_transformation
            place = Place(0, placement.col_offset, placement.col_shift)
            core, sample = np.divmod(feature.samples, (feature.spec.num_samples or 0) // num_shards)
            row = place.rows_in_shard(ids, spread=num_shards)
            partitions.append(core * num_shards + place.shards(ids, spread=num_shards))
            keys.append(row * layout.samples_per_core + (sample + placement.row_offset // num_shards))
            gains.append(feature.gains)
        partition, key, gain = (np.concatenate(arrays) for arrays in (partitions, keys, gains))
        num_partitions = self.local_device_count * layout.num_cores * num_shards
        num_keys = layout.rows_per_shard * layout.samples_per_core
        if num_partitions * num_keys < 2**63:
            packed = partition * num_keys + key
            # Equal keys must keep their order for sums of weights to be reproducible; numpy's fastest sort does not.
            order = np.argsort(packed, kind="stable")
            partition, key = np.divmod(packed[order], num_keys)
        else:
            order = np.lexsort((key, partition))
            partition, key = partition[order], key[order]
        gain = gain[order]
        is_first = _differs_from_the_last(partition, key)
        starts = np.flatnonzero(is_first)
        merged = gain[starts]
        # One after the other in the order of the batch; reduceat would add in an order of its own.
        np.add.at(merged, np.cumsum(is_first)[~is_first] - 1, gain[~is_first])
        multiplicity = np.diff(np.append(starts, key.size))
        row, sample = np.divmod(key[starts], layout.samples_per_core)
        return Entries(partition[starts], row, sample, merged, multiplicity, num_partitions)


def partition_stack(batch: HostBatch, name: str) -> StackBuffers:
    """Buffers of one stack; fills the batch's statistics.

    Raises:
      ValueError: a limit is exceeded, the buffer is too small, or there are too many samples.
    """
    entries = batch.merged_entries(name)
    return lay_out(batch, batch.layouts[name], entries, entries)


def _differs_from_the_last(partition: np.ndarray, key: np.ndarray) -> np.ndarray:
    differs = np.ones(key.shape, bool)
    differs[1:] = (np.diff(key) != 0) | (np.diff(partition) != 0)
    return differs


def lay_out(
    batch: HostBatch, layout: StackLayout, seen: Entries, entries: Entries, num_minibatches: int | None = None
) -> StackBuffers:
    """Buffers of the entries within the limits; others are an error, or dropped and counted.

    Args:
      batch: the batch.
      layout: the stack's.
      seen: the entries as partitions of the whole batch have them, for the statistics.
      entries: those entries in the order of the buffers.
      num_minibatches: blocks that a core's entries are dealt to, in a buffer that all cores of a device share; None
        gives each core a part of its own.

    Raises: ValueError: a limit is exceeded or the buffer is too small, and nothing may be dropped.
    """
    record_counts(batch, layout, seen.num_ids, seen.num_unique, entries.num_ids)
    kept, dropped = entries, {}
    exceeded = exceeded_limits(layout, entries, num_minibatches or 1)
    if exceeded and not batch.allow_id_dropping:
        raise ValueError(exceeded)
    if exceeded:  # those that are dropped keep their number
        has_place = entries.rank < layout.spec.max_ids_per_partition
        has_row = entries.row_rank < layout.spec.max_unique_ids_per_partition
        for limit, is_dropped in (("ids", ~has_place), ("unique_ids", has_place & ~has_row)):
            dropped[limit] = (entries.row[is_dropped], entries.multiplicity[is_dropped])
        kept = entries.take(has_place & has_row)
    buffers, fits = _fill(layout, kept, batch.local_device_count, num_minibatches)
    if not fits.all():
        num_lost = int(np.count_nonzero(~fits))
        if not batch.allow_id_dropping:
            needed = int(batch.statistics.required_buffer_size_per_sc[layout.name].max()) * layout.num_cores
            size = buffers["gains"].size // batch.local_device_count
            raise ValueError(
                f"stack {layout.name!r}: {num_lost} entries do not fit the buffer of {size} places per device, "
                f"{needed} are needed; raise suggested_coo_buffer_size_per_device to {needed} (or leave it None), or "
                "pass allow_id_dropping=True to drop and count them."
            )
        dropped["buffer"] = (kept.row[~fits], np.ones(num_lost, np.int64))
    record_drops(batch.statistics, layout, dropped)
    return buffers


def record_counts(
    batch: HostBatch, layout: StackLayout, num_ids: np.ndarray, num_unique: np.ndarray, num_laid_out: np.ndarray
) -> None:
    """Records the most ids and distinct ids of a partition, and the buffer size that all of them need."""
    shape = (batch.local_device_count, layout.num_cores, layout.num_shards)

    def most_of_any_core(values: np.ndarray) -> np.ndarray:
        return values.reshape(shape).max(axis=1).reshape(-1).astype(np.int32)

    statistics = batch.statistics
    statistics.max_ids_per_partition[layout.name] = most_of_any_core(num_ids)
    statistics.max_unique_ids_per_partition[layout.name] = most_of_any_core(num_unique)
    places = round_up(num_laid_out, SUBLANES).reshape(shape[0] * shape[1], -1).sum(axis=1)
    statistics.required_buffer_size_per_sc[layout.name] = places.astype(np.int32)


def exceeded_limits(layout: StackLayout, entries: Entries, num_blocks_per_core: int = 1) -> str:
    """Message about the limits that were exceeded; empty if none was."""
    parts, tables = [], sorted(table.name for table in layout.tables)
    for limit, values in (
        ("max_ids_per_partition", entries.num_ids),
        ("max_unique_ids_per_partition", entries.num_unique),
    ):
        allowed = getattr(layout.spec, limit)
        if values.max() > allowed:
            block, shard = divmod(int(values.argmax()), layout.num_shards)
            core = block // num_blocks_per_core
            parts.append(f"{limit}={allowed}, but core {core} has {values.max()} for shard {shard}")
    if not parts:
        return ""
    still = f" in one of {num_blocks_per_core} minibatches, which cannot be split" if num_blocks_per_core > 1 else ""
    return (
        f"stack {layout.name!r} (tables {', '.join(tables)}): {'; '.join(parts)}{still}. Raise the limit to at least "
        "the observed number, spread ids over more shards (num_sc_per_device), or pass allow_id_dropping=True to drop "
        "and count them."
    )


def _fill(
    layout: StackLayout, entries: Entries, num_devices: int, num_minibatches: int | None
) -> tuple[StackBuffers, np.ndarray]:
    """Buffers, and a mask of the entries that fit into the part of their core, or of their device."""
    num_shards, size = layout.num_shards, layout.buffer_size_per_device(num_minibatches is not None) * num_devices
    num_regions, num_blocks, num_pointer_blocks = num_devices * layout.num_cores, 1, 1
    if num_minibatches is not None:
        num_regions, num_blocks = num_devices, layout.num_cores * num_minibatches
        num_pointer_blocks = layout.num_cores * MAX_MINIBATCHES
    num_places, shape = size // num_regions, (num_regions, num_blocks * num_shards)
    counts = entries.num_ids.reshape(shape)
    tiles = round_up(counts, SUBLANES)
    starts = np.cumsum(tiles, axis=1) - tiles
    ends = np.minimum(starts + counts, num_places).reshape(-1, num_blocks, num_shards)
    used = np.minimum(round_up(ends[:, :, -1], SUBLANES), num_places)
    pointers = np.empty((num_regions, num_pointer_blocks, max(num_shards, SUBLANES)), np.int32)
    pointers[:] = used[:, -1, None, None]  # pointers of blocks without entries: an empty partition at the end
    pointers[:, :num_blocks, :num_shards] = ends
    pointers[:, :num_blocks, num_shards:] = used[:, :, None]

    place_in_region = starts.reshape(-1)[entries.partition] + entries.rank
    fits = place_in_region < num_places
    place = (entries.partition // shape[1] * num_places + place_in_region)[fits]
    embedding_ids = np.full(size, PADDING_VALUE, np.int32)
    sample_ids = np.full(size, PADDING_VALUE, np.int32)
    gains = np.full(size, np.nan, np.float32)
    embedding_ids[place], sample_ids[place], gains[place] = entries.row[fits], entries.sample[fits], entries.gain[fits]
    buffers = pointers.reshape(-1), embedding_ids, sample_ids, gains
    return dict(zip(BUFFER_DTYPES, buffers, strict=True)), fits


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.cumsum(counts) - counts


def record_drops(
    statistics: SparseDenseMatmulInputStats, layout: StackLayout, dropped: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> None:
    """Records dropped entries by stack and by table, and warns once per table and limit.

    `dropped` has, by kind (`ids`, `unique_ids`, `buffer`), the rows inside their shard that lost entries, and how many.
    """
    first_rows = np.asarray([table.setting_in_stack.row_offset_in_shard for table in layout.tables])
    counts = {
        kind: np.bincount(np.searchsorted(first_rows, rows, side="right") - 1, times, minlength=len(first_rows))
        for kind, (rows, times) in dropped.items()
    }
    statistics.id_drop_counters[layout.name] = int(sum(by_table.sum() for by_table in counts.values()))
    for number, table in enumerate(layout.tables):
        drops = TableDrops(**{kind: int(by_table[number]) for kind, by_table in counts.items()})
        statistics.id_drops_by_table[table.name] = drops
        for kind, count in drops._asdict().items():
            if count and (table.name, layout.name, kind) not in _told:
                _told.add((table.name, layout.name, kind))
                limit = SETTINGS[kind], getattr(layout.spec, SETTINGS[kind])
                _log.warning(
                    "rsembed.sparsecore: table %r in stack %r: %d ids were dropped in one batch by %s=%s; "
                    "id_drops_by_table of the statistics counts them. This is said once per table and limit.",
                    *(table.name, layout.name, count, *limit),
                )


def partition_stacks_in_minibatches(
    batch: HostBatch, any_process: Callable[[int, np.ndarray], np.ndarray]
) -> tuple[dict[str, StackBuffers], int]:
    """Buffers of all stacks, and the number of minibatches in them.

    Statistics are those of the whole batch, so limits that are set from them make minibatches superfluous; only the
    required buffer size is that of the layout with minibatches. What exceeds a limit in a bucket alone, or the buffer,
    is dropped or an error, as in a batch without minibatches.

    Args:
      batch: the stacks and their ids.
      any_process: `(question, flags)` to the flags that any process sets; question 0 is whether a batch is too large,
        1 where to cut it.
    """
    layouts, buckets = batch.layouts, {}
    merged = {name: batch.merged_entries(name) for name in layouts}
    is_needed = np.asarray([any(exceeded_limits(layouts[name], own) for name, own in merged.items())])
    nodes = np.zeros(MAX_MINIBATCHES - 1, bool)
    if any_process(0, is_needed).any():
        for name, layout in layouts.items():
            own = merged[name]
            buckets[name] = bucket_of(own.row * layout.num_shards + own.partition % layout.num_shards)
            nodes |= _nodes_to_split(layout, own, buckets[name])
        nodes = any_process(1, nodes)
    minibatches = minibatch_of_bucket(nodes)
    num_minibatches = int(minibatches[-1]) + 1
    buffers = {}
    for name, layout in layouts.items():
        own = merged[name]
        dealt = own if num_minibatches == 1 else _deal(layout, own, buckets[name], minibatches)
        buffers[name] = lay_out(batch, layout, own, dealt, num_minibatches)
    return buffers, num_minibatches


def bucket_of(columns: Int[np.ndarray, " nnz"]) -> Int[np.ndarray, " nnz"]:
    """The bucket of a row, from its number in the stack.

    Columns of one shard differ by multiples of the shard count, so a weaker mix than this would fill few buckets.

    Source: the finalizer of SplitMix64 (Steele, Lea and Flood 2014), of which the low 6 bits are taken.
    """
    mixed = columns.astype(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(MAX_MINIBATCHES)).astype(np.int64)


def split_nodes(counts: Int[np.ndarray, "*parts buckets"], limit: int) -> Bool[np.ndarray, "*parts nodes"]:
    """Where to cut, for every partition: the nodes of a binary tree over the buckets, from the leaf pairs to the root.

    A node is set if its two halves hold more than the limit together; it is then as full as the fuller half, since
    the cut between them keeps the other one away.

    Example:
      >>> split_nodes(np.asarray([2, 5, 1, 6, 3, 4, 2, 0]), 7).astype(int).tolist()
      [0, 0, 0, 0, 1, 1, 1]
    """
    levels = []
    while counts.shape[-1] > 1:
        left, right = counts[..., ::2], counts[..., 1::2]
        levels.append(left + right > limit)
        counts = np.where(levels[-1], np.maximum(left, right), left + right)
    return np.concatenate(levels, axis=-1)


def minibatch_of_bucket(nodes: Bool[np.ndarray, " nodes"]) -> Int[np.ndarray, " buckets"]:
    """The minibatch of every bucket: a new one begins behind the left half of every node that is set.

    Example:
      >>> minibatch_of_bucket(np.asarray([0, 0, 0, 0, 1, 1, 1], bool)).tolist()
      [0, 0, 1, 1, 2, 2, 3, 3]
    """
    num_buckets, half, first_node = len(nodes) + 1, 1, 0
    is_first = np.zeros(num_buckets, bool)
    while half < num_buckets:
        num_nodes = num_buckets // (2 * half)
        is_first[half :: 2 * half] = nodes[first_node : first_node + num_nodes]
        half, first_node = 2 * half, first_node + num_nodes
    return np.cumsum(is_first)


def _nodes_to_split(layout: StackLayout, entries: Entries, buckets: np.ndarray) -> np.ndarray:
    """The nodes that any partition of the stack sets, for ids or for distinct ids."""
    places = entries.partition * MAX_MINIBATCHES + buckets
    nodes = np.zeros(MAX_MINIBATCHES - 1, bool)
    for limit, chosen in (
        (layout.spec.max_ids_per_partition, places),
        (layout.spec.max_unique_ids_per_partition, places[entries.is_new_row]),
    ):
        by_bucket = np.bincount(chosen, minlength=entries.num_partitions * MAX_MINIBATCHES)
        nodes |= split_nodes(by_bucket.reshape(entries.num_partitions, -1), limit).any(axis=0)
    return nodes


def _deal(layout: StackLayout, entries: Entries, buckets: np.ndarray, minibatches: np.ndarray) -> Entries:
    """The entries ordered by (core, minibatch, shard, bucket, row, sample)."""
    num_minibatches = int(minibatches[-1]) + 1
    core, shard = np.divmod(entries.partition, layout.num_shards)
    partition = (core * num_minibatches + minibatches[buckets]) * layout.num_shards + shard
    order = np.argsort(partition * MAX_MINIBATCHES + buckets, kind="stable")
    num_partitions = entries.num_partitions * num_minibatches
    return dataclasses.replace(entries, partition=partition, num_partitions=num_partitions).take(order)

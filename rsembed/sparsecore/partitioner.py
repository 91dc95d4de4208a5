"""The NumPy partitioner: sorts the ids of a batch into the input buffers of every core.

The buffer of a device has one part per core. The part of a core holds the entries for shard 0, then
the entries for shard 1, and so on. The entries of a core for one shard are a partition. Every
partition starts at a multiple of 8, and a row pointer marks its end. The entries of a partition are
ordered by row and sample. Equal ids of one sample are merged into one entry.

With minibatching, a batch that exceeds a limit is split into several minibatches. A hash assigns
every row to one of 64 buckets. Neighbouring buckets form a minibatch as long as every partition of
every core stays within its limits. All stacks, devices and processes have the same buckets in
each minibatch. A row is in only one bucket and so in only one minibatch. With or without
minibatches, the optimizer updates a row at most once per batch.

```
buckets      2 5 | 1 6 | 3 4 | 2 0      limit 7: no two neighbouring pairs fit together
minibatches   1     2     3     4
```

Source: the documented behaviour of the JAX SparseCore API (jax-tpu-embedding). jax-tpu-embedding
  hashes the rows with HighwayHash instead of SplitMix64.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int, Int64

from rsembed.bags import Bags, check_bags
from rsembed.fdo.statistics import SparseDenseMatmulInputStats, TableDrops
from rsembed.places import Place
from rsembed.sparsecore.layout import MAX_MINIBATCHES, StackLayout
from rsembed.specs import FeatureSpec
from rsembed.stacking import SUBLANES, round_up

PADDING_VALUE = 2**31 - 1
"""Value of `embedding_ids` and `sample_ids` in the padding entries of a buffer."""
_log = logging.getLogger("rsembed")

SETTINGS = {
    "ids": "max_ids_per_partition",
    "unique_ids": "max_unique_ids_per_partition",
    "buffer": "suggested_coo_buffer_size_per_device",
}
"""Name of the limit in the spec of a stack, for each reason to drop ids (field of `TableDrops`)."""
_warned: set[tuple[str, str, str]] = set()
"""Table, stack and kind of drop, for each warning that was already logged."""
BUFFER_DTYPES = {
    "row_pointers": "int32",
    "embedding_ids": "int32",
    "sample_ids": "int32",
    "gains": "float32",
}
StackBuffers = dict[str, np.ndarray]
"""The flat buffers of one stack for this process, by the names in `BUFFER_DTYPES`."""


def samples_of(bags: Bags) -> Int64[np.ndarray, " nnz"]:
    """Index of each entry's sample among the samples of this process."""
    return np.repeat(np.arange(bags.num_bags, dtype=np.int64), np.diff(bags.offsets))


def gains_of(
    bags: Bags, samples: Int64[np.ndarray, " nnz"], combiner: str
) -> Float32[np.ndarray, " nnz"]:
    """Gain (factor of the row) of each entry, before equal ids of one sample are merged.

    The activation of a sample is the sum of `gain * row` over the entries of the sample. The gain
    is 0 if the sum of the sample's weights is 0 (combiner "mean"), or if the sum of their squares
    is 0 (combiner "sqrtn").

    Args:
      bags: ids and weights of one feature, with one bag for every sample of this process.
      samples: result of `samples_of`.
      combiner: "sum", "mean" or "sqrtn".
    """
    weights = bags.weights
    if weights is None:
        weights = np.ones(samples.shape, np.float32)
    values = np.asarray(weights)
    if combiner == "sum":
        return values
    wide = values.astype(np.float64)
    summands = wide if combiner == "mean" else wide * wide
    total = np.bincount(samples, summands, minlength=bags.num_bags)
    # For a feature without ids, `np.bincount` returns int64 instead of float64.
    total = total.astype(np.float64, copy=False)
    divisor = total if combiner == "mean" else np.sqrt(total)
    inverse = np.divide(1.0, divisor, out=np.zeros_like(divisor), where=divisor != 0)
    return (wide * inverse[samples]).astype(np.float32)


def check_entries(feature: FeatureSpec, bags: Bags) -> None:
    """Checks the ids and weights of a feature.

    Raises: ValueError: an id is outside its table, or a weight is not finite.
    """
    check_bags(bags, feature=feature.name)
    table = feature.table_spec
    ids = bags.ids
    if ids.size and (ids.min() < 0 or ids.max() >= table.vocabulary_size):
        worst = int(np.argmin(ids) if ids.min() < 0 else np.argmax(ids))
        raise ValueError(
            f"feature {feature.name!r}: id {ids[worst]} in sample {samples_of(bags)[worst]} is "
            f"outside table {table.name!r} with vocabulary_size={table.vocabulary_size}; enlarge "
            "the table, hash the ids first, or leave out -1."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Entries:
    """Entries of all cores, after equal ids of one sample were merged into one entry.

    Entries are sorted by partition, row and sample, as in the buffers. If the batch is split into
    minibatches, the entries of a partition are ordered by bucket, row and sample. Each core has one
    block of partitions per minibatch. The partition for `shard` in `block` has the index
    `block * num_shards + shard`. `multiplicity` is the number of ids of the batch that were merged
    into an entry.
    """

    partition: np.ndarray
    row: np.ndarray
    sample: np.ndarray
    gain: np.ndarray
    multiplicity: np.ndarray
    num_partitions: int

    @functools.cached_property
    def is_new_row(self) -> np.ndarray:
        """Mask of the entries that are the first entry for their row in their partition."""
        return _differs_from_previous(self.partition, self.row)

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

    def take(self, index: np.ndarray) -> Entries:
        """The entries that a mask or an array of indices selects, as in NumPy indexing."""
        return dataclasses.replace(
            self,
            partition=self.partition[index],
            row=self.row[index],
            sample=self.sample[index],
            gain=self.gain[index],
            multiplicity=self.multiplicity[index],
        )


class HostBatch(NamedTuple):
    """A batch before partitioning: ids, layouts of the stacks, and statistics to fill in.

    Attributes:
      layouts: layouts of the stacks, by stack name.
      bags: NumPy arrays with one bag for every sample of this process, by feature name. Ids are row
        numbers in the logical table. `check_entries` checks the ids and weights.
      local_device_count: number of devices of this process.
      allow_id_dropping: whether entries that exceed a limit or the buffer are dropped and counted.
        If False, entries that exceed a limit or the buffer are an error.
      statistics: statistics of the batch, filled during partitioning.
    """

    layouts: Mapping[str, StackLayout]
    bags: Mapping[str, Bags]
    local_device_count: int
    allow_id_dropping: bool
    statistics: SparseDenseMatmulInputStats

    def merged_entries(self, name: str) -> Entries:
        """Entries of the cores of this process, after equal ids of one sample were merged.

        Raises: ValueError: an id is outside its table, or a weight is not finite.
        """
        layout = self.layouts[name]
        num_shards = layout.num_shards
        partitions = []
        keys = []
        gains = []
        for feature in layout.features:
            bags = self.bags[feature.name]
            check_entries(feature, bags)
            ids = bags.ids.astype(np.int64)
            placement = feature.id_transformation
            place = Place(0, placement.col_offset, placement.col_shift)
            samples_per_core = (feature.num_samples or 0) // num_shards
            samples = samples_of(bags)
            core, sample = np.divmod(samples, samples_per_core)
            row = place.rows_in_shard(ids, spread=num_shards)
            partitions.append(core * num_shards + place.shards(ids, spread=num_shards))
            keys.append(
                row * layout.samples_per_core + (sample + placement.row_offset // num_shards)
            )
            gains.append(gains_of(bags, samples, layout.spec.combiner))
        partition = np.concatenate(partitions)
        key = np.concatenate(keys)
        gain = np.concatenate(gains)
        num_partitions = self.local_device_count * layout.num_cores * num_shards
        num_keys = layout.rows_per_shard * layout.samples_per_core
        # A stack has fewer than 2**31 rows, and a device at most `MAX_SAMPLES_PER_DEVICE` samples, so
        # int64 is wide enough for up to 64 devices of this process.
        packed = partition * num_keys + key
        # A stable sort keeps equal keys in batch order, so sums of weights are reproducible.
        order = np.argsort(packed, kind="stable")
        partition, key = np.divmod(packed[order], num_keys)
        gain = gain[order]
        is_first = _differs_from_previous(partition, key)
        starts = np.flatnonzero(is_first)
        merged = gain[starts]
        # `np.add.at` adds gains in the order of the batch. `np.add.reduceat` may add gains in a
        # different order than the batch, which may change the rounding.
        np.add.at(merged, np.cumsum(is_first)[~is_first] - 1, gain[~is_first])
        multiplicity = np.diff(np.append(starts, key.size))
        row, sample = np.divmod(key[starts], layout.samples_per_core)
        return Entries(partition[starts], row, sample, merged, multiplicity, num_partitions)


def partition_stack(batch: HostBatch, name: str) -> StackBuffers:
    """Computes the input buffers of one stack, and fills in the statistics of the batch.

    Raises: ValueError: a limit is exceeded, or the buffer is too small.
    """
    entries = batch.merged_entries(name)
    return lay_out(batch, batch.layouts[name], entries, entries)


def _differs_from_previous(partition: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Mask of the entries that differ from the preceding entry in the partition or in the key."""
    differs = np.ones(key.shape, bool)
    differs[1:] = (np.diff(key) != 0) | (np.diff(partition) != 0)
    return differs


def lay_out(
    batch: HostBatch,
    layout: StackLayout,
    batch_entries: Entries,
    entries: Entries,
    num_minibatches: int | None = None,
) -> StackBuffers:
    """Input buffers of one stack.

    Entries above a limit are an error, or they are dropped and counted.

    Args:
      batch: ids, layouts and statistics of the batch.
      layout: layout of the stack.
      batch_entries: entries before the batch is split into minibatches. The ids per partition in
        the statistics are counted before the split.
      entries: entries to write to the buffers, sorted by minibatch if the batch is split.
      num_minibatches: number of minibatches. With minibatching, all cores of a device share the
        buffer of the device. Without minibatching (None, the default), each core has an equal part
        of its device's buffer.

    Raises: ValueError: a limit is exceeded or the buffer is too small, and ids may not be dropped.
    """
    record_counts(batch, layout, batch_entries.num_ids, batch_entries.num_unique, entries.num_ids)
    kept = entries
    dropped = {}
    exceeded = exceeded_limits(layout, entries, num_minibatches or 1)
    if exceeded and not batch.allow_id_dropping:
        raise ValueError(exceeded)
    if exceeded:
        is_within_ids = entries.rank < layout.spec.max_ids_per_partition
        # An entry above `max_ids_per_partition` is dropped, but `row_rank` still counts its row.
        is_within_unique = entries.row_rank < layout.spec.max_unique_ids_per_partition
        above_ids = ~is_within_ids
        above_unique = is_within_ids & ~is_within_unique
        dropped["ids"] = (entries.row[above_ids], entries.multiplicity[above_ids])
        dropped["unique_ids"] = (entries.row[above_unique], entries.multiplicity[above_unique])
        kept = entries.take(is_within_ids & is_within_unique)
    buffers, fits = _fill(layout, kept, batch.local_device_count, num_minibatches)
    if not fits.all():
        num_lost = int(np.count_nonzero(~fits))
        if not batch.allow_id_dropping:
            needed = (
                int(batch.statistics.required_buffer_size_per_sc[layout.name].max())
                * layout.num_cores
            )
            size = buffers["gains"].size // batch.local_device_count
            raise ValueError(
                f"stack {layout.name!r}: {num_lost} entries do not fit the buffer of {size} "
                f"places per device, {needed} are needed; raise "
                f"suggested_coo_buffer_size_per_device to {needed} (or leave it None), or pass "
                "allow_id_dropping=True to drop and count them."
            )
        dropped["buffer"] = (kept.row[~fits], np.ones(num_lost, np.int64))
    record_drops(batch.statistics, layout, dropped)
    return buffers


def record_counts(
    batch: HostBatch,
    layout: StackLayout,
    num_ids: np.ndarray,
    num_unique: np.ndarray,
    num_laid_out: np.ndarray,
) -> None:
    """Stores the largest partition sizes and the required buffer size in the batch's statistics.

    Args:
      batch: the batch with its statistics.
      layout: layout of the stack.
      num_ids: number of entries in every partition, before the split into minibatches.
      num_unique: number of distinct rows in every partition, before the split into minibatches.
      num_laid_out: number of entries in every partition of the buffer.
    """
    shape = (batch.local_device_count, layout.num_cores, layout.num_shards)

    def most_of_any_core(values: np.ndarray) -> np.ndarray:
        return values.reshape(shape).max(axis=1).reshape(-1).astype(np.int32)

    statistics = batch.statistics
    statistics.max_ids_per_partition[layout.name] = most_of_any_core(num_ids)
    statistics.max_unique_ids_per_partition[layout.name] = most_of_any_core(num_unique)
    num_cores = batch.local_device_count * layout.num_cores
    sizes = round_up(num_laid_out, SUBLANES).reshape(num_cores, -1).sum(axis=1)
    statistics.required_buffer_size_per_sc[layout.name] = sizes.astype(np.int32)


def exceeded_limits(layout: StackLayout, entries: Entries, num_blocks_per_core: int = 1) -> str:
    """Error message that names the exceeded limits, or "" if none is exceeded."""
    tables = sorted(table.name for table in layout.tables)
    counts = {
        "max_ids_per_partition": entries.num_ids,
        "max_unique_ids_per_partition": entries.num_unique,
    }
    parts = []
    for limit, values in counts.items():
        allowed = getattr(layout.spec, limit)
        if values.max() > allowed:
            block, shard = divmod(int(values.argmax()), layout.num_shards)
            core = block // num_blocks_per_core
            parts.append(f"{limit}={allowed}, but core {core} has {values.max()} for shard {shard}")
    if not parts:
        return ""
    still = ""
    split = ""
    if num_blocks_per_core > 1:
        still = f" in one of {num_blocks_per_core} minibatches, which cannot be split"
    else:
        split = "pass enable_minibatching=True to process the batch in parts, "
    return (
        f"stack {layout.name!r} (tables {', '.join(tables)}): {'; '.join(parts)}{still}. Raise "
        "the limit to at least the observed number, spread ids over more shards "
        f"(num_sc_per_device), {split}or pass allow_id_dropping=True to drop and count them."
    )


def _fill(
    layout: StackLayout, entries: Entries, num_devices: int, num_minibatches: int | None
) -> tuple[StackBuffers, np.ndarray]:
    """Input buffers of one stack, and a mask of the entries that fit into the buffers.

    The buffer of a device consists of regions. Without minibatches, each core of the device has one
    region, and all regions have equal size. With minibatches, the whole buffer of the device is one
    region.
    """
    num_shards = layout.num_shards
    size = layout.buffer_size_per_device(num_minibatches is not None) * num_devices
    if num_minibatches is None:
        num_regions = num_devices * layout.num_cores
        num_blocks = 1
        num_pointer_blocks = 1
    else:
        num_regions = num_devices
        num_blocks = layout.num_cores * num_minibatches
        num_pointer_blocks = layout.num_cores * MAX_MINIBATCHES
    region_size = size // num_regions
    partitions_per_region = num_blocks * num_shards
    counts = entries.num_ids.reshape(num_regions, partitions_per_region)
    padded_counts = round_up(counts, SUBLANES)
    starts = np.cumsum(padded_counts, axis=1) - padded_counts
    ends = np.minimum(starts + counts, region_size).reshape(-1, num_blocks, num_shards)
    block_ends = np.minimum(round_up(ends[:, :, -1], SUBLANES), region_size)
    pointers = np.empty((num_regions, num_pointer_blocks, max(num_shards, SUBLANES)), np.int32)
    # With minibatching, there are row pointers for `MAX_MINIBATCHES` minibatches. The pointers of
    # unused minibatches point to the end of the last used minibatch.
    pointers[:] = block_ends[:, -1, None, None]
    pointers[:, :num_blocks, :num_shards] = ends
    pointers[:, :num_blocks, num_shards:] = block_ends[:, :, None]

    offset_in_region = starts.reshape(-1)[entries.partition] + entries.rank
    fits = offset_in_region < region_size
    region = entries.partition // partitions_per_region
    offset = (region * region_size + offset_in_region)[fits]
    embedding_ids = np.full(size, PADDING_VALUE, np.int32)
    sample_ids = np.full(size, PADDING_VALUE, np.int32)
    gains = np.full(size, np.nan, np.float32)
    embedding_ids[offset] = entries.row[fits]
    sample_ids[offset] = entries.sample[fits]
    gains[offset] = entries.gain[fits]
    buffers = (pointers.reshape(-1), embedding_ids, sample_ids, gains)
    return dict(zip(BUFFER_DTYPES, buffers, strict=True)), fits


def _starts(counts: np.ndarray) -> np.ndarray:
    """Offset of each part in a concatenation of parts with `counts` entries."""
    return np.cumsum(counts) - counts


def record_drops(
    statistics: SparseDenseMatmulInputStats,
    layout: StackLayout,
    dropped: Mapping[str, tuple[np.ndarray, np.ndarray]],
) -> None:
    """Counts dropped ids by stack and by table, and warns once per table and limit.

    Args:
      statistics: statistics of the batch.
      layout: layout of the stack.
      dropped: for each kind of drop (`ids`, `unique_ids`, `buffer`), a pair `(rows, num_dropped)`
        of arrays. `rows` are row indices in a shard. `num_dropped[i]` is added to the count of
        dropped ids of the table that contains row `rows[i]`.
    """
    first_rows = np.asarray([table.setting_in_stack.row_offset_in_shard for table in layout.tables])
    counts = {}
    for kind, (rows, num_dropped) in dropped.items():
        table_number = np.searchsorted(first_rows, rows, side="right") - 1
        counts[kind] = np.bincount(table_number, num_dropped, minlength=len(first_rows))
    total = sum(by_table.sum() for by_table in counts.values())
    statistics.id_drop_counters[layout.name] = int(total)
    for number, table in enumerate(layout.tables):
        drops = TableDrops(**{kind: int(by_table[number]) for kind, by_table in counts.items()})
        statistics.id_drops_by_table[table.name] = drops
        for kind, count in drops._asdict().items():
            warning = (table.name, layout.name, kind)
            if not count or warning in _warned:
                continue
            _warned.add(warning)
            setting = SETTINGS[kind]
            _log.warning(
                "rsembed.sparsecore: table %r in stack %r: %d ids were dropped in one batch by "
                "%s=%s; id_drops_by_table of the statistics counts them. This is said once per "
                "table and limit.",
                table.name,
                layout.name,
                count,
                setting,
                getattr(layout.spec, setting),
            )


def partition_stacks_in_minibatches(
    batch: HostBatch, any_process: Callable[[int, np.ndarray], np.ndarray]
) -> tuple[dict[str, StackBuffers], int]:
    """Input buffers of all stacks, and the number of minibatches in them.

    The statistics count the ids of each partition before the batch is split. A batch needs no
    minibatches if the limits are at least as large as the largest partitions in its statistics. The
    required buffer size in the statistics is computed after the batch is split. If a single bucket
    exceeds a limit, or the buffer is too small, ids are dropped or an error is raised, as without
    minibatches.

    Args:
      batch: ids, layouts and statistics of the batch.
      any_process: function `(index, flags) -> flags` that returns the elementwise "or" of the
        flags of all processes. In the first call of `any_process`, `index` is 0, and the only flag
        is True if the batch of this process exceeds a limit. If the batch of any process exceeds a
        limit, `any_process` is called with `index` 1 and the mask of the tree nodes that this
        process must split, see `split_nodes`.
    """
    layouts = batch.layouts
    merged = {name: batch.merged_entries(name) for name in layouts}
    is_too_large = any(exceeded_limits(layouts[name], entries) for name, entries in merged.items())
    nodes = np.zeros(MAX_MINIBATCHES - 1, bool)
    buckets = {}
    if any_process(0, np.asarray([is_too_large])).any():
        for name, layout in layouts.items():
            entries = merged[name]
            row_in_stack = entries.row * layout.num_shards + entries.partition % layout.num_shards
            buckets[name] = bucket_of(row_in_stack)
            nodes |= _nodes_to_split(layout, entries, buckets[name])
        nodes = any_process(1, nodes)
    minibatches = minibatch_of_bucket(nodes)
    num_minibatches = int(minibatches[-1]) + 1
    buffers = {}
    for name, layout in layouts.items():
        ordered = merged[name]
        if num_minibatches > 1:
            ordered = _by_minibatch(layout, merged[name], buckets[name], minibatches)
        buffers[name] = lay_out(batch, layout, merged[name], ordered, num_minibatches)
    return buffers, num_minibatches


def bucket_of(columns: Int[np.ndarray, " nnz"]) -> Int[np.ndarray, " nnz"]:
    """Bucket of each row, computed from the row number in the stack.

    The row numbers in one shard differ by multiples of the number of shards, so the low bits of the
    row numbers alone may give only a few different buckets in a shard.

    Source: the low 6 bits of the SplitMix64 finalizer (Steele, Lea and Flood 2014).
    """
    mixed = columns.astype(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(MAX_MINIBATCHES)).astype(np.int64)


def split_nodes(
    counts: Int[np.ndarray, "*parts buckets"], limit: int
) -> Bool[np.ndarray, "*parts nodes"]:
    """Mask of the nodes that must be split in a binary tree of buckets, for every partition.

    The leaves of the binary tree are the buckets. `counts` has the number of ids, or of distinct
    ids, in each bucket. The returned mask has one entry for each inner node of the tree, from the
    lowest level to the root. An inner node must be split if the counts of its two children add up
    to more than `limit`. The count of a split node is the larger count of its children. The count
    of an inner node that is not split is the sum of the counts of its children.

    Example:
      >>> split_nodes(np.asarray([2, 5, 1, 6, 3, 4, 2, 0]), 7).astype(int).tolist()
      [0, 0, 0, 0, 1, 1, 1]
    """
    levels = []
    while counts.shape[-1] > 1:
        left = counts[..., ::2]
        right = counts[..., 1::2]
        is_split = left + right > limit
        levels.append(is_split)
        counts = np.where(is_split, np.maximum(left, right), left + right)
    return np.concatenate(levels, axis=-1)


def minibatch_of_bucket(nodes: Bool[np.ndarray, " nodes"]) -> Int[np.ndarray, " buckets"]:
    """Index of the minibatch that each bucket belongs to.

    If a node of the binary tree of buckets (see `split_nodes`) is split, a new minibatch begins
    with the first bucket under the right child of the node.

    Example:
      >>> minibatch_of_bucket(np.asarray([0, 0, 0, 0, 1, 1, 1], bool)).tolist()
      [0, 0, 1, 1, 2, 2, 3, 3]
    """
    half = 1
    is_first = np.zeros(len(nodes) + 1, bool)
    while len(nodes):
        num_nodes = (len(nodes) + 1) // 2  # on the lowest level that is left
        is_first[half :: 2 * half] = nodes[:num_nodes]
        nodes = nodes[num_nodes:]
        half *= 2
    return np.cumsum(is_first)


def _nodes_to_split(layout: StackLayout, entries: Entries, buckets: np.ndarray) -> np.ndarray:
    """Mask of the tree nodes (see `split_nodes`) to split because a partition exceeds a limit."""
    buckets_of_ids = entries.partition * MAX_MINIBATCHES + buckets
    buckets_of_rows = buckets_of_ids[entries.is_new_row]
    nodes = np.zeros(MAX_MINIBATCHES - 1, bool)
    for limit, counted in (
        (layout.spec.max_ids_per_partition, buckets_of_ids),
        (layout.spec.max_unique_ids_per_partition, buckets_of_rows),
    ):
        by_bucket = np.bincount(counted, minlength=entries.num_partitions * MAX_MINIBATCHES)
        nodes |= split_nodes(by_bucket.reshape(entries.num_partitions, -1), limit).any(axis=0)
    return nodes


def _by_minibatch(
    layout: StackLayout, entries: Entries, buckets: np.ndarray, minibatches: np.ndarray
) -> Entries:
    """The entries, sorted by (core, minibatch, shard, bucket, row, sample)."""
    num_minibatches = int(minibatches[-1]) + 1
    core, shard = np.divmod(entries.partition, layout.num_shards)
    partition = (core * num_minibatches + minibatches[buckets]) * layout.num_shards + shard
    order = np.argsort(partition * MAX_MINIBATCHES + buckets, kind="stable")
    num_partitions = entries.num_partitions * num_minibatches
    return dataclasses.replace(entries, partition=partition, num_partitions=num_partitions).take(
        order
    )

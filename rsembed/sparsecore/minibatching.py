"""Minibatches: the way out for a batch with more ids than a partition may hold.

The rows of all stacks fall into 64 buckets, by a hash. Neighbouring buckets form a minibatch as long as every partition
of every core keeps its limits; all stacks, devices and processes cut at the same places. A row lies in one bucket, so
it is in one minibatch and is stepped once, as without minibatches.

```
buckets      2 5 | 1 6 | 3 4 | 2 0      limit 7: no two neighbouring pairs fit together
minibatches   1     2     3     4
```

Source: the published behaviour of the JAX SparseCore API. Its hash is another one (HighwayHash); only which rows share
a minibatch depends on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Bool, Int

from rsembed.sparsecore.layout import MAX_MINIBATCHES, StackLayout
from rsembed.sparsecore.partitioner import Entries, HostBatch, StackBuffers, exceeded_limits, lay_out, merged_entries

AllReduce = Callable[[int, np.ndarray], np.ndarray]
"""How processes agree: `(key, flags)` to the elementwise "or" of the flags of all processes.

All processes call it with the same key and number of flags, in the same order; keys `2 * batch_number` and
`2 * batch_number + 1` tell the questions of different batches apart.
"""


def agree_through_devices(key: int, flags: Bool[np.ndarray, " flags"]) -> Bool[np.ndarray, " flags"]:
    """An `AllReduce` through a collective of all devices, so it must not run beside a training step.

    A single process agrees with itself.
    """
    del key
    if jax.process_count() == 1:
        return flags
    gathered: np.ndarray = np.asarray(multihost_utils.process_allgather(flags.astype(np.uint8)))
    return np.any(gathered, axis=0)


def partition_stacks_in_minibatches(
    batch: HostBatch, batch_number: int, agree: AllReduce | None
) -> tuple[dict[str, StackBuffers], int]:
    """Buffers of all stacks, and the number of minibatches in them.

    Statistics are those of the whole batch, so limits that are set from them make minibatches superfluous; only the
    required buffer size is that of the layout with minibatches. What exceeds a limit in a bucket alone, or the buffer,
    is dropped or an error, as in a batch without minibatches.

    Args:
      batch: the stacks and their ids.
      batch_number: number of the batch, the same in all processes.
      agree: None means `agree_through_devices`.
    """
    ask = agree_through_devices if agree is None else agree
    layouts, local_device_count = batch.layouts, batch.local_device_count
    has_all_devices = all(local_device_count == layout.num_devices for layout in layouts.values())
    merged = {name: merged_entries(batch, name) for name in layouts}

    def any_process(key: int, flags: np.ndarray) -> np.ndarray:
        return flags if has_all_devices else np.asarray(ask(key, flags), bool)

    is_needed = np.asarray([any(exceeded_limits(layouts[name], entries) for name, entries in merged.items())])
    nodes = np.zeros(MAX_MINIBATCHES - 1, bool)
    if any_process(2 * batch_number, is_needed).any():
        for name, layout in layouts.items():
            nodes |= _stack_split_nodes(layout, merged[name])
        nodes = any_process(2 * batch_number + 1, nodes)
    minibatches = minibatch_of_bucket(nodes)
    num_minibatches = int(minibatches[-1]) + 1
    buffers = {}
    for name, layout in layouts.items():
        dealt = _deal(layout, merged[name], minibatches)
        buffers[name] = lay_out(batch, layout, merged[name], dealt, num_minibatches)
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


def _buckets(layout: StackLayout, entries: Entries) -> np.ndarray:
    return bucket_of(entries.row * layout.num_shards + entries.partition % layout.num_shards)


def _stack_split_nodes(layout: StackLayout, entries: Entries) -> np.ndarray:
    """The nodes that any partition of the stack sets, for ids or for distinct ids."""
    places = entries.partition * MAX_MINIBATCHES + _buckets(layout, entries)
    nodes = np.zeros(MAX_MINIBATCHES - 1, bool)
    for limit, chosen in (
        (layout.spec.max_ids_per_partition, places),
        (layout.spec.max_unique_ids_per_partition, places[entries.is_new_row]),
    ):
        by_bucket = np.bincount(chosen, minlength=entries.num_partitions * MAX_MINIBATCHES)
        nodes |= split_nodes(by_bucket.reshape(entries.num_partitions, -1), limit).any(axis=0)
    return nodes


def _deal(layout: StackLayout, entries: Entries, minibatches: np.ndarray) -> Entries:
    """The entries ordered by (core, minibatch, shard, bucket, row, sample)."""
    num_minibatches = int(minibatches[-1]) + 1
    if num_minibatches == 1:
        return entries
    core, shard = np.divmod(entries.partition, layout.num_shards)
    bucket = _buckets(layout, entries)
    partition = (core * num_minibatches + minibatches[bucket]) * layout.num_shards + shard
    order = np.argsort(partition * MAX_MINIBATCHES + bucket, kind="stable")
    num_partitions = entries.num_partitions * num_minibatches
    return dataclasses.replace(entries, partition=partition, num_partitions=num_partitions).take(order)


def get_all_reduce_interface(
    peer_addresses: Any = None, minibatching_port: Any = None, host_id: Any = None, host_count: Any = None
) -> AllReduce:
    """The agreement of this library's processes; addresses and ports of the published one are not needed."""
    del peer_addresses, minibatching_port, host_id, host_count
    return agree_through_devices

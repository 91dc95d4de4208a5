"""Statistics of the ids in batches: Zipf exponents, sizes of partitions, and cache hit rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, Integer, Num, UInt64

from rsembed.checks import PositiveInt, validated

NUM_RANK_BLOCKS = 16_384
FEWEST_PENDING_IDS = 2**20
"""Minimum number of new ids that `IdCounter` collects before it merges them into `IdCounter.ids`.

If `FEWEST_PENDING_IDS` is raised, merges are rarer and counting is faster, but the ids that wait
for a merge take more memory.
"""


def check_shares(name: str, values: Any) -> np.ndarray:
    """Counts, sizes or probabilities as a float64 array, after a check of their values.

    Raises: ValueError: a value is negative or not finite, or no value is above 0.
    """
    shares = np.asarray(values, np.float64)
    if not (np.isfinite(shares).all() and (shares >= 0).all() and shares.any()):
        raise ValueError(
            f"{name} must be finite and not negative, and at least one must be above 0."
        )
    return shares


@validated
def zipf_exponent(
    counts: Num[np.ndarray, " vocab"], *, num_rows: PositiveInt | None = None
) -> float:
    """The exponent `s` of the Zipf law `p(rank) ~ rank**-s` that fits best, by maximum likelihood.

    An exponent of 0 means that all rows are equally popular. Rows are ranked by their counts, so
    with only a few lookups per row, the exponent is somewhat too large.

    Args:
      counts: number of lookups of each row, with the rows in any order.
      num_rows: number of rows of the table. Set `num_rows` if `counts` has no entries for rows
        without a lookup. If None, the table has one row for each count.

    Raises: ValueError: there are fewer than two rows, a count is negative, or all counts are 0.

    Source: Clauset, Shalizi, Newman, "Power-law distributions in empirical data", SIAM Review 2009,
      applied to a finite number of ranks. The likelihood is largest for the exponent with which the
      mean of `log(rank)` under the Zipf law equals the mean of `log(rank)` over all lookups.

    Example:
      >>> round(zipf_exponent(1e6 / np.arange(1.0, 1001.0) ** 1.2), 3)
      1.2
    """
    popular_first = np.sort(check_shares("zipf_exponent: counts", counts))[::-1]
    num_ranks = max(popular_first.size, num_rows or 0)
    if num_ranks < 2:
        raise ValueError("zipf_exponent: needs counts of two rows at least.")
    logs_of_counts = np.log(np.arange(1, popular_first.size + 1))
    mean_log = float(popular_first @ logs_of_counts / popular_first.sum())
    # Ranks are grouped into blocks, because a sum over all ranks would be slow. Each of the first
    # few hundred ranks is a block of its own. In every block, the last rank is at most 1 % larger
    # than the first rank, even for 2^64 ranks. With blocks, the exponent differs by less than 1e-6
    # from the exponent with a sum over all ranks.
    starts = np.unique(np.floor(np.geomspace(1.0, num_ranks + 1.0, NUM_RANK_BLOCKS)))
    ranks_per_block = np.diff(starts)
    logs = np.log(starts[:-1] + (ranks_per_block - 1) / 2)
    low = 0.0  # The exponent is not negative, because counts are in descending order.
    high = 30.0
    for _ in range(60):
        middle = (low + high) / 2
        law = ranks_per_block * np.exp(-middle * logs)
        if law @ logs / law.sum() > mean_log:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def partition_counts(
    ids: Integer[np.ndarray, " nnz"],
    samples: Int[np.ndarray, " nnz"],
    cores: Int[np.ndarray, " nnz"],
    num_shards: int,
) -> tuple[Int[np.ndarray, "cores shards"], Int[np.ndarray, "cores shards"]]:
    """Number of entries, and number of distinct ids, that each core sends to each shard.

    Args:
      ids: ids of one batch. Id `i` belongs to shard `i % num_shards`.
      samples: index of the sample that contains each id. Equal ids in one sample are counted as one
        entry.
      cores: index of the core that processes each id.
      num_shards: number of shards, which is also the number of cores.
    """
    shards = (ids % np.asarray(num_shards, ids.dtype)).astype(np.int64)
    partitions = cores * num_shards + shards
    tables = []
    for groups in (samples, cores):
        first = _first_of_each_pair(groups, ids)
        counts = np.bincount(partitions[first], minlength=num_shards**2)
        tables.append(counts.reshape(num_shards, num_shards))
    entries, distinct = tables
    return entries, distinct


def _first_of_each_pair(groups: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Indices of entries, one for each distinct pair `(groups[k], ids[k])`."""
    order = np.lexsort((ids, groups))
    is_first = np.ones(ids.size, bool)
    is_first[1:] = np.diff(ids[order]) != 0
    is_first[1:] |= np.diff(groups[order]) != 0
    return order[is_first]


class IdCounter:
    """Counts the lookups of every distinct id in a stream of batches, and the hits of LRU caches.

    An `IdCounter` needs 24 bytes for each distinct id, independent of the number of batches.

    Args:
      cache_rows: sizes of the caches to simulate, in rows.
    """

    def __init__(self, cache_rows: Sequence[int]):
        self.ids: np.ndarray = np.zeros(0, np.uint64)
        self.counts: np.ndarray = np.zeros(0, np.int64)
        self.num_distinct_by_batch = 0
        self._cache_rows = cache_rows
        self._hits = np.zeros(len(cache_rows))
        self._last_batch: np.ndarray = np.zeros(0, np.int64)
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []
        self._num_pending = 0
        self._num_batches = 0
        # Entry `i` is the number of rows that were last looked up in batch `_first_batch + i`. All
        # simulated caches have evicted the rows that were last looked up before batch
        # `_first_batch`.
        self._rows_by_last_batch: np.ndarray = np.zeros(0, np.int64)
        self._first_batch = 0

    def add(self, ids: UInt64[np.ndarray, " nnz"]) -> None:
        """Counts one batch of ids, duplicates included."""
        distinct, counts = np.unique(ids, return_counts=True)
        self.num_distinct_by_batch += distinct.size
        self._pending.append((distinct, counts))
        self._num_pending += distinct.size
        if self._num_pending > max(FEWEST_PENDING_IDS, self.ids.size):
            self.merge()

    def merge(self) -> None:
        """Adds all pending batches to `ids` (in ascending order), `counts` and the cache hits."""
        known = self.ids
        all_ids = [known]
        for ids, _ in self._pending:
            all_ids.append(ids)
        self.ids = np.unique(np.concatenate(all_ids))
        known_positions = np.searchsorted(self.ids, known)
        counts = np.zeros(self.ids.size, np.int64)
        counts[known_positions] = self.counts
        last_batch = np.full(self.ids.size, -1)
        last_batch[known_positions] = self._last_batch
        for ids, id_counts in self._pending:
            positions = np.searchsorted(self.ids, ids)
            counts[positions] += id_counts
            self._count_hits(last_batch[positions])
            last_batch[positions] = self._num_batches
            self._num_batches += 1
        self.counts = counts
        self._last_batch = last_batch
        self._pending = []
        self._num_pending = 0

    def hit_rates(self) -> list[float]:
        """Hit rate of each cache: hits divided by distinct ids, each summed over all batches.

        Call `merge` first, because only `merge` counts the hits.
        """
        rates: list[float] = (self._hits / max(self.num_distinct_by_batch, 1)).tolist()
        return rates

    def _count_hits(self, last_batch: np.ndarray) -> None:
        """Adds the hits of one batch to the hits of each simulated cache.

        Args:
          last_batch: for each distinct id of the batch, the index of the last earlier batch that
            contains the id, or -1.
        """
        rows_by_batch = self._rows_by_last_batch
        used_later = np.cumsum(rows_by_batch[::-1])[::-1] - rows_by_batch
        num_stale = int(np.count_nonzero(used_later >= max(self._cache_rows)))
        rows_by_batch = rows_by_batch[num_stale:]
        used_later = used_later[num_stale:]
        self._first_batch += num_stale
        is_recent = last_batch >= self._first_batch
        recent_batches = last_batch[is_recent] - self._first_batch
        reused = np.bincount(recent_batches, minlength=rows_by_batch.size)
        divisors = np.maximum(rows_by_batch, 1)
        for number, cache_rows in enumerate(self._cache_rows):
            # Rows that were last looked up in the same batch count as equally recent. If a cache
            # has space for only half of a group of equally recent rows, half of the lookups of the
            # group count as hits.
            free_rows = cache_rows - used_later
            cached_share = np.clip(free_rows / divisors, 0.0, 1.0)
            self._hits[number] += reused @ cached_share
        self._rows_by_last_batch = np.append(rows_by_batch - reused, last_batch.size)

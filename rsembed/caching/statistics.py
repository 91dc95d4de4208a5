"""How well a cache does: counters over many batches, exact and without double counts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64

from rsembed.checks import NonNegativeInt, validated


class CacheCounts(NamedTuple):
    """Counters of one call, or summed over calls. The first six are FBGEMM's, in its order.

    Attributes:
      calls: batches.
      requested_ids: ids asked for, every duplicate counted, ids that are not cacheable included.
      unique_ids: distinct ids per batch; all ids that are not cacheable count as one.
      unique_misses: distinct cacheable ids that were not resident before the batch.
      unique_conflict_misses: those of them that found no slot.
      conflict_misses: their lookups, every duplicate counted: rows to be read from the backing store.
      unique_hits: distinct cacheable ids that were resident before the batch.
    """

    calls: int = 0
    requested_ids: int = 0
    unique_ids: int = 0
    unique_misses: int = 0
    unique_conflict_misses: int = 0
    conflict_misses: int = 0
    unique_hits: int = 0


def unique_misses_by_group(
    ids: Int[np.ndarray, " ids"], missed_ids: Int64[np.ndarray, " missed"], group_offsets: Int[np.ndarray, " offsets"]
) -> Int64[np.ndarray, " groups"]:
    """Distinct missed ids in each part of a batch; an id that several parts ask for counts in each of them.

    Args:
      ids: the batch as it was admitted.
      missed_ids: `Admission.missed_ids` of it.
      group_offsets: group `g` (a feature, say) asked for `ids[group_offsets[g] : group_offsets[g + 1]]`.

    Raises: ValueError: the groups do not cover the batch from its start to its end.
    """
    sizes = np.diff(group_offsets)
    if not group_offsets.size or group_offsets[0] != 0 or group_offsets[-1] != ids.size or (sizes < 0).any():
        raise ValueError(f"group_offsets must rise from 0 to the {ids.size} ids, got {group_offsets.tolist()}.")
    if not missed_ids.size:
        return np.zeros(sizes.size, np.int64)
    place = np.minimum(np.searchsorted(missed_ids, ids), missed_ids.size - 1)
    is_missed = missed_ids[place] == ids
    group = np.repeat(np.arange(sizes.size), sizes)
    pairs = np.unique(group[is_missed] * missed_ids.size + place[is_missed])
    return np.bincount(pairs // missed_ids.size, minlength=sizes.size).astype(np.int64)


class CacheStatistics:
    """The counts of all batches so far.

    Attributes:
      totals: sums over all recorded batches; `totals[:6]` are FBGEMM's counters in its order, for LRU and LFU alike.
      batches_with_a_miss: batches with at least one unique miss.
      unique_misses_by_group: sums of what `record` was given, one per group.

    Example:
      >>> statistics = CacheStatistics()
      >>> statistics.record(CacheCounts(calls=1, requested_ids=9, unique_ids=4, unique_misses=1, unique_hits=3))
      >>> statistics.miss_counter, statistics.totals.unique_hits
      ((1, 1), 3)
    """

    @validated
    def __init__(self, num_groups: NonNegativeInt = 0) -> None:
        """Nothing recorded yet, for `num_groups` groups such as features or tables."""
        self.unique_misses_by_group: Int64[np.ndarray, " groups"] = np.zeros(num_groups, np.int64)
        self.reset()

    def reset(self) -> None:
        """Starts again from zero."""
        self.totals = self._reported = CacheCounts()
        self.batches_with_a_miss = 0
        self.unique_misses_by_group[:] = 0

    def record(self, counts: CacheCounts, unique_misses_by_group: Int64[np.ndarray, " groups"] | None = None) -> None:
        """Adds `Admission.counts` and, where wanted, what `unique_misses_by_group` found for the same batch.

        Raises: ValueError: another number of groups than announced.
        """
        if unique_misses_by_group is not None:
            if unique_misses_by_group.shape != self.unique_misses_by_group.shape:
                raise ValueError(
                    f"{unique_misses_by_group.size} groups were given, but the statistics have "
                    f"num_groups={self.unique_misses_by_group.size}."
                )
            self.unique_misses_by_group += unique_misses_by_group
        self.totals = CacheCounts(*(total + new for total, new in zip(self.totals, counts, strict=True)))
        self.batches_with_a_miss += counts.unique_misses > 0

    @property
    def miss_counter(self) -> tuple[int, int]:
        """Batches with a miss, and unique misses; both as the cache stood before each batch."""
        return self.batches_with_a_miss, self.totals.unique_misses

    def report(self) -> str:
        """One line with the calls and the means per call since the last report; starts a new period."""
        num_calls, *counts = (total - old for total, old in zip(self.totals, self._reported, strict=True))
        means = zip(CacheCounts._fields[1:], counts, strict=True)
        self._reported = self.totals
        return f"{num_calls} calls, on average: " + ", ".join(f"{n} {c / max(1, num_calls):.1f}" for n, c in means)

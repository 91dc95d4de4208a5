"""How often ids were read, in bounded memory, such that the most read ids are never missing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32, Int64

from rsembed.caching import set_of

NUM_WAYS = 32
"""Places of a bucket."""
MOST_READS = np.iinfo(np.int32).max


class ReadCounts(NamedTuple):
    """Counts of the most read ids, in buckets of up to 32 places; an id has one bucket.

    While a bucket has room its counts are exact. Once it is full, an id without a place takes that of the least read
    one and inherits its count, since it may have been read as often before. So a count is never too low, and too high
    by at most what was inherited; and an id that was read more often than the least count of its bucket has a place.
    Batches are counted as a whole: of the ids that want in, the most read of the batch come first, the lower id where
    that is equal. Counts stop at 2^31 - 1.

    Values never change: a new batch makes new counts.

    Attributes:
      keys: the id of every place, -1 where it is empty.
      reads: its count.

    Source: Metwally, Agrawal and El Abbadi (2005), "Efficient Computation of Frequent and Top-k Elements in Data
      Streams", whose rule this is within a bucket; Agarwal et al. (2012), "Mergeable Summaries", for batches.

    Example:
      >>> counts, uncounted = ReadCounts.empty(2).counted(np.asarray([7, 7, 7, 8]))
      >>> counts, uncounted = counts.counted(np.asarray([9, 9]))
      >>> dict(zip(counts.keys.tolist(), counts.reads.tolist()))
      {7: 3, 9: 3}
    """

    keys: Int32[np.ndarray, " places"]
    reads: Int32[np.ndarray, " places"]

    @staticmethod
    def empty(num_places: int) -> ReadCounts:
        """Room for about `num_places` ids: as many whole buckets as fit into them."""
        num_places -= num_places % min(NUM_WAYS, num_places)
        return ReadCounts(np.full(num_places, -1, np.int32), np.zeros(num_places, np.int32))

    def counted(self, ids: Int[np.ndarray, " ids"]) -> tuple[ReadCounts, int]:
        """The counts after a batch, and how many of its reads found no place."""
        keys, reads, num_ways = self.keys.copy(), self.reads.astype(np.int64), min(NUM_WAYS, self.keys.size)
        by_bucket = reads.reshape(-1, num_ways)
        unique, occurrences = np.unique(ids, return_counts=True)
        own = self._places(unique)
        reads[own[own >= 0]] += occurrences[own >= 0]
        unique, occurrences = unique[own < 0], occurrences[own < 0]
        bucket = set_of(unique, len(by_bucket))
        wanted = occurrences + by_bucket.min(axis=1)[bucket]
        order, rank = rank_in_sets(bucket, wanted)
        fits = rank < num_ways
        place = bucket[order[fits]] * num_ways
        place += by_bucket.argsort(axis=1, kind="stable")[bucket[order[fits]], rank[fits]]
        comes = wanted[order[fits]] > reads[place]
        place, order = place[comes], order[fits][comes]
        keys[place], reads[place] = unique[order], wanted[order]
        counts = ReadCounts(keys, np.minimum(reads, MOST_READS).astype(np.int32))
        return counts, int(occurrences.sum() - occurrences[order].sum())

    def of(self, ids: Int[np.ndarray, " ids"]) -> Int64[np.ndarray, " ids"]:
        """The count of each of some distinct ids, zero for those that have no place."""
        own = self._places(ids)
        return np.where(own >= 0, self.reads[own], 0).astype(np.int64)

    def _places(self, ids: np.ndarray) -> np.ndarray:
        """Place of each id, -1 without one."""
        buckets = self.keys.reshape(-1, min(NUM_WAYS, self.keys.size))
        bucket = set_of(ids, len(buckets))
        is_own = buckets[bucket] == ids[:, None]
        return np.where(is_own.any(axis=1), bucket * buckets.shape[1] + is_own.argmax(axis=1), -1)

    def halved(self) -> ReadCounts:
        """Old reads fade; a place whose count becomes zero is as good as empty."""
        return ReadCounts(self.keys, self.reads >> 1)


def rank_in_sets(sets: Int[np.ndarray, " ids"], worth: Int[np.ndarray, " ids"]) -> tuple[np.ndarray, np.ndarray]:
    """Ids by set, the worthiest of a set first, the earlier where that is equal; and the rank of each in its set."""
    order = np.lexsort((-worth, sets))
    first = np.searchsorted(sets[order], sets[order], side="left")
    return order, np.arange(sets.size) - first

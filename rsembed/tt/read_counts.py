"""How often ids were read, in bounded memory, such that the most read ids are never missing."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64

MOST_READS = np.iinfo(np.int32).max


class ReadCounts(NamedTuple):
    """Counts of the most read ids, in a list of fixed length.

    While the list has room its counts are exact. Once it is full, an id without a place takes that of the least read
    one and inherits its count, since it may have been read as often before. So a count is never too low, and too high
    by at most what was inherited; and an id that was read more often than the least count has a place. Batches are
    counted as a whole: of the ids that want in, the most read of the batch come first, the lower id where that is
    equal. Counts stop at 2^31 - 1.

    Values never change: a new batch makes new counts.

    Attributes:
      keys: the id of every place, ascending, behind -1 for every empty one.
      reads: its count.

    Source: Metwally, Agrawal and El Abbadi (2005), "Efficient Computation of Frequent and Top-k Elements in Data
      Streams"; Agarwal et al. (2012), "Mergeable Summaries", for batches.

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
        """Room for so many ids."""
        return ReadCounts(np.full(num_places, -1, np.int32), np.zeros(num_places, np.int32))

    def counted(self, ids: Int[np.ndarray, " ids"]) -> tuple[ReadCounts, int]:
        """The counts after a batch, and how many of its reads found no place."""
        unique, occurrences = np.unique(ids, return_counts=True)
        place, has_place = places_in(self.keys, unique)
        reads = self.reads.astype(np.int64)
        reads[place[has_place]] += occurrences[has_place]
        unique, occurrences = unique[~has_place].astype(np.int32), occurrences[~has_place]
        num_places, num_empty = self.keys.size, np.searchsorted(self.keys, 0)
        keys = np.concatenate([self.keys[num_empty:], unique])
        reads = np.concatenate([reads[num_empty:], occurrences + reads.min()])
        stays = are_largest(reads, num_places)
        num_uncounted = int(occurrences[~stays[stays.size - unique.size :]].sum())
        keys, reads = keys[stays], np.minimum(reads[stays], MOST_READS).astype(np.int32)
        order, counts = np.argsort(keys, kind="stable"), ReadCounts.empty(num_places)
        counts.keys[num_places - keys.size :], counts.reads[num_places - keys.size :] = keys[order], reads[order]
        return counts, num_uncounted

    def of(self, ids: Int[np.ndarray, " ids"]) -> Int64[np.ndarray, " ids"]:
        """The count of each id, zero for those that have no place."""
        place, has_place = places_in(self.keys, ids)
        return np.where(has_place, self.reads[place], 0).astype(np.int64)

    def halved(self) -> ReadCounts:
        """Old reads fade; a place whose count becomes zero is as good as empty."""
        return ReadCounts(self.keys, self.reads >> 1)


def places_in(ascending: Int[np.ndarray, " places"], ids: Int[np.ndarray, " ids"]) -> tuple[Any, Any]:
    """A place of every id in an ascending list, and whether the id stands there."""
    place = np.minimum(np.searchsorted(ascending, ids), ascending.size - 1)
    return place, ascending[place] == ids


def are_largest(worth: Int[np.ndarray, " ids"], num: int) -> Bool[np.ndarray, " ids"]:
    """Which are the `num` largest, or all if there are no more; of equals the earlier."""
    if num >= worth.size:
        return np.ones(worth.size, bool)
    least = np.partition(worth, worth.size - num)[worth.size - num]
    is_chosen = worth > least
    is_chosen[np.flatnonzero(worth == least)[: num - np.count_nonzero(is_chosen)]] = True
    return is_chosen

"""Which rows stay in a set-associative cache: exact LRU and LFU for whole batches of ids, without a loop over ids.

Ids are linear: the row number plus the rows of all earlier tables. An id hashes to one set and may sit in any of the
set's ways; its slot is `set * num_ways + way`, the row of the device array that holds it.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int, Int64, UInt64

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


NEVER = np.iinfo(np.int64).max
"""Rank of a slot that may not be a victim: above every count and every time."""

IDS_PER_SEARCH = 4096

MAX_LFU_SETS = 2**24 - 1
"""FBGEMM packs the set number beside a 40-bit count; the limit is kept so that a configuration works in both."""


def _mixed(values: UInt64[np.ndarray, " ids"]) -> UInt64[np.ndarray, " ids"]:
    """The values, scrambled by a bijection of 64-bit numbers. Source: Appleby, MurmurHash3, finaliser `f_mixed`."""
    values = values ^ (values >> np.uint64(33))
    values *= np.uint64(0xFF51AFD7ED558CCD)
    values ^= values >> np.uint64(33)
    values *= np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))


def set_of(ids: Int[np.ndarray, " ids"], num_sets: int) -> Int64[np.ndarray, " ids"]:
    """The set of each id: its scrambled bits modulo the number of sets.

    Example:
      >>> set_of(np.array([0, 1, 2, 10**12]), 1000).tolist()
      [0, 604, 447, 300]
    """
    return (_mixed(ids.astype(np.uint64)) % np.uint64(num_sets)).astype(np.int64)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Admission:
    """Changes of the cache by a batch, and the rows that have to be moved for it.

    Write back the rows of `evicted_ids` before loading `inserted_ids`: they share the slots.

    Attributes:
      locations: slot of every id of the batch, -1 where the backing store must serve it (or the id is not cacheable).
      inserted_ids: ids that were let in, grouped by set.
      inserted_slots: the slot each one got.
      evicted_ids: the id that had the slot before, -1 where it was empty.
      missed_ids: distinct ids that were not resident before, ascending.
      counts: the numbers of this call.
    """

    locations: Int64[np.ndarray, " ids"]
    inserted_ids: Int64[np.ndarray, " inserted"]
    inserted_slots: Int64[np.ndarray, " inserted"]
    evicted_ids: Int64[np.ndarray, " inserted"]
    missed_ids: Int64[np.ndarray, " missed"]
    counts: CacheCounts


NUM_WAYS = 32
"""Rows per set."""


class SetAssociativeCache:
    """Decides which ids are resident and in which slots. Only the decision: rows are moved by the caller.

    Once per batch, `admit` marks the resident ids as used and lets missing ones in. In each set the best missing ids
    take the worst slots one by one. Slots that the batch uses, or that are locked, are never taken, so what the batch
    needs stays; an id that finds no slot is a conflict miss and is served by the backing store.

    * lru: missing ids in ascending order take the slots in order of (time of last use, slot number).
    * lfu: missing ids in order of (falling count, id) take the slots in order of (count of the occupant, slot number);
      an empty slot counts -1, and a slot whose occupant was used more often than the id keeps it.

    Counts are exact and cover all ids from the start, resident or not, the present batch included. They take 8 bytes
    of host memory per id of `num_ids`; the cache itself takes 24 bytes per slot, and `admit`, while it runs, about
    twice that per slot of the sets with a miss.

    Attributes:
      tags: id in each slot, -1 where it is empty. Read only.
      counts: uses of each id, None for LRU. Read only.

    Source: FBGEMM, `lru_cache_populate` and `lfu_cache_populate`. That LFU spares the batch, too, is ours.

    Example:
      >>> cache = SetAssociativeCache(1, num_ways=2, num_ids=100)
      >>> cache.admit(np.array([7, 7, 8, 9])).locations.tolist()
      [0, 0, 1, -1]
      >>> cache.admit(np.array([9])).evicted_ids.tolist()
      [7]
    """

    @validated
    def __init__(
        self, num_sets: int, *, num_ways: int = NUM_WAYS, algorithm: Literal["lru", "lfu"] = "lru", num_ids: int
    ) -> None:
        """An empty cache.

        Args:
          num_sets: sets.
          num_ways: slots per set. Fewer lose hits to collisions; more make every search longer.
          algorithm: "lru" or "lfu".
          num_ids: ids are 0 to `num_ids - 1`; `num_ids` itself and all others are not cacheable.

        Raises: ValueError: a size is too small, the algorithm is unknown, or LFU has 2**24 - 1 sets or more.
        """
        if num_sets < 1 or num_ways < 1 or num_ids < 0:
            raise ValueError(
                f"num_sets={num_sets} and num_ways={num_ways} must be at least 1, num_ids={num_ids} at least 0."
            )
        if algorithm == "lfu" and num_sets >= MAX_LFU_SETS:
            raise ValueError(f"num_sets={num_sets} is too large for 'lfu', which takes fewer than {MAX_LFU_SETS}.")
        self.num_sets, self.num_ways, self.num_ids, self.algorithm = num_sets, num_ways, num_ids, algorithm
        num_slots = num_sets * num_ways
        self.tags: Int64[np.ndarray, " slots"] = np.full(num_slots, -1, np.int64)
        self.counts: Int64[np.ndarray, " vocab"] | None = np.zeros(num_ids, np.int64) if algorithm == "lfu" else None
        self._last_used = np.zeros(num_slots, np.int64)
        self._locks = np.zeros(num_slots, np.int64)
        self._clock = 1

    def admit(self, ids: Int[np.ndarray, " ids"], *, lock: bool = False) -> Admission:
        """Lets a batch in.

        Args:
          ids: linear ids; duplicates are welcome, ids outside `[0, num_ids)` get location -1 and change nothing.
          lock: keep every slot that this batch uses until `unlock(admission.locations)`, for batches that are
            prefetched while earlier ones are still at work.

        Raises: TypeError: `ids` is not a flat array of integers.
        """
        ids, is_cacheable = self._check_ids(ids)
        unique, inverse, occurrences = np.unique(ids[is_cacheable], return_inverse=True, return_counts=True)
        if self.counts is not None:
            self.counts[unique] += occurrences
        self._clock += 1
        slots = self._slots_of(unique)
        self._last_used[slots[slots >= 0]] = self._clock
        missing = np.flatnonzero(slots < 0)
        chosen, victims = self._choose_victims(unique[missing])
        inserted, evicted_ids = missing[chosen], self.tags[victims]
        self.tags[victims], self._last_used[victims], slots[inserted] = unique[inserted], self._clock, victims
        if lock:
            self._locks[slots[slots >= 0]] += 1
        locations = np.full(ids.shape, -1, np.int64)
        locations[is_cacheable] = slots[inverse]
        counts = CacheCounts(
            calls=1,
            requested_ids=ids.size,
            unique_ids=unique.size + int(inverse.size < ids.size),
            unique_misses=missing.size,
            unique_conflict_misses=missing.size - inserted.size,
            conflict_misses=int(occurrences[slots < 0].sum()),
            unique_hits=unique.size - missing.size,
        )
        return Admission(
            locations=locations,
            inserted_ids=unique[inserted],
            inserted_slots=victims,
            evicted_ids=evicted_ids,
            missed_ids=unique[missing],
            counts=counts,
        )

    def find(self, ids: Int[np.ndarray, " ids"]) -> Int64[np.ndarray, " ids"]:
        """The slot of each id, -1 where it is not resident; changes nothing. Raises: as `admit`."""
        ids, is_cacheable = self._check_ids(ids)
        locations = np.full(ids.shape, -1, np.int64)
        locations[is_cacheable] = self._slots_of(ids[is_cacheable])
        return locations

    def resident(self) -> tuple[Int64[np.ndarray, " resident"], Int64[np.ndarray, " resident"]]:
        """All resident ids and their slots, in the order of slots: what a flush has to write back."""
        slots = np.flatnonzero(self.tags >= 0)
        return self.tags[slots], slots

    def unlock(self, slots: Int[np.ndarray, " slots"]) -> None:
        """Takes back one `admit(lock=True)` of each of these slots; equal slots count once, -1 is skipped.

        Raises: ValueError: no such slot, or it is not locked; then no slot changes.
        """
        slots = self._check_slots(slots)
        if not self._locks[slots].all():
            unlocked = int(slots[self._locks[slots].argmin()])
            raise ValueError(f"slot {unlocked} is not locked; unlock the slots of each admitted batch exactly once.")
        self._locks[slots] -= 1

    def reset(self) -> None:
        """Forgets all ids, times and counts. Raises: ValueError: slots are locked."""
        if num_locked := np.count_nonzero(self._locks):
            raise ValueError(f"cannot reset a cache with {num_locked} locked slots; finish and unlock their batches.")
        self.tags[:], self._last_used[:], self._clock = -1, 0, 1
        if self.counts is not None:
            self.counts[:] = 0

    def _choose_victims(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of the missing ids, by place and grouped by set, get which slot."""
        worth = None if self.counts is None else self.counts[ids]
        order, sets, group, rank = _by_set(set_of(ids, self.num_sets), worth)
        slots = sets[:, None] * self.num_ways + np.arange(self.num_ways)
        tags, last_used = self.tags[slots], self._last_used[slots]
        key = last_used if self.counts is None else np.where(tags < 0, -1, self.counts[tags])
        key = np.where((last_used == self._clock) | (self._locks[slots] > 0), NEVER, key)
        by_key = np.argsort(key, axis=1, kind="stable")
        fits = rank < self.num_ways
        order, group, rank = order[fits], group[fits], rank[fits]
        way = by_key[group, rank]
        is_taken = key[group, way] <= (self._clock if worth is None else worth[order])
        return order[is_taken], slots[group, way][is_taken]

    def _slots_of(self, ids: np.ndarray) -> np.ndarray:
        tags, slots = self.tags.reshape(self.num_sets, self.num_ways), np.empty(ids.size, np.int64)
        # Blocks keep the compared tags in the processor's cache and memory bounded.
        for start in range(0, ids.size, IDS_PER_SEARCH):
            block = ids[start : start + IDS_PER_SEARCH]
            sets = set_of(block, self.num_sets)
            matches = tags[sets] == block[:, None]
            ways = matches.argmax(axis=1)
            found = matches[np.arange(block.size), ways]
            slots[start : start + IDS_PER_SEARCH] = np.where(found, sets * self.num_ways + ways, -1)
        return slots

    def _check_ids(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids = np.asarray(ids)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise TypeError(f"ids must be a flat integer array, got {ids.dtype} of shape {ids.shape}; convert them.")
        ids = ids.astype(np.int64)
        return ids, (ids >= 0) & (ids < self.num_ids)

    def _check_slots(self, slots: np.ndarray) -> np.ndarray:
        if not np.issubdtype(slots.dtype, np.integer):
            raise TypeError(f"slots must be an integer array, got {slots.dtype}.")
        slots = slots[slots != -1]
        if slots.size and not 0 <= slots.min() <= slots.max() < self.tags.size:
            raise ValueError(f"slots must be 0 to {self.tags.size - 1}, or -1; got {slots.min()} to {slots.max()}.")
        is_named = np.zeros(self.tags.size, bool)
        is_named[slots] = True
        return np.flatnonzero(is_named)


def _by_set(sets: np.ndarray, worth: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Groups ascending ids by their set, the worthiest first; without worth, or where it is equal, the lower id first.

    Returns: the order of the ids, the distinct sets and, in that order, the place of each id's set among them and the
      id's rank inside its set.
    """
    order = np.argsort(sets, kind="stable") if worth is None else np.lexsort((-worth, sets))
    distinct, first, sizes = np.unique(sets[order], return_index=True, return_counts=True)
    return order, distinct, np.repeat(np.arange(distinct.size), sizes), np.arange(sets.size) - np.repeat(first, sizes)

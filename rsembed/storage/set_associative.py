"""Set-associative device cache for a table in host memory.

`SetAssociativeCache` is the policy: exact LRU or LFU for a whole batch of ids, in NumPy, without a
loop over ids. A hash assigns each id to one set, and the cache can hold the id in any of the
`num_ways` slots of the set. Slot `set * num_ways + way` is a row of the device array.

`CachedRows` moves rows between host memory and the device array. The device array has the slots,
followed by a *scratch* area. If a batch reads a table row that gets no slot, this row is copied to
the scratch area. Evicted rows are written back to the host, and scratch rows are written back after
every update. The optimizer state of the rows is in separate device arrays, and is copied together
with the rows. The last device array contains the id in each slot and in each scratch row.

The methods of the policy and of the host store are called directly outside `jit`, and through
ordered callbacks inside `jit`. The lengths of the arrays that a callback returns depend only on the
number of ids in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Int, Int64, PyTree
from numpy.typing import ArrayLike

from rsembed.checks import NonNegativeInt, PositiveInt, validated
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW
from rsembed.sizes import padded_size
from rsembed.storage.backing_store import BackingStore, Moves, padded_rows
from rsembed.storage.donation import kept


class CacheCounts(NamedTuple):
    """Counters of one batch, or sums of counters over batches.

    All counters except `unique_hits` are counters of FBGEMM, in the order of FBGEMM.

    Attributes:
      calls: number of batches.
      requested_ids: number of ids, with duplicates and with ids that are not cacheable.
      unique_ids: number of distinct ids of each batch. All ids that are not cacheable count as one
        distinct id.
      unique_misses: number of distinct cacheable ids of each batch that were not in the cache
        before the batch.
      unique_conflict_misses: number of unique misses that got no slot.
      conflict_misses: number of cacheable ids in the batch that got no slot, with duplicates. Rows
        without a slot are read from the backing store.
      unique_hits: number of distinct cacheable ids of each batch that were in the cache before the
        batch.
    """

    calls: int = 0
    requested_ids: int = 0
    unique_ids: int = 0
    unique_misses: int = 0
    unique_conflict_misses: int = 0
    conflict_misses: int = 0
    unique_hits: int = 0


NEVER = np.iinfo(np.int64).max
"""Number that replaces the time of last use, or the count, of a slot that must keep its id.

`NEVER` is larger than any time of last use and any count."""

IDS_PER_SEARCH = 4096

MAX_LFU_SETS = 2**24 - 1
"""Exclusive upper bound of the number of sets for LFU.

FBGEMM packs the number of a set and a 40-bit count into 64 bits, so the number of a set has at most
24 bits. `SetAssociativeCache` uses FBGEMM's bound, so that FBGEMM supports every accepted cache
size."""


def set_of(ids: Int[np.ndarray, " ids"], num_sets: int) -> Int64[np.ndarray, " ids"]:
    """Set of each id: a 64-bit hash of the id, modulo the number of sets.

    Different ids have different 64-bit hashes.

    Source: Appleby, MurmurHash3, finaliser `fmix64`.

    Example:
      >>> set_of(np.array([0, 1, 2, 10**12]), 1000).tolist()
      [0, 604, 447, 300]
    """
    shift = np.uint64(33)
    bits = ids.astype(np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        bits = bits ^ (bits >> shift)
        bits = bits * np.uint64(factor)
    bits = bits ^ (bits >> shift)
    sets = bits % np.uint64(num_sets)
    return sets.astype(np.int64)


_NOTHING: Int64[np.ndarray, "0"] = np.zeros(0, np.int64)


class Admission(NamedTuple):
    """Changes of the cache for a batch, and the rows that the caller must move.

    Write the rows of `evicted_ids` back to the host before you load the rows of `inserted_ids`,
    because the inserted rows overwrite the evicted rows.

    Attributes:
      locations: slot of every id of the batch. -1 for an id that is not cacheable, and for a
        conflict miss. The row of a conflict miss is read from the backing store.
      inserted_ids: ids that were admitted to the cache, grouped by set.
      inserted_slots: slot of each admitted id.
      evicted_ids: previous id in each of `inserted_slots`, or -1 if the slot was empty.
      missed_ids: distinct cacheable ids that were not in the cache before the batch, in ascending
        order.
      counts: counters of the batch.
    """

    locations: Int64[np.ndarray, " ids"]
    inserted_ids: Int64[np.ndarray, " inserted"] = _NOTHING
    inserted_slots: Int64[np.ndarray, " inserted"] = _NOTHING
    evicted_ids: Int64[np.ndarray, " inserted"] = _NOTHING
    missed_ids: Int64[np.ndarray, " missed"] = _NOTHING
    counts: CacheCounts = CacheCounts()


NUM_WAYS = 32
"""Default number of slots per set."""


class SetAssociativeCache:
    """Cache policy: decides which ids are in the cache, and chooses their slots.

    `SetAssociativeCache` moves no rows. The caller moves the rows that `admit` returns. Call
    `admit` once for each batch. `admit` records the uses of the ids in the cache, and admits
    missing ids to the cache. `admit` sorts the missing ids and the slots of each set, in an order
    that depends on `algorithm`, and replaces the id in the slot at position `n` by the missing id
    at position `n`. Slots with an id of the batch, and locked slots, keep their ids. A missing id
    that gets no slot is a conflict miss, and its row is read from the backing store.

    * lru: the missing ids of a set are sorted by id, and the slots of the set by (time of last use,
      slot number), both in ascending order.
    * lfu: the missing ids of a set are sorted by descending count, then by ascending id. The slots
      of a set are sorted by (count of the id in the slot, slot number), in ascending order. An
      empty slot has count -1. A missing id does not replace an id with a larger count.

    LFU counts are exact: the count of an id includes all its uses in the current batch and in
    earlier batches, even if the id was not in the cache. LFU counts need 8 bytes of host memory for
    each of `num_ids` ids. The cache needs 24 bytes for each slot, and during `admit` about 48 bytes
    more for each slot of the sets that have a miss.

    Attributes:
      tags: id in each slot, -1 in empty slots. Do not modify `tags`.
      counts: number of uses of each id. None if the algorithm is LRU. Do not modify `counts`.

    Source: the functions `lru_cache_populate` and `lfu_cache_populate` in FBGEMM. Unlike FBGEMM,
      `SetAssociativeCache` with LFU never evicts an id of the current batch.

    Example:
      >>> cache = SetAssociativeCache(1, num_ways=2, num_ids=100)
      >>> cache.admit(np.array([7, 7, 8, 9])).locations.tolist()
      [0, 0, 1, -1]
      >>> cache.admit(np.array([9])).evicted_ids.tolist()
      [7]
    """

    @validated
    def __init__(
        self,
        num_sets: PositiveInt,
        *,
        num_ways: PositiveInt = NUM_WAYS,
        algorithm: Literal["lru", "lfu"] = "lru",
        num_ids: NonNegativeInt,
    ) -> None:
        """Creates an empty cache.

        Args:
          num_sets: number of sets.
          num_ways: number of slots in each set, 32 by default. The smaller `num_ways` is, the more
            missing ids get no slot. The larger `num_ways` is, the longer every search for an id
            takes.
          algorithm: "lru", the default, evicts the least recently used ids. "lfu" evicts the least
            frequently used ids.
          num_ids: number of cacheable ids. The cacheable ids are 0 to `num_ids - 1`.

        Raises: ValueError: a size is too small, the algorithm is unknown, or `num_sets` is too
          large for LFU, see `MAX_LFU_SETS`.
        """
        if algorithm == "lfu" and num_sets >= MAX_LFU_SETS:
            raise ValueError(
                f"num_sets={num_sets} is too large for 'lfu', which takes fewer than {MAX_LFU_SETS}."
            )
        self.num_sets = num_sets
        self.num_ways = num_ways
        self.num_ids = num_ids
        self.algorithm = algorithm
        num_slots = num_sets * num_ways
        self.tags: Int64[np.ndarray, " slots"] = np.full(num_slots, -1, np.int64)
        self.counts: Int64[np.ndarray, " vocab"] | None = None
        if algorithm == "lfu":
            self.counts = np.zeros(num_ids, np.int64)
        self._last_used = np.zeros(num_slots, np.int64)
        self._locks = np.zeros(num_slots, np.int64)
        self._clock = 1

    @validated
    def admit(self, ids: Int[np.ndarray, " ids"], *, lock: bool = False) -> Admission:
        """Admits the ids of a batch to the cache, and returns their slots and the rows to move.

        Args:
          ids: ids of the batch. Ids may repeat. Ids outside `[0, num_ids)` get location -1, and do
            not change the cache.
          lock: whether all slots with ids of the batch are locked, False by default. Locked slots
            keep their ids until a call of `unlock(admission.locations)`. Lock the slots of a batch
            that is prefetched while earlier batches are in use.

        Raises: TypeError: `ids` is not a flat array of integers.
        """
        ids, is_cacheable = self._cacheable(ids)
        unique, inverse, occurrences = np.unique(
            ids[is_cacheable],
            return_inverse=True,
            return_counts=True,
        )
        if self.counts is not None:
            self.counts[unique] += occurrences
        self._clock += 1
        slots = self._slots_of(unique)
        self._last_used[slots[slots >= 0]] = self._clock
        missing = np.flatnonzero(slots < 0)
        chosen, victims = self._choose_victims(unique[missing])
        inserted = missing[chosen]
        evicted_ids = self.tags[victims]
        self.tags[victims] = unique[inserted]
        self._last_used[victims] = self._clock
        slots[inserted] = victims
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
            locations,
            inserted_ids=unique[inserted],
            inserted_slots=victims,
            evicted_ids=evicted_ids,
            missed_ids=unique[missing],
            counts=counts,
        )

    @validated
    def find(self, ids: Int[np.ndarray, " ids"]) -> Int64[np.ndarray, " ids"]:
        """Slot of each id, -1 if the id is not in the cache. `find` does not change the cache.

        Raises: TypeError: `ids` is not a flat array of integers.
        """
        ids, is_cacheable = self._cacheable(ids)
        locations = np.full(ids.shape, -1, np.int64)
        locations[is_cacheable] = self._slots_of(ids[is_cacheable])
        return locations

    def resident(self) -> tuple[Int64[np.ndarray, " resident"], Int64[np.ndarray, " resident"]]:
        """All ids in the cache and their slots, in the order of slots."""
        slots = np.flatnonzero(self.tags >= 0)
        return self.tags[slots], slots

    @validated
    def unlock(self, slots: Int[np.ndarray, " slots"]) -> None:
        """Removes one lock from each of `slots`.

        A call of `admit` with `lock=True` adds one lock to each slot with an id of the batch.

        Args:
          slots: slots to unlock. Duplicates are ignored, and -1 is skipped.

        Raises:
          TypeError: `slots` is not a flat array of integers.
          ValueError: a slot does not exist or is not locked. If `unlock` raises an error, it
            removes no lock.
        """
        slots = np.unique(slots[slots != -1])
        if slots.size and not 0 <= slots[0] <= slots[-1] < self.tags.size:
            raise ValueError(
                f"slots must be 0 to {self.tags.size - 1}, or -1; got {slots[0]} to {slots[-1]}."
            )
        if not self._locks[slots].all():
            unlocked = int(slots[self._locks[slots].argmin()])
            raise ValueError(
                f"slot {unlocked} is not locked; unlock the slots of each admitted batch exactly once."
            )
        self._locks[slots] -= 1

    def reset(self) -> None:
        """Empties the cache: removes all ids, times of last use and LFU counts.

        Raises: ValueError: one or more slots of the cache are locked.
        """
        if num_locked := np.count_nonzero(self._locks):
            raise ValueError(
                f"cannot reset a cache with {num_locked} locked slots; finish and unlock their batches."
            )
        self.tags[:] = -1
        self._last_used[:] = 0
        self._clock = 1
        if self.counts is not None:
            self.counts[:] = 0

    def restore(self, tags: Int[np.ndarray, " slots"]) -> None:
        """Replaces the ids in all slots and removes all locks, but does not change the LFU counts.

        Args:
          tags: new id in each slot, -1 for empty slots.
        """
        self.tags[:] = tags
        self._locks[:] = 0
        self._last_used[self.tags < 0] = 0

    def _choose_victims(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Chooses missing ids to admit, and their slots.

        Args:
          ids: missing ids, distinct and in ascending order.

        Returns: two arrays, grouped by set: the index in `ids` of each id to admit, and the slot
          that this id gets.
        """
        set_of_id = set_of(ids, self.num_sets)
        worth = np.full(ids.size, self._clock)
        if self.counts is not None:
            worth = self.counts[ids]
        # Sort ids by set, then by descending count (LFU only), then by ascending id.
        order = np.lexsort((-worth, set_of_id))
        sets, first, sizes = np.unique(
            set_of_id[order],
            return_index=True,
            return_counts=True,
        )
        first_slots = sets[:, None] * self.num_ways
        slots = first_slots + np.arange(self.num_ways)
        last_used = self._last_used[slots]
        slot_worth = last_used
        if self.counts is not None:
            tags = self.tags[slots]
            slot_worth = np.where(tags < 0, -1, self.counts[tags])
        is_in_use = last_used == self._clock
        is_protected = is_in_use | (self._locks[slots] > 0)
        slot_worth = np.where(is_protected, NEVER, slot_worth)
        by_worth = np.argsort(slot_worth, axis=1, kind="stable")
        # In each set, the missing id with rank `r` in `order` is admitted to the slot with rank `r`
        # in `by_worth`, or is not admitted.
        rank = np.arange(ids.size) - np.repeat(first, sizes)
        fits = rank < self.num_ways
        chosen = order[fits]
        row = np.repeat(np.arange(sets.size), sizes)[fits]
        way = by_worth[row, rank[fits]]
        is_taken = slot_worth[row, way] <= worth[chosen]
        victims = slots[row, way]
        return chosen[is_taken], victims[is_taken]

    def _slots_of(self, ids: np.ndarray) -> np.ndarray:
        """Slot of each cacheable id, -1 if the id is not in the cache."""
        tags = self.tags.reshape(self.num_sets, self.num_ways)
        slots = np.empty(ids.size, np.int64)
        # The ids are searched in blocks, to save memory, and so that the compared tags of a block
        # fit into the CPU cache.
        for start in range(0, ids.size, IDS_PER_SEARCH):
            block = slice(start, start + IDS_PER_SEARCH)
            sets = set_of(ids[block], self.num_sets)
            is_match = tags[sets] == ids[block][:, None]
            first_slots = sets * self.num_ways
            matches = first_slots + is_match.argmax(axis=1)
            slots[block] = np.where(is_match.any(axis=1), matches, -1)
        return slots

    def _cacheable(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids as int64, and a mask of the cacheable ids, which are the ids in `[0, num_ids)`."""
        ids = np.asarray(ids, np.int64)
        is_cacheable = (ids >= 0) & (ids < self.num_ids)
        return ids, is_cacheable


_scatter = jax.jit(api.scatter_rows, donate_argnums=0)
_ROWS_PER_FLUSH = 1 << 16
Leaving = Callable[[Int[Array, " places"]], Sequence[Array]]
"""Function that gathers rows of the device arrays, to write them to the host.

A `Leaving` function takes an array of row indices, and returns the rows of all device arrays except
the last one, which contains ids."""


class BatchPlaces(NamedTuple):
    """Rows of the device array for the ids of a batch, and the rows to exchange with the host.

    Attributes:
      rows: table row of each id of the batch. Padding has row -1. A row number of `cache.num_ids`
        or more is out of range.
      places: for each of `rows`, its index in the device array: a slot or a scratch row. -1 if the
        row is not on the device.
      moves: rows to exchange with the host.
      admission: changes of the cache for the batch.
    """

    rows: Int[np.ndarray, " ids"]
    places: Int[np.ndarray, " ids"]
    moves: Moves
    admission: Admission


class CachedRows:
    """Table in host memory, with a set-associative cache on the device.

    Attributes:
      cache: cache policy, which decides which rows are in the cache.
      backing: store of all rows in host memory.
      scratch_rows: numbers of the table rows that are in the scratch area.
    """

    def __init__(self, cache: SetAssociativeCache, backing: BackingStore):
        self.cache = cache
        self.backing = backing
        self.scratch_rows = _NOTHING

    @property
    def num_slots(self) -> int:
        """Number of slots of the cache."""
        return self.cache.num_sets * self.cache.num_ways

    def find(
        self,
        rows: Int[np.ndarray, " ids"],
        *,
        admit: bool,
        lock: bool = False,
        is_prefetch: bool = False,
        num_moves: int | None = None,
    ) -> BatchPlaces:
        """Finds or assigns a row of the device array for each table row that a batch reads.

        Table rows that get no slot are assigned rows of the scratch area, unless the call is a
        prefetch.

        Args:
          rows: table row of each id of the batch, see `BatchPlaces`.
          admit: whether missing rows are admitted to the cache. If `admit` is False, no row is
            admitted or evicted.
          lock: whether the slots of the batch are locked, False by default, see
            `SetAssociativeCache.admit`.
          is_prefetch: whether this call only prefetches rows. For a prefetched batch, call `find`
            again before the lookup.
          num_moves: length of the arrays of `moves`, padding included. None, the default, means the
            next power of two.
        """
        if admit:
            admission = self.cache.admit(rows, lock=lock)
        else:
            slots = self.cache.find(rows)
            admission = Admission(slots)
        places = admission.locations
        inserted = admission.inserted_ids
        inserted_places = admission.inserted_slots
        self.scratch_rows = _NOTHING
        if not is_prefetch:
            needs_scratch = (places < 0) & (rows >= 0) & (rows < self.cache.num_ids)
            self.scratch_rows, number = np.unique(rows[needs_scratch], return_inverse=True)
            places[needs_scratch] = self.num_slots + number
            scratch_places = self.num_slots + np.arange(self.scratch_rows.size)
            inserted = np.concatenate([inserted, self.scratch_rows])
            inserted_places = np.concatenate([inserted_places, scratch_places])
        was_taken = admission.evicted_ids >= 0
        evicted = admission.evicted_ids[was_taken]
        evicted_places = admission.inserted_slots[was_taken]
        moves = Moves(
            evicted=padded_rows(evicted, num_moves),
            evicted_places=padded_rows(evicted_places, num_moves),
            inserted=padded_rows(inserted, num_moves),
            inserted_places=padded_rows(inserted_places, num_moves),
        )
        return BatchPlaces(rows, places, moves, admission)

    def bring(
        self,
        arrays: tuple[Array, ...],
        moves: Moves,
        leaving: Leaving,
        keep: Callable[[tuple[Array, ...]], None],
        *,
        is_inside: bool,
    ) -> tuple[Array, ...]:
        """Exchanges the rows in `moves` with the host, and returns the new device arrays.

        The scratch area is enlarged if it is too small for the batch. Inside `jit`, the number of
        rows in use is not known during tracing, so the scratch area gets room for all entries of
        `moves.inserted`, or for all rows of the table if the table is smaller.

        Args:
          arrays: device arrays before the exchange, which `bring` donates.
          moves: rows to exchange, as `find` returned them.
          leaving: function that gathers the evicted rows from the device arrays, see `Leaving`.
          keep: function that stores the new arrays, see `donation.kept`. Ctrl-C is delayed until
            `keep` has stored the new arrays, because `arrays` are donated.
          is_inside: whether the call is inside `jit`. If True, `BackingStore.exchange` runs in a
            host callback.
        """
        num_inserted = moves.inserted.shape[0]
        # If no rows are inserted, no rows are evicted, because rows are evicted only to make room.
        if not num_inserted:
            return arrays
        num_scratch = len(self.scratch_rows)
        shapes = None
        if is_inside:
            num_scratch = min(num_inserted, self.cache.num_ids)
            shapes = []
            for array in arrays[:-1]:
                shape = (num_inserted, *array.shape[1:])
                shapes.append(jax.ShapeDtypeStruct(shape, array.dtype))
        if self.num_slots + num_scratch > arrays[0].shape[0]:
            size = self.num_slots + padded_size(num_scratch)
            arrays = tuple(_enlarged(array, size) for array in arrays)
        evicted_values = leaving(jnp.asarray(moves.evicted_places))
        loaded = call_host(
            self.backing.exchange,
            shapes,
            moves.evicted,
            evicted_values,
            moves.inserted,
        )
        brought: tuple[Array, ...] = kept(
            keep,
            _scatter,
            arrays,
            moves.inserted_places,
            (*loaded, moves.inserted),
        )
        return brought

    def scratch(
        self,
        num_rows: int,
        leaving: Leaving,
        *,
        is_inside: bool,
    ) -> Sequence[Array] | None:
        """Gathers the rows of the scratch area, for `store_scratch`.

        The result is None if the scratch area is empty.

        Args:
          num_rows: number of rows of the device arrays.
          leaving: function that gathers rows of the device arrays, see `Leaving`.
          is_inside: whether the call is inside `jit`. If True, all rows of the scratch area are
            gathered, because the number of rows in use is not known during tracing.
        """
        size = padded_size(len(self.scratch_rows))
        if is_inside:
            size = num_rows - self.num_slots
        if not size:
            return None
        return leaving(self.num_slots + jnp.arange(size, dtype=jnp.int32))

    def store_scratch(self, values: Sequence[ArrayLike] | None) -> None:
        """Writes the rows in the scratch area to the host.

        Args:
          values: result of `scratch`. If `values` is None, no row is written.
        """
        if values is not None:
            self.backing.write(self.scratch_rows, values)

    def follow(self, resident_rows: Int[np.ndarray, " places"]) -> None:
        """Restores the cache policy from the device arrays after an interrupted exchange.

        Args:
          resident_rows: table row that each row of the device arrays holds, or `NO_ROW`.
        """
        in_slots = resident_rows[: self.num_slots].astype(np.int64)
        self.cache.restore(np.where(in_slots == NO_ROW, -1, in_slots))
        self.scratch_rows = _NOTHING

    def flush(self, leaving: Leaving) -> None:
        """Writes all rows in the cache to the host, and keeps the rows in the cache.

        Args:
          leaving: function that gathers rows of the device arrays, see `Leaving`.
        """
        rows, slots = self.cache.resident()
        for first in range(0, rows.size, _ROWS_PER_FLUSH):
            block = slice(first, first + _ROWS_PER_FLUSH)
            padded_slots = jnp.asarray(padded_rows(slots[block]))
            self.backing.write(rows[block], leaving(padded_slots))


def _enlarged(array: Array, size: int) -> Array:
    """Appends rows of zeros to an array until the array has `size` rows."""
    num_added = size - array.shape[0]
    zeros = jnp.zeros((num_added, *array.shape[1:]), array.dtype)
    return jnp.concatenate([array, zeros])


def call_host(function: Callable[..., PyTree], shapes: PyTree, *operands: PyTree) -> PyTree:
    """Calls a function on the host, and returns its result.

    Args:
      function: function of NumPy or JAX arrays.
      shapes: shapes and dtypes of the result, for a call through an ordered `io_callback`. If
        `shapes` is None, `function` is called without a callback.
      *operands: arguments of `function`.
    """
    if shapes is None:
        return function(*operands)
    return io_callback(function, shapes, *operands, ordered=True)

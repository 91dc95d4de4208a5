"""Set-associative device cache for a table that is on the host.

The policy is exact LRU or LFU for whole batches of ids, in NumPy, without a loop over ids. An id
hashes to one set and can be in any way of this set. The slot of the id is `set * num_ways + way`.
The slot is the row of the device array that holds the id.

After the slots, the device array (`CachedRows`) has a *scratch* area for rows without a slot. Rows
are written back to the host when they are evicted or flushed, and scratch rows after every update.
Optimizer state is in separate arrays and moves with its row. The last of these arrays has the table
row in each slot and in each row of the scratch area.

Outside `jit`, policy and stores are called directly. Inside `jit`, they are called through ordered
callbacks with room for one row per id.
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
    """Counters of one call, or sums over calls.

    The first six are the counters of FBGEMM, in FBGEMM's order.

    Attributes:
      calls: number of batches.
      requested_ids: number of ids, with duplicates and with ids that are not cacheable.
      unique_ids: sum over batches of the number of distinct ids. All ids that are not cacheable
        count as one distinct id.
      unique_misses: sum over batches of the number of distinct cacheable ids that were not resident
        before the batch.
      unique_conflict_misses: number of unique misses that got no slot.
      conflict_misses: number of lookups of ids without a slot, with duplicates. The rows of ids
        without a slot are read from the backing store.
      unique_hits: sum over batches of the number of distinct cacheable ids that were resident
        before the batch.
    """

    calls: int = 0
    requested_ids: int = 0
    unique_ids: int = 0
    unique_misses: int = 0
    unique_conflict_misses: int = 0
    conflict_misses: int = 0
    unique_hits: int = 0


NEVER = np.iinfo(np.int64).max
"""Rank of a slot that may not be evicted: above every count and every time."""

IDS_PER_SEARCH = 4096

MAX_LFU_SETS = 2**24 - 1
"""Limit of the number of sets for LFU.

FBGEMM packs the set number with a 40-bit count. With the limit of FBGEMM, a configuration works in
both libraries."""


def set_of(ids: Int[np.ndarray, " ids"], num_sets: int) -> Int64[np.ndarray, " ids"]:
    """The set of each id: a 64-bit hash of the id, modulo the number of sets.

    The hash is a bijection of 64-bit numbers.

    Source: Appleby, MurmurHash3, finaliser `fmix64`.

    Example:
      >>> set_of(np.array([0, 1, 2, 10**12]), 1000).tolist()
      [0, 604, 447, 300]
    """
    bits = ids.astype(np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        bits = (bits ^ (bits >> np.uint64(33))) * np.uint64(factor)
    return ((bits ^ (bits >> np.uint64(33))) % np.uint64(num_sets)).astype(np.int64)


_NOTHING: Int64[np.ndarray, "0"] = np.zeros(0, np.int64)


class Admission(NamedTuple):
    """Changes of the cache by a batch, and the rows that have to be moved for it.

    Write back the rows of `evicted_ids` before loading `inserted_ids`, because both use the same
    slots.

    Attributes:
      locations: slot of every id of the batch. -1 for a conflict miss, to be read from the backing
        store, and for an id that is not cacheable.
      inserted_ids: ids that were admitted, grouped by set.
      inserted_slots: slot of each admitted id.
      evicted_ids: id that had each of `inserted_slots` before. -1 if the slot was empty.
      missed_ids: distinct ids that were not resident before the batch, in ascending order.
      counts: cache counts of this batch.
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
    """Cache policy: decides which ids are resident, and their slots. The caller moves the rows.

    Call `admit` once per batch. The call marks the resident ids as used and admits missing ids. In
    each set, the best missing ids get the worst slots one by one. Slots that the batch uses, and
    locked slots, are never taken. No id of the batch is therefore evicted. An id that gets no slot
    is a conflict miss, and its row is read from the backing store.

    * lru: missing ids in ascending order get the slots in order of (time of last use, slot number).
    * lfu: missing ids in order of (descending count, id) get the slots in order of (count of the
      resident id, slot number). An empty slot has count -1. A resident id with a larger count than
      the missing id stays.

    Counts are exact. The counts include all ids from the start, resident or not, and the current
    batch. Counts need 8 bytes of host memory per id of `num_ids`. The cache itself needs 24 bytes
    per slot. While `admit` runs, it needs about 48 bytes for each slot of the sets with a miss.

    Attributes:
      tags: id in each slot, -1 in empty slots. Read only.
      counts: number of uses of each id. None if the algorithm is LRU. Read only.

    Source: FBGEMM, `lru_cache_populate` and `lfu_cache_populate`. Under LFU, the protection of the
      current batch is our addition.

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
          num_ways: number of slots per set, 32 by default. Fewer slots cause more conflict misses.
            More slots make every search longer.
          algorithm: "lru", the default, evicts the least recently used ids. "lfu" evicts the least
            frequently used ids.
          num_ids: number of cacheable ids, which are 0 to `num_ids - 1`.

        Raises: ValueError: a size is too small, the algorithm is unknown, or LFU has
          `MAX_LFU_SETS` sets or more.
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
        """Admits the ids of a batch, and returns their slots and the row moves for them.

        Args:
          ids: ids of the batch, which may repeat. Ids outside `[0, num_ids)` get location -1 and
            change nothing.
          lock: whether every slot that the batch uses is kept until `unlock(admission.locations)`.
            Use `lock=True` for batches that are prefetched while earlier batches are in use. False
            is the default.

        Raises: TypeError: `ids` is not a flat array of integers.
        """
        ids, is_cacheable = self._cacheable(ids)
        unique, inverse, occurrences = np.unique(
            ids[is_cacheable], return_inverse=True, return_counts=True
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
        return Admission(locations, unique[inserted], victims, evicted_ids, unique[missing], counts)

    @validated
    def find(self, ids: Int[np.ndarray, " ids"]) -> Int64[np.ndarray, " ids"]:
        """Slot of each id, -1 if it is not resident. The cache does not change.

        Raises: TypeError: `ids` is not a flat array of integers.
        """
        ids, is_cacheable = self._cacheable(ids)
        locations = np.full(ids.shape, -1, np.int64)
        locations[is_cacheable] = self._slots_of(ids[is_cacheable])
        return locations

    def resident(self) -> tuple[Int64[np.ndarray, " resident"], Int64[np.ndarray, " resident"]]:
        """All resident ids and their slots, in the order of slots.

        A flush writes all resident rows back to the host.
        """
        slots = np.flatnonzero(self.tags >= 0)
        return self.tags[slots], slots

    @validated
    def unlock(self, slots: Int[np.ndarray, " slots"]) -> None:
        """Removes one lock from each of these slots, set by `admit(lock=True)`.

        Args:
          slots: slots to unlock. Duplicates count once, and -1 is skipped.

        Raises:
          TypeError: `slots` is not a flat array of integers.
          ValueError: a slot does not exist or is not locked. After this error, no slot is unlocked.
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
        """Empties the cache: removes all ids, last-use times and LFU counts.

        Raises: ValueError: slots are locked.
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
        """Sets the id in each slot (-1: empty) and removes all locks. Counts do not change."""
        self.tags[:] = tags
        self._locks[:] = 0
        self._last_used[self.tags < 0] = 0

    def _choose_victims(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Missing ids that get a slot, as indices into `ids` grouped by set, and their slots.

        Args:
          ids: missing ids, distinct and in ascending order.
        """
        set_of_id = set_of(ids, self.num_sets)
        worth = np.full(ids.size, self._clock)
        if self.counts is not None:
            worth = self.counts[ids]
        # By set, then by descending count (LFU only), then by ascending id.
        order = np.lexsort((-worth, set_of_id))
        sets, first, sizes = np.unique(set_of_id[order], return_index=True, return_counts=True)
        slots = sets[:, None] * self.num_ways + np.arange(self.num_ways)
        last_used = self._last_used[slots]
        slot_worth = last_used
        if self.counts is not None:
            tags = self.tags[slots]
            slot_worth = np.where(tags < 0, -1, self.counts[tags])
        is_protected = (last_used == self._clock) | (self._locks[slots] > 0)
        slot_worth = np.where(is_protected, NEVER, slot_worth)
        by_worth = np.argsort(slot_worth, axis=1, kind="stable")
        # In each set, the best id meets the worst slot, the second id the second slot, and so on.
        rank = np.arange(ids.size) - np.repeat(first, sizes)
        fits = rank < self.num_ways
        chosen = order[fits]
        row = np.repeat(np.arange(sets.size), sizes)[fits]
        way = by_worth[row, rank[fits]]
        is_taken = slot_worth[row, way] <= worth[chosen]
        return chosen[is_taken], slots[row, way][is_taken]

    def _slots_of(self, ids: np.ndarray) -> np.ndarray:
        """Slot of each cacheable id, -1 if it is not resident."""
        tags = self.tags.reshape(self.num_sets, self.num_ways)
        slots = np.empty(ids.size, np.int64)
        # Blocks bound the memory, and keep the compared tags in the CPU cache.
        for start in range(0, ids.size, IDS_PER_SEARCH):
            block = slice(start, start + IDS_PER_SEARCH)
            sets = set_of(ids[block], self.num_sets)
            matches = tags[sets] == ids[block][:, None]
            first_slots = sets * self.num_ways
            slots[block] = np.where(matches.any(axis=1), first_slots + matches.argmax(axis=1), -1)
        return slots

    def _cacheable(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids as int64, and the mask of the ids that can have a slot."""
        ids = np.asarray(ids, np.int64)
        return ids, (ids >= 0) & (ids < self.num_ids)


_scatter = jax.jit(api.scatter_rows, donate_argnums=0)
_ROWS_PER_FLUSH = 1 << 16
Leaving = Callable[[Int[Array, " places"]], Sequence[Array]]
"""Function from rows of the device arrays to the values that the host stores for them.

The last device array, with the ids of the rows, is left out."""


class BatchPlaces(NamedTuple):
    """Device rows of the ids of a batch, and the moves that bring the rows there.

    Attributes:
      rows: table row of each id of the batch. `cache.num_ids` or more for rows that do not exist,
        -1 for no id.
      places: device row of each of `rows`, in a slot or in the scratch area, or -1 if it has none.
      moves: rows to exchange with the host.
      admission: decisions of the cache policy.
    """

    rows: Int[np.ndarray, " ids"]
    places: Int[np.ndarray, " ids"]
    moves: Moves
    admission: Admission


class CachedRows:
    """Rows on the host with a set-associative cache on the device.

    Attributes:
      cache: cache policy, which decides which rows are on the device.
      backing: store of all rows.
      scratch_rows: rows of the last batch that are in the scratch area.
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
        """The device row of each row of a batch, and the moves for it.

        Rows without a slot get a device row in the scratch area, after the slots. A prefetch
        assigns no row of the scratch area.

        Args:
          rows: table row of each id of the batch, see `BatchPlaces`.
          admit: whether missing rows are admitted to the cache. With False, the cache is only
            searched.
          lock: whether the slots are locked until they are unlocked, see
            `SetAssociativeCache.admit`.
          is_prefetch: whether the batch is looked up later.
          num_moves: size of the arrays of `moves`, padding included. None, the default: the next
            power of two.
        """
        admission = self.cache.admit(rows, lock=lock) if admit else Admission(self.cache.find(rows))
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
        moves = Moves(
            evicted=padded_rows(admission.evicted_ids[was_taken], num_moves),
            evicted_places=padded_rows(admission.inserted_slots[was_taken], num_moves),
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
        """Makes the moves, and returns the device arrays with all rows of the last batch.

        Args:
          arrays: device arrays before the moves, which are donated. The scratch area is enlarged if
            the batch needs it; inside `jit`, if a batch of the size of `moves` may need it.
          moves: moves of the batch, from `find`.
          leaving: function that returns the values of evicted rows, see `Leaving`.
          keep: receives the new arrays before Ctrl-C can interrupt. Without `keep`, both old and
            new arrays could be lost, because the old ones are donated.
          is_inside: whether the call is inside `jit`. If so, the host is reached through a
            callback.
        """
        num_inserted = moves.inserted.shape[0]
        if not num_inserted:  # A row is evicted only if another row takes its slot.
            return arrays
        num_scratch = len(self.scratch_rows)
        shapes = None
        if is_inside:
            num_scratch = min(num_inserted, self.cache.num_ids)
            shapes = []
            for array in arrays[:-1]:
                shapes.append(jax.ShapeDtypeStruct((num_inserted, *array.shape[1:]), array.dtype))
        if self.num_slots + num_scratch > arrays[0].shape[0]:
            size = self.num_slots + padded_size(num_scratch)
            arrays = tuple(_enlarged(array, size) for array in arrays)
        evicted_values = leaving(jnp.asarray(moves.evicted_places))
        exchange = self.backing.exchange
        loaded = call_host(exchange, shapes, moves.evicted, evicted_values, moves.inserted)
        new_rows = (*loaded, moves.inserted)
        brought: tuple[Array, ...] = kept(keep, _scatter, arrays, moves.inserted_places, new_rows)
        return brought

    def scratch(
        self, num_rows: int, leaving: Leaving, *, is_inside: bool
    ) -> Sequence[Array] | None:
        """Values in the scratch area, for `store_scratch`. None if the area is empty.

        Args:
          num_rows: number of rows of the device arrays.
          leaving: function that returns the values of device rows, see `Leaving`.
          is_inside: whether the call is inside `jit`. If so, the whole area is read.
        """
        size = padded_size(len(self.scratch_rows))
        if is_inside:
            size = num_rows - self.num_slots
        if not size:
            return None
        return leaving(self.num_slots + jnp.arange(size, dtype=jnp.int32))

    def store_scratch(self, values: Sequence[ArrayLike] | None) -> None:
        """Writes the scratch rows of the last batch to the store. None: nothing is written."""
        if values is not None:
            self.backing.write(self.scratch_rows, values)

    def follow(self, resident_rows: Int[np.ndarray, " places"]) -> None:
        """Sets the cache to the rows that the device has, after moves that were interrupted.

        Args:
          resident_rows: table row in each device row, or `NO_ROW`.
        """
        in_slots = resident_rows[: self.num_slots].astype(np.int64)
        self.cache.restore(np.where(in_slots == NO_ROW, -1, in_slots))
        self.scratch_rows = _NOTHING

    def flush(self, leaving: Leaving) -> None:
        """Writes all resident rows to the store. The rows stay resident."""
        rows, slots = self.cache.resident()
        for first in range(0, rows.size, _ROWS_PER_FLUSH):
            block = slice(first, first + _ROWS_PER_FLUSH)
            self.backing.write(rows[block], leaving(jnp.asarray(padded_rows(slots[block]))))


def _enlarged(array: Array, size: int) -> Array:
    """The array followed by zeros, up to `size` rows."""
    zeros = jnp.zeros((size - array.shape[0], *array.shape[1:]), array.dtype)
    return jnp.concatenate([array, zeros])


def call_host(function: Callable[..., PyTree], shapes: PyTree, *operands: PyTree) -> PyTree:
    """Result of `function`, which runs on the host.

    Args:
      function: function of NumPy or JAX arrays.
      shapes: shapes and dtypes of the result, for an ordered `io_callback`. None: `function` is
        called directly.
      operands: arguments of `function`.
    """
    if shapes is None:
        return function(*operands)
    return io_callback(function, shapes, *operands, ordered=True)

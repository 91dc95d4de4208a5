"""Which rows of a table on the host a device has: a set-associative cache, and the rows that move for it.

The policy is exact LRU or LFU for whole batches of ids, in numpy, without a loop over ids. An id hashes to one set and
may sit in any of the set's ways; its slot is `set * num_ways + way`, the row of the device's array that holds it.

Behind the slots, the array of a device (`NearRows`) has a *scratch* area for rows that found none. Rows go back to the
host when they are evicted or flushed; scratch rows after every update. What belongs to a row, such as its optimizer
state, lies in arrays beside it and travels with it; the last of these arrays says which row is where.

Outside of `jit` policy and stores are called directly; inside, through ordered callbacks with room for one row per id.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Int64, PyTree
from numpy.typing import ArrayLike

from rsembed.bags import kept, padded_size
from rsembed.checks import NonNegativeInt, PositiveInt, validated
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW
from rsembed.storage.host_cached import BackingStore


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


NEVER = np.iinfo(np.int64).max
"""Rank of a slot that may not be a victim: above every count and every time."""

IDS_PER_SEARCH = 4096

MAX_LFU_SETS = 2**24 - 1
"""FBGEMM packs the set number beside a 40-bit count; the limit is kept so that a configuration works in both."""


def set_of(ids: Int[np.ndarray, " ids"], num_sets: int) -> Int64[np.ndarray, " ids"]:
    """The set of each id: its bits, scrambled by a bijection of 64-bit numbers, modulo the number of sets.

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
    inserted_ids: Int64[np.ndarray, " inserted"] = _NOTHING
    inserted_slots: Int64[np.ndarray, " inserted"] = _NOTHING
    evicted_ids: Int64[np.ndarray, " inserted"] = _NOTHING
    missed_ids: Int64[np.ndarray, " missed"] = _NOTHING
    counts: CacheCounts = CacheCounts()


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
        self,
        num_sets: PositiveInt,
        *,
        num_ways: PositiveInt = NUM_WAYS,
        algorithm: Literal["lru", "lfu"] = "lru",
        num_ids: NonNegativeInt,
    ) -> None:
        """An empty cache.

        Args:
          num_sets: sets.
          num_ways: slots per set. Fewer lose hits to collisions; more make every search longer.
          algorithm: "lru" or "lfu".
          num_ids: ids are 0 to `num_ids - 1`; `num_ids` itself and all others are not cacheable.

        Raises: ValueError: a size is too small, the algorithm is unknown, or LFU has 2**24 - 1 sets or more.
        """
        if algorithm == "lfu" and num_sets >= MAX_LFU_SETS:
            raise ValueError(
                f"num_sets={num_sets} is too large for 'lfu', which takes fewer than {MAX_LFU_SETS}."
            )
        self.num_sets, self.num_ways, self.num_ids, self.algorithm = (
            num_sets,
            num_ways,
            num_ids,
            algorithm,
        )
        num_slots = num_sets * num_ways
        self.tags: Int64[np.ndarray, " slots"] = np.full(num_slots, -1, np.int64)
        self.counts: Int64[np.ndarray, " vocab"] | None = (
            np.zeros(num_ids, np.int64) if algorithm == "lfu" else None
        )
        self._last_used = np.zeros(num_slots, np.int64)
        self._locks = np.zeros(num_slots, np.int64)
        self._clock = 1

    @validated
    def admit(self, ids: Int[np.ndarray, " ids"], *, lock: bool = False) -> Admission:
        """Lets a batch in.

        Args:
          ids: linear ids; duplicates are welcome, ids outside `[0, num_ids)` get location -1 and change nothing.
          lock: keep every slot that this batch uses until `unlock(admission.locations)`, for batches that are
            prefetched while earlier ones are still at work.

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
        inserted, evicted_ids = missing[chosen], self.tags[victims]
        self.tags[victims], self._last_used[victims], slots[inserted] = (
            unique[inserted],
            self._clock,
            victims,
        )
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
        """The slot of each id, -1 where it is not resident; changes nothing. Raises: as `admit`."""
        ids, is_cacheable = self._cacheable(ids)
        locations = np.full(ids.shape, -1, np.int64)
        locations[is_cacheable] = self._slots_of(ids[is_cacheable])
        return locations

    def resident(self) -> tuple[Int64[np.ndarray, " resident"], Int64[np.ndarray, " resident"]]:
        """All resident ids and their slots, in the order of slots: what a flush has to write back."""
        slots = np.flatnonzero(self.tags >= 0)
        return self.tags[slots], slots

    @validated
    def unlock(self, slots: Int[np.ndarray, " slots"]) -> None:
        """Takes back one `admit(lock=True)` of each of these slots; equal slots count once, -1 is skipped.

        Raises: TypeError, ValueError: no such slot, or it is not locked; then no slot changes.
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
        """Forgets all ids, times and counts. Raises: ValueError: slots are locked."""
        if num_locked := np.count_nonzero(self._locks):
            raise ValueError(
                f"cannot reset a cache with {num_locked} locked slots; finish and unlock their batches."
            )
        self.tags[:], self._last_used[:], self._clock = -1, 0, 1
        if self.counts is not None:
            self.counts[:] = 0

    def restore(self, tags: Int[np.ndarray, " slots"]) -> None:
        """Goes on with these ids in the slots, -1 where one is empty, and without locks; counts stay."""
        self.tags[:], self._locks[:] = tags, 0
        self._last_used[self.tags < 0] = 0

    def _choose_victims(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of the ascending, missing ids, by place and grouped by set, get which slot."""
        worth, own_set = (
            None if self.counts is None else self.counts[ids],
            set_of(ids, self.num_sets),
        )
        # Set by set, the worthiest id first, of equal ones the lower.
        order = (
            np.argsort(own_set, kind="stable") if worth is None else np.lexsort((-worth, own_set))
        )
        sets, first, sizes = np.unique(own_set[order], return_index=True, return_counts=True)
        group, rank = (
            np.repeat(np.arange(sets.size), sizes),
            np.arange(ids.size) - np.repeat(first, sizes),
        )
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

    def _cacheable(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids of 64 bits, and which of them may have a slot."""
        ids = np.asarray(ids, np.int64)
        return ids, (ids >= 0) & (ids < self.num_ids)


_scatter = jax.jit(api.scatter_rows, donate_argnums=0)
_ROWS_PER_FLUSH = 1 << 16
Leaving = Callable[[Int[Array, " places"]], Sequence[Array]]
"""From places to what the host keeps of their rows: all arrays but the last."""


class NearRows:
    """The host side of one array: who is near, where all rows are kept, and what the next exchange moves.

    Attributes:
      cache: the policy.
      backing: all rows.
      rows: those that the last batch asked for, by id: `cache.num_ids` or more if there is no such row, -1 for no id.
      places: of these rows, -1 for none.
      admission: what the cache did for the last batch.
      scratch_rows: those of the last batch without a place in the cache.
    """

    def __init__(self, cache: SetAssociativeCache, backing: BackingStore):
        self.cache, self.backing = cache, backing
        self.rows = self.places = self.scratch_rows = _NOTHING
        self.admission = Admission(_NOTHING)
        self._left = self._come = (
            _NOTHING,
            _NOTHING,
        )  # rows, and the places that they leave or take

    @property
    def num_places(self) -> int:
        """Number of places of the cache."""
        return self.cache.num_sets * self.cache.num_ways

    def find(
        self,
        rows: Int[np.ndarray, " nnz"],
        *,
        admit: bool,
        lock: bool = False,
        is_prefetch: bool = False,
    ) -> None:
        """Finds rows a place; those that find none get one behind the cache, unless the batch is yet to come."""
        self.admission = own = (
            self.cache.admit(rows, lock=lock) if admit else Admission(self.cache.find(rows))
        )
        self.rows, self.places, self.scratch_rows, was_taken = (
            rows,
            own.locations,
            _NOTHING,
            own.evicted_ids >= 0,
        )
        self._left = own.evicted_ids[was_taken], own.inserted_slots[was_taken]
        self._come = own.inserted_ids, own.inserted_slots
        if not is_prefetch:
            is_homeless = (self.places < 0) & (rows >= 0) & (rows < self.cache.num_ids)
            self.scratch_rows, inverse = np.unique(rows[is_homeless], return_inverse=True)
            self.places[is_homeless] = self.num_places + inverse
            behind = self.num_places + np.arange(self.scratch_rows.size)
            come, places = self._come
            self._come = np.concatenate([come, self.scratch_rows]), np.concatenate([places, behind])

    def moves(self, capacity: int | None) -> list[np.ndarray]:
        """The places that are left and filled, in `capacity` entries or, for None, in few different sizes."""
        return [_padded(places, capacity) for _, places in (self._left, self._come)]

    def bring(
        self,
        arrays: tuple[Array, ...],
        moves: Sequence[ArrayLike],
        leaving: Leaving,
        capacity: int | None,
        keep: Callable[[tuple[Array, ...]], None],
    ) -> tuple[Array, ...]:
        """The arrays after the moves, in which all rows of the last batch have places.

        Args:
          arrays: as much scratch area as the batch needs, or one of `capacity` ids may need, is added to them.
          moves: what `moves` returned, here or inside a compiled program.
          leaving: see there.
          capacity: of `moves`.
          keep: receives the new arrays as soon as they have taken the place of the given ones.
        """
        (left, come), shapes = map(jnp.asarray, moves), None
        if not come.size:  # rows leave for others only
            return arrays
        num_scratch = (
            len(self.scratch_rows) if capacity is None else min(capacity, self.cache.num_ids)
        )
        if self.num_places + num_scratch > arrays[0].shape[0]:
            missing = self.num_places + padded_size(num_scratch) - arrays[0].shape[0]
            arrays = tuple(
                jnp.concatenate([a, jnp.zeros((missing, *a.shape[1:]), a.dtype)]) for a in arrays
            )
        if capacity is not None:
            shapes = tuple(jax.ShapeDtypeStruct((capacity, *x.shape[1:]), x.dtype) for x in arrays)
        exchange = functools.partial(self._exchange, [array.dtype for array in arrays])
        loaded = call_host(exchange, shapes, come, *leaving(left))
        brought: tuple[Array, ...] = kept(keep, _scatter, arrays, come, tuple(loaded))
        return brought

    def _exchange(
        self, dtypes: Sequence[DTypeLike], places: Array | np.ndarray, *left: ArrayLike
    ) -> tuple[np.ndarray, ...]:
        """Writes rows that leave to the stores, then reads those that take places, padded as these are."""
        rows, room = self._come[0], places.shape[0] - self._come[0].size
        return tuple(
            np.concatenate([values.astype(dtype), np.zeros((room, *values.shape[1:]), dtype)])
            for values, dtype in zip(
                [*self.backing.exchange(self._left[0], left, rows), rows], dtypes, strict=True
            )
        )

    def scratch(
        self, arrays: Sequence[Array], leaving: Leaving, *, is_inside: bool
    ) -> Sequence[Array] | None:
        """Contents of the scratch area, for `store_scratch`; None if it is empty."""
        # The area may be larger than its rows: rows behind them are read and left alone.
        size = (
            arrays[0].shape[0] - self.num_places
            if is_inside
            else padded_size(len(self.scratch_rows))
        )
        return leaving(self.num_places + jnp.arange(size, dtype=jnp.int32)) if size else None

    def store_scratch(self, values: Sequence[ArrayLike] | None) -> None:
        """Keeps the scratch rows of the last batch."""
        if values is not None:
            self.backing.write(self.scratch_rows, values)

    def follow(self, resident_rows: Int[np.ndarray, " places"]) -> None:
        """Lets the cache believe what the array says of its places, after moves that stopped halfway."""
        near = resident_rows[: self.num_places].astype(np.int64)
        self.cache.restore(np.where(near == NO_ROW, -1, near))
        self.rows = self.places = self.scratch_rows = _NOTHING
        self.admission = Admission(_NOTHING)
        self._left = self._come = (_NOTHING, _NOTHING)

    def flush(self, leaving: Leaving) -> None:
        """Writes all resident rows to the stores; they stay resident."""
        rows, places = self.cache.resident()
        for first in range(0, rows.size, _ROWS_PER_FLUSH):
            some = slice(first, first + _ROWS_PER_FLUSH)
            self.backing.write(rows[some], leaving(jnp.asarray(_padded(places[some], None))))


def call_host(function: Callable[..., PyTree], shapes: PyTree, *operands: PyTree) -> PyTree:
    """Runs `function` on the host: now, or with result `shapes` in its turn inside a compiled program."""
    if shapes is None:
        return function(*operands)
    return io_callback(function, shapes, *operands, ordered=True)


def _padded(places: np.ndarray, size: int | None) -> np.ndarray:
    missing = (padded_size(places.size) if size is None else size) - places.size
    return np.concatenate([places, np.full(missing, NO_ROW, np.int64)]).astype(np.int32)

"""Tables on the host whose rows visit the device: through a cache, or for one batch.

The device holds, per group of tables, the places of the cache and behind them a *scratch* area for rows that found no
place. Ids are translated to places before the kernels see them, so that these compute the same bits as on a whole
table. Optimizer states travel with their row. Rows go back to the host when they are evicted or flushed; scratch
rows after every update.

The policy and the stores are Python on the host. Outside of `jit` they are called directly; inside, through ordered
callbacks with room for one row per id. Host and device change together: both count the *generation*, so that a state
of another time or module, whose places hold other rows than the host believes, is noticed before it is used.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Int

from rsembed.caching import (
    Admission,
    CacheCounts,
    CacheStatistics,
    RowStore,
    SetAssociativeCache,
    unique_misses_by_group,
)
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW
from rsembed.row_gradients import RowGradients
from rsembed.tbe import functional
from rsembed.tbe.bounds import feature_starts
from rsembed.tbe.functional import TBEState
from rsembed.tbe.inputs import Inputs, is_traced
from rsembed.tbe.plan import TBEPlan
from rsembed.tbe.storage import StorageFolder

_leaving = jax.jit(functional.stored_rows, static_argnums=(0, 1))
_scatter = jax.jit(api.scatter_rows, donate_argnums=0)
_ROWS_PER_FLUSH = 1 << 16
_nothing = functools.partial(np.zeros, 0, np.int64)


@dataclasses.dataclass
class Group:
    """Host side of one group: who is resident, and where all rows are kept (weights, then states)."""

    number: int
    cache: SetAssociativeCache
    stores: tuple[RowStore, ...]
    # What the next exchange writes to the stores, reads from them, and what the scratch area holds.
    out_rows: np.ndarray = dataclasses.field(default_factory=_nothing)
    in_rows: np.ndarray = dataclasses.field(default_factory=_nothing)
    scratch_rows: np.ndarray = dataclasses.field(default_factory=_nothing)

    @property
    def num_places(self) -> int:
        return self.cache.num_sets * self.cache.num_ways


class _Placed(NamedTuple):
    """Where the ids of a batch find their rows of one group.

    Args:
      rows: in the group's stores; their number, which no cache admits, for ids outside their table, and -1 for ids of
        other groups.
      places: -1 for none.
      out_places: those whose rows leave.
      in_places: those that are filled.
      admission: what the cache did, if it was asked to let rows in.
    """

    rows: np.ndarray
    places: np.ndarray
    out_places: np.ndarray
    in_places: np.ndarray
    admission: Admission | None

    def moves(self, capacity: int | None) -> list[np.ndarray]:
        """The places that are left and filled, in `capacity` entries or, for None, in few different sizes."""
        return [_pad(p, _padded(p.size) if capacity is None else capacity) for p in (self.out_places, self.in_places)]


class _Prefetched(NamedTuple):
    """A batch whose rows wait in the cache, and the places it locks, by part of the batch and by cached group."""

    ids: np.ndarray
    locked: list[list[np.ndarray]]


class HostRows:
    """The rows of all cached tables of a module, and their way to the device and back.

    Args:
      plan: the tables.
      groups: those of the plan that are cached.
      counts_features: also count misses by feature.
      storage: where the stores are files.
    """

    def __init__(
        self, plan: TBEPlan, groups: list[Group], *, counts_features: bool, storage: StorageFolder | None = None
    ):
        self.plan, self.groups, self.storage = plan, groups, storage
        self.statistics = CacheStatistics(len(plan.features))
        self.counts_features = counts_features
        self.prefetched: collections.deque[_Prefetched] = collections.deque()
        self.version = 0
        """Changes whenever places may have changed their rows: translations made before are void."""
        self.generation = secrets.randbits(31)
        """Counts with that of the state; from another start in every module, whose states are not for each other."""

    def settle(self, state: TBEState) -> None:
        """Waits until compiled programs are done here, and sees that `state` is what they left.

        Raises: RuntimeError: the state is of another time, or of another module.
        """
        jax.effects_barrier()
        if not is_traced(state.generation):
            self._check(state.generation)

    def _check(self, generation: Any) -> None:
        if int(generation) != self.generation:
            raise RuntimeError(
                f"the module's state is not the one that belongs to its tables on the host (generation "
                f"{int(generation)}, not {self.generation}): nnx.state, nnx.split and nnx.clone hold the rows in the "
                "cache and none of the others, so such a copy cannot be gone back to, nor be used beside the "
                "original. Copy modules by state_dict and load_state_dict, also to go back; or go on from the tables "
                "as they are on the host by reset_cache_states(discard=True)."
            )

    def _advance(self, generation: Any) -> None:
        """Begins a change of host and device, or refuses it: compiled programs ask here in their turn."""
        self._check(generation)
        self.generation = (self.generation + 1) % 2**32

    def _advanced(self, state: TBEState, *, is_inside: bool) -> TBEState:
        generation = state.generation + 1 if is_inside else self.generation  # type: ignore[operator]
        return state._replace(generation=jnp.asarray(generation, jnp.uint32))

    # Before a lookup or an update

    def bring(self, state: TBEState, inputs: Inputs, *, admit: bool = True) -> tuple[TBEState, Int[Array, " nnz"]]:
        """Makes every row of the batch addressable, inside `jit` too; `admit` lets rows into the cache.

        Returns: the state, and the ids with places instead of ids for cached tables.
        """
        capacity = inputs.ids.shape[0] if inputs.is_traced or is_traced(state) else None
        plan_moves = functools.partial(self._plan_moves, inputs.num_bags, admit, capacity)
        shapes = None
        if capacity is not None:
            flat = jax.ShapeDtypeStruct((capacity,), jnp.int32)
            shapes = (flat, [[flat, flat]] * len(self.groups))
        translated, moves = _call(plan_moves, shapes, state.generation, inputs.ids, inputs.offsets)
        state = self._advanced(state, is_inside=capacity is not None)
        return self._exchange_all(state, moves, capacity), jnp.asarray(translated)

    def bring_rows(self, state: TBEState, row_gradients: RowGradients) -> tuple[TBEState, RowGradients]:
        """Makes the rows of row gradients addressable, and numbers them by their places. Not inside `jit`.

        Raises: NotImplementedError: inside `jit`.
        """
        if is_traced(row_gradients, state):
            raise NotImplementedError("row gradients of host tables cannot be applied inside jit; do it outside.")
        rows, moves = dict(row_gradients.rows), []
        self._advance(state.generation)
        for group in self.groups:
            name = self.plan.group_name(self.plan.groups[group.number])
            own = np.asarray(rows[name]).astype(np.int64)
            own[own == NO_ROW] = -1
            placed = _place(group, own, admit=True)
            rows[name] = jnp.asarray(np.where(placed.places < 0, NO_ROW, placed.places), jnp.int32)
            moves.append(placed.moves(None))
        state = self._exchange_all(self._advanced(state, is_inside=False), moves, None)
        return state, dataclasses.replace(row_gradients, rows=rows)

    def prefetch(self, state: TBEState, parts: Sequence[Inputs], *, lock: bool) -> TBEState:
        """Fills the cache for a later batch, whose homeless rows will be brought when it is looked up.

        Args:
          state: its cached groups change.
          parts: the batch, concrete, in parts with all bags.
          lock: keep the places of this batch until it is looked up.
        """
        locked: list[list[np.ndarray]] = []
        self._advance(state.generation)
        state = self._advanced(state, is_inside=False)
        for part in parts:
            placed = self._place_batch(part, admit=True, lock=lock, is_prefetch=True)
            state = self._exchange_all(state, [own.moves(None) for own in placed], None)
            locked.append([own.places for own in placed] if lock else [])
        self.prefetched.append(_Prefetched(np.concatenate([part.ids for part in parts]), locked))
        return state

    def _take_prefetched(self, ids: np.ndarray) -> bool:
        """Whether the batch was prefetched: then it no longer is, and its places may be taken again."""
        for number, entry in enumerate(self.prefetched):
            if np.array_equal(entry.ids, ids):
                del self.prefetched[number]
                self._unlock(entry)
                return True
        return False

    def _unlock(self, entry: _Prefetched) -> None:
        for part in entry.locked:
            for group, places in zip(self.groups, part, strict=False):
                group.cache.unlock(places)

    def _exchange_all(self, state: TBEState, moves: Any, capacity: int | None) -> TBEState:
        self.version += 1
        for group, (out_places, in_places) in zip(self.groups, moves, strict=True):
            scratch = len(group.scratch_rows) if capacity is None else min(capacity, group.cache.num_ids)
            state = _with_scratch(state, group, scratch)
            arrays = state.arrays(group.number)
            evicted = _leaving(self.plan, group.number, state, jnp.asarray(out_places))
            shapes = None
            if capacity is not None:
                shapes = tuple(jax.ShapeDtypeStruct((capacity, *x.shape[1:]), x.dtype) for x in arrays)
            exchange = functools.partial(_exchange, group, [array.dtype for array in arrays])
            loaded = _call(exchange, shapes, in_places, *evicted)
            arrays = _scatter(arrays, jnp.asarray(in_places), tuple(map(jnp.asarray, loaded)))
            state = state.with_arrays(group.number, arrays)
        return state

    def write_back(self, state: TBEState) -> TBEState:
        """Brings the scratch rows of the last `bring` home, after an update has changed them."""
        is_inside, values = is_traced(state), []
        for group in self.groups:
            arrays = state.arrays(group.number)
            num_scratch = arrays[0].shape[0] - group.num_places if is_inside else _padded(len(group.scratch_rows))
            # The area may be larger than its rows: rows behind them are read and left alone.
            places = group.num_places + jnp.arange(num_scratch, dtype=jnp.int32)
            values.append(_leaving(self.plan, group.number, state, places) if num_scratch else ())
        _call(self._store_scratch, () if is_inside else None, state.generation, values)
        return self._advanced(state, is_inside=is_inside)

    # Whole tables

    def flush(self, state: TBEState) -> None:
        """Writes all resident rows to the stores; they stay resident."""
        for group in self.groups:
            rows, places = group.cache.resident()
            for first in range(0, rows.size, _ROWS_PER_FLUSH):
                some = slice(first, first + _ROWS_PER_FLUSH)
                padded = _pad(places[some], _padded(places[some].size))
                values = _leaving(self.plan, group.number, state, jnp.asarray(padded))
                _write(group, rows[some], values)

    def forget(self, state: TBEState) -> TBEState:
        """Empties the cache without writing anything back, whatever time the state is of."""
        jax.effects_barrier()
        self._advance(self.generation)
        self.version += 1
        while self.prefetched:
            self._unlock(self.prefetched.popleft())
        for group in self.groups:
            group.cache.reset()
            nobody = jnp.full(state.weights[group.number].shape[0], NO_ROW, jnp.int32)
            state = state.with_group(group.number, resident_rows=nobody)
        return self._advanced(state, is_inside=False)

    def stores_of(self, table: int) -> tuple[RowStore, ...]:
        """The stores (weights, then states) that hold a table, and others of its group."""
        number, _ = self.plan.place(table)
        return next(group for group in self.groups if group.number == number).stores

    # On the host

    def _rows_of_group(self, group: Group, ids: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """See `_Placed`."""
        rows = np.full(ids.size, -1, np.int64)
        for table, (first, last) in zip(self.plan.features, itertools.pairwise(starts.tolist()), strict=True):
            number, first_row = self.plan.place(table)
            if number == group.number:
                own = ids[first:last].astype(np.int64)
                is_valid = (own >= 0) & (own < self.plan.tables[table].num_rows)
                rows[first:last] = np.where(is_valid, own + first_row, group.cache.num_ids)
        return rows

    def _plan_moves(
        self, num_bags: tuple[int, ...], admit: bool, capacity: int | None, generation: Any, ids: Any, offsets: Any
    ) -> tuple[np.ndarray, list[list[np.ndarray]]]:
        """Ids with places instead of rows, and for every group which places are left and taken."""
        self._advance(generation)
        inputs = Inputs(np.asarray(ids), np.asarray(offsets), None, None, num_bags)
        placed = self._place_batch(inputs, admit=admit and not self._take_prefetched(inputs.ids))
        translated = inputs.ids.astype(np.int32)
        for own in placed:
            np.copyto(translated, own.places, where=own.rows >= 0, casting="same_kind")
        return translated, [own.moves(capacity) for own in placed]

    def _place_batch(
        self, inputs: Inputs, *, admit: bool, lock: bool = False, is_prefetch: bool = False
    ) -> list[_Placed]:
        self.version += 1  # here too, as compiled programs call nothing else of this class before an exchange
        starts = feature_starts(inputs.offsets, inputs.num_bags)
        placed = []
        for group in self.groups:
            rows = self._rows_of_group(group, inputs.ids, starts)
            placed.append(_place(group, rows, admit=admit, lock=lock, is_prefetch=is_prefetch))
        if admit:
            self._record(placed, inputs.ids, starts)
        return placed

    def _store_scratch(self, generation: Any, values: Sequence[Sequence[Any]]) -> tuple[()]:
        self._advance(generation)
        for group, own in zip(self.groups, values, strict=True):
            _write(group, group.scratch_rows, own)
        return ()

    def _record(self, placed: Sequence[_Placed], ids: np.ndarray, starts: np.ndarray) -> None:
        """Counts a batch once, however many groups its ids belong to."""
        admitted = [(own.rows, own.admission) for own in placed if own.admission is not None]
        total = CacheCounts(*map(sum, zip(*(admission.counts for _, admission in admitted), strict=True)))
        num_cacheable = sum(
            int(((own.rows >= 0) & (own.rows < group.cache.num_ids)).sum())
            for group, own in zip(self.groups, placed, strict=True)
        )
        num_unique = total.unique_hits + total.unique_misses + int(num_cacheable < ids.size)
        by_feature = None
        if self.counts_features:
            # Ids in front of the first bag belong to nobody and cannot miss.
            starts = np.asarray([0, *starts[1:-1], ids.size])
            by_group = [unique_misses_by_group(rows, admission.missed_ids, starts) for rows, admission in admitted]
            by_feature = np.sum(by_group, axis=0)
        self.statistics.record(total._replace(calls=1, requested_ids=ids.size, unique_ids=num_unique), by_feature)


def _place(group: Group, rows: np.ndarray, *, admit: bool, lock: bool = False, is_prefetch: bool = False) -> _Placed:
    """Finds the rows a place; those that find none get one behind the cache, unless the batch is yet to come."""
    out_places, in_places, admission = _nothing(), _nothing(), None
    group.out_rows, group.in_rows, group.scratch_rows = _nothing(), _nothing(), _nothing()
    if admit:
        admission = group.cache.admit(rows, lock=lock)
        places = admission.locations
        was_taken = admission.evicted_ids >= 0
        group.out_rows, out_places = admission.evicted_ids[was_taken], admission.inserted_slots[was_taken]
        group.in_rows, in_places = admission.inserted_ids, admission.inserted_slots
    else:
        places = group.cache.find(rows)
    if not is_prefetch:
        is_homeless = (places < 0) & (rows >= 0) & (rows < group.cache.num_ids)
        group.scratch_rows, inverse = np.unique(rows[is_homeless], return_inverse=True)
        places[is_homeless] = group.num_places + inverse
        group.in_rows = np.concatenate([group.in_rows, group.scratch_rows])
        in_places = np.concatenate([in_places, group.num_places + np.arange(group.scratch_rows.size)])
    return _Placed(rows, places, out_places, in_places, admission)


def _with_scratch(state: TBEState, group: Group, num_rows: int) -> TBEState:
    """Room for at least `num_rows` scratch rows."""
    arrays = state.arrays(group.number)
    if group.num_places + num_rows <= arrays[0].shape[0]:
        return state
    missing = group.num_places + _padded(num_rows) - arrays[0].shape[0]
    grown = [jnp.concatenate([a, jnp.zeros((missing, *a.shape[1:]), a.dtype)]) for a in arrays]
    return state.with_arrays(group.number, grown)


def _call(function: Callable[..., Any], shapes: Any, *operands: Any) -> Any:
    """Runs `function` on the host: now, or with result `shapes` in its turn inside a compiled program."""
    if shapes is None:
        return function(*operands)
    return io_callback(function, shapes, *operands, ordered=True)


def _exchange(group: Group, dtypes: Sequence[Any], in_places: Any, *evicted: Any) -> tuple[np.ndarray, ...]:
    """Writes evicted rows to the stores, then reads the rows that take places, padded as `in_places` is."""
    _write(group, group.out_rows, evicted)
    room = in_places.shape[0] - group.in_rows.size
    loaded = [*(store.read(group.in_rows) for store in group.stores), group.in_rows]
    return tuple(
        np.concatenate([values.astype(dtype), np.zeros((room, *values.shape[1:]), dtype)])
        for values, dtype in zip(loaded, dtypes, strict=True)
    )


def _write(group: Group, rows: np.ndarray, values: Sequence[Any]) -> None:
    """Stores the first of the values, which may be padded, as `rows`."""
    for store, own in zip(group.stores, values, strict=False):  # the last values only say which rows these are
        store.write(rows, np.asarray(own)[: rows.size])


def _padded(count: int) -> int:
    """The next power of two: few sizes, few compiled programs."""
    return 1 << max(count - 1, 0).bit_length() if count else 0


def _pad(places: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([places, np.full(size - places.size, NO_ROW, np.int64)]).astype(np.int32)

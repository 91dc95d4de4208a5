"""Tables on the host whose rows visit the device: through a cache, or for one batch.

The device holds, per group of tables, the places of the cache and behind them a *scratch* area for rows that found no
place. Ids are translated to places before the kernels see them, so that these compute the same bits as on a whole
table. Optimizer states travel with their row. Rows go back to the host when they are evicted or flushed; scratch
rows after every update.

The policy and the stores are Python on the host. Outside of `jit` they are called directly; inside, through ordered
callbacks with room for one row per id.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
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
from rsembed.tbe.functional import TBEState
from rsembed.tbe.plan import TBEPlan

_gather = jax.jit(api.gather_rows)
_scatter = jax.jit(api.scatter_rows, donate_argnums=0)
_ROWS_PER_FLUSH = 1 << 16


@dataclasses.dataclass
class _Group:
    """Host side of one group: who is resident, and where all rows are kept (weights, then states)."""

    number: int
    cache: SetAssociativeCache
    stores: tuple[RowStore, ...]
    # What the next exchange writes to the stores, reads from them, and what the scratch area holds.
    out_rows: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    in_rows: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    scratch_rows: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def num_places(self) -> int:
        return self.cache.num_sets * self.cache.num_ways


class _Prefetched(NamedTuple):
    """A batch whose rows wait in the cache, and the places it locks, by part of the batch and by cached group."""

    ids: np.ndarray
    locked: list[list[np.ndarray]]


class HostRows:
    """The rows of all cached tables of a module, and their way to the device and back.

    Args:
      plan: the tables.
      caches: policy of every cached group.
      stores: weights and states of every cached group, by number of the group.
      counts_features: also count misses by feature.
    """

    def __init__(
        self,
        plan: TBEPlan,
        caches: dict[int, SetAssociativeCache],
        stores: dict[int, tuple[RowStore, ...]],
        *,
        counts_features: bool = False,
    ):
        self.plan = plan
        self.groups = [_Group(number, caches[number], stores[number]) for number in caches]
        self.statistics = CacheStatistics(len(plan.features))
        self.counts_features = counts_features
        self.prefetched: collections.deque[_Prefetched] = collections.deque()
        self.version = 0
        """Changes whenever places may have changed their rows: translations made before are void."""

    # Before a lookup or an update

    def bring(
        self, state: TBEState, ids: Any, offsets: Any, num_bags: Sequence[int], *, admit: bool = True
    ) -> tuple[TBEState, Int[Array, " nnz"]]:
        """Makes every row of the batch addressable.

        Args:
          state: its cached groups change.
          ids: concrete, or traced inside `jit`.
          offsets: likewise.
          num_bags: bags of every feature.
          admit: let rows into the cache; else only use what is there.

        Returns: the state, and the ids with places instead of ids for cached tables.
        """
        capacity = ids.shape[0] if _is_traced(ids, offsets, state) else None
        plan_moves = functools.partial(self._plan_moves, tuple(num_bags), admit, capacity)
        shapes = None
        if capacity is not None:
            places = [jax.ShapeDtypeStruct((capacity,), jnp.int32)] * 2
            shapes = (jax.ShapeDtypeStruct(ids.shape, jnp.int32), [places] * len(self.groups))
        translated, moves = _call(plan_moves, shapes, ids, offsets)
        return self._exchange_all(state, moves, capacity), jnp.asarray(translated)

    def bring_rows(self, state: TBEState, row_gradients: RowGradients) -> tuple[TBEState, RowGradients]:
        """Makes the rows of row gradients addressable, and numbers them by their places. Not inside `jit`.

        Raises: NotImplementedError: inside `jit`.
        """
        if _is_traced(row_gradients, state):
            raise NotImplementedError("row gradients of host tables cannot be applied inside jit; do it outside.")
        rows, moves = dict(row_gradients.rows), []
        for group in self.groups:
            name = self.plan.group_name(self.plan.groups[group.number])
            own = np.asarray(rows[name]).astype(np.int64)
            own[own == NO_ROW] = group.stores[0].shape[0]
            places, own_moves, _ = self._place(group, own, admit=True)
            rows[name] = jnp.asarray(np.where(places < 0, NO_ROW, places), jnp.int32)
            moves.append([_pad(p, _padded(p.size)) for p in own_moves])
        state = self._exchange_all(state, moves, None)
        return state, dataclasses.replace(row_gradients, rows=rows)

    def prefetch(
        self, state: TBEState, parts: Sequence[tuple[Any, Any]], num_bags: Sequence[int], *, lock: bool
    ) -> TBEState:
        """Fills the cache for a later batch, whose homeless rows will be brought when it is looked up.

        Args:
          state: its cached groups change.
          parts: ids and offsets of the batch, in parts with all bags; concrete.
          num_bags: bags of every feature.
          lock: keep the places of this batch until it is looked up.
        """
        locked: list[list[np.ndarray]] = []
        for ids, offsets in parts:
            places: list[np.ndarray] = []
            locks = places if lock else None
            moves = self._plan_moves(tuple(num_bags), True, None, ids, offsets, locks=locks, is_prefetch=True)[1]
            state = self._exchange_all(state, moves, None)
            locked.append(places)
        self.prefetched.append(_Prefetched(np.concatenate([ids for ids, _ in parts]), locked))
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
            scratch = len(group.scratch_rows) if capacity is None else min(capacity, group.stores[0].shape[0])
            state = self._with_scratch(state, group, scratch)
            arrays = _arrays(state, group.number)
            evicted = _gather(arrays, jnp.asarray(out_places))
            shapes = None
            if capacity is not None:
                shapes = tuple(jax.ShapeDtypeStruct((capacity, *x.shape[1:]), x.dtype) for x in arrays)
            loaded = _call(functools.partial(_exchange, group), shapes, in_places, *evicted)
            arrays = _scatter(arrays, jnp.asarray(in_places), tuple(map(jnp.asarray, loaded)))
            state = _with_arrays(state, group.number, arrays)
        return state

    def write_back(self, state: TBEState) -> None:
        """Brings the scratch rows of the last `bring` home, after an update has changed them."""
        is_traced = _is_traced(state)
        for group in self.groups:
            arrays = _arrays(state, group.number)
            if not is_traced and not group.scratch_rows.size:
                continue
            num_scratch = arrays[0].shape[0] - group.num_places if is_traced else _padded(len(group.scratch_rows))
            # The area may be larger than its rows: rows behind them are read and left alone.
            places = group.num_places + jnp.arange(num_scratch, dtype=jnp.int32)
            _call(functools.partial(_store_scratch, group), () if is_traced else None, *_gather(arrays, places))

    # Whole tables

    def flush(self, state: TBEState) -> None:
        """Writes all resident rows to the stores; they stay resident."""
        for group in self.groups:
            rows, places = group.cache.resident()
            for first in range(0, rows.size, _ROWS_PER_FLUSH):
                some = slice(first, first + _ROWS_PER_FLUSH)
                padded = _pad(places[some], _padded(places[some].size))
                values = _gather(_arrays(state, group.number), jnp.asarray(padded))
                _write(group, rows[some], [np.asarray(v)[: rows[some].size] for v in values])

    def forget(self, state: TBEState) -> TBEState:
        """Empties the cache without writing anything back."""
        self.version += 1
        while self.prefetched:
            self._unlock(self.prefetched.popleft())
        resident = list(state.resident_rows)
        for group in self.groups:
            group.cache.reset()
            resident[group.number] = jnp.full(state.weights[group.number].shape[0], NO_ROW, jnp.int32)
        return state._replace(resident_rows=tuple(resident))

    def store_of(self, table: int) -> tuple[tuple[RowStore, ...], int]:
        """The stores (weights, then states) that hold a table, and its first row in them."""
        number, first_row = self.plan.place(table)
        return next(group for group in self.groups if group.number == number).stores, first_row

    # On the host

    def _rows_of_group(
        self, group: _Group, ids: np.ndarray, offsets: np.ndarray, num_bags: Sequence[int]
    ) -> np.ndarray:
        """Row of every id in the group's stores; their number, which no cache admits, for everything else."""
        num_rows = group.stores[0].shape[0]
        rows = np.full(ids.size, num_rows, np.int64)
        for feature, first, last in _features(offsets, num_bags):
            table = self.plan.features[feature]
            number, first_row = self.plan.place(table)
            if number == group.number:
                own = ids[first:last].astype(np.int64)
                is_valid = (own >= 0) & (own < self.plan.tables[table].num_rows)
                rows[first:last] = np.where(is_valid, own + first_row, num_rows)
        return rows

    def _plan_moves(
        self,
        num_bags: Sequence[int],
        admit: bool,
        capacity: int | None,
        ids: Any,
        offsets: Any,
        *,
        locks: list[np.ndarray] | None = None,
        is_prefetch: bool = False,
    ) -> tuple[np.ndarray, list[list[np.ndarray]]]:
        """Ids with places instead of rows, and for every group which places are left and taken."""
        ids, offsets = np.asarray(ids), np.asarray(offsets)
        translated, moves = ids.astype(np.int32), []
        self.version += 1  # here too, as compiled programs call nothing else of this class before an exchange
        admit = admit and (is_prefetch or not self._take_prefetched(ids))
        admissions = []
        for group in self.groups:
            rows = self._rows_of_group(group, ids, offsets, num_bags)
            places, own_moves, admission = self._place(group, rows, admit=admit, locks=locks, is_prefetch=is_prefetch)
            for feature, first, last in _features(offsets, num_bags):
                if self.plan.place(self.plan.features[feature])[0] == group.number:
                    translated[first:last] = places[first:last]
            moves.append([_pad(p, _padded(p.size) if capacity is None else capacity) for p in own_moves])
            admissions.append((admission, rows))
        if admit:
            self._record(admissions, ids, offsets, num_bags)
        return translated, moves

    def _place(
        self,
        group: _Group,
        rows: np.ndarray,
        *,
        admit: bool,
        locks: list[np.ndarray] | None = None,
        is_prefetch: bool = False,
    ) -> tuple[np.ndarray, list[np.ndarray], Admission | None]:
        """Place of every row (-1 for none); places whose rows leave, and places that are filled."""
        num_rows, admission = group.stores[0].shape[0], None
        out_places = in_places = group.out_rows = group.in_rows = group.scratch_rows = np.zeros(0, np.int64)
        if admit:
            admission = group.cache.admit(rows, lock=locks is not None)
            places = admission.locations
            if locks is not None:
                locks.append(places)
            was_taken = admission.evicted_ids >= 0
            group.out_rows, out_places = admission.evicted_ids[was_taken], admission.inserted_slots[was_taken]
            group.in_rows, in_places = admission.inserted_ids, admission.inserted_slots
        else:
            places = group.cache.find(rows)
        if not is_prefetch:
            is_homeless = (places < 0) & (rows < num_rows)
            group.scratch_rows, inverse = np.unique(rows[is_homeless], return_inverse=True)
            places = places.copy()
            places[is_homeless] = group.num_places + inverse
            group.in_rows = np.concatenate([group.in_rows, group.scratch_rows])
            in_places = np.concatenate([in_places, group.num_places + np.arange(group.scratch_rows.size)])
        return places, [out_places, in_places], admission

    def _record(self, admissions: list[Any], ids: np.ndarray, offsets: np.ndarray, num_bags: Sequence[int]) -> None:
        """Counts a batch once, however many groups its ids belong to."""
        counts = [admission.counts for admission, _ in admissions]
        sums = {name: sum(getattr(own, name) for own in counts) for name in CacheCounts._fields}
        num_cacheable = sum(
            int((rows < group.cache.num_ids).sum()) for group, (_, rows) in zip(self.groups, admissions, strict=True)
        )
        sums |= {"calls": 1, "requested_ids": ids.size}
        sums["unique_ids"] = sums["unique_hits"] + sums["unique_misses"] + int(num_cacheable < ids.size)
        by_feature = None
        if self.counts_features:
            starts = np.asarray([*(first for _, first, _ in _features(offsets, num_bags)), ids.size])
            starts[0] = 0  # ids in front of the first bag belong to nobody and cannot miss
            by_group = [unique_misses_by_group(rows, own.missed_ids, starts) for own, rows in admissions]
            by_feature = np.sum(by_group, axis=0)
        self.statistics.record(CacheCounts(**sums), by_feature)

    def _with_scratch(self, state: TBEState, group: _Group, num_rows: int) -> TBEState:
        """Room for at least `num_rows` scratch rows."""
        arrays = _arrays(state, group.number)
        missing = group.num_places + num_rows - arrays[0].shape[0]
        if missing <= 0:
            return state
        missing = group.num_places + _padded(num_rows) - arrays[0].shape[0]
        grown = [jnp.concatenate([a, jnp.zeros((missing, *a.shape[1:]), a.dtype)]) for a in arrays]
        return _with_arrays(state, group.number, tuple(grown))


def _is_traced(*values: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


def _call(function: Callable[..., Any], shapes: Any, *operands: Any) -> Any:
    """Runs `function` on the host: now, or with result `shapes` in its turn inside a compiled program."""
    if shapes is None:
        return function(*operands)
    return io_callback(function, shapes, *operands, ordered=True)


def _exchange(group: _Group, in_places: Any, *evicted: Any) -> tuple[np.ndarray, ...]:
    """Writes evicted rows to the stores, then reads the rows that take places, padded as `in_places` is."""
    _write(group, group.out_rows, [np.asarray(values)[: group.out_rows.size] for values in evicted])
    room = np.asarray(in_places).size - group.in_rows.size
    loaded = [store.read(group.in_rows) for store in group.stores]
    loaded.append(group.in_rows.astype(np.int32))
    dtypes = [np.asarray(values).dtype for values in evicted]
    return tuple(
        np.concatenate([values.astype(dtype), np.zeros((room, *values.shape[1:]), dtype)])
        for values, dtype in zip(loaded, dtypes, strict=True)
    )


def _store_scratch(group: _Group, *values: Any) -> tuple[()]:
    _write(group, group.scratch_rows, [np.asarray(v)[: group.scratch_rows.size] for v in values])
    return ()


def _write(group: _Group, rows: np.ndarray, values: Sequence[np.ndarray]) -> None:
    for store, own in zip(group.stores, values, strict=False):  # the last list only says which rows these are
        store.write(rows, own.astype(store.dtype))


def _arrays(state: TBEState, number: int) -> tuple[Array, ...]:
    resident = state.resident_rows[number]
    assert resident is not None
    return (state.weights[number], *state.slots[number], resident)


def _with_arrays(state: TBEState, number: int, arrays: tuple[Array, ...]) -> TBEState:
    weights, slots, resident = list(state.weights), list(state.slots), list(state.resident_rows)
    weights[number], slots[number], resident[number] = arrays[0], arrays[1:-1], arrays[-1]
    return state._replace(weights=tuple(weights), slots=tuple(slots), resident_rows=tuple(resident))


def _features(offsets: np.ndarray, num_bags: Sequence[int]) -> list[tuple[int, int, int]]:
    """Number, first and last entry of every feature."""
    starts = offsets[np.asarray([0, *itertools.accumulate(num_bags)])].tolist()
    return [(feature, first, last) for feature, (first, last) in enumerate(itertools.pairwise(starts))]


def _padded(count: int) -> int:
    """The next power of two: few sizes, few compiled programs."""
    return 1 << max(count - 1, 0).bit_length() if count else 0


def _pad(places: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([places, np.full(size - places.size, NO_ROW, np.int64)]).astype(np.int32)

"""Tables on the host whose rows visit the device: from ids of features to rows of groups, prefetched batches, counts.

Ids are translated to places before the kernels see them, so that these compute the same bits as on a whole table.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsembed.bags import device_copy, is_traced
from rsembed.caching import (
    CacheCounts,
    CacheStatistics,
    Generation,
    NearRows,
    call_host,
    unique_misses_by_group,
)
from rsembed.kernels.contract import NO_ROW, JaggedBatch
from rsembed.row_gradients import RowGradients
from rsembed.tbe import functional
from rsembed.tbe.bounds import feature_starts
from rsembed.tbe.functional import TBEState
from rsembed.tbe.plan import TBEPlan

_stored_rows = jax.jit(functional.stored_rows, static_argnums=(0, 1))
_REFUSAL = (
    "the module's state is not the one that belongs to its tables on the host: nnx.state, nnx.split and nnx.clone hold "
    "the rows in the cache and none of the others, so such a copy cannot be gone back to, nor be used beside the "
    "original. Copy modules by state_dict and load_state_dict, also to go back; or go on from the tables as they are "
    "on the host by reset_cache_states(discard=True)."
)


class HostRows:
    """The rows of all cached tables of a module, and their way to the device and back.

    Args:
      plan: the tables.
      groups: those of the plan that are cached.
      counts_features: also count misses by feature.
    """

    def __init__(self, plan: TBEPlan, groups: list[NearRows], *, counts_features: bool):
        self.plan, self.groups = plan, groups
        self.statistics = CacheStatistics(len(plan.features))
        self.counts_features = counts_features
        self.prefetched: collections.deque[tuple[np.ndarray, list[list[np.ndarray]]]] = collections.deque()
        """Ids of batches whose rows wait in the cache, and the places they lock, by part of the batch and by group."""
        self.generation = Generation(_REFUSAL)

    def settle(self, state: TBEState) -> None:
        """Waits until compiled programs are done here, and sees that `state` is what they left.

        Raises: RuntimeError: the state is of another time, or of another module.
        """
        jax.effects_barrier()
        if not is_traced(state.generation):
            self.generation.check(state.generation)

    def _advanced(self, state: TBEState, *, is_inside: bool = False) -> TBEState:
        generation = state.generation + 1 if is_inside else self.generation.number  # type: ignore[operator]
        return state._replace(generation=jnp.asarray(generation, jnp.uint32))

    # Before a lookup or an update

    def bring(self, state: TBEState, batch: JaggedBatch, *, admit: bool = True) -> tuple[TBEState, JaggedBatch]:
        """Makes every row of the batch addressable, inside `jit` too; `admit` lets rows into the cache.

        Returns: the state, and the batch with places instead of ids for cached tables.
        """
        capacity = batch.ids.shape[0] if is_traced((batch.ids, batch.offsets, state)) else None
        find = functools.partial(self._find_in_turn, self.plan.bags_of(batch), admit, capacity)
        shapes = None
        if capacity is not None:
            flat = jax.ShapeDtypeStruct((capacity,), jnp.int32)
            shapes = (flat, [[flat, flat]] * len(self.groups))
        places, moves = call_host(find, shapes, state.generation, batch.ids, batch.offsets)
        state = self._moved(self._advanced(state, is_inside=capacity is not None), moves, capacity)
        return state, self.plan.near(
            batch, device_copy(places, jnp.int32), [weights.shape[0] for weights in state.weights]
        )

    def bring_rows(self, state: TBEState, row_gradients: RowGradients) -> tuple[TBEState, RowGradients]:
        """Makes the rows of row gradients addressable, and numbers them by their places. Not inside `jit`.

        Raises: NotImplementedError: inside `jit`.
        """
        if is_traced((row_gradients, state)):
            raise NotImplementedError("row gradients of host tables cannot be applied inside jit; do it outside.")
        rows = dict(row_gradients.rows)
        self.generation.advance(state.generation)
        for group in self.groups:
            name = self.plan.groups[group.number].name
            own = np.asarray(rows[name]).astype(np.int64)
            group.find(np.where(own == NO_ROW, -1, own), admit=True)
            rows[name] = jnp.asarray(np.where(group.places < 0, NO_ROW, group.places), jnp.int32)
        state = self._moved(self._advanced(state))
        return state, dataclasses.replace(row_gradients, rows=rows)

    def prefetch(self, state: TBEState, parts: Sequence[JaggedBatch], *, lock: bool) -> TBEState:
        """Fills the cache for a later batch, whose homeless rows will be brought when it is looked up.

        Args:
          state: its cached groups change.
          parts: the batch, concrete, in parts with all bags.
          lock: keep the places of this batch until it is looked up.
        """
        locked: list[list[np.ndarray]] = []
        self.generation.advance(state.generation)
        state = self._advanced(state)
        for part in parts:
            self._find(self.plan.bags_of(part), part.ids, part.offsets, admit=True, lock=lock, is_prefetch=True)
            state = self._moved(state)
            locked.append([group.places for group in self.groups] if lock else [])
        self.prefetched.append((np.concatenate([_ids_in_bags(part.ids, part.offsets) for part in parts]), locked))
        return state

    def _take_prefetched(self, ids: np.ndarray) -> bool:
        """Whether the batch was prefetched: then it no longer is, and its places may be taken again."""
        for number, (prefetched, locked) in enumerate(self.prefetched):
            if np.array_equal(prefetched, ids):
                del self.prefetched[number]
                self._unlock(locked)
                return True
        return False

    def _unlock(self, locked: list[list[np.ndarray]]) -> None:
        for part in locked:
            for group, places in zip(self.groups, part, strict=False):
                group.cache.unlock(places)

    def _moved(self, state: TBEState, moves: Any = None, capacity: int | None = None) -> TBEState:
        """The state after the moves of all groups, by default those of the last batch."""
        for group, own in zip(self.groups, moves or [group.moves(None) for group in self.groups], strict=True):
            arrays = group.bring(state.arrays(group.number), own, self._leaving(state, group), capacity)
            state = state.with_arrays(group.number, arrays)
        return state

    def _leaving(self, state: TBEState, group: NearRows) -> Any:
        return functools.partial(_stored_rows, self.plan, group.number, state)

    def write_back(self, state: TBEState) -> TBEState:
        """Brings the scratch rows of the last `bring` home, after an update has changed them."""
        is_inside = is_traced(state)
        values = [
            group.scratch(state.arrays(group.number), self._leaving(state, group), is_inside=is_inside)
            for group in self.groups
        ]
        call_host(self._store_scratch, () if is_inside else None, state.generation, values)
        return self._advanced(state, is_inside=is_inside)

    # Whole tables

    def flush(self, state: TBEState) -> None:
        """Writes all resident rows to the stores; they stay resident."""
        for group in self.groups:
            group.flush(self._leaving(state, group))

    def forget(self, state: TBEState) -> TBEState:
        """Empties the cache without writing anything back, whatever time the state is of."""
        jax.effects_barrier()
        self.generation.advance(self.generation.number)
        while self.prefetched:
            self._unlock(self.prefetched.popleft()[1])
        for group in self.groups:
            group.cache.reset()
            nobody = jnp.full(state.weights[group.number].shape[0], NO_ROW, jnp.int32)
            state = state.with_group(group.number, resident_rows=nobody)
        return self._advanced(state)

    def arrays_of(self, table: int) -> tuple[np.ndarray, ...]:
        """The arrays (weights, then states) that hold a table, and others of its group."""
        number, _ = self.plan.places[table]
        return next(group.backing.arrays for group in self.groups if group.number == number)

    # On the host

    def _find_in_turn(
        self, num_bags: tuple[int, ...], admit: bool, capacity: int | None, generation: Any, ids: Any, offsets: Any
    ) -> tuple[np.ndarray, list[list[np.ndarray]]]:
        """Ids with places instead of rows, and for every group which places are left and taken."""
        self.generation.advance(generation)
        ids, offsets = np.asarray(ids), np.asarray(offsets)
        admits = admit and not self._take_prefetched(_ids_in_bags(ids, offsets))
        self._find(num_bags, ids, offsets, admit=admits)
        translated = ids.astype(np.int32)
        for group in self.groups:
            np.copyto(translated, group.places, where=group.rows >= 0, casting="same_kind")
        return translated, [group.moves(capacity) for group in self.groups]

    def _find(self, num_bags: tuple[int, ...], ids: Any, offsets: Any, *, admit: bool, **how: bool) -> None:
        """Finds the rows of a batch their places."""
        starts = feature_starts(offsets, num_bags)
        for group in self.groups:
            rows = np.full(ids.size, -1, np.int64)
            for table, (first, last) in zip(self.plan.features, itertools.pairwise(starts.tolist()), strict=True):
                number, first_row = self.plan.places[table]
                if number == group.number:
                    own = ids[first:last].astype(np.int64)
                    is_valid = (own >= 0) & (own < self.plan.tables[table].num_rows)
                    rows[first:last] = np.where(is_valid, own + first_row, group.cache.num_ids)
            group.find(rows, admit=admit, **how)
        if admit:
            self._record(ids, starts)

    def _store_scratch(self, generation: Any, values: Sequence[Any]) -> tuple[()]:
        self.generation.advance(generation)
        for group, own in zip(self.groups, values, strict=True):
            group.store_scratch(own)
        return ()

    def _record(self, ids: np.ndarray, starts: np.ndarray) -> None:
        """Counts a batch once, however many groups its ids belong to."""
        admitted = [(group.rows, group.admission) for group in self.groups if group.admission is not None]
        total = CacheCounts(*map(sum, zip(*(admission.counts for _, admission in admitted), strict=True)))
        num_cacheable = sum(int((group.rows < group.cache.num_ids)[group.rows >= 0].sum()) for group in self.groups)
        num_unique = total.unique_hits + total.unique_misses + int(num_cacheable < ids.size)
        by_feature = None
        if self.counts_features:
            # Ids in front of the first bag belong to nobody and cannot miss.
            starts = np.asarray([0, *starts[1:-1], ids.size])
            by_group = [unique_misses_by_group(rows, admission.missed_ids, starts) for rows, admission in admitted]
            by_feature = np.sum(by_group, axis=0)
        self.statistics.record(total._replace(calls=1, requested_ids=ids.size, unique_ids=num_unique), by_feature)


def _ids_in_bags(ids: Any, offsets: Any) -> np.ndarray:
    """Ids without the room behind them, which a prepared batch has."""
    return np.asarray(ids)[: int(offsets[-1])]

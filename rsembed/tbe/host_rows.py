"""Tables of the TBE module in host memory, with a cache on the device.

Before a lookup, the ids of cached tables are replaced by cache slots. A lookup of cache slots
gives exactly the same result as a lookup in a table that contains all rows.

The arrays on the device contain the cache slots, followed by a scratch area. If a batch reads a
table row that gets no cache slot, this row is copied to the scratch area. After an update, the rows
in the scratch area are written back to the host.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, PyTree

from rsembed.arrays import AnyArray, device_copy, is_traced
from rsembed.kernels.contract import NO_ROW, Call
from rsembed.row_gradients import RowGradients
from rsembed.storage import CacheCounts, SetAssociativeCache
from rsembed.storage.backing_store import BackingStore, Generation, Lock, Moves
from rsembed.storage.set_associative import NUM_WAYS, BatchPlaces, CachedRows, call_host
from rsembed.tbe import functional
from rsembed.tbe.arguments import Arguments
from rsembed.tbe.functional import TBEState
from rsembed.tbe.plan import TablePlan, TBEPlan, with_list

MAX_PREFETCHES = 100

_stored_rows = jax.jit(functional.stored_rows, static_argnums=(0, 1))
_REFUSAL = (
    "the module's state does not match its tables on the host. Either Ctrl-C, an error or another thread interrupted "
    "a compiled step, and the result of the step is lost: load the latest state dict. Or the state is a copy: "
    "nnx.state, nnx.split and nnx.clone contain only the rows in the cache, so a copy cannot be used beside the "
    "original or after the original has changed. Copy modules with state_dict and load_state_dict, also to go back to "
    "an earlier state; or continue with the tables as they are on the host: reset_cache_states(discard=True)."
)
StateVariable = nnx.Variable[TBEState]
"""Variable that holds the state of a module."""


def keep_arrays(variable: StateVariable, group: str, arrays: Iterable[Array]) -> None:
    """Stores new arrays of a group in the variable of the state."""
    state = variable.get_value()
    variable.set_value(state.with_arrays(group, arrays))


class HostRows:
    """Rows of a module's cached tables, and their transfer between host and device.

    Methods that change the state have an argument `variable`, the variable that contains the state.
    A compiled program donates the arrays of the old state, so the new state must be stored in the
    variable right after the program.

    Outside `jit`, call `begin` before a change of rows and `end` after it. If an error or Ctrl-C
    stops a change halfway, `resume` makes the rows on the device and on the host consistent.

    Args:
      plan: plan of the module's tables.
      caching: arguments that set cache sizes and statistics.

    Attributes:
      counts: cache counts, summed over all batches.
      calls_with_a_miss: number of batches with at least one miss.
      misses_by_feature: number of unique misses of each feature, summed over all batches. Zeros
        unless `record_tablewise_cache_miss` is set.
      lock: lock that a thread holds while it works with the rows outside `jit`.
      begun: during a change of rows, the generation of the state before the change. None if no
        change has begun, or if every change has ended.

    Raises: ValueError: the free device memory is too small for caches of one set (32 rows) each.
    """

    def __init__(self, plan: TBEPlan, caching: Arguments):
        self.plan = plan
        self.caching = caching
        cached = {name: group for name, group in plan.groups.items() if group.is_cached}
        algorithm = caching.cache_algorithm.name.lower()
        self.groups: dict[str, CachedRows] = {}
        for name, num_sets in _cache_sizes(cached, caching).items():
            group = cached[name]
            cache = SetAssociativeCache(num_sets, algorithm=algorithm, num_ids=group.num_rows)
            self.groups[name] = CachedRows(cache, _backing_of(group))
        self.reset_counts()
        self.prefetched: list[tuple[np.ndarray, list[tuple[SetAssociativeCache, np.ndarray]]]] = []
        """Ids and locked cache slots of each prefetched batch that has not been looked up yet."""
        self.generation = Generation(_REFUSAL)
        self.lock = Lock()
        self.begun: int | None = None
        self._steps = False

    def begin(
        self,
        state: TBEState,
        *,
        steps: bool = False,
    ) -> None:
        """Begins a change of rows outside `jit`.

        Args:
          state: the module's state.
          steps: whether the change is a training step. After a training step, the rows in the
            scratch area are written back to the host.

        Raises: RuntimeError: `state` and the host store have different generations.
        """
        self.generation.check(state.generation)
        # The tables are repaired by `resume` only if `begun` is set. Ctrl-C may arrive at any time,
        # so `begun` is set before the generation of the host store changes.
        self.begun = self.generation.number
        self._steps = steps
        self.generation.advance(self.generation.number)

    def end(self, variable: StateVariable) -> None:
        """Ends a change of rows, and writes the new generation to the state.

        Outside `jit`, the new generation is the generation of the host store. Inside `jit`, the new
        generation is the old generation in the state plus 1.
        """
        state = variable.get_value()
        is_inside = is_traced(state)
        generation: Any = self.generation.number
        if is_inside:
            generation = state.generation + 1  # type: ignore[operator]
        variable.set_value(state._replace(generation=jnp.asarray(generation, jnp.uint32)))
        if not is_inside:
            self.begun = None
            self._steps = False

    def resume(self, variable: StateVariable) -> None:
        """Makes the rows on the device and on the host consistent after an interrupted change.

        The last array of each group contains the numbers of the rows on the device. For every row
        on the device, the weights and the optimizer states are complete, because one program moves
        all arrays of a row. The host has the latest values of evicted rows, because an evicted row
        is written to the host before another row gets its slot. `resume` forgets all prefetched
        batches.

        Raises: RuntimeError: the state is older than the interrupted change, or belongs to a
          different module.
        """
        state = variable.get_value()
        if int(np.asarray(state.generation)) != self.begun:
            self.generation.check(state.generation)
        if self._steps:
            # If the interrupted step has not updated the rows, the scratch area has the same values
            # as the host, and writing these values changes nothing.
            self._write_scratch(state)
        self.prefetched.clear()
        for name, group in self.groups.items():
            resident_rows = state.arrays[name][-1]
            group.follow(np.asarray(resident_rows))
        self._steps = False
        self.generation.advance(self.generation.number)
        self.end(variable)

    def reset_counts(self) -> None:
        """Sets all cache counts to zero."""
        self.counts = CacheCounts()
        self.calls_with_a_miss = 0
        self.misses_by_feature = np.zeros(len(self.plan.features), np.int64)

    def bring(
        self,
        variable: StateVariable,
        batch: Call,
        *,
        admit: bool = True,
    ) -> Call:
        """Copies the rows for a lookup to the device, also inside `jit`.

        Args:
          variable: variable of the module's state.
          batch: batch with row ids.
          admit: whether rows that are not in the cache enter the cache, True by default. If `admit`
            is False, rows that are not in the cache are copied to the scratch area, which follows
            the cache in the device arrays.

        Returns: the batch with cache slots in place of the ids of cached tables.
        """
        state = variable.get_value()
        (listed,) = batch.lists
        is_inside = is_traced((listed.ids, listed.offsets, state))
        capacity = None
        shapes = None
        if is_inside:
            capacity = listed.num_entries
            flat: PyTree = jax.ShapeDtypeStruct((capacity,), jnp.int32)
            shapes = (flat, dict.fromkeys(self.groups, Moves(flat, flat, flat, flat)))
        else:
            self.begin(state)
        find = functools.partial(self._translate, self.plan.first_bags(batch), admit, capacity)
        slots, moves = call_host(find, shapes, state.generation, listed.ids, listed.offsets)
        self._move(variable, moves)
        self.end(variable)
        groups = list(self.plan.groups)
        segments = []
        for segment in batch.segments:
            if groups[segment.table] in self.groups:
                segment = segment._replace(first_row=0, num_rows=NO_ROW)
            segments.append(segment)
        batch = with_list(batch, ids=device_copy(slots, jnp.int32))
        return dataclasses.replace(batch, segments=tuple(segments))

    def bring_rows(self, variable: StateVariable, row_gradients: RowGradients) -> RowGradients:
        """Copies the rows that have a gradient in `row_gradients` to the device.

        Args:
          variable: variable of the module's state.
          row_gradients: gradients of rows, with the row numbers of the tables.

        Returns: a copy of `row_gradients` with cache slots in place of row numbers.

        Raises: NotImplementedError: the method is called inside `jit`.
        """
        state = variable.get_value()
        if is_traced((row_gradients, state)):
            raise NotImplementedError(
                "row gradients of host tables cannot be applied inside jit; do it outside."
            )
        rows = dict(row_gradients.rows)
        moves = {}
        self.begin(state)
        for name, group in self.groups.items():
            row_numbers = np.asarray(rows[name]).astype(np.int64)
            row_numbers[row_numbers == NO_ROW] = -1
            result = group.find(row_numbers, admit=True)
            moves[name] = result.moves
            slots = np.where(result.places < 0, NO_ROW, result.places)
            rows[name] = jnp.asarray(slots, jnp.int32)
        self._move(variable, moves)
        self.end(variable)
        return dataclasses.replace(row_gradients, rows=rows)

    def prefetch(self, variable: StateVariable, batch: Call) -> None:
        """Copies the rows of a batch to the cache, before the batch is looked up.

        Rows that get no cache slot are copied to the device later, when the batch is looked up.

        Raises: RuntimeError: `MAX_PREFETCHES` prefetched batches have not been looked up yet.
        """
        if len(self.prefetched) >= MAX_PREFETCHES:
            raise RuntimeError(
                f"{MAX_PREFETCHES} prefetched batches wait for their lookup: prefetch() is called too often, or other "
                "batches are looked up."
            )
        (listed,) = batch.lists
        ids = np.asarray(listed.ids)
        offsets = np.asarray(listed.offsets)
        pass_size = max(ids.size, 1)
        config = self.caching.multipass_prefetch_config
        if config is not None:
            pass_size = max(-(-ids.size // config.num_passes), config.min_splitable_pass_size)
        locks = self.caching.prefetch_pipeline
        locked: list[tuple[SetAssociativeCache, np.ndarray]] = []
        first_bags = self.plan.first_bags(batch)
        self.begin(variable.get_value())
        for first in range(0, max(ids.size, 1), pass_size):
            by_group = self._find(
                first_bags,
                ids[first : first + pass_size],
                np.clip(offsets - first, 0, pass_size),
                admit=True,
                lock=locks,
                is_prefetch=True,
            )
            moves = {}
            for name, result in by_group.items():
                moves[name] = result.moves
                if locks:
                    locked.append((self.groups[name].cache, result.places))
            self._move(variable, moves)
        self.prefetched.append((ids[: offsets[-1]], locked))
        self.end(variable)

    def _take_prefetched(self, ids: np.ndarray) -> bool:
        """Whether a prefetched batch has exactly the ids `ids`.

        The first prefetched batch with ids `ids` is removed from the list `prefetched`, and its
        cache slots are unlocked.
        """
        for number, (prefetched, locked) in enumerate(self.prefetched):
            if np.array_equal(prefetched, ids):
                del self.prefetched[number]
                for cache, slots in locked:
                    cache.unlock(slots)
                return True
        return False

    def _move(self, variable: StateVariable, moves: dict[str, Moves]) -> None:
        """Moves rows of all groups between host and device, as `moves` describes."""
        is_inside = is_traced(moves)
        for name, group in self.groups.items():
            state = variable.get_value()
            leaving = functools.partial(_stored_rows, self.plan, name, state)
            keep = functools.partial(keep_arrays, variable, name)
            group.bring(state.arrays[name], moves[name], leaving, keep, is_inside=is_inside)

    def write_back(self, variable: StateVariable) -> None:
        """Writes the rows in the scratch area back to the host after an update, and calls `end`.

        Outside `jit`, call `begin` before the update.
        """
        self._write_scratch(variable.get_value())
        self.end(variable)

    def _write_scratch(self, state: TBEState) -> None:
        is_inside = is_traced(state)
        generation = None
        shapes = None
        if is_inside:
            generation = state.generation
            shapes = ()
        values = {}
        for name, group in self.groups.items():
            num_rows = state.weights[name].shape[0]
            leaving = functools.partial(_stored_rows, self.plan, name, state)
            values[name] = group.scratch(num_rows, leaving, is_inside=is_inside)
        call_host(self._store_scratch, shapes, generation, values)

    def flush(self, state: TBEState) -> None:
        """Writes all cached rows to the host stores, without removing them from the cache."""
        for name, group in self.groups.items():
            group.flush(functools.partial(_stored_rows, self.plan, name, state))

    def forget(self, variable: StateVariable, *, discard: bool) -> None:
        """Empties the cache without writing cached rows to the host.

        Args:
          variable: variable of the module's state.
          discard: whether a state is accepted if its generation differs from the generation of the
            host store.

        Raises: RuntimeError: `discard` is False, and the generations of the state and of the host
          store differ.
        """
        jax.effects_barrier()
        state = variable.get_value()
        if discard:
            self.generation.advance(self.generation.number)
        else:
            self.begin(state)
        self.prefetched.clear()
        for name, group in self.groups.items():
            group.follow(np.full(group.num_slots, NO_ROW, np.int32))
            group.cache.reset()
            *arrays, resident_rows = state.arrays[name]
            no_rows = jnp.full(resident_rows.shape, NO_ROW, jnp.int32)
            state = state.with_arrays(name, (*arrays, no_rows))
        variable.set_value(state)
        self.end(variable)

    def _translate(
        self,
        first_bags: np.ndarray,
        admit: bool,
        capacity: int | None,
        generation: Array,
        ids: AnyArray,
        offsets: AnyArray,
    ) -> tuple[np.ndarray, dict[str, Moves]]:
        """Replaces ids of cached tables by cache slots, in a computation on the host.

        Returns: the ids, with cache slots in place of the ids of cached tables, and the `Moves` of
          every cached group.
        """
        if capacity is not None:
            self.generation.advance(generation)
        ids = np.asarray(ids)
        offsets = np.asarray(offsets)
        # The list `prefetched` contains ids without padding, so the padding of `ids` is cut off
        # before the comparison.
        admits = admit and not self._take_prefetched(ids[: offsets[-1]])
        by_group = self._find(first_bags, ids, offsets, admit=admits, num_moves=capacity)
        slots = ids.astype(np.int32)
        moves = {}
        for name, result in by_group.items():
            np.copyto(slots, result.places, where=result.rows >= 0, casting="same_kind")
            moves[name] = result.moves
        return slots, moves

    def _find(
        self,
        first_bags: np.ndarray,
        ids: np.ndarray,
        offsets: np.ndarray,
        *,
        admit: bool,
        **options: Any,
    ) -> dict[str, BatchPlaces]:
        """Finds a cache slot or a scratch row for each table row that a batch reads.

        Args:
          first_bags: see `TBEPlan.first_bags`.
          ids: ids of all features.
          offsets: positions in `ids`: the start of every bag, then the end of the last bag.
          admit: whether rows that are not in the cache enter the cache.
          **options: more arguments of `CachedRows.find`.

        Returns: dictionary from the name of each cached group to the `BatchPlaces` of the group.
        """
        starts = offsets[first_bags]
        rows_of_groups = {}
        for name in self.groups:
            rows_of_groups[name] = np.full(ids.size, -1, np.int64)
        groups = list(self.plan.groups)
        ranges = itertools.pairwise(starts.tolist())
        for reader, (first, last) in zip(self.plan.readers, ranges, strict=True):
            name = groups[reader.table]
            if name in rows_of_groups:
                rows = ids[first:last].astype(np.int64)
                is_valid = (rows >= 0) & (rows < reader.num_rows)
                num_rows = self.groups[name].cache.num_ids
                rows = np.where(is_valid, rows + reader.first_row, num_rows)
                rows_of_groups[name][first:last] = rows
        by_group = {}
        for name, rows in rows_of_groups.items():
            by_group[name] = self.groups[name].find(rows, admit=admit, **options)
        if admit:
            self._record(ids.size, starts, by_group)
        return by_group

    def _store_scratch(
        self,
        generation: Array | None,
        values: dict[str, PyTree],
    ) -> tuple[()]:
        if generation is not None:
            self.generation.advance(generation)
        for name, group in self.groups.items():
            group.store_scratch(values[name])
        return ()

    def _record(
        self,
        num_ids: int,
        starts: np.ndarray,
        by_group: dict[str, BatchPlaces],
    ) -> None:
        """Adds the cache counts of a batch to the statistics.

        A batch increments `calls` by 1, even if it reads several groups.
        """
        total = CacheCounts()
        num_cacheable = 0
        records_features = self.caching.record_cache_metrics.record_tablewise_cache_miss
        for name, result in by_group.items():
            total = jax.tree.map(operator.add, total, result.admission.counts)
            is_cacheable = (result.rows >= 0) & (result.rows < self.groups[name].cache.num_ids)
            num_cacheable += int(is_cacheable.sum())
            if records_features:
                # `np.split` adds the ids before the first bag to the first feature. Ids before the
                # first bag have row -1, and `missed_ids` never contains -1, so ids before the first
                # bag are not counted.
                for feature, rows in enumerate(np.split(result.rows, starts[1:-1])):
                    missed = np.intersect1d(rows, result.admission.missed_ids)
                    self.misses_by_feature[feature] += missed.size
        num_unique = total.unique_hits + total.unique_misses + int(num_cacheable < num_ids)
        total = total._replace(calls=1, requested_ids=num_ids, unique_ids=num_unique)
        self.counts = jax.tree.map(operator.add, self.counts, total)
        self.calls_with_a_miss += total.unique_misses > 0


def _memory_of_device() -> dict[str, int] | None:
    """Memory statistics of the first local device, or None if the device reports no limit."""
    memory = jax.local_devices()[0].memory_stats() or {}
    return memory if "bytes_limit" in memory else None


def _cache_sizes(
    groups: Mapping[str, TablePlan],
    caching: Arguments,
) -> dict[str, int]:
    """Number of sets, of 32 rows each, in the set-associative cache of each group.

    If `cache_sets` is 0, the number of sets is computed from `cache_load_factor` and the number of
    rows of the group. If `cache_sets` is 0 and the device reports its memory, all caches are made
    smaller in proportion until they fit into the free device memory. Each cache has at least one
    set. The cache of a group with placement `host` has exactly one set.

    Raises: ValueError: the free device memory is too small for caches of one set each.

    Source: FBGEMM, the rule for the size of the cache in `SplitTableBatchedEmbeddingBagsCodegen`.
    """
    num_sets = {}
    least = 0
    wanted = 0
    for name, group in groups.items():
        num_rows = int(group.num_rows * caching.cache_load_factor)
        sets = caching.cache_sets or -(-num_rows // NUM_WAYS) or 1
        if group.placement == "host":
            # Rows of tables with placement `host` are copied to the device for one batch only, so
            # a cache of the smallest size is sufficient.
            sets = 1
        num_sets[name] = sets
        row = group._replace(dtype=group.near_dtype).first_row()
        set_bytes = NUM_WAYS * sum(array.nbytes for array in row)
        least += set_bytes
        wanted += sets * set_bytes
    memory = _memory_of_device()
    if memory is None or caching.cache_sets:
        return num_sets
    reserved = int(caching.cache_reserved_memory * 2**30)
    free = memory["bytes_limit"] - memory.get("bytes_in_use", 0)
    if free - reserved < least:
        raise ValueError(
            f"not even one set of {NUM_WAYS} rows of {least // NUM_WAYS} bytes fits into {free} free bytes minus "
            f"{reserved} reserved ones; free memory, or reserve less."
        )
    share = min(1.0, (free - reserved - least) / max(1, wanted - least))
    for name, sets in num_sets.items():
        num_sets[name] = 1 + int((sets - 1) * share)
    return num_sets


def _backing_of(group: TablePlan) -> BackingStore:
    """Host store with the initial values of the rows and optimizer states of a group."""
    arrays = []
    for row in group.first_row():
        array = np.zeros((group.num_rows, *row.shape[1:]), row.dtype)
        if row.any():
            # Zeros are not written, because an array from `np.zeros` takes no memory before it is
            # written.
            array[:] = row
        arrays.append(array)
    return BackingStore(arrays, device_dtype=jnp.dtype(group.near_dtype))


_OF_CACHES = (
    "cache_algorithm",
    "cache_load_factor",
    "cache_sets",
    "cache_reserved_memory",
    "cache_precision",
    "prefetch_pipeline",
    "multipass_prefetch_config",
    "gather_uvm_cache_stats",
    "record_cache_metrics",
)


def warn_of_arguments(plan: TBEPlan, arguments: Arguments) -> None:
    """Warns if arguments are set that have no effect for the tables of a plan."""
    if not plan.has_cache:
        arguments.warn_of_no_effect(_OF_CACHES, "because no table has a cache")
    elif arguments.cache_sets or _memory_of_device() is None:
        why = "because cache_sets is set, or the device does not report its memory"
        arguments.warn_of_no_effect(["cache_reserved_memory"], why)
    names = ["uvm_non_rowwise_momentum", "use_experimental_tbe", "uvm_host_mapped"]
    if not arguments.gradient_clipping:
        names.append("max_gradient")
    arguments.warn_of_no_effect(names, "because the module does not need them")

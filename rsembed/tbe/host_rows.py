"""Tables on the host with a device cache: caches, stores, prefetches, counts and reports.

Row ids are translated to cache slots before the kernels get them, so the kernels compute the same
bits as on a whole table.

A row of a batch that gets no cache slot is copied to the scratch area, which follows the cache
slots in the device arrays. An update writes it back to the host.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree

from rsembed.arrays import device_copy, is_traced
from rsembed.kernels.contract import NO_ROW, Call
from rsembed.row_gradients import RowGradients
from rsembed.storage import CacheCounts, SetAssociativeCache
from rsembed.storage.host_cached import BackingStore, Generation, Lock
from rsembed.storage.set_associative import NUM_WAYS, NearRows, call_host
from rsembed.tbe import functional
from rsembed.tbe.arguments import Arguments, TBEStatsReporterConfig
from rsembed.tbe.batches import AnyArray, feature_starts
from rsembed.tbe.functional import TBEState
from rsembed.tbe.plan import AnyBatch, GroupPlan, TablePlan, TBEPlan, warn_of_no_effect, with_list

MAX_PREFETCHES = 100

_stored_rows = jax.jit(functional.stored_rows, static_argnums=(0, 1))
_REFUSAL = (
    "the module's state is not the one that belongs to its tables on the host. Either Ctrl-C, an error or another "
    "thread came between a compiled step and its result, which is lost: load the latest state dict. Or the state is a "
    "copy: nnx.state, nnx.split and nnx.clone hold the rows in the cache and none of the others, so such a copy cannot "
    "be gone back to, nor be used beside the original. Copy modules by state_dict and load_state_dict, also to go "
    "back; or go on from the tables as they are on the host by reset_cache_states(discard=True)."
)
Keep = Callable[[TBEState], None]
"""Receives a state as soon as a program has taken over the arrays of the state before it."""


class HostRows:
    """Rows of a module's cached tables, and their transfer between host and device.

    A change outside `jit` starts with `begin`. It ends with `end`, after the module has stored its
    new state. If an error or Ctrl-C stops a change in between, `resumed` repairs it.

    Args:
      plan: the tables.
      caching: arguments that set cache sizes and statistics.

    Attributes:
      counts: sums over all batches.
      calls_with_a_miss: number of batches with at least one unique miss.
      misses_by_feature: sum of the unique misses of each feature. Zeros unless
        `record_tablewise_cache_miss` is set.
      lock: held by the one thread that works with the rows outside `jit`.
      begun: generation of the state before the unfinished change; None if there is no such change.

    Raises: ValueError: the device memory does not hold one set per cache.
    """

    def __init__(self, plan: TBEPlan, caching: Arguments):
        cached = {
            number: group for number, group in enumerate(plan.groups) if group.table.is_cached
        }
        caches = zip(cached.items(), _caches_of(list(cached.values()), caching), strict=True)
        self.plan, self.caching = plan, caching
        self.groups = {
            number: NearRows(cache, _backing_of(group)) for (number, group), cache in caches
        }
        self.reset_counts()
        self.prefetched: list[tuple[np.ndarray, list[tuple[SetAssociativeCache, np.ndarray]]]] = []
        """Ids of prefetched batches before their lookup, and the cache slots that they lock."""
        self.generation = Generation(_REFUSAL)
        self.lock = Lock()
        self.begun: int | None = None
        self._steps = False

    def begin(self, state: TBEState, *, steps: bool = False) -> None:
        """Begins a change outside `jit`.

        Args:
          state: the module's state.
          steps: whether the change is a training step, which follows `bring`.

        Raises: RuntimeError: `state` has another generation than the host store.
        """
        self.generation.check(state.generation)
        # `begun` is set first, so that `resumed` works after an interrupt between these lines.
        self.begun, self._steps = self.generation.number, steps
        self.generation.advance(self.generation.number)

    def end(self) -> None:
        """Ends a change. The module has stored its new state."""
        self.begun, self._steps = None, False

    def resumed(self, state: TBEState) -> TBEState:
        """State with which device and host can continue after a change that stopped halfway.

        The state's `resident_rows` say which rows the device has. These rows are complete, because
        one program moves all arrays of a row. Rows that were evicted were written to the host
        before. The list of prefetched batches is emptied.

        Raises: RuntimeError: the state is older than the change, or belongs to another module.
        """
        if int(np.asarray(state.generation)) != self.begun:
            self.generation.check(state.generation)
        if self._steps:  # If the update did not run, this writes the old values again.
            self._write_scratch(state)
        self.prefetched.clear()
        for number, group in self.groups.items():
            group.follow(np.asarray(state.resident_rows[number]))
        self._steps = False
        self.generation.advance(self.generation.number)
        return self.advanced(state)

    def reset_counts(self) -> None:
        """Sets all counts to zero."""
        self.counts, self.calls_with_a_miss = CacheCounts(), 0
        self.misses_by_feature = np.zeros(len(self.plan.features), np.int64)

    def advanced(self, state: TBEState, *, is_inside: bool = False) -> TBEState:
        """The state with the host's current generation; inside `jit`, with the next generation."""
        generation = state.generation + 1 if is_inside else self.generation.number  # type: ignore[operator]
        return state._replace(generation=jnp.asarray(generation, jnp.uint32))

    # Before a lookup or an update

    def bring(
        self, state: TBEState, batch: Call, keep: Keep, *, admit: bool = True
    ) -> tuple[TBEState, Call]:
        """Copies the batch's rows to the device. Works inside `jit`.

        Outside `jit`, call `end` afterwards.

        Args:
          state: the module's state.
          batch: batch with row ids.
          keep: receives a state each time the rows of a group have moved.
          admit: whether missing rows enter the cache. If not, they are copied to the scratch area.

        Returns: the state, and the batch with cache slots in place of the ids of cached tables.
        """
        (listed,) = batch.lists
        capacity = listed.num_entries if is_traced((listed.ids, listed.offsets, state)) else None
        find = functools.partial(self._find_in_turn, self.plan.bags_of(batch), admit, capacity)
        shapes = None
        if capacity is None:
            self.begin(state)
        else:
            flat = jax.ShapeDtypeStruct((capacity,), jnp.int32)
            shapes = (flat, {number: [flat, flat] for number in self.groups})
        places, moves = call_host(find, shapes, state.generation, listed.ids, listed.offsets)
        state = self._moved(state, keep, moves, capacity)
        state = self.advanced(state, is_inside=capacity is not None)
        segments = []
        for segment in batch.segments:
            if self.plan.groups[segment.table].table.is_cached:
                segment = segment._replace(
                    first_row=0, num_rows=state.weights[segment.table].shape[0]
                )
            segments.append(segment)
        batch = with_list(batch, ids=device_copy(places, jnp.int32))
        return state, dataclasses.replace(batch, segments=tuple(segments))

    def bring_rows(
        self, state: TBEState, row_gradients: RowGradients, keep: Keep
    ) -> tuple[TBEState, RowGradients]:
        """Copies the rows of row gradients to the device. Not for use inside `jit`.

        Args:
          state: the module's state.
          row_gradients: gradients with row numbers.
          keep: see `bring`.

        Returns: the state, and the row gradients with cache slots in place of row numbers.

        Raises: NotImplementedError: inside `jit`.
        """
        if is_traced((row_gradients, state)):
            raise NotImplementedError(
                "row gradients of host tables cannot be applied inside jit; do it outside."
            )
        rows = dict(row_gradients.rows)
        self.begin(state)
        for number, group in self.groups.items():
            name = self.plan.groups[number].table.name
            own = np.asarray(rows[name]).astype(np.int64)
            group.find(np.where(own == NO_ROW, -1, own), admit=True)
            rows[name] = jnp.asarray(np.where(group.places < 0, NO_ROW, group.places), jnp.int32)
        state = self.advanced(self._moved(state, keep))
        return state, dataclasses.replace(row_gradients, rows=rows)

    def prefetch(self, state: TBEState, batch: Call, keep: Keep) -> TBEState:
        """State with rows of a later batch in the cache.

        Rows that get no cache slot are copied when the batch is looked up.

        Args:
          state: the module's state.
          batch: the later batch.
          keep: see `bring`.

        Raises: RuntimeError: `MAX_PREFETCHES` prefetched batches were not looked up yet.
        """
        if len(self.prefetched) >= MAX_PREFETCHES:
            raise RuntimeError(
                f"{MAX_PREFETCHES} prefetched batches wait for their lookup: prefetch() is called too often, or other "
                "batches are looked up."
            )
        locked: list[tuple[SetAssociativeCache, np.ndarray]] = []
        config, lock = self.caching.multipass_prefetch_config, self.caching.prefetch_pipeline
        num_ids, offsets = len(batch.lists[0].ids), np.asarray(batch.lists[0].offsets)
        size = max(num_ids, 1)
        if config is not None:
            size = max(-(-num_ids // config.num_passes), config.min_splitable_pass_size)
        self.begin(state)
        for first in range(0, max(num_ids, 1), size):
            ids, ends = batch.lists[0].ids[first : first + size], np.clip(offsets - first, 0, size)
            self._find(
                self.plan.bags_of(batch),
                np.asarray(ids),
                ends,
                admit=True,
                lock=lock,
                is_prefetch=True,
            )
            state = self._moved(state, keep)
            locked += [(group.cache, group.places) for group in self.groups.values() if lock]
        self.prefetched.append((np.asarray(batch.lists[0].ids)[: offsets[-1]], locked))
        return self.advanced(state)

    def _take_prefetched(self, ids: np.ndarray) -> bool:
        """Whether the batch was prefetched.

        Removes it from the list and unlocks its cache slots.
        """
        for number, (prefetched, locked) in enumerate(self.prefetched):
            if np.array_equal(prefetched, ids):
                del self.prefetched[number]
                for cache, places in locked:
                    cache.unlock(places)
                return True
        return False

    def _moved(
        self, state: TBEState, keep: Keep, moves: PyTree = None, capacity: int | None = None
    ) -> TBEState:
        """State after row moves in all groups.

        Args:
          state: state before the moves.
          keep: see `bring`.
          moves: moves of each group. None takes those of the last batch.
          capacity: number of entries in each array of `moves` inside `jit`; None outside.
        """
        for number, group in self.groups.items():
            own = group.moves(None) if moves is None else moves[number]

            def keep_arrays(
                arrays: tuple[Array, ...], state: TBEState = state, number: int = number
            ) -> None:
                keep(state.with_arrays(number, arrays))

            leaving = self._leaving(state, number)
            arrays = group.bring(state.arrays(number), own, leaving, capacity, keep_arrays)
            state = state.with_arrays(number, arrays)
        return state

    def _leaving(self, state: TBEState, number: int) -> Callable[[Array], tuple[Array, ...]]:
        return functools.partial(_stored_rows, self.plan, number, state)

    def write_back(self, state: TBEState) -> TBEState:
        """Writes the scratch rows of the last `bring` to the host, after an update changed them.

        Outside `jit`, call `begin` before the update.
        """
        if is_traced(state):
            call_host(
                self._store_in_turn, (), state.generation, self._scratch(state, is_inside=True)
            )
            return self.advanced(state, is_inside=True)
        self._write_scratch(state)
        return self.advanced(state)

    def _write_scratch(self, state: TBEState) -> None:
        self._store_scratch(self._scratch(state, is_inside=False))

    def _scratch(self, state: TBEState, *, is_inside: bool) -> dict[int, PyTree]:
        """Contents of the scratch area of every group."""
        found = {}
        for number, group in self.groups.items():
            found[number] = group.scratch(
                state.arrays(number), self._leaving(state, number), is_inside=is_inside
            )
        return found

    # Whole tables

    def flush(self, state: TBEState) -> None:
        """Writes all cached rows to the host stores. They stay in the cache."""
        for number, group in self.groups.items():
            group.flush(self._leaving(state, number))

    def forget(self, state: TBEState, *, discard: bool) -> TBEState:
        """State with an empty cache. Writes nothing to the host.

        Args:
          state: the module's state.
          discard: whether a state of any generation is accepted. If not, its generation is checked.

        Raises: RuntimeError: see `begin`; only without `discard`.
        """
        jax.effects_barrier()
        if discard:
            self.end()  # A change may have stopped halfway.
            self.generation.advance(self.generation.number)
        else:
            self.begin(state)
        self.prefetched.clear()
        for number, group in self.groups.items():
            group.follow(np.full(group.num_places, NO_ROW, np.int32))
            group.cache.reset()
            nobody = jnp.full(state.weights[number].shape[0], NO_ROW, jnp.int32)
            state = state.with_arrays(number, (*state.arrays(number)[:-1], nobody))
        return self.advanced(state)

    # On the host

    def _find_in_turn(
        self,
        num_bags: tuple[int, ...],
        admit: bool,
        capacity: int | None,
        generation: Array,
        *batch: AnyArray,
    ) -> tuple[np.ndarray, dict[int, list[np.ndarray]]]:
        """Ids with cache slots in place of rows for cached tables, and the moves of every group."""
        if capacity is not None:
            self.generation.advance(generation)
        ids, offsets = map(np.asarray, batch)
        # `prefetch` keeps ids without padding, so the padding is cut off before the comparison.
        admits = admit and not self._take_prefetched(ids[: offsets[-1]])
        self._find(num_bags, ids, offsets, admit=admits)
        translated = ids.astype(np.int32)
        for group in self.groups.values():
            np.copyto(translated, group.places, where=group.rows >= 0, casting="same_kind")
        return translated, {number: group.moves(capacity) for number, group in self.groups.items()}

    def _find(
        self,
        num_bags: tuple[int, ...],
        ids: np.ndarray,
        offsets: np.ndarray,
        *,
        admit: bool,
        **how: bool,
    ) -> None:
        """Assigns each row of a batch a slot in the cache or scratch area, in every group.

        Args:
          num_bags: number of bags of every feature.
          ids: ids of all features.
          offsets: ends of all bags, with 0 before them.
          admit: whether missing rows enter the cache.
          **how: options of `NearRows.find`.
        """
        starts = np.asarray(feature_starts(offsets, num_bags))
        for number, group in self.groups.items():
            rows = np.full(ids.size, -1, np.int64)
            for table, (first, last) in zip(
                self.plan.features, itertools.pairwise(starts.tolist()), strict=True
            ):
                of_table, first_row = self.plan.places[table]
                if of_table == number:
                    own = ids[first:last].astype(np.int64)
                    is_valid = (own >= 0) & (own < self.plan.tables[table].num_rows)
                    rows[first:last] = np.where(is_valid, own + first_row, group.cache.num_ids)
            group.find(rows, admit=admit, **how)
        if admit:
            self._record(ids, starts)

    def _store_in_turn(self, generation: Array, values: dict[int, PyTree]) -> tuple[()]:
        self.generation.advance(generation)
        self._store_scratch(values)
        return ()

    def _store_scratch(self, values: dict[int, PyTree]) -> None:
        for number, own in values.items():
            self.groups[number].store_scratch(own)

    def _record(self, ids: np.ndarray, starts: np.ndarray) -> None:
        """Adds a batch to the statistics, as one call for all groups."""
        groups = self.groups.values()
        total = CacheCounts(
            *map(sum, zip(*(group.admission.counts for group in groups), strict=True))
        )
        num_cacheable = sum(
            int((group.rows < group.cache.num_ids)[group.rows >= 0].sum()) for group in groups
        )
        num_unique = total.unique_hits + total.unique_misses + int(num_cacheable < ids.size)
        total = total._replace(calls=1, requested_ids=ids.size, unique_ids=num_unique)
        self.counts = CacheCounts(*map(sum, zip(self.counts, total, strict=True)))
        self.calls_with_a_miss += total.unique_misses > 0
        if self.caching.record_cache_metrics.record_tablewise_cache_miss:
            for group in groups:  # Ids before the first bag have row -1, so they are no misses.
                parts, missed = np.split(group.rows, starts[1:-1]), group.admission.missed_ids
                self.misses_by_feature += [np.intersect1d(part, missed).size for part in parts]


# Caches and stores


def _memory_of_device() -> dict[str, int] | None:
    """Memory statistics of the device; None if it reports no limit."""
    memory = jax.local_devices()[0].memory_stats() or {}
    return memory if "bytes_limit" in memory else None


def _caches_of(groups: Sequence[GroupPlan], caching: Arguments) -> list[SetAssociativeCache]:
    """Caches of the groups: `cache_load_factor` of their rows, or `cache_sets` sets of 32 rows.

    Each cache has at least one set. If the device reports its memory and `cache_sets` is 0, the
    other sets are scaled down in proportion to fit the free memory. Tables with placement `host`
    get one set.

    Raises: ValueError: the free memory does not hold one set per cache.
    Source: FBGEMM, size rule of the row cache.
    """
    set_bytes = [NUM_WAYS * sum(_row_bytes(own.table, own.table.near_dtype)) for own in groups]
    sets = [
        caching.cache_sets or -(-int(own.num_rows * caching.cache_load_factor) // NUM_WAYS) or 1
        for own in groups
    ]
    # Rows that are on the device for one batch only need no more than the smallest cache.
    sets = [1 if own.table.placement == "host" else n for own, n in zip(groups, sets, strict=True)]
    memory = _memory_of_device()
    if memory is not None and not caching.cache_sets:
        reserved = int(caching.cache_reserved_memory * 2**30)
        free, least = memory["bytes_limit"] - memory.get("bytes_in_use", 0), sum(set_bytes)
        if free - reserved < least:
            raise ValueError(
                f"not even one set of {NUM_WAYS} rows of {least // NUM_WAYS} bytes fits into {free} free bytes minus "
                f"{reserved} reserved ones; free memory, or reserve less."
            )
        wanted = sum(n * own for n, own in zip(sets, set_bytes, strict=True))
        share = min(1.0, (free - reserved - least) / max(1, wanted - least))
        sets = [1 + int((n - 1) * share) for n in sets]
    algorithm = caching.cache_algorithm.name.lower()
    return [
        SetAssociativeCache(n, algorithm=algorithm, num_ids=own.num_rows)
        for n, own in zip(sets, groups, strict=True)
    ]


def _row_bytes(table: TablePlan, dtype: str) -> tuple[int, int]:
    """Bytes of a row's weights in a dtype, and of its optimizer states."""
    return table.dim * jnp.dtype(dtype).itemsize, sum(slot.nbytes for slot in table.first_slots())


def _backing_of(group: GroupPlan) -> BackingStore:
    table, arrays = group.table, []
    for row in (np.zeros((1, table.dim), jnp.dtype(table.dtype)), *table.first_slots()):
        arrays.append(own := np.zeros((group.num_rows, *row.shape[1:]), row.dtype))
        if row.any():  # Pages of np.zeros take memory only once they are written.
            own[:] = row
    rounds = table.near_dtype not in ("float32", table.dtype)
    return BackingStore(arrays, near_dtype=jnp.dtype(table.near_dtype) if rounds else None)


def first_state(
    plan: TBEPlan, key: PRNGKeyArray, host_rows: HostRows | None, device: jax.Device | None
) -> TBEState:
    """The state before any training.

    Args:
      plan: the tables.
      key: PRNG key of stochastic rounding and of uniform initial weights.
      host_rows: gives the cache sizes. None without cached tables.
      device: device of all arrays. None is JAX's default device, or the mesh of the plan.
    """
    cached = {} if host_rows is None else host_rows.groups
    state = functional.init_state(
        plan, key, {number: group.num_places for number, group in cached.items()}
    )
    state = state if host_rows is None else host_rows.advanced(state)
    return state if device is None else jax.device_put(state, device)


_OF_CACHES = (
    *(
        "cache_algorithm",
        "cache_load_factor",
        "cache_sets",
        "cache_reserved_memory",
        "cache_precision",
    ),
    *(
        "prefetch_pipeline",
        "multipass_prefetch_config",
        "gather_uvm_cache_stats",
        "record_cache_metrics",
    ),
)


def warn_of_arguments(plan: TBEPlan, given: Arguments) -> None:
    """Warns of arguments that have no effect."""
    if not plan.has_cache:
        warn_of_no_effect(given.changed(_OF_CACHES), "as no table is behind a cache")
    elif given.cache_sets or _memory_of_device() is None:
        why = "as cache_sets says how large caches are, or the device does not tell how much memory it has"
        warn_of_no_effect(given.changed(["cache_reserved_memory"]), why)
    names = ["uvm_non_rowwise_momentum", "use_experimental_tbe", "uvm_host_mapped"]
    warn_of_no_effect(
        given.changed(names if given.gradient_clipping else [*names, "max_gradient"]), "here"
    )


# Reports


def report(
    config: TBEStatsReporterConfig, plan: TBEPlan, state: TBEState, batch: AnyBatch, output: Array
) -> None:
    """Reports numbers and bytes of a training step, by FBGEMM's names.

    Nothing is reported if `interval` does not divide the step number. Warns inside `jit`, where
    steps cannot be reported.
    """
    if is_traced(batch):
        warnings.warn(
            "stats_reporter_config: no effect inside jit, where steps are not reported; train outside of it, or "
            "read state_bytes() and get_uvm_cache_stats() between compiled steps.",
            stacklevel=3,
        )
        return
    if (step := int(state.step)) % config.interval:
        return
    by_table = state_bytes(plan, state)
    cache = by_table["total"].get("cache", 0)
    figures: dict[str, float] = {"tbe.hbm.cache": cache}
    for kind, is_cached in (("hbm", False), ("uvm", True)):
        own = [by_table[table.name] for table in plan.tables if table.is_cached == is_cached]
        weights, states = (
            sum(size[what] for size in own) for what in ("weights", "optimizer_states")
        )
        total = weights + states + (0 if is_cached else cache)
        figures |= {f"tbe.{kind}.embeddings": weights, f"tbe.{kind}.optimizer_states": states}
        figures |= {f"tbe.{kind}.total_static_sparse": total, f"tbe.total_{kind}_usage": total}
    ids = (
        [batch.lists[0].ids]
        if isinstance(batch, Call)
        else [jax.tree.leaves(own)[0] for own in batch.values()]
    )
    for name, arrays in (("input", ids), ("output", [output])):
        figures[f"tbe.fwd_{name}_count"] = sum(array.size for array in arrays)
        figures[f"tbe.fwd_{name}_size"] = sum(array.nbytes for array in arrays)
    if config.report is not None:
        config.report(step, figures)
    else:
        text = ", ".join(f"{name} {value:g}" for name, value in figures.items())
        logging.getLogger("rsembed").info("step %d: %s", step, text)


def state_bytes(plan: TBEPlan, state: TBEState) -> dict[str, dict[str, int]]:
    """Bytes of `weights` and `optimizer_states` of every table and, as `total`, of all tables.

    If some table is cached, `total` also has the bytes of the `cache` on the device.
    """
    found: dict[str, dict[str, int]] = {}
    for table in plan.tables:
        weights, states = _row_bytes(table, table.dtype)
        found[table.name] = {
            "weights": table.num_rows * weights,
            "optimizer_states": table.num_rows * states,
        }
    total = {
        what: sum(own[what] for own in found.values()) for what in ("weights", "optimizer_states")
    }
    if plan.has_cache:
        cached = [number for number, group in enumerate(plan.groups) if group.table.is_cached]
        total["cache"] = sum(
            leaf.nbytes for n in cached for leaf in (state.weights[n], *state.slots[n])
        )
    return {**found, "total": total}

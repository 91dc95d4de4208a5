"""Storage for tables that do not fit on the device, with a device cache of recently used rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Int, PyTree

from rsembed.checks import PositiveInt, check_fields, check_finite
from rsembed.initial_values import fresh_rows
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, KeyOrKeys, Step
from rsembed.keys import Keys
from rsembed.specs import TableSpec, default_initializer
from rsembed.storage import hashed_rows, row_map
from rsembed.storage.backing_store import BackingStore, Generation, Moves, Rows
from rsembed.storage.dense_rows import whole_table
from rsembed.storage.hashed import DynamicRows
from rsembed.storage.hashed_rows import DynamicTable
from rsembed.storage.logical_rows import array_names
from rsembed.storage.protocol import (
    Found,
    Params,
    ReadAhead,
    SlotTree,
    State,
    TableRows,
    Vectors,
    on_host,
)
from rsembed.storage.row_map import Eviction


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostCached(DynamicRows):
    """Storage for tables in host memory, with a device cache of recently used rows and their slots.

    Lookups and steps give the same results as with a table on the device, except for the noise of
    `stochastic_rounding`.

    `collection.prefetch` copies the rows of a batch to the device. Call `prefetch` before a
    compiled step. A compiled step cannot read rows from the host, and raises an error if a row is
    not in the cache. Outside `jit`, lookups and steps call `prefetch` themselves. The table and its
    slots use host memory only for rows that were written back from the device.

    A collection has one store of host rows for each table. `init` and `load_collection` replace the
    store. The collection rejects states that are older than the last exchange of rows between host
    and device, because the store no longer has the rows of such a state. To return to an earlier
    state, load a checkpoint.

    Args:
      cache_rows: number of rows in the cache, on all devices together. The cache must hold all
        distinct rows of a batch. On a mesh, id `k` belongs to device `k % num_devices`.
      eviction: rows that are evicted if the cache is full: the least recently fetched rows ("lru",
        the default) or the least often fetched rows ("lfu"). Rows of the current batch are never
        evicted.

    Raises: ValueError: an argument is out of range. The arguments of `HostCached` are checked by
      `TableSpec`, not by the constructor.

    Example:
      >>> import jax, rsembed as rs
      >>> table = rs.TableSpec(
      ...     name="item", vocabulary_size=1_000_000, embedding_dim=8, storage=rs.HostCached(cache_rows=1_000)
      ... )
      >>> collection = rs.EmbeddingCollection([rs.FeatureSpec(name="history", table_spec=table)])
      >>> state, batch = collection.init(jax.random.key(0)), collection.prepare({"history": [[999_999, 5], [7]]})
      >>> state = collection.prefetch(state, batch)
      >>> jax.jit(collection.lookup)(state, batch)["history"].shape
      (2, 8)
    """

    cache_rows: PositiveInt
    eviction: Eviction = "lru"
    placements: ClassVar[tuple[str, ...]] = ("row",)

    @property
    def in_files(self) -> None:
        """None, because a checkpoint has one row for every id, in the order of the ids."""
        return None

    def num_rows(self, table: TableSpec) -> int:
        return self.cache_rows

    def check(self, table: TableSpec) -> None:
        check_fields(self, f"table {table.name!r}")
        if table.optimizer.moves_all_rows:
            raise ValueError(
                f"table {table.name!r}: {type(table.optimizer).__name__} moves all rows in every step, also those on "
                "the host; take a rule of the rows of a batch."
            )

    def init_from_keys(
        self,
        keys: KeyOrKeys,
        table: TableSpec,
        shard: Int[Array, ""],
        num_shards: int,
    ) -> State:
        del shard  # A new shard contains no keys.
        num_rows = -(-self.cache_rows // num_shards)
        params, slots = hashed_rows.empty(table, [num_rows], keys)
        generation = jnp.zeros(1, jnp.uint32)
        # `bond` is None, because the check of `generation` already rejects every state except the
        # newest.
        params = params._replace(generation=generation, bond=None)
        return params, slots

    def read(
        self,
        params: DynamicTable,
        keys: Keys,
        table: TableSpec,
        ahead: ReadAhead | None = None,
    ) -> Vectors:
        del ahead
        rows = _cached_rows(params, keys, table.name)
        (vectors,) = api.gather_rows((params.rows,), rows)
        num_unknown = jnp.zeros((), jnp.int32)
        return vectors, num_unknown

    def find(
        self,
        params: Params,
        slots: SlotTree,
        keys: Keys,
        occurrences: Array,
        table: TableSpec,
        step: Step,
    ) -> Found:
        del occurrences, step  # `make_room` has already counted `occurrences`.
        rows = _cached_rows(params, keys, table.name)
        return params, slots, rows

    def counts(self, params: DynamicTable, num_shards: int) -> dict[str, np.ndarray]:
        counts = super().counts(params, num_shards)
        return {
            "rows": counts["rows"],
            "fetched": counts["inserted"],
            "evicted": counts["evicted"],
        }

    def make_room(
        self,
        params: DynamicTable,
        keys: Keys,
    ) -> tuple[DynamicTable, Moves, Int[Array, "1"]]:
        """Reserves cache rows for the keys of a batch that are not in the cache.

        For "lru", the time of last use is counted in calls of `make_room`, not in training steps,
        because many batches may be looked up between two steps.

        Args:
          params: parameters of one shard.
          keys: keys of the batch and padding. Keys may repeat.

        Returns: a tuple of the new parameters, the rows that the caller must exchange between host
          and cache before the next lookup, and the number of keys that got no cache row.
        """
        known = params.keys
        now = jnp.max(known.last_step) + 1
        once = jnp.ones(keys.shape, jnp.int32)
        _, distinct, _, uses = row_map.entries(keys, once)
        rows = row_map.find(known, distinct)
        counts = row_map.add_counts(row_map.count_of(known, rows), uses)
        touched = row_map.touch(known, rows, now, counts)
        missing = distinct.only(rows == NO_ROW)
        filled, new_rows, num_evicted, num_failed = row_map.assign(
            touched,
            missing,
            now,
            uses,
            evict=self.eviction,
        )
        moved, num_moved = api.compact(new_rows != NO_ROW, new_rows.shape[0])
        ids = distinct.low.astype(jnp.int32)
        cache_rows, inserted = api.gather_rows((new_rows, ids), moved, missing=NO_ROW)
        # `row_map.assign` may have evicted ids from the rows in `cache_rows`. `touched`, the map
        # before the call of `row_map.assign`, still has the evicted ids.
        old_ids, last_step = api.gather_rows(
            (touched.low, touched.last_step),
            cache_rows,
            missing=row_map.FREE,
        )
        is_evicted = last_step != row_map.FREE
        old_ids = old_ids.astype(jnp.int32)
        moves = Moves(
            evicted=jnp.where(is_evicted, old_ids, NO_ROW),
            evicted_places=jnp.where(is_evicted, cache_rows, NO_ROW),
            inserted=inserted,
            inserted_places=cache_rows,
        )
        counters = params.counters.add(inserted=num_moved, evicted=num_evicted)
        params = params._replace(keys=filled, counters=counters)
        return params, moves, num_failed.reshape(1)


class HostTable(HostCached):
    """A `HostCached` storage together with the host rows of one table of one collection.

    The host rows can be used only together with the newest state of the collection.

    Args:
      storage: storage with the size of the cache and the eviction policy.
      table: spec of the table.
    """

    backing: BackingStore

    def __init__(self, storage: HostCached, table: TableSpec):
        super().__init__(cache_rows=storage.cache_rows, eviction=storage.eviction)
        self.table = table
        self.generation = Generation(
            f"table {table.name!r}: the host no longer holds the rows for which this state has no place: rows "
            "were exchanged since for another state, or the state is another collection's. Go on from the newest "
            "state, or from a checkpoint."
        )

    def begin(self, params: DynamicTable) -> None:
        """Replaces the host rows by a new store of initial rows.

        Args:
          params: parameters with an empty cache, and with the PRNG key for the initial rows.
        """
        data = on_host(jax.random.key_data(params.key))[0]
        impl = jax.random.key_impl(params.key)
        key = jax.random.wrap_key_data(data, impl=impl)
        first_values = functools.partial(fresh_rows, key, table=self.table)
        self._first_values = jax.jit(first_values)
        one_id = jax.ShapeDtypeStruct((1,), jnp.int32)
        arrays = []
        for row in jax.eval_shape(self._first_values, one_id):
            shape = (self.table.vocabulary_size, *row.shape[1:])
            arrays.append(np.zeros(shape, row.dtype))
        self.backing = BackingStore(arrays, self._checked_values)

    def _checked_values(self, ids: Rows) -> Sequence[Array]:
        """Computes initial values and slots of rows, and checks values of custom initializers.

        Raises: ValueError: a value is not finite.
        """
        arrays: Sequence[Array] = self._first_values(ids)
        if self.table.initializer is not default_initializer:
            check_finite(
                arrays[0],
                f"table {self.table.name!r}: what its initializer gives for {len(ids)} of its rows",
                way_out="give one that makes finite numbers of the table's dtype",
            )
        return arrays

    def advanced(self, params: DynamicTable, num_shards: int) -> DynamicTable:
        """Advances the generation, and returns the parameters with the new generation number.

        After a call of `advanced`, all older states of the table are rejected.
        """
        self.generation.advance(self.generation.number)
        generation: PyTree = np.full(num_shards, self.generation.number, np.uint32)
        return params._replace(generation=generation)

    def rows(
        self,
        params: DynamicTable,
        slots: SlotTree,
        table: TableSpec,
        num_shards: int,
    ) -> dict[str, np.ndarray]:
        """All rows of the table: cached rows from the device, all other rows from the host."""
        self.generation.check(on_host(params.generation))
        last_step = on_host(params.keys.last_step)
        cached = np.flatnonzero(last_step != row_map.FREE)
        ids = on_host(params.keys.low)[cached]
        names = array_names(table, slots)
        host_arrays = self.backing.read(np.arange(table.vocabulary_size))
        device_arrays = (params.rows, *slots)
        rows = {}
        # For a state without slots (for serving), the result has no slots.
        for name, array, device_array in zip(names, host_arrays, device_arrays, strict=False):
            array[ids] = on_host(device_array)[cached]
            rows[name] = array
        return rows

    def checked_rows(self, values: TableRows, table: TableSpec, step: Int[Array, ""]) -> TableRows:
        """Checks the values of a whole table, see `whole_table`.

        Raises: ValueError: see `whole_table`.
        """
        return whole_table(values, table)

    def with_rows(
        self,
        params: DynamicTable,
        slots: SlotTree,
        rows: TableRows,
        table: TableSpec,
        num_shards: int,
    ) -> State:
        """Writes all rows to a new store on the host, and empties the cache.

        Args:
          params: parameters of all shards.
          slots: slots of all shards.
          rows: array of all rows, or a dictionary as the method `rows` returns it. If `rows` is an
            array, the slots keep their values.
          table: spec of the table.
          num_shards: number of shards.

        Returns: parameters and slots with an empty cache.

        Raises: ValueError: the names or the shapes of the arrays in `rows` do not match the table.
        """
        names = array_names(table, slots)
        if not isinstance(rows, Mapping):
            rows = self.rows(params, slots, table, num_shards) | {"values": rows}
        expected = {}
        for name, array in zip(names, (params.rows, *slots), strict=True):
            expected[name] = (table.vocabulary_size, *array.shape[1:])
        shapes = {name: np.shape(array) for name, array in rows.items()}
        if shapes != expected:
            raise ValueError(f"table {table.name!r} takes {expected}, got {shapes}.")

        no_keys = row_map.empty(params.rows.shape[0] // num_shards)
        keys = hashed_rows.stack([no_keys] * num_shards, 1)
        params = params._replace(keys=keys)
        params = self.advanced(params, num_shards)
        self.begin(params)
        arrays = [rows[name] for name in names]
        self.backing.write(np.arange(table.vocabulary_size), arrays)
        return params, slots


def _cached_rows(params: DynamicTable, keys: Keys, table_name: str) -> Int[Array, " nnz"]:
    """Cache row of each key, with a check at run time that every key is in the cache."""
    rows = row_map.find(params.keys, keys)
    is_missing = keys.is_key & (rows == NO_ROW)
    num_missing = jnp.sum(is_missing, dtype=jnp.int32)

    def stop(num_missing: Array) -> None:
        raise RuntimeError(
            f"rsembed.storage: {int(num_missing)} ids of the batch have no row of table {table_name!r} on the device; "
            "call collection.prefetch(state, batch) before the compiled step, with the batch that it reads."
        )

    # Under `vmap`, a `lax.cond` with one condition per sample becomes a select, which cannot
    # contain a host callback. The batching rule of `checked` uses one condition for all samples, so
    # that no select is needed.
    @jax.custom_batching.custom_vmap
    def checked(rows: Array, num_missing: Array) -> Array:
        jax.lax.cond(
            num_missing > 0,
            lambda: io_callback(stop, None, num_missing),
            lambda: None,
        )
        return rows

    @checked.def_vmap
    def checked_of_all(
        size: int,
        is_batched: Sequence[bool],
        rows: Array,
        num_missing: Array,
    ) -> tuple[Array, bool]:
        del size
        num_missing_of_all = jnp.sum(num_missing)
        return checked(rows, num_missing_of_all), is_batched[0]

    checked_rows: Int[Array, " nnz"] = checked(rows, num_missing)
    return checked_rows

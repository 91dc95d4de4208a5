"""Tables on the host: moves the rows of a batch to device caches, and evicted rows back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import jax
import numpy as np
from jaxtyping import Array, Int, PyTree

from rsembed.collection.occurrences import keys_of_gradients
from rsembed.collection.prepared import PreparedBatch
from rsembed.collection.stack import EmbeddingState, Stack
from rsembed.kernels import api
from rsembed.sizes import padded_size
from rsembed.specs import TableSpec
from rsembed.storage import row_map
from rsembed.storage.dense_rows import whole_table
from rsembed.storage.hashed_rows import DynamicTable
from rsembed.storage.host_cached import BackingStore, Generation, HostCached, Moves
from rsembed.storage.logical_rows import array_names
from rsembed.storage.protocol import State, on_host

ROWS_PER_BLOCK = 1 << 16


class HostRows(HostCached):
    """A `HostCached` storage with the host rows of one table of one collection.

    The host rows belong to one state at a time.

    Args:
      storage: size of the cache and eviction policy.
      table: spec of the table.
    """

    store: BackingStore

    def __init__(self, storage: HostCached, table: TableSpec):
        super().__init__(cache_rows=storage.cache_rows, eviction=storage.eviction)
        self.table = table
        self.generation = Generation(
            f"table {table.name!r}: the host no longer holds the rows for which this state has no place: rows "
            "were exchanged since for another state, or the state is another collection's. Go on from the newest "
            "state, or from a checkpoint."
        )

    def begin(self, params: DynamicTable) -> None:
        """Creates a new store of initial rows.

        Args:
          params: parameters with an empty cache, and with the PRNG key of the initial rows.
        """
        data, kind = jax.random.key_data(params.key), jax.random.key_impl(params.key)
        self.store = self.backing_store(
            self.table, jax.random.wrap_key_data(on_host(data)[0], impl=kind)
        )

    def advanced(self, params: DynamicTable, num_shards: int) -> DynamicTable:
        """Parameters marked with a new generation. The store refuses all older parameters."""
        self.generation.advance(self.generation.number)
        generation: PyTree = np.full(num_shards, self.generation.number, np.uint32)
        return params._replace(generation=generation)

    def rows(
        self, params: DynamicTable, slots: PyTree, table: TableSpec, num_shards: int
    ) -> dict[str, np.ndarray]:
        """All rows of the table, from the device cache if they are in it, else from the store."""
        self.generation.check(on_host(params.generation))
        num_rows, (places, ids) = table.vocabulary_size, self.residents(params)
        starts = range(0, num_rows, ROWS_PER_BLOCK)
        blocks = [
            self.store.read(np.arange(first, min(first + ROWS_PER_BLOCK, num_rows)))
            for first in starts
        ]
        found = [np.concatenate(parts) for parts in zip(*blocks, strict=True)][: 1 + len(slots)]
        for array, near in zip(found, (params.rows, *slots), strict=True):
            array[ids] = on_host(near)[places]
        return dict(zip(array_names(table, slots), found, strict=True))

    def checked_rows(self, values: PyTree, table: TableSpec, step: Int[Array, ""]) -> PyTree:
        """`values` as an array of all rows in the table's dtype. Raises: ValueError: no fit."""
        return whole_table(values, table)

    def with_rows(
        self, params: DynamicTable, slots: PyTree, rows: PyTree, table: TableSpec, num_shards: int
    ) -> State:
        """Parameters and slots after writing a whole table to a new store. The cache is empty.

        `rows` is an array of values, or a dictionary as the method `rows` returns it.

        Raises: ValueError: names or shapes of the rows do not fit the table.
        """
        names, arrays = array_names(table, slots), (params.rows, *slots)
        shapes = {
            name: (table.vocabulary_size, *own.shape[1:])
            for name, own in zip(names, arrays, strict=True)
        }
        if not isinstance(rows, Mapping):
            rows = self.rows(params, slots, table, num_shards) | {"values": rows}
        if (found := {name: np.shape(own) for name, own in rows.items()}) != shapes:
            raise ValueError(f"table {table.name!r} takes {shapes}, got {found}.")
        empty = row_map.empty(params.rows.shape[0] // num_shards)
        keys = jax.tree.map(lambda leaf: np.concatenate([np.asarray(leaf)] * num_shards), empty)
        params = self.advanced(params._replace(keys=keys), num_shards)
        self.begin(params)
        self.store.write(np.arange(table.vocabulary_size), [rows[name] for name in names])
        return params, slots


class Prefetch:
    """Moves rows of a table between the host and the device caches.

    Args:
      stack: stack of the table.

    Raises: NotImplementedError: the mesh has several processes, which would share the rows.
    """

    def __init__(self, stack: Stack):
        self.stack, self.storage = stack, cast(HostRows, stack.storage)
        if stack.devices.num_processes > 1:
            raise NotImplementedError(
                f"table {stack.table.name!r} is kept as {stack.table.storage}, whose rows one process must hold; make "
                "the mesh of one process' devices, or give the table another storage."
            )
        part, split, on_each = stack.partition, stack.devices.split, stack.devices.on_each
        self._place = jax.jit(on_each(self._make_room, (part, split), (part, part)))
        self._gather = jax.jit(on_each(api.gather_rows, (part, part), part))
        scatter = on_each(api.scatter_rows, (part, part, part), part)
        self._scatter, self._scatter_in_place = jax.jit(scatter), jax.jit(scatter, donate_argnums=0)

    def with_places(
        self, params: DynamicTable, slots: PyTree, wanted: Mapping[str, PyTree] | Array
    ) -> tuple[DynamicTable, list[np.ndarray]]:
        """Parameters with cache places for all rows that `wanted` reads, and the pending moves.

        No row has moved yet, and `params` stay valid.

        Args:
          params: parameters of the state.
          slots: slots of the state.
          wanted: a batch, or the rows of `RowGradients`.

        Raises:
          RuntimeError: the state does not have the generation of the store, or the cache is too
            small.
          ValueError: the state has no slots, which move together with their rows.
        """
        name = self.stack.table.name
        if slots is None:
            raise ValueError(
                f"table {name!r} is on the host, where optimizer state moves with its row: keep the slots in the "
                "state, or serve from a checkpoint that a collection without storage= loaded."
            )
        self.storage.generation.check(on_host(params.generation))
        # The program does not get the rows, because on a mesh it would copy them.
        without: PyTree = ()
        found, moves = self._place(params._replace(rows=without), wanted)
        *moves, num_failed = map(on_host, moves)
        if num_failed.any():
            raise RuntimeError(
                f"table {name!r}: {int(num_failed.sum())} ids of the batch find no place among cache_rows="
                f"{self.storage.cache_rows}, of which each device has its share; raise it, or make the batch smaller."
            )
        return found._replace(rows=params.rows), moves

    def moved(
        self, params: DynamicTable, slots: PyTree, moves: Sequence[np.ndarray], *, donates: bool
    ) -> tuple[DynamicTable, PyTree]:
        """Parameters and slots after the moves that `with_places` returned.

        Evicted rows are written to the store, and rows of the batch are read from it.

        Args:
          params: result of `with_places`, with the rows of the state.
          slots: slots of the state.
          moves: result of `with_places`.
          donates: donate the arrays of `params` and `slots`. If False, the old state stays valid
            until `with_new_generation`: the store changes only in evicted rows, which get their
            values in that state.
        """
        rows, ids, left, counts = moves
        if not (most := int(counts.max())):
            return params, slots
        size = padded_size(most)
        rows, ids, left = (
            lane.reshape(counts.size, -1)[:, :size].reshape(-1) for lane in (rows, ids, left)
        )
        place, arrays = self.stack.devices.place_from_host, (params.rows, *slots)
        (rows,), leaves = place([rows], self.stack.partition), left >= 0
        gone = [on_host(array)[leaves] for array in self._gather(arrays, rows)]
        generation = self.storage.generation
        with generation.lock:
            # Another thread may have advanced the store since `with_places` checked it.
            generation.check(on_host(params.generation))
            values = self.storage.store.exchange(left[leaves], gone, np.maximum(ids, 0))
        come = place(values, self.stack.partition)
        near, *kept = (self._scatter_in_place if donates else self._scatter)(
            arrays, rows, tuple(come)
        )
        return params._replace(rows=near), tuple(kept)

    def _make_room(self, params: DynamicTable, wanted: PyTree) -> tuple[DynamicTable, Moves]:
        """`HostCached.make_room` on one device, for a batch or the rows of `RowGradients`."""
        if not isinstance(wanted, Mapping):
            return self.storage.make_room(params, keys_of_gradients(wanted)[0])
        occurrences = self.stack.occurrences(PreparedBatch.of(wanted))
        return self.storage.make_room(params, self.stack.rows.own_keys(occurrences))


def fetched(
    on_host: Mapping[str, Prefetch],
    state: EmbeddingState,
    wanted: Mapping[str, PyTree],
    *,
    donates: bool,
) -> EmbeddingState:
    """State with every row that `wanted` reads in the device caches.

    Rows move only after all stacks have found places. If there are too few, nothing has changed.

    Args:
      on_host: stacks on the host, by name.
      state: state of the collection.
      wanted: by stack, a batch or the rows of `RowGradients`.
      donates: donate the arrays of `state`. If False, `state` stays valid until
        `with_new_generation`.
    """
    tables, slots, moves = dict(state.tables), dict(state.slots), {}
    for name, own in on_host.items():
        tables[name], moves[name] = own.with_places(tables[name], slots.get(name), wanted[name])
    for name, own in on_host.items():
        tables[name], slots[name] = own.moved(
            tables[name], slots[name], moves[name], donates=donates
        )
    return state._replace(tables=tables, slots=slots)


def with_new_generation(on_host: Mapping[str, Prefetch], state: EmbeddingState) -> EmbeddingState:
    """State marked with a new generation. The host stores refuse all older states."""
    tables = dict(state.tables)
    for name, own in on_host.items():
        advanced = own.storage.advanced(tables[name], own.stack.num_shards)
        tables[name] = own.stack.devices.place_from_host(advanced, own.stack.partition)
    return state._replace(tables=tables)

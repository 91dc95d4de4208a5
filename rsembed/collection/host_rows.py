"""Moves rows of tables on the host to device caches, and evicted rows back to the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import jax
from jaxtyping import Array, Int, PyTree

from rsembed.collection.occurrences import keys_of_gradients
from rsembed.collection.prepared import PreparedBatch
from rsembed.collection.stack import ByName, EmbeddingState, Stack
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW
from rsembed.sizes import padded_size
from rsembed.storage.backing_store import Moves
from rsembed.storage.hashed_rows import DynamicTable
from rsembed.storage.host_cached import HostTable
from rsembed.storage.protocol import (
    SlotTree,
    on_host,
)


class Prefetch:
    """Moves the rows of one table between the host and the device caches.

    Args:
      stack: stack of the table.

    Raises: NotImplementedError: the mesh has several processes. Rows on the host must be in the
      memory of one process.
    """

    def __init__(self, stack: Stack):
        self.stack = stack
        self.storage = cast(HostTable, stack.storage)
        if stack.devices.num_processes > 1:
            raise NotImplementedError(
                f"table {stack.table.name!r} is kept as {stack.table.storage}, which works in one "
                "process only; make the mesh of one process' devices, or give the table another "
                "storage."
            )
        part = stack.partition
        split = stack.devices.split
        on_each = stack.devices.on_each
        self._make_room = jax.jit(on_each(self._room_on_device, (part, split), (part, part, part)))
        self._gather = jax.jit(on_each(api.gather_rows, (part, part), part))
        scatter = on_each(api.scatter_rows, (part, part, part), part)
        self._scatter = jax.jit(scatter)
        self._scatter_in_place = jax.jit(scatter, donate_argnums=0)

    def with_room(
        self,
        params: DynamicTable,
        slots: SlotTree,
        wanted: PreparedBatch | Array,
    ) -> tuple[DynamicTable, Moves]:
        """Reserves cache slots for the rows that a batch reads.

        Args:
          params: current parameters of the stack. The arrays in `params` stay valid.
          slots: current optimizer slots of the stack.
          wanted: a batch, or the stack's rows in `RowGradients`.

        Returns: new parameters, and the moves that the caller must pass to `moved`. `with_room`
          itself moves no rows.

        Raises:
          RuntimeError: the state is older than the rows on the host, or the cache is too small.
          ValueError: the state has no optimizer slots. Optimizer slots move together with rows.
        """
        name = self.stack.table.name
        if slots is None:
            raise ValueError(
                f"table {name!r} is on the host, where optimizer state moves with its row: keep the slots in the "
                "state, or serve from a checkpoint that a collection without storage= loaded."
            )
        self.storage.generation.check(on_host(params.generation))
        # Leave out the array of rows, which the compiled program does not need: on a mesh, a
        # program copies every argument that it returns unchanged.
        without_rows: PyTree = ()
        with_room, moves, num_failed = self._make_room(params._replace(rows=without_rows), wanted)
        if (num_failed := on_host(num_failed)).any():
            raise RuntimeError(
                f"table {name!r}: {int(num_failed.sum())} ids of the batch do not fit in the cache "
                f"of cache_rows={self.storage.cache_rows} rows, which the devices share equally; "
                "raise cache_rows, or make the batch smaller."
            )
        return with_room._replace(rows=params.rows), jax.tree.map(on_host, moves)

    def moved(
        self,
        params: DynamicTable,
        slots: SlotTree,
        moves: Moves,
        *,
        donates: bool,
    ) -> tuple[DynamicTable, PyTree]:
        """Moves the rows that `with_room` selected, and returns new parameters and slots.

        Args:
          params: parameters that `with_room` returned.
          slots: current optimizer slots of the stack.
          moves: moves that `with_room` returned.
          donates: whether the arrays of `params` and `slots` are donated. If False, the old state
            stays valid until `with_new_generation`: the host changes only its copies of evicted
            rows, and the old state still has these rows on the device.
        """
        by_shard = (self.stack.num_shards, -1)
        num_moved = (moves.inserted != NO_ROW).reshape(by_shard).sum(axis=1).max()
        if not num_moved:
            return params, slots
        # A program is compiled for every new number of rows, so the rows are padded to one of a few
        # sizes. In `moves`, all shards have parts of equal length, with padding at the end of each
        # part. Cutting each part to `size` entries removes only padding.
        size = padded_size(int(num_moved))
        moves = Moves(*[lane.reshape(by_shard)[:, :size].reshape(-1) for lane in moves])
        place = self.stack.devices.place_from_host
        part = self.stack.partition
        evicted_places, inserted_places = place([moves.evicted_places, moves.inserted_places], part)
        arrays = (params.rows, *slots)
        evicted_values = [on_host(array) for array in self._gather(arrays, evicted_places)]
        storage = self.storage
        with storage.generation.lock:
            # Another thread may have started a new generation after `with_room` checked the
            # generation.
            storage.generation.check(on_host(params.generation))
            loaded = storage.backing.exchange(moves.evicted, evicted_values, moves.inserted)
        scatter = self._scatter
        if donates:
            scatter = self._scatter_in_place
        rows, *slots = scatter(arrays, inserted_places, tuple(place(loaded, part)))
        return params._replace(rows=rows), tuple(slots)

    def _room_on_device(
        self,
        params: DynamicTable,
        wanted: PreparedBatch | Array,
    ) -> tuple[DynamicTable, Moves, Int[Array, "1"]]:
        """Calls `HostCached.make_room` on one device, for a batch or the rows of `RowGradients`."""
        if isinstance(wanted, PreparedBatch):
            occurrences = self.stack.occurrences(wanted)
            keys = self.stack.rows.own_keys(occurrences)
        else:
            keys, _ = keys_of_gradients(wanted)
        return self.storage.make_room(params, keys)


def fetched(
    prefetches: Mapping[str, Prefetch],
    state: EmbeddingState,
    wanted: PreparedBatch | ByName,
    *,
    donates: bool,
) -> EmbeddingState:
    """Copies rows from the host to the device caches, and returns the new state.

    All stacks reserve cache slots before the first row moves, so the error for a cache that is too
    small is raised before any row has moved.

    Args:
      prefetches: the `Prefetch` of each stack on the host, by stack name.
      state: state of the collection.
      wanted: a batch, or the rows of `RowGradients` by stack name. The rows that the batch reads,
        or that have gradients, are copied.
      donates: whether the arrays of `state` are donated. If False, `state` stays valid until
        `with_new_generation`.
    """
    tables = dict(state.tables)
    slots = dict(state.slots)
    moves = {}
    for name, prefetch in prefetches.items():
        of_stack = wanted if isinstance(wanted, PreparedBatch) else wanted[name]
        tables[name], moves[name] = prefetch.with_room(tables[name], slots.get(name), of_stack)
    for name, prefetch in prefetches.items():
        tables[name], slots[name] = prefetch.moved(
            tables[name],
            slots[name],
            moves[name],
            donates=donates,
        )
    return state._replace(tables=tables, slots=slots)


def with_new_generation(
    prefetches: Mapping[str, Prefetch], state: EmbeddingState
) -> EmbeddingState:
    """Gives the state a new generation number, so that the host tables reject all older states."""
    tables = dict(state.tables)
    for name, prefetch in prefetches.items():
        stack = prefetch.stack
        advanced = prefetch.storage.advanced(tables[name], stack.num_shards)
        tables[name] = stack.devices.place_from_host(advanced, stack.partition)
    return state._replace(tables=tables)

"""A table on the host: rows of a batch travel to the devices, and those that make room for them back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from rsembed.bags import as_bags, padded_size
from rsembed.collection.dense_rows import RowLayout
from rsembed.collection.rows import Rows, keys_of_gradients
from rsembed.collection.stack import RowNumberStack, refuse_traced
from rsembed.collection.state import ByName, EmbeddingState
from rsembed.kernels import api
from rsembed.specs import TableSpec
from rsembed.storage.hashed_rows import DynamicTable
from rsembed.storage.host_cached import Generation, HostCached, Moves
from rsembed.storage.protocol import on_host

ROWS_PER_BLOCK = 1 << 16


class HostStack(RowNumberStack):
    """A table whose rows are on the host, and its store there.

    Raises: NotImplementedError: several processes would share the rows.
    """

    storage: HostCached

    def __init__(self, layout: RowLayout, rows: Rows):
        super().__init__(layout, rows)
        if self.devices.num_processes > 1:
            raise NotImplementedError(
                f"table {self.table.name!r} is kept as {self.storage}, whose rows one process must hold; make the mesh "
                "of one process' devices, or give the table another storage."
            )
        self.generation = Generation(
            f"table {self.table.name!r}: the host no longer holds the rows for which this state has no place: rows "
            "were exchanged since for another state, or the state is another collection's. Go on from the newest "
            "state, or from a checkpoint."
        )
        part, split = self.partition, self.devices.split
        on_each = self.devices.on_each
        self._of_batch = jax.jit(on_each(self._make_room, (part, split), (part, part)))
        self._of_rows = jax.jit(on_each(self._make_room, (part, part), (part, part)))
        self._gather = jax.jit(on_each(_gather, (part, part, part), part))
        scatter = on_each(_scatter, (part, part, part, part), (part, part))
        self._scatter, self._scatter_in_place = jax.jit(scatter), jax.jit(scatter, donate_argnums=(0, 1))

    def begin(self, params: DynamicTable) -> DynamicTable:
        """The parameters of a fresh state, to which a fresh store belongs."""
        data, kind = jax.random.key_data(params.key), jax.random.key_impl(params.key)
        self.store = self.storage.backing_store(self.table, jax.random.wrap_key_data(on_host(data)[0], impl=kind))
        return self.of_new_time(params)

    def check(self, params: DynamicTable, slots: PyTree = ()) -> None:
        """Whether the store is the state's.

        Raises:
          RuntimeError: the state is of another time than it, or of another collection.
          ValueError: the state has no slots, which move with their rows.
        """
        if slots is None:
            raise ValueError(
                f"table {self.table.name!r} is on the host, where optimizer state moves with its row: keep the slots "
                "in the state, or serve from a checkpoint that a collection without storage= loaded."
            )
        self.generation.check(on_host(params.generation))

    def with_places(
        self, params: DynamicTable, slots: PyTree, batch: Mapping[str, PyTree] | Array
    ) -> tuple[DynamicTable, list[np.ndarray]]:
        """Parameters with places for the rows of a batch, or for those that row gradients are of, and what must move.

        Nothing has moved yet, and the given parameters stay as they are.
        """
        self.check(params, slots)
        make_room = self._of_batch if isinstance(batch, Mapping) else self._of_rows
        # Places are made without the rows, which a program on a mesh would copy.
        without: PyTree = ()
        found, wanted = make_room(params._replace(rows=without), batch)
        *moves, num_failed = map(on_host, wanted)
        if num_failed.any():
            raise RuntimeError(
                f"table {self.table.name!r}: {int(num_failed.sum())} ids of the batch find no place among cache_rows="
                f"{self.storage.cache_rows}, of which each device has its share; raise it, or make the batch smaller."
            )
        return found._replace(rows=params.rows), moves

    def moved(
        self, params: DynamicTable, slots: PyTree, moves: Sequence[np.ndarray], *, donates: bool
    ) -> tuple[DynamicTable, PyTree]:
        """Parameters and slots after the moves that `with_places` returned. `donates` gives the given arrays away.

        Else those from before stay valid, too: rows that leave are written as they stand in them, and nothing else
        changes, until the store goes on with one state alone (`of_new_time`).
        """
        rows, ids, left, counts = moves
        if most := int(counts.max()):
            size = padded_size(most)
            rows, ids, left = (lane.reshape(counts.size, -1)[:, :size].reshape(-1) for lane in (rows, ids, left))
            (rows,) = self._placed([rows])
            leaves = left >= 0
            gone = [on_host(array)[leaves] for array in self._gather(params, slots, rows)]
            come = self.store.exchange(left[leaves], gone, np.maximum(ids, 0))
            scatter = self._scatter_in_place if donates else self._scatter
            params, slots = scatter(params, slots, rows, tuple(self._placed(come)))
        return params, slots

    def of_new_time(self, params: DynamicTable) -> DynamicTable:
        """The parameters with which alone the store goes on."""
        self.generation.advance(self.generation.number)
        (generation,) = self._placed([np.full(self.rows.num_shards, self.generation.number, np.uint32)])
        return params._replace(generation=generation)

    def values(self, params: DynamicTable, slots: PyTree) -> ByName:
        return {self.table.name: self._arrays(params, slots)[0]}

    def slots(self, params: DynamicTable, slots: PyTree) -> ByName:
        own = tuple(map(jnp.asarray, self._arrays(params, slots)[1:]))
        return {self.table.name: self.rule.pack_slots(own)}

    def checked(self, params: PyTree, slots: PyTree, table: TableSpec, values: PyTree, step: Int[Array, ""]) -> PyTree:
        refuse_traced(table, values, step)
        return [self.as_whole(params, slots, table, values), *self._arrays(params, slots)[1:]]

    def replaced(
        self, params: DynamicTable, slots: PyTree, values: Mapping[str, PyTree]
    ) -> tuple[DynamicTable, PyTree]:
        """A fresh store with these rows and slots, none of which is near."""
        empty = self.devices.on_each(self.storage.emptied, (self.partition,), self.partition)
        params = self.begin(jax.jit(empty)(params))
        arrays = [np.asarray(array) for array in values[self.table.name]]
        self.store.write(np.arange(self.table.vocabulary_size), arrays)
        return params, slots

    def saved(self, params: DynamicTable, slots: PyTree) -> tuple[ByName, ByName]:
        return self._by_name(self._arrays(params, slots))

    def template(self) -> tuple[ByName, ByName]:
        row = jax.ShapeDtypeStruct((1, self.table.embedding_dim), jnp.float32)
        shapes = [(row.shape, jnp.dtype(self.table.dtype))]
        shapes += [(slot.shape, slot.dtype) for slot in jax.eval_shape(self.rule.init_slots, row)]
        num_rows = self.table.vocabulary_size
        return self._by_name([np.broadcast_to(np.zeros((), kind), (num_rows, *shape[1:])) for shape, kind in shapes])

    def restored(self, tables: Mapping[str, PyTree], slots: Mapping[str, PyTree]) -> tuple[PyTree, PyTree]:
        name = self.table.name
        return self.replaced(*self.fresh(), {name: [tables[name], *(slots[name][own] for own in self._slot_names)]})

    def _arrays(self, params: DynamicTable, slots: PyTree) -> list[np.ndarray]:
        """All rows and slots of the table, in the order of ids, on the host."""
        self.check(params, slots)
        starts = range(0, self.table.vocabulary_size, ROWS_PER_BLOCK)
        blocks = [self.store.read(np.arange(i, min(i + ROWS_PER_BLOCK, self.table.vocabulary_size))) for i in starts]
        found = [np.concatenate(parts) for parts in zip(*blocks, strict=True)]
        places, ids = self.storage.residents(params)
        for array, near in zip(found, (params.rows, *slots), strict=True):
            array[ids] = on_host(near)[places]
        return found

    @property
    def _slot_names(self) -> list[str]:
        return list(getattr(self.rule.slot_type, "_fields", map(str, range(self.rule.slot_variables_count()))))

    def _by_name(self, arrays: Sequence[PyTree]) -> tuple[ByName, ByName]:
        rows, *slots = arrays
        return {self.table.name: rows}, {self.table.name: dict(zip(self._slot_names, slots, strict=True))}

    def _placed(self, arrays: Sequence[np.ndarray]) -> list[PyTree]:
        placed: list[PyTree] = self.devices.place_from_host(list(arrays), self.partition)
        return placed

    # On one device

    def _make_room(self, params: DynamicTable, batch: PyTree) -> tuple[DynamicTable, Moves]:
        if isinstance(batch, Mapping):
            bags = {name: as_bags(value, feature=name) for name, value in batch.items()}
            keys = self.rows.own_keys(self.occurrences(bags))
        else:
            keys, _ = keys_of_gradients(batch)
        return self.storage.make_room(params, keys)


def fetched(
    on_host: Mapping[str, HostStack], state: EmbeddingState, wanted: Mapping[str, PyTree], *, donates: bool
) -> EmbeddingState:
    """The state with the rows near that a batch, or lanes of row gradients, wants by stack.

    Rows move after those of all stacks have found a place: without one nothing has changed. `donates` gives the arrays
    of the given state away; else it stays valid, too, until `with_new_generation`.
    """
    if not on_host:
        return state
    tables, slots, moves = dict(state.tables), dict(state.slots), {}
    for name, own in on_host.items():
        tables[name], moves[name] = own.with_places(tables[name], slots.get(name), wanted[name])
    for name, own in on_host.items():
        tables[name], slots[name] = own.moved(tables[name], slots[name], moves[name], donates=donates)
    return state._replace(tables=tables, slots=slots)


def with_new_generation(on_host: Mapping[str, HostStack], state: EmbeddingState) -> EmbeddingState:
    """The state with which alone the stores go on."""
    tables = {name: own.of_new_time(state.tables[name]) for name, own in on_host.items()}
    return state._replace(tables={**state.tables, **tables})


def _gather(params: DynamicTable, slots: PyTree, rows: Array) -> tuple[Array, ...]:
    return api.gather_rows((params.rows, *slots), rows)


def _scatter(
    params: DynamicTable, slots: PyTree, rows: Array, values: tuple[Array, ...]
) -> tuple[DynamicTable, PyTree]:
    table, *kept = api.scatter_rows((params.rows, *slots), rows, values)
    return params._replace(rows=table), tuple(kept)

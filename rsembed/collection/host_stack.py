"""Stacks with rows that are read and written on the host: tables with keys, or with a cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int, PyTree

from rsembed.arrays import is_traced
from rsembed.checks import check_finite
from rsembed.collection.stack import WAY_OUT, ByName, Stack
from rsembed.kernels.contract import NO_ROW
from rsembed.sizes import padded_size
from rsembed.specs import TableSpec
from rsembed.storage import Hashed, hashed_rows, row_map
from rsembed.storage.hashed_rows import DynamicTable
from rsembed.storage.logical_rows import array_names, checked_slots, rows_to_leave
from rsembed.storage.protocol import (
    ByTable,
    Params,
    SlotTree,
    State,
    TableRows,
    on_host,
)

MOST_KEYS = 1 << 16
"""Largest number of rows that one call of a program reads out."""
FIRST_KEY = "initial_key"
"""Name in files of the PRNG key that draws the initial rows of new keys."""


class HostStack(Stack):
    """Tables that the host reads and writes with their slots, outside `jit`."""

    def _by_table(self, read: Callable[..., PyTree], params: Params, slots: SlotTree) -> ByName:
        return self._read_tables(read, params, slots)

    def replaced(
        self,
        params: Params,
        slots: SlotTree,
        rows: ByTable,
        new_slots: ByTable = MappingProxyType({}),
    ) -> State:
        """See `Stack.replaced`. `rows` include the slots, and `new_slots` is empty."""
        del new_slots
        written = self.storage.with_tables(params, slots, rows, self.table, self.num_shards, {})
        placed: State = self.devices.place_from_host(written, self.partition)
        return placed

    def slot_shapes(
        self, params: Params, slots: SlotTree, table: TableSpec, num_rows: int
    ) -> PyTree:
        """Shapes and dtypes of the optimizer state of one table with `num_rows` rows."""
        shapes = []
        for slot in slots:
            shapes.append(jax.ShapeDtypeStruct((num_rows, *slot.shape[1:]), slot.dtype))
        packed: PyTree = tuple(shapes)
        return table.optimizer.pack_slots(packed)

    def rows_with_slots(
        self,
        params: Params,
        slots: SlotTree,
        table: TableSpec,
        rows: TableRows,
        new_slots: SlotTree,
    ) -> ByName:
        """Rows and slots of a table, as an argument of `replaced`.

        Args:
          params: parameters of the state.
          slots: slots of the state.
          table: spec of the table.
          rows: new rows, checked by the storage. None: the rows of the state.
          new_slots: slots of the new rows, or of the state's rows if `rows` is None. Slots of a
            keyed table are in the order of the keys.

        Raises: ValueError, TypeError: slots have the wrong names, shapes or dtypes for the table.
        """
        whole = self._replaced_rows(params, slots, table, rows)
        template = self.slot_shapes(params, slots, table, len(whole.get("values", ())))
        arrays = jax.tree.leaves(checked_slots(new_slots, template, table))
        return whole | dict(zip(array_names(table, slots)[1:], arrays, strict=True))

    def _replaced_rows(
        self, params: Params, slots: SlotTree, table: TableSpec, rows: TableRows
    ) -> ByName:
        """Rows and slots of the state by name.

        If `rows` is not None, it replaces the state's rows.
        """
        whole: ByName = self._by_table(self.storage.rows, params, slots)[table.name]
        if rows is None:
            return whole
        if not isinstance(rows, Mapping):
            rows = {"values": rows}
        return whole | rows

    # Files

    def saved(self, params: Params, slots: SlotTree) -> tuple[ByName, ByName]:
        """Rows and slots of every table by name, as files store them."""
        values_by_table = {}
        slots_by_table = {}
        for table_name, rows in self._by_table(self.storage.rows, params, slots).items():
            arrays = {name.removeprefix("slot_"): array for name, array in rows.items()}
            values_by_table[table_name] = arrays.pop("values")
            slots_by_table[table_name] = arrays
        return values_by_table, slots_by_table

    def restored(self, tables: ByTable, slots: ByTable) -> State:
        """Parameters and slots from the result of `saved`.

        Raises: ValueError: the names or shapes of the arrays differ from those of the table.
        """
        params, fresh_slots = self._fresh()
        rows_by_table = {}
        for table in self.tables:
            rows = {"values": tables[table.name]}
            for name, array in slots.get(table.name, {}).items():
                rows[f"slot_{name}"] = array
            rows_by_table[table.name] = rows
        return self.replaced(params, fresh_slots, rows_by_table)

    def _fresh(self) -> State:
        """Initial parameters and slots, which the caller replaces."""
        start = self.devices.on_each(
            self.rows.init, PartitionSpec(), (self.partition, self.partition)
        )
        fresh: State = jax.jit(start)(jax.random.key(0))
        return fresh


class KeyedStack(HostStack):
    """Tables with rows by 64-bit key."""

    def values(self, params: Params, slots: SlotTree) -> ByName:
        """Keys, rows, slots, last-used steps and use counts of every table, by table name."""
        return self._by_table(self.storage.rows, params, () if slots is None else slots)

    def check_start(self, params: Params, slots: SlotTree) -> None:
        """Checks one row, because rows are drawn one by one during training.

        See `Stack.check_start`.
        """
        if is_traced((params, slots)):
            return
        for table in self._with_initializer():
            row = table.initializer(jax.random.key(0), (1, table.embedding_dim))
            where = f"table {table.name!r}: what its initializer gives for a row"
            check_finite(row, where, way_out=WAY_OUT)

    def _replaced_rows(
        self, params: Params, slots: SlotTree, table: TableSpec, rows: TableRows
    ) -> ByName:
        if rows is None:
            return super()._replaced_rows(params, slots, table, rows)
        return dict(rows) if isinstance(rows, Mapping) else {"values": rows}

    # Files

    def saved(self, params: Params, slots: SlotTree) -> tuple[ByName, ByName]:
        """Keys, rows and slots of every table in one dictionary, and no separate slots."""
        # The state has one PRNG key per table and shard. All shards have equal keys, so the file
        # gets the keys of the first.
        key_data = on_host(jax.random.key_data(params.key))
        impl = jax.random.key_impl(params.key)
        tables = {}
        no_slots: ByName = {}
        rows_by_table = self._by_table(self.storage.rows, params, slots)
        for (name, rows), data in zip(rows_by_table.items(), key_data, strict=False):
            first_key = jax.random.wrap_key_data(jnp.asarray(data), impl=impl)
            tables[name] = rows | {FIRST_KEY: first_key}
            no_slots[name] = {}
        return tables, no_slots

    def restored(self, tables: ByTable, slots: ByTable) -> State:
        """Parameters and slots from the result of `saved`.

        Raises: ValueError: the names or shapes of the arrays differ from those of the table.
        """
        del slots
        params, fresh_slots = self._fresh()
        rows_by_table = {}
        first_keys = []
        for table in self.tables:
            rows = dict(tables[table.name])
            first_keys.append(rows.pop(FIRST_KEY))
            rows_by_table[table.name] = rows
        key_data = [np.asarray(jax.random.key_data(key)) for key in first_keys]
        (placed,) = self.devices.place_from_host(
            [np.stack(key_data * self.num_shards)], self.partition
        )
        impl = jax.random.key_impl(first_keys[0])
        params = params._replace(key=jax.random.wrap_key_data(placed, impl=impl))
        return self.replaced(params, fresh_slots, rows_by_table)

    # Eviction

    def evicted(
        self,
        params: DynamicTable,
        slots: SlotTree,
        table: TableSpec,
        step: Int[Array, ""],
        reasons: Mapping[str, Any],
    ) -> tuple[DynamicTable, dict[str, np.ndarray]]:
        """Evicts keys of a table. Returns new parameters, and the evicted keys with their rows.

        See `EmbeddingCollection.evict`. `params` are donated. The compiled program that removes
        keys does not get the rows as an argument, because on a mesh it would copy them.
        """
        number = self.tables.index(table)
        policy = cast(Hashed, self.storage).eviction
        # Every shard has all tables in order, so table indices repeat.
        table_numbers = np.arange(params.num_tables) % len(self.tables)
        rows_of_table = params.rows.shape[0] // params.num_tables
        is_of_table = np.repeat(table_numbers == number, rows_of_table)
        places, evicted = rows_to_leave(
            params, table, policy, is_of_table, **reasons, step=int(on_host(step))
        )
        padded = np.pad(places, (0, padded_size(places.size) - places.size))
        blocks = np.split(padded, range(MOST_KEYS, padded.size, MOST_KEYS))
        for name, array in zip(array_names(table, slots), (params.rows, *slots), strict=True):
            values = [on_host(_picked(array, block)) for block in blocks]
            evicted[name] = np.concatenate(values)[: places.size]
        leaves = np.zeros(is_of_table.shape, bool)
        leaves[places] = True
        (leaves,) = self.devices.place_from_host([leaves], self.partition)
        nothing: PyTree = ()
        unused_for = reasons["unused_for"]
        if unused_for is None:
            unused_for = 2**31 - 1  # No key can be unused for that many steps.
        remaining = self._without(
            params._replace(rows=nothing), leaves, step, np.int32(unused_for), np.int32(number)
        )
        return remaining._replace(rows=params.rows), evicted

    @functools.cached_property
    def _without(self) -> Callable[..., DynamicTable]:
        part = self.partition
        everywhere = PartitionSpec()
        on_each = self.devices.on_each(_without, (part, part, *[everywhere] * 3), part)
        return jax.jit(on_each, donate_argnums=0)


@jax.jit
def _picked(array: Array, places: Int[Array, " n"]) -> Array:
    return array[places]


def _without(params: DynamicTable, leaves: Bool[Array, " rows"], *forget: Array) -> DynamicTable:
    """Parameters of a device without the keys of some rows.

    Args:
      params: parameters of the device.
      leaves: mask of the rows to free.
      forget: step, age and table number for `hashed_rows.forget_older`, which removes keys that
        wait for admission.
    """
    rows = jnp.arange(leaves.shape[0], dtype=jnp.int32)
    remaining = row_map.release(params.keys, jnp.where(leaves, rows, NO_ROW))
    counters = params.counters.add(evicted=remaining.num_free - params.keys.num_free)
    without_keys = hashed_rows.with_keys(params, remaining)._replace(counters=counters)
    return hashed_rows.forget_older(without_keys, *forget)

"""Stacks of keyed tables and of tables on the host, which are read and written outside `jit`."""

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
from rsembed.kernels.contract import NO_ROW, KeyOrKeys
from rsembed.sizes import padded_size
from rsembed.specs import TableSpec
from rsembed.storage import Hashed, hashed_rows, row_map
from rsembed.storage.hashed import DynamicRows
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
"""Maximum number of evicted rows that are copied to the host at once."""
FIRST_KEY = "initial_key"
"""Name in checkpoints of a keyed table's PRNG key, which draws the rows of new keys."""


class HostStack(Stack):
    """Stack that is read and written on the host, outside `jit`.

    Rows and slots of a table are always read and written together.
    """

    def replaced(
        self,
        params: Params,
        slots: SlotTree,
        rows: ByTable,
        new_slots: ByTable = MappingProxyType({}),
    ) -> State:
        """See `Stack.replaced`. Slots come from `rows`, and `new_slots` is not used."""
        del new_slots
        written = self.storage.with_tables(
            params,
            slots,
            rows,
            self.table,
            self.num_shards,
            {},
        )
        placed: State = self.devices.place_from_host(written, self.partition)
        return placed

    def rows_with_slots(
        self,
        params: Params,
        slots: SlotTree,
        table: TableSpec,
        rows: TableRows,
        new_slots: SlotTree,
    ) -> ByName:
        """Combines new rows and new slots of a table into one dictionary, as `replaced` expects.

        Args:
          params: current parameters of the stack.
          slots: current slots of the stack.
          table: spec of the table.
          rows: new rows, from `Storage.checked_rows`. None: the table keeps its current rows.
          new_slots: new slots for the new rows, or if `rows` is None, for the current rows.
            For a keyed table, slots are in the order of the keys.

        Raises: ValueError, TypeError: slots have the wrong names, shapes or dtypes for the table.
        """
        whole: ByName = {}
        # New rows of a keyed table replace only the rows of their keys.
        if rows is None or not self.storage.takes_keys:
            whole |= self._by_table(self.storage.rows, params, slots)[table.name]
        if isinstance(rows, Mapping):
            whole |= rows
        elif rows is not None:
            whole["values"] = rows
        num_rows = len(whole.get("values", ()))
        shapes: list[PyTree] = []
        for slot in slots:
            shape = num_rows, *slot.shape[1:]
            shapes.append(jax.ShapeDtypeStruct(shape, slot.dtype))
        template = table.optimizer.pack_slots(tuple(shapes))
        arrays = jax.tree.leaves(checked_slots(new_slots, template, table))
        _, *slot_names = array_names(table, slots)
        return whole | dict(zip(slot_names, arrays, strict=True))

    # Files

    def saved(self, params: Params, slots: SlotTree) -> tuple[ByName, ByName]:
        """Rows by table name, and slots by table name, as they are saved in files."""
        values_by_table = {}
        slots_by_table = {}
        rows_by_table = self._by_table(self.storage.rows, params, slots)
        for table_name, rows in rows_by_table.items():
            arrays = {}
            for name, array in rows.items():
                arrays[name.removeprefix("slot_")] = array
            values_by_table[table_name] = arrays.pop("values")
            slots_by_table[table_name] = arrays
        return values_by_table, slots_by_table

    def restored(self, tables: ByTable, slots: ByTable) -> State:
        """Parameters and slots from the result of `saved`.

        Raises: ValueError: the names or shapes of the arrays do not match the table.
        """
        # The PRNG key of the initial rows does not matter, because all rows are overwritten.
        params, fresh_slots = self.init_from_keys(jax.random.key(0)[None])
        rows_by_table = {}
        for table in self.tables:
            rows = {"values": tables[table.name]}
            slots_of_table = slots.get(table.name, {})
            for name, array in slots_of_table.items():
                rows[f"slot_{name}"] = array
            rows_by_table[table.name] = rows
        return self.replaced(params, fresh_slots, rows_by_table)

    @functools.cached_property
    def init_from_keys(self) -> Callable[[KeyOrKeys], State]:
        """Compiled function from the PRNG keys of the tables to initial parameters and slots.

        The function does not depend on the names of the tables.
        """
        storage = cast(DynamicRows, self.storage)

        def on_device(keys: KeyOrKeys) -> State:
            return storage.init_from_keys(keys, self.table, self.rows.shard, self.num_shards)

        partitions = (self.partition, self.partition)
        return jax.jit(self.devices.on_each(on_device, (PartitionSpec(),), partitions))


class KeyedStack(HostStack):
    """Stack of tables with 64-bit keys."""

    def values(self, params: Params, slots: SlotTree) -> ByName:
        """Dictionaries of keys, rows, slots, last steps and counts, by table name."""
        return self._by_table(self.storage.rows, params, slots)

    def check_start(self, params: Params, slots: SlotTree) -> None:
        """See `Stack.check_start`.

        A keyed table has no rows before training, so `check_start` draws and checks a single row.
        """
        if is_traced((params, slots)):
            return
        for table in self._with_initializer():
            shape = 1, table.embedding_dim
            row = table.initializer(jax.random.key(0), shape)
            where = f"table {table.name!r}: what its initializer gives for a row"
            check_finite(row, where, way_out=WAY_OUT)

    # Files

    def saved(self, params: Params, slots: SlotTree) -> tuple[ByName, ByName]:
        """Keys, rows and slots of every table in one dictionary, by table name.

        The second result has an empty dictionary for every table, because the first result contains
        the slots.
        """
        # `params.key` has one PRNG key per shard and table. The PRNG keys of all shards are equal,
        # so only the PRNG keys of the first shard are saved.
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

        Raises: ValueError: the names or shapes of the arrays do not match the table.
        """
        del slots
        rows_by_table = {}
        first_keys = []
        for table in self.tables:
            rows = dict(tables[table.name])
            first_keys.append(rows.pop(FIRST_KEY))
            rows_by_table[table.name] = rows
        params, fresh_slots = self.init_from_keys(jnp.stack(first_keys))
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

        See `EmbeddingCollection.evict`. `params` are donated.
        """
        number = self.tables.index(table)
        policy = cast(Hashed, self.storage).eviction
        # Each array of `params` contains all tables of the first shard, then all tables of the
        # second shard, and so on.
        table_numbers = np.arange(params.num_tables) % len(self.tables)
        rows_of_table = params.rows.shape[0] // params.num_tables
        is_of_table = np.repeat(table_numbers == number, rows_of_table)
        rows, evicted = rows_to_leave(
            params,
            table,
            policy,
            is_of_table,
            **reasons,
            step=int(on_host(step)),
        )
        num_padding = padded_size(rows.size) - rows.size
        padded = np.pad(rows, (0, num_padding))
        blocks = np.split(padded, range(MOST_KEYS, padded.size, MOST_KEYS))
        names = array_names(table, slots)
        arrays = params.rows, *slots
        for name, array in zip(names, arrays, strict=True):
            values = [on_host(_picked(array, block)) for block in blocks]
            evicted[name] = np.concatenate(values)[: rows.size]
        leaves = np.zeros(is_of_table.shape, bool)
        leaves[rows] = True
        (leaves,) = self.devices.place_from_host([leaves], self.partition)
        # Leave out the array of rows, which the compiled program does not need: on a mesh, a
        # program copies every argument that it returns unchanged.
        nothing: PyTree = ()
        unused_for = reasons["unused_for"]
        if unused_for is None:
            unused_for = 2**31 - 1  # Steps are int32, so a limit of 2**31 - 1 evicts no key.
        remaining = self._without(
            params._replace(rows=nothing),
            leaves,
            step,
            np.int32(unused_for),
            np.int32(number),
        )
        return remaining._replace(rows=params.rows), evicted

    @functools.cached_property
    def _without(self) -> Callable[..., DynamicTable]:
        part = self.partition
        everywhere = PartitionSpec()
        partitions = part, part, everywhere, everywhere, everywhere
        on_each = self.devices.on_each(_without, partitions, part)
        return jax.jit(on_each, donate_argnums=0)


@jax.jit
def _picked(array: Array, places: Int[Array, " n"]) -> Array:
    return array[places]


def _without(params: DynamicTable, leaves: Bool[Array, " rows"], *forget: Array) -> DynamicTable:
    """Removes the keys of the rows that `leaves` marks, on one device. Returns new parameters.

    Args:
      params: parameters on this device.
      leaves: mask of the rows to free.
      forget: step, age limit and table index for `hashed_rows.forget_older`, which removes keys
        that wait for admission if their last occurrence is older than the age limit.
    """
    rows = jnp.arange(leaves.shape[0], dtype=jnp.int32)
    freed_rows = jnp.where(leaves, rows, NO_ROW)
    remaining = row_map.release(params.keys, freed_rows)
    num_evicted = remaining.num_free - params.keys.num_free
    counters = params.counters.add(evicted=num_evicted)
    without_keys = hashed_rows.with_keys(params, remaining)
    without_keys = without_keys._replace(counters=counters)
    return hashed_rows.forget_older(without_keys, *forget)

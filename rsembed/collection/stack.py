"""The state of a collection, and its stacks: tables that share arrays and kernel calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from rsembed.arrays import is_traced
from rsembed.checks import check_finite
from rsembed.collection.occurrences import Occurrences, occurrences_of
from rsembed.collection.prepared import PreparedBatch
from rsembed.collection.rows import Rows
from rsembed.fingerprint import Fingerprint
from rsembed.specs import TableSpec, default_initializer
from rsembed.storage.protocol import (
    ByTable,
    Params,
    SlotTree,
    State,
)
from rsembed.storage.row_layout import RowLayout

Activations = dict[str, Float[Array, "..."]]
Batch = Mapping[str, PyTree]
ActivationGradients = Mapping[str, PyTree]
"""Mapping from the name of a feature to the gradients of its activations."""
ByName = dict[str, PyTree]
"""Dictionary from the names of tables, stacks or features to pytrees."""
WAY_OUT = "give one that makes finite numbers of the table's dtype"


class EmbeddingState(NamedTuple):
    """State of a collection: everything that training changes.

    Donate the `EmbeddingState` to the training step, so that the step can update tables in place.

    Args:
      tables: mapping from the name of a stack to one array `[rows, dim]`, or to the parameters of
        the stack's storage. On a mesh, all rows of the first shard come first, followed by the rows
        of the second shard. `EmbeddingCollection.tables` returns the rows of each table in order of
        their ids.
      slots: mapping from the name of a stack to the optimizer state of its tables.
      step: number of updates so far.
      key: PRNG key of stochastic rounding, used for nothing else.
      layout: fingerprint of the layout of rows: the table, the id and the optimizer of each row of
        the arrays (from `RowLayout.facts`, by stack). Checkpoints use the fingerprint, and a
        collection rejects a state with a different layout. None: the layout of rows is not checked.
        If a user builds a state from arrays, `layout` is None.
    """

    tables: ByName
    slots: ByName
    step: Int[Array, ""]
    key: PRNGKeyArray
    layout: Fingerprint | None = None


class Stack:
    """Tables that share one storage, with the features that read them.

    A `Stack` reads and writes single tables in the parameters and slots of the stack. A state for
    serving has no slots, so methods that only read rows accept an empty tuple as slots.

    Args:
      layout: tables and features of the stack. If the rows of all tables are in one array, the
        layout has the position of each table.
      rows: object that looks up and updates the rows on the devices.
    """

    def __init__(self, layout: RowLayout, rows: Rows):
        self.layout = layout
        self.rows = rows
        self.storage = rows.storage
        self.devices = rows.devices
        self.table = rows.table
        self.rule = rows.table.optimizer
        self.tables = rows.storage.tables_of(rows.table)
        self.num_shards = rows.num_shards
        self.partition = rows.partition

    def occurrences(self, batch: PreparedBatch) -> Occurrences:
        """Ids of the stack's features in a batch. An id outside its table contributes nothing."""
        return occurrences_of(batch, self.layout, self.storage)

    def values(self, params: Params, slots: SlotTree) -> ByName:
        """Rows of every table by name, as in `EmbeddingCollection.tables`."""
        del slots
        rows_by_table = self._by_table(self.storage.rows, params, ())
        values = {}
        for name, rows in rows_by_table.items():
            values[name] = rows["values"]
        return values

    def each_table(self, params: Params, slots: SlotTree) -> Iterator[tuple[str, PyTree]]:
        """Yields the name and rows of each table, as in `EmbeddingCollection.each_table`.

        The rows may be arrays of the state, so do not donate the state while the rows are in use.
        """
        yield from self.values(params, slots).items()

    def slots(self, params: Params, slots: SlotTree) -> ByName:
        """Optimizer state of every table by name, as in `EmbeddingCollection.slots`."""
        return self._by_table(self.storage.optimizer_state, params, slots)

    def _by_table(self, read: Callable[..., PyTree], params: Params, slots: SlotTree) -> ByName:
        """Calls `read`, a method of the storage, for every table. Returns results by table name."""
        if not self.storage.rows_on_host:
            params, slots = self.devices.place((params, slots), PartitionSpec())
        results = {}
        parts = self.storage.unstack(params, slots, self.table, self.num_shards)
        for table, part in zip(self.tables, parts, strict=True):
            results[table.name] = read(*part, table, self.num_shards)
        return results

    def replaced(
        self,
        params: Params,
        slots: SlotTree,
        rows: ByTable,
        new_slots: ByTable = MappingProxyType({}),
    ) -> State:
        """Replaces rows and slots of some tables. Returns new parameters and slots.

        Args:
          params: current parameters of the stack.
          slots: current slots of the stack.
          rows: checked new rows by table name.
          new_slots: checked new slots by table name.
        """
        everywhere = PartitionSpec()
        if rows:
            params = self.devices.place(params, everywhere)
        if new_slots:
            slots = self.devices.place(slots, everywhere)
        params, slots = self.storage.with_tables(
            params,
            slots,
            rows,
            self.table,
            self.num_shards,
            new_slots,
        )
        if rows:
            params = self.devices.place(params, self.partition)
        if new_slots:
            slots = self.devices.place(slots, self.partition)
        return params, slots

    def counts(self, params: Params) -> dict[str, dict[str, np.ndarray]]:
        """Counters of each table, by table name and counter name, with one number per shard.

        If the storage has no counters, the dictionary of each table is empty.
        """
        counts = self.storage.counts(params, self.num_shards * len(self.tables))
        counts_by_table = {}
        for number, table in enumerate(self.tables):
            counts_of_table = {}
            for name, numbers in counts.items():
                by_shard = numbers.reshape(self.num_shards, -1)
                counts_of_table[name] = by_shard[:, number]
            counts_by_table[table.name] = counts_of_table
        return counts_by_table

    def check_start(self, params: Params, slots: SlotTree) -> None:
        """Checks the initial values of the stack.

        The default implementation checks nothing. A table on the host checks its initial rows when
        training draws them.

        Raises: ValueError: a custom initializer gave a number that is not finite.
        """

    def _with_initializer(self) -> list[TableSpec]:
        """Tables of the stack that have a custom initializer."""
        tables = []
        for table in self.tables:
            if table.initializer is not default_initializer:
                tables.append(table)
        return tables


class ArrayStack(Stack):
    """Tables that have all their rows in one array."""

    def each_table(self, params: Params, slots: SlotTree) -> Iterator[tuple[str, PyTree]]:
        """See `Stack.each_table`. On one device, a table that fills the array is not copied."""
        if self.devices.mesh is not None:
            yield from super().each_table(params, slots)
            return
        for table in self.tables:
            rows = self.layout.all_rows(table.name, table.vocabulary_size)
            yield table.name, params[rows]

    def slots(self, params: Params, slots: SlotTree) -> ByName:
        """See `Stack.slots`. Reading slots does not copy the array of rows, which may be large."""
        del params
        return self._by_table(self.storage.optimizer_state, (), slots)

    def check_start(self, params: Params, slots: SlotTree) -> None:
        """See `Stack.check_start`."""
        if is_traced((params, slots)):
            return
        draws_slots = any(callable(value) for value in self.rule.slot_initial_values())
        if not draws_slots and not self._with_initializer():
            return
        try:
            for array in (params, *slots):
                check_finite(array, f"stack {self.layout.stack.name!r}", way_out=WAY_OUT)
        except ValueError:
            # The error message of a stack does not name the table, so after an error, the tables
            # are checked one by one. `values` copies the tables, so a valid stack is checked as a
            # whole.
            for table_name, values in self.values(params, slots).items():
                where = f"table {table_name!r}: what its initializer gives"
                check_finite(values, where, way_out=WAY_OUT)
            raise

"""Stacks: rows of one table or several, the features that read them, and the tables out of them and in again.

The stack of tables with keys is in `keyed_stack.py`, that of a table on the host in `host_stack.py`.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, PyTree

from rsembed.bags import Bags, is_traced
from rsembed.collection.dense_rows import RowLayout
from rsembed.collection.rows import Occurrences, Rows
from rsembed.collection.state import ByName
from rsembed.kernels.contract import NO_ROW, Segment
from rsembed.specs import TableSpec
from rsembed.storage.logical_rows import as_dtype
from rsembed.storage.protocol import on_host

OF_ROWS = ("keys", "values", "last_step", "count", "waiting_keys", "waiting_last_step", "waiting_count")
"""Names of the arrays that describe rows by key, beside those of slots."""


class Stack(abc.ABC):
    """Rows of one table or several, the features that read them, and the tables by name.

    Each storage has its own stack. All methods take the parameters and slots of a state; slots are None in a state for
    serving.

    Args:
      layout: where the rows of each table lie.
      rows: how devices find, read and step them.
    """

    def __init__(self, layout: RowLayout, rows: Rows):
        self.layout, self.rows, self.storage, self.devices = layout, rows, rows.storage, rows.devices
        self.table, self.rule, self.partition = rows.table, rows.table.optimizer, rows.partition
        self.tables = rows.storage.tables_of(rows.table)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.layout, self.rows)  # programs and stores belong to this process

    @property
    def gradient_partitions(self) -> tuple[PartitionSpec, PartitionSpec]:
        """How rows and values of `RowGradients` are split."""
        return (PartitionSpec() if self.rows.splits_columns else self.partition), self.partition

    @abc.abstractmethod
    def occurrences(self, bags: Mapping[str, Bags]) -> Occurrences:
        """The ids of the stack's features; those outside their table are none."""

    @abc.abstractmethod
    def values(self, params: PyTree, slots: PyTree) -> ByName:
        """The rows of every table, as `EmbeddingCollection.tables` returns them."""

    @abc.abstractmethod
    def slots(self, params: PyTree, slots: PyTree) -> ByName:
        """The optimizer state of every table, as `EmbeddingCollection.slots` returns it."""

    @abc.abstractmethod
    def checked(self, params: PyTree, slots: PyTree, table: TableSpec, values: PyTree, step: Int[Array, ""]) -> PyTree:
        """New rows of a table as `replaced` takes them; nothing has changed yet.

        Raises: ValueError: they do not fit. RuntimeError: this is inside `jit`, where the storage cannot take them.
        """

    def replaced(self, params: PyTree, slots: PyTree, values: Mapping[str, PyTree]) -> tuple[PyTree, PyTree]:
        """Parameters and slots with what `checked` returned of some tables."""
        num_shards = self.rows.num_shards
        parts = self.storage.unstack(params, slots, self.table, num_shards)
        for number, table in enumerate(self.tables):
            if table.name in values:
                parts[number] = self.storage.with_rows(*parts[number], values[table.name], table, num_shards)
        written = self.storage.stack(parts, params, num_shards)
        placed: tuple[PyTree, PyTree] = self.devices.place_from_host(written, self.partition)
        return placed

    def counts(self, params: PyTree) -> dict[str, dict[str, np.ndarray]]:
        """Counters of every device by table; empty for storages that count nothing."""
        return {self.table.name: self.storage.counts(params, self.rows.num_shards)}

    def fresh(self) -> tuple[PyTree, PyTree]:
        """Parameters and slots of a state of which all will be replaced."""
        part = self.partition
        start = self.devices.on_each(self.rows.init, PartitionSpec(), (part, part))
        made: tuple[PyTree, PyTree] = jax.jit(start)(jax.random.key(0))
        return made

    # Parts of these

    def with_rows_of_keys(self, table: TableSpec, whole: np.ndarray, rows: Mapping[str, PyTree]) -> np.ndarray:
        """A table whose ids are rows, with those that a table with keys has."""
        keys, values = (np.asarray(rows.get(part, ())) for part in ("keys", "values"))
        if unknown := sorted(part for part in rows if part not in OF_ROWS and not part.startswith("slot_")):
            raise ValueError(
                f"table {table.name!r}: cannot take {unknown} of rows by key; it takes 'keys' and 'values'."
            )
        if values.shape != (keys.size, whole.shape[1]) or not np.issubdtype(keys.dtype, np.integer):
            raise ValueError(
                f"table {table.name!r} takes rows by key as 'keys' [n] and 'values' [n, {whole.shape[1]}], got "
                f"{ {part: np.shape(array) for part, array in rows.items()} }."
            )
        if (is_outside := (keys < 0) | (keys >= len(whole))).any():
            raise ValueError(
                f"table {table.name!r} has {len(whole)} rows, none for key {keys[is_outside][0]} "
                f"({int(is_outside.sum())} such keys); hash them into the table, or keep it as rsembed.Hashed."
            )
        distinct, counts = np.unique(keys, return_counts=True)
        if (counts > 1).any():
            raise ValueError(f"table {table.name!r}: keys must be distinct, but {distinct[counts > 1][0]} comes twice.")
        whole[keys] = as_dtype(values, whole.dtype, f"table {table.name!r}", "values")
        return whole

    def as_whole(self, params: PyTree, slots: PyTree, table: TableSpec, values: PyTree) -> PyTree:
        """All rows of a table, from an array of them or from some by key."""
        if isinstance(values, Mapping):
            values = self.with_rows_of_keys(table, np.array(self.values(params, slots)[table.name]), values)
        shape = (table.vocabulary_size, table.embedding_dim)
        if np.shape(values) != shape:
            raise ValueError(f"table {table.name!r} has shape {shape}, the new values {np.shape(values)}.")
        if is_traced(values):
            return values
        return as_dtype(on_host(values), table.dtype, f"table {table.name!r}", "values")  # may be of another mesh


class ArrayStack(Stack):
    """Tables that lie under each other in one array, as the layout says."""

    def occurrences(self, bags: Mapping[str, Bags]) -> Occurrences:
        return Occurrences(self.layout.segments(bags))

    def values(self, params: PyTree, slots: PyTree) -> ByName:
        return self._copies(params)

    def slots(self, params: PyTree, slots: PyTree) -> ByName:
        copies = [self._copies(slot) for slot in slots]
        return {t.name: self.rule.pack_slots(tuple(own[t.name] for own in copies)) for t in self.layout.stack.tables}

    def checked(self, params: PyTree, slots: PyTree, table: TableSpec, values: PyTree, step: Int[Array, ""]) -> PyTree:
        return self.as_whole(params, slots, table, values)

    def replaced(self, params: PyTree, slots: PyTree, values: Mapping[str, PyTree]) -> tuple[PyTree, PyTree]:
        params = self.devices.place(params, PartitionSpec())
        for name, own in values.items():
            params = params.at[self.layout.all_rows(name, len(own))].set(jnp.asarray(own, params.dtype))
        return self.devices.place(params, self.partition), slots

    def _copies(self, array: Array) -> dict[str, Array]:
        """The rows of each table, on every device."""
        layout, dense = self.layout, self.devices.place(array, PartitionSpec())
        return {table.name: _copy_of(dense, layout.all_rows(table.name, table.rows)) for table in layout.stack.tables}


class RowNumberStack(Stack):
    """One table with a storage of its own whose ids are row numbers."""

    def occurrences(self, bags: Mapping[str, Bags]) -> Occurrences:
        segments = RowLayout.whole(self.layout.stack).segments(bags)
        # What stands behind the last bag must not be looked for.
        ends = [bags[feature.name].offsets[-1] for feature in self.layout.stack.features]
        return Occurrences([_first_rows(segment, end) for segment, end in zip(segments, ends, strict=True)])


class TrainStack(RowNumberStack):
    """Tables whose rows are made of few numbers, equal on all devices: products of the cores of tensor trains."""

    def __init__(self, layout: RowLayout, rows: Rows):
        super().__init__(layout, rows)
        everywhere = PartitionSpec()
        own = [functools.partial(self.storage.whole, table=self.table, number=k) for k in range(len(self.tables))]
        self._all_rows = [jax.jit(self.devices.on_each(of_table, everywhere, everywhere)) for of_table in own]

    def values(self, params: PyTree, slots: PyTree) -> ByName:
        return {table.name: rows(params) for table, rows in zip(self.tables, self._all_rows, strict=True)}

    def slots(self, params: PyTree, slots: PyTree) -> ByName:
        parts = self.storage.unstack(params, slots, self.table, self.rows.num_shards)
        copies = [self.devices.place(jax.tree.map(jnp.copy, own), PartitionSpec()) for _, own in parts]
        return dict(zip((table.name for table in self.tables), copies, strict=True))

    def checked(self, params: PyTree, slots: PyTree, table: TableSpec, values: PyTree, step: Int[Array, ""]) -> PyTree:
        return values


def refuse_traced(table: TableSpec, *values: PyTree) -> None:
    """Raises: RuntimeError: this is inside `jit`, where rows of the table cannot be written."""
    if is_traced(values):
        raise RuntimeError(
            f"table {table.name!r} is kept as {table.storage}: with_tables writes its rows beside compiled programs; "
            "call it outside of jit, between two steps."
        )


def _first_rows(segment: Segment, count: Array | np.integer) -> Segment:
    is_used = jnp.arange(segment.rows.shape[0], dtype=jnp.int32) < count
    return dataclasses.replace(segment, rows=jnp.where(is_used, segment.rows, NO_ROW))


def _copy_of(array: Array, rows: slice | np.ndarray) -> Array:
    """Some rows; indexing by all of them would give the array itself, which a donated step deletes."""
    own = array[rows]
    return jnp.copy(own) if own is array else own

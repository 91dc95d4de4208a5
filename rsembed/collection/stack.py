"""Stacks: rows of one table or several, and the features that read them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from rsembed.bags import Bags
from rsembed.collection.layout import RowLayout
from rsembed.collection.rows import Occurrences, Rows
from rsembed.homes.home import Home
from rsembed.kernels.contract import NO_ROW, Segment
from rsembed.keys import as_keys
from rsembed.specs import TableSpec

ROWS_PER_BLOCK = 1 << 14
"""Rows of a table that are made of other numbers at once."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """Rows under the features of their stack.

    Args:
      layout: where the rows of each table lie.
      rows: what does the work.
    """

    layout: RowLayout
    rows: Rows

    @property
    def home(self) -> Home:
        """What keeps the rows."""
        return self.rows.home

    @property
    def is_dense(self) -> bool:
        """Whether the rows are an array, of one table or several; else they are as a table's storage has them."""
        return self.table.storage is None

    @property
    def table(self) -> TableSpec:
        """Whose rows these are; of dense rows the first."""
        return self.rows.table

    @property
    def partition(self) -> PartitionSpec:
        """How parameters and slots are split."""
        return self.rows.partition

    @property
    def gradient_partitions(self) -> tuple[PartitionSpec, PartitionSpec]:
        """How rows and values of `RowGradients` are split."""
        return (PartitionSpec() if self.rows.splits_columns else self.partition), self.partition

    @property
    def tables(self) -> tuple[TableSpec, ...]:
        """Those that share the home; of dense rows the first."""
        return self.home.tables_of(self.table)

    def apart(self, params: Any, slots: Any) -> dict[str, tuple[Any, Any]]:
        """Parameters and slots of each table that shares the home; of several, on the host."""
        parts = self.home.apart(params, slots, self.table, self.rows.num_shards)
        return {table.name: own for table, own in zip(self.tables, parts, strict=True)}

    def counts(self, params: Any) -> dict[str, dict[str, np.ndarray]]:
        """What happened on each device so far, of each table that shares the home."""
        tables, num_shards = self.tables, self.rows.num_shards
        counts = self.home.counts(params, num_shards * len(tables))
        if len(tables) == 1:
            return {self.table.name: counts}
        return {
            table.name: {what: numbers.reshape(num_shards, -1)[:, k] for what, numbers in counts.items()}
            for k, table in enumerate(tables)
        }

    def all_rows_of(self, params: Any, slots: Any) -> dict[str, dict[str, np.ndarray]]:
        """Rows by key with what belongs to them, of each table that shares the home, on the host."""
        return {
            table.name: self.home.rows(*own, table, self.rows.num_shards)
            for table, own in zip(self.tables, self.apart(params, slots).values(), strict=True)
        }

    def with_rows(self, params: Any, slots: Any, rows: Mapping[str, Any]) -> tuple[Any, Any]:
        """Parameters and slots of all devices with rows of some tables written, by key; not inside `jit`."""
        by_table = self.apart(params, slots)
        for table in self.tables:
            if table.name in rows:
                given = *by_table[table.name], rows[table.name], table, self.rows.num_shards
                by_table[table.name] = self.home.with_rows(*given)
        written = self.home.together(list(by_table.values()), params, self.rows.num_shards)
        return self.rows.devices.place_from_host(written, self.partition)

    def all_rows(self, params: Any, *, number: int) -> Array:
        """An array of rows, of a table that is kept in few numbers; one device's part of a program.

        `number` says which of the tables that share the home, whose rows are numbered through.

        Blocks of rows are written into one array: nothing else is as large.
        """
        sizes = [table.vocabulary_size for table in self.tables]
        first_row, num_rows, dim = sum(sizes[:number]), sizes[number], self.table.embedding_dim
        size = min(num_rows, ROWS_PER_BLOCK)

        def put(number: Array, rows: Array) -> Array:
            first = jnp.minimum(number * size, num_rows - size)
            ids = as_keys(first_row + first + jnp.arange(size, dtype=jnp.int32))
            block = self.home.read(params, ids, self.table)[0]
            return jax.lax.dynamic_update_slice_in_dim(rows, block, first, 0)

        nothing = jnp.zeros((num_rows, dim), self.home.vector_dtype(self.table))
        rows: Array = jax.lax.fori_loop(0, -(-num_rows // size), put, nothing)
        return rows

    def occurrences(self, bags: Mapping[str, Bags]) -> Occurrences:
        """The ids of the stack's features; those outside their table are none."""
        if self.is_dense:
            return Occurrences(self.layout.segments(bags))
        # What stands behind the last bag must not be looked for.
        num_ids = [bags[feature.name].offsets[-1] for feature in self.layout.stack.features]
        if not self.home.takes_keys:
            pairs = zip(self._ids.segments(bags), num_ids, strict=True)
            return Occurrences([_first_rows(segment, count) for segment, count in pairs])
        features, names = [], [table.name for table in self.layout.stack.tables]
        for feature, count in zip(self.layout.stack.features, num_ids, strict=True):
            own = bags[feature.name]
            keys = as_keys(own.ids).only(jnp.arange(own.ids.shape[0], dtype=jnp.int32) < count)
            if len(names) > 1:
                number = names.index(feature.table_name)
                keys = keys._replace(table=jnp.full(keys.shape, number, jnp.int32))
            offsets = None if feature.combiner == "none" else jnp.asarray(own.offsets)
            weights = None if own.weights is None else jnp.asarray(own.weights)
            features.append((keys, Segment(keys.low.astype(jnp.int32), offsets, weights, feature.combiner)))
        return Occurrences.of(features)

    @functools.cached_property
    def _ids(self) -> RowLayout:
        """The layout of one table whose rows are its ids."""
        return RowLayout.whole(self.layout.stack)


def _first_rows(segment: Segment, count: Any) -> Segment:
    is_used = jnp.arange(segment.rows.shape[0], dtype=jnp.int32) < count
    return dataclasses.replace(segment, rows=jnp.where(is_used, segment.rows, NO_ROW))

"""Stacks: rows of one table or several, and the features that read them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from rsembed.bags import Bags
from rsembed.collection.asked_rows import AskedRows
from rsembed.collection.layout import RowLayout
from rsembed.collection.reproducible import occurrence_numbers
from rsembed.collection.rows import Occurrences, Rows
from rsembed.homes.home import Home
from rsembed.kernels.contract import NO_ROW, Segment
from rsembed.keys import as_keys
from rsembed.specs import TableSpec


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

    def with_rows(self, params: Any, slots: Any, rows: Any) -> tuple[Any, Any]:
        """Parameters and slots of all devices with some rows written, by key; not inside `jit`."""
        written = self.home.with_rows(params, slots, rows, self.table, self.rows.num_shards)
        return self.rows.devices.place_from_host(written, self.partition)

    def all_rows(self, params: Any) -> Array:
        """An array of rows, where ids are row numbers."""
        if self.is_dense:
            array: Array = params
            return array
        return self.home.read(params, as_keys(jnp.arange(self.table.vocabulary_size, dtype=jnp.int32)), self.table)[0]

    def occurrences(self, bags: Mapping[str, Bags]) -> Occurrences:
        """The ids of the stack's features; those outside their table are none."""
        if self.is_dense:
            is_ordered = isinstance(self.rows, AskedRows) and self.rows.is_reproducible
            numbers = occurrence_numbers(self.layout, bags) if is_ordered else None
            return Occurrences(self.layout.segments(bags), numbers=numbers)
        # What stands behind the last bag must not be looked for.
        num_ids = [bags[feature.name].offsets[-1] for feature in self.layout.stack.features]
        if not self.home.takes_keys:
            pairs = zip(self._ids.segments(bags), num_ids, strict=True)
            return Occurrences([_first_rows(segment, count) for segment, count in pairs])
        features = []
        for feature, count in zip(self.layout.stack.features, num_ids, strict=True):
            own = bags[feature.name]
            keys = as_keys(own.ids).only(jnp.arange(own.ids.shape[0], dtype=jnp.int32) < count)
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

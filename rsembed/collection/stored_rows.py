"""Stacks of one table that is no array of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, PRNGKeyArray

from rsembed.bags import Bags
from rsembed.collection.layout import RowLayout
from rsembed.collection.state import Traffic
from rsembed.collection.stored_table import Occurrences, StoredTable, keys_of_gradients
from rsembed.homes.home import Home
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Segment, Step
from rsembed.keys import as_keys
from rsembed.specs import TableSpec


@dataclasses.dataclass(frozen=True)
class StoredRows:
    """A stored table under the features of its stack.

    Args:
      layout: the table's name and place among the stacks.
      engine: what does the work.
    """

    layout: RowLayout
    engine: StoredTable

    @property
    def home(self) -> Home:
        """What keeps the rows."""
        return self.engine.home

    @property
    def table(self) -> TableSpec:
        """Whose rows these are."""
        return self.engine.table

    @property
    def partition(self) -> PartitionSpec:
        """How parameters and slots are split."""
        return self.engine.partition

    @property
    def gradient_partitions(self) -> tuple[PartitionSpec, PartitionSpec]:
        """How rows and values of `RowGradients` are split."""
        return self.partition, self.partition

    def init(self, key: PRNGKeyArray, specs: Mapping[str, TableSpec]) -> tuple[Any, Any]:
        """Parameters and slots."""
        del specs
        return self.engine.init(key)

    def with_rows(self, params: Any, slots: Any, rows: Any) -> tuple[Any, Any]:
        """Parameters and slots of all devices with some rows written, by key; not inside `jit`."""
        written = self.home.with_rows(params, slots, rows, self.table, self.engine.num_shards)
        return self.engine.devices.place_from_host(written, self.partition)

    def dense(self, params: Any) -> Array:
        """The table as an array of rows, where ids are row numbers."""
        return self.home.read(params, as_keys(jnp.arange(self.table.vocabulary_size, dtype=jnp.int32)), self.table)[0]

    def occurrences(self, bags: Mapping[str, Bags]) -> Occurrences:
        """The ids of the stack's features; those outside the table are none."""
        features = []
        for feature in self.layout.stack.features:
            own = bags[feature.name]
            keys = as_keys(own.ids).only(jnp.arange(own.ids.shape[0], dtype=jnp.int32) < own.offsets[-1])
            if not self.home.takes_keys:
                keys = keys.only((keys.high == 0) & (keys.low < self.table.vocabulary_size))
            offsets = None if feature.combiner == "none" else jnp.asarray(own.offsets)
            weights = None if own.weights is None else jnp.asarray(own.weights)
            features.append((keys, Segment(keys.low.astype(jnp.int32), offsets, weights, feature.combiner)))
        return Occurrences.of(features)

    def lookup(self, params: Any, bags: Mapping[str, Bags], *, train: bool) -> tuple[Sequence[Array], Traffic]:
        """Pooled rows of this device's samples, one array per feature; `train` reads ahead of the step that follows."""
        outputs, num_unknown, traffic = self.engine.look_up(params, self.occurrences(bags), train=train)
        if self.home.takes_keys:
            traffic = traffic._replace(num_unknown=self.engine.devices.total(num_unknown))
        return outputs, traffic

    def row_gradients(self, bags: Mapping[str, Bags], d_outputs: Sequence[Array]) -> tuple[Array, Array]:
        """Distinct ids (of a table with keys: lanes) that any device looked up here, and their gradients."""
        lanes, values = self.engine.key_gradients(self.occurrences(bags), d_outputs)
        if self.home.takes_keys:
            return lanes, values
        ids = jnp.where(lanes[:, 2] > 0, lanes[:, 1].astype(jnp.int32), NO_ROW)
        return api.row_gradients(self.layout.num_rows, [Segment(ids, None, None, "none")], [values])  # in their order

    def apply(self, params: Any, slots: Any, rows: Array, values: Array, step: Step) -> tuple[Any, Any]:
        """One step with the gradients of distinct ids or keys."""
        return self.engine.apply(params, slots, *keys_of_gradients(rows), values, step)

    def update(
        self, params: Any, slots: Any, bags: Mapping[str, Bags], d_outputs: Sequence[Array], step: Step
    ) -> tuple[Any, Any]:
        """Keys without a row get one, and all rows are stepped."""
        return self.engine.step_batch(params, slots, self.occurrences(bags), d_outputs, step)

"""A table that is no array of rows, such as a tensor train; on a mesh, every device has a copy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, PRNGKeyArray

from rsembed.bags import Bags
from rsembed.collection.devices import Devices
from rsembed.collection.layout import RowLayout
from rsembed.collection.state import Step, Traffic
from rsembed.initial_values import table_key
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW
from rsembed.specs import TableSpec


@dataclasses.dataclass(frozen=True)
class StoredTable:
    """Rows are made for a batch, and pooled from where they stand in it."""

    layout: RowLayout
    devices: Devices
    table: TableSpec
    storage: Any  # a RowStorage, which is a protocol and cannot be checked
    implementation: str | None = None

    @property
    def partition(self) -> PartitionSpec:
        """How parameters and slots are split: not at all."""
        return PartitionSpec()

    @property
    def gradient_partitions(self) -> tuple[PartitionSpec, PartitionSpec]:
        """How rows and values of `RowGradients` are split: not at all."""
        return PartitionSpec(), PartitionSpec()

    def init(self, key: PRNGKeyArray, specs: Mapping[str, TableSpec]) -> tuple[Any, Any]:
        """Parameters and slots."""
        del specs
        params = self.storage.init(table_key(key, self.table.name), self.table)
        return params, self.storage.init_slots(params, self.table)

    def dense(self, params: Any) -> Array:
        """The table as an array of rows."""
        return self.storage.fetch(params, jnp.arange(self.table.vocabulary_size, dtype=jnp.int32), self.table)

    def lookup(self, params: Any, bags: Mapping[str, Bags]) -> tuple[Sequence[Array], Traffic]:
        """Pooled rows of this device's samples, one array per feature."""
        segments, pooled, first = self.layout.segments(bags), [], 0
        vectors = self.storage.fetch(params, jnp.concatenate([segment.rows for segment in segments]), self.table)
        for segment in segments:
            places = first + jnp.arange(segment.rows.shape[0], dtype=jnp.int32)
            pooled.append(dataclasses.replace(segment, rows=jnp.where(segment.rows == NO_ROW, NO_ROW, places)))
            first += segment.rows.shape[0]
        quantization = self.table.quantization_config
        outputs = api.lookup(vectors, pooled, quantization=quantization, implementation=self.implementation)
        return outputs, Traffic.of(0, 0)

    def row_gradients(self, bags: Mapping[str, Bags], d_outputs: Sequence[Array]) -> tuple[Array, Array]:
        """Distinct rows of the global batch and their gradients."""
        segments = self.devices.gather_segments(self.layout.segments(bags))
        d_outputs = [self.devices.gather(d_output) for d_output in d_outputs]
        return api.row_gradients(self.table.vocabulary_size, segments, d_outputs, implementation=self.implementation)

    def apply(self, params: Any, slots: Any, rows: Array, values: Array, step: Step) -> tuple[Any, Any]:
        """One step with the gradients of distinct rows."""
        return self.storage.step(params, slots, rows, values, step.hyper, self.table)

    def update(
        self, params: Any, slots: Any, bags: Mapping[str, Bags], d_outputs: Sequence[Array], step: Step
    ) -> tuple[Any, Any]:
        """Row gradients, then the step."""
        return self.apply(params, slots, *self.row_gradients(bags, d_outputs), step)

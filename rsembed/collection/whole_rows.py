"""Stacks that lie whole on every device: on one device, replicated over a mesh, or split by column."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, PRNGKeyArray

from rsembed.bags import Bags
from rsembed.collection.devices import Devices
from rsembed.collection.initial_state import initial_shard
from rsembed.collection.layout import RowLayout
from rsembed.collection.state import Traffic
from rsembed.kernels import api
from rsembed.kernels.contract import Segment, Step
from rsembed.optimizers import Slots
from rsembed.specs import TableSpec


@dataclasses.dataclass(frozen=True)
class WholeRows:
    """Every device steps its rows with the gradients of the global batch, so that copies never drift apart.

    With `splits_columns`, a device keeps some columns of all rows: it pools the global batch for them, and pieces of
    activations travel instead of rows.

    Raises: ValueError: the stack cannot be split by column.
    """

    layout: RowLayout
    devices: Devices
    splits_columns: bool = False
    implementation: str | None = None

    def __post_init__(self) -> None:
        spec, num_devices = self.layout.stack.spec, self.devices.num_devices
        problem = None
        if spec.stack_embedding_dim % num_devices:
            problem = f"embedding_dim={spec.stack_embedding_dim} is not divisible by {num_devices} devices"
        elif spec.optimizer.is_row_wise:
            problem = f"{type(spec.optimizer).__name__} steps whole rows"
        elif self.layout.stack.tables[0].stochastic_rounding:
            problem = "stochastic rounding draws for whole rows"
        if self.splits_columns and problem is not None:
            tables = [table.name for table in self.layout.stack.tables]
            raise ValueError(f"tables {tables} cannot be placed 'column': {problem}; place them 'row'.")

    @property
    def partition(self) -> PartitionSpec:
        """How table and slots are split."""
        return PartitionSpec(None, self.devices.axes) if self.splits_columns else PartitionSpec()

    @property
    def gradient_partitions(self) -> tuple[PartitionSpec, PartitionSpec]:
        """How rows and values of `RowGradients` are split."""
        return PartitionSpec(), self.partition

    def init(self, key: PRNGKeyArray, specs: Mapping[str, TableSpec]) -> tuple[Array, Slots]:
        """Rows and slots on this device."""
        num_parts = self.devices.num_devices if self.splits_columns else 1
        width = self.layout.stack.spec.stack_embedding_dim // num_parts
        first, zero = self.devices.index() * (width if num_parts > 1 else 0), jnp.zeros((), jnp.int32)
        return initial_shard(
            self.layout, specs, key, shard=zero, columns=(first, width), implementation=self.implementation
        )

    def dense(self, table: Array) -> Array:
        """The table as an array of rows."""
        return table

    def lookup(self, table: Array, bags: Mapping[str, Bags], *, train: bool) -> tuple[Sequence[Array], Traffic]:
        """Pooled rows of this device's samples, one array per feature of the stack."""
        del train
        segments = self.layout.segments(bags)
        if self.splits_columns:
            num_values = sum(s.rows.size * (1 if s.weights is None else 2) for s in segments)
            segments = self.devices.gather_segments(segments)
        quantization = self.layout.stack.spec.quantization_config
        outputs = api.lookup(table, segments, quantization=quantization, implementation=self.implementation)
        if not self.splits_columns:
            return outputs, Traffic.of(0, 0)
        num_values += sum(output.size for output in outputs) // self.devices.num_devices
        traffic = Traffic.of(1, 4 * (self.devices.num_devices - 1) * num_values)
        return [self.devices.rows_of_all(output) for output in outputs], traffic

    def _global_batch(self, bags: Mapping[str, Bags], d_outputs: Sequence[Array]) -> tuple[list[Segment], list[Array]]:
        collect = self.devices.columns_of_all if self.splits_columns else self.devices.gather
        return self.devices.gather_segments(self.layout.segments(bags)), [collect(d_output) for d_output in d_outputs]

    def row_gradients(self, bags: Mapping[str, Bags], d_outputs: Sequence[Array]) -> tuple[Array, Array]:
        """Distinct rows of the global batch and their gradients."""
        segments, d_outputs = self._global_batch(bags, d_outputs)
        return api.row_gradients(self.layout.num_rows, segments, d_outputs, implementation=self.implementation)

    def apply(self, table: Array, slots: Slots, rows: Array, values: Array, step: Step) -> tuple[Array, Slots]:
        """One step of distinct rows."""
        how, rounding = (step.hyper, step.rule), self.layout.rounding(step.rounding, 0)
        return api.apply_rows(table, slots, rows, values, *how, rounding=rounding, implementation=self.implementation)

    def update(
        self, table: Array, slots: Slots, bags: Mapping[str, Bags], d_outputs: Sequence[Array], step: Step
    ) -> tuple[Array, Slots]:
        """Row gradients and step in one kernel."""
        batch, rounding = self._global_batch(bags, d_outputs), self.layout.rounding(step.rounding, 0)
        return api.update(
            table, slots, *batch, step.hyper, step.rule, rounding=rounding, implementation=self.implementation
        )

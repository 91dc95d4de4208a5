"""Stacks whose rows have one owner each, which all devices ask."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, PRNGKeyArray

from rsembed.bags import Bags
from rsembed.collection.devices import Devices
from rsembed.collection.initial_state import initial_shard
from rsembed.collection.layout import RowLayout, read_from
from rsembed.collection.state import Traffic
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Rounding, Segment, Step
from rsembed.optimizers import Hyperparameters, OptimizerSpec, Slots
from rsembed.parallel import Wanted, ask, default_capacity, distinct
from rsembed.specs import TableSpec


@dataclasses.dataclass(frozen=True)
class RowShards:
    """Distinct rows are asked for, come back and are pooled where they were asked for; gradients take that way, too.

    Args:
      layout: which device owns which rows.
      devices: the mesh.
      capacity: places per block of a round; None takes what usually needs one round.
      is_reproducible: gradients travel one by one and are summed by their owner in the order of the global batch,
        which no number of devices changes.
      implementation: of the kernels.
    """

    layout: RowLayout
    devices: Devices
    capacity: int | None = None
    is_reproducible: bool = False
    implementation: str | None = None

    @property
    def partition(self) -> PartitionSpec:
        """How table and slots are split."""
        return self.devices.split

    @property
    def gradient_partitions(self) -> tuple[PartitionSpec, PartitionSpec]:
        """How rows and values of `RowGradients` are split."""
        return self.devices.split, self.devices.split

    def init(self, key: PRNGKeyArray, specs: Mapping[str, TableSpec]) -> tuple[Array, Slots]:
        """The rows that this device owns."""
        columns = jnp.zeros((), jnp.int32), self.layout.stack.spec.stack_embedding_dim
        return initial_shard(
            self.layout, specs, key, shard=self.devices.index(), columns=columns, implementation=self.implementation
        )

    def dense(self, table: Array) -> Array:
        """The table as an array of rows."""
        return table

    def lookup(self, table: Array, bags: Mapping[str, Bags], *, train: bool) -> tuple[Sequence[Array], Traffic]:
        """Pooled rows of this device's samples, one array per feature of the stack."""
        del train
        segments = self.layout.segments(bags)
        wanted = self._distinct(segments)
        capacity = self._capacity(wanted)

        def answer(state: None, rows: Array) -> tuple[None, Array]:
            return state, api.gather_rows((table,), rows, implementation=self.implementation)[0]

        asked = self._local_rows(wanted)
        _, vectors, rounds = ask(wanted, asked, answer, None, capacity=capacity, axis_name=self.devices.axes)
        outputs = api.lookup(
            vectors,
            read_from(wanted.entry_of, segments),
            quantization=self.layout.stack.spec.quantization_config,
            implementation=self.implementation,
        )
        bytes_per_place = asked.dtype.itemsize + table.shape[1] * table.dtype.itemsize
        return outputs, Traffic.of(rounds, (self.devices.num_devices - 1) * capacity * bytes_per_place)

    def _distinct(self, segments: Sequence[Segment], *extra_lanes: Array) -> Wanted:
        rows = jnp.concatenate([segment.rows for segment in segments])
        owners, local = jnp.divmod(rows, self.layout.rows_per_shard)
        owners = jnp.where(rows == NO_ROW, NO_ROW, owners)
        return distinct(owners, [local, *extra_lanes], num_devices=self.devices.num_devices)

    def _local_rows(self, wanted: Wanted) -> Int[Array, " nnz"]:
        return jnp.where(wanted.first_of == NO_ROW, NO_ROW, wanted.lanes[0])

    def _capacity(self, wanted: Wanted) -> int:
        num_entries = wanted.entry_of.shape[0]
        if self.is_reproducible or self.layout.stack.spec.optimizer.moves_all_rows:
            return num_entries  # one round: the owner sees all gradients of a row in their order, and moves others once
        capacity = self.capacity or default_capacity(num_entries, self.devices.num_devices)
        return min(capacity, num_entries)

    def _send_gradients(self, answer: Any, state: Any, bags: Mapping[str, Bags], d_outputs: Sequence[Array]) -> Any:
        """State of the owner, after `answer(state, segments, gradients)` of what arrived in every round."""
        segments = self.layout.segments(bags)
        occurrences = [_occurrence_numbers(self.layout, bags)] if self.is_reproducible else []
        wanted = self._distinct(segments, *occurrences)
        entries = read_from(wanted.entry_of, segments)
        num_entries = wanted.entry_of.shape[0]
        # Every entry occurs, so the gradient in place `e` is that of entry `e`.
        _, gradients = api.row_gradients(num_entries, entries, d_outputs, implementation=self.implementation)

        def receive(state: Any, arrived: tuple[Array, Array]) -> tuple[Any, None]:
            rows, values = arrived
            return answer(state, [Segment(rows, None, None, "none")], [values]), None

        payload = self._local_rows(wanted), gradients
        capacity = self._capacity(wanted)
        return ask(wanted, payload, receive, state, capacity=capacity, axis_name=self.devices.axes)[0]

    def row_gradients(self, bags: Mapping[str, Bags], d_outputs: Sequence[Array]) -> tuple[Array, Array]:
        """Rows of this device that any device looked up, and their gradients."""
        num_rows, dim = self.layout.rows_per_shard, self.layout.stack.spec.stack_embedding_dim
        num_entries = sum(bags[feature.name].ids.shape[0] for feature in self.layout.stack.features)
        bound = min(num_rows, num_entries * self.devices.num_devices)

        def collect(state: Any, segments: Sequence[Segment], values: Sequence[Array]) -> Any:
            count, all_rows, all_gradients = state
            rows, gradients = api.row_gradients(num_rows, segments, values, implementation=self.implementation)
            is_row = rows != NO_ROW
            # A round brings whole rows, all of them behind those of earlier rounds.
            places = jnp.where(is_row, count + jnp.arange(rows.shape[0], dtype=jnp.int32), bound)
            rows = jnp.where(is_row, rows + self.devices.index() * num_rows, NO_ROW)
            return (
                count + jnp.sum(is_row, dtype=jnp.int32),
                all_rows.at[places].set(rows, mode="drop"),
                all_gradients.at[places].set(gradients, mode="drop"),
            )

        nothing = jnp.zeros((), jnp.int32), jnp.full(bound, NO_ROW, jnp.int32), jnp.zeros((bound, dim), jnp.float32)
        _, rows, gradients = self._send_gradients(collect, nothing, bags, d_outputs)
        return rows, gradients

    def apply(self, table: Array, slots: Slots, rows: Array, values: Array, step: Step) -> tuple[Array, Slots]:
        """One step of distinct rows that this device owns."""
        local = rows - self.devices.index() * self.layout.rows_per_shard
        is_own = (rows != NO_ROW) & (local >= 0) & (local < self.layout.rows_per_shard)
        rows, rounding = jnp.where(is_own, local, NO_ROW), self._rounding(step)
        how = (step.hyper, self._rule(step))
        return api.apply_rows(table, slots, rows, values, *how, rounding=rounding, implementation=self.implementation)

    def update(
        self, table: Array, slots: Slots, bags: Mapping[str, Bags], d_outputs: Sequence[Array], step: Step
    ) -> tuple[Array, Slots]:
        """Owners step their rows as gradients arrive."""
        how, rounding = (step.hyper, self._rule(step)), self._rounding(step)

        def step_rows(state: tuple[Array, Slots], segments: Sequence[Segment], gradients: Sequence[Array]) -> Any:
            return api.update(*state, segments, gradients, *how, rounding=rounding, implementation=self.implementation)

        return self._send_gradients(step_rows, (table, slots), bags, d_outputs)

    def _rule(self, step: Step) -> OptimizerSpec:
        return _InBlocks(rule=step.rule) if self.is_reproducible and step.rule.is_row_wise else step.rule

    def _rounding(self, step: Step) -> Rounding | None:
        """Rounding that draws the same numbers for a row, whoever owns it."""
        return self.layout.rounding(step.rounding, self.devices.index())


# A multiple of all vector widths, so that no row of a block is computed otherwise than the others.
ROWS_PER_BLOCK = 256


@dataclasses.dataclass(frozen=True, repr=False)
class _InBlocks(OptimizerSpec):
    """A rule that is applied to blocks of one size.

    What a compiler makes of sums over a row depends on how many rows there are, and so on the number of devices.
    """

    rule: Any = None

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        num_rows = rows.shape[0]
        num_blocks = -(-num_rows // ROWS_PER_BLOCK)

        def cut(array: Array) -> Array:
            missing = num_blocks * ROWS_PER_BLOCK - num_rows
            padded = jnp.pad(array, ((0, missing), *((0, 0),) * (array.ndim - 1)))
            return padded.reshape(num_blocks, ROWS_PER_BLOCK, *array.shape[1:])

        def step_block(block: Any) -> Any:
            # Barriers keep a block's program apart from what is around it.
            stepped = self.rule.step_rows(*jax.lax.optimization_barrier(block), hyper)
            return jax.lax.optimization_barrier(stepped)

        stepped = jax.lax.map(step_block, jax.tree.map(cut, (rows, slots, gradients)))
        result: tuple[Array, Slots] = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_rows], stepped)
        return result

    def short_name(self) -> str:
        return self.rule.short_name()


def _occurrence_numbers(layout: RowLayout, bags: Mapping[str, Bags]) -> Int[Array, " nnz"]:
    """Number of every occurrence on this device, sample by sample: as the global batch counts them."""
    names = [feature.name for feature in layout.stack.features]
    num_samples = bags[names[0]].num_bags
    if any(bags[name].num_bags != num_samples for name in names):
        raise ValueError(f"reproducible= needs equally many samples of features {names}, which share their tables.")
    widths = [bags[name].ids.shape[0] // max(num_samples, 1) for name in names]
    first = jnp.arange(num_samples, dtype=jnp.int32)[:, None] * sum(widths)
    positions = np.split(np.arange(sum(widths), dtype=np.int32), np.cumsum(widths)[:-1])
    return jnp.concatenate([(first + own[None, :]).reshape(-1) for own in positions])

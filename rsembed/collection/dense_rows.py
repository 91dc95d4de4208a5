"""The home of dense rows: the tables of a stack in one array, which the kernels read and step by whole bags."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from rsembed.collection.initial_rows import OwnShards, PlacedTable, initial_shards
from rsembed.collection.layout import RowLayout
from rsembed.homes.home import Ahead, Home
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Rounding, Segment, SegmentGradients, Step
from rsembed.keys import Keys
from rsembed.optimizers import Slots
from rsembed.specs import TableSpec


@dataclasses.dataclass(frozen=True)
class DenseRows(Home):
    """Rows of several tables, numbered as a layout says; ids are such numbers, and so they come.

    Args:
      layout: which row is whose, and which shard has it.
      tables: in the order of the layout.
      num_parts: shards that each keep some columns of all rows; 1 where rows are whole.
      implementation: of the kernels.
    """

    layout: RowLayout
    tables: tuple[TableSpec, ...]
    num_parts: int = 1
    implementation: str | None = None
    ids_are_rows: ClassVar[bool] = True

    def check(self, table: TableSpec) -> None:
        """Every table can be kept like this."""

    def num_ids(self, table: TableSpec) -> int:
        """Rows of the whole array."""
        return self.layout.num_rows

    def init(
        self, key: PRNGKeyArray, table: TableSpec, *, shard: Int[Array, ""], num_shards: int
    ) -> tuple[Array, Slots]:
        """Rows and slots of a shard, or its columns of all rows."""
        layout, zero = self.layout, jnp.zeros((), jnp.int32)
        width, num_own = table.embedding_dim // self.num_parts, layout.shards_per_device
        placed = [
            PlacedTable(spec, place, own.setting.padded_vocab_size)
            for spec, place, own in zip(self.tables, layout.places, layout.stack.tables, strict=True)
        ]
        first = zero if self.num_parts > 1 else shard * num_own
        return initial_shards(
            key,
            placed,
            OwnShards(first, num_own, layout.rows_per_shard, layout.spread),
            rule=table.optimizer,
            columns=(shard * width if self.num_parts > 1 else zero, width),
            is_full=layout.num_rows == layout.stack.spec.stack_vocab_size,
            implementation=self.implementation,
        )

    def owners(self, keys: Keys, num_shards: int) -> Int[Array, " nnz"]:
        """The shard of every row."""
        return jnp.where(keys.is_key, keys.low.astype(jnp.int32) // self.layout.rows_per_device, num_shards)

    def vector_dtype(self, table: TableSpec) -> Any:
        """That of the table: half as many bytes travel."""
        return jnp.dtype(table.dtype)

    def rounding(self, rounding: Rounding | None, shard: Int[Array, ""] | int) -> Rounding | None:
        """Noise that no stack, placement or mesh changes."""
        return self.layout.rounding(rounding, shard)

    def read(
        self, params: Array, keys: Keys, table: TableSpec, *, ahead: Ahead | None = None
    ) -> tuple[Float[Array, "nnz dim"], Int[Array, ""]]:
        """Rows as they are stored."""
        del ahead
        return self.vectors(params, self._rows(keys), table), jnp.zeros((), jnp.int32)

    def vectors(self, params: Array, rows: Int[Array, " nnz"], table: TableSpec) -> Float[Array, "nnz dim"]:
        """Rows as they are stored."""
        del table
        (vectors,) = api.dispatch("gather_rows", self.implementation, (params,), rows)
        return cast(Array, vectors)

    def find(
        self, params: Array, slots: Slots, keys: Keys, table: TableSpec, *, occurrences: Int[Array, " nnz"], step: Step
    ) -> tuple[Array, Slots, Int[Array, " nnz"]]:
        """Every row is there."""
        del table, occurrences, step
        return params, slots, self._rows(keys)

    def step(
        self,
        params: Array,
        slots: Slots,
        segments: Sequence[Segment],
        d_outputs: Sequence[Float[Array, "_ dim"]],
        table: TableSpec,
        *,
        step: Step,
    ) -> tuple[Array, Slots]:
        """Row gradients and step in one kernel."""
        gradients = SegmentGradients(segments, d_outputs)
        return api.update(params, slots, gradients, step, implementation=self.implementation)

    def step_distinct(
        self,
        params: Array,
        slots: Slots,
        rows: Int[Array, " n"],
        gradients: Float[Array, "n dim"],
        table: TableSpec,
        *,
        step: Step,
    ) -> tuple[Array, Slots]:
        """The same without sorting."""
        return api.apply_rows(params, slots, rows, gradients, step, implementation=self.implementation)

    def _rows(self, keys: Keys) -> Int[Array, " nnz"]:
        """Rows of the device that owns them."""
        return jnp.where(keys.is_key, keys.low.astype(jnp.int32) % self.layout.rows_per_device, NO_ROW)

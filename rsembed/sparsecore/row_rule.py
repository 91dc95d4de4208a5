"""A row rule that keeps padding out of sight and rows inside limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rsembed.optimizers import Hyperparameters, OptimizerSpec, SGDOptimizerSpec, Slots
from rsembed.specs import StackedTableSpec, TableSpec

RowLimits = tuple[float | None, float | None]


@dataclasses.dataclass(frozen=True, repr=False)
class BoundedRowRule(OptimizerSpec):
    """Another optimizer's rule on the first `num_columns` columns, with the stepped rows clipped.

    The step is part of the rule, so it still happens in place and touches no other row. Slots as wide as what the rule
    sees are padded like the table, so that all arrays of a stack have equal columns.

    Args:
      inner: the optimizer.
      num_columns: columns that the rule sees; None means all. Columns behind them stay as they are.
      minimum: lower limit of stepped entries, or None.
      maximum: upper limit of stepped entries, or None.
    """

    inner: OptimizerSpec = dataclasses.field(default_factory=SGDOptimizerSpec)
    num_columns: int | None = None
    minimum: float | None = None
    maximum: float | None = None

    @property
    def moves_all_rows(self) -> bool:
        return self.inner.moves_all_rows

    def get_hyperparameters(self, step: Any = None) -> Hyperparameters:
        return self.inner.get_hyperparameters(step)

    def slot_initial_values(self) -> tuple[Any, ...]:
        return self.inner.slot_initial_values()

    def init_slots(self, rows: Array) -> Slots:
        slots = self.inner.init_slots(rows[:, : self.num_columns])
        return tuple(
            jnp.pad(slot, ((0, 0), (0, rows.shape[1] - slot.shape[1]))) if is_padded else slot
            for slot, is_padded in zip(slots, self._padded_slots(rows), strict=True)
        )

    def _padded_slots(self, rows: Array) -> list[bool]:
        seen = jax.ShapeDtypeStruct((rows.shape[0], self._num_seen(rows)), jnp.float32)
        return [slot.shape == seen.shape for slot in jax.eval_shape(self.inner.init_slots, seen)]

    def _num_seen(self, rows: Array) -> int:
        return rows.shape[1] if self.num_columns is None else self.num_columns

    def pack_slots(self, slots: Slots) -> Any:
        return self.inner.pack_slots(slots)

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        end, are_padded = self._num_seen(rows), self._padded_slots(rows)
        seen = tuple(slot[:, :end] if is_padded else slot for slot, is_padded in zip(slots, are_padded, strict=True))
        new, new_slots = self.inner.step_rows(rows[:, :end], seen, gradients[:, :end], hyper)
        if self.minimum is not None or self.maximum is not None:
            new = jnp.clip(new, self.minimum, self.maximum)
        new_slots = tuple(
            jnp.concatenate([new_slot, slot[:, end:]], axis=1) if is_padded else new_slot
            for new_slot, slot, is_padded in zip(new_slots, slots, are_padded, strict=True)
        )
        return jnp.concatenate([new, rows[:, end:]], axis=1), new_slots

    def short_name(self) -> str:
        return self.inner.short_name()


def rule_of_stack(
    stack: StackedTableSpec, tables: Sequence[TableSpec], limits: RowLimits = (None, None)
) -> OptimizerSpec:
    """The rule that steps a stack's rows.

    Padding columns hold zeros. Rules of single entries keep them zero by themselves; a rule that looks at whole rows (a
    row-wise accumulator, a norm, a custom function) must not see them, or its means would be wrong.

    Args:
      stack: the stack.
      tables: its tables.
      limits: smallest and largest value of a stepped entry.

    Raises:
      ValueError: such a rule, and tables of different dims.
    """
    num_columns = None
    dims = {table.name: table.embedding_dim for table in tables}
    # Limits that exclude zero would move the padding, so clipping too stops at the last real column where it can.
    if stack.optimizer.is_row_wise or (limits != (None, None) and len(set(dims.values())) == 1):
        if len(set(dims.values())) > 1:
            raise ValueError(
                f"stack {stack.stack_name!r}: optimizer {stack.optimizer.short_name()!r} works on whole rows, so the "
                f"tables of a stack must have one embedding_dim, but have {dims}; give them stacks of their own."
            )
        num_columns = next(iter(dims.values()))
        num_columns = None if num_columns == stack.stack_embedding_dim else num_columns
    if num_columns is None and limits == (None, None):
        return stack.optimizer
    return BoundedRowRule(stack.optimizer.learning_rate, stack.optimizer, num_columns, *limits)

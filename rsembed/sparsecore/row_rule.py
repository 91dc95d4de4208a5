"""A row rule that keeps padding out of sight and rows inside limits."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from rsembed.optimizers import Hyperparameters, OptimizerSpec, SGDOptimizerSpec, Slots
from rsembed.sparsecore.layout import StackLayout

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
        end, width = self.num_columns or rows.shape[1], rows.shape[1]
        return tuple(
            jnp.pad(slot, ((0, 0), (0, width - end))) if slot.shape[1:] == (end,) else slot
            for slot in self.inner.init_slots(rows[:, :end])
        )

    def pack_slots(self, slots: Slots) -> Any:
        return self.inner.pack_slots(slots)

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        end, width = self.num_columns or rows.shape[1], rows.shape[1]
        seen = tuple(slot[:, :end] if slot.shape[1:] == (width,) else slot for slot in slots)
        new, new_slots = self.inner.step_rows(rows[:, :end], seen, gradients[:, :end], hyper)
        if self.minimum is not None or self.maximum is not None:
            new = jnp.clip(new, self.minimum, self.maximum)

        def whole(stepped: Array, old: Array) -> Array:
            return stepped if stepped.shape == old.shape else jnp.concatenate([stepped, old[:, end:]], axis=1)

        return whole(new, rows), tuple(map(whole, new_slots, slots))

    def short_name(self) -> str:
        return self.inner.short_name()


def rule_of(layout: StackLayout, limits: RowLimits = (None, None)) -> OptimizerSpec:
    """The rule that steps a stack's rows.

    Padding columns hold zeros. Rules of single entries keep them zero by themselves; a rule that looks at whole rows (a
    row-wise accumulator, a norm, a custom function) must not see them, or its means would be wrong.

    Args:
      layout: the stack.
      limits: smallest and largest value of a stepped entry.

    Raises:
      ValueError: such a rule, and tables of different dims.
    """
    optimizer, num_columns = layout.spec.optimizer, None
    dims = {table.name: table.embedding_dim for table in layout.tables}
    # Limits that exclude zero would move the padding, so clipping too stops at the last real column where it can.
    if optimizer.is_row_wise or (limits != (None, None) and len(set(dims.values())) == 1):
        if len(set(dims.values())) > 1:
            raise ValueError(
                f"stack {layout.name!r}: optimizer {optimizer.short_name()!r} works on whole rows, so the tables of a "
                f"stack must have one embedding_dim, but have {dims}; give them stacks of their own."
            )
        num_columns = next(iter(dims.values()))
        num_columns = None if num_columns == layout.spec.stack_embedding_dim else num_columns
    if num_columns is None and limits == (None, None):
        return optimizer
    return BoundedRowRule(optimizer.learning_rate, optimizer, num_columns, *limits)

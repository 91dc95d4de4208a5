"""Adam in the two forms of TensorFlow: for the rows of a batch, and for all rows of a table."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rsembed.kernels import api
from rsembed.kernels.contract import Segment
from rsembed.optimizers import AdamOptimizerSpec, AdamSlotVariables, Hyperparameters, OptimizerSpec, Slots
from rsembed.optimizers.base import as_float32
from rsembed.optimizers.intervals import within
from rsembed.optimizers.rules import one_minus_power

_ADAM_RULE = AdamOptimizerSpec()


@dataclasses.dataclass(frozen=True, repr=False)
class _TensorFlowAdam(OptimizerSpec):
    """Adam whose epsilon stands outside the bias correction ("epsilon hat"); the correction counts global steps.

    `m = b1*m + (1-b1)*g; v = b2*v + (1-b2)*g²; w -= lr * sqrt(1-b2^t)/(1-b1^t) * m / (sqrt(v) + epsilon)`
    """

    beta_1: float = within("[0, 1)", default=0.9)
    beta_2: float = within("[0, 1)", default=0.999)
    epsilon: float = within("[0, inf)", default=1e-7)
    slot_type: ClassVar[type] = AdamSlotVariables
    needs_step: ClassVar[bool] = True

    def get_hyperparameters(self, step: Any = None) -> Hyperparameters:
        t = as_float32(0 if step is None else step) + 1.0
        correction = jnp.sqrt(one_minus_power(self.beta_2, t)) / one_minus_power(self.beta_1, t)
        lr = as_float32(self.get_learning_rate(step)) * correction
        return lr, as_float32(self.beta_1), as_float32(self.beta_2), as_float32(self.epsilon)

    def slot_initial_values(self) -> tuple[Any, ...]:
        return (0.0, 0.0)

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        return _ADAM_RULE.step_rows(rows, slots, gradients, hyper)  # epsilon comes with the hyperparameters


@dataclasses.dataclass(frozen=True, repr=False)
class Adam(_TensorFlowAdam):
    """Adam of all rows: moments decay and every row moves in every step, also without a gradient.

    A step costs as much as reading and writing the whole table and its moments; `LazyAdam` leaves rows alone that a
    batch did not read. `step_rows` is what happens to rows that have a gradient.

    Source: the sparse path of `tf.keras.optimizers.Adam`; Kingma, Ba (2015), section 2, end.
    """

    def short_name(self) -> str:
        return "tf_adam"


@dataclasses.dataclass(frozen=True, repr=False)
class LazyAdam(_TensorFlowAdam):
    """Adam of the rows of a batch: others keep their bits, moments included.

    Differs from `rsembed.AdamOptimizerSpec` in where epsilon stands.

    Source: `tfa.optimizers.LazyAdam`.
    """

    def short_name(self) -> str:
        return "tf_lazy_adam"


def adam_all_rows(
    table: Float[Array, "rows dim"],
    slots: Slots,
    rows: Int[Array, " capacity"],
    gradients: Float[Array, "capacity dim"],
    hyper: Hyperparameters,
) -> tuple[Float[Array, "rows dim"], Slots]:
    """One step of `Adam`: `rows` are distinct and have gradients, all others have none; rows outside are padding."""
    lr, beta_1, beta_2, epsilon = hyper
    momentum = (beta_1 * slots[0]).at[rows].add((1.0 - beta_1) * gradients, mode="drop")
    velocity = (beta_2 * slots[1]).at[rows].add((1.0 - beta_2) * gradients * gradients, mode="drop")
    stepped = table.astype(jnp.float32) - lr * momentum / (jnp.sqrt(velocity) + epsilon)
    return stepped.astype(table.dtype), (momentum, velocity)


def update_rows(
    table: Float[Array, "rows dim"],
    slots: Slots,
    rows: Int[Array, " nnz"],
    gradients: Float[Array, "nnz dim"],
    hyper: Hyperparameters,
    optimizer: OptimizerSpec,
) -> tuple[Float[Array, "rows dim"], Slots]:
    """One step of a table; gradients of equal rows are summed first, and rows outside the table are padding."""
    segment = Segment(rows, None, None, "none")
    if isinstance(optimizer, Adam):
        distinct, sums = api.row_gradients(table.shape[0], [segment], [gradients])
        return adam_all_rows(table, slots, distinct, sums, hyper)
    # Between the two lies only the epsilon that the hyperparameters bring, so the kernels of the one serve the other.
    rule = _ADAM_RULE if isinstance(optimizer, LazyAdam) else optimizer
    return api.update(table, slots, [segment], [gradients], hyper, rule)

"""Adam in the two forms of TensorFlow: for the rows of a batch, and for all rows of a table."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from rsembed.checks import within
from rsembed.optimizers.base import Hyperparameters, OptimizerSpec, Slots, as_float32
from rsembed.optimizers.rules import AdamSlotVariables, adam_step, one_minus_power


@dataclasses.dataclass(frozen=True, repr=False)
class _EpsilonHatAdam(OptimizerSpec):
    """Adam whose epsilon stands outside the bias correction ("epsilon hat"); the correction counts global steps."""

    beta_1: float = within("[0, 1)", default=0.9)
    beta_2: float = within("[0, 1)", default=0.999)
    epsilon: float = within("[0, inf)", default=1e-7)
    slot_type = AdamSlotVariables
    needs_step = True

    def get_hyperparameters(self, step: Any = None) -> Hyperparameters:
        t = as_float32(0 if step is None else step) + 1.0
        correction = jnp.sqrt(one_minus_power(self.beta_2, t)) / one_minus_power(self.beta_1, t)
        lr = as_float32(self.get_learning_rate(step)) * correction
        return lr, as_float32(self.beta_1), as_float32(self.beta_2), as_float32(self.epsilon)

    def slot_initial_values(self) -> tuple[Any, ...]:
        return (0.0, 0.0)


@dataclasses.dataclass(frozen=True, repr=False)
class TensorFlowAdamOptimizerSpec(_EpsilonHatAdam):
    """Adam of all rows: moments decay and every row moves in every step, also without a gradient.

    `m = b1*m + (1-b1)*g; v = b2*v + (1-b2)*g²; w -= lr * sqrt(1-b2^t)/(1-b1^t) * m / (sqrt(v) + epsilon)`

    A step costs as much as reading and writing the whole table and its moments; `LazyAdamOptimizerSpec` leaves rows
    alone that a batch did not read.

    Source: the sparse path of `tf.keras.optimizers.Adam`; Kingma, Ba (2015), section 2, end.
    """

    moves_all_rows = True
    saved_as: ClassVar[str] = "Adam"

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        lr, beta_1, beta_2, epsilon = hyper
        momentum = beta_1 * slots[0] + (1.0 - beta_1) * gradients
        velocity = beta_2 * slots[1] + (1.0 - beta_2) * gradients * gradients
        return rows - lr * momentum / (jnp.sqrt(velocity) + epsilon), (momentum, velocity)

    def short_name(self) -> str:
        return "tf_adam"


@dataclasses.dataclass(frozen=True, repr=False)
class LazyAdamOptimizerSpec(_EpsilonHatAdam):
    """The formula of `TensorFlowAdamOptimizerSpec` for the rows of a batch: others keep their bits, moments included.

    Differs from `AdamOptimizerSpec` in where epsilon stands.

    Source: `tfa.optimizers.LazyAdam`.
    """

    fused_as: ClassVar[str] = "adam"  # only the epsilon that comes with the hyperparameters is another
    saved_as: ClassVar[str] = "LazyAdam"

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        return adam_step(rows, slots, gradients, hyper)

    def short_name(self) -> str:
        return "tf_lazy_adam"

"""Optimizers of the JAX SparseCore API, row-wise Adagrad, and the two Adam variants of TensorFlow.

Formulas and defaults agree with jax-tpu-embedding 0.2. Each rule except `TensorFlowAdam` updates
only the rows that a batch looked up, and leaves the other rows and their slots unchanged, bit for
bit. All rules compute in float32, whatever the dtype of the table. `step` is 0 in the first step.
"""

from __future__ import annotations

import dataclasses
import math
from collections import namedtuple
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rsembed.checks import within
from rsembed.optimizers.base import (
    Hyperparameters,
    LearningRate,
    OptimizerSpec,
    Rows,
    Slots,
    StepNumber,
    as_float32,
)

SGDSlotVariables = namedtuple("SGDSlotVariables", ())
SGDSlotVariables.__doc__ = "Slots of SGD: none."
AdagradSlotVariables = namedtuple("AdagradSlotVariables", "accumulator")
AdagradSlotVariables.__doc__ = "Slot of Adagrad: the sum of squared gradients."
AdagradMomentumSlotVariables = namedtuple("AdagradMomentumSlotVariables", "accumulator momentum")
AdagradMomentumSlotVariables.__doc__ = (
    "Slots of Adagrad with momentum: sum (or decaying mean) of squared gradients, and momentum."
)
AdamSlotVariables = namedtuple("AdamSlotVariables", "momentum velocity")
AdamSlotVariables.__doc__ = "Slots of Adam: first and second moment."
FTRLSlotVariables = namedtuple("FTRLSlotVariables", "accumulator linear")
FTRLSlotVariables.__doc__ = "Slots of FTRL: sum of squared gradients and the linear term."
LaPropSlotVariables = namedtuple("LaPropSlotVariables", "mu nu")
LaPropSlotVariables.__doc__ = "Slots of LaProp: first moment (of normalised gradients) and second."
F2ASlotVariables = namedtuple("F2ASlotVariables", "accumulator local_step")
F2ASlotVariables.__doc__ = "Slots of F2A: sum of squared gradients and number of steps of the row."


@dataclasses.dataclass(frozen=True)
class SGD(OptimizerSpec):
    """Stochastic gradient descent: `w -= lr * g`.

    The gradient of a row is summed over the samples that read the row. A loss that is a mean over
    the batch divides the loss of each sample by the batch size, but only a few samples read a row.
    Training with a mean loss needs learning rates far above 1, because the gradients of rows are
    small.
    """

    rule_name = "sgd"
    fused_as = "sgd"
    slot_type = SGDSlotVariables

    def step_rows(
        self, rows: Rows, slots: Slots, gradients: Rows, hyper: Hyperparameters
    ) -> tuple[Rows, Slots]:
        (lr,) = hyper
        return rows - lr * gradients, slots


@dataclasses.dataclass(frozen=True)
class Adagrad(OptimizerSpec):
    """Adagrad without epsilon: `A += g²`, then `w -= lr * g / sqrt(A)`.

    If the accumulator and the gradient of an entry are both zero, the formula is 0/0 and the entry
    does not change.

    Args:
      initial_accumulator_value: initial value of the accumulator, 0.1 by default as in
        jax-tpu-embedding. An accumulator of 0.1 is large compared with the squared gradients of a
        mean loss over a large batch. `RowWiseAdagrad` starts at 0, so set both initial values to
        the same number when you compare `Adagrad` and `RowWiseAdagrad`.

    Source: Duchi, Hazan, Singer (2011).
    """

    initial_accumulator_value: float = within("[0, inf)", default=0.1)
    rule_name = "adagrad"
    fused_as = "adagrad"
    slot_type = AdagradSlotVariables
    non_negative_slots = ("accumulator",)
    slot_fields = ("initial_accumulator_value",)

    def step_rows(
        self, rows: Rows, slots: Slots, gradients: Rows, hyper: Hyperparameters
    ) -> tuple[Rows, Slots]:
        return _adagrad_step(rows, slots[0], gradients, hyper[0], 0.0)


@dataclasses.dataclass(frozen=True)
class TorchAdagrad(OptimizerSpec):
    """Adagrad of torch and FBGEMM: `A += g²`, then `w -= lr * g / (sqrt(A) + epsilon)`.

    Args:
      initial_accumulator_value: initial value of the accumulator, 0 by default.
      epsilon: number added to `sqrt(A)`, 1e-8 by default as in FBGEMM (torch has 1e-10).

    Source: `torch.optim.Adagrad` and FBGEMM `EXACT_ADAGRAD`.
    """

    initial_accumulator_value: float = within("[0, inf)", default=0.0)
    epsilon: float = within("[0, inf)", default=1e-8)
    rule_name = "torch_adagrad"
    fused_as = "adagrad"
    slot_type = AdagradSlotVariables
    non_negative_slots = ("accumulator",)
    rule_fields = ("epsilon",)
    slot_fields = ("initial_accumulator_value",)

    def step_rows(
        self, rows: Rows, slots: Slots, gradients: Rows, hyper: Hyperparameters
    ) -> tuple[Rows, Slots]:
        return _adagrad_step(rows, slots[0], gradients, *hyper)


def _adagrad_step(
    rows: Rows,
    accumulator: Array,
    gradients: Rows,
    lr: Any,
    epsilon: Any,
) -> tuple[Rows, Slots]:
    accumulator = accumulator + gradients * gradients
    root = jnp.sqrt(_positive(accumulator)) + epsilon
    step = jnp.where(accumulator > 0, lr * gradients / root, 0.0)
    return rows - step, (accumulator,)


@dataclasses.dataclass(frozen=True)
class RowWiseAdagrad(OptimizerSpec):
    """Adagrad with one accumulator per row: `A += mean(g²)`, `w -= lr * g / (sqrt(A) + epsilon)`.

    A row has 4 bytes of optimizer state instead of `4 * embedding_dim`.

    Source: FBGEMM `EXACT_ROWWISE_ADAGRAD`.
    """

    initial_accumulator_value: float = within("[0, inf)", default=0.0)
    epsilon: float = within("(0, inf)", default=1e-8)
    rule_name = "rowwise_adagrad"
    fused_as = "rowwise_adagrad"
    slot_type = AdagradSlotVariables
    non_negative_slots = ("accumulator",)
    rule_fields = ("epsilon",)
    slot_fields = ("initial_accumulator_value",)
    is_row_wise = True

    def init_slots(self, rows: Array) -> Slots:
        return (jnp.full((rows.shape[0], 1), self.initial_accumulator_value, jnp.float32),)

    def step_rows(
        self, rows: Rows, slots: Slots, gradients: Rows, hyper: Hyperparameters
    ) -> tuple[Rows, Slots]:
        lr, epsilon = hyper
        accumulator = slots[0] + jnp.mean(gradients * gradients, axis=-1, keepdims=True)
        rate = lr / (jnp.sqrt(accumulator) + epsilon)
        return rows - gradients * rate, (accumulator,)


@dataclasses.dataclass(frozen=True)
class _BiasCorrectedAdam(OptimizerSpec):
    """Base of Adam rules that fold the bias correction for the global step into the learning rate.

    If `corrects_epsilon`, epsilon is multiplied by the bias correction of the second moment, and
    rows are updated by the formula of Kingma and Ba.
    """

    beta_1: float = within("[0, 1)", default=0.9)
    beta_2: float = within("[0, 1)", default=0.999)
    epsilon: float = within("(0, inf)", default=1e-7)
    corrects_epsilon: ClassVar[bool] = False
    slot_type = AdamSlotVariables
    non_negative_slots = ("velocity",)
    needs_step = True

    def get_hyperparameters(self, step: StepNumber = None) -> Hyperparameters:
        t = as_float32(0 if step is None else step) + 1.0
        correction = jnp.sqrt(one_minus_power(self.beta_2, t))
        lr = as_float32(self.get_learning_rate(step))
        lr = lr * correction / one_minus_power(self.beta_1, t)
        epsilon = as_float32(self.epsilon)
        if self.corrects_epsilon:
            epsilon = epsilon * correction
        return lr, as_float32(self.beta_1), as_float32(self.beta_2), epsilon

    def step_rows(
        self, rows: Rows, slots: Slots, gradients: Rows, hyper: Hyperparameters
    ) -> tuple[Rows, Slots]:
        lr, beta_1, beta_2, epsilon = hyper
        momentum = slots[0] + (1.0 - beta_1) * (gradients - slots[0])
        velocity = slots[1] + (1.0 - beta_2) * (gradients * gradients - slots[1])
        new_rows = rows - lr * momentum / (jnp.sqrt(velocity) + epsilon)
        return new_rows, (momentum, velocity)


@dataclasses.dataclass(frozen=True)
class Adam(_BiasCorrectedAdam):
    """Adam that updates only the rows of a batch ("lazy"): other rows and moments do not change.

    The bias correction counts global steps, not the steps of a row. If `step` is None, as in a call
    of `sparse_dense_matmul_grad` without `step`, the bias correction is computed for step 0.

    Source: Kingma, Ba (2015), with bias corrections folded into the learning rate and epsilon.
    """

    epsilon: float = within("(0, inf)", default=1e-8)
    corrects_epsilon = True
    rule_name = "adam"
    fused_as = "adam"


@dataclasses.dataclass(frozen=True)
class TensorFlowAdam(_BiasCorrectedAdam):
    """Adam that updates every row of the table, including rows without a gradient.

    `m = b1*m + (1-b1)*g`, `v = b2*v + (1-b2)*g²`,
    `w -= lr * sqrt(1-b2^t)/(1-b1^t) * m / (sqrt(v) + epsilon)`.

    Each step reads and writes the whole table and its moments. `LazyAdam` updates only the rows of
    a batch.

    Source: the sparse path of `tf.keras.optimizers.Adam` and Kingma, Ba (2015), end of section 2.
    """

    rule_name = "tf_adam"
    moves_all_rows = True


@dataclasses.dataclass(frozen=True)
class LazyAdam(_BiasCorrectedAdam):
    """Variant of `TensorFlowAdam` that updates only the rows of a batch.

    Unlike `Adam`, `LazyAdam` adds epsilon to the square root of the uncorrected second moment.

    Source: `tfa.optimizers.LazyAdam`.
    """

    rule_name = "tf_lazy_adam"
    # `LazyAdam` and `Adam` differ only in their hyperparameters, so one native kernel computes
    # both.
    fused_as = "adam"


@dataclasses.dataclass(frozen=True)
class AdagradMomentum(OptimizerSpec):
    """Adagrad with momentum, a root of any degree, and optional decay of the accumulator.

    `A += g²`, or `A = beta2*A + (1-beta2)*g²` if `beta2 < 1`,
    `q = g * (A + epsilon)^(-1/exponent)`, `m = momentum*m + q`, `w -= lr*m`.
    With Nesterov momentum, the row is updated by `w -= lr*(momentum*m + q)`.
    """

    momentum: float = within("[0, 1]", default=0.9)
    beta2: float = within("[0, 1]", default=1.0)
    epsilon: float = within("[0, inf)", default=1e-10)
    exponent: float = within("(0, inf)", default=2.0)
    use_nesterov: bool = False
    initial_accumulator_value: float = within("[0, inf)", default=0.1)
    initial_momentum_value: float = within("(-inf, inf)", default=0.0)
    rule_name = "adagrad_momentum"
    slot_type = AdagradMomentumSlotVariables
    non_negative_slots = ("accumulator",)
    rule_fields = ("momentum", "beta2", "epsilon", "exponent", "use_nesterov")
    slot_fields = ("initial_accumulator_value", "initial_momentum_value")

    def step_rows(
        self, rows: Rows, slots: Slots, gradients: Rows, hyper: Hyperparameters
    ) -> tuple[Rows, Slots]:
        lr, decay, beta2, epsilon, exponent, nesterov = hyper
        square = gradients * gradients
        total = slots[0] + square
        average = beta2 * slots[0] + (1.0 - beta2) * square
        accumulator = jnp.where(beta2 == 1.0, total, average)
        direction = gradients * jnp.power(_positive(accumulator + epsilon), -1.0 / exponent)
        momentum = decay * slots[1] + direction
        step = jnp.where(nesterov > 0, decay * momentum + direction, momentum)
        return rows - lr * step, (accumulator, momentum)


@dataclasses.dataclass(frozen=True)
class FTRL(OptimizerSpec):
    """Follow the regularised leader (FTRL-proximal): an L1 term makes the weights sparse.

    Raises: ValueError: the learning rate is 0 without `multiply_linear_by_learning_rate`, so the
      linear term would be divided by zero.

    Source: McMahan et al. (2013), with TensorFlow's learning-rate power and its
      `multiply_linear_by_learning_rate` variant.
    """

    learning_rate: LearningRate = within("[0, inf)", default=0.01)
    learning_rate_power: float = within("(-inf, 0]", default=-0.5)
    l1_regularization_strength: float = within("[0, inf)", default=0.0)
    l2_regularization_strength: float = within("[0, inf)", default=0.0)
    beta: float = within("[0, inf)", default=0.0)
    initial_accumulator_value: float = within("[0, inf)", default=0.1)
    initial_linear_value: float = within("(-inf, inf)", default=0.0)
    multiply_linear_by_learning_rate: bool = False
    rule_name = "ftrl"
    slot_type = FTRLSlotVariables
    non_negative_slots = ("accumulator",)
    rule_fields = (
        "learning_rate_power",
        "l1_regularization_strength",
        "l2_regularization_strength",
        "beta",
    )
    slot_fields = ("initial_accumulator_value", "initial_linear_value")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learning_rate == 0 and not self.multiply_linear_by_learning_rate:
            raise ValueError(
                f"FTRL: learning_rate must be in (0, inf), got {self.learning_rate}: the linear "
                "term is divided by it; use multiply_linear_by_learning_rate=True."
            )

    def step_rows(
        self, rows: Rows, slots: Slots, gradients: Rows, hyper: Hyperparameters
    ) -> tuple[Rows, Slots]:
        lr, power, l1, l2, beta = hyper
        accumulator = slots[0] + gradients * gradients
        new_power = jnp.power(accumulator, -power)
        old_power = jnp.power(slots[0], -power)
        if self.multiply_linear_by_learning_rate:
            linear = slots[1] + lr * gradients - (new_power - old_power) * rows
            threshold = lr * l1
            denominator = new_power + 2.0 * lr * l2 + beta
        else:
            linear = slots[1] + gradients - (new_power - old_power) / lr * rows
            threshold = l1
            denominator = (new_power + beta) / lr + 2.0 * l2
        shrunk = jnp.clip(linear, -threshold, threshold) - linear
        return shrunk / _positive(denominator), (accumulator, linear)


@dataclasses.dataclass(frozen=True)
class LaProp(OptimizerSpec):
    """Adam variant that divides each gradient by `sqrt(v)` before the momentum is computed.

    The decay of the second moment `v` rises from 0 to `b2`.

    `v = d*v + (1-d)*(g² + eps)`, `m = b1*m + sqrt(1-b1²) * g / sqrt(v)`, `w -= lr*m`,
    with `d = b2 * (1-b2^step) / (1-b2^(step+1))`. If the step is None, `d` is always `b2`.

    Source: Ziyin, Wang, Ueda (2020).
    """

    b1: float = within("[0, 1)", default=0.9)
    b2: float = within("[0, 1)", default=0.95)
    eps: float = within("[0, inf)", default=1e-30)
    rms_clip_threshold: float | None = None
    initial_slot_value: float = within("[0, inf)", default=0.0)
    rule_name = "laprop"
    slot_type = LaPropSlotVariables
    non_negative_slots = ("nu",)
    slot_fields = ("initial_slot_value", "initial_slot_value")
    needs_step = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rms_clip_threshold is not None:
            raise ValueError(
                "LaProp: rms_clip_threshold is not supported; clip the row gradients instead "
                "(rsembed.clip_by_global_norm)."
            )

    def get_decay_rate(self, step: StepNumber = None) -> Array:
        """Decay of the second moment at the 0-based `step`, or `b2` if `step` is None."""
        b2 = as_float32(self.b2)
        if step is None:
            return b2
        t = as_float32(step)
        return b2 * one_minus_power(self.b2, t) / one_minus_power(self.b2, t + 1.0)

    def get_hyperparameters(self, step: StepNumber = None) -> Hyperparameters:
        lr = as_float32(self.get_learning_rate(step))
        return lr, as_float32(self.b1), self.get_decay_rate(step), as_float32(self.eps)

    def step_rows(
        self, rows: Rows, slots: Slots, gradients: Rows, hyper: Hyperparameters
    ) -> tuple[Rows, Slots]:
        lr, b1, decay, eps = hyper
        nu = decay * slots[1] + (1.0 - decay) * (gradients * gradients + eps)
        normalised = jnp.sqrt(1.0 - b1 * b1) * gradients * jax.lax.rsqrt(_positive(nu))
        mu = b1 * slots[0] + normalised
        return rows - lr * mu, (mu, nu)


@dataclasses.dataclass(frozen=True)
class F2A(OptimizerSpec):
    """Frequency-aware Adagrad: rows that are rarely looked up take larger steps.

    `n += 1`, `r = min((max(step, 1)/n)^rho, max_lr_multiplier)`, `A += g²`,
    `w -= lr * (r*g/sqrt(A) + l1*sign(w) + l2*w)`, where `n` counts the updates of the row.
    """

    learning_rate: LearningRate = within("[0, inf)", default=0.01)
    rho: float = within("[0, inf)", default=0.5)
    initial_accumulator_value: float = within("[0, inf)", default=0.1)
    initial_local_step_value: float = within("[0, inf)", default=0.0)
    l1_regularization_strength: float = within("[0, inf)", default=0.0)
    l2_regularization_strength: float = within("[0, inf)", default=0.0)
    max_lr_multiplier: float = within("(0, inf]", default=1e6)
    rule_name = "f2a"
    slot_type = F2ASlotVariables
    non_negative_slots = ("accumulator", "local_step")
    rule_fields = (
        "rho",
        "l1_regularization_strength",
        "l2_regularization_strength",
        "max_lr_multiplier",
    )
    slot_fields = ("initial_accumulator_value", "initial_local_step_value")
    needs_step = True

    def get_hyperparameters(self, step: StepNumber = None) -> Hyperparameters:
        step_as_float = as_float32(0.0 if step is None else step)
        return (*super().get_hyperparameters(step), step_as_float)

    def step_rows(
        self, rows: Rows, slots: Slots, gradients: Rows, hyper: Hyperparameters
    ) -> tuple[Rows, Slots]:
        lr, rho, l1, l2, cap, step = hyper
        accumulator = slots[0] + gradients * gradients
        times_seen = slots[1] + 1.0
        ratio = jnp.minimum(jnp.power(jnp.maximum(step, 1.0) / times_seen, rho), cap)
        direction = ratio * gradients * jax.lax.rsqrt(_positive(accumulator))
        direction = direction + l1 * jnp.sign(rows) + l2 * rows
        return rows - lr * direction, (accumulator, times_seen)


def _positive(values: Array) -> Array:
    """`values`, with every 0 replaced by 1.

    A zero gradient divided by `_positive(accumulator)` is 0, where the formula would be 0/0.
    """
    return jnp.where(values == 0, 1.0, values)


def one_minus_power(decay: float, exponent: Array) -> Array:
    """`1 - decay**exponent`, computed as `-expm1(exponent * log(decay))`.

    Float32 would compute `1 - 0.999` with only four correct digits.
    """
    if decay == 0.0:
        return jnp.where(exponent > 0, 1.0, 0.0)
    return -jnp.expm1(exponent * as_float32(math.log(decay)))

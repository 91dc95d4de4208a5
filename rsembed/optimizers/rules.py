"""The optimizers of the JAX SparseCore API, row-wise Adagrad, and the two forms of TensorFlow's Adam.

Formulas and defaults are those of jax-tpu-embedding 0.2. A rule sees only rows that were looked up; every other row and
its slots keep their bits. All rules compute in float32, whatever the table's dtype; `step` counts from 0.
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
from rsembed.optimizers.base import Hyperparameters, LearningRate, OptimizerSpec, Slots, as_float32

SGDSlotVariables = namedtuple("SGDSlotVariables", ())
SGDSlotVariables.__doc__ = "Slots of SGD, which keeps nothing beside the table."
AdagradSlotVariables = namedtuple("AdagradSlotVariables", "accumulator")
AdagradSlotVariables.__doc__ = "Slot of Adagrad: the sum of squared gradients."
AdagradMomentumSlotVariables = namedtuple("AdagradMomentumSlotVariables", "accumulator momentum")
AdagradMomentumSlotVariables.__doc__ = "Slots of Adagrad with momentum: sum or mean of squared gradients, and momentum."
AdamSlotVariables = namedtuple("AdamSlotVariables", "momentum velocity")
AdamSlotVariables.__doc__ = "Slots of Adam: first and second moment."
FTRLSlotVariables = namedtuple("FTRLSlotVariables", "accumulator linear")
FTRLSlotVariables.__doc__ = "Slots of FTRL: sum of squared gradients and the linear term."
LaPropSlotVariables = namedtuple("LaPropSlotVariables", "mu nu")
LaPropSlotVariables.__doc__ = "Slots of LaProp: first moment of normalised gradients, and the second moment."
F2ASlotVariables = namedtuple("F2ASlotVariables", "accumulator local_step")
F2ASlotVariables.__doc__ = "Slots of F2A: sum of squared gradients, and the number of steps of each row."


@dataclasses.dataclass(frozen=True, repr=False)
class SGD(OptimizerSpec):
    """Stochastic gradient descent: `w -= lr * g`.

    A row's gradient is a sum over the samples that read it. A loss that is a mean over the batch divides it by the
    batch size, although a row sees few samples of a batch: such models want learning rates far above one.
    """

    rule_name = "sgd"
    fused_as: ClassVar[str] = "sgd"
    slot_type = SGDSlotVariables

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        (lr,) = hyper
        return rows - lr * gradients, slots


@dataclasses.dataclass(frozen=True, repr=False)
class Adagrad(OptimizerSpec):
    """Adagrad without epsilon: `A += g²; w -= lr * g / sqrt(A)`.

    The accumulator starts at 0.1, as in the published API, which is large beside the gradients of a mean loss over a
    large batch; `RowWiseAdagrad` starts at 0. Set `initial_accumulator_value` when you compare the two.

    An entry whose accumulator and gradient are both zero stays put (the bare formula would be 0/0).

    Source: Duchi, Hazan, Singer (2011).
    """

    initial_accumulator_value: float = within("[0, inf)", default=0.1)
    rule_name = "adagrad"
    fused_as: ClassVar[str] = "adagrad"
    slot_type = AdagradSlotVariables
    non_negative_slots = ("accumulator",)
    slot_fields = ("initial_accumulator_value",)

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        return _adagrad_step(rows, slots[0], gradients, hyper[0], 0.0)


@dataclasses.dataclass(frozen=True, repr=False)
class TorchAdagrad(OptimizerSpec):
    """Adagrad as torch and FBGEMM have it: `A += g²; w -= lr * g / (sqrt(A) + epsilon)`, from `A = 0` on.

    Source: `torch.optim.Adagrad` (whose epsilon is 1e-10) and FBGEMM `EXACT_ADAGRAD`.
    """

    initial_accumulator_value: float = within("[0, inf)", default=0.0)
    epsilon: float = within("[0, inf)", default=1e-8)
    rule_name = "torch_adagrad"
    fused_as: ClassVar[str] = "adagrad"
    slot_type = AdagradSlotVariables
    non_negative_slots = ("accumulator",)
    rule_fields = ("epsilon",)
    slot_fields = ("initial_accumulator_value",)

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        return _adagrad_step(rows, slots[0], gradients, *hyper)


def _adagrad_step(rows: Array, old: Array, gradients: Array, lr: Any, epsilon: Any) -> tuple[Array, Slots]:
    accumulator = old + gradients * gradients
    root = jnp.sqrt(_positive(accumulator)) + epsilon
    return rows - jnp.where(accumulator > 0, lr * gradients / root, 0.0), (accumulator,)


@dataclasses.dataclass(frozen=True, repr=False)
class RowWiseAdagrad(OptimizerSpec):
    """Adagrad with one accumulator a row: `A += mean(g²); w -= lr * g / (sqrt(A) + epsilon)`.

    Needs 4 bytes of state a row instead of `4 * embedding_dim`.

    Source: FBGEMM `EXACT_ROWWISE_ADAGRAD`.
    """

    initial_accumulator_value: float = within("[0, inf)", default=0.0)
    epsilon: float = within("(0, inf)", default=1e-8)
    rule_name = "rowwise_adagrad"
    fused_as: ClassVar[str] = "rowwise_adagrad"
    slot_type = AdagradSlotVariables
    non_negative_slots = ("accumulator",)
    rule_fields = ("epsilon",)
    slot_fields = ("initial_accumulator_value",)
    is_row_wise = True

    def init_slots(self, rows: Array) -> Slots:
        return (jnp.full((rows.shape[0], 1), self.initial_accumulator_value, jnp.float32),)

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        lr, epsilon = hyper
        accumulator = slots[0] + jnp.mean(gradients * gradients, axis=-1, keepdims=True)
        return rows - gradients * (lr / (jnp.sqrt(accumulator) + epsilon)), (accumulator,)


@dataclasses.dataclass(frozen=True, repr=False)
class _BiasCorrectedAdam(OptimizerSpec):
    """Adam that folds its bias correction, by the global step, into the learning rate, and epsilon if it says so."""

    beta_1: float = within("[0, 1)", default=0.9)
    beta_2: float = within("[0, 1)", default=0.999)
    epsilon: float = within("(0, inf)", default=1e-7)
    corrects_epsilon: ClassVar[bool] = False
    slot_type = AdamSlotVariables
    non_negative_slots = ("velocity",)
    needs_step = True

    def get_hyperparameters(self, step: Any = None) -> Hyperparameters:
        t = as_float32(0 if step is None else step) + 1.0
        correction, epsilon = jnp.sqrt(one_minus_power(self.beta_2, t)), as_float32(self.epsilon)
        lr = as_float32(self.get_learning_rate(step)) * correction / one_minus_power(self.beta_1, t)
        epsilon = epsilon * correction if self.corrects_epsilon else epsilon
        return lr, as_float32(self.beta_1), as_float32(self.beta_2), epsilon

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        lr, beta_1, beta_2, epsilon = hyper
        momentum = slots[0] + (1.0 - beta_1) * (gradients - slots[0])
        velocity = slots[1] + (1.0 - beta_2) * (gradients * gradients - slots[1])
        return rows - lr * momentum / (jnp.sqrt(velocity) + epsilon), (momentum, velocity)


@dataclasses.dataclass(frozen=True, repr=False)
class Adam(_BiasCorrectedAdam):
    """Adam with bias correction by the global step; moments decay only when their row is touched ("lazy").

    `step=None` means the first step, for ever: what a layer without a step counter computes.

    Source: Kingma, Ba (2015), with the corrections folded into the learning rate and epsilon.
    """

    epsilon: float = within("(0, inf)", default=1e-8)
    corrects_epsilon: ClassVar[bool] = True
    rule_name = "adam"
    fused_as: ClassVar[str] = "adam"


@dataclasses.dataclass(frozen=True, repr=False)
class TensorFlowAdam(_BiasCorrectedAdam):
    """Adam of all rows: moments decay and every row moves in every step, also without a gradient.

    `m = b1*m + (1-b1)*g; v = b2*v + (1-b2)*g²; w -= lr * sqrt(1-b2^t)/(1-b1^t) * m / (sqrt(v) + epsilon)`

    A step costs as much as reading and writing the whole table and its moments; `LazyAdam` leaves rows
    alone that a batch did not read.

    Source: the sparse path of `tf.keras.optimizers.Adam`; Kingma, Ba (2015), section 2, end.
    """

    rule_name = "tf_adam"
    moves_all_rows = True


@dataclasses.dataclass(frozen=True, repr=False)
class LazyAdam(_BiasCorrectedAdam):
    """The formula of `TensorFlowAdam` for the rows of a batch: others keep their bits, moments included.

    Differs from `Adam` in where epsilon stands.

    Source: `tfa.optimizers.LazyAdam`.
    """

    rule_name = "tf_lazy_adam"
    fused_as: ClassVar[str] = "adam"  # only the epsilon that comes with the hyperparameters is another


@dataclasses.dataclass(frozen=True, repr=False)
class AdagradMomentum(OptimizerSpec):
    """Adagrad with any root, optional decay of the accumulator (`beta2 < 1`), and (Nesterov) momentum.

    `A += g²` (or `A = beta2*A + (1-beta2)*g²`); `q = g * (A + epsilon)^(-1/exponent)`; `m = momentum*m + q`;
    `w -= lr*m`, with Nesterov `w -= lr*(momentum*m + q)`.
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

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        lr, decay, beta2, epsilon, exponent, nesterov = hyper
        square = gradients * gradients
        accumulator = jnp.where(beta2 == 1.0, slots[0] + square, beta2 * slots[0] + (1.0 - beta2) * square)
        direction = gradients * jnp.power(_positive(accumulator + epsilon), -1.0 / exponent)
        momentum = decay * slots[1] + direction
        return rows - lr * jnp.where(nesterov > 0, decay * momentum + direction, momentum), (accumulator, momentum)


@dataclasses.dataclass(frozen=True, repr=False)
class FTRL(OptimizerSpec):
    """Follow the regularised leader: sparse weights through an L1 term.

    Source: McMahan et al. (2013), with the learning-rate power and the `multiply_linear_by_learning_rate` variant
    of TensorFlow.
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
    rule_fields = ("learning_rate_power", "l1_regularization_strength", "l2_regularization_strength", "beta")
    slot_fields = ("initial_accumulator_value", "initial_linear_value")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learning_rate == 0 and not self.multiply_linear_by_learning_rate:
            raise ValueError(
                f"FTRL: learning_rate must be in (0, inf), got {self.learning_rate}: the linear term is "
                "divided by it; use multiply_linear_by_learning_rate=True."
            )

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        lr, power, l1, l2, beta = hyper
        accumulator = slots[0] + gradients * gradients
        new_power, old_power = jnp.power(accumulator, -power), jnp.power(slots[0], -power)
        if self.multiply_linear_by_learning_rate:
            linear = slots[1] + lr * gradients - (new_power - old_power) * rows
            threshold, denominator = lr * l1, new_power + 2.0 * lr * l2 + beta
        else:
            linear = slots[1] + gradients - (new_power - old_power) / lr * rows
            threshold, denominator = l1, (new_power + beta) / lr + 2.0 * l2
        return (jnp.clip(linear, -threshold, threshold) - linear) / _positive(denominator), (accumulator, linear)


@dataclasses.dataclass(frozen=True, repr=False)
class LaProp(OptimizerSpec):
    """Momentum of already normalised gradients, with a second moment whose decay warms up.

    `step=None` uses the final decay `b2` from the start.

    Source: Ziyin, Wang, Ueda (2020). Normalised gradients enter with weight `sqrt(1 - b1²)`.
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

    def get_decay_rate(self, step: Any = None) -> Array:
        """Decay of the second moment at the 0-based `step`."""
        b2 = as_float32(self.b2)
        if step is None:
            return b2
        t = as_float32(step)
        return b2 * one_minus_power(self.b2, t) / one_minus_power(self.b2, t + 1.0)

    def get_hyperparameters(self, step: Any = None) -> Hyperparameters:
        lr = as_float32(self.get_learning_rate(step))
        return lr, as_float32(self.b1), self.get_decay_rate(step), as_float32(self.eps)

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        lr, b1, decay, eps = hyper
        nu = decay * slots[1] + (1.0 - decay) * (gradients * gradients + eps)
        mu = b1 * slots[0] + jnp.sqrt(1.0 - b1 * b1) * gradients * jax.lax.rsqrt(_positive(nu))
        return rows - lr * mu, (mu, nu)


@dataclasses.dataclass(frozen=True, repr=False)
class F2A(OptimizerSpec):
    """Frequency-aware Adagrad: rarely seen rows take larger steps, by `(step / times_seen)^rho`, capped.

    `n += 1; r = min((max(step, 1)/n)^rho, max_lr_multiplier); A += g²;`
    `w -= lr * (r*g/sqrt(A) + l1*sign(w) + l2*w)`.
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
    rule_fields = ("rho", "l1_regularization_strength", "l2_regularization_strength", "max_lr_multiplier")
    slot_fields = ("initial_accumulator_value", "initial_local_step_value")
    needs_step = True

    def get_hyperparameters(self, step: Any = None) -> Hyperparameters:
        return (*super().get_hyperparameters(step), as_float32(0.0 if step is None else step))

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        lr, rho, l1, l2, cap, step = hyper
        accumulator, times_seen = slots[0] + gradients * gradients, slots[1] + 1.0
        ratio = jnp.minimum(jnp.power(jnp.maximum(step, 1.0) / times_seen, rho), cap)
        direction = ratio * gradients * jax.lax.rsqrt(_positive(accumulator)) + l1 * jnp.sign(rows) + l2 * rows
        return rows - lr * direction, (accumulator, times_seen)


def _positive(values: Array) -> Array:
    """The values, and 1 for 0: an entry that never had a gradient stays finite, though the bare formula is 0/0."""
    return jnp.where(values == 0, 1.0, values)


def one_minus_power(decay: float, exponent: Array) -> Array:
    """`1 - decay**exponent`; the direct form keeps only four digits of `1 - 0.999` in float32."""
    if decay == 0.0:
        return jnp.where(exponent > 0, 1.0, 0.0)
    return -jnp.expm1(exponent * as_float32(math.log(decay)))

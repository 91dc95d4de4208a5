"""Optimizers with weight decay, trust ratios, row counters, clipping or norm bounds.

Each optimizer in `regularized` can store its float slots in 16 bits (`slot_dtypes`).

Source: FBGEMM, optimizers of the TBE training module.
"""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from rsembed.checks import within
from rsembed.optimizers.base import (
    FULL,
    ITERATION,
    PER_ROW,
    CompactOptimizerSpec,
    Hyperparameters,
    Rows,
    SlotKind,
    Slots,
    StepNumber,
    as_float32,
)
from rsembed.optimizers.regularization import (
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    CowClipDefinition,
    GlobalWeightDecayDefinition,
    GradSumDecay,
    LearningRateMode,
    WeightDecayMode,
    global_decay_factor,
)
from rsembed.optimizers.rules import AdagradSlotVariables, AdamSlotVariables, one_minus_power

# `prev_iter` is the step of a row's last update, and 0 before the first update of the row.
# `row_counter` is the number of updates of a row. With a positive `counter_halflife`, old updates
# add less to `row_counter` than recent updates.
TimedSlotVariables = namedtuple("TimedSlotVariables", "accumulator prev_iter")
CountedSlotVariables = namedtuple("CountedSlotVariables", "accumulator prev_iter row_counter")
CountedAdamSlotVariables = namedtuple("CountedAdamSlotVariables", "momentum velocity row_counter")
LARSSlotVariables = namedtuple("LARSSlotVariables", "momentum")


def row_mean(values: Array) -> Array:
    """Mean of each row: `[rows, 1]`."""
    return jnp.mean(values, axis=-1, keepdims=True)


def row_norm(values: Array) -> Array:
    """Euclidean norm of each row: `[rows, 1]`."""
    return jnp.sqrt(jnp.sum(values * values, axis=-1, keepdims=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DecayingAdam(CompactOptimizerSpec):
    """Base of AdamW and LAMB. `AdamW` documents the fields."""

    beta_1: float = within("[0, 1)", default=0.9)
    beta_2: float = within("[0, 1)", default=0.999)
    epsilon: float = within("(0, inf)", default=1e-8)
    weight_decay: float = within("[0, inf)", default=0.0)
    has_row_wise_second_moment: bool = False
    has_row_wise_bias_correction: bool = False
    has_trust_ratio: ClassVar[bool] = False
    needs_step = True
    non_negative_slots = ("velocity", "row_counter")

    @property
    def slot_type(self) -> type:
        if self.has_row_wise_bias_correction:
            return CountedAdamSlotVariables
        return AdamSlotVariables

    @property
    def is_row_wise(self) -> bool:
        return self.has_trust_ratio or super().is_row_wise

    @property
    def slot_kinds(self) -> tuple[SlotKind, ...]:
        second = PER_ROW if self.has_row_wise_second_moment else FULL
        if self.has_row_wise_bias_correction:
            return FULL, second, PER_ROW
        return FULL, second

    def _step(
        self, rows: Rows, slots: Slots, gradients: Rows, hyper: Hyperparameters
    ) -> tuple[Rows, Slots]:
        lr, t = hyper
        first, second, *counters = slots
        num_updates = t.astype(jnp.float32)
        if self.has_row_wise_bias_correction:
            num_updates = counters[0] + 1.0
            counters = [num_updates]
        squares = gradients * gradients
        if self.has_row_wise_second_moment:
            squares = row_mean(squares)
        first = self.beta_1 * first + (1.0 - self.beta_1) * gradients
        second = self.beta_2 * second + (1.0 - self.beta_2) * squares
        root = jnp.sqrt(second / one_minus_power(self.beta_2, num_updates)) + self.epsilon
        direction = first / one_minus_power(self.beta_1, num_updates) / root
        direction = direction + self.weight_decay * rows
        if self.has_trust_ratio:
            norm = row_norm(rows)
            step_norm = row_norm(direction)
            ratio = norm / jnp.where(step_norm > 0, step_norm, 1.0)
            lr = lr * jnp.where((norm > 0) & (step_norm > 0), ratio, 1.0)
        return rows - lr * direction, (first, second, *counters)


@dataclasses.dataclass(frozen=True)
class AdamW(_DecayingAdam):
    """Adam with decoupled weight decay. Rows that are not looked up do not decay.

    The moments are `m += (1 - beta_1) * (g - m)` and `v += (1 - beta_2) * (g² - v)`. With
    the corrected moments `m_t = m / (1 - beta_1**t)` and `v_t = v / (1 - beta_2**t)`, the update is
    `u = m_t / (sqrt(v_t) + epsilon) + weight_decay * w` and `w -= lr * u`.

    Args:
      beta_1: decay of the first moment per update of the row.
      beta_2: decay of the second moment per update of the row.
      epsilon: number added to `sqrt(v_t)`.
      weight_decay: coefficient of weight decay. Each update of a row subtracts
        `lr * weight_decay * w`.
      has_row_wise_second_moment: whether each row has one second moment, of `mean(g²)`, instead of
        one per column, False by default. A row-wise second moment saves nearly half of the
        optimizer state.
      has_row_wise_bias_correction: whether `t` counts the updates of the row instead of all steps,
        False by default. With `has_row_wise_bias_correction`, a third slot counts the updates of
        each row.

    Source: Kingma, Ba (2015) for Adam, Loshchilov, Hutter (2019) for decoupled weight decay, and
      FBGEMM's optimizers `ADAM` and `PARTIAL_ROWWISE_ADAM`.
    """

    rule_name = "adamw"


@dataclasses.dataclass(frozen=True)
class LAMB(_DecayingAdam):
    """AdamW with step lengths proportional to the row norm: `w -= lr * norm(w) / norm(u) * u`.

    `LAMB` has the same arguments as `AdamW`, and computes `u` by the same formula. If `norm(w)` or
    `norm(u)` is 0, the ratio is 1, because with a ratio of 0, a zero row would never change.

    Source: You et al. (2020), and FBGEMM's optimizers `LAMB` and `PARTIAL_ROWWISE_LAMB`.
    """

    rule_name = "lamb"
    has_trust_ratio = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class LARS(CompactOptimizerSpec):
    """Momentum SGD with step lengths proportional to the row norm.

    `m = momentum * m + a * (g + weight_decay * w)` and `w -= m`, with
    `a = lr * eta * norm(w) / (norm(g) + weight_decay * norm(w))`, or `a = lr` if either norm is 0.

    Args:
      momentum: decay of the momentum per update of the row.
      eta: trust coefficient, the factor of the norm ratio.
      weight_decay: coefficient of weight decay. Each update of a row adds `weight_decay * w` to the
        gradient.

    Source: You, Gitman, Ginsburg (2017), and FBGEMM's optimizer `LARS_SGD`.
    """

    momentum: float = within("[0, 1]", default=0.9)
    eta: float = within("[0, inf)", default=0.001)
    weight_decay: float = within("[0, inf)", default=0.0)
    rule_name = "lars"
    slot_type = LARSSlotVariables
    slot_kinds = (FULL,)
    # A row norm depends on all columns of the row.
    is_row_wise = True

    def _step(
        self, rows: Rows, slots: Slots, gradients: Rows, hyper: Hyperparameters
    ) -> tuple[Rows, Slots]:
        (lr,) = hyper
        norm = row_norm(rows)
        gradient_norm = row_norm(gradients)
        divisor = jnp.where(gradient_norm > 0, gradient_norm + self.weight_decay * norm, 1.0)
        ratio = self.eta * norm / divisor
        rate = lr * jnp.where((norm > 0) & (gradient_norm > 0), ratio, 1.0)
        momentum = self.momentum * slots[0] + rate * (gradients + self.weight_decay * rows)
        return rows - momentum, (momentum,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecayedAdagrad(CompactOptimizerSpec):
    """Row-wise Adagrad with weight decay, a bound on row norms, or both.

    `A += mean(e²)` and `w = keep * w - lr * e / (sqrt(A) + epsilon)`. In the mode L2,
    `e = g + weight_decay * w`, and in other modes `e = g`. In the modes DECOUPLE and
    DECOUPLE_GLOBAL, `keep = 1 - lr * weight_decay`, and in other modes `keep = 1`.

    In the mode DECOUPLE_GLOBAL, a row decays in every step, but is written only when it is updated:
    each update first applies the decay of the steps since the row's last update. A lookup in a
    table-batched module applies the decay since the row's last update to the activations (see
    `global_decay_factor`).

    Args:
      epsilon: number added to `sqrt(A)`.
      weight_decay: coefficient of weight decay.
      weight_decay_mode: NONE, L2, DECOUPLE or DECOUPLE_GLOBAL.
      max_norm: maximum norm of a row. Rows with a larger norm are scaled down to `max_norm`. If
        `max_norm` is 0, the default, row norms are not bounded.
      global_weight_decay: settings of DECOUPLE_GLOBAL, None for the other modes.
      is_per_row: whether there is one accumulator per row, True by default. If False, there is one
        accumulator per element of a row (plain Adagrad).

    Raises: ValueError: a different optimizer implements `weight_decay_mode`, or
      `global_weight_decay` is missing for DECOUPLE_GLOBAL or set for another mode.
    """

    epsilon: float = within("(0, inf)", default=1e-8)
    weight_decay: float = within("[0, inf)", default=0.0)
    weight_decay_mode: WeightDecayMode = WeightDecayMode.NONE
    max_norm: float = within("[0, inf]", default=0.0)
    global_weight_decay: GlobalWeightDecayDefinition | None = None
    is_per_row: bool = True
    rule_name = "decayed_adagrad"
    non_negative_slots = ("accumulator", "prev_iter")

    def __post_init__(self) -> None:
        super().__post_init__()
        mode = self.weight_decay_mode
        if mode in (WeightDecayMode.COUNTER, WeightDecayMode.COWCLIP):
            raise ValueError(
                f"DecayedAdagrad: weight_decay_mode {mode.name} is a rule of its own; use "
                "CounterAdagrad or CowClipAdagrad."
            )
        if (mode == WeightDecayMode.DECOUPLE_GLOBAL) != (self.global_weight_decay is not None):
            raise ValueError(
                f"DecayedAdagrad: weight_decay_mode {mode.name} and global_weight_decay="
                f"{self.global_weight_decay} do not go together; set "
                "WeightDecayMode.DECOUPLE_GLOBAL and a GlobalWeightDecayDefinition, or neither."
            )

    @property
    def slot_type(self) -> type:
        if self.global_weight_decay is None:
            return AdagradSlotVariables
        return TimedSlotVariables

    @property
    def needs_step(self) -> bool:
        return self.global_weight_decay is not None

    @property
    def is_row_wise(self) -> bool:
        return self.max_norm > 0 or super().is_row_wise

    @property
    def slot_kinds(self) -> tuple[SlotKind, ...]:
        accumulator = PER_ROW if self.is_per_row else FULL
        if self.global_weight_decay is None:
            return (accumulator,)
        return accumulator, ITERATION

    def _step(
        self, rows: Rows, slots: Slots, gradients: Rows, hyper: Hyperparameters
    ) -> tuple[Rows, Slots]:
        lr = hyper[0]
        mode = self.weight_decay_mode
        decay = self.weight_decay
        config = self.global_weight_decay
        other_slots: Slots = ()
        if config is not None:
            t = hyper[1]
            prev_iter = slots[1]
            rows = rows * global_decay_factor(prev_iter, t, lr, decay, config)
            prev_iter = jnp.where((t >= config.start_iter) & (decay > 0), t, prev_iter)
            other_slots = (prev_iter,)
        if mode == WeightDecayMode.L2:
            gradients = gradients + decay * rows
        squares = gradients * gradients
        if self.is_per_row:
            squares = row_mean(squares)
        accumulator = slots[0] + squares
        if mode in (WeightDecayMode.DECOUPLE, WeightDecayMode.DECOUPLE_GLOBAL):
            rows = (1.0 - lr * decay) * rows
        rows = rows - lr / (jnp.sqrt(accumulator) + self.epsilon) * gradients
        if self.max_norm > 0:
            rows = rows * (self.max_norm / jnp.maximum(row_norm(rows), self.max_norm))
        return rows, (accumulator, *other_slots)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CountingAdagrad(CompactOptimizerSpec):
    """Base of the two row-wise Adagrad optimizers that count the updates of each row."""

    epsilon: float = within("(0, inf)", default=1e-8)
    weight_decay: float = within("[0, inf)", default=0.0)
    regularization: CounterBasedRegularizationDefinition | CowClipDefinition
    slot_type = CountedSlotVariables
    non_negative_slots = ("accumulator", "prev_iter", "row_counter")
    slot_kinds = (PER_ROW, ITERATION, PER_ROW)
    needs_step = True

    def _num_missed_steps(self, prev_iter: Array, t: Array) -> Array:
        """Steps since each row's last update, in float32, or 1 for a row that was never updated."""
        # Integers are subtracted, because float32 holds step numbers exactly only up to 2**24.
        return jnp.where(prev_iter == 0, 1, t - prev_iter).astype(jnp.float32)

    def _next_counter(self, row_counter: Array, gap: Array) -> Array:
        """Row counters after the current step.

        With a positive half-life `h`, an update counts half as much after `h` more steps.
        """
        halflife = self.regularization.counter_halflife
        if halflife == 0:
            return jnp.ones_like(row_counter)
        if halflife > 0:
            return 1.0 + jnp.exp2(-gap / halflife) * row_counter
        return row_counter + 1.0

    def _with_l2_decay(self, gradients: Rows, rows: Rows) -> Rows:
        """`gradients` plus the gradient of the L2 penalty, if the mode is L2."""
        if self.regularization.counter_weight_decay_mode == CounterWeightDecayMode.L2:
            return gradients + self.weight_decay * rows
        return gradients


@dataclasses.dataclass(frozen=True, kw_only=True)
class CounterAdagrad(_CountingAdagrad):
    """Row-wise Adagrad with learning rates and decay that depend on row counters.

    `CounterAdagrad` is `WeightDecayMode.COUNTER` of FBGEMM. With the default settings, rows are
    updated as in row-wise Adagrad, and the row counters have no effect.

    Args:
      epsilon: number added to the square root of the accumulator.
      weight_decay: coefficient of weight decay, which has no effect if the
        `counter_weight_decay_mode` is NONE.
      regularization: settings of the counters, the decay and the learning rates.
      max_counter: 1 plus the largest row counter of all tables, or a function that returns this
        number. The TAIL_ID modes of the learning rate, and tail thresholds with `is_ratio`, depend
        on `max_counter`. Table-batched modules update `max_counter` during training.

    Raises: ValueError: `regularization` has L2 or DECOUPLE without a positive half-life, or a
      `grad_sum_decay` that is not supported.
    """

    regularization: CounterBasedRegularizationDefinition = CounterBasedRegularizationDefinition()
    max_counter: float | Callable[[], Any] = within("[0, inf)", default=1.0)
    rule_name = "counter_adagrad"

    def __post_init__(self) -> None:
        super().__post_init__()
        config = self.regularization
        mode = config.counter_weight_decay_mode
        uses_halflife = mode in (CounterWeightDecayMode.L2, CounterWeightDecayMode.DECOUPLE)
        if uses_halflife and config.counter_halflife <= 0:
            raise ValueError(
                f"counter-based regularization: counter_weight_decay_mode {mode.name} multiplies "
                "the decay by counter_halflife / row_counter, so counter_halflife "
                f"{config.counter_halflife} would make rows grow or not decay; set a positive "
                "counter_halflife."
            )
        if config.grad_sum_decay != GradSumDecay.NO_DECAY:
            raise ValueError(
                f"counter-based regularization: grad_sum_decay {config.grad_sum_decay.name} is not "
                "offered (the original accepts it and does nothing); use GradSumDecay.NO_DECAY."
            )

    def get_hyperparameters(self, step: StepNumber = None) -> Hyperparameters:
        max_counter = self.max_counter
        if callable(max_counter):
            max_counter = max_counter()
        return (*super().get_hyperparameters(step), as_float32(max_counter))

    def _step(
        self, rows: Rows, slots: Slots, gradients: Rows, hyper: Hyperparameters
    ) -> tuple[Rows, Slots]:
        lr, t, max_counter = hyper
        accumulator, prev_iter, row_counter = slots
        config = self.regularization
        gap = self._num_missed_steps(prev_iter, t)
        counter = self._next_counter(row_counter, gap)
        with_decay = self._with_l2_decay(gradients, rows)
        accumulator = accumulator + row_mean(with_decay * with_decay)
        root = jnp.sqrt(accumulator) + self.epsilon
        plain_rate = lr / root

        tail = config.tail_id_threshold
        threshold = jnp.floor(tail.val * max_counter) if tail.is_ratio else tail.val
        frequent_rate = self._rate_of_frequent_rows(plain_rate, lr, counter, max_counter)
        rate = jnp.where(counter > threshold, frequent_rate, plain_rate)

        keep = jnp.ones_like(plain_rate)
        decay = self.weight_decay
        match config.counter_weight_decay_mode:
            case CounterWeightDecayMode.ADAGRADW:
                if config.counter_halflife == -1:
                    rate = plain_rate * jnp.sqrt(counter)
                if config.counter_halflife == -2:
                    rate = jnp.minimum(lr * counter, config.adjustment_ub) / root
                num_adjusted_steps = (t - config.adjustment_iter).astype(jnp.float32)
                num_missed_steps = jnp.minimum(gap, num_adjusted_steps) - 1.0
                missed_decay = jnp.power(1.0 - lr * decay, num_missed_steps)
                rate = rate * missed_decay
                keep = (1.0 - lr * decay) * missed_decay
            case CounterWeightDecayMode.DECOUPLE:
                keep = 1.0 - config.counter_halflife / counter * decay * lr
            case CounterWeightDecayMode.L2:
                keep = 1.0 - config.counter_halflife / counter * decay * plain_rate

        is_adjusted = (t > config.adjustment_iter) | (config.adjustment_iter <= 0)
        rate = jnp.where(is_adjusted, rate, plain_rate)
        rows = jnp.where(is_adjusted, keep, 1.0) * rows - rate * gradients
        return rows, (accumulator, jnp.full_like(prev_iter, t), counter)

    def _rate_of_frequent_rows(
        self,
        plain_rate: Array,
        lr: Array,
        counter: Array,
        max_counter: Array,
    ) -> Array:
        """Learning rate of rows with a counter above the tail threshold.

        `plain_rate` is the learning rate of plain row-wise Adagrad.
        """
        bound = self.regularization.adjustment_ub
        match self.regularization.learning_rate_mode:
            case LearningRateMode.TAIL_ID_LR_INCREASE:
                factor = jnp.power(max_counter / (counter + 1.0), bound)
                return plain_rate * jnp.clip(factor, 1.0, 10.0)
            case LearningRateMode.TAIL_ID_LR_DECREASE:
                factor = jnp.power((counter + 1.0) / max_counter, bound)
                return plain_rate * jnp.clip(factor, 0.1, 1.0)
            case LearningRateMode.COUNTER_SGD:
                return lr / (jnp.sqrt(bound * counter) + self.epsilon)
        return plain_rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class CowClipAdagrad(_CountingAdagrad):
    """Row-wise Adagrad that clips the gradient of each row, depending on row norm and row counter.

    `CowClipAdagrad` is `WeightDecayMode.COWCLIP` of FBGEMM. `CowClipDefinition` documents the
    formula of clipping.

    Args:
      epsilon: number added to the square root of the accumulator.
      weight_decay: coefficient of weight decay, which has no effect if the
        `counter_weight_decay_mode` is NONE.
      regularization: settings of clipping and decay, by default as in the CowClip paper.

    Raises: ValueError: `regularization` would clip every gradient to zero, or has the weight decay
      mode ADAGRADW.

    Source: Zheng et al., "CowClip" (2022), with the formula of FBGEMM.
    """

    regularization: CowClipDefinition = CowClipDefinition(
        weight_norm_coefficient=1.0,
        lower_bound=1e-5,
    )
    rule_name = "cowclip_adagrad"

    def __post_init__(self) -> None:
        super().__post_init__()
        config = self.regularization
        if config.weight_norm_coefficient <= 0 and config.lower_bound <= 0:
            raise ValueError(
                "CowClip regularization: with weight_norm_coefficient and lower_bound both zero, "
                "every update is clipped to nothing; set lower_bound, or both, above zero."
            )
        if config.counter_weight_decay_mode == CounterWeightDecayMode.ADAGRADW:
            raise ValueError(
                "CowClip regularization: counter_weight_decay_mode ADAGRADW has no meaning here; "
                "choose NONE, L2 or DECOUPLE, or use WeightDecayMode.COUNTER."
            )

    def _step(
        self, rows: Rows, slots: Slots, gradients: Rows, hyper: Hyperparameters
    ) -> tuple[Rows, Slots]:
        lr, t = hyper
        accumulator, prev_iter, row_counter = slots
        config = self.regularization
        gap = self._num_missed_steps(prev_iter, t)
        counter = self._next_counter(row_counter, gap)
        gradients = self._with_l2_decay(gradients, rows)
        accumulator = accumulator + row_mean(gradients * gradients)
        norm_share = config.weight_norm_coefficient * row_norm(rows)
        limit = counter * jnp.maximum(norm_share, config.lower_bound)
        norm = row_norm(gradients)
        factor = jnp.minimum(1.0, limit / jnp.where(norm > 0, norm, 1.0))
        clip = jnp.where(norm > 0, factor, 1.0)
        rate = lr / (jnp.sqrt(accumulator) + self.epsilon) * clip
        if config.counter_weight_decay_mode == CounterWeightDecayMode.DECOUPLE:
            rows = (1.0 - lr * self.weight_decay) * rows
        return rows - rate * gradients, (accumulator, jnp.full_like(prev_iter, t), counter)

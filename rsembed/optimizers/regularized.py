"""Rules with weight decay, trust ratios, counters, clipping or bounds, whose slots may be stored in 16 bits.

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
    SlotKind,
    Slots,
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

# `prev_iter` is the step of the row's last update (0: none), `row_counter` how often the row was seen.
TimedSlotVariables = namedtuple("TimedSlotVariables", "accumulator prev_iter")
CountedSlotVariables = namedtuple("CountedSlotVariables", "accumulator prev_iter row_counter")
CountedAdamSlotVariables = namedtuple("CountedAdamSlotVariables", "momentum velocity row_counter")
LARSSlotVariables = namedtuple("LARSSlotVariables", "momentum")


def row_mean(values: Array) -> Array:
    """Mean of each row, `[rows, 1]`."""
    return jnp.mean(values, axis=-1, keepdims=True)


def row_norm(values: Array) -> Array:
    """Length of each row, `[rows, 1]`."""
    return jnp.sqrt(jnp.sum(values * values, axis=-1, keepdims=True))


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class _DecayingAdam(CompactOptimizerSpec):
    """Moments and decay of AdamW and LAMB; `AdamW` says what the fields mean."""

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
        return CountedAdamSlotVariables if self.has_row_wise_bias_correction else AdamSlotVariables

    @property
    def is_row_wise(self) -> bool:
        return self.has_trust_ratio or super().is_row_wise

    @property
    def slot_kinds(self) -> tuple[SlotKind, ...]:
        moments = (FULL, PER_ROW if self.has_row_wise_second_moment else FULL)
        return (*moments, PER_ROW) if self.has_row_wise_bias_correction else moments

    def _step(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        lr, t = hyper
        first, second, *counters = slots
        counters = [counter + 1.0 for counter in counters]
        updates = counters[0] if counters else t.astype(jnp.float32)
        squares = gradients * gradients
        squares = row_mean(squares) if self.has_row_wise_second_moment else squares
        first = self.beta_1 * first + (1.0 - self.beta_1) * gradients
        second = self.beta_2 * second + (1.0 - self.beta_2) * squares
        root = jnp.sqrt(second / one_minus_power(self.beta_2, updates)) + self.epsilon
        direction = first / one_minus_power(self.beta_1, updates) / root + self.weight_decay * rows
        if self.has_trust_ratio:
            length, step = row_norm(rows), row_norm(direction)
            lr = lr * jnp.where((length > 0) & (step > 0), length / jnp.where(step > 0, step, 1.0), 1.0)
        return rows - lr * direction, (first, second, *counters)


@dataclasses.dataclass(frozen=True, repr=False)
class AdamW(_DecayingAdam):
    """Adam with decoupled weight decay, its second moment per column or per row.

    `m += (1 - beta_1) * (g - m); v += (1 - beta_2) * (g² - v)`, both corrected by `1 - beta**t`;
    `u = m / (sqrt(v) + epsilon) + weight_decay * w; w -= lr * u`. Rows that are not looked up do not decay.

    Args:
      beta_1: decay of the first moment, when the row is touched.
      beta_2: decay of the second moment.
      epsilon: added to the root.
      weight_decay: times the learning rate.
      has_row_wise_second_moment: one moment per row, of `mean(g²)`, which saves nearly half of the state.
      has_row_wise_bias_correction: corrects by the row's own number of updates, kept in a third slot.

    Source: Kingma, Ba (2015); Loshchilov, Hutter (2019); FBGEMM `ADAM` and `PARTIAL_ROWWISE_ADAM`.
    """

    rule_name = "adamw"


@dataclasses.dataclass(frozen=True, repr=False)
class LAMB(_DecayingAdam):
    """The direction `u` of `AdamW`, with steps as long as the row: `w -= lr * norm(w) / norm(u) * u`.

    The ratio is 1 if either norm is 0: rows that start at zero could never move otherwise. Arguments are those of
    AdamW.

    Source: You et al. (2020); FBGEMM `LAMB` and `PARTIAL_ROWWISE_LAMB`.
    """

    rule_name = "lamb"
    has_trust_ratio: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class LARS(CompactOptimizerSpec):
    """Momentum of steps whose length follows the row's: `m = momentum * m + a * (g + weight_decay * w); w -= m`.

    `a = lr * eta * norm(w) / (norm(g) + weight_decay * norm(w))`, and `a = lr` if either norm is 0.

    Source: You, Gitman, Ginsburg (2017); FBGEMM `LARS_SGD`.
    """

    momentum: float = within("[0, 1]", default=0.9)
    eta: float = within("[0, inf)", default=0.001)
    weight_decay: float = within("[0, inf)", default=0.0)
    rule_name = "lars"
    slot_type = LARSSlotVariables
    slot_kinds = (FULL,)
    is_row_wise = True  # norms

    def _step(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        (lr,) = hyper
        length, slope = row_norm(rows), row_norm(gradients)
        ratio = self.eta * length / jnp.where(slope > 0, slope + self.weight_decay * length, 1.0)
        rate = lr * jnp.where((length > 0) & (slope > 0), ratio, 1.0)
        momentum = self.momentum * slots[0] + rate * (gradients + self.weight_decay * rows)
        return rows - momentum, (momentum,)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class DecayedAdagrad(CompactOptimizerSpec):
    """Adagrad with weight decay, a bound on row norms, or both; row-wise unless told otherwise.

    `A += mean(e²); w = keep * w - lr * e / (sqrt(A) + epsilon)` with `e = g + weight_decay * w` for L2, else `e = g`,
    and `keep = 1 - lr * weight_decay` for DECOUPLE and DECOUPLE_GLOBAL, else 1.

    DECOUPLE_GLOBAL also decays the row for the steps since its last update. Table-batched modules show rows in that
    state to lookups, too (`global_decay_factor`); elsewhere, it is made up for when the row is stepped.

    Args:
      epsilon: added to the root.
      weight_decay: strength of decay.
      weight_decay_mode: NONE, L2, DECOUPLE or DECOUPLE_GLOBAL.
      max_norm: rows longer than this (in float32, before they are stored) are scaled back to it; 0 for no bound.
      global_weight_decay: for DECOUPLE_GLOBAL, and only for it.
      is_per_row: False keeps one sum per column: plain Adagrad.

    Raises: ValueError: the mode belongs to another rule, or does not fit `global_weight_decay`.
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
                f"{self.global_weight_decay} do not go together; set WeightDecayMode.DECOUPLE_GLOBAL and a "
                "GlobalWeightDecayDefinition, or neither."
            )

    @property
    def slot_type(self) -> type:
        return AdagradSlotVariables if self.global_weight_decay is None else TimedSlotVariables

    @property
    def needs_step(self) -> bool:
        return self.global_weight_decay is not None

    @property
    def is_row_wise(self) -> bool:
        return self.max_norm > 0 or super().is_row_wise

    @property
    def slot_kinds(self) -> tuple[SlotKind, ...]:
        accumulator = PER_ROW if self.is_per_row else FULL
        return (accumulator,) if self.global_weight_decay is None else (accumulator, ITERATION)

    def _step(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        lr, mode, decay, config = hyper[0], self.weight_decay_mode, self.weight_decay, self.global_weight_decay
        later_slots: Slots = ()
        if config is not None:
            t = hyper[1]
            rows = rows * global_decay_factor(slots[1], t, lr, decay, config)
            later_slots = (jnp.where((t >= config.start_iter) & (decay > 0), t, slots[1]),)
        effective = gradients + decay * rows if mode == WeightDecayMode.L2 else gradients
        squares = effective * effective
        accumulator = slots[0] + (row_mean(squares) if self.is_per_row else squares)
        if mode in (WeightDecayMode.DECOUPLE, WeightDecayMode.DECOUPLE_GLOBAL):
            rows = (1.0 - lr * decay) * rows
        rows = rows - lr / (jnp.sqrt(accumulator) + self.epsilon) * effective
        if self.max_norm > 0:
            rows = rows * (self.max_norm / jnp.maximum(row_norm(rows), self.max_norm))
        return rows, (accumulator, *later_slots)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class _CountingAdagrad(CompactOptimizerSpec):
    """Base of row-wise Adagrad with counter-based regularization or CowClip, which count the uses of rows."""

    epsilon: float = within("(0, inf)", default=1e-8)
    weight_decay: float = within("[0, inf)", default=0.0)
    regularization: CounterBasedRegularizationDefinition | CowClipDefinition
    slot_type = CountedSlotVariables
    non_negative_slots = ("accumulator", "prev_iter", "row_counter")
    slot_kinds = (PER_ROW, ITERATION, PER_ROW)
    needs_step = True

    def _summed(self, rows: Array, slots: Slots, gradients: Array, t: Array) -> tuple[Array, Array, Array, Array]:
        """Steps since the row's last update (1: none), its uses with this one, its gradient with L2 decay, its sum."""
        config = self.regularization
        # Subtracted as integers: float32 counts to 2**24 only.
        gap = jnp.where(slots[1] == 0, 1, t - slots[1]).astype(jnp.float32)
        counter = jnp.ones_like(slots[2]) if config.counter_halflife == 0 else slots[2] + 1.0
        if config.counter_halflife > 0:  # earlier times fade
            counter = 1.0 + jnp.exp2(-gap / config.counter_halflife) * slots[2]
        has_decay = config.counter_weight_decay_mode == CounterWeightDecayMode.L2
        effective = gradients + self.weight_decay * rows if has_decay else gradients
        return gap, counter, effective, slots[0] + row_mean(effective * effective)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class CounterAdagrad(_CountingAdagrad):
    """Row-wise Adagrad whose rates and decay depend on how often a row was seen: `WeightDecayMode.COUNTER`.

    With the definition's defaults it is plain row-wise Adagrad that also counts.

    Args:
      epsilon: added to the root.
      weight_decay: strength of decay, for the modes that have one.
      regularization: which adjustments.
      max_counter: largest counter of all tables plus 1, or a callable that returns it, for the adjustments that compare
        with it; it is the last hyperparameter. Table-batched modules keep it up to date.

    Raises: ValueError: the definition's settings do not go together.
    """

    regularization: CounterBasedRegularizationDefinition = CounterBasedRegularizationDefinition()
    max_counter: float | Callable[[], Any] = within("[0, inf)", default=1.0)
    rule_name = "counter_adagrad"

    def __post_init__(self) -> None:
        super().__post_init__()
        config, mode = self.regularization, self.regularization.counter_weight_decay_mode
        if mode in (CounterWeightDecayMode.L2, CounterWeightDecayMode.DECOUPLE) and config.counter_halflife <= 0:
            raise ValueError(
                f"counter-based regularization: counter_weight_decay_mode {mode.name} multiplies the decay by "
                f"counter_halflife / row_counter, so counter_halflife {config.counter_halflife} would make rows grow "
                "or not decay; set a positive counter_halflife."
            )
        if config.grad_sum_decay != GradSumDecay.NO_DECAY:
            raise ValueError(
                f"counter-based regularization: grad_sum_decay {config.grad_sum_decay.name} is not offered (the "
                "original accepts it and does nothing); use GradSumDecay.NO_DECAY."
            )

    def get_hyperparameters(self, step: Any = None) -> Hyperparameters:
        largest = self.max_counter() if callable(self.max_counter) else self.max_counter
        return (*super().get_hyperparameters(step), as_float32(largest))

    def _step(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        lr, t, max_counter = hyper
        config, decay = self.regularization, self.weight_decay
        mode, halflife, bound = config.counter_weight_decay_mode, config.counter_halflife, config.adjustment_ub
        gap, counter, _, accumulator = self._summed(rows, slots, gradients, t)
        root = jnp.sqrt(accumulator) + self.epsilon
        plain = lr / root
        tail = config.tail_id_threshold
        is_seen_often = counter > (jnp.floor(tail.val * max_counter) if tail.is_ratio else tail.val)
        rate = jnp.where(is_seen_often, self._rate_of_frequent_rows(plain, lr, counter, max_counter), plain)
        keep = jnp.ones_like(plain)
        if mode == CounterWeightDecayMode.ADAGRADW:
            if halflife == -1:
                rate = plain * jnp.sqrt(counter)
            if halflife == -2:
                rate = jnp.minimum(lr * counter, bound) / root
            late = jnp.minimum(gap, (t - config.adjustment_iter).astype(jnp.float32)) - 1.0
            lazy = jnp.power(1.0 - lr * decay, late)
            rate, keep = rate * lazy, (1.0 - lr * decay) * lazy
        if mode == CounterWeightDecayMode.DECOUPLE:
            keep = 1.0 - halflife / counter * decay * lr
        if mode == CounterWeightDecayMode.L2:
            keep = 1.0 - halflife / counter * decay * plain
        is_on = (t > config.adjustment_iter) | (config.adjustment_iter <= 0)
        rows = jnp.where(is_on, keep, 1.0) * rows - jnp.where(is_on, rate, plain) * gradients
        return rows, (accumulator, jnp.full_like(slots[1], t), counter)

    def _rate_of_frequent_rows(self, plain: Array, lr: Array, counter: Array, max_counter: Array) -> Array:
        bound = self.regularization.adjustment_ub
        match self.regularization.learning_rate_mode:
            case LearningRateMode.TAIL_ID_LR_INCREASE:
                return plain * jnp.clip(jnp.power(max_counter / (counter + 1.0), bound), 1.0, 10.0)
            case LearningRateMode.TAIL_ID_LR_DECREASE:
                return plain * jnp.clip(jnp.power((counter + 1.0) / max_counter, bound), 0.1, 1.0)
            case LearningRateMode.COUNTER_SGD:
                return lr / (jnp.sqrt(bound * counter) + self.epsilon)
        return plain


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class CowClipAdagrad(_CountingAdagrad):
    """Row-wise Adagrad with gradients clipped by row norm and counter: `WeightDecayMode.COWCLIP`.

    A zero gradient is not clipped. A row clipped to zero does not move: see `CowClipDefinition`.

    Args:
      epsilon: added to the root.
      weight_decay: strength of decay, for the modes that have one.
      regularization: limits and mode; by default those of the paper.

    Raises: ValueError: the definition clips everything to nothing, or asks for ADAGRADW.

    Source: Zheng et al., CowClip (2022), in FBGEMM's form.
    """

    regularization: CowClipDefinition = CowClipDefinition(weight_norm_coefficient=1.0, lower_bound=1e-5)
    rule_name = "cowclip_adagrad"

    def __post_init__(self) -> None:
        super().__post_init__()
        config = self.regularization
        if config.weight_norm_coefficient <= 0 and config.lower_bound <= 0:
            raise ValueError(
                "CowClip regularization: with weight_norm_coefficient and lower_bound both zero, every update is "
                "clipped to nothing; set lower_bound, or both, above zero."
            )
        if config.counter_weight_decay_mode == CounterWeightDecayMode.ADAGRADW:
            raise ValueError(
                "CowClip regularization: counter_weight_decay_mode ADAGRADW has no meaning here; choose NONE, L2 or "
                "DECOUPLE, or use WeightDecayMode.COUNTER."
            )

    def _step(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        lr, t = hyper
        config, decay = self.regularization, self.weight_decay
        _, counter, effective, accumulator = self._summed(rows, slots, gradients, t)
        limit = counter * jnp.maximum(config.weight_norm_coefficient * row_norm(rows), config.lower_bound)
        norm = row_norm(effective)
        clip = jnp.where(norm > 0, jnp.minimum(1.0, limit / jnp.where(norm > 0, norm, 1.0)), 1.0)
        rate = lr / (jnp.sqrt(accumulator) + self.epsilon) * clip
        if config.counter_weight_decay_mode == CounterWeightDecayMode.DECOUPLE:
            rows = (1.0 - lr * decay) * rows
        # For L2, `effective` holds the decay already.
        return rows - rate * effective, (accumulator, jnp.full_like(slots[1], t), counter)

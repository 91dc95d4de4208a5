"""Row-wise Adagrad and RMSProp with weight decay, counters, clipping, or bounds.

Source: FBGEMM, optimizers of the TBE training module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from rsembed.checks import within
from rsembed.optimizers.base import Hyperparameters, Slots, as_float32
from rsembed.optimizers.compact import FULL, ITERATION, PER_ROW, CompactOptimizerSpec, SlotKind, row_mean, row_norm
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
from rsembed.optimizers.rules import AdagradSlotVariables


class TimedSlotVariables(NamedTuple):
    """Slots with sum or mean of squared gradients, and the step of each row's last update (0: none)."""

    accumulator: Any
    prev_iter: Any


class CountedSlotVariables(NamedTuple):
    """Slots of Adagrad, and how often the row was seen."""

    accumulator: Any
    prev_iter: Any
    row_counter: Any


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

    def short_name(self) -> str:
        return "decayed_adagrad"


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class RowWiseRMSProp(CompactOptimizerSpec):
    """RMSProp with one mean per row, and rows that shrink with the time since their last update.

    `A = ema_beta * A + (1 - ema_beta) * mean(g²); w = shrinkage * w - lr * g / (sqrt(A) + epsilon)` where
    `shrinkage = max(min_shrinkage, 1 - clip(lr * ar_alpha * gap, 0, 1))`, the gap being 1 for a new row.

    Source: FBGEMM `ROWWISE_RMSPROP_AR`.
    """

    epsilon: float = within("(0, inf)", default=1e-8)
    ar_alpha: float = within("[0, inf)", default=0.0)
    ema_beta: float = within("[0, 1]", default=0.99)
    min_shrinkage: float = within("[0, 1]", default=0.1)
    slot_type = TimedSlotVariables
    slot_kinds = (PER_ROW, ITERATION)
    needs_step = True

    def _step(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        lr, t = hyper
        squares = row_mean(gradients * gradients)
        mean = self.ema_beta * slots[0] + (1.0 - self.ema_beta) * squares
        shrinkage = 1.0 - jnp.clip(lr * self.ar_alpha * _gap_of(slots[1], t), 0.0, 1.0)
        rows = jnp.maximum(shrinkage, self.min_shrinkage) * rows - lr / (jnp.sqrt(mean) + self.epsilon) * gradients
        return rows, (mean, jnp.full_like(slots[1], t))

    def short_name(self) -> str:
        return "rowwise_rmsprop"


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class CounterAdagrad(CompactOptimizerSpec):
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

    epsilon: float = within("(0, inf)", default=1e-8)
    weight_decay: float = within("[0, inf)", default=0.0)
    regularization: CounterBasedRegularizationDefinition = dataclasses.field(
        default_factory=CounterBasedRegularizationDefinition
    )
    max_counter: float | Callable[[], Any] = within("[0, inf)", default=1.0)
    slot_type = CountedSlotVariables
    slot_kinds = (PER_ROW, ITERATION, PER_ROW)
    needs_step = True

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
        gap, counter = _count(slots[1], slots[2], t, halflife)
        effective = gradients + decay * rows if mode == CounterWeightDecayMode.L2 else gradients
        accumulator = slots[0] + row_mean(effective * effective)
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

    def short_name(self) -> str:
        return "counter_adagrad"


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class CowClipAdagrad(CompactOptimizerSpec):
    """Row-wise Adagrad with gradients clipped by row norm and counter: `WeightDecayMode.COWCLIP`.

    A zero gradient is not clipped. A row clipped to zero does not move: see `CowClipDefinition`.

    Args:
      epsilon: added to the root.
      weight_decay: strength of decay, for the modes that have one.
      regularization: limits and mode; by default those of the paper.

    Raises: ValueError: the definition clips everything to nothing, or asks for ADAGRADW.

    Source: Zheng et al., CowClip (2022), in FBGEMM's form.
    """

    epsilon: float = within("(0, inf)", default=1e-8)
    weight_decay: float = within("[0, inf)", default=0.0)
    regularization: CowClipDefinition = dataclasses.field(
        default_factory=lambda: CowClipDefinition(weight_norm_coefficient=1.0, lower_bound=1e-5)
    )
    slot_type = CountedSlotVariables
    slot_kinds = (PER_ROW, ITERATION, PER_ROW)
    needs_step = True

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
        mode = config.counter_weight_decay_mode
        _, counter = _count(slots[1], slots[2], t, config.counter_halflife)
        effective = gradients + decay * rows if mode == CounterWeightDecayMode.L2 else gradients
        accumulator = slots[0] + row_mean(effective * effective)
        limit = counter * jnp.maximum(config.weight_norm_coefficient * row_norm(rows), config.lower_bound)
        norm = row_norm(effective)
        clip = jnp.where(norm > 0, jnp.minimum(1.0, limit / jnp.where(norm > 0, norm, 1.0)), 1.0)
        rate = lr / (jnp.sqrt(accumulator) + self.epsilon) * clip
        if mode == CounterWeightDecayMode.DECOUPLE:
            rows = (1.0 - lr * decay) * rows
        # For L2, `effective` holds the decay already.
        return rows - rate * effective, (accumulator, jnp.full_like(slots[1], t), counter)

    def short_name(self) -> str:
        return "cowclip_adagrad"


def _gap_of(prev_iter: Array, t: Array) -> Array:
    """Steps since the row's last update, 1 if there was none."""
    # Subtracted as integers: float32 counts to 2**24 only.
    return jnp.where(prev_iter == 0, 1, t - prev_iter).astype(jnp.float32)


def _count(prev_iter: Array, counter: Array, t: Array, halflife: int) -> tuple[Array, Array]:
    """Steps since the last update, and the row's counter with this step; old counts fade if `halflife > 0`."""
    gap = _gap_of(prev_iter, t)
    if halflife > 0:
        return gap, 1.0 + jnp.exp2(-gap / halflife) * counter
    return gap, jnp.ones_like(counter) if halflife == 0 else counter + 1.0

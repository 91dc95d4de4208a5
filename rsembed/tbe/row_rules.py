"""Row rules of table-batched embeddings that `rsembed.optimizers` does not have.

`step` counts from 0, as everywhere; the formulas' `t = step + 1` is the number of the update. Rules compute in float32,
whatever the table and the slots are stored in, and never move a row to NaN for being zero or for a zero gradient.

Source: FBGEMM, optimizers of the TBE training module.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from rsembed.optimizers import Hyperparameters, OptimizerSpec, Slots
from rsembed.optimizers.base import as_float32
from rsembed.optimizers.rules import one_minus_power
from rsembed.tbe import records
from rsembed.tbe.full_table import global_decay_factor
from rsembed.tbe.records import CounterWeightDecayMode, LearningRateMode, WeightDecayMode

FULL, PER_ROW, ITERATION = (False, "float32"), (True, "float32"), (True, "int32")
"""Kinds of slot: whether a row has one value or one per column, and the dtype."""


@dataclasses.dataclass(frozen=True, repr=False)
class RowRule(OptimizerSpec):
    """A rule whose slots all start at zero and may be stored in 16 bits.

    Args:
      learning_rate: a number, a callable of nothing, or a callable of the 0-based step.
      slot_dtypes: dtype of each slot, None for its own; empty for all their own.
    """

    slot_dtypes: tuple[str | None, ...] = dataclasses.field(default=(), kw_only=True)
    needs_step: ClassVar[bool] = True
    is_row_wise: ClassVar[bool] = True

    @abc.abstractmethod
    def slot_kinds(self) -> tuple[tuple[bool, str], ...]:
        """FULL, PER_ROW or ITERATION for each slot."""

    def slot_initial_values(self) -> tuple[Any, ...]:
        return (0.0,) * len(self.slot_kinds())

    def init_slots(self, rows: Array) -> Slots:
        kinds = self.slot_kinds()
        asked = self.slot_dtypes or (None,) * len(kinds)
        return tuple(
            jnp.zeros((rows.shape[0], 1 if per_row else rows.shape[1]), dtype or own)
            for (per_row, own), dtype in zip(kinds, asked, strict=True)
        )

    def get_hyperparameters(self, step: Any = None) -> Hyperparameters:
        """The learning rate, and `t = step + 1` as an int32.

        Raises: ValueError: no step.
        """
        if step is None:
            raise ValueError(f"{type(self).__name__} counts updates; pass step=, the number of updates done so far.")
        return as_float32(self.get_learning_rate(step)), jnp.asarray(step, jnp.int32) + 1


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class DecayedAdagradSpec(RowRule):
    """Adagrad with weight decay, a bound on row norms, or both; row-wise unless told otherwise.

    `A += mean(e²); w = keep * w - lr * e / (sqrt(A) + eps)` with `e = g + weight_decay * w` for L2, else `e = g`, and
    `keep = 1 - lr * weight_decay` for DECOUPLE and DECOUPLE_GLOBAL, else 1.

    DECOUPLE_GLOBAL also decays the row for the steps since its last update, as `global_decay_factor` does for lookups.

    Args:
      eps: added to the root.
      weight_decay: strength of decay.
      weight_decay_mode: NONE, L2, DECOUPLE or DECOUPLE_GLOBAL.
      max_norm: rows longer than this (in float32, before they are stored) are scaled back to it; 0 for no bound.
      global_weight_decay: for DECOUPLE_GLOBAL, and only for it.
      is_per_row: False keeps one sum per column: plain Adagrad.
    """

    eps: float = 1e-8
    weight_decay: float = 0.0
    weight_decay_mode: WeightDecayMode = WeightDecayMode.NONE
    max_norm: float = 0.0
    global_weight_decay: records.GlobalWeightDecayDefinition | None = None
    is_per_row: bool = True

    def slot_kinds(self) -> tuple[tuple[bool, str], ...]:
        accumulator = PER_ROW if self.is_per_row else FULL
        return (accumulator,) if self.global_weight_decay is None else (accumulator, ITERATION)

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        lr, t = hyper
        mode, decay, config = self.weight_decay_mode, self.weight_decay, self.global_weight_decay
        later_slots: Slots = ()
        if config is not None:
            rows = rows * global_decay_factor(slots[1], t, lr, decay, config)
            later_slots = (jnp.where((t >= config.start_iter) & (decay > 0), t, slots[1]),)
        effective = gradients + decay * rows if mode == WeightDecayMode.L2 else gradients
        squares = effective * effective
        accumulator = slots[0].astype(jnp.float32) + (_row_mean(squares) if self.is_per_row else squares)
        if mode in (WeightDecayMode.DECOUPLE, WeightDecayMode.DECOUPLE_GLOBAL):
            rows = (1.0 - lr * decay) * rows
        rows = rows - lr / (jnp.sqrt(accumulator) + self.eps) * effective
        if self.max_norm > 0:
            rows = rows * (self.max_norm / jnp.maximum(_row_norm(rows), self.max_norm))
        return rows, (accumulator, *later_slots)

    def short_name(self) -> str:
        return "decayed_adagrad"


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class AdamFamilySpec(RowRule):
    """Adam and LAMB with decoupled weight decay, their second moment per column or per row.

    `m += (1 - beta1) * (g - m); v += (1 - beta2) * (g² - v)`, both corrected by `1 - beta**t`;
    `u = m / (sqrt(v) + eps) + weight_decay * w; w -= lr * u`, for LAMB `w -= lr * norm(w) / norm(u) * u`, where the
    ratio is 1 if either norm is 0: rows that start at zero could never move otherwise.

    Args:
      eps: added to the root.
      beta1: decay of the first moment, when the row is touched.
      beta2: decay of the second moment.
      weight_decay: times the learning rate, as in AdamW.
      has_row_wise_second_moment: one moment per row, of `mean(g²)`: the PARTIAL_ROWWISE optimizers.
      has_trust_ratio: LAMB.
      has_row_wise_bias_correction: corrects by the row's own number of updates, kept in a third slot.

    Source: Kingma, Ba (2015); Loshchilov, Hutter (2019); You et al. (2020).
    """

    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    has_row_wise_second_moment: bool = False
    has_trust_ratio: bool = False
    has_row_wise_bias_correction: bool = False

    def slot_kinds(self) -> tuple[tuple[bool, str], ...]:
        moments = (FULL, PER_ROW if self.has_row_wise_second_moment else FULL)
        return (*moments, PER_ROW) if self.has_row_wise_bias_correction else moments

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        lr, t = hyper
        first, second, *counters = (slot.astype(jnp.float32) for slot in slots)
        counters = [counter + 1.0 for counter in counters]
        updates = counters[0] if counters else t.astype(jnp.float32)
        squares = gradients * gradients
        squares = _row_mean(squares) if self.has_row_wise_second_moment else squares
        first = self.beta1 * first + (1.0 - self.beta1) * gradients
        second = self.beta2 * second + (1.0 - self.beta2) * squares
        root = jnp.sqrt(second / one_minus_power(self.beta2, updates)) + self.eps
        direction = first / one_minus_power(self.beta1, updates) / root + self.weight_decay * rows
        if self.has_trust_ratio:
            length, step = _row_norm(rows), _row_norm(direction)
            lr = lr * jnp.where((length > 0) & (step > 0), length / jnp.where(step > 0, step, 1.0), 1.0)
        return rows - lr * direction, (first, second, *counters)

    def short_name(self) -> str:
        return "lamb" if self.has_trust_ratio else "adamw"


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class LARSSpec(RowRule):
    """Momentum of steps whose length follows the row's: `m = momentum * m + a * (g + weight_decay * w); w -= m`.

    `a = lr * eta * norm(w) / (norm(g) + weight_decay * norm(w))`, and `a = lr` if either norm is 0.

    Source: You, Gitman, Ginsburg (2017).
    """

    momentum: float = 0.9
    eta: float = 0.001
    weight_decay: float = 0.0

    def slot_kinds(self) -> tuple[tuple[bool, str], ...]:
        return (FULL,)

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        lr, _ = hyper
        length, slope = _row_norm(rows), _row_norm(gradients)
        ratio = self.eta * length / jnp.where(slope > 0, slope + self.weight_decay * length, 1.0)
        rate = lr * jnp.where((length > 0) & (slope > 0), ratio, 1.0)
        momentum = self.momentum * slots[0].astype(jnp.float32) + rate * (gradients + self.weight_decay * rows)
        return rows - momentum, (momentum,)

    def short_name(self) -> str:
        return "lars"


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class RowWiseRMSPropSpec(RowRule):
    """RMSProp with one mean per row, and rows that shrink with the time since their last update.

    `A = ema_beta * A + (1 - ema_beta) * mean(g²); w = shrinkage * w - lr * g / (sqrt(A) + eps)` where
    `shrinkage = max(min_shrinkage, 1 - clip(lr * ar_alpha * gap, 0, 1))`, the gap being 1 for a new row.
    """

    eps: float = 1e-8
    ar_alpha: float = 0.0
    ema_beta: float = 0.99
    min_shrinkage: float = 0.1

    def slot_kinds(self) -> tuple[tuple[bool, str], ...]:
        return (PER_ROW, ITERATION)

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        lr, t = hyper
        squares = _row_mean(gradients * gradients)
        mean = self.ema_beta * slots[0].astype(jnp.float32) + (1.0 - self.ema_beta) * squares
        shrinkage = 1.0 - jnp.clip(lr * self.ar_alpha * _gap_of(slots[1], t), 0.0, 1.0)
        rows = jnp.maximum(shrinkage, self.min_shrinkage) * rows - lr / (jnp.sqrt(mean) + self.eps) * gradients
        return rows, (mean, jnp.full_like(slots[1], t))

    def short_name(self) -> str:
        return "rowwise_rmsprop"


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class CounterAdagradSpec(RowRule):
    """Row-wise Adagrad whose rates and decay depend on how often a row was seen: `WeightDecayMode.COUNTER`.

    With the definition's defaults it is plain row-wise Adagrad that also counts.

    Args:
      eps: added to the root.
      weight_decay: strength of decay, for the modes that have one.
      regularization: which adjustments.
      max_counter: largest counter of all tables plus 1 (`refreshed_max_counter`), or a callable that returns it; it
        is the last hyperparameter.
    """

    eps: float = 1e-8
    weight_decay: float = 0.0
    regularization: records.CounterBasedRegularizationDefinition
    max_counter: float | Callable[[], Any] = 1.0

    def slot_kinds(self) -> tuple[tuple[bool, str], ...]:
        return (PER_ROW, ITERATION, PER_ROW)

    def get_hyperparameters(self, step: Any = None) -> Hyperparameters:
        largest = self.max_counter() if callable(self.max_counter) else self.max_counter
        return (*super().get_hyperparameters(step), as_float32(largest))

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        lr, t, max_counter = hyper
        config, decay = self.regularization, self.weight_decay
        mode, halflife, bound = config.counter_weight_decay_mode, config.counter_halflife, config.adjustment_ub
        gap, counter = _count(slots[1], slots[2], t, halflife)
        effective = gradients + decay * rows if mode == CounterWeightDecayMode.L2 else gradients
        accumulator = slots[0].astype(jnp.float32) + _row_mean(effective * effective)
        root = jnp.sqrt(accumulator) + self.eps
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
                return lr / (jnp.sqrt(bound * counter) + self.eps)
        return plain

    def short_name(self) -> str:
        return "counter_adagrad"


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class CowClipAdagradSpec(RowRule):
    """Row-wise Adagrad with gradients clipped by row norm and counter: `WeightDecayMode.COWCLIP`.

    A zero gradient is not clipped. A row clipped to zero does not move: see `CowClipDefinition`.

    Source: Zheng et al., CowClip (2022), in FBGEMM's form.
    """

    eps: float = 1e-8
    weight_decay: float = 0.0
    regularization: records.CowClipDefinition

    def slot_kinds(self) -> tuple[tuple[bool, str], ...]:
        return (PER_ROW, ITERATION, PER_ROW)

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        lr, t = hyper
        config, decay = self.regularization, self.weight_decay
        mode = config.counter_weight_decay_mode
        _, counter = _count(slots[1], slots[2], t, config.counter_halflife)
        effective = gradients + decay * rows if mode == CounterWeightDecayMode.L2 else gradients
        accumulator = slots[0].astype(jnp.float32) + _row_mean(effective * effective)
        limit = counter * jnp.maximum(config.weight_norm_coefficient * _row_norm(rows), config.lower_bound)
        norm = _row_norm(effective)
        clip = jnp.where(norm > 0, jnp.minimum(1.0, limit / jnp.where(norm > 0, norm, 1.0)), 1.0)
        rate = lr / (jnp.sqrt(accumulator) + self.eps) * clip
        if mode == CounterWeightDecayMode.DECOUPLE:
            rows = (1.0 - lr * decay) * rows
        # For L2, `effective` holds the decay already.
        return rows - rate * effective, (accumulator, jnp.full_like(slots[1], t), counter)

    def short_name(self) -> str:
        return "cowclip_adagrad"


def _row_mean(values: Array) -> Array:
    return jnp.mean(values, axis=-1, keepdims=True)


def _row_norm(values: Array) -> Array:
    return jnp.sqrt(jnp.sum(values * values, axis=-1, keepdims=True))


def _gap_of(prev_iter: Array, t: Array) -> Array:
    """Steps since the row's last update, 1 if there was none."""
    # Subtracted as integers: float32 counts to 2**24 only.
    return jnp.where(prev_iter == 0, 1, t - prev_iter).astype(jnp.float32)


def _count(prev_iter: Array, counter: Array, t: Array, halflife: int) -> tuple[Array, Array]:
    """The gap, and how often the row was seen, this time included; earlier times fade if `halflife > 0`."""
    gap = _gap_of(prev_iter, t)
    counter = counter.astype(jnp.float32)
    if halflife > 0:
        return gap, 1.0 + jnp.exp2(-gap / halflife) * counter
    return gap, jnp.ones_like(counter) if halflife == 0 else counter + 1.0

"""Row-wise Adagrad that counts how often a row was seen: the COUNTER and COWCLIP modes of weight decay.

Source: FBGEMM, EXACT_ROWWISE_ADAGRAD of the TBE training module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from rsembed.optimizers import Hyperparameters, Slots
from rsembed.optimizers.base import as_float32
from rsembed.tbe import records
from rsembed.tbe.records import CounterWeightDecayMode, LearningRateMode
from rsembed.tbe.row_rules import ITERATION, PER_ROW, RowRule, gap_of, row_mean, row_norm


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class CounterAdagradSpec(RowRule):
    """Row-wise Adagrad whose rates and decay depend on how often a row was seen: `WeightDecayMode.COUNTER`.

    With the definition's defaults it is plain row-wise Adagrad that also counts.

    Args:
      learning_rate: see `RowRule`.
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
        accumulator = slots[0].astype(jnp.float32) + row_mean(effective * effective)
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
        accumulator = slots[0].astype(jnp.float32) + row_mean(effective * effective)
        limit = counter * jnp.maximum(config.weight_norm_coefficient * row_norm(rows), config.lower_bound)
        norm = row_norm(effective)
        clip = jnp.where(norm > 0, jnp.minimum(1.0, limit / jnp.where(norm > 0, norm, 1.0)), 1.0)
        rate = lr / (jnp.sqrt(accumulator) + self.eps) * clip
        if mode == CounterWeightDecayMode.DECOUPLE:
            rows = (1.0 - lr * decay) * rows
        # For L2, `effective` holds the decay already.
        return rows - rate * effective, (accumulator, jnp.full_like(slots[1], t), counter)

    def short_name(self) -> str:
        return "cowclip_adagrad"


def _count(prev_iter: Array, counter: Array, t: Array, halflife: int) -> tuple[Array, Array]:
    """The gap, and how often the row was seen, this time included; earlier times fade if `halflife > 0`."""
    gap = gap_of(prev_iter, t)
    counter = counter.astype(jnp.float32)
    if halflife > 0:
        return gap, 1.0 + jnp.exp2(-gap / halflife) * counter
    return gap, jnp.ones_like(counter) if halflife == 0 else counter + 1.0

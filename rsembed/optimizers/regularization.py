"""How rules of rows may use weight decay, counters and clipping: enums and records, and the decay of a missed step.

Names, members and defaults are those of FBGEMM. Impossible values are refused here; a rule refuses values that do not
go together.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rsembed.intervals import check_fields, within


class WeightDecayMode(enum.IntEnum):
    """How row-wise Adagrad uses `weight_decay`; the other optimizers have one fixed kind of decay or none."""

    NONE = 0
    L2 = 1
    DECOUPLE = 2
    COUNTER = 3
    COWCLIP = 4
    DECOUPLE_GLOBAL = 5


class CounterWeightDecayMode(enum.IntEnum):
    """Weight decay inside the COUNTER and COWCLIP modes."""

    NONE = 0
    L2 = 1
    DECOUPLE = 2
    ADAGRADW = 3


class LearningRateMode(enum.IntEnum):
    """How COUNTER changes the learning rate of rows seen more often than the tail threshold."""

    EQUAL = -1
    TAIL_ID_LR_INCREASE = 0
    TAIL_ID_LR_DECREASE = 1
    COUNTER_SGD = 2


class GradSumDecay(enum.IntEnum):
    """Decay of the gradient sum; the original accepts CTR_DECAY without any effect, so it is refused."""

    NO_DECAY = -1
    CTR_DECAY = 0


@dataclasses.dataclass(frozen=True)
class TailIdThreshold:
    """A row is no tail row once its counter exceeds `val`, or `floor(val * max_counter)` if `is_ratio`."""

    val: float = within("[0, inf)", default=0)
    is_ratio: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class CounterBasedRegularizationDefinition:
    """Row-wise Adagrad whose rates depend on how often a row was seen (`WeightDecayMode.COUNTER`).

    Args:
      counter_weight_decay_mode: L2 and DECOUPLE need a positive `counter_halflife`.
      counter_halflife: steps after which an untouched row's counter has halved; -1 (and -2, for ADAGRADW) never.
      adjustment_iter: the adjustments begin after this step.
      adjustment_ub: exponent, factor or bound of the adjustment, see the rule.
      learning_rate_mode: for rows above the tail threshold.
      grad_sum_decay: only NO_DECAY.
      tail_id_threshold: where the tail ends.
      max_counter_update_freq: steps between two refreshes of the largest counter; never if it is not positive.
    """

    counter_weight_decay_mode: CounterWeightDecayMode = CounterWeightDecayMode.NONE
    counter_halflife: int = -1
    adjustment_iter: int = -1
    adjustment_ub: float = within("[0, inf)", default=1.0)
    learning_rate_mode: LearningRateMode = LearningRateMode.EQUAL
    grad_sum_decay: GradSumDecay = GradSumDecay.NO_DECAY
    tail_id_threshold: TailIdThreshold = TailIdThreshold()
    max_counter_update_freq: int = 1000

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class CowClipDefinition:
    """Row-wise Adagrad with gradients clipped by row norm and counter (`WeightDecayMode.COWCLIP`).

    A row's gradient is clipped to `row_counter * max(weight_norm_coefficient * norm(row), lower_bound)`. With both
    zero, the defaults, no row could ever move. A positive `lower_bound` is what lets rows that start at zero move.
    """

    counter_weight_decay_mode: CounterWeightDecayMode = CounterWeightDecayMode.NONE
    counter_halflife: int = -1
    weight_norm_coefficient: float = within("[0, inf)", default=0.0)
    lower_bound: float = within("[0, inf)", default=0.0)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class GlobalWeightDecayDefinition:
    """Decay that reaches untouched rows, made up for when they are read (`WeightDecayMode.DECOUPLE_GLOBAL`).

    Args:
      start_iter: first step with decay.
      lower_bound: the smallest factor that a single gap may cause.
    """

    start_iter: int = 0
    lower_bound: float = within("[0, 1]", default=0.0)

    def __post_init__(self) -> None:
        check_fields(self)


def global_decay_factor(
    prev_iter: Int[Array, "*rows"],
    t: Any,
    learning_rate: Any,
    weight_decay: Any,
    config: GlobalWeightDecayDefinition,
) -> Float[Array, "*rows"]:
    """What a row must be multiplied by at step `t` to make up for the decay of the steps that did not touch it.

    Args:
      prev_iter: step of each row's last update, 0 if there was none.
      t: current step, 1 for the first. One before `start_iter` decays nothing.
      learning_rate: the current one covers the whole gap.
      weight_decay: 0 decays nothing.
      config: first step and smallest factor.

    Source: FBGEMM, DECOUPLE_GLOBAL.
    """
    t = jnp.asarray(t, jnp.int32)
    weight_decay = jnp.asarray(weight_decay, jnp.float32)
    missed = jnp.maximum(t - prev_iter - 1, 0).astype(jnp.float32)
    kept = jnp.power(1.0 - jnp.asarray(learning_rate, jnp.float32) * weight_decay, missed)
    decays = (t >= config.start_iter) & (weight_decay > 0) & (prev_iter > 0)
    return jnp.where(decays, jnp.maximum(kept, config.lower_bound), 1.0)

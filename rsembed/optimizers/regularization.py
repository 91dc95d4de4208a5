"""Modes of weight decay, counters, clipping and averages: enums, and records with their effect on tables.

Names, members and defaults are those of FBGEMM. Impossible values are refused here; a rule refuses values that do not
go together. What a record does to whole tables is pure and traceable; `t` is the step whose lookup comes next, 1 for
the first.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rsembed.checks import validated, within


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
    """Whether COUNTER decays the gradient sum; CTR_DECAY is refused: FBGEMM accepts it without any effect."""

    NO_DECAY = -1
    CTR_DECAY = 0


@dataclasses.dataclass(frozen=True)
@validated
class TailIdThreshold:
    """A row is no tail row once its counter exceeds `val`, or `floor(val * max_counter)` if `is_ratio`."""

    val: float = within("[0, inf)", default=0)
    is_ratio: bool = False


@dataclasses.dataclass(frozen=True)
@validated
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

    def refreshed_max_counter(
        self, row_counters: Sequence[Float[Array, "_ ..."]], t: Any, old: Any
    ) -> Float[Array, ""]:
        """The largest counter of all tables plus 1 if step `t` refreshes it, else `old`; for step `t` already.

        Args:
          row_counters: one per table, as they stand before the update of step `t`.
          t: current step.
          old: the value so far; 1 at the start.
        """
        old = jnp.asarray(old, jnp.float32)
        if self.max_counter_update_freq <= 0 or not row_counters:
            return old

        def largest(counters: tuple[Array, ...]) -> Array:
            return jnp.stack([jnp.max(counter, initial=0.0) for counter in counters]).max() + 1.0

        is_due = jnp.asarray(t, jnp.int32) % self.max_counter_update_freq == 0
        return jax.lax.cond(is_due, largest, lambda _: old, tuple(row_counters))


@dataclasses.dataclass(frozen=True)
@validated
class CowClipDefinition:
    """Row-wise Adagrad with gradients clipped by row norm and counter (`WeightDecayMode.COWCLIP`).

    A row's gradient is clipped to `row_counter * max(weight_norm_coefficient * norm(row), lower_bound)`. With both
    zero, the defaults, no row could ever move. A positive `lower_bound` is what lets rows that start at zero move.
    """

    counter_weight_decay_mode: CounterWeightDecayMode = CounterWeightDecayMode.NONE
    counter_halflife: int = -1
    weight_norm_coefficient: float = within("[0, inf)", default=0.0)
    lower_bound: float = within("[0, inf)", default=0.0)


class StepMode(enum.IntEnum):
    """NONE starts the moving average of the ensemble at zero after each pass; the other two keep it."""

    NONE = 0
    USE_COUNTER = 1
    USE_ITER = 2


Copies = tuple[Float[Array, "rows dim"], ...]


@dataclasses.dataclass(frozen=True)
@validated
class EnsembleModeDefinition:
    """A slow copy of the tables that follows them every `step_ema` steps and replaces them every `step_swap` steps.

    Up to `step_start` the slow copy takes over all of the table, later `1 - step_ema_coef` of the difference.
    """

    step_ema: float = within("[1, inf)", default=10000)
    step_swap: float = within("[1, inf)", default=10000)
    step_start: float = 0
    step_ema_coef: float = within("[0, 1]", default=0.6)
    step_mode: StepMode = StepMode.USE_ITER

    def before_step(
        self, table: Float[Array, "rows dim"], copies: Copies, t: Any
    ) -> tuple[Float[Array, "rows dim"], Copies]:
        """A table and its slow copy before the lookup of training step `t`; unchanged between passes."""
        t = jnp.asarray(t, jnp.int32)
        follows, swaps = t % int(self.step_ema) == 0, t % int(self.step_swap) == 0
        share = jnp.where(t <= int(self.step_start), 1.0, 1.0 - self.step_ema_coef)

        def run(fast: Array, copies: Copies) -> tuple[Array, Copies]:
            (slow,) = copies
            moved = share * fast.astype(jnp.float32) + (1.0 - share) * slow.astype(jnp.float32)
            slow = jnp.where(follows, moved.astype(slow.dtype), slow)
            fast = jnp.where(swaps, slow.astype(fast.dtype), fast)
            if self.step_mode == StepMode.NONE:
                slow = jnp.where(follows, jnp.zeros_like(slow), slow)
            return fast, (slow,)

        return jax.lax.cond(follows | swaps, run, lambda *unchanged: unchanged, table, copies)


@dataclasses.dataclass(frozen=True)
@validated
class EmainplaceModeDefinition:
    """The second half of each row follows the first half every `step_ema` steps, from `step_start` on."""

    step_ema: float = within("[1, inf)", default=10)
    step_start: float = 0
    step_ema_coef: float = within("[0, 1]", default=0.6)

    def before_step(
        self, table: Float[Array, "rows dim"], copies: Copies, t: Any
    ) -> tuple[Float[Array, "rows dim"], Copies]:
        """A table of even dim before the lookup of training step `t`; it has no copies."""
        t = jnp.asarray(t, jnp.int32)

        def run(table: Array) -> Array:
            fast, slow = jnp.split(table.astype(jnp.float32), 2, axis=1)
            moved = slow + self.step_ema_coef * (fast - slow)
            return table.at[:, table.shape[1] // 2 :].set(moved.astype(table.dtype))

        is_due = (t % int(self.step_ema) == 0) & (t >= int(self.step_start))
        return jax.lax.cond(is_due, run, lambda table: table, table), copies


@dataclasses.dataclass(frozen=True)
@validated
class GlobalWeightDecayDefinition:
    """Decay that reaches untouched rows, made up for when they are read (`WeightDecayMode.DECOUPLE_GLOBAL`).

    Args:
      start_iter: first step with decay.
      lower_bound: the smallest factor that a single gap may cause.
    """

    start_iter: int = 0
    lower_bound: float = within("[0, 1]", default=0.0)


def global_decay_factor(
    prev_iter: Int[Array, "*rows"],
    t: Any,
    learning_rate: Any,
    weight_decay: Any,
    config: GlobalWeightDecayDefinition,
) -> Float[Array, "*rows"]:
    """Factor of a row at step `t` that makes up for the decay of the steps that did not touch it.

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
    rate = jnp.asarray(learning_rate, jnp.float32) * weight_decay
    # By the logarithm where it exists: in float32, `1 - rate` is 1 below 6e-8, however many steps were missed.
    kept = jnp.where(rate < 0.5, jnp.exp(missed * jnp.log1p(-jnp.minimum(rate, 0.5))), jnp.power(1.0 - rate, missed))
    decays = (t >= config.start_iter) & (weight_decay > 0) & (prev_iter > 0)
    return jnp.where(decays, jnp.maximum(kept, config.lower_bound), 1.0)

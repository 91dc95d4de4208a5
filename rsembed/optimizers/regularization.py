"""Settings of weight decay, row counters, gradient clipping and weight averages, as in FBGEMM.

The names and default values of the settings agree with FBGEMM. Each settings class rejects values
that are never valid, and the optimizer rejects invalid combinations of settings. Functions and
methods with array arguments are pure and can be traced. Wherever `t` is an argument, `t` is the
number of the current training step, 1 for the first step.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from rsembed.checks import validated, within


class WeightDecayMode(enum.IntEnum):
    """How row-wise Adagrad uses `weight_decay`.

    Optimizers other than row-wise Adagrad support at most one mode of weight decay.
    """

    NONE = 0
    L2 = 1
    DECOUPLE = 2
    COUNTER = 3
    COWCLIP = 4
    DECOUPLE_GLOBAL = 5


class CounterWeightDecayMode(enum.IntEnum):
    """How `weight_decay` is used in the modes COUNTER and COWCLIP of `WeightDecayMode`."""

    NONE = 0
    L2 = 1
    DECOUPLE = 2
    ADAGRADW = 3


class LearningRateMode(enum.IntEnum):
    """How a row counter above `tail_id_threshold` changes the learning rate of the row.

    Only `WeightDecayMode.COUNTER` uses `LearningRateMode`.
    """

    EQUAL = -1
    TAIL_ID_LR_INCREASE = 0
    TAIL_ID_LR_DECREASE = 1
    COUNTER_SGD = 2


class GradSumDecay(enum.IntEnum):
    """Values of the setting `grad_sum_decay` of FBGEMM.

    `grad_sum_decay` has no effect in FBGEMM, so the optimizer accepts only NO_DECAY.
    """

    NO_DECAY = -1
    CTR_DECAY = 0


@dataclasses.dataclass(frozen=True)
@validated
class TailIdThreshold:
    """Largest counter of a tail row: `val`, or `floor(val * max_counter)` if `is_ratio`."""

    val: float = within("[0, inf)", default=0)
    is_ratio: bool = False


@dataclasses.dataclass(frozen=True)
@validated
class CounterBasedRegularizationDefinition:
    """Settings of `WeightDecayMode.COUNTER`: learning rates depend on the counter of a row.

    The counter of a row is the number of steps in which the row was looked up.

    Args:
      counter_weight_decay_mode: kind of weight decay. L2 and DECOUPLE need a positive
        `counter_halflife`.
      counter_halflife: half-life of row counters, in steps. In a row counter, the share of an
        update halves every `counter_halflife` steps. With a negative half-life, such as the default
        -1, counters do not decay. ADAGRADW has different formulas for the half-lives -1 and -2.
        With a half-life of 0, every counter is 1.
      adjustment_iter: number of the last step in which row counters do not yet change learning
        rates and decay. If `adjustment_iter` is 0 or less, row counters are used from the first
        step.
      adjustment_ub: exponent in the TAIL_ID modes of `learning_rate_mode`, factor of the counter in
        COUNTER_SGD, and largest product of learning rate and counter in ADAGRADW with half-life -2.
      learning_rate_mode: how the counter changes the learning rate of rows that do not belong to
        the tail. With EQUAL, the default, the counter does not change the learning rate.
      grad_sum_decay: setting without effect in FBGEMM. NO_DECAY is the only supported value.
      tail_id_threshold: rows with a counter up to this threshold belong to the tail.
      max_counter_update_freq: number of steps between two updates of `max_counter`. If
        `max_counter_update_freq` is 0 or less, `max_counter` is never updated.
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
        self, row_counters: Sequence[Float[Array, "_ ..."]], t: ArrayLike, old: ArrayLike
    ) -> Float[Array, ""]:
        """New `max_counter`, which is 1 plus the largest row counter of all tables.

        If `t` is not a multiple of `max_counter_update_freq`, the result is `old`.

        Args:
          row_counters: row counters of each table before step `t`.
          t: number of the current step, 1 for the first step.
          old: the result of the previous call, or 1 in the first call.
        """
        old = jnp.asarray(old, jnp.float32)
        if self.max_counter_update_freq <= 0 or not row_counters:
            return old

        def largest(counters: tuple[Array, ...]) -> Array:
            per_table = [jnp.max(counter, initial=0.0) for counter in counters]
            return jnp.stack(per_table).max() + 1.0

        def unchanged(_: tuple[Array, ...]) -> Array:
            return old

        is_due = jnp.asarray(t, jnp.int32) % self.max_counter_update_freq == 0
        return jax.lax.cond(is_due, largest, unchanged, tuple(row_counters))


@dataclasses.dataclass(frozen=True)
@validated
class CowClipDefinition:
    """Settings of `WeightDecayMode.COWCLIP`, which clips the gradient of each row.

    The norm of a row's gradient is clipped to
    `row_counter * max(weight_norm_coefficient * norm(row), lower_bound)`. By default,
    `weight_norm_coefficient` and `lower_bound` are zero, as in FBGEMM. The optimizer rejects these
    defaults, because every gradient would be clipped to zero. Rows that start at zero move only
    with a positive `lower_bound`.
    """

    counter_weight_decay_mode: CounterWeightDecayMode = CounterWeightDecayMode.NONE
    counter_halflife: int = -1
    weight_norm_coefficient: float = within("[0, inf)", default=0.0)
    lower_bound: float = within("[0, inf)", default=0.0)


class StepMode(enum.IntEnum):
    """Whether the slow copy of a table is kept after each update of the copy, or set to zero.

    NONE sets the slow copy to zero, and the other modes keep the slow copy. See
    `EnsembleModeDefinition`.
    """

    NONE = 0
    USE_COUNTER = 1
    USE_ITER = 2


Table = Float[Array, "rows dim"]
Copies = tuple[Table, ...]


@dataclasses.dataclass(frozen=True)
@validated
class EnsembleModeDefinition:
    """Settings of a slow copy of the table: the exponential moving average of the table.

    Args:
      step_ema: number of steps between two updates of the slow copy.
      step_swap: number of steps between two swaps. A swap overwrites the table with the slow copy.
        The first swap overwrites the table before step `step_swap`.
      step_start: last step at which an update copies the whole table into the slow copy. Updates
        after step `step_start` compute `slow = step_ema_coef * slow + (1 - step_ema_coef) * table`.
      step_ema_coef: decay of the moving average, the factor of the old slow copy in an update.
      step_mode: NONE sets the slow copy to zero after each update, and other modes keep the slow
        copy.
    """

    step_ema: float = within("[1, inf)", default=10000)
    step_swap: float = within("[1, inf)", default=10000)
    step_start: float = 0
    step_ema_coef: float = within("[0, 1]", default=0.6)
    step_mode: StepMode = StepMode.USE_ITER

    def before_step(self, table: Table, copies: Copies, t: ArrayLike) -> tuple[Table, Copies]:
        """Updates the slow copy, and overwrites the table with the slow copy, before step `t`.

        The slow copy is updated if `t` is a multiple of `step_ema`. The table is overwritten if `t`
        is a multiple of `step_swap`.

        Args:
          table: the table that the optimizer trains.
          copies: tuple with one array, the slow copy of `table`.
          t: number of the current step, 1 for the first step.

        Returns: the table, and a tuple with the slow copy.
        """
        t = jnp.asarray(t, jnp.int32)
        is_update_due = t % int(self.step_ema) == 0
        is_swap_due = t % int(self.step_swap) == 0
        share = jnp.where(t <= int(self.step_start), 1.0, 1.0 - self.step_ema_coef)

        def update(fast: Array, copies: Copies) -> tuple[Array, Copies]:
            (slow,) = copies
            fast_part = share * fast.astype(jnp.float32)
            slow_part = (1.0 - share) * slow.astype(jnp.float32)
            moved = fast_part + slow_part
            slow = jnp.where(is_update_due, moved.astype(slow.dtype), slow)
            fast = jnp.where(is_swap_due, slow.astype(fast.dtype), fast)
            if self.step_mode == StepMode.NONE:
                zeros = jnp.zeros_like(slow)
                slow = jnp.where(is_update_due, zeros, slow)
            return fast, (slow,)

        def keep(fast: Array, copies: Copies) -> tuple[Array, Copies]:
            return fast, copies

        return jax.lax.cond(is_update_due | is_swap_due, update, keep, table, copies)


@dataclasses.dataclass(frozen=True)
@validated
class EmainplaceModeDefinition:
    """Settings for rows with a second half that is a moving average of the first half.

    Args:
      step_ema: number of steps between two updates of the second half of each row.
      step_start: first step at which the second half of each row may be updated.
      step_ema_coef: factor of the difference `first half - second half`, which an update adds to
        the second half of each row.
    """

    step_ema: float = within("[1, inf)", default=10)
    step_start: float = 0
    step_ema_coef: float = within("[0, 1]", default=0.6)

    def before_step(self, table: Table, copies: Copies, t: ArrayLike) -> tuple[Table, Copies]:
        """Updates the second half of each row before step `t`.

        The table changes only if `t` is a multiple of `step_ema`, and not less than `step_start`.

        Args:
          table: table with an even number of columns.
          copies: returned unchanged. `before_step` has the argument `copies` only because
            `EnsembleModeDefinition.before_step` needs it.
          t: number of the current step, 1 for the first step.

        Returns: the table, and `copies`.
        """
        t = jnp.asarray(t, jnp.int32)

        def update(table: Array) -> Array:
            wide_table = table.astype(jnp.float32)
            fast, slow = jnp.split(wide_table, 2, axis=1)
            moved = slow + self.step_ema_coef * (fast - slow)
            middle = table.shape[1] // 2
            return table.at[:, middle:].set(moved.astype(table.dtype))

        def keep(table: Array) -> Array:
            return table

        is_due = (t % int(self.step_ema) == 0) & (t >= int(self.step_start))
        new_table = jax.lax.cond(is_due, update, keep, table)
        return new_table, copies


@dataclasses.dataclass(frozen=True)
@validated
class GlobalWeightDecayDefinition:
    """Settings of `WeightDecayMode.DECOUPLE_GLOBAL`: every row decays in every step.

    A step writes only the rows that the batch looks up. Each update of a row first applies the
    decay of all steps since the row's last update (the "missed steps"). A lookup in a table-batched
    module applies the decay of the missed steps to the activations, without writing the row.

    Args:
      start_iter: first step with decay.
      lower_bound: lower bound of a row's decay factor, the product of one factor for each missed
        step.
    """

    start_iter: int = 0
    lower_bound: float = within("[0, 1]", default=0.0)


def global_decay_factor(
    prev_iter: Int[Array, "*rows"],
    t: ArrayLike,
    learning_rate: ArrayLike,
    weight_decay: ArrayLike,
    config: GlobalWeightDecayDefinition,
) -> Float[Array, "*rows"]:
    """Decay factor of each row, for the steps between the row's last update and step `t`.

    Args:
      prev_iter: step of each row's last update, or 0 for a row that was never updated. The decay
        factor of a row that was never updated is 1.
      t: number of the current step, 1 for the first step. Before `config.start_iter`, all decay
        factors are 1.
      learning_rate: current learning rate, used for all missed steps.
      weight_decay: coefficient of weight decay. If `weight_decay` is 0, all decay factors are 1.
      config: first step with decay, and lower bound of the decay factor.

    Source: FBGEMM, DECOUPLE_GLOBAL.
    """
    t = jnp.asarray(t, jnp.int32)
    weight_decay = jnp.asarray(weight_decay, jnp.float32)
    missed = jnp.maximum(t - prev_iter - 1, 0).astype(jnp.float32)
    rate = jnp.asarray(learning_rate, jnp.float32) * weight_decay
    # In float32, `1 - rate` is rounded to 1 if `rate` is below 3e-8, so `(1 - rate)**missed` would
    # be 1. `log1p(-rate)` is accurate for small rates, but is not defined for rates of 1 or more.
    log_factor = jnp.log1p(-jnp.minimum(rate, 0.5))
    by_logarithm = jnp.exp(missed * log_factor)
    is_small = rate < 0.5
    by_power = jnp.power(1.0 - rate, missed)
    factor = jnp.where(is_small, by_logarithm, by_power)
    is_decayed = (t >= config.start_iter) & (weight_decay > 0) & (prev_iter > 0)
    bounded_factor = jnp.maximum(factor, config.lower_bound)
    return jnp.where(is_decayed, bounded_factor, 1.0)

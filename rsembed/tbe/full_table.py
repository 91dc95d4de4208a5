"""What table-batched optimizers do to rows that nobody looked up: passes over whole tables.

Everything here is pure and traceable; `t` is the step whose lookup comes next, 1 for the first.

Source: FBGEMM, ENSEMBLE_ROWWISE_ADAGRAD, EMAINPLACE_ROWWISE_ADAGRAD and COUNTER.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rsembed.tbe import records
from rsembed.tbe.records import EnsembleModeDefinition, StepMode


def ensemble_pass(
    weights: Float[Array, "rows dim"],
    momentum2: Float[Array, "rows dim"],
    t: Any,
    config: EnsembleModeDefinition,
) -> tuple[Float[Array, "rows dim"], Float[Array, "rows dim"]]:
    """The table and its slow copy `momentum2` before the lookup of training step `t`; unchanged between passes."""
    t = jnp.asarray(t, jnp.int32)
    follows, swaps = t % config.step_ema == 0, t % config.step_swap == 0
    share = jnp.where(t <= config.step_start, 1.0, 1.0 - config.step_ema_coef)

    def run(fast: Array, slow: Array) -> tuple[Array, Array]:
        moved = share * fast.astype(jnp.float32) + (1.0 - share) * slow.astype(jnp.float32)
        slow = jnp.where(follows, moved.astype(slow.dtype), slow)
        fast = jnp.where(swaps, slow.astype(fast.dtype), fast)
        return fast, jnp.where(follows, jnp.zeros_like(slow), slow) if config.step_mode == StepMode.NONE else slow

    return jax.lax.cond(follows | swaps, run, lambda fast, slow: (fast, slow), weights, momentum2)


def emainplace_pass(weights: Float[Array, "rows dim"], t: Any, config: records.EmainplaceModeDefinition) -> Array:
    """The table before the lookup of training step `t`: at a pass, second halves move toward first halves.

    Raises: ValueError: rows have an odd number of columns.
    """
    dim = weights.shape[1]
    if dim % 2:
        raise ValueError(
            f"EMAINPLACE_ROWWISE_ADAGRAD splits rows into two halves, but the embedding dim is {dim}; use an even one."
        )
    t = jnp.asarray(t, jnp.int32)

    def run(table: Array) -> Array:
        fast, slow = jnp.split(table.astype(jnp.float32), 2, axis=1)
        return table.at[:, dim // 2 :].set((slow + config.step_ema_coef * (fast - slow)).astype(table.dtype))

    return jax.lax.cond((t % config.step_ema == 0) & (t >= config.step_start), run, lambda table: table, weights)


def refreshed_max_counter(
    row_counters: Sequence[Float[Array, "_ ..."]],
    t: Any,
    old: Any,
    config: records.CounterBasedRegularizationDefinition,
) -> Float[Array, ""]:
    """The largest counter of all tables plus 1 if step `t` refreshes it, else `old`; to be used by step `t` already.

    Args:
      row_counters: one per table, as they stand before the update of step `t`.
      t: current step.
      old: the value so far; 1 at the start.
      config: how often to refresh.
    """
    old = jnp.asarray(old, jnp.float32)
    if config.max_counter_update_freq <= 0 or not row_counters:
        return old

    def largest(counters: tuple[Array, ...]) -> Array:
        return jnp.stack([jnp.max(counter, initial=0.0) for counter in counters]).max() + 1.0

    is_due = jnp.asarray(t, jnp.int32) % config.max_counter_update_freq == 0
    return jax.lax.cond(is_due, largest, lambda _: old, tuple(row_counters))

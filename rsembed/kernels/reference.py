"""The kernels in plain `jax.numpy`: the definition that every other implementation must match.

Tables may be float32, bfloat16 or float16; sums, gradients, slots and row rules are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from rsembed.kernels.contract import NO_ROW, Segment
from rsembed.optimizers import Hyperparameters, OptimizerSpec, Slots

NAME = "reference"


def unavailable_because() -> str | None:
    """None: plain JAX runs everywhere."""
    return None


def entry_gains(segment: Segment, num_rows: int) -> tuple[Int[Array, " nnz"], Float[Array, " nnz"]]:
    """Output number and gain of every entry; entries that contribute nothing have gain 0."""
    num_entries = segment.rows.shape[0]
    valid = (segment.rows >= 0) & (segment.rows < num_rows)
    weights = jnp.ones(num_entries, jnp.float32) if segment.weights is None else segment.weights.astype(jnp.float32)
    if segment.offsets is None:
        return jnp.arange(num_entries), jnp.where(valid, weights, 0.0)
    position = jnp.arange(num_entries, dtype=segment.offsets.dtype)
    bag = jnp.searchsorted(segment.offsets, position, side="right") - 1
    inside = (bag >= 0) & (bag < segment.num_outputs)
    bag = jnp.clip(bag, 0, max(segment.num_outputs - 1, 0))
    gains = jnp.where(valid & inside, weights, 0.0)
    if segment.combiner == "sum" or segment.num_outputs == 0:
        return bag, gains
    terms = gains if segment.combiner == "mean" else gains * gains
    total = jax.ops.segment_sum(terms, bag, segment.num_outputs)
    divisor = total if segment.combiner == "mean" else jnp.sqrt(total)
    safe = jnp.where(divisor == 0.0, 1.0, divisor)
    return bag, gains * jnp.where(divisor == 0.0, 0.0, 1.0 / safe)[bag]


def lookup(table: Float[Array, "num_rows dim"], segments: Sequence[Segment]) -> tuple[Float[Array, "_ dim"], ...]:
    """Pooled rows of every segment, float32 `[segment.num_outputs, dim]`."""
    outputs = []
    for segment in segments:
        bag, gains = entry_gains(segment, table.shape[0])
        vectors = table.at[segment.rows].get(mode="fill", fill_value=0).astype(jnp.float32)
        # A row that must not contribute may hold anything, NaN included: select, do not multiply by zero.
        terms = jnp.where(gains[:, None] == 0.0, 0.0, gains[:, None] * vectors)
        if segment.offsets is None:
            outputs.append(terms)
        else:
            outputs.append(jax.ops.segment_sum(terms, bag, segment.num_outputs))
    return tuple(outputs)


def row_gradients(
    num_rows: int, segments: Sequence[Segment], d_outputs: Sequence[Float[Array, "_ dim"]]
) -> tuple[Int[Array, " capacity"], Float[Array, "capacity dim"]]:
    """Gradient of every looked-up row, equal rows combined.

    Returns: distinct rows in ascending order and their float32 gradients; unused places at the end hold row `NO_ROW`
    and zeros. The capacity is the number of entries, or `num_rows` if that is less. A row that was looked up is
    listed even when its gradient is zero.
    """
    dim = d_outputs[0].shape[1]
    all_rows, all_terms = [], []
    for segment, d_output in zip(segments, d_outputs, strict=True):
        bag, gains = entry_gains(segment, num_rows)
        listed = _is_listed(segment, num_rows)
        all_rows.append(jnp.where(listed, segment.rows.astype(jnp.int32), NO_ROW))
        all_terms.append(
            gains[:, None] * d_output.astype(jnp.float32)[bag]
            if segment.num_outputs
            else jnp.zeros((segment.rows.shape[0], dim), jnp.float32)
        )
    rows, terms = jnp.concatenate(all_rows), jnp.concatenate(all_terms)
    return combine_rows(rows, terms, min(rows.shape[0], num_rows))


def _is_listed(segment: Segment, num_rows: int) -> Array:
    valid = (segment.rows >= 0) & (segment.rows < num_rows)
    if segment.offsets is None:
        return valid
    position = jnp.arange(segment.rows.shape[0], dtype=segment.offsets.dtype)
    return valid & (position >= segment.offsets[0]) & (position < segment.offsets[-1])


def combine_rows(
    rows: Int[Array, " nnz"], values: Float[Array, "nnz dim"], capacity: int
) -> tuple[Int[Array, " capacity"], Float[Array, "capacity dim"]]:
    """Sums `values` of equal `rows`: distinct rows ascending, `NO_ROW` and zeros behind them."""
    if rows.shape[0] == 0:
        return jnp.zeros(capacity, jnp.int32) + NO_ROW, jnp.zeros((capacity, values.shape[1]), values.dtype)
    order = jnp.argsort(rows, stable=True)
    sorted_rows = rows[order]
    is_first = jnp.concatenate([jnp.ones(1, bool), sorted_rows[1:] != sorted_rows[:-1]])
    group = jnp.cumsum(is_first) - 1
    # Groups at or beyond the capacity can only be padding: there are at most `capacity` real rows.
    group = jnp.where(sorted_rows == NO_ROW, capacity, group)
    sums = jax.ops.segment_sum(values[order], group, capacity, indices_are_sorted=True)
    distinct = jnp.full(capacity, NO_ROW, jnp.int32).at[group].set(sorted_rows.astype(jnp.int32), mode="drop")
    return distinct, sums


def apply_rows(
    table: Float[Array, "num_rows dim"],
    slots: Slots,
    rows: Int[Array, " capacity"],
    gradients: Float[Array, "capacity dim"],
    hyper: Hyperparameters,
    rule: OptimizerSpec,
    rounding_key: PRNGKeyArray | None = None,
) -> tuple[Float[Array, "num_rows dim"], Slots]:
    """One optimizer step of distinct `rows`; rows outside the table are padding."""
    old = table.at[rows].get(mode="fill", fill_value=0).astype(jnp.float32)
    old_slots = tuple(slot.at[rows].get(mode="fill", fill_value=0) for slot in slots)
    new, new_slots = rule.step_rows(old, old_slots, gradients, hyper)
    if rounding_key is not None:
        new = round_stochastically(new, table.dtype, rows, rounding_key)
    # Distinct places behind the table keep the promise of unique indices for padding as well.
    valid = (rows >= 0) & (rows < table.shape[0])
    places = jnp.where(valid, rows, table.shape[0] + jnp.arange(rows.shape[0], dtype=rows.dtype))

    def put(target: Array, values: Array) -> Array:
        return target.at[places].set(values.astype(target.dtype), mode="drop", unique_indices=True)

    return put(table, new), tuple(put(slot, values) for slot, values in zip(slots, new_slots, strict=True))


def update(
    table: Float[Array, "num_rows dim"],
    slots: Slots,
    segments: Sequence[Segment],
    d_outputs: Sequence[Float[Array, "_ dim"]],
    hyper: Hyperparameters,
    rule: OptimizerSpec,
    rounding_key: PRNGKeyArray | None = None,
) -> tuple[Float[Array, "num_rows dim"], Slots]:
    """Row gradients and one optimizer step per distinct row in one call."""
    rows, gradients = row_gradients(table.shape[0], segments, d_outputs)
    return apply_rows(table, slots, rows, gradients, hyper, rule, rounding_key)


def allocate(shape: tuple[int, ...], dtype: Any) -> Array:
    """An array to be filled in place; its values are unspecified."""
    return jnp.zeros(shape, dtype)


def round_stochastically(
    values: Float[Array, "rows dim"], dtype: jnp.dtype, rows: Int[Array, " rows"], key: PRNGKeyArray
) -> Float[Array, "rows dim"]:
    """Rounds float32 `values` up or down to `dtype` with probabilities that keep the mean.

    The noise depends on the key, the row number and the column alone, not on where in the batch the row stood.
    Values outside the range of `dtype`, infinities and NaN are rounded to nearest.
    """
    if dtype == jnp.float32:
        return values
    noise = jax.vmap(lambda row: jax.random.uniform(jax.random.fold_in(key, row), values.shape[1:]))(
        rows.astype(jnp.uint32)
    )
    nearest = values.astype(dtype)
    back = nearest.astype(jnp.float32)
    away = jnp.where(values > back, jnp.inf, -jnp.inf).astype(dtype)
    other = jnp.nextafter(nearest, away).astype(jnp.float32)
    span = jnp.abs(other - back)
    chance = jnp.where(span > 0, jnp.abs(values - back) / span, 0.0)
    take_other = jnp.isfinite(values) & jnp.isfinite(other) & (noise < chance)
    return jnp.where(take_other, other, back).astype(dtype)


def rows_by_bag(bags: Int[Array, " nnz"], num_bags: int) -> tuple[Int[Array, " num_bags_plus_1"], Int[Array, " nnz"]]:
    """Groups entries by bag: offsets, and the stable order in which entries belong to bags 0, 1, ...

    Entries whose bag lies outside `[0, num_bags)` come last, behind the final offset.
    """
    keys = jnp.where((bags >= 0) & (bags < num_bags), bags, num_bags)
    order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    offsets = jnp.searchsorted(keys[order], jnp.arange(num_bags + 1, dtype=keys.dtype), side="left")
    return offsets.astype(jnp.int32), order

"""Row gradients as a lookup: the gradient of a row is a pooled lookup in the gradients of the outputs.

    forward    output[b]     = sum of gain * table[row]     over the entries of bag b
    backward   gradient[row] = sum of gain * d_output[b]    over the entries of that row

So an accelerator needs one kernel for both. Sorting makes the entries of a row neighbours; the order of additions
follows from the batch alone, so equal inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rsembed.kernels.contract import NO_ROW, Segment, as_rows
from rsembed.kernels.reference import entry_gains, is_listed


class RowGroups(NamedTuple):
    """Entries sorted by row.

    Attributes:
      rows: distinct rows ascending, `NO_ROW` behind them.
      entries: one bag per place in `rows`: its "rows" are outputs, numbered through all segments.
    """

    rows: Int[Array, " capacity"]
    entries: Segment


def group_rows(num_rows: int, segments: Sequence[Segment]) -> RowGroups:
    """The looked-up rows of a table of `num_rows`, and which outputs each of them went into."""
    rows, outputs, gains, first = [], [], [], 0
    for segment in segments:
        bag, gain = entry_gains(segment, num_rows)
        rows.append(jnp.where(is_listed(segment, num_rows), as_rows(segment.rows), NO_ROW))
        outputs.append(bag.astype(jnp.int32) + first)
        gains.append(gain)
        first += segment.num_outputs
    all_rows = jnp.concatenate(rows)
    num_entries = all_rows.shape[0]
    capacity = min(num_entries, num_rows)
    order = jnp.argsort(all_rows, stable=True)
    in_order = all_rows[order]
    is_real = in_order != NO_ROW
    is_first = is_real & (in_order != jnp.concatenate([jnp.full(min(num_entries, 1), -1, jnp.int32), in_order[:-1]]))
    place = jnp.where(is_first, jnp.cumsum(is_first) - 1, capacity + 1)
    position = jnp.arange(num_entries, dtype=jnp.int32)
    offsets = jnp.full(capacity + 1, jnp.sum(is_real, dtype=jnp.int32), jnp.int32).at[place].set(position, mode="drop")
    distinct = jnp.full(capacity, NO_ROW, jnp.int32).at[place].set(in_order, mode="drop")
    entries = Segment(jnp.concatenate(outputs)[order], offsets, jnp.concatenate(gains)[order], "sum")
    return RowGroups(distinct, entries)


def row_gradients(
    num_rows: int,
    segments: Sequence[Segment],
    d_outputs: Sequence[Float[Array, "_ dim"]],
    *,
    lookup: Callable[..., Any],
) -> tuple[Int[Array, " capacity"], Float[Array, "capacity dim"]]:
    """As `reference.row_gradients`, through an implementation's `lookup`."""
    groups = group_rows(num_rows, segments)
    (gradients,) = lookup(joined(d_outputs), [groups.entries])
    return groups.rows, gradients


def joined(d_outputs: Sequence[Float[Array, "_ dim"]]) -> Float[Array, "outputs dim"]:
    """The gradients of all segments under each other, float32."""
    parts = [d_output.astype(jnp.float32) for d_output in d_outputs]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

"""Row gradients as a lookup: the gradient of a row is a pooled lookup in the gradients of the outputs.

    forward    output[b]     = sum of gain * table[row]     over the entries of bag b
    backward   gradient[row] = sum of gain * d_output[b]    over the entries of that row

So an accelerator needs one kernel for both. Sorting makes the entries of a row neighbours; the order of additions
follows from the batch alone, so equal inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rsembed.kernels.contract import NO_ROW, OutputGradients, RowsAndGradients, Segment
from rsembed.kernels.reference import as_segments, joined, list_entries


class RowGroups(NamedTuple):
    """Entries sorted by row.

    Attributes:
      rows: distinct rows ascending, `NO_ROW` behind them.
      entries: one bag per place in `rows`: its "rows" are outputs, numbered through all segments.
      d_output: gradients of the outputs.
    """

    rows: Int[Array, " capacity"]
    entries: Segment
    d_output: Float[Array, "outputs dim"]


def group_rows(num_rows: int, gradients: OutputGradients) -> RowGroups:
    """The looked-up rows of a table of `num_rows`, and which outputs each of them went into."""
    segments, d_outputs = as_segments(gradients)
    rows, outputs, gains = list_entries(num_rows, segments)
    num_entries = rows.shape[0]
    capacity = min(num_entries, num_rows)
    order = jnp.argsort(rows, stable=True)
    in_order = rows[order]
    is_real = in_order != NO_ROW
    is_first = is_real & (in_order != jnp.concatenate([jnp.full(min(num_entries, 1), -1, jnp.int32), in_order[:-1]]))
    place = jnp.where(is_first, jnp.cumsum(is_first) - 1, capacity + 1)
    position = jnp.arange(num_entries, dtype=jnp.int32)
    offsets = jnp.full(capacity + 1, jnp.sum(is_real, dtype=jnp.int32), jnp.int32).at[place].set(position, mode="drop")
    distinct = jnp.full(capacity, NO_ROW, jnp.int32).at[place].set(in_order, mode="drop")
    return RowGroups(distinct, Segment(outputs[order], offsets, gains[order], "sum"), joined(d_outputs))


def row_gradients(num_rows: int, gradients: OutputGradients, *, lookup: Callable[..., Any]) -> RowsAndGradients:
    """As `reference.row_gradients`, through an implementation's `lookup`."""
    groups = group_rows(num_rows, gradients)
    (values,) = lookup(groups.d_output, [groups.entries])
    return groups.rows, values

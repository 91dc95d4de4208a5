"""The kernels in plain `jax.numpy`: the definition that every other implementation must match.

Tables may be float32, bfloat16 or float16; sums, gradients, slots and row rules are float32.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, UInt32

from rsembed.kernels.contract import (
    NO_ROW,
    JaggedBatch,
    JaggedGradients,
    KeyOrKeys,
    OutputGradients,
    Outputs,
    RowsAndGradients,
    Segment,
    SegmentGradients,
    Step,
    Table,
    as_rows,
)
from rsembed.kernels.contract import Rounding as Rounding
from rsembed.optimizers.base import Slots

NAME = "reference"


def unavailable_because() -> str | None:
    """None, since plain JAX runs everywhere."""
    return None


def _bag_of_entries(offsets: Int[Array, " bags_plus_1"], ids: Int[Array, " nnz"]) -> Int[Array, " nnz"]:
    """Bag of every entry: -1 before the first bag, the number of bags behind the last."""
    # Counting the bags that start up to an entry takes a third of the time of a search for each.
    return jnp.cumsum(jnp.zeros(ids.shape[0], jnp.int32).at[offsets].add(1, mode="drop")) - 1


def entry_gains(
    segment: Segment, num_rows: int, lookup: Callable[..., PyTree] | None = None
) -> tuple[Int[Array, " nnz"], Float[Array, " nnz"], Bool[Array, " nnz"]]:
    """Output number and gain of every entry, and which entries lie in a bag and name a row of the table.

    Entries that contribute nothing have gain 0. A `lookup` adds weights of a bag in their order, XLA in any.
    """
    num_entries, is_listed = segment.rows.shape[0], (segment.rows >= 0) & (segment.rows < num_rows)
    bag = jnp.arange(num_entries)
    if segment.offsets is not None:
        bag = _bag_of_entries(segment.offsets, segment.rows)
        is_listed = is_listed & (bag >= 0) & (bag < segment.num_outputs)
        bag = jnp.clip(bag, 0, max(segment.num_outputs - 1, 0))
    weights = jnp.float32(1.0) if segment.weights is None else segment.weights.astype(jnp.float32)
    gains = jnp.where(is_listed, weights, 0.0)
    if segment.combiner in ("sum", "none") or segment.num_outputs == 0:
        return bag, gains, is_listed
    if segment.weights is not None:
        gains = gains * _inverse_magnitudes(gains, bag, segment.num_outputs)[bag]
    terms = gains if segment.combiner == "mean" else gains * gains
    if lookup is None or segment.weights is None:
        total = jax.ops.segment_sum(terms, bag, segment.num_outputs)
    else:
        every = Segment(jnp.arange(num_entries, dtype=jnp.int32), segment.offsets, None, "sum")
        total = lookup(terms[:, None], [every])[0][:, 0]
    divisor = total if segment.combiner == "mean" else jnp.sqrt(total)
    safe = jnp.where(divisor == 0.0, 1.0, divisor)
    return bag, gains * jnp.where(divisor == 0.0, 0.0, 1.0 / safe)[bag], is_listed


def _inverse_magnitudes(weights: Float[Array, " nnz"], bag: Int[Array, " nnz"], num_bags: int) -> Float[Array, " bags"]:
    """Power of two for each bag that brings its largest weight near 1.

    Sums and squares of the scaled weights neither overflow nor vanish. A factor that is a power of
    two changes no bit of a mean, in which it cancels.
    """
    largest = jax.ops.segment_max(jnp.abs(jax.lax.stop_gradient(weights)), bag, num_bags)
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
    one_step = 1 << 23  # the lowest bit of a float32's exponent
    exponent = jnp.clip(bits >> 23, 1, 253)  # the reciprocal of 2**127 would not be a normal number
    return jax.lax.bitcast_convert_type((254 - exponent) * one_step, jnp.float32)


def lookup(table: Table, segments: Sequence[Segment]) -> Outputs:
    """Pooled rows of every segment, float32 `[segment.num_outputs, dim]`."""
    outputs = []
    for segment in segments:
        bag, gains, _ = entry_gains(segment, table.shape[0])
        vectors = gather_rows((table,), segment.rows)[0].astype(jnp.float32)
        # A row that must not contribute may hold anything, NaN included: select, do not multiply by zero.
        terms = jnp.where(gains[:, None] == 0.0, 0.0, gains[:, None] * vectors)
        outputs.append(terms if segment.offsets is None else jax.ops.segment_sum(terms, bag, segment.num_outputs))
    return tuple(outputs)


def gradients_of_weights(table: Table, segment: Segment, d_output: Float[Array, "_ dim"]) -> Float[Array, " nnz"]:
    """Gradients of a segment's weights, which must not be None."""

    def pooled(weights: Array) -> Array:
        return lookup(table, [dataclasses.replace(segment, weights=weights)])[0]

    d_weights: Array = jax.vjp(pooled, segment.weights)[1](d_output)[0]
    return d_weights


def group_rows(
    num_rows: int, gradients: OutputGradients, lookup: Callable[..., PyTree] | None = None
) -> tuple[Int[Array, " capacity"], Segment, Int[Array, " nnz"], Float[Array, "outputs dim"]]:
    """The looked-up rows of a table of `num_rows`. With its entries side by side, a row's gradient is a lookup as well.

    forward    output[b]     = sum of gain * table[row]     over the entries of bag b
    backward   gradient[row] = sum of gain * d_output[b]    over the entries of that row

    The order of additions follows from the batch alone, so equal inputs give equal bits.

    Returns: distinct rows ascending, `NO_ROW` behind them; entries sorted by row, one bag per place there, whose "rows"
    are outputs, numbered through all segments, without weights where all are ones; the place of every sorted entry's
    row, behind the last place for entries that count for nothing; and the gradients of the outputs, float32.
    """
    segments, d_outputs = as_segments(gradients)
    all_rows, all_outputs, all_gains, first = [], [], [], 0
    for segment in segments:
        bag, gain, is_listed = entry_gains(segment, num_rows, lookup)
        all_rows.append(jnp.where(is_listed, as_rows(segment.rows), NO_ROW))
        all_outputs.append(bag.astype(jnp.int32) + first)
        all_gains.append(gain)
        first += segment.num_outputs
    rows, outputs, gains = map(jnp.concatenate, (all_rows, all_outputs, all_gains))
    num_entries, capacity = rows.shape[0], min(rows.shape[0], num_rows)
    position = jnp.arange(num_entries, dtype=jnp.int32)
    if all(segment.weights is None and segment.combiner in ("sum", "none") for segment in segments):
        (in_order, outputs), weights = jax.lax.sort_key_val(rows, outputs), None
    else:
        in_order, order = jax.lax.sort_key_val(rows, position)
        outputs, weights = outputs[order], gains[order]
    is_real = in_order != NO_ROW
    is_first = is_real & (in_order != jnp.concatenate([jnp.full(min(num_entries, 1), -1, jnp.int32), in_order[:-1]]))
    group_of = jnp.where(is_real, jnp.cumsum(is_first) - 1, capacity)
    place = jnp.where(is_first, group_of, capacity + 1)
    offsets = jnp.full(capacity + 1, jnp.sum(is_real, dtype=jnp.int32), jnp.int32).at[place].set(position, mode="drop")
    distinct = jnp.full(capacity, NO_ROW, jnp.int32).at[place].set(in_order, mode="drop")
    entries = Segment(outputs, offsets, weights, "sum")
    parts = [d_output.astype(jnp.float32) for d_output in d_outputs]
    return distinct, entries, group_of, parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def row_gradients(
    num_rows: int, gradients: OutputGradients, *, lookup: Callable[..., PyTree] | None = None
) -> RowsAndGradients:
    """Gradient of every looked-up row, equal rows combined; through an accelerator's `lookup` if one is given.

    Returns: distinct rows in ascending order and their float32 gradients; unused places at the end hold row `NO_ROW`
    and zeros. The capacity is the number of entries, or `num_rows` if that is less. A row that was looked up is
    listed even when its gradient is zero.
    """
    rows, entries, group_of, d_output = group_rows(num_rows, gradients)
    if lookup is not None:
        return rows, lookup(d_output, [entries])[0]
    vectors = d_output[entries.rows] if d_output.shape[0] else jnp.zeros((1, d_output.shape[1]))
    terms = vectors if entries.weights is None else entries.weights[:, None] * vectors
    return rows, jax.ops.segment_sum(terms, group_of, rows.shape[0], indices_are_sorted=True)


def squared_norm(
    num_rows: int, gradients: SegmentGradients, *, row_gradients: Callable[..., PyTree] = row_gradients
) -> Float[Array, ""]:
    """Sum of the squares of all row gradients in float32, for callers that need only their norm."""
    return jnp.sum(jnp.square(row_gradients(num_rows, gradients)[1]))


def pair_products(vectors: Float[Array, "batch n dim"]) -> Float[Array, "batch pairs"]:
    """Dot products of the vectors of a sample, float32, in the order of `numpy.triu_indices(n, 1)`."""
    first, second = np.triu_indices(vectors.shape[1], 1)
    return jnp.einsum("bid,bjd->bij", vectors, vectors, precision="highest")[:, first, second]


def pull_pairs(
    vectors: Float[Array, "batch n dim"], d_products: Float[Array, "batch pairs"]
) -> Float[Array, "batch n dim"]:
    """Gradient of the vectors from that of `pair_products`."""
    batch, n, _ = vectors.shape
    half = jnp.zeros((batch, n, n)).at[:, *np.triu_indices(n, 1)].set(d_products)
    return jnp.einsum("bij,bjd->bid", half + half.swapaxes(1, 2), vectors, precision="highest")


def gather_rows(arrays: Sequence[Array], rows: Int[Array, "*places"], missing: int = 0) -> tuple[Array, ...]:
    """Rows `rows` of every array, of any dtype; a row outside reads as `missing` in int32 arrays, zeros in others."""
    places = jnp.where(rows < 0, NO_ROW, rows)
    fillers = [missing if array.dtype == jnp.int32 else 0 for array in arrays]
    return tuple(
        array.at[places].get(mode="fill", fill_value=filler)
        if array.shape[0]
        else jnp.full((*rows.shape, *array.shape[1:]), filler, array.dtype)
        for array, filler in zip(arrays, fillers, strict=True)
    )


def scatter_rows(arrays: Sequence[Array], rows: Int[Array, " capacity"], values: Sequence[Array]) -> tuple[Array, ...]:
    """The arrays with distinct `rows` overwritten; rows outside are skipped."""
    # Distinct places behind the table keep the promise of unique indices for padding as well.
    num_rows = arrays[0].shape[0]
    places = jnp.where((rows >= 0) & (rows < num_rows), rows, num_rows + jnp.arange(rows.shape[0], dtype=rows.dtype))
    return tuple(
        array.at[places].set(new.astype(array.dtype), mode="drop", unique_indices=True)
        for array, new in zip(arrays, values, strict=True)
    )


def apply_rows(
    table: Table,
    slots: Slots,
    rows: Int[Array, " capacity"],
    gradients: Float[Array, "capacity dim"],
    step: Step,
    *,
    gather: Callable[..., PyTree] = gather_rows,
    scatter: Callable[..., PyTree] = scatter_rows,
) -> tuple[Table, Slots]:
    """One optimizer step of distinct `rows`, others with zeros if the rule moves them; rows outside are padding."""
    if step.rule.moves_all_rows:
        (gradients,) = scatter_rows((jnp.zeros(table.shape, jnp.float32),), rows, (gradients,))
        rows, old, old_slots = jnp.arange(table.shape[0], dtype=jnp.int32), table, [*slots]
    else:
        old, *old_slots = gather((table, *slots), rows)
    new, new_slots = step.rule.step_rows(old.astype(jnp.float32), tuple(old_slots), gradients, step.hyper)
    if step.rounding is not None:
        new = step.rounding(new, table.dtype, rows)
    if step.rule.moves_all_rows:
        return new.astype(table.dtype), tuple(own.astype(old.dtype) for own, old in zip(new_slots, slots, strict=True))
    new_table, *stepped_slots = scatter((table, *slots), rows, (new, *new_slots))
    return new_table, tuple(stepped_slots)


def update(table: Table, slots: Slots, gradients: OutputGradients, step: Step) -> tuple[Table, Slots]:
    """Row gradients and one optimizer step per distinct row in one call."""
    return apply_rows(table, slots, *row_gradients(table.shape[0], gradients), step)


def allocate(shape: tuple[int, ...], dtype: DTypeLike, fill: float | None = None) -> Array:
    """An array filled with `fill`; with unspecified values if it is None."""
    return jnp.full(shape, 0 if fill is None else fill, dtype)


def row_bits(
    key: KeyOrKeys,
    lanes: Sequence[UInt32[Array, " nnz"]],
    dim: int,
    table: Int[Array, " nnz"] | None = None,
) -> UInt32[Array, "nnz dim"]:
    """Random bits of rows, each from the key that is folded with the row's lanes, one after the other.

    With `table`, `key` has several, of which it says whose is taken.
    """

    def one_row(key: PRNGKeyArray, *own: Array) -> Array:
        return jax.random.bits(functools.reduce(jax.random.fold_in, own, key), (dim,), jnp.uint32)

    if table is None:
        return jax.vmap(functools.partial(one_row, key))(*lanes)
    return jax.vmap(one_row)(key.at[table].get(mode="clip"), *lanes)


def round_stochastically(
    values: Float[Array, "rows dim"],
    dtype: jnp.dtype,
    rows: Int[Array, " rows"],
    key: KeyOrKeys,
    table: Int[Array, " rows"] | None = None,
) -> Float[Array, "rows dim"]:
    """Rounds float32 `values` up or down to `dtype` by `round_with_noise`.

    The noise depends on the key, the row number and the column alone, not on where in the batch the row stood. With
    `table`, there is a key for each of several.
    """
    if dtype == jnp.float32:
        return values
    return round_with_noise(values, row_bits(key, [rows.astype(jnp.uint32)], values.shape[1], table), dtype)


def round_with_noise(
    values: Float[Array, "*shape"], words: UInt32[Array, "*shape"], dtype: jnp.dtype
) -> Float[Array, "*shape"]:
    """`values` rounded to one of their two neighbours in `dtype`, up if the mantissa carries after adding the noise.

    The mean over all words is the value itself. Infinities, NaN and values above the largest number of `dtype` are
    rounded to nearest.

    Args:
      values: float32.
      words: one random word per value, of which the upper bits are used: 13 for float16, 24 below its normal range, and
        16 for bfloat16.
      dtype: float16 or bfloat16.

    Source: FBGEMM's fused optimizers: noise of the size of the dropped bits, then rounding toward zero. There, float16
      values below 2**-14 lean toward zero, because their noise is smaller than their spacing.
    """
    dropped = {jnp.dtype(jnp.float16): 13, jnp.dtype(jnp.bfloat16): 16}[jnp.dtype(dtype)]
    # Adding to the bits equals adding the noise as a number, except that nothing is flushed to zero on the way.
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32) + (words >> jnp.uint32(32 - dropped))
    rounded = jax.lax.bitcast_convert_type(bits & jnp.uint32((0xFFFFFFFF << dropped) & 0xFFFFFFFF), jnp.float32)
    if dtype == jnp.float16:
        spacing, smallest_normal = 2.0**-24, 2.0**-14
        steps = jnp.abs(values) / spacing
        whole = jnp.floor(steps)
        is_up = (words >> jnp.uint32(8)).astype(jnp.float32) * 2.0**-24 < steps - whole
        subnormal = jnp.copysign((whole + is_up.astype(jnp.float32)) * spacing, values)
        rounded = jnp.where(jnp.abs(values) < smallest_normal, subnormal, rounded)
    # Not `>`: NaN must take the branch of nearest rounding too.
    return jnp.where(jnp.abs(values) <= float(jnp.finfo(dtype).max), rounded, values).astype(dtype)


def lookup_jagged(
    tables: Sequence[Float[Array, "_ _"]], batch: JaggedBatch, *, lookup: Callable[..., PyTree] = lookup
) -> Float[Array, " size"]:
    """Pooled rows of every feature of a table-batched call, flat, through an implementation's `lookup`."""
    size, places = batch.output_places([table.shape[1] for table in tables])
    output = jnp.zeros(size, jnp.float32)
    for number, table in enumerate(tables):
        (vectors,) = lookup(table, [jagged_segment(batch, number)])
        if batch.combiner == "none":
            width = places[0][1]
            output = output + jnp.pad(vectors, ((0, 0), (0, width - table.shape[1]))).reshape(-1)
            continue
        vectors = vectors * _bag_scales(batch, number)[:, None]
        for block, (start, stride) in zip(batch.blocks, places, strict=True):
            if block.table == number:
                own = vectors[block.first_bag : block.first_bag + block.num_bags]
                output = output.at[_vector_places(block.num_bags, table.shape[1], start, stride)].set(own)
    return output


def weight_gradients(
    tables: Sequence[Float[Array, "_ _"]], batch: JaggedBatch, d_output: Float[Array, " size"]
) -> Float[Array, " nnz"]:
    """Gradients of `batch.weights`; 0 for ids that contribute nothing."""
    dims = [table.shape[1] for table in tables]
    total = jnp.zeros(batch.ids.shape[0], jnp.float32)
    for number, table in enumerate(tables):
        ((segment,), (d_bags,)) = as_segments(JaggedGradients(batch, d_output, number, dims))
        bag, gains, _ = entry_gains(dataclasses.replace(segment, weights=None), table.shape[0])
        vectors = gather_rows((table,), segment.rows)[0].astype(jnp.float32)
        products = jnp.sum(vectors * d_bags[bag], axis=-1)
        total = total + jnp.where(gains == 0.0, 0.0, products)
    return total


def jagged_segment(batch: JaggedBatch, table: int) -> Segment:
    """The batch as one segment of `table`; entries of other tables have row `NO_ROW`."""
    num_bags = batch.offsets.shape[0] - 1
    first_row, num_rows = np.zeros(num_bags + 1, np.int32), np.zeros(num_bags + 1, np.int32)
    for block in batch.blocks:
        if block.table == table:
            first_row[block.first_bag : block.first_bag + block.num_bags] = block.first_row
            num_rows[block.first_bag : block.first_bag + block.num_bags] = block.num_rows
    bag = _bag_of_entries(batch.offsets, batch.ids)
    valid = (bag >= 0) & (batch.ids >= 0) & (batch.ids < jnp.asarray(num_rows)[bag])
    rows = jnp.where(valid, batch.ids + jnp.asarray(first_row)[bag], NO_ROW)
    per_entry = batch.combiner == "none"
    return Segment(rows, None if per_entry else batch.offsets, batch.weights, "none" if per_entry else "sum")


def _bag_scales(batch: JaggedBatch, table: int) -> Float[Array, " bags"]:
    if batch.combiner != "mean":
        return jnp.ones(batch.offsets.shape[0] - 1, jnp.float32)
    segment = jagged_segment(batch, table)
    bag, ones, _ = entry_gains(dataclasses.replace(segment, weights=None), NO_ROW)
    counts = jax.ops.segment_sum(ones, bag, segment.num_outputs)
    return jnp.where(counts > 0, 1.0 / jnp.maximum(counts, 1.0), 0.0)


def as_segments(gradients: OutputGradients) -> SegmentGradients:
    """Gradients in the form of segments; a table-batched call becomes one segment that holds all bags.

    Bags of other tables have zeros.
    """
    if isinstance(gradients, SegmentGradients):
        return gradients
    batch, d_output, table, dims = gradients
    segment, d_output, dim = jagged_segment(batch, table), d_output.astype(jnp.float32), dims[table]
    if batch.combiner == "none":
        return SegmentGradients((segment,), (d_output.reshape(batch.ids.shape[0], -1)[:, :dim],))
    d_bags = jnp.zeros((batch.offsets.shape[0] - 1, dim), jnp.float32)
    for block, (start, stride) in zip(batch.blocks, batch.output_places(dims)[1], strict=True):
        if block.table == table:
            own = d_output[_vector_places(block.num_bags, dim, start, stride)]
            d_bags = d_bags.at[block.first_bag : block.first_bag + block.num_bags].set(own)
    return SegmentGradients((segment,), (d_bags * _bag_scales(batch, table)[:, None],))


def _vector_places(num_vectors: int, dim: int, start: int, stride: int) -> np.ndarray:
    return start + stride * np.arange(num_vectors)[:, None] + np.arange(dim)

"""The kernels in plain `jax.numpy`: the definition that every other implementation must match.

Tables may be float32, bfloat16 or float16; sums, gradients, slots and row rules are float32.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, Shaped, UInt32

from rsembed.kernels.contract import (
    NO_ROW,
    Call,
    CallGradients,
    Combiner,
    IdList,
    KeyOrKeys,
    Outputs,
    RowsAndGradients,
    Segment,
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


class Entries(NamedTuple):
    """The entries of one list that read one table, with their bags: what implementations pool.

    Args:
      rows: table row of every entry. A row outside `[0, num_rows)` contributes nothing.
      offsets: entries `offsets[b] : offsets[b + 1]` belong to bag `b`. None: every entry is a bag.
      weights: weight of every entry; None means ones.
      combiner: `sum`, `mean` or `sqrtn`.
    """

    rows: Int[Array, " nnz"]
    offsets: Int[Array, " bags_plus_1"] | None
    weights: Float[Array, " nnz"] | None
    combiner: Combiner = "sum"

    @property
    def num_outputs(self) -> Any:
        """Number of bags, or of entries where every entry is a bag; a symbol in an export for any batch."""
        return self.rows.shape[0] if self.offsets is None else self.offsets.shape[0] - 1


def entries_of(
    call: Call, number: int, table: int, table_rows: int, pool: Callable[..., PyTree] | None = None
) -> Entries:
    """The entries of list `number` that read rows of table `table`; others read `NO_ROW`.

    The bags of the result are those of the list. Combiners that `Entries` has not become weights; see
    `entry_gains` for `pool`.
    """
    ids = call.lists[number]
    segments = [own for own in call.segments if (own.list, own.table) == (number, table)]
    combiners = {own.combiner for own in segments}
    if len(combiners) > 1 and "none" in combiners:
        raise ValueError("segments without a combiner share no list with others.")
    rows = rows_of_list(call, number, table, table_rows)
    if combiners == {"none"}:
        if ids.offsets is not None:
            bag = bag_of_entries(ids)
            rows = jnp.where((bag >= 0) & (bag < ids.num_bags), rows, NO_ROW)
        return Entries(rows, None, ids.weights)
    is_single = ids.shape is not None and ids.shape[1] == 1
    offsets = None if is_single else ids.all_offsets()
    if len(combiners) == 1:
        (combiner,) = combiners
        if combiner == "mean_by_count" and ids.weights is None:
            combiner = "mean"
        if combiner != "mean_by_count" and not (is_single and combiner != "sum"):
            return Entries(rows, offsets, ids.weights, combiner)
    offsets = ids.all_offsets()
    gains: Array | None = None
    for combiner in sorted(combiners):
        shares = _shares(Entries(rows, offsets, ids.weights), combiner, table_rows, pool)
        if gains is None:
            gains = shares
            continue
        chosen = [own.combiner == combiner for own in segments]
        gains = jnp.where(by_bag(ids, segments, chosen, False), shares, gains)
    return Entries(rows, None if is_single else offsets, gains)


def rows_of_list(call: Call, number: int, table: int, table_rows: int) -> Int[Array, " nnz"]:
    """Row of table `table` that each entry of list `number` reads; none of the table for entries that read none."""
    ids = call.lists[number]
    segments = [own for own in call.segments if (own.list, own.table) == (number, table)]
    is_whole = sum(own.num_bags for own in segments) == ids.num_bags
    bounds = {(own.first_row, own.rows_in(table_rows)) for own in segments}
    rows = as_rows(ids.ids)
    if is_whole and bounds == {(0, table_rows)}:
        return rows
    first_rows = by_bag(ids, segments, [own.first_row for own in segments], 0)
    num_rows = by_bag(ids, segments, [own.rows_in(table_rows) for own in segments], 0)
    return jnp.where((rows >= 0) & (rows < num_rows), rows + first_rows, NO_ROW)


def _shares(
    entries: Entries, combiner: Combiner, num_rows: int, pool: Callable[..., PyTree] | None
) -> Float[Array, " nnz"]:
    """Gain of every entry under a combiner."""
    if combiner != "mean_by_count":
        return entry_gains(entries._replace(combiner=combiner), num_rows, pool)[1]
    shares = entry_gains(entries._replace(weights=None, combiner="mean"), num_rows)[1]
    return shares if entries.weights is None else shares * entries.weights


def by_bag(ids: IdList, segments: Sequence[Segment], values: Sequence[Any], other: Any) -> Array:
    """Value of each entry's segment, `other` for entries of no segment; one number where all agree."""
    numbers = np.full(ids.num_bags + 1, other)
    for segment, value in zip(segments, values, strict=True):
        numbers[segment.first_bag : segment.first_bag + segment.num_bags] = value
    dtype = jnp.bool_ if numbers.dtype == np.bool_ else jnp.int32
    if ids.num_bags and ids.offsets is None and (numbers[:-1] == numbers[0]).all():
        return jnp.asarray(numbers[0], dtype)
    bag = bag_of_entries(ids)
    # The last number is that of entries outside all bags, for which `bag` is -1 or the number of bags.
    return jnp.asarray(numbers, dtype)[bag]


def bag_of_entries(ids: IdList) -> Int[Array, " nnz"]:
    """Bag of every entry: -1 before the first bag, the number of bags after the last."""
    if ids.offsets is not None:
        return _bag_of_entries(ids.offsets, ids.num_entries)
    return jnp.arange(ids.num_entries, dtype=jnp.int32) // max(ids.array_shape[1], 1)


def _bag_of_entries(offsets: Int[Array, " bags_plus_1"], num_entries: Any) -> Int[Array, " nnz"]:
    # `num_entries` is a symbol in an export for any batch. Counting the bags that start up to an
    # entry takes a third of the time of a search for each.
    return jnp.cumsum(jnp.zeros(num_entries, jnp.int32).at[offsets].add(1, mode="drop")) - 1


def entry_gains(
    entries: Entries, num_rows: int, pool: Callable[..., PyTree] | None = None
) -> tuple[Int[Array, " nnz"], Float[Array, " nnz"], Bool[Array, " nnz"]]:
    """Output number and gain of every entry, and which entries are in a bag and name a row of the table.

    Entries that contribute nothing have gain 0. A `pool` adds weights of a bag in their order, XLA in
    any order.
    """
    num_entries = entries.rows.shape[0]
    is_listed = (entries.rows >= 0) & (entries.rows < num_rows)
    bag = jnp.arange(num_entries)
    if entries.offsets is not None:
        bag = _bag_of_entries(entries.offsets, num_entries)
        is_listed = is_listed & (bag >= 0) & (bag < entries.num_outputs)
        bag = jnp.clip(bag, 0, max(entries.num_outputs - 1, 0))
    weights = jnp.float32(1.0)
    if entries.weights is not None:
        weights = entries.weights.astype(jnp.float32)
    gains = jnp.where(is_listed, weights, 0.0)
    if entries.combiner in ("sum", "none") or entries.num_outputs == 0:
        return bag, gains, is_listed
    if entries.weights is not None:
        gains = gains * _inverse_magnitudes(gains, bag, entries.num_outputs)[bag]
        # Else XLA may square the factors by themselves, which leaves the range of float32.
        gains = jax.lax.optimization_barrier(gains)
    terms = gains if entries.combiner == "mean" else gains * gains
    if pool is None or entries.weights is None:
        total = jax.ops.segment_sum(terms, bag, entries.num_outputs)
    else:
        every = Entries(jnp.arange(num_entries, dtype=jnp.int32), entries.offsets, None)
        total = pool(terms[:, None], every)[:, 0]
    is_zero = total == 0.0
    divisor = jnp.where(is_zero, 1.0, total)  # before the root, which has no slope at zero
    if entries.combiner == "sqrtn":
        divisor = jnp.sqrt(divisor)
    return bag, gains * jnp.where(is_zero, 0.0, 1.0 / divisor)[bag], is_listed


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


def pooled(table: Table, entries: Entries) -> Float[Array, "outputs dim"]:
    """Pooled rows of every bag, float32."""
    bag, gains, _ = entry_gains(entries, table.shape[0])
    vectors = gather_rows((table,), entries.rows)[0].astype(jnp.float32)
    # A row that must not contribute may hold anything, NaN included: select, do not multiply by zero.
    terms = jnp.where(gains[:, None] == 0.0, 0.0, gains[:, None] * vectors)
    if entries.offsets is None:
        return terms
    return jax.ops.segment_sum(terms, bag, entries.num_outputs)


def _pooled_with_slopes(table: Table, entries: Entries) -> Float[Array, "outputs dim"]:
    """As `pooled`, for the gradients of weights: also a weight of zero has a slope, which the row says."""
    bag, gains, is_listed = entry_gains(entries, table.shape[0])
    vectors = gather_rows((table,), entries.rows)[0].astype(jnp.float32)
    is_read = is_listed[:, None] & ((gains[:, None] != 0.0) | jnp.isfinite(vectors))
    terms = gains[:, None] * jnp.where(is_read, vectors, 0.0)
    if entries.offsets is None:
        return terms
    return jax.ops.segment_sum(terms, bag, entries.num_outputs)


def lookup(tables: Sequence[Float[Array, "_ _"]], call: Call, *, pool: Callable[..., PyTree] | None = None) -> Outputs:
    """Pooled rows of every segment, float32, laid out as the call says; through an accelerator's `pool` if given."""
    vectors: list[Array] = [jnp.zeros(0)] * len(call.segments)
    for number, ids in enumerate(call.lists):
        for table in sorted({own.table for own in call.segments if own.list == number}):
            entries = entries_of(call, number, table, tables[table].shape[0], pool)
            of_list = (pool or pooled)(tables[table], entries)
            for place, segment in enumerate(call.segments):
                if (segment.list, segment.table) != (number, table):
                    continue
                last_bag = segment.first_bag + segment.num_bags
                if segment.combiner == "none":
                    is_whole = segment.num_bags == ids.num_bags
                    vectors[place] = of_list if is_whole else _of_bags(of_list, ids, segment)
                else:
                    vectors[place] = of_list[segment.first_bag : last_bag]
    return _joined(vectors, call, [table.shape[1] for table in tables])


def _of_bags(vectors: Float[Array, "nnz dim"], ids: IdList, segment: Segment) -> Float[Array, "nnz dim"]:
    """Vectors of the entries of a segment's bags; zeros for other entries."""
    bag = bag_of_entries(ids)
    is_own = (bag >= segment.first_bag) & (bag < segment.first_bag + segment.num_bags)
    return jnp.where(is_own[:, None], vectors, 0.0)


def _joined(vectors: Sequence[Array], call: Call, dims: Sequence[int]) -> Outputs:
    """The outputs of a call from the vectors of each segment."""
    if call.layout == "each":
        return tuple(vectors)
    if call.segments[0].combiner == "none":
        longest = max(dims[own.table] for own in call.segments)
        padded = [jnp.pad(own, ((0, 0), (0, longest - own.shape[1]))) for own in vectors]
        return (sum(padded[1:], start=padded[0]),)
    if call.layout == "columns":
        return (jnp.concatenate(vectors, axis=1),)
    return (jnp.concatenate([own.reshape(-1) for own in vectors]),)


def bag_gradients(gradients: CallGradients, number: int) -> Float[Array, "outputs dim"]:
    """Gradients of the outputs of list `number`, one row per bag, or per entry with combiner `none`.

    Bags that read other tables have zeros.
    """
    call, dim = gradients.call, gradients.dim
    ids = call.lists[number]
    shapes, places = call.outputs(gradients.dims)
    parts: list[tuple[Segment, Array]] = []
    for segment, place in zip(call.segments, places, strict=True):
        if (segment.list, segment.table) != (number, gradients.table):
            continue
        d_output = gradients.d_outputs[place.output].astype(jnp.float32)
        if len(shapes[place.output]) == 1:
            part = d_output.reshape(-1)[place.start : place.start + segment.num_bags * dim].reshape(-1, dim)
        else:
            columns = d_output.reshape(shapes[place.output])
            part = columns[:, place.start : place.start + dim] if columns.shape[1] != dim else columns
        parts.append((segment, part))
    if len(parts) == 1 and (parts[0][0].num_bags == ids.num_bags or parts[0][0].combiner == "none"):
        return parts[0][1]
    if parts[0][0].combiner == "none":
        masked = [_of_bags(part, ids, segment) for segment, part in parts]
        return masked[0] if call.layout != "each" and len(masked) == 1 else sum(masked[1:], start=masked[0])
    d_bags = jnp.zeros((ids.num_bags, dim), jnp.float32)
    for segment, part in parts:
        d_bags = d_bags.at[segment.first_bag : segment.first_bag + segment.num_bags].set(part)
    return d_bags


def weight_gradients(
    tables: Sequence[Float[Array, "_ _"]], call: Call, d_outputs: Outputs
) -> tuple[Float[Array, " nnz"] | None, ...]:
    """Gradients of the weights of each list, None for lists without; 0 for ids that contribute nothing."""

    def outputs(weights: Sequence[PyTree]) -> Outputs:
        lists = [dataclasses.replace(own, weights=w) for own, w in zip(call.lists, weights, strict=True)]
        return lookup(tables, dataclasses.replace(call, lists=tuple(lists)), pool=_pooled_with_slopes)

    shapes, _ = call.outputs([table.shape[1] for table in tables])
    d_outputs = tuple(d.astype(jnp.float32).reshape(shape) for d, shape in zip(d_outputs, shapes, strict=True))
    d_weights: tuple[Array | None, ...] = jax.vjp(outputs, [own.weights for own in call.lists])[1](d_outputs)[0]
    return tuple(d_weights)


def group_rows(
    num_rows: int, gradients: CallGradients, pool: Callable[..., PyTree] | None = None
) -> tuple[Int[Array, " capacity"], Entries, Int[Array, " nnz"], Float[Array, "outputs dim"]]:
    """The looked-up rows of a table of `num_rows`. With its entries side by side, a row's gradient is a lookup as well.

    forward    output[b]     = sum of gain * table[row]     over the entries of bag b
    backward   gradient[row] = sum of gain * d_output[b]    over the entries of that row

    The order of additions follows from the batch alone, so equal inputs give equal bits.

    Returns: distinct rows ascending, followed by `NO_ROW`; entries sorted by row, one bag per place there, whose "rows"
    are outputs, numbered through all lists, without weights where all are ones; the place of every sorted entry's
    row, after the last place for entries that count for nothing; and the gradients of the outputs, float32.
    """
    # The empty arrays are the entries of a table that no segment reads.
    all_rows = [jnp.zeros(0, jnp.int32)]
    all_outputs = [jnp.zeros(0, jnp.int32)]
    all_gains = [jnp.zeros(0, jnp.float32)]
    parts = []
    first = 0
    is_plain = True
    for number in gradients.lists_read():
        entries = entries_of(gradients.call, number, gradients.table, num_rows, pool)
        bag, gain, is_listed = entry_gains(entries, num_rows, pool)
        all_rows.append(jnp.where(is_listed, as_rows(entries.rows), NO_ROW))
        all_outputs.append(bag.astype(jnp.int32) + first)
        all_gains.append(gain)
        parts.append(bag_gradients(gradients, number))
        first += entries.num_outputs
        is_plain = is_plain and entries.weights is None and entries.combiner in ("sum", "none")
    rows, outputs, gains = map(jnp.concatenate, (all_rows, all_outputs, all_gains))
    num_entries, capacity = rows.shape[0], min(rows.shape[0], num_rows)
    position = jnp.arange(num_entries, dtype=jnp.int32)
    if is_plain:
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
    sorted_entries = Entries(outputs, offsets, weights)
    if not parts:
        parts = [jnp.zeros((0, gradients.dim), jnp.float32)]
    return distinct, sorted_entries, group_of, parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def row_gradients(
    num_rows: int, gradients: CallGradients, *, pool: Callable[..., PyTree] | None = None
) -> RowsAndGradients:
    """Gradient of every looked-up row, equal rows combined; through an accelerator's `pool` if one is given.

    Returns: distinct rows in ascending order and their float32 gradients; unused places at the end hold row `NO_ROW`
    and zeros. The capacity is the number of entries, or `num_rows` if that is less. A row that was looked up is
    listed even when its gradient is zero.
    """
    rows, entries, group_of, d_output = group_rows(num_rows, gradients)
    if pool is not None:
        return rows, pool(d_output, entries)
    vectors = d_output[entries.rows] if d_output.shape[0] else jnp.zeros((1, d_output.shape[1]))
    terms = vectors if entries.weights is None else entries.weights[:, None] * vectors
    return rows, jax.ops.segment_sum(terms, group_of, rows.shape[0], indices_are_sorted=True)


def squared_norm(
    num_rows: int, gradients: CallGradients, *, row_gradients: Callable[..., PyTree] = row_gradients
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


def update(table: Table, slots: Slots, gradients: CallGradients, step: Step) -> tuple[Table, Slots]:
    """Row gradients and one optimizer step per distinct row in one call."""
    return apply_rows(table, slots, *row_gradients(table.shape[0], gradients), step)


def allocate(shape: tuple[int, ...], dtype: DTypeLike, fill: float | None = None) -> Shaped[Array, "*shape"]:
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

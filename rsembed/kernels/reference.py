"""The kernels in plain `jax.numpy`, which define the results of all implementations.

Tables are float32, bfloat16 or float16. Pooling, gradients and optimizer steps are computed in
float32.
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
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped, UInt32

from rsembed.kernels.contract import (
    NO_ROW,
    Call,
    CallGradients,
    Combiner,
    IdList,
    KeyOrKeys,
    Outputs,
    Rounding as Rounding,
    RowsAndGradients,
    Segment,
    Step,
    Table,
    WeightGradients,
    as_rows,
    int32_range,
    is_between,
)
from rsembed.optimizers.base import Slots

NAME = "reference"
# Number of mantissa bits of a float32 that a narrower dtype drops.
_NUM_DROPPED_BITS = {
    jnp.dtype(jnp.float16): 13,
    jnp.dtype(jnp.bfloat16): 16,
}


def unavailable_because() -> str | None:
    """Always None, because plain JAX runs everywhere."""
    return None


class Entries(NamedTuple):
    """Entries of one list that read one table, with their bags: the input of a pooling kernel.

    Args:
      rows: row of every entry in the table. A row number outside the table contributes nothing.
      offsets: entries `offsets[b] : offsets[b + 1]` belong to bag `b`. None: every entry is a bag.
      weights: weight of every entry. None: all weights are 1.
      combiner: `sum`, `mean` or `sqrtn`.
      bags: bag of every entry, if it is known already. None, the default: a kernel that needs the
        bags computes them from the offsets.
    """

    rows: Int[Array, " nnz"]
    offsets: Int[Array, " bags_plus_1"] | None
    weights: Float[Array, " nnz"] | None
    combiner: Combiner = "sum"
    bags: Int[Array, " nnz"] | None = None

    @property
    def num_outputs(self) -> Any:
        """Number of bags: an integer, or a symbolic dimension in an export for any batch size."""
        if self.offsets is None:
            return self.rows.shape[0]
        return self.offsets.shape[0] - 1


Pool = Callable[[Table, Entries], Array]
"""Kernel `(table, entries) -> pooled rows of every bag`."""


def entries_of(
    call: Call,
    number: int,
    table: int,
    table_rows: int,
    pool: Pool | None = None,
) -> Entries:
    """Entries of list `number` that read table `table`, with the bags of the list.

    Entries that read a different table have row `NO_ROW`. If `Entries` cannot represent the
    combiners of the segments, the result has combiner `sum`, and each weight is already divided by
    the divisor of its bag.

    Args:
      call: call that contains the list.
      number: index of the list in the call.
      table: index of the table in the call.
      table_rows: number of rows of the table.
      pool: kernel that sums the weights of each bag in the order of the entries, see `entry_gains`.
        None, the default: XLA sums the weights of each bag in an unspecified order.

    Raises: ValueError: some segments of the list have combiner `none`, and others do not.
    """
    ids = call.lists[number]
    segments = _segments_of(call, number, table)
    combiners = {segment.combiner for segment in segments}
    if len(combiners) > 1 and "none" in combiners:
        raise ValueError("segments without a combiner share no list with others.")
    rows = rows_of_list(call, number, table, table_rows)
    if combiners == {"none"}:
        if ids.offsets is not None:
            bag = bag_of_entries(ids)
            is_in_bag = is_between(bag, 0, ids.num_bags)
            rows = jnp.where(is_in_bag, rows, NO_ROW)
        return Entries(rows, None, ids.weights)
    offsets = None
    if ids.shape is None or ids.shape[1] != 1:
        offsets = ids.all_offsets()
    in_bags = Entries(rows, offsets, ids.weights)
    if len(combiners) == 1:
        (combiner,) = combiners
        if combiner == "mean_by_count" and ids.weights is None:
            combiner = "mean"
        if combiner != "mean_by_count":
            return in_bags._replace(combiner=combiner)
    gains: Array | None = None
    for combiner in sorted(combiners):
        shares = _shares(in_bags, combiner, table_rows, pool)
        if gains is None:
            gains = shares
            continue
        chosen = [segment.combiner == combiner for segment in segments]
        gains = jnp.where(by_bag(ids, segments, chosen, False), shares, gains)
    return in_bags._replace(weights=gains)


def _segments_of(
    call: Call,
    number: int,
    table: int,
) -> list[Segment]:
    """Segments of `call` that read list `number` and table `table`."""
    readers = []
    for segment in call.segments:
        if segment.list == number and segment.table == table:
            readers.append(segment)
    return readers


def rows_of_list(
    call: Call,
    number: int,
    table: int,
    table_rows: int,
) -> Int[Array, " nnz"]:
    """Row of table `table` that each entry of list `number` reads.

    If an entry reads no row of table `table`, its row number is outside `[0, table_rows)`.
    """
    ids = call.lists[number]
    segments = _segments_of(call, number, table)
    num_bags = 0
    starts = []
    sizes = []
    for segment in segments:
        num_bags += segment.num_bags
        starts.append(segment.first_row)
        sizes.append(segment.rows_in(table_rows))
    rows = as_rows(ids.ids)
    reads_all_bags = num_bags == ids.num_bags
    reads_all_rows = set(starts) == {0} and set(sizes) == {table_rows}
    if reads_all_bags and reads_all_rows:
        return rows
    first_rows = by_bag(ids, segments, starts, 0)
    num_rows = by_bag(ids, segments, sizes, 0)
    is_valid = is_between(rows, 0, num_rows)
    return jnp.where(is_valid, rows + first_rows, NO_ROW)


def _shares(
    entries: Entries,
    combiner: Combiner,
    num_rows: int,
    pool: Pool | None,
) -> Float[Array, " nnz"]:
    """Gain of every entry if every bag is pooled with `combiner`."""
    if combiner != "mean_by_count":
        combined = entries._replace(combiner=combiner)
        _, shares, _ = entry_gains(combined, num_rows, pool)
        return shares
    unweighted = entries._replace(weights=None, combiner="mean")
    _, shares, _ = entry_gains(unweighted, num_rows)
    if entries.weights is None:
        return shares
    return shares * entries.weights


def by_bag(
    ids: IdList,
    segments: Sequence[Segment],
    values: Sequence[object],
    other: object,
) -> Array:
    """For each entry, the item of `values` for its segment, or `other` if no segment has the entry.

    The result is a scalar if all bags have the same value and the same length.
    """
    numbers = np.full(ids.num_bags + 1, other)
    for segment, value in zip(segments, values, strict=True):
        numbers[segment.bags] = value
    dtype = jnp.bool_ if numbers.dtype == np.bool_ else jnp.int32
    if ids.num_bags and ids.offsets is None:
        are_equal = numbers[:-1] == numbers[0]
        if are_equal.all():
            return jnp.asarray(numbers[0], dtype)
    bag = bag_of_entries(ids)
    # An entry outside all bags has bag -1 or `num_bags`. In `numbers`, both -1 and `num_bags` are
    # indices of the last number, which is `other`.
    return jnp.asarray(numbers, dtype)[bag]


def bag_of_entries(ids: IdList) -> Int[Array, " nnz"]:
    """Bag of every entry: -1 for entries before the first bag, `num_bags` after the last bag."""
    if ids.offsets is not None:
        return _bag_of_entries(ids.offsets, ids.num_entries)
    positions = int32_range(ids.num_entries)
    _, width = ids.array_shape
    return positions // max(width, 1)


def _bag_of_entries(
    offsets: Int[Array, " bags_plus_1"],
    num_entries: Any,
) -> Int[Array, " nnz"]:
    # Counting the bags that start at or before each entry takes a third of the time of a binary
    # search for each entry. In an export for any batch size, `num_entries` is a symbolic dimension,
    # not an integer.
    num_starts = jnp.zeros(num_entries, jnp.int32)
    num_starts = num_starts.at[offsets].add(1, mode="drop")
    return jnp.cumsum(num_starts) - 1


def entry_gains(
    entries: Entries,
    num_rows: int,
    pool: Pool | None = None,
) -> tuple[Int[Array, " nnz"], Float[Array, " nnz"], Bool[Array, " nnz"]]:
    """Bag and gain of every entry, and whether the entry is in a bag and has a valid row.

    The gain of an entry is the factor of its row in the pooled sum, 0 if the entry contributes
    nothing.

    Args:
      entries: entries with their bags and combiner.
      num_rows: number of rows of the table.
      pool: kernel that sums the weights of each bag in the order of the entries. None, the default:
        XLA sums the weights of each bag in an unspecified order.
    """
    num_entries = entries.rows.shape[0]
    is_listed = is_between(entries.rows, 0, num_rows)
    bag = jnp.arange(num_entries)
    if entries.offsets is not None:
        bag = _bag_of_entries(entries.offsets, num_entries)
        is_listed = is_listed & is_between(bag, 0, entries.num_outputs)
        last_bag = max(entries.num_outputs - 1, 0)
        bag = jnp.clip(bag, 0, last_bag)
    weights = jnp.float32(1.0)
    if entries.weights is not None:
        weights = entries.weights.astype(jnp.float32)
    gains = jnp.where(is_listed, weights, 0.0)
    is_divided = entries.combiner not in ("sum", "none")
    if not is_divided or entries.num_outputs == 0:
        return bag, gains, is_listed
    if entries.weights is not None:
        scales = _inverse_magnitudes(gains, bag, entries.num_outputs)
        gains = gains * scales[bag]
        # Without the optimization barrier, XLA may square weights and scales separately and
        # overflow float32.
        gains = jax.lax.optimization_barrier(gains)
    terms = gains
    if entries.combiner != "mean":
        terms = gains * gains
    if pool is None or entries.weights is None:
        total = jax.ops.segment_sum(terms, bag, entries.num_outputs)
    else:
        positions = int32_range(num_entries)
        all_terms = Entries(positions, entries.offsets, None)
        total = pool(terms[:, None], all_terms)[:, 0]
    is_zero = total == 0.0
    # The square root has no derivative at zero, so zeros are replaced before the root is taken.
    divisor = jnp.where(is_zero, 1.0, total)
    if entries.combiner == "sqrtn":
        divisor = jnp.sqrt(divisor)
    factors = jnp.where(is_zero, 0.0, 1.0 / divisor)
    return bag, gains * factors[bag], is_listed


def _inverse_magnitudes(
    weights: Float[Array, " nnz"],
    bag: Int[Array, " nnz"],
    num_bags: int,
) -> Float[Array, " bags"]:
    """For each bag, the power of two that scales the largest weight of the bag to about 1.

    Sums and squares of the scaled weights neither overflow nor underflow. The scale of a bag does
    not change its `mean` or `sqrtn`, and scaling by a power of two does not round.
    """
    magnitudes = jnp.abs(jax.lax.stop_gradient(weights))
    largest = jax.ops.segment_max(magnitudes, bag, num_bags)
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
    # The exponent of a float32 begins at bit 23. The exponent is at most that of 2**126, because
    # the reciprocal of 2**127 is subnormal.
    exponent = jnp.clip(bits >> 23, 1, 253)
    inverse_bits = (254 - exponent) * (1 << 23)
    return jax.lax.bitcast_convert_type(inverse_bits, jnp.float32)


def pooled(
    table: Table,
    entries: Entries,
    *,
    reads_zero_gains: bool = False,
) -> Float[Array, "outputs dim"]:
    """Pooled rows of every bag, float32.

    Args:
      table: table to read.
      entries: rows, bags and weights of the entries.
      reads_zero_gains: whether finite rows with gain 0 are read. They do not change the result, but
        the derivative with respect to a weight is the row, even if the weight is 0. False, the
        default: rows with gain 0 are not read.
    """
    bag, gains, is_listed = entry_gains(entries, table.shape[0])
    (rows,) = gather_rows((table,), entries.rows)
    vectors = rows.astype(jnp.float32)
    gains = gains[:, None]
    is_read = gains != 0.0
    if reads_zero_gains:
        is_read = is_listed[:, None] & (is_read | jnp.isfinite(vectors))
    # A row with gain 0 may hold NaN, and NaN times zero is NaN.
    terms = gains * jnp.where(is_read, vectors, 0.0)
    if entries.offsets is None:
        return terms
    return jax.ops.segment_sum(terms, bag, entries.num_outputs)


def lookup(
    tables: Sequence[Float[Array, "_ _"]],
    call: Call,
    *,
    pool: Pool | None = None,
) -> Outputs:
    """Pooled rows of every segment, float32, in the call's layout.

    Args:
      tables: tables that the call's segments read.
      call: lists of ids and the segments that read them.
      pool: kernel that pools the entries of one list. None, the default: `pooled`.
    """
    pool_list = pooled if pool is None else pool
    vectors_of: dict[tuple[int, int], Array] = {}
    vectors = []
    for segment in call.segments:
        list_and_table = (segment.list, segment.table)
        if list_and_table not in vectors_of:
            table = tables[segment.table]
            entries = entries_of(call, *list_and_table, table.shape[0], pool)
            vectors_of[list_and_table] = pool_list(table, entries)
        of_list = vectors_of[list_and_table]
        if segment.combiner == "none":
            vectors.append(_of_bags(of_list, call.lists[segment.list], segment))
        else:
            vectors.append(of_list[segment.bags])
    return _joined(vectors, call)


def _of_bags(
    vectors: Float[Array, "nnz dim"],
    ids: IdList,
    segment: Segment,
) -> Float[Array, "nnz dim"]:
    """Vectors of the entries in a segment's bags, and zeros for all other entries.

    If the segment has all bags of the list, entries that are in no bag keep their vectors.
    """
    if segment.num_bags == ids.num_bags:
        return vectors
    bag = bag_of_entries(ids)
    bags = segment.bags
    is_inside = is_between(bag, bags.start, bags.stop)
    return jnp.where(is_inside[:, None], vectors, 0.0)


def _joined(vectors: Sequence[Array], call: Call) -> Outputs:
    """Arranges the vectors of each segment as the outputs of a call, in the layout of the call."""
    if call.layout == "each":
        return tuple(vectors)
    if call.segments[0].combiner == "none":
        longest = max(part.shape[1] for part in vectors)
        padded = []
        for part in vectors:
            missing = longest - part.shape[1]
            padding = ((0, 0), (0, missing))
            padded.append(jnp.pad(part, padding))
        return (functools.reduce(jnp.add, padded),)
    if call.layout == "columns":
        return (jnp.concatenate(vectors, axis=1),)
    flat = [part.reshape(-1) for part in vectors]
    return (jnp.concatenate(flat),)


def bag_gradients(gradients: CallGradients, number: int) -> Float[Array, "outputs dim"]:
    """Gradients of the outputs of list `number`: one row per bag, or per entry without combiner.

    The gradient is zero for a bag if only segments of other tables read it.
    """
    call = gradients.call
    dim = gradients.dim
    ids = call.lists[number]
    shapes, output_places = call.outputs(gradients.dims)
    parts: list[tuple[Segment, Array]] = []
    for segment, place in zip(call.segments, output_places, strict=True):
        if (segment.list, segment.table) != (number, gradients.table):
            continue
        d_output = gradients.d_outputs[place.output].astype(jnp.float32)
        shape = shapes[place.output]
        if len(shape) == 1:
            stop = place.start + segment.num_bags * dim
            part = d_output.reshape(-1)[place.start : stop]
            part = part.reshape(-1, dim)
        else:
            part = d_output.reshape(shape)
            if part.shape[1] != dim:
                part = part[:, place.start : place.start + dim]
        parts.append((segment, part))
    first, d_first = parts[0]
    has_no_combiner = first.combiner == "none"
    if len(parts) == 1 and (has_no_combiner or first.num_bags == ids.num_bags):
        return d_first
    if has_no_combiner:
        d_entries = [_of_bags(part, ids, segment) for segment, part in parts]
        return functools.reduce(jnp.add, d_entries)
    d_bags = jnp.zeros((ids.num_bags, dim), jnp.float32)
    for segment, part in parts:
        d_bags = d_bags.at[segment.bags].set(part)
    return d_bags


def weight_gradients(
    tables: Sequence[Float[Array, "_ _"]],
    call: Call,
    d_outputs: Outputs,
) -> WeightGradients:
    """Gradient of each list's weights, None for a list without weights.

    The gradient is 0 for an id that contributes nothing.
    """
    pool = functools.partial(pooled, reads_zero_gains=True)

    def outputs(weights: Sequence[Array | None]) -> Outputs:
        lists = []
        for ids, list_weights in zip(call.lists, weights, strict=True):
            lists.append(dataclasses.replace(ids, weights=list_weights))
        weighted = dataclasses.replace(call, lists=tuple(lists))
        return lookup(tables, weighted, pool=pool)

    dims = [table.shape[1] for table in tables]
    shapes, _ = call.outputs(dims)
    shaped = []
    for d_output, shape in zip(d_outputs, shapes, strict=True):
        d_output = d_output.astype(jnp.float32)
        shaped.append(d_output.reshape(shape))
    all_weights = [ids.weights for ids in call.lists]
    _, pull = jax.vjp(outputs, all_weights)
    (d_weights,) = pull(tuple(shaped))
    return tuple(d_weights)


def group_rows(
    num_rows: int,
    gradients: CallGradients,
    pool: Pool | None = None,
) -> tuple[Int[Array, " capacity"], Entries, Float[Array, "outputs dim"]]:
    """Distinct rows that a batch reads, and the entries that read each row.

    A lookup sums over all entries of a bag. A row gradient sums over all entries that read the row.
    The same kernels can compute lookups and row gradients, because both are weighted sums of rows:

    forward    output[b]     = sum of gain * table[row]     over the entries of bag b
    backward   gradient[row] = sum of gain * d_output[b]    over the entries of that row

    The batch alone determines the order of additions, so equal inputs give equal bits.

    Args:
      num_rows: number of rows of the table.
      gradients: the call and the gradients of its outputs.
      pool: see `entry_gains`.

    The returned `Entries` are sorted by row and pool the output gradients: their bags are the
    distinct rows, and their `rows` are row numbers of the returned array of output gradients.
    Entries that contribute nothing come after the last bag, and their bag is the number of bags.

    Returns: `(rows, entries, d_outputs)`: the distinct rows in ascending order, padded with
      `NO_ROW`, the entries sorted by row, and the gradients of the outputs in float32.
    """
    # Each list begins with an empty array, because `jnp.concatenate` fails on an empty list, and a
    # table may have no segments.
    all_rows = [jnp.zeros(0, jnp.int32)]
    all_outputs = [jnp.zeros(0, jnp.int32)]
    all_gains = [jnp.zeros(0, jnp.float32)]
    parts = [jnp.zeros((0, gradients.dim), jnp.float32)]
    first = 0
    is_plain = True
    for number in gradients.lists_read():
        entries = entries_of(gradients.call, number, gradients.table, num_rows, pool)
        bag, gain, is_listed = entry_gains(entries, num_rows, pool)
        list_rows = jnp.where(is_listed, as_rows(entries.rows), NO_ROW)
        list_outputs = bag.astype(jnp.int32) + first
        all_rows.append(list_rows)
        all_outputs.append(list_outputs)
        all_gains.append(gain)
        parts.append(bag_gradients(gradients, number))
        first += entries.num_outputs
        is_summed = entries.combiner in ("sum", "none")
        if not is_summed or entries.weights is not None:
            is_plain = False
    rows = jnp.concatenate(all_rows)
    outputs = jnp.concatenate(all_outputs)
    gains = jnp.concatenate(all_gains)
    num_entries = rows.shape[0]
    capacity = min(num_entries, num_rows)
    position = int32_range(num_entries)
    weights = None
    if is_plain:
        in_order, outputs = jax.lax.sort_key_val(rows, outputs)
    else:
        in_order, order = jax.lax.sort_key_val(rows, position)
        outputs = outputs[order]
        weights = gains[order]
    is_real = in_order != NO_ROW
    size = min(num_entries, 1)
    no_row = jnp.full(size, -1, jnp.int32)
    previous = jnp.concatenate([no_row, in_order[:-1]])
    is_first = is_real & (in_order != previous)
    group_of = jnp.where(is_real, jnp.cumsum(is_first) - 1, capacity)
    group_of_first = jnp.where(is_first, group_of, capacity + 1)
    num_real = jnp.sum(is_real, dtype=jnp.int32)
    offsets = jnp.full(capacity + 1, num_real, jnp.int32)
    offsets = offsets.at[group_of_first].set(position, mode="drop")
    distinct = jnp.full(capacity, NO_ROW, jnp.int32)
    distinct = distinct.at[group_of_first].set(in_order, mode="drop")
    d_outputs = jnp.concatenate(parts)
    entries_by_row = Entries(outputs, offsets, weights, bags=group_of)
    return distinct, entries_by_row, d_outputs


def row_gradients(
    num_rows: int,
    gradients: CallGradients,
    *,
    pool: Pool | None = None,
) -> RowsAndGradients:
    """Distinct rows in ascending order and the summed gradient of each, float32.

    The rows and the gradients both have length `min(gradients.num_entries, num_rows)`. Padding has
    row `NO_ROW` and gradient 0. A row that was looked up is returned even if its gradient is zero.

    Args:
      num_rows: number of rows of the table.
      gradients: the call and the gradients of its outputs.
      pool: kernel that sums the gradients of each row. None, the default: XLA sums the gradients of
        each row.
    """
    rows, entries, d_output = group_rows(num_rows, gradients)
    if pool is not None:
        return rows, pool(d_output, entries)
    num_outputs, dim = d_output.shape
    terms = jnp.zeros((1, dim)) if num_outputs == 0 else d_output[entries.rows]
    if entries.weights is not None:
        terms = entries.weights[:, None] * terms
    group_of: Any = entries.bags  # `group_rows` always knows the bags.
    num_groups = rows.shape[0]
    sums = jax.ops.segment_sum(terms, group_of, num_groups, indices_are_sorted=True)
    return rows, sums


def squared_norm(
    num_rows: int,
    gradients: CallGradients,
    *,
    row_gradients: Callable[..., RowsAndGradients] = row_gradients,
) -> Float[Array, ""]:
    """Sum of the squares of all row gradients, float32."""
    _, values = row_gradients(num_rows, gradients)
    return jnp.sum(jnp.square(values))


def pair_products(vectors: Float[Array, "batch n dim"]) -> Float[Array, "batch pairs"]:
    """Dot products of all pairs of a sample's vectors, ordered as in `numpy.triu_indices(n, 1)`."""
    first, second = np.triu_indices(vectors.shape[1], 1)
    products = jnp.einsum("bid,bjd->bij", vectors, vectors, precision="highest")
    return products[:, first, second]


def pull_pairs(
    vectors: Float[Array, "batch n dim"],
    d_products: Float[Array, "batch pairs"],
) -> Float[Array, "batch n dim"]:
    """Gradient of the vectors, from the gradient `d_products` of their `pair_products`."""
    batch, num_vectors, _ = vectors.shape
    first, second = np.triu_indices(num_vectors, 1)
    half = jnp.zeros((batch, num_vectors, num_vectors))
    half = half.at[:, first, second].set(d_products)
    symmetric = half + half.swapaxes(1, 2)
    return jnp.einsum("bij,bjd->bid", symmetric, vectors, precision="highest")


def gather_rows(
    arrays: Sequence[Array],
    rows: Int[Array, "*places"],
    missing: int = 0,
) -> tuple[Array, ...]:
    """Gathers `rows` from every array, in the array's dtype.

    For a row number outside the array, int32 arrays return `missing`, and other arrays zeros.
    """
    # JAX counts negative indices from the end of an array, so negative row numbers become `NO_ROW`.
    rows = jnp.where(rows < 0, NO_ROW, rows)
    gathered = []
    for array in arrays:
        filler = missing if array.dtype == jnp.int32 else 0
        if array.shape[0]:
            values = array.at[rows].get(mode="fill", fill_value=filler)
        else:
            shape = (*rows.shape, *array.shape[1:])
            values = jnp.full(shape, filler, array.dtype)
        gathered.append(values)
    return tuple(gathered)


def scatter_rows(
    arrays: Sequence[Array],
    rows: Int[Array, " capacity"],
    values: Sequence[Array],
) -> tuple[Array, ...]:
    """Overwrites distinct `rows` of the arrays with `values`, and returns the new arrays.

    Row numbers outside an array are skipped.
    """
    # `unique_indices` promises that all indices are distinct, so padding gets distinct indices.
    num_rows = arrays[0].shape[0]
    padding = num_rows + jnp.arange(rows.shape[0], dtype=rows.dtype)
    is_row = is_between(rows, 0, num_rows)
    indices = jnp.where(is_row, rows, padding)
    scattered = []
    for array, new in zip(arrays, values, strict=True):
        new = new.astype(array.dtype)
        array = array.at[indices].set(new, mode="drop", unique_indices=True)
        scattered.append(array)
    return tuple(scattered)


def scatter_into(
    tables: Sequence[Sequence[Array]],
    table: Int[Array, ""],
    rows: Int[Array, " capacity"],
    values: Sequence[Array],
) -> list[tuple[Array, ...]]:
    """Overwrites distinct `rows` of one of several tables, and returns the arrays of all tables.

    Args:
      tables: arrays of each table. All tables have the same number of arrays, with the same
        dtypes, but the length of a row may differ.
      table: index of the table whose rows are overwritten.
      rows: row numbers. Row numbers outside the table are skipped.
      values: new rows for each array of the table. If the new rows are longer than the rows of the
        array, only their leading columns are used.
    """
    results = []
    for number, arrays in enumerate(tables):
        leading = []
        for array, new in zip(arrays, values, strict=True):
            leading.append(new[:, : array.shape[1]] if array.ndim > 1 else new)
        scatter = functools.partial(scatter_rows, rows=rows, values=leading)
        if len(tables) == 1:
            results.append(scatter(arrays))
            continue
        is_table = table == number
        results.append(jax.lax.cond(is_table, scatter, tuple, tuple(arrays)))
    return results


def apply_rows(
    table: Table,
    slots: Slots,
    rows: Int[Array, " capacity"],
    gradients: Float[Array, "capacity dim"],
    step: Step,
    *,
    gather: Callable[..., tuple[Array, ...]] = gather_rows,
    scatter: Callable[..., tuple[Array, ...]] = scatter_rows,
) -> tuple[Table, Slots]:
    """Applies one optimizer step to distinct `rows`, and returns the new table and slots.

    Row numbers outside the table are padding. If `step.rule.moves_all_rows`, the rows of the table
    that are not in `rows` are updated with gradient 0.

    Args:
      table: table to update.
      slots: optimizer state of the table.
      rows: distinct rows to update.
      gradients: gradient of each row in `rows`.
      step: rule, hyperparameters and rounding.
      gather: implementation of `gather_rows`.
      scatter: implementation of `scatter_rows`.
    """
    if step.rule.moves_all_rows:
        no_gradients = jnp.zeros(table.shape, jnp.float32)
        (gradients,) = scatter_rows((no_gradients,), rows, (gradients,))
        rows = int32_range(table.shape[0])
        old = table
        old_slots = slots
    else:
        old, *gathered = gather((table, *slots), rows)
        old_slots = tuple(gathered)
    old = old.astype(jnp.float32)
    new, new_slots = step.rule.step_rows(old, old_slots, gradients, step.hyper)
    if step.rounding is not None:
        new = step.rounding(new, table.dtype, rows)
    if step.rule.moves_all_rows:
        stepped = []
        for new_slot, slot in zip(new_slots, slots, strict=True):
            stepped.append(new_slot.astype(slot.dtype))
        return new.astype(table.dtype), tuple(stepped)
    state = (table, *slots)
    new_state = (new, *new_slots)
    new_table, *stepped_slots = scatter(state, rows, new_state)
    return new_table, tuple(stepped_slots)


def update(
    table: Table,
    slots: Slots,
    gradients: CallGradients,
    step: Step,
    *,
    row_gradients: Callable[..., RowsAndGradients] = row_gradients,
    apply_rows: Callable[..., tuple[Table, Slots]] = apply_rows,
) -> tuple[Table, Slots]:
    """Applies one optimizer step to each row with a gradient. Returns the new table and slots."""
    rows, values = row_gradients(table.shape[0], gradients)
    return apply_rows(table, slots, rows, values, step)


def allocate(
    shape: tuple[int, ...],
    dtype: DTypeLike,
    fill: float | None = None,
) -> Shaped[Array, "*shape"]:
    """Array filled with `fill`, or with unspecified values if `fill` is None."""
    if fill is None:
        fill = 0
    return jnp.full(shape, fill, dtype)


def row_bits(
    key: KeyOrKeys,
    lanes: Sequence[UInt32[Array, " nnz"]],
    dim: int,
    table: Int[Array, " nnz"] | None = None,
) -> UInt32[Array, "nnz dim"]:
    """`dim` random 32-bit words for every row.

    Args:
      key: PRNG key, into which the lanes of a row are folded in order. If `table` is given,
        `key` is an array with one PRNG key per table.
      lanes: arrays with one 32-bit word per row. Rows with equal words and equal keys get equal
        random bits.
      dim: number of random words per row.
      table: table of each row. None, the default: there is one table.
    """

    def one_row(key: PRNGKeyArray, *row_lanes: Array) -> Array:
        folded = functools.reduce(jax.random.fold_in, row_lanes, key)
        return jax.random.bits(folded, (dim,), jnp.uint32)

    if table is None:
        row_of_lanes = functools.partial(one_row, key)
        return jax.vmap(row_of_lanes)(*lanes)
    keys = key.at[table].get(mode="clip")
    return jax.vmap(one_row)(keys, *lanes)


def round_stochastically(
    values: Float[Array, "rows dim"],
    dtype: jnp.dtype,
    rows: Int[Array, " rows"],
    key: KeyOrKeys,
    table: Int[Array, " rows"] | None = None,
) -> Float[Array, "rows dim"]:
    """Float32 `values` rounded up or down to `dtype` at random. See `round_with_noise`.

    The noise depends only on the key, the row number and the column, not on the row's position in
    the batch.

    Args:
      values: float32 rows to round, the result of an optimizer step.
      dtype: dtype of the table. float32 needs no rounding.
      rows: index of each row in the table.
      key: PRNG key. If `table` is given, `key` is an array with one PRNG key per table.
      table: table of each row. None, the default: there is one table.
    """
    if dtype == jnp.float32:
        return values
    lanes = [rows.astype(jnp.uint32)]
    dim = values.shape[1]
    words = row_bits(key, lanes, dim, table)
    return round_with_noise(values, words, dtype)


def round_with_noise(
    values: Float[Array, "*shape"],
    words: UInt32[Array, "*shape"],
    dtype: jnp.dtype,
) -> Float[Array, "*shape"]:
    """Each value rounded to one of its two neighbours in `dtype`, at random and unbiased.

    Noise is added to the bits that `dtype` drops. The magnitude of a value is rounded up if adding
    the noise carries into the bits that `dtype` keeps, else down. Infinities, NaN and values above
    the largest number of `dtype` are rounded to nearest.

    Args:
      values: float32 values to round.
      words: one random 32-bit word per value. Rounding uses only the upper bits of a word: 13 bits
        for float16 (24 bits for subnormal results), 16 bits for bfloat16.
      dtype: float16 or bfloat16.

    Source: FBGEMM's fused optimizers, which add noise to the dropped bits and round toward zero. In
      FBGEMM, float16 values below 2**-14 are biased toward zero, because the noise is smaller than
      the spacing of subnormal numbers.
    """
    num_dropped = _NUM_DROPPED_BITS[jnp.dtype(dtype)]
    # The noise is added to the bits as an integer, because floating-point addition can flush
    # subnormal numbers to zero.
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    noise = words >> jnp.uint32(32 - num_dropped)
    bits = bits + noise
    kept_bits = jnp.uint32((0xFFFFFFFF << num_dropped) & 0xFFFFFFFF)
    rounded = jax.lax.bitcast_convert_type(bits & kept_bits, jnp.float32)
    if dtype == jnp.float16:
        spacing = 2.0**-24
        smallest_normal = 2.0**-14
        steps = jnp.abs(values) / spacing
        whole = jnp.floor(steps)
        upper_bits = words >> jnp.uint32(8)
        threshold = upper_bits.astype(jnp.float32) * 2.0**-24
        is_up = threshold < steps - whole
        magnitude = (whole + is_up.astype(jnp.float32)) * spacing
        subnormal = jnp.copysign(magnitude, values)
        is_subnormal = jnp.abs(values) < smallest_normal
        rounded = jnp.where(is_subnormal, subnormal, rounded)
    # `is_finite` is False for NaN, so NaN is rounded to nearest.
    largest = float(jnp.finfo(dtype).max)
    is_finite = jnp.abs(values) <= largest
    return jnp.where(is_finite, rounded, values).astype(dtype)

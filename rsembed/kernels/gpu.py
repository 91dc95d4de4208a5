"""Kernels for NVIDIA GPUs in Pallas, compiled by Triton.

Equal inputs give equal bits, because no kernel adds atomically. One GPU program of `lookup` pools
several bags. One GPU program of `update` sums the gradients of several distinct rows and updates
these rows in place. With Zipf-distributed ids, a tenth of the entries of a batch can read the same
row. The entries of a frequent row are first summed in pieces of `piece_entries` entries, so that no
program runs much longer than the others.

In a computation for a device that is not a GPU, a direct call of a GPU kernel runs in Pallas'
interpreter, which is slow and meant for tests.

Source: FBGEMM's TBE kernels, which sort the entries of a batch by row and update each distinct row
  once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rsembed.kernels import reference
from rsembed.kernels.contract import (
    CallGradients,
    Index,
    Ref,
    RowsAndGradients,
    Step,
    Table,
    as_offsets,
    as_rows,
    check_dtype,
    int32_range,
    is_between,
)
from rsembed.kernels.devices import target_device, vary_alike
from rsembed.kernels.reference import Entries
from rsembed.kernels.traced_rules import ELEMENTWISE, Row, evaluate, trace_rule
from rsembed.optimizers.base import Slots

NAME = "gpu"

_PRIMITIVES = ELEMENTWISE | {"pow", "log", "log1p", "expm1", "exp2", "tanh"}
_PRIMITIVES |= {"floor", "ceil", "is_finite"}
_MAX_COLUMNS = 8192


class Tiling(NamedTuple):
    """Sizes that divide a kernel's work among GPU programs, tuned on an H100.

    All sizes are powers of two, as Triton requires.

    Args:
      num_bags: minimum number of bags that one program of a lookup pools. If rows have few columns,
        a program pools more than `num_bags` bags, to read `num_numbers` values at once.
      num_numbers: minimum number of table values that a program of a lookup reads at once. A
        program of an optimizer step holds rows with `num_numbers` values in total, or a single row
        if the row is longer.
      num_ahead: number of rows per bag that a program loads before it adds these rows to the sum of
        the bag.
      max_columns: maximum number of columns that one program of a lookup pools.
      num_warps: number of warps (32 threads) of a program that holds `num_numbers` values.
      piece_entries: number of consecutive entries of the sorted batch in a piece. If all entries of
        a piece read the same row, a separate kernel computes the sum of the piece first, and the
        main kernel then adds this sum.
    """

    num_bags: int = 8
    num_numbers: int = 512
    num_ahead: int = 4
    max_columns: int = 256
    num_warps: int = 4
    piece_entries: int = 256


tiling = Tiling()


def unavailable_because() -> str | None:
    """Reason why the GPU kernels cannot run here, or None if they can."""
    device = target_device()
    platform = device.platform
    if platform != "gpu":
        return f"the Triton kernels run on NVIDIA GPUs, but the computation is for {platform}"
    if "NVIDIA" not in device.device_kind:
        return f"the Triton kernels are lowered for NVIDIA GPUs only, not for {device.device_kind}"
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return "this version of JAX has no Triton backend for Pallas"
    return None


def pool(table: Table, entries: Entries) -> Float[Array, "outputs dim"]:
    """Pooled rows of every bag of a list, float32.

    One kernel call pools all bags. If the entries have `bags`, another call sums pieces first.
    """
    check_dtype(table, NAME)
    entries = _with_safe_weights(entries, table.shape[0])
    pieces = _pieces(table, entries)
    operands = [*_operands(entries), *pieces]
    combiner = entries.combiner
    return _pool(table, operands, entries.num_outputs, combiner, has_pieces=bool(pieces))


def _with_safe_weights(entries: Entries, num_rows: int) -> Entries:
    """The entries with each bag's weights scaled by a power of two, for `mean` and `sqrtn`.

    Sums or squares of unscaled weights could overflow or underflow float32. Scaling all weights of
    a bag by one factor does not change its `mean` or `sqrtn`.
    """
    is_divided = entries.combiner in ("mean", "sqrtn")
    if not is_divided or entries.weights is None or entries.num_outputs == 0:
        return entries
    summed = entries._replace(combiner="sum")
    bag, gains, _ = reference.entry_gains(summed, num_rows)
    scales = reference._inverse_magnitudes(gains, bag, entries.num_outputs)
    return entries._replace(weights=gains * scales[bag])


lookup = partial(reference.lookup, pool=pool)


def row_gradients(num_rows: int, gradients: CallGradients) -> RowsAndGradients:
    """Distinct rows in ascending order and the summed gradient of each.

    See `reference.row_gradients`.
    """
    rows, entries, d_output = reference.group_rows(num_rows, gradients, pool)
    return rows, pool(d_output, entries)


def update(
    table: Table,
    slots: Slots,
    gradients: CallGradients,
    step: Step,
) -> tuple[Table, Slots]:
    """Applies one optimizer step to each row with a gradient. Returns the new table and slots.

    One kernel sums the row gradients and updates the rows, without writing the gradients to memory.
    """
    num_rows = table.shape[0]
    if step.rounds(table):
        rows, values = row_gradients(num_rows, gradients)
        return reference.apply_rows(table, slots, rows, values, step)
    rows, entries, d_output = reference.group_rows(num_rows, gradients, pool)
    return _step(table, slots, rows, entries, d_output, step)


def apply_rows(
    table: Table,
    slots: Slots,
    rows: Int[Array, " capacity"],
    gradients: Float[Array, "capacity dim"],
    step: Step,
) -> tuple[Table, Slots]:
    """Applies one optimizer step to distinct `rows`, and returns the new table and slots.

    Row numbers outside the table are padding.
    """
    if step.rounds(table):
        return reference.apply_rows(table, slots, rows, gradients, step)
    # Row `rows[k]` has the single gradient `gradients[k]`, so bag `k` holds only entry `k`.
    numbers = int32_range(rows.shape[0] + 1)
    entries = Entries(numbers[:-1], numbers, None)
    rows = as_rows(rows)
    d_output = gradients.astype(jnp.float32)
    return _step(table, slots, rows, entries, d_output, step)


squared_norm = partial(reference.squared_norm, row_gradients=row_gradients)


def _operands(entries: Entries) -> list[Array]:
    """Operands of a pooling kernel: rows, offsets and, if the entries have weights, weights.

    If the entries have no offsets, each entry is a bag.
    """
    num_entries = entries.rows.shape[0]
    offsets = entries.offsets
    if offsets is None:
        offsets = jnp.arange(num_entries + 1)
    operands = [as_rows(entries.rows), as_offsets(offsets, num_entries)]
    if entries.weights is not None:
        operands.append(entries.weights.astype(jnp.float32))
    return operands


def _sum_bags(
    table: Ref,
    refs: Sequence[Ref],
    bags: Int[Array, " bags"],
    columns: Int[Array, " columns"],
    combiner: str,
    *,
    num_bags: int,
    stride: int = 1,
    has_pieces: bool = False,
) -> Float[Array, "bags columns"]:
    """Pooled rows of `bags`, computed inside a kernel. The entries of a bag are added in order.

    Args:
      table: reference to the array that holds the rows to pool.
      refs: references to the arrays from `_operands`, and to the array from `_pieces` if
        `has_pieces`.
      bags: indices of the bags to pool.
      columns: indices of the columns to pool.
      combiner: combiner of the bags.
      num_bags: number of bags. An index in `bags` that is `num_bags` or more is padding.
      stride: number of positions per bag in the array of bounds. With stride 1, the default, the
        bounds are offsets, so a bag ends where the next bag starts. With stride 2, the array of
        bounds has a start and an end for each bag.
      has_pieces: whether the last item of `refs` is a reference to the array from `_pieces`, False
        by default. If True, and a piece is completely inside a bag, the kernel reads the
        precomputed sum of the piece instead of the rows of its entries.
    """
    from jax.experimental.pallas import triton

    rows_ref, bounds_ref, *others = refs
    sums_ref = others.pop() if has_pieces else None
    num_rows, dim = table.shape
    length = tiling.piece_entries
    is_bag = bags < num_bags
    is_column = (columns < dim)[None, :]
    bound = stride * bags
    start = triton.load(bounds_ref.at[bound], mask=is_bag, other=0)
    stop = triton.load(bounds_ref.at[bound + 1], mask=is_bag, other=0)
    first_piece = (start + length - 1) // length
    num_pieces = jnp.zeros_like(start)
    if has_pieces:
        num_pieces = jnp.maximum(stop // length - first_piece, 0)

    def read_entries(turn: Index) -> tuple[Array, Array]:
        """Gain and vector of entry `turn` of every bag.

        `turn` does not count the entries of pieces that are already summed.
        """
        entry = start + turn
        is_after_pieces = entry >= first_piece * length
        num_skipped = jnp.where(is_after_pieces, num_pieces * length, 0)
        entry = entry + num_skipped
        is_entry = entry < stop
        rows = triton.load(rows_ref.at[entry], mask=is_entry, other=-1)
        is_row = is_between(rows, 0, num_rows)
        gains = is_row.astype(jnp.float32)
        if others:
            # An entry without a valid row must have gain 0, even if its weight is not 0, because
            # entries with gain 0 do not read the table.
            weights = triton.load(others[0].at[entry], mask=is_entry, other=0.0)
            gains = jnp.where(is_row, weights, 0.0)
        # A row with gain 0 is not read, because it may hold NaN.
        contributes = gains != 0.0
        is_read = contributes[:, None] & is_column
        safe_rows = jnp.where(is_row, rows, 0)
        index = (safe_rows[:, None], columns[None, :])
        vectors = triton.load(table.at[index], mask=is_read, other=0.0)
        return gains, vectors.astype(jnp.float32)

    def add_entries(
        number: Index,
        sums: tuple[Array, Array],
    ) -> tuple[Array, Array]:
        total, divisor = sums
        first = number * tiling.num_ahead
        entries = [read_entries(first + turn) for turn in range(tiling.num_ahead)]
        for gains, vectors in entries:
            terms = gains[:, None] * vectors if others else vectors
            total = total + terms
            divisor_terms = gains if combiner == "mean" else gains * gains
            divisor = divisor + divisor_terms
        return total, divisor

    def num_turns(counts: Array) -> Array:
        rounded_up = jnp.max(counts) + tiling.num_ahead - 1
        return rounded_up // tiling.num_ahead

    shape = (bags.shape[0], columns.shape[0])
    total = jnp.zeros(shape, jnp.float32)
    divisor = jnp.zeros(bags.shape[0], jnp.float32)
    num_entries = stop - start - num_pieces * length
    turns = num_turns(num_entries)
    sums = (total, divisor)
    total, divisor = jax.lax.fori_loop(0, turns, add_entries, sums)
    if sums_ref is not None:

        def read_piece(turn: Index) -> Array:
            is_piece = turn < num_pieces
            is_read = is_piece[:, None] & is_column
            piece = first_piece + turn
            index = (piece[:, None], columns[None, :])
            return triton.load(sums_ref.at[index], mask=is_read, other=0.0)

        def add_pieces(number: Index, total: Array) -> Array:
            first = number * tiling.num_ahead
            for turn in range(tiling.num_ahead):
                total = total + read_piece(first + turn)
            return total

        turns = num_turns(num_pieces)
        total = jax.lax.fori_loop(0, turns, add_pieces, total)
    if combiner in ("sum", "none"):
        return total
    if combiner == "sqrtn":
        divisor = jnp.sqrt(divisor)
    divisor = divisor[:, None]
    is_zero = divisor == 0.0
    safe_divisor = jnp.where(is_zero, 1.0, divisor)
    return jnp.where(is_zero, 0.0, total / safe_divisor)


def _pieces(
    table: Table,
    entries: Entries,
) -> tuple[Float[Array, "pieces dim"], ...]:
    """Sums of the pieces of the entries, or `()` if there are none or their `bags` are unknown.

    The sorted entries are split into pieces of `piece_entries` consecutive entries. If all entries
    of a piece read the same row, the result holds the sum of the piece. If the entries of a piece
    read different rows, the result holds zeros for the piece, and the kernel that uses the result
    reads the entries of the piece one by one.
    """
    if entries.bags is None:
        return ()
    length = tiling.piece_entries
    num_pieces = entries.bags.shape[0] // length
    if 0 in (num_pieces, *table.shape):
        return ()
    bags = entries.bags[: num_pieces * length]
    bags = bags.reshape(num_pieces, length)
    start = int32_range(num_pieces) * length
    rows, offsets, *weights = _operands(entries)
    has_one_row = bags[:, 0] == bags[:, -1]
    contributes = start < offsets[-1]
    stop = jnp.where(has_one_row & contributes, start + length, start)
    bounds = jnp.stack([start, stop], axis=1).reshape(-1)
    operands = [rows, bounds, *weights]
    sums = _pool(table, operands, num_pieces, "sum", stride=2)
    return (sums,)


def _pool(
    table: Array,
    operands: Sequence[Array],
    num_bags: int,
    combiner: str,
    **options: Any,
) -> Float[Array, "num_bags dim"]:
    """Pooled rows of every bag. `options` are further keyword arguments of `_sum_bags`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    dim = table.shape[1]
    out = jax.ShapeDtypeStruct((num_bags, dim), jnp.float32)
    num_entries = operands[0].shape[0]
    if 0 in (*table.shape, num_bags, num_entries):
        return jnp.zeros(out.shape, jnp.float32)
    width = min(tiling.max_columns, pl.next_power_of_2(dim))
    height = max(tiling.num_bags, tiling.num_numbers // width)

    def kernel(table_ref: Ref, *refs: Ref) -> None:
        *others, out_ref = refs
        first_bag = pl.program_id(0) * height
        bags = first_bag + int32_range(height)
        first_column = pl.program_id(1) * width
        columns = first_column + int32_range(width)
        pooled = _sum_bags(
            table_ref,
            others,
            bags,
            columns,
            combiner,
            num_bags=num_bags,
            **options,
        )
        is_bag = bags < num_bags
        is_column = columns < dim
        is_number = is_bag[:, None] & is_column[None, :]
        index = (bags[:, None], columns[None, :])
        triton.store(out_ref.at[index], pooled, mask=is_number)

    grid = (pl.cdiv(num_bags, height), pl.cdiv(dim, width))
    return _call(
        kernel,
        "rsembed_pool",
        out,
        grid,
        tiling.num_warps,
        table,
        *operands,
    )


def _call(
    kernel: Callable[..., None],
    name: str,
    out: object,
    grid: tuple[int, ...],
    num_warps: int,
    *operands: Array,
    num_stepped: int = 0,
) -> Any:
    """Runs a kernel once for each point of the grid, and returns arrays with the shapes in `out`.

    The first `num_stepped` operands of the kernel are updated in place and become the results.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    operands = tuple(vary_alike(operands))
    varying = jax.typeof(operands[0]).mat

    def varying_shape(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, manual_axis_type=varying)

    aliases = {number: number for number in range(num_stepped)}
    call = pl.pallas_call(
        kernel,
        out_shape=jax.tree.map(varying_shape, out),
        grid=grid,
        input_output_aliases=aliases,
        interpret=target_device().platform != "gpu",
        name=name,
        compiler_params=triton.CompilerParams(num_warps=num_warps),
    )
    return call(*operands)


def _step(
    table: Table,
    slots: Slots,
    rows: Int[Array, " capacity"],
    entries: Entries,
    d_output: Array,
    step: Step,
) -> tuple[Table, Slots]:
    """Applies one optimizer step to `rows` in place, and returns the table and slots.

    Args:
      table: table to update.
      slots: optimizer state of the table.
      rows: distinct rows. Row numbers outside the table are padding.
      entries: one bag for each row. The gradient of a row is the sum of the rows of `d_output` in
        its bag.
      d_output: gradients to sum, float32.
      step: rule and hyperparameters.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    check_dtype(table, NAME)
    num_hyper = len(step.hyper)
    traced = trace_rule(step.rule, table, slots, num_hyper, elementwise=_PRIMITIVES)
    num_rows, dim = table.shape
    state = (table, *slots)
    num_arrays = len(state)
    num_groups = rows.shape[0]
    if 0 in (num_rows, dim, num_groups, d_output.shape[0]):
        return table, slots
    width = pl.next_power_of_2(dim)
    if width > _MAX_COLUMNS:
        raise NotImplementedError(
            f"the GPU step holds rows of up to {_MAX_COLUMNS} numbers, not {dim}",
        )
    height = max(1, tiling.num_numbers // width)
    pieces = _pieces(d_output, entries)

    def step_row(
        gradient: Array,
        hyper: Sequence[Array],
        *values: Array,
    ) -> list[Array]:
        arguments: list[Row | Array] = []
        for array, value in zip(state, values, strict=True):
            if array.shape[1] == dim:
                arguments.append((value,))
            else:
                # If an optimizer slot has one number per row, the rule gets the number in every
                # column.
                arguments.append(jnp.full(width, jnp.sum(value)))
        arguments.append((gradient,))
        for number in hyper:
            arguments.append(jnp.full(width, number))
        stepped = []
        for result in evaluate(traced, arguments, dim=dim):
            stepped.append(result[0] if isinstance(result, tuple) else result)
        return stepped

    def kernel(*refs: Ref) -> None:
        old = refs[:num_arrays]
        new = refs[-num_arrays:]
        rows_ref, d_ref, hyper_ref, *others = refs[num_arrays:-num_arrays]
        first_group = pl.program_id(0) * height
        groups = first_group + int32_range(height)
        columns = int32_range(width)
        gradients = _sum_bags(
            d_ref,
            others,
            groups,
            columns,
            "sum",
            num_bags=num_groups,
            has_pieces=bool(pieces),
        )
        is_group = groups < num_groups
        rows = triton.load(rows_ref.at[groups], mask=is_group, other=-1)
        is_row = is_between(rows, 0, num_rows)
        # Padding gets the index `num_rows`. Masks keep the kernel from reading or writing at index
        # `num_rows`.
        safe_rows = jnp.where(is_row, rows, num_rows)
        index = (safe_rows[:, None], columns[None, :])
        masks = []
        values = []
        for ref, array in zip(old, state, strict=True):
            is_column = columns < array.shape[1]
            mask = is_row[:, None] & is_column[None, :]
            value = triton.load(ref.at[index], mask=mask, other=0.0)
            masks.append(mask)
            values.append(value.astype(jnp.float32))
        hyper = [hyper_ref[number] for number in range(num_hyper)]
        in_axes = (0, None, *([0] * num_arrays))
        step_rows = jax.vmap(step_row, in_axes=in_axes)
        results = step_rows(gradients, hyper, *values)
        for ref, array, mask, value in zip(new, state, masks, results, strict=True):
            rounded = value.astype(array.dtype)
            triton.store(ref.at[index], rounded, mask=mask)

    out = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in state]
    operands = (
        *state,
        rows,
        d_output,
        step.hyper_vector(),
        *_operands(entries),
        *pieces,
    )
    grid = (pl.cdiv(num_groups, height),)
    num_values = height * width
    num_warps = min(num_values * tiling.num_warps // tiling.num_numbers, 16)
    new_table, *new_slots = _call(
        kernel,
        "rsembed_step",
        out,
        grid,
        num_warps,
        *operands,
        num_stepped=num_arrays,
    )
    return new_table, tuple(new_slots)

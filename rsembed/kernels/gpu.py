"""Kernels for NVIDIA GPUs in Pallas, compiled by Triton. Equal inputs give equal bits: nothing is added atomically.

A program of `lookup` sums some bags side by side, a program of `update` sums the gradients of some distinct rows and
steps them where they lie. Rows that very many entries share are summed in pieces first, so that no program works long
after the others: with Zipf ids a tenth of a batch can be one row. Where the computation is for no GPU, a direct call
runs in Pallas' interpreter, which is for tests: it is slow.

Source: steps of the distinct rows of the sorted batch, as in FBGEMM's TBE kernels.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from rsembed.kernels import reference
from rsembed.kernels.contract import CallGradients, RowsAndGradients, Step, Table, as_offsets, as_rows
from rsembed.kernels.devices import target_device, vary_alike
from rsembed.kernels.reference import Entries
from rsembed.kernels.traced_rules import ELEMENTWISE, evaluate, trace_rule
from rsembed.optimizers.base import Slots

NAME = "gpu"

_TABLE_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_PRIMITIVES = ELEMENTWISE | {"pow", "log", "log1p", "expm1", "exp2", "tanh", "floor", "ceil", "is_finite"}
_MAX_COLUMNS = 8192


class Tiling(NamedTuple):
    """Sizes into which a GPU program cuts its work: powers of two, as Triton's blocks; chosen on an H100.

    Args:
      num_bags: bags that one program of a lookup sums, and more of them where rows are short.
      num_numbers: numbers that it reads at once at the least; a program of a step has rows of as many, or one row.
      num_ahead: rows of every bag whose reads are under way before the first is added.
      max_columns: numbers of a row that one program of a lookup sums.
      num_warps: threads for so many numbers, in units of 32.
      piece_entries: sorted entries are cut into pieces of so many; pieces of a single row are summed first.
    """

    num_bags: int = 8
    num_numbers: int = 512
    num_ahead: int = 4
    max_columns: int = 256
    num_warps: int = 4
    piece_entries: int = 256


tiling = Tiling()


def unavailable_because() -> str | None:
    """Why these kernels cannot run here, or None if they can."""
    device = target_device()
    if device.platform != "gpu":
        return f"the Triton kernels run on NVIDIA GPUs, but the computation is for {device.platform}"
    if "NVIDIA" not in device.device_kind:
        return f"the Triton kernels are lowered for NVIDIA GPUs only, not for {device.device_kind}"
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return "this version of JAX has no Triton backend for Pallas"
    return None


def pool(table: Table, entries: Entries) -> Float[Array, "outputs dim"]:
    """Pooled rows of every bag, float32: one kernel for a list of ids."""
    _check_table(table)
    entries = _with_safe_weights(entries, table.shape[0])
    return _pool(table, _operands(entries), entries.num_outputs, entries.combiner)


def _with_safe_weights(entries: Entries, num_rows: int) -> Entries:
    """The weights of each bag times a power of two, where sums or squares of them could leave float32's range."""
    is_divided = entries.combiner in ("mean", "sqrtn") and entries.weights is not None
    if not is_divided or entries.num_outputs == 0:
        return entries
    bag, gains, _ = reference.entry_gains(entries._replace(combiner="sum"), num_rows)
    scales = reference._inverse_magnitudes(gains, bag, entries.num_outputs)
    return entries._replace(weights=gains * scales[bag])


lookup = partial(reference.lookup, pool=pool)


def row_gradients(num_rows: int, gradients: CallGradients) -> RowsAndGradients:
    """Gradient of every looked-up row, equal rows combined, as `reference.row_gradients` gives it."""
    rows, entries, group_of, d_output = reference.group_rows(num_rows, gradients, pool)
    pieces = _pieces(d_output, entries, group_of)
    return rows, _pool(d_output, [*_operands(entries), *pieces], rows.shape[0], "sum", has_pieces=bool(pieces))


def update(table: Table, slots: Slots, gradients: CallGradients, step: Step) -> tuple[Table, Slots]:
    """Row gradients and one optimizer step per distinct row, fused: the gradients are never written to memory."""
    if step.rounds(table):
        return reference.apply_rows(table, slots, *row_gradients(table.shape[0], gradients), step)
    rows, entries, group_of, d_output = reference.group_rows(table.shape[0], gradients, pool)
    return _step(table, slots, rows, entries, d_output, step, _pieces(d_output, entries, group_of))


def apply_rows(
    table: Table, slots: Slots, rows: Int[Array, " capacity"], gradients: Float[Array, "capacity dim"], step: Step
) -> tuple[Table, Slots]:
    """One optimizer step of distinct `rows`; rows outside the table are padding."""
    if step.rounds(table):
        return reference.apply_rows(table, slots, rows, gradients, step)
    each = jnp.arange(rows.shape[0] + 1, dtype=jnp.int32)
    entries = Entries(each[:-1], each, None)
    return _step(table, slots, as_rows(rows), entries, gradients.astype(jnp.float32), step, ())


squared_norm = partial(reference.squared_norm, row_gradients=row_gradients)


def _check_table(table: Array) -> None:
    if table.dtype not in _TABLE_DTYPES:
        raise NotImplementedError(f"tables of the GPU kernels are float32, bfloat16 or float16, not {table.dtype}")


def _operands(entries: Entries) -> list[Array]:
    """Rows, offsets and, if there are any, weights; without offsets, every entry is a bag."""
    num_entries = entries.rows.shape[0]
    offsets = jnp.arange(num_entries + 1) if entries.offsets is None else entries.offsets
    weights = [] if entries.weights is None else [entries.weights.astype(jnp.float32)]
    return [as_rows(entries.rows), as_offsets(offsets, num_entries), *weights]


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _sum_bags(
    table: PyTree,
    refs: Sequence[PyTree],
    bags: Int[Array, " bags"],
    columns: Int[Array, " columns"],
    combiner: str,
    *,
    num_bags: int,
    stride: int = 1,
    has_pieces: bool = False,
) -> Float[Array, "bags columns"]:
    """Pooled rows of some bags, computed inside a kernel; entries are added in their order.

    Args:
      table: what is pooled.
      refs: `_operands`, and `_pieces` if there are any.
      bags: their numbers.
      columns: which numbers of the rows.
      combiner: how the rows of a bag are pooled.
      num_bags: bags from this number on are empty.
      stride: how far apart the bounds of a bag lie from those of the next.
      has_pieces: whether `refs` end with the sums of pieces, whose entries are not read.
    """
    from jax.experimental.pallas import triton

    rows_ref, bounds_ref, *others = refs
    sums_ref = others.pop() if has_pieces else None
    (num_rows, dim), length = table.shape, tiling.piece_entries
    is_bag, is_column = bags < num_bags, (columns < dim)[None, :]
    start = triton.load(bounds_ref.at[stride * bags], mask=is_bag, other=0)
    stop = triton.load(bounds_ref.at[stride * bags + 1], mask=is_bag, other=0)
    first_piece, num_pieces = (start + length - 1) // length, jnp.zeros_like(start)
    if has_pieces:
        num_pieces = jnp.maximum(stop // length - first_piece, 0)

    def entry_of(turn: Any) -> tuple[Array, Array]:
        entry = start + turn
        entry = entry + jnp.where(entry >= first_piece * length, num_pieces * length, 0)
        rows = triton.load(rows_ref.at[entry], mask=entry < stop, other=-1)
        is_row = (rows >= 0) & (rows < num_rows)
        gains = is_row.astype(jnp.float32)
        if others:  # of entries without a row they may be anything, and must not lead to a read outside the table
            weights = triton.load(others[0].at[entry], mask=entry < stop, other=0.0)
            gains = jnp.where(is_row, weights, 0.0)
        # Rows that contribute nothing are not read: they may hold anything, NaN included.
        is_read, places = (gains != 0.0)[:, None] & is_column, (jnp.where(is_row, rows, 0)[:, None], columns[None, :])
        return gains, triton.load(table.at[places], mask=is_read, other=0.0).astype(jnp.float32)

    def add_entries(number: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        total, divisor = sums
        for gains, vectors in [entry_of(number * tiling.num_ahead + turn) for turn in range(tiling.num_ahead)]:
            total = total + (gains[:, None] * vectors if others else vectors)
            divisor = divisor + (gains if combiner == "mean" else gains * gains)
        return total, divisor

    def turns(counts: Array) -> PyTree:
        return (jnp.max(counts) + tiling.num_ahead - 1) // tiling.num_ahead

    sums = jnp.zeros((bags.shape[0], columns.shape[0]), jnp.float32), jnp.zeros(bags.shape[0], jnp.float32)
    total, divisor = jax.lax.fori_loop(0, turns(stop - start - num_pieces * length), add_entries, sums)
    if sums_ref is not None:

        def piece(turn: Any) -> Array:
            is_own = (turn < num_pieces)[:, None] & is_column
            return triton.load(sums_ref.at[(first_piece + turn)[:, None], columns[None, :]], mask=is_own, other=0.0)

        def add_pieces(number: Any, total: Array) -> Array:
            return sum((piece(number * tiling.num_ahead + turn) for turn in range(tiling.num_ahead)), total)

        total = jax.lax.fori_loop(0, turns(num_pieces), add_pieces, total)
    if combiner in ("sum", "none"):
        return total
    divisor = (divisor if combiner == "mean" else jnp.sqrt(divisor))[:, None]
    return jnp.where(divisor == 0.0, 0.0, total / jnp.where(divisor == 0.0, 1.0, divisor))


def _pieces(d_output: Array, entries: Entries, group_of: Int[Array, " nnz"]) -> tuple[Float[Array, "pieces dim"], ...]:
    """Sums of the pieces of sorted entries that belong to one row; none where a batch is too small to have such.

    Other pieces are not summed. Rows of less than `piece_entries` entries have none, as have rows that lie across two.
    """
    length, dim = tiling.piece_entries, d_output.shape[1]
    num_pieces = group_of.shape[0] // length
    if 0 in (num_pieces, dim, d_output.shape[0]):
        return ()
    in_pieces = group_of[: num_pieces * length].reshape(num_pieces, length)
    start = jnp.arange(num_pieces, dtype=jnp.int32) * length
    rows, offsets, *weights = _operands(entries)
    is_of_one_row = (in_pieces[:, 0] == in_pieces[:, -1]) & (start < offsets[-1])
    stop = jnp.where(is_of_one_row, start + length, start)
    bounds = jnp.stack([start, stop], axis=1).reshape(-1)
    return (_pool(d_output, [rows, bounds, *weights], num_pieces, "sum", stride=2),)


def _pool(
    table: Array, operands: Sequence[Array], num_bags: int, combiner: str, **how: Any
) -> Float[Array, "num_bags dim"]:
    """Pooled rows of bags; `how` are the last arguments of `_sum_bags`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    dim = table.shape[1]
    if 0 in (*table.shape, num_bags, operands[0].shape[0]):
        return jnp.zeros((num_bags, dim), jnp.float32)
    width = min(tiling.max_columns, _power_of_two(dim))
    height = max(tiling.num_bags, tiling.num_numbers // width)

    def kernel(table_ref: Any, *refs: Any) -> None:
        *others, out_ref = refs
        bags = pl.program_id(0) * height + jnp.arange(height, dtype=jnp.int32)
        columns = pl.program_id(1) * width + jnp.arange(width, dtype=jnp.int32)
        pooled = _sum_bags(table_ref, others, bags, columns, combiner, num_bags=num_bags, **how)
        is_number = (bags < num_bags)[:, None] & (columns < dim)[None, :]
        triton.store(out_ref.at[bags[:, None], columns[None, :]], pooled, mask=is_number)

    out, grid = jax.ShapeDtypeStruct((num_bags, dim), jnp.float32), (pl.cdiv(num_bags, height), pl.cdiv(dim, width))
    return _call(kernel, "rsembed_pool", out, grid, tiling.num_warps, table, *operands)


def _call(
    kernel: Any, name: str, out: Any, grid: tuple[int, ...], num_warps: int, *operands: Array, num_stepped: int = 0
) -> PyTree:
    """Runs a program for every place of the grid; the first `num_stepped` operands become results where they lie."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    varied = vary_alike(operands)
    varying = jax.typeof(varied[0]).mat
    call = pl.pallas_call(
        kernel,
        out_shape=jax.tree.map(lambda own: jax.ShapeDtypeStruct(own.shape, own.dtype, manual_axis_type=varying), out),
        grid=grid,
        input_output_aliases={number: number for number in range(num_stepped)},
        interpret=target_device().platform != "gpu",
        name=name,
        compiler_params=triton.CompilerParams(num_warps=num_warps),
    )
    return call(*varied)


def _step(
    table: Table,
    slots: Slots,
    rows: Int[Array, " capacity"],
    entries: Entries,
    d_output: Array,
    step: Step,
    pieces: tuple[Array, ...],
) -> tuple[Table, Slots]:
    """Steps `rows` in place, with the gradients that `entries` pool from `d_output`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    _check_table(table)
    traced = trace_rule(step.rule, table, slots, len(step.hyper), elementwise=_PRIMITIVES)
    (num_rows, dim), state = table.shape, (table, *slots)
    if 0 in (num_rows, dim, rows.shape[0], d_output.shape[0]):
        return table, slots
    width = _power_of_two(dim)
    if width > _MAX_COLUMNS:
        raise NotImplementedError(f"the GPU step holds rows of up to {_MAX_COLUMNS} numbers, not {dim}")
    num_groups, height = rows.shape[0], max(1, tiling.num_numbers // width)

    def step_row(gradient: Array, hyper: Sequence[Array], *values: Array) -> list[Array]:
        # A slot of one number is repeated over the row.
        arguments = [
            (value,) if array.shape[1] == dim else jnp.full(width, jnp.sum(value))
            for array, value in zip(state, values, strict=True)
        ]
        numbers = [jnp.full(width, number) for number in hyper]
        results = evaluate(traced, [*arguments, (gradient,), *numbers], dim=dim)
        return [result[0] if isinstance(result, tuple) else result for result in results]

    def kernel(*refs: Any) -> None:
        old, new = refs[: len(state)], refs[-len(state) :]
        rows_ref, d_ref, hyper_ref, *others = refs[len(state) : -len(state)]
        groups = pl.program_id(0) * height + jnp.arange(height, dtype=jnp.int32)
        columns = jnp.arange(width, dtype=jnp.int32)
        gradients = _sum_bags(d_ref, others, groups, columns, "sum", num_bags=num_groups, has_pieces=bool(pieces))
        rows = triton.load(rows_ref.at[groups], mask=groups < num_groups, other=-1)
        is_row = (rows >= 0) & (rows < num_rows)
        places = jnp.where(is_row, rows, num_rows)[:, None], columns[None, :]  # others are not read or written
        masks = [is_row[:, None] & (columns < array.shape[1])[None, :] for array in state]
        values = [
            triton.load(ref.at[places], mask=mask, other=0.0).astype(jnp.float32)
            for ref, mask in zip(old, masks, strict=True)
        ]
        hyper = [hyper_ref[k] for k in range(len(step.hyper))]
        results = jax.vmap(step_row, in_axes=(0, None, *(0 for _ in state)))(gradients, hyper, *values)
        for ref, array, mask, value in zip(new, state, masks, results, strict=True):
            triton.store(ref.at[places], value.astype(array.dtype), mask=mask)

    out = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in state]
    inputs = (*state, rows, d_output, step.hyper_vector(), *_operands(entries), *pieces)
    grid, num_warps = (pl.cdiv(num_groups, height),), min(height * width * tiling.num_warps // tiling.num_numbers, 16)
    new_table, *new_slots = _call(kernel, "rsembed_step", out, grid, num_warps, *inputs, num_stepped=len(state))
    return new_table, tuple(new_slots)

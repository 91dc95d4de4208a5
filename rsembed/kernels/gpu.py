"""Kernels for NVIDIA GPUs in Pallas, compiled by Triton. Equal inputs give equal bits: nothing is added atomically.

A program of `lookup` sums one bag, a program of `update` sums the gradient of one distinct row and steps it where it
lies. Rows that very many entries share are cut into pieces first, so that no program works long after the others: with
Zipf ids a tenth of a batch can be one row. Where the computation is for no GPU, a direct call runs in Pallas'
interpreter, which is for tests: it is slow.

Source: one program per bag and one per distinct row of the sorted batch, as in FBGEMM's TBE kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from rsembed.kernels import reference
from rsembed.kernels.contract import OutputGradients, Outputs, Segment, Step, Table, as_offsets, as_rows
from rsembed.kernels.devices import target_device
from rsembed.kernels.traced_rules import ELEMENTWISE, evaluate, trace_rule
from rsembed.optimizers import Slots

NAME = "gpu"

_TABLE_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_PRIMITIVES = ELEMENTWISE | {"pow", "log", "log1p", "expm1", "exp2", "tanh", "floor", "ceil", "is_finite"}
_MAX_COLUMNS = 8192


class Tiling(NamedTuple):
    """Sizes into which a GPU program cuts its work: powers of two, as Triton's blocks; not yet tuned on a card.

    Args:
      max_entries: entries of a bag whose rows are read at once, so that many reads are under way.
      max_columns: numbers of a row that one program of a lookup sums.
      max_numbers: numbers that are read at once.
      num_warps: threads of a program, in units of 32.
      piece_entries: a distinct row with more entries than this is summed in pieces of so many.
    """

    max_entries: int = 16
    max_columns: int = 256
    max_numbers: int = 4096
    num_warps: int = 4
    piece_entries: int = 256


tiling = Tiling()


_Pieces = tuple[Int[Array, " bags_plus_1"], Float[Array, "pieces dim"]]
"""Where the pieces of every long bag begin, and the sums of all pieces; a short bag has none."""


def unavailable_because() -> str | None:
    """Why these kernels cannot run here, or None if they can."""
    device = target_device()
    if device.platform != "gpu":
        return f"the Triton kernels run on NVIDIA GPUs, but the computation is for {device.platform}"
    if "NVIDIA" not in device.device_kind:
        return f"the Triton kernels are lowered for NVIDIA GPUs only, not for {device.device_kind}"
    return None


def lookup(table: Table, segments: Sequence[Segment]) -> Outputs:
    """Pooled rows of every segment, float32 `[segment.num_outputs, dim]`; one kernel per segment."""
    _check_table(table)
    return tuple(_pool(table, segment) for segment in segments)


def update(table: Table, slots: Slots, gradients: OutputGradients, step: Step) -> tuple[Table, Slots]:
    """Row gradients and one optimizer step per distinct row, fused: the gradients are never written to memory."""
    rows, entries, _, d_output = reference.group_rows(table.shape[0], gradients)
    if step.rounds(table):
        return reference.apply_rows(table, slots, rows, _lookup_uneven(d_output, [entries])[0], step)
    return _step(table, slots, rows, entries, d_output, step)


def apply_rows(
    table: Table, slots: Slots, rows: Int[Array, " capacity"], gradients: Float[Array, "capacity dim"], step: Step
) -> tuple[Table, Slots]:
    """One optimizer step of distinct `rows`; rows outside the table are padding."""
    if step.rounds(table):
        return reference.apply_rows(table, slots, rows, gradients, step)
    each = jnp.arange(rows.shape[0] + 1, dtype=jnp.int32)
    entries = Segment(each[:-1], each, None, "sum")
    return _step(table, slots, as_rows(rows), entries, gradients.astype(jnp.float32), step, may_be_long=False)


def _lookup_uneven(table: Table, segments: Sequence[Segment]) -> Outputs:
    """Pooled rows of bags with combiner "sum" that may be as long as the batch."""
    _check_table(table)
    return tuple(_pool(table, segment, _long_bags(table, segment)) for segment in segments)


row_gradients = partial(reference.row_gradients, lookup=_lookup_uneven)
lookup_jagged = partial(reference.lookup_jagged, lookup=lookup)


def _check_table(table: Array) -> None:
    if table.dtype not in _TABLE_DTYPES:
        raise NotImplementedError(f"tables of the GPU kernels are float32, bfloat16 or float16, not {table.dtype}")


def _operands(segment: Segment) -> list[Array]:
    """Rows, offsets and, if there are any, weights of a segment; an entry of combiner "none" is a bag of its own."""
    num_entries = segment.rows.shape[0]
    offsets = jnp.arange(num_entries + 1) if segment.offsets is None else segment.offsets
    weights = [] if segment.weights is None else [segment.weights.astype(jnp.float32)]
    return [as_rows(segment.rows), as_offsets(offsets, num_entries), *weights]


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _sum_bag(
    table: PyTree,
    refs: Sequence[PyTree],
    bag: Any,
    columns: Array,
    combiner: str,
    *,
    apart: int = 1,
    has_pieces: bool = False,
) -> Array:
    """Pooled row of one bag, computed inside a kernel.

    Args:
      table: what is pooled.
      refs: `_operands`, and `_Pieces` if there are any; entries of a bag that has some are not read.
      bag: its number.
      columns: which numbers of the rows.
      combiner: of the segment.
      apart: how far apart the bounds of a bag lie from those of the next.
      has_pieces: whether `refs` end with pieces.
    """
    from jax.experimental.pallas import triton

    rows_ref, bounds_ref, *weights_ref = refs
    if has_pieces:
        *weights_ref, first_ref, sums_ref = weights_ref
        first, last = first_ref[bag], first_ref[bag + 1]
    start, stop = bounds_ref[apart * bag], bounds_ref[apart * bag + 1]
    num_rows, dim = table.shape
    width = columns.shape[0]
    block = max(1, min(1 if combiner == "none" else tiling.max_entries, tiling.max_numbers // width))
    is_column = (columns < dim)[None, :]

    def add_block(number: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        total, divisor = sums
        entries = start + number * block + jnp.arange(block, dtype=jnp.int32)
        is_entry = entries < stop
        rows = triton.load(rows_ref.at[entries], mask=is_entry, other=-1)
        is_row = (rows >= 0) & (rows < num_rows)
        gains = is_row.astype(jnp.float32)
        if weights_ref:  # of entries without a row they may be anything, and must not lead to a read outside the table
            weights = triton.load(weights_ref[0].at[entries], mask=is_entry, other=0.0)
            gains = jnp.where(is_row, weights, 0.0)
        # Rows that contribute nothing are not read: they may hold anything, NaN included.
        is_read = (gains != 0.0)[:, None] & is_column
        places = jnp.where(is_row, rows, 0)[:, None], columns[None, :]
        vectors = triton.load(table.at[places], mask=is_read, other=0.0).astype(jnp.float32)
        total = total + jnp.sum(gains[:, None] * vectors, axis=0)
        return total, divisor + jnp.sum(gains if combiner == "mean" else gains * gains)

    def blocks_of(number: Any) -> PyTree:
        return (jnp.maximum(number, 0) + block - 1) // block

    num_blocks, zeros = blocks_of(stop - start), jnp.zeros(width, jnp.float32)
    if has_pieces:
        num_blocks = jnp.where(last > first, 0, num_blocks)
    total, divisor = jax.lax.fori_loop(0, num_blocks, add_block, (zeros, jnp.zeros((), jnp.float32)))
    if has_pieces:

        def add_pieces(number: Any, total: Array) -> Array:
            own = first + number * block + jnp.arange(block, dtype=jnp.int32)
            is_own = (own < last)[:, None] & is_column
            return total + jnp.sum(triton.load(sums_ref.at[own[:, None], columns[None, :]], mask=is_own, other=0.0), 0)

        total = jax.lax.fori_loop(0, blocks_of(last - first), add_pieces, total)
    if combiner in ("sum", "none"):
        return total
    divisor = divisor if combiner == "mean" else jnp.sqrt(divisor)
    return jnp.where(divisor == 0.0, 0.0, total / jnp.where(divisor == 0.0, 1.0, divisor))


def _long_bags(table: Array, segment: Segment) -> _Pieces | None:
    """Sums of the pieces of bags with many entries; None where a batch is too small to have such bags."""
    length = tiling.piece_entries
    rows, offsets, *weights = _operands(segment)
    if rows.shape[0] <= length or 0 in (table.shape[0], table.shape[1], segment.num_outputs):
        return None
    lengths = offsets[1:] - offsets[:-1]
    num_own = jnp.where(lengths > length, (lengths + length - 1) // length, 0)
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(num_own, dtype=jnp.int32)])
    num_pieces = 2 * (rows.shape[0] // length)  # n > length entries make less than 2 n / length pieces
    piece = jnp.arange(num_pieces, dtype=jnp.int32)
    bag = jnp.searchsorted(first, piece, side="right").astype(jnp.int32) - 1
    bag = jnp.minimum(bag, segment.num_outputs - 1)
    start = offsets[bag] + (piece - first[bag]) * length
    stop = jnp.where(piece < first[-1], jnp.minimum(start + length, offsets[bag + 1]), start)
    bounds = jnp.stack([start, stop], axis=1).reshape(-1)
    return first, _sum_bags(table, [rows, bounds, *weights], num_pieces, "sum", apart=2)


def _pool(table: Array, segment: Segment, pieces: _Pieces | None = None) -> Float[Array, "outputs dim"]:
    (num_rows, dim), num_outputs = table.shape, segment.num_outputs
    if 0 in (num_rows, dim, num_outputs, segment.rows.shape[0]):
        return jnp.zeros((num_outputs, dim), jnp.float32)
    return _sum_bags(table, _operands(segment), num_outputs, segment.combiner, pieces=pieces)


def _sum_bags(
    table: Array, operands: Sequence[Array], num_bags: int, combiner: str, *, apart: int = 1, pieces: Any = None
) -> Float[Array, "num_bags dim"]:
    """Pooled rows, one program a bag; bag `b` has bounds `apart * b` and `apart * b + 1` of the second operand."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    dim, has_pieces = table.shape[1], pieces is not None
    width = min(tiling.max_columns, _power_of_two(dim))

    def kernel(table_ref: Any, *refs: Any) -> None:
        *others, out_ref = refs
        bag, columns = pl.program_id(0), pl.program_id(1) * width + jnp.arange(width, dtype=jnp.int32)
        pooled = _sum_bag(table_ref, others, bag, columns, combiner, apart=apart, has_pieces=has_pieces)
        triton.store(out_ref.at[bag, columns], pooled, mask=columns < dim)

    out, grid = jax.ShapeDtypeStruct((num_bags, dim), jnp.float32), (num_bags, pl.cdiv(dim, width))
    return _call(kernel, "rsembed_pool", out, grid, table, *operands, *(pieces or ()))


def _call(kernel: Any, name: str, out: Any, grid: tuple[int, ...], *operands: Array, num_stepped: int = 0) -> PyTree:
    """Runs a program for every place of the grid; the first `num_stepped` operands become results where they lie."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    call = pl.pallas_call(
        kernel,
        out_shape=out,
        grid=grid,
        input_output_aliases={number: number for number in range(num_stepped)},
        interpret=target_device().platform != "gpu",
        name=name,
        compiler_params=triton.CompilerParams(num_warps=tiling.num_warps),
    )
    return call(*operands)


def _step(
    table: Table,
    slots: Slots,
    rows: Int[Array, " capacity"],
    entries: Segment,
    d_output: Array,
    step: Step,
    *,
    may_be_long: bool = True,
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
    operands, pieces = _operands(entries), _long_bags(d_output, entries) if may_be_long else None

    def kernel(*refs: Any) -> None:
        old, new = refs[: len(state)], refs[-len(state) :]
        rows_ref, d_ref, hyper_ref, *others = refs[len(state) : -len(state)]
        group, columns = pl.program_id(0), jnp.arange(width, dtype=jnp.int32)
        gradient = _sum_bag(d_ref, others, group, columns, "sum", has_pieces=pieces is not None)
        is_row = (rows_ref[group] >= 0) & (rows_ref[group] < num_rows)
        row = jnp.where(is_row, rows_ref[group], 0)
        masks = [is_row & (columns < array.shape[1]) for array in state]
        values = [
            triton.load(ref.at[row, columns], mask=mask, other=0.0).astype(jnp.float32)
            for ref, mask in zip(old, masks, strict=True)
        ]
        arguments = [
            (value,) if array.shape[1] == dim else jnp.full(width, jnp.sum(value), jnp.float32)
            for array, value in zip(state, values, strict=True)
        ]
        numbers = [jnp.full(width, hyper_ref[k], jnp.float32) for k in range(len(step.hyper))]
        stepped = evaluate(traced, [*arguments, (gradient,), *numbers], dim=dim)
        for ref, array, mask, value in zip(new, state, masks, stepped, strict=True):
            value = value[0] if isinstance(value, tuple) else value
            triton.store(ref.at[row, columns], value.astype(array.dtype), mask=mask)

    out = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in state]
    inputs = (*state, rows, d_output, step.hyper_vector(), *operands, *(pieces or ()))
    new_table, *new_slots = _call(kernel, "rsembed_step", out, (rows.shape[0],), *inputs, num_stepped=len(state))
    return new_table, tuple(new_slots)

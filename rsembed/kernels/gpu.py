"""Kernels for NVIDIA GPUs in Pallas, compiled by Triton. Equal inputs give equal bits: nothing is added atomically.

A program of `lookup` sums one bag, a program of `update` sums the gradient of one distinct row and steps it where it
lies. Where the computation is for no GPU, a direct call runs in Pallas' interpreter, which is for tests: it is slow.

Source: one program per bag and one per distinct row of the sorted batch, as in FBGEMM's TBE kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rsembed.kernels import reference
from rsembed.kernels.contract import OutputGradients, Outputs, Segment, Step, Table, as_rows
from rsembed.kernels.devices import target_device
from rsembed.kernels.traced_rules import ELEMENTWISE, Row, evaluate, trace_rule
from rsembed.optimizers import Slots

NAME = "gpu"

_TABLE_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_PRIMITIVES = ELEMENTWISE | {"pow", "log", "log1p", "expm1", "exp2", "tanh", "floor", "ceil", "is_finite"}
# Triton's blocks have powers of two as sizes. A block of entries is read at once, so that many reads are under way.
_MAX_COLUMNS, _MAX_ENTRIES, _BLOCK_NUMBERS = 8192, 16, 4096


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
        return reference.apply_rows(table, slots, rows, lookup(d_output, [entries])[0], step)
    return _step(table, slots, rows, entries, d_output, step)


def apply_rows(
    table: Table, slots: Slots, rows: Int[Array, " capacity"], gradients: Float[Array, "capacity dim"], step: Step
) -> tuple[Table, Slots]:
    """One optimizer step of distinct `rows`; rows outside the table are padding."""
    if step.rounds(table):
        return reference.apply_rows(table, slots, rows, gradients, step)
    each = jnp.arange(rows.shape[0] + 1, dtype=jnp.int32)
    entries = Segment(each[:-1], each, None, "sum")
    return _step(table, slots, as_rows(rows), entries, gradients.astype(jnp.float32), step)


row_gradients = partial(reference.row_gradients, lookup=lookup)
lookup_jagged = partial(reference.lookup_jagged, lookup=lookup)
weight_gradients, rows_by_bag, allocate = reference.weight_gradients, reference.rows_by_bag, reference.allocate
gather_rows, scatter_rows = reference.gather_rows, reference.scatter_rows


def _check_table(table: Array) -> None:
    if table.dtype not in _TABLE_DTYPES:
        raise NotImplementedError(f"tables of the GPU kernels are float32, bfloat16 or float16, not {table.dtype}")


def _operands(segment: Segment) -> list[Array]:
    """Rows, offsets and, if there are any, weights of a segment; an entry of combiner "none" is a bag of its own."""
    offsets = segment.offsets
    if offsets is None:
        offsets = jnp.arange(segment.rows.shape[0] + 1, dtype=jnp.int32)
    offsets = jnp.clip(offsets, 0, segment.rows.shape[0]).astype(jnp.int32)
    weights = [] if segment.weights is None else [segment.weights.astype(jnp.float32)]
    return [as_rows(segment.rows), offsets, *weights]


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _sum_bag(refs: Sequence[Any], table: Any, bag: Any, columns: Array, combiner: str) -> Array:
    """Pooled row of one bag, in a kernel; `refs` are those of `_operands`."""
    from jax.experimental.pallas import triton

    rows_ref, offsets_ref, *weights_ref = refs
    num_rows, dim = table.shape
    width = columns.shape[0]
    block = max(1, min(_MAX_ENTRIES, _BLOCK_NUMBERS // width))
    start, stop = offsets_ref[bag], offsets_ref[bag + 1]

    def add_block(number: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        total, divisor = sums
        entries = start + number * block + jnp.arange(block, dtype=jnp.int32)
        is_entry = entries < stop
        rows = triton.load(rows_ref.at[entries], mask=is_entry, other=-1)
        gains = jnp.where((rows >= 0) & (rows < num_rows), 1.0, 0.0)
        if weights_ref:
            gains = gains * triton.load(weights_ref[0].at[entries], mask=is_entry, other=0.0)
        # Rows that contribute nothing are not read: they may hold anything, NaN included.
        is_read = (gains != 0.0)[:, None] & (columns < dim)[None, :]
        places = jnp.where(gains != 0.0, rows, 0)[:, None], columns[None, :]
        vectors = triton.load(table.at[places], mask=is_read, other=0.0).astype(jnp.float32)
        total = total + jnp.sum(gains[:, None] * vectors, axis=0)
        return total, divisor + jnp.sum(gains if combiner == "mean" else gains * gains)

    num_blocks = (jnp.maximum(stop - start, 0) + block - 1) // block
    zeros = jnp.zeros(width, jnp.float32), jnp.zeros((), jnp.float32)
    total, divisor = jax.lax.fori_loop(0, num_blocks, add_block, zeros)
    if combiner in ("sum", "none"):
        return total
    divisor = divisor if combiner == "mean" else jnp.sqrt(divisor)
    return jnp.where(divisor == 0.0, 0.0, total / jnp.where(divisor == 0.0, 1.0, divisor))


def _pool(table: Array, segment: Segment) -> Float[Array, "outputs dim"]:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (num_rows, dim), num_outputs = table.shape, segment.num_outputs
    if 0 in (num_rows, dim, num_outputs, segment.rows.shape[0]):
        return jnp.zeros((num_outputs, dim), jnp.float32)
    width = min(256, _power_of_two(dim))

    def kernel(table_ref: Any, *refs: Any) -> None:
        *operands, out_ref = refs
        bag = pl.program_id(0)
        columns = pl.program_id(1) * width + jnp.arange(width, dtype=jnp.int32)
        pooled = _sum_bag(operands, table_ref, bag, columns, segment.combiner)
        triton.store(out_ref.at[bag, columns], pooled, mask=columns < dim)

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((num_outputs, dim), jnp.float32),
        grid=(num_outputs, pl.cdiv(dim, width)),
        interpret=target_device().platform != "gpu",
        name="rsembed_pool",
        compiler_params=triton.CompilerParams(),
    )
    return call(table, *_operands(segment))


def _step(
    table: Table, slots: Slots, rows: Int[Array, " capacity"], entries: Segment, d_output: Array, step: Step
) -> tuple[Table, Slots]:
    """Steps `rows`, whose gradients are what `entries` pool from `d_output`; table and slots stay where they are."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    _check_table(table)
    traced = trace_rule(step.rule, table, slots, len(step.hyper), elementwise=_PRIMITIVES)
    (num_rows, dim), state = table.shape, (table, *slots)
    if 0 in (num_rows, dim, rows.shape[0]):
        return table, slots
    width = _power_of_two(dim)
    if width > _MAX_COLUMNS:
        raise NotImplementedError(f"the GPU step holds rows of up to {_MAX_COLUMNS} numbers, not {dim}")
    operands = _operands(entries)

    def kernel(*refs: Any) -> None:
        old, new = refs[: len(state)], refs[-len(state) :]
        rows_ref, d_ref, hyper_ref, *segment = refs[len(state) : -len(state)]
        group = pl.program_id(0)
        columns = jnp.arange(width, dtype=jnp.int32)
        gradient = _sum_bag(segment, d_ref, group, columns, "sum")
        is_row = (rows_ref[group] >= 0) & (rows_ref[group] < num_rows)
        row = jnp.where(is_row, rows_ref[group], 0)
        masks = [is_row & (columns < array.shape[1]) for array in state]
        values = [
            triton.load(ref.at[row, columns], mask=mask, other=0.0).astype(jnp.float32)
            for ref, mask in zip(old, masks, strict=True)
        ]
        arguments = [
            Row((value,)) if array.shape[1] == dim else jnp.full(width, jnp.sum(value), jnp.float32)
            for array, value in zip(state, values, strict=True)
        ]
        numbers = [jnp.full(width, hyper_ref[k], jnp.float32) for k in range(len(step.hyper))]
        stepped = evaluate(traced, [*arguments, Row((gradient,)), *numbers], dim=dim)
        for ref, array, mask, value in zip(new, state, masks, stepped, strict=True):
            value = value.pieces[0] if isinstance(value, Row) else value
            triton.store(ref.at[row, columns], value.astype(array.dtype), mask=mask)

    call = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in state],
        grid=(rows.shape[0],),
        input_output_aliases={number: number for number in range(len(state))},
        interpret=target_device().platform != "gpu",
        name="rsembed_step",
        compiler_params=triton.CompilerParams(),
    )
    new_table, *new_slots = call(*state, rows, d_output, step.hyper_vector(), *operands)
    return new_table, tuple(new_slots)

"""Kernels for the SparseCores of TPUs: the calls of `reference.py`, brought to the sizes that tiles can take.

Serve, to those who ask, where the computation is for a TPU that has SparseCores. Tables and slots are float32. Rows
should be a multiple of 8 numbers long (16 on TPU7x): others are filled up, which copies the table in every call.
`row_layout` is how tables should lie, or XLA copies them as well.

No kernel here has run on a TPU: their bodies are simulated in the tests, and they compile for v5p, v6e and TPU7x.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Float, Int, PyTree

from rsembed.kernels import reference
from rsembed.kernels.contract import NO_ROW, OutputGradients, Outputs, Segment, Step, Table, as_offsets, as_rows
from rsembed.kernels.devices import target_device
from rsembed.kernels.traced_rules import trace_rule
from rsembed.optimizers import Slots

NAME = "sparsecore"


def unavailable_because() -> str | None:
    """Why these kernels cannot run here, or None if they can."""
    device = target_device()
    if device.platform != "tpu":
        return f"the SparseCore kernels run on TPUs, but the computation is for {device.platform}"
    try:
        _tiles().num_lanes()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return f"{device.device_kind}: {error}"
    return None


def _tiles() -> PyTree:
    """The module of the kernels themselves, imported at the first call, since importing Pallas is slow."""
    from rsembed.kernels import sparsecore_tiles

    return sparsecore_tiles


def row_layout(sharding: Sharding) -> PyTree:
    """Memory layout of tables and slots `[rows, dim]` that tiles read without a copy of the whole table.

    Give it to `jax.jit` in `in_shardings` and `out_shardings`. On other devices rows lie one after another.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> layout = row_layout(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
      >>> jax.jit(lambda table: table + 1.0, in_shardings=layout, out_shardings=layout)(jnp.zeros((2, 3))).shape
      (2, 3)
    """
    from jax.experimental.layout import Format, Layout

    devices: Any = sharding.device_set  # whose type the stubs of some versions do not know
    is_tpu = any(device.platform == "tpu" for device in devices)
    return Format(Layout(major_to_minor=(0, 1), tiling=((8,),) if is_tpu else None), sharding)


def lookup(table: Table, segments: Sequence[Segment]) -> Outputs:
    """Pooled rows of every segment, float32 `[segment.num_outputs, dim]`; one kernel per segment."""
    _check_table(table)
    wide = _fill(table, _tiles().num_lanes(), axis=1)
    return tuple(_pool(table.shape, wide, segment) for segment in segments)


def apply_rows(
    table: Table, slots: Slots, rows: Int[Array, " capacity"], gradients: Float[Array, "capacity dim"], step: Step
) -> tuple[Table, Slots]:
    """One optimizer step of distinct `rows`; rows outside the table are padding.

    A slot of one number per row is read and written by XLA: its rows are below the 32 bytes that a tile moves at least,
    and tiles that write neighbours could undo each other.
    """
    _check_table(table)
    traced = trace_rule(step.rule, table, slots, len(step.hyper))
    num_rows, dim = table.shape
    if 0 in (num_rows, dim, rows.shape[0]):
        return table, slots
    tiles, arrays = _tiles(), (table, *slots)
    is_narrow = np.asarray([array.shape[1] != dim for array in arrays])
    wide_first = np.argsort(is_narrow, kind="stable")
    places = np.argsort(wide_first).tolist()
    fill_columns = partial(_fill, multiple=tiles.num_lanes(), axis=1)
    state = [fill_columns(arrays[k]) for k in wide_first if not is_narrow[k]]
    narrow = [arrays[k] for k in wide_first if is_narrow[k]]
    rows, chunk = as_rows(rows), tiles.chunk_rows(state[0].shape[1], len(state) + 1)
    is_row = (rows >= 0) & (rows < num_rows)
    ids = _fill(jnp.where(is_row, rows, tiles.NO_ID), chunk, tiles.NO_ID)
    columns = (ids.shape[0], tiles.num_lanes())
    old = reference.gather_rows(narrow, ids)
    new_state, numbers = tiles.step(
        traced,
        dim,
        state,
        [jnp.broadcast_to(number, columns) for number in old],
        ids,
        _fill(fill_columns(gradients.astype(jnp.float32)), chunk),
        jnp.repeat(step.hyper_vector(), tiles.num_lanes()),
        places,
    )
    new_narrow = reference.scatter_rows(narrow, ids, [number[:, :1] for number in numbers]) if narrow else ()
    stepped = [*(array[:, :dim] for array in new_state), *new_narrow]
    new_table, *new_slots = (stepped[place] for place in places)
    return new_table, tuple(new_slots)


def update(table: Table, slots: Slots, gradients: OutputGradients, step: Step) -> tuple[Table, Slots]:
    """Row gradients and one optimizer step per distinct row: two kernels."""
    return apply_rows(table, slots, *row_gradients(table.shape[0], gradients), step)


row_gradients = partial(reference.row_gradients, lookup=lookup)
lookup_jagged = partial(reference.lookup_jagged, lookup=lookup)


def _check_table(table: Array) -> None:
    if table.dtype != jnp.float32:
        raise NotImplementedError(f"tables of the SparseCore kernels are float32, not {table.dtype}")


def _fill(array: Array, multiple: int, value: float = 0.0, *, axis: int = 0) -> Array:
    """As many entries of `value` behind the array as the length of an axis lacks to a multiple."""
    missing = [-length % multiple if number == axis else 0 for number, length in enumerate(array.shape)]
    return jnp.pad(array, [(0, own) for own in missing], constant_values=value) if any(missing) else array


def _pool(shape: tuple[int, ...], table: Array, segment: Segment) -> Float[Array, "outputs dim"]:
    """Pooled rows of one segment; `table` may have more columns than `shape` says, as padding."""
    (num_rows, dim), num_outputs, tiles = shape, segment.num_outputs, _tiles()
    if 0 in (num_rows, dim, num_outputs, segment.rows.shape[0]):
        return jnp.zeros((num_outputs, dim), jnp.float32)
    bags, gains = reference.entry_gains(segment, num_rows)
    ids = jnp.where(gains == 0.0, 0, as_rows(segment.rows))
    if segment.offsets is None:
        vectors = tiles.gather(table, _fill(ids, tiles.chunk_rows(table.shape[1], 1), 0))[:num_outputs, :dim]
        return jnp.where(gains[:, None] == 0.0, 0.0, gains[:, None] * vectors)
    chunk = tiles.chunk_rows(table.shape[1], 2)
    bounds = _chunk_bounds(as_offsets(segment.offsets, ids.shape[0]), chunk, tiles.num_lanes())
    entries = _fill(ids, chunk, 0), _fill(gains, chunk, 0.0), _fill(bags.astype(jnp.int32), chunk, NO_ROW)
    return tiles.pool(table, *entries, bounds, -(-num_outputs // chunk) * chunk)[:num_outputs, :dim]


def _chunk_bounds(offsets: Int[Array, " bags_plus_1"], chunk: int, lanes: int) -> Int[Array, " bounds"]:
    """Chunks of entries that every chunk of bags needs: the first, and the one behind the last."""
    starts = offsets[:-1:chunk] // chunk
    ends = -(-jnp.concatenate([offsets[chunk:-1:chunk], offsets[-1:]]) // chunk)
    return jnp.pad(jnp.stack([starts, ends], axis=1), ((0, 0), (0, lanes - 2))).reshape(-1)

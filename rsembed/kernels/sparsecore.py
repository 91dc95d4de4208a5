"""Pallas kernels for the SparseCores of TPUs.

`lookup`, `apply_rows`, `update` and `row_gradients` call the Pallas kernels `gather`,
`pool_on_tiles` and `step_rows`, and compute the same results as the functions with the same names
in `reference.py`. SparseCore kernels run only on TPUs that have SparseCores, and only if the user
selects the implementation `sparsecore`. Tables and slots are float32. If the row length is not a
multiple of 8 (16 on TPU7x), every call copies the whole table to pad its rows. Tables should have
the memory layout of `row_layout`, because XLA copies a table that has a different layout.

A SparseCore has 16 tiles. A tile moves rows between its memory and the device's memory by indirect
copies, one row per id, and computes on vectors of 8 or 16 lanes. The rows, bags or ids of a call
are divided into chunks, which are distributed in turn over the tiles of all cores.

The SparseCore kernels have never run on a TPU. The tests simulate the body of each kernel, and
compile the kernels for v5p, v6e and TPU7x.

Source: the Pallas SparseCore guide and examples of JAX.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.sharding import Sharding
from jaxtyping import Array, Float, Int

from rsembed.kernels import reference
from rsembed.kernels.contract import (
    NO_ROW,
    Index,
    Ref,
    Step,
    Table,
    as_offsets,
    as_rows,
    check_dtype,
    is_between,
)
from rsembed.kernels.devices import target_device
from rsembed.kernels.reference import Entries
from rsembed.kernels.traced_rules import Row, evaluate, trace_rule
from rsembed.optimizers.base import Slots

NAME = "sparsecore"
_TABLE_DTYPES = ("float32",)

SUBLANES = 8
"""A copy of several rows must start at a row number that is a multiple of `SUBLANES`."""
MAX_CHUNK_ROWS = 64
"""Maximum number of rows in a chunk, a multiple of `SUBLANES`."""
TILE_BYTES = 160 * 1024
"""Maximum size in bytes of a tile's buffers for rows, less than a tile's memory on every chip."""
NO_ID = -1
"""Id that marks padding in `step_rows`. Indirect copies skip the id `NO_ID`."""


def unavailable_because() -> str | None:
    """Reason why the SparseCore kernels cannot run here, or None if they can."""
    device = target_device()
    platform = device.platform
    if platform != "tpu":
        return f"the SparseCore kernels run on TPUs, but the computation is for {platform}"
    try:
        num_lanes()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return f"{device.device_kind}: {error}"
    return None


def row_layout(sharding: Sharding) -> Any:
    """Memory layout of tables and slots `[rows, dim]` that kernels read without copying the table.

    Pass the result of `row_layout` to `jax.jit` in `in_shardings` and `out_shardings`. On devices
    other than TPUs, the result is the row-major layout.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> layout = row_layout(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
      >>> add = jax.jit(lambda table: table + 1.0, in_shardings=layout, out_shardings=layout)
      >>> add(jnp.zeros((2, 3))).shape
      (2, 3)
    """
    from jax.experimental.layout import Format, Layout

    # The type of `devices` is `Any`, because the type stubs of some JAX versions lack `device_set`.
    devices: Any = sharding.device_set
    tiling = None
    if any(device.platform == "tpu" for device in devices):
        tiling = ((8,),)
    return Format(Layout(major_to_minor=(0, 1), tiling=tiling), sharding)


def pool(table: Table, entries: Entries) -> Float[Array, "outputs dim"]:
    """Pooled rows of every bag, in float32. One kernel call pools all bags of `entries`."""
    check_dtype(table, NAME, _TABLE_DTYPES)
    num_rows, dim = table.shape
    num_outputs = entries.num_outputs
    num_entries = entries.rows.shape[0]
    if 0 in (num_rows, dim, num_outputs, num_entries):
        return jnp.zeros((num_outputs, dim), jnp.float32)
    bags, gains, _ = reference.entry_gains(entries, num_rows)
    ids = jnp.where(gains == 0.0, 0, as_rows(entries.rows))
    table = _fill(table, num_lanes(), axis=1)
    width = table.shape[1]
    if entries.offsets is None:
        chunk = chunk_rows(width, 1)
        vectors = gather(table, _fill(ids, chunk, 0))
        terms = gains[:, None] * vectors[:num_outputs, :dim]
        return jnp.where(gains[:, None] == 0.0, 0.0, terms)
    chunk = chunk_rows(width, 2)
    # For each chunk of bags, the kernel reads all chunks of entries that contain entries of these
    # bags: `starts` is the index of the first of these chunks, and `ends` the index after the last.
    offsets = as_offsets(entries.offsets, ids.shape[0])
    starts = offsets[:-1:chunk] // chunk
    last_entries = jnp.concatenate([offsets[chunk:-1:chunk], offsets[-1:]])
    ends = -(-last_entries // chunk)
    bounds = jnp.stack([starts, ends], axis=1)
    bounds = _fill(bounds, num_lanes(), 0, axis=1)
    num_chunks = -(-num_outputs // chunk)
    pooled = pool_on_tiles(
        table,
        _fill(ids, chunk, 0),
        _fill(gains, chunk, 0.0),
        _fill(bags.astype(jnp.int32), chunk, NO_ROW),
        bounds.reshape(-1),
        num_chunks * chunk,
    )
    return pooled[:num_outputs, :dim]


lookup = partial(reference.lookup, pool=pool)


def apply_rows(
    table: Table,
    slots: Slots,
    rows: Int[Array, " capacity"],
    gradients: Float[Array, "capacity dim"],
    step: Step,
) -> tuple[Table, Slots]:
    """Applies one optimizer step to distinct `rows`, and returns the new table and slots.

    Row numbers outside the table are padding. XLA, not the kernel, gathers and scatters slots with
    only one number per row. A tile writes at least 32 bytes at once, so two tiles that write
    neighbouring numbers of a slot could overwrite each other's results.
    """
    check_dtype(table, NAME, _TABLE_DTYPES)
    traced = trace_rule(step.rule, table, slots, len(step.hyper))
    num_rows, dim = table.shape
    if 0 in (num_rows, dim, rows.shape[0]):
        return table, slots
    arrays = (table, *slots)
    wide: list[Array] = []
    narrow: list[Array] = []
    # `order[k]` is the index of `arrays[k]` in `[*wide, *narrow]`.
    order = []
    num_wide = sum(array.shape[1] == dim for array in arrays)
    for array in arrays:
        if array.shape[1] == dim:
            order.append(len(wide))
            wide.append(array)
        else:
            order.append(num_wide + len(narrow))
            narrow.append(array)
    lanes = num_lanes()
    state = [_fill(array, lanes, axis=1) for array in wide]
    chunk = chunk_rows(state[0].shape[1], len(state) + 1)
    rows = as_rows(rows)
    is_row = is_between(rows, 0, num_rows)
    ids = jnp.where(is_row, rows, NO_ID)
    ids = _fill(ids, chunk, NO_ID)
    numbers = []
    for number in reference.gather_rows(narrow, ids):
        in_all_lanes = jnp.broadcast_to(number, (ids.shape[0], lanes))
        numbers.append(in_all_lanes)
    gradients = _fill(gradients.astype(jnp.float32), lanes, axis=1)
    gradients = _fill(gradients, chunk)
    hyper = jnp.repeat(step.hyper_vector(), lanes)
    new_state, new_numbers = step_rows(
        traced,
        dim,
        state,
        numbers,
        ids,
        gradients,
        hyper,
        order,
    )
    stepped = [array[:, :dim] for array in new_state]
    if narrow:
        first_lanes = [number[:, :1] for number in new_numbers]
        stepped += reference.scatter_rows(narrow, ids, first_lanes)
    new_table, *new_slots = [stepped[position] for position in order]
    return new_table, tuple(new_slots)


row_gradients = partial(reference.row_gradients, pool=pool)
# One kernel sums the gradients of each row, and a second kernel updates the rows.
update = partial(reference.update, row_gradients=row_gradients, apply_rows=apply_rows)


def _fill(
    array: Array,
    multiple: int,
    value: float = 0.0,
    *,
    axis: int = 0,
) -> Array:
    """The array, with one axis padded with `value` to the next multiple of `multiple`."""
    missing = -array.shape[axis] % multiple
    if missing == 0:
        return array
    padding = [(0, 0)] * array.ndim
    padding[axis] = (0, missing)
    return jnp.pad(array, padding, constant_values=value)


def _pallas() -> Any:
    """The modules of Pallas for kernels, TPUs and SparseCores.

    Importing Pallas takes seconds, so the import is inside a function.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu, tpu_sc as plsc

    return pl, pltpu, plsc


def num_lanes() -> int:
    """Number of lanes of a vector on the target chip.

    Raises: RuntimeError: the chip has no SparseCores.
    """
    _, _, plsc = _pallas()
    return plsc.get_sparse_core_info().num_lanes


def chunk_rows(dim: int, num_buffers: int) -> int:
    """Number of rows per chunk, so that `num_buffers` chunks fit into `TILE_BYTES`.

    The result is the largest of the numbers 64, 32, 16 and 8 for which `num_buffers` chunks fit.

    Args:
      dim: length of a row, with padding.
      num_buffers: number of chunks that a tile holds at the same time.

    Raises: NotImplementedError: `num_buffers` chunks of 8 rows are too large for the memory of a
      tile.
    """
    row_bytes = num_buffers * dim * 4
    rows = MAX_CHUNK_ROWS
    while rows > SUBLANES and rows * row_bytes > TILE_BYTES:
        rows //= 2
    if rows * row_bytes > TILE_BYTES:
        raise NotImplementedError(
            f"{num_buffers} buffers of {rows} rows of {dim} numbers do not fit a tile's memory",
        )
    return rows


def _on_tiles(
    body: Callable[..., None],
    *,
    out: object,
    scratch: Sequence[object],
) -> Callable[..., Any]:
    """Function that runs `body` on every tile of every SparseCore.

    Args:
      body: kernel that gets references to all operands, results and scratch buffers.
      out: shapes of the results.
      scratch: types of the buffers in a tile's memory.
    """
    pl, pltpu, plsc = _pallas()
    info = plsc.get_sparse_core_info()
    mesh = plsc.VectorSubcoreMesh(
        core_axis_name="core",
        subcore_axis_name="tile",
        num_cores=info.num_cores,
        num_subcores=info.num_subcores,
    )
    # Indirect copies need contiguous rows, so the tiled layout of the TensorCore is disabled.
    params = pltpu.CompilerParams(use_tc_tiling_on_sc=False, needs_layout_passes=False)
    return pl.kernel(
        body,
        out_type=out,
        mesh=mesh,
        scratch_types=list(scratch),
        compiler_params=params,
    )


def _deal(num_chunks: int, work: Callable[[Index], None]) -> None:
    """Runs `work(chunk)` for this tile's share of the chunks: every `n`-th chunk, for `n` tiles."""
    pl, _, plsc = _pallas()
    info = plsc.get_sparse_core_info()
    first_tile = lax.axis_index("core") * info.num_subcores
    tile = first_tile + lax.axis_index("tile")
    num_tiles = info.num_cores * info.num_subcores
    run = pl.loop(tile, num_chunks, step=num_tiles)
    run(work)


def _span(chunk: Index, size: int) -> Index:
    """Slice that selects chunk number `chunk` of an array, where a chunk has `size` entries."""
    pl, _, _ = _pallas()
    start = pl.multiple_of(chunk * size, size)
    return pl.ds(start, size)


def _lanes(dim: int) -> list[Index]:
    """Slices that divide a row of `dim` numbers into vectors."""
    pl, _, _ = _pallas()
    lanes = num_lanes()
    return [pl.ds(start, lanes) for start in range(0, dim, lanes)]


def _lane(vector: Array, lane: int) -> Array:
    """The number in one lane of a vector, as a scalar."""
    is_lane = lax.iota(jnp.int32, num_lanes()) == lane
    return jnp.sum(jnp.where(is_lane, vector, 0))


def gather(
    table: Float[Array, "rows dim"],
    ids: Int[Array, " nnz"],
) -> Float[Array, "nnz dim"]:
    """Row `ids[k]` of the table for every `k`.

    All ids must be rows of the table, and the number of ids must be a multiple of the chunk size.
    """
    _, pltpu, _ = _pallas()
    dim = table.shape[1]
    num_ids = ids.shape[0]
    chunk = chunk_rows(dim, 1)

    def body(
        table_hbm: Ref,
        ids_hbm: Ref,
        out_hbm: Ref,
        ids_v: Ref,
        rows_v: Ref,
    ) -> None:
        def work(number: Index) -> None:
            pltpu.sync_copy(ids_hbm.at[_span(number, chunk)], ids_v)
            pltpu.sync_copy(table_hbm.at[ids_v], rows_v)
            pltpu.sync_copy(rows_v, out_hbm.at[_span(number, chunk)])

        _deal(num_ids // chunk, work)

    out = jax.ShapeDtypeStruct((num_ids, dim), jnp.float32)
    scratch = [
        pltpu.VMEM((chunk,), jnp.int32),
        pltpu.VMEM((chunk, dim), jnp.float32),
    ]
    kernel = _on_tiles(body, out=out, scratch=scratch)
    return kernel(table, ids)


def pool_on_tiles(
    table: Float[Array, "rows dim"],
    ids: Int[Array, " nnz"],
    gains: Float[Array, " nnz"],
    bags: Int[Array, " nnz"],
    bounds: Int[Array, " bounds"],
    num_bags: int,
) -> Float[Array, "bags dim"]:
    """Sum of `gain * row` over the entries of every bag.

    Args:
      table: the table, with every row padded to a multiple of the number of lanes.
      ids: row number of every entry. The row number must be valid even if the gain is 0, because
        the kernel reads the rows of all entries.
      gains: factor by which the row of every entry is multiplied. An entry with gain 0 adds
        nothing, even if its row contains NaN.
      bags: index of the bag of every entry, ascending except for entries with gain 0.
      bounds: for every chunk of bags, a vector that tells which chunks of entries to read. Lane 0
        is the index of the first chunk of entries, lane 1 is the index after the last chunk, and
        all other lanes are zero.
      num_bags: number of bags. Both `num_bags` and the number of entries are multiples of the chunk
        size.
    """
    pl, pltpu, plsc = _pallas()
    dim = table.shape[1]
    chunk = chunk_rows(dim, 2)
    lanes = num_lanes()

    def body(
        table_hbm: Ref,
        ids_hbm: Ref,
        gains_hbm: Ref,
        bags_hbm: Ref,
        bounds_hbm: Ref,
        out_hbm: Ref,
        ids_v: Ref,
        gains_v: Ref,
        bags_v: Ref,
        bounds_v: Ref,
        rows_v: Ref,
        out_v: Ref,
    ) -> None:
        def add_entry(entry: Index, first_bag: Index) -> None:
            index = [jnp.full(lanes, entry, jnp.int32)]
            gain = plsc.load_gather(gains_v, index)
            bag = plsc.load_gather(bags_v, index) - first_bag
            # A chunk of entries can contain entries of bags outside the current chunk of bags.
            is_added = is_between(bag, 0, chunk) & (gain != 0.0)
            safe_bag = jnp.where(is_added, bag, 0)
            starts = range(0, dim, lanes)
            for start, span in zip(starts, _lanes(dim), strict=True):
                columns = lax.iota(jnp.int32, lanes) + start
                terms = gain * rows_v[entry, span]
                plsc.addupdate_scatter(out_v, [safe_bag, columns], terms, mask=is_added)

        def work(number: Index) -> None:
            @pl.loop(0, chunk)
            def _(bag: Index) -> None:
                for span in _lanes(dim):
                    out_v[bag, span] = jnp.zeros(lanes, jnp.float32)

            pltpu.sync_copy(bounds_hbm.at[_span(number, lanes)], bounds_v)
            limits = bounds_v[...]

            @pl.loop(_lane(limits, 0), _lane(limits, 1))
            def _(entries: Index) -> None:
                pltpu.sync_copy(ids_hbm.at[_span(entries, chunk)], ids_v)
                pltpu.sync_copy(gains_hbm.at[_span(entries, chunk)], gains_v)
                pltpu.sync_copy(bags_hbm.at[_span(entries, chunk)], bags_v)
                pltpu.sync_copy(table_hbm.at[ids_v], rows_v)
                add_to_bag = partial(add_entry, first_bag=number * chunk)
                pl.loop(0, chunk)(add_to_bag)

            pltpu.sync_copy(out_v, out_hbm.at[_span(number, chunk)])

        _deal(num_bags // chunk, work)

    integers = pltpu.VMEM((chunk,), jnp.int32)
    floats = pltpu.VMEM((chunk,), jnp.float32)
    limits = pltpu.VMEM((lanes,), jnp.int32)
    rows = pltpu.VMEM((chunk, dim), jnp.float32)
    scratch = [
        integers,
        floats,
        integers,
        limits,
        rows,
        rows,
    ]
    out = jax.ShapeDtypeStruct((num_bags, dim), jnp.float32)
    kernel = _on_tiles(body, out=out, scratch=scratch)
    return kernel(table, ids, gains, bags, bounds)


def step_rows(
    traced: ClosedJaxpr,
    dim: int,
    state: Sequence[Float[Array, "rows dim"]],
    numbers: Sequence[Float[Array, "nnz lanes"]],
    ids: Int[Array, " nnz"],
    gradients: Float[Array, "nnz dim"],
    hyper: Float[Array, " hyper"],
    order: Sequence[int],
) -> tuple[list[Array], list[Array]]:
    """Applies one optimizer step to distinct rows, and returns the new `state` and `numbers`.

    Args:
      traced: the traced rule, a result of `traced_rules.trace_rule`.
      dim: length of a row without padding.
      state: the table, and the slots that have as many columns as the table, updated in place.
      numbers: slots with one number per row, gathered for `ids`. Vector `k` of a slot contains the
        number that belongs to row `ids[k]`, repeated in every lane.
      ids: row numbers of distinct rows, padded with `NO_ID` to a multiple of the chunk size.
      gradients: gradient of each row in `ids`.
      hyper: hyperparameters, each repeated in all lanes of a vector.
      order: index of the table in `[*state, *numbers]`, then the index of each slot, in the order
        in which the rule receives the slots.
    """
    pl, pltpu, plsc = _pallas()
    width = gradients.shape[1]
    lanes = num_lanes()
    num_state = len(state)
    num_hyper = hyper.shape[0] // lanes
    chunk = chunk_rows(width, num_state + 1)

    def body(*refs: Ref) -> None:
        remaining = iter(refs)

        def take(number: int) -> list[Ref]:
            return list(itertools.islice(remaining, number))

        state_hbm = take(num_state)
        ids_hbm, gradients_hbm, hyper_hbm = take(3)
        old_hbm = take(len(numbers))
        new_hbm = take(len(numbers))
        ids_v, gradients_v, hyper_v = take(3)
        state_v = take(num_state)
        numbers_v = take(len(numbers))

        spans = _lanes(width)
        first_span = pl.ds(0, lanes)

        def step_row(row: Index) -> None:
            arrays: list[Row | Array] = []
            for v in state_v:
                pieces = tuple(v[row, span] for span in spans)
                arrays.append(pieces)
            for v in numbers_v:
                arrays.append(v[row, first_span])
            inputs = [arrays[position] for position in order]
            gradient = tuple(gradients_v[row, span] for span in spans)
            inputs.append(gradient)
            for number in range(num_hyper):
                span = pl.ds(number * lanes, lanes)
                inputs.append(hyper_v[span])
            swaps = {"sqrt": square_root, "rsqrt": reciprocal_root}
            stepped = evaluate(traced, inputs, dim=dim, swaps=swaps)
            for position, value in zip(order, stepped, strict=True):
                if position >= num_state:
                    number_v = numbers_v[position - num_state]
                    number_v[row, first_span] = value
                    continue
                # A result that is equal in all columns can be one vector instead of a `Row`.
                new_pieces = value if isinstance(value, tuple) else (value,) * len(spans)
                for span, piece in zip(spans, new_pieces, strict=True):
                    state_v[position][row, span] = piece

        def work(number: Index) -> None:
            span = _span(number, chunk)
            pltpu.sync_copy(ids_hbm.at[span], ids_v)
            pltpu.sync_copy(gradients_hbm.at[span], gradients_v)
            rows_of_chunk = plsc.Indices(ids_v, ignored_value=NO_ID)
            for hbm, v in zip(state_hbm, state_v, strict=True):
                pltpu.sync_copy(hbm.at[rows_of_chunk], v)
            for hbm, v in zip(old_hbm, numbers_v, strict=True):
                pltpu.sync_copy(hbm.at[span], v)
            pl.loop(0, chunk)(step_row)
            for hbm, v in zip(state_hbm, state_v, strict=True):
                pltpu.sync_copy(v, hbm.at[rows_of_chunk])
            for hbm, v in zip(new_hbm, numbers_v, strict=True):
                pltpu.sync_copy(v, hbm.at[span])

        pltpu.sync_copy(hyper_hbm, hyper_v)
        _deal(ids.shape[0] // chunk, work)

    rows = pltpu.VMEM((chunk, width), jnp.float32)
    chunk_numbers = pltpu.VMEM((chunk, lanes), jnp.float32)
    scratch = [
        pltpu.VMEM((chunk,), jnp.int32),
        rows,
        pltpu.VMEM(hyper.shape, jnp.float32),
    ]
    scratch += [rows] * num_state
    scratch += [chunk_numbers] * len(numbers)
    out = [jax.ShapeDtypeStruct(array.shape, jnp.float32) for array in numbers]
    refs = [jax.new_ref(array) for array in state]
    kernel = _on_tiles(body, out=out, scratch=scratch)
    new_numbers = kernel(*refs, ids, gradients, hyper, *numbers)
    new_state = [jax.freeze(ref) for ref in refs]
    return new_state, list(new_numbers)


def reciprocal_root(x: Array) -> Array:
    """`1 / sqrt(x)` of positive normal numbers, with a relative error of at most 2e-7.

    JAX 0.10 cannot compile square roots for SparseCores.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    guess_bits = 0x5F3759DF - (bits >> 1)
    y = lax.bitcast_convert_type(guess_bits, jnp.float32)
    for _ in range(3):  # Newton's method
        y = y * (1.5 - (0.5 * x * y) * y)
    return y


def square_root(x: Array) -> Array:
    """`sqrt(x)` of zero and positive normal numbers, NaN below zero."""
    root = x * reciprocal_root(x)
    zero_or_nan = jnp.where(x == 0.0, 0.0, jnp.nan)
    return jnp.where(x > 0.0, root, zero_or_nan)

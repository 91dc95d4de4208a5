"""The kernels in C++ for CPUs, called through XLA's foreign function interface.

Each function computes what the function of the same name in `reference.py`, `ids.py` or `keyed.py`
defines. One native call handles all segments of a kernel call. Tables and slots are updated in
place. XLA first copies arrays that must stay valid, such as arguments of a jitted function that are
not donated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct as Result
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from rsembed.kernels import reference
from rsembed.kernels.contract import (
    NO_ROW,
    Call,
    CallGradients,
    IdList,
    KeyOrKeys,
    Outputs,
    Place,
    RowsAndGradients,
    Segment,
    Step,
    Table,
    WeightGradients,
    as_offsets,
    as_rows,
    check_dtype,
    int32_range,
    is_between,
)
from rsembed.kernels.devices import (
    call_handler,
    instruction_set as instruction_set,
    shared_library as shared_library,
    unavailable_because as unavailable_because,
)
from rsembed.kernels.ids import (
    Cuts,
    Fit,
    IdCounts,
    Partitions,
    Queue,
    RoundEntries,
    Rows,
    SampleEntries,
    word_dtype,
)
from rsembed.kernels.keyed import Distinct, KeyRows, Positions, TakenRows, Unique
from rsembed.keys import Keys
from rsembed.optimizers.base import Slots
from rsembed.places import Place as TablePlace

NAME = "native"
# The codes of combiners, flags and rules must equal those in csrc/row_kernels.h and
# csrc/arguments.h.
_COMBINER_CODES = {"sum": 0, "mean": 1, "sqrtn": 2, "mean_by_count": 3, "none": -1}
_HAS_OFFSETS = 1
_HAS_WEIGHTS = 2
_FUSED_RULES = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 2, "adam": 3}
STEP_BLOCK = 512
"""Number of rows that a rule without a C++ kernel updates at a time.

The intermediate values of `STEP_BLOCK` rows fit in the caches of a CPU.
"""
_MAX_HYPERPARAMETERS = 4  # Rules with fewer hyperparameters get zeros as padding.

Attributes = dict[str, Any]
"""Static arguments of a native call by name: integers and lists of integers."""


def lookup(
    tables: Sequence[Float[Array, "_ _"]],
    call: Call,
) -> Outputs:
    """Pooled rows of every segment, float32. One native call reads all tables."""
    for table in tables:
        check_dtype(table, NAME)
    if not call.segments:
        return ()
    operands, attributes, shapes = _call_operands(tables, call)
    results = [Result(shape, jnp.float32) for shape in shapes]
    return call_handler("rsembed_lookup", results, *operands, *tables, **attributes)


def row_gradients(num_rows: int, gradients: CallGradients) -> RowsAndGradients:
    """Distinct rows in ascending order and the summed gradient of each.

    Rows are padded with `NO_ROW`, and gradients with zeros.
    """
    operands, attributes = _gradient_operands(gradients, num_rows)
    capacity = min(gradients.num_entries, num_rows)
    results = [
        Result((capacity,), jnp.int32),
        Result((capacity, gradients.dim), jnp.float32),
    ]
    return call_handler(
        "rsembed_row_gradients",
        results,
        *operands,
        num_rows=num_rows,
        **attributes,
    )


def squared_norm(num_rows: int, gradients: CallGradients) -> Float[Array, ""]:
    """Sum of the squares of all row gradients. See `reference.squared_norm`."""
    operands, attributes = _gradient_operands(gradients, num_rows)
    results = [Result((), jnp.float32)]
    (norm,) = call_handler(
        "rsembed_squared_norm",
        results,
        *operands,
        num_rows=num_rows,
        dim=gradients.dim,
        **attributes,
    )
    return norm


def update(
    table: Table,
    slots: Slots,
    gradients: CallGradients,
    step: Step,
) -> tuple[Table, Slots]:
    """Applies one optimizer step to each row with a gradient. Returns the new table and slots.

    For a rule with a C++ kernel, one native call sums the gradients and updates the rows. For a
    rule without a C++ kernel, a native call sums the gradients, and then `apply_rows` updates the
    rows.
    """
    check_dtype(table, NAME)
    code = _fused_code(table, slots, step)
    if code is None:
        rows, values = row_gradients(table.shape[0], gradients)
        return apply_rows(table, slots, rows, values, step)
    operands, attributes = _gradient_operands(gradients, table.shape[0])
    return _step_in_place("rsembed_update", code, table, slots, step, operands, attributes)


def apply_rows(
    table: Table,
    slots: Slots,
    rows: Int[Array, " capacity"],
    gradients: Float[Array, "capacity dim"],
    step: Step,
) -> tuple[Table, Slots]:
    """Applies one optimizer step to distinct `rows`, and returns the new table and slots.

    Row numbers outside the table are padding.

    XLA compiles a rule that has no C++ kernel. The compiled rule updates one block of `STEP_BLOCK`
    rows after the other, and skips blocks at the end that have only padding. All blocks have the
    same size, because XLA can round a sum or a root differently in blocks of different sizes. So
    the bits of a row do not depend on the number of rows in the batch.
    """
    check_dtype(table, NAME)
    rows = as_rows(rows)
    gradients = gradients.astype(jnp.float32)
    code = _fused_code(table, slots, step)
    if code is not None:
        inputs = [rows, gradients]
        return _step_in_place("rsembed_apply_rows", code, table, slots, step, inputs, {})
    num_blocks = -(-rows.shape[0] // STEP_BLOCK)
    if num_blocks == 0:
        return table, slots

    def step_block(
        number: Array | int,
        state: tuple[Table, Slots],
    ) -> tuple[Table, Slots]:
        first = number * STEP_BLOCK
        positions = first + int32_range(STEP_BLOCK)
        block_rows, d_block = gather_rows((rows, gradients), positions, missing=NO_ROW)
        old_table, old_slots = state
        return reference.apply_rows(
            old_table,
            old_slots,
            block_rows,
            d_block,
            step,
            gather=gather_rows,
            scatter=scatter_rows,
        )

    if num_blocks == 1:
        return step_block(0, (table, slots))
    is_row = is_between(rows, 0, table.shape[0])
    ends = jnp.arange(1, rows.shape[0] + 1, dtype=jnp.int32)
    num_used = jnp.max(jnp.where(is_row, ends, 0))
    rounded_up = num_used + jnp.int32(STEP_BLOCK - 1)
    num_used_blocks = jax.lax.div(rounded_up, jnp.int32(STEP_BLOCK))
    stepped: tuple[Table, Slots]
    stepped = jax.lax.fori_loop(0, num_used_blocks, step_block, (table, slots))
    return stepped


def weight_gradients(
    tables: Sequence[Float[Array, "_ _"]],
    call: Call,
    d_outputs: Outputs,
) -> WeightGradients:
    """Gradient of each list's weights, None for a list without weights.

    The gradient is 0 for an id that contributes nothing.
    """
    for table in tables:
        check_dtype(table, NAME)
    combiners = set()
    for segment in call.segments:
        if call.lists[segment.list].weights is not None:
            combiners.add(segment.combiner)
    are_supported = combiners <= {"sum", "none", "mean_by_count"}
    if not combiners or not are_supported:
        return reference.weight_gradients(tables, call, d_outputs)
    operands, attributes, _ = _call_operands(tables, call, with_weights=False)
    operands += [d_output.astype(jnp.float32) for d_output in d_outputs]
    attributes["num_outputs"] = len(d_outputs)
    results = [Result(ids.ids.shape, jnp.float32) for ids in call.lists]
    operands += tables
    gradients = call_handler("rsembed_weight_gradients", results, *operands, **attributes)
    d_weights: list[Array | None] = list(gradients)
    for number, ids in enumerate(call.lists):
        if ids.weights is None:
            d_weights[number] = None
    return tuple(d_weights)


def pair_products(vectors: Float[Array, "batch n dim"]) -> Float[Array, "batch pairs"]:
    """Dot products of all pairs of a sample's vectors. See `reference.pair_products`."""
    batch, num_vectors, _ = vectors.shape
    num_pairs = num_vectors * (num_vectors - 1) // 2
    results = [Result((batch, num_pairs), jnp.float32)]
    (products,) = call_handler("rsembed_pair_products", results, vectors)
    return products


def pull_pairs(
    vectors: Float[Array, "batch n dim"],
    d_products: Float[Array, "batch pairs"],
) -> Float[Array, "batch n dim"]:
    """Gradient of the vectors, from the gradient `d_products` of their `pair_products`."""
    results = [Result(vectors.shape, jnp.float32)]
    (d_vectors,) = call_handler("rsembed_pull_pairs", results, vectors, d_products)
    return d_vectors


def gather_rows(
    arrays: Sequence[Array],
    rows: Int[Array, " capacity"],
    missing: int = 0,
) -> tuple[Array, ...]:
    """Gathers `rows` from every array, in the array's dtype.

    Args:
      arrays: arrays `[rows, ...]` of any dtype.
      rows: row numbers to read.
      missing: value that int32 arrays return for a row number outside the array, 0 by default. For
        a row number outside the array, an array of any dtype except int32 returns zeros.
    """
    results = []
    for array in arrays:
        shape = (rows.shape[0], *array.shape[1:])
        results.append(Result(shape, array.dtype))
    operands = (as_rows(rows), *arrays)
    return call_handler("rsembed_gather_rows", results, *operands, missing=missing)


def scatter_rows(
    arrays: Sequence[Array],
    rows: Int[Array, " capacity"],
    values: Sequence[Array],
) -> tuple[Array, ...]:
    """Overwrites distinct `rows` of the arrays with `values`, and returns the new arrays.

    Row numbers outside an array are skipped. The arrays are updated in place if XLA allows it.
    """
    (scattered,) = scatter_into([arrays], jnp.int32(0), rows, values)
    return scattered


def scatter_into(
    tables: Sequence[Sequence[Array]],
    table: Int[Array, ""],
    rows: Int[Array, " capacity"],
    values: Sequence[Array],
) -> list[tuple[Array, ...]]:
    """Overwrites distinct `rows` of one of several tables. See `reference.scatter_into`.

    The arrays are updated in place if XLA allows it.
    """
    arrays = [array for arrays_of_table in tables for array in arrays_of_table]
    # The operands before the arrays are `table` and `rows`.
    aliases = {2 + number: number for number in range(len(arrays))}
    lists = []
    for array, new in zip(tables[0], values, strict=True):
        lists.append(new.astype(array.dtype))
    operands = (table, as_rows(rows), *arrays, *lists)
    results = call_handler("rsembed_scatter_into", arrays, *operands, aliases=aliases)
    num_arrays = len(lists)
    firsts = range(0, len(arrays), num_arrays)
    return [tuple(results[first : first + num_arrays]) for first in firsts]


def pack_blocks(
    arrays: Sequence[Array],
    rows: Sequence[Rows],
) -> Shaped[Array, "devices places *row"]:
    """One array with the blocks of all arrays side by side. See `ids.pack_blocks`."""
    gathers = rows[0] is not None
    first = arrays[0]
    num_axes = 1 if gathers else 2
    row_shape = first.shape[num_axes:]
    operands: list[Array] = []
    num_places = 0
    for array, block_rows in zip(arrays, rows, strict=True):
        block = array if block_rows is None else block_rows
        num_devices = block.shape[0]
        num_places += block.shape[1]
        if gathers:
            operands.append(block)
        operands.append(array)
    dtype = word_dtype(first.dtype, is_lane=not row_shape)
    results = [Result((num_devices, num_places, *row_shape), dtype)]
    (packed,) = call_handler("rsembed_pack_blocks", results, *operands, gathers=gathers)
    return packed


def unpack_blocks(
    packed: Shaped[Array, "devices places *row"],
    shapes: Sequence[Result],
) -> tuple[Array, ...]:
    """The blocks of each array, from the result of `pack_blocks`. See `ids.unpack_blocks`."""
    return call_handler("rsembed_unpack_blocks", shapes, packed)


def block_ends(queues: Sequence[Queue]) -> tuple[Fit, Cuts]:
    """Whether all remaining entries for each owner fit in this exchange round.

    See `ids.block_ends`.
    """
    operands, attributes = _queue_operands(queues)
    num_devices = queues[0].cursor.shape[0]
    shape = (len(queues), num_devices)
    num_levels = max(attributes["num_lanes"])
    results = [
        Result(shape, jnp.int32),
        Result((num_levels, *shape), jnp.uint32),
    ]
    return call_handler("rsembed_block_ends", results, *operands, **attributes)


def round_places(
    queues: Sequence[Queue],
    fit: Fit,
    cuts: Cuts,
) -> RoundEntries:
    """Entries that each queue sends to each owner in this exchange round.

    See `ids.round_places`.
    """
    operands, attributes = _queue_operands(queues)
    results = [Result((), jnp.bool_)]
    for queue in queues:
        shape = queue.cursor.shape
        results += _integers((*shape, queue.capacity), shape)
    operands = [fit, cuts, *operands]
    are_left, *arrays = call_handler("rsembed_round_places", results, *operands, **attributes)
    sent = tuple(arrays[::2])
    cursors = tuple(arrays[1::2])
    return sent, cursors, are_left


def _queue_operands(queues: Sequence[Queue]) -> tuple[list[Array], Attributes]:
    operands: list[Array] = []
    num_lanes = []
    capacities = []
    for queue in queues:
        operands += [queue.offsets, queue.cursor, *queue.lanes]
        num_lanes.append(len(queue.lanes))
        capacities.append(queue.capacity)
    attributes = {"num_lanes": num_lanes, "capacities": capacities}
    return operands, attributes


def rows_of_ids(
    call: Call,
    table_places: Sequence[TablePlace],
    sizes: Sequence[int],
    spread: int,
    rows_per_shard: int,
) -> tuple[Int[Array, " _"], ...]:
    """Row of every id of a call, one array per list. See `ids.rows_of_ids`."""
    operands, forms = _list_operands(call.lists, with_weights=False)
    numbers: list[int] = []
    for segment, place, size in zip(call.segments, table_places, sizes, strict=True):
        bags = [segment.list, segment.first_bag, segment.num_bags]
        numbers += [*bags, *place, size]
    results = [Result(ids.ids.shape, jnp.int32) for ids in call.lists]
    return call_handler(
        "rsembed_rows_of_ids",
        results,
        *operands,
        lists=forms,
        places=numbers,
        spread=spread,
        rows_per_shard=rows_per_shard,
    )


def count_ids(
    ids: Sequence[Int[Array, " _"]],
    offsets: Sequence[Int[Array, " _"]],
    sizes: Sequence[int],
) -> IdCounts:
    """For each feature, the number of ids inside and outside its table. See `ids.count_ids`."""
    operands: list[Array] = []
    for feature_ids, feature_offsets in zip(ids, offsets, strict=True):
        operands += [feature_ids, feature_offsets]
    _check_ids(operands)
    # Each feature has two operands, ids and offsets, and two results, the counts of ids inside and
    # outside its table.
    results = [Result((), jnp.int32)] * len(operands)
    counts = call_handler("rsembed_count_ids", results, *operands, sizes=list(sizes))
    num_inside = counts[::2]
    num_outside = counts[1::2]
    return tuple(zip(num_inside, num_outside, strict=True))


def distinct(
    owners: Int[Array, " nnz"],
    lanes: Sequence[Shaped[Array, " nnz"]],
    num_owners: int,
) -> Distinct:
    """Distinct entries, sorted by owner and then by `lanes`. See `keyed.distinct`."""
    for lane in lanes:
        if lane.dtype not in (jnp.int32, jnp.uint32):
            raise NotImplementedError(f"native lanes are int32 or uint32, not {lane.dtype}")
    shape = owners.shape
    integers = _integers(shape, shape, (num_owners + 1,), shape)
    results: list[Any] = [*integers, *lanes]
    arrays = call_handler("rsembed_distinct", results, as_rows(owners), *lanes)
    entry_of, first_of, offsets, counts, *sorted_lanes = arrays
    return tuple(sorted_lanes), entry_of, first_of, offsets, counts


def unique_keys(keys: Keys, occurrences: Int[Array, " nnz"]) -> Unique:
    """Distinct keys in the order of their first occurrence. See `keyed.unique_keys`."""
    results = _integers(keys.shape, keys.shape, keys.shape)
    operands = (*_key_operands(keys), occurrences)
    return call_handler("rsembed_unique_keys", results, *operands)


def find_keys(
    lanes: UInt32[Array, "slots 2"],
    rows: Int[Array, " slots"],
    keys: Keys,
    num_tables: int = 1,
) -> KeyRows:
    """Slot and row of every key, and how many keys are not in their tables.

    See `keyed.find_keys`.
    """
    results = _integers(keys.shape, keys.shape, ())
    operands = (lanes, rows, *_key_operands(keys))
    return call_handler("rsembed_find_keys", results, *operands, num_tables=num_tables)


def compact(mask: Bool[Array, " n"], size: int) -> Positions:
    """Positions of the first `size` True entries, and the number of all True entries.

    The positions are padded with `NO_ROW`. See `keyed.compact`.
    """
    results = _integers((size,), ())
    return call_handler("rsembed_compact", results, mask)


def take_rows(
    free: Int[Array, " rows"],
    num_free: Int[Array, " tables"],
    wants: Bool[Array, " n"],
    table: Int[Array, " n"] | None = None,
) -> TakenRows:
    """Takes one free row for each entry that needs a row. See `keyed.take_rows`."""
    results = _integers(wants.shape, num_free.shape, num_free.shape)
    operands = (free, num_free, wants, _table_operand(table))
    return call_handler("rsembed_take_rows", results, *operands)


def insert_keys(
    lanes: UInt32[Array, "slots 2"],
    rows: Int[Array, " slots"],
    num_keys: Int[Array, " tables"],
    num_deleted: Int[Array, " tables"],
    keys: Keys,
    new_rows: Int[Array, " nnz"],
) -> tuple[Array, ...]:
    """Inserts distinct new keys into their tables, and returns the new tables and counts.

    The hash tables are updated in place if XLA allows it. See `keyed.insert_keys`.
    """
    tables = (lanes, rows, num_keys, num_deleted)
    operands = (*tables, *_key_operands(keys), new_rows)
    aliases = {number: number for number in range(4)}
    return call_handler("rsembed_insert_keys", tables, *operands, aliases=aliases)


def _key_operands(keys: Keys) -> tuple[Array, ...]:
    return keys.high, keys.low, keys.is_key, _table_operand(keys.table)


def _table_operand(table: Array | None) -> Array:
    """Operand with the table of each key, or an empty array if there is only one table."""
    return jnp.zeros(0, jnp.int32) if table is None else table


def count_uses(
    last_step: Int[Array, " rows"],
    counts: Int[Array, " rows"],
    rows: Int[Array, " nnz"],
    step: Int[Array, ""],
    occurrences: Int[Array, " nnz"],
) -> tuple[Array, ...]:
    """Records that step `step` uses `rows`, and returns the new `last_step` and `counts`.

    The arrays are updated in place if XLA allows it. See `keyed.count_uses`.
    """
    operands = (last_step, counts, rows, step, occurrences)
    results = (last_step, counts)
    return call_handler("rsembed_count_uses", results, *operands, aliases={0: 0, 1: 1})


def entries_by_sample(stacks: Sequence[Partitions]) -> list[SampleEntries]:
    """Entries that one device looks up, sorted by sample. See `ids.entries_by_sample`."""
    operands: list[Array] = []
    results: list[Result] = []
    numbers: list[int] = []
    for stack in stacks:
        minibatches = []
        if stack.num_minibatches is not None:
            minibatches.append(stack.num_minibatches)
        integers = [stack.row_pointers, stack.embedding_ids, stack.sample_ids]
        _check_ids([*integers, *minibatches])
        gains = stack.gains.astype(jnp.float32)
        operands += [*integers, gains, *minibatches]
        shape = stack.embedding_ids.shape
        results += _integers(shape, (stack.num_samples + 1,))
        results.append(Result(shape, jnp.float32))
        numbers += [
            stack.num_cores,
            stack.num_shards,
            stack.rows_per_shard,
            stack.samples_per_core,
            len(minibatches),
        ]
    arrays = call_handler("rsembed_entries_by_sample", results, *operands, stacks=numbers)
    rows = arrays[::3]
    offsets = arrays[1::3]
    sorted_gains = arrays[2::3]
    return list(zip(rows, offsets, sorted_gains, strict=True))


def row_bits(
    key: KeyOrKeys,
    lanes: Sequence[UInt32[Array, " nnz"]],
    dim: int,
    table: Int[Array, " nnz"] | None = None,
) -> UInt32[Array, "nnz dim"]:
    """`dim` random 32-bit words for every row, from `key` folded with the row's `lanes`.

    See `reference.row_bits`.
    """
    config: Any = jax.config  # Some type stubs of JAX lack `jax_threefry_partitionable`.
    is_threefry = jax.random.key_impl(key) == "threefry2x32"
    if not is_threefry or not config.jax_threefry_partitionable:
        raise NotImplementedError(
            "native random bits are those of threefry2x32 with jax_threefry_partitionable",
        )
    key_words = jax.random.key_data(key).reshape(-1, 2)
    shape = (*lanes[0].shape, dim)
    results = [Result(shape, jnp.uint32)]
    operands = (key_words, _table_operand(table), *lanes)
    (bits,) = call_handler("rsembed_row_bits", results, *operands)
    return bits


def allocate(
    shape: Sequence[int],
    dtype: jax.typing.DTypeLike,
    fill: complex | None = None,
) -> Array:
    """New array, on huge pages if the operating system has them. See `reference.allocate`.

    Huge pages make random access to large tables twice as fast.

    Raises: NotImplementedError: an element of `dtype` has more than 8 bytes.
    """
    dtype = np.dtype(dtype)
    if dtype.itemsize > 8:
        raise NotImplementedError(
            f"native allocation fills elements of at most 8 bytes, not {dtype}",
        )
    element = np.zeros((), dtype)
    if fill is not None:
        element = np.asarray(fill).astype(dtype)
    eight_bytes = element.tobytes().ljust(8, b"\0")
    (pattern,) = np.frombuffer(eight_bytes, np.int64)
    results = [Result(tuple(shape), dtype)]
    is_filled = fill is not None
    (array,) = call_handler("rsembed_allocate", results, pattern=pattern, fill=is_filled)
    return array


def _check_ids(arrays: Sequence[Array]) -> None:
    for array in arrays:
        if array.dtype != jnp.int32:
            raise NotImplementedError(f"native ids and offsets are int32, not {array.dtype}")


def _integers(*shapes: tuple[int, ...]) -> list[Result]:
    """One int32 `ShapeDtypeStruct` for each shape."""
    return [Result(shape, jnp.int32) for shape in shapes]


def _gradient_operands(
    gradients: CallGradients,
    num_rows: int,
) -> tuple[list[Array], Attributes]:
    """Operands and attributes of a native call for the row gradients of one table.

    Segments of tables other than `gradients.table` are left out, and so are lists and outputs that
    no remaining segment uses.
    """
    call = gradients.call
    shapes, output_places = call.outputs(gradients.dims)
    if len(gradients.d_outputs) != len(shapes):
        raise ValueError(
            f"got {len(shapes)} outputs but {len(gradients.d_outputs)} gradients; pass one each.",
        )
    numbers = gradients.lists_read()
    readers = []
    outputs_read = set()
    for segment, place in zip(call.segments, output_places, strict=True):
        if segment.table == gradients.table:
            readers.append((segment, place))
            outputs_read.add(place.output)
    outputs = sorted(outputs_read)
    segments: list[int] = []
    for segment, place in readers:
        list_index = numbers.index(segment.list)
        output_index = outputs.index(place.output)
        segment = segment._replace(list=list_index, table=0)
        place = place._replace(output=output_index)
        segments += _segment_numbers(segment, place, num_rows)
    lists = [call.lists[number] for number in numbers]
    operands, forms = _list_operands(lists)
    for output in outputs:
        d_output = gradients.d_outputs[output]
        operands.append(d_output.astype(jnp.float32))
    attributes = {
        "lists": forms,
        "segments": segments,
        "num_outputs": len(outputs),
    }
    return operands, attributes


def _call_operands(
    tables: Sequence[Array],
    call: Call,
    *,
    with_weights: bool = True,
) -> tuple[list[Array], Attributes, list[tuple[int, ...]]]:
    """Arguments of a native call that reads all lists and segments of `call`.

    Returns: operands, attributes, and the shapes of the outputs of `call`.
    """
    operands, forms = _list_operands(call.lists, with_weights=with_weights)
    dims = [table.shape[1] for table in tables]
    shapes, output_places = call.outputs(dims)
    segments: list[int] = []
    for segment, place in zip(call.segments, output_places, strict=True):
        num_rows = tables[segment.table].shape[0]
        segments += _segment_numbers(segment, place, num_rows)
    attributes = {"lists": forms, "segments": segments}
    return operands, attributes, shapes


def _list_operands(
    lists: Sequence[IdList],
    *,
    with_weights: bool = True,
) -> tuple[list[Array], list[int]]:
    """Operands of a native call for lists of ids, and three numbers that describe each list.

    The three numbers of a list are its flags, its number of bags, and its number of entries per
    bag. `Lists` of csrc/arguments.h reads the three numbers, and ignores the number of entries per
    bag if the list has offsets.
    """
    operands: list[Array] = []
    forms: list[int] = []
    for ids in lists:
        flags = 0
        operands.append(as_rows(ids.ids))
        if ids.offsets is not None:
            flags |= _HAS_OFFSETS
            offsets = ids.offsets
            # The native library clips int32 offsets to the valid range.
            if offsets.dtype != jnp.int32:
                offsets = as_offsets(offsets, ids.num_entries)
            operands.append(offsets)
        if with_weights and ids.weights is not None:
            flags |= _HAS_WEIGHTS
            operands.append(ids.weights.astype(jnp.float32))
        width = 0 if ids.shape is None else ids.shape[1]
        forms += [flags, ids.num_bags, width]
    return operands, forms


def _segment_numbers(
    segment: Segment,
    place: Place,
    table_rows: int,
) -> list[int]:
    """Ten numbers that describe a segment, in the order of `Segments` in csrc/arguments.h."""
    return [
        segment.list,
        segment.first_bag,
        segment.num_bags,
        _COMBINER_CODES[segment.combiner],
        segment.table,
        segment.first_row,
        segment.rows_in(table_rows),
        *place,
    ]


def _fused_code(
    table: Array,
    slots: Slots,
    step: Step,
) -> int | None:
    """Code of the rule's kernel in the C++ library, or None if XLA must compile the rule."""
    # Ignore a base class's `fused_as`, because a subclass may change the rule.
    formula = vars(type(step.rule)).get("fused_as")
    if formula is None:
        return None
    code = _FUSED_RULES[formula]
    if step.rounds(table):
        return None
    num_rows, width = table.shape
    if formula == "rowwise_adagrad":
        width = 1
    for slot in slots:
        if slot.dtype != jnp.float32 or slot.shape != (num_rows, width):
            return None
    return code


def _step_in_place(
    target: str,
    code: int,
    table: Array,
    slots: Slots,
    step: Step,
    inputs: Sequence[Array],
    attributes: Attributes,
) -> tuple[Array, Slots]:
    """Table and slots after the handler `target` has updated them in place."""
    results = (table, *slots)
    operands = (table, step.hyper_vector(_MAX_HYPERPARAMETERS), *slots, *inputs)
    # Operand 1 holds the hyperparameters, so slot `k` is operand `2 + k` and result `1 + k`.
    aliases = {0: 0}
    for number in range(1, len(results)):
        aliases[1 + number] = number
    attributes = attributes | {"rule": code}
    new_table, *new_slots = call_handler(
        target,
        results,
        *operands,
        aliases=aliases,
        **attributes,
    )
    return new_table, tuple(new_slots)

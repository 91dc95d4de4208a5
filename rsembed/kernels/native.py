"""The kernels in C++ for CPUs, called through XLA's foreign function interface.

Every function means what its namesake in `reference.py` means. One call into the library serves all segments;
tables and slots are stepped where they lie when the caller donates them or lives inside `jit`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct as Result
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped, UInt32

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
    as_offsets,
    as_rows,
)
from rsembed.kernels.devices import call_handler
from rsembed.kernels.devices import instruction_set as instruction_set
from rsembed.kernels.devices import num_cores as num_cores
from rsembed.kernels.devices import shared_library as shared_library
from rsembed.kernels.devices import unavailable_because as unavailable_because
from rsembed.kernels.ids import Partitions, Queue, Rows, SampleEntries, word_dtype
from rsembed.kernels.keyed import Distinct, Unique
from rsembed.keys import Keys
from rsembed.optimizers.base import Slots
from rsembed.places import Place as TablePlace

NAME = "native"
_TABLE_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
# Numbers shared with csrc/row_kernels.h and csrc/ffi.cc.
_COMBINER_CODES = {"sum": 0, "mean": 1, "sqrtn": 2, "mean_by_count": 3, "none": -1}
_HAS_OFFSETS, _HAS_WEIGHTS = 1, 2
_FUSED_RULES = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 2, "adam": 3}
_NUM_SLOTS = (0, 1, 1, 2)
STEP_BLOCK = 512
"""Rows that a rule without a kernel of its own steps at a time: what it makes of them stays in the cache."""
_MAX_HYPERPARAMETERS = 4  # others are 0, such as the epsilon of an Adagrad that has none


def lookup(tables: Sequence[Float[Array, "_ _"]], call: Call) -> Outputs:
    """Pooled rows of every segment, float32: one call into the library for all tables."""
    _check_tables(*tables)
    if not call.segments:
        return ()
    dims = [table.shape[1] for table in tables]
    arrays, attributes = _operands_of(call, dims, [table.shape[0] for table in tables])
    results = [Result(shape, jnp.float32) for shape in call.outputs(dims)[0]]
    return call_handler("rsembed_lookup", results, *arrays, *tables, **attributes)


def row_gradients(num_rows: int, gradients: CallGradients) -> RowsAndGradients:
    """Gradient of every looked-up row, equal rows combined: distinct rows ascending, then `NO_ROW` and zeros."""
    arrays, attributes = _gradient_operands(gradients, num_rows)
    capacity = min(gradients.num_entries, num_rows)
    results = [Result((capacity,), jnp.int32), Result((capacity, gradients.dim), jnp.float32)]
    return call_handler("rsembed_row_gradients", results, *arrays, **attributes, num_rows=num_rows)


def squared_norm(num_rows: int, gradients: CallGradients) -> Float[Array, ""]:
    """Sum of the squares of all row gradients; see `reference.squared_norm`."""
    arrays, attributes = _gradient_operands(gradients, num_rows)
    attributes |= {"num_rows": num_rows, "dim": gradients.dim}
    return call_handler("rsembed_squared_norm", [Result((), jnp.float32)], *arrays, **attributes)[0]


def update(table: Table, slots: Slots, gradients: CallGradients, step: Step) -> tuple[Table, Slots]:
    """Row gradients and one optimizer step per distinct row, fused for the rules written in C++."""
    _check_tables(table)
    if (code := _fused_code(table, slots, step)) is None:
        return apply_rows(table, slots, *row_gradients(table.shape[0], gradients), step)
    arrays, attributes = _gradient_operands(gradients, table.shape[0])
    return _step_in_place("rsembed_update", code, table, slots, step, arrays, **attributes)


def apply_rows(
    table: Table, slots: Slots, rows: Int[Array, " capacity"], gradients: Float[Array, "capacity dim"], step: Step
) -> tuple[Table, Slots]:
    """One optimizer step of distinct `rows`; rows outside the table are padding.

    A rule without a kernel is compiled by XLA and steps `STEP_BLOCK` rows at a time, without blocks of padding. How XLA
    rounds within a row follows the shape of the program: sums and roots of three rows may have other last bits than
    those of four. In blocks of one size the bits of a row do not depend on its company.
    """
    _check_tables(table)
    rows, gradients = as_rows(rows), gradients.astype(jnp.float32)
    if (code := _fused_code(table, slots, step)) is not None:
        return _step_in_place("rsembed_apply_rows", code, table, slots, step, [rows, gradients])
    num_blocks = -(-rows.shape[0] // STEP_BLOCK)
    if not num_blocks:
        return table, slots

    def step_block(number: Array | int, state: tuple[Table, Slots]) -> tuple[Table, Slots]:
        places = number * STEP_BLOCK + jnp.arange(STEP_BLOCK, dtype=jnp.int32)
        own, own_gradients = gather_rows((rows, gradients), places, missing=NO_ROW)
        return reference.apply_rows(*state, own, own_gradients, step, gather=gather_rows, scatter=scatter_rows)

    if num_blocks == 1:
        return step_block(0, (table, slots))
    is_row = (rows >= 0) & (rows < table.shape[0])
    num_used = jnp.max(jnp.where(is_row, jnp.arange(1, rows.shape[0] + 1, dtype=jnp.int32), 0))
    stepped: tuple[Table, Slots] = jax.lax.fori_loop(
        0, jax.lax.div(num_used + jnp.int32(STEP_BLOCK - 1), jnp.int32(STEP_BLOCK)), step_block, (table, slots)
    )
    return stepped


def weight_gradients(
    tables: Sequence[Float[Array, "_ _"]], call: Call, d_outputs: Outputs
) -> tuple[Float[Array, " nnz"] | None, ...]:
    """Gradients of the weights of each list, None for lists without; 0 for ids that contribute nothing."""
    _check_tables(*tables)
    weighted = [number for number, ids in enumerate(call.lists) if ids.weights is not None]
    combiners = {segment.combiner for segment in call.segments if segment.list in weighted}
    if not weighted or not combiners <= {"sum", "none", "mean_by_count"}:
        return reference.weight_gradients(tables, call, d_outputs)
    dims = [table.shape[1] for table in tables]
    unweighted = [dataclasses.replace(ids, weights=None) for ids in call.lists]
    without = dataclasses.replace(call, lists=tuple(unweighted))
    arrays, attributes = _operands_of(without, dims, [table.shape[0] for table in tables])
    arrays += [d_output.astype(jnp.float32) for d_output in d_outputs]
    results = [Result(ids.ids.shape, jnp.float32) for ids in call.lists]
    attributes["num_outputs"] = len(d_outputs)
    found = call_handler("rsembed_weight_gradients", results, *arrays, *tables, **attributes)
    return tuple(own if number in weighted else None for number, own in enumerate(found))


def pair_products(vectors: Float[Array, "batch n dim"]) -> Float[Array, "batch pairs"]:
    """Dot products of all pairs of vectors; see `reference.pair_products`."""
    batch, n, _ = vectors.shape
    return call_handler("rsembed_pair_products", [Result((batch, n * (n - 1) // 2), jnp.float32)], vectors)[0]


def pull_pairs(
    vectors: Float[Array, "batch n dim"], d_products: Float[Array, "batch pairs"]
) -> Float[Array, "batch n dim"]:
    """Gradient of the vectors from that of `pair_products`."""
    return call_handler("rsembed_pull_pairs", [Result(vectors.shape, jnp.float32)], vectors, d_products)[0]


def gather_rows(arrays: Sequence[Array], rows: Int[Array, " capacity"], missing: int = 0) -> tuple[Array, ...]:
    """Rows `rows` of every array, of any dtype; a row outside reads as `missing` in int32 arrays, zeros in others."""
    results = [Result((rows.shape[0], *array.shape[1:]), array.dtype) for array in arrays]
    return call_handler("rsembed_gather_rows", results, as_rows(rows), *arrays, missing=missing)


def scatter_rows(arrays: Sequence[Array], rows: Int[Array, " capacity"], values: Sequence[Array]) -> tuple[Array, ...]:
    """The arrays with distinct `rows` overwritten, in place where XLA may; rows outside are skipped."""
    values = [new.astype(array.dtype) for array, new in zip(arrays, values, strict=True)]
    aliases = {1 + k: k for k in range(len(arrays))}
    operands = as_rows(rows), *arrays, *values
    return call_handler("rsembed_scatter_rows", arrays, *operands, aliases=aliases, missing=0)


def pack_blocks(arrays: Sequence[Array], rows: Sequence[Rows]) -> Shaped[Array, "devices places *row"]:
    """One array with the blocks of all arrays side by side; see `ids.pack_blocks`."""
    picked = [array if own is None else own for array, own in zip(arrays, rows, strict=True)]
    array = arrays[0]
    row = array.shape[2:] if rows[0] is None else array.shape[1:]
    shape = (picked[0].shape[0], sum(own.shape[1] for own in picked), *row)
    results = [Result(shape, word_dtype(array.dtype, is_lane=not row))]
    gathers = rows[0] is not None
    operands = [x for pair in zip(picked, arrays, strict=True) for x in pair] if gathers else arrays
    return call_handler("rsembed_pack_blocks", results, *operands, gathers=gathers)[0]


def unpack_blocks(packed: Shaped[Array, "devices places *row"], shapes: Sequence[PyTree]) -> tuple[Array, ...]:
    """The blocks of each array; see `ids.unpack_blocks`."""
    return call_handler("rsembed_unpack_blocks", shapes, packed)


def block_ends(
    queues: Sequence[Queue],
) -> tuple[Int[Array, "queues devices"], UInt32[Array, "levels queues devices"]]:
    """Whether all entries fit into a round, and the first one that does not; see `ids.block_ends`."""
    operands, attributes = _queues(queues)
    size, num_levels = (len(queues), queues[0].cursor.shape[0]), max(len(queue.lanes) for queue in queues)
    results = [Result(size, jnp.int32), Result((num_levels, *size), jnp.uint32)]
    return call_handler("rsembed_block_ends", results, *operands, **attributes)


def round_places(
    queues: Sequence[Queue], fit: Int[Array, "queues devices"], cuts: UInt32[Array, "levels queues devices"]
) -> tuple[tuple[Array, ...], tuple[Array, ...], Bool[Array, ""]]:
    """Entries that every queue sends in a round; see `ids.round_places`."""
    operands, attributes = _queues(queues)
    shapes = [shape for own in queues for shape in ((*own.cursor.shape, own.capacity), own.cursor.shape)]
    results = [Result((), jnp.bool_), *_integers(*shapes)]
    are_left, *found = call_handler("rsembed_round_places", results, fit, cuts, *operands, **attributes)
    return tuple(found[::2]), tuple(found[1::2]), are_left


def _queues(queues: Sequence[Queue]) -> tuple[list[Array], dict[str, PyTree]]:
    operands = [array for queue in queues for array in (queue.offsets, queue.cursor, *queue.lanes)]
    numbers = {"num_lanes": [len(queue.lanes) for queue in queues], "capacities": [own.capacity for own in queues]}
    return operands, numbers


def rows_by_bag(bags: Int[Array, " nnz"], num_bags: int) -> tuple[Int[Array, " num_bags_plus_1"], Int[Array, " nnz"]]:
    """Offsets and order that turn unsorted entries into bags; see `ids.rows_by_bag`."""
    return call_handler("rsembed_rows_by_bag", _integers((num_bags + 1,), bags.shape), as_rows(bags))


def rows_of_ids(
    call: Call, places: Sequence[TablePlace], sizes: Sequence[int], spread: int, rows_per_shard: int
) -> tuple[Int[Array, " _"], ...]:
    """For each list of a call, the row that each id means in an array of shards; see `ids.rows_of_ids`."""
    _check_ids([ids.ids for ids in call.lists])
    arrays, forms = _list_operands([dataclasses.replace(ids, weights=None) for ids in call.lists])
    numbers: list[int] = []
    for segment, place, size in zip(call.segments, places, sizes, strict=True):
        numbers += [*segment[:3], *place, size]
    attributes: dict[str, PyTree] = {"places": numbers, "spread": spread, "rows_per_shard": rows_per_shard}
    results = _integers(*(ids.ids.shape for ids in call.lists))
    return call_handler("rsembed_rows_of_ids", results, *arrays, lists=forms, **attributes)


def count_ids(
    ids: Sequence[Int[Array, " _"]], offsets: Sequence[Int[Array, " _"]], sizes: Sequence[int]
) -> tuple[tuple[Int[Array, ""], Int[Array, ""]], ...]:
    """Numbers of ids of each feature inside and outside its table; padding counts as neither."""
    _check_ids([*ids, *offsets])
    operands = itertools.chain.from_iterable(zip(ids, offsets, strict=True))
    counts = call_handler("rsembed_count_ids", _integers(*[()] * (2 * len(ids))), *operands, sizes=list(sizes))
    return tuple(zip(counts[::2], counts[1::2], strict=True))


def distinct(owners: Int[Array, " nnz"], lanes: Sequence[Shaped[Array, " nnz"]], num_owners: int) -> Distinct:
    """Distinct entries, sorted by owner and then by lanes; see `keyed.distinct`."""
    if wrong := [str(lane.dtype) for lane in lanes if lane.dtype not in (jnp.int32, jnp.uint32)]:
        raise NotImplementedError(f"native lanes are int32 or uint32, not {wrong[0]}")
    results: list[PyTree] = [*_integers(owners.shape, owners.shape, (num_owners + 1,), owners.shape), *lanes]
    entry_of, first_of, offsets, counts, *own = call_handler("rsembed_distinct", results, as_rows(owners), *lanes)
    return tuple(own), entry_of, first_of, offsets, counts


def unique_keys(keys: Keys, occurrences: Int[Array, " nnz"]) -> Unique:
    """Distinct keys in the order of their first occurrence; see `keyed.unique_keys`."""
    return call_handler("rsembed_unique_keys", _integers(*[keys.shape] * 3), *_operands(keys), occurrences)


def find_keys(
    lanes: UInt32[Array, "slots 2"], rows: Int[Array, " slots"], keys: Keys, num_tables: int = 1
) -> tuple[Int[Array, " nnz"], Int[Array, " nnz"], Int[Array, ""]]:
    """Slot and row of every key in its table, `NO_ROW` for absent keys and padding; and how many are absent."""
    results, operands = _integers(keys.shape, keys.shape, ()), (lanes, rows, *_operands(keys))
    return call_handler("rsembed_find_keys", results, *operands, num_tables=num_tables)


def compact(mask: Bool[Array, " n"], size: int) -> tuple[Int[Array, " size"], Int[Array, ""]]:
    """Positions of the first `size` True entries, `NO_ROW` behind them; and how many there are."""
    return call_handler("rsembed_compact", _integers((size,), ()), mask)


def take_rows(
    free: Int[Array, " rows"],
    num_free: Int[Array, " tables"],
    wants: Bool[Array, " n"],
    table: Int[Array, " n"] | None = None,
) -> tuple[Int[Array, " n"], Int[Array, " tables"], Int[Array, " tables"]]:
    """Rows from the top of a table's stack; see `keyed.take_rows`."""
    results = _integers(wants.shape, num_free.shape, num_free.shape)
    return call_handler("rsembed_take_rows", results, free, num_free, wants, _tables(table))


def insert_keys(
    lanes: UInt32[Array, "slots 2"],
    rows: Int[Array, " slots"],
    num_keys: Int[Array, " tables"],
    num_deleted: Int[Array, " tables"],
    keys: Keys,
    new_rows: Int[Array, " nnz"],
) -> tuple[Array, ...]:
    """Hash tables and their counts after distinct, absent keys are added, in place where XLA may."""
    tables = lanes, rows, num_keys, num_deleted
    operands = (*tables, *_operands(keys), new_rows)
    return call_handler("rsembed_insert_keys", tables, *operands, aliases={k: k for k in range(4)})


def _operands(keys: Keys) -> tuple[Array, ...]:
    return keys.high, keys.low, keys.is_key, _tables(keys.table)


def _tables(table: Array | None) -> Array:
    """The table of each key as handlers take it: an empty array where there is one table."""
    return jnp.zeros(0, jnp.int32) if table is None else table


def count_uses(
    last_step: Int[Array, " rows"],
    counts: Int[Array, " rows"],
    rows: Int[Array, " nnz"],
    step: Int[Array, ""],
    occurrences: Int[Array, " nnz"],
) -> tuple[Array, ...]:
    """Last steps and counts of uses after `step` used `rows`, in place where XLA may."""
    operands = last_step, counts, rows, step, occurrences
    return call_handler("rsembed_count_uses", (last_step, counts), *operands, aliases={0: 0, 1: 1})


def entries_by_sample(stacks: Sequence[Partitions]) -> list[SampleEntries]:
    """Entries that one device looks up in each stack; see `ids.entries_by_sample`."""
    operands, results, numbers = [], [], []
    for own in stacks:
        arrays = own[:3] if own.num_minibatches is None else (*own[:3], own.num_minibatches)
        _check_ids(arrays)
        operands += [*own[:3], own.gains.astype(jnp.float32), *arrays[3:]]
        num_places = own.embedding_ids.shape
        results += [*_integers(num_places, (own.num_samples + 1,)), Result(num_places, jnp.float32)]
        numbers += [*own[5:], own.num_minibatches is not None]
    found = call_handler("rsembed_entries_by_sample", results, *operands, stacks=numbers)
    return list(zip(found[::3], found[1::3], found[2::3], strict=True))


def row_bits(
    key: KeyOrKeys,
    lanes: Sequence[UInt32[Array, " nnz"]],
    dim: int,
    table: Int[Array, " nnz"] | None = None,
) -> UInt32[Array, "nnz dim"]:
    """Random bits of rows, each from the key that is folded with the row's lanes; see `reference.row_bits`."""
    config: Any = jax.config  # whose settings its stubs do not know
    if jax.random.key_impl(key) != "threefry2x32" or not config.jax_threefry_partitionable:
        raise NotImplementedError("native random bits are those of threefry2x32 with jax_threefry_partitionable")
    keys, results = jax.random.key_data(key).reshape(-1, 2), [Result((*lanes[0].shape, dim), jnp.uint32)]
    return call_handler("rsembed_row_bits", results, keys, _tables(table), *lanes)[0]


def allocate(shape: Sequence[int], dtype: jax.typing.DTypeLike, fill: complex | None = None) -> Array:
    """A new array on huge pages where the system has them, which makes random access to big tables twice as fast.

    See `reference.allocate`. Elements have at most 8 bytes.
    """
    dtype = np.dtype(dtype)
    if dtype.itemsize > 8:
        raise NotImplementedError(f"native allocation fills elements of at most 8 bytes, not {dtype}")
    element = np.zeros((), dtype) if fill is None else np.asarray(fill).astype(dtype)
    pattern = np.frombuffer(element.tobytes().ljust(8, b"\0"), np.int64)[0]
    return call_handler("rsembed_allocate", [Result(tuple(shape), dtype)], pattern=pattern, fill=fill is not None)[0]


def _check_ids(ids: Sequence[Array]) -> None:
    if wrong := [str(own.dtype) for own in ids if own.dtype != jnp.int32]:
        raise NotImplementedError(f"native ids and offsets are int32, not {wrong[0]}")


def _check_tables(*tables: Array) -> None:
    for table in tables:
        if table.dtype not in _TABLE_DTYPES:
            raise NotImplementedError(f"native tables are float32, bfloat16 or float16, not {table.dtype}")
        if table.shape[0] > NO_ROW:
            raise NotImplementedError(f"native tables have less than 2**31 rows, not {table.shape[0]}")


def _integers(*shapes: tuple[int, ...]) -> list[Result]:
    """Results of int32."""
    return list(map(partial(Result, dtype=jnp.int32), shapes))


def _gradient_operands(gradients: CallGradients, num_rows: int) -> tuple[list[Array], dict[str, PyTree]]:
    """Operands and attributes of the segments that read the gradients' table, and of nothing else."""
    call, numbers = gradients.call, gradients.lists_read()
    shapes, places = call.outputs(gradients.dims)
    own = [place for segment, place in zip(call.segments, places, strict=True) if segment.table == gradients.table]
    outputs = sorted({place.output for place in own})
    if len(gradients.d_outputs) != len(shapes):
        raise ValueError(f"got {len(shapes)} outputs but {len(gradients.d_outputs)} gradients; pass one each.")
    arrays, forms = _list_operands([call.lists[number] for number in numbers])
    segments = []
    for segment, place in zip(call.segments, places, strict=True):
        if segment.table == gradients.table:
            segment = segment._replace(list=numbers.index(segment.list), table=0)
            segments += _numbers(segment, place._replace(output=outputs.index(place.output)), num_rows)
    arrays += [gradients.d_outputs[output].astype(jnp.float32) for output in outputs]
    return arrays, {"lists": forms, "segments": segments, "num_outputs": len(outputs)}


def _operands_of(call: Call, dims: Sequence[int], table_rows: Sequence[int]) -> tuple[list[Array], dict[str, PyTree]]:
    """Operands and attributes of all lists and segments of a call."""
    arrays, forms = _list_operands(call.lists)
    segments: list[int] = []
    for segment, place in zip(call.segments, call.outputs(dims)[1], strict=True):
        segments += _numbers(segment, place, table_rows[segment.table])
    return arrays, {"lists": forms, "segments": segments}


def _list_operands(lists: Sequence[IdList]) -> tuple[list[Array], list[int]]:
    """The arrays of some lists, and for each its flags, bags and width, as `Lists` of csrc/arguments.h reads them."""
    arrays: list[Array] = []
    forms: list[int] = []
    size = 0
    for ids in lists:
        flags = 0
        arrays.append(as_rows(ids.ids))
        if ids.offsets is not None:
            flags |= _HAS_OFFSETS
            is_read = ids.offsets.dtype == jnp.int32  # the library clips these itself
            arrays.append(ids.offsets if is_read else as_offsets(ids.offsets, ids.num_entries))
        if ids.weights is not None:
            flags |= _HAS_WEIGHTS
            arrays.append(ids.weights.astype(jnp.float32))
        width = 0 if ids.shape is None else ids.shape[1]
        forms += [flags, ids.num_bags, width]
        size += max(ids.num_entries, ids.num_bags)
    if size >= NO_ROW:
        raise NotImplementedError("native calls have less than 2**31 entries and outputs")
    return arrays, forms


def _numbers(segment: Segment, place: Place, table_rows: int) -> list[int]:
    """A segment in the numbers that `Segments` of csrc/arguments.h reads."""
    combiner = _COMBINER_CODES[segment.combiner]
    num_rows = segment.rows_in(table_rows)
    bags = [segment.list, segment.first_bag, segment.num_bags, combiner]
    return [*bags, segment.table, segment.first_row, num_rows, *place]


def _fused_code(table: Array, slots: Slots, step: Step) -> int | None:
    """Number of the rule in the library, or None when the step must be traced instead."""
    # A subclass may have another rule, so only what the class itself says counts.
    formula = vars(type(step.rule)).get("fused_as")
    code = None if formula is None else _FUSED_RULES[formula]
    if code is None or len(slots) != _NUM_SLOTS[code] or step.rounds(table):
        return None
    width = 1 if formula == "rowwise_adagrad" else table.shape[1]
    fits = all(slot.dtype == jnp.float32 and slot.shape == (table.shape[0], width) for slot in slots)
    return code if fits else None


def _step_in_place(
    target: str, code: int, table: Array, slots: Slots, step: Step, arrays: Sequence[Array], **attributes: Any
) -> tuple[Array, Slots]:
    """Calls a target that steps table and slots where they lie."""
    state = (table, *slots)
    operands = (table, step.hyper_vector(_MAX_HYPERPARAMETERS), *slots, *arrays)
    aliases = {0: 0, **{1 + k: k for k in range(1, len(state))}}
    new_table, *new_slots = call_handler(target, state, *operands, aliases=aliases, **attributes, rule=code)
    return new_table, tuple(new_slots)

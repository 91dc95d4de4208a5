"""Valid random calls of every native handler, each with the function that defines its results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import rsembed as rs
from rsembed.kernels import ids, keyed, native, reference
from rsembed.kernels.contract import NO_ROW, Call, CallGradients, IdList, Segment, Step
from rsembed.kernels.ids import Partitions, Queue
from rsembed.keys import Keys
from rsembed.places import Place
from rsembed.tt.cores import pooled_rows
from tests.kernels.test_ids import draw_partitions

Draw = np.random.Generator
RULES = (
    rs.optimizers.SGD(0.1),
    rs.optimizers.Adagrad(0.1),
    rs.optimizers.RowWiseAdagrad(0.1),
    rs.optimizers.Adam(0.1),
    rs.optimizers.FTRL(0.1),
)


class ValidCall(NamedTuple):
    """A function with native handlers, the function that defines its results, and their arguments.

    Arrays depend on the generators `shapes` and `draw`, everything else only on `shapes`.
    """

    native: Callable[..., Any]
    defined: Callable[..., Any]
    arguments: tuple[Any, ...]


def some_rows(draw: Draw, count: int, num_rows: int) -> jax.Array:
    """Row numbers of a table. Many are equal, and some are out of range."""
    rows = (num_rows * draw.random(count) ** 3).astype(np.int32)
    rows[draw.random(count) < 0.05] = draw.choice([-1, num_rows, NO_ROW, -(2**31)])
    return jax.device_put(rows)


def floats(draw: Draw, *shape: int, dtype: str = "float32") -> jax.Array:
    return jax.device_put(draw.standard_normal(shape).astype(jnp.dtype(dtype)))


def offsets(draw: Draw, num_bags: int, num_entries: int) -> jax.Array:
    """Offsets of bags of any length. Entries may be before the first bag or after the last one."""
    bounds = np.sort(draw.integers(0, num_entries + 1, num_bags + 1))
    return jax.device_put(bounds.astype(np.int32))


def some_table(shapes: Draw, draw: Draw) -> jax.Array:
    num_rows = shapes.choice([1, 7, 300, 5000])
    dim = shapes.choice([1, 3, 4, 8, 17, 130])
    dtype = shapes.choice(["float32", "bfloat16", "float16"])
    return floats(draw, num_rows, dim, dtype=dtype)


def some_list(shapes: Draw, draw: Draw, num_bags: int, num_rows: int) -> IdList:
    """A list of bags with different lengths or with the same length, with or without weights."""
    count = int(shapes.choice([0, 1, 40, 6000]))
    width = None
    if shapes.random() < 0.4:
        width = int(shapes.choice([0, 1, 1, 3]))
        count = num_bags * width
    weights = None
    if shapes.random() < 0.4:
        weights = jax.device_put(draw.uniform(0.5, 2.0, count).astype(np.float32))
    rows = some_rows(draw, count, num_rows)
    if width is None:
        return IdList(rows, offsets(draw, num_bags, count), weights)
    return IdList(rows, None, weights, (num_bags, width))


def some_call(shapes: Draw, draw: Draw) -> tuple[tuple[jax.Array, ...], Call]:
    """Tables, and a call with one or several lists. Each list has the bags of several features."""
    tables = tuple(some_table(shapes, draw) for _ in range(shapes.integers(1, 4)))
    layout = str(shapes.choice(["each", "columns", "blocks"]))
    is_pooled = shapes.random() < 0.8
    num_lists = int(shapes.integers(1, 4)) if layout == "each" or is_pooled else 1
    bags = int(shapes.choice([0, 1, 3, 1200]))
    lists = []
    segments = []
    for number in range(num_lists):
        num_features = int(shapes.integers(1, 5))
        # Number of bags between the bags of two features.
        between = int(shapes.integers(2))
        of_list = []
        for feature in range(num_features):
            combiner = "none"
            if is_pooled:
                combiner = str(shapes.choice(["sum", "mean", "sqrtn", "mean_by_count"]))
            table = int(shapes.integers(len(tables)))
            first_row = int(shapes.integers(tables[table].shape[0]))
            num_rows = int(shapes.integers(1, tables[table].shape[0] - first_row + 1))
            if shapes.random() < 0.3:
                # All rows from `first_row` on.
                num_rows = NO_ROW
            first_bag = feature * (bags + between)
            of_list.append(Segment(number, first_bag, bags, combiner, table, first_row, num_rows))  # type: ignore[arg-type]
        if shapes.random() < 0.3:
            of_list.reverse()
        most = max(own.rows_in(tables[own.table].shape[0]) for own in of_list)
        lists.append(some_list(shapes, draw, num_features * (bags + between), most))
        segments += of_list
    return tables, Call(tuple(lists), tuple(segments), layout)  # type: ignore[arg-type]


def some_outputs(draw: Draw, tables: Sequence[jax.Array], call: Call) -> tuple[jax.Array, ...]:
    """Gradients of the outputs of a call."""
    shapes, *_ = call.outputs([table.shape[1] for table in tables])
    return tuple(floats(draw, *shape) for shape in shapes)


def some_gradients(shapes: Draw, draw: Draw) -> tuple[jax.Array, CallGradients]:
    """A table, and gradients of its rows."""
    tables, call = some_call(shapes, draw)
    number = int(shapes.integers(len(tables)))
    dims = tuple(table.shape[1] for table in tables)
    return tables[number], CallGradients(call, some_outputs(draw, tables, call), dims, number)


def lookup(shapes: Draw, draw: Draw) -> ValidCall:
    return ValidCall(native.lookup, reference.lookup, some_call(shapes, draw))


def row_gradients(shapes: Draw, draw: Draw) -> ValidCall:
    table, gradients = some_gradients(shapes, draw)
    return ValidCall(native.row_gradients, reference.row_gradients, (table.shape[0], gradients))


def squared_norm(shapes: Draw, draw: Draw) -> ValidCall:
    table, gradients = some_gradients(shapes, draw)
    return ValidCall(native.squared_norm, reference.squared_norm, (table.shape[0], gradients))


def update(shapes: Draw, draw: Draw) -> ValidCall:
    table, gradients = some_gradients(shapes, draw)
    rule = RULES[shapes.integers(len(RULES))]
    rows_struct = jax.ShapeDtypeStruct(table.shape, jnp.float32)
    slot_arrays = []
    for slot in jax.eval_shape(rule.init_slots, rows_struct):
        array = draw.uniform(0.5, 2.0, slot.shape).astype(slot.dtype)
        slot_arrays.append(jax.device_put(array))
    slots = tuple(slot_arrays)
    step = Step(rule.get_hyperparameters(2), rule)
    if shapes.random() < 0.3:
        rows, values = native.row_gradients(table.shape[0], gradients)
        return ValidCall(
            native.apply_rows, reference.apply_rows, (table, slots, rows, values, step)
        )
    return ValidCall(native.update, reference.update, (table, slots, gradients, step))


def weight_gradients(shapes: Draw, draw: Draw) -> ValidCall:
    tables, call = some_call(shapes, draw)
    d_outputs = some_outputs(draw, tables, call)
    return ValidCall(native.weight_gradients, reference.weight_gradients, (tables, call, d_outputs))


def moves(shapes: Draw, draw: Draw) -> ValidCall:
    num_rows = int(shapes.choice([1, 9, 4000]))
    count = int(shapes.choice([0, 5, 3000]))
    arrays = [
        floats(draw, num_rows, 5),
        jax.device_put(np.arange(num_rows).astype(np.int8)),
        floats(draw, num_rows, 2, 3),
    ]
    if shapes.random() < 0.5:
        arrays.append(some_rows(draw, num_rows, num_rows))
        each = [
            functools.partial(module.gather_rows, missing=NO_ROW) for module in (native, reference)
        ]
        return ValidCall(*each, (arrays, some_rows(draw, count, num_rows)))
    rows = jax.device_put(draw.permutation(2 * num_rows)[:count].astype(np.int32))
    values = []
    for array in arrays:
        ones = np.ones((rows.shape[0], *array.shape[1:]), array.dtype)
        values.append(jax.device_put(ones))
    other_table = [floats(draw, 7, 3), arrays[1][:0], arrays[2][:, :1]]
    table = jax.numpy.int32(shapes.integers(2))
    tables = [arrays, other_table]
    return ValidCall(native.scatter_into, reference.scatter_into, (tables, table, rows, values))


def rows_of_ids(shapes: Draw, draw: Draw) -> ValidCall:
    spread = int(shapes.choice([1, 2, 3, 8]))
    _, call = some_call(shapes, draw)
    places = []
    sizes = []
    for _ in call.segments:
        sizes.append(int(shapes.integers(1, 2**20)))
        owner = int(shapes.integers(4)) if spread == 1 else 0
        places.append(Place(owner, int(shapes.integers(50)), int(shapes.integers(8))))
    options = {"table_places": places, "sizes": sizes, "spread": spread, "rows_per_shard": 2**21}
    each = [functools.partial(module.rows_of_ids, **options) for module in (native, ids)]
    return ValidCall(*each, (call,))


def count_ids(shapes: Draw, draw: Draw) -> ValidCall:
    sizes = [int(size) for size in shapes.integers(1, 2**20, shapes.integers(1, 4))]
    counts = [int(shapes.choice([0, 5, 9000])) for _ in sizes]
    own = [some_rows(draw, count, size) for count, size in zip(counts, sizes, strict=True)]
    ends = [offsets(draw, 3, count) for count in counts]
    each = [functools.partial(module.count_ids, sizes=sizes) for module in (native, ids)]
    return ValidCall(*each, (own, ends))


def entries_by_sample(shapes: Draw, draw: Draw) -> ValidCall:
    sizes = {
        "cores": int(shapes.choice((1, 4))),
        "shards": int(shapes.choice((4, 9))),
        "samples": int(shapes.choice((1, 70))),
    }
    numbers: list[int | None] = []
    for _ in range(shapes.integers(1, 4)):
        if shapes.random() < 0.5:
            numbers.append(None)
        else:
            numbers.append(int(shapes.integers(1, 4)))
    own = []
    fixed = []
    for number in numbers:
        stack, _ = draw_partitions(draw, number, **sizes)
        own.append(stack[:5])
        fixed.append(stack[5:])

    def called(module: Any, own: Any) -> Any:
        stacks = [Partitions(*arrays, *rest) for arrays, rest in zip(own, fixed, strict=True)]
        return module.entries_by_sample(stacks)

    each = [functools.partial(called, module) for module in (native, ids)]
    return ValidCall(*each, (own,))


def some_keys(draw: Draw, count: int, most: int, num_tables: int = 1) -> Keys:
    high = jax.device_put(draw.integers(0, most, count, dtype=np.uint32))
    low = jax.device_put(draw.integers(0, most, count, dtype=np.uint32))
    is_key = jax.device_put(draw.random(count) < 0.9)
    return Keys(high, low, is_key, some_tables(draw, count, num_tables))


def some_tables(draw: Draw, count: int, num_tables: int) -> jax.Array | None:
    """The number of the table of each entry, or None if there is only one table."""
    if num_tables == 1:
        return None
    return jax.device_put(draw.integers(0, num_tables, count, dtype=np.int32))


def distinct(shapes: Draw, draw: Draw) -> ValidCall:
    count = int(shapes.choice([0, 1, 300, 20_000]))
    num_owners = int(shapes.choice([1, 5]))
    most = int(shapes.choice([1, 9, 2**32 - 1]))
    owners = jax.device_put(draw.integers(-1, num_owners + 1, count, dtype=np.int32))
    numbers = draw.integers(-(2**31), 2**31, count) // (2**32 // most + 1)
    signed = jax.device_put(numbers.astype(np.int32))
    lanes = (signed, *some_keys(draw, count, most)[:2])[: shapes.integers(4)]
    each = [functools.partial(module.distinct, num_owners=num_owners) for module in (native, keyed)]
    return ValidCall(*each, (owners, lanes))


def key_table(shapes: Draw, draw: Draw) -> ValidCall:
    """Finds distinct keys, finds keys in a table, or inserts keys beside deleted slots."""
    count = int(shapes.choice([0, 1, 40, 5000]))
    num_slots = int(shapes.choice([4, 64, 8192]))
    num_tables = int(shapes.choice([1, 3]))
    num_slots *= num_tables
    keys = some_keys(draw, count, int(shapes.choice([2, 100, 2**32 - 1])), num_tables)
    if shapes.random() < 0.3:
        # A sum of occurrences can exceed the range of int32, but only once.
        most = 2**30 if count < 4 else 2**31 // count
        occurrences = jax.device_put(draw.integers(0, most, count).astype(np.int32))
        return ValidCall(native.unique_keys, keyed.unique_keys, (keys, occurrences))
    # Every fourth slot stays empty.
    is_deleted = (draw.random(num_slots) < 0.2) & (np.arange(num_slots) % 4 > 0)
    rows = np.where(is_deleted, -2, -1).astype(np.int32)
    counts = (
        np.zeros(num_tables, np.int32),
        is_deleted.reshape(num_tables, -1).sum(axis=1, dtype=np.int32),
    )
    table = (*jax.device_put((np.zeros((num_slots, 2), np.uint32), rows, *counts)),)
    order = np.arange(count, dtype=np.int32)
    _, first_of, _ = map(np.asarray, native.unique_keys(keys, jax.device_put(order)))
    is_first = np.zeros(count, bool)
    is_first[first_of[first_of != NO_ROW]] = True
    operands = (*table, keys._replace(is_key=jax.device_put(is_first)), jax.device_put(order))
    if shapes.random() < 0.5:
        return ValidCall(native.insert_keys, keyed.insert_keys, operands)
    lanes, filled, *_ = native.insert_keys(*operands)
    options = {"num_tables": num_tables}
    each = [functools.partial(module.find_keys, **options) for module in (native, keyed)]
    return ValidCall(*each, (lanes, filled, keys))


def lists(shapes: Draw, draw: Draw) -> ValidCall:
    """Computes the indices of marks, or takes rows from stacks of free rows."""
    count = int(shapes.choice([0, 1, 300, 50_000]))
    size = int(shapes.choice([0, 1, 40, 60_000]))
    marks = jax.device_put(draw.random(count) < draw.choice([0.0, 0.01, 0.5, 1.0]))
    if shapes.random() < 0.5:
        each = [functools.partial(module.compact, size=size) for module in (native, keyed)]
        return ValidCall(*each, (marks,))
    num_tables = int(shapes.choice([1, 3]))
    stacks = np.concatenate([draw.permutation(size).astype(np.int32) for _ in range(num_tables)])
    num_free = draw.integers(0, size + 1, num_tables).astype(np.int32)
    operands = *jax.device_put((stacks, num_free)), marks, some_tables(draw, count, num_tables)
    return ValidCall(native.take_rows, keyed.take_rows, operands)


def travelling(shapes: Draw, draw: Draw) -> ValidCall:
    """Packs or unpacks blocks of an exchange, or chooses the entries of its next round."""
    devices = int(shapes.choice([1, 2, 8]))
    num_arrays = int(shapes.integers(1, 4))
    row = tuple(int(size) for size in shapes.choice([1, 3, 65], shapes.integers(0, 2)))
    capacities = [int(size) for size in shapes.choice([1, 7, 900], num_arrays)]
    arrays = []
    rows = []
    queues = []
    for capacity in capacities:
        num_rows = int(shapes.choice([0, 1, 40, 3000]))
        arrays.append(floats(draw, num_rows, *row) if row else some_rows(draw, num_rows, num_rows))
        rows.append(some_rows(draw, devices * capacity, num_rows).reshape(devices, capacity))
        ends = np.sort(draw.integers(0, num_rows + 1, devices + 1)).astype(np.int32)
        ends[0] = 0
        lanes = np.sort(draw.integers(0, 2**32, num_rows, dtype=np.uint32))
        cursor = np.int32([draw.integers(0, size + 1) for size in np.diff(ends)])
        queues.append(Queue(*jax.device_put((ends, cursor, (lanes,))), capacity))
    what = shapes.integers(4)
    if what == 0:
        return ValidCall(native.pack_blocks, ids.pack_blocks, (arrays, rows))
    if what == 1:
        sizes = [
            jax.ShapeDtypeStruct((devices, capacity, *row), jnp.float32) for capacity in capacities
        ]
        each = [functools.partial(module.unpack_blocks, shapes=sizes) for module in (native, ids)]
        packed = floats(draw, devices, sum(capacities), *row)
        if not row:
            packed = jax.lax.bitcast_convert_type(packed, jnp.uint32)
        return ValidCall(*each, (packed,))
    arrays_of = [own[:3] for own in queues]
    shape = (num_arrays, devices)

    def queues_of(own: Any) -> list[Queue]:
        return [Queue(*parts, capacity) for parts, capacity in zip(own, capacities, strict=True)]

    def ends_of(module: Any, own: Any) -> Any:
        return module.block_ends(queues_of(own))

    def places_of(module: Any, own: Any, fit: Any, cuts: Any) -> Any:
        places, cursors, are_left = module.round_places(queues_of(own), fit, cuts)
        return [*places, *cursors, are_left]

    if what == 2:
        each = [functools.partial(ends_of, module) for module in (native, ids)]
        return ValidCall(*each, (arrays_of,))
    fit = jax.device_put(draw.integers(0, 2, shape).astype(np.int32))
    cuts = jax.device_put(draw.integers(0, 2**32, (1, *shape), dtype=np.uint32))
    each = [functools.partial(places_of, module) for module in (native, ids)]
    return ValidCall(*each, (arrays_of, fit, cuts))


def count_uses(shapes: Draw, draw: Draw) -> ValidCall:
    capacity = int(shapes.choice([1, 50, 5000]))
    count = int(shapes.choice([0, 9, 9000]))
    rows = np.asarray(some_rows(draw, count, capacity))
    rows = jax.device_put(np.where(rows < 0, NO_ROW, rows).astype(np.int32))
    lanes = [
        jax.device_put(draw.integers(0, NO_ROW - 10, capacity).astype(np.int32)) for _ in range(2)
    ]
    occurrences = jax.device_put(draw.integers(0, 4, count).astype(np.int32))
    return ValidCall(native.count_uses, keyed.count_uses, (*lanes, rows, jnp.int32(9), occurrences))


def row_bits(shapes: Draw, draw: Draw) -> ValidCall:
    count = int(shapes.choice([0, 1, 40, 3000]))
    dim = int(shapes.choice([1, 7, 33]))
    lanes = some_keys(draw, count, 2**32 - 1)[:2][: shapes.integers(1, 3)]
    num_tables = int(shapes.choice([1, 3]))
    key = jax.random.key(3) if num_tables == 1 else jax.random.split(jax.random.key(3), num_tables)
    each = [functools.partial(module.row_bits, key, dim=dim) for module in (native, reference)]
    lanes, table = tuple(lanes), some_tables(draw, count, num_tables)
    return ValidCall(
        *(lambda lanes, table, own=own: own(lanes, table=table) for own in each), (lanes, table)
    )


def allocate(shapes: Draw, draw: Draw) -> ValidCall:
    shape = tuple(int(size) for size in shapes.choice([0, 1, 3, 700], shapes.integers(0, 3)))
    dtype = str(shapes.choice(["float32", "int8", "bool"]))
    return ValidCall(native.allocate, reference.allocate, (shape, dtype, 1))


def trains(shapes: Draw, draw: Draw) -> ValidCall:
    """Pooled rows of a tensor train, or gradients of its cores and of the gains."""
    num_cores = int(shapes.integers(2, 5))
    ranks = [1, *(int(rank) for rank in shapes.integers(1, 9, num_cores - 1)), 1]
    slices = [(ranks[t], int(shapes.integers(1, 6)), ranks[t + 1]) for t in range(num_cores)]
    heights = [int(height) for height in shapes.integers(1, 9, num_cores)]
    count = int(shapes.choice([0, 1, 50, 4000]))
    num_bags = int(shapes.choice([1, 6, 300]))
    core_list = []
    for height, shape in zip(heights, slices, strict=True):
        core_list.append(floats(draw, height, int(np.prod(shape))))
    cores = tuple(core_list)
    digits = tuple(jax.device_put(draw.integers(0, p, count).astype(np.int32)) for p in heights)
    bags = some_rows(draw, count, num_bags)
    gains = floats(draw, count)
    options = {"slice_shapes": tuple(slices), "num_bags": num_bags}
    # Without `jax.jit`, because the driver needs arrays, not tracers.
    as_written = pooled_rows.__wrapped__
    forms = [
        functools.partial(as_written, **options, implementation=form)
        for form in ("native", "plain")
    ]
    if shapes.random() < 0.5:
        return ValidCall(*forms, (cores, digits, bags, gains))
    d_pooled = floats(draw, num_bags, int(np.prod([q for _, q, _ in slices])))

    def pull(form: Any, cores: Any, digits: Any, bags: Any, gains: Any, d_pooled: Any) -> Any:
        def pooled_of(cores: Any, gains: Any) -> Any:
            return form(cores, digits, bags, gains)

        _, pullback = jax.vjp(pooled_of, cores, gains)
        return pullback(d_pooled)

    each = [functools.partial(pull, form) for form in forms]
    return ValidCall(*each, (cores, digits, bags, gains, d_pooled))


CALLS = (
    lookup,
    row_gradients,
    squared_norm,
    update,
    weight_gradients,
    moves,
    rows_of_ids,
    count_ids,
    entries_by_sample,
    distinct,
    key_table,
    lists,
    travelling,
    count_uses,
    row_bits,
    allocate,
    trains,
)

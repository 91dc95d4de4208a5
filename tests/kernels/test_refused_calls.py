"""The handlers themselves refuse calls from which memory would suffer, whatever is checked before them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsembed.kernels import api, devices, native, reference
from rsembed.kernels.contract import NO_ROW, Call, CallGradients, IdList, Segment
from rsembed.places import Place
from tests.kernels.cases import needs_native

WORDS, ROWS, MARKS = jnp.zeros(4, jnp.uint32), jnp.zeros(4, jnp.int32), jnp.ones(4, bool)
LANES, ONE, NONE = jnp.zeros((4, 2), jnp.uint32), jnp.zeros(1, jnp.int32), jnp.zeros(0, jnp.int32)
KEYS = WORDS, WORDS, MARKS, NONE
PLACES, TABLE = jnp.zeros((2, 3), jnp.int32), jnp.ones((4, 2), jnp.float32)
GAINS, FAR = jnp.ones(16, jnp.float32), jnp.zeros(16, jnp.int32)
OVERLAPPING = jnp.tile(jnp.asarray([8, 0], jnp.int32), 4)  # of partitions, again and again all


def of(*shape, dtype=jnp.int32):
    """A result that a call asks for."""
    return jax.ShapeDtypeStruct(shape, dtype)


def numbers(*values, **named):
    """Attributes of int64; the first has several."""
    return {name: np.int64(value) for name, value in named.items()} | (
        {"stacks": np.int64(values)} if values else {}
    )


FOUR, FOUND, NUMBERS = (
    of(4),
    [of(4), of(4), of()],
    {"spread": np.int64(1), "rows_per_shard": np.int64(8)},
)
ONE_LIST = NUMBERS | {"lists": np.int64([0, 4, 1])}
ROUND, SIZES = [of(dtype=jnp.bool_), of(2, 3), of(2)], numbers(num_lanes=[1], capacities=[2])
QUEUE = (
    jnp.ones((1, 2), jnp.int32),
    jnp.zeros((1, 1, 2), jnp.uint32),
    jnp.zeros(3, jnp.int32),
    jnp.zeros(2, jnp.int32),
)
ENTRIES = [of(16), of(11), of(16, dtype=jnp.float32)]
BUFFERS = jnp.zeros(16, jnp.int32), FAR, FAR, GAINS
GATHERS = {"gathers": True}
REFUSED = [
    ("wrong number of keys", "unique_keys", [FOUR] * 3, (WORDS[:3], *KEYS[1:], ROWS), {}),
    ("wrong number of tables", "unique_keys", [FOUR] * 3, (*KEYS[:3], ROWS[:3], ROWS), {}),
    ("wrong size of a result", "unique_keys", [FOUR, FOUR, of(3)], (*KEYS, ROWS), {}),
    ("power of two", "find_keys", FOUND, (LANES[:3], ROWS[:3], *KEYS), numbers(num_tables=1)),
    ("two lanes in each", "find_keys", FOUND, (LANES[:2], ROWS, *KEYS), numbers(num_tables=1)),
    (
        "tables of keys are equally large",
        "find_keys",
        FOUND,
        (LANES, ROWS, *KEYS),
        numbers(num_tables=3),
    ),
    (
        *("wrong number of rows", "insert_keys", [of(4, 2, dtype=jnp.uint32), FOUR, of(1), of(1)]),
        *((LANES, ROWS, ONE, ONE, *KEYS, ROWS[:3]), {}),
    ),
    (
        "wrong size of rows or of a count",
        "take_rows",
        [FOUR, of(3), of(3)],
        (ROWS, ROWS[:3], MARKS, NONE),
        {},
    ),
    ("alias", "count_uses", [FOUR] * 2, (ROWS, ROWS, ROWS, jnp.int32(0), ROWS), {}),
    ("wrong size of a lane", "distinct", [FOUR, FOUR, of(3), FOUR, of(3)], (ROWS, ROWS[:3]), {}),
    (
        *("wrong type of a lane", "distinct", [FOUR, FOUR, of(3), FOUR, of(4, dtype=jnp.int8)]),
        *((ROWS, ROWS.astype(jnp.int8)), {}),
    ),
    ("unreadable places", "rows_of_ids", [FOUR], (ROWS,), ONE_LIST | numbers(places=[0] * 6)),
    (
        "outside the call",
        "rows_of_ids",
        [FOUR],
        (ROWS,),
        ONE_LIST | numbers(places=[1, 0, 4, 0, 0, 0, 4]),
    ),
    (
        "outside the bags",
        "rows_of_ids",
        [FOUR],
        (ROWS,),
        ONE_LIST | numbers(places=[0, 2, 3, 0, 0, 0, 4]),
    ),
    (
        "wrong size of rows",
        "rows_of_ids",
        [of(3)],
        (ROWS,),
        ONE_LIST | numbers(places=[0, 0, 4, 0, 0, 0, 4]),
    ),
    ("unreadable sizes", "count_ids", [of()] * 2, (ROWS,), numbers(sizes=[1])),
    ("offsets must not be empty", "count_ids", [of()] * 2, (ROWS, NONE), numbers(sizes=[1])),
    ("wrong type of a count", "count_ids", [of(1)] * 2, (ROWS, ROWS), numbers(sizes=[1])),
    ("unreadable stacks", "entries_by_sample", ENTRIES, BUFFERS, numbers(2, 4, 6, 5, 0, 1)),
    ("wrong size of entries", "entries_by_sample", ENTRIES[::-1], BUFFERS, numbers(2, 4, 6, 5, 0)),
    (
        *("wrong size of sample ids", "entries_by_sample", ENTRIES, (*BUFFERS[:2], FAR[:3], GAINS)),
        numbers(2, 4, 6, 5, 0),
    ),
    ("missing num_minibatches", "entries_by_sample", ENTRIES, BUFFERS, numbers(2, 4, 6, 5, 1)),
    (
        *("row pointers overlap", "entries_by_sample", ENTRIES),
        *((jnp.tile(OVERLAPPING, 2), FAR, FAR, GAINS), numbers(2, 4, 6, 5, 0)),
    ),
    ("differ in size", "pack_blocks", [of(2, 4, dtype=jnp.uint32)], (PLACES, WORDS), GATHERS),
    ("unreadable blocks", "pack_blocks", [of(2, 4, dtype=jnp.uint32)], (WORDS, WORDS), GATHERS),
    (
        "differ in size",
        "unpack_blocks",
        [of(2, 3, dtype=jnp.uint32)],
        (jnp.zeros((2, 4), jnp.uint32),),
        {},
    ),
    ("wrong size of places", "round_places", ROUND, (*QUEUE, WORDS), SIZES),
    (
        "unreadable queues",
        "round_places",
        ROUND,
        (*QUEUE[:2], QUEUE[2][:2], QUEUE[3], WORDS),
        SIZES,
    ),
    ("unreadable queues", "round_places", ROUND, (*QUEUE, WORDS, WORDS), SIZES),
]


@needs_native
@pytest.mark.parametrize(("complaint", "target", "results", "operands", "attributes"), REFUSED)
def test_a_call_whose_parts_do_not_fit_is_refused(complaint, target, results, operands, attributes):
    with pytest.raises(jax.errors.JaxRuntimeError, match=complaint):
        jax.block_until_ready(
            devices.call_handler(f"rsembed_{target}", results, *operands, **attributes)
        )


# A call of two lists: eight ids in bags that offsets bound, and six with weights in three bags of two. Of a segment the
# numbers are its list, first bag, how many bags, combiner, table, first row, how many rows, output, first number there,
# and stride.
LISTS = [1, 3, 0, 2, 3, 2]
SEGMENTS = [[0, 1, 2, 0, 0, 1, 3, 0, 0, 2], [1, 0, 2, 1, 0, 0, 4, 1, 0, 2]]
OFFSETS = [0, 2, 5, 7]


def call_parts(changes):
    """Operands and attributes of that call, with other numbers at some places."""
    lists, segments = np.int64(LISTS), np.int64(SEGMENTS)
    offsets = changes.get("offsets", OFFSETS)
    for place, number in changes.get("lists", {}).items():
        lists[place] = number
    for place, number in changes.get("segments", {}).items():
        segments[place] = number
    arrays = [
        jnp.zeros(8, jnp.int32),
        jnp.asarray(offsets, jnp.int32),
        jnp.zeros(changes.get("ids", 6), jnp.int32),
        jnp.ones(changes.get("weights", 6), jnp.float32),
    ]
    lists = lists[: changes.get("num_lists", 6)]
    numbers = segments.reshape(-1)[: changes.get("num_numbers", 20)]
    return arrays, {"lists": lists, "segments": numbers}


def call_of(target, changes):
    """One of the handlers that read lists and segments."""
    arrays, attributes = call_parts(changes)
    outputs = changes.get("outputs", (4, 4))
    shapes = [of(size, dtype=jnp.float32) for size in outputs]
    if target == "lookup":
        return [*shapes], (*arrays, TABLE), attributes, {}
    arrays += [jnp.zeros(size, jnp.float32) for size in outputs]
    attributes["num_outputs"] = np.int64(changes.get("num_outputs", 2))
    if target == "weight_gradients":
        results = [of(8, dtype=jnp.float32), of(6, dtype=jnp.float32)]
        return results, (*arrays, TABLE), attributes, {}
    if target == "update":
        attributes["rule"] = np.int64(0)
        return [TABLE], (TABLE, jnp.ones(4), *arrays), attributes, {"aliases": {0: 0}}
    attributes["num_rows"] = np.int64(changes.get("num_rows", 4))
    if target == "squared_norm":
        attributes["dim"] = np.int64(changes.get("dim", 2))
        return [of(dtype=jnp.float32)], arrays, attributes, {}
    return [of(4), of(4, 2, dtype=jnp.float32)], arrays, attributes, {}


CALLED = ("lookup", "row_gradients", "squared_norm", "update", "weight_gradients")
HUGE = (2**63 - 1, 2**62, 2**31, -1, -(2**63))


def at_segment(place, *numbers):
    """Changes of one number of the first segment."""
    return [{"segments": {(0, place): number}} for number in numbers]


UNREADABLE = [
    # lists
    ("unreadable lists", CALLED, [{"num_lists": 5}]),
    ("wrong number of offsets", CALLED, [{"lists": {1: number}} for number in (2, 4, *HUGE)]),
    ("wrong number of offsets", CALLED, [{"offsets": [0, 7]}, {"offsets": []}]),
    (
        "do not fill their list",
        CALLED,
        [{"ids": 5}, {"lists": {4: -3, 5: -2}}, {"lists": {4: 2**33, 5: 2**31}}],
    ),
    ("do not fill their list", CALLED, [{"lists": {5: number}} for number in HUGE]),
    ("wrong size of weights", CALLED, [{"weights": 5}]),
    ("wrong element type of weights", CALLED, [{"lists": {0: 3}}]),
    ("too many entries", CALLED, [{"ids": 0, "weights": 0, "lists": {4: 2**62, 5: 0}}]),
    # segments
    ("unreadable segments", CALLED, [{"num_numbers": 19}]),
    (
        "outside the call",
        CALLED,
        at_segment(0, 2, *HUGE) + at_segment(4, 1, *HUGE) + at_segment(7, 2, *HUGE),
    ),
    ("outside the bags", CALLED, at_segment(1, 2, *HUGE) + at_segment(2, 3, *HUGE)),
    ("outside the tables", CALLED, at_segment(5, 2, *HUGE) + at_segment(6, 4, *HUGE)),
    ("unknown combiner", CALLED, at_segment(3, 4, 2**40, -2, -(2**63))),
    ("outside the output", CALLED, at_segment(8, 1, *HUGE) + at_segment(9, 3, *HUGE)),
    ("outside the output", CALLED, [{"outputs": (3, 4)}, {"outputs": (0, 4)}]),
    # with combiner none, whose vectors are those of all entries
    ("outside the output", CALLED, [{"segments": {(0, 3): -1}}]),
    ("outside the output", CALLED, [{"segments": {(0, 3): -1, (0, 9): number}} for number in HUGE]),
    ("outside the output", CALLED, [{"segments": {(0, 3): -1, (0, 8): number}} for number in HUGE]),
    # entries in two segments
    ("must not fall", CALLED, [{"segments": {(1, 0): 0, (1, 1): number}} for number in (0, 1)]),
    (
        "must not fall",
        CALLED,
        [
            {
                "offsets": [2, 7, 0, 8],
                "segments": {(0, 1): 0, (0, 2): 1, (1, 0): 0, (1, 1): 2, (1, 2): 1},
            }
        ],
    ),
    # gradients
    (
        "missing gradient",
        ("row_gradients", "squared_norm", "update"),
        [{"num_outputs": number} for number in (3, 2**62)],
    ),
    ("outside the call", CALLED[1:4], [{"num_outputs": number} for number in (0, 1, -1, -(2**63))]),
    (
        "a table has two axes",
        ("weight_gradients",),
        [{"num_outputs": number} for number in (0, 1, -1, -(2**63))],
    ),
    (
        "wrong capacity",
        ("row_gradients",),
        [{"num_rows": 3, "segments": {(0, 6): 1, (1, 6): 2}}, {"num_rows": 5}],
    ),
    ("outside the output", ("squared_norm",), [{"dim": number} for number in (3, *HUGE)]),
    ("outside the output", ("squared_norm",), [{"dim": -1, "segments": {(0, 9): 1, (1, 9): 1}}]),
    ("num_rows does not fit", ("squared_norm",), [{"num_rows": 2**31}, {"num_rows": 2**63 - 1}]),
    (
        "outside the tables",
        ("row_gradients", "squared_norm"),
        [{"num_rows": number} for number in (0, -1, -(2**63))],
    ),
]


@needs_native
@pytest.mark.parametrize("target", CALLED)
def test_a_call_whose_numbers_lead_outside_or_wrap_around_is_refused(target):
    def made(changes):
        results, operands, attributes, options = call_of(target, changes)
        return jax.block_until_ready(
            devices.call_handler(f"rsembed_{target}", results, *operands, **attributes, **options)
        )

    made({})  # what is changed below is no fault
    made({"lists": {2: 2**62}})  # means nothing beside offsets
    for complaint, targets, changes in UNREADABLE:
        if target not in targets:
            continue
        for change in changes:
            with pytest.raises(jax.errors.JaxRuntimeError, match=complaint):
                made(change)
                print(f"{complaint}: {change} was not refused")


ONES = IdList.single(ROWS)
SMALL_CALL = Call.of([IdList.single(jnp.asarray([3, -1, 9], jnp.int8))], ["sum"])
FALLING = Call(
    (IdList(jnp.zeros(10, jnp.int32), jnp.asarray([0, 9, 3, 9], jnp.int32)),),
    tuple(Segment(0, bag, 1, "sum", 0, 0, 4) for bag in range(3)),
    "blocks",
)
TWICE = Call.of([ONES, ONES], ["sum", "sum"])
MIXED = Call(
    (IdList(ROWS, jnp.asarray([0, 1, 4])),), (Segment(0, 0, 1, "none"), Segment(0, 1, 1, "sum"))
)
DECLINED = [
    (
        "older than rsembed_of_tomorrow; reinstall",
        lambda: devices.call_handler("rsembed_of_tomorrow", [FOUR]),
    ),
    (
        "lanes are int32 or uint32, not int16",
        lambda: native.distinct(ROWS, (ROWS.astype(jnp.int16),), 2),
    ),
    (
        "ids and offsets are int32, not int8",
        lambda: native.rows_of_ids(SMALL_CALL, [Place(0, 5)], [8], 1, 64),
    ),
    ("those of threefry2x32", lambda: native.row_bits(jax.random.key(5, impl="rbg"), (WORDS,), 3)),
    (
        "offsets must not fall",
        lambda: native.row_gradients(4, CallGradients(FALLING, (jnp.ones(9),), (3,))),
    ),
    (
        "got 2 outputs but 1 gradients",
        lambda: native.row_gradients(3, CallGradients(TWICE, (TABLE,), (2,))),
    ),
    ("without a combiner share no list", lambda: reference.lookup((TABLE,), MIXED)),
    (
        "float32, bfloat16 or float16, not float8",
        lambda: native.lookup((TABLE.astype(jnp.float8_e5m2),), TWICE),
    ),
]


@needs_native
@pytest.mark.parametrize(("reason", "call"), DECLINED)
def test_a_call_that_the_library_cannot_serve_is_declined(reason, call):
    with pytest.raises((NotImplementedError, ValueError, jax.errors.JaxRuntimeError), match=reason):
        jax.block_until_ready(call())


def test_ids_of_8_bits_are_served_by_the_definition():
    (rows,) = api.rows_of_ids(SMALL_CALL, [Place(0, 5)], [8], spread=1, rows_per_shard=64)
    assert rows.tolist() == [8, NO_ROW, NO_ROW]

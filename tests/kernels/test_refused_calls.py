"""Native handlers refuse calls that would access wrong memory, also without checks in Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsembed.kernels import api, devices, native
from rsembed.kernels.contract import NO_ROW, Call, CallGradients, IdList, Segment
from rsembed.places import Place
from tests.kernels.cases import needs_native

WORDS = jnp.zeros(4, jnp.uint32)
ROWS = jnp.zeros(4, jnp.int32)
MARKS = jnp.ones(4, bool)
LANES = jnp.zeros((4, 2), jnp.uint32)
ONE = ROWS[:1]
NONE = ROWS[:0]
KEYS = WORDS, WORDS, MARKS, NONE
PLACES = jnp.zeros((2, 3), jnp.int32)
TABLE = jnp.ones((4, 2))
FAR = jnp.zeros(16, jnp.int32)
GAINS = jnp.ones(16)
# Row pointers of partitions that overlap.
OVERLAPPING = jnp.tile(jnp.int32([8, 0]), 8)
QUEUE = jnp.ones((1, 2), jnp.int32), jnp.zeros((1, 1, 2), jnp.uint32), ROWS[:3], ROWS[:2]


def of(*shape, dtype=jnp.int32):
    """Shape and dtype of a result of a handler."""
    return jax.ShapeDtypeStruct(shape, dtype)


FOUR = of(4)
BLOCKS = [of(2, 4, dtype=jnp.uint32)]
FOUND = [FOUR, FOUR, of()]
INSERTED = [of(4, 2, dtype=jnp.uint32), FOUR, of(1), of(1)]
ENTRIES = [of(16), of(11), of(16, dtype=jnp.float32)]
ROUND = [of(dtype=jnp.bool_), of(2, 3), of(2)]


def handler(target, results, *operands, **attributes):
    return devices.call_handler(f"rsembed_{target}", results, *operands, **attributes)


def rows_of_list(*places, result=FOUR):
    """Calls the handler for the rows of one list of four single ids."""
    numbers = {"lists": [0, 4, 1], "places": list(places), "spread": 1, "rows_per_shard": 8}
    return handler("rows_of_ids", [result], ROWS, **numbers)


def entries(*stacks, results=ENTRIES, pointers=FAR, samples=FAR):
    return handler("entries_by_sample", results, pointers, FAR, samples, GAINS, stacks=list(stacks))


def a_round(*operands):
    return handler("round_places", ROUND, *operands, num_lanes=[1], capacities=[2])


ONES = IdList.single(ROWS)
TWICE = Call.of([ONES, ONES], ["sum", "sum"])
FALLING = Call(
    (IdList(jnp.zeros(10, jnp.int32), jnp.int32([0, 9, 3, 9])),),
    tuple(Segment(0, bag, 1, "sum", 0, 0, 4) for bag in range(3)),
    "blocks",
)
MIXED = Call(
    (IdList(ROWS, jnp.int32([0, 1, 4])),), (Segment(0, 0, 1, "none"), Segment(0, 1, 1, "sum"))
)


def gradients_of(call, *d_outputs):
    return native.row_gradients(4, CallGradients(call, d_outputs, (3,)))


REFUSED = """
handler("unique_keys", [FOUR] * 3, WORDS[:3], *KEYS[1:], ROWS) => wrong number of keys
handler("unique_keys", [FOUR] * 3, *KEYS[:3], ROWS[:3], ROWS) => wrong number of tables
handler("unique_keys", [FOUR, FOUR, of(3)], *KEYS, ROWS) => wrong size of a result
handler("find_keys", FOUND, LANES[:3], ROWS[:3], *KEYS, num_tables=1) => power of two
handler("find_keys", FOUND, LANES[:2], ROWS, *KEYS, num_tables=1) => two lanes in each
handler("find_keys", FOUND, LANES, ROWS, *KEYS, num_tables=3) => tables of keys are equally large
handler("insert_keys", INSERTED, LANES, ROWS, ONE, ONE, *KEYS, ROWS[:3]) => wrong number of rows
handler("take_rows", [FOUR, of(3), of(3)], ROWS, ROWS[:3], MARKS, NONE) => wrong size of rows or of a count
handler("count_uses", [FOUR] * 2, ROWS, ROWS, ROWS, jnp.int32(0), ROWS) => alias
handler("distinct", [FOUR, FOUR, of(3), FOUR, of(3)], ROWS, ROWS[:3]) => wrong size of a lane
handler("distinct", [FOUR, FOUR, of(3), FOUR, of(4, dtype=jnp.int8)], ROWS, jnp.int8(ROWS)) => wrong type of a lane
rows_of_list(0, 0, 0, 0, 0, 0) => unreadable places
rows_of_list(1, 0, 4, 0, 0, 0, 4) => outside the call
rows_of_list(0, 2, 3, 0, 0, 0, 4) => outside the bags
rows_of_list(0, 0, 4, 0, 0, 0, 4, result=of(3)) => wrong size of rows
handler("count_ids", [of()] * 2, ROWS, sizes=[1]) => unreadable sizes
handler("count_ids", [of()] * 2, ROWS, NONE, sizes=[1]) => offsets must not be empty
handler("count_ids", [of(1)] * 2, ROWS, ROWS, sizes=[1]) => wrong type of a count
entries(2, 4, 6, 5, 0, 1) => unreadable stacks
entries(2, 4, 6, 5, 0, results=ENTRIES[::-1]) => wrong size of entries
entries(2, 4, 6, 5, 0, samples=FAR[:3]) => wrong size of sample ids
entries(2, 4, 6, 5, 1) => missing num_minibatches
entries(2, 4, 6, 5, 0, pointers=OVERLAPPING) => row pointers overlap
handler("pack_blocks", BLOCKS, PLACES, WORDS, gathers=True) => differ in size
handler("pack_blocks", BLOCKS, WORDS, WORDS, gathers=True) => unreadable blocks
handler("unpack_blocks", [of(2, 3, dtype=jnp.uint32)], jnp.zeros((2, 4), jnp.uint32)) => differ in size
a_round(*QUEUE, WORDS) => wrong size of places
a_round(*QUEUE[:2], ROWS[:2], ROWS[:2], WORDS) => unreadable queues
a_round(*QUEUE, WORDS, WORDS) => unreadable queues
handler("of_tomorrow", [FOUR]) => older than rsembed_of_tomorrow; reinstall
native.distinct(ROWS, (jnp.int16(ROWS),), 2) => lanes are int32 or uint32, not int16
native.count_ids([jnp.int8(ROWS)], [ROWS], [8]) => ids and offsets are int32, not int8
native.row_bits(jax.random.key(5, impl="rbg"), (WORDS,), 3) => those of threefry2x32
gradients_of(FALLING, jnp.ones(9)) => offsets must not fall
gradients_of(TWICE, TABLE) => got 2 outputs but 1 gradients
native.lookup((TABLE.astype(jnp.float8_e5m2),), TWICE) => float32, bfloat16, float16, not float8
api.lookup((TABLE,), MIXED, implementation="reference") => without a combiner share no list
"""


@needs_native
@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_a_call_whose_parts_do_not_fit_is_refused(row):
    call, complaint = row.split(" => ")
    with pytest.raises((NotImplementedError, ValueError, RuntimeError), match=complaint):
        jax.block_until_ready(eval(call))


# A call with two lists: eight ids in three bags with offsets, and six weighted ids in three bags of
# two. The numbers of a segment are its list, first bag, number of bags, combiner, table, first row,
# number of rows, output, position of its first number in the output, and stride. The second segment
# begins at index 10.
LISTS = np.int64([1, 3, 0, 2, 3, 2])
SEGMENTS = np.int64([0, 1, 2, 0, 0, 1, 3, 0, 0, 2, 1, 0, 2, 1, 0, 0, 4, 1, 0, 2])


def with_numbers(numbers, changes):
    numbers = numbers.copy()
    for place, number in changes.items():
        numbers[place] = number
    return numbers


def made(
    target,
    *,
    lists=(),
    segments=(),
    sizes=(6, 20),
    offsets=(0, 2, 5, 7),
    ids=6,
    weights=6,
    outputs=(4, 4),
    num_outputs=2,
    num_rows=4,
    dim=2,
):
    """The call of a handler with `LISTS` and `SEGMENTS`, with some numbers or sizes changed.

    Args:
      target: name of the handler.
      lists: new numbers by index in `LISTS`.
      segments: new numbers by index in `SEGMENTS`.
      sizes: sizes to which `LISTS` and `SEGMENTS` are cut.
      offsets: offsets of the first list.
      ids: number of ids of the second list.
      weights: number of weights of the second list.
      outputs: size of each output.
      num_outputs: number of outputs, for handlers of gradients.
      num_rows: number of rows of the table, for `row_gradients` and `squared_norm`.
      dim: number of columns, for `squared_norm`.
    """
    arrays = [
        jnp.zeros(8, jnp.int32),
        jnp.asarray(offsets, jnp.int32),
        jnp.zeros(ids, jnp.int32),
        jnp.ones(weights, jnp.float32),
    ]
    attributes = {
        "lists": with_numbers(LISTS, dict(lists))[: sizes[0]],
        "segments": with_numbers(SEGMENTS, dict(segments))[: sizes[1]],
    }
    floats = [of(size, dtype=jnp.float32) for size in outputs]
    if target == "lookup":
        return handler(target, floats, *arrays, TABLE, **attributes)
    arrays += [jnp.zeros(size, jnp.float32) for size in outputs]
    attributes["num_outputs"] = num_outputs
    if target == "weight_gradients":
        results = [of(8, dtype=jnp.float32), of(6, dtype=jnp.float32)]
        return handler(target, results, *arrays, TABLE, **attributes)
    if target == "update":
        state = TABLE, jnp.ones(4)
        return handler(target, [TABLE], *state, *arrays, rule=0, aliases={0: 0}, **attributes)
    attributes["num_rows"] = num_rows
    if target == "squared_norm":
        return handler(target, [of(dtype=jnp.float32)], *arrays, dim=dim, **attributes)
    return handler(target, [FOUR, TABLE], *arrays, **attributes)


CALLED = ("lookup", "row_gradients", "squared_norm", "update", "weight_gradients")
NEGATIVE = (-1, -(2**63))
HUGE = (2**63 - 1, 2**62, 2**31, *NEGATIVE)


def each(name, *values):
    """Changes of one argument of `made` to each of some wrong values."""
    return [{name: value} for value in values]


def at(name, place, *numbers):
    """Changes of one number of `lists` or `segments` to each of some wrong numbers."""
    return [{name: {place: number}} for number in numbers]


UNREADABLE = [
    # lists
    ("unreadable lists", each("sizes", (5, 20))),
    ("wrong number of offsets", at("lists", 1, 2, 4, *HUGE)),
    ("wrong number of offsets", each("offsets", (0, 7), ())),
    ("do not fill their list", each("ids", 5)),
    ("do not fill their list", at("lists", 5, *HUGE)),
    ("do not fill their list", each("lists", {4: -3, 5: -2}, {4: 2**33, 5: 2**31})),
    ("wrong size of weights", each("weights", 5)),
    ("wrong element type of weights", at("lists", 0, 3)),
    ("too many entries", [{"ids": 0, "weights": 0, "lists": {4: 2**62, 5: 0}}]),
    # segments
    ("unreadable segments", each("sizes", (6, 19))),
    ("outside the call", at("segments", 0, 2, *HUGE)),
    ("outside the call", at("segments", 4, 1, *HUGE)),
    ("outside the call", at("segments", 7, 2, *HUGE)),
    ("outside the bags", at("segments", 1, 2, *HUGE)),
    ("outside the bags", at("segments", 2, 3, *HUGE)),
    ("outside the tables", at("segments", 5, 2, *HUGE)),
    ("outside the tables", at("segments", 6, 4, *HUGE)),
    ("unknown combiner", at("segments", 3, 4, 2**40, -2, -(2**63))),
    ("outside the output", at("segments", 8, 1, *HUGE)),
    ("outside the output", at("segments", 9, 3, *HUGE)),
    ("outside the output", each("outputs", (3, 4), (0, 4))),
    # With combiner "none", a segment has a vector for each entry of its list.
    ("outside the output", at("segments", 3, -1)),
    ("outside the output", [{"segments": {3: -1, 8: number}} for number in HUGE]),
    ("outside the output", [{"segments": {3: -1, 9: number}} for number in HUGE]),
    # entries in two segments
    ("must not fall", each("segments", {10: 0, 11: 0}, {10: 0, 11: 1})),
    (
        "must not fall",
        [{"offsets": (2, 7, 0, 8), "segments": {1: 0, 2: 1, 10: 0, 11: 2, 12: 1}}],
    ),
]
UNREADABLE_GRADIENTS = [
    ("missing gradient", CALLED[1:4], each("num_outputs", 3, 2**62)),
    ("outside the call", CALLED[1:4], each("num_outputs", 0, 1, *NEGATIVE)),
    ("a table has two axes", ["weight_gradients"], each("num_outputs", 0, 1, *NEGATIVE)),
    (
        "wrong capacity",
        ["row_gradients"],
        [{"num_rows": 3, "segments": {6: 1, 16: 2}}, {"num_rows": 5}],
    ),
    ("outside the output", ["squared_norm"], each("dim", 3, *HUGE)),
    ("outside the output", ["squared_norm"], [{"dim": -1, "segments": {9: 1, 19: 1}}]),
    ("num_rows does not fit", ["squared_norm"], each("num_rows", 2**31, 2**63 - 1)),
    ("outside the tables", ["row_gradients", "squared_norm"], each("num_rows", 0, *NEGATIVE)),
]


@pytest.mark.slow_rows("squared_norm", "row_gradients", "weight_gradients")
@needs_native
@pytest.mark.parametrize("target", CALLED)
def test_a_call_whose_numbers_lead_outside_or_wrap_around_is_refused(target):
    # The unchanged call is valid.
    jax.block_until_ready(made(target))
    # The width of a list is ignored if the list has offsets.
    jax.block_until_ready(made(target, lists={2: 2**62}))
    wrong_calls = [(complaint, CALLED, changes) for complaint, changes in UNREADABLE]
    for complaint, targets, changes in wrong_calls + UNREADABLE_GRADIENTS:
        if target not in targets:
            continue
        for change in changes:
            with pytest.raises(jax.errors.JaxRuntimeError, match=complaint):
                jax.block_until_ready(made(target, **change))


def test_ids_of_8_bits_are_served():
    ids = jnp.int8([3, -1, 9])
    call = Call.of([IdList.single(ids)], ["sum"])
    (rows,) = api.rows_of_ids(call, [Place(0, 5)], [8], spread=1, rows_per_shard=64)
    assert rows.tolist() == [8, NO_ROW, NO_ROW]
    offsets = jnp.asarray([0, 3])
    ((num_inside, num_outside),) = api.count_ids([ids], [offsets], [8])
    assert (num_inside, num_outside) == (1, 1)

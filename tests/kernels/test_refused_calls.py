"""The handlers themselves refuse calls from which memory would suffer, whatever is checked before them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsembed.kernels import api, devices, native
from rsembed.kernels.contract import NO_ROW, Block, JaggedBatch, JaggedGradients, Segment, SegmentGradients
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
    return {name: np.int64(value) for name, value in named.items()} | ({"stacks": np.int64(values)} if values else {})


FOUR, FOUND, NUMBERS = of(4), [of(4), of(4), of()], {"spread": np.int64(1), "rows_per_shard": np.int64(8)}
ROUND, SIZES = [of(dtype=jnp.bool_), of(2, 3), of(2)], numbers(num_lanes=[1], capacities=[2])
QUEUE = jnp.ones((1, 2), jnp.int32), jnp.zeros((1, 1, 2), jnp.uint32), jnp.zeros(3, jnp.int32), jnp.zeros(2, jnp.int32)
ENTRIES = [of(16), of(11), of(16, dtype=jnp.float32)]
BUFFERS = jnp.zeros(16, jnp.int32), FAR, FAR, GAINS
GATHERS = {"gathers": True}
REFUSED = [
    ("wrong number of keys", "unique_keys", [FOUR] * 3, (WORDS[:3], *KEYS[1:], ROWS), {}),
    ("wrong number of tables", "unique_keys", [FOUR] * 3, (*KEYS[:3], ROWS[:3], ROWS), {}),
    ("wrong size of a result", "unique_keys", [FOUR, FOUR, of(3)], (*KEYS, ROWS), {}),
    ("power of two", "find_keys", FOUND, (LANES[:3], ROWS[:3], *KEYS), numbers(num_tables=1)),
    ("two lanes in each", "find_keys", FOUND, (LANES[:2], ROWS, *KEYS), numbers(num_tables=1)),
    ("tables of keys are equally large", "find_keys", FOUND, (LANES, ROWS, *KEYS), numbers(num_tables=3)),
    (
        *("wrong number of rows", "insert_keys", [of(4, 2, dtype=jnp.uint32), FOUR, of(1), of(1)]),
        *((LANES, ROWS, ONE, ONE, *KEYS, ROWS[:3]), {}),
    ),
    ("wrong size of rows or of a count", "take_rows", [FOUR, of(3), of(3)], (ROWS, ROWS[:3], MARKS, NONE), {}),
    ("alias", "count_uses", [FOUR] * 2, (ROWS, ROWS, ROWS, jnp.int32(0), ROWS), {}),
    ("wrong size of a lane", "distinct", [FOUR, FOUR, of(3), FOUR, of(3)], (ROWS, ROWS[:3]), {}),
    (
        *("wrong type of a lane", "distinct", [FOUR, FOUR, of(3), FOUR, of(4, dtype=jnp.int8)]),
        *((ROWS, ROWS.astype(jnp.int8)), {}),
    ),
    ("unreadable places", "rows_of_ids", [FOUR], (ROWS,), NUMBERS | numbers(places=[0] * 3)),
    ("wrong size of rows", "rows_of_ids", [of(3)], (ROWS,), NUMBERS | numbers(places=[0] * 4)),
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
    ("differ in size", "unpack_blocks", [of(2, 3, dtype=jnp.uint32)], (jnp.zeros((2, 4), jnp.uint32),), {}),
    ("wrong size of places", "round_places", ROUND, (*QUEUE, WORDS), SIZES),
    ("unreadable queues", "round_places", ROUND, (*QUEUE[:2], QUEUE[2][:2], QUEUE[3], WORDS), SIZES),
    ("unreadable queues", "round_places", ROUND, (*QUEUE, WORDS, WORDS), SIZES),
]


@needs_native
@pytest.mark.parametrize(("complaint", "target", "results", "operands", "attributes"), REFUSED)
def test_a_call_whose_parts_do_not_fit_is_refused(complaint, target, results, operands, attributes):
    with pytest.raises(jax.errors.JaxRuntimeError, match=complaint):
        jax.block_until_ready(devices.call_handler(f"rsembed_{target}", results, *operands, **attributes))


# Numbers of a block: its first bag and how many, its table, the first row and how many, its output and the stride.
UNREADABLE = [
    ("outside the offsets", [0, 1], {}),
    ("outside the tables", None, {3: 2}),
    ("outside the offsets", None, {0: 2**63 - 1}),
    ("outside the offsets", None, {1: 2**63 - 1}),
    ("outside the tables", None, {3: 2**63 - 1}),
    ("outside the tables", None, {4: 2**63 - 1}),
    ("outside the output", None, {5: 2**63 - 1}),
    ("outside the output", None, {5: 2**63 - 1, "combiner": -1}),
    ("outside the output", None, {6: 2**62}),
    ("outside the output", None, {6: 2**62, "combiner": -1}),
    ("unreadable blocks", None, {6: 0, "combiner": 2**40}),
]


@needs_native
@pytest.mark.parametrize(("complaint", "offsets", "changes"), UNREADABLE)
def test_a_jagged_call_whose_numbers_lead_outside_or_wrap_around_is_refused(complaint, offsets, changes):
    changes = {"combiner": 0} | changes
    block = np.int64([changes.get(place, number) for place, number in enumerate([1, 2, 0, 1, 3, 0, 2])])
    operands = jnp.zeros(8, jnp.int32), jnp.asarray(offsets or [0, 2, 5, 7], jnp.int32), TABLE
    attributes = {"blocks": block, "combiner": np.int64(changes["combiner"]), "has_weights": np.bool_(False)}
    with pytest.raises(jax.errors.JaxRuntimeError, match=complaint):
        results = [of(16, dtype=jnp.float32)]
        jax.block_until_ready(devices.call_handler("rsembed_lookup_jagged", results, *operands, **attributes))


NO_BAGS, SMALL = Segment(ROWS, None, None, "none"), jnp.asarray([3, -1, 9], jnp.int8)
FALLING = JaggedBatch(
    *(jnp.zeros(10, jnp.int32), jnp.asarray([0, 9, 3, 9], jnp.int32), None, "sum"),
    *(tuple(Block(bag, 1, 0, 0, 4) for bag in range(3)), "blocks"),
)
DECLINED = [
    ("older than rsembed_of_tomorrow; reinstall", lambda: devices.call_handler("rsembed_of_tomorrow", [FOUR])),
    ("lanes are int32 or uint32, not int16", lambda: native.distinct(ROWS, (ROWS.astype(jnp.int16),), 2)),
    ("ids and offsets are int32, not int8", lambda: native.rows_of_ids([SMALL], [Place(0, 5)], [8], 1, 64)),
    ("those of threefry2x32", lambda: native.row_bits(jax.random.key(5, impl="rbg"), (WORDS,), 3)),
    ("offsets must not fall", lambda: native.row_gradients(4, JaggedGradients(FALLING, jnp.ones(9), 0, [3]))),
    ("2 segments but 1 output", lambda: native.row_gradients(3, SegmentGradients([NO_BAGS] * 2, [TABLE]))),
    ("combiner 'sum' and offsets do not go together", lambda: Segment(ROWS, None, None, "sum")),
    ("combiner 'none' and offsets do not go together", lambda: Segment(ROWS, ONE, None, "none")),
    ("float32, bfloat16 or float16, not float8", lambda: native.lookup(TABLE.astype(jnp.float8_e5m2), [NO_BAGS])),
]


@needs_native
@pytest.mark.parametrize(("reason", "call"), DECLINED)
def test_a_call_that_the_library_cannot_serve_is_declined(reason, call):
    with pytest.raises((NotImplementedError, ValueError, jax.errors.JaxRuntimeError), match=reason):
        jax.block_until_ready(call())


def test_ids_of_8_bits_are_served_by_the_definition():
    (rows,) = api.rows_of_ids([SMALL], [Place(0, 5)], [8], spread=1, rows_per_shard=64)
    assert rows.tolist() == [8, NO_ROW, NO_ROW]

"""Kernels for keys equal dictionaries and `np.unique`, and their definition to the bit, whatever keys do."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.testing import assert_array_equal

from rsembed.kernels import api, keyed, native
from rsembed.kernels.contract import NO_ROW
from rsembed.kernels.keyed import DELETED, EMPTY, MAX_COUNT
from rsembed.keys import Keys, join_keys, split_keys
from tests.kernels.cases import IMPLEMENTATIONS, needs_native
from tests.oracles import hash_of_key
from tests.world import assert_same

LARGE = 20_000  # several tasks and digits
NUM_TABLES, CAPACITY = 3, 8  # of keys in the same arrays

# Loops are compiled once for each size, not in every call.
defined = {
    name: jax.jit(getattr(keyed, name))
    for name in ("insert_keys", "find_keys", "unique_keys", "take_rows")
}

GENERATOR = np.random.default_rng(0)


def of(implementation, name):
    """A kernel of an implementation."""
    return defined[name] if implementation == "reference" else getattr(native, name)


def mixed(keys):
    """The hash of uint64 keys."""
    return np.asarray([hash_of_key(key) for key in keys.tolist()], np.uint32)


@functools.cache
def crowd(num_keys, mask=0xFFF):
    """Keys whose hashes agree in the bits of the mask."""
    keys = GENERATOR.integers(0, 2**64, 200_000, dtype=np.uint64)
    hashes = mixed(keys) & mask
    return keys[hashes == np.bincount(hashes & 0xFFF).argmax()][:num_keys]


def draw_keys(kind, count):
    return {
        "all equal": lambda: np.full(count, 2**63 + 5, np.uint64),
        "all distinct": lambda: (
            GENERATOR.permutation(count).astype(np.uint64) * np.uint64(2**33 + 1)
        ),
        "many equal": lambda: GENERATOR.zipf(1.2, count).astype(np.uint64),
        "64 bits": lambda: GENERATOR.integers(0, 2**64, count // 2 + 1, dtype=np.uint64).repeat(2)[
            :count
        ],
        "equal lower halves": lambda: (
            GENERATOR.integers(0, 2**31, count, dtype=np.uint64) << np.uint64(32)
        ),
        "colliding": lambda: np.resize(crowd(40), count),
    }[kind]()


KINDS = ("all equal", "all distinct", "many equal", "64 bits", "equal lower halves", "colliding")


def check_distinct(found, owners, lanes, num_owners):
    """Against sorted tuples and a dictionary."""
    out_lanes, entry_of, first_of, offsets, counts = jax.tree.map(np.asarray, found)
    lanes = [np.asarray(lane) for lane in lanes]
    names = [
        (o, *(int(lane[i]) for lane in lanes)) if 0 <= o < num_owners else None
        for i, o in enumerate(owners)
    ]
    first = {}
    for i, name in enumerate(names):
        if name is not None:
            first.setdefault(name, i)
    order = sorted(first)
    number = {name: k for k, name in enumerate(order)}
    assert entry_of.tolist() == [NO_ROW if name is None else number[name] for name in names]
    assert first_of.tolist() == [first[name] for name in order] + [NO_ROW] * (
        len(names) - len(order)
    )
    occurrences = collections.Counter(names)
    assert counts.tolist() == [occurrences[name] for name in order] + [0] * (
        len(names) - len(order)
    )
    assert offsets.tolist() == [sum(name[0] < d for name in order) for d in range(num_owners + 1)]
    for k, (out, lane) in enumerate(zip(out_lanes, lanes, strict=True)):
        assert out.dtype == lane.dtype
        assert out.tolist() == [name[k + 1] for name in order] + [0] * (len(names) - len(order))


def draw_lanes(kind, count):
    if kind == "signed":
        return [
            GENERATOR.integers(-5, 5, count).astype(np.int32),
            GENERATOR.integers(-(2**31), 2**31, count, np.int32),
        ]
    if kind == "three":
        return [
            GENERATOR.integers(0, 7, count).astype(np.int32),
            np.full(count, 2**32 - 1, np.uint32),
            GENERATOR.integers(0, 3, count).astype(np.uint32),
        ]
    if kind == "none":
        return []
    keys = draw_keys(kind, count)
    return [(keys >> np.uint64(32)).astype(np.uint32), keys.astype(np.uint32)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", [*KINDS, "signed", "three", "none"])
def test_distinct_entries_are_those_of_a_dictionary(kind, implementation):
    for count, num_owners in ((0, 2), (1, 1), (300, 5), (LARGE, 5)):
        lanes = [jnp.asarray(lane) for lane in draw_lanes(kind, count)]
        owners = GENERATOR.integers(-1, num_owners + 1, count).astype(np.int32)
        owners[owners == 2] = 3  # an owner without entries
        owners[3::11], owners[5::13] = -(2**31), NO_ROW
        found = api.distinct(
            jnp.asarray(owners), lanes, num_owners=num_owners, implementation=implementation
        )
        check_distinct(found, owners.tolist(), lanes, num_owners)


def python_unique_keys(numbers, is_key, occurrences):
    number, first_of, counts = {}, [], []
    entry_of = [NO_ROW] * len(numbers)
    for i, key in enumerate(numbers):
        if not is_key[i]:
            continue
        if key not in number:
            number[key] = len(number)
            first_of.append(i)
            counts.append(0)
        entry_of[i] = number[key]
        counts[number[key]] = min(counts[number[key]] + occurrences[i], MAX_COUNT)
    padding = len(numbers) - len(number)
    return [entry_of, first_of + padding * [NO_ROW], counts + padding * [0]]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_unique_keys_are_those_of_a_dictionary_for_each_table(kind, implementation):
    for count in (0, 1, 300, LARGE):
        numbers, is_key = draw_keys(kind, count), GENERATOR.random(count) < 0.9
        occurrences = GENERATOR.integers(0, 5, count, dtype=np.int32)
        occurrences[:1] = MAX_COUNT - 1
        for table in (None, GENERATOR.integers(0, NUM_TABLES, count, dtype=np.int32)):
            keys = split_keys(numbers)._replace(is_key=is_key, table=table)
            found = of(implementation, "unique_keys")(
                jax.tree.map(jnp.asarray, keys), jnp.asarray(occurrences)
            )
            names = (
                numbers.tolist()
                if table is None
                else list(zip(table.tolist(), numbers.tolist(), strict=True))
            )
            assert [lane.tolist() for lane in found] == python_unique_keys(
                names, is_key, occurrences.tolist()
            )


def empty_table(num_slots):
    lanes = jnp.zeros((num_slots, 2), jnp.uint32)
    return (
        lanes,
        jnp.full(num_slots, EMPTY, jnp.int32),
        jnp.zeros(1, jnp.int32),
        jnp.zeros(1, jnp.int32),
    )


def held(table):
    """Keys and rows in the slots, as they lie."""
    lanes, rows = np.asarray(table[0]), np.asarray(table[1])
    return dict(zip(join_keys(*lanes[rows >= 0].T).tolist(), rows[rows >= 0].tolist(), strict=True))


def as_call(numbers, is_key=None):
    keys = split_keys(np.asarray(numbers, np.uint64))
    return jax.tree.map(
        jnp.asarray, keys if is_key is None else keys._replace(is_key=np.asarray(is_key))
    )


def without_rows(table, numbers):
    """The table after some keys were deleted, written by hand."""
    lanes, rows, num_keys, num_deleted = map(np.array, table)
    gone = (rows >= 0) & np.isin(join_keys(*lanes.T), numbers)
    rows[gone] = DELETED
    return (
        jnp.asarray(lanes),
        jnp.asarray(rows),
        jnp.asarray(num_keys - gone.sum()),
        jnp.asarray(num_deleted + gone.sum()),
    )


@needs_native
@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 2**32),
    st.sampled_from(["64 bits", "colliding", "all distinct", "equal lower halves"]),
)
def test_keys_lie_in_the_slots_that_the_definition_gives_them(seed, kind):
    """The order in which colliding keys claim slots decides, and deleted slots are used again."""
    generator, table, expected = np.random.default_rng(seed), empty_table(64), {}
    pool = np.unique(draw_keys(kind, 80))
    for number in range(6):
        numbers = generator.permutation(pool)[:20]
        is_key = (
            np.array([k not in expected for k in numbers.tolist()])
            & (generator.random(20) < 0.8)[: len(numbers)]
        )
        rows = jnp.arange(len(numbers), dtype=jnp.int32) + 100 * number
        keys = as_call(numbers, is_key)
        found = native.insert_keys(*table, keys, rows)
        assert_same(found, defined["insert_keys"](*table, keys, rows))
        room = 48 - int(table[2][0]) - int(table[3][0])
        new = [
            (int(k), 100 * number + i)
            for i, (k, ok) in enumerate(zip(numbers, is_key, strict=True))
            if ok
        ][:room]
        expected |= dict(new)
        assert held(found) == expected and int(found[2][0]) == len(expected)
        asked = as_call(np.resize(pool, 97), np.arange(97) % 7 != 0)
        places = native.find_keys(found[0], found[1], asked)
        wanted = [
            expected.get(k, NO_ROW) if i % 7 else NO_ROW
            for i, k in enumerate(np.resize(pool, 97).tolist())
        ]
        assert places[1].tolist() == wanted
        assert_same(places, defined["find_keys"](found[0], found[1], asked))
        gone = generator.permutation(list(expected))[:8]
        table = without_rows(found, gone.astype(np.uint64))
        expected = {k: row for k, row in expected.items() if k not in set(gone.tolist())}


@needs_native
def test_a_large_call_fills_the_slots_that_the_definition_fills():
    numbers = GENERATOR.permutation(np.unique(GENERATOR.integers(0, 2**64, 5000, dtype=np.uint64)))
    table, keys, rows = (
        empty_table(1 << 13),
        as_call(numbers),
        jnp.arange(len(numbers), dtype=jnp.int32),
    )
    found, wanted = (
        insert(*table, keys, rows) for insert in (native.insert_keys, defined["insert_keys"])
    )
    assert_same(found, wanted)


@needs_native
def test_a_table_without_an_empty_slot_ends_every_search():
    """No call of the library leaves one, but a file might."""
    lanes, rows, num_keys, num_deleted = empty_table(16)
    full = jnp.full(16, DELETED, jnp.int32), num_keys, num_deleted
    slots, found, num_absent = native.find_keys(lanes, full[0], as_call([1, 2]))
    assert slots.tolist() == found.tolist() == [NO_ROW, NO_ROW] and num_absent == 2
    taken = jnp.full(16, 7, jnp.int32)
    after = native.insert_keys(
        lanes, taken, num_keys, num_deleted, as_call([3]), jnp.zeros(1, jnp.int32)
    )
    assert_array_equal(after[1], taken)
    assert rows.shape == (16,)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_uses_are_counted_as_a_loop_counts_them(implementation):
    capacity = 50
    rows = GENERATOR.integers(-3, capacity + 3, LARGE).astype(np.int32)
    rows[rows < 0] = NO_ROW
    rows[rows == 7] = 8  # a row that nobody uses
    occurrences = GENERATOR.integers(0, 4, LARGE).astype(np.int32)
    last_step = GENERATOR.integers(-1, 5, capacity).astype(np.int32)
    counts = np.where(np.arange(capacity) % 9 == 0, MAX_COUNT - 5, 11).astype(np.int32)
    operands = (
        *map(jnp.asarray, (last_step, counts, rows)),
        jnp.int32(9),
        jnp.asarray(occurrences),
    )
    found = api.count_uses(*operands, implementation=implementation)
    expected = counts.astype(np.int64)
    for row, more in zip(rows, occurrences, strict=True):
        if row < capacity:
            expected[row] += more
            last_step[row] = 9
    assert_array_equal(found[0], last_step)
    assert_array_equal(found[1], np.minimum(expected, MAX_COUNT))


@needs_native
def test_tables_of_keys_change_where_they_lie():
    num_slots, keys = 1 << 16, as_call(np.arange(100))
    uses = jnp.zeros(num_slots, jnp.int32)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def program(table, uses, keys):
        rows = native.find_keys(table[0], table[1], keys)[1]
        missing = keys.only(rows == NO_ROW)
        table = native.insert_keys(*table, missing, jnp.arange(100, dtype=jnp.int32))
        return table, native.count_uses(
            uses, uses + 1, rows, jnp.int32(3), jnp.ones(100, jnp.int32)
        )[1]

    table = empty_table(num_slots)
    compiled = program.lower(table, uses, keys).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * num_slots  # no second table of lanes
    address = table[0].unsafe_buffer_pointer()
    table, _ = compiled(table, uses, keys)
    assert table[0].unsafe_buffer_pointer() == address and held(table) == {k: k for k in range(100)}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dim", [1, 7, 33])
def test_bits_of_rows_are_those_of_their_own_keys(dim, implementation):
    high, low = (jnp.asarray(GENERATOR.integers(0, 2**32, 9, dtype=np.uint32)) for _ in range(2))
    keys, table = (
        jax.random.split(jax.random.key(5), NUM_TABLES),
        GENERATOR.integers(0, NUM_TABLES, 9, dtype=np.int32),
    )
    for lanes in ((low,), (high, low)):
        for key, of_table in ((keys[1], None), (keys, jnp.asarray(table))):
            first = keys[np.full(9, 1) if of_table is None else table]
            own = [
                functools.reduce(jax.random.fold_in, values, one)
                for one, *values in zip(first, *lanes, strict=True)
            ]
            expected = [jax.random.bits(one, (dim,), jnp.uint32) for one in own]
            found = api.row_bits(key, lanes, dim, of_table, implementation=implementation)
            assert_array_equal(found, expected)


def test_no_key_is_no_work():
    nothing = Keys(jnp.zeros(0, jnp.uint32), jnp.zeros(0, jnp.uint32), jnp.zeros(0, bool))
    table = api.insert_keys(*empty_table(4), nothing, jnp.zeros(0, jnp.int32))
    assert held(table) == {} and api.find_keys(table[0], table[1], nothing)[1].shape == (0,)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_come_from_the_stack_of_their_table(implementation):
    generator, heights = np.random.default_rng(1), [0, 3, CAPACITY]
    for count in (1, 40):
        table, wants = generator.integers(0, NUM_TABLES, count), generator.random(count) < 0.8
        stacks = [generator.permutation(CAPACITY).tolist() for _ in range(NUM_TABLES)]
        free = jnp.asarray(np.concatenate(stacks), jnp.int32)
        given = (
            free,
            jnp.asarray(heights, jnp.int32),
            jnp.asarray(wants),
            jnp.asarray(table, jnp.int32),
        )
        rows, left, without = of(implementation, "take_rows")(*given)
        stacks, expected, lacking = (
            [s[:height] for s, height in zip(stacks, heights, strict=True)],
            [],
            [0] * 3,
        )
        for own, want in zip(table.tolist(), wants, strict=True):
            expected.append(own * CAPACITY + stacks[own].pop() if want and stacks[own] else NO_ROW)
            lacking[own] += bool(want and expected[-1] == NO_ROW)
        assert (rows.tolist(), left.tolist(), without.tolist()) == (
            expected,
            [len(s) for s in stacks],
            lacking,
        )

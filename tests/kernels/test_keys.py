"""Kernels for keys equal dictionaries and `np.unique`, and native kernels equal the reference."""

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
from rsembed.keys import join_keys, split_keys
from tests.kernels.cases import IMPLEMENTATIONS, needs_native
from tests.oracles import hash_of_key
from tests.world import assert_same

# So many entries are split among several tasks, and their numbers have several digits to sort by.
LARGE = 20_000
# Number of keyed tables in the same arrays, and number of rows of each.
NUM_TABLES, CAPACITY = 3, 8

# Each loop is compiled once for each size, not in each call.
defined = {
    name: jax.jit(getattr(keyed, name))
    for name in ("insert_keys", "find_keys", "unique_keys", "take_rows")
}

GENERATOR = np.random.default_rng(0)


def of(implementation, name):
    """The kernel `name` of an implementation."""
    return defined[name] if implementation == "reference" else getattr(native, name)


@functools.cache
def distinct_of(implementation, num_owners):
    return jax.jit(
        functools.partial(api.distinct, num_owners=num_owners, implementation=implementation)
    )


@functools.cache
def colliding_keys():
    """Forty keys with hashes that have the same last 12 bits."""
    keys = GENERATOR.integers(0, 2**64, 200_000, dtype=np.uint64)
    hashes = np.asarray([hash_of_key(key) for key in keys.tolist()]) & 0xFFF
    return keys[hashes == np.bincount(hashes).argmax()][:40]


def draw_keys(kind, count):
    if kind == "all equal":
        return np.full(count, 2**63 + 5, np.uint64)
    if kind == "all distinct":
        return GENERATOR.permutation(count).astype(np.uint64) * np.uint64(2**33 + 1)
    if kind == "64 bits":
        return np.resize(GENERATOR.integers(0, 2**64, count // 2 + 1, dtype=np.uint64), count)
    if kind == "equal lower halves":
        return GENERATOR.integers(0, 2**31, count, dtype=np.uint64) << np.uint64(32)
    return np.resize(colliding_keys(), count)


KINDS = ("all equal", "all distinct", "64 bits", "equal lower halves", "colliding")


def distinct_names(names, is_entry):
    """Distinct names in ascending order, among the entries that `is_entry` marks.

    Returns the distinct names, the index of the first entry of each, the number of the name of each
    marked entry, and the number of entries of each name.
    """
    distinct, first, number, counts = np.unique(
        names[is_entry], axis=0, return_index=True, return_inverse=True, return_counts=True
    )
    return distinct, np.flatnonzero(is_entry)[first], number.reshape(-1), counts


def assert_padded(actual, values, padding):
    """Asserts that the array has the values, and then only padding."""
    assert_array_equal(
        actual, np.pad(values, (0, len(actual) - len(values)), constant_values=padding)
    )


def draw_lanes(kind, count):
    if kind == "signed":
        narrow = GENERATOR.integers(-5, 5, count, np.int32)
        return [narrow, GENERATOR.integers(-(2**31), 2**31, count, np.int32)]
    if kind == "three":
        largest = np.full(count, 2**32 - 1, np.uint32)
        return [
            GENERATOR.integers(0, 7, count, np.int32),
            largest,
            GENERATOR.integers(0, 3, count, np.uint32),
        ]
    if kind == "none":
        return []
    return split_keys(draw_keys(kind, count))[:2]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", [*KINDS, "signed", "three", "none"])
def test_distinct_entries_are_those_of_a_dictionary(kind, implementation):
    for count, num_owners in ((0, 2), (1, 1), (300, 5), (LARGE, 5)):
        lanes = draw_lanes(kind, count)
        owners = GENERATOR.integers(-1, num_owners + 1, count, np.int32)
        # Owner 2 has no entries.
        owners[owners == 2] = 3
        owners[3::11] = -(2**31)
        owners[5::13] = NO_ROW
        distinct = distinct_of(implementation, num_owners)
        out_lanes, entry_of, first_of, offsets, counts = distinct(
            jnp.asarray(owners), [jnp.asarray(lane) for lane in lanes]
        )
        entry_of = np.asarray(entry_of)
        is_entry = (owners >= 0) & (owners < num_owners)
        names = np.stack([owners, *lanes], axis=1)
        wanted, first, number, occurrences = distinct_names(names, is_entry)
        assert_array_equal(entry_of[is_entry], number)
        assert np.all(entry_of[~is_entry] == NO_ROW)
        assert_padded(first_of, first, NO_ROW)
        assert_padded(counts, occurrences, 0)
        assert_array_equal(offsets, np.searchsorted(wanted[:, 0], range(num_owners + 1)))
        for out_lane, lane, values in zip(out_lanes, lanes, wanted.T[1:], strict=True):
            assert out_lane.dtype == lane.dtype
            assert_padded(out_lane, values, 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_unique_keys_are_those_of_a_dictionary_for_each_table(kind, implementation):
    for count in (0, 1, 300, LARGE):
        keys = split_keys(draw_keys(kind, count))
        is_key = GENERATOR.random(count) < 0.9
        occurrences = GENERATOR.integers(0, 5, count, np.int32)
        occurrences[:1] = MAX_COUNT - 1
        for table in (None, GENERATOR.integers(0, NUM_TABLES, count, np.int32)):
            given_keys = jax.tree.map(jnp.asarray, keys._replace(is_key=is_key, table=table))
            entry_of, first_of, counts = of(implementation, "unique_keys")(
                given_keys, jnp.asarray(occurrences)
            )
            entry_of = np.asarray(entry_of)
            tables = np.zeros(count, np.int32) if table is None else table
            names = np.stack([tables, keys.high, keys.low], axis=1)
            _, first, number, _ = distinct_names(names, is_key)
            # Keys are numbered in the order of their first occurrence.
            order = np.argsort(first)
            assert_array_equal(entry_of[is_key], np.argsort(order)[number])
            assert np.all(entry_of[~is_key] == NO_ROW)
            assert_padded(first_of, first[order], NO_ROW)
            sums = np.bincount(number, occurrences[is_key], len(first))[order]
            assert_padded(counts, np.minimum(sums, MAX_COUNT), 0)


def empty_table(num_slots):
    lanes = jnp.zeros((num_slots, 2), jnp.uint32)
    rows = jnp.full(num_slots, EMPTY, jnp.int32)
    return lanes, rows, jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)


def as_call(numbers, is_key=None):
    keys = split_keys(np.asarray(numbers, np.uint64))
    if is_key is not None:
        keys = keys._replace(is_key=is_key)
    return jax.tree.map(jnp.asarray, keys)


def without_rows(table, numbers):
    """The table after deletion of some keys, computed in numpy."""
    lanes, rows, num_keys, num_deleted = table
    is_deleted = (rows >= 0) & np.isin(join_keys(*np.asarray(lanes).T), numbers)
    count = jnp.sum(is_deleted)
    return lanes, jnp.where(is_deleted, DELETED, rows), num_keys - count, num_deleted + count


@needs_native
@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 2**32),
    st.sampled_from(["64 bits", "colliding", "all distinct", "equal lower halves"]),
)
def test_keys_lie_in_the_slots_that_the_definition_gives_them(seed, kind):
    """The order in which colliding keys take slots matters, and deleted slots are used again."""
    generator = np.random.default_rng(seed)
    table = empty_table(64)
    expected = {}
    pool = np.unique(draw_keys(kind, 80))
    asked = np.resize(pool, 97)
    is_asked = np.arange(97) % 7 != 0
    for number in range(6):
        numbers = generator.permutation(pool)[:20]
        is_new = ~np.isin(numbers, np.array([*expected], np.uint64))
        is_new &= generator.random(len(numbers)) < 0.8
        rows = np.arange(len(numbers), dtype=np.int32) + 100 * number
        call = as_call(numbers, is_new), jnp.asarray(rows)
        filled = native.insert_keys(*table, *call)
        assert_same(filled, defined["insert_keys"](*table, *call))
        room = 48 - int(table[2][0]) - int(table[3][0])
        expected |= dict(zip(numbers[is_new][:room].tolist(), rows[is_new].tolist(), strict=False))
        assert filled[2] == len(expected)
        actual = native.find_keys(*filled[:2], as_call(asked, is_asked))
        assert_same(actual, defined["find_keys"](*filled[:2], as_call(asked, is_asked)))
        rows_of_all = np.asarray([expected.get(key, NO_ROW) for key in asked.tolist()])
        assert_array_equal(actual[1], np.where(is_asked, rows_of_all, NO_ROW))
        deleted = generator.permutation(np.array([*expected], np.uint64))[:8]
        table = without_rows(filled, deleted)
        for key in deleted.tolist():
            del expected[key]


@needs_native
def test_a_large_call_fills_the_slots_that_the_definition_fills():
    numbers = GENERATOR.permutation(np.unique(GENERATOR.integers(0, 2**64, 5000, dtype=np.uint64)))
    call = *empty_table(1 << 13), as_call(numbers), jnp.arange(len(numbers), dtype=jnp.int32)
    assert_same(native.insert_keys(*call), defined["insert_keys"](*call))


@needs_native
def test_a_table_without_an_empty_slot_ends_every_search():
    """The library never makes such a table, but a file could contain one."""
    lanes, _, num_keys, num_deleted = empty_table(16)
    slots, found_rows, num_absent = native.find_keys(lanes, jnp.full(16, DELETED), as_call([1, 2]))
    assert slots.tolist() == found_rows.tolist() == [NO_ROW, NO_ROW]
    assert num_absent == 2
    taken = jnp.full(16, 7)
    row = jnp.zeros(1, jnp.int32)
    filled = native.insert_keys(lanes, taken, num_keys, num_deleted, as_call([3]), row)
    assert_array_equal(filled[1], taken)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_uses_are_counted_as_a_loop_counts_them(implementation):
    capacity = 50
    rows = GENERATOR.integers(-3, capacity + 3, LARGE)
    rows[rows < 0] = NO_ROW
    # Row 7 is never used.
    rows[rows == 7] = 8
    occurrences = GENERATOR.integers(0, 4, LARGE)
    last_step = GENERATOR.integers(-1, 5, capacity)
    counts = np.where(np.arange(capacity) % 9 == 0, MAX_COUNT - 5, 11)
    operands = map(jnp.asarray, (last_step, counts, rows, 9, occurrences))
    actual = api.count_uses(*operands, implementation=implementation)
    is_row = rows < capacity
    last_step[rows[is_row]] = 9
    np.add.at(counts, rows[is_row], occurrences[is_row])
    assert_array_equal(actual[0], last_step)
    assert_array_equal(actual[1], np.minimum(counts, MAX_COUNT))


@needs_native
def test_tables_of_keys_change_where_they_lie():
    num_slots = 1 << 16
    keys = as_call(np.arange(100))
    new_rows = jnp.arange(100, dtype=jnp.int32)
    uses = jnp.zeros(num_slots, jnp.int32)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def program(table, uses, keys):
        rows = native.find_keys(*table[:2], keys)[1]
        table = native.insert_keys(*table, keys.only(rows == NO_ROW), new_rows)
        return table, native.count_uses(uses, uses + 1, rows, jnp.int32(3), new_rows)[1]

    table = empty_table(num_slots)
    compiled = program.lower(table, uses, keys).compile()
    # A second array of lanes would be as large.
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * num_slots
    address = table[0].unsafe_buffer_pointer()
    table, _ = compiled(table, uses, keys)
    assert table[0].unsafe_buffer_pointer() == address
    assert_array_equal(native.find_keys(*table[:2], keys)[1], new_rows)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dim", [1, 7, 33])
def test_bits_of_rows_are_those_of_their_own_keys(dim, implementation):
    high, low = (jnp.asarray(GENERATOR.integers(0, 2**32, 9, np.uint32)) for _ in range(2))
    keys = jax.random.split(jax.random.key(5), NUM_TABLES)
    tables = GENERATOR.integers(0, NUM_TABLES, 9, np.int32)
    for lanes in ((low,), (high, low)):
        bits = functools.partial(api.row_bits, lanes=lanes, dim=dim, implementation=implementation)
        of_each = bits(keys, table=jnp.asarray(tables))
        for row, key in enumerate(keys[tables]):
            for lane in lanes:
                key = jax.random.fold_in(key, lane[row])
            assert_array_equal(of_each[row], jax.random.bits(key, (dim,), jnp.uint32))
        assert_array_equal(bits(keys[1])[tables == 1], of_each[tables == 1])


def test_no_key_is_no_work():
    nothing = as_call([])
    table = api.insert_keys(*empty_table(4), nothing, jnp.zeros(0, jnp.int32))
    assert table[2] == 0
    assert api.find_keys(*table[:2], nothing)[1].shape == (0,)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_come_from_the_stack_of_their_table(implementation):
    generator = np.random.default_rng(1)
    heights = [0, 3, CAPACITY]
    for count in (1, 40):
        tables = generator.integers(0, NUM_TABLES, count)
        wants = generator.random(count) < 0.8
        free = np.stack([generator.permutation(CAPACITY) for _ in heights])
        operands = map(jnp.asarray, (free.reshape(-1), heights, wants, tables))
        rows, num_left, num_without = of(implementation, "take_rows")(*operands)
        stacks = [stack[:height].tolist() for stack, height in zip(free, heights, strict=True)]
        expected = []
        lacking = [0] * NUM_TABLES
        for table, is_wanted in zip(tables.tolist(), wants, strict=True):
            row = NO_ROW
            if is_wanted and stacks[table]:
                row = table * CAPACITY + stacks[table].pop()
            elif is_wanted:
                lacking[table] += 1
            expected.append(row)
        assert rows.tolist() == expected
        assert num_left.tolist() == [len(stack) for stack in stacks]
        assert num_without.tolist() == lacking

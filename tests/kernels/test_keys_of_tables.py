"""Several tables of keys in the same arrays are what each of them would be in arrays of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsembed.homes import hash_table, row_map
from rsembed.kernels import api, native, reference
from rsembed.kernels.contract import NO_ROW
from rsembed.keys import Keys, split_keys
from tests.kernels.test_keys import IMPLEMENTATIONS, crowd, needs_native, python_unique_keys

NUM_TABLES, CAPACITY, BATCH = 3, 8, 12
assign = jax.jit(functools.partial(row_map.assign, evict=row_map.score("lru")))
release, release_older, find = jax.jit(row_map.release), jax.jit(row_map.release_older), jax.jit(row_map.find)
calls = {
    "reference": {name: jax.jit(getattr(reference, name)) for name in ("unique_keys", "take_rows")},
    "native": {name: getattr(native, name) for name in ("unique_keys", "take_rows")},
}


def with_tables(numbers, table, is_key):
    """Keys as a call has them; without tables if `table` is None."""
    table = None if table is None else jnp.asarray(table, jnp.int32)
    keys = split_keys(np.asarray(numbers, np.uint64))
    return Keys(jnp.asarray(keys.high), jnp.asarray(keys.low), jnp.asarray(is_key), table)


def part_of(tree, number):
    """The leaves of one table, which lie behind those of the tables before it."""
    return jax.tree.map(lambda leaf: leaf.reshape(NUM_TABLES, -1, *leaf.shape[1:])[number], tree)


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equal_keys_of_other_tables_are_other_keys(implementation):
    generator = np.random.default_rng(0)
    for count in (0, 1, 20_000):
        numbers, table = generator.integers(0, 300, count), generator.integers(0, NUM_TABLES, count)
        is_key, occurrences = generator.random(count) < 0.9, generator.integers(0, 5, count, dtype=np.int32)
        keys = with_tables(numbers, table, is_key)
        found = calls[implementation]["unique_keys"](keys, jnp.asarray(occurrences))
        pairs = list(zip(table.tolist(), numbers.tolist(), strict=True))
        assert [lane.tolist() for lane in found] == python_unique_keys(pairs, is_key, occurrences.tolist())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_come_from_the_stack_of_their_table(implementation):
    generator, heights = np.random.default_rng(1), [0, 3, CAPACITY]
    for count in (1, 40):
        table, wants = generator.integers(0, NUM_TABLES, count), generator.random(count) < 0.8
        stacks = [generator.permutation(CAPACITY).tolist() for _ in range(NUM_TABLES)]
        free = jnp.asarray(np.concatenate(stacks), jnp.int32)
        given = free, jnp.asarray(heights, jnp.int32), jnp.asarray(wants), jnp.asarray(table, jnp.int32)
        rows, left, without = calls[implementation]["take_rows"](*given)
        stacks, expected, lacking = [s[:height] for s, height in zip(stacks, heights, strict=True)], [], [0] * 3
        for own, want in zip(table.tolist(), wants, strict=True):
            expected.append(own * CAPACITY + stacks[own].pop() if want and stacks[own] else NO_ROW)
            lacking[own] += bool(want and expected[-1] == NO_ROW)
        assert (rows.tolist(), left.tolist(), without.tolist()) == (expected, [len(s) for s in stacks], lacking)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_random_bits_are_drawn_with_the_key_of_the_table(implementation):
    keys, table = jax.random.split(jax.random.key(0), NUM_TABLES), np.array([2, 0, 1, 1, 2])
    lanes = tuple(jnp.asarray(np.arange(5) + k, jnp.uint32) for k in (7, 2**31))
    found = api.row_bits(keys, lanes, 3, jnp.asarray(table, jnp.int32), implementation=implementation)
    for place, own in enumerate(table):
        one = reference.row_bits(keys[own], [lane[place, None] for lane in lanes], 3)
        np.testing.assert_array_equal(found[place], one[0])


class Twin:
    """One `RowMap` of three tables, and three maps of one, through the same calls."""

    def __init__(self):
        self.joint = row_map.empty(*[CAPACITY] * NUM_TABLES, with_first_step=True)
        self.alone = [row_map.empty(CAPACITY, with_first_step=True) for _ in range(NUM_TABLES)]

    def assign(self, numbers, table, wanted, step):
        """Rows for those of these distinct keys that have none."""
        keys = with_tables(numbers, table, wanted)
        keys = keys.only(find(self.joint, keys) == NO_ROW)
        occurrences = jnp.arange(len(numbers), dtype=jnp.int32)
        self.joint, rows, evicted, without = assign(self.joint, keys, jnp.int32(step), occurrences)
        for own in range(NUM_TABLES):
            one = with_tables(numbers, None, np.asarray(keys.is_key) & (table == own))
            self.alone[own], own_rows, *counts = assign(self.alone[own], one, jnp.int32(step), occurrences)
            is_own = np.asarray(one.is_key)
            moved = np.where(own_rows == NO_ROW, NO_ROW, own_rows + own * CAPACITY)
            np.testing.assert_array_equal(np.asarray(rows)[is_own], moved[is_own])
            assert_same([evicted[own, None], without[own, None]], counts)
        self.check()
        np.testing.assert_array_equal(find(self.joint, keys), rows)

    def release(self, rows):
        self.joint = release(self.joint, jnp.asarray(rows, jnp.int32))
        for own in range(NUM_TABLES):
            is_own = (rows != NO_ROW) & (rows // CAPACITY == own)
            self.alone[own] = release(
                self.alone[own], jnp.asarray(np.where(is_own, rows % CAPACITY, NO_ROW), jnp.int32)
            )
        self.check()

    def release_older(self, step, number):
        self.joint = row_map.release_older(self.joint, jnp.int32(step), 1, number)
        for own in range(NUM_TABLES) if number is None else [number]:
            self.alone[own] = release_older(self.alone[own], jnp.int32(step), 1)
        self.check()

    def check(self):
        for own in range(NUM_TABLES):
            assert_same(part_of(self.joint, own), self.alone[own])


@needs_native
@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**32), st.booleans())
def test_row_maps_that_lie_together_change_as_if_they_lay_apart(seed, colliding):
    """Every leaf: slots, stacks, evictions and counts; small tables are rebuilt often."""
    generator, twin = np.random.default_rng(seed), Twin()
    pool = crowd(20) if colliding else np.arange(1, 21, dtype=np.uint64) * np.uint64(2**33 + 1)
    for step in range(8):
        pairs = generator.permutation(NUM_TABLES * pool.size)[:BATCH]
        wanted = generator.random(BATCH) < generator.choice([0.3, 1.0])
        twin.assign(pool[pairs // NUM_TABLES], pairs % NUM_TABLES, wanted, step)
        used = np.flatnonzero(np.asarray(twin.joint.last_step) != row_map.FREE)
        gone = generator.permutation(used)[: generator.integers(0, 8)]
        twin.release(np.concatenate([gone, np.full(8 - gone.size, NO_ROW)]))
        if step % 3 == 2:
            twin.release_older(step, generator.choice([None, 0, 2]))


@needs_native
def test_only_marked_tables_are_rebuilt():
    keys = with_tables(np.arange(6), np.arange(6) % 3, np.ones(6, bool))
    tables = hash_table.insert(hash_table.empty(CAPACITY, NUM_TABLES), keys, jnp.arange(6, dtype=jnp.int32))
    tables = hash_table.remove(tables, keys.only(jnp.arange(6) < 3))
    assert tables.num_deleted.tolist() == [1, 1, 1]
    rebuilt = jax.jit(hash_table.rebuild)(tables, jnp.asarray([True, False, True]))
    assert rebuilt.num_deleted.tolist() == [0, 1, 0] and rebuilt.num_keys.tolist() == [1, 1, 1]
    assert_same(part_of(rebuilt, 1), part_of(tables, 1))
    assert hash_table.find(rebuilt, keys)[0].tolist() == [NO_ROW] * 3 + [3, 4, 5]

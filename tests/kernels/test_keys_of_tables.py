"""Several tables of keys in the same arrays are what each of them would be in arrays of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsembed.kernels import api, native, reference
from rsembed.kernels.contract import NO_ROW
from rsembed.keys import Keys, split_keys
from tests.kernels.test_keys import IMPLEMENTATIONS, python_unique_keys

NUM_TABLES, CAPACITY = 3, 8
calls = {
    "reference": {name: jax.jit(getattr(reference, name)) for name in ("unique_keys", "take_rows")},
    "native": {name: getattr(native, name) for name in ("unique_keys", "take_rows")},
}


def with_tables(numbers, table, is_key):
    """Keys as a call has them; without tables if `table` is None."""
    table = None if table is None else jnp.asarray(table, jnp.int32)
    keys = split_keys(np.asarray(numbers, np.uint64))
    return Keys(jnp.asarray(keys.high), jnp.asarray(keys.low), jnp.asarray(is_key), table)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equal_keys_of_other_tables_are_other_keys(implementation):
    generator = np.random.default_rng(0)
    for count in (0, 1, 300 if implementation == "reference" else 20_000):
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

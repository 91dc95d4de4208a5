"""The hash table equals a dict after any insertions and removals, also of colliding keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st

from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW
from rsembed.kernels.keyed import DELETED
from rsembed.keys import join_keys, split_keys
from rsembed.storage.row_map import HashTable
from tests.oracles import hash_of_key

MAX_KEYS, NUM_SLOTS = 8, 16
# Number of keys of each call.
CALL = 6


def home(key):
    """The slot at which the search for a key begins."""
    return hash_of_key(key) % NUM_SLOTS


def keys_with_home(slot, count, high):
    keys_of_slot = (k for k in range(high << 32, (high << 32) + 10_000) if home(k) == slot)
    return [next(keys_of_slot) for _ in range(count)]


POOL = [
    0,
    1,
    2**32,
    2**63,
    2**64 - 1,
    *keys_with_home(NUM_SLOTS - 1, 5, 0),
    *keys_with_home(NUM_SLOTS - 1, 3, 7),
]


def padded(numbers, length=CALL):
    keys = split_keys(np.array([*numbers, *[3] * (length - len(numbers))], np.uint64))
    return keys._replace(is_key=np.arange(length) < len(numbers))


insert, remove = map(jax.jit, (HashTable.insert, HashTable.remove))
find = jax.jit(lambda table, keys: api.find_keys(table.keys, table.rows, keys, 1)[1])
empty = functools.cache(HashTable.empty)
calls = st.lists(
    st.tuples(
        st.sampled_from(["insert", "remove", "find"]),
        st.lists(st.sampled_from(POOL), max_size=CALL),
    ),
    max_size=14,
)


def check_lanes(table, expected):
    """Asserts the contents of the slots, without the functions under test."""
    rows = np.asarray(table.rows)
    stored = join_keys(*np.asarray(table.keys)[rows >= 0].T)
    assert dict(zip(stored.tolist(), rows[rows >= 0].tolist(), strict=True)) == expected
    assert (int(table.num_keys[0]), int(table.num_deleted[0])) == (
        len(expected),
        (rows == DELETED).sum(),
    )
    # No slot is still claimed by an unfinished insertion.
    assert (rows >= DELETED).all()
    assert table.num_deleted[0] <= NUM_SLOTS // 4


@settings(deadline=None, max_examples=60)
@given(calls)
def test_any_sequence_of_calls_equals_a_dict(sequence):
    table, expected, next_row = empty(MAX_KEYS), {}, 0
    for kind, numbers in sequence:
        if kind == "find":
            rows = find(table, padded(numbers)).tolist()
            assert rows == [expected.get(k, NO_ROW) for k in numbers] + [NO_ROW] * (
                CALL - len(numbers)
            )
            continue
        numbers = list(dict.fromkeys(numbers))
        if kind == "remove":
            table = remove(table, padded(numbers))
            expected = {k: row for k, row in expected.items() if k not in numbers}
        else:
            numbers = [k for k in numbers if k not in expected][: MAX_KEYS - len(expected)]
            rows = list(range(next_row, next_row + len(numbers)))
            table = insert(
                table, padded(numbers), np.array(rows + [0] * (CALL - len(rows)), np.int32)
            )
            expected |= dict(zip(numbers, rows, strict=True))
            next_row += len(numbers)
        check_lanes(table, expected)
    for start in range(0, len(POOL), CALL):
        numbers = POOL[start : start + CALL]
        assert find(table, padded(numbers)).tolist()[: len(numbers)] == [
            expected.get(k, NO_ROW) for k in numbers
        ]


def test_deleted_slots_are_used_again_and_cleared_before_searches_grow_long():
    table, expected = empty(MAX_KEYS), {}
    for generation in range(30):
        removed = list(expected)[:-3]
        new = [2**40 * generation + number for number in range(3)]
        rows = np.full(CALL, generation, np.int32)
        table = insert(remove(table, padded(removed)), padded(new), rows)
        expected = {key: row for key, row in expected.items() if key not in removed}
        expected |= dict.fromkeys(new, generation)
        check_lanes(table, expected)


def test_keys_beyond_the_bound_are_left_out_and_nothing_hangs():
    table = insert(empty(MAX_KEYS), padded(range(100, 164), 64), jnp.arange(64, dtype=jnp.int32))
    rows = find(table, padded(range(100, 164), 64)).tolist()
    assert rows == [*range(12), *[NO_ROW] * 52]

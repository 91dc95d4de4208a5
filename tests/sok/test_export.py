"""What leaves a table by key comes back by key, on any number of shards."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsembed import AdagradOptimizerSpec, Hashed, TableSpec
from rsembed.keys import join_keys, owners
from rsembed.sok import split_keys

KEPT = Hashed(key_dtype="uint64", admission_count=1, admission_capacity=4)
TABLE = TableSpec(
    name="users", vocabulary_size=8, embedding_dim=2, optimizer=AdagradOptimizerSpec(), storage=KEPT
)  # fmt: skip
# Two for each of three shards, three for each of two.
KEYS = np.array([2**64 - 1, 5, 0, 2**63, 2**32 + 6, 2**32 + 3], np.uint64)
VALUES = np.arange(12, dtype=np.float32).reshape(6, 2)


@functools.cache
def fresh(home=KEPT):
    return jax.jit(functools.partial(home.init, table=TABLE, shard=jnp.int32(0), num_shards=1))(jax.random.key(1))


def export(state, home=KEPT):
    return home.rows(*state, kept(home), 1)


def import_rows(state, rows, home=KEPT):
    return home.with_rows(*state, rows, kept(home), 1)


def kept(home):
    return dataclasses.replace(TABLE, storage=home)


@pytest.fixture(scope="module")
def everything():
    """Six rows with slots, steps and counts, and two keys that wait."""
    numbers = np.arange(6, dtype=np.int32)
    given = {
        "keys": KEYS,
        "values": VALUES,
        "last_step": numbers,
        "count": 10 + numbers,
        "slot_accumulator": 3 * VALUES,
    }
    waiting = {"waiting_keys": np.array([9, 8], np.uint64), "waiting_last_step": [4, 3], "waiting_count": [1, 1]}
    return given | waiting | {"slot_accumulator": 3 * VALUES}


def test_export_returns_what_was_imported_sorted_by_key(everything):
    found = export(import_rows(fresh(), everything))
    order = np.argsort(KEYS)
    assert found["keys"].dtype == np.uint64
    assert set(found) == set(everything)
    for name in ("keys", "values", "last_step", "count", "slot_accumulator"):
        np.testing.assert_array_equal(found[name], everything[name][order])
    assert [found[f"waiting_{name}"].tolist() for name in ("keys", "last_step", "count")] == [[8, 9], [3, 4], [1, 1]]


def test_a_table_that_admits_every_key_says_which_counts_it_drops(everything):
    home = dataclasses.replace(KEPT, admission_count=0, admission_capacity=None)
    with pytest.warns(UserWarning, match="'users' admits every key at once: the counts of 2 keys"):
        found = export(import_rows(fresh(home), everything, home), home)
    assert set(found) == {name for name in everything if not name.startswith("waiting")}
    assert found["keys"].tolist() == sorted(KEYS.tolist())


def test_shards_of_one_number_become_shards_of_another(everything):
    def spread(exported, num_shards):
        tables = []
        for shard in range(num_shards):
            own = {name: array for name, array in exported.items() if not name.startswith("waiting")}
            mine = owners(split_keys(exported["keys"]), num_shards) == shard
            tables.append(import_rows(fresh(), {name: np.asarray(array)[mine] for name, array in own.items()}))
        return tables

    def gathered(tables):
        parts = [export(table) for table in tables]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    found = gathered(spread(gathered(spread(everything, 3)), 2))
    order = np.argsort(found["keys"])
    expected = np.argsort(KEYS)
    for name in ("keys", "values", "last_step", "count", "slot_accumulator"):
        np.testing.assert_array_equal(found[name][order], everything[name][expected])


def test_known_keys_are_overwritten_where_they_are_and_new_ones_start_fresh(everything):
    table = import_rows(fresh(), everything)
    table = import_rows(table, {"keys": np.array([2**32 + 3, 78]), "values": np.array([[1.0, 2.0], [3.0, 4.0]])})
    rows = join_keys(table[0].keys.high, table[0].keys.low).tolist()
    assert rows[:7] == [*KEYS.tolist(), 78]
    assert np.asarray(table[0].rows)[5:7].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    np.testing.assert_array_equal(np.asarray(table[1][0])[5:7], np.full((2, 2), 0.1, np.float32))
    assert TABLE.vocabulary_size - int(table[0].keys.num_free[0]) == 7


def test_an_empty_table_exports_and_imports_nothing():
    home = dataclasses.replace(KEPT, admission_count=0)
    nothing = export(fresh(home), home)
    assert nothing["values"].shape == (0, 2) and "waiting_keys" not in nothing
    assert int(import_rows(fresh(home), nothing, home)[0].keys.num_free[0]) == TABLE.vocabulary_size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": None}, "table 'users': imported rows need 'keys', got"),
        ({"values": VALUES[:5]}, r"imported 'values' has shape \(5, 2\), not \(6, 2\)"),
        ({"values": np.zeros((6, 3))}, r"imported 'values' has shape \(6, 3\), not \(6, 2\)"),
        ({"slot_accumulator": np.zeros((6, 1))}, r"'slot_accumulator' has shape \(6, 1\), not \(6, 2\)"),
        ({"count": np.arange(5)}, r"'count' has shape \(5,\), not \(6,\)"),
        ({"last_step": np.arange(6) - 1}, r"'last_step' must lie in \[0, 2147483647\]"),
        ({"keys": np.array([1, 2, 3, 4, 5, 1])}, "keys must be distinct and not -1, but 1 is not"),
        ({"keys": np.array([1, 2, 3, 4, 5, -1])}, "keys must be distinct and not -1, but -1 is not"),
        ({"keys": np.array([1, 2, 3, 4, 5, -9])}, "table 'users', imported keys: key -9 at position 5"),
        ({"slot_momentum": VALUES}, r"cannot import \['slot_momentum'\]; it has \['count', 'keys'"),
        ({"waiting_count": [1]}, r"'waiting_count' has shape \(1,\), not \(2,\)"),
    ],
)
def test_what_does_not_fit_is_named(everything, changes, message):
    given = {name: array for name, array in (everything | changes).items() if array is not None}
    with pytest.raises(ValueError, match=message):
        import_rows(fresh(), given)


def test_too_many_keys_are_refused_with_the_numbers(everything):
    table = import_rows(fresh(), everything)
    more = {"keys": np.arange(100, 106), "values": VALUES}
    with pytest.raises(
        ValueError,
        match=r"6 imported keys need 6 .*, but the shard has 2 \(capacity=8\); grow the table to vocabulary_size=12,",
    ):
        import_rows(table, more)
    waiting = {"keys": KEYS, "values": VALUES, "waiting_keys": np.arange(100, 106)}
    with pytest.raises(ValueError, match=r"6 imported waiting_keys need 6 .* has 2 \(admission_capacity=4\)"):
        import_rows(table, waiting)


def test_a_key_beyond_the_dtype_is_not_exported_as_another_one(everything):
    table = import_rows(fresh(), everything)
    with pytest.raises(ValueError, match="key 18446744073709551615 does not fit into int64; ask for uint64"):
        export(table, dataclasses.replace(KEPT, key_dtype="int64"))

"""Rows of ids, and ids of rows, against a loop that deals the ids of a table to shards in turn."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_array_equal

from rsembed.places import Place, tables_and_ids


def dealt(place, count, spread):
    """Shard and row of every id, by a loop that deals one row at a time.

    The first `place.first` rows belong to other tables.
    """
    places_of_ids, shard, row = [], 0, 0
    for number in range(place.first + count):
        if number >= place.first:
            places_of_ids.append((place.owner + (shard + place.rotation) % spread, row))
        shard += 1
        if shard == spread:
            shard, row = 0, row + 1
    return places_of_ids


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    st.integers(0, 3),
    st.integers(0, 30),
    st.integers(0, 9),
    st.integers(1, 6),
    st.integers(1, 40),
    st.integers(0, 3),
)
def test_rows_are_dealt_in_turn_and_come_back(owner, first, rotation, spread, count, spare):
    place, ids = Place(owner, first, rotation), np.arange(count)
    expected = dealt(place, count, spread)
    rows_per_shard = max(row for _, row in expected) + 1 + spare
    where = {"spread": spread, "rows_per_shard": rows_per_shard}
    rows = [shard * rows_per_shard + row for shard, row in expected]
    assert_array_equal(place.rows(ids, **where), rows)
    assert [place.rows(i, **where) for i in range(count)] == rows
    assert_array_equal(np.arange(10 * rows_per_shard)[place.all_rows(count, **where)], rows)
    shards, rows_of_shards = np.divmod(np.arange(10 * rows_per_shard), rows_per_shard)
    ids_of_rows = place.ids(shards, rows_of_shards, spread=spread)
    is_id = (ids_of_rows >= 0) & (ids_of_rows < count)
    assert_array_equal(np.flatnonzero(is_id), np.sort(rows))
    assert_array_equal(ids_of_rows[rows], ids)
    for shard in range(owner, owner + spread):
        # In each shard, the first row of the table has one of the ids below `spread`, even if the
        # table has fewer ids.
        assert place.ids(shard, place.first_row(shard, spread=spread), spread=spread) in range(
            spread
        )


def test_tables_of_a_stack_are_told_apart_in_numpy_and_when_traced():
    places = [Place(0, 0, 0), Place(0, 8, 1), Place(0, 20, 3)]
    sizes = [7, 10, 4]
    spread, rows_per_shard = 4, 7
    expected = np.full((2, spread * rows_per_shard), -1)
    for table, (place, size) in enumerate(zip(places, sizes, strict=True)):
        for i, (shard, row) in enumerate(dealt(place, size, spread)):
            assert (expected[:, shard * rows_per_shard + row] == -1).all()
            expected[:, shard * rows_per_shard + row] = table, i
    shards, rows = np.divmod(np.arange(spread * rows_per_shard, dtype=np.int32), rows_per_shard)
    assert_array_equal(tables_and_ids(places, sizes, shards, rows, spread=spread), expected)
    traced = jax.jit(lambda *where: tables_and_ids(places, sizes, *where, spread=spread))(
        shards, rows
    )
    assert all(isinstance(array, jax.Array) and array.dtype == jnp.int32 for array in traced)
    assert_array_equal(traced, expected)


def test_thirty_two_bits_hold_the_largest_tables():
    place, where = Place(0, 2**30, 7), {"spread": 8, "rows_per_shard": 2**28}
    ids = np.arange(2**30 - 20, 2**30 - 8)
    expected = place.rows(ids.astype(np.int64), **where)
    assert expected.max() < 2**31
    assert_array_equal(place.rows(jnp.asarray(ids, jnp.int32), **where), expected)
    assert_array_equal(place.rows(ids.astype(np.int32), **where), expected)
    shards, rows = np.divmod(expected.astype(np.int32), where["rows_per_shard"])
    assert_array_equal(place.ids(jnp.asarray(shards), jnp.asarray(rows), spread=8), ids)

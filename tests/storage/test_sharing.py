"""Grouping of keyed tables into storages: few storages and few padding rows."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import rsembed as rs
from rsembed.storage import hashed, protocol

KEYS = rs.Hashed()


def tables_of(sizes, storage=KEYS):
    return [rs.TableSpec(f"t{k}", size, 8, storage=storage) for k, size in enumerate(sizes)]


def collection_of(tables):
    return rs.EmbeddingCollection([rs.FeatureSpec(table.name, table) for table in tables])


def num_tables_of_stacks(tables):
    return [len(stack.tables) for stack in collection_of(tables).plan.stacks]


def sizes_of(groups):
    return [[table.vocabulary_size for table in group] for group in groups]


def num_empty(groups):
    return sum(max(group) * len(group) - sum(group) for group in sizes_of(groups))


def fewest_groups(sizes, room):
    """Smallest number of parts of the sorted sizes with at most `room` padding rows.

    It is found by dynamic programming over all ways to cut the sorted sizes.
    """
    sizes = sorted(sizes)
    # Smallest number of padding rows, by the number of tables that are already in groups.
    least = {0: 0}
    for number in range(1, len(sizes) + 1):
        reached = {}
        for first, empty in least.items():
            for last in range(first + 1, len(sizes) + 1):
                more = empty + sizes[last - 1] * (last - first) - sum(sizes[first:last])
                reached[last] = min(more, reached.get(last, more))
        if reached.get(len(sizes), room + 1) <= room:
            return number
        least = reached
    raise AssertionError


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.one_of(st.integers(1, 30), st.integers(90, 110), st.integers(1, 10**6)),
        min_size=1,
        max_size=14,
    )
)
def test_few_groups_leave_few_rows_empty(sizes):
    tables = tables_of(sizes)
    groups = protocol.of_near_sizes(tables, most_rows=2**40)
    assert sorted(table.name for group in groups for table in group) == sorted(
        table.name for table in tables
    )
    room = protocol.MOST_EMPTY * sum(sizes)
    assert num_empty(groups) <= room
    assert len(groups) <= fewest_groups(sizes, room) + 2
    numbers = [[int(table.name[1:]) for table in group] for group in groups]
    # Tables of a group keep their order.
    assert all(rows == sorted(rows) for rows in numbers)


@pytest.mark.parametrize("most_rows", [1, 250, 1_000])
def test_no_group_takes_more_rows_than_one_may_have(most_rows):
    groups = sizes_of(protocol.of_near_sizes(tables_of([100] * 7 + [98]), most_rows=most_rows))
    assert sum(map(len, groups)) == 8
    assert all(100 * len(group) <= max(most_rows, 100) for group in groups)
    assert len(groups) == -(-8 // max(most_rows // 100, 1))


def test_storages_have_as_many_waiting_places_and_rows_as_arrays_can_number(monkeypatch):
    # An array has at most 2**29 rows.
    waits = rs.Hashed(admission_count=1, admission_capacity=2**28)
    assert num_tables_of_stacks(tables_of([100] * 5, waits)) == [2, 2, 1]
    monkeypatch.setattr(hashed, "MAX_CAPACITY", 250)
    assert num_tables_of_stacks(tables_of([100] * 5)) == [2, 2, 1]


def test_a_hundred_tables_of_all_sizes_need_a_dozen_storages():
    sizes = (10 ** np.random.default_rng(0).uniform(3, 6, 100)).astype(int).tolist()
    collection = collection_of(tables_of(sizes))
    assert len(collection.plan.stacks) <= 16
    values = sum(stack.num_stored_values[0] for stack in collection.plan.stacks)
    assert 8 * sum(sizes) <= values <= 8 * sum(sizes) * (1 + protocol.MOST_EMPTY)

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsembed.caching import CacheCounts, CacheStatistics, SetAssociativeCache
from rsembed.caching.set_associative import unique_misses_by_group


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(-1, 12), max_size=6), min_size=1, max_size=4), st.lists(st.integers(0, 9)))
def test_unique_misses_by_group_equal_a_loop_over_groups(groups, resident):
    cache = SetAssociativeCache(2, num_ways=8, num_ids=10)
    cache.admit(np.asarray(resident, np.int64))
    there = {i for i in resident if cache.find(np.array([i]))[0] >= 0}
    ids = np.asarray([i for group in groups for i in group], np.int64)
    offsets = np.cumsum([0, *map(len, groups)])
    missed = unique_misses_by_group(ids, cache.admit(ids).missed_ids, offsets)
    assert missed.tolist() == [len({i for i in group if 0 <= i < 10} - there) for group in groups]


def test_an_id_of_two_groups_counts_in_both():
    missed = unique_misses_by_group(np.array([5, 5, 5]), np.array([5]), np.array([0, 1, 3, 3]))
    assert missed.tolist() == [1, 1, 0]


@pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [0, 2, 1, 3], []])
def test_groups_must_cover_the_batch(offsets):
    with pytest.raises(ValueError, match="rise from 0 to the 3 ids"):
        unique_misses_by_group(np.array([5, 5, 5]), np.array([5]), np.asarray(offsets, np.int64))


@pytest.mark.parametrize(
    ("algorithm", "totals"),
    [
        # LRU: 1 and 2 get the slots, both lookups of 3 miss; then 1 and 2 hit, and 4 gets a slot.
        ("lru", CacheCounts(4, 11, 8, 4, 1, 2, 2)),
        # LFU: 1 and 3 get the slots, the lookup of 2 misses; then 1 hits and 2 replaces 3, and 4 finds no slot.
        ("lfu", CacheCounts(4, 11, 8, 5, 2, 2, 1)),
    ],
)
def test_totals_are_exact_for_both_algorithms(algorithm, totals):
    cache = SetAssociativeCache(1, num_ways=2, algorithm=algorithm, num_ids=10)
    statistics = CacheStatistics(num_groups=1)
    for ids in ([1, 1, 2, 3, 3, 10], [1, 2], [10, 11], [4]):
        ids = np.asarray(ids)
        admission = cache.admit(ids)
        statistics.record(admission.counts, unique_misses_by_group(ids, admission.missed_ids, np.array([0, ids.size])))
    assert statistics.totals == totals
    assert statistics.unique_misses_by_group.tolist() == [totals.unique_misses]
    assert statistics.miss_counter == ({"lru": 2, "lfu": 3}[algorithm], totals.unique_misses)


def test_means_are_per_call_since_the_last_report():
    statistics = CacheStatistics()
    statistics.record(CacheCounts(1, 10, 5, 2, 1, 3, 3))
    statistics.record(CacheCounts(1, 20, 6, 0, 0, 0, 6))
    assert statistics.report() == (
        "2 calls, on average: requested_ids 15.0, unique_ids 5.5, unique_misses 1.0, unique_conflict_misses 0.5, "
        "conflict_misses 1.5, unique_hits 4.5"
    )
    assert statistics.report().startswith("0 calls, on average: requested_ids 0.0")
    statistics.record(CacheCounts(1, 8, 4, 4, 0, 0, 0))
    assert statistics.report().startswith("1 calls, on average: requested_ids 8.0, unique_ids 4.0, unique_misses 4.0")
    assert statistics.totals == CacheCounts(3, 38, 15, 6, 1, 3, 9)


def test_reset_forgets_everything():
    statistics = CacheStatistics(num_groups=2)
    statistics.record(CacheCounts(1, 10, 5, 2, 1, 3, 3), np.array([2, 1]))
    statistics.report()
    statistics.reset()
    assert statistics.totals == CacheCounts() and statistics.miss_counter == (0, 0)
    assert statistics.unique_misses_by_group.tolist() == [0, 0]
    statistics.record(CacheCounts(1, 10, 5, 2, 1, 3, 3), np.array([2, 1]))
    assert "requested_ids 10.0" in statistics.report()

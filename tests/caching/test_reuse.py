import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsembed.caching import CacheStatistics, SetAssociativeCache, miss_ratio_curve, reuse_distances
from rsembed.datasets import zipf_ids


def distances_one_by_one(ids: list[int]) -> list[int]:
    distances = []
    for now, wanted in enumerate(ids):
        earlier = [then for then in range(now) if ids[then] == wanted]
        distances.append(len(set(ids[earlier[-1] + 1 : now])) if earlier else -1)
    return distances


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-3, 12), max_size=70))
def test_reuse_distances_equal_counting_one_by_one(ids):
    assert reuse_distances(np.asarray(ids, np.int64)).tolist() == distances_one_by_one(ids)


def test_reuse_distances_of_a_longer_stream():
    ids = zipf_ids(1500, 400, seed=0)
    assert reuse_distances(ids).tolist() == distances_one_by_one(ids.tolist())


def test_the_curve_is_the_miss_ratio_of_a_cache_with_one_set():
    ids = zipf_ids(500, 60, exponent=0.8, seed=1)
    sizes = np.array([32, 1, 2, 5, 13])
    hit_rates = []
    for num_ways in sizes.tolist():
        cache, statistics = SetAssociativeCache(1, num_ways=num_ways, num_ids=60), CacheStatistics()
        for one in ids:
            statistics.record(cache.admit(np.array([one])).counts)
        hit_rates.append(statistics.hit_rate)
    np.testing.assert_allclose(miss_ratio_curve(ids, sizes), 1 - np.asarray(hit_rates), rtol=0, atol=1e-12)


def test_the_ends_of_the_curve():
    ids = np.array([3, 1, 3, 2, 1, 3])
    assert miss_ratio_curve(ids, np.array([0, 3, 10**6])).tolist() == [1.0, 0.5, 0.5]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_sampled_curve_is_near_the_exact_one(seed):
    ids = zipf_ids(60_000, 20_000, exponent=0.9, seed=7)
    sizes = np.array([1000, 3000, 10_000])
    exact = miss_ratio_curve(ids, sizes)
    sampled = miss_ratio_curve(ids, sizes, sample_fraction=0.1, seed=seed)
    # About 6,000 ids are sampled; what remains is the luck of which distinct ids are among them.
    assert np.abs(sampled - exact).max() < 0.03
    assert exact[0] - exact[-1] > 0.2  # so the bound above says something
    assert (np.diff(sampled) <= 0).all()


def test_sampling_depends_on_the_seed_alone():
    ids, sizes = zipf_ids(5000, 2000, seed=0), np.array([50, 500])
    first, again, other = (miss_ratio_curve(ids, sizes, sample_fraction=0.2, seed=seed) for seed in (1, 1, 2))
    assert first.tolist() == again.tolist() != other.tolist()


def test_sampling_everything_is_exact():
    ids, sizes = zipf_ids(2000, 500, seed=0), np.array([0, 10, 100])
    assert miss_ratio_curve(ids, sizes, sample_fraction=1.0).tolist() == miss_ratio_curve(ids, sizes).tolist()


@pytest.mark.parametrize(
    ("ids", "fraction", "message"),
    [([], None, "holds no id"), ([1], 0.0, "sample_fraction=0.0"), ([1], 1.5, "=1.5"), ([1], 1e-9, "caught no id")],
)
def test_errors_name_the_way_out(ids, fraction, message):
    with pytest.raises(ValueError, match=message):
        miss_ratio_curve(np.asarray(ids, np.int64), np.array([1]), sample_fraction=fraction)

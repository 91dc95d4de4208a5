"""Tests of limits that are computed from statistics."""

import itertools

import numpy as np

from rsembed import FeatureSpec, TableSpec
from rsembed.fdo import LimitsPolicy, SparseDenseMatmulInputStats, limits_from_statistics
from rsembed.fdo.statistics import EXACT
from rsembed.optimizers import SGD
from rsembed.sparsecore import embedding
from rsembed.specs import StackedTableSpec
from tests.fdo.world import stats


def specs_for(cores=2, **limits):
    table = TableSpec("t", 64, 8, **limits)
    feature = FeatureSpec("f", table, input_shape=(8, 1))
    embedding.prepare_feature_specs_for_training(feature, 1, cores)
    return feature


def planned(statistics, *, policy=None, **limits):
    stacks = embedding.get_stacked_table_specs(specs_for(**limits)).values()
    return limits_from_statistics(stacks, statistics, 2, policy=policy)["t"]


def test_the_exact_policy_takes_what_was_seen_and_shrinks():
    assert planned(stats([3, 4], [1, 2], [16, 24]), policy=EXACT) == (4, 2, 48)
    assert planned(stats([[1, 1], [7, 2]]), policy=EXACT) == (7, 1, 16)
    assert planned(stats([0, 0], [0, 0], [0, 0]), policy=EXACT)[:2] == (1, 1)


def test_the_default_policy_leaves_room_in_steps_and_never_shrinks():
    assert planned(stats([100, 400], [300, 1], [400, 400])) == (480, 384, 2 * 480)
    assert planned(stats([3, 4], [1, 2], [16, 24])) == (256, 256, 2 * 32)
    small = {"max_ids_per_partition": 5, "max_unique_ids_per_partition": 5}
    assert planned(stats([3, 4], [1, 2], [8, 8]), **small) == (8, 8, 2 * 16)
    # The suggested buffer has 48 entries for each of two cores.
    assert planned(stats([3, 4]), suggested_coo_buffer_size_per_device=96) == (
        256,
        256,
        96,
    )
    assert planned(stats([20, 4], [9, 2], [40, 8]), policy=LimitsPolicy(bucket=2.0), **small)[
        :2
    ] == (32, 16)
    exact_room = LimitsPolicy(headroom_fraction=0.25, bucket=None)
    assert planned(stats([20, 4], [9, 2], [40, 8]), policy=exact_room, **small)[:2] == (25, 12)


def test_buffers_never_exceed_what_the_limits_can_fill():
    """The layout of a stack refuses larger buffers."""
    small = {"max_ids_per_partition": 5, "max_unique_ids_per_partition": 5}
    policy = LimitsPolicy(headroom_fraction=0.0, bucket=3.0)
    limits = planned(stats([24, 24], required=[48, 48]), policy=policy, **small)
    assert limits.max_ids_per_partition == 24
    # Without the limit, the buffer would have the next size of the policy, 2 * 72.
    assert limits.suggested_coo_buffer_size_per_device == 24 * 2 * 2


def test_what_has_no_statistics_keeps_its_settings():
    nothing = SparseDenseMatmulInputStats()
    assert planned(nothing, max_ids_per_partition=7) == (7, 256, None)
    # This spec has no number of shards.
    by_hand = StackedTableSpec("t", 64, 8, SGD(), "sum", 8)
    assert limits_from_statistics([by_hand], stats([3, 4]), 2, policy=EXACT)["t"] == (4, 1, 16)
    only_ids = SparseDenseMatmulInputStats(max_ids_per_partition={"t": [300], "other": [9]})
    assert planned(only_ids) == (384, 256, None)


def changes(policy):
    """Number of changes of limits in a run with larger and larger batches, with random variation.

    Limits are updated after every batch.
    """
    rng = np.random.default_rng(0)
    specs, seen = specs_for(max_ids_per_partition=1, max_unique_ids_per_partition=1), []
    for batch in range(120):
        most = int(100 + 7.5 * batch + rng.normal(0, 20))
        observed = stats([most, most], [most // 2] * 2, [2 * most] * 2)
        embedding.update_preprocessing_parameters(specs, observed, 2, policy=policy)
        seen.append(embedding.get_stacked_table_specs(specs)["t"])
    return sum(a != b for a, b in itertools.pairwise(seen))


def test_few_limits_occur_so_that_recompiles_stay_few():
    assert changes(EXACT) > 100
    # The three limits (ids, distinct ids, buffer) grow by the same factor at different batches.
    assert changes(LimitsPolicy()) <= 3 * 12
    assert changes(LimitsPolicy(bucket=2.0)) <= 3 * 4


def test_the_published_call_stays_exact_and_takes_a_policy():
    specs = specs_for()
    embedding.update_preprocessing_parameters(specs, stats([3, 4]), 2)
    assert specs.table_spec.stacked_table_spec.max_ids_per_partition == 4
    embedding.update_preprocessing_parameters(specs, stats([40, 4]), 2, policy=LimitsPolicy())
    embedding.update_preprocessing_parameters(specs, stats([3, 4]), 2, policy=LimitsPolicy())
    assert specs.table_spec.stacked_table_spec.max_ids_per_partition == 56

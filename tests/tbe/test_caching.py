"""Cached tables have the bits of tables on the device, and statistics equal a count by hand."""

import types

import jax
import numpy as np
import pytest
from flax import nnx

import rsembed as rs
from rsembed import tbe as rt
from rsembed.tbe import plan
from tests.storage.test_set_associative import DumbCache
from tests.tbe.oracle import CACHED, apply, assert_same_bits, make, tables_of, train, variant
from tests.tbe.row_formulas import LR
from tests.world import assert_same

SPECS = ((90, 4), (60, 4), (50, 6))
FEATURES = [2, 0, 1, 0]
NUM_IDS = 80
NUM_BAGS = 12


def skewed_batch(seed):
    """80 ids of four features in 12 bags, and offsets. A few ids are frequent."""
    rng = np.random.default_rng(seed)
    cuts = rng.integers(0, NUM_IDS + 1, NUM_BAGS - 1)
    ids = np.minimum(rng.zipf(1.3, NUM_IDS) * 7 % 53, 49)
    ids[rng.random(NUM_IDS) < 0.05] = -1
    return ids.astype(np.int32), np.array([0, *np.sort(cuts), NUM_IDS], np.int32)


BATCHES = [
    *(skewed_batch(seed) for seed in range(5)),
    (np.zeros(0, np.int32), np.zeros(NUM_BAGS + 1, np.int32)),
]


ROWWISE = variant("rowwise")


def pair(common=ROWWISE, specs=SPECS, features=FEATURES, **caching):
    """Two modules with the same tables, on the device and cached."""
    common = common | {"feature_table_map": features}
    return make(specs, **common), make(specs, location=CACHED, **common, **caching)


def step(module, *batch):
    output, backward = module.vjp(*batch)
    backward(0.5 * output)
    return output


compiled_step = nnx.jit(step)


def assert_steps_agree(plain, cached, batches=BATCHES):
    for batch in batches:
        np.testing.assert_array_equal(step(cached, *batch), step(plain, *batch))
    assert_same_bits(plain, cached)


class Schedule:
    """Calls of one module. Some calls start a step that a later call ends."""

    def __init__(self, module):
        self.module = module
        self.waiting = []

    def train(self, *batch):
        return step(self.module, *batch)

    def train_compiled(self, *batch):
        """Runs a compiled step, or without a cache an eager step, which has the same bits."""
        if self.module.host_rows is None:
            return step(self.module, *batch)
        return compiled_step(self.module, *batch)

    def look_up(self, *batch):
        return self.module(*batch)

    def begin_step(self, *batch):
        output, backward = self.module.vjp(*batch)
        self.waiting.append((output, backward))
        return output

    def end_step(self, *_):
        if self.waiting:
            output, backward = self.waiting.pop()
            backward(2.0 * output)

    def apply(self, *batch):
        apply(self.module, *batch)

    def read(self, *_):
        return tables_of(self.module)

    def reset(self, *_):
        self.module.reset_cache_states()


CALLS = [name for name in vars(Schedule) if not name.startswith("_")] + ["begin_step", "end_step"]
ONE_TABLE = {"specs": ((200, 4),), "features": [0, 0, 0, 0], "cache_sets": 1}
CACHES = {
    "lru of one set": {"cache_sets": 1},
    "lru with room for all": {"cache_sets": 40},
    "lfu": {"cache_algorithm": "LFU", "cache_sets": 3},
    "adam": {"common": variant("adamw"), "cache_sets": 1},
    "global decay": {"common": variant("global"), **ONE_TABLE},
    "cowclip": {"common": variant("cowclip"), **ONE_TABLE},
    "states above zero": {"common": {"optimizer": rs.optimizers.FTRL(LR)}, **ONE_TABLE},
    "float16": {"common": ROWWISE | {"weights_precision": "FP16"}, **ONE_TABLE},
    "pipelined": {"prefetch_pipeline": True, "cache_sets": 1},
    "pipelined in parts": {
        "prefetch_pipeline": True,
        "multipass_prefetch_config": rt.MultiPassPrefetchConfig(3, 10),
        "cache_sets": 1,
    },
}


@pytest.mark.slow_rows(
    "lru of one set",
    "cowclip",
    "pipelined",
    "float16",
    "states above zero",
    "global decay",
    "lfu",
    "adam",
)
@pytest.mark.parametrize("name", CACHES)
def test_any_order_of_calls_has_the_bits_of_tables_without_a_cache(name):
    rng = np.random.default_rng(len(name))
    plain, cached = pair(**CACHES[name])
    schedules = Schedule(cached), Schedule(plain)
    calls = rng.permutation(CALLS * 2)
    order = rng.integers(0, len(BATCHES), len(calls) + 3)
    for number, call in enumerate(calls):
        # Some batches are not prefetched, and others are prefetched before the preceding batches.
        if number % 4 != 3:
            cached.prefetch(*BATCHES[order[number + number % 3]])
        batch = BATCHES[order[number]]
        actual, expected = (
            jax.tree.leaves(getattr(schedule, call)(*batch)) for schedule in schedules
        )
        for mine, yours in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(mine, yours, err_msg=call)
    cached.reset_cache_states()
    assert_same_bits(plain, cached)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_rows_on_the_host_visit_for_each_batch_where_memories_differ(monkeypatch, platform):
    monkeypatch.setattr(plan, "default_platform", lambda: platform)
    options = {"optimizer": "ADAM", "feature_table_map": FEATURES}
    host = make(SPECS, location=rt.EmbeddingLocation.HOST, **options)
    placement = {"cpu": "device", "gpu": "host"}[platform]
    assert all(table.placement == placement for table in host.plan.tables)
    assert_steps_agree(make(SPECS, **options), host)


def test_only_some_tables_may_be_cached():
    plain = make(SPECS, feature_table_map=FEATURES)
    locations = [rt.EmbeddingLocation.DEVICE, CACHED, CACHED]
    mixed = rt.TableBatchedEmbeddingBags(
        [(*SPECS[table], locations[table], rt.ComputeDevice.CPU) for table in range(3)],
        feature_table_map=FEATURES,
        learning_rate=LR,
        cache_sets=1,
    )
    mixed.load_state_dict(plain.state_dict())
    assert_steps_agree(plain, mixed)


# Prefetching

PIPELINED = {"specs": ((300, 2),), "features": [0], "cache_sets": 1, "prefetch_pipeline": True}


def test_a_hundred_batches_may_wait():
    plain, cached = pair(**PIPELINED)
    batches = [(np.array([k, k + 1, 2 * k]), np.array([0, 3])) for k in range(100)]
    for batch in batches:
        cached.prefetch(*batch)
    with pytest.raises(RuntimeError, match="100 prefetched batches wait"):
        cached.prefetch(*batches[0])
    assert_steps_agree(plain, cached, batches[:20])


@pytest.mark.slow_rows("False")
@pytest.mark.parametrize("is_prepared", [False, True])
def test_compiled_steps_use_up_prefetched_batches(is_prepared):
    _, cached = pair(**PIPELINED)
    for k in range(102):
        batch = np.array([k, k + 1, k + 2], np.int32), np.array([0, 3], np.int32)
        cached.prefetch(*batch)
        if is_prepared:
            # The prepared batch is padded to four ids.
            batch = [cached.prepare(*batch)]
        compiled_step(cached, *batch)
    cached.reset_cache_states()


def test_a_lookup_that_never_trains_gives_its_places_back():
    _, cached = pair(**PIPELINED)
    for first in (0, 16, 32):
        batch = np.arange(first, first + 16), np.array([0, 16])
        cached.prefetch(*batch)
        cached(*batch)
        cached.prefetch(*batch)
        # The backward function of this lookup is never called.
        cached.vjp(*batch)
    cached.reset_cache_states()
    cached.prefetch(np.arange(200, 232), np.array([0, 32]))
    (group,) = cached.host_rows.groups.values()
    assert sorted(group.cache.tags.tolist()) == list(range(200, 232))


# Resets, statistics, sizes


def test_a_reset_loses_what_is_in_the_cache_if_asked():
    _, cached = pair(cache_sets=1)
    step(cached, *BATCHES[0])
    before, _ = tables_of(cached)
    step(cached, np.array([7]), np.repeat([0, 1], [2, 11]))
    cached.reset_cache_states(discard=True)
    after, _ = tables_of(cached)
    assert_same(after, before)


COUNTED = {
    "gather_uvm_cache_stats": True,
    "record_cache_metrics": rt.RecordCacheMetrics(True, True),
}


def test_statistics_equal_a_hand_count():
    _, cached = pair(specs=((90, 4), (60, 4)), features=[1, 0], cache_sets=2, **COUNTED)
    hand = DumbCache(2, 32, "lru", 150)
    totals = np.zeros(6, int)
    misses = np.zeros(2, int)
    by_feature = np.zeros(2, int)
    is_first_feature = np.arange(100) < 40
    rng = np.random.default_rng(0)
    for _ in range(5):
        ids = rng.integers(-1, 60, 100)
        rows = np.where(is_first_feature & (ids >= 0), ids + 90, ids)
        slots, moves = hand.admit(rows.tolist(), lock=False)
        is_homeless = (np.asarray(slots) < 0) & (rows >= 0)
        homeless = set(rows[is_homeless])
        missing = homeless | {row for row, _, _ in moves}
        totals += [1, 100, len(set(rows)), len(missing), len(homeless), is_homeless.sum()]
        misses += [bool(missing), len(missing)]
        for feature, rows_of_feature in enumerate((rows[:40], rows[40:])):
            by_feature[feature] += len(missing & set(rows_of_feature))
        train(cached, ids, np.array([0, 20, 40, 70, 100]))
    assert totals[4] > 0
    assert list(cached.get_uvm_cache_stats()[:6]) == totals.tolist()
    assert cached.get_cache_miss_counter() == tuple(misses)
    assert cached.get_table_wise_cache_miss().tolist() == by_feature.tolist()
    cached.reset_uvm_cache_stats()
    assert not any(cached.get_uvm_cache_stats())


def test_a_batch_is_one_call_however_many_caches_serve_it():
    _, cached = pair(cache_sets=4, **COUNTED)
    for _ in range(2):
        cached(np.array([1, 1, 2, 3]), np.repeat([0, 2, 4], [1, 3, 9]))
    counts = cached.get_uvm_cache_stats()
    assert (counts.calls, counts.requested_ids) == (2, 8)
    assert cached.get_cache_miss_counter()[0] == 1


@pytest.mark.parametrize(
    ("options", "num_sets"),
    # The first number is ceil(1000 * 0.2 / 32).
    [({}, 7), ({"cache_load_factor": 0.0}, 1), ({"cache_sets": 5}, 5)],
)
def test_cache_sizes_follow_the_published_rule(options, num_sets):
    module = make(((1000, 4),), location=CACHED, **options)
    assert module.host_rows.groups["table_0"].cache.num_sets == num_sets


def test_the_caches_of_all_groups_share_what_memory_is_free(monkeypatch):
    memory = {"bytes_limit": 5 * 2**20, "bytes_in_use": 2**20}
    device = types.SimpleNamespace(memory_stats=lambda: memory)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    options = {
        "specs": ((100_000, 8), (100_000, 16), (100_000, 32), (40, 4)),
        "location": CACHED,
        "uniform": None,
    }
    groups = make(**options, cache_load_factor=0.5).host_rows.groups.values()
    sizes = [
        32 * group.cache.num_sets * 4 * dim
        for group, (_, dim) in zip(groups, options["specs"], strict=True)
    ]
    assert 0.98 * 4 * 2**20 < sum(sizes) <= 4 * 2**20
    # A table with 40 rows gets one set.
    assert sizes[3] == 32 * 4 * 4
    with pytest.raises(ValueError, match="not even one set of 32 rows of 240 bytes fits"):
        make(**options, cache_reserved_memory=3.999 / 2**10)

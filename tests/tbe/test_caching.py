"""Tables behind a cache train to the bits of tables without one, and their statistics are those of a hand count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rsembed as rs
from rsembed import tbe as rt
from rsembed.tbe import plan
from rsembed.tbe.host_rows import MAX_PREFETCHES
from tests.storage.test_set_associative import DumbCache
from tests.tbe.oracle import assert_same_bits, gradient_like, make, tables_of, train
from tests.tbe.row_formulas import LR, VARIANTS
from tests.world import assert_same

CACHED, LFU = rt.EmbeddingLocation.MANAGED_CACHING, rt.CacheAlgorithm.LFU
SPECS, FEATURES = ((90, 4), (60, 4), (50, 6)), [2, 0, 1, 0]
NUM_IDS, BAGS = 80, 3


def skewed_batch(seed):
    """80 ids of four features of which few are frequent, and offsets with empty bags."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.integers(0, NUM_IDS + 1, 4 * BAGS - 1))
    offsets = np.concatenate([[0], cuts, [NUM_IDS]]).astype(np.int32)
    ids = np.minimum(rng.zipf(1.3, NUM_IDS) * 7 % 53, 49)
    return np.where(rng.random(NUM_IDS) < 0.05, -1, ids).astype(np.int32), offsets


BATCHES = [
    *(skewed_batch(seed) for seed in range(5)),
    (np.zeros(0, np.int32), np.zeros(4 * BAGS + 1, np.int32)),
]


def pair(variant="rowwise", specs=SPECS, features=FEATURES, **caching):
    """The same module on the device and behind a cache."""
    optimizer, arguments, _ = VARIANTS.get(variant, (rs.optimizers.FTRL(LR), {}, None))
    common = {"optimizer": optimizer, "feature_table_map": features, **arguments}
    kept = {
        k: v
        for k, v in caching.items()
        if k in ("weights_precision", "pooling_mode", "bounds_check_mode")
    }
    return make(specs, **common, **kept), make(specs, location=CACHED, **common, **caching)


def step(module, batch, seed=0):
    output, backward = module.vjp(*batch)
    backward(gradient_like(output, seed))
    return output


def assert_steps_agree(plain, cached, batches=BATCHES):
    for k, batch in enumerate(batches):
        np.testing.assert_array_equal(step(cached, batch, k), step(plain, batch, k))
    assert_same_bits(plain, cached)


@nnx.jit
def compiled_step(module, ids, offsets):
    output, backward = module.vjp(ids, offsets)
    backward(output * output)
    return output


class Schedule:
    """Calls of one module, some of which begin what later ones end."""

    def __init__(self, module):
        self.module, self.lookups = module, []

    def train(self, batch):
        return step(self.module, batch)

    def train_compiled(self, batch):
        return compiled_step(self.module, *batch)

    def look_up(self, batch):
        return self.module(*batch)

    def begin_step(self, batch):
        self.lookups.append(self.module.vjp(*batch))
        return self.lookups[-1][0]

    def end_step(self, batch):
        if self.lookups:
            output, backward = self.lookups.pop()
            backward(0.5 * output)

    def apply(self, batch):
        output, backward = self.module.vjp(*batch)
        self.module.apply(backward.row_gradients(output))

    def read(self, batch):
        return tables_of(self.module)

    def reset(self, batch):
        self.module.reset_cache_states()


CALLS = [name for name in vars(Schedule) if not name.startswith("_")] + ["begin_step", "end_step"]
MULTIPASS = rt.MultiPassPrefetchConfig(3, 10)
ONE_TABLE = {"specs": ((200, 4),), "features": [0, 0, 0, 0]}
CACHES = {
    "lru of one set": {"cache_sets": 1},
    "lru with room for all": {"cache_sets": 40},
    "lfu": {"cache_algorithm": LFU, "cache_sets": 3},
    "adam": {"variant": "adamw", "cache_sets": 1},
    "global decay": {"variant": "global", **ONE_TABLE, "cache_sets": 1},
    "cowclip": {"variant": "cowclip", **ONE_TABLE, "cache_sets": 1},
    "lars": {"variant": "lars", **ONE_TABLE, "cache_sets": 1},
    "states above zero": {"variant": "ftrl", **ONE_TABLE, "cache_sets": 1},
    "float16": {"weights_precision": rt.SparseType.FP16, **ONE_TABLE, "cache_sets": 1},
    "pipelined": {"prefetch_pipeline": True, "cache_sets": 1},
    "pipelined in parts": {
        "prefetch_pipeline": True,
        "multipass_prefetch_config": MULTIPASS,
        "cache_sets": 1,
    },
}


@pytest.mark.slow_rows(
    "lru of one set", "lars", "cowclip", "pipelined", "float16", "states above zero", "global decay"
)
@pytest.mark.parametrize("name", CACHES)
def test_any_order_of_calls_has_the_bits_of_tables_without_a_cache(name):
    rng, modules = np.random.default_rng(len(name)), pair(**CACHES[name])
    plain, cached = map(Schedule, modules)
    calls, order = (
        rng.permutation(CALLS * 2).tolist(),
        rng.integers(0, len(BATCHES), 2 * len(CALLS) + 3),
    )
    for number, call in enumerate(calls):
        if number % 4 != 3:  # some batches come without, some wait while others are looked up
            modules[1].prefetch(*BATCHES[order[number + number % 3]])
        found, wanted = (getattr(own, call)(BATCHES[order[number]]) for own in (cached, plain))
        for mine, yours in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
            np.testing.assert_array_equal(mine, yours, err_msg=call)
    modules[1].reset_cache_states()
    assert_same_bits(*modules)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_rows_on_the_host_visit_for_each_batch_where_memories_differ(monkeypatch, platform):
    monkeypatch.setattr(plan, "default_platform", lambda: platform)
    arguments = {"optimizer": rt.OptimType.ADAM, "feature_table_map": FEATURES}
    host = make(SPECS, location=rt.EmbeddingLocation.HOST, **arguments)
    assert [table.placement for table in host.plan.tables] == [
        "host" if platform == "gpu" else "device"
    ] * 3
    assert_steps_agree(make(SPECS, **arguments), host)


def test_only_some_tables_may_be_cached():
    locations = [rt.EmbeddingLocation.DEVICE, CACHED, CACHED]
    specs = [(*spec, x, rt.ComputeDevice.CPU) for spec, x in zip(SPECS, locations, strict=True)]
    mixed = rt.TableBatchedEmbeddingBags(
        specs, feature_table_map=FEATURES, learning_rate=0.1, cache_sets=1
    )
    mixed.init_embedding_weights_uniform(-1, 1)
    assert_steps_agree(make(SPECS, feature_table_map=FEATURES, uniform=(-1, 1)), mixed)


# Prefetching

PIPELINED = {"specs": ((300, 2),), "features": [0], "cache_sets": 1, "prefetch_pipeline": True}


def test_a_hundred_batches_may_wait():
    plain, cached = pair(**PIPELINED)
    batches = [(np.array([k, k + 1, 2 * k]), np.array([0, 3])) for k in range(MAX_PREFETCHES)]
    assert len(batches) == 100
    for batch in batches:
        cached.prefetch(*batch)
    with pytest.raises(RuntimeError, match="100 prefetched batches wait"):
        cached.prefetch(*batches[0])
    assert_steps_agree(plain, cached, batches[:20])


@pytest.mark.slow_rows("False")
@pytest.mark.parametrize("is_prepared", [False, True])
def test_compiled_steps_use_up_prefetched_batches(is_prepared):
    _, cached = pair(**PIPELINED)
    compiled = nnx.jit(lambda module, *batch: module.vjp(*batch)[1](jnp.ones((1, 2))))
    for k in range(MAX_PREFETCHES + 2):
        batch = np.array([k, k + 1, k + 2], np.int32), np.array([0, 3], np.int32)
        cached.prefetch(*batch)
        # Which has room for four ids.
        compiled(cached, *([cached.prepare(*batch)] if is_prepared else batch))
    step(cached, batch)
    cached.reset_cache_states()


def test_a_lookup_that_never_trains_gives_its_places_back():
    _, cached = pair(**PIPELINED)
    for k in range(3):
        batch = np.arange(16 * k, 16 * k + 16), np.array([0, 16])
        cached.prefetch(*batch)
        cached(*batch)
        cached.prefetch(*batch)
        cached.vjp(*batch)  # its backward is dropped
    cached.reset_cache_states()
    cached.prefetch(np.arange(200, 232), np.array([0, 32]))
    (group,) = cached.host_rows.groups.values()
    assert sorted(group.cache.tags.tolist()) == list(range(200, 232))


# Resets, statistics, sizes


def test_a_reset_loses_what_is_in_the_cache_if_asked():
    _, cached = pair(cache_sets=1)
    step(cached, BATCHES[0])
    before = tables_of(cached)
    single = np.array([7]), np.repeat([0, 1], [2, 11])
    step(cached, single)
    cached.reset_cache_states(discard=True)
    assert_same(tables_of(cached)[0], before[0])


def test_statistics_equal_a_hand_count():
    metrics = rt.RecordCacheMetrics(True, True)
    _, cached = pair(
        specs=((90, 4), (60, 4)),
        features=[1, 0],
        cache_sets=2,
        gather_uvm_cache_stats=True,
        record_cache_metrics=metrics,
    )
    hand, totals, by_feature, misses = (
        DumbCache(2, 32, "lru", 150),
        np.zeros(6, int),
        np.zeros(2, int),
        [0, 0],
    )
    for seed in range(5):
        rng = np.random.default_rng(seed)
        ids = rng.integers(-1, 60, 100)
        offsets = np.array([0, 20, 40, 70, 100])
        rows = [-1 if i < 0 else int(i) + (90 if p < 40 else 0) for p, i in enumerate(ids)]
        locations, moves = hand.admit(rows, lock=False)
        homeless = {row for row, place in zip(rows, locations, strict=True) if place < 0 <= row}
        missing = homeless | {row for row, _, _ in moves}
        totals += [
            1,
            100,
            len(set(rows)),
            len(missing),
            len(homeless),
            sum(row in homeless for row in rows),
        ]
        misses = [misses[0] + bool(missing), misses[1] + len(missing)]
        by_feature += [len({r for r in part if r in missing}) for part in (rows[:40], rows[40:])]
        train(cached, ids, offsets)
    assert totals[4] > 0
    assert list(cached.get_uvm_cache_stats()[:6]) == totals.tolist()
    assert cached.get_cache_miss_counter() == tuple(misses)
    assert cached.get_table_wise_cache_miss().tolist() == by_feature.tolist()
    cached.reset_uvm_cache_stats()
    assert not any(cached.get_uvm_cache_stats())


def test_a_batch_is_one_call_however_many_caches_serve_it():
    metrics = rt.RecordCacheMetrics(record_cache_miss_counter=True)
    _, cached = pair(cache_sets=4, gather_uvm_cache_stats=True, record_cache_metrics=metrics)
    ids, offsets = np.array([1, 1, 2, 3]), np.repeat([0, 2, 4], [1, 3, 9])
    cached(ids, offsets)
    cached(ids, offsets)
    counts = cached.get_uvm_cache_stats()
    assert (counts.calls, counts.requested_ids) == (2, 8)
    assert cached.get_cache_miss_counter()[0] == 1


def test_cache_sizes_follow_the_published_rule():
    # Ceil(1000 * 0.2 / 32)
    assert make(((1000, 4),), location=CACHED).host_rows.groups[0].cache.num_sets == 7
    assert (
        make(((1000, 4),), location=CACHED, cache_load_factor=0.0)
        .host_rows.groups[0]
        .cache.num_sets
        == 1
    )
    assert make(((1000, 4),), location=CACHED, cache_sets=5).host_rows.groups[0].cache.num_sets == 5


def test_enforce_hbm_keeps_cached_tables_on_the_device():
    plain, enforced = make(SPECS), make(SPECS, location=CACHED, enforce_hbm=True)
    assert enforced.host_rows is None
    assert_same_bits(plain, enforced)


class SmallDevice:
    """A device that tells how much memory it has."""

    def memory_stats(self):
        return {"bytes_limit": 5 * 2**20, "bytes_in_use": 2**20}


def test_the_caches_of_all_groups_share_what_memory_is_free(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [SmallDevice()])
    dims = (8, 16, 32, 4)
    specs = [
        (rows, dim, CACHED, rt.ComputeDevice.CPU)
        for rows, dim in zip([*[100_000] * 3, 40], dims, strict=True)
    ]
    module = rt.TableBatchedEmbeddingBags(specs, cache_load_factor=0.5)
    sizes = [
        own.cache.num_sets * 32 * dim * 4
        for own, dim in zip(module.host_rows.groups.values(), dims, strict=True)
    ]
    assert 0.98 * 4 * 2**20 < sum(sizes) <= 4 * 2**20
    assert sizes[3] == 32 * 4 * 4  # one set, which a table of 40 rows asks for
    with pytest.raises(ValueError, match="not even one set of 32 rows of 240 bytes fits"):
        rt.TableBatchedEmbeddingBags(specs, cache_reserved_memory=3.999 / 2**10)

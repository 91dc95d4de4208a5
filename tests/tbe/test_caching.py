"""Tables behind a cache train to the bits of tables without one, and their statistics are those of a hand count."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rsembed import tbe as rt
from rsembed.caching import set_of
from rsembed.tbe import plan
from rsembed.tbe.host_rows import MAX_PREFETCHES
from tests.tbe.oracle import assert_same_bits, make, tables_of, train
from tests.tbe.row_formulas import VARIANTS

CACHED, LFU, LRU = rt.EmbeddingLocation.MANAGED_CACHING, rt.CacheAlgorithm.LFU, rt.CacheAlgorithm.LRU
SPECS, FEATURES = ((90, 4), (60, 4), (50, 6)), [2, 0, 1, 0]
NUM_IDS, BAGS = 80, 3


def skewed_batch(seed):
    """80 ids of four features of which few are frequent, and offsets with empty bags."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.integers(0, NUM_IDS + 1, 4 * BAGS - 1))
    offsets = np.concatenate([[0], cuts, [NUM_IDS]]).astype(np.int32)
    ids = np.minimum(rng.zipf(1.3, NUM_IDS) * 7 % 53, 49)
    return np.where(rng.random(NUM_IDS) < 0.05, -1, ids).astype(np.int32), offsets


BATCHES = [skewed_batch(seed) for seed in range(5)]
OFFSETS_OF_ONE = np.array([0, 30, NUM_IDS], np.int32)


def pair(variant="rowwise", specs=SPECS, features=FEATURES, **caching):
    """The same module on the device and behind a cache."""
    optimizer, arguments, _ = VARIANTS[variant]
    common = {"optimizer": optimizer, "feature_table_map": features, **arguments}
    kept = {k: v for k, v in caching.items() if k in ("weights_precision", "pooling_mode", "bounds_check_mode")}
    return make(specs, **common, **kept), make(specs, location=CACHED, **common, **caching)


def step(module, batch, seed=0):
    output, backward = module.vjp(*batch)
    backward(np.random.default_rng(seed).normal(size=output.shape).astype(np.float32))
    return output


def assert_steps_agree(plain, cached, batches=BATCHES, before_each=lambda k: None, cached_step=step):
    for k, batch in enumerate(batches):
        before_each(k)
        np.testing.assert_array_equal(cached_step(cached, batch, k), step(plain, batch, k))
    assert_same_bits(plain, cached)


@pytest.mark.parametrize(("algorithm", "cache_sets"), [(LRU, 1), (LRU, 40), (LFU, 3)])
def test_training_has_the_same_bits_at_any_cache_size(algorithm, cache_sets):
    assert_steps_agree(*pair(cache_algorithm=algorithm, cache_sets=cache_sets), BATCHES[:3])


@pytest.mark.parametrize("variant", ["global", "cowclip", "adamw", "lars"])
def test_states_travel_with_their_rows(variant):
    assert_steps_agree(*pair(variant, specs=((200, 4),), features=[0, 0, 0, 0], cache_sets=1), BATCHES[:3])


def test_states_that_begin_above_zero_do_so_behind_a_cache():
    arguments = {"optimizer": rt.OptimType.FTRL, "feature_table_map": [0, 0, 0, 0]}
    plain, cached = make(((90, 4),), **arguments), make(((90, 4),), location=CACHED, cache_sets=1, **arguments)
    assert all((states[0] == np.float32(0.1)).all() for states in tables_of(cached)[1])
    assert_steps_agree(plain, cached, BATCHES[:2])


@pytest.mark.parametrize("precision", [rt.SparseType.FP16, rt.SparseType.BF16])
def test_stochastic_rounding_has_the_same_bits_behind_a_cache(precision):
    cached = pair(cache_sets=1, weights_precision=precision, specs=((90, 4),), features=[0])
    assert_steps_agree(*cached, [(ids, OFFSETS_OF_ONE) for ids, _ in BATCHES[:3]])


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_rows_on_the_host_visit_for_each_batch_where_memories_differ(monkeypatch, platform):
    monkeypatch.setattr(plan, "default_platform", lambda: platform)
    arguments = {"optimizer": rt.OptimType.ADAM, "feature_table_map": FEATURES}
    host = make(SPECS, location=rt.EmbeddingLocation.HOST, **arguments)
    assert [table.placement for table in host.plan.tables] == ["host" if platform == "gpu" else "device"] * 3
    assert_steps_agree(make(SPECS, **arguments), host)


def test_only_some_tables_may_be_cached():
    locations = [rt.EmbeddingLocation.DEVICE, CACHED, CACHED]
    specs = [(*spec, x, rt.ComputeDevice.CPU) for spec, x in zip(SPECS, locations, strict=True)]
    mixed = rt.TableBatchedEmbeddingBags(specs, feature_table_map=FEATURES, learning_rate=0.1, cache_sets=1)
    mixed.init_embedding_weights_uniform(-1, 1)
    assert_steps_agree(make(SPECS, feature_table_map=FEATURES), mixed)


def test_a_compiled_step_has_the_same_bits_behind_a_cache():
    @nnx.jit
    def compiled(module, ids, offsets, d_output):
        output, backward = module.vjp(ids, offsets)
        backward(d_output)
        return output

    def compiled_step(module, batch, seed):
        d_output = np.random.default_rng(seed).normal(size=(BAGS, 18)).astype(np.float32)
        return compiled(module, *batch, d_output)

    plain, cached = pair(cache_sets=1)
    assert_steps_agree(plain, cached, cached_step=compiled_step)
    # Compiled and eager steps take turns, also between a lookup and its update.
    for first, second in itertools.pairwise(BATCHES):
        results = []
        for module, between in ((plain, step), (cached, compiled_step)):
            output, backward = module.vjp(*first)
            between(module, second, 1)
            backward(output)
            results.append(np.asarray(output))
        np.testing.assert_array_equal(*results)
    assert_same_bits(plain, cached)


# Prefetching


MULTIPASS = rt.MultiPassPrefetchConfig(3, 10)


@pytest.mark.parametrize(
    ("pipeline", "multipass", "ahead"), [(False, None, 3), (False, MULTIPASS, 1), (True, None, 1), (True, MULTIPASS, 3)]
)
def test_prefetched_batches_have_the_same_bits(pipeline, multipass, ahead):
    plain, cached = pair(cache_sets=1, prefetch_pipeline=pipeline, multipass_prefetch_config=multipass)
    waiting = iter(BATCHES)
    for batch in itertools.islice(waiting, ahead):
        cached.prefetch(*batch)

    def prefetch_next(k):
        for batch in itertools.islice(waiting, 1):
            cached.prefetch(*batch)

    assert_steps_agree(plain, cached, before_each=prefetch_next)
    cached.reset_cache_states()
    assert_same_bits(plain, cached)


@pytest.mark.parametrize("multipass", [None, MULTIPASS])
def test_a_batch_without_ids_may_be_prefetched(multipass):
    plain, cached = pair(cache_sets=1, multipass_prefetch_config=multipass)
    indices, offsets = np.zeros(0, np.int64), np.zeros_like(BATCHES[0][1])
    cached.prefetch(indices, offsets)
    np.testing.assert_array_equal(cached(indices, offsets), np.zeros_like(plain(*BATCHES[0])))
    cached.prefetch(*BATCHES[0])
    np.testing.assert_array_equal(cached(*BATCHES[0]), plain(*BATCHES[0]))


def test_prefetching_between_lookup_and_update_and_lookups_in_between():
    plain, cached = pair(cache_sets=1, prefetch_pipeline=True)
    for module in (plain, cached):
        cached.prefetch(*BATCHES[0]) if module is cached else None
        first, first_backward = module.vjp(*BATCHES[0])
        cached.prefetch(*BATCHES[1]) if module is cached else None
        first_backward(first)
        second, second_backward = module.vjp(*BATCHES[1])
        for batch in BATCHES[2:]:
            module(*batch)
        second_backward(second)
    assert_same_bits(plain, cached)


def test_two_lookups_may_come_before_their_two_updates():
    plain, cached = pair(cache_sets=1)
    for module in (plain, cached):
        outputs, backwards = zip(*(module.vjp(*batch) for batch in BATCHES[:2]), strict=True)
        for output, backward in zip(outputs, reversed(backwards), strict=True):
            backward(outputs[1] if output is outputs[0] else outputs[0])
    assert_same_bits(plain, cached)


def test_prefetched_batches_may_be_looked_up_in_any_order():
    plain, cached = pair(cache_sets=1, prefetch_pipeline=True)
    for batch in BATCHES:
        cached.prefetch(*batch)
    assert_steps_agree(plain, cached, BATCHES[::-1])
    cached.reset_cache_states()
    assert_same_bits(plain, cached)


def test_a_hundred_batches_may_wait():
    plain, cached = pair(specs=((300, 2),), features=[0], cache_sets=1, prefetch_pipeline=True)
    batches = [(np.array([k, k + 1, 2 * k]), np.array([0, 3])) for k in range(MAX_PREFETCHES)]
    assert len(batches) == 100
    for batch in batches:
        cached.prefetch(*batch)
    with pytest.raises(RuntimeError, match="100 prefetched batches wait"):
        cached.prefetch(*batches[0])
    assert_steps_agree(plain, cached, batches)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_compiled_steps_use_up_prefetched_batches(is_prepared):
    _, cached = pair(specs=((300, 2),), features=[0], cache_sets=1, prefetch_pipeline=True)
    compiled = nnx.jit(lambda module, *batch: module.vjp(*batch)[1](jnp.ones((1, 2))))
    for k in range(MAX_PREFETCHES + 2):
        batch = np.array([k, k + 1, k + 2], np.int32), np.array([0, 3], np.int32)
        cached.prefetch(*batch)
        compiled(cached, *([cached.prepare(*batch)] if is_prepared else batch))  # which has room for four ids
    step(cached, batch)
    cached.reset_cache_states()


def test_a_lookup_that_never_trains_gives_its_places_back():
    _, cached = pair(specs=((300, 2),), features=[0], cache_sets=1, prefetch_pipeline=True)
    for k in range(3):
        batch = np.arange(16 * k, 16 * k + 16), np.array([0, 16])
        cached.prefetch(*batch)
        cached(*batch)
        cached.prefetch(*batch)
        cached.vjp(*batch)  # its backward is dropped
    cached.reset_cache_states()
    cached.prefetch(np.arange(200, 232), np.array([0, 32]))
    (group,) = cached.host_rows.groups
    assert sorted(group.cache.tags.tolist()) == list(range(200, 232))


# Flushing, resetting, storing


def test_weights_are_read_without_a_manual_flush_and_resets_lose_nothing_unless_asked():
    plain, cached = pair(cache_sets=1)
    step(plain, BATCHES[0]), step(cached, BATCHES[0])
    assert_same_bits(plain, cached)
    cached.reset_cache_states()
    assert_steps_agree(plain, cached, BATCHES[1:3])
    before = tables_of(cached)
    single = np.array([7]), np.repeat([0, 1], [2, 11])
    step(cached, single)
    cached.reset_cache_states(discard=True)
    for mine, yours in zip(before[0], tables_of(cached)[0], strict=True):
        np.testing.assert_array_equal(mine, yours)


def test_row_gradients_are_applied_behind_a_cache():
    plain, cached = pair("adamw", cache_sets=1)
    for module in (plain, cached):
        for batch in BATCHES[:3]:
            output, backward = module.vjp(*batch)
            module.apply(backward.row_gradients(output))
    assert_same_bits(plain, cached)


class HandCount:
    """One LRU cache set by set, as lists of `[time, id]`, filled as the published rule says."""

    def __init__(self, num_sets, num_rows):
        self.slots, self.num_rows, self.now = [[[0, None] for _ in range(32)] for _ in range(num_sets)], num_rows, 1
        self.counts = np.zeros(6, int)

    def admit(self, rows):
        self.now += 1
        wanted = sorted({r for r in rows if r is not None})
        homes = {r: self.slots[int(set_of(np.array([r]), len(self.slots))[0])] for r in wanted}
        missing = []
        for row in wanted:
            hit = [slot for slot in homes[row] if slot[1] == row]
            missing += [] if hit else [row]
            for slot in hit:
                slot[0] = self.now
        homeless = []
        for row in missing:
            oldest = min(homes[row], key=lambda slot: slot[0])
            if oldest[0] == self.now:
                homeless.append(row)
            else:
                oldest[:] = [self.now, row]
        served = sum(rows.count(r) for r in homeless)
        self.counts += [1, len(rows), len(wanted) + (None in rows), len(missing), len(homeless), served]
        return missing


def test_statistics_equal_a_hand_count():
    metrics = rt.RecordCacheMetrics(True, True)
    _, cached = pair(
        specs=((90, 4), (60, 4)),
        features=[1, 0],
        cache_sets=2,
        gather_uvm_cache_stats=True,
        record_cache_metrics=metrics,
    )
    hand, by_feature, misses = HandCount(2, 150), np.zeros(2, int), [0, 0]
    for seed in range(5):
        rng = np.random.default_rng(seed)
        ids = rng.integers(-1, 60, 100)
        offsets = np.array([0, 20, 40, 70, 100])
        rows = [None if i < 0 else int(i) + (90 if p < 40 else 0) for p, i in enumerate(ids)]
        missing = hand.admit(rows)
        misses = [misses[0] + bool(missing), misses[1] + len(missing)]
        by_feature += [len({r for r in part if r in missing}) for part in (rows[:40], rows[40:])]
        train(cached, ids, offsets)
    assert hand.counts[4] > 0
    assert list(cached.get_uvm_cache_stats()[:6]) == hand.counts.tolist()
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
    assert make(((1000, 4),), location=CACHED).host_rows.groups[0].cache.num_sets == 7  # ceil(1000 * 0.2 / 32)
    assert make(((1000, 4),), location=CACHED, cache_load_factor=0.0).host_rows.groups[0].cache.num_sets == 1
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
    specs = [(rows, dim, CACHED, rt.ComputeDevice.CPU) for rows, dim in zip([*[100_000] * 3, 40], dims, strict=True)]
    module = rt.TableBatchedEmbeddingBags(specs, cache_load_factor=0.5)
    sizes = [own.cache.num_sets * 32 * dim * 4 for own, dim in zip(module.host_rows.groups, dims, strict=True)]
    assert 0.98 * 4 * 2**20 < sum(sizes) <= 4 * 2**20
    assert sizes[3] == 32 * 4 * 4  # one set, which a table of 40 rows asks for
    with pytest.raises(ValueError, match="not even one set of 32 rows of 240 bytes fits"):
        rt.TableBatchedEmbeddingBags(specs, cache_reserved_memory=3.999 / 2**10)

import contextlib
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed import Bags, checkpoint
from rsembed.tt import OptimType, TableBatchedTTEmbeddingBag, TensorTrain, TTEmbeddingBag
from tests.oracles import adam_step, lookup, row_gradients, sgd_step, stepped_table
from tests.tt.tt_oracles import CASES, call_of, dense_table, looked_up, step, worked_cores
from tests.world import assert_same

SIZES = [50, 60, 40]
OTHER = [np.full((14, 2 * 3), 0.5, np.float32), np.full((15, 3 * 2), 0.25, np.float32)]


def make(cache_size=4, hashtbl_size=64, rngs=0, **options):
    options = {"sparse": True, "learning_rate": 0.3, "include_last_offset": True, **options}
    options |= {"cache_size": cache_size, "hashtbl_size": hashtbl_size, "rngs": nnx.Rngs(rngs)}
    return TTEmbeddingBag(200, 4, [3], [14, 15], [2, 2], **options)


def zipf_ids(num_rows, exponent, num_ids, seed):
    """Ids by a Zipf law. The most frequent ids are random."""
    shares = np.arange(1, num_rows + 1) ** -exponent
    ids = np.random.default_rng(99).permutation(num_rows)
    return np.random.default_rng(seed).choice(ids, num_ids, p=shares / shares.sum())


def six_bags(ids):
    """Bags with these ids, and empty bags up to six bags, padded to 32 ids."""
    return Bags.from_lists([*ids, *[[]] * (6 - len(ids))]).pad_to(32)


def train(emb, ids):
    """One step with random gradients, which also counts the ids."""
    d_output = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    return step(emb, d_output, six_bags(ids))


def cache(emb, ids):
    """Counts the ids, and caches the ids that are read most."""
    emb.update_cache(six_bags(ids))
    emb.cache_populate()


def all_rows(emb):
    """All rows as lookups read them. Counts no reads."""
    emb.eval()
    rows = np.asarray(looked_up(emb, np.arange(200)[:, None]))
    emb.train()
    return rows


def reads_of(emb):
    """Number of reads by id."""
    counted = jax.tree.map(np.asarray, emb.caches[0].directory.get_value().counted)
    is_read = (counted.last_step >= 0) & (counted.counts > 0)
    return dict(zip(counted.low[is_read].tolist(), counted.counts[is_read].tolist(), strict=True))


def places_of(cache):
    """Cache slot of each cached id.

    In a group of tables, ids count from the first row of the group's first table.
    """
    ids = np.asarray(cache.directory.get_value().ids).tolist()
    return {id: place for place, id in enumerate(ids) if id < 2**30}


def test_the_worked_life_of_a_cache():
    case = CASES["cache_lifecycle_sgd"]
    inputs, expect = case["input"], case["expect"]
    options = {"learning_rate": 0.1, "cache_size": 2, "hashtbl_size": 32}
    emb = TTEmbeddingBag(12, 4, inputs["ranks"], inputs["p"], inputs["q"], **options)
    emb.set_cores(worked_cores(inputs, emb.spec))
    for warmup in inputs["warmup_batches"]:
        emb.update_cache(warmup["indices"], warmup["offsets"])
    assert {str(id): reads for id, reads in reads_of(emb).items()} == expect["frequency"]
    assert emb.cache_reports()[0].cached_ids == 0
    emb.cache_populate()
    rows_of_ids = places_of(emb.caches[0])
    assert sorted(rows_of_ids) == sorted(expect["cached_ids"])
    for id, place in rows_of_ids.items():
        assert_array_equal(emb.cache_weight[place], expect["cache_weight"][str(id)])
    ids = np.asarray(inputs["batch"]["indices"])
    hits = np.isin(ids, list(rows_of_ids))
    assert sorted(ids[hits].tolist()) == expect["cached_lookups"]
    assert ids[~hits].tolist() == expect["tt_lookups"]
    batch = Bags(ids, np.asarray(inputs["batch"]["offsets"]))
    output, _ = step(emb, np.asarray(inputs["d_output"], np.float32), batch)
    assert_array_equal(output, expect["output"])
    for core, wanted in zip(emb.cores_of(), expect["cores_after"], strict=True):
        assert_allclose(core, np.reshape(wanted, core.shape), rtol=1e-6, atol=1e-6)
    for id, wanted in expect["cache_after"].items():
        assert_allclose(emb.cache_weight[rows_of_ids[int(id)]], wanted, rtol=1e-6, atol=1e-6)
    assert_allclose(looked_up(emb, batch), expect["output_after"], rtol=1e-6, atol=1e-6)
    emb.update_cache(batch)
    emb.cache_populate()
    wanted = expect["output_after_second_populate"]
    assert_allclose(looked_up(emb, batch), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.slow_rows("5")
@pytest.mark.parametrize("id", [5, 9])
def test_rows_that_come_or_go_between_lookup_and_backward_are_stepped_once(id):
    late, early, reads = make(cache_size=1), make(cache_size=1), [[5] * 4, [9] * 9]
    # Id 5 is cached first, and then 9, which is read more.
    for emb in (late, early):
        emb([reads[0]])
        emb.cache_populate()
        emb([reads[1], [id]])
    outputs, backward = late.vjp([[id]])
    late.cache_populate()
    backward(jnp.ones_like(outputs))
    early.cache_populate()
    before = np.asarray(early.full_weight())
    early.vjp([[id]])[1](jnp.ones_like(outputs))
    assert_allclose(late.full_weight(), early.full_weight(), atol=1e-6)
    assert np.abs(np.asarray(early.full_weight())[id] - before[id]).max() > 0.01


def test_reset_forgets_counts_and_rows():
    emb = make()
    cache(emb, [[4, 9]])
    train(emb, [[4]])
    emb.reset_cache()
    assert not any(emb.cache_reports()[0])
    assert_allclose(all_rows(emb), dense_table(emb.spec, emb.cores_of()), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "give", [lambda emb: emb.reset_parameters(rngs=nnx.Rngs(9)), lambda emb: emb.set_cores(OTHER)]
)
def test_new_cores_are_not_hidden_by_old_rows_nor_stepped_with_old_state(give):
    emb, fresh = make(optimizer=OptimType.ADAM), make(optimizer=OptimType.ADAM)
    cache(emb, [[4, 9]])
    train(emb, [[4], [20]])
    give(emb)
    assert_allclose(all_rows(emb), dense_table(emb.spec, emb.cores_of()), rtol=1e-4, atol=1e-7)
    fresh.set_cores(emb.cores_of())
    for module in (emb, fresh):
        train(module, [[4], [20]])
    assert_array_equal(all_rows(emb), all_rows(fresh))


@pytest.mark.parametrize(
    ("way", "sparse", "dtype"),
    [
        ("file", True, "bfloat16"),
        ("file", False, "float32"),
        *((way, True, "float32") for way in ("clone", "pickle")),
    ],
)
def test_a_copy_goes_on_as_if_never_copied_whatever_the_original_does(way, sparse, dtype, tmp_path):
    options = {"sparse": sparse, "dtype": dtype, "optimizer": OptimType.ADAM, "cache_size": 1}
    emb, alone = make(**options), make(**options)

    def go_on(module, k):
        if module.use_cache:
            cache(module, [[k + i % 3 for i in range(k)]])
        output, backward = module.vjp(six_bags([[k], [k + 1], [5]]))
        backward(output)

    def from_file(emb):
        checkpoint.save(tmp_path / "module", nnx.state(emb))
        other = make(rngs=7, **options)
        nnx.update(other, checkpoint.load(tmp_path / "module", nnx.state(other)).tree)
        return other

    def from_pickle(emb):
        return pickle.loads(pickle.dumps(emb))

    for k in (4, 16, 28):
        for module in (emb, alone):
            go_on(module, k)
    twin = {"file": from_file, "clone": nnx.clone, "pickle": from_pickle}[way](emb)
    # The original continues before the copy is used for the first time.
    go_on(emb, 7)
    for module in (twin, alone):
        go_on(module, 32)
    assert twin.cache_reports() == alone.cache_reports()
    assert_same(nnx.state(twin), nnx.state(alone))


def three_tables(**options):
    """A module with tables of 50, 60 and 40 rows. The first and the last one are a group."""
    options = {"use_cache": True, "learning_rate": 0.3, **options}
    return nnx.jit(
        lambda: TableBatchedTTEmbeddingBag(3, SIZES, 4, [[2], [3], [2]], None, [2, 2], **options)
    )()


@pytest.mark.slow
def test_new_cores_of_a_table_leave_the_learned_rows_of_the_others():
    emb = three_tables(cache_size=4, optimizer=OptimType.EXACT_ADAGRAD)
    assert emb.groups == ((0, 2), (1,))
    cache(emb, [[3], [], [5], [], [3, 8], []])
    # The first table has 50 rows, so rows 3 and 8 of the last table are ids 53 and 58 of the group.
    assert [sorted(places_of(cache)) for cache in emb.caches] == [[3, 53, 58], [5]]
    bags = six_bags([[3, 1], [], [5], [], [3], []])
    step(emb, np.ones((3, 2, 4), np.float32), bags)
    before = np.asarray(emb.full_weight(0))
    emb.set_cores([jnp.ones_like(core) for core in emb.cores_of(2)], table=2)
    assert [sorted(places_of(cache)) for cache in emb.caches] == [[3], [5]]
    assert_array_equal(emb.full_weight(0), before)
    assert_array_equal(whole_tables(emb)[0], before)
    assert_allclose(emb.full_weight(2), dense_table(emb.specs[2], emb.cores_of(2)), rtol=1e-6)


@nnx.jit
def whole_tables(emb):
    """All tables of `three_tables`, computed by one compiled program."""
    return [emb.full_weight(k) for k in range(3)]


@pytest.mark.slow
def test_ragged_bags_of_groups_between_each_other_step_the_cached_rows_of_their_own_tables():
    emb = three_tables(mode="mean", cache_size=99)
    emb.update_cache(Bags.from_lists([range(rows) for rows in SIZES]))
    # All rows are cached.
    emb.cache_populate()
    before, generator = whole_tables(emb), np.random.default_rng(0)
    # Each table has three bags.
    lengths = np.asarray([[0, 3, 2], [1, 0, 4], [5, 2, 0]])
    ids = generator.integers(0, np.repeat(SIZES, lengths.sum(1)))
    weights = generator.normal(size=ids.size).astype(np.float32)
    d_output = generator.normal(size=(3, 3, 4)).astype(np.float32)
    offsets = np.cumsum([0, *lengths.ravel()])
    output, _ = step(emb, d_output, Bags(ids, offsets, weights))
    for k, actual in enumerate(whole_tables(emb)):
        call = call_of(ids, offsets[3 * k : 3 * k + 4], weights, "mean")
        (wanted,) = lookup([before[k]], call)
        assert_allclose(output[k], wanted, rtol=1e-5, atol=1e-7)
        (gradients,) = row_gradients(call, [SIZES[k]], [4], [d_output[k]])
        stepped, _ = stepped_table(before[k], [], gradients, sgd_step, learning_rate=0.3)
        assert_allclose(actual, stepped, rtol=1e-5, atol=1e-6)


@pytest.mark.slow_rows("0.8-60000-1000", "1.2-60000-0")
@pytest.mark.parametrize(
    ("exponent", "batch", "hashtbl_size"),
    [(0.8, 3000, 0), (1.2, 60_000, 0), (0.8, 60_000, 1000), (1.2, 3000, 1000)],
)
def test_the_cache_hits_as_often_as_with_exact_counts(exponent, batch, hashtbl_size):
    warning = contextlib.nullcontext()
    if hashtbl_size:
        warning = pytest.warns(UserWarning, match="16384 ids get a read count")
    options = {"cache_size": 1000, "hashtbl_size": hashtbl_size}
    with warning:
        emb = TTEmbeddingBag(100_000, 4, [2], [320, 320], [2, 2], **options)
    seen, future = (zipf_ids(100_000, exponent, 60_000, seed) for seed in (0, 1))
    for start in range(0, seen.size, batch):
        emb.update_cache(seen[start : start + batch], np.asarray([0]))
    emb.cache_populate()
    stored = list(places_of(emb.caches[0]))
    assert len(stored) <= 1000
    most_read = np.argsort(-np.bincount(seen, minlength=100_000), kind="stable")[:1000]
    assert np.isin(future, stored).mean() > np.isin(future, most_read).mean() - 0.01


def test_a_batch_with_more_distinct_ids_than_places_keeps_the_most_read_not_the_lowest():
    emb = TTEmbeddingBag(5000, 4, [2], [71, 71], [2, 2], cache_size=8, hashtbl_size=128)
    hot = np.arange(4990, 4998)
    emb.update_cache(np.concatenate([np.arange(5000), np.repeat(hot, 3)])[:, None])
    emb.cache_populate()
    assert sorted(places_of(emb.caches[0])) == hot.tolist()


def hot_ids(epoch, num_rows=900, width=24):
    """Ids of an epoch, drawn from a window that moves by its width after each epoch."""
    drawn = np.random.default_rng(epoch).integers(0, width, (192, 1))
    return ((drawn + epoch * width) * 37 % num_rows).astype(np.int32)


@pytest.mark.slow
def test_under_endless_drift_the_cache_hits_like_a_fresh_one_inside_jit():
    emb = TTEmbeddingBag(900, 4, [3], [30, 30], [2, 2], cache_size=32)
    hit_rates = []
    # The epochs read 720 ids, and the cache has 32 rows.
    for epoch in range(30):
        for _ in range(2):
            before = emb.cache_reports()[0]
            step(emb, np.full((192, 4), 0.01, np.float32), jnp.asarray(hot_ids(epoch)))
            populate(emb)
            after = emb.cache_reports()[0]
        hit_rates.append((after.hits - before.hits) / (after.lookups - before.lookups))
    assert after.lookups == 30 * 2 * 192 and after.cached_ids == 32 and after.evictions > 500
    # Counts are halved after each population, so ids of the previous epoch still count.
    assert np.mean(hit_rates) > 0.85 and min(hit_rates) > 0.7


@nnx.jit
def populate(emb):
    emb.cache_populate()


@pytest.mark.slow_rows("SGD")
@pytest.mark.parametrize("rule", ["ADAM", "SGD"])
def test_rows_that_stay_keep_place_and_state_and_the_residual_bounds_what_others_change(rule):
    emb, reads, cached = make(cache_size=2, optimizer=OptimType[rule]), np.zeros(200, int), []
    num_gone = 0
    for often, some in (
        ([1, 2], []),
        ([3, 4], []),
        ([4, 6], [2]),
        ([6, 8], [4]),
        ([9, 10], [6] * 5),
        ([6, 9], []),
    ):
        ids = [*9 * often, *some, *cached]
        step(emb, np.ones((6, 4), np.float32), six_bags([ids]))
        np.add.at(reads, ids, 1)
        before, rows_before = all_rows(emb), places_of(emb.caches[0])
        of_cores = dense_table(emb.spec, emb.cores_of())
        stored = jax.tree.map(np.asarray, (emb.caches[0].rows, emb.caches[0].state))
        emb.cache_populate()
        # The ids with the most reads are cached. With equal numbers of reads, cached ids come
        # first, and then low ids.
        now = sorted(np.flatnonzero(reads), key=lambda id: (-reads[id], id not in cached, id))[:2]
        evicted, stay = np.setdiff1d(cached, now).astype(int), np.intersect1d(cached, now)
        after, new_places = all_rows(emb), places_of(emb.caches[0])
        new_cores = dense_table(emb.spec, emb.cores_of())
        assert_allclose(after[evicted], new_cores[evicted], rtol=1e-5, atol=1e-6)
        change = np.abs(after - before)
        assert change.max() <= emb.cache_reports()[0].residual + 1e-6
        # Populating does not change rows that are now cached.
        assert_array_equal(after[now], before[now])
        # Other rows change less than if the training of evicted rows was dropped.
        forgotten = np.square(of_cores - before)[evicted]
        assert np.square(change).sum() <= forgotten.sum() * (1 + 1e-5)
        assert sorted(new_places) == sorted(now)
        kept = [rows_before[id] for id in stay]
        assert kept == [new_places[id] for id in stay]
        actual = (emb.caches[0].rows, emb.caches[0].state)
        for old, new in zip(jax.tree.leaves(stored), jax.tree.leaves(actual), strict=True):
            assert_array_equal(np.asarray(new)[kept], old[kept])
        reads, cached, num_gone = reads // 2, now, num_gone + len(evicted)
    assert emb.cache_reports()[0].evictions == num_gone > 3


def momentum_step(row, slots, gradient, *, step):
    slots[0] = gradient + 0.9 * slots[0]
    row -= 0.1 * slots[0]


@pytest.mark.slow_rows("rule1-step_row1")
@pytest.mark.parametrize(
    ("rule", "step_row"),
    [
        (rs.from_optax(optax.sgd(0.1, momentum=0.9)), momentum_step),
        (rs.optimizers.Adam(0.1), functools.partial(adam_step, learning_rate=0.1)),
    ],
)
def test_a_row_that_takes_the_place_of_a_trained_one_does_not_move_by_what_that_one_learned(
    rule, step_row
):
    """Compares an optax rule and Adam in a collection with a step of the read row in numpy."""
    storage = TensorTrain((3,), cache_rows=1, populate_every=2)
    table = rs.TableSpec("t", 40, 4, optimizer=rule, storage=storage)
    collection = rs.EmbeddingCollection(rs.FeatureSpec("f", table))
    state, slots = collection.init(jax.random.key(0)), np.zeros((2, 4))
    for number, id in enumerate([1, 1, 1, 1, 21, 21, 21, 21]):
        # In two steps without a gradient, the row enters the cache, with initial slots.
        is_cached = number % 4 > 1
        if not is_cached:
            slots[:] = 0
        gradient = np.float32([[1.0, -2.0, 0.5, number]]) * is_cached
        before = np.asarray(collection.tables(state)["t"], np.float64)[id]
        reads = np.full((1, 4 if id == 1 else 8), id)
        state = collection.update(state, {"f": reads}, {"f": gradient / reads.size})
        step_row(before, slots, gradient[0], step=number)
        assert_allclose(collection.tables(state)["t"][id], before, rtol=1e-4, atol=1e-5)
    assert collection.counts(state)["t"]["evictions"].sum() == 1


def test_lookups_count_and_populate_also_inside_jit_but_not_after_eval():
    emb = make()
    emb(six_bags([[4, 4, -1]]))
    step(emb, np.zeros((6, 4), np.float32), six_bags([[9]]))
    assert (emb.cache_reports()[0].cached_ids, emb.cache_reports()[0].lookups) == (0, 3)
    emb.eval()
    looked_up(emb, six_bags([[4]]))
    emb.train()
    looked_up(emb, six_bags([[4]]))
    populate(emb)
    assert emb.cache_reports()[0] == (2, 0, 4, 0, 0, 0)
    with pytest.warns(UserWarning, match="nothing was counted, so nothing is cached"):
        make().cache_populate()


@pytest.mark.slow
def test_memory_of_the_default_cache_is_a_hundredth_of_dense():
    emb = TTEmbeddingBag(11_000_000, 64, [32, 32], [200, 220, 250], [4, 4, 4])
    assert (
        sum(array.nbytes for array in jax.tree.leaves(nnx.state(emb))) <= 11_000_000 * 64 * 4 / 100
    )
    assert emb.cache_weight.shape == (11_000, 64)

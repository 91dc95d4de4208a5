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
from tests.oracles import adam_step
from tests.tt.tt_oracles import CASES, dense_table, looked_up, step, worked_cores
from tests.world import assert_same

ALL = np.arange(200)[:, None]
SIZES = [50, 60, 40]
OTHER = [np.full((14, 2 * 3), 0.5, np.float32), np.full((15, 3 * 2), 0.25, np.float32)]


def make(cache_size=4, hashtbl_size=64, rngs=0, **options):
    options = {"sparse": True, "learning_rate": 0.3, "include_last_offset": True, **options}
    return TTEmbeddingBag(
        200,
        4,
        [3],
        [14, 15],
        [2, 2],
        cache_size=cache_size,
        hashtbl_size=hashtbl_size,
        rngs=nnx.Rngs(rngs),
        **options,
    )


def zipf_ids(num_rows, exponent, num_ids, seed):
    """Ids of a Zipf law; which id is frequent has nothing to do with its number."""
    generator = np.random.default_rng(seed)
    cumulative = np.cumsum(np.arange(1, num_rows + 1) ** -exponent)
    ranks = np.searchsorted(cumulative, generator.random(num_ids) * cumulative[-1], side="right")
    return np.random.default_rng(99).permutation(num_rows)[ranks]


def six_bags(ids):
    """The given ones, and empty ones behind them."""
    return Bags.from_lists([*ids, *[[]] * (6 - len(ids))]).pad_to(32)


def train(emb, ids, seed=0):
    """Counts the ids and steps the rows."""
    d_output = np.random.default_rng(seed).normal(size=(6, 4)).astype(np.float32)
    return step(emb, d_output, six_bags(ids))


def all_rows(emb):
    """Every row as lookups see it, counting nothing."""
    emb.eval()
    rows = np.asarray(looked_up(emb, ALL))
    emb.train()
    return rows


def directory_of(emb):
    """Reads by id, and places by stored id."""
    directory = jax.tree.map(np.asarray, emb.caches[0].directory.get_value())
    ids, counts = directory.counted.low.tolist(), directory.counted.counts.tolist()
    is_counted = directory.counted.last_step >= 0
    reads = {ids[k]: counts[k] for k in np.flatnonzero(is_counted) if counts[k]}
    return reads, {
        ids[k]: int(directory.places[k])
        for k in np.flatnonzero(is_counted)
        if directory.places[k] < 2**30
    }


def learned(cache):
    """All stored ids, ascending, and their rows; ids are row numbers plus the rows of the tables before."""
    ids, rows = np.asarray(cache.directory.get_value().ids), np.asarray(cache.rows.get_value())
    order = np.argsort(ids)[: np.sum(ids < 2**30)]
    return ids[order], rows[order]


def place_of(id, emb):
    """Where the row of a stored id lies."""
    return directory_of(emb)[1][id]


def worked():
    given, expect = CASES["cache_lifecycle_sgd"]["input"], CASES["cache_lifecycle_sgd"]["expect"]

    @nnx.jit
    def module():
        options = {"learning_rate": 0.1, "cache_size": 2, "hashtbl_size": 32}
        emb = TTEmbeddingBag(12, 4, given["ranks"], given["p"], given["q"], **options)
        emb.set_cores(worked_cores(given, emb.spec))
        return emb

    return module(), given, expect


def test_the_worked_life_of_a_cache():
    emb, given, expect = worked()
    for batch in given["warmup_batches"]:
        emb.update_cache(batch["indices"], batch["offsets"])
    (cache,) = emb.caches
    assert {str(id): reads for id, reads in directory_of(emb)[0].items()} == expect["frequency"]
    assert emb.cache_reports()[0].cached_ids == 0
    emb.cache_populate()
    ids, rows = learned(cache)
    assert sorted(expect["cached_ids"]) == ids.tolist()
    for id, row in zip(ids, rows, strict=True):
        assert_array_equal(row, expect["cache_weight"][str(id)])
    ids = np.asarray(given["batch"]["indices"])
    batch = Bags(ids, np.asarray(given["batch"]["offsets"]))
    hits = np.isin(ids, list(directory_of(emb)[1]))
    assert sorted(ids[hits].tolist()) == expect["cached_lookups"]
    assert ids[~hits].tolist() == expect["tt_lookups"]
    d_output = np.asarray(given["d_output"], np.float32)
    output, _ = step(emb, d_output, batch)
    assert_array_equal(output, expect["output"])
    for core, wanted in zip(emb.cores_of(), expect["cores_after"], strict=True):
        assert_allclose(core, np.asarray(wanted).reshape(core.shape), rtol=1e-6, atol=1e-6)
    for id, wanted in expect["cache_after"].items():
        row = np.asarray(emb.caches[0].rows.get_value())[place_of(int(id), emb)]
        assert_allclose(row, wanted, rtol=1e-6, atol=1e-6)
    assert_allclose(looked_up(emb, batch), expect["output_after"], rtol=1e-6, atol=1e-6)
    emb.update_cache(batch)
    emb.cache_populate()
    assert_allclose(
        looked_up(emb, batch), expect["output_after_second_populate"], rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("id", [5, 9])
def test_rows_that_come_or_go_between_lookup_and_backward_are_stepped_once(id):
    late, early, reads = make(cache_size=1), make(cache_size=1), [[5] * 4, [9] * 9]
    for emb in (late, early):  # 5 is cached first, then 9, which is read more
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
    emb.update_cache(six_bags([[4, 9]]))
    emb.cache_populate()
    train(emb, [[4]])
    emb.reset_cache()
    assert not any(emb.cache_reports()[0])
    assert_allclose(all_rows(emb), dense_table(emb.spec, emb.cores_of()), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "give", [lambda emb: emb.reset_parameters(rngs=nnx.Rngs(9)), lambda emb: emb.set_cores(OTHER)]
)
def test_new_cores_are_not_hidden_by_old_rows_nor_stepped_with_old_state(give):
    emb = make(optimizer=OptimType.ADAM)
    emb.update_cache(six_bags([[4, 9]]))
    emb.cache_populate()
    train(emb, [[4], [20]])
    give(emb)
    assert_allclose(all_rows(emb), dense_table(emb.spec, emb.cores_of()), rtol=1e-4, atol=1e-7)
    fresh = make(optimizer=OptimType.ADAM)
    fresh.set_cores(emb.cores_of())
    for module in (emb, fresh):
        step(module, np.ones((6, 4), np.float32), six_bags([[4], [20]]))
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
            module.update_cache(six_bags([[k + i % 3 for i in range(k)]]))
            module.cache_populate()
        output, backward = module.vjp(six_bags([[k], [k + 1], [5]]))
        backward(output)

    def from_file(emb):
        checkpoint.save(tmp_path / "module", nnx.state(emb))
        other = make(rngs=7, **options)
        nnx.update(other, checkpoint.load(tmp_path / "module", nnx.state(other)).tree)
        return other

    ways = {
        "file": from_file,
        "clone": nnx.clone,
        "pickle": lambda emb: pickle.loads(pickle.dumps(emb)),
    }
    for k in (4, 16, 28):
        for module in (emb, alone):
            go_on(module, k)
    twin = ways[way](emb)
    go_on(emb, 7)  # before the copy is used for the first time
    for module in (twin, alone):
        go_on(module, 32)
    assert twin.cache_reports() == alone.cache_reports()
    assert_same(nnx.state(twin), nnx.state(alone))


def three_tables(**options):
    """Tables of 50, 60 and 40 rows, the first and last of which are a group."""
    options = {"use_cache": True, "learning_rate": 0.3, **options}
    return nnx.jit(
        lambda: TableBatchedTTEmbeddingBag(3, SIZES, 4, [[2], [3], [2]], None, [2, 2], **options)
    )()


def test_new_cores_of_a_table_leave_the_learned_rows_of_the_others():
    emb = three_tables(cache_size=4, optimizer=OptimType.EXACT_ADAGRAD)
    assert emb.groups == ((0, 2), (1,))
    emb.update_cache(six_bags([[3], [], [5], [], [3, 8], []]))
    emb.cache_populate()
    # 50 rows are the first table's.
    assert [learned(cache)[0].tolist() for cache in emb.caches] == [
        [3, 53, 58],
        [5],
    ]
    bags = six_bags([[3, 1], [], [5], [], [3], []])
    step(emb, np.ones((3, 2, 4), np.float32), bags)
    before = np.asarray(emb.full_weight(0))
    emb.set_cores([jnp.ones_like(core) for core in emb.cores_of(2)], table=2)
    assert [learned(cache)[0].tolist() for cache in emb.caches] == [[3], [5]]
    for whole in (emb.full_weight(0), nnx.jit(lambda emb: emb.full_weight(0))(emb)):
        assert_array_equal(whole, before)
    assert_allclose(emb.full_weight(2), dense_table(emb.specs[2], emb.cores_of(2)), rtol=1e-6)


@nnx.jit
def whole_tables(emb):
    """All tables of `three_tables`, by one program."""
    return [emb.full_weight(k) for k in range(3)]


def test_ragged_bags_of_groups_between_each_other_step_the_cached_rows_of_their_own_tables():
    rate = 0.3
    emb = three_tables(mode="mean", cache_size=99, learning_rate=rate)
    emb.update_cache(
        np.concatenate([np.arange(rows) for rows in SIZES]), np.asarray([0, *np.cumsum(SIZES)])
    )
    emb.cache_populate()  # all rows are cached
    tables = [np.asarray(table, np.float64) for table in whole_tables(emb)]
    generator = np.random.default_rng(0)
    lengths = np.asarray([0, 3, 2, 1, 0, 4, 5, 2, 0])  # three bags a table
    ids = generator.integers(0, np.repeat(np.repeat(SIZES, 3), lengths))
    weights, d_output = (
        generator.normal(size=ids.size).astype(np.float32),
        generator.normal(size=(3, 3, 4)),
    )
    bags = Bags(ids, np.asarray([0, *np.cumsum(lengths)]), weights)
    output, _ = step(emb, d_output.astype(np.float32), bags)
    wanted, stepped, bag_of = (
        np.zeros((3, 3, 4)),
        [table.copy() for table in tables],
        np.repeat(np.arange(9), lengths),
    )
    for i, weight, bag in zip(ids, weights, bag_of, strict=True):
        k, b, gain = bag // 3, bag % 3, weight / lengths[bag]
        wanted[k, b] += gain * tables[k][i]
        stepped[k][i] -= rate * gain * d_output[k, b]
    assert_allclose(output, wanted, rtol=1e-5, atol=1e-7)
    for table, expected in zip(whole_tables(emb), stepped, strict=True):
        assert_allclose(table, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow_rows("0.8-60000-1000", "1.2-60000-0")
@pytest.mark.parametrize(
    ("exponent", "batch", "hashtbl_size"),
    [(0.8, 3000, 0), (1.2, 60_000, 0), (0.8, 60_000, 1000), (1.2, 3000, 1000)],
)
def test_the_cache_hits_as_often_as_with_exact_counts(exponent, batch, hashtbl_size):
    with (
        contextlib.nullcontext()
        if not hashtbl_size
        else pytest.warns(UserWarning, match="16384 ids get a read count")
    ):
        emb = TTEmbeddingBag(
            100_000, 4, [2], [320, 320], [2, 2], cache_size=1000, hashtbl_size=hashtbl_size
        )
    seen, future = (zipf_ids(100_000, exponent, 60_000, seed) for seed in (0, 1))
    for start in range(0, seen.size, batch):
        emb.update_cache(seen[start : start + batch], np.asarray([0]))
    emb.cache_populate()
    stored, _ = learned(emb.caches[0])
    assert stored.size <= 1000
    most_read = np.argsort(-np.bincount(seen, minlength=100_000), kind="stable")[:1000]
    assert np.isin(future, stored).mean() > np.isin(future, most_read).mean() - 0.01


def test_a_batch_with_more_distinct_ids_than_places_keeps_the_most_read_not_the_lowest():
    emb = TTEmbeddingBag(5000, 4, [2], [71, 71], [2, 2], cache_size=8, hashtbl_size=128)
    hot = np.arange(4990, 4998)
    emb.update_cache(np.concatenate([np.arange(5000), np.repeat(hot, 3)])[:, None])
    emb.cache_populate()
    assert learned(emb.caches[0])[0].tolist() == hot.tolist()


def hot_ids(epoch, num_rows=900, width=24):
    """What is read in an epoch: ids of a window that has moved on by its width."""
    drawn = np.random.default_rng(epoch).integers(0, width, (192, 1))
    return ((drawn + epoch * width) * 37 % num_rows).astype(np.int32)


@pytest.mark.slow
def test_under_endless_drift_the_cache_hits_like_a_fresh_one_inside_jit():
    emb = TTEmbeddingBag(900, 4, [3], [30, 30], [2, 2], cache_size=32)
    hit_rates = []
    for epoch in range(30):  # read by thirty times as many ids as there is room for
        for _ in range(2):
            before = emb.cache_reports()[0]
            take_step(emb, jnp.asarray(hot_ids(epoch)), np.full((192, 4), 0.01, np.float32))
            populate(emb)
            after = emb.cache_reports()[0]
        hit_rates.append((after.hits - before.hits) / (after.lookups - before.lookups))
    assert after.lookups == 30 * 2 * 192 and after.cached_ids == 32 and after.evictions > 500
    # Half of what was read before counts as well.
    assert np.mean(hit_rates) > 0.85 and min(hit_rates) > 0.7


@nnx.jit
def populate(emb):
    emb.cache_populate()


@nnx.jit
def take_step(emb, bags, d_output):
    """The fused step."""
    emb.vjp(bags)[1](d_output)


@pytest.mark.slow_rows("options1")
@pytest.mark.parametrize("options", [{"optimizer": OptimType.ADAM}, {"optimizer": OptimType.SGD}])
def test_rows_that_stay_keep_place_and_state_and_the_residual_bounds_what_others_change(options):
    emb, reads, cached, num_gone = make(cache_size=2, **options), np.zeros(200, int), [], 0
    for many, some in (
        ([1, 2], []),
        ([3, 4], []),
        ([4, 6], [2]),
        ([6, 8], [4]),
        ([9, 10], [6] * 5),
        ([6, 9], []),
    ):
        ids = [*9 * many, *some, *cached]
        take_step(emb, six_bags([ids]), np.ones((6, 4), np.float32))
        np.add.at(reads, ids, 1)
        before, places, cores = (
            all_rows(emb).copy(),
            directory_of(emb)[1],
            dense_table(emb.spec, emb.cores_of()),
        )
        stored = jax.tree.map(
            np.asarray, jax.tree.leaves((emb.caches[0].rows, emb.caches[0].state))
        )
        emb.cache_populate()
        # The most read, of equals what is cached, then the lower id.
        now = sorted(np.flatnonzero(reads), key=lambda id: (-reads[id], id not in cached, id))[:2]
        gone, stay = np.setdiff1d(cached, now).astype(int), np.intersect1d(cached, now)
        after, report = all_rows(emb), emb.cache_reports()[0]
        assert_allclose(
            after[gone], dense_table(emb.spec, emb.cores_of())[gone], rtol=1e-5, atol=1e-6
        )
        change = np.abs(after - before)
        assert change.max() <= report.residual + 1e-6
        # Those that entered started as they were.
        assert_array_equal(after[now], before[now])
        # Better than to forget.
        assert np.square(change).sum() <= np.square(cores - before)[gone].sum() * (1 + 1e-5)
        assert learned(emb.caches[0])[0].tolist() == sorted(now)
        kept = [places[id] for id in stay]
        assert kept == [place_of(id, emb) for id in stay]
        for old, new in zip(
            stored, jax.tree.leaves((emb.caches[0].rows, emb.caches[0].state)), strict=True
        ):
            assert_array_equal(np.asarray(new)[kept], old[kept])
        reads, cached, num_gone = reads // 2, now, num_gone + len(gone)
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
    """In the core, where an optax rule meets a cache: against a full table in numpy with a state for each row."""
    storage = TensorTrain((3,), cache_rows=3, populate_every=2)
    table = rs.TableSpec("t", 40, 4, optimizer=rule, storage=storage)
    collection = rs.EmbeddingCollection(rs.FeatureSpec("f", table))
    state, generator, by_id = collection.init(jax.random.key(0)), np.random.default_rng(0), {}
    moves = 0.0
    for phase, hot in enumerate(
        ([1, 2, 3], [1, 2, 3], [21, 22, 23], [21, 22, 23], [2, 22, 30], [2, 22, 30])
    ):
        # A row that leaves the cache leaves its state.
        by_id = {id: by_id[id] for id in hot if id in by_id}
        for _ in range(4):
            # Every second phase trains two of three rows that are cached; the other phases only count reads.
            gradients = np.zeros((3, 4), np.float32)
            if phase % 2:
                gradients[:2] = generator.normal(size=(2, 4))
            reads = {"f": np.asarray([[id] * 4 for id in hot])}
            before, number = np.asarray(collection.tables(state)["t"], np.float64), int(state.step)
            state = collection.update(state, reads, {"f": gradients / 4})
            after = np.asarray(collection.tables(state)["t"])
            for id, gradient in zip(hot, gradients, strict=True):
                if not phase % 2 and id not in by_id:
                    continue  # it enters the cache in this phase
                moves = max(moves, np.abs(after[id] - before[id]).max())
                slots = by_id.setdefault(id, np.zeros((2, 4)))
                step_row(before[id], slots, gradient, step=number)
                assert_allclose(after[id], before[id], rtol=1e-4, atol=1e-5)
    evictions = collection.counts(state)["t"]["evictions"].sum()
    assert moves > 0.05 and evictions == 5, (moves, evictions)


def test_a_module_for_an_optimizer_outside_has_no_cache_and_says_why():
    emb = make(sparse=False, use_cache=None)
    assert not emb.use_cache and emb.cache_weight is None
    for call in (
        emb.cache_populate,
        lambda: emb.update_cache([3]),
        lambda: make(sparse=False, use_cache=True),
    ):
        with pytest.raises(
            NotImplementedError, match=r"sparse=False has no cache .* moves the state with the row"
        ):
            call()


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

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from rsembed import Bags
from rsembed.tt import TableBatchedTTEmbeddingBag, TTEmbeddingBag
from rsembed.tt.hot_rows import SPILLED_ROWS_TO_LOG
from tests.tt.tt_oracles import CASES, dense_table

ALL = np.arange(200)[:, None]
SIZES = [50, 60, 40]
OTHER = [np.full((14, 2 * 3), 0.5, np.float32), np.full((15, 3 * 2), 0.25, np.float32)]


def make(cache_size=4, hashtbl_size=64, rngs=0, **options):
    options = {"sparse": True, "learning_rate": 0.3, "include_last_offset": True, **options}
    return TTEmbeddingBag(
        200, 4, [3], [14, 15], [2, 2], cache_size=cache_size, hashtbl_size=hashtbl_size, rngs=nnx.Rngs(rngs), **options
    )


@nnx.jit
def step(emb, bags, d_output):
    """One program for all batches of `train`."""
    output, backward = emb.vjp(bags)
    return output, backward(d_output)


@nnx.jit
def looked_up(emb, ids):
    return emb(ids)


@nnx.jit
def cores_of_tables(emb):
    return [emb.cores_of(k) for k in range(len(emb.specs))]


def six_bags(ids):
    """The given ones, and empty ones behind them."""
    return Bags.from_lists([*ids, *[[]] * (6 - len(ids))]).pad_to(32)


def train(emb, ids, seed=0):
    """Counts the ids, as a lookup outside `jit` does, and steps the rows."""
    bags, d_output = six_bags(ids), np.random.default_rng(seed).normal(size=(6, 4))
    emb.update_cache(bags)
    step(emb, bags, d_output.astype(np.float32))


def all_rows(emb):
    """Every row as lookups see it, counting nothing."""
    return np.asarray(looked_up(emb, ALL))


def place_of(id, emb):
    """Where the row of a stored id lies."""
    ids, places = emb.caches[0].directory()
    return int(np.asarray(places)[np.asarray(ids).tolist().index(id)])


def worked():
    given, expect = CASES["cache_lifecycle_sgd"]["input"], CASES["cache_lifecycle_sgd"]["expect"]

    @nnx.jit
    def module():
        options = {"learning_rate": 0.1, "cache_size": 2, "hashtbl_size": 32}
        emb = TTEmbeddingBag(12, 4, given["ranks"], given["p"], given["q"], **options)
        emb.set_cores(
            [jnp.asarray(c, jnp.float32).reshape(s) for c, s in zip(given["cores"], emb.spec.core_shapes, strict=True)]
        )
        return emb

    return module(), given, expect


def test_the_worked_life_of_a_cache():
    emb, given, expect = worked()
    for batch in given["warmup_batches"]:
        emb.update_cache(batch["indices"], batch["offsets"])
    (cache,) = emb.caches
    keys, counts = cache.read_counts()
    assert {str(k): int(c) for k, c in zip(keys, counts, strict=True) if k >= 0} == expect["frequency"]
    assert emb.cache_reports()[0].cached_ids == 0
    emb.cache_populate()
    ids, rows = cache.learned()
    assert sorted(expect["cached_ids"]) == ids.tolist()
    for id, row in zip(ids, rows, strict=True):
        np.testing.assert_array_equal(row, expect["cache_weight"][str(id)])
    ids = np.asarray(given["batch"]["indices"])
    batch = Bags(ids, np.asarray(given["batch"]["offsets"]))
    hits = np.asarray(cache.find(jnp.asarray(ids))) < cache.rows.get_value().shape[0]
    assert sorted(ids[hits].tolist()) == expect["cached_lookups"]
    assert ids[~hits].tolist() == expect["tt_lookups"]
    d_output = np.asarray(given["d_output"], np.float32)
    twin, _, _ = worked()
    twin.sparse = False
    for warm in given["warmup_batches"]:
        twin.update_cache(warm["indices"], warm["offsets"])
    twin.cache_populate()
    _, gradients = step(twin, batch, d_output)
    for g, wanted in zip(gradients.cores[0], expect["d_cores"], strict=True):
        np.testing.assert_array_equal(g, np.asarray(wanted).reshape(g.shape))
    for id, wanted in expect["d_cache"].items():
        np.testing.assert_array_equal(np.asarray(gradients.cached_rows[0])[place_of(int(id), twin)], wanted)
    emb.update_cache(batch)
    output, _ = step(emb, batch, d_output)
    np.testing.assert_array_equal(output, expect["output"])
    for core, wanted in zip(emb.cores_of(), expect["cores_after"], strict=True):
        np.testing.assert_allclose(core, np.asarray(wanted).reshape(core.shape), rtol=1e-6, atol=1e-6)
    for id, wanted in expect["cache_after"].items():
        row = np.asarray(emb.caches[0].rows.get_value())[place_of(int(id), emb)]
        np.testing.assert_allclose(row, wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(looked_up(emb, batch), expect["output_after"], rtol=1e-6, atol=1e-6)
    emb.update_cache(batch)
    emb.cache_populate()
    np.testing.assert_allclose(looked_up(emb, batch), expect["output_after_second_populate"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("optimizer", "max_spilled_rows"), [("sgd", None), ("exact_rowwise_adagrad", 5), ("adam", 0)])
def test_nothing_learned_is_lost_while_the_stream_drifts(optimizer, max_spilled_rows):
    emb = make(optimizer=optimizer, max_spilled_rows=max_spilled_rows, halve_counts_every=1)
    generator = np.random.default_rng(4)
    for epoch in range(4):
        for _ in range(2):
            train(emb, generator.integers(10 * epoch, 10 * epoch + 12, (6, 3)), seed=epoch)
        states = {
            int(id): [np.asarray(s)[place] for s in emb.caches[0].state.get_value()]
            for id, place in zip(emb.caches[0].learned()[0], np.asarray(emb.caches[0].places.get_value()), strict=False)
        }
        before, (old_ids, old_rows) = all_rows(emb), emb.caches[0].learned()
        emb.cache_populate()
        np.testing.assert_allclose(all_rows(emb), before, rtol=2e-5, atol=1e-7)
        ids, rows = (np.asarray(x) for x in emb.caches[0].learned())
        cores_only = dense_table(emb.spec, emb.cores_of())
        for id, row in zip(old_ids.tolist(), np.asarray(old_rows), strict=True):
            if id in ids:  # the very bits, and the state with them
                np.testing.assert_array_equal(rows[list(ids).index(id)], row)
                for now, was in zip(emb.caches[0].state.get_value(), states[id], strict=True):
                    np.testing.assert_array_equal(np.asarray(now)[place_of(id, emb)], was)
            else:  # nothing was learned that the cores do not say
                np.testing.assert_allclose(cores_only[id], row, rtol=1e-5, atol=1e-7)
        assert emb.cache_reports()[0].spilled_ids <= (12 if max_spilled_rows is None else max_spilled_rows)
    report = emb.cache_reports()[0]
    assert report.cached_ids == 4
    if max_spilled_rows is None:
        assert report.spills > 0
        assert report.evictions >= report.spills


def test_a_spilled_row_keeps_its_place_and_returns_with_what_it_learned():
    emb = make(cache_size=1, hashtbl_size=32, optimizer="exact_adagrad")
    for wanted, seen in ((4, 3), (1, 9), (4, 30)):
        emb.update_cache(six_bags([[wanted] * seen]))
        emb.cache_populate()
        train(emb, [[4], [1]], seed=seen)
        learned = all_rows(emb)
        assert place_of(4, emb) == 0
    assert emb.cache_reports()[0].spilled_ids == 1
    emb.cache_populate()
    np.testing.assert_array_equal(all_rows(emb)[[1, 4]], learned[[1, 4]])


def test_duplicates_are_one_step_and_only_rows_that_were_read_move():
    emb = make(optimizer="adam", learning_rate=0.1)
    emb.update_cache(six_bags([[4, 4, 9, 9, 30, 30]]))
    emb.cache_populate()
    before = all_rows(emb)
    step(emb, six_bags([[4, 4, 9], [4, -1, -1]]), np.ones((6, 4), np.float32))
    after = all_rows(emb)
    np.testing.assert_allclose(after[[4, 9]], before[[4, 9]] - 0.1, rtol=1e-5)  # Adam's first step is the rate
    train(emb, [[4]])
    np.testing.assert_array_equal(all_rows(emb)[[9, 30]], after[[9, 30]])


def test_nnx_grad_reaches_cores_and_cached_rows_of_sparse_false():
    emb = make(sparse=False)
    emb.update_cache(six_bags([[4, 4]]))
    emb.cache_populate()
    gradients = nnx.jit(nnx.grad(lambda m, ids: jnp.sum(m(ids))))(emb, jnp.asarray([[4, 9]]))
    leaves = {tuple(path): np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(gradients)}
    rows = next(leaf for path, leaf in leaves.items() if "rows" in path)
    assert rows.sum() == 4
    assert sum(np.abs(leaf).sum() for leaf in leaves.values()) > 4


def test_rows_that_optax_trains_keep_their_place():
    emb = make(sparse=False)
    optimizer = nnx.Optimizer(emb, optax.adam(0.1), wrt=nnx.Param)

    @nnx.jit
    def descend(emb, optimizer, ids):
        gradients = nnx.grad(lambda m: jnp.sum(m(ids) ** 2))(emb)
        with jax.numpy_dtype_promotion("standard"):
            optimizer.update(emb, gradients)

    def see(*ids):
        emb.update_cache(six_bags([ids]))
        descend(emb, optimizer, jnp.asarray([[ids[0]], [ids[-1]]]))

    emb.update_cache(six_bags([[4, 4, 4, 9, 9]]))
    emb.cache_populate()
    places = [place_of(id, emb) for id in (4, 9)]
    see(4, 9)
    see(30, 30)
    emb.update_cache(six_bags([[100 + k] * 5 for k in range(6)]))
    before = all_rows(emb)
    emb.cache_populate()
    assert [place_of(id, emb) for id in (4, 9)] == places
    assert emb.cache_reports()[0].cached_ids == 4
    np.testing.assert_allclose(all_rows(emb), before, rtol=2e-5, atol=1e-7)
    see(4, 101)


def test_lookups_count_outside_jit_and_not_after_eval():
    emb = make()
    emb(six_bags([[4, 4, -1]]))
    emb.vjp(six_bags([[9]]))
    assert emb.cache_reports()[0].lookups == 3
    emb.eval()
    emb(six_bags([[4]]))
    assert emb.cache_reports()[0].lookups == 3
    emb.train()
    looked_up(emb, six_bags([[4]]))
    assert emb.cache_reports()[0].lookups == 3


@pytest.mark.parametrize(
    "ask",
    [
        lambda emb: emb.cache_populate(),
        lambda emb: emb.update_cache(six_bags([[4]])),
        lambda emb: emb.update_cache(jnp.asarray([4, 5])),
        lambda emb: emb.reset_cache(),
        lambda emb: emb.cache_reports(),
        lambda emb: emb.full_weight(),
    ],
)
def test_what_the_host_does_is_refused_by_name_inside_jit(ask):
    with pytest.raises(RuntimeError, match=r"cache_populate, reset_cache, .* outside of jit"):
        nnx.jit(ask)(make())


def test_a_compiled_loop_says_that_nothing_is_counted():
    emb = make(populate_every=3)
    with pytest.raises(RuntimeError, match=r"populate_every=3 counts lookups on the host.* update_cache\(ids\)"):
        looked_up(emb, six_bags([[4]]))
    emb.eval()
    looked_up(emb, six_bags([[4]]))
    with pytest.warns(UserWarning, match="nothing was counted, so nothing is cached"):
        emb.cache_populate()


def test_the_schedule_populates_and_fades_by_itself():
    emb = make(populate_every=3, halve_counts_every=1)
    for k in range(3):
        assert emb.cache_reports()[0].cached_ids == 0, k
        emb(six_bags([[4, 4]]))
    assert emb.caches[0].learned()[0].tolist() == [4]
    assert emb.caches[0].read_counts().reads.max() == 3


def test_reset_returns_what_was_learned():
    emb = make()
    emb.update_cache(six_bags([[4, 9]]))
    emb.cache_populate()
    train(emb, [[4]])
    learned = all_rows(emb)
    ((ids, rows),) = emb.reset_cache()
    assert ids.tolist() == [4, 9]
    np.testing.assert_array_equal(rows, learned[[4, 9]])
    assert emb.cache_reports()[0][:3] == (0, 0, 0)
    np.testing.assert_allclose(all_rows(emb), dense_table(emb.spec, emb.cores_of()), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("give", [lambda emb: emb.reset_parameters(rngs=nnx.Rngs(9)), lambda emb: emb.set_cores(OTHER)])
def test_new_cores_are_not_hidden_by_old_rows_nor_stepped_with_old_state(give):
    emb = make(optimizer="adam")
    emb.update_cache(six_bags([[4, 9]]))
    emb.cache_populate()
    train(emb, [[4], [20]])
    give(emb)
    np.testing.assert_allclose(all_rows(emb), dense_table(emb.spec, emb.cores_of()), rtol=1e-4, atol=1e-7)
    fresh = make(optimizer="adam")
    fresh.set_cores(emb.cores_of())
    for module in (emb, fresh):
        step(module, six_bags([[4], [20]]), np.ones((6, 4), np.float32))
    np.testing.assert_array_equal(all_rows(emb), all_rows(fresh))


def test_cores_of_the_fused_update_change_by_set_cores_alone():
    emb = make()
    with pytest.raises(ValueError, match=r"cached rows beside them.*use module\.set_cores"):
        emb.tt_cores[0].set_value(OTHER[0])
    with pytest.raises(ValueError, match="core 1 for table 0 has a number that is not finite"):
        emb.set_cores([OTHER[0], np.full_like(OTHER[1], np.nan)])


@pytest.mark.parametrize(("sparse", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_a_saved_module_goes_on_as_if_never_saved(sparse, dtype, tmp_path):
    options = {"sparse": sparse, "dtype": dtype, "optimizer": "adam", "populate_every": 5, "halve_counts_every": 1}
    emb, other = make(**options), make(rngs=7, **options)

    def go_on(module, k):
        module.update_cache(six_bags([[k + i % 3 for i in range(k)]]))
        module.cache_populate()
        output, backward = module.vjp(six_bags([[k], [k + 1], [5]]))
        backward(output)

    for k in (4, 16, 28):
        go_on(emb, k)
    np.savez(tmp_path / "module.npz", **emb.state_dict())
    with np.load(tmp_path / "module.npz") as state:
        other.load_state_dict(state)
    for module in (emb, other):
        module.eval()
    np.testing.assert_array_equal(all_rows(other), all_rows(emb))
    for module in (emb, other):
        module.train()
        go_on(module, 32)
    one, two = emb.state_dict(), other.state_dict()
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(two[name], value, err_msg=name)
    assert other.cache_reports() == emb.cache_reports()


def three_tables(**options):
    """Tables of 50, 60 and 40 rows, the first and last of which are a group."""
    options = {"use_cache": True, "learning_rate": 0.3, **options}
    return nnx.jit(lambda: TableBatchedTTEmbeddingBag(3, SIZES, 4, [[2], [3], [2]], None, [2, 2], **options))()


def test_tables_of_a_batch_share_a_cache_without_mixing_rows():
    emb = three_tables(cache_size=2, hashtbl_size=64)
    assert emb.groups == ((0, 2), (1,))
    emb.update_cache(six_bags([[3, 3, 3], [], [5, 5, 5], [], [3, 3, 8]]))
    emb.cache_populate()
    assert [cache.learned()[0].tolist() for cache in emb.caches] == [[3, 53], [5]]  # row 3 of the third table is 53
    ids = (3, 5, 3)
    bags = six_bags([[3], [], [5], [], [3]])
    before, _ = step(emb, bags, np.zeros((3, 2, 4), np.float32))
    before, cores = np.asarray(before)[:, 0], [np.asarray(core) for core in emb.cores_of()]
    for spec, own, id, row in zip(emb.specs, cores_of_tables(emb), ids, before, strict=True):
        np.testing.assert_allclose(row, dense_table(spec, own)[id], rtol=1e-5, atol=1e-7)
    step(emb, bags, np.ones((3, 2, 4), np.float32))
    assert all((a == np.asarray(b)).all() for a, b in zip(cores, emb.cores_of(), strict=True))
    np.testing.assert_allclose(looked_up(emb, bags)[:, 0], before - 0.3, rtol=1e-5)
    emb.update_cache(bags)
    emb.cache_populate()
    np.testing.assert_allclose([np.asarray(emb.full_weight(k))[i] for k, i in enumerate(ids)], before - 0.3, rtol=1e-5)


def test_new_cores_of_a_table_leave_the_learned_rows_of_the_others():
    emb = three_tables(cache_size=4, optimizer="exact_adagrad")
    emb.update_cache(six_bags([[3], [], [5], [], [3, 8], []]))
    emb.cache_populate()
    bags = six_bags([[3, 1], [], [5], [], [3], []])
    step(emb, bags, np.ones((3, 2, 4), np.float32))
    before = np.asarray(emb.full_weight(0))
    emb.set_cores([jnp.ones_like(core) for core in emb.cores_of(2)], table=2)
    assert [cache.learned()[0].tolist() for cache in emb.caches] == [[3], [5]]
    np.testing.assert_array_equal(emb.full_weight(0), before)
    np.testing.assert_allclose(emb.full_weight(2), dense_table(emb.specs[2], emb.cores_of(2)), rtol=1e-6)


def test_ragged_bags_of_groups_between_each_other_step_the_cached_rows_of_their_own_tables():
    rate = 0.3
    emb = three_tables(mode="mean", cache_size=99, learning_rate=rate)
    emb.update_cache(np.concatenate([np.arange(rows) for rows in SIZES]), np.asarray([0, *np.cumsum(SIZES)]))
    emb.cache_populate()  # all rows are cached
    tables = [np.asarray(emb.full_weight(k), np.float64) for k in range(3)]
    generator = np.random.default_rng(0)
    lengths = np.asarray([0, 3, 2, 1, 0, 4, 5, 2, 0])  # three bags a table
    ids = generator.integers(0, np.repeat(np.repeat(SIZES, 3), lengths))
    weights, d_output = generator.normal(size=ids.size).astype(np.float32), generator.normal(size=(3, 3, 4))
    bags = Bags(ids, np.asarray([0, *np.cumsum(lengths)]), weights)
    output, _ = step(emb, bags, d_output.astype(np.float32))
    wanted, stepped, bag_of = np.zeros((3, 3, 4)), [table.copy() for table in tables], np.repeat(np.arange(9), lengths)
    for i, weight, bag in zip(ids, weights, bag_of, strict=True):
        k, b, gain = bag // 3, bag % 3, weight / lengths[bag]
        wanted[k, b] += gain * tables[k][i]
        stepped[k][i] -= rate * gain * d_output[k, b]
    np.testing.assert_allclose(output, wanted, rtol=1e-5, atol=1e-7)
    for k in range(3):
        np.testing.assert_allclose(emb.full_weight(k), stepped[k], rtol=1e-5, atol=1e-6)


def test_the_cache_holds_the_most_read_ids_of_equals_the_lower():
    emb = make(cache_size=50, hashtbl_size=512)
    generator = np.random.default_rng(0)
    ids = generator.permutation(np.repeat(np.arange(200), generator.integers(1, 9, 200)))
    emb.update_cache(ids[:, None])
    emb.cache_populate()
    reads = np.bincount(ids).tolist()
    most_read = sorted(range(200), key=lambda i: (-reads[i], i))[:50]
    assert emb.caches[0].learned()[0].tolist() == sorted(most_read)


def test_memory_of_the_default_cache_is_a_hundredth_of_dense():
    emb = TTEmbeddingBag(11_000_000, 64, [32, 32], [200, 220, 250], [4, 4, 4])
    (rows,) = [cache.rows.get_value() for cache in emb.caches]
    total = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(nnx.state(emb)))
    spill_before_a_word = SPILLED_ROWS_TO_LOG * rows.size * 4
    assert total + spill_before_a_word <= 11_000_000 * 64 * 4 / 100
    assert rows.shape == (11_000, 64)


def test_a_count_table_that_is_small_is_told():
    with pytest.warns(UserWarning, match="below six times"):
        make(hashtbl_size=8)
    make(hashtbl_size=0, cache_size=0)


def test_a_lookup_from_before_a_populate_steps_nothing():
    emb = make()
    output, backward = emb.vjp(six_bags([[4]]))
    emb.cache_populate()
    with pytest.raises(RuntimeError, match="populated or reset after this lookup"):
        backward(output)


def test_flat_ids_are_counted_without_offsets_as_published():
    emb = TTEmbeddingBag(60, 4, [2], cache_size=2, hashtbl_size=32)
    for ids in (np.array([7, 7, 9]), jnp.array([9, 7]), [9, 3, 9]):
        emb.update_cache(ids)
    emb.cache_populate()
    np.testing.assert_array_equal(emb.reset_cache()[0][0], [7, 9])
    with pytest.raises(ValueError, match="need offsets"):  # nobody says whose rows these are
        TableBatchedTTEmbeddingBag(2, 60, 4, [2], use_cache=True).update_cache([7, 9])

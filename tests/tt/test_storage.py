"""Tensor trains as storage of a collection's tables, compared with expanded tables."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed import checkpoint
from rsembed.tt import TensorTrain, full_weight
from tests.parallel.hlo import collective_bytes
from tests.world import assert_close, assert_same, made_mesh, mesh_of

ROWS, DIM = 60, 6
STORAGE = TensorTrain((3, 4), (3, 4, 5), (1, 2, 3))


def collection_of(devices=None, *, axis=None, **options):
    """A collection with one table, a feature with weights and a feature without.

    Without `devices`, there is no mesh. Axis "y" of a mesh has two devices.
    """
    table = rs.TableSpec("t", ROWS, DIM, **{"storage": STORAGE, **options})
    features = [rs.FeatureSpec(name, table) for name in ("weighted", "plain")]
    if devices is None:
        return rs.EmbeddingCollection(features)
    return rs.EmbeddingCollection(features, mesh=mesh_of(devices // 2, 2), sharding_axis=axis)


def trained(collection):
    """Cores and slots after two steps. One device of four has no ids."""
    state, rng = collection.init(jax.random.key(0)), np.random.default_rng(0)
    for _ in range(2):
        ids = rng.integers(-1, ROWS, (16, 3))
        ids[4:8] = -1
        weights, gradient = rng.random((16, 3), np.float32), rng.normal(size=(16, DIM))
        batch = collection.prepare({"plain": ids, "weighted": (ids[::-1], weights)})
        state = jax.jit(collection.update)(
            state, batch, dict.fromkeys(batch, jnp.float32(gradient))
        )
    return state.tables["t"], state.slots["t"]


def test_devices_that_sum_their_gradients_step_as_one_device_and_keep_equal_copies():
    """The mesh has two axes, and cores are rounded. tests/storage tests all rules and combiners."""
    options = {"optimizer": rs.optimizers.Adam(0.05), "combiner": "mean", "dtype": "bfloat16"}
    many, one = trained(collection_of(4, axis="x", **options)), trained(collection_of(**options))
    assert {core.dtype.name for core in (*many[0], *one[0])} == {"bfloat16"}
    for actual, expected in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
        assert_allclose(np.float32(actual), np.float32(expected), rtol=2**-7, atol=1e-6)
        for shard in actual.addressable_shards:
            assert_array_equal(shard.data, actual.addressable_data(0))


def test_only_gradients_of_cores_travel_and_cores_are_stepped_in_place():
    collection = collection_of(4, optimizer=rs.optimizers.Adagrad(0.1))
    ids = jnp.zeros((64, 3), jnp.int32)
    batch = {"plain": ids, "weighted": (ids, jnp.ones((64, 3)))}
    d_activations = {name: jnp.ones((64, DIM)) for name in batch}
    state = jax.eval_shape(collection.init, jax.random.key(0))
    step = jax.jit(collection.update, donate_argnums=0)
    compiled = step.lower(state, batch, d_activations).compile()
    core_bytes = STORAGE.spec_of(collection.table_specs["t"]).num_params * 4
    assert collective_bytes(compiled.as_text(), 4) == {"all-reduce": 2 * 3 / 4 * core_bytes}
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * core_bytes


def test_the_plan_counts_the_bytes_of_the_cores():
    collection = collection_of(optimizer=rs.optimizers.Adam(0.1))
    stack, _ = collection.plan.table("t")
    spec = STORAGE.spec_of(collection.table_specs["t"])
    assert stack.table_bytes == spec.num_params * 4
    assert stack.slot_bytes == spec.num_params * 8


def resident_bytes(what):
    (line,) = re.findall(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(line)


@pytest.mark.slow
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads the peak of resident memory from /proc"
)
@pytest.mark.parametrize("num_devices", [None, 2])
def test_a_whole_table_is_made_of_its_cores_in_place(num_devices):
    table = rs.TableSpec("t", 500_000, 64, storage=TensorTrain((4,)))
    feature, placement = rs.FeatureSpec("f", table), num_devices and "replicated"
    collection = rs.EmbeddingCollection(feature, mesh=made_mesh(num_devices), placement=placement)
    state = collection.init(jax.random.key(0))
    expected = full_weight(table.storage.spec_of(table), jax.device_get(state.tables["t"]))
    assert_allclose(collection.tables(state)["t"], expected, rtol=1e-5, atol=1e-6)
    # This resets the peak of resident memory.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    whole = jax.block_until_ready(collection.tables(state)["t"])
    assert resident_bytes("VmHWM") - before < 1.5 * whole.nbytes * (num_devices or 1)


def test_an_initializer_without_effect_is_told(caplog):
    collection_of()
    assert not caplog.text
    collection_of(initializer=jax.nn.initializers.ones)
    assert (
        "table 't': its initializer has no effect: TensorTrain draws cores by weight_dist='normal'"
        in caplog.text
    )


def test_cores_of_a_state_dictionary_are_read_in_their_order():
    storage = TensorTrain([2] * 11, [2] * 12, [2, *[1] * 11])
    collection = rs.EmbeddingCollection(
        rs.FeatureSpec("f", rs.TableSpec("t", 2**12, 2, storage=storage))
    )
    state = collection.init(jax.random.key(0))
    cores = {f"weight.{k}": core for k, core in enumerate(state.tables["t"])}
    other = collection.init(jax.random.key(1))
    loaded = collection.with_tables(other, {"t": dict(sorted(cores.items()))})
    assert_same(loaded.tables["t"], state.tables["t"])


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [None, 2])
def test_like_trains_share_a_storage_and_each_is_as_in_a_collection_of_its_own(
    num_devices, tmp_path
):
    storage = TensorTrain((3, 4), None, (1, 2, 3))
    options = {"embedding_dim": DIM, "optimizer": rs.optimizers.Adagrad(0.1), "storage": storage}
    features = [
        rs.FeatureSpec(combiner, rs.TableSpec(f"t{k}", ROWS + 7 * k, combiner=combiner, **options))
        for k, combiner in enumerate(("sum", "mean", "sqrtn"))
    ]
    collection = rs.EmbeddingCollection(features, mesh=made_mesh(num_devices))
    assert [stack.name for stack in collection.plan.stacks] == ["t0_t1_t2"]
    rng, batch, d_activations = np.random.default_rng(0), {}, {}
    for name in collection.features:
        batch[name] = rng.integers(-1, ROWS, (4, 3)), rng.random((4, 3), np.float32)
        d_activations[name] = rng.normal(size=(4, DIM)).astype(np.float32)
    state = collection.init(jax.random.key(0))
    actual, after = collection.lookup(state, batch), collection.update(state, batch, d_activations)
    for name, feature in collection.features.items():
        feature_batch, table = {name: batch[name]}, feature.table_spec.name
        alone = rs.EmbeddingCollection([feature])
        fresh = alone.init(jax.random.key(0))
        assert_allclose(
            actual[name], alone.lookup(fresh, feature_batch)[name], rtol=1e-5, atol=1e-7
        )
        stepped = alone.update(fresh, feature_batch, {name: d_activations[name]})
        of_all = collection.tables(after)[table], collection.slots(after)[table]
        of_one = alone.tables(stepped)[table], alone.slots(stepped)[table]
        assert_close(of_all, of_one, rtol=1e-5, atol=1e-7)
        moved = collection.with_tables(state, {table: stepped.tables[table]})
        assert_array_equal(collection.tables(moved)[table], of_one[0])
    checkpoint.save_collection(tmp_path / "all", collection, after)
    loaded = checkpoint.load_collection(tmp_path / "all", collection)
    assert_same((loaded.tables, loaded.slots), (after.tables, after.slots))


def test_hot_rows_of_a_core_table_are_counted_chosen_and_trained_inside_jit():
    """Cached rows are trained by themselves, also on a mesh. All other rows come from the cores."""
    storage = TensorTrain((3, 4), (3, 4, 5), (1, 2, 3), cache_rows=4, populate_every=2)
    options = {"optimizer": rs.optimizers.SGD(0.5), "combiner": "sum", "storage": storage}
    ids = np.array([[7, 7], [7, 3], [9, 3], [7, 50]], np.int32)
    reads = 2 * np.bincount(ids.ravel(), minlength=ROWS)
    results = []
    for devices in (None, 2):
        collection = collection_of(devices, **options)
        state, step = collection.init(jax.random.key(0)), jax.jit(collection.update)
        batch = collection.prepare({"plain": ids, "weighted": ids})
        ones = {name: jnp.ones((4, DIM)) for name in batch}
        for _ in range(2):
            state = step(state, batch, ones)
        before, cores = np.asarray(collection.tables(state)["t"]), state.tables["t"].cores
        state = step(state, batch, ones)
        after = np.asarray(collection.tables(state)["t"])
        assert_allclose(after, before - 0.5 * reads[:, None], rtol=1e-5)
        # All ids of the batch are cached, so no core changes.
        assert_same(state.tables["t"].cores, cores)
        counts = {name: counter.sum() for name, counter in collection.counts(state)["t"].items()}
        expected = {"cached_ids": 4, "residual": 0, "lookups": 3 * 16, "hits": 16}
        assert counts == expected | {"uncounted": 0, "evictions": 0}
        results.append(after)
    assert_allclose(*results, rtol=1e-5, atol=1e-6)

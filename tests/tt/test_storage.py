"""Tensor trains as the storage of core tables, against a dense table that is expanded after every step."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed import checkpoint
from rsembed.tt import TensorTrain, TTSpec, full_weight
from tests.parallel.hlo import collective_bytes
from tests.world import assert_same, made_mesh

ROWS, DIM = 60, 6
STORAGE = TensorTrain((3, 4), (3, 4, 5), (1, 2, 3))
RNG = np.random.default_rng(0)


def collection_of(*, optimizer=None, combiner="mean", storage=STORAGE, **fields):
    optimizer = rs.optimizers.Adam(0.05) if optimizer is None else optimizer
    size = {"vocabulary_size": ROWS, "embedding_dim": DIM}
    table = rs.TableSpec(
        "t", **size, optimizer=optimizer, combiner=combiner, storage=storage, **fields
    )
    dense = rs.TableSpec("d", 7, DIM, optimizer=optimizer)
    features = [
        rs.FeatureSpec("one", table),
        rs.FeatureSpec("two", table),
        rs.FeatureSpec("dense", dense),
    ]
    return rs.EmbeddingCollection(features)


def split_collection(devices=4, *, axis=None, **options):
    """A table read by a weighted feature and a plain one, on a mesh whose axis `y` has two devices, or on no mesh."""
    table = rs.TableSpec("t", ROWS, DIM, **{"storage": STORAGE, **options})
    features = [rs.FeatureSpec(name, table) for name in ("weighted", "plain")]
    if devices is None:
        return rs.EmbeddingCollection(features)
    mesh = Mesh(np.asarray(jax.devices()[:devices]).reshape(-1, min(devices, 2)), ("x", "y"))
    return rs.EmbeddingCollection(features, mesh=mesh, sharding_axis=axis)


def trained(collection):
    """Cores and slots after two steps by `update`, and after the second by `apply`. One device of four has no ids."""
    state, steps = collection.init(jax.random.key(0)), jax.jit(collection.update)
    for number in range(2):
        rng = np.random.default_rng(number)
        plain, weighted = (rng.integers(-1, ROWS, (16, width)).astype(np.int32) for width in (3, 1))
        plain[4:8], weighted[4:8] = -1, -1
        batch = collection.prepare(
            {"plain": plain, "weighted": (weighted, rng.random((16, 1), np.float32))}
        )
        d_activations = {name: rng.normal(size=(16, DIM)).astype(np.float32) for name in batch}
        before, state = state, steps(state, batch, d_activations)
    pulled = jax.jit(lambda state: collection.lookup_vjp(state, batch)[1](d_activations))(before)
    applied = jax.jit(collection.apply)(before, pulled)
    return [(after.tables["t"], after.slots["t"]) for after in (state, applied)]


@pytest.mark.slow_rows("x-float32")
@pytest.mark.parametrize(("axis", "dtype"), [("x", "float32"), (None, "bfloat16")])
def test_devices_that_sum_their_gradients_step_as_one_device_and_keep_equal_copies(axis, dtype):
    """On some axes of a mesh, and of cores that are rounded; the contract of storages has all rules and combiners."""
    options = {"optimizer": rs.optimizers.Adam(0.05), "combiner": "mean", "dtype": dtype}
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-6} if dtype == "float32" else {"rtol": 2**-7, "atol": 1e-6}
    )
    many, one = (
        trained(split_collection(axis=axis, **options)),
        trained(split_collection(None, **options)),
    )
    assert {core.dtype.name for cores, _ in (*many, *one) for core in cores} == {dtype}
    for found, expected in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
        assert_allclose(np.float32(found), np.float32(expected), **tolerance)
        for shard in found.addressable_shards:
            assert_array_equal(shard.data, found.addressable_data(0))


def test_only_gradients_of_cores_travel_and_cores_are_stepped_in_place():
    collection = split_collection(optimizer=rs.optimizers.Adagrad(0.1))
    batch = {
        "plain": jnp.zeros((64, 3), jnp.int32),
        "weighted": (jnp.zeros((64, 1), jnp.int32), jnp.ones((64, 1))),
    }
    d_activations = {name: jnp.ones((64, DIM)) for name in batch}
    state = jax.eval_shape(collection.init, jax.random.key(0))
    compiled = (
        jax.jit(collection.update, donate_argnums=0).lower(state, batch, d_activations).compile()
    )
    core_bytes = STORAGE.spec_of(collection.table_specs["t"]).num_params * 4
    assert collective_bytes(compiled.as_text(), 4) == {"all-reduce": 2 * 3 / 4 * core_bytes}
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * core_bytes


def test_the_plan_counts_the_bytes_of_the_cores():
    collection = collection_of(optimizer=rs.optimizers.Adam(0.1))
    stack, _ = collection.plan.table("t")
    spec = STORAGE.spec_of(collection.table_specs["t"])
    assert stack.table_bytes == spec.num_params * 4
    assert stack.slot_bytes == spec.num_params * 8
    budget = TensorTrain(bytes=2_000)
    table = rs.TableSpec("t", 1_000, 8, storage=budget)
    assert isinstance(budget.spec_of(table), TTSpec)
    assert budget.spec_of(table).num_params * 4 <= 2_000


def resident_bytes(what):
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)
    )
    return 1024 * int(line.split()[1])


@pytest.mark.slow
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads the peak of resident memory from /proc"
)
@pytest.mark.parametrize("num_devices", [None, 2])
def test_a_whole_table_is_made_of_its_cores_in_place(num_devices):
    mesh = made_mesh(num_devices)
    table = rs.TableSpec("t", 500_000, 64, storage=TensorTrain((4,)))
    placement = None if mesh is None else "replicated"
    collection = rs.EmbeddingCollection(rs.FeatureSpec("f", table), mesh=mesh, placement=placement)
    state = collection.init(jax.random.key(0))
    expected = full_weight(table.storage.spec_of(table), jax.device_get(state.tables["t"]))
    assert_allclose(collection.tables(state)["t"], expected, rtol=1e-5, atol=1e-6)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
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
    table = rs.TableSpec(
        "t",
        2**12,
        2,
        storage=TensorTrain([2] * 11, [2] * 12, [2, *[1] * 11]),
    )
    collection = rs.EmbeddingCollection(rs.FeatureSpec("f", table))
    state = collection.init(jax.random.key(0))
    cores = {f"weight.{k}": core for k, core in enumerate(state.tables["t"])}
    loaded = collection.with_tables(
        collection.init(jax.random.key(1)), {"t": dict(sorted(cores.items()))}
    )
    assert_same(loaded.tables["t"], state.tables["t"])


def test_stacked_layouts_refuse_trains():
    collection = collection_of()
    with pytest.raises(NotImplementedError, match="use EmbeddingCollection"):
        rs.plan_stacking(list(collection.features.values()), num_shards=4)


def like_tables(num_tables=3):
    sizes = [ROWS + 7 * k for k in range(num_tables)]
    return [
        rs.TableSpec(
            f"t{k}",
            size,
            DIM,
            optimizer=rs.optimizers.Adagrad(0.1),
            storage=TensorTrain((3, 4), None, (1, 2, 3)),
            combiner=combiner,
        )
        for k, (size, combiner) in enumerate(zip(sizes, ("sum", "mean", "sqrtn"), strict=False))
    ]


@pytest.mark.slow_rows("None")
@pytest.mark.parametrize("num_devices", [None, 2])
def test_like_trains_share_a_storage_and_each_is_as_in_a_collection_of_its_own(
    num_devices, tmp_path
):
    mesh = made_mesh(num_devices)
    features = [rs.FeatureSpec(f"f{k}", table) for k, table in enumerate(like_tables())]
    collection = rs.EmbeddingCollection(features, mesh=mesh)
    assert [stack.name for stack in collection.plan.stacks] == ["t0_t1_t2"]
    batch = {
        f.name: (RNG.integers(-1, ROWS, (4, 3)), RNG.random((4, 3), np.float32)) for f in features
    }
    d_activations = {f.name: RNG.normal(size=(4, DIM)).astype(np.float32) for f in features}
    state = collection.init(jax.random.key(0))
    found, after = collection.lookup(state, batch), collection.update(state, batch, d_activations)
    for feature in features:
        own = {feature.name: batch[feature.name]}
        alone = rs.EmbeddingCollection([feature])
        fresh, name = alone.init(jax.random.key(0)), feature.table_spec.name
        assert_allclose(
            found[feature.name], alone.lookup(fresh, own)[feature.name], rtol=1e-5, atol=1e-7
        )
        stepped = alone.update(fresh, own, {feature.name: d_activations[feature.name]})
        for read in ("tables", "slots"):
            of_all, of_one = (
                getattr(kept, read)(s)[name] for kept, s in ((collection, after), (alone, stepped))
            )
            jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-5, atol=1e-7), of_all, of_one)
        checkpoint.save_collection(tmp_path / name, alone, stepped)
        moved = collection.with_tables(state, {name: stepped.tables[name]})
        assert_array_equal(collection.tables(moved)[name], alone.tables(stepped)[name])
    checkpoint.save_collection(tmp_path / "all", collection, after)
    loaded = checkpoint.load_collection(tmp_path / "all", collection)
    for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(after), strict=True):
        assert (
            one is other
            or jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key)
            or (one == other).all()
        )


def test_hot_rows_of_a_core_table_are_counted_chosen_and_trained_inside_jit(tmp_path):
    """The table is the train's, but for the rows that are stored; those are stepped by themselves, on any mesh."""
    storage = TensorTrain((3, 4), (3, 4, 5), (1, 2, 3), cache_rows=4, populate_every=2)
    ids = np.array([[7, 7], [7, 3], [9, 3], [7, 50]], np.int32)
    results = []
    for devices in (None, 2):
        collection = split_collection(
            devices, optimizer=rs.optimizers.SGD(0.5), combiner="sum", storage=storage
        )
        state, step = collection.init(jax.random.key(0)), jax.jit(collection.update)
        batch = collection.prepare({"plain": ids, "weighted": ids[:, :1]})
        ones = {name: jnp.ones((4, DIM)) for name in batch}
        for _ in range(2):
            state = step(state, batch, ones)
        before, cores = np.asarray(collection.tables(state)["t"]), state.tables["t"].cores
        state = step(state, batch, ones)
        after = np.asarray(collection.tables(state)["t"])
        reads = np.bincount(np.r_[ids.ravel(), ids[:, 0]], minlength=ROWS)
        assert_allclose(
            after[[3, 7, 9, 50]],
            before[[3, 7, 9, 50]] - 0.5 * reads[[3, 7, 9, 50], None],
            rtol=1e-5,
        )
        # All that was read is stored.
        assert_same(state.tables["t"].cores, cores)
        counts = collection.counts(state)["t"]
        expected = {
            "cached_ids": 4,
            "residual": 0,
            "lookups": 36,
            "hits": 12,
            "uncounted": 0,
            "evictions": 0,
        }
        assert {name: int(own.sum()) for name, own in counts.items()} == expected
        results.append(after)
        checkpoint.save_collection(tmp_path / str(devices), collection, state)
        loaded = checkpoint.load_collection(tmp_path / str(devices), collection)
        assert_array_equal(collection.tables(loaded)["t"], after)
    assert_allclose(*results, rtol=1e-5, atol=1e-6)


def test_data_parallel_lookup_and_update_equal_those_of_one_device():
    collection = collection_of(optimizer=rs.optimizers.SGD(0.5))
    state = collection.init(jax.random.key(4))
    ids = np.random.default_rng(0).integers(0, ROWS, (32, 2))
    d_activations = {name: jnp.ones((32, DIM)) for name in collection.features}

    def step(state, ids):
        batch = {"one": ids, "two": ids[::-1], "dense": ids % 7}
        return collection.lookup(state, batch)["one"], collection.update(
            state, batch, d_activations
        ).tables["t"]

    expected = jax.jit(step)(state, jnp.asarray(ids))
    mesh = Mesh(np.asarray(jax.devices()), ("data",))
    replicated = jax.device_put(state, NamedSharding(mesh, P()))
    found = jax.jit(step)(
        replicated, jax.device_put(ids.astype(np.int32), NamedSharding(mesh, P("data")))
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)

"""Tensor trains as the storage of core tables, against a dense table that is expanded after every step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import rsembed as rs
from rsembed.tt import TensorTrain, TTSpec, full_weight

ROWS, DIM = 60, 6
STORAGE = TensorTrain((3, 4), (3, 4, 5), (1, 2, 3))


def collection_of(*, optimizer=None, combiner="mean", storage=STORAGE, **fields):
    optimizer = rs.AdamOptimizerSpec(0.05) if optimizer is None else optimizer
    size = {"vocabulary_size": ROWS, "embedding_dim": DIM}
    table = rs.TableSpec(name="t", **size, optimizer=optimizer, combiner=combiner, storage=storage, **fields)
    dense = rs.TableSpec(name="d", vocabulary_size=7, embedding_dim=DIM, optimizer=optimizer)
    features = [
        rs.FeatureSpec(name="one", table_spec=table),
        rs.FeatureSpec(name="two", table_spec=table),
        rs.FeatureSpec(name="dense", table_spec=dense),
    ]
    return rs.EmbeddingCollection(features)


BATCH = {"one": [[1, 59, 1], [], [7]], "two": [[0], [59, 3], [2]], "dense": [[1], [2], [6, 6]]}


def test_lookup_equals_that_of_the_expanded_table():
    collection = collection_of()
    state = collection.init(jax.random.key(0))
    table = np.asarray(full_weight(STORAGE.spec_of(collection.table_specs["t"]), state.tables["t"]))
    np.testing.assert_allclose(collection.tables(state)["t"], table, rtol=1e-6, atol=1e-7)
    found = collection.lookup(state, BATCH)
    for name in ("one", "two"):
        expected = [table[ids].mean(0) if ids else np.zeros(DIM) for ids in BATCH[name]]
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", [rs.SGDOptimizerSpec(0.3), rs.from_optax(optax.adam(0.01))], ids=["sgd", "optax"])
def test_update_steps_the_cores_with_the_gradient_through_the_whole_table(optimizer):
    collection = collection_of(optimizer=optimizer, combiner="sum")
    state = collection.init(jax.random.key(1))
    spec = STORAGE.spec_of(collection.table_specs["t"])
    d_activations = {name: jnp.arange(18.0).reshape(3, DIM) * 0.1 - 0.5 for name in BATCH}

    def objective(cores):
        table = full_weight(spec, cores)
        total = 0.0
        for name in ("one", "two"):
            for ids, d_row in zip(BATCH[name], d_activations[name], strict=True):
                total += sum(table[i] @ d_row for i in ids)
        return total

    gradients = jax.grad(objective)(state.tables["t"])
    hyper = optimizer.get_hyperparameters(state.step)
    expected = [
        optimizer.step_rows(core, slots, gradient, hyper)[0]
        for core, slots, gradient in zip(state.tables["t"], state.slots["t"], gradients, strict=True)
    ]
    updated = collection.update(state, BATCH, d_activations)
    applied = collection.apply(state, collection.lookup_vjp(state, BATCH)[1](d_activations))
    for one, two, core in zip(updated.tables["t"], applied.tables["t"], expected, strict=True):
        np.testing.assert_allclose(one, core, rtol=2e-5, atol=2e-6)
        np.testing.assert_array_equal(one, two)


def test_a_jitted_scan_of_steps_learns_a_table():
    collection = collection_of(optimizer=rs.AdamOptimizerSpec(0.02))
    state = collection.init(jax.random.key(2))
    target = jax.random.normal(jax.random.key(3), (ROWS, DIM)) * 0.05
    batch = collection.prepare(
        {"one": np.arange(ROWS)[:, None], "two": np.arange(ROWS)[:, None], "dense": [[0]] * ROWS}
    )

    def loss_fn(params, activations):
        return jnp.mean((activations["one"] + params - target) ** 2)

    def step(state, _):
        loss, (_, row_gradients) = rs.value_and_grad(loss_fn, collection, has_aux=False)(jnp.zeros(()), state, batch)
        return collection.apply(state, row_gradients), loss

    _, losses = jax.jit(lambda s: jax.lax.scan(step, s, None, length=200))(state)
    assert losses[-1] < 0.7 * losses[0]


def test_data_parallel_lookup_and_update_equal_those_of_one_device():
    collection = collection_of(optimizer=rs.SGDOptimizerSpec(0.5))
    state = collection.init(jax.random.key(4))
    ids = np.random.default_rng(0).integers(0, ROWS, (32, 2))
    d_activations = {name: jnp.ones((32, DIM)) for name in BATCH}

    def step(state, ids):
        batch = {"one": ids, "two": ids[::-1], "dense": ids % 7}
        return collection.lookup(state, batch)["one"], collection.update(state, batch, d_activations).tables["t"]

    expected = jax.jit(step)(state, jnp.asarray(ids))
    mesh = Mesh(np.asarray(jax.devices()), ("data",))
    replicated = jax.device_put(state, NamedSharding(mesh, P()))
    found = jax.jit(step)(replicated, jax.device_put(ids.astype(np.int32), NamedSharding(mesh, P("data"))))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_the_plan_counts_the_bytes_of_the_cores():
    collection = collection_of(optimizer=rs.AdamOptimizerSpec(0.1))
    stack, _ = collection.plan.table("t")
    spec = STORAGE.spec_of(collection.table_specs["t"])
    assert stack.table_bytes == spec.num_params * 4
    assert stack.slot_bytes == spec.num_params * 8
    budget = TensorTrain(bytes=2_000)
    table = rs.TableSpec(name="t", vocabulary_size=1_000, embedding_dim=8, storage=budget)
    assert isinstance(budget.spec_of(table), TTSpec)
    assert budget.spec_of(table).num_params * 4 <= 2_000


def test_bfloat16_cores_stay_bfloat16():
    collection = collection_of(dtype="bfloat16")
    state = collection.init(jax.random.key(0))
    state = collection.update(state, BATCH, {name: jnp.ones((3, DIM)) for name in BATCH})
    assert {core.dtype for core in state.tables["t"]} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: TensorTrain(), "either tt_ranks or bytes"),
        (lambda: TensorTrain((2,), bytes=9), "either tt_ranks or bytes"),
        (lambda: TensorTrain(bytes=900, tt_p_shapes=(2, 3)), "leave tt_p_shapes"),
        (lambda: TensorTrain((2,), weight_dist="flat"), "unknown weight_dist 'flat'"),
        (lambda: collection_of(dtype="float16"), "float32 or bfloat16 cores"),
        (lambda: collection_of(storage=TensorTrain((2,), (2, 3), (2, 3))), "fewer than num_embeddings"),
    ],
)
def test_impossible_trains_are_refused(make, reason):
    with pytest.raises(ValueError, match=reason):
        make()


def test_stacked_layouts_refuse_trains():
    collection = collection_of()
    with pytest.raises(NotImplementedError, match="use EmbeddingCollection"):
        rs.plan_stacking(list(collection.features.values()), num_shards=4)

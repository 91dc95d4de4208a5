"""Arithmetic on whole states: right, or refused, since the same key has different rows in two states."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed import checkpoint, sok
from tests.world import mesh_of

STORAGES = {
    "keys": rs.Hashed(when_full="evict"),
    "admitting": rs.Hashed(admission_count=1),
    "near": None,
}
STORAGES["near"] = rs.HostCached(cache_rows=8)
DIM = 4


def collection_of(storage, *, num_tables=1, num_devices=1):
    features = []
    for number in range(num_tables):
        table = rs.TableSpec(
            f"t{number}",
            8 * num_devices,
            DIM,
            optimizer=rs.optimizers.SGD(0.5),
            storage=storage,
        )
        features.append(rs.FeatureSpec(f"f{number}", table))
    return rs.EmbeddingCollection(features, mesh=mesh_of(num_devices) if num_devices > 1 else None)


def trained(collection, *batches, state=None):
    state = collection.init(jax.random.key(0)) if state is None else state
    for keys in batches:
        batch = collection.prepare(dict.fromkeys(collection.features, np.asarray(keys)))
        activations, pullback = collection.lookup_vjp(state, batch)
        state = collection.apply(state, pullback(activations))
    return state


def floats(combine, *states):
    """The states with the floats of all combined, and everything else of the first."""

    def combined(*leaves):
        return combine(*leaves) if jnp.issubdtype(leaves[0].dtype, jnp.floating) else leaves[0]

    return jax.tree.map(combined, *states)


def mean(one, other):
    return (one + other) / 2


@functools.cache
def initial_state(storage):
    return collection_of(STORAGES[storage]).init(jax.random.key(0))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    "arithmetic",
    [
        functools.partial(jax.tree.map, jnp.add),
        functools.partial(jax.tree.map, mean),
        lambda one, other: optax.incremental_update(one, other, 0.1),
        optax.tree.add,
        lambda one, _: jax.tree.map(lambda leaf: 2 * leaf, one),
        jax.jit(functools.partial(jax.tree.map, mean)),
        lambda one, other: jax.lax.scan(
            lambda sum, _: (jax.tree.map(jnp.add, sum, other), None), one, length=2
        ),
    ],
)
@pytest.mark.parametrize("of", [lambda state: state, lambda state: state.tables])
def test_arithmetic_on_all_leaves_is_refused(storage, arithmetic, of):
    state = initial_state(storage)
    with jax.numpy_dtype_promotion("standard"), pytest.raises(TypeError, match="key<"):
        arithmetic(of(state), of(state))


@pytest.mark.slow_rows("1-1")
@pytest.mark.parametrize(("num_tables", "num_devices"), [(1, 1), (2, 2)])
def test_an_average_of_the_floats_of_states_whose_keys_have_other_rows_is_refused(
    num_tables, num_devices
):
    collection = collection_of(
        rs.Hashed(when_full="evict"), num_tables=num_tables, num_devices=num_devices
    )
    one, other = (trained(collection, keys) for keys in ([2, 4, 5, 7], [4, 2, 7, 5]))
    average = floats(mean, one, other)
    batch = collection.prepare(dict.fromkeys(collection.features, np.array([2, 4, 5, 99])))
    for use in (
        lambda: collection.lookup(average, batch),
        lambda: collection.tables(average),
        lambda: collection.update(
            average, batch, {name: np.ones((4, DIM), np.float32) for name in batch}
        ),
        lambda: rs.for_serving(collection, average),
        lambda: (
            floats(lambda own, new: 0.9 * own + 0.1 * new, one, other)
            and collection.lookup(average, batch)
        ),
    ):
        with pytest.raises(
            ValueError, match=r"table 't0.*do not belong to its keys.*collection\.with_tables"
        ):
            use()
    for values in jax.jit(collection.lookup)(average, batch).values():
        assert np.isnan(values).all()  # nothing can be raised there


@pytest.mark.slow_rows("2-2")
@pytest.mark.parametrize(("num_tables", "num_devices"), [(1, 1), (2, 2)])
def test_states_whose_keys_have_the_same_rows_are_averaged_as_their_tables(num_tables, num_devices):
    collection = collection_of(
        rs.Hashed(when_full="evict"), num_tables=num_tables, num_devices=num_devices
    )
    first = trained(collection, [2, 4, 5, 7], [2, 9, 11, -1])
    second = trained(collection, [4, 7], state=first)
    average = second
    for _ in range(50):  # a moving average that has arrived stays, in spite of rounding
        average = floats(lambda own, new: 0.999 * own + 0.001 * new, average, second)
    batch = collection.prepare(dict.fromkeys(collection.features, np.array([2, 4, 5, 11])))
    for name, values in collection.lookup(average, batch).items():
        assert_allclose(values, collection.lookup(second, batch)[name], rtol=1e-4)
    average = floats(mean, first, second)
    for name, rows in collection.tables(average).items():
        wanted = mean(
            collection.tables(first)[name]["values"], collection.tables(second)[name]["values"]
        )
        assert_allclose(rows["values"], wanted, rtol=1e-6)


@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_rows_and_keys_stay_together_through_everything_that_moves_them(tmp_path, num_devices):
    """Eviction by a step and by hand, admission, writing by key, files, and a table that grows."""
    storage = rs.Hashed(when_full="evict", admission_count=1, admission_capacity=40)
    collection = collection_of(storage, num_tables=2, num_devices=num_devices)
    generator, state = np.random.default_rng(0), collection.init(jax.random.key(0))
    for _ in range(4):
        state = trained(collection, generator.integers(0, 24, 24), state=state)
    assert collection.counts(state)["t0"]["evicted"].sum()
    state, rows = collection.evict(state, "t1", keep=3)
    assert len(rows["keys"])
    state = collection.with_tables(state, {"t1": rows})
    checkpoint.save_collection(tmp_path / "saved", collection, state)
    loaded = checkpoint.load_collection(tmp_path / "saved", collection)
    last = np.arange(24)
    found = jax.tree.map(np.asarray, collection.tables(trained(collection, last, state=loaded)))
    for name, own in collection.tables(trained(collection, last, state=state)).items():
        assert_array_equal(own["values"], found[name]["values"])
    context = sok.Init(mesh=mesh_of(num_devices))
    layer = sok.All2AllDenseEmbedding(2, DIM, 1, 1, when_full="grow", context=context)
    for first in (0, 4, 8):
        out, backward = layer.vjp(np.arange(first, first + 4).reshape(-1, 1, 1))
        backward(jnp.zeros_like(out))
        assert np.asarray(out).any(axis=-1).all()
    assert layer.variable.num_rows == 12


def test_dense_tables_are_averaged():
    collection = collection_of(None)
    one, other = trained(collection, [1, 2]), trained(collection, [2, 3])
    average = one._replace(tables=jax.tree.map(mean, one.tables, other.tables))
    wanted = mean(collection.tables(one)["t0"], collection.tables(other)["t0"])
    assert_allclose(collection.tables(average)["t0"], wanted, rtol=1e-6)
    assert_allclose(collection.tables(floats(mean, one, other))["t0"], wanted, rtol=1e-6)

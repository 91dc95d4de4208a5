"""Arithmetic on whole states is correct or refused.

A key can have different rows in two states.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose

import rsembed as rs
from tests.world import mesh_of

STORAGES = {
    "keys": rs.Hashed(when_full="evict"),
    "admitting": rs.Hashed(admission_count=1),
    "near": rs.HostCached(cache_rows=8),
}
DIM = 4


def collection_of(storage, *, num_tables=1, num_devices=1):
    features = []
    for number in range(num_tables):
        table = rs.TableSpec(f"t{number}", 8 * num_devices, DIM, storage=storage,
            optimizer=rs.optimizers.SGD(0.5),
        )  # fmt: skip
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
    """The first state, but float arrays are combinations of the float arrays of all states."""

    def combined(*leaves):
        return combine(*leaves) if jnp.issubdtype(leaves[0].dtype, jnp.floating) else leaves[0]

    return jax.tree.map(combined, *states)


def mean(one, other):
    return (one + other) / 2


def tables_of(collection, *states):
    return [collection.tables(state).values() for state in states]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    "arithmetic",
    [
        functools.partial(jax.tree.map, jnp.add),
        lambda one, other: optax.incremental_update(one, other, 0.1),
    ],
)
def test_arithmetic_on_all_leaves_is_refused(storage, arithmetic):
    state = collection_of(STORAGES[storage]).init(jax.random.key(0))
    with jax.numpy_dtype_promotion("standard"):
        for tree in (state, state.tables):
            with pytest.raises(TypeError, match="key<"):
                arithmetic(tree, tree)


@pytest.mark.slow_rows("1-1")
@pytest.mark.parametrize(("num_tables", "num_devices"), [(1, 1), (2, 2)])
def test_an_average_of_the_floats_of_states_whose_keys_have_other_rows_is_refused(
    num_tables, num_devices
):
    collection = collection_of(STORAGES["keys"], num_tables=num_tables, num_devices=num_devices)
    one = trained(collection, [2, 4, 5, 7])
    other = trained(collection, [4, 2, 7, 5])
    moved = floats(lambda old, new: 0.9 * old + 0.1 * new, one, other)
    average = floats(mean, one, other)
    batch = collection.prepare(dict.fromkeys(collection.features, np.array([2, 4, 5, 99])))
    ones = dict.fromkeys(batch, np.ones((4, DIM), np.float32))
    for use in (
        lambda: collection.lookup(average, batch),
        lambda: collection.lookup(moved, batch),
        lambda: collection.tables(average),
        lambda: collection.update(average, batch, ones),
        lambda: rs.for_serving(collection, average),
    ):
        with pytest.raises(
            ValueError, match=r"table 't0.*do not belong to its keys.*collection\.with_tables"
        ):
            use()
    for values in jax.jit(collection.lookup)(average, batch).values():
        # Inside `jit`, the library cannot raise an error.
        assert np.isnan(values).all()


@pytest.mark.slow_rows("2-2")
@pytest.mark.parametrize(("num_tables", "num_devices"), [(1, 1), (2, 2)])
def test_states_whose_keys_have_the_same_rows_are_averaged_as_their_tables(num_tables, num_devices):
    collection = collection_of(STORAGES["keys"], num_tables=num_tables, num_devices=num_devices)
    first = trained(collection, [2, 4, 5, 7], [2, 9, 11, -1])
    second = trained(collection, [4, 7], state=first)
    average = second
    # A moving average that has reached its limit stays there in spite of rounding errors.
    for _ in range(50):
        average = floats(lambda old, new: 0.999 * old + 0.001 * new, average, second)
    for arrived, rows in zip(*tables_of(collection, average, second), strict=True):
        assert_allclose(arrived["values"], rows["values"], rtol=1e-4)
    middle = floats(mean, first, second)
    for actual, *rows in zip(*tables_of(collection, middle, first, second), strict=True):
        assert_allclose(actual["values"], mean(*(table["values"] for table in rows)), rtol=1e-6)


def test_dense_tables_are_averaged():
    collection = collection_of(None)
    one, other = trained(collection, [1, 2]), trained(collection, [2, 3])
    average = collection.tables(floats(mean, one, other))["t0"]
    wanted = mean(collection.tables(one)["t0"], collection.tables(other)["t0"])
    assert_allclose(average, wanted, rtol=1e-6)

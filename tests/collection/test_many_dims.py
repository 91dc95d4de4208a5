"""Tables of different dims are filled in a few loops, with the values that each has alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed.initial_values import initial_rows, table_key
from rsembed.kernels import native, reference
from tests.world import assert_same, mesh_of

KEY = jax.random.key(7)
DIMS = (1, 5, 6, 8, 12)
OPTIMIZERS = {
    "sgd": rs.optimizers.SGD(0.1),
    "adagrad": rs.optimizers.Adagrad(0.1),
    "row-wise adagrad": rs.optimizers.RowWiseAdagrad(0.1),
    "adam": rs.optimizers.Adam(0.1),
}
INITIALIZERS = {
    "as by default": lambda key, shape: jax.random.normal(key, shape) / shape[1] ** 0.5,
    "divided": lambda key, shape: jax.random.normal(key, shape) / shape[1],
    "scaled twice and shifted": lambda key, shape: (
        0.3 * jax.random.normal(key, shape) / shape[1] + 0.5
    ),
    "between bounds of the dim": lambda key, shape: jax.random.uniform(
        key, shape, minval=-1 / shape[1], maxval=1 / shape[1]
    ),
    "sixteen bits": lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16) / shape[1],
    "a number a column": lambda key, shape: (
        jax.random.normal(key, shape) * jnp.arange(1.0, shape[1] + 1)[None]
    ),
    "orthogonal": jax.nn.initializers.orthogonal(),
}

DEFAULT = INITIALIZERS["as by default"]


def collection_of(initializer, optimizer, dims=DIMS, **settings):
    features = []
    for dim in dims:
        table = rs.TableSpec(
            f"table of {dim}", 40 + dim, dim, initializer=initializer, optimizer=optimizer
        )
        features.append(rs.FeatureSpec(f"feature of {dim}", table))
    return rs.EmbeddingCollection(features, **settings)


def assert_initial(collection, state, initializer=DEFAULT, key=KEY):
    """Asserts that each table has the bits that it has alone in a collection, and initial slots."""
    tables = collection.tables(state)
    slots = collection.slots(state)
    for feature in collection.features.values():
        table = feature.table_spec
        alone = collection_of(initializer, table.optimizer, dims=[table.embedding_dim])
        (rows,) = alone.tables(alone.init(key)).values()
        assert_array_equal(tables[table.name], rows)
        for slot, wanted in zip(slots[table.name], table.optimizer.init_slots(rows), strict=True):
            assert_array_equal(slot, wanted)
        ids = jnp.arange(table.vocabulary_size)
        assert_allclose(rows, initial_rows(table_key(key, table.name), table, ids), 1e-2)


@pytest.mark.slow_rows(
    "scaled twice and shifted",
    "between bounds of the dim",
    "sixteen bits",
    "orthogonal",
    "as by default",
    "a number a column",
)
@pytest.mark.parametrize("initializer", INITIALIZERS.values(), ids=INITIALIZERS)
def test_values_do_not_depend_on_the_dims_of_other_tables(initializer):
    collection = collection_of(initializer, OPTIMIZERS["adagrad"])
    assert_initial(collection, collection.init(KEY), initializer)


@pytest.mark.slow_rows("adagrad", "row-wise adagrad")
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_slots_do_not_depend_on_the_dims_of_other_tables(optimizer):
    collection = collection_of(DEFAULT, optimizer)
    assert_initial(collection, collection.init(KEY))


@pytest.mark.slow
def test_values_of_many_dims_on_a_mesh_are_those_of_one_device():
    collection = collection_of(DEFAULT, OPTIMIZERS["row-wise adagrad"], mesh=mesh_of(4))
    assert_initial(collection, collection.init(KEY))


@pytest.mark.slow
def test_values_are_equal_inside_jit_and_with_another_kind_of_key():
    collection = collection_of(DEFAULT, OPTIMIZERS["sgd"])
    inside = jax.jit(collection.init)(KEY)
    assert_initial(collection, inside)
    for kind in ("rbg", "unsafe_rbg"):
        key = jax.random.key(7, impl=kind)
        assert_initial(collection, collection.init(key), key=key)


def test_forty_dims_take_six_loops():
    collection = collection_of(DEFAULT, OPTIMIZERS["adam"], dims=range(8, 48))
    trace = jax.make_jaxpr(collection.init)(KEY)
    # One more loop makes the keys of all tables.
    assert str(trace).count("scan[") == 6 + 1


def test_an_error_names_only_tables_that_differ():
    collection = collection_of(DEFAULT, OPTIMIZERS["adam"])
    state = collection.init(KEY)
    tables = dict(state.tables)
    (name,) = [name for name, rows in tables.items() if rows.shape[1] == 6]
    tables[name] = tables[name][:-1]
    with pytest.raises(
        ValueError, match=r"tables are \{.*\[45, 6\].*\}, expected \{.*\[46, 6\].*\};"
    ) as error:
        collection.lookup(state._replace(tables=tables), {"feature of 6": [[1]]})
    assert "12]" not in str(error.value)


@pytest.mark.parametrize("module", [reference, native], ids=lambda module: module.NAME)
@pytest.mark.parametrize("table", [0, 1, 2])
def test_rows_are_written_to_one_of_several_tables(table, module):
    rng = np.random.default_rng(table)
    tables = []
    for num_rows, dim in ((9, 4), (3, 7), (5, 1)):
        vectors = rng.normal(size=(num_rows, dim)).astype(np.float32)
        slots = rng.integers(0, 99, num_rows).astype(np.int32)
        tables.append((vectors, slots))
    rows = np.asarray([4, -1, 2, 9, 0, 2**31 - 1], np.int32)
    values = (rng.normal(size=(6, 7)).astype(np.float32), np.arange(6, dtype=np.int32))
    written = jax.jit(module.scatter_into)(tables, jnp.int32(table), rows, values)
    vectors, slots = tables[table]
    for position, row in enumerate(rows):
        if 0 <= row < len(vectors):
            vectors[row] = values[0][position, : vectors.shape[1]]
            slots[row] = values[1][position]
    assert_same([tuple(arrays) for arrays in written], tables)

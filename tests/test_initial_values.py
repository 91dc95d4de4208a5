import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn import initializers
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed.initial_values import form, initial_rows, table_key, table_keys

ROWS, DIM = 3000, 8


def table(initializer, rows=ROWS):
    return rs.TableSpec("t", rows, DIM, initializer=initializer)


INITIALIZERS = {
    "normal": initializers.normal(0.3),
    "uniform": initializers.uniform(0.3),
    "truncated": initializers.truncated_normal(0.3),
    "fan_in": initializers.variance_scaling(1.0, "fan_in", "truncated_normal"),
    "glorot": initializers.glorot_uniform(),
    "constant": initializers.constant(0.3),
    "two draws": lambda key, shape: (
        jax.random.normal(key, shape) * 0.1 + jax.random.uniform(key, shape)
    ),
    "shifted": lambda key, shape: 1.0 + 0.1 * jax.random.normal(jax.random.split(key)[1], shape),
    "default": rs.TableSpec("d", 1, 1).initializer,
}


@pytest.mark.parametrize("name", INITIALIZERS)
def test_any_rows_in_any_order_have_the_values_of_the_whole_table(name):
    spec, key = table(INITIALIZERS[name]), jax.random.key(3)
    whole = initial_rows(key, spec, jnp.arange(ROWS))
    some = jnp.asarray([7, 2999, 0, 7])
    assert_array_equal(initial_rows(key, spec, some), whole[some])


@pytest.mark.parametrize("name", INITIALIZERS)
def test_distribution_is_that_of_the_initializer_at_the_full_shape(name):
    spec = table(INITIALIZERS[name])
    ours = np.asarray(initial_rows(jax.random.key(3), spec, jnp.arange(ROWS)))
    theirs = np.asarray(spec.initializer(jax.random.key(4), (ROWS, DIM)))
    # Five standard errors of the mean.
    error = 5 * theirs.std() / np.sqrt(ours.size)
    assert abs(ours.mean() - theirs.mean()) <= 2 * error
    assert ours.std() == pytest.approx(theirs.std(), rel=0.05)
    assert ours.max() <= 1.3 * theirs.max() + 1e-6
    if name != "constant":
        assert len(np.unique(ours)) > 0.9 * ours.size


def test_equal_draws_of_one_key_stay_equal():
    spec = table(lambda key, shape: jax.random.normal(key, shape) - jax.random.normal(key, shape))
    assert float(jnp.abs(initial_rows(jax.random.key(0), spec, jnp.arange(9))).max()) == 0.0


@pytest.mark.parametrize(
    "key", [jax.random.key(3), jax.random.PRNGKey(3), jax.random.key(3, impl="rbg")], ids=str
)
def test_keys_of_many_tables_are_those_of_each(key):
    names = ["item", "user", ""]
    for table_key_of_many, name in zip(table_keys(key, names), names, strict=True):
        assert jnp.array_equal(table_key_of_many, table_key(key, name))


@pytest.mark.parametrize(
    "name", ["normal", "uniform", "truncated", "constant", "two draws", "shifted", "default"]
)
def test_tables_of_one_form_have_rows_of_one_program(name):
    small, large = (
        table(rows=10, initializer=INITIALIZERS[name]),
        table(rows=ROWS, initializer=INITIALIZERS[name]),
    )
    assert (
        form(small)
        == form(large)
        == form(table(rows=1_234_567_890, initializer=INITIALIZERS[name]))
    )
    key, rows = jax.random.key(3), jnp.arange(10)
    assert_array_equal(initial_rows(key, large, rows), initial_rows(key, small, rows))


def scaled(scale):
    return lambda key, shape: jax.random.normal(key, shape) * scale


def test_functions_that_compute_the_same_are_of_one_form_and_no_others():
    scales = np.linspace(1, 2, DIM, dtype=np.float32)[None]
    forms = [
        form(table(rows=10, initializer=scaled(scale)))
        for scale in (0.1, 0.1, 0.1 + 3e-8, 0.2, scales, scales + 1, scales)
    ]
    assert forms[0] == forms[1]
    # In float32, 0.1 and 0.1 + 3e-8 are different numbers.
    assert len({forms[0], *forms[2:]}) == 6
    assert form(table(rows=10, initializer=jax.jit(scaled(scales), static_argnums=1))) != forms[4]


NUMBER_OF_ROWS_MATTERS = {
    "in a scale": initializers.glorot_uniform(),
    "in a value": lambda key, shape: jnp.full(shape, shape[0], jnp.float32),
    "in an order": lambda key, shape: jnp.broadcast_to(
        jnp.arange(shape[0], dtype=jnp.float32)[:, None], shape
    ),
    "in all rows": initializers.orthogonal(),
    "in a sum": lambda key, shape: jax.random.normal(key, shape) / jnp.ones((shape[0], 2, 2)).sum(),
    "in a largest number": lambda key, shape: (
        jax.random.normal(key, shape)
        / jax.lax.broadcasted_iota(jnp.float32, (shape[0], 3), 0).max()
    ),
    "in a sum of rows before": lambda key, shape: jnp.cumsum(jax.random.normal(key, shape), axis=0),
    "in an array": lambda key, shape: jnp.asarray(
        np.linspace(0, 1, shape[0] * shape[1], dtype=np.float32)
    ).reshape(shape),
}


@pytest.mark.parametrize("where", NUMBER_OF_ROWS_MATTERS)
def test_the_form_tells_tables_apart_whose_values_depend_on_their_size(where):
    assert form(table(rows=10, initializer=NUMBER_OF_ROWS_MATTERS[where])) != form(
        table(rows=20, initializer=NUMBER_OF_ROWS_MATTERS[where])
    )


@pytest.mark.parametrize(
    "where", ["in a value", "in an order", "in all rows", "in a sum of rows before", "in an array"]
)
def test_initializers_that_mix_rows_are_evaluated_whole(where):
    initializer = NUMBER_OF_ROWS_MATTERS[where]
    key, some = jax.random.key(0), jnp.asarray([5, 1])
    expected = initializer(key, (ROWS, DIM))[some]
    assert_allclose(initial_rows(key, table(initializer), some), expected, rtol=1e-5, atol=1e-6)


def test_stacked_tables_of_many_sizes_and_initializers_have_their_own_values():
    chosen = [
        INITIALIZERS["uniform"],
        *map(NUMBER_OF_ROWS_MATTERS.get, ("in a scale", "in an order")),
    ]
    tables = [
        rs.TableSpec(f"{k} {rows}", rows, DIM, initializer=initializer)
        for k, initializer in enumerate(chosen)
        for rows in (1, 16, 17)
    ]
    collection = rs.EmbeddingCollection([rs.FeatureSpec(spec.name, spec) for spec in tables])
    key = jax.random.key(5)
    stacked = collection.tables(collection.init(key))
    assert len(collection.plan.stacks) == 1
    for spec in tables:
        expected = initial_rows(table_key(key, spec.name), spec, jnp.arange(spec.vocabulary_size))
        assert_allclose(stacked[spec.name], expected, rtol=1e-6, atol=1e-7)

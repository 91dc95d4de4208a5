"""A logical table is the same wherever its rows lie."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rsembed.initial_values import initial_rows, table_key
from rsembed.sparsecore import embedding, embedding_spec, table_stacking
from tests.sparsecore.case_specs import logical_tables

# The last bit of a normal value's approximation is a compiler's, unless it optimizes.
pytestmark = pytest.mark.usefixtures("more_optimizations")

KEY = jax.random.key(3)
INITIALIZERS = {
    "normal": jax.nn.initializers.normal(1.0),
    "lecun": jax.nn.initializers.lecun_uniform(),
    "orthogonal": jax.nn.initializers.orthogonal(),
}


def build(devices, cores, is_stacked, initializer="normal", key=KEY):
    specs = [
        embedding_spec.FeatureSpec(
            name=f"of_{name}",
            table_spec=embedding_spec.TableSpec(
                name=name,
                vocabulary_size=vocabulary,
                embedding_dim=6,
                initializer=INITIALIZERS[initializer],
                optimizer=embedding_spec.AdagradOptimizerSpec(initial_accumulator_value=0.5),
            ),
            input_shape=(24, 1),
        )
        for name, vocabulary in (("first", 37), ("twin", 37), ("other", 70))
    ]
    if is_stacked:
        table_stacking.auto_stack_tables(specs, devices, cores, rotation=1)
    embedding.prepare_feature_specs_for_training(specs, devices, cores)
    sharding = NamedSharding(Mesh(np.asarray(jax.devices()[:devices]), ("x",)), P("x", None))
    variables = embedding.init_embedding_variables(key, embedding.get_table_specs(specs), sharding, cores)
    return specs, variables


@functools.cache
def tables_of(devices, cores, is_stacked, initializer="normal"):
    return built_tables(devices, cores, is_stacked, initializer)


def built_tables(devices, cores, is_stacked, initializer="normal", key=KEY):
    specs, variables = build(devices, cores, is_stacked, initializer, key)
    arrays = {name: stack.table for name, stack in variables.items()}
    return specs, logical_tables(specs, {"devices": devices, "cores": cores}, arrays)


@pytest.mark.parametrize(("devices", "cores", "is_stacked"), [(1, 1, True), (1, 4, True), (2, 2, False), (3, 1, True)])
def test_tables_do_not_depend_on_the_layout(devices, cores, is_stacked):
    specs, tables = tables_of(devices, cores, is_stacked)
    for spec in specs:
        table = spec.table_spec
        wanted = initial_rows(table_key(KEY, table.name), table, jnp.arange(table.vocabulary_size))
        np.testing.assert_array_equal(tables[table.name], wanted)
    assert not np.array_equal(tables["first"], tables["twin"])


@pytest.mark.parametrize("initializer", ["lecun", "orthogonal"])
def test_initializers_see_the_logical_shape(initializer):
    _, alone = tables_of(1, 1, True, initializer)
    _, spread = tables_of(2, 2, False, initializer)
    jax.tree.map(np.testing.assert_array_equal, alone, spread)
    if initializer == "lecun":
        assert np.abs(alone["first"]).max() <= np.sqrt(3 / 37)
    if initializer == "orthogonal":
        np.testing.assert_allclose(alone["first"].T @ alone["first"], np.eye(6), atol=1e-5)


def test_blocks_join_without_a_seam(monkeypatch):
    _, whole = tables_of(1, 1, True)
    monkeypatch.setattr("rsembed.collection.dense_rows.INIT_BLOCK_VALUES", 80)
    _, pieces = built_tables(1, 1, True)
    jax.tree.map(np.testing.assert_array_equal, whole, pieces)


def test_padding_is_zero_and_slots_are_full():
    _, variables = build(2, 2, True)
    (stack,) = variables.values()
    table = np.asarray(stack.table)
    assert not table[:, 6:].any()
    assert np.count_nonzero(np.abs(table).sum(axis=1)) == 37 + 37 + 70
    assert (np.asarray(stack.slot.accumulator) == 0.5).all()
    assert stack.table.sharding.spec == P(("x",)) or stack.table.sharding.spec == P("x")


RULES = ["SGD", "Adagrad", "Adam", "AdagradMomentum", "FTRL", "LaProp", "F2A", "RowWiseAdagrad"]


@pytest.mark.parametrize("rule", RULES)
def test_padding_columns_stay_zero_under_every_rule(rule):
    optimizer = getattr(embedding_spec, f"{rule}OptimizerSpec")()
    rows = jnp.zeros((8, 4))
    slots = optimizer.init_slots(rows)
    for step in range(3):
        rows, slots = optimizer.step_rows(rows, slots, jnp.zeros((8, 4)), optimizer.get_hyperparameters(step))
    np.testing.assert_array_equal(rows, 0.0)


def test_three_axes_of_the_sharding_give_a_leading_axis_of_devices():
    table = embedding_spec.TableSpec(name="t", vocabulary_size=30, embedding_dim=6)
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("x",))
    flat, by_device = (
        embedding.init_embedding_variables(KEY, [table], NamedSharding(mesh, P("x", *rest)), 2)["t"].table
        for rest in ([None], [None, None])
    )
    assert by_device.sharding.spec == P("x", None, None)
    np.testing.assert_array_equal(by_device, np.asarray(flat).reshape(2, 16, 8))


def test_raw_keys_work_like_typed_ones():
    raw = jax.random.key_data(KEY)
    jax.tree.map(np.testing.assert_array_equal, tables_of(1, 1, True)[1], built_tables(1, 1, True, key=raw)[1])


def test_building_needs_little_beside_the_table():
    normal = jax.nn.initializers.normal()
    table = embedding_spec.TableSpec(name="large", vocabulary_size=2_000_000, embedding_dim=16, initializer=normal)
    spec = embedding_spec.FeatureSpec(name="f", table_spec=table, input_shape=(8, 1))
    embedding.prepare_feature_specs_for_training(spec, 1, 2)
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("x",))

    def build(key):
        return embedding.init_embedding_variables(key, [table], NamedSharding(mesh, P("x", None)), 2)

    analysis = jax.jit(build).lower(KEY).compile().memory_analysis()
    table_bytes = 2_000_000 * 16 * 4
    assert analysis.output_size_in_bytes >= table_bytes
    assert analysis.temp_size_in_bytes < 0.1 * table_bytes

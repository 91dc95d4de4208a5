"""Initial tables do not depend on the layout, and tables can be read and written by name."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from numpy.testing import assert_array_equal

from rsembed import from_optax
from rsembed.initial_values import initial_rows, table_key
from rsembed.sparsecore import embedding, embedding_spec, table_stacking
from tests.sparsecore import small_world
from tests.world import assert_same, mesh_of

# Without optimizations, the last bit of approximated normal values depends on the compiled program.
pytestmark = pytest.mark.usefixtures("more_optimizations")

KEY = jax.random.key(3)
INITIALIZERS = {
    "normal": jax.nn.initializers.normal(1.0),
    "lecun": jax.nn.initializers.lecun_uniform(),
    "orthogonal": jax.nn.initializers.orthogonal(),
}


def tables_of(devices, cores, is_stacked, initializer):
    """Specs and initial logical tables."""
    rows = {"first": 37, "twin": 37, "other": 70}
    specs = small_world.feature_specs(
        rows,
        {f"of_{name}": (name, 24) for name in rows},
        embedding_dim=6,
        initializer=INITIALIZERS[initializer],
    )
    small_world.place(specs, devices, cores, rotation=1 if is_stacked else None)
    variables = small_world.init(specs, devices, cores, KEY)
    return specs, jax.tree.map(np.asarray, small_world.logical_tables(variables, specs))


@pytest.mark.slow_rows("2-2-False-orthogonal", "1-4-True-lecun")
@pytest.mark.parametrize(
    ("devices", "cores", "is_stacked", "initializer"),
    [(1, 4, True, "lecun"), (2, 2, False, "orthogonal"), (3, 1, True, "normal")],
)
def test_tables_do_not_depend_on_the_layout_or_on_blocks(
    devices, cores, is_stacked, initializer, monkeypatch
):
    monkeypatch.setattr("rsembed.storage.initial_states.INIT_BLOCK_VALUES", 80)
    specs, tables = tables_of(devices, cores, is_stacked, initializer)
    for table in embedding.get_table_specs(specs).values():
        wanted = initial_rows(table_key(KEY, table.name), table, jnp.arange(table.vocabulary_size))
        assert_array_equal(tables[table.name], wanted)
    assert not np.array_equal(tables["first"], tables["twin"])


def test_three_axes_of_the_sharding_give_a_leading_axis_of_devices():
    table = embedding_spec.TableSpec("t", 30, 6)
    mesh = mesh_of(2)
    flat, by_device = (
        embedding.init_embedding_variables(KEY, [table], NamedSharding(mesh, P("x", *rest)), 2)[
            "t"
        ].table
        for rest in ([None], [None, None])
    )
    assert by_device.sharding.spec == P("x", None, None)
    assert_array_equal(by_device, np.asarray(flat).reshape(2, 16, 8))


def test_building_needs_little_beside_the_table():
    normal = jax.nn.initializers.normal()
    specs = small_world.place(
        small_world.feature_specs({"large": 4_000_000}, {"f": ("large", 8)}, initializer=normal)
    )
    build = jax.jit(lambda key: small_world.init(specs, key=key))
    analysis = build.lower(KEY).compile().memory_analysis()
    table_bytes = 4_000_000 * 8 * 4
    assert analysis.output_size_in_bytes >= table_bytes
    assert analysis.temp_size_in_bytes < 0.1 * table_bytes


def drawn_variables(specs, devices):
    """Variables with random numbers in tables, padding and slots."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: small_world.init(specs, devices))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.random(leaf.shape), leaf.dtype), shapes)


@pytest.mark.slow_rows("True-mesh2-False")
@pytest.mark.parametrize(
    ("is_stacked", "mesh", "is_jitted"),
    [(True, (), True), (False, (), False), (True, (4,), False), (False, (2, 2), True)],
)
def test_a_table_comes_out_of_the_rows_of_its_plan_and_goes_back(is_stacked, mesh, is_jitted):
    """Some meshes are from `jax.make_mesh`, and have explicit axes."""
    specs = small_world.placed_specs(2, 2, is_stacked=is_stacked)
    before = drawn_variables(specs, 2)
    if mesh:
        names = ("x", "y")[: len(mesh)]
        before = jax.device_put(before, NamedSharding(jax.make_mesh(mesh, names), P(names)))

    def out_and_back(variables):
        actual = small_world.logical_variables(variables, specs)
        table_specs = embedding.get_table_specs(specs)
        return actual, table_stacking.stack_and_shard_tables(table_specs, actual, 4)

    actual, again = (jax.jit(out_and_back) if is_jitted else out_and_back)(before)
    plan = table_stacking.stacking_plan(specs)
    for stack in plan.stacks:
        arrays = jax.tree.map(np.asarray, before[stack.name])
        seen = np.full(arrays.table.shape, np.nan, np.float32)
        for table in stack.tables:
            rows = plan.flat_rows(table.name, np.arange(table.rows))
            table_arrays = jax.tree.map(operator.itemgetter((rows, slice(table.dim))), arrays)
            assert_same(actual[table.name], table_arrays)
            seen[rows, : table.dim] = table_arrays.table
        assert_array_equal(again[stack.name].table.reshape(seen.shape), seen)


@pytest.mark.parametrize(
    "optimizer",
    [
        embedding_spec.F2AOptimizerSpec(),
        embedding_spec.RowWiseAdagradOptimizerSpec(),
        embedding_spec.CustomOptimizerSpec(0.5, lambda g, w, slot, lr: (w - lr * g, slot), (0.25,)),
        from_optax(optax.sgd(0.5, momentum=0.9)),
    ],
    ids=lambda rule: rule.short_name(),
)
def test_tables_move_with_their_slots_to_the_shapes_of_another_layout(optimizer):
    one = small_world.placed_specs(1, 4, optimizer=optimizer)
    other = small_world.placed_specs(3, 2, optimizer=optimizer, is_stacked=False)
    tables = small_world.logical_variables(drawn_variables(one, 1), one)
    stacked = table_stacking.stack_and_shard_tables(
        embedding.get_table_specs(other), tables, 6, 0.0
    )
    there = jax.tree.map(lambda rows: rows.reshape(-1, rows.shape[-1]), stacked)
    wanted = jax.eval_shape(lambda: small_world.init(other, 3))
    assert jax.tree.structure(there) == jax.tree.structure(wanted)
    assert jax.tree.map(jnp.shape, there) == jax.tree.map(jnp.shape, wanted)
    assert_same(small_world.logical_variables(there, other), tables)

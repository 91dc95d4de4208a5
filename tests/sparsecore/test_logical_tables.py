"""Tables leave and enter the physical layout by name, and nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import meta
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rsembed.sparsecore import embedding, embedding_spec
from tests.sparsecore import small_world


def variables_with(specs, fill=0.0):
    """Arrays in which every entry, padding and slots included, is different."""
    variables = {}
    for name, stack in embedding.get_stacked_table_specs(specs).items():
        shape = (stack.stack_vocab_size, stack.stack_embedding_dim)
        table = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape) + fill
        slots = stack.optimizer.init_slots(table)
        slots = tuple(
            slot + 0.5 + jnp.arange(slot.shape[0], dtype=jnp.float32).reshape(-1, *[1] * (slot.ndim - 1))
            for slot in slots
        )
        variables[name] = embedding.EmbeddingVariables(table, stack.optimizer.pack_slots(slots))
    return variables


@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize(("is_stacked", "mesh"), [(True, ()), (False, ()), (True, (4,)), (False, (2, 2))])
def test_tables_come_back_as_they_went_in(is_stacked, mesh, is_jitted):
    """Also on the meshes that `jax.make_mesh` makes, whose axes are explicit."""
    specs = small_world.placed_specs(2, 2, is_stacked=is_stacked)
    tables, before = small_world.draw_tables(), variables_with(specs)
    if mesh:
        names = ("x", "y")[: len(mesh)]
        before = jax.device_put(before, NamedSharding(jax.make_mesh(mesh, names), P(names)))
    call = jax.jit if is_jitted else lambda function: function
    after = call(lambda variables, tables: embedding.with_logical_tables(variables, specs, tables))(before, tables)
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, before)
    found = call(lambda variables: embedding.logical_tables(variables, specs))(after)
    jax.tree.map(np.testing.assert_array_equal, found, tables)
    changed = {name: np.asarray(before[name].table != after[name].table) for name in before}
    assert sum(mask.sum() for mask in changed.values()) == sum(table.size for table in tables.values())
    assert not any(mask[:, small_world.DIM :].any() for mask in changed.values())
    for name in before:
        jax.tree.map(np.testing.assert_array_equal, before[name].slot, after[name].slot)


def test_one_table_of_a_stack_can_be_replaced_alone():
    specs = small_world.placed_specs(2, 2)
    before = variables_with(specs)
    after = embedding.logical_tables(
        embedding.with_logical_tables(before, specs, {"second": np.ones((50, small_world.DIM))}), specs
    )
    np.testing.assert_array_equal(after["second"], 1.0)
    np.testing.assert_array_equal(after["first"], embedding.logical_tables(before, specs)["first"])


@pytest.mark.parametrize("optimizer", [embedding_spec.F2AOptimizerSpec(), embedding_spec.RowWiseAdagradOptimizerSpec()])
def test_tables_move_with_their_slots_to_another_layout(optimizer):
    one = small_world.placed_specs(1, 4, optimizer=optimizer)
    other = small_world.placed_specs(3, 2, optimizer=optimizer, is_stacked=False)
    moved = embedding.logical_variables(variables_with(one), one)
    there = embedding.with_logical_tables(variables_with(other, 1e4), other, moved)
    jax.tree.map(np.testing.assert_array_equal, embedding.logical_variables(there, other), moved)


def test_tables_are_found_in_models_of_both_kinds():
    specs = small_world.placed_specs(1, 2)
    variables = variables_with(specs)
    tables = embedding.logical_tables(variables, specs)
    linen = {"dense": {"kernel": jnp.ones(3)}, "layer": {"sc_embedding_variables": meta.Partitioned(variables, ("x",))}}
    state = nnx.State({"dense": nnx.Param(jnp.ones(3)), "layer": {"embedding_table": nnx.Param(variables)}})
    for tree in (linen, state):
        jax.tree.map(np.testing.assert_array_equal, embedding.logical_tables(tree, specs), tables)
        new = embedding.with_logical_tables(tree, specs, {"first": np.zeros((20, small_world.DIM))})
        assert jax.tree.structure(new) == jax.tree.structure(tree)
        assert not embedding.logical_tables(new, specs)["first"].any()

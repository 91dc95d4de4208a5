"""Rules of whole rows: slots have one shape wherever they come from, and padding never counts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rsembed import from_optax
from rsembed.sparsecore import embedding, embedding_spec, table_stacking
from tests.sparsecore import small_world


def normed_momentum(gradient, row, momentum, lr):
    momentum = 0.9 * momentum + gradient / (1 + jnp.linalg.norm(gradient)) + 0.1 * jnp.mean(row)
    return row - lr * momentum, momentum


def normed_momentum_in_numpy(row, slots, gradient):
    slots[0][:] = 0.9 * slots[0] + gradient / (1 + np.sqrt((gradient**2).sum())) + 0.1 * row.mean()
    row -= 0.5 * slots[0]


RULES = {
    "custom": embedding_spec.CustomOptimizerSpec(0.5, normed_momentum, (0.25,)),
    "row-wise": embedding_spec.RowWiseAdagradOptimizerSpec(0.5),
    "optax": from_optax(optax.sgd(0.5, momentum=0.9)),
    "entries": embedding_spec.AdamOptimizerSpec(0.5),
}


@pytest.mark.parametrize("name", RULES)
def test_new_and_stacked_variables_have_equal_shapes(name):
    """The dim, 5, is no multiple of 8."""
    specs = small_world.placed_specs(1, 4, optimizer=RULES[name])
    variables = small_world.init(specs)
    logical = embedding.logical_variables(variables, specs)
    table_specs = embedding.get_table_specs(specs)

    @jax.jit
    def flat_stacks(logical):
        stacked = table_stacking.stack_and_shard_tables(table_specs, logical, 4, 0.0)
        return jax.tree.map(lambda array: array.reshape(-1, array.shape[-1]), stacked)

    flat = flat_stacks(logical)
    assert jax.tree.map(jnp.shape, flat) == jax.tree.map(jnp.shape, variables)
    jax.tree.map(np.testing.assert_array_equal, embedding.logical_variables(flat, specs), logical)


@pytest.mark.parametrize("is_from_logical", [True, False])
def test_a_custom_rule_with_slots_equals_rows_without_padding(is_from_logical):
    specs = small_world.placed_specs(1, 4, optimizer=RULES["custom"])
    tables, slots = small_world.draw_tables(), small_world.full_slots(0.25)
    variables = embedding.with_logical_tables(small_world.init(specs), specs, tables)
    if is_from_logical:
        pairs = {name: (table, slots[name][0].astype(np.float32)) for name, table in tables.items()}
        ((table, slot),) = table_stacking.stack_and_shard_tables(
            embedding.get_table_specs(specs), pairs, 4
        ).values()  # NaN everywhere else
        flat = [jnp.asarray(array.reshape(-1, array.shape[-1])) for array in (table, slot)]
        (name,) = variables
        variables = {name: embedding.EmbeddingVariables(flat[0], tuple(flat[1:]))}

    @jax.jit
    def step(gradients, inputs, variables, step):
        return embedding.sparse_dense_matmul_grad(gradients, inputs, variables, specs, global_device_count=1, step=step)

    for seed in range(2):
        ids, gradients = small_world.draw_batch(seed)
        inputs, _ = small_world.preprocess(specs, ids)
        variables = step(gradients, inputs, variables, jnp.int32(seed))
        tables, slots = small_world.dense_step(tables, slots, ids, gradients, normed_momentum_in_numpy)
    got = embedding.logical_variables(variables, specs)
    small_world.assert_close({name: pair.table for name, pair in got.items()}, tables)
    small_world.assert_close(
        {name: jax.tree.leaves(pair.slot)[0] for name, pair in got.items()}, {name: s[0] for name, s in slots.items()}
    )

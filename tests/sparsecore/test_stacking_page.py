"""The program of the published stacking page, call by call, with its one mistake named and put right."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rsembed.sparsecore import embedding, embedding_spec, table_stacking
from tests.sparsecore.small_world import logical_tables


def page_specs(initializer, **options):
    """Two tables of 64 and 120 rows, the second read by two features, stacked as the page does."""
    tables = {
        name: embedding_spec.TableSpec(
            name,
            rows,
            dim,
            initializer=initializer,
            optimizer=embedding_spec.SGDOptimizerSpec(),
            combiner="sum",
            max_ids_per_partition=16,
            max_unique_ids_per_partition=16,
        )
        for name, rows, dim in (("table_a", 64, 12), ("table_b", 120, 10))
    }
    specs = [
        embedding_spec.FeatureSpec(
            f"feature_spec_{letter}",
            tables[table],
            input_shape=(16, 1),
            output_shape=(16, tables[table].embedding_dim),
        )
        for letter, table in (("a", "table_a"), ("b", "table_b"), ("c", "table_b"))
    ]
    embedding.auto_stack_tables(specs, global_device_count=1, num_sc_per_device=4, **options)
    embedding.prepare_feature_specs_for_training(specs, global_device_count=1, num_sc_per_device=4)
    return specs


def sharding():
    return NamedSharding(Mesh(np.asarray(jax.devices()[:1]), ("x",)), P("x", None))


def no_argument():
    return jnp.zeros((128, 16), dtype=jnp.float32)


def test_with_the_fix_the_page_trains():
    specs = page_specs(lambda key, shape: jnp.zeros(shape, dtype=jnp.float32))
    variables = embedding.init_embedding_variables(
        jax.random.key(0), embedding.get_table_specs(specs), sharding(), 4
    )
    ids = [np.arange(16)[:, None] * step for step in (1, 2, 7)]
    inputs, _ = embedding.preprocess_sparse_dense_matmul_input(
        ids, None, specs, 1, 1, num_sc_per_device=4
    )

    @jax.jit
    def train(inputs, variables):
        activations = embedding.tpu_sparse_dense_matmul(
            inputs, variables, specs, global_device_count=1
        )
        gradients = [jnp.ones_like(values) for values in activations]
        stacked = embedding.tpu_sparse_dense_matmul(
            inputs, variables, specs, global_device_count=1, perform_unstacking=False
        )
        by_hand = embedding.unstack_embedding_activations(stacked, specs, 1, 4)
        updated = embedding.tpu_sparse_dense_matmul_grad(gradients, inputs, variables, specs)
        rows = embedding.stack_embedding_gradients(gradients, specs, 4, 1)
        again = embedding.tpu_sparse_dense_matmul_grad(
            rows, inputs, variables, specs, perform_stacking=False
        )
        return activations, by_hand, updated, again

    activations, by_hand, updated, again = train(inputs, variables)
    jax.tree.map(np.testing.assert_array_equal, activations, by_hand)
    jax.tree.map(np.testing.assert_array_equal, updated, again)
    tables = logical_tables(updated, specs)
    expected = np.zeros((120, 10), np.float32)
    for rows in ids[1:]:
        np.add.at(expected, rows[:, 0], -0.001)
    np.testing.assert_allclose(tables["table_b"], expected, rtol=1e-6)


def test_rotation_is_an_option_of_both_modules():
    assert embedding.stack_tables is table_stacking.stack_tables
    specs = page_specs(no_argument, rotation=3)
    assert specs[1].table_spec.setting_in_stack.shard_rotation == 3

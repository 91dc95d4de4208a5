"""Rules that came from one wing, in SparseCore: stacked, padded to 8 columns, and still their formulas in float64."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rsembed.sparsecore import embedding
from tests import oracles
from tests.optimizers.test_contract import CONTRACT
from tests.sparsecore import small_world


@pytest.mark.parametrize("name", ["tensorflow_adam", "lamb", "counter_adagrad"])
def test_padding_columns_and_other_cores_leave_the_numbers_of_a_rule_alone(name):
    rule, step_row = CONTRACT[name]
    specs = small_world.placed_specs(1, 4, optimizer=rule)
    sharding = NamedSharding(Mesh(np.asarray(jax.devices()[:1]), ("x",)), P("x", None))
    variables = embedding.init_embedding_variables(jax.random.key(0), embedding.get_table_specs(specs), sharding)
    grad = functools.partial(embedding.sparse_dense_matmul_grad, feature_specs=specs, global_device_count=1)
    stepped_by = jax.jit(lambda gradients, inputs, variables, step: grad(gradients, inputs, variables, step=step))
    wanted = {name: jax.tree.leaves(own) for name, own in embedding.logical_variables(variables, specs).items()}
    for step in range(2):
        ids, d_activations = small_world.draw_batch(step)
        inputs, _ = embedding.preprocess_sparse_dense_matmul_input(ids, None, specs, 1, 1)
        variables = stepped_by(d_activations, inputs, variables, np.int32(step))
        for table, own in small_world.dense_row_gradients(ids, d_activations).items():
            rows = range(small_world.TABLES[table]) if rule.moves_all_rows else ()
            own = {row: np.zeros(small_world.DIM) for row in rows} | own
            first, *slots = wanted[table]
            stepped, slots = oracles.stepped_table(first, slots, own, functools.partial(step_row, rule), step=step)
            wanted[table] = [stepped, *slots]
    for table, own in embedding.logical_variables(variables, specs).items():
        for array, expected in zip(jax.tree.leaves(own), wanted[table], strict=True):
            np.testing.assert_allclose(array, expected, rtol=2e-5, atol=small_world.VALUE_TOLERANCE)

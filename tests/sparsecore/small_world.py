"""Small specs, tables and batches, and the expected results of batches, by loops in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from rsembed.sparsecore import embedding, embedding_spec, table_stacking
from tests.oracles import stepped_table
from tests.world import mesh_of

DIM = 5
TABLES = {"first": 20, "second": 50}
FEATURES = {"a": ("first", 24), "b": ("second", 24), "c": ("first", 48)}
IDS_PER_SAMPLE = 3
VALUE_TOLERANCE = 2e-5
"""Tolerance of sums of a few dozen products in float32."""


def feature_specs(tables, features, **fields):
    """Feature specs by name, not placed yet.

    Args:
      tables: number of rows, or fields of the `TableSpec`, by table name.
      features: table name, batch size, and number of columns if it is not that of the table, by
        feature name.
      **fields: fields of all tables.
    """
    tables = {
        name: spec if isinstance(spec, dict) else {"vocabulary_size": spec}
        for name, spec in tables.items()
    }
    tables = {
        name: embedding_spec.TableSpec(name, **{"embedding_dim": 8} | fields | spec)
        for name, spec in tables.items()
    }
    return {
        name: embedding_spec.FeatureSpec(
            name, tables[table], output_shape=(batch, *(dim or [tables[table].embedding_dim]))
        )
        for name, (table, batch, *dim) in features.items()
    }


def place(specs, devices=1, cores=1, rotation=None, **limits):
    """The specs, placed. With a rotation, tables that can share a stack are stacked.

    `limits` are arguments of `auto_stack_tables`.
    """
    if rotation is not None:
        table_stacking.auto_stack_tables(specs, devices, cores, rotation, **limits)
    embedding.prepare_feature_specs_for_training(specs, devices, cores)
    return specs


def preprocess(specs, ids, weights=None, devices=1, cores=None, local=None, **options):
    """The preprocessed batch and its statistics.

    Args:
      specs: placed feature specs.
      ids: ids of the batch.
      weights: weights of the ids, or None.
      devices: number of devices.
      cores: number of SparseCores of a device. None: as in the specs.
      local: number of local devices. None: all devices.
      **options: arguments of `preprocess_sparse_dense_matmul_input`.
    """
    return embedding.preprocess_sparse_dense_matmul_input(
        ids, weights, specs, local or devices, devices, num_sc_per_device=cores, **options
    )


def ragged(rows, dtype=np.int32):
    """Rows of different lengths, as an object array of arrays."""
    result = np.empty(len(rows), object)
    result[:] = [np.asarray(row, dtype) for row in rows]
    return result


def init(specs, devices=1, cores=None, key=None):
    """Initial variables of all tables of the specs."""
    if key is None:
        key = jax.random.key(0)
    sharding = NamedSharding(mesh_of(devices), P("x", None))
    return embedding.init_embedding_variables(
        key, embedding.get_table_specs(specs), sharding, cores
    )


def placed_specs(devices, cores, *, is_stacked=True, rotation=1, stack_limit=None, **fields):
    """Feature specs of both tables, placed for these numbers of devices and cores.

    With `stack_limit`, a stack has this limit of ids per partition instead of the default.
    """
    fields = {"embedding_dim": DIM, "optimizer": embedding_spec.AdagradOptimizerSpec(0.5)} | fields
    specs = feature_specs(TABLES, FEATURES, **{"max_ids_per_partition": 512} | fields)
    limits = {}
    if stack_limit is not None:
        limits["stack_to_max_ids_per_partition"] = lambda *_: stack_limit
    return place(specs, devices, cores, rotation if is_stacked else None, **limits)


def prepare(tables, ids):
    """A preprocessed batch, split over the devices of a `ShardedTables`."""
    return jax.device_put(tables.preprocess(ids)[0], tables.devices.sharding(tables.devices.split))


def logical_variables(tree, specs):
    """Variables of each table by name.

    `tree` holds the variables of the stacks by stack name, at any depth, as a layer's state does.
    """

    def is_variables(node):
        return isinstance(node, embedding.EmbeddingVariables)

    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_variables)
    by_stack = {path[-1].key: leaf for path, leaf in leaves if is_variables(leaf)}
    tables = embedding.get_table_specs(specs)
    num_shards = next(iter(tables.values())).stacked_table_spec.num_shards
    return table_stacking.unshard_and_unstack_tables(tables, by_stack, num_shards)


def logical_tables(tree, specs):
    return {name: variables.table for name, variables in logical_variables(tree, specs).items()}


def draw_tables():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(rows, DIM)).astype(np.float32) for name, rows in TABLES.items()}


def draw_batch(seed=0):
    """Random ids by feature, some repeated in a sample, and random gradients of the activations."""
    rng = np.random.default_rng(seed + 1000)
    ids = {
        name: rng.integers(0, TABLES[table], (batch, IDS_PER_SAMPLE))
        for name, (table, batch) in FEATURES.items()
    }
    gradients = {
        name: rng.normal(size=(batch, DIM)).astype(np.float32)
        for name, (_, batch) in FEATURES.items()
    }
    return ids, gradients


def dense_activations(tables, ids):
    return {
        name: np.asarray(tables[FEATURES[name][0]], np.float64)[rows].sum(axis=1)
        for name, rows in ids.items()
    }


def dense_row_gradients(ids, gradients):
    """Sum of the gradients of each row that was looked up, by table and row."""
    summed = {name: {} for name in TABLES}
    for feature, rows in ids.items():
        by_row = summed[FEATURES[feature][0]]
        for sample_rows, gradient in zip(rows.tolist(), gradients[feature], strict=True):
            for row in sample_rows:
                by_row[row] = by_row.get(row, 0.0) + np.asarray(gradient, np.float64)
    return summed


def dense_step(tables, slots, ids, gradients, step_row, **made_of):
    """Tables and slots after one step of each looked-up row. `slots`: lists of arrays by table."""
    summed = dense_row_gradients(ids, gradients)
    new_tables, new_slots = {}, {}
    for name, table in tables.items():
        new_tables[name], new_slots[name] = stepped_table(
            table, slots[name], summed[name], step_row, **made_of
        )
    return new_tables, new_slots


def full_slots(*values):
    return {
        name: [np.full((rows, DIM), value) for value in values] for name, rows in TABLES.items()
    }


def assert_close(got, expected):
    assert set(got) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(
            np.asarray(got[name]), values, atol=VALUE_TOLERANCE, rtol=VALUE_TOLERANCE
        )


def assert_padding_is_zero(specs, variables):
    """Asserts that all entries of the stacked tables outside of logical tables are 0."""
    plan = table_stacking.stacking_plan(specs)
    for stack in plan.stacks:
        padding = np.array(variables[stack.name].table)
        for table in stack.tables:
            rows = plan.flat_rows(table.name, np.arange(table.rows))
            padding[rows, : table.dim] = 0
        assert not padding.any()


def squared_error(activations):
    """A loss whose gradient with respect to the activations equals the activations."""
    return sum(0.5 * jnp.sum(values * values) for values in activations.values())

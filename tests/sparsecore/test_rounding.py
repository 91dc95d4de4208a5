"""Stochastic rounding draws for a step, a table and an id; where the row lies, and in which stack, does not matter."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rsembed.sparsecore import embedding, embedding_spec, mesh_lookup, table_stacking

ROWS, DIM, BATCH = 32, 8, 64


def placed(devices, cores, *names, rotation=1):
    specs = {}
    for name in names:
        table = embedding_spec.TableSpec(
            name=name,
            vocabulary_size=ROWS,
            embedding_dim=DIM,
            initializer=jax.nn.initializers.ones,
            optimizer=embedding_spec.SGDOptimizerSpec(1.0),
            dtype="bfloat16",
            stochastic_rounding=True,
        )
        specs[name] = embedding_spec.FeatureSpec(name=name, table_spec=table, output_shape=(BATCH, DIM))
    if len(names) > 1 and rotation is not None:
        table_stacking.auto_stack_tables(specs, devices, cores, rotation)
    embedding.prepare_feature_specs_for_training(specs, devices, cores)
    return specs


def stepped(specs, devices, *, number=0):
    """Logical tables of ones after one step of every row with the same small gradient."""
    mesh = Mesh(np.asarray(jax.devices()[:devices]), ("x",))
    tables = mesh_lookup.MeshTables(feature_specs=specs, devices=mesh_lookup.table_mesh(mesh, "x"))
    sharding = NamedSharding(mesh, P("x", None))
    variables = embedding.init_embedding_variables(jax.random.key(0), embedding.get_table_specs(specs), sharding)
    ids = np.arange(BATCH)[:, None] % ROWS
    inputs, _ = tables.prepare({name: ids for name in specs})
    gradients = {name: jnp.full((BATCH, DIM), 2.0**-10) for name in specs}
    updated = jax.jit(lambda *given: tables.update(*given))(gradients, variables, number, inputs)
    return {name: np.asarray(table, np.float32) for name, table in embedding.logical_tables(updated, specs).items()}


def distinct_rows(*tables):
    return len({row.tobytes() for table in tables for row in table})


def test_every_row_of_every_table_has_noise_of_its_own():
    tables = stepped(placed(1, 4, "t", "u", rotation=None), 1)
    values = np.concatenate(list(tables.values()))
    assert set(np.unique(values)) == {np.float32(1 - 2**-8), np.float32(1)}  # two steps of half the distance
    # 64 rows of 8 coin tosses: by chance a few of them are equal, not half.
    assert distinct_rows(*tables.values()) > 44


def test_every_step_has_noise_of_its_own():
    specs = placed(1, 4, "t")
    assert (stepped(specs, 1, number=1)["t"] != stepped(specs, 1, number=2)["t"]).any()


def test_rounded_tables_are_bit_equal_alone_or_stacked_on_any_number_of_devices_and_cores():
    wanted = stepped(placed(1, 4, "t", "u", rotation=None), 1)
    for devices, cores in ((1, 4), (4, 1), (2, 4)):
        jax.tree.map(np.testing.assert_array_equal, stepped(placed(devices, cores, "t", "u"), devices), wanted)
    alone = stepped(placed(4, 1, "u", rotation=None), 4)
    np.testing.assert_array_equal(alone["u"], wanted["u"])

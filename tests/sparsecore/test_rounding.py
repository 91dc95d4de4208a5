"""Stochastic rounding draws for a step, a table and an id; where the row lies, and in which stack, does not matter."""

import jax
import jax.numpy as jnp
import numpy as np

from rsembed.sparsecore import embedding, embedding_spec, mesh_lookup
from tests.sparsecore import small_world

ROWS, DIM, BATCH = 32, 8, 64


def placed(devices, cores, *names, rotation=None):
    specs = small_world.feature_specs(
        dict.fromkeys(names, ROWS),
        {name: (name, BATCH) for name in names},
        initializer=jax.nn.initializers.ones,
        optimizer=embedding_spec.SGDOptimizerSpec(1.0),
        dtype="bfloat16",
        stochastic_rounding=True,
    )
    return small_world.place(specs, devices, cores, rotation)


def stepped(specs, devices, *, number=0):
    """Logical tables of ones after one step of every row with the same small gradient."""
    mesh = small_world.mesh_of(devices)
    tables = mesh_lookup.MeshTables(feature_specs=specs, devices=mesh_lookup.table_mesh(mesh, "x"))
    inputs, _ = tables.prepare({name: np.arange(BATCH)[:, None] % ROWS for name in specs})
    gradients = {name: jnp.full((BATCH, DIM), 2.0**-10) for name in specs}
    updated = jax.jit(tables.update)(gradients, small_world.init(specs, devices), number, inputs)
    return {name: np.asarray(table, np.float32) for name, table in embedding.logical_tables(updated, specs).items()}


def test_every_row_of_every_table_and_every_step_has_noise_of_its_own():
    specs = placed(1, 4, "t", "u")
    values, later = (np.concatenate(list(stepped(specs, 1, number=number).values())) for number in (0, 1))
    assert set(np.unique(values)) == {np.float32(1 - 2**-8), np.float32(1)}  # two steps of half the distance
    # 64 rows of 8 coin tosses: by chance a few of them are equal, not half.
    assert len({row.tobytes() for row in values}) > 44
    assert (values != later).any()


def test_rounded_tables_are_bit_equal_alone_or_stacked_on_any_number_of_devices_and_cores():
    wanted = stepped(placed(1, 4, "t", "u"), 1)
    for devices, cores in ((1, 4), (4, 1), (2, 4)):
        jax.tree.map(
            np.testing.assert_array_equal, stepped(placed(devices, cores, "t", "u", rotation=1), devices), wanted
        )
    alone = stepped(placed(4, 1, "u"), 4)
    np.testing.assert_array_equal(alone["u"], wanted["u"])

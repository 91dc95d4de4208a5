"""Padding and untouched rows, meshes, and stochastic rounding.

`test_random_models` compares the results of lookups and updates with loops.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_array_equal

from rsembed.sparsecore import embedding, embedding_spec, mesh_lookup
from tests.sparsecore import small_world
from tests.sparsecore.case_specs import lookup_and_update, on_devices, variables_of
from tests.world import assert_same, mesh_of


def drawn(devices, cores, *, highest=None, **fields):
    """Specs, their variables, a preprocessed batch with ids below `highest`, and its gradients."""
    specs = small_world.placed_specs(devices, cores, **fields)
    ids, gradients = small_world.draw_batch()
    if highest is not None:
        ids = {name: rows % highest for name, rows in ids.items()}
    processed, _ = small_world.preprocess(specs, ids, devices=devices)
    return specs, variables_of(specs, small_world.draw_tables()), processed, gradients


def test_untouched_rows_and_slots_keep_their_bits():
    adam = embedding_spec.AdamOptimizerSpec(0.1)
    specs, before, processed, gradients = drawn(1, 2, highest=4, optimizer=adam)
    gradients = jax.tree.map(np.zeros_like, gradients)
    warm = jax.tree.map(lambda array: np.asarray(array) + np.float32(0.25), before)

    @jax.jit
    def update(processed, variables):
        return embedding.sparse_dense_matmul_grad(gradients, processed, variables, specs, step=0)

    after = update(processed, warm)
    has_moved = [
        (new != old).any(axis=1)
        for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(warm), strict=True)
    ]
    # Rows 0 to 3 of both tables were looked up. Their gradient is 0, but their momentum moves them.
    assert has_moved[0].sum() == 8
    for moved_slots in has_moved[1:]:
        assert_array_equal(moved_slots, has_moved[0])


def test_garbage_in_gaps_and_tails_is_never_used():
    specs, variables, processed, gradients = drawn(2, 2)
    inputs = processed.sparse_dense_matmul_input
    (name,) = inputs.lhs_gains
    is_gap = np.isnan(inputs.lhs_gains[name])
    assert is_gap.any()

    def dirty(arrays, garbage):
        array = arrays[name].copy()
        array[is_gap] = garbage
        return {name: array}

    inputs = inputs._replace(
        lhs_embedding_ids=dirty(inputs.lhs_embedding_ids, -17),
        lhs_sample_ids=dirty(inputs.lhs_sample_ids, 1),
        lhs_gains=dirty(inputs.lhs_gains, np.inf),
    )
    run = on_devices(lookup_and_update(specs, 2), 2)
    assert_same(
        run(dataclasses.replace(processed, sparse_dense_matmul_input=inputs), variables, gradients),
        run(processed, variables, gradients),
    )


def test_row_limits_leave_padding_and_untouched_rows_alone():
    specs, variables, processed, gradients = drawn(1, 1, highest=3, is_stacked=False)

    @jax.jit
    def update(processed, variables):
        limits = {"first": (0.5, None), "second": (None, -0.5)}
        return embedding.sparse_dense_matmul_grad(
            gradients, processed, variables, specs, embedding_var_limits=limits
        )

    updated = update(processed, variables)
    small_world.assert_padding_is_zero(specs, updated)
    tables = small_world.logical_tables(updated, specs)
    assert tables["first"][:3].min() >= 0.5 and tables["second"][:3].max() <= -0.5
    assert_array_equal(updated["first"].table[3:], variables["first"].table[3:])


# The noise of stochastic rounding depends on step, table and id, not on the stack or the position
# in it.

ROWS, DIM, BATCH = 32, 8, 64


def rounded_specs(devices, cores, *names, rotation=None):
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
    """Logical tables after one step from ones, with the same small gradient for each row."""
    mesh_devices = mesh_lookup.table_mesh(mesh_of(devices), "x")
    tables = mesh_lookup.ShardedTables(feature_specs=specs, devices=mesh_devices)
    inputs = small_world.prepare(tables, {name: np.arange(BATCH)[:, None] % ROWS for name in specs})
    gradients = {name: jnp.full((BATCH, DIM), 2.0**-10) for name in specs}
    updated = jax.jit(tables.update)(gradients, small_world.init(specs, devices), number, inputs)
    return jax.tree.map(np.float32, small_world.logical_tables(updated, specs))


def test_every_row_of_every_table_and_every_step_has_noise_of_its_own():
    specs = rounded_specs(1, 4, "t", "u")
    values, later = (
        np.concatenate(list(stepped(specs, 1, number=number).values())) for number in (0, 1)
    )
    # The step is half the distance of neighbouring numbers in bfloat16, so it rounds up or down.
    assert_array_equal(np.unique(values), np.float32([1 - 2**-8, 1]))
    # A row has 8 random bits. By chance, a few of the 64 rows are equal, but not half of them.
    assert len(np.unique(values, axis=0)) > 44
    assert (values != later).any()


@pytest.mark.slow
def test_rounded_tables_are_bit_equal_alone_or_stacked_on_any_number_of_devices_and_cores():
    wanted = stepped(rounded_specs(1, 4, "t", "u"), 1)
    for devices, cores in ((1, 4), (4, 1), (2, 4)):
        assert_same(
            stepped(rounded_specs(devices, cores, "t", "u", rotation=1), devices),
            wanted,
        )
    alone = stepped(rounded_specs(4, 1, "u"), 4)
    assert_array_equal(alone["u"], wanted["u"])


SHARD_MAPS = {
    "that checks what varies": (mesh_of(2), P("x"), True),
    "over several axes": (mesh_of(1, 2), P(("x", "y")), False),
    "over one of several axes": (mesh_of(3, 2), P("y"), False),
}


@pytest.mark.parametrize("case", SHARD_MAPS)
def test_the_devices_are_those_of_the_shard_map(case):
    mesh, axes, check_vma = SHARD_MAPS[case]
    specs, variables, processed, gradients = drawn(2, 1)
    run = lookup_and_update(specs, 2)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=axes, out_specs=axes, check_vma=check_vma)
    assert_same(
        jax.jit(mapped)(processed, variables, gradients),
        on_devices(run, 2)(processed, variables, gradients),
    )

"""What lookup and update leave alone, the meshes they run under, rules of whole rows and stochastic rounding.

`test_random_models` holds the numbers of lookup and update.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P
from numpy.testing import assert_array_equal

from rsembed.sparsecore import embedding, embedding_spec, mesh_lookup, table_stacking
from tests.sparsecore import small_world
from tests.sparsecore.case_specs import on_devices, variables_of
from tests.world import assert_same, mesh_of


def drawn(devices, cores, *, highest=None, **fields):
    """Specs, their variables, a preprocessed batch and its gradients; ids below `highest`."""
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
    for name, stack in after.items():
        moved = np.flatnonzero(
            (np.asarray(stack.table) != np.asarray(warm[name].table)).any(axis=1)
        )
        # Rows 0 to 3 of both tables were looked up: their momentum moves them although the gradient is zero.
        assert moved.size == 8
        for new, old in zip(stack.slot, warm[name].slot, strict=True):
            assert (
                np.flatnonzero((np.asarray(new) != np.asarray(old)).any(axis=1)).tolist()
                == moved.tolist()
            )


def test_garbage_in_gaps_and_tails_is_never_used():
    specs, variables, processed, gradients = drawn(2, 2)
    (name,) = processed.lhs_gains
    is_gap = np.isnan(processed.lhs_gains[name])
    assert is_gap.any()
    dirty = [
        processed.lhs_row_pointers[name],
        np.where(is_gap, -17, processed.lhs_embedding_ids[name]).astype(np.int32),
        np.where(is_gap, 1, processed.lhs_sample_ids[name]).astype(np.int32),
        np.where(is_gap, np.inf, processed.lhs_gains[name]).astype(np.float32),
    ]
    dirty = embedding.PreprocessedInput(embedding.SparseDenseMatmulInput(*({name: array} for array in dirty)),
                                        processed.num_minibatches, processed.limits)  # fmt: skip

    def run(processed, variables, gradients):
        activations = embedding.sparse_dense_matmul(
            processed, variables, specs, global_device_count=2
        )
        return activations, embedding.sparse_dense_matmul_grad(
            gradients, processed, variables, specs
        )

    run = on_devices(run, 2)
    assert_same(
        run(dirty, variables, gradients),
        run(processed, variables, gradients),
    )


def test_a_shard_map_may_check_what_varies_over_the_mesh():
    specs, variables, processed, gradients = drawn(4, 1)

    def step(processed, variables, gradients):
        options = {"global_device_count": 4}
        activations = embedding.sparse_dense_matmul(processed, variables, specs, **options)
        return activations, embedding.sparse_dense_matmul_grad(
            gradients, processed, variables, specs, **options
        )

    expected = on_devices(step, 4)(processed, variables, gradients)
    mesh = mesh_of(4)
    checked = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=True)
    )
    assert_same(checked(processed, variables, gradients), expected)


def test_row_limits_leave_padding_and_untouched_rows_alone():
    specs, variables, processed, gradients = drawn(1, 1, highest=3, is_stacked=False)
    limits = {"first": (0.5, None), "second": (None, -0.5)}
    updated = jax.jit(
        lambda p, v: embedding.sparse_dense_matmul_grad(
            gradients, p, v, specs, embedding_var_limits=limits
        )
    )(processed, variables)
    first, second = (np.asarray(updated[name].table) for name in ("first", "second"))
    assert (first[:3, : small_world.DIM] >= 0.5).all() and not first[:, small_world.DIM :].any()
    assert (second[:3, : small_world.DIM] <= -0.5).all() and not second[:, small_world.DIM :].any()
    assert_array_equal(first[3:], variables["first"].table[3:])
    assert jax.tree.map(jnp.shape, updated) == jax.tree.map(jnp.shape, variables)


# Rules of whole rows, for which padding never counts.


def normed_momentum(gradient, row, momentum, lr):
    momentum = 0.9 * momentum + gradient / (1 + jnp.linalg.norm(gradient)) + 0.1 * jnp.mean(row)
    return row - lr * momentum, momentum


def normed_momentum_in_numpy(row, slots, gradient):
    slots[0][:] = 0.9 * slots[0] + gradient / (1 + np.sqrt((gradient**2).sum())) + 0.1 * row.mean()
    row -= 0.5 * slots[0]


@pytest.mark.parametrize("is_from_logical", [True, False])
def test_a_custom_rule_with_slots_equals_rows_without_padding(is_from_logical):
    rule = embedding_spec.CustomOptimizerSpec(0.5, normed_momentum, (0.25,))
    specs = small_world.placed_specs(1, 4, optimizer=rule)
    tables, slots = small_world.draw_tables(), small_world.full_slots(0.25)
    variables = variables_of(specs, tables)
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
        return embedding.sparse_dense_matmul_grad(
            gradients, inputs, variables, specs, global_device_count=1, step=step
        )

    for seed in range(2):
        ids, gradients = small_world.draw_batch(seed)
        inputs, _ = small_world.preprocess(specs, ids)
        variables = step(gradients, inputs, variables, jnp.int32(seed))
        tables, slots = small_world.dense_step(
            tables, slots, ids, gradients, normed_momentum_in_numpy
        )
    got = small_world.logical_variables(variables, specs)
    small_world.assert_close({name: pair.table for name, pair in got.items()}, tables)
    small_world.assert_close(
        {name: jax.tree.leaves(pair.slot)[0] for name, pair in got.items()},
        {name: s[0] for name, s in slots.items()},
    )


# Stochastic rounding draws for a step, a table and an id; where the row lies, and in which stack, does not matter.

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
    """Logical tables of ones after one step of every row with the same small gradient."""
    mesh = mesh_of(devices)
    tables = mesh_lookup.MeshTables(feature_specs=specs, devices=mesh_lookup.table_mesh(mesh, "x"))
    inputs = small_world.prepare(tables, {name: np.arange(BATCH)[:, None] % ROWS for name in specs})
    gradients = {name: jnp.full((BATCH, DIM), 2.0**-10) for name in specs}
    updated = jax.jit(tables.update)(gradients, small_world.init(specs, devices), number, inputs)
    return {
        name: np.asarray(table, np.float32)
        for name, table in small_world.logical_tables(updated, specs).items()
    }


def test_every_row_of_every_table_and_every_step_has_noise_of_its_own():
    specs = rounded_specs(1, 4, "t", "u")
    values, later = (
        np.concatenate(list(stepped(specs, 1, number=number).values())) for number in (0, 1)
    )
    # Two steps of half the distance.
    assert set(np.unique(values)) == {
        np.float32(1 - 2**-8),
        np.float32(1),
    }
    # 64 rows of 8 coin tosses: by chance a few of them are equal, not half.
    assert len({row.tobytes() for row in values}) > 44
    assert (values != later).any()


def test_rounded_tables_are_bit_equal_alone_or_stacked_on_any_number_of_devices_and_cores():
    wanted = stepped(rounded_specs(1, 4, "t", "u"), 1)
    for devices, cores in ((1, 4), (4, 1), (2, 4)):
        assert_same(
            stepped(rounded_specs(devices, cores, "t", "u", rotation=1), devices),
            wanted,
        )
    alone = stepped(rounded_specs(4, 1, "u"), 4)
    assert_array_equal(alone["u"], wanted["u"])


def test_the_devices_may_span_several_mesh_axes_or_one_of_several():
    specs, variables, processed, _ = drawn(2, 1)

    def look_up(processed, variables):
        return embedding.sparse_dense_matmul(processed, variables, specs, global_device_count=2)

    expected = on_devices(look_up, 2)(processed, variables)
    devices = np.asarray(jax.devices())
    for mesh, spec in (
        (Mesh(devices[:2].reshape(1, 2), ("x", "y")), P(("x", "y"))),
        (Mesh(devices[:6].reshape(3, 2), ("x", "y")), P("y")),
    ):
        run = jax.jit(
            jax.shard_map(look_up, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        )
        assert_same(run(processed, variables), expected)

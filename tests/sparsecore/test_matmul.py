"""What lookup and update leave alone, and the meshes they run under; `test_random_models` holds their numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from rsembed.sparsecore import embedding, embedding_spec, table_stacking
from tests.sparsecore import small_world
from tests.sparsecore.case_specs import on_devices, variables_of


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
        moved = np.flatnonzero((np.asarray(stack.table) != np.asarray(warm[name].table)).any(axis=1))
        # Rows 0 to 3 of both tables were looked up: their momentum moves them although the gradient is zero.
        assert moved.size == 8
        for new, old in zip(stack.slot, warm[name].slot, strict=True):
            assert np.flatnonzero((np.asarray(new) != np.asarray(old)).any(axis=1)).tolist() == moved.tolist()


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
        activations = embedding.sparse_dense_matmul(processed, variables, specs, global_device_count=2)
        return activations, embedding.sparse_dense_matmul_grad(gradients, processed, variables, specs)

    run = on_devices(run, 2)
    jax.tree.map(np.testing.assert_array_equal, run(dirty, variables, gradients), run(processed, variables, gradients))


def test_limits_unknown_means_a_full_buffer():
    specs, variables, processed, _ = drawn(2, 1)
    bare = embedding.PreprocessedInput(processed.sparse_dense_matmul_input, processed.num_minibatches)
    run = on_devices(lambda p, v: embedding.sparse_dense_matmul(p, v, specs, global_device_count=2), 2)
    jax.tree.map(np.testing.assert_array_equal, run(processed, variables), run(bare, variables))


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
        run = jax.jit(jax.shard_map(look_up, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
        jax.tree.map(np.testing.assert_array_equal, run(processed, variables), expected)


def test_a_shard_map_may_check_what_varies_over_the_mesh():
    specs, variables, processed, gradients = drawn(4, 1)

    def step(processed, variables, gradients):
        options = {"global_device_count": 4}
        activations = embedding.sparse_dense_matmul(processed, variables, specs, **options)
        return activations, embedding.sparse_dense_matmul_grad(gradients, processed, variables, specs, **options)

    expected = on_devices(step, 4)(processed, variables, gradients)
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("x",))
    checked = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=True))
    jax.tree.map(np.testing.assert_array_equal, checked(processed, variables, gradients), expected)


def test_row_limits_leave_padding_and_untouched_rows_alone():
    specs, variables, processed, gradients = drawn(1, 1, highest=3, is_stacked=False)
    limits = {"first": (0.5, None), "second": (None, -0.5)}
    updated = jax.jit(
        lambda p, v: embedding.sparse_dense_matmul_grad(gradients, p, v, specs, embedding_var_limits=limits)
    )(processed, variables)
    first, second = (np.asarray(updated[name].table) for name in ("first", "second"))
    assert (first[:3, : small_world.DIM] >= 0.5).all() and not first[:, small_world.DIM :].any()
    assert (second[:3, : small_world.DIM] <= -0.5).all() and not second[:, small_world.DIM :].any()
    np.testing.assert_array_equal(first[3:], variables["first"].table[3:])
    assert jax.tree.map(jnp.shape, updated) == jax.tree.map(jnp.shape, variables)


def test_whole_row_rules_refuse_stacks_of_different_dims():
    rule = embedding_spec.RowWiseAdagradOptimizerSpec(0.5)
    tables = {name: {"vocabulary_size": 8, "embedding_dim": dim} for name, dim in (("narrow", 4), ("wide", 12))}
    specs = small_world.feature_specs(tables, {"a": ("narrow", 4), "b": ("wide", 4)}, optimizer=rule)
    table_stacking.stack_tables(specs, ["narrow", "wide"], 1, 1)
    processed, _ = small_world.preprocess(specs, dict.fromkeys(specs, np.zeros((4, 1), int)))
    gradients = {"a": np.ones((4, 4), np.float32), "b": np.ones((4, 12), np.float32)}
    table, slot = np.zeros((16, 16), np.float32), np.zeros((16, 1), np.float32)
    variables = {"narrow_wide": embedding.EmbeddingVariables(table, (slot,))}
    with pytest.raises(ValueError, match=r"'rowwise_adagrad' works on whole rows, .*'narrow': 4, 'wide': 12"):
        jax.jit(lambda *given: embedding.sparse_dense_matmul_grad(*given, specs))(gradients, processed, variables)

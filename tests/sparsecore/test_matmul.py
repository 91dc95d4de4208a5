"""Lookup and update against dense loops, on any number of devices, cores and stacks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from rsembed.sparsecore import embedding, embedding_spec, table_stacking
from tests.sparsecore.case_specs import logical_tables, on_devices, variables_of

TABLES = {"first": 20, "second": 50}
FEATURES = {"a": ("first", 24), "b": ("second", 12), "c": ("first", 12)}
DIM = 5
VALUE_TOLERANCE = 2e-5
"""Sums of a few dozen float32 products."""
OPTIMIZERS = {
    "sgd": embedding_spec.SGDOptimizerSpec(0.5),
    "adagrad": embedding_spec.AdagradOptimizerSpec(0.5),
    "adam": embedding_spec.AdamOptimizerSpec(0.1),
    "rowwise_adagrad": embedding_spec.RowWiseAdagradOptimizerSpec(0.5),
    "custom": embedding_spec.CustomOptimizerSpec(0.1, lambda g, w, lr: w - lr * g / (1 + jnp.linalg.norm(g))),
}


def specs_for(devices, cores, *, combiner="sum", optimizer="sgd", is_stacked=True, **fields):
    tables = {
        name: embedding_spec.TableSpec(
            name=name,
            vocabulary_size=vocabulary,
            embedding_dim=DIM,
            combiner=combiner,
            optimizer=OPTIMIZERS[optimizer],
            **fields,
        )
        for name, vocabulary in TABLES.items()
    }
    specs = {
        name: embedding_spec.FeatureSpec(name=name, table_spec=tables[table], output_shape=(batch, DIM))
        for name, (table, batch) in FEATURES.items()
    }
    if is_stacked:
        table_stacking.auto_stack_tables(specs, devices, cores, rotation=1)
    embedding.prepare_feature_specs_for_training(specs, devices, cores)
    return specs


def draw(seed):
    """Tables, ids (with duplicates), weights and activation gradients."""
    rng = np.random.default_rng(seed)
    tables = {name: rng.normal(size=(vocabulary, DIM)).astype(np.float32) for name, vocabulary in TABLES.items()}
    ids = {name: rng.integers(0, TABLES[table], (batch, 3)) for name, (table, batch) in FEATURES.items()}
    weights = {name: rng.uniform(0.1, 2, rows.shape).astype(np.float32) for name, rows in ids.items()}
    gradients = {name: rng.normal(size=(batch, DIM)).astype(np.float32) for name, (_, batch) in FEATURES.items()}
    return tables, ids, weights, gradients


def gains(combiner, weights):
    weights = weights.astype(np.float64)
    divisor = {"sum": 1.0, "mean": weights.sum(1, keepdims=True), "sqrtn": np.sqrt((weights**2).sum(1, keepdims=True))}
    return weights / divisor[combiner]


def expected_activations(tables, ids, weights, combiner):
    return {
        name: np.einsum("bk,bkd->bd", gains(combiner, weights[name]), tables[FEATURES[name][0]][ids[name]])
        for name in ids
    }


def expected_update(tables, ids, weights, gradients, combiner, optimizer, step):
    """One step of the row rule for every touched row, with its gradients added in float64."""
    updated = {}
    for name, table in tables.items():
        total = np.zeros(table.shape, np.float64)
        touched = np.zeros(len(table), bool)
        for feature, rows in ids.items():
            if FEATURES[feature][0] == name:
                terms = gains(combiner, weights[feature])[..., None] * gradients[feature][:, None]
                np.add.at(total, rows, terms)
                touched[rows] = True
        stepped = stepped_rows(optimizer)(table, total.astype(np.float32), step)
        updated[name] = np.where(touched[:, None], stepped, table)
    return updated


@functools.cache
def stepped_rows(optimizer):
    """The rule for all rows at once, so that one program serves whichever were touched."""
    rule = OPTIMIZERS[optimizer]
    return jax.jit(
        lambda rows, total, step: rule.step_rows(rows, rule.init_slots(rows), total, rule.get_hyperparameters(step))[0]
    )


@functools.cache
def compiled(devices, cores, combiner, optimizer, is_stacked):
    specs = specs_for(devices, cores, combiner=combiner, optimizer=optimizer, is_stacked=is_stacked)

    def look_up_and_update(processed, variables, gradients):
        activations = embedding.sparse_dense_matmul(processed, variables, specs, global_device_count=devices)
        updated = embedding.sparse_dense_matmul_grad(
            gradients, processed, variables, specs, global_device_count=devices, step=3
        )
        return activations, updated

    return specs, on_devices(look_up_and_update, devices)


LAYOUTS = [
    (1, 1, "sum", "sgd", True),
    (1, 4, "mean", "adagrad", False),
    (2, 2, "sqrtn", "adam", True),
    (3, 1, "mean", "rowwise_adagrad", True),
    (4, 1, "sum", "custom", False),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout)))
@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 2**31))
def test_lookup_and_update_equal_dense_loops(layout, seed):
    devices, cores, combiner, optimizer, _ = layout
    specs, run = compiled(*layout)
    tables, ids, weights, gradients = draw(seed)
    processed, _ = embedding.preprocess_sparse_dense_matmul_input(
        ids, weights, specs, devices, devices, num_sc_per_device=cores
    )
    spec = {"devices": devices, "cores": cores}
    variables = variables_of(specs, spec, tables)
    activations, updated = run(processed, variables, gradients)
    for name, wanted in expected_activations(tables, ids, weights, combiner).items():
        np.testing.assert_allclose(activations[name], wanted, atol=VALUE_TOLERANCE)
    after = logical_tables(specs, spec, {name: stack.table for name, stack in updated.items()})
    for name, wanted in expected_update(tables, ids, weights, gradients, combiner, optimizer, 3).items():
        np.testing.assert_allclose(after[name], wanted, atol=VALUE_TOLERANCE)
    for stack in updated.values():
        assert not np.asarray(stack.table)[:, DIM:].any(), "padding columns must stay zero"


def test_untouched_rows_and_slots_keep_their_bits():
    specs = specs_for(1, 2, optimizer="adam")
    tables, ids, _, gradients = draw(0)
    ids = {name: rows % 4 for name, rows in ids.items()}
    processed, _ = embedding.preprocess_sparse_dense_matmul_input(ids, None, specs, 1, 1, num_sc_per_device=2)
    before = variables_of(specs, {"devices": 1, "cores": 2}, tables)
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
    specs = specs_for(2, 2)
    tables, ids, _, gradients = draw(1)
    processed, _ = embedding.preprocess_sparse_dense_matmul_input(ids, None, specs, 2, 2, num_sc_per_device=2)
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
    variables = variables_of(specs, {"devices": 2, "cores": 2}, tables)

    def run(processed, variables, gradients):
        activations = embedding.sparse_dense_matmul(processed, variables, specs, global_device_count=2)
        return activations, embedding.sparse_dense_matmul_grad(gradients, processed, variables, specs)

    run = on_devices(run, 2)
    jax.tree.map(np.testing.assert_array_equal, run(dirty, variables, gradients), run(processed, variables, gradients))


def test_limits_unknown_means_a_full_buffer():
    specs = specs_for(2, 1)
    tables, ids, _, _ = draw(2)
    processed, _ = embedding.preprocess_sparse_dense_matmul_input(ids, None, specs, 2, 2, num_sc_per_device=1)
    bare = embedding.PreprocessedInput(processed.sparse_dense_matmul_input, processed.num_minibatches)
    variables = variables_of(specs, {"devices": 2, "cores": 1}, tables)
    run = on_devices(lambda p, v: embedding.sparse_dense_matmul(p, v, specs, global_device_count=2), 2)
    jax.tree.map(np.testing.assert_array_equal, run(processed, variables), run(bare, variables))


def test_the_devices_may_span_several_mesh_axes_or_one_of_several():
    specs = specs_for(2, 1)
    tables, ids, _, _ = draw(3)
    processed, _ = embedding.preprocess_sparse_dense_matmul_input(ids, None, specs, 2, 2, num_sc_per_device=1)
    variables = variables_of(specs, {"devices": 2, "cores": 1}, tables)

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
    specs = specs_for(4, 1)
    tables, ids, _, gradients = draw(6)
    processed, _ = embedding.preprocess_sparse_dense_matmul_input(ids, None, specs, 4, 4, num_sc_per_device=1)
    variables = variables_of(specs, {"devices": 4, "cores": 1}, tables)

    def step(processed, variables, gradients):
        options = {"global_device_count": 4}
        activations = embedding.sparse_dense_matmul(processed, variables, specs, **options)
        return activations, embedding.sparse_dense_matmul_grad(gradients, processed, variables, specs, **options)

    expected = on_devices(step, 4)(processed, variables, gradients)
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("x",))
    checked = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=True))
    jax.tree.map(np.testing.assert_array_equal, checked(processed, variables, gradients), expected)


def test_row_limits_leave_padding_and_untouched_rows_alone():
    specs = specs_for(1, 1, optimizer="sgd", is_stacked=False)
    tables, ids, _, gradients = draw(4)
    ids = {name: rows % 3 for name, rows in ids.items()}
    processed, _ = embedding.preprocess_sparse_dense_matmul_input(ids, None, specs, 1, 1, num_sc_per_device=1)
    limits = {"first": (0.5, None), "second": (None, -0.5)}
    variables = variables_of(specs, {"devices": 1, "cores": 1}, tables)
    updated = jax.jit(
        lambda p, v: embedding.sparse_dense_matmul_grad(gradients, p, v, specs, embedding_var_limits=limits)
    )(processed, variables)
    first, second = (np.asarray(updated[name].table) for name in ("first", "second"))
    assert (first[:3, :DIM] >= 0.5).all() and not first[:, DIM:].any()
    assert (second[:3, :DIM] <= -0.5).all() and not second[:, DIM:].any()
    np.testing.assert_array_equal(first[3:20, :DIM], tables["first"][3:])


def test_whole_row_rules_refuse_stacks_of_different_dims():
    tables = [
        embedding_spec.TableSpec(
            name=name, vocabulary_size=8, embedding_dim=dim, optimizer=OPTIMIZERS["rowwise_adagrad"]
        )
        for name, dim in (("narrow", 4), ("wide", 12))
    ]
    specs = [
        embedding_spec.FeatureSpec(name=f"of_{table.name}", table_spec=table, input_shape=(4, 1)) for table in tables
    ]
    table_stacking.stack_tables(specs, ["narrow", "wide"], 1, 1)
    processed, _ = embedding.preprocess_sparse_dense_matmul_input(
        [np.zeros((4, 1), int)] * 2, None, specs, 1, 1, num_sc_per_device=1
    )
    gradients = [np.ones((4, 4), np.float32), np.ones((4, 12), np.float32)]
    table, slot = np.zeros((16, 16), np.float32), np.zeros((16, 1), np.float32)
    variables = {"narrow_wide": embedding.EmbeddingVariables(table, (slot,))}
    with pytest.raises(ValueError, match=r"'rowwise_adagrad' works on whole rows, .*'narrow': 4, 'wide': 12"):
        jax.jit(lambda *given: embedding.sparse_dense_matmul_grad(*given, specs))(gradients, processed, variables)


def test_half_precision_tables_round_stochastically_when_told():
    specs = specs_for(1, 1, dtype="bfloat16", stochastic_rounding=True)
    tables, ids, _, gradients = draw(5)
    processed, _ = embedding.preprocess_sparse_dense_matmul_input(ids, None, specs, 1, 1, num_sc_per_device=1)
    variables = jax.tree.map(
        lambda array: np.asarray(array).astype(jnp.bfloat16), variables_of(specs, {"devices": 1, "cores": 1}, tables)
    )

    @jax.jit
    def update(processed, variables, step):
        return embedding.sparse_dense_matmul_grad(gradients, processed, variables, specs, step=step)

    (one,), (same,), (other,) = (update(processed, variables, jnp.int32(step)).values() for step in (0, 0, 1))
    assert one.table.dtype == jnp.bfloat16
    np.testing.assert_array_equal(one.table, same.table)
    assert (np.asarray(one.table) != np.asarray(other.table)).any()
    with pytest.raises(ValueError, match="rounds stochastically, which needs a new key every step"):
        jax.jit(lambda *given: embedding.sparse_dense_matmul_grad(*given, specs))(gradients, processed, variables)

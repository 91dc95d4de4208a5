"""Calls in the forms that published programs use, compared with numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict
from jax.sharding import NamedSharding, PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

from rsembed.sparsecore import embedding, embedding_spec, table_stacking, utils
from rsembed.sparsecore.linen import embed as linen_embed
from rsembed.sparsecore.mesh_lookup import next_step, step_counter, step_number
from rsembed.sparsecore.nnx import embed as nnx_embed
from tests.sparsecore import small_world
from tests.world import assert_same, made_mesh, mesh_of

DIM, BATCH, CORES, RATE = 4, 8, 2, 0.5
ROWS = {"t0": 20, "t1": 21}
IDS = {"f0": np.arange(16).reshape(8, 2), "f1": np.arange(5, 21).reshape(8, 2)}


def new_features(**fields):
    fields = {"embedding_dim": DIM, "optimizer": embedding_spec.SGDOptimizerSpec(RATE)} | fields
    return small_world.feature_specs(ROWS, {"f0": ("t0", BATCH), "f1": ("t1", BATCH)}, **fields)


def placed():
    features = new_features()
    embedding.auto_stack_tables(
        feature_specs=features, global_device_count=1, num_sc_per_device=CORES
    )
    return features


def values(dim=DIM):
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(rows, dim)).astype(np.float32) for name, rows in ROWS.items()}


def variables_of(features, tables):
    """The stack's table in the form `(table,)`, which a published program may use."""
    record = embedding.create_proto_from_feature_specs(features, 1, CORES)
    stacked = table_stacking.stack_and_shard_feature_tables(tables, record)
    return {name: (table,) for name, table in stacked.items()}


# Stacking


@pytest.mark.parametrize("sequence", [list, tuple])
def test_a_spec_that_is_listed_twice_has_one_place(sequence):
    (twice, other), (alone, beside) = (list(new_features().values()) for _ in range(2))
    embedding.auto_stack_tables(sequence([twice, other, twice]), 1, CORES)
    embedding.auto_stack_tables([alone, beside], 1, CORES)
    assert [twice, other] == [alone, beside]
    with pytest.raises(ValueError, match="feature names must be unique"):
        embedding.auto_stack_tables([alone, *new_features().values()], 1, CORES)


def test_a_device_without_sparsecores_counts_as_a_v5p_or_as_the_environment_says(monkeypatch):
    def num_shards():
        features = new_features()
        embedding.prepare_feature_specs_for_training(features, 2)
        return features["f0"].table_spec.stacked_table_spec.num_shards

    assert (utils.num_sparsecores_per_device(jax.devices()[0]), num_shards()) == (4, 8)
    monkeypatch.setenv("RSEMBED_CORES_PER_DEVICE", "2")
    assert (utils.num_sparsecores_per_device(), num_shards()) == (2, 4)


def test_the_limits_of_the_runtime_module_come_fourth_and_fifth_and_hold_whatever_tables_declare(
    caplog,
):
    features = new_features(max_ids_per_partition=300)
    embedding.auto_stack_tables(
        features, 1, CORES, lambda name, samples: samples, lambda name, samples: 7, False
    )
    stack = features["f1"].table_spec.stacked_table_spec
    assert (stack.max_ids_per_partition, stack.max_unique_ids_per_partition) == (2 * BATCH, 7)
    assert caplog.records == []


@pytest.mark.parametrize(("way", "name"), [("auto", "t0_t1"), ("named", "both")])
def test_a_stack_of_several_tables_has_the_published_default_limit_and_says_what_it_ignores(
    way, name, caplog
):
    features = new_features(max_ids_per_partition=300)
    if way == "auto":
        embedding.auto_stack_tables(features, 1, CORES)
    else:
        table_stacking.stack_tables(features, ["t0", "t1"], 1, CORES, stack_name=name)
    stack = features["f1"].table_spec.stacked_table_spec
    assert (stack.max_ids_per_partition, stack.max_unique_ids_per_partition) == (256, 256)
    (message,) = caplog.messages
    assert f"stack {name!r} has max_ids_per_partition=256" in message
    assert "ignored: {'t0': 300, 't1': 300}" in message
    assert (
        "stack_to_max_ids_per_partition, or after stacking by update_preprocessing_parameters"
        in message
    )


def test_a_stack_of_one_table_keeps_its_limit(caplog):
    features = new_features(max_ids_per_partition=300)
    table_stacking.stack_tables(features, ["t0"], 1, CORES)
    assert features["f0"].table_spec.stacked_table_spec.max_ids_per_partition == 300
    assert caplog.records == []


def test_sizes_and_places_of_tables_follow_their_formulas():
    dims, rows = table_stacking.round_up_dim_and_vocab_size(
        embedding.get_table_specs(new_features()), 4
    )
    assert (dims, rows) == ({"t0": 8, "t1": 8}, {"t0": 32, "t1": 32})
    settings = table_stacking.compute_table_to_setting_in_stack(
        "s", ["t1", "t0"], 8, rows, num_shards=4, rotation=3
    )
    setting = embedding_spec.TableSettingInStack
    assert settings == {"t1": setting("s", 32, 8, 0, 0), "t0": setting("s", 32, 8, 8, 3)}


@pytest.mark.parametrize(("dim", "is_on_mesh"), [(DIM, False), (1, False), (DIM, True)])
def test_tables_are_stacked_by_a_record_and_come_back(dim, is_on_mesh):
    features = new_features(embedding_dim=dim)
    table_stacking.stack_tables(features, ["t1", "t0"], 2, 2, rotation=3)
    record, tables = embedding.create_proto_from_feature_specs(features, 2, 2), values(dim)
    arrays = {
        name: jnp.asarray(table if dim > 1 else table[:, 0]) for name, table in tables.items()
    }
    if is_on_mesh:
        arrays["t0"] = jax.device_put(arrays["t0"], NamedSharding(made_mesh(4), P("x")))
    expected, positions = np.zeros((64, 8), np.float32), []
    for name, first, rotation in (("t1", 0, 0), ("t0", 8, 3)):
        for row, vector in enumerate(tables[name]):
            positions.append((row + rotation) % 4 * 16 + first + row // 4)
            expected[positions[-1], :dim] = vector
    stacked = table_stacking.stack_and_shard_feature_tables(arrays, record, delete_input=True)
    assert_array_equal(stacked["t1_t0"], expected)
    assert all(table.is_deleted() for table in arrays.values())
    ids = {name: list(range(rows)) for name, rows in ROWS.items()}
    assert table_stacking.get_row_ids_in_stacked_tables(record, ids) == {"t1_t0": positions}
    rows = table_stacking.compute_physical_row_ids(4, 64, 3, 8, np.arange(ROWS["t0"]))
    assert rows.tolist() == positions[ROWS["t1"] :]
    by_shard = {"t1_t0": stacked["t1_t0"].reshape(4, 16, 8)}
    assert_same(table_stacking.unstack_and_unshard_stacked_tables(by_shard, record), tables)
    back = table_stacking.unstack_and_unshard_stacked_tables(stacked, record, donate=True)
    assert_same(back, tables)
    assert stacked["t1_t0"].is_deleted()


def test_a_table_or_stack_that_is_refused_costs_none_of_the_others():
    features = small_world.place(new_features(), 1, CORES)
    record = embedding.create_proto_from_feature_specs(features, 1, CORES)
    arrays = jax.tree.map(jnp.asarray, values())
    wrong = {"t1": jnp.zeros((3, 2))}
    with pytest.raises(ValueError, match=r"table 't1': got shape \(3, 2\)"):
        table_stacking.stack_and_shard_feature_tables(arrays | wrong, record, delete_input=True)
    assert not arrays["t0"].is_deleted()
    stacked = table_stacking.stack_and_shard_feature_tables(arrays, record)
    with pytest.raises(ValueError, match=r"stack 't1': got shape \(3, 2\)"):
        table_stacking.unstack_and_unshard_stacked_tables(stacked | wrong, record, donate=True)
    assert not stacked["t0"].is_deleted()


# Batches, lookups and updates

CONTAINERS = {
    "frozen specs, plain batch": (FrozenDict, dict),
    "plain specs, frozen batch": (dict, FrozenDict),
    "listed specs, tuple of a batch": (
        lambda tree: list(tree.values()),
        lambda tree: tuple(tree.values()),
    ),
}


@pytest.mark.parametrize("case", CONTAINERS)
def test_containers_are_matched_by_path(case):
    of_specs, of_batch = CONTAINERS[case]
    tables, features = values(), of_specs(placed())
    weights = {name: np.full(ids.shape, 2.0, np.float32) for name, ids in IDS.items()}
    batch = small_world.preprocess(features, of_batch(IDS), of_batch(weights))[0]
    arguments = (batch, variables_of(features, tables), features)
    activations = embedding.tpu_sparse_dense_matmul(*arguments, global_device_count=1)
    assert jax.tree.structure(activations) == jax.tree.structure(features)
    actual = jax.tree.leaves(activations)
    for output, table, ids in zip(actual, tables.values(), IDS.values(), strict=True):
        assert_allclose(output, 2 * table[ids].sum(axis=1), rtol=1e-6)
        table[ids.ravel()] -= RATE * 2
    gradients = of_batch({name: jnp.ones((BATCH, DIM)) for name in IDS})
    after = embedding.tpu_sparse_dense_matmul_grad(gradients, *arguments, global_device_count=1)
    actual = table_stacking.unshard_and_unstack_tables(
        embedding.get_table_specs(features), after, CORES
    )
    for name, table in tables.items():
        assert_allclose(actual[name][0], table, rtol=1e-5, atol=1e-6)


def test_activations_have_the_dtype_of_the_table():
    features = placed()
    halves = {name: jnp.asarray(table, jnp.bfloat16) for name, table in values().items()}
    batch = small_world.preprocess(features, IDS)[0].sparse_dense_matmul_input
    arguments = (batch, variables_of(features, halves), features)
    actual = embedding.tpu_sparse_dense_matmul(*arguments, global_device_count=1)
    expected = np.asarray(halves["t0"], np.float32)[IDS["f0"]].sum(axis=1)
    assert_array_equal(actual["f0"], jnp.asarray(expected, jnp.bfloat16))
    after = embedding.tpu_sparse_dense_matmul_grad(actual, *arguments, global_device_count=1)
    assert after["t0_t1"][0].dtype == jnp.bfloat16


# Layers


def test_layers_tell_mesh_and_cores():
    features = placed()
    mesh = mesh_of(1)
    linen = linen_embed.SparseCoreEmbed(
        feature_specs=features, sharding_axis="x", mesh=mesh, num_sc_per_device=-1
    )
    layers = [linen, nnx_embed.SparseCoreEmbed(features, "x", mesh, nnx.Rngs(0))]
    for layer in layers:
        assert (layer.mesh, layer.num_sc_per_device) == (mesh, CORES)
    many = small_world.place(new_features(), jax.device_count())
    assert linen_embed.SparseCoreEmbed(many).mesh.shape == {
        "sparsecore_sharding": jax.device_count()
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_cast_of_all_parameters_leaves_the_step_exact(dtype):
    for step in (0, 255, 256, 65_535, 65_536, 2**24 - 2):
        counter = step_counter(step).astype(dtype)
        assert int(step_number(counter)) == step
        after = next_step(counter)
        assert after.dtype == dtype and int(step_number(after)) == step + 1


def test_the_backward_pass_of_nnx_is_what_autodiff_calls():
    layer = nnx_embed.SparseCoreEmbed(placed(), "x", mesh_of(1), nnx.Rngs(0))
    inputs, _ = small_world.preprocess(layer.feature_specs, IDS)
    by_autodiff = nnx.jit(nnx.grad(lambda layer: sum(map(jnp.sum, layer(inputs).values()))))(layer)
    state = nnx.state(layer, nnx.Param)

    @nnx.jit
    def backward(layer, state):
        gradients = {name: jnp.ones((BATCH, DIM)) for name in IDS}
        return nnx_embed.embedding_lookup_bwd(
            (layer, inputs, None), ((state, None, None), gradients)
        )

    updated, *others = backward(layer, state)
    assert others == [None, None]
    assert_same(nnx.to_pure_dict(updated), nnx.to_pure_dict(by_autodiff))
    assert float(step_number(layer.step.get_value())) == 0
    # Published programs pass only the embedding table.
    alone, *_ = backward(layer, {"embedding_table": state["embedding_table"]})
    assert_same(alone, {"embedding_table": updated["embedding_table"]})

"""Calls in the forms that published programs use, each against a few lines of numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from flax.core import FrozenDict, meta
from jax.sharding import NamedSharding, PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

from rsembed.sparsecore import embedding, embedding_spec, table_stacking, utils
from rsembed.sparsecore.linen import embed as linen_embed
from rsembed.sparsecore.mesh_lookup import next_step, step_counter, step_number
from rsembed.sparsecore.nnx import embed as nnx_embed
from tests.sparsecore import small_world
from tests.world import assert_same, mesh_of

DIM, BATCH, CORES, RATE = 4, 8, 2, 0.5
ROWS = {"t0": 20, "t1": 21}
IDS = {"f0": np.arange(16).reshape(8, 2), "f1": np.arange(5, 21).reshape(8, 2)}


def new_features(**fields):
    fields = {"embedding_dim": DIM, "optimizer": embedding_spec.SGDOptimizerSpec(RATE)} | fields
    return small_world.feature_specs(ROWS, {"f0": ("t0", BATCH), "f1": ("t1", BATCH)}, **fields)


def placed(out=DIM):
    features = {
        name: dataclasses.replace(own, output_shape=(BATCH, out))
        for name, own in new_features().items()
    }
    embedding.auto_stack_tables(
        feature_specs=features, global_device_count=1, num_sc_per_device=CORES
    )
    return features


def values(dim=DIM):
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(rows, dim)).astype(np.float32) for name, rows in ROWS.items()}


def variables_of(features, tables):
    """The stack's table as a published program may hold it, `(table,)`."""
    record = embedding.create_proto_from_feature_specs(features, 1, CORES)
    return {
        name: (table,)
        for name, table in table_stacking.stack_and_shard_feature_tables(tables, record).items()
    }


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


def test_the_limits_of_the_runtime_module_come_fourth_and_fifth_and_hold_whatever_tables_declare():
    features = new_features(max_ids_per_partition=300)
    embedding.auto_stack_tables(
        features, 1, CORES, lambda name, samples: samples, lambda name, samples: 7, False
    )
    stack = features["f1"].table_spec.stacked_table_spec
    assert (stack.max_ids_per_partition, stack.max_unique_ids_per_partition) == (2 * BATCH, 7)


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
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"stack {name!r} has max_ids_per_partition=256" in record.message
    assert "ignored: {'t0': 300, 't1': 300}" in record.message
    assert (
        "stack_to_max_ids_per_partition, or after stacking by update_preprocessing_parameters"
        in record.message
    )


@pytest.mark.parametrize("table_names", [["t0"], ["t0", "t1"]])
def test_no_warning_tells_of_limits_that_are_kept_or_chosen(table_names, caplog):
    features = new_features(max_ids_per_partition=300)
    chosen = (
        {}
        if len(table_names) == 1
        else {"stack_to_max_ids_per_partition": lambda name, samples: 40}
    )
    table_stacking.stack_tables(features, table_names, 1, CORES, **chosen)
    wanted = 300 if len(table_names) == 1 else 40
    assert features["f0"].table_spec.stacked_table_spec.max_ids_per_partition == wanted
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


@pytest.mark.parametrize(("dim", "mesh"), [(DIM, ()), (1, ()), (DIM, (4, 1))])
def test_tables_are_stacked_by_a_record_and_come_back(dim, mesh):
    features = new_features(embedding_dim=dim)
    table_stacking.stack_tables(features, ["t1", "t0"], 2, 2, rotation=3)
    record, tables = embedding.create_proto_from_feature_specs(features, 2, 2), values(dim)
    given = {name: jnp.asarray(table if dim > 1 else table[:, 0]) for name, table in tables.items()}
    if mesh:  # of explicit axes, which JAX makes by default
        given["t0"] = jax.device_put(
            given["t0"], NamedSharding(jax.make_mesh(mesh, ("x", "y")), P(("x", "y")))
        )
    stacked = table_stacking.stack_and_shard_feature_tables(given, record)
    expected = np.zeros((64, 8), np.float32)
    for name, first, rotation in (("t1", 0, 0), ("t0", 8, 3)):
        for row, vector in enumerate(tables[name]):
            expected[(row + rotation) % 4 * 16 + first + row // 4, :dim] = vector
    assert_array_equal(stacked["t1_t0"], expected)
    by_spec = table_stacking.stack_and_shard_tables(
        embedding.get_table_specs(features), given, 4, pad_value=0.0
    )
    assert_array_equal(by_spec["t1_t0"].reshape(64, 8), expected)
    back = table_stacking.unstack_and_unshard_stacked_tables(
        {"t1_t0": stacked["t1_t0"].reshape(4, 16, 8)}, record
    )
    assert_same(back, tables)
    assert (
        table_stacking.unstack_and_unshard_stacked_tables(stacked, record, donate=True).keys()
        == tables.keys()
    )
    assert stacked["t1_t0"].is_deleted()
    table_stacking.stack_and_shard_feature_tables(given, record, delete_input=True)
    assert all(table.is_deleted() for table in given.values())


def test_a_table_or_stack_that_is_refused_costs_none_of_the_others():
    features = small_world.place(new_features(), 1, CORES)
    record, tables = embedding.create_proto_from_feature_specs(features, 1, CORES), values()
    given = jax.tree.map(jnp.asarray, tables)
    with pytest.raises(ValueError, match=r"table 't1': got shape \(3, 2\)"):
        table_stacking.stack_and_shard_feature_tables(
            given | {"t1": jnp.zeros((3, 2))}, record, delete_input=True
        )
    assert not given["t0"].is_deleted()
    stacked = table_stacking.stack_and_shard_feature_tables(given, record)
    first, last = (stack.stack_name for stack in record.stacked_table_specs)
    with pytest.raises(ValueError, match=rf"stack '{last}': got shape \(3, 8\)"):
        table_stacking.unstack_and_unshard_stacked_tables(
            stacked | {last: jnp.zeros((3, 8))}, record, donate=True
        )
    assert not stacked[first].is_deleted()
    back = table_stacking.unstack_and_unshard_stacked_tables(stacked, record, donate=True)
    assert_same(back, tables)


def test_the_format_of_a_table_is_its_sharding():
    sharding = NamedSharding(mesh_of(2), P("x", None))
    assert utils.embedding_table_format(sharding.mesh, sharding.spec) == sharding
    assert utils.embedding_table_format_with_sharding(sharding) is sharding


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
    variables = variables_of(features, tables)
    batch = small_world.preprocess(features, of_batch(IDS), of_batch(weights))[0]
    activations = embedding.tpu_sparse_dense_matmul(
        batch, variables, features, global_device_count=1
    )
    assert jax.tree.structure(activations) == jax.tree.structure(features)
    for found, (feature, ids) in zip(jax.tree.leaves(activations), IDS.items(), strict=True):
        assert_allclose(found, 2 * tables[f"t{feature[1]}"][ids].sum(axis=1), rtol=1e-6)
    gradients = of_batch({name: jnp.ones((BATCH, DIM)) for name in IDS})
    after = embedding.tpu_sparse_dense_matmul_grad(
        gradients, batch, variables, features, global_device_count=1
    )
    for feature, ids in IDS.items():
        tables[f"t{feature[1]}"][ids.ravel()] -= RATE * 2
    record = embedding.create_proto_from_feature_specs(features, 1, CORES)
    found = table_stacking.unstack_and_unshard_stacked_tables(
        {name: v[0] for name, v in after.items()}, record
    )
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, tables)


def test_activations_have_the_dtype_of_the_table():
    features, tables = placed(), values()
    halves = {name: jnp.asarray(table, jnp.bfloat16) for name, table in tables.items()}
    batch, variables = small_world.preprocess(features, IDS)[0], variables_of(features, halves)
    found = embedding.tpu_sparse_dense_matmul(
        batch.sparse_dense_matmul_input, variables, features, global_device_count=1
    )
    expected = np.asarray(halves["t0"], np.float32)[IDS["f0"]].sum(axis=1)
    assert_array_equal(found["f0"], jnp.asarray(expected, jnp.bfloat16))
    after = embedding.tpu_sparse_dense_matmul_grad(
        found, batch, variables, features, global_device_count=1
    )
    assert after["t0_t1"][0].dtype == jnp.bfloat16


def test_activations_and_gradients_may_be_taken_apart_and_stacked_by_hand():
    features, one = placed(), {"global_device_count": 1}
    batch, variables = small_world.preprocess(features, IDS)[0], variables_of(features, values())
    look_up = functools.partial(
        embedding.tpu_sparse_dense_matmul, batch, variables, features, **one
    )
    by_hand = embedding.unstack_embedding_activations(
        look_up(perform_unstacking=False), features, 1, CORES
    )
    assert_same(by_hand, look_up())
    gradients = {name: jnp.ones((BATCH, DIM)) for name in IDS}
    stacked = embedding.stack_embedding_gradients(gradients, features, CORES, 1)
    step = embedding.tpu_sparse_dense_matmul_grad
    found = step(stacked, batch, variables, features, perform_stacking=False, **one)
    assert_same(found, step(gradients, batch, variables, features, **one))


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


class Tower(nn.Module):
    layer: nn.Module

    def __call__(self, inputs):
        return self.layer(inputs)

    def apply_gradient(self, *args):
        return self.layer.apply_gradient(*args)


def test_what_apply_gradient_returns_can_be_indexed_by_path_and_stack():
    features = placed()
    layer = linen_embed.SparseCoreEmbed(features, "x", mesh_of(1))
    tower, inputs = Tower(layer), small_world.preprocess(features, IDS)[0]
    params = jax.jit(tower.init)(jax.random.key(0), inputs)["params"]
    before = meta.unbox(params)["layer"]["sc_embedding_variables"]["t0_t1"].table
    bound = layer.bind({"params": params["layer"]})
    assert bound.embedding_table["t0_t1"].table is before
    gradients = {name: jnp.zeros((BATCH, DIM)).at[0].set(1.0) for name in IDS}
    apply = jax.jit(
        lambda *args: tower.apply({"params": args[0]}, *args[1:], method="apply_gradient")
    )
    updated = apply(params, gradients, inputs)
    assert float(step_number(updated["layer/sc_embedding_step"])) == 1
    changed = np.flatnonzero(
        (updated["layer/sc_embedding_variables"]["t0_t1"].table != before).any(axis=1)
    )
    assert len(changed) == 4  # two ids of the first sample, of each of two features


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_cast_of_all_parameters_leaves_the_step_exact(dtype):
    for step in (0, 255, 256, 65_535, 65_536, 2**24 - 2):
        counter = step_counter(step).astype(dtype)
        assert int(step_number(counter)) == step
        after = next_step(counter)
        assert after.dtype == dtype and int(step_number(after)) == step + 1


def test_the_backward_pass_of_nnx_is_what_autodiff_calls():
    layer = nnx_embed.SparseCoreEmbed(placed(), "x", mesh_of(1), nnx.Rngs(0))
    inputs, gradients = (
        small_world.preprocess(layer.feature_specs, IDS)[0],
        {name: jnp.ones((BATCH, DIM)) for name in IDS},
    )
    by_autodiff = nnx.jit(
        nnx.grad(lambda layer: sum(jnp.sum(leaf) for leaf in layer(inputs).values()))
    )(layer)
    state = nnx.state(layer, nnx.Param)

    @nnx.jit
    def backward(layer, state, gradients):
        return nnx_embed.embedding_lookup_bwd(
            (layer, inputs, None), ((state, None, None), gradients)
        )

    updated, *others = backward(layer, state, gradients)
    assert others == [None, None]
    assert_same(nnx.to_pure_dict(updated), nnx.to_pure_dict(by_autodiff))
    assert float(step_number(layer.step.get_value())) == 0
    # As published programs do.
    alone, *_ = backward(layer, {"embedding_table": state["embedding_table"]}, gradients)
    assert_same(alone, {"embedding_table": updated["embedding_table"]})

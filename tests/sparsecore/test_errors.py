"""What users get wrong, and what they are told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rsembed.sparsecore import embedding, embedding_spec, table_stacking, utils
from rsembed.sparsecore.layout import cores_from_row_pointers
from rsembed.sparsecore.linen import embed
from rsembed.tt import TensorTrain


def specs_for(*, batch=8, devices=1, cores=2, is_prepared=True, **fields):
    fields = {"vocabulary_size": 32, "embedding_dim": 8} | fields
    table = embedding_spec.TableSpec(name="words", **fields)
    feature = embedding_spec.FeatureSpec(name="history", table_spec=table, input_shape=(batch, 2))
    if is_prepared:
        embedding.prepare_feature_specs_for_training([feature], devices, cores)
    return [feature]


def run(ids, weights=None, *, specs=None, local=1, devices=1, **options):
    return embedding.preprocess_sparse_dense_matmul_input(
        [ids], None if weights is None else [weights], specs or specs_for(), local, devices,
        **({"num_sc_per_device": 2} | options),
    )  # fmt: skip


def ids_with(value, dtype=np.int64):
    ids = np.zeros((8, 2), dtype)
    ids[5, 1] = value
    return ids


WRONG_IDS = {
    "too large": (
        ids_with(32),
        ValueError,
        r"feature 'history': id 32 in sample 5 .*table 'words' .*vocabulary_size=32",
    ),
    "negative": (ids_with(-1), ValueError, r"feature 'history': id -1 in sample 5"),
    "beyond 32 bits": (ids_with(2**32), ValueError, r"id 4294967296 in sample 5"),
    "beyond 63 bits": (ids_with(2**64 - 1, np.uint64), ValueError, r"id 18446744073709551615 in sample 5"),
    "beyond 64 bits": ([[2**70, 1]] * 8, ValueError, r"feature 'history': ids must be integers that fit 64 bits"),
    "float": (ids_with(1).astype(np.float32), TypeError, r"feature 'history': ids must be integers, got dtype float32"),
    "bool": (ids_with(1).astype(bool), TypeError, "got dtype bool"),
    "strings": ([["a", "b"]] * 8, TypeError, "ids must be integers"),
    "batch of another size": (np.zeros((9, 2), int), ValueError, r"got 9 samples, .*declared batch of 8 is 8"),
    "one dimension": (np.zeros(8, int), ValueError, r"got 1 dimensions"),
    "lists too shallow": ([0, 1, 2, 3, 4, 5, 6, 7], ValueError, "sample 0 is a single value"),
    "lists too deep": ([[[0]], [[1]]] * 4, ValueError, "sample 0 is nested 2 deep"),
    "lists of mixed depth": ([[0, [1]]] * 8, ValueError, "sample 0 mixes single ids and lists"),
}


@pytest.mark.parametrize("name", WRONG_IDS)
def test_wrong_ids_are_named(name):
    ids, error, message = WRONG_IDS[name]
    with pytest.raises(error, match=message):
        run(ids)


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (np.where(np.arange(16).reshape(8, 2) == 11, np.nan, 1.0), ValueError, "weight nan in sample 5 is not finite"),
        (np.full((8, 2), np.inf), ValueError, "weight inf in sample 0 is not finite"),
        (np.ones((8, 3)), ValueError, "one value per id, but their lengths differ .first at sample 0"),
        (np.ones((7, 2)), ValueError, "one value per id"),
        ([["a", "b"]] * 8, TypeError, "weights must be numbers"),
    ],
)
def test_wrong_weights_are_named(weights, error, message):
    with pytest.raises(error, match=message):
        run(np.zeros((8, 2), int), weights)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sharding_strategy": "DIV"}, ValueError, "unknown sharding strategy 'DIV'"),
        ({"num_sc_per_device": 0}, ValueError, "num_sc_per_device must be at least 1"),
        ({"local": 2}, ValueError, "local_device_count=2 must be between 1 and global_device_count=1"),
        ({"num_sc_per_device": 3}, ValueError, r"table 'words' was laid out for another number of shards"),
        ({"specs": specs_for(is_prepared=False)}, ValueError, "table 'words' has no place in a stack yet"),
        ({"specs": specs_for(batch=7)}, ValueError, r"feature 'history': .*7 samples cannot be cut into 2 equal parts"),
        ({"specs": specs_for(suggested_coo_buffer_size_per_device=5000)}, ValueError, "is above 1024"),
        ({"specs": specs_for(max_ids_per_partition=3)}, ValueError, r"tables words.*max_ids_per_partition=3, but core"),
        ({"specs": specs_for(max_unique_ids_per_partition=1)}, ValueError, "max_unique_ids_per_partition=1, but core"),
    ],
)
def test_wrong_settings_are_named(options, error, message):
    with pytest.raises(error, match=message):
        run(np.arange(16).reshape(8, 2) % 32, **options)


@pytest.mark.parametrize("features", [{"history": np.zeros((8, 2), int)}, [], [np.zeros((8, 2), int)] * 2])
def test_features_must_have_the_tree_of_the_specs(features):
    with pytest.raises(ValueError, match="features must have the tree structure of feature_specs"):
        embedding.preprocess_sparse_dense_matmul_input(features, None, specs_for(), 1, 1, num_sc_per_device=2)


def test_sparse_tensors_are_checked():
    def sparse(indices, values, shape=(8, 4)):
        return embedding.preprocess_sparse_dense_matmul_input_from_sparse_tensor(
            [np.asarray(indices)], [np.asarray(values)], [np.asarray(shape)], specs_for(), 1, 1, num_sc_per_device=2
        )

    with pytest.raises(ValueError, match="feature 'history': a sparse tensor has indices"):
        sparse([[0, 0, 0]], [1])
    with pytest.raises(ValueError, match="sparse index names sample 8"):
        sparse([[8, 0]], [1])
    with pytest.raises(ValueError, match="id 99 in sample 3"):
        sparse([[3, 0]], [99])


def test_what_cannot_be_partitioned_is_refused_early():
    with pytest.raises(ValueError, match="combiner 'none' has no partitioned layout"):
        specs_for(combiner="none")
    table = embedding_spec.TableSpec(name="words", vocabulary_size=8, embedding_dim=8)
    with pytest.raises(ValueError, match="feature 'f': declare the global batch"):
        embedding.prepare_feature_specs_for_training(embedding_spec.FeatureSpec(name="f", table_spec=table), 1, 1)


def test_stacking_names_what_is_in_the_way():
    def features():
        return [
            embedding_spec.FeatureSpec(
                name=f"f_{name}",
                table_spec=embedding_spec.TableSpec(name=name, vocabulary_size=8, embedding_dim=dim),
                input_shape=(8, 1),
            )
            for name, dim in (("a", 8), ("b", 16), ("c", 8))
        ]

    with pytest.raises(ValueError, match="adds 64 values"):
        table_stacking.stack_tables(features(), ["a", "b"], 1, 1, fail_on_excess_padding=True)
    stacked = features()
    table_stacking.stack_tables(stacked, ["a", "c"], 1, 1)
    with pytest.raises(ValueError, match="table 'c' is already in stack 'a_c'"):
        table_stacking.stack_tables(stacked, ["c", "b"], 1, 1)
    embedding.prepare_feature_specs_for_training(stacked, 1, 1)
    with pytest.raises(ValueError, match="was laid out for another number of shards"):
        embedding.compute_coo_buffer_size_per_device(stacked, 2, 2)
    with pytest.raises(ValueError, match=r"has 16 rows, but its given tables .*a.* have 8"):
        sharding = NamedSharding(Mesh(np.asarray(jax.devices()[:1]), ("x",)), P("x", None))
        embedding.init_embedding_variables(jax.random.key(0), {"a": stacked[0].table_spec}, sharding, 1)


def test_update_checks_gradients_and_limits():
    specs = specs_for()
    processed, _ = run(np.zeros((8, 2), int), specs=specs)
    variables = {"words": embedding.EmbeddingVariables(jnp.zeros((32, 8)), ())}
    update = embedding.sparse_dense_matmul_grad
    good = [jnp.ones((8, 8))]
    with pytest.raises(ValueError, match=r"must name every stack: got .*, need .*words"):
        update(good, processed, variables, specs, embedding_var_limits={})
    with pytest.raises(ValueError, match=r"minimum must be in \[-inf, inf\], got nan"):
        update(good, processed, variables, specs, embedding_var_limits={"words": (float("nan"), None)})
    with pytest.raises(ValueError, match="minimum 2 is above maximum 1"):
        update(good, processed, variables, specs, embedding_var_limits={"words": (2, 1)})
    with pytest.raises(ValueError, match=r"feature 'history': activation gradients have shape \(4, 8\)"):
        update([jnp.ones((4, 8))], processed, variables, specs, global_device_count=1)
    with pytest.raises(ValueError, match="tree structure of feature_specs"):
        update({"history": good[0]}, processed, variables, specs, global_device_count=1)
    with pytest.raises(ValueError, match="num_sc_per_device=4, but the input was preprocessed with 2"):
        update(good, processed, variables, specs, num_sc_per_device=4)


def test_several_devices_need_shard_map():
    specs = specs_for(devices=2, cores=1)
    processed, _ = run(np.zeros((8, 2), int), specs=specs, local=2, devices=2, num_sc_per_device=1)
    half = jax.tree.map(lambda array: array[: array.size // 2], processed)
    variables = {"words": embedding.EmbeddingVariables(jnp.zeros((16, 8)), ())}
    with pytest.raises(ValueError, match=r"inside jax.shard_map"):
        embedding.sparse_dense_matmul(half, variables, specs, global_device_count=2)
    with pytest.raises(ValueError, match="20 row pointers per device do not fit 3 devices"):
        cores_from_row_pointers(20, 3)


def test_layers_check_their_mesh_and_options():
    specs = specs_for()
    processed, _ = run(np.zeros((8, 2), int), specs=specs)
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("x",))

    def init(**fields):
        layer = embed.SparseCoreEmbed(feature_specs=specs, **({"mesh": mesh, "sharding_axis": "x"} | fields))
        return layer.init(jax.random.key(0), processed)

    with pytest.raises(ValueError, match=r"sharding_axis .*y.* is not in the mesh"):
        init(sharding_axis="y")
    with pytest.raises(ValueError, match="unknown sharding strategy"):
        init(table_sharding_strategy="DIV")
    with pytest.raises(ValueError, match=r"enable_minibatching=True, but the input was preprocessed with .*=False"):
        init(enable_minibatching=True)
    with pytest.raises(ValueError, match="needs a mesh"):
        init(mesh=None, sharding_axis=("x", "y"))


def test_one_table_is_dealt_evenly_or_not_at_all():
    with pytest.raises(ValueError, match="cannot be dealt to 4 shards evenly; pad it to 12 rows"):
        utils.shard_emb_table(np.zeros((10, 2), np.float32), 2, 2)


def test_a_table_with_a_storage_of_its_own_is_refused_and_not_laid_out_as_an_array():
    with pytest.raises(NotImplementedError, match=r"table 'words' has storage=TensorTrain.*EmbeddingCollection"):
        specs_for(storage=TensorTrain((4,)))
    (feature,) = specs_for(storage=TensorTrain((4,)), is_prepared=False)
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), P("x", None))
    with pytest.raises(NotImplementedError, match="storage=TensorTrain"):
        embedding.init_embedding_variables(jax.random.key(0), [feature.table_spec], sharding, 2)

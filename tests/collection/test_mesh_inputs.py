"""What a mesh accepts as a batch and as options, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import rsembed as rs
from rsembed.tt import TensorTrain


def collection_of(num_devices=2, combiner="sum", vocabulary_size=9, features=None, **options):
    table = rs.TableSpec(
        name="t", vocabulary_size=vocabulary_size, embedding_dim=4, combiner=combiner,
        initializer=jax.nn.initializers.ones, optimizer=options.pop("optimizer", rs.SGDOptimizerSpec(0.1)),
    )  # fmt: skip
    mesh = Mesh(np.asarray(jax.devices()[:num_devices]), ("x",))
    return rs.EmbeddingCollection(rs.FeatureSpec(name="f", table_spec=table), mesh=mesh, **options)


def test_lists_and_bags_become_padded_arrays_split_by_sample():
    collection = collection_of()
    rows = [[3, 1, 2], [], [4], [5, 0]]
    expected = [[3, 1, 2, -1], [-1] * 4, [4, -1, -1, -1], [5, 0, -1, -1]]
    ids = collection.prepare({"f": rows})["f"]
    np.testing.assert_array_equal(ids, expected)
    assert ids.dtype == jnp.int32
    assert [shard.data.shape for shard in ids.addressable_shards] == [(2, 4), (2, 4)]
    weights = [[1.0, 2.0, 3.0], [], [4.0], [5.0, 6.0]]
    ids, own = collection.prepare({"f": rs.Bags.from_lists(rows, weights)})["f"]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(own, [[1, 2, 3, 0], [0] * 4, [4, 0, 0, 0], [5, 6, 0, 0]])
    dense = np.asarray([[1], [2]])
    np.testing.assert_array_equal(collection.prepare({"f": dense})["f"], dense)
    assert collection.prepare({"f": np.asarray([1, 2])})["f"].shape == (2,)
    again = collection.prepare(collection.prepare({"f": rows}))["f"]
    np.testing.assert_array_equal(again, expected)


def test_many_bags_of_one_length_are_not_padded():
    def width(lengths):
        return collection_of().prepare({"f": [[1] * length for length in lengths]})["f"].shape[1]

    assert width([5] * 16) == 5
    assert width([5] * 15 + [4]) == 8  # lengths that change need few programs
    assert width([5, 5]) == 8  # a coincidence
    assert width([0] * 16) == 1


def test_an_empty_batch_gives_no_activations_and_changes_nothing():
    collection = collection_of()
    state = collection.init(jax.random.key(0))
    batch = collection.prepare({"f": np.zeros((0, 3), np.int32)})
    activations, statistics = collection.lookup(state, batch, return_statistics=True)
    assert activations["f"].shape == (0, 4)
    assert int(statistics.num_ids["f"]) == 0
    state = collection.update(state, batch, activations)
    np.testing.assert_array_equal(collection.tables(state)["t"], np.ones((9, 4)))


def test_ids_out_of_range_are_counted_over_all_devices():
    collection = collection_of(bounds_check="ignore")
    state = collection.init(jax.random.key(0))
    batch = {"f": np.asarray([[1, 9], [-1, 3], [-7, 2], [8, 8]])}
    activations, statistics = collection.lookup(state, batch, return_statistics=True)
    assert (int(statistics.num_ids["f"]), int(statistics.num_out_of_range["f"])) == (5, 2)
    np.testing.assert_array_equal(activations["f"][:, 0], [1, 1, 1, 2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"placement": "column", "optimizer": rs.RowWiseAdagradOptimizerSpec()},
            r"tables \['t'\] cannot be placed 'column': RowWiseAdagradOptimizerSpec steps whole rows",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        collection_of(**options)


def test_row_gradients_of_different_meshes_are_not_combined():
    parts = []
    for num_devices in (1, 2):
        collection = collection_of(num_devices, vocabulary_size=8)
        state = jax.eval_shape(collection.init, jax.random.key(0))
        ids, gradient = jax.ShapeDtypeStruct((2, 1), jnp.int32), jax.ShapeDtypeStruct((2, 4), jnp.float32)
        parts.append(
            jax.eval_shape(lambda s, i, g, c=collection: c.lookup_vjp(s, {"f": i})[1]({"f": g}), state, ids, gradient)
        )
    with pytest.raises(ValueError, match="different meshes"):
        rs.combine(*parts)


def test_a_stored_table_is_copied_and_stepped_alike_on_all_devices():
    table = rs.TableSpec(
        name="t", vocabulary_size=60, embedding_dim=8, storage=TensorTrain((2,)), optimizer=rs.AdagradOptimizerSpec()
    )
    feature = rs.FeatureSpec(name="f", table_spec=table)
    ids = np.random.default_rng(0).integers(-1, 60, (8, 3))
    d_activations = {"f": np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)}
    with pytest.raises(ValueError, match=r"table 't' is kept as TensorTrain.* cannot be placed 'row'"):
        rs.EmbeddingCollection(feature, mesh=Mesh(np.asarray(jax.devices()[:2]), ("x",)), placement={"t": "row"})
    results = []
    for mesh in (None, Mesh(np.asarray(jax.devices()[:2]), ("x",))):
        collection = rs.EmbeddingCollection(feature, mesh=mesh)
        state = collection.init(jax.random.key(0))
        state = jax.jit(collection.update)(state, collection.prepare({"f": ids}), d_activations)
        results.append((collection.tables(state), collection.slots(state)))
        for core in state.tables["t"] if mesh is not None else ():
            copies = [np.asarray(shard.data) for shard in core.addressable_shards]
            np.testing.assert_array_equal(copies[0], copies[1])
    for one, many in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(many, one, rtol=1e-5, atol=1e-6)

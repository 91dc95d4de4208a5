"""What a mesh accepts as a batch and as options, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import rsembed as rs


def collection_of(num_devices=2, combiner="sum", vocabulary_size=9, features=None, **options):
    table = rs.TableSpec(
        name="t", vocabulary_size=vocabulary_size, embedding_dim=4, combiner=combiner,
        initializer=jax.nn.initializers.ones, optimizer=options.pop("optimizer", rs.optimizers.SGD(0.1)),
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


def test_ids_out_of_range_are_counted_over_all_devices():
    collection = collection_of(bounds_check="ignore")
    state = collection.init(jax.random.key(0))
    batch = {"f": np.asarray([[1, 9], [-1, 3], [-7, 2], [8, 8]])}
    activations, statistics = collection.lookup(state, batch, return_statistics=True)
    assert (int(statistics.num_ids["f"]), int(statistics.num_out_of_range["f"])) == (5, 2)
    np.testing.assert_array_equal(activations["f"][:, 0], [1, 1, 1, 2])

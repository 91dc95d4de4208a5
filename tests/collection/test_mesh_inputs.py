"""What a mesh accepts as a batch and as options, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from tests.world import mesh_of


def collection_of(num_devices=2, combiner="sum", vocabulary_size=9, features=None, **options):
    table = rs.TableSpec("t", vocabulary_size, 4, combiner=combiner,
        initializer=jax.nn.initializers.ones, optimizer=options.pop("optimizer", rs.optimizers.SGD(0.1)),
    )  # fmt: skip
    mesh = mesh_of(num_devices)
    return rs.EmbeddingCollection(rs.FeatureSpec("f", table), mesh=mesh, **options)


def test_lists_and_bags_become_a_list_with_a_part_for_each_device():
    collection = collection_of()
    rows = [[3, 1, 2], [], [4], [5, 0]]
    batch = collection.prepare({"f": rows})
    (listed,) = batch.lists.values()
    assert_array_equal(listed.ids, [3, 1, 2, -1, -1, -1, -1, -1, 4, 5, 0, -1, -1, -1, -1, -1])
    assert_array_equal(listed.offsets, [0, 3, 3, 0, 1, 3])
    assert listed.ids.dtype == listed.offsets.dtype == jnp.int32
    assert [shard.data.shape for shard in listed.ids.addressable_shards] == [(8,), (8,)]
    assert batch["f"].to_lists() == rows
    assert "room for 2 x 8" in repr(batch) and "6 ids" in repr(batch)
    assert collection.prepare(batch) is batch
    inside = jax.jit(lambda batch: batch["f"])(batch)
    assert inside.to_lists() == rows

    weights = [[1.0, 2.0, 3.0], [], [4.0], [5.0, 6.0]]
    weighted = collection.prepare({"f": rs.Bags.from_lists(rows, weights)})
    assert_array_equal(weighted["f"].weights, [1, 2, 3, 4, 5, 6])
    assert weighted["f"].to_lists() == rows
    dense = np.asarray([[1], [2]])
    assert_array_equal(collection.prepare({"f": dense})["f"], dense)
    assert collection.prepare({"f": np.asarray([1, 2])})["f"].shape == (2,)


def test_a_feature_without_a_combiner_is_padded_to_its_longest_bag():
    rows = [[3, 1, 2], [], [4], [5, 0]]
    ids = collection_of(combiner="none").prepare({"f": rows})["f"]
    assert_array_equal(ids, [[3, 1, 2, -1], [-1] * 4, [4, -1, -1, -1], [5, 0, -1, -1]])
    assert [shard.data.shape for shard in ids.addressable_shards] == [(2, 4), (2, 4)]

    def width(lengths):
        batch = collection_of(combiner="none").prepare({"f": [[1] * length for length in lengths]})
        return batch["f"].shape[1]

    assert width([5] * 16) == 5  # many bags of one length are not padded
    assert width([5] * 15 + [4]) == 8  # lengths that change need few programs
    assert width([5, 5]) == 8  # a coincidence
    assert width([0] * 16) == 1


@pytest.mark.parametrize(
    ("placement", "storage"),
    [
        *((placement, None) for placement in ("row", "table", "column", "replicated")),
        ("row", rs.Hashed()),
        ("row", rs.HostCached(cache_rows=64)),
    ],
)
def test_ragged_features_have_the_numbers_of_one_device(placement, storage):
    tables = {}
    for name, combiner in (("a", "mean"), ("b", "sum"), ("c", "sqrtn")):
        tables[name] = rs.TableSpec(
            name, 11, 8, combiner=combiner, optimizer=rs.optimizers.Adagrad(0.3), storage=storage
        )
    features = [rs.FeatureSpec(name, table) for name, table in tables.items()]
    features.append(rs.FeatureSpec("again", tables["b"]))
    features.append(rs.FeatureSpec("array", tables["c"]))
    mesh = mesh_of(4)
    collections = (
        rs.EmbeddingCollection(features),
        rs.EmbeddingCollection(features, mesh=mesh, placement=placement),
    )
    results = []
    for collection in collections:
        rng = np.random.default_rng(0)
        state, update = collection.init(jax.random.key(0)), jax.jit(collection.update)
        lengths = rng.integers(0, 4, (4, 8))
        lengths[:, 2:4] = 0  # a device without any id
        found = []
        for _ in range(3):
            batch = {"array": rng.integers(-1, 11, (8, 2))}
            for name, own in zip(("a", "b", "c", "again"), lengths, strict=True):
                batch[name] = [rng.integers(0, 11, n).tolist() for n in own]
            weights = [rng.uniform(0.5, 2.0, len(ids)).tolist() for ids in batch["c"]]
            batch["c"] = rs.Bags.from_lists(batch["c"], weights)
            prepared = collection.prepare(batch)
            state = collection.prefetch(state, prepared)
            activations, statistics = collection.lookup(state, prepared, return_statistics=True)
            found += [activations, statistics.num_ids, statistics.num_out_of_range]
            gradients = jax.tree.map(lambda x: x - 1.0, activations)
            state = update(state, prepared, gradients)
        results.append((found, collection.tables(state), collection.slots(state)))
    for many, one in zip(*map(jax.tree.leaves, reversed(results)), strict=True):
        assert_allclose(many, one, rtol=1e-4, atol=2e-5)


def test_one_long_bag_pads_no_other_bag_and_few_programs_serve_a_stream():
    table = rs.TableSpec("t", 1000, 4)
    mesh = mesh_of(4)
    collection = rs.EmbeddingCollection(
        [rs.FeatureSpec(f"f{k}", table) for k in range(8)], mesh=mesh
    )
    rng = np.random.default_rng(0)

    def prepared(long_bag):
        batch = {}
        for name in collection.features:
            lengths = rng.geometric(0.25, 128)
            if name == "f3":
                lengths[7] = max(lengths[7], long_bag)
            batch[name] = rs.Bags.from_lengths(rng.integers(0, 1000, lengths.sum()), lengths)
        return collection.prepare(batch)

    batches = [prepared(0) for _ in range(16)]
    rooms = [batch.lists["t"].ids.shape[0] for batch in batches]
    assert len(set(rooms)) <= 3
    counts = [np.asarray(batch.lists["t"].offsets).reshape(4, -1)[:, -1] for batch in batches]
    assert sum(own.sum() for own in counts) >= 0.6 * sum(rooms)
    assert prepared(5000).lists["t"].ids.shape[0] <= 4 * 9 / 8 * (
        max(own.max() for own in counts) + 5000
    )


def test_a_prepared_batch_of_another_mesh_is_prepared_again():
    rows = [[3, 1, 2], [], [4], [5, 0]]
    prepared = collection_of(4).prepare({"f": rows})
    collection = collection_of(2)
    found = collection.lookup(collection.init(jax.random.key(0)), prepared)["f"]
    assert_array_equal(found[:, 0], [3, 0, 1, 2])
    with pytest.raises(
        ValueError, match="cannot be split inside jit; bring the batch into canonical form"
    ):
        jax.jit(collection.prepare)(prepared)


def test_batches_of_a_mesh_stack_for_a_scan():
    collection = collection_of()
    batches = [collection.prepare({"f": rows}) for rows in ([[1], [2, 2]], [[3, 3, 3], []])]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    state = collection.init(jax.random.key(0))
    _, found = jax.jit(
        lambda b: jax.lax.scan(lambda _, own: (None, collection.lookup(state, own)), None, b)
    )(stacked)
    assert_array_equal(found["f"][..., 0], [[1, 2], [3, 0]])
    with pytest.raises(ValueError, match="feature 'f': several batches are stacked here"):
        stacked["f"]


def test_ids_out_of_range_are_counted_over_all_devices():
    collection = collection_of(bounds_check="ignore")
    state = collection.init(jax.random.key(0))
    batch = {"f": np.asarray([[1, 9], [-1, 3], [-7, 2], [8, 8]])}
    activations, statistics = collection.lookup(state, batch, return_statistics=True)
    assert (int(statistics.num_ids["f"]), int(statistics.num_out_of_range["f"])) == (5, 2)
    assert_array_equal(activations["f"][:, 0], [1, 1, 1, 2])

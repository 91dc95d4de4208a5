"""Batches and options that a mesh accepts or refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import rsembed as rs
from tests.world import assert_close, mesh_of


def collection_of(num_devices=2, combiner="sum", **options):
    table = rs.TableSpec("t", 9, 4, combiner=combiner, initializer=jax.nn.initializers.ones)
    return rs.EmbeddingCollection(rs.FeatureSpec("f", table), mesh=mesh_of(num_devices), **options)


def test_lists_and_bags_become_a_list_with_a_part_for_each_device():
    collection = collection_of()
    rows = [[3, 1, 2], [], [4], [5, 0]]
    batch = collection.prepare({"f": rows})
    (listed,) = batch.lists.values()
    assert_array_equal(listed.ids, [3, 1, 2, -1, -1, -1, -1, -1, 4, 5, 0, -1, -1, -1, -1, -1])
    assert_array_equal(listed.offsets, [0, 3, 3, 0, 1, 3])
    assert listed.ids.dtype == listed.offsets.dtype == jnp.int32
    assert [shard.data.shape for shard in listed.ids.addressable_shards] == [(8,), (8,)]
    assert "room for 2 x 8" in repr(batch) and "6 ids" in repr(batch)
    assert collection.prepare(batch) is batch
    inside = jax.jit(lambda batch: batch["f"])(batch)
    assert batch["f"].to_lists() == inside.to_lists() == rows

    weights = [[1.0, 2.0, 3.0], [], [4.0], [5.0, 6.0]]
    weighted = collection.prepare({"f": (rows, weights)})["f"]
    assert_array_equal(weighted.weights, [1, 2, 3, 4, 5, 6])
    assert weighted.to_lists() == rows
    for dense in (np.asarray([[1], [2]]), np.asarray([1, 2])):
        found = collection.prepare({"f": dense})["f"]
        assert found.shape == dense.shape
        assert_array_equal(found, dense)


def test_a_feature_without_a_combiner_is_padded_to_its_longest_bag():
    rows = [[3, 1, 2], [], [4], [5, 0]]
    ids = collection_of(combiner="none").prepare({"f": rows})["f"]
    assert_array_equal(ids, [[3, 1, 2, -1], [-1] * 4, [4, -1, -1, -1], [5, 0, -1, -1]])
    assert [shard.data.shape for shard in ids.addressable_shards] == [(2, 4), (2, 4)]

    def width(lengths):
        batch = collection_of(combiner="none").prepare({"f": [[1] * length for length in lengths]})
        return batch["f"].shape[1]

    # Many bags of the same length are not padded.
    assert width([5] * 16) == 5
    # Different lengths are padded, so that few programs are compiled.
    assert width([5] * 15 + [4]) == 8
    # A few bags of the same length are padded, because their length can change.
    assert width([5, 5]) == 8
    assert width([4, 1]) == 4
    assert width([0] * 16) == 1


@pytest.mark.slow_rows("row-storage5")
@pytest.mark.parametrize(
    ("placement", "storage"),
    [
        *((placement, None) for placement in ("row", "table", "column", "replicated")),
        ("row", rs.Hashed()),
        ("row", rs.HostCached(cache_rows=64)),
    ],
)
def test_ragged_features_have_the_numbers_of_one_device(placement, storage):
    # Number of invalid ids on each side of the table that can be drawn.
    num_outside = 0 if isinstance(storage, rs.Hashed) else 2
    rule = rs.optimizers.Adagrad(0.3)
    a, b, c = (
        rs.TableSpec(combiner, 11, 8, combiner=combiner, optimizer=rule, storage=storage)
        for combiner in ("mean", "sum", "sqrtn")
    )
    tables = {"a": a, "b": b, "c": c, "b_again": b, "array": c}
    features = [rs.FeatureSpec(name, table) for name, table in tables.items()]
    results = []
    for options in ({}, {"mesh": mesh_of(4), "placement": placement}):
        collection = rs.EmbeddingCollection(features, bounds_check="ignore", **options)
        rng = np.random.default_rng(0)
        state, update = collection.init(jax.random.key(0)), jax.jit(collection.update)
        lengths = rng.integers(0, 4, (4, 8))
        # One device has no ids.
        lengths[:, 2:4] = 0
        outputs = []
        for _ in range(3):
            batch = {}
            for name, own in zip(("a", "b", "c", "b_again"), lengths, strict=True):
                ids = rng.integers(0, 11, own.sum())
                weights = rng.uniform(0.5, 2.0, ids.size) if name == "c" else None
                batch[name] = rs.Bags.from_lengths(ids, own, weights)
            batch["array"] = rng.integers(-1 - num_outside, 11 + num_outside, (8, 2))
            prepared = collection.prepare(batch)
            state = collection.prefetch(state, prepared)
            activations, statistics = collection.lookup(state, prepared, return_statistics=True)
            outputs.append((activations, statistics.num_ids, statistics.num_out_of_range))
            state = update(state, prepared, jax.tree.map(lambda x: x - 1.0, activations))
        results.append((outputs, collection.tables(state), collection.slots(state)))
    assert_close(*results, rtol=1e-4, atol=2e-5)


def test_one_long_bag_pads_no_other_bag_and_few_programs_serve_a_stream():
    table = rs.TableSpec("t", 1000, 4)
    features = [rs.FeatureSpec(f"f{k}", table) for k in range(8)]
    collection = rs.EmbeddingCollection(features, mesh=mesh_of(4))
    rng = np.random.default_rng(0)

    def list_of(long_bag):
        """Padded size of the list of a batch, and number of ids of each device in it."""
        batch = {}
        for name in collection.features:
            lengths = rng.geometric(0.25, 128)
            if name == "f3":
                lengths[7] += long_bag
            batch[name] = rs.Bags.from_lengths(rng.integers(0, 1000, lengths.sum()), lengths)
        listed = collection.prepare(batch).lists["t"]
        return listed.ids.size, np.asarray(listed.offsets).reshape(4, -1)[:, -1]

    rooms, counts = zip(*(list_of(0) for _ in range(16)), strict=True)
    assert len(set(rooms)) <= 3
    assert np.sum(counts) >= 0.6 * sum(rooms)
    room, _ = list_of(5000)
    assert room <= 4 * 9 / 8 * (np.max(counts) + 5000)


def test_a_prepared_batch_of_another_mesh_is_prepared_again():
    rows = [[3, 1, 2], [], [4], [5, 0]]
    prepared = collection_of(4).prepare({"f": rows})
    collection = collection_of(2)
    found = collection.lookup(collection.init(jax.random.key(0)), prepared)["f"]
    assert_array_equal(found[:, 0], [3, 0, 1, 2])


def test_batches_of_a_mesh_stack_for_a_scan():
    collection = collection_of()
    batches = [collection.prepare({"f": rows}) for rows in ([[1], [2, 2]], [[3, 3, 3], []])]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    state = collection.init(jax.random.key(0))
    _, found = jax.lax.scan(lambda _, batch: (None, collection.lookup(state, batch)), None, stacked)
    assert_array_equal(found["f"][..., 0], [[1, 2], [3, 0]])
    with pytest.raises(ValueError, match="feature 'f': several batches are stacked here"):
        stacked["f"]

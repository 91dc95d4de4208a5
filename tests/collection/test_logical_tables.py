"""Tables and slots by name, taken out of a state."""

import dataclasses

import jax
import numpy as np
import pytest

import rsembed as rs
from rsembed.tt import TensorTrain


@pytest.mark.parametrize(("num_devices", "placement"), [(None, None), (1, "row"), (4, "row"), (4, "replicated")])
def test_tables_and_slots_outlive_the_state_they_came_from(num_devices, placement):
    rule = rs.AdagradOptimizerSpec(0.1)
    dense = rs.TableSpec(name="a", vocabulary_size=16, embedding_dim=8, optimizer=rule)
    train = dataclasses.replace(dense, name="b", storage=TensorTrain((2, 2)))
    placements = {"a": placement, "b": "replicated"} if num_devices else None
    mesh = None if num_devices is None else jax.make_mesh((num_devices,), ("x",), devices=jax.devices()[:num_devices])
    features = [rs.FeatureSpec(name=own.name, table_spec=own) for own in (dense, train)]
    collection = rs.EmbeddingCollection(features, mesh=mesh, placement=placements)
    state = collection.init(jax.random.key(0))
    found = collection.tables(state), collection.slots(state)
    before = jax.tree.map(np.array, found)
    for leaf in jax.tree.leaves((state.tables, state.slots)):
        leaf.delete()
    jax.tree.map(np.testing.assert_array_equal, found, before)


STORAGES = {"dense": None, "hashed": rs.Hashed(), "host cached": rs.HostCached(cache_rows=8)}


@pytest.mark.parametrize("source", STORAGES)
@pytest.mark.parametrize("target", STORAGES)
def test_a_table_moves_from_any_storage_to_any_other(source, target):
    def collection_of(storage):
        table = rs.TableSpec(name="t", vocabulary_size=16, embedding_dim=4, storage=storage)
        return rs.EmbeddingCollection([rs.FeatureSpec(name="f", table_spec=table)])

    collections = collection_of(STORAGES[source]), collection_of(STORAGES[target])
    values = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    first = collections[0].with_tables(collections[0].init(jax.random.key(0)), {"t": values})
    second = collections[1].with_tables(collections[1].init(jax.random.key(1)), collections[0].tables(first))
    found = collections[1].tables(second)["t"]
    np.testing.assert_array_equal(found["values"] if target == "hashed" else found, values)


def test_rows_by_key_that_a_table_without_keys_cannot_have_are_refused():
    table = rs.TableSpec(name="t", vocabulary_size=16, embedding_dim=4)
    collection = rs.EmbeddingCollection([rs.FeatureSpec(name="f", table_spec=table)])
    state = collection.init(jax.random.key(0))
    some = collection.with_tables(state, {"t": {"keys": np.array([3, 1]), "values": np.ones((2, 4))}})
    changed = (np.asarray(collection.tables(some)["t"]) == 1).all(axis=1)
    assert changed.tolist() == [row in (1, 3) for row in range(16)]
    with pytest.raises(ValueError, match=r"table 't' has 16 rows, none for key 16 \(1 such keys\); hash them"):
        collection.with_tables(state, {"t": {"keys": np.array([3, 16]), "values": np.ones((2, 4))}})
    with pytest.raises(ValueError, match=r"takes rows by key as 'keys' \[n\] and 'values' \[n, 4\]"):
        collection.with_tables(state, {"t": {"keys": np.array([3]), "values": np.ones((2, 4))}})

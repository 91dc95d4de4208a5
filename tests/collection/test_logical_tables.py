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
